"""MapSamples: apply a function to each sample, with a random generator of its own."""

from __future__ import annotations

import inspect
import math
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from wds_pipes.core.chain import Chain, changes_order
from wds_pipes.core.lane import Lane
from wds_pipes.core.occurrences import OCCURRENCE
from wds_pipes.core.order import hash64, hash_text
from wds_pipes.core.stage import Out, Stage, functional_name
from wds_pipes.core.tolerant import OnError
from wds_pipes.errors import SampleError
from wds_pipes.io.urls import hide, identify, words
from wds_pipes.stages.fields import identity
from wds_pipes.stages.threaded import Threaded


class _Drop:
    """What the function of ``map_samples(fn, may_drop=True)`` returns to drop a sample."""

    def __repr__(self) -> str:
        return "wds_pipes.DROP"

    def __reduce__(self) -> str:
        return "DROP"


DROP = _Drop()
OF_CODE = (NameError, TypeError, AttributeError, ImportError, NotImplementedError)  # "skip" does not skip these

_NOTHING = "let it return the sample; to leave samples out, use filter_samples(), or may_drop=True and wds_pipes.DROP."
_DROPPED = "pass may_drop=True, as the length of an epoch is then not known."


class _Failed(NamedTuple):
    """What became of a sample for which the function did not return another one."""

    sample: Any
    why: Exception | _Drop | None  # what it raised; or that it returned DROP, or None


class MapSamples(Threaded[Out]):
    """Apply a function to each sample (functional name: ``map_samples``).

    If a dict sample has a ``__key__`` and ``fn`` returns a dict without it, the new sample keeps
    it, and the ``__url__``. So write ``lambda sample: {"label": int(sample["cls"])}``.

    A function with a second parameter, ``fn(sample, rng)``, gets a ``numpy.random.Generator`` for
    this sample alone, seeded from (seed, epoch, sample). So it draws the same numbers after a
    resume, whatever came before. A dict sample is identified by its ``__key__`` and the number of
    its shard in the list of shards (or by its ``__url__``, if no list has it). So it also draws the
    same numbers in another order, with another number of workers, and after its shards were moved.
    Any other sample is identified by its place in the order of a ``SampleList``, if the steps
    before keep number and order, and else by its number in the lane.

    A dict sample that comes several times in an epoch draws other numbers each time: as a part that
    ``then`` or a ``FlatMap`` made of it, by another draw of ``resampled=True``, in another round of
    a source of ``mix``, or in another repetition of ``repeat``. Between such a step and the last
    one that draws, samples have a field ``__occurrence__``, a text such as ``"1.0"``: the numbers
    of these steps. A step of your own that makes new dicts there must keep it, as the ``__key__``.

    Args:
        source: any pipe.
        fn: ``fn(sample)`` or ``fn(sample, rng)``. It returns the new sample, and never None. Draw
            from ``rng``, not from global generators, whose state is not saved; or pass
            ``seed_all=True``. Draw from ``rng`` during the call: each call takes 10 to 20 us more
            with it. It must have no memory between samples, such as a count or a set of
            what it has seen: each worker process would have its own, which stays over epochs and is
            in no state. Write a ``Stage`` for that (tutorial 09).
        may_drop: whether ``fn`` may return ``wds_pipes.DROP``, to drop a sample and count it as
            filtered. Then the length of an epoch is not known.
        seed_all: for functions that draw from global generators, such as torchvision's transforms:
            seed those of ``random``, numpy and torch (on the CPU) for each sample, by what also
            decides ``rng``. That takes 20 to 40 us a sample. When the iteration ends, also by an
            error or a ``break``, their states from before it are put back. Until then, what is
            drawn from them between two samples in the same process follows from the sample before.
            Not with ``threads``, or in a thread: threads share these generators.
        threads: call ``fn`` in this many threads, on samples ahead of the one that is needed; None
            or 0: in the thread that iterates. See below.
        on_error: what to do if ``fn`` raises or returns None: ``"raise"``, or ``"skip"`` the sample
            and count it; None: as ``ShardList(on_error=...)`` says. ``"skip"`` raises what is a
            mistake in the code and not in a sample: NameError, TypeError, AttributeError,
            ImportError, NotImplementedError. A dict such as ``{OSError: "skip", TypeError:
            "skip"}`` decides by the class of the exception, and raises all others; a function of
            the exception returns ``"skip"`` or ``"raise"``. A MemoryError is always raised.
        max_errors: with ``"skip"``, how many samples may be skipped in an epoch; None: no limit.

    Raises:
        SampleError: during iteration, if ``fn`` returned None. What ``fn`` raises is raised as it
            is, with a note that names the sample.
        ValueError: when the stage is built, if ``seed_all`` and ``threads`` are both given.

    Threads: with ``threads=n``, samples are yielded in their order, an error is raised when the
    turn of its sample comes, and random numbers are the same. At most 16 * n samples are in flight:
    taken from the source, and not yielded yet. They are also made while the caller does something
    else between two samples. The threads belong to the process that iterates, and end with the
    iteration; to end it waits for calls that run. Each lane of a ``PipeLoader``, and each open
    shard before ``interleave_shards``, has threads of its own, so put the step after that one.
    Threads help where ``fn`` releases Python's global lock, as Pillow, numpy, torch and reading do,
    or under free-threaded Python. ``fn`` must not change what its calls share. torch divides large
    operations over threads of its own, in each of these threads: outside of worker processes, call
    ``torch.set_num_threads(1)`` if ``fn`` uses torch and the training does not need them.

    Checkpoint: the number of samples so far. A resume reads nothing again, with threads only the
    samples that were in flight. States with and without threads are the same.
    """

    @dataclass(slots=True)
    class At:
        number: int = 0
        skipped: int = 0
        filtered: int = 0

    tallies = ("skipped", "filtered")
    keeps_count = True
    scope = "item"
    salt = 3  # of its random numbers

    def __init__(
        self,
        source: Stage[Any],
        fn: Callable[..., Any],
        *,
        may_drop: bool = False,
        seed_all: bool = False,
        threads: int | None = None,
        on_error: OnError | None = None,
        max_errors: int | None = None,
    ) -> None:
        super().__init__(source, on_error, max_errors, threads)
        if seed_all and self.threads:
            raise ValueError(
                f"seed_all=True seeds the generators of the process, which all threads share: with threads={threads} "
                "let the function draw from rng, as fn(sample, rng)"
            )
        self.fn, self.seed_all = fn, bool(seed_all)
        self.keeps_count = not may_drop
        self.takes_rng = takes_rng(fn, functional_name(type(self)))

    @property
    def _draws(self) -> bool:  # type: ignore[override]
        return self.takes_rng or self.seed_all

    @property
    def counts_items(self) -> bool:
        return self._draws

    def run(self) -> Iterator[Any]:
        return self._seeding() if self.seed_all else self._results()

    def _seeding(self) -> Iterator[Any]:
        check_no_thread()
        with _states.kept():
            yield from self._results()

    def _results(self) -> Iterator[Any]:
        at, attempt = self.at, self._attempt()
        for result in self.results(attempt, zip(self.source.items, count(at.number + 1), strict=False)):
            at.number += 1
            if type(result) is not _Failed:
                yield result
            elif isinstance(result.why, Exception):
                self._raised(result.sample, result.why)
            elif result.why is None:
                self.skip(_error("map_samples", result.sample, at.number, "returned None for", _NOTHING))
            elif self.keeps_count:
                raise _error("map_samples", result.sample, at.number, "returned DROP for", _DROPPED)
            else:
                at.filtered += 1

    def _attempt(self) -> Callable[[tuple[Any, int]], Any]:
        """Return a function that calls that of the step, on a sample and its number in the lane."""
        fn, takes_rng, seed_all = self.fn, self.takes_rng, self.seed_all
        draws = Draws(self) if self._draws else None
        is_last = draws is not None and not self.lane.occurrences  # no later step draws
        # what a function need not return of a dict sample: its identity, and whether it fills up an
        # epoch
        kept = ["__key__", "__url__", *(["__padding__"] if self.lane.padding is not None else [])]
        kept += [OCCURRENCE] if self.lane.occurrences else []
        keeps = bool(self._keeps_keys)  # a built-in function, which returns all of it

        def attempt(item: tuple[Any, int]) -> Any:
            sample, number = item
            try:
                if draws is None:
                    result = fn(sample)
                else:
                    key = draws.key(sample, number)
                    if seed_all:
                        _seed_all(key)
                    result = fn(sample, draws.generator(key)) if takes_rng else fn(sample)
            except Exception as error:
                return _Failed(sample, error)
            if result is None or result is DROP:
                return _Failed(sample, result)
            if result is not sample and not keeps and isinstance(result, dict):
                for name in kept:  # nearly always all are there
                    if name not in result:
                        result = _identified(result, sample, kept)
                        break
            if is_last and isinstance(result, dict):
                result.pop(OCCURRENCE, None)
            return result

        return attempt

    def _raised(self, sample: Any, error: Exception) -> None:
        """Raise what the function raised on a sample, or count the sample as skipped."""
        number, step = self.at.number, functional_name(type(self))
        if self.skips(error):
            wrapped = _error(step, sample, number, f"raised {type(error).__name__} on", hide(words(error)))
            wrapped.__cause__ = error
            self.count_skip(wrapped)
            return
        error.add_note(f"raised by the function of {step}() on {_name(sample, number)}")
        if self.on_error == "skip" and isinstance(error, OF_CODE):
            kind = type(error).__name__
            error.add_note(
                f"on_error='skip' does not skip a {kind}, which is most often a mistake in the code: if "
                f"it is one of the data, pass on_error={{Exception: 'skip'}}."
            )
        raise error

    def skips(self, error: Exception) -> bool:
        if isinstance(error, MemoryError) or (self.on_error == "skip" and isinstance(error, OF_CODE)):
            return False
        return super().skips(error)


def _identified(result: dict[str, Any], sample: Any, kept: Sequence[str]) -> dict[str, Any]:
    """Return a new sample with what it lacks of these fields of the sample that it was made of; a
    batch has no identity.
    """
    if not isinstance(sample, dict) or type(sample.get("__key__")) is not str:
        return result
    lost = [name for name in kept if name not in result and name in sample]
    return {**{name: sample[name] for name in lost}, **result}


def _name(sample: Any, number: int) -> str:
    named = identity(sample)
    return f"sample {number} of this lane and epoch" if named.key is None else named.name()


def _error(step: str, sample: Any, number: int, what: str, why: str) -> SampleError:
    """Return the error for a sample with which the function did not do as it should."""
    key, url = identity(sample)
    return SampleError(f"the function of {step}() {what} {_name(sample, number)}: {why}", url=url, key=key)


# Random numbers for single samples, the same after a resume


class Draws:
    """The random numbers of one step while it runs.

    A dict sample is identified by its ``__key__``, the number of its shard in the list of shards
    (or by its ``__url__``, if no list has it), and its occurrence: see
    ``wds_pipes.core.occurrences``. Any other sample is identified by its place in the
    order of a ``SampleList``, if the steps before this one keep number and order, and else by its
    number in the lane. A batch of such samples has the place of its first one.

    Args:
        step: the running step. Its ``salt`` keeps the numbers of different kinds of steps distinct;
            a chain may have several of a kind.
    """

    def __init__(self, step: Any) -> None:
        lane: Lane = step.lane
        chain = Chain(step.source)
        self._lane, self._root, self._salt = lane, chain.root, step.salt
        self._step = _count(chain, step.salt)
        self._base = hash64(lane.seed, lane.epoch, self._step, step.salt)
        self._url: tuple[Any, str | None] = "", None  # the one looked up last, and what identifies it
        self._own = _Generators()
        ordered = all(one.changes_count() is None and changes_order(one) is None for one in chain)
        self._place = self._root.epoch_order.place_in(step.lane) if ordered else None
        self._size = math.prod(one.items_per_batch or 1 for one in chain)

    def key(self, sample: Any, number: int) -> int:
        """Return 64 random bits for a sample: a function of (seed, epoch, step, sample)."""
        lane = self._lane
        if not (isinstance(sample, dict) and "__key__" in sample):
            if self._place is None:
                return lane.key(self._step, self._salt, number)
            return hash64(self._base, 1, self._place((number - 1) * self._size))
        url = sample.get("__url__")
        last, shard = self._url
        if url is not last:  # else nearly always: the samples of a shard share their URL
            shard = str([self._shard(one) for one in url]) if isinstance(url, list) else self._shard(url)
            self._url = url, shard
        name = f"{shard}\0{sample['__key__']}"
        if (occurrence := sample.get(OCCURRENCE)) is not None:
            name = f"{name}\0{occurrence}"
        return hash64(self._base, hash_text(name))

    def _shard(self, url: Any) -> str | None:
        """Return what identifies the shard of a sample: shards may have moved before a resume, and
        credentials may differ.
        """
        return (self._root.number_of(url) or identify(url)) if isinstance(url, str) else None

    def generator(self, key: int) -> np.random.Generator:
        """Return a generator with this key, of this thread: until the next call for this thread, it
        belongs to the caller. If the caller keeps it longer, the next call makes another one.
        """
        return self._own.with_key(key)


class _Generators(threading.local):
    """The generator of each thread: to set its state takes a tenth of what a new one takes."""

    def __init__(self) -> None:
        self._make()

    def _make(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._state = self._bits.state
        self._key = self._state["state"]["key"]
        self._generator = np.random.Generator(self._bits)
        self._unused = self._references()

    def _references(self) -> tuple[int, int]:
        return sys.getrefcount(self._generator), sys.getrefcount(self._bits)

    def with_key(self, key: int) -> np.random.Generator:
        """Return the generator, at the beginning of the numbers of a key."""
        if self._references() != self._unused:  # a function has kept it
            self._make()
        self._key[0] = key
        self._bits.state = self._state
        return self._generator


def _count(chain: Chain, salt: int) -> int:
    """Return how many steps with this salt a chain has. This number keeps the generators of one
    step distinct from those of another, and it does not depend on the chain's other steps.
    """
    in_sources: int = max((_count(Chain(branch), salt) for branch in chain.root.branches.values()), default=0)
    return in_sources + sum(bool(getattr(step, "salt", None) == salt) for step in chain)


def takes_rng(fn: Callable[..., Any], step: str) -> bool:
    """Return whether ``fn`` takes ``rng``: its second parameter is required, or is named rng.

    Raises:
        TypeError: it is no function of a sample, or of a sample and ``rng``.
    """
    if not callable(fn):
        raise TypeError(f"{step}() needs a function, not {fn!r}")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return False
    places = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    takes = len(places) > 1 and (places[1].name == "rng" or places[1].default is inspect.Parameter.empty)
    try:
        signature.bind(*["sample", "rng"][: 1 + takes])
    except TypeError as error:
        raise TypeError(f"{step}() needs fn(sample) or fn(sample, rng), not {fn!r}: {error}") from error
    return takes


def check_no_thread() -> None:
    """Raise RuntimeError in a thread. Threads share the global generators, so what each draws would
    depend on the time.
    """
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError(
            "seed_all=True seeds the generators of this process, and runs in a thread, while others may draw from "
            "them: let the function draw from rng, as fn(sample, rng) of map_samples(), or use worker processes"
        )


class _GlobalStates:
    """The states of the global generators of ``random``, numpy and torch (on the CPU) from before
    the iterations of this process that seed them. When the last of these iterations ends, the
    states are put back: lanes of one process, and steps of one chain, overlap.
    """

    def __init__(self) -> None:
        self._iterations = self._process = 0
        self._saved: list[tuple[Callable[[Any], None], Any]] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Save the states, and put them back when this and all that began meanwhile has ended."""
        if self._process != os.getpid():  # a forked child never ends what its parent began
            self._process, self._iterations = os.getpid(), 0
        if not self._iterations:
            self._saved = [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]
            if "torch" in sys.modules:
                generator = sys.modules["torch"].default_generator
                self._saved.append((generator.set_state, generator.get_state()))
        self._iterations += 1
        process = self._process
        try:
            yield
        finally:
            if process == self._process == os.getpid():
                self._iterations -= 1
                for put_back, state in [] if self._iterations else self._saved:
                    put_back(state)


_states = _GlobalStates()


def _seed_all(key: int) -> None:
    """Seed the global generators. ``torch.manual_seed`` takes 60 times as long as seeding the
    generator of the CPU, since it also asks for all devices.
    """
    random.seed(key)
    np.random.seed([key >> 32, key % (1 << 32)])
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(key)
