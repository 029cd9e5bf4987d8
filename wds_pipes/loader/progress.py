"""The position of a PipeLoader and what is running: the one object that the loader and its
iterators share.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from wds_pipes.core.counts import Lack, Network, logger
from wds_pipes.core.order import hash64
from wds_pipes.errors import StateError
from wds_pipes.loader.comparing import is_compared
from wds_pipes.loader.partition import NOT_BEGUN
from wds_pipes.loader.plan import LoaderPosition, Plan
from wds_pipes.loader.protocol import Begin, Result
from wds_pipes.loader.stats import Tally
from wds_pipes.loader.workers import Workers


@dataclass
class Run:
    """A run over an epoch of the data, or over its rest, and what is in flight of it.

    Attributes:
        number: the number of the run.
        results: the results of the workers.
        waiting: the lanes that have not ended.
        ended: those that have, with their last states.
        ahead: the parts of the next batch; after an error nothing follows.
        lack: of the ended lanes that yielded nothing.
    """

    number: int = -1
    results: Iterator[Result] = field(default_factory=lambda: iter(()))
    waiting: set[int] = field(default_factory=set)
    ended: dict[int, bytes] = field(default_factory=dict)
    ahead: deque[Result] = field(default_factory=deque)
    lack: Lack = field(default_factory=Lack)


class Progress:
    """The position of a loader, and its workers.

    Attributes:
        plan: how epochs are divided.
        workers: what runs the lanes.
        at: the position after the last returned batch; None: the beginning of ``epoch``.
        epoch: the epoch of the next iteration, unless that resumes.
        resume: whether the next iteration continues from ``at``.
        passed: whether set_epoch() requested the epoch at whose end the loaded state was taken;
            then the next iteration is its rest, which is empty.
        cut: how many batches of this rank with_epoch() requests of an iteration; None: an
            iteration is an epoch.
        cut_in_samples: ``cut`` is in samples of this rank.
        paused: where with_epoch() cut an iteration, its run and its measurements.
        inside: ``next()`` of an iterator is running, or was left by an interrupt; then the state of
            what is in flight is unknown.
        thread: which thread called it.
        tally: the measurements of the current or last iteration.
        network: the use of the network by each process.
        made: when the loader was made, in nanoseconds since 1970.
    """

    def __init__(self, plan: Plan, workers: Workers) -> None:
        self.plan, self.workers = plan, workers
        self.at: LoaderPosition | None = None
        self.epoch = 0
        self.resume = False
        self.passed = False
        self.cut: int | None = None
        self.cut_in_samples = False
        self.paused: tuple[LoaderPosition, Run, Tally] | None = None
        self.inside = False
        self.thread = 0
        self.tally: Tally | None = None
        self.network: dict[int, Network] = {}
        self.made = time.time_ns()
        self._live: weakref.ref[Any] | None = None  # to the iterator in use
        self._runs = 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the same position, and nothing of what is running."""
        return {**self.__dict__, "paused": None, "inside": False, "tally": None, "_live": None}

    @property
    def position(self) -> LoaderPosition:
        """The position of the loader; if every lane of the epoch has ended, the beginning of the
        next epoch.
        """
        at = self.at or self.plan.beginning(self.epoch)
        return self.plan.after(at.counted_from(None) if self.is_over(at) else at)

    def is_over(self, at: LoaderPosition | None) -> bool:
        """Whether the caller has, at a position, all that with_epoch() requests of an iteration.

        The next one continues there.
        """
        return self.cut is not None and at is not None and (at.samples if self.cut_in_samples else at.given) >= self.cut

    @property
    def lanes(self) -> int | None:
        """How many lanes the current epoch has; None: no epoch has begun."""
        return None if self.at is None else self.at.partition.lanes

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration start ``epoch`` from its beginning, unless it resumes within this
        epoch, from a state or from a cut of with_epoch().

        Endless epochs follow each other by themselves: then only the first iteration can start one.
        """
        at = self.position
        begun = self.at is not None and (self.resume or self.at.step > 0 or self.at.partition.start > 0)
        if self.plan.endless and begun:
            return
        self.passed = self.resume and self.cut is None and at.begins and at.epoch == epoch + 1
        if self.passed:
            logger.warning(
                "the loaded state was taken at the end of epoch %d, so nothing is left of this epoch, and the next "
                "iteration yields nothing. To leave it out, loop from loader.epoch on.", epoch,
            )  # fmt: skip
            return
        goes_on = self.resume or self.is_over(self.at)  # at a cut, whether or not the caller saw its end
        if not (goes_on and at.epoch == epoch):
            self._replace("set_epoch() was called: continue with a new iter()", interrupted=self.inside)
            self.epoch, self.at, self.resume = epoch, self.plan.beginning(epoch, self.lanes), False

    def go_to(self, at: LoaderPosition) -> None:
        """Make the next iteration continue from a position."""
        self._replace("a state was loaded: continue with a new iter()", interrupted=self.inside)
        self.at, self.epoch, self.resume, self.passed = at, at.epoch, True, False

    def cut_after(self, count: int, *, in_samples: bool) -> None:
        """Make each iteration yield ``count`` batches of this rank, or samples.

        The next one counts from here.
        """
        at = self.at
        if at is not None and (self.is_over(at) or not self.resume):
            self.resume = self.resume or self.is_over(at)
            self.at = at.counted_from(None)
        self._replace("with_epoch() was called: continue with a new iter()", interrupted=self.inside)
        self.cut, self.cut_in_samples = count, in_samples

    def check_ranks_once(self) -> None:
        """Raise StateError on all ranks if they differ, and no iteration has compared them."""
        if not is_compared(self):
            self.plan.check_ranks(self, self.position, self.cut)

    def begin(self, before: LoaderPosition | None) -> tuple[LoaderPosition, Run]:
        """Begin a run over an epoch of the data, or over its rest.

        Args:
            before: the position from which an iteration of with_epoch() continues; None: a new
                iteration begins.

        Returns:
            the position where the run begins, and the run.
        """
        plan = self.plan
        if plan.endless and self.at is not None and not self.resume:
            at = self.position.counted_from(None)  # also after a break: there is no other epoch to begin
        elif self.resume or self.is_over(self.at):
            at = self.position
        else:
            at = plan.beginning(self.epoch, self.lanes)
        if before is None:
            plan.check_ranks(self, at, self.cut)
        else:
            at = at.counted_from(before)
        self.at, self.epoch, self.resume = at, at.epoch + 1, False
        self._runs += 1
        batches, lanes = at.partition.batches(plan.terms), at.states
        resumed = at.partition.start > 0 or any(lane != NOT_BEGUN for lane in lanes.values())
        begins = {
            number: Begin(at.epoch, at.partition, lane, None if batches is None else batches[number], resumed)
            for number, lane in lanes.items()
            if not lane["ended"]
        }
        if self.workers.count:
            _with_workers.add(self)
        # differs on each rank, and after a resume
        seed = hash64(plan.source.seed, plan.rank.number, at.epoch, at.partition.start, at.step)
        return at, Run(self._runs, self.workers.start(self._runs, begins, seed), set(begins))

    @property
    def length_unknown(self) -> str | None:
        """Why the number of batches of an iteration is not known, and what to do; None if it is."""
        if self.cut_in_samples:
            return "the last batch of a lane may be smaller: pass batches= to with_epoch(), or drop_last=True"
        if self.cut is not None:
            return None
        return "epoch_end='loop' has no end: call with_epoch()" if self.plan.endless else self.plan.uncounted

    @property
    def live(self) -> Any:
        """The iterator in use, if there is one."""
        return None if self._live is None else self._live()

    def use(self, iterator: Any) -> None:
        """Make an iterator the one in use, and stop the one before."""
        self._replace(
            "a newer one was started, and a loader has one at a time; build a second loader to iterate twice at once"
        )
        self._live = weakref.ref(iterator)

    def _replace(self, why: str, *, interrupted: bool = False) -> None:
        """Stop the iterator in use."""
        if (live := self.live) is not None:
            live.stop(StateError(f"this iterator has been replaced: {why}."), interrupted=interrupted)

    def close(self, why: str) -> None:
        """Stop the workers and the iterator in use, and drop all that is in flight.

        The position stays.
        """
        # first the iterator: another thread that waits in it for the workers must find this reason
        self._replace(why, interrupted=self.inside)
        self.workers.end(interrupted=self.inside)
        self.paused = None
        self.inside = False


_with_workers: weakref.WeakSet[Progress] = weakref.WeakSet()  # loaders whose workers this process has started


def _forget_all() -> None:
    for progress in list(_with_workers):
        progress.workers.forget()
    _with_workers.clear()


os.register_at_fork(after_in_child=_forget_all)


@atexit.register
def _close_all() -> None:
    """Close the loaders when Python exits.

    Otherwise multiprocessing would end their workers first, and DataLoader would report that they
    died.
    """
    for progress in list(_with_workers):
        progress.close("Python ends")
