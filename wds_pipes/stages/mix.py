"""Mix: mix several pipelines in exact proportions."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, cast

from wds_pipes.core.composite import Composite
from wds_pipes.core.counts import Network
from wds_pipes.core.lane import Context, Lane
from wds_pipes.core.moved import Data, Move
from wds_pipes.core.options import check_choice, check_seed
from wds_pipes.core.order import hash64, hash_text
from wds_pipes.core.running import END, Mark, begin, running_copy
from wds_pipes.core.stage import Stage
from wds_pipes.core.state import damaged, read_count, read_dict, read_text
from wds_pipes.core.words import shown
from wds_pipes.errors import StateError
from wds_pipes.stages.mix_position import (
    Place,
    Rest,
    add_counts,
    check_draws,
    check_source,
    check_sources,
    check_without,
    position_of,
    recipe_of,
)
from wds_pipes.stages.proportions import TURNS, turns, whole_weights

logger = logging.getLogger("wds_pipes")
# After this many passes times the number of lanes in which a source had no shard in a lane, it is
# left out there: with one shard, the chance of that is e**-20.
_PASSES = 20


# The own values of a mark: the fields of Mix.At, and the number of draws so far. That number is in
# a list that all marks of a run share, because a step after this one that reads ahead keeps an
# earlier mark, and must still know how many draws were made.
_Places = tuple[int, tuple[int, ...], tuple[Mark | None, ...], tuple[Rest, ...], list[int]]


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
    class At:
        last: int = -1  # the number of the source that was drawn last; -1: none
        draws: tuple[int, ...] = ()  # this and the next two have one entry for each source
        marks: tuple[Mark | None, ...] = ()  # None: nothing was drawn in this pass
        rest: tuple[Rest, ...] = ()

    ends_reading = divides = True
    order_options = ("exhausted",)

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
        self._seed = check_seed(seed)
        self.without = check_without(without, self.sources)
        # While running: the sources, how often each was drawn, its mark, and the number of draws
        # that all marks share.
        self._running: list[Stage[Any]] = []
        self._draws: list[int] = []
        self._empty: list[int] = []  # how many passes in a row the source had no shard in this lane
        self._marks: list[Mark | None] = []
        self._reached = [0]

    @property
    def context(self) -> Context:
        return next(iter(self.sources.values())).context

    @property
    def seed(self) -> int:
        return self._seed

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
        last, draws, marks, rest, reached = self._places(mark)
        running = running_copy(self)
        running.lane, running.at = lane, self.At(last, draws, marks, rest)
        running._draws, running._marks, running._reached = list(draws), list(marks), list(reached)
        running._empty = [0] * len(marks)
        running._running = [
            source.open(self._lane(lane, source, place.passes), before)
            for source, before, place in zip(self.sources.values(), marks, rest, strict=True)
        ]
        for number, source in enumerate(running._running):
            if running._marks[number] is None and source.counts_epochs:
                running._marks[number] = source.mark()
        begin(running, mark)
        return running

    def start(self, offset: int = 0, *, ahead: bool = False) -> None:
        for source, place in zip(self._running, self.at.rest, strict=True):
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
        return self._running

    def _places(self, mark: Mark | None) -> _Places:
        """Return the own values of a mark."""
        count = len(self.sources)
        return cast(_Places, mark[0]) if mark else (-1, (0,) * count, (None,) * count, (Rest(),) * count, [0])

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
        at, running, key = self.at, self._running, self.lane.key(TURNS)
        weights, hashes = list(self.weights.values()), [hash64(key, hash_text(name)) for name in self.sources]
        draws, marks, reached = self._draws, self._marks, self._reached
        total = sum(draws)
        while live := [number for number, place in enumerate(at.rest) if not place.ended]:
            drawn = [draws[number] - at.rest[number].since for number in live]
            for turn in turns([weights[number] for number in live], [hashes[number] for number in live], drawn):
                number = live[turn]
                item = next(running[number].items, END)
                while item is END and self._begin_again(number):
                    item = next(running[number].items, END)
                if item is END:
                    break
                self._empty[number] = 0
                draws[number] += 1
                total += 1
                reached[0] = max(reached[0], total)
                marks[number] = running[number].mark()
                at.last = number
                yield item
            if self.exhausted == "stop" or (self.exhausted == "repeat" and all(place.passes for place in at.rest)):
                break
        reached[0] = max(reached[0], total + 1)  # the end was reached

    def _begin_again(self, number: int) -> bool:
        """Start the exhausted source ``number`` again, or leave it out. Return whether it was
        started again.
        """
        at, source, running = self.at, list(self.sources.values())[number], self._running[number]
        place, empty = at.rest[number], self._marks[number] is None
        if empty and self.exhausted == "repeat" and self._has_no_shard(running):
            self._empty[number] += 1
            empty = self._empty[number] >= _PASSES * self.lane.of
        if empty:
            name, lane = list(self.sources)[number], self.lane
            lack, where = running.lack, f"in lane {lane.number} of {lane.of}"
            if lack.explains(source.counts(running.mark(), 0)):
                logger.warning("%s", lack.error(f"source {name!r} of mix() {where}"))
            else:
                logger.warning(
                    "source %r of mix() gives nothing %s: has it fewer shards or samples than lanes?", name, where
                )
        passes = place.passes + 1
        done = add_counts(place.done, source.counts(running.mark(), 0))
        self._bytes_before += running.bytes_so_far
        self._marks[number] = running.mark() if source.counts_epochs else None
        running.close()
        at.rest = tuple(
            place._replace(passes=passes, done=done) if other == number else rest for other, rest in enumerate(at.rest)
        )
        if self.exhausted == "stop" or (self.exhausted == "repeat" and all(rest.passes for rest in at.rest)):
            return False
        if self.exhausted == "drop" or empty:
            # Continue without it; the proportions of the others start anew here.
            at.rest = tuple(
                rest._replace(since=self._draws[other], ended=rest.ended or other == number)
                for other, rest in enumerate(at.rest)
            )
            return False
        self._running[number], self._marks[number] = source.open(self._lane(self.lane, source, passes)), None
        return True

    def _has_no_shard(self, running: Stage[Any]) -> bool:
        """Whether a source yielded nothing in a lane because the lane has none of its shards."""
        return self.lane.of > 1 and not running.bytes_so_far and not any(running.counts(running.mark(), 0).values())

    def mark(self) -> Mark:
        at = self.at
        return (at.last, tuple(self._draws), tuple(self._marks), at.rest, self._reached), None

    def where(self, mark: Mark | None, lane: Lane) -> str | None:
        """Return the URL of the shard of the source that was drawn last."""
        last, _, marks, rest, _ = self._places(mark)
        number = max(0, last)
        source = list(self.sources.values())[number]
        return source.where(marks[number], self._lane(lane, source, rest[number].passes))

    def counts(self, mark: Mark | None, delivered: int) -> dict[str, int]:
        _, draws, marks, rest, _ = self._places(mark)
        counts = super().counts(None, 0)
        for source, drawn, before, place in zip(self.sources.values(), draws, marks, rest, strict=True):
            own = add_counts(place.done, source.counts(before, 0))
            if not source.counts_delivered:
                own["delivered"] = drawn - place.told
            counts = add_counts(counts, own)
        return counts if self.counts_delivered else {**counts, "delivered": delivered}

    def dump_mark(self, mark: Mark | None) -> list[dict[str, Any]]:
        last, draws, marks, rest, reached = self._places(mark)
        sources: dict[str, dict[str, Any]] = {}
        for (name, source), drawn, before, place in zip(self.sources.items(), draws, marks, rest, strict=True):
            entry: dict[str, Any] = {"recipe": list(self._recipes[name]), "weight": str(self.weights[name])}
            values = {
                "draws": drawn,
                **place._asdict(),
                "done": {what: count for what, count in place.done.items() if count},
            }
            entry |= {what: value for what, value in values.items() if value}
            if before is not None:
                entry["position"] = source.dump(before)
            sources[name] = entry
        values = {"last": list(self.sources)[last] if last >= 0 else None, "ahead": reached[0] - sum(draws)}
        return [{"sources": sources, **{what: value for what, value in values.items() if value}}]

    def uncounted(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        [own] = entries
        sources = {}
        for name, entry in own["sources"].items():
            sources[name] = {**entry, "told": entry.get("draws", 0), "done": {}}
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
            saved = place.recipe
            problem = move.problem(
                Data(read_text(saved[1], f"the fingerprint of source {name!r} of mix"), *saved[3:4]),
                source.which_data(),
            )
            check_source(name, source, saved, now, problem)
            sources[name] = {**sources[name], "recipe": list(now)}
            if place.position is not None:
                sources[name]["position"] = source.relocate(position_of(name, source, place.position), move)
        return [{**own, "sources": sources}]

    def load_mark(self, entries: list[dict[str, Any]]) -> Mark:
        own = entries[0]
        saved = {
            name: Place.read(name, entry) for name, entry in read_dict(own.get("sources"), "the sources of mix").items()
        }
        last, ahead = read_text(own.get("last", ""), "'last' of mix"), read_count(own.get("ahead", 0), "'ahead' of mix")
        if unknown := own.keys() - {"sources", "last", "ahead"}:
            raise damaged(f"mix cannot stand at {shown(min(unknown))}")
        if gone := sorted(saved.keys() - self.sources.keys() - self.without):
            raise StateError(
                f"the state has {', '.join(map(repr, gone)):.500}, which is not in this mix. "
                f"If that is meant, pass mix(..., without={gone!r:.500})."
            )
        if last and last not in saved:
            raise damaged(f"mix drew last from {shown(last)}, which is none of its sources")
        draws: list[int] = []
        marks: list[Mark | None] = []
        places: list[Rest] = []
        for name, source in self.sources.items():
            place = saved.get(name)
            if place is None:
                draws, marks, places = [*draws, 0], [*marks, None], [*places, Rest()]
                continue
            position, now = place.position, self._recipes[name]
            check_source(
                name, source, place.recipe, now, "its shards are others" if place.recipe[1] != now[1] else None
            )
            draws.append(place.draws)
            marks.append(None if position is None else source.load(position_of(name, source, position)))
            places.append(place.rest)
        places = check_draws(saved, self.weights, draws, places, ahead)
        names = list(self.sources)
        number = names.index(last) if last in names else -1
        return (number, tuple(draws), tuple(marks), tuple(places), [sum(draws) + ahead]), None
