"""Libraries that read the tar shards as they are."""

import os

from peers.adapters.base import BUFFER, NO_SHUFFLE, NO_THREADS, NO_WORKERS, Adapter, resumed, torch_batches
from peers.data import tar_samples
from peers.pictures import BATCH, decode_and_stack, decode_fields, resize_with_pillow, stack, stack_tensors


class Webdataset(Adapter):
    """WebDataset and WebLoader, with the function of all rows; state by StatefulDataLoader."""

    imports = ("webdataset", "torchdata.stateful_dataloader")
    lacks = NO_THREADS

    def samples(self, kind, shuffle=False):
        import webdataset

        samples = webdataset.WebDataset(self.data.urls(kind), shardshuffle=False, empty_check=False)
        return samples.shuffle(BUFFER, seed=1) if shuffle else samples

    def decoded_samples(self):
        return self.samples("images").map(decode_fields)

    def decoded(self, workers, threads):
        import webdataset

        batches = self.decoded_samples().batched(BATCH, collation_fn=stack_tensors)
        return webdataset.WebLoader(batches, batch_size=None, num_workers=workers)

    def resumable(self, state):
        from torchdata.stateful_dataloader import StatefulDataLoader

        batches = self.samples("images", shuffle=True).map(_key).batched(BATCH, collation_fn=list)
        loader = resumed(StatefulDataLoader(batches, batch_size=None), state)
        return iter(loader), loader.state_dict


class WebdatasetPillow(Webdataset):
    """As its users write it: ``.decode("pil")``, and a resize by Pillow."""

    def decoded_samples(self):
        return self.samples("images").decode("pil").to_tuple("jpg", "cls").map_tuple(resize_with_pillow, int)


class HuggingFace(Adapter):
    """``load_dataset("webdataset", streaming=True)``, with images as bytes."""

    imports = ("datasets", "torch")
    lacks = NO_THREADS

    def samples(self, kind, shuffle=False):
        from datasets import Image, load_dataset

        found = load_dataset("webdataset", data_files=self.data.urls(kind), split="train", streaming=True)
        found = found.cast_column("jpg", Image(decode=False)) if kind == "images" else found
        return found.shuffle(seed=1, buffer_size=BUFFER) if shuffle else found

    def decoded(self, workers, threads):
        return torch_batches(self.samples("images"), workers, _decode_rows)

    def resumable(self, state):
        samples = resumed(self.samples("images", shuffle=True), state)
        return (batch["__key__"] for batch in samples.iter(BATCH)), samples.state_dict


class Nodes(Adapter):
    """torchdata's nodes over Python's own ``tarfile``; a state replays the stream."""

    imports = ("torchdata.nodes",)
    lacks = NO_SHUFFLE

    def samples(self, kind, shuffle=False):
        return _Samples(self.data.urls(kind))

    def decoded(self, workers, threads):
        from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper, ParallelMapper

        node = IterableWrapper(self.samples("images"))
        if workers or threads:
            method = "process" if workers else "thread"
            decoded = ParallelMapper(node, _decode_pair, num_workers=workers or threads, method=method)
        else:
            decoded = Mapper(node, _decode_pair)
        return Loader(Mapper(Batcher(decoded, BATCH, drop_last=False), stack_tensors))

    def resumable(self, state):
        from torchdata.nodes import Batcher, IterableWrapper, Loader

        loader = resumed(Loader(Batcher(IterableWrapper(self.samples("images")), BATCH, drop_last=False)), state)
        return ([key for key, _ in batch] for batch in loader), loader.state_dict


class Spdl(Adapter):
    """spdl's tar parser, grouped in Python, and its pipeline of threads."""

    imports = ("spdl.io", "spdl.pipeline")
    lacks = NO_SHUFFLE | NO_WORKERS

    def samples(self, kind, shuffle=False):
        from spdl.io import iter_tarfile

        for url in self.data.urls(kind):
            sample = {}
            with open(url, "rb") as file:
                for name, data in iter_tarfile(file):
                    key, _, extension = os.path.basename(name).partition(".")
                    if key != sample.get("__key__", key):
                        yield sample
                        sample = {}
                    sample["__key__"] = key
                    sample[extension] = bytes(data)
            yield sample

    def decoded(self, workers, threads):
        from spdl.pipeline import PipelineBuilder

        count = threads or 1
        builder = PipelineBuilder().add_source(self.samples("images")).pipe(decode_fields, concurrency=count)
        pipeline = builder.aggregate(BATCH).pipe(stack).add_sink(2).build(num_threads=count)
        with pipeline.auto_stop():
            yield from pipeline


class _Samples:
    """Samples of shards, read with ``tarfile``; each iteration reads them anew."""

    def __init__(self, urls):
        self.urls = urls

    def __iter__(self):
        for url in self.urls:
            yield from tar_samples(url)


def _key(sample):
    return sample["__key__"]


def _decode_pair(pair):
    return decode_fields(pair[1])


def _decode_rows(rows):
    """Decode and stack rows of HF datasets, whose images are dicts."""
    return decode_and_stack({"jpg": row["jpg"]["bytes"], "cls": row["cls"]} for row in rows)
