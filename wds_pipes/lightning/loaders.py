"""A PipeLoader as the Trainer sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from wds_pipes.checkpoint import gather
from wds_pipes.core.stage import State
from wds_pipes.loader.pipe_loader import PipeLoader

if TYPE_CHECKING:
    from wds_pipes.lightning.resumable import ResumableData


class _Fixed(NamedTuple):
    """A state in the place of a loader that has it."""

    state: State

    def state_dict(self) -> State:
        return self.state


class TrainLoader:
    """A PipeLoader as the Trainer sees it: rules 2 and 3."""

    def __init__(self, loader: PipeLoader, data: ResumableData) -> None:
        self.loader = loader
        self._data = data
        self._base: State | None = None  # where the newest pass began
        self._at: State | None = None  # behind the batch that was trained on last
        self._flying: deque[State] = deque()  # behind each batch that was given since then
        self._begun = False  # something of the newest pass came to the model
        self._over = False  # the Trainer is through with a pass and has begun no other
        self._ended = False  # a checkpoint was loaded at the end of the Trainer's epoch, and nothing came to the model since
        self._loaded = False
        self._done = 0  # batches of the Trainer's epoch that were trained on
        self._length: int | None = None  # of the Trainer's epoch, where it was resumed in its middle

    def __len__(self) -> int:
        return len(self.loader) if self._length is None else self._length

    @property
    def unusual(self) -> bool:
        """Whether this epoch has another length than those behind it."""
        return self._length is not None and self._length != len(self.loader)

    @property
    def at_start(self) -> bool:
        """Whether nothing was loaded, and nothing came to the model."""
        return not self._loaded and not self._begun and not self._over

    @property
    def ended(self) -> bool:
        """Whether a checkpoint was loaded at the end of the Trainer's epoch, and nothing came to the model since."""
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
                loader.load_state_dict(self._at)  # Lightning has not asked for the end of the pass, so the loader does not know that it is over
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
        """The epoch of the data behind the pass that the Trainer has ended; None: with_epoch() was at its cut, and the data go on from there."""
        assert self._at is not None
        assert self._base is not None
        if "given" not in self._at:
            return int(self._base["epoch"]) + 1
        return int(self._at["epoch"]) + 1 if self._at["given"] else None

    def taken(self) -> None:
        """The model gets a batch."""
        self._begun, self._ended = self._base is not None, False

    def trained(self, all_given: bool) -> None:
        """The model was trained on a batch, or on all that were given."""
        while self._flying:
            self._at = self._flying.popleft()
            self._done += 1
            if not all_given:
                break

    def state(self, last_batch: bool) -> dict[str, Any]:
        """The position of all ranks behind the batch that was trained on last, and the next epoch of the data if the Trainer's ends there."""
        over = self._over or (last_batch and self._begun and not self._flying)
        ranks = gather(cast(PipeLoader, _Fixed(self._at or self.loader.state_dict())))
        ended = over or self._ended
        return {"ranks": ranks, "done": 0 if ended else self._done, "ended": ended, "epoch": self._next_epoch() if over else None}

    def load(self, state: dict[str, Any]) -> None:
        """Let the next pass continue from a state."""
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

    # Lightning warns of a loader that cannot be resumed unless it has these two. The state is the DataModule's: rule 1.

    def state_dict(self) -> State:
        return {}

    def load_state_dict(self, state: State) -> None:
        pass


class EvalLoader:
    """A PipeLoader as the Trainer sees it in validation and tests: the same each time."""

    def __init__(self, loader: PipeLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.loader.set_epoch(0)
        yield from self.loader
