"""Split a member name into the key of its sample and its field, and compare the fields of samples.

All modules use these rules.
"""

from __future__ import annotations

from collections.abc import Callable, Container

KeySplit = str | Callable[[str], tuple[str, str] | None]


def split_key(name: str, rule: KeySplit = "first-dot") -> tuple[str, str] | None:
    """The key and the field of a member name, or None for a member that belongs to no sample.

    The field is returned in lower case, the key unchanged. Hidden files (``.x``, ``._x``), names
    without a dot and everything under a top-level ``__name__`` belong to no sample.

    Args:
        name: the member's name in the tar.
        rule: ``"first-dot"`` (webdataset's rule: ``a.seg.png`` is key ``a``, field ``seg.png``),
            ``"last-dot"`` (key ``a.seg``, field ``png``) or a function from the name to a (key,
            field) pair or None.
    """
    parts = splitter(rule)(name)
    return parts and (parts[0], parts[1].lower())


def check_key_split(rule: KeySplit) -> KeySplit:
    """Return ``rule`` if it is one of ``split_key``; otherwise raise ValueError."""
    if not callable(rule) and rule not in ("first-dot", "last-dot"):
        raise ValueError(f"key_split must be one of 'first-dot', 'last-dot' or a function, not {rule!r:.80}")
    return rule


def splitter(rule: KeySplit) -> Callable[[str], tuple[str, str] | None]:
    """The function of one rule of ``split_key``; it does not change the case of the field."""
    if callable(rule):
        return rule
    return _first_dot if rule == "first-dot" else _last_dot


def _first_dot(name: str) -> tuple[str, str] | None:
    key, dot, field = name.partition(".")
    if "/" in field:  # the first dot is in the name of a directory
        slash = name.rfind("/") + 1
        key, dot, field = name[slash:].partition(".")
        key = key and name[:slash] + key
    if not dot or not key or key[-1] == "/" or (key[:2] == "__" and is_metadata(name.partition("/")[0])):
        return None
    return key, field


def _last_dot(name: str) -> tuple[str, str] | None:
    slash = name.rfind("/") + 1
    dot = name.rfind(".", slash)
    if dot <= slash or name[slash] == "." or (name[:2] == "__" and is_metadata(name.partition("/")[0])):
        return None
    return name[:dot], name[dot + 1 :]


def is_metadata(name: str) -> bool:
    """Whether a name in a sample is metadata, such as ``__key__``: it begins and ends with two
    underscores. All other names are fields.
    """
    return name[:2] == "__" == name[-2:] and len(name) >= 4


def without_dots(name: str) -> str:
    """A name as a key of ``"first-dot"``: in its last part, dots become underscores."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.replace(".", "_")


# The known fields of the samples of a shard, as a short string for a position: names separated by
# spaces.

_MOST = 256  # characters
UNKNOWN = "*"  # too many names for a position, or a name that such a string cannot represent


def with_field(known: str, field: str) -> str:
    """Add ``field`` to the ``known`` fields."""
    if (
        known == UNKNOWN
        or not (field.isascii() and field.isprintable())
        or not field
        or " " in field
        or len(known) + len(field) > _MOST
    ):
        return UNKNOWN
    return known if has_field(known, field) else f"{known} {field}".lstrip()


def has_field(known: str, field: str) -> bool:
    """Whether ``field`` is one of the ``known`` ones."""
    return field in known.split(" ")


def lacks(fields: Container[str], known: str, wanted: Container[str] | None = None) -> list[str]:
    """The ``known`` fields that are not in ``fields``; only those in ``wanted``, if given.

    If the known fields are UNKNOWN, the result is [UNKNOWN].
    """
    return [
        field
        for field in known.split(" ")
        if field not in fields and (wanted is None or field in wanted or known == UNKNOWN)
    ]
