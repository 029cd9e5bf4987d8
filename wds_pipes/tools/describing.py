"""Fields decoded, and in words: text as it is, images and arrays by their shapes."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

from wds_pipes.codecs.codec import IMAGE_FORMATS, NotAllowedError, registered_codecs
from wds_pipes.codecs.decoding import Decoding
from wds_pipes.core.words import bytes_shown, plain
from wds_pipes.display.text import cut, shape_of, shown

_MOST_TEXT = 200  # characters
_LARGEST = 64 << 20  # bytes of a field that is decoded to be described


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
