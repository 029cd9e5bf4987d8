"""One iteration over the batches of a PipeLoader."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch.profiler import record_function

from wds_pipes.core.counts import LIMITED, Lack, warn_of_nothing
from wds_pipes.core.tracebacks import shorten
from wds_pipes.core.words import plural
from wds_pipes.errors import StateError
from wds_pipes.loader.position import LoaderPosition, Paused
from wds_pipes.loader.progress import Progress
from wds_pipes.loader.protocol import AT_END, Result, delivered_in, total_counts, unpack
from wds_pipes.loader.stats import Tally
from wds_pipes.loader.workers import worker_error


class LoaderIterator:
    """One iteration over a PipeLoader.

    Args:
        progress: of the loader.
        bar: makes a progress bar that stands at ``initial``; None: there is none.
    """

    def __init__(self, progress: Progress, bar: Callable[..., Any] | None) -> None:
        self._progress, self._plan, self._new_bar = progress, progress.plan, bar
        self._started = False
        self._error: Exception | None = None
        self._trace: TracebackType | None = None  # of the error, before it was raised: each time that it is, it grows
        self._at: LoaderPosition | None = None  # None: not started
        self._run = -1
        self._results: Iterator[Result] = iter(())
        self._ahead: Result | None = None
        self._waiting: set[int] = set()  # the lanes that have not ended
        self._ended: dict[int, bytes] = {}  # those that have
        self._lack = Lack()  # of those that gave nothing
        self._bar: Any = None
        self._limited: dict[int, tuple[bytes, dict[str, int]]] = {}  # of each lane, what max_errors bounds at the state that it was taken from
        self._samples_before = 0  # of the epoch of the data, less those of earlier epochs in this pass
        self.tally = Tally(progress.network)

    def __iter__(self) -> LoaderIterator:
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._to_raise(self._error)
        progress = self._progress
        if progress.inside:
            if self._started:
                raise self.stop(RuntimeError("this iterator was interrupted; load_state_dict(state_dict()) and iter() go on"), interrupted=True)
            progress.close("what it had in flight is gone")
        progress.inside = self._started = True
        try:
            if self._at is None:
                self.tally.begin()
            start = time.perf_counter()
            if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
                with record_function("wds_pipes.PipeLoader"):
                    found = self._next()
            else:
                found = self._next()
            if not isinstance(found, Exception):
                self.tally.handed_over(start)
                if self._bar is not None:
                    self._bar.update()
        except Exception as error:  # a signal handler may raise one at any moment: that of DataLoader does so for a dead worker
            found = self.stop(worker_error(error, self._results), interrupted=True)
            progress.close("what it had in flight is gone")
        except BaseException:  # Ctrl-C, most often
            progress.workers.end(interrupted=True)
            raise
        if isinstance(found, Exception):
            progress.inside = False
            raise self._to_raise(found)  # all frames: set WDS_PIPES_FULL_TRACEBACK=1
        # From here to the return no signal handler runs: an interrupt comes before the position counts, or when the caller has the batch.
        batch, self._at = found
        progress.at = self._at
        self.tally.stands = self._at, self._samples_before
        progress.inside = False
        return batch

    def pause(self) -> Paused:
        """Leave what is in flight with the loader, for the next pass of with_epoch()."""
        assert self._at is not None
        self._progress.paused = paused = Paused(self._at, self._run, self._results, self._ahead, self._waiting, self._ended, self.tally)
        return paused

    @property
    def stands_at_cut(self) -> bool:
        """Whether all that with_epoch() asks for was handed out, and the end was not seen."""
        progress, at = self._progress, self._at
        return self._error is None and progress.at is at and progress.is_over(at)

    def _next(self) -> tuple[Any, LoaderPosition] | Exception:
        """The next batch and the position behind it; or what to raise."""
        progress, at = self._progress, self._at or self._start()
        if progress.is_over(at):
            progress.at, progress.resume = at, True
            self.pause()
            return self.stop(StopIteration())
        if self._ahead is None and progress.cut is not None:
            self._commit_ends(at)
            self._samples_before -= self._plan.counts(at)["delivered"]
            self.tally.begin_run()
            at = self._go_on(at)  # the next epoch of the data, without a break
            self._samples_before += self._plan.counts(at)["delivered"]
            self.tally.stands = at, self._samples_before
        _, lane, batch, state, _, error, _ = self._ahead or AT_END
        if state is None:
            if error is None and (lacking := self._all_lacking(at)) is not None:
                return self.stop(lacking)  # the state stays at the beginning of the epoch
            if self._plan.limits and error is None:
                error = self._too_many(at, {**at.lanes, **self._ended})
            self._commit_ends(at)
            return self.stop(error or StopIteration())
        self._ahead = self._fetch()  # rule 5 of ``pipe_loader``; what goes wrong with it is for the next call
        if self._plan.limits and (many := self._too_many(at, {**at.lanes, lane: state, **self._ended})) is not None:
            return self.stop(many)
        samples = at.samples + (delivered_in(state) - delivered_in(at.lanes[lane]) if progress.cut_in_samples else 0)
        return batch, LoaderPosition(at.epoch, at.deal, {**at.lanes, lane: state, **self._ended}, at.step + 1, at.given + 1, samples)

    def _too_many(self, at: LoaderPosition, lanes: dict[int, bytes]) -> Exception | None:
        """The error where the lanes of this rank have skipped more than max_errors of a step allows, together."""
        for number, lane in lanes.items():
            if self._limited.get(number, (None,))[0] is not lane:
                counts = unpack(lane)["counts"]
                self._limited[number] = lane, {name: counts.get(name, 0) for name in self._plan.limits}
        for name, limit in self._plan.limits.items():
            before = at.deal.counts.get(name, 0) // self._plan.rank.of  # whose lanes these were is not known any more
            count = before + sum(self._limited[number][1][name] for number in lanes)
            if count > limit.errors:
                step = name.removeprefix(LIMITED).split()[0]
                return limit.kind(
                    f"{step}() has skipped {plural(count, 'error')} in this epoch, in all lanes of this rank together, and max_errors={limit.errors}. "
                    "The log names the first ones: mend the data, or allow more."
                )
        return None

    def _all_lacking(self, at: LoaderPosition) -> Exception | None:
        """The error where no lane of this rank gave anything in the epoch, since the samples lack the fields that are kept."""
        if at.deal.counts.get("delivered") or any(map(delivered_in, at.lanes.values())):
            return None
        counts = total_counts(map(unpack, self._ended.values()), {})
        if self._lack.explains(counts):
            return self._lack.error()
        warn_of_nothing(counts)
        return None

    def _commit_ends(self, at: LoaderPosition) -> None:
        """Nothing comes behind ``at`` but the ends of lanes."""
        self._at = self._progress.at = at._replace(lanes={**at.lanes, **self._ended})

    def _start(self) -> LoaderPosition:
        progress = self._progress
        paused, progress.paused = progress.paused, None
        live = progress.live
        if isinstance(live, LoaderIterator) and live.stands_at_cut:  # who iterated over it has counted, and did not ask for its end
            progress.resume = True
            paused = live.pause()
            live.stop(StopIteration())
            progress.paused = None
        progress.use(self)
        at = paused.at if paused is not None and progress.resume and progress.at is paused.at else None
        if paused is not None and at is not None:
            # with_epoch() cut the stream there: take up what was fetched ahead.
            self._run, self._results, self._ahead, self._waiting, self._ended = paused.run, paused.results, paused.ahead, paused.waiting, paused.ended
            self._at = progress.at = at = at.counted_from(None)
            progress.resume = False
            self.tally.begin_run(going_on=paused.tally)
        else:
            at = self._go_on()
        self._samples_before = self._plan.counts(at)["delivered"]
        self.tally.stands = at, self._samples_before
        progress.tally = self.tally
        if self._new_bar is not None:
            self._bar = self._new_bar(initial=at.given or at.step)
        return at

    def _go_on(self, before: LoaderPosition | None = None) -> LoaderPosition:
        """Begin a run over an epoch of the data, or its rest."""
        at, self._run, self._results = self._progress.begin(before)
        self._at, self._ended, self._lack = at, {}, Lack()
        self._waiting = {number for number, lane in at.states.items() if not lane["ended"]}
        self._ahead = self._fetch()
        return at

    def _fetch(self) -> Result | None:
        """The next batch, or what went wrong instead of it; None at the end of the epoch."""
        while self._waiting:
            try:
                result = next(self._results)
            except Exception as error:
                told = worker_error(error, self._results)
                self._progress.workers.end(interrupted=True)
                return self._run, -1, None, None, False, told, None
            run, lane, batch, state, ended, _, spent = result
            if run != self._run or lane not in self._waiting:
                continue
            if spent is not None:
                self.tally.add(lane, spent)
            if not ended:
                return result
            assert state is not None
            self._waiting.discard(lane)
            self._progress.workers.end_lane(lane)
            self._ended[lane] = state
            if batch is not None:
                self._lack = Lack.of_all((self._lack, batch))
        return None

    def stop(self, error: Exception, *, interrupted: bool = False) -> Exception:
        """Let every further ``next()`` raise ``error``, unless the iterator has stopped already; gives what it will raise.

        ``interrupted``: ``next()`` is running, or an exception has left it at any point.
        """
        if self._error is None:
            self._error = shorten(error)
            self._trace = error.__traceback__
            self.tally.end()
            if self._bar is not None:
                self._bar.close()
            broken = not isinstance(error, (StopIteration, StateError))
            paused = self._progress.paused is not None and self._progress.paused.run == self._run
            if not paused and (broken or not self._progress.workers.persistent):
                self._progress.workers.end(interrupted=interrupted)
            self._results, self._ahead = iter(()), None
        return self._error

    def _to_raise(self, error: Exception) -> Exception:
        """The error itself; but a new StopIteration, since its traceback would keep the pass, and with it the workers, until the garbage collector runs."""
        return StopIteration() if isinstance(error, StopIteration) else error.with_traceback(self._trace)
