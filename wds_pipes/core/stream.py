"""Iterate a chain of stages, whose state can be saved and loaded at any time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import cached_property
from types import TracebackType
from typing import Any, Generic, NamedTuple, cast

from wds_pipes.core.chain import Chain
from wds_pipes.core.counts import error_of_nothing, in_state, public_counts, warn_of_unmet
from wds_pipes.core.moved import Move
from wds_pipes.core.options import check_count
from wds_pipes.core.recipe import Recipe, check_recipe
from wds_pipes.core.stage import Ended, Mark, Out, Stage, State, close_running
from wds_pipes.core.state import MOST, STATE_VERSION, damaged, not_for_dcp
from wds_pipes.core.words import some
from wds_pipes.errors import SampleError, StateError


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
        self.stage, self.chain = stage, Chain(stage)
        self.base = stage  # without the edits of a loaded state: see wds_pipes.stages.edits
        self.excluded: tuple[str, ...] = ()  # the keys of the samples that it leaves out
        # a Position; as a plain tuple when it is set at each item, to save time
        self.at: tuple[int, int, Mark | None, bool] | None = None
        self.will_resume = False  # a state was loaded, and the next ``iter()`` continues from it
        self._loaded_for = 0, 1, 0  # of the loaded state: the lane, how many there are, and ``Copies.times`` then
        self._live: weakref.ref[StreamIterator[Out]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None}

    def __iter__(self) -> StreamIterator[Out]:
        return StreamIterator(self)

    def set_epoch(self, epoch: int, *, anew: bool = False) -> None:
        """Make the next ``iter()`` start ``epoch`` from its beginning; unless ``anew``, a loaded
        state of this same epoch still continues where it was.
        """
        epoch = check_count("epoch", epoch, least=0, most=MOST)
        if self.will_resume and self.position.epoch == epoch and not anew:
            return
        self._stop_live("set_epoch() was called: continue with a new iter()")
        context = self.chain.root.context
        context.epoch = epoch
        context.copies.tell(epoch)
        self.at, self.will_resume = Position(epoch), False

    @property
    def position(self) -> Position:
        """The current position of the stream."""
        return Position(*self.at) if self.at is not None else Position(self.chain.root.context.epoch)

    def seek(self, position: Position) -> None:
        """Make the next ``iter()`` continue from ``position``."""
        self._stop_live("a state was loaded: continue with a new iter()")
        context = self.chain.root.context
        self.at, self.will_resume = position, True
        context.epoch = position.epoch
        context.copies.tell(None)
        self._loaded_for = context.lane, context.lanes, context.copies.times

    def start_epoch(self) -> Position:
        """Return the position from which the iteration that starts now continues."""
        context = self.chain.root.context
        lane, lanes, times = self._loaded_for
        if self.will_resume and (lane, lanes) != (context.lane, context.lanes):
            raise StateError(
                f"a state of lane {lane} of {lanes} was loaded, and this process gives lane {context.lane} of "
                f"{context.lanes}: DataLoader passes no state to its workers. Use wds_pipes.PipeLoader, or torchdata's "
                "StatefulDataLoader(pipe.as_dataset())."
            )
        if context.copies.times != times:  # workers of an earlier iteration had the state
            self.will_resume = False
        if (told := context.copies.hear()) is not None:
            context.epoch, self.will_resume = told, False
        position = self.position if self.will_resume else Position(context.epoch)
        # more if another pipe over the same source is in a later epoch
        context.epoch = max(context.epoch, position.epoch + 1)
        self.at, self.will_resume = position, False
        return position

    def give_up(self) -> None:
        """Make the next ``iter()`` start the next epoch, also after a state was loaded, unless the
        position is at the beginning of its epoch: a state may have been loaded there, or saved.
        """
        position = self.position
        begun = position.delivered or position.ended or isinstance(position.mark, Ended)
        if not self.will_resume:
            if not begun and position.mark is not None:  # opened for a state alone
                self.set_epoch(position.epoch)
            self.at = None
        elif begun:
            self.set_epoch(position.epoch + 1)

    def close(self) -> None:
        """End the current iterator and close its open files."""
        self._stop_live("it was closed")

    def counts(self, position: Position | None = None) -> dict[str, int]:
        """Return what became of the samples of the current epoch, or of the one that just ended."""
        position = self.position if position is None else position
        return public_counts(self.chain.counts(position.mark, position.delivered))

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
        recipe, context = self.recipe, self.chain.root.context
        return {
            "version": STATE_VERSION,
            "epoch": position.epoch,
            **recipe.entries,
            "graph": recipe.graph_entry,
            "lane_count": context.lanes,
            "lanes": {
                str(context.lane): {
                    "url": self.chain.where(position.mark, context.lane_in(recipe.seed, position.epoch)),
                    "delivered": position.delivered,
                    "position": self.chain.dump(position.mark),
                }
            },
            "counts": in_state(self.counts(position)),
            **not_for_dcp(),
            **recipe.entries_at(position.epoch),
        }

    @cached_property
    def recipe(self) -> Recipe:
        """What never changes; StateError if the position of the chain cannot be known."""
        self.chain.root.check_resumable()
        order = self.chain.root.epoch_order
        samples = order.samples_fingerprint if order.is_global else None  # which depends on their numbers
        return Recipe.of(self.chain)._replace(samples=samples)

    def load_state_dict(self, state: State, *, moved: bool = False, changed: bool = False) -> None:
        """Make the next ``iter()`` continue from ``state``.

        Args:
            state: what ``state_dict`` returned.
            moved: the shards are the same, whatever their names and the index say: see
                ``wds_pipes.core.moved``.
            changed: the sources of a mix, or their weights, may have changed.

        Raises:
            StateError: the state was made by another version, over other shards, with another seed
                or another chain of stages. The message says what differs.
        """
        move, context = Move(moved), self.chain.root.context
        saved = check_recipe(state, self.recipe, move, changed=changed)
        lane = saved.lanes.get(context.lane)
        if saved.lane_count != context.lanes or lane is None:
            held = f"lane {some(saved.lanes)} of {saved.lane_count}"
            raise StateError(
                f"the state holds {held}, and this process gives lane {context.lane} of "
                f"{context.lanes}: keep the number of workers."
            )
        if lane.position is None:
            raise damaged(f"lane {context.lane} has no position")
        mark = self.chain.load(lane.position)
        self.seek(Position(saved.epoch, lane.delivered, mark))
        if context.lane == 0:  # only one of several workers logs it
            move.log()

    def change(self, stage: Stage[Out], excluded: tuple[str, ...]) -> None:
        """Iterate an edited pipeline from now on; ``seek`` follows."""
        self.stage, self.chain, self.excluded = stage, Chain(stage), excluded
        self.__dict__.pop("recipe", None)

    def _stop_live(self, why: str) -> None:
        live = None if self._live is None else self._live()
        if live is not None:
            live.stop(StateError(f"this iterator has been replaced: {why}."))


class StreamIterator(Generic[Out]):
    """One iteration of a stream; ``next()`` commits the position of the item that it returns."""

    __slots__ = (
        "__weakref__",
        "_delivered",
        "_epoch",
        "_error",
        "_items",
        "_mark",
        "_running",
        "_stream",
        "_trace",
        "_whole",
    )

    def __init__(self, stream: Stream[Out]) -> None:
        self._stream = stream
        self._running: Stage[Out] | None = None
        self._items: Iterator[Out] = iter(())
        self._error: Exception | None = None
        # the error's traceback when it was first raised: each later raise would add to it
        self._trace: TracebackType | None = None
        self._epoch = self._delivered = 0
        self._whole = True  # whether it began at the beginning of the epoch

    def __iter__(self) -> StreamIterator[Out]:
        return self

    def __next__(self) -> Out:
        try:
            if self._running is None:
                self._start()
            item = next(self._items)
            if self._running is None:  # a signal handler or another thread has replaced this iterator meanwhile
                raise cast(Exception, self._error)
            mark = self._mark()
        except StopIteration:
            if self._running is not None and (lacking := self._end()) is not None:
                raise lacking from None
            raise
        except Exception as error:
            self.stop(error)
            raise
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
        position, root = stream.start_epoch(), stream.chain.root
        self._epoch, self._delivered = position.epoch, position.delivered
        self._whole = not any(stream.chain.dump(position.mark))
        self._running = stream.stage.open(root.context.lane_in(root.seed, position.epoch), position.mark)
        self._items, self._mark = self._running.items, self._running.mark
        stream._live = weakref.ref(self)

    def open(self) -> None:
        """Open what is read, without an item: then the position has a mark."""
        if self._running is None and self._error is None:
            self._start()
            self._stream.at = (self._epoch, self._delivered, self._mark(), False)

    def _end(self) -> SampleError | None:
        """Commit the end of the epoch. If all samples lack the fields that are kept, or there are
        none, stop with an error instead, and return the error.
        """
        running, context = cast(Stage[Out], self._running), self._stream.chain.root.context
        mark, lack = running.mark(), Chain(running).lack
        counts = self._stream.counts(Position(self._epoch, self._delivered, mark))
        explained, empty = lack.explains(counts), False
        if explained or not any(counts.values()):
            explained, empty = context.copies.end(self._epoch, context.lanes, explained, lack.found is False)
        alone = context.lanes == 1
        error = lack.error() if explained else error_of_nothing(counts, lack) if alone or empty else None
        if error is not None:
            self.stop(error)
            return error
        if context.lanes == 1:
            warn_of_unmet(self._stream.excluded, lack, self._epoch, whole=self._whole)
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
            close_running(self._running)

    def __del__(self) -> None:
        self.close()
