"""Which decoder a field has: the table by extension, and the specs of ``decode_by_ext``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from wds_pipes.codecs.codec import (
    MAX_DECODED_BYTES,
    TOO_LARGE,
    Codec,
    Decoder,
    Handler,
    by_extension,
    not_allowed,
    of_packed_name,
    plug_in,
)
from wds_pipes.codecs.images import IMAGE_SPECS, image_decoder
from wds_pipes.codecs.resizing import Resize
from wds_pipes.codecs.table import IMAGE, ROWS, SPECS, names_asked
from wds_pipes.errors import mended
from wds_pipes.io import compression


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
        resize: Resize | None = None,
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
        for name, row in ROWS.items():
            if row.unpickle is not None:
                self._known[name] = row.unpickle if allow_pickle else row.decode or _refuse_pickle
            elif row.asked is None or name in asked:
                self._known[name] = row.decode
            elif row.asked == "image" and images is not None:
                self._known[name] = image_decoder(images, max_image_pixels, resize)
        if images is None and resize is not None:
            raise ValueError(
                "size is that of decoded images: also name an image spec, as in decode_by_ext('rgb8', size=224)"
            )
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
