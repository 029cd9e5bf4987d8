"""Shows a value as short text, without secrets.

Rules:
1. The ``repr`` of objects that are not ours is never called: it could be long or slow, or contain a
   secret.
2. Text is cut to a bounded length.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from wds_pipes.io.urls import hide, is_secret

MAX_TEXT = 80  # characters of a string in a call

_OPTIONS_WITH_SECRETS = ("storage_options", "headers", "client_kwargs")


def shown(value: Any, name: str = "", *, depth: int = 0, limit: int = MAX_TEXT) -> str:
    """Return a value as short text without secrets, if possible as it would be written in code.

    Args:
        value: anything; its own ``repr`` is called only if it is a plain value.
        name: the name of the option whose value it is: values of secret options are not shown.
            Empty for data.
        depth: in how many containers the value is nested.
        limit: the maximum number of characters of a string.
    """
    if isinstance(value, (str, os.PathLike)):
        text = str(value)
        return "'...'" if is_secret(name) else repr(cut(hide(text, text), limit))
    if is_secret(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return "..."
    if hasattr(value, "dtype"):
        import numpy as np  # only here: it takes longer than all else to show a text

        if isinstance(value, (np.number, np.bool_)):
            return cut(str(value), limit)
    if value is None or isinstance(value, (bool, int, float, complex, Fraction)):
        return cut(repr(value), limit)
    if isinstance(value, (bytes, bytearray)):
        return f"<{len(value):,} bytes>"
    if isinstance(value, Mapping):
        return _shown_mapping(value, name, depth, limit)
    if isinstance(value, (list, tuple, set, frozenset)) and not hasattr(value, "_fields"):
        left, right = "[]" if isinstance(value, list) else "()" if isinstance(value, tuple) else "{}"
        items = (
            []
            if depth > 2
            else [shown(item, name, depth=depth + 1, limit=limit) for item, _ in zip(value, range(3), strict=False)]
        )
        return (
            left
            + ", ".join([*items, *(["..."] if len(value) > len(items) else [])])
            + ("," if left == "(" and len(value) == 1 else "")
            + right
        )
    if (shape := shape_of(value)) is not None:
        return f"<{shape}>"
    if callable(value):
        return _name_of(getattr(value, "func", value))
    return f"{type(value).__name__}(...)"


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
    """Return the name of a function or class; for other objects, the name of the class."""
    name = getattr(value, "__name__", None)
    if not isinstance(name, str):
        return f"{type(value).__name__}(...)"
    return "lambda" if name == "<lambda>" else name


def cut(text: str, limit: int) -> str:
    """Return ``text``, or, if it is too long, its beginning and its end with dots between."""
    if len(text) <= limit:
        return text
    return f"{text[: limit * 2 // 3]}...{text[-(limit // 3) :]}"


def shape_of(value: Any) -> str | None:
    """Return type, dtype, shape and device of an array or a tensor as text; None for others."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(shape, tuple) or dtype is None or isinstance(value, type):
        return None
    device = str(getattr(value, "device", "cpu"))
    where = "" if device == "cpu" else f" on {device}"
    return f"{type(value).__name__} {str(dtype).removeprefix('torch.')} {tuple(map(int, shape))}{where}"
