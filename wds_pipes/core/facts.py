"""What a stage says of itself and of its chain: all that other modules need to know of it.

So no other module asks which stage something is. The values here are those of a stage that does
nothing special. Each stage overrides what is different for it, also a stage that users write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from wds_pipes.core.counts import NO_NETWORK, Lack, Network
from wds_pipes.core.lane import Context, Lane, LaneFacts
from wds_pipes.core.moved import Data
from wds_pipes.core.running import Mark
from wds_pipes.errors import SampleError, WdsError

if TYPE_CHECKING:
    from wds_pipes.core.stage import Stage


class StageFacts:
    """The base of ``Stage``, which documents these attributes."""

    order_options: ClassVar[tuple[str, ...]] = ()
    shared: ClassVar[tuple[str, ...]] = ()
    tallies: ClassVar[tuple[str, ...]] = ()
    holds_nothing: ClassVar[bool] = False
    whole_lanes: ClassVar[bool] = False
    expands: ClassVar[bool] = False
    one_of_each: ClassVar[bool] = False
    keeps_count: ClassVar[bool] = False
    keeps_order: ClassVar[bool] = False
    gives: ClassVar[str | None] = None
    ends_reading: ClassVar[bool] = False
    runs_chains: ClassVar[bool] = False
    is_source: ClassVar[bool] = False
    divides: ClassVar[bool] = False
    divides_shards: ClassVar[bool] = False
    has_global_order: ClassVar[bool] = False
    error_kind: ClassVar[type[WdsError]] = SampleError
    on_error: Any = "raise"
    max_errors: int | None = None
    counts_itself: ClassVar[bool] = False
    counts_items: bool = False
    limited: str | None = None
    _tallies: ClassVar[tuple[tuple[int, str], ...]] = ()  # the places and names of ``tallies`` in At
    source: Stage[Any] | None

    # The first stage answers for the whole chain.

    @property
    def root(self) -> Stage[Any]:
        """The first stage of the chain."""
        return cast("Stage[Any]", self) if self.source is None else self.source.root

    @property
    def depth(self) -> int:
        """How many stages come before this one."""
        return 0 if self.source is None else self.source.depth + 1

    @property
    def context(self) -> Context:
        return self.root.context

    @property
    def seed(self) -> int:
        return self.root.seed

    @property
    def storage_options(self) -> dict[str, Any] | None:
        """How to reach the storage, as passed to the first stage of the chain; None if nothing was
        passed.
        """
        return None if self.source is None else self.source.storage_options

    @property
    def counts_delivered(self) -> bool:
        """Whether this stage or one before it counts delivered samples itself, since an item of the
        chain is not one sample.
        """
        return any(name == "delivered" for _, name in self._tallies) or (
            self.source is not None and not self.expands and self.source.counts_delivered
        )

    @property
    def divides_items(self) -> bool:
        """Whether this stage, the first of a chain, divides its items over the lanes."""
        return True

    def which_data(self) -> Data:
        """Return which shards the chain reads, in a form that also identifies them if they are
        moved: see ``wds_pipes.core.moved``.
        """
        return Data() if self.source is None else self.source.which_data()

    def number_of(self, url: str) -> str | None:
        """Return an id of the shard with this URL in the chain, which does not change if shards are
        moved; None if no list has it.
        """
        return None if self.source is None else self.source.number_of(url)

    def where(self, mark: Mark | None, lane: Lane) -> str | None:
        """Return the URL of the shard at a position, for messages; None if there is none."""
        return self.source.where(mark and mark[1], lane) if self.source is not None else None

    @property
    def bytes_so_far(self) -> int:
        """How many bytes of shards a running chain has read."""
        return 0 if self.source is None else self.source.bytes_so_far

    @property
    def network(self) -> Network:
        """The chain's use of the network in this process."""
        return NO_NETWORK if self.source is None else self.source.network

    # What other modules need to know of a stage. Stages that users write can override these too.

    @property
    def chain(self) -> Iterator[Stage[Any]]:
        """The stages of the chain, from this one back to the first."""
        step: Stage[Any] | None = cast("Stage[Any]", self)
        while step is not None:
            yield step
            step = step.source

    @property
    def branches(self) -> Mapping[str, Stage[Any]]:
        """The chains that the stage reads from, by name, if it reads from others than its
        source.
        """
        return {}

    @property
    def items_are(self) -> str | None:
        """What the items of the chain are, see ``gives``; None if no stage says so."""
        return next((step.gives for step in self.chain if step.gives is not None), None)

    @property
    def sample_counts(self) -> Sequence[int] | None:
        """For the first stage of a chain: how many samples each shard has; None if unknown."""
        return None

    @property
    def samples_fingerprint(self) -> str | None:
        """For the first stage of a chain: a hash of these numbers of samples; None if they are
        unknown.
        """
        return None

    def epoch_shards(self, seed: int, epoch: int) -> list[tuple[int, int, int]]:
        """For the first stage of a chain: return its shards in the order of an epoch, each as its
        number and a range of samples. A range that ends at -1 means all samples, if their number is
        unknown.
        """
        raise NotImplementedError

    def lane_in(self, lane: Lane, epoch: int) -> Lane:
        """For the first stage of a chain: return a lane in another epoch, with the shards that it
        has.
        """
        return replace(lane, epoch=epoch)

    def place_in(self, lane: Lane) -> Callable[[int], int] | None:
        """For the first stage of a chain: return a function from the number of an item in a lane,
        from 0 on, to its place in the one order of the epoch; None: the lane has no stripe of it.
        """
        return None

    def taken(self, entry: dict[str, Any]) -> int:
        """For the first stage of a chain: return how many items of a lane with a stripe came before
        a position that ``dump`` wrote.
        """
        raise NotImplementedError

    @property
    def may_lose(self) -> bool:
        """Whether the stage leaves out damaged data, by options that are no part of the graph."""
        return False

    @property
    def opened(self) -> int:
        """How many of the ranges of its lane a running chain has begun."""
        return 0 if self.source is None else self.source.opened

    def epochs_differ(self) -> str | None:
        """For the first stage of a chain: return why epochs may differ in length, for a message;
        None if they do not.
        """
        return None

    @property
    def counts_epochs(self) -> bool:
        """Whether the chain reads from something that counts epochs itself: then only a mark says
        where an epoch begins.
        """
        return self.source is not None and self.source.counts_epochs

    @property
    def never_ends(self) -> bool:
        """Whether the epoch of the chain has no end."""
        return self.source is not None and self.source.never_ends

    @property
    def items_per_batch(self) -> int | None:
        """How many items the stage puts into a batch; None: it makes no batches."""
        return None

    def batches_of(self, count: int) -> int:
        """Return how many batches the stage makes of ``count`` items."""
        return count

    @property
    def epoch_repeats(self) -> int:
        """How many times the stage yields the epoch of its source."""
        return 1

    @property
    def held_items(self) -> int:
        """About how many items a running stage holds."""
        return 0

    def shown_options(self, options: dict[str, Any]) -> tuple[dict[str, Any], str]:
        """Return the options as the text of a pipeline shows them, and the text after the first of
        them.
        """
        return options, ""

    @classmethod
    def describe(cls, entry: dict[str, Any], lane: LaneFacts) -> str | None:
        """Return a description of a position that ``dump`` wrote; None: there is nothing to say."""
        return None

    @property
    def batches(self) -> int | None:
        """How many samples are in each item of the chain, if its last steps are known to make
        batches; otherwise None.
        """
        return None if self.source is None or not self.holds_nothing else self.source.batches

    @property
    def lack(self) -> Lack:
        """Why a running chain yielded nothing, since it was opened."""
        return Lack() if self.source is None else self.source.lack

    def stall_clock(self) -> Callable[[], float]:
        """Return a function that returns for how many seconds this chain has waited for bytes from
        stores in this process. Only differences between two calls have a meaning.
        """
        return float if self.source is None else self.source.stall_clock()  # float() is 0.0

    def check_resumable(self) -> None:
        """Raise StateError if the position of this chain cannot be known exactly."""
        if self.source is not None:
            self.source.check_resumable()
