"""The worker's side of a PipeLoader: it reads lanes, batch by batch."""

from __future__ import annotations

import contextlib
import math
import random
import time
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from wds_pipes.core.chain import Chain
from wds_pipes.core.counts import COUNTED
from wds_pipes.core.digest import as_counts, of_counts
from wds_pipes.core.order import hash64
from wds_pipes.core.stage import END, Stage, close_running, functional_name, is_built_in
from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError, WorkerError
from wds_pipes.io.urls import hide
from wds_pipes.loader.parent import begin_worker
from wds_pipes.loader.partition import LaneAt
from wds_pipes.loader.segments import MOST_EMPTY, LaneReading, with_lane
from wds_pipes.loader.slices import Partition
from wds_pipes.loader.stats import Meter, Spent
from wds_pipes.loader.transport import Inbox, Outbox, Sent
from wds_pipes.stages.batch_samples import BatchSamples

# the end of the message of each WorkerError
GO_ON = "To continue, call load_state_dict(state_dict()), then iter(): iter() alone begins the next epoch."


class Begin(NamedTuple):
    """Where a lane begins, after how many batches it ends (None: when it is exhausted), and whether
    its epoch was begun before.
    """

    epoch: int
    partition: Partition
    at: LaneAt
    batches: int | None
    resumed: bool


# What a worker does next: begin these lanes, and close those of an earlier run; or return the next
# batch of this lane. Plain types, because one is sent for each batch.
Command = dict[int, Begin] | int

# A batch of a lane, and where the lane stands after it, or an error: the lane, the batch (at the
# end of the lane its Lack instead), the fields of LaneAt, the error, and, with some results, the
# measurements. Plain tuples, too.
Result = tuple[int, Any, tuple[Any, ...] | None, Exception | None, Spent | None]


def run_worker(
    connection: Any,
    copied: Any,
    stage: Stage[Any],
    which: tuple[int, int, int],
    on_start: Callable[[int], Any] | None,
) -> None:
    """Answer commands with results until the main process wants no more: the code of a worker
    process.

    Args:
        connection: to the main process. The first message, None, says that this process runs.
        copied: the other end, of the main process, if a fork has copied it.
        stage: the pipeline.
        which: the number of this worker, how many there are, and the seed of all for the global
            random generators.
        on_start: called with the number of this worker before the first lane begins.
    """
    if copied is not None:
        copied.close()
    begin_worker()
    outbox = Outbox()
    connection.send(outbox.pack(None))
    number, count, seed = which
    seed = hash64(seed, number)
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.set_num_threads(1)
    host = LaneHost(stage, outbox.empty)
    # What a step of the user's gets from get_worker_info(), as in DataLoader.
    info = torch_worker.WorkerInfo(id=number, num_workers=count, seed=seed, dataset=host)  # type: ignore[arg-type]
    torch_worker._worker_info = info
    answer: Callable[[int], Result] = host.next
    try:
        if on_start is not None:
            on_start(number)
    except StopIteration as error:
        answer = partial(_failure, error=RuntimeError(f"worker_init_fn raised {error!r}"))
    except Exception as error:
        answer = partial(_failure, error=error)
    # The errors: the main process is gone, or did not wait.
    with contextlib.closing(host), contextlib.suppress(EOFError, ConnectionError):
        connection.send(outbox.pack(None))
        while (command := connection.recv()) is not None:
            if isinstance(command, dict):
                host.begin(command)
            else:
                connection.send(_packed(outbox, answer(command)))


def _packed(outbox: Outbox, result: Result) -> Sent:
    """Return what is sent for a result."""
    lane, _, _, error, _ = result
    if error is not None:
        return outbox.pack(_failure(lane, _portable(error)))
    try:
        return outbox.pack(result)
    except Exception as error:
        unsent = WorkerError(
            f"a batch of lane {lane} cannot be sent to the main process ({type(error).__name__}: "
            f"{hide(str(error))}). Make the last step return what "
            f"can be pickled, or use num_workers=0. {GO_ON}"
        )
        return outbox.pack(_failure(lane, unsent))


def _failure(lane: int, error: Exception) -> Result:
    """Return the result of a lane whose next batch is an error."""
    return lane, None, None, error, None


class LaneHost:
    """The lanes that a process hosts.

    Args:
        stage: the pipeline.
        empty: makes the arrays of batches; None: numpy does.
    """

    def __init__(self, stage: Stage[Any], empty: Callable[..., Any] | None = None) -> None:
        # Nothing else refers to the batches of the last step; a subclass may keep them.
        self._stage = stage.stacking_into(empty) if empty is not None and type(stage) is BatchSamples else stage
        self._begins: dict[int, Begin] = {}  # of lanes that begin with the next batch
        self._lanes: dict[int, _Running] = {}

    def begin(self, begins: dict[int, Begin]) -> None:
        """Host these lanes from now on."""
        self.close()
        self._begins = begins

    def next(self, lane: int) -> Result:
        """Return the next result of a lane."""
        begins, self._begins = self._begins, {}
        try:
            if begins:
                self._lanes = {number: _Running(self._stage, number, begin) for number, begin in begins.items()}
                for running in self._lanes.values():
                    running.start()
            return self._lanes[lane].next()
        except Exception as error:
            return _failure(lane, error)

    def close(self) -> None:
        """Close all lanes."""
        for running in self._lanes.values():
            close_running(running.stage)
        self._lanes.clear()


class _Running:
    """A lane that is being read."""

    def __init__(self, recipe: Stage[Any], number: int, begin: Begin) -> None:
        partition, self._number, self._batches = begin.partition, number, begin.batches
        self._lane = partition.lane(number, Chain(recipe).root, begin.epoch)
        self._meter = Meter(self._lane.meters)
        self._samples = (partition.samples() or {number: 0})[number]
        # not a reference cycle: see ``__del__``
        after_epoch = partial(_Running._after_epoch, weakref.proxy(self))
        reading = LaneReading(partition, number, begin.epoch, begin.resumed, self._meter, after_epoch)
        chain = with_lane(recipe, reading)
        self._at = begin.at  # after the last batch
        self.stage = chain.open(self._lane, self._at.mark)
        self._chain = Chain(self.stage)
        self._end: Result | None = None
        self._epochs = 0  # since the last batch
        self._most = MOST_EMPTY * math.prod(step.items_per_batch or 1 for step in self._chain.batching)

    def __del__(self) -> None:
        # The chain is a reference cycle of stages and generators. Without this, what it has open
        # would stay open until the garbage collector runs.
        if hasattr(self, "stage"):
            self.stage.close()

    def start(self) -> None:
        """Begin to fetch what the lane reads first."""
        if self._batches is None or self._at.delivered < self._batches:
            self.stage.start()

    def _after_epoch(self) -> None:
        """Raise ShardError if the steps after batch_samples() leave nothing, so that the lane would
        go on for ever.
        """
        self._epochs += 1
        if self._epochs < MOST_EMPTY:
            return
        now = self._at._replace(mark=self.stage.mark())
        samples = [at.counts(self._chain).get("delivered", 0) for at in (self._at, now)]
        if samples[1] - samples[0] >= self._most:
            raise ShardError(
                f"lane {self._number} of {self._lane.of} made no batch in {self._epochs} epochs of the data, since the "
                "steps after batch_samples() leave all batches out."
            )

    def next(self) -> Result:
        """Return the next batch and where the lane stands after it; from the end on, no batch and
        where it ended.
        """
        if self._end is not None:
            return self._end
        _, delivered, _, extra = self._at
        full = self._batches is not None and delivered >= self._batches
        stalled, start = self._lane.meters.stall_seconds, time.perf_counter()
        batch = END if full else next(self.stage.items, END)
        self._meter.busy += time.perf_counter() - start
        self._meter.waited += self._lane.meters.stall_seconds - stalled
        if batch is END:
            self._end = self._ended(full=full)
            return self._end
        self._epochs = 0
        self._at = LaneAt(self.stage.mark(), delivered + 1, False, extra)
        spent = self._meter.spent() if delivered % 8 == 0 else None
        return self._number, batch, tuple(self._at), None, spent

    def _ended(self, *, full: bool) -> Result:
        """Close the lane, which has ended, and return its last result.

        Args:
            full: it has yielded all batches that it should.

        Raises:
            ShardError, SampleError: it has fewer.
        """
        at, lack = self._at._replace(mark=self.stage.mark(), ended=True), self._chain.lack
        counts, before = at.counts(self._chain), self._at.counts(self._chain)
        if self._batches is not None and not full:
            if not at.delivered and lack.explains(counts):
                raise lack.error(f"lane {self._number} of {self._lane.of}")
            own = [type(step) for step in self._chain if step.keeps_count and not is_built_in(type(step))]
            raise ShardError(
                f"lane {self._number} gave {plural(at.delivered, 'batch')} instead of "
                f"{self._batches}: the shards have fewer usable samples than "
                "samples_per_shard says, so the ranks would not end together. Correct it, or use epoch_end='exact'."
                + "".join(
                    f" Or {functional_name(kind)}() has keeps_count = True, and yields fewer items than it takes."
                    for kind in own
                )
            )
        if counts["dropped"] > before.get("dropped", 0):  # these are not in the digest
            counts |= as_counts(of_counts(before))
        if full:
            counts["dropped"] += max(0, self._samples - sum(counts[name] for name in COUNTED))
        spent = self._meter.spent()
        self.stage.close()
        return self._number, lack, tuple(at.with_counts(self._chain, counts)), None, spent


def _portable(error: Exception) -> Any:
    """Return ``error`` in a form that can be sent, with its traceback as text; if it cannot, an
    error that is this text.
    """
    story = hide("".join(traceback.format_exception(error))).rstrip()
    try:
        portable = _Portable(error, [f"In the worker:\n{story}", *getattr(error, "__notes__", [])])
        Inbox(1).open(Outbox().pack(error))
    except Exception:  # it holds what is not sent, such as a tensor with a gradient
        return RuntimeError(f"{type(error).__name__} in a worker:\n{story}")
    return portable


class _Portable(NamedTuple):
    """An error and its notes, which many classes lose when they are pickled.

    It is unpickled as the error.
    """

    error: Exception
    notes: list[str]

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, tuple(self)


def _arrived(error: Exception, notes: list[str]) -> Exception:
    error.__notes__ = notes
    return error
