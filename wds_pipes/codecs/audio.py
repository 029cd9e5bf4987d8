"""Audio with soundfile: whole, a clip by seconds, or read on request."""

from __future__ import annotations

import functools
import io
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from wds_pipes.codecs.arrays import as_array
from wds_pipes.codecs.mp3 import with_length
from wds_pipes.codecs.names import MAX_DECODED_BYTES, Decoder, Encoder
from wds_pipes.core.importing import library
from wds_pipes.core.suggest import checks_options

_BLOCK = 1 << 16  # samples that are decoded or encoded at a time
_ENDLESS = 0x7FFF0000  # programs that write WAV to a pipe promise at least as many bytes
_UNKNOWN = 1 << 48  # more samples than this, as libsndfile says, is a length that it does not know


class AudioReader:
    """The audio of a field, which is decoded when it is read, with the package ``soundfile``.

    A decoder: ``decode_by_ext({"wav;flac;mp3": wp.AudioReader})``. It holds the bytes of the field,
    and can be pickled.

    Args:
        data: the bytes of a WAV, FLAC, Ogg (Vorbis, Opus) or MP3 file.

    Raises:
        ValueError: it is none of these, or it is damaged.

    Attributes:
        sample_rate: samples per second.
        channels: how many.
        seconds: the length as the file says, before it is decoded; None: it does not say it.
    """

    def __init__(self, data: bytes) -> None:
        if not (
            data[:4] in (b"fLaC", b"OggS")
            or (data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE")
            or data[:3] == b"ID3"
            or (data[:1] == b"\xff" and data[1:2] >= b"\xe0")
        ):
            raise ValueError("the data are none of WAV, FLAC, Ogg, MP3")
        self._data = self._played = bytes(data)
        known = True  # whether it says how long it is
        if len(data) < (promised := _promised(data)):  # libsndfile would take what is there as the whole file
            raise ValueError(f"it is cut short: it has {len(data)} bytes, and promises {promised}")
        if data[:4] == b"OggS":
            _check_pages(data)
        elif data[:4] == b"RIFF":
            _check_finished(data)
        elif data[:1] not in (b"R", b"f"):
            self._played, known = with_length(self._data)
        with self._open() as file:
            self.sample_rate: int = file.samplerate
            self.channels: int = file.channels
            self._samples: int | None = file.frames if known and file.frames < _UNKNOWN else None
            self._seekable = file.format in ("WAV", "WAVEX", "RF64", "FLAC")
        self.seconds: float | None = None if self._samples is None else self._samples / self.sample_rate

    def __reduce__(self) -> Any:
        return type(self), (self._data,)

    def _open(self) -> Any:
        soundfile = library("soundfile", "soundfile", "an audio field")
        try:
            return _sequential(soundfile)(io.BytesIO(self._played))
        except soundfile.LibsndfileError as error:
            raise ValueError(f"it is damaged: {error.error_string}") from error

    def read(self, start: float = 0.0, duration: float | None = None, *, max_bytes: int = MAX_DECODED_BYTES) -> Any:
        """Decode the samples from second ``start`` on.

        Args:
            start: the first second, rounded to a sample.
            duration: how many seconds; None: to the end. At the end of the file the clip is
                shorter.
            max_bytes: the most memory for the samples.

        Returns:
            A float32 array of shape (channels, samples), from -1 to 1.

        Raises:
            ValueError: it is damaged or cut short, ends before ``start``, or has more bytes than
                ``max_bytes``.
        """
        check_clip(start, duration)
        first = round(start * self.sample_rate)
        left = _UNKNOWN if duration is None else round((start + duration) * self.sample_rate) - first
        if self._samples is not None:
            if first and first >= self._samples:
                raise ValueError(f"it has {self.seconds:.3f} seconds, and start={start}")
            left = min(left, self._samples - first)
        most = max_bytes // (4 * self.channels)
        promised = left if duration is not None or self._samples is not None else 0
        if promised > most:
            raise ValueError(_TOO_LONG.format(promised, self.channels, max_bytes))
        blocks, count = [], 0
        try:
            with self._open() as file:
                place = file.seek(first) if self._seekable else 0
                while place < first and (dropped := len(file.read(min(_BLOCK, first - place)))):
                    place += dropped
                while count < left:
                    block = file.read(min(_BLOCK, left - count), dtype="float32", always_2d=True)
                    count += len(block)
                    if not len(block):
                        break
                    if count > most:
                        raise ValueError(_TOO_LONG.format(count, self.channels, max_bytes))
                    blocks.append(block)
        except RuntimeError as error:  # of soundfile
            raise ValueError(f"it is damaged: {error}") from error
        if self._samples is not None and count < left:
            raise ValueError(f"it is cut short: it promises {self._samples} samples and ends after {first + count}")
        samples = np.empty((self.channels, count), np.float32)
        if blocks:
            np.concatenate(blocks, out=samples.T)
        return samples


@functools.cache
def _sequential(soundfile: Any) -> Any:
    """A file of soundfile that is read without seeking.

    soundfile seeks after each read, and in an MP3 or Ogg libsndfile finds only about the place.
    """

    class Sequential(soundfile.SoundFile):  # type: ignore[misc]
        def seekable(self) -> bool:
            return False

    return Sequential


def _promised(data: bytes) -> int:
    """The bytes that a WAV says that it has; 0 if it does not say it."""
    if data[:4] == b"RF64" and data[12:16] == b"ds64":  # EBU Tech 3306
        size = int.from_bytes(data[20:28], "little")
        return 8 + size if size < 1 << 62 else 0
    size = int.from_bytes(data[4:8], "little")
    return 8 + size if data[:4] == b"RIFF" and size < _ENDLESS else 0


def _check_finished(data: bytes) -> None:
    """Raise ValueError for a WAV whose writer did not come to write how long it is."""
    at = 12
    while len(data) >= at + 8:
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        following = data[at + 8 : at + 16]
        chunk = following[:4].isascii() and following[:4].decode("ascii").isprintable()
        fits = int.from_bytes(following[4:], "little") <= len(data) - at - 16
        if name == b"data" and not size and any(data[at + 8 :]) and not (chunk and fits and len(following) == 8):
            raise ValueError(
                f"it was not finished: it says that it has no samples, and has {len(data) - at - 8} bytes of them"
            )
        at += 8 + size + size % 2


def _check_pages(data: bytes) -> None:
    """Raise ValueError for an Ogg that is cut short, or is several, one after another."""
    at, begun = 0, False
    while data[at : at + 4] == b"OggS" and len(data) > at + 26:
        begins = bool(data[at + 5] & 2)
        if begins and begun:
            raise ValueError(
                f"it is several Ogg files one after another, the second from byte {at} on, and libsndfile reads the "
                "first one alone: write them as one, or to several fields"
            )
        begun = not begins
        page, at = at, at + 27 + data[at + 26] + sum(data[at + 27 : at + 27 + data[at + 26]])
        if at > len(data):
            raise ValueError(f"it is cut short: its last page, at byte {page}, is not complete")
    if data[at : at + 4] == b"OggS":
        raise ValueError(f"it is cut short: its last page, at byte {at}, is not complete")


_TOO_LONG = (
    "it has {} samples or more in {} channels, which are more than max_bytes={}: decode a clip, such as "
    "{{'wav': wp.audio(start=0, duration=10)}}, or pass another max_bytes"
)


def check_clip(start: float, duration: float | None) -> None:
    """Raise ValueError if these are not the seconds of a clip."""
    for name, value in (("start", start), ("duration", duration)):
        if value is not None and not (math.isfinite(value) and 0 <= value < 1e9):
            raise ValueError(f"{name} must be a number of seconds, not {value!r}")
    if duration == 0:
        raise ValueError("duration must be more than 0 seconds")


@dataclass(frozen=True)
class _Audio:
    start: float
    duration: float | None
    max_bytes: int

    def __call__(self, data: bytes) -> Any:
        reader = AudioReader(data)
        return reader.read(self.start, self.duration, max_bytes=self.max_bytes), reader.sample_rate


@checks_options
def audio(*, start: float = 0.0, duration: float | None = None, max_bytes: int = MAX_DECODED_BYTES) -> Decoder:
    """Return a decoder of a clip of audio, as in ``decode_by_ext({"wav": wp.audio(duration=3)})``.

    ``decode_by_ext("audio")`` decodes all of every wav, flac, ogg, opus and mp3. A decoder returns
    ``(samples, sample_rate)``, with the samples as a float32 array of shape (channels, samples),
    from -1 to 1. Nothing is resampled. For a clip that depends on the sample use
    ``wp.AudioReader``. Needs the package ``soundfile`` (extra ``audio``).

    A clip is cut to the sample. Of an MP3 or Ogg, what is before it is decoded too.

    Args:
        start: the first second.
        duration: how many seconds; None: to the end. At the end of the file the clip is shorter.
        max_bytes: refuse a clip whose samples take more memory.

    Raises:
        ValueError: ``start`` or ``duration`` is negative or no number. From the decoder: the field
            is damaged, cut short, ends before ``start``, or exceeds ``max_bytes``.
    """
    check_clip(start, duration)
    return _Audio(start, duration, max_bytes)


def audio_encoder(form: str, deepest: str) -> Encoder:
    """Return an encoder of ``(samples, sample_rate)`` for a format of libsndfile.

    Args:
        form: the format.
        deepest: its encoding for floats; int16 samples become ``PCM_16`` where it has that.
    """

    def encode(value: Any) -> bytes:
        soundfile = library("soundfile", "soundfile", "an audio field")
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise TypeError(f"audio is (samples, sample_rate), not {type(value).__name__}")
        samples, rate = value
        if hasattr(samples, "detach"):
            samples = samples.detach().cpu()
        array = as_array(samples)
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


def example() -> tuple[Any, int]:
    """Half a second of two tones, on two channels."""
    time = np.arange(12_000) / 24_000
    tones = np.stack([np.sin(2 * np.pi * 440 * time), np.sin(2 * np.pi * 660 * time)])
    return (np.round(tones * 8192) / 32768).astype(np.float32), 24_000
