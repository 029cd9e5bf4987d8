"""wds-pipes create --encode: images are encoded again, and only if that is requested."""

import io

import numpy as np
import pytest
from commands import run_command
from PIL import Image, ImageOps
from test_create import fill, outputs, read, refused, run

COLOURS = np.random.default_rng(0).integers(0, 256, (6, 10, 3), np.uint8).repeat(8, 0).repeat(8, 1)  # 48 x 80


def stored(pixels, form, orientation=None, **options):
    """An image file of some pixels, as a camera that was held otherwise stores them."""
    exif = Image.Exif()
    if orientation is not None:
        exif[0x0112] = orientation
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, form, exif=exif, **options)
    return file.getvalue()


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)))


@pytest.fixture
def source(tmp_path):
    clear = np.dstack([COLOURS, COLOURS[..., :1]])
    files = {f"{number}.jpg": stored(COLOURS, "JPEG", quality=95) for number in range(4)}
    files |= {"clear.png": stored(clear, "PNG"), "grey.tif": stored(COLOURS[..., 0], "TIFF"), "0.cls": "7"}
    mask = stored(COLOURS[..., 0], "PNG")
    return fill(tmp_path / "in", {**files, "0.seg.png": mask, "1.seg.png": mask})


# What Pillow makes of an image; its sizes are of width and height.
CHANGED = {
    "": lambda image: image,
    "size=32": lambda image: ImageOps.fit(image, (32, 32), Image.Resampling.BILINEAR),
    "size=20x40,fit=contain": lambda image: ImageOps.pad(image, (40, 20), Image.Resampling.BILINEAR),
    "size=64x16,fit=stretch": lambda image: image.resize((16, 64), Image.Resampling.BILINEAR),
}


@pytest.mark.parametrize("size", CHANGED)
def test_images_are_encoded_and_resized(source, tmp_path, size):
    """PNG keeps each pixel, the field is named by the format, and the others stay."""
    run(source, tmp_path / "out", "--encode", f"png:{size}" if size else "png")
    found = read(tmp_path / "out")
    plain = {path.stem: path.read_bytes() for path in source.iterdir()}
    assert {key: sorted(fields) for key, fields in found.items()} == {
        "0": ["cls", "png", "seg.png"],
        "1": ["png", "seg.png"],
        "2": ["png"],
        "3": ["png"],
        "clear": ["png"],
        "grey": ["png"],
    }
    assert (found["0"]["cls"], found["0"]["seg.png"]) == (b"7", (source / "0.seg.png").read_bytes())
    for key, mode in (("1", "RGB"), ("clear", "RGBA"), ("grey", "L")):
        image = Image.open(io.BytesIO(found[key]["png"]))
        expected = CHANGED[size](Image.open(io.BytesIO(plain[key])))
        assert image.mode == mode
        assert image.tobytes() == expected.tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("form", ["PNG", "TIFF", "WEBP"])
def test_photos_are_turned_upright(tmp_path, form, orientation):
    """And the new files do not say so again; the size is that of the upright image."""
    turn = {
        1: lambda image: image,
        2: lambda image: image[:, ::-1],
        3: lambda image: image[::-1, ::-1],
        4: lambda image: image[::-1],
        5: lambda image: image.transpose(1, 0, 2),
        6: lambda image: image[:, ::-1].transpose(1, 0, 2),
        7: lambda image: image[::-1, ::-1].transpose(1, 0, 2),
        8: lambda image: image[::-1].transpose(1, 0, 2),
    }[orientation]  # from an upright image to what a camera stores
    options = {"lossless": True} if form == "WEBP" else {}
    data = stored(np.ascontiguousarray(turn(COLOURS)), form, orientation, **options)
    fill(tmp_path / "in", {f"a.{form.lower()}": data})
    run(tmp_path / "in", tmp_path / "out", "--encode", "png:size=48x80")
    image = read(tmp_path / "out")["a"]["png"]
    assert (pixels(image) == COLOURS).all()
    assert not dict(Image.open(io.BytesIO(image)).getexif())


def test_deep_photos_are_refused(tmp_path):
    fill(tmp_path / "in", {"a.png": stored(COLOURS[..., 0].astype(np.uint16) << 8, "PNG", 1)})
    done = run_command("create", tmp_path / "in", tmp_path / "out", "--encode", "png", code=1)
    assert "a.png cannot be encoded as png: the image has 16 bits a pixel" in done.output


def test_what_is_clear_is_white_in_jpeg(tmp_path):
    """Not the colour that a program has left there."""
    clear = np.zeros((16, 16, 4), np.uint8)
    clear[:, 8:] = (200, 40, 40, 255)
    palette = Image.fromarray(clear).convert("RGB").quantize(2)
    file = io.BytesIO()
    palette.save(file, "PNG", transparency=palette.getpixel((0, 0)))
    fill(tmp_path / "in", {"a.png": stored(clear, "PNG"), "b.png": file.getvalue()})
    run(tmp_path / "in", tmp_path / "out", "--encode", "jpg:q=95")
    for fields in read(tmp_path / "out").values():
        found = pixels(fields["jpg"]).astype(int)
        assert found[:, :7].min() > 240
        assert np.abs(found[:, 10:] - (200, 40, 40)).max() < 20


def test_quality_and_every_way(source, tmp_path):
    """The bytes are the same from one process, two, and shares."""
    sizes = {}
    for quality in (30, 90):
        place = tmp_path / f"q{quality}"
        run(source, place, "--encode", f"jpg:q={quality},size=32", "--max-samples", 2)
        sizes[quality] = len(read(place)["2"]["jpg"])
    assert sizes[30] < sizes[90]
    arguments = (source, tmp_path / "two", "--encode", "jpg:q=90,size=32", "--max-samples", 2)
    run(*arguments, "--task", 1, "--tasks", 2)
    run(*arguments, "-j", 2)
    assert outputs(tmp_path / "two") == outputs(tmp_path / "q90")


def test_what_cannot_be_decoded_is_named(source, tmp_path):
    fill(source, {"bad.jpg": (source / "1.jpg").read_bytes()[:900]})
    told = run(source, tmp_path / "out", "--encode", "jpg:size=8", "--max-samples", 3, code=1).stderr
    assert f"{source}/bad.jpg cannot be encoded as jpg:size=8: image file is truncated" in told
    assert "1 task failed" in told
    run(source, tmp_path / "plain")  # as it is, unless that is requested
    assert read(tmp_path / "plain")["bad"]["jpg"] == (source / "bad.jpg").read_bytes()


def test_two_images_of_one_sample(source, tmp_path):
    fill(source, {"clear.jpg": "x"})
    assert "sample 'clear' has the images jpg, png, which --encode would make one field" in refused(
        source, tmp_path / "out", "--encode", "jpg"
    )


@pytest.mark.parametrize(
    "encode",
    ["gif", "jpg:q=0", "png:q=9", "jpg:sise=9", "jpg:size=1x2x3", "jpg:size=8,size=9", "jpg:fit=cover", "png:fit=x"],
)
def test_wrong_usage(tmp_path, encode):
    assert f"and not {encode!r}" in refused(tmp_path, tmp_path / "out", "--encode", encode)
