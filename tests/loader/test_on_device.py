"""Decoding of batches in the main process: ``PipeLoader(on_device=...)``.

Where no CUDA device is present, an imitation of torchcodec's interface stands for nvJPEG.
"""

import io
import sys
import types
from unittest import mock

import numpy as np
import pytest
import torch
from pictures import ODD, PIXELS, saved, turned
from PIL import Image
from pipelines import loaded

import wds_pipes as wp
from wds_pipes.testing import check_resume, make_shards


def encoded(number, name="JPEG", size=(96, 64), mode="RGB"):
    """A smooth picture."""
    width, height = size
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    picture = np.stack([x, y, np.full_like(x, 17 * number % 256)], 2).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(picture).convert(mode).save(file, name, **({"quality": 95} if name == "JPEG" else {}))
    return file.getvalue()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    kinds = [("JPEG", "RGB"), ("JPEG", "L"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("JPEG", "RGB")]
    return make_shards(
        tmp_path_factory.mktemp("pictures"),
        shards=3,
        samples=20,
        fields={
            "jpg": lambda rng, number: encoded(number, kinds[number % 5][0], (96 + number, 64), kinds[number % 5][1]),
            "cls": lambda rng, number: b"%d" % number,
        },
    )


def pipe(shards):
    return wp.ShardList(shards, shuffle=True).open_shards().load_tar().group_by_key()


def encoded_batches(shards, **options):
    return wp.PipeLoader(pipe(shards).decode_by_ext(only=["cls"]), batch_size=8, lanes=2, **options)


@pytest.fixture
def nvjpeg(monkeypatch):
    """An imitation of torchcodec, whose tensors stay on the CPU. It refuses a batch with an image
    that says so, and records how many images each call has.
    """
    calls, stream = [], mock.MagicMock()

    def decode_jpeg(images, *, mode, device):
        assert (mode, device.type) == ("RGB", "cuda")
        assert stream.synchronize.called  # since the last call
        stream.synchronize.reset_mock()
        files = [image.numpy().tobytes() for image in images]
        calls.append(len(files))
        if any(b"refused" in file for file in files):
            raise RuntimeError("nvjpegDecodeBatched failed")
        return [
            torch.from_numpy(np.array(Image.open(io.BytesIO(file)).convert("RGB"))).permute(2, 0, 1) for file in files
        ]

    decoders = types.ModuleType("torchcodec.decoders")
    decoders.decode_jpeg = decode_jpeg
    package = types.ModuleType("torchcodec")
    package.decoders = decoders
    monkeypatch.setitem(sys.modules, "torchcodec", package)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", decoders)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda shape, device, **options: zeros(shape, **options))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return calls


def batches(loader):
    return [(batch["__key__"], batch["jpg"], batch["cls"]) for batch in loader]


def same(found, expected):
    assert len(found) == len(expected)
    for (keys, images, labels), (other_keys, other_images, other_labels) in zip(found, expected, strict=True):
        assert keys == other_keys
        assert torch.equal(images, other_images)
        assert torch.equal(labels, other_labels)


@pytest.mark.parametrize("spec", ["torchrgb8", "torchl"])
@pytest.mark.parametrize("fit", ["cover", "contain", "stretch"])
def test_on_the_cpu_it_is_decode_by_ext(shards, spec, fit):
    on_device = wp.DecodeOnDevice("jpg;png", spec=spec, size=(32, 48), fit=fit, device="cpu")
    decoded = pipe(shards).decode_by_ext(spec, size=(32, 48), fit=fit)
    same(
        batches(encoded_batches(shards, num_workers=2, on_device=on_device)),
        batches(wp.PipeLoader(decoded, batch_size=8, lanes=2)),
    )


@pytest.mark.parametrize("mix_lanes", [1, 2])
def test_a_resume_decodes_on(shards, mix_lanes):
    on_device = wp.DecodeOnDevice("jpg", size=32, device="cpu")
    check_resume(lambda: encoded_batches(shards[:2], mix_lanes=mix_lanes, on_device=on_device))


def test_after_an_error_the_batch_comes_again(shards):
    calls, found = [], []

    def fails_once(batch):
        calls.append(batch["__key__"])
        if len(calls) == 3:
            raise OSError("out of memory")
        return batch["__key__"]

    expected = [batch["__key__"] for batch in encoded_batches(shards)]
    loader = encoded_batches(shards, on_device=fails_once)
    with pytest.raises(OSError, match="out of memory"):
        found.extend(loader)
    assert (found, calls) == (expected[:2], expected[:3])
    assert list(loaded(encoded_batches(shards, on_device=fails_once), loader.state_dict())) == expected[2:]


def test_an_end_of_the_function_is_no_end_of_the_epoch(shards):
    def ends(batch):
        raise StopIteration

    with pytest.raises(RuntimeError, match="on_device raised StopIteration"):
        list(encoded_batches(shards, on_device=ends))


def test_the_device_decodes_a_batch_in_one_call(shards, nvjpeg):
    """And the CPU decodes PNG and CMYK, which are two of five here."""
    on_device = wp.DecodeOnDevice("jpg", size=(32, 48), fit="stretch")
    decoded = pipe(shards).decode_by_ext("torchrgb8", size=(32, 48), fit="stretch")
    found, expected = (
        batches(wp.PipeLoader(each, batch_size=20, lanes=1, on_device=function))
        for each, function in ((pipe(shards).decode_by_ext(only=["cls"]), on_device), (decoded, None))
    )
    assert nvjpeg == [12, 12, 12]
    for (keys, images, _), (other_keys, other_images, _) in zip(found, expected, strict=True):
        assert keys == other_keys
        assert (images.float() - other_images.float()).abs().max() <= 4


@pytest.mark.parametrize("fit", ["cover", "contain", "stretch"])
@pytest.mark.parametrize("spec", ["torchrgb8", "torchl8"])
def test_crops_and_borders_on_the_device(spec, fit, nvjpeg):
    """They differ by less than a pixel of the image from the CPU's."""
    batch = {"jpg": [encoded(1, size=(97, 64)), encoded(2, size=(40, 90))]}
    found, expected = (
        wp.DecodeOnDevice("jpg", spec=spec, size=(24, 32), fit=fit, device=device)(batch)["jpg"].float()
        for device in ("cuda", "cpu")
    )
    assert nvjpeg == [2]
    assert (found - expected).abs().max() <= 8


@pytest.mark.parametrize("image", [ODD["colours"][:-40], saved(PIXELS, "PNG"), saved(PIXELS, exif=turned(6))])
def test_what_the_device_would_decode_in_another_way_is_left_to_the_cpu(image, nvjpeg):
    found = []
    for device in ("cuda", "cpu"):
        try:
            found.append(wp.DecodeOnDevice("jpg", size=24, device=device)({"jpg": [image]})["jpg"].tolist())
        except wp.DecodeError as error:
            found.append(str(error))
    assert not nvjpeg
    assert found[0] == found[1]


def test_a_refused_batch_is_decoded_on_the_cpu(nvjpeg):
    good, refused = encoded(1), encoded(2)
    refused = refused[:2] + b"\xff\xfe\0\x09refused" + refused[2:]
    on_device, on_cpu = (wp.DecodeOnDevice("jpg", size=32, device=device) for device in ("cuda", "cpu"))
    with pytest.warns(UserWarning, match=r"torchcodec refused a batch, which the CPU decodes \(.*nvjpegDecode"):
        found = on_device({"jpg": [good, refused]})["jpg"]
    assert torch.equal(found, on_cpu({"jpg": [good, refused]})["jpg"])
    on_device({"jpg": [refused]})  # the warning comes once


def test_an_error_of_the_device_is_raised(nvjpeg, monkeypatch):
    def fails(*arguments, **options):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(sys.modules["torchcodec.decoders"], "decode_jpeg", fails)
    with pytest.raises(RuntimeError, match="CUDA error"):
        wp.DecodeOnDevice("jpg", size=32)({"jpg": [encoded(1)]})


def test_an_old_torchcodec_is_an_error(nvjpeg, monkeypatch):
    monkeypatch.delattr(sys.modules["torchcodec.decoders"], "decode_jpeg")
    with pytest.raises(ImportError, match=r"needs torchcodec 0\.16 or newer"):
        wp.DecodeOnDevice("jpg", size=32)({"jpg": [encoded(1)]})


def test_batches_of_a_real_device(shards):
    pytest.importorskip("torchcodec", exc_type=(ImportError, RuntimeError))
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is present")
    found, expected = (
        batches(encoded_batches(shards, on_device=wp.DecodeOnDevice("jpg", size=32, device=device)))
        for device in ("cuda", "cpu")
    )
    for (keys, images, _), (other_keys, other_images, _) in zip(found, expected, strict=True):
        assert keys == other_keys
        assert (images.cpu().float() - other_images.float()).abs().mean() <= 4


def test_tuples_by_place():
    images = [encoded(number) for number in range(4)]
    batch = wp.DecodeOnDevice(1, spec="torchrgb", size=(20, 30), device="cpu")((torch.arange(4), images))
    assert isinstance(batch, tuple)
    assert batch[1].shape == (4, 3, 20, 30)
    assert batch[1].dtype is torch.float32
    assert 0 <= batch[1].min() < batch[1].max() <= 1


def test_errors_name_the_sample():
    batch = {"__key__": ["a", "b"], "__url__": ["x.tar", "y.tar"], "jpg": [encoded(1), b"no image"]}
    with pytest.raises(wp.DecodeError, match=r"field 'jpg' of sample 'b' in shard y\.tar cannot be decoded") as caught:
        wp.DecodeOnDevice("jpg", size=32, device="cpu")(batch)
    assert (caught.value.key, caught.value.url, caught.value.field) == ("b", "y.tar", "jpg")
    large = {**batch, "jpg": [encoded(1), encoded(2, size=(300, 200))]}
    with pytest.raises(wp.DecodeError, match="more than 10000. Pass a larger max_image_pixels"):
        wp.DecodeOnDevice("jpg", size=32, device="cpu", max_image_pixels=10_000)(large)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: wp.DecodeOnDevice(size=32), ValueError, "names of fields, or places"),
        (lambda: wp.DecodeOnDevice("jpg", 1, size=32), ValueError, "names of fields, or places"),
        (lambda: wp.DecodeOnDevice("jpg", spec="rgb8", size=32), ValueError, "spec is one of torchl8, torchrgb8"),
        *(
            (lambda device=device: wp.DecodeOnDevice("jpg", size=32, device=device), ValueError, f"not '{device}'")
            for device in ("gpu", "mps", "meta")
        ),
        (
            lambda: wp.PipeLoader(wp.ShardList(["a.tar"]).open_shards(), on_device="cuda"),
            TypeError,
            "on_device is a function of a batch",
        ),
    ],
)
def test_wrong_arguments(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"png": [b""]}, "finds none of its fields in a batch of the fields 'png'"),
        ({"jpg": torch.zeros(3)}, "which field 'jpg' is not: leave its decoding out"),
        ({"jpg": [b"", None]}, "which field 'jpg' is not: leave its decoding out"),
    ],
)
def test_wrong_batches(batch, message):
    with pytest.raises(TypeError, match=message):
        wp.DecodeOnDevice("jpg", size=32, device="cpu")(batch)


def test_without_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA device, and there is none: pass device='cpu'"):
        wp.DecodeOnDevice("jpg", size=32)({"jpg": [encoded(1)]})


def test_a_worker_is_refused(shards):
    step = pipe(shards).decode_by_ext(only=["cls"]).batch_samples(8).map_samples(wp.DecodeOnDevice("jpg", size=32))
    loader = wp.PipeLoader(step, num_workers=1)
    with pytest.raises(RuntimeError, match=r"and this is a worker: pass it to PipeLoader"):
        next(iter(loader))
