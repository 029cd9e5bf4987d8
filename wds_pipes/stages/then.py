"""Then: a plain generator function as a step."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from wds_pipes.core.options import check_count
from wds_pipes.core.running import END, Mark
from wds_pipes.core.stage import Stage
from wds_pipes.errors import StateError
from wds_pipes.stages.identity import identity

_MOST = 1 << 20  # the most items that may be held: the stage keeps a mark for each


class Then(Stage[Any]):
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

    ``wds_pipes.testing.check_resume`` finds a number that is too small. A function that depends on
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
        StateError: the state was requested and ``holds`` is None; or, after a resume, the function
            did not yield what it had yielded before.
        Exception: an error of a step before this one, also if the function catches it.

    Checkpoint: two numbers, whether the function has begun and ended, and an earlier position of
    the source. A resume reads the items again that the function held, and those that it took after
    them until it yielded last.
    """

    @dataclass(slots=True)
    class At:
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
        # while running, the position of the source at the first item that is read again
        self._before: Mark | None = None

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

    def run(self) -> Iterator[Any]:
        at, source, marks = self.at, self.source, deque[Mark](maxlen=self.holds or 0)
        assert source is not None
        if at.ended:
            return
        self._before = source.mark()
        again, left = at.begun, at.held  # whether items are read again, and how many
        given, resumed = 0, at.yielded  # yields since the saved position, in this run and in the one before
        item: Any = None
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
                    self._before = marks[0] if marks else before
                    at.begun, at.held, at.yielded, given, resumed = True, len(marks), 0, 0, 0
                try:
                    item = next(source.items, END)
                except Exception as error:
                    failed = error
                    raise
                if item is END:
                    return
                marks.append(before)
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
        at.held, at.yielded, at.ended = 0, 0, True
        self._before = None  # for the counts of the whole epoch

    def mark(self) -> Mark:
        return self._own(self.at), self._before or self.source.mark()  # type: ignore[union-attr]


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
