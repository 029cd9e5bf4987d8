"""The tools stand apart: training needs none of them, nor their libraries."""

import re
from pathlib import Path

import wds_pipes

LIBRARIES = r"^[ \t]*(?:import|from) (?:duckdb|lmdb|pyarrow|ray|tqdm)\b"
TOOLS = (
    r"^[ \t]*(?:(?:import|from) (?:wds_pipes\.(?:tools|browse|cli)|click)\b"
    r"|from (?:wds_pipes|\.+) import (?!tools as tools$)[^#\n]*\b(?:tools|browse|cli)\b)"  # but for type checkers
)


def test_only_the_tools_import_the_tools_and_their_libraries():
    """Also inside of functions. What shows the tools imports no libraries of theirs: a pipeline,
    say, never evaluates SQL.
    """
    package = Path(wds_pipes.__file__).parent
    for path in package.rglob("*.py"):
        name, text = path.relative_to(package), path.read_text()
        if name.parts[0] != "tools":
            assert not re.findall(LIBRARIES, text, re.MULTILINE), name
        if name.parts[0] not in ("tools", "browse", "cli", "__main__.py"):
            assert not re.findall(TOOLS, text, re.MULTILINE), name
