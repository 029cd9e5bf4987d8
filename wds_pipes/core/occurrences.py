"""Which occurrence of a sample an item is, where one sample may come several times in an epoch.

A step that draws random numbers for a sample identifies it by its key and its shard, so that the
numbers do not depend on order and lanes. A sample may come again: in parts that a ``FlatMap`` or
``then`` makes of it, from a shard that is drawn or listed twice, in another round of a source of
``mix``, or in another repetition of ``repeat``. Each of these occurrences draws other numbers.

Rules:
1. A sample carries the occurrence itself, in the field ``__occurrence__``, so that the occurrence
   passes every step that keeps metadata: buffers, threads, batches, joins.
2. Only a step that draws needs it. Such a step opens its source with ``Lane.occurrences``, and each
   step before it that may repeat samples then appends a number: which repetition it is. The numbers
   follow from the order of the epoch, so they are the same on any lanes, and after a resume.
3. Such a step appends a number to each sample, also to the first one. So two occurrences of one
   sample differ in the number of the step that repeated it.
4. The last step that draws removes the field.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

OCCURRENCE = "__occurrence__"
_MOST = 10_000  # samples of one call that are told apart by what they are: their identities are kept

_Item = TypeVar("_Item")


def occurring(item: _Item, number: int | str) -> _Item:
    """Return a copy of a sample to whose occurrence a number is appended. An item that is no dict
    with a ``__key__`` is returned as it is: it is identified by its number in the lane.
    """
    if not isinstance(item, dict) or "__key__" not in item:
        return item
    before, key = item.get(OCCURRENCE), item["__key__"]
    again: Any = {**item} if type(item) is dict else copy.copy(item)
    if isinstance(key, list):  # a batch, whose samples a later step may take apart
        texts = before if isinstance(before, list) else [before] * len(key)
        again[OCCURRENCE] = [_longer(text, number) for text in texts]
    else:
        again[OCCURRENCE] = _longer(before, number)
    return again  # type: ignore[no-any-return]


def _longer(text: object, number: int | str) -> str:
    return str(number) if text is None else f"{text}.{number}"


def numbered_parts(parts: Iterable[_Item], last: Callable[[], Any]) -> Iterator[_Item]:
    """Yield what one call of a function makes, each part with its number among those of one sample.

    So a step that only selects or reorders samples gives all of them the number 0, whatever else
    the call has taken.

    Args:
        parts: what the call yields.
        last: returns the item that the call took last: a part that has lost its occurrence gets
            the one of this item.
    """
    counts: dict[tuple[Any, ...], int] = {}
    for place, part in enumerate(parts):
        if not isinstance(part, dict) or "__key__" not in part:
            yield part
            continue
        whole = last()
        if OCCURRENCE not in part and isinstance(whole, dict) and isinstance(whole.get(OCCURRENCE), str):
            part = {**part, OCCURRENCE: whole[OCCURRENCE]}  # type: ignore[assignment]
        if len(counts) < _MOST:
            name = str(part["__key__"]), str(part.get("__url__")), str(part.get(OCCURRENCE))
            number = counts[name] = counts.get(name, -1) + 1
        else:
            number = place  # more than any number before
        yield occurring(part, number)
