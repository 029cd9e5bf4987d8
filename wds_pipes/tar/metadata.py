"""Which rows of tables of metadata fulfil a condition, which DuckDB evaluates.

Rules:
1. A condition judges each row by itself, and says the same at any time and in any process. So
   subqueries and functions such as ``random()`` are refused.
2. A condition may come from a configuration that others wrote. So it is parsed as the expression of
   a WHERE clause and nothing else, and is evaluated by a database in memory that may read the
   tables of metadata, but no other file, and not the network, and that cannot be reconfigured.
3. NaN is NULL, so it fulfils no comparison. (SQL would have it larger than all numbers.)
"""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from wds_pipes.core.words import listed
from wds_pipes.errors import ShardError
from wds_pipes.io.open import Opener
from wds_pipes.io.urls import at_home, local_path, redact

if TYPE_CHECKING:
    import duckdb

ENDINGS = (".parquet", ".jsonl")
KEY_COLUMNS = ("key", "__key__")
# what DuckDB reads as names of columns, although they call functions
_CLOCKS = frozenset({"current_date", "current_time", "current_timestamp", "localtime", "localtimestamp"})
# what calls one, although DuckDB does not say so
_CLOCKS |= {"current_localtime", "current_localtimestamp", "ago", "pg_conf_load_time", "pg_postmaster_start_time"}
_LOCKED = ("SET enable_external_access=false", "SET python_enable_replacements=false", "SET lock_configuration=true")
# Types that DuckDB gives a column of JSON lines if all of its values look so: one more row would
# change what a condition says of the others. They stay text.
_GUESSED = ("JSON", "UUID", "DATE", "TIME", "TIMESTAMP")
_SOME = 10_000  # rows


class Tables:
    """Tables of metadata and a condition over their columns. Threads may share it.

    Args:
        condition: a condition in SQL, as it stands after WHERE.
        urls: the tables: Parquet, or JSON lines. Each has a row for a sample, whose key is in the
            column ``key`` or ``__key__``.
        opener: reads remote tables.

    Raises:
        ValueError: the condition is none, or it is refused.
        ModuleNotFoundError: DuckDB is not installed.
    """

    def __init__(self, condition: str, urls: Sequence[str], opener: Opener) -> None:
        self._condition, self.urls, self._opener = condition, urls, opener
        self._database = _connect()
        self._copies: str | None = None  # the directory of tables that DuckDB cannot read where they are
        try:
            self._check()
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
        if self._copies is not None:
            shutil.rmtree(self._copies, ignore_errors=True)

    def _check(self) -> None:
        """Raise ValueError unless the condition is one expression, which says the same at any
        time.
        """
        problem = None
        tree, empty = (self._parsed(f"SELECT 1 FROM t WHERE ({text}\n)") for text in (self._condition, "true"))
        nodes: list[Any] = []
        if "error_message" in tree:
            problem = _first_line(tree["error_message"])
        else:
            nodes = list(_nodes(tree["statements"][0]["node"].pop("where_clause", None)))
            empty["statements"][0]["node"].pop("where_clause")
            if _without_places(tree) != _without_places(empty):
                problem = "it is more than one expression"
        if any(node.get("class") == "SUBQUERY" for node in nodes):
            problem = "it has a subquery, and may use only the columns of a row"
        found = self._database.execute(
            "SELECT DISTINCT function_name FROM duckdb_functions() "
            "WHERE stability IN ('VOLATILE', 'CONSISTENT_WITHIN_QUERY')"
        )
        changing = {name for (name,) in found.fetchall()}
        for node in nodes:
            columns = node.get("column_names") or [""]
            if (
                (name := str(node.get("function_name") or "").lower()) in changing | _CLOCKS
                or (name == "age" and len(node.get("arguments") or node.get("children") or ()) < 2)  # until today
                or (len(columns) == 1 and (name := str(columns[0]).lower()) in _CLOCKS)
            ):
                problem = f"{name} may return something else at another time, and would make another view"
        if problem is not None:
            raise ValueError(
                f"{self._condition!r:.300} is not a condition over columns: {problem}. A condition is SQL as it "
                "stands after WHERE, such as \"clip > 0.28 and width >= 256 and status = 'success'\"; a file of keys "
                "is '@keys.txt'."
            )

    def _parsed(self, statement: str) -> Any:
        import duckdb

        try:
            [(text,)] = self._database.execute("SELECT json_serialize_sql(?)", [statement]).fetchall()
        except duckdb.Error as error:  # it is no Unicode
            return {"error_message": str(error)}
        return json.loads(text)

    def _path(self, number: int, url: str) -> str:
        """Return where DuckDB will find a table."""
        path = local_path(url)
        if path is not None and not glob.has_magic(path) and "{" not in path:
            return os.path.abspath(at_home(path))
        if self._copies is None:
            self._copies = tempfile.mkdtemp(prefix="wds_pipes-")
        return os.path.join(self._copies, f"{number}{ending_of(url)}")

    def passing(self, number: int) -> list[str]:
        """Return the keys of the rows of a table that fulfil the condition.

        Raises:
            ShardError: the table cannot be read, has no column of keys, or two rows with a key.
            ValueError: the condition does not fit its columns.
        """
        rows = self._rows(number, "count(*)", f"GROUP BY 1 HAVING bool_or(CAST(({self._condition}\n) AS BOOL))")
        repeated = next((key for key, count in rows if count > 1), None)
        if repeated is not None:
            raise self._unusable(number, f"it has several rows with the key {repeated!r:.200}")
        return [key for key, _ in rows]

    def check(self, number: int) -> None:
        """Raise what ``passing`` raises if the condition does not fit the columns of a table."""
        self._rows(number, "1", f"WHERE ({self._condition}\n) LIMIT 0")

    def some(self, number: int) -> list[str]:
        """Return the keys of the first rows of a table."""
        return [key for key, _ in self._rows(number, "1", f"LIMIT {_SOME}")]

    def _rows(self, number: int, column: str, end: str) -> list[tuple[str, int]]:
        """Return the keys in a table that a query selects, each with another column."""
        path = self._paths[number]
        if self._copies is None or not path.startswith(self._copies):
            return self._select(number, column, end)
        try:
            self._copy(number)
            return self._select(number, column, end)
        finally:
            if os.path.exists(path):
                os.unlink(path)

    def _select(self, number: int, column: str, end: str) -> list[tuple[str, int]]:
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
            if twice := _renamed(columns):
                raise self._unusable(
                    number,
                    f"the names of two columns, {listed(twice)}, differ only in case, which SQL ignores: rename one",
                )
            if key is None or columns[key] != "VARCHAR":
                what = "it has no column 'key'" if key is None else f"its column {key!r} is {columns[key]}, not text"
                raise self._unusable(number, f"{what}. Its columns are {listed(columns)}")
            if numbers := [_named(name) for name, kind in columns.items() if kind in ("FLOAT", "DOUBLE")]:
                plain = ", ".join(f"nullif({name}, 'NaN') AS {name}" for name in numbers)
                table = f"(SELECT * REPLACE ({plain}) FROM {table})"
            try:
                rows = cursor.execute(f'SELECT "{key}", {column} FROM {table} {end}').fetchall()
            except duckdb.IOException as error:
                raise self._unusable(number, _first_line(error)) from error
            except duckdb.Error as error:
                raise ValueError(
                    f"the condition {self._condition!r:.300} cannot be evaluated over table "
                    f"{redact(self.urls[number])}: {_first_line(error)}. Its columns are {listed(columns)}"
                ) from error
        return [row for row in rows if row[0] is not None]

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


def ending_of(url: str) -> str | None:
    """Return which of ``ENDINGS`` a table has; None: none of them."""
    return next((ending for ending in ENDINGS if url.partition("?")[0].endswith(ending)), None)


def _connect() -> duckdb.DuckDBPyConnection:
    try:
        import duckdb
    except ImportError as error:
        raise ModuleNotFoundError(
            "a condition over metadata needs DuckDB: pip install 'wds_pipes[meta]'", name="duckdb"
        ) from error
    database = duckdb.connect(":memory:", config={"autoinstall_known_extensions": "false"})
    # Statistics of Parquet know nothing of NaN, and would decide over rows with it.
    database.execute("SET GLOBAL disabled_optimizers='statistics_propagation'")
    return database.execute("SET GLOBAL TimeZone='UTC'")  # not that of the machine


def _described(cursor: duckdb.DuckDBPyConnection, path: str) -> tuple[str, dict[str, str]]:
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


def _renamed(columns: Iterable[str]) -> list[str]:
    """Return two names of columns that differ only in case: DuckDB calls the second ``name_1``."""
    folded = {name.casefold(): name for name in columns}
    for name in columns:
        second = re.sub(r"_\d+$", "", name)
        first = folded.get(second.casefold(), second)
        if first not in (second, name):
            return [first, second]
    return []


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _named(column: str) -> str:
    return '"' + column.replace('"', '""') + '"'


def _nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Yield all dicts in a tree of dicts and lists."""
    if isinstance(tree, dict):
        yield tree
    for part in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _nodes(part)


def _without_places(tree: Any) -> Any:
    """Return a parsed statement without where its parts stand in the text."""
    if isinstance(tree, dict):
        return {name: _without_places(part) for name, part in tree.items() if not name.startswith("query_location")}
    return list(map(_without_places, tree)) if isinstance(tree, list) else tree


def _first_line(error: object) -> str:
    """Return what is wrong, without the kind of the error."""
    return re.sub(r"^(\w+ )+Error: ", "", str(error).partition("\n")[0].rstrip(".! "))[:300]
