"""ExplodeRecords: one field of many records to many samples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from wds_pipes.codecs.codec import MAX_PACKED, PACKED
from wds_pipes.codecs.table import unpack
from wds_pipes.codecs.text import RECORDS
from wds_pipes.core.options import check_choice
from wds_pipes.core.reads_again import FlatMap
from wds_pipes.core.stage import Stage
from wds_pipes.core.tolerant import OnError, Tolerant
from wds_pipes.errors import SampleError
from wds_pipes.stages.decode_by_ext import undecodable
from wds_pipes.stages.fields import check_sample, field_of, identity, missing, read_choices
from wds_pipes.tar.keys import is_metadata

_BYTES = (bytes, bytearray, memoryview)


class ExplodeRecords(FlatMap[dict[str, Any]], Tolerant[dict[str, Any]]):
    """Make a sample of each record of a field that holds many (functional name:
    ``explode_records``).

    For shards whose members are files of records: ``part-17.jsonl`` with a document in each line.
    Members are read one at a time, and records as they are needed::

        pipe.group_by_key().explode_records("jsonl").shuffle_buffer(10_000)

    The record number 5 (from 0) of the sample ``"part-17"`` becomes the sample with the key
    ``"part-17/5"``, and the shard of that sample. If a record is a dict, its items are the fields
    of the sample: Python's values, which need no ``decode_by_ext``. Any other record is one field,
    which has the name of the exploded field. Each sample also has the other fields of the sample
    that was exploded: the same objects, not copies.
    To leave them out, name in ``group_by_key(fields=["jsonl"])`` what you need.

    ==========  ====================================================================================
    jsonl       an object in each line; blank lines are left out
    msgpack     objects one after another; needs the package msgpack
    cbor        objects one after another (RFC 8742); needs the package cbor2
    ==========  ====================================================================================

    Args:
        source: a pipe of samples whose field is bytes: put it before ``decode_by_ext``, or name the
            fields to decode in its ``only=``.
        kind: what the field is: ``"jsonl"``, ``"msgpack"`` or ``"cbor"``.
        field: the name of the field, as in ``"text.jsonl"`` or ``"mp;msgpack.gz"``, of which the
            first that a sample has is exploded. By default, the field whose extension is that of
            the kind, which may be compressed (``jsonl.gz``).
        on_error: what to do at a record that is bad, and at a sample without the field:
            ``"raise"``, or ``"skip"``: leave out this record and all that come after it in the
            field, and count that as one skipped sample; None: as ``ShardList(on_error=...)`` says.
            A missing package is always raised.
        max_errors: with ``"skip"``, how often that may happen in an epoch; None: no limit.

    Raises:
        SampleError: during iteration: a sample lacks the field, or has several of this kind; the
            field is not bytes; a record has a field that the sample has too, or one whose name is
            not a string.
        DecodeError: during iteration: a record cannot be decoded. The message has its number. The
            records before it were yielded.
        TypeError, ValueError: when the stage is built: ``kind`` or ``field`` is wrong.

    Checkpoint: how many records of the current sample were yielded, and the number of skipped
    samples. A resume reads this sample again, and decodes the records before this place again.
    """

    @dataclass(slots=True)
    class At(FlatMap.At):
        skipped: int = 0

    tallies = ("skipped",)
    order_options = ("kind", "field")

    def __init__(
        self,
        source: Stage[Any],
        kind: str,
        *,
        field: str | None = None,
        on_error: OnError | None = None,
        max_errors: int | None = None,
    ) -> None:
        Tolerant.__init__(self, source, on_error, max_errors)
        self.kind = check_choice("kind", kind, *RECORDS)
        self.field = field
        self._names = None if field is None else read_choices([field])[0]

    def expand(self, item: Any) -> Iterable[dict[str, Any]]:
        check_sample(item, "explode_records")
        try:
            yield from self._exploded(item)
        except SampleError as error:
            if isinstance(error.__cause__, ImportError):
                raise
            self.skip(error)  # nothing of this item comes after it, so a resume counts it only once

    def _exploded(self, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The samples of a sample; SampleError at the first record that cannot be one."""
        field = self._field_of(item)
        data, key = item[field], item.get("__key__")
        if not isinstance(data, _BYTES) or isinstance(key, list):
            raise _error(
                item,
                f"field {field!r} is {type(data).__name__}, not bytes: put explode_records() before decode_by_ext() "
                "and batch_samples()",
            )
        rest = {name: value for name, value in item.items() if name not in (field, "__key__")}
        for number, record in enumerate(self._records(item, field, bytes(data))):
            fields = record if isinstance(record, dict) else {field: record}
            if not fields.keys().isdisjoint(item.keys() - {field}) or not all(type(name) is str for name in fields):
                odd = [name for name in fields if type(name) is not str]
                twice = [name for name in fields if name in item]
                raise _error(
                    item,
                    f"record {number} of field {field!r} has the name {odd[0]!r:.80}, which is not a string"
                    if odd
                    else f"record {number} of field {field!r} has {', '.join(map(repr, twice))}, and so has the "
                    "sample: rename or leave out the one of the sample, with rename_fields() or "
                    "group_by_key(fields=...)",
                )
            yield {"__key__": f"{key}/{number}", **rest, **fields}

    def _records(self, sample: dict[str, Any], field: str, data: bytes) -> Iterator[Any]:
        """The records of a field; DecodeError with the number of one that cannot be decoded."""
        number = 0
        try:
            for kind in _packed(field)[1]:
                data = unpack(data, kind)
            for record in RECORDS[self.kind][1](data):
                yield record
                number += 1
        except Exception as error:
            if isinstance(error, MemoryError):
                raise
            mend = "" if self.may_skip else "Correct it, or pass on_error='skip'."
            raise undecodable(sample, field, error, mend, part=f"record {number} of ") from error

    def _field_of(self, sample: dict[str, Any]) -> str:
        """The name of the field to explode."""
        if self._names is not None:
            return field_of(sample, self._names, self.source)
        extensions = RECORDS[self.kind][0]
        found = [name for name in sample if not is_metadata(name) and _packed(name)[0].rpartition(".")[2] in extensions]
        if not found:
            raise missing(self.source, sample, extensions)
        if len(found) > 1:
            raise _error(sample, f"it has several fields of this kind, {', '.join(found)}: name one in field=")
        return found[0]


def _packed(field: str) -> tuple[str, list[str]]:
    """The name of a field without the parts that mean compression, and these, the last first."""
    name, kinds = field.lower(), list[str]()
    while (kind := name.rpartition(".")[2]) in PACKED and len(kinds) < MAX_PACKED:
        kinds.append(kind)
        name = name.rpartition(".")[0]
    return name, kinds


def _error(sample: dict[str, Any], why: str) -> SampleError:
    named = identity(sample)
    return SampleError(f"{named.name()} cannot be exploded: {why}.", url=named.url, key=named.key)
