"""to_tuple: chosen fields, alternatives, and the error of a missing field."""

import pytest
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import ToTuple
from wds_pipes.testing import check_resume

SAMPLES = [
    {"__key__": "a", "__url__": "https://me:secret@host/x.tar", "jpg": b"1", "cls": b"2"},
    {"__key__": "b", "__url__": "https://me:secret@host/x.tar", "png": b"3", "jpeg": b"4", "cls": b"5"},
    {"__key__": "c", "__url__": "https://me:secret@host/x.tar", "txt": b"6"},
]


def test_resumes_exactly_with_skipped_samples():
    check_resume(lambda: Stream(ToTuple(Given(SAMPLES * 3), "jpg", on_error="skip")))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (("jpg;png", "cls"), [(b"1", b"2"), (b"3", b"5")]),
        (("jpg;jpeg;png",), [(b"1",), (b"4",)]),
        (("png;jpeg;jpg",), [(b"1",), (b"3",)]),
        (("cls", "cls", "__key__"), [(b"2", b"2", "a"), (b"5", b"5", "b")]),
    ],
)
def test_takes_the_first_alternative_that_the_sample_has(fields, expected):
    assert list(Stream(ToTuple(Given(SAMPLES[:2]), *fields))) == expected


def test_none_and_empty_values_are_not_missing():
    """A field is missing only if the sample does not have it."""
    assert list(Stream(ToTuple(Given([{"a": None, "b": b""}]), "a;c", "b;c"))) == [(None, b"")]


def test_a_missing_field_is_named_with_the_fields_of_the_sample():
    """And with key and shard, the shard without credentials."""
    with pytest.raises(wp.SampleError) as caught:
        list(Stream(ToTuple(Given(SAMPLES), "jpg;png", "cls")))
    assert str(caught.value) == "sample 'c' of shard https://host/x.tar has no field 'jpg;png'; it has: 'txt'"
    assert (caught.value.key, caught.value.url) == ("c", "https://host/x.tar")
    with pytest.raises(wp.SampleError, match="a sample has no field 'a'; it has: no fields"):
        list(Stream(ToTuple(Given([{}]), "a")))


def test_skip_counts_each_sample_once(caplog):
    """Also one that lacks two fields."""
    stream = Stream(ToTuple(Given(SAMPLES), "jpg", "cls", on_error="skip"))
    assert list(stream) == [(b"1", b"2")]
    assert stream.counts() == {"delivered": 1, "filtered": 0, "skipped": 2, "dropped": 0}
    assert "sample 'b'" in caplog.text
    assert "secret" not in caplog.text
