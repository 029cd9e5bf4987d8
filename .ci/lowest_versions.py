"""Print the lowest versions that pyproject.toml allows for what the package and the extras of its
users need, as pip takes them.

Not torch's, whose builds without CUDA are few.
"""

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

EXTRAS = (
    *("s3", "gcs", "http", "formats", "images", "deep", "audio", "video", "parquet", "meta", "browse", "demo"),
    "lightning",
)

project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
for line in sorted(
    {*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])}
):
    requirement = Requirement(line)
    if requirement.name != "torch":
        lowest = next(bound.version for bound in requirement.specifier if bound.operator == ">=")
        sys.stdout.write(f"{requirement.name}=={lowest}{f'; {requirement.marker}' if requirement.marker else ''}\n")
