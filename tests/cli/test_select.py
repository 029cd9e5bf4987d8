"""``wds-pipes select``: the keys of the rows of metadata that fulfil a condition. It reads nothing
but the tables.
"""

import json
import os
import sys
from pathlib import Path

import pytest
from commands import run_command as run
from pipelines import keys_of

import wds_pipes as wp
from wds_pipes import tools
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

duckdb = pytest.importorskip("duckdb", reason="needs the DuckDB package: pip install 'wds_pipes[meta]'")
pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyarrow.parquet")

NAN = float("nan")
BIG = "clip > 0.28 and width >= 100"
SAMPLES = [7, 0, 5]
ROWS = [{"key": f"{number:08d}", "clip": number % 3 / 2, "width": 20 * number} for number in range(12)]
CHOSEN = [row["key"] for row in ROWS if row["clip"] > 0.28 and row["width"] >= 100]
SPLIT = [ROWS[:7], [], ROWS[7:]]
LOST = {"key": "lost", "clip": None, "width": None}  # a row without a sample, as img2dataset writes them


def put_table(path, table):
    """Write rows as JSON lines or Parquet, or an Arrow table as Parquet."""
    if str(path).endswith(".jsonl"):
        Path(path).write_text("".join(f"{json.dumps(row)}\n" for row in table))
    else:
        pa.parquet.write_table(pa.Table.from_pylist(table) if isinstance(table, list) else table, path)
    return path


def select(*arguments):
    return run("select", *arguments).stdout.splitlines()


def refused(*arguments, code=2):
    """The error, which is one line; nothing else is printed."""
    printed = run("select", *arguments, code=code).output
    assert printed.count("\n") == 1
    return printed


@pytest.fixture
def shards(tmp_path):
    return make_shards(tmp_path / "shards {1}", shards=len(SAMPLES), samples=SAMPLES)


@pytest.fixture
def chosen(tmp_path):
    """The keys that a condition selects from a table."""

    def of(condition, table):
        path = put_table(tmp_path / f"table.{'jsonl' if isinstance(table, list) else 'parquet'}", table)
        return sorted(select("none.tar", "--where", condition, "--metadata", path))

    return of


# Where the tables are


@pytest.mark.parametrize(
    ("kind", "place"), [("parquet", "beside"), ("jsonl", "directory"), ("jsonl", "one"), ("parquet", "one")]
)
def test_keys_of_tables_wherever_they_are(kind, place, shards, tmp_path):
    """The data set takes the file of keys."""
    folder = tmp_path / "it's [1]"
    folder.mkdir()
    metadata = {"beside": [], "directory": ["--metadata", folder], "one": ["--metadata", folder / f"all.{kind}"]}[place]
    if place == "one":
        name = "__key__" if kind == "jsonl" else "key"
        put_table(
            metadata[1], [{name: row["key"], "clip": row["clip"], "width": row["width"]} for row in [LOST, *ROWS]]
        )
    for url, rows in zip(shards, SPLIT, strict=True) if place != "one" else ():
        path = Path(url).with_suffix(f".{kind}")
        table = [LOST | {"key": path.stem}, *reversed(rows)]
        put_table(path if place == "beside" else folder / path.name, table)
    index_shards(shards, offsets=True)
    assert tools.select(shards, BIG, metadata=metadata[1] if metadata else None) == CHOSEN
    assert select(*shards, "--where", BIG, *metadata) == CHOSEN
    assert select(*shards, "--where", BIG, *metadata, "-o", tmp_path / "keys.txt") == []
    found = wp.SampleList(shards, where=f"@{tmp_path}/keys.txt").fetch_samples()
    assert keys_of(found) == CHOSEN == list(wp.IndexedShards(shards).select(f"@{tmp_path}/keys.txt").keys())


def test_remote_tables(s3):
    urls = [s3.put(f"d/{number}.tar", bytes(1024)) for number in range(2)]
    for number, rows in enumerate((ROWS[:7], ROWS[7:])):
        s3.put(f"d/{number}.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    options = ["--storage-options", json.dumps(s3.storage_options)]
    assert select(*urls, "--where", BIG, *options) == CHOSEN
    s3.put("d/1.jsonl", b"no table\n")
    assert "1.jsonl cannot be used: " in refused(*urls, "--where", BIG, *options, code=1)


def test_tables_that_cannot_be_used(tmp_path):
    cases = {
        "a.parquet cannot be used: it has several rows with the key 'a'": [{"key": "a", "n": 1}, {"key": "a", "n": 2}],
        "its column 'key' is BIGINT, not text": [{"key": 1, "n": 1}],
        "it has no column 'key': rename that of the keys. Its columns are 'n', 'name'": [{"name": "a", "n": 1}],
    }
    call = ["a.tar", "--where", "n > 1 or n = 1", "--metadata", tmp_path / "a.parquet"]
    for message, rows in cases.items():
        put_table(tmp_path / "a.parquet", rows)
        assert message in refused(*call, code=1)
    (tmp_path / "a.parquet").write_bytes(b"no table")
    assert "a.parquet cannot be used: " in refused(*call, code=1)
    (tmp_path / "a.parquet").unlink()
    both = [tmp_path / "a.tar", tmp_path / "b.tar", "--where", "n > 0"]
    assert "has no table of metadata: there is no" in refused(*both)
    put_table(tmp_path / "a.jsonl", [{"key": "a", "n": 1}])
    assert "b.jsonl cannot be used: it does not exist" in refused(*both, code=1)
    put_table(tmp_path / "b.jsonl", [])  # as of a shard of which no sample has a row
    assert select(*both) == ["a"]
    put_table(tmp_path / "b.jsonl", [{"key": "b", "m": 1}])
    assert "b.jsonl, whose columns are 'key', 'm': " in refused(*both)


def test_keys_that_a_list_cannot_hold(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
        put_table(tmp_path / folder / "0.jsonl", [{"key": "x", "n": 1}, {"key": f"{folder}\n1", "n": 2}])
    both = [tmp_path / "a/0.tar", tmp_path / "b/0.tar"]
    assert "samples of 2 shards have the key 'x'" in refused(*both, "--where", "n = 1")
    assert r"key 'a\n1' has a line break" in refused(*both, "--where", "n = 2")


def test_a_condition_that_no_row_fulfils(shards, tmp_path):
    """Writes nothing, as a filter does."""
    table = put_table(tmp_path / "all.jsonl", ROWS)
    call = ["--where", "clip > 9", "--metadata", table]
    assert "no row fulfils 'clip > 9', in 1 table such as" in refused(*shards, *call, "-o", tmp_path / "keys", code=1)
    assert not (tmp_path / "keys").exists()
    assert "no row fulfils 'clip > 9'" in run("filter", *shards, tmp_path / "out", *call, code=1).output
    assert not (tmp_path / "out").exists()


# Conditions

REFUSED = {
    "clip > 0.1; DROP TABLE t": "more than one",
    "clip > 0.1) UNION SELECT 1 FROM t WHERE (1": "syntax error",
    "COPY t TO '{out}'": "syntax error",
    "EXISTS (FROM read_csv('/etc/passwd'))": "file system operations are disabled",
    "EXISTS (FROM '{out}')": "does not exist",
    "read_text('/etc/passwd') IS NOT NULL": "table function",
    "clip FROM t": "FROM clause",
    "clip > 0.1, width": "single expression",
    "true /*": "unterminated",
    "clip > 0.1 \ud800": "",
    "$1 > 3": "parameter",
    "": "",
    "clip > 'x'": "Could not convert string 'x'",
    "row_number() OVER () < 3": "window function",
    "max(clip) > 0.5": "nested",
    "no_function(clip) > 0.5": "no_function does not exist",
    "clipp > 0.5": "whose columns are 'clip', 'key', 'width'",
}


def test_only_conditions_over_columns_are_evaluated(tmp_path):
    table, out = put_table(tmp_path / "t.parquet", ROWS), tmp_path / "out"
    for text, message in REFUSED.items():
        told = refused("none.tar", "--where", text.format(out=out), "--metadata", table)
        assert message in told, text
        assert "condition" in told, text
    assert not out.exists()


def test_the_database_is_locked(tmp_path):
    """Also what a condition must not have cannot reach other files."""
    from wds_pipes.tools.selecting import open_database

    table, other = (put_table(f"{tmp_path}/{name}.parquet", ROWS) for name in "ab")
    with open_database([table], str(tmp_path / "folder")) as database:
        assert len(database.execute(f"FROM '{table}'").fetchall()) == len(ROWS)
        for statement in (
            "FROM read_csv('/etc/passwd')",
            f"FROM read_parquet('{other}')",
            f"COPY (SELECT 1) TO '{table}.csv'",
            f"ATTACH '{table}.db'",
            "SET enable_external_access=true",
            "INSTALL httpfs",
            "FROM ROWS",  # a variable of this program
        ):
            with pytest.raises(Exception, match="(?i)permission|configuration|does not exist"):
                database.execute(statement)


def test_times_do_not_depend_on_the_machine(chosen, monkeypatch):
    """Text without a time zone is in UTC."""
    for zone in ("America/New_York", "Asia/Tokyo"):
        monkeypatch.setenv("TZ", zone)
        condition = "'2024-01-01 00:00'::TIMESTAMPTZ = '2024-01-01 00:00+00'"
        assert chosen(condition, [{"key": "a"}]) == ["a"]


OTHERS = [
    ("7", 8, "x = '7'"),
    ("cat", True, "x like 'c%'"),
    ("cat", {"a": 1}, "length(x) = 3"),
    ("2024-01-10", "unknown", "x = '2024-01-10'"),
    ("2024-01-10", "unknown", "try_cast(x as date) > '2024-1-5'"),
    ("25-01-2025", "26-01-2025", "x like '25%'"),
    ("bbd05ae7-7b5c-4e58-9c2b-5b7c3d2e1f00", "-", "x like 'bbd%'"),
    ("12:00:00", None, "x like '12:%'"),
]


def test_other_rows_do_not_change_the_type_of_a_column(chosen):
    """DuckDB takes a text for a date, a time or a UUID if all of the column are."""
    for value, other, condition in OTHERS:
        row = {"key": "a", "x": value}
        assert chosen(condition, [row]) == ["a"], condition
        assert chosen(condition, [row, {"key": "z", "x": other}]) == ["a"], condition


def test_keys_stay_text(chosen):
    """JSON has no type for keys, so what looks like a date or a number might be taken for one."""
    for key in ("2021-01-01", "6BA7B810-9dad-11d1-80b4-00c04fd430c8", "007", "1e3"):
        assert chosen("true", [{"key": key}]) == [key]


def test_rows_with_nan(chosen):
    """They fulfil no comparison, whatever the statistics of a Parquet file say."""
    rows = {"a": 0.01, "b": NAN, "c": 0.02, "d": 0.9}
    conditions = {
        "x < 0.1": "ac",
        "not (x >= 0.1)": "ac",
        "x between 0 and 0.1": "ac",
        "x > 0.1": "d",
        "x > 0.001": "acd",
        "x != 0.02": "ad",
        "x is null": "b",
    }
    for keys, kind in (("abcd", pa.float64()), ("bd", pa.float32()), ("bc", pa.float64())):
        table = pa.table({"key": list(keys), "x": pa.array([rows[key] for key in keys], kind)})
        for condition, expected in conditions.items():
            found = [key for key in keys if key in expected]
            assert not found or chosen(condition, table) == found, (keys, condition)


def test_names_of_columns(chosen):
    """With numbers, and rows that have names of their own."""
    assert chosen("x = 5 and x_1 = 6", [{"key": "a", "x": 5, "x_1": 6}]) == ["a"]
    assert chosen("x7 = 1 -- not )", [{"key": f"{number}", f"x{number}": 1} for number in range(300)]) == ["7"]


def test_without_duckdb(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "duckdb", None)
    (tmp_path / "t.jsonl").write_text("")
    assert "needs the DuckDB package: pip install 'wds_pipes[meta]'" in refused(
        "a.tar", "--where", "true", "--metadata", os.path.join(tmp_path, "t.jsonl")
    )
