"""Conditions over tables of metadata: each row is judged by itself."""

import json
from pathlib import Path

import pytest

import wds_pipes as wp
from wds_pipes.io.open import Opener

pytest.importorskip("duckdb")
pa = pytest.importorskip("pyarrow")
NAN = float("nan")


def chosen(folder, condition, table):
    """The keys of rows that a condition selects: of a list of rows, as JSON lines, or of an Arrow
    table, as Parquet.
    """
    import pyarrow.parquet

    from wds_pipes.tar.metadata import Tables

    path = f"{folder}/table.{'jsonl' if isinstance(table, list) else 'parquet'}"
    if isinstance(table, list):
        Path(path).write_text("".join(json.dumps(row) + "\n" for row in table))
    else:
        pyarrow.parquet.write_table(table, path)
    with Tables(condition, [path], Opener()) as tables:
        return sorted(tables.passing(0))


@pytest.mark.parametrize(
    ("value", "other", "condition"),
    [
        ("7", 8, "x = '7'"),
        ("cat", True, "x like 'c%'"),
        ("Cat", True, "lower(x) = 'cat'"),
        ("cat", {"a": 1}, "length(x) = 3"),
        ("2024-01-10", "unknown", "x = '2024-01-10'"),
        ("2024-01-10", "unknown", "try_cast(x as date) > '2024-1-5'"),
        ("25-01-2025", "26-01-2025", "x like '25%'"),
        ("bbd05ae7-7b5c-4e58-9c2b-5b7c3d2e1f00", "-", "x like 'bbd%'"),
        ("12:00:00", None, "x like '12:%'"),
    ],
)
def test_other_rows_do_not_change_the_type_of_a_column(tmp_path, value, other, condition):
    """DuckDB takes a text for a date, a time or a UUID if all of the column are."""
    row = {"key": "a", "x": value}
    assert chosen(tmp_path, condition, [row]) == ["a"]
    assert chosen(tmp_path, condition, [row, {"key": "z", "x": other}]) == ["a"]


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("x < 0.1", "ac"),
        ("not (x >= 0.1)", "ac"),
        ("x between 0 and 0.1", "ac"),
        ("x > 0.1", "d"),
        ("x > 0.001", "acd"),
        ("x != 0.02", "ad"),
        ("x is null", "b"),
    ],
)
def test_rows_with_nan(tmp_path, condition, expected):
    """It fulfils no comparison, whatever the statistics of a Parquet file say."""
    rows = {"a": 0.01, "b": NAN, "c": 0.02, "d": 0.9}
    for keys in ("abcd", "abc", "abd", "b"):
        for kind in (pa.float32(), pa.float64()):
            table = pa.table({"key": list(keys), "x": pa.array([rows[key] for key in keys], kind)})
            assert chosen(tmp_path, condition, table) == [key for key in keys if key in expected]


@pytest.mark.parametrize(
    "rows", [[{"key": "a", "Label": 1, "label": 5}], [{"key": "a", "Label": 1}, {"key": "b", "label": 5}]]
)
def test_columns_whose_names_differ_in_case(tmp_path, rows):
    every = pa.schema([("key", pa.string()), ("Label", pa.int64()), ("label", pa.int64())])
    for table in (rows, pa.Table.from_pylist(rows, every)):
        with pytest.raises(wp.ShardError, match="'Label', 'label', differ only in case, which SQL ignores"):
            chosen(tmp_path, "label = 5", table)


def test_columns_with_numbers_in_their_names(tmp_path):
    assert chosen(tmp_path, "x = 5 and x_1 = 6", [{"key": "a", "x": 5, "x_1": 6}]) == ["a"]


def test_rows_with_names_of_their_own(tmp_path):
    rows = [{"key": f"{number}", f"x{number}": 1} for number in range(300)]
    assert chosen(tmp_path, "x7 = 1", rows) == ["7"]
