"""Suggest what was meant by an unknown name: the nearest known name, or the equivalent of a name of
webdataset.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

if TYPE_CHECKING:
    import inspect

Options = ParamSpec("Options")
Built = TypeVar("Built")
Result = TypeVar("Result")

# The equivalents of webdataset's methods: see tutorials/10_moving_from_webdataset.
_METHODS = {
    "append": "a method for each step, or .then(fn) for a generator function",
    "batched": ".batch_samples(size)",
    "compose": ".then(fn)",
    "decode": '.decode_by_ext("rgb8")',
    "extract_keys": '.to_tuple("jpg;png", "cls")',
    "listed": '.batch_samples(size, collate="list")',
    "map_dict": '.map_fields({"jpg": fn})',
    "map_tuple": ".map_fields({0: f, 1: g})",
    "rename": '.rename_fields({"image": "jpg;png"})',
    "rename_keys": '.rename_fields({"image": "jpg;png"})',
    "resampled": "ShardList(urls, resampled=True)",
    "rsample": ".filter_samples(lambda sample, rng: rng.random() < p)",
    "select": ".filter_samples(fn)",
    "shuffle": ".shuffle_buffer(size)",
    "slice": ".take_samples(n), .slice_samples(start, stop), or PipeLoader(pipe).with_epoch(batches=...)",
    "unbatched": ".unbatch_samples()",
    "unlisted": ".unbatch_samples()",
    "with_epoch": "PipeLoader(pipe).with_epoch(samples=...)",
    "with_length": "ShardList(urls, index=...), which counts: len(pipe) is known then",
    "xdecode": '.decode_by_ext({"x": fn})',
}

# The same for the names that webdataset and its wids export.
_NAMES = {
    "ChunkedSampler": "SampleOrder(len(dataset), shuffle=True, block_samples=64)",
    "DataPipeline": "a chain of methods: ShardList(urls).open_shards().load_tar().group_by_key()",
    "DistributedChunkedSampler": "SampleOrder(len(dataset), shuffle=True, block_samples=64)",
    "RandomMix": 'mix({"a": a, "b": b}, weights={"a": 3, "b": 1})',
    "ResampledShards": "ShardList(urls, resampled=True)",
    "RoundRobin": 'mix({"a": a, "b": b})',
    "ShardListDataset": "IndexedShards(urls), or as a stream ShardList('index.json')",
    "ShardListSampler": "SampleOrder(len(dataset), shuffle=True, block_samples=64)",
    "SimpleShardList": "ShardList(urls)",
    "WebDataset": "ShardList(urls).open_shards().load_tar().group_by_key()",
    "WebLoader": "PipeLoader(pipe, batch_size=64, num_workers=8)",
    "handle_extension": '.decode_by_ext({"x": fn})',
    "ignore_and_continue": 'on_error="skip" of each step',
    "imagehandler": 'the spec itself, as in .decode_by_ext("pil")',
    "split_by_node": "nothing: PipeLoader gives each rank its part",
    "split_by_worker": "nothing: PipeLoader gives each worker its part",
    "tarfile_to_samples": ".open_shards().load_tar().group_by_key()",
    "warn_and_continue": 'on_error="skip" of each step',
}

# And for arguments: the option of a step ("NAME= of STEPS"), or what to do instead.
_ARGUMENTS = {
    "bufsize": "size= of shuffle_buffer()",
    "cache_dir": "cache= of open_shards()",
    "cache_size": "max_bytes= of cache_shards()",
    "collate_fn": "collate= of batch_samples() and PipeLoader()",
    "collation_fn": "collate= of batch_samples() and PipeLoader()",
    "detshuffle": "shuffle= of ShardList()",
    "empty_check": "empty_check= of ShardList()",
    "handler": "on_error= of the steps after ShardList()",
    "initial": "nothing: shuffle_buffer() yields its first sample at once",
    "maxcount": "max_samples= of ShardWriter()",
    "maxsize": "max_bytes= of ShardWriter()",
    "nodesplitter": "nothing: PipeLoader gives each rank its part",
    "partial": "drop_last= of batch_samples() and PipeLoader()",
    "post": "on_shard= of ShardWriter()",
    "rename_files": "key_split= of group_by_key(), with a function",
    "repeat": ".repeat(n), or epoch_end='loop' of PipeLoader()",
    "select_files": "fields= of group_by_key()",
    "shardshuffle": "shuffle= of ShardList()",
    "start_shard": "start= of ShardWriter()",
    "url_to_name": "nothing: cache= names its files itself",
    "verbose": "nothing: leave it out",
    "workersplitter": "nothing: PipeLoader gives each worker its part",
}


# And for options of torch's DataLoader, and of its samplers, that PipeLoader does not have.
_OF_DATALOADER = {
    "batch_sampler": "the steps of the pipe choose the samples, and batch_size= is their number in a batch",
    "dataset": "the pipe is the first argument: PipeLoader(pipe)",
    "distributed": "each rank gets its part of an epoch by itself: see rank= and world_size=",
    "generator": "all random decisions derive from ShardList(seed=...)",
    "in_order": "batches always come in order",
    "num_replicas": "that is world_size=, together with rank=",
    "pin_memory_device": "pin_memory=True pins for the current accelerator",
    "sampler": "the order is that of the pipe: ShardList(shuffle=True), .shuffle_buffer(size). Each rank gets its "
    "part of an epoch by itself: leave DistributedSampler out",
    "seed": "all random decisions derive from ShardList(seed=...)",
    "shuffle": "the order is that of the pipe: ShardList(shuffle=True), .shuffle_buffer(size)",
    "snapshot_every_n_steps": "state_dict() is that of the last batch, at any time",
    "timeout": "that is timeout_seconds=",
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is nearest to ``name``, apart from case and underscores; None if
    none is near.
    """
    import difflib

    plain = {each.lower().replace("_", ""): each for each in known if not each.startswith("_")}
    found = difflib.get_close_matches(name.lower().replace("_", ""), plain, n=1, cutoff=0.75)
    return plain[found[0]] if found else None


def no_method(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a method that pipes do not have; ``known``: the methods that they
    have.
    """
    mend = ""
    if name in _METHODS:
        mend = f": {name}() of webdataset is {_METHODS[name]} here"
    elif (found := nearest(name, known)) is not None:
        mend = f". Did you mean {found}()?"
    return f"{kind!r} object has no attribute {name!r}{mend}"


def no_name(module: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a name that the package, or its module of nodes, does not have;
    ``known``: the names that it has.
    """
    if name.startswith("_"):
        return f"module {module!r} has no attribute {name!r}"
    from wds_pipes import stages
    from wds_pipes.core.stage import functional_name

    steps, known = {each: functional_name(getattr(stages, each)) for each in stages.__all__}, list(known)
    mend = ""
    if name in _NAMES:
        mend = f": {name} of webdataset is {_NAMES[name]} here"
    elif (found := nearest(name, [*steps, *known])) is not None:
        mend = (
            f". Did you mean {found}?"
            if found in known
            else (f": {steps[found]}() is a method of pipes, as in ShardList(urls).open_shards().load_tar()")
        )
    return f"module {module!r} has no attribute {name!r}{mend}"


@functools.lru_cache(maxsize=256)  # a third of the time to build a pipe, otherwise
def signature_of(kind: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a class or a function."""
    import inspect

    return inspect.signature(kind)


def build(kind: Callable[..., Built], name: str, args: tuple[Any, ...], options: Mapping[str, Any]) -> Built:
    """Return ``kind(*args, **options)``; ``name``: what the caller wrote.

    Raises:
        TypeError: an option is unknown (the message says which one was probably meant), an argument
            is missing or too many, or a stage written by the user sets an attribute that has a
            meaning in ``Stage``, or is unfinished.
    """
    from wds_pipes.core.stage import Stage

    parameters = signature_of(kind).parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        _check(
            name,
            options,
            [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_POSITIONAL],
        )
    try:
        built = kind(*args, **options)
    except TypeError as error:
        _explain(error, name, kind, args, options)
        raise
    except AttributeError as error:
        if (taken := _NO_SETTER.match(str(error))) is None:
            raise
        raise TypeError(_TAKEN.format(name, taken[1])) from error
    for attribute in getattr(built, "__dict__", ()):
        if callable(getattr(type(built), attribute, None)):
            raise TypeError(_TAKEN.format(name, attribute))
    if isinstance(built, Stage) and (unfinished := built.unfinished()) is not None:
        raise TypeError(unfinished)
    return built


_NO_SETTER = re.compile("property '(\\w+)' of .* object has no setter")
_TAKEN = "{0}() sets self.{1}, which means something else in a Stage: give that attribute another name"


def checks_options(call: Callable[Options, Result]) -> Callable[Options, Result]:
    """Wrap a function, a method or an ``__init__`` so that a wrong call says what is right: for an
    unknown option, the one that was probably meant.
    """
    code, owner = call.__code__, call.__qualname__.removesuffix(".__init__")
    name = owner.rpartition(".")[2]
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]

    @functools.wraps(call)
    def checked(*args: Options.args, **options: Options.kwargs) -> Result:
        _check(name, options, known)
        try:
            return call(*args, **options)
        except TypeError as error:
            _explain(error, name, call, args, options)
            raise

    return checked


def _explain(
    error: TypeError, name: str, call: Callable[..., Any], args: tuple[Any, ...], options: Mapping[str, Any]
) -> None:
    """Raise an error that shows how to call, if ``error`` is Python's for a wrong call."""
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:
        return
    signature = signature_of(call)
    try:
        signature.bind(*args, **options)
    except TypeError as wrong:
        shown = [
            parameter.replace(annotation=parameter.empty)
            for parameter in signature.parameters.values()
            if parameter.name not in ("self", "source")
        ]
        plain = signature.replace(parameters=shown, return_annotation=signature.empty)
        raise TypeError(f"{name}(): {wrong}. It is {name}{plain}.") from None


def _check(name: str, options: Iterable[str], known: Iterable[str]) -> None:
    for option in options:
        if option not in known:
            known = [each for each in known if each not in ("self", "source")]
            if name == "PipeLoader" and option in _OF_DATALOADER:
                raise TypeError(f"PipeLoader() has no option {option!r}: {_OF_DATALOADER[option]}.")
            here = _ARGUMENTS.get(option, "")
            meant: str | None = here.partition("= of ")[0]
            if meant not in known:
                if here:
                    raise TypeError(f"{name}() has no option {option!r}: {option}= of webdataset is here {here}.")
                meant = nearest(option, known)
            mend = (
                f"Did you mean {meant}=?{' It means the opposite.' if option == 'partial' else ''}"
                if meant is not None
                else f"It has: {', '.join(known)}."
                if known
                else "It has none."
            )
            raise TypeError(f"{name}() has no option {option!r}. {mend}")
