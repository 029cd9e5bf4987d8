"""What is found in shards: findings, and a report of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from wds_pipes.core.words import plural

# The kinds of findings; the reference of the command line says what each means.
KINDS = (
    "damage",
    "sample",
    "reserved-name",
    "link",
    "duplicate-key",
    "undecodable",
    "some-fields",
    "dotted-name",
    "checksum",
    "stale-index",
)
_MENDING = ("repair", "dedup", "index")  # the order in which they may be run


class Finding(NamedTuple):
    """What is wrong.

    Attributes:
        kind: such as ``"damage"``: one of the kinds that ``wds-pipes verify`` lists.
        text: what is wrong, and where, in a sentence; what to do, in words of the command line.
        shard: the URL, without credentials; None: it is about several shards.
        key: the key of the sample; None: it is not about one.
        byte: the place in the (decompressed) tar; None: there is none.
        mend: a command that mends it; None: the text says what to do.
    """

    kind: str
    text: str
    shard: str | None = None
    key: str | None = None
    byte: int | None = None
    mend: str | None = None


@dataclass
class VerifyReport:
    """What was found in shards.

    Attributes:
        findings: in the order of the shards, and then those about several; at most 100 of a kind
            and shard, and 100,000 in all.
        counts: how many there are of each kind.
        shards: how many were read.
        samples: how many samples they have.
        outside: how many files belong to no sample.
        notes: what could not be checked.
    """

    findings: list[Finding] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    shards: int = 0
    samples: int = 0
    outside: int = 0
    notes: set[str] = field(default_factory=set)

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        lists = {"findings": [finding._asdict() for finding in self.findings], "notes": sorted(self.notes)}
        counts = {"outside": self.outside, "counts": dict(self.counts)}
        return {"shards": self.shards, "samples": self.samples, **counts, **lists}

    def lines(self) -> Iterator[str]:
        """Return the notes, the commands that mend what was found, and a summary, as lines."""
        for note in sorted(self.notes):
            yield f"note: {note}"
        # a command mends all findings of its kind
        mends = dict.fromkeys(finding.mend for finding in self.findings if finding.mend is not None)
        commands = sorted(mends, key=lambda mend: _MENDING.index(mend.split()[1]))
        if len(commands) > 1:
            yield "These commands mend it, one after the other, each on what the one before has written:"
        for command in commands:
            yield f"  -> {command}"
        total = self.counts.total()
        hidden = total - len(self.findings)
        more = f", of which {hidden:,} are not shown" if hidden else ""
        outside = f"; {plural(self.outside, 'file')} of no sample" if self.outside else ""
        yield (
            f"{plural(self.shards, 'shard')}, {plural(self.samples, 'sample')}: "
            f"{plural(total, 'finding') if total else 'nothing is wrong'}{more}{outside}"
        )
