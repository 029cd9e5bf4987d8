"""Stages that keep an earlier position of their source, and read items again at a resume. Some of
them call a function on the items that follow, again and again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from types import GeneratorType
from typing import Any, ClassVar, NoReturn, TypeVar, cast

from wds_pipes.core.chain import Chain, Composite
from wds_pipes.core.counts import Meters, logger
from wds_pipes.core.lane import Lane
from wds_pipes.core.occurrences import numbered_parts
from wds_pipes.core.stage import END, Mark, Out, Stage, functional_name
from wds_pipes.core.words import shown
from wds_pipes.errors import StateError, WdsError

In = TypeVar("In")

_MOST = 1 << 10  # how many items can be put back: a mark is kept for each
_MANY = 10_000  # a warning is logged when one call has taken so many items
_SKIPPED = ("skipped", "skipped_shards", "damaged")


class ReadsAgain(Stage[Out]):
    """The base of stages whose mark has an earlier position of their source, ``earlier``. A resume
    reads the items after it again, up to those that the stage had when the state was saved.

    They must be the same items. If the steps before skip other data than before, such as a shard
    that has gone since, later items would be dropped in place of its own. So a position says how
    much these steps had skipped since ``earlier``, and ``check_again`` compares it.
    """

    @dataclass(slots=True)
    class At:  # noqa: D106 - see Stage
        skips: int = 0  # how much the steps before this one have skipped since ``earlier``

    source: Stage[Any]
    # while running, how much the steps before will have skipped when all is read again; None: it is
    _again: int | None = None
    # while running, what the chain counts, and its ``skips`` when it was opened
    _meters: Meters
    _skips_before = 0
    _counted: tuple[Mark | None, int] = (None, 0)  # while running, ``earlier``, and how much was skipped up to there

    def had_items(self, at: Any) -> bool:
        """Return whether, at a position, items were yielded that a resume makes again and drops."""
        raise NotImplementedError

    def open(self, lane: Lane, mark: Mark | None = None) -> Stage[Out]:
        running = cast(ReadsAgain[Out], super().open(lane, mark))
        running._meters, running._skips_before = lane.meters, lane.meters.skips
        if mark is not None and self.had_items(running.at):
            running._again = self._skips(mark[1]) + running.at.skips
        else:
            running.at.skips = 0
        return running

    def check_again(self, *, whole: bool = True) -> None:
        """Compare what was skipped, when the items are read again.

        Args:
            whole: all of them are there.

        Raises:
            StateError: they are other items.
        """
        again, self._again = self._again, None
        if again is not None and not (whole and again == self._skips(self.source.mark())):
            raise StateError(
                f"{functional_name(type(self))}() reads samples again that came before the state was saved, and the "
                "steps before it skip other data now than they did then: other samples would be lost. Restore the "
                f"shards, or start the epoch anew.{Chain(self.source).lack.first_skip}"
            )

    @cached_property
    def _before(self) -> Chain:
        """The chain before this stage, for the counts at its positions."""
        return Chain(self.source)

    def _skips(self, mark: Mark | None) -> int:
        """Return how much the steps before had skipped at a position of the source."""
        counts = self._before.counts(mark, 0)
        return sum(counts.get(name, 0) for name in _SKIPPED) + _skips_since(self._before, mark)

    def mark(self) -> Mark:
        if self._again is None and self._skips_before != self._meters.skips:  # else nothing was skipped
            earlier = self.earlier
            if self._counted[0] is not earlier:
                self._counted = earlier, self._skips(earlier)
            self.at.skips = 0 if earlier is None else self._skips(self.source.mark()) - self._counted[1]
        return super().mark()


def _skips_since(chain: Chain, mark: Mark | None) -> int:
    """Return how much was skipped before ``mark``, and after the earlier positions in it from which
    stages of the chain read again: their counts are those at these positions.
    """
    skips = 0
    for step in reversed(chain.placed):
        own, before = mark or ((), None)
        if isinstance(step, ReadsAgain) and own:
            skips += step._at(own).skips
        if isinstance(step, Composite):
            parts = ((step.chain_of(part), part.mark) for part in step.parts_of(before))
            return skips + sum(_skips_since(inner, at) for inner, at in parts if inner is not None)
        mark = before
    return skips


class PutBackIterator(Iterator[In]):
    """The items that a function of ``then`` takes: an iterator to which it can put items back."""

    def __init__(self, source: Stage[In]) -> None:
        self._source = source
        self._ahead: deque[tuple[In, Mark]] = deque()  # read and not taken, with the marks before them
        self._last: deque[tuple[int, Mark]] = deque(maxlen=_MOST)  # the ids of those taken, with the same marks
        self._item: In | None = None  # the one taken last
        self._taken = 0  # how many the current call has taken and not put back
        self._ended = False  # whether the source has no more
        self._failed: Exception | None = None  # the error of a step before

    def __next__(self) -> In:
        if not (self._ahead or self._read()):
            raise StopIteration
        item, before = self._ahead.popleft()
        self._item, self._taken = item, self._taken + 1
        self._last.append((id(item), before))
        if self._taken == _MANY:
            logger.warning(
                "one call of the function of then() has taken %d items, and a resume takes them all again: let the "
                "function return after fewer. It is called again on the items that follow.",
                _MANY,
            )
        return item

    def __getitem__(self, place: object) -> NoReturn:
        raise TypeError(
            "then(fn) calls fn with an iterator over the items: take them with next(items), islice(items, n) or a "
            "for loop. For a function of one item use map_samples(fn)"
        )

    def put_back(self, *items: In) -> None:
        """Put back the last items that were taken, in their order: they come again, also to the
        next call. They must be unchanged, as a resume reads them again.

        Raises:
            ValueError: they are not the last items that this call has taken.
        """
        for item in reversed(items):
            taken, before = self._last.pop() if self._last else (None, None)
            if taken != id(item) or before is None:
                raise ValueError(
                    "put_back() needs the last items that this call has taken, in their order, and not copies of "
                    f"them; at most {_MOST:,}"
                )
            self._ahead.appendleft((item, before))
            self._taken -= 1

    def _read(self) -> bool:
        """Read an item of the source; return whether there was one."""
        before = self._source.mark()
        try:
            item = next(self._source.items, END)
        except Exception as error:
            self._failed = error
            raise
        if item is END:
            self._ended = True
            return False
        self._ahead.append((item, before))
        return True

    def _call(self) -> Mark | None:
        """Begin a call; return the position before its first item, or None if there is none."""
        self._last.clear()
        self._taken = 0
        return self._ahead[0][1] if self._ahead or self._read() else None


class Calls(ReadsAgain[Out]):
    """The base of stages that call a function on the items that follow, again and again: a subclass
    writes ``call``.

    A position inside of a call is the position before its first item, and how often it has yielded.
    So a resume makes the call again and leaves out the first items: no item is lost or comes twice,
    and the state holds no data. If a call may depend on those before it, see ``lookback``, it is
    the position before an earlier call, and a resume makes the calls between again too.

    A call that yields nothing has left out the items that it took: they count as filtered, unless
    the call counts them itself, in another field of ``tallies``.
    """

    @dataclass(slots=True)
    class At(ReadsAgain.At):  # noqa: D106 - see Stage
        again: int = 0  # how many calls were made from ``earlier`` to the current one
        yielded: int = 0  # how often the current call has yielded
        taken: int = 0  # how many items it had taken then, without those that it had put back
        ahead: int = 0  # how many more were read: they are put back, or not taken again yet
        ended: bool = False  # whether the end of the source was met
        filtered: int = 0

    tallies: ClassVar[tuple[str, ...]] = ("filtered",)
    scope = "window"
    lookback: int = 0

    def __init_subclass__(cls, **options: Any) -> None:
        if isinstance(vars(cls).get("tallies"), tuple):  # which need not repeat those of this class
            cls.tallies = tuple(dict.fromkeys((*Calls.tallies, *cls.tallies)))
        super().__init_subclass__(**options)

    def had_items(self, at: Any) -> bool:
        return bool(at.yielded)

    def call(self, items: PutBackIterator[Any]) -> Iterable[Out]:
        """Take some of the items, at least one, and return what is made of them."""
        raise NotImplementedError

    def blame(self, error: Exception, last: Any) -> None:
        """Add to an error of a call what is known of it; ``last``: the item that it took last."""

    def run(self) -> Iterator[Out]:
        at, items, saved = self.at, PutBackIterator(self.source), self._own(self.at)
        again, step = at.again, max(1, self.lookback)
        marks = deque[tuple[int, Mark]](maxlen=2 if self.lookback else 1)  # every ``step`` calls: the number, and where
        # what the step has counted that it does not yield
        left_out, occurrences = (
            attrgetter(*(name for name in self.tallies if name != "delivered")),
            self.lane.occurrences,
        )
        for number, begin in enumerate(iter(items._call, None)):
            if number % step == 0:
                marks.append((number, begin))
            (first, self.earlier), given, counted = marks[0], 0, left_out(at)
            try:
                made = self.call(items)
                if is_one_item(made, items._item):
                    raise TypeError(
                        f"{self._calls()} returned one item ({type(made).__name__}), whose parts would be the items: "
                        "return a list of items, such as [sample]"
                    )
                if occurrences:
                    made = numbered_parts(made, lambda: items._item)
                for given, result in enumerate(made, 1):
                    if items._failed is not None:  # and the function has caught it
                        raise items._failed
                    if number < again:
                        continue
                    if given > at.yielded:
                        at.again, at.yielded, at.taken = number - first, given, items._taken
                        at.ahead, at.ended = len(items._ahead), items._ended
                        yield result
                    elif given == at.yielded:
                        self._compare(items)
                        for place, name in self._tallies:  # which were counted twice
                            setattr(at, name, saved[place])
            except Exception as error:
                if error is not items._failed and not isinstance(error, StateError):
                    self.blame(error, items._item)
                raise
            if items._failed is not None:
                raise items._failed
            if not items._taken:
                raise ValueError(
                    "the function of then() returned and took no item, or put all of them back: it would be called on "
                    "the same items without end"
                )
            if not given and left_out(at) == counted:
                at.filtered += items._taken
            if number >= again:
                if given < at.yielded:
                    raise self._unlike()
                at.again, at.yielded, at.taken, at.ahead, at.ended = 0, 0, 0, 0, False
        if at.yielded:
            raise self._unlike()
        self.earlier = None  # for the counts of the whole epoch

    def _calls(self) -> str:
        """Return what it calls, for a message."""
        return f"the function of {functional_name(type(self))}()"

    def problem(self, at: Any) -> str | None:
        if at.again and (not at.yielded or at.again >= 2 * self.lookback):
            return f"it looks back at {self.lookback} calls"
        return None

    def _compare(self, items: PutBackIterator[Any]) -> None:
        """Read as many items as had been read when the state was saved, or the end of the source,
        and compare how many of them the call has taken.
        """
        whole = all(items._read() for _ in range(self.at.ahead - len(items._ahead)))
        if self.at.ended and not items._ended:
            whole = whole and not items._read()
        if not whole or items._taken != self.at.taken:
            raise self._unlike()
        self.check_again()

    def _unlike(self) -> StateError:
        self.check_again()  # which says why, if the steps before skip other data
        return StateError(
            f"the function of {functional_name(type(self))}() does not yield after the same items as it did before the "
            "state was saved. It must yield the same for the same items, and remember nothing from one call to the "
            "next, and the steps before it must return the same items: check them with wds_pipes.testing.check_resume."
        )


def is_one_item(made: object, taken: object = None) -> bool:
    """Return whether a function that makes items returned a single one, whose parts would be the
    items; ``taken``: the item that it took last.
    """
    if (kind := type(made)) is list or kind is GeneratorType:  # in a tenth of the time of isinstance()
        return False
    if isinstance(made, tuple):
        return made is taken or hasattr(made, "_fields")
    return isinstance(made, (Mapping, str, bytes, bytearray, memoryview))


class FlatMap(Calls[Out]):
    """The base of stages that make any number of items of each item of their source: a subclass
    writes ``expand``.

    An item of which nothing is made counts as filtered, unless ``expand`` counts it itself, in
    another field of ``At``. Steps after this one that draw random numbers for each sample, as
    ``map_samples(fn)`` with ``fn(sample, rng)``, draw others for each item made of a sample.

    A position inside of an item is the position before that item, and how many items were already
    made of it. So a resume reads the item again, makes its items again and leaves out the first
    ones: no item is lost or comes twice, and the state holds no data.

    ``expand`` may remember something of the last items that it had, such as their keys, in lists,
    dicts, sets or deques that ``__init__`` makes. Then ``__init__`` sets ``self.lookback``::

        class DropRepeats(wp.FlatMap):  # samples whose key is not among the last 1,000
            order_options = ()

            def __init__(self, source):
                super().__init__(source)
                self.lookback, self.keys = 1000, deque(maxlen=1000)

            def expand(self, sample):
                repeated = sample["__key__"] in self.keys
                self.keys.append(sample["__key__"])
                return [] if repeated else [sample]

    A resume begins with what ``__init__`` made, calls ``expand`` on the last items again and drops
    what it returns. It reads at most twice ``lookback`` items again. Each lane, and each part of a
    lane that PipeLoader divides on another number of them, remembers only its own.

    Attributes:
        lookback: of how many items before the current one what ``expand`` remembers follows.
    """

    expands = True

    @abstractmethod  # see ``wds_pipes.core.stage.unfinished``
    def expand(self, item: Any) -> Iterable[Out]:
        """Return the items that are made of an item; the same ones each time, since a resume
        makes them again.
        """
        raise NotImplementedError

    def call(self, items: PutBackIterator[Any]) -> Iterable[Out]:
        return self.expand(next(items))

    def _calls(self) -> str:
        return f"expand() of {functional_name(type(self))}()"

    def blame(self, error: Exception, last: Any) -> None:
        if not isinstance(error, WdsError):  # whose message says it
            error.add_note(f"raised by {functional_name(type(self))}(), of the item {shown(last)}")

    def problem(self, at: Any) -> str | None:
        if at.taken != bool(at.yielded) or at.ahead or at.ended:
            return "it takes one item at a time"
        return super().problem(at)
