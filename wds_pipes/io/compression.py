"""Whole-shard compression, told by content and not by name."""

from __future__ import annotations

import bz2
import gzip
import importlib
import io
import lzma
import re
import sys
import zlib
from typing import Any, BinaryIO

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


def detect(head: bytes) -> str:
    """``"gz"``, ``"bz2"``, ``"xz"``, ``"zst"`` or ``""`` by the first MAGIC_BYTES bytes of a stream."""
    return next((name for name, magic in _MAGICS if magic.match(head)), "")


def decompress(stream: BinaryIO, kind: str, *, buffer_bytes: int = 1 << 20) -> BinaryIO:
    """A buffered stream of what ``stream`` holds in compressed form; several gzip, bz2, xz or zstd streams one after another are read as one.

    Raises:
        ModuleNotFoundError: ``kind`` is ``"zst"`` and no zstd library is installed.
    """
    opened: Any
    if kind == "gz":
        opened = gzip.GzipFile(fileobj=stream, mode="rb")
    elif kind == "bz2":
        opened = bz2.BZ2File(stream)
    elif kind == "xz":
        opened = lzma.LZMAFile(stream)
    elif kind == "zst":
        opened = _zstd(stream)
    else:
        raise ValueError(f"unknown compression {kind!r}")
    return io.BufferedReader(_Decompressed(opened), buffer_bytes)


class _Decompressed(io.RawIOBase):
    """A decompressing stream that gives what it has as soon as it has some: then damage takes away only what is behind it."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return int(self._opened.readinto1(buffer))

    def close(self) -> None:
        self._opened.close()
        super().close()


def _zstd(stream: BinaryIO) -> Any:
    """The standard library's zstd from Python 3.14, the zstandard package before."""
    try:
        return importlib.import_module("compression.zstd").ZstdFile(stream)
    except ModuleNotFoundError:
        pass
    try:
        zstandard: Any = importlib.import_module("zstandard")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("a zstd stream needs the zstandard package: pip install 'wds_pipes[formats]'") from error
    return zstandard.ZstdDecompressor().stream_reader(stream, read_across_frames=True, closefd=True)


def damage() -> tuple[type[Exception], ...]:
    """Every exception by which a damaged compressed stream shows, for the libraries that are loaded."""
    found = list(DAMAGE)
    for module, name in (("compression.zstd", "ZstdError"), ("zstandard", "ZstdError")):
        if sys.modules.get(module) is not None:
            found.append(getattr(sys.modules[module], name))
    return tuple(found)


def unreadable() -> tuple[type[Exception], ...]:
    """Every exception by which a stream shows that it cannot be read on."""
    return EOFError, OSError, *damage()
