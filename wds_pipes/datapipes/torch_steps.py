"""torch's own pipes as stages, so that they can stand before, between and after ours.

Rules:
1. map, filter, batch and collate hold no item when they yield. So each is a stage without a
   position; torch's own code runs it over our source.
2. A chain of torch's pipes alone is the first stage of ours. If each iteration over it yields the
   same items, its position is the number of items that were taken.
3. All other pipes do not expose their state. They run, but ``state_dict()`` of such a chain raises
   an error that names the pipe.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from wds_pipes.core.graph import GraphStep
from wds_pipes.core.moved import Data
from wds_pipes.core.stage import Source, Stage
from wds_pipes.core.state import damaged
from wds_pipes.datapipes.base import IterDataPipe, torch_kinds
from wds_pipes.errors import StateError
from wds_pipes.io.packed import Packed
from wds_pipes.io.urls import redact
from wds_pipes.stages.shard_source import data_id, fingerprint

HOLD_NOTHING = torch_kinds("Mapper", "Filter", "Batcher", "Collator")
_BATCHER, _SHARDING_FILTER, _WRAPPER = (
    torch_kinds("Batcher"),
    torch_kinds("ShardingFilter"),
    torch_kinds("IterableWrapper"),
)
_KEEP_COUNT = torch_kinds("Mapper", "Collator", "Batcher")
_REPEATABLE = (*HOLD_NOTHING, *_WRAPPER, *_SHARDING_FILTER, *torch_kinds("FileLister", "UnBatcher", "Concater"))
_INSTEAD = {
    "Shuffler": "use shuffle_buffer(size), or ShardList(urls, shuffle=True) for the shards",
    "UnBatcher": "put batch() last",
    "ShardingFilter": "leave it out: ShardList divides the shards over the workers",
}


def walk(pipe: IterDataPipe[Any]) -> Iterator[IterDataPipe[Any]]:
    """Yield ``pipe`` and all pipes that it reads from."""
    yield pipe
    for value in vars(pipe).values():
        for part in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(part, IterDataPipe):
                yield from walk(part)


def _copied(pipe: IterDataPipe[Any]) -> IterDataPipe[Any]:
    """Copy a chain of torch's pipes, so that it has its own iterators: a pipe has one at a time."""
    again = copy.copy(pipe)
    for name, value in vars(pipe).items():
        if isinstance(value, IterDataPipe):
            setattr(again, name, _copied(value))
        elif isinstance(value, (list, tuple)) and any(isinstance(part, IterDataPipe) for part in value):
            setattr(
                again, name, type(value)(_copied(part) if isinstance(part, IterDataPipe) else part for part in value)
            )
    return again


class TorchStep(Stage[Any]):
    """A pipe of torch's that holds no item when it yields, over a stage of ours."""

    scope = "item"
    source: Stage[Any]

    def __init__(self, source: Stage[Any], pipe: IterDataPipe[Any]) -> None:
        super().__init__(source)
        self.pipe, self.keeps_count = pipe, isinstance(pipe, _KEEP_COUNT)

    def run(self) -> Iterator[Any]:
        pipe = copy.copy(self.pipe)
        pipe.datapipe = self.source.items  # type: ignore[attr-defined]
        yield from pipe

    def _in_graph(self, *, counted: bool) -> GraphStep:
        return GraphStep.of(f"torch.{_name(self.pipe)}", {"batch_size": self.items_per_batch} if counted else {})


class TorchBatch(TorchStep):
    """torch's batch, which makes batches of all items."""

    @dataclass(slots=True)
    class At:  # noqa: D106 - see Stage
        delivered: int = 0
        dropped: int = 0

    tallies = ("delivered", "dropped")

    def run(self) -> Iterator[Any]:
        at, pipe, taken = self.at, copy.copy(self.pipe), 0

        def counted() -> Iterator[Any]:
            nonlocal taken
            for item in self.source.items:
                taken += 1
                yield item

        pipe.datapipe = counted()  # type: ignore[attr-defined]
        for batch in pipe:  # which holds nothing now: all items that were taken are in batches
            at.delivered, taken = at.delivered + taken, 0
            yield batch
        at.dropped += taken

    @property
    def items_per_batch(self) -> int:
        return int(self.pipe.batch_size)

    def batches_of(self, count: int) -> int:
        size = self.items_per_batch
        return count // size if self.pipe.drop_last else -(-count // size)


def torch_step(source: Stage[Any], pipe: IterDataPipe[Any]) -> TorchStep:
    """Return a pipe of torch's, one of HOLD_NOTHING, as a stage over ``source``."""
    return (TorchBatch if isinstance(pipe, _BATCHER) else TorchStep)(source, pipe)


class TorchSource(Source[Any]):
    """A chain that ends in a pipe of torch's, as the first stage of ours. Rules 2 and 3.

    Args:
        pipe: its last pipe.
        ours: whether a pipe of ours is somewhere in it.
    """

    @dataclass(slots=True)
    class At:  # noqa: D106 - see Stage
        taken: int = 0

    def __init__(self, pipe: IterDataPipe[Any], ours: bool) -> None:
        super().__init__()
        self.pipe = pipe
        self._ours = ours

    @property
    def divides_items(self) -> bool:
        """Whether this stage divides the items over lanes: not if a sharding_filter or a pipe of
        ours does.
        """
        return not self._ours and not any(isinstance(pipe, _SHARDING_FILTER) for pipe in walk(self.pipe))

    def run(self) -> Iterator[Any]:
        at, lane = self.at, self.lane
        start = lane.number + at.taken * lane.of
        if start > sys.maxsize:
            raise damaged(f"{at.taken} items were taken from torch's pipe")
        for item in islice(_copied(self.pipe), start, None, lane.of):
            at.taken += 1
            yield item

    @property
    def _urls(self) -> Sequence[str] | None:
        """The list of URLs at the beginning of the chain; None: there is none."""
        listed = [pipe.iterable for pipe in walk(self.pipe) if isinstance(pipe, _WRAPPER)]
        if len(listed) != 1 or not isinstance(listed[0], (list, tuple)):
            return None
        urls = [os.fspath(url) for url in listed[0] if isinstance(url, (str, os.PathLike))]
        return urls if len(urls) == len(listed[0]) else None

    def which_data(self) -> Data:
        urls = self._urls
        if not urls:
            return Data(shards=None if urls is None else 0)
        return Data(fingerprint(urls), data_id(urls), redact(urls[0]), shards=len(urls))

    @cached_property
    def _packed(self) -> Packed:
        return Packed(self._urls or ())

    def number_of(self, url: str) -> str | None:
        number = self._packed.shown.number_of(url)
        return None if number is None else str(number)

    def _in_graph(self, *, counted: bool) -> GraphStep:
        return GraphStep.of("torch", {"pipes": list(map(_name, walk(self.pipe)))})

    def check_resumable(self) -> None:
        for pipe in walk(self.pipe):
            if type(pipe) not in _REPEATABLE or self._ours:
                name = type(pipe).__name__
                mend = _INSTEAD.get(
                    _name(pipe), "use a pipe of wds_pipes instead, or write it as a Stage and register_stage() it"
                )
                raise StateError(
                    f"the state of torch's {name} in this chain cannot be known exactly, so the "
                    f"chain has no state: {mend}."
                )
            if isinstance(pipe, _WRAPPER) and isinstance(pipe.iterable, Iterator):
                raise StateError(
                    "IterableWrapper holds an iterator, which cannot be read again after a crash: give it a list."
                )


def _name(pipe: IterDataPipe[Any]) -> str:
    return type(pipe).__name__.removesuffix("IterDataPipe")
