"""Samples as the bytes of a tar: their names are checked, their values encoded."""

from __future__ import annotations

import contextlib
import functools
import re
import tarfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from wds_pipes.errors import SampleError, parts
from wds_pipes.tar.headers import BLOCK, MAX_HEADER_BYTES
from wds_pipes.tar.keys import is_metadata, split_key, without_dots

if TYPE_CHECKING:
    from wds_pipes.codecs.codec import Codec, Encoder


def encoders(codecs: Mapping[str, Encoder | Codec] | None) -> dict[str, Encoder] | None:
    """Read the argument ``codecs`` of a writer; TypeError if it is none."""
    if not codecs:
        return None
    from wds_pipes.codecs.codec import by_extension

    return by_extension(codecs, "encode")


class Encoded:
    """A checked and encoded sample: ``key``, ``blocks`` of the tar, and their ``size`` in bytes."""

    def __init__(self, sample: Mapping[str, Any], own: dict[str, Encoder] | None) -> None:
        from wds_pipes.codecs.table import encode  # imports numpy, which reading tars does not need

        if not isinstance(sample, Mapping):
            raise TypeError(f"a sample is a dict of its fields and its '__key__', not {sample!r:.80}")
        key = sample.get("__key__")
        if not isinstance(key, str) or not key:
            raise SampleError(
                f"a sample needs a '__key__' that is a string, not {key!r}; it has: {', '.join(map(str, sample))}"
            )
        self.key = key
        fields = sorted(name for name in map(str, sample) if not is_metadata(name))
        if not fields:
            raise SampleError(
                f"sample {key!r} has no fields: it would not be in the shard at all. Give it one, or leave it out.",
                key=key,
            )
        for field in fields:
            check_name(key, field, known=field in sample)
        self.blocks: list[bytes] = []
        start = key.encode("utf-8", "surrogateescape")
        start_sum = sum(start)
        for field in fields:
            data = sample[field]
            if type(data) is not bytes or _is_packed(field):
                try:
                    data = encode(field, data, own)
                except Exception as error:
                    why, mends = parts(error)
                    raise SampleError(
                        f"field {field!r} of sample {key!r} cannot be encoded: {why}", key=key, **mends
                    ) from error
            header = _short_header(start, start_sum, f".{field}", len(data))
            header = header or _long_header(f"{key}.{field}", len(data))
            if len(header) > MAX_HEADER_BYTES:
                raise SampleError(
                    f"sample {key[:40]!r}... with field {field[:40]!r} needs more than 1 MiB "
                    "of headers for its name, which is not read back. Shorten it.",
                    key=key[:1000],
                )
            self.blocks += (header, data, bytes(-len(data) & 511))
        self.size = sum(map(len, self.blocks))


# Usual keys and fields, which are read back unchanged in any combination: the checks of
# ``check_name`` would take a third of the time of writing a small sample.
PLAIN_KEY = re.compile(r"(?!__)[\w/-]*[\w-]", re.ASCII)
_PLAIN_FIELD = re.compile(r"[a-z0-9_-][a-z0-9_.-]*")


@functools.lru_cache(256)
def is_plain(field: str) -> bool:
    """Whether a field has a usual name."""
    return _PLAIN_FIELD.fullmatch(field) is not None and not is_metadata(field)


@functools.lru_cache(256)
def _is_packed(field: str) -> bool:
    from wds_pipes.codecs.codec import PACKED

    return field.rpartition(".")[2].lower() in PACKED


def check_name(key: str, field: str, *, known: bool = True) -> None:
    """Raise SampleError, with the mend, if a key and a field would not be read back unchanged.

    ``known``: whether the sample has a field of this name, which is then a string.
    """
    if known and PLAIN_KEY.fullmatch(key) and is_plain(field):
        return
    name = f"{key}.{field}"
    if not known or split_key(name) != (key, field) or not field or is_metadata(field) or not _encodable(name):
        raise SampleError(
            f"sample {key!r} with field {field!r} would not be read back as that: {_mend(key, field)}.", key=key
        )


def stored_size(key: str, field: str, size: int) -> int:
    """The bytes that a field of ``size`` bytes takes in a tar, with its header and padding."""
    name = f"{key}.{field}"
    short = has_short_header(name.encode("utf-8", "surrogateescape"), size)
    return (BLOCK if short else len(_long_header(name, size))) + size + (-size & 511)


def _encodable(name: str) -> bool:
    """Whether a name is read back from a tar unchanged."""
    try:
        return "\0" not in name and name.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape") == name
    except UnicodeEncodeError:
        return False


def _long_header(name: str, size: int) -> bytes:
    """The headers of a file that ``_short_header`` leaves to tarfile."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o444, 0
    with contextlib.suppress(ValueError):
        header = info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")
        # If tarfile splits a long name after a slash at its start, the prefix is empty and that
        # slash is lost.
        if header[345] or len(name.encode("utf-8", "surrogateescape")) <= 100:
            return header
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _mend(key: str, field: str) -> str:
    """The advice for a name that would not be read back unchanged."""
    if not _encodable(f"{key}.{field}"):
        return "names hold no NUL and nothing that UTF-8 cannot write; leave such characters out"
    if is_metadata(field):
        return "names that begin and end with two underscores are kept for metadata; rename the field"
    if key != without_dots(key):
        return f"its key has a dot, which would start the field; write it as {without_dots(key)!r}"
    if field != field.lower():
        return f"fields are in lower case; write {field.lower()!r}"
    if not field or "/" in field:
        return "a field must not be empty or hold '/'; name it by what it is, such as 'txt'"
    if key.startswith("__"):
        return "names in double underscores are kept for metadata; begin the key otherwise"
    return "a key must not end with '/', and a field's name is a string; write them so"


# The headers of files with short names and usual sizes, without tarfile, which takes 15 times as
# long.

_MOST = 8**11  # a size from here on needs another form of number
_LONGEST = 100  # bytes of a name


_INFO = tarfile.TarInfo("")
_INFO.mode, _INFO.mtime = 0o444, 0
EMPTY_HEADER = _INFO.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")
_BEFORE, _BETWEEN, _AFTER = (
    EMPTY_HEADER[100:124],
    EMPTY_HEADER[136:148],
    EMPTY_HEADER[156:],
)  # of the size, and of the checksum
# the checksum counts its own field as eight spaces
_SUM = sum(_BEFORE) + sum(_BETWEEN) + sum(_AFTER) + 8 * 32


def has_short_header(name: bytes, size: int) -> bool:
    """Whether the header of a file with this name and size is one block of ustar."""
    return len(name) <= _LONGEST and size < _MOST


def _short_header(start: bytes, start_sum: int, rest: str, size: int) -> bytes | None:
    """Return the ustar header of a file, as ``TarWriter`` writes it; None: it needs another form.

    Args:
        start: the first part of its name.
        start_sum: the sum of these bytes, which is computed once for all files of a sample.
        rest: the rest of its name.
        size: its bytes.
    """
    end, end_sum = _encoded(rest)
    name = start + end
    if not has_short_header(name, size):
        return None
    middle, middle_sum = _middle(size)
    checksum = b"%06o\0 " % (start_sum + end_sum + middle_sum)
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
