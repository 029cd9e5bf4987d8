"""Texts and numbers in one buffer, which workers share."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_group import CONTEXT

from wds_pipes.io.packed import Packed, PackedInts
from wds_pipes.io.urls import identify, redact, relative_names

NAMES = st.text(st.one_of(st.characters(exclude_characters="\0", codec="utf-8"), st.just("\udc80")), max_size=8)
PATHS = st.lists(st.one_of(NAMES, st.sampled_from(["a", "b", "train", "x.tar", "..", ""])), max_size=4).map("/".join)
URLS = st.builds(
    str.__add__, st.sampled_from(["", "/", "s3://bucket/", "https://host/", "file:///", "pipe:cat /"]), PATHS
)


@settings(max_examples=40)
@given(st.lists(URLS, max_size=6), st.integers(-7, 7), st.slices(7))
def test_texts_come_back(texts, number, part):
    """By number, in slices, in order, and from a pickle."""
    for packed in (Packed(texts), pickle.loads(pickle.dumps(Packed(texts)))):
        assert (list(packed), len(packed), packed[part]) == (texts, len(texts), texts[part])
        if -len(texts) <= number < len(texts):
            assert packed[number] == texts[number]


def test_texts_are_added_in_any_order_of_directories():
    """Where a later text has less of the directory in common, that of all is shorter."""
    packed = Packed([f"/data/a/{number}.tar" for number in range(5000)])
    packed.add(["/data/b/0.tar", "/data/a/1.tar"])
    assert (packed.folder, packed[4999], packed[-2:]) == (
        "/data/",
        "/data/a/4999.tar",
        ["/data/b/0.tar", "/data/a/1.tar"],
    )
    with pytest.raises(ValueError, match="contains a NUL"):
        packed.add(["a", "b\0c"])


@settings(max_examples=40)
@given(st.lists(URLS, min_size=1, max_size=5))
def test_plain_texts_are_changed_by_their_directory(texts):
    """What a function makes of the directory is what it makes of each text."""
    packed = Packed(texts)
    for change in (identify, redact):
        assert b"\0".join(packed.changed(change)).split(b"\0") == [encoded(change(text)) for text in texts]
    if packed.plain:
        relative = b"\0".join(packed.changed(lambda url: relative_names([url])[0]))
        assert relative == b"\0".join(map(encoded, relative_names(texts)))


@settings(max_examples=40)
@given(st.lists(URLS, max_size=6), URLS)
def test_a_text_is_found_by_its_number(texts, other):
    """The first of equal ones, in sorted lists and others."""
    for listed in (texts, sorted(texts)):
        packed = Packed(listed)
        for text in (*listed, other, *listed):
            assert packed.number_of(text) == (listed.index(text) if text in listed else None)
        assert list(packed.shown) == list(map(redact, listed))


def encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def test_usual_lists_are_plain():
    for folder in ("", "/data/train/", "s3://bucket/data/", "https://host:8080/a/"):
        assert Packed([f"{folder}{number}.tar" for number in range(3)]).plain is (":8080" not in folder)
    for odd in ("a:b.tar", "a?v=1", "a//b", "./a", "a/../b", "a%20b", "é.tar", "pipe:cat /a/b"):
        assert not Packed([odd, "x/c.tar"]).plain


def put_what_is_there(packed, numbers, results):
    results.put((packed[-1], numbers[-1], type(packed._shared.data).__name__, type(numbers.data).__name__))


def test_workers_map_what_is_large():
    texts, numbers = Packed(f"name-{number}.tar" for number in range(20_000)), PackedInts()
    numbers.add(range(20_000))
    results = CONTEXT.SimpleQueue()
    workers = [CONTEXT.Process(target=put_what_is_there, args=(texts, numbers, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
        assert results.get() == ("name-19999.tar", 19_999, "mmap", "mmap")
