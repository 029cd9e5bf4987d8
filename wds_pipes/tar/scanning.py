"""Read a shard once, and find its samples as ``group_by_key`` groups them."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from hashlib import md5
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from wds_pipes.errors import SampleError, ShardError, ShardWarning, WdsError
from wds_pipes.io.compression import unpacked, unreadable
from wds_pipes.io.urls import redact
from wds_pipes.tar.headers import BLOCK, MAX_SIZE
from wds_pipes.tar.index import ShardFacts
from wds_pipes.tar.keys import KeySplit, is_metadata, splitter
from wds_pipes.tar.members import ASTRAY, END, GAP, MARK, field_twice, half_sample, reserved_name
from wds_pipes.tar.offsets import Component
from wds_pipes.tar.reader import TarReader

if TYPE_CHECKING:
    from wds_pipes.io.open import Opener

_CHUNK = 1 << 20  # bytes read at once
_MOST_NAMES = 4096  # so that hostile names do not fill the memory


class Rules(NamedTuple):
    """How samples are found: see ``index_shards``."""

    key_split: KeySplit
    on_repeated_key: str


@dataclasses.dataclass
class Scanned:
    """What was found in a shard.

    Attributes:
        facts: the number of samples, the size, the MD5.
        keys: the key of each sample.
        starts: the byte of the first header of each.
        end: where the last one ends, in the decompressed tar.
        compressed: whether the shard is compressed.
        components: all its files, if they were requested.
        outside: how many files belong to no sample.
    """

    facts: ShardFacts = dataclasses.field(default_factory=ShardFacts)
    keys: list[str] = dataclasses.field(default_factory=list)
    starts: list[int] = dataclasses.field(default_factory=list)
    end: int = 0
    compressed: bool = False
    components: list[Component] = dataclasses.field(default_factory=list)
    outside: int = 0


# A member of a tar: its name, the byte of its first header, that of its last one, its stored size,
# whether the stored bytes are its data, and of a doubtful place, which has no name, its kind.
Member = tuple[str, int, int, int, bool, bytes | None]


def scan(url: str, rules: Rules, opener: Opener, stop: threading.Event, *, components: bool) -> Scanned:
    """Read a shard from its beginning to its end.

    Args:
        url: the shard.
        rules: how samples are found.
        opener: opens it.
        stop: when it is set, reading ends with an error.
        components: also list all its files.

    Raises:
        ShardError: it cannot be read, or is damaged.
        SampleError: a sample has a field twice, or one whose name is kept for metadata, or a key
            comes again.
    """
    with opener.open(url) as raw:
        hashed = Hashed(raw, stop)
        stream = io.BufferedReader(hashed, _CHUNK)
        with readable(url):
            tar, kind = unpacked(stream)
            reader = TarReader(
                tar, url=url, want=lambda name: False, max_member_bytes=MAX_SIZE, doubts=True, named=False
            )
            found = Scanned()
            find_samples(found, _members(reader, found.components if components else None), rules, url)
            found.end, found.compressed = reader.offset, bool(kind)
            while stream.read(_CHUNK):
                pass
    found.facts = ShardFacts(len(found.keys), hashed.size, hashed.md5.hexdigest())
    return found


@contextlib.contextmanager
def readable(url: str) -> Iterator[None]:
    """Raise ShardError for what unpacking a shard raises, or a package that it needs."""
    shown = redact(url)
    try:
        yield
    except ModuleNotFoundError as error:
        raise ShardError(f"shard {shown} cannot be read: {error}", url=shown) from error
    except ShardError:
        raise
    except unreadable() as error:
        raise ShardError(
            f"shard {shown} cannot be read ({type(error).__name__}: {error}). Write or fetch it again.", url=shown
        ) from error


def _members(reader: TarReader, components: list[Component] | None) -> Iterator[Member]:
    """Yield the members of a tar, without their data, and add them to the components of a shard."""
    for _, name, doubt, start in reader:
        header, size, plain = reader.skipped
        if name and components is not None:
            components.append(Component(name, header + BLOCK, size, plain))
        yield name, start, header, size, plain, None if name else doubt


def find_samples(
    found: Scanned,
    members: Iterable[Member],
    rules: Rules,
    url: str,
    *,
    report: Callable[[WdsError], None] | None = None,
    on_sample: Callable[[str, int, set[str]], None] | None = None,
) -> None:
    """Add the samples that ``group_by_key`` yields.

    Args:
        found: what they are added to.
        members: the members of the shard, in order.
        rules: how samples are found.
        url: the shard.
        report: called with each error. If it returns, the sample still counts. None: raise it.
        on_sample: called with the key, the first byte and the fields of each sample that is whole.
    """
    split, on_repeated_key, by_stem = splitter(rules.key_split), rules.on_repeated_key, rules.key_split == "first-dot"
    key, stem, length, started = "", "", 0, False
    fields, known, seen = set[str](), set[str](), set[str]()
    lower: dict[str, str] = {}  # a cache: from a field as it is written to its name in lower case
    # Doubtful places next to the current sample: offset, kind, and how many fields were known
    # there.
    doubts: list[tuple[int, bytes, int]] = []
    suspects: list[tuple[int, bytes, int]] = []  # the same for the next sample
    lost = next_lost = False  # whether members of the current sample, or of the next one, were lost
    report = report or _raise

    def end_sample() -> None:
        several, whole = len(found.keys) > 1, not lost
        for place, kind, before in doubts:
            if (several and (len(fields) < len(known) or (kind == MARK and len(known) > before))) or (
                not several and (kind == END or not before)
            ):
                whole = False
                report(half_sample(url, key, place, kind))
        if on_sample is not None and whole and started:
            on_sample(key, found.starts[-1], fields)

    for name, offset, _, _, _, doubt in members:
        field = lower.get(name[length:]) if stem and name[:length] == stem else None
        if field is None:
            parts = split(name) if name else None
            if parts is None:
                if not name and (doubt is GAP or doubt == ASTRAY):
                    lost = next_lost = True
                elif doubt is not None:
                    suspects = [(offset, doubt, len(known))]
                    doubts += suspects if started else []
                found.outside += bool(name)
                continue
            field = parts[1].lower()
            if is_metadata(field):
                report(reserved_name(url, parts[0], field, name, offset=offset))
                continue
            if len(lower) > _MOST_NAMES:
                lower.clear()
            lower[parts[1]] = field
            if parts[0] != key or not started:
                if doubts or on_sample is not None:
                    end_sample()
                key, fields, doubts, started, lost = parts[0], set(), suspects, True, next_lost
                if by_stem:
                    stem, length = f"{key}.", len(key) + 1
                if key in seen and on_repeated_key != "ignore":
                    _repeated(key, redact(url), offset, on_repeated_key, report)
                seen.add(key)
                found.keys.append(key)
                found.starts.append(offset)
        suspects, next_lost = [], False
        if field in fields:
            report(field_twice(url, key, field, name, offset=offset))
        fields.add(field)
        known.add(field)
    end_sample()


def _raise(error: WdsError) -> None:
    raise error


def _repeated(key: str, shown: str, offset: int, on_repeated_key: str, report: Callable[[WdsError], None]) -> None:
    message = (
        f"key {key!r} comes again in shard {shown} at byte {offset}, apart from its other "
        "members, so that its sample is in pieces. Join them with: wds-pipes repair SHARD NEW (or unpack it, and "
        "pack it with tar --sort=name), or pass on_repeated_key='ignore' here and to group_by_key (wds-pipes index "
        "--on-repeated-key ignore), to take the pieces as samples."
    )
    if on_repeated_key == "raise":
        report(SampleError(message, url=shown, key=key, offset=offset))
    else:
        warnings.warn(message, ShardWarning, stacklevel=2)


class Hashed(io.RawIOBase):
    """A stream that counts the bytes read and computes their MD5.

    When ``stop`` is set, reading raises OSError.
    """

    def __init__(self, raw: BinaryIO, stop: threading.Event) -> None:
        self._raw, self._stop = raw, stop
        self.size, self.md5 = 0, md5(usedforsecurity=False)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        if self._stop.is_set():
            raise OSError("the reading was stopped")
        count = int(self._raw.readinto(buffer))  # type: ignore[attr-defined]
        self.md5.update(memoryview(buffer)[:count])
        self.size += count
        return count
