"""ResumableData: loaders whose state is in the checkpoints of the Trainer."""

from __future__ import annotations

import importlib
import inspect
import warnings
from typing import Any

from wds_pipes.lightning.host import HOSTS
from wds_pipes.lightning.loaders import TrainLoader
from wds_pipes.loader.pipe_loader import PipeLoader


class ResumableData:
    """A mixin for your own LightningDataModule: it saves the exact state of its training loader,
    for all ranks.

        class Data(ResumableData, LightningDataModule):
            def train_dataloader(self):
                return self.resumable(wds_pipes.PipeLoader(...))

    Without it, if you pass a PipeLoader to the Trainer, Lightning saves only the state of rank 0's
    loader; if the length is not known, this state is one batch ahead of the model.

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
