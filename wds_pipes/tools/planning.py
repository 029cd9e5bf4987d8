"""The loader that a function of the user's builds, to ask which samples a rank gets, and when."""

from __future__ import annotations

import os
from typing import Any

from wds_pipes.core.words import plural
from wds_pipes.loader.pipe_loader import PipeLoader
from wds_pipes.tools.rewriting import function_of
from wds_pipes.tools.states import read_states


def loader_of(named: str, *, rank: int = 0, world_size: int | None = None, state: str | None = None) -> PipeLoader:
    """Return the PipeLoader of a training, to call its ``plan`` and ``find``.

    Args:
        named: a function without arguments that returns it: ``"module:function"``; the module may
            be a file in the current directory.
        rank: the rank that the function finds, if ``world_size`` is passed.
        world_size: the number of ranks that it finds, as if torchrun had started it; None: those of
            this process.
        state: a checkpoint from which the loader continues: see ``read_states``.

    Raises:
        ValueError: there is no such function, it returns something else, or a loader of other
            ranks.
        StateError: the state does not fit.
    """
    before = dict(os.environ)
    if world_size is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        make: Any = function_of(named)
        loader = make()
        if not isinstance(loader, PipeLoader):
            raise ValueError(f"{named}() must return the PipeLoader of the training, and it returned {loader!r:.80}")
        ranks = loader.rank.of
    finally:
        os.environ.clear()
        os.environ.update(before)
    if world_size not in (None, ranks):
        raise ValueError(
            f"the loader of {named}() has {plural(ranks, 'rank')}, not {world_size}: let the function take "
            "them from the environment, without rank= and world_size="
        )
    if state is not None:
        states = [placed.state for placed in read_states(state)]
        loader.load_state_dict(states if len(states) > 1 else states[0])
    return loader
