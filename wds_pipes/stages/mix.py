"""Mix: mix several pipelines in exact proportions."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

from wds_pipes.core.chain import Chain, Composite
from wds_pipes.core.lane import Lane
from wds_pipes.core.occurrences import occurring
from wds_pipes.core.options import check_choice, check_count
from wds_pipes.core.order import hash64, hash_text
from wds_pipes.core.stage import END, Branching, Mark, Source, Stage
from wds_pipes.core.state import damaged, is_count
from wds_pipes.core.tolerant import common_on_error
from wds_pipes.core.words import shown
from wds_pipes.errors import StateError, mended
from wds_pipes.stages.fields import check_sample, field_of
from wds_pipes.stages.proportions import (
    SCHEDULE,
    TURNS,
    UNITS,
    how_far_behind,
    in_proportion,
    in_units,
    scheduled_weights,
    turns,
    whole_weights,
)
from wds_pipes.stages.windowed import error_of

logger = logging.getLogger("wds_pipes")
# After this many passes times the number of lanes in which a source had no shard in a lane, it is
# left out there: with one shard, the chance of that is e**-20.
_PASSES = 20
_EVERY = 100  # samples of a lane between two calls of a schedule


class Drawn(NamedTuple):
    """Where a source of a mix stands.

    Attributes:
        name: its name.
        weight: its weight.
        draws: how often it was drawn.
        since: how often it had been drawn when the proportions last began.
        amount: with ``by=``, how much was drawn since then.
        passes: how often it was exhausted.
        ended: whether it is left out from now on.
        given: how many of the draws are counted here.
        mark: its position; None: nothing was drawn in this pass.
    """

    name: str = ""
    weight: str = ""
    draws: int = 0
    since: int = 0
    amount: int = 0
    passes: int = 0
    ended: bool = False
    given: int = 0
    mark: Mark | None = None

    def afresh(self, **changes: Any) -> Drawn:
        """Return this place where the proportions begin."""
        return self._replace(since=self.draws, amount=0, **changes)


class Mix(Composite[Any], Branching, Source[Any]):
    """Mix several pipelines in exact proportions:
    ``wp.mix({"a": pipe_a, "b": pipe_b}, weights={"a": 9, "b": 1})``.

    At every place of an epoch, the number of samples from each source differs from its share by
    less than one; with ``by="tokens"``, the number of tokens by about a sample. The order is not
    random. If several sources could come next, a function of (seed, epoch, lane) decides which of
    them does. Each source yields what it would yield alone, by its
    own seed, if one was passed to it, and else by a seed that follows from its name: two sources
    without a seed have different orders. Its epoch is that of the mix. Each lane (worker, rank)
    keeps the proportions by itself, so each lane needs samples of every source: give each source at
    least as many shards as there are lanes, or pass ``exhausted="repeat"``: then lanes of a source
    with fewer shards read these in turn.

    Args:
        sources: the pipelines by name.
        weights: by name, or in the order of the sources: ints, fractions, or floats. A float means
            the decimal number that it is printed as. None: equal weights.
        by: in which quantity the proportions hold; None: in samples. The name of a field, whose
            ``len()`` counts, such as ``"tokens"``, or a function that returns an int, at least 0,
            for an item. At every place of an epoch, no source is ahead of its share by more than
            its own largest sample, nor behind by more than the largest samples of the other sources
            together. A sample of length 0 counts as 1. Goes with ``weights``, not ``schedule``.
        schedule: instead of ``weights``, a function that returns the weights by name, at least 0,
            after a number of samples, as in ``lambda n: {"web": 1, "code": min(n / 1e6, 1)}``. The
            number is how many samples the mix has yielded in this lane and epoch, times the number
            of lanes: about those of all lanes together. In each lane the function is called every
            100 samples, with the numbers 0, 100 * lanes, 200 * lanes and so on. It must return the
            same for the same number, also after a resume; the state does not know it. A source
            with weight 0 is not drawn. How often each source was drawn differs from the sum of its
            shares by about one.
        exhausted: what to do when a source that comes next has no more samples. ``"stop"``: the
            epoch ends. ``"drop"``: the epoch continues with the other sources, whose proportions
            start anew at this place. ``"repeat"``: the source starts again in another order, and
            the epoch ends when each source was exhausted once; a source that yields no samples at
            all is left out.
        seed: an integer for the decisions of the mix, and for the steps after it; None: 0. From it
            and its name, each source derives its own seed, unless one was passed to the source.
        without: names of sources that a loaded state may contain, although they are no longer in
            the mix.
        changed: declare that the sources or weights are others than those of the state that is
            loaded. It does the same as ``load_state_dict(state, mix="changed")``: use it if another
            library loads the state.

    Raises:
        TypeError, ValueError: when the stage is built: there are no sources, a weight is not above
            0, a name is unknown, or torch's pipes distribute a source over the workers. During
            iteration: ``schedule`` returned no weights, or none for the sources that are left, or
            ``by`` returned no int.
        SampleError: during iteration: an item has no field ``by``, or the field has no length.
        StateError: when a state is loaded: a source was another pipeline under the same name, a
            source of the state is neither in the mix nor in ``without``, or the weights or sources
            are others and it was not declared that they may be, or may not be (see below).

    Checkpoint: for each source, by name, how often it was drawn, and its position. A resume reads
    again what each source reads again. Other weights or new sources need ``changed`` or
    ``load_state_dict(state, mix="changed")``. The proportions then start anew from there on, and a
    new source starts at its beginning; lanes that have ended read it from the next epoch on, and
    PipeLoader warns of that. Weights and sources may not change in the
    middle of an epoch while a step after the mix holds samples, as ``shuffle_buffer`` does: put
    such a step into the sources. The size is about 150 bytes for each source, plus its position.
    """

    @dataclass(slots=True)
    class At(Composite.At):
        last: str = ""  # the name of the source that was drawn last
        # With a schedule: how many samples were yielded, and of each source by how many draws it is
        # behind its shares, times UNITS; None: by none.
        yielded: int = 0
        behind: list[int] | None = None

    divides = True
    divides_items = False  # each source divides its own items over the lanes
    order_options = ("exhausted", "by")
    part_kind = Drawn
    part_tallies = ("given",)
    parts: list[Drawn]

    def __init__(
        self,
        sources: Mapping[str, Stage[Any]],
        weights: Mapping[str, float | Fraction] | Sequence[float | Fraction] | None = None,
        *,
        by: str | Callable[[Any], int] | None = None,
        schedule: Callable[[int], Mapping[str, float]] | None = None,
        exhausted: str = "stop",
        seed: int | None = None,
        without: Iterable[str] = (),
        changed: bool = False,
    ) -> None:
        super().__init__(seed)
        check_pipelines(sources, "mix")
        self.sources = dict(sources)
        self.weights, self.schedule = whole_weights(list(sources), weights), schedule
        if schedule is not None:
            if weights is not None:
                raise ValueError("mix() takes weights= or schedule=, one of them")
            if by is not None:
                raise ValueError("by= of mix() goes with weights=, not with schedule=")
            self._scheduled_at(0)
        if not (by is None or callable(by) or (isinstance(by, str) and by.strip())):
            raise TypeError(f"by must be the name of a field or a function, not {by!r:.80}")
        self.by = "a function" if callable(by) else by  # as the graph of a state has it
        self._measure: Callable[[Any], int] | None = partial(length_in, by) if isinstance(by, str) else by
        self.exhausted = check_choice("exhausted", exhausted, "stop", "drop", "repeat")
        warn_of_same_data(self.sources)
        self.without, self.changed = check_without(without, self.sources), bool(changed)
        roots = [Chain(source).root for source in self.sources.values()]
        self.context, self.on_error = roots[0].context, common_on_error(roots)
        self.counts_epochs = any(root.counts_epochs for root in roots)
        self._storage_options = [root.storage_options for root in roots if root.storage_options is not None]
        # While running: the sources whose chains have not ended, by number, and how many passes in
        # a row each had no shard in this lane.
        self._running: dict[int, Stage[Any]] = {}
        self._empty: list[int] = []
        self._behind: list[int] = []  # after the draw that comes now

    @property
    def storage_options(self) -> dict[str, Any] | None:  # type: ignore[override]
        """The storage options of the sources, if all sources that have any have the same."""
        given = self._storage_options
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
    def _ends(self) -> bool:  # type: ignore[override]
        ends = [not Chain(source).never_ends for source in self.sources.values()]
        return any(ends) if self.exhausted == "stop" else all(ends)

    def changes_count(self) -> str | None:
        return "how many samples a mix() gives is not known"

    def weight_of(self, branch: str) -> str:
        return str(self.weights[branch]) if self.schedule is None else SCHEDULE

    def seed_of(self, branch: str, seed: int) -> int:
        root = Chain(self.sources[branch]).root
        return root.seed if root.seed_given else hash64(seed, hash_text(branch)) >> 1

    def number_of(self, url: str) -> str | None:
        """Return the name of the first source that has the shard in its list, and the number of the
        shard there, as one str.
        """
        numbers = ((name, Chain(source).root.number_of(url)) for name, source in self.sources.items())
        return next((f"{name}\0{number}" for name, number in numbers if number is not None), None)

    def check_resumable(self) -> None:
        for source in self.sources.values():
            Chain(source).root.check_resumable()

    def chain_of(self, part: Drawn) -> Chain | None:
        source = self.sources.get(part.name)
        return None if source is None else Chain(source)

    def prepare(self) -> None:
        self.parts = self.parts or self._beginnings()
        self._running, self._empty = {}, [0] * len(self.parts)
        for number, (source, part) in enumerate(zip(self.sources.values(), self.parts, strict=True)):
            root = Chain(source).root
            self._running[number] = source.open(self._lane(self.lane, part.name, part.passes), part.mark)
            if part.mark is None and root.counts_epochs:
                self.parts[number] = part._replace(mark=self._running[number].mark())

    def _beginnings(self) -> list[Drawn]:
        return [Drawn(name, self.weight_of(name)) for name in self.sources]

    def start(self, offset: int = 0, *, ahead: bool = False) -> None:
        for number, source in self._running.items():
            if not self.parts[number].ended:
                source.start(ahead=ahead)

    @property
    def inner(self) -> list[Stage[Any]]:
        return list(self._running.values())

    def _lane(self, lane: Lane, name: str, passes: int) -> Lane:
        """Return the lane of a source with the seed of the source, and for each further pass with
        another epoch and the next lane's shards, since a lane may have none of its own.
        """
        seed = self.seed_of(name, lane.seed)
        if not passes:
            return replace(lane, seed=seed)
        epoch, number = hash64(lane.epoch, passes) >> 1, (lane.number + passes) % lane.of
        return replace(lane, seed=seed, epoch=epoch, number=number)

    def run(self) -> Iterator[Any]:
        self.start()
        at, running, places, key = self.at, self._running, self.parts, self.lane.key(TURNS)
        occurrences = self.lane.occurrences
        weights, hashes = list(self.weights.values()), [hash64(key, hash_text(name)) for name in self.sources]
        while live := [number for number, place in enumerate(places) if not place.ended]:
            of_live = [hashes[number] for number in live]
            if self._measure is not None:
                draws = self._by_amount(live, of_live)
            elif self.schedule is None:
                drawn = [places[number].draws - places[number].since for number in live]
                shares = [weights[number] for number in live]
                draws = turns(shares, of_live, how_far_behind(shares, drawn))
            else:
                draws = self._by_schedule(live, of_live)
            for turn in draws:
                number = live[turn]
                item = next(running[number].items, END)
                while item is END and self._begin_again(number):
                    item = next(running[number].items, END)
                if item is END:
                    break
                self._empty[number] = 0
                place = places[number]
                mark = running[number].mark()
                amount = 0 if self._measure is None else place.amount + self._amount_of(item)
                places[number] = place._replace(draws=place.draws + 1, given=place.given + 1, amount=amount, mark=mark)
                at.last = place.name
                if self.schedule is not None:
                    at.yielded, at.behind = at.yielded + 1, self._behind
                yield occurring(item, f"{place.name!r} {place.passes}") if occurrences else item
            if self._is_done():
                break

    def _by_amount(self, live: list[int], hashes: list[int]) -> Iterator[int]:
        """Yield which of the sources ``live`` to draw from: the one that is furthest behind."""
        weights = list(self.weights.values())
        shares, order = [weights[number] for number in live], sorted(range(len(live)), key=hashes.__getitem__)
        while True:
            behind = how_far_behind(shares, [self.parts[number].amount for number in live])
            yield max(order, key=behind.__getitem__)

    def _amount_of(self, item: Any) -> int:
        """Return how much an item counts; at least 1, or a source of empty samples would be drawn
        for ever.
        """
        assert self._measure is not None
        if type(amount := self._measure(item)) is not int or amount < 0:
            amount = check_count("the number that by= of mix() returned", amount, least=0)
        return max(amount, 1)

    def _scheduled_at(self, samples: int) -> list[float]:
        """Return the weights after a number of samples, in the order of the sources."""
        return scheduled_weights(self.schedule, samples, list(self.sources))

    def _by_schedule(self, live: list[int], hashes: list[int]) -> Iterator[int]:
        """Yield which of the sources ``live`` to draw from, one after the other, without end."""
        at = self.at
        while True:
            known = at.yielded // _EVERY
            samples = known * _EVERY * self.lane.of
            weights = self._scheduled_at(samples)
            if not any(weights[number] for number in live):
                left = ", ".join(repr(self.parts[number].name) for number in live)
                raise ValueError(f"schedule({samples}) of mix() gives no weight to the sources that are left: {left}")
            shares, behind = in_units([weights[number] for number in live]), at.behind or [0] * len(weights)
            for turn in turns(shares, hashes, [behind[number] for number in live]):
                self._behind = [*(at.behind or behind)]
                for number, share in zip(live, shares, strict=True):
                    self._behind[number] += share
                self._behind[live[turn]] -= sum(shares)
                yield turn
                if at.yielded // _EVERY != known:
                    break

    def _is_done(self) -> bool:
        """Whether the epoch ends when a source is exhausted."""
        return self.exhausted == "stop" or (self.exhausted == "repeat" and all(place.passes for place in self.parts))

    def _begin_again(self, number: int) -> bool:
        """Start the exhausted source ``number`` again, or leave it out. Return whether it was
        started again.
        """
        source, running, places = list(self.sources.values())[number], self._running[number], self.parts
        place, chain = places[number], Chain(running)
        counts = chain.counts(running.mark(), 0)
        empty = place.mark is None
        # a lane may have none of the shards of a source
        if (
            empty
            and self.exhausted == "repeat"
            and self.lane.of > 1
            and not (chain.bytes_so_far or any(counts.values()))
        ):
            self._empty[number] += 1
            empty = self._empty[number] >= _PASSES * self.lane.of
        if empty:
            name, lack, where = place.name, chain.lack, f"in lane {self.lane.number} of {self.lane.of}"
            if lack.explains(counts):
                logger.warning("%s", lack.error(f"source {name!r} of mix() {where}"))
            else:
                logger.warning(
                    "source %r of mix() gives nothing %s: has it fewer shards or samples than lanes?", name, where
                )
        mark = running.mark() if chain.root.counts_epochs else None
        place = places[number] = place._replace(passes=place.passes + 1, mark=mark)
        self.retire(running)
        del self._running[number]
        if self._is_done():
            return False
        if self.exhausted == "drop" or empty:
            # Continue without it; the proportions of the others start anew here.
            places[number] = place._replace(ended=True)
            places[:] = [place.afresh() for place in places]
            return False
        self._running[number] = source.open(self._lane(self.lane, place.name, place.passes))
        places[number] = place._replace(mark=None)
        return True

    def where_in(self, own: tuple[Any, ...], parts: tuple[Drawn, ...], lane: Lane) -> str | None:
        """Return the URL of the shard of the source that was drawn last."""
        last = self._at(own).last
        place = next((part for part in parts if part.name == last), (*parts, *self._beginnings())[0])
        chain = self.chain_of(place)
        return None if chain is None else chain.where(place.mark, self._lane(lane, place.name, place.passes))

    def counts_of(self, part: Drawn) -> dict[str, int]:
        counts, chain = super().counts_of(part), self.chain_of(part)
        return counts if chain is None or chain.counts_delivered else {**counts, "delivered": part.given}

    def fit_parts(self, at: Any, parts: list[Drawn], *, fixed: bool) -> list[Drawn]:
        """Return where the sources stand. If the mix has other weights or sources than the state,
        the proportions start anew there.
        """
        saved = {part.name: part for part in parts}
        if gone := saved.keys() - self.sources.keys() - self.without:
            raise damaged(f"a mix cannot have drawn from {shown(min(gone))}")
        if at.last and at.last not in saved:
            raise damaged(f"mix drew last from {shown(at.last)}, which is none of its sources")
        for part in parts:
            if max(part.since, part.given) > part.draws:
                raise damaged(
                    f"source {shown(part.name)} of mix was drawn {part.draws} times, and earlier "
                    f"{max(part.since, part.given)} times"
                )
        behind = [0] * len(parts) if at.behind is None else at.behind
        most = UNITS * len(parts)
        if (
            not isinstance(behind, list)
            or len(behind) != len(parts)
            or not all(is_count(value, least=-most, most=most) for value in behind)
            or sum(behind)
        ):
            raise damaged(f"mix cannot be behind by {shown(behind)}")
        if not parts:
            return []
        at.last = at.last if at.last in self.sources else ""
        places = [saved.get(beginning.name, beginning) for beginning in self._beginnings()]
        weights = {name: self.weight_of(name) for name in self.sources}
        if {part.name: part.weight for part in parts} == weights:
            if self.schedule is not None:
                of = {part.name: value for part, value in zip(parts, behind, strict=True)}
                at.behind = [of[name] for name in self.sources]
                return places
            live = [
                (weight, place.draws - place.since)
                for weight, place in zip(self.weights.values(), places, strict=True)
                if not place.ended
            ]
            if self._measure is None and not in_proportion(live):
                raise damaged(
                    f"mix cannot have drawn {shown([place.draws for place in places])} times from its sources, which "
                    "is not in proportion to their weights"
                )
            return places
        if fixed:
            raise StateError(
                "this mix has other weights or sources than the state, and a step after "
                "it, such as shuffle_buffer, still held samples that were drawn by "
                "the old ones. Change them at the beginning of an epoch, or put that step into the sources."
            )
        yielded = at.yielded or sum(part.draws for part in parts)
        at.yielded, at.behind = (0 if self.schedule is None else yielded), None
        return [place.afresh(weight=weights[place.name]) for place in places]


def length_in(field: str, item: Any) -> int:
    """Return the length of a field of a sample; SampleError if it has none."""
    check_sample(item, "mix", "with by= as the name of a field")
    try:
        return len(item[field_of(item, [field], None)])
    except TypeError as error:
        why = f"has {type(item[field]).__name__} in field {field!r}, which has no length"
        raise error_of(item, why, "Decode it in the source, or pass by= a function.") from error


def check_pipelines(sources: object, step: str) -> None:
    """Raise if these are not pipelines by name; ``step`` takes them."""
    if not isinstance(sources, Mapping):
        raise TypeError(
            f"{step}() takes its sources by name, as {{'a': pipe, 'b': pipe}}, not {type(sources).__name__}"
        )
    if not sources:
        raise ValueError(f"{step}() needs at least one source")
    for name, source in sources.items():
        if not isinstance(name, str):
            raise TypeError(f"the names of the sources of {step}() must be str, not {name!r}")
        if not isinstance(source, Stage):
            raise TypeError(f"{step}() cannot take {source!r:.80} as source {name!r}")
        root = Chain(source).root
        if not root.divides_items and not root.branches:
            raise ValueError(
                f"{step}() cannot take source {name!r}: torch's pipes distribute it over the "
                "workers; leave out sharding_filter() and the like"
            )


def warn_of_same_data(sources: Mapping[str, Stage[Any]]) -> None:
    """Warn of two sources that yield all samples of the same list of shards."""
    names: dict[tuple[str, object], str] = {}  # by the shards and the view of a SampleList
    for name, source in sources.items():
        chain = Chain(source)
        data, view = chain.root.which_data(), getattr(chain.root, "view", None)
        if not data.fingerprint or any(step.changes_count() is not None for step in chain):
            continue
        other = names.setdefault((data.fingerprint, view), name)
        if other != name:
            warning = mended(
                UserWarning,
                f"sources {other!r} and {name!r} of mix() read the same shards, so each sample comes from both",
                mend="Leave one of them out, and pass weights= for how often the other one is drawn.",
            )
            warnings.warn(warning, stacklevel=3)


def check_without(without: Iterable[str], sources: Mapping[str, Stage[Any]]) -> frozenset[str]:
    """Return the names of sources that mix() is without; raise if they are no such names."""
    if isinstance(without, str):
        raise TypeError(f"without must be a list of names, not {without!r}: write without=[{without!r}]")
    names = frozenset(without)
    if both := names & sources.keys():
        raise ValueError(f"without names {sorted(both)}, which is in the mix")
    return names
