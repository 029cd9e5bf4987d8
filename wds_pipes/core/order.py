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
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


def _finalize(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


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

    z = np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(_GAMMA) + np.uint64(key & _MASK)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


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

    return np.argsort(stream(key, 0, count), kind="stable").astype(np.int64)
