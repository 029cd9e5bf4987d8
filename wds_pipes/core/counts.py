"""What became of samples, and what was needed to read them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from wds_pipes.core.digest import DIGESTS, as_counts, of_counts
from wds_pipes.core.words import listed, mend_dots
from wds_pipes.errors import SampleError

logger = logging.getLogger("wds_pipes")

COUNTED = ("delivered", "filtered", "skipped", "dropped")  # samples; these are always reported
TROUBLE = ("skipped_shards", "damaged", "padded", "cut", "excluded")  # reported only if they are not 0
DONE = "done"  # the field in which a stage that runs chains has the counts of those that are done
# those of the skipped samples that PipeLoader.skip() left out; reported only if there are any
LEFT_OUT = "left_out"
# the prefix of the counts of single stages that have max_errors; only the lanes of states have
# these
LIMITED = "errors in "


class NothingKeptError(SampleError):
    """An epoch gave nothing: no sample has a field that ``group_by_key(fields=...)`` keeps, or
    there is no sample.

    Attributes:
        samples: how many there are.
    """

    samples: int


class Lack(NamedTuple):
    """Why a running chain yielded nothing: how its samples fit the fields that
    ``group_by_key(fields=...)`` keeps, and what was skipped. And which keys it left out.

    Attributes:
        samples: how many samples had none of these fields.
        fits: whether any other sample had some of them.
        wanted: the fields to keep.
        left_out: other fields that were seen; only some of them if there are many.
        skipped: the message of the first error that was skipped; empty: none was.
        found: False: all shards were read, and have no sample, which is not allowed; None: unknown.
        outside: why the files of a shard make no sample; empty: no shard has only such files.
        excluded: the keys of the samples that ``load_state_dict(exclude=...)`` left out.
    """

    samples: int = 0
    fits: bool = False
    wanted: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    skipped: str = ""
    found: bool | None = None
    outside: str = ""
    excluded: frozenset[str] = frozenset()

    @classmethod
    def of_all(cls, lacks: Iterable[Lack]) -> Lack:
        """Return the sum over several chains."""
        both = cls()
        for lack in lacks:
            both = cls(
                both.samples + lack.samples,
                both.fits or lack.fits,
                both.wanted | lack.wanted,
                both.left_out | lack.left_out,
                both.skipped or lack.skipped,
                lack.found if both.found is None else both.found or bool(lack.found),
                both.outside or lack.outside,
                both.excluded | lack.excluded,
            )
        return both

    def explains(self, counts: Mapping[str, int]) -> bool:
        """Return whether, by ``counts``, the only thing that happened to samples is that they had
        none of the fields.
        """
        return not self.fits and self.samples > 0 and self.samples == sum(counts.get(name, 0) for name in COUNTED)

    @property
    def first_skip(self) -> str:
        """A sentence for messages; empty if nothing was skipped."""
        return self.skipped and f" The first error that was skipped: {self.skipped.rstrip('.')}."

    def error(self, whose: str = "") -> SampleError:
        """Return the error to raise if this explains why ``whose`` (empty: all) yielded nothing."""
        many = (
            f"all {self.samples:,} samples"
            if self.samples > 1
            else "the only sample"
            if self.samples
            else "all samples of the other lanes"
        )
        seen = f"; they have {listed(self.left_out)}" if self.left_out else ""
        usual: dict[str, Any] = {
            "mend": "Correct the names in group_by_key(fields=...).",
            "mend_cli": "Correct the names of --fields.",
        }
        return NothingKeptError(
            f"{many} had none of the fields {listed(self.wanted) or 'to keep'}{seen}",
            where=f"{whose} gave nothing:" if whose else "nothing is left:",
            samples=self.samples,
            **(mend_dots(self.wanted, sorted(self.left_out)) or usual),
        )


@dataclass(slots=True, eq=False)
class Meters:
    """What all steps of a running chain, and of the chains that they run, count together.

    Attributes:
        skips: how many errors, and samples beside damage or without a partner, were skipped.
        stall_seconds: how long the chain has waited for bytes of a store.
    """

    skips: int = 0
    stall_seconds: float = 0.0


class Network(NamedTuple):
    """The network use of a process when it reads from stores.

    Attributes:
        requests: how many requests were made.
        retries: how many of these repeated an earlier request that had failed.
        bytes_fetched: how many bytes arrived.
        stall_seconds: how long consumers waited for them.
        hedged: how many requests repeated one that had stalled, and was not abandoned: the first
            response was used.
    """

    requests: int = 0
    retries: int = 0
    bytes_fetched: int = 0
    stall_seconds: float = 0.0
    hedged: int = 0

    @classmethod
    def of_all(cls, used: Iterable[Network]) -> Network:
        """Return the sum over several chains or stages."""
        return cls(*map(sum, zip(NO_NETWORK, *used, strict=True)))


NO_NETWORK = Network()


def public_counts(counts: dict[str, int]) -> dict[str, int]:
    """Return counts of samples, without those of single stages and the digest."""
    return {name: count for name, count in counts.items() if is_public(name)}


def in_state(counts: dict[str, int]) -> dict[str, int]:
    """Return public counts as a state has them: without zeros, but for the delivered samples."""
    return {name: count for name, count in counts.items() if count or name == "delivered"}


def is_public(name: str) -> bool:
    """Return whether a count with this name is of samples, in all stages."""
    return name not in DIGESTS and not name.startswith(LIMITED)


def without_limited(counts: dict[str, int]) -> dict[str, int]:
    """Return counts without those of single stages."""
    return {name: count for name, count in counts.items() if not name.startswith(LIMITED)}


def leave_out(counts: dict[str, int], samples: int) -> None:
    """Change counts: samples among the delivered ones were left out by ``PipeLoader.skip``."""
    if samples:
        for name, more in (("delivered", -samples), ("skipped", samples), (LEFT_OUT, samples)):
            counts[name] = counts.get(name, 0) + more


def sum_counts(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the sums of counts, by their names; for the digest: of all samples together."""
    total: dict[str, int] = {}
    for counts in parts:
        for name, count in counts.items():
            total[name] = total.get(name, 0) + count
    if not total.keys().isdisjoint(DIGESTS):
        total |= as_counts(of_counts(total))
    return total


def warn_of_unmet(keys: Sequence[str], lack: Lack, epoch: int, *, whole: bool) -> None:
    """At the end of an epoch, warn of keys that ``load_state_dict(exclude=...)`` was to leave out,
    and that no sample had.

    Args:
        keys: the keys.
        lack: which of them samples had.
        epoch: the epoch.
        whole: this run has read all of it; otherwise only its rest after a state.
    """
    unmet = [key for key in keys if key not in lack.excluded]
    if unmet:
        part, why = ("", "") if whole else ("the rest of ", "came before the state was saved, ")
        logger.warning(
            "exclude=: %d of %d keys had no sample in %sepoch %d: they %swere left out by a step, or are "
            "misspelt. The keys: %s.",
            len(unmet), len(keys), part, epoch, why, listed(unmet),
        )  # fmt: skip


def error_of_nothing(counts: dict[str, int], lack: Lack) -> SampleError | None:
    """Return the error to raise after a whole epoch that yielded nothing, by ``lack``; None: no
    error. If samples were read and left out, log a warning.
    """
    if lack.explains(counts):
        return lack.error()
    if lack.found is False and not any(counts.values()):
        why = (
            "no shard of the list has a sample. Correct the list, or allow it with ShardList(empty_check=False)"
            if not lack.outside
            else lack.outside.rstrip(".")
        )
        return NothingKeptError(f"this epoch gave nothing: {why}.", samples=0)
    lost = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in counts.items() if count)
    if lost and not counts["delivered"]:
        logger.warning(
            "this epoch gave nothing: %s.%s "
            "See what group_by_key(fields=...), filters, slices and on_error='skip' leave.",
            lost,
            lack.first_skip,
        )
    return None
