"""to_tuple: chosen fields, alternatives, and the error of a missing field."""

import pytest
from sources import Given

from wds_pipes.core.stream import Stream
from wds_pipes.stages import ToTuple

SAMPLES = [
    {"__key__": "a", "__url__": "https://me:secret@host/x.tar", "jpg": b"1", "cls": b"2"},
    {"__key__": "b", "__url__": "https://me:secret@host/x.tar", "png": b"3", "jpeg": b"4", "cls": b"5"},
    {"__key__": "c", "__url__": "https://me:secret@host/x.tar", "txt": b"6"},
]


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
