"""Fields in words: text as it is, images and arrays by their shapes."""

from __future__ import annotations

import io
import warnings
from typing import Any, NamedTuple

from wds_pipes.cli.look.decoders import Decoders
from wds_pipes.codecs.codec import registered_codecs
from wds_pipes.codecs.decoding import Decoding
from wds_pipes.codecs.names import IMAGE_FORMATS, NotAllowedError
from wds_pipes.core.words import bytes_shown, plain
from wds_pipes.display.text import cut, shape_of

_MOST_TEXT = 200  # characters
_LARGEST = 64 << 20  # bytes of a field that is decoded to be described


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
        self._decoders = Decoders(
            Decoding(("audio",), allow_pickle=False, max_image_pixels=1 << 26, registered=registered_codecs())
        )
        self._most = most_text

    def describe(self, field: str, data: bytes) -> Described:
        """Return a field in words; of one that cannot be decoded, why."""
        size = bytes_shown(len(data))
        if (image := _image(data)) is not None:
            return Described(f"{image[0]} image", f"{image[0]} {image[1]}, {size}")
        if len(data) > _LARGEST:
            return Described("bytes", size)
        try:
            value = self._decode(field, data)
        except NotAllowedError:
            return Described("pickle", f"{size}, not decoded: pickles can run code")
        except ImportError as error:
            return Described("bytes", f"{size}, not decoded: {_line(str(error), self._most)}")
        except LookupError as error:
            return Described("undecodable", f"{size}, cannot be decoded: {_line(repr(error), self._most)}")
        except Exception as error:  # whatever a decoder raises for damaged data
            why = _line(f"{type(error).__name__}: {error}", self._most)
            return Described("undecodable", f"{size}, cannot be decoded: {why}")
        return self._in_words(value, size)

    def _decode(self, field: str, data: bytes) -> Any:
        decode = self._decoders[field]
        if decode is None:
            return data
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return decode(data)

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
        if isinstance(value, dict) and value and all(shape_of(item) is not None for item in value.values()):
            shapes = ", ".join(f"{name}: {shape_of(item)}" for name, item in value.items())
            return Described("arrays", f"{_line(shapes, self._most)}, {size}")
        if isinstance(value, list) and value and all(shape_of(item) is not None for item in value):
            return Described("arrays", f"{_line(', '.join(str(shape_of(item)) for item in value), self._most)}, {size}")
        if isinstance(value, (bytes, bytearray)):
            return Described("bytes", size)
        return Described("object", _line(repr(value), self._most))


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
