"""One iteration over the batches of a PipeLoader, and what its iterations share."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.pin_memory import pin_memory

from wds_pipes.core.counts import Lack, Network, error_of_nothing, leave_out, logger, warn_of_unmet
from wds_pipes.core.digest import as_counts, of_counts, subtract
from wds_pipes.core.order import hash64
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, ShardError, StateError
from wds_pipes.loader.ledger_file import LedgerFile
from wds_pipes.loader.partition import BEGINNING, LaneAt, total_counts
from wds_pipes.loader.plan import LoaderPosition, Plan
from wds_pipes.loader.ranks import is_compared
from wds_pipes.loader.restoring import Editable
from wds_pipes.loader.slices import Partition
from wds_pipes.loader.stats import Tally
from wds_pipes.loader.worker import Begin, Result
from wds_pipes.loader.workers import Workers
from wds_pipes.stages.collating import which_batch
from wds_pipes.stages.edits import Keys

# The parts of a batch, the position after it, and what comes instead of it: see ``EpochRun.step``.
Outcome = tuple[list[Any], LoaderPosition, Exception | None]


class EpochRun:
    """A run over an epoch of the data, or over its rest: the loop that moves a position. Of what is
    in flight, a position knows nothing.

    Args:
        plan: how epochs are divided.
        workers: what runs the lanes; they begin.
        at: the position where the run begins.
        tally: what measures it.

    Attributes:
        begin: where it begins, or goes on after a cut of with_epoch().
        tally: as above.
        whole: whether it is over a whole epoch.
        waiting: the lanes that have not ended.
        ended: where the others ended.
        ahead: the parts of the next batch; after an error nothing follows.
        lack: of the ended lanes.
    """

    def __init__(self, plan: Plan, workers: Workers, at: LoaderPosition, tally: Tally) -> None:
        self._plan, self._workers, self.begin, self.tally = plan, workers, at, tally
        batches = at.partition.batches(plan.terms)
        self.whole = at.partition.start == 0 and all(lane == BEGINNING for lane in at.lanes.values())
        begins = {
            number: Begin(at.epoch, at.partition, lane, None if batches is None else batches[number], not self.whole)
            for number, lane in at.lanes.items()
            if not lane.ended
        }
        self.waiting, self.ended, self.lack = set(begins), dict[int, LaneAt](), Lack()
        self.ahead = deque[Result]()
        # differs on each rank, and after a resume
        seed = hash64(plan.source.seed, plan.rank.number, at.epoch, at.partition.start, at.step)
        workers.start(begins, seed)

    def step(self, at: LoaderPosition, samples: int | None = None) -> Outcome:
        """Take the next batch.

        Args:
            at: the position before it.
            samples: the batch ends with the part that reaches this number of ``at.samples``; None:
                they are not counted.

        Returns:
            the parts of the batch, the position after it, and None; or no parts, the position to
            adopt, and the error or StopIteration that comes instead.
        """
        if not self.ahead:
            if (lacking := self._lacking(at)) is not None:
                return [], at, lacking  # the state remains at the beginning of the epoch
            end = self.end(at)
            return [], end, self._plan.too_many(end.lanes, at) or StopIteration()
        parts: list[Any] = []
        after = at._replace(lanes=dict(at.lanes), step=at.step + 1, given=at.given + 1)
        while self.ahead and len(parts) < self._plan.parts and (samples is None or after.samples < samples):
            number, part, fields, failure, _ = self.ahead.popleft()
            if fields is None:
                return [], at if parts else self.end(at), failure
            lane = LaneAt(*fields)
            if samples is not None:
                had, has = (self._plan.delivered(number, one) for one in (after.lanes[number], lane))
                after = after._replace(samples=after.samples + has - had)
            after.lanes[number] = lane
            parts.append(part)
        self.look_ahead(after)  # rule 4 of ``pipe_loader``; the next call returns its error
        later = {result[0] for result in self.ahead}
        after.lanes.update((number, lane) for number, lane in self.ended.items() if number not in later)
        if self._plan.limits and (many := self._plan.too_many(after.lanes, at)) is not None:
            return [], at, many
        return parts, after, None

    def end(self, at: LoaderPosition) -> LoaderPosition:
        """Return a position, after which no batch follows, with the ends of the lanes."""
        return at._replace(lanes={**at.lanes, **self.ended})

    def drop(self) -> None:
        """Leave what is in flight: nothing follows."""
        self.waiting.clear()
        self.ahead.clear()

    def _lacking(self, at: LoaderPosition) -> Exception | None:
        """Return an error if no lane of this rank yielded anything because of missing fields, which
        are those that ``group_by_key(fields=...)`` keeps, or because no shard of any rank has a
        sample. If there is another reason, warn.
        """
        plan = self._plan
        if at.partition.counts.get("delivered") or any(plan.delivered(*lane) for lane in at.lanes.items()):
            return None
        counts, lack = total_counts(plan.counts_of(*lane) for lane in self.ended.items()), self.lack
        if plan.rank.of > 1 and not any(counts.values()):
            counts, lack = plan.look(at.epoch)
        return error_of_nothing(counts, lack)

    def look_ahead(self, at: LoaderPosition) -> None:
        """Fetch the parts of the next batch, which begins at a position, as far as they are not
        there yet.

        With drop_last, parts that do not make a full batch are dropped at the end of the epoch.
        """
        plan, ahead = self._plan, self.ahead
        while len(ahead) < plan.parts and not (ahead and ahead[-1][2] is None):
            if (result := self._fetch()) is None:
                break
            ahead.append(result)
        if plan.drop_last and len(ahead) < plan.parts and not self.waiting:
            before = dict(at.lanes)
            for number, _, fields, *_ in ahead:
                assert fields is not None
                lane = LaneAt(*fields)
                had, has = (of_counts(one.counts(plan.chain)) for one in (before[number], lane))
                self.ended[number], before[number] = plan.without_part(self.ended[number], subtract(has, had)), lane
            ahead.clear()

    def _fetch(self) -> Result | None:
        """Return the next result, a batch or an error; None at the end of the epoch."""
        while self.waiting:
            try:
                result = self._workers.next()
            except Exception as error:
                self._workers.end(interrupted=True)
                return -1, None, None, error, None
            number, batch, fields, _, spent = result
            if number not in self.waiting:  # it was requested before its end was known
                continue
            if spent is not None:
                self.tally.add(number, spent)
            if fields is None or not (lane := LaneAt(*fields)).ended:
                return result
            self.waiting.discard(number)
            self.ended[number] = lane
            if batch is not None:
                self.lack = Lack.of_all((self.lack, batch))
        return None


class Progress:
    """The position of a loader, and its workers.

    Attributes:
        editable: what edits start from.
        plan: how epochs are divided.
        workers: what runs the lanes.
        new_workers: returns the workers of a pipeline, also for another ``count``.
        ledger: the file to which each step appends a record; None: there is none.
        excluded: the keys of the samples that a loaded state leaves out.
        at: the position after the last returned batch; None: the beginning of ``epoch``.
        epoch: the epoch of the next iteration, unless that resumes.
        resume: whether the next iteration continues from ``at``.
        passed: whether set_epoch() requested the epoch at whose end the loaded state was taken;
            then the next iteration is its rest, which is empty.
        cut: how many batches of this rank with_epoch() requests of an iteration; None: an
            iteration is an epoch.
        cut_in_samples: ``cut`` is in samples of this rank.
        paused: the run of the iteration that with_epoch() cut at ``at``; the next one goes on with
            it.
        inside: the thread in which ``next()`` of an iterator is running, or was left by an
            interrupt; then the state of what is in flight is unknown. 0: none.
        tally: the measurements of the current or last iteration.
        network: the use of the network by each process.
        made: when the loader was made, in nanoseconds since 1970.
        loaded: the partition in which a state was loaded; None: only at its beginning.
    """

    def __init__(
        self,
        editable: Editable,
        new_workers: Callable[..., Workers],
        ledger: LedgerFile | None = None,
    ) -> None:
        self.editable, self.new_workers, self.ledger = editable, new_workers, ledger
        self.plan, self.workers = editable.plan, new_workers(editable.plan.stage)
        self.excluded: Keys = ()
        self.at: LoaderPosition | None = None
        self.epoch = 0
        self.resume = self.passed = False
        self.cut: int | None = None
        self.cut_in_samples = False
        self.paused: EpochRun | None = None
        self.inside = 0
        self.tally: Tally | None = None
        self.network: dict[int, Network] = {}
        self.made = time.time_ns()
        self.loaded: Partition | None = None
        self._live: weakref.ref[LoaderIterator] | None = None  # to the iterator in use

    def __getstate__(self) -> dict[str, Any]:
        """A copy has the same position, and nothing of what is running."""
        return {**self.__dict__, "paused": None, "inside": 0, "tally": None, "_live": None}

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
            self._replace("set_epoch() was called: continue with a new iter()")
            self.epoch, self.at, self.resume = epoch, self.plan.beginning(epoch, self.lanes, after=self.at), False

    def go_to(self, at: LoaderPosition, plan: Plan | None = None, excluded: Keys | None = None) -> None:
        """Make the next iteration continue from a position, which may be of an edited pipeline: see
        ``wds_pipes.loader.restoring.Continuation``.
        """
        self.excluded = self.excluded if excluded is None else excluded
        if plan is None or plan is self.plan:
            self._replace("a state was loaded: continue with a new iter()")
        else:
            self.close("a state was loaded: continue with a new iter()")
            self.plan, self.workers = plan, self.new_workers(plan.stage)
        self.at, self.epoch, self.resume, self.passed = at, at.epoch, True, False

    def begin_again(self) -> None:
        """Make the next iteration begin the first epoch, also where with_epoch() has cut, which
        set_epoch() would continue.
        """
        self.go_to(self.plan.beginning(0))

    def skip(self, batches: int) -> None:
        """Make the next iteration continue after so many batches: see ``PipeLoader.skip``."""
        plan, at = self.plan, self.position
        left = 0 if self.passed else plan.left(at)
        if left is not None and batches >= left:
            raise ValueError(
                f"skip(batches={batches}) would leave nothing of epoch {at.epoch}, of which this rank has "
                f"{plural(left, 'batch')} left: pass fewer, or leave the epoch out with set_epoch({at.epoch + 1})"
            )
        if (partition := at.partition.after_skip(batches, plan.states(at), at.epoch, plan.terms)) is not None:
            digests = {number: of_counts(plan.counts_of(number, lane)) for number, lane in at.lanes.items()}
            lanes = {number: BEGINNING._replace(extra=as_counts(digest)) for number, digest in digests.items()}
            self.go_to(at._replace(partition=partition, lanes=lanes, step=at.step + batches))
            return
        self.go_to(at)
        plan.check_ranks(self, at, None, "skip()")
        self.inside = threading.get_ident()
        try:
            after = self._after_skip(at, batches)
        except BaseException:  # of the data, or Ctrl-C
            self.workers.end(interrupted=True)
            raise
        finally:
            self.inside = 0
        self.go_to(after)

    def _after_skip(self, at: LoaderPosition, batches: int) -> LoaderPosition:
        """Read batches, and return the position after them, which counts them as left out, and
        whose digest does not have them.
        """
        plan, after = self.plan, at
        run = EpochRun(plan, self.workers, at, Tally(self.network))
        run.look_ahead(at)
        for _ in range(batches):
            parts, after, error = run.step(after)
            if isinstance(error, StopIteration) or (parts and after.ended):
                raise ValueError(f"skip(batches={batches}) would leave nothing of epoch {at.epoch}: pass fewer")
            if error is not None:
                raise error
        lanes = dict[int, LaneAt]()
        for number, lane in after.lanes.items():
            had, counts = at.lanes[number].counts(plan.chain), lane.counts(plan.chain)
            leave_out(counts, counts.get("delivered", 0) - had.get("delivered", 0))
            if plan.ledger:
                counts |= as_counts(of_counts(had))
            lanes[number] = lane.with_counts(plan.chain, counts)
        return after._replace(lanes=lanes).counted_from(at)

    def cut_after(self, count: int, *, in_samples: bool) -> None:
        """Make each iteration yield ``count`` batches of this rank, or samples.

        The next one counts from here.
        """
        at, over = self.at, self.is_over(self.at)
        if at is not None and (over or not self.resume):
            self.resume, self.at = self.resume or over, at.counted_from(None)
        self._replace("with_epoch() was called: continue with a new iter()")
        self.cut, self.cut_in_samples = count, in_samples

    def check_ranks_once(self) -> None:
        """Raise StateError on all ranks if they differ, and no iteration has compared them."""
        if not is_compared(self):
            self.plan.check_ranks(self, self.position, self.cut, "checkpoint.save()")

    def begin(self, tally: Tally, before: LoaderPosition | None = None) -> EpochRun:
        """Begin a run over an epoch of the data, or over its rest: the position is where it begins.

        Args:
            tally: what measures the iteration.
            before: the position from which an iteration of with_epoch() continues; None: a new
                iteration begins.
        """
        plan = self.plan
        if plan.endless and self.at is not None and not self.resume:
            at = self.position.counted_from(None)  # also after a break: there is no other epoch to begin
        elif self.resume or self.is_over(self.at):
            at = self.position
        else:
            at = plan.beginning(self.epoch, self.lanes, after=self.at)
        had = 0
        if before is None:
            plan.check_ranks(self, at, self.cut, "next()")
        else:
            at, had = at.counted_from(before), tally.stands[2] - plan.counts(before)["delivered"]
        tally.stands = plan, at, had + plan.counts(at)["delivered"]
        self.at, self.epoch, self.resume, self.tally = at, at.epoch + 1, False, tally
        return EpochRun(plan, self.workers, at, tally)

    def commit_end(self, run: EpochRun, at: LoaderPosition) -> None:
        """Adopt the position at the end of a run, or of its lanes that have ended."""
        self.at = at
        if not run.waiting and self.plan.rank.of == 1 and not self.plan.kind.in_order:
            warn_of_unmet(self.excluded, run.lack, at.epoch, whole=run.whole)

    def is_past(self) -> bool:
        """Whether the iteration that begins is the rest, which is empty, of the epoch at whose end
        the loaded state was taken.
        """
        passed, self.passed = self.passed, False
        return passed

    def enter(self, iterator: LoaderIterator) -> None:
        """Begin ``next()`` of an iterator, in this thread.

        Raises:
            RuntimeError: another ``next()`` is running, or was interrupted.
        """
        thread = threading.get_ident()
        if self.inside:
            if self.inside != thread:
                raise RuntimeError(
                    "another thread is in next() of this loader, or was interrupted there: one thread at a time can "
                    "iterate it. Give each thread a loader of its own, or let one thread iterate and pass its batches "
                    "on. After an interrupt, call close() first."
                )
            if self.live is iterator:
                raise iterator.stop(
                    RuntimeError(
                        "this iterator was interrupted: to continue, call load_state_dict(state_dict()), then iter()"
                    ),
                    interrupted=True,
                )
            self.close("what it had in flight is gone")
        self.inside = thread

    @property
    def length_unknown(self) -> str | None:
        """Why the number of batches of an iteration is not known, and what to do; None if it is."""
        if self.cut_in_samples:
            return "the last batch of a lane may be smaller: pass batches= to with_epoch(), or drop_last=True"
        if self.cut is not None:
            return None
        return "epoch_end='loop' has no end: call with_epoch()" if self.plan.endless else self.plan.uncounted

    @property
    def live(self) -> LoaderIterator | None:
        """The iterator in use, if there is one."""
        return None if self._live is None else self._live()

    def use(self, iterator: LoaderIterator, tally: Tally) -> EpochRun:
        """Make an iterator the one in use, and stop the one before. Return its run, with which it
        goes on after a cut of with_epoch(), or which begins.
        """
        if (live := self.live) is not None:
            if self.is_over(self.at):  # the caller has all batches, but did not call ``next()`` once more
                live.stop(StopIteration())
            newer = "a newer one was started, and a loader has one at a time"
            live.stop(_replaced(f"{newer}; build a second loader to iterate twice at once"))
        self._live = weakref.ref(iterator)
        run, self.paused = self.paused, None
        # in a forked child, to which the workers do not belong, a run does not go on
        if run is None or self.at is None or not self.workers.running:
            return self.begin(tally)
        run.tally, tally.held = tally, run.tally.held
        self.at = run.begin = self.at.counted_from(None)
        self.tally, tally.stands = tally, (self.plan, self.at, self.plan.counts(self.at)["delivered"])
        return run

    def _replace(self, why: str) -> None:
        """Stop the iterator in use, and drop what it has left to the next one."""
        if (live := self.live) is not None:
            live.stop(_replaced(why), interrupted=self.inside > 0)
        self.paused = None

    def close(self, why: str) -> None:
        """Stop the workers and the iterator in use, and drop all that is in flight.

        The position stays.
        """
        # first the iterator: another thread that waits in it for the workers must find this reason
        self._replace(why)
        self.workers.end(interrupted=self.inside > 0)
        self.inside = 0
        if self.ledger is not None:
            self.ledger.close()


def _replaced(why: str) -> StateError:
    return StateError(f"this iterator has been replaced: {why}.")


class LoaderIterator:
    """One iteration over a PipeLoader. It has no position: that of the loader is the only one.

    Args:
        progress: the progress of the loader.
        join: makes a batch of its parts.
        bar: makes a progress bar that starts at ``initial``; None: show none.
    """

    def __init__(self, progress: Progress, join: Callable[[list[Any]], Any], bar: Callable[..., Any] | None) -> None:
        self._progress, self._join, self._new_bar = progress, join, bar
        self._error: Exception | None = None
        self._trace: TracebackType | None = None  # of the error before it is raised: each raise adds frames
        self._run: EpochRun | None = None  # None: not started, or stopped
        self._bar: Any = None
        self._tally = Tally(progress.network)

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._again(self._error)
        progress, tally = self._progress, self._tally
        progress.enter(self)
        try:
            start = time.perf_counter()
            found = self._next()
            if self._error is not None:  # perhaps of a signal handler that loaded a state meanwhile
                found = self._error  # type: ignore[unreachable]
            if not isinstance(found, Exception):
                tally.handed_over(start)
                if self._bar is not None:
                    self._bar.update()
        except Exception as error:  # also of a signal handler, at any moment
            stopped = self._error is not None
            found = self.stop(error, interrupted=True)
            progress.close("what it had in flight is gone")
            if stopped:  # of a signal handler, while the workers of an epoch that is over were ended
                raise
        except BaseException:  # Ctrl-C, most often
            progress.workers.end(interrupted=True)
            raise
        if isinstance(found, Exception):
            progress.inside = 0
            raise self._again(found)
        # From here to the return no signal handler runs, since nothing is called. So an interrupt
        # comes either before the loader adopts the position, or after the caller has the batch.
        batch, at = found
        progress.at = at
        tally.stands = tally.stands[0], at, tally.stands[2]
        progress.inside = 0
        return batch

    def _next(self) -> tuple[Any, LoaderPosition] | Exception:
        """Return the next batch and the position after it, or the exception to raise."""
        progress = self._progress
        if self._run is None:
            if progress.is_past():
                return self.stop(StopIteration())
            self._start()
        run, at = self._run, progress.at
        if self._error is not None or run is None or at is None:  # of a signal handler that loaded a state meanwhile
            return self._error or StopIteration()
        if progress.is_over(at):
            return self.stop(StopIteration())
        if not run.ahead and progress.cut is not None:
            self._commit_end(run, run.end(at))
            self._run = run = progress.begin(self._tally, at)  # the next epoch of the data, without a break
            at = run.begin
            run.look_ahead(at)
        parts, after, error = run.step(at, progress.cut if progress.cut_in_samples else None)
        if error is not None:
            if after is not at:
                self._commit_end(run, after)
            if isinstance(error, StopIteration) and progress.cut is not None:
                error = ShardError(
                    "a whole epoch of the data gave no batch, and with_epoch() requests more: no lane has a full batch "
                    "(use fewer lanes, a smaller batch_size, or epoch_end='pad' or 'exact'), or filters and "
                    "on_error='skip' leave nothing."
                )
            return self.stop(error)
        batch = self._join(parts)
        if progress.ledger is not None and after.earlier is not None:
            plan, step = progress.plan, (after.epoch, after.partition.start, after.step)
            progress.ledger.write(plan.rank, step, plan.counts(after)["delivered"], plan.digest(after))
        return batch, after

    def _commit_end(self, run: EpochRun, at: LoaderPosition) -> None:
        """Adopt the ends of lanes: no batch follows. If a signal handler has loaded a state
        meanwhile, that stays.
        """
        if self._error is None:
            self._progress.commit_end(run, at)

    def _start(self) -> None:
        progress = self._progress
        self._tally.begin()
        self._run = run = progress.use(self, self._tally)
        run.look_ahead(run.begin)
        if self._new_bar is not None:
            self._bar = self._new_bar(initial=run.begin.given or run.begin.step)

    def stop(self, error: Exception, *, interrupted: bool = False) -> Exception:
        """Make every further ``next()`` raise ``error``, unless the iterator has stopped already.

        At a cut of with_epoch(), what is in flight is left to the next iteration.

        Args:
            error: the error.
            interrupted: ``next()`` is running, or an exception left it at an unknown point.

        Returns:
            the error that ``next()`` will raise.
        """
        if self._error is None:
            self._error, self._trace, progress = error, error.__traceback__, self._progress
            run, self._run = self._run, None
            self._tally.end()
            if self._bar is not None:
                self._bar.close()
            if isinstance(error, StopIteration) and progress.is_over(progress.at):
                progress.paused = run
                return error
            if run is not None:
                run.drop()
            if not (isinstance(error, (StopIteration, StateError)) and progress.workers.persistent):
                progress.workers.end(interrupted=interrupted)
        return self._error

    def _again(self, error: Exception) -> Exception:
        """Return the error to raise: the error itself, but a new StopIteration each time.

        The traceback of a kept StopIteration would keep this iterator, and so the workers, until
        the garbage collector runs.
        """
        return StopIteration() if isinstance(error, StopIteration) else error.with_traceback(self._trace)


class Joining:
    """How the parts of a batch become one batch.

    Args:
        parts: how many parts a full batch has.
        collate: makes the batch of the list of samples in all parts; None: the parts are batches
            themselves, as ``batch_samples`` makes them, and are joined column by column.
        pin: copy tensors into pinned memory.
        on_device: called with each batch at last; None: nothing.
    """

    def __init__(
        self,
        parts: int = 1,
        collate: Callable[[list[Any]], Any] | None = None,
        *,
        pin: bool = False,
        on_device: Callable[[Any], Any] | None = None,
    ) -> None:
        self.parts, self._collate, self._on_device = parts, collate, on_device
        # As DataLoader does; torch.accelerator is there from torch 2.6 on.
        self._pin = pin and getattr(torch, "accelerator", torch.cuda).is_available()

    def __call__(self, parts: list[Any]) -> Any:
        """Return the batch that parts make.

        Raises:
            SampleError: a column differs in kind, shape or dtype.
        """
        batch = parts[0] if self.parts == 1 else self._joined(parts)
        if self._pin:
            batch = pin_memory(batch)  # type: ignore[no-untyped-call]
        return batch if self._on_device is None else _call("on_device", self._on_device, batch)

    def _joined(self, parts: list[Any]) -> Any:
        batch = _join(parts, "the samples")
        if self._collate is None:
            return batch
        try:
            return _call("collate", self._collate, batch)
        except Exception as error:
            error.add_note(which_batch(batch, None))
            raise


def _call(name: str, function: Callable[[Any], Any], batch: Any) -> Any:
    """Return what a function of the user's makes of a batch."""
    try:
        return function(batch)
    except StopIteration as error:  # it would look like the end of the epoch
        raise RuntimeError(f"{name} raised StopIteration") from error


def _join(parts: list[Any], what: str) -> Any:
    first = parts[0]
    if len(parts) == 1:
        return first
    if any(_kind(part) != _kind(first) for part in parts):
        raise _unlike(parts, what)
    if isinstance(first, dict):
        return {name: _join([part[name] for part in parts], f"field {name!r}") for name in first}
    if isinstance(first, tuple):
        columns = [_join(list(values), f"place {place} of the tuples") for place, values in enumerate(zip(*parts))]
        return type(first)(*columns) if hasattr(first, "_fields") else tuple(columns)
    if isinstance(first, torch.Tensor):
        return _concatenated(parts)
    return np.concatenate(parts) if isinstance(first, np.ndarray) else [item for part in parts for item in part]


def _concatenated(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all tensors as one. numpy copies with one thread, torch with all cores,
    which the workers need.
    """
    try:
        return torch.from_numpy(np.concatenate([part.numpy() for part in parts]))
    except (TypeError, RuntimeError):  # numpy has no such dtype
        return torch.cat(parts)


def _kind(part: Any) -> str:
    """Return what parts must have in common, as text for a message."""
    if isinstance(part, (torch.Tensor, np.ndarray)):
        return f"samples of shape {tuple(part.shape[1:])}, {part.dtype}"
    if isinstance(part, dict):
        return f"the fields {', '.join(sorted(map(str, part)))}"
    return f"a {type(part).__name__} of {len(part)} columns" if isinstance(part, tuple) else "a list"


def _unlike(parts: list[Any], what: str) -> SampleError:
    other = next(part for part in parts if _kind(part) != _kind(parts[0]))
    return SampleError(
        f"{what} of several lanes cannot be joined into a batch: {_kind(parts[0])} in one lane, and {_kind(other)} in "
        "another. Bring them to one shape and type with map_samples(), or pass collate=."
    )
