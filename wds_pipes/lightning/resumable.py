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
    """A mixin for your own LightningDataModule: it keeps the state of its training loader, exact and for all ranks.

        class Data(ResumableData, LightningDataModule):
            def train_dataloader(self):
                return self.resumable(wds_pipes.PipeLoader(...))

    Where the Trainer is given a PipeLoader itself, Lightning saves that of rank 0 alone, and where the length is not known a batch behind the model.

    With several training loaders give each a name. Their states are in the checkpoint under the name of your class, which so must stay. If you override
    ``state_dict`` or ``load_state_dict``, call ``super()``'s.

    Attributes:
        moved: the shards are those of the checkpoint, whatever their names and the index say: ``data.moved = True`` before ``fit(ckpt_path=...)``. See
            ``WdsPipe.load_state_dict``.
    """

    moved: bool = False
    trainer: Any

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for kind in cls.__mro__[: cls.__mro__.index(ResumableData)]:
            if kind.__name__ == "LightningDataModule":
                raise TypeError(f"{cls.__name__} must name ResumableData before {kind.__name__}, which else hides its state")

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._loaders: dict[str, TrainLoader] = {}
        self._loaded: dict[str, dict[str, Any]] = {}  # states of loaders that are not there yet
        self._watch: Any = None

    def resumable(self, loader: PipeLoader, name: str = "train") -> Any:
        """What to return from ``train_dataloader``: it gives the batches of ``loader``, from where the checkpoint was that the Trainer loads.

        A loader that is built anew (``reload_dataloaders_every_n_epochs``) goes on where the one before it under this name is.

        Raises:
            TypeError: it is not a PipeLoader.
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
            new.load(before.state(last_batch=True))
            before.loader.close()
        return new

    def state_dict(self) -> dict[str, Any]:
        """The states of the training loaders behind the batch that was trained on last. All ranks call it together, as Lightning does."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        last_batch = self.trainer is not None and self.trainer.is_last_batch
        found = self._loaded | {name: loader.state(last_batch) for name, loader in self._loaders.items()}
        return {**state, "wds_pipes": found} if found else state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the training loaders continue from a state; the Trainer calls it. Where it only evaluates a checkpoint, they stay where they are.

        Raises:
            StateError: they do not fit.
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
                    trainer.fit_loop._combined_loader = None  # what Lightning has fetched already is not of this state

    def teardown(self, stage: str) -> None:
        """Stop the workers."""
        super().teardown(stage)  # type: ignore[misc]
        for loader in self._loaders.values():
            loader.loader.close()

    def _is_watched(self) -> bool:
        """See to it that the Trainer tells which batches were trained on; False: there is none that trains."""
        trainer = self.trainer
        if trainer is None or not trainer.training:
            return False
        if self._watch is None or self._watch.trainer is not trainer:
            self._watch = _watch(trainer, self._loaders)
        if self._watch not in trainer.callbacks:
            # Before those that save; but Lightning's search for a learning rate takes the first one for its own.
            searches = bool(trainer.callbacks) and type(trainer.callbacks[0]).__module__.endswith(".lr_finder")
            place = 1 if searches and type(trainer.callbacks[0]).__name__.startswith("_") else 0
            trainer.callbacks = [*trainer.callbacks[:place], self._watch, *trainer.callbacks[place:]]
        return True

    def _in_old_epoch(self) -> bool:
        """Whether a Trainer that knows the length of its epochs is in the one of the checkpoint: then it fetches nothing before it needs it."""
        trainer = self.trainer
        return trainer is not None and trainer.training and trainer.num_training_batches != float("inf") and trainer.fit_loop.batch_idx >= 0


def _watch(trainer: Any, loaders: dict[str, TrainLoader]) -> Any:
    """A callback that tells the loaders what is trained on."""
    package = next(name for kind in type(trainer).__mro__ for name in HOSTS if kind.__module__.startswith(f"{name}."))

    class Watch(importlib.import_module(package).Callback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.trainer = trainer
            self._reload: int | None = None

        def on_train_start(self, trainer: Any, model: Any) -> None:
            if trainer.global_step and trainer.ckpt_path and any(loader.at_start for loader in loaders.values()):
                warnings.warn(
                    f"{trainer.ckpt_path} has no state of this DataModule (it is kept under the name of the class), so its data start from the beginning.",
                    stacklevel=2,
                )
            if trainer.is_last_batch and trainer.num_training_batches != float("inf") and any(loader.ended for loader in loaders.values()):
                # Lightning sees by their number that all batches of the epoch have come: here there may have been another number of them.
                current = trainer.fit_loop.epoch_loop.batch_progress.current
                more = trainer.num_training_batches - current.ready
                for name in ("ready", "started", "processed", "completed"):
                    setattr(current, name, getattr(current, name) + more)

        def on_train_batch_start(self, trainer: Any, model: Any, *args: Any) -> None:
            epochs = trainer.fit_loop.epoch_progress
            if epochs.current.ready == epochs.current.processed:
                # From a checkpoint behind the last batch of an epoch Lightning goes on without counting the next one, and would take a checkpoint of that one
                # for one of its end.
                epochs.increment_ready()
                epochs.increment_started()
            for loader in loaders.values():
                loader.taken()

        def on_train_batch_end(self, trainer: Any, model: Any, *args: Any) -> None:
            takes_iterator = "dataloader_iter" in inspect.signature(model.training_step).parameters
            for loader in loaders.values():
                loader.trained(takes_iterator)

        def on_train_epoch_end(self, trainer: Any, model: Any) -> None:
            if self._reload is None and any(loader.unusual for loader in loaders.values()):  # rule 4
                self._reload, trainer.reload_dataloaders_every_n_epochs = trainer.reload_dataloaders_every_n_epochs, 1

        def on_train_epoch_start(self, trainer: Any, model: Any) -> None:
            if self._reload is not None:
                trainer.reload_dataloaders_every_n_epochs, self._reload = self._reload, None

        def on_train_end(self, trainer: Any, model: Any) -> None:
            self.on_train_epoch_start(trainer, model)

    return Watch()
