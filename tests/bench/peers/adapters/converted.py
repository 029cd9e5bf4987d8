"""Libraries with formats of their own, to which their own writers convert the samples."""

from __future__ import annotations

import os
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from peers.adapters.base import BUFFER, TORCH_HAS_NONE, Adapter, OfSamples, resumed, torch_batches
from peers.data import KINDS, tar_samples
from peers.pictures import BATCH, decode_fields, stack, stack_tensors


class Converted(Adapter):
    """A library with a directory or file for each kind of samples."""

    def path(self, kind: str) -> str:
        return os.path.join(self.work, kind)

    def prepare(self) -> None:
        for kind in KINDS:
            if not os.path.exists(f"{self.path(kind)}.done"):
                self.write(kind)
                open(f"{self.path(kind)}.done", "w").close()

    def write(self, kind: str) -> None:
        """Write the samples of a kind."""
        raise NotImplementedError


class Mosaic(OfSamples, Converted):
    """MDS shards and StreamingDataset, in torch's DataLoader."""

    imports = ("streaming", "torch")
    no_threads = "it has no threads"

    @classmethod
    def load(cls) -> None:
        """Import it without its data sets of images.

        They are not used here, and need torchvision, whose builds for CUDA do not load with a torch
        without CUDA.
        """
        sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")
        super().load()

    def write(self, kind: str) -> None:
        from streaming import MDSWriter

        columns = {
            "key": "str",
            **dict.fromkeys(("jpg", "cls", "json") if kind == "images" else ("txt", "cls"), "bytes"),
        }
        with MDSWriter(out=self.path(kind), columns=columns) as writer:
            for key, fields in self.data.samples(kind):
                writer.write({"key": key, **fields})

    def _samples(self, kind: str, *, shuffle: bool = False) -> Any:
        from streaming import StreamingDataset

        return StreamingDataset(local=self.path(kind), shuffle=shuffle, shuffle_seed=1, batch_size=BATCH)

    def access(self, kind: str) -> Callable[[int], Any]:
        return self._samples(kind).__getitem__

    def decoded(self, workers: int, threads: int) -> Iterable[Any]:
        from torch.utils.data import DataLoader

        return DataLoader(self._samples("images"), BATCH, num_workers=workers, collate_fn=_decode_and_stack)

    def resumable(self, state: Any) -> tuple[Iterator[Sequence[Any]], Callable[[], Any]]:
        from streaming import StreamingDataLoader

        samples = self._samples("images", shuffle=True)
        loader = resumed(StreamingDataLoader(samples, batch_size=BATCH, collate_fn=_keys), state)
        return (batch["key"] for batch in loader), loader.state_dict


class LitData(OfSamples, Converted):
    """Chunks of ``optimize``, StreamingDataset and StreamingDataLoader."""

    imports = ("litdata", "torch")
    no_threads = "it has no threads"

    def write(self, kind: str) -> None:
        from litdata import optimize

        urls = self.data.urls(kind)
        optimize(fn=_named_samples, inputs=urls, output_dir=self.path(kind), chunk_bytes="64MB", num_workers=1)

    def _samples(self, kind: str, *, shuffle: bool = False) -> Any:
        from litdata import StreamingDataset

        return StreamingDataset(self.path(kind), shuffle=shuffle, seed=1)

    def access(self, kind: str) -> Callable[[int], Any]:
        return self._samples(kind).__getitem__

    def _loader(self, workers: int, collate: Any, *, shuffle: bool) -> Any:
        from litdata import StreamingDataLoader

        samples = self._samples("images", shuffle=shuffle)
        return StreamingDataLoader(samples, batch_size=BATCH, num_workers=workers, collate_fn=collate)

    def decoded(self, workers: int, threads: int) -> Iterable[Any]:
        return self._loader(workers, _decode_and_stack, shuffle=False)

    def resumable(self, state: Any) -> tuple[Iterator[Sequence[Any]], Callable[[], Any]]:
        loader = resumed(self._loader(0, _keys, shuffle=True), state)
        return (batch["key"] for batch in loader), loader.state_dict


class Grain(Converted):
    """ArrayRecord files and ``grain.MapDataset``; a record is a pickled sample."""

    imports = ("grain",)

    def write(self, kind: str) -> None:
        from array_record.python.array_record_module import ArrayRecordWriter

        os.makedirs(self.path(kind), exist_ok=True)
        for number, url in enumerate(self.data.urls(kind)):
            writer = ArrayRecordWriter(os.path.join(self.path(kind), f"{number}.array_record"), "group_size:1")
            for sample in _named_samples(url):
                writer.write(pickle.dumps(sample))
            writer.close()

    def _samples(self, kind: str) -> Any:
        import grain

        paths = [os.path.join(self.path(kind), f"{number}.array_record") for number in range(self.data.shards)]
        return grain.MapDataset.source(grain.sources.ArrayRecordDataSource(paths)).map(pickle.loads)

    def raw(self, kind: str) -> Iterable[Any]:
        return self._samples(kind).to_iter_dataset()

    def shuffled(self, kind: str) -> Iterable[Any]:
        return self._samples(kind).shuffle(seed=1).to_iter_dataset()

    def access(self, kind: str) -> Callable[[int], Any]:
        return self._samples(kind).__getitem__

    def decoded(self, workers: int, threads: int) -> Iterable[Any]:
        import grain

        options = grain.ReadOptions(num_threads=threads or 1, prefetch_buffer_size=BATCH)
        batches = self._samples("images").map(decode_fields).to_iter_dataset(options).batch(BATCH, batch_fn=stack)
        if workers:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
        return batches

    def resumable(self, state: Any) -> tuple[Iterator[Sequence[Any]], Callable[[], Any]]:
        batches = iter(self._samples("images").shuffle(seed=1).to_iter_dataset().batch(BATCH, batch_fn=_keys))
        if state is not None:
            batches.set_state(state)
        return (batch["key"] for batch in batches), batches.get_state


class TfRecord(OfSamples, Converted):
    """The package tfrecord, which needs no TensorFlow, in torch's DataLoader."""

    imports = ("tfrecord", "torch")
    no_threads = TORCH_HAS_NONE

    def write(self, kind: str) -> None:
        from tfrecord import TFRecordWriter
        from tfrecord.tools.tfrecord2idx import create_index

        writer = TFRecordWriter(self.path(kind))
        for _, fields in self.data.samples(kind):
            writer.write({name: (value, "byte") for name, value in fields.items()})
        writer.close()
        create_index(self.path(kind), f"{self.path(kind)}.index")

    def _samples(self, kind: str, *, shuffle: bool = False, **options: Any) -> Any:
        from tfrecord.torch.dataset import TFRecordDataset

        buffer = BUFFER if shuffle else None
        return TFRecordDataset(self.path(kind), f"{self.path(kind)}.index", shuffle_queue_size=buffer, **options)

    def decoded(self, workers: int, threads: int) -> Iterable[Any]:
        return torch_batches(self._samples("images", transform=_decode_arrays), workers)


class ByNumber(Converted):
    """Samples that are read by their numbers, in torch's DataLoader."""

    no_threads = TORCH_HAS_NONE

    def raw(self, kind: str) -> Iterable[Any]:
        return map(self.access(kind), range(self.data.count(kind)))

    def shuffled(self, kind: str) -> Iterable[Any]:
        return map(self.access(kind), random.Random(1).sample(range(self.data.count(kind)), self.data.count(kind)))


class Lmdb(ByNumber):
    """One value per field."""

    imports = ("lmdb", "torch")

    def write(self, kind: str) -> None:
        import lmdb

        with (
            lmdb.open(self.path(kind), map_size=4 * self.data.bytes(kind) + (1 << 26)) as store,
            store.begin(write=True) as to,
        ):
            for number, (_, fields) in enumerate(self.data.samples(kind)):
                for name, value in fields.items():
                    to.put(f"{number:09d}.{name}".encode(), value)

    def access(self, kind: str) -> Callable[[int], Any]:
        return LmdbReader(self.path(kind), ("jpg", "cls", "json") if kind == "images" else ("txt", "cls"))

    def decoded(self, workers: int, threads: int) -> Iterable[Any]:
        from peers.adapters.base import FilesDataset

        read = LmdbReader(self.path("images"), ("jpg", "cls"))
        return torch_batches(FilesDataset(self.data.count("images"), read), workers)


class LmdbReader:
    """Reads samples; each process opens the store for itself."""

    def __init__(self, path: str, fields: Sequence[str]) -> None:
        self.path, self.fields = path, fields
        self.process = 0  # which has opened the store
        self.reading: Any = None

    def __call__(self, number: int) -> dict[str, bytes]:
        if self.process != os.getpid():
            import lmdb

            store = lmdb.open(self.path, readonly=True, lock=False, readahead=False)
            self.process, self.reading = os.getpid(), store.begin()
        get = self.reading.get
        return {name: get(f"{number:09d}.{name}".encode()) for name in self.fields}


class Ffcv(Adapter):
    """FFCV, which is built from source against OpenCV and libjpeg-turbo."""

    def prepare(self) -> None:
        raise NotImplementedError("it is installed, but there is no adapter for it")


def _named_samples(url: str) -> Iterator[dict[str, Any]]:
    for key, fields in tar_samples(url):
        yield {"key": key, **fields}


def _keys(samples: Sequence[Any]) -> dict[str, list[str]]:
    return {"key": [sample["key"] for sample in samples]}


def _decode_and_stack(samples: Sequence[Any]) -> Any:
    return stack_tensors(map(decode_fields, samples))


def _decode_arrays(fields: Any) -> Any:
    return decode_fields({name: bytes(fields[name]) for name in ("jpg", "cls")})
