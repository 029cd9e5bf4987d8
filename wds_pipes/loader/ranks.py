"""Which data-parallel rank this process is."""

from __future__ import annotations

import os
import warnings
from typing import NamedTuple


class Rank(NamedTuple):
    """Rank ``number`` of ``of``."""

    number: int
    of: int


def find_rank(rank: int | None = None, world_size: int | None = None) -> Rank:
    """The rank of this process: as given, else by torch.distributed if it is initialised, else by RANK and WORLD_SIZE, else the only one.

    Under tensor or pipeline parallelism several processes share a data-parallel rank: give it, from a DeviceMesh with
    ``rank=mesh["dp"].get_local_rank(), world_size=mesh["dp"].size()``.

    Raises:
        ValueError: only one of the two is given, or the rank is not below the world size.
    """
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither")
    if rank is None or world_size is None:
        rank, world_size = _from_surroundings()
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be at least 0 and below world_size, not {rank} of {world_size}")
    return Rank(rank, world_size)


def _from_surroundings() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return 0, 1


def warn_of_ranks(what: str, *, dealt: bool = False) -> None:
    """Warn, where several ranks run, that each gets all samples.

    Args:
        what: is iterated.
        dealt: whether torch deals the samples where torch.distributed is initialised.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        ranks = 1 if dealt else dist.get_world_size()
    else:
        ranks = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if ranks > 1:
        message = "gives all samples of its shards to every rank: use wds_pipes.PipeLoader, or let each rank list shards of its own (then ignore this)."
        warnings.warn(f"{what} {message}", stacklevel=4)
