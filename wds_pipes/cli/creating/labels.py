"""Labels of samples: integers, or the numbers of names."""

from __future__ import annotations

from collections.abc import Iterable

LABEL = "cls"  # the field of a label
# what programs write where there is none
_MISSING = {"nan", "none", "null", "na", "n/a", "<na>"}


def classes_of(labels: Iterable[str]) -> tuple[list[str], dict[str, bytes]]:
    """The sorted names of classes, if not all labels are integers; and the field of each label.

    Raises:
        ValueError: they are nearly integers, as programs write them where one is missing.
    """
    found = {label for label in labels if label}
    if all(map(_is_integer, found)):
        return [], {label: str(int(label)).encode() for label in found}
    missing = {label for label in found if label.lower() in _MISSING}
    if found - missing and all(map(_is_number, found - missing)):
        odd = min(missing) if missing else min(label for label in found if not _is_integer(label))
        raise ValueError(
            f"the labels are numbers, and one of them is {odd!r}: write integers, such as 3 and not 3.0, and leave out "
            "samples without a label"
        )
    classes = sorted(found)
    return classes, {name: str(number).encode() for number, name in enumerate(classes)}


def _is_integer(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and text.isascii()


def _is_number(label: str) -> bool:
    try:
        float(label)
    except ValueError:
        return False
    return True
