"""Several shards of one size: ShardWriter."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Mapping
from hashlib import md5
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from wds_pipes.core.suggest import checks_options
from wds_pipes.io.compression import compressor, kind_of_name
from wds_pipes.io.urls import redact
from wds_pipes.tar.index import listed_shards
from wds_pipes.tar.index_file import Entry, check_output, name_in, read_index, write_index
from wds_pipes.tar.index_formats import ShardFacts
from wds_pipes.tar.offsets import KEYS, OFFSETS, pack_keys, pack_offsets, write_beside
from wds_pipes.tar.writer import Encoded, TarWriter, encoders, local_target, whole

if TYPE_CHECKING:
    from wds_pipes.codecs.codec import Codec
    from wds_pipes.codecs.names import Encoder

# Not "%20d": a name may contain "%20" (a quoted space).
_PLACE = re.compile(r"%0\d+d|%d|\{(:0?\d*d?)?\}")


class ShardWriter:
    """Write samples into a series of shards: when a shard is full, the next one is started.

    Use it as a context manager. Each shard appears under its name when it is complete. If the block
    raises, the unfinished shard is discarded. The same happens after an error of the disk: the
    complete shards stay, ``write()`` and ``close()`` raise, and the samples of the unfinished shard
    must be written again.

    A process that is killed leaves the unfinished shard as ``.NAME.partial``; the next writer of
    that shard overwrites it.

    Args:
        pattern: the path of the shards with one place for their number: ``"train-%06d.tar"`` or
            ``"train-{:06d}.tar"``. The directory must exist. Names such as ``train-%06d.tar.gz``
            are written compressed, as ``TarWriter`` does.
        max_samples: the maximum number of samples in a shard.
        max_bytes: the maximum size of a shard in bytes, with headers and padding. A shard with a
            single sample may be larger. Of a compressed shard the bytes before compression count,
            so its file is usually smaller.
        start: the number of the first shard.
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
        codecs: encoders by extension, as for ``TarWriter``.

    Raises:
        FileExistsError: a shard exists, and ``overwrite`` is not set: at once for the first shard,
            from ``write`` for a later one.
        SampleError: from ``write``, as for ``TarWriter``. The writer can still be used.
        ValueError: from the constructor: the pattern has no place for a number, is a URL or a
            command, or promises a compression that is not read; a limit is not positive; the index
            cannot be written or is damaged; offsets of compressed shards.
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
        codecs: Mapping[str, Encoder | Codec] | None = None,
    ) -> None:
        self._codecs = encoders(codecs)
        self.pattern = local_target(pattern)
        if max_samples < 1 or max_bytes < 1 or start < 0:
            raise ValueError(
                "max_samples and max_bytes must be positive and start not negative, not "
                f"{max_samples}, {max_bytes} and {start}"
            )
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
        self._samples: list[tuple[str, int]] = []  # of the unfinished shard: the key of each, and where it begins
        self.max_samples, self.max_bytes, self.on_shard = max_samples, max_bytes, on_shard
        self.overwrite = overwrite
        self.shards: dict[str, int] = {}
        self._index = None if index is None else check_output(index)
        self._entries, self._rules = _entries(self._index)
        self._number = start
        self._writer: TarWriter | None = None
        # Whether the last complete shard was reported to the index and to ``on_shard``.
        self._told = True
        if not overwrite and os.path.lexists(self.path(start)):
            raise FileExistsError(
                errno.EEXIST,
                "there is such a shard: pass overwrite=True to replace it, or another start=",
                self.path(start),
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

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append a sample to the current shard, or to the next one if the current one is full."""
        encoded = Encoded(sample, self._codecs)
        writer = self._writer
        if not self._told:
            self._tell()
        if writer is not None and (
            writer.samples >= self.max_samples or whole(writer.size + encoded.size) > self.max_bytes
        ):
            self._finish()
        if self._writer is None:
            self._writer, self._samples = TarWriter(self.path(self._number), overwrite=self.overwrite), []
            if self._index is not None:
                self._writer._digest = md5(usedforsecurity=False)
        begin = self._writer.size
        self._writer._write(encoded)
        if self._offsets:
            self._samples.append((encoded.key, begin))

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            path = self.path(self._number)
            self.shards[path] = self._writer.samples
            if self._index is not None:
                self._entries[path] = Entry(
                    ShardFacts(self._writer.samples, self._writer._stored, self._writer._digest.hexdigest())
                )
            if self._offsets:
                self._write_offsets(path, self._writer.size)
            self._writer, self._told = None, False
            self._number += 1
        if not self._told:
            self._tell()

    def _write_offsets(self, path: str, end: int) -> None:
        # after an error the next call tries again, so the samples stay
        write_beside(path, KEYS, pack_keys([key for key, _ in self._samples]))
        write_beside(path, OFFSETS, pack_offsets([*(begin for _, begin in self._samples), end]))

    def _tell(self) -> None:
        """Add the last complete shard to the index, and call ``on_shard``.

        If the index cannot be written, this is tried again at the next call of ``write`` or
        ``close``.
        """
        if self._index is not None:
            write_index(self._index, self._entries, self._rules)
        self._told = True
        if self.on_shard is not None:
            self.on_shard(self.path(self._number - 1))

    def close(self) -> None:
        """Finish the last shard."""
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


def _entries(index: str | None) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return what an existing index says of each shard by its URL, and how it found the samples.

    Raises:
        ValueError: it is damaged, or in another format.
    """
    if index is None or not os.path.exists(index):
        return {}, {}
    listed, known = listed_shards([index])[0], read_index(index)
    entries = {url: (known.entries.get(name_in(index, url)), facts) for url, facts in listed}
    return {
        url: entry if entry is not None and entry.facts == facts else Entry(facts)
        for url, (entry, facts) in entries.items()
    }, known.rules
