"""Computes the digest in a state again from the shards.

What a run has returned of an epoch, and what the state says is left of it, are all samples of the
epoch together. So the rest is read from the state on, as a training that resumes would read it, and
the digest of both must be that of the whole epoch, which is read once more from its beginning. Both
are read without decoding, and the number of ranks, workers and lanes does not matter.
"""

from __future__ import annotations

import ast
from functools import partial
from typing import Any, NamedTuple

from wds_pipes.core.chain import Chain, linked
from wds_pipes.core.counts import LEFT_OUT
from wds_pipes.core.digest import NOTHING, Digest, add, in_epoch, subtract, to_text
from wds_pipes.core.hosts import is_pipe, stage_of
from wds_pipes.core.running import Out
from wds_pipes.core.stage import Source, Stage, State, find_stage, is_built_in
from wds_pipes.core.state import ADDED, LEDGER, Saved, read_state
from wds_pipes.core.words import plural
from wds_pipes.errors import StateError
from wds_pipes.io.urls import Urls
from wds_pipes.loader.edited import Editable
from wds_pipes.loader.iterator import Joining, LoaderIterator, Progress
from wds_pipes.loader.ledger import Ledger
from wds_pipes.loader.pipe_loader import PipeLoader, progress_of
from wds_pipes.loader.plan import Plan
from wds_pipes.loader.restoring import restore
from wds_pipes.loader.segments import Segments
from wds_pipes.loader.workers import Workers
from wds_pipes.stages import BatchSamples, GroupByKey, SampleList
from wds_pipes.stages.edits import has_exclusion
from wds_pipes.tools.rewriting import function_of
from wds_pipes.tools.states import read_run, samples_of

_NAME_IT = "Name the pipeline of the training: module:function, which returns the pipe or the PipeLoader"
_ENDS = ("drop", "pad", "exact")


class Proof(NamedTuple):
    """Whether a digest was found again.

    Attributes:
        proven: whether it was, also that of the epochs before, unless samples were dropped there.
        lines: what was found, in words.
    """

    proven: bool
    lines: list[str]


def prove(path: str, what: Urls, **options: Any) -> Proof:
    """Compute the digest of the samples that a run has returned again.

    Args:
        path: a file or directory with the states of all ranks of a run, as of ``read_states``.
        what: ``"module:function"``, a function that returns the pipe or the PipeLoader of the
            training; or its shards: then the steps are those that the state names.
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
    if (why := _unprovable(saved)) is not None:
        raise StateError(f"{path} cannot be proven: {why}")
    assert saved.ledger is not None
    stage = stage_of_shards(saved, what, options) if are_shards(what) else _stage_of_function(str(what), saved)
    epoch, earlier = (saved.ledger[name] for name in LEDGER)
    whole, rest = _digest_of(stage, saved, saved.epoch), _digest_of(stage, saved, state)
    with_rest = add([epoch, rest])
    samples = samples_of(saved)
    if whole != with_rest:
        missing = f"with what is left, the digest is {to_text(with_rest)}, and that of the epoch {to_text(whole)}"
        return Proof(False, [f"not proven: {samples} have digest {to_text(epoch)}; {missing}"])
    lines = [f"proven: {samples} were each returned once (digest {to_text(epoch)})"]
    if not saved.epoch:
        return Proof(True, lines)
    if add(in_epoch(whole, number) for number in range(saved.epoch)) == earlier:
        return Proof(True, [*lines, "proven: each sample was returned once in each epoch before"])
    if saved.epoch_end == "drop":
        return Proof(True, [*lines, "of the epochs before it is not known which samples were dropped at their ends"])
    if _digest_of(stage, saved, 0) != whole:  # as with resampled=True
        each = (in_epoch(_digest_of(stage, saved, number), number) for number in range(saved.epoch))
        if add(each) == earlier:
            return Proof(True, [*lines, "proven: each sample of each epoch before was returned once"])
    told = (
        "not proven: in the epochs before other samples were returned, or some were left out (by skip(), set_epoch(), "
        "or steps that the state does not name)"
    )
    return Proof(False, [*lines, told])


def are_shards(what: Urls) -> bool:
    """Return whether an argument names shards, not a function."""
    if not isinstance(what, str):
        return True
    module, colon, name = what.partition(":")
    return not (colon and module.replace(".", "").isidentifier() and name.replace(".", "").isidentifier())


def _unprovable(saved: Saved) -> str | None:
    """Return why the digest in a state cannot be computed again; None: it can."""
    if saved.grown or has_exclusion(saved.graph):
        return "its epoch was edited (exclude= or added=), so a part of it came of another list"
    if saved.epoch_end not in _ENDS:
        return "with epoch_end='loop' its digest is of several epochs together"
    if left_out := saved.counts.get(LEFT_OUT):
        return f"skip() left out {plural(left_out, 'sample')} of its epoch, and it does not say which"
    if saved.counts.get("dropped"):
        return f"{plural(saved.counts['dropped'], 'sample')} of its epoch were dropped, and it does not say which"
    return None


def _digest_of(stage: Stage[Any], saved: Saved, what: State | int) -> Digest:
    """Return the digest of a whole epoch, by its number, or of what is left of one at a state."""
    new_plan = partial(
        Plan, epoch_end="exact", lanes=None, num_workers=0, parts=saved.mix_lanes, ledger=True, rank=(0, 1)
    )
    plan = new_plan(stage)
    progress = Progress(Editable(plan, stage, new_plan), partial(Workers, count=0, persistent=False, prefetch=1))
    begin = plan.beginning(what) if isinstance(what, int) else restore(plan, what)
    if not isinstance(what, int) and begin.epoch != saved.epoch:  # all lanes had ended
        return NOTHING
    progress.go_to(begin)
    for _ in LoaderIterator(progress, Joining(), None):
        pass
    assert progress.at is not None
    return subtract(plan.digest(progress.at), plan.digest(begin))


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


def _stage_of_function(named: str, saved: Saved) -> Stage[Any]:
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
    return without_decoding(laid)


def without_decoding(laid: Stage[Any]) -> Stage[Any]:
    """Return the chain of a loader that makes the same batches of the same samples, as lists of
    samples that have their ``__key__`` and ``__url__``, and decodes only what decides which samples
    come.

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
            found = BatchSamples(found, step.size, collate="list")
        elif step.items_per_batch is None and (place > summing or (place > read and not chooses)):
            found = _Passes(found, type(step), "", step)
        else:
            found = linked(found, [step])
    return found


# Of the steps that a state names


def stage_of_shards(saved: Saved, urls: Urls, options: dict[str, Any]) -> Stage[Any]:
    """Return a chain over shards of the steps that a state names."""
    names = [step for step in saved.graph if step.partition("(")[0] not in ADDED]
    calls = [_parsed(step) for step in names]
    kinds = [find_stage(name) for name, _ in calls]
    left_out = saved.counts.get("filtered") or saved.counts.get("skipped")  # by what only the steps say
    if left_out or saved.sources or not all(kind and is_built_in(kind) for kind in kinds):
        raise StateError(f"the state does not say enough of {' > '.join(names):.300}. {_NAME_IT}")
    options = {name: value for name, value in options.items() if value is not None}
    if saved.samples is not None and kinds[0] is not SampleList:
        options = {"index": True, **options}  # the samples were counted
    found: Any = None
    kind: Any
    for (name, arguments), kind in zip(calls, kinds, strict=True):
        try:
            if issubclass(kind, Source):
                found = kind(urls, seed=saved.seed, **arguments, **options)
            elif kind is BatchSamples:
                found = kind(found, **{"size": saved.batch_size // saved.mix_lanes, **arguments, "collate": "list"})
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
    if "own_seed" in options:
        options["seed"] = options.pop("own_seed")
    return step.partition("(")[0], options
