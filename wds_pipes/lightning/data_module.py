"""WdsDataModule: a LightningDataModule over shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

from wds_pipes.codecs.resizing import Fit, Size
from wds_pipes.core.hosts import is_pipe
from wds_pipes.datapipes import ShardList, WdsPipe
from wds_pipes.datapipes.base import IterDataPipe
from wds_pipes.lightning.host import pl
from wds_pipes.lightning.resumable import EvalLoader, ResumableData
from wds_pipes.loader.pipe_loader import PipeLoader, progress_of
from wds_pipes.stages.shard_ref import ShardRef
from wds_pipes.tar.keys import is_metadata

Source = Callable[[], Any] | IterDataPipe[Any] | list[str] | str | None


_LOADER = (
    "batch_size",
    "num_workers",
    "prefetch_factor",
    "pin_memory",
    "multiprocessing_context",
    "persistent_workers",
)
_TRAINING = ("epoch_end", "drop_last", "lanes", "mix_lanes")


class WdsDataModule(ResumableData, pl.LightningDataModule):
    """Shards as a LightningDataModule that resumes exactly.

    ``train``, ``val`` and ``test`` are each one of these: URLs, as ``ShardList`` takes them; a
    pipe; a function without arguments that returns a pipe or a PipeLoader (in a YAML file: its
    import path). For URLs there is a standard pipeline: shuffled shards, ``shuffle_buffer``,
    ``decode_by_ext``, ``to_tuple``. In validation and tests nothing is shuffled, and each iteration
    yields the same samples. The other arguments are those of ``PipeLoader`` and of the steps. Those
    marked "URLs" apply only to sources that are URLs.

    Args:
        train: what to train on.
        val: what to validate on.
        test: what to test on.
        batch_size: samples in a batch; None: the items of the pipes are the batches.
        num_workers: worker processes of each loader on each device.
        fields: URLs: what the batches hold, such as ``["jpg;png", "cls"]``; None: batches are dicts
            of all fields.
        decode: URLs: how to decode images, such as ``"rgb8"`` or ``"torchrgb"``; None: images stay
            bytes.
        size, fit, allow_pickle, max_image_pixels: URLs: as in ``decode_by_ext``; ``size=224`` makes
            all images as large, in training, validation and tests.
        shuffle_buffer: URLs: the window of samples to shuffle in training; 0: only shards are
            shuffled.
        seed: URLs: the seed of the order of the samples.
        samples_per_shard: URLs, in training: how many samples each shard has. Then the length is
            known, and all ranks get the same number of batches.
        index: URLs: there is an index beside the shards that says how many samples each has.
        storage_options: URLs: options for their store, as fsspec takes them:
            ``{"endpoint_url": "http://minio:9000"}``.
        cache: URLs: a directory on this machine where remote shards are kept.
        cache_bytes: how large the cache may become, such as ``"200GB"``; see ``cache_shards``.
        transform: URLs, in training: a function of a decoded sample (a dict), or of the sample and
            a random generator for this sample, as in ``map_samples``: to resize and augment. In a
            YAML file: its import path.
        eval_transform: the same for validation and tests.
        epoch_end: in training, as in ``PipeLoader``; None: ``"drop"`` if the number of samples is
            known, on any number of devices, so that a checkpoint fits all of them; else, with
            ``epoch_samples``, ``"loop"``. Validation and tests yield each sample once.
        epoch_samples: in training, the number of samples of an epoch of the Trainer, of all devices
            together, as ``PipeLoader.with_epoch`` takes it; None: all samples. ``epoch_end="loop"``
            needs it. The next epoch continues where this one ends.
        drop_last: in training, leave out a last batch that is smaller.
        lanes: in training, the number of lanes, as in ``PipeLoader``.
        mix_lanes: in training, from how many lanes each batch takes its samples, as in
            ``PipeLoader``.
        prefetch_factor: how many batches each worker reads ahead.
        pin_memory: copy tensors into pinned memory.
        multiprocessing_context: how workers are started: ``"fork"``, ``"spawn"`` or
            ``"forkserver"``.
        persistent_workers: keep the workers from one epoch to the next.

    Raises:
        ValueError: an option marked "URLs" is passed, and the source is none.
        TypeError, ValueError: when the Trainer starts: an argument of ``PipeLoader`` or of a step
            does not fit.
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
        size: Size | None = None,
        fit: Fit = "cover",
        allow_pickle: bool = False,
        max_image_pixels: int = 1 << 26,
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
        epoch_samples: int | None = None,
        drop_last: bool = False,
        lanes: int | None = None,
        mix_lanes: int = 1,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        multiprocessing_context: str | None = None,
        persistent_workers: bool = True,
    ) -> None:
        wanted = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        self._wanted, self._built = SimpleNamespace(**wanted), dict[str, PipeLoader]()
        self._sources = {"train": train, "val": val, "test": test}
        for name, source in self._sources.items():
            if isinstance(source, (str, list, tuple)) and batch_size is None:
                raise ValueError(f"{name} is given by URLs, so batch_size must say how many samples make a batch")
        everywhere = ("fields", "index", "storage_options", "cache", "size", "allow_pickle")
        self._refuse_unused(everywhere, "train", "val", "test")
        self._refuse_unused(("samples_per_shard", "transform"), "train")
        self._refuse_unused(("eval_transform",), "val", "test")
        if cache_bytes is not None and cache is None:
            raise ValueError("cache_bytes is the limit of the cache: pass cache=, its directory, too")

    def _refuse_unused(self, options: tuple[str, ...], *names: str) -> None:
        """Raise ValueError if one of ``options`` is passed, and none of these sources is URLs."""
        given = [name for name in names if self._sources[name] is not None]
        passed = [option for option in options if getattr(self._wanted, option)]
        if passed and given and not any(isinstance(self._sources[name], (str, list, tuple)) for name in given):
            raise ValueError(
                f"{passed[0]}= applies to URLs, and {' and '.join(given)} {'is' if len(given) == 1 else 'are'} given "
                "by a pipe or a function: do it there"
            )

    def train_dataloader(self) -> Any:
        if self._sources["train"] is None:
            raise ValueError("WdsDataModule was given no train= to train on")
        return self.resumable(self._loader("train"))

    # Lightning checks whether these are overridden: they are not, if their data are missing.

    @property
    def val_dataloader(self) -> Any:
        return super().val_dataloader if self._sources["val"] is None else partial(self._eval_loader, "val")

    @property
    def test_dataloader(self) -> Any:
        return super().test_dataloader if self._sources["test"] is None else partial(self._eval_loader, "test")

    def _eval_loader(self, name: str) -> EvalLoader:
        return EvalLoader(self._loader(name))

    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        for loader in self._built.values():
            loader.close()

    def _loader(self, name: str) -> PipeLoader:
        """Return the loader of ``train``, ``val`` or ``test``, which is made once."""
        if name not in self._built:
            made, options = self._pipe(name), self._loader_options(name)
            samples = self._wanted.epoch_samples if name == "train" else None
            if not isinstance(made, PipeLoader):
                pipe, made = made, PipeLoader(made, **options)
                counted = progress_of(made).plan.uncounted is None
                if options["epoch_end"] is None and (counted or samples is not None):
                    made = PipeLoader(pipe, **options | {"epoch_end": "drop" if counted else "loop"})
            if samples is not None:
                made.with_epoch(samples=samples)
            elif progress_of(made).plan.endless and progress_of(made).cut is None:
                raise ValueError(
                    "with epoch_end='loop' the data have no end: pass epoch_samples=, how many samples of all devices "
                    "together make an epoch of the Trainer"
                )
            self._built[name] = made
        return self._built[name]

    def _pipe(self, name: str) -> Any:
        source, train, wanted = self._sources[name], name == "train", self._wanted
        if is_pipe(source):
            return source
        if callable(source):
            return source()
        if not isinstance(source, (str, list, tuple)):
            raise TypeError(f"{name} must be URLs, a pipe or a function that makes one, not {source!r:.80}")
        shards: WdsPipe[ShardRef] = ShardList(
            source,
            shuffle=train,
            seed=wanted.seed,
            samples_per_shard=wanted.samples_per_shard if train else None,
            index=wanted.index or None,
            storage_options=wanted.storage_options,
        )
        fields = [name for field in wanted.fields or () for name in field.split(";") if not is_metadata(name)]
        if wanted.cache is not None:
            shards = shards.cache_shards(wanted.cache, max_bytes=wanted.cache_bytes)
        pipe = shards.open_shards(storage_options=wanted.storage_options).load_tar().group_by_key(fields=fields or None)
        if train and wanted.shuffle_buffer:
            pipe = pipe.shuffle_buffer(wanted.shuffle_buffer)
        options = {name: getattr(wanted, name) for name in ("size", "fit", "allow_pickle", "max_image_pixels")}
        pipe = pipe.decode_by_ext(*[] if wanted.decode is None else [wanted.decode], **options)
        if (transform := wanted.transform if train else wanted.eval_transform) is not None:
            pipe = pipe.map_samples(transform)
        return pipe if wanted.fields is None else pipe.to_tuple(*wanted.fields)

    def _loader_options(self, name: str) -> dict[str, Any]:
        of = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        ranks = {} if of is None else {"rank": of["rank"], "world_size": of["num_replicas"]}
        names = _LOADER + (_TRAINING if name == "train" else ())
        return {"epoch_end": "exact"} | {name: getattr(self._wanted, name) for name in names} | ranks
