"""InterleaveShards: keep several shards open, and take one item from each in turn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from wds_pipes.core.composite import Composite
from wds_pipes.core.counts import sum_counts
from wds_pipes.core.lane import Lane
from wds_pipes.core.options import check_count
from wds_pipes.core.running import END, Mark, Out, begin, running_copy
from wds_pipes.core.stage import Stage, functional_name
from wds_pipes.core.state import damaged, read_count, read_list, read_position
from wds_pipes.core.words import shown
from wds_pipes.stages.shard_list import ShardList
from wds_pipes.stages.shard_source import ShardRange


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
        source: a pipe that starts with ``ShardList``.
        count: how many shards to keep open, at least 1.

    Raises:
        TypeError: when the stage is built, if the pipe does not start with ``ShardList``, has
            ``take_samples`` or ``slice_samples`` in it, or ``count`` is not an int.
        ValueError: when the stage is built, if ``count`` is less than 1.

    Checkpoint: which shards are open, and the position in each: about 60 bytes per open shard after
    ``group_by_key()``. A resume opens these shards again, and reads again what the steps before
    this one read again for each of them.
    """

    @dataclass(slots=True)
    class At(Composite.At):
        opened: int = 0  # how many shards of the lane were opened so far
        turn: int = 0  # the index in ``round`` of the shard that is next
        # the open shards: their places in the lane's order, and the positions in them
        round: tuple[tuple[int, Mark | None], ...] = ()

    keeps_count = True
    ends_reading = True
    order_options = ("count",)

    def __init__(self, source: Stage[Out], count: int) -> None:
        super().__init__(source)
        if not isinstance(self._before.root, ShardList):
            raise TypeError("interleave_shards() opens the shards of ShardList: start the pipeline with it")
        if whole := next((step for step in self._before.chain if step.whole_lanes), None):
            step = functional_name(type(whole))
            raise TypeError(f"interleave_shards() runs the steps before it for each shard: put {step}() after it")
        self.count = check_count("count", count)
        # while running, takes the place of the first stage: its position says how many shards were
        # opened
        self._list: ShardList | None = None
        self._chains: list[Stage[Out]] = []  # while running, the chains of the open shards
        self._marks: list[tuple[int, Mark | None]] = []
        self._ahead: Stage[Out] | None = None  # while running, the chain of the shard that will be opened next

    @property
    def _before(self) -> Stage[Out]:
        assert self.source is not None
        return self.source

    @property
    def root(self) -> Stage[Any]:
        return self._list if self._list is not None else self._before.root

    @property
    def opened(self) -> int:
        return self.root.opened

    def open(self, lane: Lane, mark: Mark | None = None) -> InterleaveShards[Out]:
        running = running_copy(self)
        running.lane, running.at = lane, self._at(mark and mark[0])
        first = self._before.root.open(lane)
        assert isinstance(first, ShardList)
        first.at.next = running.at.opened
        running._list, running._chains, running._marks, running._ahead = first, [], list(running.at.round), None
        begin(running, mark)
        return running

    def start(self, offset: int = 0, *, ahead: bool = False) -> None:
        ranges, chains = self._ranges, self._chains
        if self.at.opened > len(ranges):
            raise damaged(f"interleave_shards has opened {self.at.opened} shards of a lane of {len(ranges)}")
        for place, mark in self._marks[len(chains) :]:
            chains.append(self._chain(ranges[place], mark, ahead=ahead))
        while len(chains) < self.count and self.at.opened < len(ranges):
            self._marks.append((self.at.opened, None))
            chains.append(self._next(ahead=ahead))
        self._look_ahead()

    def run(self) -> Iterator[Out]:
        self.start()
        at, marks, chains, ranges = self.at, self._marks, self._chains, self._ranges
        while chains:
            chain = chains[at.turn]
            item: Any = next(chain.items, END)
            if item is not END:
                marks[at.turn] = (marks[at.turn][0], chain.mark())
                at.turn = (at.turn + 1) % len(chains)
                yield item
                continue
            self.retire(chain)
            if at.opened < len(ranges):
                marks[at.turn] = (at.opened, None)
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
        first = self.root
        assert isinstance(first, ShardList)
        return first.order(self.lane)

    def _next(self, *, ahead: bool = False) -> Stage[Out]:
        """Return the chain of the next unopened shard."""
        chain, self._ahead = self._ahead, None
        if chain is None:
            chain = self._chain(self._ranges[self.at.opened], None, ahead=ahead)
        self.at.opened += 1
        self.root.at.next = self.at.opened
        return chain

    def _look_ahead(self) -> None:
        """Request the first bytes of the next unopened shard."""
        if self._ahead is None and self.at.opened < len(self._ranges):
            self._ahead = self._chain(self._ranges[self.at.opened], None, ahead=True)

    def _chain(self, shard_range: ShardRange, mark: Mark | None, *, ahead: bool) -> Stage[Out]:
        """Open the steps before this one over one shard. Their lane is numbered after the shard, so
        that random decisions do not depend on the lane that reads it.
        """
        lane, (shard, start, _), of = self.lane, shard_range, self.which_data().shards
        chain = self._before.open(
            Lane(lane.seed, lane.epoch, shard, of or 1, start, (shard_range,), lane.padding), mark
        )
        chain.start(ahead=ahead)
        return chain

    def mark(self) -> Mark:
        self.at.round = tuple(self._marks)
        return self._own(self.at), None

    def where(self, mark: Mark | None, lane: Lane) -> str | None:
        """Return the URL of the shard that is next."""
        at = self._at(mark and mark[0])
        place = at.round[at.turn][0] if at.round else at.opened
        return self._before.root.where(((place,), None), lane)

    def counts(self, mark: Mark | None, delivered: int) -> dict[str, int]:
        own = mark and mark[0]
        inner = sum_counts(({"delivered": 0}, *(self._before.counts(before, 0) for _, before in self._at(own).round)))
        return self.counts_with(own, inner, delivered)

    # A state names the first open shard by the position of ShardList, and the others relative to
    # it. So, as in any chain, all shards that are opened and not finished follow that position.

    def dump_mark(self, mark: Mark | None) -> list[dict[str, Any]]:
        *before, own = super().dump_mark(mark)
        at = self._at(mark and mark[0])
        first = min((place for place, _ in at.round), default=at.opened)
        own |= {
            "opened": at.opened - first,
            "round": [[place - first, self._before.dump(before)] for place, before in at.round],
        }
        before[0] = {"next": first} if first else {}
        return [*before, {name: value for name, value in own.items() if value}]

    def uncounted(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        *before, own = super().uncounted(entries)
        if "round" in own:
            own = {**own, "round": [[place, self._before.uncounted(position)] for place, position in own["round"]]}
        return [*before, own]

    def load_mark(self, entries: list[dict[str, Any]]) -> Mark:
        start, *between, own = entries
        opened = [
            read_list(shard, "an open shard of interleave_shards")
            for shard in read_list(own.get("round", []), "'round' of interleave_shards")
        ]
        if any(between) or any(len(shard) != 2 for shard in opened):
            raise damaged(f"interleave_shards cannot stand at {shown(entries)}")
        counted, _ = super().load_mark([*entries[:-1], {name: own[name] for name in own if name != "round"}])
        at, first = self._at(counted), start.get("next", 0)
        places = [read_count(place, "an open shard of interleave_shards") for place, _ in opened]
        if (
            len(set(places)) < len(places)
            or len(places) > self.count
            or any(place >= at.opened for place in places)
            or at.turn >= max(1, len(places))
        ):
            raise damaged(
                f"interleave_shards cannot have shards {shown(places)} of {at.opened} "
                f"open, and take from number {at.turn} of them"
            )
        at.opened += first
        at.round = tuple(
            (first + place, self._before.load(read_position(position, "a shard of interleave_shards", self.depth)))
            for place, position in opened
        )
        return self._own(at), None
