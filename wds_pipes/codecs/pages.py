"""The pages of a Parquet file, by their own headers.

These are structs of Thrift's compact protocol (``PageHeader`` in the ``parquet.thrift`` of the
"Apache Parquet" format). They are read as pyarrow reads them: from the first page of a column on,
until its pages have as many values as the column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from wds_pipes.core.importing import library

_TYPE, _UNPACKED, _PACKED = 1, 2, 3  # fields of a PageHeader: the type of the page, and two sizes in bytes
_OF_VALUES = {0: 5, 3: 8}  # by the types of data pages: the field with a struct of which field 1 counts the values
_DICTIONARY = 2  # another type
_I32, _STRUCT = 5, 12  # kinds of fields
_DEEPEST = 32  # structs and lists in each other

Struct = dict[int, tuple[int, Any]]  # by field: its kind and its value


class Pages(NamedTuple):
    """The pages of a column of a row group.

    Attributes:
        unpacked: how many bytes they unpack to.
        values: how many values they have.
        dictionary: of the page with the dictionary: where it starts, its size in the file, and
            unpacked; None: there is none.
        compression: how it is packed.
    """

    unpacked: int
    values: int
    dictionary: tuple[int, int, int] | None
    compression: str

    def longest(self, data: bytes) -> int:
        """Return how many bytes the longest string of the dictionary has, at most."""
        if self.dictionary is None:
            return 0
        start, packed, unpacked = self.dictionary
        page, place, longest = data[start : start + packed], 0, 0
        if self.compression != "UNCOMPRESSED":
            arrow = library("pyarrow", "pyarrow", "a Parquet field")
            try:
                page = arrow.decompress(page, unpacked, codec=self.compression.lower(), asbytes=True)
            except (ValueError, OSError, NotImplementedError):
                return unpacked
        while place + 4 <= len(page):
            size = int.from_bytes(page[place : place + 4], "little")
            longest, place = max(longest, size), place + 4 + size
        return min(longest, unpacked)


def pages_of(data: bytes, facts: Any) -> list[list[Pages]]:
    """Return the pages of each row group, by column.

    Args:
        data: the file.
        facts: its metadata, of pyarrow.

    Raises:
        ValueError: the header of a page is damaged, or belongs to several columns.
    """
    left = len(data)  # the headers, of which each is of one column, are no longer
    groups = []
    for group in map(facts.row_group, range(facts.num_row_groups)):
        columns = []
        for place in range(group.num_columns):
            found, headers = _pages(data, group.column(place), left)
            columns.append(found)
            left -= headers
        groups.append(columns)
    return groups


def _pages(data: bytes, column: Any, most: int) -> tuple[Pages, int]:
    """Return the pages of a column of a row group, and how many bytes their headers have, which are
    at most ``most``.
    """
    place, left = column.data_page_offset, column.num_values
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < place:
        place = column.dictionary_page_offset
    headers = bytes_unpacked = values = 0
    dictionary = None
    while left > 0:
        try:
            header, after = _read_struct(data, max(0, place), 0)
            kind, unpacked, packed = (_count(header, field) for field in (_TYPE, _UNPACKED, _PACKED))
            if kind in _OF_VALUES:
                values += (of_page := _count(_struct(header, _OF_VALUES[kind]), 1))
                left -= of_page
        except (LookupError, ValueError):
            raise ValueError(f"the header of its page at byte {place} is damaged") from None
        headers += after - place
        if headers > most:
            raise ValueError("its columns have the same pages")
        bytes_unpacked += unpacked
        if kind == _DICTIONARY:
            dictionary = after, packed, unpacked
        place = after + packed
    return Pages(bytes_unpacked, values, dictionary, column.compression), headers


def _count(header: Struct, field: int) -> int:
    """A field that is a number of 32 bits, and not negative."""
    kind, value = header[field]
    if kind != _I32 or not 0 <= value < 1 << 31:
        raise ValueError
    return int(value)


def _struct(header: Struct, field: int) -> Struct:
    kind, value = header[field]
    if kind != _STRUCT:
        raise ValueError
    return dict(value)


# Each of these reads a value at a place of the data, and returns it and the place after it. Values
# that no header needs are None.


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
    if kind in (4, 5, 6):
        return _read_int(data, place)
    if kind == 7:  # a float
        return None, place + 8
    if kind == 8:  # a string
        size, place = _read_number(data, place)
        return None, place + size
    if kind in (9, 10):  # a list or a set
        head, place = data[place], place + 1
        count = head >> 4
        if count == 15:
            count, place = _read_number(data, place)
        for _ in range(count):
            _, place = _read(head & 15, data, place, depth + 1)
            data[place - 1]  # within the data
        return None, place
    if kind == _STRUCT:
        return _read_struct(data, place, depth + 1)
    raise ValueError  # a map, which no header has, or no kind


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
