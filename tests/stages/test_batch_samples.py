"""batch_samples: sizes, collating, counts. What a batch becomes is in test_collating.py."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import shuffled
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import BatchSamples
from wds_pipes.stages.collating import stack_samples
from wds_pipes.testing import check_resume, make_shards, same


@pytest.mark.parametrize(
    "options", [{}, {"drop_last": True}, {"collate": "numpy"}, {"collate": "columns"}, {"collate": len}], ids=str
)
@pytest.mark.parametrize("size", [1, 4, 7, 20])
def test_resumes_exactly(urls, size, options):
    check_resume(lambda: shuffled(urls).decode_by_ext().batch_samples(size, **options))


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


def test_a_batch_is_returned_as_soon_as_it_is_full():
    """So a resume reads nothing again."""
    source = Given(range(10))
    next(iter(Stream(BatchSamples(source, 4))))
    assert source.taken == [4]


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


Pair = namedtuple("Pair", "one other")
FORMS = {
    "single": lambda one, other: one,
    "tuple": lambda one, other: (one, other),
    "named": Pair,
    "dict": lambda one, other: {"__key__": "k", "one": one, "other": other},
}
LAYOUTS = {
    "C": np.ascontiguousarray,
    "Fortran": np.asfortranarray,
    "strided": lambda array: np.repeat(array, 2, axis=-1)[..., ::2],
    "subclass": lambda array: np.ma.masked_array(array, array == 0),
    "tensor": lambda array: torch.tensor(array.astype(array.dtype.newbyteorder("="))),
}
ARRAYS = st.tuples(
    st.sampled_from([(3,), (90, 90, 3), (90, 91, 3), (20_000,)]),
    st.sampled_from(["u1", "f4", ">f4", "c16", "?"]),
    st.sampled_from([*LAYOUTS, "C", "C"]),
)


def array_of(kind, number):
    shape, dtype, layout = kind
    return LAYOUTS[layout]((np.arange(np.prod(shape)).reshape(shape) % 7 + number).astype(dtype))


@settings(max_examples=150, deadline=None)
@given(
    form=st.sampled_from(list(FORMS)),
    columns=st.tuples(ARRAYS, ARRAYS),
    odd=st.dictionaries(st.integers(0, 12), ARRAYS, max_size=1),
    count=st.integers(1, 13),
    size=st.integers(1, 6),
    collate=st.sampled_from([None, "numpy", "keep"]),
)
def test_arrays_of_all_sizes_and_layouts_stack_as_at_once(form, columns, *, odd, count, size, collate):
    """Large arrays are copied into their batch as they come. It shows in nothing."""

    def samples():
        for number in range(count):
            kinds = odd.get(number, columns[0]), columns[1]
            yield FORMS[form](*(array_of(kind, number) for kind in kinds))

    def outcome(stack, batch):
        try:
            return stack(batch)
        except wp.SampleError as error:
            return str(error)

    given, arrived = list(samples()), []
    expected = [
        outcome(lambda batch: stack_samples(batch, collate=collate), given[first : first + size])
        for first in range(0, count, size)
    ]
    batches = iter(Stream(BatchSamples(Given(list(samples())), size, collate=collate)))
    for batch in expected:
        arrived.append(outcome(next, batches))
        assert same(arrived[-1], batch)
        if isinstance(batch, str):
            return
    assert all(map(same, arrived, expected))  # no batch has the memory of another one


def test_samples_of_the_caller_are_not_changed():
    given = [{"x": np.full((100, 100), number)} for number in range(4)]
    arrays = [sample["x"] for sample in given]
    for batch in Stream(BatchSamples(Given(given), 2)):
        batch["x"].zero_()
    assert [
        sample["x"] is array and (array == number).all()
        for number, (sample, array) in enumerate(zip(given, arrays, strict=True))
    ] == [True] * 4


def test_a_size_beyond_the_memory_of_the_machine_is_no_error():
    [batch] = Stream(BatchSamples(Given([np.zeros(100_000)] * 3), 1 << 50))
    assert batch.shape == (3, 100_000)
    assert batch.untyped_storage().nbytes() == batch.nbytes


def test_a_batch_belongs_to_the_caller():
    """A list that the caller changes does not change the next one."""
    given = []
    for batch in Stream(BatchSamples(Given(range(6)), 2, collate="list")):
        given.append(list(batch))
        batch.clear()
    assert given == [[0, 1], [2, 3], [4, 5]]


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
