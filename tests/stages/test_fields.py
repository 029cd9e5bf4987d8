"""Fields: selecting, renaming and changing them."""

import collections

import pytest
from sources import Given
from tars import tar

import wds_pipes as wp
from wds_pipes import tools
from wds_pipes.core.stream import Stream
from wds_pipes.stages import DecodeByExt, MapFields, RenameFields, SelectFields, ToTuple
from wds_pipes.stages.fields import identity

Pair = collections.namedtuple("Pair", "image label")
SAMPLES = [
    {"__key__": "0", "__url__": "https://me:secret@host/x.tar", "jpg": 1, "cls": 2},
    {"__key__": "1", "__url__": "https://me:secret@host/x.tar", "png": 3, "cls": 4},
]


def given(kind, *args, **options):
    return [
        {name: value for name, value in sample.items() if name != "__url__"}
        for sample in Stream(kind(Given(SAMPLES), *args, **options))
    ]


def test_select_keeps_the_named_ones_in_their_order():
    assert [list(sample.items()) for sample in given(SelectFields, "cls", "jpg;png")] == [
        [("__key__", "0"), ("cls", 2), ("jpg", 1)],
        [("__key__", "1"), ("cls", 4), ("png", 3)],
    ]


def test_select_keeps_metadata():
    """And no field that only begins with two underscores."""
    sample = {"__key__": "a", "__local_path__": "p", "__mask.png": 1, "jpg": 2}
    assert list(Stream(SelectFields(Given([sample]), "jpg"))) == [{"__key__": "a", "__local_path__": "p", "jpg": 2}]


def test_rename_leaves_the_others_where_they_are():
    assert [list(sample.items()) for sample in given(RenameFields, {"image": "jpg;png"})] == [
        [("__key__", "0"), ("image", 1), ("cls", 2)],
        [("__key__", "1"), ("image", 3), ("cls", 4)],
    ]
    # both at once
    assert given(RenameFields, {"cls": "jpg;png", "jpg": "cls"})[0] == {"__key__": "0", "cls": 1, "jpg": 2}


def test_map_changes_values_and_not_the_samples_of_its_source():
    assert given(MapFields, {"jpg;png": str, "cls": float}) == [
        {"__key__": "0", "jpg": "1", "cls": 2.0},
        {"__key__": "1", "png": "3", "cls": 4.0},
    ]
    assert SAMPLES[0]["jpg"] == 1


def test_map_changes_places_of_tuples():
    """And no other place; a named tuple stays one."""
    pairs = [(1, 2), Pair(3, 4)]
    changed = list(Stream(MapFields(Given(pairs), {1: str})))
    assert changed == [(1, "2"), (3, "4")]
    assert [type(pair) for pair in changed] == [tuple, Pair]
    assert list(Stream(MapFields(Given(pairs), {0: float, 1: str}))) == [(1.0, "2"), (3.0, "4")]


@pytest.mark.parametrize(
    ("functions", "sample", "error", "message"),
    [
        ({2: str}, (1, 2), wp.SampleError, "there is no place 2 in a tuple of 2: places are numbered from 0"),
        ({0: str}, [1, 2], TypeError, "takes samples as tuples, and its source gave list: .* after to_tuple"),
        ({0: str}, SAMPLES[0], TypeError, "its source gave dict: put it after to_tuple\\(\\), or name fields"),
        ({"jpg": str}, (1, 2), TypeError, "its source gave tuple: .* or number the places, as in {0: fn}"),
    ],
)
def test_map_of_places_that_are_not_there(functions, sample, error, message):
    with pytest.raises(error, match=message):
        list(Stream(MapFields(Given([sample]), functions)))


@pytest.mark.parametrize(
    ("kind", "argument"), [(SelectFields, "jpg"), (RenameFields, {"image": "jpg"}), (MapFields, {"jpg": str})]
)
def test_a_missing_field_is_an_error_that_lists_the_other_fields_or_is_skipped(kind, argument, caplog):
    with pytest.raises(
        wp.SampleError, match="sample '1' of shard https://host/x.tar has no field 'jpg'; it has: 'png', 'cls'"
    ) as caught:
        given(kind, argument)
    assert (caught.value.key, caught.value.url) == ("1", "https://host/x.tar")
    assert len(given(kind, argument, on_error="skip")) == 1
    with pytest.raises(wp.SampleError, match="no field 'jpg'"):
        given(kind, argument, on_error="skip", max_errors=0)
    assert "no field 'jpg'" in caplog.text


@pytest.mark.parametrize("names", [{"cls": "jpg"}, {"a": "jpg", "b": "jpg"}], ids=["a field has it", "one field twice"])
def test_two_fields_of_one_name_are_an_error(names):
    with pytest.raises(wp.SampleError, match="two fields of sample '0' .* one name"):
        given(RenameFields, names)


def test_an_error_of_a_function_names_the_step_and_the_sample():
    with pytest.raises(ZeroDivisionError) as caught:
        given(MapFields, {"cls": lambda value: 1 // 0})
    assert caught.value.__notes__ == [
        "raised by the function of map_fields() on sample '0' of shard https://host/x.tar"
    ]


# How messages name a sample

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


def test_a_missing_field_that_may_begin_in_a_key_names_the_rule(tmp_path):
    """Where keys have dots, the error says how to read them, and so does verify."""
    path = str(tmp_path / "x.tar")
    with open(path, "wb") as file:
        file.write(tar([(f"v1.0_{n}.{field}", b"x") for n in range(9) for field in ("jpg", "txt")]))
    for reading in (
        wp.ShardList(path).open_shards().load_tar().group_by_key().to_tuple("txt;text"),
        wp.ShardList(path).open_shards().load_tar().group_by_key(fields=["txt"]),
    ):
        with pytest.raises(wp.WdsError) as caught:
            list(reading)
        assert caught.value.mend == "If '0_0' is a part of the key, pass group_by_key(key_split='last-dot')."
        assert caught.value.mend_cli == "If '0_0' is a part of the key, pass --key-split last-dot."
    assert {finding.kind for finding in tools.verify(path).findings} == {"dotted-name"}
    assert len(list(wp.ShardList(path).open_shards().load_tar().group_by_key(key_split="last-dot"))) == 9


# Fields that may be missing, and several of one kind

SEVERAL = [
    {"__key__": "0", "10.jpg": 10, "2.jpg": 2, "mask.png": 0, "txt": "a"},
    {"__key__": "1", "1.jpg": 1},
]


def several(kind, *args, **options):
    return list(Stream(kind(Given(SEVERAL), *args, **options)))


def test_a_field_may_be_missing_and_a_pattern_is_a_list():
    """In natural order."""
    assert several(ToTuple, "__key__", "*.jpg", "txt?") == [("0", [2, 10], "a"), ("1", [1], None)]
    assert several(ToTuple, "*.png?", "txt;cls?") == [([0], "a"), ([], None)]
    assert several(SelectFields, "*.jpg", "txt?") == [
        {"__key__": "0", "2.jpg": 2, "10.jpg": 10, "txt": "a"},
        {"__key__": "1", "1.jpg": 1},
    ]
    assert several(RenameFields, {"images": "*.jpg", "text": "txt?"}) == [
        {"__key__": "0", "mask.png": 0, "text": "a", "images": [2, 10]},
        {"__key__": "1", "images": [1]},
    ]


@pytest.mark.parametrize("choice", ["txt", "*.png"])
def test_what_may_not_be_missing_is_an_error(choice):
    with pytest.raises(wp.SampleError, match="has no field"):
        several(ToTuple, choice)


def test_a_pattern_cannot_take_the_name_of_another_field():
    with pytest.raises(wp.SampleError, match="two fields of sample '0' would have one name"):
        several(RenameFields, {"txt": "*.jpg"})


def test_fields_to_decode_may_be_named_by_a_pattern():
    sample = {"__key__": "0", "a.cls": b"1", "b.cls": b"2", "cls": b"3"}
    [decoded] = Stream(DecodeByExt(Given([sample]), only=["*.cls"]))
    assert decoded == {"__key__": "0", "a.cls": 1, "b.cls": 2, "cls": b"3"}


def test_a_number_in_a_name_is_one_of_digits():
    """Other characters may be numbers for Python too."""
    sample = {"__key__": "0", "10.jpg": 10, "²1.jpg": 1, "2.jpg": 2}
    assert list(Stream(ToTuple(Given([sample]), "*.jpg"))) == [([2, 10, 1],)]


def test_a_field_that_may_be_missing_is_named_once_for_all_alternatives():
    with pytest.raises(ValueError, match=r"write 'txt;caption\?', not 'txt\?;caption'"):
        ToTuple(Given([]), "txt?;caption")
    sample = {"__key__": "0", "txt?": b"1", "txt1": b"1"}
    [decoded] = Stream(DecodeByExt(Given([sample]), {"txt?;txt1": int}, only=["txt?"]))
    assert decoded["txt1"] == b"1"  # where a ? is one of a name
