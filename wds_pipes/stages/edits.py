"""Edits of a running epoch: what a call of ``load_state_dict`` changes from its state on.

Rules:
1. An edit makes two pipelines of the one that was built: that of the state, which checks and reads
   the state as ever, and the one that goes on from there. Whatever is not edited must fit.
2. Later states say what was edited, as far as it matters for them: the graph names the samples that
   are left out, ``"grown"`` says which epochs have fewer shards than the list, and the weights of a
   mix stand beside its sources.
3. Samples are left out where no later step remembers any: after the last step that may change their
   order or number. So all steps before it have the items that they had, and all positions hold. A
   ``SampleList`` whose order PipeLoader divides leaves their places out of this order instead, so
   that all batches are full.
4. A list of keys may grow at its end: a state knows how many keys its list had, and their
   fingerprint.
5. A list of shards that has grown has all of them from the next epoch on. So has the one order of
   a ``SampleList``: until then it is an order of the first samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple, cast

from wds_pipes.core.chain import Chain, Composite, linked
from wds_pipes.core.counts import Lack
from wds_pipes.core.options import check_choice
from wds_pipes.core.stage import Reports, Source, Stage, State, functional_name
from wds_pipes.core.state import Grown, Saved, damaged, read_count, read_dict, read_state
from wds_pipes.core.stream import Stream
from wds_pipes.core.words import plural
from wds_pipes.errors import StateError
from wds_pipes.io.open import Opener
from wds_pipes.io.remote.budget import Reading
from wds_pipes.stages.sample_list import SampleList
from wds_pipes.stages.shard_list import ShardList
from wds_pipes.stages.shard_source import ShardSource
from wds_pipes.tar.located import read_keys

Keys = tuple[str, ...]
_LEAVE_OUT = ("exclude_samples", "sample_list")  # the steps of a graph that may say which samples are left out


class Edits(NamedTuple):
    """The arguments of ``load_state_dict``: see ``PipeLoader.load_state_dict``."""

    moved: bool = False
    exclude: str | os.PathLike[str] | Iterable[str] | None = None
    added: str | None = None
    mix: str | None = None

    @property
    def changed(self) -> bool:
        """Whether the sources of a mix, or their weights, may have changed."""
        return self.mix is not None and check_choice("mix", self.mix, "changed") == "changed"


class ExcludeSamples(Reports, Stage[Any]):
    """Leaves out the samples with some keys, and counts them as filtered, and as excluded.

    Checkpoint: the position of its source.
    """

    @dataclass(slots=True)
    class At:
        filtered: int = 0
        excluded: int = 0

    tallies = ("filtered", "excluded")
    scope = "item"
    _keeps_keys = True
    order_options = ("excluded",)
    source: Stage[Any]

    def __init__(self, source: Stage[Any], keys: Keys) -> None:
        super().__init__(source)
        self.keys, self.excluded = frozenset(keys), _excluded(keys)
        self._met: set[str] = set()  # while running: the keys of samples that were left out

    def lack(self, before: Lack) -> Lack:
        return before._replace(excluded=frozenset(self._met))

    def changes_count(self) -> str | None:
        return "load_state_dict(exclude=...) leaves samples out, and only a SampleList knows how many of each lane"

    def run(self) -> Iterator[Any]:
        at, keys = self.at, self.keys
        for item in self.source.items:
            try:
                left_out = item["__key__"] in keys
            except (TypeError, KeyError, IndexError) as error:
                name = functional_name(type(self.source))
                raise TypeError(
                    f"load_state_dict(exclude=...) looks for the keys of samples after {name}(), the last step that "
                    f"may change their order or number, and its items have no '__key__': {item!r:.80}. Keep "
                    "the keys up to there; a step of your own that makes one item of one says so with scope = 'item'."
                ) from error
            if left_out:
                at.filtered += 1
                at.excluded += 1
                self._met.add(item["__key__"])
            else:
                yield item


def _excluded(keys: Sequence[str]) -> dict[str, Any]:
    """Return what the graph of a state says of a list of keys: how many they are, and a hash."""
    digest = blake2b("".join(f"{key}\0" for key in keys).encode("utf-8", "surrogateescape"), digest_size=8)
    return {"keys": len(keys), "fingerprint": digest.hexdigest()}


def _keys_of(exclude: object, root: Source[Any]) -> Keys:
    """Return the keys that ``exclude`` names, each once."""
    if isinstance(exclude, str) and not exclude.startswith("@"):
        raise ValueError(f"exclude={exclude!r:.300} is not '@keys.txt', a file of keys; one key is a list of one")
    if isinstance(exclude, (str, os.PathLike)):
        name = os.fspath(exclude)
        exclude = read_keys(name[1:] if isinstance(exclude, str) else name, Opener(Reading(root.storage_options or {})))
    if not isinstance(exclude, Iterable):
        raise TypeError(f"exclude must be keys or '@keys.txt', not {exclude!r:.80}")
    keys = dict.fromkeys(sorted(exclude) if isinstance(exclude, (set, frozenset)) else exclude)
    if not all(isinstance(key, str) for key in keys):
        raise TypeError("exclude must be the keys of samples, which are strings, or '@keys.txt'")
    return tuple(keys)


def _without(stage: Stage[Any], keys: Keys, in_order: bool) -> Stage[Any]:
    """Return a pipeline without the samples with these keys; ``in_order``: without their places in
    the order of its SampleList.
    """
    chain = Chain(stage)
    if not keys:
        return stage
    if in_order:
        return linked(cast(SampleList, chain.root).leaving_out(keys, _excluded(keys)), chain.steps[1:])
    number = 1 + max(
        number
        for number, step in enumerate(chain.steps)
        if step.scope != "item" or step.gives is not None or isinstance(step, Composite) or number == 0
    )
    before = Chain(chain.steps[number - 1])
    name = functional_name(type(before.steps[-1]))
    if before.items_are not in (None, "samples"):
        raise ValueError(f"exclude= leaves out samples, and the items of this pipeline are {before.items_are}")
    if before.counts_delivered:
        raise ValueError(
            f"exclude= leaves out samples, and the items of {name}() are batches: make batches after it. Samples that "
            "pack_samples() or bucket_samples() takes can be left out from the next epoch on: by filter_samples() "
            "before it"
        )
    return linked(ExcludeSamples(before.steps[-1], keys), chain.steps[number:])


def place_of_exclusion(chain: Chain) -> int | None:
    """Return which entry of a position of a chain is that of ``ExcludeSamples``; None: none is."""
    kinds = [type(step) for step in chain.placed]
    return kinds.index(ExcludeSamples) if ExcludeSamples in kinds else None


class Edition:
    """The two pipelines of an edit.

    Args:
        stage: the pipeline as it was built.
        state: the state.
        edits: the arguments of the call.
        held: the keys that an earlier call left out.
        in_order: see ``_without``.

    Attributes:
        saved: the contents of the state.
        keys: the keys of the samples that are left out from now on.
        known: how many of them the state leaves out already.
        then: the pipeline of the state.

    Raises:
        StateError, ValueError, TypeError: the edit does not fit the state or the pipeline.
    """

    def __init__(self, stage: Stage[Any], state: State, edits: Edits, held: Keys, *, in_order: bool = False) -> None:
        self._stage, self._in_order, self.saved = stage, in_order, read_state(state)
        self._chain = Chain(stage)
        root = self._chain.root
        self.keys = held if edits.exclude is None else _keys_of(edits.exclude, root)
        self.known = _known(self.saved, self.keys, explicit=edits.exclude is not None)
        if edits.exclude is not None and isinstance(root, SampleList):
            root.check_keys(self.keys)
        self._grown = tuple(pair for pair in self.saved.grown if pair[0] >= self.saved.epoch)
        if self._grown != self.saved.grown or (self._grown and not isinstance(root, ShardSource)):
            raise damaged(f"its list of shards has grown by {self.saved.grown!r:.200}")
        self._appends = edits.added is not None and _appends(self._chain, self.saved, edits.added)
        self.then = self._built(self._grown, self.keys[: self.known], only=self._appends)

    @property
    def changes(self) -> bool:
        """Whether the pipeline that goes on is another one than the one that was built."""
        return bool(self.keys or self._grown or self._appends)

    def now(self, epoch: int | None) -> Stage[Any]:
        """Return the pipeline that goes on; ``epoch`` is the last one that was begun with the old
        list of shards, None: none was.
        """
        grown = self._grown
        if self._appends and epoch is not None and (not grown or grown[-1][0] < epoch):
            grown = (*grown, (epoch, cast(int, self.saved.shards)))
        return self._built(grown, self.keys)

    def _built(self, grown: Grown, keys: Keys, *, only: bool = False) -> Stage[Any]:
        stage, root = self._stage, self._chain.root
        if grown or only:
            shards = cast(ShardSource[Any], root).with_growth(grown)
            shards = shards.first(cast(int, self.saved.shards)) if only else shards
            stage = linked(shards, self._chain.steps[1:])
        return _without(stage, keys, self._in_order)


def _known(saved: Saved, keys: Keys, *, explicit: bool) -> int:
    """Return how many of these keys a state leaves out.

    Raises:
        StateError: it leaves out others.
    """
    left_out = {"keys": 0}
    for step in saved.graph:
        if step.name in _LEAVE_OUT and "excluded" in step.options:
            left_out = read_dict(step.options["excluded"], "what its graph leaves out")
    count = read_count(left_out.get("keys"), "the number of keys that its graph leaves out")
    if count > len(keys) or (count and _excluded(keys[:count]) != left_out):
        mend = (
            "the list must begin with the keys that it had, in the same order: new ones come at its end"
            if explicit
            else "pass the same list: load_state_dict(state, exclude=...)"
        )
        said = f"{plural(count, 'key')} (fingerprint {left_out.get('fingerprint')!s:.40})"
        raise StateError(f"the state leaves out the samples of {said}: {mend}.")
    if not explicit and count < len(keys):
        raise StateError(
            f"this pipeline leaves out the samples of {plural(len(keys), 'key')}, and the state of {count}: pass the "
            "keys again, load_state_dict(state, exclude=...), or exclude=[] to leave out none."
        )
    return count


def _appends(chain: Chain, saved: Saved, added: object) -> bool:
    """Return whether the list of shards is longer than that of a state.

    Raises:
        ValueError: the pipeline cannot go on with a list that has grown.
        StateError: the state is of a part of the lanes.
    """
    check_choice("added", added, "append")
    root = chain.root
    if not isinstance(root, ShardSource):
        kind = functional_name(type(root))
        mend = "add the new shards as a source" if kind == "mix" else "see PipeLoader.load_state_dict"
        raise ValueError(f"added='append' is for a pipeline of ShardList or SampleList, not {kind}: {mend}")
    weights = isinstance(root, ShardList) and root.weights is not None
    if weights or any(isinstance(step, Composite) and step.epoch_repeats != 1 for step in chain):
        raise ValueError("added='append' is not for ShardList(weights=...), nor for repeat()")
    if chain.never_ends:
        raise ValueError("added='append' needs epochs that end: leave out repeat()")
    if saved.shards is None or saved.shards >= len(root.urls):
        return False
    if len(saved.lanes) < saved.lane_count:
        raise StateError(
            "added='append' needs the states of all ranks, from which it sees which epochs have begun: collect them, "
            "and load merge_states(states) on each rank."
        )
    return True


def load(stream: Stream[Any], state: State, edits: Edits) -> None:
    """Make a stream continue from a state; the arguments are those of ``load_state_dict``."""
    edition = Edition(stream.base, state, edits, stream.excluded)
    if not edition.changes and stream.stage is stream.base:
        stream.load_state_dict(state, moved=edits.moved, changed=edits.changed)
        return
    before = Stream(edition.then)
    before.load_state_dict(state, moved=edits.moved, changed=edits.changed)
    at = before.position
    entries = before.chain.dump(at.mark)
    stage = edition.now(at.epoch if at.delivered or any(entries) else None) if edition.changes else stream.base
    stream.change(stage, edition.keys)
    place = place_of_exclusion(stream.chain)
    if place is not None and not edition.known:
        entries.insert(place, {})
    stream.seek(at._replace(mark=stream.chain.load(entries)))
