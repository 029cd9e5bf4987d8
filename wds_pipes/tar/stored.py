"""Samples that are in a tar with the bytes that TarWriter writes. To copy these takes a fraction of
the time of reading and writing the samples.

Rules:
1. What is found here is certain: each byte is the one that TarWriter writes for the same key and
   fields. All else is left to ``TarReader`` and ``Encoded``, which know all rules and have the
   messages: other headers, unusual names, damage, a key that comes again.
2. numpy looks at all headers in a block of bytes at once.
"""

from __future__ import annotations

import functools
import io
from collections.abc import Container, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

from wds_pipes.tar.encoded import EMPTY_HEADER, PLAIN_KEY, is_plain
from wds_pipes.tar.headers import BLOCK, END_MARK, ZEROS, plain_header

_CHUNK = 1 << 20  # bytes that are read at once
_MOST = 1 << 26  # bytes that are held at most: those of a sample, or of the zeros at the end
# Where a header has the name, the size and the checksum; where the kind of header stands.
_NAME, _SIZE, _SUM, _MAGIC = slice(0, 100), slice(124, 135), slice(148, 154), slice(256, 264)


class NotStoredError(Exception):
    """A shard has something that is not found here."""


class Stored(NamedTuple):
    """A sample as its bytes in a tar, which are those that TarWriter writes for it.

    Attributes:
        key: its key.
        fields: the names of its fields, in order.
        data: its bytes, with headers and padding.
        start: the place of the first of them in the tar.
    """

    key: str
    fields: tuple[str, ...]
    data: bytes
    start: int

    @property
    def size(self) -> int:
        """How many bytes it takes in a tar."""
        return len(self.data)

    @property
    def blocks(self) -> list[bytes]:
        """Its bytes, as ``Encoded`` has them."""
        return [self.data]

    def values(self) -> Iterator[bytes]:
        """Yield the content of each field."""
        at = 0
        for _ in self.fields:
            begin = at + BLOCK
            end = begin + int(self.data[at:begin][_SIZE], 8)
            yield self.data[begin:end]
            at = end + (-end & 511)

    def sample(self, url: str) -> dict[str, Any]:
        """Return the sample, as ``group_by_key`` does."""
        return {"__key__": self.key, "__url__": url, **dict(zip(self.fields, self.values(), strict=True))}


def stored_in(data: bytes, begins: Container[int] = (), start: int = 0) -> Iterator[Stored]:
    """Yield the samples in bytes of a tar: neighbouring members with one key. A member that
    TarWriter writes in another way is left out, and all of its sample or a part of it.

    Args:
        data: the bytes, from a header on.
        begins: places in the data where a sample begins, also with the key of the one before.
        start: the place in the tar of the first byte.
    """
    key, begin, following, good, fields = "", 0, 0, False, list[str]()
    for at, used, end, name in _members(data):
        if at < following:  # a file inside of another one
            continue
        stem, _, field = name.partition(".")
        if stem != key or at != following or at in begins:
            if good:
                yield Stored(key, tuple(fields), data[begin:following], start + begin)
            key, begin, good, fields = stem, at, PLAIN_KEY.fullmatch(stem) is not None, []
        good = (
            good
            and is_plain(field)
            and (not fields or field > fields[-1])
            and data.startswith(ZEROS[: end - used], used)  # the padding
        )
        fields.append(field)
        following = end
    if good:
        yield Stored(key, tuple(fields), data[begin:following], start + begin)


def _members(data: bytes) -> Iterable[tuple[int, int, int, str]]:
    """Return the files in bytes of a tar that have such a header, also those inside of others:
    where each begins, where its content ends and its padding, and its name.
    """
    import numpy as np  # reading tars does not need it

    fixed, values, magic = _fixed()
    blocks = np.frombuffer(data, np.uint8, len(data) // BLOCK * BLOCK).reshape(-1, BLOCK)
    heads = np.flatnonzero(blocks[:, _MAGIC].view(np.uint64)[:, 0] == magic)
    found = blocks[heads]
    names, lengths = found[:, _NAME], np.count_nonzero(found[:, _NAME], axis=1)
    eights = 8 ** np.arange(11)[::-1]
    sizes, sums = (found[:, _SIZE] & 7) @ eights, (found[:, _SUM] & 7) @ eights[-6:]
    used = (heads + 1) * BLOCK + sizes
    ends = used + -used % BLOCK
    good = ((found.view(np.uint64) & fixed) == values).all(axis=1) & (ends <= len(data))
    # the checksum counts its own field as spaces; after the size, the bytes are the same in all
    good &= (
        found[:, :136].sum(axis=1, dtype=np.uint32) + (sum(EMPTY_HEADER[136:148] + EMPTY_HEADER[156:]) + 8 * 32) == sums
    )
    good &= ((names == 0).argmax(axis=1) == lengths) & (lengths < names.shape[1]) & (names < 128).all(axis=1)
    texts = b"\0".join(names[good].view(f"S{names.shape[1]}")[:, 0].tolist()).decode("ascii").split("\0")
    return zip((heads[good] * BLOCK).tolist(), used[good].tolist(), ends[good].tolist(), texts, strict=False)


@functools.cache
def _fixed() -> tuple[Any, Any, Any]:
    """Return which bits of a header are the same in all, as 64 numbers, and what they are; and the
    number where the kind of header stands.
    """
    import numpy as np

    fixed = np.full(BLOCK, 255, np.uint8)
    fixed[_NAME] = 0
    fixed[_SIZE] = fixed[_SUM] = 0o370  # an octal digit has three bits
    head = np.frombuffer(EMPTY_HEADER, np.uint8)
    numbers = (head & fixed).view(np.uint64)
    return fixed.view(np.uint64), numbers, head[_MAGIC].view(np.uint64)[0]


def read_stored(file: io.RawIOBase | BinaryIO) -> Iterator[Stored]:
    """Yield the samples of a shard.

    Args:
        file: the shard, from its beginning.

    Raises:
        NotStoredError: it has something else than such samples with keys of their own and the end
            of a tar, or cannot be read. This may come after samples, up to the end.
    """
    data, start, keys = b"", 0, set[str]()
    first: Stored | None = None
    while True:
        try:
            more = file.read(max(_CHUNK, len(data)))
        except OSError as error:
            raise NotStoredError from error
        data, base = data + more, start
        found = [*stored_in(data, start=start)]
        if not found and not _goes_on(data):
            raise NotStoredError
        last = found[-1] if found else None
        for sample in found if not more else found[:-1]:  # the last one may go on
            if sample.start != start or sample.key in keys:
                raise NotStoredError
            keys.add(sample.key)
            first, start = first or sample, start + len(sample.data)
            yield sample
        data = data[start - base :]
        if not more:
            break
        if len(data) > _MOST:
            raise NotStoredError
    if data.strip(b"\0") or len(data) < len(END_MARK) or len(data) % BLOCK:
        raise NotStoredError
    # a last sample that lacks fields is suspect
    if first is None or last is None or not {*first.fields} <= {*last.fields}:
        raise NotStoredError


def _goes_on(data: bytes) -> bool:
    """Whether bytes without a sample may be those of a file that ends later, or of the end of a
    tar.
    """
    plain = plain_header(data[:BLOCK])
    return (plain is not None and BLOCK + plain[1] > len(data)) or data[:BLOCK] == ZEROS
