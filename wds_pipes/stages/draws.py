"""Random numbers for single samples, the same after a resume."""

from __future__ import annotations

import inspect
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from wds_pipes.core.chain import Chain, changes_order
from wds_pipes.core.lane import Lane
from wds_pipes.core.order import hash64, hash_text
from wds_pipes.io.urls import identify

_GLOBAL = 6  # the salt of the global generators


class Draws:
    """The random numbers of one step while it runs.

    A dict sample is identified by its ``__key__`` and the number of its shard in the list of shards
    (or by its ``__url__``, if no list has it). Any other sample is identified by its place in the
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
        ordered = all(one.changes_count() is None and changes_order(one) is None for one in chain)
        self._place = self._root.place_in(step.lane) if ordered else None
        self._size = math.prod(one.items_per_batch or 1 for one in chain)

    def key(self, sample: Any, number: int) -> int:
        """Return 64 random bits for a sample: a function of (seed, epoch, step, sample)."""
        lane = self._lane
        if not (isinstance(sample, dict) and "__key__" in sample):
            if self._place is None:
                return lane.key(self._step, self._salt, number)
            return hash64(lane.seed, lane.epoch, self._step, self._salt, self._place((number - 1) * self._size))
        url, shard = sample.get("__url__"), None
        if isinstance(url, str):  # shards may have moved before a resume, and credentials may differ
            shard = self._root.number_of(url) or identify(url)
        return hash64(lane.seed, lane.epoch, self._step, self._salt, hash_text(f"{shard}\0{sample['__key__']}"))

    def rng(self, sample: Any, number: int) -> np.random.Generator:
        """Return a generator for a sample alone."""
        return np.random.Generator(np.random.Philox(key=self.key(sample, number)))


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


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Seed the global generators of ``random``, numpy and torch (on the CPU), and restore them at
    the end. ``torch.random.fork_rng`` would also copy the state of each device.
    """
    generator = sys.modules["torch"].default_generator if "torch" in sys.modules else None
    saved = random.getstate(), np.random.get_state(), generator and generator.get_state()
    key = hash64(key, _GLOBAL)  # other numbers than those of rng
    random.seed(key)
    np.random.seed([key >> 32, key % (1 << 32)])
    if generator is not None:
        generator.manual_seed(key)
    try:
        yield
    finally:
        random.setstate(saved[0])
        np.random.set_state(saved[1])
        if generator is not None:
            generator.set_state(saved[2])
