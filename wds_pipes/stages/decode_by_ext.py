"""DecodeByExt: decode bytes into objects, by extension."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from wds_pipes.codecs.codec import Codec, Decoder, Handler, NotAllowedError, registered_codecs
from wds_pipes.codecs.images import Cropped
from wds_pipes.codecs.resizing import Crop, Fit, Size, read_resize
from wds_pipes.codecs.table import ROWS, Decoding
from wds_pipes.core.occurrences import OCCURRENCE
from wds_pipes.core.options import check_count
from wds_pipes.core.stage import Stage
from wds_pipes.core.tolerant import OnError
from wds_pipes.errors import DecodeError, mended, parts
from wds_pipes.io.urls import hide, words
from wds_pipes.stages.fields import identity, read_names
from wds_pipes.stages.map_samples import Draws
from wds_pipes.stages.threaded import Threaded
from wds_pipes.tar.keys import is_metadata, matches

_NEW = object()  # no decoder is known yet
_BYTES = (bytes, bytearray, memoryview)
_NOT_BYTES = (
    "it is {}, not bytes. If it was decoded before, pass partial=True, or name the fields to decode in "
    "only=[...]; to change decoded values, use map_fields()"
)


class _Failed(NamedTuple):
    """A sample of which a field cannot be decoded."""

    sample: dict[str, Any]
    field: str
    error: Exception


class DecodeByExt(Threaded[dict[str, Any]]):
    """Decode the fields of samples by their extensions (functional name: ``decode_by_ext``).

    The last part of a field's name decides: ``seg.png`` is a png. An outer ``gz``, ``bz2``, ``xz``
    or ``zst`` is decompressed first (``txt.gz``), to at most 1 GiB; a field may have two of them.

    ======================================  =======================================================
    txt text transcript html htm            str
    cls cls2 class count index inx id       int
    json jsn; jsonl                         object; list of objects
    npy; npz                                ndarray; dict of ndarrays
    ten tenbin tb                           list of ndarrays (the format of webdataset)
    mp msg msgpack; cbor; safetensors       object; object; dict of tensors (each needs its package)
    pt pth                                  what torch.load(weights_only=True) returns
    csv; yaml yml                           list of rows; object: only if named in the call
    jpg jpeg jpe jfif png apng webp gif     by the image spec; bytes without one
    bmp tif tiff ppm pgm pbm pnm            by the image spec; bytes without one
    wav flac ogg opus mp3 m4a               ``"audio"``: (samples, sample_rate); else bytes
    aif aiff aifc w64 sph                   the same
    mp4 m4v mov mkv webm avi                ``"video"``: (frames, frames_per_second); else bytes
    pyd pkl pickle                          refused, unless allow_pickle
    anything else                           bytes
    ======================================  =======================================================

    ``wp.register_codec`` and installed packages add extensions to the table: see ``wp.Codec``. The
    reference lists it with what each format needs, and how ``TarWriter`` encodes it.

    Args:
        source: a pipe of samples: ``group_by_key()``, or a ``shuffle_buffer`` after it.
        specs: an image spec, names of formats that are decoded only on request, and functions of
            your own. ``{"seg.png": fn, "flac;wav": fn}`` are functions ``fn(data)``, or codecs, by
            extension, which take precedence over everything else; of several extensions that fit,
            the longest is used. ``fn(key, data)`` is a function for all other fields, as in
            webdataset: ``key`` is the field's name after a dot (``".seg.png"``, so that
            ``key.endswith(".png")`` finds all of them), ``data`` its bytes, decompressed. If it
            returns None, the next function is tried, then the table above. The image spec takes its
            turn as in the call: ``decode_by_ext("pil", fn)`` passes no images to ``fn``.
            ``"audio"`` returns float32 arrays of shape (channels, samples) and their sample rate,
            and ``"video"`` uint8 arrays of shape (frames, height, width, 3) and their frames per
            second. For a clip pass ``{"wav": wp.audio(start=1, duration=2)}`` or ``{"mp4":
            wp.video(...)}``; ``{"mp4": wp.VideoReader}`` and ``{"wav": wp.AudioReader}`` are
            objects that decode what is read from them.
            Image specs: ``l8 rgb8 rgba8`` return uint8 arrays of shape (H, W) or (H, W, C). ``l rgb
            rgba`` return the same as float32 from 0 to 1. ``torchl8 torchrgb8 torchrgba8 torchl
            torchrgb torchrgba`` return tensors of shape (C, H, W), with C = 1 for the first and
            fourth; ``torch`` is ``torchrgb``. ``pill pil pilrgba`` return PIL images, and
            ``pilrgb`` is ``pil``. ``raw`` returns the array as the file stores it, of shape (H, W)
            or (H, W, C): uint16, numbers of a palette, bool of 1 bit, all bands. Images of 16 bits
            keep them as floats (value / 65535); with a spec of 8 bits grey ones are an error, and
            colours keep 8. What Pillow would change (colours of 16 bits, bands, most integers of
            TIFF) needs the extra ``deep``, and is an error without it. Of animations, and of the
            pages of a TIFF with other specs, only the first is kept; palettes and CMYK become the
            colours of the spec. EXIF is ignored unless ``upright=True``, but TIFF is turned by its
            own tag. JPEG is decoded by ``simplejpeg`` if it is installed (extra ``images``), which
            returns the same pixels as Pillow in less time; ``wds-pipes info --codecs`` says what is
            used.
        size: resize all images to this size, ``(height, width)`` in pixels, or one number for both;
            None: they keep their sizes. They are resized once, antialiased, with the filter
            ``BILINEAR`` of Pillow. A JPEG with at least 4.5 times the requested width and height is
            decoded at a half, a quarter or an eighth of its size, which saves most of the time, and
            one with at least 1.5 times with a quicker transform of libjpeg-turbo that does not
            smooth colours. The PSNR against decoding and resizing with Pillow, measured on 200
            photographs of 500 x 375, is at least 43 dB at 224 x 224, and at smaller sizes at least
            40 dB for 19 of 20 and 36 dB for all. It is about 30 dB where thin shapes have strong
            colours, such as red text on blue, and may be 25 dB for dithered images. The result is
            the same whichever decoder is installed. ``max_image_pixels`` is for images before this.
        fit: how an image with another shape comes to this size. ``"cover"``: it fills it, and what
            is too wide or too high is cropped on both sides (``ImageOps.fit`` of Pillow).
            ``"contain"``: all of it is in the middle, between zeros: black, or transparent with
            ``rgba`` (``ImageOps.pad``). ``"stretch"``: width and height are scaled apart.
        upright: turn images as the orientation in their EXIF says, by quarter turns and mirrors, so
            that photos of a phone stand upright; ``size`` is that of the turned image. By default,
            as in webdataset, they come as they are stored. Boxes and points in other fields do not
            turn with them.
        pages: with ``"raw"``: ``"all"`` returns all pages of a TIFF, in an array of shape (pages,
            H, W) or (pages, H, W, C); None: a TIFF with several is an error. Thumbnails and masks
            are no pages.
        sample_rate: with ``"audio"``: resample all audio to so many samples per second, with
            FFmpeg's resampler; None: it keeps its rates.
        mono: with ``"audio"``: return the mean of the channels, as one channel.
        crop: how a part of each image is chosen that becomes ``size``. ``"center"``: the middle of
            the image whose shorter side is resized to ``resize`` pixels, as for validation.
            ``"random"``: a part with random area, ratio and place, as by RandomResizedCrop of
            torchvision, the same of all images of a sample that have one size. It is drawn for each
            sample as the ``rng`` of ``map_samples`` is, so it is the same after a resume. A JPEG is
            decoded at a part of its size only where the part is large enough; see ``size``.
        resize: with ``crop="center"``: pixels of the shorter side before the middle is taken.
        scale: with ``crop="random"``: the bounds of the part of the area; None: (0.08, 1).
        ratio: with ``crop="random"``: the bounds of its width / height; None: (3/4, 4/3).
        flip: with ``crop="random"``: mirror one half of the images, left to right.
        boxes: with ``crop``: also yield which part of the image was taken, as ``__crop__``: an
            array of shape (5,) with the left, top, width and height of the part, in pixels of the
            image as it is decoded without ``size``; and 1 if the part was then mirrored, else 0.
            It is int64 with ``"random"``, and float64 with ``"center"``, where a part may begin
            inside a pixel. A sample with several images has an array for each of them instead,
            named by the field, such as ``__crop_left.jpg__``.
        only: names of the fields to decode, as in ``["jpg;png", "cls", "*.npy"]``; all others stay
            as they are.
        partial: leave fields that are not bytes as they are, since they were decoded before.
            Otherwise, such a field is an error if it would be decoded.
        must_decode: treat a field that has no decoder, and that no function takes, as an error; by
            default it stays bytes.
        allow_pickle: also decode pickles, object arrays and whole pickled models. They can run any
            code: use this only for data that you wrote.
        max_image_pixels: refuse a larger image before decoding it. Decoding takes up to 20 bytes
            per pixel for uint8, and 36 for floats.
        threads: decode in this many threads, samples ahead of the one that is needed; None or 0: in
            the thread that iterates. See ``map_samples``.
        on_error: what to do if a field cannot be decoded: ``"raise"``, or ``"skip"`` its sample and
            count it; None: as ``ShardList(on_error=...)`` says. Refused data, a missing package and
            a value that is not bytes always raise. So does MemoryError, which is not the fault of
            the sample.
        max_errors: with ``"skip"``, how many samples may be skipped in an epoch; None: no limit.

    Raises:
        DecodeError: during iteration, with ``.url``, ``.key`` and ``.field``. A local shard that is
            not compressed is searched for the byte of the member then, ``.offset``.
        TypeError, ValueError: when the stage is built, if a spec is unknown, or a function does not
            take key and data.

    Checkpoint: the number of skipped samples. A resume reads nothing again, with threads only the
    samples that were in flight.
    """

    keeps_count = True
    scope = "item"
    salt = 7  # of its random numbers
    _keeps_keys = True

    def __init__(
        self,
        source: Stage[Any],
        *specs: str | Mapping[str, Decoder | Codec] | Handler,
        size: Size | None = None,
        fit: Fit = "cover",
        crop: Crop | None = None,
        resize: int | None = None,
        scale: tuple[float, float] | None = None,
        ratio: tuple[float, float] | None = None,
        flip: bool = False,
        boxes: bool = False,
        upright: bool = False,
        pages: Literal["all"] | None = None,
        sample_rate: int | None = None,
        mono: bool = False,
        only: Iterable[str] | None = None,
        partial: bool = False,
        must_decode: bool = False,
        allow_pickle: bool = False,
        max_image_pixels: int = 1 << 26,
        threads: int | None = None,
        on_error: OnError | None = None,
        max_errors: int | None = None,
    ) -> None:
        super().__init__(source, on_error, max_errors, threads)
        self.only = None if only is None else frozenset(read_names("only", only))
        self.specs, self.partial = specs, bool(partial)
        self.must_decode, self.allow_pickle = bool(must_decode), bool(allow_pickle)
        self.max_image_pixels = check_count("max_image_pixels", max_image_pixels)
        # As they are now: they travel with the pipe to processes where nothing was registered.
        self.registered = registered_codecs()
        self.size, self.fit, self.pages, self.upright = size, fit, pages, bool(upright)
        self.crop, self.resize, self.scale, self.ratio, self.flip = crop, resize, scale, ratio, bool(flip)
        self.boxes = bool(boxes)
        self.sample_rate, self.mono = sample_rate, bool(mono)
        self._decoding()

    @property
    def _draws(self) -> bool:  # type: ignore[override]
        return self.crop == "random"

    def _decoding(self, rng: Callable[[], np.random.Generator] | None = None) -> Decoding:
        return Decoding(
            self.specs,
            allow_pickle=self.allow_pickle,
            max_image_pixels=self.max_image_pixels,
            must_decode=self.must_decode,
            registered=self.registered,
            resize=read_resize(
                self.size, self.fit, self.crop, self.resize, scale=self.scale, ratio=self.ratio, flip=self.flip
            ),
            pages=self.pages,
            upright=self.upright,
            boxes=self.boxes,
            sample_rate=self.sample_rate,
            mono=self.mono,
            rng=rng,
        )

    def run(self) -> Iterator[dict[str, Any]]:
        for decoded in self.results(self.decoder(_Failed), self.source.items):
            if type(decoded) is not _Failed:
                yield decoded
            else:
                self._failed(*decoded)

    def decoder(self, failed: Callable[[dict[str, Any], str, Exception], Any] | None = None) -> Callable[[Any], Any]:
        """Return the function that decodes a sample; for one with a field that cannot be decoded,
        it returns what ``failed(sample, field, error)`` returns. By default, that raises the error.
        """
        failed = failed or self._failed
        draws = Draws(self) if self._draws else None
        drawn = threading.local()  # its key: the random bits of the sample that a thread decodes
        rng = None if draws is None else lambda: draws.generator(drawn.key)  # the same for all images of a sample
        is_last = draws is not None and not self.lane.occurrences  # no later step draws
        decoder, only, partial = self._decoding(rng).decoder, self.only, self.partial
        decoders: dict[str, Decoder | None] = {}
        known: Callable[[str, Any], Any] = decoders.get

        def decode_sample(sample: dict[str, Any]) -> Any:
            if not isinstance(sample, dict):
                raise TypeError(
                    "decode_by_ext() takes samples as dicts, and its source gave "
                    f"{type(sample).__name__}: put it after group_by_key(), before to_tuple()"
                )
            decoded = dict(sample)
            crops: dict[str, Any] = {}
            if draws is not None:
                if "__key__" not in sample:
                    raise TypeError("crop='random' draws its numbers by the __key__ of samples, and this one has none")
                drawn.key = draws.key(sample, 0)
                if is_last:
                    decoded.pop(OCCURRENCE, None)
            field = ""
            try:
                for field, data in sample.items():
                    decode = known(field, _NEW)
                    if decode is _NEW:
                        if len(decoders) > 4096 or len(field) > 256:  # so that hostile names do not fill the memory
                            decoders.clear()
                        stays = is_metadata(field) or (
                            only is not None and not any(matches(field.lower(), name) for name in only)
                        )
                        decode = decoders[field] = None if stays else decoder(field)
                    if decode is not None:
                        if type(data) is bytes or isinstance(data, _BYTES):
                            decoded[field] = value = decode(data if type(data) is bytes else bytes(data))
                            if type(value) is Cropped:
                                decoded[field], crops[f"__crop_{field}__"] = value
                        elif not partial or isinstance(sample.get("__key__"), list):
                            raise TypeError(_NOT_BYTES.format(type(data).__name__))
                if crops:
                    decoded |= crops if len(crops) > 1 else {"__crop__": crops.popitem()[1]}
                return decoded
            except Exception as error:
                return failed(sample, field, error)

        return decode_sample

    def _failed(self, sample: dict[str, Any], field: str, error: Exception) -> None:
        """Raise the error for a field that cannot be decoded, or count the sample as skipped."""
        if isinstance(error, (ImportError, NotAllowedError)):
            raise undecodable(sample, field, error)
        if isinstance(error, MemoryError):
            error.add_note(f"raised when field {field!r} of {identity(sample).name('in')} was decoded")
            raise error
        if isinstance(sample.get("__key__"), list):
            raise TypeError(
                "decode_by_ext() takes single samples, and its source gave a batch: put it before batch_samples()"
            ) from error
        if not isinstance(sample[field], _BYTES):
            raise undecodable(sample, field, error) from error
        leave_out = {
            "mend": "Correct it, or pass on_error='skip' to leave such samples out.",
            "mend_cli": "Correct it, or leave such samples out with wds-pipes repair --decode.",
        }
        found = undecodable(sample, field, error, **({} if self.may_skip else leave_out))
        if not self.skips(found):
            raise found from error
        self.count_skip(found)


def undecodable(
    sample: dict[str, Any],
    field: str,
    cause: Exception,
    mend: str = "",
    mend_cli: str | None = None,
    *,
    part: str = "",
) -> DecodeError:
    """Return the error for a field, or a part of it, that cannot be decoded."""
    named, told = identity(sample), cause
    row = ROWS.get(field.rpartition(".")[2])
    if row is not None and row.decode is int and type(cause) is ValueError:
        integer = "A field of this name is an integer"
        told = mended(
            ValueError,
            words(cause),
            mend=f"{integer}: for a text pass decode_by_ext({{{field!r}: bytes.decode}}), or write it as txt",
            mend_cli=f"{integer}: name a text txt",
        )
    why, mends = parts(told, mend, mend_cli, words=words)
    what = f"{part}field {field!r} of {named.name('in')} cannot be decoded: {type(cause).__name__}: {hide(why)}"
    error = DecodeError(what, url=named.url, key=named.key, field=field, **mends)
    error.__cause__ = cause  # also where it is only counted
    return error
