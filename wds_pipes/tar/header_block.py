"""The header of a file with a short name and a usual size, without tarfile, which takes 15 times as
long.
"""

from __future__ import annotations

import tarfile

_MOST = 8**11  # a size from here on needs another form of number


def _template() -> bytes:
    info = tarfile.TarInfo("")
    info.mode, info.mtime = 0o444, 0
    return info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")


_BLOCK = _template()
_BEFORE, _BETWEEN, _AFTER = _BLOCK[100:124], _BLOCK[136:148], _BLOCK[156:]  # of the size, and of the checksum
# the checksum counts its own field as eight spaces
_SUM = sum(_BEFORE) + sum(_BETWEEN) + sum(_AFTER) + 8 * 32


def common_header(name: str, size: int) -> bytes | None:
    """Return the ustar header of a file, as ``TarWriter`` writes it; None: it needs another form.

    Args:
        name: the name of the file.
        size: its bytes.
    """
    short = name.encode("utf-8", "surrogateescape")
    if len(short) > 100 or size >= _MOST:
        return None
    digits = b"%011o\0" % size
    checksum = b"%06o\0 " % (_SUM + sum(short) + sum(digits))
    return b"".join((short.ljust(100, b"\0"), _BEFORE, digits, _BETWEEN, checksum, _AFTER))
