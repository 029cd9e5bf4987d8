"""WdsDataModule: a LightningDataModule over shards."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from wds_pipes.codecs.resizing import Fit, Size
from wds_pipes.core.hosts import is_pipe
from wds_pipes.datapipes import ShardList, WdsPipe
from wds_pipes.datapipes.base import IterDataPipe
from wds_pipes.lightning.resumable import EvalLoader, ResumableData, pl
from wds_pipes.loader.pipe_loader import PipeLoader, progress_of
from wds_pipes.stages.shard_source import ShardRef
from wds_pipes.tar.keys import is_metadata

Source = Callable[[], Any] | IterDataPipe[Any] | list[str] | str | None


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
        super().__init__()
        self._sources = {"train": train, "val": val, "test": test}
        for name, source in self._sources.items():
            if isinstance(source, (str, list, tuple)) and batch_size is None:
                raise ValueError(f"{name} is given by URLs, so batch_size must say how many samples make a batch")
        everywhere = {"fields": fields, "index": index, "storage_options": storage_options, "cache": cache}
        self._refuse_unused(everywhere | {"size": size, "allow_pickle": allow_pickle}, "train", "val", "test")
        self._refuse_unused({"samples_per_shard": samples_per_shard, "transform": transform}, "train")
        self._refuse_unused({"eval_transform": eval_transform}, "val", "test")
        if cache_bytes is not None and cache is None:
            raise ValueError("cache_bytes is the limit of the cache: pass cache=, its directory, too")
        self._fields, self._decode, self._shuffle_buffer, self._seed = fields, decode, shuffle_buffer, seed
        self._decoding: dict[str, Any] = {
            "size": size,
            "fit": fit,
            "allow_pickle": allow_pickle,
            "max_image_pixels": max_image_pixels,
        }
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
        self._epoch_samples = epoch_samples
        self._train_options: dict[str, Any] = {
            "epoch_end": epoch_end,
            "drop_last": drop_last,
            "lanes": lanes,
            "mix_lanes": mix_lanes,
        }
        self._built: dict[str, PipeLoader] = {}

    def _refuse_unused(self, options: dict[str, Any], *names: str) -> None:
        """Raise ValueError if one of ``options`` is passed, and none of these sources is URLs."""
        given = [name for name in names if self._sources[name] is not None]
        passed = [option for option, value in options.items() if value]
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
            samples = self._epoch_samples if name == "train" else None
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
        source, train = self._sources[name], name == "train"
        if is_pipe(source):
            return source
        if callable(source):
            return source()
        if not isinstance(source, (str, list, tuple)):
            raise TypeError(f"{name} must be URLs, a pipe or a function that makes one, not {source!r:.80}")
        counts = self._samples_per_shard if train else None
        store = self._storage_options
        shards: WdsPipe[ShardRef] = ShardList(
            source,
            shuffle=train,
            seed=self._seed,
            samples_per_shard=counts,
            index=self._index or None,
            storage_options=store,
        )
        names = (
            None
            if self._fields is None
            else [name for field in self._fields for name in field.split(";") if not is_metadata(name)]
        )
        if self._cache is not None:
            shards = shards.cache_shards(self._cache, max_bytes=self._cache_bytes)
        pipe = shards.open_shards(storage_options=store).load_tar().group_by_key(fields=names or None)
        if train and self._shuffle_buffer:
            pipe = pipe.shuffle_buffer(self._shuffle_buffer)
        pipe = pipe.decode_by_ext(*[] if self._decode is None else [self._decode], **self._decoding)
        if (transform := self._transforms[name]) is not None:
            pipe = pipe.map_samples(transform)
        return pipe if self._fields is None else pipe.to_tuple(*self._fields)

    def _loader_options(self, name: str) -> dict[str, Any]:
        of = None if self.trainer is None else self.trainer.distributed_sampler_kwargs
        ranks = {} if of is None else {"rank": of["rank"], "world_size": of["num_replicas"]}
        return self._options | ranks | (self._train_options if name == "train" else {"epoch_end": "exact"})
