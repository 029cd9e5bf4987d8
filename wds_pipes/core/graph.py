"""A step as the graph of a state names it: data. Messages are made of it, and never read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class GraphStep(NamedTuple):
    """The name of a step, and the options that decide which items come, as plain JSON types.

    In a state it is ``[name, {option: value}]``, or ``[name]`` if it has no such options.
    """

    name: str
    options: Mapping[str, Any] = {}

    @classmethod
    def of(cls, name: str, options: Mapping[str, object]) -> GraphStep:
        """Return a step with those of its options that are set: not None, and not False."""
        return cls(
            name,
            {option: _plain(value) for option, value in options.items() if value is not None and value is not False},
        )

    def __str__(self) -> str:
        """Return the step as a pipeline is written, for messages: ``shuffle_buffer(size=8)``."""
        options = ", ".join(f"{option}={_text(value)}" for option, value in self.options.items())
        return f"{self.name}({options})" if options else self.name


def graph_text(graph: Iterable[GraphStep]) -> str:
    """Return the steps of a chain as text, for messages."""
    return " > ".join(map(str, graph))


def _text(value: object) -> str:
    """Return a value as Python writes it; it may come from a damaged state."""
    try:
        return repr(value)
    except (ValueError, RecursionError):  # an int with thousands of digits, or lists in lists in lists
        return f"some {type(value).__name__}"


def _plain(value: object) -> object:
    """Return a value as JSON types; one of another type is its repr()."""
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(part) for part in value]
    if isinstance(value, dict) and all(type(name) is str for name in value):
        return {name: _plain(part) for name, part in value.items()}
    return repr(value)
