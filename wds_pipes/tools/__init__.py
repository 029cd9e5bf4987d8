"""Make, mend and look at data sets of shards: what the commands of ``wds-pipes`` do, as functions.

The functions have the options of the commands, whose names messages show: ``--max-samples`` is
``max_samples``; ``--from`` and ``--to`` are ``kind``. They return what the commands print. If tasks
of a function fail, it raises WdsError when the others are done; the ``report`` of the error says
which. Each function is loaded at its first use. A pipeline needs none of them.

- ``creating``, ``downloading``, ``exporting``: shards of other data (create, convert), copies, and
  other formats. ``files``, ``sources``, ``rows``: what these read.
- ``rewriting``: each shard becomes another one: filter, map, join and dedup. ``repairing``: repair.
- ``reordering``: samples in another order, or in other shards. ``inputs``: reading them by number.
- ``outputs``: what all that write have in common. ``jobs``: tasks, plans and receipts, and where
  tasks run; ``ray_engine``: on Ray.
- ``looking``, ``reading``: info, ls, head, cat and get: samples, and their fields in words.
- ``verifying``: verify.
- ``selecting``: keys by conditions over tables of metadata.
- ``states``: the states in checkpoint files; ``training``: compares the digests in one with shards,
  and returns the loader of a training, to ask which samples come when.
- ``diagnosing``: doctor.
- ``progress``: how far a command is.
- ``demo``: a training that is killed and goes on.

A program can also define a job of its own: its tasks have outputs whose names are known beforehand,
and can be run again at any time with the same result. The directory of the outputs says which tasks
are finished, and from which inputs.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from wds_pipes.tar.writer import shard_files, write_shard
    from wds_pipes.tools.creating import convert, create
    from wds_pipes.tools.diagnosing import Diagnosis, doctor
    from wds_pipes.tools.downloading import download
    from wds_pipes.tools.exporting import export
    from wds_pipes.tools.jobs import Engine, Job, Outcome, Place, Report, Task, fingerprint, run
    from wds_pipes.tools.looking import Shown, Summary, cat, head, info, ls
    from wds_pipes.tools.outputs import JobOptions
    from wds_pipes.tools.ray_engine import on_ray
    from wds_pipes.tools.reading import Found, get
    from wds_pipes.tools.reordering import ReorderOptions, concat, mix, reshard, shuffle, sort, split
    from wds_pipes.tools.repairing import repair
    from wds_pipes.tools.rewriting import (
        dedup,
        filter,  # noqa: A004
        join,
        map,  # noqa: A004
    )
    from wds_pipes.tools.selecting import select
    from wds_pipes.tools.states import Difference, PlacedState, SameData, diff_states, read_states, same_data
    from wds_pipes.tools.training import Proof, loader_of, prove
    from wds_pipes.tools.verifying import Finding, VerifyReport, verify

__all__ = [
    "Diagnosis",
    "Difference",
    "Engine",
    "Finding",
    "Found",
    "Job",
    "JobOptions",
    "Outcome",
    "Place",
    "PlacedState",
    "Proof",
    "ReorderOptions",
    "Report",
    "SameData",
    "Shown",
    "Summary",
    "Task",
    "VerifyReport",
    "cat",
    "concat",
    "convert",
    "create",
    "dedup",
    "diff_states",
    "doctor",
    "download",
    "export",
    "filter",
    "fingerprint",
    "get",
    "head",
    "info",
    "join",
    "loader_of",
    "ls",
    "map",
    "mix",
    "on_ray",
    "prove",
    "read_states",
    "repair",
    "reshard",
    "run",
    "same_data",
    "select",
    "shard_files",
    "shuffle",
    "sort",
    "split",
    "verify",
    "write_shard",
]

# The module of each public name.
_MODULE_OF = {
    "Diagnosis": "tools.diagnosing",
    "Difference": "tools.states",
    "Engine": "tools.jobs",
    "Finding": "tools.verifying",
    "Found": "tools.reading",
    "Job": "tools.jobs",
    "JobOptions": "tools.outputs",
    "Outcome": "tools.jobs",
    "Place": "tools.jobs",
    "PlacedState": "tools.states",
    "Proof": "tools.training",
    "ReorderOptions": "tools.reordering",
    "Report": "tools.jobs",
    "SameData": "tools.states",
    "Shown": "tools.looking",
    "Summary": "tools.looking",
    "Task": "tools.jobs",
    "VerifyReport": "tools.verifying",
    "cat": "tools.looking",
    "concat": "tools.reordering",
    "convert": "tools.creating",
    "create": "tools.creating",
    "dedup": "tools.rewriting",
    "diff_states": "tools.states",
    "doctor": "tools.diagnosing",
    "download": "tools.downloading",
    "export": "tools.exporting",
    "filter": "tools.rewriting",
    "fingerprint": "tools.jobs",
    "get": "tools.reading",
    "head": "tools.looking",
    "info": "tools.looking",
    "join": "tools.rewriting",
    "loader_of": "tools.training",
    "ls": "tools.looking",
    "map": "tools.rewriting",
    "mix": "tools.reordering",
    "on_ray": "tools.ray_engine",
    "prove": "tools.training",
    "read_states": "tools.states",
    "repair": "tools.repairing",
    "reshard": "tools.reordering",
    "run": "tools.jobs",
    "same_data": "tools.states",
    "select": "tools.selecting",
    "shard_files": "tar.writer",
    "shuffle": "tools.reordering",
    "sort": "tools.reordering",
    "split": "tools.reordering",
    "verify": "tools.verifying",
    "write_shard": "tar.writer",
}

if not _TYPE_CHECKING:  # type checkers see only the names above

    def __getattr__(name: str) -> _Any:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        return getattr(_import_module(f"wds_pipes.{_MODULE_OF[name]}"), name)
