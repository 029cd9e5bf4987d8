"""Video with PyAV: whole, a clip by seconds, or read on request."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from wds_pipes.codecs.arrays import as_array
from wds_pipes.codecs.audio import check_clip
from wds_pipes.codecs.names import MAX_DECODED_BYTES, Decoder, Encoder
from wds_pipes.core.importing import library
from wds_pipes.core.suggest import checks_options

_MAX_PIXELS = 1 << 26  # of a frame
# The frames between a key frame and the beginning of a clip are decoded too. Together with those
# of the clip, they may have this many times max_bytes.
_DECODED = 8


class VideoReader:
    """The video of a field, which is decoded when it is read, with the package ``av``.

    A decoder: ``decode_by_ext({"mp4;webm": wp.VideoReader})``. It holds the bytes of the field, can
    be pickled, and is for one thread at a time.

    Args:
        data: the bytes of an MP4, MOV, Matroska, WebM or AVI file.

    Raises:
        ValueError: it is none of these, is damaged, or has no video.

    Attributes:
        width: of a frame, in pixels, as the file says.
        height: of a frame.
        frames_per_second: the average.
        seconds: the length as the file says; None: it does not say it.
    """

    def __init__(self, data: bytes) -> None:
        self._data = bytes(data)
        self._container = _open(self._data)
        stream = self._container.streams.video[0]
        if stream.codec_context is None:
            raise ValueError("FFmpeg has no decoder for its video")
        stream.codec_context.options = {"max_pixels": str(_MAX_PIXELS)}
        stream.codec_context.thread_count = 1
        self.width: int = stream.codec_context.width
        self.height: int = stream.codec_context.height
        self.frames_per_second = float(stream.average_rate or stream.guessed_rate or 0)
        length = stream.duration * stream.time_base if stream.duration else (self._container.duration or 0) / 1_000_000
        self.seconds: float | None = float(length) or None

    def __reduce__(self) -> Any:
        return type(self), (self._data,)

    def read(self, start: float = 0.0, duration: float | None = None, *, max_bytes: int = MAX_DECODED_BYTES) -> Any:
        """Decode the frames that begin from second ``start`` on.

        Args:
            start: the first second, counted from the first frame.
            duration: how many seconds; None: to the end. At the end of the file the clip is
                shorter.
            max_bytes: the most memory for the frames.

        Returns:
            A uint8 array of shape (frames, height, width, 3), in RGB. Marks that say how to rotate
            the frames are ignored.

        Raises:
            ValueError: it is damaged, has no frame there, its frames differ in size, or have more
                bytes than ``max_bytes``.
        """
        check_clip(start, duration)
        av = library("av", "av", "a video field")
        stream = self._container.streams.video[0]
        base, first, early = stream.time_base, stream.start_time or 0, _early(stream)
        try:
            begin = first + (_seconds(start) - early) / base
            end = None if duration is None else first + (_seconds(start + duration) - early) / base
            frames = None
            if begin > first and not self._is_counted:
                frames = self._frames(math.floor(begin), begin, end, max_bytes)
            if not frames:
                frames = self._frames(first, begin, end, max_bytes)
        except (av.FFmpegError, MemoryError) as error:
            raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from error
        if not frames:
            raise ValueError(f"it has no frame in the clip, start={start}, duration={duration}")
        if len({frame.shape for frame in frames}) > 1:
            raise ValueError("its frames differ in size")
        return np.stack(frames)

    @property
    def _is_counted(self) -> bool:
        """Whether the times of frames are their numbers: an AVI has none for frames that are shown
        in another order than they are stored.
        """
        context = self._container.streams.video[0].codec_context
        return bool(self._container.format.name == "avi" and context.has_b_frames)

    def _frames(self, place: int, begin: Fraction, end: Fraction | None, max_bytes: int) -> list[Any] | None:
        """Decode the frames between two times, from the key frame on that FFmpeg finds for a place;
        None: they depend on frames before it. Such a key frame is late itself, or none in the sense
        that all of a picture is new.
        """
        stream, counted = self._container.streams.video[0], self._is_counted
        first, frames, decoded, late = stream.start_time or 0, list[Any](), 0, 0
        self._container.seek(max(place, first), stream=stream, backward=True)
        for number, frame in enumerate(self._container.decode(stream)):
            at = frame.pts if frame.pts is not None else frame.dts
            if at is None:
                raise ValueError("its frames have no times")
            if counted:
                late = late if number else at - first
                at -= late
            if place > first and (frame.is_corrupt or (not number and at > begin)):
                return None
            if end is not None and at >= end:
                break
            size = 3 * frame.width * frame.height
            decoded += size
            kept = at >= begin
            if (len(frames) + 1) * size > max_bytes or decoded > _DECODED * max_bytes:
                raise ValueError(
                    f"its frames of {frame.width} x {frame.height} pixels take more than max_bytes={max_bytes}: "
                    "decode a clip, such as {'mp4': wp.video(start=0, duration=1)}, or pass another max_bytes"
                )
            if kept and frame.is_corrupt:  # FFmpeg has made it of other frames
                raise ValueError(f"it is damaged: the frame at second {float((at - first) * stream.time_base):.3f}")
            if kept:
                frames.append(frame.to_ndarray(format="rgb24"))
        return frames


_MICROSECOND = Fraction(1, 1_000_000)


def _seconds(seconds: float) -> Fraction:
    """A time, to a microsecond."""
    return round(seconds * 1_000_000) * _MICROSECOND


def _early(stream: Any) -> Fraction:
    """How much earlier than it says a clip begins and ends, so that a frame at ``1 / 30`` is in the
    clip that begins at this time, and not in the one that ends there.

    A file has its times in ticks. They are rounded if a frame does not last a whole number of
    ticks, that of the first frame too: in Matroska, a tick is a millisecond.
    """
    rate = stream.average_rate or stream.guessed_rate
    if not rate or (1 / (rate * stream.time_base)).denominator == 1:
        return _MICROSECOND
    rounded: Fraction = min(stream.time_base, 1 / (2 * rate))
    return _MICROSECOND + rounded


def _open(data: bytes) -> Any:
    """Open a container, whose format its first bytes say.

    FFmpeg alone would also try formats that read other files and URLs, such as playlists.
    """
    av = library("av", "av", "a video field")
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        name = "mov"
    elif data[:4] == b"\x1a\x45\xdf\xa3":
        name = "matroska"
    elif data[:4] == b"RIFF" and data[8:12] == b"AVI ":
        name = "avi"
    else:
        raise ValueError("the data are none of MP4, MOV, Matroska, WebM, AVI")
    if (end := _promised[name](data)) > len(data):  # FFmpeg takes what is there as the whole file
        raise ValueError(f"it is cut short: it has {len(data)} bytes, and promises {end}")
    try:
        container = av.open(io.BytesIO(data), format=name, metadata_errors="replace")
    except av.FFmpegError as error:
        raise ValueError(f"it is damaged: {type(error).__name__}: {error}") from error
    if not container.streams.video:
        raise ValueError("it has no video")
    return container


def _end_of_boxes(data: bytes) -> int:
    """Where the boxes of an MP4 end, as their headers say."""
    place = 0
    while place + 8 <= len(data):
        size = int.from_bytes(data[place : place + 4], "big")
        if size == 1:
            size = int.from_bytes(data[place + 8 : place + 16], "big")
        if size < 8:  # 0: up to the end of the file; otherwise damaged, which FFmpeg reports
            return len(data)
        place += size
    return place


def _end_of_segment(data: bytes) -> int:
    """Where the header and the segment of a Matroska end, as their sizes say."""
    place = 0
    for _ in range(2):
        place += 4  # the number of the element
        first = data[place : place + 1]
        if first in (b"", b"\0"):
            return len(data) + 1 if not first else len(data)
        length = 9 - first[0].bit_length()
        size = int.from_bytes(data[place : place + length], "big") & ((1 << 7 * length) - 1)
        if size == (1 << 7 * length) - 1:  # not known
            return len(data)
        place += length + size
    return place


_promised: dict[str, Callable[[bytes], int]] = {
    "mov": _end_of_boxes,
    "matroska": _end_of_segment,
    "avi": lambda data: 8 + int.from_bytes(data[4:8], "little"),
}


@dataclass(frozen=True)
class _Video:
    start: float
    duration: float | None
    max_bytes: int

    def __call__(self, data: bytes) -> Any:
        reader = VideoReader(data)
        return reader.read(self.start, self.duration, max_bytes=self.max_bytes), reader.frames_per_second


@checks_options
def video(*, start: float = 0.0, duration: float | None = None, max_bytes: int = MAX_DECODED_BYTES) -> Decoder:
    """Return a decoder of a clip of video, as in ``decode_by_ext({"mp4": wp.video(duration=2)})``.

    ``decode_by_ext("video")`` decodes all of every mp4, m4v, mov, mkv, webm and avi. A decoder
    returns ``(frames, frames_per_second)``, with the frames as a uint8 array of shape (frames,
    height, width, 3), in RGB. For a clip that depends on the sample use ``wp.VideoReader``. Sound
    is not decoded. Needs the package ``av`` (extra ``video``).

    A clip has the frames that begin in it, also where the file rounds their times, as Matroska does
    to milliseconds: the clip from ``k / frames_per_second`` on begins with frame ``k``. Those
    between the key frame before it and its first frame are decoded too.

    Args:
        start: the first second, counted from the first frame.
        duration: how many seconds; None: to the end. At the end of the file the clip is shorter.
        max_bytes: refuse a clip whose frames take more memory.

    Raises:
        ValueError: ``start`` or ``duration`` is negative or no number. From the decoder: the field
            is damaged, has no frame there, or exceeds ``max_bytes``.
    """
    check_clip(start, duration)
    return _Video(start, duration, max_bytes)


def video_encoder(form: str, codec: str) -> Encoder:
    """Return an encoder of ``(frames, frames_per_second)`` by a container and codec of FFmpeg."""

    def encode(value: Any) -> bytes:
        av = library("av", "av", "a video field")
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            raise TypeError(f"video is (frames, frames_per_second), not {type(value).__name__}")
        frames, rate = value
        if hasattr(frames, "detach"):
            frames = frames.detach().cpu()
        array = np.ascontiguousarray(as_array(frames))
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


def example() -> tuple[Any, float]:
    """Ten frames of a square that moves over a ramp."""
    frames = np.empty((10, 48, 64, 3), np.uint8)
    frames[:] = 2 * np.arange(64, dtype=np.uint8)[:, None]
    for number, frame in enumerate(frames):
        frame[8:24, 4 * number : 4 * number + 16] = (200, 60, 60)
    return frames, 10.0
