"""Labels of samples: integers, or the numbers of names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from wds_pipes.cli.creating.records import Problems, Record

LABEL = "cls"  # the field of a label
_INTEGER = re.compile("-?[0-9]+")
_NUMBER = re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[-+]?[0-9]+)?|nan", re.IGNORECASE)


def add_labels(records: Sequence[Record], labels: Sequence[str | None], problems: Problems) -> list[str]:
    """Add its label to each sample: the integer, or the number of the name.

    Returns:
        The sorted names of the classes, which is empty if labels are integers.

    Raises:
        ValueError: only some labels are numbers, or they are no integers.
    """
    found = [label for label in labels if label is not None]
    if found and len(found) < len(records):
        bare = records[labels.index(None)]
        problems.add(f"sample {bare.key!r} has no label, and others have: give it one")
    classes, of_names = _classes_of(found)
    for record, label in zip(records, labels, strict=True):
        if label is not None:
            record.fields[LABEL] = of_names[label]
    return classes


def _classes_of(labels: Iterable[str]) -> tuple[list[str], dict[str, bytes]]:
    """The names of the classes, and the field of each label."""
    found = sorted(set(labels))
    odd = [label for label in found if not _INTEGER.fullmatch(label)]
    if not odd:
        return [], {label: str(int(label)).encode() for label in found}
    if any(map(_NUMBER.fullmatch, found)):
        raise ValueError(
            f"some labels are numbers, and {odd[0]!r} is no integer: write integers, such as 3 and not 3.0, or names, "
            "and leave out samples without a label"
        )
    return found, {name: str(number).encode() for number, name in enumerate(found)}
