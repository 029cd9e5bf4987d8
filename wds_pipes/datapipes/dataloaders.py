"""What loaders do with a pipe: DataLoader, StatefulDataLoader, and those of Accelerate."""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from typing import Any

from wds_pipes.core.lane import Context
from wds_pipes.datapipes.base import IterDataPipe
from wds_pipes.datapipes.torch_steps import walk
from wds_pipes.dataset import LaneEnds, WorkerNews
from wds_pipes.errors import StateError
from wds_pipes.loader.parent import worker_info
from wds_pipes.loader.ranks import warn_of_ranks


def count_epoch(pipe: IterDataPipe[Any], context: Context) -> None:
    """Note that an iterator of DataLoader is made or reset; its seed hook calls this.

    The epochs are counted in the main process, since new workers are copies, which cannot count
    themselves.

    Raises:
        TypeError: Accelerate would lose samples.
    """
    passed = context.passed
    passed.by = passed.by or os.getpid()
    warn_of_ranks("a pipe in DataLoader", divided=True)
    if context.tell_end is None:
        context.tell_end = LaneEnds()
    news = passed.news = passed.news or WorkerNews()
    if passed.by != os.getpid():
        return
    _refuse_accelerate(pipe)
    # A new iterator with workers calls this twice: when it is made and when it has started them.
    starts, passed.starts = passed.starts, None
    if starts is not None and starts < news.starts:
        return
    passed.starts = news.starts
    if passed.epoch == context.epoch:  # workers already had this epoch
        context.epoch += 1
        passed.times += 1
    passed.epoch = context.epoch


def _refuse_accelerate(pipe: IterDataPipe[Any]) -> None:
    """Raise an error, or warn, if a loader of Hugging Face Accelerate iterates over a pipe.

    Raises:
        TypeError: it reads on rank 0 for all ranks (``dispatch_batches``), and torch gives a pipe
            on rank 0 only the samples of rank 0.
    """
    module = sys.modules.get("accelerate.data_loader")
    loader = None if module is None else module.GradientState().active_dataloader
    if module is None or loader is None or all(part is not pipe for part in walk(loader.dataset)):
        return
    instead = "pass pipe.as_dataset() in its place, or do not prepare() the data and use wds_pipes.PipeLoader"
    if isinstance(loader, module.DataLoaderDispatcher) and loader.state.num_processes > 1:
        raise TypeError(
            "Accelerate reads on rank 0 for all ranks here (dispatch_batches), and torch's DataLoader divides a pipe "
            f"over the ranks, so most samples would never be read: {instead}."
        )
    warnings.warn(
        "Accelerate and the Trainer of transformers do not see set_epoch() of a pipe, so a resume repeats the "
        f"first epoch: {instead}.",
        stacklevel=2,
    )


def refuse_stateful_dataloader() -> None:
    """Raise an error in a worker of a StatefulDataLoader that iterates over a bare pipe.

    Raises:
        StateError: as above.
    """
    worker = worker_info()
    loop = getattr(multiprocessing.current_process(), "_target", None)
    if (
        worker is not None
        and isinstance(worker.dataset, IterDataPipe)
        and getattr(loop, "__module__", "").startswith("torchdata.stateful_dataloader")
    ):
        raise StateError(
            "StatefulDataLoader does not see the state of an IterDataPipe: it would replay from the start and say "
            "nothing. Give it pipe.as_dataset(), or wds_pipes.as_dataset(pipe) for a chain that ends in a pipe of "
            "torch's."
        )
