"""From the states of one rank or of all ranks to the place where a PipeLoader continues, also after
an edit of a running epoch: see ``wds_pipes.stages.edits``.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from wds_pipes.core.counts import in_state, logger, sum_counts
from wds_pipes.core.digest import NOTHING, add, in_epoch, to_text
from wds_pipes.core.moved import Data, Move
from wds_pipes.core.recipe import check_recipe
from wds_pipes.core.stage import Stage, State
from wds_pipes.core.state import LEDGER, Saved, SavedSource, are_all, damaged, read_state
from wds_pipes.core.words import shown, some
from wds_pipes.errors import StateError
from wds_pipes.loader.partition import BEGINNING, LaneStates, went_on
from wds_pipes.loader.plan import LoaderPosition, Plan
from wds_pipes.loader.slices import Partition, kind_in
from wds_pipes.stages.edits import Edition, Edits, Keys

_OF_A_RUN = (
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


class Editable(NamedTuple):
    """What the edits of a loader start from.

    Attributes:
        plan: the plan of the pipeline as it was built.
        stage: this pipeline.
        new_plan: returns the plan of an edited one, also for another ``num_workers``.
    """

    plan: Plan
    stage: Stage[Any]
    new_plan: Callable[..., Plan]


class Continuation(NamedTuple):
    """Where a loader continues.

    Attributes:
        at: the position.
        plan: the plan of the pipeline that goes on.
        excluded: the keys of the samples that it leaves out.
    """

    at: LoaderPosition
    plan: Plan
    excluded: Keys


def find_continuation(editable: Editable, state: State | list[State], edits: Edits, held: Keys) -> Continuation:
    """Return where this rank continues from a state, with edits; ``held`` are the keys of the
    samples that an earlier call left out.

    Raises:
        StateError, ValueError, TypeError: as in ``PipeLoader.load_state_dict``.
    """
    plan, stage, new_plan = editable
    if isinstance(state, (list, tuple)):
        state = _of_rank(list(state), plan, edits.moved or plan.recipe.data.moved)
    edition = Edition(stage, state, edits, held, in_order=plan.kind.in_order)
    if not edition.changes:
        return Continuation(_restore(plan, state, moved=edits.moved, changed=edits.changed), plan, ())
    then = new_plan(edition.then)
    at = _restore(then, state, moved=edits.moved, changed=edits.changed)
    now = new_plan(edition.now(None if at.begins else _last_begun(edition.saved)))
    if at.begins:  # it may have other samples
        at = now.beginning(at.epoch, at.partition.lanes).counted_from(at)._replace(earlier=at.earlier)
    elif len(edition.keys) > edition.known:
        partition, lanes = at.partition.excluding(then.states(at), at.epoch, then.terms, now.terms)
        at = at._replace(partition=partition, lanes=now.lanes_of(lanes))
    return Continuation(at, now, edition.keys)


def _last_begun(saved: Saved) -> int:
    """Return the last epoch that a lane has begun."""
    ahead: list[int] = [lane.position[0].get("epoch", 0) for lane in saved.lanes.values() if lane.position is not None]
    later = (saved.partition or {}).get("later", [])
    return saved.epoch + max(len(later), *ahead, 0)


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
    saved = _read_all_ranks(states)
    if (apart := why_apart(states, saved, moved)) is not None:
        raise StateError(apart)
    return _merged(states, saved)


def _read_all_ranks(states: list[State]) -> list[Saved]:
    """Return the contents of the states of all ranks."""
    if not states or not all(isinstance(state, dict) and "rank" in state for state in states):
        raise StateError(
            f"this is not a state of a wds_pipes pipeline but {shown(states)}. Pass what state_dict() returned, or "
            "the list of what it returned on each rank."
        )
    saved = [read_state(state) for state in states]
    world = saved[0].world_size
    ranks = Counter(state.rank for state in saved if state.rank is not None)
    double = [rank for rank, count in sorted(ranks.items()) if count > 1]
    whole = are_all(set(ranks), range(world))
    if double or not whole:
        facts = [] if whole else [f"rank {some(rank for rank in range(world) if rank not in ranks)} is missing"]
        facts += [f"rank {some(double)} is there more than once"] if double else []
        raise StateError(
            f"these are not the states of ranks 0 to {world - 1}: {' and '.join(facts)}. Collect "
            "the state of each rank once."
        )
    return saved


def why_apart(states: list[State], saved: list[Saved], moved: bool) -> str | None:
    """Return why the states of ranks of one run fit this number of ranks only; None if they fit any
    number.

    With ``epoch_end="exact"`` a rank may have fewer batches in an epoch than another. When one rank
    has begun the next epoch, no common partition fits all of them, but each rank can continue by
    itself.

    Raises:
        StateError: they do not belong to one checkpoint.
    """
    _check_one_run(states, saved, moved)
    first = states[0]
    differ = [name for name in ("partition", "epoch") if any(one.get(name) != first.get(name) for one in states)]
    going = [state.step for state in saved if not all(lane.ended for lane in state.lanes.values())]
    if differ:
        why = _differ(states, differ[0])
    elif len(set(going)) > 1 or (going and max(state.step for state in saved) > going[0]):
        steps = ", ".join(f"rank {state.rank} at {state.step}" for state in saved)
        why = (
            f"the states were taken at different steps ({steps:.1000}): samples would be lost or "
            "repeated. Save all ranks at the same step."
        )
    else:
        return None
    if any(state.epoch_end != "exact" for state in saved) or not any(state.epoch for state in saved):
        raise StateError(why)
    return why


def _check_one_run(states: list[State], saved: list[Saved], moved: bool) -> None:
    """Raise StateError if states are not of one run: they differ in one of its entries, or are of
    other shards. Each rank may have the same shards at its own place.
    """
    for name in _OF_A_RUN:
        if any(state.get(name) != states[0].get(name) for state in states):
            raise StateError(_differ(states, name))
    for state in saved[1:]:
        if (how := _how_data_differ(saved[0], state, moved)) is not None:
            raise StateError(f"the states of ranks {saved[0].rank} and {state.rank} {how}")


def _differ(states: list[State], name: str) -> str:
    values = ", ".join(shown(state.get(name)) for state in states[:5])
    return f"the states differ in {name!r}: {values}. Take them of one run, at one step."


def _how_data_differ(one: Saved | SavedSource, other: Saved | SavedSource, moved: bool) -> str | None:
    """Return how what two states, or two sources of mixes, read differs; None: it does not."""
    problem = Move(moved).problem(Data(other.fingerprint, other.data), Data(one.fingerprint, one.data))
    if problem is not None or one.sources.keys() != other.sources.keys():
        return (
            "are of other shards, or of the same in another order. Take them of one run, at one step. If their shards "
            "are the same, under other names, pass moved=True."
        )
    for name, then in one.sources.items():
        now = other.sources[name]
        for what in ("seed", "shards", "steps", "weight"):
            if getattr(then, what) != getattr(now, what):
                return f"differ in {what!r} of source {shown(name)}. Take them of one run."
        if (deeper := _how_data_differ(then, now, moved)) is not None:
            return deeper
    return None


def _merged(states: list[State], saved: list[Saved]) -> State:
    """Return the states of ranks that are together as one."""
    world, first = saved[0].world_size, states[0]
    for state in saved:
        if not are_all(state.lanes, range(state.rank or 0, state.lane_count, world)):
            raise damaged(f"rank {state.rank} of {world} has lane {some(state.lanes)} of {state.lane_count}")
    lanes = {number: lane for state in states for number, lane in state["lanes"].items()}
    merged = {
        **first,
        "rank": 0,
        "world_size": 1,
        # The largest, so that a run that is repeated from here writes the same as the first time.
        "step": max(state.step for state in saved),
        "lanes": {number: lanes[number] for number in sorted(lanes, key=int)},
        "counts": in_state(sum_counts(state.counts for state in saved)),
    }
    if "given" in first:  # of all ranks together, as world_size says
        merged["given"] = sum(state.given for state in saved)
    if "given_samples" in first:
        merged["given_samples"] = sum(state.given_samples or 0 for state in saved)
    ledgers = [state.ledger for state in saved if state.ledger is not None]
    if len(ledgers) == len(saved):
        merged["ledger"] = {name: to_text(add(ledger[name] for ledger in ledgers)) for name in LEDGER}
    else:
        merged.pop("ledger", None)
    try:
        return copy.deepcopy(merged)
    except RecursionError as error:
        raise damaged("it is nested too deeply") from error


def _of_rank(states: list[State], plan: Plan, moved: bool) -> State:
    """Return the state that a rank loads, from the states of all ranks: all as one, or its own if
    the ranks can only continue by themselves.
    """
    saved = _read_all_ranks(states)
    apart = why_apart(states, saved, moved)
    if apart is None:
        return _merged(states, saved)
    if len(states) != plan.rank.of:
        raise StateError(
            f"{apart} With epoch_end='exact' that may be meant: on {len(states)} ranks each "
            "continues from its own state. With epoch_end='loop' ranks stay together, and a state fits any number."
        )
    return next(state for state, of in zip(states, saved, strict=True) if of.rank == plan.rank.number)


def _restore(plan: Plan, state: State, *, moved: bool = False, changed: bool = False) -> LoaderPosition:
    """Return the position in a state from which this rank continues.

    Raises:
        StateError: as in ``PipeLoader.load_state_dict``.
    """
    move = Move(moved)
    saved = check_recipe(state, plan.recipe, move, changed=changed)
    at = _with_ledger(plan, saved, _position(plan, saved, _lanes_of(plan, saved)))
    move.log()
    at.partition.as_json()  # it is kept, so that the first state_dict() is as fast as the others
    # Of what all ranks gave since the cut of with_epoch(), each now counts its share.
    given, samples = saved.given * saved.world_size, saved.given_samples
    samples = given * saved.batch_size if samples is None else samples * saved.world_size
    if saved.batch_size != plan.batch_size:
        given = samples // plan.batch_size
    return at._replace(given=given // plan.rank.of, samples=samples // plan.rank.of)


def _with_ledger(plan: Plan, saved: Saved, at: LoaderPosition) -> LoaderPosition:
    """Return a position with the digest of the epochs before it; without a ledger, with none."""
    if saved.ledger is None or not plan.ledger:
        if saved.ledger is not None or (plan.ledger and saved.step):
            logger.warning(
                "the ledger of this run %s, so states have none from here on",
                "ends here, since this loader has ledger=False" if saved.ledger else "cannot begin in its middle",
            )
        return at._replace(earlier=None)
    epoch, earlier = (saved.ledger[name] for name in LEDGER)
    if at.epoch == saved.epoch + 1 and plan.digest(at) == NOTHING:  # all lanes of the state had ended
        earlier = add([earlier, in_epoch(epoch, saved.epoch)])
    of_all_ranks = len(saved.lanes) == saved.lane_count
    return at._replace(earlier=NOTHING if of_all_ranks and plan.rank.number else earlier)


def _lanes_of(plan: Plan, saved: Saved) -> LaneStates:
    """Return the lanes of a state: all of its epoch, or those of this rank."""
    count, rank = saved.lane_count, plan.rank
    if saved.rank is None:
        raise damaged("it does not say of which rank it is")
    lanes: LaneStates = {number: lane._asdict() for number, lane in saved.lanes.items()}
    for lane in lanes.values():
        if lane["position"] is not None:  # without sources of a mix that are gone
            lane["position"] = plan.chain.dump(plan.chain.load(lane["position"]))
    if are_all(lanes, range(count)):
        return lanes
    if (saved.rank, saved.world_size) != tuple(rank):
        raise StateError(
            f"this is the state of rank {saved.rank} of {saved.world_size} alone, and "
            f"this process is rank {rank.number} of {rank.of}: "
            "collect the states of all ranks and load merge_states(states) on each."
        )
    if not are_all(lanes, range(rank.number, count, rank.of)):
        raise damaged(f"it has lane {some(lanes)} of {count}")
    return lanes


def _position(plan: Plan, saved: Saved, lanes: LaneStates) -> LoaderPosition:
    """Return the position from which this rank continues."""
    count, whole = saved.lane_count, len(lanes) == saved.lane_count
    terms, kind, new = plan.terms, kind_in(saved.partition), plan.new_lanes()
    unit, more = plan.rank.of * plan.parts, plan.lanes is None and not plan.kind.in_order
    alike = _is_alike(plan, saved, kind, whole=whole)
    fits = count % unit == 0 and (count == new or (more and (count > new or plan.elastic)))
    size = saved.batch_size // saved.mix_lanes
    old = kind.from_json(count, saved.partition, saved.epoch, terms._replace(mode=saved.epoch_end, size=size))
    begun = old.begun(lanes, terms)
    ended = [lane["ended"] for lane in lanes.values()]
    if (whole or plan.mode != "exact") and all(ended):
        return plan.beginning(saved.epoch + 1, count if fits else None)
    if not begun and kind is not plan.kind:
        return plan.beginning(saved.epoch)
    positions: list[Any] = [lane["position"] for lane in lanes.values() if lane["position"] is not None]
    if not plan.endless and (old.later or any(position[0].get("epoch", 0) for position in positions)):
        raise StateError(
            "the lanes of this state are in several epochs of the data, as epoch_end='loop' lets them: pass "
            f"epoch_end='loop' to this loader, too, which has {plan.mode!r}."
        )
    going = [(number, lane["position"]) for number, lane in lanes.items() if not lane["ended"]]
    if kind is not plan.kind:
        old, lanes = old.divided_otherwise(lanes, terms)
    _warn_of_added(plan, saved, old, going, whole=whole)
    if (going_on := old.going_on(lanes, terms, alike=alike, fits=fits)) is not None:
        partition, lanes = going_on
        mine = range(plan.rank.number, count, plan.rank.of)
        return LoaderPosition(
            saved.epoch, partition, plan.lanes_of({number: lanes[number] for number in mine}), saved.step
        )
    count = max(new, count // unit * unit) if more else new
    if saved.epoch_end == "drop":
        lanes = {number: went_on(lane) if lane["counts"].get("dropped") else lane for number, lane in lanes.items()}
    epoch, partition = old.repartitioned(count, lanes, saved.epoch, terms)
    at = plan.beginning(epoch, count)._replace(partition=partition)
    if kept := old.kept(lanes):
        at = at._replace(lanes={**at.lanes, plan.rank.number: BEGINNING._replace(extra=kept)})
    return at


def _warn_of_added(
    plan: Plan, saved: Saved, partition: Partition, going: list[tuple[int, Any]], *, whole: bool
) -> None:
    """Warn if sources were added to a mix in an epoch in which some of its lanes have ended.

    ``going`` are the lanes that have not, with their positions.
    """
    added = plan.source.branches.keys() - saved.sources.keys()
    if not added or not any(position is not None for _, position in going):
        return
    # of each segment of a lane that goes on, the number of all lanes of the epoch
    left: list[int] = []
    for number, position in going:
        done = 0 if position is None else position[0].get("segment", 0)
        left += [portion.lane.of for portion in partition.segments(number, plan.source, saved.epoch)[done:]]
    of = max(left, default=0)
    ended = of - len(left) if whole else len(saved.lanes) - len(going)
    if ended > 0:
        logger.warning(
            "source %s of mix() was added in the middle of an epoch in which %d of the %d lanes have ended: "
            "its share in these comes with the next epoch", ", ".join(map(repr, sorted(added))), ended, of,
        )  # fmt: skip


def _is_alike(plan: Plan, saved: Saved, kind: type[Partition], *, whole: bool) -> bool:
    """Return whether the loader of the state divided epochs as this one does. If not, the states
    of all ranks are needed.
    """
    count = saved.lane_count
    if plan.mode in kind.fit_any_batches:
        same = count % (plan.rank.of * plan.parts) == 0
    else:
        same = (saved.batch_size, saved.mix_lanes) == (plan.batch_size, plan.parts)
    alike = same and kind is plan.kind and saved.epoch_end == plan.mode
    if not alike and not whole:
        raise StateError(
            f"this is the state of one rank, of an epoch of {count} lanes with epoch_end={shown(saved.epoch_end)}, "
            f"batches of {saved.batch_size} and mix_lanes={saved.mix_lanes}, and this loader has "
            f"epoch_end={plan.mode!r}, batches of {plan.batch_size} and mix_lanes={plan.parts}: load "
            "merge_states(states) of all ranks' states on each, or keep these."
        )
    return alike
