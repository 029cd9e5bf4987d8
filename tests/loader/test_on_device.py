"""Decoding of batches in the main process: ``PipeLoader(on_device=...)``.

Where no CUDA device is present, an imitation of torchcodec's interface stands for nvJPEG.
"""

import io
import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

import wds_pipes as wp
from wds_pipes.testing import make_shards


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
    """An imitation of torchcodec, whose tensors stay on the CPU. Like nvJPEG, it refuses some
    images, and then does not say which. It records how many images each call has.
    """
    calls = []

    def decode_jpeg(images, *, mode, device):
        assert device.type == "cuda"
        calls.append(len(images))
        opened = [Image.open(io.BytesIO(image)) for image in images]
        if any(image.mode == "CMYK" for image in opened) or any(b"refused" in image for image in images):
            raise RuntimeError("nvjpegDecodeBatched failed")
        return [
            torch.from_numpy(np.array(image.convert({"RGB": "RGB", "GRAY": "L"}[mode])))
            .reshape(image.height, image.width, -1)
            .permute(2, 0, 1)
            for image in opened
        ]

    decoders = types.ModuleType("torchcodec.decoders")
    decoders.decode_jpeg = decode_jpeg
    package = types.ModuleType("torchcodec")
    package.decoders = decoders
    monkeypatch.setitem(sys.modules, "torchcodec", package)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", decoders)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    zeros = torch.zeros

    def on_the_cpu(*shape, device, **options):
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", on_the_cpu)
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
    options = {"mix_lanes": mix_lanes, "on_device": on_device}
    expected = batches(encoded_batches(shards, **options))
    for cut in range(len(expected)):
        loader = encoded_batches(shards, **options)
        first = batches(batch for _, batch in zip(range(cut), loader, strict=False))
        state = loader.state_dict() if cut else None
        other = encoded_batches(shards, num_workers=1, **options)
        if state is not None:
            other.load_state_dict(state)
        same(first + batches(other), expected)
        other.close()


def test_after_an_error_the_batch_comes_again(shards):
    calls = []

    def fails_once(batch):
        calls.append(batch["__key__"])
        if len(calls) == 3:
            raise OSError("out of memory")
        return batch

    expected = [batch["__key__"] for batch in encoded_batches(shards)]
    loader, found = encoded_batches(shards, on_device=fails_once), []
    with pytest.raises(OSError, match="out of memory"):
        found.extend(batch["__key__"] for batch in loader)
    assert found == expected[:2]
    assert calls == expected[:3]
    state = loader.state_dict()
    loader = encoded_batches(shards, on_device=fails_once)
    loader.load_state_dict(state)
    assert [batch["__key__"] for batch in loader] == expected[2:]


def test_an_end_of_the_function_is_no_end_of_the_epoch(shards):
    def ends(batch):
        raise StopIteration

    with pytest.raises(RuntimeError, match="on_device raised StopIteration"):
        list(encoded_batches(shards, on_device=ends))


def test_nvjpeg_decodes_a_batch_in_one_call(shards, nvjpeg):
    """And the CPU what it does not decode: PNG and CMYK, which are two of five here."""
    on_device = wp.DecodeOnDevice("jpg", size=(32, 48), fit="stretch")
    decoded = pipe(shards).decode_by_ext("torchrgb8", size=(32, 48), fit="stretch")
    found = batches(encoded_batches(shards, on_device=on_device))
    expected = batches(wp.PipeLoader(decoded, batch_size=8, lanes=2))
    assert len(nvjpeg) == len(found)
    assert sum(nvjpeg) == 36
    for (keys, images, _), (other_keys, other_images, _) in zip(found, expected, strict=True):
        assert keys == other_keys
        assert images.shape == other_images.shape
        assert_close(images, other_images)


def assert_close(images, others):
    """The CPU decodes a JPEG roughly where it is resized."""
    difference = (images.float() - others.float()).abs()
    assert difference.max() <= 8, difference.max()
    assert difference.mean() <= 2, difference.mean()


@pytest.mark.parametrize("fit", ["cover", "contain"])
def test_crops_and_borders_on_the_device(shards, nvjpeg, fit):
    found = batches(encoded_batches(shards, on_device=wp.DecodeOnDevice("jpg", size=48, fit=fit)))
    decoded = pipe(shards).decode_by_ext("torchrgb8", size=48, fit=fit)
    expected = batches(wp.PipeLoader(decoded, batch_size=8, lanes=2))
    for (_, images, _), (_, other_images, _) in zip(found, expected, strict=True):
        assert_close(images, other_images)


def photograph(width, height):
    """A picture with edges, waves and noise, as a JPEG."""
    rng = np.random.default_rng(width * height)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x / rng.uniform(2, 60) + y / rng.uniform(2, 60)) + (x * y % 97 > 50) for _ in range(3)]
    picture = (90 + 50 * np.stack(waves, 2) + rng.normal(0, 6, (height, width, 1))).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=90)
    return file.getvalue()


def by_pillow(image, size, fit):
    """The same image, by Pillow alone."""
    height, width = size
    opened = Image.open(io.BytesIO(image)).convert("RGB")
    if fit == "stretch":
        resized = opened.resize((width, height), Image.Resampling.BILINEAR)
    else:
        resized = {"cover": ImageOps.fit, "contain": ImageOps.pad}[fit](
            opened, (width, height), Image.Resampling.BILINEAR
        )
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1).float()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    width=st.integers(1, 300),
    height=st.integers(1, 300),
    size=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    fit=st.sampled_from(["cover", "contain", "stretch"]),
)
def test_on_the_device_images_are_resized_as_by_pillow(nvjpeg, width, height, size, fit):
    """Of any shape, larger or smaller, and where a crop begins inside a pixel."""
    # Pillow makes nothing of an image that becomes less than a pixel wide or high
    assume(fit != "contain" or (round(width / height * size[0]) and round(height / width * size[1])))
    image = photograph(width, height)
    found = wp.DecodeOnDevice("jpg", size=size, fit=fit)({"jpg": [image]})["jpg"][0]
    assert (found.float() - by_pillow(image, size, fit)).abs().max() <= 1


@pytest.mark.parametrize("fit", ["cover", "contain", "stretch"])
@pytest.mark.parametrize("shape", [(500, 375), (375, 501), (1200, 900), (1023, 767)])
def test_the_device_and_the_cpu_agree_within_the_tolerance(nvjpeg, shape, fit):
    """Also where the CPU decodes at a smaller scale; see ``size`` of decode_by_ext."""
    batch = {"jpg": [photograph(*shape)]}
    found, expected = (
        wp.DecodeOnDevice("jpg", size=96, fit=fit, device=device)(batch)["jpg"].float() for device in ("cuda", "cpu")
    )
    assert 10 * torch.log10(255**2 / ((found - expected) ** 2).mean()) >= 40


def test_autocast_of_the_training_changes_nothing(nvjpeg):
    on_device, batch = wp.DecodeOnDevice("jpg", size=48), {"jpg": [photograph(200, 150)]}
    expected = on_device(batch)["jpg"]
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(on_device(batch)["jpg"], expected)


def test_a_warning_says_once_if_nothing_is_decoded_on_the_device(nvjpeg):
    good, refused, other = encoded(1), encoded(2) + b"refused", encoded(3, "PNG")
    on_device = wp.DecodeOnDevice("jpg", size=32)
    for images in ([refused], [other], [good, other], [refused], [], [refused, other]):
        on_device({"jpg": images})
    with pytest.warns(UserWarning, match=r"decoded no image of 3 batches on the device.*nvjpegDecodeBatched failed"):
        on_device({"jpg": [other]})
    for _ in range(8):
        on_device({"jpg": [refused]})
    on_cpu = wp.DecodeOnDevice("jpg", size=32, device="cpu")
    for _ in range(4):
        on_cpu({"jpg": [other]})


def test_what_nvjpeg_refuses_is_decoded_on_the_cpu(nvjpeg):
    """A batch fails as a whole, and is halved until the image that is refused is alone."""
    images = [encoded(number) for number in range(16)]
    images[5] += b"refused"
    on_device = wp.DecodeOnDevice("jpg", size=32)
    found = on_device({"jpg": images})["jpg"]
    assert nvjpeg == [16, 8, 4, 4, 2, 1, 1, 2, 8]
    expected = wp.DecodeOnDevice("jpg", size=32, device="cpu")({"jpg": images})["jpg"]
    assert_close(found, expected)


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
    with pytest.raises(wp.DecodeError, match="more than max_image_pixels=10000"):
        wp.DecodeOnDevice("jpg", size=32, device="cpu", max_image_pixels=10_000)(large)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="names of fields, or places"):
        wp.DecodeOnDevice(size=32)
    with pytest.raises(ValueError, match="names of fields, or places"):
        wp.DecodeOnDevice("jpg", 1, size=32)
    with pytest.raises(ValueError, match="spec is one of torchl8, torchrgb8"):
        wp.DecodeOnDevice("jpg", spec="rgb8", size=32)
    for device in ("gpu", "mps", "meta"):
        with pytest.raises(ValueError, match=f"device is 'cuda', such as 'cuda:1', or 'cpu', not '{device}'"):
            wp.DecodeOnDevice("jpg", size=32, device=device)
    with pytest.raises(TypeError, match="on_device is a function of a batch"):
        wp.PipeLoader(wp.ShardList(["a.tar"]).open_shards(), on_device="cuda")


def test_wrong_batches(monkeypatch):
    on_device = wp.DecodeOnDevice("jpg", size=32, device="cpu")
    with pytest.raises(TypeError, match="finds none of its fields in a batch of the fields 'png'"):
        on_device({"png": [b""]})
    with pytest.raises(TypeError, match=r"field 'jpg' is Tensor: leave its decoding out"):
        on_device({"jpg": torch.zeros(3)})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA device, and there is none: pass device='cpu'"):
        wp.DecodeOnDevice("jpg", size=32)({"jpg": [encoded(1)]})


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_is_refused(shards, method):
    step = pipe(shards).decode_by_ext(only=["cls"]).batch_samples(8).map_samples(wp.DecodeOnDevice("jpg", size=32))
    loader = wp.PipeLoader(step, num_workers=1, multiprocessing_context=method)
    with pytest.raises(RuntimeError, match=r"is for the main process, and this is a worker: pass it to PipeLoader"):
        next(iter(loader))


def test_a_real_device(shards):
    """On nvJPEG itself, where there is one."""
    pytest.importorskip("torchcodec", exc_type=(ImportError, RuntimeError))
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is present")
    found = batches(encoded_batches(shards, on_device=wp.DecodeOnDevice("jpg", size=(32, 48), fit="stretch")))
    decoded = pipe(shards).decode_by_ext("torchrgb8", size=(32, 48), fit="stretch")
    for (_, images, _), (_, other, _) in zip(
        found, batches(wp.PipeLoader(decoded, batch_size=8, lanes=2)), strict=True
    ):
        assert images.is_cuda
        assert (images.cpu().float() - other.float()).abs().mean() <= 2
