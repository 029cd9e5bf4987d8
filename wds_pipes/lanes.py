"""Lanes: an epoch dealt into parts that know nothing of processes, and dealt again when their number changes.

Rules:
1. An epoch is dealt into lanes by (seed, epoch, number of lanes) alone: lane i of n gives the shards i, i + n, i + 2n ... of the epoch's order.
2. A chain is cut in two before its first ``batch_samples``: what stands before is run for each part of a lane by itself, what stands behind (it holds nothing
   between items) runs over the parts as one stream, so that no batch is cut short where a part ends.
3. To deal the rest of an epoch again, each lane leaves a *tail* (the shards that it had opened, from its position on, under its old name, since its shuffle
   goes by that) and the shards that it had not opened. Tails go to the new lanes in turn, unopened shards are dealt as in rule 1.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from wds_pipes.stage import Lane, Mark, Out, Stage, damaged
from wds_pipes.stages import BatchSamples, ShardList


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a lane: a lane's name, the shards to read under it, and where to begin (as ``Stage.dump`` wrote it; None: at the beginning)."""

    lane: Lane
    position: list[dict[str, Any]] | None = None

    def as_json(self) -> dict[str, Any]:
        lane = self.lane
        return {"lane": [lane.number, lane.of, lane.generation], "shards": list(lane.shards or ()), "position": self.position}

    @classmethod
    def from_json(cls, entry: dict[str, Any], seed: int, epoch: int) -> Part:
        number, of, generation = entry["lane"]
        return cls(Lane(seed, epoch, number, of, generation, tuple(entry["shards"])), entry["position"])


@dataclass(frozen=True)
class Deal:
    """How an epoch is dealt.

    Attributes:
        lanes: into how many lanes.
        history: for each earlier deal of this epoch, how many shards each of its lanes had opened when it was ended.
        tails: what the lanes of earlier deals left half read.
        counts: what became of the samples that earlier deals delivered.
    """

    lanes: int
    history: tuple[tuple[int, ...], ...] = ()
    tails: tuple[Part, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)

    def parts(self, number: int, source: ShardList, seed: int, epoch: int) -> list[Part]:
        """The parts of lane ``number``: its tails, then its share of the shards that nobody has opened."""
        shards = tuple(self._unopened(source, seed, epoch)[number :: self.lanes])
        return [*self.tails[number :: self.lanes], Part(Lane(seed, epoch, number, self.lanes, len(self.history), shards))]

    def _unopened(self, source: ShardList, seed: int, epoch: int) -> list[int]:
        """The numbers of the shards that no lane of an earlier deal has opened, in the epoch's order."""
        shards = source.epoch_order(seed, epoch)
        for opened in self.history:
            lanes = len(opened)
            shards = [shard for place, shard in enumerate(shards) if place // lanes >= opened[place % lanes]]
        return shards

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types; ``from_json`` is the way back."""
        return {"history": [list(opened) for opened in self.history], "tails": [tail.as_json() for tail in self.tails], "counts": dict(self.counts)}

    @classmethod
    def from_json(cls, lanes: int, entry: dict[str, Any], seed: int, epoch: int) -> Deal:
        try:
            tails = tuple(Part.from_json(tail, seed, epoch) for tail in entry["tails"])
            return cls(lanes, tuple(tuple(opened) for opened in entry["history"]), tails, dict(entry["counts"]))
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(f"its deal cannot be read ({error})") from error


class Parts(Stage[Out]):
    """The parts of a lane as one stream.

    Checkpoint: which part, how many of its shards were opened, and the position in it.
    """

    @dataclass(slots=True)
    class At:  # noqa: D106 - see Stage
        part: int = 0
        opened: int = 0

    def __init__(self, source: Stage[Out]) -> None:
        super().__init__(source)
        self.parts: list[Part] = []
        self._inner: Stage[Out] | None = None
        self._resume: Mark | None = None

    def open(self, lane: Lane, mark: Mark | None = None) -> Parts[Out]:
        own, before = mark or (None, None)
        running = copy.copy(self)
        running.lane, running.at, running._resume = lane, self._at(own), before
        running.items = running.run()
        return running

    def run(self) -> Iterator[Out]:
        at, recipe = self.at, self.source
        assert recipe is not None
        mark = self._resume
        for number in range(at.part, len(self.parts)):
            part = self.parts[number]
            at.part = number
            if mark is None and part.position is not None:
                mark = recipe.load(part.position)
            self._inner = inner = recipe.open(part.lane, mark)
            yield from inner.items
            at.opened = 0
            inner.close()
            mark = None

    def mark(self) -> Mark:
        at, inner = self.at, self._inner
        if inner is None:
            return self._own(at), self._resume
        return (at.part, inner.root.at.next), inner.mark()

    def where(self, mark: Mark | None, lane: Lane) -> str | None:
        if mark is None or not self.parts or self.source is None:
            return None
        return self.source.where(mark[1], self.parts[mark[0][0]].lane)

    def close(self) -> None:
        self.items.close()  # type: ignore[attr-defined]
        if self._inner is not None:
            self._inner.close()


def lay_out(stage: Stage[Any]) -> Stage[Any]:
    """A chain with ``Parts`` in the place of rule 2.

    Raises:
        TypeError: the chain does not start with a ShardList.
    """
    if not isinstance(stage.root, ShardList):
        raise TypeError("lanes are dealt by ShardList: start the pipeline with it")
    chain: list[Stage[Any]] = [stage]
    while chain[0].source is not None:
        chain.insert(0, chain[0].source)
    cut = next((place for place, step in enumerate(chain) if isinstance(step, BatchSamples)), len(chain))
    if not all(step.holds_nothing for step in chain[cut:]):
        cut = len(chain)
    laid: Stage[Any] = Parts(chain[cut - 1])
    for step in chain[cut:]:
        again = copy.copy(step)
        again.source = laid
        laid = again
    return laid


def with_parts(stage: Stage[Any], parts: list[Part]) -> Stage[Any]:
    """A chain that ``lay_out`` made, with the parts of a lane."""
    again = copy.copy(stage)
    if isinstance(again, Parts):
        again.parts = parts
    elif again.source is not None:
        again.source = with_parts(again.source, parts)
    return again


def deal_again(old: Deal, lanes: int, states: dict[int, dict[str, Any]], stage: Stage[Any], epoch: int) -> Deal:
    """The deal of what is left of an epoch into another number of lanes.

    Args:
        old: how it was dealt.
        lanes: into how many lanes it is to be dealt.
        states: of all the lanes of ``old``: ``position`` (as ``dump`` wrote it; None: not begun), ``ended`` and ``counts``.
        stage: the chain that ``lay_out`` made.
        epoch: which.
    """
    source, depth = stage.root, _parts_of(stage).depth
    assert isinstance(source, ShardList)
    tails, opened, counts = [], [], dict(old.counts)
    for number in range(old.lanes):
        state = states[number]
        for name, count in state["counts"].items():
            counts[name] = counts.get(name, 0) + count
        parts = old.parts(number, source, stage.seed, epoch)
        position = state["position"]
        if position is None:
            opened.append(0)
            tails += parts[:-1]
            continue
        at = position[depth]
        place, given = at.get("part", 0), at.get("opened", 0)
        if not isinstance(place, int) or not 0 <= place < len(parts):
            raise damaged(f"lane {number} stands in part {place} of {len(parts)}")
        if state["ended"]:
            opened.append(len(parts[-1].lane.shards or ()))
            continue
        last = place == len(parts) - 1
        opened.append(given if last else 0)
        tail = _tail(parts[place], position[:depth], given if last else None)
        tails += [*([tail] if tail else []), *(parts[place + 1 : -1])]
    return Deal(lanes, (*old.history, tuple(opened)), tuple(tails), counts)


def _parts_of(stage: Stage[Any]) -> Parts[Any]:
    """The stage that ``lay_out`` put in."""
    while not isinstance(stage, Parts):
        assert stage.source is not None
        stage = stage.source
    return stage


def _tail(part: Part, position: list[dict[str, Any]], opened: int | None) -> Part | None:
    """What a part leaves half read: its shards up to the ``opened`` ones (None: all), from its position on."""
    first = position[0].get("next", 0)
    shards = (part.lane.shards or ())[first:opened]
    if not shards:
        return None
    rest = {name: value for name, value in position[0].items() if name != "next"}
    return Part(replace(part.lane, shards=shards), [rest, *position[1:]])
