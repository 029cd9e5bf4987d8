"""Which decoder a field has: a table by extension, and the specs of ``decode_by_ext``."""

from __future__ import annotations

import csv
import functools
import inspect
import io
import json
import pickle
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from wds_pipes.codecs.arrays import (
    decode_npy,
    decode_npz,
    decode_tenbin,
    decode_torch,
    pickled_arrays,
    pickled_npz,
    pickled_tensors,
)
from wds_pipes.codecs.images import IMAGE_SPECS, image_decoder
from wds_pipes.codecs.names import (
    IMAGE,
    INTEGER,
    MAX_DECODED_BYTES,
    MAX_MERGED,
    MAX_PACKED,
    NOT_DECODED,
    ON_REQUEST,
    PACKED,
    PICKLE,
    TEXT,
    TOO_LARGE,
    UNPICKLING,
    Decoder,
    Handler,
    NotAllowedError,
)
from wds_pipes.codecs.resizing import Resize
from wds_pipes.core.importing import library
from wds_pipes.io import compression


def _lines(data: bytes) -> list[Any]:
    return [json.loads(line) for line in data.splitlines() if line.strip()]


def _msgpack(data: bytes) -> Any:
    return library("msgpack", "msgpack", "a MessagePack field").unpackb(data)


def _cbor(data: bytes) -> Any:
    return library("cbor2", "cbor2", "a CBOR field").loads(data)


def _safetensors(data: bytes) -> Any:
    tensors = library("safetensors.torch", "safetensors", "a safetensors field").load(data)
    return dict(sorted(tensors.items()))  # the library returns them in another order at each call


def _yaml(data: bytes) -> Any:
    yaml = library("yaml", "pyyaml", "a YAML field")
    return yaml.load(data, _yaml_loader(yaml))


@functools.cache
def _yaml_loader(yaml: Any) -> Any:
    """PyYAML's safe loader with a limit on the pairs that merge keys (``<<``) add.

    With merge keys, a short text may multiply its content.
    """

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        def flatten_mapping(self, node: Any) -> None:
            pairs = 0
            for key, value in node.value:
                if key.tag == "tag:yaml.org,2002:merge":
                    for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                        if isinstance(merged, yaml.MappingNode):
                            self.flatten_mapping(merged)
                            pairs += len(merged.value)
            if pairs > MAX_MERGED:
                raise ValueError(f"its merge keys (<<) bring more than {MAX_MERGED:,} pairs into one mapping")
            super().flatten_mapping(node)

    return Loader


DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(TEXT, lambda data: data.decode("utf-8")),
    **dict.fromkeys(INTEGER, int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "jsonl": _lines,
    "npy": decode_npy,
    "npz": decode_npz,
    **dict.fromkeys(("ten", "tenbin", "tb"), decode_tenbin),
    **dict.fromkeys(("mp", "msg", "msgpack"), _msgpack),
    "cbor": _cbor,
    "safetensors": _safetensors,
    **dict.fromkeys(("pt", "pth"), decode_torch),
    "csv": lambda data: list(csv.reader(io.StringIO(data.decode("utf-8"), newline=""))),
    **dict.fromkeys(("yaml", "yml"), _yaml),
}


def _refuse(data: bytes) -> Any:
    raise LookupError(
        "there is no decoder for it: name an image spec, such as 'rgb8', if it is an image, or pass a function for its "
        "extension, such as bytes"
    )


def _refuse_pickle(data: bytes) -> Any:
    raise NotAllowedError(UNPICKLING)


def unpack(data: bytes, kind: str) -> bytes:
    """Unpack a compressed field; ValueError if it is larger than MAX_DECODED_BYTES."""
    content = compression.decompress_bytes(data, kind, MAX_DECODED_BYTES)
    if content is None:
        raise ValueError(TOO_LARGE.format(MAX_DECODED_BYTES))
    return content


_warned: set[str] = set()  # extensions, in this process


def _warn_of_bytes(field: str, extension: str, spec: str, data: bytes) -> bytes:
    """Return ``data``; warn once that a field that looks like an image stays bytes."""
    if extension not in _warned:
        _warned.add(extension)
        warnings.warn(
            f"field {field!r} looks like an image and stays bytes: there is no decoder for {extension}. Pass a "
            f"function of the bytes, decode_by_ext({spec!r}, {{{extension!r}: function}}), or leave the field out.",
            stacklevel=2,
        )
    return data


class Decoding:
    """Chooses the decoder of a field, by the specs of ``decode_by_ext``.

    Raises:
        ValueError: a spec is unknown, or two specs are for images.
        TypeError: a spec is neither a name nor a dict of functions nor a function of key and data.
    """

    def __init__(
        self,
        specs: tuple[str | Mapping[str, Decoder] | Handler, ...],
        *,
        allow_pickle: bool,
        max_image_pixels: int,
        must_decode: bool = False,
        resize: Resize | None = None,
    ) -> None:
        self._must_decode = must_decode
        self._own: dict[str, Decoder] = {}
        self._handlers: list[Handler] = []
        self._before_images: int | None = None  # how many of the handlers stand before the image spec
        self._known = {name: decode for name, decode in DECODERS.items() if name not in ON_REQUEST}
        images: str | None = None
        for spec in specs:
            if isinstance(spec, Mapping):
                for name, decode in spec.items():
                    if not isinstance(name, str) or not callable(decode):
                        raise TypeError(f"a decoder is given as {{'ext': function}}, not {name!r}: {decode!r}")
                    self._own.update({each.lower().lstrip("."): decode for each in name.split(";")})
            elif callable(spec):
                self._handlers.append(_checked(spec))
            elif not isinstance(spec, str):
                raise TypeError(
                    f"a spec is a name, a dict of functions by extension, or a function fn(key, data), not {spec!r:.80}"
                )
            elif spec in ON_REQUEST:
                self._known[spec] = DECODERS[spec]
            elif spec in IMAGE_SPECS and images is None:
                images, self._before_images = spec, len(self._handlers)
            elif spec in IMAGE_SPECS:
                raise ValueError(
                    f"images cannot be both {images!r} and {spec!r}: choose one, or give a function by extension"
                )
            else:
                raise ValueError(
                    f"unknown spec {spec!r}: use one of {', '.join(sorted(IMAGE_SPECS))}, "
                    f"{', '.join(sorted(ON_REQUEST))}, or {{'ext': function}}"
                )
        self._parts = max((name.count(".") + 1 for name in self._own), default=0)
        if images is not None:
            self._known.update({name: image_decoder(images, max_image_pixels, name, resize) for name in IMAGE})
        elif resize is not None:
            raise ValueError(
                "size is that of decoded images: also name an image spec, as in decode_by_ext('rgb8', size=224)"
            )
        self._images = images
        if allow_pickle:
            self._known.update(
                {
                    **dict.fromkeys(PICKLE, pickle.loads),
                    "npy": pickled_arrays,
                    "npz": pickled_npz,
                    "pt": pickled_tensors,
                    "pth": pickled_tensors,
                }
            )
        else:
            self._known.update(dict.fromkeys(PICKLE, _refuse_pickle))

    def decoder(self, field: str) -> Decoder | None:
        """The decoder of a field, or None if the field is not decoded.

        The caller's own decoders are found by the longest matching end of the name, those of the
        table by the last part of the name. Between them stand the caller's functions of key and
        data, after or before the image spec as in the call.

        Raises:
            ValueError: by its name, the field is packed more than MAX_PACKED times.
        """
        name, packed = field.lower(), []
        while True:
            last = name.rpartition(".")[2]
            own = self._of_caller(name)
            if own is not None or last not in PACKED:
                break
            packed.append(PACKED[last])
            if len(packed) > MAX_PACKED:
                raise ValueError(f"it is packed more than {MAX_PACKED} times by its name")
            name = name[: -len(last) - 1]
        decode = own or self._known.get(last) or (_refuse if self._must_decode else None)
        handlers = self._handlers[: self._before_images] if last in IMAGE else self._handlers
        if decode is None and self._images is not None and last in NOT_DECODED:
            stays = functools.partial(_warn_of_bytes, field, last, self._images)
            if handlers:
                decode = stays  # called if none of them takes the field
            else:
                stays(b"")
        if handlers and own is None:
            decode = _first_result(handlers, f".{name}", decode)
        if not packed:
            return decode

        def unpack_and_decode(data: bytes) -> Any:
            for kind in packed:
                data = unpack(data, kind)
            return data if decode is None else decode(data)

        return unpack_and_decode

    def _of_caller(self, name: str) -> Decoder | None:
        """The caller's own decoder of a field, or None.

        At most as many parts of the name are compared as the caller's longest extension has.
        """
        if not self._own:
            return None
        parts = name.rsplit(".", self._parts)
        parts = parts[-self._parts :] if len(parts) > self._parts else parts
        return next(
            (own for start in range(len(parts)) if (own := self._own.get(".".join(parts[start:]))) is not None), None
        )


def _checked(handler: Handler) -> Handler:
    """Return a function if it takes key and data, both of them required."""
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return handler  # of an extension module
    try:
        signature.bind("", b"")
        required = [each for each in signature.parameters.values() if each.default is each.empty]
        if len(required) > 1 or any(each.kind is each.VAR_POSITIONAL for each in required):
            return handler
        why = "its second parameter has a default"
    except TypeError as error:
        why = str(error)
    raise TypeError(
        f"decode_by_ext() takes functions fn(key, data), not {handler!r:.80} ({why}); "
        "a function of the data alone is passed by extension, as {'ext': fn}"
    )


def _first_result(handlers: Sequence[Handler], key: str, decode: Decoder | None) -> Decoder:
    """Return a decoder that tries functions of key and data, and at last ``decode``."""

    def first_result(data: bytes) -> Any:
        for handler in handlers:
            if (result := handler(key, data)) is not None:
                return result
        return data if decode is None else decode(data)

    return first_result
