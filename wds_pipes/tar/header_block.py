"""The headers of files with short names and usual sizes, without tarfile, which takes 15 times as
long.
"""

from __future__ import annotations

import functools
import tarfile

_MOST = 8**11  # a size from here on needs another form of number
_LONGEST = 100  # bytes of a name


_INFO = tarfile.TarInfo("")
_INFO.mode, _INFO.mtime = 0o444, 0
_BLOCK = _INFO.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")
_BEFORE, _BETWEEN, _AFTER = _BLOCK[100:124], _BLOCK[136:148], _BLOCK[156:]  # of the size, and of the checksum
# the checksum counts its own field as eight spaces
_SUM = sum(_BEFORE) + sum(_BETWEEN) + sum(_AFTER) + 8 * 32


def has_short_header(name: bytes, size: int) -> bool:
    """Whether the header of a file with this name and size is one block of ustar."""
    return len(name) <= _LONGEST and size < _MOST


class Start:
    """The first part of names of files, whose bytes are summed once for all of them.

    Args:
        name: what all names begin with.
    """

    __slots__ = ("_bytes", "_sum")

    def __init__(self, name: str) -> None:
        self._bytes = name.encode("utf-8", "surrogateescape")
        self._sum = sum(self._bytes)

    def header(self, rest: str, size: int) -> bytes | None:
        """Return the ustar header of a file, as ``TarWriter`` writes it; None: it needs another
        form.

        Args:
            rest: the rest of its name.
            size: its bytes.
        """
        end, end_sum = _encoded(rest)
        name = self._bytes + end
        if not has_short_header(name, size):
            return None
        middle, middle_sum = _middle(size)
        checksum = b"%06o\0 " % (self._sum + end_sum + middle_sum)
        return b"".join((name.ljust(_LONGEST, b"\0"), middle, checksum, _AFTER))


# Fields have few names, and small ones few sizes.


@functools.lru_cache(256)
def _encoded(text: str) -> tuple[bytes, int]:
    data = text.encode("utf-8", "surrogateescape")
    return data, sum(data)


@functools.lru_cache(1024)
def _middle(size: int) -> tuple[bytes, int]:
    """The part of a header between the name and the checksum, and the sum of all but the name."""
    digits = b"%011o\0" % size
    return b"".join((_BEFORE, digits, _BETWEEN)), _SUM + sum(digits)
