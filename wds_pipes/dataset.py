"""WdsDataset: a pipeline as a dataset whose state StatefulDataLoader can save."""

from __future__ import annotations

import os
import pickle
import warnings
import weakref
from collections.abc import Iterable, Iterator
from multiprocessing.context import get_spawning_popen
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch.utils.data import IterableDataset

from wds_pipes.core.chain import Chain
from wds_pipes.core.hosts import stage_of
from wds_pipes.core.lane import Context, Copies
from wds_pipes.core.options import check_count, checks_options
from wds_pipes.core.order import hash64
from wds_pipes.core.stage import Stage, State
from wds_pipes.core.state import damaged, read_state
from wds_pipes.core.stream import Position, Stream
from wds_pipes.errors import StateError
from wds_pipes.loader.in_trainers import is_in_trainer, warn_of_trainer
from wds_pipes.loader.lengths import Countable, length
from wds_pipes.loader.parent import end_with_parent, worker_info
from wds_pipes.loader.ranks import warn_of_ranks
from wds_pipes.stages.edits import Edits, load

MAX_WORKERS = 1024
_EPOCHS = 1 << 32


def as_dataset(pipe: object) -> WdsDataset:
    """Return a pipe as a plain IterableDataset with a state, for DataLoader and StatefulDataLoader:
    see ``WdsDataset``.
    """
    return WdsDataset(stage_of(pipe, "as_dataset()"))


class WdsDataset(Countable, IterableDataset[Any]):
    """A pipeline as a plain IterableDataset with a state.

    It is for torch's DataLoader and torchdata's StatefulDataLoader. If the pipe makes batches
    itself, pass ``DataLoader(batch_size=None)``; otherwise DataLoader makes batches of these.

    With ``num_workers=n``, worker i yields lane i of n. Each lane has its own shards, so there
    should be at least n shards. Each iteration is the next epoch, with persistent and with new
    workers, and with every start method; ``set_epoch(n)`` selects an epoch. A state fits the same
    number of workers only.

    Raises:
        StateError: from ``load_state_dict``: the state does not fit this pipeline or this number of
            workers.
    """

    _stream: _WorkerStream  # counts() are those of this process

    def __init__(self, stage: Stage[Any]) -> None:
        super().__init__()
        warn_of_ranks("as_dataset()")
        self._stream = _WorkerStream(stage)
        worker_copies(Chain(stage).root.context)

    def __iter__(self) -> Iterator[Any]:
        stream = self._stream
        worker = worker_info()
        if worker is not None:
            end_with_parent()
        first = worker is None or worker.id == 0
        misplaced = first and is_in_trainer(self) and not self._has_length()
        stream.settle()
        stream.ask()
        if misplaced and stream.coming() == 0:  # once: there the Trainer begins, also at a resume
            warn_of_trainer()
        if stream.waits and worker is not None:
            # When the state was taken, the lane of this worker had ended, but not all other lanes:
            # this iteration yields nothing.
            stream.waits = False
            return iter(())
        stream.over = stream.waits = False
        if stream.position.ended:
            stream.at = None  # else a state taken before the first item would be one of a lane that has ended
            stream.settle()
        return iter(stream)

    def __len__(self) -> int:
        """Return how many items an epoch has, as ``len()`` of the pipe does.

        With several workers of a DataLoader, each makes batches of its own, and its last one may be
        smaller. So there may be more batches than ``len()`` says; that of PipeLoader is right.
        """
        return length(self._stream.stage, ranks_are_divided=False)

    def __bool__(self) -> bool:
        return True  # also if len() is not known

    def _has_length(self) -> bool:
        try:
            len(self)
        except TypeError:
            return False
        return True

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration start ``epoch`` from its beginning, in all workers.

        After a state of the same epoch was loaded, the iteration still continues from that state.
        """
        epoch = check_count("epoch", epoch, least=0, most=_EPOCHS - 2)
        self._stream.set_epoch(epoch)
        self._stream.tell(epoch - 1)

    def state_dict(self) -> State:
        """Return the position in this process, as a new small dict of plain JSON types."""
        stream = self._stream
        stream.settle()
        return {**stream.state_dict(), "ended": stream.over or stream.position.ended}

    @checks_options
    def load_state_dict(
        self,
        state: State,
        *,
        moved: bool = False,
        exclude: str | os.PathLike[str] | Iterable[str] | None = None,
        added: str | None = None,
        mix: str | None = None,
    ) -> None:
        """Make the next iteration in this process continue from ``state``; for the arguments see
        ``WdsPipe.load_state_dict``.

        StatefulDataLoader calls this in its workers, with the state alone. If the shards were
        renamed since the state was taken, pass ``ShardList(..., moved=True)``, and if a mix has
        changed, ``mix(..., changed=True)``.
        """
        stream = self._stream
        stream.settle()
        saved = read_state(state)
        if saved.epoch >= _EPOCHS - 1:
            raise damaged(f"'epoch' is {saved.epoch}, and epochs are numbered below {_EPOCHS - 1}")
        load(stream, state, Edits(moved, exclude, added, mix))
        stream.over = stream.waits = saved.ended
        stream.tell(stream.position.epoch - 1)
        stream.loaded = os.getpid(), stream.latest


def warn_of_copies(stage: Stage[Any]) -> None:
    """Warn if several workers of a DataLoader iterate copies of one pipe, each over all samples."""
    worker = worker_info()
    if (
        worker is not None
        and worker.num_workers > 1
        and worker.id == 0
        and Chain(stage).root.divides
        and Chain(stage).root.context.made_in != os.getpid()
    ):
        warnings.warn(
            f"DataLoader does not see that there is a pipe in this dataset, so each of its {worker.num_workers} "
            "workers gives all samples of the pipe: use pipe.as_dataset() in its place, or let each worker have a pipe "
            "of its own (then ignore this).",
            stacklevel=3,
        )


class SharedNumbers:
    """Numbers in memory that the workers of a DataLoader share with the process that starts them.

    A copy has memory of its own, and so has another process that is no worker, such as a rank that
    was forked or spawned: it has workers of its own.

    Attributes:
        starts: how many processes, workers or not, this process has started with these numbers.
    """

    def __init__(self, numbers: list[int], shared: bytes | None = None) -> None:
        self._numbers = torch.tensor(numbers, dtype=torch.int64) if shared is None else pickle.loads(shared)
        self._numbers.share_memory_()
        # in a process that was just started: the numbers then, for a process that is no worker
        self._at_start = None if shared is None else numbers
        self.starts = 0
        _all_shared.add(self)

    @property
    def numbers(self) -> torch.Tensor:
        at_start, self._at_start = self._at_start, None
        if at_start is not None and worker_info() is None:
            self._numbers, self.starts = SharedNumbers(at_start)._numbers, 0
        return self._numbers

    def __reduce__(self) -> tuple[Any, ...]:
        numbers = self.numbers
        if get_spawning_popen() is None:
            return SharedNumbers, (numbers.tolist(),)
        self.starts += 1
        # DataLoader packs a pipe with pickle, which would copy the memory instead of sharing it.
        return SharedNumbers, (numbers.tolist(), bytes(ForkingPickler.dumps(numbers)))


_all_shared: weakref.WeakSet[SharedNumbers] = weakref.WeakSet()


def _before_fork() -> None:
    for shared in list(_all_shared):
        shared.starts += 1
        # for the process that is forked now, if it is no worker
        shared._at_start = shared.numbers.tolist()


def _after_fork() -> None:
    for shared in list(_all_shared):
        shared._at_start = None


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork)


class WorkerCopies(Copies):
    """What workers of torch's DataLoader have of a pipe that it iterates: a copy, made when they
    start. See ``wds_pipes.datapipes.pipe``. What the main process is told since then, and how the
    lanes of the workers end, stands in memory that they share.

    Of each lane that yielded nothing, it stores the epoch, whether the samples lacked the fields
    that are kept, and whether there were no samples, which is not allowed.

    Attributes:
        by: the main process; None: no DataLoader has iterated the pipe.
        epoch: the epoch that was last passed to workers; None: the pipe was told another one since.
        starts: how many processes the main process had started when DataLoader made an iterator;
            None: no further call for this iterator is expected.
    """

    by: int | None = None
    epoch: int | None = None
    starts: int | None = None

    def __init__(self) -> None:
        # how often the pipe was told something; and one more than the epoch it was told last, 0: a
        # state
        self._told = SharedNumbers([0, 0])
        self._heard = 0  # how often, as this process knows
        self._ends = SharedNumbers([0] * MAX_WORKERS)

    @property
    def started(self) -> int:
        """How many processes the main process has started."""
        return self._told.starts

    def tell(self, epoch: int | None) -> None:
        self.epoch = None
        if worker_info() is None:
            self._heard += 1
            self._told.numbers[1] = 0 if epoch is None else epoch + 1
            self._told.numbers[0] = self._heard

    def hear(self) -> int | None:
        """Do what ``Copies.hear`` does.

        Raises:
            StateError: the main process was told a state, which this worker does not have.
        """
        times, epoch = self._told.numbers.tolist()
        if times == self._heard:
            return None
        self._heard = times
        if epoch == 0:
            raise StateError(
                "a state was loaded into this pipe after its workers were started, which do not see it: use "
                "wds_pipes.PipeLoader, or StatefulDataLoader(pipe.as_dataset()), and load the state into that loader"
            )
        return int(epoch) - 1

    def end(self, epoch: int, lanes: int, lacking: bool, empty: bool) -> tuple[bool, bool]:
        worker = worker_info()
        if worker is None or worker.num_workers != lanes or lanes > MAX_WORKERS:
            return super().end(epoch, lanes, lacking, empty)  # other ranks have lanes, too
        self._ends.numbers[worker.id] = 4 * (epoch + 1) + 2 * lacking + empty
        ends = self._ends.numbers[: worker.num_workers].tolist()
        ended = all(end // 4 == epoch + 1 for end in ends)
        return ended and any(end & 2 for end in ends), ended and all(end & 1 for end in ends)


def worker_copies(context: Context) -> WorkerCopies:
    """Return what workers of a DataLoader have of the chain with this context."""
    if not isinstance(context.copies, WorkerCopies):
        context.copies = WorkerCopies()
    return context.copies


class _WorkerStream(Stream[Any]):
    """A stream that yields the lane of its worker process, in the same epoch as the other workers.

    Workers may be new at each iteration, and some may be stopped before they begin, so no worker
    can count epochs by itself. They share one number in shared memory: the epoch of the latest
    iteration, and a key that identifies this iteration. The first worker that begins an iteration
    finds another key there, and writes its own key and the next epoch. If several workers do so at
    the same time, they write the same number.
    """

    def __init__(self, stage: Stage[Any]) -> None:
        super().__init__(stage)
        self.over = False  # the loaded state was taken when this lane had ended, and no other iteration has begun since
        self.waits = False  # so the next iteration yields nothing in this process
        self.loaded = 0, 0  # in which process a state was loaded, and what ``latest`` was then
        self.turns = self.key = 0  # how many iterations began in this process, and the key of the last one
        # the latest iteration; and for each lane the key of its last iteration
        self.shared = SharedNumbers([0] * (1 + MAX_WORKERS))
        self.tell(self.chain.root.context.epoch - 1)

    @property
    def latest(self) -> int:
        return int(self.shared.numbers[0])

    def tell(self, epoch: int, key: int = 0) -> None:
        """Store ``epoch`` as the epoch of the latest iteration."""
        if epoch >= _EPOCHS - 1:
            raise ValueError(f"epochs are numbered below {_EPOCHS - 1}, unlike {epoch}")
        self.shared.numbers[0] = key * _EPOCHS + epoch + 1

    def ask(self) -> None:
        """Compute the key of a new iteration, from the seed that DataLoader draws for it."""
        worker = worker_info()
        if worker is None:
            return
        self.turns += 1
        self.key = _key(worker.seed - worker.id, self.turns)
        lane = 1 + worker.id
        if self.shared.numbers[lane] == self.key:  # torch was seeded as for the iteration before
            self.key = _key(self.key)
        self.shared.numbers[lane] = self.key

    def coming(self) -> int:
        """Return the epoch of the current or next iteration of this process."""
        key, epoch = divmod(self.latest, _EPOCHS)
        return epoch - 1 if key == self.key != 0 else epoch

    def settle(self) -> None:
        """Set the lane and the epoch of this process."""
        context, worker = self.chain.root.context, worker_info()
        context.lane, context.lanes = (0, 1) if worker is None else (worker.id, worker.num_workers)
        if context.lanes > MAX_WORKERS:
            raise ValueError(f"at most {MAX_WORKERS} workers are possible, not {context.lanes}")
        if self.at is None:
            context.epoch = self.coming()

    def start_epoch(self) -> Position:
        context = self.chain.root.context
        process, latest = self.loaded
        if process != os.getpid() and self.latest != latest:  # workers of an earlier iteration had the state
            self.will_resume = False
        if not self.will_resume:
            context.epoch = self.coming()
        position = super().start_epoch()
        self.tell(position.epoch, self.key)
        return position


def _key(*values: int) -> int:
    """Return a hash of 31 bits that is not zero."""
    return hash64(*values) >> 33 or 1
