"""Format counts, names and values for messages."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable
from typing import Any

_UNITS = ("bytes", "kB", "MB", "GB", "TB", "PB")
_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 80
_repr.maxlist = _repr.maxdict = _repr.maxtuple = 4
_repr.maxlevel = 3
# Escape sequences, changes of direction, and halves of characters.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def shown(value: object) -> str:
    """Return a value of a state for a message, in at most 80 characters."""
    try:
        text = _repr.repr(value)
    except Exception:  # for example for an int with thousands of digits
        text = f"some {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def plain(text: str) -> str:
    """Return ``text`` with control characters (escape sequences, changes of direction) as visible
    escapes.

    Line breaks and tabs stay.
    """
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def plain_json(text: str) -> str:
    """Return JSON of the same value, without control characters in its strings."""
    if text.isascii() and "\x7f" not in text:  # JSON has no others as they are; a long line is looked at quickly
        return text
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def plural(count: int, noun: str) -> str:
    """Return a count with its noun: ``1 shard``, ``1,000 shards``."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}es" if noun.endswith("ch") else f"{count:,} {noun}s"


def bytes_shown(size: float) -> str:
    """Return a number of bytes in three digits: ``107 kB``; 1 kB is 1,000 bytes."""
    unit = 0
    while size >= 999.5 and unit < len(_UNITS) - 1:
        size, unit = size / 1000, unit + 1
    return "1 byte" if size == 1 and not unit else f"{size:.3g} {_UNITS[unit]}"


def listed(names: Iterable[str]) -> str:
    """Return names in quotes, sorted, at most 20 of them."""
    ordered = sorted(names)
    return ", ".join(f"{name!r:.80}" for name in ordered[:20]) + (", ..." if len(ordered) > 20 else "")


def mend_dots(wanted: Iterable[str], there: Iterable[Any]) -> dict[str, Any]:
    """Return what to do, as an error takes it, if a field that is there ends like one that is
    wanted, so that it may begin inside of a key with a dot; otherwise nothing.
    """
    ends = tuple(f".{name}" for name in wanted)
    dotted = next((name for name in there if isinstance(name, str) and name.endswith(ends)), None)
    if dotted is None:
        return {}
    begin = f"If {dotted.rpartition('.')[0]!r:.80} is a part of the key, pass"
    return {"mend": f"{begin} group_by_key(key_split='last-dot').", "mend_cli": f"{begin} --key-split last-dot."}


def some(numbers: Any) -> str:
    """Return numbers for a message, at most the first 10."""
    first = [str(number) for number, _ in zip(numbers, range(11), strict=False)]
    return ", ".join([*first[:10], *(["..."] if len(first) > 10 else [])]) or "none"
