"""A stage as a pipe.

Rules:
1. A pipe here is a shell: options go to its stage, iterating and state to a Stream. Its class is made from the stage's, with the same name and help.
2. ``__iter__`` is not torch's hooked one: that would cost more per item than the stages do, and makes a generator that raised look exhausted.
"""

from __future__ import annotations

import copyreg
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any

from wds_pipes import stages
from wds_pipes.core.hosts import add_pipes, make_skin
from wds_pipes.core.stage import Stage, State, functional_name
from wds_pipes.core.stream import Stream
from wds_pipes.core.suggest import build, no_method
from wds_pipes.core.tracebacks import shortened
from wds_pipes.datapipes.base import IterDataPipe, Wrapper, torch_kinds
from wds_pipes.datapipes.torch_steps import HOLD_NOTHING, TorchSource, TorchStep, walk
from wds_pipes.dataset import LaneEnds, WdsDataset, as_dataset, warn_of_batches
from wds_pipes.display import graph
from wds_pipes.display.text import shown
from wds_pipes.errors import StateError
from wds_pipes.loader.parent import worker_info
from wds_pipes.loader.ranks import warn_of_ranks

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    from wds_pipes.datapipes.signatures import Methods
    from wds_pipes.nodes import WdsNode

    T_co = TypeVar("T_co", covariant=True, default=Any)

    class Base(IterDataPipe[T_co], Methods[T_co]):
        """What pipes have besides what is written here."""

else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)
    Base = IterDataPipe

_MODULE = "wds_pipes.datapipes"  # that of all pipes' classes


class WdsPipe(Base[T_co]):
    """The base of all pipes of this package: an IterDataPipe with a state. ``repr(pipe)`` is the chain as it was written, a notebook shows it as a list.

    Each ``iter(pipe)`` is the next epoch; a loaded state continues its own. A pipe has one iterator at a time: starting a new one ends the one before.
    """

    _is_child_datapipe = False  # torch asks for it at each item; without this, through __getattr__
    _kind: type[Stage[Any]]
    _call: graph.Call | None = None  # how it was built

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[T_co]: ...  # rule 2: see below

    @shortened
    def __init__(self, *args: Any, **options: Any) -> None:
        given = args  # with pipes
        name = _written(self._kind)
        if not self._kind.is_source:
            if not args or not isinstance(args[0], IterDataPipe):
                raise TypeError(f"{name}() needs a pipe as its source, not {args[0] if args else None!r}")
            self._source = args[0]  # torch's graph walk looks for it
            args = (_stage_for(args[0], f"{name}()"), *args[1:])
        self._stream: Stream[Any] = Stream(build(self._kind, name, args, options))
        self._call = _call(self._kind, self._stream.stage, given, options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        # By its stage, so that the module is imported in which a user has written that; what torch's walk over a graph wants of it stays as it is.
        return (_again, (self._kind,), *made[2:]) if made[0] is copyreg.__newobj__ else made  # type: ignore[attr-defined]

    def state_dict(self) -> State:
        """The position behind the item that was given last, as a small dict of plain JSON types, new at each call.

        Raises:
            StateError: a pipe of torch's in this chain has a state that cannot be known; the message names it and what to use instead.
        """
        return self._stream.state_dict()

    def load_state_dict(self, state: State, *, moved: bool = False) -> None:
        """Let the next ``iter()`` continue from ``state``: the same samples in the same order, none lost, none twice.

        The shards may lie elsewhere by now, on another disk or in another store. They are the same shards if all have the MD5s in the index that they had; or,
        where there was no index or is none, the same names below the directory that all of them are in. A line in the log says that the state goes on
        elsewhere. If the directory is called as a split is (``train``, ``val``), it must keep its name.

        Args:
            state: what ``state_dict`` returned.
            moved: these are the shards of the state, in the same order, whatever their names and the index say: for shards that were renamed or packed
                anew. All else is checked.

        Raises:
            StateError: the state does not fit this pipeline; the message says what differs.
        """
        self._stream.load_state_dict(state, moved=moved)

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` be ``epoch``, from its beginning; a loaded state of that epoch still continues where it was."""
        self._stream.set_epoch(epoch)

    def counts(self) -> dict[str, int]:
        """The samples of the current epoch, or the one that just ended, by what became of them; see ``Stream.counts``."""
        return self._stream.counts()

    def __len__(self) -> int:
        """How many items an epoch has: samples or batches, if ``ShardList(index=...)`` or ``samples_per_shard=`` counts them, or URLs and shards.

        Raises:
            TypeError: it is not known, or depends on the workers or ranks of the DataLoader that asks; the message says what to do.
        """
        from wds_pipes.loader.lengths import length

        return length(self._stream.stage, ranks_are_dealt=True)

    def __bool__(self) -> bool:
        return True  # also where len() is not known

    def reset(self, *state: Any) -> None:
        """What torch calls before each pass."""
        if state:
            raise TypeError("a Loader of torchdata takes nodes, and this is a pipe: pass pipe.as_node()")
        super().reset()  # type: ignore[misc]  # the stub of IterDataPipe lacks it

    def as_dataset(self) -> WdsDataset:
        """A plain IterableDataset with this pipe's state, for DataLoader and StatefulDataLoader."""
        return as_dataset(self)

    def as_node(self) -> WdsNode:
        """This pipe as a node of torchdata.nodes."""
        from wds_pipes.nodes import WdsNode

        return WdsNode.of(_stage_for(self, "as_node()"))

    # torch's own steps that hold nothing at a yield come back as pipes of ours, so that the position is that of what they have given.

    def map(self, *args: Any, **options: Any) -> WdsPipe:
        return TorchEnded(_torchs("Mapper", "map_samples()")(self, *args, **options))

    def filter(self, *args: Any, **options: Any) -> WdsPipe:
        return TorchEnded(_torchs("Filter", "filter_samples()")(self, *args, **options))

    def batch(self, *args: Any, **options: Any) -> WdsPipe:
        return TorchEnded(_torchs("Batcher", 'batch_samples(..., collate="list")')(self, *args, **options))

    def collate(self, *args: Any, **options: Any) -> WdsPipe:
        return TorchEnded(_torchs("Collator", "batch_samples(..., collate=...)")(self, *args, **options))

    def shuffle(self, *args: Any, **options: Any) -> IterDataPipe[Any]:
        if args:
            size = shown(args[0])
            raise TypeError(
                f"shuffle({size}) of webdataset is .shuffle_buffer({size}) here. torch's is shuffle(buffer_size={size}), and its state cannot be saved."
            )
        return _torchs("Shuffler", "shuffle_buffer()")(self, **options)

    def __getattr__(self, name: str) -> Any:
        method = IterDataPipe.functions.get(name)
        if method is None and not name.startswith("_"):
            raise AttributeError(no_method(type(self).__name__, name, dir(self)), name=name)
        # torch gives a partial here, whose help shows neither the name nor the arguments
        return MethodType(method, self) if method is not None and hasattr(method, "_wds_kind") else super().__getattr__(name)

    # What torch's DataLoader calls: only the first pipe of a chain answers, since a chain is dealt once.

    def _is_first(self) -> bool:
        source = self.__dict__.get("_source")
        return (source is None or find_ours(source) is None) and self._stream.stage.root.deals

    @property
    def apply_sharding(self) -> Callable[..., None]:
        """In each worker, and without workers: which lane to give."""
        if not self._is_first():
            raise AttributeError("apply_sharding")
        return self._deal

    @property
    def set_seed(self) -> Callable[[int], None]:
        """At each iteration, in the main process first: fresh workers are copies that cannot count epochs. The seed itself is of no use here."""
        if not self._is_first():
            raise AttributeError("set_seed")
        return self._count_epoch

    def _count_epoch(self, seed: int) -> None:
        host = self._stream.stage.host
        host.pid = host.pid or os.getpid()
        warn_of_ranks("a pipe in DataLoader", dealt=True)
        if host.tell_end is None:
            host.tell_end = LaneEnds()
        # A worker goes on from the epoch that it was started with; and an iterator of DataLoader's tells it twice, when it is made and when it is reset.
        if host.pid != os.getpid() or sys._getframe(2).f_code.co_name != "__init__":
            return
        if host.hosted == host.epoch:  # workers have had this one
            host.epoch += 1
        host.hosted = host.epoch

    def _deal(self, num_of_instances: int, instance_id: int, sharding_group: Any = None) -> None:
        host = self._stream.stage.host
        host.lane, host.lanes = instance_id, num_of_instances

    def to_mermaid(self) -> str:
        """The chain as a flowchart in Mermaid's language, which GitHub and notebooks draw in Markdown."""
        return graph.to_mermaid(self)

    def to_dot(self) -> str:
        """The chain in the language of Graphviz."""
        return graph.to_dot(self)

    def _repr_html_(self) -> str:
        return graph.to_html(self)

    def __repr__(self) -> str:
        return graph.to_text(self)

    __str__ = __repr__


def _iterate(self: WdsPipe) -> Iterator[Any]:
    """Begin the next epoch, or go on from a loaded state, at the first ``next()``."""
    if _below_stateful_dataloader():
        raise StateError(
            "StatefulDataLoader does not see the state of an IterDataPipe: it would replay from the start and say nothing. Give it pipe.as_dataset(), or "
            "wds_pipes.as_dataset(pipe) for a chain that ends in a pipe of torch's."
        )
    if worker_info() is None and self._stream.stage.host.lanes == 1:
        warn_of_ranks("a pipe")
    if self._stream.stage.batches:
        warn_of_batches(self._stream.stage.batches)
    return iter(self._stream)


def _torchs(name: str, instead: str) -> Callable[..., IterDataPipe[Any]]:
    """A class of torch's pipes."""
    for kind in torch_kinds(name):
        return kind
    raise NotImplementedError(f"this step was torch's, and this torch has no DataPipes any more: use {instead}")


_TORCHS = {WdsPipe.map: "Mapper", WdsPipe.filter: "Filter", WdsPipe.batch: "Batcher", WdsPipe.collate: "Collator", WdsPipe.shuffle: "Shuffler"}
for _method, _name in _TORCHS.items():
    for _kind in torch_kinds(_name):
        _method.__doc__ = _kind.__doc__

WdsPipe.__iter__ = _iterate  # type: ignore[method-assign]  # rule 2: set here, torch's metaclass does not see it


def _below_stateful_dataloader() -> bool:
    """Whether a StatefulDataLoader iterates a bare pipe right now: it puts torch's wrapper around it, which shows in the stack alone."""
    frame: FrameType | None = sys._getframe(2)
    wrapped = False
    while frame is not None:
        wrapped = wrapped or isinstance(frame.f_locals.get("self"), Wrapper)
        if wrapped and frame.f_globals.get("__name__", "").startswith("torchdata.stateful_dataloader"):
            return True
        frame = frame.f_back
    return False


def _written(kind: type[Stage[Any]]) -> str:
    """What a caller writes to build a stage's pipe."""
    return kind.__name__ if kind.is_source else functional_name(kind)


def _call(kind: type[Stage[Any]], stage: Stage[Any], args: tuple[Any, ...], options: dict[str, Any]) -> graph.Call:
    """How a pipe was built, to show it: without what it reads from, and ShardList with the number of shards."""
    signature = inspect.signature(kind)
    values, said = stage.shown_options(signature.bind(*args, **options).arguments)
    if not kind.is_source:
        del values[next(iter(signature.parameters))]
    call = graph.Call.of(_written(kind), signature, values)
    return call._replace(arguments=(f"{call.arguments[0]} {said}", *call.arguments[1:])) if said else call


class TorchEnded(WdsPipe):
    """A pipe of torch's after ours, as a pipe of ours."""

    __reduce_ex__ = IterDataPipe.__reduce_ex__

    def __init__(self, pipe: IterDataPipe[Any]) -> None:
        self._source = pipe
        self._stream = Stream(_stage_for(pipe, f"torch's {type(pipe).__name__}"))


class MixedPipe(WdsPipe):
    """A pipe over several, by name."""

    @shortened
    def __init__(self, sources: Mapping[str, IterDataPipe[Any]], *args: Any, **options: Any) -> None:
        pipes = sources if isinstance(sources, Mapping) else {}
        for name, pipe in pipes.items():
            if not isinstance(pipe, IterDataPipe):
                raise TypeError(f"mix() takes pipes by name, and {name!r} is {pipe!r:.80}")
        self._sources = list(pipes.values())  # torch's graph walk looks for them
        self._stream = Stream(build(stages.Mix, "mix", ({name: as_stage(pipe) for name, pipe in pipes.items()} or sources, *args), options))
        self._call = _call(stages.Mix, self._stream.stage, (sources, *args), options)


def as_stage(pipe: IterDataPipe[Any]) -> Stage[Any]:
    """The stage of a pipe, ours or torch's."""
    if isinstance(pipe, WdsPipe):
        return pipe._stream.stage
    if type(pipe) in HOLD_NOTHING and find_ours(pipe) is not None:
        return TorchStep(as_stage(pipe.datapipe), pipe)
    return TorchSource(pipe, find_ours(pipe) is not None)


def find_ours(pipe: IterDataPipe[Any]) -> WdsPipe | None:
    """The nearest pipe of ours at or below ``pipe``."""
    return next((below for below in walk(pipe) if isinstance(below, WdsPipe)), None)


def _stage_for(pipe: IterDataPipe[Any], what: str) -> Stage[Any]:
    """The stage of a pipe, for ``what`` is built upon it, which has a position of its own.

    Raises:
        StateError: a state waits in the pipe for an ``iter()`` that will not come.
    """
    ours = find_ours(pipe)
    if ours is not None and ours._stream._resume:
        raise StateError(f"a state was loaded into this pipe, which {what} would not continue: load it into what you iterate, after that is built.")
    return as_stage(pipe)


add_pipes(IterDataPipe, _stage_for)


def pipe_class(kind: type[Stage[Any]]) -> type[WdsPipe]:
    """The pipes of a stage: same name, same help."""
    return make_skin(kind, MixedPipe if kind is stages.Mix else WdsPipe, _MODULE)


def _again(kind: type[Stage[Any]]) -> WdsPipe:
    """An empty pipe of a stage, which pickle fills."""
    made = pipe_class(kind)
    return made.__new__(made)
