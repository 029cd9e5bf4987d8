"""Write samples into tar shards. The same samples always produce the same bytes.

Rules:
1. Members have uid and gid 0, mode 0444 and mtime 0, and the fields of a sample are sorted. So the
   bytes do not depend on the machine or the time.
2. The header of a member is in ustar format if the name fits; otherwise in pax format: see
   ``Encoded``.
3. A shard gets its name only when it is complete: it is written to another name in the same
   directory and renamed. ShardWriter never leaves a shard without samples.
4. A file contains what its name promises: ``x.tar.gz`` is compressed. A name that promises
   something else is refused before anything is written.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import threading
import warnings
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

from wds_pipes.core.options import check_count, checks_options
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, ShardError, ShardWarning, StateError
from wds_pipes.io.compression import Compressor, compressor, kind_of_name
from wds_pipes.io.outputs import OutputFile, abort, exists, open_output, target_of
from wds_pipes.io.threads import DaemonThreads
from wds_pipes.io.urls import redact
from wds_pipes.tar.encoded import Encoded, encoders
from wds_pipes.tar.index import (
    KEYS,
    OFFSETS,
    Entry,
    ShardFacts,
    check_output,
    make_opener,
    name_in,
    read_entries,
    remove_beside,
    write_index,
    write_offsets,
)
from wds_pipes.tar.indexing import scan
from wds_pipes.tar.stored import Stored

if TYPE_CHECKING:
    from wds_pipes.codecs.codec import Codec, Encoder

if TYPE_CHECKING:
    from wds_pipes.codecs.codec import Codec, Encoder

_END = 1024  # bytes of zeros at the end
_RECORD = 10240  # the size of a tar file is a multiple of this
_AT_ONCE = 1 << 20  # bytes that are collected before they are written to a file


class TarWriter:
    """Write samples into one tar.

    A sample is a dict with ``"__key__"`` and its fields. A field of bytes is written unchanged;
    other values are encoded by the extension of the field, as ``decode_by_ext`` decodes it: text,
    integers (also as str), JSON, csv, YAML, npy, npz, tenbin, MessagePack, CBOR, safetensors, what
    torch.save writes of tensors and plain objects, and images from PIL, arrays or tensors, of uint8
    or of floats from 0 to 1. Audio is ``(samples, sample_rate)`` and video ``(frames,
    frames_per_second)``; an ogg or opus differs each time that it is encoded. A str in a ``json``,
    ``jsonl``, ``csv`` or ``yaml`` field is written as it is, since it is the text of that format;
    JSON that does not parse is refused. For a JSON string pass ``json.dumps(text)``. A field such
    as ``txt.gz`` takes bytes that are compressed already, or another value, which is encoded and
    then compressed. Fields are in lower case. Other names that begin and end with two underscores
    are metadata, and left out; a name that only begins with them is a field.

    The name of a file decides about compression: ``.tar.gz`` or ``.tgz``, ``.tar.bz2``,
    ``.tar.xz``, ``.tar.zst``. The bytes of a compressed shard also depend on the version of the
    compression library. A stream is written uncompressed.

    Use it as a context manager: the file gets its name if the block ends without an error, and is
    discarded if the block raises. Until then its name is ``.NAME.partial``, in the same directory.
    The next writer of the same file overwrites what a killed process left there.

    An object in a store (``s3://``, ``gs://``, ``az://`` and what else fsspec can write to) is sent
    in parts, and appears when the block ends. If the block raises, or writing fails, the upload is
    aborted. A process that is killed leaves parts that have no name, which a rule of the bucket
    for incomplete uploads removes.

    A stream is not closed, so use the writer inside the stream's own block. If the writer's block
    raises, or writing fails, the upload of an fsspec stream (``fsspec.open("s3://...", "wb")``) is
    aborted: no object appears. A stream that cannot be aborted, such as an open local file, keeps
    the bytes written so far.

    A file is written in blocks of about 1 MiB, so that an error of the disk may come with a later
    sample, or from ``close()``. After an error of the disk or the stream, everything that was
    written is discarded, and ``write()`` and ``close()`` raise ValueError.

    Args:
        target: the path or the URL of a file, or a binary stream to write to. In a path, ``~`` and
            environment variables, ``${NAME}``, are replaced.
        overwrite: replace an existing file at this path. By default that is an error.
        codecs: functions that encode a value to bytes, or codecs, by extension, as in
            ``{"seg.png": encode_mask, "dcm": wp.Codec(...)}``. They take precedence over the table.
            A field of bytes is written unchanged all the same.
        storage_options: how to reach the storage: a dict of options for fsspec.

    Raises:
        FileExistsError: the path exists, and ``overwrite`` is not set.
        BlockingIOError: another writer is writing to this path.
        SampleError: from ``write``: the sample has no key or no field; its key was written before;
            a key or a field would not be read back unchanged, or needs more than 1 MiB of headers
            for its name; a value cannot be encoded. Nothing of the sample is written, and the
            writer can still be used.
        ShardError: the store cannot be written to.
        ValueError: from the constructor: the target is a command or on a web server, or its name
            promises a compression that is not read. From ``write`` and ``close``: the writer is
            closed, or failed before.
        ModuleNotFoundError: the name ends in ``.zst``, and the library of zstd is not installed.

    Attributes:
        samples: the number of samples written.
        size: the bytes of the tar so far, before compression and without the zeros at the end.
        stored: the bytes that the target got, after compression.
    """

    @checks_options
    def __init__(
        self,
        target: str | os.PathLike[str] | BinaryIO,
        *,
        overwrite: bool = False,
        codecs: Mapping[str, Encoder | Codec] | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self._codecs = encoders(codecs)
        self._options = storage_options
        self._closed = True  # until the target is open
        self._process = os.getpid()
        self._failed: BaseException | None = None
        self.samples = self.size = 0
        self.stored = 0  # bytes written to the target
        self._blocks: list[bytes] = []  # that are not written yet
        self._waiting = 0  # the bytes in them
        self._starts: dict[str, int] = {}  # where each sample begins, by its key
        # Set by the caller: the MD5 of the bytes written; whether to write where each sample
        # begins beside the shard. These files are there when the shard appears.
        self._digest: Md5 | None = None
        self._offsets = False
        self._name = ""
        self._compressor: Compressor | None = None
        self._partial: OutputFile | None = None
        # A local stream of fsspec is also a PathLike.
        if isinstance(target, (str, os.PathLike)) and not isinstance(target, io.IOBase):
            self._name = target_of(target)
            kind = kind_of_name(self._name)
            self._compressor = compressor(kind) if kind else None
            try:
                self._partial = open_output(self._name, overwrite=overwrite, storage_options=storage_options)
            except OSError as error:
                if isinstance(error, ShardError):  # of a store
                    raise
                note = f"raised when shard {redact(self._name)} was to be written"
                if not isinstance(error, (FileExistsError, BlockingIOError)):
                    there = os.path.isdir(os.path.dirname(self._name) or ".")
                    mend = "check the permissions of its directory, and that the disk is not full"
                    mend = mend if there else "make its directory first"
                    note += f": {mend}"
                    vars(error).update(mend=mend)
                error.add_note(note)
                raise
        elif callable(getattr(target, "write", None)):
            self._stream = target
        else:
            raise TypeError(f"a shard is written to a path or an open binary stream, not to {target!r:.80}")
        self._closed = False

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append a sample."""
        self._write(Encoded(sample, self._codecs))

    def _write(self, sample: Encoded | Stored) -> None:
        self._check()
        if sample.key in self._starts:
            raise SampleError(
                f"key {sample.key!r} was written to this shard before: its samples would be read "
                "as one. Give each its own key.",
                key=sample.key,
            )
        self._starts[sample.key], size = self.size, sample.size
        try:
            self._put(sample.blocks, size)
        except BaseException as error:
            self._fail(error)  # half a sample may be written: a reader could read nothing after it
            raise
        self.size += size
        self.samples += 1

    def _put(self, blocks: list[bytes], size: int) -> None:
        """Append bytes to the tar. A stream gets them now: its owner may look at it."""
        self._blocks += blocks
        self._waiting += size
        if self._waiting >= _AT_ONCE or self._partial is None:
            self._flush()

    def _flush(self) -> None:
        """Write the bytes that wait: together, unless one sample has nearly all of them."""
        blocks, size = self._blocks, self._waiting
        self._blocks, self._waiting = [], 0
        together = size < 2 * _AT_ONCE
        if together and self._compressor is None and self._digest is None and self._partial is not None:
            self.stored += self._partial.write(*blocks)
            return
        for data in [b"".join(blocks)] if together else blocks:
            self._store(data if self._compressor is None else self._compressor.compress(data))

    def _store(self, data: bytes) -> None:
        self.stored += len(data)
        if self._digest is not None:
            self._digest.update(data)
        while data:
            count = (self._partial or self._stream).write(data)
            # An unbuffered stream may write only a part.
            data = data[count:] if isinstance(count, int) else b""

    def _check(self) -> None:
        """Raise ValueError if this writer cannot be written to."""
        if self._failed is not None:
            what = f"shard {redact(self._name)} was not written" if self._name else "the shard was not written"
            raise ValueError(
                f"this writer is closed: {what}, for an error came before "
                f"({type(self._failed).__name__}: {self._failed}), and its {self.samples} "
                "samples "
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
        """Write the end of the archive, and give the file its name.

        Closing again does nothing; after an error it raises ValueError.
        """
        if self._closed and self._failed is None:
            return
        self._check()
        try:
            rest = whole(self.size) - self.size
            self._put([bytes(rest)], rest)
            self._flush()
            if self._compressor is not None:
                self._store(self._compressor.flush())
            if self._partial is not None:
                if self._offsets:
                    starts = [*self._starts.values(), self.size]
                    write_offsets(self._name, self._starts, starts, self._options)
                remove_beside(self._name, self._options, besides=(KEYS, OFFSETS) if self._offsets else ())
                self._partial.commit()
            else:
                self._stream.flush()
        except BaseException as error:
            self._fail(error)
            raise
        self._closed = True

    def _facts(self) -> ShardFacts:
        """What is known of the shard, which is closed."""
        return ShardFacts(self.samples, self.stored, None if self._digest is None else self._digest.hexdigest())

    def discard(self) -> None:
        """Discard what was written: remove the file, or abort the stream's upload.

        Nothing can be written afterwards. On a closed writer this does nothing.
        """
        if self._closed:
            return
        self._closed = True
        if self._partial is not None:
            self._partial.discard()
        else:
            abort(self._stream)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and self._process == os.getpid():
            self.discard()  # before the stream itself is collected, which would commit its bytes
            if self.samples:
                warnings.warn(
                    f"the writer of {redact(self._name) or 'a stream'} was not closed, and threw away "
                    f"{plural(self.samples, 'sample')}: use it in a with block, or call close()",
                    ShardWarning,
                    stacklevel=2,
                )


def whole(size: int) -> int:
    """The size of a tar whose members have ``size`` bytes."""
    return -(-(size + _END) // _RECORD) * _RECORD


def most_members(max_bytes: int) -> int:
    """The bytes that the members of a tar of at most ``max_bytes`` may have; it may be negative."""
    return max_bytes // _RECORD * _RECORD - _END


_MOST = 4  # blocks that wait


class Md5:
    """An MD5 that is computed while the next bytes are read and written, which takes about as long.

    It is meant for large blocks: for each, the threads wait for the GIL.
    """

    def __init__(self) -> None:
        self._md5 = hashlib.md5(usedforsecurity=False)
        self._threads = DaemonThreads(1)
        self._calls: deque[Future[Any]] = deque()

    def update(self, data: bytes) -> None:
        """Add bytes at the end."""
        if len(self._calls) == _MOST:
            self._calls.popleft().result()
        self._calls.append(self._threads.submit(self._md5.update, data))

    def hexdigest(self) -> str:
        """The MD5 of all bytes so far, as 32 hexadecimal digits."""
        while self._calls:
            self._calls.popleft().result()
        return self._md5.hexdigest()


def write_shard(
    url: str,
    samples: Iterable[Mapping[str, Any] | Encoded | Stored],
    *,
    md5: bool = True,
    storage_options: dict[str, Any] | None = None,
) -> ShardFacts:
    """Write a shard, and where each of its samples begins; replace what is there. The shard
    appears when all of it is there.

    Args:
        url: the path or URL of an uncompressed shard.
        samples: as ``TarWriter`` writes them, or as they are in a tar that it writes.
        md5: compute the MD5.
        storage_options: how to reach the storage: a dict of options for fsspec.

    Returns:
        The number of samples, the size and the MD5 (None: it was not computed).

    Raises:
        SampleError: a sample cannot be written as it is.
        OSError: the shard cannot be written; a ShardError for a store.
    """
    with TarWriter(url, overwrite=True, storage_options=storage_options) as writer:
        writer._offsets, writer._digest = True, Md5() if md5 else None
        for sample in samples:
            writer._write(sample if isinstance(sample, (Encoded, Stored)) else Encoded(sample, None))
    return writer._facts()


# Not "%20d": a name may contain "%20" (a quoted space).
_PLACE = re.compile(r"%0\d+d|%d|\{(:0?\d*d?)?\}")


class ShardWriter:
    """Write samples into a series of shards: when a shard is full, the next one is started.

    Use it as a context manager. Each shard appears under its name when it is complete. If the block
    raises, the unfinished shard is discarded. The same happens after an error of the disk: the
    complete shards stay, ``write()`` and ``close()`` raise, and the samples of the unfinished shard
    must be written again.

    A process that is killed leaves the unfinished shard as ``.NAME.partial``; the next writer of
    that shard overwrites it. Run the same program again with ``resume=True``: it goes on at the
    first shard that is not complete.

    Args:
        pattern: the path or URL of the shards with one place for their number:
            ``"train-%06d.tar"`` or ``"s3://bucket/train-{:06d}.tar"``. A local directory must
            exist. Names such as ``train-%06d.tar.gz`` are written compressed, as ``TarWriter``
            does.
        max_samples: the maximum number of samples in a shard.
        max_bytes: the maximum size of a shard in bytes, with headers and padding. A shard with a
            single sample may be larger. Of a compressed shard the bytes before compression count,
            so its file is usually smaller.
        start: the number of the first shard. To append to shards that are there, pass the number
            after the last of them.
        index: the path of an index to write: the samples, bytes and MD5 of each shard, in the wids
            format (``index.json``), for ``ShardList(index=...)``. It is rewritten each time a shard
            is complete; entries of an existing index for other shards stay. Only one writer at a
            time may write it.
        offsets: also write where each sample begins, to ``X.tar.idx`` and ``X.tar.keys`` beside
            each shard ``X.tar``, for ``IndexedShards``. Compressed shards have no offsets.
        on_shard: called once with the path of each complete shard, for example to upload it. Its
            exceptions are raised by ``write()`` or ``close()``.
        overwrite: replace existing shards. By default an existing shard is an error. In both cases,
            shards of an earlier run with higher numbers than this run reaches stay.
        resume: keep the complete shards of an earlier run. Write the same samples again from the
            first on: those that these shards have are compared with them by their keys, and are
            neither encoded nor written. Each of these shards is read once, and its index and
            offsets are written again.
        codecs: encoders by extension, as for ``TarWriter``.
        storage_options: how to reach the storage: a dict of options for fsspec.

    Raises:
        FileExistsError: a shard exists, and ``overwrite`` is not set: at once for the first shard,
            from ``write`` for a later one.
        SampleError: from ``write``, as for ``TarWriter``. The writer can still be used.
        StateError: from ``write`` and ``close``, with ``resume``: the complete shards have other
            samples.
        ShardError: the store cannot be written to; with ``resume``, a shard is damaged.
        ValueError: from the constructor: the pattern has no place for a number, is a command or on
            a web server, or promises a compression that is not read; a limit is not positive; the
            index cannot be written or is damaged; offsets of compressed shards; ``overwrite`` and
            ``resume``.
        ModuleNotFoundError: the pattern ends in ``.zst``, and the library of zstd is not installed.

    Attributes:
        shards: the paths of the complete shards, with the number of samples in each.
        samples: the number of samples in these shards and in the unfinished one.
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
        offsets: bool = False,
        on_shard: Callable[[str], None] | None = None,
        overwrite: bool = False,
        resume: bool = False,
        codecs: Mapping[str, Encoder | Codec] | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        self._codecs, self._options = encoders(codecs), storage_options
        self.pattern = target_of(pattern)
        if overwrite and resume:
            raise ValueError("overwrite=True replaces the shards that resume=True keeps: pass one of them")
        self.max_samples, self.max_bytes = check_count("max_samples", max_samples), check_count("max_bytes", max_bytes)
        self._number = check_count("start", start, least=0)
        if on_shard is not None and not callable(on_shard):
            raise TypeError(f"on_shard is a function of the path of a shard, not {on_shard!r:.80}")
        places = list(_PLACE.finditer(self.pattern))
        if len(places) != 1:
            raise ValueError(
                "the pattern needs one place for the shard's number, such as 'train-%06d.tar', "
                f"not {redact(self.pattern)!r}"
            )
        self._place = places[0]
        if kind := kind_of_name(self.pattern):
            if offsets:
                raise ValueError(f"only uncompressed shards have offsets: write .tar, not {redact(self.pattern)!r}")
            compressor(kind)  # an error now, if its library is missing
        self._offsets = bool(offsets)
        self.on_shard, self.overwrite = on_shard, overwrite
        self.shards: dict[str, int] = {}
        self._index = None if index is None else check_output(index, remote=True)
        # what the index says of each shard, by its name there, with its URL, and how it found
        # the samples
        self._entries: dict[str, tuple[str, Entry]] = {}
        self._rules: dict[str, str] = {}
        if self._index is not None and exists(self._index, storage_options):
            earlier, self._rules = read_entries(self._index, storage_options)
            for name, (url, version, entry) in earlier.items():
                self._entries[name] = url, entry._replace(version=version or None)
        self._writer: TarWriter | None = None
        # Whether the last complete shard was reported to the index and to ``on_shard``.
        self._told = True
        # Of a complete shard found: the keys that have not come again, and how many it has.
        self._resume, self._kept, self._count = bool(resume), deque[str](), 0
        if not (overwrite or resume) and exists(self.path(start), storage_options):
            raise FileExistsError(
                errno.EEXIST,
                f"there is such a shard: pass start={self._free()} to append new samples after the shards that are "
                "there, resume=True to go on with a run that was interrupted, which writes the same samples again, "
                "or overwrite=True to replace the shards",
                redact(self.path(start)),
            )

    @property
    def samples(self) -> int:
        return sum(self.shards.values()) + (
            self._writer.samples if self._writer is not None and self._writer._failed is None else 0
        )

    def path(self, number: int) -> str:
        """The path of shard ``number``."""
        place = self._place
        text = place.group() % number if place.group()[0] == "%" else place.group().format(number)
        return self.pattern[: place.start()] + text + self.pattern[place.end() :]

    def _free(self) -> int:
        """Return the number after those of the shards that are there; the current one is there."""

        def is_free(number: int) -> bool:
            return not exists(self.path(number), self._options)

        step = 1
        while not is_free(self._number + step):
            step *= 2
        return bisect_left(range(self._number + step), True, lo=self._number + step // 2 + 1, key=is_free)

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append a sample to the current shard, or to the next one if the current one is full."""
        if self._resume and self._has(sample):
            return
        encoded = self._encode(sample)
        self._tell()
        if self._is_full(encoded):
            self._finish()
        self._append(encoded)

    def _encode(self, sample: Mapping[str, Any]) -> Encoded:
        return Encoded(sample, self._codecs)

    def _is_full(self, encoded: Encoded) -> bool:
        """Whether the current shard must be finished before this sample."""
        writer = self._writer
        return writer is not None and (
            writer.samples >= self.max_samples or whole(writer.size + encoded.size) > self.max_bytes
        )

    def _append(self, encoded: Encoded) -> None:
        """Append a sample to the current shard, or begin the next one with it."""
        if self._writer is None:
            path = self.path(self._number)
            self._writer = TarWriter(path, overwrite=self.overwrite, storage_options=self._options)
            self._writer._digest = None if self._index is None else Md5()
        self._writer._write(encoded)

    def _has(self, sample: Mapping[str, Any]) -> bool:
        """Whether a complete shard of an earlier run has this sample."""
        self._tell()
        self._find()
        if not self._kept:
            self._resume = False
            return False
        key, path = self._kept[0], self.path(self._number)
        own = sample.get("__key__") if isinstance(sample, Mapping) else sample
        if own != key:
            raise StateError(
                f"shard {redact(path)} is of another run: its sample {self._count - len(self._kept)} has the key "
                f"{key!r}, and this sample has {own!r:.80}. Write the same samples in the same order, or pass "
                f"start={self._free()} in place of resume=True to append others, or overwrite=True to replace them"
            )
        self._kept.popleft()
        if not self._kept:
            self.shards[path] = self._count
            self._told = False  # told before the next sample, as of a shard that was written
            self._number += 1
        return True

    def _find(self) -> None:
        """Read the next shard, if there is one, and all samples of the one before came again."""
        path = self.path(self._number)
        if self._kept or not exists(path, self._options):
            return
        found = scan(path, make_opener(self._options), threading.Event())
        self._kept, self._count = deque(found.keys), len(found.keys)
        if not self._kept:
            raise StateError(f"shard {redact(path)} has no samples, so it is of another run: remove it")
        if self._index is not None:
            self._entries[name_in(self._index, path)] = path, Entry(found.facts)
        if self._offsets:
            write_offsets(path, found.keys, [*found.starts, found.end], self._options)

    def _finish(self) -> None:
        if self._writer is not None:
            self._writer.close()
            path = self.path(self._number)
            self.shards[path] = self._writer.samples
            if self._index is not None:
                self._entries[name_in(self._index, path)] = path, Entry(self._writer._facts())
            if self._offsets:  # after an error the next call tries again
                starts = self._writer._starts
                write_offsets(path, starts, [*starts.values(), self._writer.size], self._options)
            self._writer, self._told = None, False
            self._number += 1
        self._tell()

    def _tell(self) -> None:
        """Add the last complete shard to the index, and call ``on_shard``, unless that was done.

        If the index cannot be written, this is tried again at the next call of ``write`` or
        ``close``.
        """
        if self._told:
            return
        if self._index is not None:
            write_index(self._index, dict(self._entries.values()), self._rules, self._options)
        self._told = True
        if self.on_shard is not None:
            self.on_shard(self.path(self._number - 1))

    def close(self) -> None:
        """Finish the last shard."""
        if self._resume:
            self._tell()
            self._find()
            if self._kept:
                raise StateError(
                    f"shard {redact(self.path(self._number))} is of another run: it has {self._count} samples, and "
                    f"{len(self._kept)} of them were not written again. Write the same samples in the same order, or "
                    "remove the shards from this one on"
                )
        self._finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif self._writer is not None:
            self._writer.discard()
            self._writer = None
