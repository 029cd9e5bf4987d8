"""The keys of samples whose metadata fulfil a condition.

DuckDB evaluates conditions over tables of metadata. Rules:
1. A condition is the expression of a WHERE clause and nothing else. It is evaluated by a database
   in memory that may read the tables of metadata, but no other file, and not the network, and that
   cannot be reconfigured.
2. NaN is NULL, so it fulfils no comparison. (SQL would have it larger than all numbers.)
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from wds_pipes.core.importing import library
from wds_pipes.core.words import listed, plural
from wds_pipes.errors import ShardError, WdsError
from wds_pipes.io.open import Opener
from wds_pipes.io.urls import Urls, at_home, local_path, redact
from wds_pipes.tar.index import exists, list_shards, make_opener, path_of

_AT_ONCE = 8  # tables
ENDINGS = (".parquet", ".jsonl")
KEY_COLUMNS = ("key", "__key__")
# Types that DuckDB gives a column of JSON lines if all of its values look so: one more row would
# change what a condition says of the others. They stay text.
_GUESSED = ("JSON", "UUID", "DATE", "TIME", "TIMESTAMP")


def select(
    urls: Urls,
    where: str,
    *,
    metadata: str | os.PathLike[str] | None = None,
    storage_options: dict[str, Any] | None = None,
) -> list[str]:
    """Return the keys of the samples whose row of metadata fulfils a condition.

    ``SampleList`` and ``IndexedShards.select`` take such keys. Only the tables are read, so keys of
    rows without a sample are returned too; later they do not matter.

    Args:
        urls: the shards, or an ``index.json``.
        where: the condition: SQL as it stands after WHERE, which DuckDB evaluates. NaN is NULL: it
            fulfils no comparison.
        metadata: the table, with the keys in a column ``key`` or ``__key__``, or the directory of
            the tables; None: ``X.parquet`` or ``X.jsonl`` beside each ``X.tar``.
        storage_options: how to reach the storage.

    Raises:
        WdsError: no row fulfils the condition.
        ShardError: a table cannot be used.
        ValueError: the condition is none, or does not fit the tables; or a key is that of several
            samples, or has a line break.
        ModuleNotFoundError: DuckDB is not installed.
    """
    shards, _ = list_shards(urls, storage_options)
    tables, opener = find_tables(shards, metadata, storage_options), make_opener(storage_options)
    with keys_where(where, tables, opener) as keys_of, ThreadPoolExecutor(_AT_ONCE) as pool:
        keys = [key for found in pool.map(keys_of, tables) for key in sorted(found)]
    if not keys:
        raise unfulfilled(where, tables)
    [(most, count)] = Counter(keys).most_common(1)
    if count > 1:
        raise ValueError(
            f"samples of {count} shards have the key {most!r:.200}, so it does not say which is meant: "
            "wds-pipes filter --where judges each shard by its own table"
        )
    broken = next((key for key in keys if not {"\n", "\r"}.isdisjoint(key)), None)
    if broken is not None:
        raise ValueError(f"key {broken!r:.200} has a line break, so it cannot be in a list of keys: rename it")
    return keys


@contextlib.contextmanager
def keys_where(condition: str, tables: Sequence[str], opener: Opener) -> Iterator[Callable[[str], list[str]]]:
    """Open tables of metadata for a condition over their columns.

    Args:
        condition: a condition in SQL, as it stands after WHERE.
        tables: the tables: Parquet, or JSON lines. Each has a row for a sample, whose key is in the
            column ``key`` or ``__key__``.
        opener: reads remote tables.

    Yields:
        A function that returns the keys of the rows of a table that fulfil the condition. Threads
        may call it. It raises ShardError if the table cannot be read, has no column of keys, or two
        rows with a key; and ValueError if the condition does not fit its columns.

    Raises:
        ValueError: the condition is none.
        ModuleNotFoundError: DuckDB is not installed.
    """
    duckdb = library("duckdb", "DuckDB", "a condition over metadata", extra="meta")
    try:
        duckdb.SQLExpression(condition)
    except (duckdb.Error, TypeError) as error:  # TypeError: it is no Unicode
        raise ValueError(
            f"{condition!r:.300} is not a condition over columns: {_told(error)}. A condition is SQL as it "
            "stands after WHERE, such as \"clip > 0.28 and width >= 256 and status = 'success'\""
        ) from error
    local = [path for path in map(_local, tables) if path is not None]
    with tempfile.TemporaryDirectory(prefix="wds_pipes-") as folder, open_database(local, folder) as database:
        yield partial(_keys_of, database, folder, condition, opener)


def unfulfilled(condition: str, tables: Sequence[str]) -> WdsError:
    """Return the error for a condition that no row of tables fulfils."""
    return WdsError(
        f"no row fulfils {condition!r:.300}, in {plural(len(tables), 'table')} such as {redact(tables[0])}: correct "
        "the condition"
    )


def _local(table: str) -> str | None:
    """Return the path of a table that DuckDB can read where it is."""
    path = local_path(table)
    return None if path is None or glob.has_magic(path) or "{" in path else os.path.abspath(at_home(path))


def open_database(paths: Sequence[str], folder: str) -> Any:
    """Return a database that can read these tables and those in a folder, and nothing else."""
    import duckdb

    database = duckdb.connect(":memory:", config={"autoinstall_known_extensions": "false"})
    for statement in (
        # Statistics of Parquet know nothing of NaN, and would decide over rows with it.
        "SET GLOBAL disabled_optimizers='statistics_propagation'",
        "SET GLOBAL TimeZone='UTC'",  # not that of the machine
        f"SET allowed_paths=[{', '.join(map(_quoted, paths))}]",
        f"SET allowed_directories=[{_quoted(folder)}]",
        "SET enable_external_access=false",
        "SET python_enable_replacements=false",
        "SET lock_configuration=true",
    ):
        database.execute(statement)
    return database


def _keys_of(database: Any, folder: str, condition: str, opener: Opener, table: str) -> list[str]:
    path = _local(table)
    if path is not None:
        return _select(database, path, condition, table)
    ending = ".parquet" if table.partition("?")[0].endswith(".parquet") else ".jsonl"
    with tempfile.NamedTemporaryFile(dir=folder, suffix=ending) as file:  # for one query
        try:
            with opener.open(table) as stream:
                shutil.copyfileobj(stream, file, 1 << 20)
        except ShardError as error:
            raise _unusable(table, str(error)) from error
        file.flush()
        return _select(database, file.name, condition, table)


def _select(database: Any, path: str, condition: str, table: str) -> list[str]:
    import duckdb

    if not os.path.exists(path):
        raise _unusable(table, "it does not exist")
    if path.endswith(".jsonl") and not os.path.getsize(path):  # as of a shard of which no sample has a row
        return []
    with database.cursor() as cursor:
        try:
            rows_of, columns = _described(cursor, path)
        except duckdb.Error as error:
            raise _unusable(table, _told(error)) from error
        key = next((name for name in KEY_COLUMNS if name in columns), None)
        if key is None or columns[key] != "VARCHAR":
            what = (
                "it has no column 'key': rename that of the keys"
                if key is None
                else f"its column {key!r} is {columns[key]}, not text"
            )
            raise _unusable(table, f"{what}. Its columns are {listed(columns)}")
        numbers = [_quoted(name, '"') for name, kind in columns.items() if kind in ("FLOAT", "DOUBLE")]
        if numbers:
            plain = ", ".join(f"nullif({name}, 'NaN') AS {name}" for name in numbers)
            rows_of = f"(SELECT * REPLACE ({plain}) FROM {rows_of})"
        try:
            rows = cursor.execute(
                f'SELECT "{key}", count(*) FROM {rows_of} WHERE "{key}" IS NOT NULL '
                f"GROUP BY 1 HAVING bool_or(CAST(({condition}\n) AS BOOL))"
            ).fetchall()
        except duckdb.IOException as error:
            raise _unusable(table, _told(error)) from error
        except duckdb.Error as error:
            raise ValueError(
                f"the condition {condition!r:.300} cannot be evaluated over table {redact(table)}, whose columns are "
                f"{listed(columns)}: {_told(error)}"
            ) from error
    repeated = next((key for key, count in rows if count > 1), None)
    if repeated is not None:
        raise _unusable(table, f"it has several rows with the key {repeated!r:.200}")
    return [key for key, _ in rows]


def _unusable(table: str, what: str) -> ShardError:
    return ShardError(f"the table of metadata {redact(table)} cannot be used: {what}", url=redact(table))


def find_tables(
    urls: Sequence[str],
    metadata: str | os.PathLike[str] | None,
    storage_options: dict[str, Any] | None,
    names: Sequence[str] | None = None,
) -> list[str]:
    """Return the table of metadata for all of some shards, or one for each of them.

    Args:
        urls: the shards.
        metadata: a table, or the directory of the tables; None: they are beside the shards.
        storage_options: how to reach them.
        names: the names of the tables in the directory, without their endings; None: the base
            names of the shards.

    Raises:
        ShardError: the first shard has none.
        ValueError: two shards have one name, so that they would have one table.
    """
    paths = [path_of(url).removesuffix(".tar") for url in urls]
    if metadata is not None:
        folder = at_home(os.fspath(metadata))
        if folder.partition("?")[0].endswith(ENDINGS):
            return [folder]
        if os.path.isfile(folder):
            raise ValueError(f"--metadata: {folder} is no table: a table ends in {' or '.join(ENDINGS)}")
        found = [path.rpartition("/")[2] for path in paths] if names is None else names
        if len(set(found)) < len(found):
            raise ValueError(
                f"several shards have one name, such as {redact(urls[0])}, so a directory cannot have a table for "
                "each: write the tables beside the shards, or all into one table"
            )
        paths = [os.path.join(folder, name) for name in found]
    ending = next((ending for ending in ENDINGS if exists(paths[0] + ending, storage_options)), None)
    if ending is None:
        shown, either = redact(urls[0]), " or ".join(redact(paths[0] + each) for each in ENDINGS)
        raise ShardError(
            f"shard {shown} has no table of metadata: there is no {either}. Pass --metadata, a table with a column "
            "'key', or the directory of the tables",
            url=shown,
            missing=True,
        )
    return [path + ending for path in paths]


def _described(cursor: Any, path: str) -> tuple[str, dict[str, str]]:
    """Return a table as SQL names it, and the types of its columns by their names."""

    def columns_of(table: str) -> dict[str, str]:
        return {name: kind for name, kind, *_ in cursor.execute(f"DESCRIBE SELECT * FROM {table}").fetchall()}

    if path.endswith(".parquet"):
        table = f"read_parquet({_quoted(path)}, hive_partitioning=false, binary_as_string=true)"
        return table, columns_of(table)
    options = f"{_quoted(path)}, format='newline_delimited', hive_partitioning=false"
    # An object is one row of columns, however many names the rows have.
    columns = columns_of(
        f"read_json({options}, sample_size=-1, map_inference_threshold=-1, field_appearance_threshold=0)"
    )
    columns.update((name, "VARCHAR") for name, kind in columns.items() if kind.startswith(_GUESSED))
    # also a key that looks like a number
    columns.update((name, "VARCHAR") for name in KEY_COLUMNS if name in columns)
    kinds = ", ".join(f"{_quoted(name)}: {_quoted(kind)}" for name, kind in columns.items())
    return f"read_json({options}, columns={{{kinds}}})", columns


def _quoted(text: str, mark: str = "'") -> str:
    return mark + text.replace(mark, 2 * mark) + mark


def _told(error: Exception) -> str:
    """What DuckDB says, to show it: nothing is decided by it. After its first line comes the place
    in a statement that the caller did not write.
    """
    return str(error).partition("\n")[0][:300]
