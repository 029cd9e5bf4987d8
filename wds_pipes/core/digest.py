"""A digest of a set of samples: the sum of a 128-bit hash of each.

A sum does not depend on the order of the samples, nor on how they are divided: ranks, workers and
lanes each sum up their own, and the sums are added. Sums of hashes are the multiset hash AdHash
(Bellare and Micciancio, "A New Paradigm for Collision-Free Hashing", EUROCRYPT 1997), here with a
fast hash: a fault is noticed but for a chance of 2**-128, but no protection against forgery is
meant.

A digest is two numbers of 64 bits, each of which is summed up by itself, modulo 2**64. The hash of
a sample is of its shard and its key. The key is cut into words of 64 bits; each is multiplied by a
constant of its place and mixed, and words of zeros add nothing, so that a key has one hash whatever
the longest key beside it is.

The values are part of the checkpoint format: tests hold golden vectors. The form with numpy returns
the same bits as the form with integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeVar

from wds_pipes.core.order import hash64

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Digest = tuple[int, int]
DIGESTS = ("digest_low", "digest_high")  # the names of its two numbers among the counts of a lane
NOTHING: Digest = (0, 0)

_Number = TypeVar("_Number", int, Any)  # an int of 64 bits, or an array of uint64
_MASK = (1 << 64) - 1
_SALT = 9  # of the constants
# Two rounds: with one, half of the bits of a sum would stay if two samples had each other's shard.
_MULTIPLIERS = (0xD6E8FEB86659FD93, 0xA24BAED4963EE407)
_WORD = 8  # bytes
_MOST_WORDS = 32  # the hash of a longer key is that of its BLAKE2b
_FEW = 8  # up to so many samples, integers are faster than numpy


def add(digests: Iterable[Digest]) -> Digest:
    """Return the digest of all samples of several sets together."""
    low = high = 0
    for one, other in digests:
        low, high = low + one, high + other
    return low & _MASK, high & _MASK


def subtract(whole: Digest, part: Digest) -> Digest:
    """Return the digest of the samples of ``whole`` without those of ``part``."""
    return (whole[0] - part[0]) & _MASK, (whole[1] - part[1]) & _MASK


def in_epoch(digest: Digest, epoch: int) -> Digest:
    """Return a digest such that the sum over epochs also tells in which epoch a sample came: each
    number times an odd one of the epoch. The result of a sum is the sum of the results.
    """
    low, high = (value * (hash64(epoch, _SALT, place) | 1) & _MASK for place, value in enumerate(digest))
    return low, high


def of_counts(counts: Mapping[str, int]) -> Digest:
    """Return the digest among the counts of a lane."""
    low, high = (counts.get(name, 0) for name in DIGESTS)
    return low, high


def to_text(digest: Digest) -> str:
    """Return 32 hexadecimal digits."""
    return f"{digest[1]:016x}{digest[0]:016x}"


def from_text(text: str) -> Digest:
    """Return the digest that ``to_text`` wrote."""
    number = int(text, 16)
    return number & _MASK, number >> 64


def of_shard(shard: str) -> bytes:
    """Return what ``of_samples`` takes for a shard, by a text that identifies it."""
    return blake2b(shard.encode("utf-8", "surrogateescape"), digest_size=2 * _WORD).digest()


def of_samples(keys: Sequence[str], shards: Sequence[bytes]) -> Digest:
    """Return the digest of samples.

    Args:
        keys: the key of each.
        shards: the shard of each: what ``of_shard`` returned.
    """
    if len(keys) <= _FEW:
        return add(_of_one(key, shard) for key, shard in zip(keys, shards, strict=True))
    import numpy as np

    words, constants = _words(keys), shards[:1] if shards.count(shards[0]) == len(shards) else shards
    hashes = np.frombuffer(b"".join(constants), "<u8").reshape(-1, 2).T
    hashes = hashes + _mixed(words[:, None] * _constant_arrays(len(words))).sum(0)
    for multiplier in map(np.uint64, _MULTIPLIERS):
        hashes = _mixed(hashes * multiplier)
    low, high = hashes.sum(1).tolist()
    return low, high


def _mixed(product: _Number) -> _Number:
    product ^= product >> 32
    return product


def _of_one(key: str, shard: bytes) -> Digest:
    """Return the hash of a sample: the form of ``of_samples`` with integers."""
    words, found = _split(_bytes_of(key)), _split(shard)
    for word, constants in zip(words, _constants(len(words)), strict=True):
        for place, constant in enumerate(constants):
            found[place] += _mixed(word * constant & _MASK)
    for multiplier in _MULTIPLIERS:
        found = [_mixed(value * multiplier & _MASK) for value in found]
    low, high = found
    return low, high


def _split(data: bytes) -> list[int]:
    """Return the words of data."""
    return [int.from_bytes(data[start : start + _WORD], "little") for start in range(0, len(data), _WORD)]


def _bytes_of(key: str) -> bytes:
    data = key.encode("utf-8", "surrogateescape")
    return data if len(data) <= _MOST_WORDS * _WORD else blake2b(data).digest()


def _words(keys: Sequence[str]) -> npt.NDArray[np.uint64]:
    """Return the words of keys, of shorter ones with zeros after them: shape (words, keys)."""
    import numpy as np

    if not "".join(keys).isascii() or max(map(len, keys)) > _MOST_WORDS * _WORD:
        keys = [_bytes_of(key).decode("latin-1") for key in keys]  # one character for each byte
    width = -(-max(1, *map(len, keys)) // _WORD) * _WORD
    data = "".join([key.ljust(width, "\0") for key in keys]).encode("latin-1")
    return np.frombuffer(data, "<u8").reshape(len(keys), -1).T


@lru_cache(maxsize=_MOST_WORDS + 1)
def _constants(words: int) -> list[Digest]:
    """Return the constants of the first places of a key: odd numbers of 64 bits."""
    return [(hash64(_SALT, word) | 1, hash64(_SALT, word, 1) | 1) for word in range(words)]


@lru_cache(maxsize=_MOST_WORDS + 1)
def _constant_arrays(words: int) -> npt.NDArray[np.uint64]:
    """Return them as an array of shape (words, 2, 1)."""
    import numpy as np

    return np.array(_constants(words), np.uint64)[:, :, None]
