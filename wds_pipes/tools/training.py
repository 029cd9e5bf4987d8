"""What a training has had and what it gets next: whether the digest in a state is that of its
samples, its loader, and its next batches.

What a run has returned of an epoch, and what the state says is left of it, are all samples of the
epoch together. So the rest is read from the state on, as a training that resumes would read it, and
the digest of both must be that of the whole epoch, which is read once more from its beginning. Both
are read without decoding, and the number of ranks, workers and lanes does not matter.

Which batches a rank gets next, and where it stands before them, the loader says without reading, as
``PipeLoader.plan`` does. Where it cannot, as after a filter, a copy of the pipeline is run from
there for some batches. The copy decodes only what decides which samples come, and uses neither the
cache nor the ledger of the training, so that no file of it changes.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property, partial
from itertools import islice
from typing import Any, NamedTuple

from wds_pipes.core.chain import Chain, linked
from wds_pipes.core.counts import COUNTED, LEFT_OUT
from wds_pipes.core.digest import NOTHING, Digest, add, in_epoch, of_counts, subtract, to_text
from wds_pipes.core.hosts import is_pipe, stage_of
from wds_pipes.core.stage import Out, Source, Stage, State, find_stage, is_built_in
from wds_pipes.core.state import ADDED, LEDGER, Saved, read_state
from wds_pipes.core.words import plural
from wds_pipes.display.states import describe_state
from wds_pipes.errors import StateError
from wds_pipes.io.urls import Urls, redact
from wds_pipes.loader.edited import Editable, Place, find_place, last_begun
from wds_pipes.loader.iterator import LoaderIterator, Progress
from wds_pipes.loader.ledger import Ledger
from wds_pipes.loader.lookup import Lookup, why_unknown
from wds_pipes.loader.partition import NOT_BEGUN, unpack
from wds_pipes.loader.pipe_loader import PipeLoader, progress_of
from wds_pipes.loader.plan import LoaderPosition, Plan
from wds_pipes.loader.restoring import of_rank, restore
from wds_pipes.loader.segments import Segments
from wds_pipes.loader.slices import Slices
from wds_pipes.loader.worker import Begin, LaneHost
from wds_pipes.loader.workers import Workers
from wds_pipes.stages import BatchSamples, FilterSamples, GroupByKey, OpenShards, SampleList
from wds_pipes.stages.edits import Edition, Edits, has_exclusion
from wds_pipes.stages.shard_source import ShardSource
from wds_pipes.tools.rewriting import function_of
from wds_pipes.tools.states import read_run, read_states, samples_of

Selection = str | os.PathLike[str] | Iterable[str]

_NAME_IT = "Name the pipeline of the training: module:function, which returns the pipe or the PipeLoader"
_ENDS = ("drop", "pad", "exact", "loop")


class Proof(NamedTuple):
    """Whether a digest was found again.

    Attributes:
        proven: whether it was, also that of the epochs before, unless it is not known which samples
            these had.
        lines: what was found, in words.
    """

    proven: bool
    lines: list[str]


def prove(path: str, what: Urls, *, exclude: Selection | None = None, **options: Any) -> Proof:
    """Compute the digest of the samples that a run has returned again.

    Args:
        path: a file or directory with the states of all ranks of a run, as of ``read_states``.
        what: ``"module:function"``, a function that returns the pipe or the PipeLoader of the
            training; or its shards: then the steps are those that the state names.
        exclude: the keys that ``load_state_dict(exclude=...)`` of the run left out, or
            ``"@keys.txt"``; more may follow them. An epoch in whose middle they were left out
            cannot be proven.
        options: for shards, options of ``ShardList`` or ``SampleList``: ``index``, ``moved``,
            ``storage_options``.

    Raises:
        StateError: the state has no ledger, is of another pipeline or other shards, or its digest
            cannot be computed from them.
        ValueError: there is no such function.
        ShardError, SampleError: a shard cannot be read.
    """
    state = read_run(path, moved=bool(options.get("moved")))
    saved = read_state(state)
    if (why := _unprovable(saved, exclude)) is not None:
        raise StateError(f"{path} cannot be proven: {why}")
    assert saved.ledger is not None
    size = 1 if saved.epoch_end == "loop" else None  # so that no batch is of two epochs
    if are_shards(what):
        stage = stage_of_shards(saved, what, options, size=size)
    else:
        stage = _stage_of_function(str(what), saved, size)
    place = _place_in(stage, saved, state, exclude)
    if saved.epoch_end == "loop":
        return _prove_epochs(path, saved, place)
    plan, (epoch, earlier), lanes = place.plan, (saved.ledger[name] for name in LEDGER), _first_lanes(saved)
    over = place.at.epoch != saved.epoch  # all lanes had ended
    whole, rest = _read(plan, plan.beginning(saved.epoch, lanes)), _Read() if over else _read(plan, place.at)
    with_rest = add([epoch, rest.digest])
    samples = samples_of(saved)
    if whole.digest != with_rest:
        more = _number_of(saved.counts) + rest.samples > whole.samples or plan.kind is Slices  # which counts places
        if place.excluded and more:
            raise StateError(f"{path} cannot be proven: {_EDITED}")
        missing = f"with what is left, the digest is {to_text(with_rest)}"
        told = f"{missing}, and that of the epoch {to_text(whole.digest)}"
        if plan.source.branches:
            told += " (or a mix() changed in its middle)"
        return Proof(False, [f"not proven: {samples} have digest {to_text(epoch)}; {told}"])
    lines = [f"proven: {samples} were returned, none lost and none too often (digest {to_text(epoch)})"]
    if not saved.epoch:
        return Proof(True, lines)
    if add(in_epoch(whole.digest, number) for number in range(saved.epoch)) == earlier:
        return Proof(True, [*lines, _SO_BEFORE])
    unknown = "of the epochs before it is not known which samples were "
    if saved.epoch_end == "drop":
        return Proof(True, [*lines, f"{unknown}dropped at their ends"])
    wholes = [_read(plan, plan.beginning(number, lanes)).digest for number in range(saved.epoch)]  # they may differ
    if add(in_epoch(digest, number) for number, digest in enumerate(wholes)) == earlier:
        return Proof(True, [*lines, _SO_BEFORE])
    if place.excluded or saved.grown:
        return Proof(True, [*lines, f"{unknown}left out, or added later"])
    if _depends_on_lanes(plan, saved.epoch):
        return Proof(True, [*lines, f"{unknown}in them, since that depends on the numbers of ranks and workers"])
    told = (
        "not proven: in the epochs before other samples were returned, or some were left out (by skip(), set_epoch(), "
        "drop_last, or steps that the state does not name), or shards were added later"
    )
    return Proof(False, [*lines, told])


_SO_BEFORE = "proven: so were those of each epoch before"
_EDITED = (
    "its digest is not that of the shards without the samples of exclude=. Either they were left out from the middle "
    "of an epoch on, and it does not say which of them had come before, or other samples were returned. A state of a "
    "later epoch can be proven"
)
_OF_LANES = (
    "which samples an epoch of this pipeline has depends on how many ranks and workers there are, as with "
    "take_samples() or mix(exhausted='stop'), and it does not say how many there were in each of its epochs"
)


def _prove_epochs(path: str, saved: Saved, place: Place) -> Proof:
    """Prove a state whose lanes are in several epochs of the data: its digest is of all of them."""
    assert saved.ledger is not None
    plan, last, digest = place.plan, last_begun(saved), saved.ledger["epoch"]
    with_rest = add([digest, _read(plan, place.at, last).digest])
    wholes = cache(lambda number, lanes: _read(plan, plan.beginning(number, lanes), number).digest)
    number = plural(saved.counts.get("delivered", 0), "sample")
    samples = f"{number} of epochs {{}} to {last} (digest {to_text(digest)})"
    for lanes in dict.fromkeys((1, _first_lanes(saved))):
        for alike in (True, False):  # all epochs have the same samples, most often
            total = NOTHING
            for epoch in range(last, -1, -1):  # at which one the run began is not known
                total = add([total, wholes(last if alike else epoch, lanes)])
                if epoch <= saved.epoch and total == with_rest:
                    held = "were returned, each as often as in these epochs"
                    return Proof(True, [f"proven: {samples.format(epoch)} {held}"])
    if place.excluded:
        raise StateError(f"{path} cannot be proven: {_EDITED}")
    if (saved.epoch or saved.partition) and _depends_on_lanes(plan, last):
        raise StateError(f"{path} cannot be proven: {_OF_LANES}")
    why = (
        "with what is left of these epochs, they are not the samples of whole epochs (or shards were added later, or a "
        "mix() changed)"
    )
    return Proof(False, [f"not proven: {samples.format(0)}: {why}"])


def _first_lanes(saved: Saved) -> int:
    """Return how many lanes the epoch of a state had at its beginning."""
    history = (saved.partition or {}).get("history")
    return sum(times for _, times in history[0][1]) if history else saved.lane_count


def _depends_on_lanes(plan: Plan, epoch: int) -> bool:
    """Return whether an epoch has other samples on other numbers of lanes."""
    last = epoch if plan.endless else None
    return len({_read(plan, plan.beginning(epoch, lanes), last).digest for lanes in (1, 2)}) > 1


def are_shards(what: Urls) -> bool:
    """Return whether an argument names shards, not a function."""
    if not isinstance(what, str):
        return True
    module, colon, name = what.partition(":")
    return not (colon and module.replace(".", "").isidentifier() and name.replace(".", "").isidentifier())


def _unprovable(saved: Saved, exclude: Selection | None) -> str | None:
    """Return why the digest in a state cannot be computed again; None: it can."""
    if has_exclusion(saved.graph) and exclude is None:
        return "load_state_dict(exclude=...) left samples out: pass the same keys, as exclude= or --exclude"
    if saved.epoch_end not in _ENDS:
        return f"its epochs end by {saved.epoch_end!r:.20}"
    if left_out := saved.counts.get(LEFT_OUT):
        return f"skip() left out {plural(left_out, 'sample')} of its epoch, and it does not say which"
    if saved.counts.get("dropped"):
        return f"{plural(saved.counts['dropped'], 'sample')} of its epoch were dropped, and it does not say which"
    return None


def _place_in(stage: Stage[Any], saved: Saved, state: State, exclude: Selection | None) -> Place:
    """Return where a state stands, and the plan of its pipeline, with its edits."""
    end = "loop" if saved.epoch_end == "loop" else "exact"
    new_plan = partial(Plan, epoch_end=end, lanes=None, num_workers=0, parts=saved.mix_lanes, ledger=True, rank=(0, 1))
    plan = new_plan(stage)
    keys: tuple[str, ...] | None = None
    if exclude is not None:
        edition = Edition(stage, state, Edits(exclude=exclude), (), in_order=plan.kind is Slices)
        keys = edition.keys[: edition.known]
    return find_place(Editable(plan, stage, new_plan), state, Edits(exclude=keys), ())


class _Read(NamedTuple):
    """What was read: the digest of samples, and how many there were."""

    digest: Digest = NOTHING
    samples: int = 0


def _read(plan: Plan, at: LoaderPosition, last: int | None = None) -> _Read:
    """Return what is left at a position of its epoch, or of the epochs up to ``last``, if they
    follow each other without end; then batches are of one sample.
    """
    host, digest, samples, lanes = LaneHost(plan.stage), NOTHING, 0, at.states
    resumed = at.partition.start > 0 or any(lane != NOT_BEGUN for lane in lanes.values())
    for number, begin in lanes.items():
        counts, ended, position = begin["counts"], begin["ended"], begin["position"]
        before = of_counts(counts)
        if position is not None and not ended:  # so that a digest of another position is noticed
            before = of_counts(plan.chain.counts(plan.chain.load(position), 0))
        host.begin({number: Begin(at.epoch, at.partition, begin, None, resumed)})
        while not ended:
            _, _, lane, ended, error, _ = host.next(number)
            if lane is None:
                assert error is not None
                raise error
            state = unpack(lane)
            if last is not None and state["position"][0].get("epoch", 0) > last - at.epoch:
                break
            counts = state["counts"]
        digest = add([digest, subtract(of_counts(counts), before)])
        samples += _number_of(counts) - _number_of(begin["counts"])
    host.close()
    return _Read(digest, samples)


def _number_of(counts: dict[str, int]) -> int:
    """Return how many samples were counted, without those of ``load_state_dict(exclude=...)``."""
    return sum(counts.get(name, 0) for name in COUNTED) - counts.get("excluded", 0)


class _Passes(Stage[Out]):
    """Stands for a step whose items do not matter, and yields those of its source.

    Args:
        source: the step before it.
        kind: the class of the step, of whose position it takes the form.
        label: the step in the graph of a state.
        like: the step; None: only its class is known.
    """

    scope = "item"
    keeps_count = True

    def __init__(self, source: Stage[Any], kind: type[Stage[Any]], label: str, like: Stage[Any] | None = None) -> None:
        super().__init__(source)
        self._text, self._like = label, like
        for name in ("At", "tallies", "_defaults", "_beginning", "_tallies", "_own", "_keeps_keys"):
            setattr(self, name, getattr(kind, name))

    def run(self) -> Any:
        return self.source.items if self.source is not None else ()

    def _label(self, *, counted: bool) -> str:
        return self._text if self._like is None else self._like._label(counted=counted)

    @property
    def counts_items(self) -> bool:
        return self._like is not None and self._like.counts_items

    def changes_count(self) -> str | None:
        return None if self._like is None else self._like.changes_count()


# Of a function of the user's


def _stage_of_function(named: str, saved: Saved, size: int | None) -> Stage[Any]:
    """Return the chain that a function returns, without what does not change the digest."""
    made = function_of(named)()  # type: ignore[call-arg]
    if isinstance(made, PipeLoader):
        laid = progress_of(made).plan.stage
    elif is_pipe(made):
        stage = stage_of(made, "state prove")
        if saved.graph[-1] == "batch_samples" and Chain(stage).batches is None:
            stage = BatchSamples(stage, saved.batch_size, collate="list")
        laid = Plan(stage, epoch_end="exact", lanes=None, num_workers=0, rank=(0, 1)).stage
    else:
        raise ValueError(f"{named} returned {type(made).__name__}, and not a pipe or a PipeLoader")
    return without_decoding(laid, size=size)


def without_decoding(laid: Stage[Any], *, size: int | None = None) -> Stage[Any]:
    """Return the chain of a loader that makes the same batches of the same samples, as lists of
    samples that have their ``__key__`` and ``__url__``, and decodes only what decides which samples
    come.

    Args:
        laid: the chain.
        size: of how many samples a batch is, if no step after it holds items; None: as it is.

    Raises:
        StateError: after its last step that holds samples, they have none.
    """
    steps = [step for step in Chain(laid) if not isinstance(step, Segments)]
    summing = next((place for place, step in enumerate(steps) if isinstance(step, Ledger)), None)
    if summing is None:
        raise StateError("the pipeline can have no ledger: see PipeLoader(ledger=...)")
    held = max((place for place, step in enumerate(steps) if step.scope != "item"), default=0)
    read = max(place for place, step in enumerate(steps) if place <= held or step.gives is not None)
    chooses = any(step.changes_count() for step in steps[read + 1 : summing])  # by what was decoded
    found = steps[0]
    for place, step in enumerate(steps[1:], 1):
        if isinstance(step, Ledger):
            continue
        if isinstance(step, BatchSamples):
            found = BatchSamples(found, size if size and place > held else step.size, collate="list")
        elif step.items_per_batch is None and (place > summing or (place > read and not chooses)):
            found = _Passes(found, type(step), "", step)
        else:
            found = linked(found, [step])
    return found


# Of the steps that a state names


def stage_of_shards(saved: Saved, urls: Urls, options: dict[str, Any], *, size: int | None = None) -> Stage[Any]:
    """Return a chain over shards of the steps that a state names; ``size`` as in
    ``without_decoding``.
    """
    names = [step for step in saved.graph if step.partition("(")[0] not in (*ADDED, "exclude_samples")]
    calls = [_parsed(step) for step in names]
    kinds: list[Any] = [find_stage(name) for name, _ in calls]
    filtered = saved.counts.get("filtered", 0) - saved.counts.get("excluded", 0)
    left_out = filtered or saved.counts.get("skipped")  # by what only the steps say
    if left_out or saved.sources or not all(kind and is_built_in(kind) for kind in kinds):
        raise StateError(f"the state does not say enough of {' > '.join(names):.300}. {_NAME_IT}")
    options = {name: value for name, value in options.items() if value is not None}
    if saved.samples is not None and kinds[0] is not SampleList:
        options = {"index": True, **options}  # the samples were counted
    found: Any = None
    held = max(place for place, kind in enumerate(kinds) if place == 0 or kind.scope != "item")
    for place, ((name, arguments), kind) in enumerate(zip(calls, kinds, strict=True)):
        try:
            if issubclass(kind, Source):
                found = kind(urls, seed=saved.seed, **arguments, **options)
            elif kind is BatchSamples:
                each = size if size and place > held else saved.batch_size // saved.mix_lanes
                found = kind(found, **{"size": each, **arguments, "collate": "list"})
            elif kind.scope == "item" and kind.gives is None:
                found = _Passes(found, kind, name)
            else:
                again = {"on_repeated_key": "ignore"} if kind is GroupByKey else {}
                found = kind(found, **arguments, **again)
        except TypeError as error:
            raise StateError(f"the state does not say enough of {name}() to build it again. {_NAME_IT}") from error
    last: Stage[Any] = found
    return last


def _parsed(step: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a step and its options, as the graph of a state has them."""
    try:
        call: Any = ast.parse(step, mode="eval").body
        options = {word.arg: ast.literal_eval(word.value) for word in getattr(call, "keywords", ())}
    except (SyntaxError, ValueError):
        return step, {}
    options.pop("excluded", None)
    if "own_seed" in options:
        options["seed"] = options.pop("own_seed")
    return step.partition("(")[0], options


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
        storage_options: how the pipeline reaches the storage.
        unknown: why the order is not known without reading; None: it is.
        given: as above.
    """

    def __init__(self, plan: Plan, state: State, at: LoaderPosition, *, resumed: bool, given: str = "") -> None:
        self._plan, self._at, self._resumed = plan, at, resumed
        self._state, self.storage_options = _without_ledger(state), plan.source.storage_options
        self.rank, self.ranks = plan.rank
        self.epoch, self.step = at.epoch, at.step
        self.unknown, self.given = why_unknown(plan), given

    @property
    def urls(self) -> list[str]:
        """The shards that the pipeline reads."""
        lists = [step for step in _all_steps(self._plan.stage) if isinstance(step, ShardSource)]
        return list(dict.fromkeys(url for one in lists for url in one.urls))

    @property
    def position(self) -> list[str]:
        """Where the rank stands before its first batch: the shard and byte of each lane, in
        words.
        """
        lanes = {str(number): lane for number, lane in self._at.states.items()}
        return describe_state({**self._state, "lanes": lanes}).split("\n")

    def batches(self, start: int, count: int) -> dict[int, list[Coming]]:
        """Return the samples of the batches of ``count`` steps from ``start`` on, by the numbers of
        the steps in the epoch; fewer where the epoch ends, or after the last one for which the
        pipeline was run.

        Raises:
            ValueError: they cannot be known: the message says why.
            WdsError: as during the iteration, if the pipeline is run.
        """
        if self.unknown is not None:
            return {step: samples for step, samples in self._read.items() if start <= step < start + count}
        lookup, found = Lookup(self._plan, self._at, resumed=self._resumed), dict[int, list[Coming]]()
        with suppress(IndexError):  # the end of the epoch
            for step in range(start, start + count):
                samples = lookup.samples(step, self.rank, keys=False)
                found[step] = [Coming(one.url, one.number, None, one.padding) for one in samples]
        return found

    @cached_property
    def _read(self) -> dict[int, list[Coming]]:
        """The samples of the batches for which the pipeline was run, by their steps."""
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
            return dict(enumerate(batches, self.step))
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


def loader_of(named: str, *, rank: int = 0, world_size: int | None = None, state: str | None = None) -> PipeLoader:
    """Return the PipeLoader of a training, to call its ``plan`` and ``find``.

    Args:
        named: a function without arguments that returns it: ``"module:function"``; the module may
            be a file in the current directory.
        rank: the rank that the function finds, if ``world_size`` is passed.
        world_size: the number of ranks that it finds, as if torchrun had started it; None: those of
            this process.
        state: a checkpoint from which the loader continues: see ``read_states``.

    Raises:
        ValueError: there is no such function, it returns something else, or a loader of other
            ranks.
        StateError: the state does not fit.
    """
    before = dict(os.environ)
    if world_size is not None:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        make: Any = function_of(named)
        loader = make()
        if not isinstance(loader, PipeLoader):
            raise ValueError(f"{named}() must return the PipeLoader of the training, and it returned {loader!r:.80}")
        ranks = loader.rank.of
    finally:
        os.environ.clear()
        os.environ.update(before)
    if world_size not in (None, ranks):
        raise ValueError(
            f"the loader of {named}() has {plural(ranks, 'rank')}, not {world_size}: let the function take "
            "them from the environment, without rank= and world_size="
        )
    if state is not None:
        states = [placed.state for placed in read_states(state)]
        loader.load_state_dict(states if len(states) > 1 else states[0])
    return loader
