"""One iteration over the batches of a PipeLoader."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

from wds_pipes.core.counts import LIMITED, Lack, error_of_nothing
from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError, StateError
from wds_pipes.loader.joining import Joining
from wds_pipes.loader.plan import LoaderPosition
from wds_pipes.loader.progress import Progress, Run
from wds_pipes.loader.protocol import Result, delivered_in, total_counts, unpack
from wds_pipes.loader.stats import Tally
from wds_pipes.loader.workers import next_result, worker_error


class LoaderIterator:
    """One iteration over a PipeLoader.

    Args:
        progress: the progress of the loader.
        join: makes a batch of its parts.
        bar: makes a progress bar that starts at ``initial``; None: show none.
    """

    def __init__(self, progress: Progress, join: Joining, bar: Callable[..., Any] | None) -> None:
        self._progress, self._plan, self._join, self._new_bar = progress, progress.plan, join, bar
        self._started = False
        self._error: Exception | None = None
        self._trace: TracebackType | None = None  # of the error before it is raised: each raise adds frames
        self._at: LoaderPosition | None = None  # None: not started
        self._run = Run()
        self._bar: Any = None
        # a cache: of each lane, a state and its counts of skipped errors
        self._limited: dict[int, tuple[bytes, dict[str, int]]] = {}
        # samples of the epoch from before this iteration, minus what this iteration yielded in
        # earlier epochs
        self._samples_before = 0
        self.tally = Tally(progress.network)

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._to_raise(self._error)
        progress, thread = self._progress, threading.get_ident()
        if progress.inside:
            if progress.thread != thread:
                raise RuntimeError(
                    "another thread is in next() of this loader, or was interrupted there: one thread at a time can "
                    "iterate it. Give each thread a loader of its own, or let one thread iterate and pass its batches "
                    "on. After an interrupt, call close() first."
                )
            if self._started:
                raise self.stop(
                    RuntimeError(
                        "this iterator was interrupted: to continue, call load_state_dict(state_dict()), then iter()"
                    ),
                    interrupted=True,
                )
            progress.close("what it had in flight is gone")
        progress.inside, progress.thread, self._started = True, thread, True
        try:
            if self._at is None:
                self.tally.begin()
            start = time.perf_counter()
            found = self._next()
            if self._error is not None:  # perhaps of a signal handler that loaded a state meanwhile
                found = self._error  # type: ignore[unreachable]
            if not isinstance(found, Exception):
                self.tally.handed_over(start)
                if self._bar is not None:
                    self._bar.update()
        except Exception as error:  # a signal handler may raise at any moment: DataLoader's does for a dead worker
            told, stopped = worker_error(error, self._run.results), self._error is not None
            found = self.stop(told, interrupted=True)
            if stopped and told is error:  # of a signal handler, while the workers of an epoch that is over were ended
                progress.inside = False
                raise
            progress.close("what it had in flight is gone")
        except BaseException:  # Ctrl-C, most often
            progress.workers.end(interrupted=True)
            raise
        if isinstance(found, Exception):
            progress.inside = False
            raise self._to_raise(found)
        # From here to the return no signal handler runs. So an interrupt comes either before the
        # loader adopts the position, or after the caller has the batch.
        batch, self._at = found
        progress.at = self._at
        self.tally.stands = self._at, self._samples_before
        progress.inside = False
        return batch

    def end_at_cut(self) -> None:
        """End, if the caller has all batches of with_epoch(), but did not call ``next()`` once
        more.
        """
        progress, at = self._progress, self._at
        if self._error is None and at is not None and progress.at is at and progress.is_over(at):
            self._pause(at)

    def _pause(self, at: LoaderPosition) -> Exception:
        """Leave what is in flight to the next iteration of with_epoch()."""
        self._progress.at, self._progress.resume = at, True
        self._progress.paused = at, self._run, self.tally
        return self.stop(StopIteration())

    def _next(self) -> tuple[Any, LoaderPosition] | Exception:
        """Return the next batch and the position after it, or the exception to raise."""
        progress = self._progress
        if self._at is None and progress.passed:
            progress.passed = False
            return self.stop(StopIteration())
        at = self._at or self._start()
        if progress.is_over(at):
            return self._pause(at)
        if not self._run.ahead and progress.cut is not None:
            self._commit_ends(at)
            self._samples_before -= self._plan.counts(at)["delivered"]
            at = self._go_on(at)  # the next epoch of the data, without a break
            self._samples_before += self._plan.counts(at)["delivered"]
            self.tally.stands = at, self._samples_before
        if not self._run.ahead:
            if (lacking := self._all_lacking(at)) is not None:
                return self.stop(lacking)  # the state remains at the beginning of the epoch
            error = self._too_many({**at.lanes, **self._run.ended}, at)
            self._commit_ends(at)
            if error is None and progress.cut is not None:
                error = ShardError(
                    "a whole epoch of the data gave no batch, and with_epoch() requests more: no lane has a full batch "
                    "(use fewer lanes, a smaller batch_size, or epoch_end='pad' or 'exact'), or filters and "
                    "on_error='skip' leave nothing."
                )
            return self.stop(error or StopIteration())
        parts: list[Any] = []
        after = at._replace(lanes=dict(at.lanes), step=at.step + 1)
        while self._run.ahead and len(parts) < self._plan.parts and not progress.is_over(after):
            _, lane, part, state, _, error, _ = self._run.ahead.popleft()
            if state is None:
                if not parts:
                    self._commit_ends(at)
                return self.stop(error or StopIteration())
            if progress.cut_in_samples:
                samples = delivered_in(state) - delivered_in(after.lanes[lane])
                after = after._replace(samples=after.samples + samples)
            after.lanes[lane] = state
            parts.append(part)
        self._look_ahead()  # rule 5 of ``pipe_loader``; the next call raises its error
        later = {result[1] for result in self._run.ahead}
        after.lanes.update((lane, state) for lane, state in self._run.ended.items() if lane not in later)
        if (many := self._too_many(after.lanes, at)) is not None:
            return self.stop(many)
        return self._join(parts), after._replace(given=at.given + 1)

    def _too_many(self, lanes: dict[int, bytes], at: LoaderPosition) -> Exception | None:
        """Return an error if the lanes of this rank together skipped more than max_errors of a
        step.
        """
        if not self._plan.limits:
            return None
        for number, lane in lanes.items():
            if self._limited.get(number, (None,))[0] is not lane:
                counts = unpack(lane)["counts"]
                self._limited[number] = lane, {name: counts.get(name, 0) for name in self._plan.limits}
        for name, limit in self._plan.limits.items():
            # the ranks that counted these are no longer known
            before = at.partition.counts.get(name, 0) // self._plan.rank.of
            count = before + sum(self._limited[number][1][name] for number in lanes)
            if count > limit.errors:
                step = name.removeprefix(LIMITED).split()[0]
                return limit.kind(
                    f"{step}() has skipped {plural(count, 'error')} in this epoch, in all "
                    f"lanes of this rank together, and max_errors={limit.errors}. "
                    "The log names the first ones: mend the data, or allow more."
                )
        return None

    def _all_lacking(self, at: LoaderPosition) -> Exception | None:
        """Return an error if no lane of this rank yielded anything because of missing fields, which
        are those that ``group_by_key(fields=...)`` keeps, or because no shard of any rank has a
        sample. If there is another reason, warn.
        """
        if at.partition.counts.get("delivered") or any(map(delivered_in, at.lanes.values())):
            return None
        counts, lack = total_counts(map(unpack, self._run.ended.values()), {}), self._run.lack
        if self._plan.rank.of > 1 and not any(counts.values()):
            counts, lack = self._plan.look(at.epoch)
        return error_of_nothing(counts, lack)

    def _commit_ends(self, at: LoaderPosition) -> None:
        """Adopt the ends of the lanes: no batch follows ``at``. If a signal handler has loaded a
        state meanwhile, that stays.
        """
        if self._error is None:
            self._at = self._progress.at = at._replace(lanes={**at.lanes, **self._run.ended})

    def _start(self) -> LoaderPosition:
        progress = self._progress
        if isinstance(live := progress.live, LoaderIterator):
            live.end_at_cut()
        paused, progress.paused = progress.paused, None
        progress.use(self)
        if paused is not None and progress.resume and progress.at is paused[0]:
            # with_epoch() cut the stream here: continue with what was fetched ahead.
            at, self._run, tally = paused
            self._at = progress.at = at = at.counted_from(None)
            progress.resume = False
            self.tally.held = tally.held
        else:
            at = self._go_on()
        self._samples_before = self._plan.counts(at)["delivered"]
        self.tally.stands = at, self._samples_before
        progress.tally = self.tally
        if self._new_bar is not None:
            self._bar = self._new_bar(initial=at.given or at.step)
        return at

    def _go_on(self, before: LoaderPosition | None = None) -> LoaderPosition:
        """Begin a run over an epoch of the data, or over its rest."""
        at, self._run = self._progress.begin(before)
        self._at = at
        self._look_ahead()
        return at

    def _look_ahead(self) -> None:
        """Fetch the parts of the next batch, as far as they are not there yet.

        With drop_last, parts that do not make a full batch are dropped at the end of the epoch.
        """
        run, plan = self._run, self._plan
        ahead = run.ahead
        while len(ahead) < plan.parts and not (ahead and ahead[-1][3] is None):
            if (result := self._fetch()) is None:
                break
            ahead.append(result)
        if plan.drop_last and len(ahead) < plan.parts and not run.waiting:
            for _, lane, *_ in ahead:
                run.ended[lane] = plan.without_part(run.ended[lane])
            ahead.clear()

    def _fetch(self) -> Result | None:
        """Return the next result, a batch or an error; None at the end of the epoch."""
        while self._run.waiting:
            try:
                result = next_result(self._run.results)
            except Exception as error:
                told = worker_error(error, self._run.results)
                self._progress.workers.end(interrupted=True)
                return self._run.number, -1, None, None, False, told, None
            run = self._run
            number, lane, batch, state, ended, _, spent = result
            if number != run.number or lane not in run.waiting:
                continue
            if spent is not None:
                self.tally.add(lane, spent)
            if not ended:
                return result
            assert state is not None
            run.waiting.discard(lane)
            self._progress.workers.commands.end(lane)
            run.ended[lane] = state
            if batch is not None:
                run.lack = Lack.of_all((run.lack, batch))
        return None

    def stop(self, error: Exception, *, interrupted: bool = False) -> Exception:
        """Make every further ``next()`` raise ``error``, unless the iterator has stopped already.

        Args:
            error: the error.
            interrupted: ``next()`` is running, or an exception left it at an unknown point.

        Returns:
            the error that ``next()`` will raise.
        """
        if self._error is None:
            self._error = error
            self._trace = error.__traceback__
            self.tally.end()
            if self._bar is not None:
                self._bar.close()
            broken = not isinstance(error, (StopIteration, StateError))
            paused = self._progress.paused
            if (paused is None or paused[1] is not self._run) and (broken or not self._progress.workers.persistent):
                self._progress.workers.end(interrupted=interrupted)
            self._run = dataclasses.replace(self._run, results=iter(()), ahead=deque())
        return self._error

    def _to_raise(self, error: Exception) -> Exception:
        """Return the error to raise: the error itself, but a new StopIteration each time.

        The traceback of a kept StopIteration would keep this iterator, and so the workers, until
        the garbage collector runs.
        """
        return StopIteration() if isinstance(error, StopIteration) else error.with_traceback(self._trace)
