"""The rows of a Parquet file, which take no more memory than they may.

A few bytes of a file may stand for any number of bytes. Rules:
1. pyarrow allocates what the header of a page says, whatever the footer says of its column. So the
   headers are read first: see ``wds_pipes.codecs.pages``.
2. A dictionary may repeat a large value in each row. So rows are read fewer at a time.
3. One row may be a list of any number of values. So the values of lists are counted.
4. They may be one string of a dictionary. If their number times the longest string of the
   dictionary is too much, they are read as numbers of a dictionary, and their bytes are added up.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from itertools import chain
from typing import Any

from wds_pipes.codecs.names import TOO_LARGE
from wds_pipes.codecs.pages import Pages, columns_of, pages_of
from wds_pipes.core.importing import library
from wds_pipes.core.words import plural

_ROWS = 64  # that are in memory at a time, at most, beside their pages
# Bytes of a value, by its converted type or else its physical one; of a string, without its text.
_WIDTHS = {"INT_8": 1, "UINT_8": 1, "INT_16": 2, "UINT_16": 2, "BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "BYTE_ARRAY": 4}
_STRINGS = {"NONE", "UTF8", "ENUM"}  # the converted types that pyarrow reads as numbers of a dictionary
_LOGICAL = {"NONE", "STRING", "ENUM"}  # and the logical ones


def rows(data: bytes, max_bytes: int) -> Iterator[dict[str, Any]]:
    """Return the rows as dicts of Python's values, in the order of the file.

    Args:
        data: the file.
        max_bytes: how many bytes its pages, and its rows as arrays, may take.

    Raises:
        ValueError: it takes more, is damaged, or has two columns of one name.
    """
    parquet = library("pyarrow.parquet", "pyarrow", "a Parquet field")
    file = parquet.ParquetFile(io.BytesIO(data), pre_buffer=False)
    facts, names = file.metadata, file.schema_arrow.names
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"it has several columns {twice[0]!r}, which no dict can hold: rename them")
    pages = pages_of(data, columns_of(data, facts.num_columns))
    groups = [sum(column.unpacked for column in group) for group in pages]
    if sum(groups) > max_bytes or _bytes_of_lists(data, facts, pages, max_bytes) > max_bytes:
        raise ValueError(TOO_LARGE.format(max_bytes))
    size, found, at_once = 0, 0, max(1, min(_ROWS, max_bytes // max([1, *groups])))
    # One group after another: pyarrow cannot read lists with the dictionaries of several. Without
    # threads: those of pyarrow do not survive a fork.
    for batch in chain.from_iterable(
        file.iter_batches(at_once, row_groups=[number], use_threads=False) for number in range(len(groups))
    ):
        size += sum(map(_bytes_of, batch.columns))
        if size > max_bytes:
            raise ValueError(TOO_LARGE.format(max_bytes))
        yield from batch.to_pylist()
        found += batch.num_rows
    if found != facts.num_rows:  # pyarrow ends where one column ends
        raise ValueError(f"it has {plural(found, 'row')} of {facts.num_rows:,}: it is damaged")


def _bytes_of_lists(data: bytes, facts: Any, pages: list[list[Pages]], max_bytes: int) -> int:
    """How many bytes the values of lists take, which may all be of one row."""
    total, repeating = 0, []
    for place, column in enumerate(map(facts.schema.column, range(facts.num_columns))):
        if not column.max_repetition_level:
            continue
        values = sum(group[place].values for group in pages)
        width = _WIDTHS.get(column.converted_type) or _WIDTHS.get(column.physical_type, 8)
        total += values * max(width, column.length)
        if column.physical_type == "BYTE_ARRAY":
            longest = max((group[place].longest(data) for group in pages), default=0)
            if values * longest > max_bytes:
                repeating.append(place)
    for place in repeating:
        if total <= max_bytes:
            total += _bytes_of_strings(data, facts, place)
    return total


def _bytes_of_strings(data: bytes, facts: Any, place: int) -> int:
    """How many bytes the strings of a column in lists take; they are not made.

    Raises:
        ValueError: pyarrow has no way to count them.
    """
    parquet = library("pyarrow.parquet", "pyarrow", "a Parquet field")
    column = facts.schema.column(place)
    paths = [facts.schema.column(number).path for number in range(facts.num_columns)]
    uncounted = ValueError(f"column {column.path!r} may repeat a large value, which pyarrow cannot count")
    if (
        column.converted_type not in _STRINGS
        or column.logical_type.type not in _LOGICAL
        or paths.count(column.path) > 1
    ):
        raise uncounted
    file, total = parquet.ParquetFile(io.BytesIO(data), pre_buffer=False, read_dictionary=[column.path]), 0
    for group in range(facts.num_row_groups):
        try:
            table = file.read_row_group(group, columns=[column.path], use_threads=False)
        except (OSError, NotImplementedError):  # not with each encoding
            raise uncounted from None
        total += sum(map(_bytes_of, table.column(0).chunks))
    return total


def _bytes_of(array: Any) -> int:
    """How many bytes the values of an array take. Strings that are numbers of a dictionary are
    counted as often as they come.
    """
    arrow, compute = (library(f"pyarrow{part}", "pyarrow", "a Parquet field") for part in ("", ".compute"))
    kind = array.type
    if arrow.types.is_dictionary(kind):
        texts, numbers = array.dictionary, array.indices
        if len(texts) > len(numbers):  # each batch has the dictionary of all
            used = numbers.unique()
            texts, numbers = texts.take(used), compute.index_in(numbers, used)
        try:
            return compute.sum(compute.binary_length(texts).take(numbers)).as_py() or 0
        except NotImplementedError:  # they are no strings
            return int(numbers.nbytes)
    if arrow.types.is_struct(kind):
        parts = array.flatten()
    elif arrow.types.is_map(kind):
        parts = [array.keys, array.items]
    elif arrow.types.is_nested(kind):
        parts = [array.flatten()]
    else:
        return int(array.nbytes)
    return sum(map(_bytes_of, parts))
