"""Stream training data into PyTorch from WebDataset tar shards, and resume exactly.

The stages are methods of every torch IterDataPipe:
``ShardList(urls).open_shards().load_tar().group_by_key()``. Without torch, only ``wds_pipes.tar``,
``wds_pipes.tools``, ``wds_pipes.stages`` and ``wds_pipes.testing`` can be used.

The import is fast: each public name is loaded at its first use. The methods are registered with the
first pipe of this package, or by this import if torch was imported before; ``import
wds_pipes.datapipes`` registers them in any case, for chains that begin with a pipe of torch's. On
such a pipe, a method that another package has registered under the same name takes precedence.
"""

import sys as _sys
from importlib import import_module as _import_module
from typing import Any as _Any

# The public names of each module. tests/support/typing_stubs.py writes __init__.pyi from them, for
# type checkers and editors.
_NAMES = {
    "codecs.codec": "Codec",
    "codecs.images": "image_size",
    "codecs.media": "AudioReader VideoReader audio video",
    "codecs.table": "register_codec",
    "core.reads_again": "FlatMap PutBackIterator",
    "core.row_source": "RowSource",
    "core.stage": "Stage",
    "datapipes": "SampleList ShardList WdsPipe join load_state_dict mix register_stage state_dict",
    "dataset": "as_dataset",
    "display.states": "describe_state",
    "errors": "CacheError DecodeError SampleError ShardError ShardWarning StateError WdsError WorkerError",
    "indexed": "IndexedShards",
    "io.cache.shard_cache": "ShardCache",
    "loader.on_device": "DecodeOnDevice",
    "loader.pipe_loader": "PipeLoader",
    "loader.ranks": "rank",
    "loader.restoring": "merge_states",
    "loader.sample_order": "SampleOrder",
    "loader.stats": "describe_stats",
    "stages.map_samples": "DROP",
    "stages.sample_list": "SampleRef",
    "stages.shard_source": "ShardRef",
    "tar": "ShardWriter TarWriter",
    "tar.located": "split_by_key",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)  # noqa: PLE0605


def __getattr__(name: str) -> _Any:
    if name not in _MODULE_OF:
        from importlib.util import find_spec

        from wds_pipes.core.options import unknown

        if name.isidentifier() and not name.startswith("_") and find_spec(f"wds_pipes.{name}") is not None:
            return _import_module(f"wds_pipes.{name}")
        raise AttributeError(unknown(f"module {__name__!r} has no attribute", name, __all__), name=name)
    try:
        value = getattr(_import_module(f"wds_pipes.{_MODULE_OF[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise AttributeError(
            f"wds_pipes.{name} needs torch, which is not installed: pip install torch", name=name
        ) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if _sys.modules.get("torch") is not None:  # None blocks the import
    _import_module("wds_pipes.datapipes")  # which registers the methods of torch's pipes
