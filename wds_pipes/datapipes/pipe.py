"""A stage as a pipe.

Rules:
1. A pipe only forwards: options to its stage, iteration and state to a Stream. Its class is made
   from the class of the stage, with the same name and help.
2. torch's metaclass must not hook ``__iter__``: the hook would cost more per item than the stages
   do, and would make a generator that raised an error look exhausted.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import itertools
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from wds_pipes.core.hosts import add_pipes, build, reads_several, remade, stage_of, stages_of
from wds_pipes.core.lane import Context
from wds_pipes.core.options import checks_options, unknown
from wds_pipes.core.stage import Source, Stage, State, find_stage, functional_name, is_built_in
from wds_pipes.core.stream import Stream
from wds_pipes.datapipes.base import IterDataPipe, torch_kinds
from wds_pipes.datapipes.torch_steps import HOLD_NOTHING, TorchSource, torch_step, walk
from wds_pipes.dataset import WdsDataset, WorkerCopies, as_dataset, warn_of_copies, worker_copies
from wds_pipes.display import graph
from wds_pipes.display.text import shown
from wds_pipes.errors import StateError
from wds_pipes.loader.lengths import Countable, length
from wds_pipes.loader.parent import worker_info
from wds_pipes.loader.ranks import warn_of_ranks
from wds_pipes.stages.edits import Edits, load
from wds_pipes.stages.shard_source import ShardSource

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

_COPIERS = (copyreg.__newobj__, copyreg._reconstructor)  # type: ignore[attr-defined]
_signature = functools.lru_cache(maxsize=256)(inspect.signature)  # a third of the time to build a pipe, otherwise
_MODULE = "wds_pipes.datapipes"  # the module of all classes of pipes


class WdsPipe(Countable, Base[T_co]):
    """The base of all pipes of this package: an IterDataPipe with a state.

    ``repr(pipe)`` is the chain as it was written; a notebook shows the chain as a list.

    Each ``iter(pipe)`` is the next epoch; after a state was loaded, the next ``iter(pipe)``
    continues the epoch of the state. A pipe has one iterator at a time: a new iterator ends the one
    before. Pipes that read from one ``ShardList`` object count their epochs together.
    """

    _is_child_datapipe = False  # torch reads it for each item; set here, it does not go through __getattr__
    _kind: type[Stage[Any]]
    _call: graph.Call | None = None  # how it was built

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[T_co]: ...  # rule 2: see below

    def __init__(self, *args: Any, **options: Any) -> None:
        given = args  # with pipes; args gets stages instead
        name = _written(self._kind)
        if not issubclass(self._kind, Source):
            if not args or not isinstance(args[0], IterDataPipe):
                raise TypeError(f"{name}() needs a pipe as its source, not {args[0] if args else None!r}")
            self._source = args[0]  # torch's walk over the graph looks for it
            args = (_stage_for(args[0], f"{name}()"), *args[1:])
        self._stream: Stream[Any] = Stream(build(self._kind, name, args, options))
        self._call = _call(self._kind, self._stream.stage, given, options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        # Pickle the class by its stage, so that unpickling imports the module of a user's stage.
        # What torch's walk over a graph expects is unchanged.
        plain = "_kind" in type(self).__dict__ and made[0] in _COPIERS  # not a subclass of the user's
        return (remade, (self._kind, type(self).__base__, _MODULE), *made[2:]) if plain else made

    def __getitem__(self, index: object) -> NoReturn:
        raise TypeError(
            f"a pipe yields its items in order, and has no item [{index!r:.20}]: take items with next(iter(pipe)), or "
            "with itertools.islice(pipe, n); for samples by their numbers, IndexedShards(urls)[0]"
        )

    def state_dict(self) -> State:
        """Return the position after the last returned item, as a small dict, new at each call.

        It holds plain JSON types only.

        Raises:
            StateError: the state of one of torch's pipes in this chain cannot be known; the message
                names the pipe, and what to use instead.
        """
        return self._stream.state_dict()

    @checks_options
    def load_state_dict(
        self,
        state: State,
        *,
        moved: bool = False,
        exclude: str | os.PathLike[str] | Iterable[str] | None = None,
        added: str | None = None,
        mix: str | None = None,
    ) -> None:
        """Make the next ``iter()`` continue from ``state``: the same samples in the same order,
        none lost, none twice.

        The shards may have moved since, to another disk or another store. They count as the same
        shards if all have the same MD5s in the index as before. If there is no index now, or there
        was none, they count as the same if they have the same names below their common directory. A
        line in the log then says that the state continues elsewhere. If the common directory is
        named like a split (``train``, ``val``), it must keep its name.

        Args:
            state: what ``state_dict`` returned.
            moved: these are the shards of the state, in the same order, whatever their names and
                the index say: for shards that were renamed or packed again. Everything else is
                checked.
            exclude: the keys of samples to leave out from here on, as in
                ``PipeLoader.load_state_dict``; here it is always a filter.
            added: ``"append"``: the list of shards has grown, as there.
            mix: ``"changed"``: sources or weights of a mix have changed, as there.

        Raises:
            StateError: the state does not fit this pipeline; the message says what differs.
        """
        load(self._stream, state, Edits(moved, exclude, added, mix))

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` start ``epoch`` from its beginning. An iterator in use ends.

        After a state of the same epoch was loaded, ``iter()`` still continues from that state.
        """
        self._stream.set_epoch(epoch)

    def __len__(self) -> int:
        """Return how many items an epoch has.

        The items are samples or batches, if ``ShardList(index=...)`` or ``samples_per_shard=``
        counts them, or URLs or shards.

        Raises:
            TypeError: the number is not known, or depends on the ranks; the message says what to
                do.
        """
        return length(self._stream.stage, ranks_are_divided=True)

    def __bool__(self) -> bool:
        return True  # also if len() is not known

    def reset(self, *state: Any) -> None:
        """Called by torch before each iteration.

        A state, which torchdata's Loader passes, is refused.
        """
        if state:
            raise TypeError("a Loader of torchdata takes nodes, and this is a pipe: pass pipe.as_node()")
        super().reset()  # type: ignore[misc]  # the stub of IterDataPipe lacks it

    def as_dataset(self) -> WdsDataset:
        """Return a plain IterableDataset with this pipe's state, for DataLoader and
        StatefulDataLoader.
        """
        return as_dataset(self)

    def as_node(self) -> WdsNode:
        """Return this pipe as a node of torchdata.nodes."""
        from wds_pipes.nodes import WdsNode

        return WdsNode.of(_stage_for(self, "as_node()"))

    # torch's own steps that hold no item when they yield are returned as pipes of ours. So the
    # position is the one after the last item that they yielded.

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
                f"shuffle({size}) of webdataset is .shuffle_buffer({size}) here. torch's is "
                f"shuffle(buffer_size={size}), and its state cannot be saved."
            )
        return _torchs("Shuffler", "shuffle_buffer()")(self, **options)

    def __getattr__(self, name: str) -> Any:
        if name not in IterDataPipe.functions and not name.startswith("_"):
            lacks = f"{type(self).__name__!r} object has no attribute"
            said = unknown(lacks, name, dir(self))
            if (kind := find_stage(name)) is not None and not is_built_in(kind):
                registered = f"register_stage({kind.__name__})"
                said = (
                    f"{lacks} {name!r}, which is a source: call the class that {registered} returns"
                    if issubclass(kind, Source)
                    else f"{lacks} {name!r} yet: call {registered}"
                )
            raise AttributeError(said, name=name)
        return super().__getattr__(name)

    # Hooks that torch's DataLoader calls. Only the first pipe of a chain has them, since a chain is
    # partitioned once.

    def _is_first(self) -> bool:
        source = self.__dict__.get("_source")
        return (source is None or find_ours(source) is None) and self._stream.chain.root.divides_items

    @property
    def apply_sharding(self) -> Callable[..., None]:
        """A function that sets which lane to yield; called in each worker, or in this process
        without workers.
        """
        if not self._is_first():
            raise AttributeError("apply_sharding")
        return self._deal

    @property
    def set_seed(self) -> Callable[[int], None]:
        """A function that counts epochs; called at each iteration, in the main process first.

        New workers are copies, which cannot count epochs themselves. The seed itself is ignored.
        """
        if not self._is_first():
            raise AttributeError("set_seed")
        return self._count_epoch

    def _count_epoch(self, seed: int) -> None:
        _count_epoch(self, self._stream.chain.root.context)

    def _deal(self, num_of_instances: int, instance_id: int, sharding_group: Any = None) -> None:
        context = self._stream.chain.root.context
        context.lane, context.lanes = instance_id, num_of_instances
        if isinstance(context.copies, WorkerCopies):
            context.copies.starts = None  # no workers are started, or this is one

    def _repr_html_(self) -> str:
        return graph.to_html(self)

    def __repr__(self) -> str:
        return graph.to_text(self)

    __str__ = __repr__


def _iterate(self: WdsPipe) -> Iterator[Any]:
    """Begin the next epoch, or continue from a loaded state, at the first ``next()``."""
    _refuse_stateful_dataloader()
    stage, context = self._stream.stage, self._stream.chain.root.context
    _refuse_loaded(itertools.islice(walk(self), 1, None), "a pipe that reads from it")
    if context.lanes == 1:
        if worker_info() is None:
            warn_of_ranks("a pipe")
        else:
            warn_of_copies(stage)
    return iter(self._stream)


def _torchs(name: str, instead: str) -> Callable[..., IterDataPipe[Any]]:
    """Return a class of torch's pipes; NotImplementedError if torch has no pipes."""
    for kind in torch_kinds(name):
        return kind
    raise NotImplementedError(f"this step was torch's, and this torch has no DataPipes any more: use {instead}")


_TORCHS = {
    WdsPipe.map: "Mapper",
    WdsPipe.filter: "Filter",
    WdsPipe.batch: "Batcher",
    WdsPipe.collate: "Collator",
    WdsPipe.shuffle: "Shuffler",
}
for _method, _name in _TORCHS.items():
    for _kind in torch_kinds(_name):
        _method.__doc__ = _kind.__doc__

WdsPipe.__iter__ = _iterate  # type: ignore[method-assign]  # rule 2: torch's metaclass does not hook what is set here


def _reads_pipes(kind: type[Stage[Any]]) -> bool:
    """Whether a stage's pipe reads from other pipes, which are its first argument."""
    return not issubclass(kind, Source) or reads_several(kind)


def _written(kind: type[Stage[Any]]) -> str:
    """Return the name that a caller writes to build a stage's pipe."""
    return functional_name(kind) if _reads_pipes(kind) else kind.__name__


def _call(kind: type[Stage[Any]], stage: Stage[Any], args: tuple[Any, ...], options: dict[str, Any]) -> graph.Call:
    """Return how a pipe was built, to show it: without its source, and for ShardList with the
    number of shards.
    """
    signature = _signature(kind)  # type: ignore[arg-type]  # mypy takes the __hash__ of instances
    values, said = signature.bind(*args, **options).arguments, ""
    if isinstance(stage, ShardSource):
        values, said = stage.shown_options(values)
    if _reads_pipes(kind):
        del values[next(iter(signature.parameters))]
    call = graph.Call.of(_written(kind), signature, values)
    return call._replace(arguments=(f"{call.arguments[0]} {said}", *call.arguments[1:])) if said else call


class TorchEnded(WdsPipe):
    """A pipe of torch's after ours, as a pipe of ours."""

    def __init__(self, pipe: IterDataPipe[Any]) -> None:
        self._source = pipe
        self._stream = Stream(_stage_for(pipe, f"torch's {type(pipe).__name__}"))


class MixedPipe(WdsPipe):
    """A pipe over several, by name."""

    def __init__(self, sources: Mapping[str, IterDataPipe[Any]], *args: Any, **options: Any) -> None:
        # torch's walk over the graph looks for them
        self._sources = list(sources.values()) if isinstance(sources, Mapping) else []
        name = _written(self._kind)
        self._stream = Stream(build(self._kind, name, (stages_of(sources, name, stage_of), *args), options))
        self._call = _call(self._kind, self._stream.stage, (sources, *args), options)


def as_stage(pipe: IterDataPipe[Any]) -> Stage[Any]:
    """Return the stage of a pipe, ours or torch's."""
    if isinstance(pipe, WdsPipe):
        return pipe._stream.stage
    if type(pipe) in HOLD_NOTHING and find_ours(pipe) is not None:
        return torch_step(as_stage(pipe.datapipe), pipe)
    return TorchSource(pipe, find_ours(pipe) is not None)


def find_ours(pipe: IterDataPipe[Any]) -> WdsPipe | None:
    """Return the nearest pipe of ours: ``pipe`` itself or one upstream of it."""
    return next((below for below in walk(pipe) if isinstance(below, WdsPipe)), None)


def _stage_for(pipe: IterDataPipe[Any], what: str) -> Stage[Any]:
    """Return the stage of a pipe. ``what``, which is built on it, has its own position.

    Raises:
        StateError: a state was loaded into the pipe, for an ``iter(pipe)`` that will not be called.
    """
    _refuse_loaded(walk(pipe), what)
    return as_stage(pipe)


def _refuse_loaded(pipes: Iterable[IterDataPipe[Any]], what: str) -> None:
    if any(isinstance(pipe, WdsPipe) and pipe._stream.will_resume for pipe in pipes):
        raise StateError(
            f"a state was loaded into this pipe, which {what} would not continue: load it into "
            "what you iterate, after that is built."
        )


# What DataLoader, StatefulDataLoader and those of Accelerate do with a pipe


def _count_epoch(pipe: IterDataPipe[Any], context: Context) -> None:
    """Note that an iterator of DataLoader is made or reset; its seed hook calls this.

    The epochs are counted in the main process, since new workers are copies, which cannot count
    themselves.

    Raises:
        TypeError: Accelerate would lose samples.
    """
    copies = worker_copies(context)
    copies.by = copies.by or os.getpid()
    warn_of_ranks("a pipe in DataLoader", divided=True)
    if copies.by != os.getpid():
        return
    _refuse_accelerate(pipe)
    # A new iterator with workers calls this twice: when it is made and when it has started them.
    starts, copies.starts = copies.starts, None
    if starts is not None and starts < copies.started:
        return
    copies.starts = copies.started
    if copies.epoch == context.epoch:  # workers already had this epoch
        context.epoch += 1
        copies.times += 1
    copies.epoch = context.epoch


def _refuse_accelerate(pipe: IterDataPipe[Any]) -> None:
    """Raise an error, or warn, if a loader of Hugging Face Accelerate iterates over a pipe.

    Raises:
        TypeError: it reads on rank 0 for all ranks (``dispatch_batches``), and torch gives a pipe
            on rank 0 only the samples of rank 0.
    """
    module = sys.modules.get("accelerate.data_loader")
    loader = None if module is None else module.GradientState().active_dataloader
    if module is None or loader is None or all(part is not pipe for part in walk(loader.dataset)):
        return
    instead = "do not prepare() the data, and use wds_pipes.PipeLoader, for the Trainer with huggingface.PipeTrainer"
    if isinstance(loader, module.DataLoaderDispatcher) and loader.state.num_processes > 1:
        raise TypeError(
            "Accelerate reads on rank 0 for all ranks here (dispatch_batches), and torch's DataLoader divides a pipe "
            f"over the ranks, so most samples would never be read: {instead}."
        )
    warnings.warn(
        "Accelerate and the Trainer of transformers do not see set_epoch() of a pipe, so a resume repeats the "
        f"first epoch: {instead}.",
        stacklevel=2,
    )


def _refuse_stateful_dataloader() -> None:
    """Raise an error in a worker of a StatefulDataLoader that iterates over a bare pipe.

    Raises:
        StateError: as above.
    """
    worker = worker_info()
    loop = getattr(multiprocessing.current_process(), "_target", None)
    if (
        worker is not None
        and isinstance(worker.dataset, IterDataPipe)
        and getattr(loop, "__module__", "").startswith("torchdata.stateful_dataloader")
    ):
        raise StateError(
            "StatefulDataLoader does not see the state of an IterDataPipe: it would replay from the start and say "
            "nothing. Give it pipe.as_dataset(), or wds_pipes.as_dataset(pipe) for a chain that ends in a pipe of "
            "torch's."
        )


add_pipes(IterDataPipe, _stage_for)
