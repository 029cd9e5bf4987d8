"""Write samples into tar shards; the same samples always give the same bytes.

Rules:
1. Members carry uid and gid 0, mode 0444 and mtime 0, and the fields of a sample are sorted, so that nothing of the machine or the moment gets in.
2. A ustar header where the name fits, a pax header only where it does not.
3. A shard has its name only when it is complete: it is written beside it and renamed. ShardWriter never leaves one without samples.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import sys
import tarfile
from collections.abc import Callable, Mapping
from hashlib import md5
from types import TracebackType
from typing import Any, BinaryIO, Self

from wds_pipes.core.suggest import checks_options
from wds_pipes.errors import SampleError
from wds_pipes.io.partial import PartialFile
from wds_pipes.io.urls import at_home, redact
from wds_pipes.tar.headers import MAX_HEADER_BYTES
from wds_pipes.tar.index import listed_shards
from wds_pipes.tar.index_formats import ShardFacts
from wds_pipes.tar.indexing import check_output, write_index
from wds_pipes.tar.keys import split_key

logger = logging.getLogger("wds_pipes")

_END = 1024  # zeros
_RECORD = 10240  # tar files end on a multiple of it
_JOINED = 1 << 20  # a smaller sample is written in one piece


class TarWriter:
    """Write samples into one tar.

    A sample is a dict with ``"__key__"`` and its fields: bytes stay as they are, other values are encoded by the field's extension (text, integers, JSON,
    npy, npz, images from uint8 arrays or PIL). Other names in double underscores are left out.

    Use it as a context manager: the file gets its name when the block ends well, and is thrown away if it raises. Until then it is ``.NAME.partial`` beside
    it; what a killed process left there is written over by the next writer of the same file.

    A stream is not closed, so use the writer inside the stream's own block. If the writer's block raises, or writing fails, the upload of an fsspec stream
    (``fsspec.open("s3://...", "wb")``) is aborted: no object appears. A stream that cannot be aborted, such as an open local file, keeps what it has.

    After an error of the disk or the stream, all that was written is thrown away, and ``write()`` and ``close()`` raise ValueError.

    Args:
        target: a path, or a binary stream to write to.
        overwrite: replace a file that has this path. By default that is an error.

    Raises:
        FileExistsError: the path exists, and ``overwrite`` is not set.
        BlockingIOError: another writer is writing to this path.
        SampleError: from ``write``: no key or no field, a key that was written before, a key or a field that would not read back as it is (also one with
            more than 1 MiB of name), a value that cannot be encoded. Nothing of the sample is written, and the writer goes on.
        ValueError: from ``write`` and ``close``: the writer is closed, or failed before.

    Attributes:
        samples: how many were written.
        size: the bytes written so far, without the end.
    """

    def __init__(self, target: str | os.PathLike[str] | BinaryIO, *, overwrite: bool = False) -> None:
        self._closed = True  # until it is open
        self._process = os.getpid()
        self._failed: BaseException | None = None
        self.samples = self.size = 0
        self._keys: set[str] = set()
        self._digest: Any = None  # the MD5 of what is written, where a ShardWriter wants to know it
        self._name = at_home(os.fspath(target)) if isinstance(target, (str, os.PathLike)) else ""
        self._partial: PartialFile | None = None
        if isinstance(target, (str, os.PathLike)):
            try:
                self._partial = PartialFile(self._name, overwrite=overwrite)
            except (FileExistsError, BlockingIOError) as error:
                error.add_note(f"raised when shard {self._name} was to be written")
                raise
            except OSError as error:
                shown = redact(self._name)
                if error.filename == self._name:
                    error.filename = shown
                error.add_note(f"raised when shard {shown} was to be written: {_cannot_write(self._name)}")
                raise
        else:
            self._stream = target
        self._closed = False

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample after the ones before it."""
        self._write(_Encoded(sample))

    def _write(self, sample: _Encoded) -> None:
        self._check()
        if sample.key in self._keys:
            raise SampleError(f"key {sample.key!r} was written to this shard before: its samples would be read as one. Give each its own key.", key=sample.key)
        self._keys.add(sample.key)
        try:
            for block in [b"".join(sample.blocks)] if sample.size < _JOINED else sample.blocks:
                self._put(block)
        except BaseException as error:
            self._fail(error)  # half a sample may be there, after which nothing could be read
            raise
        self.size += sample.size
        self.samples += 1

    def _put(self, data: bytes) -> None:
        if self._digest is not None:
            self._digest.update(data)
        while data:
            count = (self._partial or self._stream).write(data)
            data = data[count:] if isinstance(count, int) else b""  # a stream without a buffer may take a part

    def _check(self) -> None:
        """Whether it can be written to."""
        if self._failed is not None:
            what = f"shard {self._name} was not written" if self._name else "the shard was not written"
            raise ValueError(
                f"this writer is closed: {what}, for an error came before ({type(self._failed).__name__}: {self._failed}), and its {self.samples} samples "
                "were thrown away. Write them again with another writer."
            ) from self._failed
        if self._closed:
            raise ValueError("this writer is closed: open another one")
        if self._partial is not None and not self._partial.own:
            raise ValueError("this writer belongs to the process that opened it: open one in this process")

    def _fail(self, error: BaseException) -> None:
        self._failed = error
        self.discard()

    def close(self) -> None:
        """Write the end, and give the file its name. Closing again does nothing; after an error it raises."""
        if self._closed and self._failed is None:
            return
        self._check()
        try:
            self._put(bytes(_whole(self.size) - self.size))
            if self._partial is not None:
                self._partial.commit()
            else:
                self._stream.flush()
        except BaseException as error:
            self._fail(error)
            raise
        self._closed = True

    def discard(self) -> None:
        """Throw away what was written, if it is not closed: remove the file, or abort the stream's upload. Nothing can be written after it."""
        if self._closed:
            return
        self._closed = True
        if self._partial is not None:
            self._partial.discard()
        else:
            _abort(self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._process == os.getpid():
            self.discard()  # before the stream itself is collected, which would commit what it has


def _abort(stream: Any) -> None:
    """Make a stream forget what was written, where it can: closing one of fsspec would store half a shard under its name."""
    discard = getattr(stream, "discard", None)  # of fsspec
    if not callable(discard):
        discard = getattr(stream, "terminate", None)  # of google-cloud-storage and smart_open
    if not callable(discard):
        return
    try:
        if not sys.is_finalizing():  # then nothing can be sent any more
            discard()
    except Exception as error:
        logger.warning("the upload of a shard could not be aborted: %s: %s.", type(error).__name__, error)
    with contextlib.suppress(AttributeError):
        stream.closed = True  # what is not uploaded yet must not be, either


def _cannot_write(target: str) -> str:
    """What to do where no file can be made."""
    if "://" in target:
        return "only local files are written; write it to a directory and copy it, or pass an open binary stream"
    return (
        "make its directory first"
        if not os.path.isdir(os.path.dirname(target) or ".")
        else "check the permissions of its directory, and that the disk is not full"
    )


class _Encoded:
    """A sample as it stands in a tar, checked: its ``key``, its ``blocks`` and their ``size``."""

    def __init__(self, sample: Mapping[str, Any]) -> None:
        from wds_pipes.codecs import encode  # imports numpy, which reading tars does without

        key = sample.get("__key__")
        if not isinstance(key, str) or not key:
            raise SampleError(f"a sample needs a '__key__' that is a string, not {key!r}; it has: {', '.join(map(str, sample))}")
        self.key = key
        self.blocks: list[bytes] = []
        for field in sorted(str(name) for name in sample if not str(name).startswith("__")):
            if field not in sample or split_key(f"{key}.{field}") != (key, field) or not field or not _encodable(f"{key}.{field}"):
                raise SampleError(f"sample {key!r} with field {field!r} would not be read back as that: {_mend(key, field)}.", key=key)
            try:
                data = encode(field, sample[field])
            except Exception as error:
                raise SampleError(f"field {field!r} of sample {key!r} cannot be encoded: {error}", key=key) from error
            header = _header(f"{key}.{field}", len(data))
            if len(header) > MAX_HEADER_BYTES:
                raise SampleError(
                    f"sample {key[:40]!r}... with field {field[:40]!r} needs more than 1 MiB of headers for its name, which is not read back. Shorten it.",
                    key=key[:1000],
                )
            self.blocks += [_header(f"{key}.{field}", len(data)), data, bytes(-len(data) & 511)]
        if not self.blocks:
            raise SampleError(f"sample {key!r} has no fields: it would not be in the shard at all. Give it one, or leave it out.", key=key)
        self.size = sum(map(len, self.blocks))


def _whole(size: int) -> int:
    """How large a tar is whose members take ``size`` bytes."""
    return -(-(size + _END) // _RECORD) * _RECORD


def _encodable(name: str) -> bool:
    """Whether a name comes out of a tar as it was put in."""
    try:
        return "\0" not in name and name.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape") == name
    except UnicodeEncodeError:
        return False


def _header(name: str, size: int) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o444, 0
    with contextlib.suppress(ValueError):
        header = info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")
        # A long name that tarfile splits after a slash at its start, which leaves the prefix empty, would lose that slash.
        if header[345] or len(name.encode("utf-8", "surrogateescape")) <= 100:
            return header
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _mend(key: str, field: str) -> str:
    """What to do about a name that does not read back."""
    folder, slash, base = key.rpartition("/")
    if not _encodable(f"{key}.{field}"):
        return "names hold no NUL and nothing that UTF-8 cannot write; leave such characters out"
    if "." in base:
        return f"its key has a dot, which would start the field; write it as {folder + slash + base.replace('.', '_')!r}"
    if field != field.lower():
        return f"fields are in lower case; write {field.lower()!r}"
    if not field or "/" in field:
        return "a field must not be empty or hold '/'; name it by what it is, such as 'txt'"
    if key.startswith("__"):
        return "names in double underscores are kept for metadata; begin the key otherwise"
    return "a key must not end with '/', and a field's name is a string; write them so"


_PLACE = re.compile(r"%0\d+d|%d|\{(:0?\d*d?)?\}")  # not "%20d", which is in names that hold "%20"


class ShardWriter:
    """Write samples into a row of shards, a new one when one is full.

    Use it as a context manager. Each shard appears under its name when it is complete; if the block raises, the unfinished one is thrown away. After an
    error of the disk too: the complete shards stay, ``write()`` and ``close()`` raise, and the samples of the unfinished one are to be written again.

    A process that is killed leaves the unfinished shard as ``.NAME.partial``, which the next writer of that shard writes over.

    Args:
        pattern: the path of the shards with one place for their number: ``"train-%06d.tar"`` or ``"train-{:06d}.tar"``. The directory must exist.
        max_samples: how many samples a shard holds at most.
        max_bytes: how many bytes a shard holds at most, unless its only sample is larger.
        start: the number of the first shard.
        index: the path of an index to write: the samples, bytes and MD5 of each shard, in the form of wids (``index.json``), for ``ShardList(index=...)``.
            It is written anew when a shard is complete; what an index that is there says of other shards stays. One writer at a time may write it.
        on_shard: called once with the path of each complete shard, to upload it for example. What it raises comes out of ``write()`` or ``close()``.
        overwrite: replace shards that are there. By default the first one that is there is an error. Shards of an earlier run with higher numbers than this
            one reaches stay in both cases.

    Raises:
        FileExistsError: a shard exists, and ``overwrite`` is not set: at once for the first, from ``write`` for a later one.
        SampleError: from ``write``, as ``TarWriter`` does. The writer goes on.
        ValueError: when built: the pattern has no place for a number, a limit is not positive, or the index cannot be written or is damaged.

    Attributes:
        shards: the paths of the complete shards, with the number of samples in each.
        samples: how many are in these and in the unfinished one.
    """

    @checks_options
    def __init__(
        self,
        pattern: str | os.PathLike[str],
        *,
        max_samples: int = 100_000,
        max_bytes: int = 1 << 30,
        start: int = 0,
        index: str | os.PathLike[str] | None = None,
        on_shard: Callable[[str], None] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.pattern = at_home(os.fspath(pattern))
        if max_samples < 1 or max_bytes < 1 or start < 0:
            raise ValueError(f"max_samples and max_bytes must be positive and start not negative, not {max_samples}, {max_bytes} and {start}")
        places = list(_PLACE.finditer(self.pattern))
        if len(places) != 1:
            raise ValueError(f"the pattern needs one place for the shard's number, such as 'train-%06d.tar', not {redact(self.pattern)!r}")
        self._place = places[0]
        self.max_samples, self.max_bytes, self.on_shard = max_samples, max_bytes, on_shard
        self.overwrite = overwrite
        self.shards: dict[str, int] = {}
        self._index = None if index is None else check_output(index)
        self._facts = dict(listed_shards([self._index])) if self._index is not None and os.path.exists(self._index) else {}
        self._number = start
        self._writer: TarWriter | None = None
        self._told = True  # whether the index and ``on_shard`` know of the last complete shard
        if not overwrite and os.path.lexists(self.path(start)):
            raise FileExistsError(errno.EEXIST, "there is such a shard: pass overwrite=True to replace it, or another start=", self.path(start))

    @property
    def samples(self) -> int:
        return sum(self.shards.values()) + (self._writer.samples if self._writer is not None and self._writer._failed is None else 0)

    def path(self, number: int) -> str:
        """The path of shard ``number``."""
        place = self._place
        text = place.group() % number if place.group()[0] == "%" else place.group().format(number)
        return self.pattern[: place.start()] + text + self.pattern[place.end() :]

    def write(self, sample: Mapping[str, Any]) -> None:
        """Add a sample to the current shard, or to the next if that one is full."""
        encoded = _Encoded(sample)
        writer = self._writer
        if not self._told:
            self._tell()
        if writer is not None and (writer.samples >= self.max_samples or _whole(writer.size + encoded.size) > self.max_bytes):
            self._finish()
        if self._writer is None:
            self._writer = TarWriter(self.path(self._number), overwrite=self.overwrite)
            if self._index is not None:
                self._writer._digest = md5(usedforsecurity=False)
        self._writer._write(encoded)

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            path = self.path(self._number)
            self.shards[path] = self._writer.samples
            if self._index is not None:
                self._facts[path] = ShardFacts(self._writer.samples, _whole(self._writer.size), self._writer._digest.hexdigest())
            self._writer, self._told = None, False
            self._number += 1
        if not self._told:
            self._tell()

    def _tell(self) -> None:
        """Enter the last complete shard in the index, and call ``on_shard``; an index that could not be written is tried again the next time."""
        if self._index is not None:
            write_index(self._index, self._facts)
        self._told = True
        if self.on_shard is not None:
            self.on_shard(self.path(self._number - 1))

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
