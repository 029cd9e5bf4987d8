"""How a PipeLoader divides epochs: all that its options, rank and pipeline alone determine."""

from __future__ import annotations

import itertools
import math
import pickle
from functools import cached_property
from typing import Any, Literal, NamedTuple

from wds_pipes.core.chain import Chain
from wds_pipes.core.counts import COUNTED, LIMITED, Lack, logger
from wds_pipes.core.digest import NOTHING, Digest, add, as_counts, in_epoch, of_counts, subtract, to_text
from wds_pipes.core.lane import Lane
from wds_pipes.core.options import check_choice, check_count
from wds_pipes.core.recipe import Recipe
from wds_pipes.core.stage import Source, Stage, State, close_running, functional_name
from wds_pipes.core.state import LEDGER, MOST_LANES, STATE_VERSION
from wds_pipes.core.tolerant import Tolerant
from wds_pipes.core.words import plural
from wds_pipes.errors import WdsError
from wds_pipes.loader.ledger import with_ledger
from wds_pipes.loader.lengths import batches_of, why_uncounted
from wds_pipes.loader.partition import BEGINNING, LaneAt, LaneState, LaneStates, Terms, total_counts
from wds_pipes.loader.ranks import Rank, check_alike, find_rank
from wds_pipes.loader.segments import lay_out, segments_of
from wds_pipes.loader.sharing import digest_of
from wds_pipes.loader.slices import Partition, kind_of

ELASTIC = 24  # lanes, which 1, 2, 3, 4, 6, 8, 12 and 24 ranks divide


class LoaderPosition(NamedTuple):
    """The position of a loader: one immutable value, replaced in a single assignment.

    So a signal handler or another thread never sees half of a position.
    """

    epoch: int
    partition: Partition
    lanes: dict[int, LaneAt]  # where the lanes of this rank stand
    step: int = 0
    given: int = 0  # batches since the last cut of with_epoch
    samples: int = 0  # samples since then, if with_epoch counts samples
    earlier: Digest | None = None  # of the samples of this rank in earlier epochs; None: there is no ledger

    @property
    def ended(self) -> bool:
        """Whether all lanes of this rank have ended."""
        return all(lane.ended for lane in self.lanes.values())

    @property
    def begins(self) -> bool:
        """Whether this is the beginning of the epoch: no rank has had anything of it."""
        return not self.step and not self.ended and not any(self.partition.counts.values())

    def counted_from(self, other: LoaderPosition | None) -> LoaderPosition:
        """Return this position with the numbers since the last cut of ``other``; None: the cut is
        here.
        """
        return (
            self._replace(given=0, samples=0)
            if other is None
            else self._replace(given=other.given, samples=other.samples)
        )


class Plan:
    """How epochs are divided over lanes, and the lanes over ranks.

    Args:
        stage: the pipeline.
        epoch_end: an option of PipeLoader.
        lanes: an option of PipeLoader.
        num_workers: an option of PipeLoader.
        parts: of how many parts, each from another lane, a batch consists.
        drop_last: an option of PipeLoader.
        ledger: whether to keep a digest of the samples.
        rank: the rank and the number of ranks; (None, None): they are determined at the first use.

    Attributes:
        stage: the pipeline with a ``Segments`` stage in it, see ``wds_pipes.loader.segments``.
        kind: how epochs are divided.
        uncounted: why the number of samples of a lane is not known; None if it is known.
        parts, drop_last: as above.
        lanes: the number of lanes that the caller requests; None: it may be any.
        elastic: whether the number of lanes at a first start is a multiple of ELASTIC.
        ledger: whether to keep a digest of the samples.
        limits: the limits of the steps that have ``max_errors``, by the names of their counts.
    """

    def __init__(
        self,
        stage: Stage[Any],
        *,
        epoch_end: str | None,
        lanes: int | Literal["elastic"] | None,
        num_workers: int,
        parts: int = 1,
        drop_last: bool = False,
        ledger: bool = False,
        rank: tuple[int | None, int | None],
    ) -> None:
        if rank != (None, None):
            find_rank(*rank)
        chain = Chain(stage)
        if chain.never_ends:
            raise ValueError(
                "repeat() without end is not for PipeLoader, which could not give the samples of one epoch exactly "
                "once: leave it out, and pass epoch_end='loop', with which the epochs follow each other without end, "
                "and with_epoch() cuts them."
            )
        self.kind, why_not = kind_of(stage, epoch_end, parts)
        self.ledger, summing = ledger, with_ledger(stage, on=ledger)
        if ledger and summing is stage:
            raise ValueError(
                "this pipeline can have no ledger: after its last step that holds samples, such as shuffle_buffer(), "
                "they have no __key__ and __url__. Put to_tuple() after that step, and make no batches before it; "
                "pack_samples() and bucket_samples() must be the last of these steps."
            )
        self.stage = lay_out(
            summing,
            scope="item" if self.kind.in_order else "window",
            pads=epoch_end == "pad",
            loops=epoch_end == "loop",
        )
        self.chain, self.segments = Chain(self.stage), segments_of(self.stage)
        self._epoch_end = (
            None if epoch_end is None else check_choice("epoch_end", epoch_end, "drop", "pad", "exact", "loop")
        )
        self.uncounted = why_uncounted(self.stage)
        self.limits = _limits(self.stage)
        if epoch_end in ("drop", "pad") and self.uncounted:
            raise ValueError(
                f"epoch_end={epoch_end!r} needs to know how many samples there are, and {self.uncounted}; "
                "or pass epoch_end='loop' and call with_epoch()"
            )
        held = self.segments.before.batching
        if epoch_end == "loop" and any(step.batches_of(1) for step in held if step.items_per_batch != 1):
            after = itertools.takewhile(lambda step: step is not held[-1], reversed(Chain(self.segments.source).steps))
            holding = [f"{functional_name(type(step))}() after " for step in after if step.scope != "item"]
            raise ValueError(
                f"with epoch_end='loop' all batches are full, and {''.join(holding[:1])}"
                f"{functional_name(type(held[-1]))}() ends with each epoch, or holds items at "
                "its end: put batch_samples() last, or pass drop_last=True to it. "
                'A step of your own that holds nothing when it yields says so with scope = "item".'
            )
        if why_not is not None:
            logger.warning(
                "the batches depend on the numbers of ranks and workers, since PipeLoader divides the samples of "
                "SampleList into lanes: %s.", why_not,
            )  # fmt: skip
        self._num_workers = check_count("num_workers", num_workers, least=0)
        # of each lane, what was made of where it stood last: its counts, and its packed state
        self._counted: dict[int, tuple[LaneAt, dict[str, int]]] = {}
        self._packed: dict[int, tuple[LaneAt, bytes]] = {}
        self.parts, self.drop_last = parts, drop_last
        if isinstance(lanes, str) and lanes != "elastic":
            raise ValueError(f"lanes must be a number or 'elastic', not {lanes!r}")
        self.elastic = lanes == "elastic"
        self.lanes = None if lanes is None or self.elastic else check_count("lanes", lanes, most=MOST_LANES)
        self._given = rank

    @cached_property
    def rank(self) -> Rank:
        """The data-parallel rank, determined at the first use."""
        rank = find_rank(*self._given)
        if self.lanes is not None and self.lanes % (rank.of * self.parts):
            times = f", times mix_lanes={self.parts}" if self.parts > 1 else ""
            raise ValueError(f"lanes={self.lanes} must be a multiple of the {rank.of} ranks{times}")
        if self._epoch_end is None and rank.of > 1 and self.uncounted:
            raise ValueError(
                f"the {rank.of} ranks would not get the same number of batches, which lets "
                f"training hang: {self.uncounted}. Or pass epoch_end='loop' and call "
                "with_epoch(), which cuts an endless stream into epochs of equal length. If unequal ranks are meant, "
                "pass epoch_end='exact'."
            )
        return rank

    @property
    def mode(self) -> str:
        """How an epoch ends: ``"drop"``, ``"pad"``, ``"exact"`` or ``"loop"``."""
        return self._epoch_end or ("exact" if self.rank.of == 1 else "drop")

    @property
    def endless(self) -> bool:
        """Whether epochs of the data follow each other without end."""
        return self._epoch_end == "loop"

    @cached_property
    def recipe(self) -> Recipe:
        """The description of the pipeline that a state must fit."""
        self.chain.root.check_resumable()
        return Recipe.of(self.chain)._replace(samples=self.source.epoch_order.samples_fingerprint)

    @cached_property
    def _packed_recipe(self) -> bytes:
        """The entries of a state that say what it is of, pickled."""
        return pickle.dumps({**self.recipe.entries, "graph": self.recipe.graph_entry})

    def entries_of_all_ranks(self, at: LoaderPosition) -> State:
        """Return the entries of a state at a position that are the same for all ranks."""
        state: State = {
            "version": STATE_VERSION,
            "epoch": at.epoch,
            **pickle.loads(self._packed_recipe),  # the fastest copy
            "lane_count": at.partition.lanes,
            "world_size": self.rank.of,
            "epoch_end": self.mode,
            "batch_size": self.batch_size,
            **self.recipe.entries_at(at.epoch),
        }
        if self.parts > 1:
            state["mix_lanes"] = self.parts
        if (partition := at.partition.as_json()) is not None:
            state["partition"] = partition
        return state

    def ledger_entry(self, at: LoaderPosition) -> State:
        """Return the entry of a state with the digests of this rank; without a ledger, none."""
        if at.earlier is None:
            return {}
        return {"ledger": dict(zip(LEDGER, map(to_text, (self.digest(at), at.earlier)), strict=True))}

    def check_ranks(self, loader: object, at: LoaderPosition, cut: int | None, what: str) -> None:
        """Raise StateError on all ranks if they begin different iterations, see ``check_alike``.

        ``cut`` is how many batches of this rank with_epoch() requests of an iteration; ``what`` is
        the call that begins it.
        """
        if self.rank.of == 1:
            self.source.check_resumable()
            return
        facts = self.entries_of_all_ranks(at) | {
            "fingerprint": "",
            "data": self.recipe.data.identity,
            "sources": _sources(self.recipe),
        }
        if isinstance(text := facts.get("partition"), str):  # of a large job, too long for the store
            facts["partition"] = digest_of(text)
        facts["the number of batches to the next cut of with_epoch()"] = None if cut is None else cut - at.given
        if self.mode == "exact":  # ranks may be in different epochs
            facts |= {"epoch": None, "partition": None, "grown": None}
        check_alike(loader, self.rank, facts, f"{what} of epoch {at.epoch}")

    @property
    def source(self) -> Source[Any]:
        """The first stage."""
        return self.chain.root

    @property
    def batch_size(self) -> int:
        """How many samples a full batch has."""
        return self.part_size * self.parts

    @cached_property
    def part_size(self) -> int:
        """How many samples a full batch of a lane has, which is a part of a batch of the loader."""
        return math.prod(step.items_per_batch or 1 for step in self.chain.batching)

    @cached_property
    def terms(self) -> Terms:
        """What decides how epochs are divided."""
        mode, segments = self.mode, self.segments
        size, ranks = self.part_size, self.rank.of
        return Terms(self.chain, segments.before, mode, size, ranks, self.parts)

    def left(self, at: LoaderPosition) -> int | None:
        """How many batches this rank yields from a position to its epoch's end; None: not known."""
        samples, batches = at.partition.samples(), at.partition.batches(self.terms)
        if self.endless or self.uncounted or samples is None:
            return None
        going = {number: lane for number, lane in at.lanes.items() if not lane.ended}
        if batches is not None:
            parts = sum(int(batches[number] - lane.delivered) for number, lane in going.items())
        else:
            # Count by samples, since earlier batches may have had another size.
            makers = self.chain.batching
            parts = sum(
                batches_of(makers, samples[number] - self.samples_had(number, lane)) for number, lane in going.items()
            )
        return parts // self.parts if self.drop_last else -(-parts // self.parts)

    @property
    def last_may_be_smaller(self) -> bool:
        """Whether the last batches of an epoch may have fewer samples than the others."""
        return self.mode == "exact" and (
            (self.parts > 1 and not self.drop_last)
            or any(step.batches_of(1) for step in self.chain.batching if step.items_per_batch != 1)
        )

    def without_part(self, lane: LaneAt, digest: Digest) -> LaneAt:
        """Return where a lane ended, with the samples of one part, which have this digest, counted
        as dropped.
        """
        counts = lane.counts(self.chain)
        for name, count in (("delivered", -self.part_size), ("dropped", self.part_size)):
            counts[name] = counts.get(name, 0) + count
        return lane.with_counts(self.chain, counts | as_counts(subtract(of_counts(counts), digest)))

    def beginning(self, epoch: int, lanes: int | None = None, *, after: LoaderPosition | None = None) -> LoaderPosition:
        """The beginning of an epoch; ``after`` is where the loader stood; None: it is new."""
        lanes = lanes or self.new_lanes()
        new = NOTHING if self.ledger else None
        return LoaderPosition(
            epoch,
            self.kind.of(lanes, epoch, self.terms),
            dict.fromkeys(range(self.rank.number, lanes, self.rank.of), BEGINNING),
            earlier=new if after is None else self.digest_of_all(after),
        )

    def digest(self, at: LoaderPosition) -> Digest:
        """Return the digest of the samples of its epoch that this rank has had at a position."""
        before = [of_counts(at.partition.counts)] if self.rank.number == 0 else []
        return add([*before, *(of_counts(self.counts_of(*lane)) for lane in at.lanes.items())])

    def digest_of_all(self, at: LoaderPosition) -> Digest | None:
        """Return the same of all epochs; None: there is no ledger."""
        return None if at.earlier is None else add([at.earlier, in_epoch(self.digest(at), at.epoch)])

    def after(self, at: LoaderPosition) -> LoaderPosition:
        """Return ``at``, or the beginning of the next epoch if every lane has ended at ``at``."""
        # With "exact", other ranks may still be in this epoch: then only a position of all lanes
        # counts.
        if (len(at.lanes) == at.partition.lanes or self.mode != "exact") and at.ended:
            return self.beginning(at.epoch + 1, at.partition.lanes, after=at).counted_from(at)
        return at

    def epoch(self, at: LoaderPosition) -> int:
        """Return the epoch of the data at a position; with "loop", of the lane that is last."""
        marks = [self.chain.first_of(lane.mark) for lane in at.lanes.values()]
        return at.epoch + min((0 if mark is None else self.segments._at(mark[0]).epoch for mark in marks), default=0)

    def look(self, epoch: int) -> tuple[dict[str, int], Lack]:
        """Read an epoch of all ranks up to its first sample, and return what is known then.

        A rank that has no samples finds out in this way whether there are any.
        """
        reading = self.segments.before.reading_end
        running = reading.open(Lane(self.source.seed, epoch, 0, 1))
        found = len(list(itertools.islice(running.items, 1)))
        chain = Chain(running)
        counts, lack = chain.counts(running.mark(), found), chain.lack
        close_running(running)
        return counts, lack

    def counts(self, at: LoaderPosition) -> dict[str, int]:
        """Count this rank's samples of an epoch up to a position, by what became of them."""
        before = at.partition.counts if self.rank.number == 0 else {}
        return total_counts([before, *(self.counts_of(*lane) for lane in at.lanes.items())])

    def counts_of(self, number: int, lane: LaneAt) -> dict[str, int]:
        """Return what became of the samples of a lane, not to be changed."""
        if (known := self._counted.get(number)) is None or known[0] is not lane:
            self._counted[number] = known = lane, lane.counts(self.chain)
        return known[1]

    def delivered(self, number: int, lane: LaneAt) -> int:
        """Return how many samples of a lane were delivered."""
        return self.counts_of(number, lane).get("delivered", 0)

    def too_many(self, lanes: dict[int, LaneAt], at: LoaderPosition) -> WdsError | None:
        """Return an error if the lanes of this rank together skipped more than max_errors of a
        step.
        """
        for name, limit in self.limits.items():
            before = at.partition.counts.get(name, 0) // self.rank.of  # the ranks that counted these are not known
            count = before + sum(self.counts_of(*lane).get(name, 0) for lane in lanes.items())
            if count > limit.errors:
                step = name.removeprefix(LIMITED).split()[0]
                return limit.kind(
                    f"{step}() has skipped {plural(count, 'error')} in this epoch, in all "
                    f"lanes of this rank together, and max_errors={limit.errors}. "
                    "The log names the first ones: mend the data, or allow more."
                )
        return None

    def samples_had(self, number: int, lane: LaneAt) -> int:
        """Return how many samples a lane has had, whatever became of them."""
        counts = self.counts_of(number, lane)
        return sum(counts.get(name, 0) for name in COUNTED)

    def states(self, at: LoaderPosition) -> dict[int, LaneState]:
        """Return the lanes of a position as a state has them, new at each call."""
        return {number: self._state(number, lane, at) for number, lane in at.lanes.items()}

    def _state(self, number: int, lane: LaneAt, at: LoaderPosition) -> LaneState:
        if (known := self._packed.get(number)) is None or known[0] is not lane:
            mark = self.chain.first_of(lane.mark)
            state: LaneState = {
                "url": mark and self.segments.url_at(mark, at.partition, number, at.epoch),
                "delivered": lane.delivered,
                "ended": lane.ended,
                "position": None if mark is None else self.chain.dump(lane.mark),
                "counts": self.counts_of(number, lane),
            }
            self._packed[number] = known = lane, pickle.dumps(state)
        found: LaneState = pickle.loads(known[1])
        return found

    def lanes_of(self, states: LaneStates) -> dict[int, LaneAt]:
        """Return where lanes stand by what a state says.

        Raises:
            StateError: they can never be there.
        """
        return {number: LaneAt.of_state(self.chain, state) for number, state in states.items()}

    def new_lanes(self) -> int:
        """How many lanes a new epoch has, unless a state says otherwise."""
        count = self.rank.of * self.parts * max(1, -(-self._num_workers // self.parts))
        return self.lanes or (math.lcm(count, ELASTIC) if self.elastic else count)


def _sources(recipe: Recipe) -> list[Any]:
    """Return what identifies the chains from which a chain mixes, and what they read."""
    return [
        [source.seed, source.data.identity, source.data.shards, source.graph, source.weight, _sources(source)]
        for source in recipe.sources.values()
    ]


class ErrorLimit(NamedTuple):
    """How many errors a step may skip, and the class of the error that is raised beyond that."""

    errors: int
    kind: type[WdsError]


def _limits(stage: Stage[Any]) -> dict[str, ErrorLimit]:
    """The limits of the steps that have ``max_errors``, by the names of their counts.

    If steps in several sources of a mix have the same name, their limits are added up.
    """
    found: dict[str, ErrorLimit] = {}
    chain = Chain(stage)
    for step in chain:
        if isinstance(step, Tolerant) and step.limited is not None and step.max_errors is not None:
            found[step.limited] = ErrorLimit(step.max_errors, step.error_kind)
    for branch in chain.root.branches.values():
        for name, limit in _limits(branch).items():
            found[name] = ErrorLimit(limit.errors + (found[name].errors if name in found else 0), limit.kind)
    return found
