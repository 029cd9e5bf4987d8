"""Read a shard once, and find its samples as ``group_by_key`` groups them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import threading
import warnings
from collections.abc import Iterator
from hashlib import md5
from typing import TYPE_CHECKING, Any, BinaryIO

from wds_pipes.errors import ShardError
from wds_pipes.io.compression import unpacked, unreadable
from wds_pipes.io.urls import redact
from wds_pipes.tar.grouping import Grouping, Member
from wds_pipes.tar.headers import BLOCK, MAX_SIZE
from wds_pipes.tar.index import ShardFacts
from wds_pipes.tar.keys import KeySplit
from wds_pipes.tar.offsets import Component
from wds_pipes.tar.reader import TarReader

if TYPE_CHECKING:
    from wds_pipes.io.open import Opener

_CHUNK = 1 << 20  # bytes read at once


@dataclasses.dataclass
class Scanned:
    """What was found in a shard.

    Attributes:
        facts: the number of samples, the size, the MD5.
        keys: the key of each sample.
        starts: the byte of the first header of each.
        end: where the last one ends, in the decompressed tar.
        compressed: whether the shard is compressed.
        components: all its files, if they were requested.
        outside: how many files belong to no sample.
    """

    facts: ShardFacts = dataclasses.field(default_factory=ShardFacts)
    keys: list[str] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    end: int = 0
    compressed: bool = False
    components: list[Component] = dataclasses.field(default_factory=list)
    outside: int = 0


def scan(
    url: str,
    opener: Opener,
    stop: threading.Event,
    *,
    key_split: KeySplit = "first-dot",
    on_repeated_key: str = "raise",
    concatenated: bool = False,
    components: bool = False,
) -> Scanned:
    """Read a shard from its beginning to its end.

    Args:
        url: the shard.
        opener: opens it.
        stop: when it is set, reading ends with an error.
        key_split: as in ``index_shards``.
        on_repeated_key: as in ``index_shards``.
        concatenated: as in ``index_shards``.
        components: also list all its files.

    Raises:
        ShardError: it cannot be read, or is damaged.
        SampleError: a sample has a field twice, or one whose name is kept for metadata, or a key
            comes again.
    """
    with opener.open(url) as raw:
        hashed = Hashed(raw, stop)
        stream = io.BufferedReader(hashed, _CHUNK)
        with readable(url):
            tar, kind = unpacked(stream)
            reader = TarReader(
                tar,
                url=url,
                want=lambda name: False,
                max_member_bytes=MAX_SIZE,
                concatenated=concatenated,
                named=False,
            )
            found = Scanned()
            grouping = Grouping(key_split, on_repeated_key=on_repeated_key)
            members = _noted(reader, found.components) if components else reader
            for sample in grouping.samples(members, url):
                found.keys.append(sample["__key__"])
                found.starts.append(grouping.start)
            found.end, found.compressed, found.outside = reader.offset, bool(kind), grouping.outside
            if (warning := grouping.why_none(url)) is not None:
                warnings.warn(warning, stacklevel=2)
            while stream.read(_CHUNK):
                pass
    found.facts = ShardFacts(len(found.keys), hashed.size, hashed.md5.hexdigest())
    return found


@contextlib.contextmanager
def readable(url: str) -> Iterator[None]:
    """Raise ShardError for what unpacking a shard raises, or a package that it needs."""
    shown = redact(url)
    try:
        yield
    except ModuleNotFoundError as error:
        raise ShardError(f"shard {shown} cannot be read: {error}", url=shown) from error
    except ShardError:
        raise
    except unreadable() as error:
        raise ShardError(
            f"shard {shown} cannot be read ({type(error).__name__}: {error}). Write or fetch it again.", url=shown
        ) from error


def _noted(reader: TarReader, components: list[Component]) -> Iterator[Member]:
    """Yield the members of a tar, without their data, and add them to the components of a shard."""
    for member in reader:
        header, size, plain = reader.skipped
        if member[1]:
            components.append(Component(member[1], header + BLOCK, size, plain))
        yield member


class Hashed(io.RawIOBase):
    """A stream that counts the bytes read and computes their MD5.

    When ``stop`` is set, reading raises OSError.
    """

    def __init__(self, raw: BinaryIO, stop: threading.Event) -> None:
        self._raw, self._stop = raw, stop
        self.size, self.md5 = 0, md5(usedforsecurity=False)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._stop.is_set():
            raise OSError("the reading was stopped")
        count = int(self._raw.readinto(buffer))  # type: ignore[attr-defined]
        self.md5.update(memoryview(buffer)[:count])
        self.size += count
        return count
