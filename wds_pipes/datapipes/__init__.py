"""The stages as torch IterDataPipes.

Rules:
1. A pipe here is a shell: options go to its stage, iterating and state to a Stream. Its class is made from the stage's, with the same name and help.
2. ``__iter__`` is not torch's hooked one: that would cost more per item than the stages do, and makes a generator that raised look exhausted.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, MethodType
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterDataPipe, get_worker_info
from torch.utils.data.datapipes import iter as torch_pipes
from torch.utils.data.datapipes.datapipe import _IterDataPipeSerializationWrapper

from wds_pipes import stages
from wds_pipes.core.stage import Stage, State, functional_name, shown_signature
from wds_pipes.core.stream import Stream
from wds_pipes.core.suggest import build, no_method
from wds_pipes.core.tracebacks import shortened
from wds_pipes.datapipes.torch_steps import HOLD_NOTHING, TorchSource, TorchStep, walk
from wds_pipes.dataset import LaneEnds, warn_of_batches
from wds_pipes.display import graph
from wds_pipes.display.text import shown
from wds_pipes.errors import StateError
from wds_pipes.loader.ranks import warn_of_ranks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from fractions import Fraction

    from typing_extensions import TypeVar

    from wds_pipes.codecs import Decoder
    from wds_pipes.dataset import WdsDataset
    from wds_pipes.io.cache.shard_cache import ShardCache
    from wds_pipes.io.urls import Urls
    from wds_pipes.nodes import WdsNode
    from wds_pipes.stages.open_shards import Shard
    from wds_pipes.tar import TarMember
    from wds_pipes.tar.keys import KeySplit

    T_co = TypeVar("T_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    T_co = TypeVar("T_co", covariant=True)


class WdsPipe(IterDataPipe[T_co]):
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
            check_not_loaded(args[0], f"{name}()")
            self._source = args[0]  # torch's graph walk looks for it
            args = (as_stage(args[0]), *args[1:])
        self._stream: Stream[Any] = Stream(build(self._kind, name, args, options))
        self._call = _call(self._kind, self._stream.stage, given, options)

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

        check_not_loaded(self, "as_node()")
        return WdsNode.of(self._stream.stage)

    # methods: begin - as tests/typing_stubs.py writes them, for editors and type checkers; at run time register_stage() makes them
    if TYPE_CHECKING:

        def batch_samples(self, size: int, *, drop_last: bool = False, collate: Callable[[list[Any]], Any] | str | None = None) -> WdsPipe[Any]:
            """Collect samples into batches."""

        def cache_shards(self, directory: str | os.PathLike[str] | None = None, *, max_bytes: int | str | None = None, verify: bool = True) -> WdsPipe[str]:
            """Let ``open_shards`` behind it keep remote shards on a local disk."""

        def decode_by_ext(
            self,
            *specs: str | Mapping[str, Decoder],
            allow_pickle: bool = False,
            max_image_pixels: int = 1 << 26,
            on_error: str = "raise",
            max_errors: int | None = None,
        ) -> WdsPipe[dict[str, Any]]:
            """Decode the fields of samples by their extensions."""

        def filter_samples(self, predicate: Callable[[T_co], Any]) -> WdsPipe[T_co]:
            """Keep the samples for which a function is true."""

        def group_by_key(
            self,
            *,
            fields: Iterable[str] | None = None,
            key_split: KeySplit = "first-dot",
            on_repeated_key: str = "raise",
            on_error: str = "raise",
            max_errors: int | None = None,
        ) -> WdsPipe[dict[str, Any]]:
            """Neighbouring members with one key to samples."""

        def interleave_shards(self, count: int) -> WdsPipe[T_co]:
            """Keep several shards open and take one item from each in turn."""

        def load_tar(
            self, *, max_member_bytes: int = 4 << 30, on_truncated: str = "raise", on_error: str = "raise", max_errors: int | None = None
        ) -> WdsPipe[TarMember]:
            """Open shards to the regular files in their tars."""

        def map_fields(self, functions: Mapping[str, Callable[[Any], Any]], *, on_error: str = "raise", max_errors: int | None = None) -> WdsPipe[Any]:
            """Apply functions to single fields of each sample."""

        def map_samples(self, fn: Callable[..., Any], *, on_error: str = "raise", max_errors: int | None = None) -> WdsPipe[Any]:
            """Apply a function to each sample."""

        def open_shards(
            self,
            *,
            storage_options: dict[str, Any] | None = None,
            readahead_bytes: int = 64 << 20,
            connections: int = 8,
            shards_ahead: int = 2,
            retries: int = 10,
            timeout_seconds: float = 120,
            cache: ShardCache | str | os.PathLike[str] | None = None,
            verify: bool = True,
            allow_pipe: bool = False,
            buffer_bytes: int = 1 << 20,
            on_error: str = "raise",
            max_errors: int | None = None,
        ) -> WdsPipe[Shard]:
            """URLs or paths to open shards."""

        def rename_fields(self, names: Mapping[str, str], *, on_error: str = "raise", max_errors: int | None = None) -> WdsPipe[dict[str, Any]]:
            """Give fields other names; the others stay as they are."""

        def select_fields(self, *fields: str, on_error: str = "raise", max_errors: int | None = None) -> WdsPipe[dict[str, Any]]:
            """Keep only some fields of each sample, in the order in which they are named."""

        def shuffle_buffer(self, size: int, *, seed: int | None = None) -> WdsPipe[T_co]:
            """Shuffle samples within a moving window."""

        def to_tuple(self, *fields: str, on_error: str = "raise", max_errors: int | None = None) -> WdsPipe[tuple[Any, ...]]:
            """Samples to tuples of chosen fields."""
    # methods: end

    # torch's own steps that hold nothing at a yield come back as pipes of ours, so that the position is that of what they have given.

    def map(self, *args: Any, **options: Any) -> WdsPipe:
        return TorchEnded(torch_pipes.Mapper(self, *args, **options))

    def filter(self, *args: Any, **options: Any) -> WdsPipe:
        return TorchEnded(torch_pipes.Filter(self, *args, **options))

    def batch(self, *args: Any, **options: Any) -> WdsPipe:
        return TorchEnded(torch_pipes.Batcher(self, *args, **options))

    def collate(self, *args: Any, **options: Any) -> WdsPipe:
        return TorchEnded(torch_pipes.Collator(self, *args, **options))

    def shuffle(self, *args: Any, **options: Any) -> IterDataPipe[Any]:
        if args:
            size = shown(args[0])
            raise TypeError(
                f"shuffle({size}) of webdataset is .shuffle_buffer({size}) here. torch's is shuffle(buffer_size={size}), and its state cannot be saved."
            )
        return torch_pipes.Shuffler(self, **options)

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
    if get_worker_info() is None and self._stream.stage.host.lanes == 1:
        warn_of_ranks("a pipe")
    if self._stream.stage.batches:
        warn_of_batches(self._stream.stage.batches)
    return iter(self._stream)


for _method, _torchs in (
    (WdsPipe.map, "Mapper"),
    (WdsPipe.filter, "Filter"),
    (WdsPipe.batch, "Batcher"),
    (WdsPipe.collate, "Collator"),
    (WdsPipe.shuffle, "Shuffler"),
):
    _method.__doc__ = getattr(torch_pipes, _torchs).__doc__

WdsPipe.__iter__ = _iterate  # type: ignore[method-assign]  # rule 2: set here, torch's metaclass does not see it


def _below_stateful_dataloader() -> bool:
    """Whether a StatefulDataLoader iterates a bare pipe right now: it puts torch's wrapper around it, which shows in the stack alone."""
    frame: FrameType | None = sys._getframe(2)
    wrapped = False
    while frame is not None:
        wrapped = wrapped or isinstance(frame.f_locals.get("self"), _IterDataPipeSerializationWrapper)
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


def _pipe_class(kind: type[Stage[Any]], base: type[WdsPipe] = WdsPipe) -> type[WdsPipe]:
    """The pipe of a stage: same name, same help."""
    members = {"__doc__": kind.__doc__, "__module__": __name__, "__signature__": shown_signature(kind), "_kind": kind}
    return type(kind.__name__, (base,), members)


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
    method.__signature__ = shown_signature(pipe._kind, returns=WdsPipe)  # type: ignore[attr-defined]
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


class TorchEnded(WdsPipe):
    """A pipe of torch's behind ours, as a pipe of ours."""

    def __init__(self, pipe: IterDataPipe[Any]) -> None:
        check_not_loaded(pipe, f"torch's {type(pipe).__name__}")
        self._source = pipe
        self._stream = Stream(as_stage(pipe))


class _MixedPipe(WdsPipe):
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


# types: begin - as tests/typing_stubs.py writes them
if TYPE_CHECKING:

    class BatchSamples(WdsPipe[Any]):
        """Collect samples into batches."""

    class CacheShards(WdsPipe[str]):
        """Let ``open_shards`` behind it keep remote shards on a local disk."""

    class DecodeByExt(WdsPipe[dict[str, Any]]):
        """Decode the fields of samples by their extensions."""

    class FilterSamples(WdsPipe[T_co]):
        """Keep the samples for which a function is true."""

    class GroupByKey(WdsPipe[dict[str, Any]]):
        """Neighbouring members with one key to samples."""

    class InterleaveShards(WdsPipe[T_co]):
        """Keep several shards open and take one item from each in turn."""

    class LoadTar(WdsPipe[TarMember]):
        """Open shards to the regular files in their tars."""

    class MapFields(WdsPipe[Any]):
        """Apply functions to single fields of each sample."""

    class MapSamples(WdsPipe[Any]):
        """Apply a function to each sample."""

    class Mix(WdsPipe[Any]):
        """Mix several pipelines to one, in exact proportions."""

        def __init__(
            self,
            sources: Mapping[str, IterDataPipe[Any]],
            weights: Mapping[str, float | Fraction] | Sequence[float | Fraction] | None = None,
            *,
            exhausted: str = "stop",
            seed: int = 0,
            without: Iterable[str] = (),
        ) -> None: ...

    class OpenShards(WdsPipe[Shard]):
        """URLs or paths to open shards."""

    class RenameFields(WdsPipe[dict[str, Any]]):
        """Give fields other names; the others stay as they are."""

    class SelectFields(WdsPipe[dict[str, Any]]):
        """Keep only some fields of each sample, in the order in which they are named."""

    class ShardList(WdsPipe[str]):
        """The source of a pipeline: the URLs of its shards, as str."""

        def __init__(
            self,
            urls: Urls,
            *,
            shuffle: bool = False,
            seed: int = 0,
            resampled: bool = False,
            samples_per_shard: int | Sequence[int] | None = None,
            index: Urls | bool | None = None,
            storage_options: dict[str, Any] | None = None,
            moved: bool = False,
        ) -> None: ...

    class ShuffleBuffer(WdsPipe[T_co]):
        """Shuffle samples within a moving window."""

    class ToTuple(WdsPipe[tuple[Any, ...]]):
        """Samples to tuples of chosen fields."""
# types: end

if not TYPE_CHECKING:
    ShardList = _pipe_class(stages.ShardList)
    Mix = _pipe_class(stages.Mix, _MixedPipe)
    for _name in stages.__all__:
        if _name not in ("ShardList", "Mix"):
            globals()[_name] = register_stage(getattr(stages, _name))

mix = Mix


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


def check_not_loaded(pipe: IterDataPipe[Any], what: str) -> None:
    """StateError where a state waits in ``pipe`` for an ``iter()`` that will not come: what is built upon a pipe has a position of its own."""
    ours = find_ours(pipe)
    if ours is not None and ours._stream._resume:
        raise StateError(f"a state was loaded into this pipe, which {what} would not continue: load it into what you iterate, after that is built.")


def state_dict(pipe: IterDataPipe[Any]) -> State:
    """The state of a pipe, also of one of torch's behind ours: see ``WdsPipe.state_dict``.

    Raises:
        StateError: it cannot be known exactly; the message names the pipe.
    """
    return _ours(pipe).state_dict()


def load_state_dict(pipe: IterDataPipe[Any], state: State, *, moved: bool = False) -> None:
    """Let the next ``iter(pipe)`` continue from ``state``, also for a pipe of torch's behind ours: see ``WdsPipe.load_state_dict``, also for ``moved``.

    Raises:
        StateError: the state does not fit; the message says what differs.
    """
    _ours(pipe).load_state_dict(state, moved=moved)


def _ours(pipe: IterDataPipe[Any]) -> WdsPipe:
    """``pipe`` if it is one of ours, else an error that says why its state cannot be known."""
    if isinstance(pipe, WdsPipe):
        return pipe
    if not isinstance(pipe, IterDataPipe):
        raise TypeError(f"an IterDataPipe is needed, not {type(pipe).__name__}")
    if find_ours(pipe) is None:
        raise StateError("this chain has no pipe of wds_pipes in it, so its state cannot be known")
    as_stage(pipe).check_resumable()
    name = type(pipe).__name__.removesuffix("IterDataPipe")
    mend = "use the method, pipe.map(), .filter(), .batch() or .collate()"
    raise StateError(f"torch's {name} was built from its class around a pipe, so nobody sees what it gave: {mend}.")


def as_dataset(pipe: IterDataPipe[Any]) -> WdsDataset:
    """A plain IterableDataset with a pipe's state, for DataLoader and StatefulDataLoader: see ``WdsDataset``."""
    from wds_pipes.dataset import WdsDataset

    check_not_loaded(pipe, "as_dataset()")
    return WdsDataset(as_stage(pipe))
