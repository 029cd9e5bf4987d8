"""Megatron-Energon: crude samples of the shards, which ``energon prepare`` has indexed."""

import os

from peers.adapters.base import BUFFER, NO_THREADS, Converted
from peers.pictures import BATCH, decode_fields, stack_tensors


class Energon(Converted):
    """``get_train_dataset``, with a task encoder that decodes with the function of all rows."""

    imports = ("megatron.energon",)
    lacks = NO_THREADS

    def write(self, kind):
        """Index links to the shards, since the indexes are written next to them."""
        from megatron.energon.cli.main import main

        os.makedirs(self.path(kind))
        for url in self.data.urls(kind):
            os.symlink(os.path.abspath(url), os.path.join(self.path(kind), os.path.basename(url)))
        options = "--non-interactive --no-progress --split-ratio 1,0,0 --sample-type CrudeWebdataset --num-workers 2"
        main(["prepare", self.path(kind), *options.split()], standalone_mode=False)

    def dataset(self, kind, task, *, shuffle=False, batch=None, workers=0):
        from megatron.energon import WorkerConfig, get_train_dataset

        return get_train_dataset(
            self.path(kind),
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers),
            batch_size=batch,
            shuffle_buffer_size=BUFFER if shuffle else None,
            max_samples_per_sequence=None,
            task_encoder=_encoder(task),
            repeat=False,
        )

    def samples(self, kind, shuffle=False):
        from megatron.energon import get_loader

        return get_loader(self.dataset(kind, "raw", shuffle=shuffle))

    def decoded(self, workers, threads):
        from megatron.energon import get_loader

        return get_loader(self.dataset("images", "decode", batch=BATCH, workers=workers))

    def resumable(self, state):
        from megatron.energon import get_savable_loader

        loader = get_savable_loader(self.dataset("images", "keys", shuffle=True, batch=BATCH))
        if state is not None:
            loader.restore_state_rank(state)
        return iter(loader), loader.save_state_rank


def _encoder(task):
    """A task encoder whose samples are the fields, and whose batches are as ``task`` says."""
    from megatron.energon import Cooker, DefaultTaskEncoder, stateless

    @stateless
    def cook(sample):
        return dict(sample)

    class Encoder(DefaultTaskEncoder):
        decoder = None
        cookers = (Cooker(cook),)

        @stateless
        def encode_sample(self, sample):
            return {**sample, "decoded": decode_fields(sample)} if task == "decode" else sample

        @stateless
        def batch(self, samples):
            if task == "keys":
                return [sample["__key__"] for sample in samples]
            return stack_tensors([sample["decoded"] for sample in samples])

        @stateless
        def encode_batch(self, batch):
            return batch

    return Encoder()
