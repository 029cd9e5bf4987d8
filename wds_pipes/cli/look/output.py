"""What ``cat`` and ``get`` write: samples as a tar or as JSON Lines, and fields as files."""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, BinaryIO

from wds_pipes.cli.look.describing import Decoders
from wds_pipes.codecs.decoding import Decoding
from wds_pipes.codecs.text import decode_text, exact_integer
from wds_pipes.core.words import plain_json
from wds_pipes.errors import SampleError
from wds_pipes.io.outputs import write_small
from wds_pipes.io.urls import redact
from wds_pipes.tar.keys import is_metadata
from wds_pipes.tar.writer import TarWriter

Sample = dict[str, Any]


def read_renames(given: Mapping[str, str]) -> dict[str, str]:
    """Return the new names of fields by their old ones, of which ``;`` divides several."""
    return {name: new.lower() for old, new in given.items() for name in old.lower().split(";")}


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
