"""A PipeLoader as the Trainer sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from wds_pipes.checkpoint import gather
from wds_pipes.core.stage import State
from wds_pipes.loader.pipe_loader import PipeLoader, progress_of

if TYPE_CHECKING:
    from wds_pipes.lightning.resumable import ResumableData


class _Fixed(NamedTuple):
    """A state that stands in for a loader with this state."""

    state: State

    def state_dict(self) -> State:
        return self.state


class TrainLoader:
    """A PipeLoader as the Trainer sees it: rules 2 and 3."""

    def __init__(self, loader: PipeLoader, data: ResumableData) -> None:
        self.loader = loader
        self._data = data
        self._base: State | None = None  # where the newest iteration began
        self._at: State | None = None  # after the last batch that the model was trained on
        self._flying: deque[State] = deque()  # after each batch that was yielded since then
        self._begun = False  # the model got a batch of the newest iteration
        self._over = False  # the Trainer has finished an iteration and has not begun another
        self._ended = False  # see the property
        self._loaded = False
        self._done = 0  # batches of the Trainer's epoch that the model was trained on
        self._length: int | None = None  # of the Trainer's epoch, if that was resumed in its middle

    def __len__(self) -> int:
        return len(self.loader) if self._length is None else self._length

    @property
    def is_sized(self) -> bool:
        """Whether the number of batches is known."""
        try:
            return len(self) >= 0
        except TypeError:
            return False

    @property
    def unusual(self) -> bool:
        """Whether this epoch has another length than the epochs after it."""
        return self._length is not None and self._length != len(self.loader)

    @property
    def at_start(self) -> bool:
        """Whether no checkpoint was loaded, and the model got no batch."""
        return not self._loaded and not self._begun and not self._over

    @property
    def ended(self) -> bool:
        """Whether a checkpoint from the end of an epoch of the Trainer was loaded, and the model
        got no batch since.
        """
        return self._ended

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self._begun, self._over, self._done, self._length = False, True, 0, None
        return self._run()

    def _run(self) -> Iterator[Any]:
        loader = self.loader
        if self._ended and self._data._in_old_epoch():  # rule 5
            return
        if self._over:
            self._over = False
            if (epoch := self._next_epoch()) is not None:
                loader.set_epoch(epoch)
            elif self._at is not None:
                # Lightning stopped before StopIteration: the loader does not know of the end
                loader.load_state_dict(self._at | {"given": 0})
        elif self._base is not None:
            loader.load_state_dict(self._base)
        self._base = self._at = loader.state_dict()
        self._flying.clear()
        for batch in loader:
            self._flying.append(loader.state_dict())
            if not self._data._is_watched():
                self.taken()
                self.trained(all_given=True)
            yield batch

    def _next_epoch(self) -> int | None:
        """Return the epoch of the data that follows the iteration that the Trainer has ended.

        None: with_epoch() was at its cut, or epochs follow each other by themselves; the data
        continue from there.
        """
        assert self._at is not None
        assert self._base is not None
        if progress_of(self.loader).plan.endless:
            return None
        if "given" not in self._at:
            return int(self._base["epoch"]) + 1
        return int(self._at["epoch"]) + 1 if self._at["given"] else None

    def taken(self) -> None:
        """Note that the model gets a batch."""
        self._begun, self._ended = self._base is not None, False

    def trained(self, all_given: bool) -> None:
        """Note that the model was trained on a batch, or on all that were yielded."""
        while self._flying:
            self._at = self._flying.popleft()
            self._done += 1
            if not all_given:
                break

    def state(self, last_batch: bool) -> dict[str, Any]:
        """Return the position of all ranks after the last batch that the model was trained on.

        If the Trainer's epoch ends there, the state also has the next epoch of the data.
        """
        at = self._at or self.loader.state_dict()
        over = self._over or (self._begun and not self._flying and (last_batch or self._has_ended(at)))
        if over and "given" in at and self._next_epoch() is None:
            at = at | {"given": 0}  # the Trainer's epoch may end before the cut (limit_train_batches)
        ranks = gather(cast(PipeLoader, _Fixed(at)))
        ended = over or self._ended
        return {
            "ranks": ranks,
            "done": 0 if ended else self._done,
            "ended": ended,
            "epoch": self._next_epoch() if over else None,
        }

    def _has_ended(self, at: State) -> bool:
        """Whether the iteration has ended at a position: the next epoch of the data begins there.

        With ``limit_train_batches`` and an unknown length, Lightning does not see that before it
        requests another batch.
        """
        if self._base is None or "given" in at or progress_of(self.loader).plan.endless:
            return False
        return bool(at["epoch"] > self._base["epoch"])

    def load(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue from a state."""
        self.loader.load_state_dict(state["ranks"], moved=self._data.moved)
        if state["epoch"] is not None:
            self.loader.set_epoch(state["epoch"])
        self._base = self._at = self.loader.state_dict()
        self._begun = self._over = False
        self._loaded, self._ended = True, state["ended"]
        self._flying.clear()
        self._done = state["done"]
        left = self.loader.remaining() if self._done else None
        self._length = None if left is None else self._done + left

    # Without these two methods, Lightning warns that the loader cannot be resumed. The DataModule
    # holds the state: rule 1.

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        pass


class EvalLoader:
    """A PipeLoader as the Trainer sees it in validation and tests: all iterations are the same."""

    def __init__(self, loader: PipeLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.loader.set_epoch(0)
        yield from self.loader
