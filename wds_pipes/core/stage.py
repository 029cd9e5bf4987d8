"""The contract of a stage.

Rules:
1. A stage is a recipe: it has only options, which are checked when it is built and never change
   afterwards. ``open`` makes a running copy of it with a position of its own, so any number of
   streams can run over one recipe.
2. A running stage is a generator (``run``) over its source. At each yield, everything that it needs
   to continue is in ``self.at`` (a dataclass of numbers and strings whose defaults are the
   beginning) and in the position of its source. Data is never part of a position.
3. A stage that has read ahead keeps an ``earlier`` position of its source, which ``mark`` returns,
   and drops the items that it had already yielded when it is opened there again. Its docstring says
   how much it may read again. ``ReadsAgain`` is the base of such stages.
4. A mark is a nest of tuples, ``(own values, mark of the source)``: cheap enough to take for each
   item. Dicts are built only when a state is requested.
5. The stream commits a position when an item is returned, not before: a state is correct at any
   time, also after an exception.
6. A state that does not fit is refused with a message; no stage ever starts again silently.
7. Whether a stage has ended is part of its position, even if its source has more items: after the
   end, ``mark`` returns an ``Ended``, and a stage that is opened there yields nothing. ``open``
   does this for all stages. A step after the stage may still hold items when the stage ends, so
   states can be taken at that point.
8. Each running copy has its own lists, dicts, sets and deques: see ``running_copy``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar, Generic, cast

from wds_pipes.core.counts import COUNTED, check_tallies
from wds_pipes.core.facts import StageFacts
from wds_pipes.core.lane import Lane
from wds_pipes.core.moved import Move
from wds_pipes.core.numbered import Numbered, NumberedItems
from wds_pipes.core.running import Ended, Mark, Out, begin, running_copy
from wds_pipes.core.state import damaged, is_count, read_finite
from wds_pipes.core.words import shown

State = dict[str, Any]

_ENDED = "at end"  # the key that marks an ended stage in a state; no field of a position can have this name


_known: dict[str, type[Stage[Any]]] = {}  # all stages that are defined, by their functional names


def find_stage(name: str) -> type[Stage[Any]] | None:
    """Return the stage with a functional name, to describe a state; None if its module was not
    imported.
    """
    return _known.get(name)


def functional_name(kind: type | str) -> str:
    """Return the method name of a class, or of the name of a class: ``LoadTar`` is ``load_tar``."""
    name = kind if isinstance(kind, str) else kind.__name__
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


def shown_signature(kind: type, *, returns: object = inspect.Signature.empty) -> inspect.Signature:
    """Return the signature of a class, or of the method made of it, as ``help()`` shows it: names
    and defaults. Editors read the types from the source.
    """
    signature = inspect.signature(kind)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=plain, return_annotation=returns)


def is_built_in(kind: type[Stage[Any]]) -> bool:
    """Return whether a class of stages is one of this package, not of a user's."""
    return kind.__module__.partition(".")[0] == __name__.partition(".")[0]


def _read_defaults(kind: type[Stage[Any]]) -> dict[str, Any]:
    """Return the defaults of the fields of ``At``, by name.

    Raises:
        TypeError: ``At`` is not a dataclass, or a field has no plain default.
    """
    at, name = kind.At, f"{kind.__name__}.At"
    if "__dataclass_fields__" not in vars(at):
        raise TypeError(f"{name} is not a dataclass: write @dataclass(slots=True) above it")
    for field in fields(at):
        if field.default is MISSING:
            what = "no default" if field.default_factory is MISSING else "a default_factory"
            raise TypeError(
                f"{name}: the field {field.name!r} has {what}. A position is numbers and strings, and the "
                'defaults are the beginning: write a default such as 0 or ""'
            )
    return {field.name: field.default for field in fields(at)}


class Stage(StageFacts, Generic[Out]):
    """One step of a pipeline.

    You write: ``__init__`` (options), ``At`` (the position), ``run`` (the generator); sometimes
    ``mark``, ``describe``, ``problem``. All other methods are there already.

    Attributes:
        source: the stage before this one; None for the first.
        lane: while running, which part of which epoch this copy yields.
        at: while running, the stage's own position.
        items: while running, the iterator over the stage's items.
        earlier: while running, the position of the source that ``mark`` returns, if the stage has
            read ahead; None: the source's current position.
        order_options: names of the options that decide which items come in which order. A state is
            refused if they differ.
        tallies: names of the fields of ``At`` that only count samples for ``counts()``: delivered,
            filtered, skipped, dropped. ``run`` never reads them: they may begin at 0 again.
        counts_items: whether the position or the random numbers of the stage count the items of its
            source. Then a state is refused if an item was another number of samples when it was
            saved, such as after another size of ``batch_samples`` before this stage.
        holds_nothing: whether the stage, when it yields, has yielded or dropped for good all that
            it took: it remembers no item, and its ``mark`` returns the source's current position.
            Items that it holds for its threads do not count (``held_items``), if ``mark`` and
            ``opened`` return what those of the source returned before them.
            Then it may run over several sources in a row: after ``batch_samples``, PipeLoader fills
            batches across the segments of a lane. False where it could be True costs only this;
            True where it should be False loses or repeats samples when an epoch is repartitioned.
        whole_lanes: whether what the stage yields depends on the samples that its lane has had, so
            that PipeLoader may not divide the rest of the lane.
        shared: names of attributes with a large list, dict or set that never changes: the running
            copies share it. Of any other list, dict or set, each copy has its own.
        expands: whether it makes several items of one: see ``FlatMap``.
        keeps_count: whether the stage yields as many items as it takes (or batches of all of them),
            so that the length of an epoch stays known. ``check_resume`` counts.
        keeps_order: whether the stage makes each item of one item of its source (or each batch of
            neighbours) alone, in their order, whatever the lane is. Then, over a ``SampleList``,
            PipeLoader yields the same global batches on any number of ranks and workers.
            ``check_resume`` tries it.
        one_of_each: whether it makes each item of one item of its source, whatever came before, and
            its position is only the counts of what it leaves out. Then it may be applied to items
            in another order: see ``numbered``.
        gives: what its items are: ``"shards"``, ``"members"``, ``"references"`` (to samples) or
            ``"samples"``; None: the same as the items of its source.
        ends_reading: whether the time of this stage and of the stages before it counts as reading
            in ``PipeLoader.stats``.
        runs_chains: whether its running copy runs chains of its own, so that its source is only a
            recipe.
        is_source: whether it is the first stage of a chain, and takes no source.
        divides: whether PipeLoader can divide its epochs into lanes.
        divides_shards: whether PipeLoader divides them by the shards that ``epoch_shards`` lists.
        has_global_order: whether it can yield any stripe of one order of an epoch: see ``Stripe``.
        on_error, max_errors: see ``Tolerant``.
        error_kind: the error that it raises for bad data.
        counts_itself: whether it overrides ``counts``, because it runs chains of its own.
        limited: the name of the count that ``max_errors`` limits; None if there is no limit.
    """

    @dataclass(slots=True)
    class At:
        """The position: numbers and strings whose defaults are the beginning."""

    _defaults: ClassVar[dict[str, Any]] = {}  # of the fields of At
    _beginning: ClassVar[tuple[Any, ...]] = ()  # their defaults
    _own: ClassVar[staticmethod[[Any], tuple[Any, ...]]] = staticmethod(lambda at: ())
    source: Stage[Any] | None
    lane: Lane
    at: Any
    items: Iterator[Out]
    earlier: Mark | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        name = functional_name(cls)
        # A class of the user's does not take the place of a built-in stage.
        if name not in _known or is_built_in(cls) or not is_built_in(_known[name]):
            _known[name] = cls
        if "At" in cls.__dict__:
            cls._defaults = _read_defaults(cls)
            cls._beginning = tuple(cls._defaults.values())
            get: Callable[[Any], Any] = attrgetter(*cls._defaults) if cls._defaults else lambda at: ()
            cls._own = staticmethod((lambda at: (get(at),)) if len(cls._defaults) == 1 else get)
        check_tallies(cls.__name__, vars(cls).get("tallies", ()), cls._defaults)
        cls._tallies = tuple((place, name) for place, name in enumerate(cls._defaults) if name in cls.tallies)

    def __init__(self, source: Stage[Any] | None = None) -> None:
        if source is not None and not isinstance(source, Stage):
            raise TypeError(f"{type(self).__name__} needs a stage as its source, not {type(source).__name__}")
        self.source = source

    def unfinished(self) -> str | None:
        """Return what the class of this stage still needs, for a message; None if nothing."""
        kind = type(self)
        if kind.run is Stage.run:
            return f"{kind.__name__} defines no run(self), a generator that yields the items"
        if "source" not in vars(self):
            return f"{kind.__name__}.__init__ must call super().__init__(source)"
        names: Any = kind.order_options
        if isinstance(names, str):
            return f"{kind.__name__}.order_options is the string {names!r}, not a tuple of names: write ({names!r},)"
        for name in names:
            if not hasattr(self, name):
                return f"{kind.__name__}.order_options names {name!r}, and __init__ sets no self.{name}"
        for name in vars(self):
            if callable(getattr(kind, name, None)):
                return f"{kind.__name__}.__init__ sets self.{name}, which is a method of Stage: give it another name"
        return None

    def run(self) -> Iterator[Out]:
        """Yield the items after ``self.at``."""
        raise NotImplementedError

    def mark(self) -> Mark:
        """Return the position after the item that was yielded last."""
        return self._own(self.at), self.earlier or (self.source.mark() if self.source is not None else None)

    def open(self, lane: Lane, mark: Mark | None = None) -> Stage[Out]:
        """Return a running copy of this stage and all stages before it, at ``mark`` (None: the
        beginning).
        """
        own, before = mark or (None, None)
        running = running_copy(self)
        running.lane = lane
        running.at = self._at(own)
        if self.source is not None:
            running.source = self.source.open(lane, before)
        begin(running, mark)
        return running

    def start(self, offset: int = 0, *, ahead: bool = False) -> None:
        """Request what a running stage will need first, without waiting for it. So a caller that
        opens several chains can wait for all of them together.

        Args:
            offset: the byte of its first shard that will be read first.
            ahead: the turn of the chain has not come yet, so it gets only one connection.
        """
        if self.source is not None:
            self.source.start(offset, ahead=ahead)

    def _at(self, own: tuple[Any, ...] | None) -> Any:
        """Return the position with these values; None: the beginning."""
        at = cast(Any, self.At)
        return at(*(own or ()))

    def close(self) -> None:
        """Stop a running stage and all stages before it; files are closed when this returns."""
        close = getattr(self.items, "close", None)
        if close is not None:
            close()
        if self.source is not None:
            self.source.close()

    def changes_count(self) -> str | None:
        """Return why the stage may yield another number of items than it takes, for a message; None
        if it does not.
        """
        return None if self.keeps_count else f"{self.graph()[-1].partition('(')[0]}() may change their number"

    def changes_order(self) -> str | None:
        """Return why items may come in another order than those of the source, for a message; None
        if they do not.
        """
        kept = self.keeps_order and not self.whole_lanes
        return None if kept else f"{self.graph()[-1].partition('(')[0]}() may change their order"

    def numbered(self, lane: Lane, mark: Mark | None) -> Numbered[Out] | None:
        """Return access to the items that the chain yields in a lane after ``mark`` by their
        numbers; None: they cannot be read without those before them. The items, and the positions
        between them, must be exactly those of the running chain.
        """
        if not self.one_of_each or self.changes_count() or self.source is None or not mark or isinstance(mark, Ended):
            return None
        before = self.source.numbered(lane, mark[1])
        return before and NumberedItems(self, mark[0], before)

    def graph(self, *, counted: bool = False) -> list[str]:
        """Return the chain as text, from its first stage: names, and the options that decide the
        order.

        Args:
            counted: a stage after this one depends on the numbers of its items, so options that
                decide what one item is are included too.
        """
        before = self.source.graph(counted=counted or self.counts_items) if self.source is not None else []
        chosen = {name: getattr(self, name) for name in self.order_options}
        options = ", ".join(
            f"{name}={value!r}" for name, value in chosen.items() if value is not None and value is not False
        )
        return [*before, f"{functional_name(type(self))}({options})" if options else functional_name(type(self))]

    def counts(self, mark: Mark | None, delivered: int) -> dict[str, int]:
        """Return what became of the samples up to ``mark``, after ``delivered`` items were
        yielded.
        """
        counts = dict.fromkeys(COUNTED, 0)
        counts["delivered"] = delivered
        stage: Stage[Any] | None = self
        expanded = False  # batches before a step that takes them apart do not count
        while stage is not None and mark is not None:
            if stage.counts_itself and stage is not self:
                inner = stage.counts(mark, counts["delivered"])
                if expanded:
                    inner["delivered"] = counts["delivered"]
                return {
                    **counts,
                    **{name: counts.get(name, 0) + count for name, count in inner.items()},
                    "delivered": inner["delivered"],
                }
            own, mark = mark
            for place, name in stage._tallies:
                value = own[place]
                if name == "delivered":
                    counts[name] = counts[name] if expanded else value
                elif value:
                    counts[name] = counts.get(name, 0) + value
                    if stage.limited is not None and name == stage.counter:  # type: ignore[attr-defined]
                        counts[stage.limited] = counts.get(stage.limited, 0) + value
            expanded = expanded or stage.expands
            stage = stage.source
        return counts

    def dump(self, mark: Mark | None) -> list[dict[str, Any]]:
        """Return a mark as JSON types: one dict for each stage, from the first, without values that
        are still the default.
        """
        entries = self.dump_mark(mark)
        # else the source's entry says so, and this stage gets nothing from it
        if isinstance(mark, Ended) and not isinstance(mark.before, Ended):
            entries[-1][_ENDED] = True
        return entries

    def load(self, entries: list[dict[str, Any]]) -> Mark:
        """Return the mark that ``dump`` wrote.

        Raises:
            StateError: the chain can never be at this position.
        """
        if _ENDED not in entries[-1]:
            return self.load_mark(entries)
        if entries[-1][_ENDED] is not True:
            raise damaged(f"{functional_name(type(self))} cannot stand at {_ENDED}={shown(entries[-1][_ENDED])}")
        *before, entry = entries
        return Ended(*self.load_mark([*before, {name: value for name, value in entry.items() if name != _ENDED}]))

    def dump_mark(self, mark: Mark | None) -> list[dict[str, Any]]:
        """Return what ``dump`` returns, without whether the stage has ended."""
        own, before = mark or ((), None)
        entries = self.source.dump(before) if self.source is not None else []
        first = not own or own == self._beginning  # the common case
        entries.append(
            {}
            if first
            else {
                name: value
                for (name, default), value in zip(self._defaults.items(), own, strict=False)
                if value != default
            }
        )
        return entries

    def relocate(self, entries: list[dict[str, Any]], move: Move) -> list[dict[str, Any]]:
        """Return what ``dump`` wrote, adapted to the shards of this chain, if these are the same
        data as those of the state.

        Raises:
            StateError: they are other data.
        """
        *before, entry = entries
        return [*(self.source.relocate(before, move) if self.source is not None else []), entry]

    def uncounted(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return what ``dump`` wrote, without counts of samples, for a caller that counts only what
        comes after it.
        """
        *before, entry = entries
        own = {name: value for name, value in entry.items() if name not in self.tallies}
        return [*(self.source.uncounted(before) if self.source is not None else []), own]

    def load_mark(self, entries: list[dict[str, Any]]) -> Mark:
        """Return the mark that ``dump_mark`` wrote.

        Raises:
            StateError: the values do not have the types of ``At``, or ``problem`` refuses them.
        """
        *before, entry = entries
        known = self._defaults
        for name, value in entry.items():
            if name not in known or not _alike(known[name], value):
                raise damaged(f"{functional_name(type(self))} cannot stand at {shown(name)[1:-1]}={shown(value)}")
        own = tuple(entry.get(name, default) for name, default in known.items())
        if entry and (problem := self.problem(self._at(own))) is not None:
            raise damaged(f"{functional_name(type(self))} cannot stand at {shown(entry)}: {problem}")
        return own, self.source.load(before) if self.source is not None else None

    def problem(self, at: Any) -> str | None:
        """Return why ``at``, a position from a state, is impossible for this stage, for a message;
        None if it is possible. The types of its values were checked before.
        """
        return None


def _alike(default: object, value: object) -> bool:
    """Return whether ``value`` has a type that can stand in the place of ``default``."""
    if default is None:
        return True
    if isinstance(default, float):
        return read_finite(value) is not None
    if isinstance(default, int) and not isinstance(default, bool):
        return is_count(value, least=min(default, 0))
    return isinstance(value, type(default))
