"""DALI on the CPU: its reader of shards, its decoder and its threads."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from peers.adapters.base import BUFFER
from peers.adapters.converted import Converted
from peers.pictures import BATCH, SIDE


class Dali(Converted):
    """``fn.readers.webdataset`` with the indexes of ``wds2idx``, and its own decoder and resize."""

    imports = ("nvidia.dali.fn", "nvidia.dali.types")
    no_workers = "its workers are threads"

    def write(self, kind: str) -> None:
        import wds2idx

        os.makedirs(self.path(kind), exist_ok=True)
        for url, index in zip(self.data.urls(kind), self._indexes(kind)):
            with wds2idx.IndexCreator(url, index) as creator:
                creator.create_index()

    def _indexes(self, kind: str) -> list[str]:
        return [os.path.join(self.path(kind), f"{os.path.basename(url)}.idx") for url in self.data.urls(kind)]

    def _pipeline(
        self, kind: str, *, decode: bool = False, shuffle: bool = False, threads: int = 1, **options: Any
    ) -> Any:
        from nvidia.dali import Pipeline, fn

        fields = ["jpg", "cls"] if kind == "images" else ["txt", "cls"]
        pipeline = Pipeline(batch_size=BATCH, num_threads=threads, device_id=None, **options)
        with pipeline:
            data, labels = fn.readers.webdataset(
                name="reader",
                paths=self.data.urls(kind),
                index_paths=self._indexes(kind),
                ext=fields,
                random_shuffle=shuffle,
                initial_fill=BUFFER,
                seed=1,
                pad_last_batch=False,
            )
            if decode:
                images = fn.decoders.image(data, device="cpu")
                data = fn.crop(fn.resize(images, size=(SIDE, SIDE), mode="not_smaller"), crop=(SIDE, SIDE))
            pipeline.set_outputs(data, labels)
        pipeline.build()
        return pipeline

    def _batches(self, pipeline: Any, count: int) -> Iterator[tuple[Any, Any]]:
        for start in range(0, count, BATCH):
            data, labels = pipeline.run()
            yield data, [labels.at(place).tobytes() for place in range(min(BATCH, count - start))]

    def _single(self, kind: str, *, shuffle: bool) -> Iterator[Any]:
        for data, labels in self._batches(self._pipeline(kind, shuffle=shuffle), self.data.count(kind)):
            for place, label in enumerate(labels):
                yield data.at(place).tobytes(), label

    def raw(self, kind: str) -> Iterable[Any]:
        return self._single(kind, shuffle=False)

    def shuffled(self, kind: str) -> Iterable[Any]:
        return self._single(kind, shuffle=True)

    def decoded(self, workers: int, threads: int) -> Iterable[Any]:
        pipeline = self._pipeline("images", decode=True, threads=threads or 1)
        return ((data.as_array(), labels) for data, labels in self._batches(pipeline, self.data.count("images")))

    def resumable(self, state: Any) -> tuple[Iterator[Sequence[Any]], Callable[[], Any]]:
        """Its samples have no names: checksums of the images are in their place."""
        done, saved = state or (0, None)
        pipeline = self._pipeline("images", shuffle=True, enable_checkpointing=True, checkpoint=saved)
        position = [done]

        def batches() -> Iterator[list[int]]:
            for data, labels in self._batches(pipeline, self.data.count("images") - done):
                position[0] += len(labels)
                yield [zlib.crc32(data.at(place).tobytes()) for place in range(len(labels))]

        return batches(), lambda: (position[0], pipeline.checkpoint())
