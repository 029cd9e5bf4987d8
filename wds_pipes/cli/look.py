"""The commands that look at shards: info, ls, head, cat, get, select, verify, index."""

from __future__ import annotations

import os
import sys
from functools import partial
from itertools import islice
from typing import Any, BinaryIO

import click

from wds_pipes import tools
from wds_pipes.cli.options import (
    FOUND,
    Refused,
    as_json,
    as_json_lines,
    concatenated,
    echo,
    engine,
    example,
    executor_of,
    fields,
    jobs,
    key_split,
    metadata,
    progress,
    renames,
    report,
    storage_options,
    urls,
)
from wds_pipes.core.words import plural

# The kinds of findings.
KINDS = (
    "damage",
    "sample",
    "reserved-name",
    "link",
    "duplicate-key",
    "undecodable",
    "some-fields",
    "dotted-name",
    "checksum",
    "stale-index",
)


@click.command(
    epilog=example("wds-pipes info 'train-{000000..000011}.tar'\nwds-pipes info --all --json s3://bucket/train/")
)
@click.argument("urls", nargs=-1)
@click.option("--all", "whole", is_flag=True, help="Read all shards to their ends, without which some are looked into.")
@as_json
@click.option("--codecs", is_flag=True, help="Show what decodes each image format, and what resizes images.")
@progress
@key_split
@storage_options
def info(*, urls: tuple[str, ...], as_json: bool, codecs: bool, **options: Any) -> None:
    """Show what is in shards: samples, fields with types and sizes, and where the bytes go.

    URLS are paths or URLs of shards, with {000..011} or * in quotes, or an index.json. Without
    --all, at most 256 samples of each of 8 shards are read, and samples are estimated unless an
    index (wds-pipes index) counts them. With --codecs, URLS are left out.
    """
    if bool(urls) == codecs:
        leave_out = "--codecs is about what is installed: leave out URLS"
        raise Refused(leave_out if codecs else "name shards, such as 'train-*.tar', or pass --codecs")
    if codecs:
        from wds_pipes.tools import looking

        report(looking.codecs(), looking.codec_lines(), as_json=as_json)
        return
    found = tools.info(urls, **options)
    report(found.as_dict(), found.lines(), as_json=as_json)


@click.command(epilog=example("wds-pipes ls 'train-*.tar' -n 10\nwds-pipes ls --members train-000000.tar"))
@urls
@click.option("--members", is_flag=True, help="List the files of the samples, each with the byte where its data is.")
@click.option("-n", "count", type=click.IntRange(min=0), help="At most this many samples.  [default: all]")
@as_json_lines
@key_split
@concatenated
@storage_options
def ls(*, urls: tuple[str, ...], members: bool, count: int | None, as_json: bool, **options: Any) -> None:
    """List samples: the number of each in its shard, the byte where it starts, its size and fields.

    Bytes are those of the tar, after decompression. --json prints a line of JSON for each sample.
    Data is skipped where the storage can seek.
    """
    for sample in islice(tools.ls(urls, **options), count):
        report(sample.as_dict(), sample.lines(members=members), as_json=as_json)


@click.command(epilog=example("wds-pipes head -n 3 s3://bucket/train-000000.tar"))
@urls
@click.option("-n", "count", type=click.IntRange(min=0), default=5, show_default=True, help="How many samples.")
@fields
@as_json_lines
@key_split
@storage_options
def head(*, urls: tuple[str, ...], count: int, as_json: bool, **options: Any) -> None:
    """Show the first samples, decoded: text as it is, images and arrays by their shapes.

    Nothing that could run code is decoded.
    """
    shown = ""
    for sample in tools.head(urls, count, **options):
        report(sample.as_dict(), sample.lines(with_url=sample.url != shown), as_json=as_json)
        shown = sample.url


def _slice_from(context: click.Context, option: click.Parameter, value: str | None) -> tuple[int, int | None]:
    first, colon, last = (value or ":").partition(":")
    try:
        start, stop = int(first or 0), int(last) if last else None
        if not colon or start < 0 or (stop is not None and stop < start):
            raise ValueError
    except ValueError:
        raise Refused(
            f"--slice takes numbers of samples A:B, with A <= B, such as 0:100 or 100:, not {value!r:.80}"
        ) from None
    return start, stop


@click.command(
    epilog=example(
        "wds-pipes cat --slice 0:1000 --fields 'jpg,cls' 'train-*.tar' > first.tar\n"
        "wds-pipes cat --jsonl --fields json 'train-*.tar' | jq .json.caption"
    )
)
@urls
@click.option("--jsonl", is_flag=True, help="Write JSON Lines. Fields that are no text, numbers or JSON are base64.")
@click.option(
    "--slice",
    "part",
    metavar="A:B",
    callback=_slice_from,
    help="Only samples A to B - 1, counted from 0 over all shards; A: is to the end.",
)
@fields
@renames
@key_split
@storage_options
def cat(*, urls: tuple[str, ...], jsonl: bool, part: tuple[int, int | None], **options: Any) -> None:
    """Write samples to standard output, as one tar or as JSON Lines.

    The data of fields is not changed. The tar is written anew, with the smallest headers. With
    --slice, an index of offsets (wds-pipes index --offsets) saves reading what comes before.
    --rename sees the names that --fields has left.
    """
    stream = sys.stdout.buffer if jsonl else _binary_output()
    tools.cat(urls, stream, jsonl=jsonl, start=part[0], stop=part[1], **options)


def _binary_output() -> BinaryIO:
    """Return standard output for bytes.

    Raises:
        ValueError: it is a terminal.
    """
    if sys.stdout.isatty():
        raise ValueError("the output is binary, and standard output is a terminal: write it to a file, > FILE")
    return sys.stdout.buffer


@click.command(
    epilog=example("wds-pipes get n01440764/10026 'train-*.tar' -o .\nwds-pipes get 12345 'train-*.tar' --field txt")
)
@click.argument("sample")
@urls
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False),
    help="Write the fields as files into a directory, and replace such files.",
)
@click.option("--field", help="Write only this field, as it is.")
@click.option("--key", "is_key", is_flag=True, help="SAMPLE is a key, although it is a number.")
@key_split
@storage_options
def get(
    *, sample: str, urls: tuple[str, ...], output: str | None, field: str | None, is_key: bool, **options: Any
) -> None:
    """Write one sample: the one with a key, or with a number, counted from 0 over all shards.

    SAMPLE is a number if it has only digits and does not start with a zero; --key says otherwise.
    The sample goes to standard output as a tar, or with --field the field alone. The indexes of
    wds-pipes index --offsets find it; without them the shards are read from the beginning.
    """
    from wds_pipes.tools.looking import write_fields, write_tar
    from wds_pipes.tools.rows import is_text

    if _names_shards(sample) and not _names_shards(urls[-1]):
        raise Refused(f"the key of the sample comes before the shards: wds-pipes get {urls[-1]} {sample} ...")
    number = sample.isdecimal() and sample.isascii() and (sample == "0" or sample[0] != "0") and not is_key
    found = tools.get(int(sample) if number else sample, urls, field=field, on_scan=partial(echo, err=True), **options)
    if output is not None:
        for path in write_fields(found, output):
            echo(path)
    elif field is not None:
        data = found[field.lower()]
        stream = sys.stdout.buffer if is_text(data) else _binary_output()
        stream.write(data)
        stream.flush()
    else:
        write_tar([found], _binary_output())


def _names_shards(text: str) -> bool:
    from wds_pipes.io.compression import TAR_NAME

    known = os.path.exists(text) or text == "-" or TAR_NAME.fullmatch(text) is not None
    return known or any(mark in text for mark in ("://", *"*?[{@$"))


@click.command(
    epilog=example(
        "wds-pipes select 'train-*.tar' --where 'clip > 0.28 and width >= 256' -o keys.txt\n"
        "wds-pipes select s3://bucket/train/ --where \"status = 'success'\" --metadata rows.parquet > keys.txt"
    )
)
@urls
@click.option("--where", required=True, metavar="SQL", help="The condition: SQL as it stands after WHERE.")
@metadata
@click.option("-o", "--output", metavar="FILE", help="The file to write.  [default: standard output]")
@storage_options
def select(*, urls: tuple[str, ...], output: str | None, storage_options: dict[str, Any], **options: Any) -> None:
    """Write the keys of the samples whose row of metadata fulfils a condition, one on each line.

    SampleList and IndexedShards.select take such a file as where="@keys.txt", and wds-pipes filter
    as --keys. Only the tables are read, so keys of rows without a sample are written too; later
    they do not matter.

    DuckDB evaluates the condition (pip install 'wds_pipes[meta]'). Texts, dates and UUIDs in JSON
    lines are text: write day::date. NaN is NULL: it fulfils no comparison.
    """
    from wds_pipes.io.outputs import target_of, write_small

    keys = tools.select(urls, storage_options=storage_options, **options)
    content = "".join(f"{key}\n" for key in keys).encode()
    if output is None:
        sys.stdout.buffer.write(content)
    else:
        write_small(target_of(output), content, storage_options)


@click.command(
    epilog=example("wds-pipes verify 'train-*.tar' -j 4\nwds-pipes verify --decode --json s3://bucket/train/index.json")
)
@urls
@click.option("--decode", is_flag=True, help="Also decode all fields; nothing that could run code.")
@click.option("--index", metavar="PATH", help="Compare with this index.json.  [default: the one beside the shards]")
@click.option("--ignore", multiple=True, type=click.Choice(KINDS), help="Leave out findings of a kind; repeatable.")
@jobs(1, "How many processes read shards.")
@engine
@as_json
@progress
@key_split
@concatenated
@storage_options
def verify(*, urls: tuple[str, ...], jobs: int, engine: str | None, as_json: bool, **options: Any) -> None:
    """Read shards to their ends and report what is wrong, with the shard, the key and the byte.

    It reports all damage that reading finds; keys that come twice, in a shard or in several; files
    that no sample can have: links, and names that are kept for metadata; shards of which no file
    makes a sample; fields that only some samples have; keys with dots; with --decode, fields that
    cannot be decoded; sizes and MD5s other than those of the index.json beside the shards, and
    shards that it lists and a directory lacks; indexes of offsets and of keys that are of other
    shards. A note says what was not looked at. Bytes are those of the tar, after decompression.

    The exit code is 0 if nothing was found, 1 if something was, and 2 if the command was not called
    rightly.
    """

    def on_finding(finding: tools.Finding) -> None:
        if not as_json:
            echo(" ".join(f"{finding.kind}: {finding.text}".split()))

    with executor_of(engine) as executor:
        at_once = jobs if executor is None else executor.width
        found = tools.verify(urls, jobs=at_once, executor=executor, on_finding=on_finding, **options)
    report(found.as_dict(), found.lines(), as_json=as_json)
    if found.counts:
        raise SystemExit(FOUND)


@click.command(
    epilog=example(
        "wds-pipes index 'shards/*.tar' -o shards/index.json --offsets\n"
        "wds-pipes index s3://bucket/train/ --offsets-to offsets/ -j 16"
    )
)
@urls
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    help="The index to write, such as index.json beside the shards.",
)
@click.option(
    "--offsets",
    is_flag=True,
    help="Also write where each sample begins, to X.tar.idx and X.tar.keys beside each X.tar, for IndexedShards.",
)
@click.option(
    "--offsets-to",
    type=click.Path(exists=True, file_okay=False),
    help="The same into a directory that exists, also for remote shards.",
)
@click.option("--dali", is_flag=True, help="Also write X.idx beside each X.tar, for DALI's readers.webdataset.")
@click.option("--dali-to", type=click.Path(exists=True, file_okay=False), help="The same into a directory that exists.")
@jobs(4, "How many shards are read at a time.")
@engine
@click.option(
    "--force", is_flag=True, help="Read all shards, also those that have not changed since OUTPUT was written."
)
@as_json
@progress
@key_split
@click.option(
    "--on-repeated-key",
    type=click.Choice(["raise", "warn", "ignore"]),
    default="raise",
    show_default=True,
    help="When the key of a sample comes again later in its shard: stop, print a warning, or go on.",
)
@concatenated
@storage_options
def index(
    *,
    urls: tuple[str, ...],
    output: str | None,
    offsets: bool | str,
    offsets_to: str | None,
    dali: bool | str,
    dali_to: str | None,
    engine: str | None,
    as_json: bool,
    progress: bool | None,
    storage_options: dict[str, Any],
    **options: Any,
) -> None:
    """Write an index of shards: the samples, bytes and MD5 of each, or where each sample begins.

    URLS are paths or URLs, with {000..011} or * in quotes. Each shard is read once, to its end. If
    OUTPUT exists, only shards that are new or have changed are read, and others leave it.
    ShardList(urls, index="index.json") and ShardList("index.json") read the index, and so does the
    wids package.
    """
    offsets, dali = offsets_to or offsets, dali_to or dali
    if output is None and not offsets and not dali:
        raise click.UsageError("pass -o index.json, or --offsets for IndexedShards, or both")
    if output is None and options["force"]:
        raise click.UsageError("--force is for -o: without the index of an earlier run, all shards are read")
    from wds_pipes.io.expand import expand
    from wds_pipes.io.urls import redact
    from wds_pipes.tar.index import check_output
    from wds_pipes.tar.indexing import index_shards
    from wds_pipes.tools.progress import progress as shown

    options |= {"storage_options": storage_options or None, "offsets": offsets, "dali": dali}
    if output is not None:
        check_output(output, remote=True)
    total = len(expand(urls, storage_options))
    with executor_of(engine) as executor, shown(total, "shard", show=progress) as advance:
        found = index_shards(urls, output, executor=executor, on_shard=lambda *_: advance(1), md5=as_json, **options)
    facts_of = {redact(url): facts._asdict() for url, facts in found.items()}
    samples = sum(facts.samples or 0 for facts in found.values())
    size = sum(facts.size or 0 for facts in found.values())
    where = redact(output) if output is not None else "offsets" if offsets else "indexes of DALI"
    line = f"{where}: {plural(len(found), 'shard')}, {plural(samples, 'sample')}, {plural(size, 'byte')}"
    report({"command": "index", "facts": facts_of}, [line], as_json=as_json)
