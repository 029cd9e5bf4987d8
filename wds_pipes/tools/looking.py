"""Look at the samples of shards: count them (info), list them (ls), describe the first (head) and
write some or one (cat, get); and their fields decoded, and in words: text as it is, images and
arrays by their shapes.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any, BinaryIO, NamedTuple

from wds_pipes.codecs.codec import IMAGE_FORMATS, IMAGE_STARTS, NotAllowedError, registered_codecs
from wds_pipes.codecs.table import Decoding
from wds_pipes.codecs.text import decode_text
from wds_pipes.core.options import check_count
from wds_pipes.core.words import bytes_shown, plain, plain_json, plural
from wds_pipes.display.text import cut, shape_of, shown
from wds_pipes.errors import SampleError, ShardError, for_commands
from wds_pipes.io.expand import items_of
from wds_pipes.io.open import Opener
from wds_pipes.io.outputs import write_small
from wds_pipes.io.urls import Urls, redact
from wds_pipes.tar.headers import BLOCK, MAX_SIZE
from wds_pipes.tar.index import ShardFacts, find_facts, is_index, make_opener
from wds_pipes.tar.writer import TarWriter
from wds_pipes.tools.progress import Units
from wds_pipes.tools.progress import progress as shown_progress
from wds_pipes.tools.reading import Found, Sample, ShardWalk, Source, fields_of, shards_of, sizes_of

_SHARDS, _SAMPLES = 8, 256  # that are read without whole=True; the samples of each shard
_DESCRIBED = 32  # samples of each shard whose data is read
_KEPT = 10_000  # sizes of a field, of which the median is taken
_MOST_TEXT = 200  # characters
_LARGEST = 64 << 20  # bytes of a field that is decoded to be described


def info(
    urls: Urls,
    *,
    whole: bool = False,
    key_split: str = "first-dot",
    storage_options: dict[str, Any] | None = None,
    progress: bool | None = False,
) -> Summary:
    """Return what is in shards: samples, fields with types and sizes, and where the bytes go.

    Args:
        urls: the shards, or an ``index.json``.
        whole: read all shards to their ends. Otherwise at most 256 samples of each of 8 shards are
            read, and samples are estimated unless an index counts them.
        key_split: as in ``group_by_key``.
        storage_options: how to reach the storage.
        progress: True: show a progress bar, which needs tqdm; None: a line each minute.

    Raises:
        ValueError: nothing matches.
        ShardError: a shard cannot be read, or is damaged.
    """
    return Summary(urls, storage_options, key_split, whole=whole, progress=progress)


def codecs() -> dict[str, str]:
    """Return the package that decodes each image format, with its version."""
    from wds_pipes.codecs.images import decoders_in_use

    return {name: f"{package} {_version(package)}" for name, package in decoders_in_use().items()}


def codec_lines() -> Iterator[str]:
    """Return ``codecs()``, and what resizes images, as lines."""
    formats = codecs()
    width = max(map(len, formats))
    for name, package in formats.items():
        instead = "" if package.startswith("pillow") else ", or pillow what it cannot"
        yield f"{name:{width}}  {package}{instead}"
    yield f"{'size=':{width}}  torch {_version('torch')} for RGB, pillow {_version('pillow')} for the rest"
    if formats["JPEG"].startswith("pillow"):
        yield "JPEG is decoded in less time, to the same pixels, with: pip install 'wds_pipes[images]'"


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version  # only here: it takes a while

    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


@dataclass
class Field:
    """What was seen of a field: the first of its sizes, all their bytes, and what it is."""

    samples: int = 0
    total: int = 0
    least: int = MAX_SIZE
    most: int = 0
    sizes: list[int] = field(default_factory=list)
    kinds: Counter[str] = field(default_factory=Counter)
    example: str = ""

    def add(self, size: int) -> None:
        """Count a field of this size."""
        self.samples += 1
        self.total += size
        self.least, self.most = min(self.least, size), max(self.most, size)
        if len(self.sizes) < _KEPT:
            self.sizes.append(size)

    @property
    def median(self) -> int:
        """The median of the sizes; above 10,000 samples, that of the first 10,000."""
        return sorted(self.sizes)[(len(self.sizes) - 1) // 2]

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        sizes = {"min": self.least, "median": self.median, "max": self.most}
        return {
            "samples": self.samples, "bytes": self.total, **sizes, "types": dict(self.kinds), "example": self.example
        }  # fmt: skip


class Summary:
    """Shards in figures, as ``info`` returns them.

    Attributes:
        shards: the shards.
        samples: how many samples they have.
        exact: whether this number is exact; otherwise it is estimated.
        indexed: whether an index says it.
        sizes: the bytes of each shard; None: not known.
        fields: what was seen of each field.
        parts: the bytes of data, headers, padding, pax headers and others that were read.
        compressions: how many of the shards that were read are compressed, by the format.
        outside: how many files belong to no sample.
        read_shards: how many shards were read.
        read_samples: how many samples were read.
    """

    def __init__(
        self, urls: Urls, storage_options: dict[str, Any] | None, key_split: str, *, whole: bool, progress: bool | None
    ) -> None:
        self.shards = shards_of(urls, storage_options)
        self._options, self._split, self._whole = storage_options, key_split, whole
        self._describer = Describer(most_text=60)
        self.fields: dict[str, Field] = {}
        self.read_samples = self.outside = 0
        self.parts = Counter[str](data=0, headers=0, padding=0, pax=0, other=0)
        self._ended: dict[str, int] = {}  # the samples of each of these shards
        self.compressions = Counter[str]()
        facts = [ShardFacts()] * len(self.shards)
        with contextlib.suppress(ValueError, ShardError, OSError):  # there is no index, or not of these shards
            indexes = [url for url in items_of(urls) if is_index(str(url))]
            facts = list(find_facts(self.shards, indexes or True, self._options))
        self.sizes = sizes_of(self.shards, facts, self._options)
        count = len(self.shards)
        chosen = range(count) if whole else sorted({place * count // _SHARDS for place in range(_SHARDS)})
        self.read_shards = len(chosen)
        opener = make_opener(storage_options, readahead_bytes=8 << 20, connections=4)
        sizes = {str(number): self.sizes[number] or 1 for number in chosen}
        with shown_progress(sum(sizes.values()), "B", show=progress) as advance:
            units = Units(advance, sizes)
            for number in chosen:
                self._read_shard(opener, number, units)
                units.end(str(number))
        # if a shard that was read to its end has another number of samples, the index is old
        self.indexed = all(
            known.samples is not None and self._ended.get(url, known.samples) == known.samples
            for url, known in zip(self.shards, facts, strict=True)
        )
        self.exact = self.indexed or len(self._ended) == len(self.shards)
        self.samples = sum(known.samples or 0 for known in facts) if self.indexed else self._estimate()

    def _read_shard(self, opener: Opener, number: int, units: Units) -> None:
        deep = True
        walk = ShardWalk(opener, self.shards[number], self._split, lambda name: deep)
        count = at = 0
        for sample in walk.samples():
            count += 1
            deep = count < _DESCRIBED
            at = self._add(sample, at)
            units.reach(str(number), at)
            if not self._whole and count == _SAMPLES:
                break
        self.read_samples += count
        self.outside += walk.outside
        if walk.compression:
            self.compressions[walk.compression] += 1
        if walk.ended:
            size = self.sizes[number]
            self._ended[self.shards[number]] = count
            end = walk.bytes if walk.compression or size is None else size
            self.parts["other"] += max(0, end - at)

    def _add(self, sample: Found, at: int) -> int:
        """Add a sample; ``at`` is the end of the one before. Return its end."""
        parts = self.parts
        for member in sample.members:
            found = self.fields.setdefault(member.field, Field())
            found.add(member.size)
            padding = -member.size & (BLOCK - 1)
            parts["other"] += member.start - at
            parts["data"] += member.size
            parts["padding"] += padding
            parts["headers"] += BLOCK
            parts["pax"] += member.end - member.start - BLOCK - member.size - padding
            at = member.end
            if member.data is not None:
                described = self._describer.describe(member.field, member.data)
                found.kinds[described.kind] += 1
                found.example = found.example or described.text
        return at

    def _estimate(self) -> int:
        """Return the number of samples, which is not exact if a shard was not read to its end."""
        known = sum(self._ended.values())
        if self.exact:
            return known
        if self.compressions:  # the bytes of a sample as they are stored are not known
            return known * len(self.shards) // len(self._ended) if self._ended else 0
        taken = self.parts.total()
        return round(sum(size or 0 for size in self.sizes) * self.read_samples / taken) if taken else 0

    @property
    def bytes(self) -> int | None:
        """The size of all shards; None: that of some is not known."""
        sizes = [size for size in self.sizes if size is not None]
        return sum(sizes) if len(sizes) == len(self.sizes) else None

    def as_dict(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        return {
            "shards": len(self.shards),
            "samples": self.samples,
            "samples_exact": self.exact,
            "bytes": self.bytes,
            "index": self.indexed,
            "read": {"shards": self.read_shards, "samples": self.read_samples},
            "fields": {name: seen.as_dict() for name, seen in sorted(self.fields.items())},
            "parts": dict(self.parts),
            "outside": self.outside,
            "compressions": dict(self.compressions),
        }

    def lines(self) -> Iterator[str]:
        """Return the figures as lines of text."""
        about = "" if self.exact else "about "
        size = "of unknown size" if self.bytes is None else bytes_shown(self.bytes)
        source = " (counted by an index)" if self.indexed else ""
        yield f"{plural(len(self.shards), 'shard')}, {about}{plural(self.samples, 'sample')}{source}, {size}"
        if len(self._ended) < len(self.shards):
            yield (
                f"read: {plural(self.read_samples, 'sample')} of {plural(self.read_shards, 'shard')}, the first of "
                f"which is {redact(self.shards[0])}; --all reads all of them"
            )
        if self.compressions:
            kinds = ", ".join(f"{count:,} by {kind}" for kind, count in sorted(self.compressions.items()))
            yield f"compressed shards: {kinds}; the sizes below are of what they unpack to"
        yield ""
        yield from self._table()
        yield ""
        whole = self.parts.total() or 1
        names = {"pax": "pax headers and long names", "other": "end and others"}
        yield "bytes: " + ", ".join(f"{names.get(name, name)} {part / whole:.1%}" for name, part in self.parts.items())
        if self.outside:
            yield f"{plural(self.outside, 'file')} of no sample, which readers leave out"

    def _table(self) -> Iterator[str]:
        rows = [("FIELD", "SAMPLES", "MIN", "MEDIAN", "MAX", "TYPE", "EXAMPLE")]
        for name, seen in sorted(self.fields.items(), key=lambda item: (-item[1].samples, item[0])):
            kind = " or ".join(kind for kind, _ in seen.kinds.most_common(2)) + (" ..." if len(seen.kinds) > 2 else "")
            share = seen.samples / self.read_samples
            part = f"{share:.0%}" if share in (0, 1) or 0.01 <= share <= 0.99 else f"{share:.2%}"
            sizes = map(bytes_shown, (seen.least, seen.median, seen.most))
            rows.append((name[:40] or "(empty)", part, *sizes, kind, seen.example))  # type: ignore[arg-type]
        widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
        for row in rows:
            cells = [f"{text:<{width}}" for text, width in zip(row, widths, strict=False)]
            yield "  ".join([*cells, row[-1]]).rstrip()


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
        line = {b'"__key__"': _name(sample["__key__"]), b'"__url__"': _name(redact(sample["__url__"]))}
        for name, data in fields_of(sample):
            line[_name(name)] = _value(data, decoder_of(originals.get(name, name)))
        stream.write(b"{%b}\n" % b", ".join(map(b": ".join, line.items())))
    stream.flush()


def _json(value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    data = text.encode()  # an error for half of a character
    shown_text = plain_json(text)
    return data if shown_text is text else shown_text.encode()


@lru_cache(4096)
def _name(name: str) -> bytes:
    """Return the JSON of a name: in it, bytes that are no UTF-8 become escapes."""
    return _json(name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))


def exact_integer(data: bytes) -> int | None:
    """The integer of 64 bits that is written as these bytes; None: they are another form of one,
    such as ``007``, or none.
    """
    if len(data) > len(str(-(1 << 63))):
        return None
    try:
        number = int(data)
    except ValueError:
        return None
    return number if str(number).encode() == data and -(1 << 63) <= number < 1 << 63 else None


def _value(data: bytes, decode: Any) -> bytes:
    """Return the JSON of a field."""
    if decode is int and exact_integer(data) is None:
        decode = decode_text
    if decode is not None:
        try:
            value = decode(data)
            text = _json(value)
        except Exception:  # whatever a decoder raises, and what is not JSON
            pass
        else:
            if not isinstance(value, tuple):
                return text
    return b'{"base64": "%b"}' % base64.b64encode(data)


def write_fields(sample: Sample, folder: str) -> list[str]:
    """Write the fields of a sample as files ``KEY.FIELD`` into a directory, and return their
    paths. A ``/`` in a key makes directories, which stay inside of it.
    """
    root, paths = os.path.realpath(folder), []
    for name, data in fields_of(sample):
        file = f"{sample['__key__']}.{name}"
        path = os.path.realpath(os.path.join(root, file))
        if os.path.isabs(file) or not path.startswith(os.path.join(root, "")):
            raise SampleError(
                f"file {file!r} would not be inside of {folder}: write the sample to standard output, as a tar",
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
        note(f"field {field!r} was not decoded: {for_commands(error)}")
    except Exception as error:  # whatever a decoder raises for damaged data
        return f"{' '.join(f'{type(error).__name__}: {for_commands(error)}'.split()):.300}"
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
        if (image := image_header(data)) is not None:
            kind, width, height, mode = image
            return Described(f"{kind} image", f"{kind} {width}x{height} {mode}, {size}")
        if len(data) > _LARGEST:
            return Described("bytes", size)
        try:
            value = self._decoders.decode(field, data)
        except NotAllowedError:
            return Described("bytes", f"{size}, not decoded: unpickling runs code from the data")
        except ImportError as error:
            return Described("bytes", f"{size}, not decoded: {_line(for_commands(error), self._most)}")
        except Exception as error:  # whatever a decoder raises for damaged data
            why = _line(f"{type(error).__name__}: {for_commands(error)}", self._most)
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


class Header(NamedTuple):
    """What the header of an image says: its format, such as ``"JPEG"``, its size in pixels, and its
    mode, such as ``"RGB"``.
    """

    format: str
    width: int
    height: int
    mode: str


def image_header(data: bytes) -> Header | None:
    """Return the header of an image; None: it is none."""
    if not data.startswith(IMAGE_STARTS):  # for other data, Pillow would import all its formats
        return None
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data), formats=IMAGE_FORMATS) as image:
                return Header(str(image.format), image.width, image.height, image.mode)
    except Exception:  # what Pillow raises for damaged headers is of many kinds
        return None
