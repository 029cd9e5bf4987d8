"""Checks of options when a step is built, and suggestions of what was meant by an unknown method,
option or name.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from inspect import CO_VARKEYWORDS
from typing import Any, ParamSpec, TypeVar

from wds_pipes.core.words import shown


def check_count(what: str, value: object, *, least: int = 1, most: int | None = None) -> int:
    """Return ``value`` as an int if it is one from ``least`` to ``most``, also of numpy; otherwise
    raise an error that names the option.
    """
    if type(value).__name__ in ("bool", "bool_") or not hasattr(value, "__index__"):  # also numpy's
        raise TypeError(f"{what} must be an int, not {value!r}")
    try:
        value = operator.index(value)
    except TypeError as error:  # such as an array
        raise TypeError(f"{what} must be an int, not {value!r:.80}") from error
    if value < least:
        raise ValueError(f"{what} must be at least {least}, not {value}")
    if most is not None and value > most:
        raise ValueError(f"{what} must be at most {most}, not {shown(value)}")
    return value


def check_seed(seed: object) -> int:
    """Return a seed as an int, if it fits into 64 bits, with or without a sign."""
    return check_count("seed", seed, least=-(1 << 63), most=(1 << 64) - 1)


def check_seconds(what: str, seconds: object) -> float:
    """Return a time in seconds if it is a number of at least 0."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise TypeError(f"{what} must be a number of seconds, not {seconds!r:.80}")
    if not seconds >= 0:
        raise ValueError(f"{what} must be at least 0, not {seconds}")
    return seconds


def check_storage_options(options: object) -> dict[str, Any] | None:
    """Return ``options`` if they are a dict or None."""
    if options is not None and not isinstance(options, dict):
        raise TypeError(f"storage_options must be a dict, not {type(options).__name__}")
    return options


def check_choice(what: str, value: object, *choices: str) -> str:
    """Return ``value`` if it is one of ``choices``; otherwise raise an error that lists them."""
    if value not in choices:
        raise ValueError(f"{what} must be one of {', '.join(map(repr, choices))}, not {value!r}")
    return str(value)


Options = ParamSpec("Options")
Result = TypeVar("Result")

# What to use here for the methods, options and names of other libraries. The table of
# tutorials/10_moving_from_webdataset.ipynb says more.
_HERE = {
    # webdataset: methods
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
    "slice": ".take_samples(n), .slice_samples(start, stop), or PipeLoader(pipe).with_epoch(batches=...)",
    "unbatched": ".unbatch_samples()",
    "unlisted": ".unbatch_samples()",
    "with_epoch": "PipeLoader(pipe).with_epoch(samples=...)",
    "with_length": "ShardList(urls, index=...), which counts: len(pipe) is known then",
    "xdecode": '.decode_by_ext({"x": fn})',
    # webdataset and its wids: names
    "ChunkedSampler": "SampleOrder(len(dataset), shuffle=True, block_samples=64)",
    "DataPipeline": "a chain of methods: ShardList(urls).open_shards().load_tar().group_by_key()",
    "DistributedChunkedSampler": "SampleOrder(len(dataset), shuffle=True, block_samples=64)",
    "MockDataset": "make_shards() of wds_pipes.testing",
    "RandomMix": 'mix({"a": a, "b": b}, weights={"a": 3, "b": 1})',
    "ResampledShards": "ShardList(urls, resampled=True)",
    "RoundRobin": 'mix({"a": a, "b": b})',
    "ShardListDataset": "IndexedShards(urls), or as a stream ShardList('index.json')",
    "ShardListSampler": "SampleOrder(len(dataset), shuffle=True, block_samples=64)",
    "SimpleShardList": "ShardList(urls)",
    "WebDataset": "ShardList(urls).open_shards().load_tar().group_by_key()",
    "WebLoader": "PipeLoader(pipe, batch_size=64, num_workers=8)",
    "handle_extension": '.decode_by_ext({"x": fn})',
    "ignore_and_continue": 'on_error="skip" of ShardList(), or of a step',
    "imagehandler": 'the spec itself, as in .decode_by_ext("pil")',
    "non_empty": "not needed: ShardList() without any sample is an error",
    "shardspec": "ShardList(urls)",
    "split_by_node": "not needed: PipeLoader gives each rank its part",
    "split_by_worker": "not needed: PipeLoader gives each worker its part",
    "tarfile_samples": ".open_shards().load_tar().group_by_key()",
    "tarfile_to_samples": ".open_shards().load_tar().group_by_key()",
    "warn_and_continue": 'on_error="skip" of ShardList(), or of a step',
    # webdataset: options
    "bufsize": "size= of shuffle_buffer()",
    "cache_dir": "cache= of open_shards()",
    "cache_size": "max_bytes= of cache_shards()",
    "collation_fn": "collate= of batch_samples() and PipeLoader()",
    "detshuffle": "shuffle= of ShardList()",
    "empty_check": "empty_check= of ShardList()",
    "handler": "on_error= of ShardList(), or of a step",
    "initial": "not needed: shuffle_buffer() yields its first sample at once",
    "maxcount": "max_samples= of ShardWriter()",
    "maxsize": "max_bytes= of ShardWriter()",
    "nodesplitter": "not needed: PipeLoader gives each rank its part",
    "partial": "drop_last= of batch_samples() and PipeLoader(), which means the opposite",
    "post": "on_shard= of ShardWriter()",
    "rename_files": "key_split= of group_by_key(), with a function",
    "repeat": ".repeat(n), or epoch_end='loop' of PipeLoader()",
    "select_files": "fields= of group_by_key()",
    "shardshuffle": "shuffle= of ShardList()",
    "start_shard": "start= of ShardWriter()",
    "url_to_name": "not needed: cache= names its files itself",
    "verbose": "not needed: leave it out",
    "workersplitter": "not needed: PipeLoader gives each worker its part",
    # torch's DataLoader and its samplers: options
    "batch_sampler": "batch_size= of PipeLoader(): the steps of the pipe choose the samples",
    "collate_fn": "collate= of batch_samples() and PipeLoader()",
    "dataset": "the pipe as the first argument: PipeLoader(pipe)",
    "distributed": "not needed: each rank gets its part of an epoch, see rank= and world_size= of PipeLoader()",
    "generator": "seed= of ShardList(), from which all random decisions derive",
    "in_order": "not needed: batches always come in order",
    "num_replicas": "world_size= of PipeLoader(), together with rank=",
    "pin_memory_device": "pin_memory=True, which pins for the current accelerator",
    "sampler": "ShardList(shuffle=True) and .shuffle_buffer(size). Each rank gets its part of an epoch by itself",
    "seed": "seed= of ShardList(), from which all random decisions derive",
    "shuffle": "ShardList(shuffle=True) for the order of shards, .shuffle_buffer(size) for that of samples",
    "snapshot_every_n_steps": "not needed: state_dict() is that of the last batch, at any time",
    "timeout": "timeout_seconds= of PipeLoader()",
    # torchdata's pipes, up to 0.9: methods
    "add_index": ".map_samples(fn), with the sample's __key__",
    "async_map_batches": ".map_samples(fn, threads=8)",
    "bucketbatch": ".bucket_samples(length, batch_size=32, boundaries=[...], sort=True)",
    "cycle": ".repeat(n), or epoch_end='loop' of PipeLoader()",
    "drop": ".to_tuple(...), or .slice_samples(start, None) for the first samples",
    "end_caching": ".cache_shards(directory)",
    "enumerate": "enumerate(loader), or the sample's __key__",
    "extract": ".decode_by_ext(...), or .open_shards() for compressed shards",
    "flatmap": ".then(fn), with a generator function",
    "flatten": ".map_samples(fn)",
    "fullsync": "not needed: PipeLoader gives all ranks the same number of batches",
    "header": ".take_samples(n)",
    "in_memory_cache": ".cache_shards(directory)",
    "limit": ".take_samples(n)",
    "list_files_by_fsspec": "ShardList(urls), which takes globs and directories of any store",
    "list_files_by_s3": "ShardList(urls), which takes globs and directories of any store",
    "load_files_by_s3": ".open_shards()",
    "load_from_tar": ".load_tar().group_by_key()",
    "map_batches": ".batch_samples(size).map_samples(fn)",
    "max_token_bucketize": ".bucket_samples(length, budget=8192)",
    "mux_longest": 'mix({"a": a, "b": b})',
    "on_disk_cache": ".cache_shards(directory)",
    "open_files_by_fsspec": ".open_shards()",
    "pin_memory": "pin_memory=True of PipeLoader()",
    "prefetch": "prefetch_factor= of PipeLoader(), or .map_samples(fn, threads=8)",
    "random_split": "SampleList(urls, where=...).fetch_samples() for each part",
    "readlines": ".explode_records(kind)",
    "round_robin_demux": "a pipe for each part, as the workers divide the data by themselves",
    "rows2columnar": '.batch_samples(size, collate="columns")',
    "sample_multiplexer": 'mix({"a": a, "b": b}, weights={"a": 3, "b": 1})',
    "save_by_fsspec": ".write_shards(...)",
    "set_length": "ShardList(urls, index=...), which counts: len(pipe) is known then",
    "shard_expand": 'ShardList("x-{0000..0099}.tar")',
    "sharding_round_robin_dispatch": "not needed: PipeLoader gives each worker its part",
    "shuffled_flatmap": ".then(fn).shuffle_buffer(size)",
    "threadpool_map": ".map_samples(fn, threads=8)",
    "unzip": ".to_tuple(...)",
    "webdataset": ".group_by_key()",
    "zip_longest": ".then(fn), or the fields of one sample",
    "zip_with_iter": ".map_samples(fn), which may look up the other data by the sample's __key__",
    "zip_with_map": ".map_samples(fn), which may look up the other data by the sample's __key__",
}

_MOST_LISTED = 20  # known names; a longer list helps nobody


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.75) -> str | None:
    """Return the known name that is nearest to ``name``, apart from case and underscores; None if
    none is near. ``cutoff``: from 0, anything, to 1, the same.
    """
    import difflib  # needed only for an error

    plain = {each.lower().replace("_", ""): each for each in known if not each.startswith("_")}
    found = difflib.get_close_matches(name.lower().replace("_", ""), plain, n=1, cutoff=cutoff)
    return plain[found[0]] if found else None


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a method, an option or a name that something does not have.

    Args:
        what: what does not have it, as in ``"batch_samples() has no option"``.
        name: what the caller wrote.
        known: what it has.
    """
    known = sorted(known)
    mend = ""
    if name in _HERE:
        mend = f" Here it is {_HERE[name]}."
    elif (found := nearest(name, known)) is not None:
        mend = f" Did you mean {found}?"
    elif len(known) <= _MOST_LISTED:
        mend = f" It has: {', '.join(known) or 'none'}."
    return f"{what} {name!r}.{mend}"


def check_options(name: str, call: Callable[..., Any], options: Iterable[str]) -> None:
    """Raise a TypeError if a function has no option of one of these names; ``name``: what the
    caller wrote.
    """
    code = call.__code__
    takes = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    for option in options:
        if option not in takes and not code.co_flags & CO_VARKEYWORDS:
            raise TypeError(unknown(f"{name}() has no option", option, set(takes) - {"self", "source"}))


def checks_options(call: Callable[Options, Result]) -> Callable[Options, Result]:
    """Wrap a function, a method or an ``__init__`` so that an unknown option is an error that says
    which one was probably meant.
    """
    name = call.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(call)
    def checked(*args: Options.args, **options: Options.kwargs) -> Result:
        check_options(name, call, options)
        return call(*args, **options)

    return checked
