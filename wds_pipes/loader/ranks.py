"""Which data-parallel rank this process is."""

from __future__ import annotations

import os
import warnings
from typing import NamedTuple

from wds_pipes.core.options import check_count
from wds_pipes.core.state import MOST


class Rank(NamedTuple):
    """Rank ``number`` of ``of``."""

    number: int
    of: int


def find_rank(rank: int | None = None, world_size: int | None = None) -> Rank:
    """Return the rank of this process.

    It is, in this order: the arguments, the rank in torch.distributed if that is initialised, the
    environment variables RANK and WORLD_SIZE, rank 0 of 1.

    Under tensor or pipeline parallelism several processes share a data-parallel rank. Then pass the
    arguments, for example from a DeviceMesh:
    ``rank=mesh["dp"].get_local_rank(), world_size=mesh["dp"].size()``.

    Raises:
        ValueError: only one of the two is passed, or the rank is negative or not below the world
        size.
    """
    if (rank is None) != (world_size is None):
        raise ValueError("give both rank and world_size, or neither")
    where = ""
    if rank is None or world_size is None:
        rank, world_size = _from_surroundings()
        where = " (by RANK and WORLD_SIZE in the environment)"
    rank, world_size = check_count("rank", rank, least=-MOST), check_count("world_size", world_size, least=-MOST)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be at least 0 and below world_size, not {rank} of {world_size}{where}")
    return Rank(rank, world_size)


def _from_surroundings() -> tuple[int, int]:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _from_environment("RANK"), _from_environment("WORLD_SIZE")
    return 0, 1


def _from_environment(name: str) -> int:
    try:
        return int(os.environ[name])
    except ValueError as error:
        raise ValueError(
            f"the environment variable {name} must be a number, not {os.environ[name]!r:.80}: unset RANK and "
            "WORLD_SIZE if there is one rank"
        ) from error


def warn_of_ranks(what: str, *, divided: bool = False) -> None:
    """If there are several ranks, warn that each of them gets all samples.

    Args:
        what: what is iterated, for the message.
        divided: whether torch divides the samples over the ranks if torch.distributed is
            initialised.
    """
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        ranks = 1 if divided else dist.get_world_size()
    else:
        ranks = _from_surroundings()[1]
    if ranks > 1:
        message = (
            "gives all samples of its shards to every rank: use wds_pipes.PipeLoader, or let each "
            "rank list shards of its own, or Accelerate divide the samples (then ignore this)."
        )
        warnings.warn(f"{what} {message}", stacklevel=4)
