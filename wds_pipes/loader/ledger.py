"""The ledger of a loader: a digest of the samples that came through a place of the chain.

Rules:
1. The digest is two counts of a step, which ``with_ledger`` puts into the chain. So it belongs to
   the position of a lane: the loader adopts both together, and a resume, a repartition and
   ``merge_states`` treat it as they treat the counts of samples.
2. The step comes after all steps that hold samples, and all steps after it make each item of one
   item. It is as late as the samples are known to have their ``__key__`` and ``__url__``. A sample
   that a step after it leaves out belongs to the digest.
3. Of a pack or a bucket of samples, those belong to the digest that end in it, if the step that
   makes it is the last one that holds samples. So a document that is cut over several packs counts
   once, however it is cut.
4. Repeats that fill up an epoch (``epoch_end="pad"``) do not belong to it, and neither do samples
   that ``drop_last`` leaves out.
5. Of an epoch that is over, the digest is added to that of the epochs before, each times a number
   of the epoch: see ``wds_pipes.core.digest.in_epoch``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from operator import itemgetter
from typing import Any

from wds_pipes.core.chain import Chain, linked
from wds_pipes.core.digest import DIGESTS, ShardHash, add, halves, of_halves, of_samples, of_shard
from wds_pipes.core.stage import END, Mark, Out, Stage, functional_name
from wds_pipes.io.urls import identify
from wds_pipes.stages.windowed import Windowed

_IDENTITY = itemgetter("__key__", "__url__")
_MOST_PENDING = 1 << 12  # items that are not summed up yet, where later steps leave out many
_MOST_SHARDS = 1 << 14  # that are kept


class Ledger(Stage[Out]):
    """Yields the items of its source, and sums up a digest of them.

    Checkpoint: the digest. A resume reads nothing again.

    Attributes:
        on: whether to sum up anything. If not, the step costs nothing.
    """

    @dataclass(slots=True)
    class At:  # noqa: D106 - see Stage
        digest_low: int = 0
        digest_high: int = 0

    tallies = DIGESTS
    keeps_count = True
    scope = "item"
    source: Stage[Out]

    def __init__(self, source: Stage[Out], *, on: bool) -> None:
        super().__init__(source)
        self.on = on
        # while running
        self._pending: list[tuple[Any, Any]] = []  # the identities of items since the last sum
        self._shards: dict[str, ShardHash] = {}  # by their URLs, what ``of_samples`` takes

    def run(self) -> Iterator[Out]:
        if not self.on:
            return self.source.items
        return self._noting_groups(self.source) if isinstance(self.source, Windowed) else self._noting()

    def _noting_groups(self, source: Windowed[Out]) -> Iterator[Out]:
        for item in source.items:
            try:
                self._pending += map(_IDENTITY, source.ended_in(item))
            except Exception as error:
                raise self._without_keys(item) from error
            yield item
            if len(self._pending) >= _MOST_PENDING:
                self._sum_up()

    def _noting(self) -> Iterator[Out]:
        # Only what must be done for each sample; ``_sum_up`` does the rest for many at once.
        note, may_repeat, items = self._pending.append, self.lane.padding is not None, self.source.items
        item: Any
        while (first := next(items, END)) is not END:
            for item in chain([first], islice(items, _MOST_PENDING - 1)):
                try:
                    if not may_repeat or not item["__padding__"]:
                        note(_IDENTITY(item))
                except Exception as error:
                    raise self._without_keys(item) from error
                yield item
            self._sum_up()

    def _without_keys(self, item: object) -> TypeError:
        """Return the error for an item of a step of the user's that has no such entries: a digest
        of such items would be that of any others, too.
        """
        name = functional_name(type(self.source))
        return TypeError(
            f"the ledger has the keys of samples after {name}(), and an item there lacks '__key__', '__url__' or the "
            f"'__padding__' of epoch_end='pad': {item!r:.80}. Keep them up to there, or leave out ledger="
        )

    def mark(self) -> Mark:
        if self._pending:
            self._sum_up()
        return super().mark()

    def _sum_up(self) -> None:
        """Add the items since the last sum to the digest."""
        at, known, pending = self.at, self._shards, self._pending
        try:
            digest = of_samples([(key, known.get(url) or self._shard_of(url)) for key, url in pending])
        except (TypeError, AttributeError):  # they are no texts
            digest = of_samples([(str(key), self._shard_of(str(url))) for key, url in pending])
        pending.clear()
        at.digest_low, at.digest_high = halves(add([of_halves(at.digest_low, at.digest_high), digest]))

    def _shard_of(self, url: str) -> ShardHash:
        """Return what ``of_samples`` takes for a shard. It is that of its number in the list, so
        that it stays the same if shards are moved.
        """
        if len(self._shards) >= _MOST_SHARDS:
            self._shards.clear()
        shard = self._shards[url] = of_shard(Chain(self).root.number_of(url) or identify(url))
        return shard


def with_ledger(stage: Stage[Any], *, on: bool) -> Stage[Any]:
    """Return a chain with a ``Ledger`` in it, or as it is if there is no place for one. A state is
    that of the same chain with and without a ledger, so one that is not ``on`` has its place too.
    """
    steps = Chain(stage).steps
    place = _place(steps)
    return stage if place is None else linked(Ledger(steps[place], on=on), steps[place + 1 :])


def _place(steps: Sequence[Stage[Any]]) -> int | None:
    """Return the place of the step after which the digest is summed up; None: there is none."""
    known = _have_keys(steps)
    last = max(place for place, step in enumerate(steps) if place == 0 or step.scope != "item")
    if isinstance(steps[last], Windowed):
        return last if known[last - 1] else None
    first = next((place for place in range(last, len(steps)) if known[place]), None)
    if first is None:
        return None
    while first + 1 < len(steps) and steps[first + 1]._keeps_keys:
        first += 1
    return first


def _have_keys(steps: Sequence[Stage[Any]]) -> list[bool]:
    """Return of each step whether its items are samples that may have keys."""
    branches = Chain(steps[0]).root.branches.values()
    known, found = bool(branches) and all(_have_keys(Chain(branch).steps)[-1] for branch in branches), []
    for step in steps:
        if step.gives is not None:
            known = step.gives == "samples"
        elif step.items_per_batch is not None or step._keeps_keys is False:
            known = False
        found.append(known)
    return found
