"""Stages that run chains of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from wds_pipes.core.counts import Lack, add_limited, public_counts
from wds_pipes.core.running import Mark, Out
from wds_pipes.core.stage import Stage, functional_name
from wds_pipes.core.state import read_counts


class Composite(Stage[Out]):
    """The base of stages whose running copy runs chains: one after another, or several in turn.

    Attributes:
        inner: while running, the chains that are open.
    """

    @dataclass(slots=True)
    class At:
        """The counts of the chains that are done."""

        batched: int = 0  # samples that were delivered in batches
        filtered: int = 0
        skipped: int = 0
        dropped: int = 0
        skipped_shards: int = 0
        damaged: int = 0
        limited: dict[str, int] | None = None  # the counts of single stages

    tallies: ClassVar[tuple[str, ...]] = ("filtered", "skipped", "dropped", "skipped_shards", "damaged")
    runs_chains = True
    counts_itself = True
    _lack_before = Lack()  # while running: of the chains that are done
    _bytes_before = 0  # while running: bytes that were read by them

    @property
    def inner(self) -> Sequence[Stage[Any]]:
        raise NotImplementedError

    def retire(self, chain: Stage[Any]) -> None:
        """Close a chain that is done, and keep its counts."""
        counts = chain.counts(chain.mark(), 0)
        self.at.limited = add_limited(self.at.limited, counts)
        for name, count in public_counts(counts).items():
            own = "batched" if name == "delivered" else name
            setattr(self.at, own, getattr(self.at, own) + count)
        self._lack_before = Lack.of_all((self._lack_before, chain.lack))
        self._bytes_before += chain.bytes_so_far
        chain.close()

    def counts_with(self, own: tuple[Any, ...] | None, inner: dict[str, int], delivered: int) -> dict[str, int]:
        """Return the counts of the chains that are done, which are in the ``own`` values of a mark,
        and those of the chain that is open.
        """
        counts = super().counts((own, None) if own else None, 0)
        at = self._at(own)
        counts |= at.limited or {}
        return {
            **counts,
            **{name: counts.get(name, 0) + count for name, count in inner.items()},
            "delivered": at.batched + inner["delivered"] if self.counts_delivered else delivered,
        }

    def uncounted(self, entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        *before, own = super().uncounted(entries)
        return [*before, {name: value for name, value in own.items() if name not in ("batched", "limited")}]

    def load(self, entries: list[dict[str, Any]]) -> Mark:
        read_counts(entries[-1].get("limited", {}), f"'limited' of {functional_name(type(self))}")
        return super().load(entries)

    @property
    def lack(self) -> Lack:
        return Lack.of_all([self._lack_before, *(chain.lack for chain in self.inner)])

    @property
    def bytes_so_far(self) -> int:
        return self._bytes_before + sum(chain.bytes_so_far for chain in self.inner)

    def close(self) -> None:
        self.items.close()  # type: ignore[attr-defined]
        for chain in self.inner:
            chain.close()
