"""The fields of samples: those that the samples of a shard have, and those that are kept.

A tar does not say where a sample ends, so damage can make a sample shorter without a trace in the
tar. What can be compared is its neighbours: usually all samples of a shard have the same fields.

1. ``SeenFields`` collects the fields of one shard. It is part of the position, as a short text: a
   resume in the middle of a shard knows the fields of the samples before.
2. ``Doubt`` is a place where a sample may have been cut. ``SeenFields.is_whole`` judges the sample
   before it.
3. ``KeptFields`` knows ``group_by_key(fields=...)``, and whether an epoch had these fields at all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Container, Iterable, Set
from dataclasses import dataclass
from typing import NamedTuple

from wds_pipes.core.counts import Lack
from wds_pipes.core.state import damaged
from wds_pipes.core.suggest import nearest
from wds_pipes.tar.keys import KeySplit, has_field, lacks, splitter, with_field
from wds_pipes.tar.members import END, MARK, TarMember

Split = Callable[[str], tuple[str, str] | None]
ENOUGH, VARIED = 3, 4  # values of SeenFields.alike
_MOST_MET = 200  # how many names of fields are kept for messages


class Doubt(NamedTuple):
    """A place where samples are doubtful.

    Attributes:
        offset: the byte of the shard.
        place: what is there: ``MARK`` or ``END`` of ``tar.members``.
        fields: the fields of the samples of the shard up to there.
    """

    offset: int
    place: bytes
    fields: str


@dataclass(slots=True)
class SeenFields:
    """What was seen of a shard up to a place.

    Attributes:
        fields: all fields of its samples, see ``tar.keys``.
        alike: how many whole samples it had, up to ENOUGH, if all have the same fields; VARIED if
            they differ.
        lost: 1: samples were lost, or were not counted; 2: also, what follows may lie inside
            another member.
        partial: whether the shard was not read from its beginning: ``see`` reads what is missing.
    """

    fields: str = ""
    alike: int = 0
    lost: int = 0
    partial: bool = False

    @classmethod
    def parse(cls, text: str) -> SeenFields:
        """Return the value that ``str`` wrote."""
        if not text:
            return cls()
        if len(text) < 2 or text[0] not in "01234" or text[1] not in "012345":
            raise damaged(f"group_by_key cannot stand at shard={text!r:.80}")
        lost = int(text[1])
        return cls(text[2:], int(text[0]), lost % 3, lost > 2)

    def __str__(self) -> str:
        return f"{self.alike}{self.lost + 3 * self.partial}{self.fields}"

    def see(self, members: Iterable[TarMember], split: Split, wanted: Set[str] | None, stop: int) -> None:
        """See the members of the shard that start before byte ``stop``, from its first one on, with
        or without their data; all were found to be whole.
        """
        self.fields, self.alike, self.partial = "", 0, False
        key, sample = "", set[str]()
        for _, name, _, offset in members:
            if offset >= stop:
                break
            parts = split(name) if name else None
            if parts is None:
                continue
            field = parts[1].lower()
            if parts[0] != key or not sample:
                kept = sample if wanted is None else sample & wanted
                look, width = self.compares(wanted, 0)
                if look and sample and len(kept) != width:
                    self.add(kept, wanted)
                key, sample = parts[0], set()
            sample.add(field)
            if not has_field(self.fields, field):
                self.fields = with_field(self.fields, field)
                if self.alike:
                    self.alike = VARIED

    def compares(self, wanted: Container[str] | None, others: int) -> tuple[bool, int]:
        """Return whether to compare the next whole sample with those before it, and the number of
        entries at which no comparison is needed: then it has the same fields as they.

        Args:
            wanted: the fields that samples keep; None: all.
            others: how many entries of a sample are not fields, such as ``__key__``.
        """
        if self.alike != ENOUGH:
            return self.alike != VARIED, 0
        return True, sum(wanted is None or field in wanted for field in self.fields.split(" ")) + others

    def add(self, sample: Container[str], wanted: Container[str] | None) -> None:
        """Note whether a whole sample has the same fields as those before it."""
        same = self.alike < ENOUGH and not lacks(sample, self.fields, wanted)
        self.alike = self.alike + 1 if same else VARIED

    def is_whole(self, sample: Container[str], doubt: Doubt, wanted: Container[str] | None) -> bool:
        """Return whether the sample next to a doubtful place is whole, as far as its neighbours
        tell.
        """
        if not self.alike:  # the first sample of a shard: if more follow, the next one is compared with it
            return doubt.place == MARK and bool(doubt.fields) and not self.lost
        return not lacks(sample, self.fields, wanted) and (doubt.place == END or self.fields == doubt.fields)

    def missing(self, last: Container[str], wanted: Container[str] | None) -> list[str]:
        """Return the fields that the last sample of the shard lacks, if there are enough samples
        before it, and all of them have these fields.
        """
        return lacks(last, self.fields, wanted) if self.alike == ENOUGH else []


class KeptFields:
    """The fields that samples keep, and which of them an epoch had.

    Attributes:
        names: the fields to keep, in lower case; None: all.
        found: whether a sample had one of them. ``group_by_key`` sets this.
        met: whether there was a sample.
    """

    def __init__(self, names: Iterable[str] | None) -> None:
        self.names = None if names is None else frozenset(names)
        self.found = names is None
        self.met = False
        self._met: set[str] = set()  # fields of the samples, if not all are kept

    def wants(self, key_split: KeySplit) -> Callable[[str], bool] | None:
        """Return a function that says of the name of a member whether it is kept; None: all are."""
        names, split = self.names, splitter(key_split)
        if names is None:
            return None

        def want(name: str) -> bool:
            parts = split(name)
            return parts is not None and parts[1].lower() in names

        return want

    def meet(self, field: str) -> None:
        """Note that a sample has this field, kept or not."""
        self.met = True
        if self.names is not None and len(self._met) < _MOST_MET:
            self._met.add(field)

    def lack(self, filtered: int) -> Lack:
        """Return how the samples fit the fields to keep; ``filtered`` of them had none."""
        wanted = self.names or frozenset()
        return Lack(filtered, self.found, wanted, frozenset(self._met - wanted))

    def tell_misspelt(self) -> None:
        """Warn of each field to keep that no sample had, if a field of nearly the same name was
        left out.
        """
        lack = self.lack(0)
        for field in sorted(lack.wanted - self._met) if len(self._met) < _MOST_MET else ():
            if (meant := nearest(field, lack.left_out)) is not None:
                warnings.warn(
                    f"no sample had {field!r} of group_by_key(fields=...). Did you mean {meant!r}, which is left out?",
                    stacklevel=3,
                )
