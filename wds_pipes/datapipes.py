"""The stages as torch IterDataPipes, and torch's own pipes as sources of stages.

Rules:
1. A pipe here is a shell: options go to its stage, iterating and state to a Stream. Its class is made from the stage's, with the same name and help.
2. ``__iter__`` is not torch's hooked one: that would cost more per item than the stages do, and makes a generator that raised look exhausted.
3. torch's pipes that hold nothing at a yield (map, filter, batch, collate) are looked through; a chain of torch's pipes alone is replayed from its start, if
   that gives the same again. Others make ``state_dict()`` fail with their name.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterDataPipe
from torch.utils.data.datapipes import iter as torch_pipes

from wds_pipes import stages
from wds_pipes.errors import StateError
from wds_pipes.stage import Host, Lane, Mark, Position, Stage, State, Stream, functional_name

if TYPE_CHECKING:
    from wds_pipes.dataset import WdsDataset
    from wds_pipes.nodes import WdsNode


class WdsPipe(IterDataPipe[Any]):
    """The base of all pipes of this package: an IterDataPipe with a state.

    Each ``iter(pipe)`` is the next epoch; a loaded state continues its own. A pipe has one iterator at a time: starting a new one ends the one before.
    """

    _is_child_datapipe = False  # torch asks for it at each item; without this, through __getattr__
    _kind: type[Stage[Any]]

    def __init__(self, *args: Any, **options: Any) -> None:
        if self._kind is not stages.ShardList:
            if not args or not isinstance(args[0], IterDataPipe):
                raise TypeError(f"{functional_name(self._kind)}() needs a pipe as its source, not {args[0] if args else None!r}")
            self._source = args[0]  # torch's graph walk looks for it
            args = (as_stage(args[0]), *args[1:])
        self._stream: Stream[Any] = Stream(self._kind(*args, **options))

    def state_dict(self) -> State:
        """The position behind the item that was given last, as a small dict of plain JSON types, new at each call.

        Raises:
            StateError: a pipe of torch's in this chain has a state that cannot be known; the message names it and what to use instead.
        """
        return self._stream.state_dict()

    def load_state_dict(self, state: State) -> None:
        """Let the next ``iter()`` continue from ``state``: the same samples in the same order, none lost, none twice.

        Raises:
            StateError: the state does not fit this pipeline; the message says what differs.
        """
        self._stream.load_state_dict(state)

    def set_epoch(self, epoch: int) -> None:
        """Let the next ``iter()`` be ``epoch``, from its beginning; a loaded state of that epoch still continues where it was."""
        self._stream.set_epoch(epoch)

    def counts(self) -> dict[str, int]:
        """The samples of the current epoch, or the one that just ended, by what became of them: delivered, filtered, skipped, dropped."""
        return self._stream.counts()

    def as_dataset(self) -> WdsDataset:
        """A plain IterableDataset with this pipe's state, for DataLoader and StatefulDataLoader."""
        return as_dataset(self)

    def as_node(self) -> WdsNode:
        """This pipe as a node of torchdata.nodes."""
        from wds_pipes.nodes import WdsNode

        return WdsNode.of(self._stream.stage)

    @property
    def apply_sharding(self) -> Callable[..., None]:
        """What torch's DataLoader calls in each worker: only the first pipe of a chain answers, since a chain is dealt once."""
        if isinstance(getattr(self, "_source", None), WdsPipe) or not self._stream.stage.root.deals:
            raise AttributeError("apply_sharding")
        return self._deal

    def _deal(self, num_of_instances: int, instance_id: int, sharding_group: Any = None) -> None:
        host = self._stream.stage.host
        host.lane, host.lanes = instance_id, num_of_instances

    def __repr__(self) -> str:
        return " > ".join(self._stream.stage.graph())

    __str__ = __repr__


def _iterate(self: WdsPipe) -> Iterator[Any]:
    """Begin the next epoch, or go on from a loaded state, at the first ``next()``."""
    if not self._stream.hosted and _below_stateful_dataloader():
        raise StateError(
            "StatefulDataLoader does not see the state of an IterDataPipe: it would replay from the start and say nothing. Give it pipe.as_dataset(), or "
            "wds_pipes.as_dataset(pipe) for a chain that ends in a pipe of torch's."
        )
    return iter(self._stream)


WdsPipe.__iter__ = _iterate  # type: ignore[assignment]  # rule 2: set here, torch's metaclass does not see it


def _below_stateful_dataloader() -> bool:
    """Whether a StatefulDataLoader iterates a bare pipe right now: it wraps IterDataPipes so that this shows in the stack alone."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torchdata.stateful_dataloader"):
            return True
        frame = frame.f_back
    return False


def _pipe_class(kind: type[Stage[Any]]) -> type[WdsPipe]:
    """The pipe of a stage: same name, same help."""
    signature = inspect.signature(kind)
    return type(kind.__name__, (WdsPipe,), {"__doc__": kind.__doc__, "__module__": __name__, "__signature__": signature, "_kind": kind})


def _register(pipe: type[WdsPipe]) -> None:
    """Make ``pipe`` a method of every IterDataPipe. Doing it again replaces the method; a name that somebody else took is an error."""
    name = functional_name(pipe._kind)
    taken = IterDataPipe.functions.get(name)
    owner = getattr(taken, "_wds_kind", None)
    if taken is not None and (owner is None or (owner.__module__, owner.__qualname__) != (pipe._kind.__module__, pipe._kind.__qualname__)):
        raise RuntimeError(f"the method {name}() of IterDataPipe is taken by {taken!r}: name the stage otherwise")

    def method(source: IterDataPipe[Any], *args: Any, **options: Any) -> WdsPipe:
        return pipe(source, *args, **options)

    functools.update_wrapper(method, pipe, assigned=("__doc__",), updated=())
    method.__name__ = method.__qualname__ = name
    method.__signature__ = pipe.__signature__  # type: ignore[attr-defined]
    method._wds_kind = pipe._kind  # type: ignore[attr-defined]
    IterDataPipe.register_function(name, method)


def register_stage(kind: type[Stage[Any]]) -> type[WdsPipe]:
    """Make a stage of your own a method of every pipe: the class ``MyStep`` becomes ``pipe.my_step(...)``. Gives the class of its pipes.

    Raises:
        RuntimeError: the name is taken by somebody else's pipe.
    """
    pipe = _pipe_class(kind)
    _register(pipe)
    return pipe


class ShardList(WdsPipe):  # noqa: D101 - its docstring is the stage's
    _kind = stages.ShardList
    __doc__ = stages.ShardList.__doc__
    __signature__ = inspect.signature(stages.ShardList)


for _name in stages.__all__:
    if _name != "ShardList":
        globals()[_name] = register_stage(getattr(stages, _name))


# torch's own pipes

_HOLD_NOTHING = (torch_pipes.Mapper, torch_pipes.Filter, torch_pipes.Batcher, torch_pipes.Collator)
_REPEATABLE = (*_HOLD_NOTHING, torch_pipes.IterableWrapper, torch_pipes.FileLister, torch_pipes.ShardingFilter, torch_pipes.UnBatcher, torch_pipes.Concater)
_INSTEAD = {
    torch_pipes.Shuffler: "use shuffle_buffer(size), or ShardList(urls, shuffle=True) for the shards",
    torch_pipes.UnBatcher: "put batch() last",
    torch_pipes.ShardingFilter: "leave it out: ShardList deals the shards to the workers",
}


def _children(pipe: IterDataPipe[Any]) -> list[IterDataPipe[Any]]:
    """The pipes that a pipe of torch's reads from."""
    found = []
    for value in vars(pipe).values():
        found += [part for part in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(part, IterDataPipe)]
    return found


def _base(pipe: IterDataPipe[Any]) -> WdsPipe | None:
    """The nearest pipe of ours at or below ``pipe``."""
    if isinstance(pipe, WdsPipe):
        return pipe
    return next((base for base in map(_base, _children(pipe)) if base is not None), None)


class TorchPipe(Stage[Any]):
    """What a pipe of torch's gives, as the source of a stage.

    Checkpoint: the position of the nearest pipe of ours below it or, if there is none, how many items were taken: a resume takes them again.
    """

    @dataclass(slots=True)
    class At:  # noqa: D106 - see Stage
        taken: int = 0
        delivered: int = 0
        ended: bool = False

    def __init__(self, pipe: IterDataPipe[Any]) -> None:
        self.pipe = pipe
        self.base = _base(pipe)
        super().__init__(None if self.base is None else self.base._stream.stage)
        self._host = Host()

    @property
    def host(self) -> Host:
        return self._host if self.source is None else self.source.host

    @property
    def seed(self) -> int:
        return 0 if self.source is None else self.source.seed

    @property
    def deals(self) -> bool:
        """Whether the items are dealt to the lanes here: not if a sharding_filter does."""
        return not any(isinstance(pipe, torch_pipes.ShardingFilter) for pipe in self._below(self.pipe))

    def open(self, lane: Lane, mark: Mark | None = None) -> TorchPipe:
        own, before = mark or (None, None)
        running = copy.copy(self)
        running.lane = lane
        running.at = self._at(own)
        if self.base is not None:
            self.base._stream.hosted = True
            self.base._stream.seek(Position(lane.epoch, running.at.delivered, before, running.at.ended))
        running.items = running.run()
        return running

    def run(self) -> Iterator[Any]:
        at, lane = self.at, self.lane
        if self.base is not None:
            if not at.ended:
                yield from self.pipe
            return
        for item in islice(self.pipe, lane.number + at.taken * lane.of, None, lane.of):
            at.taken += 1
            yield item

    def mark(self) -> Mark:
        if self.base is None:
            return self._own(self.at), None
        position = self.base._stream.position
        return (0, position.delivered, position.ended), position.mark

    def close(self) -> None:
        self.items.close()  # type: ignore[attr-defined]
        if self.base is not None:
            self.base._stream.close()

    def shards(self) -> tuple[int | None, str]:
        if self.source is not None:
            return self.source.shards()
        listed = [pipe.iterable for pipe in self._below(self.pipe) if isinstance(pipe, torch_pipes.IterableWrapper)]
        if len(listed) != 1 or not isinstance(listed[0], (list, tuple)) or not all(isinstance(url, str) for url in listed[0]):
            return None, ""
        return stages.ShardList(listed[0]).shards() if listed[0] else (0, "")

    def graph(self) -> list[str]:
        names = [type(pipe).__name__.removesuffix("IterDataPipe") for pipe in self._below(self.pipe)]
        return [*(self.source.graph() if self.source is not None else []), f"torch({' < '.join(names)})"]

    def check_resumable(self) -> None:
        super().check_resumable()
        for pipe in self._below(self.pipe):
            known = _HOLD_NOTHING if self.base is not None else _REPEATABLE
            name = type(pipe).__name__
            if type(pipe) not in known or (len(_children(pipe)) > 1 and self.base is not None):
                mend = _INSTEAD.get(type(pipe), "use a pipe of wds_pipes instead, or write it as a Stage and register_stage() it")
                raise StateError(f"the state of torch's {name} in this chain cannot be known exactly, so the chain has no state: {mend}.")
            if isinstance(pipe, torch_pipes.IterableWrapper) and isinstance(pipe.iterable, Iterator):
                raise StateError("IterableWrapper holds an iterator, which cannot be read again after a crash: give it a list.")

    def _below(self, pipe: IterDataPipe[Any]) -> list[IterDataPipe[Any]]:
        """The pipes of torch's from ``pipe`` down."""
        if isinstance(pipe, WdsPipe):
            return []
        return [pipe, *(below for child in _children(pipe) for below in self._below(child))]

    def position(self) -> Position:
        """Where the chain stands when torch iterates it, not a stage."""
        if self.base is None:
            raise StateError("this chain has no pipe of wds_pipes in it, so its state cannot be known")
        position = self.base._stream.position
        return position._replace(mark=self.mark())


def as_stage(pipe: IterDataPipe[Any]) -> Stage[Any]:
    """The stage of a pipe, ours or torch's."""
    return pipe._stream.stage if isinstance(pipe, WdsPipe) else TorchPipe(pipe)


def state_dict(pipe: IterDataPipe[Any]) -> State:
    """The state of a pipe, also of one of torch's behind ours: see ``WdsPipe.state_dict``.

    Raises:
        StateError: it cannot be known exactly; the message names the pipe.
    """
    return _stream(pipe).state_dict()


def load_state_dict(pipe: IterDataPipe[Any], state: State) -> None:
    """Let the next ``iter(pipe)`` continue from ``state``, also for a pipe of torch's behind ours: see ``WdsPipe.load_state_dict``.

    Raises:
        StateError: the state does not fit; the message says what differs.
    """
    stream = _stream(pipe)
    stream.load_state_dict(state)
    if isinstance(stream.stage, TorchPipe):
        position = stream.position
        stream.stage.open(Lane(stream.stage.seed, position.epoch), position.mark)
        stream.stage.base._stream.hosted = False  # type: ignore[union-attr]


def _stream(pipe: IterDataPipe[Any]) -> Stream[Any]:
    """The stream of our pipe, or one that stands where a chain that ends in a pipe of torch's does."""
    if isinstance(pipe, WdsPipe):
        return pipe._stream
    if not isinstance(pipe, IterDataPipe):
        raise TypeError(f"an IterDataPipe is needed, not {type(pipe).__name__}")
    stage = TorchPipe(pipe)
    stream = Stream(stage)
    stage.check_resumable()
    stream.at = stage.position()
    return stream


def as_dataset(pipe: IterDataPipe[Any]) -> WdsDataset:
    """A plain IterableDataset with a pipe's state, for DataLoader and StatefulDataLoader: see ``WdsDataset``."""
    from wds_pipes.dataset import WdsDataset

    return WdsDataset(as_stage(pipe))
