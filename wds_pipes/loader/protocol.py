"""What the main process and the workers of a PipeLoader send to each other."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from wds_pipes.core.counts import COUNTED, LIMITED
from wds_pipes.loader.lanes import Deal
from wds_pipes.loader.stats import Spent

LaneState = dict[str, Any]  # url, delivered, ended, position (None: not begun), counts

NOT_BEGUN: LaneState = {"url": None, "delivered": 0, "ended": False, "position": None, "counts": {}}


class Begin(NamedTuple):
    """Where a lane begins, and after how many batches it ends (None: when it is exhausted)."""

    epoch: int
    deal: Deal
    state: LaneState
    batches: int | None


# What a worker is to do: in a run (which tells one pass over an epoch from another), give the next batch of a lane (-1: it is nobody's turn). With its first
# one it gets its lanes. A plain tuple, for one goes out with each batch.
Command = tuple[int, int, dict[int, Begin] | None]


# A batch of a lane with the lane's state behind it, or what went wrong: the run, the lane, the batch, the state (packed), whether the lane has ended (with that
# state, and in the place of a batch its Lack if it gave nothing), the error, and with some what was spent. A plain tuple too; a state is packed once, and
# unpacked when somebody asks for it.
Result = tuple[int, int, Any, bytes | None, bool, Exception | None, Spent | None]


pack: Callable[[LaneState], bytes] = pickle.dumps
unpack: Callable[[bytes], LaneState] = pickle.loads
AT_END: Result = (-1, -1, None, None, False, None, None)


def delivered_in(lane: bytes) -> int:
    """How many samples of a lane were handed out."""
    count: int = unpack(lane)["counts"].get("delivered", 0)
    return count


def total_counts(lanes: Iterable[LaneState], before: dict[str, int]) -> dict[str, int]:
    """The counts of several lanes and those from before, added up, without those of single stages."""
    total = dict.fromkeys(COUNTED, 0)
    for counts in (before, *(lane["counts"] for lane in lanes)):
        for name, count in counts.items():
            if count and not name.startswith(LIMITED):  # most are 0, and this is done for each lane of a state
                total[name] = total.get(name, 0) + count
    return total
