"""The table of codecs: one row for each format, with its decoder and its encoder; which encoder a
field has; and which decoder, by the table and the specs of ``decode_by_ext``.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from wds_pipes.codecs import arrays, media, text
from wds_pipes.codecs.codec import (
    MAX_DECODED_BYTES,
    TOO_LARGE,
    Codec,
    Decoder,
    Encoder,
    Handler,
    add_codec,
    by_extension,
    not_allowed,
    of_packed_name,
    plug_in,
    registered_codecs,
)
from wds_pipes.codecs.images import IMAGE_SPECS, image_decoder, image_encoder
from wds_pipes.codecs.resizing import CenterCrop, RandomCrop, Resize
from wds_pipes.core.options import check_choice
from wds_pipes.errors import mended
from wds_pipes.io import compression


@dataclass(frozen=True, eq=False)
class Row(Codec):
    """A codec of this package.

    Attributes:
        gives: what the decoder returns, in words.
        asked: what must be passed to ``decode_by_ext``, or these fields stay bytes: ``"image"``: an
            image spec; ``"audio"``, ``"video"``; ``"name"``: the extension; None: nothing.
        unpickle: the decoder with ``allow_pickle=True``, if that is another one.
    """

    _: KW_ONLY
    gives: str = ""
    asked: str | None = None
    unpickle: Decoder | None = None


def _image(extensions: str, media_type: str, *, lossy: bool = False) -> Row:
    first = extensions.partition(";")[0]
    return Row(
        extensions,
        image_decoder("rgb8", 1 << 26),  # decode_by_ext makes the one of its image spec
        image_encoder(first),
        media_type=media_type,
        example=_picture,
        lossy=lossy,
        gives="by the image spec",
        asked="image",
    )


def _audio(extensions: str, media_type: str, form: str, deepest: str, *, lossy: bool = True) -> Row:
    """``form``: its name for libsndfile, which encodes it; nothing: it is not encoded."""
    return Row(
        extensions,
        media.audio(),
        media.audio_encoder(form, deepest) if form else None,
        package="av" if form in ("MP3", "") else "soundfile",
        media_type=media_type,
        example=media.audio_example,
        lossy=lossy,
        gives="(float32 array (channels, samples), sample_rate)",
        asked="audio",
    )


def _video(extensions: str, media_type: str, form: str, codec: str) -> Row:
    return Row(
        extensions,
        media.video(),
        media.video_encoder(form, codec),
        package="av",
        media_type=media_type,
        example=media.video_example,
        lossy=True,
        gives="(uint8 array (frames, height, width, 3), frames_per_second)",
        asked="video",
    )


def _picture() -> Any:
    """Four colours, which a palette can hold."""
    picture = np.zeros((16, 24, 3), np.uint8)
    picture[:8, :, 0], picture[:, 12:, 2] = 200, 100
    return picture


def _array() -> Any:
    return np.arange(6, dtype=np.float32).reshape(2, 3)


def _tensors() -> Any:
    import torch

    return {"a": torch.arange(6, dtype=torch.float32).reshape(2, 3), "b": torch.tensor([True, False])}


_OBJECT = {"a": [1, 2.5, None, True], "ü": {"b": "x"}}

TABLE: tuple[Row, ...] = (
    Row(
        "txt;text;transcript;html;htm",
        text.decode_text,
        text.encode_text,
        media_type="text/plain",
        example="Grüße\r\n",
        gives="str",
    ),
    Row(
        "cls;cls2;class;count;index;inx;id", int, text.encode_integer, media_type="text/plain", example=-42, gives="int"
    ),
    Row("json;jsn", text.decode_json, text.encode_json, media_type="application/json", example=_OBJECT, gives="object"),
    Row(
        "jsonl",
        text.decode_lines,
        text.encode_lines,
        media_type="application/jsonl",
        example=[_OBJECT, [2], "x"],
        gives="list of objects",
    ),
    Row(
        "npy",
        arrays.decode_npy,
        arrays.encode_npy,
        media_type="application/x-npy",
        example=_array,
        gives="ndarray",
        unpickle=arrays.pickled_arrays,
    ),
    Row(
        "npz",
        arrays.decode_npz,
        arrays.encode_npz,
        media_type="application/x-npz",
        example=lambda: {"a": _array(), "b": np.arange(3)},
        gives="dict of ndarrays",
        unpickle=arrays.pickled_arrays,
    ),
    Row(
        "ten;tenbin;tb",
        arrays.decode_tenbin,
        arrays.encode_tenbin,
        media_type="application/octet-stream",
        example=lambda: [_array(), np.arange(5, dtype=np.int64)],
        gives="list of ndarrays (the format of webdataset)",
    ),
    Row(
        "mp;msg;msgpack",
        text.decode_msgpack,
        text.encode_msgpack,
        package="msgpack",
        media_type="application/vnd.msgpack",
        example=_OBJECT,
        gives="object",
    ),
    Row(
        "cbor",
        text.decode_cbor,
        text.encode_cbor,
        package="cbor2",
        media_type="application/cbor",
        example=_OBJECT,
        gives="object",
    ),
    Row(
        "safetensors",
        arrays.decode_safetensors,
        arrays.encode_safetensors,
        package="safetensors",
        media_type="application/octet-stream",
        example=_tensors,
        gives="dict of tensors",
    ),
    Row(
        "pt;pth",
        arrays.decode_torch,
        arrays.encode_torch,
        media_type="application/octet-stream",
        example=_tensors,
        gives="what torch.load(weights_only=True) returns",
        unpickle=arrays.pickled_tensors,
    ),
    # Of these, one text has several meanings: a csv with or without a header, a YAML 1.1 "no".
    Row(
        "csv",
        text.decode_csv,
        text.encode_csv,
        media_type="text/csv",
        example=[["a", "b,c", 'd"'], ["1", "", "x\ny"]],
        gives="list of rows of str",
        asked="name",
    ),
    Row(
        "yaml;yml",
        text.decode_yaml,
        text.encode_yaml,
        package="pyyaml",
        media_type="application/yaml",
        example=_OBJECT,
        gives="object",
        asked="name",
    ),
    _image("jpg;jpeg;jpe;jfif", "image/jpeg", lossy=True),
    _image("png;apng", "image/png"),
    _image("webp", "image/webp", lossy=True),
    _image("gif", "image/gif"),
    _image("bmp", "image/bmp"),
    _image("tif;tiff", "image/tiff"),
    _image("ppm;pgm;pbm;pnm", "image/x-portable-anymap"),
    _audio("wav", "audio/wav", "WAV", "FLOAT", lossy=False),
    _audio("flac", "audio/flac", "FLAC", "PCM_24", lossy=False),
    _audio("ogg", "audio/ogg", "OGG", "VORBIS"),
    _audio("opus", "audio/ogg", "OGG", "OPUS"),
    _audio("mp3", "audio/mpeg", "MP3", "MPEG_LAYER_III"),
    _audio("aif;aiff;aifc", "audio/aiff", "AIFF", "FLOAT", lossy=False),
    _audio("w64", "audio/x-w64", "W64", "FLOAT", lossy=False),
    _audio("sph", "audio/x-nist", "NIST", "PCM_24", lossy=False),
    _audio("m4a", "audio/mp4", "", ""),
    _video("mp4;m4v", "video/mp4", "mp4", "libx264"),
    _video("mov", "video/quicktime", "mov", "libx264"),
    _video("mkv", "video/matroska", "matroska", "libx264"),
    _video("webm", "video/webm", "webm", "libvpx-vp9"),
    _video("avi", "video/x-msvideo", "avi", "mpeg4"),
    Row(
        "pyd;pkl;pickle",
        media_type="application/octet-stream",
        gives="refused, unless allow_pickle",
        unpickle=pickle.loads,
    ),
)

ROWS: dict[str, Row] = {name: row for row in TABLE for name in row.names}
SPECS = ("audio", "video")  # what a call passes to decode all fields of a kind


@functools.cache
def names_asked(asked: str) -> frozenset[str]:
    """The extensions of the rows that are decoded if a call asks for them in this way."""
    return frozenset(name for name, row in ROWS.items() if row.asked == asked)


IMAGE = names_asked("image")


def register_codec(codec: Codec) -> Codec:
    """Decode and encode the fields with some extensions by a codec, from here on.

    ``decode_by_ext`` takes the codecs that are registered when the step is built, and they travel
    with the pipe to workers. So its functions must be defined at the top of a module if workers are
    started with spawn or forkserver. ``TarWriter`` takes those that are registered when it writes.
    For a single pipe or writer, pass functions: ``decode_by_ext({"dcm": fn})``,
    ``TarWriter(codecs={"dcm": fn})``.

    Args:
        codec: the codec. It replaces one that was registered for the same extension before, and
            goes before the codecs of installed packages.

    Returns:
        The same codec.

    Raises:
        TypeError: it is not a ``Codec``.
        ValueError: wds_pipes decodes one of the extensions itself.
    """
    if not isinstance(codec, Codec):
        raise TypeError(f"register_codec() takes a Codec, such as Codec('dcm', decode), not {codec!r:.80}")
    if own := [name for name in codec.names if name in ROWS]:
        raise ValueError(
            f"wds_pipes has a codec for {', '.join(own)}: to decode or encode otherwise, pass a function, as in "
            f"decode_by_ext({{{own[0]!r}: function}}) and TarWriter(codecs={{{own[0]!r}: function}})"
        )
    add_codec(codec)
    return codec


class NoEncoderError(TypeError):
    """A field has no encoder for a value that is not bytes."""


def encode(field: str, value: Any, own: Mapping[str, Encoder] | None = None) -> bytes:
    """Encode a field; bytes are returned unchanged.

    The caller's ``own`` encoders are found by the longest matching end of the name, as written
    first: one for ``txt.gz`` compresses by itself.

    If the name ends in ``gz``, ``bz2``, ``xz`` or ``zst``, a value that is not bytes is encoded and
    then compressed, and bytes must be compressed already.

    Raises:
        TypeError: the value does not suit the field, or the field has no encoder and the value is
            not bytes.
        ValueError: the value would not be read back: a str that is not JSON, bytes that are not
            compressed as the name says, more layers or bytes than are unpacked.
        ImportError: the codec of an installed package cannot be used.
    """
    encoder, name, packed = of_packed_name(own or {}, field)
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        if packed and compression.detect(data[: compression.MAGIC_BYTES]) != packed[0]:
            raise ValueError(
                f"its bytes are not compressed as {packed[0]}, which its name promises: compress them, or name the "
                f"field without .{packed[0]}"
            )
        return data
    if encoder is None:
        extension = name.rpartition(".")[2]
        codec = ROWS.get(extension) or registered_codecs().get(extension) or plug_in(extension)
        encoder = None if codec is None else codec.encode
    if encoder is None:
        mend = f"pass bytes{' (text.encode())' if isinstance(value, str) else ''}"
        others = f", or use one of {', '.join(sorted(name for name, row in ROWS.items() if row.encode))}"
        raise mended(
            NoEncoderError,
            f"there is no encoder for {field!r} and {type(value).__name__}",
            mend=f"{mend}, a function, as in codecs={{{name!r}: function}}{others}",
            mend_cli=f"{mend}{others}",
        )
    data = encoder(value)
    if not isinstance(data, bytes):
        raise TypeError(f"its encoder returned {type(data).__name__}, not bytes")
    if packed and len(data) > MAX_DECODED_BYTES:
        raise ValueError(f"it has more than {MAX_DECODED_BYTES} bytes, which are not unpacked when it is read")
    for kind in reversed(packed):
        data = compression.compress_bytes(data, kind)
    return data


def _refuse(data: bytes) -> Any:
    raise LookupError(
        "there is no decoder for it: name an image spec, such as 'rgb8', if it is an image, 'audio' or 'video', or "
        "pass a function for its extension, such as bytes"
    )


def _refuse_pickle(data: bytes) -> Any:
    raise not_allowed()


def unpack(data: bytes, kind: str) -> bytes:
    """Unpack a compressed field; ValueError if it is larger than MAX_DECODED_BYTES."""
    content = compression.decompress_bytes(data, kind, MAX_DECODED_BYTES)
    if content is None:
        raise ValueError(TOO_LARGE.format(MAX_DECODED_BYTES))
    return content


class Decoding:
    """Chooses the decoder of a field, by the specs of ``decode_by_ext``.

    Args:
        specs: the specs.
        allow_pickle: whether pickles are decoded.
        max_image_pixels: of the images that are decoded.
        must_decode: whether a field without a decoder is an error.
        registered: the codecs that the caller registered, by extension.
        resize: what images are resized to; None: nothing.
        pages, upright, boxes, sample_rate, mono: see ``decode_by_ext``.
        rng: returns the random generator of the sample that is decoded; only for a RandomCrop.

    Raises:
        ValueError: a spec is unknown, or two specs are for images.
        TypeError: a spec is neither a name nor a dict of functions nor a function of key and data.
    """

    def __init__(
        self,
        specs: tuple[str | Mapping[str, Decoder | Codec] | Handler, ...],
        *,
        allow_pickle: bool,
        max_image_pixels: int,
        must_decode: bool = False,
        registered: Mapping[str, Codec] | None = None,
        resize: Resize | RandomCrop | None = None,
        pages: str | None = None,
        upright: bool = False,
        boxes: bool = False,
        sample_rate: int | None = None,
        mono: bool = False,
        rng: Callable[[], np.random.Generator] | None = None,
    ) -> None:
        self._must_decode = must_decode
        self._own: dict[str, Decoder] = {}
        self._handlers: list[Handler] = []
        self._before_images: int | None = None  # how many of the handlers stand before the image spec
        self._known: dict[str, Decoder | None] = {name: codec.decode for name, codec in (registered or {}).items()}
        images: str | None = None
        asked: set[str] = set()  # extensions
        for spec in specs:
            if isinstance(spec, Mapping):
                self._own.update(by_extension(spec, "decode"))
            elif callable(spec):
                self._handlers.append(_checked(spec))
            elif not isinstance(spec, str):
                raise TypeError(
                    f"a spec is a name, a dict of functions by extension, or a function fn(key, data), not {spec!r:.80}"
                )
            elif spec in SPECS:
                asked |= names_asked(spec)
            elif spec in names_asked("name"):
                asked.add(spec)
            elif spec in IMAGE_SPECS and images is None:
                images, self._before_images = spec, len(self._handlers)
            elif spec in IMAGE_SPECS:
                raise ValueError(
                    f"images cannot be both {images!r} and {spec!r}: choose one, or give a function by extension"
                )
            else:
                mend = f"use one of {', '.join([*sorted(IMAGE_SPECS), *sorted({*SPECS, *names_asked('name')})])}"
                raise mended(
                    ValueError, f"unknown spec {spec!r}", mend=f"{mend}, or {{'ext': function}}", mend_cli=mend
                )
        audio = media.audio(sample_rate=sample_rate, mono=mono)
        if (sample_rate is not None or mono) and "wav" not in asked:
            raise ValueError("sample_rate and mono are for decoded audio: also name it, as in decode_by_ext('audio')")
        for name, row in ROWS.items():
            if row.unpickle is not None:
                self._known[name] = row.unpickle if allow_pickle else row.decode or _refuse_pickle
            elif row.asked is None or name in asked:
                self._known[name] = row.decode if row.asked != "audio" else audio
            elif row.asked == "image" and images is not None:
                self._known[name] = image_decoder(
                    images, max_image_pixels, resize, pages=pages, upright=upright, boxes=boxes, rng=rng
                )
        if images is None and resize is not None:
            raise ValueError(
                "size is that of decoded images: also name an image spec, as in decode_by_ext('rgb8', size=224)"
            )
        if pages is not None and check_choice("pages", pages, "all") and images != "raw":
            raise ValueError("pages='all' returns all pages as they are stored: use it with the image spec 'raw'")
        if upright and images in (None, "raw"):
            raise ValueError("upright=True turns decoded images: also name an image spec, one other than 'raw'")
        if boxes and not isinstance(resize, (CenterCrop, RandomCrop)):
            raise ValueError("boxes=True yields which parts of images are cropped: pass crop='random' or 'center'")
        if images == "raw" and resize is not None:
            raise ValueError("'raw' returns images as they are stored: leave out size=, or name another image spec")

    def decoder(self, field: str) -> Decoder | None:
        """The decoder of a field, or None if the field is not decoded.

        The caller's own decoders are found by the longest matching end of the name, those of the
        table by the last part of the name. Between them stand the caller's functions of key and
        data, after or before the image spec as in the call.

        Raises:
            ValueError: by its name, the field is packed more than MAX_PACKED times.
        """
        own, name, packed = of_packed_name(self._own, field)
        last = name.rpartition(".")[2]
        decode = own or self._of_table(last) or (_refuse if self._must_decode else None)
        handlers = self._handlers[: self._before_images] if last in IMAGE else self._handlers
        if handlers and own is None:
            decode = _first_result(handlers, f".{name}", decode)
        if not packed:
            return decode

        def unpack_and_decode(data: bytes) -> Any:
            for kind in packed:
                data = unpack(data, kind)
            return data if decode is None else decode(data)

        return unpack_and_decode

    def _of_table(self, extension: str) -> Decoder | None:
        """The decoder of the table, of a registered codec, or of an installed package."""
        if extension in self._known or extension in ROWS:
            return self._known.get(extension)
        codec = plug_in(extension)
        return None if codec is None else codec.decode


def _checked(handler: Handler) -> Handler:
    """Return a function if it can be called with key and data."""
    try:
        inspect.signature(handler).bind("", b"")
    except TypeError as error:
        raise TypeError(
            f"decode_by_ext() takes functions fn(key, data), not {handler!r:.80} ({error}); a function of the data "
            "alone is passed by extension, as {'ext': fn}"
        ) from error
    except ValueError:  # some functions of C have no signature
        pass
    return handler


def _first_result(handlers: Sequence[Handler], key: str, decode: Decoder | None) -> Decoder:
    """Return a decoder that tries functions of key and data, and at last ``decode``."""

    def first_result(data: bytes) -> Any:
        for handler in handlers:
            if (result := handler(key, data)) is not None:
                return result
        return data if decode is None else decode(data)

    return first_result
