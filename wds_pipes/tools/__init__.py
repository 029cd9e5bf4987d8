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
    from wds_pipes.tools.findings import Finding, VerifyReport
    from wds_pipes.tools.looking import Shown, cat, head, ls
    from wds_pipes.tools.reading import Found, get
    from wds_pipes.tools.selecting import select
    from wds_pipes.tools.speed import Speed, bench
    from wds_pipes.tools.states import Difference, PlacedState, diff_states, read_states
    from wds_pipes.tools.summary import Summary, info
    from wds_pipes.tools.verifying import verify

__all__ = [
    "Difference",
    "Finding",
    "Found",
    "PlacedState",
    "Shown",
    "Speed",
    "Summary",
    "VerifyReport",
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
    "Difference": "tools.states",
    "Finding": "tools.findings",
    "Found": "tools.reading",
    "PlacedState": "tools.states",
    "Shown": "tools.looking",
    "Speed": "tools.speed",
    "Summary": "tools.summary",
    "VerifyReport": "tools.findings",
    "bench": "tools.speed",
    "cat": "tools.looking",
    "diff_states": "tools.states",
    "get": "tools.reading",
    "head": "tools.looking",
    "info": "tools.summary",
    "ls": "tools.looking",
    "read_states": "tools.states",
    "select": "tools.selecting",
    "verify": "tools.verifying",
}

if not _TYPE_CHECKING:  # type checkers see only the names above

    def __getattr__(name: str) -> _Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        return getattr(_import_module(f"wds_pipes.{_MODULE_OF[name]}"), name)
