"""FetchSamples: read the samples that a SampleList refers to."""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any

from wds_pipes.core.chain import Chain
from wds_pipes.core.counts import Network
from wds_pipes.core.options import check_count
from wds_pipes.core.stage import Mark, Stage
from wds_pipes.core.tolerant import OnError, Tolerant
from wds_pipes.core.words import listed
from wds_pipes.errors import SampleError, ShardError
from wds_pipes.io.cache.shard_cache import ShardCache
from wds_pipes.io.ranges import Part, Range, RangeReader
from wds_pipes.io.urls import redact, with_origins
from wds_pipes.stages.cache_shards import as_cache
from wds_pipes.stages.fields import Sample, read_names
from wds_pipes.stages.sample_list import SampleRef
from wds_pipes.stages.shard_source import ShardSource, allowed_origins
from wds_pipes.tar.index import known_version, unusable
from wds_pipes.tar.keys import KeySplit, check_key_split
from wds_pipes.tar.samples import AFTER, SampleParser


class FetchSamples(Tolerant[Sample]):
    """Read the samples of a ``SampleList``, in its order (functional name: ``fetch_samples``).

    They are the same dicts that ``group_by_key`` yields: ``__key__``, ``__url__``, and the bytes of
    each field. Of remote shards, the samples that come next are requested ahead, many at once;
    neighbours in a shard share a request.

    Args:
        source: a pipe of sample references: ``SampleList``.
        fields: keep only these fields, as in ``["jpg;png", "*.txt"]``; None: all. A sample with
            none of them is an error.
        connections: the maximum number of requests at once.
        readahead_bytes: how many bytes may be read ahead.
        storage_options: how to reach the storage, as fsspec takes it; None: those of
            ``SampleList``.
        cache: as in ``IndexedShards``.
        key_split: as in ``group_by_key``.
        on_error: what to do with a sample that cannot be read or is damaged: ``"raise"``, or
            ``"skip"`` it and count it; None: as ``ShardList(on_error=...)`` says.
        max_errors: with ``"skip"``, how many samples may be skipped in an epoch; None: no limit.

    Raises:
        ShardError: during iteration: a shard cannot be read, is damaged, or is another than the one
            that was indexed. At the end of an epoch: a local one was changed while it was read.
        SampleError: during iteration: a sample has none of ``fields``.

    Checkpoint: the position of its source. A resume reads again what was read ahead.
    """

    keeps_count = True
    scope = "item"
    gives = "samples"
    order_options = ("fields",)
    error_kind = ShardError

    def __init__(
        self,
        source: Stage[Any],
        *,
        fields: Iterable[str] | None = None,
        connections: int = 8,
        readahead_bytes: int = 64 << 20,
        storage_options: dict[str, Any] | None = None,
        cache: ShardCache | str | os.PathLike[str] | None = None,
        key_split: KeySplit = "first-dot",
        on_error: OnError | None = None,
        max_errors: int | None = None,
    ) -> None:
        super().__init__(source, on_error, max_errors)
        self.fields = None if fields is None else read_names("fields", fields)
        self.split = check_key_split(key_split)
        root = Chain(source).root
        options = root.storage_options if storage_options is None else storage_options
        self.files = RangeReader(
            with_origins(options, allowed_origins(root)),
            check_count("connections", connections),
            check_count("readahead_bytes", readahead_bytes),
            cache=as_cache(cache),
            versions=partial(known_version, root.urls, root.facts) if isinstance(root, ShardSource) else None,
        )
        self._bytes = 0  # while running

    def run(self) -> Iterator[Sample]:
        self.files.forget()  # shards may be written again between epochs, as for open_shards
        parse = self.parser()
        for ref, part in self._read():
            try:
                if isinstance(part, ShardError):
                    raise part
                sample = parse(ref, part)
            except (ShardError, SampleError) as error:
                self.skip(error)
                continue
            self._bytes += ref.stop - ref.start
            yield sample
        self.files.check_same()

    def parser(self) -> Callable[[SampleRef, Part], Sample]:
        """Return a function that makes a sample of bytes of its shard: those of ``range_of``."""
        index_url = ""

        def stale(url: str, what: str) -> ShardError:
            return unusable(index_url, f"the shard is another than the indexed one: {what}", shard=url)

        parser = SampleParser(None if self.fields is None else frozenset(self.fields), self.split, stale)
        shown = lru_cache(4096)(redact)

        def parse(ref: SampleRef, part: Part) -> Sample:
            nonlocal index_url
            url, _, start, stop, index_url, last, padding, _, before = ref
            sample = parser.parse(part, start, stop, url, shown(url), before=before, last=last)
            if len(sample) == _NO_FIELDS:
                key, names = sample["__key__"], listed(self.fields or ())
                raise SampleError(
                    f"sample {key!r} of shard {shown(url)} has none of the fields {names}",
                    mend=f"correct the names in fetch_samples(fields=[{names}]), or pass on_error='skip'.",
                    mend_cli="correct the names.",
                    url=shown(url),
                    key=key,
                )
            if padding is None:
                return sample
            named = {"__key__": sample["__key__"], "__url__": sample["__url__"], "__padding__": padding}
            return {**named, **sample}

        return parse

    def _read(self) -> Iterator[tuple[SampleRef, Part | ShardError]]:
        """Yield each reference with the bytes of its sample, or with the error of reading them."""
        refs, files = map(_checked, self.source.items), self.files
        for ref in refs:
            if not files.is_local(ref.url):
                yield from self._read_ahead(itertools.chain([ref], refs))
                return
            part: Part | ShardError
            try:
                part = files.read_one(ref.url, ref.start, ref.stop + AFTER, ref.size, before=ref.before)
            except ShardError as error:
                part = error
            yield ref, part

    def _read_ahead(self, refs: Iterable[SampleRef]) -> Iterator[tuple[SampleRef, Part | ShardError]]:
        """Yield what ``_read`` yields, with many requests ahead of the consumer."""
        source, taken = self.source, deque[tuple[SampleRef, Mark]]()  # each with the position after it

        def ranges() -> Iterator[Range]:
            for ref in refs:
                taken.append((ref, source.mark()))
                yield range_of(ref)

        with self.files.read(ranges(), self.lane.meters) as parts:
            while True:
                part: Part | ShardError | None
                try:
                    part = next(parts, None)
                except ShardError as error:
                    if not taken:  # it is of the source
                        raise
                    part = error
                if part is None:
                    return
                ref, self.earlier = taken.popleft()
                yield ref, part

    @property
    def bytes_so_far(self) -> int:
        return self._bytes

    @property
    def network(self) -> Network:
        return self.files.network


_NO_FIELDS = 2  # the entries of a sample without fields: its key and URL


def range_of(ref: SampleRef) -> Range:
    """Return the bytes of a sample, and of the next header, which begins another sample. Before the
    first one of a shard there is none.
    """
    return Range(ref.url, 0 if ref.before == -1 else ref.start, ref.stop + AFTER, ref.size)


def _checked(ref: object) -> SampleRef:
    if isinstance(ref, SampleRef):
        return ref
    raise TypeError(f"fetch_samples() takes what SampleList(...) yields, and its source gave {ref!r:.200}")
