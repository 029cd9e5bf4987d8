"""Checks of options when a step is built."""

from __future__ import annotations

import operator
from typing import Any

from wds_pipes.core.words import shown


def check_count(what: str, value: object, *, least: int = 1, most: int | None = None) -> int:
    """Return ``value`` as an int if it is one from ``least`` to ``most``, also of numpy; otherwise
    raise an error that names the option.
    """
    if type(value).__name__ in ("bool", "bool_") or not hasattr(value, "__index__"):  # also numpy's
        raise TypeError(f"{what} must be an int, not {value!r}")
    try:
        value = operator.index(value)
    except TypeError as error:  # such as an array
        raise TypeError(f"{what} must be an int, not {value!r:.80}") from error
    if value < least:
        raise ValueError(f"{what} must be at least {least}, not {value}")
    if most is not None and value > most:
        raise ValueError(f"{what} must be at most {most}, not {shown(value)}")
    return value


def check_seed(seed: object) -> int:
    """Return a seed as an int, if it fits into 64 bits, with or without a sign."""
    return check_count("seed", seed, least=-(1 << 63), most=(1 << 64) - 1)


def check_seconds(what: str, seconds: object) -> float:
    """Return a time in seconds if it is a number of at least 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{what} must be a number of seconds, not {seconds!r:.80}")
    if not seconds >= 0:
        raise ValueError(f"{what} must be at least 0, not {seconds}")
    return seconds


def check_storage_options(options: object) -> dict[str, Any] | None:
    """Return ``options`` if they are a dict or None."""
    if options is not None and not isinstance(options, dict):
        raise TypeError(f"storage_options must be a dict, not {type(options).__name__}")
    return options


def check_choice(what: str, value: object, *choices: str) -> str:
    """Return ``value`` if it is one of ``choices``; otherwise raise an error that lists them."""
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, choices))}, not {value!r}")
    return str(value)
