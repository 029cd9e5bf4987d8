"""``wds-pipes ls``, ``head``, ``cat`` and ``get``: look at the samples of shards."""

from __future__ import annotations

import sys
from functools import partial
from itertools import islice
from typing import Any

import click

from wds_pipes.cli.options import (
    as_json_lines,
    echo,
    echo_json,
    example,
    fields,
    in_one_line,
    key_split,
    renames,
    storage_options,
    urls,
)
from wds_pipes.io.urls import redact
from wds_pipes.tar.keys import is_metadata


@click.command(epilog=example("wds-pipes ls 'train-*.tar' -n 10\nwds-pipes ls --members train-000000.tar"))
@urls
@click.option("--members", is_flag=True, help="List the files of the samples, each with the byte where its data is.")
@click.option("-n", "count", type=click.IntRange(min=0), help="At most this many samples.  [default: all]")
@as_json_lines
@key_split
@storage_options
def ls(
    *, urls: tuple[str, ...], members: bool, count: int | None, as_json: bool, key_split: str, storage_options: Any
) -> None:
    """List samples: the number of each in its shard, the byte where it starts, its size and fields.

    Bytes are those of the tar, after decompression. --json prints a line of JSON for each sample.
    Data is skipped where the storage can seek.
    """
    with in_one_line():
        from wds_pipes.cli.look.reading import ShardWalk, shards_of
        from wds_pipes.tar.index_formats import make_opener

        opener, left = make_opener(storage_options), sys.maxsize if count is None else count
        for url in shards_of(urls, storage_options):
            shown = redact(url)
            for number, sample in enumerate(islice(ShardWalk(opener, url, key_split).samples(), left)):
                if not number and not as_json:
                    echo(shown)
                    echo(f"{'START' if not members else 'DATA':>14}  {'BYTES':>12}  NAME")
                left -= 1
                files = sample.members
                start, end = files[0].start, files[-1].end
                if as_json:
                    of = {one.name: {"offset": one.offset, "size": one.size} for one in files}
                    line = {"shard": shown, "number": number, "key": sample.key, "start": start, "end": end}
                    echo_json({**line, "members": of})
                elif members:
                    for one in files:
                        echo(f"{one.offset:>14,}  {one.size:>12,}  {one.name}")
                else:
                    names = " ".join(one.field for one in files)
                    echo(f"{start:>14,}  {end - start:>12,}  {number} {sample.key}: {names}")


@click.command(epilog=example("wds-pipes head -n 3 s3://bucket/train-000000.tar"))
@urls
@click.option("-n", "count", type=click.IntRange(min=0), default=5, show_default=True, help="How many samples.")
@fields
@key_split
@storage_options
def head(*, urls: tuple[str, ...], count: int, fields: list[str] | None, key_split: str, storage_options: Any) -> None:
    """Show the first samples, decoded: text as it is, images and arrays by their shapes.

    Nothing that could run code is decoded.
    """
    with in_one_line():
        from wds_pipes.cli.look.describing import Describer
        from wds_pipes.cli.look.reading import Source

        describer, shown = Describer(), ""
        for sample in islice(Source(urls, storage_options, key_split, fields).read(), count):
            if (url := redact(sample["__url__"])) != shown:
                shown = url
                echo(shown)
            echo(sample["__key__"])
            for name, data in sample.items():
                if not is_metadata(name):
                    echo(f"  {name}: {describer.describe(name, data).text}")


@click.command(
    epilog=example(
        "wds-pipes cat --slice 0:1000 --fields 'jpg,cls' 'train-*.tar' > first.tar\n"
        "wds-pipes cat --jsonl --fields json 'train-*.tar' | jq .json.caption"
    )
)
@urls
@click.option("--jsonl", is_flag=True, help="Write JSON Lines. Fields that are no text, numbers or JSON are base64.")
@click.option(
    "--slice", "part", metavar="A:B", help="Only samples A to B - 1, counted from 0 over all shards; A: is to the end."
)
@fields
@renames
@key_split
@storage_options
def cat(
    *,
    urls: tuple[str, ...],
    jsonl: bool,
    part: str | None,
    fields: list[str] | None,
    rename: dict[str, str],
    key_split: str,
    storage_options: Any,
) -> None:
    """Write samples to standard output, as one tar or as JSON Lines.

    The data of fields is not changed. The tar is written anew, with the smallest headers. With
    --slice, an index of offsets (wds-pipes index --offsets) saves reading what comes before.
    --rename sees the names that --fields has left.
    """
    with in_one_line():
        from wds_pipes.cli.look.output import binary_output, read_renames, read_slice, renamed, write_lines, write_tar
        from wds_pipes.cli.look.reading import Source

        names, (start, stop) = read_renames(rename), read_slice(part)
        samples = renamed(Source(urls, storage_options, key_split, fields).slice(start, stop), names)
        if jsonl:
            write_lines(samples, sys.stdout.buffer, names)
        else:
            write_tar(samples, binary_output())


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
    *,
    sample: str,
    urls: tuple[str, ...],
    output: str | None,
    field: str | None,
    is_key: bool,
    key_split: str,
    storage_options: Any,
) -> None:
    """Write one sample: the one with a key, or with a number, counted from 0 over all shards.

    SAMPLE is a number if it has only digits and does not start with a zero; --key says otherwise.
    The sample goes to standard output as a tar, or with --field the field alone. The indexes of
    wds-pipes index --offsets find it; without them the shards are read from the beginning.
    """
    with in_one_line():
        from wds_pipes.cli.converting.rows import is_text
        from wds_pipes.cli.look.output import binary_output, write_fields, write_tar
        from wds_pipes.cli.look.reading import find_sample

        number = sample.isdecimal() and sample.isascii() and (sample == "0" or sample[0] != "0") and not is_key
        found = find_sample(
            int(sample) if number else sample, urls, storage_options, key_split, partial(echo, err=True)
        )
        if field is not None:
            if field.lower() not in found or is_metadata(field.lower()):
                has = ", ".join(name for name in found if not is_metadata(name))
                raise ValueError(f"sample {found['__key__']!r} has no field {field!r}; it has {has}")
            found = {name: found[name] for name in ("__key__", "__url__", field.lower())}
        if output is not None:
            for path in write_fields(found, output):
                echo(path)
        elif field is not None:
            data = found[field.lower()]
            stream = sys.stdout.buffer if is_text(data) else binary_output()
            stream.write(data)
            stream.flush()
        else:
            write_tar([found], binary_output())
