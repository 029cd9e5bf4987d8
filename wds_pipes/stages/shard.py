"""Shard: an open shard, or one that opens when it is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO

from wds_pipes.errors import ShardError, StateError
from wds_pipes.io import compression
from wds_pipes.io.open import is_remote
from wds_pipes.io.urls import redact
from wds_pipes.stages.shard_ref import ShardRef
from wds_pipes.tar.headers import BLOCK


class Shard:
    """A shard that opens when it is read.

    Attributes:
        ref: its URL or path, and what is known of it.
        url: its URL or path, as a str.
        refuse: a function that takes the ShardError of a shard that cannot be opened, and raises or
            counts it, depending on ``open_shards(on_error=...)``.
    """

    def __init__(
        self, ref: ShardRef, opening: Callable[[int, bool], BinaryIO], refuse: Callable[[ShardError], None]
    ) -> None:
        self.ref = ref
        self.url = ref.url
        self.refuse = refuse
        self._opening = opening  # takes the first byte (for remote shards), and whether to wait for it
        self._opened: list[BinaryIO] = []
        self._ahead: int | None = None  # requested from this byte on, without waiting

    @property
    def is_open(self) -> bool:
        """Whether it was requested."""
        return bool(self._opened)

    @property
    def raw(self) -> BinaryIO:
        """Its bytes as they are stored: a buffered binary stream, at the beginning if nothing was
        read yet.
        """
        return self._begin(0)

    def read_ahead(self, start: int = 0) -> None:
        """Request its bytes from ``start`` on, without waiting for them."""
        try:
            self._opened.append(self._opening(start, False))
            self._ahead = start
        except ShardError:
            pass  # it will be raised when the shard is read

    def _begin(self, start: int) -> BinaryIO:
        # this position was of another shard, which a step in between has dropped
        if self._ahead is not None and self._ahead != start:
            self._ahead = None
            self.close()
            self._opened.clear()
        if not self._opened:
            self._opened.append(self._opening(start, True))
        elif self._ahead is not None:
            self._ahead = None
            self._opened[0].raw.wait()  # type: ignore[attr-defined]
        return self._opened[0]

    def tar(self, offset: int = 0, kind: str | None = None) -> tuple[BinaryIO, str]:
        """Return the tar in the shard as a stream at ``offset`` (in decompressed bytes), and its
        compression: gz, bz2, xz, zst or ``""``.

        Args:
            offset: the position of the stream. An uncompressed shard is opened or sought there if
                it can be; any other is read or decompressed up to there.
            kind: the compression, if it is known. If a remote shard is known to be uncompressed,
                nothing is read to find that out.

        Raises:
            ShardError: the shard cannot be opened. Pass the error to ``refuse``, which raises or
                counts it.
            StateError: the shard ends before ``offset``, or has another compression.
        """
        left = offset
        if kind == "" and is_remote(self.url):
            stream, left = self._begin(offset), 0
        else:
            stream = self._begin(0)
            found = compression.detect(stream.peek(compression.MAGIC_BYTES)[: compression.MAGIC_BYTES])  # type: ignore[attr-defined]
            if kind not in (None, found):
                then, now = kind or "not compressed", found or "not compressed"
                raise StateError(
                    f"by the state, shard {redact(self.url)} was read as {then}, and is {now} "
                    "now: it was changed since."
                )
            kind = found
        if kind:
            stream = compression.decompress(stream, kind)
            self._opened.append(stream)
        if left and not kind and stream.seekable():
            left -= min(stream.seek(0, os.SEEK_END), offset)
            if left < BLOCK:
                stream.seek(offset)
        else:
            while left and (got := len(stream.read(min(left, 1 << 20)))):
                left -= got
        if left >= BLOCK:  # only the padding of the last block may be missing
            raise StateError(
                f"the state stands at byte {offset} of shard {redact(self.url)}, which has only "
                f"{offset - left}: it was changed since."
            )
        return stream, kind

    def doubt(self, error: ShardError) -> None:
        """Report damage in the shard: a cache removes its file when it is closed, and a note in
        ``error`` says so.
        """
        forget = getattr(getattr(self._opened[0], "raw", None), "doubt", None) if self._opened else None
        path = forget() if forget is not None else None
        if path is not None:
            error.add_note(
                f"It was read from the cache, file {path}, which is removed when no process reads "
                "it: then the shard is fetched again."
            )

    def close(self) -> None:
        """Close its streams. This also happens when the object is deleted."""
        for stream in reversed(self._opened):
            stream.close()

    def __del__(self) -> None:
        self.close()
