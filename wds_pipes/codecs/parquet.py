"""The rows of a Parquet file, which take no more memory than they may.

A few bytes of a file may stand for any number of bytes. Rules:
1. pyarrow allocates what the header of a page says, whatever the footer says of its column. So the
   headers are read first (``unpacked_bytes``).
2. A dictionary may repeat a large value in each row. So rows are read fewer at a time.
3. One row may be a list of many values, of which a dictionary repeats one. So their number is
   bounded, and strings in lists are read as numbers of a dictionary, and counted before they are
   repeated.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

from wds_pipes.codecs.names import TOO_LARGE
from wds_pipes.core.importing import library
from wds_pipes.core.words import plural

_ROWS = 64  # that are in memory at a time, at most, beside their pages
_POINTER = 8  # bytes of an element of a list, at least
# Of a PageHeader: two sizes in bytes, and two structs, of which a page has one.
_UNPACKED, _PACKED, _PAGE, _PAGE_V2 = 2, 3, 5, 8
_VALUES = 1  # of these structs: how many values the page has
_DEEPEST = 32  # structs and lists in each other


def rows(data: bytes, max_bytes: int) -> Iterator[dict[str, Any]]:
    """Return the rows as dicts of Python's values, in the order of the file.

    Args:
        data: the file.
        max_bytes: how many bytes its pages, and its rows as arrays, may take.

    Raises:
        ValueError: it takes more, is damaged, or has two columns of one name.
    """
    arrow, parquet, compute = (
        library(f"pyarrow{part}", "pyarrow", "a Parquet field") for part in ("", ".parquet", ".compute")
    )
    file = parquet.ParquetFile(io.BytesIO(data), pre_buffer=False)
    facts, schema = file.metadata, file.schema_arrow
    if twice := sorted({name for name in schema.names if schema.names.count(name) > 1}):
        raise ValueError(f"it has several columns {twice[0]!r}, which no dict can hold: rename them")
    groups = unpacked_bytes(data, facts)
    lists = [column for column in map(facts.schema.column, range(facts.num_columns)) if column.max_repetition_level]
    if sum(groups) > max_bytes or _bytes_of_lists(facts) > max_bytes:
        raise ValueError(TOO_LARGE.format(max_bytes))
    if strings := [column.path for column in lists if column.physical_type == "BYTE_ARRAY"]:
        file = parquet.ParquetFile(io.BytesIO(data), pre_buffer=False, read_dictionary=strings)
    size, found, at_once = 0, 0, max(1, min(_ROWS, max_bytes // max([1, *groups])))
    # One group after another: pyarrow cannot read dictionaries of several at once. Without threads:
    # those of pyarrow do not survive a fork.
    for batch in chain.from_iterable(
        file.iter_batches(at_once, row_groups=[number], use_threads=False) for number in range(len(groups))
    ):
        size += sum(_bytes_of(column, arrow.types, compute) for column in batch.columns)
        if size > max_bytes:
            raise ValueError(TOO_LARGE.format(max_bytes))
        if strings:  # a dictionary takes several times longer to become Python's strings
            with suppress(NotImplementedError):  # some kinds of strings have no cast
                batch = arrow.Table.from_batches([batch]).cast(schema)
        yield from batch.to_pylist()
        found += batch.num_rows
    if found != facts.num_rows:  # pyarrow ends where one column ends
        raise ValueError(f"it has {plural(found, 'row')} of {facts.num_rows:,}: it is damaged")


def _bytes_of_lists(facts: Any) -> int:
    """How many bytes the values of lists take, without strings; they may all be of one row."""
    return sum(
        group.column(place).num_values * max(_POINTER, column.length)
        for group in map(facts.row_group, range(facts.num_row_groups))
        for place, column in enumerate(map(facts.schema.column, range(facts.num_columns)))
        if column.max_repetition_level
    )


def _bytes_of(array: Any, types: Any, compute: Any) -> int:
    """How many bytes the values of an array take, by two modules of pyarrow. Those that are numbers
    of a dictionary are counted as often as they come.
    """
    kind = array.type
    if types.is_dictionary(kind):
        try:
            lengths = compute.binary_length(array.dictionary)
        except NotImplementedError:  # it has no strings
            return len(array) * _POINTER
        return compute.sum(lengths.take(array.indices)).as_py() or 0
    if types.is_struct(kind):
        parts = array.flatten()
    elif types.is_map(kind):
        parts = [array.keys, array.items]
    elif types.is_nested(kind):
        parts = [array.flatten()]
    else:
        return int(array.nbytes)
    return sum(_bytes_of(part, types, compute) for part in parts)


def unpacked_bytes(data: bytes, facts: Any) -> list[int]:
    """Return how many bytes the pages of each row group unpack to, by the headers of the pages.

    These are structs of Thrift's compact protocol (``PageHeader`` in the ``parquet.thrift`` of the
    "Apache Parquet" format). They are read as pyarrow reads them: from the first page of a column
    on, until its pages have as many values as the column.

    Args:
        data: the file.
        facts: its metadata, of pyarrow.

    Raises:
        ValueError: the header of a page is damaged.
    """
    groups = [facts.row_group(number) for number in range(facts.num_row_groups)]
    return [sum(sum(_pages(data, group.column(place))) for place in range(group.num_columns)) for group in groups]


def _pages(data: bytes, column: Any) -> Iterator[int]:
    """The unpacked size of each page of a column of a row group."""
    place, left = column.data_page_offset, column.num_values
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < place:
        place = column.dictionary_page_offset
    while left > 0:
        try:
            header, after = _read_struct(data, max(0, place), 0)
            unpacked, packed = header[_UNPACKED], header[_PACKED]
            left -= sum(header[page][_VALUES] for page in (_PAGE, _PAGE_V2) if page in header)
            if unpacked < 0 or packed < 0:
                raise ValueError
        except (LookupError, TypeError, ValueError):
            raise ValueError(f"the header of its page at byte {place} is damaged") from None
        yield unpacked
        place = after + packed


# Each of these reads a value at a place of the data, and returns it and the place after it. Values
# that no header needs are None.


def _read_struct(data: bytes, place: int, depth: int) -> tuple[dict[int, Any], int]:
    fields: dict[int, Any] = {}
    number = 0
    while head := data[place]:
        place += 1
        if head >> 4:
            number += head >> 4
        else:
            number, place = _read_int(data, place)
        if head & 15 <= 2:  # True or False, which the head says
            fields[number] = None
        else:
            fields[number], place = _read(head & 15, data, place, depth)
    return fields, place + 1


def _read(kind: int, data: bytes, place: int, depth: int) -> tuple[Any, int]:
    if depth > _DEEPEST:
        raise LookupError
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
    if kind == 12:
        return _read_struct(data, place, depth + 1)
    raise LookupError  # a map, which no header has, or no kind


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
    raise LookupError
