"""Text and objects: txt, cls, json, jsonl, csv, yaml, MessagePack, CBOR."""

from __future__ import annotations

import csv
import functools
import io
import json
import sys
from decimal import Decimal
from typing import Any

from wds_pipes.codecs.names import MAX_MERGED
from wds_pipes.core.importing import library


def decode_text(data: bytes) -> str:
    """Decode UTF-8."""
    return data.decode("utf-8")


def encode_text(value: Any) -> bytes:
    """Encode a str as UTF-8."""
    if not isinstance(value, str):
        raise TypeError(f"text must be str, not {type(value).__name__}")
    return value.encode("utf-8")


def exact_integer(data: bytes) -> int | None:
    """The integer of 64 bits that is written as these bytes; None: they are another form of one,
    such as ``007``, or none.
    """
    if len(data) > len(str(-(1 << 63))):
        return None
    try:
        number = int(data)
    except ValueError:
        return None
    return number if str(number).encode() == data and -(1 << 63) <= number < 1 << 63 else None


def encode_integer(value: Any) -> bytes:
    """Encode an int, a text that is read as one, or an array or tensor without dimensions."""
    if isinstance(value, str):
        data = value.encode("utf-8")
        try:
            int(data)  # as it is decoded
        except ValueError:
            raise TypeError(f"it must be an integer, not {value!r:.80}; a text belongs in a field named txt") from None
        return data
    # Arrays and tensors without dimensions, such as labels of torch, are integers too.
    whole = value.item() if getattr(value, "shape", None) == () and hasattr(value, "item") else value
    if isinstance(whole, bool) or not isinstance(whole, int):
        raise TypeError(f"it must be an integer, not {type(value).__name__}; a text belongs in a field named txt")
    return str(whole).encode()


def encode_json(value: Any) -> bytes:
    """Encode an object; a str is the JSON text itself."""
    if isinstance(value, str):
        _check_json(value)
        return value.encode("utf-8")
    return _dump(value)


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8")


def _check_json(text: str | bytes) -> None:
    try:
        json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"a str is written as the JSON text that it is, and this one does not parse ({error}): pass an object, "
            "json.dumps(text) for a JSON string, or name the field txt"
        ) from error


def decode_lines(data: bytes) -> list[Any]:
    """Decode JSON Lines; blank lines are left out."""
    return [json.loads(line) for line in data.splitlines() if line.strip()]


def encode_lines(value: Any) -> bytes:
    """Encode a list of objects as JSON Lines; a str is the text itself."""
    if isinstance(value, str):
        data = value.encode("utf-8")
        for line in data.splitlines():
            if line.strip():
                _check_json(line)
        return data
    if isinstance(value, dict):
        raise TypeError("it must be a list of objects, or JSON Lines as str, not dict: pass [value]")
    return b"".join(_dump(item) + b"\n" for item in value)


def decode_csv(data: bytes) -> list[list[str]]:
    """Decode rows of strings."""
    return list(csv.reader(io.StringIO(data.decode("utf-8"), newline="")))


def encode_csv(value: Any) -> bytes:
    """Encode rows of strings and numbers; a str is the text itself. ValueError if they would not be
    read back.
    """
    if isinstance(value, str):
        return _checked_csv(value.encode("utf-8"))
    rows = [list(row) if isinstance(row, (list, tuple)) else None for row in value]
    if any(row is None or not all(type(cell) in (str, int, float) for cell in row) for row in rows):
        raise TypeError("it must be a list of rows of strings or numbers, or csv as str")
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)  # type: ignore[arg-type]
    return _checked_csv(text.getvalue().encode("utf-8"))


def _checked_csv(data: bytes) -> bytes:
    """Return ``data`` if it can be read.

    A cell has 131,072 characters at most: csv.field_size_limit() is for the whole process, whose
    other code may need it, so the decoder does not raise it.
    """
    try:
        decode_csv(data)
    except csv.Error as error:
        raise ValueError(f"it would not be read back ({error}): write long texts to a field of json or txt") from error
    return data


def decode_yaml(data: bytes) -> Any:
    """Decode an object of plain types."""
    yaml = library("yaml", "pyyaml", "a YAML field")
    return yaml.load(data, _yaml_loader(yaml))


def encode_yaml(value: Any) -> bytes:
    """Encode an object of plain types; a str is the text itself."""
    if isinstance(value, str):
        return value.encode("utf-8")
    yaml = library("yaml", "pyyaml", "a YAML field")
    text: str = yaml.safe_dump(value, allow_unicode=True, sort_keys=False)
    if "\x85" in text:  # a line break that PyYAML writes as it is, and reads as a blank: escape it
        text = yaml.safe_dump(value, sort_keys=False)
    return text.encode("utf-8")


# Numbers such as 1:30:00, to the base 60: PyYAML takes time quadratic in their places.
_SEXAGESIMAL = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_MAX_SEXAGESIMAL = 100


@functools.cache
def _yaml_loader(yaml: Any) -> Any:
    """PyYAML's safe loader with merge keys (``<<``) of our own, and numbers of bounded length.

    A short text may multiply its content with them: they are limited here. And PyYAML's releases
    differ: in 6.0.4, of two mappings merged that have the same key, the last one wins. The
    specification lets the first one win, as every other release does.
    """

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            pairs, node.value = node.value, []  # a mapping that merges itself adds nothing
            own, merged = [], []
            for key, value in pairs:
                if key.tag == "tag:yaml.org,2002:merge":
                    # The last pair with a key wins, so what has precedence comes last.
                    for mapping in reversed(value.value) if isinstance(value, yaml.SequenceNode) else [value]:
                        merged += self._pairs(mapping, node)
                        if len(merged) > MAX_MERGED:
                            raise ValueError(
                                f"its merge keys (<<) bring more than {MAX_MERGED:,} pairs into one mapping"
                            )
                else:
                    if key.tag == "tag:yaml.org,2002:value":  # "=" is a plain key
                        key.tag = "tag:yaml.org,2002:str"
                    own.append((key, value))
            node.value = merged + own

        def _pairs(self, mapping: Any, node: Any) -> list[tuple[Any, Any]]:
            if not isinstance(mapping, yaml.MappingNode):
                raise yaml.constructor.ConstructorError(
                    "while constructing a mapping",
                    node.start_mark,
                    f"a merge key (<<) takes a mapping or a list of mappings, not a {mapping.id}",
                    mapping.start_mark,
                )
            self.flatten_mapping(mapping)
            pairs: list[tuple[Any, Any]] = mapping.value
            return pairs

        def construct_scalar(self, node: Any) -> Any:
            if node.tag in _SEXAGESIMAL and node.value.count(":") > _MAX_SEXAGESIMAL:
                raise ValueError(f"a number of it, {node.value:.10}..., has more than {_MAX_SEXAGESIMAL} colons")
            return super().construct_scalar(node)

    return Loader


def decode_msgpack(data: bytes) -> Any:
    """Decode one MessagePack object."""
    return library("msgpack", "msgpack", "a MessagePack field").unpackb(data)


def encode_msgpack(value: Any) -> bytes:
    """Encode one MessagePack object; ValueError if it would not be read back."""
    msgpack = library("msgpack", "msgpack", "a MessagePack field")
    data = bytes(msgpack.packb(value))
    try:
        msgpack.unpackb(data)
    except ValueError as error:
        raise ValueError(f"it would not be read back ({error}): use str for the keys of dicts") from error
    return data


# The digits of a decimal fraction or a bigfloat, as Python's own limit for int("..."): the time to
# make a Decimal is quadratic in them.
_MAX_MANTISSA = 10**4300


def cbor_decoder(file: io.BytesIO) -> Any:
    """A decoder of CBOR objects, each in time that grows about linearly with its bytes."""
    cbor2 = library("cbor2", "cbor2", "a CBOR field")
    return cbor2.CBORDecoder(file, semantic_decoders={4: _decimal_fraction, 5: _bigfloat})


def _decimal_fraction(parts: Any, immutable: bool) -> Decimal:
    exponent, mantissa = _exponent_and_mantissa(parts)
    sign, digits, _ = Decimal(mantissa).as_tuple()
    return Decimal((sign, digits, exponent))


def _bigfloat(parts: Any, immutable: bool) -> Decimal:
    exponent, mantissa = _exponent_and_mantissa(parts)
    return Decimal(mantissa) * 2 ** Decimal(exponent)


def _exponent_and_mantissa(parts: Any) -> tuple[int, int]:
    problem = None
    if not isinstance(parts, (list, tuple)) or [type(part) for part in parts] != [int, int]:
        problem = "is not two integers"
    elif max(map(abs, parts)) >= _MAX_MANTISSA:
        problem = "has more than 4,300 digits"
    if problem is not None:
        raise sys.modules["cbor2"].CBORDecodeError(f"a decimal fraction or bigfloat {problem}")
    exponent, mantissa = parts
    return exponent, mantissa


def decode_cbor(data: bytes) -> Any:
    """Decode one CBOR object; ValueError if more follows, which ``explode_records`` reads."""
    file = io.BytesIO(data)
    value = cbor_decoder(file).decode()
    if file.tell() < len(data):
        raise ValueError(
            f"its first object ends at byte {file.tell()} of {len(data)}: explode_records('cbor') reads several"
        )
    return value


def encode_cbor(value: Any) -> bytes:
    """Encode one CBOR object."""
    return bytes(library("cbor2", "cbor2", "a CBOR field").dumps(value))
