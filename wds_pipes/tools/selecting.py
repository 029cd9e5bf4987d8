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
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from wds_pipes.core.importing import library
from wds_pipes.core.words import listed, plural
from wds_pipes.errors import ShardError, WdsError
from wds_pipes.io.open import Opener
from wds_pipes.io.urls import Urls, at_home, local_path, redact
from wds_pipes.tar.index import make_opener, path_of
from wds_pipes.tar.listing import exists, list_shards

_AT_ONCE = 8  # tables
ENDINGS = (".parquet", ".jsonl")
KEY_COLUMNS = ("key", "__key__")
_LOCKED = ("SET enable_external_access=false", "SET python_enable_replacements=false", "SET lock_configuration=true")
# Types that DuckDB gives a column of JSON lines if all of its values look so: one more row would
# change what a condition says of the others. They stay text.
_GUESSED = ("JSON", "UUID", "DATE", "TIME", "TIMESTAMP")


def select(
    urls: Urls,
    where: str,
    *,
    metadata: str | None = None,
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
    tables = find_tables(shards, metadata, storage_options)
    with Tables(where, tables, make_opener(storage_options)) as opened, ThreadPoolExecutor(_AT_ONCE) as pool:
        keys = [key for found in pool.map(opened.passing, range(len(tables))) for key in sorted(found)]
    if not keys:
        raise opened.unfulfilled()
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


class Tables:
    """Tables of metadata and a condition over their columns. Threads may share it.

    Args:
        condition: a condition in SQL, as it stands after WHERE.
        urls: the tables: Parquet, or JSON lines. Each has a row for a sample, whose key is in the
            column ``key`` or ``__key__``.
        opener: reads remote tables.

    Raises:
        ValueError: the condition is none.
        ModuleNotFoundError: DuckDB is not installed.
    """

    def __init__(self, condition: str, urls: Sequence[str], opener: Opener) -> None:
        self._condition, self.urls, self._opener = condition, urls, opener
        self._database = _connect()
        # of tables that DuckDB cannot read where they are
        self._copies = tempfile.TemporaryDirectory(prefix="wds_pipes-", ignore_cleanup_errors=True)
        try:
            _check(condition)
            self._paths = [self._path(number, url) for number, url in enumerate(urls)]
            self._database.execute(f"SET allowed_paths=[{', '.join(map(_quoted, self._paths))}]")
            for statement in _LOCKED:
                self._database.execute(statement)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the database, and remove the copies of remote tables."""
        self._database.close()
        self._copies.cleanup()

    def _path(self, number: int, url: str) -> str:
        """Return where DuckDB will find a table."""
        path = local_path(url)
        if path is not None and not glob.has_magic(path) and "{" not in path:
            return os.path.abspath(at_home(path))
        ending = ".parquet" if url.partition("?")[0].endswith(".parquet") else ".jsonl"
        return os.path.join(self._copies.name, f"{number}{ending}")

    def passing(self, number: int) -> list[str]:
        """Return the keys of the rows of a table that fulfil the condition.

        Raises:
            ShardError: the table cannot be read, has no column of keys, or two rows with a key.
            ValueError: the condition does not fit its columns.
        """
        path = self._paths[number]
        if os.path.dirname(path) != self._copies.name:
            return self._select(number)
        try:
            self._copy(number)
            return self._select(number)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)

    def check_fulfilled(self) -> None:
        """Read the tables up to the first one with a row that fulfils the condition.

        Raises:
            WdsError: there is none.
            ShardError, ValueError: as from ``passing``.
        """
        if not any(map(self.passing, range(len(self.urls)))):
            raise self.unfulfilled()

    def unfulfilled(self) -> WdsError:
        """Return the error for a condition that no row fulfils."""
        return WdsError(
            f"no row fulfils {self._condition!r:.300}, in {plural(len(self.urls), 'table')} such as "
            f"{redact(self.urls[0])}: correct the condition"
        )

    def _select(self, number: int) -> list[str]:
        import duckdb

        path = self._paths[number]
        if not os.path.exists(path):
            raise self._unusable(number, "it does not exist")
        if path.endswith(".jsonl") and not os.path.getsize(path):  # as of a shard of which no sample has a row
            return []
        with self._database.cursor() as cursor:
            try:
                table, columns = _described(cursor, path)
            except duckdb.Error as error:
                raise self._unusable(number, _first_line(error)) from error
            key = next((name for name in KEY_COLUMNS if name in columns), None)
            if key is None or columns[key] != "VARCHAR":
                what = "it has no column 'key'" if key is None else f"its column {key!r} is {columns[key]}, not text"
                raise self._unusable(number, f"{what}. Its columns are {listed(columns)}")
            if numbers := [_named(name) for name, kind in columns.items() if kind in ("FLOAT", "DOUBLE")]:
                plain = ", ".join(f"nullif({name}, 'NaN') AS {name}" for name in numbers)
                table = f"(SELECT * REPLACE ({plain}) FROM {table})"
            try:
                rows = cursor.execute(
                    f'SELECT "{key}", count(*) FROM {table} WHERE "{key}" IS NOT NULL '
                    f"GROUP BY 1 HAVING bool_or(CAST(({self._condition}\n) AS BOOL))"
                ).fetchall()
            except duckdb.IOException as error:
                raise self._unusable(number, _first_line(error)) from error
            except duckdb.Error as error:
                raise ValueError(
                    f"the condition {self._condition!r:.300} cannot be evaluated over table "
                    f"{redact(self.urls[number])}: {_first_line(error)}. Its columns are {listed(columns)}"
                ) from error
        repeated = next((key for key, count in rows if count > 1), None)
        if repeated is not None:
            raise self._unusable(number, f"it has several rows with the key {repeated!r:.200}")
        return [key for key, _ in rows]

    def _copy(self, number: int) -> None:
        """Copy a table, for one query, to where DuckDB can read it."""
        try:
            with self._opener.open(self.urls[number]) as stream, open(self._paths[number], "wb") as file:
                shutil.copyfileobj(stream, file, 1 << 20)
        except ShardError as error:
            raise self._unusable(number, str(error).rstrip(".")) from error

    def _unusable(self, number: int, what: str) -> ShardError:
        shown = redact(self.urls[number])
        return ShardError(f"the table of metadata {shown} cannot be used: {what}.", url=shown)


def find_tables(
    urls: Sequence[str],
    metadata: str | None,
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
        folder = at_home(metadata)
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
        shown, either = redact(urls[0]), " or ".join(redact(paths[0] + ending) for ending in ENDINGS)
        error = ShardError(
            f"shard {shown} has no table of metadata: there is no {either}. Pass --metadata, a table with a column "
            "'key', or the directory of the tables",
            url=shown,
        )
        error.missing = True
        raise error
    return [path + ending for path in paths]


def _connect() -> Any:
    duckdb = library("duckdb", "DuckDB", "a condition over metadata", extra="meta")
    database = duckdb.connect(":memory:", config={"autoinstall_known_extensions": "false"})
    # Statistics of Parquet know nothing of NaN, and would decide over rows with it.
    database.execute("SET GLOBAL disabled_optimizers='statistics_propagation'")
    return database.execute("SET GLOBAL TimeZone='UTC'")  # not that of the machine


def _check(condition: str) -> None:
    """Raise ValueError unless a condition is one expression."""
    import duckdb

    try:
        duckdb.SQLExpression(condition)
    except (duckdb.Error, TypeError) as error:  # TypeError: it is no Unicode
        raise ValueError(
            f"{condition!r:.300} is not a condition over columns: {_first_line(error)}. A condition is SQL as it "
            "stands after WHERE, such as \"clip > 0.28 and width >= 256 and status = 'success'\""
        ) from error


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


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _named(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _first_line(error: object) -> str:
    """Return what is wrong, without the kind of the error."""
    return re.sub(r"^(\w+ )+Error: ", "", str(error).partition("\n")[0].rstrip(".! "))[:300]
