"""What concerns all stages of a chain together: questions that its stages answer in turn, and the
forms of a position.

A chain is a list of stages, each of which reads from the one before::

    ShardList > open_shards > load_tar > group_by_key > shuffle_buffer > batch_samples
     Source                                                                   last

A position of it has three forms::

    live    running.at                       the dataclass At of each running stage
    mark    (own, mark of the source)        nested tuples, taken for each item
    JSON    [{...}, {...}, ...]              a dict for each stage, made for a state

``Composite`` stages (mix, interleave, repeat, the segments of a lane) run chains of their own. In
the place of the mark of a source they have ``parts``: where each of these chains stands, as a tuple
of the fields of ``part_kind``. So their own source is only a recipe, and a position has no entry
for it.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, cast

from wds_pipes.core.counts import COUNTED, DONE, Lack, Network, sum_counts
from wds_pipes.core.graph import GraphStep, graph_text
from wds_pipes.core.lane import Lane
from wds_pipes.core.stage import (
    Ended,
    Limited,
    Mark,
    Out,
    Reports,
    Source,
    Stage,
    begin,
    functional_name,
    own_copy,
    running_copy,
)
from wds_pipes.core.state import MOST, damaged, is_count, read_as, read_counts, read_dict, read_position
from wds_pipes.core.words import shown

_ENDED = "at end"  # the key that marks an ended stage in a state; no field of a position can have this name
PARTS = "chains"  # the key of the parts of a composite stage
POSITION = "position"  # the key of the position of a part


class Chain:
    """The stages of a chain, which are its recipe, or run.

    Attributes:
        steps: the stages, from the first to the last.
        placed: those with an entry in a position: all from the last ``Composite`` on.
    """

    __slots__ = ("_composite", "placed", "steps")

    def __init__(self, last: Stage[Any]) -> None:
        steps = [last]
        while (source := steps[-1].source) is not None:
            steps.append(source)
        self.steps = steps[::-1]
        composites = [number for number, step in enumerate(self.steps) if isinstance(step, Composite)]
        self.placed = self.steps[composites[-1] if composites else 0 :]
        self._composite = cast("Composite[Any]", self.placed[0]) if composites else None

    def __iter__(self) -> Iterator[Stage[Any]]:
        return iter(self.steps)

    @property
    def root(self) -> Source[Any]:
        """The first stage."""
        return cast("Source[Any]", self.steps[0])

    # What the recipe says

    def graph(self, *, counted: bool = False) -> tuple[GraphStep, ...]:
        """Return the chain as data, from its first stage: names, and the options that decide the
        order. ``counted``: a stage after the chain depends on the numbers of its items.
        """
        graph = []
        for step in reversed(self.steps):
            graph.append(step._in_graph(counted=counted))
            counted = counted or step.counts_items
        return tuple(graph[::-1])

    def __str__(self) -> str:
        """Return the graph as text."""
        return graph_text(self.graph())

    @property
    def items_are(self) -> str | None:
        """What its items are, see ``Stage.gives``; None if no stage says so."""
        return next((step.gives for step in reversed(self.steps) if step.gives is not None), None)

    @property
    def never_ends(self) -> bool:
        """Whether an epoch has no end."""
        return not next((step._ends for step in reversed(self.steps) if step._ends is not None), True)

    @property
    def batches(self) -> int | None:
        """How many samples are in each item, if the last steps are known to make batches; otherwise
        None.
        """
        for step in reversed(self.steps):
            size: int | None = step.items_per_batch
            if size is not None:
                return size
            if step.scope != "item" and not isinstance(step, Composite):
                return None
        return None

    @property
    def batching(self) -> list[Stage[Any]]:
        """The steps that make batches, in order: all but the first make batches of batches."""
        # a step that expands takes batches apart
        after = itertools.takewhile(lambda step: not step.expands, reversed(self.steps))
        return [step for step in after if step.items_per_batch is not None][::-1]

    @property
    def counts_delivered(self) -> bool:
        """Whether a stage counts delivered samples itself, since an item of the chain is not one
        sample.
        """
        counts = any(Chain(branch).counts_delivered for branch in self.root.branches.values())
        for step in self.steps:
            counts = (counts and not step.expands) or "delivered" in step.tallies
        return counts

    @property
    def reading_end(self) -> Stage[Any]:
        """The last stage whose time counts as reading, as does that of all stages before it."""
        ends = (step for step in reversed(self.steps) if isinstance(step, Composite) or step.gives == "samples")
        return next(ends, self.steps[0])

    # What a running chain reports

    @property
    def _reports(self) -> list[Reports]:
        return [step for step in self.placed if isinstance(step, Reports)]

    @property
    def network(self) -> Network:
        """The chain's use of the network in this process."""
        return Network.of_all(step.network for step in self._reports)

    @property
    def bytes_so_far(self) -> int:
        """How many bytes of shards the chain has read."""
        return sum(step.bytes_so_far for step in self._reports)

    @property
    def held_items(self) -> int:
        """About how many items the chain holds."""
        return sum(step.held_items for step in self._reports)

    @property
    def opened(self) -> int:
        """How many of the ranges of its lane the chain has begun."""
        for step in reversed(self.placed):
            if isinstance(step, Reports) and (opened := step.opened) is not None:
                return opened
        return 0

    @property
    def lack(self) -> Lack:
        """Why the chain yielded nothing, since it was opened."""
        lack = Lack()
        for step in self._reports:
            lack = step.lack(lack)
        return lack

    # What a mark says

    def where(self, mark: Mark | None, lane: Lane) -> str | None:
        """Return the URL of the shard at a position, for messages; None if there is none."""
        own, parts = self.first_of(mark) or ((), None)
        if self._composite is not None:
            return self._composite.where_in(own, self._composite.parts_of(parts), lane)
        return self.root.where(own, lane)

    def first_of(self, mark: Mark | None) -> Mark | None:
        """Return the mark of the first stage of ``placed`` at a position."""
        for _ in self.placed[1:]:
            mark = mark and mark[1]
        return mark

    def counts(self, mark: Mark | None, delivered: int) -> dict[str, int]:
        """Return what became of the samples up to ``mark``, after ``delivered`` items were
        yielded.
        """
        counts = dict.fromkeys(COUNTED, 0)
        counts["delivered"] = delivered
        expanded = False  # batches before a step that takes them apart do not count
        for step in reversed(self.placed):
            if mark is None:
                break
            own, before = mark
            for place, name in step._tallies:
                value = own[place]
                if name == "delivered":
                    counts[name] = counts[name] if expanded else value
                elif value:
                    counts[name] = counts.get(name, 0) + value
                    if isinstance(step, Limited) and step.limited is not None and name == step.counter:
                        counts[step.limited] = counts.get(step.limited, 0) + value
            if step is self._composite:
                inner = self._composite.counts_in(own, self._composite.parts_of(before))
                counts_delivered = self._composite.counts_delivered and not expanded
                delivered = inner["delivered"] if counts_delivered else counts["delivered"]
                return {**sum_counts((counts, inner)), "delivered": delivered}
            expanded = expanded or step.expands
            mark = before
        return counts

    # Marks as JSON

    def dump(self, mark: Mark | None) -> list[dict[str, Any]]:
        """Return a mark as JSON types: one dict for each stage, without values that are still the
        default.
        """
        entries = []
        for step in reversed(self.placed):
            own, before = mark or ((), None)
            entry: dict[str, Any] = {}
            if own and own != step._beginning:
                pairs = zip(step._defaults.items(), own)
                entry = {name: own_copy(value) for (name, default), value in pairs if value != default}
            if step is self._composite and before:
                entry[PARTS] = [self._composite.dump_part(part) for part in self._composite.parts_of(before)]
            # else the source's entry says so, and this stage gets nothing from it
            if isinstance(mark, Ended) and not isinstance(before, Ended):
                entry[_ENDED] = True
            entries.append(entry)
            mark = before
        return entries[::-1]

    def load(self, entries: list[dict[str, Any]], *, fixed: bool = False) -> Mark:
        """Return the mark that ``dump`` wrote.

        Args:
            entries: what ``dump`` returned.
            fixed: a step after the chain reads its items again, which must be the same ones.

        Raises:
            StateError: the chain can never be at this position.
        """
        if len(entries) != len(self.placed):
            raise damaged(f"a position has {len(entries)} entries, for {len(self.placed)} steps")
        before: Any = None
        for number, (step, entry) in enumerate(zip(self.placed, entries, strict=True)):
            values = {name: value for name, value in entry.items() if name not in (_ENDED, PARTS)}
            if _ENDED in entry and entry[_ENDED] is not True:
                raise damaged(f"{functional_name(type(step))} cannot stand at {_ENDED}={shown(entry[_ENDED])}")
            own = _read_values(step, step._defaults, values)
            if step is self._composite:
                after, at = self.placed[number + 1 :], step._at(own)
                again = fixed or any(later.scope != "item" and not later._holds_none for later in after)
                before = self._composite.load_parts(at, entry.get(PARTS, []), fixed=again)
                own = step._own(at)
            elif PARTS in entry:
                raise damaged(f"{functional_name(type(step))} runs no chains")
            if values and (problem := step.problem(step._at(own))) is not None:
                raise damaged(f"{functional_name(type(step))} cannot stand at {shown(values)}: {problem}")
            before = Ended(own, before) if _ENDED in entry else (own, before)
        return cast(Mark, before)

    def uncounted(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what ``dump`` wrote, without counts of samples, for a caller that counts only what
        comes after it.
        """
        return [
            {
                name: self._composite.uncounted_parts(value) if self._composite and name == PARTS else value
                for name, value in entry.items()
                if name not in step.tallies
            }
            for step, entry in zip(self.placed, entries, strict=True)
        ]

    def rest_of(self, entries: list[dict[str, Any]]) -> tuple[int, list[dict[str, Any]]]:
        """Return how many ranges of its lane are done at a position that ``dump`` wrote, and the
        same position in the lane without these ranges.
        """
        entry, *later = entries
        done, entry = (self._composite or self.root.epoch_order).rest_of(entry)
        return done, [entry, *later]


def linked(first: Stage[Any], steps: Sequence[Stage[Any]]) -> Stage[Any]:
    """Return the last of copies of ``steps``, which read from ``first``, one from the other."""
    for step in steps:
        again = copy.copy(step)
        for kind in type(step).__mro__:
            for name, value in vars(kind).items():
                if isinstance(value, cached_property):  # it may be of the stages before
                    vars(again).pop(name, None)
        again.source = first
        first = again
    return first


def makes_one_of_each(step: Stage[Any]) -> bool:
    """Return whether a stage makes each item of one item of its source, whatever came before, and
    its position is only the counts of what it leaves out. Then it may be applied to items in
    another order.
    """
    only_counts = len(step._tallies) == len(step._defaults)
    return step.scope == "item" and step.items_per_batch is None and only_counts and step.changes_count() is None


def changes_order(step: Stage[Any]) -> str | None:
    """Return why the items of a stage may come in another order than those of the source, for a
    message; None if they do not.
    """
    if step.scope == "item":
        return None
    return f"{step._in_graph(counted=False).name}() may change their order"


def _read_values(step: Stage[Any], defaults: dict[str, Any], values: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of a position in an entry of a state, in the order of ``defaults``.

    Raises:
        StateError: they do not have the types of the defaults.
    """
    for name, value in values.items():
        if name not in defaults or not _alike(defaults[name], value):
            raise damaged(f"{functional_name(type(step))} cannot stand at {shown(name)[1:-1]}={shown(value)}")
    return tuple(values.get(name, default) for name, default in defaults.items())


def _alike(default: object, value: object) -> bool:
    """Return whether ``value`` has a type that can stand in the place of ``default``."""
    if default is None:
        return True
    if isinstance(default, float):
        return is_count(value, least=-MOST) or (isinstance(value, float) and math.isfinite(value))
    if isinstance(default, int) and not isinstance(default, bool):
        return is_count(value, least=min(default, 0))
    return isinstance(value, type(default))


class ChainPart(NamedTuple):
    """Where one of the chains of a composite stage stands. A stage may have a class of its own,
    with more fields: numbers and strings whose defaults are the beginning.

    Attributes:
        mark: the position of the chain; None: its beginning.
    """

    mark: Mark | None = None


class Composite(Reports, Stage[Out]):
    """The base of stages whose running copy runs chains: one after another, or several in turn.

    Attributes:
        inner: while running, the chains that are open.
        parts: while running, where its chains stand.
        part_kind: the class of the parts.
        part_tallies: the fields of parts that only count.
        epoch_repeats: how many times it yields the epoch of its source; 1 also for one that has no
            end.
    """

    @dataclass(slots=True)
    class At:
        """The counts of the chains that are done."""

        done: dict[str, int] | None = None

    tallies: ClassVar[tuple[str, ...]] = (DONE,)
    part_kind: ClassVar[Any] = ChainPart
    part_tallies: ClassVar[tuple[str, ...]] = ()
    epoch_repeats: int = 1
    parts: list[Any]
    _lack_before = Lack()  # while running: of the chains that are done
    _bytes_before = 0  # while running: bytes that were read by them

    @property
    def counts_items(self) -> bool:
        """False: where its chains stand says all."""
        return False

    @property
    def inner(self) -> Sequence[Stage[Any]]:
        raise NotImplementedError

    def chain_of(self, part: Any) -> Chain | None:
        """Return the chain of a part, as a recipe; None: there is none any more."""
        return self.before

    @cached_property
    def before(self) -> Chain:
        """The chain before this stage: a recipe, so that all running copies share it."""
        assert self.source is not None
        return Chain(self.source)

    def where_in(self, own: tuple[Any, ...], parts: tuple[Any, ...], lane: Lane) -> str | None:
        """Return the URL of the shard at a position: see ``Chain.where``."""
        raise NotImplementedError

    def fit_parts(self, at: Any, parts: list[Any], *, fixed: bool) -> list[Any]:
        """Return the parts of a state as this stage runs them.

        Args:
            at: its own position, which it may change.
            parts: what the state says of its chains.
            fixed: a stage after it reads items again, which must be the same ones.

        Raises:
            StateError: they are impossible.
        """
        if len(parts) > 1:
            raise damaged(f"{functional_name(type(self))} runs one chain, and {len(parts)} stand somewhere")
        return parts

    def parts_of(self, parts: Sequence[Any] | None) -> tuple[Any, ...]:
        """Return the parts in a mark, each as ``part_kind``."""
        return tuple(map(self.part_kind._make, parts or ()))

    def open(self, lane: Lane, mark: Mark | None = None) -> Stage[Out]:
        own, parts = mark or (None, None)
        running = running_copy(self)
        running.lane, running.at, running.parts = lane, self._at(own), [*self.parts_of(parts)]
        running.prepare()
        begin(running, mark, self)
        return running

    def prepare(self) -> None:
        """Set up the running copy, of which ``lane``, ``at`` and ``parts`` are set."""

    def mark(self) -> Mark:
        return self._own(self.at), tuple(self.parts)

    def close(self) -> None:
        self.items.close()  # type: ignore[attr-defined]
        for chain in self.inner:
            chain.close()

    def retire(self, last: Stage[Any]) -> None:
        """Close a chain that is done, and keep its counts."""
        chain = Chain(last)
        counts = sum_counts((self.at.done or {}, chain.counts(last.mark(), 0)))
        # a new dict: positions hold the old one
        self.at.done = {name: count for name, count in counts.items() if count} or None
        self._lack_before = Lack.of_all((self._lack_before, chain.lack))
        self._bytes_before += chain.bytes_so_far
        last.close()

    # Reports

    @property
    def network(self) -> Network:
        # the recipes, whose copies share what they read through
        sources = Chain(self).root.branches.values() if self.source is None else [self.source]
        return Network.of_all(Chain(source).network for source in sources)

    @property
    def bytes_so_far(self) -> int:
        return self._bytes_before + sum(Chain(last).bytes_so_far for last in self.inner)

    @property
    def held_items(self) -> int:
        return sum(Chain(last).held_items for last in self.inner)

    def lack(self, before: Lack) -> Lack:
        return Lack.of_all([self._lack_before, *(Chain(last).lack for last in self.inner)])

    # Positions

    def counts_in(self, own: tuple[Any, ...], parts: Sequence[Any]) -> dict[str, int]:
        """Return the counts at a position of the chains that are done, and of those that stand
        somewhere.
        """
        return sum_counts([{"delivered": 0}, self._at(own).done or {}, *map(self.counts_of, parts)])

    def counts_of(self, part: Any) -> dict[str, int]:
        """Return the counts of the chain of a part."""
        chain = self.chain_of(part)
        return {} if chain is None else chain.counts(part.mark, 0)

    @cached_property
    def counts_delivered(self) -> bool:
        """Whether its chains count delivered samples: see ``Chain.counts_delivered``."""
        return Chain(self).counts_delivered

    def dump_part(self, part: Any) -> dict[str, Any]:
        """Return a part as JSON types."""
        entry = {name: value for name, value in part._asdict().items() if value and name != "mark"}
        chain = self.chain_of(part)
        if part.mark is not None and chain is not None:
            entry[POSITION] = chain.dump(part.mark)
        return entry

    def load_parts(self, at: Any, entries: object, *, fixed: bool) -> tuple[Any, ...]:
        """Return the parts that ``dump_part`` wrote; for the arguments see ``fit_parts``."""
        name = functional_name(type(self))
        parts = []
        for entry in read_as(list, entries, f"the chains of {name}"):
            values = dict(read_dict(entry, f"a chain of {name}"))
            position = values.pop(POSITION, None)
            *read, _ = _read_values(self, self.part_kind()._asdict(), {**values, "mark": None})
            part = self.part_kind(*read)
            chain = self.chain_of(part)
            if position is not None and chain is not None:
                entries_of = read_position(position, f"a chain of {name}")
                part = part._replace(mark=chain.load(entries_of, fixed=fixed))
            parts.append(part)
        at.done = dict(read_counts(at.done or {}, f"'done' of {name}")) or None
        return tuple(self.fit_parts(at, parts, fixed=fixed))

    def rest_of(self, entry: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Do what ``Order.rest_of`` does."""
        return 0, entry

    def uncounted_parts(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what ``dump_part`` wrote of the parts, without counts: see ``Chain.uncounted``."""
        found = []
        for entry in entries:
            values = {name: value for name, value in entry.items() if name not in self.part_tallies}
            chain = self.chain_of(self.part_kind(**{name: values[name] for name in values if name != POSITION}))
            if POSITION in values and chain is not None:
                values[POSITION] = chain.uncounted(values[POSITION])
            found.append(values)
        return found
