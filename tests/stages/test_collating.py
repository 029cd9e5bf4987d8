"""What a batch becomes: dtypes, forms, and the error of a column that does not stack."""

from collections import namedtuple
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

import wds_pipes as wp
from wds_pipes.stages.collating import stack_samples
from wds_pipes.testing import same

Pair = namedtuple("Pair", "image label")


# Columns of numbers, arrays and tensors

STACKS = [
    ([1, 2, 3], torch.int64),
    ([1.5, 2.5], torch.float64),
    ([True, False], torch.bool),
    ([1j, 2j], torch.complex128),
    ([-(1 << 63), (1 << 63) - 1], torch.int64),
    ([np.float32(1), np.float32(2)], torch.float32),
    ([np.int8(1), np.int8(2)], torch.int8),
    ([np.uint16(1), np.uint16(2)], torch.uint16),
    ([np.bool_(True), np.bool_(False)], torch.bool),
    ([np.zeros((2, 3), np.uint8), np.ones((2, 3), np.uint8)], torch.uint8),
    ([np.zeros(4, np.float16)] * 2, torch.float16),
    ([np.array(1.0), np.array(2.0)], torch.float64),
    ([np.zeros((0, 3), np.int32)] * 2, torch.int32),
    ([np.arange(6.0).reshape(2, 3).T, np.ones((3, 2))], torch.float64),
    ([np.arange(3, dtype=">f4"), np.ones(3, ">f4")], torch.float32),
    ([torch.zeros(2, 2), torch.ones(2, 2)], torch.float32),
    ([torch.tensor(1), torch.tensor(2)], torch.int64),
    ([torch.zeros(2, dtype=torch.bfloat16)] * 2, torch.bfloat16),
]


@pytest.mark.parametrize(("values", "dtype"), STACKS)
def test_numbers_arrays_and_tensors_stack_into_a_tensor(values, dtype):
    """Of shape (batch, ...), with the values as they are."""
    stacked = stack_samples(values)
    assert isinstance(stacked, torch.Tensor)
    assert stacked.dtype == dtype
    assert stacked.shape == (len(values), *np.shape(values[0]))
    assert stacked.tolist() == [value.tolist() if hasattr(value, "tolist") else value for value in values]


@pytest.mark.parametrize(("values", "dtype"), [case for case in STACKS if case[1] != torch.bfloat16])
def test_numpy_gives_arrays(values, dtype):
    """Of the same numbers, shape and dtype."""
    stacked = stack_samples(values, collate="numpy")
    assert isinstance(stacked, np.ndarray)
    assert same(torch.from_numpy(stacked.astype(stacked.dtype.newbyteorder("="))), stack_samples(values))


@pytest.mark.parametrize("values", [[np.ones((2, 3), np.uint8)] * 2, [torch.ones(3, 4, dtype=torch.int16)] * 2])
def test_values_are_stacked_into_the_array_that_is_made_for_them(values):
    """A worker makes it in shared memory, so that no batch is copied into that."""
    made = []

    def empty(shape, dtype):
        made.append(np.empty(shape, dtype))
        return made[-1]

    stacked = stack_samples(values, empty=empty)
    assert stacked.data_ptr() == made[0].ctypes.data
    assert same(stacked, stack_samples(values))


# What is listed


@pytest.mark.parametrize(
    "values",
    [
        ["a", "b"],
        [b"a", b"bc"],
        [None, None],
        ["a", None],
        [{"x": 1}, {"y": 2}],
        [[1, 2], [3]],
        [(1, 2), [3]],
        [np.array(["a"]), np.array(["b", "c"])],
        [np.array([None]), np.array([1, 2], object)],
        [np.datetime64("2020-01-01"), np.datetime64("2021-01-01")],
        [Fraction(1, 2), Decimal("3")],
        [np.str_("a"), np.bytes_(b"b")],
    ],
)
@pytest.mark.parametrize("collate", [None, "numpy"])
def test_everything_else_is_listed(values, collate):
    listed = stack_samples([{"x": value} for value in values], collate=collate)["x"]
    assert isinstance(listed, list)
    assert all(one is other for one, other in zip(listed, values, strict=True))


# Forms of samples


def test_dicts_become_a_dict_of_columns_in_the_order_of_the_first():
    batch = [{"__key__": "a", "cls": 1, "txt": "x"}, {"txt": "y", "cls": 2, "__key__": "b"}]
    stacked = stack_samples(batch)
    assert list(stacked) == ["__key__", "cls", "txt"]
    assert same(stacked, {"__key__": ["a", "b"], "cls": torch.tensor([1, 2]), "txt": ["x", "y"]})


def test_tuples_become_a_tuple_and_named_ones_keep_their_names():
    assert same(stack_samples([(1, "a"), (2, "b")]), (torch.tensor([1, 2]), ["a", "b"]))
    stacked = stack_samples([Pair(1, "a"), Pair(2, "b")])
    assert type(stacked) is Pair
    assert stacked.label == ["a", "b"]


# What does not stack


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        (
            np.zeros((2, 3)),
            np.zeros((2, 4)),
            "shape (2, 3), float64 in sample 'a', but shape (2, 4), float64 in sample 'b'",
        ),
        (
            np.zeros(2),
            np.zeros(2, np.float32),
            "shape (2,), float64 in sample 'a', but shape (2,), float32 in sample 'b'",
        ),
        (
            torch.zeros(2),
            torch.zeros(3),
            "shape (2,), torch.float32 in sample 'a', but shape (3,), torch.float32 in sample 'b'",
        ),
        (
            torch.zeros(2),
            np.zeros(2, np.float32),
            "shape (2,), torch.float32 in sample 'a', but shape (2,), float32 in sample 'b'",
        ),
        (1, "x", "int 1 in sample 'a', but str 'x' in sample 'b'"),
        ("x", 1, "str 'x' in sample 'a', but int 1 in sample 'b'"),
        (None, 1.5, "NoneType None in sample 'a', but float 1.5 in sample 'b'"),
        (1, None, "int 1 in sample 'a', but NoneType None in sample 'b'"),
        (1, Decimal("2"), "int 1 in sample 'a', but Decimal Decimal('2') in sample 'b'"),
        (1, np.datetime64("2020-01-01"), "int 1 in sample 'a', but shape (), datetime64[D] in sample 'b'"),
        (np.zeros(1), 3, "shape (1,), float64 in sample 'a', but int 3 in sample 'b'"),
        (np.zeros(1), [3], "shape (1,), float64 in sample 'a', but list [3] in sample 'b'"),
        (np.zeros(1), np.array([None]), "shape (1,), float64 in sample 'a', but shape (1,), object in sample 'b'"),
    ],
)
@pytest.mark.parametrize("collate", [None, "numpy"])
def test_a_column_that_does_not_stack_is_named_with_sample_and_reason(one, other, why, collate):
    """In either order of the values; the message says what to do."""
    batch = [
        {"__key__": key, "__url__": "https://me:secret@host/x.tar", "f": value}
        for key, value in (("a", one), ("b", other))
    ]
    with pytest.raises(wp.SampleError) as caught:
        stack_samples(batch, collate=collate)
    why = why.replace("in sample 'a'", "in sample 'a' of shard https://host/x.tar")
    why = why.replace("in sample 'b'", "in sample 'b' of shard https://host/x.tar")
    assert str(caught.value).startswith(f"field 'f' cannot be stacked into a batch: {why}. ")
    assert "map_samples()" in str(caught.value)
    assert (caught.value.key, caught.value.url) == ("b", "https://host/x.tar")


@pytest.mark.parametrize("values", [[1 << 63, 1], [1 << 70], [-1, 1 << 63]])
def test_ints_that_int64_does_not_hold_are_an_error(values):
    """They become neither a list in some batches nor rounded floats."""
    with pytest.raises(wp.SampleError, match="field 'id' cannot be stacked .* too large"):
        stack_samples([{"id": value} for value in values])


def test_dtypes_that_torch_or_numpy_lack_are_an_error_of_ours():
    with pytest.raises(wp.SampleError, match="longdouble|float128"):
        stack_samples([np.zeros(2, np.longdouble)])
    with pytest.raises(wp.SampleError, match="BFloat16"):
        stack_samples([torch.zeros(2, dtype=torch.bfloat16)], collate="numpy")


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (
            [{"__key__": "a", "jpg": 1}, {"__key__": "b", "png": 1}],
            "fields __key__, jpg in sample 'a', but fields __key__, png in sample 'b'",
        ),
        (
            [{"__key__": "a", "jpg": 1}, {"__key__": "b"}],
            "fields __key__, jpg in sample 'a', but fields __key__ in sample 'b'",
        ),
        ([(1, 2), (1, 2), (1,)], "tuple of 2 in sample 0 of the batch, but tuple of 1 in sample 2 of the batch"),
        ([(1, 2), {"__key__": "b"}], "tuple of 2 in sample 0 of the batch, but fields __key__ in sample 'b'"),
        ([{"__key__": "a"}, 3], "fields __key__ in sample 'a', but int in sample 1 of the batch"),
    ],
)
def test_samples_of_different_forms_are_an_error(batch, why):
    with pytest.raises(wp.SampleError) as caught:
        stack_samples(batch)
    assert str(caught.value).startswith(f"the samples of a batch differ in form: {why}. ")
    assert "to_tuple()" in str(caught.value)
