"""Compressed shards and fields. Readers detect the format by content, writers choose it by name.

Rules:
1. A stream that ends before its end mark raises ``EOFError``; it is not taken as complete.
2. Several streams (frames of zstd) one after another are read as one. After a stream comes another
   one, or zeros up to the end; anything else raises ``TrailingBytesError``.
3. One step reads a few compressed bytes and returns a bounded number of bytes, however many they
   unpack to.
4. What is written contains no time and no file name: the same content and the same version of the
   compression library always produce the same bytes.
"""

from __future__ import annotations

import bz2
import functools
import gzip
import importlib
import io
import lzma
import re
import sys
import threading
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO, Protocol

# The exceptions for a damaged compressed stream, besides OSError and EOFError.
DAMAGE: tuple[type[Exception], ...] = (zlib.error, gzip.BadGzipFile, lzma.LZMAError)


class TrailingBytesError(OSError):
    """Bytes follow the end of compressed data that are neither zeros nor another stream."""


class LargeWindowError(OSError):
    """A stream needs more memory to be decompressed than is allowed."""


MAGIC_BYTES = 10
_MAGICS = (
    ("gz", re.compile(rb"\x1f\x8b\x08")),
    ("bz2", re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)")),
    ("xz", re.compile(rb"\xfd7zXZ\x00")),
    ("zst", re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")),
)
_HEADER_BYTES = 18  # of a frame of zstd, at most, and more than those of the others that are looked at
KINDS = tuple(name for name, _ in _MAGICS)
# Endings of file names, besides the names of the formats.
_ENDINGS = {"tgz": "gz", "tbz": "bz2", "tbz2": "bz2", "txz": "xz", "tzst": "zst", "zstd": "zst"}
# What a directory of shards is searched for: tars, maybe compressed, but not x.tar.idx or .md5.
TAR_NAME = re.compile(r"(?!\.).*\.(tar(\.(gz|bz2|xz|zstd?))?|tgz|tbz2?|txz|tzst)", re.DOTALL)
_OTHERS = frozenset(("7z", "br", "lz", "lz4", "lzma", "lzo", "rar", "tlz", "z", "zip"))  # not read, so not written
_SMALL_BYTES = 1 << 20  # of what a field unpacks to, whose memory is taken at once
MAX_WINDOW_BYTES = 1 << 27  # of a dictionary (xz) or a window (zstd); xz -9 needs half of it
_ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"  # the same library


def detect(head: bytes) -> str:
    """The compression of a stream by its first MAGIC_BYTES bytes.

    The result is ``"gz"``, ``"bz2"``, ``"xz"``, ``"zst"`` or ``""``.
    """
    return next((name for name, magic in _MAGICS if magic.match(head)), "")


def decompress(stream: BinaryIO, kind: str) -> BinaryIO:
    """A buffered stream of the decompressed content of ``stream``.

    Several gzip, bz2, xz or zstd streams one after another are read as one. Reading raises
    ``EOFError`` if the data ends before its end mark, and an ``OSError`` or one of ``damage()`` if
    it is damaged: ``TrailingBytesError`` if bytes follow its end that are neither zeros nor another
    stream. An xz or zstd stream that needs more than 128 MiB for its window is refused too, zstd as
    ``LargeWindowError``. Closing the result does not close ``stream``.

    Raises:
        ModuleNotFoundError: ``kind`` is ``"zst"``, and the library is not installed.
    """
    return io.BufferedReader(_Decompressed(stream, kind), 1 << 20)


def unpacked(stream: Any) -> tuple[BinaryIO, str]:
    """Return what is in a buffered stream, decompressed if it is compressed, and in which way it is
    (``""``: it is not). Raises what ``decompress`` raises.
    """
    kind = detect(stream.peek(MAGIC_BYTES)[:MAGIC_BYTES])
    return (decompress(stream, kind) if kind else stream), kind


def decompress_bytes(data: bytes, kind: str, limit: int) -> bytes | None:
    """The decompressed ``data``; None if that is more than ``limit`` bytes.

    Raises the same exceptions as reading from ``decompress``.
    """
    if kind == "zst":
        _check_window(data)
        if (frame := _small_frame(data, limit)) is not None:
            return frame
    one = zlib.decompressobj(31) if kind == "gz" else _DECOMPRESSORS[kind]()
    whole: bytes = one.decompress(data, 1 << 16)
    if one.eof and not one.unused_data:  # a small field, which is one stream
        return whole if len(whole) <= limit else None
    del one  # of xz, it has a dictionary of many MB
    unpacked, chunks, size = _Decompressed(io.BytesIO(data), kind), [], 0
    while chunk := unpacked.some(1 << 20):
        size += len(chunk)
        if size > limit:
            return None
        chunks.append(chunk)
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)


class _Decompressed(io.RawIOBase):
    """A decompressing stream.

    It returns bytes as soon as it has some, so that damage loses only later bytes.
    """

    def __init__(self, stream: BinaryIO, kind: str) -> None:
        self._stream, self._kind = stream, kind
        self._new = _DECOMPRESSORS[kind]
        self._step = 1 << 15  # damage costs at most the output of one step
        self._one: Any = self._new()  # that of the stream that is read; None: between two streams
        self._begins = True  # whether the next bytes are the first ones of a stream
        self._data = b""  # compressed bytes that were not passed to a decompressor yet

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
                self._data += self._stream.read(max(0, _HEADER_BYTES - len(self._data)))
                if detect(self._data) != self._kind:
                    raise TrailingBytesError("bytes follow its end that are neither zeros nor more compressed data")
                self._one, self._begins = self._new(), True
            one, data = self._one, self._data
            if not data and one.needs_input and not (data := self._stream.read(self._step)):
                raise EOFError("the compressed data ends before its end mark")
            if self._begins:
                self._begins = False
                if self._kind == "zst":
                    _check_window(data)
            found: bytes = one.decompress(data, limit)
            self._data = b""
            if one.eof:
                self._one, self._data = None, one.unused_data
            if found:
                return found


def _check_window(data: bytes) -> None:
    """Raise LargeWindowError if a frame of zstd that begins with these bytes needs a larger window
    than is allowed (RFC 8878, 3.1.1.1.2).
    """
    if len(data) < _HEADER_BYTES or data[:4] != b"\x28\xb5\x2f\xfd" or data[4] & 32:  # 32: it needs none
        return
    log, eighths = 10 + (data[5] >> 3), data[5] & 7
    window = (1 << log) + (1 << log) // 8 * eighths
    if window > MAX_WINDOW_BYTES:
        raise LargeWindowError(
            f"it was compressed with a window of {window >> 20} MiB (zstd --long={log}), and at most "
            f"{MAX_WINDOW_BYTES >> 20} MiB are read. Compress it again with a smaller one: zstd -d --long={log}, then "
            "zstd without --long"
        )


class _Kept(threading.local):
    """The zstd decompressor that each thread keeps: to make one takes five times as long as to
    unpack a kilobyte.
    """

    one: Any = None


_kept = _Kept()


@functools.cache
def _zstandard() -> Any:
    """The package ``zstandard``, whose decompressors can be kept, unlike those of Python's own
    module; None: it is not installed.
    """
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        return None


def _small_frame(data: bytes, limit: int) -> bytes | None:
    """Unpack one frame of zstd that says that it is small; None: the data is something else, or it
    is damaged, or the package ``zstandard`` is missing.
    """
    library = _zstandard()
    if library is None:
        return None
    try:
        if not 0 < library.frame_content_size(data) <= min(limit, _SMALL_BYTES):
            return None
        if _kept.one is None:
            _kept.one = library.ZstdDecompressor()
        unpacked: bytes = _kept.one.decompress(data, allow_extra_data=False)
        return unpacked
    except library.ZstdError:
        return None


def _zstd() -> Any:
    if (module := sys.modules.get(_ZSTD)) is not None:  # import_module takes longer than a small frame
        return module
    try:
        return importlib.import_module(_ZSTD)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"a zstd stream needs the module {_ZSTD}: pip install 'wds_pipes[formats]'"
        ) from error


class Compressor(Protocol):
    """Compresses one stream, with the interface of bz2, lzma, zlib and compression.zstd."""

    def compress(self, data: bytes, /) -> bytes: ...
    def flush(self) -> bytes: ...


def compressor(kind: str) -> Compressor:
    """A compressor of one stream, at the usual level of its library.

    Raises:
        ModuleNotFoundError: ``kind`` is ``"zst"``, and the library is not installed.
    """
    return _COMPRESSORS[kind]()


def _zstd_compressor() -> Compressor:
    zstd = _zstd()
    return zstd.ZstdCompressor(options={zstd.CompressionParameter.checksum_flag: 1})  # type: ignore[no-any-return]


_COMPRESSORS: dict[str, Callable[[], Compressor]] = {
    "gz": lambda: zlib.compressobj(wbits=31),  # a gzip header with time 0 and no name
    "bz2": bz2.BZ2Compressor,
    "xz": lambda: lzma.LZMACompressor(lzma.FORMAT_XZ),
    "zst": _zstd_compressor,
}


def compress_bytes(data: bytes, kind: str) -> bytes:
    """The compressed ``data``."""
    one = compressor(kind)
    return one.compress(data) + one.flush()


def is_compressed_name(path: str) -> bool:
    """Whether the name of a file promises a compression that is read."""
    ending = path.rpartition(".")[2].lower()
    return ending in KINDS or ending in _ENDINGS


def kind_of_name(path: str) -> str:
    """The compression that the name of a file promises, as ``detect`` returns it.

    Raises:
        ValueError: the name promises a format that is not read.
    """
    ending = path.rpartition(".")[2].lower()
    if ending in _OTHERS:
        raise ValueError(
            f"shards are not written as .{ending}, which is not read either: use .tar, or .tar.gz, .tar.bz2, .tar.xz "
            "or .tar.zst"
        )
    return ending if ending in KINDS else _ENDINGS.get(ending, "")


class _Gzip:
    """The decompressor of one gzip stream, with the interface of bz2, lzma and compression.zstd."""

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
        # If zlib returned max_length bytes, it may have more output without more input.
        self.needs_input = len(found) < max_length and not self._one.unconsumed_tail
        return found


_DECOMPRESSORS: dict[str, Callable[[], Any]] = {
    "gz": _Gzip,
    "bz2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_WINDOW_BYTES),
    "zst": lambda: _zstd().ZstdDecompressor(),
}


def damage() -> tuple[type[Exception], ...]:
    """The exceptions for a damaged compressed stream, of the libraries that are loaded."""
    zstd = sys.modules.get(_ZSTD)
    return DAMAGE if zstd is None else (*DAMAGE, zstd.ZstdError)


def unreadable() -> tuple[type[Exception], ...]:
    """The exceptions after which a stream cannot be read any further."""
    return EOFError, OSError, *damage()
