"""The contract of a stage, and its running copies.

Rules:
1. A stage is a recipe: it has only options, which are checked when it is built and never change
   afterwards: nothing but ``__init__`` sets an attribute, or ``open`` in a running copy. What a
   loader adds to a chain is passed to these, in the ``Lane``. ``open`` makes a running copy with a
   position of its own, so any number of streams can run over one recipe.
2. A running stage is a generator (``run``) over its source. At each yield, everything that it needs
   to continue is in ``self.at`` (a dataclass of numbers and strings whose defaults are the
   beginning) and in the position of its source. Data is never part of a position.
3. A stage that has read ahead keeps an ``earlier`` position of its source, which ``mark`` returns,
   and drops the items that it had already yielded when it is opened there again. Its docstring says
   how much it may read again. If its position counts items from there, they must be the same items
   again: ``ReadsAgain`` refuses others, and ``FlatMap`` and ``then`` derive from it.
4. A position has three forms. Live: ``at`` of each running stage. A mark: a nest of tuples, ``(own
   values, mark of the source)``, cheap enough to take for each item. JSON: a dict for each stage,
   which ``wds_pipes.core.chain`` makes of a mark when a state is requested.
5. The stream commits a position when an item is returned, not before: a state is correct at any
   time, also after an exception.
6. A state that does not fit is refused with a message; no stage ever starts again silently.
7. Whether a stage has ended is part of its position, even if its source has more items: after the
   end, ``mark`` returns an ``Ended``, and a stage that is opened there yields nothing. ``open``
   does this for all stages. A step after the stage may still hold items when the stage ends, so
   states can be taken at that point.
8. Each running copy has its own lists, dicts, sets and deques: see ``running_copy``. What the steps
   of a running chain count together stands in ``lane.meters``, never in a class: a stage that opens
   a chain derives the lane of that chain from its own.
9. What concerns a whole chain is no part of a stage: ``Chain`` answers it. A first stage is a
   ``Source``; a stage that has something to report while it runs is also a ``Reports``.
"""

from __future__ import annotations

import copy
import inspect
from abc import abstractmethod
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar, cast

from wds_pipes.core.counts import COUNTED, DONE, NO_NETWORK, TROUBLE, Lack, Network
from wds_pipes.core.digest import DIGESTS
from wds_pipes.core.graph import GraphStep
from wds_pipes.core.lane import Context, Lane, LaneFacts
from wds_pipes.core.moved import Data
from wds_pipes.core.options import check_seed, nearest
from wds_pipes.core.state import Grown

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Mark = tuple[tuple[Any, ...], Any]
Out = TypeVar("Out")

# What ``next(items, END)`` returns at the end of a source. Not None: a step of the user's may yield
# that by mistake, and the rest of the epoch would be lost.
END: Any = object()


class Ended(NamedTuple):
    """The mark of a stage that has ended."""

    own: tuple[Any, ...]
    before: Any


def close_running(stage: Any) -> None:
    """Close a running chain.

    If it is in the middle of ``next()``, in another thread or below a signal handler, it is closed
    when that has ended and nothing refers to it.
    """
    try:
        stage.close()
    except ValueError as error:
        if "already executing" not in str(error):
            raise


_CONTAINERS = frozenset({list, dict, set, bytearray, deque, defaultdict, OrderedDict, Counter})


_Running = TypeVar("_Running", bound=Any)


def running_copy(stage: _Running) -> _Running:
    """Return a copy of a stage that can run. It shares the options with the stage, but has its own
    lists, dicts, sets, bytearrays and deques, also nested ones.

    Objects of other types are shared, and so are the attributes named in ``shared``. An object of
    another type that changes while the stage runs must be made in ``run``.
    """
    running = copy.copy(stage)
    copies: dict[int, Any] = {}
    for name, value in vars(stage).items():
        if type(value) in _CONTAINERS and name not in stage.shared:
            setattr(running, name, own_copy(value, copies))
    return running


def begin(running: Any, mark: Mark | None, recipe: Any = None) -> None:
    """Set the ``items`` of a copy that was opened at ``mark``: the items of ``run``, or nothing if
    the stage had ended there. Those of ``recipe`` pass through the taps of the lane.
    """
    running._resumed = mark is not None
    if isinstance(mark, Ended):
        _stay(running, mark)
        items = running.items = Items()
    else:
        items = running.run()
        if not hasattr(items, "__next__"):
            name = type(running).__name__
            raise TypeError(f"run() of {name} must be a generator, which yields the items: it returned {items!r:.80}")
        running.items = Items(items, _at_end(running))
    for step, tap in running.lane.taps:
        if step is recipe:
            running.items = Items.from_iterable(tap(running, running.items))
    if hasattr(items, "close"):
        running.items.close = items.close


class Items(chain[Out]):
    """The items of a stage; after the last one, the stage is marked as ended. A generator around
    ``run`` would cost 20 ns per item; this costs 3 ns (Python 3.11).
    """

    @staticmethod
    def close() -> None:
        """Close the generator of the stage; ``begin`` replaces this by the generator's method."""


def _at_end(running: Any) -> Iterator[Any]:
    _stay(running, Ended(*running.mark()))
    yield from ()


def _stay(running: Any, mark: Ended) -> None:
    # replaced only at the end, so that mark() costs nothing more before it
    running.mark = lambda: mark


def own_copy(value: Any, copies: dict[int, Any] | None = None) -> Any:
    """Return a copy of a container, and of the containers in it; ``copies`` has those copied so
    far, by the ids of the originals.
    """
    if type(value) not in _CONTAINERS:
        return value
    copies = {} if copies is None else copies
    if id(value) in copies:
        return copies[id(value)]
    again = copies[id(value)] = copy.copy(value)
    places = again.items() if isinstance(again, dict) else enumerate(again) if isinstance(again, (list, deque)) else ()
    for place, part in list(places):
        if type(part) in _CONTAINERS:
            again[place] = own_copy(part, copies)
    return again


# The contract


State = dict[str, Any]

_SCOPES = ("item", "window", "lane")
_RUNNING = ("lane", "at", "items", "earlier")  # what a running copy has, and a recipe never
_DECLARED = ("order_options", "tallies", "scope", "keeps_count", "counts_items")
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


class Stage(Generic[Out]):
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
            refused if they differ. A stage that has options declares it, as () if none decides.
        tallies: names of the fields of ``At`` that only count samples for ``counts()``: delivered,
            filtered, skipped, dropped. ``run`` never reads them: they may begin at 0 again.
        scope: what an item of the stage may depend on. A scope that is too wide costs only what it
            allows; one that is too narrow loses or repeats samples when an epoch is repartitioned.

            - ``"item"``: on one item of the source alone, or for a batch on neighbours. When the
              stage yields, it has yielded or dropped for good all that it took: it remembers no
              item, and its ``mark`` returns the source's current position, but for items that it
              reads ahead with their positions, as ``threads=`` do. Then it may run over several
              sources in a row: after ``batch_samples``, PipeLoader fills batches across the
              segments of a lane. Over a ``SampleList``, PipeLoader yields the same global batches
              on any number of ranks and workers.
            - ``"window"``: on items that came shortly before or after. PipeLoader may divide the
              rest of the lane. Then each part begins with an empty window.
            - ``"lane"``: on all items that its lane has had. PipeLoader does not divide the rest of
              the lane. So it is for a stage that does not say.
        keeps_count: whether the stage yields as many items as it takes (or batches of all of them),
            so that the length of an epoch stays known.
        counts_items: whether the position or the random numbers of the stage count the items of its
            source. Then a state is refused if an item was another number of samples when it was
            saved, such as after another size of ``batch_samples`` before this stage.
        depth: how many stages come before it.
        expands: whether it makes several items of one: see ``FlatMap``.
        gives: what its items are: ``"shards"``, ``"members"``, ``"references"`` (to samples) or
            ``"samples"``; None: the same as the items of its source.
        items_per_batch: how many items the stage puts into a batch; None: it makes no batches.
        shared: names of attributes with a large list, dict or set that never changes: the running
            copies share it. Of any other list, dict or set, each copy has its own.

    ``check_resume`` tries what a stage says of itself here, but it cannot tell a ``scope`` of
    ``"window"`` from one of ``"lane"``.
    """

    @dataclass(slots=True)
    class At:
        """The position: numbers and strings whose defaults are the beginning.

        A field keeps the type of its default. One that begins at 0 is a count, never negative;
        0.0 stands for any finite number, and None for any plain value.
        """

    order_options: ClassVar[tuple[str, ...]] = ()
    tallies: ClassVar[tuple[str, ...]] = ()
    scope: str = "lane"
    keeps_count: bool = False
    expands: ClassVar[bool] = False
    gives: ClassVar[str | None] = None
    shared: ClassVar[tuple[str, ...]] = ()

    _defaults: ClassVar[dict[str, Any]] = {}  # of the fields of At
    _beginning: ClassVar[tuple[Any, ...]] = ()  # their defaults
    _tallies: ClassVar[tuple[tuple[int, str], ...]] = ()  # the places and names of ``tallies`` in At
    _own: ClassVar[staticmethod[[Any], tuple[Any, ...]]] = staticmethod(lambda at: ())
    _holds_none: ClassVar[bool] = False  # whether it never reads items again, although its scope is not "item"
    # whether the items have the keys and URLs that those of the source have; None: it is not known
    _keeps_keys: ClassVar[bool | None] = None
    # whether the order of its source says which item comes when, although its scope is not "item"
    _foreseen: ClassVar[bool] = False
    _resumed = False  # while running, whether it was opened at a position
    _draws = False  # whether it draws random numbers for each sample: see ``wds_pipes.core.occurrences``
    _ends: bool | None = None  # whether its epoch has an end; None: as that of its source
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
            needed = cls._defaults.keys()
            cls._defaults = _read_defaults(cls)
            if not (is_built_in(cls) or needed <= cls._defaults.keys()):
                raise TypeError(
                    f"{cls.__name__}.At must derive from {cls.__mro__[1].__name__}.At, whose fields it lacks"
                )
            cls._beginning = tuple(cls._defaults.values())
            get: Callable[[Any], Any] = attrgetter(*cls._defaults) if cls._defaults else lambda at: ()
            own: Callable[[Any], tuple[Any, ...]] = (lambda at: (get(at),)) if len(cls._defaults) == 1 else get
            # a list that the stage changes while it runs would change in the mark, too
            copied = None in cls._beginning and not is_built_in(cls)
            cls._own = staticmethod((lambda at: tuple(map(own_copy, own(at)))) if copied else own)
        if wrong := set(vars(cls).get("tallies", ())) - {*COUNTED, *TROUBLE, *DIGESTS, DONE}.intersection(
            cls._defaults
        ):
            names, field, base = ", ".join(map(repr, (*COUNTED, *TROUBLE))), min(wrong), cls.__mro__[1]
            at = f"{'wp.' if is_built_in(base) else ''}{base.__name__}.At"
            mend = f". Declare it: @dataclass(slots=True), class At({at}): {field}: int = 0"
            raise TypeError(
                f"{cls.__name__}.tallies has {field!r}: it is a tuple of fields of At, which are some of {names}"
                f"{mend if field in (*COUNTED, *TROUBLE) else ''}"
            )
        for word in () if is_built_in(cls) else vars(cls):
            if not hasattr(Stage, word) and (meant := nearest(word, _DECLARED, cutoff=0.85)) is not None:
                raise TypeError(f"{cls.__name__}.{word} says nothing to the package. Did you mean {meant}?")
        if cls.scope not in _SCOPES:
            raise TypeError(f"{cls.__name__}.scope must be one of {', '.join(map(repr, _SCOPES))}, not {cls.scope!r}")
        cls._tallies = tuple(
            (place, name) for place, name in enumerate(cls._defaults) if name in cls.tallies and name != DONE
        )

    def __init__(self, source: Stage[Any] | None = None) -> None:
        if source is not None and not isinstance(source, Stage):
            raise TypeError(
                f"{type(self).__name__} needs a stage as its source, not {type(source).__name__}: call the method of a "
                f"pipe, pipe.{functional_name(type(self))}(...)"
                + ("" if is_built_in(type(self)) else f", after register_stage({type(self).__name__})")
            )
        self.source = source

    def __iter__(self) -> Iterator[Out]:
        raise TypeError(
            f"{type(self).__name__} is a stage, a recipe. Iterate over a pipe of it; in run(), iterate over "
            "self.source.items"
        )

    @abstractmethod  # see ``unfinished``
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
        # a list that the stage changes while it runs would change in the mark, too
        running.lane, running.at = lane, self._at(tuple(map(own_copy, own or ())))
        if self.source is not None:
            running.source = self.source.open(replace(lane, occurrences=True) if self._draws else lane, before)
        begin(running, mark, self)
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
        return cast(Any, self.At)(*(own or ()))

    def close(self) -> None:
        """Stop a running stage and all stages before it; files are closed when this returns."""
        close = getattr(self.items, "close", None)
        if close is not None:
            close()
        if self.source is not None:
            self.source.close()

    def problem(self, at: Any) -> str | None:
        """Return why ``at``, a position from a state, is impossible for this stage, for a message;
        None if it is possible. The types of its values were checked before.
        """
        return None

    @classmethod
    def describe(cls, entry: dict[str, Any], lane: LaneFacts) -> str | None:
        """Return a description of a position in a state, of which ``entry`` has the values that are
        not the default; None: there is nothing to say.
        """
        return None

    @property
    def depth(self) -> int:
        return 0 if self.source is None else self.source.depth + 1

    @property
    def counts_items(self) -> bool:
        return self.scope != "item"

    @property
    def items_per_batch(self) -> int | None:
        return None

    def batches_of(self, count: int) -> int:
        """Return how many batches the stage makes of ``count`` items."""
        return count

    def changes_count(self) -> str | None:
        """Return why the stage may yield another number of items than it takes, for a message; None
        if it does not.
        """
        return None if self.keeps_count else f"{self._in_graph(counted=False).name}() may change their number"

    def unforeseen(self) -> str | None:
        """Return why it is not known without reading which of its items comes when, for a message;
        None if that follows from the order of its source.
        """
        if (reason := self.changes_count()) is not None:
            return reason
        foreseen = self._foreseen and is_built_in(type(self))  # a subclass may change it
        known = foreseen or (self.scope == "item" and not self.expands)
        name = self._in_graph(counted=False).name
        return None if known else f"{name}() decides while it runs in which order its items come"

    def _in_graph(self, *, counted: bool) -> GraphStep:
        """Return the stage as the graph of a state names it, with the options that decide the
        order.

        Args:
            counted: a stage after this one depends on the numbers of its items, so options that
                decide what one item is are included too.
        """
        return GraphStep.of(functional_name(type(self)), {name: getattr(self, name) for name in self.order_options})


# the methods that a class must define, if a base has them
_NEEDED = {
    "run": "(self), a generator that yields the items",
    "expand": "(self, item), which returns the items made of one",
    "read": "(self, start, stop), which yields these rows",
}


def unfinished(stage: Stage[Any]) -> str | None:
    """Return what the class of a stage still needs, for a message; None if nothing."""
    kind = type(stage)
    for name, what in _NEEDED.items():
        if getattr(getattr(kind, name, None), "__isabstractmethod__", False):
            return f"{kind.__name__} defines no {name}{what}"
    if "source" not in vars(stage):
        base: Any = next(base for base in kind.__mro__[1:] if "__init__" in vars(base))
        _, first, *_ = inspect.signature(base.__init__).parameters
        return f"{kind.__name__}.__init__ must call super().__init__({first})"
    names: Any = kind.order_options
    if isinstance(names, str):
        return f"{kind.__name__}.order_options is the string {names!r}, not a tuple of names: write ({names!r},)"
    for name in names:
        if not hasattr(stage, name):
            return f"{kind.__name__}.order_options names {name!r}, and __init__ sets no self.{name}"
    for name in vars(stage):
        if name in _RUNNING or callable(getattr(kind, name, None)):
            return f"{kind.__name__}.__init__ sets self.{name}, which the package uses itself: give it another name"
    return None


class Reorders:
    """A stage that yields its items in another order, a function of their numbers in the lane."""

    def leaving(self, lane: Lane, start: int, stop: int, count: int) -> npt.NDArray[np.int64]:
        """Return which items of a lane it yields at places ``start`` to ``stop - 1``, by their
        numbers: int64, shape (stop - start,).

        Args:
            lane: the lane.
            start: the first place.
            stop: the place after the last, at most ``count``.
            count: how many items the lane has.
        """
        raise NotImplementedError

    def place_of(self, lane: Lane, number: int, count: int) -> int:
        """Return the place at which an item of a lane is yielded: the inverse of ``leaving``."""
        raise NotImplementedError


class SamplePlace(NamedTuple):
    """The place of a sample in a lane that reads shards.

    Attributes:
        ranges: how many shard ranges of the lane come before it.
        offset: the byte of its shard where it begins; 0: it is the first of its range.
        number: how many samples of its shard come before it.
    """

    ranges: int
    offset: int
    number: int


class OpensAnywhere:
    """A stage that can be opened before any sample whose place is known, without reading what comes
    before it.
    """

    def at_sample(self, at: Any, place: SamplePlace) -> Any:
        """Return the position of the stage before a sample; ``at`` is an earlier position, whose
        counts stay, since nothing between them is skipped.
        """
        raise NotImplementedError


class Reports:
    """A stage that has something to report while it runs. ``Chain`` sums up the reports.

    Attributes:
        network: its use of the network in this process.
        bytes_so_far: how many bytes of shards it has read.
        held_items: about how many items it holds.
        opened: how many of the ranges of its lane had been begun when it took what it yields now;
            None: as many as its source has begun.
    """

    @property
    def network(self) -> Network:
        return NO_NETWORK

    @property
    def bytes_so_far(self) -> int:
        return 0

    @property
    def held_items(self) -> int:
        return 0

    @property
    def opened(self) -> int | None:
        return None

    def lack(self, before: Lack) -> Lack:
        """Return why the chain yielded nothing, since it was opened; ``before``: the same of the
        stages before this one.
        """
        return before


class Limited:
    """A stage that counts what ``max_errors`` limits.

    Attributes:
        limited: the name of this count among the counts of a chain; None if there is no limit.
        counter: the field of ``At`` with this count.
    """

    limited: str | None = None
    counter: ClassVar[str] = "skipped"


class Order:
    """What is known of the epochs of a source without reading them. A source that knows something
    derives from this, too.

    Attributes:
        divides_shards: whether PipeLoader divides its epochs by the shards that ``epoch_shards``
            lists.
        sticky: whether a lane keeps its shards from epoch to epoch.
        is_global: whether the source can yield any slice of one order of an epoch: see ``Slice``.
        grown: the last epochs that have fewer shards than the list, each with the number of its
            shards, which are the first ones of the list.
    """

    divides_shards: ClassVar[bool] = False
    sticky: bool = False
    is_global: ClassVar[bool] = False
    grown: Grown = ()

    @property
    def epoch_order(self) -> Order:
        return self

    @property
    def sample_counts(self) -> Sequence[int] | None:
        """How many samples each shard has; None if unknown."""
        return None

    def samples_in(self, epoch: int) -> int:
        """Return how many samples an epoch has; they are counted."""
        return sum(self.sample_counts or ())

    @property
    def samples_fingerprint(self) -> str | None:
        """A hash of these numbers of samples; None if they are unknown."""
        return None

    def epoch_shards(self, seed: int, epoch: int) -> Sequence[tuple[int, int, int]]:
        """Return the shards in the order of an epoch, each as its number and a range of samples. A
        range that ends at -1 means all samples, if their number is unknown.
        """
        return []

    def epochs_differ(self) -> str | None:
        """Return why epochs may differ in length, for a message; None if they do not."""
        return None

    def lane_in(self, lane: Lane, epoch: int) -> Lane:
        """Return a lane in another epoch, with the shards that it has."""
        return replace(lane, epoch=epoch)

    def place_in(self, lane: Lane) -> Callable[[int], int] | None:
        """Return a function from the number of an item in a lane, from 0 on, to its place in the
        one order of the epoch; None: the lane is no slice of it.
        """
        return None

    def taken(self, entry: dict[str, Any]) -> int:
        """Return how many items of a lane that is a slice came before a position in a state."""
        raise NotImplementedError

    def rest_of(self, entry: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return how many ranges of its lane are done at a position in a state, and the same
        position in the lane without these ranges.
        """
        return entry.get("next", 0), {name: value for name, value in entry.items() if name != "next"}


_UNKNOWN = Order()


class Branching:
    """A source that runs other chains: its ``branches``."""

    def weight_of(self, branch: str) -> str:
        """Return the weight of a chain, as text; empty: it has none."""
        return ""

    def seed_of(self, branch: str, seed: int) -> int:
        """Return the seed by which it runs a chain; ``seed``: that of its own lane."""
        raise NotImplementedError


class Source(Reports, Stage[Out]):
    """The first stage of a chain.

    Attributes:
        seed: from which all random decisions of the chain derive.
        seed_given: whether the caller has passed it: otherwise a mix derives another one from the
            name of the source.
        context: the iteration context of the chain.
        storage_options: how to reach the storage; None: nothing was passed.
        on_error: what the steps after it do with bad data, unless they say it: see ``Tolerant``.
        divides: whether PipeLoader can divide its epochs into lanes.
        divides_items: whether it divides its items over the lanes itself.
        counts_epochs: whether it reads from something that counts epochs itself: then only a mark
            says where an epoch begins.
        branches: the chains that it mixes, by name.
    """

    keeps_count = True
    scope = "item"
    divides: ClassVar[bool] = False
    counts_epochs: bool = False
    seed: int = 0
    seed_given: bool = False
    context: Context
    storage_options: dict[str, Any] | None = None
    on_error: Any = "raise"
    source: None

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self.seed, self.seed_given = 0 if seed is None else check_seed(seed), seed is not None
        self.context = Context()

    @property
    def epoch_order(self) -> Order:
        """What is known of an epoch without reading it."""
        return _UNKNOWN

    @property
    def branches(self) -> Mapping[str, Stage[Any]]:
        return {}

    @property
    def divides_items(self) -> bool:
        return True

    def which_data(self) -> Data:
        """Return which shards the chain reads, in a form that also identifies them if they are
        moved: see ``wds_pipes.core.moved``.
        """
        return Data()

    def number_of(self, url: str) -> str | None:
        """Return an id of the shard with this URL in the chain, which does not change if shards are
        moved; None if no list has it.
        """
        return None

    def where(self, own: tuple[Any, ...], lane: Lane) -> str | None:
        """Return the URL of the shard at a position with these values (none of them: the
        beginning), for messages; None if there is none.
        """
        return None

    def check_resumable(self) -> None:
        """Raise StateError if the position of this chain cannot be known exactly."""


# Running a single step


class Given(Stage[Any]):
    """Items without a position, as the source of a running step. What the steps before leave out
    is not known.
    """

    def __init__(self, items: Iterator[Any]) -> None:
        super().__init__()
        self.items = items

    def run(self) -> Iterator[Any]:
        return self.items

    def mark(self) -> Mark:
        return (), None


def run_over(step: Stage[Any], lane: Lane, source: Stage[Any]) -> Stage[Any]:
    """Return a running copy of a step, from its beginning, over a source that runs."""
    running = running_copy(step)
    running.lane, running.at, running.source = lane, step._at(None), source
    begin(running, None)
    return running
