# Written by tests/support/typing_stubs.py: do not edit.
"""What editors and type checkers know of the steps; no code imports it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, Generic, Literal, overload

from typing_extensions import TypeVar

from wds_pipes.codecs.codec import Codec, Decoder, Encoder, Handler
from wds_pipes.codecs.resizing import Crop, Fit, Size
from wds_pipes.core.reads_again import PutBackIterator
from wds_pipes.core.tolerant import OnError
from wds_pipes.datapipes.base import IterDataPipe
from wds_pipes.datapipes.pipe import WdsPipe
from wds_pipes.io.cache.shard_cache import ShardCache
from wds_pipes.io.urls import Urls
from wds_pipes.stages.open_shards import OpenedShard
from wds_pipes.stages.sample_list import SampleRef
from wds_pipes.stages.shard_source import ShardRef
from wds_pipes.tar import TarMember
from wds_pipes.tar.keys import KeySplit
from wds_pipes.tar.located import Selection

T_co = TypeVar("T_co", covariant=True, default=Any)

class Methods(Generic[T_co]):
    """The steps as methods of pipes; at run time ``register_stage`` makes them."""

    def batch_samples(
        self, size: int, *, drop_last: bool = False, collate: Callable[[list[Any]], Any] | str | None = None
    ) -> WdsPipe[Any]:
        """Collect samples into batches."""

    def bucket_samples(
        self,
        length: str | Callable[[Any], int],
        batch_size: int | Sequence[int] | None = None,
        *,
        budget: int | None = None,
        boundaries: Sequence[int] | None = None,
        sort: bool | None = None,
        aligned: Sequence[str] = (),
        window: int = 1024,
        pad: float | Mapping[str, float] = 0,
    ) -> WdsPipe[Any]:
        """Make batches of samples of like length."""

    def cache_shards(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        max_bytes: int | str | None = None,
        verify: bool = True,
    ) -> WdsPipe[T_co]:
        """Keep remote shards on a local disk, for the ``open_shards`` after it."""

    def decode_by_ext(
        self,
        *specs: str | Mapping[str, Decoder | Codec] | Handler,
        size: Size | None = None,
        fit: Fit = "cover",
        crop: Crop | None = None,
        resize: int | None = None,
        scale: tuple[float, float] | None = None,
        ratio: tuple[float, float] | None = None,
        flip: bool = False,
        boxes: bool = False,
        upright: bool = False,
        pages: Literal["all"] | None = None,
        sample_rate: int | None = None,
        mono: bool = False,
        only: Iterable[str] | None = None,
        partial: bool = False,
        must_decode: bool = False,
        allow_pickle: bool = False,
        max_image_pixels: int = 1 << 26,
        threads: int | None = None,
        on_error: OnError | None = None,
        max_errors: int | None = None,
    ) -> WdsPipe[dict[str, Any]]:
        """Decode the fields of samples by their extensions."""

    def explode_records(
        self, kind: str, *, field: str | None = None, on_error: OnError | None = None, max_errors: int | None = None
    ) -> WdsPipe[dict[str, Any]]:
        """Make a sample of each record of a field that holds many."""

    def fetch_samples(
        self,
        *,
        fields: Iterable[str] | None = None,
        connections: int = 8,
        readahead_bytes: int = 64 << 20,
        storage_options: dict[str, Any] | None = None,
        cache: ShardCache | str | os.PathLike[str] | None = None,
        key_split: KeySplit = "first-dot",
        on_error: OnError | None = None,
        max_errors: int | None = None,
    ) -> WdsPipe[dict[str, Any]]:
        """Read the samples of a ``SampleList``, in its order."""

    @overload
    def filter_samples(self, predicate: Callable[[T_co], Any]) -> WdsPipe[T_co]:
        """Keep the samples for which a function returns true."""

    @overload
    def filter_samples(self, predicate: Callable[[T_co, Any], Any]) -> WdsPipe[T_co]:
        """Keep the samples for which a function returns true."""

    def group_by_key(
        self,
        *,
        fields: Iterable[str] | None = None,
        key_split: KeySplit = "first-dot",
        on_repeated_key: str = "raise",
        on_error: OnError | None = None,
        max_errors: int | None = None,
    ) -> WdsPipe[dict[str, Any]]:
        """Group neighbouring members with the same key into samples."""

    def interleave_shards(self, count: int) -> WdsPipe[T_co]:
        """Keep several shards open and take one item from each in turn."""

    def load_tar(
        self,
        *,
        max_member_bytes: int = 4 << 30,
        on_truncated: str = "raise",
        on_error: OnError | None = None,
        max_errors: int | None = None,
        concatenated: bool = False,
    ) -> WdsPipe[TarMember]:
        """Read the regular files in the tars of open shards."""

    def map_fields(
        self,
        functions: Mapping[str, Callable[[Any], Any]] | Mapping[int, Callable[[Any], Any]],
        *,
        seed_all: bool = False,
        threads: int | None = None,
        on_error: OnError | None = None,
        max_errors: int | None = None,
    ) -> WdsPipe[Any]:
        """Apply functions to single fields of each sample, or to places of tuples."""

    def map_samples(
        self,
        fn: Callable[..., Any],
        *,
        may_drop: bool = False,
        seed_all: bool = False,
        threads: int | None = None,
        on_error: OnError | None = None,
        max_errors: int | None = None,
    ) -> WdsPipe[Any]:
        """Apply a function to each sample."""

    def open_shards(
        self,
        *,
        storage_options: dict[str, Any] | None = None,
        readahead_bytes: int = 64 << 20,
        connections: int = 8,
        shards_ahead: int = 2,
        retries: int = 10,
        timeout_seconds: float = 120,
        cache: ShardCache | str | os.PathLike[str] | None = None,
        verify: bool | None = None,
        allow_pipe: bool = False,
        on_error: OnError | None = None,
        max_errors: int | None = None,
    ) -> WdsPipe[OpenedShard]:
        """Open the shards at URLs or paths."""

    def pack_samples(
        self,
        length: str | Callable[[Any], int] = "tokens",
        budget: int = 8192,
        *,
        aligned: Sequence[str] = (),
        method: str = "best-fit",
        window: int = 512,
        too_long: str = "error",
        drop_last: bool = False,
        pad: float | Mapping[str, float] | None = None,
    ) -> WdsPipe[Any]:
        """Put samples together to packs of at most ``budget`` tokens."""

    def rename_fields(
        self, names: Mapping[str, str], *, on_error: OnError | None = None, max_errors: int | None = None
    ) -> WdsPipe[dict[str, Any]]:
        """Rename fields of each sample; the others stay as they are."""

    def repeat(self, n: int | None = None) -> WdsPipe[T_co]:
        """Yield the epoch of the source ``n`` times in each epoch."""

    def select_fields(
        self, *fields: str, on_error: OnError | None = None, max_errors: int | None = None
    ) -> WdsPipe[dict[str, Any]]:
        """Keep only some fields of each sample, in the given order."""

    def shuffle_buffer(self, size: int, *, seed: int | None = None) -> WdsPipe[T_co]:
        """Shuffle samples within a moving window."""

    def slice_samples(self, start: int, stop: int | None = None, step: int = 1) -> WdsPipe[T_co]:
        """Yield a slice of each epoch, as ``itertools.islice`` does."""

    def take_samples(self, n: int) -> WdsPipe[T_co]:
        """End each epoch after its first ``n`` samples."""

    def then(self, fn: Callable[[PutBackIterator[Any]], Iterable[Any]], *, keeps_count: bool = False) -> WdsPipe[Any]:
        """Let a generator function make the items of the items before it."""

    def to_tuple(
        self, *fields: str, on_error: OnError | None = None, max_errors: int | None = None
    ) -> WdsPipe[tuple[Any, ...]]:
        """Turn each sample into a tuple of selected fields."""

    def unbatch_samples(self) -> WdsPipe[Any]:
        """Take batches apart into samples, as ``batch_samples`` put them together."""

    def write_shards(
        self,
        pattern: str | os.PathLike[str],
        *,
        max_samples: int = 100000,
        max_bytes: int = 1 << 30,
        offsets: bool = False,
        overwrite: bool = False,
        codecs: Mapping[str, Encoder | Codec] | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> WdsPipe[str]:
        """Write samples into a series of shards, and yield the path of each complete one."""

class BatchSamples(WdsPipe[Any]):
    """Collect samples into batches."""

class BucketSamples(WdsPipe[Any]):
    """Make batches of samples of like length."""

class CacheShards(WdsPipe[T_co]):
    """Keep remote shards on a local disk, for the ``open_shards`` after it."""

class DecodeByExt(WdsPipe[dict[str, Any]]):
    """Decode the fields of samples by their extensions."""

class ExplodeRecords(WdsPipe[dict[str, Any]]):
    """Make a sample of each record of a field that holds many."""

class FetchSamples(WdsPipe[dict[str, Any]]):
    """Read the samples of a ``SampleList``, in its order."""

class FilterSamples(WdsPipe[T_co]):
    """Keep the samples for which a function returns true."""

class GroupByKey(WdsPipe[dict[str, Any]]):
    """Group neighbouring members with the same key into samples."""

class InterleaveShards(WdsPipe[T_co]):
    """Keep several shards open and take one item from each in turn."""

class Join(WdsPipe[dict[str, Any]]):
    """Join the samples of several pipelines by their keys."""

    def __init__(
        self, sources: Mapping[str, IterDataPipe[Any]], *, on_missing: str = "error", prefix: bool = False
    ) -> None: ...

class LoadTar(WdsPipe[TarMember]):
    """Read the regular files in the tars of open shards."""

class MapFields(WdsPipe[Any]):
    """Apply functions to single fields of each sample, or to places of tuples."""

class MapSamples(WdsPipe[Any]):
    """Apply a function to each sample."""

class Mix(WdsPipe[Any]):
    """Mix several pipelines in exact proportions."""

    def __init__(
        self,
        sources: Mapping[str, IterDataPipe[Any]],
        weights: Mapping[str, float | Fraction] | Sequence[float | Fraction] | None = None,
        *,
        by: str | Callable[[Any], int] | None = None,
        schedule: Callable[[int], Mapping[str, float]] | None = None,
        exhausted: str = "stop",
        seed: int | None = None,
        without: Iterable[str] = (),
        changed: bool = False,
    ) -> None: ...

class OpenShards(WdsPipe[OpenedShard]):
    """Open the shards at URLs or paths."""

class PackSamples(WdsPipe[Any]):
    """Put samples together to packs of at most ``budget`` tokens."""

class RenameFields(WdsPipe[dict[str, Any]]):
    """Rename fields of each sample; the others stay as they are."""

class Repeat(WdsPipe[T_co]):
    """Yield the epoch of the source ``n`` times in each epoch."""

class SampleList(WdsPipe[SampleRef]):
    """The source of a pipeline: the samples of indexed shards in one global order."""

    def __init__(
        self,
        urls: Urls,
        *,
        index: bool | str | os.PathLike[str] = True,
        shuffle: bool = False,
        block_samples: int = 1,
        seed: int | None = None,
        where: Selection | None = None,
        exclude: Selection | None = None,
        storage_options: dict[str, Any] | None = None,
        connections: int = 8,
        on_error: OnError = "raise",
        moved: bool = False,
    ) -> None: ...

class SelectFields(WdsPipe[dict[str, Any]]):
    """Keep only some fields of each sample, in the given order."""

class ShardList(WdsPipe[ShardRef]):
    """The source of a pipeline: its shards, each as a ``ShardRef``, whose ``url`` is a str."""

    def __init__(
        self,
        urls: Urls,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        resampled: bool = False,
        weights: str | Sequence[float] | None = None,
        sticky: bool = False,
        samples_per_shard: int | Sequence[int] | None = None,
        index: Urls | bool | None = None,
        empty_check: bool = True,
        storage_options: dict[str, Any] | None = None,
        on_error: OnError = "raise",
        moved: bool = False,
    ) -> None: ...

class ShuffleBuffer(WdsPipe[T_co]):
    """Shuffle samples within a moving window."""

class SliceSamples(WdsPipe[T_co]):
    """Yield a slice of each epoch, as ``itertools.islice`` does."""

class TakeSamples(WdsPipe[T_co]):
    """End each epoch after its first ``n`` samples."""

class Then(WdsPipe[Any]):
    """Let a generator function make the items of the items before it."""

class ToTuple(WdsPipe[tuple[Any, ...]]):
    """Turn each sample into a tuple of selected fields."""

class UnbatchSamples(WdsPipe[Any]):
    """Take batches apart into samples, as ``batch_samples`` put them together."""

class WriteShards(WdsPipe[str]):
    """Write samples into a series of shards, and yield the path of each complete one."""
