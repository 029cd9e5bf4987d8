"""The lowest versions that pyproject.toml allows, as requirements for pip; but torch stays as it is."""

import re
import tomllib

with open("pyproject.toml", "rb") as file:
    project = tomllib.load(file)["project"]
wanted = [
    *project["dependencies"],
    *(line for extra in ("s3", "gcs", "http", "formats", "demo", "lightning") for line in project["optional-dependencies"][extra]),
]
for line in wanted:
    name, version = re.match(r"([\w.]+)>=([\d.]+)", line).groups()
    if name != "torch":
        print(f"{name}=={version}")
