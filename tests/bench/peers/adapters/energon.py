"""Megatron-Energon: crude samples of the shards, which ``energon prepare`` has indexed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from peers.adapters.base import BUFFER
from peers.adapters.converted import Converted
from peers.pictures import BATCH, decode_fields, stack_tensors


class Energon(Converted):
    """``get_train_dataset``, with a task encoder that decodes with the function of all rows."""

    imports = ("megatron.energon",)
    no_threads = "it has no threads"

    def write(self, kind: str) -> None:
        """Index links to the shards, since the indexes are written next to them."""
        from megatron.energon.cli.main import main

        os.makedirs(self.path(kind), exist_ok=True)
        for url in self.data.urls(kind):
            os.symlink(os.path.abspath(url), os.path.join(self.path(kind), os.path.basename(url)))
        options = "--non-interactive --no-progress --split-ratio 1,0,0 --sample-type CrudeWebdataset --num-workers 2"
        main(["prepare", self.path(kind), *options.split()], standalone_mode=False)

    def _samples(self, kind: str, task: str, *, buffer: int | None, batch: int | None, workers: int = 0) -> Any:
        from megatron.energon import WorkerConfig, get_train_dataset

        return get_train_dataset(
            self.path(kind),
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers),
            batch_size=batch,
            shuffle_buffer_size=buffer,
            max_samples_per_sequence=None,
            task_encoder=_encoder(task),
            repeat=False,
        )

    def raw(self, kind: str) -> Iterable[Any]:
        from megatron.energon import get_loader

        return get_loader(self._samples(kind, "raw", buffer=None, batch=None))

    def shuffled(self, kind: str) -> Iterable[Any]:
        from megatron.energon import get_loader

        return get_loader(self._samples(kind, "raw", buffer=BUFFER, batch=None))

    def decoded(self, workers: int, threads: int) -> Iterable[Any]:
        from megatron.energon import get_loader

        samples = self._samples("images", "decode", buffer=None, batch=BATCH, workers=workers)
        return get_loader(samples)

    def resumable(self, state: Any) -> tuple[Iterator[Sequence[Any]], Callable[[], Any]]:
        from megatron.energon import get_savable_loader

        loader = get_savable_loader(self._samples("images", "keys", buffer=BUFFER, batch=BATCH))
        if state is not None:
            loader.restore_state_rank(state)
        return iter(loader), loader.save_state_rank


def _encoder(task: str) -> Any:
    """A task encoder whose samples are the fields, and whose batches are as ``task`` says."""
    from megatron.energon import Cooker, DefaultTaskEncoder, stateless

    @stateless
    def cook(sample: Any) -> Any:
        return dict(sample)

    class Encoder(DefaultTaskEncoder):
        decoder = None
        cookers = (Cooker(cook),)

        @stateless
        def encode_sample(self, sample: Any) -> Any:
            return {**sample, "decoded": decode_fields(sample)} if task == "decode" else sample

        @stateless
        def batch(self, samples: list[Any]) -> Any:
            if task == "keys":
                return [sample["__key__"] for sample in samples]
            return stack_tensors([sample["decoded"] for sample in samples])

        @stateless
        def encode_batch(self, batch: Any) -> Any:
            return batch

    return Encoder()
