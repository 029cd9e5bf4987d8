"""Tars to test with, and the samples that the standard library, the webdataset package and our
chain read from them.
"""

import gc
import io
import tarfile
import traceback
import warnings
from dataclasses import dataclass
from pathlib import Path

from wds_pipes import Stage
from wds_pipes.core.stream import Stream
from wds_pipes.stages import GroupByKey, LoadTar, OpenShards, ShardList
from wds_pipes.tar import TarMember, TarReader

KINDS = {"usual": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def tar(members, *, format=tarfile.USTAR_FORMAT, end=True) -> bytes:
    """A tar of (name, data) pairs or TarInfos as the standard library writes it; ``end=False``
    leaves the end-of-archive mark away.
    """
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=format, encoding="utf-8", errors="surrogateescape") as archive:
        for member in members:
            info, data = member if isinstance(member, tuple) else (member, b"")
            if isinstance(info, str):
                info = tarfile.TarInfo(info)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        size = archive.offset
    return file.getvalue() if end else file.getvalue()[:size]


def pairs(count: int, fields=("txt", "cls")) -> list[tuple[str, bytes]]:
    """The members of ``count`` samples, with data of many lengths."""
    return [
        (f"{number:04d}.{field}", f"{number} {field} ".encode() * (number * 7 % 90))
        for number in range(count)
        for field in fields
    ]


def header(name: bytes, size: int = 0, *, kind: bytes = b"0", **places: bytes) -> bytes:
    """A header block with a right checksum; ``at_124=b"..."`` puts bytes at place 124."""
    block = bytearray(tarfile.TarInfo("x").tobuf(tarfile.USTAR_FORMAT))
    block[:100] = name.ljust(100, b"\0")
    block[124:136] = b"%011o\0" % size
    block[156:157] = kind
    for place, content in places.items():
        start = int(place.removeprefix("at_"))
        block[start : start + len(content)] = content
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    """Data filled up to whole blocks."""
    return data + bytes(-len(data) & 511)


def filled(data: bytes) -> bytes:
    """An archive with zeros at its end as writers have them: up to a whole record."""
    data = padded(data.rstrip(b"\0")) + END
    return data + bytes(-len(data) % 10240)


def pax(*records: tuple[bytes, bytes], kind: bytes = b"x") -> bytes:
    """A pax extended header with these records."""
    content = b"".join(record(key, value) for key, value in records)
    return header(b"PaxHeader", len(content), kind=kind) + padded(content)


def record(key: bytes, value: bytes) -> bytes:
    """A pax record: its length counts its own digits."""
    length = len(key) + len(value) + 3
    while len(str(length)) + len(key) + len(value) + 3 != length:
        length += 1
    return b"%d %s=%s\n" % (length, key, value)


END = bytes(1024)


def by_tarfile(source) -> list[tuple[str, bytes]]:
    """The regular members of a path or of bytes, by the standard library."""
    file = io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb")
    with file, tarfile.open(fileobj=file, encoding="utf-8", errors="surrogateescape") as archive:
        return [(info.name, archive.extractfile(info).read()) for info in archive if info.isreg()]


def by_reader(data: bytes, **options) -> list[tuple[str, bytes]]:
    """The members of an uncompressed tar, by TarReader."""
    return [(member.name, member.data) for member in TarReader(io.BytesIO(data), **options)]


def load(urls, **options) -> LoadTar:
    """The chain up to load_tar."""
    return LoadTar(OpenShards(ShardList(urls, empty_check=False)), **options)


def group(urls, load_options=None, **options) -> GroupByKey:
    """The chain up to group_by_key."""
    return GroupByKey(load(urls, **(load_options or {})), **options)


def samples(urls, load_options=None, **options) -> list[dict]:
    """The samples of shards, by our chain."""
    return list(Stream(group(urls, load_options, **options)))


def by_webdataset(url) -> list[dict]:
    """The samples of a shard, by the webdataset package, which leaves files open."""
    import webdataset

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            found = list(webdataset.WebDataset(str(url), shardshuffle=False, empty_check=False))
        except Exception as error:
            traceback.clear_frames(error.__traceback__)
            raise
        finally:
            gc.collect()
    return [{name: value for name, value in sample.items() if name != "__local_path__"} for sample in found]


def put(path: Path, data: bytes) -> str:
    """Write a file and return its path as text."""
    path.write_bytes(data)
    return str(path)


def fill(writer, samples):
    """Write samples with a TarWriter or ShardWriter, and close it."""
    with writer:
        for sample in samples:
            writer.write(sample)
    return writer


class Reads(io.BytesIO):
    """Notes how many bytes each read asks for, and how many come in all."""

    def __init__(self, data: bytes, *, seeks: bool = True) -> None:
        super().__init__(data)
        self.sizes: list[int] = []
        self.count, self.seeks = 0, seeks

    def seekable(self):
        return self.seeks

    def seek(self, *where):
        if not self.seeks:
            raise io.UnsupportedOperation
        return super().seek(*where)

    def read(self, size=-1):
        data = super().read(size)
        self.count += len(data)
        self.sizes.append(size)
        return data


class Renewed(Stage):
    """Members whose URL is a new text each, as from another process."""

    @dataclass(slots=True)
    class At:
        given: int = 0

    def run(self):
        for member in self.source.items:
            self.at.given += 1
            yield TarMember("".join(list(member.url)), member.name, member.data, member.offset)


# Tars of many sorts, all of which are sound.
LINK = tarfile.TarInfo("link.txt")
LINK.type, LINK.linkname = tarfile.SYMTYPE, "a" * 150
FOLDER = tarfile.TarInfo("folder.d")
FOLDER.type = tarfile.DIRTYPE

SORTS = {
    "plain": tar(pairs(5)),
    "links, folders, hidden": tar([FOLDER, ("0.txt", b"0"), (".hidden", b"h" * 600), ("1.txt", b"1"), ("1.cls", b"")]),
    "gnu": tar(
        [("n" * 200 + ".txt", b"x" * 513), LINK, ("0.txt", b"0"), ("m" * 200 + ".txt", b"")], format=tarfile.GNU_FORMAT
    ),
    "pax": tar(
        [("n" * 200 + ".txt", b"x" * 513), LINK, ("0.txt", b"0"), ("m" * 200 + ".txt", b"")], format=tarfile.PAX_FORMAT
    ),
    "global": filled(
        pax((b"comment", b"x"), kind=b"g") + tar(pairs(2))[:-1024] + pax((b"comment", b"x"), kind=b"g") + tar(pairs(2))
    ),
    "sparse": filled(
        pax((b"GNU.sparse.size", b"9"), (b"GNU.sparse.map", b"1,2,5,1"))
        + header(b"a.txt", 3)
        + padded(b"xyz")
        + tar(pairs(2))
    ),
    "several": tar(pairs(2)) + tar(pairs(3)) + tar([]) + tar(pairs(1)),
    "no end": tar(pairs(3), end=False) + END,
    "empty": tar([]),
    "unknown kinds": header(b"V", kind=b"V")
    + header(b"z", 700, kind=b"Z")
    + bytes(1024)
    + header(b"a.txt", 1)
    + padded(b"x")
    + END,
}
