"""``wds-pipes reshard``, ``concat``, ``split``, ``shuffle``, ``sort`` and ``mix``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import click

from wds_pipes.cli.jobs import Running, beside_outputs, check_outputs, marks, runs, split_numbers, unchanged
from wds_pipes.cli.options import as_json as as_json_option
from wds_pipes.cli.options import (
    check_not_given,
    dest,
    echo,
    echo_json,
    ended_by_sigterm,
    example,
    in_one_line,
    shard_limits,
    shares,
    size_option,
    storage_options,
    urls,
)
from wds_pipes.cli.reshaping.orders import is_weighted, mixed_numbers, read_sources, sorted_numbers
from wds_pipes.cli.reshaping.plan import (
    Division,
    Inputs,
    Order,
    open_inputs,
    plan,
    with_own_keys,
)
from wds_pipes.core.order import order_of_samples
from wds_pipes.core.words import bytes_shown, plural
from wds_pipes.io.compression import kind_of_name
from wds_pipes.io.outputs import exists, target_of
from wds_pipes.io.tasks.running import check_plan
from wds_pipes.io.tasks.task import Job, Place
from wds_pipes.io.urls import local_path, redact
from wds_pipes.tar.listing import list_shards
from wds_pipes.tar.writer import write_shard
from wds_pipes.tools.reading import Source


class _Common(NamedTuple):
    """The options of ``_reshaping``."""

    place: Place
    running: Running
    max_samples: int
    max_bytes: int
    number: int | None
    memory: int
    md5: bool


def _reshaping(command: Callable[..., Job]) -> Callable[..., None]:
    """Run the job that a command returns, with the options that all of these have; it gets them as
    ``common``.
    """

    @runs()
    @wraps(command)
    def wrapped(**options: Any) -> Job:
        common = _Common(**{name: options.pop(name) for name in _Common._fields})
        if common.number is not None:
            check_not_given("max_samples", "max_bytes", instead="--shards says how many shards there are")
        return command(**options, common=common)

    number = click.option(
        "--shards",
        "number",
        type=click.IntRange(min=1),
        help="Write so many shards of equal numbers of samples, instead of --max-samples and --max-bytes.",
    )
    memory = size_option("--memory", "256MB", "What each process may need besides the program itself, such as 64MB.")
    md5 = click.option(
        "--md5",
        is_flag=True,
        help="Compute the MD5 of each shard, for index.json: it takes most of the time for large samples on a fast "
        "disk. wds-pipes index adds MD5s later.",
    )
    return shard_limits(number(memory(md5(wrapped))))


def _job(
    name: str,
    given: Sequence[str],
    common: _Common,
    orders: Callable[[Inputs, Place], dict[str, Order]],
    *,
    options: dict[str, Any],
    of_sample: int = 0,
    keys: bool = False,
    one_by_one: bool = False,
    named: Sequence[str] | None = None,
) -> Job:
    """Make the job of a command.

    Args:
        name: its name.
        given: the URLs of the shards.
        common: the common options.
        orders: returns the order of each split, and gets where first passes write.
        options: what decides about the orders.
        of_sample: how many bytes of memory an order takes for each sample.
        keys: indexes of keys are needed.
        one_by_one: samples are read one by one, so the shards must not be compressed.
        named: what the shards were named by, if it is not ``given``.
    """
    place, running, memory = common.place, common.running, common.memory
    division = Division(common.max_samples, common.max_bytes, common.number)
    decided = {**options, **({"md5": True} if common.md5 else {})}
    if not running.overwrite:
        check_plan(place, name, {**decided, **division.options})
    with beside_outputs(place, running.dry_run) as hidden:
        inputs = open_inputs(given, hidden, running, memory=memory // 8, keys=keys)
        if one_by_one and inputs.compressed:
            raise ValueError(
                f"{redact(min(inputs.compressed))} is compressed, so its samples cannot be read in any order: write "
                "uncompressed shards first, with wds-pipes reshard"
            )
        if (needed := 2 * of_sample * inputs.count) > memory:  # an order takes half of the memory at most
            raise ValueError(
                f"the order of {plural(inputs.count, 'sample')} needs {plural(needed, 'byte')}, more than --memory, "
                f"which is {bytes_shown(memory)}: pass --memory {-(-needed // 10**6)}MB"
            )
        return plan(
            name,
            inputs,
            place,
            orders(inputs, hidden),
            given=given if named is None else named,
            division=division,
            memory=memory // 2,
            options=decided,
        )


@click.command(
    epilog=example(
        "wds-pipes reshard 'raw/*.tar' shards/ --max-bytes 256MB -j 4\n"
        "wds-pipes reshard s3://bucket/index.json s3://bucket/again --shards 512 --task 0 --tasks 8"
    )
)
@urls
@dest
@_reshaping
def reshard(*, urls: tuple[str, ...], common: _Common) -> Job:
    """Write the samples of shards, in their order, into shards of another size.

    DEST is a directory or a URL such as s3://bucket/data. It gets shard-000000.tar and so on, with
    their offsets and index.json. Fields keep their bytes. Compressed shards are read too.

    Run the same command again after an interruption: what is finished is kept. Where a shard has
    no index of offsets, one is made in DEST first.
    """
    return _job("reshard", urls, common, lambda inputs, hidden: {"": range(inputs.count)}, options={})


@click.command(epilog=example("wds-pipes concat 'parts/*.tar' whole.tar"))
@urls
@click.argument("output")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@as_json_option
@storage_options
def concat(
    *, urls: tuple[str, ...], output: str, overwrite: bool, as_json: bool, storage_options: dict[str, Any]
) -> None:
    """Write the samples of shards, in their order, into the one shard OUTPUT.

    OUTPUT is a path or a URL. Its offsets are written beside it, as OUTPUT.idx and OUTPUT.keys. It
    appears when it is complete. Compressed shards are read too, and - is standard input.
    """
    with in_one_line(), ended_by_sigterm():
        target, options = target_of(output), storage_options or None
        shards, known = list_shards(list(urls), options)
        if "*" in target or target.endswith("/") or os.path.isdir(local_path(target) or ""):
            raise ValueError(f"OUTPUT is the shard to write, not {redact(target)!r}: name a file")
        if kind_of_name(target):
            raise ValueError(f"only uncompressed shards have offsets: write .tar, not {redact(target)!r}")
        check_outputs(shards, [target])
        files = [url for url in shards if url != "-" and not url.startswith("pipe:")]
        before = dict(zip(files, marks(files, options, known), strict=True))
        if not overwrite and exists(target, options):
            raise ValueError(f"{redact(target)} exists: pass --overwrite to replace it, or another name")
        samples = unchanged(with_own_keys(Source(shards, storage_options).read()), before, options)
        facts = write_shard(target, samples, md5=as_json, storage_options=options)  # only JSON shows the MD5
        if as_json:
            echo_json({"command": "concat", "facts": {redact(target): facts._asdict()}})
            return
        echo(
            f"{redact(target)}: {plural(len(shards), 'shard')}, {plural(facts.samples or 0, 'sample')}, "
            f"{plural(facts.size or 0, 'byte')}"
        )


@click.command(epilog=example("wds-pipes split 'all/*.tar' parts/ --shares train=0.9,val=0.1"))
@urls
@dest
@shares("--shares", "parts", "The splits and their shares, such as train=0.9,val=0.1.", required=True)
@_reshaping
def split(*, urls: tuple[str, ...], parts: dict[str, float], common: _Common) -> Job:
    """Divide the samples of shards by the hashes of their keys, such as into train and val.

    A key is in the same split whatever other samples there are, and samples keep their order. DEST
    gets a directory for each split: train/train-000000.tar and so on, with their offsets and
    index.json. --shards is for each split.
    """
    return _job(
        "split",
        urls,
        common,
        lambda inputs, hidden: dict(split_numbers(inputs.hashes(), parts)),
        options={"shares": parts},
        of_sample=24,
        keys=True,
    )


@click.command(epilog=example("wds-pipes shuffle 'sorted/*.tar' shuffled/ --seed 7 --memory 1GB -j 4"))
@urls
@dest
@click.option("--seed", type=int, default=0, show_default=True, help="Another seed is another order.")
@_reshaping
def shuffle(*, urls: tuple[str, ...], seed: int, common: _Common) -> Job:
    """Write the samples of all shards in a random order.

    Each sample may come anywhere. The order depends only on the seed and the number of samples.
    """
    return _job(
        "shuffle",
        urls,
        common,
        lambda inputs, hidden: {"": order_of_samples(inputs.count, seed, 0)},
        options={"seed": seed},
        of_sample=4,
        one_by_one=True,
    )


@click.command(
    epilog=example(
        "wds-pipes sort 'raw/*.tar' sorted/\n"
        "wds-pipes sort 'raw/*.tar' by-class/ --by cls\n"
        "wds-pipes sort 'raw/*.tar' by-width/ --by json:width --memory 1GB"
    )
)
@urls
@dest
@click.option(
    "--by", metavar="FIELD[:NAME]", help="Sort by the value of a field, or by a value in its JSON.  [default: the key]"
)
@_reshaping
def sort(*, urls: tuple[str, ...], by: str | None, common: _Common) -> Job:
    """Write the samples of all shards in the order of their keys, or of a field.

    Values are read as decode_by_ext reads them: cls is a number, txt a text. json:width is a value
    in JSON, json:meta.date one in an object in it. Numbers are sorted by size, texts by their
    characters: 10 before 9. Samples with equal values keep their order.
    """
    return _job(
        "sort",
        urls,
        common,
        lambda inputs, hidden: {"": sorted_numbers(inputs, by, hidden, common.memory // 2, common.running)},
        options={"by": by},
        of_sample=12,
        one_by_one=True,
    )


@click.command(epilog=example("wds-pipes mix 'web/*.tar=0.7' 'books/*.tar=0.3' mixed/"))
@click.argument("sources", nargs=-1, required=True, metavar="URLS=WEIGHT...")
@dest
@click.option(
    "--exhausted",
    type=click.Choice(["stop", "drop"]),
    default="stop",
    show_default=True,
    help="When the data set that comes next has no more samples: stop, or go on with the others.",
)
@_reshaping
def mix(*, sources: tuple[str, ...], exhausted: str, common: _Common) -> Job:
    """Mix the samples of several data sets in exact proportions, as the step mix does.

    URLS are the shards of a data set, such as 'web/*.tar'. At every place, the number of samples of
    each data set differs from its share by less than one; each keeps its order. Shuffle the data
    sets before, if they are sorted.
    """
    if is_weighted(dest := common.place.url):
        raise ValueError(f"DEST is the directory to write to, and {dest!r} has a weight: name one at the end")
    weights, storage_options = read_sources(sources), common.place.storage_options
    each = []
    for url, _ in weights:
        shards, known = list_shards(url, storage_options)
        if known is not None:
            marks(shards, storage_options, known)  # whether they are those of the index
        each.append(shards)

    def orders(inputs: Inputs, hidden: Place) -> dict[str, Order]:
        starts, shard, firsts = inputs.located.starts, 0, [0]
        for shards in each:
            shard += len(shards)
            firsts.append(starts[shard])
        return {"": mixed_numbers(firsts, [weight for _, weight in weights], exhausted)}

    options = {"weights": [weight for _, weight in weights], "exhausted": exhausted}
    given = [url for shards in each for url in shards]
    named = [url for url, _ in weights]
    return _job("mix", given, common, orders, options=options, of_sample=12, named=named)
