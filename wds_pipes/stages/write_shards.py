"""WriteShards: write samples into shards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wds_pipes.core.lane import LaneFacts
from wds_pipes.core.stage import Mark, Stage
from wds_pipes.core.state import read_count
from wds_pipes.core.words import plural
from wds_pipes.stages.fields import check_sample

if TYPE_CHECKING:
    from wds_pipes.codecs.codec import Codec, Encoder
    from wds_pipes.tar.writer import ShardWriter

_LANE = "{lane}"


class WriteShards(Stage[str]):
    """Write samples into a series of shards, and yield the path of each complete one (functional
    name: ``write_shards``).

    It is the last step of a pipe that makes data: iterate it to write them::

        for shard in samples.write_shards("resized/train-%06d.tar", max_samples=10_000):
            state = samples.state_dict()

    A state is that of the last shard that was yielded. Load it into the same pipe to go on: the
    complete shards stay, the shard that was not finished is written from its first sample, and the
    bytes of all shards are those of a run without an interruption. Shards that the interrupted run
    had written after its last state are replaced by the same bytes. If the iteration stops early,
    the unfinished shard is discarded.

    To train on samples while they are written, use a ``ShardWriter`` in the loop.

    The workers of a DataLoader and PipeLoader divide an epoch into lanes, and each lane writes
    shards of its own: then the pattern needs a place for the number of the lane, as in
    ``"train-{lane}-%06d.tar"``. On several ranks, PipeLoader needs ``epoch_end="exact"``. A next
    epoch writes the same names, which ``overwrite`` allows.

    Args:
        source: a pipe of samples as dicts with ``"__key__"``. Values are encoded by the names of
            their fields, as ``TarWriter`` does; a field of bytes is written unchanged. So without
            ``decode_by_ext`` before it, images are copied as they are.
        pattern: the path or URL of the shards with one place for their number, as for
            ``ShardWriter``, and maybe ``{lane}``.
        max_samples: the maximum number of samples in a shard.
        max_bytes: the maximum size of a shard in bytes, with headers and padding. A shard with a
            single sample may be larger.
        offsets: also write where each sample begins, for ``IndexedShards``.
        overwrite: replace existing shards. By default an existing shard is an error, unless a state
            was loaded.
        codecs: encoders by extension, as for ``TarWriter``.
        storage_options: how to reach the storage: a dict of options for fsspec.

    Raises:
        ValueError, TypeError: when the stage is built, as from ``ShardWriter``; during iteration,
            if there are several lanes and the pattern has no place for them.
        FileExistsError: during iteration, if a shard exists.
        SampleError: during iteration, if a sample cannot be written as it is.
        ShardError: the store cannot be written to.

    Checkpoint: the numbers of shards and samples in them, and the position of the source after
    these samples. A resume reads the samples of the unfinished shard again.
    """

    @dataclass(slots=True)
    class At:
        delivered: int = 0  # samples in complete shards
        shards: int = 0

    tallies = ("delivered",)
    gives = "shards"
    order_options = ("name", "max_samples", "max_bytes")

    def __init__(
        self,
        source: Stage[Any],
        pattern: str | os.PathLike[str],
        *,
        max_samples: int = 100_000,
        max_bytes: int = 1 << 30,
        offsets: bool = False,
        overwrite: bool = False,
        codecs: Mapping[str, Encoder | Codec] | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(source)
        self.pattern = os.fspath(pattern)
        self.name = self.pattern.rpartition("/")[2]
        self.max_samples, self.max_bytes, self.overwrite = max_samples, max_bytes, bool(overwrite)
        self._options: dict[str, Any] = {
            "max_samples": max_samples,
            "max_bytes": max_bytes,
            "offsets": offsets,
            "codecs": codecs,
            "storage_options": storage_options,
        }
        self._writer(0, 0, overwrite=True)  # its errors now

    def _writer(self, lane: int, start: int, *, overwrite: bool) -> ShardWriter:
        from wds_pipes.tar.writer import ShardWriter  # which imports what only writing needs

        return ShardWriter(
            self.pattern.replace(_LANE, f"{lane:03d}"), start=start, overwrite=overwrite, **self._options
        )

    def run(self) -> Iterator[str]:
        at, lane, source = self.at, self.lane, self.source
        assert source is not None
        if lane.of > 1 and _LANE not in self.pattern:
            raise ValueError(
                f"write_shards() runs as {lane.of} lanes at once, which would write the same names: add a place for "
                f"the lane to the pattern, such as 'train-{_LANE}-%06d.tar', or iterate the pipe in one process"
            )
        self.earlier = before = source.mark()
        writer = self._writer(lane.number, at.shards, overwrite=True)
        writer.overwrite = self.overwrite or self._resumed  # an existing shard is an error when it is begun
        with writer:
            for sample in source.items:
                check_sample(sample, "write_shards")
                encoded = writer._encode(sample)
                if writer._is_full(encoded):
                    yield self._finish(writer, before)
                writer._append(encoded)
                before = source.mark()
            if writer.samples > sum(writer.shards.values()):
                yield self._finish(writer, source.mark())
        self.earlier = None  # for the counts of the whole epoch

    def _finish(self, writer: ShardWriter, before: Mark) -> str:
        """Finish the current shard; ``before`` is the position of the source after its samples."""
        writer._finish()
        shard, samples = next(reversed(writer.shards.items()))
        self.at.shards += 1
        self.at.delivered += samples
        self.earlier = before
        return shard

    def problem(self, at: Any) -> str | None:
        if at.delivered > at.shards * self.max_samples:  # it may be less: not all were counted since then
            return f"{plural(at.shards, 'shard')} cannot have {plural(at.delivered, 'sample')}"
        return None

    @classmethod
    def describe(cls, entry: dict[str, Any], lane: LaneFacts) -> str | None:
        return f"write_shards after {plural(read_count(entry.get('shards', 0), repr('shards')), 'shard')}"
