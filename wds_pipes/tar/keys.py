"""How a member name splits into the key of its sample and the name of its field: the one rule for readers and writers."""

from __future__ import annotations

from collections.abc import Callable

KeySplit = str | Callable[[str], tuple[str, str] | None]


def split_key(name: str, rule: KeySplit = "first-dot") -> tuple[str, str] | None:
    """The key and the field of a member name, or None for a member that belongs to no sample.

    The field is in lower case, the key stays as it is. Hidden files (``.x``, ``._x``), names without a dot and what lies under a top-level ``__name__``
    belong to no sample.

    Args:
        name: the member's name in the tar.
        rule: ``"first-dot"`` (the rule of webdataset: ``a.seg.png`` is key ``a``, field ``seg.png``), ``"last-dot"`` (key ``a.seg``, field ``png``) or a
            function from the name to a (key, field) pair or None.
    """
    parts = splitter(rule)(name)
    return parts and (parts[0], parts[1].lower())


def splitter(rule: KeySplit) -> Callable[[str], tuple[str, str] | None]:
    """``split_key`` by one rule, but with the field as it is written."""
    if callable(rule):
        return rule
    return _first_dot if rule == "first-dot" else _last_dot


def _first_dot(name: str) -> tuple[str, str] | None:
    key, dot, field = name.partition(".")
    if "/" in field:  # the first dot is in a directory's name
        slash = name.rfind("/") + 1
        key, dot, field = name[slash:].partition(".")
        key = key and name[:slash] + key
    if not dot or not key or key[-1] == "/" or (key[:2] == "__" and _is_meta(name)):
        return None
    return key, field


def _last_dot(name: str) -> tuple[str, str] | None:
    slash = name.rfind("/") + 1
    dot = name.rfind(".", slash)
    if dot <= slash or name[slash] == "." or (name[:2] == "__" and _is_meta(name)):
        return None
    return name[:dot], name[dot + 1 :]


def _is_meta(name: str) -> bool:
    top = name.partition("/")[0]
    return len(top) >= 4 and top.endswith("__")
