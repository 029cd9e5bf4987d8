"""This package: a stream of shards, the same with its own image decoder, and with indexes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from peers.adapters.base import BUFFER, OfSamples, resumed
from peers.pictures import BATCH, SIDE, decode_image

if TYPE_CHECKING:
    from wds_pipes.datapipes import WdsPipe


class Streamed(OfSamples):
    """A stream of the shards, without indexes."""

    imports = ("torch", "wds_pipes.datapipes", "wds_pipes.loader.pipe_loader")

    def _samples(self, kind: str, *, shuffle: bool = False) -> WdsPipe:
        import wds_pipes as wp

        counts = self.data.count(kind) // self.data.shards
        shards = wp.ShardList(self.data.urls(kind), shuffle=shuffle, seed=1, samples_per_shard=counts)
        samples = shards.open_shards().load_tar().group_by_key()
        return samples.shuffle_buffer(BUFFER) if shuffle else samples

    def _decoding(self) -> tuple[Any, dict[str, Any]]:
        """The spec of ``decode_by_ext`` for images, and its options."""
        return {"jpg": decode_image}, {}

    def decoded(self, workers: int, threads: int) -> Iterable[Any]:
        import wds_pipes as wp

        spec, options = self._decoding()
        if threads:
            options["threads"] = threads
        samples = self._samples("images").select_fields("jpg", "cls")
        pipe = samples.decode_by_ext(spec, **options)
        return wp.PipeLoader(pipe.to_tuple("jpg", "cls"), batch_size=BATCH, num_workers=workers)

    def resumable(self, state: Any) -> tuple[Iterator[Sequence[Any]], Callable[[], Any]]:
        import wds_pipes as wp

        pipe = self._samples("images", shuffle=True).select_fields("jpg", "cls")
        loader = resumed(wp.PipeLoader(pipe, batch_size=BATCH, collate="list"), state)
        return ([sample["__key__"] for sample in batch] for batch in loader), loader.state_dict


class OwnDecoder(Streamed):
    """The same, with the image decoder of this package, which resizes."""

    def _decoding(self) -> tuple[Any, dict[str, Any]]:
        return "rgb8", {"size": (SIDE, SIDE)}


class Indexed(Streamed):
    """The same shards, read through their indexes of offsets."""

    def _samples(self, kind: str, *, shuffle: bool = False) -> WdsPipe:
        import wds_pipes as wp

        return wp.SampleList(self.data.urls(kind), shuffle=shuffle, seed=1).fetch_samples()

    def access(self, kind: str) -> Callable[[int], Any]:
        import wds_pipes as wp

        return wp.IndexedShards(self.data.urls(kind)).__getitem__
