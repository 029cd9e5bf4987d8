"""``filter``, ``map``, ``dedup``, ``join``, ``repair``: shards from shards, one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from wds_pipes.cli.jobs import Running, job_options, run_job
from wds_pipes.cli.options import dest, example, key_split, names_option, storage_options, urls
from wds_pipes.cli.options import fields as fields_option
from wds_pipes.cli.options import metadata as metadata_option

if TYPE_CHECKING:
    from wds_pipes.cli.rewriting.spine import Reading
    from wds_pipes.io.tasks.task import Job, Place


class _Given(NamedTuple):
    """What all these commands are called with: the shards, where they are written, how they are
    read, and how the tasks run.
    """

    urls: Sequence[str]
    place: Place
    reading: Reading
    running: Running


def _rewriting(command: Callable[..., Job]) -> Callable[..., None]:
    """Run the job that a command returns, which gets ``_Given`` and its own options."""

    @wraps(command)
    def wrapped(
        *,
        urls: Sequence[str],
        dest: str,
        storage_options: Any,
        running: Running,
        key_split: str = "first-dot",
        **own: Any,
    ) -> None:
        from wds_pipes.cli.rewriting.spine import Reading, planned, summed
        from wds_pipes.io.tasks.task import Place

        def make() -> Job:
            reading = Reading(storage_options or None, key_split)
            return command(_Given(urls, Place(dest, reading.storage_options), reading, running), **own)

        run_job(make, running, planned, summed)

    return wrapped


_decode = click.option(
    "--decode",
    metavar="SPEC",
    help="Decode the samples for the function, as decode_by_ext does with this spec, such as rgb8; 'basic' leaves "
    "images as bytes.  [default: all fields are bytes]",
)


@click.command(
    name="filter",
    epilog=example(
        "wds-pipes filter 'raw/*.tar' good/ --where 'clip > 0.28 and width >= 256' -j 4\n"
        "wds-pipes filter 'raw/*.tar' good/ --exclude bad-keys.txt --fields jpg,cls\n"
        "wds-pipes filter 'raw/*.tar' good/ --keep rules:is_photo --decode rgb8"
    ),
)
@urls
@dest
@click.option(
    "--where", metavar="SQL", help="Samples whose row of metadata fulfils this; SQL as it stands after WHERE."
)
@metadata_option
@click.option("--keys", metavar="FILE", help="Samples whose key is in this file, which has a key on each line.")
@click.option("--exclude", metavar="FILE", help="Leave out samples whose key is in this file.")
@click.option("--keep", metavar="MODULE:FUNCTION", help="Samples for which this function returns true.")
@_decode
@click.option(
    "--every",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Of what is left of each shard, samples 0, N, 2N and so on.",
)
@fields_option
@names_option("--drop-fields", "All fields but these.")
@key_split
@storage_options
@job_options
@_rewriting
def filter_(given: _Given, *, fields: list[str] | None, drop_fields: list[str] | None, **chosen: Any) -> Job:
    """Write some of the samples of shards, or some of their fields, to the directory DEST.

    All conditions must hold. Each shard becomes one of the same name, uncompressed, with its
    offsets; index.json lists all of them. A shard of which no sample is left is a tar without
    samples: wds-pipes reshard makes even shards. A sample of which no field is left is left out.

    The function of --keep gets a sample as a dict of bytes with __key__ and __url__, or decoded
    with --decode; what is written are the bytes as they were. Its module may be a file in the
    current directory. If that file changes, the outputs are others, and --overwrite is needed.
    """
    if (where := chosen["where"]) is not None and (not where.strip() or where.startswith("@")):
        raise click.UsageError("--where is a condition such as 'clip > 0.28'; a file of keys is for --keys")
    if chosen["metadata"] and not chosen["where"]:
        raise click.UsageError("--metadata is for --where, a condition such as 'clip > 0.28'")
    if chosen["decode"] and not chosen["keep"]:
        raise click.UsageError("--decode is for the function of --keep")
    if fields and drop_fields:
        raise click.UsageError("--fields says what stays and --drop-fields what goes: pass one of the two")
    said = any(chosen[name] for name in ("where", "keys", "exclude", "keep")) or fields or drop_fields
    if not said and chosen["every"] == 1:
        raise click.UsageError(
            "say what to keep: --where, --keys, --exclude, --keep, --every (more than 1), --fields or --drop-fields"
        )
    from wds_pipes.cli.rewriting.filtering import plan_filter

    urls, place, reading, _ = given
    return plan_filter(urls, place, reading, fields=fields, drop_fields=drop_fields, **chosen)


@click.command(
    name="map",
    epilog=example(
        "wds-pipes map changes:smaller 'raw/*.tar' small/ -j 4\n"
        "wds-pipes map changes:with_caption 'raw/*.tar' captioned/ --decode basic --on-error skip"
    ),
)
@click.argument("function", metavar="MODULE:FUNCTION")
@urls
@dest
@_decode
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    show_default=True,
    help="For a sample on which the function raises, or which cannot be decoded or encoded: stop, or leave it out and "
    "count it. A NameError, TypeError and the like always stop.",
)
@key_split
@storage_options
@job_options
@_rewriting
def map_(given: _Given, *, function: str, decode: str | None, on_error: str) -> Job:
    """Write the samples that a function returns for those of shards to the directory DEST.

    The function gets a sample as a dict with __key__, __url__ and its fields as bytes, and returns
    a dict of fields to write, or None to leave the sample out. It may change __key__. Values that
    are not bytes are encoded by the extension of their field: numbers, text, json, npy, images.
    With --decode the values are decoded, and what it returns is encoded again, images too: with
    '--decode basic' images stay the bytes that they are.

    \b
    # changes.py, in the current directory
    def with_caption(sample):
        sample["json"]["caption"] = sample["txt"].strip()
        return {"jpg": sample["jpg"], "json": sample["json"]}

    The function must return the same for the same sample, since a shard may be written twice. Each
    shard becomes one of the same name, uncompressed. If the file of the function changes, the
    outputs are others, and --overwrite is needed; what the file imports is not looked at.
    """  # noqa: D301
    from wds_pipes.cli.rewriting.mapping import plan_map

    urls, place, reading, _ = given
    return plan_map(function, urls, place, reading, decode=decode, skips=on_error == "skip")


@click.command(
    epilog=example("wds-pipes dedup 'raw/*.tar' unique/ --by content -j 4\nwds-pipes dedup a.tar b.tar u/ --by jpg")
)
@urls
@dest
@click.option(
    "--by",
    default="key",
    show_default=True,
    metavar="key|content|FIELD",
    help="What is compared: keys, all fields of samples, or one field, such as jpg.",
)
@key_split
@storage_options
@job_options
@_rewriting
def dedup(given: _Given, *, by: str) -> Job:
    """Write shards in which each sample comes once to the directory DEST.

    Of samples with the same key, the same fields, or the same bytes of one field, the first one
    stays, in the order of the shards as they are named. Samples without that field all stay.
    Fields are compared by hashes of 128 bits. If several shards have one name, DEST has a directory
    for each of theirs.

    The shards are read twice (with --by key, the first time without their data): first a hash of
    each sample goes to DEST/.wds-pipes/hashes, 16 bytes a sample. When all are there, they are
    compared in memory, about 70 bytes a sample. With --task, each share hashes its own shards, and
    then those that no other share has hashed yet.
    """
    from wds_pipes.cli.rewriting.repeats import plan_dedup

    return plan_dedup(*given, by=by)


@click.command(
    epilog=example(
        "wds-pipes join 'images/*.tar' both/ --with 'captions/*.tar' -j 4\n"
        "wds-pipes join 'images/*.tar' all/ --with captions/ --with s3://bucket/features/index.json --missing drop"
    )
)
@urls
@dest
@click.option(
    "--with",
    "partners",
    multiple=True,
    required=True,
    metavar="SHARDS",
    help="Another data set: its shards, in quotes, a directory or an index.json; repeatable.",
)
@click.option(
    "--missing",
    type=click.Choice(["raise", "drop", "keep"]),
    default="raise",
    show_default=True,
    help="For a sample whose key another data set does not have: stop, leave it out, or write it without.",
)
@click.option(
    "--prefer",
    type=click.Choice(["first", "last"]),
    help="Which field is kept if several have one of the same name.  [default: that is an error]",
)
@storage_options
@job_options
@_rewriting
def join(given: _Given, *, partners: tuple[str, ...], missing: str, prefer: str | None) -> Job:
    """Write samples with the fields that other data sets have for their keys to the directory DEST.

    URLS are the shards whose samples, names and order stay. The other data sets may be sharded and
    ordered in any way: their samples are found by their indexes, which wds-pipes index SHARDS
    --offsets writes, so they must be uncompressed. It is quickest if their order is the same.
    """
    from wds_pipes.cli.rewriting.joining import plan_join

    urls, place, reading, _ = given
    return plan_join(urls, partners, place, reading, missing=missing, prefer=prefer)


@click.command(
    epilog=example("wds-pipes repair damaged.tar mended/\nwds-pipes repair 'raw/*.tar' mended/ --decode -j 4")
)
@urls
@dest
@click.option("--decode", is_flag=True, help="Also leave out samples with a field that cannot be decoded.")
@click.option("--drop-repeated", is_flag=True, help="Leave out a sample whose key and fields came before in its shard.")
@key_split
@storage_options
@job_options
@_rewriting
def repair(given: _Given, *, decode: bool, drop_repeated: bool) -> Job:
    """Write the whole samples of damaged shards to the directory DEST, and list what was lost.

    Each shard becomes one of the same name, uncompressed. What was lost is in DEST/lost.jsonl, a
    line for each sample, each damaged place and each file that no sample can have (a link, or a
    name that is kept for metadata): the shard, its bytes from start to end (of the tar, after
    decompression; null: to the end), the key if there is one, and why. A sample next to damage is
    lost too, since it may be incomplete. If a shard may have been cut at its end, a line says so.

    Members of one sample that are apart from each other, as in a tar that is not sorted, are
    joined; they are held in memory until the last one. If one of these pieces is lost, so is the
    sample. If files of a key come again, --drop-repeated keeps the first sample; where it is not
    clear which files belong together, all of the key are lost.

    With --key-split last-dot, dots in keys become underscores, so that all readers find the keys.
    wds-pipes verify says which shards need repair.
    """
    from wds_pipes.cli.rewriting.repairing import Repair, plan_repair

    return plan_repair(given.urls, given.place, Repair(given.reading, drop_repeated, decode))
