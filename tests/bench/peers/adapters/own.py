"""This package: a stream of shards, the same with its own image decoder, and with indexes."""

from peers.adapters.base import BUFFER, Adapter, resumed
from peers.pictures import BATCH, SIDE, decode_image


class Streamed(Adapter):
    """A stream of the shards, without indexes."""

    imports = ("torch", "wds_pipes.datapipes", "wds_pipes.loader.pipe_loader")

    def samples(self, kind, shuffle=False):
        import wds_pipes as wp

        counts = self.data.count(kind) // self.data.shards
        shards = wp.ShardList(self.data.urls(kind), shuffle=shuffle, seed=1, samples_per_shard=counts)
        samples = shards.open_shards().load_tar().group_by_key()
        return samples.shuffle_buffer(BUFFER) if shuffle else samples

    def decode(self, samples, threads):
        return samples.decode_by_ext({"jpg": decode_image}, threads=threads)

    def decoded(self, workers, threads):
        import wds_pipes as wp

        decoded = self.decode(self.samples("images").select_fields("jpg", "cls"), threads or None)
        return wp.PipeLoader(decoded.to_tuple("jpg", "cls"), batch_size=BATCH, num_workers=workers)

    def resumable(self, state):
        import wds_pipes as wp

        pipe = self.samples("images", shuffle=True).select_fields("jpg", "cls")
        loader = resumed(wp.PipeLoader(pipe, batch_size=BATCH, collate="list"), state)
        return ([sample["__key__"] for sample in batch] for batch in loader), loader.state_dict


class OwnDecoder(Streamed):
    """The same, with the image decoder of this package, which resizes."""

    def decode(self, samples, threads):
        return samples.decode_by_ext("rgb8", size=(SIDE, SIDE), threads=threads)


class Indexed(Streamed):
    """The same shards, read through their indexes of offsets."""

    def samples(self, kind, shuffle=False):
        import wds_pipes as wp

        return wp.SampleList(self.data.urls(kind), shuffle=shuffle, seed=1).fetch_samples()

    def access(self, kind):
        import wds_pipes as wp

        return wp.IndexedShards(self.data.urls(kind)).__getitem__
