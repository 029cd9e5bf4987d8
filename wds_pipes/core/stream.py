"""Iterate a chain of stages, whose state can be saved and loaded at any time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property
from types import TracebackType
from typing import Any, Generic, NamedTuple, cast

from wds_pipes.core.counts import public_counts, warn_of_nothing
from wds_pipes.core.lane import Lane
from wds_pipes.core.moved import MEND, Data, Move
from wds_pipes.core.options import check_count
from wds_pipes.core.running import Ended, Mark, Out
from wds_pipes.core.stage import Stage, State
from wds_pipes.core.state import MOST, SEGMENTS, STATE_VERSION, Saved, SavedLane, damaged, read_state
from wds_pipes.core.tracebacks import shorten, shortened
from wds_pipes.core.words import shown, some
from wds_pipes.errors import SampleError, StateError


class Recipe(NamedTuple):
    """The properties of a chain that a state must fit: see ``Stage.shards`` and ``Stage.graph``."""

    seed: int
    shards: int | None
    fingerprint: str
    graph: tuple[str, ...]
    data: Data
    samples: str | None = None  # the fingerprint of the numbers of samples, if the epoch is partitioned by them

    @property
    def of_data(self) -> dict[str, str]:
        """The entry of a state with the id of the data, which stays the same if the shards are
        moved; empty if there is no id.
        """
        return {"data": self.data.id} if self.data.id else {}


class Position(NamedTuple):
    """Where a stream is: ``delivered`` items of ``epoch`` were returned, and ``mark`` is after the
    last of them.
    """

    epoch: int
    delivered: int = 0
    mark: Mark | None = None
    ended: bool = False


class Stream(Generic[Out]):
    """A chain of stages that can be iterated, and whose state can be saved and loaded at any time.

    Each ``iter()`` is the next epoch; a loaded state continues its own. ``iter()`` does nothing
    until the first ``next()``. So a loaded state is used by the first iterator whose ``next()`` is
    called, and this call ends the iterator before it. After an exception the iterator raises it
    again at each ``next()``, and ``state_dict()`` returns the position before the item that failed:
    load it to try again.
    """

    def __init__(self, stage: Stage[Out]) -> None:
        self.stage = stage
        # a Position; as a plain tuple when it is set at each item, to save time
        self.at: tuple[int, int, Mark | None, bool] | None = None
        self._resume = False
        self._live: weakref.ref[Pass[Out]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None}

    def __iter__(self) -> Pass[Out]:
        return Pass(self)

    def set_epoch(self, epoch: int, *, anew: bool = False) -> None:
        """Make the next ``iter()`` start ``epoch`` from its beginning; unless ``anew``, a loaded
        state of this same epoch still continues where it was.
        """
        check_count("epoch", epoch, least=0, most=MOST)
        if self._resume and self.position.epoch == epoch and not anew:
            return
        self.stage.host.epoch, self.stage.host.hosted = epoch, None
        self.at, self._resume = Position(epoch), False

    @property
    def position(self) -> Position:
        """The current position of the stream."""
        return Position(*self.at) if self.at is not None else Position(self.stage.host.epoch)

    @property
    def will_resume(self) -> bool:
        """Whether a state was loaded, and the next ``iter()`` continues from it."""
        return self._resume

    def seek(self, position: Position) -> None:
        """Make the next ``iter()`` continue from ``position``."""
        self._stop_live("a state was loaded: continue with a new iter()")
        self.at, self._resume = position, True
        self.stage.host.epoch = position.epoch

    def begin(self) -> Position:
        """Return the position from which the iteration that starts now continues."""
        host = self.stage.host
        position = self.position if self._resume else Position(host.epoch)
        host.epoch = position.epoch + 1
        self.at, self._resume = position, False
        return position

    def give_up(self) -> None:
        """Make the next ``iter()`` start the next epoch, also after a state was loaded, unless that
        state is at the beginning of its epoch.
        """
        position = self.position
        if not self._resume:
            self.at = None
        elif position.delivered or isinstance(position.mark, Ended):
            self.set_epoch(position.epoch + 1)

    def close(self) -> None:
        """End the current iterator and close its open files."""
        self._stop_live("it was closed")

    def counts(self, position: Position | None = None) -> dict[str, int]:
        """Return what became of the samples of the current epoch, or of the one that just ended:
        delivered, filtered, skipped, dropped.

        If there are any, the result also has ``skipped_shards``, which could not be opened, and
        ``damaged``, the number of places where members were lost.

        In the middle of an epoch, the counts of steps before a ``shuffle_buffer`` lag: they end
        where a resume would start to read again, at most 2.25 * size samples earlier. At the end of
        the epoch, everything is counted.
        """
        position = self.position if position is None else position
        return public_counts(self.stage.counts(position.mark, position.delivered))

    def state_dict(self) -> State:
        """Return the position as a small new dict of plain JSON types. It belongs to the last item
        that was returned.
        """
        position = self.position
        return self.state_at(Position(position.epoch + 1) if position.ended else position)

    def state_at(self, position: Position) -> State:
        """Return the state that continues from ``position``; at the end of an epoch, the rest of
        the epoch is empty.
        """
        recipe, host = self.recipe, self.stage.host
        return {
            "version": STATE_VERSION,
            "epoch": position.epoch,
            "seed": recipe.seed,
            "shards": recipe.shards,
            "fingerprint": recipe.fingerprint,
            **recipe.of_data,
            "graph": list(recipe.graph),
            "lane_count": host.lanes,
            "lanes": {
                str(host.lane): {
                    "url": self.stage.where(position.mark, Lane(recipe.seed, position.epoch, host.lane, host.lanes)),
                    "delivered": position.delivered,
                    "position": self.stage.dump(position.mark),
                }
            },
            "counts": self.counts(position),
        }

    @cached_property
    def recipe(self) -> Recipe:
        """What never changes; StateError if the position of the chain cannot be known."""
        self.stage.check_resumable()
        return Recipe(self.stage.seed, *self.stage.shards(), tuple(self.stage.graph()), self.stage.which_data())

    @shortened
    def load_state_dict(self, state: State, *, moved: bool = False) -> None:
        """Make the next ``iter()`` continue from ``state``.

        Args:
            state: what ``state_dict`` returned.
            moved: the shards are the same, whatever their names and the index say: see
                ``wds_pipes.core.moved``.

        Raises:
            StateError: the state was made by another version, over other shards, with another seed
                or another chain of stages. The message says what differs.
        """
        move, host = Move(moved), self.stage.host
        saved = check_recipe(state, self.recipe, move)
        lane = saved.lanes.get(host.lane)
        if saved.lane_count != host.lanes or lane is None:
            held = f"lane {some(saved.lanes)} of {saved.lane_count}"
            raise StateError(
                f"the state holds {held}, and this process gives lane {host.lane} of "
                f"{host.lanes}: keep the number of workers."
            )
        mark = self.stage.load(self.stage.relocate(check_lane(lane, host.lane, self.stage), move))
        self.seek(Position(saved.epoch, lane.delivered, mark))
        if host.lane == 0:  # only one of several workers logs it
            move.log()

    def _stop_live(self, why: str) -> None:
        live = None if self._live is None else self._live()
        if live is not None:
            live.stop(StateError(f"this iterator has been replaced: {why}."))


class Pass(Generic[Out]):
    """One iteration of a stream; ``next()`` commits the position of the item that it returns."""

    __slots__ = ("__weakref__", "_delivered", "_epoch", "_error", "_items", "_mark", "_running", "_stream", "_trace")

    def __init__(self, stream: Stream[Out]) -> None:
        self._stream = stream
        self._running: Stage[Out] | None = None
        self._items: Iterator[Out] = iter(())
        self._error: Exception | None = None
        # the error's traceback when it was first raised: each later raise would add to it
        self._trace: TracebackType | None = None
        self._epoch = self._delivered = 0

    def __iter__(self) -> Pass[Out]:
        return self

    def __next__(self) -> Out:
        try:
            if self._running is None:
                self._start()
            item = next(self._items)
            mark = self._mark()
        except StopIteration:
            if self._running is not None and (lacking := self._end()) is not None:
                raise lacking from None
            raise
        except Exception as error:
            self.stop(shorten(error))
            raise error  # all frames: set WDS_PIPES_FULL_TRACEBACK=1
        except BaseException as error:
            self.stop(
                RuntimeError(
                    f"this iterator was interrupted by {type(error).__name__}; "
                    "load_state_dict(state_dict()) and iter() go on"
                )
            )
            raise
        # No signal handler runs from here to the return. So an interrupt comes either before the
        # position is committed, or when the caller has the item.
        self._delivered = delivered = self._delivered + 1
        self._stream.at = (self._epoch, delivered, mark, False)
        return item

    def _start(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(self._trace)
        stream = self._stream
        stream._stop_live(
            "a newer one was started, and a pipe has one at a time; build a second pipe to iterate twice at once"
        )
        position, host = stream.begin(), stream.stage.host
        self._epoch, self._delivered = position.epoch, position.delivered
        self._running = stream.stage.open(Lane(stream.stage.seed, position.epoch, host.lane, host.lanes), position.mark)
        self._items, self._mark = self._running.items, self._running.mark
        stream._live = weakref.ref(self)

    def begin(self) -> None:
        """Open what is read, without an item: then the position has a mark."""
        if self._running is None and self._error is None:
            self._start()
            self._stream.at = (self._epoch, self._delivered, self._mark(), False)

    def _end(self) -> SampleError | None:
        """Commit the end of the epoch. If all samples lack the fields that are kept, stop with an
        error instead, and return the error.
        """
        running, host = cast(Stage[Out], self._running), self._stream.stage.host
        mark, lack = running.mark(), running.lack
        counts = self._stream.counts(Position(self._epoch, self._delivered, mark))
        explained, nothing = lack.explains(counts), not any(counts.values())
        if (explained or nothing) and (explained if host.tell_end is None else host.tell_end(self._epoch, explained)):
            error = lack.error()
            self.stop(error)
            return error
        if host.lanes == 1:
            warn_of_nothing(counts, lack)
        self._stream.at = Position(self._epoch, self._delivered, mark, ended=True)
        self.stop(StopIteration())
        return None

    def stop(self, error: Exception) -> None:
        """Make every further ``next()`` raise ``error``, unless the iterator has stopped
        already.
        """
        try:
            self.close()
        finally:  # also if an interrupt comes while it waits for threads
            if self._error is None:
                self._error, self._trace = error, error.__traceback__
            self._running = None

    def close(self) -> None:
        """Close everything that is open."""
        if self._running is not None:
            self._running.close()

    def __del__(self) -> None:
        self.close()


def check_recipe(state: State, recipe: Recipe, move: Move) -> Saved:
    """Return the contents of a state. ``move`` notes where its data were.

    Raises:
        StateError: another pipeline made the state; the message lists all differences.
    """
    saved, differences, mend = read_state(state), [], "Build the pipeline as it was when the state was saved."
    move.url = next((lane.url for lane in saved.lanes.values() if lane.url is not None), None)
    if saved.graph != recipe.graph:
        differences.append(_unlike(saved.graph, recipe.graph))
    if saved.shards != recipe.shards:
        differences.append(f"it was made over {saved.shards} shards, this pipeline has {recipe.shards}")
    elif (problem := move.problem(Data(saved.fingerprint, saved.data), recipe.data)) is not None:
        differences.append(problem)
        mend += f" {MEND}"
    # None: earlier versions did not save it
    if saved.graph == recipe.graph and saved.samples not in (None, recipe.samples):
        differences.append(
            "samples_per_shard or the index gave the shards other numbers of samples, by which "
            "the epoch was partitioned"
        )
    if saved.seed != recipe.seed:
        differences.append(f"it was made with seed={saved.seed}, this pipeline has seed={recipe.seed}")
    if differences:
        raise StateError(f"the state does not fit this pipeline: {'; '.join(differences)}. {mend}")
    return saved


def _unlike(then: Sequence[str], now: Sequence[str]) -> str:
    """Return how the chain of a state differs from another one: the steps that differ, and the step
    before them.
    """
    old, new = _steps(then), _steps(now)
    if old == new:
        old_parts, new_parts = ([step for step in graph if _is_parts(step)] for graph in (then, now))
        if not new_parts:
            return "it was made by a PipeLoader, this is a pipe: load it into a PipeLoader"
        if not old_parts:
            return "it was made by a pipe, this is a PipeLoader: load it into what you iterated"
        numbers = (
            f"{step:.80}".partition("samples=")[2].rstrip(")") or "an unknown number of"
            for step in (old_parts[0], new_parts[0])
        )
        return (
            "its epoch had {} samples, that of this pipeline has {}: pass the same samples_per_shard= or index="
        ).format(*numbers)
    first = max(0, _alike_at_start(old, new) - 1)
    after = _alike_at_start(old[first + 1 :][::-1], new[first + 1 :][::-1])

    def differing(steps: list[str]) -> str:
        return " > ".join([*["..."][: bool(first)], *steps[first : len(steps) - after], *["..."][: bool(after)]])

    return f"its pipeline was {differing(old):.2000}, this one is {differing(new)}"


def _alike_at_start(old: Sequence[str], new: Sequence[str]) -> int:
    """Return how many entries two lists have in common at their start."""
    return next(
        (place for place, (one, other) in enumerate(zip(old, new, strict=False)) if one != other),
        min(len(old), len(new)),
    )


def _steps(graph: Sequence[str]) -> list[str]:
    """Return the steps of a chain that its user wrote."""
    return [step for step in graph if not _is_parts(step)]


def _is_parts(step: str) -> bool:
    """Return whether an entry of a graph is a step that PipeLoader adds to a chain."""
    return step.partition("(")[0] == SEGMENTS


def check_lane(lane: SavedLane, number: int, stage: Stage[Any]) -> list[dict[str, Any]]:
    """Return the position of a lane in a state.

    Raises:
        StateError: the position does not have one entry for each stage.
    """
    position = lane.position
    if position is None or len(position) != len(stage.dump(None)):
        raise damaged(f"the position of lane {number} is {shown(position)}")
    return position
