"""The contract of a stage.

Rules:
1. A stage is a recipe: it has only options, which are checked when it is built and never change
   afterwards. ``open`` makes a running copy of it with a position of its own, so any number of
   streams can run over one recipe.
2. A running stage is a generator (``run``) over its source. At each yield, everything that it needs
   to continue is in ``self.at`` (a dataclass of numbers and strings whose defaults are the
   beginning) and in the position of its source. Data is never part of a position.
3. A stage that has read ahead keeps an *earlier* position of its source, overrides ``mark`` to
   return that one, and drops the items that it had already yielded when it is opened there again.
   Its docstring says how much it may read again.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, ClassVar, Generic, cast

from wds_pipes.core.counts import COUNTED, NO_NETWORK, TROUBLE, Lack, Network, without_counts
from wds_pipes.core.lane import Host, Lane, LaneFacts
from wds_pipes.core.moved import Data, Move
from wds_pipes.core.running import Ended, Mark, Out, begin, running_copy
from wds_pipes.core.state import damaged, is_count, read_finite
from wds_pipes.core.words import shown
from wds_pipes.errors import SampleError, WdsError

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


class Stage(Generic[Out]):
    """One step of a pipeline. Subclasses write ``__init__`` (options), ``At`` (the position) and
    ``run`` (the generator).

    Attributes:
        source: the stage before this one; None for the first.
        lane: while running, which part of which epoch this copy yields.
        at: while running, the stage's own position.
        items: while running, the iterator over the stage's items.
        order_options: names of the options that decide which items come in which order. A state is
            refused if they differ.
        counts_items: whether the items that the stage yields depend on the number of an item in its
            source.
        holds_nothing: whether the stage holds no item of its source when it yields, so that the
            steps after it may run over several sources.
        whole_lanes: whether what the stage yields depends on the samples that its lane has had, so
            that PipeLoader may not divide the rest of the lane.
        shared: names of attributes with a large list, dict or set that never changes: the running
            copies share it. Of any other list, dict or set, each copy has its own.
        expands: whether it makes several items of one: see ``FlatMap``.
        keeps_count: whether the stage yields as many items as it takes (or batches of all of them),
            so that the length of an epoch stays known.
        gives: what its items are: ``"shards"``, ``"members"`` or ``"samples"``; None: the same as
            the items of its source.
        ends_reading: whether the time of this stage and of the stages before it counts as reading
            in ``PipeLoader.stats``.
        runs_chains: whether its running copy runs chains of its own, so that its source is only a
            recipe.
        is_source: whether it is the first stage of a chain, and takes no source.
        divides: whether PipeLoader can divide its epochs into lanes.
        divides_shards: whether PipeLoader divides them by the shards that ``epoch_shards`` lists.
        on_error, max_errors: see ``Tolerant``.
        error_kind: the error that it raises for bad data.
        counts_itself: whether it overrides ``counts``, because it runs chains of its own.
        limited: the name of the count that ``max_errors`` limits; None if there is no limit.
    """

    @dataclass(slots=True)
    class At:
        """The position: numbers and strings whose defaults are the beginning."""

    order_options: ClassVar[tuple[str, ...]] = ()
    shared: ClassVar[tuple[str, ...]] = ()
    holds_nothing: ClassVar[bool] = False
    whole_lanes: ClassVar[bool] = False
    expands: ClassVar[bool] = False
    keeps_count: ClassVar[bool] = False
    gives: ClassVar[str | None] = None
    ends_reading: ClassVar[bool] = False
    runs_chains: ClassVar[bool] = False
    is_source: ClassVar[bool] = False
    divides: ClassVar[bool] = False
    divides_shards: ClassVar[bool] = False
    error_kind: ClassVar[type[WdsError]] = SampleError
    on_error: str = "raise"
    max_errors: int | None = None
    counts_itself: ClassVar[bool] = False
    counts_items: bool = False
    limited: str | None = None
    _defaults: ClassVar[dict[str, Any]] = {}  # of the fields of At
    _beginning: ClassVar[tuple[Any, ...]] = ()  # their defaults
    _tallies: ClassVar[tuple[tuple[int, str], ...]] = ()  # the places and names of the fields that count samples
    _own: ClassVar[staticmethod[[Any], tuple[Any, ...]]] = staticmethod(lambda at: ())
    source: Stage[Any] | None
    lane: Lane
    at: Any
    items: Iterator[Out]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        _known[functional_name(cls)] = cls
        if "At" in cls.__dict__:
            cls._defaults = {field.name: field.default for field in fields(cls.At)}
            cls._beginning = tuple(cls._defaults.values())
            cls._tallies = tuple(
                (place, name) for place, name in enumerate(cls._defaults) if name in (*COUNTED, *TROUBLE)
            )
            get: Callable[[Any], Any] = attrgetter(*cls._defaults) if cls._defaults else lambda at: ()
            cls._own = staticmethod((lambda at: (get(at),)) if len(cls._defaults) == 1 else get)

    def __init__(self, source: Stage[Any] | None = None) -> None:
        if source is not None and not isinstance(source, Stage):
            raise TypeError(f"{type(self).__name__} needs a stage as its source, not {type(source).__name__}")
        self.source = source

    def run(self) -> Iterator[Out]:
        """Yield the items after ``self.at``."""
        raise NotImplementedError

    def mark(self) -> Mark:
        """Return the position after the item that was yielded last."""
        return self._own(self.at), self.source.mark() if self.source is not None else None

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

    # The first stage answers for the whole chain.

    @property
    def root(self) -> Stage[Any]:
        """The first stage of the chain."""
        return self if self.source is None else self.source.root

    @property
    def depth(self) -> int:
        """How many stages come before this one."""
        return 0 if self.source is None else self.source.depth + 1

    @property
    def host(self) -> Host:
        return self.root.host

    @property
    def seed(self) -> int:
        return self.root.seed

    @property
    def storage_options(self) -> dict[str, Any] | None:
        """How to reach the storage, as passed to the first stage of the chain; None if nothing was
        passed.
        """
        return None if self.source is None else self.source.storage_options

    @property
    def counts_delivered(self) -> bool:
        """Whether this stage or one before it counts delivered samples itself, since an item of the
        chain is not one sample.
        """
        return any(name == "delivered" for _, name in self._tallies) or (
            self.source is not None and not self.expands and self.source.counts_delivered
        )

    @property
    def divides_items(self) -> bool:
        """Whether this stage, the first of a chain, divides its items over the lanes."""
        return True

    def shards(self) -> tuple[int | None, str]:
        """Return how many shards the chain reads (None: unknown), and the fingerprint of their
        list.
        """
        return (None, "") if self.source is None else self.source.shards()

    def which_data(self) -> Data:
        """Return which shards the chain reads, in a form that also identifies them if they are
        moved: see ``wds_pipes.core.moved``.
        """
        return Data(self.shards()[1]) if self.source is None else self.source.which_data()

    def number_of(self, url: str) -> str | None:
        """Return an id of the shard with this URL in the chain, which does not change if shards are
        moved; None if no list has it.
        """
        return None if self.source is None else self.source.number_of(url)

    def where(self, mark: Mark | None, lane: Lane) -> str | None:
        """Return the URL of the shard at a position, for messages; None if there is none."""
        return self.source.where(mark and mark[1], lane) if self.source is not None else None

    @property
    def bytes_so_far(self) -> int:
        """How many bytes of shards a running chain has read."""
        return 0 if self.source is None else self.source.bytes_so_far

    @property
    def network(self) -> Network:
        """The chain's use of the network in this process."""
        return NO_NETWORK if self.source is None else self.source.network

    # What other modules need to know of a stage. Stages that users write can override these too.

    @property
    def chain(self) -> Iterator[Stage[Any]]:
        """The stages of the chain, from this one back to the first."""
        step: Stage[Any] | None = self
        while step is not None:
            yield step
            step = step.source

    @property
    def branches(self) -> Mapping[str, Stage[Any]]:
        """The chains that the stage reads from, by name, if it reads from others than its
        source.
        """
        return {}

    @property
    def items_are(self) -> str | None:
        """What the items of the chain are, see ``gives``; None if no stage says so."""
        return next((step.gives for step in self.chain if step.gives is not None), None)

    @property
    def sample_counts(self) -> Sequence[int] | None:
        """For the first stage of a chain: how many samples each shard has; None if unknown."""
        return None

    @property
    def samples_fingerprint(self) -> str | None:
        """For the first stage of a chain: a hash of these numbers of samples; None if they are
        unknown.
        """
        return None

    def epoch_shards(self, seed: int, epoch: int) -> list[tuple[int, int, int]]:
        """For the first stage of a chain: return its shards in the order of an epoch, each as its
        number and a range of samples. A range that ends at -1 means all samples, if their number is
        unknown.
        """
        raise NotImplementedError

    def changes_count(self) -> str | None:
        """Return why the stage may yield another number of items than it takes, for a message; None
        if it does not.
        """
        return None if self.keeps_count else f"{self.graph()[-1].partition('(')[0]}() may change their number"

    def epochs_differ(self) -> str | None:
        """For the first stage of a chain: return why epochs may differ in length, for a message;
        None if they do not.
        """
        return None

    @property
    def items_per_batch(self) -> int | None:
        """How many items the stage puts into a batch; None: it makes no batches."""
        return None

    def batches_of(self, count: int) -> int:
        """Return how many batches the stage makes of ``count`` items."""
        return count

    @property
    def held_items(self) -> int:
        """About how many items a running stage holds."""
        return 0

    @property
    def arrow(self) -> str:
        """The label of the arrow to this stage in a graph of the pipeline."""
        return ""

    def shown_options(self, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the options as the text of a pipeline shows them, and the text after the first of
        them.
        """
        return options, ""

    @classmethod
    def describe(cls, entry: dict[str, Any], lane: LaneFacts) -> str | None:
        """Return a description of a position that ``dump`` wrote; None: there is nothing to say."""
        return None

    @property
    def batches(self) -> int | None:
        """How many samples are in each item of the chain, if its last steps are known to make
        batches; otherwise None.
        """
        return None if self.source is None or not self.holds_nothing else self.source.batches

    @property
    def lack(self) -> Lack:
        """How the samples of a running chain fit the fields that it keeps, since it was opened."""
        return Lack() if self.source is None else self.source.lack

    def stall_clock(self) -> Callable[[], float]:
        """Return a function that returns for how many seconds this chain has waited for bytes from
        stores in this process. Only differences between two calls have a meaning.
        """
        return float if self.source is None else self.source.stall_clock()  # float() is 0.0

    def check_resumable(self) -> None:
        """Raise StateError if the position of this chain cannot be known exactly."""
        if self.source is not None:
            self.source.check_resumable()

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
        return [*(self.source.uncounted(before) if self.source is not None else []), without_counts(entry)]

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
