"""The file of a ledger: after each step of a run, the digest of the samples of the epoch so far.

Rules:
1. Each rank appends to a file of its own. One rank of one writes to the path itself, rank 3 of 8 to
   ``PATH.rank-0003-of-0008``.
2. A file is a head of 40 bytes and records of 40 bytes, little-endian: CRC-32 of the rest of the
   record, epoch, where the epoch was divided (modulo 2**32), batches of this rank since then (32
   bits each), samples of the epoch that this rank has had (64 bits), their digest (128 bits).
3. A record is written in one call, before the batch is returned. So a crash can leave a record of a
   batch that was not trained on, or a part of a record: the next run cuts that off. Steps that are
   repeated after a crash are appended again. The last record of a step counts.
4. A digest is of the whole epoch so far, not of one step, so that a lost record does no harm.
"""

from __future__ import annotations

import errno
import glob
import os
import re
import struct
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from wds_pipes.core.digest import NOTHING, Digest, add
from wds_pipes.core.state import are_all
from wds_pipes.core.words import some
from wds_pipes.errors import StateError
from wds_pipes.io.open import is_remote
from wds_pipes.io.urls import at_home

if TYPE_CHECKING:
    from wds_pipes.loader.ranks import Rank

_RECORD = struct.Struct("<IIIIQ16s")
_HEAD = b"wds_pipes ledger 1\n".ljust(_RECORD.size, b"\0")
_BITS = (1 << 32) - 1
_RANK = re.compile(r"\.rank-([0-9]{4,})-of-([0-9]{4,})")

LedgerStep = tuple[int, int, int]  # the epoch, where it was divided last, the step of each rank in it


def check_path(ledger: object) -> str | None:
    """Return the path of a ledger from the option of PipeLoader; None: it is a bool.

    Raises:
        TypeError, ValueError: it is neither a bool nor a local path.
    """
    if isinstance(ledger, bool):
        return None
    if not isinstance(ledger, (str, os.PathLike)) or not os.fspath(ledger):
        raise TypeError(f"ledger must be True, False or the path of a file, not {ledger!r:.80}")
    path = at_home(os.fspath(ledger))
    if is_remote(path):
        raise ValueError(f"a ledger is a local file, to which each step appends, not {path!r:.200}: copy it afterwards")
    return path


class LedgerFile:
    """The file to which this rank appends. It is opened when the first record is written.

    Args:
        path: the path of the ledger.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_file": None}

    def write(self, rank: Rank, step: LedgerStep, samples: int, digest: Digest) -> None:
        """Append a record: what this rank has had of an epoch after a step.

        Raises:
            OSError: it could not be written, or only in part.
        """
        file = self._file = self._file or self._open(rank)
        epoch, start, batches = (number & _BITS for number in step)
        record = _RECORD.pack(0, epoch, start, batches, samples, digest.to_bytes(16, "little"))
        try:
            whole = file.write(struct.pack("<I", zlib.crc32(record[4:])) + record[4:]) == _RECORD.size
        except OSError:
            self.close()
            raise
        if not whole:
            self.close()  # the next record opens it again, which cuts the part off
            raise OSError(errno.ENOSPC, f"a record of the ledger {file.name} could not be written: is the disk full?")

    def _open(self, rank: Rank) -> BinaryIO:
        path = self._path if rank.of == 1 else f"{self._path}.rank-{rank.number:04d}-of-{rank.of:04d}"
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        file = open(path, "ab", buffering=0)
        size = file.tell()
        if size and _head_of(path) != _HEAD:
            file.close()
            raise ValueError(f"{path} is not a ledger: name another file in PipeLoader(ledger=...)")
        if size % _RECORD.size:
            file.truncate(size - size % _RECORD.size)
        if not size:
            file.write(_HEAD)
        return file

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class Record(NamedTuple):
    """What all ranks together have had of an epoch after a step.

    Attributes:
        epoch: the epoch.
        samples: how many samples of it.
        step: the step of each rank, as in its state.
        digest: of these samples.
    """

    epoch: int
    samples: int
    step: int
    digest: Digest


class SavedLedger(NamedTuple):
    """A ledger that was read.

    Attributes:
        records: by their epoch and number of samples.
        changed: the first record of a step that a rank repeated with other samples than before.
    """

    records: dict[tuple[int, int], Record]
    changed: Record | None


def is_ledger(path: str) -> bool:
    """Return whether there is a ledger at a path."""
    return any(_head_of(each) == _HEAD for files in _files_of(path).values() for each in files.values())


def read_ledger(path: str) -> SavedLedger:
    """Return what all ranks of a run together have written.

    Raises:
        StateError: the file of a rank is missing, or is not a ledger.
    """
    found: dict[tuple[int, int], Record] = {}
    changes: list[Record] = []
    worlds = _files_of(path)
    # where runs on several numbers of ranks wrote the same number of samples, the last one counts
    for world in sorted(worlds, key=lambda of: max(map(os.path.getmtime, worlds[of].values()))):
        files = worlds[world]
        if not are_all(files, range(world)):
            missing = some(rank for rank in range(world) if rank not in files)
            raise StateError(f"of the ledger {path} the file of rank {missing} of {world} is missing: put it beside")
        together: dict[LedgerStep, tuple[int, int, Digest]] = {}  # of how many ranks, and their sums
        for file in files.values():
            rank: dict[LedgerStep, tuple[int, Digest]] = {}
            for step, samples, digest in _records_of(file):
                if rank.get(step, (samples, digest)) != (samples, digest):
                    changes.append(Record(step[0], samples, step[2], digest))
                rank[step] = samples, digest
            for step, (samples, digest) in rank.items():
                ranks, before, others = together.get(step, (0, 0, NOTHING))
                together[step] = ranks + 1, before + samples, add([others, digest])
        for (epoch, _, batches), (ranks, samples, digest) in together.items():
            if ranks == world:  # else another rank ended, or was killed, before it
                found[epoch, samples] = Record(epoch, samples, batches, digest)
    return SavedLedger(found, min(changes, default=None))


def _files_of(path: str) -> dict[int, dict[int, str]]:
    """Return the files of a ledger: of each number of ranks, those of the ranks."""
    found: dict[int, dict[int, str]] = {1: {0: path}} if os.path.isfile(path) else {}
    for name in glob.glob(f"{glob.escape(path)}.rank-*"):
        if (match := _RANK.fullmatch(name[len(path) :])) is not None:
            found.setdefault(int(match[2]), {})[int(match[1])] = name
    return found


def _head_of(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_RECORD.size)


def _records_of(path: str) -> Iterator[tuple[LedgerStep, int, Digest]]:
    """Yield the whole records of a file, in their order."""
    with open(path, "rb") as file:
        if file.read(_RECORD.size) != _HEAD:
            raise StateError(f"{path} is not the ledger of a PipeLoader, or it is damaged")
        while len(data := file.read(_RECORD.size)) == _RECORD.size:
            crc, epoch, start, step, samples, digest = _RECORD.unpack(data)
            if crc == zlib.crc32(data[4:]):
                yield (epoch, start, step), samples, int.from_bytes(digest, "little")
