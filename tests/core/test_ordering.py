"""The integer hash: known vectors, a bit-exact block form, values that never change,
even spread.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_pipes.core.order import Permutation, _finalize, below, hash64, hash_text, order_of_samples, permutation, stream

MASK = (1 << 64) - 1
ANY = st.integers(-(1 << 80), 1 << 80)
PLACES = st.integers(0, 1 << 62)


def splitmix64(seed, place):
    """Output ``place`` of the published generator, with Python's integers."""
    return _finalize((seed + (place + 1) * 0x9E3779B97F4A7C15) & MASK)


def test_reference_vector():
    """The first outputs of SplitMix64 for seed 1234567, as published."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert stream(1234567, 0, 5).tolist() == expected
    assert [splitmix64(1234567, place) for place in range(5)] == expected


@given(key=ANY, start=PLACES, count=st.integers(0, 70))
@settings(deadline=None)
def test_block_form_is_the_integer_form_bit_by_bit(key, start, count):
    assert stream(key, start, count).tolist() == [splitmix64(key, start + place) for place in range(count)]


@given(limit=st.integers(1, 1 << 31), key=ANY, start=PLACES)
@settings(deadline=None)
def test_below_is_in_range_and_the_integer_form(limit, key, start):
    """The upper 32 bits, scaled."""
    assert below(limit, key, start, 9).tolist() == [
        (splitmix64(key, start + place) >> 32) * limit >> 32 for place in range(9)
    ]
    assert all(0 <= value < limit for value in below(limit, key, start, 9))


@given(key=ANY, count=st.integers(0, 200))
@settings(deadline=None)
def test_permutation_is_one(key, count):
    assert sorted(permutation(count, key).tolist()) == list(range(count))


@given(
    values=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=5),
    other=st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=5),
)
def test_hash64_depends_on_values_their_order_and_their_number(values, other):
    assert (hash64(*values) == hash64(*other)) == (values == other)
    assert 0 <= hash64(*values) <= MASK


# These values are in the checkpoints of users: they never change.
@pytest.mark.parametrize(
    ("function", "arguments", "expected"),
    [
        (hash64, (), 0),
        (hash64, (0,), 10451216379200822465),
        (hash64, (0, 0), 7235116703822611636),
        (hash64, (7, 3, 0, 8, 2), 2531801254268113662),
        (hash64, (-1, 1 << 63), 6042585880545627880),
        (hash_text, ("",), 13020603013274838756),
        (hash_text, ("s3://bucket/train-000000.tar\0ab/0001",), 8046245364486432166),
        (hash_text, ("ä\udcff",), 13579915517529340007),
        (permutation, (10, 0), [2, 4, 6, 8, 5, 1, 7, 0, 9, 3]),
        (permutation, (10, -5), [6, 0, 5, 7, 8, 1, 4, 3, 9, 2]),
        (below, (1000, 42, 0, 6), [741, 159, 278, 344, 38, 868]),
        (below, (1 << 31, 42, 1 << 40, 3), [1105839879, 1025972408, 1447635340]),
    ],
)
def test_golden_vectors(function, arguments, expected):
    value = function(*arguments)
    assert (value.tolist() if isinstance(value, np.ndarray) else value) == expected


# The order of samples


RUNS = st.integers(1, 12)
N = 10**9


@given(key=ANY, count=st.integers(0, 300), run=RUNS)
@settings(deadline=None)
def test_a_computed_permutation_is_one_with_its_inverse(key, count, run):
    """The integer form and the block form give the same numbers, and runs stay together."""
    order = Permutation(count, key, run=run)
    numbers = [order.number_at(place) for place in range(count)]
    assert sorted(numbers) == list(range(count))
    assert order.numbers_at(np.arange(count)).tolist() == numbers
    breaks = sum(after != before + 1 for before, after in itertools.pairwise(numbers))
    assert breaks < -(-count // run) or not count


@given(key=ANY, count=st.integers(1, 1 << 53), run=st.one_of(RUNS, st.integers(1, 1 << 53)), data=st.data())
@settings(deadline=None)
def test_its_forms_agree_at_any_size(key, count, run, data):
    places = data.draw(st.lists(st.integers(0, count - 1), max_size=20))
    order = Permutation(count, key, run=run)
    numbers = [order.number_at(place) for place in places]
    assert order.numbers_at(np.array(places, np.int64)).tolist() == numbers
    assert all(0 <= number < count for number in numbers)


# These values are in the checkpoints of users: they never change.
@pytest.mark.parametrize(
    ("count", "seed", "epoch", "block", "expected"),
    [
        (10, 0, 0, 1, [5, 1, 7, 3, 0, 4, 2, 6, 8, 9]),
        (10, 0, 1, 1, [0, 1, 2, 6, 9, 5, 8, 7, 4, 3]),
        (10, 7, 0, 3, [6, 7, 8, 0, 1, 2, 9, 3, 4, 5]),
        (1_281_167, 7, 0, 1, [972864, 919733, 1209748, 206968, 1261161]),
        (N, 0, 0, 1, [729737514, 702846661, 160636284, 691263221, 872962656]),
        (N, -1, 3, 64, [753677568, 753677569, 753677570, 753677571, 753677572]),
        (1 << 53, 5, 2, 1, [5360372949610684, 6785080039686521, 4635784946236062, 3121590004715592, 4708263915780414]),
    ],
)
def test_golden_order_of_samples(count, seed, epoch, block, expected):
    order = order_of_samples(count, seed, epoch, block_samples=block)
    assert order.numbers_at(np.arange(len(expected))).tolist() == expected


@pytest.fixture(scope="module")
def million():
    """The first million numbers of a large order, and how many it has: one more than a power of
    two, which is the hardest.
    """
    count = (1 << 30) + 1
    return count, order_of_samples(count, 0, 0).numbers_at(np.arange(1_000_000))


def test_a_million_of_a_billion_are_distinct_and_even(million):
    """In 1000 classes: chi square within what one in a thousand random orders exceeds."""
    count, numbers = million
    assert len(np.unique(numbers)) == len(numbers)
    assert numbers.min() >= 0
    assert numbers.max() < count
    classes = np.bincount(numbers * 1000 // count, minlength=1000)
    assert ((classes - 1000) ** 2 / 1000).sum() < 1143
    assert ((np.bincount(numbers % 1000, minlength=1000) - 1000) ** 2 / 1000).sum() < 1143


def test_neighbours_of_a_large_order_are_independent(million):
    """As far apart as two random numbers, one third of the range, without correlation."""
    count, numbers = million
    scaled = numbers / count
    for distance in (1, 2, 3, 64, 4096):
        one, other = scaled[:-distance], scaled[distance:]
        assert abs(one - other).mean() == pytest.approx(1 / 3, abs=0.001)
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.004


def test_seeds_and_epochs_have_independent_orders():
    orders = [
        order_of_samples(100_003, seed, epoch).numbers_at(np.arange(100_003))
        for seed, epoch in [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (-1, 0), (1 << 32, 0)]
    ]
    for one, other in itertools.combinations(orders, 2):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.015
        assert np.count_nonzero(one == other) < 10
