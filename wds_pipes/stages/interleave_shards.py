"""InterleaveShards: keep several shards open, and take one item from each in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from wds_pipes.core.chain import PARTS, Chain, Composite
from wds_pipes.core.lane import Lane, LaneFacts, ShardRange
from wds_pipes.core.options import check_count
from wds_pipes.core.stage import END, Mark, Out, Stage, functional_name, is_built_in
from wds_pipes.core.state import damaged, read_as, read_count, read_dict
from wds_pipes.core.words import shown
from wds_pipes.stages.join import Join
from wds_pipes.stages.shard_list import ShardList


class ShardPart(NamedTuple):
    """Where an open shard stands.

    Attributes:
        place: its place in the order of the lane.
        mark: the position in it; None: its beginning.
    """

    place: int = 0
    mark: Mark | None = None


class InterleaveShards(Composite[Out]):
    """Keep several shards open and take one item from each in turn (functional name:
    ``interleave_shards``).

    The steps before this one run separately for each shard, for ``count`` shards at a time. When a
    shard has no more items, the next shard of the lane takes its place. Neighbouring samples then
    come from different shards, so a smaller ``shuffle_buffer`` after this step shuffles equally
    well. Remote shards are requested together, and the next one before its turn. Put this step
    after ``group_by_key()``. Random decisions of the steps before this one are a function of (seed,
    epoch, shard). Their ``max_errors`` applies to each shard; in PipeLoader, to all shards of a
    rank together.

    Args:
        source: a pipe that starts with ``ShardList``, or with a ``join``, whose shards at one place
            of the lists count as one shard.
        count: how many shards to keep open, at least 1.

    Raises:
        TypeError: when the stage is built, if the pipe does not start with these, has
            ``take_samples`` or ``slice_samples`` in it, or ``count`` is not an int.
        ValueError: when the stage is built, if ``count`` is less than 1.

    Checkpoint: which shards are open, and the position in each: about 75 bytes per open shard after
    ``group_by_key()``. A resume opens these shards again, and reads again what the steps before
    this one read again for each of them.
    """

    @dataclass(slots=True)
    class At(Composite.At):
        next: int = 0  # how many shards of the lane were opened so far
        turn: int = 0  # the index in ``parts`` of the shard that is next

    keeps_count = True
    scope = "window"
    order_options = ("count",)
    part_kind = ShardPart
    parts: list[ShardPart]
    source: Stage[Out]

    def __init__(self, source: Stage[Out], count: int) -> None:
        super().__init__(source)
        chain = Chain(source)
        listed = chain.root.first_list if isinstance(chain.root, Join) else chain.root
        if not isinstance(listed, ShardList):
            raise TypeError(
                "interleave_shards() opens the shards of ShardList: start the pipeline with it, or a join()"
            )
        if whole := next((step for step in reversed(chain.steps) if step.scope == "lane"), None):
            step, kind = functional_name(type(whole)), type(whole)
            mend = "" if is_built_in(kind) else f', or declare {kind.__name__}.scope = "window"'
            raise TypeError(f"interleave_shards() runs the steps before it for each shard: put {step}() after it{mend}")
        self.count, self._list = check_count("count", count), listed
        self._chains: list[Stage[Out]] = []  # while running, the chains of the open shards
        self._ahead: Stage[Out] | None = None  # while running, the chain of the shard that will be opened next

    @property
    def opened(self) -> int:
        return int(self.at.next)

    def start(self, offset: int = 0, *, ahead: bool = False) -> None:
        ranges, chains = self._ranges, self._chains
        if self.at.next > len(ranges):
            raise damaged(f"interleave_shards has opened {self.at.next} shards of a lane of {len(ranges)}")
        for place, mark in self.parts[len(chains) :]:
            chains.append(self._chain(ranges[place], mark, ahead=ahead))
        while len(chains) < self.count and self.at.next < len(ranges):
            self.parts.append(ShardPart(self.at.next))
            chains.append(self._next(ahead=ahead))
        self._look_ahead()

    def run(self) -> Iterator[Out]:
        self.start()
        at, marks, chains, ranges = self.at, self.parts, self._chains, self._ranges
        while chains:
            chain = chains[at.turn]
            item: Any = next(chain.items, END)
            if item is not END:
                marks[at.turn] = ShardPart(marks[at.turn].place, chain.mark())
                at.turn = (at.turn + 1) % len(chains)
                yield item
                continue
            self.retire(chain)
            if at.next < len(ranges):
                marks[at.turn] = ShardPart(at.next)
                chains[at.turn] = self._next()
                self._look_ahead()
            else:
                del marks[at.turn], chains[at.turn]
                at.turn = 0 if at.turn == len(chains) else at.turn

    @property
    def inner(self) -> list[Stage[Any]]:
        return [*self._chains, *([] if self._ahead is None else [self._ahead])]

    @cached_property
    def _ranges(self) -> Sequence[ShardRange]:
        """The shards of this lane, or ranges of them."""
        return self._list.order(self.lane)

    def _next(self, *, ahead: bool = False) -> Stage[Out]:
        """Return the chain of the next unopened shard."""
        chain, self._ahead = self._ahead, None
        if chain is None:
            chain = self._chain(self._ranges[self.at.next], None, ahead=ahead)
        self.at.next += 1
        return chain

    def _look_ahead(self) -> None:
        """Request the first bytes of the next unopened shard."""
        if self._ahead is None and self.at.next < len(self._ranges):
            self._ahead = self._chain(self._ranges[self.at.next], None, ahead=True)

    def _chain(self, shard_range: ShardRange, mark: Mark | None, *, ahead: bool) -> Stage[Out]:
        """Open the steps before this one over one shard. Their lane is numbered after the shard, so
        that random decisions do not depend on the lane that reads it.
        """
        lane, (shard, start, _), of = self.lane, shard_range, len(self._list.urls)
        own = replace(lane, number=shard, of=of, generation=start, shards=(shard_range,), slice=None)
        chain = self.source.open(own, mark)
        chain.start(ahead=ahead)
        return chain

    def where_in(self, own: tuple[Any, ...], parts: tuple[ShardPart, ...], lane: Lane) -> str | None:
        """Return the URL of the shard that is next."""
        at = self._at(own)
        return self._list.where((parts[at.turn].place if parts else at.next,), lane)

    @classmethod
    def describe(cls, entry: dict[str, Any], lane: LaneFacts) -> str | None:
        parts, turn = read_as(list, entry.get(PARTS, []), "the open shards"), read_count(entry.get("turn", 0), "'turn'")
        if turn >= len(parts):
            return ShardList.describe(entry, lane)
        place = read_dict(parts[turn], "an open shard").get("place", 0)
        return ShardList.describe({"next": place}, lane)  # the shard that is next

    def fit_parts(self, at: Any, parts: list[ShardPart], *, fixed: bool) -> list[ShardPart]:
        places = [part.place for part in parts]
        if (
            len(set(places)) < len(places)
            or len(places) > self.count
            or any(place >= at.next for place in places)
            or at.turn >= max(1, len(places))
        ):
            raise damaged(
                f"interleave_shards cannot have shards {shown(places)} of {at.next} "
                f"open, and take from number {at.turn} of them"
            )
        return parts

    def rest_of(self, entry: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        parts = entry.get(PARTS, [])
        done = min((part.get("place", 0) for part in parts), default=entry.get("next", 0))
        parts = [{**part, "place": part.get("place", 0) - done} for part in parts]
        return done, {**entry, "next": entry.get("next", 0) - done, **({PARTS: parts} if parts else {})}
