"""All random decisions: pure functions of integers, through one hash.

The hash is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014). Output number i of the stream seeded with k is ``finalize(k + (i + 1) * GAMMA)``, so
any place of the stream can be computed directly. The block form with numpy returns the same bits as
the integer form.

Rules:
1. No global generator is read. Nothing here depends on hash(), on the order of sets, or on the
   random streams of a library, which may change between versions.
2. The values are part of the checkpoint format: if one bit changes, the order of every pipeline
   changes. The tests hold golden vectors.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_Int = TypeVar("_Int", int, Any)  # an int of 64 bits, or an array of uint64
_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
MOST_SAMPLES = 1 << 53  # of an epoch: places, and what is added to them, fit into 64 bits
_SAMPLES = 7  # the salt of the order of samples
_BLOCK = 1 << 13  # places of a Permutation that are computed at a time: they fit into the cache


def _finalize(z: _Int) -> _Int:
    """The last step of splitmix64; an array is changed in place, which spares temporary ones."""
    z ^= z >> 30
    z *= 0xBF58476D1CE4E5B9
    z &= _MASK
    z ^= z >> 27
    z *= 0x94D049BB133111EB
    z &= _MASK
    z ^= z >> 31
    return z


def hash64(*values: int) -> int:
    """Return one 64-bit hash of several integers, each taken modulo 2**64; their order and number
    matter.
    """
    state = len(values)
    for value in values:
        state = _finalize((state + _GAMMA) & _MASK ^ _finalize(value & _MASK))
    return state


def hash_text(text: str) -> int:
    """Return a 64-bit hash of a text."""
    return int.from_bytes(blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).digest(), "little")


def stream(key: int, start: int, count: int) -> npt.NDArray[np.uint64]:
    """Return outputs ``start`` to ``start + count - 1`` of the SplitMix64 stream seeded with
    ``key``: uint64, shape (count,).
    """
    import numpy as np

    places = np.arange(start + 1, start + count + 1, dtype=np.uint64)
    outputs: npt.NDArray[np.uint64] = _finalize(places * np.uint64(_GAMMA) + np.uint64(key & _MASK))
    return outputs


def below(limit: int, key: int, start: int, count: int) -> npt.NDArray[np.int64]:
    """Return ``count`` integers in [0, limit): outputs ``start`` and on of the stream ``key``;
    limit is at most 2**31.
    """
    import numpy as np

    high = stream(key, start, count) >> np.uint64(32)
    return ((high * np.uint64(limit)) >> np.uint64(32)).astype(np.int64)


def bounds(weights: Iterable[int]) -> npt.NDArray[np.uint64]:
    """Return where the share of each weight but the first begins, if [0, 2**64) is divided in their
    proportion: uint64, shape (number of weights - 1,).
    """
    import numpy as np

    *sums, total = itertools.accumulate(weights)
    return np.array([(before << 64) // total for before in sums], dtype=np.uint64)


def weighted(shares: npt.NDArray[np.uint64], key: int, start: int, count: int) -> npt.NDArray[np.int64]:
    """Return ``count`` places in a list of weights, drawn in proportion to the weights. Outputs
    ``start`` and on of the stream ``key`` decide; ``shares`` are the ``bounds`` of the weights.
    """
    import numpy as np

    return np.searchsorted(shares, stream(key, start, count), side="right").astype(np.int64)


def permutation(count: int, key: int) -> npt.NDArray[np.int64]:
    """Return the numbers 0 to count - 1 in an order that ``key`` decides."""
    import numpy as np

    return np.argsort(stream(key, 0, count), kind="stable").astype(np.int64, copy=False)


class Permutation:
    """The numbers 0 to count - 1 in an order that ``key`` decides, computed where it is needed.

    It takes no memory, whatever ``count`` is. Runs of ``run`` neighbours stay together and keep
    their order; the order of the runs is permuted. The last run may be shorter.

    The order of the runs is a Feistel network over the bits of a run's number (Luby and Rackoff,
    "How to construct pseudorandom permutations", SIAM J. Comput. 17, 1988), whose round function is
    SplitMix64's. A network permutes a power of two; where it leads to a run that does not exist, it
    is applied again: cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains",
    CT-RSA 2002). The range is less than twice the number of runs, so it is applied less than twice
    on average.

    Args:
        count: how many numbers there are, from 0 to 2**53.
        key: any integer, taken modulo 2**64.
        run: how many neighbours stay together.
    """

    __slots__ = ("_keys", "_left_bits", "_right_bits", "_runs", "_short", "_tail", "count", "run")

    def __init__(self, count: int, key: int, *, run: int = 1) -> None:
        self.count, self.run = count, run
        self._runs = runs = -(-count // run)
        bits = max(0, runs - 1).bit_length()
        self._left_bits, self._right_bits = bits // 2, bits - bits // 2
        rounds = 24 if bits < 16 else 8  # halves of few bits collide often, so they need more rounds
        self._keys = [_finalize((key + (i + 1) * _GAMMA) & _MASK) for i in range(rounds)]
        # The short run ends at place `_tail`. If it were whole, all places after it would be
        # `_short` higher.
        self._short = runs * run - count
        self._tail = (self._permuted(runs - 1, -1) + 1) * run - self._short if self._short else count

    def number_at(self, place: int) -> int:
        """Return the number at a place, which is from 0 to count - 1."""
        slot, offset = divmod(place + self._short * (place >= self._tail), self.run)
        return self._permuted(slot, 1) * self.run + offset

    def place_of(self, number: int) -> int:
        """Return the place of a number, which is from 0 to count - 1: the inverse of
        ``number_at``.
        """
        run, offset = divmod(number, self.run)
        place = self._permuted(run, -1) * self.run + offset
        return place - self._short * (place >= self._tail)

    def numbers_at(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the numbers at many places: int64, in the shape (places,) of the argument."""
        import numpy as np

        numbers = np.empty(len(places), np.int64)
        for start in range(0, len(places), _BLOCK):
            block = places[start : start + _BLOCK]
            slots, offsets = np.divmod(block + self._short * (block >= self._tail), self.run)
            numbers[start : start + _BLOCK] = self._runs_at(slots) * self.run + offsets
        return numbers

    def places_of(self, numbers: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the places of numbers: the inverse of ``numbers_at``."""
        runs, offsets = numbers // self.run, numbers % self.run
        places = self._runs_at(runs, -1) * self.run + offsets
        return places - self._short * (places >= self._tail)

    def _permuted(self, value: int, direction: int) -> int:
        """Return which run is in a slot, or, with -1, in which slot a run is."""
        value = self._network(value, direction)
        while value >= self._runs:
            value = self._network(value, direction)
        return value

    def _runs_at(self, slots: npt.NDArray[np.int64], direction: int = 1) -> npt.NDArray[np.int64]:
        """Return which runs are in slots: the block form of ``_permuted``."""
        import numpy as np

        runs: npt.NDArray[np.uint64] = self._network(slots.astype(np.uint64), direction)
        while len(outside := np.flatnonzero(runs >= self._runs)):
            runs[outside] = self._network(runs[outside], direction)
        return runs.astype(np.int64)

    def _network(self, value: _Int, direction: int) -> _Int:
        """Apply all rounds to a number or a block; with -1 in reverse, which undoes them."""
        left, right = value >> self._right_bits, value & (1 << self._right_bits) - 1
        for number in range(len(self._keys))[::direction]:
            key = self._keys[number]
            if number % 2:
                right ^= _finalize((left + key) & _MASK) >> 64 - self._right_bits
            else:
                left ^= _finalize((right + key) & _MASK) >> 64 - self._left_bits
        return left << self._right_bits | right


def order_of_samples(count: int, seed: int, epoch: int, *, block_samples: int = 1) -> Permutation:
    """Return the order of an epoch over ``count`` samples, the same on every rank and worker."""
    return Permutation(count, hash64(seed, epoch, _SAMPLES), run=block_samples)
