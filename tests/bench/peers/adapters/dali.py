"""DALI on the CPU: its reader of shards, its decoder and its threads."""

import os
import zlib

from peers.adapters.base import BUFFER, NO_WORKERS, Converted
from peers.pictures import BATCH, SIDE


class Dali(Converted):
    """``fn.readers.webdataset`` with the indexes of ``wds2idx``, and its own decoder and resize."""

    imports = ("nvidia.dali.fn", "nvidia.dali.types")
    lacks = NO_WORKERS

    def write(self, kind):
        import wds2idx

        os.makedirs(self.path(kind))
        for url, index in zip(self.data.urls(kind), self.indexes(kind)):
            with wds2idx.IndexCreator(url, index) as creator:
                creator.create_index()

    def indexes(self, kind):
        return [os.path.join(self.path(kind), f"{os.path.basename(url)}.idx") for url in self.data.urls(kind)]

    def pipeline(self, kind, *, decode=False, shuffle=False, threads=1, **options):
        from nvidia.dali import Pipeline, fn

        pipeline = Pipeline(batch_size=BATCH, num_threads=threads, device_id=None, **options)
        with pipeline:
            data, labels = fn.readers.webdataset(
                name="reader",
                paths=self.data.urls(kind),
                index_paths=self.indexes(kind),
                ext=["jpg", "cls"] if kind == "images" else ["txt", "cls"],
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

    def batches(self, pipeline, count):
        for start in range(0, count, BATCH):
            data, labels = pipeline.run()
            yield data, [labels.at(place).tobytes() for place in range(min(BATCH, count - start))]

    def samples(self, kind, shuffle=False):
        for data, labels in self.batches(self.pipeline(kind, shuffle=shuffle), self.data.count(kind)):
            for place, label in enumerate(labels):
                yield data.at(place).tobytes(), label

    def decoded(self, workers, threads):
        pipeline = self.pipeline("images", decode=True, threads=threads or 1)
        return ((data.as_array(), labels) for data, labels in self.batches(pipeline, self.data.count("images")))

    def resumable(self, state):
        """Its samples have no names: checksums of the images are in their place."""
        done, saved = state or (0, None)
        pipeline = self.pipeline("images", shuffle=True, enable_checkpointing=True, checkpoint=saved)

        def batches():
            nonlocal done
            for data, labels in self.batches(pipeline, self.data.count("images") - done):
                done += len(labels)
                yield [zlib.crc32(data.at(place).tobytes()) for place in range(len(labels))]

        return batches(), lambda: (done, pipeline.checkpoint())
