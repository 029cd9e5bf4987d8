"""A digest of a set of samples: the sum of a 128-bit hash of each, modulo 2**128.

A sum does not depend on the order of the samples, nor on how they are divided: ranks, workers and
lanes each sum up their own, and the sums are added. This is the multiset hash AdHash (Bellare and
Micciancio, "A New Paradigm for Collision-Free Hashing", EUROCRYPT 1997), over BLAKE2s. A fault is
noticed but for a chance of 2**-128. 128 bits do not protect against forgery.

The values are part of the checkpoint format: tests hold golden vectors.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from wds_pipes.core.order import hash64

Digest: TypeAlias = int  # from 0 to 2**128 - 1
ShardHash: TypeAlias = Any  # of hashlib: what is common to the hashes of all samples of a shard
DIGESTS = ("digest_low", "digest_high")  # the names of its halves among the counts of a lane
NOTHING: Digest = 0

_BYTES = 16
_ALL = 1 << 128
_HALF = (1 << 64) - 1
_SALT = 9  # of the numbers of epochs


def add(digests: Iterable[Digest]) -> Digest:
    """Return the digest of all samples of several sets together."""
    return sum(digests) % _ALL


def subtract(whole: Digest, part: Digest) -> Digest:
    """Return the digest of the samples of ``whole`` without those of ``part``."""
    return (whole - part) % _ALL


def in_epoch(digest: Digest, epoch: int) -> Digest:
    """Return a digest such that the sum over epochs also tells in which epoch a sample came: times
    an odd number of the epoch. The result of a sum is the sum of the results.
    """
    number = hash64(epoch, _SALT) << 64 | hash64(epoch, _SALT, 1) | 1
    return digest * number % _ALL


def of_counts(counts: Mapping[str, int]) -> Digest:
    """Return the digest among the counts of a lane, or among the sums of several."""
    low, high = DIGESTS
    return of_halves(counts.get(low, 0), counts.get(high, 0))


def as_counts(digest: Digest) -> dict[str, int]:
    """Return the counts that ``of_counts`` reads."""
    return dict(zip(DIGESTS, halves(digest), strict=True))


def halves(digest: Digest) -> tuple[int, int]:
    """Return the low and the high 64 bits."""
    return digest & _HALF, digest >> 64


def of_halves(low: int, high: int) -> Digest:
    """Return the digest with these halves, or with these sums of halves."""
    return (low + (high << 64)) % _ALL


def to_text(digest: Digest) -> str:
    """Return 32 hexadecimal digits."""
    return f"{digest:032x}"


def from_text(text: str) -> Digest:
    """Return the digest that ``to_text`` wrote."""
    return int(text, 16)


def of_shard(shard: str) -> ShardHash:
    """Return what ``of_samples`` takes for a shard, by a text that identifies it."""
    identity = hashlib.blake2s(shard.encode("utf-8", "surrogateescape")).digest()
    return hashlib.blake2s(identity, digest_size=_BYTES)  # of one length, so that keys cannot be a part of it


def of_samples(samples: Iterable[tuple[str, ShardHash]]) -> Digest:
    """Return the digest of samples.

    Args:
        samples: of each, its key and what ``of_shard`` returned.
    """
    total, number = 0, int.from_bytes
    for key, shard in samples:
        found = shard.copy()
        found.update(key.encode("utf-8", "surrogateescape"))
        total += number(found.digest(), "little")
    return total % _ALL
