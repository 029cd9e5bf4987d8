"""Then: a plain generator function as a step."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from wds_pipes.core.options import check_count
from wds_pipes.core.reads_again import ReadsAgain
from wds_pipes.core.running import END, Mark
from wds_pipes.core.stage import Stage
from wds_pipes.errors import StateError
from wds_pipes.stages.fields import identity

_MOST = 1 << 20  # the most items that may be held: the stage keeps a mark for each
_TRIED, _WINDOW = 1024, 16  # a larger number is not tried; and with how many items it is


class Then(ReadsAgain[Any]):
    """Let a generator function make the items of the items before it (functional name: ``then``).

    The function gets an iterator over the items and yields any number of items: pairs, windows,
    crops, chunks that it sorts. It is called once in each epoch, and once for each part of an epoch
    that PipeLoader gives to a lane; before ``interleave_shards``, once for each shard.

    A state holds no data, so a resume calls the function again on the items that it still needs.
    For that, say with ``holds`` how many items it remembers at each time when it takes an item
    after it has yielded:

    - ``holds=0``: none. All that it took before is yielded, or dropped for good::

          def crops(samples):
              for sample in samples:
                  yield from five_crops(sample)

    - ``holds=n``: no more than the last n items that it took. Called again on these alone, it must
      come to remember the same. Here n is 1::

          def pairs(samples):
              before = next(samples, None)
              for sample in samples:
                  yield before, sample
                  before = sample

    - ``holds=None``: not known. The step runs, and ``state_dict()`` raises an error.

    A number that is too large is wrong too, unless the function comes to remember the same: a
    function that makes chunks of four, and remembers nothing between two of them, would begin its
    chunks elsewhere with ``holds=2``. So the first epoch in each process calls the function once
    more, on up to ``holds`` items and about the next 16, and raises an error if it then yields at
    other items. (Numbers above 1,024 are not tried.) ``wds_pipes.testing.check_resume`` also
    compares what it yields, at every place: use it. A function that depends on
    all items before, such as a sum, or a set of the keys that it has seen, cannot resume this way:
    write a ``Stage`` whose position has what it needs. Random numbers must depend on the items
    alone: draw them in ``map_samples(fn(sample, rng))`` before this step.

    Args:
        source: any pipe.
        fn: ``fn(items)``, a generator function, or any function that returns an iterator. If it has
            further arguments, use ``functools.partial``.
        holds: how many items it remembers, at most 2**20; see above.
        keeps_count: whether it yields as many items as it takes, so that the length of an epoch
            stays known.

    Raises:
        StateError: the state was requested and ``holds`` is None; the function does not remember
            what ``holds`` says; or, after a resume, it did not yield what it had yielded before.
        Exception: an error of a step before this one, also if the function catches it.

    Checkpoint: two numbers, whether the function has begun and ended, and an earlier position of
    the source. A resume reads the items again that the function held, and those that it took after
    them until it yielded last.
    """

    @dataclass(slots=True)
    class At(ReadsAgain.At):
        begun: bool = False  # whether the function has taken an item
        held: int = 0  # how many items after the saved position of the source it remembered, when it ...
        yielded: int = 0  # ... took an item after a yield for the last time, and how often it has yielded since
        ended: bool = False  # whether the function has returned

    counts_items = True
    order_options = ("holds",)

    def __init__(
        self,
        source: Stage[Any],
        fn: Callable[[Iterator[Any]], Iterable[Any]],
        *,
        holds: int | None = None,
        keeps_count: bool = False,
    ) -> None:
        super().__init__(source)
        if not callable(fn):
            raise TypeError(f"then() needs a function, not {fn!r}")
        _check_signature(fn)
        self.fn = fn
        self.holds = None if holds is None else check_count("holds", holds, least=0, most=_MOST)
        self.keeps_count = bool(keeps_count)  # type: ignore[misc]
        self._tried = SimpleNamespace(done=holds is None or holds > _TRIED)  # all copies in a process have it

    def problem(self, at: Any) -> str | None:
        if at.held > (self.holds or 0) or (at.held and not at.begun):
            return f"the function cannot hold {at.held} items"
        return None

    def check_resumable(self) -> None:
        super().check_resumable()
        if self.holds is None:
            raise StateError(
                "the state of then() cannot be known, as it does not say how many items its function remembers: pass "
                "holds=0 if it remembers none when it takes an item after it has yielded, or holds=n if it remembers "
                "at most the last n that it took. check_resume() tells whether the number is right."
            )

    def had_items(self, at: Any) -> bool:
        return bool(at.yielded)

    def run(self) -> Iterator[Any]:
        at, source, marks = self.at, self.source, deque[Mark](maxlen=self.holds or 0)
        if at.ended:
            return
        self.earlier = source.mark()
        again, left = at.begun, at.held  # whether items are read again, and how many
        given, resumed = 0, at.yielded  # yields since the saved position, in this run and in the one before
        item: Any = None
        trial = None if self._tried.done or again or at.yielded else _Trial(self.fn, self.holds or 0)
        failed: Exception | None = None

        def take() -> Iterator[Any]:
            nonlocal again, left, given, resumed, item, failed
            while True:
                before = source.mark()
                if again:
                    if not left:
                        again, given = False, 0
                    left -= 1
                elif given or not at.begun:
                    if given < resumed:
                        failed = _unlike(given, resumed)
                        raise failed
                    if trial is not None and not self._tried.done and given:
                        self._tried.done = trial.cut()
                    self.earlier = marks[0] if marks else before
                    at.begun, at.held, at.yielded, given, resumed = True, len(marks), 0, 0, 0
                try:
                    item = next(source.items, END)
                except Exception as error:
                    failed = error
                    raise
                if item is END:
                    return
                marks.append(before)
                if trial is not None and not self._tried.done:
                    trial.take(item)
                yield item

        made: Any = None
        try:
            made = _iterate(self.fn(take()))
            for result in made:
                if failed is not None:  # and the function has caught it
                    raise failed
                if again:
                    continue
                given += 1
                if given == resumed:
                    self.check_again()
                if trial is not None:
                    trial.yielded += 1
                if given > resumed:
                    at.yielded = given
                    yield result
        except Exception as error:
            if error is not failed:
                last = identity(item)
                after = "" if last.key is None else f", after it took {last.name()}"
                error.add_note(f"raised by the function of then(){after}")
            raise
        finally:
            if hasattr(made, "close"):
                made.close()
        if failed is not None:
            raise failed
        if again or given < resumed:
            raise _unlike(given, resumed)
        if trial is not None and not self._tried.done:
            self._tried.done = trial.cut(last=True)
        at.held, at.yielded, at.ended = 0, 0, True
        self.earlier = None  # for the counts of the whole epoch


class _Trial:
    """Tries whether a function, called again on the last ``holds`` items that it took, yields after
    the same ones of the next items: those are taken from its first call.
    """

    def __init__(self, fn: Callable[[Iterator[Any]], Iterable[Any]], holds: int) -> None:
        self._fn, self._holds = fn, holds
        self._items: list[Any] = []  # the held ones, then the next ones
        self._given: list[int] = []  # how often the function had yielded when it took each of the next ones
        self._begun = False
        self.yielded = 0

    def take(self, item: Any) -> None:
        """The function takes an item, and may change it."""
        self._items.append(item.copy() if type(item) in (dict, list) else item)
        if self._begun:
            self._given.append(self.yielded)
        elif len(self._items) > self._holds + 1:
            del self._items[0]

    def cut(self, *, last: bool = False) -> bool:
        """A state could begin here. Return whether the number was tried.

        Raises:
            StateError: it is wrong.
        """
        if not self._begun and len(self._items) > self._holds:
            self._begun, self.yielded, self._items = True, 0, self._items[1:]
        elif self._begun and (last or len(self._given) >= _WINDOW):
            if self._given and self._again() != self._given:
                raise StateError(
                    f"the function of then() does not remember what holds={self._holds} says: called again on the last "
                    f"{self._holds} items that it had taken, it yields after other ones of the next items. Pass how "
                    "many it remembers when it takes an item after it has yielded: 0 if it then has none."
                )
            return True
        return last

    def _again(self) -> list[int]:
        """Return what ``_given`` is in a new call."""
        given: list[int] = []
        yielded = 0

        def take() -> Iterator[Any]:
            for place, item in enumerate(self._items):
                if place >= self._holds:
                    given.append(yielded)
                yield item

        try:
            for _ in self._fn(take()):
                yielded += 1
                if len(given) == len(self._given):
                    break
        except Exception:  # the first call may have changed what is in the items
            return self._given
        return [count - given[0] for count in given]


def _check_signature(fn: Callable[..., Any]) -> None:
    try:
        inspect.signature(fn).bind("items")
    except TypeError as error:
        raise TypeError(
            f"then() needs fn(items), not {fn!r}: {error}. Use functools.partial for its other arguments."
        ) from error
    except ValueError:  # a built-in function has no signature
        pass


def _iterate(made: Any) -> Iterator[Any]:
    if not hasattr(made, "__iter__"):
        raise TypeError(f"then() needs a generator function, one that yields items: it returned {made!r:.80}")
    return iter(made)


def _unlike(given: int, resumed: int) -> StateError:
    return StateError(
        f"the function of then() yielded {given} items where it had yielded {resumed} before the state was saved. It "
        "must yield the same for the same items: check it with wds_pipes.testing.check_resume."
    )
