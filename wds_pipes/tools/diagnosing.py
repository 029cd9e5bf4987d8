"""Finds what limits a pipeline, by running it, or a store, by reading from it.

Rules:
1. Everything is measured: no rate of a processor, a disk or a link is assumed. The pipeline runs
   twice for a part of the time: as it is, with its workers, for its rate and the shares of
   ``stats()``; and in this process with a clock after each step, for what each step takes.
2. A step either computes or waits. Computing is the processor time of the thread, which hardly
   grows when other processes take the processor. From the rest, the time in which the thread was
   ready and had no processor is subtracted, where the system tells it (Linux). So another load on
   the machine does not look like waiting.
3. What a change brings is only said where a second run with it was measured: with more workers.
   Other changes are the caller's, and only named.
4. The part that takes the most time of a worker is the limit, unless the workers are not: because
   this process cannot take more batches, or lanes have no shards, or processor cores are idle.
5. Of shards in a store, the time to the first byte and the rate over more and more connections are
   measured first.
6. All of this runs in a thread, since a step or a store may never return. If it has not ended some
   seconds after its time, the thread is abandoned, and the step in which the time went is named.
"""

from __future__ import annotations

import copy
import io
import math
import multiprocessing.resource_sharer
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from wds_pipes.core.chain import Chain, linked
from wds_pipes.core.options import check_count
from wds_pipes.core.stage import END, Stage
from wds_pipes.core.stream import Stream
from wds_pipes.core.words import plural
from wds_pipes.datapipes import ShardList
from wds_pipes.display.text import shown
from wds_pipes.errors import WdsError
from wds_pipes.io import compression
from wds_pipes.io.expand import expand
from wds_pipes.io.open import Opener, is_remote
from wds_pipes.io.remote.budget import Reading
from wds_pipes.io.remote.queue import ReadQueue
from wds_pipes.io.threads import OverdueError, in_time
from wds_pipes.io.urls import hide
from wds_pipes.loader.pipe_loader import PipeLoader, progress_of, with_workers
from wds_pipes.loader.stats import SHARES, limit_in_words, limit_of_ranks
from wds_pipes.loader.transport import Inbox, Outbox
from wds_pipes.stages.threaded import Threaded
from wds_pipes.tools.training import are_shards, loader_of

_BATCH = 32  # samples in a batch of shards, or of a pipe without batches
_FASTER = 1.5  # storage that is read alone is faster than a pipeline from this factor on
_REQUESTS = 5  # of which the time to the first byte is measured
_CONNECTIONS = (1, 2, 4, 8, 16, 32)
_WORTH_CONNECTIONS = 1.15  # twice as many connections are worth it if they transfer so many times as much
_BUSY = 0.8  # a process that computes for this share of the time cannot do more
_WORTH = 1.1  # a change that brings less than this is not worth a word
_GRACE = 25.0  # seconds after its time in which the measurement must end
_SEARCH = 10.0  # seconds in which the step is searched that does not return
_PACKAGE = str(Path(__file__).parents[1])
_STORED_BYTES = 8 << 20  # compressed bytes of the measurement of decompression


@dataclass
class Diagnosis:
    """What limits a pipeline.

    Attributes:
        limit: ``"storage rate"`` (the store or disk delivers no more bytes), ``"storage latency"``
            (too few requests are in flight), ``"decompression"``, ``"reading"`` (of the tars:
            nothing else is slow), ``"decoding"``, ``"function"`` (one of the caller's, in
            ``step``), ``"collation"``, ``"step"`` (any other), ``"transport"`` (of batches between
            processes), ``"main process"`` (such as ``on_device``), ``"workers"`` (too few),
            ``"shards"`` (fewer than lanes), ``"rank"`` (one rank is slower than the others),
            ``"training"`` (the training loop: the pipeline is faster), ``"hang"`` (``step`` does
            not return), or ``"data"`` (the training waits, and no pipeline was named).
        step: the part of the pipeline that takes the most time of a worker, such as
            ``map_samples(augment)``; or the rank.
        samples_per_second: of the pipeline as it is; 0: it was not run.
        gain: how many times as many samples a second the pipeline had in a second run with
            ``change``; 1: no more, or this was not measured.
        change: what to change.
        microseconds: the time that each part takes for a sample, in one worker.
        sentences: what the limit is, what to change, and what that brought; of shards in a store,
            also what the link transfers.
        first_bytes: of shards in a store, the seconds to the first byte of each of some requests.
        link: of shards in a store, the MB (10^6 bytes) per second by the number of connections.
    """

    limit: str
    step: str = ""
    samples_per_second: float = 0.0
    gain: float = 1.0
    change: str = ""
    microseconds: dict[str, float] = field(default_factory=dict)
    sentences: list[str] = field(default_factory=list)
    first_bytes: list[float] = field(default_factory=list)
    link: dict[int, float] = field(default_factory=dict)


def doctor(
    what: Any = None,
    *,
    seconds: float = 20.0,
    max_samples: int | None = None,
    cores: int | None = None,
    needs: float | None = None,
    stats: Sequence[Mapping[str, float]] | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Diagnosis:
    """Run a pipeline for a bounded time, and find what limits it and what to change. Where that
    is more workers, it runs once more with them, to see what they bring.

    Args:
        what: the PipeLoader of a training, whose position changes; ``"module:function"``, a
            function without arguments that returns it; or shards, which are read without decoding,
            and whose store is measured.
            When an epoch ends, the next one begins, so small local data mostly comes from the
            memory of the machine. None: there are only ``stats``.
        seconds: how long to measure, about. It ends 25 seconds later at the latest, and 10 more if
            it hangs.
        max_samples: take at most about this many samples in each run; None: no limit.
        cores: how many processor cores the workers of this rank may use; None: all of the machine.
        needs: how many samples a second the training takes on this rank, if that is known.
        stats: what ``PipeLoader.stats_of_ranks`` returned in the training. They say whether a rank
            waits for data, and whether one waits more than the others.
        storage_options: how to reach the storage of shards.

    Raises:
        ValueError: there is nothing to run, no such function, the pipeline yields nothing, a
            function of the caller has raised, or an argument does not fit.
        ShardError, SampleError, WorkerError: as during an iteration.
    """
    for name, value in (("seconds", seconds), ("needs", needs)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name} must be a positive number, not {value!r}")
    most = math.inf if max_samples is None else check_count("max_samples", max_samples)
    cores = os.cpu_count() or 1 if cores is None else check_count("cores", cores)
    if stats is not None:
        found = _of_ranks(stats)
        if found.limit != "data" or what is None:
            return found
    if what is None:
        raise ValueError("there is nothing to run: name shards or module:function, or pass the stats of a training")
    if isinstance(what, str) and what.endswith(".py"):
        raise ValueError(
            f"{what} is a script, not a shard: name its function that returns the PipeLoader, in the directory of the "
            f"script, as {Path(what).stem}:FUNCTION"
        )
    limit, is_pipeline = seconds + _GRACE, isinstance(what, PipeLoader) or not are_shards(what)
    shards = [] if is_pipeline else expand(what, storage_options)
    try:
        loader = in_time(limit, lambda: _loader(shards or what, storage_options))
    except OverdueError:
        return _hanging(f"{what}()", limit, "the function that returns the PipeLoader")
    try:
        return in_time(limit, lambda: _diagnosed(loader, cores, seconds, most, needs=needs, shards=shards))
    except OverdueError:
        return _stuck(progress_of(loader).editable.stage, limit)
    finally:
        with suppress(OverdueError):
            in_time(_GRACE, loader.close)


def _loader(what: Any, storage_options: dict[str, Any] | None) -> PipeLoader:
    if isinstance(what, PipeLoader):
        return what
    if are_shards(what):
        pipe = ShardList(what, storage_options=storage_options).open_shards().load_tar().group_by_key()
        return PipeLoader(pipe, batch_size=_BATCH, collate="list")
    try:
        return loader_of(what)
    except Exception as error:
        raise _of_caller(error) from error


def _diagnosed(
    loader: PipeLoader, cores: int, seconds: float, most: float, *, needs: float | None, shards: Sequence[str]
) -> Diagnosis:
    """Measure a pipeline, and before it the link to the store of ``shards``, if some were named."""
    link = None
    try:
        if shards and is_remote(shards[0]):
            seconds /= 2
            link = _Link(shards, seconds, _reader(progress_of(loader).editable.stage)[1].reading)
        try:
            run = _Run(loader, cores, 0.3 * seconds, most)
        finally:
            loader.close()
        if needs is not None and run.rate >= needs:
            why = f"the training loop, which takes {needs:,.0f} samples/s of {run.rate:,.0f}"
            return run.diagnosis("training", why, "leave the pipeline as it is")
        run.measure(0.3 * seconds, most)
        found = _found(run, 0.15 * seconds)
        if link is not None:
            found.first_bytes, found.link = link.first_bytes, link.rates
            found.sentences.append(link.sentence)
        return found
    except Exception as error:
        if progress_of(loader).workers.count and not isinstance(error, WdsError):
            _raise_here(progress_of(loader).editable.stage, seconds)
        raise _of_caller(error) from error


def _raise_here(stage: Stage[Any], seconds: float) -> None:
    """Run a pipeline in this process, to see in which line it raises what a worker has raised."""
    end = time.perf_counter() + seconds
    try:
        for _ in Stream(stage):
            if time.perf_counter() > end:
                return
    except Exception as error:
        raise _of_caller(error) from error


# What does not return, or raises


def _hanging(step: str, seconds: float, why: str) -> Diagnosis:
    change = "make it return, or raise an error, as with a timeout"
    return Diagnosis(
        "hang", step, change=change, sentences=limit_in_words(why, change, f"No batch has come in {seconds:.0f} s")
    )


def _stuck(stage: Stage[Any], seconds: float) -> Diagnosis:
    """Return the diagnosis of a pipeline that has not ended its run in ``seconds``: the step in
    which the time goes in this process.
    """
    last, clock = _clocked(stage)
    with suppress(OverdueError):
        in_time(_SEARCH, lambda: next(iter(Stream(last))))
        return _hanging(
            "workers", seconds, "the worker processes: in this process a batch comes, and from them none does"
        )
    step, spent = clock.slowest(time.perf_counter())
    return _hanging(step, seconds, f"{step}, which has not returned for {spent:.0f} s in this process")


def _of_caller(error: Exception) -> Exception:
    """Return an error that says where the caller's own code has raised, if it has; else the error
    itself.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_PACKAGE)]
    notes = [note for note in getattr(error, "__notes__", ()) if "\n" not in note]
    if isinstance(error, WdsError) or not (own or notes) or (not notes and frames[-1] not in own):
        return error
    place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return ValueError(": ".join([f"{type(error).__name__}: {hide(str(error))}{place}", *notes]))


# What is measured


class _Link:
    """The link to a store, measured with more and more connections, until more of them do not help.

    Args:
        shards: shards in it.
        seconds: how long to measure, about.
        reading: how they are read.

    Attributes:
        first_bytes: the seconds to the first byte of each of some requests.
        rates: MB per second, by the number of connections.
    """

    def __init__(self, shards: Sequence[str], seconds: float, reading: Reading) -> None:
        self.first_bytes, self.rates = list[float](), dict[int, float]()
        opener = Opener(replace(reading, connections=1))
        for turn in range(_REQUESTS):
            start = time.perf_counter()
            opener.open(shards[turn % len(shards)]).close()
            self.first_bytes.append(time.perf_counter() - start)
        best = 0.0
        for count in _CONNECTIONS:
            opener = Opener(replace(reading, connections=count))
            self.rates[count] = rate = _rate(shards, seconds / len(_CONNECTIONS), opener)
            if rate < best * _WORTH_CONNECTIONS:
                return
            best = rate

    @property
    def sentence(self) -> str:
        """What was measured, in words."""
        first, usual = (1e3 * each for each in (self.first_bytes[0], statistics.median(self.first_bytes[1:])))
        rates = ", ".join(f"{rate:,.3g} MB/s over {count}" for count, rate in self.rates.items())
        return (
            f"The first byte comes after {usual:.0f} ms (that of the first request after {first:.0f} ms), and the link "
            f"transfers {rates} connections."
        )


def _rate(shards: Sequence[str], seconds: float, opener: Opener) -> float:
    """Return the MB per second that arrive, whether or not they were read from the streams."""
    buffer, start = bytearray(1 << 20), time.perf_counter()
    while True:
        queue = ReadQueue(opener.client)
        try:
            streams = [opener.open(shards[0], 0, queue)]
            streams += [opener.open(shard, 0, queue, wait=False) for shard in shards[1:16]]
            for stream in streams:
                with stream:
                    while stream.readinto(buffer):  # type: ignore[attr-defined]
                        if (passed := time.perf_counter() - start) > seconds:
                            return opener.used.bytes_fetched / passed / 1e6
        finally:
            queue.close()


@dataclass
class _Part:
    """What a part of the work takes for a sample.

    Attributes:
        kind: what ``Diagnosis.limit`` calls it.
        name: its name.
        threads: how many threads share the work.
        computes: seconds of processor time.
        waits: seconds in which it does nothing.
    """

    kind: str
    name: str
    threads: int = 1
    computes: float = 0.0
    waits: float = 0.0

    @property
    def seconds(self) -> float:
        return (self.computes + self.waits) / self.threads


@dataclass
class _Clock:
    """The time that passed in a step and all steps before it.

    Attributes:
        step: the step; with several that run as one reader, the last of them.
        below: the clocks of its sources.
        threads: how many threads the step has, whose work is done in this one.
        items: how many items it has yielded.
        passed: seconds.
        computed: seconds of processor time.
        opened: its running copies.
        since: when the item that is waited for was requested; 0: none is.
    """

    step: Stage[Any]
    below: list[_Clock]
    threads: int = 1
    items: int = 0
    passed: float = 0.0
    computed: float = 0.0
    opened: list[Stage[Any]] = field(default_factory=list)
    since: float = 0.0

    def slowest(self, now: float) -> tuple[str, float]:
        """The name of the step in which most of the time went up to now, and its seconds."""
        own = self._spent(now) - sum(clock._spent(now) for clock in self.below)
        name = _name(self.step) if self.below else "reading"
        return max([(name, own), *(clock.slowest(now) for clock in self.below)], key=lambda found: found[1])

    def _spent(self, now: float) -> float:
        return self.passed + (now - self.since if self.since else 0.0)

    @property
    def bytes_read(self) -> int:
        """How many bytes of tars were read."""
        return sum(Chain(running).bytes_so_far for running in self.opened)

    def add_to(self, parts: dict[str, _Part], waiting: float, scale: float) -> None:
        """Add the times of this step alone, and of those before it.

        Args:
            parts: to what they are added, by name.
            waiting: the share of the time without a processor in which it was not needed.
            scale: what the times are multiplied by.
        """
        computes = self.computed - sum(clock.computed for clock in self.below)
        waits = self.passed - sum(clock.passed for clock in self.below) - computes
        name = _name(self.step) if self.below else "reading"
        part = parts.setdefault(name, _Part(_kind(self.step) if self.below else name, name, self.threads))
        part.computes += computes * scale
        waits_in = part if self.below else parts.setdefault("storage", _Part("storage", "storage"))
        waits_in.waits += max(0.0, waits) * waiting * scale
        if self.step.keeps_count and len(self.below) == 1 and (taken := self.below[0].items):
            # a shuffle buffer that fills up takes more than it yields
            scale *= min(1.0, self.items * (self.step.items_per_batch or 1) / taken)
        for clock in self.below:
            clock.add_to(parts, waiting, scale)


class _Clocked(Stage[Any]):
    """Yields the items of its source, and measures the time until each comes."""

    scope = "item"
    keeps_count = True
    source: Stage[Any]

    def __init__(self, source: Stage[Any], clock: _Clock) -> None:
        super().__init__(source)
        self.clock = clock

    def run(self) -> Iterator[Any]:
        clock, items, item = self.clock, self.source.items, None
        clock.opened.append(self.source)
        while item is not END:
            clock.since, computed = time.perf_counter(), time.thread_time()
            item = next(items, END)
            clock.computed += time.thread_time() - computed
            clock.passed, clock.since = clock.passed + time.perf_counter() - clock.since, 0.0
            if item is not END:
                clock.items += 1
                yield item


def _clocked(last: Stage[Any]) -> tuple[Stage[Any], _Clock]:
    """Return a copy of a chain with a clock after each step, and the last clock. The steps up to
    the one that makes samples have one clock together, since they run as one reader.
    """
    first: Any
    first, *steps = Chain(last).steps
    branches = {name: _clocked(branch) for name, branch in first.branches.items()}
    reading = next((place for place, step in enumerate(steps, 1) if step.gives == "samples"), 0)
    if branches:
        first, reading = copy.copy(first), 0
        first.sources = {name: stage for name, (stage, _) in branches.items()}
    stage: Any = linked(first, steps[:reading])
    clock = _Clock(stage, [below for _, below in branches.values()])
    stage = _Clocked(stage, clock)
    for step in steps[reading:]:
        stage = linked(stage, [step])
        clock = _Clock(stage, [clock])
        if isinstance(stage, Threaded) and stage.threads:
            clock.threads, stage.threads = stage.threads, 0
        stage = _Clocked(stage, clock)
    return stage, clock


def _name(step: Stage[Any]) -> str:
    """Return a step with the functions that it calls."""
    function = getattr(step, "fn", getattr(getattr(step, "pipe", None), "fn", None))
    called = [each for each in (*getattr(step, "called", [function]), getattr(step, "collate", None)) if callable(each)]
    names = ", ".join(map(shown, called or getattr(step, "specs", [])))
    return f"{step._in_graph(counted=False).name}({names})"


def _kind(step: Stage[Any]) -> str:
    """Return what ``Diagnosis.limit`` calls a step."""
    if step.items_per_batch is not None:
        return "collation"
    name = _name(step)
    return "decoding" if name.startswith("decode") else "step" if name.endswith("()") else "function"


class _Run:
    """A pipeline that was run with its workers, and what its parts take.

    Args:
        loader: the pipeline, which is run from its first batch on.
        cores: how many processor cores there are.
        seconds: for how long.
        most: for how many samples, at most.

    Attributes:
        stage: the pipeline.
        workers: how many worker processes it has.
        active: how many of them have shards; 1 also if there are none, and this process reads.
        shards: how many shards it has for this rank; any number if they are divided.
        cores: as above.
        rate: samples per second.
        size: samples in a batch.
        main: seconds of processor time that this process takes for a sample, beside workers.
        stalled: the share of the time in which workers waited for bytes of a store.
        opening: the part of ``main`` in which a batch is received.
        tar_bytes: of a sample.
        parts: the times of the parts, by name.
    """

    opening = tar_bytes = 0.0

    def __init__(self, loader: PipeLoader, cores: int, seconds: float, most: float) -> None:
        batches, count, progress, passed = _endless(loader), 0, progress_of(loader), 0.0
        next(batches)
        size = loader.stats()["samples"]
        begin, computed = time.perf_counter(), time.thread_time()
        while not count or (passed < seconds and count * size < most):
            next(batches)
            count, passed = count + 1, time.perf_counter() - begin
        computed, stats = time.thread_time() - computed, loader.stats()
        self._again = loader, seconds, most
        self.size, self.stalled = stats["samples"] / stats["batches"], stats["stall_share"]
        self.stage, self.workers, self.cores = progress.editable.stage, progress.workers.count, cores
        root = Chain(self.stage).root
        whole = root.epoch_order.divides_shards and root.epoch_order.sample_counts is None
        self.shards = max(1, (root.which_data().shards or 0) // loader.rank.of) if whole else sys.maxsize
        self.active = max(1, min(self.workers, self.shards))
        self.main = computed / (count * self.size) if self.workers else 0.0
        self.rate, self.parts = count * self.size / passed, dict[str, _Part]()

    def measure(self, seconds: float, most: float) -> None:
        """Run the chain in this process, with a clock after each step, as long."""
        stage, clock = _clocked(self.stage)
        outbox, inbox, threads, packing = Outbox(), Inbox(4), torch.get_num_threads(), 0.0
        next(_endless(Stream(self.stage)))  # imports libraries, and opens connections
        torch.set_num_threads(1)  # as in a worker
        begin, delay, batches = time.perf_counter(), _delay(), _endless(Stream(stage))
        try:
            while not clock.items or (time.perf_counter() - begin < seconds and clock.items * self.size < most):
                batch = next(batches)
                if self.workers:
                    packs = time.thread_time()
                    message = outbox.pack(batch)
                    opens = time.thread_time()
                    inbox.open(message)
                    packing, self.opening = packing + opens - packs, self.opening + time.thread_time() - opens
        finally:
            torch.set_num_threads(threads)
            multiprocessing.resource_sharer.stop()  # a thread, which has sent the descriptors of blocks
        samples = clock.items * self.size
        idle, share = max(clock.passed - clock.computed, 1e-9), clock.passed / (time.perf_counter() - begin)
        clock.add_to(self.parts, max(0.0, 1 - (_delay() - delay) * share / idle), 1 / samples)
        self.opening, self.tar_bytes = self.opening / samples, clock.bytes_read / samples
        reading, storage = self.parts["reading"], self.parts["storage"]
        unpacking = min(reading.computes, _unpacking(self.stage) * self.tar_bytes)
        reading.computes -= unpacking
        self.parts["decompression"] = _Part("decompression", "decompression", 1, unpacking)
        self.parts["transport"] = _Part("transport", "transport", 1, packing / samples)
        stalled = min(self.stalled, 0.99)  # with all workers, which share the link
        storage.waits = max(storage.waits, (self.seconds - storage.waits) * stalled / (1 - stalled))

    @property
    def seconds(self) -> float:
        """How long a sample takes in a worker."""
        return sum(part.seconds for part in self.parts.values())

    @property
    def computes(self) -> float:
        """How many of these seconds are processor time."""
        return sum(part.computes for part in self.parts.values())

    def estimate(self, workers: int) -> float:
        """Return how many times as many samples a second more workers would bring at most."""
        before = max(self.seconds / self.active, (self.computes + self.main) / self.cores, self.main)
        after = max(self.seconds / workers, (self.computes + self.main) / self.cores, self.main)
        return before / max(after, before / 1000)

    def rate_with(self, workers: int) -> float:
        """Run the pipeline again with another number of workers, and return its samples per second;
        0: it does not run with them in time, as with lanes that they do not divide.
        """
        loader, seconds, most = self._again
        with suppress(Exception):  # whatever happens only with these workers is not the diagnosis
            again = with_workers(loader, workers)
            try:
                return in_time(seconds + _GRACE / 2, lambda: _Run(again, self.cores, seconds, most).rate)
            finally:
                again.close()
        return 0.0

    def diagnosis(self, limit: str, why: str, change: str, step: str = "", *, workers: int = 0) -> Diagnosis:
        """Return the diagnosis: the limit and why it is one, and a change.

        Args:
            limit: as of ``Diagnosis``.
            why: why it is the limit.
            change: what to change.
            step: as of ``Diagnosis``; empty: the part that takes the most time.
            workers: with how many workers the pipeline runs again, if they are the change; 0: the
                change is another one.
        """
        gain, had = 1.0, f"{self.rate:,.0f} samples/s"
        brings = f"The pipeline has {had}: a training that takes fewer is the limit itself"
        if workers and (rate := self.rate_with(workers)):
            gain = max(rate / self.rate, 1.0)
            times = f"{gain:.1f} times the" if gain > _WORTH else "no more than the"
            brings = f"A second run with {plural(workers, 'worker')} had {rate:,.0f}, {times} {had} of the first one"
        parts = {part.name: 1e6 * part.seconds for part in self.parts.values() if part.seconds}
        worst = max(parts, key=lambda name: parts[name], default="")
        return Diagnosis(limit, step or worst, self.rate, gain, change, parts, limit_in_words(why, change, brings))


def _endless(epochs: Iterable[Any]) -> Iterator[Any]:
    """Yield the items of one epoch after another."""
    empty = False
    while not empty:
        empty = True
        for item in epochs:
            empty = False
            yield item
    raise ValueError("the pipeline yields nothing in an epoch, so there is nothing to measure")


def _delay() -> float:
    """Return for how many seconds this thread was ready to run, and had no processor; 0: the system
    does not tell.
    """
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _reader(stage: Stage[Any]) -> tuple[Chain, Any, list[str]]:
    """Return the chain that reads shards, that of the first source of a mix; its step that opens
    them, None if it has none; and the URLs of the first ones.
    """
    chain = Chain(stage)
    while chain.root.branches:
        chain = Chain(next(iter(chain.root.branches.values())))
    opening = next((step for step in chain if hasattr(step, "opener")), None)
    return chain, opening, list(islice(getattr(chain.root, "urls", ()), 1))


def _unpacking(stage: Stage[Any]) -> float:
    """Return the seconds of processor time that decompressing a byte of a tar takes, measured in
    the first shard; 0: it is not compressed, or the chain opens no shards.
    """
    _, opening, urls = _reader(stage)
    if opening is None or not urls:
        return 0.0
    with opening.opener.open(urls[0]) as stream:
        stored = io.BufferedReader(io.BytesIO(stream.read(_STORED_BYTES)))
    unpacked, kind = compression.unpacked(stored)
    start, size = time.thread_time(), 0
    with suppress(EOFError):  # the rest of the shard is missing
        while kind and (found := unpacked.read(1 << 16)):
            size += len(found)
    return (time.thread_time() - start) / max(size, 1) if kind else 0.0


# What is said


def _found(run: _Run, seconds: float) -> Diagnosis:
    """Return what limits a pipeline. ``seconds``: how long to measure the storage alone."""
    worst = max(run.parts.values(), key=lambda part: part.seconds)
    share = (
        f"{worst.name}, which takes {1e6 * worst.seconds:,.0f} of the {1e6 * run.seconds:,.0f} µs of a sample in "
        f"{'a worker' if run.workers else 'this process'} ({worst.seconds / run.seconds:.0%})"
    )
    if worst.kind == "transport" or run.main * run.active > _BUSY * run.seconds:
        return _of_main_process(run)
    if run.active < run.workers:
        return run.diagnosis(
            "shards",
            f"the number of shards, {run.shards} for this rank: only {run.active} of {run.workers} workers have any, "
            f"and their longest step is {share}",
            "write more shards than lanes (wds-pipes reshard), or pass ShardList(index=...), which divides shards",
        )
    if worst.kind == "storage":
        return _of_storage(run, worst, seconds)
    busy = math.ceil(run.seconds / run.main) if run.main else run.cores  # so many workers keep this process busy
    workers = max(min(run.cores - 1, busy, run.shards), run.workers, 1)
    more = run.estimate(workers) > _WORTH
    if worst.kind == "reading":
        change = f"pass num_workers={workers} if more is needed" if more else "leave the pipeline as it is"
        return run.diagnosis("reading", share, change, workers=workers if more else 0)
    if more and run.computes > run.seconds / 2:
        return run.diagnosis(
            "workers",
            f"the number of workers, {run.workers} for {run.cores} cores; their longest step is {share}",
            f"pass num_workers={workers}, {workers - run.workers} more",
            workers=workers,
        )
    if worst.waits > worst.computes and worst.kind == "function":
        return run.diagnosis(
            "function",
            f"{share} and mostly waits",
            f"let it wait for several samples at a time, with map_samples(threads={8 * worst.threads})",
        )
    return run.diagnosis(worst.kind, share, _CHANGES[worst.kind])


_CHANGES = {
    "decompression": "write the shards without compression (images, audio and video are compressed already), or with "
    "zstd, which takes less time than gzip",
    "decoding": "store smaller images, decode to a smaller size with decode_by_ext(size=...), or decode on the GPU "
    "with wp.DecodeOnDevice",
    "collation": "leave collate= out, which stacks arrays and tensors, and bring them to one shape in a step before",
    "function": "make the function faster, or store in the shards what it returns (wds-pipes map)",
    "step": "make the step faster, or leave it out",
}


def _of_main_process(run: _Run) -> Diagnosis:
    """Return the diagnosis of a pipeline whose batches cross or are taken too slowly."""
    transport = run.parts["transport"]
    sends, receives, takes = (1e3 * run.size * each for each in (transport.seconds, run.opening, run.main))
    if run.main > 2 * max(run.opening, transport.seconds):
        return run.diagnosis(
            "main process",
            f"the main process, which computes {takes:.3g} ms for a batch, and {receives:.3g} ms of them to receive it",
            "make the functions on_device= and collate= faster, and try without pin_memory= and mix_lanes=",
            "main process",
        )
    return run.diagnosis(
        "transport",
        f"transport between processes: a batch takes {sends:.3g} ms to send, and {receives:.3g} ms to receive",
        "let a batch have fewer and larger tensors of smaller types, such as uint8, or pass num_workers=0 if the steps "
        "take less time than that",
        "transport",
    )


def _of_storage(run: _Run, storage: _Part, seconds: float) -> Diagnosis:
    """Return the diagnosis of a pipeline that waits for bytes."""
    waits = f"{storage.seconds / run.seconds:.0%} of the time is spent waiting for bytes"
    _, opening, urls = _reader(run.stage)
    if not urls or not is_remote(urls[0]):
        return run.diagnosis("storage rate", f"the disk: {waits}", "copy the shards to a faster disk")
    latency = "the latency of the storage"
    if opening is None:
        change = "raise fetch_samples(connections=...)"
        return run.diagnosis("storage latency", f"{latency}: {waits}", change)
    rate, more = run.rate * run.tar_bytes / 1e6, {"shards_ahead": 4 * opening.shards_ahead + 3}
    both = {**more, "connections": 4 * opening.reading.connections}
    alone = [_reading_rate(run, seconds, **options) for options in (more, both)]
    arrive = f"{waits}, {rate:,.3g} MB/s arrive, and "
    if max(alone) < _FASTER * rate:
        return run.diagnosis(
            "storage rate",
            f"the rate of the storage: {arrive}not more if more is requested",
            "keep the shards on a local disk after the first epoch (cache_shards()), or make them smaller",
        )
    options = more if alone[0] * _FASTER > alone[1] else both
    named = ", ".join(f"{name}={value}" for name, value in options.items())
    return run.diagnosis(
        "storage latency",
        f"{latency}: {arrive}{max(alone):,.3g} MB/s if more is requested at a time",
        f"pass open_shards({named}), read more shards at a time with interleave_shards(), or write larger ones",
    )


def _reading_rate(run: _Run, seconds: float, *, shards_ahead: int, connections: int = 0) -> float:
    """Return the MB (10^6 bytes) of tars per second that one process reads and does nothing else
    with, over the connections of all workers.
    """
    chain, workers = _reader(run.stage)[0], max(1, run.workers)
    place = next(place for place, step in enumerate(chain.steps) if hasattr(step, "opener"))
    stage = linked(chain.root, chain.steps[1 : place + 2])
    opening = _reader(stage)[1]
    reading = replace(opening.reading, connections=workers * (connections or opening.reading.connections))
    opening.opener, opening.shards_ahead, opening.cache = Opener(reading), (shards_ahead + 1) * workers - 1, None
    clock = _Clock(stage, [])
    members = _endless(Stream(_Clocked(stage, clock)))
    next(members)
    before, begin, passed = clock.bytes_read, time.perf_counter(), 0.0
    while passed < seconds:
        next(members)
        passed = time.perf_counter() - begin
    return (clock.bytes_read - before) / passed / 1e6


# Of a training


def _of_ranks(ranks: Any) -> Diagnosis:
    """Return the diagnosis of a training from the stats of its ranks."""
    names = ("wait_share", *SHARES)
    if not (
        isinstance(ranks, Sequence)
        and ranks
        and all(isinstance(one, Mapping) and all(isinstance(one.get(name), float) for name in names) for one in ranks)
    ):
        raise ValueError("the stats are what loader.stats_of_ranks() returns after the first batch of an iteration")
    found = limit_of_ranks(ranks)
    rate = found.stats.get("samples_per_second", 0.0)
    said = limit_in_words(found.why, found.change, found.brings)
    return Diagnosis(found.limit, found.step, rate, change=found.change, sentences=said)
