"""Where a PipeLoader continues from a state."""

from __future__ import annotations

from typing import Any

from wds_pipes.core.counts import logger
from wds_pipes.core.moved import Move
from wds_pipes.core.recipe import check_recipe
from wds_pipes.core.stage import Stage, State, is_built_in
from wds_pipes.core.state import Saved, SavedLane, are_all, damaged
from wds_pipes.core.words import shown, some
from wds_pipes.errors import StateError
from wds_pipes.loader.global_order import is_in_order, place_in
from wds_pipes.loader.lengths import batches_of
from wds_pipes.loader.merging import state_for
from wds_pipes.loader.partition import Partition, inner_position, repartition, repartition_loop
from wds_pipes.loader.plan import LoaderPosition, Plan
from wds_pipes.loader.protocol import NOT_BEGUN, LaneState, pack
from wds_pipes.loader.segments import segments_of


def restore(plan: Plan, state: State | list[State], *, moved: bool = False) -> LoaderPosition:
    """Return the position in a state from which this rank continues.

    Raises:
        StateError: as in ``PipeLoader.load_state_dict``.
    """
    if isinstance(state, (list, tuple)):
        state = state_for(list(state), plan.rank, moved=moved or plan.recipe.data.moved)
    move = Move(moved)
    saved = check_recipe(state, plan.recipe, move)
    at = _Restoring(plan, saved).position()
    move.log()
    # Of what all ranks gave since the cut of with_epoch(), each now counts its share.
    given, samples = saved.given * saved.world_size, saved.given_samples
    samples = given * saved.batch_size if samples is None else samples * saved.world_size
    if saved.batch_size != plan.batch_size:
        given = samples // plan.batch_size
    return at._replace(given=given // plan.rank.of, samples=samples // plan.rank.of)


class _Restoring:
    """A state and the plan of the loader that loads it.

    Attributes:
        lanes: the lanes of the state.
        whole: whether it has all lanes of the epoch.
    """

    def __init__(self, plan: Plan, saved: Saved) -> None:
        self._plan, self._saved = plan, saved
        count, rank = saved.lane_count, plan.rank
        if saved.rank is None:
            raise damaged("it does not say of which rank it is")
        self.lanes = {number: self._checked(number, lane) for number, lane in saved.lanes.items()}
        self.whole, own = are_all(self.lanes, range(count)), (saved.rank, saved.world_size) == tuple(rank)
        if own and not self.whole and not are_all(self.lanes, range(rank.number, count, rank.of)):
            raise damaged(f"it has lane {some(self.lanes)} of {count}")
        if not self.whole and not own:
            raise StateError(
                f"this is the state of rank {saved.rank} of {saved.world_size} alone, and "
                f"this process is rank {rank.number} of {rank.of}: "
                "collect the states of all ranks and load merge_states(states) on each."
            )

    def position(self) -> LoaderPosition:
        """Return the position from which this rank continues."""
        plan, saved, count = self._plan, self._saved, self._saved.lane_count
        unit, same_batches = plan.rank.of * plan.parts, (plan.batch_size, plan.parts)
        in_order = is_in_order(saved.partition)
        alike = in_order == plan.in_order and saved.epoch_end == plan.mode
        alike = alike and (
            count % unit == 0
            if plan.mode in ("exact", "loop") and not in_order
            else (saved.batch_size, saved.mix_lanes) == same_batches
        )
        if not alike and not self.whole:
            raise StateError(
                f"this is the state of one rank, of an epoch of {count} lanes with epoch_end={shown(saved.epoch_end)}, "
                f"batches of {saved.batch_size} and mix_lanes={saved.mix_lanes}, and this loader has "
                f"epoch_end={plan.mode!r}, batches of {plan.batch_size} and mix_lanes={plan.parts}: load "
                "merge_states(states) of all ranks' states on each, or keep these."
            )
        fits = count % unit == 0 and (count == plan.new_lanes() if plan.in_order else count >= plan.new_lanes())
        place = None
        if in_order:  # the first place of the global order that no rank has had
            assert saved.partition is not None
            ranks, sizes = 1 if self.whole else saved.world_size, {"size": saved.batch_size, "total": plan.total}
            place = place_in(saved.partition, saved.lanes.items(), count, ranks=ranks, **sizes)
        if (self.whole or plan.mode != "exact") and all(lane["ended"] for lane in self.lanes.values()):
            return plan.beginning(saved.epoch + 1, count if fits and plan.lanes in (None, count) else None)
        if place is not None and plan.in_order:
            return self._in_order(place, keep=alike and fits)
        begun = saved.partition is not None or any(lane != NOT_BEGUN for lane in self.lanes.values())
        if place == 0 or (plan.in_order and not begun):
            return plan.beginning(saved.epoch)
        if plan.in_order:
            raise StateError(
                "this state stands inside an epoch that was divided into lanes, and this loader has one global order: "
                "load it with the options and steps with which it was saved, until the end of the epoch."
            )
        return self._in_lanes(alike, fits, place)

    def _in_order(self, place: int, *, keep: bool) -> LoaderPosition:
        """Return the position from a place of the global order on; the same lanes if possible.

        Args:
            place: the first place that no rank has had.
            keep: whether the lanes of the state have this number, and batches of this size.
        """
        plan, saved = self._plan, self._saved
        steps = sum(lane["delivered"] for lane in self.lanes.values())
        if not keep or (self.whole and steps % plan.rank.of):
            return plan.beginning(saved.epoch)._replace(partition=plan.first(plan.new_lanes(), saved.epoch, place))
        partition = plan.first(saved.lane_count, saved.epoch, saved.partition["place"])  # type: ignore[index]
        batches, samples, stripe = plan.batches(partition), partition.samples() or [], partition.stripe
        assert stripe is not None
        for number, lane in self.lanes.items():
            most = batches_of(plan.batching, samples[number]) if batches is None else batches[number]
            if lane["delivered"] > most or (lane["ended"] and lane["delivered"] < most):
                raise damaged(f"lane {number} gave {lane['delivered']} of its {most} batches")
            self._check_taken(number, lane, stripe.count(number, saved.lane_count))
        return self._same(partition)

    def _check_taken(self, number: int, lane: LaneState, most: int) -> None:
        """Raise StateError if the first stage of a lane with ``most`` samples is not where the
        batches of the lane end.

        A step of the user's may have its own ``mark``: an earlier position, from which it drops
        what it yielded.
        """
        plan = self._plan
        given, taken = min(lane["delivered"] * plan.part_size, most), 0
        if lane["position"] is not None:
            taken = plan.source.taken(inner_position(segments_of(plan.stage), lane["position"])[0])
        earlier = any(type(step).mark is not Stage.mark and not is_built_in(type(step)) for step in plan.chain)
        if not lane["ended"] and (taken > given or (taken < given and not earlier)):
            raise damaged(f"lane {number} gave {given} samples, and the next one is number {taken} of the lane")

    def _same(self, partition: Partition) -> LoaderPosition:
        """Return the position in the lanes of the state, as they are."""
        mine = range(self._plan.rank.number, self._saved.lane_count, self._plan.rank.of)
        lanes = {number: pack(self.lanes[number]) for number in mine}
        return LoaderPosition(self._saved.epoch, partition, lanes, self._saved.step)

    def _in_lanes(self, alike: bool, fits: bool, place: int | None) -> LoaderPosition:
        """Return the position in an epoch that is divided into lanes.

        Args:
            alike: whether batches are divided as in the state.
            fits: whether its lanes are enough, and their number fits the ranks.
            place: the place in the global order, if the state has one.
        """
        plan, saved, lanes, count = self._plan, self._saved, self.lanes, self._saved.lane_count
        epoch, segments = saved.epoch, segments_of(plan.stage)
        if place is not None:  # what was given is one lane, and the rest of the order another one
            done: LaneState = {**NOT_BEGUN, "ended": True, "counts": {"delivered": place}}
            partition, lanes = Partition(2, (place, plan.total - place)), {0: done, 1: NOT_BEGUN}
        elif saved.partition is None:
            partition = plan.first(count, epoch)
        else:
            partition = Partition.from_json(count, saved.partition, segments, epoch)
        if not plan.endless:
            self._check_one_epoch(partition)
        self._warn_of_added(partition)
        batches = plan.batches(partition) if alike else None
        if batches is not None and any(lane["delivered"] > batches[0] for lane in lanes.values()):
            raise damaged(f"it has a lane that gave more than its {batches[0]} batches")
        if not self.whole or (alike and fits and plan.lanes in (None, count) and self._even(batches)):
            return self._same(partition)
        unit = plan.rank.of * plan.parts
        count = plan.lanes or max(plan.new_lanes(), count // unit * unit)
        if plan.endless:
            epoch, partition = repartition_loop(partition, count, lanes, segments, epoch)
        else:
            partition = repartition(partition, count, lanes, segments, epoch)
        self._warn_of_dropped(partition)
        return plan.beginning(epoch, count)._replace(partition=partition)

    def _warn_of_added(self, partition: Partition) -> None:
        """Warn if sources were added to a mix in an epoch in which some of its lanes have ended."""
        source, before = self._plan.source, self._saved.sources
        going = [(number, lane["position"]) for number, lane in self.lanes.items() if not lane["ended"]]
        begun = [position for _, position in going if position is not None]
        added = source.branches.keys() - before.keys() if begun else None
        if not added:
            return
        left = sum(
            len(partition.segments(number, source)) - (0 if position is None else position[0].get("segment", 0))
            for number, position in going
        )
        of = len(partition.history[0][1]) if partition.history else partition.lanes
        ended = of - left if self.whole else len(self.lanes) - len(going)
        if ended > 0:
            logger.warning(
                "source %s of mix() was added in the middle of an epoch in which %d of the %d lanes have ended: "
                "its share in these comes with the next epoch", ", ".join(map(repr, sorted(added))), ended, of,
            )  # fmt: skip

    def _warn_of_dropped(self, partition: Partition) -> None:
        """Warn if more than a quarter of the rest of a repartitioned epoch would be dropped."""
        plan, samples, batches = self._plan, partition.samples(), self._plan.batches(partition)
        if plan.mode != "drop" or samples is None or batches is None:
            return
        left, total = sum(samples) - sum(batches) * plan.part_size, sum(samples)
        if left * 4 > total:
            logger.warning(
                "on %d lanes, %d of the %d samples that are left of the epoch do not make a "
                    "full batch in every lane, and are dropped: use fewer lanes, or "
                "epoch_end='pad' or 'exact', if that is not meant", partition.lanes, left, total,
            )  # fmt: skip

    def _checked(self, number: int, lane: SavedLane) -> LaneState:
        """Return what a state says of a lane; StateError if the lane cannot have this position."""
        chain, position = self._plan.chain, lane.position
        if position is not None:  # without sources of a mix that are gone
            position = chain.dump(chain.load(position))
        return {
            "url": lane.url,
            "delivered": lane.delivered,
            "ended": lane.ended,
            "position": position,
            "counts": lane.counts,
        }

    def _check_one_epoch(self, partition: Partition) -> None:
        """Raise StateError if the lanes of a state are in several epochs of the data."""
        positions: list[Any] = [lane["position"] for lane in self.lanes.values() if lane["position"] is not None]
        if partition.later or any(position[0].get("epoch", 0) for position in positions):
            raise StateError(
                "the lanes of this state are in several epochs of the data, as epoch_end='loop' lets them: pass "
                f"epoch_end='loop' to this loader, too, which has {self._plan.mode!r}."
            )

    def _even(self, batches: list[int] | None) -> bool:
        """Whether all ranks have the same number of full batches left in the lanes of the state;
        True where this does not matter.
        """
        if batches is None:
            return True
        left = [0] * self._plan.rank.of
        for number, lane in self.lanes.items():
            left[number % self._plan.rank.of] += 0 if lane["ended"] else batches[number] - lane["delivered"]
        return len(set(left)) == 1 and left[0] % self._plan.parts == 0
