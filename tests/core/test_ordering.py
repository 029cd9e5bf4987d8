"""The integer hash: known vectors, a bit-exact block form, values that never change,
even spread.
"""

import statistics

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wds_pipes.core.order import _finalize, below, hash64, hash_text, permutation, stream

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


@given(key=ANY, start=PLACES, count=st.integers(0, 70), cut=st.integers(0, 70))
@settings(deadline=None)
def test_blocks_join(key, start, count, cut):
    """Where a block begins does not matter."""
    cut = min(cut, count)
    parts = [stream(key, start, cut), stream(key, start + cut, count - cut)]
    assert np.concatenate(parts).tolist() == stream(key, start, count).tolist()


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


def test_values_are_even():
    """Sixteen classes of 160 000 draws: chi square within what one in a thousand good generators
    exceeds, for several keys.
    """
    for key in (0, 1, hash64(0, 0), hash64(0, 1)):
        counts = np.bincount(below(16, key, 0, 160_000), minlength=16)
        assert ((counts - 10_000) ** 2 / 10_000).sum() < 37.7


def test_neighbouring_keys_are_not_alike():
    """Epochs and lanes differ in one bit of one value; half the bits of the hash change."""
    changed = [(hash64(7, epoch, 0, 1) ^ hash64(7, epoch + 1, 0, 1)).bit_count() for epoch in range(2_000)]
    assert statistics.mean(changed) == pytest.approx(32, abs=0.4)
    assert min(changed) > 8


def test_every_place_of_a_permutation_is_equally_likely():
    firsts = np.bincount([permutation(8, hash64(0, epoch))[0] for epoch in range(8_000)], minlength=8)
    assert ((firsts - 1_000) ** 2 / 1_000).sum() < 24.3
