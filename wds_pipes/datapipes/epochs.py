"""Counts the epochs of a pipe that torch's DataLoader iterates: in the main process, since new
workers are copies, which cannot count themselves.
"""

from __future__ import annotations

import os

from wds_pipes.core.lane import LOADED, Context
from wds_pipes.dataset import LaneEnds
from wds_pipes.loader.callers import keeps_workers, makes_iterator, refuse_accelerate
from wds_pipes.loader.ranks import warn_of_ranks


def count_epoch(context: Context) -> None:
    """Note that an iterator of DataLoader is made or reset; its seed hook calls this.

    Raises:
        RuntimeError: the workers were kept, and do not see an epoch that was selected, or a state
            that was loaded.
        TypeError: Accelerate would lose samples.
    """
    passed = context.passed
    passed.by = passed.by or os.getpid()
    warn_of_ranks("a pipe in DataLoader", divided=True)
    if context.tell_end is None:
        context.tell_end = LaneEnds()
    if passed.by != os.getpid():
        return
    refuse_accelerate()
    if keeps_workers():
        passed.kept += 1
        if passed.missed and (passed.missed == LOADED or context.epoch != passed.kept):
            raise RuntimeError(
                f"the workers of this DataLoader, which keeps them, come to epoch {passed.kept} now, and do not see "
                f"{passed.missed} of the pipe: for an epoch, pass pipe.as_dataset() to DataLoader; for a state use "
                "wds_pipes.PipeLoader, or torchdata's StatefulDataLoader(pipe.as_dataset())"
            )
    # A worker counts on from the epoch with which it was started. An iterator of DataLoader calls
    # this twice, when it is made and when it is reset: only the first call counts.
    if not makes_iterator():
        return
    if passed.epoch == context.epoch:  # workers already had this epoch
        context.epoch += 1
        passed.times += 1
    passed.epoch = passed.kept = context.epoch
    passed.missed = ""
