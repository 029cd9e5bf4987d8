"""Audio and video: whole, clips, readers, damaged and hostile fields."""

import io
import pickle
import random
import struct
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from sources import Given

import wds_pipes as wp
from wds_pipes.codecs import media
from wds_pipes.codecs.table import encode
from wds_pipes.core.stream import Stream
from wds_pipes.stages import DecodeByExt
from wds_pipes.testing import make_shards

AUDIO = ["wav", "flac", "ogg", "opus", "mp3"]
VIDEO = ["mp4", "mov", "mkv", "webm", "avi"]
RATE = 24_000


def decoded(field, data, *specs, **options):
    [sample] = Stream(DecodeByExt(Given([{"__key__": "k", "__url__": "a.tar", field: data}]), *specs, **options))
    return sample[field]


def refused(field, data, spec, message):
    """It is an error of the sample that says why, and the sample can be skipped."""
    with pytest.raises(wp.DecodeError, match=message) as caught:
        decoded(field, data, spec)
    assert (caught.value.key, caught.value.field) == ("k", field)
    assert not list(Stream(DecodeByExt(Given([{"__key__": "k", field: data}]), spec, on_error="skip")))


@pytest.fixture(scope="module")
def sounds():
    """Six seconds of tones, in each format."""
    pytest.importorskip("soundfile")
    samples, rate = media.audio_example()
    return {name: encode(name, (np.tile(samples, (1, 12)), rate)) for name in AUDIO}


@pytest.fixture(scope="module")
def films():
    """Six seconds of ten frames each, in each format."""
    pytest.importorskip("av")
    frames, rate = media.video_example()
    return {name: encode(name, (np.concatenate([frames, frames[::-1]] * 3), rate)) for name in VIDEO}


# Audio


@pytest.mark.parametrize("name", AUDIO)
def test_audio_decodes_whole_and_in_clips(name, sounds):
    """By soundfile, or by PyAV, whose MP3s may begin some samples later. A clip is a part of the
    whole, to the sample, also of formats in which seeking is not exact; memory is limited.
    """
    whole, rate = decoded(name, sounds[name], "audio")
    assert (whole.dtype, whole.shape[0], whole.flags.c_contiguous) == (np.float32, 2, True)
    original = np.tile(media.audio_example()[0], (1, 12))
    if name in ("wav", "flac"):
        assert np.array_equal(whole, original)
    elif name == "ogg":
        assert whole.shape == original.shape
        assert np.abs(whole - original).mean() < 0.01
    assert abs(whole.shape[1] / rate - 6) < 0.1
    assert 0.2 < np.abs(whole).max() < 0.4  # of 0.25
    assert decoded(name, sounds[name]) == sounds[name], "audio stays bytes if it is not asked for"
    reader = pickle.loads(pickle.dumps(decoded(name, sounds[name], {name: wp.AudioReader})))
    assert (reader.sample_rate, reader.channels) == (rate, 2)
    assert abs(reader.seconds - 6) < 0.1
    for start, duration in ((4, 0.5), (0.25, 0.5), (1.23456, 2.3), (5.5, 3)):
        expected = whole[:, round(start * rate) : round((start + duration) * rate)]
        clip, _ = decoded(name, sounds[name], {name: wp.audio(start=start, duration=duration)})
        assert np.array_equal(clip, expected)
        assert np.array_equal(reader.read(start, duration), expected)
    for clip in ((), (1, 3)):
        with pytest.raises(ValueError, match="more than 100000 bytes: decode a clip"):
            reader.read(*clip, max_bytes=100_000)
    assert reader.read(1, 0.1, max_bytes=100_000).shape == (2, rate // 10)


@pytest.mark.parametrize(
    ("name", "dtype"), [("wav", "f4"), ("wav", "i2"), ("flac", "f8"), ("flac", "i2"), ("ogg", "i2"), ("mp3", "f8")]
)
def test_samples_of_any_type_and_order_of_bytes_are_written(name, dtype):
    """Those of 16 bits are kept."""
    pytest.importorskip("soundfile")
    wave = np.sin(np.arange(4800) / 10)[None] / 2
    samples = wave.astype(dtype) if dtype[0] == "f" else np.round(wave * 32767).astype(dtype)
    little, big = (decoded(name, encode(name, (samples.astype(order + dtype), 48_000)), "audio") for order in "<>")
    assert np.array_equal(little[0], big[0])
    assert (np.abs(little[0]).max() > 0.3, little[1]) == (True, 48_000)
    if dtype == "i2" and name != "ogg":
        assert np.array_equal(little[0], samples.astype(np.float32) / 32768)


def test_a_tag_that_is_not_utf_8_is_no_error(sounds):
    pytest.importorskip("av")
    title = b"\x03caf\xe9"  # said to be UTF-8
    tag = b"ID3\x03\0\0\0\0\0\x0fTIT2" + len(title).to_bytes(4, "big") + b"\0\0" + title
    plain, rate = decoded("mp3", sounds["mp3"], "audio")
    tagged, rate_of_tagged = decoded("mp3", tag + sounds["mp3"], "audio")
    assert (tagged.shape, rate_of_tagged) == (plain.shape, rate)


def test_m4a_is_decoded():
    av = pytest.importorskip("av")
    pytest.importorskip("soundfile")
    samples, file = media.audio_example()[0], io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=RATE, layout="stereo")
        frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout="stereo")
        frame.sample_rate = RATE
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    found, rate = decoded("m4a", file.getvalue(), "audio")
    assert (rate, found.shape[0]) == (RATE, 2)
    assert abs(found.shape[1] - samples.shape[1]) <= 2048


def test_other_audio_is_an_error(sounds):
    for data in (b".snd" + bytes(100), b"FORM\0\0\0\x608SVX" + bytes(100)):
        refused("wav", data, "audio", "the data are none of WAV, FLAC, Ogg, AIFF")
    refused("wav", sounds["wav"], {"wav": wp.audio(start=6)}, "it ends before start=6")
    for name in ("flac", "mp3", "opus"):
        refused(name, sounds[name][:40], "audio", "it is damaged|has no audio|neither")


@pytest.mark.parametrize("rate", [8_000, 16_000, 44_100, 48_000])
def test_audio_is_resampled(rate):
    """A tone stays that tone, and its length n times the ratio of the rates, rounded up."""
    pytest.importorskip("av")
    time = np.arange(24_001) / 24_000
    tones = np.stack([np.sin(2 * np.pi * 440 * time), np.sin(2 * np.pi * 660 * time)]).astype(np.float32) / 2
    data = encode("wav", (tones, 24_000))
    found, found_rate = decoded("wav", data, "audio", sample_rate=rate)
    assert (found_rate, found.dtype, found.shape) == (rate, np.float32, (2, -(-24_001 * rate // 24_000)))
    expected = np.stack([np.sin(2 * np.pi * tone * np.arange(found.shape[1]) / rate) / 2 for tone in (440, 660)])
    assert np.abs(found - expected)[:, 100:-100].max() < 1e-3
    clip = wp.audio(start=0.5, duration=0.1, sample_rate=rate, mono=True)
    mono, _ = decoded("wav", data, {"wav": clip})
    assert mono.shape == (1, rate // 10)
    assert np.abs(mono[0] - expected[:, rate // 2 : rate // 2 + rate // 10].mean(0))[100:-100].max() < 1e-3
    assert wp.AudioReader(data).read(0, 4 / 24_000, sample_rate=rate).shape == (2, -(-4 * rate // 24_000))


def test_a_rate_that_takes_too_much_memory_is_refused(sounds):
    """A header may say 1 sample per second."""
    data = bytearray(encode("wav", (np.zeros((1, 100_000), np.float32), RATE)))
    data[24:28] = (1).to_bytes(4, "little")
    refused(
        "wav", bytes(data), {"wav": wp.audio(sample_rate=16_000)}, "1600000000 samples .* more than 1073741824 bytes"
    )
    read = wp.audio(sample_rate=4 * RATE, max_bytes=12 * RATE)
    refused("wav", sounds["wav"], {"wav": read}, f"more than {12 * RATE} bytes")


def test_channels_become_one():
    pytest.importorskip("soundfile")
    samples, rate = media.audio_example()
    found, found_rate = decoded("wav", encode("wav", (samples, rate)), "audio", mono=True)
    assert found_rate == rate
    assert np.array_equal(found, samples.mean(axis=0, keepdims=True))
    with pytest.raises(ValueError, match="also name it, as in decode_by_ext\\('audio'\\)"):
        DecodeByExt(Given([]), mono=True)
    with pytest.raises(ValueError, match="sample_rate"):
        DecodeByExt(Given([]), "audio", sample_rate=0)


# Video


@pytest.mark.parametrize("name", VIDEO)
def test_video_decodes_whole_and_in_clips(name, films):
    """A clip has the frames that begin in it, also if a time is not exact in binary, and between
    key frames; memory is limited.
    """
    whole, rate = decoded(name, films[name], "video")
    original = np.concatenate([media.video_example()[0], media.video_example()[0][::-1]] * 3)
    assert (whole.dtype, whole.shape, rate) == (np.uint8, (60, 48, 64, 3), 10)
    assert 10 * np.log10(255**2 / np.mean((whole.astype(float) - original) ** 2)) > 35
    assert decoded(name, films[name]) == films[name], "video stays bytes if it is not asked for"
    reader = pickle.loads(pickle.dumps(decoded(name, films[name], {name: wp.VideoReader})))
    assert (reader.width, reader.height, reader.frames_per_second, reader.seconds) == (64, 48, 10, 6)
    for first, count, before in ((40, 5, 0), (3, 4, 0.02), (0, 1, 0.05), (17, 30, 0.05), (58, 3, 0)):
        start, expected = max(first / 10 - before, 0), whole[first : first + count]
        clip, _ = decoded(name, films[name], {name: wp.video(start=start, duration=count / 10)})
        assert np.array_equal(clip, expected)
        assert np.array_equal(reader.read(start, count / 10), expected)
    refused(
        name,
        films[name],
        {name: wp.video(max_bytes=100_000)},
        "64 x 48 pixels take more than 100000 bytes: decode",
    )
    assert len(reader.read(1, 0.5, max_bytes=100_000)) == 5


@pytest.mark.parametrize("name", VIDEO)
def test_a_clip_has_its_frames_where_times_are_rounded(name):
    """Matroska rounds the times of frames to milliseconds."""
    pytest.importorskip("av")
    frames, _ = media.video_example()
    for rate in (24, 30_000 / 1001):
        reader = wp.VideoReader(encode(name, (np.concatenate([frames, frames[::-1]]), rate)))
        whole = reader.read()
        for number in range(len(whole)):
            assert np.array_equal(reader.read(number / rate, 1 / rate), whole[number : number + 1]), number
            assert len(reader.read(number / rate, 3 / rate)) == min(3, len(whole) - number)


def test_other_files_are_not_opened(tmp_path):
    """FFmpeg would read the files and URLs that a playlist names."""
    pytest.importorskip("av")
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile://{tmp_path}/a.ts\n#EXT-X-ENDLIST\n".encode()
    for data in (playlist, b"ffconcat version 1.0\nfile a.mp4\n", bytes(100)):
        refused("mp4", data, "video", "the data are none of WAV, FLAC, Ogg, AIFF")


def test_frames_of_too_many_pixels_are_refused_before_they_take_memory(films, monkeypatch):
    monkeypatch.setattr(media, "_MAX_PIXELS", 1000)
    for name in VIDEO:
        refused(name, films[name], "video", "it is damaged|has no frame")


@pytest.mark.slow
@pytest.mark.parametrize("name", AUDIO + VIDEO)
def test_damaged_bytes_are_no_other_error(name, request):
    """Any bytes give samples, frames or a ValueError: twenty files with some bytes changed."""
    data = request.getfixturevalue("films" if name in VIDEO else "sounds")[name]
    rng = random.Random(name)
    decode = (wp.video if name in VIDEO else wp.audio)(max_bytes=50_000_000)
    failed = 0
    for _ in range(20):
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 8)):
            damaged[rng.randrange(rng.choice([200, len(data)]))] = rng.randrange(256)
        try:
            decode(bytes(damaged))
        except ValueError:
            failed += 1
    assert failed


def test_video_of_an_unknown_codec_is_an_error(films):
    assert films["mp4"].count(b"avc1") > 0
    refused("mp4", films["mp4"].replace(b"avc1", b"xxx1"), "video", "has no video that FFmpeg decodes|it is damaged")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("wav", np.zeros(3, np.float32), "audio is .samples, sample_rate., not ndarray"),
        ("wav", (np.zeros(3, np.float32), 8000), "shape .channels, samples."),
        ("wav", (np.zeros((1, 3), np.int64), 8000), "not int64 of shape"),
        ("ogg", (np.full((1, 3), 2.0), 8000), "floats from -1 to 1: scale them"),
        ("ogg", (np.full((1, 3), np.nan), 8000), "floats from -1 to 1: scale them"),
        ("mp4", np.zeros((2, 4, 4, 3), np.uint8), "video is .frames, frames_per_second., not ndarray"),
        ("mp4", (np.zeros((2, 4, 4), np.uint8), 10), "shape .frames, height, width, 3."),
        ("mp4", (np.zeros((2, 4, 5, 3), np.uint8), 10), "must be even, not 5 x 4"),
    ],
)
def test_what_is_no_audio_or_video_is_not_written(field, value, message):
    pytest.importorskip("av" if field == "mp4" else "soundfile")
    with pytest.raises((TypeError, ValueError), match=message):
        encode(field, value)


@pytest.mark.parametrize("make", [wp.audio, wp.video])
@pytest.mark.parametrize("options", [{"start": -1}, {"duration": 0}, {"duration": float("nan")}, {"start": 1e12}])
def test_wrong_clips_are_refused_at_once(make, options):
    with pytest.raises(ValueError, match="seconds"):
        make(**options)


@pytest.mark.parametrize(("field", "module", "package"), [("wav", "soundfile", "soundfile"), ("mp4", "av", "av")])
def test_a_missing_package_says_what_to_install(field, module, package, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    data = b"RIFF\4\0\0\0WAVE" if field == "wav" else bytes(4) + b"ftyp" + bytes(8)
    with pytest.raises(wp.DecodeError, match=f"pip install {package}"):
        decoded(field, data, "audio" if field == "wav" else "video", on_error="skip")


def test_a_video_leaves_no_threads_that_a_forked_worker_waits_for(films, tmp_path):
    """A worker that another thread forks frees what the threads of a process kept for themselves:
    PyAV's converter of colours there would wait for threads that were not copied.
    """
    assert len(decoded("mp4", films["mp4"], "video")[0]) > 1
    pipe = wp.ShardList(make_shards(tmp_path, shards=1, samples=4)).open_shards().load_tar().group_by_key()
    loader = wp.PipeLoader(pipe, num_workers=1, batch_size=2, multiprocessing_context="fork")
    with ThreadPoolExecutor(1) as thread:
        assert len(thread.submit(list, loader).result()) == 2


def test_the_frames_of_a_phone_held_upright_are_turned():
    """As they are shown; the file marks how it was held."""
    av = pytest.importorskip("av")
    stored = np.zeros((5, 32, 64, 3), np.uint8)
    stored[:, :, :32, 0] = 255
    data = bytearray(encode("mp4", (stored, 10)))
    place = data.index(b"tkhd") + 44
    data[place : place + 36] = struct.pack(">9I", 0, 0x10000, 0, 0xFFFF0000, 0, 0, 0, 0, 0x40000000)
    reader = wp.VideoReader(bytes(data))
    assert (reader.rotation, reader.height, reader.width) == (-90, 32, 64)
    with av.open(io.BytesIO(bytes(data))) as container:
        lying = np.stack([frame.to_ndarray(format="rgb24", threads=1) for frame in container.decode(video=0)])
    shown = np.stack([np.rot90(frame, -1) for frame in lying])
    assert shown[0, 0, 0, 0] > 200, "the left of what is stored is shown at the top"
    assert shown[0, -1, 0, 0] < 50
    assert np.array_equal(reader.read(), shown)
    assert np.array_equal(decoded("mp4", bytes(data), "video")[0], shown)
    assert np.array_equal(decoded("mp4", bytes(data), {"mp4": wp.video(upright=False)})[0], lying)
    assert wp.VideoReader(encode("mp4", (stored, 10))).rotation == 0
