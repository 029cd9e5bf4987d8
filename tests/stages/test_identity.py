"""How messages name a sample: by its key and its shard, as far as these are known."""

import pytest
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import (
    DecodeByExt,
    ExplodeRecords,
    FilterSamples,
    MapFields,
    MapSamples,
    RenameFields,
    SelectFields,
    Then,
    ToTuple,
)
from wds_pipes.stages.fields import identity

SECRET = "https://me:secret@host/a.tar?X-Amz-Signature=secret"


@pytest.mark.parametrize(
    ("sample", "name"),
    [
        ({"__key__": "k", "__url__": "a.tar"}, "sample 'k' in shard a.tar"),
        ({"__key__": "k"}, "sample 'k'"),
        ({"__url__": "a.tar"}, "a sample in shard a.tar"),
        ({}, "a sample"),
        (3, "a sample"),
        ({"__key__": "k", "__url__": SECRET}, "sample 'k' in shard https://host/a.tar?..."),
    ],
)
def test_names(sample, name):
    assert identity(sample).name("in") == name
    assert identity(sample).name() == name.replace(" in ", " of ")


def fails(value):
    raise ValueError("no")


def fails_later(items):
    for _ in items:
        fails(0)
        yield


STEPS = {
    "decode": DecodeByExt,
    "explode": lambda source: ExplodeRecords(source, "jsonl", field="cls"),
    "explode without a field": lambda source: ExplodeRecords(source, "jsonl"),
    "filter": lambda source: FilterSamples(source, fails),
    "map": lambda source: MapSamples(source, fails),
    "map to nothing": lambda source: MapSamples(source, lambda sample: None),
    "map a field": lambda source: MapFields(source, {"cls": fails}),
    "rename": lambda source: RenameFields(source, {"new": "none"}),
    "rename to one name": lambda source: RenameFields(source, {"txt": "cls"}),
    "select": lambda source: SelectFields(source, "none"),
    "then": lambda source: Then(source, fails_later),
    "to a tuple": lambda source: ToTuple(source, "none"),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("known", ["key", "url", "nothing"])
def test_what_is_not_known_is_not_said(step, known):
    """Samples may come from any source, so they may have no shard, or no key."""
    sample = {"cls": b"x", "txt": b"y"}
    sample |= {"key": {"__key__": "k"}, "url": {"__url__": SECRET}, "nothing": {}}[known]
    with pytest.raises((wp.WdsError, ValueError)) as caught:
        list(Stream(STEPS[step](Given([sample]))))
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert "None" not in said.replace("returned None for", "")
    assert "secret" not in said
    if known == "key":
        assert "sample 'k'" in said
