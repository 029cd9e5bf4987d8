"""Whether stored bytes are a whole shard: rule 5."""

from __future__ import annotations

import os
import tarfile
from typing import BinaryIO

from wds_pipes.io.compression import decompress, detect
from wds_pipes.io.locks import LockedFile

_CHUNK = 1 << 20  # bytes that are read at a time


def is_vouched_for(file: LockedFile, size: int | None) -> bool:
    """Whether bytes without a checksum are kept; ``size``: that by the store or an index."""
    head = os.pread(file.fd, tarfile.BLOCKSIZE, 0)
    kind = detect(head)
    if not kind and head != bytes(tarfile.BLOCKSIZE):
        try:
            tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
        except tarfile.TarError:
            return False
    if size is not None:
        return True
    with open(file.fd, "rb", buffering=_CHUNK, closefd=False) as stream:
        try:
            stream.seek(0)
            return _has_end(decompress(stream, kind) if kind else stream)
        except Exception:  # whatever it is: it is not a whole tar
            return False


def _has_end(tar: BinaryIO) -> bool:
    """Whether an end mark follows the last member, and the stream is readable to its end."""
    while any(head := tar.read(tarfile.BLOCKSIZE)):
        left = (
            -(-tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape").size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
        )
        while left:
            got = len(tar.read(min(left, _CHUNK)))
            if not got:
                return False
            left -= got
    while tar.read(_CHUNK):
        pass
    return len(head) == tarfile.BLOCKSIZE
