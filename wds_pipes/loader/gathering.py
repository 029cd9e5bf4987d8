"""What ranks tell each other about their states, by torch.distributed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from wds_pipes.core.stage import State
from wds_pipes.errors import StateError
from wds_pipes.loader.merging import state_for
from wds_pipes.loader.pipe_loader import PipeLoader, progress_of
from wds_pipes.loader.position import LoaderPosition


class View(NamedTuple):
    """What a rank knows before the ranks have agreed; ``error``: why it cannot list the directory."""

    rank: int
    step: int | None
    rounds: int  # how often to look again
    complete: list[int]
    empty: bool
    error: str | None


@contextlib.contextmanager
def agreeing(loader: PipeLoader, group: Any, what: str) -> Iterator[list[str]]:
    """Let all ranks of a loader do something, or none: where one fails, or they come to different values, all raise."""
    values: list[str] = []
    error: Exception | None = None
    try:
        yield values
    except Exception as problem:
        error = problem
    results = all_gather((loader.rank.number, values, None if error is None else str(error)), group)
    if error is not None:
        raise error
    for rank, _, failed in results:
        if failed is not None:
            raise StateError(f"rank {rank} cannot load {what}: {failed}")
    if any(of_rank != values for _, of_rank, _ in results):
        raise StateError(f"the ranks read different files of {what}. See that the directory is the same for all ranks, and load it again.")


def has_group(loader: PipeLoader, group: Any) -> bool:
    """Whether torch.distributed can ask the other ranks of a loader."""
    if loader.rank.of == 1:
        return False
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1)


def all_gather(value: Any, group: Any) -> list[Any]:
    """What each process of a group passed, in their order."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_states(loader: PipeLoader, group: Any) -> list[State]:
    """The states of all ranks, by rank; processes that share a rank give one."""
    state = loader.state_dict()
    if state["world_size"] == 1:
        return [state]
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise StateError(
            f"this is rank {state['rank']} of {state['world_size']}, and torch.distributed, which the others are asked by, is not initialised: "
            "call init_process_group(), or use checkpoint.save(), which needs none."
        )
    states: list[State] = all_gather(state, group)
    states.sort(key=lambda state: int(state["rank"]))
    return [state for place, state in enumerate(states) if place == 0 or state != states[place - 1]]


def place_in(loader: PipeLoader, states: list[State], where: str, moved: bool = False) -> LoaderPosition:
    """Where the states of all ranks let a loader continue; ``where`` they are from, for people."""
    state = _state_for(loader, states, where, moved or progress_of(loader).plan.recipe.data.moved)
    try:
        return progress_of(loader).plan.restore(state, moved=moved)
    except StateError as error:
        error.add_note(f"The state is from {where}.")
        raise


def _state_for(loader: PipeLoader, states: list[State], where: str, moved: bool) -> State:
    """What a loader is to load of the states of all ranks; ``where`` they are from, for people."""
    try:
        return state_for(states, loader.rank, moved=moved)
    except StateError as error:
        raise StateError(f"the ranks of {where} do not belong together: {error} Or load an older checkpoint.") from error
