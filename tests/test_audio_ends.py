"""Where audio ends that does not say it, says it wrongly, or is several in one."""

import io

import numpy as np
import pytest
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import DecodeByExt

soundfile = pytest.importorskip("soundfile")

RATE = 24_000
NOISE = np.random.default_rng(0).normal(0, 0.2, 4 * RATE).clip(-1, 1).astype(np.float32)
QUIET = 1e-3 * np.sin(np.arange(8 * RATE, dtype=np.float32) / 20)


def decoded(field, data, spec="audio"):
    [sample] = Stream(DecodeByExt(Given([{"__key__": "k", field: data}]), spec))
    return sample[field]


def refused(field, data, message):
    with pytest.raises(wp.DecodeError, match=message):
        decoded(field, data)


def written(samples, form, **options):
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format=form, **options)
    return file.getvalue()


def without_info(mp3):
    """An MP3 without its first frame, which says how many there are."""
    assert b"Info" in mp3[:64] or b"Xing" in mp3[:64]
    return mp3[mp3.index(mp3[:2], 64) :]


@pytest.fixture(scope="module", params=[(NOISE, QUIET), (QUIET, NOISE)], ids=["quiet end", "loud end"])
def sound(request):
    """Samples whose parts take very different numbers of bits, and their MP3."""
    samples = np.concatenate(request.param)
    return samples, written(samples, "MP3", bitrate_mode="VARIABLE", compression_level=0.3)


def apart(one, other):
    """The largest difference of their first samples."""
    return np.abs(one[:, :999] - other[:, :999]).max()


@pytest.mark.parametrize("tags", [b"", b"ID3\4\0\0\0\0\1\0" + bytes(128), b"ID3\4\0\x10\0\0\0\7" + bytes(17)])
@pytest.mark.parametrize("end", [b"", b"TAG" + bytes(125), bytes(3000)])
def test_an_mp3_that_does_not_say_how_long_it_is(sound, tags, end):
    """All of it is read. What an encoder adds before its first sample is not known, and stays."""
    samples, mp3 = sound
    whole, _ = decoded("mp3", mp3)
    assert whole.shape == (1, len(samples))
    bare = tags + without_info(mp3) + end
    found, rate = decoded("mp3", bare)
    assert rate == RATE
    loud = slice(int(np.argmax(np.abs(whole[0]) > 0.1)), None)
    before = min(
        range(found.shape[1] - len(samples) + 1), key=lambda place: apart(found[:, place:][:, loud], whole[:, loud])
    )
    assert np.abs(found[:, before:][:, : len(samples)] - whole).max() < 1e-3
    assert found.shape[1] - len(samples) <= 3 * 1152
    assert wp.AudioReader(bare).seconds is None
    clip, _ = decoded("mp3", bare, {"mp3": wp.audio(start=9, duration=1)})
    assert np.array_equal(clip, found[:, 9 * RATE : 10 * RATE])


def test_an_mp3_with_bytes_of_something_else_in_it(sound):
    """As of a stream that was recorded: it is read on after them."""
    bare = without_info(sound[1])
    frames = decoded("mp3", bare)[0].shape[1]
    half = bare.index(bare[:2], len(bare) // 2)
    assert decoded("mp3", bare[:half] + b"StreamTitle=''" * 9 + bare[half:])[0].shape[1] > 0.9 * frames


@pytest.mark.parametrize("header", ["no count", "count 0", "VBRI", "after a checksum"])
def test_an_mp3_whose_header_is_no_help(sound, header):
    """A writer that was killed leaves a count of 0, and libsndfile does not read VBRI."""
    mp3 = bytearray(sound[1])
    place = next(mp3.index(kind) for kind in (b"Xing", b"Info") if kind in mp3[:64])
    if header == "no count":
        mp3[place + 7] &= 0xFE
    elif header == "count 0":
        mp3[place + 8 : place + 12] = bytes(4)
    elif header == "VBRI":
        mp3[place : place + 4], mp3[36:40] = bytes(4), b"VBRI"
    else:
        mp3[place : place + 20] = bytes(2) + mp3[place : place + 18]
    found, _ = decoded("mp3", bytes(mp3))
    assert np.array_equal(found, decoded("mp3", without_info(sound[1]))[0])


def test_several_mp3s_in_one(sound):
    """libsndfile reads the first, by its header; without headers they are read as one."""
    mp3, bare = sound[1], without_info(sound[1])
    other = io.BytesIO()
    soundfile.write(other, NOISE, 16000, format="MP3")
    for field in (mp3 + mp3, mp3 + b"TAG" + bytes(125) + mp3, bare + without_info(other.getvalue())):
        refused("mp3", field, "it is several MP3s one after another, or its sample rate or channels change, from byte")
    assert decoded("mp3", bare + bare)[0].shape[1] > 1.99 * len(sound[0])


@pytest.mark.parametrize("lost", [1, 100])
def test_an_mp3_without_length_that_is_cut(sound, lost):
    refused("mp3", without_info(sound[1])[:-lost], "cut short: its last frame, at byte .* is not complete")


@pytest.mark.parametrize("rate", [8000, 11025, 16000, 22050, 32000, 44100, 48000])
@pytest.mark.parametrize("channels", [1, 2])
def test_an_mp3_of_any_rate_without_length(rate, channels):
    file = io.BytesIO()
    samples = np.tile(np.concatenate([NOISE, QUIET])[:, None], (1, channels))
    soundfile.write(file, samples, rate, format="MP3", bitrate_mode="VARIABLE", compression_level=0.3)
    found, theirs = decoded("mp3", without_info(file.getvalue()))
    assert (len(found), theirs) == (channels, rate)
    assert 0 <= found.shape[1] - len(samples) <= 3 * 1152


@pytest.mark.parametrize("subtype", ["VORBIS", "OPUS"])
def test_several_oggs_in_one(subtype):
    one = written(NOISE, "OGG", subtype=subtype)
    assert decoded("ogg", one)[0].shape[1] == len(NOISE)
    refused("ogg", one + one, f"several Ogg files one after another, the second from byte {len(one)} on")


@pytest.mark.parametrize("lost", [1, 30, 100])
def test_an_ogg_that_is_cut(lost):
    one = written(NOISE, "OGG", subtype="VORBIS")
    last = one.rindex(b"OggS")
    refused("ogg", one[:-lost], f"its last page, at byte {last}, is not complete")
    refused("ogg", one[: last + 4 + lost % 20], f"its last page, at byte {last}, is not complete")


@pytest.mark.parametrize("riff", [0, 36])
def test_a_wav_that_was_not_finished(riff):
    """Its writer died before it wrote how many samples there are."""
    wav = written(NOISE, "WAV", subtype="PCM_16")
    place = wav.index(b"data") + 4
    cut = wav[:4] + riff.to_bytes(4, "little") + wav[8:place] + bytes(4) + wav[place + 4 :]
    refused("wav", cut, f"was not finished: it says that it has no samples, and has {2 * len(NOISE)} bytes")


def test_a_wav_without_samples():
    empty = written(NOISE[:0], "WAV", subtype="PCM_16")
    more = empty + b"LIST\x04\0\0\0INFO"
    more = more[:4] + (len(more) - 8).to_bytes(4, "little") + more[8:]
    for wav in (empty, more):
        assert decoded("wav", wav)[0].shape == (1, 0)
