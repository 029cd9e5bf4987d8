"""Make, mend and look at data sets of shards: what the commands of ``wds-pipes`` do, as functions.

The functions have the options of the commands; they return what the commands print. Each is loaded
at its first use. A pipeline needs none of them.

- ``looking``, ``reading``, ``describing``: ls, head, cat and get: the samples of shards, and their
  fields in words.
- ``summary``: info. ``verifying``, ``findings``: verify.
- ``selecting``: keys by conditions over tables of metadata.
- ``states``: the states in checkpoint files. ``speed``: bench.
- ``progress``: how far a command is.
- ``demo``: a training that is killed and goes on.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from wds_pipes.tools.findings import Finding, Report
    from wds_pipes.tools.looking import cat, head, ls
    from wds_pipes.tools.reading import get
    from wds_pipes.tools.selecting import select
    from wds_pipes.tools.speed import bench
    from wds_pipes.tools.states import diff_states, read_states
    from wds_pipes.tools.summary import info
    from wds_pipes.tools.verifying import verify

__all__ = [
    "Finding",
    "Report",
    "bench",
    "cat",
    "diff_states",
    "get",
    "head",
    "info",
    "ls",
    "read_states",
    "select",
    "verify",
]

# The module of each public name.
_MODULE_OF = {
    "Finding": "findings",
    "Report": "findings",
    "bench": "speed",
    "cat": "looking",
    "diff_states": "states",
    "get": "reading",
    "head": "looking",
    "info": "summary",
    "ls": "looking",
    "read_states": "states",
    "select": "selecting",
    "verify": "verifying",
}

if not _TYPE_CHECKING:  # type checkers see only the names above

    def __getattr__(name: str) -> _Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        return getattr(_import_module(f"wds_pipes.tools.{_MODULE_OF[name]}"), name)
