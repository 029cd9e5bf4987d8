"""How a record of another format becomes a sample.

Rules:
1. A record with a column ``__key__`` was a sample, and becomes the same again.
2. Otherwise bytes are fields of their own, unchanged: ``COLUMN.EXTENSION``, where the extension
   says what the bytes are. If one column only has bytes, the field is the extension alone, such as
   ``jpg``. All other values are one field ``json``; bytes that are text are text.
3. What the columns are is decided by the first records, so it is the same in all shards.
"""

from __future__ import annotations

import base64
import contextlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from wds_pipes.codecs.table import ROWS, encode
from wds_pipes.core.options import nearest
from wds_pipes.errors import SampleError, parts
from wds_pipes.tar.keys import without_dots

KEY = "__key__"
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_EXTENSION = re.compile(r"[a-z0-9]{1,5}")
_FIRST_BYTES = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG\r\n\x1a\n", "png"),
    (b"GIF8", "gif"),
    (b"II*\0", "tif"),
    (b"MM\0*", "tif"),
    (b"fLaC", "flac"),
    (b"OggS", "ogg"),
    (b"ID3", "mp3"),
    (b"\x93NUMPY", "npy"),
)

# By what follows "ftyp" in an ISO base media file, if it is no MP4.
_BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), "avif"),
    **dict.fromkeys((b"heic", b"heix", b"hevc", b"mif1", b"msf1"), "heic"),
    **dict.fromkeys((b"M4A ", b"M4B "), "m4a"),
    b"qt  ": "mov",
}

_IMAGES = {"jpg", "jpeg", "png", "gif", "tif", "tiff", "webp"}
_ALIASES = {"jpeg": "jpg", "tiff": "tif"}

Row = dict[str, Any]


class Numbers(list[Any]):
    """A list of numbers, or of lists of them, of a column of such.

    Attributes:
        dtype: of the numbers.
        inner: the lengths of the inner lists; None: they may differ.
    """

    def __init__(self, values: Iterable[Any], dtype: Any, inner: tuple[int, ...] | None) -> None:
        super().__init__(values)
        self.dtype, self.inner = dtype, inner

    def array(self) -> Any:
        """They as an array; ValueError or TypeError: lengths differ, or some are null."""
        array = np.array(self, self.dtype)
        if array.dtype.kind == "f" and np.isnan(array).any() and None in np.array(self, object).flat:
            raise ValueError("some of its numbers are null")
        return array if self.inner is None else array.reshape(len(self), *self.inner)


class Columns(NamedTuple):
    """What the columns of a data set are.

    Attributes:
        key: the column of the keys; None: the number of the record is the key.
        values: the fields that are written and their columns; empty: as rule 2 says.
        alone: the only column of bytes that are no text; None: there are none, or several.
        text: the columns of bytes that are text.
        files: the columns of paths or URLs of files, by their fields; "": the extension of the file
            is the field.
        bytes_in_json: whether bytes are base64 in JSON, not fields of their own.
    """

    key: str | None = None
    values: tuple[tuple[str, str], ...] = ()
    alone: str | None = None
    text: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    bytes_in_json: bool = False


def columns_of(
    rows: Sequence[Row], key: str | None, values: Mapping[str, str], source: str, *, bytes_in_json: bool = False
) -> Columns:
    """Decide what the columns are, by the first records; with ``bytes_in_json``, whatever bytes
    these have.

    Raises:
        ValueError: there is no record, or no column of a name.
    """
    if not rows:
        raise ValueError(f"{source} has no records, so there is nothing to write")
    known = dict.fromkeys(name for row in rows for name in row)
    check_known([*([key] if key else []), *values.values()], known, source)
    binary, text = [], []
    for name in known:
        found = [value for row in rows for value in _contents(row.get(name)) if value is None or not bytes_in_json]
        if found and all(value is not None and is_text(value) for value in found):
            text.append(name)
        elif found:
            binary.append(name)
    return Columns(
        key, tuple(values.items()), binary[0] if len(binary) == 1 else None, tuple(text), bytes_in_json=bytes_in_json
    )


def check_known(named: Iterable[str], known: Collection[str], source: str) -> None:
    """Raise ValueError if a column that is named is not among the known ones."""
    for name in named:
        if name not in known:
            near = nearest(name, known)
            mean = f". Did you mean {near!r}?" if near else f"; it has: {', '.join(known)}"
            raise ValueError(f"{source} has no column {name!r}{mean}")


def sample_of(row: Row, number: str, columns: Columns) -> dict[str, Any]:
    """Return a record as a sample.

    Args:
        row: the values of the record.
        number: its key, if it has no other.
        columns: what its columns are.

    Raises:
        SampleError: it cannot be a sample.
    """
    if KEY in row and columns.key is None and not columns.values:
        return _sample_again(row, number)
    key = number if columns.key is None else without_dots(key_of(row.get(columns.key), columns.key, number))
    fields: dict[str, Any] = {}
    add_chosen(fields, row, columns.values, key)
    rest = {}
    for name, value in {} if columns.values else row.items():
        found = _own_fields(name, value, columns, key)
        if found is None:
            rest[name] = plain_value(value, text=name in columns.text)
        for field, content in found or ():
            add_field(fields, field, content, name, key)
    if rest:
        fields["json" if "json" not in fields else "columns.json"] = encode("json", rest)
    return {KEY: key, **fields}


def add_chosen(fields: dict[str, Any], row: Row, values: Iterable[tuple[str, str]], key: str) -> None:
    """Add the fields of the columns that are chosen, encoded.

    Args:
        fields: the fields that the sample has.
        row: the values of a record.
        values: the new fields and their columns.
        key: the key of the record.

    Raises:
        SampleError: a value cannot be such a field, or there is one of this name.
    """
    for field, column in values:
        value = row.get(column)
        if value is not None:
            try:
                data = _content(value, column, key)[0] if is_file(value) else encode(field, _arrayed(field, value))
            except Exception as error:
                why, mends = parts(error)
                raise SampleError(
                    f"record {key!r}: column {column!r} cannot be field {field!r}: {why.rstrip('.')}", key=key, **mends
                ) from error
            add_field(fields, by_content(field, data), data, column, key)


def add_field(fields: dict[str, Any], field: str, content: Any, column: str, key: str) -> None:
    """Add a field of a column; SampleError if there is one of this name."""
    if field in fields:
        raise SampleError(
            f"record {key!r} has two values for field {field!r}: choose the columns, as in --value {field}={column}",
            key=key,
        )
    fields[field] = content


def is_text(data: bytes) -> bool:
    """Whether bytes are text."""
    try:
        return not _CONTROLS.search(data.decode("utf-8"))
    except UnicodeDecodeError:
        return False


def extension_of(data: bytes, path: str | None = None) -> str | None:
    """The extension of bytes by what they are, else that of their path; None: not known."""
    for first, extension in _FIRST_BYTES:
        if data.startswith(first):
            return extension
    if data[:4] == b"RIFF" and data[8:12] in (b"WEBP", b"WAVE"):
        return {b"WEBP": "webp", b"WAVE": "wav"}[data[8:12]]
    if data[4:8] == b"ftyp":
        return _BRANDS.get(data[8:12], "mp4")
    ending = (path or "").rpartition("/")[2].rpartition(".")[2].lower() if "." in (path or "") else ""
    return ending if _EXTENSION.fullmatch(ending) else None


def by_content(field: str, data: bytes) -> str:
    """The name of a field of an image, with the extension of what its bytes are."""
    base, dot, extension = field.rpartition(".")
    found = extension_of(data)
    if found is None or not {extension, found} <= _IMAGES or _ALIASES.get(extension, extension) == found:
        return field
    return base + dot + found


def _contents(value: Any) -> list[bytes | None]:
    """The bytes in a value; None for those of a file, which are no text."""
    if isinstance(value, list):
        return [content for item in value for content in _contents(item)]
    return [value] if isinstance(value, bytes) else [None] if is_file(value) else []


def is_file(value: Any) -> bool:
    """Whether a value is a file as Hugging Face stores images, audio and video."""
    return isinstance(value, dict) and set(value) == {"bytes", "path"}


def _is_bytes(value: Any) -> bool:
    return isinstance(value, bytes)


def _is_array(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and value.shape != ()


def _own_fields(column: str, value: Any, columns: Columns, key: str) -> list[tuple[str, Any]] | None:
    """The fields of their own of a column; None: it has none."""
    if isinstance(value, Numbers) and value.inner is not None:
        with contextlib.suppress(ValueError, TypeError):  # some are null
            return [(_named(column, "npy"), encode("npy", value.array()))]
    if column in columns.text:
        if not all(data is not None and is_text(data) for data in _contents(value)):
            raise SampleError(
                f"record {key!r}: column {column!r} has bytes that are no text, and was text in the first records: "
                f"name its field, as in --value bin={column}",
                key=key,
            )
        return None
    items = {column: value}
    if isinstance(value, list):
        items = {f"{column}.{place}": item for place, item in enumerate(value) if item is not None}
    kinds = (is_file, _is_array) if columns.bytes_in_json else (is_file, _is_array, _is_bytes)
    if not items or not all(any(is_kind(item) for is_kind in kinds) for item in items.values()):
        return None
    fields = []
    for name, item in items.items():
        if _is_array(item):
            fields.append((_named(name, "npy"), encode("npy", item)))
        elif item != {"bytes": None, "path": None}:
            data, path = _content(item, column, key)
            last = name.lower().replace("/", ".").rpartition(".")[2]
            extension = extension_of(data, path) or (last if last in ROWS else "bin")
            fields.append((extension if name == columns.alone else _named(name, extension), data))
    return fields


def _content(value: Any, column: str, key: str) -> tuple[bytes, str | None]:
    """The bytes of a value, and the path if it is a file that has one."""
    if not is_file(value):
        return value, None
    if not isinstance(value["bytes"], bytes):
        raise SampleError(
            f"record {key!r}: column {column!r} has the path of a file, and not its bytes: save the data set again "
            "with the files in it",
            key=key,
        )
    return value["bytes"], value["path"]


def _named(column: str, extension: str) -> str:
    name = column.lower().replace("/", ".").strip("._ ")
    return name if name.rpartition(".")[2] == extension else f"{name}.{extension}" if name else extension


def key_of(value: Any, column: str, number: str) -> str:
    """The key in a column of a record.

    Raises:
        SampleError: it has none.
    """
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if not isinstance(value, (str, int)) or isinstance(value, bool) or value == "":
        raise SampleError(f"record {number} has no key in column {column!r}, but {value!r:.80}: give it one")
    return str(value)


def _arrayed(field: str, value: Any) -> Any:
    """A list as the array that a field of arrays needs."""
    if not isinstance(value, list) or field.rpartition(".")[2] != "npy":
        return value

    return value.array() if isinstance(value, Numbers) else np.array(value)


def _sample_again(row: Row, number: str) -> dict[str, Any]:
    """The sample that a record was before it was exported."""
    sample: dict[str, Any] = {KEY: key_of(row[KEY], KEY, number)}
    for field, value in row.items():
        if field == KEY or value is None:
            continue
        if not isinstance(value, (bytes, str, int)) or isinstance(value, bool):
            raise SampleError(
                f"record {sample[KEY]!r} has the column __key__, which exported samples have, and {field!r} is "
                f"{type(value).__name__}: pass --key __key__ to take it for any other record",
                key=sample[KEY],
            )
        sample[field] = value if isinstance(value, bytes) else str(value).encode("utf-8")
    return sample


def plain_value(value: Any, *, text: bool = False) -> Any:
    """A value as JSON can hold it: bytes are base64; in a column of text, they and lists of them
    are text.
    """
    if isinstance(value, bytes):
        return value.decode("utf-8") if text else {"base64": base64.b64encode(value).decode()}
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return plain_value(value.tolist(), text=text)
    if value is None or isinstance(value, (str, int, float)):  # json writes and reads NaN and Infinity
        return value
    if isinstance(value, Mapping):
        return {str(name): plain_value(item) for name, item in value.items()}
    if isinstance(value, Iterable):
        return [plain_value(item, text=text) for item in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
