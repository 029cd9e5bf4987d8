"""Then: a generator function as a step, called again and again."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from wds_pipes.core.reads_again import Calls, PutBackIterator
from wds_pipes.core.stage import Stage
from wds_pipes.stages.fields import identity


class Then(Calls[Any]):
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
    on the items alone: draw them in ``map_samples(fn(sample, rng))`` before or after this step.
    After it, samples that one call makes of one sample draw different numbers. Samples that several
    calls yield, since they were put back, draw the same.

    A call that yields nothing has left out the items that it took: they count as filtered.
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

    def call(self, items: PutBackIterator[Any]) -> Iterable[Any]:
        made = self.fn(items)
        if not hasattr(made, "__iter__"):
            raise TypeError(f"then() needs a generator function, one that yields items: it returned {made!r:.80}")
        return made

    def blame(self, error: Exception, last: Any) -> None:
        named = identity(last)
        after = "" if named.key is None else f", after it took {named.name()}"
        error.add_note(f"raised by the function of then(){after}")
        if isinstance(error, StopIteration) or isinstance(error.__cause__, StopIteration):
            error.add_note(
                "next(items) found no more: the first item of a call is there, others may not be. Write "
                "next(items, None), or a for loop"
            )
