"""The decoders of fields, each made when it is first needed."""

from __future__ import annotations

import warnings
from collections.abc import Callable

from wds_pipes.codecs.codec import registered_codecs
from wds_pipes.codecs.decoding import Decoding
from wds_pipes.codecs.names import Decoder, NotAllowedError


class Decoders(dict[str, Decoder | None]):
    """The decoders by field; None: the field stays bytes."""

    def __init__(self, decoding: Decoding) -> None:
        super().__init__()
        self._decoding = decoding

    def __missing__(self, field: str) -> Decoder | None:
        if len(self) > 4096:  # so that hostile names do not fill the memory
            self.clear()
        self[field] = decoder = self._decoding.decoder(field)
        return decoder


def of_all_fields() -> Decoders:
    """Return the decoders with which fields are checked: nothing that could run code."""
    specs = ("rgb8", "audio", "video")
    return Decoders(Decoding(specs, allow_pickle=False, max_image_pixels=1 << 26, registered=registered_codecs()))


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
        decode = decoders[field]
        if decode is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                decode(data)
    except NotAllowedError:
        note(f"field {field!r} was not decoded: unpickling can run code")
    except ImportError as error:
        note(f"field {field!r} was not decoded: {error}")
    except Exception as error:  # whatever a decoder raises for damaged data
        return f"{' '.join(f'{type(error).__name__}: {error}'.split()):.300}"
    return None
