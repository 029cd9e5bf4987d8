"""How far a PipeLoader has come, and what is running: the one thing that the loader and its iterators share."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

from wds_pipes.core.counts import Network
from wds_pipes.core.order import mix
from wds_pipes.errors import StateError
from wds_pipes.loader.plan import Plan
from wds_pipes.loader.position import LoaderPosition, Paused
from wds_pipes.loader.protocol import Begin, Result
from wds_pipes.loader.stats import Tally
from wds_pipes.loader.workers import Workers


class Live(Protocol):
    """What the progress knows of the iterator that is in use."""

    def stop(self, error: Exception, *, interrupted: bool = False) -> Exception: ...


class Progress:
    """Where a loader stands, and its workers.

    Attributes:
        plan: how epochs are divided.
        workers: what runs the lanes.
        at: the position behind the batch that was handed out last; None: at the beginning of ``epoch``.
        epoch: that of the next iteration, unless it resumes.
        resume: whether the next iteration goes on from ``at``.
        cut: what with_epoch() wants of an iteration, in batches of this rank; None: no more and no less than an epoch.
        cut_in_samples: ``cut`` is in samples.
        paused: what was in flight where with_epoch() cut.
        inside: ``next()`` of an iterator is running, or was left by an interrupt: what is in flight is then in no known state.
        tally: of the iteration that is running, or was last.
        network: what each process has used.
    """

    def __init__(self, plan: Plan, workers: Workers) -> None:
        self.plan, self.workers = plan, workers
        self.at: LoaderPosition | None = None
        self.epoch = 0
        self.resume = False
        self.cut: int | None = None
        self.cut_in_samples = False
        self.paused: Paused | None = None
        self.inside = False
        self.tally: Tally | None = None
        self.network: dict[int, Network] = {}
        self._live: weakref.ref[Live] | None = None
        self._runs = 0

    def __getstate__(self) -> dict[str, Any]:
        """A copy stands where this one does, and has nothing that runs."""
        return {**self.__dict__, "paused": None, "inside": False, "tally": None, "_live": None}

    @property
    def position(self) -> LoaderPosition:
        """Where the loader stands; if every lane of the epoch has ended, at the beginning of the next."""
        at = self.at or self.plan.beginning(self.epoch)
        return self.plan.after(at.counted_from(None) if self.is_over(at) else at)

    def is_over(self, at: LoaderPosition | None) -> bool:
        """Whether all that with_epoch() wants of an iteration was handed out at a position: the next one goes on there."""
        return self.cut is not None and at is not None and (at.samples if self.cut_in_samples else at.given) >= self.cut

    @property
    def _lanes(self) -> int | None:
        """How many lanes the epoch has, where one has begun."""
        return None if self.at is None else self.at.deal.lanes

    def length(self) -> int:
        """How many batches an epoch has, of the lanes that it has now."""
        return self.plan.length(self.epoch, self._lanes)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be ``epoch``, from its beginning, unless it resumes in that."""
        if not (self.resume and self.position.epoch == epoch):
            self.epoch, self.at, self.resume = epoch, self.plan.beginning(epoch, self._lanes), False

    def go_to(self, at: LoaderPosition) -> None:
        """Let the next iteration continue at a position."""
        self._replace("a state was loaded: continue with a new iter()", interrupted=self.inside)
        self.at, self.epoch, self.resume = at, at.epoch, True

    def cut_after(self, count: int, *, in_samples: bool) -> None:
        """Let each iteration give so many batches, or samples, of this rank; the next one counts from here on."""
        at = self.at
        if at is not None and (self.is_over(at) or not self.resume):
            self.resume = self.resume or self.is_over(at)
            self.at = at.counted_from(None)
        self._replace("with_epoch() was called: continue with a new iter()", interrupted=self.inside)
        self.cut, self.cut_in_samples = count, in_samples

    def begin(self, before: LoaderPosition | None) -> tuple[LoaderPosition, int, Iterator[Result]]:
        """Begin a run over an epoch of the data, or its rest.

        Args:
            before: the iteration of with_epoch goes on from there; None: it begins.

        Returns:
            where it begins, its number, and the results of the workers.
        """
        plan = self.plan
        at = self.position if self.resume or self.is_over(self.at) else plan.beginning(self.epoch, self._lanes)
        at = at if before is None else at.counted_from(before)
        self.at, self.epoch, self.resume = at, at.epoch + 1, False
        self._runs += 1
        batches = plan.batches(at.deal)
        begins = {number: Begin(at.epoch, at.deal, lane, batches) for number, lane in at.states.items() if not lane["ended"]}
        if self.workers.count:
            _with_workers.add(self)
        seed = mix(plan.recipe.seed, plan.rank.number, at.epoch, len(at.deal.history), at.step)  # another on each rank, and after a resume
        return at, self._runs, self.workers.start(self._runs, begins, seed)

    @property
    def live(self) -> Live | None:
        """The iterator that is in use."""
        return None if self._live is None else self._live()

    def use(self, iterator: Live) -> None:
        """Let an iterator be the one in use."""
        self._replace("a newer one was started, and a loader has one at a time; build a second loader to iterate twice at once")
        self._live = weakref.ref(iterator)

    def _replace(self, why: str, *, interrupted: bool = False) -> None:
        """Stop the iterator that is in use."""
        if (live := self.live) is not None:
            live.stop(StateError(f"this iterator has been replaced: {why}."), interrupted=interrupted)

    def close(self, why: str) -> None:
        """Stop the iterator that is in use and the workers, and drop all that is in flight; the position stays."""
        self.workers.close(interrupted=self.inside)
        self._replace(why)
        self.paused = None
        self.inside = False


_with_workers: weakref.WeakSet[Progress] = weakref.WeakSet()  # those whose workers this process has started


def _forget_all() -> None:
    for progress in list(_with_workers):
        progress.workers.forget()
    _with_workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)


@atexit.register
def _close_all() -> None:
    """Close the loaders when Python ends, before multiprocessing ends their workers and DataLoader takes them for broken ones."""
    for progress in list(_with_workers):
        progress.close("Python ends")
