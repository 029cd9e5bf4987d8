"""Look at the samples of shards: list them, describe the first, write some or one; and their fields
decoded, and in words: text as it is, images and arrays by their shapes.
"""

from __future__ import annotations

import base64
import io
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

from wds_pipes.codecs.codec import IMAGE_FORMATS, NotAllowedError, registered_codecs
from wds_pipes.codecs.decoding import Decoding
from wds_pipes.codecs.text import decode_text, exact_integer
from wds_pipes.core.options import check_count
from wds_pipes.core.words import bytes_shown, plain, plain_json
from wds_pipes.display.text import cut, shape_of, shown
from wds_pipes.errors import SampleError
from wds_pipes.io.outputs import write_small
from wds_pipes.io.urls import Urls, redact
from wds_pipes.tar.index import make_opener
from wds_pipes.tar.writer import TarWriter
from wds_pipes.tools.reading import Found, Sample, ShardWalk, Source, fields_of, shards_of

_MOST_TEXT = 200  # characters
_LARGEST = 64 << 20  # bytes of a field that is decoded to be described


def ls(
    urls: Urls,
    *,
    key_split: str = "first-dot",
    concatenated: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> Iterator[Found]:
    """Yield the samples of shards, with the place and size of each file. Their data is skipped
    where the storage can seek.

    Args:
        urls: the shards, or an ``index.json``.
        key_split: as in ``group_by_key``.
        concatenated: as in ``load_tar``.
        storage_options: how to reach the storage.

    Raises:
        ValueError: nothing matches.
        ShardError: a shard cannot be read, or is damaged.
    """
    opener = make_opener(storage_options)
    for url in shards_of(urls, storage_options):
        yield from ShardWalk(opener, url, key_split, concatenated=concatenated).samples()


class Shown(NamedTuple):
    """A sample in words.

    Attributes:
        url: its shard, without credentials.
        key: its key.
        fields: its fields, each in a line of text.
    """

    url: str
    key: str
    fields: dict[str, str]

    def as_dict(self) -> dict[str, str]:
        """Return the sample for JSON."""
        return {"__key__": self.key, "__url__": self.url, **self.fields}

    def lines(self, *, with_url: bool) -> list[str]:
        """Return the sample as lines."""
        return [*([self.url] * with_url), self.key, *(f"  {name}: {text}" for name, text in self.fields.items())]


def head(
    urls: Urls,
    count: int = 5,
    *,
    fields: Sequence[str] | None = None,
    key_split: str = "first-dot",
    storage_options: dict[str, Any] | None = None,
) -> Iterator[Shown]:
    """Yield the first samples with their fields in words: text as it is, images and arrays by
    their shapes. Nothing that could run code is decoded.

    Args:
        urls: the shards, or an ``index.json``.
        count: how many samples.
        fields: the fields, in lower case; None: all.
        key_split: as in ``group_by_key``.
        storage_options: how to reach the storage.

    Raises:
        ValueError: nothing matches, or ``count`` is negative.
        ShardError, SampleError: a shard cannot be read, or is damaged.
    """
    check_count("count", count, least=0)
    describer = Describer()
    for sample in islice(Source(urls, storage_options, key_split, fields).read(), count):
        described = {name: describer.describe(name, data).text for name, data in fields_of(sample)}
        yield Shown(redact(sample["__url__"]), sample["__key__"], described)


def cat(
    urls: Urls,
    stream: BinaryIO,
    *,
    jsonl: bool = False,
    start: int = 0,
    stop: int | None = None,
    fields: Sequence[str] | None = None,
    rename: Mapping[str, str] | None = None,
    key_split: str = "first-dot",
    storage_options: dict[str, Any] | None = None,
) -> None:
    """Write samples to a stream, as one tar or as JSON Lines.

    The data of fields is not changed. The tar is written anew, with the smallest headers.

    Args:
        urls: the shards, or an ``index.json``.
        stream: a binary stream.
        jsonl: write JSON Lines, in which fields that are no text, numbers or JSON are base64.
        start: the number of the first sample, counted over all shards. Indexes of offsets beside
            the shards save reading what comes before.
        stop: the number after the last one; None: to the end.
        fields: the fields to write, in lower case; None: all.
        rename: new names of fields by the old ones, which may be several, as in ``jpg;jpeg``.
        key_split: as in ``group_by_key``.
        storage_options: how to reach the storage.

    Raises:
        ValueError: nothing matches, ``start`` or ``stop`` does not fit, or no sample has a field to
            rename.
        ShardError, SampleError: a shard cannot be read, or is damaged; or two fields would have one
            name.
    """
    check_count("start", start, least=0)
    if stop is not None:
        check_count("stop", stop, least=start)
    names = {name: new.lower() for old, new in (rename or {}).items() for name in old.lower().split(";")}
    samples = renamed(Source(urls, storage_options, key_split, fields).slice(start, stop), names)
    if jsonl:
        write_lines(samples, stream, names)
    else:
        write_tar(samples, stream)


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
                f"{', '.join(name for name, _ in fields_of(sample))}",
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
    decoding = Decoding((), allow_pickle=False, max_image_pixels=1 << 26)
    decoder_of = lru_cache(4096)(decoding.decoder)  # bounded, since names may be hostile
    for sample in samples:
        line = {"__key__": _clean(sample["__key__"]), "__url__": _clean(redact(sample["__url__"]))}
        for name, data in fields_of(sample):
            line[_clean(name)] = _value(data, decoder_of(originals.get(name, name)))
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
    for field, data in fields_of(sample):
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


class Decoders:
    """The decoders of fields, by ``specs`` as of ``decode_by_ext``. Nothing that could run code is
    decoded.
    """

    def __init__(self, *specs: str) -> None:
        decoding = Decoding(specs, allow_pickle=False, max_image_pixels=1 << 26, registered=registered_codecs())
        self._decoder_of = lru_cache(4096)(decoding.decoder)  # bounded, since names may be hostile

    def decode(self, field: str, data: bytes) -> Any:
        """Return a field decoded, or its bytes, without the warnings of a library."""
        decoder = self._decoder_of(field)
        if decoder is None:
            return data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return decoder(data)


def of_all_fields() -> Decoders:
    """Return the decoders with which fields are checked."""
    return Decoders("rgb8", "audio", "video")


def fault_of(
    decoders: Decoders, field: str, data: bytes, note: Callable[[str], None] = lambda text: None
) -> str | None:
    """Return why a field cannot be decoded, in a line; None: it can be.

    Args:
        decoders: the decoders.
        field: the name of the field.
        data: its bytes.
        note: called with why it was not decoded, if that is not the fault of the data.
    """
    try:
        decoders.decode(field, data)
    except NotAllowedError:
        note(f"field {field!r} was not decoded: unpickling can run code")
    except ImportError as error:
        note(f"field {field!r} was not decoded: {error}")
    except Exception as error:  # whatever a decoder raises for damaged data
        return f"{' '.join(f'{type(error).__name__}: {error}'.split()):.300}"
    return None


class Described(NamedTuple):
    """A field in words.

    Attributes:
        kind: what it is, such as ``"JPEG image"``: the same for all fields of one kind.
        text: its content, in a line: the text itself, or ``"JPEG 640x480 RGB, 107 kB"``.
    """

    kind: str
    text: str


class Describer:
    """Describes fields. Nothing that could run code is decoded."""

    def __init__(self, most_text: int = _MOST_TEXT) -> None:
        self._decoders, self._most = Decoders("audio"), most_text

    def describe(self, field: str, data: bytes) -> Described:
        """Return a field in words; of one that cannot be decoded, why."""
        size = bytes_shown(len(data))
        if (image := _image(data)) is not None:
            return Described(f"{image[0]} image", f"{image[0]} {image[1]}, {size}")
        if len(data) > _LARGEST:
            return Described("bytes", size)
        try:
            value = self._decoders.decode(field, data)
        except (NotAllowedError, ImportError) as error:
            return Described("bytes", f"{size}, not decoded: {_line(str(error), self._most)}")
        except Exception as error:  # whatever a decoder raises for damaged data
            why = _line(f"{type(error).__name__}: {error}", self._most)
            return Described("undecodable", f"{size}, cannot be decoded: {why}")
        return self._in_words(value, size)

    def _in_words(self, value: Any, size: str) -> Described:
        if isinstance(value, str):
            return Described("text", _line(value, self._most))
        if isinstance(value, bool | int | float):
            return Described("integer" if isinstance(value, int) else "number", str(value))
        if (shape := shape_of(value)) is not None:
            return Described(shape, f"{shape}, {size}")
        if isinstance(value, tuple) and len(value) == 2 and (shape := shape_of(value[0])) is not None:
            rate = value[1]
            seconds = f", {value[0].shape[-1] / rate:.3g} s" if isinstance(rate, int) and rate else ""
            return Described("audio", f"audio {tuple(value[0].shape)} at {rate} Hz{seconds}, {size}")
        if isinstance(value, (bytes, bytearray)):
            return Described("bytes", size)
        return Described("object", _line(shown(value, limit=self._most), self._most))


def _line(text: str, most: int) -> str:
    return plain(cut(" ".join(text[: 4 * most].split()) + (" ..." if len(text) > 4 * most else ""), most))


def _image(data: bytes) -> tuple[str, str] | None:
    """Return the format of an image, and its width, height and mode; None: it is none. Only the
    header is read.
    """
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
                return str(image.format), f"{image.width}x{image.height} {image.mode}"
    except Exception:  # what Pillow raises for damaged headers is of many kinds
        return None
