"""``create --encode``: images that are encoded again, and maybe resized, on request only."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from wds_pipes.codecs.table import IMAGE
from wds_pipes.errors import DecodeError

_FORMATS = ("jpg", "png", "webp")
_OPTIONS = {
    "q": re.compile("[1-9][0-9]?|100"),
    "size": re.compile("[1-9][0-9]{0,4}(x[1-9][0-9]{0,4})?"),
    "fit": re.compile("cover|contain|stretch"),
}
_MOST_PIXELS = 1 << 26  # as decode_by_ext
_QUALITY = 95


def is_image(field: str) -> bool:
    """Whether a field is encoded again. Names of several parts are mostly of masks, of which each
    pixel counts.
    """
    return field in IMAGE


@dataclass(frozen=True)
class Encode:
    """What becomes of the images: their format, quality and size.

    Attributes:
        text: as it is written on the command line, and named in messages.
        format: the extension of the new fields.
        quality: of JPEG and WebP, from 1 to 100.
        size: height and width, or one number for both; None: each image keeps its size.
        fit: as in ``decode_by_ext``.
    """

    text: str
    format: str
    quality: int = _QUALITY
    size: int | tuple[int, int] | None = None
    fit: Literal["cover", "contain", "stretch"] = "cover"

    def apply(self, sample: dict[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
        """Return a sample with other images.

        Args:
            sample: its fields are bytes.
            files: the files of fields, for messages.

        Raises:
            DecodeError: an image cannot be decoded.
        """
        found = {}
        for field, data in sample.items():
            if not is_image(field):
                found[field] = data
                continue
            try:
                found[self.format] = self._encoded(data)
            except Exception as error:
                key = sample["__key__"]
                where = files.get(field) or f"field {field!r} of sample {key!r}"
                raise DecodeError(
                    f"{where} cannot be encoded as {self.text}: {error}. Mend the file, or leave it out",
                    key=key,
                    field=field,
                ) from error
        return found

    def _encoded(self, data: bytes) -> bytes:
        from PIL import ExifTags, Image, ImageOps

        from wds_pipes.codecs.images import check_bits, image_encoder, open_image

        with open_image(data, _MOST_PIXELS) as image:
            check_bits(image, f"--encode {self.format}")
            image.load()
            plain = image.convert("RGBA") if image.mode == "P" and "transparency" in image.info else image
            # the new file has no EXIF, so its pixels are upright
            plain.getexif()[ExifTags.Base.Orientation] = image.getexif().get(ExifTags.Base.Orientation, 1)
        plain = ImageOps.exif_transpose(plain)
        if plain.has_transparency_data and self.format == "jpg":
            colours = plain.convert("RGBA")
            plain = Image.alpha_composite(Image.new("RGBA", plain.size, "white"), colours).convert("RGB")
        grey = plain.mode in ("1", "L")
        clear = plain.has_transparency_data
        plain = plain.convert("RGBA" if clear else "L" if grey else "RGB")
        if self.size is not None:
            plain = _resized(plain, self)
        plain.info.clear()
        return image_encoder(self.format, self.quality)(plain)


def _resized(image: Any, encode: Encode) -> Any:
    """Resize as ``decode_by_ext(size=)``, by Pillow alone: the bytes must not depend on whether
    torch is installed.
    """
    from PIL import Image, ImageOps

    assert encode.size is not None
    height, width = (encode.size, encode.size) if isinstance(encode.size, int) else encode.size
    if encode.fit == "stretch":
        return image.resize((width, height), Image.Resampling.BILINEAR)
    fitted = ImageOps.fit if encode.fit == "cover" else ImageOps.pad
    return fitted(image, (width, height), Image.Resampling.BILINEAR)


def read_encode(text: str) -> Encode:
    """Read what ``--encode`` says, such as ``jpg:q=90,size=256``.

    Raises:
        ValueError: it says something else.
    """
    form, _, rest = text.partition(":")
    pairs = [part.partition("=")[::2] for part in rest.split(",") if rest]
    options: dict[str, Any] = dict(pairs)
    right = form in _FORMATS and len(options) == len(pairs) and ("fit" not in options or "size" in options)
    right = right and not (form == "png" and "q" in options)  # which has no quality
    if not right or not all(name in _OPTIONS and _OPTIONS[name].fullmatch(value) for name, value in pairs):
        raise ValueError(
            f"--encode is FORMAT[:OPTIONS], where FORMAT is {', '.join(_FORMATS)}, and OPTIONS are q=1 to 100 (not of "
            f"png), size=PIXELS or HEIGHTxWIDTH, and with it fit=cover, contain or stretch, as in "
            f"jpg:q=90,size=256, and not {text!r}"
        )
    sides = tuple(map(int, options.get("size", "").split("x"))) if "size" in options else None
    size = sides[0] if sides and len(sides) == 1 else cast("tuple[int, int] | None", sides)
    return Encode(text, form, int(options.get("q", _QUALITY)), size, options.get("fit", "cover"))
