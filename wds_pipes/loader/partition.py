"""Lanes: an epoch is partitioned into lanes, which are independent of processes, and repartitioned
when their number changes.

Words:
- A *shard range* (``ShardRange``) is samples a to b of a shard.
- A *partition* (``Partition``) divides an epoch into lanes. The epoch's first partition has
  generation 0; each repartition makes the next one.
- A *segment* (``Segment``) is a run of the shard ranges of one lane of one partition. After a
  repartition, a lane consists of several segments.
- A *remainder* is a segment that a lane had opened and not finished when the epoch was
  repartitioned.

Rules:
1. The partition of an epoch depends on (seed, epoch, number of lanes) alone. Lane i of n gets the
   shards i, i + n, i + 2n ... of the epoch's order. If the samples of the shards are counted, it
   gets the i-th of n consecutive runs of samples instead, whose sizes differ by at most one.
2. To repartition the rest of an epoch, each lane leaves two things: a remainder and the shards that
   it had not opened. A remainder begins at the lane's position, and is read under the old number
   and generation of the lane, since its shuffle depends on these. Remainders go to the new lanes in
   turn. Unopened shards are divided as in rule 1; if the samples are counted, they are divided so
   that the lanes become as equal as possible. The lanes of a mix, and of a chain with a step that
   needs whole lanes (its ``scope`` is ``"lane"``), are not divided: each continues as a whole, as a
   remainder.
"""

from __future__ import annotations

import itertools
import pickle
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from wds_pipes.core.chain import PARTS, POSITION, Chain
from wds_pipes.core.counts import COUNTED, public_counts, sum_counts
from wds_pipes.core.lane import Lane, Stripe
from wds_pipes.core.shard_ranges import ShardRanges, joined
from wds_pipes.core.stage import Source
from wds_pipes.core.state import (
    MOST_LANES,
    MOST_PARTITIONS,
    damaged,
    read_count,
    read_counts,
    read_dict,
    read_list,
    read_position,
)
from wds_pipes.core.words import shown
from wds_pipes.errors import StateError

if TYPE_CHECKING:
    from wds_pipes.loader.segments import Segments


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment: a run of the ranges of one lane of one partition.

    Attributes:
        number: the number of the lane in that partition.
        generation: the generation of that partition: how often the epoch had been repartitioned.
        start: the first of the lane's ranges.
        stop: the one after the last; None: up to the last of the lane.
        position: where to begin, as ``Chain.dump`` wrote it; None: at the beginning.
        samples: how many samples it has; None: not known.
    """

    number: int
    generation: int
    start: int = 0
    stop: int | None = None
    position: list[dict[str, Any]] | None = None
    samples: int | None = None

    def as_json(self) -> list[Any]:
        """Return plain JSON types: of the position, the number of stages and those that are not at
        their beginning.
        """
        position: list[Any] | None = None
        if self.position is not None:
            position = [len(self.position), {str(depth): entry for depth, entry in enumerate(self.position) if entry}]
        return [
            self.number,
            self.generation,
            self.start,
            self.stop,
            position,
            *([] if self.samples is None else [self.samples]),
        ]

    @classmethod
    def from_json(cls, entry: object, chain: Chain) -> Segment:
        """Return the segment that ``as_json`` wrote, of a chain."""
        stages = len(chain.placed)
        number, generation, start, stop, position, *samples = _fields_of(entry, 5, 6)
        for value in (number, generation, start, *samples, *([] if stop is None else [stop])):
            read_count(value, "a number of a remainder")
        if position is not None:
            of, entries = _fields_of(position, 2)
            names = set(map(str, range(stages)))
            if of != stages or not read_dict(entries, "the position of a remainder").keys() <= names:
                raise damaged(f"a remainder stands at {shown(position)}")
            position = read_position(
                [entries.get(str(depth), {}) for depth in range(stages)], "the position of a remainder"
            )
            position = chain.dump(chain.load(position))  # without sources of a mix that are gone
        return cls(number, generation, start, stop, position, *samples)


def _fields_of(entry: object, *lengths: int) -> list[Any]:
    """Return ``entry`` if it is a list of one of these lengths, else raise."""
    if not isinstance(entry, list) or len(entry) not in lengths:
        raise damaged(f"its partition holds {shown(entry)}")
    return entry


def _runs(numbers: tuple[int, ...] | None) -> list[list[int]] | None:
    """Run-length encode numbers: each run as its number and its length."""
    return None if numbers is None else [[number, len(list(run))] for number, run in itertools.groupby(numbers)]


def _flat(runs: object, lanes: int | None = None) -> tuple[int, ...]:
    """Decode what ``_runs`` encoded: one number for each of ``lanes`` lanes (None: any number of
    lanes up to MOST_LANES).
    """
    pairs = [_fields_of(run, 2) for run in read_list(runs, "a list of its partition")]
    count = sum(read_count(times, "a number of lanes in its partition", least=1, most=MOST_LANES) for _, times in pairs)
    if count > MOST_LANES or (lanes is not None and count != lanes):
        raise damaged(f"its partition is of {count} lanes, and {lanes or f'at most {MOST_LANES}'} can be")
    return tuple(
        value
        for number, times in pairs
        for value in itertools.repeat(read_count(number, "a number of its partition"), times)
    )


Shares = list[list[ShardRanges]]  # of each lane, of each partition of an epoch, from the first one on
Sizes = tuple[int, ...] | None  # how many samples each lane gets of the unopened shards; None: whole shards in turn
History = tuple[tuple[Sizes, tuple[int, ...]], ...]  # see Partition


@dataclass(frozen=True)
class Partition:
    """A partition of an epoch into lanes.

    Attributes:
        lanes: the number of lanes.
        sizes: how the unopened shards are divided.
        history: of each earlier partition of this epoch, its sizes, and how many ranges each of its
            lanes had opened when the epoch was repartitioned.
        remainders: the remainders of the lanes of earlier partitions.
        counts: the samples of earlier partitions, by what became of them.
        later: with ``epoch_end="loop"``: the partitions of the next epochs, as far as these were
            repartitioned, since lanes had begun them.
        stripe: None; see ``wds_pipes.loader.global_order``.
    """

    lanes: int
    sizes: Sizes = None
    history: History = ()
    remainders: tuple[Segment, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    later: tuple[Partition, ...] = ()
    stripe: Stripe | None = None

    @classmethod
    def first(cls, lanes: int, source: Source[Any], epoch: int) -> Partition:
        """Return the partition at the beginning of an epoch.

        If samples are counted, the sizes of lanes differ by at most one.
        """
        if source.sample_counts is None:
            return cls(lanes)
        total = ShardRanges.of(source.epoch_shards(source.seed, epoch)).samples
        return cls(lanes, tuple((lane + 1) * total // lanes - lane * total // lanes for lane in range(lanes)))

    def of_epoch(self, ahead: int, source: Source[Any], epoch: int) -> Partition:
        """Return the partition of the epoch that is ``ahead`` epochs after this one."""
        if not ahead:
            return self
        return self.later[ahead - 1] if ahead <= len(self.later) else Partition.first(self.lanes, source, epoch)

    def segments(self, number: int, source: Source[Any]) -> list[Segment]:
        """Return the segments of lane ``number``: its remainders, then its share of the unopened
        shards.
        """
        remainders = list(self.remainders[number :: self.lanes])
        if self.history and not source.divides_shards:
            return remainders  # the lanes of a mix continue as a whole
        return [
            *remainders,
            Segment(number, len(self.history), samples=None if self.sizes is None else self.sizes[number]),
        ]

    def lane(self, segment: Segment, source: Source[Any], seed: int, epoch: int) -> Lane:
        """Return the lane under whose number a segment is read, with the segment's ranges."""
        if not source.divides_shards:  # a mix: each of its sources divides its own
            return Lane(seed, epoch, segment.number, len(self.history[0][1]) if self.history else self.lanes)
        shares = _shares(source, (seed, epoch), self.lanes, self.sizes, self.history)[segment.generation]
        return Lane(
            seed,
            epoch,
            segment.number,
            len(shares),
            segment.generation,
            shares[segment.number][segment.start : segment.stop],
        )

    def shares(self, source: Source[Any], seed: int, epoch: int) -> list[ShardRanges]:
        """Return the shares of the lanes, of the ranges that no lane of an earlier partition has
        opened.
        """
        return _shares(source, (seed, epoch), self.lanes, self.sizes, self.history)[-1]

    def samples(self) -> list[int] | None:
        """Return how many samples each lane has; None: not known."""
        if self.sizes is None:
            return None
        return [
            size + sum(remainder.samples or 0 for remainder in self.remainders[lane :: self.lanes])
            for lane, size in enumerate(self.sizes)
        ]

    @property
    def start(self) -> int:
        """How much of the epoch was over when it was divided: differs for its partitions."""
        return len(self.history)

    def as_json(self) -> dict[str, Any] | None:
        """Return plain JSON types, new at each call; ``from_json`` is the inverse. None: it is the
        first partition of an epoch.
        """
        if not self.history and not self.later:
            return None
        return cast(dict[str, Any], pickle.loads(self._packed))

    @cached_property
    def _packed(self) -> bytes:
        """The pickled result of ``as_json``.

        A partition does not change, and unpickling is faster than building it again.
        """
        entry: dict[str, Any] = {
            "sizes": _runs(self.sizes),
            "history": [[_runs(sizes), _runs(opened)] for sizes, opened in self.history],
            "remainders": [remainder.as_json() for remainder in self.remainders],
            "counts": dict(self.counts),
        }
        if self.later:
            entry["later"] = [pickle.loads(partition._packed) for partition in self.later]
        return pickle.dumps(entry)

    @classmethod
    def from_json(cls, lanes: int, entry: dict[str, Any], stage: Segments[Any], epoch: int) -> Partition:
        """Return the partition that ``as_json`` wrote.

        Args:
            lanes: the number of lanes.
            entry: what ``as_json`` returned.
            stage: the stage that runs the segments of a lane.
            epoch: the epoch.

        Raises:
            StateError: ``entry`` cannot be a partition of this epoch.
        """
        partition = cls._one_from_json(lanes, entry, stage, epoch)
        later: list[Partition] = []
        lanes_so_far = partition.lanes_so_far
        for ahead, one in enumerate(read_list(entry.get("later", []), "the later epochs of its partition"), 1):
            later.append(cls._one_from_json(lanes, read_dict(one, "its partition"), stage, epoch + ahead))
            lanes_so_far += later[-1].lanes_so_far
            if lanes_so_far > MOST_LANES:
                raise damaged(f"its partitions are of {lanes_so_far} lanes, and at most {MOST_LANES} can be")
        return replace(partition, later=tuple(later))

    @property
    def lanes_so_far(self) -> int:
        """How many lanes this partition and the earlier ones of its epoch have together."""
        return self.lanes + sum(len(opened) for _, opened in self.history)

    @classmethod
    def _one_from_json(cls, lanes: int, entry: dict[str, Any], stage: Segments[Any], epoch: int) -> Partition:
        """Return the partition of one epoch, without later epochs."""
        chain = Chain(stage.source)
        root = chain.root
        history: list[tuple[Sizes, tuple[int, ...]]] = []
        earlier, lanes_so_far = read_list(entry.get("history"), "the history of its partition"), lanes
        if not len(earlier) <= MOST_PARTITIONS:
            raise damaged(f"its epoch was repartitioned {len(earlier)} times, and at most {MOST_PARTITIONS} can be")
        for one in earlier:
            sizes, runs = _fields_of(one, 2)
            opened = _flat(runs)
            lanes_so_far += len(opened)
            if not opened or lanes_so_far > MOST_LANES:
                raise damaged(f"its partitions are of {lanes_so_far} lanes, and at most {MOST_LANES} can be")
            history.append((None if sizes is None else _flat(sizes, len(opened)), opened))
        remainders = tuple(
            Segment.from_json(remainder, chain)
            for remainder in read_list(entry.get("remainders"), "the remainders of its partition")
        )
        given = entry.get("sizes")
        partition = cls(
            lanes,
            None if given is None else _flat(given, lanes),
            tuple(history),
            remainders,
            dict(read_counts(entry.get("counts"), "the counts of its partition")),
        )
        if len({(remainder.generation, remainder.number) for remainder in remainders}) < len(remainders):
            raise damaged("its partition continues a lane twice")
        for remainder in remainders:
            if remainder.generation >= len(history) or remainder.number >= len(history[remainder.generation][1]):
                raise damaged("its partition continues lanes that did not exist")
            if root.divides_shards and not (
                remainder.stop is not None
                and remainder.start < remainder.stop <= history[remainder.generation][1][remainder.number]
            ):
                raise damaged("its partition continues shards that were not opened")
        counted = root.sample_counts is not None
        if not all((sizes is not None) == counted for sizes in (partition.sizes, *(sizes for sizes, _ in history))):
            raise damaged(
                "its partition does not say how many samples each lane has"
                if counted
                else "its partition says how many samples each lane has, of uncounted shards"
            )
        if root.divides_shards:
            partition.shares(root, root.seed, epoch)  # raises if the number of samples differs
        return partition


# the last ones of each source, and of what: they are requested for each lane of a partition
_last: WeakKeyDictionary[Source[Any], tuple[Any, Shares]] = WeakKeyDictionary()


def _shares(source: Source[Any], *of: Any) -> Shares:
    """Return the ranges of each lane of each partition of an epoch (seed and number), from the
    first partition on.
    """
    if source not in _last or _last[source][0] != of:
        _last[source] = of, _divide_all(source, *of)
    return _last[source][1]


def _divide_all(source: Source[Any], epoch: tuple[int, int], lanes: int, sizes: Sizes, history: History) -> Shares:
    ranges = ShardRanges.of(source.epoch_shards(*epoch)).without_empty()
    earlier_shares = []
    for earlier, opened in history:
        shares = _divide(ranges, len(opened), earlier)
        if any(count > len(share) for share, count in zip(shares, opened, strict=True)):
            raise damaged("its partition has lanes that opened more shards than they had")
        ranges = joined(share[count:] for share, count in zip(shares, opened, strict=True))
        earlier_shares.append(shares)
    return [*earlier_shares, _divide(ranges, lanes, sizes)]


def _divide(ranges: ShardRanges, lanes: int, sizes: Sizes) -> list[ShardRanges]:
    """Divide ranges over lanes: in turn if ``sizes`` is None, else cut into runs of these numbers
    of samples.
    """
    if sizes is None:
        return [ranges[lane::lanes] for lane in range(lanes)]
    if (asked := sum(sizes)) != (left := ranges.samples):
        raise damaged(f"its partition is of {asked:,} samples, and {left:,} are left of the epoch")
    return list(ranges.cut(sizes))


def repartition(
    old: Partition, lanes: int, states: dict[int, dict[str, Any]], stage: Segments[Any], epoch: int
) -> Partition:
    """Repartition the rest of an epoch.

    Args:
        old: the partition until now.
        lanes: the new number of lanes.
        states: of all the lanes of ``old``: ``position`` (as ``dump`` wrote it; None: not begun),
            ``ended`` and ``counts``.
        stage: the stage that runs the segments of a lane.
        epoch: the epoch.

    Returns:
        the new partition.
    """
    chain = Chain(stage)
    source = chain.root
    if not source.divides_shards:
        return _hand_on(old, lanes, states, stage)
    shares, remainders, opened = old.shares(source, source.seed, epoch), [], []
    counts = sum_counts((old.counts, *(states[number]["counts"] for number in range(old.lanes))))
    whole = any(step.scope == "lane" for step in chain)  # each lane counts as having opened its whole share
    for number in range(old.lanes):
        state = states[number]
        share, position = shares[number], state["position"]
        segments = old.segments(number, source)
        handed = segments[:-1]  # the segments that are not divided
        if whole and share:
            handed.append(replace(segments[-1], stop=len(share)))
        at = {} if position is None else position[0]
        place, given = at.get("segment", 0), at.get("opened", 0)
        if (place == len(segments) - 1 and given > len(share)) or (place > len(segments) and not at.get("padded")):
            raise damaged(f"lane {number} has opened {given} shards of segment {place}")
        if state["ended"] or place >= len(segments):
            opened.append(len(share))
        elif position is None:
            opened.append(len(share) if whole else 0)
            remainders += handed
        else:
            last = place == len(segments) - 1
            opened.append(len(share) if whole else given if last else 0)
            remainder = _remainder(
                segments[place], inner_position(stage, position), opened[-1] if last else None, stage
            )
            if remainder is not None:
                if old.sizes is not None:
                    later = sum(segment.samples or 0 for segment in handed[place + 1 :]) + share[opened[-1] :].samples
                    done = sum(state["counts"].get(name, 0) for name in COUNTED)
                    remainder = replace(remainder, samples=max(0, old.samples()[number] - done - later))  # type: ignore[index]
                remainders.append(remainder)
            remainders += handed[place + 1 :]
    # If nothing of this partition was opened, the next one takes its place.
    untouched = bool(old.history) and not any(opened)
    history = old.history if untouched else (*old.history, (old.sizes, tuple(opened)))
    if old.sizes is None:
        return Partition(lanes, None, history, tuple(remainders), counts)
    rest = sum(share[count:].samples for share, count in zip(shares, opened, strict=True))
    ordered = sorted(remainders, key=lambda remainder: -(remainder.samples or 0))
    loads = [sum(remainder.samples or 0 for remainder in ordered[lane::lanes]) for lane in range(lanes)]
    return Partition(lanes, tuple(_level(loads, rest)), history, tuple(ordered), counts)


def repartition_loop(
    old: Partition, lanes: int, states: dict[int, dict[str, Any]], stage: Segments[Any], epoch: int
) -> tuple[int, Partition]:
    """Repartition the rest of all epochs that lanes have begun, with ``epoch_end="loop"``.

    Args:
        old: the partition until now.
        lanes: the new number of lanes.
        states: as in ``repartition``; the lanes may be in different epochs.
        stage: the stage that runs the segments of a lane.
        epoch: the epoch of ``old``.

    Returns:
        the first epoch of which something is left, and its partition with those of the later ones.
        Each sample that is left of these epochs comes once, before a lane begins the next epoch.
    """
    ahead = {
        number: 0 if state["position"] is None else state["position"][0].get("epoch", 0)
        for number, state in states.items()
    }
    first, last = min(ahead.values()), max(len(old.later), *ahead.values())
    spread, whole = last - first, old.of_epoch(len(old.later) + 1, Chain(stage).root, epoch).samples()
    partitions: list[Partition] = []
    if spread * lanes <= MOST_LANES:
        known = [one.samples() for one in (old, *old.later)]
        for place in range(first, last + 1):
            entries = {}
            for number, state in states.items():
                done = 0
                if whole is not None:  # in the epochs of the lane before this one
                    done = sum(samples[number] for samples in known[:place] if samples)
                    done += max(0, place - len(known)) * whole[number]
                entries[number] = _in_epoch(state, ahead[number] - place, done)
            one = old.of_epoch(place, Chain(stage).root, epoch + place)
            partitions.append(_of_epoch(one, lanes, entries, stage, epoch + place))
    if not partitions or (spread and sum(one.lanes_so_far for one in partitions) > MOST_LANES):
        raise StateError(
            f"the lanes of this state are {spread} epochs of the data apart, too many to divide them anew: load it "
            f"with lanes={old.lanes}. Lanes stay together with ShardList(shuffle=True), or if samples are counted."
        )
    counts = sum_counts((old.counts, *(public_counts(state["counts"]) for state in states.values())))
    return epoch + first, replace(partitions[0], later=tuple(partitions[1:]), counts=counts)


def _in_epoch(state: dict[str, Any], ahead: int, done: int) -> dict[str, Any]:
    """Return the state of a lane in an epoch, if the lane stands ``ahead`` epochs after it.

    Its counts, which are of all its epochs, become those of this one: without the ``done`` samples
    of earlier ones.
    """
    position, ended = (None, ahead > 0) if ahead else (state["position"], state["ended"])
    counts = sum(state["counts"].get(name, 0) for name in COUNTED)
    return {**state, "position": position, "ended": ended, "counts": {"delivered": max(0, counts - done)}}


def _of_epoch(
    old: Partition, lanes: int, states: dict[int, dict[str, Any]], stage: Segments[Any], epoch: int
) -> Partition:
    """Repartition one of several epochs, without counts; from the beginning if no lane has begun
    it.
    """
    if not old.history and all(state["position"] is None and not state["ended"] for state in states.values()):
        return Partition.first(lanes, Chain(stage).root, epoch)
    return replace(repartition(old, lanes, states, stage, epoch), counts={}, later=())


def _level(loads: list[int], rest: int) -> list[int]:
    """Divide ``rest`` samples over lanes that have ``loads`` samples already, so that the sums are
    as equal as possible.
    """
    order = sorted(range(len(loads)), key=loads.__getitem__)
    for count in range(len(order), 0, -1):
        low = order[:count]
        total = rest + sum(loads[lane] for lane in low)
        if total // count >= loads[low[-1]]:
            goals = {lane: total // count + (place < total % count) for place, lane in enumerate(sorted(low))}
            return [goals.get(lane, load) - load for lane, load in enumerate(loads)]
    raise AssertionError("the lowest lane can always be filled")


def _hand_on(old: Partition, lanes: int, states: dict[int, dict[str, Any]], stage: Segments[Any]) -> Partition:
    """Repartition the rest of an epoch of a mix: each lane continues as a whole.

    The old lanes go to the new lanes in turn, as remainders. They are not divided, since the
    proportions hold within each lane.
    """
    source, remainders = Chain(stage).root, list[Segment]()
    counts = sum_counts((old.counts, *(states[number]["counts"] for number in range(old.lanes))))
    for number in range(old.lanes):
        state = states[number]
        if state["ended"]:
            continue
        position, segments = state["position"], old.segments(number, source)
        if position is not None:
            first = position[0].get("segment", 0)
            segments = segments[first:]
            segments[:1] = [replace(segment, position=inner_position(stage, position)) for segment in segments[:1]]
        remainders += segments
    return Partition(lanes, None, (*old.history, (None, (0,) * old.lanes)), tuple(remainders), counts)


def inner_position(stage: Segments[Any], position: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the position in the open segment of a lane at a position, without counts."""
    chain = Chain(stage.source)
    for part in position[0].get(PARTS, []):
        if POSITION in part:
            return chain.uncounted(part[POSITION])
    return chain.dump(None)


def _remainder(
    segment: Segment, position: list[dict[str, Any]], opened: int | None, stage: Segments[Any]
) -> Segment | None:
    """Return the remainder of a segment; None if it is finished.

    Args:
        segment: the segment.
        position: its position, without counts, where the remainder begins.
        opened: how many of its ranges were opened, up to which the remainder goes; None: all.
        stage: the stage that runs the segments of a lane.
    """
    done, position = Chain(stage.source).rest_of(position)
    start, stop = segment.start + done, segment.stop if opened is None else segment.start + opened
    if stop is not None and start > stop:
        raise damaged(f"lane {segment.number} has finished {start} shards, and opened {stop}")
    return None if stop is not None and start >= stop else replace(segment, start=start, stop=stop, position=position)
