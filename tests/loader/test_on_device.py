"""Decoding of batches in the main process: ``PipeLoader(on_device=...)``.

Where no CUDA device is present, an imitation of torchcodec's interface stands for nvJPEG.
"""

import contextlib
import io
import re
import sys
import types
import warnings
from collections import namedtuple
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pictures import ODD, PIXELS, saved, segment, smooth, taller, turned
from PIL import Image, ImageFile, ImageOps

import wds_pipes as wp
from wds_pipes.codecs.jpeg_header import read_header
from wds_pipes.loader import nvjpeg as nvjpeg_module
from wds_pipes.loader import on_device as on_device_module
from wds_pipes.loader.nvjpeg import _stream as streams
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
    """An imitation of torchcodec, whose tensors stay on the CPU. It does what nvJPEG and torchcodec
    were seen to do: it turns an image as its EXIF says, takes RGB for YCbCr, decodes an image that
    is cut off, and refuses others, and then does not say which. It records how many images each
    call has.
    """
    calls = []
    stream = mock.MagicMock()

    def decoded(image):
        opened = Image.open(io.BytesIO(image))
        if opened.mode == "CMYK" or b"refused" in image:
            raise RuntimeError("nvjpegDecodeBatched failed")
        if opened.info.get("adobe_transform") == 0:
            opened = Image.merge("YCbCr", opened.split()).convert("RGB")
        opened = ImageOps.exif_transpose(opened).convert("RGB")
        return torch.from_numpy(np.array(opened)).reshape(opened.height, opened.width, -1).permute(2, 0, 1)

    def decode_jpeg(images, *, mode, device):
        assert (mode, device.type) == ("RGB", "cuda")
        assert stream.synchronize.called  # since the last call
        stream.synchronize.reset_mock()
        assert all(image.dtype == torch.uint8 and image.ndim == 1 for image in images)
        calls.append(len(images))
        with monkeypatch.context() as patch:
            patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
            return [decoded(image.numpy().tobytes()) for image in images]

    decoders = types.ModuleType("torchcodec.decoders")
    decoders.decode_jpeg = decode_jpeg
    package = types.ModuleType("torchcodec")
    package.decoders = decoders
    monkeypatch.setitem(sys.modules, "torchcodec", package)
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", decoders)
    zeros = torch.zeros

    def on_the_cpu(*shape, device, **options):
        return zeros(*shape, **options)

    monkeypatch.setattr(torch, "zeros", on_the_cpu)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    for name, value in (("is_available", True), ("current_device", 0), ("Stream", stream), ("current_stream", stream)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    streams.cache_clear()
    yield calls
    streams.cache_clear()


@pytest.fixture
def gpu():
    """The decoder of a real device."""
    pytest.importorskip("torchcodec", exc_type=(ImportError, RuntimeError))
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is present")


@pytest.fixture(params=["nvjpeg", "gpu"])
def decoder(request):
    """The imitation, and the decoder of a real device."""
    request.getfixturevalue(request.param)
    return request.param


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


@pytest.mark.slow
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


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Samples whose JPEGs are large enough for blocks of shared memory, every second with EXIF."""
    return make_shards(
        tmp_path_factory.mktemp("photographs"),
        shards=2,
        samples=12,
        fields={
            "jpg": lambda rng, number: saved(
                smooth(200, 300, seed=number), quality=95, **({"exif": turned(6)} if number % 2 else {})
            ),
            "cls": lambda rng, number: b"%d" % number,
        },
    )


@pytest.fixture
def seen(monkeypatch):
    """What this process does: the images whose headers it reads, and those that nvJPEG gets."""
    headers, images = [], []
    read, decode = nvjpeg_module.read_header, nvjpeg_module.decode

    def reading(data):
        headers.append(data)
        return read(data)

    def decode_some(codec, some, device):
        images.extend(some.values())
        return decode(codec, some, device)

    monkeypatch.setattr(nvjpeg_module, "read_header", reading)
    monkeypatch.setattr(nvjpeg_module, "decode", decode_some)
    return headers, images


@pytest.mark.parametrize("mix_lanes", [1, 2])
def test_workers_read_the_headers_and_images_arrive_without_a_copy(photographs, mix_lanes, nvjpeg, seen):
    options = {"mix_lanes": mix_lanes, "on_device": wp.DecodeOnDevice("jpg", size=32)}
    expected = batches(encoded_batches(photographs, **options))
    headers, images = seen
    written = set(headers)
    assert len(written) == 24
    assert {bytes(image.data) for image in images} == written  # EXIF has its name again
    headers.clear()
    images.clear()
    loader = encoded_batches(photographs, num_workers=2, **options)
    same(batches(loader), expected)
    loader.close()
    assert not headers
    assert {type(image.data) for image in images} == {memoryview}  # of a block
    assert {bytes(image.data) for image in images} == written
    assert sum(bool(image.exif) for image in images) == 12


def test_it_resumes_twice_with_workers(photographs, nvjpeg):
    """At every cut, and once more one batch later."""
    options = {"num_workers": 1, "on_device": wp.DecodeOnDevice("jpg", size=32)}
    expected = batches(encoded_batches(photographs, on_device=options["on_device"]))
    for cut in range(len(expected) - 1):
        found, state = [], None
        for most in (cut, 1, len(expected)):
            loader = encoded_batches(photographs, **options)
            if state is not None:
                loader.load_state_dict(state)
            found += batches(batch for _, batch in zip(range(most), loader, strict=False))
            state = loader.state_dict()
            loader.close()
        same(found, expected)


def test_after_an_error_the_batch_of_a_worker_comes_again(photographs, nvjpeg, monkeypatch):
    on_device = wp.DecodeOnDevice("jpg", size=32)
    expected = batches(encoded_batches(photographs, on_device=on_device))
    decode, calls = nvjpeg_module.decode, []

    def fails_once(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise RuntimeError("CUDA error: out of memory")
        return decode(*arguments)

    monkeypatch.setattr(nvjpeg_module, "decode", fails_once)
    loader, found = encoded_batches(photographs, num_workers=1, on_device=on_device), []
    with pytest.raises(RuntimeError, match="out of memory"):
        found.extend((batch["__key__"], batch["jpg"], batch["cls"]) for batch in loader)
    assert len(found) == 1
    other = encoded_batches(photographs, num_workers=1, on_device=on_device)
    other.load_state_dict(loader.state_dict())
    loader.close()
    same(found + batches(other), expected)
    other.close()


def test_within_another_function_images_arrive_as_bytes(photographs, nvjpeg):
    on_device = wp.DecodeOnDevice("jpg", size=32)
    expected = batches(encoded_batches(photographs, on_device=on_device))
    kinds = set()

    def function(batch):
        kinds.update(map(type, batch["jpg"]))
        return on_device(batch)

    loader = encoded_batches(photographs, num_workers=1, on_device=function)
    same(batches(loader), expected)
    loader.close()
    assert kinds == {bytes}


def test_an_image_that_comes_several_times_is_sent_once(photographs, nvjpeg, seen):
    image = saved(smooth(200, 300), quality=95)
    same_images = pipe(photographs).map_samples(lambda sample: {**sample, "jpg": image})
    loader = wp.PipeLoader(same_images, batch_size=8, num_workers=1, on_device=wp.DecodeOnDevice("jpg", size=32))
    next(iter(loader))
    loader.close()
    assert len(seen[1]) == 8
    assert len(set(map(id, seen[1]))) == 1


class OfBytes(namedtuple("OfBytes", "jpg cls")):
    """A batch that takes no other images."""

    def __new__(cls, jpg, labels):
        assert torch.is_tensor(jpg) or {type(image) for image in jpg} == {bytes}
        return super().__new__(cls, jpg, labels)


class Looks(wp.DecodeOnDevice):
    """It looks at the images itself."""

    def __call__(self, batch):
        assert all(image.startswith(b"\xff\xd8") for image in batch["jpg"])
        return super().__call__(batch)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_other_classes_get_the_bytes(photographs, num_workers):
    options = {"batch_size": None, "num_workers": num_workers}
    pairs = pipe(photographs).batch_samples(4).map_samples(lambda batch: OfBytes(batch["jpg"], batch["cls"]))
    for members, on_device in (
        (pairs, wp.DecodeOnDevice(0, size=32, device="cpu")),
        (pipe(photographs).batch_samples(4), Looks("jpg", size=32, device="cpu")),
    ):
        loader = wp.PipeLoader(members, on_device=on_device, **options)
        batch = next(iter(loader))
        loader.close()
        assert (batch.jpg if isinstance(batch, tuple) else batch["jpg"]).shape == (4, 3, 32, 32)


def test_they_arrive_where_there_are_no_blocks(photographs, nvjpeg, monkeypatch):
    on_device = wp.DecodeOnDevice("jpg", size=32)
    expected = batches(encoded_batches(photographs, on_device=on_device))
    monkeypatch.delattr("os.memfd_create", raising=False)
    loader = encoded_batches(photographs, num_workers=1, on_device=on_device)
    same(batches(loader), expected)
    loader.close()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_an_image_from_a_worker_is_found_in_its_shard(tmp_path, method):
    with wp.TarWriter(tmp_path / "0.tar") as writer:
        writer.write({"__key__": "good", "jpg": COLOURS})
        writer.write({"__key__": "bad", "jpg": saved(PIXELS, exif=turned(6))[:-100]})
    members = wp.ShardList([str(tmp_path / "0.tar")]).open_shards().load_tar()
    offsets = {member.name: member.offset for member in members}
    on_device = wp.DecodeOnDevice("jpg", size=32, device="cpu")
    loader = wp.PipeLoader(
        members.group_by_key(), batch_size=2, num_workers=1, multiprocessing_context=method, on_device=on_device
    )
    with pytest.raises(wp.DecodeError) as caught:
        next(iter(loader))
    loader.close()
    assert (caught.value.key, caught.value.offset) == ("bad", offsets["bad.jpg"])


def test_what_is_no_image_is_named_as_without_workers(shards):
    on_device = wp.DecodeOnDevice("jpg", size=32, device="cpu")
    mixed = pipe(shards).map_samples(lambda sample: {**sample, "jpg": sample["jpg"].hex()})
    loader = wp.PipeLoader(mixed, batch_size=8, num_workers=1, on_device=on_device)
    with pytest.raises(TypeError, match="field 'jpg' has str at place 0"):
        next(iter(loader))
    loader.close()


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
    good, other = encoded(1), encoded(3, "PNG")
    on_device = wp.DecodeOnDevice("jpg", "mask", size=32)
    for images in ([other], [other], [good, other], [other], [], [other]):
        on_device({"jpg": images, "mask": [good]})
    with pytest.warns(UserWarning, match=r"for field 'jpg', nvJPEG decoded no image of 3 batches in a row"):
        on_device({"jpg": [other], "mask": [good]})
    for images in ([other], [good], *([other],) * 4):
        on_device({"jpg": images, "mask": [good]})
    on_cpu = wp.DecodeOnDevice("jpg", size=32, device="cpu")
    for _ in range(4):
        on_cpu({"jpg": [other]})


@pytest.mark.parametrize(
    ("refused", "calls"), [([5], [16] + 16 * [1]), ([3, 5], [16] + 6 * [1]), (range(16), [16, 1, 1])], ids=str
)
def test_what_nvjpeg_refuses_is_decoded_on_the_cpu(refused, calls, nvjpeg):
    """A batch fails as a whole, and then each image is tried alone, until two of them have failed:
    each failure takes a second.
    """
    images = [encoded(number) + b"refused" * (number in refused) for number in range(16)]
    found = wp.DecodeOnDevice("jpg", size=32)({"jpg": images})["jpg"]
    assert nvjpeg == calls
    expected = wp.DecodeOnDevice("jpg", size=32, device="cpu")({"jpg": images})["jpg"]
    assert_close(found, expected)


def test_a_warning_says_once_if_images_are_refused_again_and_again(nvjpeg):
    """Also where other batches come between."""
    on_device, good, refused = wp.DecodeOnDevice("jpg", size=32), encoded(1), encoded(2) + b"refused"
    for images in ([good, refused], [good], [refused], [good]):
        on_device({"jpg": images})
    with pytest.warns(UserWarning, match=r"'jpg', nvJPEG refused images of 3 batches, each of which takes a .*\(nvj"):
        on_device({"jpg": [good, refused]})
    for images in ([refused], [good], *([refused],) * 4):
        on_device({"jpg": images})


def test_tuples_by_place():
    images = [encoded(number) for number in range(4)]
    batch = wp.DecodeOnDevice(1, spec="torchrgb", size=(20, 30), device="cpu")((torch.arange(4), images))
    assert isinstance(batch, tuple)
    assert batch[1].shape == (4, 3, 20, 30)
    assert batch[1].dtype is torch.float32
    assert 0 <= batch[1].min() < batch[1].max() <= 1


def test_bytes_of_numpy_are_images():
    image = encoded(1)
    on_device = wp.DecodeOnDevice("jpg", size=32, device="cpu")
    assert torch.equal(on_device({"jpg": [np.bytes_(image)]})["jpg"], on_device({"jpg": [image]})["jpg"])


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
    with pytest.raises(TypeError, match=r"field 'jpg' has NoneType at place 1: leave its decoding out"):
        on_device({"jpg": [b"", None]})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA device, and there is none: pass device='cpu'"):
        wp.DecodeOnDevice("jpg", size=32)({"jpg": [encoded(1)]})


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_is_refused(shards, method):
    step = pipe(shards).decode_by_ext(only=["cls"]).batch_samples(8).map_samples(wp.DecodeOnDevice("jpg", size=32))
    loader = wp.PipeLoader(step, num_workers=1, multiprocessing_context=method)
    with pytest.raises(RuntimeError, match=r"is for the main process, and this is a worker: pass it to PipeLoader"):
        next(iter(loader))


@pytest.mark.parametrize("spec", ["torchrgb8", "torchl8"])
@pytest.mark.parametrize("name", [*ODD, *(f"turned {number}" for number in range(1, 9))])
def test_odd_jpegs_are_those_of_the_cpu(name, spec, decoder):
    """Neither turned, as torchcodec turns them, nor with the colours that nvJPEG makes of RGB."""
    image = saved(PIXELS, exif=turned(int(name[-1]))) if name.startswith("turned") else ODD[name]
    size = Image.open(io.BytesIO(image)).size[::-1]
    found, expected = (
        wp.DecodeOnDevice("jpg", spec=spec, size=size, device=device)({"jpg": [image]})["jpg"].cpu().float()
        for device in ("cuda", "cpu")
    )
    difference = (found - expected).abs()
    # these pictures have grain of all colours, which nvJPEG does not smooth
    assert difference.mean() <= (8 if decoder == "gpu" and spec == "torchrgb8" else 0.1)
    if decoder == "nvjpeg" or spec == "torchl8":
        assert difference.max() <= (3 if decoder == "nvjpeg" else 8)


COLOURS = ODD["colours"]
FRAME = COLOURS.index(b"\xff\xc0")
SCAN = COLOURS.index(b"\xff\xda")
PROGRESSIVE = ODD["progressive"]
SCANS = [place for place in range(len(PROGRESSIVE)) if PROGRESSIVE.startswith(b"\xff\xda", place)]
DAMAGED = {
    **{f"cut at {end}": COLOURS[:end] for end in (3, 20, FRAME + 6, SCAN + 4, SCAN + 20, -400, -40, -2, -1)},
    **{f"progressive, cut at {end}": ODD["progressive"][:end] for end in (-500, -40, -2)},
    "grey, cut": ODD["grey"][:-40],
    "restarts, cut": ODD["restarts"][:-40],
    "a thumbnail, cut": ODD["a thumbnail"][:-40],
    "no frame": COLOURS[:FRAME] + COLOURS[FRAME + 19 :],
    "no components": COLOURS[: FRAME + 9] + b"\0" + COLOURS[FRAME + 10 :],
    "no height": taller(COLOURS, 0, 83),
    "too large": taller(COLOURS, 2000, 2001),
    "two frames": COLOURS[:FRAME] + segment(0xC0, b"\x08\x07\xd0\x07\xd0\1\1\x11\0") + COLOURS[FRAME:],
    "cut, and another picture after it": COLOURS[: SCAN + 300] + COLOURS,
    "cut, and another file after it": COLOURS[: SCAN + 300] + saved(PIXELS, "PNG") + b"\xff\xd9",
    "cut, and its own header after it": COLOURS[: SCAN + 300] + COLOURS[FRAME:],
    "codes in a scan": COLOURS[: SCAN + 60] + b"\xff\xc4\0\3\0" + COLOURS[SCAN + 60 :],
    "cut in a segment of Adobe": COLOURS[:2] + segment(0xEE, b"Adobe\0\x64\0\0\0\0\1")[:9],
    "no length between scans": PROGRESSIVE[: SCANS[2]] + b"\xff\xc4\0\0" + PROGRESSIVE[SCANS[2] :],
    "cut at a comment": PROGRESSIVE[: SCANS[2]]
    + segment(0xFE, b"hi\xff\xd9ho")
    + PROGRESSIVE[SCANS[2] : SCANS[2] + 40],
    "too many scans": ODD["progressive"][:-2] + ODD["progressive"][ODD["progressive"].rindex(b"\xff\xda") :] * 101,
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_jpegs_are_errors_of_the_sample(name, decoder):
    """Also what nvJPEG would decode, grey below or whatever its header says."""
    batch = {"__key__": ["good", "bad"], "jpg": [COLOURS, DAMAGED[name]]}
    with pytest.raises(wp.DecodeError, match="field 'jpg' of sample 'bad'"):
        wp.DecodeOnDevice("jpg", size=32, max_image_pixels=4_000_000)(batch)


def changed(place, content, image=COLOURS):
    """An image with other bytes at a place."""
    return image[:place] + content + image[place + len(content) :]


def begun_with(*segments):
    """An image with other segments before all others."""
    return COLOURS[:2] + b"".join(segments) + COLOURS[2:]


def after(scan):
    """Where the next scan of the progressive image begins, or its end."""
    return next((place for place in SCANS if place > scan), len(PROGRESSIVE) - 2)


ADOBE = b"Adobe\0\x64\0\0\0\0"
JFIF = COLOURS.index(b"\xff\xe0")
TABLES = {name: COLOURS.index(marker) for name, marker in (("codes", b"\xff\xc4"), ("numbers", b"\xff\xdb"))}
HEADER = COLOURS[SCAN + 4 : SCAN + 14]
CODES = bytes([0, 2, *bytes(14), 7, 7])  # two codes of two bits
LUMA = [place for place in SCANS if PROGRESSIVE[place + 4 : place + 6] == b"\1\1"]
FINER, FINEST = (next(place for place in LUMA if PROGRESSIVE[place + 9] == bits) for bits in (0x21, 0x10))
AFTER_JFIF = JFIF + 2 + int.from_bytes(COLOURS[JFIF + 2 : JFIF + 4], "big")
RENAMED = changed(FRAME + 10, b"R", changed(SCAN + 5, b"R"))
LEFT_OPEN = {
    "no Huffman codes, as in Motion JPEG": COLOURS[: TABLES["codes"]] + COLOURS[SCAN:],
    "no numbers of quantization": COLOURS[:AFTER_JFIF] + COLOURS[FRAME:],
    "RGB, beside JFIF": begun_with(segment(0xEE, ADOBE + b"\0")),
    "no JFIF, and other names": RENAMED[:JFIF] + RENAMED[AFTER_JFIF:],
    "a short JFIF, and other names": RENAMED[:JFIF] + segment(0xE0, b"JFIF\0\1\1") + RENAMED[AFTER_JFIF:],
    "two colours of one name": changed(FRAME + 13, b"\1", changed(SCAN + 7, b"\1")),
    "a byte between segments": begun_with(b"\xff"),
    "an unknown segment": begun_with(segment(0xF0, b"abc")),
    "very many segments": begun_with(*[segment(0xFE, b"")] * 1000),
    "grey in fours": ODD["grey"].replace(b"\1\x11\0\xff", b"\1\x22\0\xff"),
    "4:1:0": changed(FRAME + 11, b"\x42"),
    "12 bits": changed(FRAME + 4, b"\x0c"),
    "numbers that are not there": changed(FRAME + 12, b"\3"),
    "codes that are not there": changed(SCAN + 6, b"\x33"),
    "a table of number 5": begun_with(segment(0xC4, b"\5" + CODES)),
    "a table of another kind": begun_with(segment(0xC4, b"\x23" + CODES)),
    "a table cut off": begun_with(segment(0xC4, b"\3" + CODES[:-1])),
    "too many codes": begun_with(segment(0xC4, b"\3" + bytes([3, *bytes(15), 7, 7, 7]))),
    "a code of all ones": begun_with(segment(0xC4, b"\3\2" + bytes(15) + b"\7\7")),
    "more codes than symbols": begun_with(segment(0xC4, b"\x13" + bytes([*bytes(13), 200, 200, 200]) + bytes(600))),
    "colours of 200 bits": begun_with(segment(0xC4, b"\3" + CODES[:-2] + b"\xc8\xc9")),
    "very many codes": begun_with(segment(0xC4, (b"\3" + CODES) * 200)),
    "a shorter frame": COLOURS[:FRAME] + segment(0xC0, COLOURS[FRAME + 4 : FRAME + 18]) + COLOURS[FRAME + 19 :],
    "other numbers between scans": PROGRESSIVE[: SCANS[1]]
    + segment(0xDB, b"\0" + b"\xff" * 64)
    + PROGRESSIVE[SCANS[1] :],
    "RGB between scans": PROGRESSIVE[: SCANS[1]] + segment(0xEE, ADOBE + b"\0") + PROGRESSIVE[SCANS[1] :],
    "very many segments between scans": PROGRESSIVE[: SCANS[1]] + segment(0xFE, b"") * 1000 + PROGRESSIVE[SCANS[1] :],
    "numbers of 16 bits": changed(TABLES["numbers"] + 4, b"\x10"),
    "restarts of 3 bytes": begun_with(segment(0xDD, bytes(3))),
    "a scan of another order": changed(SCAN + 5, b"\2\0\1"),
    "a scan of one colour": COLOURS[:SCAN] + segment(0xDA, b"\1\1\0\0\x3f\0") + COLOURS[SCAN + 14 :],
    "a scan of two of three colours": changed(SCAN + 4, b"\2"),
    "a longer scan": COLOURS[:SCAN] + segment(0xDA, HEADER[:7] + b"\0" + HEADER[7:]) + COLOURS[SCAN + 14 :],
    "a scan of some coefficients": changed(SCAN + 11, b"\0\x3e"),
    "first scan of another order": changed(SCANS[0] + 5, b"\2\x11\1\0", PROGRESSIVE),
    "two bits at once": changed(FINER + 9, b"\x20", PROGRESSIVE[:FINEST]) + PROGRESSIVE[after(FINEST) :],
    "scans left out": PROGRESSIVE[: SCANS[3]] + b"\xff\xd9",
    "a scan twice": PROGRESSIVE[: SCANS[1]] + PROGRESSIVE[SCANS[0] : SCANS[1]] + PROGRESSIVE[SCANS[1] :],
    "a frame among the scans": PROGRESSIVE[: SCANS[1]] + PROGRESSIVE[FRAME : FRAME + 19] + PROGRESSIVE[SCANS[1] :],
}


@pytest.mark.parametrize("name", LEFT_OPEN)
def test_what_a_header_leaves_open_is_decoded_on_the_cpu(name, nvjpeg):
    """nvJPEG sees none of these images."""
    with contextlib.suppress(wp.DecodeError):
        wp.DecodeOnDevice("jpg", size=(61, 83))({"jpg": [LEFT_OPEN[name]]})
    assert nvjpeg == []


@pytest.mark.parametrize(
    "image",
    [
        begun_with(segment(0xEE, ADOBE + b"\1")),
        begun_with(segment(0xEE, ADOBE)),
        begun_with(segment(0xC4, b"\3" + CODES)),
        begun_with(segment(0xFE, b"a comment"), segment(0xDD, bytes(2))),
        begun_with(*[segment(0xE1, b"Exif\0\0")] * 900),
        COLOURS[:JFIF] + COLOURS[AFTER_JFIF:],
        PROGRESSIVE[: SCANS[2]] + segment(0xFE, b"a comment") + PROGRESSIVE[SCANS[2] :],
        saved(PIXELS, progressive=True, subsampling=0, quality=30),
        saved(Image.fromarray(PIXELS).convert("L"), progressive=True),
        saved(PIXELS, optimize=True),
    ],
)
def test_usual_headers_are_decoded_on_the_device(image, nvjpeg):
    found = wp.DecodeOnDevice("jpg", size=(61, 83))({"jpg": [image]})["jpg"]
    assert nvjpeg == [1]
    assert_close(found, wp.DecodeOnDevice("jpg", size=(61, 83), device="cpu")({"jpg": [image]})["jpg"])


def test_an_image_of_another_size_than_its_header_says_is_decoded_on_the_cpu(nvjpeg, monkeypatch):
    decoders = sys.modules["torchcodec.decoders"]
    monkeypatch.setattr(
        decoders, "decode_jpeg", lambda images, **_: [torch.ones(3, 9, 9, dtype=torch.uint8) for _ in images]
    )
    found = wp.DecodeOnDevice("jpg", size=(61, 83))({"jpg": [COLOURS]})["jpg"]
    assert torch.equal(found, wp.DecodeOnDevice("jpg", size=(61, 83), device="cpu")({"jpg": [COLOURS]})["jpg"])


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: an illegal memory access",
        "CUDA out of memory. Tried to allocate",
        "decode_batched_hardware, DecodeJpegCuda.cpp:444, Failed to decode batch: 5",  # no memory is left
        "Failed to synchronize CUDA stream: 700",
        "decode_jpeg: torchcodec was not compiled with nvJPEG support, so",
    ],
)
def test_an_error_of_the_device_is_raised(message, nvjpeg, monkeypatch):
    """Decoding on the CPU would hide it."""

    def fails(images, **options):
        raise RuntimeError(message)

    monkeypatch.setattr(sys.modules["torchcodec.decoders"], "decode_jpeg", fails)
    with pytest.raises(RuntimeError, match=re.escape(message)):
        wp.DecodeOnDevice("jpg", size=32)({"jpg": [encoded(1)]})


def test_memory_is_free_for_others_when_nvjpeg_has_ended(nvjpeg, monkeypatch):
    """Before a call all work of the stream has ended, and after a failure that of nvJPEG."""
    order = []

    def fail(images, **options):
        order.append("decodes")
        raise RuntimeError("nvjpegDecodeBatched failed")

    torch.cuda.current_stream().synchronize.side_effect = lambda: order.append("waits")
    monkeypatch.setattr(sys.modules["torchcodec.decoders"], "decode_jpeg", fail)
    wp.DecodeOnDevice("jpg", size=16)({"jpg": [COLOURS]})
    assert order == ["waits", "decodes", "waits"]


def test_an_error_of_the_device_is_none_of_a_sample(nvjpeg, monkeypatch):
    """One of earlier work comes where an image is copied to it."""

    def fails(tensor, place, value):
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(torch.Tensor, "__setitem__", fails)
    with pytest.raises(RuntimeError, match="^CUDA error: an illegal memory access"):
        wp.DecodeOnDevice("jpg", size=32)({"jpg": [encoded(1, "PNG")]})


def test_a_torchcodec_that_does_not_load_is_an_error(nvjpeg, monkeypatch):
    """As where it is made for another version of torch: no image is to blame."""

    def fails(name):
        raise RuntimeError("Could not load libtorchcodec. Likely causes")

    monkeypatch.setattr("wds_pipes.core.importing.import_module", fails)
    with pytest.raises(ImportError, match=r"needs torchcodec, which does not load.*Could not load libtorchcodec"):
        wp.DecodeOnDevice("jpg", size=32)({"jpg": [encoded(1)]})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_default_dtype_changes_nothing(dtype, nvjpeg):
    on_device, batch = wp.DecodeOnDevice("jpg", size=48), {"jpg": [photograph(200, 150)]}
    expected = on_device(batch)["jpg"]
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(on_device(batch)["jpg"], expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_an_old_torchcodec_is_an_error(nvjpeg, monkeypatch):
    monkeypatch.delattr(sys.modules["torchcodec.decoders"], "decode_jpeg")
    with pytest.raises(ImportError, match=r"DecodeOnDevice.* needs torchcodec 0\.16 or newer"):
        wp.DecodeOnDevice("jpg", size=32)({"jpg": [encoded(1)]})


def test_warnings_that_were_shown_are_not_repeated(nvjpeg):
    """As they are when a decoder changes the filters of warnings for each image."""
    on_device, batch = wp.DecodeOnDevice("jpg", size=32), {"jpg": [encoded(1)]}
    on_device(batch)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            on_device(batch)
            warnings.warn("of the training", stacklevel=1)
    assert len(shown) == 1


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data(), name=st.sampled_from([*ODD]))
def test_any_header_is_read_or_refused(data, name):
    """Also one that is cut off: no other error comes."""
    image = bytearray(ODD[name])
    end = image.rindex(b"\xff\xda") + 20
    for _ in range(data.draw(st.integers(0, 4))):
        image[data.draw(st.integers(0, end))] = data.draw(st.integers(0, 255))
    read_header(bytes(image[: data.draw(st.integers(0, len(image)))]))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    shapes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=7),
    fit=st.sampled_from(["cover", "contain", "stretch"]),
    most=st.integers(1, 200_000),
)
def test_images_are_resized_in_groups_as_alone(nvjpeg, shapes, fit, most):
    images = [photograph(width, height) for width, height in shapes]
    on_device = wp.DecodeOnDevice("jpg", size=(20, 30), fit=fit)
    alone = torch.cat([on_device({"jpg": [image]})["jpg"] for image in images])
    with mock.patch("wds_pipes.loader.batch_resizing._MOST", most):
        found = on_device({"jpg": images})["jpg"]
    assert (found.float() - alone.float()).abs().max() <= 1


# On a real device


def test_batches_of_a_real_device(gpu, shards):
    found = batches(encoded_batches(shards, on_device=wp.DecodeOnDevice("jpg", size=(32, 48), fit="stretch")))
    decoded = pipe(shards).decode_by_ext("torchrgb8", size=(32, 48), fit="stretch")
    expected = batches(wp.PipeLoader(decoded, batch_size=8, lanes=2))
    for (keys, images, _), (other_keys, other, _) in zip(found, expected, strict=True):
        assert keys == other_keys
        assert images.is_cuda
        assert (images.cpu().float() - other.float()).abs().mean() <= 2


def test_photographs_on_a_real_device(gpu, shared_data):
    """Within the PSNR that the docstring says."""
    raw = wp.ShardList(f"{shared_data}/photos-00000{{0..1}}.tar").open_shards().load_tar().group_by_key()
    photographs = [sample["jpg"] for sample in raw]
    for side in (224, 448):
        found = wp.DecodeOnDevice("jpg", size=side)({"jpg": photographs})["jpg"].cpu().float()
        for image, own in zip(photographs, found, strict=True):
            error = ((own - by_pillow(image, (side, side), "cover")) ** 2).mean()
            assert 10 * torch.log10(255**2 / error) >= 40


@pytest.mark.parametrize("sampling", ["444", "422", "420", "440", "411"])
def test_samplings_of_a_real_device(gpu, sampling):
    """Each is decoded as libjpeg-turbo does without smoothing."""
    library = pytest.importorskip("simplejpeg", reason="simplejpeg is not installed")
    image = library.encode_jpeg(PIXELS, 90, colorsubsampling=sampling)
    found = wp.DecodeOnDevice("jpg", size=PIXELS.shape[:2])({"jpg": [image]})["jpg"][0].cpu().float()
    expected = torch.from_numpy(library.decode_jpeg(image, fastupsample=True)).permute(2, 0, 1)
    assert (found - expected).abs().mean() <= 1


def test_a_resume_on_a_real_device(gpu, shards):
    on_device = wp.DecodeOnDevice("jpg", size=32)
    expected = batches(encoded_batches(shards, on_device=on_device))
    for cut in range(1, len(expected)):
        loader = encoded_batches(shards, on_device=on_device, num_workers=2)
        first = batches(batch for _, batch in zip(range(cut), loader, strict=False))
        other = encoded_batches(shards, on_device=on_device, num_workers=1)
        other.load_state_dict(loader.state_dict())
        same(first + batches(other), expected)
        loader.close()
        other.close()


def test_decoding_does_not_wait_for_the_training(gpu):
    """The step of the training runs on while the next batch is decoded; what uses the batch waits
    for it.
    """
    on_device, batch = wp.DecodeOnDevice("jpg", size=32), {"jpg": [encoded(number) for number in range(8)]}
    expected = on_device(batch)["jpg"].cpu()
    step = torch.cuda.Event()
    torch.cuda._sleep(4_000_000_000)  # about two seconds
    step.record()
    found = on_device(batch)["jpg"]
    assert not step.query()
    assert torch.equal(found.cpu(), expected)
    assert step.query()


def test_images_that_wait_to_be_resized_stay_what_they_are(gpu, monkeypatch):
    """The memory of a batch is free when it was told to be resized, and the next batch is decoded
    into it.
    """
    on_device = wp.DecodeOnDevice("jpg", size=64)
    images = [[encoded(number, size=(320, 240)) for _ in range(8)] for number in range(4)]
    expected = [on_device({"jpg": batch})["jpg"].clone() for batch in images]
    resize = on_device_module.resize_batch

    def resize_late(*arguments):
        torch.cuda._sleep(200_000_000)  # cycles, about 100 ms
        resize(*arguments)

    monkeypatch.setattr(on_device_module, "resize_batch", resize_late)
    found = [on_device({"jpg": batch})["jpg"] for batch in images]
    for batch, other in zip(found, expected, strict=True):
        assert torch.equal(batch, other)


def test_mutated_jpegs_leave_the_device_intact(gpu):
    """Each is decoded, or is an error of its sample."""
    random = np.random.default_rng(0)
    on_device, good = wp.DecodeOnDevice("jpg", size=32), encoded(1)
    expected = on_device({"jpg": [good]})["jpg"].cpu()
    for number in range(60):
        data = bytearray(list(ODD.values())[number % len(ODD)])
        for place in random.integers(2, len(data), 1 + number % 7):
            data[place] = random.integers(256)
        try:
            found = on_device({"jpg": [good, bytes(data)]})["jpg"].cpu()
        except wp.DecodeError:
            continue
        assert torch.equal(found[:1], expected)
