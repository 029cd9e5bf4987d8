"""UnbatchSamples, and its base class FlatMap: several items from one."""

from collections import namedtuple
from itertools import islice

import numpy as np
import pytest
import torch
from pipelines import resumed
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import BatchSamples, UnbatchSamples
from wds_pipes.testing import check_resume, make_shards

Pair = namedtuple("Pair", "x y")
SAMPLES = [
    {"__key__": str(number), "x": number, "y": number / 2, "image": np.full((2, 3), number, dtype=np.uint8)}
    for number in range(7)
]


def again(samples, **options):
    return list(Stream(UnbatchSamples(BatchSamples(Given(samples), 3, **options))))


@pytest.mark.parametrize("collate", [None, "numpy", "columns", "list"])
def test_it_undoes_batch_samples(collate):
    found = again(SAMPLES, collate=collate)
    assert [(sample["__key__"], sample["x"], sample["y"]) for sample in found] == [
        (sample["__key__"], sample["x"], sample["y"]) for sample in SAMPLES
    ]
    assert {(type(sample["x"]), type(sample["y"])) for sample in found} == {(int, float)}
    assert all(np.array_equal(sample["image"], before["image"]) for sample, before in zip(found, SAMPLES, strict=True))


@pytest.mark.parametrize(
    "samples",
    [
        [(number, str(number)) for number in range(7)],
        [Pair(number, [number]) for number in range(7)],
        list(range(7)),
        [str(number) for number in range(7)],
        [True, False, True],
        [],
    ],
    ids=["tuples", "named tuples", "numbers", "texts", "bools", "nothing"],
)
def test_all_forms(samples):
    assert again(samples) == samples
    assert [type(sample) for sample in again(samples)] == [type(sample) for sample in samples]


def test_rows_of_other_dtypes_keep_them():
    [first, second] = Stream(UnbatchSamples(Given([torch.tensor([1.5, 2.5])])))
    assert (first.dtype, second.item()) == (torch.float32, 2.5)
    [row] = Stream(UnbatchSamples(Given([{"x": np.zeros((1, 4), np.int64)}])))
    assert row["x"].shape == (4,)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"x": [1, 2], "y": torch.zeros(3)}, "not of one length: 'x' has 2, 'y' has 3"),
        (
            {"__key__": "000", "txt": b"x"},
            "column '__key__' is str, not a list, a tensor or an array with rows: put it after batch_samples",
        ),
        ((torch.tensor(3),), "column 0 is Tensor"),
        (7, "unbatch_samples[(][)] got int"),
        ({}, "it has no columns"),
    ],
)
def test_an_item_that_is_no_batch_is_named(item, message):
    with pytest.raises(wp.SampleError, match=message):
        list(Stream(UnbatchSamples(Given([item]))))


class Repeat(wp.FlatMap):
    """Each item as often as its value: none for 0."""

    def expand(self, item):
        return [(item, number) for number in range(item)]


def test_a_users_own_flat_map_resumes_at_every_item():
    given = [0, 3, 0, 1, 2, 0]
    epoch, _ = check_resume(lambda: Stream(Repeat(Given(given))))
    assert epoch == [(item, number) for item in given for number in range(item)]


@pytest.mark.parametrize("given", [[], [1]], ids=["gone", "fewer"])
def test_an_item_must_expand_in_the_same_way_after_a_resume(given):
    _, again = resumed(lambda: Stream(Repeat(Given([3]))), 2, lambda: Stream(Repeat(Given(given))))
    with pytest.raises(wp.StateError, match=r"repeat\(\) does not yield after the same items"):
        list(again)


@pytest.mark.parametrize("entry", [{"taken": 3}, {"yielded": 1}, {"yielded": 1, "taken": 1, "ahead": 1 << 40}])
def test_a_position_takes_one_item_at_a_time(entry):
    """Else a damaged state would read all items."""
    stream = Stream(Repeat(Given([3])))
    state = stream.state_dict()
    state["lanes"]["0"]["position"][-1] |= entry
    with pytest.raises(wp.StateError, match="it takes one item at a time"):
        stream.load_state_dict(state)


def test_rows_of_a_batch_count_as_samples(tmp_path):
    """Not as the batches that they came in."""
    urls = make_shards(tmp_path, shards=3, samples=11)

    def pipe():
        return wp.ShardList(urls).open_shards().load_tar().group_by_key().batch_samples(33).unbatch_samples()

    source = pipe()
    items = iter(source)
    for count in (1, 20):
        list(islice(items, count - source.counts()["delivered"]))
        assert source.counts()["delivered"] == count
    assert len(list(items)) == 13
    assert source.counts()["delivered"] == 33
    loader = wp.PipeLoader(pipe(), batch_size=3, collate="list").with_epoch(samples=6)
    assert [sum(map(len, loader)) for _ in range(4)] == [6, 6, 6, 6]
    with pytest.raises(TypeError, match=r"unbatch_samples\(\) may change their number"):
        len(wp.PipeLoader(pipe(), batch_size=3))


def test_a_list_of_columns_is_refused():
    """torch's default_collate makes a list of the columns of tuples."""
    pairs = [(number, number % 3) for number in range(4)]
    with pytest.raises(wp.SampleError, match="a list of 2 tensors or arrays of one length, 3"):
        again(pairs, collate=torch.utils.data.default_collate)
    images = [np.full((3, 2), number) for number in range(4)]
    assert [image[0, 0] for image in again(images, collate="list")] == [0, 1, 2, 3]
    assert again(pairs, collate=lambda batch: tuple(torch.utils.data.default_collate(batch))) == pairs
