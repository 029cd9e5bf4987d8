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
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from wds_pipes import checkpoint as checkpoint
    from wds_pipes import datapipes as datapipes
    from wds_pipes import display as display
    from wds_pipes import io as io
    from wds_pipes import lightning as lightning
    from wds_pipes import nodes as nodes
    from wds_pipes import stages as stages
    from wds_pipes import tar as tar
    from wds_pipes import testing as testing
    from wds_pipes import tools as tools
    from wds_pipes.codecs.codec import Codec
    from wds_pipes.codecs.images import image_size
    from wds_pipes.codecs.media import AudioReader, VideoReader, audio, video
    from wds_pipes.codecs.table import register_codec
    from wds_pipes.core.reads_again import FlatMap, PutBackIterator
    from wds_pipes.core.row_source import RowSource
    from wds_pipes.core.stage import Stage
    from wds_pipes.datapipes import (
        SampleList,
        ShardList,
        WdsPipe,
        join,
        load_state_dict,
        mix,
        register_stage,
        state_dict,
    )
    from wds_pipes.dataset import as_dataset
    from wds_pipes.display.states import describe_state
    from wds_pipes.errors import (
        CacheError,
        DecodeError,
        SampleError,
        ShardError,
        ShardWarning,
        StateError,
        WdsError,
        WorkerError,
    )
    from wds_pipes.indexed import IndexedShards
    from wds_pipes.io.cache.shard_cache import ShardCache
    from wds_pipes.loader.on_device import DecodeOnDevice
    from wds_pipes.loader.pipe_loader import PipeLoader
    from wds_pipes.loader.ranks import rank
    from wds_pipes.loader.restoring import merge_states
    from wds_pipes.loader.sample_order import SampleOrder
    from wds_pipes.loader.stats import describe_stats
    from wds_pipes.stages.map_samples import DROP
    from wds_pipes.stages.sample_list import SampleRef
    from wds_pipes.stages.shard_source import ShardRef
    from wds_pipes.tar import ShardWriter, TarWriter
    from wds_pipes.tar.located import split_by_key

__all__ = [
    "DROP",
    "AudioReader",
    "CacheError",
    "Codec",
    "DecodeError",
    "DecodeOnDevice",
    "FlatMap",
    "IndexedShards",
    "PipeLoader",
    "PutBackIterator",
    "RowSource",
    "SampleError",
    "SampleList",
    "SampleOrder",
    "SampleRef",
    "ShardCache",
    "ShardError",
    "ShardList",
    "ShardRef",
    "ShardWarning",
    "ShardWriter",
    "Stage",
    "StateError",
    "TarWriter",
    "VideoReader",
    "WdsError",
    "WdsPipe",
    "WorkerError",
    "as_dataset",
    "audio",
    "describe_state",
    "describe_stats",
    "image_size",
    "join",
    "load_state_dict",
    "merge_states",
    "mix",
    "rank",
    "register_codec",
    "register_stage",
    "split_by_key",
    "state_dict",
    "video",
]

# The module of each public name.
_MODULE_OF = {
    "DROP": "stages.map_samples",
    "AudioReader": "codecs.media",
    "CacheError": "errors",
    "Codec": "codecs.codec",
    "DecodeError": "errors",
    "DecodeOnDevice": "loader.on_device",
    "FlatMap": "core.reads_again",
    "IndexedShards": "indexed",
    "PipeLoader": "loader.pipe_loader",
    "PutBackIterator": "core.reads_again",
    "SampleError": "errors",
    "RowSource": "core.row_source",
    "SampleList": "datapipes",
    "SampleOrder": "loader.sample_order",
    "SampleRef": "stages.sample_list",
    "ShardCache": "io.cache.shard_cache",
    "ShardError": "errors",
    "ShardList": "datapipes",
    "ShardRef": "stages.shard_source",
    "ShardWarning": "errors",
    "ShardWriter": "tar",
    "Stage": "core.stage",
    "StateError": "errors",
    "TarWriter": "tar",
    "VideoReader": "codecs.media",
    "WdsError": "errors",
    "WdsPipe": "datapipes",
    "WorkerError": "errors",
    "as_dataset": "dataset",
    "audio": "codecs.media",
    "describe_state": "display.states",
    "describe_stats": "loader.stats",
    "image_size": "codecs.images",
    "join": "datapipes",
    "load_state_dict": "datapipes",
    "merge_states": "loader.restoring",
    "mix": "datapipes",
    "rank": "loader.ranks",
    "register_codec": "codecs.table",
    "register_stage": "datapipes",
    "split_by_key": "tar.located",
    "state_dict": "datapipes",
    "video": "codecs.media",
}

if not _TYPE_CHECKING:  # type checkers see only the names above

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
