"""The contract of a stage, and the stream that runs a chain of them.

Rules:
1. A stage is a recipe: options only, checked when it is built, never changed after. ``open`` makes a running copy of it with a position of its own, so any
   number of streams can run over one recipe.
2. A running stage is a generator (``run``) over its source. At each yield everything it needs to go on is in ``self.at`` (a dataclass of numbers and
   strings whose defaults are the beginning) and in the position of its source. Data is never part of a position.
3. A stage that has read ahead keeps an *earlier* position of its source, overrides ``mark`` to give that one, and drops what was already given when it is
   opened there again. It documents how much it may read again.
4. A mark is a nest of tuples, ``(own values, mark of the source)``: cheap enough to take for each item. Dicts are built only when a state is asked for.
5. The stream commits a position when an item is handed out, not before: a state is right at any time, also after an exception.
6. A state that does not fit is refused in words; nothing ever starts again silently.
7. That a stage has ended is part of its position, whether or not its source has more: after the end, ``mark`` is an ``Ended``, and a stage that is opened there
   gives nothing. ``open`` sees to this for all stages: a step after it may still hold items when it ends, so states are taken there.
8. Each running copy has lists, dicts, sets and deques of its own: see ``running_copy``.
"""

from __future__ import annotations

import copy
import inspect
import logging
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import chain
from operator import attrgetter
from types import TracebackType
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

from wds_pipes.errors import SampleError, StateError, WdsError
from wds_pipes.moved import MEND, Data, Move
from wds_pipes.ordering import mix
from wds_pipes.saved import (
    COUNTED,
    LIMITED,
    MOST,
    STATE_VERSION,
    TROUBLE,
    Saved,
    SavedLane,
    damaged,
    is_count,
    listed,
    plural,
    read_count,
    read_finite,
    read_state,
    shown,
    some,
)
from wds_pipes.tracebacks import shorten, shortened

logger = logging.getLogger("wds_pipes")

LOGGED = 20  # so many skipped things a stage and epoch are logged

Out = TypeVar("Out")
Mark = tuple[tuple[Any, ...], Any]
State = dict[str, Any]


class Ended(NamedTuple):
    """The mark of a stage that has ended."""

    own: tuple[Any, ...]
    before: Any


_ENDED = "at end"  # what an entry of a state says then; no field of a position can have this name
_CONTAINERS = frozenset({list, dict, set, bytearray, deque, defaultdict, OrderedDict, Counter})


@dataclass(frozen=True, slots=True)
class Lane:
    """Which part of which epoch a running chain gives: lane ``number`` of ``of``.

    ``generation`` counts how often the epoch was dealt again, and ``shards`` are the pieces of shards to read, where they are not those of the plain deal
    (None): see ``wds_pipes.lanes``. ``padding`` tells whether samples are repeats that fill up an epoch, where samples are to say so (None: they are not).
    """

    seed: int
    epoch: int
    number: int = 0
    of: int = 1
    generation: int = 0
    shards: tuple[tuple[int, int, int], ...] | None = None
    padding: bool | None = None

    def key(self, *salt: int) -> int:
        """The 64-bit key of this lane's random decisions; ``salt`` tells one use from another."""
        again = (self.generation,) if self.generation else ()
        return mix(self.seed, self.epoch, self.number, self.of, *again, *salt)


@dataclass(slots=True)
class Host:
    """What whoever iterates decides for a whole chain: the epoch of the next pass, and which lane of how many this process gives."""

    epoch: int = 0
    lane: int = 0
    lanes: int = 1
    tell_end: Callable[[int, bool], bool] | None = None  # see dataset.LaneEnds
    pid: int | None = None  # of the main process, and the epoch that it last gave to DataLoader's workers
    hosted: int | None = None


class Lack(NamedTuple):
    """How the samples of a running chain fit the fields that ``group_by_key(fields=...)`` keeps.

    Attributes:
        samples: how many had none of them.
        fits: whether another one had some.
        wanted: the fields to keep.
        left_out: other fields that were seen, some of them if there are many.
    """

    samples: int = 0
    fits: bool = False
    wanted: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()

    @classmethod
    def of_all(cls, lacks: Iterable[Lack]) -> Lack:
        """That of several chains together."""
        both = cls()
        for lack in lacks:
            both = cls(both.samples + lack.samples, both.fits or lack.fits, both.wanted | lack.wanted, both.left_out | lack.left_out)
        return both

    def explains(self, counts: Mapping[str, int]) -> bool:
        """Whether, by ``counts``, all that became of the samples is that they had none of the fields."""
        return not self.fits and self.samples > 0 and self.samples == sum(counts.get(name, 0) for name in COUNTED)

    def error(self, whose: str = "this epoch") -> SampleError:
        """What to raise where it explains that nothing was given."""
        many = f"all {self.samples:,} samples" if self.samples > 1 else "the only sample" if self.samples else "all samples of the other lanes"
        seen = f"; they have {listed(self.left_out)}" if self.left_out else ""
        wanted = f"[{listed(self.wanted)}]" if self.wanted else "..."
        return SampleError(f"{whose} gave nothing: {many} had none of the fields that group_by_key(fields={wanted}) keeps{seen}. Correct the names.")


class Network(NamedTuple):
    """What reading from stores has taken in a process.

    Attributes:
        requests: how many were made.
        retries: how many of these asked again for what had not come.
        bytes_fetched: how many bytes came.
        stall_seconds: how long was waited for them.
    """

    requests: int = 0
    retries: int = 0
    bytes_fetched: int = 0
    stall_seconds: float = 0.0


NO_NETWORK = Network()


def check_count(what: str, value: object, *, least: int = 1, most: int | None = None) -> int:
    """``value`` as an int of at least ``least`` and at most ``most``, else an error that names the option."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{what} must be an int, not {value!r}")
    if value < least:
        raise ValueError(f"{what} must be at least {least}, not {value}")
    if most is not None and value > most:
        raise ValueError(f"{what} must be at most {most}, not {shown(value)}")
    return value


def check_choice(what: str, value: object, *choices: str) -> str:
    """``value`` if it is one of ``choices``, else an error that lists them."""
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, choices))}, not {value!r}")
    return str(value)


def functional_name(kind: type) -> str:
    """The method name of a class: ``LoadTar`` is ``load_tar``."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in kind.__name__).lstrip("_")


def shown_signature(kind: type, *, returns: object = inspect.Signature.empty) -> inspect.Signature:
    """How to call a class, or a method made of it: names and defaults as ``help()`` shows them. The types are for editors, which read them from the source."""
    signature = inspect.signature(kind)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return signature.replace(parameters=plain, return_annotation=returns)


class Stage(Generic[Out]):
    """One step of a pipeline. Subclasses write ``__init__`` (options), ``At`` (the position) and ``run`` (the generator).

    Attributes:
        source: the stage before this one; None for the first.
        lane: while running, which part of which epoch this is.
        at: while running, the own position.
        items: while running, the generator of this stage's items.
        order_options: names of the options that decide which items come in which order: a state is refused where they differ.
        counts_items: whether what the stage gives depends on the number that an item of its source has.
        holds_nothing: whether the stage has nothing of its source in hand when it yields, so that what is behind it may be run over several sources.
        shared: names of attributes with a large list, dict or set that never changes: the running copies share it. They have their own copy of any other.
    """

    @dataclass(slots=True)
    class At:
        """The position: numbers and strings whose defaults are the beginning."""

    order_options: ClassVar[tuple[str, ...]] = ()
    shared: ClassVar[tuple[str, ...]] = ()
    holds_nothing: ClassVar[bool] = False
    counts_itself: ClassVar[bool] = False
    counts_items: bool = False
    limited: str | None = None  # the name of the count that max_errors bounds
    _defaults: ClassVar[dict[str, Any]] = {}  # of the fields of At
    _beginning: ClassVar[tuple[Any, ...]] = ()  # their defaults
    _tallies: ClassVar[tuple[tuple[int, str], ...]] = ()  # those of them that count samples
    _own: ClassVar[staticmethod[[Any], tuple[Any, ...]]] = staticmethod(lambda at: ())
    source: Stage[Any] | None
    lane: Lane
    at: Any
    items: Iterator[Out]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "At" in cls.__dict__:
            cls._defaults = {field.name: field.default for field in fields(cls.At)}
            cls._beginning = tuple(cls._defaults.values())
            cls._tallies = tuple((place, name) for place, name in enumerate(cls._defaults) if name in (*COUNTED, *TROUBLE))
            get: Callable[[Any], Any] = attrgetter(*cls._defaults) if cls._defaults else lambda at: ()
            cls._own = staticmethod((lambda at: (get(at),)) if len(cls._defaults) == 1 else get)

    def __init__(self, source: Stage[Any] | None = None) -> None:
        if source is not None and not isinstance(source, Stage):
            raise TypeError(f"{type(self).__name__} needs a stage as its source, not {type(source).__name__}")
        self.source = source

    def run(self) -> Iterator[Out]:
        """Give the items that come after ``self.at``."""
        raise NotImplementedError

    def mark(self) -> Mark:
        """The position after the item given last."""
        return self._own(self.at), self.source.mark() if self.source is not None else None

    def open(self, lane: Lane, mark: Mark | None = None) -> Stage[Out]:
        """A running copy of this stage and all before it, at ``mark`` (None: the beginning)."""
        own, before = mark or (None, None)
        running = running_copy(self)
        running.lane = lane
        running.at = self._at(own)
        if self.source is not None:
            running.source = self.source.open(lane, before)
        begin(running, mark)
        return running

    def start(self, offset: int = 0, *, ahead: bool = False) -> None:
        """Let a running stage ask for what it will need first, without waiting for it: for whoever opens several chains, so that they wait together.

        Args:
            offset: the byte of its first shard that will be read first.
            ahead: it is not its turn yet, so one connection will do.
        """
        if self.source is not None:
            self.source.start(offset, ahead=ahead)

    def _at(self, own: tuple[Any, ...] | None) -> Any:
        """The position with these values; None: the beginning."""
        at = cast(Any, self.At)
        return at(*(own or ()))

    def close(self) -> None:
        """Stop a running stage and all before it; files are closed before this returns."""
        close = getattr(self.items, "close", None)
        if close is not None:
            close()
        if self.source is not None:
            self.source.close()

    # What the whole chain shares is asked of its first stage.

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
        """How to reach the storage, as the first stage of the chain was told; None if it was not."""
        return None if self.source is None else self.source.storage_options

    @property
    def counts_delivered(self) -> bool:
        """Whether a step up to this one counts the samples that it delivered, since the chain's items are more than one each."""
        return any(name == "delivered" for _, name in self._tallies) or (self.source is not None and self.source.counts_delivered)

    @property
    def deals(self) -> bool:
        """Whether this stage, the first of a chain, deals what it gives to the lanes."""
        return True

    def shards(self) -> tuple[int | None, str]:
        """How many shards the chain reads (None: unknown) and the fingerprint of their list."""
        return (None, "") if self.source is None else self.source.shards()

    def which_data(self) -> Data:
        """Which shards the chain reads, also where they lie elsewhere: see ``wds_pipes.moved``."""
        return Data(self.shards()[1]) if self.source is None else self.source.which_data()

    def number_of(self, url: str) -> str | None:
        """What tells the shard with this URL from the others of the chain, wherever they lie; None where no list has it."""
        return None if self.source is None else self.source.number_of(url)

    def where(self, mark: Mark | None, lane: Lane) -> str | None:
        """The URL of the shard at a position, for people; None where there is none."""
        return self.source.where(mark and mark[1], lane) if self.source is not None else None

    @property
    def bytes_so_far(self) -> int:
        """How many bytes of shards a running chain has read."""
        return 0 if self.source is None else self.source.bytes_so_far

    @property
    def network(self) -> Network:
        """What the chain has used of the network in this process."""
        return NO_NETWORK if self.source is None else self.source.network

    @property
    def batches(self) -> int | None:
        """How many samples the chain puts into each of its items, where its last steps are known to make batches; else None."""
        return None if self.source is None or not self.holds_nothing else self.source.batches

    @property
    def lack(self) -> Lack:
        """How the samples of a running chain fit the fields that it keeps, since it was opened."""
        return Lack() if self.source is None else self.source.lack

    @property
    def waited(self) -> float:
        """For how many seconds the chain has waited in this process for bytes of stores."""
        return 0.0 if self.source is None else self.source.waited

    def check_resumable(self) -> None:
        """Raise StateError if the position of this chain cannot be known exactly."""
        if self.source is not None:
            self.source.check_resumable()

    def graph(self, *, counted: bool = False) -> list[str]:
        """The chain in words, from its first stage: names and the options that decide the order.

        ``counted``: a stage behind this one goes by the numbers of its items, so that what makes an item matters too.
        """
        before = self.source.graph(counted=counted or self.counts_items) if self.source is not None else []
        chosen = {name: getattr(self, name) for name in self.order_options}
        options = ", ".join(f"{name}={value!r}" for name, value in chosen.items() if value is not None and value is not False)
        return [*before, f"{functional_name(type(self))}({options})" if options else functional_name(type(self))]

    def counts(self, mark: Mark | None, delivered: int) -> dict[str, int]:
        """What became of the samples up to ``mark``, behind which ``delivered`` items were given."""
        counts = dict.fromkeys(COUNTED, 0)
        counts["delivered"] = delivered
        stage: Stage[Any] | None = self
        while stage is not None and mark is not None:
            if stage.counts_itself and stage is not self:
                inner = stage.counts(mark, counts["delivered"])
                return {**counts, **{name: counts.get(name, 0) + count for name, count in inner.items()}, "delivered": inner["delivered"]}
            own, mark = mark
            for place, name in stage._tallies:
                value = own[place]
                if name == "delivered":
                    counts[name] = value
                elif value:
                    counts[name] = counts.get(name, 0) + value
                    if stage.limited is not None and name == stage.counter:  # type: ignore[attr-defined]
                        counts[stage.limited] = counts.get(stage.limited, 0) + value
            stage = stage.source
        return counts

    def dump(self, mark: Mark | None) -> list[dict[str, Any]]:
        """A mark as JSON types: one dict a stage, from the first, without the values that are still the default."""
        entries = self.dump_mark(mark)
        if isinstance(mark, Ended) and not isinstance(mark.before, Ended):  # else its source says so, and has nothing for it either
            entries[-1][_ENDED] = True
        return entries

    def load(self, entries: list[dict[str, Any]]) -> Mark:
        """The mark that ``dump`` wrote.

        Raises:
            StateError: the chain cannot stand there.
        """
        if _ENDED not in entries[-1]:
            return self.load_mark(entries)
        if entries[-1][_ENDED] is not True:
            raise damaged(f"{functional_name(type(self))} cannot stand at {_ENDED}={shown(entries[-1][_ENDED])}")
        *before, entry = entries
        return Ended(*self.load_mark([*before, {name: value for name, value in entry.items() if name != _ENDED}]))

    def dump_mark(self, mark: Mark | None) -> list[dict[str, Any]]:
        """What ``dump`` gives, but for whether the stage has ended."""
        own, before = mark or ((), None)
        entries = self.source.dump(before) if self.source is not None else []
        first = not own or own == self._beginning  # as most of them are
        entries.append({} if first else {name: value for (name, default), value in zip(self._defaults.items(), own, strict=False) if value != default})
        return entries

    def relocate(self, entries: list[dict[str, Any]], move: Move) -> list[dict[str, Any]]:
        """What ``dump`` wrote, as it is for the shards of this chain where these are the same data as then.

        Raises:
            StateError: they are other data.
        """
        *before, entry = entries
        return [*(self.source.relocate(before, move) if self.source is not None else []), entry]

    def uncounted(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """What ``dump`` wrote, without counts of samples: for whoever goes on there, and counts what comes from there on."""
        *before, entry = entries
        return [*(self.source.uncounted(before) if self.source is not None else []), _without_counts(entry)]

    def load_mark(self, entries: list[dict[str, Any]]) -> Mark:
        """The mark that ``dump_mark`` wrote.

        Raises:
            StateError: the values are not of the types of ``At``, or ``problem`` refuses them.
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
        """Why this stage can never stand at ``at``, which a state holds, in words; None if it can. The types of its values are right already."""
        return None


_Running = TypeVar("_Running", bound=Stage[Any])


def running_copy(stage: _Running) -> _Running:
    """A copy of a stage that can run: it shares the options with it, but has lists, dicts, sets, bytearrays and deques, also inside of one another, of its own.

    What has another type is shared, as are the attributes named in ``shared``: an object that changes while the stage runs is made in ``run``.
    """
    running = copy.copy(stage)
    copies: dict[int, Any] = {}
    for name, value in vars(stage).items():
        if type(value) in _CONTAINERS and name not in stage.shared:
            setattr(running, name, _own_copy(value, copies))
    return running


def begin(running: Stage[Any], mark: Mark | None) -> None:
    """Set the ``items`` of a copy that was opened at ``mark``: what ``run`` gives, or nothing if it had ended there."""
    if isinstance(mark, Ended):
        _stay(running, mark)
        running.items = _Items()
    else:
        items = running.run()
        running.items = both = _Items(items, _at_end(running))
        if hasattr(items, "close"):
            both.close = items.close  # type: ignore[method-assign]


class _Items(chain[Out]):
    """The items of a stage, and then the note that it has ended. A generator around ``run`` would cost 20 ns for each item, this costs 3 (Python 3.11)."""

    @staticmethod
    def close() -> None:
        """Close the generator of a stage: replaced by its method."""


def _at_end(running: Stage[Any]) -> Iterator[Any]:
    _stay(running, Ended(*running.mark()))
    yield from ()


def _stay(running: Stage[Any], mark: Ended) -> None:
    running.mark = lambda: mark  # type: ignore[method-assign]  # so that no call of mark() before the end pays for the question


def _own_copy(value: Any, copies: dict[int, Any]) -> Any:
    """A container, and those in it, copied; ``copies`` has those that were, by the ids of the originals."""
    if type(value) not in _CONTAINERS:
        return value
    if id(value) in copies:
        return copies[id(value)]
    again = copies[id(value)] = copy.copy(value)
    places = again.items() if isinstance(again, dict) else enumerate(again) if isinstance(again, (list, deque)) else ()
    for place, part in list(places):
        if type(part) in _CONTAINERS:
            again[place] = _own_copy(part, copies)
    return again


def public_counts(counts: dict[str, int]) -> dict[str, int]:
    """Counts without those of single stages."""
    return {name: count for name, count in counts.items() if not name.startswith(LIMITED)}


def add_limited(limited: dict[str, int] | None, counts: dict[str, int]) -> dict[str, int] | None:
    """The counts of single stages, with those in ``counts``; a new dict, since positions hold the old one."""
    more = {name: count for name, count in counts.items() if name.startswith(LIMITED)}
    return {**(limited or {}), **{name: (limited or {}).get(name, 0) + count for name, count in more.items()}} if more else limited


def _without_counts(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_counts(part) for name, part in value.items() if name not in (*COUNTED, *TROUBLE, "batched", "limited")}
    return [_without_counts(part) for part in value] if isinstance(value, list) else value


def _alike(default: object, value: object) -> bool:
    """Whether ``value`` can stand where ``default`` stood."""
    if default is None:
        return True
    if isinstance(default, float):
        return read_finite(value) is not None
    if isinstance(default, int) and not isinstance(default, bool):
        return is_count(value, least=min(default, 0))
    return isinstance(value, type(default))


class Tolerant(Stage[Out]):
    """A stage that can meet bad data: ``on_error="raise"`` stops there, ``"skip"`` counts it and goes on, up to ``max_errors``.

    Here ``max_errors`` bounds what one running chain skips. PipeLoader bounds with it what all lanes of a rank skip together in an epoch.
    """

    @dataclass(slots=True)
    class At:  # noqa: D106 - see Stage
        skipped: int = 0

    def __init__(self, source: Stage[Any] | None, on_error: str, max_errors: int | None) -> None:
        super().__init__(source)
        self.on_error = check_choice("on_error", on_error, "raise", "skip")
        self.max_errors = None if max_errors is None else check_count("max_errors", max_errors, least=0)
        if self.max_errors is not None and on_error == "skip":
            self.limited = f"{LIMITED}{functional_name(type(self))} {self.depth}"

    counter: ClassVar[str] = "skipped"

    def skip(self, error: WdsError) -> None:
        """Count ``error`` and return, or raise it."""
        if self.on_error == "raise":
            raise error
        count = getattr(self.at, self.counter) + 1
        setattr(self.at, self.counter, count)
        if self.max_errors is not None and count > self.max_errors:
            error.add_note(f"That is error {count} in this epoch, and max_errors={self.max_errors}.")
            raise error
        if count <= LOGGED:
            logger.warning("skipped: %s%s", error, " Further ones are only counted." if count == LOGGED else "")


class Recipe(NamedTuple):
    """What a state must fit: see ``Stage.shards`` and ``Stage.graph``."""

    seed: int
    shards: int | None
    fingerprint: str
    graph: tuple[str, ...]
    data: Data
    samples: str | None = None  # the fingerprint of the numbers of samples, where lanes are dealt by them

    @property
    def of_data(self) -> dict[str, str]:
        """What a state says of the data, wherever they lie."""
        return {"data": self.data.id} if self.data.id else {}


class Position(NamedTuple):
    """Where a stream stands: ``delivered`` items of ``epoch`` were handed out, and ``mark`` is behind the last of them."""

    epoch: int
    delivered: int = 0
    mark: Mark | None = None
    ended: bool = False


class Stream(Generic[Out]):
    """A chain of stages that can be iterated, and whose state can be taken and loaded at any time.

    Each ``iter()`` is the next epoch; a loaded state continues its own. ``iter()`` does nothing until the first ``next()``, so a loaded state waits for the
    newest iterator that is really used, and starting one ends the one before. After an exception the iterator raises it again, and ``state_dict()`` is the
    position before the item that failed: load it to try again.
    """

    def __init__(self, stage: Stage[Out]) -> None:
        self.stage = stage
        self.at: tuple[int, int, Mark | None, bool] | None = None  # a Position, as a plain tuple where it is set at each item
        self._resume = False
        self._live: weakref.ref[Pass[Out]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_live": None}

    def __iter__(self) -> Pass[Out]:
        return Pass(self)

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` be ``epoch``, from its beginning; a loaded state of that same epoch still continues where it was."""
        check_count("epoch", epoch, least=0, most=MOST)
        if self._resume and self.position.epoch == epoch:
            return
        self.stage.host.epoch, self.stage.host.hosted = epoch, None
        self.at, self._resume = Position(epoch), False

    @property
    def position(self) -> Position:
        """Where the stream stands."""
        return Position(*self.at) if self.at is not None else Position(self.stage.host.epoch)

    def seek(self, position: Position) -> None:
        """Let the next ``iter()`` go on from ``position``."""
        self._stop_live("a state was loaded: continue with a new iter()")
        self.at, self._resume = position, True
        self.stage.host.epoch = position.epoch

    def begin(self) -> Position:
        """The position that the pass which starts now goes on from."""
        host = self.stage.host
        position = self.position if self._resume else Position(host.epoch)
        host.epoch = position.epoch + 1
        self.at, self._resume = position, False
        return position

    def give_up(self) -> None:
        """Let the next ``iter()`` be the next epoch, also after a state was loaded, unless nothing of this one was given."""
        position = self.position
        if not self._resume:
            self.at = None
        elif position.delivered or isinstance(position.mark, Ended):
            self.set_epoch(position.epoch + 1)

    def close(self) -> None:
        """End the current iterator and close what it has open."""
        self._stop_live("it was closed")

    def counts(self, position: Position | None = None) -> dict[str, int]:
        """The samples of the current epoch, or the one that just ended, by what became of them: delivered, filtered, skipped, dropped.

        Where there are any, also the ``skipped_shards`` that could not be opened, and the number of ``damaged`` places where members were lost.

        What a step before a ``shuffle_buffer`` counts lags in the middle of an epoch: it is counted up to where a resume would read again, at most
        2.25 * size samples before. At the end of the epoch all is counted.
        """
        position = self.position if position is None else position
        return public_counts(self.stage.counts(position.mark, position.delivered))

    def state_dict(self) -> State:
        """The position as a small dict of plain JSON types, new at each call. It belongs to the last item that was handed out."""
        position = self.position
        return self.state_at(Position(position.epoch + 1) if position.ended else position)

    def state_at(self, position: Position) -> State:
        """The state that goes on from ``position``; where that is the end of an epoch, the rest of it is empty."""
        recipe, host = self.recipe, self.stage.host
        return {
            "version": STATE_VERSION,
            "epoch": position.epoch,
            "seed": recipe.seed,
            "shards": recipe.shards,
            "fingerprint": recipe.fingerprint,
            **recipe.of_data,
            "graph": list(recipe.graph),
            "lane_count": host.lanes,
            "lanes": {
                str(host.lane): {
                    "url": self.stage.where(position.mark, Lane(recipe.seed, position.epoch, host.lane, host.lanes)),
                    "delivered": position.delivered,
                    "position": self.stage.dump(position.mark),
                }
            },
            "counts": self.counts(position),
        }

    @cached_property
    def recipe(self) -> Recipe:
        """What never changes; StateError if the chain's position cannot be known."""
        self.stage.check_resumable()
        return Recipe(self.stage.seed, *self.stage.shards(), tuple(self.stage.graph()), self.stage.which_data())

    @shortened
    def load_state_dict(self, state: State, *, moved: bool = False) -> None:
        """Let the next ``iter()`` continue from ``state``.

        Args:
            state: what ``state_dict`` returned.
            moved: the shards are the same, whatever their names and the index say: see ``wds_pipes.moved``.

        Raises:
            StateError: the state was made by another version, over other shards, with another seed or another chain of stages; the message says what differs.
        """
        move, host = Move(moved), self.stage.host
        saved = check_recipe(state, self.recipe, move)
        lane = saved.lanes.get(host.lane)
        if saved.lane_count != host.lanes or lane is None:
            held = f"lane {some(saved.lanes)} of {saved.lane_count}"
            raise StateError(f"the state holds {held}, and this process gives lane {host.lane} of {host.lanes}: keep the number of workers.")
        mark = self.stage.load(self.stage.relocate(check_lane(lane, host.lane, self.stage), move))
        self.seek(Position(saved.epoch, lane.delivered, mark))
        if host.lane == 0:  # of several workers, one says it
            move.log()

    def _stop_live(self, why: str) -> None:
        live = None if self._live is None else self._live()
        if live is not None:
            live.stop(StateError(f"this iterator has been replaced: {why}."))


class Pass(Generic[Out]):
    """One iteration of a stream; ``next()`` commits the position of the item that it returns."""

    __slots__ = ("__weakref__", "_delivered", "_epoch", "_error", "_items", "_mark", "_running", "_stream", "_trace")

    def __init__(self, stream: Stream[Out]) -> None:
        self._stream = stream
        self._running: Stage[Out] | None = None
        self._items: Iterator[Out] = iter(())
        self._error: Exception | None = None
        self._trace: TracebackType | None = None  # of the error, before it was raised: each time that it is, it grows
        self._epoch = self._delivered = 0

    def __iter__(self) -> Pass[Out]:
        return self

    def __next__(self) -> Out:
        try:
            if self._running is None:
                self._start()
            item = next(self._items)
            mark = self._mark()
        except StopIteration:
            if self._running is not None and (lacking := self._end()) is not None:
                raise lacking from None
            raise
        except Exception as error:
            self.stop(shorten(error))
            raise error  # all frames: set WDS_PIPES_FULL_TRACEBACK=1
        except BaseException as error:
            self.stop(RuntimeError(f"this iterator was interrupted by {type(error).__name__}; load_state_dict(state_dict()) and iter() go on"))
            raise
        # From here to the return no signal handler runs: an interrupt comes before the position counts, or when the caller has the item.
        self._delivered = delivered = self._delivered + 1
        self._stream.at = (self._epoch, delivered, mark, False)
        return item

    def _start(self) -> None:
        if self._error is not None:
            raise self._error.with_traceback(self._trace)
        stream = self._stream
        stream._stop_live("a newer one was started, and a pipe has one at a time; build a second pipe to iterate twice at once")
        position, host = stream.begin(), stream.stage.host
        self._epoch, self._delivered = position.epoch, position.delivered
        self._running = stream.stage.open(Lane(stream.stage.seed, position.epoch, host.lane, host.lanes), position.mark)
        self._items, self._mark = self._running.items, self._running.mark
        stream._live = weakref.ref(self)

    def _end(self) -> SampleError | None:
        """Commit the end of the epoch; or, if all its samples lack the fields that are kept, stop with that error, which is returned."""
        running, host = cast(Stage[Out], self._running), self._stream.stage.host
        mark, lack = running.mark(), running.lack
        counts = self._stream.counts(Position(self._epoch, self._delivered, mark))
        explained, nothing = lack.explains(counts), not any(counts.values())
        if (explained or nothing) and (explained if host.tell_end is None else host.tell_end(self._epoch, explained)):
            error = lack.error()
            self.stop(error)
            return error
        if host.lanes == 1:
            warn_of_nothing(counts)
        self._stream.at = Position(self._epoch, self._delivered, mark, ended=True)
        self.stop(StopIteration())
        return None

    def stop(self, error: Exception) -> None:
        """Let every further ``next()`` raise ``error``, unless the iterator has stopped already."""
        self.close()
        if self._error is None:
            self._error, self._trace = error, error.__traceback__
        self._running = None

    def close(self) -> None:
        """Close what is open."""
        if self._running is not None:
            self._running.close()

    def __del__(self) -> None:
        self.close()


def warn_of_nothing(counts: dict[str, int]) -> None:
    """Say so where samples were read, and none of them was given."""
    lost = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)
    if lost and not counts["delivered"]:
        logger.warning("this epoch gave nothing: %s. See what group_by_key(fields=...), filters and on_error='skip' leave.", lost)


def check_recipe(state: State, recipe: Recipe, move: Move) -> Saved:
    """What a state says; StateError, saying all that differs, where another pipeline made it. ``move`` notes where its data were."""
    saved, differences, mend = read_state(state), [], "Build the pipeline as it was when the state was saved."
    move.url = next((lane.url for lane in saved.lanes.values() if lane.url is not None), None)
    if saved.graph != recipe.graph:
        differences.append(_unlike(saved.graph, recipe.graph))
    if saved.shards != recipe.shards:
        differences.append(f"it was made over {saved.shards} shards, this pipeline has {recipe.shards}")
    elif (problem := move.problem(Data(saved.fingerprint, saved.data), recipe.data)) is not None:
        differences.append(problem)
        mend += f" {MEND}"
    if saved.graph == recipe.graph and saved.samples not in (None, recipe.samples):  # None: the versions before did not say
        differences.append("samples_per_shard or the index gave the shards other numbers of samples, by which the lanes were dealt")
    if saved.seed != recipe.seed:
        differences.append(f"it was made with seed={saved.seed}, this pipeline has seed={recipe.seed}")
    if differences:
        raise StateError(f"the state does not fit this pipeline: {'; '.join(differences)}. {mend}")
    return saved


def _unlike(then: Sequence[str], now: Sequence[str]) -> str:
    """In what the chain of a state and another one differ: the steps that do, with the one before them."""
    old, new = _steps(then), _steps(now)
    if old == new:
        old_parts, new_parts = ([step for step in graph if _is_parts(step)] for graph in (then, now))
        if not new_parts:
            return "it was made by a PipeLoader, this is a pipe: load it into a PipeLoader"
        if not old_parts:
            return "it was made by a pipe, this is a PipeLoader: load it into what you iterated"
        numbers = (f"{step:.80}".partition("samples=")[2].rstrip(")") or "an unknown number of" for step in (old_parts[0], new_parts[0]))
        return "its epoch had {} samples, that of this pipeline has {}: pass the same samples_per_shard= or index=".format(*numbers)
    first = max(0, _alike_at_start(old, new) - 1)
    after = _alike_at_start(old[first + 1 :][::-1], new[first + 1 :][::-1])

    def differing(steps: list[str]) -> str:
        return " > ".join([*["..."][: bool(first)], *steps[first : len(steps) - after], *["..."][: bool(after)]])

    return f"its pipeline was {differing(old):.2000}, this one is {differing(new)}"


def _alike_at_start(old: Sequence[str], new: Sequence[str]) -> int:
    """How many entries two lists have in common before they differ."""
    return next((place for place, (one, other) in enumerate(zip(old, new, strict=False)) if one != other), min(len(old), len(new)))


def _steps(graph: Sequence[str]) -> list[str]:
    """The steps of a chain that its user has written."""
    return [step for step in graph if not _is_parts(step)]


def _is_parts(step: str) -> bool:
    """Whether an entry of a graph is what PipeLoader puts into a chain."""
    return step.partition("(")[0] == "parts"


def check_lane(lane: SavedLane, number: int, stage: Stage[Any]) -> list[dict[str, Any]]:
    """The position that a state tells of a lane; StateError where it has not one entry for each stage."""
    position = lane.position
    if position is None or len(position) != len(stage.dump(None)):
        raise damaged(f"the position of lane {number} is {shown(position)}")
    return position


def describe_state(state: State) -> str:
    """A state for people: epoch, shard and its URL, byte, place in the shuffle, items; one line a lane, then the counts.

    Args:
        state: of a pipe, a node, a dataset or a PipeLoader, also inside of what StatefulDataLoader or torchdata's Loader gave.

    Raises:
        StateError: there is no state of a wds_pipes pipeline in it, or it is damaged.
    """
    found = list(_states_in(state))
    if not found:
        raise StateError(f"this is not a state of a wds_pipes pipeline but {shown(state)}. Pass what state_dict() returned.")
    return "\n".join(_describe(read_state(part)) for part in found)


def _states_in(state: Any, depth: int = 0) -> Iterator[State]:
    """Every state of ours in what a loader made of them."""
    if isinstance(state, dict) and depth < 50:  # no loader nests them deeper
        if {"version", "epoch", "lanes", "graph"} <= state.keys():
            yield state
        else:
            for part in state.values():
                yield from _states_in(part, depth + 1)


def _describe(state: Saved) -> str:
    names = [entry.split("(")[0] for entry in state.graph]
    lines = [f"epoch {state.epoch}, seed {state.seed}: {' > '.join(names)}"]
    for index, lane in state.lanes.items():
        facts = ["ended"] if lane.ended else [] if lane.position else ["not begun"]
        for name, entry in zip(names, lane.position or [], strict=False):

            def value(of: str, entry: dict[str, Any] = entry) -> int:
                return read_count(entry.get(of, 0), repr(of))

            if name == "shard_list" and "parts" in names:  # a lane of PipeLoader
                facts.append(f"in {lane.url}")
            elif name == "shard_list":
                per_lane = -(-((state.shards or 0) - index) // state.lane_count)
                facts.append(f"shard {min(value('next') + 1, per_lane)} of {per_lane} ({lane.url})")
            elif name == "load_tar":
                facts.append(f"byte {value('offset'):,}")
            elif name == "shuffle_buffer":
                facts.append(f"shuffle at {value('left'):,}, read again from its sample {value('first'):,}")
        facts.append(f"{plural(lane.delivered, 'item')} delivered")
        lines.append(f"lane {index} of {state.lane_count}: " + ", ".join(facts))
    lines.append("samples: " + ", ".join(f"{count:,} {what}" for what, count in state.counts.items()))
    return "\n".join(lines)
