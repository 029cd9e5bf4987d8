"""The tools stand apart: training needs none of them, nor their libraries."""

import re
from pathlib import Path

import wds_pipes

OF_TOOLS = (
    r"^\s*(?:(?:import|from) (?:wds_pipes\.tools|wds_pipes\.cli|click|duckdb|lmdb|pyarrow|ray|tqdm)\b"
    r"|from (?:wds_pipes|\.+) import (?!tools as tools$)[^#\n]*\b(?:tools|cli)\b)"  # but for type checkers
)


def test_only_the_tools_import_the_tools_and_their_libraries():
    """Also inside of functions."""
    package = Path(wds_pipes.__file__).parent
    for path in package.rglob("*.py"):
        name = path.relative_to(package)
        if name.parts[0] not in ("tools", "browse", "cli", "__main__.py"):
            assert not re.findall(OF_TOOLS, path.read_text(), re.MULTILINE), name
