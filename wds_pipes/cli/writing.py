"""The commands that write shards, and other files: what ``wds_pipes.tools`` does, with options."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click

from wds_pipes import tools
from wds_pipes.cli.options import (
    Damaged,
    Refused,
    as_json,
    concatenated,
    dest,
    echo,
    echo_json,
    ended_by_sigterm,
    engine,
    example,
    fields,
    key_split,
    metadata,
    names_option,
    progress,
    shares,
    size_option,
    storage_options,
    urls,
    values_option,
)
from wds_pipes.core.words import plural

F = TypeVar("F", bound=Callable[..., Any])

_number = click.IntRange(min=1)
_JOB_OPTIONS = (
    click.option("-j", "--jobs", type=_number, help="Processes on this machine."),
    engine,
    click.option("--task", type=click.IntRange(min=0), help="Do only this share, from 0 on."),
    click.option("--tasks", type=_number, help="How many shares the work has."),
    click.option("--overwrite", is_flag=True, help="Replace what another command has written."),
    click.option("--dry-run", is_flag=True, help="Only show what would be written."),
    progress,
    as_json,
    storage_options,
)
_JOB_NAMES = ("jobs", "engine", "task", "tasks", "overwrite", "dry_run", "progress", "as_json", "storage_options")


class _Command(click.Command):
    """A command whose help has the options of jobs in a section of their own."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        own, of_jobs = list[tuple[str, str]](), list[tuple[str, str]]()
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                (of_jobs if param.name in _JOB_NAMES else own).append(record)
        for title, records in (("Options", own), ("On many machines", of_jobs)):
            with formatter.section(title):
                formatter.write_dl(records, col_max=32)


def _writes(name: str, examples: str) -> Callable[[Callable[..., tools.Report]], click.Command]:
    """Make a command of a function that runs a job. The exit code is 1 if samples or tasks failed,
    2 if it cannot run.
    """

    def decorated(function: Callable[..., tools.Report]) -> click.Command:
        @functools.wraps(function)
        def command(*, as_json: bool, **given: Any) -> None:
            from wds_pipes.tools.jobs import FailedTasksError

            try:
                with ended_by_sigterm(), _resumable(given["dry_run"]):
                    report = function(on_task=_tell, **given)
            except FailedTasksError as error:
                _show(error.report, as_json)
                raise Damaged(
                    f"{plural(len(error.report.failed), 'task')} failed, as shown. Run the command again when the "
                    "cause is mended: what is finished is kept. With other options, also pass --overwrite."
                ) from None
            _show(report, as_json)

        command = functools.reduce(lambda made, option: option(made), reversed(_JOB_OPTIONS), command)
        return click.command(name=name, cls=_Command, epilog=example(examples))(command)

    return decorated


@contextlib.contextmanager
def _resumable(dry_run: bool) -> Iterator[None]:
    """Say after Ctrl-C what becomes of what is finished."""
    try:
        yield
    except KeyboardInterrupt:
        if not dry_run:
            click.echo("what is finished is kept: run the same command again to go on", err=True)
        raise


def _tell(outcome: tools.Outcome) -> None:
    if outcome.facts is None:
        for line in Refused(f"{outcome.name} failed: {outcome.error}").message.split("\n"):
            echo(line, err=True)


def _show(report: tools.Report, as_json: bool) -> None:
    if not as_json:
        for line in str(report).split("\n"):
            echo(line)
        return
    shown = {**vars(report), "complete": report.complete, "tasks": report.total}
    if report.dry_run:
        shown["would_write"] = shown.pop("written")
    echo_json({name: value for name, value in shown.items() if name not in ("total", "dry_run", "says")})


def _sizes(samples: str) -> Callable[[F], F]:
    """The options --max-samples, whose default is in words, and --max-bytes."""

    def decorated(function: F) -> F:
        most = f"In a shard.  [default: {samples}]"
        size = size_option("--max-bytes", None, "Of a shard, as 256MB.  [default: 1GiB]")
        return click.option("--max-samples", type=_number, help=most)(size(function))

    return decorated


def _reorders(name: str, examples: str) -> Callable[[Callable[..., tools.Report]], click.Command]:
    """As ``_writes``, with the options of commands that write samples in another order."""

    def decorated(function: Callable[..., tools.Report]) -> click.Command:
        number = click.option(
            "--shards", type=_number, help="Write so many shards of equal numbers of samples instead."
        )
        memory = size_option("--memory", "256MB", "What each process may need, such as 64MB.")
        md5 = click.option("--md5", is_flag=True, help="Compute MD5s for index.json, which takes time.")
        return _writes(name, examples)(_sizes("100000")(number(memory(md5(function)))))

    return decorated


@_writes(
    "create",
    "wds-pipes create photos/ shards/ --max-bytes 256MB --shuffle 7 -j 4\n"
    "wds-pipes create table.csv s3://bucket/data --key id --file image --value cls=label",
)
@click.argument("source")
@dest
@click.option(
    "--from",
    "kind",
    type=click.Choice(["files", "classes", "list", "csv", "tsv", "jsonl", "parquet"]),
    metavar="KIND",
    help="What SOURCE is.  [default: as it looks]",
)
@_sizes("100000")
@click.option("--shuffle", type=int, metavar="SEED", help="Write in a random order, of this seed.")
@shares("--split", "split", "Divide by the hashes of the keys.")
@click.option(
    "--key-split",
    type=click.Choice(["first-dot", "last-dot", "folder"]),
    help="Which dot of a name ends the key; or its first directory.",
)
@click.option("--follow-symlinks", is_flag=True, help="Also read links out of SOURCE.")
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Leave out such files; repeatable.")
@click.option("--include", multiple=True, metavar="PATTERN", help="Pack such files of shards; repeatable.")
@click.option("--key", metavar="COLUMN", help="The column of keys.  [default: numbers]")
@click.option(
    "--file",
    "files",
    multiple=True,
    metavar="[FIELD=]COLUMN",
    help="A column of names of files; repeatable.",
)
@values_option("A column of values; repeatable.")
@click.option("--group", type=_number, metavar="N", help="N rows are one sample.")
@click.option("--root", metavar="DIRECTORY", help="Where relative paths begin.")
def create(**options: Any) -> tools.Report:
    """Make shards of files, lists and tables in the directory DEST.

    DEST gets shard-000000.tar and so on, their offsets and index.json. SOURCE is a directory, a
    file (text also as .gz, .bz2, .xz or .zst), or - for standard input. Hidden files, files
    like Thumbs.db, and shards are left out:

    \b
    files    files of one name are a sample: a.jpg and a.json
    classes  directories (or the tars of a tar) are classes: field cls, and classes.json
    list     lines with a path and maybe a label: images/a.jpg 3
    csv, tsv, jsonl, parquet
             a row of a file or of several ('data/*.jsonl.zst') is a sample: field json,
             or what --file and --value say; names in --value cls=COLUMN become numbers
    """  # noqa: D301
    return tools.create(**options)


@_writes(
    "convert",
    "wds-pipes convert 'gs://bucket/train-*.tfrecord' shards/ --from tfrecord -j 4\n"
    "wds-pipes convert saved/ s3://bucket/data --from hf --value jpg=image --value cls=label",
)
@click.argument("source")
@dest
@click.option(
    "--from",
    "kind",
    type=click.Choice(["tfrecord", "parquet", "hf", "lmdb", "torchrecord"]),
    required=True,
    help="The format of SOURCE.",
)
@click.option("--max-samples", type=_number, help="In a shard; not for tfrecord.  [default: 10000]")
@click.option("--key", metavar="COLUMN", help="The column of the keys.  [default: the number]")
@values_option("Write only such fields; repeatable.")
def convert(**options: Any) -> tools.Report:
    """Make shards of a data set in another format in the directory DEST.

    Bytes are written as they are: images are never encoded again. A column of bytes is a field
    COLUMN.EXTENSION, by what the bytes are, and the extension alone if there is one such column.
    Arrays are npy; text and numbers are one field json. --value chooses otherwise. The first 100
    records decide what the columns are.

    \b
    tfrecord     files, a pattern or a directory of tf.train.Example; each is a shard
    parquet      files, a pattern or a directory
    hf           a directory of dataset.save_to_disk(), with its splits
    lmdb         a database: its keys are keys; those that begin with __ are left out
    torchrecord  a directory of databases of TensorProtos: the picture, and field cls;
                 or the list that they are made of, with lines PATH LABEL

    tfrecord and parquet may be remote, the others are local. wds-pipes create reads CSV and JSON
    Lines.
    """  # noqa: D301
    return tools.convert(**options)


@_writes(
    "export",
    "wds-pipes export 'shards/*.tar' table/ --to parquet --fields json,cls -j 4\n"
    "wds-pipes export shards/ folder/ --to imagefolder",
)
@urls
@dest
@click.option(
    "--to",
    "kind",
    type=click.Choice(["jsonl", "parquet", "tfrecord", "imagefolder"]),
    required=True,
    help="The format.",
)
@fields
@click.option("--label", metavar="FIELD", help="The field of the class, for imagefolder.  [default: cls]")
@key_split
def export(**options: Any) -> tools.Report:
    """Write shards in another format into the directory DEST.

    A file is made of each shard, with the name of the shard. Data is written as it is. A sample
    that has none of --fields is left out.

    \b
    jsonl        X.jsonl: lines as of wds-pipes cat --jsonl
    parquet      X.parquet: columns __key__ and one for each field: text, integers
                 (cls, id and the like) or bytes
    tfrecord     X.tfrecord of tf.train.Example: a feature for the key and each field
    imagefolder  images/CLASS/KEY.jpg and so on, and X.txt, their list; classes are named
                 by classes.json beside the shards, else by what the field --label has

    wds-pipes convert reads parquet and tfrecord back as they were, and wds-pipes create --from
    classes the images.
    """  # noqa: D301
    return tools.export(**options)


@_writes(
    "download",
    "wds-pipes download 's3://bucket/train-{000000..000099}.tar' data/ -j 4\n"
    "wds-pipes download https://example.com/train/index.json data/",
)
@urls
@dest
def download(**options: Any) -> tools.Report:
    """Copy shards into the directory DEST, which may be in a store.

    What is beside a shard is copied too: indexes, and tables of metadata (X.parquet, X.jsonl,
    X_stats.json); and classes.json, sizes.json, _info.json and __len__ of their directories. Sizes
    are compared, and MD5s if the index.json beside the shards has them.

    Run the same command again after an interruption: what is finished is kept, and a shard that
    was begun on a local disk continues at its byte, if the store names versions (ETags).
    """
    return tools.download(**options)


_decode = click.option(
    "--decode",
    metavar="SPEC",
    help="Decode samples for the function as decode_by_ext does: rgb8, or basic, without images.",
)


@_writes(
    "filter",
    "wds-pipes filter 'raw/*.tar' good/ --where 'clip > 0.28 and width >= 256' -j 4\n"
    "wds-pipes filter 'raw/*.tar' good/ --keep rules:is_photo --decode rgb8",
)
@urls
@dest
@click.option("--where", metavar="SQL", help="Samples whose row of metadata fulfils it.")
@metadata
@click.option("--keys", metavar="FILE", help="Samples whose key is a line of this file.")
@click.option("--exclude", metavar="FILE", help="Leave out samples with these keys.")
@click.option("--keep", metavar="MODULE:FUNCTION", help="Samples for which it returns true.")
@_decode
@click.option("--every", type=_number, default=1, help="Of what is left, samples 0, N, 2N ...")
@fields
@names_option("--drop-fields", "All fields but these.")
@key_split
def filter_(**options: Any) -> tools.Report:
    """Write some of the samples of shards, or some of their fields, to the directory DEST.

    All conditions must hold. Each shard becomes one of the same name, uncompressed, also if no
    sample is left. A sample of which no field is left is left out.

    The function of --keep gets a sample as a dict of bytes with __key__ and __url__. Its module may
    be a file in the current directory.
    """
    return tools.filter(**options)


@_writes(
    "map",
    "wds-pipes map changes:smaller 'raw/*.tar' small/ -j 4\n"
    "wds-pipes map changes:with_caption 'raw/*.tar' captioned/ --decode basic --on-error skip",
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
    help="For a sample on which it raises: stop, or leave it out.",
)
@key_split
def map_(**options: Any) -> tools.Report:
    """Write the samples that a function returns for those of shards to the directory DEST.

    The function gets a sample as a dict with __key__, __url__ and its fields as bytes, and returns
    a dict of fields to write, or None to leave the sample out. Values that are not bytes are
    encoded by the extension of their field.

    \b
    # changes.py, in the current directory
    def with_caption(sample):
        sample["json"]["caption"] = sample["txt"].strip()
        return {"jpg": sample["jpg"], "json": sample["json"]}

    The function must return the same for the same sample. Each shard becomes one of the same name.
    If the file of the function changes, --overwrite is needed.
    """  # noqa: D301
    return tools.map(**options)


@_writes(
    "dedup",
    "wds-pipes dedup 'raw/*.tar' unique/ --by content -j 4\nwds-pipes dedup a.tar b.tar u/ --by jpg",
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
def dedup(**options: Any) -> tools.Report:
    """Write shards in which each sample comes once to the directory DEST.

    Of samples with the same key, the same fields, or the same bytes of one field, the first one
    stays, in the order of the shards as they are named. Samples without that field all stay.

    The shards are read twice: first a hash of 128 bits of each sample goes to
    DEST/.wds-pipes/hashes. When all are there, they are compared in memory.
    """
    return tools.dedup(**options)


@_writes(
    "join",
    "wds-pipes join 'images/*.tar' both/ --with 'captions/*.tar' -j 4\n"
    "wds-pipes join 'images/*.tar' all/ --with captions/ --with s3://bucket/features/index.json",
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
def join(**options: Any) -> tools.Report:
    """Write samples with the fields that other data sets have for their keys to the directory DEST.

    URLS are the shards whose samples, names and order stay. The other data sets may be sharded and
    ordered in any way: their samples are found by their indexes, which wds-pipes index SHARDS
    --offsets writes, so they must be uncompressed. It is quickest if their order is the same.
    """
    return tools.join(**options)


@_writes(
    "repair",
    "wds-pipes repair damaged.tar mended/\nwds-pipes repair 'raw/*.tar' mended/ --decode -j 4",
)
@urls
@dest
@click.option("--decode", is_flag=True, help="Also leave out samples with a field that cannot be decoded.")
@click.option("--drop-repeated", is_flag=True, help="Leave out a sample whose key and fields came before in its shard.")
@concatenated
@key_split
def repair(**options: Any) -> tools.Report:
    """Write the whole samples of damaged shards to the directory DEST, and list what was lost.

    Each shard becomes one of the same name, uncompressed. What was lost is in DEST/lost.jsonl, a
    line for each sample, damaged place and file that no sample can have: the shard, its bytes
    from start to end, the key if there is one, and why. A sample next to damage is lost too, since
    it may be incomplete; so is the last one of a shard that is cut.

    Members of one sample that are apart from each other are joined. If one of these pieces is lost,
    so is the sample. If files of a key come again, --drop-repeated keeps the first sample, where it
    is clear which files belong together.
    """
    return tools.repair(**options)


@_reorders(
    "reshard",
    "wds-pipes reshard 'raw/*.tar' shards/ --max-bytes 256MB -j 4\n"
    "wds-pipes reshard s3://bucket/index.json s3://bucket/again --shards 512",
)
@urls
@dest
def reshard(**options: Any) -> tools.Report:
    """Write the samples of shards, in their order, into shards of another size.

    DEST is a directory or a URL such as s3://bucket/data. It gets shard-000000.tar and so on, with
    their offsets and index.json. Fields keep their bytes. Compressed shards are read too.

    Run the same command again after an interruption: what is finished is kept. Where a shard has
    no index of offsets, one is made in DEST first.
    """
    return tools.reshard(**options)


@click.command(epilog=example("wds-pipes concat 'parts/*.tar' whole.tar"))
@urls
@click.argument("output")
@click.option("--overwrite", is_flag=True, help="Replace an existing file.")
@as_json
@storage_options
def concat(*, as_json: bool, **options: Any) -> None:
    """Write the samples of shards, in their order, into the one shard OUTPUT.

    OUTPUT is a path or a URL. Its offsets are written beside it, as OUTPUT.idx and OUTPUT.keys. It
    appears when it is complete. Compressed shards are read too, and - is standard input.
    """
    with ended_by_sigterm():
        _show(tools.concat(md5=as_json, **options), as_json)  # only JSON shows the MD5


@_reorders("split", "wds-pipes split 'all/*.tar' parts/ --shares train=0.9,val=0.1")
@urls
@dest
@shares("--shares", "shares", "The splits and their shares, such as train=0.9,val=0.1.", required=True)
def split(**options: Any) -> tools.Report:
    """Divide the samples of shards by the hashes of their keys, such as into train and val.

    A key is in the same split whatever other samples there are, and samples keep their order. DEST
    gets a directory for each split: train/train-000000.tar and so on, with their offsets and
    index.json. --shards is for each split.
    """
    return tools.split(**options)


@_reorders("shuffle", "wds-pipes shuffle 'sorted/*.tar' shuffled/ --seed 7 --memory 1GB -j 4")
@urls
@dest
@click.option("--seed", type=int, default=0, show_default=True, help="Another seed is another order.")
def shuffle(**options: Any) -> tools.Report:
    """Write the samples of all shards in a random order.

    Each sample may come anywhere. The order depends only on the seed and the number of samples.
    """
    return tools.shuffle(**options)


@_reorders(
    "sort",
    "wds-pipes sort 'raw/*.tar' sorted/\nwds-pipes sort 'raw/*.tar' by-width/ --by json:width --memory 1GB",
)
@urls
@dest
@click.option(
    "--by", metavar="FIELD[:NAME]", help="Sort by the value of a field, or by a value in its JSON.  [default: the key]"
)
def sort(**options: Any) -> tools.Report:
    """Write the samples of all shards in the order of their keys, or of a field.

    Values are read as decode_by_ext reads them: cls is a number, txt a text. json:width is a value
    in JSON, json:meta.date one in an object in it. Numbers are sorted by size, texts by their
    characters: 10 before 9. Samples with equal values keep their order.
    """
    return tools.sort(**options)


@_reorders("mix", "wds-pipes mix 'web/*.tar=0.7' 'books/*.tar=0.3' mixed/")
@click.argument("sources", nargs=-1, required=True, metavar="URLS=WEIGHT...")
@dest
@click.option(
    "--exhausted",
    type=click.Choice(["stop", "drop"]),
    default="stop",
    show_default=True,
    help="When the data set that comes next has no more samples: stop, or go on with the others.",
)
def mix(**options: Any) -> tools.Report:
    """Mix the samples of several data sets in exact proportions, as the step mix does.

    URLS are the shards of a data set, such as 'web/*.tar'. At every place, the number of samples of
    each data set differs from its share by less than one; each keeps its order. Shuffle the data
    sets before, if they are sorted.
    """
    return tools.mix(**options)
