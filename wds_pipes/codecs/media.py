"""Audio with soundfile and PyAV, and video with PyAV: whole, a clip by seconds, or read on request.

Rules:
1. soundfile decodes WAV, FLAC, Ogg (Vorbis, Opus), AIFF, W64 and NIST SPHERE; PyAV decodes MP3,
   M4A, and what soundfile refuses. What the library says of a file is believed: its length, its
   frames, its damage.
2. FFmpeg would also try formats that read other files and URLs, such as playlists. So the first
   bytes say which format PyAV opens.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from wds_pipes.codecs.arrays import as_array
from wds_pipes.codecs.codec import MAX_DECODED_BYTES, Decoder, Encoder
from wds_pipes.core.importing import library
from wds_pipes.core.options import check_count, checks_options
from wds_pipes.errors import mended

_LEAST = 1 << 10  # samples that are resampled
_READ = 1 << 19  # samples of a channel that are decoded at a time: most files at once
_BLOCK = 1 << 16  # samples that are encoded at a time
_BY_SOUNDFILE = ("wav", "flac", "ogg", "aiff", "nistsphere", "w64")  # formats, by FFmpeg's names
_MAX_PIXELS = 1 << 26  # of a frame
_MICROSECOND = Fraction(1, 1_000_000)


def _format_of(data: bytes) -> str:
    """Return FFmpeg's name of the format that the first bytes say; ValueError: it is unknown."""
    if data[:4] == b"FORM" and data[8:12] in (b"AIFF", b"AIFC"):
        found: str | None = "aiff"
    elif data[:4] in (b"RIFF", b"RF64"):
        found = {b"WAVE": "wav", b"AVI ": "avi"}.get(data[8:12])
    elif data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        found = "mov"
    elif data[:3] == b"ID3" or (data[:1] == b"\xff" and data[1:2] >= b"\xe0"):
        found = "mp3"
    else:
        found = {
            b"fLaC": "flac",
            b"OggS": "ogg",
            b"\x1a\x45\xdf\xa3": "matroska",
            b"NIST": "nistsphere",
            b"riff": "w64",
        }.get(data[:4])
    if found is None:
        raise ValueError("the data are none of WAV, FLAC, Ogg, AIFF, W64, SPHERE, MP3, MP4, MOV, Matroska, WebM, AVI")
    return found


def _open(data: bytes, what: str) -> Any:
    """Open a container with PyAV.

    Args:
        data: the file.
        what: ``"audio"`` or ``"video"``: the stream that it must have.

    Raises:
        ValueError: its format is unknown, it is damaged, or has no such stream.
    """
    name = _format_of(data)
    av = library("av", "av", f"this {what} field")
    # Tags that are not UTF-8 are no error. For PyAV 19 they never are: it has no such option.
    options = {"metadata_errors": "replace"} if int(av.__version__.partition(".")[0]) < 19 else {}
    try:
        container = av.open(io.BytesIO(data), format=name, **options)
    except av.FFmpegError as error:
        raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from error
    streams = getattr(container.streams, what)
    if not streams or streams[0].codec_context is None:
        raise ValueError(f"it has no {what} that FFmpeg decodes")
    return container


def _check_clip(start: float, duration: float | None) -> None:
    """Raise ValueError if these are not the seconds of a clip."""
    for name, value in (("start", start), ("duration", duration)):
        if value is not None and not (math.isfinite(value) and 0 <= value < 1e9):
            raise ValueError(f"{name} must be a number of seconds, not {value!r}")
    if duration == 0:
        raise ValueError("duration must be more than 0 seconds")


def _clip(reader: Any, rate: str, start: float, duration: float | None, **options: Any) -> Decoder:
    """Return a decoder of a clip and its rate, which the ``reader`` has as an attribute."""
    _check_clip(start, duration)
    return functools.partial(_read_clip, reader, rate, (start, duration), options)


def _read_clip(kind: Any, rate: str, clip: tuple[float, float | None], options: dict[str, Any], data: bytes) -> Any:
    reader = kind(data)
    return reader.read(*clip, **options), options.get(rate) or getattr(reader, rate)


def _pair(value: Any, what: str) -> tuple[npt.NDArray[Any], Any]:
    """Return the array and the rate of what is written; ``what`` says what it must be."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        raise TypeError(f"{what}, not {type(value).__name__}")
    content, rate = value
    return as_array(content.detach().cpu() if hasattr(content, "detach") else content), rate


# ------------------------------------------------------------------------------------------- audio


class AudioReader:
    """The audio of a field, which is decoded when it is read.

    A decoder: ``decode_by_ext({"wav;flac;mp3": wp.AudioReader})``. It holds the bytes of the field,
    and can be pickled. The package ``soundfile`` reads WAV, FLAC, Ogg, AIFF, W64 and NIST
    SPHERE; the package ``av`` reads MP3, M4A, and what soundfile refuses.

    Args:
        data: the bytes of the file.

    Raises:
        ValueError: neither library reads it; the message has its reason.

    Attributes:
        sample_rate: samples per second.
        channels: how many.
        seconds: the length as the file says, before it is decoded; None: it does not say it.
    """

    def __init__(self, data: bytes) -> None:
        self._data = bytes(data)
        self._by_soundfile = False
        self.sample_rate: int
        self.channels: int
        samples: int | None = None
        if _format_of(self._data) in _BY_SOUNDFILE:
            with contextlib.suppress(ValueError), _soundfile(self._data) as file:
                self.sample_rate, self.channels, samples = file.samplerate, file.channels, file.frames
                self._by_soundfile = True
        if not self._by_soundfile:
            with _open(self._data, "audio") as container:
                stream = container.streams.audio[0]
                self.sample_rate, self.channels = stream.rate, stream.channels
                if stream.duration is not None:
                    samples = round(stream.duration * stream.time_base * self.sample_rate)
        self.seconds: float | None = None if samples is None else samples / self.sample_rate

    def __reduce__(self) -> Any:
        return type(self), (self._data,)

    def read(
        self,
        start: float = 0.0,
        duration: float | None = None,
        *,
        sample_rate: int | None = None,
        mono: bool = False,
        max_bytes: int = MAX_DECODED_BYTES,
    ) -> Any:
        """Decode the samples from second ``start`` on.

        Args:
            start: the first second, rounded to a sample.
            duration: how many seconds; None: to the end. At the end of the file the clip is
                shorter.
            sample_rate: resample the clip to so many samples per second, with FFmpeg's resampler
                (package ``av``); None: to none. A clip of n samples has then n times the ratio of
                the rates, rounded up.
            mono: return the mean of the channels, as one channel.
            max_bytes: the most memory for the samples, and for those of the other rate.

        Returns:
            A float32 array of shape (channels, samples), from -1 to 1.

        Raises:
            ValueError: it is damaged, ends before ``start``, or has more bytes than ``max_bytes``.
        """
        _check_clip(start, duration)
        first = round(start * self.sample_rate)
        left = None if duration is None else round((start + duration) * self.sample_rate) - first
        blocks, count = list[npt.NDArray[np.float32]](), 0
        for block in self._blocks(first):
            blocks.append(block if left is None else block[:, : left - count])
            count += blocks[-1].shape[1]
            _check_bytes(count, self.channels, max_bytes)
            if left is not None and count >= left:
                break
        if not count and first:
            raise ValueError(f"it ends before start={start}")
        if len(blocks) == 1:
            samples = np.ascontiguousarray(blocks[0])
        else:
            samples = np.concatenate(blocks, axis=1) if blocks else np.empty((self.channels, 0), np.float32)
        if mono and len(samples) > 1:
            samples = samples.mean(axis=0, keepdims=True)
        if sample_rate is None or sample_rate == self.sample_rate:
            return samples
        length = -(-samples.shape[1] * sample_rate // self.sample_rate)
        _check_bytes(length, len(samples), max_bytes)
        return _resampled(samples, self.sample_rate, sample_rate, length)

    def _blocks(self, first: int) -> Iterator[npt.NDArray[np.float32]]:
        """Decode from sample ``first`` on, in blocks of shape (channels, samples)."""
        for place, block in self._by_soundfile_from(first) if self._by_soundfile else self._by_pyav():
            if place + block.shape[1] > first:
                yield block[:, max(0, first - place) :]

    def _by_soundfile_from(self, first: int) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield the place of blocks, and their samples, from about sample ``first`` on."""
        with _soundfile(self._data) as file:
            # In an Ogg, libsndfile finds only about the place.
            place = 0 if not first or file.format == "OGG" else file.seek(min(first, file.frames))
            while True:
                size = min(_READ, max(_BLOCK, file.frames - place))  # libsndfile fills what is too much with zeros
                block = file.read(size, dtype="float32", always_2d=True)
                if not len(block):
                    return
                yield place, np.ascontiguousarray(block.T)
                place += len(block)

    def _by_pyav(self) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield the place of blocks, and their samples, from the beginning on."""
        av, place = library("av", "av", "this audio field"), 0
        try:
            with _open(self._data, "audio") as container:
                stream = container.streams.audio[0]
                to_floats = av.AudioResampler(format="fltp", layout=stream.layout, rate=self.sample_rate)
                for frame in itertools.chain(container.decode(stream), [None]):  # None: what the resampler still holds
                    for part in to_floats.resample(frame):
                        block = part.to_ndarray()
                        yield place, block
                        place += block.shape[1]
        except av.FFmpegError as error:
            raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from error


def _check_bytes(count: int, channels: int, max_bytes: int) -> None:
    """Raise ValueError if so many samples in each of the channels take too much memory."""
    if 4 * count * channels > max_bytes:
        raise mended(
            ValueError,
            f"it has {count} samples or more in {channels} channels, which are more than {max_bytes} bytes",
            mend="decode a clip, such as {'wav': wp.audio(start=0, duration=10)}, or pass another max_bytes",
            mend_cli="",
        )


def _resampled(samples: npt.NDArray[np.float32], rate: int, new_rate: int, length: int) -> npt.NDArray[np.float32]:
    """Return samples of shape (channels, samples) at another rate: ``length`` in each channel."""
    av = library("av", "av", "resampling audio")
    result = np.zeros((len(samples), length), np.float32)
    for channel, target in zip(samples, result, strict=True):
        # FFmpeg returns nothing of a few samples.
        padded = np.pad(channel, (0, max(0, _LEAST - len(channel))))
        frame = av.AudioFrame.from_ndarray(padded[None], format="fltp", layout="mono")
        frame.sample_rate = rate
        resampler, place = av.AudioResampler(format="fltp", layout="mono", rate=new_rate), 0
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            block = part.to_ndarray()[0, : length - place]
            target[place : place + len(block)] = block
            place += len(block)
    return result


@contextlib.contextmanager
def _soundfile(data: bytes) -> Iterator[Any]:
    """Open audio with soundfile; ValueError if it is damaged."""
    soundfile = library("soundfile", "soundfile", "this audio field")
    try:
        with _sequential(soundfile)(io.BytesIO(data)) as file:
            yield file
    except RuntimeError as error:  # of soundfile
        raise ValueError(f"it is damaged: {error}") from error


@functools.cache
def _sequential(soundfile: Any) -> Any:
    """A file of soundfile that is read without seeking.

    soundfile would seek after each read, and in an Ogg libsndfile finds only about the place.
    """

    class Sequential(soundfile.SoundFile):  # type: ignore[misc]
        def seekable(self) -> bool:
            return False

    return Sequential


@checks_options
def audio(
    *,
    start: float = 0.0,
    duration: float | None = None,
    sample_rate: int | None = None,
    mono: bool = False,
    max_bytes: int = MAX_DECODED_BYTES,
) -> Decoder:
    """Return a decoder of a clip of audio, as in ``decode_by_ext({"wav": wp.audio(duration=3)})``.

    ``decode_by_ext("audio")`` decodes all of every wav, flac, ogg, opus, mp3, m4a, aiff, w64 and
    sph. A decoder returns ``(samples, sample_rate)``, with the samples as a float32 array of shape
    (channels, samples), from -1 to 1. For a clip that depends on the sample use
    ``wp.AudioReader``. Needs the packages ``soundfile`` and ``av`` (extra ``audio``).

    A clip is cut to the sample. Of what is neither WAV nor FLAC, all that is before it is decoded
    too.

    Args:
        start: the first second.
        duration: how many seconds; None: to the end. At the end of the file the clip is shorter.
        sample_rate: resample to so many samples per second, which the decoder then returns too;
            None: as the file says.
        mono: return the mean of the channels, as one channel.
        max_bytes: refuse a clip whose samples take more memory.

    Raises:
        ValueError: ``start`` or ``duration`` is negative or no number. From the decoder: the field
            is damaged, ends before ``start``, or exceeds ``max_bytes``.
    """
    if sample_rate is not None:
        check_count("sample_rate", sample_rate, most=1 << 24)
    return _clip(AudioReader, "sample_rate", start, duration, sample_rate=sample_rate, mono=mono, max_bytes=max_bytes)


def audio_encoder(form: str, deepest: str) -> Encoder:
    """Return an encoder of ``(samples, sample_rate)`` for a format of libsndfile.

    Args:
        form: the format.
        deepest: its encoding for floats; int16 samples become ``PCM_16`` where it has that.
    """

    def encode(value: Any) -> bytes:
        soundfile = library("soundfile", "soundfile", "an audio field")
        array, rate = _pair(value, "audio is (samples, sample_rate)")
        if array.ndim != 2 or array.dtype.name not in ("float32", "float64", "int16") or not array.size:
            raise TypeError(
                "the samples of audio are an array of shape (channels, samples), of floats from -1 to 1 or of int16, "
                f"not {array.dtype} of shape {array.shape}"
            )
        array = array.astype(array.dtype.newbyteorder("="), copy=False)  # soundfile takes any order for its own
        short = array.dtype == np.int16 and form in ("WAV", "FLAC")
        if array.dtype == np.int16 and not short:  # libsndfile scales them wrongly for MP3
            array = array.astype(np.float32) / 32768
        if array.dtype.kind == "f" and deepest != "FLOAT" and not np.abs(array).max() <= 1:
            raise ValueError("the samples of audio are floats from -1 to 1: scale them, or write wav")
        file = io.BytesIO()
        subtype = "PCM_16" if short else deepest
        with _sequential(soundfile)(file, "w", rate, len(array), subtype, format=form) as target:
            for start in range(0, array.shape[1], _BLOCK):  # libsndfile crashes if it gets very many for an Ogg
                target.write(np.ascontiguousarray(array[:, start : start + _BLOCK].T))
        return file.getvalue()

    return encode


def audio_example() -> tuple[Any, int]:
    """Half a second of two tones, on two channels."""
    time = np.arange(12_000) / 24_000
    tones = np.stack([np.sin(2 * np.pi * 440 * time), np.sin(2 * np.pi * 660 * time)])
    return (np.round(tones * 8192) / 32768).astype(np.float32), 24_000


# ------------------------------------------------------------------------------------------- video


class VideoReader:
    """The video of a field, which is decoded when it is read, with the package ``av``.

    A decoder: ``decode_by_ext({"mp4;webm": wp.VideoReader})``. It holds the bytes of the field, can
    be pickled, and is for one thread at a time.

    Args:
        data: the bytes of an MP4, MOV, Matroska, WebM or AVI file.

    Raises:
        ValueError: it is none of these, is damaged, or has no video.

    Attributes:
        width: of a frame, in pixels, as the file stores it: before it is turned.
        height: of a frame.
        rotation: by how many degrees frames are turned counterclockwise to be shown, such as -90
            for the video of a phone that was held upright. It is known from the first frame, which
            is decoded for it.
        frames_per_second: the average.
        seconds: the length as the file says; None: it does not say it.
    """

    def __init__(self, data: bytes) -> None:
        self._data = bytes(data)
        self._container = _open(self._data, "video")
        stream = self._container.streams.video[0]
        stream.codec_context.options = {"max_pixels": str(_MAX_PIXELS)}
        stream.codec_context.thread_count = 1
        self.width: int = stream.codec_context.width
        self.height: int = stream.codec_context.height
        self.frames_per_second = float(stream.average_rate or stream.guessed_rate or 0)
        length = stream.duration * stream.time_base if stream.duration else (self._container.duration or 0) / 1_000_000
        self.seconds: float | None = float(length) or None

    def __reduce__(self) -> Any:
        return type(self), (self._data,)

    @functools.cached_property
    def rotation(self) -> int:
        av, stream = library("av", "av", "a video field"), self._container.streams.video[0]
        try:
            self._container.seek(stream.start_time or 0, stream=stream, backward=True)
            return int(next(self._container.decode(stream)).rotation)
        except (av.FFmpegError, StopIteration) as error:
            raise ValueError(f"it has no first frame: {type(error).__name__}: {error}") from error

    def read(
        self,
        start: float = 0.0,
        duration: float | None = None,
        *,
        upright: bool = True,
        max_bytes: int = MAX_DECODED_BYTES,
    ) -> Any:
        """Decode the frames that begin from second ``start`` on.

        Args:
            start: the first second, counted from the first frame.
            duration: how many seconds; None: to the end. At the end of the file the clip is
                shorter.
            upright: turn the frames by quarter turns as the file says, so that they come as they
                are shown; otherwise they come as they are stored.
            max_bytes: the most memory for the frames.

        Returns:
            A uint8 array of shape (frames, height, width, 3), in RGB.

        Raises:
            ValueError: it is damaged, has no frame there, its frames differ in size, or have more
                bytes than ``max_bytes``.
        """
        _check_clip(start, duration)
        av = library("av", "av", "a video field")
        stream = self._container.streams.video[0]
        first, early = stream.start_time or 0, _early(stream)
        begin, end = (
            None if seconds is None else first + (round(seconds * 1_000_000) * _MICROSECOND - early) / stream.time_base
            for seconds in (start, None if duration is None else start + duration)
        )
        assert begin is not None
        try:
            frames = self._frames(math.floor(begin), begin, end, upright, max_bytes) if begin > first else None
            frames = frames or self._frames(first, begin, end, upright, max_bytes)
        except (av.FFmpegError, MemoryError) as error:
            raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from error
        if not frames:
            raise ValueError(f"it has no frame in the clip, start={start}, duration={duration}")
        return np.stack(frames)  # ValueError: they differ in size

    def _frames(
        self, place: int, begin: Fraction, end: Fraction | None, upright: bool, max_bytes: int
    ) -> list[Any] | None:
        """Decode the frames between two times, from the key frame on that FFmpeg finds for a place;
        None: it is later than the clip, or the frames depend on others before it.
        """
        stream = self._container.streams.video[0]
        first, frames = stream.start_time or 0, list[Any]()
        self._container.seek(max(place, first), stream=stream, backward=True)
        for number, frame in enumerate(self._container.decode(stream)):
            at = frame.pts if frame.pts is not None else frame.dts
            if at is None:
                raise ValueError("its frames have no times")
            if place > first and (frame.is_corrupt or (not number and at > begin)):
                return None
            if end is not None and at >= end:
                break
            if at < begin:
                continue
            if frame.is_corrupt:  # FFmpeg has made it of other frames
                raise ValueError(f"it is damaged: the frame at second {float((at - first) * stream.time_base):.3f}")
            if (len(frames) + 1) * 3 * frame.width * frame.height > max_bytes:
                raise mended(
                    ValueError,
                    f"its frames of {frame.width} x {frame.height} pixels take more than {max_bytes} bytes",
                    mend="decode a clip, such as {'mp4': wp.video(start=0, duration=1)}, or pass another max_bytes",
                    mend_cli="",
                )
            turns = frame.rotation // 90 if upright and frame.rotation % 90 == 0 else 0
            # One thread, this one: PyAV keeps what converts colours in thread-local memory. If it
            # has threads of its own, a worker that another thread forks frees it, and waits for
            # them for ever.
            frames.append(np.rot90(frame.to_ndarray(format="rgb24", threads=1), turns))
        return frames


def _early(stream: Any) -> Fraction:
    """How much earlier than it says a clip begins and ends, in seconds: a frame at ``1 / 30`` is in
    the clip that begins at this time, and not in the one that ends there. Where a frame does not
    last a whole number of ticks of the file, its time is rounded to a tick.
    """
    rate, tick = stream.average_rate or stream.guessed_rate, stream.time_base
    if not rate or (1 / (rate * tick)).denominator == 1:
        return _MICROSECOND
    rounded: Fraction = min(tick, 1 / (2 * rate))
    return _MICROSECOND + rounded


@checks_options
def video(
    *,
    start: float = 0.0,
    duration: float | None = None,
    upright: bool = True,
    max_bytes: int = MAX_DECODED_BYTES,
) -> Decoder:
    """Return a decoder of a clip of video, as in ``decode_by_ext({"mp4": wp.video(duration=2)})``.

    ``decode_by_ext("video")`` decodes all of every mp4, m4v, mov, mkv, webm and avi. A decoder
    returns ``(frames, frames_per_second)``, with the frames as a uint8 array of shape (frames,
    height, width, 3), in RGB. For a clip that depends on the sample use ``wp.VideoReader``. Sound
    is not decoded. Needs the package ``av`` (extra ``video``).

    A clip has the frames that begin in it, also where the file rounds their times, as Matroska does
    to milliseconds: the clip from ``k / frames_per_second`` on begins with frame ``k``. Those
    between the key frame before it and its first frame are decoded too. Take no clips of an AVI
    whose frames are stored in another order than they are shown: it has no times for them.

    Args:
        start: the first second, counted from the first frame.
        duration: how many seconds; None: to the end. At the end of the file the clip is shorter.
        upright: turn the frames by quarter turns as the file says, so that they come as they are
            shown, such as those of a phone that was held upright; otherwise as they are stored.
        max_bytes: refuse a clip whose frames take more memory.

    Raises:
        ValueError: ``start`` or ``duration`` is negative or no number. From the decoder: the field
            is damaged, has no frame there, or exceeds ``max_bytes``.
    """
    return _clip(VideoReader, "frames_per_second", start, duration, upright=upright, max_bytes=max_bytes)


def video_encoder(form: str, codec: str) -> Encoder:
    """Return an encoder of ``(frames, frames_per_second)`` by a container and codec of FFmpeg."""

    def encode(value: Any) -> bytes:
        av = library("av", "av", "a video field")
        array, rate = _pair(value, "video is (frames, frames_per_second)")
        array = np.ascontiguousarray(array)
        if array.ndim != 4 or array.shape[3] != 3 or array.dtype != np.uint8 or not array.size:
            raise TypeError(
                "the frames of a video are a uint8 array of shape (frames, height, width, 3), not "
                f"{array.dtype} of shape {array.shape}"
            )
        if array.shape[1] % 2 or array.shape[2] % 2:
            raise ValueError(f"the width and height of a video must be even, not {array.shape[2]} x {array.shape[1]}")
        file = io.BytesIO()
        with av.open(file, "w", format=form, options={"fflags": "+bitexact"}) as container:
            stream = container.add_stream(codec, rate=Fraction(rate).limit_denominator(1001))
            stream.width, stream.height, stream.pix_fmt = array.shape[2], array.shape[1], "yuv420p"
            stream.codec_context.options = _QUALITY[codec]
            stream.codec_context.thread_count = 1
            for picture in array:
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        return file.getvalue()

    return encode


_QUALITY = {
    "libx264": {"crf": "18", "flags": "+bitexact"},
    "libvpx-vp9": {"crf": "20", "b": "0", "flags": "+bitexact"},
    "mpeg4": {"qmin": "2", "qmax": "3", "flags": "+bitexact"},
}


def video_example() -> tuple[Any, float]:
    """Ten frames of a square that moves over a ramp."""
    frames = np.empty((10, 48, 64, 3), np.uint8)
    frames[:] = 2 * np.arange(64, dtype=np.uint8)[:, None]
    for number, frame in enumerate(frames):
        frame[8:24, 4 * number : 4 * number + 16] = (200, 60, 60)
    return frames, 10.0
