"""Where a PipeLoader continues after an edit of a running epoch: see ``wds_pipes.stages.edits``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from wds_pipes.core.stage import Stage, State
from wds_pipes.core.state import Saved
from wds_pipes.loader.plan import LoaderPosition, Plan
from wds_pipes.loader.restoring import of_rank, restore
from wds_pipes.stages.edits import Edition, Edits, Keys


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
