"""batch_samples: sizes, collating, counts. What a batch becomes is in test_collating.py."""

import numpy as np
import pytest
import torch
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import BatchSamples
from wds_pipes.testing import make_shards


@pytest.mark.parametrize(("size", "sizes"), [(1, [1] * 7), (2, [2, 2, 2, 1]), (3, [3, 3, 1]), (7, [7]), (8, [7])])
@pytest.mark.parametrize("drop_last", [False, True])
def test_sizes_and_counts(size, sizes, drop_last):
    """Every sample once, in order; only the last batch is smaller; dropped samples are counted."""
    stream = Stream(BatchSamples(Given(range(7)), size, drop_last=drop_last, collate="list"))
    expected = [length for length in sizes if length == size or not drop_last]
    for _ in range(2):
        batches = list(stream)
        assert list(map(len, batches)) == expected
        assert [number for batch in batches for number in batch] == list(range(sum(expected)))
        assert stream.counts() == {
            "delivered": sum(expected),
            "filtered": 0,
            "skipped": 0,
            "dropped": 7 - sum(expected),
        }


@pytest.mark.parametrize(
    ("collate", "expected"),
    [
        (None, torch.Tensor),
        ("numpy", np.ndarray),
        ("list", list),
        ("columns", list),
        (sum, int),
        (lambda batch: {"sum": sum(batch)}, dict),
    ],
)
def test_collate(collate, expected):
    [batch] = Stream(BatchSamples(Given([1, 2]), 2, collate=collate))
    assert type(batch) is expected


def test_keep_stacks_each_column_into_its_own_kind():
    pipe = Given([{"a": np.zeros(40_000), "t": torch.ones(2), "n": number, "s": "x"} for number in range(4)])
    for batch in Stream(BatchSamples(pipe, 2, collate="keep")):
        assert [type(column) for column in batch.values()] == [np.ndarray, torch.Tensor, np.ndarray, list]
        assert batch["a"].shape == (2, 40_000)


def test_columns_are_lists_that_need_not_stack():
    """Boxes of different numbers, as they are; samples of another form are still an error."""
    boxes = [np.zeros((number, 4)) for number in range(3)]
    [batch] = Stream(BatchSamples(Given([{"n": n, "boxes": boxes[n]} for n in range(3)]), 3, collate="columns"))
    assert batch == {"n": [0, 1, 2], "boxes": boxes}
    [batch] = Stream(BatchSamples(Given(list(enumerate(boxes))), 3, collate="columns"))
    assert batch == ([0, 1, 2], boxes)
    with pytest.raises(wp.SampleError, match="differ in form"):
        list(Stream(BatchSamples(Given([{"a": 1}, {"b": 1}]), 2, collate="columns")))


def test_samples_of_the_caller_are_not_changed():
    given = [{"x": np.full((100, 100), number)} for number in range(4)]
    arrays = [sample["x"] for sample in given]
    for batch in Stream(BatchSamples(Given(given), 2)):
        batch["x"].zero_()
    assert [
        sample["x"] is array and (array == number).all()
        for number, (sample, array) in enumerate(zip(given, arrays, strict=True))
    ] == [True] * 4


def test_a_batch_that_does_not_stack_is_an_error_that_names_the_sample():
    """And the state is still that of the batch before."""
    samples = [{"__key__": str(number), "__url__": "u.tar", "x": np.zeros(number // 4)} for number in range(6)]
    stream = Stream(BatchSamples(Given(samples), 3))
    items = iter(stream)
    next(items)
    state = stream.state_dict()
    with pytest.raises(wp.SampleError, match=r"field 'x' .* in sample '4'|but .* in sample '4'"):
        next(items)
    assert stream.state_dict() == state


@pytest.mark.parametrize("loader", [False, True])
def test_an_error_of_a_batch_says_which_samples_it_has(urls, loader):
    """Where tuples have lost their keys, the shard that was read."""

    def notes(pipe, collate=None):
        with pytest.raises((wp.SampleError, ZeroDivisionError)) as caught:
            list(
                wp.PipeLoader(pipe, batch_size=2, collate=collate) if loader else pipe.batch_samples(2, collate=collate)
            )
        return caught.value.__notes__

    pipe = wp.ShardList(urls).open_shards().load_tar().group_by_key()
    first, second, *_ = pipe
    [note] = notes(pipe, lambda batch: 1 // 0)
    assert note == (
        f"raised on a batch of 2 samples, from sample {first['__key__']!r} of shard {first['__url__']} to "
        f"sample {second['__key__']!r} of shard {second['__url__']}"
    )
    [note] = notes(pipe.map_samples(lambda sample: sample if sample["__key__"] == first["__key__"] else (1,)))
    assert note.endswith("to sample 1 of the batch")
    mixed = {first["__key__"]: b"x"}
    [note] = notes(pipe.map_samples(lambda sample: (mixed.get(sample["__key__"], 1),)))
    assert note == f"raised on a batch of 2 samples, when shard {first['__url__']} was read"


def test_batching_twice_warns(tmp_path):
    """A loader that batches a pipe of batches warns. Two explicit steps are meant, and so is
    batch_size=None.
    """

    def pipe():
        return wp.ShardList(urls).open_shards().load_tar().group_by_key().batch_samples(2).map_samples(len)

    urls = make_shards(tmp_path, shards=2, samples=4)
    with pytest.warns(UserWarning, match="gives batches of 2 already"):
        wp.PipeLoader(pipe(), batch_size=2)
    for right in (wp.PipeLoader(pipe()), wp.PipeLoader(pipe().batch_samples(2))):
        assert list(right)
