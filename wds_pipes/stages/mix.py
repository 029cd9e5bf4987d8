"""Mix: mix several pipelines in exact proportions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

from wds_pipes.core.composite import Composite
from wds_pipes.core.counts import Network, sum_counts
from wds_pipes.core.lane import Context, Lane
from wds_pipes.core.moved import MEND, Data, Move
from wds_pipes.core.options import check_choice, check_seed
from wds_pipes.core.order import hash64, hash_text
from wds_pipes.core.running import END, Mark, begin, running_copy
from wds_pipes.core.stage import Stage
from wds_pipes.core.state import (
    damaged,
    read_count,
    read_data,
    read_dict,
    read_flag,
    read_list,
    read_position,
    read_text,
)
from wds_pipes.core.words import shown
from wds_pipes.errors import StateError
from wds_pipes.stages.proportions import TURNS, in_proportion, turns, whole_weights

logger = logging.getLogger("wds_pipes")
# After this many passes times the number of lanes in which a source had no shard in a lane, it is
# left out there: with one shard, the chance of that is e**-20.
_PASSES = 20


class Drawn(NamedTuple):
    """Where a source of a mix stands."""

    draws: int = 0  # how often it was drawn
    mark: Mark | None = None  # its position; None: nothing was drawn in this pass
    since: int = 0  # how often it had been drawn when the proportions last began
    passes: int = 0  # how often it was exhausted
    ended: bool = False  # whether it is left out from now on
    # how often it had been drawn when the epoch was repartitioned: these samples are counted
    # elsewhere
    told: int = 0


class Mix(Composite[Any]):
    """Mix several pipelines in exact proportions:
    ``wp.mix({"a": pipe_a, "b": pipe_b}, weights={"a": 9, "b": 1})``.

    At every place of an epoch, the number of samples from each source differs from its share by
    less than one. The order is not random. If several sources could come next, a function of (seed,
    epoch, lane) decides which of them does. Each source yields what it would yield alone, by its
    own seed; its epoch is that of the mix. Each lane (worker, rank) keeps the proportions by
    itself, so each lane needs samples of every source: give each source at least as many shards as
    there are lanes, or pass ``exhausted="repeat"``: then lanes of a source with fewer shards read
    these in turn.

    Args:
        sources: the pipelines by name.
        weights: by name, or in the order of the sources: ints, fractions, or floats. A float means
            the decimal number that it is printed as. None: equal weights.
        exhausted: what to do when a source that comes next has no more samples. ``"stop"``: the
            epoch ends. ``"drop"``: the epoch continues with the other sources, whose proportions
            start anew at this place. ``"repeat"``: the source starts again in another order, and
            the epoch ends when each source was exhausted once; a source that yields no samples at
            all is left out.
        seed: an integer for the decisions of the mix, and for the steps after it.
        without: names of sources that a loaded state may contain, although they are no longer in
            the mix.

    Raises:
        TypeError, ValueError: when the stage is built: there are no sources, a weight is not above
            0, a name is unknown, or torch's pipes distribute a source over the workers.
        StateError: when a state is loaded: a source was another pipeline under the same name, a
            source of the state is neither in the mix nor in ``without``, or the proportions may not
            change (see below).

    Checkpoint: for each source, by name, how often it was drawn, and its position. A resume reads
    again what each source reads again. With other weights or new sources, the proportions start
    anew from there on, and a new source starts at its beginning; lanes that have ended read it
    from the next epoch on, and PipeLoader warns of that. Weights and sources may not change in the
    middle of an epoch while a step after the mix holds samples, as ``shuffle_buffer`` does: put
    such a step into the sources. The size is about 150 bytes for each source, plus its position.
    """

    @dataclass(slots=True)
    class At(Composite.At):
        last: int = -1  # the number of the source that was drawn last; -1: none
        sources: tuple[Drawn, ...] = ()
        # The number of draws so far, in a list that all marks of a run share: a step after this one
        # that reads ahead keeps an earlier mark, and must still know how many draws were made.
        reached: list[int] | None = None

    ends_reading = divides = True
    order_options = ("exhausted",)
    seed = 0

    def __init__(
        self,
        sources: Mapping[str, Stage[Any]],
        weights: Mapping[str, float | Fraction] | Sequence[float | Fraction] | None = None,
        *,
        exhausted: str = "stop",
        seed: int = 0,
        without: Iterable[str] = (),
    ) -> None:
        super().__init__()
        check_sources(sources)
        self.sources = dict(sources)
        self.weights = whole_weights(list(sources), weights)
        self.exhausted = check_choice("exhausted", exhausted, "stop", "drop", "repeat")
        self.seed = check_seed(seed)
        self.without = check_without(without, self.sources)
        # While running: the sources, where each stands, and how many passes in a row it had no
        # shard in this lane.
        self._running: list[Stage[Any]] = []
        self._drawn: list[Drawn] = []
        self._empty: list[int] = []
        self._done: set[int] = set()  # the sources whose chains have ended

    @property
    def context(self) -> Context:
        return next(iter(self.sources.values())).context

    @property
    def storage_options(self) -> dict[str, Any] | None:
        """The storage options of the sources, if all sources that have any have the same."""
        given = [source.storage_options for source in self.sources.values() if source.storage_options is not None]
        if any(options != given[0] for options in given):
            raise ValueError(
                "the sources of mix() have different storage_options: give each an open_shards() "
                "of its own, or pass storage_options= to this one"
            )
        return given[0] if given else None

    @property
    def branches(self) -> Mapping[str, Stage[Any]]:
        return self.sources

    @property
    def never_ends(self) -> bool:
        return (all if self.exhausted == "stop" else any)(source.never_ends for source in self.sources.values())

    def changes_count(self) -> str | None:
        return "how many samples a mix() gives is not known"

    @property
    def counts_delivered(self) -> bool:
        """Whether any source counts delivered samples itself."""
        return any(source.counts_delivered for source in self.sources.values())

    @property
    def counts_epochs(self) -> bool:
        return any(source.counts_epochs for source in self.sources.values())

    @property
    def divides_items(self) -> bool:
        """False: each source divides its own items over the lanes."""
        return False

    @cached_property
    def _recipes(self) -> dict[str, list[Any]]:
        return {name: recipe_of(source) for name, source in self.sources.items()}

    def number_of(self, url: str) -> str | None:
        """Return the name of the first source that has the shard in its list, and the number of the
        shard there, as one str.
        """
        numbers = ((name, source.number_of(url)) for name, source in self.sources.items())
        return next((f"{name}\0{number}" for name, number in numbers if number is not None), None)

    def check_resumable(self) -> None:
        for source in self.sources.values():
            source.check_resumable()

    def open(self, lane: Lane, mark: Mark | None = None) -> Mix:
        running = running_copy(self)
        running.lane, running.at = lane, self._at(mark and mark[0])
        at = running.at
        at.reached, drawn = at.reached.copy(), list(at.sources)
        running._running = [
            source.open(self._lane(lane, source, place.passes), place.mark)
            for source, place in zip(self.sources.values(), drawn, strict=True)
        ]
        for number, source in enumerate(running._running):
            if drawn[number].mark is None and source.counts_epochs:
                drawn[number] = drawn[number]._replace(mark=source.mark())
        running._drawn, running._empty, running._done = drawn, [0] * len(drawn), set()
        begin(running, mark)
        return running

    def start(self, offset: int = 0, *, ahead: bool = False) -> None:
        for source, place in zip(self._running, self._drawn, strict=True):
            if not place.ended:
                source.start(ahead=ahead)

    @property
    def network(self) -> Network:
        """The use of the network by all sources in this process."""
        used = [source.network for source in self.sources.values()]
        return Network(*(sum(values) for values in zip(*used, strict=True)))

    def stall_clock(self) -> Callable[[], float]:
        clocks = [source.stall_clock() for source in self.sources.values()]
        return lambda: sum(clock() for clock in clocks)

    @property
    def inner(self) -> list[Stage[Any]]:
        return [chain for number, chain in enumerate(self._running) if number not in self._done]

    def _at(self, own: tuple[Any, ...] | None) -> Any:
        at = super()._at(own)
        at.sources, at.reached = at.sources or (Drawn(),) * len(self.sources), at.reached or [0]
        return at

    @staticmethod
    def _lane(lane: Lane, source: Stage[Any], passes: int) -> Lane:
        """Return the lane of a source: with the seed of the source, and for each further pass with
        another epoch and the next lane's shards, since a lane may have none of its own.
        """
        if not passes:
            return replace(lane, seed=source.seed)
        epoch, number = hash64(lane.epoch, passes) >> 1, (lane.number + passes) % lane.of
        return replace(lane, seed=source.seed, epoch=epoch, number=number)

    def run(self) -> Iterator[Any]:
        self.start()
        at, running, places, key = self.at, self._running, self._drawn, self.lane.key(TURNS)
        weights, hashes = list(self.weights.values()), [hash64(key, hash_text(name)) for name in self.sources]
        reached, total = at.reached, sum(place.draws for place in places)
        while live := [number for number, place in enumerate(places) if not place.ended]:
            drawn = [places[number].draws - places[number].since for number in live]
            for turn in turns([weights[number] for number in live], [hashes[number] for number in live], drawn):
                number = live[turn]
                item = next(running[number].items, END)
                while item is END and self._begin_again(number):
                    item = next(running[number].items, END)
                if item is END:
                    break
                self._empty[number] = 0
                total += 1
                reached[0] = max(reached[0], total)
                place = places[number]
                places[number] = place._replace(draws=place.draws + 1, mark=running[number].mark())
                at.last = number
                yield item
            if self._is_done():
                break
        reached[0] = max(reached[0], total + 1)  # the end was reached

    def _is_done(self) -> bool:
        """Whether the epoch ends when a source is exhausted."""
        return self.exhausted == "stop" or (self.exhausted == "repeat" and all(place.passes for place in self._drawn))

    def _begin_again(self, number: int) -> bool:
        """Start the exhausted source ``number`` again, or leave it out. Return whether it was
        started again.
        """
        source, running, places = list(self.sources.values())[number], self._running[number], self._drawn
        place = places[number]
        counts = running.counts(running.mark(), 0)
        empty = place.mark is None
        # a lane may have none of the shards of a source
        if (
            empty
            and self.exhausted == "repeat"
            and self.lane.of > 1
            and not (running.bytes_so_far or any(counts.values()))
        ):
            self._empty[number] += 1
            empty = self._empty[number] >= _PASSES * self.lane.of
        if empty:
            name, lack, where = (
                list(self.sources)[number],
                running.lack,
                f"in lane {self.lane.number} of {self.lane.of}",
            )
            if lack.explains(counts):
                logger.warning("%s", lack.error(f"source {name!r} of mix() {where}"))
            else:
                logger.warning(
                    "source %r of mix() gives nothing %s: has it fewer shards or samples than lanes?", name, where
                )
        mark = running.mark() if source.counts_epochs else None
        place = places[number] = place._replace(passes=place.passes + 1, mark=mark)
        self.retire(running)
        self._done.add(number)
        if self._is_done():
            return False
        if self.exhausted == "drop" or empty:
            # Continue without it; the proportions of the others start anew here.
            places[number] = place._replace(ended=True)
            places[:] = [place._replace(since=place.draws) for place in places]
            return False
        self._running[number] = source.open(self._lane(self.lane, source, place.passes))
        places[number] = place._replace(mark=None)
        self._done.remove(number)
        return True

    def mark(self) -> Mark:
        self.at.sources = tuple(self._drawn)
        return self._own(self.at), None

    def where(self, mark: Mark | None, lane: Lane) -> str | None:
        """Return the URL of the shard of the source that was drawn last."""
        at = self._at(mark and mark[0])
        number: int = max(0, at.last)
        source, place = list(self.sources.values())[number], at.sources[number]
        return source.where(place.mark, self._lane(lane, source, place.passes))

    def counts(self, mark: Mark | None, delivered: int) -> dict[str, int]:
        own, inner = mark and mark[0], {"delivered": 0}
        for source, place in zip(self.sources.values(), self._at(own).sources, strict=True):
            inner = sum_counts((inner, source.counts(place.mark, 0)))
            if not source.counts_delivered:
                inner["delivered"] += place.draws - place.told
        return self.counts_with(own, inner, delivered)

    def dump_mark(self, mark: Mark | None) -> list[dict[str, Any]]:
        [own] = super().dump_mark(mark)
        at, sources = self._at(mark and mark[0]), {}
        for (name, source), place in zip(self.sources.items(), at.sources, strict=True):
            values = {what: value for what, value in place._asdict().items() if value and what != "mark"}
            position = {} if place.mark is None else {"position": source.dump(place.mark)}
            sources[name] = {
                "recipe": list(self._recipes[name]),
                "weight": str(self.weights[name]),
                **values,
                **position,
            }
        own = {name: value for name, value in own.items() if name not in ("last", "sources", "reached")}
        ahead = at.reached[0] - sum(place.draws for place in at.sources)
        last = {} if at.last < 0 else {"last": list(self.sources)[at.last]}
        return [{"sources": sources, **own, **last, **({"ahead": ahead} if ahead else {})}]

    def uncounted(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        [own] = super().uncounted(entries)
        sources = {}
        for name, entry in own["sources"].items():
            sources[name] = {**entry, "told": entry.get("draws", 0)}
            if "position" in entry and name in self.sources:
                sources[name]["position"] = self.sources[name].uncounted(entry["position"])
        return [{**own, "sources": sources}]

    def relocate(self, entries: list[dict[str, Any]], move: Move) -> list[dict[str, Any]]:
        [own] = entries
        sources = dict(read_dict(own.get("sources"), "the sources of mix"))
        for name, source in self.sources.items():
            if name not in sources:
                continue
            place, now = Place.read(name, sources[name]), self._recipes[name]
            then = Data(read_text(place.recipe[1], f"the fingerprint of source {name!r} of mix"), *place.recipe[3:4])
            check_source(name, source, place.recipe, now, move.problem(then, source.which_data()))
            sources[name] = {**sources[name], "recipe": list(now)}
            if place.position is not None:
                sources[name]["position"] = source.relocate(position_of(name, source, place.position), move)
        return [{**own, "sources": sources}]

    def load_mark(self, entries: list[dict[str, Any]]) -> Mark:
        own = dict(entries[0])
        entries_of = read_dict(own.pop("sources", None), "the sources of mix")
        saved = {name: Place.read(name, entry) for name, entry in entries_of.items()}
        last, ahead = read_text(own.pop("last", ""), "'last' of mix"), read_count(own.pop("ahead", 0), "'ahead' of mix")
        at = self._at(super().load_mark([own])[0])
        if gone := sorted(saved.keys() - self.sources.keys() - self.without):
            raise StateError(
                f"the state has {', '.join(map(repr, gone)):.500}, which is not in this mix. "
                f"If that is meant, pass mix(..., without={gone!r:.500})."
            )
        if last and last not in saved:
            raise damaged(f"mix drew last from {shown(last)}, which is none of its sources")
        places = []
        for name, source in self.sources.items():
            place, now = saved.get(name), self._recipes[name]
            if place is None:
                places.append(Drawn())
                continue
            problem = "its shards are others" if place.recipe[1] != now[1] else None
            check_source(name, source, place.recipe, now, problem)
            position = place.position and position_of(name, source, place.position)
            places.append(place.drawn._replace(mark=None if position is None else source.load(position)))
        at.sources = tuple(check_draws(saved, self.weights, places, ahead))
        names = list(self.sources)
        at.last = names.index(last) if last in names else -1
        at.reached = [sum(place.draws for place in places) + ahead]
        return self._own(at), None


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
    drawn: Drawn

    @classmethod
    def read(cls, name: str, entry: Any) -> Place:
        """Read what ``Mix.dump_mark`` wrote of the source ``name``."""
        what = f"source {shown(name)} of mix"
        values = read_dict(entry, what)
        if unknown := values.keys() - {"recipe", "weight", "position", "draws", "since", "passes", "told", "ended"}:
            raise damaged(f"{what} cannot stand at {shown(min(unknown))}")
        recipe = read_list(values.get("recipe"), f"the recipe of {what}")
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
        ended = read_flag(values.get("ended", False), f"'ended' of {what}")
        return cls(
            recipe,
            read_text(values.get("weight"), f"the weight of {what}"),
            read_list(values["position"], f"the position of {what}") if "position" in values else None,
            Drawn(draws, None, since, passes, ended, told),
        )


def check_draws(saved: Mapping[str, Place], weights: Mapping[str, int], places: list[Drawn], ahead: int) -> list[Drawn]:
    """Return ``places``, where the sources stand in a state. If the mix has other weights or
    sources than the state, the proportions start anew there.

    Raises:
        StateError: a mix cannot have drawn so often from its sources; or the proportions may not
            change, since a step after the mix had taken ``ahead`` samples.
    """
    if {name: place.weight for name, place in saved.items()} == {name: str(weight) for name, weight in weights.items()}:
        live = [
            (weight, place.draws - place.since)
            for weight, place in zip(weights.values(), places, strict=True)
            if not place.ended
        ]
        if not in_proportion(live):
            raise damaged(
                f"mix cannot have drawn {shown([place.draws for place in places])} times from its sources, which is "
                "not in proportion to their weights"
            )
        return places
    if ahead:
        raise StateError(
            "this mix has other weights or sources than the state, and a step after "
            "it, such as shuffle_buffer, still held samples that were drawn by "
            "the old ones. Change them at the beginning of an epoch, or put that step into the sources."
        )
    return [place._replace(since=place.draws) for place in places]


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
