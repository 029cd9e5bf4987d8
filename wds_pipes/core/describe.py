"""A state in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wds_pipes.core.stage import State
from wds_pipes.core.state import Saved, read_count, read_state
from wds_pipes.core.words import plural, shown
from wds_pipes.errors import StateError


def describe_state(state: State) -> str:
    """A state for people: epoch, shard and its URL, byte, place in the shuffle, items; one line a lane, then the counts.

    Args:
        state: of a pipe, a node, a dataset or a PipeLoader, also inside of what StatefulDataLoader or torchdata's Loader gave.

    Raises:
        StateError: there is no state of a wds_pipes pipeline in it, or it is damaged.
    """
    found = list(_states_in(state))
    if not found:
        raise StateError(f"this is not a state of a wds_pipes pipeline but {shown(state)}. Pass what state_dict() returned.")
    return "\n".join(_describe(read_state(part)) for part in found)


def _states_in(state: Any, depth: int = 0) -> Iterator[State]:
    """Every state of ours in what a loader made of them."""
    if isinstance(state, dict) and depth < 50:  # no loader nests them deeper
        if {"version", "epoch", "lanes", "graph"} <= state.keys():
            yield state
        else:
            for part in state.values():
                yield from _states_in(part, depth + 1)


def _describe(state: Saved) -> str:
    names = [entry.split("(")[0] for entry in state.graph]
    lines = [f"epoch {state.epoch}, seed {state.seed}: {' > '.join(names)}"]
    for index, lane in state.lanes.items():
        facts = ["ended"] if lane.ended else [] if lane.position else ["not begun"]
        for name, entry in zip(names, lane.position or [], strict=False):

            def value(of: str, entry: dict[str, Any] = entry) -> int:
                return read_count(entry.get(of, 0), repr(of))

            if name == "shard_list" and "parts" in names:  # a lane of PipeLoader
                facts.append(f"in {lane.url}")
            elif name == "shard_list":
                per_lane = -(-((state.shards or 0) - index) // state.lane_count)
                facts.append(f"shard {min(value('next') + 1, per_lane)} of {per_lane} ({lane.url})")
            elif name == "load_tar":
                facts.append(f"byte {value('offset'):,}")
            elif name == "shuffle_buffer":
                facts.append(f"shuffle at {value('left'):,}, read again from its sample {value('first'):,}")
        facts.append(f"{plural(lane.delivered, 'item')} delivered")
        lines.append(f"lane {index} of {state.lane_count}: " + ", ".join(facts))
    lines.append("samples: " + ", ".join(f"{count:,} {what}" for what, count in state.counts.items()))
    return "\n".join(lines)
