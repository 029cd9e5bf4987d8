"""A PipeLoader as the Trainer sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from wds_pipes.checkpoint import gather
from wds_pipes.core.stage import State
from wds_pipes.loader.pipe_loader import PipeLoader, progress_of

if TYPE_CHECKING:
    from wds_pipes.lightning.resumable import ResumableData


class _Given(NamedTuple):
    """A batch that was yielded: the state after it, and where its iteration began."""

    state: State
    base: State


class TrainLoader:
    """A PipeLoader as the Trainer sees it: rules 2 and 3."""

    def __init__(self, loader: PipeLoader, data: ResumableData) -> None:
        self.loader = loader
        self._data = data
        self._base: State | None = None  # where the newest iteration began
        self._got: State | None = None  # where that iteration began of which the model got a batch last
        self._at: State | None = None  # after the last batch that the model was trained on
        self._flying: deque[_Given] = deque()  # the batches that were yielded since then
        self._begun = False  # the model got a batch in the Trainer's epoch, since a checkpoint was loaded
        # A checkpoint from the end of an epoch was loaded, and the model got no batch since.
        self.ended = False
        self._loaded = False
        self._done = 0  # batches of the iteration of _got that the model was trained on
        self._length: int | None = None  # of the Trainer's epoch, if that was resumed in its middle

    def __len__(self) -> int:
        return len(self.loader) if self._length is None else self._length

    @property
    def unusual(self) -> bool:
        """Whether this epoch has another length than the epochs after it."""
        return self._length is not None and self._length != len(self.loader)

    @property
    def at_start(self) -> bool:
        """Whether no checkpoint was loaded, and the model got no batch."""
        return not self._loaded and not self._begun

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self._length = None  # after this iter(), Lightning requests the length of its next epoch
        return self._run()

    def _run(self) -> Iterator[Any]:
        loader, data = self.loader, self._data
        if self.ended and data._in_old_epoch():  # rule 5
            return
        first = self._flying[0].base if self._flying else self._base
        if first is not None and first is self._got:
            assert self._at is not None
            self._go_on(first, self._at)
        elif first is not None:  # the model got no batch of it: rule 3
            loader.load_state_dict(first)
        if self._begun:
            self._got, self._begun, self._done = None, False, 0
        self._base = self._at = loader.state_dict()
        self._flying.clear()
        for batch in loader:
            self._flying.append(_Given(loader.state_dict(), self._base))
            if not data._is_watched():
                self.taken()
                self.trained(all_given=True)
            yield batch

    def _go_on(self, base: State, at: State) -> None:
        """Let the loader continue after an iteration that began at ``base`` and ended at ``at``."""
        if (epoch := self._next_epoch(base, at)) is not None:
            self.loader.set_epoch(epoch)
        else:  # Lightning may have stopped before StopIteration: the loader does not know of the end
            self.loader.load_state_dict(at | {"given": 0})

    def _next_epoch(self, base: State, at: State) -> int | None:
        """Return the epoch of the data that follows an iteration.

        None: with_epoch() was at its cut, or epochs follow each other by themselves; the data
        continue from there.
        """
        if progress_of(self.loader).plan.endless:
            return None
        if "given" not in at:
            return int(base["epoch"]) + 1
        return int(at["epoch"]) + 1 if at["given"] else None

    def taken(self) -> None:
        """Note that the model gets a batch."""
        self._begun, self.ended = True, False
        if self._flying:
            self._get(self._flying[0])

    def trained(self, all_given: bool) -> None:
        """Note that the model was trained on a batch, or on all that were yielded."""
        while self._flying:
            given = self._flying.popleft()
            self._get(given)
            self._at = given.state
            self._done += 1
            if not all_given:
                break

    def _get(self, given: _Given) -> None:
        if given.base is not self._got:
            self._got, self._done = given.base, 0

    def state(self, over: bool) -> dict[str, Any]:
        """Return the position of all ranks after the last batch that the model was trained on.

        Args:
            over: the Trainer's epoch ends there. Then the state has the next epoch of the data.
        """
        at, epoch, over = self._at or self.loader.state_dict(), None, over and self._begun
        if over and self._got is not None:
            epoch = self._next_epoch(self._got, at)
            if epoch is None and "given" in at:
                at = at | {"given": 0}  # the Trainer's epoch may end before the cut (limit_train_batches)
        ended = over or self.ended
        return {
            "ranks": gather(cast(PipeLoader, SimpleNamespace(state_dict=lambda: at))),
            "done": 0 if ended or self.has_ended else self._done,
            "ended": ended,
            "epoch": epoch,
        }

    @property
    def has_ended(self) -> bool:
        """Whether the iteration of ``_got`` has ended where the model is: the next epoch of the
        data begins there, or with_epoch() cut there.

        Lightning may not know that before it requests another batch.
        """
        at, base = self._at, self._got
        if at is None or base is None or not self._done:
            return False
        if "given" in at:
            return not at["given"]
        return not progress_of(self.loader).plan.endless and bool(at["epoch"] > base["epoch"])

    def load(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue from a state."""
        self.loader.load_state_dict(state["ranks"], moved=self._data.moved)
        if state["epoch"] is not None:
            self.loader.set_epoch(state["epoch"])
        self._base = self._at = self.loader.state_dict()
        self._got, self._begun = None, False
        self._loaded, self.ended = True, state["ended"]
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
        progress = progress_of(self.loader)
        progress.go_to(progress.plan.beginning(0))  # set_epoch() would leave the place where with_epoch() has cut
        yield from self.loader
