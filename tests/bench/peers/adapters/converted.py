"""Libraries with formats of their own, to which their own writers convert the samples, and a
directory of files.
"""

import os
import pickle
import random
import sys
import types

from peers.adapters.base import BUFFER, NO_THREADS, TORCH_HAS_NONE, Converted, resumed, torch_batches
from peers.data import tar_samples
from peers.pictures import BATCH, decode_and_stack, decode_fields, stack

FIELDS = {"images": ("jpg", "cls", "json"), "tiny": ("txt", "cls")}


class Mosaic(Converted):
    """MDS shards and StreamingDataset, in torch's DataLoader."""

    imports = ("streaming", "torch")
    lacks = NO_THREADS

    def __init__(self, data, work):
        """Leave out its data sets of images.

        They are not used here, and need torchvision, whose builds for CUDA do not load with a torch
        without CUDA.
        """
        super().__init__(data, work)
        sys.modules["streaming.vision"] = types.ModuleType("streaming.vision")

    def write(self, kind):
        from streaming import MDSWriter

        columns = {"key": "str", **dict.fromkeys(FIELDS[kind], "bytes")}
        with MDSWriter(out=self.path(kind), columns=columns) as writer:
            for key, fields in self.data.samples(kind):
                writer.write({"key": key, **fields})

    def samples(self, kind, shuffle=False):
        from streaming import StreamingDataset

        return StreamingDataset(local=self.path(kind), shuffle=shuffle, shuffle_seed=1, batch_size=BATCH)

    def access(self, kind):
        return self.samples(kind).__getitem__

    def decoded(self, workers, threads):
        return torch_batches(self.samples("images"), workers)

    def resumable(self, state):
        from streaming import StreamingDataLoader

        samples = self.samples("images", shuffle=True)
        loader = resumed(StreamingDataLoader(samples, batch_size=BATCH, collate_fn=_keys), state)
        return (batch["key"] for batch in loader), loader.state_dict


class LitData(Converted):
    """Chunks of ``optimize``, StreamingDataset and StreamingDataLoader."""

    imports = ("litdata", "torch")
    lacks = NO_THREADS

    def write(self, kind):
        from litdata import optimize

        urls = self.data.urls(kind)
        optimize(fn=_named_samples, inputs=urls, output_dir=self.path(kind), chunk_bytes="64MB", num_workers=1)

    def samples(self, kind, shuffle=False):
        from litdata import StreamingDataset

        return StreamingDataset(self.path(kind), shuffle=shuffle, seed=1)

    def access(self, kind):
        return self.samples(kind).__getitem__

    def loader(self, workers, collate, *, shuffle):
        from litdata import StreamingDataLoader

        samples = self.samples("images", shuffle=shuffle)
        return StreamingDataLoader(samples, batch_size=BATCH, num_workers=workers, collate_fn=collate)

    def decoded(self, workers, threads):
        return self.loader(workers, decode_and_stack, shuffle=False)

    def resumable(self, state):
        loader = resumed(self.loader(0, _keys, shuffle=True), state)
        return (batch["key"] for batch in loader), loader.state_dict


class Grain(Converted):
    """ArrayRecord files and ``grain.MapDataset``; a record is a pickled sample."""

    imports = ("grain",)

    def paths(self, kind):
        return [os.path.join(self.path(kind), f"{number}.array_record") for number in range(self.data.shards)]

    def write(self, kind):
        from array_record.python.array_record_module import ArrayRecordWriter

        os.makedirs(self.path(kind))
        for url, path in zip(self.data.urls(kind), self.paths(kind)):
            writer = ArrayRecordWriter(path, "group_size:1")
            for sample in _named_samples(url):
                writer.write(pickle.dumps(sample))
            writer.close()

    def records(self, kind):
        import grain

        return grain.MapDataset.source(grain.sources.ArrayRecordDataSource(self.paths(kind))).map(pickle.loads)

    def samples(self, kind, shuffle=False):
        records = self.records(kind)
        return (records.shuffle(seed=1) if shuffle else records).to_iter_dataset()

    def access(self, kind):
        return self.records(kind).__getitem__

    def decoded(self, workers, threads):
        import grain

        options = grain.ReadOptions(num_threads=threads or 1, prefetch_buffer_size=BATCH)
        batches = self.records("images").map(decode_fields).to_iter_dataset(options).batch(BATCH, batch_fn=stack)
        return batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers)) if workers else batches

    def resumable(self, state):
        batches = iter(self.samples("images", shuffle=True).batch(BATCH, batch_fn=_keys))
        if state is not None:
            batches.set_state(state)
        return (batch["key"] for batch in batches), batches.get_state


class TfRecord(Converted):
    """The package tfrecord, which needs no TensorFlow, in torch's DataLoader."""

    imports = ("tfrecord", "torch")
    lacks = TORCH_HAS_NONE

    def write(self, kind):
        from tfrecord import TFRecordWriter
        from tfrecord.tools.tfrecord2idx import create_index

        writer = TFRecordWriter(self.path(kind))
        for _, fields in self.data.samples(kind):
            writer.write({name: (value, "byte") for name, value in fields.items()})
        writer.close()
        create_index(self.path(kind), f"{self.path(kind)}.index")

    def samples(self, kind, shuffle=False, **options):
        from tfrecord.torch.dataset import TFRecordDataset

        buffer = BUFFER if shuffle else None
        return TFRecordDataset(self.path(kind), f"{self.path(kind)}.index", shuffle_queue_size=buffer, **options)

    def decoded(self, workers, threads):
        return torch_batches(self.samples("images", transform=_as_bytes), workers)


class ByNumber(Converted):
    """Samples that ``reader(kind)`` reads by their numbers, in torch's DataLoader."""

    lacks = TORCH_HAS_NONE

    def access(self, kind):
        return self.reader(kind).__getitem__

    def samples(self, kind, shuffle=False):
        numbers = range(self.data.count(kind))
        return map(self.access(kind), random.Random(1).sample(numbers, len(numbers)) if shuffle else numbers)

    def decoded(self, workers, threads):
        return torch_batches(self.reader("images"), workers)


class Lmdb(ByNumber):
    """One value per field."""

    imports = ("lmdb", "torch")

    def write(self, kind):
        import lmdb

        size = 4 * self.data.bytes(kind) + (1 << 26)
        with lmdb.open(self.path(kind), map_size=size) as store, store.begin(write=True) as transaction:
            for number, (_, fields) in enumerate(self.data.samples(kind)):
                for name, value in fields.items():
                    transaction.put(f"{number:09d}.{name}".encode(), value)

    def reader(self, kind):
        return LmdbReader(self.path(kind), FIELDS[kind], self.data.count(kind))


class LmdbReader:
    """Reads samples; each process opens the store for itself."""

    def __init__(self, path, fields, count):
        self.path, self.fields, self.count = path, fields, count
        self.process = self.get = None

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        if self.process != os.getpid():
            import lmdb

            store = lmdb.open(self.path, readonly=True, lock=False, readahead=False)
            self.process, self.get = os.getpid(), store.begin().get
        return {name: self.get(f"{number:09d}.{name}".encode()) for name in self.fields}


class ImageFolder(ByNumber):
    """One file per sample, as torchvision's ImageFolder reads it: a directory for each class."""

    imports = ("torch",)

    def write(self, kind):
        extension = FIELDS[kind][0]
        for key, fields in self.data.samples(kind):
            directory = os.path.join(self.path(kind), fields["cls"].decode())
            os.makedirs(directory, exist_ok=True)
            with open(os.path.join(directory, f"{key}.{extension}"), "wb") as file:
                file.write(fields[extension])

    def reader(self, kind):
        return FileReader(self.path(kind))


class FileReader:
    """Reads the files below a directory, sorted by class and name."""

    def __init__(self, directory):
        self.directory = directory
        self.files = sorted(
            (label, name) for label in os.listdir(directory) for name in os.listdir(f"{directory}/{label}")
        )

    def __len__(self):
        return len(self.files)

    def __getitem__(self, number):
        label, name = self.files[number]
        with open(f"{self.directory}/{label}/{name}", "rb") as file:
            return {name.rpartition(".")[2]: file.read(), "cls": label}


def _named_samples(url):
    for key, fields in tar_samples(url):
        yield {"key": key, **fields}


def _keys(samples):
    return {"key": [sample["key"] for sample in samples]}


def _as_bytes(fields):
    return {name: bytes(fields[name]) for name in ("jpg", "cls")}
