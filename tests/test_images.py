"""Images: the same pixels whichever decoder is installed, ``size=`` against Pillow, image_size.

Formats, specs and limits of Pillow's decoders are in test_codecs.py.
"""

import io
import struct
import sys
import zlib
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from memory import memory_below
from pictures import ODD, PIXELS, saved, smooth, taller
from PIL import Image, ImageOps
from sources import Given

import wds_pipes as wp
from wds_pipes.codecs import images
from wds_pipes.codecs.images import decoders_in_use
from wds_pipes.codecs.resizing import RandomCrop, Resize, read_resize
from wds_pipes.codecs.table import Decoding
from wds_pipes.core.stream import Stream
from wds_pipes.stages import DecodeByExt
from wds_pipes.testing import check_resume, make_shards, same

BILINEAR = Image.Resampling.BILINEAR


@cache
def photograph(height, width, seed=0):
    return saved(smooth(height, width, seed), quality=90)


@pytest.fixture(params=["simplejpeg", "pillow"])
def decoder(request, monkeypatch):
    """The decoder of JPEG, of those that users may have."""
    if request.param == "pillow":
        monkeypatch.setattr(images, "simplejpeg", lambda: None)
    else:
        pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    assert decoders_in_use()["JPEG"] == request.param
    return request.param


def decode(data, spec="rgb8", *, size=None, fit="cover", extension="jpg", max_image_pixels=1 << 26, **options):
    options = {"allow_pickle": False, "max_image_pixels": max_image_pixels, "resize": read_resize(size, fit)} | options
    decoding = Decoding((spec,), **options)
    return decoding.decoder(extension)(data)


def with_pillow(data, size, fit, mode="RGB"):
    """The same by Pillow alone, from all pixels."""
    image, pair = Image.open(io.BytesIO(data)).convert(mode), (size[1], size[0])
    if fit == "stretch":
        return np.asarray(image.resize(pair, BILINEAR))
    return np.asarray((ImageOps.fit if fit == "cover" else ImageOps.pad)(image, pair, BILINEAR))


def decibels(found, expected):
    """The PSNR of two images."""
    error = np.mean((found.astype(float) - expected) ** 2)
    return 10 * np.log10(255**2 / error) if error else np.inf


# Which decoder


@pytest.mark.parametrize(
    ("spec", "mode"), [("rgb8", "RGB"), ("l8", "L"), ("rgba8", "RGBA"), ("torchrgb", "RGB"), ("pil", "RGB")]
)
def test_odd_jpegs_have_the_pixels_of_pillow(spec, mode, decoder):
    for name, data in ODD.items():
        value = decode(data, spec)
        found = value.permute(1, 2, 0).numpy() if spec == "torchrgb" else np.asarray(value)
        expected = np.asarray(Image.open(io.BytesIO(data)).convert(mode))
        expected = expected.astype(np.float32) / np.float32(255) if spec == "torchrgb" else expected
        assert np.array_equal(found, expected), name
        assert spec != "rgb8" or (value.flags.writeable and value.flags.c_contiguous)


@pytest.mark.parametrize("size", [None, (8, 8)])
def test_damaged_jpegs_are_errors(size, decoder):
    """Not an image that is grey below, whichever decoder is installed."""
    data = ODD["colours"]
    place = data.index(b"\xff\xc0")
    damaged = [
        *(data[:end] for end in (3, 20, place + 6, len(data) // 2, len(data) - 40)),
        data[:place] + data[place + 19 :],  # no header of a frame
        data[: place + 9] + b"\0" + data[place + 10 :],  # no components
    ]
    for each in damaged:
        with pytest.raises((OSError, ValueError, SyntaxError, IndexError, struct.error)):
            decode(each, size=size)


def test_a_jpeg_that_claims_to_be_large_takes_no_memory(decoder):
    """It is refused by its header, before memory is taken; 65 500 x 65 500 would be 13 GB.

    Within the limit it is decoded as by Pillow, grey where data are missing.
    """
    for lie, most in ((taller(ODD["colours"], 65_500, 65_500), 1 << 26), (taller(ODD["colours"], 1000, 1001), 10**6)):
        for size in (None, (8, 8)):
            with (
                memory_below(1 << 20),
                pytest.raises(ValueError, match=r"pixels, more than .* a larger max_image_pixels"),
            ):
                decode(lie, size=size, max_image_pixels=most)
    lie = taller(ODD["colours"], 61, 90)
    assert same(decode(lie), np.array(Image.open(io.BytesIO(lie))))


# Size and fit


SIZES = [(224, 224), (48, 80), (33, 17), (300, 200), 40]


@pytest.mark.parametrize("fit", ["cover", "contain", "stretch"])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_images_are_resized_as_by_pillow(size, fit, decoder):
    """At least 40 dB; to the size that was asked for, larger or smaller, of any shape."""
    pair = (size, size) if isinstance(size, int) else size
    for number, (height, width) in enumerate([(375, 500), (500, 333), (224, 224), (90, 640), (1000, 750)]):
        data = photograph(height, width, number)
        found = decode(data, size=size, fit=fit)
        assert found.shape == (*pair, 3)
        assert found.flags.writeable
        assert found.flags.c_contiguous
        assert decibels(found, with_pillow(data, pair, fit)) >= 40, (height, width)


@settings(max_examples=80, deadline=None)
@example((17, 17), (1, 1), "cover", "rgb8", "JPEG")
@example((3, 5), (1, 2), "cover", "rgb8", "JPEG")
@given(
    st.tuples(st.integers(1, 90), st.integers(1, 90)),
    st.tuples(st.integers(1, 70), st.integers(1, 70)),
    st.sampled_from(["cover", "contain", "stretch"]),
    st.sampled_from(["rgb8", "l8", "rgba8", "torchrgb8", "pil"]),
    st.sampled_from(["PNG", "JPEG"]),
)
def test_any_image_is_resized_to_any_size(shape, size, fit, spec, form):
    """Also by Pillow's geometry: the same as from all pixels, of images without grain."""
    rows, columns = np.linspace(0, 1, shape[0])[:, None], np.linspace(0, 1, shape[1])[None]
    pixels = np.stack([200 * rows + 0 * columns, 200 * columns + 0 * rows, 100 * (rows + columns)], -1).astype(np.uint8)
    data = saved(pixels, form, **({"quality": 95} if form == "JPEG" else {}))
    value = decode(data, spec, size=size, fit=fit)
    mode = {"l8": "L", "rgba8": "RGBA"}.get(spec, "RGB")
    found = value.permute(1, 2, 0).numpy() if spec == "torchrgb8" else np.asarray(value)
    assume(fit != "contain" or min(Resize(size, fit).place(shape[1], shape[0])[1:3]) > 1)  # Pillow rounds to 0
    expected = with_pillow(data, size, fit, mode)
    assert found.shape == expected.shape
    if fit == "contain" and mode == "RGBA":  # ImageOps.pad fills with opaque black
        expected = np.where(found[..., 3:] == 0, 0, expected)
    # a JPEG decoded at a smaller size has few values of colour in its last, unfinished block
    most = 16 if form == "JPEG" and min(shape) < 16 else 8
    assert np.abs(found.astype(int) - expected).max() <= most


def test_both_decoders_return_the_same_pixels_of_any_size(monkeypatch):
    """So that a run continues with the same data on a machine that has another one."""
    pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    pictures = [
        *ODD.values(),
        *(saved(smooth(height, width)) for height, width in ((500, 375), (601, 903), (77, 1111))),
        *(
            saved(smooth(64 + n, 90 + n, n), subsampling=n % 3, quality=(75, 90, 100)[n // 3], progressive=n % 2 == 1)
            for n in range(9)
        ),
    ]
    found = {}
    for name in ("simplejpeg", "pillow"):
        if name == "pillow":
            monkeypatch.setattr(images, "simplejpeg", lambda: None)
        found[name] = [decode(data, size=size) for data in pictures for size in (None, 16, (40, 50), (100, 60), 300)]
    assert all(map(same, found["simplejpeg"], found["pillow"]))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP", "PPM"])
def test_every_format_is_resized_and_has_the_size_of_its_array(form):
    data = saved(smooth(90, 70), form)
    found, expected = decode(data, size=(30, 40), extension=form.lower()), with_pillow(data, (30, 40), "cover")
    assert np.abs(found.astype(int) - expected).max() <= 1 or (form == "JPEG" and decibels(found, expected) >= 40)
    assert wp.image_size(data) == wp.image_size(memoryview(data)) == decode(data).shape[:2] == (90, 70)


def test_transparent_colours_do_not_bleed():
    """Pixels are weighed by their alpha; the padding is transparent."""
    pixels = np.zeros((40, 80, 4), np.uint8)
    pixels[:, :40], pixels[:, 40:] = (255, 0, 0, 255), (0, 255, 0, 0)
    found = decode(saved(pixels, "PNG"), "rgba8", size=20, fit="contain", extension="png")
    assert not found[..., 1].any()
    assert not found[[*range(5), *range(15, 20)]].any()
    assert (found[5:15, :9] == (255, 0, 0, 255)).all()


def test_a_pipe_resizes_its_images_and_resumes_exactly(tmp_path):
    """An image of the size is not changed; the size of an image is decoded too."""
    [url] = make_shards(tmp_path, shards=1, samples=2, fields=("jpg", "cls"))

    def pipe():
        return wp.ShardList(url).open_shards().load_tar().group_by_key().decode_by_ext("torchrgb8", size=(6, 5))

    assert {tuple(sample["jpg"].shape) for sample in pipe()} == {(3, 6, 5)}
    check_resume(pipe)
    assert same(decode(saved(PIXELS, "PNG"), size=(61, 83)), PIXELS)
    samples = [{"__key__": "a", "__url__": "x.tar", "jpg": ODD["colours"], "png": saved(PIXELS, "PNG")}]
    [sample] = Stream(DecodeByExt(Given(samples), {"jpg;png": wp.image_size}))
    assert (sample["jpg"], sample["png"]) == ((61, 83), (61, 83))


# Images of 16 bits, and as they are stored


DEEP = np.linspace(0, 65535, 40 * 60).reshape(40, 60).astype(np.uint16)


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_floats_keep_16_bits(form):
    ppm = b"P5 60 40 65535\n" + DEEP.astype(">u2").tobytes()  # Pillow 10 does not write it
    data, exact = ppm if form == "PPM" else saved(DEEP, form), DEEP.astype(np.float32) / np.float32(65535)
    assert same(decode(data, "l"), exact)
    assert same(decode(data, "torchl"), torch.from_numpy(exact[None]))
    assert same(decode(data, "rgb"), np.stack([exact] * 3, 2))
    assert same(decode(data, "rgba")[..., 3], np.ones_like(exact))
    expected = np.asarray(Image.fromarray(exact).resize((6, 4), BILINEAR))
    assert np.abs(decode(data, "l", size=(4, 6), fit="stretch") - expected).max() < 1e-6


@pytest.mark.parametrize(
    ("spec", "instead"), [("l8", "'l'"), ("rgb8", "'rgb'"), ("torchrgb8", "'torchrgb'"), ("pil", "'rgb'")]
)
def test_8_bits_refuse_what_they_would_cut(spec, instead):
    with pytest.raises(ValueError, match=f"16 bits a pixel, of which '{spec}' would keep 8: use {instead}.*'raw'"):
        decode(saved(DEEP, "PNG"), spec)


def test_raw_of_what_pillow_keeps():
    palette = Image.fromarray(PIXELS).quantize(16)
    for image in (Image.fromarray(DEEP), palette, palette.convert("1"), Image.fromarray(PIXELS)):
        assert same(decode(saved(image, "PNG"), "raw"), np.array(image))
    assert decode(saved(DEEP, "TIFF"), "raw").dtype == np.uint16
    with pytest.raises(ValueError, match="'raw' returns images as they are stored: leave out size="):
        decode(saved(DEEP, "PNG"), "raw", size=8)


# image_size


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "TIFF"])
def test_the_size_of_a_turned_image_is_that_of_its_array(form):
    """Only the orientation of a TIFF is applied."""
    exif = Image.Exif()
    exif[0x0112] = 6
    data = saved(PIXELS, form, exif=exif)
    assert wp.image_size(data) == decode(data).shape[:2] == ((83, 61) if form == "TIFF" else (61, 83))
    assert decode(data, size=(9, 8)).shape == (9, 8, 3)


def test_a_deep_png_that_claims_to_be_large_takes_no_memory():
    """Its pixels are allowed, but not its bytes."""
    data = png(np.zeros((4, 4, 3), np.uint16))
    header = data[12:16] + struct.pack(">II", 12_000, 12_000) + data[24:29]
    lie = data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]
    with memory_below(1 << 20), pytest.raises(ValueError, match="it unpacks to more than 1073741824 bytes"):
        decode(lie, "raw", max_image_pixels=1 << 30)


def test_a_tiff_that_tifffile_reads_is_turned_upright():
    array = random((3, 4), "i1")
    data = tiff(array, photometric="minisblack", extratags=[(274, "H", 1, 3, True)])
    assert same(decode(data, "raw"), np.ascontiguousarray(array[::-1, ::-1]))


def test_sizes_are_read_from_headers_alone():
    """Of images that would be refused, and of the first bytes of a file."""
    assert wp.image_size(taller(ODD["colours"], 65_500, 65_000)) == (65_500, 65_000)
    for form in ("JPEG", "PNG", "WEBP", "BMP"):
        assert wp.image_size(saved(smooth(300, 400), form)[:1024]) == (300, 400)
    with memory_below(1 << 20):
        wp.image_size(taller(ODD["colours"], 65_500, 65_000))


@pytest.mark.parametrize(
    "data", [b"", b"<html>404</html>", ODD["colours"][:30], b"RIFF\0\0\0\0WEBPVP8 ", b"\x89PNG\r\n\x1a\n"]
)
def test_what_has_no_size_is_an_error(data):
    with pytest.raises((ValueError, OSError, SyntaxError)):
        wp.image_size(data)


def test_the_geometry_is_exact_for_large_numbers():
    """Fractions do not make an image cropped that has the shape of the result."""
    place = Resize((224, 336), "cover").place(30_000, 20_000)
    assert place.box == (0, 0, 30_000, 20_000)
    assert Resize((1, 1000), "contain").place(1, 60_000)[1:3] == (1, 1)


# As the file stores it


RANDOM = np.random.default_rng(0)


def random(shape, dtype):
    kind = np.dtype(dtype)
    if kind.kind == "f":
        return RANDOM.normal(size=shape).astype(dtype)
    return RANDOM.integers(np.iinfo(kind).min, np.iinfo(kind).max, shape, dtype, endpoint=True)


def tiff(array, **options):
    file = io.BytesIO()
    pytest.importorskip("tifffile").imwrite(file, array, **options)
    return file.getvalue()


def png(array):
    return pytest.importorskip("imagecodecs").png_encode(array)


BANDS = {"photometric": "minisblack", "planarconfig": "contig"}
RGB = {"photometric": "rgb"}
STORED = {
    "png, colours of 16 bits": (png, random((4, 5, 3), "u2"), {}),
    "png, colours and alpha of 16 bits": (png, random((4, 5, 4), "u2"), {}),
    "png, grey and alpha of 16 bits": (png, random((4, 5, 2), "u2"), {}),
    "png, grey of 16 bits": (png, random((4, 5), "u2"), {}),
    "png, colours and alpha": (png, random((4, 5, 4), "u1"), {}),
    "colours of 16 bits": (tiff, random((4, 5, 3), "u2"), RGB),
    "near infrared as the fourth band": (tiff, random((4, 5, 4), "u1"), RGB | {"extrasamples": [0]}),
    "associated alpha": (tiff, random((4, 5, 4), "u1"), RGB | {"extrasamples": [1]}),
    "alpha": (tiff, random((4, 5, 4), "u1"), RGB | {"extrasamples": [2]}),
    "two bands": (tiff, random((4, 5, 2), "u1"), BANDS),
    "twelve bands": (tiff, random((4, 5, 12), "u2"), BANDS),
    "white is 0": (tiff, random((4, 5), "u1"), {"photometric": "miniswhite"}),
    "compressed": (tiff, random((40, 50, 3), "u2"), RGB | {"compression": "zlib", "predictor": True}),
    **{f"{kind} of 1 band": (tiff, random((4, 5), kind), {}) for kind in ("u1", "i1", "u2", "i2", "u4", "i4", "u8")},
    **{f"{kind} of 1 band": (tiff, random((4, 5), kind), {}) for kind in ("f2", "f4", "f8")},
}


@pytest.mark.parametrize("name", STORED)
def test_raw_is_what_the_file_stores(name):
    write, array, options = STORED[name]
    assert same(decode(write(array, **options), "raw"), array.astype(array.dtype.newbyteorder("=")))


def test_raw_of_bands_in_planes_has_them_last():
    planes = random((12, 4, 5), "u2")
    data = tiff(planes, photometric="minisblack", planarconfig="separate")
    assert same(decode(data, "raw"), np.ascontiguousarray(planes.transpose(1, 2, 0)))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_raw_of_few_bits_is_not_stretched(depth):
    """Pillow writes such a grey PNG only by its options."""
    numbers = np.arange(4, dtype=np.uint8).reshape(2, 2) % (1 << depth)
    rows = b"".join(
        b"\0" + bytes([sum(int(value) << (8 - depth * (place + 1)) for place, value in enumerate(row))])
        for row in numbers
    )
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", 2, 2, depth, 0, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows)),
        (b"IEND", b""),
    ]
    data = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    assert np.array_equal(decode(data, "raw"), numbers)


def test_pages_are_asked_for():
    """Thumbnails are no pages."""
    pages = random((3, 4, 5), "u1")
    data = tiff(pages, photometric="minisblack")
    with pytest.raises(ValueError, match="it has 3 pages: pass pages='all'"):
        decode(data, "raw")
    assert same(decode(data, "raw", pages="all"), pages)
    assert np.array_equal(decode(data, "l8"), pages[0])
    file = io.BytesIO()
    with pytest.importorskip("tifffile").TiffWriter(file) as writer:
        writer.write(pages[0])
        writer.write(pages[0, ::2, ::2], subfiletype=1)
    assert same(decode(file.getvalue(), "raw"), pages[0])
    with pytest.raises(ValueError, match="60 pixels in all, more than 59"):
        decode(data, "raw", pages="all", max_image_pixels=59)
    with pytest.raises(ValueError, match="use it with the image spec 'raw'"):
        decode(data, "rgb8", pages="all")


def test_the_planes_of_a_volume_are_not_left_out():
    data = tiff(random((4, 16, 16), "u1"), photometric="minisblack", volumetric=True, tile=(4, 16, 16))
    with pytest.raises(ValueError, match="the axes ZYX, which are not those of an image"):
        decode(data, "raw")


def test_raw_of_a_colour_that_is_transparent_has_no_alpha():
    array = random((4, 5, 3), "u2")
    data = png(array)
    end = data.index(b"IDAT") - 4
    chunk = b"tRNS" + bytes(6)
    chunk = struct.pack(">I", 6) + chunk + struct.pack(">I", zlib.crc32(chunk))
    assert same(decode(data[:end] + chunk + data[end:], "raw"), array)


def test_what_pillow_would_change_needs_libraries(monkeypatch):
    for module, data in (("imagecodecs", png(random((4, 5, 3), "u2"))), ("tifffile", tiff(random((4, 5), "i1")))):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(ModuleNotFoundError, match=r"pip install 'wds_pipes\[deep\]'"):
            decode(data, "raw")


def test_values_that_pillow_would_stretch_are_refused():
    with pytest.raises(ValueError, match="its values go to 15, and would be stretched"):
        decode(b"P5 2 1 15 \1\2", "raw")
    assert decode(b"P5 2 1 255 \1\2", "raw").tolist() == [[1, 2]]


@pytest.mark.parametrize("write", [png, lambda array: tiff(array, photometric="rgb")])
def test_colours_of_16_bits_keep_them_as_floats(write):
    """As Pillow converts colours of 8 bits."""
    array = random((6, 7, 3), "u2")
    data, floats = write(array), array / np.float32(65535)
    assert same(decode(data, "rgb"), floats)
    assert torch.equal(decode(data, "torchrgb"), torch.from_numpy(floats).permute(2, 0, 1))
    assert np.array_equal(decode(data, "rgba")[..., 3], np.ones((6, 7)))
    grey = np.asarray(Image.fromarray((array >> 8).astype(np.uint8)).convert("L")) / 255
    assert np.abs(decode(data, "l") - grey).max() < 2 / 255
    assert decode(data, "rgb", size=3).shape == (3, 3, 3)
    assert decode(data, "rgb8").dtype == np.uint8


def test_alpha_of_16_bits_is_kept():
    array = random((6, 7, 4), "u2")
    assert same(decode(png(array), "rgba"), array / np.float32(65535))
    assert same(decode(png(array), "rgb"), np.ascontiguousarray(array[..., :3]) / np.float32(65535))


# Upright


def lying(orientation, form, pixels):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, exif=exif, **({} if form == "PNG" else {"quality": 100}))
    return file.getvalue()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_upright(orientation, form):
    """As Pillow turns it."""
    data = lying(orientation, form, smooth(40, 56))
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert np.array_equal(decode(data, upright=True), expected)
    assert np.array_equal(np.asarray(decode(data, "pil", upright=True)), expected)
    assert np.array_equal(decode(data, "torchrgb8", upright=True).permute(1, 2, 0).numpy(), expected)
    assert decode(data).shape == (40, 56, 3), "by default, as it is stored"
    small = decode(data, size=(20, 30), upright=True)
    by_hand = np.asarray(ImageOps.fit(Image.fromarray(expected), (30, 20), BILINEAR))
    assert small.shape == (20, 30, 3)
    assert np.abs(small.astype(int) - by_hand).mean() < 6  # a JPEG is scaled when it is decoded


def test_upright_wants_an_image_spec():
    for specs in ((), ("raw",)):
        with pytest.raises(ValueError, match="also name an image spec, one other than 'raw'"):
            DecodeByExt(Given([]), *specs, upright=True)


# Crops


def random_crops(data, spec="rgb8", count=300, **options):
    """What the crops of one image under many keys are decoded to."""
    samples = [{"__key__": f"{number}", "__url__": "a.tar", "jpg": data, "png": data} for number in range(count)]
    return list(Stream(DecodeByExt(Given(samples), spec, crop="random", **options)))


def ramp(height, width):
    """A picture whose colours say where a pixel is."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([columns * 255 // (width - 1), rows * 255 // (height - 1), np.zeros_like(rows)], 2).astype(np.uint8)


def test_a_random_crop_is_that_of_torchvisions_rule():
    """Its area is uniform, its ratio uniform in its logarithm, its place uniform; one half are
    mirrored.
    """
    crop = RandomCrop(8, flip=True)
    rng = np.random.default_rng(0)
    boxes = np.array([crop.drawn(rng).box(1000, 1000) for _ in range(20_000)], float)
    left, top, right, bottom = boxes.T
    width, height = right - left, bottom - top
    areas, ratios = width * height / 1e6, width / height
    assert boxes.min() >= 0
    assert boxes.max() <= 1000
    assert 0.079 < areas.min() < 0.085
    assert areas.max() > 0.97
    assert abs(np.log(ratios).mean()) < 0.01
    assert 0.745 < ratios.min() < 0.76
    assert 1.32 < ratios.max() < 1.34
    inside = areas < 0.5  # nearly all of these fit at the first try
    assert abs(np.histogram(areas[inside], 6, (0.08, 0.5))[0] / inside.sum() - 1 / 6).max() < 0.02
    free = (left / np.maximum(1, 1000 - width))[inside]
    assert abs(np.histogram(free, 5, (0, 1))[0] / inside.sum() - 0.2).max() < 0.02
    assert RandomCrop(8).drawn(rng).box(10, 1000) == (0, 493, 10, 506), "no part of that ratio fits: the middle"


def test_random_crops_are_parts_of_the_image_and_the_same_of_all_images_of_a_sample():
    data = saved(ramp(375, 500), "PNG")
    found = random_crops(data, size=(40, 60), flip=True)
    mirrored = 0
    for sample in found:
        assert sample["jpg"].shape == (40, 60, 3)
        assert np.array_equal(sample["jpg"], sample["png"])
        across = np.diff(sample["jpg"][20, :, 0].astype(int))
        assert (across >= 0).all() or (across <= 0).all()
        mirrored += (across <= 0).all()
    assert 100 < mirrored < 200
    assert len({sample["jpg"].tobytes() for sample in found}) > 290
    again = random_crops(data, size=(40, 60), flip=True, threads=2)
    assert all(same(one, other) for one, other in zip(found, again, strict=True))


@pytest.mark.parametrize("orientation", range(2, 9))
def test_a_photo_that_is_turned_upright_is_cropped_as_the_upright_one(orientation):
    """From the same place, and mirrored left to right, not upside down."""
    lies = lying(orientation, "PNG", ramp(75, 100))
    upright = saved(np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(lies)))), "PNG")
    found = [random_crops(data, count=20, size=(20, 30), flip=True, upright=True) for data in (lies, upright)]
    for one, other in zip(*found, strict=True):
        assert np.abs(one["jpg"].astype(int) - other["jpg"]).max() <= 2


@pytest.mark.parametrize("size", [24, (112, 96)])
def test_a_crop_of_a_jpeg_is_near_to_one_by_pillow(decoder, size, monkeypatch):
    """Also where it is decoded at a part of its size."""
    data, crop = photograph(750, 1000), RandomCrop(size, flip=True)
    rng = np.random.default_rng(1)
    crops = [crop.drawn(rng) for _ in range(40)]
    whole = Image.open(io.BytesIO(data)).convert("RGB")
    for drawn in crops:
        monkeypatch.setattr(crop, "drawn", lambda _, drawn=drawn: drawn)
        found = images.image_decoder("rgb8", 1 << 26, crop, rng=lambda: rng)(data)
        small = whole.crop(drawn.box(1000, 750)).resize((crop.resize.width, crop.resize.height), BILINEAR)
        expected = np.asarray(ImageOps.mirror(small) if drawn.mirrored else small)
        assert 10 * np.log10(255**2 / np.mean((found.astype(float) - expected) ** 2)) > 33


def test_the_middle_of_images_is_cropped_for_validation():
    pixels = ramp(300, 400)
    found = decode(saved(pixels, "PNG"), resize=read_resize(224, "cover", "center", 256))
    small = Image.fromarray(pixels).resize((round(400 * 256 / 300), 256), BILINEAR)
    left, top = (small.width - 224) // 2, (256 - 224) // 2
    expected = np.asarray(small.crop((left, top, left + 224, top + 224)))
    assert np.abs(found.astype(int) - expected).max() <= 3


def by_its_box(whole, found, size):
    """A crop of a decoded image, by Pillow; one of floats is the middle of the resized image."""
    left, top, width, height, mirrored = found.tolist()
    box, size = (left, top, left + width, top + height), (size[1], size[0])
    whole = Image.fromarray(whole)
    small = whole.resize(size, BILINEAR, box) if type(left) is float else whole.crop(box).resize(size, BILINEAR)
    return np.asarray(ImageOps.mirror(small) if mirrored else small).astype(int)


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
@pytest.mark.parametrize("options", [{"crop": "random", "flip": True}, {"crop": "center", "resize": 72}])
def test_boxes_say_which_part_of_the_decoded_image_a_crop_is(options, orientation):
    """Of each of several images, which differ in size, by its name."""
    data = {"jpg": lying(orientation, "PNG", ramp(75, 100)), "left.png": lying(orientation, "WEBP", ramp(60, 90))}
    whole = {name: decode(image, upright=True) for name, image in data.items()}
    samples = [{"__key__": f"{number}", "__url__": "a.tar", **data} for number in range(30)]
    step = DecodeByExt(Given(samples), "rgb8", size=(36, 48), upright=True, boxes=True, **options)
    flips = set()
    for sample in Stream(step):
        assert sample.keys() == {"__key__", "__url__", *data, "__crop_jpg__", "__crop_left.png__"}
        for name in data:
            box = sample[f"__crop_{name}__"]
            assert (box.shape, box.dtype) == ((5,), np.int64 if options["crop"] == "random" else np.float64)
            assert np.abs(sample[name] - by_its_box(whole[name], box, (36, 48))).max() <= 3
            flips.add(int(box[4]))
    assert flips == ({0, 1} if options["crop"] == "random" else {0})


def test_boxes_come_with_batches_from_workers(tmp_path):
    urls = make_shards(str(tmp_path), shards=2, samples=4, fields=("jpg",))
    pipe = wp.ShardList(urls).open_shards().load_tar().group_by_key()
    whole = {sample["__key__"]: sample["jpg"] for sample in pipe.decode_by_ext("rgb8")}
    crops = pipe.decode_by_ext("rgb8", size=9, crop="random", flip=True, boxes=True)
    batches = list(wp.PipeLoader(crops, batch_size=4, num_workers=2))
    for batch in batches:
        assert (batch["__crop__"].shape, batch["__crop__"].dtype) == ((4, 5), torch.int64)
        for key, image, box in zip(batch["__key__"], batch["jpg"].numpy(), batch["__crop__"], strict=True):
            assert decibels(image, by_its_box(whole[key], box, (9, 9))) > 33
    assert len(batches) == 2


def test_crops_resume_exactly(tmp_path):
    urls = make_shards(str(tmp_path), shards=2, samples=6, fields=("jpg",))
    pipe = wp.ShardList(urls, shuffle=True).open_shards().load_tar().group_by_key().shuffle_buffer(4)
    check_resume(lambda: pipe.decode_by_ext("torchrgb8", size=9, crop="random", flip=True, boxes=True))
    twice = pipe.decode_by_ext("rgb8", size=9, crop="random").repeat(2)
    assert len({sample["jpg"].tobytes() for sample in twice}) > 12, "another crop in each epoch"


WRONG_CROPS = [
    ({"crop": "random"}, "pass size="),
    ({"crop": "center", "size": 8}, "resized to resize="),
    ({"crop": "center", "size": 8, "resize": 7}, "does not fit into images"),
    ({"size": 8, "flip": True}, "are those of crop='random'"),
    ({"size": 8, "boxes": True}, "pass crop="),
    ({"crop": "random", "size": 8, "scale": (0, 1)}, "scale is a pair of bounds"),
    ({"crop": "random", "size": 8, "fit": "contain"}, "no fit="),
    ({"crop": "left", "size": 8}, "crop must be one of 'random', 'center'"),
]


@pytest.mark.parametrize(("options", "message"), WRONG_CROPS)
def test_wrong_crops(options, message):
    with pytest.raises(ValueError, match=message):
        DecodeByExt(Given([]), "rgb8", **options)


def test_a_crop_needs_a_key():
    with pytest.raises(TypeError, match="draws its numbers by the __key__"):
        list(Stream(DecodeByExt(Given([{"jpg": b""}]), "rgb8", size=8, crop="random")))
