"""Whether stored bytes are a whole shard: rule 5."""

from __future__ import annotations

import os
import tarfile

from wds_pipes.io.compression import detect
from wds_pipes.io.locks import LockedFile


def is_vouched_for(file: LockedFile, size: int | None) -> bool:
    """Whether bytes without a checksum are kept; ``size``: that by the store or an index."""
    head = os.pread(file.fd, tarfile.BLOCKSIZE, 0)
    if not detect(head) and head != bytes(tarfile.BLOCKSIZE):
        try:
            tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
        except tarfile.TarError:
            return False
    return size is not None
