"""Running copies of stages: what they share with the recipe, and how a stage ends."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple, TypeVar

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


def begin(running: Any, mark: Mark | None) -> None:
    """Set the ``items`` of a copy that was opened at ``mark``: the items of ``run``, or nothing if
    the stage had ended there.
    """
    running._resumed = mark is not None
    if isinstance(mark, Ended):
        _stay(running, mark)
        running.items = Items()
    else:
        items = running.run()
        if not hasattr(items, "__next__"):
            name = type(running).__name__
            raise TypeError(f"run() of {name} must be a generator, which yields the items: it returned {items!r:.80}")
        running.items = both = Items(items, _at_end(running))
        if hasattr(items, "close"):
            both.close = items.close  # type: ignore[method-assign]


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
