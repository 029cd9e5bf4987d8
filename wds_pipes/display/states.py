"""Describes a state in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import wds_pipes.stages  # noqa: F401 - registers the stages of the package, which describe their positions
from wds_pipes.core.chain import PARTS, POSITION, ChainPart
from wds_pipes.core.lane import LaneFacts
from wds_pipes.core.stage import State, find_stage
from wds_pipes.core.state import SEGMENTS, Saved, read_as, read_count, read_dict, read_position, read_state
from wds_pipes.core.words import plural, shown
from wds_pipes.errors import StateError

_DEPTH = 50  # no checkpoint nests states deeper
_OURS = {"version", "epoch", "lanes", "graph"}


def describe_state(state: State) -> str:
    """Describe a state as text: epoch, shard and its URL, byte, place in the shuffle, items.

    There is one line for each lane, and then the counts.

    Args:
        state: the state of a pipe, a node, a dataset or a PipeLoader, or a state of
            StatefulDataLoader or torchdata's Loader that contains such states.

    Raises:
        StateError: ``state`` contains no state of a wds_pipes pipeline, or a damaged one.
    """
    found = [part for _, part in states_in(state)]
    if not found:
        raise StateError(
            f"this is not a state of a wds_pipes pipeline but {shown(state)}. Pass what state_dict() returned."
        )
    return "\n".join(_describe(read_state(part)) for part in found)


def states_in(content: Any, where: str = "", depth: int = 0) -> Iterator[tuple[str, State]]:
    """Yield the states of ours in dicts and lists, each after where it is: ``"ranks[0].loader"``,
    or ``""``.
    """
    if depth > _DEPTH:
        return
    if isinstance(content, Mapping):
        if content.keys() >= _OURS:
            yield where, dict(content)
            return
        for name, part in content.items():
            yield from states_in(part, f"{where}.{name}" if where else str(name), depth + 1)
    elif isinstance(content, (list, tuple)):
        for number, part in enumerate(content):
            yield from states_in(part, f"{where}[{number}]", depth + 1)


def _placed(names: list[str], position: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the names of the steps of a chain, each with its entry of a position; also of the steps
    before a step that runs one chain over its lane, from its entry.
    """
    before, placed = names[: -len(position)], names[-len(position) :]
    parts = read_as(list, position[0].get(PARTS, []), "the chains of a step") if position else []
    kind: Any = find_stage(placed[0]) if placed else None
    of_lane = getattr(kind, "part_kind", ChainPart) is ChainPart  # not one shard of it, as in interleave_shards
    if before and of_lane and len(parts) == 1 and POSITION in read_dict(parts[0], "a chain"):
        yield from _placed(before, read_position(parts[0][POSITION], "the position of a lane"))
    yield from zip(placed, position, strict=False)


def _epochs_since(state: Saved, names: list[str]) -> int:
    """Return by how many epochs of the data, which follow each other without a break, the last lane
    is ahead of the epoch of a state.
    """
    ahead = [
        read_count(entry.get("epoch", 0), "'epoch' of segments")
        for lane in state.lanes.values()
        for name, entry in _placed(names, lane.position or [{}])
        if name == SEGMENTS
    ]
    return min(ahead, default=0)


def _describe(state: Saved) -> str:
    names = [step.name for step in state.graph]
    lines = [f"epoch {state.epoch + _epochs_since(state, names)}, seed {state.seed}: {' > '.join(names)}"]
    lines += [f"up to epoch {epoch}: the first {plural(shards, 'shard')} of the list" for epoch, shards in state.grown]
    for number, lane in state.lanes.items():
        told = LaneFacts(number, state.lane_count, lane.url, state.shards, divided=SEGMENTS in names, epoch=state.epoch)
        facts: list[str | None] = ["ended"] if lane.ended else [] if lane.position else ["not begun"]
        if lane.position and lane.url is None and not lane.delivered and state.shards is not None:
            facts.append("it has no shard")
        else:
            for name, entry in _placed(names, lane.position or []):
                kind = find_stage(name)
                facts.append(None if kind is None else kind.describe(entry, told))
        facts.append(f"{plural(lane.delivered, 'item')} delivered")
        lines.append(f"lane {number} of {state.lane_count}: " + ", ".join(filter(None, facts)))
    lines.append("samples: " + ", ".join(f"{count:,} {what}" for what, count in state.counts.items()))
    return "\n".join(lines)
