"""The indexes beside a shard: where each of its samples begins, and which key it has.

``X.tar.idx`` beside ``X.tar`` holds n + 1 unsigned 64-bit little-endian integers: the byte of the
first header of each sample, and the end of the last one. Megatron-Energon has the same file.
``X.tar.keys`` finds a sample by its key: n hashes (unsigned, 64 bits, sorted), then the number of
the sample of each (unsigned, 32 bits), both little-endian. Different keys may have one hash, so the
key in the tar decides.

Rules:
1. Only uncompressed shards have offsets.
2. A shard may have been written again after its index. So nothing here is trusted: sizes are
   checked before memory is allocated, offsets before they are used, and what stands at an offset
   is checked when it is read. The header after a sample must be of another sample, and the sample
   before it must be whole and end where it begins, which takes reading the headers of that one. A
   sample of a remote shard that is read by itself is not compared with the one before it, which
   would double the bytes: there, an offset of a second member shows only when both are read.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Container, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from wds_pipes.core.order import hash_text
from wds_pipes.errors import ShardError
from wds_pipes.io.outputs import read_small, remove, write_small
from wds_pipes.io.urls import redact
from wds_pipes.tar.headers import BLOCK
from wds_pipes.tar.index import dali_name, folder_of, path_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Keys = tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint32]]  # of a shard: sorted hashes, numbers of samples

# Functions import numpy, which reading and writing tars does not need.

OFFSETS, KEYS = ".idx", ".keys"  # what the names of these files add to that of the shard
MEND = "Make it with: wds-pipes index SHARDS --offsets"


class MissingIndexError(ShardError):
    """A shard has no index of offsets or of keys."""


def beside(url: str, ending: str, folder: str | None = None) -> str:
    """Return the URL of the file of a shard that ends in ``OFFSETS`` or ``KEYS``: beside the shard,
    or in a folder, under the base name of the shard.
    """
    path = path_of(url)
    if folder is not None:
        path = os.path.join(folder, path.rpartition("/")[2])
    return path + ending


def pack_offsets(offsets: Sequence[int]) -> bytes:
    """Return the content of an index of offsets."""
    import numpy as np

    return np.array(offsets, "<u8").tobytes()


def pack_keys(keys: Collection[str]) -> bytes:
    """Return the content of an index of keys: those of the samples, in their order."""
    import numpy as np

    hashes = np.fromiter(map(hash_text, keys), "<u8", len(keys))
    order = np.argsort(hashes, kind="stable")
    return bytes(hashes[order].tobytes() + order.astype("<u4").tobytes())


def unpack_offsets(data: bytes, url: str) -> npt.NDArray[np.uint64]:
    """Return the offsets in an index: uint64, shape (samples + 1,). ``url``: where it is, for
    messages.

    Raises:
        MissingIndexError: it is an index of DALI.
        ShardError: it is damaged.
    """
    import numpy as np

    if data.startswith(b"v1."):  # not a multiple of 512
        raise MissingIndexError(str(unusable(url, "it is of DALI, which has other offsets")), url=redact(url))
    if not data or len(data) % 8:
        raise unusable(url, f"it has {len(data)} bytes, not 8 for each sample and 8 more, so it is damaged")
    offsets = np.frombuffer(data, "<u8")
    if (offsets % BLOCK).any() or (offsets[1:] <= offsets[:-1]).any() or offsets[-1] >> np.uint64(62):
        raise unusable(url, f"its numbers are not offsets of samples, which rise in steps of {BLOCK} bytes")
    return offsets


def unpack_keys(data: bytes, samples: int, url: str) -> Keys:
    """Return the hashes in an index of keys and the numbers of their samples, each of shape
    (samples,).

    Raises:
        ShardError: it is damaged, or of another number of samples.
    """
    import numpy as np

    if len(data) != 12 * samples:
        raise unusable(url, f"it has {len(data)} bytes, not 12 for each of {samples} samples")
    hashes, numbers = np.frombuffer(data, "<u8", samples), np.frombuffer(data, "<u4", samples, 8 * samples)
    if (hashes[1:] < hashes[:-1]).any() or (np.sort(numbers) != np.arange(samples)).any():
        raise unusable(url, "its hashes are not sorted, or a sample is not there once")
    return hashes, numbers


def unusable(url: str, what: str, *, shard: str | None = None) -> ShardError:
    """Return the error for an index that cannot be used."""
    of = "" if shard is None else f" of shard {redact(shard)}"
    return ShardError(f"index {redact(url)}{of} cannot be used: {what.rstrip('.')}. {MEND}", url=redact(shard or url))


def stale_offset(url: str, offset: int) -> ShardError:
    """Return the error for a shard of which no sample starts where its index of offsets says."""
    shown = redact(url)
    return ShardError(
        f"shard {shown}, byte {offset}: by the index of offsets a sample starts there, and none does: the shard is "
        f"another than the indexed one. {MEND}",
        url=shown,
        offset=offset,
    )


def stale_keys(url: str, key: str, folder: str | None = None) -> ShardError:
    """Return the error for a shard with a sample whose key its index of keys, beside it or in a
    folder, does not have.
    """
    what = f"the shard is another than the indexed one: it has a sample {key!r}, which the index does not have there"
    return unusable(beside(url, KEYS, folder), what, shard=url)


def write_offsets(
    path: str, keys: Collection[str], offsets: Sequence[int], storage_options: dict[str, Any] | None = None
) -> None:
    """Write the indexes of keys and of offsets of a shard; each appears when it is complete."""
    write_small(path + KEYS, pack_keys(keys), storage_options)
    write_small(path + OFFSETS, pack_offsets(offsets), storage_options)


def remove_beside(path: str, storage_options: dict[str, Any] | None = None, *, besides: Container[str] = ()) -> None:
    """Remove the files of a shard that is about to be replaced, besides those with some endings."""
    for ending in (OFFSETS, KEYS):
        if ending not in besides:
            remove(path + ending, storage_options)
    dali = folder_of(path) + dali_name(path)
    with contextlib.suppress(IsADirectoryError):
        if read_small(dali, storage_options, most=3) == b"v1.":
            remove(dali, storage_options)


# The index of DALI, a text, ``X.idx`` for ``X.tar``, version 1.2. The first line is
# ``v1.2 SAMPLES``. Each other line is a sample: for each of its files the extension, the byte where
# the data begins, the size, and the name, all separated by blanks. The samples are those of DALI:
# other than in ``group_by_key``, a file without a dot in its name is a sample too, and so are those
# under ``__name__/``.
#
# DALI's own program, wds2idx, writes the same bytes, with two exceptions. Its offsets of long GNU
# names are wrong where it calls GNU tar. Files of v7 tars are missing where it does not.

_BLANK = re.compile(r"[ \t\n\v\f\r]")  # where DALI ends a word


class Component(NamedTuple):
    """A file of a shard: its name, where its data begins, and the size; ``plain``: these bytes are
    the file.
    """

    name: str
    start: int
    size: int
    plain: bool = True


def pack_dali(components: Sequence[Component], url: str) -> bytes:
    """Return an index of DALI with the files of a shard.

    Raises:
        ShardError: DALI cannot open such a shard: a name contains a blank or ends in a dot, a
            member is sparse, or there are no samples.
    """
    shown, lines, key = redact(url), list[list[str]](), ""
    for name, start, size, plain in components:
        dot = name.find(".", name.rfind("/") + 1)  # as DALI does, also where there is none
        stem, extension = name[:dot], name[dot + 1 :]
        if not stem or stem[-1] == "/":
            continue
        if not plain or not extension or _BLANK.search(name):
            what = (
                "is sparse or contiguous"
                if not plain
                else "has no extension after its dot"
                if not extension
                else "has a blank in its name"
            )
            raise ShardError(
                f"shard {shown} can have no index of DALI: member {name!r} at byte {start - BLOCK} {what}, and an "
                "index of DALI has no place for that. Write the shard again, with another name, or without --dali",
                url=shown,
                offset=start - BLOCK,
            )
        if not lines or stem != key:
            lines.append([])
            key = stem
        lines[-1].append(f"{extension} {start} {size} {name}")
    if not lines:
        raise ShardError(f"shard {shown} can have no index of DALI: it has no samples, which DALI refuses", url=shown)
    text = "".join(f"{line}\n" for line in (f"v1.2 {len(lines)}", *map(" ".join, lines)))
    return text.encode("utf-8", "surrogateescape")
