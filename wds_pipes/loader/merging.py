"""Merges the states of several ranks into one."""

from __future__ import annotations

import copy
from collections import Counter

from wds_pipes.core.counts import sum_counts
from wds_pipes.core.moved import Data, Move
from wds_pipes.core.stage import State
from wds_pipes.core.state import Saved, SavedSource, are_all, damaged, read_state
from wds_pipes.core.words import shown, some
from wds_pipes.errors import StateError
from wds_pipes.loader.ranks import Rank


def merge_states(states: list[State], *, moved: bool = False) -> State:
    """Merge the states of all ranks into one that any number of ranks and workers can load.

    The states must have been taken at the same step. Ranks may read the same shards at different
    places, for example each on its own disk.

    Args:
        states: what ``state_dict`` of each rank's loader returned.
        moved: the shards of all ranks are the same, whatever their names and the index say.

    Raises:
        StateError: a rank is missing or present twice, or the states were taken at different steps
            or by different pipelines.
    """
    if not states or not all(isinstance(state, dict) and "rank" in state for state in states):
        raise StateError(
            "merge_states() takes the list of what state_dict() of each rank's PipeLoader returned, untouched"
        )
    saved = [read_state(state) for state in states]
    world, first = saved[0].world_size, states[0]
    ranks = [state.rank for state in saved if state.rank is not None]
    if len(ranks) != world or not are_all(set(ranks), range(world)):
        there, double = set(ranks), {rank for rank, count in Counter(ranks).items() if count > 1}
        facts = (
            [f"rank {some(rank for rank in range(world) if rank not in there)} is missing"]
            if not are_all(there, range(world))
            else []
        )
        facts += [f"rank {some(sorted(double))} is there more than once"] if double else []
        raise StateError(
            f"these are not the states of ranks 0 to {world - 1}: {' and '.join(facts)}. Collect "
            "the state of each rank once."
        )
    _check_run(states, saved, moved, "partition", "epoch")
    for state in saved:
        if not are_all(state.lanes, range(state.rank or 0, state.lane_count, world)):
            raise damaged(f"rank {state.rank} of {world} has lane {some(state.lanes)} of {state.lane_count}")
    going = [state for state in saved if not all(lane.ended for lane in state.lanes.values())]
    if len({state.step for state in going}) > 1 or (going and max(state.step for state in saved) > going[0].step):
        steps = ", ".join(f"rank {state.rank} at {state.step}" for state in saved)
        raise StateError(
            f"the states were taken at different steps ({steps:.1000}): samples would be lost or "
            "repeated. Save all ranks at the same step."
        )
    lanes = {number: lane for state in states for number, lane in state["lanes"].items()}
    # The largest, so that a run that is repeated from here writes the same as the first time.
    step = max(state.step for state in saved)
    merged = {
        **first,
        "rank": 0,
        "world_size": 1,
        "step": step,
        "lanes": {number: lanes[number] for number in sorted(lanes, key=int)},
        "counts": sum_counts(state.counts for state in saved),
    }
    if "given" in first:  # of all ranks together, as world_size says
        merged["given"] = sum(state.given for state in saved)
    if "given_samples" in first:
        merged["given_samples"] = sum(state.given_samples or 0 for state in saved)
    try:
        return copy.deepcopy(merged)
    except RecursionError as error:
        raise damaged("it is nested too deeply") from error


OF_A_RUN = (
    "version",
    "seed",
    "shards",
    "graph",
    "samples",
    "lane_count",
    "world_size",
    "epoch_end",
    "batch_size",
    "mix_lanes",
)


def _check_run(states: list[State], saved: list[Saved], moved: bool, *more: str) -> None:
    """Raise StateError if the states are not of one run: they differ in one of its entries or of
    ``more``, or are of other shards. Each rank may have the same shards at its own place.
    """
    for name in (*OF_A_RUN, *more):
        if any(state.get(name) != states[0].get(name) for state in states):
            values = ", ".join(shown(state.get(name)) for state in states[:5])
            raise StateError(f"the states differ in {name!r}: {values}. Take them of one run, at one step.")
    for state in saved[1:]:
        if (how := _how_sources_differ(saved[0], state)) is not None:
            raise StateError(
                f"the states of ranks {saved[0].rank} and {state.rank} differ {how}. Take them of one run."
            )
        if of_other_shards(saved[0], state, moved):
            raise StateError(
                f"the states of ranks {saved[0].rank} and {state.rank} are of other shards. Take them of one run, at "
                "one step. If their shards are the same, under other names, pass moved=True."
            )


def of_other_shards(one: Saved | SavedSource, other: Saved | SavedSource, moved: bool) -> bool:
    """Whether two states are of different shards, or of the same in another order."""
    data = Data(one.fingerprint, one.data)
    return (
        Move(moved).problem(Data(other.fingerprint, other.data), data) is not None
        or one.sources.keys() != other.sources.keys()
        or any(of_other_shards(source, other.sources[name], moved) for name, source in one.sources.items())
    )


def _how_sources_differ(one: Saved | SavedSource, other: Saved | SavedSource) -> str | None:
    """Return how the sources of a mix differ in two states, apart from their shards; None if they
    do not.
    """
    for name in one.sources.keys() & other.sources.keys():
        then, now = one.sources[name], other.sources[name]
        for what in ("seed", "shards", "steps"):
            if getattr(then, what) != getattr(now, what):
                return f"in {what!r} of source {shown(name)}"
        if (deeper := _how_sources_differ(then, now)) is not None:
            return deeper
    return None


def state_for(states: list[State], rank: Rank, *, moved: bool = False) -> State:
    """Return the state that a rank loads, from the states of all ranks.

    This is the result of ``merge_states``, or the rank's own state if the ranks were at different
    steps and may be. With ``epoch_end="exact"`` a rank may have fewer batches in an epoch than
    another. When one rank has begun the next epoch, their epochs and steps differ, and no common
    partition fits all of them, but each rank can continue by itself.
    """
    try:
        return merge_states(states, moved=moved)
    except StateError as error:
        try:
            saved = [read_state(state) for state in states]
        except StateError:
            raise error from None
        in_step = not any(state.epoch > 0 for state in saved)  # in the first epoch
        if (
            in_step
            or sorted(state.rank or 0 for state in saved) != list(range(len(saved)))
            or any(state.epoch_end != "exact" for state in saved)
        ):
            raise
        _check_run(states, saved, moved)
        if len(states) != rank.of:
            raise StateError(
                f"{error} With epoch_end='exact' that may be meant: on {len(states)} ranks each "
                "continues from its own state. With epoch_end='loop' ranks stay together, and a state fits any number."
            ) from None
        return next(state for state, of in zip(states, saved, strict=True) if of.rank == rank.number)
