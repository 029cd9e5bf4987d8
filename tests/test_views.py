"""Views: keys, parts of a split and numbers select the same samples for
SampleList and IndexedShards; counts, states and bytes of views; and what wrong selections do.
"""

import os
import pickle
import random
import struct

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import after, keys_of, loaded, resumed, through_json
from remote import bare, content
from tars import fill, put, tar

import wds_pipes as wp
from wds_pipes.tar import TarWriter, index_shards
from wds_pipes.testing import check_resume, make_shards

MANY = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)


def fetched(urls, **options):
    return list(wp.SampleList(urls, **options).fetch_samples())


# The forms


KEYS = ["00000031", "00000002", "00000049", "00000002"]
FORMS = {
    "slice": (slice(None, None, 10), range(0, 50, 10)),
    "slice from the end": (slice(-1, 39, -2), range(49, 39, -2)),
    "range": (range(5, 30, 3), range(5, 30, 3)),
    "range backwards": (range(9, -1, -3), [9, 6, 3, 0]),
    "range from the end": (range(-3, 2), [47, 48, 49, 0, 1]),
    "numbers": ([40, 3, 3, -1], [40, 3, 3, 49]),
    "array": (np.array([7, 2], np.uint8), [7, 2]),
    "tensor": (torch.tensor([7, 2]), [7, 2]),
    "set of numbers": ({33, 10, 2, 9}, [2, 9, 10, 33]),
    "mask": (np.arange(50) % 7 == 0, range(0, 50, 7)),
    "keys": (KEYS, [2, 31, 49]),
    "set of keys": (frozenset(KEYS), [2, 31, 49]),
    "generator of keys": (iter(KEYS), [2, 31, 49]),
    "one key and none": (["00000031", "none"], [31]),
}


@pytest.mark.parametrize("name", FORMS)
def test_each_form_selects_the_same_for_both(name, indexed, stream):
    where, numbers = FORMS[name]
    numbers, expected = list(numbers), [stream[number] for number in numbers]
    where = list(where) if name.startswith("generator") else where
    listed = wp.SampleList(indexed, where=iter(where) if name.startswith("generator") else where)
    assert list(listed.fetch_samples()) == expected
    assert listed.sample_count() == len(listed.fetch_samples()) == len(expected)
    view = wp.IndexedShards(indexed).select(where)
    assert (list(view), list(view.numbers)) == (expected, numbers)
    assert fetched(indexed, where=view.numbers) == expected
    left = [sample for number, sample in enumerate(stream) if number not in numbers]
    assert fetched(indexed, exclude=where) == left == list(wp.IndexedShards(indexed).select(exclude=where))


def test_numbers_of_few_bits(tmp_path):
    """An array whose type cannot hold the number of samples."""
    [url] = make_shards(tmp_path, shards=1, samples=[300])
    index_shards([url], offsets=True)
    assert list(wp.IndexedShards(url).select(np.array([7, -1], np.int8)).numbers) == [7, 299]
    assert list(wp.IndexedShards(url).select(np.array([7, 255], np.uint8)).numbers) == [7, 255]


def test_files_of_keys(indexed, stream, tmp_path, web):
    path = tmp_path / "keys.txt"
    path.write_bytes(b"\xef\xbb\xbf00000031\r\n\r\n00000002\r\n")
    url = web.put("d/keys.txt", path.read_bytes())
    for where in (path, f"@{path}", f"@{url}"):
        assert fetched(indexed, where=where) == [stream[2], stream[31]]
    path.write_text("31\n")
    with pytest.raises(ValueError, match=r"no sample has the key '31'\. The first .* the key '00000000'"):
        wp.SampleList(indexed, where=path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="list of keys .* is empty"):
        wp.SampleList(indexed, where=path)
    with pytest.raises(wp.ShardError, match="none.txt does not exist: name a file with a key"):
        wp.SampleList(indexed, where=f"@{tmp_path}/none.txt")


def test_parts_of_a_split(indexed, stream):
    parts = wp.split_by_key({"train": 0.7, "val": 0.2, "test": 0.1})
    found = {name: keys_of(fetched(indexed, where=part)) for name, part in parts.items()}
    assert sorted(key for part in found.values() for key in part) == keys_of(stream)
    assert len(found["train"]) > len(found["val"]) > 0
    views = wp.IndexedShards(indexed).split({"train": 0.7, "val": 0.2, "test": 0.1})
    assert {name: list(view.keys()) for name, view in views.items()} == found
    assert keys_of(fetched(indexed, exclude=parts["train"])) == sorted(found["val"] + found["test"])
    for name, part in parts.items():
        assert [key for key in keys_of(stream) if key in part] == found[name]
    later = wp.IndexedShards(indexed)[20:]
    assert list(later.select(parts["val"]).keys()) == [key for key in found["val"] if int(key) >= 20]
    for wrong in ({}, {"a": 0.5}, {"a": 1.5, "b": -0.5}):
        with pytest.raises(ValueError, match="sum to 1"):
            wp.split_by_key(wrong)


def test_wrong_selections(indexed):
    data = wp.IndexedShards(indexed)
    wrong = [
        (7, TypeError, "where must be keys, '@keys.txt'"),
        ("clip > 0.28", ValueError, "wds-pipes select SHARDS --where 'clip > 0.28' -o keys.txt writes the keys"),
        (b"key", TypeError, "where must be"),
        (np.array(5), TypeError, r"where must be .*, not array\(5\)"),
        ("@", ValueError, "where='@' names no file of keys: write '@keys.txt'"),
        ({"train": 0.9}, TypeError, "where must be"),
        ([0.5], TypeError, "samples are selected by"),
        ([[1]], TypeError, "samples are selected by"),
        (["a", 1], TypeError, "keys are strings"),
        ([50], IndexError, "no sample 50: there are 50"),
        (range(40, 51), IndexError, "no sample 50"),
        (range(10**15), IndexError, "there are 50"),
        (range(1 << 70), IndexError, "there are 50"),
        (np.ones(49, bool), TypeError, "samples are selected by"),
    ]
    for where, kind, message in wrong:
        for select in (data.select, lambda where: wp.SampleList(indexed, where=where)):
            with pytest.raises(kind, match=message):
                select(where)
    with pytest.raises(ValueError, match="the view has no sample: .* none of 50 samples"):
        wp.SampleList(indexed, where=slice(50, None))
    assert len(data.select(slice(50, None))) == 0
    with pytest.raises(TypeError):
        data["00000031"]


# Composition


def moves():
    numbers = st.lists(st.integers(-60, 60), max_size=12)
    return st.one_of(
        st.slices(50),
        st.builds(range, st.integers(-9, 60), st.integers(-9, 60), st.integers(1, 9) | st.integers(-9, -1)),
        numbers,
        st.lists(st.integers(0, 49).map("{:08d}".format), min_size=1, max_size=30),
        st.sampled_from(sorted(wp.split_by_key({"a": 0.4, "b": 0.6}).values(), key=repr)),
    )


def brute(have, move, keys):
    """The numbers that a move keeps of those in ``have``; None: it is refused."""
    if isinstance(move, slice):
        return have[move]
    if isinstance(move, (list, range)) and not (len(move) and isinstance(move[0], str)):
        return None if any(not -len(have) <= number < len(have) for number in move) else [have[n] for n in move]
    wanted = keys[move] if not isinstance(move, list) else set(move)
    return [number for number in have if f"{number:08d}" in wanted]


@MANY
@given(steps=st.lists(st.tuples(moves(), st.booleans()), max_size=4))
def test_views_of_views_are_what_brute_force_gives(steps, indexed, stream):
    view, have = wp.IndexedShards(indexed), list(range(50))
    keys = {part: set(view.select(part).keys()) for part in wp.split_by_key({"a": 0.4, "b": 0.6}).values()}
    for move, leaves_out in steps:
        expected = brute(have, move, keys)
        if expected is None:
            with pytest.raises(IndexError):
                view.select(exclude=move) if leaves_out else view.select(move)
            continue
        view = view.select(**{"exclude" if leaves_out else "where": move})
        have = [number for number in have if number not in expected] if leaves_out else expected
        assert list(view.numbers) == have
        assert len(view) == len(have)
    assert list(view) == [stream[number] for number in have]
    if have:
        assert fetched(indexed, where=view.numbers) == [stream[number] for number in have]


def test_regular_views_take_no_memory(indexed):
    """Whatever they are written as; a copy for a worker is as small."""
    plain = len(pickle.dumps(wp.SampleList(indexed)))
    for where in (slice(3, None, 4), np.arange(3, 50, 4), list(range(3, 50, 4)), range(3, 50, 4)):
        assert isinstance(wp.IndexedShards(indexed).select(where).numbers, range)
        assert len(pickle.dumps(wp.SampleList(indexed, where=where))) < plain + 150
    irregular = np.arange(40) ** 2 % 47
    assert len(pickle.dumps(wp.SampleList(indexed, where=irregular))) < plain + 40 * 8 + 400


def one_shard(folder, keys=("a", "b", "c")):
    fill(TarWriter(folder / "a.tar"), ({"__key__": key, "txt": "text"} for key in keys))
    index_shards(folder / "a.tar", offsets=True)
    return folder / "a.tar"


# Hashes that several keys have


def test_the_key_in_the_tar_decides_where_hashes_collide(indexed, tmp_path):
    """An index of keys in which two keys have one hash."""
    url = one_shard(tmp_path, "abcd")
    count, data = 4, content(f"{url}.keys")
    hashes = struct.unpack(f"<{count}Q", data[: 8 * count])
    for first in range(count - 1):
        both = [*hashes[: first + 1], hashes[first], *hashes[first + 2 :]]
        (tmp_path / "a.tar.keys").write_bytes(struct.pack(f"<{count}Q", *both) + data[8 * count :])
        numbers = struct.unpack(f"<{count}I", data[8 * count :])
        other = next(n for n in numbers if n not in numbers[first : first + 2])
        for key in (numbers[first], numbers[first + 1]):
            found = wp.IndexedShards(url).select(exclude=["abcd"[key], "abcd"[other]])
            expected = [n for n in range(count) if n != other and (n != key or n == numbers[first + 1])]
            assert list(found.numbers) == expected, "the second one is not found by this index at all"


# States


VIEWS = {
    "every third": {"where": slice(None, None, 3)},
    "numbers": {"where": [41, 3, 8, 3, 20, 11]},
    "keys": {"where": [f"{number:08d}" for number in range(0, 50, 4)], "exclude": [3]},
}


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("every third", {}),
        ("numbers", {"shuffle": True}),
        ("keys", {"shuffle": True, "block_samples": 3}),
    ],
)
def test_resume(name, order, indexed):
    epochs = check_resume(lambda: wp.SampleList(indexed, seed=3, **order, **VIEWS[name]).fetch_samples())
    expected = sorted(keys_of(wp.IndexedShards(indexed).select(**VIEWS[name])))
    assert [sorted(keys_of(epoch)) for epoch in epochs] == [expected] * len(epochs)
    assert (epochs[0] == epochs[1]) == (not order)


def test_blocks_are_neighbours_in_the_view(indexed):
    pipe = wp.SampleList(indexed, where=slice(1, None, 2), shuffle=True, block_samples=5).fetch_samples()
    numbers = [int(key) for key in keys_of(pipe)]
    assert sorted(numbers) == list(range(1, 50, 2))
    for start in range(0, 25, 5):
        assert numbers[start : start + 5] == list(range(numbers[start], numbers[start] + 10, 2))


EVEN = list(range(14, 50, 2))


def test_a_state_of_another_view_is_refused(indexed):
    """Also by a PipeLoader. Views of the same samples are one view."""

    def pipe(**options):
        return wp.SampleList(indexed, shuffle=True, **options).fetch_samples()

    def loader(**options):
        return wp.PipeLoader(pipe(**options), batch_size=1, collate="list", num_workers=0)

    keys = [f"{number:08d}" for number in EVEN]
    for make in (pipe, loader):
        first = make(where=EVEN)
        items = after(first, 7)
        state, rest = through_json(first.state_dict()), list(items)
        for options in ({}, {"where": EVEN[1:]}, {"where": EVEN, "exclude": [20]}, {"where": slice(0, 30)}):
            with pytest.raises(wp.StateError, match=r"sample_list\(shuffle=True, view='\d+ of 50 samples, f"):
                make(**options).load_state_dict(state)
        for options in ({"where": keys}, {"where": slice(14, None, 2)}, {"exclude": {*range(50)} - {*EVEN}}):
            assert list(loaded(make(**options), state)) == rest
    everything = pipe(where=slice(None))
    after(everything, 7)
    pipe().load_state_dict(everything.state_dict())


def test_a_state_does_not_fit_other_numbers_of_samples(tmp_path):
    def write(*counts):
        urls = make_shards(tmp_path, shards=len(counts), samples=counts)
        index_shards(urls, offsets=True)
        return wp.SampleList(urls, shuffle=True).fetch_samples()

    with pytest.raises(wp.StateError, match="other numbers of samples"):
        resumed(lambda: write(5, 5, 5), 1, lambda: write(5, 5, 8))


# Bytes


@pytest.mark.parametrize("order", [{}, {"shuffle": True, "block_samples": 4}], ids=str)
def test_a_tenth_is_read_for_a_tenth(order, web, tmp_path):
    """The server counts; of local shards, the pipe."""
    paths = make_shards(
        tmp_path, shards=4, samples=50, fields={"bin": lambda rng, number: bytes([number % 256]) * 110_000}
    )
    index_shards(paths, offsets=True)
    for path in paths:
        web.put(f"d/{os.path.basename(path)}.idx", content(f"{path}.idx"))
    urls = [web.put(f"d/{os.path.basename(path)}", content(path)) for path in paths]
    numbers = random.Random(1).sample(range(200), 20)
    own = sum(len(wp.IndexedShards(paths)[number]["bin"]) for number in numbers)
    local = wp.PipeLoader(wp.SampleList(paths, where=numbers, **order).fetch_samples())
    expected = list(local)
    assert len(expected) == 20
    stats = local.stats()
    assert own <= stats["bytes_per_second"] / stats["samples_per_second"] * 20 <= 1.2 * own
    web.faults.clear()
    found = list(wp.SampleList(urls, where=numbers, **order).fetch_samples())
    assert list(map(bare, found)) == list(map(bare, fetched(paths, where=numbers, **order)))
    sent = [request.sent for request in web.faults.stats(web.reads) if not request.path.endswith(".idx")]
    assert own <= sum(sent) <= 1.2 * own


def last_dot(name):
    return tuple(name.rsplit(".", 1))


@pytest.mark.parametrize("key_split", ["last-dot", last_dot])
def test_keys_of_another_rule(key_split, tmp_path):
    """Doubtful ones are compared by the rule of their index."""
    urls = [
        put(tmp_path / "a.tar", tar([("img.1.jpg", b"x"), ("dog.2.jpg", b"x")])),
        put(tmp_path / "b.tar", tar([("img.1.jpg", b"x"), ("cat.3.jpg", b"x")])),
    ]
    index_shards(urls, offsets=True, key_split=key_split)
    data = wp.IndexedShards(urls, key_split=key_split)
    assert [sample["__key__"] for sample in data.select(["dog.2"])] == ["dog.2"]
    assert data.by_key("cat.3") == data[3]
    for select in (
        lambda: data.select(["img.1", "dog.2"]),
        lambda: data.select(exclude=["img.1"]),
        lambda: wp.SampleList(urls, exclude=["img.1"]),
    ):
        with pytest.raises(wp.SampleError, match="two samples have the key 'img.1'"):
            select()
    with pytest.raises(ValueError, match="no sample has the key .* has the key 'img.1'"):
        data.select(["none"])
