"""Lightning: training data that resumes exactly, from the middle of an epoch and on any number of devices.

    data = WdsDataModule(train="data/train-{000000..000999}.tar", fields=["jpg;png", "cls"], batch_size=64, num_workers=4)
    trainer.fit(model, data, ckpt_path="last")

Works with ``lightning`` and with ``pytorch_lightning``: with the one that is imported when this module is, else with the one that is installed. Where a program
imports both and its Trainer is that of ``pytorch_lightning``, write a ``class Data(ResumableData, pytorch_lightning.LightningDataModule)``.

Rules:
1. The DataModule has the state, for all ranks. Lightning would keep that of the loader of rank 0 alone, give it to every rank, and drop it where
   ``estimated_stepping_batches`` is used.
2. What counts are batches that were trained on. Lightning fetches one ahead where the length is not known, and then the loader is ahead of the model.
3. Lightning calls ``iter()`` more often than there are epochs, and may throw away what it fetched. A pass of which nothing came to the model is repeated.
4. An epoch that is resumed on another number of devices has another length than those behind it, so Lightning is made to ask for it again.
5. From a checkpoint at the end of an epoch Lightning may go on in that epoch, of which there is no batch left.
"""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch.utils.data import IterDataPipe

from wds_pipes.checkpoint import gather
from wds_pipes.core.stage import State
from wds_pipes.core.tracebacks import shortened
from wds_pipes.datapipes import ShardList, WdsPipe
from wds_pipes.loader.pipe_loader import PipeLoader, progress_of

_HOSTS = ("lightning.pytorch", "pytorch_lightning")


def _host() -> Any:
    """The package whose Trainer will be used."""
    for name in _HOSTS:
        if name in sys.modules:
            return sys.modules[name]
    for name in _HOSTS:
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


class _Fixed(NamedTuple):
    """A state in the place of a loader that has it."""

    state: State

    def state_dict(self) -> State:
        return self.state


class _TrainLoader:
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


class _EvalLoader:
    """A PipeLoader as the Trainer sees it in validation and tests: the same each time."""

    def __init__(self, loader: PipeLoader) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.loader.set_epoch(0)
        yield from self.loader


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
        self._loaders: dict[str, _TrainLoader] = {}
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
        new = self._loaders[name] = _TrainLoader(loader, self)
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


def _watch(trainer: Any, loaders: dict[str, _TrainLoader]) -> Any:
    """A callback that tells the loaders what is trained on."""
    package = next(name for kind in type(trainer).__mro__ for name in _HOSTS if kind.__module__.startswith(f"{name}."))

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


Source = Callable[[], Any] | IterDataPipe[Any] | list[str] | str | None


class WdsDataModule(ResumableData, pl.LightningDataModule):
    """Shards as a LightningDataModule that resumes exactly.

    ``train``, ``val`` and ``test`` are each URLs, as ``ShardList`` takes them; or a pipe; or a function without arguments that makes a pipe or a PipeLoader (in
    a YAML file: its import path). URLs are read by a usual pipeline: shards shuffled, ``shuffle_buffer``, ``decode_by_ext``, ``to_tuple``; where it is for
    validation or tests nothing is shuffled, and each pass gives the same. The other arguments are those of ``PipeLoader`` and of the steps.

    Args:
        train: what to train on.
        val: what to validate on.
        test: what to test on.
        batch_size: samples in a batch; None: the items of the pipes are the batches.
        num_workers: worker processes of each loader on each device.
        fields: of URLs: what the batches hold, such as ``["jpg;png", "cls"]``; None: batches are dicts of all fields.
        decode: of URLs: how to decode images, such as ``"rgb8"`` or ``"torchrgb"``; None: they stay bytes.
        shuffle_buffer: of URLs: the window of samples to shuffle in training; 0: only shards are shuffled.
        seed: of URLs: what the order derives from.
        samples_per_shard: of the URLs of ``train``: how many samples each shard has. Then the length is known, and all ranks get the same number of batches.
        index: of all URLs: there is an index beside the shards that says so.
        storage_options: of all URLs: for their store, as fsspec takes them: ``{"endpoint_url": "http://minio:9000"}``.
        cache: of all URLs: a directory on this machine where remote shards are kept.
        cache_bytes: how large the cache may become, such as ``"200GB"``; see ``cache_shards``.
        transform: of URLs, in training: a function of a decoded sample, a dict, or of the sample and a random generator of its own, as in ``map_samples``: to
            resize and augment. In a YAML file: its import path.
        eval_transform: the same in validation and tests.
        epoch_end: of training, as in ``PipeLoader``; None: ``"drop"`` where the number of samples is known, on any number of devices, so that a checkpoint fits
            all of them. Validation and tests give each sample once.
        drop_last: in training, leave out a last batch that is smaller.
        lanes: into how many lanes training is dealt, as in ``PipeLoader``.
        prefetch_factor: batches that each worker reads ahead.
        pin_memory: copy tensors into pinned memory.
        multiprocessing_context: how workers are started: ``"fork"``, ``"spawn"`` or ``"forkserver"``.
        persistent_workers: keep the workers from one epoch to the next.

    Raises:
        TypeError, ValueError: from the Trainer's start: what ``PipeLoader`` and the steps raise where an argument does not fit.
        StateError: the checkpoint does not fit the data.
    """

    def __init__(
        self,
        train: Source = None,
        val: Source = None,
        test: Source = None,
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        fields: list[str] | None = None,
        decode: str | None = "torchrgb",
        shuffle_buffer: int = 1000,
        seed: int = 0,
        samples_per_shard: int | list[int] | None = None,
        index: bool = False,
        storage_options: dict[str, Any] | None = None,
        cache: str | None = None,
        cache_bytes: int | str | None = None,
        transform: Callable[..., Any] | None = None,
        eval_transform: Callable[..., Any] | None = None,
        epoch_end: str | None = None,
        drop_last: bool = False,
        lanes: int | None = None,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        multiprocessing_context: str | None = None,
        persistent_workers: bool = True,
    ) -> None:
        super().__init__()
        self._sources = {"train": train, "val": val, "test": test}
        for name, source in self._sources.items():
            if isinstance(source, (str, list, tuple)) and batch_size is None:
                raise ValueError(f"{name} is given by URLs, so batch_size must say how many samples make a batch")
        # Lightning looks whether these are overridden.
        if val is None:
            self.val_dataloader = super().val_dataloader  # type: ignore[method-assign]
        if test is None:
            self.test_dataloader = super().test_dataloader  # type: ignore[method-assign]
        self._fields, self._decode, self._shuffle_buffer, self._seed = fields, decode, shuffle_buffer, seed
        self._samples_per_shard, self._index = samples_per_shard, index
        self._storage_options, self._cache, self._cache_bytes = storage_options, cache, cache_bytes
        self._transforms = {"train": transform, "val": eval_transform, "test": eval_transform}
        self._options: dict[str, Any] = {
            "batch_size": batch_size,
            "num_workers": num_workers,
            "prefetch_factor": prefetch_factor,
            "pin_memory": pin_memory,
            "multiprocessing_context": multiprocessing_context,
            "persistent_workers": persistent_workers,
        }
        self._train_options: dict[str, Any] = {"epoch_end": epoch_end, "drop_last": drop_last, "lanes": lanes}
        self._built: dict[str, PipeLoader] = {}

    def train_dataloader(self) -> Any:
        if self._sources["train"] is None:
            raise ValueError("WdsDataModule was given no train= to train on")
        return self.resumable(self._loader("train"))

    def val_dataloader(self) -> Any:
        return _EvalLoader(self._loader("val"))

    def test_dataloader(self) -> Any:
        return _EvalLoader(self._loader("test"))

    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        for loader in self._built.values():
            loader.close()

    @shortened
    def _loader(self, name: str) -> PipeLoader:
        """The loader of ``train``, ``val`` or ``test``, made once."""
        if name not in self._built:
            made, options = self._pipe(name), self._loader_options(name)
            if not isinstance(made, PipeLoader):
                pipe, made = made, PipeLoader(made, **options)
                if options["epoch_end"] is None and progress_of(made).plan.uncounted is None:
                    made = PipeLoader(pipe, **options | {"epoch_end": "drop"})
            self._built[name] = made
        return self._built[name]

    def _pipe(self, name: str) -> Any:
        source, train = self._sources[name], name == "train"
        if isinstance(source, IterDataPipe):
            return source
        if callable(source):
            return source()
        if not isinstance(source, (str, list, tuple)):
            raise TypeError(f"{name} must be URLs, a pipe or a function that makes one, not {source!r:.80}")
        counts = self._samples_per_shard if train else None
        store = self._storage_options
        shards: WdsPipe[str] = ShardList(source, shuffle=train, seed=self._seed, samples_per_shard=counts, index=self._index or None, storage_options=store)
        names = None if self._fields is None else [name for field in self._fields for name in field.split(";") if not name.startswith("__")]
        if self._cache is not None:
            shards = shards.cache_shards(self._cache, max_bytes=self._cache_bytes)
        pipe = shards.open_shards(storage_options=store).load_tar().group_by_key(fields=names or None)
        if train and self._shuffle_buffer:
            pipe = pipe.shuffle_buffer(self._shuffle_buffer)
        pipe = pipe.decode_by_ext(*[] if self._decode is None else [self._decode])
        if (transform := self._transforms[name]) is not None:
            pipe = pipe.map_samples(transform)
        return pipe if self._fields is None else pipe.to_tuple(*self._fields)

    def _loader_options(self, name: str) -> dict[str, Any]:
        of = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        ranks = {} if of is None else {"rank": of["rank"], "world_size": of["num_replicas"]}
        return self._options | ranks | (self._train_options if name == "train" else {"epoch_end": "exact"})


class StatsCallback(pl.Callback):
    """Logs ``loader.stats()`` of the training data to the Trainer's loggers: how fast it goes, and how long training waits for data.

    Args:
        every_n_steps: how often, in training steps; None: as often as the Trainer logs.
        prefix: before each name.
    """

    def __init__(self, every_n_steps: int | None = None, prefix: str = "data/") -> None:
        if every_n_steps is not None and every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, not {every_n_steps}")
        self._every = every_n_steps
        self._prefix = prefix

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.global_step % (self._every or trainer.log_every_n_steps)) == 0:
            loaders = getattr(trainer.datamodule, "_loaders", {})
            for name, loader in loaders.items():
                prefix = self._prefix if len(loaders) == 1 else f"{self._prefix}{name}/"
                stats = {f"{prefix}{key}": value for key, value in loader.loader.stats().items()}
                for logger in trainer.loggers:
                    logger.log_metrics(stats, step=trainer.global_step)
