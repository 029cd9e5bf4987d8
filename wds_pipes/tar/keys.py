"""Split a member name into the key of its sample and its field. All modules use these rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from fnmatch import fnmatchcase

_PAX_HEADERS = re.compile(r"(^|/)PaxHeaders\.\d+/").search
KeySplit = str | Callable[[str], tuple[str, str] | None]
Split = Callable[[str], tuple[str, str] | None]


def split_key(name: str, rule: KeySplit = "first-dot") -> tuple[str, str] | None:
    """The key and the field of a member name, or None for a member that belongs to no sample.

    The field is returned in lower case, the key unchanged. Hidden files (``.x``, ``._x``), names
    without a dot (or, by ``"folder"``, without a directory), everything under a top-level
    ``__name__`` and under a ``PaxHeaders.N`` belong to no sample: the latter are the headers of a
    pax archive that an old program has unpacked as files.

    Args:
        name: the member's name in the tar.
        rule: ``"first-dot"`` (webdataset's rule: ``a.seg.png`` is key ``a``, field ``seg.png``),
            ``"last-dot"`` (key ``a.seg``, field ``png``), ``"folder"`` (the first directory of
            ``run7/cam/0.jpg`` is the key ``run7``, the path below it the field ``cam/0.jpg``) or a
            function from the name to a (key, field) pair or None.
    """
    parts = splitter(rule)(name)
    return parts and (parts[0], parts[1].lower())


def check_key_split(rule: KeySplit) -> KeySplit:
    """Return ``rule`` if it is one of ``split_key``; otherwise raise ValueError."""
    if not callable(rule) and rule not in _RULES:
        names = ", ".join(map(repr, _RULES))
        raise ValueError(f"key_split must be one of {names} or a function, not {rule!r:.80}")
    return rule


def splitter(rule: KeySplit) -> Split:
    """The function of one rule of ``split_key``; it does not change the case of the field."""
    check_key_split(rule)
    return rule if callable(rule) else _RULES[rule]


def matches(field: str, name: str) -> bool:
    """Return whether a name means a field; a ``*`` in the name stands for any characters."""
    return field == name or ("*" in name and fnmatchcase(field, name))


class Kept(frozenset[str]):
    """The names of fields to keep; one with a ``*`` keeps all fields that match."""

    def __contains__(self, field: object) -> bool:
        return super().__contains__(field) or any(matches(str(field), name) for name in self if "*" in name)


def kept(fields: Collection[str]) -> Collection[str]:
    """Return the fields to keep as a set that says whether a field is among them."""
    return Kept(fields) if any("*" in name for name in fields) else frozenset(fields)


def wants(fields: Collection[str] | None, rule: KeySplit) -> Callable[[str], bool] | None:
    """Return a function that says of a name whether its field is one of ``fields``; None: all
    are.
    """
    if fields is None:
        return None
    split, keep = splitter(rule), kept(fields)

    def want(name: str) -> bool:
        parts = split(name)
        return parts is not None and parts[1].lower() in keep

    return want


def why_outside(rule: KeySplit) -> str:
    """Say what a name needs to be that of a file of a sample."""
    if callable(rule):
        return "key_split returns None for their names"
    if rule == "folder":
        return "files of samples are in a directory, such as 0001/camera.jpg"
    return "files of samples are named KEY.FIELD, such as 0001.jpg, and are not hidden"


def _first_dot(name: str) -> tuple[str, str] | None:
    key, dot, field = name.partition(".")
    if "/" in field:  # the first dot is in the name of a directory
        if _PAX_HEADERS(name):
            return None
        slash = name.rfind("/") + 1
        key, dot, field = name[slash:].partition(".")
        key = key and name[:slash] + key
    if not dot or not key or key[-1] == "/" or (key[:2] == "__" and is_metadata(name.partition("/")[0])):
        return None
    return key, field


def _last_dot(name: str) -> tuple[str, str] | None:
    slash = name.rfind("/") + 1
    dot = name.rfind(".", slash)
    if (
        dot <= slash
        or name[slash] == "."
        or (slash and _PAX_HEADERS(name))
        or (name[:2] == "__" and is_metadata(name.partition("/")[0]))
    ):
        return None
    return name[:dot], name[dot + 1 :]


def _folder(name: str) -> tuple[str, str] | None:
    key, slash, field = name.removeprefix("./").partition("/")
    # files of the Finder belong to no sample; other hidden ones do, such as .zarray
    if not slash or not key or key[0] == "." or is_metadata(key) or field[field.rfind("/") + 1 :][:2] in ("", "._"):
        return None
    if _PAX_HEADERS(name):
        return None
    return key, field


_RULES: dict[str, Split] = {"first-dot": _first_dot, "last-dot": _last_dot, "folder": _folder}


def is_metadata(name: str) -> bool:
    """Whether a name in a sample is metadata, such as ``__key__``: it begins and ends with two
    underscores. All other names are fields.
    """
    return name[:2] == "__" == name[-2:] and len(name) >= 4


def without_dots(name: str) -> str:
    """A name as a key of ``"first-dot"``: in its last part, dots become underscores."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.replace(".", "_")
