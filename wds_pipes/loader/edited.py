"""Where a PipeLoader continues after an edit of a running epoch: see ``wds_pipes.stages.edits``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from wds_pipes.core.chain import PARTS, POSITION, Chain
from wds_pipes.core.stage import Stage, State
from wds_pipes.core.state import Saved
from wds_pipes.errors import StateError
from wds_pipes.loader.plan import LoaderPosition, Plan
from wds_pipes.loader.restoring import of_rank, restore
from wds_pipes.loader.slices import Slices
from wds_pipes.stages.edits import Edition, Edits, Keys, place_of_exclusion
from wds_pipes.stages.sample_list import Remaining, SampleList

Position = list[dict[str, Any]]


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
        state = of_rank(list(state), plan, edits.moved or plan.recipe.data.moved)
    edition = Edition(stage, state, edits, held, in_order=plan.kind.in_order)
    if not edition.changes:
        return Continuation(restore(plan, state, moved=edits.moved, changed=edits.changed), plan, ())
    then = new_plan(edition.then)
    at = restore(then, state, moved=edits.moved, changed=edits.changed)
    now = new_plan(edition.now(None if at.begins else _last_begun(edition.saved)))
    if at.begins:  # it may have other samples
        at = _beginning(at, now)
    elif len(edition.keys) > edition.known:
        at = _without_places(at, then, now, edition.saved) if plan.kind.in_order else _with_exclusion(at, then, now)
    return Continuation(at, now, edition.keys)


def _last_begun(saved: Saved) -> int:
    """Return the last epoch that a lane has begun."""
    ahead: list[int] = [lane.position[0].get("epoch", 0) for lane in saved.lanes.values() if lane.position is not None]
    later = (saved.partition or {}).get("later", [])
    return saved.epoch + max(len(later), *ahead, 0)


def _beginning(at: LoaderPosition, now: Plan) -> LoaderPosition:
    """Return the beginning of the epoch of a position, after the same epochs."""
    return now.beginning(at.epoch, at.partition.lanes).counted_from(at)._replace(earlier=at.earlier)


def _without_places(at: LoaderPosition, then: Plan, now: Plan, saved: Saved) -> LoaderPosition:
    """Return a position in one order as that in this order without the samples that are left out
    now.
    """
    partition, states, lanes = cast(Slices, at.partition), then.states(at), at.partition.lanes
    if then.ledger and at.step and len(states) < lanes:  # the partition has the digest of all ranks
        if len(saved.lanes) < lanes:
            raise StateError(
                "with a ledger, exclude= needs the states of all ranks: collect them, and load merge_states(states) "
                "on each rank."
            )
        states = {number: lane._asdict() for number, lane in saved.lanes.items()}
    place, digest = partition.next_place(states, then.terms), partition.digest(states)
    before, after = (cast(SampleList, plan.source).order(plan.source.seed, at.epoch) for plan in (then, now))
    whole = before.whole_place(place) if isinstance(before, Remaining) else place
    place = cast(Remaining, after).place(whole)
    left_out = min(place, partition.left_out)
    partition = Slices.of(lanes, at.epoch, now.terms, place, digest, left_out=left_out)
    return _beginning(at, now)._replace(partition=partition)


def _with_exclusion(at: LoaderPosition, then: Plan, now: Plan) -> LoaderPosition:
    """Return a position of a pipeline as that of the pipeline with ``ExcludeSamples`` in it."""
    outer, inner = place_of_exclusion(now.chain), place_of_exclusion(now.terms.inner)

    def longer(position: Position | None, chain: Chain, place: int | None) -> Position | None:
        if position is not None and place is not None and len(position) < len(chain.placed):
            position.insert(place, {})
        return position

    lanes = then.states(at)
    for lane in lanes.values():
        if longer(lane["position"], now.chain, outer) is not None:
            for part in lane["position"][0].get(PARTS, []):
                longer(part.get(POSITION), now.terms.inner, inner)
    partition = at.partition.with_positions(lambda position: longer(position, now.terms.inner, inner))
    return at._replace(partition=partition, lanes=now.lanes_of(lanes))
