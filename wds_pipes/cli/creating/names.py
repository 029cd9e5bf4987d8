"""The key and the field of a file, by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from wds_pipes.cli.creating.records import Content, Problems, Record
from wds_pipes.tar.keys import split_key, without_dots

_RULES = "pass --key-split first-dot if that is meant, or --key-split last-dot, which writes v1.0_a.jpg as v1_0_a.jpg"


class Grouping:
    """Groups files into samples.

    Args:
        key_split: ``"first-dot"``; ``"last-dot"``, with which the other dots of a name become
            underscores, since a key has no dots; None: as ``"first-dot"``, and names that were
            probably not meant so are problems.
        problems: takes what is wrong.
    """

    def __init__(self, key_split: str | None, problems: Problems) -> None:
        self._rule, self._problems = key_split or "first-dot", problems
        self._sure = key_split is not None
        self._found: dict[str, dict[str, Content | bytes]] = {}
        self._names: dict[tuple[str, str], str] = {}
        self._stems: dict[str, str] = {}

    def add(self, name: str, content: Content) -> str | None:
        """Add a file by its name relative to the source; return its key, or None if it has none."""
        parts = split_key(name, self._rule)
        if parts is None:
            self._problems.add(
                f"{name} belongs to no sample: it has no extension, which names its field, its name begins with a dot, "
                f"or it is in '__NAME__/'. Rename it, or leave it out with --ignore {name.rpartition('/')[2]!r}"
            )
            return None
        stem, field = parts
        key = without_dots(stem) if self._rule == "last-dot" else stem
        other = self._names.setdefault((key, field), name)
        if field in self._found.get(key, ()) and other == name:
            self._problems.add(f"{name} comes twice: name it once, since a key has one sample")
        elif other != name:
            self._problems.add(f"{other} and {name} are both field {field!r} of sample {key!r}: rename one of them")
        elif self._stems.setdefault(key, stem) != stem:
            self._problems.add(f"{self._stems[key]!r} and {stem!r} would both have the key {key!r}: rename one of them")
        else:
            self._found.setdefault(key, {})[field] = content
        return key

    def records(self) -> list[Record]:
        """The samples, in the order in which their first files were added."""
        records = [Record(key, fields) for key, fields in self._found.items()]
        if not self._sure:
            self._doubt(records)
        return records

    def _doubt(self, records: Iterable[Record]) -> None:
        """Find names with several dots of which the first does not end the key."""
        records = list(records)
        dotted = Counter(field for record in records for field in record.fields if "." in field)
        alone = len(records) == 1
        endings = Counter(field.rpartition(".")[2] for field in dotted)
        for record in records:
            for field in record.fields:
                if dotted[field] == 1 and (not alone or endings[field.rpartition(".")[2]] > 1):
                    self._problems.add(
                        f"{self._names[record.key, field]}: a key ends at the first dot of a name, so this would be "
                        f"field {field!r} of sample {record.key!r}, which no other sample has: {_RULES}"
                    )
