"""Lanes of shard ranges: each lane of an epoch has its own shards, or ranges of their samples.

Words:
- A *shard range* is samples a to b of a shard.
- A partition (``Ranges``) has a *generation*: 0 for the first one of an epoch; each repartition
  makes the next one.
- A *segment* (``Segment``) is a run of the shard ranges of one lane of one partition. After a
  repartition, a lane consists of several segments.
- A *remainder* is a segment that a lane had opened and not finished when the epoch was
  repartitioned, or a run of the samples of one: see ``remainders``.

Rules:
1. The partition of an epoch depends on (seed, epoch, number of lanes) alone, and on the size of a
   batch if all are full. Lane i of n gets the shards i, i + n, i + 2n ... of the epoch's order. If
   the samples of the shards are counted, it gets the i-th of n consecutive runs of samples instead,
   whose sizes differ by at most one. With ``epoch_end="drop"`` and ``"pad"`` full batches are dealt
   to the lanes in turn instead.
2. To repartition the rest of an epoch, each lane leaves two things: a remainder and the shards that
   it had not opened. A remainder begins at the lane's position, and is read under the old number
   and generation of the lane, since its shuffle depends on these. Remainders go to the new lanes in
   turn, and unopened shards are divided as in rule 1, or, if the samples are counted, so that the
   lanes become as equal as possible. With ``epoch_end="drop"`` and ``"pad"``, lanes become equal
   but for one batch: remainders are cut into runs where that is needed.
3. The lanes of a mix, and of a chain with a step that needs whole lanes (its ``scope`` is
   ``"lane"``), are not divided: each continues as a whole, as a remainder.
4. With ``epoch_end="drop"`` and ``"pad"`` the batches of all lanes have one order, by (number of
   the batch in its lane, lane), and rank r of R has the batches r, r + R, r + 2R ... of it. So each
   R batches that follow each other are of R ranks, wherever they begin. If other ranks have had the
   first batches of an epoch, R ranks that divide the lanes go on with the next R at each step. Some
   of them begin with one batch less than the others.
"""

from __future__ import annotations

import itertools
import json
import operator
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NoReturn
from weakref import WeakKeyDictionary

from wds_pipes.core.chain import PARTS, POSITION, Chain
from wds_pipes.core.counts import COUNTED, logger, sum_counts, without_limited
from wds_pipes.core.lane import Lane, ShardRanges
from wds_pipes.core.stage import Source
from wds_pipes.core.state import (
    MOST_LANES,
    MOST_PARTITIONS,
    damaged,
    read_as,
    read_count,
    read_counts,
    read_dict,
)
from wds_pipes.errors import StateError
from wds_pipes.loader.partition import NOT_BEGUN, LanePiece, LaneStates, OfLane, Portion, Terms, in_turns, went_on
from wds_pipes.loader.remainders import Segment, check_once, dealt, fields_of, merged, placed, shared
from wds_pipes.loader.sticky import arranged
from wds_pipes.stages.edits import place_of_exclusion


def _runs(numbers: tuple[int, ...] | None) -> list[list[int]] | None:
    """Run-length encode numbers: each run as its number and its length."""
    return None if numbers is None else [[number, len(list(run))] for number, run in itertools.groupby(numbers)]


def _flat(runs: object, lanes: int | None = None) -> tuple[int, ...]:
    """Decode what ``_runs`` encoded: one number for each of ``lanes`` lanes (None: any number of
    lanes up to MOST_LANES).
    """
    pairs = [fields_of(run, 2) for run in read_as(list, runs, "a list of its partition")]
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
History = tuple[tuple[Sizes, tuple[int, ...]], ...]  # see Ranges


@dataclass(frozen=True)
class Ranges:
    """A partition of an epoch into lanes of shard ranges.

    The lanes of a mix have none: each of its sources divides its own shards.

    Attributes:
        lanes: the number of lanes.
        counts: the samples of the epoch that came before, by what became of them.
        later: with ``epoch_end="loop"``: the partitions of the next epochs, as far as these were
            repartitioned, since lanes had begun them.
        fit_any_batches: the ways to end an epoch with which lanes go on with batches of any size.
        in_order: whether all lanes share one order; samples can be left out of it by their places.
        sizes: how the unopened shards are divided.
        history: of each earlier partition of this epoch, its sizes, and how many ranges each of its
            lanes had opened when the epoch was repartitioned.
        remainders: the remainders of the lanes of earlier partitions.
        loads: how many samples of the remainders each lane has, in their order; None: the lanes
            have whole remainders in turn.
        ranks: how many ranks began the epoch, if they have the same shards in all epochs; else 0.
        given: with ``epoch_end="drop"`` and ``"pad"``: how many batches of lanes other ranks have
            had before these ranks went on, modulo those of a step of these: see rule 4.
    """

    lanes: int
    counts: dict[str, int] = field(default_factory=dict)
    later: tuple[Ranges, ...] = ()
    sizes: Sizes = None
    history: History = ()
    remainders: tuple[Segment, ...] = ()
    loads: tuple[int, ...] | None = None
    ranks: int = 0
    given: int = 0

    in_order: ClassVar = False
    fit_any_batches: ClassVar = ("exact", "loop")

    @classmethod
    def of(cls, lanes: int, epoch: int, terms: Terms) -> Ranges:
        """Return the partition at the beginning of an epoch."""
        size = 1 if terms.mode in cls.fit_any_batches else terms.size
        return cls.first(lanes, terms.chain.root, epoch, terms.ranks, size)

    @classmethod
    def first(cls, lanes: int, source: Source[Any], epoch: int, ranks: int, size: int = 1) -> Ranges:
        """Return the partition at the beginning of an epoch.

        If samples are counted, batches of ``size`` are dealt to the lanes.
        """
        ranks = ranks if source.epoch_order.sticky else 0
        if source.epoch_order.sample_counts is None:
            return cls(lanes, ranks=ranks)
        total = ShardRanges.of(source.epoch_order.epoch_shards(source.seed, epoch)).samples
        return cls(lanes, sizes=tuple(dealt(total, lanes, size)), ranks=ranks)

    def of_epoch(self, ahead: int, source: Source[Any], epoch: int) -> Ranges:
        """Return the partition of ``epoch``, which is ``ahead`` epochs after that of this one."""
        if not ahead:
            return self
        return (
            self.later[ahead - 1] if ahead <= len(self.later) else Ranges.first(self.lanes, source, epoch, self.ranks)
        )

    def lane(self, number: int, source: Source[Any], epoch: int) -> Lane:
        """Return lane ``number``, as the steps that run over all its segments know it."""
        return Lane(source.seed, epoch, number, self.lanes, len(self.history))

    def segments(self, number: int, source: Source[Any], epoch: int, ahead: int = 0) -> OfLane:
        """Return the segments of lane ``number`` in ``epoch``, in the order in which they are read.

        ``ahead`` is by how many epochs ``epoch`` is after that of the partition.
        """
        there = self.of_epoch(ahead, source, epoch)
        return [
            Portion(
                there._lane_of(segment, source, epoch),
                segment.position,
                segment.passed,
                segment.samples if segment.after else None,
            )
            for segment in there.segments_of(number, source)
        ]

    def segments_of(self, number: int, source: Source[Any]) -> list[Segment]:
        """Return the segments of lane ``number``: its remainders, then its share of the unopened
        shards.
        """
        remainders = [*self._remainders_of[number]]
        if self.history and not source.epoch_order.divides_shards:
            return remainders  # the lanes of a mix continue as a whole
        samples = None if self.sizes is None else self.sizes[number]
        return [*remainders, Segment(number, len(self.history), samples=samples)]

    @cached_property
    def _remainders_of(self) -> list[list[Segment]]:
        """The remainders of each lane, and runs of them."""
        if self.loads is not None:
            return list(shared(self.remainders, self.loads))
        return [list(self.remainders[lane :: self.lanes]) for lane in range(self.lanes)]

    def _lane_of(self, segment: Segment, source: Source[Any], epoch: int) -> Lane:
        """Return the lane under whose number a segment is read, with the segment's ranges."""
        number, generation = segment.number, segment.generation
        shares = _shares(source, epoch, (self.ranks, self.lanes), self.sizes, self.history)[generation]
        ranges = shares[number][segment.start : segment.stop] if source.epoch_order.divides_shards else None
        return Lane(source.seed, epoch, number, len(shares), generation, ranges)

    def pieces(self, number: int, source: Source[Any], epoch: int, ahead: int = 0) -> list[LanePiece]:
        """Return what lane ``number`` reads in ``epoch``, as ``segments`` does. The lane of a piece
        has all ranges from the beginning of its order on.
        """
        there, found = self.of_epoch(ahead, source, epoch), []
        for segment in there.segments_of(number, source):
            lane = there._lane_of(segment._replace(start=0), source, epoch)
            whole = ShardRanges.of(lane.shards or ()).samples
            found.append(LanePiece(lane, whole - segment.after - segment.size, segment.size))
        return found

    def padding(self, number: int, source: Source[Any], epoch: int) -> Lane:
        """Return what lane ``number`` reads again and again to fill up the epoch."""
        whole = Ranges.first(self.lanes, source, epoch, self.ranks).shares(source, epoch)
        ranges = next((share for share in (whole[number], *whole) if share), ())
        return replace(self.segments(number, source, epoch)[-1].lane, shards=tuple(ranges))

    def shares(self, source: Source[Any], epoch: int) -> list[ShardRanges]:
        """Return the shares of the lanes, of the ranges that no lane of an earlier partition has
        opened.
        """
        return _shares(source, epoch, (self.ranks, self.lanes), self.sizes, self.history)[-1]

    def samples(self) -> list[int] | None:
        """Return how many samples each lane has, also of those that make no full batch; None: not
        known.
        """
        if self.sizes is None:
            return None
        loads = self.loads or [sum(one.size for one in own) for own in self._remainders_of]
        return [size + load for size, load in zip(self.sizes, loads, strict=True)]

    def batches(self, terms: Terms) -> list[int] | None:
        """Return how many batches each lane yields; None if their last ones may be smaller.

        All ranks yield equally many: as many as the rank that has most or, with "drop", least.
        """
        samples, pads = self.samples(), terms.mode == "pad"
        if terms.mode in self.fit_any_batches or samples is None:
            return None
        lanes = [-(-count // terms.size) if pads else count // terms.size for count in samples]
        of_ranks, had = [lanes[rank :: terms.ranks] for rank in range(terms.ranks)], in_turns(self.given, terms.ranks)
        most_or_least = (max if pads else min)(sum(own) - before for own, before in zip(of_ranks, had, strict=True))
        each = max(0, -(-most_or_least // terms.parts) if pads else most_or_least // terms.parts) * terms.parts
        for rank, (own, before) in enumerate(zip(of_ranks, had, strict=True)):
            lanes[rank :: terms.ranks] = _in_turn(own, before + each, pads=pads)
        return lanes

    @property
    def start(self) -> int:
        """How much of the epoch was over when it was divided: differs for its partitions, and is 0
        for the first.
        """
        return len(self.history)

    def as_json(self) -> str | None:
        """Return a text of JSON, which ``read_state`` reads for ``from_json``. None: the epoch and
        the number of lanes say all.

        It is a text since a state is taken often, and thousands of lanes would have to be copied.
        """
        return self._text if self.history or self.later or self.ranks or self.given else None

    @cached_property
    def _text(self) -> str:
        return json.dumps(self._entry(), separators=(",", ":"))

    def _entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = {
            "sizes": _runs(self.sizes),
            "history": [[_runs(sizes), _runs(opened)] for sizes, opened in self.history],
            "remainders": [remainder.as_json() for remainder in self.remainders],
            "counts": self.counts,
        }
        if self.loads is not None:
            entry["loads"] = _runs(self.loads)
        if self.later:
            entry["later"] = [partition._entry() for partition in self.later]
        if self.ranks:
            entry["ranks"] = self.ranks
        if self.given:
            entry["given"] = self.given
        return entry

    @classmethod
    def from_json(cls, lanes: int, entry: dict[str, Any] | None, epoch: int, terms: Terms) -> Ranges:
        """Return the partition that ``as_json`` wrote.

        Args:
            lanes: the number of lanes.
            entry: what ``as_json`` returned, read.
            epoch: the epoch.
            terms: how the epoch is divided; the size of a batch is that of the state.

        Raises:
            StateError: ``entry`` cannot be a partition of this epoch.
        """
        if entry is None:
            return cls.of(lanes, epoch, terms)
        partitions = [cls._one_from_json(lanes, entry, terms)]
        lanes_so_far = partitions[0].lanes_so_far
        for one in read_as(list, entry.get("later", []), "the later epochs of its partition"):
            partitions.append(cls._one_from_json(lanes, read_dict(one, "its partition"), terms))
            lanes_so_far += partitions[-1].lanes_so_far
            _check_number(lanes_so_far)
        for ahead, partition in enumerate(partitions):  # that takes long for many lanes
            partition._check(terms.chain.root, epoch + ahead)
        return replace(partitions[0], later=tuple(partitions[1:]))

    @property
    def lanes_so_far(self) -> int:
        """How many lanes this partition and the earlier ones of its epoch have together."""
        return self.lanes + sum(len(opened) for _, opened in self.history)

    @classmethod
    def _one_from_json(cls, lanes: int, entry: dict[str, Any], terms: Terms) -> Ranges:
        """Return the partition of one epoch, without later epochs, and not checked yet."""
        history: list[tuple[Sizes, tuple[int, ...]]] = []
        earlier, lanes_so_far = read_as(list, entry.get("history"), "the history of its partition"), lanes
        if not len(earlier) <= MOST_PARTITIONS:
            raise damaged(f"its epoch was repartitioned {len(earlier)} times, and at most {MOST_PARTITIONS} can be")
        for one in earlier:
            sizes, runs = fields_of(one, 2)
            opened = _flat(runs)
            lanes_so_far += len(opened)
            _check_number(lanes_so_far if opened else 0)
            history.append((None if sizes is None else _flat(sizes, len(opened)), opened))
        remainders = read_as(list, entry.get("remainders"), "the remainders of its partition")
        sizes, loads = entry.get("sizes"), entry.get("loads")
        return cls(
            lanes,
            dict(read_counts(entry.get("counts"), "the counts of its partition")),
            sizes=None if sizes is None else _flat(sizes, lanes),
            history=tuple(history),
            remainders=tuple(Segment.from_json(remainder, terms.inner) for remainder in remainders),
            loads=None if loads is None else _flat(loads, lanes),
            ranks=read_count(entry.get("ranks", 0), "the number of ranks of its partition", most=MOST_LANES),
            given=read_count(
                entry.get("given", 0), "the batches that other ranks had of its partition", most=MOST_LANES
            ),
        )

    def _check(self, source: Source[Any], epoch: int) -> None:
        """Raise StateError if this cannot be a partition of an epoch of ``source``."""
        remainders, opened = self.remainders, [opened for _, opened in self.history]
        check_once(remainders)
        for remainder in remainders:
            if remainder.generation >= len(opened) or remainder.number >= len(opened[remainder.generation]):
                raise damaged("its partition continues lanes that did not exist")
            most = opened[remainder.generation][remainder.number]
            if source.epoch_order.divides_shards and not remainder.start < (remainder.stop or 0) <= most:
                raise damaged("its partition continues shards that were not opened")
        first = len(opened[0]) if opened else self.lanes
        if source.epoch_order.sticky is not bool(self.ranks) or (self.ranks and first % self.ranks):
            raise damaged(f"its partition of {first} lanes is of {self.ranks} ranks")
        counted = source.epoch_order.sample_counts is not None
        if not all((sizes is not None) == counted for sizes in (self.sizes, *(sizes for sizes, _ in self.history))):
            raise damaged(
                "its partition does not say how many samples each lane has"
                if counted
                else "its partition says how many samples each lane has, of uncounted shards"
            )
        # which raises if the numbers of samples differ
        shares = _shares(source, epoch, (self.ranks, self.lanes), self.sizes, self.history)
        if self.loads is not None and (not counted or sum(self.loads) != sum(one.size for one in remainders)):
            raise damaged("its lanes have other samples of its remainders than there are")
        for one in remainders:
            if one.is_run and not counted:
                raise damaged("its partition has runs of samples, of uncounted shards")
            if one.is_run or self.loads is not None:
                most = shares[one.generation][one.number][: one.stop].samples
                if one.passed + one.size + one.after > most:
                    raise damaged(f"a remainder has more than the {most} samples of its shards")

    # How an epoch continues. ``states`` are the states of the lanes: of all lanes, or of those of
    # one of ``terms.ranks`` ranks.

    def begun(self, states: LaneStates, terms: Terms) -> bool:
        """Return whether anything of the epoch was given.

        Raises:
            StateError: lanes cannot have got to these positions together.
        """
        begun = any(lane != NOT_BEGUN for lane in states.values())
        return begun or self.start > 0 or bool(self.later)

    def going_on(
        self, states: LaneStates, terms: Terms, *, alike: bool, fits: bool
    ) -> tuple[Ranges, LaneStates] | None:
        """Return how the lanes go on as they are: in which partition, with which states; None: the
        epoch is repartitioned.

        Args:
            states: see above.
            terms: how the loader that goes on divides epochs.
            alike: whether the loader of the state divided them in the same way.
            fits: whether the lanes are enough, and their number fits the ranks.

        Raises:
            StateError: a lane cannot have got to its position.
        """
        self._check_delivered(states, terms, alike=alike)
        if len(states) < self.lanes:
            return self, states
        if not (alike and fits):
            return None
        delivered = [states[lane]["delivered"] for lane in range(self.lanes)]
        had = [sum(delivered[rank :: terms.ranks]) for rank in range(terms.ranks)]
        given = sum(had) % (terms.ranks * terms.parts)
        there = self if given == self.given else replace(self, given=given)
        if (batches := there.batches(terms)) is None:
            return self, states
        if had != in_turns(sum(had), terms.ranks) or any(map(operator.gt, delivered, batches)):
            return None  # lanes are unequal
        # on these ranks, fewer or more samples may be left over than on those of the state
        going = {number: went_on(lane) for number, lane in states.items() if delivered[number] < batches[number]}
        return there, {**states, **going}

    def _check_delivered(self, states: LaneStates, terms: Terms, *, alike: bool) -> None:
        """Raise StateError if lanes have given more batches than they can have."""
        if not alike or terms.mode in self.fit_any_batches or (samples := self.samples()) is None:
            return
        # on other ranks "pad" may fill a lane up to the largest one, and by one more batch
        padded = -(-max(samples, default=0) // terms.size) + 1
        for number, lane in states.items():
            most = padded if terms.mode == "pad" else samples[number] // terms.size
            if lane["delivered"] > most:
                raise damaged(f"lane {number} gave more than its {most} batches")

    def repartitioned(self, lanes: int, states: LaneStates, epoch: int, terms: Terms) -> tuple[int, Ranges]:
        """Divide what is left over ``lanes`` lanes.

        With ``epoch_end="loop"`` lanes may be in different epochs: then each sample that is left of
        these epochs comes once, before a lane begins the next epoch.

        Returns:
            the first epoch of which something is left, and its partition with those of the later
            ones.
        """
        ahead = {
            number: 0 if state["position"] is None else state["position"][0].get("epoch", 0)
            for number, state in states.items()
        }
        first, last = min(ahead.values()), max(len(self.later), *ahead.values())
        spread, partitions = last - first, list[Ranges]()
        if spread * lanes <= MOST_LANES:
            known = [one.samples() for one in (self, *self.later)]
            whole = self.of_epoch(len(known), terms.chain.root, epoch).samples()
            for place in range(first, last + 1):
                # of each lane, how many samples it has in the epochs before this one
                before = {
                    number: sum(samples[number] for samples in known[:place] if samples)
                    + (0 if whole is None else max(0, place - len(known)) * whole[number])
                    for number in states
                }
                entries = {
                    number: _in_epoch(state, ahead[number] - place, before[number]) for number, state in states.items()
                }
                one = self.of_epoch(place, terms.chain.root, epoch + place)
                partitions.append(one._rest(lanes, entries, epoch + place, terms))
        if not partitions or (spread and sum(one.lanes_so_far for one in partitions) > MOST_LANES):
            raise StateError(
                f"the lanes of this state are {spread} epochs of the data apart, too many to divide them anew: load it "
                f"with lanes={self.lanes}. Lanes stay together with ShardList(shuffle=True), or if samples are counted."
            )
        counts = sum_counts((self.counts, *(state["counts"] for state in states.values())))
        if terms.mode == "loop":  # in which max_errors counts anew in each epoch
            counts = without_limited(counts)
        partition = replace(partitions[0], later=tuple(partitions[1:]), counts=counts)
        samples, batches = partition.samples(), partition.batches(terms)
        total = sum(samples or ())
        dropped = total - sum(batches or ()) * terms.size
        expected = terms.size * terms.parts * terms.ranks  # fewer than this do not fill a step of all ranks
        if terms.mode == "drop" and batches is not None and dropped * 20 > total and dropped >= expected:
            logger.warning(
                "on %d lanes, %d of the %d samples that are left of the epoch do not make a "
                "full batch in every lane, and are dropped: use fewer lanes, or "
                "epoch_end='pad' or 'exact', if that is not meant", lanes, dropped, total,
            )  # fmt: skip
        return epoch + first, partition

    def _rest(self, lanes: int, states: LaneStates, epoch: int, terms: Terms) -> Ranges:
        """Return the partition of what is left of one epoch, without its counts.

        Args:
            lanes: the new number of lanes.
            states: of all the lanes of this partition.
            epoch: the epoch.
            terms: how epochs are divided.
        """
        begun = any(state["position"] is not None or state["ended"] for state in states.values())
        if terms.mode == "loop" and not self.history and not begun:
            return Ranges.of(lanes, epoch, terms)
        source, remainders, opened = terms.chain.root, list[Segment](), list[int]()
        shares, samples, divides = self.shares(source, epoch), self.samples(), source.epoch_order.divides_shards
        counted = divides and samples is not None
        # then each lane counts as having opened its whole share, and continues as a whole
        whole = not divides or any(step.scope == "lane" for step in terms.chain)
        for number, share in enumerate(shares):
            state, segments = states[number], self.segments_of(number, source)
            at = {} if state["position"] is None else state["position"][0]
            place, given = at.get("segment", 0), at.get("opened", 0)
            last = place == len(segments) - 1
            if divides and ((last and given > len(share)) or (place > len(segments) and not at.get("padded"))):
                raise damaged(f"lane {number} has opened {given} shards of segment {place}")
            if state["ended"] or place >= len(segments):
                opened.append(len(share))
                continue
            opened.append(len(share) if whole else given if last else 0)
            if divides:
                segments[-1] = segments[-1]._replace(stop=opened[-1])
            first, *later = segments[place:]
            later = [segment for segment in later if not segment.ended]
            if state["position"] is not None:
                had = max(0, at.get("taken", 0) - first.passed)  # of a run
                is_run, first = first.is_run, _remainder(first, at, terms)
                if is_run:
                    first = first._replace(samples=max(0, first.size - had))
                elif samples is not None:
                    left = samples[number] - sum(state["counts"].get(name, 0) for name in COUNTED)
                    left -= sum(segment.samples or 0 for segment in later) + share[opened[-1] :].samples
                    first = first._replace(samples=max(0, left))
            remainders += [segment for segment in (first, *later) if not segment.ended]
        # If nothing of this partition was opened, the next one takes its place.
        untouched = divides and bool(self.history) and not any(opened)
        history = self.history if untouched else (*self.history, (self.sizes, tuple(opened)))
        rest = None
        if samples is not None:
            rest = sum(share[count:].samples for share, count in zip(shares, opened, strict=True))
        size = terms.size if counted and not whole and terms.equal_lanes else None
        remainders, sizes, loads = _over_lanes(remainders, rest, lanes, size)
        return Ranges(lanes, sizes=sizes, history=history, remainders=tuple(remainders), loads=loads, ranks=self.ranks)

    def kept(self, states: LaneStates) -> dict[str, int]:
        """Return what the first lane of a rank counts after a repartition of the states of this
        rank alone: nothing, since a repartition needs the states of all ranks.
        """
        return {}

    def after_skip(self, batches: int, states: LaneStates, epoch: int, terms: Terms) -> None:
        """Return the partition of what is left after the next batches of each rank; None: only
        reading them tells.
        """

    def excluding(self, states: LaneStates, epoch: int, then: Terms, now: Terms) -> tuple[Ranges, LaneStates]:
        """Return the partition for a pipeline that leaves out more samples from here on, and the
        states of its lanes.

        Args:
            states: the states of the lanes, which may be changed.
            epoch: the epoch.
            then: what decides how the pipeline without these exclusions divides epochs.
            now: the same of the pipeline that goes on.
        """
        for lane in states.values():
            if _with_exclusion(lane["position"], now.chain) is not None:
                for part in lane["position"][0].get(PARTS, []):
                    _with_exclusion(part.get(POSITION), now.inner)
        return self._excluding(now.inner), states

    def _excluding(self, inner: Chain) -> Ranges:
        """Return the same partition with positions of this chain."""
        remainders = tuple(
            segment._replace(position=segment.position and _with_exclusion([*segment.position], inner))
            for segment in self.remainders
        )
        return replace(self, remainders=remainders, later=tuple(one._excluding(inner) for one in self.later))

    def divided_otherwise(self, states: LaneStates, terms: Terms) -> NoReturn:
        """Return what is left as a partition of the other kind, with the states of its lanes.

        Raises:
            StateError: it has no such form.
        """
        raise StateError(
            "this state stands inside an epoch that was divided into lanes, and this loader has one global order: "
            "load it with the options and steps with which it was saved, until the end of the epoch."
        )


def _check_number(lanes: int) -> None:
    """Raise StateError unless there can be this many lanes in the partitions of a state."""
    if not 0 < lanes <= MOST_LANES:
        raise damaged(f"its partitions are of {lanes} lanes, and at most {MOST_LANES} can be")


def _with_exclusion(position: list[dict[str, Any]] | None, chain: Chain) -> list[dict[str, Any]] | None:
    """Return a position with the entry of the ``ExcludeSamples`` of a chain inserted, if there is
    one.
    """
    place = place_of_exclusion(chain)
    if position is not None and place is not None and len(position) < len(chain.placed):
        position.insert(place, {})
    return position


# the last ones of each source, and of what: they are requested for each lane of a partition
_last: WeakKeyDictionary[Source[Any], tuple[Any, Shares]] = WeakKeyDictionary()


def _shares(source: Source[Any], *of: Any) -> Shares:
    """Return the ranges of each lane of each partition of an epoch, from the first partition on."""
    if source not in _last or _last[source][0] != of:
        _last[source] = of, _divide_all(source, *of)
    return _last[source][1]


def _divide_all(source: Source[Any], epoch: int, of: tuple[int, int], sizes: Sizes, history: History) -> Shares:
    ranks, lanes = of
    ranges = ShardRanges.of(source.epoch_order.epoch_shards(source.seed, epoch)).without_empty()
    if ranks:
        first, opened = history[0] if history else (sizes, range(lanes))
        ranges = arranged(ranges, source.seed, ranks, len(opened), first)
    earlier_shares = []
    for earlier, opened in history:
        shares = _divide(ranges, len(opened), earlier)
        if any(count > len(share) for share, count in zip(shares, opened, strict=True)):
            raise damaged("its partition has lanes that opened more shards than they had")
        ranges = ShardRanges.of_all(share[count:] for share, count in zip(shares, opened, strict=True))
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


def _remainder(segment: Segment, at: dict[str, Any], terms: Terms) -> Segment:
    """Return what is left of a segment that a lane reads; ``at`` is where the lane stands."""
    begun = any(POSITION in part for part in at.get(PARTS, []))
    if segment.position is not None and not begun:
        return segment
    done, position = terms.inner.rest_of(terms.inner_position([at]))
    start, stop = segment.start + done, segment.stop
    if stop is not None and start > stop:
        raise damaged(f"lane {segment.number} has finished {start} shards, and opened {stop}")
    passed = max(0, segment.passed - at.get("taken", 0))
    return segment._replace(start=start, position=position, passed=passed)


def _in_epoch(state: dict[str, Any], ahead: int, done: int) -> dict[str, Any]:
    """Return the state of a lane in an epoch, if the lane stands ``ahead`` epochs after it.

    Its counts, which are of all its epochs, become those of this one: without the ``done`` samples
    of earlier ones.
    """
    position, ended = (None, ahead > 0) if ahead else (state["position"], state["ended"])
    counts = sum(state["counts"].get(name, 0) for name in COUNTED)
    return {**state, "position": position, "ended": ended, "counts": {"delivered": max(0, counts - done)}}


def _over_lanes(
    remainders: list[Segment], rest: int | None, lanes: int, size: int | None
) -> tuple[list[Segment], Sizes, Sizes]:
    """Divide remainders and ``rest`` samples of unopened shards over lanes.

    Args:
        remainders: the remainders.
        rest: how many unopened samples there are; None: that is not known.
        lanes: the number of lanes.
        size: lanes become equal but for a batch of so many samples; None: remainders stay whole.

    Returns:
        the remainders in their order, how many of the unopened samples each lane gets, and how many
        samples of the remainders; None: whole shards, and whole remainders, in turn.
    """
    if rest is None:
        return remainders, None, None
    remainders = merged(remainders)
    if size is None:
        remainders.sort(key=lambda remainder: -remainder.size)
        loads = [sum(one.size for one in remainders[lane::lanes]) for lane in range(lanes)]
        return remainders, tuple(_level(loads, rest)), None
    left = [one for one in remainders if one.size]
    room = dealt(rest + sum(one.size for one in left), lanes, size)
    line, loads = placed(left, room)
    return line, tuple(map(operator.sub, room, loads)), tuple(loads)


def _in_turn(lanes: list[int], count: int, *, pads: bool) -> list[int]:
    """Return how many of the next ``count`` batches of a rank come from each of its lanes, which
    have ``lanes`` batches: one of each in turn, while it has some. With ``pads`` there are more,
    and the lanes with the fewest batches get them.
    """
    fit = max if pads else min

    def up_to(number: int) -> list[int]:
        return [fit(batches, number) for batches in lanes]

    number = bisect_right(range(count + 1), count, key=lambda number: sum(up_to(number))) - 1
    found, later = up_to(number), up_to(number + 1)
    growing = (lane for lane, batches in enumerate(found) if later[lane] > batches)
    for lane in itertools.islice(growing, count - sum(found)):
        found[lane] += 1
    return found


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
