"""Structure-aware fuzzing of the tar reader, against the standard library where that agrees to
parse.

    python tests/proofs/fuzz_tar.py [--rounds 30000] [--minutes M] [--seed N]      (one process)

Each input is an archive of random members (ustar, GNU and pax headers, long names, sparse maps,
links) that is changed: header fields with the checksum mended or not, pax records and their
lengths, sizes, cuts, zeroed or repeated blocks, nested and appended archives. It is read with
on_error="raise" and "skip". A finding is: more reads than the input can need (a hang), more memory
than allowed, an exception that is no ShardError, or members other than those of tarfile for an
input that both read without a word. Prints inputs per second and the findings; exits with 1 if
there are any.
"""

import io
import logging
import random
import sys
import tarfile
import time
import warnings
from collections import Counter
from pathlib import Path

from amount import parser, rounds
from tars import END, header, padded, pax, tar

from wds_pipes import ShardError, ShardWarning
from wds_pipes.tar import TarReader
from wds_pipes.tar.reader import pass_link

MOST = 1 << 16  # max_member_bytes
KINDS = [b"0", b"\0", b"7", b"S", b"x", b"g", b"L", b"K", b"1", b"2", b"5", b"Z", b"V"]
NUMBERS = [b"", b"0", b"1", b"9", b"-1", b"7777777", b"9" * 20, b"1e3", b" 5", b"\x80" + b"\xff" * 11, b"\xff" * 12]
WORDS = [b"path", b"size", b"comment", b"mtime"]
WORDS += [b"GNU.sparse." + word for word in (b"size", b"map", b"major", b"minor", b"realsize", b"offset")]
WORDS += [b"GNU.sparse.numbytes", b"GNU.sparse.name"]
VALUES = [*NUMBERS[:9], b"0,1", b"0,1,5,2", b"1,0,", b"a.txt", b"x" * 200, b"1\n2", b"\xff\xfe"]


class Watched(io.BytesIO):
    """Counts what is read, and stops what reads without end."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.reads, self.largest, self.most = 0, 0, 20 * (len(data) // 512 + 10)

    def read(self, size=-1):
        self.reads += 1
        self.largest = max(self.largest, size)
        if self.reads > self.most or size < 0:
            raise RuntimeError(f"read {self.reads} of {size} bytes")
        return super().read(size)


def member(rng: random.Random) -> bytes:
    """A member, often with extended headers."""
    name = b"%d.%s" % (rng.randrange(9), rng.choice([b"txt", b"jpg", b"cls"]))
    data = rng.randbytes(rng.choice([0, 1, 100, 511, 512, 513, 2000]))
    plain = header(name, len(data)) + padded(data)
    match rng.randrange(8):
        case 0:
            return pax(*((rng.choice(WORDS), rng.choice(VALUES)) for _ in range(rng.randrange(1, 4)))) + plain
        case 1:
            long = name * rng.randrange(10, 60)
            return header(b"L", len(long), kind=b"L") + padded(long) + plain
        case 2:
            inner = tar([("in/a.txt", data), ("in/b.txt", b"b")])
            return header(name, len(inner)) + inner
        case 3:
            numbers = b"".join(rng.choice(NUMBERS[:5]) + b"\n" for _ in range(rng.randrange(8)))
            content = padded(b"%d\n" % rng.randrange(4) + numbers) + data
            extended = pax((b"GNU.sparse.major", b"1"), (b"GNU.sparse.realsize", b"%d" % rng.randrange(5000)))
            return extended + header(name, len(content)) + padded(content)
        case 4:
            pieces = (b"%011o\0%011o\0" % (rng.randrange(3000), rng.randrange(600)) for _ in range(rng.randrange(5)))
            places = {"at_386": b"".join(pieces), "at_482": rng.choice([b"\0", b"\1"]), "at_483": b"%011o\0" % 4000}
            return header(name, len(data), kind=b"S", **places) + padded(data)
        case 5:
            return header(name, rng.choice([0, len(data)]), kind=rng.choice(KINDS)) + padded(data)
    return plain


def mend(block: bytearray) -> None:
    """Write the right checksum into a header block."""
    if block[257:262] == b"ustar":
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)


def change(data: bytearray, rng: random.Random) -> None:
    """One change of the structure."""
    place = rng.randrange(max(1, len(data) // 512)) * 512
    block = bytearray(data[place : place + 512].ljust(512, b"\0"))
    match rng.randrange(9):
        case 0:
            del data[rng.randrange(len(data) + 1) :]
        case 1:
            end = min(len(data), place + 512 * rng.choice([1, 8, 20]))
            data[place:end] = bytes(end - place)
        case 2 if data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        case 3:
            data[place:place] = data[place : place + 512 * rng.randrange(1, 4)]
        case 4:
            del data[place : place + rng.choice([1, 511, 512, 1024])]
        case 5:
            data += bytes(rng.choice([0, 512, -len(data) % 10240])) + tar([("appended.txt", b"x")])
        case 6 if (start := data.find(b"=", place)) > 0:
            data[start - rng.randrange(1, 9)] = rng.choice(b"0123456789 =\n")
        case 7 if len(data) >= 512:
            number = rng.choice(NUMBERS)[:12]
            block[124 : 124 + len(number)] = number
            block[156:157] = rng.choice([block[156:157], *KINDS])
            mend(block)
            data[place : place + 512] = block
        case 8 if len(data) >= 512:
            block[rng.randrange(512)] = rng.randrange(256)
            mend(block)
            data[place : place + 512] = block


def make(rng: random.Random) -> bytes:
    """An input."""
    data = bytearray(b"".join(member(rng) for _ in range(rng.randrange(1, 6))) + rng.choice([END, END, b""]))
    if rng.randrange(2):
        data += bytes(-len(data) % 10240)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 4])):
        change(data, rng)
    return bytes(data)


def read(data: bytes, *, skip: bool, joined: bool = False) -> tuple[list[tuple[str, bytes]], bool]:
    """The members, and whether anything was reported."""
    stream, errors, found = Watched(data), [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for _, name, content, *_ in TarReader(
                stream,
                max_member_bytes=MOST,
                on_error=errors.append if skip else None,
                concatenated=joined,
                on_link=pass_link,
                named=False,
            ):
                if len(content or b"") > MOST:
                    raise RuntimeError(f"a member of {len(content)} bytes")
                if name:
                    found.append((name, content))
                else:
                    errors.append(None)
        except ShardError as error:
            errors.append(error)
    if stream.largest > 1 << 20:
        raise RuntimeError(f"a read of {stream.largest} bytes")
    assert all(issubclass(warning.category, ShardWarning) for warning in caught)
    return found, bool(caught or errors)


def headers(data: bytes) -> list[bytes]:
    """The types of the headers among these blocks."""
    return [
        data[place + 156 : place + 157]
        for place in range(0, len(data), 512)
        if data[place + 257 : place + 262] == b"ustar"
    ]


def oracle(data: bytes) -> list[tuple[str, bytes]] | None:
    """The members by tarfile; None if it refuses, or where it reads otherwise."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as archive:
            infos = list(archive)
            if any(reads_otherwise(info, data) for info in infos):
                return None
            return [(info.name, archive.extractfile(info).read()) for info in infos if info.isreg()]
    except Exception:
        return None


def reads_otherwise(info: tarfile.TarInfo, data: bytes) -> bool:
    """Whether tarfile reads a member otherwise: sparse maps that make no sense, sizes in pax
    headers, several extended headers of one member, a GNU long name (it ignores its size), or no
    name.
    """
    sizes = any(key == "size" or key.startswith("GNU.sparse") for key in info.pax_headers)
    long_name = len(info.name) > 100 and not info.pax_headers
    several = len(headers(data[info.offset : info.offset_data])) > 2
    return info.sparse is not None or sizes or long_name or several or not info.name


def main() -> None:
    logging.disable()
    options = parser(__doc__, 30_000).parse_args()
    rng, start, findings, sorts = random.Random(options.seed), time.monotonic(), [], Counter()
    for _ in rounds(options):
        data = make(rng)
        sorts["inputs"] += 1
        try:
            found, reported = read(data, skip=False)
            read(data, skip=True)
            joined, _ = read(data, skip=rng.randrange(2) == 0, joined=True)
            if not reported and joined != found:
                raise RuntimeError("other members with concatenated=True")
            sorts["reported"] += reported
            if not reported and (expected := oracle(data)) is not None:
                sorts["compared"] += 1
                if found[: len(expected)] != expected:  # tarfile stops at the first end mark
                    short = [[(name, len(content)) for name, content in members] for members in (found, expected)]
                    raise RuntimeError(f"members {short[0]}, by tarfile {short[1]}")
        except Exception as error:
            findings.append(repr(error))
            name = Path(f"/tmp/fuzz_tar_{options.seed}_{len(findings)}.tar")
            name.write_bytes(data)
            print(f"{error!r}: {name}")
            if len(findings) == 20:
                break
    rate = sorts["inputs"] / (time.monotonic() - start)
    figures = " ".join(f"{sort}={count}" for sort, count in sorts.items())
    print(f"{figures} findings={len(findings)} seed={options.seed} inputs_per_second={rate:.0f}")
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
