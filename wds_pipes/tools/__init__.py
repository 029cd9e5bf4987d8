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
- ``progress``: how far a command is. ``interrupts``: Ctrl-C in a command.
- ``demo``: a training that is killed and goes on.

A program can also define a job of its own: its tasks have outputs whose names are known beforehand,
and can be run again at any time with the same result. The directory of the outputs says which tasks
are finished, and from which inputs.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

# The public names of each module. tests/support/typing_stubs.py writes __init__.pyi from them, for
# type checkers and editors.
_NAMES = {
    "tar.writer": "write_shard",
    "tools.creating": "convert create",
    "tools.diagnosing": "Diagnosis doctor",
    "tools.downloading": "download",
    "tools.exporting": "export",
    "tools.jobs": "Engine Job Outcome Place Report Task fingerprint run",
    "tools.looking": "Shown Summary cat head info ls",
    "tools.outputs": "JobOptions shard_files",
    "tools.ray_engine": "on_ray",
    "tools.reading": "Found get",
    "tools.reordering": "ReorderOptions concat mix reshard shuffle sort split",
    "tools.repairing": "repair",
    "tools.rewriting": "dedup filter join map",
    "tools.selecting": "select",
    "tools.states": "Difference PlacedState SameData diff_states read_states same_data",
    "tools.training": "Proof loader_of prove",
    "tools.verifying": "Finding VerifyReport verify",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> _Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
    return getattr(_import_module(f"wds_pipes.{_MODULE_OF[name]}"), name)
