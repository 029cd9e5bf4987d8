"""Then: a generator function as a step, called again and again."""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from wds_pipes.core.counts import logger
from wds_pipes.core.reads_again import ReadsAgain
from wds_pipes.core.running import END, Mark
from wds_pipes.core.stage import Stage
from wds_pipes.errors import StateError
from wds_pipes.stages.fields import identity

In = TypeVar("In")

_MOST = 1 << 10  # how many items can be put back: a mark is kept for each
_MANY = 10_000  # a warning is logged when one call has taken so many items


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
        self._item, before = self._ahead.popleft()
        self._last.append((id(self._item), before))
        self._taken += 1
        if self._taken == _MANY:
            logger.warning(
                "one call of the function of then() has taken %d items, and a resume takes them all again: let the "
                "function return after fewer. It is called again on the items that follow.",
                _MANY,
            )
        return self._item

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
        self._ended = item is END
        if item is not END:
            self._ahead.append((item, before))
        return item is not END

    def _call(self) -> Mark | None:
        """Begin a call; return the position before its first item, or None if there is none."""
        self._last.clear()
        self._taken = 0
        return self._ahead[0][1] if self._ahead or self._read() else None


class Then(ReadsAgain[Any]):
    """Let a generator function make the items of the items before it (functional name: ``then``).

    The function gets an iterator over the items, takes as many as it needs, and yields any number
    of items. Whenever it returns, it is called again on the items that follow, until there are no
    more. So write what is to be done with the next item, or with the next few::

        def crops(samples):
            yield from five_crops(next(samples))  # each call has at least one item

        def sorted_batches(samples):
            chunk = sorted(islice(samples, 1000), key=length)
            yield from (chunk[start : start + 8] for start in range(0, len(chunk), 8))

    What one call does not use, it gives to the next call by ``put_back``::

        def packs(samples):  # of at most 512 tokens
            pack, tokens = [], 0
            for sample in samples:
                tokens += len(sample["tokens"])
                if pack and tokens > 512:
                    samples.put_back(sample)
                    break
                pack.append(sample)
            yield pack

        def windows(samples, size=3):
            window = list(islice(samples, size))
            if len(window) == size:
                yield window
                samples.put_back(*window[1:])

    A function may also remember items in one call, and forget them when it returns::

        def without_repeats(samples):
            keys = set()
            for sample in islice(samples, 5000):
                if sample["__key__"] not in keys:
                    keys.add(sample["__key__"])
                    yield sample

    There is nothing else to say or to count: a resume calls the function again where the current
    call began, and drops what that call had already yielded. So the function must yield the same
    for the same items, remember nothing from one call to the next, and return after a bounded
    number of items. One that never returns, such as a loop over all samples, resumes exactly too,
    but a resume reads all items again; a warning is logged after 10,000. Random numbers must depend
    on the items alone: draw them in ``map_samples(fn(sample, rng))`` before this step.
    ``wds_pipes.testing.check_resume`` finds a function that is not so.

    The items end where an epoch ends, or a part of it that PipeLoader gives to a lane; before
    ``interleave_shards``, where a shard ends.

    Args:
        source: any pipe.
        fn: ``fn(items)``, a generator function, or any function that returns an iterable. ``items``
            is a ``wds_pipes.PutBackIterator``. If it has further arguments, use
            ``functools.partial``.
        keeps_count: whether it yields as many items as it takes, so that the length of an epoch
            stays known.

    Raises:
        ValueError: a call returned without taking an item; or ``put_back`` got other items than
            the last ones.
        StateError: after a resume, the function did not yield what it had yielded before.
        Exception: an error of a step before this one, also if the function catches it.

    Checkpoint: four numbers, whether the end of the source was met, and the position of the source
    before the current call. A resume reads the items again that this call took, and calls the
    function on them.
    """

    @dataclass(slots=True)
    class At(ReadsAgain.At):
        yielded: int = 0  # how often the current call has yielded
        taken: int = 0  # how many items it had taken then, without those that it had put back
        ahead: int = 0  # how many more were read: they are put back, or not taken again yet
        ended: bool = False  # whether the end of the source was met

    scope = "window"

    def __init__(
        self,
        source: Stage[Any],
        fn: Callable[[PutBackIterator[Any]], Iterable[Any]],
        *,
        keeps_count: bool = False,
    ) -> None:
        super().__init__(source)
        if not callable(fn):
            raise TypeError(f"then() needs a function, not {fn!r}")
        try:
            inspect.signature(fn).bind("items")
        except TypeError as error:
            raise TypeError(
                f"then() needs fn(items), not {fn!r}: {error}. Use functools.partial for its other arguments."
            ) from error
        except ValueError:  # a built-in function has no signature
            pass
        self.fn = fn
        self.keeps_count = bool(keeps_count)

    def had_items(self, at: Any) -> bool:
        return bool(at.yielded)

    def run(self) -> Iterator[Any]:
        at, items = self.at, PutBackIterator(self.source)
        while begin := items._call():
            self.earlier, given = begin, 0
            try:
                for given, result in enumerate(_iterate(self.fn(items)), 1):
                    if items._failed is not None:  # and the function has caught it
                        raise items._failed
                    if given > at.yielded:
                        at.yielded, at.taken = given, items._taken
                        at.ahead, at.ended = len(items._ahead), items._ended
                        yield result
                    elif given == at.yielded:
                        self._compare(items)
            except Exception as error:
                if error is not items._failed and not isinstance(error, StateError):
                    last = identity(items._item)
                    after = "" if last.key is None else f", after it took {last.name()}"
                    error.add_note(f"raised by the function of then(){after}")
                    if isinstance(error, StopIteration) or isinstance(error.__cause__, StopIteration):
                        error.add_note(
                            "next(items) found no more: the first item of a call is there, others may not be. Write "
                            "next(items, None), or a for loop"
                        )
                raise
            if items._failed is not None:
                raise items._failed
            if given < at.yielded:
                raise _unlike()
            if not items._taken:
                raise ValueError(
                    "the function of then() returned and took no item, or put all of them back: it would be called on "
                    "the same items without end"
                )
            at.yielded, at.taken, at.ahead, at.ended = 0, 0, 0, False
        if at.yielded:
            raise _unlike()
        self.earlier = None  # for the counts of the whole epoch

    def _compare(self, items: PutBackIterator[Any]) -> None:
        """Read as many items as had been read when the state was saved, or the end of the source,
        and compare how many of them the function has taken.
        """
        whole = all(items._read() for _ in range(self.at.ahead - len(items._ahead)))
        if self.at.ended and not items._ended:
            whole = whole and not items._read()
        if not whole or items._taken != self.at.taken:
            raise _unlike()
        self.check_again()


def _iterate(made: Any) -> Iterator[Any]:
    if not hasattr(made, "__iter__"):
        raise TypeError(f"then() needs a generator function, one that yields items: it returned {made!r:.80}")
    return iter(made)


def _unlike() -> StateError:
    return StateError(
        "the function of then() does not yield after the same items as it did before the state was saved. It must "
        "yield the same for the same items, and remember nothing from one call to the next, and the steps before it "
        "must return the same items: check them with wds_pipes.testing.check_resume."
    )
