"""What a chain and a state must have in common."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import zip_longest
from typing import Any, NamedTuple

from wds_pipes.core.chain import Chain
from wds_pipes.core.graph import GraphStep, graph_text
from wds_pipes.core.moved import MEND, MEND_CLI, Data, Move
from wds_pipes.core.stage import Branching, State, own_copy
from wds_pipes.core.state import ADDED, SEGMENTS, Grown, Saved, SavedSource, damaged, read_state
from wds_pipes.core.words import shown
from wds_pipes.errors import StateError


class Recipe(NamedTuple):
    """What a chain and a state have in common: see ``Source.which_data`` and
    ``Chain.graph``.

    Attributes:
        steps: a hash of the graph.
        samples: the fingerprint of the numbers of samples, if the epoch is partitioned by them.
        sources: the recipes of the chains that it mixes, by name.
        without: names of sources that a state may have, and the mix does not; None: sources never
            change.
        weight: of one of these chains, its weight as text.
        changed: the user declared that the weights or the sources of the mix have changed.
        grown: see ``Order``.
    """

    seed: int
    graph: tuple[GraphStep, ...]
    data: Data
    steps: str
    samples: str | None = None
    sources: dict[str, Recipe] = {}  # noqa: RUF012 - never changed
    without: frozenset[str] | None = None
    weight: str = ""
    changed: bool = False
    grown: Grown = ()

    @classmethod
    def of(cls, chain: Chain, *, counted: bool = False, seed: int | None = None) -> Recipe:
        """Return the recipe of a chain.

        Args:
            chain: the chain.
            counted: a step after it counts its items.
            seed: the seed by which a mix or join runs it; None: its own.
        """
        root, graph = chain.root, chain.graph(counted=counted)
        own = root.seed if seed is None else seed
        sources = {}
        if isinstance(root, Branching):
            for name, branch in root.branches.items():
                source = cls.of(Chain(branch), counted=True, seed=root.seed_of(name, own))
                sources[name] = source._replace(weight=root.weight_of(name))
        without: frozenset[str] | None = getattr(root, "without", None)
        changed = without is not None and bool(getattr(root, "changed", False))
        steps = blake2b(json.dumps(graph).encode(), digest_size=4).hexdigest()
        return cls(
            own,
            graph,
            root.which_data(),
            steps,
            sources=sources,
            without=without,
            changed=changed,
            grown=root.epoch_order.grown,
        )

    @property
    def graph_entry(self) -> list[list[Any]]:
        """The graph in a state: new lists."""
        return [
            [name, {option: own_copy(value) for option, value in options.items()}] if options else [name]
            for name, options in self.graph
        ]

    def entries_at(self, epoch: int) -> dict[str, Any]:
        """Return the entries of a state in an epoch that say how the list of shards has grown."""
        left = [[last, shards] for last, shards in self.grown if last >= epoch]
        return {"grown": left} if left else {}

    @property
    def entries(self) -> dict[str, Any]:
        """The entries of a state that say what it is of: what is not known has no entry."""
        data = self.data
        entries: dict[str, Any] = {"seed": self.seed, "shards": data.shards, "fingerprint": data.fingerprint}
        if data.id:
            entries["data"] = data.id
        if self.samples is not None:
            entries["samples"] = self.samples
        if self.sources:
            entries["sources"] = {
                name: {"steps": source.steps, **({"weight": source.weight} if source.weight else {}), **source.entries}
                for name, source in self.sources.items()
            }
        return entries


def check_recipe(state: State, recipe: Recipe, move: Move, *, changed: bool = False) -> Saved:
    """Return the contents of a state. ``move`` notes where its data were; ``changed``: weights and
    sources of a mix may be others.

    Raises:
        StateError: another pipeline made the state; the message lists all differences.
    """
    saved, differences = read_state(state), []
    mend = mend_cli = "Build the pipeline as it was when the state was saved."
    move.url = next((lane.url for lane in saved.lanes.values() if lane.url is not None), None)
    if saved.graph != recipe.graph:
        differences.append(_unlike(saved.graph, recipe.graph))
        mend = (
            f"{mend} Or begin the next epoch with this pipeline: set_epoch({saved.epoch + 1}), without the state. If "
            "only the shards are elsewhere, pass moved=True."
        )
    if saved.shards != recipe.data.shards:
        differences.append(f"it was made over {saved.shards} shards, this pipeline has {recipe.data.shards}")
        if (saved.shards or 0) < (recipe.data.shards or 0):
            mend = (
                f'{mend} Over a list with shards added at its end: PipeLoader.load_state_dict(state, added="append").'
            )
    elif (problem := move.problem(Data(saved.fingerprint, saved.data), recipe.data)) is not None:
        differences.append(problem)
        mend, mend_cli = f"{mend} {MEND}", f"{mend} {MEND_CLI}"
    if saved.graph == recipe.graph and recipe.samples is not None and saved.samples != recipe.samples:
        differences.append(
            "samples_per_shard or the index gave the shards other numbers of samples, by which "
            "the epoch was partitioned"
        )
    if saved.grown != tuple(pair for pair in recipe.grown if pair[0] >= saved.epoch):
        differences.append("its list of shards has grown in the middle of an epoch")
    if saved.seed != recipe.seed:
        differences.append(f"it was made with seed={saved.seed}, this pipeline has seed={recipe.seed}")
    if differences:
        what = f"the state does not fit this pipeline: {'; '.join(differences)}"
        raise StateError(what, mend=mend, mend_cli=mend_cli)
    check_sources(saved.sources, recipe, move, changed=changed)
    return saved


def check_sources(saved: Mapping[str, SavedSource], recipe: Recipe, move: Move, *, changed: bool) -> None:
    """Check that the sources of a mix or join in a state, and their weights, are those of a recipe.

    Raises:
        StateError: a source is missing, or was another pipeline; or, unless ``changed``, a source
            is new, or has another weight.
    """
    if recipe.sources and not saved:
        raise damaged("it does not say what its sources are")
    if recipe.without is None and saved.keys() != recipe.sources.keys():
        raise damaged("its graph and its sources have different names")
    if gone := sorted(saved.keys() - recipe.sources.keys() - (recipe.without or set())):
        raise StateError(
            f"the state has {', '.join(map(repr, gone)):.500}, which is not in this mix. "
            f"If that is meant, pass mix(..., without={gone!r:.500})."
        )
    if not changed and not recipe.changed and (how := _how_mix_changed(saved, recipe.sources)) is not None:
        raise StateError(
            f"{how}. If that is meant, from here on, pass load_state_dict(state, mix='changed'); or "
            "mix(..., changed=True) where another library loads the state."
        )
    for name in saved.keys() & recipe.sources.keys():
        then, now = saved[name], recipe.sources[name]
        facts, problem = [], move.problem(Data(then.fingerprint, then.data), now.data)
        if then.seed != now.seed:
            facts.append(f"its seed was {then.seed} and is {now.seed}")
        if then.shards != now.data.shards:
            facts.append(f"it had {then.shards} shards and has {now.data.shards}")
        elif problem is not None:
            facts.append(problem)
        if then.steps != now.steps:
            facts.append(f"its steps were others than {graph_text(now.graph)}")
        if facts:
            what, mend = "", "."
            if recipe.without is not None:
                what = " of this mix"
                mend = f", or give it another name to begin it at its beginning (and pass without=[{name!r}])."
            raise StateError(
                f"source {name!r}{what} is not the one of the state: {'; '.join(facts)}. Build it as it was{mend}"
                f"{'' if problem is None else f' {MEND}'}"
            )
        check_sources(then.sources, now, move, changed=changed)


def _how_mix_changed(saved: Mapping[str, SavedSource], sources: Mapping[str, Recipe]) -> str | None:
    """Return how a mix differs from that of a state, for a message; None: it has no new source, and
    the sources that are left have the proportions that they had.
    """
    if new := sorted(sources.keys() - saved.keys()):
        return f"this mix has {', '.join(map(repr, new)):.500}, which is not in the state"
    pairs = [(saved[name].weight, now.weight) for name, now in sources.items()]
    fixed = all(weight.isdecimal() for pair in pairs for weight in pair)
    first, second = map(int, pairs[0]) if fixed and pairs else (0, 0)
    if all(int(then) * second == int(now) * first if fixed else then == now for then, now in pairs):
        return None
    then, now = (
        "".join(f", {name!r}: {pair[which]}" for name, pair in zip(sources, pairs, strict=True))[2:] for which in (0, 1)
    )
    return f"this mix has the weights {now:.500}, and that of the state had {then:.500}"


def _unlike(then: Sequence[GraphStep], now: Sequence[GraphStep]) -> str:
    """Return how the chain of a state differs from another one: the first steps that differ."""
    old, new = ([step for step in graph if step.name not in ADDED] for graph in (then, now))
    if old != new:
        pairs = zip_longest(old, new, fillvalue="no step")
        place, (one, other) = next(found for found in enumerate(pairs, 1) if found[1][0] != found[1][1])
        return f"step {place} of its pipeline was {one!s:.2000}, and of this one is {other}"
    old_parts, new_parts = ([step for step in graph if step.name == SEGMENTS] for graph in (then, now))
    if not new_parts:
        return "it was made by a PipeLoader, this is a pipe: load it into a PipeLoader"
    if not old_parts:
        return "it was made by a pipe, this is a PipeLoader: load it into what you iterated"
    had, has = (
        shown(parts[0].options["samples"]) if "samples" in parts[0].options else "an unknown number of"
        for parts in (old_parts, new_parts)
    )
    return f"its epoch had {had} samples, that of this pipeline has {has}: pass the same samples_per_shard= or index="
