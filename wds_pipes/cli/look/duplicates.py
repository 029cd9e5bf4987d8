"""Keys that several shards have, in bounded memory.

Of each sample, 20 bytes are kept: the 64-bit hash of its key, its shard and its first byte. When
they exceed a limit, they go to files by the first bits of the hashes, and the files are sorted one
by one. At the end the keys are read from the shards, so two keys with one hash are not reported.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from wds_pipes.errors import ShardError
from wds_pipes.io.compression import unpacked, unreadable
from wds_pipes.io.open import Opener, is_remote
from wds_pipes.tar.keys import splitter
from wds_pipes.tar.reader import TarReader

_ENTRY = np.dtype([("hash", "<u8"), ("byte", "<u8"), ("shard", "<u4")])
_MOST_HELD = 3_000_000  # entries, of 20 bytes each; sorting takes as much again
_FILES = 64


class Place(NamedTuple):
    """A sample: the number of its shard, and its first byte there."""

    shard: int
    byte: int


class Keys:
    """The keys of the samples of many shards.

    Args:
        most_held: how many entries are kept in memory.
    """

    def __init__(self, most_held: int = _MOST_HELD) -> None:
        self._most, self._count = most_held, 0
        self._held: list[npt.NDArray[Any]] = []
        self._files: list[IO[bytes]] = []
        self._open = ExitStack()

    def __enter__(self) -> Keys:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, shard: int, hashes: npt.NDArray[np.uint64], starts: npt.NDArray[np.uint64]) -> None:
        """Add the samples of a shard: hashes of their keys and first bytes, of shape (samples,)."""
        entries = np.empty(len(hashes), _ENTRY)
        entries["hash"], entries["byte"], entries["shard"] = hashes, starts, shard
        self._held.append(entries)
        self._count += len(entries)
        if self._count > self._most:
            self._spill()

    def _spill(self) -> None:
        """Move the entries to the files."""
        if not self._files:
            folder = self._open.enter_context(tempfile.TemporaryDirectory(prefix="wds_pipes-"))
            self._files = [
                self._open.enter_context(tempfile.TemporaryFile(dir=folder, buffering=1 << 14)) for _ in range(_FILES)
            ]
        entries = np.concatenate(self._held)
        entries = entries[np.argsort(entries["hash"])]
        bounds = np.searchsorted(entries["hash"] >> np.uint64(58), np.arange(_FILES + 1))
        for number, file in enumerate(self._files):
            file.write(entries[bounds[number] : bounds[number + 1]].tobytes())
        self._held, self._count = [], 0

    def repeated(self) -> Iterator[list[Place]]:
        """Yield the samples of each key that several shards have, in the order of the shards."""
        if self._files:
            if self._held:
                self._spill()
            for file in self._files:
                file.seek(0)
                yield from _repeated(np.frombuffer(file.read(), _ENTRY))
        elif self._held:
            yield from _repeated(np.concatenate(self._held))


def _repeated(entries: npt.NDArray[Any]) -> Iterator[list[Place]]:
    entries = entries[np.lexsort((entries["byte"], entries["shard"], entries["hash"]))]
    hashes = entries["hash"]
    same = np.flatnonzero(hashes[1:] == hashes[:-1])  # where an entry has the hash of the next one
    for run in np.split(same, np.flatnonzero(np.diff(same) > 1) + 1) if same.size else ():
        found = entries[run[0] : run[-1] + 2]
        if (found["shard"] != found["shard"][0]).any():
            yield [Place(int(one["shard"]), int(one["byte"])) for one in found]


def key_at(opener: Opener, url: str, byte: int, key_split: str, *, compressed: bool) -> str | None:
    """Return the key of the sample that starts at a byte of a shard; None: it cannot be read."""
    skip = not compressed and is_remote(url)
    try:
        with opener.open(url, byte if skip else 0) as raw:
            stream = raw
            if not skip:
                stream, _ = unpacked(raw)
                _pass_over(stream, byte)
            member = next(iter(TarReader(stream, url=url, offset=byte, want=lambda name: False)), None)
    except (ShardError, ModuleNotFoundError):
        return None
    except unreadable():
        return None
    parts = splitter(key_split)(member.name) if member is not None else None
    return None if parts is None else parts[0]


def _pass_over(stream: Any, count: int) -> None:
    if stream.seekable():
        stream.seek(count, io.SEEK_SET)
        return
    while count and (got := len(stream.read(min(count, 1 << 20)))):
        count -= got


def same_key(
    places: Sequence[Place], urls: Sequence[str], opener: Opener, key_split: str, compressed: Sequence[bool]
) -> str | None:
    """Return the key of samples whose keys have one hash, if the first two have the same."""
    first = places[0]
    other = next(place for place in places if place.shard != first.shard)
    keys = {
        key_at(opener, urls[place.shard], place.byte, key_split, compressed=compressed[place.shard])
        for place in (first, other)
    }
    return keys.pop() if len(keys) == 1 else None
