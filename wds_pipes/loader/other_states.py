"""From the state of torchdata's StatefulDataLoader to the place where a PipeLoader continues."""

from __future__ import annotations

from contextlib import closing

from wds_pipes.core.chain import PARTS, POSITION, Chain
from wds_pipes.core.lane import Lane
from wds_pipes.core.moved import Move
from wds_pipes.core.recipe import check_recipe
from wds_pipes.core.stage import State, functional_name
from wds_pipes.core.state import ADDED, Saved, are_all, damaged, read_dict, read_state
from wds_pipes.core.words import shown
from wds_pipes.errors import StateError
from wds_pipes.loader.ledger import ledger_of
from wds_pipes.loader.partition import NOT_BEGUN, LaneState
from wds_pipes.loader.plan import LoaderPosition, Plan
from wds_pipes.loader.ranges import Ranges


def datasets_of(state: object) -> list[State]:
    """Return the states of the dataset in each worker of a StatefulDataLoader.

    Raises:
        StateError: it is not a state of one, or does not hold the position of each worker.
    """
    snapshot = state.get("_snapshot") if isinstance(state, dict) else None
    if isinstance(state, dict) and isinstance(state.get("dataset_state"), dict):
        return [state["dataset_state"]]
    if not isinstance(state, dict) or not isinstance(snapshot, dict):
        raise StateError(
            f"this is not a state of StatefulDataLoader(pipe.as_dataset()) but {shown(state)}: pass what its "
            "state_dict() returned."
        )
    if behind := state.get("_steps_since_snapshot"):
        raise StateError(
            f"the positions in this state of StatefulDataLoader are {shown(behind)} batches old: save it with "
            "snapshot_every_n_steps=1, or continue with StatefulDataLoader up to a snapshot."
        )
    workers = read_dict(snapshot.get("_worker_snapshots"), "'_worker_snapshots'")
    if not workers:
        raise damaged("it has no workers")
    return [read_dict(read_dict(one, name).get("dataset_state"), name) for name, one in workers.items()]


def place_of_workers(plan: Plan, datasets: list[State]) -> LoaderPosition:
    """Return the position from which this rank continues the epoch of workers of a DataLoader.

    What each worker has left of its shards is divided over the lanes of the loader, as when an
    epoch is repartitioned.

    Args:
        plan: that of the loader.
        datasets: the state of the dataset in each worker.

    Raises:
        StateError: the states do not fit, or a loader cannot divide what the workers have left.
    """
    source, saved = plan.source, [_fitting(plan, state) for state in datasets]
    if plan.kind is not Ranges or source.place_in(Lane(source.seed, 0)) is not None:
        raise StateError(
            f"PipeLoader divides the samples of {type(source).__name__} in another way than workers of "
            "StatefulDataLoader: continue with that until the end of the epoch."
        )
    if source.sample_counts is not None and not all(source.sample_counts):
        raise StateError(
            "the list has shards that are known to have no samples, which PipeLoader leaves out, so that the lanes "
            "would have other shards: build the pipe without index= and samples_per_shard= until the end of the epoch."
        )
    count, epochs = saved[0].lane_count, {one.epoch - one.ended for one in saved}
    lanes = {number: one for one in saved for number in one.lanes}
    if not are_all(lanes, range(count)) or len(saved) != count or len(epochs) > 1:
        raise damaged(f"it has workers {sorted(lanes)} of {count}, in epochs {sorted(epochs)}")
    [epoch], new = epochs, plan.new_lanes()
    if all(one.ended for one in saved):
        at = plan.beginning(epoch + 1)
    elif not any(one.ended or one.lanes[number].delivered for number, one in lanes.items()):
        at = plan.beginning(epoch)
    else:
        partition = Ranges(count)
        states = {number: _lane(plan, partition, number, one) for number, one in lanes.items()}
        epoch, partition = partition.repartitioned(new, states, epoch, plan.terms)
        at = plan.beginning(epoch, new)._replace(partition=partition)
    return at._replace(earlier=None)  # a ledger cannot begin in the middle of a run


def _fitting(plan: Plan, state: State) -> Saved:
    """Return the contents of the state of a dataset, if its pipe is that of a loader. Either may
    make batches itself.
    """
    saved, recipe = read_state(state), plan.recipe
    apart = {*ADDED, *(functional_name(type(step)) for step in plan.batching)}
    then, now = (
        [step for step in graph if step.partition("(")[0] not in apart] for graph in (saved.graph, recipe.graph)
    )
    if saved.rank is None and then == now:
        state = {**state, "graph": list(recipe.graph), "samples": recipe.samples or ""}
    return check_recipe(state, recipe, Move())


def _lane(plan: Plan, partition: Ranges, number: int, saved: Saved) -> LaneState:
    """Return the state of a lane that stands where a worker stood."""
    lane, inner, opened = saved.lanes[number], plan.terms.inner, 0
    if saved.ended:
        return {**NOT_BEGUN, "ended": True}
    if not lane.delivered or lane.position is None:
        return NOT_BEGUN
    entries = iter(lane.position)
    position = [{} if step is ledger_of(step) else next(entries, {}) for step in inner.placed]
    mark = inner.load(position)
    if plan.source.divides_shards:
        # A worker does not say how many shards it has begun: read on to its next sample.
        [(of, _)] = partition.segments(number, plan.source, saved.epoch)
        running = plan.segments.source.open(of, mark)
        with closing(running):
            next(running.items, None)
            opened = Chain(running).opened
    place = {"opened": opened, PARTS: [{POSITION: inner.dump(mark)}]}
    return {**NOT_BEGUN, "position": [place], "counts": dict(saved.counts)}
