"""Compressed shards and fields, told by content and not by name.

Rules:
1. A stream that ends before its end mark is an ``EOFError``, never the part that is there.
2. Several streams (frames of zstd) one after another are read as one. What follows a stream is another one, or zeros up to the end; anything else is damage.
3. One step reads a few compressed bytes and returns a bounded number, however small the data is that unpacks to them.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import re
import sys
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

# What a damaged compressed stream raises, besides OSError and EOFError.
DAMAGE: tuple[type[Exception], ...] = (zlib.error, gzip.BadGzipFile, lzma.LZMAError)

MAGIC_BYTES = 10
_MAGICS = (
    ("gz", re.compile(rb"\x1f\x8b\x08")),
    ("bz2", re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)")),
    ("xz", re.compile(rb"\xfd7zXZ\x00")),
    ("zst", re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")),
)
KINDS = tuple(name for name, _ in _MAGICS)
MAX_WINDOW_BYTES = 1 << 27  # of a dictionary (xz) or a window (zstd); xz -9 needs half of it
_ZSTD_BLOCK = 1 << 17  # no block of a frame unpacks to more
_ZSTD = ("compression.zstd", "backports.zstd")  # from Python 3.14, and what brings it to older ones


def detect(head: bytes) -> str:
    """``"gz"``, ``"bz2"``, ``"xz"``, ``"zst"`` or ``""`` by the first MAGIC_BYTES bytes of a stream."""
    return next((name for name, magic in _MAGICS if magic.match(head)), "")


def decompress(stream: BinaryIO, kind: str, *, buffer_bytes: int = 1 << 20) -> BinaryIO:
    """A buffered stream of what ``stream`` holds in compressed form; several gzip, bz2, xz or zstd streams one after another are read as one.

    Reading raises ``EOFError`` where the data ends before its end mark, and an ``OSError`` or one of ``damage()`` where it is damaged, also by bytes after
    its end that are neither zeros nor another stream. An xz or zstd stream that needs more than 128 MiB for its window is refused too. Closing does not
    close ``stream``.

    Raises:
        ModuleNotFoundError: ``kind`` is ``"zst"`` and no zstd library is installed.
    """
    return io.BufferedReader(_Decompressed(stream, kind), buffer_bytes)


def decompress_bytes(data: bytes, kind: str, limit: int) -> bytes | None:
    """What ``data`` holds in compressed form; None if that is more than ``limit`` bytes. Raises what reading from ``decompress`` does."""
    unpacked, parts, size = _Decompressed(io.BytesIO(data), kind), [], 0
    while part := unpacked.some(1 << 20):
        size += len(part)
        if size > limit:
            return None
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class _Decompressor(Protocol):
    """One stream, as the standard library's decompressors read it (bz2, lzma, compression.zstd)."""

    eof: bool
    unused_data: bytes
    needs_input: bool

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _Decompressed(io.RawIOBase):
    """A decompressing stream that gives what it has as soon as it has some: then damage takes away only what comes after it."""

    def __init__(self, stream: BinaryIO, kind: str) -> None:
        self._stream = stream
        self._new = _decompressors(kind)
        self._step = 1 << (17 if kind == "zst" else 15)  # damage costs at most what one step would have given; zstd stops at the damaged block itself
        self._one: _Decompressor | None = self._new()
        self._data = b""  # compressed, and not given to a decompressor yet

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.some(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def some(self, limit: int) -> bytes:
        """The next bytes, at most ``limit``; none at the end."""
        while True:
            if self._one is None:  # between two streams
                self._data = self._data.lstrip(b"\0") or self._stream.read(self._step)
                if not self._data:
                    return b""
                if not self._data[0]:
                    continue
                self._one = self._new()
            one, data = self._one, self._data
            if not data and one.needs_input and not (data := self._stream.read(self._step)):
                raise EOFError("the compressed data ends before its end mark")
            found = one.decompress(data, limit)
            self._data = b""
            if one.eof:
                self._one, self._data = None, one.unused_data
            if found:
                return found


def _decompressors(kind: str) -> Callable[[], Any]:
    """What makes a decompressor of one stream."""
    if kind == "gz":
        return _Gzip
    if kind == "bz2":
        return bz2.BZ2Decompressor
    if kind == "xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_WINDOW_BYTES)
    if kind != "zst":
        raise ValueError(f"unknown compression {kind!r}")
    for name in _ZSTD:
        try:
            return importlib.import_module(name).ZstdDecompressor  # type: ignore[no-any-return]
        except ModuleNotFoundError:
            pass
    try:
        library = importlib.import_module("zstandard")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("a zstd stream needs the zstandard package: pip install 'wds_pipes[formats]'") from error
    return lambda: _ZstdFrame(library)


class _Gzip:
    """One gzip stream, in the manner of the others."""

    def __init__(self) -> None:
        self._one = zlib.decompressobj(31)

    @property
    def eof(self) -> bool:
        return self._one.eof

    @property
    def unused_data(self) -> bytes:
        return self._one.unused_data

    needs_input = True

    def decompress(self, data: bytes, max_length: int) -> bytes:
        found = self._one.decompress(self._one.unconsumed_tail + data, max_length)
        # zlib may hold output without input when it has given all that it was to give
        self.needs_input = len(found) < max_length and not self._one.unconsumed_tail
        return found


class _ZstdFrame:
    """One frame by the zstandard package, in the manner of the others.

    The package returns at once all that its input holds, which may be 128 KiB for each 4 bytes. So it gets a bounded number of blocks at a time, which is
    also how the end of the frame is known. The sizes of its parts are those of RFC 8878, section 3.1.
    """

    def __init__(self, library: Any) -> None:
        self.eof, self.needs_input, self.unused_data = False, True, b""
        self._one = library.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES).decompressobj(write_size=2 * _ZSTD_BLOCK)
        self._next = "header"  # the part that comes next: header, block, checksum or end
        self._checksum = False
        self._left = 0  # bytes of the present part that are still to come
        self._rest = b""  # not given to it yet

    def decompress(self, data: bytes, max_length: int) -> bytes:
        data, end = self._rest + data, 0
        parts = max(1, max_length // _ZSTD_BLOCK)
        while parts:
            taken = min(self._left, len(data) - end)
            end, self._left = end + taken, self._left - taken
            if self._left or not self._begin(data[end : end + 8]):
                break
            parts -= 1
        self._rest, self.needs_input = data[end:], parts > 0
        if self._next == "end" and not self._left:
            self.eof, self.unused_data = True, self._rest
        return bytes(self._one.decompress(data[:end])) if end else b""

    def _begin(self, head: bytes) -> bool:
        """Begin the next part, whose first bytes are ``head``; false where they are too few to know its size, and at the end."""
        if self._next == "header" and len(head) == 8:
            if head[1:4] == b"\x2a\x4d\x18":
                self._next, self._left = "end", 8 + int.from_bytes(head[4:], "little")  # a skippable frame
            else:
                flags = head[4]
                single = flags >> 5 & 1
                self._next, self._checksum = "block", bool(flags & 4)
                self._left = 6 - single + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6]
        elif self._next == "block" and len(head) >= 3:
            block = int.from_bytes(head[:3], "little")
            self._left = 3 + (1 if block >> 1 & 3 == 1 else block >> 3)  # one byte that is repeated, or as many as it says
            if block & 1:
                self._next = "checksum" if self._checksum else "end"
        elif self._next == "checksum":
            self._next, self._left = "end", 4
        return self._left > 0


def damage() -> tuple[type[Exception], ...]:
    """Every exception by which a damaged compressed stream shows, for the libraries that are loaded."""
    found = list(DAMAGE)
    for module in (*_ZSTD, "zstandard"):
        if sys.modules.get(module) is not None:
            found.append(sys.modules[module].ZstdError)
    return tuple(found)


def unreadable() -> tuple[type[Exception], ...]:
    """Every exception by which a stream shows that it cannot be read on."""
    return EOFError, OSError, *damage()
