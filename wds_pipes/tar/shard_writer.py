"""Several shards of one size: ShardWriter."""

from __future__ import annotations

import errno
import os
import re
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from wds_pipes.core.options import check_count
from wds_pipes.core.suggest import checks_options
from wds_pipes.errors import StateError
from wds_pipes.io.compression import compressor, kind_of_name
from wds_pipes.io.outputs import exists, target_of
from wds_pipes.io.urls import redact
from wds_pipes.tar.encoded import Encoded, encoders
from wds_pipes.tar.index import Entry, check_output, make_opener, name_in, read_entries, write_index
from wds_pipes.tar.offsets import write_offsets
from wds_pipes.tar.scanning import scan
from wds_pipes.tar.writer import Md5, TarWriter, whole

if TYPE_CHECKING:
    from wds_pipes.codecs.codec import Codec, Encoder

# Not "%20d": a name may contain "%20" (a quoted space).
_PLACE = re.compile(r"%0\d+d|%d|\{(:0?\d*d?)?\}")


class ShardWriter:
    """Write samples into a series of shards: when a shard is full, the next one is started.

    Use it as a context manager. Each shard appears under its name when it is complete. If the block
    raises, the unfinished shard is discarded. The same happens after an error of the disk: the
    complete shards stay, ``write()`` and ``close()`` raise, and the samples of the unfinished shard
    must be written again.

    A process that is killed leaves the unfinished shard as ``.NAME.partial``; the next writer of
    that shard overwrites it. Run the same program again with ``resume=True``: it goes on at the
    first shard that is not complete.

    Args:
        pattern: the path or URL of the shards with one place for their number:
            ``"train-%06d.tar"`` or ``"s3://bucket/train-{:06d}.tar"``. A local directory must
            exist. Names such as ``train-%06d.tar.gz`` are written compressed, as ``TarWriter``
            does.
        max_samples: the maximum number of samples in a shard.
        max_bytes: the maximum size of a shard in bytes, with headers and padding. A shard with a
            single sample may be larger. Of a compressed shard the bytes before compression count,
            so its file is usually smaller.
        start: the number of the first shard. To append to shards that are there, pass the number
            after the last of them.
        index: the path of an index to write: the samples, bytes and MD5 of each shard, in the wids
            format (``index.json``), for ``ShardList(index=...)``. It is rewritten each time a shard
            is complete; entries of an existing index for other shards stay. Only one writer at a
            time may write it.
        offsets: also write where each sample begins, to ``X.tar.idx`` and ``X.tar.keys`` beside
            each shard ``X.tar``, for ``IndexedShards``. Compressed shards have no offsets.
        on_shard: called once with the path of each complete shard, for example to upload it. Its
            exceptions are raised by ``write()`` or ``close()``.
        overwrite: replace existing shards. By default an existing shard is an error. In both cases,
            shards of an earlier run with higher numbers than this run reaches stay.
        resume: keep the complete shards of an earlier run. Write the same samples again from the
            first on: those that these shards have are compared with them by their keys, and are
            neither encoded nor written. Each of these shards is read once, and its index and
            offsets are written again.
        codecs: encoders by extension, as for ``TarWriter``.
        storage_options: how to reach the storage: a dict of options for fsspec.

    Raises:
        FileExistsError: a shard exists, and ``overwrite`` is not set: at once for the first shard,
            from ``write`` for a later one.
        SampleError: from ``write``, as for ``TarWriter``. The writer can still be used.
        StateError: from ``write`` and ``close``, with ``resume``: the complete shards have other
            samples.
        ShardError: the store cannot be written to; with ``resume``, a shard is damaged.
        ValueError: from the constructor: the pattern has no place for a number, is a command or on
            a web server, or promises a compression that is not read; a limit is not positive; the
            index cannot be written or is damaged; offsets of compressed shards; ``overwrite`` and
            ``resume``.
        ModuleNotFoundError: the pattern ends in ``.zst``, and the library of zstd is not installed.

    Attributes:
        shards: the paths of the complete shards, with the number of samples in each.
        samples: the number of samples in these shards and in the unfinished one.
    """

    @checks_options
    def __init__(
        self,
        pattern: str | os.PathLike[str],
        *,
        max_samples: int = 100_000,
        max_bytes: int = 1 << 30,
        start: int = 0,
        index: str | os.PathLike[str] | None = None,
        offsets: bool = False,
        on_shard: Callable[[str], None] | None = None,
        overwrite: bool = False,
        resume: bool = False,
        codecs: Mapping[str, Encoder | Codec] | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self._codecs, self._options = encoders(codecs), storage_options
        self.pattern = target_of(pattern)
        if overwrite and resume:
            raise ValueError("overwrite=True replaces the shards that resume=True keeps: pass one of them")
        self.max_samples, self.max_bytes = check_count("max_samples", max_samples), check_count("max_bytes", max_bytes)
        self._number = check_count("start", start, least=0)
        if on_shard is not None and not callable(on_shard):
            raise TypeError(f"on_shard is a function of the path of a shard, not {on_shard!r:.80}")
        places = list(_PLACE.finditer(self.pattern))
        if len(places) != 1:
            raise ValueError(
                "the pattern needs one place for the shard's number, such as 'train-%06d.tar', "
                f"not {redact(self.pattern)!r}"
            )
        self._place = places[0]
        if kind := kind_of_name(self.pattern):
            if offsets:
                raise ValueError(f"only uncompressed shards have offsets: write .tar, not {redact(self.pattern)!r}")
            compressor(kind)  # an error now, if its library is missing
        self._offsets = bool(offsets)
        self.on_shard, self.overwrite = on_shard, overwrite
        self.shards: dict[str, int] = {}
        self._index = None if index is None else check_output(index, remote=True)
        # what the index says of each shard, by its name there, with its URL, and how it found
        # the samples
        self._entries: dict[str, tuple[str, Entry]] = {}
        self._rules: dict[str, str] = {}
        if self._index is not None and exists(self._index, storage_options):
            earlier, self._rules = read_entries(self._index, storage_options)
            for name, (url, version, entry) in earlier.items():
                self._entries[name] = url, entry._replace(version=version or None)
        self._writer: TarWriter | None = None
        # Whether the last complete shard was reported to the index and to ``on_shard``.
        self._told = True
        # Of a complete shard found: the keys that have not come again, and how many it has.
        self._resume, self._kept, self._count = bool(resume), deque[str](), 0
        if not (overwrite or resume) and exists(self.path(start), storage_options):
            raise FileExistsError(
                errno.EEXIST,
                f"there is such a shard: pass start={self._free()} to append new samples after the shards that are "
                "there, resume=True to go on with a run that was interrupted, which writes the same samples again, "
                "or overwrite=True to replace the shards",
                redact(self.path(start)),
            )

    @property
    def samples(self) -> int:
        return sum(self.shards.values()) + (
            self._writer.samples if self._writer is not None and self._writer._failed is None else 0
        )

    def path(self, number: int) -> str:
        """The path of shard ``number``."""
        place = self._place
        text = place.group() % number if place.group()[0] == "%" else place.group().format(number)
        return self.pattern[: place.start()] + text + self.pattern[place.end() :]

    def _free(self) -> int:
        """Return the number after those of the shards that are there; the current one is there."""

        def is_free(number: int) -> bool:
            return not exists(self.path(number), self._options)

        step = 1
        while not is_free(self._number + step):
            step *= 2
        return bisect_left(range(self._number + step), True, lo=self._number + step // 2 + 1, key=is_free)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append a sample to the current shard, or to the next one if the current one is full."""
        if self._resume and self._has(sample):
            return
        encoded = self._encode(sample)
        self._tell()
        if self._is_full(encoded):
            self._finish()
        self._append(encoded)

    def _encode(self, sample: Mapping[str, Any]) -> Encoded:
        return Encoded(sample, self._codecs)

    def _is_full(self, encoded: Encoded) -> bool:
        """Whether the current shard must be finished before this sample."""
        writer = self._writer
        return writer is not None and (
            writer.samples >= self.max_samples or whole(writer.size + encoded.size) > self.max_bytes
        )

    def _append(self, encoded: Encoded) -> None:
        """Append a sample to the current shard, or begin the next one with it."""
        if self._writer is None:
            path = self.path(self._number)
            self._writer = TarWriter(path, overwrite=self.overwrite, storage_options=self._options)
            self._writer._digest = None if self._index is None else Md5()
        self._writer._write(encoded)

    def _has(self, sample: Mapping[str, Any]) -> bool:
        """Whether a complete shard of an earlier run has this sample."""
        self._tell()
        self._find()
        if not self._kept:
            self._resume = False
            return False
        key, path = self._kept[0], self.path(self._number)
        own = sample.get("__key__") if isinstance(sample, Mapping) else sample
        if own != key:
            raise StateError(
                f"shard {redact(path)} is of another run: its sample {self._count - len(self._kept)} has the key "
                f"{key!r}, and this sample has {own!r:.80}. Write the same samples in the same order, or pass "
                f"start={self._free()} in place of resume=True to append others, or overwrite=True to replace them"
            )
        self._kept.popleft()
        if not self._kept:
            self.shards[path] = self._count
            self._told = False  # told before the next sample, as of a shard that was written
            self._number += 1
        return True

    def _find(self) -> None:
        """Read the next shard, if there is one, and all samples of the one before came again."""
        path = self.path(self._number)
        if self._kept or not exists(path, self._options):
            return
        found = scan(path, make_opener(self._options), threading.Event())
        self._kept, self._count = deque(found.keys), len(found.keys)
        if not self._kept:
            raise StateError(f"shard {redact(path)} has no samples, so it is of another run: remove it")
        if self._index is not None:
            self._entries[name_in(self._index, path)] = path, Entry(found.facts)
        if self._offsets:
            write_offsets(path, found.keys, [*found.starts, found.end], self._options)

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            path = self.path(self._number)
            self.shards[path] = self._writer.samples
            if self._index is not None:
                self._entries[name_in(self._index, path)] = path, Entry(self._writer._facts())
            if self._offsets:  # after an error the next call tries again
                starts = self._writer._starts
                write_offsets(path, starts, [*starts.values(), self._writer.size], self._options)
            self._writer, self._told = None, False
            self._number += 1
        self._tell()

    def _tell(self) -> None:
        """Add the last complete shard to the index, and call ``on_shard``, unless that was done.

        If the index cannot be written, this is tried again at the next call of ``write`` or
        ``close``.
        """
        if self._told:
            return
        if self._index is not None:
            write_index(self._index, dict(self._entries.values()), self._rules, self._options)
        self._told = True
        if self.on_shard is not None:
            self.on_shard(self.path(self._number - 1))

    def close(self) -> None:
        """Finish the last shard."""
        if self._resume:
            self._tell()
            self._find()
            if self._kept:
                raise StateError(
                    f"shard {redact(self.path(self._number))} is of another run: it has {self._count} samples, and "
                    f"{len(self._kept)} of them were not written again. Write the same samples in the same order, or "
                    "remove the shards from this one on"
                )
        self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._writer is not None:
            self._writer.discard()
            self._writer = None
