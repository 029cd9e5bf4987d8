"""Random numbers for single samples, the same after a resume."""

from __future__ import annotations

import inspect
import math
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from wds_pipes.core.order import hash64, hash_text
from wds_pipes.core.stage import Stage
from wds_pipes.io.urls import identify

_GLOBAL = 6  # the salt of the global generators


class Draws:
    """The random numbers of one step while it runs.

    A dict sample is identified by its ``__key__`` and the number of its shard in the list of shards
    (or by its ``__url__``, if no list has it). Any other sample is identified by its place in the
    order of a ``SampleList``, if the steps before this one keep number and order, and else by its
    number in the lane. A batch of such samples has the place of its first one.

    Args:
        step: the running step.
        kind: the class of such steps, of which a chain may have several.
        salt: keeps the numbers of different kinds of steps distinct.
    """

    def __init__(self, step: Stage[Any], kind: type, salt: int) -> None:
        assert step.source is not None
        self._lane, self._root, self._salt = step.lane, step.root, salt
        self._step = _count(step.source, kind)
        ordered = all(one.changes_count() is None and one.changes_order() is None for one in step.source.chain)
        self._place = self._root.place_in(step.lane) if ordered else None
        self._size = math.prod(one.items_per_batch or 1 for one in step.source.chain)

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


def _count(stage: Stage[Any] | None, kind: type) -> int:
    """Return how many steps of a kind a chain has. This number keeps the generators of one step
    distinct from those of another, and it does not depend on the chain's other steps.
    """
    if stage is not None and stage.branches:
        return max(_count(branch, kind) for branch in stage.branches.values())
    return 0 if stage is None else _count(stage.source, kind) + isinstance(stage, kind)


def takes_rng(fn: Callable[..., Any], step: str) -> bool:
    """Return whether ``fn`` takes ``rng``: its second parameter is required, or is named rng."""
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


class GlobalGenerators:
    """The global generators of ``random``, numpy and torch, seeded for a sample and restored.

    torch's own way (``torch.random.fork_rng``) copies the state of each device, and takes longer
    than most augmentations. In a worker process of DataLoader nothing else draws from these
    generators, so there they are only seeded.

    Raises:
        RuntimeError: this is a thread. Threads share the generators, so what each draws would
            depend on the time.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "seed_all=True seeds the generators of this process, and runs in a thread, while others may draw from "
                "them: let the function draw from rng, as fn(sample, rng) of map_samples(), or use worker processes"
            )
        self._torch = sys.modules.get("torch")
        data = sys.modules.get("torch.utils.data")
        self._restore = data is None or data.get_worker_info() is None
        self._philox = np.random.Philox(key=0)
        self._start = self._philox.state
        self._saved: tuple[Any, Any, Any] | None = None

    def seed(self, key: int) -> None:
        """Seed all generators."""
        torch = self._torch
        if self._restore:
            self._saved = (
                random.getstate(),
                np.random.get_bit_generator(),  # type: ignore[attr-defined]
                None if torch is None else torch.default_generator.get_state(),
            )
        key = hash64(key, _GLOBAL)  # other numbers than those of rng
        random.seed(key)
        self._start["state"]["key"][0] = key
        self._philox.state = self._start
        np.random.set_bit_generator(self._philox)  # type: ignore[attr-defined]
        if torch is not None:
            torch.default_generator.manual_seed(key)

    def restore(self) -> None:
        """Restore what was before ``seed()``."""
        if self._saved is None:
            return
        python, numpy, torch = self._saved
        self._saved = None
        random.setstate(python)
        np.random.set_bit_generator(numpy)  # type: ignore[attr-defined]
        if torch is not None and self._torch is not None:
            self._torch.default_generator.set_state(torch)
