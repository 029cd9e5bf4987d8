"""What a chain and a state must have in common."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from wds_pipes.core.moved import MEND, Data, Move
from wds_pipes.core.stage import Stage, State
from wds_pipes.core.state import SEGMENTS, Saved, SavedLane, damaged, read_state
from wds_pipes.core.words import shown
from wds_pipes.errors import StateError


class Recipe(NamedTuple):
    """What a chain and a state have in common: see ``Stage.which_data`` and ``Stage.graph``."""

    seed: int
    graph: tuple[str, ...]
    data: Data
    samples: str | None = None  # the fingerprint of the numbers of samples, if the epoch is partitioned by them

    @property
    def of_data(self) -> dict[str, Any]:
        """The entries of a state that say which shards it is of; no id of the data if there is
        none.
        """
        data = self.data
        return {"shards": data.shards, "fingerprint": data.fingerprint, **({"data": data.id} if data.id else {})}


def check_recipe(state: State, recipe: Recipe, move: Move) -> Saved:
    """Return the contents of a state. ``move`` notes where its data were.

    Raises:
        StateError: another pipeline made the state; the message lists all differences.
    """
    saved, differences, mend = read_state(state), [], "Build the pipeline as it was when the state was saved."
    move.url = next((lane.url for lane in saved.lanes.values() if lane.url is not None), None)
    if saved.graph != recipe.graph:
        differences.append(_unlike(saved.graph, recipe.graph))
    if saved.shards != recipe.data.shards:
        differences.append(f"it was made over {saved.shards} shards, this pipeline has {recipe.data.shards}")
    elif (problem := move.problem(Data(saved.fingerprint, saved.data), recipe.data)) is not None:
        differences.append(problem)
        mend += f" {MEND}"
    if saved.graph == recipe.graph and recipe.samples is not None and saved.samples != recipe.samples:
        differences.append(
            "samples_per_shard or the index gave the shards other numbers of samples, by which "
            "the epoch was partitioned"
        )
    if saved.seed != recipe.seed:
        differences.append(f"it was made with seed={saved.seed}, this pipeline has seed={recipe.seed}")
    if differences:
        raise StateError(f"the state does not fit this pipeline: {'; '.join(differences)}. {mend}")
    return saved


def _unlike(then: Sequence[str], now: Sequence[str]) -> str:
    """Return how the chain of a state differs from another one: the first steps that differ."""
    old, new = ([step for step in graph if not _is_parts(step)] for graph in (then, now))
    if old != new:
        pairs = zip_longest(old, new, fillvalue="no step")
        place, (one, other) = next(found for found in enumerate(pairs, 1) if found[1][0] != found[1][1])
        return f"step {place} of its pipeline was {one:.2000}, and of this one is {other}"
    old_parts, new_parts = ([step for step in graph if _is_parts(step)] for graph in (then, now))
    if not new_parts:
        return "it was made by a PipeLoader, this is a pipe: load it into a PipeLoader"
    if not old_parts:
        return "it was made by a pipe, this is a PipeLoader: load it into what you iterated"
    numbers = (
        f"{step:.80}".partition("samples=")[2].rstrip(")") or "an unknown number of"
        for step in (old_parts[0], new_parts[0])
    )
    return "its epoch had {} samples, that of this pipeline has {}: pass the same samples_per_shard= or index=".format(
        *numbers
    )


def _is_parts(step: str) -> bool:
    """Return whether an entry of a graph is a step that PipeLoader adds to a chain."""
    return step.partition("(")[0] == SEGMENTS


def check_lane(lane: SavedLane, number: int, stage: Stage[Any]) -> list[dict[str, Any]]:
    """Return the position of a lane in a state.

    Raises:
        StateError: the position does not have one entry for each stage.
    """
    position = lane.position
    if position is None or len(position) != len(stage.dump(None)):
        raise damaged(f"the position of lane {number} is {shown(position)}")
    return position
