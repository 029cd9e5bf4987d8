"""Write samples into tar shards; the same samples always give the same bytes.

Rules:
1. Members carry uid and gid 0, mode 0444 and mtime 0, and the fields of a sample are sorted, so that nothing of the machine or the moment gets in.
2. A ustar header where the name fits, a pax header only where it does not.
3. A shard has its name only when it is complete: it is written beside it and renamed. A shard without samples is never left.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from wds_pipes.codecs import encode
from wds_pipes.errors import SampleError
from wds_pipes.tar.keys import split_key

_END = bytes(1024)
_RECORD = 10240  # tar files end on a multiple of it


class TarWriter:
    """Write samples into one tar.

    A sample is a dict with ``"__key__"`` and its fields: bytes stay as they are, other values are encoded by the field's extension (text, integers, JSON,
    npy, npz, images from uint8 arrays or PIL). Other names in double underscores are left out.

    Use it as a context manager: the file gets its name when the block ends well, and is thrown away if it raises.

    Args:
        target: a path, or a binary stream to write to (it is not closed).

    Raises:
        SampleError: from ``write``: no key or no field, a key or a field that would not read back as it is, a value that cannot be encoded. Nothing of the
            sample is written.

    Attributes:
        samples: how many were written.
        size: the bytes written so far, without the end.
    """

    def __init__(self, target: str | os.PathLike[str] | BinaryIO) -> None:
        self.samples = self.size = 0
        self._last_key: str | None = None
        self._path: Path | None = None
        if isinstance(target, (str, os.PathLike)):
            self._path = Path(target)
            self._partial = self._path.with_name(f".{self._path.name}.{os.getpid()}.partial")
            self._file: BinaryIO = open(self._partial, "wb")
        else:
            self._file = target

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample behind the ones before it."""
        members = self._members(sample)
        self._last_key = sample["__key__"]
        for header, data in members:
            self._file.write(header)
            self._file.write(data)
            self._file.write(bytes(-len(data) & 511))
            self.size += len(header) + len(data) + (-len(data) & 511)
        self.samples += 1

    def _members(self, sample: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
        """The headers and data of a sample, checked."""
        key = sample.get("__key__")
        if not isinstance(key, str) or not key:
            raise SampleError(f"a sample needs a '__key__' that is a string, not {key!r}; it has: {', '.join(map(str, sample))}")
        if key == self._last_key:
            raise SampleError(f"key {key!r} was just written: the two samples would be read as one. Give each its own key.", key=key)
        members = []
        for field in sorted(name for name in sample if not name.startswith("__")):
            name = f"{key}.{field}"
            if not field or split_key(name) != (key, field):
                raise SampleError(f"sample {key!r} with field {field!r} would not be read back as that: {_mend(key, field)}.", key=key)
            try:
                data = encode(field, sample[field])
            except Exception as error:
                raise SampleError(f"field {field!r} of sample {key!r} cannot be encoded: {error}", key=key) from error
            members.append((_header(name, len(data)), data))
        if not members:
            raise SampleError(f"sample {key!r} has no fields: it would not be in the shard at all.", key=key)
        return members

    def close(self) -> None:
        """Write the end, and give the file its name."""
        end = _END + bytes(-(self.size + len(_END)) % _RECORD)
        self._file.write(end)
        self._file.flush()
        if self._path is not None:
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._partial, self._path)

    def discard(self) -> None:
        """Throw away what was written, if it went to a path."""
        if self._path is not None:
            self._file.close()
            self._partial.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o444, 0
    try:
        return info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")
    except ValueError:
        return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _mend(key: str, field: str) -> str:
    """What to do about a name that does not read back."""
    base = key.rpartition("/")[2]
    if "." in base:
        return f"its key has a dot, which would start the field; write it as {key.replace('.', '_')!r}"
    if field != field.lower():
        return f"fields are in lower case; write {field.lower()!r}"
    if key.startswith("__"):
        return "names in double underscores are kept for metadata"
    return "a key must not be empty or end with '/', and a field must not be empty or hold '/'"


class ShardWriter:
    """Write samples into a row of shards, a new one when one is full.

    Use it as a context manager. Each shard appears under its name when it is complete; if the block raises, the unfinished one is thrown away.

    Args:
        pattern: the path of the shards with one place for their number: ``"train-%06d.tar"`` or ``"train-{:06d}.tar"``. The directory must exist.
        max_samples: how many samples a shard holds at most.
        max_bytes: how many bytes a shard holds at most, unless its only sample is larger.
        start: the number of the first shard.
        on_shard: called with the path of each complete shard, to upload it for example.

    Raises:
        SampleError: from ``write``, as ``TarWriter`` does.
        ValueError: when built: the pattern has no place for a number, or a limit is not positive.

    Attributes:
        shards: the paths of the complete shards, with the number of samples in each.
        samples: how many were written to all of them.
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str],
        *,
        max_samples: int = 100_000,
        max_bytes: int = 1 << 30,
        start: int = 0,
        on_shard: Callable[[str], None] | None = None,
    ) -> None:
        self.pattern = os.fspath(pattern)
        if max_samples < 1 or max_bytes < 1 or start < 0:
            raise ValueError(f"max_samples and max_bytes must be positive and start not negative, not {max_samples}, {max_bytes} and {start}")
        if len(re.findall(r"%0?\d*d|\{:?0?\d*d?\}", self.pattern)) != 1:
            raise ValueError(f"the pattern needs one place for the shard's number, such as 'train-%06d.tar', not {self.pattern!r}")
        self.max_samples, self.max_bytes, self.on_shard = max_samples, max_bytes, on_shard
        self.shards: dict[str, int] = {}
        self.samples = 0
        self._number = start
        self._writer: TarWriter | None = None

    def path(self, number: int) -> str:
        """The path of shard ``number``."""
        return self.pattern % number if "%" in self.pattern else self.pattern.format(number)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample to the current shard, or to the next if that one is full."""
        writer = self._writer
        if writer is not None:
            room = self.max_bytes - writer.size - len(_END)
            if writer.samples >= self.max_samples or sum(len(header) + len(data) + (-len(data) & 511) for header, data in writer._members(sample)) > room:
                self._finish()
                writer = None
        if writer is None:
            writer = self._writer = TarWriter(self.path(self._number))
        try:
            writer.write(sample)
        except SampleError:
            if writer.samples == 0:
                writer.discard()
                self._writer = None
            raise
        self.samples += 1

    def _finish(self) -> None:
        if self._writer is None:
            return
        path = self.path(self._number)
        self._writer.close()
        self.shards[path] = self._writer.samples
        self._writer = None
        self._number += 1
        if self.on_shard is not None:
            self.on_shard(path)

    def close(self) -> None:
        """Finish the last shard."""
        self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif self._writer is not None:
            self._writer.discard()
            self._writer = None
