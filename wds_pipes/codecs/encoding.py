"""Which encoder a field has: the table by extension, and the functions of the caller."""

from __future__ import annotations

from typing import Any

from wds_pipes.codecs.codec import ByExtension, plug_in, registered_codecs
from wds_pipes.codecs.names import MAX_DECODED_BYTES, MAX_PACKED, PACKED, Encoder
from wds_pipes.codecs.table import ROWS
from wds_pipes.io import compression


class NoEncoderError(TypeError):
    """A field has no encoder for a value that is not bytes."""


def encode(field: str, value: Any, own: ByExtension[Encoder] | None = None) -> bytes:
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
    name, packed = field.lower(), []
    own = own or ByExtension()
    while (encoder := own.find(name)) is None and (kind := PACKED.get(name.rpartition(".")[2])) is not None:
        packed.append(kind)
        name = name.rpartition(".")[0]
    if len(packed) > MAX_PACKED:
        raise ValueError(f"it is packed more than {MAX_PACKED} times by its name, which is not read back")
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
        raise NoEncoderError(
            f"there is no encoder for {field!r} and {type(value).__name__}: pass bytes"
            f"{' (text.encode())' if isinstance(value, str) else ''}, a function, as in codecs={{{name!r}: function}}, "
            f"or use one of {', '.join(sorted(name for name, row in ROWS.items() if row.encode))}"
        )
    data = encoder(value)
    if not isinstance(data, bytes):
        raise TypeError(f"its encoder returned {type(data).__name__}, not bytes")
    if packed and len(data) > MAX_DECODED_BYTES:
        raise ValueError(f"it has more than {MAX_DECODED_BYTES} bytes, which are not unpacked when it is read")
    for kind in reversed(packed):
        data = compression.compress_bytes(data, kind)
    return data
