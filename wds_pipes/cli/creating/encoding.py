"""``create --encode``: images that are encoded again, and maybe resized, on request only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from wds_pipes.core.suggest import nearest
from wds_pipes.errors import DecodeError

_FORMATS = ("jpg", "png", "webp")
_LOSSY = ("jpg", "webp")
_MOST_PIXELS = 1 << 26  # as decode_by_ext
_QUALITY = 95


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

    def is_image(self, field: str) -> bool:
        """Whether a field is encoded again. Names of several parts are mostly of masks, of which
        each pixel counts.
        """
        from wds_pipes.codecs.table import IMAGE

        return field in IMAGE

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
            if not self.is_image(field):
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
    from PIL import Image

    from wds_pipes.codecs.resizing import Resize

    assert encode.size is not None
    resize = Resize(encode.size, encode.fit)
    box, width, height, left, top = resize.place(*image.size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR, box)
    if (width, height) == (resize.width, resize.height):
        return resized
    whole = Image.new(image.mode, (resize.width, resize.height))
    whole.paste(resized, (left, top))
    return whole


def read_encode(text: str) -> Encode:
    """Read what ``--encode`` says, such as ``jpg:q=90,size=256``.

    Raises:
        ValueError: it says something else.
    """
    form, _, rest = text.partition(":")
    if form not in _FORMATS:
        raise ValueError(f"--encode is one of {', '.join(_FORMATS)}, as in jpg:q=90,size=256, not {text!r}")
    options: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        name, _, value = part.partition("=")
        if name in options:
            raise ValueError(f"--encode {text} says {name} twice")
        if name == "q" and form in _LOSSY:
            options[name] = _number(text, value, 100)
        elif name == "size":
            sides = [_number(text, side, 1 << 16) for side in value.split("x")]
            if len(sides) > 2:
                raise ValueError(f"--encode {text}: a size is one number, or HEIGHTxWIDTH")
            options[name] = sides[0] if len(sides) == 1 else (sides[0], sides[1])
        elif name == "fit" and value in ("cover", "contain", "stretch"):
            options[name] = value
        elif name == "fit":
            raise ValueError(f"--encode {text}: fit is cover, contain or stretch, not {value!r}")
        else:
            known = [*(["q"] if form in _LOSSY else []), "size", "fit"]
            near = nearest(name, known)
            mean = f". Did you mean {near!r}?" if near else ""
            raise ValueError(f"--encode {form} takes {', '.join(known)}, as in size=256, and not {part!r}{mean}")
    if "fit" in options and "size" not in options:
        raise ValueError(f"--encode {text}: fit says how images become one size, so add one, such as size=256")
    return Encode(text, form, options.get("q", _QUALITY), options.get("size"), options.get("fit", "cover"))


def _number(text: str, value: str, most: int) -> int:
    if not (value.isascii() and value.isdecimal() and 1 <= int(value) <= most):
        raise ValueError(f"--encode {text}: {value!r} is no number from 1 to {most}")
    return int(value)
