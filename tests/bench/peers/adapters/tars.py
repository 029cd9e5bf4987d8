"""Libraries that read the tar shards as they are."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from peers.adapters.base import BUFFER, Adapter, OfSamples, resumed
from peers.data import tar_samples
from peers.pictures import BATCH, decode_fields, resize_with_pillow, stack, stack_tensors


class Webdataset(OfSamples):
    """WebDataset and WebLoader, with the function of all rows; state by StatefulDataLoader."""

    imports = ("webdataset", "torchdata.stateful_dataloader")

    no_threads = "it has no threads"

    def _samples(self, kind: str, *, shuffle: bool = False) -> Any:
        import webdataset

        samples = webdataset.WebDataset(self.data.urls(kind), shardshuffle=False, empty_check=False)
        return samples.shuffle(BUFFER) if shuffle else samples

    def _decoded(self) -> Any:
        return self._samples("images").map(decode_fields)

    def decoded(self, workers: int, threads: int) -> Iterable[Any]:
        import webdataset

        batches = self._decoded().batched(BATCH, collation_fn=stack_tensors)
        return webdataset.WebLoader(batches, batch_size=None, num_workers=workers)

    def resumable(self, state: Any) -> tuple[Iterator[Sequence[Any]], Callable[[], Any]]:
        from torchdata.stateful_dataloader import StatefulDataLoader

        samples = self._samples("images").shuffle(BUFFER, seed=1)
        batches = samples.map(_key).batched(BATCH, collation_fn=list)
        loader = resumed(StatefulDataLoader(batches, batch_size=None), state)
        return iter(loader), loader.state_dict


class WebdatasetPillow(Webdataset):
    """As its users write it: ``.decode("pil")``, and a resize by Pillow."""

    def _decoded(self) -> Any:
        return self._samples("images").decode("pil").to_tuple("jpg", "cls").map_tuple(resize_with_pillow, int)


class HuggingFace(OfSamples):
    """``load_dataset("webdataset", streaming=True)``, with images as bytes."""

    imports = ("datasets", "torch")

    no_threads = "it has no threads"

    def _samples(self, kind: str, *, shuffle: bool = False) -> Any:
        from datasets import Image, load_dataset

        found = load_dataset("webdataset", data_files=self.data.urls(kind), split="train", streaming=True)
        found = found.cast_column("jpg", Image(decode=False)) if kind == "images" else found
        return found.shuffle(seed=1, buffer_size=BUFFER) if shuffle else found

    def decoded(self, workers: int, threads: int) -> Iterable[Any]:
        from torch.utils.data import DataLoader

        samples = self._samples("images")
        return DataLoader(samples, BATCH, num_workers=workers, collate_fn=_stack_rows)

    def resumable(self, state: Any) -> tuple[Iterator[Sequence[Any]], Callable[[], Any]]:
        samples = resumed(self._samples("images", shuffle=True), state)
        return (batch["__key__"] for batch in samples.iter(BATCH)), samples.state_dict


class Nodes(Adapter):
    """torchdata's nodes over Python's own ``tarfile``; a state replays the stream."""

    imports = ("torchdata.nodes",)

    def raw(self, kind: str) -> Iterable[Any]:
        return _Samples(self.data.urls(kind))

    def decoded(self, workers: int, threads: int) -> Iterable[Any]:
        from torchdata.nodes import Batcher, IterableWrapper, Loader, Mapper, ParallelMapper

        node = IterableWrapper(_Samples(self.data.urls("images")))
        count, method = workers or threads, "process" if workers else "thread"
        decoded = (
            ParallelMapper(node, _decode_pair, num_workers=count, method=method)
            if count
            else Mapper(node, _decode_pair)
        )
        return Loader(Mapper(Batcher(decoded, BATCH, drop_last=False), stack_tensors))

    def resumable(self, state: Any) -> tuple[Iterator[Sequence[Any]], Callable[[], Any]]:
        from torchdata.nodes import Batcher, IterableWrapper, Loader

        batches = Batcher(IterableWrapper(_Samples(self.data.urls("images"))), BATCH, drop_last=False)
        loader = resumed(Loader(batches), state)
        return ([key for key, _ in batch] for batch in loader), loader.state_dict


class Spdl(Adapter):
    """spdl's tar parser, grouped in Python, and its pipeline of threads."""

    imports = ("spdl.io", "spdl.pipeline")
    no_workers = "its workers are threads"

    def raw(self, kind: str) -> Iterable[Any]:
        for url in self.data.urls(kind):
            yield from self._of_shard(url)

    def _of_shard(self, url: str) -> Iterator[dict[str, Any]]:
        from spdl.io import iter_tarfile

        sample: dict[str, Any] = {}
        with open(url, "rb") as file:
            for name, data in iter_tarfile(file):
                key, _, extension = os.path.basename(name).partition(".")
                if key != sample.get("__key__", key):
                    yield sample
                    sample = {}
                sample["__key__"] = key
                sample[extension] = bytes(data)
        if sample:
            yield sample

    def decoded(self, workers: int, threads: int) -> Iterable[Any]:
        from spdl.pipeline import PipelineBuilder

        count = threads or 1
        builder = PipelineBuilder().add_source(self.raw("images")).pipe(decode_fields, concurrency=count)
        pipeline = builder.aggregate(BATCH).pipe(stack).add_sink(2).build(num_threads=count)
        with pipeline.auto_stop():
            yield from pipeline


class _Samples:
    """Samples of shards, read with ``tarfile``."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls

    def __iter__(self) -> Iterator[tuple[str, dict[str, bytes]]]:
        for url in self.urls:
            yield from tar_samples(url)


def _key(sample: Any) -> Any:
    return sample["__key__"]


def _decode_pair(pair: tuple[str, Any]) -> Any:
    return decode_fields(pair[1])


def _stack_rows(rows: Any) -> Any:
    """Decode and stack rows of HF datasets, whose images are dicts."""
    return stack_tensors([decode_fields({"jpg": row["jpg"]["bytes"], "cls": row["cls"]}) for row in rows])
