"""ResumableData: loaders whose state is in the checkpoints of the Trainer; and which of the two
packages of Lightning is used.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections import deque
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from wds_pipes.checkpoint import gather
from wds_pipes.core.stage import State
from wds_pipes.loader.pipe_loader import PipeLoader, progress_of

__all__ = ["HOSTS", "pl"]

HOSTS = ("lightning.pytorch", "pytorch_lightning")


def _host() -> Any:
    """Return the package whose Trainer will be used."""
    for name in sorted(HOSTS, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name.partition(".")[0]:
                raise
    raise ModuleNotFoundError("wds_pipes.lightning needs Lightning: pip install 'wds_pipes[lightning]'")


if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    pl = _host()


class ResumableData:
    """A mixin for your own LightningDataModule: it saves the exact state of its training loader,
    for all ranks.

        class Data(ResumableData, LightningDataModule):
            def train_dataloader(self):
                return self.resumable(wds_pipes.PipeLoader(...))

    Without it, if you pass a PipeLoader to the Trainer, Lightning saves only the state of rank 0's
    loader, which is one batch ahead of the model if the length is not known, and does not load it
    from a checkpoint at the end of an epoch. Then a warning says so when the first checkpoint is
    saved.

    Several training loaders have names, and are combined by Lightning's ``CombinedLoader(...,
    "min_size")``: an epoch ends with the first of them.

    The states are in the checkpoint under the name of your class, so do not rename the class. If
    you override ``state_dict`` or ``load_state_dict``, call the method of ``super()``.

    Attributes:
        moved: the shards are those of the checkpoint, whatever their names and the index say. Set
            ``data.moved = True`` before ``fit(ckpt_path=...)``. See ``WdsPipe.load_state_dict``.
    """

    moved: bool = False
    trainer: Any

    def __str__(self) -> str:
        # Lightning's would take batches from a loader that is not torch's DataLoader
        return object.__repr__(self)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for kind in cls.__mro__[: cls.__mro__.index(ResumableData)]:
            if kind.__name__ == "LightningDataModule":
                raise TypeError(
                    f"{cls.__name__} must name ResumableData before {kind.__name__}, which else hides its state"
                )

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._loaders: dict[str, TrainLoader] = {}
        self._loaded: dict[str, dict[str, Any]] = {}  # states of loaders that are not made yet
        self._watch: Any = None

    def resumable(self, loader: PipeLoader, name: str = "train") -> Any:
        """Wrap a loader, to return it from ``train_dataloader``.

        The result yields the batches of ``loader``, from the position of the checkpoint that the
        Trainer loads. A new loader (``reload_dataloaders_every_n_epochs``) continues from the
        position of the earlier loader with the same name.

        Raises:
            TypeError: ``loader`` is not a PipeLoader.
            StateError: a checkpoint was loaded that does not fit the loader.
        """
        if not isinstance(loader, PipeLoader):
            raise TypeError(f"resumable() takes a PipeLoader, not {type(loader).__name__}")
        self._is_watched()
        before = self._loaders.get(name)
        if before is not None and before.loader is loader:
            return before
        new = self._loaders[name] = TrainLoader(loader, self)
        if name in self._loaded:
            new.load(self._loaded.pop(name))
        elif before is not None:
            new.load(before.state(over=True))
            before.loader.close()
        return new

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the training loaders after the last batch that the model was trained
        on.

        All ranks must call it together, as Lightning does.
        """
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        over = self._at_epoch_end()
        found = self._loaded | {name: loader.state(over) for name, loader in self._loaders.items()}
        return {**state, "wds_pipes": found} if found else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Make the training loaders continue from a state; the Trainer calls it.

        If the Trainer only evaluates a checkpoint, the loaders keep their positions.

        Raises:
            StateError: the state does not fit a loader.
        """
        super().load_state_dict(state_dict)  # type: ignore[misc]
        trainer = self.trainer
        if trainer is not None and trainer.state.fn in ("validate", "test", "predict"):
            return
        self._loaded = dict(state_dict.get("wds_pipes", {}))
        for name, loader in self._loaders.items():
            if name in self._loaded:
                loader.load(self._loaded.pop(name))
                if trainer is not None:
                    trainer.fit_loop._combined_loader = None  # drop what Lightning has already fetched

    def teardown(self, stage: str) -> None:
        """Stop the workers."""
        super().teardown(stage)  # type: ignore[misc]
        for loader in self._loaders.values():
            loader.loader.close()

    def _is_watched(self) -> bool:
        """Install the callback that reports the batches that the model is trained on; False: no
        Trainer is training.
        """
        trainer = self.trainer
        if trainer is None or not trainer.training:
            return False
        if self._watch is None or self._watch.trainer is not trainer:
            self._watch = _watch(trainer, self._loaders)
        if self._watch not in trainer.callbacks:
            # Before the callbacks that save. But Lightning's search for a learning rate expects its
            # own callback in the first place.
            searches = bool(trainer.callbacks) and type(trainer.callbacks[0]).__module__.endswith(".lr_finder")
            place = 1 if searches and type(trainer.callbacks[0]).__name__.startswith("_") else 0
            trainer.callbacks = [*trainer.callbacks[:place], self._watch, *trainer.callbacks[place:]]
        return True

    def _at_epoch_end(self) -> bool:
        """Whether the Trainer's epoch ends after the last batch that the model was trained on.

        With ``limit_train_batches`` and an unknown length, Lightning does not see that before it
        requests another batch.
        """
        if self.trainer is None or (self._watch is not None and self._watch.inside):
            return False
        return self.trainer.is_last_batch or any(loader.has_ended for loader in self._loaders.values())

    def _in_old_epoch(self) -> bool:
        """Whether the Trainer continues in the epoch of the checkpoint, and knows the length of its
        epochs.

        A Trainer that knows the length fetches nothing before it needs it.
        """
        trainer = self.trainer
        return (
            trainer is not None
            and trainer.training
            and trainer.num_training_batches != float("inf")
            and trainer.fit_loop.batch_idx >= 0
        )


def _watch(trainer: Any, loaders: dict[str, TrainLoader]) -> Any:
    """Return a callback that tells the loaders which batches the model is trained on."""
    package = next(name for kind in type(trainer).__mro__ for name in HOSTS if kind.__module__.startswith(f"{name}."))

    class Watch(importlib.import_module(package).Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.trainer = trainer
            self.inside = False  # a batch was given to the model, which was not trained on it yet
            self._reload: int | None = None

        def on_train_start(self, trainer: Any, model: Any) -> None:
            if len(loaders) > 1 and trainer.fit_loop._combined_loader._mode != "min_size":
                raise ValueError('several training loaders end together: return a CombinedLoader(loaders, "min_size")')
            if trainer.global_step and trainer.ckpt_path and any(loader.at_start for loader in loaders.values()):
                warnings.warn(
                    f"{trainer.ckpt_path} has no state of this DataModule (it is kept under "
                    "the name of the class), so its data start from the beginning.",
                    stacklevel=2,
                )
            if trainer.is_last_batch and any(loader.ended for loader in loaders.values()):
                # Lightning recognises the end of an epoch by the number of batches, which may have
                # been another one in this epoch: set it to what Lightning expects. If the length is
                # not known, it goes on from a checkpoint of on_train_batch_end with the next epoch,
                # but would count its batches from the number of the last epoch on.
                current = trainer.fit_loop.epoch_loop.batch_progress.current
                expected = trainer.num_training_batches
                if expected == float("inf"):
                    expected = 0 if current.completed < current.processed else current.ready
                more = expected - current.ready
                for name in ("ready", "started", "processed", "completed"):
                    setattr(current, name, getattr(current, name) + more)

        def on_train_batch_start(self, trainer: Any, model: Any, *args: Any) -> None:
            epochs = trainer.fit_loop.epoch_progress
            if epochs.current.ready == epochs.current.processed:
                # From a checkpoint after the last batch of an epoch, Lightning continues without
                # counting the next epoch. It would then take a checkpoint within that epoch for one
                # of its end.
                epochs.increment_ready()
                epochs.increment_started()
            self.inside = True
            for loader in loaders.values():
                loader.taken()

        def on_train_batch_end(self, trainer: Any, model: Any, *args: Any) -> None:
            takes_iterator = "dataloader_iter" in inspect.signature(model.training_step).parameters
            for loader in loaders.values():
                loader.trained(takes_iterator)
            self.inside = False

        def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
            self.inside = False  # on_train_batch_start of the model may end an epoch
            if self._reload is None and any(loader.unusual for loader in loaders.values()):  # rule 4
                self._reload, trainer.reload_dataloaders_every_n_epochs = trainer.reload_dataloaders_every_n_epochs, 1

        def on_train_epoch_start(self, trainer: Any, model: Any) -> None:
            if self._reload is not None:
                trainer.reload_dataloaders_every_n_epochs, self._reload = self._reload, None

        def on_train_end(self, trainer: Any, model: Any) -> None:
            self.on_train_epoch_start(trainer, model)

    return Watch()


class _Begin(NamedTuple):
    """Where an iteration began, and how many batches of the Trainer's epoch came before it, in runs
    that saved checkpoints.
    """

    state: State
    done: int = 0


class _Given(NamedTuple):
    """A batch that was yielded: the state after it, and where its iteration began."""

    state: State
    base: _Begin


class TrainLoader:
    """A PipeLoader as the Trainer sees it: rules 2 and 3."""

    def __init__(self, loader: PipeLoader, data: ResumableData) -> None:
        self.loader = loader
        self._data = data
        self._base: _Begin | None = None  # where the newest iteration began
        self._got: _Begin | None = None  # where that iteration began of which the model got a batch last
        self._at: State | None = None  # after the last batch that the model was trained on
        self._flying: deque[_Given] = deque()  # the batches that were yielded since then
        self._begun = False  # the model got a batch in the Trainer's epoch, since a checkpoint was loaded
        # A checkpoint from the end of an epoch was loaded, and the model got no batch since.
        self.ended = False
        self._loaded = False
        self._done = 0  # batches of the Trainer's epoch that the model was trained on
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
        first, done = self._flying[0].base if self._flying else self._base, 0
        if first is not None and first is self._got:
            assert self._at is not None
            self._go_on(first.state, self._at)
        elif first is not None:  # the model got no batch of it: rule 3
            loader.load_state_dict(first.state)
            done = first.done
        if self._begun:
            self._got, self._begun = None, False
        self._at, self._done = loader.state_dict(), done
        self._base = _Begin(self._at, done)
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
            self._got, self._done = given.base, given.base.done

    def state(self, over: bool) -> dict[str, Any]:
        """Return the position of all ranks after the last batch that the model was trained on.

        Args:
            over: the Trainer's epoch ends there. Then the state has the next epoch of the data.
        """
        at, epoch, over = self._at or self.loader.state_dict(), None, over and self._begun
        if over and self._got is not None:
            epoch = self._next_epoch(self._got.state, at)
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
        return not progress_of(self.loader).plan.endless and bool(at["epoch"] > base.state["epoch"])

    def load(self, state: dict[str, Any]) -> None:
        """Make the next iteration continue from a state."""
        self.loader.load_state_dict(state["ranks"], moved=self._data.moved)
        if state["epoch"] is not None:
            self.loader.set_epoch(state["epoch"])
        self._done = state["done"]
        self._at = self.loader.state_dict()
        self._base = _Begin(self._at, self._done)
        self._got, self._begun = None, False
        self._loaded, self.ended = True, state["ended"]
        self._flying.clear()
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
        progress_of(self.loader).begin_again()
        yield from self.loader
