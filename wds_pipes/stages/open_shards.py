"""OpenShards: URLs to open shards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from wds_pipes.errors import ShardError, StateError
from wds_pipes.io import compression
from wds_pipes.io.open import open_url
from wds_pipes.io.urls import redact
from wds_pipes.stage import Stage, Tolerant, check_count
from wds_pipes.tar.reader import BLOCK


class Shard:
    """An open shard.

    Attributes:
        url: where it is.
        raw: its bytes as they are stored: a buffered binary stream at their beginning.
    """

    def __init__(self, url: str, raw: BinaryIO) -> None:
        self.url = url
        self.raw = raw
        self._opened: list[BinaryIO] = [raw]

    def tar(self, offset: int = 0, kind: str | None = None) -> tuple[BinaryIO, str]:
        """The tar in it as a stream that stands at ``offset`` (in decompressed bytes), and its compression: gz, bz2, xz, zst or ``""``.

        Args:
            offset: where to stand. A plain shard is sought if it can be; a compressed one must be decompressed up to there.
            kind: the compression, if it is known: then nothing is read to find it.

        Raises:
            StateError: the shard ends before ``offset``.
        """
        if kind and kind not in compression.KINDS:
            raise StateError(f"the state is damaged: shard {redact(self.url)} cannot have the compression {kind!r}. Use an untouched checkpoint.")
        if kind is None:
            kind = compression.detect(self.raw.peek(compression.MAGIC_BYTES)[: compression.MAGIC_BYTES])  # type: ignore[attr-defined]
        stream = self.raw
        if kind:
            stream = compression.decompress(self.raw, kind)
            self._opened.append(stream)
        left = offset
        if offset and not kind and stream.seekable():
            left -= min(stream.seek(0, os.SEEK_END), offset)
            stream.seek(offset)
        else:
            while left and (got := len(stream.read(min(left, 1 << 20)))):
                left -= got
        if left >= BLOCK:  # of the last block only padding may be missing
            raise StateError(f"the state stands at byte {offset} of shard {redact(self.url)}, which has only {offset - left}: it was changed since.")
        return stream, kind

    def close(self) -> None:
        """Close its streams; a shard that is dropped is closed too."""
        for stream in reversed(self._opened):
            stream.close()

    def __del__(self) -> None:
        self.close()


class OpenShards(Tolerant[Shard]):
    """URLs or paths to open shards (functional name: ``open_shards``).

    Local files are opened straight, everything else through fsspec: ``s3://``, ``gs://``, ``http(s)://``, ``memory://`` and what else is installed; ``-`` is
    standard input (it cannot be sought, so a resume reads it again up to its position). Nothing is opened before the shard's turn.

    Args:
        source: a pipe of URLs: ``ShardList``, or torch's own, such as ``IterableWrapper(urls)``.
        storage_options: how to reach the storage: a dict, as fsspec takes it (``{"anon": True}``, ``{"endpoint_url": ...}``).
        buffer_bytes: how much is read at once.
        on_error: for a shard that cannot be opened: ``"raise"``, or ``"skip"`` it and count it.
        max_errors: with ``"skip"``, how many may be skipped in an epoch; None: any number.

    Raises:
        ShardError: from the iteration: a shard does not exist, may not be read, or needs a package that is missing.

    Checkpoint: the number of skipped shards. A resume opens only the shard that was being read.
    """

    @dataclass(slots=True)
    class At:
        skipped_shards: int = 0

    counter = "skipped_shards"

    def __init__(
        self,
        source: Stage[Any],
        *,
        storage_options: dict[str, Any] | None = None,
        buffer_bytes: int = 1 << 20,
        on_error: str = "raise",
        max_errors: int | None = None,
    ) -> None:
        super().__init__(source, on_error, max_errors)
        if storage_options is not None and not isinstance(storage_options, dict):
            raise TypeError(f"storage_options must be a dict, not {storage_options!r}")
        self.storage_options = storage_options
        self.buffer_bytes = check_count("buffer_bytes", buffer_bytes, least=512)

    def run(self) -> Iterator[Shard]:
        assert self.source is not None
        for url in self.source.items:
            if not isinstance(url, (str, os.PathLike)):
                raise TypeError(f"open_shards() takes URLs and paths, and its source gave {url!r:.200}: put it behind ShardList(...) or IterableWrapper(urls)")
            try:
                raw = open_url(os.fspath(url), storage_options=self.storage_options, buffer_bytes=self.buffer_bytes)
            except ShardError as error:
                if isinstance(error.__cause__, ImportError):  # not the shard's fault, so never skipped
                    raise
                self.skip(error)
                continue
            shard = Shard(os.fspath(url), raw)
            try:
                yield shard
            except GeneratorExit:
                shard.close()
                raise
