"""``wds-pipes ls``, ``head``, ``cat`` and ``get``: look at the samples of shards."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, BinaryIO

import click

from wds_pipes.cli.converting.rows import is_text
from wds_pipes.cli.look.describing import Decoders, Describer
from wds_pipes.cli.look.reading import Sample, ShardWalk, Source, find_sample, shards_of
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
from wds_pipes.codecs.decoding import Decoding
from wds_pipes.codecs.text import decode_text, exact_integer
from wds_pipes.core.words import plain_json
from wds_pipes.errors import SampleError
from wds_pipes.io.outputs import write_small
from wds_pipes.io.urls import redact
from wds_pipes.tar.index import make_opener
from wds_pipes.tar.keys import is_metadata
from wds_pipes.tar.writer import TarWriter


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
        names = {name: new.lower() for old, new in rename.items() for name in old.lower().split(";")}
        start, stop = read_slice(part)
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


def read_slice(text: str | None) -> tuple[int, int | None]:
    """Return the first sample and the one after the last (None: the end) that ``A:B`` names."""
    if text is None:
        return 0, None
    first, colon, last = text.partition(":")
    try:
        start, stop = int(first or 0), int(last) if last else None
        if not colon or start < 0 or (stop is not None and stop < start):
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--slice takes numbers of samples A:B, with A <= B, such as 0:100 or 100:, not {text!r:.80}"
        ) from None
    return start, stop


def renamed(samples: Iterable[Sample], renames: Mapping[str, str]) -> Iterator[Sample]:
    """Yield samples with other names of fields.

    Raises:
        SampleError: two fields of a sample would have one name.
        ValueError: no sample has a field of an old name.
    """
    if not renames:
        yield from samples
        return
    found, sample = False, None
    for sample in samples:
        found = found or not renames.keys().isdisjoint(sample)
        other = {renames.get(name, name): value for name, value in sample.items()}
        if len(other) < len(sample):
            key, url = sample["__key__"], redact(sample["__url__"])
            raise SampleError(
                f"with --rename, two fields of sample {key!r} in shard {url} would have one name: its fields are "
                f"{', '.join(name for name in sample if not is_metadata(name))}",
                key=key,
                url=url,
            )
        yield other
    if sample is not None and not found:
        raise ValueError(f"no sample has field {next(iter(renames))!r}: --rename takes OLD=NEW, such as jpeg=jpg")


def write_tar(samples: Iterable[Sample], stream: BinaryIO) -> None:
    """Write samples as one tar."""
    with TarWriter(stream) as writer:
        for sample in samples:
            writer.write(sample)


def write_lines(samples: Iterable[Sample], stream: BinaryIO, renames: Mapping[str, str]) -> None:
    """Write samples as JSON Lines. Text, numbers and JSON are values; of any other field, and of
    one that cannot be decoded, the bytes are ``{"base64": ...}``. An integer that would not come
    back as its bytes, such as ``007``, is text. A field that was renamed is decoded by its old
    name.
    """
    originals = {new: old for old, new in renames.items()}
    decoders = Decoders(Decoding((), allow_pickle=False, max_image_pixels=1 << 26))
    for sample in samples:
        line = {"__key__": _clean(sample["__key__"]), "__url__": _clean(redact(sample["__url__"]))}
        for name, data in sample.items():
            if is_metadata(name):
                continue
            line[_clean(name)] = _value(data, decoders[originals.get(name, name)])
        stream.write(plain_json(json.dumps(line, ensure_ascii=False, allow_nan=False)).encode() + b"\n")
    stream.flush()


def _clean(name: str) -> str:
    """Return a name as it can be in JSON: bytes that are no UTF-8 become escapes."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _value(data: bytes, decode: Any) -> Any:
    if decode is int and exact_integer(data) is None:
        decode = decode_text
    if decode is not None:
        try:
            value = decode(data)
            json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except Exception:  # whatever a decoder raises, and what is not JSON
            pass
        else:
            if not isinstance(value, tuple):
                return value
    return {"base64": base64.b64encode(data).decode()}


def write_fields(sample: Sample, folder: str) -> list[str]:
    """Write the fields of a sample as files ``KEY.FIELD`` into a directory, and return their
    paths. A ``/`` in a key makes directories, which stay inside of it.
    """
    root, paths = os.path.realpath(folder), []
    for field, data in sample.items():
        if is_metadata(field):
            continue
        name = f"{sample['__key__']}.{field}"
        path = os.path.realpath(os.path.join(root, name))
        if os.path.isabs(name) or not path.startswith(os.path.join(root, "")):
            raise SampleError(
                f"file {name!r} would not be inside of {folder}: write the sample to standard output, as a tar",
                key=sample["__key__"],
            )
        os.makedirs(os.path.dirname(path), exist_ok=True)
        write_small(path, data)
        paths.append(path)
    return paths


def binary_output() -> BinaryIO:
    """Return standard output for bytes.

    Raises:
        ValueError: it is a terminal.
    """
    if sys.stdout.isatty():
        raise ValueError("the output is binary, and standard output is a terminal: write it to a file, > FILE")
    return sys.stdout.buffer
