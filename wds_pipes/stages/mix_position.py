"""The position of a mix, as a state has it."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

from wds_pipes.core.moved import MEND
from wds_pipes.core.stage import Stage
from wds_pipes.core.state import (
    damaged,
    read_count,
    read_counts,
    read_data,
    read_dict,
    read_flag,
    read_list,
    read_position,
    read_text,
)
from wds_pipes.core.words import shown
from wds_pipes.errors import StateError


class Rest(NamedTuple):
    """The values of a source's position that seldom change."""

    since: int = 0  # how often the source had been drawn when the proportions last began
    passes: int = 0  # how often the source was exhausted
    ended: bool = False  # whether the source is left out from now on
    # how often the source had been drawn when the epoch was repartitioned: these samples are
    # counted elsewhere
    told: int = 0
    done: dict[str, int] = {}  # noqa: RUF012 - what became of the samples of its earlier passes; replaced, never changed


def recipe_of(source: Stage[Any]) -> list[Any]:
    """Return what a source must have in common with a saved one for its position to fit: the seed,
    the fingerprint of the shards, and a hash of the steps. If the id of the data is known, also
    this id and the number of shards.
    """
    steps, data = (
        blake2b("\0".join(source.graph(counted=True)).encode(), digest_size=4).hexdigest(),
        source.which_data(),
    )
    return [source.seed, data.fingerprint, steps, *([data.id, source.shards()[0]] if data.id else [])]


def check_source(name: str, source: Stage[Any], saved: list[Any], now: list[Any], problem: str | None) -> None:
    """Raise StateError if a saved source was another pipeline; ``problem``: how its shards
    differ.
    """
    facts = [f"its seed was {shown(saved[0])} and is {now[0]}"] if saved[0] != now[0] else []
    if saved[4:] and now[4:] and saved[4] != now[4]:
        facts.append(f"it had {saved[4]} shards and has {now[4]}")
    elif problem is not None:
        facts.append(problem)
    facts += [f"its steps were others than {' > '.join(source.graph(counted=True))}"] if saved[2] != now[2] else []
    if facts:
        raise StateError(
            f"source {name!r} of this mix is not the one of the state: {'; '.join(facts)}. "
            "Build it as it was, or give it another name to begin it at its "
            f"beginning (and pass without=[{name!r}]).{'' if problem is None else f' {MEND}'}"
        )


def position_of(name: str, source: Stage[Any], position: list[Any]) -> list[dict[str, Any]]:
    """Return the position of a source, with an entry for each of its steps."""
    return read_position(position, f"source {name!r} of mix", len(source.dump(None)))


class Place(NamedTuple):
    """What a state says of a source."""

    recipe: list[Any]
    weight: str
    position: list[Any] | None
    draws: int
    rest: Rest

    @classmethod
    def read(cls, name: str, entry: Any) -> Place:
        """Read what ``Mix.dump_mark`` wrote of the source ``name``."""
        what = f"source {shown(name)} of mix"
        values = read_dict(entry, what)
        if unknown := values.keys() - {"recipe", "weight", "position", "draws", *Rest._fields}:
            raise damaged(f"{what} cannot stand at {shown(min(unknown))}")
        recipe, position = read_list(values.get("recipe"), f"the recipe of {what}"), values.get("position")
        if len(recipe) not in (3, 5):  # earlier versions did not save the id of the data and the number of shards
            raise damaged(f"the recipe of {what} is {shown(recipe)}")
        if recipe[3:]:
            read_data(recipe[3])
            read_count(recipe[4], f"the number of shards of {what}")
        draws, since, passes, told = (
            read_count(values.get(field, 0), f"{field!r} of {what}") for field in ("draws", "since", "passes", "told")
        )
        if max(since, told) > draws:
            raise damaged(f"{what} was drawn {draws} times, and earlier {max(since, told)} times")
        ended, done = (
            read_flag(values.get("ended", False), f"'ended' of {what}"),
            read_counts(values.get("done", {}), f"'done' of {what}"),
        )
        if "position" in values:
            read_list(position, f"the position of {what}")
        return cls(
            recipe,
            read_text(values.get("weight"), f"the weight of {what}"),
            position,
            draws,
            Rest(since, passes, ended, told, done),
        )


def add_counts(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    """Return the sums of two sets of counts."""
    return {what: one.get(what, 0) + other.get(what, 0) for what in {**one, **other}}


def check_sources(sources: object) -> None:
    """Raise if these are not pipelines by name that mix() can take."""
    if not isinstance(sources, Mapping):
        raise TypeError(f"mix() takes its sources by name, as a dict, not {sources!r:.80}")
    if not sources:
        raise ValueError("mix() needs at least one source")
    for name, source in sources.items():
        if not isinstance(name, str):
            raise TypeError(f"the names of the sources of mix() must be str, not {name!r}")
        if not isinstance(source, Stage):
            raise TypeError(f"mix() cannot take {source!r:.80} as source {name!r}")
        if not source.root.divides_items and not source.root.branches:
            raise ValueError(
                f"mix() cannot take source {name!r}: torch's pipes distribute it over the "
                "workers; leave out sharding_filter() and the like"
            )
