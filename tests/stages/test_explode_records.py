"""ExplodeRecords: one field of many records to many samples, exact inside of a field."""

import gzip
import json
import sys
from itertools import islice

import cbor2
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import resumed
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import ExplodeRecords
from wds_pipes.testing import check_resume

URL = "a.tar"


PACK = {
    "jsonl": lambda rows: "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode(),
    "msgpack": lambda rows: b"".join(map(msgpack.packb, rows)),
    "cbor": lambda rows: b"".join(map(cbor2.dumps, rows)),
}
ROWS = [{"text": f"line {number}", "n": number, "list": [number, None]} for number in range(150)]


def sample(key, **fields):
    return {"__key__": key, "__url__": URL, **fields}


def explode(given, kind, **options):
    return list(Stream(ExplodeRecords(Given(given), kind, **options)))


@pytest.mark.parametrize("kind", PACK)
def test_each_record_is_a_sample(kind):
    """With the number of the record in its key, and the other fields of the sample."""
    found = explode([sample("a/b", **{kind: PACK[kind](ROWS), "cls": b"3"})], kind)
    assert found == [sample(f"a/b/{number}", cls=b"3", **row) for number, row in enumerate(ROWS)]


@pytest.mark.parametrize("kind", ["jsonl", "msgpack", "cbor"])
def test_records_that_are_no_dicts_are_one_field(kind):
    rows = [1, "ü", [2, None], {"a": 1}]
    found = explode([sample("k", **{f"x.{kind}": PACK[kind](rows)})], kind)
    assert found == [
        *(sample(f"k/{number}", **{f"x.{kind}": row}) for number, row in enumerate(rows[:3])),
        sample("k/3", a=1),
    ]


@pytest.mark.parametrize(("field", "kind"), [("jsonl.gz", "jsonl"), ("Docs.JSONL", "jsonl"), ("mp", "msgpack")])
def test_the_field_is_found_by_its_extension(field, kind):
    data = PACK[kind](ROWS[:2])
    found = explode([sample("k", **{field: gzip.compress(data) if "gz" in field else data})], kind)
    assert [record["n"] for record in found] == [0, 1]


def test_the_field_can_be_named():
    given = [sample("a", jsonl=b"1\n", other=b"2\n3\n"), sample("b", more=b"4\n")]
    assert [each["__key__"] for each in explode(given, "jsonl", field="other;more")] == ["a/0", "a/1", "b/0"]


def test_fields_without_records_give_no_samples():
    assert explode([sample("a", jsonl=b""), sample("b", jsonl=b"\n \n"), sample("c", jsonl=b"1")], "jsonl") == [
        sample("c/0", jsonl=1)
    ]


def test_lines_end_at_newlines_only():
    """Not at the other characters that Python's str takes for the end of a line."""
    assert explode([sample("a", jsonl='"\u2028 \x85"\r\n"b"'.encode())], "jsonl") == [
        sample("a/0", jsonl="\u2028 \x85"),
        sample("a/1", jsonl="b"),
    ]


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (sample("k", txt=b"x"), {}, "sample 'k' of shard a.tar has no field 'jsonl'; it has: 'txt'"),
        (sample("k", txt=b"x"), {"field": "a;b"}, "has no field 'a;b'"),
        (sample("k", jsonl=b"1", **{"x.jsonl": b"2"}), {}, "several fields of this kind, jsonl, x.jsonl: name one"),
        (sample("k", jsonl=[1]), {}, "field 'jsonl' is list, not bytes: put explode_records.. before decode_by_ext"),
        (sample("k", jsonl=b'{"cls": 1}', cls=b"2"), {}, "record 0 of field 'jsonl' has 'cls', and so has the sample"),
        (sample("k", jsonl=b'{"__key__": 1}'), {}, "has '__key__', and so has the sample"),
    ],
)
def test_what_cannot_be_exploded_is_named(given, options, message):
    with pytest.raises(wp.SampleError, match=message) as caught:
        explode([given], "jsonl", **options)
    assert (caught.value.url, caught.value.key) == (URL, "k")


def test_names_of_fields_are_strings():
    with pytest.raises(wp.SampleError, match="record 1 of field 'cbor' has the name 3, which is not a string"):
        explode([sample("k", cbor=cbor2.dumps({}) + cbor2.dumps({3: 4}))], "cbor")


HOSTILE = [
    ("jsonl", b"1\n{\n", 1),
    ("jsonl", b"1\n" + b"[" * 200_000, 1),
    ("jsonl", b"1\n\xff", 1),
    ("jsonl.gz", b"no gzip", 0),
    ("msgpack", b"\x01\xdd\xff\xff\xff\xff", 1),
    ("msgpack", b"\x01\xc6\xff\xff\xff\xff", 1),
    ("msgpack", b"\x01" + b"\x81" * 200_000, 1),
    ("cbor", b"\x01\x9b\x7f" + b"\xff" * 7, 1),
    ("cbor", b"\x01" + b"\x81" * 200_000, 1),
]


@pytest.mark.parametrize(("field", "data", "good"), HOSTILE, ids=[case[0] for case in HOSTILE])
def test_a_damaged_record_is_named_and_those_before_it_come(field, data, good):
    kind = field.partition(".")[0]
    found = iter(Stream(ExplodeRecords(Given([sample("k", **{field: data})]), kind)))
    assert len(list(islice(found, good))) == good
    with pytest.raises(
        wp.DecodeError, match=rf"record {good} of field '{field}' of sample 'k' in shard a\.tar"
    ) as caught:
        next(found)
    assert (caught.value.url, caught.value.key, caught.value.field) == (URL, "k", field)
    assert str(caught.value).endswith(". Correct it, or pass on_error='skip'.")


BAD = [
    sample("a", jsonl=b"1\n2\n{\n4\n"),
    sample("b", txt=b"x"),
    sample("c", jsonl=b'5\n{"__key__": 6}\n'),
    sample("d", jsonl=b"7\n"),
]


def test_the_rest_of_a_bad_field_is_skipped_and_counted():
    """At any cut of the epoch, each once."""
    wanted = explode(BAD, "jsonl", on_error="skip")
    assert [record["jsonl"] for record in wanted] == [1, 2, 5, 7]
    epoch, _ = check_resume(lambda: Stream(ExplodeRecords(Given(BAD), "jsonl", on_error="skip")))
    assert epoch == wanted
    _, again = resumed(lambda: Stream(ExplodeRecords(Given(BAD), "jsonl", on_error="skip")), 2)
    assert list(again) == wanted[2:]
    assert again.counts() == {"delivered": 4, "filtered": 0, "skipped": 3, "dropped": 0}
    with pytest.raises(wp.SampleError, match="'b'.*has no field"):
        explode(BAD, "jsonl", on_error="skip", max_errors=1)


def test_a_missing_package_is_not_skipped(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(wp.DecodeError, match="pip install msgpack"):
        explode([sample("k", msgpack=b"x")], "msgpack", on_error="skip")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=5,
)


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["jsonl", "msgpack", "cbor"]),
    st.lists(st.lists(VALUES | st.integers(5000, 90_000).map("x".__mul__), max_size=4), max_size=4),
)
def test_a_resume_at_every_record_goes_on_there(kind, fields):
    """Whatever the records are: none lost, none twice, and the state stays the same."""
    given = [sample(str(number), **{kind: PACK[kind](rows)}) for number, rows in enumerate(fields)]
    epoch, _ = check_resume(lambda: Stream(ExplodeRecords(Given(given), kind)))
    assert len(epoch) == sum(map(len, fields))
