"""The stages as nodes of torchdata.nodes.

Names and options are the same. The source of each is a node.

Rules:
1. A node only forwards: options to its stage, iteration and state to a Stream.
2. ``reset(None)`` may be called several times before an item is requested: an epoch begins with the
   first ``next()``.
3. An iteration that is resumed after its last item ends at once, as the nodes of torchdata do; some
   of them rely on this. Loader (0.11) then begins the next epoch, but would return the old state
   throughout this epoch: see ``mend_loader``.
4. A node that is not ours may count its epochs itself, and in a new process it begins with the
   first one. So its state is also taken at the beginning of an epoch (``counts_epochs``). It counts
   an epoch at a ``reset(None)`` only if an item was requested since the reset before.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

try:
    from torchdata.nodes import BaseNode
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"wds_pipes.nodes needs torchdata ({error}): pip install torchdata", name=error.name
    ) from None

from wds_pipes import stages
from wds_pipes.core.graph import GraphStep
from wds_pipes.core.hosts import build, make_skin, reads_several, remade, stages_of
from wds_pipes.core.lane import Lane
from wds_pipes.core.moved import Data
from wds_pipes.core.options import unknown
from wds_pipes.core.stage import Mark, Source, Stage, State, begin, find_stage, functional_name, own_copy, running_copy
from wds_pipes.core.stream import Stream, StreamIterator
from wds_pipes.errors import StateError, WdsError
from wds_pipes.loader.lengths import Countable
from wds_pipes.loader.ranks import warn_of_ranks
from wds_pipes.loader.sample_order import mend_loader
from wds_pipes.stages.edits import Edits, load

mend_loader()


class WdsNode(Countable, BaseNode[Any]):
    """The base of all nodes of this package: a node with a position of a few hundred bytes.

    Iterate it through ``torchdata.nodes.Loader``, and take the state from there.
    """

    _kind: type[Stage[Any]]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        if not issubclass(self._kind, Source):
            if not args or not isinstance(args[0], BaseNode):
                raise TypeError(
                    f"nodes.{self._kind.__name__}() needs a node as its source, not {args[0] if args else None!r}"
                )
            args = (_stage_for(args[0], f"nodes.{self._kind.__name__}()"), *args[1:])
        self._begin(build(self._kind, f"nodes.{self._kind.__name__}", args, options))

    @classmethod
    def of(cls, stage: Stage[Any]) -> WdsNode:
        """Return a node that yields the items of ``stage``."""
        node = cls.__new__(cls)
        BaseNode.__init__(node)
        node._begin(stage)
        return node

    def _begin(self, stage: Stage[Any]) -> None:
        self._stream: Stream[Any] = Stream(stage)
        self._items: StreamIterator[Any] = iter(self._stream)

    def __reduce_ex__(self, protocol: Any) -> Any:
        made, kind = super().__reduce_ex__(protocol), type(self).__dict__.get("_kind")
        return made if kind is None else (remade, (kind, type(self).__base__, __name__), *made[2:])

    def reset(self, initial_state: State | None = None) -> None:
        """Begin the next epoch, or continue from a state, at the first ``next()``."""
        super().reset(initial_state)
        warn_of_ranks("a node")
        stream = self._stream
        if initial_state is not None:
            load(stream, initial_state, Edits())
        else:
            self._tell_epoch()
            stream.give_up()
        self._items = iter(stream)

    def _tell_epoch(self) -> None:
        """Tell nodes that are not ours of a loaded epoch before it is given up: rule 4."""
        stream = self._stream
        if stream.chain.root.counts_epochs and stream.will_resume and stream.position.mark is not None:
            self._items.open()

    def next(self) -> Any:
        """Return the next item; raise StopIteration at the end of the epoch."""
        return next(self._items)

    def get_state(self) -> State:
        """Return the position after the last returned item, as a small dict of plain JSON types,
        new at each call.

        After the last item of an epoch, it is the end of this epoch.
        """
        if self._stream.chain.root.counts_epochs and self._stream.position.mark is None:
            self._items.open()
        return self._stream.state_at(self._stream.position)

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration start ``epoch`` from its beginning.

        After a state of the same epoch was loaded, the iteration still continues from that state.
        """
        self._stream.set_epoch(epoch)

    def __repr__(self) -> str:
        return str(self._stream.chain)


class ForeignNode(Source[Any]):
    """The items of a node that is not ours, such as one of torchdata's, as the source of a stage.

    Checkpoint: a copy of the node's own state, taken at each item. How much a resume reads again
    depends on the node.
    """

    counts_epochs = True

    @dataclass(slots=True)
    class At:
        node: Any = None
        fresh: bool = False  # no item was requested since the node was reset to the beginning of an epoch

    def __init__(self, node: BaseNode[Any]) -> None:
        self._ours = _below(node)
        self._below = self._ours[0]._stream.chain.root if self._ours else None
        super().__init__(self._below.seed if self._below and self._below.seed_given else None)
        self.node = node
        # Whether the node has a state that was loaded, from which an item had been requested, and
        # was not asked for one since then. All copies share it.
        self._loaded = SimpleNamespace(unread=False)

    def which_data(self) -> Data:
        return self._below.which_data() if self._below and len(self._ours) == 1 else Data()

    def number_of(self, url: str) -> str | None:
        return self._below.number_of(url) if self._below and len(self._ours) == 1 else None

    def open(self, lane: Lane, mark: Mark | None = None) -> Stage[Any]:
        running = running_copy(self)
        running.lane = lane
        if mark is None and self._loaded.unread:
            next(self.node, None)  # rule 4
        for ours in self._ours:
            if mark is None:
                ours._tell_epoch()
            ours._stream.set_epoch(lane.epoch, anew=mark is None)
        running.at = self.At(*mark[0]) if mark else self.At(fresh=True)
        self._reset(running.at.node)
        self._loaded.unread = not running.at.fresh
        begin(running, mark, self)
        return running

    def _reset(self, state: Any) -> None:
        try:
            self.node.reset(copy.deepcopy(state))  # torchdata's sampler changes its state in place
        except WdsError:
            raise
        except Exception as error:
            if state is None:
                raise
            name = type(self.node).__name__
            raise StateError(
                f"the state that was saved of node {name} cannot be loaded "
                f"({type(error).__name__}: {error}). Use an untouched checkpoint."
            ) from error

    def run(self) -> Iterator[Any]:
        self.at.fresh = self._loaded.unread = False
        yield from self.node

    def mark(self) -> Mark:
        return (own_copy(self.node.state_dict()), self.at.fresh), None

    def _in_graph(self, *, counted: bool) -> GraphStep:
        return GraphStep("node", {"kind": type(self.node).__name__})


def _below(node: Any) -> list[WdsNode]:
    """Return the nodes of ours from which another node reads."""
    if isinstance(node, WdsNode):
        return [node]
    if isinstance(node, BaseNode):
        return [ours for part in vars(node).values() for ours in _below(part)]
    parts = node.values() if isinstance(node, dict) else node if isinstance(node, (list, tuple)) else ()
    return [ours for part in parts for ours in _below(part)]


def _stage_for(node: BaseNode[Any], what: str) -> Stage[Any]:
    """Return the stage of a node, ours or another. ``what``, which is built on it, has its own
    position.

    Raises:
        StateError: a state was loaded into the node.
    """
    if not isinstance(node, WdsNode):
        return ForeignNode(node)
    if node._stream.will_resume:
        raise StateError(
            f"a state was loaded into this node, which {what} would not continue: load it into what you iterate, "
            "after that is built."
        )
    return node._stream.stage


class _MixedNode(WdsNode):
    """A node over several nodes, by name."""

    def __init__(self, sources: Mapping[str, BaseNode[Any]], *args: Any, **options: Any) -> None:
        BaseNode.__init__(self)
        written = f"nodes.{self._kind.__name__}"
        for name, node in sources.items() if isinstance(sources, Mapping) else ():
            if not isinstance(node, BaseNode):
                raise TypeError(f"{written}() takes nodes by name, and {name!r} is {node!r:.80}")
        self._begin(build(self._kind, written, (stages_of(sources, written, _stage_for), *args), options))


def _node_class(kind: type[Stage[Any]]) -> type[WdsNode]:
    """Return the class of a stage's nodes: same name, same help."""
    return make_skin(kind, _MixedNode if reads_several(kind) else WdsNode, __name__)


for _name in stages.__all__:
    globals()[_name] = _node_class(getattr(stages, _name))


def __getattr__(name: str) -> type[WdsNode]:  # for type checkers also the nodes that are made above
    kind = find_stage(functional_name(name))
    if kind is None or kind.__name__ != name or kind.run is Stage.run:  # else a stage of the user's
        raise AttributeError(unknown(f"module {__name__!r} has no attribute", name, __all__), name=name)
    return _node_class(kind)


__all__ = ["WdsNode", *stages.__all__]  # noqa: PLE0604 - names, all of them
