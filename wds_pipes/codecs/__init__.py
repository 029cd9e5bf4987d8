"""Decode fields to objects and encode objects to fields, by extension, with one table each.

Rules:
1. A library that is not a base dependency is imported when the first field needs it. If it is
   missing, the error says what to install.
2. Nothing is unpickled unless the caller allows it, and nothing larger than its limit is unpacked
   or decoded.
3. A decoder takes bytes and returns an object; an encoder takes an object and returns bytes. The
   caller, who knows the sample, wraps the exceptions that they raise.
"""

from wds_pipes.codecs.decoding import DECODERS, Decoding
from wds_pipes.codecs.encoding import ENCODERS, encode
from wds_pipes.codecs.images import IMAGE_SPECS, image_decoder
from wds_pipes.codecs.names import IMAGE, INTEGER, PICKLE, Decoder, Encoder, NotAllowedError

__all__ = [
    "DECODERS",
    "ENCODERS",
    "IMAGE",
    "IMAGE_SPECS",
    "INTEGER",
    "PICKLE",
    "Decoder",
    "Decoding",
    "Encoder",
    "NotAllowedError",
    "encode",
    "image_decoder",
]
