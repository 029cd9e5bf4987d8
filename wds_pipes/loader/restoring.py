"""Where a PipeLoader continues from a state."""

from __future__ import annotations

from typing import Any

from wds_pipes.core.counts import logger
from wds_pipes.core.moved import Move
from wds_pipes.core.recipe import check_recipe
from wds_pipes.core.stage import State
from wds_pipes.core.state import Saved, are_all, damaged
from wds_pipes.core.words import shown, some
from wds_pipes.errors import StateError
from wds_pipes.loader.merging import state_for
from wds_pipes.loader.partition import LaneStates, Partition, pack
from wds_pipes.loader.plan import LoaderPosition, Plan
from wds_pipes.loader.slices import kind_in


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
        self.lanes: LaneStates = {number: lane._asdict() for number, lane in saved.lanes.items()}
        for lane in self.lanes.values():
            if lane["position"] is not None:  # without sources of a mix that are gone
                lane["position"] = plan.chain.dump(plan.chain.load(lane["position"]))
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
        terms, kind, new = plan.terms, kind_in(saved.partition), plan.new_lanes()
        unit, more = plan.rank.of * plan.parts, plan.lanes is None and plan.kind.may_be_more
        alike = self._alike(kind)
        fits = count % unit == 0 and (count == new or (more and count > new))
        old = kind.from_json(count, saved.partition, saved.epoch, terms._replace(size=saved.batch_size))
        begun = old.begun(self.lanes, terms)
        if (self.whole or plan.mode != "exact") and all(lane["ended"] for lane in self.lanes.values()):
            return plan.beginning(saved.epoch + 1, count if fits else None)
        if kind is not plan.kind and not begun:
            return plan.beginning(saved.epoch)
        lanes = self.lanes
        if kind is not plan.kind:
            old, lanes = old.divided_otherwise(lanes, terms)
        self._check_one_epoch(old)
        self._warn_of_added(old)
        if old.stays(lanes, terms, alike=alike, fits=fits):
            mine = range(plan.rank.number, count, plan.rank.of)
            return LoaderPosition(saved.epoch, old, {number: pack(lanes[number]) for number in mine}, saved.step)
        count = max(new, count // unit * unit) if more else new
        epoch, partition = old.repartitioned(count, lanes, saved.epoch, terms)
        return plan.beginning(epoch, count)._replace(partition=partition)

    def _alike(self, kind: type[Partition]) -> bool:
        """Return whether the loader of the state divided epochs as this one does. If not, the
        states of all ranks are needed.
        """
        plan, saved, count = self._plan, self._saved, self._saved.lane_count
        if plan.mode in kind.fit_any_batches:
            same = count % (plan.rank.of * plan.parts) == 0
        else:
            same = (saved.batch_size, saved.mix_lanes) == (plan.batch_size, plan.parts)
        alike = same and kind is plan.kind and saved.epoch_end == plan.mode
        if not alike and not self.whole:
            raise StateError(
                f"this is the state of one rank, of an epoch of {count} lanes with epoch_end={shown(saved.epoch_end)}, "
                f"batches of {saved.batch_size} and mix_lanes={saved.mix_lanes}, and this loader has "
                f"epoch_end={plan.mode!r}, batches of {plan.batch_size} and mix_lanes={plan.parts}: load "
                "merge_states(states) of all ranks' states on each, or keep these."
            )
        return alike

    def _warn_of_added(self, partition: Partition) -> None:
        """Warn if sources were added to a mix in an epoch in which some of its lanes have ended."""
        source, before = self._plan.source, self._saved.sources
        going = [(number, lane["position"]) for number, lane in self.lanes.items() if not lane["ended"]]
        begun = [position for _, position in going if position is not None]
        added = source.branches.keys() - before.keys() if begun else None
        if not added:
            return
        # of each segment of a lane that goes on, the number of all lanes of the epoch
        left: list[int] = []
        for number, position in going:
            done = 0 if position is None else position[0].get("segment", 0)
            left += [lane.of for lane, _ in partition.segments(number, source, self._saved.epoch)[done:]]
        of = max(left, default=0)
        ended = of - len(left) if self.whole else len(self.lanes) - len(going)
        if ended > 0:
            logger.warning(
                "source %s of mix() was added in the middle of an epoch in which %d of the %d lanes have ended: "
                "its share in these comes with the next epoch", ", ".join(map(repr, sorted(added))), ended, of,
            )  # fmt: skip

    def _check_one_epoch(self, partition: Partition) -> None:
        """Raise StateError if the lanes of a state are in several epochs of the data, which only
        ``epoch_end="loop"`` allows.
        """
        positions: list[Any] = [lane["position"] for lane in self.lanes.values() if lane["position"] is not None]
        in_several = partition.later or any(position[0].get("epoch", 0) for position in positions)
        if in_several and not self._plan.endless:
            raise StateError(
                "the lanes of this state are in several epochs of the data, as epoch_end='loop' lets them: pass "
                f"epoch_end='loop' to this loader, too, which has {self._plan.mode!r}."
            )
