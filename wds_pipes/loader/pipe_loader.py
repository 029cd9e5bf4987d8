"""PipeLoader: batches from worker processes and ranks, with a state that fits any number of both.

Rules:
1. The main process is the only truth: which epoch, which lane stands where. Workers only host lanes: each command that they get names the lane, and the
   first one of a lane brings where it begins.
2. DataLoader gives command t to worker t mod n. A lane stays with one worker: where the next lane is not of the worker whose turn it is, the command is empty.
3. Batches come in the order of (number of the batch in its lane, lane), whoever hosts the lanes.
4. A batch carries its lane's position; the position counts from the moment that the batch is handed to the caller. All that is in flight does not count.
5. One batch is fetched ahead of the one that is handed out, so that the state which comes with the last batch says that the epoch is over.
"""

from __future__ import annotations

import atexit
import copy
import heapq
import inspect
import itertools
import math
import os
import pickle
import re
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from multiprocessing import queues
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.profiler import record_function
from torch.utils.data import DataLoader, Dataset, IterDataPipe, Sampler, get_worker_info

from wds_pipes.codecs import library
from wds_pipes.core import order as ordering
from wds_pipes.core.counts import COUNTED, LIMITED, Lack, Network, logger, warn_of_nothing
from wds_pipes.core.lane import Lane
from wds_pipes.core.moved import Data, Move
from wds_pipes.core.options import check_choice, check_count
from wds_pipes.core.stage import Stage, State, Tolerant
from wds_pipes.core.state import MOST, MOST_LANES, STATE_VERSION, Saved, SavedLane, are_all, damaged, read_state
from wds_pipes.core.stream import Recipe, Stream, check_lane, check_recipe
from wds_pipes.core.suggest import checks_options
from wds_pipes.core.tracebacks import in_words, shorten, shortened
from wds_pipes.core.words import plural, shown, some
from wds_pipes.datapipes import as_stage, check_not_loaded
from wds_pipes.display import graph
from wds_pipes.errors import SampleError, ShardError, StateError, WorkerError
from wds_pipes.io.urls import hide
from wds_pipes.loader.lanes import Deal, deal_again, lay_out, parts_of, with_parts
from wds_pipes.loader.lengths import batches_of, batching, why_uncounted
from wds_pipes.loader.parent import begin_worker, check_guarded, end_workers, make_terminate_kill, why_ended
from wds_pipes.loader.ranks import Rank, find_rank
from wds_pipes.loader.stats import Meter, Spent, Tally
from wds_pipes.stages import BatchSamples, Mix

LaneState = dict[str, Any]  # url, delivered, ended, position (None: not begun), counts

_NOT_BEGUN: LaneState = {"url": None, "delivered": 0, "ended": False, "position": None, "counts": {}}


class Begin(NamedTuple):
    """Where a lane begins, and after how many batches it ends (None: when it is exhausted)."""

    epoch: int
    deal: Deal
    state: LaneState
    batches: int | None


# What a worker is to do: in a run (which tells one pass over an epoch from another), give the next batch of a lane (-1: it is nobody's turn). With its first
# one it gets its lanes. A plain tuple, for one goes out with each batch.
Command = tuple[int, int, dict[int, Begin] | None]


# A batch of a lane with the lane's state behind it, or what went wrong: the run, the lane, the batch, the state (packed), whether the lane has ended (with that
# state, and in the place of a batch its Lack if it gave nothing), the error, and with some what was spent. A plain tuple too; a state is packed once, and
# unpacked when somebody asks for it.
Result = tuple[int, int, Any, bytes | None, bool, Exception | None, Spent | None]


_pack: Callable[[LaneState], bytes] = pickle.dumps
_unpack: Callable[[bytes], LaneState] = pickle.loads


class LaneHost(Dataset[Result]):
    """The lanes that a worker process hosts, as a map-style dataset whose indices are commands."""

    def __init__(self, stage: Stage[Any]) -> None:
        self._stage = stage
        self._run = -1
        self._lanes: dict[int, _Running] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_stage": self._stage, "_run": -1, "_lanes": {}}

    def __getitem__(self, command: Command) -> Result:
        run, lane, begins = command
        if run != self._run:
            self.close()
            self._run = run
        if lane < 0:
            return run, lane, None, None, False, None, None
        try:
            if begins is not None:
                self._lanes = {number: _Running(self._stage, number, begin) for number, begin in begins.items()}
                for running in self._lanes.values():
                    running.start()
            return self._lanes[lane].next(run)
        except Exception as error:
            return run, lane, None, None, False, error if get_worker_info() is None else _portable(error), None

    def close(self) -> None:
        """Close all that is open."""
        for running in self._lanes.values():
            try:
                running.stage.close()
            except ValueError as error:
                # A thread, or what a signal handler has interrupted, is reading it: it is closed when that has ended, and nothing holds the lane.
                if "already executing" not in str(error):
                    raise
        self._lanes.clear()


class _Running:
    """A lane that is being read."""

    def __init__(self, recipe: Stage[Any], number: int, begin: Begin) -> None:
        deal, self._number, self._batches = begin.deal, number, begin.batches
        self._lane = Lane(recipe.seed, begin.epoch, number, deal.lanes, len(deal.history))
        self._samples = (deal.samples() or {number: 0})[number]
        chain = with_parts(recipe, deal, number, begin.epoch)
        position = begin.state["position"]
        self.stage = chain.open(self._lane, None if position is None else chain.load(position))
        self._delivered: int = begin.state["delivered"]
        self._end: Result | None = None
        self._meter = Meter()
        parts_of(self.stage).watch = self._meter.watch

    def __del__(self) -> None:
        # The chain is a cycle of stages and generators; what it has open is not to wait for the garbage collector.
        if hasattr(self, "stage"):
            self.stage.close()

    def start(self) -> None:
        """Let the lane ask for what it will read first."""
        if self._batches is None or self._delivered < self._batches:
            self.stage.start()

    def next(self, run: int) -> Result:
        """The next batch and the lane's state behind it; at the end, and from then on, no batch and the last state."""
        if self._end is not None:
            return self._end
        full = self._batches is not None and self._delivered >= self._batches
        waited, start = self.stage.waited, time.perf_counter()
        batch = _NONE if full else next(self.stage.items, _NONE)
        self._meter.busy += time.perf_counter() - start
        self._meter.waited += self.stage.waited - waited
        ended = batch is _NONE
        self._delivered += not ended
        mark = self.stage.mark()
        counts = self.stage.counts(mark, self._delivered)
        lack = self.stage.lack if ended and not self._delivered else None
        if ended and self._batches is not None and not full:
            if lack is not None and lack.explains(counts):
                raise lack.error(f"lane {self._number} of {self._lane.of}")
            raise ShardError(
                f"lane {self._number} gave {plural(self._delivered, 'batch')} instead of {self._batches}: the shards have fewer usable samples than "
                "samples_per_shard says, so the ranks would not end together. Correct it, or use epoch_end='exact'."
            )
        state: LaneState = {
            "url": self.stage.where(mark, self._lane),
            "delivered": self._delivered,
            "ended": ended,
            "position": self.stage.dump(mark),
            "counts": counts,
        }
        if full:
            counts["dropped"] += max(0, self._samples - sum(counts[name] for name in COUNTED))
        spent = self._meter.spent() if ended or self._delivered % 8 == 1 else None
        if ended:
            self.stage.close()
            self._end = run, self._number, lack, _pack(state), True, None, spent
            return self._end
        return run, self._number, batch, _pack(state), False, None, spent


_NONE = object()
_AT_END: Result = (-1, -1, None, None, False, None, None)


def _portable(error: Exception) -> Any:
    """``error`` with what led to it in words, so that it can leave the process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__} in a worker:\n{hide(''.join(traceback.format_exception(shorten(error))))}")
    notes = list(getattr(error, "__notes__", []))
    if story := in_words(error):
        notes.insert(0, f"In the worker:\n{hide(story).rstrip()}")
    return _Portable(error, notes)


class _Portable(NamedTuple):
    """An error and its notes, which many classes forget when they are pickled; it arrives as the error."""

    error: Exception
    notes: list[str]

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, tuple(self)


def _arrived(error: Exception, notes: list[str]) -> Exception:
    error.__notes__ = notes
    return error


_NOT_PICKLED = (
    "Workers that are not forked get the pipe by pickling. Write the functions of its steps with def, at the top of a module, not as lambda or in a notebook; "
    "or, on Linux, pass multiprocessing_context='fork'."
)


def _begin_worker(worker: int) -> None:
    """What a worker process does first."""
    begin_worker(worker)
    queues.Queue._on_queue_feeder_error = _not_sent  # type: ignore[attr-defined]


_log_not_sent = queues.Queue._on_queue_feeder_error  # type: ignore[attr-defined]


def _not_sent(queue: queues.Queue[Any], error: Exception, item: Any) -> None:
    """Send an error in place of a batch that cannot be sent: the queue alone would drop it, and the main process would wait for ever."""
    try:
        number, (run, lane, _, _, _, _, _) = item
    except (TypeError, ValueError):  # of another queue
        _log_not_sent(error, item)
        return
    unsent = WorkerError(
        f"a batch of lane {lane} cannot be sent to the main process ({type(error).__name__}: {hide(str(error))}). Let the last step give what can be pickled, "
        "or use num_workers=0. state_dict() is still good."
    )
    queue.put((number, (run, lane, None, None, False, unsent, None)))


class _Commands(Sampler[Command]):
    """The commands to the workers, without end: rules 2 and 3.

    Args:
        workers: how many there are, at least 1.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._run = -1
        self._worker: dict[int, int] = {}  # of each lane that is going on
        self._begins: dict[int, dict[int, Begin]] = {}  # of each worker that has not been told
        self._turns: list[tuple[int, int]] = []  # a heap of (number of the batch, lane)

    def start(self, run: int, begins: dict[int, Begin]) -> None:
        """Give the lanes of ``begins`` their turns from now on."""
        self._run = run
        self._worker = {lane: place % self._workers for place, lane in enumerate(begins)}
        self._begins = {worker: {lane: begins[lane] for lane, host in self._worker.items() if host == worker} for worker in range(self._workers)}
        self._turns = [(begin.state["delivered"], lane) for lane, begin in begins.items()]
        heapq.heapify(self._turns)

    def end(self, lane: int) -> None:
        """A lane has ended: it has no more turns."""
        self._worker.pop(lane, None)

    def __iter__(self) -> Iterator[Command]:
        for worker in itertools.cycle(range(self._workers)):
            while self._turns and self._turns[0][1] not in self._worker:
                heapq.heappop(self._turns)
            if not self._turns or self._worker[self._turns[0][1]] != worker:
                yield self._run, -1, None
                continue
            number, lane = self._turns[0]
            heapq.heapreplace(self._turns, (number + 1, lane))
            yield self._run, lane, self._begins.pop(worker, None)


class _At(NamedTuple):
    """Where a loader stands: in a word, so that it is always whole."""

    epoch: int
    deal: Deal
    lanes: dict[int, bytes]  # the states, packed
    step: int = 0
    given: int = 0  # batches since the last cut of with_epoch
    samples: int = 0  # and samples, where with_epoch counts these

    def counted_from(self, other: _At | None) -> _At:
        """Here, with what ``other`` has given since the last cut; None: the cut is here."""
        return self._replace(given=0, samples=0) if other is None else self._replace(given=other.given, samples=other.samples)

    @property
    def states(self) -> dict[int, LaneState]:
        """Those of the lanes, new at each call."""
        return {number: _unpack(lane) for number, lane in self.lanes.items()}


class PipeLoader:
    """Batches of a pipeline from worker processes, with an exact state for any number of workers and ranks.

    An epoch is dealt into lanes: by default as many as ranks x workers at the first start; the number then travels in the state. Ranks and workers only host
    lanes, a batch of each in turn. So with the same lanes the batches of a rank are the same whatever its number of workers, 0 included, and the lanes are the
    same on any number of ranks that divides theirs. On other numbers, what is left of the epoch is dealt again: each remaining sample exactly once, in
    another order. A lane then keeps the shards that it has open, so lanes may be unequal, and ``epoch_end="drop"`` may drop much of what was left; a warning
    says how much. ``lanes=`` with a multiple of every ranks x workers that will be used prevents it.

    Each ``iter(loader)`` is the next epoch (also after breaking out of a loop); a loaded state continues its own. ``iter()`` does nothing until the first
    ``next()``. A state taken with the last batch in hand means the beginning of the next epoch.

    Args:
        pipe: a pipeline that starts with ``ShardList``; torch's ``.map``, ``.filter``, ``.batch`` and ``.collate`` may be in it.
        batch_size: samples in a batch, stacked as ``batch_samples`` does; None: the items of the pipe are the batches.
        num_workers: worker processes; 0: everything in this process.
        lanes: into how many lanes to deal; a multiple of the number of ranks. There should be at least as many shards as lanes, unless
            ``ShardList(samples_per_shard=...)`` says how many samples there are: then lanes are equal to one sample.
        epoch_end: ``"drop"``: every rank gives the same number of batches, all full; what is left over is counted as dropped. ``"pad"``: the same number, and
            samples are repeated to fill the last ones; each sample has a field ``"__padding__"`` that says whether it is a repeat, and they are counted.
            ``"exact"``: each sample once, so that ranks may differ by a few batches. None: ``"exact"`` for one rank, ``"drop"`` for several. The first two need
            ``samples_per_shard``, and no steps that change the number of samples.
        drop_last: with ``batch_size``, leave out the last batch of each lane if it is smaller.
        collate: with ``batch_size``, as in ``batch_samples``.
        prefetch_factor: batches that each worker reads ahead.
        pin_memory: copy tensors into pinned memory; needs an accelerator.
        multiprocessing_context: ``"fork"``, ``"spawn"`` or ``"forkserver"``; None: Python's default.
        persistent_workers: keep the workers from one epoch to the next.
        rank: the data-parallel rank of this process, with ``world_size``; None: by torch.distributed if it is initialised when the loader is first used,
            else by RANK and WORLD_SIZE, else the only one.
        world_size: the number of data-parallel ranks.
        progress: show a progress bar; needs tqdm.
        timeout_seconds: how long to wait for a worker's batch before an error; 0: for ever.

    Raises:
        TypeError, ValueError: when built: the pipeline does not start with ``ShardList``, or an argument does not fit.
        StateError: when built: a pipe of torch's in the pipeline has a state that cannot be known.
        ShardError, SampleError: from the iteration, also out of a worker, with its url, key and offset. A step's ``max_errors`` bounds what it skips in an
            epoch in all lanes of this rank together: the error comes in place of the first batch by which there are more, on a resume too. Each rank counts
            by itself; when an epoch is dealt again, each has an equal share of what was skipped before.
        WorkerError: from the iteration: a worker process died, gave no batch for ``timeout_seconds``, or cannot pickle a batch. The state is still good.
    """

    @shortened
    @checks_options
    def __init__(
        self,
        pipe: IterDataPipe[Any],
        *,
        batch_size: int | None = None,
        num_workers: int = 0,
        lanes: int | None = None,
        epoch_end: str | None = None,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | str | None = None,
        prefetch_factor: int = 2,
        pin_memory: bool = False,
        multiprocessing_context: str | None = None,
        persistent_workers: bool = True,
        rank: int | None = None,
        world_size: int | None = None,
        progress: bool = False,
        timeout_seconds: float = 0,
    ) -> None:
        if not isinstance(pipe, IterDataPipe):
            raise TypeError(f"PipeLoader takes a pipe, not {type(pipe).__name__}")
        options = {name: value for name, value in locals().items() if name not in ("self", "pipe")}
        call = graph.Call.of("PipeLoader", inspect.signature(PipeLoader), options)
        self._text = str(call._replace(arguments=(graph.to_text(pipe), *call.arguments)))
        check_not_loaded(pipe, "PipeLoader()")
        stage: Stage[Any] = as_stage(pipe)
        stage.check_resumable()
        if batch_size is not None:
            if stage.batches is not None:
                message = f"the pipe gives batches of {stage.batches} already, and batch_size={batch_size} makes batches of these: leave one of the two out."
                warnings.warn(f"{message} If it is meant, write the second one as .batch_samples({batch_size}), too.", stacklevel=4)
            stage = BatchSamples(stage, check_count("batch_size", batch_size), drop_last=drop_last, collate=collate)
        elif drop_last or collate is not None:
            raise ValueError("drop_last and collate go with batch_size; without it the items of the pipe are the batches")
        if rank is not None or world_size is not None:
            find_rank(rank, world_size)
        self._stage = lay_out(stage)
        if epoch_end is not None:
            check_choice("epoch_end", epoch_end, "drop", "pad", "exact")
        self._epoch_end = epoch_end
        self._mode = "exact"
        self._uncounted = why_uncounted(self._stage)
        self._limits = _limits(self._stage)
        if epoch_end in ("drop", "pad") and self._uncounted:
            raise ValueError(f"epoch_end={epoch_end!r} needs to know how many samples there are, and {self._uncounted}")
        self._num_workers = check_count("num_workers", num_workers, least=0)
        self._lanes = None if lanes is None else check_count("lanes", lanes, most=MOST_LANES)
        check_count("prefetch_factor", prefetch_factor)
        self._persistent = bool(persistent_workers)
        self._given = rank, world_size
        self._rank: Rank | None = None
        self._host = LaneHost(self._stage)
        self._commands = _Commands(max(1, num_workers))
        self._loader = DataLoader(
            self._host,
            batch_size=None,
            sampler=self._commands,
            num_workers=num_workers,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            prefetch_factor=prefetch_factor if num_workers else None,
            pin_memory=pin_memory,
            multiprocessing_context=multiprocessing_context if num_workers else None,
            timeout=timeout_seconds,
            worker_init_fn=_begin_worker if num_workers else None,
            generator=torch.Generator(),  # the global one is the model's
        )
        self._progress = library("tqdm", "tqdm", "progress=True").tqdm if progress else None
        self._results: Iterator[Result] | None = None
        self._cut: int | None = None
        self._cut_in_samples = False
        self._paused: _Paused | None = None
        self._runs = 0
        self._epoch = 0
        self._at: _At | None = None
        self._resume = False
        self._live: weakref.ref[LoaderPass] | None = None
        self._inside = False  # next() of an iterator is running, or was left by an interrupt: what is in flight is then in no known state
        self._last: Tally | None = None
        self._network: dict[int, Network] = {}  # what each process has used

    @property
    def rank(self) -> Rank:
        """The data-parallel rank, found at the first use; with it is settled how an epoch ends."""
        if self._rank is None:
            self._rank = find_rank(*self._given)
            if self._lanes is not None and self._lanes % self._rank.of:
                raise ValueError(f"lanes={self._lanes} must be a multiple of the {self._rank.of} ranks")
            if self._epoch_end is None and self._rank.of > 1 and self._uncounted:
                raise ValueError(
                    f"the {self._rank.of} ranks would not get the same number of batches, which lets training hang: {self._uncounted}. If that is meant, pass "
                    "epoch_end='exact'."
                )
            parts, samples = parts_of(self._stage), getattr(self._source, "samples", None)
            parts.samples = None if samples is None else sum(samples)
            self._mode = self._epoch_end or ("exact" if self._rank.of == 1 else "drop")
            parts.pads = self._mode == "pad"
        return self._rank

    @cached_property
    def _recipe(self) -> Recipe:
        """What a state must fit; the rank, which has a say in it, comes first."""
        self.rank  # noqa: B018 - it settles how an epoch ends
        return Stream(self._stage).recipe._replace(samples=getattr(self._source, "samples_fingerprint", None))

    @property
    def _source(self) -> Stage[Any]:
        return self._stage.root

    def _batches(self, deal: Deal) -> int | None:
        """How many batches each lane of a deal gives, where all are to give the same number."""
        samples = deal.samples()
        if self._mode == "exact" or samples is None:
            return None
        return min(samples) // self._batch_size if self._mode == "drop" else -(-max(samples) // self._batch_size)

    @cached_property
    def _batching(self) -> list[BatchSamples]:
        """The steps that make batches, the first of them first: the others make batches of batches."""
        return batching(self._stage)

    @property
    def _batch_size(self) -> int:
        """How many samples a whole batch has."""
        return math.prod(step.size for step in self._batching)

    def _batches_of(self, samples: int) -> int:
        """How many batches a lane makes of its samples, where it gives them all."""
        return batches_of(self._batching, samples)

    def __iter__(self) -> LoaderPass:
        return LoaderPass(self)

    def _new_lanes(self) -> int:
        return self._lanes or self.rank.of * max(1, self._num_workers)

    def _beginning(self, epoch: int, lanes: int | None = None) -> _At:
        """The beginning of an epoch."""
        lanes = lanes or self._new_lanes()
        return _At(epoch, Deal.first(lanes, self._source, epoch), dict.fromkeys(range(self.rank.number, lanes, self.rank.of), _pack(_NOT_BEGUN)))

    @property
    def _position(self) -> _At:
        """Where the loader stands; if every lane of the epoch has ended, at the beginning of the next."""
        at = self._at or self._beginning(self._epoch)
        if self._over(at):
            at = at.counted_from(None)
        # Other ranks may still be in this epoch if they may end at different times.
        if (len(at.lanes) == at.deal.lanes or self._mode != "exact") and all(_unpack(lane)["ended"] for lane in at.lanes.values()):
            return self._beginning(at.epoch + 1, at.deal.lanes).counted_from(at)
        return at

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` be ``epoch``, from its beginning; a loaded state of that same epoch still continues where it was."""
        check_count("epoch", epoch, least=0, most=MOST)
        if self._resume and self._position.epoch == epoch:
            return
        lanes = self._at.deal.lanes if self._at is not None else None
        self._epoch, self._at, self._resume = epoch, self._beginning(epoch, lanes), False

    def with_epoch(self, *, samples: int | None = None, batches: int | None = None) -> PipeLoader:
        """Let each ``iter()`` give so many batches of all ranks together, and the next one go on where it was cut; gives the loader itself.

        The order within is still that of the epochs of the data, which follow each other without a break.

        With ``epoch_end="exact"`` and no ``drop_last``, the last batch of a lane may be smaller. With ``samples`` the pass then ends with the batch that makes
        the number full: it has at least so many samples, and less than a batch more, and ``len()`` is not known. With ``batches`` a small batch counts as one.
        Everywhere else all batches are whole, and a pass has exactly so many.

        Args:
            samples: of all ranks together; a multiple of ranks x batch size.
            batches: of all ranks together; a multiple of the ranks.

        Raises:
            ValueError: not one of the two is given, or it cannot be divided so, or ranks may end an epoch of the data at different times.
        """
        if (samples is None) == (batches is None):
            raise ValueError("with_epoch() takes samples= or batches=, one of them")
        ranks, size = self.rank.of, 1 if samples is None else self._batch_size
        count = check_count("samples" if batches is None else "batches", samples if batches is None else batches)
        if count % (ranks * size):
            each = f"{ranks} ranks{f' x {size} samples in a batch' if size > 1 else ''}"
            raise ValueError(f"{'batches' if samples is None else 'samples'}={count} cannot be divided by {each}: pass a multiple of {ranks * size}")
        if ranks > 1 and self._mode == "exact":
            raise ValueError("with several ranks, with_epoch() needs epoch_end='drop' or 'pad', so that all ranks go on to the next epoch of the data together")
        at = self._at
        if at is not None and (self._over(at) or not self._resume):  # the new pass counts from here on
            self._resume = self._resume or self._over(at)
            self._at = at.counted_from(None)
        self._stop_live("with_epoch() was called: continue with a new iter()")
        self._cut_in_samples = samples is not None and self._mode == "exact" and any(step.size > 1 and not step.drop_last for step in self._batching)
        self._cut = count if self._cut_in_samples else count // (ranks * size)
        return self

    def _over(self, at: _At | None) -> bool:
        """Whether all that with_epoch() wants of a pass was handed out at a position: the next pass goes on there."""
        return self._cut is not None and at is not None and (at.samples if self._cut_in_samples else at.given) >= self._cut

    def __repr__(self) -> str:
        return self._text

    def __getstate__(self) -> dict[str, Any]:
        """A copy stands where this one does, and has nothing that runs."""
        return {**self.__dict__, "_results": None, "_paused": None, "_live": None, "_last": None, "_inside": False}

    def __copy__(self) -> PipeLoader:
        return copy.deepcopy(self)

    def state_dict(self) -> State:
        """The positions of this rank's lanes behind the batch that was handed out last, as a dict of plain JSON types, new at each call.

        It is right at any time: before the first batch, after the last, after an exception, in a signal handler, from another thread.
        """
        at, recipe = self._position, self._recipe
        lanes = {str(number): _unpack(lane) for number, lane in at.lanes.items()}
        state = {
            "version": STATE_VERSION,
            "epoch": at.epoch,
            "seed": recipe.seed,
            "shards": recipe.shards,
            "fingerprint": recipe.fingerprint,
            **recipe.of_data,
            "graph": list(recipe.graph),
            "lane_count": at.deal.lanes,
            "rank": self.rank.number,
            "world_size": self.rank.of,
            "step": at.step,
            "epoch_end": self._mode,
            "batch_size": self._batch_size,
            "lanes": lanes,
            "counts": _total(lanes.values(), at.deal.counts if self.rank.number == 0 else {}),
        }
        if recipe.samples is not None:
            state["samples"] = recipe.samples
        if self._cut is not None:
            state["given"] = at.given
        if self._cut_in_samples:
            state["given_samples"] = at.samples
        if at.deal.history:
            state["deal"] = at.deal.as_json()
        return state

    @shortened
    def load_state_dict(self, state: State | list[State], *, moved: bool = False) -> None:
        """Let the next ``iter()`` continue from a state: of this rank of as many ranks, or of all ranks (``merge_states``) for any number of them.

        A list of the states of all ranks is merged. If ranks were in different epochs, which ``epoch_end="exact"`` allows, as many ranks continue each from
        its own; other numbers of ranks cannot.

        Args:
            state: what ``state_dict`` returned, a list of such, or what ``merge_states`` made of them.
            moved: the shards are those of the state, whatever their names and the index say: see ``WdsPipe.load_state_dict``.

        Raises:
            StateError: it was made by another pipeline, or it is the state of one rank of another number; the message says what to do.
        """
        self._go_to(self._place_of(state, moved=moved))

    def _go_to(self, at: _At) -> None:
        """Let the next ``iter()`` continue there."""
        self._stop_live("a state was loaded: continue with a new iter()")
        self._at, self._epoch, self._resume = at, at.epoch, True

    def _place_of(self, state: State | list[State], *, moved: bool = False) -> _At:
        """Where a state lets this loader continue; StateError as in ``load_state_dict``."""
        if isinstance(state, (list, tuple)):
            state = state_for(list(state), self.rank, moved=moved or self._recipe.data.moved)
        move, rank = Move(moved), self.rank
        saved = check_recipe(state, self._recipe, move)
        if saved.rank is None:
            raise damaged("it does not say of which rank it is")
        epoch, count = saved.epoch, saved.lane_count
        lanes = {number: self._checked_lane(number, lane, move) for number, lane in saved.lanes.items()}
        whole, own = are_all(lanes, range(count)), (saved.rank, saved.world_size) == tuple(rank)
        if own and not whole and not are_all(lanes, range(rank.number, count, rank.of)):
            raise damaged(f"it has lane {some(lanes)} of {count}")
        if not whole and not own:
            raise StateError(
                f"this is the state of rank {saved.rank} of {saved.world_size} alone, and this process is rank {rank.number} of {rank.of}: "
                "collect the states of all ranks and load merge_states(states) on each."
            )
        ends = saved.epoch_end, saved.batch_size
        alike = ends[0] == self._mode and (self._mode == "exact" or ends[1] == self._batch_size)
        if not alike and not whole:
            raise StateError(
                f"this is the state of one rank, of an epoch with epoch_end={shown(ends[0])} and batches of {ends[1]}, and this loader has "
                f"epoch_end={self._mode!r} and batches of {self._batch_size}: load merge_states(states) of all ranks' states on each, or keep these."
            )
        deal = Deal.first(count, self._source, epoch) if saved.deal is None else Deal.from_json(count, saved.deal, self._stage, epoch, move)
        batches = self._batches(deal) if alike else None
        if batches is not None and any(lane["delivered"] > batches for lane in lanes.values()):
            raise damaged(f"it has a lane that gave more than its {batches} batches")
        hosts = self._new_lanes()
        if (whole or self._mode != "exact") and all(lane["ended"] for lane in lanes.values()):
            at = self._beginning(epoch + 1, count if count % rank.of == 0 and count >= hosts else None)
        elif not whole or (alike and count % rank.of == 0 and count >= hosts and self._lanes in (None, count) and self._even(deal, lanes)):
            at = _At(epoch, deal, {number: _pack(lanes[number]) for number in range(rank.number, count, rank.of)}, saved.step)
        else:
            dealt = self._lanes or max(hosts, count // rank.of * rank.of)
            at = self._beginning(epoch, dealt)._replace(deal=deal_again(deal, dealt, lanes, self._stage, epoch))
            self._warn_of_dropped(at.deal)
        move.log()
        samples = saved.given * self._batch_size if saved.given_samples is None else saved.given_samples
        return at._replace(given=saved.given, samples=samples)

    def _warn_of_dropped(self, deal: Deal) -> None:
        """Say so where much of an epoch that is dealt again would be left out."""
        samples, batches = deal.samples(), self._batches(deal)
        if self._mode != "drop" or samples is None or batches is None:
            return
        left, total = sum(samples) - batches * self._batch_size * deal.lanes, sum(samples)
        if left * 4 > total:
            logger.warning(
                "dealt to %d lanes, %d of the %d samples that are left of the epoch make no full batch in every lane, and are dropped: use fewer lanes or "
                "epoch_end='pad' or 'exact' if that is not meant", deal.lanes, left, total,
            )  # fmt: skip

    def _checked_lane(self, number: int, lane: SavedLane, move: Move) -> LaneState:
        """What a state says of a lane; StateError if it cannot stand there."""
        position = None
        if lane.position is not None:
            position = self._stage.relocate(check_lane(lane, number, self._stage), move)
            self._stage.load(position)
        return {"url": lane.url, "delivered": lane.delivered, "ended": lane.ended, "position": position, "counts": lane.counts}

    def _even(self, deal: Deal, lanes: dict[int, LaneState]) -> bool:
        """Whether all ranks have equally many batches left in these lanes, where that matters."""
        batches = self._batches(deal)
        if batches is None:
            return True
        left = [0] * self.rank.of
        for number, lane in lanes.items():
            left[number % self.rank.of] += 0 if lane["ended"] else batches - lane["delivered"]
        return len(set(left)) == 1

    def counts(self) -> dict[str, int]:
        """This rank's samples of the current epoch, or the one that just ended, by what became of them; see ``Stream.counts``."""
        return self._counts(self._at or self._position)

    def _counts(self, at: _At) -> dict[str, int]:
        return _total(at.states.values(), at.deal.counts if self.rank.number == 0 else {})

    def _delivered(self, at: _At) -> int:
        """This rank's samples of an epoch that were handed out."""
        return self._counts(at)["delivered"]

    def stats(self) -> dict[str, float]:
        """How the current pass over the data goes, or the last one, as flat numbers for a logger.

        ``samples`` and ``batches`` of this rank in this pass, both and ``bytes`` (of the decompressed tars) also ``_per_second`` since its first ``next()``;
        ``wait_seconds`` that the caller waited for batches, and their share of the time. Of the time in which workers made batches, ``read_share`` was spent in
        reading (up to and with ``group_by_key``) and ``decode_share`` in the steps after it; ``stall_share``, a part of ``read_share``, in waiting for bytes of
        a store. Waiting is measured each time, the rest of reading at a part of the samples. ``held_samples`` in shuffle buffers; of the network ``requests``,
        ``retries``, ``bytes_fetched`` and ``stall_seconds`` that workers waited for bytes; ``epoch``, ``filtered``, ``skipped``, and ``lane_imbalance``, by
        how many batches the first lane is ahead of the last.
        """
        live, counts = self._last, self.counts()  # the pass speaks for itself: a state may have been loaded since
        found = {"epoch": float(self._position.epoch), "filtered": float(counts["filtered"]), "skipped": float(counts["skipped"])}
        if live is None:
            return found
        seconds, total, network = live.seconds, live.total, live.used()
        at, before = live.stands or (self._at or self._position, None)
        delivered = [lane["delivered"] for lane in at.states.values()]
        samples = 0 if before is None else self._delivered(at) - before
        return found | {
            "batches": float(live.batches),
            "samples": float(samples),
            "batches_per_second": live.batches / seconds,
            "samples_per_second": samples / seconds,
            "bytes_per_second": total.bytes_read / seconds,
            "wait_seconds": live.waited,
            "wait_share": live.waited / seconds,
            "read_share": total.reading / total.busy if total.busy else 0.0,
            "decode_share": 1 - total.reading / total.busy if total.busy else 0.0,
            "stall_share": min(network.stall_seconds, total.reading) / total.busy if total.busy else 0.0,
            **{name: float(value) for name, value in network._asdict().items()},
            "held_samples": float(total.held),
            "lane_imbalance": float(max(delivered) - min(delivered)),
        }

    def remaining(self) -> int | None:
        """How many batches the next pass gives to this rank, from a loaded state on too; None: that is not known."""
        at = self._position
        if self._cut is not None:
            return None if self._cut_in_samples else self._cut - at.given
        samples, batches = at.deal.samples(), self._batches(at.deal)
        if self._uncounted or samples is None:
            return None
        going = {number: lane for number, lane in at.states.items() if not lane["ended"]}
        if batches is not None:
            return sum(int(batches - lane["delivered"]) for lane in going.values())
        # By samples, since the batches before may have had another size.
        return sum(self._batches_of(samples[number] - sum(lane["counts"].get(name, 0) for name in COUNTED)) for number, lane in going.items())

    def close(self) -> None:
        """Stop the workers and close what is open; the state stays, and a further ``iter()`` starts new workers."""
        self._stop_live("it was closed")
        self._discard()

    def _discard(self) -> None:
        """Stop the workers and drop all that is in flight; positions are left alone."""
        self._stop_live("what it had in flight is gone")
        self._paused = None
        results, self._results = self._results, None
        if hasattr(results, "_workers"):  # a traceback may hold the results, and they hold the workers
            end_workers(results)
            # Who waits for a batch, in another thread or below the signal handler that this runs in, is to see that the workers are gone.
            results._workers_status = [True] * len(results._workers)  # type: ignore[union-attr]
        self._host.close()
        self._inside = False

    def __len__(self) -> int:
        """How many batches of an epoch this rank gives; TypeError if the samples are not counted."""
        if self._cut is not None and not self._cut_in_samples:
            return self._cut
        if unknown := self._length_unknown:
            raise TypeError(f"the number of batches is not known: {unknown}")
        lanes = self._at.deal.lanes if self._at is not None else self._new_lanes()
        deal = Deal.first(lanes, self._source, self._epoch)
        mine, batches = (deal.samples() or [])[self.rank.number :: self.rank.of], self._batches(deal)
        if batches is not None:
            return batches * len(mine)
        return sum(map(self._batches_of, mine))

    @property
    def _length_unknown(self) -> str | None:
        """Why there is no ``len()``, with the mend; None if there is."""
        if self._cut_in_samples:
            return "with_epoch(samples=...) counts samples, and the last batch of a lane may be smaller: pass batches=, or drop_last=True"
        return None if self._cut is not None else self._uncounted

    def _begin(self, before: _At | None) -> tuple[_At, Iterator[Result]]:
        """Start a pass: its position, and the results of its commands; ``before``: the pass of with_epoch goes on from there."""
        at = self._position if self._resume or self._over(self._at) else self._beginning(self._epoch, self._at.deal.lanes if self._at is not None else None)
        at = at if before is None else at.counted_from(before)
        self._at, self._epoch, self._resume = at, at.epoch + 1, False
        self._runs += 1
        batches = self._batches(at.deal)
        begins = {number: Begin(at.epoch, at.deal, lane, batches) for number, lane in at.states.items() if not lane["ended"]}
        self._commands.start(self._runs, begins)
        if not self._persistent or not all(worker.is_alive() for worker in getattr(self._results, "_workers", ())):
            self._results = None  # the old workers stop first
        if self._results is None:
            # Of the global generators in the workers: others on each rank, and after a resume.
            self._loader.generator.manual_seed(ordering.mix(self._recipe.seed, self.rank.number, at.epoch, len(at.deal.history), at.step))
            if self._num_workers:
                check_guarded()
                _with_workers.add(self)
            try:
                self._results = iter(self._loader)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                if re.search("pickle|local object", str(error)):
                    error.add_note(_NOT_PICKLED)
                raise
            make_terminate_kill(getattr(self._results, "_workers", ()))
        return at, self._results

    def _stop_live(self, why: str) -> None:
        live = None if self._live is None else self._live()
        if live is not None:
            live.stop(StateError(f"this iterator has been replaced: {why}."))


_with_workers: weakref.WeakSet[PipeLoader] = weakref.WeakSet()  # those that this process has started
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_with_workers.clear)


@atexit.register
def _close_all() -> None:
    """Close the loaders when Python ends, before multiprocessing ends their workers and DataLoader takes them for broken ones."""
    for loader in list(_with_workers):
        loader.close()


class _Paused(NamedTuple):
    """Where with_epoch() cut a pass, and what was in flight then."""

    at: _At
    run: int
    results: Iterator[Result]
    ahead: Result | None
    waiting: set[int]
    ended: dict[int, bytes]
    tally: Tally


class LoaderPass:
    """One iteration of a PipeLoader."""

    def __init__(self, loader: PipeLoader) -> None:
        self._loader = loader
        self._started = False
        self._error: Exception | None = None
        self._trace: TracebackType | None = None  # of the error, before it was raised: each time that it is, it grows
        self._at: _At | None = None  # None: not started
        self._run = -1
        self._results: Iterator[Result] = iter(())
        self._ahead: Result | None = None
        self._waiting: set[int] = set()  # the lanes that have not ended
        self._ended: dict[int, bytes] = {}  # those that have
        self._lack = Lack()  # of those that gave nothing
        self._bar: Any = None
        self._limited: dict[int, tuple[bytes, dict[str, int]]] = {}  # of each lane, what max_errors bounds at the state that it was taken from
        self._samples_before = 0  # of the epoch of the data, less those of earlier epochs in this pass
        self.tally = Tally(loader._network)

    def __iter__(self) -> LoaderPass:
        return self

    def __next__(self) -> Any:
        if self._error is not None:
            raise self._to_raise(self._error)
        loader = self._loader
        if loader._inside:
            if self._started:
                raise self.stop(RuntimeError("this iterator was interrupted; load_state_dict(state_dict()) and iter() go on"))
            loader._discard()
        loader._inside = self._started = True
        try:
            if self._at is None:
                self.tally.begin()
            start = time.perf_counter()
            if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
                with record_function("wds_pipes.PipeLoader"):
                    found = self._next()
            else:
                found = self._next()
            if not isinstance(found, Exception):
                self.tally.handed_over(start)
                if self._bar is not None:
                    self._bar.update()
        except Exception as error:  # a signal handler may raise one at any moment: that of DataLoader does so for a dead worker
            found = self.stop(_worker_error(error, self._results))
            loader._discard()
        if isinstance(found, Exception):
            loader._inside = False
            raise self._to_raise(found)  # all frames: set WDS_PIPES_FULL_TRACEBACK=1
        # From here to the return no signal handler runs: an interrupt comes before the position counts, or when the caller has the batch.
        batch, self._at = found
        loader._at = self._at
        self.tally.stands = self._at, self._samples_before
        loader._inside = False
        return batch

    def pause(self) -> _Paused:
        """Leave what is in flight with the loader, for the next pass of with_epoch()."""
        assert self._at is not None
        self._loader._paused = paused = _Paused(self._at, self._run, self._results, self._ahead, self._waiting, self._ended, self.tally)
        return paused

    @property
    def stands_at_cut(self) -> bool:
        """Whether all that with_epoch() asks for was handed out, and the end was not seen."""
        loader, at = self._loader, self._at
        return self._error is None and loader._at is at and loader._over(at)

    def _next(self) -> tuple[Any, _At] | Exception:
        """The next batch and the position behind it; or what to raise."""
        loader, at = self._loader, self._at or self._start()
        if loader._over(at):
            loader._at, loader._resume = at, True
            self.pause()
            return self.stop(StopIteration())
        if self._ahead is None and loader._cut is not None:
            self._commit_ends(at)
            self._samples_before -= loader._delivered(at)
            self.tally.begin_run()
            at = self._go_on(at)  # the next epoch of the data, without a break
            self._samples_before += loader._delivered(at)
            self.tally.stands = at, self._samples_before
        _, lane, batch, state, _, error, _ = self._ahead or _AT_END
        if state is None:
            if error is None and (lacking := self._all_lacking(at)) is not None:
                return self.stop(lacking)  # the state stays at the beginning of the epoch
            if loader._limits and error is None:
                error = self._too_many(at, {**at.lanes, **self._ended})
            self._commit_ends(at)
            return self.stop(error or StopIteration())
        self._ahead = self._fetch()  # rule 5; what goes wrong with it is for the next call
        if loader._limits and (many := self._too_many(at, {**at.lanes, lane: state, **self._ended})) is not None:
            return self.stop(many)
        samples = at.samples + (_delivered(state) - _delivered(at.lanes[lane]) if loader._cut_in_samples else 0)
        return batch, _At(at.epoch, at.deal, {**at.lanes, lane: state, **self._ended}, at.step + 1, at.given + 1, samples)

    def _too_many(self, at: _At, lanes: dict[int, bytes]) -> Exception | None:
        """The error where the lanes of this rank have skipped more than max_errors of a step allows, together."""
        for number, lane in lanes.items():
            if self._limited.get(number, (None,))[0] is not lane:
                counts = _unpack(lane)["counts"]
                self._limited[number] = lane, {name: counts.get(name, 0) for name in self._loader._limits}
        for name, limit in self._loader._limits.items():
            before = at.deal.counts.get(name, 0) // self._loader.rank.of  # whose lanes these were is not known any more
            count = before + sum(self._limited[number][1][name] for number in lanes)
            if count > limit:
                step = name.removeprefix(LIMITED).split()[0]
                return (ShardError if step in ("open_shards", "load_tar") else SampleError)(
                    f"{step}() has skipped {plural(count, 'error')} in this epoch, in all lanes of this rank together, and max_errors={limit}. "
                    "The log names the first ones: mend the data, or allow more."
                )
        return None

    def _all_lacking(self, at: _At) -> Exception | None:
        """The error where no lane of this rank gave anything in the epoch, since the samples lack the fields that are kept."""
        if at.deal.counts.get("delivered") or any(map(_delivered, at.lanes.values())):
            return None
        counts = _total(map(_unpack, self._ended.values()), {})
        if self._lack.explains(counts):
            return self._lack.error()
        warn_of_nothing(counts)
        return None

    def _commit_ends(self, at: _At) -> None:
        """Nothing comes behind ``at`` but the ends of lanes."""
        self._at = self._loader._at = at._replace(lanes={**at.lanes, **self._ended})

    def _start(self) -> _At:
        loader = self._loader
        paused, loader._paused = loader._paused, None
        live = None if loader._live is None else loader._live()
        if live is not None and live.stands_at_cut:  # who iterated over it has counted, and did not ask for its end
            loader._resume = True
            paused = live.pause()
            live.stop(StopIteration())
            loader._paused = None
        loader._stop_live("a newer one was started, and a loader has one at a time; build a second loader to iterate twice at once")
        loader._live = weakref.ref(self)
        at = paused.at if paused is not None and loader._resume and loader._at is paused.at else None
        if paused is not None and at is not None:
            # with_epoch() cut the stream there: take up what was fetched ahead.
            self._run, self._results, self._ahead, self._waiting, self._ended = paused.run, paused.results, paused.ahead, paused.waiting, paused.ended
            self._at = loader._at = at = at.counted_from(None)
            loader._resume = False
            self.tally.begin_run(going_on=paused.tally)
        else:
            at = self._go_on()
        self._samples_before = loader._delivered(at)
        self.tally.stands = at, self._samples_before
        loader._last = self.tally
        if loader._progress is not None:
            self._bar = loader._progress(initial=at.given or at.step, total=None if loader._length_unknown else len(loader), unit="batch")
        return at

    def _go_on(self, before: _At | None = None) -> _At:
        """Begin a run over an epoch of the data, or its rest."""
        at, self._results = self._loader._begin(before)
        self._at, self._run, self._ended, self._lack = at, self._loader._runs, {}, Lack()
        self._waiting = {number for number, lane in at.states.items() if not lane["ended"]}
        self._ahead = self._fetch()
        return at

    def _fetch(self) -> Result | None:
        """The next batch, or what went wrong instead of it; None at the end of the epoch."""
        while self._waiting:
            try:
                result = next(self._results)
            except Exception as error:
                return self._run, -1, None, None, False, _worker_error(error, self._results), None
            run, lane, batch, state, ended, _, spent = result
            if run != self._run or lane not in self._waiting:
                continue
            if spent is not None:
                self.tally.add(lane, spent)
            if not ended:
                return result
            assert state is not None
            self._waiting.discard(lane)
            self._loader._commands.end(lane)
            self._ended[lane] = state
            if batch is not None:
                self._lack = Lack.of_all((self._lack, batch))
        return None

    def stop(self, error: Exception) -> Exception:
        """Let every further ``next()`` raise ``error``, unless the iterator has stopped already; gives what it will raise."""
        if self._error is None:
            self._error = shorten(error)
            self._trace = error.__traceback__
            self.tally.end()
            if self._bar is not None:
                self._bar.close()
            broken = not isinstance(error, (StopIteration, StateError))
            paused = self._loader._paused is not None and self._loader._paused.run == self._run
            if not paused and (broken or not self._loader._persistent):
                self._loader._results = None
            results, self._results, self._ahead = self._results, iter(()), None  # the results keep the workers alive
            if isinstance(error, WorkerError) and hasattr(results, "_workers"):
                end_workers(results)  # a traceback may hold them: they would be killed when the process ends, and DataLoader would take that for an error
        return self._error

    def _to_raise(self, error: Exception) -> Exception:
        """The error itself; but a new StopIteration, since its traceback would keep the pass, and with it the workers, until the garbage collector runs."""
        return StopIteration() if isinstance(error, StopIteration) else error.with_traceback(self._trace)


def _worker_error(error: Exception, results: object) -> Exception:
    """What DataLoader raises when a worker dies or is late, as an error of ours; ``results``: of the workers, if they were started."""
    if not isinstance(error, RuntimeError) or "DataLoader" not in str(error):
        return error
    if str(error).startswith("DataLoader timed out"):
        why = "no worker died. Reading or a step of the pipe takes longer than that for a batch: allow more, or look what the workers wait for"
        told = WorkerError(f"{error}, timeout_seconds: {why}. state_dict() is still good.")
    else:
        codes = {worker.exitcode for worker in getattr(results, "_workers", ())}
        why = why_ended(codes, str(error))
        told = WorkerError(f"{str(error).strip().removesuffix('.')}. {why}. state_dict() is still good.")
    told.__cause__ = error
    return told


def merge_states(states: list[State], *, moved: bool = False) -> State:
    """The states of all ranks, taken at the same step, as one that any number of ranks and workers can load.

    Ranks may read the same shards at different places, as on disks of their own.

    Args:
        states: what ``state_dict`` of each rank's loader returned.
        moved: the shards of all ranks are the same, whatever their names and the index say.

    Raises:
        StateError: a rank is missing or there twice, or they were taken at different steps or by different pipelines.
    """
    if not states or not all(isinstance(state, dict) and "rank" in state for state in states):
        raise StateError("merge_states() takes the list of what state_dict() of each rank's PipeLoader returned, untouched")
    saved = [read_state(state) for state in states]
    world, first = saved[0].world_size, states[0]
    ranks = [state.rank for state in saved if state.rank is not None]
    if len(ranks) != world or not are_all(set(ranks), range(world)):
        there, double = set(ranks), {rank for rank, count in Counter(ranks).items() if count > 1}
        facts = [f"rank {some(rank for rank in range(world) if rank not in there)} is missing"] if not are_all(there, range(world)) else []
        facts += [f"rank {some(sorted(double))} is there more than once"] if double else []
        raise StateError(f"these are not the states of ranks 0 to {world - 1}: {' and '.join(facts)}. Collect the state of each rank once.")
    _check_alike(states, *_OF_A_RUN, "deal", "epoch")
    _check_data(saved, moved)
    for state in saved:
        if not are_all(state.lanes, range(state.rank or 0, state.lane_count, world)):
            raise damaged(f"rank {state.rank} of {world} has lane {some(state.lanes)} of {state.lane_count}")
    going = [state for state in saved if not all(lane.ended for lane in state.lanes.values())]
    if len({state.step for state in going}) > 1 or (going and max(state.step for state in saved) > going[0].step):
        steps = ", ".join(f"rank {state.rank} at {state.step}" for state in saved)
        raise StateError(f"the states were taken at different steps ({steps:.1000}): samples would be lost or repeated. Save all ranks at the same step.")
    counts: dict[str, int] = {}
    for state in saved:
        for name, count in state.counts.items():
            counts[name] = counts.get(name, 0) + count
    lanes = {number: lane for state in states for number, lane in state["lanes"].items()}
    step = max(state.step for state in saved)  # so that a run that is repeated from here writes what it wrote the first time
    merged = {**first, "rank": 0, "world_size": 1, "step": step, "lanes": {number: lanes[number] for number in sorted(lanes, key=int)}, "counts": counts}
    try:
        return copy.deepcopy(merged)
    except RecursionError as error:
        raise damaged("it is nested too deeply") from error


_OF_A_RUN = ("version", "seed", "shards", "graph", "samples", "lane_count", "world_size", "epoch_end", "batch_size")


def _check_alike(states: list[State], *names: str) -> None:
    """StateError if states differ in something."""
    for name in names:
        if any(state.get(name) != states[0].get(name) for state in states):
            raise StateError(f"the states differ in {name!r}: {', '.join(shown(state.get(name)) for state in states[:5])}. Take them of one run, at one step.")


def _check_data(saved: list[Saved], moved: bool) -> None:
    """StateError if states are not of the same shards, which each rank may have at a place of its own."""
    first = Data(saved[0].fingerprint, saved[0].data)
    for state in saved[1:]:
        if Move(moved).problem(Data(state.fingerprint, state.data), first) is not None:
            raise StateError(
                f"the states of ranks {saved[0].rank} and {state.rank} differ in 'fingerprint' and 'data', so that they are of other shards. Take them of one "
                "run, at one step. If their shards are the same, under other names, pass moved=True."
            )


def state_for(states: list[State], rank: Rank, *, moved: bool = False) -> State:
    """What a rank loads of the states of all ranks: ``merge_states``, or its own state where the ranks were not in step and need not be.

    With ``epoch_end="exact"`` a rank may have fewer batches in an epoch than another. When one has begun the next, their epochs and steps differ, and no deal
    fits all of them; but each can go on by itself.
    """
    try:
        return merge_states(states, moved=moved)
    except StateError as error:
        try:
            saved = [read_state(state) for state in states]
        except StateError:
            raise error from None
        in_step = not any(state.epoch > 0 for state in saved)  # in the first epoch
        if in_step or sorted(state.rank or 0 for state in saved) != list(range(len(saved))) or any(state.epoch_end != "exact" for state in saved):
            raise
        _check_alike(states, *_OF_A_RUN)
        _check_data(saved, moved)
        if len(states) != rank.of:
            raise StateError(f"{error} With epoch_end='exact' that may be meant: on {len(states)} ranks each continues from its own state.") from None
        return next(state for state, of in zip(states, saved, strict=True) if of.rank == rank.number)


def _delivered(lane: bytes) -> int:
    """How many samples of a lane were handed out."""
    count: int = _unpack(lane)["counts"].get("delivered", 0)
    return count


def _limits(stage: Stage[Any]) -> dict[str, int]:
    """The max_errors of the steps that have one, by the names of their counts; steps of one name in the sources of a mix share theirs."""
    found: dict[str, int] = {}
    step: Stage[Any] | None = stage
    while step is not None:
        if isinstance(step, Tolerant) and step.limited is not None and step.max_errors is not None:
            found[step.limited] = step.max_errors
        if isinstance(step, Mix):
            for source in step.sources.values():
                for name, limit in _limits(source).items():
                    found[name] = found.get(name, 0) + limit
        step = step.source
    return found


def _as_it_is(result: Result) -> Result:
    return result


def _total(lanes: Iterable[LaneState], before: dict[str, int]) -> dict[str, int]:
    total = dict.fromkeys(COUNTED, 0)
    for counts in (before, *(lane["counts"] for lane in lanes)):
        for name, count in counts.items():
            if count and not name.startswith(LIMITED):  # most are 0, and this is done for each lane of a state
                total[name] = total.get(name, 0) + count
    return total
