"""How a member name splits into the key of its sample and the name of its field, and when a sample is like its neighbours: the one rule for all."""

from __future__ import annotations

from collections.abc import Callable, Container

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


# The fields of the samples of a shard, as a short text that a position can hold: names between spaces.

_MOST = 256
UNKNOWN = "*"  # too many names for a position, or such as cannot stand in it


def with_field(known: str, field: str) -> str:
    """The ``known`` fields and ``field``."""
    if known == UNKNOWN or not (field.isascii() and field.isprintable()) or not field or " " in field or len(known) + len(field) > _MOST:
        return UNKNOWN
    return known if has_field(known, field) else f"{known} {field}".lstrip()


def has_field(known: str, field: str) -> bool:
    """Whether ``field`` is one of the ``known`` ones."""
    return field in known.split(" ")


def lacks(fields: Container[str], known: str, wanted: Container[str] | None = None) -> list[str]:
    """Which of the ``known`` fields (those of them that are ``wanted``) are not among ``fields``; all of them if they are unknown."""
    return [field for field in known.split(" ") if field not in fields and (wanted is None or field in wanted or known == UNKNOWN)]
