"""The position of a mix, as a state has it, and the checks of its sources."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from wds_pipes.stages.proportions import in_proportion


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
    return [source.seed, data.fingerprint, steps, *([data.id, data.shards] if data.id else [])]


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
        if len(recipe) not in (3, 5):  # 3: there is no id of the data
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


def check_draws(
    saved: Mapping[str, Place], weights: Mapping[str, int], draws: list[int], places: list[Rest], ahead: int
) -> list[Rest]:
    """Return ``places``, the places of the sources in a state. If the mix has other weights or
    sources than the state, the proportions start anew there.

    Raises:
        StateError: a mix cannot have drawn so often from its sources; or the proportions may not
            change, since a step after the mix had taken ``ahead`` samples.
    """
    if {name: place.weight for name, place in saved.items()} == {name: str(weight) for name, weight in weights.items()}:
        drawn = [drawn - place.since for drawn, place in zip(draws, places, strict=True)]
        live = [number for number, place in enumerate(places) if not place.ended]
        shares = list(weights.values())
        if not in_proportion([shares[number] for number in live], [drawn[number] for number in live]):
            raise damaged(
                f"mix cannot have drawn {shown(draws)} times from its sources, which is not in "
                "proportion to their weights"
            )
    else:
        if ahead:
            raise StateError(
                "this mix has other weights or sources than the state, and a step after "
                "it, such as shuffle_buffer, still held samples that were drawn by "
                "the old ones. Change them at the beginning of an epoch, or put that step into the sources."
            )
        places = [place._replace(since=drawn) for place, drawn in zip(places, draws, strict=True)]
    return places


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


def check_without(without: Iterable[str], sources: Mapping[str, Stage[Any]]) -> frozenset[str]:
    """Return the names of sources that mix() is without; raise if they are no such names."""
    if isinstance(without, str):
        raise TypeError(f"without must be a list of names, not {without!r}: write without=[{without!r}]")
    names = frozenset(without)
    if both := names & sources.keys():
        raise ValueError(f"without names {sorted(both)}, which is in the mix")
    return names
