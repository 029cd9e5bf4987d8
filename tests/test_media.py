"""Audio and video: whole, clips, readers, damaged and hostile fields."""

import io
import pickle
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sources import Given

import wds_pipes as wp
from wds_pipes.codecs import audio, video
from wds_pipes.codecs.encoding import encode
from wds_pipes.core.stream import Stream
from wds_pipes.stages import DecodeByExt

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
    samples, rate = audio.example()
    return {name: encode(name, (np.tile(samples, (1, 12)), rate)) for name in AUDIO}


@pytest.fixture(scope="module")
def films():
    """Six seconds of ten frames each, in each format."""
    pytest.importorskip("av")
    frames, rate = video.example()
    return {name: encode(name, (np.concatenate([frames, frames[::-1]] * 3), rate)) for name in VIDEO}


# Audio


@pytest.mark.parametrize("name", AUDIO)
def test_audio_decodes_as_soundfile_does(name, sounds):
    import soundfile

    samples, rate = decoded(name, sounds[name], "audio")
    expected, their_rate = soundfile.read(io.BytesIO(sounds[name]), dtype="float32", always_2d=True)
    assert (samples.dtype, samples.shape, rate) == (np.float32, (2, 6 * RATE), their_rate)
    assert np.abs(samples - expected.T).max() < 1e-5
    assert samples.flags.c_contiguous
    assert (
        np.abs(samples - np.tile(audio.example()[0], (1, 12))).mean() < (0 if name in ("wav", "flac") else 0.01) + 1e-9
    )
    assert decoded(name, sounds[name]) == sounds[name], "audio stays bytes if it is not asked for"


@pytest.mark.parametrize("name", AUDIO)
@settings(max_examples=5, deadline=None)
@given(st.floats(0, 5.9), st.floats(0.01, 3))
def test_a_clip_is_a_part_of_the_whole(name, sounds, start, duration):
    """To the sample, also of formats in which seeking is not exact."""
    whole, _ = decoded(name, sounds[name], "audio")
    clip, rate = decoded(name, sounds[name], {name: wp.audio(start=start, duration=duration)})
    assert rate == RATE
    assert np.array_equal(clip, whole[:, round(start * RATE) : round((start + duration) * RATE)])


@pytest.mark.parametrize("name", AUDIO)
def test_an_audio_reader_decodes_what_is_read(name, sounds):
    reader = pickle.loads(pickle.dumps(decoded(name, sounds[name], {name: wp.AudioReader})))
    assert (reader.sample_rate, reader.channels, reader.seconds) == (RATE, 2, 6)
    late, early = reader.read(4, 0.5), reader.read(0.25, 0.5)
    whole = reader.read()
    assert np.array_equal(late, whole[:, 4 * RATE : 4 * RATE + RATE // 2])
    assert np.array_equal(early, whole[:, RATE // 4 : RATE // 4 + RATE // 2])


@pytest.mark.parametrize("name", ["wav", "flac", "ogg", "opus", "mp3"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "i2"])
def test_the_order_of_bytes_does_not_matter(name, dtype):
    pytest.importorskip("soundfile")
    wave = np.sin(np.arange(4800) / 10)[None] / 2
    samples = wave.astype(dtype) if dtype[0] == "f" else np.round(wave * 32767).astype(dtype)
    little, big = (decoded(name, encode(name, (samples.astype(order + dtype), 48_000)), "audio") for order in "<>")
    assert np.array_equal(little[0], big[0])
    assert np.abs(little[0]).max() > 0.3


@pytest.mark.parametrize("name", ["wav", "flac"])
def test_samples_of_16_bits_are_kept(name):
    pytest.importorskip("soundfile")
    samples = np.array([[0, 1, -1, 32767, -32768] * 100], np.int16)
    found, rate = decoded(name, encode(name, (samples, 8000)), "audio")
    assert np.array_equal(found, samples.astype(np.float32) / 32768)
    assert rate == 8000


@pytest.mark.parametrize("name", AUDIO)
def test_audio_that_is_cut_is_an_error(name, sounds):
    data = sounds[name]
    for size in (0, 10, 60, len(data) // 2, len(data) - 10):
        refused(name, data[:size], "audio", "cannot be decoded: ValueError: (it is|the data are none)")


def test_a_large_wav_that_is_cut_is_an_error():
    """RF64, which is a WAV of any size, has it at another place."""
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, np.zeros((5000, 2)), RATE, format="RF64", subtype="PCM_16")
    data = file.getvalue()
    assert decoded("wav", data, "audio")[0].shape == (2, 5000)
    refused("wav", data[:10_000], "audio", "it is cut short: it has 10000 bytes, and promises")


def test_other_audio_is_an_error(sounds):
    refused("wav", b"FORM\0\0\0\x20AIFF" + bytes(100), "audio", "the data are none of WAV, FLAC, Ogg, MP3")
    refused("wav", sounds["wav"], {"wav": wp.audio(start=6)}, "it has 6.000 seconds, and start=6")


@pytest.mark.parametrize("name", AUDIO)
def test_long_audio_is_refused_before_it_takes_memory(name, sounds):
    """By the length of the file, and where this is too small, while it is decoded."""
    reader = wp.AudioReader(sounds[name])
    tracemalloc.start()
    for samples in (reader._samples, None):
        reader._samples = samples
        with pytest.raises(ValueError, match="more than max_bytes=100000: decode a clip"):
            reader.read(max_bytes=100_000)
    with pytest.raises(ValueError, match="more than max_bytes=100000"):
        reader.read(1, 3, max_bytes=100_000)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 << 20
    assert reader.read(1, 0.1, max_bytes=100_000).shape == (2, RATE // 10)


def test_a_silent_flac_is_no_bomb():
    """A minute of silence on eight channels: 92 MB of samples in less than 100 kB."""
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    with soundfile.SoundFile(file, "w", 48_000, 8, "PCM_16", format="FLAC") as target:
        for _ in range(60):
            target.write(np.zeros((48_000, 8), np.int16))
    data = file.getvalue()
    assert len(data) < 100_000
    with pytest.raises(wp.DecodeError, match="more than max_bytes=1000000"):
        decoded("flac", data, {"flac": wp.audio(max_bytes=1_000_000)})


# Video


@pytest.mark.parametrize("name", VIDEO)
def test_video_decodes(name, films):
    frames, rate = decoded(name, films[name], "video")
    original = np.concatenate([video.example()[0], video.example()[0][::-1]] * 3)
    assert (frames.dtype, frames.shape, rate) == (np.uint8, (60, 48, 64, 3), 10)
    error = np.mean((frames.astype(float) - original) ** 2)
    assert 10 * np.log10(255**2 / error) > 35
    assert decoded(name, films[name]) == films[name], "video stays bytes if it is not asked for"


@pytest.mark.parametrize("name", VIDEO)
@settings(max_examples=8, deadline=None)
@given(st.integers(0, 58), st.integers(1, 30), st.sampled_from([0, 0.02, 0.05]))
def test_a_clip_has_the_frames_that_begin_in_it(name, films, first, count, before):
    """Also if a time is not exact in binary, and between key frames."""
    whole, _ = decoded(name, films[name], "video")
    clip, _ = decoded(name, films[name], {name: wp.video(start=max(first / 10 - before, 0), duration=count / 10)})
    assert np.array_equal(clip, whole[first : first + count])


@pytest.mark.parametrize("rate", [30, 24, 30_000 / 1001])
@pytest.mark.parametrize("name", VIDEO)
def test_a_clip_has_its_frames_where_times_are_rounded(name, rate):
    """Matroska rounds the times of frames to milliseconds."""
    pytest.importorskip("av")
    frames, _ = video.example()
    reader = wp.VideoReader(encode(name, (np.concatenate([frames, frames[::-1]]), rate)))
    whole = reader.read()
    for number in range(len(whole)):
        assert np.array_equal(reader.read(number / rate, 1 / rate), whole[number : number + 1]), number
        assert len(reader.read(number / rate, 3 / rate)) == min(3, len(whole) - number)


@pytest.mark.parametrize(
    ("form", "codec", "options"),
    [
        ("mp4", "libx264", {"x264-params": "open-gop=1:keyint=12:bframes=3:b-adapt=0"}),
        ("matroska", "libx264", {"x264-params": "open-gop=1:keyint=12:bframes=3:b-adapt=0"}),
        ("mp4", "libx264", {"x264-params": "intra-refresh=1:keyint=12"}),
        ("mp4", "mpeg4", {"bf": "2", "g": "12"}),
        ("avi", "mpeg4", {"bf": "2", "g": "12"}),
        ("avi", "mpeg2video", {"bf": "2", "g": "12"}),
    ],
)
def test_a_clip_has_its_frames_where_they_depend_on_later_ones(form, codec, options):
    """A key frame before a clip may be shown after its first frame, or be new in a part alone."""
    av = pytest.importorskip("av")
    picture = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    file = io.BytesIO()
    with av.open(file, "w", format=form) as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.options = options
        for number in range(50):
            frame = av.VideoFrame.from_ndarray(np.roll(picture, number, 1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    reader = wp.VideoReader(file.getvalue())
    whole = reader.read()
    assert len(whole) == 50
    for number in range(50):
        assert np.array_equal(reader.read(number / 25, 0.08), whole[number : number + 2]), number


@pytest.mark.parametrize("name", VIDEO)
def test_a_video_reader_decodes_what_is_read(name, films):
    reader = pickle.loads(pickle.dumps(decoded(name, films[name], {name: wp.VideoReader})))
    assert (reader.width, reader.height, reader.frames_per_second, reader.seconds) == (64, 48, 10, 6)
    late, early = reader.read(4, 0.5), reader.read(0.3, 0.4)
    whole = reader.read()
    assert np.array_equal(late, whole[40:45])
    assert np.array_equal(early, whole[3:7])


@pytest.mark.parametrize("name", VIDEO)
def test_video_that_is_cut_is_an_error(name, films):
    data = films[name]
    for size in (0, 10, 60, len(data) // 2, len(data) - 10):
        refused(name, data[:size], "video", "cannot be decoded: ValueError: (it is|the data are none)")


def test_other_files_are_not_opened(tmp_path):
    """FFmpeg would read the files and URLs that a playlist names."""
    pytest.importorskip("av")
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\nfile://{tmp_path}/a.ts\n#EXT-X-ENDLIST\n".encode()
    for data in (playlist, b"ffconcat version 1.0\nfile a.mp4\n", bytes(100)):
        refused("mp4", data, "video", "the data are none of MP4, MOV, Matroska, WebM, AVI")


@pytest.mark.parametrize("name", VIDEO)
def test_large_video_is_refused(name, films):
    refused(name, films[name], {name: wp.video(max_bytes=100_000)}, "64 x 48 pixels take more than max_bytes=100000")
    frames, _ = decoded(name, films[name], {name: wp.video(start=1, duration=0.5, max_bytes=100_000)})
    assert len(frames) == 5
    refused(name, films[name], {name: wp.video(start=5.9, max_bytes=10_000)}, "take more than max_bytes=10000")


def test_frames_of_too_many_pixels_are_refused_before_they_take_memory(films, monkeypatch):
    monkeypatch.setattr(video, "_MAX_PIXELS", 1000)
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


@pytest.mark.parametrize(("name", "least"), [("avi", 6), ("mp4", 6), ("webm", 0)])
def test_frames_that_are_made_of_others_are_damage(name, least):
    """One bit of a film is another one. FFmpeg marks what it finds, which is all in an AVI, much in
    H.264, and nothing in VP9.
    """
    pytest.importorskip("av")
    picture = np.random.default_rng(0).integers(0, 255, (120, 160, 3), np.uint8)
    film = encode(name, (np.stack([np.roll(picture, 2 * number, 1) for number in range(40)]), 30))
    whole = wp.VideoReader(film).read()
    failed = 0
    for seed in range(12):
        rng, damaged = random.Random(seed), bytearray(film)
        damaged[rng.randrange(len(film) // 5, len(film) * 4 // 5)] ^= 1 << rng.randrange(8)
        try:
            found = wp.VideoReader(bytes(damaged)).read().astype(int)
        except ValueError:
            failed += 1
        else:
            assert name != "avi" or np.abs(found - whole).mean() < 1
    assert failed >= least


@pytest.mark.parametrize(("matrix", "red", "blue"), [(6, 0.299, 0.114), (1, 0.2126, 0.0722)])
@pytest.mark.parametrize("full", [False, True])
def test_video_has_the_colours_that_it_says(matrix, red, blue, full):
    """By BT.601 or BT.709, and in the whole range of a byte or not."""
    av = pytest.importorskip("av")
    wanted = np.array([200, 60, 60])
    luma = np.dot(wanted, [red, 1 - red - blue, blue])
    parts = luma, (wanted[2] - luma) / (2 - 2 * blue), (wanted[0] - luma) / (2 - 2 * red)
    scale, black = ((1, 1), 0) if full else ((219 / 255, 224 / 255), 16)
    planes = [black + scale[0] * parts[0], *(128 + scale[1] * part for part in parts[1:])]
    rows = [np.full((height, 64), round(value), np.uint8) for height, value in zip((48, 12, 12), planes, strict=True)]
    frame = av.VideoFrame.from_ndarray(np.concatenate(rows), format="yuv420p")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=10)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.codec_context.options = {"crf": "1"}
        for each in (stream.codec_context, frame):
            each.colorspace, each.color_range = matrix, 2 if full else 1
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert np.abs(wp.VideoReader(file.getvalue()).read()[0].astype(int) - wanted).max() <= 3


def test_video_of_an_unknown_codec_is_an_error(films):
    assert films["mp4"].count(b"avc1") > 0
    refused("mp4", films["mp4"].replace(b"avc1", b"xxx1"), "video", "FFmpeg has no decoder for its video|has no video")


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
    monkeypatch.setitem(__import__("sys").modules, module, None)
    data = b"RIFF\4\0\0\0WAVE" if field == "wav" else bytes(4) + b"ftyp" + bytes(8)
    with pytest.raises(wp.DecodeError, match=f"pip install {package}"):
        decoded(field, data, "audio" if field == "wav" else "video", on_error="skip")
