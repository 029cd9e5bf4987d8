"""The order of a loader that a function of the user's builds: what a rank gets, and when."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from wds_pipes.core.words import plural
from wds_pipes.loader.lookup import PlannedSample, PlannedVisit
from wds_pipes.loader.pipe_loader import PipeLoader
from wds_pipes.tools.rewriting import function_of
from wds_pipes.tools.states import read_states


class PlannedBatch(NamedTuple):
    """The samples of a rank at a step."""

    epoch: int
    step: int
    rank: int
    world_size: int
    samples: list[PlannedSample]

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {**self._asdict(), "samples": [sample._asdict() for sample in self.samples]}

    def lines(self) -> list[str]:
        """Return a title, and a line for each sample."""
        title = f"epoch {self.epoch}, step {self.step}, rank {self.rank} of {self.world_size}"
        found = [f"{title}: {plural(len(self.samples), 'sample')}"]
        for url, number, key, padding in self.samples:
            found.append(f"{url} {number}{'' if key is None else f' {key}'}{' (repeat)' if padding else ''}")
        return found


def plan(
    named: str,
    step: int,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    epoch: int | None = None,
    state: str | None = None,
    keys: bool = False,
) -> PlannedBatch:
    """Return which samples a rank gets at a step, without reading shards: see
    ``PipeLoader.plan``, also for the errors.

    Args:
        named: a function without arguments that returns the PipeLoader: ``"module:function"``; the
            module may be a file in the current directory.
        step: which batch: see ``PipeLoader.plan``.
        rank: the rank; None: that of the loader, or 0 if world_size is passed.
        world_size: the number of ranks; None: that of the loader.
        epoch: in which epoch; None: that of the loader.
        state: a checkpoint from which the loader continues: see ``read_states``.
        keys: also say the keys, which are read in the shards.

    Raises:
        ValueError: there is no such function, it returns something else, or a loader of other
            ranks.
    """
    with _environment(rank, world_size):
        loader = _loader(named, world_size, state)
        own, ranks = loader.rank
        rank = own if rank is None else rank
        samples = loader.plan(step, rank=rank, epoch=epoch, keys=keys)
        return PlannedBatch(loader.epoch if epoch is None else epoch, step, rank, ranks, samples)


def find_sample(
    named: str, sample: str | int, *, world_size: int | None = None, epoch: int | None = None, state: str | None = None
) -> list[PlannedVisit]:
    """Return when a sample comes, at which step of which rank: see ``PipeLoader.find``, and
    ``plan`` for the arguments and errors.
    """
    with _environment(None, world_size):
        return _loader(named, world_size, state).find(sample, epoch=epoch)


@contextmanager
def _environment(rank: int | None, world_size: int | None) -> Iterator[None]:
    """Tell the loader its rank, as a launcher does."""
    if world_size is None:
        yield
        return
    before = dict(os.environ)
    os.environ.update(RANK=str(rank or 0), WORLD_SIZE=str(world_size))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _loader(named: str, world_size: int | None, state: str | None) -> PipeLoader:
    make: Any = function_of(named)
    loader = make()
    if not isinstance(loader, PipeLoader):
        raise ValueError(f"{named}() must return the PipeLoader of the training, and it returned {loader!r:.80}")
    if world_size not in (None, loader.rank.of):
        raise ValueError(
            f"the loader of {named}() has {plural(loader.rank.of, 'rank')}, not {world_size}: let the function take "
            "them from the environment, without rank= and world_size="
        )
    if state is not None:
        states = [placed.state for placed in read_states(state)]
        loader.load_state_dict(states if len(states) > 1 else states[0])
    return loader
