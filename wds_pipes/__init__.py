"""Stream training data into PyTorch from WebDataset tar shards, and resume exactly.

Importing this package makes the stages methods of every torch IterDataPipe: ``ShardList(urls).open_shards().load_tar().group_by_key()``. Without torch
only ``wds_pipes.tar``, ``wds_pipes.stages`` and ``wds_pipes.testing`` can be used.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from wds_pipes.errors import CacheError, DecodeError, SampleError, ShardError, ShardWarning, StateError, WdsError, WorkerError
from wds_pipes.stage import Stage, describe_state
from wds_pipes.tar import ShardWriter, TarWriter

if TYPE_CHECKING:
    from wds_pipes.datapipes import ShardList, WdsPipe, as_dataset, load_state_dict, mix, register_stage, state_dict
    from wds_pipes.io.cache import ShardCache
    from wds_pipes.loader import PipeLoader, merge_states

_NEED_TORCH = {
    "datapipes": ("ShardList", "WdsPipe", "as_dataset", "load_state_dict", "mix", "register_stage", "state_dict"),
    "loader": ("PipeLoader", "merge_states"),
}

try:
    import torch as _torch  # noqa: F401 - only to see whether it is there
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
else:
    for _module, _names in _NEED_TORCH.items():
        globals().update({_name: getattr(_import_module(f"wds_pipes.{_module}"), _name) for _name in _names})

__all__ = [
    "CacheError",
    "DecodeError",
    "PipeLoader",
    "SampleError",
    "ShardCache",
    "ShardError",
    "ShardList",
    "ShardWarning",
    "ShardWriter",
    "Stage",
    "StateError",
    "TarWriter",
    "WdsError",
    "WdsPipe",
    "WorkerError",
    "as_dataset",
    "describe_state",
    "load_state_dict",
    "merge_states",
    "mix",
    "register_stage",
    "state_dict",
]


def __getattr__(name: str) -> Any:
    if name == "ShardCache":  # locks files in ways that not every system has
        return _import_module("wds_pipes.io.cache").ShardCache
    if any(name in names for names in _NEED_TORCH.values()):
        raise AttributeError(f"wds_pipes.{name} needs torch, which is not installed: pip install torch")
    raise AttributeError(f"module 'wds_pipes' has no attribute {name!r}")
