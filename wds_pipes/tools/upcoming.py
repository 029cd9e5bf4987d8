"""Which batches a rank of a training gets next, and where it stands before them.

The loader says it without reading, as ``PipeLoader.plan`` does. Where it cannot, as after a
filter, a copy of the pipeline is run from there for some batches. The copy decodes only what
decides which samples come, and uses neither the cache nor the ledger of the training, so that no
file of it changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple

from wds_pipes.core.chain import Chain
from wds_pipes.core.stage import Stage, State, find_stage
from wds_pipes.core.state import Saved, read_state
from wds_pipes.core.words import plural
from wds_pipes.display.states import describe_state
from wds_pipes.errors import StateError
from wds_pipes.io.urls import Urls, redact
from wds_pipes.loader.edited import Editable
from wds_pipes.loader.iterator import LoaderIterator, Progress
from wds_pipes.loader.ledger import Ledger
from wds_pipes.loader.lookup import Lookup, why_unknown
from wds_pipes.loader.pipe_loader import progress_of
from wds_pipes.loader.plan import LoaderPosition, Plan
from wds_pipes.loader.restoring import of_rank, restore
from wds_pipes.loader.segments import Segments
from wds_pipes.loader.workers import Workers
from wds_pipes.stages import FilterSamples, OpenShards
from wds_pipes.stages.shard_source import ShardSource
from wds_pipes.tools.planning import loader_of
from wds_pipes.tools.proving import stage_of_shards, without_decoding
from wds_pipes.tools.states import read_states

MOST_READ = 32  # batches for which a pipeline is run


class Coming(NamedTuple):
    """A sample that comes.

    Attributes:
        url: the URL or path of its shard, without credentials.
        number: its number in the shard, from 0 on; None: only its key is known.
        key: its key; None: only its number is known.
        padding: whether it is a repeat that fills up the epoch.
    """

    url: str
    number: int | None
    key: str | None
    padding: bool


class Batch(NamedTuple):
    """A batch that comes: the number of its step in the epoch, from 0 on, and its samples."""

    step: int
    samples: list[Coming]


class Order:
    """The batches that a rank gets from a position on.

    Args:
        plan: how the loader divides epochs.
        state: the state of this rank at the position.
        at: the position.
        resumed: as of ``Lookup``.
        given: what is not known of the pipeline, in a sentence; empty: nothing.

    Attributes:
        rank: the rank.
        ranks: how many there are.
        epoch: the epoch of the first batch.
        step: the step of the first batch.
        unknown: why the order is not known without reading; None: it is.
        given: as above.
    """

    def __init__(self, plan: Plan, state: State, at: LoaderPosition, *, resumed: bool, given: str = "") -> None:
        self._plan, self._at, self._resumed = plan, at, resumed
        self._state = _without_ledger(state)
        self.rank, self.ranks = plan.rank
        self.epoch, self.step = at.epoch, at.step
        self.unknown, self.given = why_unknown(plan), given

    @property
    def urls(self) -> list[str]:
        """The shards that the pipeline reads."""
        lists = [step for step in _all_steps(self._plan.stage) if isinstance(step, ShardSource)]
        return list(dict.fromkeys(url for one in lists for url in one.urls))

    @property
    def storage_options(self) -> dict[str, Any] | None:
        """How the pipeline reaches the storage."""
        return self._plan.source.storage_options

    @property
    def position(self) -> list[str]:
        """Where the rank stands before its first batch: the shard and byte of each lane, in
        words.
        """
        lanes = {str(number): lane for number, lane in self._at.states.items()}
        return describe_state({**self._state, "lanes": lanes}).split("\n")

    def batches(self, start: int, count: int) -> list[Batch]:
        """Return the batches of ``count`` steps from ``start`` on; fewer where the epoch ends, or
        after the last one for which the pipeline was run.

        Raises:
            ValueError: they cannot be known: the message says why.
            WdsError: as during the iteration, if the pipeline is run.
        """
        if self.unknown is None:
            return list(self._planned(start, count))
        return [batch for batch in self._read if start <= batch.step < start + count]

    def _planned(self, start: int, count: int) -> Iterator[Batch]:
        lookup = Lookup(self._plan, self._at, resumed=self._resumed)
        for step in range(start, start + count):
            try:
                found = lookup.samples(step, self.rank, keys=False)
            except IndexError:  # the end of the epoch
                return
            yield Batch(step, [Coming(one.url, one.number, None, one.padding) for one in found])

    @cached_property
    def _read(self) -> list[Batch]:
        """The batches for which the pipeline was run."""
        chain, plan = self._names_only(), self._plan
        again = Plan(
            chain,
            epoch_end=plan.mode,
            lanes=self._at.partition.lanes,
            num_workers=0,
            parts=plan.parts,
            drop_last=plan.drop_last,
            rank=(self.rank, self.ranks),
        )
        progress = Progress(
            Editable(again, chain, lambda stage: again), partial(Workers, count=0, persistent=False, prefetch=1)
        )
        progress.go_to(restore(again, self._state))
        try:
            batches = islice(LoaderIterator(progress, lambda parts: list(_named(parts)), None), MOST_READ)
            return [Batch(self.step + number, samples) for number, samples in enumerate(batches)]
        finally:
            progress.close("its batches are known")

    def _names_only(self) -> Stage[Any]:
        """Return the pipeline that makes the same batches, of samples with their names."""
        steps = Chain(self._plan.stage).steps
        summing = next((place for place, step in enumerate(steps) if isinstance(step, Ledger)), len(steps))
        for step in steps[summing:]:
            if not isinstance(step, Segments) and (why := step.changes_count()) is not None:
                raise ValueError(f"which samples come is not known: {why}, where samples have no __key__ and __url__")
        try:
            chain = without_decoding(self._plan.stage)
        except StateError as error:
            raise ValueError(
                "which samples come is not known: after the last step of the pipeline that holds samples, such as "
                "shuffle_buffer(), they have no __key__ and __url__. Put to_tuple() after that step"
            ) from error
        for step in _all_steps(chain):
            if isinstance(step, OpenShards):  # of a loader that was built only for this
                step.cache, step.opener = None, step.opener.uncached()
        return chain


def _all_steps(stage: Stage[Any]) -> Iterator[Stage[Any]]:
    """Yield the steps of a chain, and of those from which it mixes."""
    chain = Chain(stage)
    yield from chain
    for branch in chain.root.branches.values():
        yield from _all_steps(branch)


def _without_ledger(state: State) -> State:
    """Return a state for a loader that keeps no ledger, which would warn that it ends."""
    return {name: value for name, value in state.items() if name != "ledger"}


def _named(items: Iterable[Any]) -> Iterator[Coming]:
    """Yield the samples in a batch, or in a batch of batches."""
    for item in items:
        if isinstance(item, Mapping) and isinstance(item.get("__key__"), list) and "__url__" in item:  # of packs
            for key, url in zip(item["__key__"], item["__url__"], strict=True):
                yield Coming(redact(url), None, key, False)
        elif isinstance(item, Mapping) and "__key__" in item and "__url__" in item:
            yield Coming(redact(item["__url__"]), None, item["__key__"], bool(item.get("__padding__", False)))
        elif isinstance(item, list):
            yield from _named(item)
        else:
            raise ValueError(f"which samples come is not known: a step yields {type(item).__name__}, and not samples")


def order_of_loader(
    named: str, *, rank: int | None = None, world_size: int | None = None, state: str | None = None
) -> Order:
    """Return the order of a training, from a function that returns its PipeLoader.

    Args:
        named: as of ``loader_of``.
        rank: the rank; None: that of the loader.
        world_size: as of ``loader_of``.
        state: as of ``loader_of``.

    Raises:
        ValueError, StateError: as from ``loader_of``; or the loader is one of another rank.
    """
    loader = loader_of(named, rank=rank or 0, world_size=world_size, state=state)
    if rank not in (None, loader.rank.number):
        raise ValueError(
            f"the loader of {named}() is that of rank {loader.rank.number} of {loader.rank.of}, not of rank {rank}: "
            "pass --world-size, and let the function take both from the environment"
        )
    progress = progress_of(loader)
    at = progress.position
    return Order(progress.plan, loader.state_dict(), at, resumed=progress.loaded is at.partition)


def order_of_state(
    file: str, urls: Urls, *, rank: int | None = None, storage_options: dict[str, Any] | None = None
) -> Order:
    """Return the order of a training that continues from a state, from the steps that this names.

    Args:
        file: a file or directory with states, as of ``read_states``.
        urls: the shards of the training.
        rank: one of the ranks of the run; None: the first one that the file has.
        storage_options: how to reach the storage.

    Raises:
        StateError: the state is of other shards, does not say enough of the pipeline, or does not
            have this rank.
        ValueError: there is no such rank.
    """
    states = [_without_ledger(placed.state) for placed in read_states(file)]
    first = read_state(states[0])
    of = first.world_size
    if first.rank is None:
        raise StateError(f"{file} is the state of a pipe, which has no batches: name the one of a PipeLoader")
    rank = first.rank if rank is None else rank
    if not 0 <= rank < of:
        raise ValueError(f"{file} has {plural(of, 'rank')}, from 0 on, and not rank {rank}")
    _check_named(first)
    plan = Plan(
        stage_of_shards(first, urls, {"storage_options": storage_options}),
        epoch_end=first.epoch_end,
        lanes=first.lane_count,
        num_workers=0,
        parts=first.mix_lanes,
        rank=(rank, of),
    )
    state = states[0] if len(states) == 1 else of_rank(states, plan, moved=False)
    at = restore(plan, state)
    given = "Computed from the steps that the state names, as if none of them left a sample out from here on."
    return Order(plan, state, at, resumed=at.step > 0, given=given)


def _check_named(saved: Saved) -> None:
    """Raise StateError if a step that a state names leaves samples out, by what only it says."""
    for step in saved.graph:
        name = step.partition("(")[0]
        kind = find_stage(name)
        if kind is FilterSamples or (kind is not None and not kind.keeps_count):
            raise StateError(f"{name}() leaves samples out, and the state does not say which: name the pipeline, too")
