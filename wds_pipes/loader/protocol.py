"""What the main process and the workers of a PipeLoader send to each other."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from wds_pipes.core.counts import COUNTED, LIMITED
from wds_pipes.loader.partition import LaneState, Partition
from wds_pipes.loader.stats import Spent


class Begin(NamedTuple):
    """Where a lane begins, after how many batches it ends (None: when it is exhausted), and whether
    its epoch was begun before.
    """

    epoch: int
    partition: Partition
    state: LaneState
    batches: int | None
    resumed: bool


# What a worker does next: the number of the run (each iteration over an epoch, or over its rest, is
# a run), the lane whose next batch to return (-1: no lane), and, in the worker's first command of a
# run that names a lane, where each of its lanes begins. A plain tuple, because one is sent for each
# batch.
Command = tuple[int, int, dict[int, Begin] | None]


# A batch of a lane with the lane's state after it, or an error: the run, the lane, the batch, the
# state (packed), whether the lane has ended (with the last state; instead of a batch there is its
# Lack if it yielded nothing), the error, and, with some results, the measurements. A plain tuple,
# too. A state is packed once, and unpacked only when it is requested.
Result = tuple[int, int, Any, bytes | None, bool, Exception | None, Spent | None]


pack: Callable[[LaneState], bytes] = pickle.dumps
unpack: Callable[[bytes], LaneState] = pickle.loads


def delivered_in(lane: bytes) -> int:
    """How many samples of a lane were delivered."""
    count: int = unpack(lane)["counts"].get("delivered", 0)
    return count


def total_counts(lanes: Iterable[LaneState], before: dict[str, int]) -> dict[str, int]:
    """Return the sum of the counts of lanes and of ``before``, without counts of single stages."""
    total = dict.fromkeys(COUNTED, 0)
    for counts in (before, *(lane["counts"] for lane in lanes)):
        for name, count in counts.items():
            if count and not name.startswith(LIMITED):  # zeros are skipped for speed: most counts are 0
                total[name] = total.get(name, 0) + count
    return total
