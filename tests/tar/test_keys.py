"""How names split: the table of the format, and the rule of the webdataset package."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from wds_pipes.tar import split_key
from wds_pipes.tar.keys import is_metadata

TABLE = {
    "a.jpg": ("a", "jpg"),
    "a.b.jpg": ("a", "b.jpg"),
    "dir.v1/a.seg.png": ("dir.v1/a", "seg.png"),
    "./a.jpg": ("./a", "jpg"),
    "a b.JPG": ("a b", "jpg"),
    "A.Seg.PNG": ("A", "seg.png"),
    "a.": ("a", ""),
    "a..jpg": ("a", ".jpg"),
    "/abs/a.jpg": ("/abs/a", "jpg"),
    "../a.jpg": ("../a", "jpg"),
    ".hid/a.jpg": (".hid/a", "jpg"),
    "größe/日本.txt": ("größe/日本", "txt"),
    "\udcff\udcfe.txt": ("\udcff\udcfe", "txt"),
    "a\nb.txt": ("a\nb", "txt"),
    ".hidden.txt": None,
    "._a.jpg": None,
    "dir/.hidden.txt": None,
    "dir/._a.jpg": None,
    ".DS_Store": None,
    "a": None,
    "dir/a": None,
    "a.v1.0/b": None,
    "dir.v1/": None,
    "": None,
    ".": None,
    "..": None,
    "/": None,
    "__meta__": None,
    "__x__/a.jpg": None,
    "__x__/deep/a.jpg": None,
    "____": None,
    "PaxHeaders.123/a.jpg": None,
    "./PaxHeaders.9/a.jpg": None,
    "d/PaxHeaders.1/b.c.txt": None,
    "PaxHeaders.jpg": ("PaxHeaders", "jpg"),
    "PaxHeaders.x/a.jpg": ("PaxHeaders.x/a", "jpg"),
    "__x__.jpg": ("__x__", "jpg"),
    "__x.jpg": ("__x", "jpg"),
    "__x/a.jpg": ("__x/a", "jpg"),
    "___/a.jpg": ("___/a", "jpg"),
    "dir/__x__/a.jpg": ("dir/__x__/a", "jpg"),
    "dir/__x__.jpg": ("dir/__x__", "jpg"),
}


def test_metadata_begins_and_ends_with_two_underscores():
    assert all(map(is_metadata, ["__key__", "__url__", "__local_path__", "____"]))
    assert not any(map(is_metadata, ["__mask.png", "__mask", "mask__", "_key_", "___", "__", "", "key"]))


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name):
    assert split_key(name) == TABLE[name]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.seg.png", ("a.seg", "png")),
        ("dir.v1/a.PNG", ("dir.v1/a", "png")),
        ("a.", ("a", "")),
        ("dir.v1/a", None),
        ("a", None),
        (".hidden", None),
        (".hidden.txt", None),
        ("dir/._a.jpg", None),
        ("__meta__/a.b.jpg", None),
        ("__x__.jpg", ("__x__", "jpg")),
    ],
)
def test_the_last_dot(name, expected):
    assert split_key(name, "last-dot") == expected


def test_a_function():
    """It says all; only the field is put in lower case."""
    assert split_key("part/7-image", lambda name: tuple(name.split("-"))) == ("part/7", "image")
    assert split_key("X-IMAGE", lambda name: tuple(name.split("-"))) == ("X", "image")
    assert split_key("other", lambda name: None) is None


NAMES = st.text(alphabet="aB_./é \udcff", max_size=14)


@given(NAMES)
@example("a.b/c.d.e")
@example("__a__/b.c")
def test_what_is_no_hidden_file_splits_as_webdataset_splits_it(name):
    """webdataset's own expressions; it takes the part of a hidden file's name before its dot,
    which is empty, for a key.
    """
    match = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", name)
    theirs = (match.group(1), match.group(2).lower()) if match and not re.match(r"__[^/]*__($|/)", name) else None
    if theirs and theirs[0].endswith("/"):
        theirs = None
    if not (name.startswith("__") and name.partition("/")[0].endswith("__")):
        assert split_key(name) == theirs


@given(NAMES, st.sampled_from(["first-dot", "last-dot"]))
def test_key_dot_field_is_the_name_again(name, rule):
    """No name is altered but for the case of the field."""
    parts = split_key(name, rule)
    if parts is not None:
        assert f"{parts[0]}.{parts[1]}" == name[: len(parts[0]) + 1] + name[len(parts[0]) + 1 :].lower()
        assert parts[0]
        assert "/" not in parts[1]
