"""A value as short text, without secrets.

Rules:
1. No ``repr`` of somebody else's object is called: it could be long, slow or tell a secret.
2. Text of others is shown as data: cut to a bounded length.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

import numpy as np

from wds_pipes.io.urls import hide, is_secret

MAX_TEXT = 80  # characters of a string in a call

_OPTIONS_WITH_SECRETS = ("storage_options", "headers", "client_kwargs")


def shown(value: Any, name: str = "", *, depth: int = 0, limit: int = MAX_TEXT) -> str:
    """A value as short text without secrets, as it would be written where that is possible.

    Args:
        value: anything; its own ``repr`` is called only for plain values.
        name: that of the option whose value it is: some are told without their values. Empty for data.
        depth: how deep it lies in others.
        limit: so many characters of a string.
    """
    kind = type(value)
    if isinstance(value, (str, os.PathLike)):
        text = str(value)
        return "'...'" if is_secret(name) else repr(cut(hide(text, text), limit))
    if is_secret(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return "..."
    if value is None or isinstance(value, (bool, int, float, complex, Fraction, np.number, np.bool_)):
        return cut(str(value) if isinstance(value, np.generic) else repr(value), limit)
    if isinstance(value, (bytes, bytearray)):
        return f"<{len(value):,} bytes>"
    if isinstance(value, Mapping):
        return _shown_mapping(value, name, depth, limit)
    if isinstance(value, (list, tuple, set, frozenset)) and not hasattr(value, "_fields"):
        left, right = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
        items = [] if depth > 2 else [shown(item, name, depth=depth + 1, limit=limit) for item, _ in zip(value, range(3), strict=False)]
        return left + ", ".join([*items, *(["..."] if len(value) > len(items) else [])]) + ("," if left == "(" and len(value) == 1 else "") + right
    if (shape := shape_of(value)) is not None:
        return f"<{shape}>"
    if callable(value):
        return _name_of(getattr(value, "func", value))
    return f"{kind.__name__}(...)"


def _shown_mapping(value: Mapping[Any, Any], name: str, depth: int, limit: int) -> str:
    secret = name in _OPTIONS_WITH_SECRETS
    items: list[str] = []
    for option, item in value.items():
        if len(items) == 6 or depth > 2:
            items.append("...")
            break
        plain = item is None or isinstance(item, bool)
        text = "..." if secret and not plain else shown(item, str(option) if name else "", depth=depth + 1, limit=limit)
        items.append(f"{shown(option, limit=limit)}: {text}")
    return "{" + ", ".join(items) + "}"


def _name_of(value: Any) -> str:
    """The name of a function or class, or that of an object's class."""
    name = getattr(value, "__name__", None)
    if not isinstance(name, str):
        return f"{type(value).__name__}(...)"
    return "lambda" if name == "<lambda>" else name


_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """``text`` with what a terminal would obey (escape sequences, changes of direction) written out; line breaks and tabs stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def cut(text: str, limit: int) -> str:
    """``text``, or its beginning and its end with dots between."""
    if len(text) <= limit:
        return text
    return f"{text[: limit * 2 // 3]}...{text[-(limit // 3) :]}"


def shape_of(value: Any) -> str | None:
    """An array or a tensor by its type, dtype and shape; None for anything else."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None or isinstance(value, type):
        return None
    device = str(getattr(value, "device", "cpu"))
    where = "" if device == "cpu" else f" on {device}"
    return f"{type(value).__name__} {str(dtype).removeprefix('torch.')} {tuple(map(int, shape))}{where}"
