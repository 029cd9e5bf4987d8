"""The commands about training: demo, doctor, cache, state."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from typing import TYPE_CHECKING, Any

import click

from wds_pipes import tools
from wds_pipes.cli.options import (
    FOUND,
    as_json,
    as_json_lines,
    echo,
    example,
    key_split,
    progress,
    report,
    storage_options,
)
from wds_pipes.core.words import bytes_shown, plural

if TYPE_CHECKING:
    from wds_pipes.io.cache.files import CacheDirectory


@click.command(epilog=example("wds-pipes demo\nwds-pipes demo --data 'train-{000..011}.tar' --steps 100"))
@click.option(
    "--data",
    "urls",
    metavar="URL",
    multiple=True,
    help="Train on these shards instead: a path or URL, with {000..011} or * in quotes; repeatable.",
)
@click.option(
    "-o",
    "--output",
    "--out",
    "out",
    type=click.Path(file_okay=False, writable=True),
    default="wds-pipes-demo",
    show_default=True,
    help="The directory to write to.",
)
@click.option("--samples", type=click.IntRange(min=1), help="How many images to make.  [default: 3072]")
@click.option("--batch-size", type=click.IntRange(min=1), default=64, show_default=True, help="Images in a batch.")
@click.option(
    "--workers", type=click.IntRange(min=0), default=2, show_default=True, help="Processes that read and decode."
)
@click.option("--epochs", type=click.IntRange(min=1), default=3, show_default=True, help="How many epochs to train.")
@click.option("--steps", type=click.IntRange(min=1), help="Stop after this many.  [default: all; 200 with --data]")
@click.option(
    "--checkpoint-every",
    type=click.IntRange(min=2),
    default=10,
    show_default=True,
    help="Steps from one checkpoint to the next.",
)
@progress
def demo(**options: Any) -> None:
    """Kill a training in mid-epoch, resume it, and compare.

    A small CNN is trained twice on generated images: once without interruption, and once killed
    with SIGKILL and resumed from its last checkpoint. The command prints EXACT if all sample keys
    and losses are equal; otherwise it prints the first difference, and exits with 1.
    """
    from wds_pipes.tools.demo.trial import demo

    if demo(say=echo, **options) is not None:
        raise SystemExit(FOUND)


@click.command(
    epilog=example("wds-pipes doctor train:make_loader\nwds-pipes doctor 's3://bucket/train-{000..011}.tar'")
)
@click.argument("what", nargs=-1, metavar="[URLS | MODULE:FUNCTION]")
@click.option(
    "--seconds", type=click.FloatRange(min=0.1), default=20.0, show_default=True, help="How long to measure, about."
)
@click.option("--max-samples", type=click.IntRange(min=1), help="Read at most about this many samples in a run.")
@click.option("--cores", type=click.IntRange(min=1), help="Processor cores for the workers.  [default: all]")
@click.option("--needs", type=float, metavar="RATE", help="How many samples a second the training takes on this rank.")
@click.option(
    "--stats", type=click.File(), help="What stats_of_ranks() of the loader returned in the training, as JSON."
)
@as_json
@storage_options
def doctor(*, what: tuple[str, ...], stats: Any, as_json: bool, **options: Any) -> None:
    """Run a pipeline, and report what limits it and what to change.

    MODULE:FUNCTION names a function without arguments that returns the PipeLoader of the training;
    the module may be a file in the current directory. URLS are shards, with {000..011} or * in
    quotes, which are read without decoding; of those in a store, the time to the first byte and the
    rate over more and more connections are measured too. The pipeline runs as it is, with its
    workers, and once more in this process with a clock after each step. If more workers are the
    change, it runs again with them. Processor time and waiting are measured apart, so another load
    on the machine changes little.

    The limit is the rate or the latency of the storage, decompression, reading, decoding, a
    function of yours, collation, the transport of batches between processes, too few workers, fewer
    shards than lanes, or the training loop; with --stats, also one rank that is slower than others.
    """
    named: Any = what[0] if len(what) == 1 else list(what) or None
    if stats is not None:
        try:
            options["stats"] = json.load(stats)
        except ValueError as error:
            raise click.UsageError(f"--stats is no JSON, as json.dumps(loader.stats_of_ranks()) is: {error}") from error
    found = tools.doctor(named, **options)
    report(dataclasses.asdict(found), found.sentences, as_json=as_json)


_directory = click.option(
    "--directory", type=click.Path(file_okay=False), help="The cache; without it, WDS_PIPES_CACHE_DIR."
)


@click.group(epilog=example("wds-pipes cache ls\nwds-pipes cache prune --size 200GB"))
def cache() -> None:
    """See and clean up the local cache of remote shards."""


@cache.command("ls")
@_directory
@as_json
def list_shards(*, directory: str | None, as_json: bool) -> None:
    """List the shards, those used least recently first."""
    files = _open(directory)
    entries = files.entries()
    shards = [
        {"shard": one.url, "path": one.path, "bytes": one.bytes, "used": one.used, "state": one.state}
        for one in entries
    ]
    lines = [f"{'SIZE':>10}  {'LAST USED':<19}  {'STATE':<11}  SHARD"] if entries else []
    for one in entries:
        used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.used))
        lines.append(f"{bytes_shown(one.bytes):>10}  {used}  {one.state:<11}  {one.url or one.path}")
    lines.append(f"{files.path}: {plural(len(entries), 'shard')}, {bytes_shown(sum(one.bytes for one in entries))}")
    report({"directory": files.path, "shards": shards}, lines, as_json=as_json)


@cache.command(epilog=example("wds-pipes cache prune --size 200GB"))
@_directory
@click.option("--size", help="How much to keep, such as 200GB; without it, WDS_PIPES_CACHE_SIZE.")
@as_json
def prune(*, directory: str | None, size: str | None, as_json: bool) -> None:
    """Remove the files of interrupted downloads, and the least recently used shards until the rest
    fits. Files in use are kept.
    """
    from wds_pipes.io.cache.shard_cache import cache_limit

    if size is None and not os.environ.get("WDS_PIPES_CACHE_SIZE"):
        raise click.UsageError("say how much to keep, such as --size 200GB, or set WDS_PIPES_CACHE_SIZE")
    _prune(_open(directory), cache_limit(size), as_json=as_json)


@cache.command()
@_directory
@as_json
def clear(*, directory: str | None, as_json: bool) -> None:
    """Remove all files that are not in use."""
    _prune(_open(directory), 0, as_json=as_json)


def _open(directory: str | None) -> CacheDirectory:
    from wds_pipes.io.cache.files import CacheDirectory
    from wds_pipes.io.cache.shard_cache import cache_path

    return CacheDirectory(cache_path(directory))


def _prune(files: CacheDirectory, limit: int, *, as_json: bool) -> None:
    count, freed = files.prune(limit)
    entries = files.entries()
    size = sum(entry.bytes for entry in entries)
    left = {"shards": len(entries), "bytes": size}
    facts = {"directory": files.path, "removed": {"shards": count, "bytes": freed}, "left": left}
    kept = f"{plural(len(entries), 'shard')} {'is' if len(entries) == 1 else 'are'} left, {bytes_shown(size)}"
    lines = [f"{files.path}: removed {plural(count, 'shard')}, {bytes_shown(freed)}; {kept}"]
    report(facts, lines, as_json=as_json)


@click.group(
    epilog=example("wds-pipes state show checkpoint.pt\nwds-pipes state at --step 120000 --rank 37 train:make_loader")
)
def state() -> None:
    """Show, compare and prove the states in checkpoint files, and what a loader returns at a step.

    A file is what torch.save or json has written, with states of wds_pipes anywhere inside; it is
    read with weights_only=True. A directory is one of wds_pipes.checkpoint, of which the newest
    complete checkpoint is taken.
    """


@state.command(epilog=example("wds-pipes state show checkpoint.pt\nwds-pipes state show checkpoints/"))
@click.argument("files", nargs=-1, required=True)
@as_json_lines
def show(*, files: tuple[str, ...], as_json: bool) -> None:
    """Show where a run stands: epoch, batches, ranks, lanes, and the shard and sample of each lane.

    --json prints the states themselves, a line for each.
    """
    for file in files:
        for placed in tools.read_states(file):
            lines = () if as_json else f"{file}: {placed.in_words()}".split("\n")
            report({"file": file, **placed._asdict()}, lines, as_json=as_json)


@state.command(
    epilog=example("wds-pipes state diff before.pt after.pt\nwds-pipes state diff --ledger runs/a.ledger runs/b.ledger")
)
@click.argument("first")
@click.argument("second")
@click.option("--ledger", is_flag=True, help="Show whether both runs had the same samples.")
@as_json_lines
def diff(*, first: str, second: str, ledger: bool, as_json: bool) -> None:
    """Show in which values two checkpoints differ, a line for each. Exits with 1 if they do.

    With --ledger, the ledgers of two runs are compared (PipeLoader(ledger=...)), whatever their
    ranks, workers and order: in states, which samples all ranks together have had of this epoch
    and of those before; in two files of ledgers, also which step is the first that differs. Exits
    with 1 if they had other samples.
    """
    if ledger:
        compared = tools.same_data(first, second)
        report(compared._asdict(), compared.lines, as_json=as_json)
        raise SystemExit(0 if compared.same else FOUND)
    found = tools.diff_states(first, second)
    for one in found:
        report(one._asdict(), [f"{one.where}: {one.first} -> {one.second}"], as_json=as_json)
    if found:
        raise SystemExit(FOUND)


@state.command(epilog=example("wds-pipes state prove checkpoint.pt 'train-{000..099}.tar'"))
@click.argument("file")
@click.argument("shards", nargs=-1, required=True)
@click.option("--index", metavar="PATH", help="The index.json with which the shards were listed.")
@click.option("--moved", is_flag=True, help="The shards are those of the state, whatever their names are.")
@click.option("--exclude", metavar="FILE", help="The keys that load_state_dict(exclude=...) left out.")
@key_split
@as_json
@storage_options
def prove(*, file: str, shards: tuple[str, ...], exclude: str | None, as_json: bool, **options: Any) -> None:
    """Compare the ledger of a run with its shards: whether each sample was returned once.

    FILE has the states of all ranks, of PipeLoaders with ledger=True. The epochs that have ended
    are compared, whatever the ranks, workers and order. SHARDS are paths or URLs, with {000..011}
    or * in quotes, in the order of the run; of these the headers are read. Exits with 1 if an epoch
    had other samples.
    """
    from wds_pipes.tar.index import make_opener
    from wds_pipes.tar.located import read_keys

    keys = () if exclude is None else read_keys(exclude, make_opener(options["storage_options"]))
    proof = tools.prove(file, shards, exclude=keys, **options)
    report(proof._asdict(), proof.lines, as_json=as_json)
    raise SystemExit(0 if proof.proven else FOUND)


@state.command(
    epilog=example(
        "wds-pipes state at --step 120000 --world-size 64 --rank 37 train:make_loader\n"
        "wds-pipes state at --find n01440764_18 --world-size 64 train:make_loader"
    )
)
@click.argument("named", metavar="MODULE:FUNCTION")
@click.option("--step", type=click.IntRange(min=0), help="Print the samples of this batch; the first is 0.")
@click.option("--find", "sample", metavar="KEY", help="Print when a sample comes: its step, rank and place.")
@click.option("--number", "is_number", is_flag=True, help="KEY is the number of the sample, from 0 over all shards.")
@click.option("--rank", type=click.IntRange(min=0), help="Of this rank.  [default: that of the loader]")
@click.option("--world-size", type=click.IntRange(min=1), help="How many ranks there are, as WORLD_SIZE would say.")
@click.option(
    "--epoch", type=click.IntRange(min=0), help="In this epoch.  [default: that of the loader, 0 or the state's]"
)
@click.option("--state", "file", metavar="FILE", help="The checkpoint from which the loader continues.")
@click.option("--with-keys", "keys", is_flag=True, help="Also print the keys, which are read in the shards.")
@as_json
def at(
    *,
    named: str,
    step: int | None,
    sample: str | None,
    is_number: bool,
    rank: int | None,
    world_size: int | None,
    epoch: int | None,
    file: str | None,
    keys: bool,
    as_json: bool,
) -> None:
    """Print which samples a rank gets at a step, or when a sample comes, without reading shards.

    MODULE:FUNCTION names a function without arguments that returns the PipeLoader of the training;
    the module may be a file in the current directory. With --step, each line is a shard and the
    number of the sample in it. --find needs indexes of keys (wds-pipes index --offsets), but not
    with --number.

    The order is known for a SampleList, and for a ShardList whose samples are counted, also through
    shuffle_buffer, if no step filters or skips samples.
    """
    if (step is None) == (sample is None):
        raise click.UsageError("pass --step or --find, one of them")
    if step is None and (rank is not None or keys):
        raise click.UsageError("--rank and --with-keys go with --step: --find prints the rank")
    if is_number and not (sample or "").isdecimal():
        raise click.UsageError("--number goes with --find NUMBER")
    loader = tools.loader_of(named, rank=rank or 0, world_size=world_size, state=file)
    if step is None:
        assert sample is not None
        visits = loader.find(int(sample) if is_number else sample, epoch=epoch)
        lines = [
            f"epoch {one.epoch}, step {one.step}, rank {one.rank}, place {one.place} in the batch" for one in visits
        ]
        facts: dict[str, Any] = {"sample": sample, "visits": [one._asdict() for one in visits]}
        report(facts, lines or [f"{sample} does not come in this epoch, or in what is left of it"], as_json=as_json)
        return
    found = loader.plan(step, rank=rank, epoch=epoch, keys=keys)
    facts = {"epoch": loader.epoch if epoch is None else epoch, "step": step}
    facts |= {"rank": loader.rank.number if rank is None else rank, "world_size": loader.rank.of}
    title = f"epoch {facts['epoch']}, step {step}, rank {facts['rank']} of {facts['world_size']}"
    lines = [f"{title}: {plural(len(found), 'sample')}"]
    for url, number, key, padding in found:
        lines.append(f"{url} {number}{'' if key is None else f' {key}'}{' (repeat)' if padding else ''}")
    report({**facts, "samples": [one._asdict() for one in found]}, lines, as_json=as_json)
