"""Each rank has the same shards in all epochs: ``ShardList(sticky=True)``.

Rules:
1. Which shards a rank has depends on the seed and the number of ranks alone, and is as equal as for
   other lists: shards are given to ranks by a consistent hash (Lamping and Veach, "A fast, minimal
   memory, consistent hash algorithm", 2014), so that on n + 1 instead of n ranks 1 / (n + 1) of the
   shards move. What a rank has beyond its share then goes to those that have less, which takes a
   few shards of each rank, and cuts at most two.
2. The lanes of a rank divide its shards. Within a lane, the shards come in the order of the epoch.
3. This is so for the lanes with which an epoch begins. If the rest of an epoch is repartitioned,
   the rest is divided as for other lists; the next epoch is sticky again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from wds_pipes.core.lane import ShardRanges
from wds_pipes.core.order import hash64, stream

if TYPE_CHECKING:
    import numpy.typing as npt

_SALT = 11


def arranged(ranges: ShardRanges, seed: int, ranks: int, lanes: int, sizes: Sequence[int] | None) -> ShardRanges:
    """Return the shards of an epoch in the order in which the lanes get those of their ranks.

    Args:
        ranges: whole shards, in the order of the epoch.
        seed: that of the list.
        ranks: the number of ranks; lane i is of rank i modulo this number.
        lanes: the number of lanes.
        sizes: how many samples each lane gets, one after the other; None: the lanes get whole
            shards in turn.
    """
    if not len(ranges):
        return ranges
    places = np.argsort(ranges.numbers)  # the rest does not depend on the epoch
    counted = sizes is not None
    wanted = np.array([len(range(lane, len(ranges), lanes)) for lane in range(lanes)] if sizes is None else sizes)
    shards = ranges[places]
    units = ShardRanges(shards.numbers, shards.starts, shards.stops if counted else shards.starts + 1)
    keys = stream(hash64(seed, _SALT), 0, int(shards.numbers[-1]) + 1)[shards.numbers]
    order = np.argsort(keys, kind="stable")
    units, ranks_of = units[order], _consistent(keys[order], ranks)
    own = _levelled(units, ranks_of, [int(wanted[rank::ranks].sum()) for rank in range(ranks)])
    in_epoch = np.empty(int(shards.numbers[-1]) + 1, np.int64)
    in_epoch[ranges.numbers] = np.arange(len(ranges))
    of_lane = list[ShardRanges]([units[:0]]) * lanes
    for rank, share in enumerate(own):
        for lane, part in zip(range(rank, lanes, ranks), share.cut(wanted[rank::ranks].tolist()), strict=True):
            of_lane[lane] = part[np.argsort(in_epoch[part.numbers], kind="stable")]
    if counted:
        return ShardRanges.of_all(of_lane)
    turns = np.empty(len(ranges), np.int64)
    for lane, part in enumerate(of_lane):
        turns[lane::lanes] = in_epoch[part.numbers]
    return ranges[turns]


def _consistent(keys: npt.NDArray[np.uint64], ranks: int) -> npt.NDArray[np.int64]:
    """Return a rank for each key, by the consistent hash of rule 1."""
    keys, found, after = keys.copy(), np.zeros(len(keys), np.int64), np.zeros(len(keys), np.int64)
    going = np.arange(len(keys))
    while len(going):
        found[going] = after[going]
        keys[going] = keys[going] * np.uint64(2862933555777941757) + np.uint64(1)
        share = (1 << 31) / ((keys[going] >> np.uint64(33)).astype(np.float64) + 1)
        after[going] = ((found[going] + 1) * share).astype(np.int64)
        going = going[after[going] < ranks]
    return found


def _levelled(units: ShardRanges, ranks_of: npt.NDArray[np.int64], goals: list[int]) -> list[ShardRanges]:
    """Return the shards of each rank, of which each gets its goal: what is too much goes on."""
    kept, beyond = list[list[ShardRanges]](), list[ShardRanges]()
    by_rank = np.argsort(ranks_of, kind="stable")
    ends = np.searchsorted(ranks_of[by_rank], np.arange(len(goals) + 1))
    for rank, goal in enumerate(goals):
        mine = units[by_rank[ends[rank] : ends[rank + 1]]]
        here = min(goal, mine.samples)
        part, rest = mine.cut([here, mine.samples - here])
        kept.append([part])
        beyond.append(rest)
    missing = [goal - parts[0].samples for goal, parts in zip(goals, kept, strict=True)]
    for parts, more in zip(kept, ShardRanges.of_all(beyond).cut(missing), strict=True):
        parts.append(more)
    return [ShardRanges.of_all(parts) for parts in kept]
