"""Exchanges states between ranks, with torch.distributed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from wds_pipes.core.stage import State
from wds_pipes.errors import StateError
from wds_pipes.loader.pipe_loader import PipeLoader, progress_of
from wds_pipes.loader.plan import LoaderPosition
from wds_pipes.loader.restoring import restore


@contextlib.contextmanager
def agreeing(loader: PipeLoader, group: Any, what: str) -> Iterator[list[str]]:
    """Make the block succeed on all ranks of a loader, or raise on all of them.

    All raise if the block fails on one rank, or if the ranks append different values to the list.
    """
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
        raise StateError(
            f"the ranks read different files of {what}. See that the directory is the same for "
            "all ranks, and load it again."
        )


def has_group(loader: PipeLoader, group: Any) -> bool:
    """Whether torch.distributed connects this rank of a loader to the others."""
    if loader.rank.of == 1:
        return False
    import torch.distributed as dist

    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1)


def all_gather(value: Any, group: Any) -> list[Any]:
    """Return what each process of a group passed, in the order of the processes."""
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def gather_states(loader: PipeLoader, group: Any) -> list[State]:
    """Return the states of all ranks, in the order of the ranks; of processes that share a rank,
    one state.
    """
    state = loader.state_dict()
    if state["world_size"] == 1:
        return [state]
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise StateError(
            f"this is rank {state['rank']} of {state['world_size']}, and torch.distributed, "
            "which collects the states of the others, is not initialised: "
            "call init_process_group(), or use checkpoint.save(), which needs none."
        )
    states: list[State] = all_gather(state, group)
    states.sort(key=lambda state: int(state["rank"]))
    return [state for place, state in enumerate(states) if place == 0 or state != states[place - 1]]


def place_in(loader: PipeLoader, states: list[State], where: str, moved: bool = False) -> LoaderPosition:
    """Return the position from which a loader continues after loading the states of all ranks.

    ``where`` says, for messages, where the states are from.
    """
    try:
        return restore(progress_of(loader).plan, states, moved=moved)
    except StateError as error:
        raise StateError(f"cannot load {where}: {error}") from error
