"""The pages of a Parquet file, by its footer and their own headers.

Both are structs of Thrift's compact protocol (``FileMetaData`` and ``PageHeader`` in the
``parquet.thrift`` of the "Apache Parquet" format). Pages are found as pyarrow finds them: from the
first one of a column on, until they have as many values as the column. The footer is read here,
too, since pyarrow's metadata of a column end the process where they are damaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from wds_pipes.core.importing import library

# Fields, by their numbers: of the footer, a row group, a column of it, and its metadata.
_ROW_GROUPS, _COLUMNS, _METADATA, _CODEC, _NUM_VALUES, _DATA_PAGE, _DICTIONARY_PAGE = 4, 1, 3, 4, 5, 9, 11
# And of the header of a page: its type, and two sizes in bytes.
_TYPE, _UNPACKED, _PACKED = 1, 2, 3
_OF_VALUES = {0: 5, 3: 8}  # by the types of data pages: the field with a struct, whose field 1 counts the values
_DICTIONARY = 2  # another type
_CODECS = {1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}

_I32, _I64, _LIST, _STRUCT = 5, 6, 9, 12  # kinds of values
_DEEPEST = 32  # structs and lists in each other

Value = tuple[int, Any]  # its kind, and what it is
Struct = dict[int, Value]  # by the numbers of fields


class Column(NamedTuple):
    """What the footer says of a column of a row group: where its first page is, how many values it
    has, and its codec.
    """

    start: int
    values: int
    codec: int


class Pages(NamedTuple):
    """The pages of a column of a row group.

    Attributes:
        unpacked: how many bytes they unpack to.
        values: how many values they have.
        dictionary: of the page with the dictionary: where it starts, its size in the file, and
            unpacked; None: there is none.
        codec: that of the column; 0: nothing is packed.
    """

    unpacked: int
    values: int
    dictionary: tuple[int, int, int] | None
    codec: int

    def longest(self, data: bytes) -> int:
        """Return how many bytes the longest string of the dictionary has, at most."""
        if self.dictionary is None:
            return 0
        start, packed, unpacked = self.dictionary
        page, place, longest = data[start : start + packed], 0, 0
        if self.codec:
            arrow = library("pyarrow", "pyarrow", "a Parquet field")
            try:
                page = arrow.decompress(page, unpacked, codec=_CODECS[self.codec], asbytes=True)
            except (LookupError, ValueError, OSError, NotImplementedError):
                return unpacked
        while place + 4 <= len(page):
            size = int.from_bytes(page[place : place + 4], "little")
            longest, place = max(longest, size), place + 4 + size
        return min(longest, unpacked)


def columns_of(data: bytes, count: int) -> list[list[Column]]:
    """Return what the footer of a file says of the columns of each row group, which are so many.

    Raises:
        ValueError: it is damaged.
    """
    try:
        start = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
        footer, _ = _read_struct(data, max(0, start), 0)
        groups = [
            [_column(_get(_value(column, _STRUCT), _METADATA, _STRUCT)) for column in _get(group, _COLUMNS, _LIST)]
            for group in (_value(group, _STRUCT) for group in _get(footer, _ROW_GROUPS, _LIST))
        ]
        if any(len(group) != count for group in groups):
            raise ValueError
    except (LookupError, ValueError):
        raise ValueError("its footer is damaged") from None
    return groups


def _column(facts: Struct) -> Column:
    start, values, codec = _get(facts, _DATA_PAGE, _I64), _get(facts, _NUM_VALUES, _I64), _get(facts, _CODEC, _I32)
    if _DICTIONARY_PAGE in facts and 0 < (before := _get(facts, _DICTIONARY_PAGE, _I64)) < start:
        start = before
    return Column(start, values, codec)


def pages_of(data: bytes, groups: Sequence[Sequence[Column]]) -> list[list[Pages]]:
    """Return the pages of the columns of a file.

    Raises:
        ValueError: the header of a page is damaged, or belongs to several columns.
    """
    left, found = len(data), []  # the headers, of which each is of one column, are no longer
    for group in groups:
        columns = []
        for column in group:
            pages, headers = _pages(data, column, left)
            columns.append(pages)
            left -= headers
        found.append(columns)
    return found


def _pages(data: bytes, column: Column, most: int) -> tuple[Pages, int]:
    """Return the pages of a column, and how many bytes their headers have, which are at most
    ``most``.
    """
    place, left = column.start, column.values
    headers = bytes_unpacked = values = 0
    dictionary = None
    while left > 0:
        try:
            header, after = _read_struct(data, max(0, place), 0)
            kind, unpacked, packed = (_count(header, field) for field in (_TYPE, _UNPACKED, _PACKED))
            if kind in _OF_VALUES:
                of_page = _count(_get(header, _OF_VALUES[kind], _STRUCT), 1)
                values, left = values + of_page, left - of_page
        except (LookupError, ValueError):
            raise ValueError(f"the header of its page at byte {place} is damaged") from None
        headers += after - place
        if headers > most:
            raise ValueError("its columns have the same pages")
        bytes_unpacked += unpacked
        if kind == _DICTIONARY:
            dictionary = after, packed, unpacked
        place = after + packed
    return Pages(bytes_unpacked, values, dictionary, column.codec), headers


def _value(found: Value, kind: int) -> Any:
    if found[0] != kind:
        raise ValueError
    return found[1]


def _get(struct: Struct, field: int, kind: int) -> Any:
    return _value(struct[field], kind)


def _count(struct: Struct, field: int) -> int:
    """A field that is a number of 32 bits, and not negative."""
    value = _get(struct, field, _I32)
    if not 0 <= value < 1 << 31:
        raise ValueError
    return int(value)


# Each of these reads a value at a place of the data, and returns it and the place after it. What is
# not needed is None.


def _read_struct(data: bytes, place: int, depth: int) -> tuple[Struct, int]:
    fields: Struct = {}
    number = 0
    while head := data[place]:
        kind, place = head & 15, place + 1
        if head >> 4:
            number += head >> 4
        else:
            number, place = _read_int(data, place)
        if number in fields:  # of two, other readers may take the other one
            raise ValueError
        value = None
        if kind > 2:  # the others are True and False
            value, place = _read(kind, data, place, depth)
        fields[number] = kind, value
    return fields, place + 1


def _read(kind: int, data: bytes, place: int, depth: int) -> tuple[Any, int]:
    if depth > _DEEPEST:
        raise ValueError
    if kind in (1, 2, 3):  # a byte; booleans in a list are bytes, too
        return None, place + 1
    if kind in (4, _I32, _I64):
        return _read_int(data, place)
    if kind == 7:  # a float
        return None, place + 8
    if kind == 8:  # a string
        size, place = _read_number(data, place)
        return None, place + size
    if kind in (_LIST, 10):  # or a set
        return _read_list(data, place, depth)
    if kind == _STRUCT:
        return _read_struct(data, place, depth + 1)
    raise ValueError  # a map, which neither has, or no kind


def _read_list(data: bytes, place: int, depth: int) -> tuple[list[Value], int]:
    head, place = data[place], place + 1
    kind, count = head & 15, head >> 4
    if count == 15:
        count, place = _read_number(data, place)
    values = []
    for _ in range(count):
        value, place = _read(kind, data, place, depth + 1)
        values.append((kind, value))
        data[place - 1]  # within the data
    return values, place


def _read_int(data: bytes, place: int) -> tuple[int, int]:
    """A signed number."""
    number, place = _read_number(data, place)
    return (number >> 1) ^ -(number & 1), place


def _read_number(data: bytes, place: int) -> tuple[int, int]:
    """A number in bytes of 7 bits, the least first."""
    number = 0
    for shift in range(0, 70, 7):
        byte, place = data[place], place + 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place
    raise ValueError
