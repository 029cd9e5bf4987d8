"""How a PipeLoader divides epochs: all that its options, rank and pipeline alone determine."""

from __future__ import annotations

import itertools
import math
from functools import cached_property
from typing import Any, NamedTuple

from wds_pipes.core.counts import COUNTED, logger
from wds_pipes.core.moved import Move
from wds_pipes.core.options import check_choice, check_count
from wds_pipes.core.stage import Stage, State, functional_name
from wds_pipes.core.state import MOST_LANES, SavedLane, are_all, damaged
from wds_pipes.core.stream import Recipe, Stream, check_lane, check_recipe
from wds_pipes.core.words import shown, some
from wds_pipes.errors import StateError, WdsError
from wds_pipes.loader.lengths import batches_of, batching, why_uncounted
from wds_pipes.loader.merging import state_for
from wds_pipes.loader.partition import Partition
from wds_pipes.loader.position import LoaderPosition
from wds_pipes.loader.protocol import NOT_BEGUN, LaneState, pack, total_counts, unpack
from wds_pipes.loader.ranks import Rank, find_rank
from wds_pipes.loader.repartition import repartition, repartition_loop
from wds_pipes.loader.segments import lay_out, segments_of


class Plan:
    """How epochs are divided over lanes, and the lanes over ranks.

    Args:
        stage: the pipeline.
        epoch_end: an option of PipeLoader.
        lanes: an option of PipeLoader.
        num_workers: an option of PipeLoader.
        parts: of how many parts, each from another lane, a batch consists.
        drop_last: an option of PipeLoader.
        rank: the rank and the number of ranks; (None, None): they are determined at the first use.

    Attributes:
        stage: the pipeline with a ``Segments`` stage in it, see ``wds_pipes.loader.segments``.
        uncounted: why the number of samples of a lane is not known; None if it is known.
        parts, drop_last: as above.
        limits: the limits of the steps that have ``max_errors``, by the names of their counts.
    """

    def __init__(
        self,
        stage: Stage[Any],
        *,
        epoch_end: str | None,
        lanes: int | None,
        num_workers: int,
        parts: int = 1,
        drop_last: bool = False,
        rank: tuple[int | None, int | None],
    ) -> None:
        if rank != (None, None):
            find_rank(*rank)
        if stage.never_ends:
            raise ValueError(
                "repeat() without end is not for PipeLoader, which could not give the samples of one epoch exactly "
                "once: leave it out, and pass epoch_end='loop', with which the epochs follow each other without end, "
                "and with_epoch() cuts them."
            )
        self.stage = lay_out(stage)
        self._epoch_end = (
            None if epoch_end is None else check_choice("epoch_end", epoch_end, "drop", "pad", "exact", "loop")
        )
        self.uncounted = why_uncounted(self.stage)
        self.limits = _limits(self.stage)
        if epoch_end in ("drop", "pad") and self.uncounted:
            raise ValueError(
                f"epoch_end={epoch_end!r} needs to know how many samples there are, and {self.uncounted}; "
                "or pass epoch_end='loop' and call with_epoch()"
            )
        held = batching(segments_of(self.stage).source)
        if epoch_end == "loop" and any(step.batches_of(1) for step in held if step.items_per_batch != 1):
            holding = _holding(held[-1], segments_of(self.stage).source)
            raise ValueError(
                f"with epoch_end='loop' all batches are full, and {holding} ends with each epoch, or holds items at "
                "its end: put batch_samples() last, or pass drop_last=True to it. "
                "A step of your own that holds nothing when it yields says so with holds_nothing = True."
            )
        self._num_workers = check_count("num_workers", num_workers, least=0)
        self.parts, self.drop_last = parts, drop_last
        self._lanes = None if lanes is None else check_count("lanes", lanes, most=MOST_LANES)
        self._given = rank

    @cached_property
    def rank(self) -> Rank:
        """The data-parallel rank, determined at the first use."""
        rank = find_rank(*self._given)
        if self._lanes is not None and self._lanes % (rank.of * self.parts):
            times = f", times mix_lanes={self.parts}" if self.parts > 1 else ""
            raise ValueError(f"lanes={self._lanes} must be a multiple of the {rank.of} ranks{times}")
        if self._epoch_end is None and rank.of > 1 and self.uncounted:
            raise ValueError(
                f"the {rank.of} ranks would not get the same number of batches, which lets "
                f"training hang: {self.uncounted}. Or pass epoch_end='loop' and call "
                "with_epoch(), which cuts an endless stream into epochs of equal length. If unequal ranks are meant, "
                "pass epoch_end='exact'."
            )
        return rank

    @cached_property
    def mode(self) -> str:
        """How an epoch ends: ``"drop"``, ``"pad"``, ``"exact"`` or ``"loop"``."""
        mode = self._epoch_end or ("exact" if self.rank.of == 1 else "drop")
        segments, samples = segments_of(self.stage), self.source.sample_counts
        segments.samples = None if samples is None else sum(samples)
        segments.pads, segments.loops = mode == "pad", mode == "loop"
        return mode

    @property
    def endless(self) -> bool:
        """Whether epochs of the data follow each other without end."""
        return self._epoch_end == "loop"

    @cached_property
    def recipe(self) -> Recipe:
        """The description of the pipeline that a state must fit."""
        self.mode  # noqa: B018 - sets options of Segments, which are part of the graph
        return Stream(self.stage).recipe._replace(samples=self.source.samples_fingerprint)

    @property
    def source(self) -> Stage[Any]:
        """The first stage."""
        return self.stage.root

    @cached_property
    def batching(self) -> list[Stage[Any]]:
        """The steps that make batches, in order: all but the first make batches of batches."""
        return batching(self.stage)

    @property
    def batch_size(self) -> int:
        """How many samples a full batch has."""
        return self._part_size * self.parts

    @property
    def _part_size(self) -> int:
        """How many samples a full batch of a lane has, which is a part of a batch of the loader."""
        return math.prod(step.items_per_batch or 1 for step in self.batching)

    def batches(self, partition: Partition) -> int | None:
        """How many batches each lane of a partition yields; None if lanes may differ in it."""
        samples = partition.samples()
        if self.mode in ("exact", "loop") or samples is None:
            return None
        size = self._part_size
        return min(samples) // size if self.mode == "drop" else -(-max(samples) // size)

    def length(self, epoch: int, lanes: int | None) -> int:
        """How many batches this rank yields in a whole epoch of ``lanes`` lanes.

        The samples must be counted.
        """
        partition = Partition.first(lanes or self._new_lanes(), self.source, epoch)
        mine, batches = (partition.samples() or [])[self.rank.number :: self.rank.of], self.batches(partition)
        parts = sum(batches_of(self.batching, samples) for samples in mine) if batches is None else batches * len(mine)
        return self._of_parts(parts)

    def left(self, at: LoaderPosition) -> int | None:
        """How many batches this rank yields from a position to its epoch's end; None: not known."""
        samples, batches = at.partition.samples(), self.batches(at.partition)
        if self.endless or self.uncounted or samples is None:
            return None
        going = {number: lane for number, lane in at.states.items() if not lane["ended"]}
        if batches is not None:
            parts = sum(int(batches - lane["delivered"]) for lane in going.values())
        else:
            # Count by samples, since earlier batches may have had another size.
            parts = sum(
                batches_of(self.batching, samples[number] - sum(lane["counts"].get(name, 0) for name in COUNTED))
                for number, lane in going.items()
            )
        return self._of_parts(parts)

    def _of_parts(self, parts: int) -> int:
        """How many batches a number of parts makes."""
        return parts // self.parts if self.drop_last else -(-parts // self.parts)

    @property
    def last_may_be_smaller(self) -> bool:
        """Whether the last batches of an epoch may have fewer samples than the others."""
        return self.mode == "exact" and (
            (self.parts > 1 and not self.drop_last)
            or any(step.batches_of(1) for step in self.batching if step.items_per_batch != 1)
        )

    def without_part(self, lane: bytes) -> bytes:
        """Return the last state of a lane, with the samples of one part counted as dropped."""
        state = unpack(lane)
        for name, count in (("delivered", -self._part_size), ("dropped", self._part_size)):
            state["counts"][name] = state["counts"].get(name, 0) + count
        return pack(state)

    def beginning(self, epoch: int, lanes: int | None = None) -> LoaderPosition:
        """The beginning of an epoch."""
        lanes = lanes or self._new_lanes()
        return LoaderPosition(
            epoch,
            Partition.first(lanes, self.source, epoch),
            dict.fromkeys(range(self.rank.number, lanes, self.rank.of), pack(NOT_BEGUN)),
        )

    def after(self, at: LoaderPosition) -> LoaderPosition:
        """Return ``at``, or the beginning of the next epoch if every lane has ended at ``at``."""
        # With "exact", other ranks may still be in this epoch: then only a position of all lanes
        # counts.
        if (len(at.lanes) == at.partition.lanes or self.mode != "exact") and at.ended:
            return self.beginning(at.epoch + 1, at.partition.lanes).counted_from(at)
        return at

    def epoch(self, at: LoaderPosition) -> int:
        """Return the epoch of the data at a position; with "loop", of the lane that is last."""
        depth = segments_of(self.stage).depth
        positions = [lane["position"] for lane in at.states.values()]
        return at.epoch + min((0 if lane is None else lane[depth].get("epoch", 0) for lane in positions), default=0)

    def counts(self, at: LoaderPosition) -> dict[str, int]:
        """Count this rank's samples of an epoch up to a position, by what became of them."""
        return total_counts(at.states.values(), at.partition.counts if self.rank.number == 0 else {})

    def restore(self, state: State | list[State], *, moved: bool = False) -> LoaderPosition:
        """Return the position in a state from which this rank continues.

        Raises:
            StateError: as in ``PipeLoader.load_state_dict``.
        """
        if isinstance(state, (list, tuple)):
            state = state_for(list(state), self.rank, moved=moved or self.recipe.data.moved)
        move, rank = Move(moved), self.rank
        saved = check_recipe(state, self.recipe, move)
        if saved.rank is None:
            raise damaged("it does not say of which rank it is")
        epoch, count = saved.epoch, saved.lane_count
        lanes = {number: self._checked_lane(number, lane, move) for number, lane in saved.lanes.items()}
        whole, own = are_all(lanes, range(count)), (saved.rank, saved.world_size) == tuple(rank)
        if own and not whole and not are_all(lanes, range(rank.number, count, rank.of)):
            raise damaged(f"it has lane {some(lanes)} of {count}")
        if not whole and not own:
            raise StateError(
                f"this is the state of rank {saved.rank} of {saved.world_size} alone, and "
                f"this process is rank {rank.number} of {rank.of}: "
                "collect the states of all ranks and load merge_states(states) on each."
            )
        hosts, unit = self._new_lanes(), rank.of * self.parts
        alike = saved.epoch_end == self.mode and (
            count % unit == 0
            if self.mode in ("exact", "loop")
            else (saved.batch_size, saved.mix_lanes) == (self.batch_size, self.parts)
        )
        if not alike and not whole:
            raise StateError(
                f"this is the state of one rank, of an epoch of {count} lanes with epoch_end={shown(saved.epoch_end)}, "
                f"batches of {saved.batch_size} and mix_lanes={saved.mix_lanes}, and this loader has "
                f"epoch_end={self.mode!r}, batches of {self.batch_size} and mix_lanes={self.parts}: load "
                "merge_states(states) of all ranks' states on each, or keep these."
            )
        partition = (
            Partition.first(count, self.source, epoch)
            if saved.partition is None
            else Partition.from_json(count, saved.partition, segments_of(self.stage), epoch, move)
        )
        if not self.endless:
            self._check_one_epoch(partition, lanes)
        batches = self.batches(partition) if alike else None
        if batches is not None and any(lane["delivered"] > batches for lane in lanes.values()):
            raise damaged(f"it has a lane that gave more than its {batches} batches")
        fits = count % unit == 0 and count >= hosts
        if (whole or self.mode != "exact") and all(lane["ended"] for lane in lanes.values()):
            at = self.beginning(epoch + 1, count if fits else None)
        elif not whole or (alike and fits and self._lanes in (None, count) and self._even(partition, lanes)):
            at = LoaderPosition(
                epoch,
                partition,
                {number: pack(lanes[number]) for number in range(rank.number, count, rank.of)},
                saved.step,
            )
        else:
            count = self._lanes or max(hosts, count // unit * unit)
            if self.endless:
                epoch, partition = repartition_loop(partition, count, lanes, segments_of(self.stage), epoch)
            else:
                partition = repartition(partition, count, lanes, segments_of(self.stage), epoch)
            at = self.beginning(epoch, count)._replace(partition=partition)
            self._warn_of_dropped(at.partition)
        move.log()
        # Of what all ranks gave since the cut of with_epoch(), each now counts its share.
        given, samples = saved.given * saved.world_size, saved.given_samples
        samples = given * saved.batch_size if samples is None else samples * saved.world_size
        if saved.batch_size != self.batch_size:
            given = samples // self.batch_size
        return at._replace(given=given // rank.of, samples=samples // rank.of)

    def _new_lanes(self) -> int:
        """How many lanes a new epoch has, unless a state says otherwise."""
        return self._lanes or self.rank.of * self.parts * max(1, -(-self._num_workers // self.parts))

    def _warn_of_dropped(self, partition: Partition) -> None:
        """Warn if more than a quarter of the rest of a repartitioned epoch would be dropped."""
        samples, batches = partition.samples(), self.batches(partition)
        if self.mode != "drop" or samples is None or batches is None:
            return
        left, total = sum(samples) - batches * self._part_size * partition.lanes, sum(samples)
        if left * 4 > total:
            logger.warning(
                "on %d lanes, %d of the %d samples that are left of the epoch do not make a "
                    "full batch in every lane, and are dropped: use fewer lanes, or "
                "epoch_end='pad' or 'exact', if that is not meant", partition.lanes, left, total,
            )  # fmt: skip

    def _checked_lane(self, number: int, lane: SavedLane, move: Move) -> LaneState:
        """Return what a state says of a lane; StateError if the lane cannot have this position."""
        position = None
        if lane.position is not None:
            position = self.stage.relocate(check_lane(lane, number, self.stage), move)
            self.stage.load(position)
        return {
            "url": lane.url,
            "delivered": lane.delivered,
            "ended": lane.ended,
            "position": position,
            "counts": lane.counts,
        }

    def _check_one_epoch(self, partition: Partition, lanes: dict[int, LaneState]) -> None:
        """Raise StateError if the lanes of a state are in several epochs of the data."""
        depth = segments_of(self.stage).depth
        positions = [lane["position"] for lane in lanes.values() if lane["position"] is not None]
        if partition.later or any(position[depth].get("epoch", 0) for position in positions):
            raise StateError(
                "the lanes of this state are in several epochs of the data, as epoch_end='loop' lets them: pass "
                f"epoch_end='loop' to this loader, too, which has {self.mode!r}."
            )

    def _even(self, partition: Partition, lanes: dict[int, LaneState]) -> bool:
        """Whether all ranks have the same number of full batches left in these lanes; True where
        this does not matter.
        """
        batches = self.batches(partition)
        if batches is None:
            return True
        left = [0] * self.rank.of
        for number, lane in lanes.items():
            left[number % self.rank.of] += 0 if lane["ended"] else batches - lane["delivered"]
        return len(set(left)) == 1 and left[0] % self.parts == 0


def _holding(batches: Stage[Any], stage: Stage[Any]) -> str:
    """Return the last step after ``batches`` that does not take several streams for one, for a
    message; if there is none, ``batches``.
    """
    name = f"{functional_name(type(batches))}()"
    after = itertools.takewhile(lambda step: step is not batches, stage.chain)
    holding = (step for step in after if not step.holds_nothing or step.whole_lanes)
    return next((f"{functional_name(type(step))}() after {name}" for step in holding), name)


class Limit(NamedTuple):
    """How many errors a step may skip, and the class of the error that is raised beyond that."""

    errors: int
    kind: type[WdsError]


def _limits(stage: Stage[Any]) -> dict[str, Limit]:
    """The limits of the steps that have ``max_errors``, by the names of their counts.

    If steps in several sources of a mix have the same name, their limits are added up.
    """
    found: dict[str, Limit] = {}
    for step in stage.chain:
        if step.limited is not None and step.max_errors is not None:
            found[step.limited] = Limit(step.max_errors, step.error_kind)
        for branch in step.branches.values():
            for name, limit in _limits(branch).items():
                found[name] = Limit(limit.errors + (found[name].errors if name in found else 0), limit.kind)
    return found
