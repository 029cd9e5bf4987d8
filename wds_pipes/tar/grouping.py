"""Group the members of a tar to samples: the one function that all readers of shards call.

Rules:
1. Neighbouring members with one key are a sample. Files that ``key_split`` gives no key belong to
   none, and do not part one.
2. A sample beside a gap, where members were lost, is dropped: it may be incomplete.
3. A sample with a field twice, or with the name of metadata, is reported, and dropped if reading
   goes on.
4. The last sample of a shard is suspect if it lacks fields that all samples before it have, and
   these are at least ``LEAST_COMPARED``: zeros in place of its last members look like the end of
   the tar. It is a ShardWarning, or reported and dropped.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from wds_pipes.core.words import listed, plural
from wds_pipes.errors import SampleError, ShardWarning, WdsError, mended
from wds_pipes.io.urls import redact
from wds_pipes.tar.keys import KeySplit, is_metadata, kept, splitter, why_outside
from wds_pipes.tar.reader import field_twice, repeated_key, reserved_name

Member = tuple[str, str, Any, int]  # as a TarMember: url, name ("" for a gap), data, offset
_MOST_NAMES = 4096  # so that hostile names do not fill the memory
_KEY = "__key__"  # each sample has it
_NO_KEY = "\0"  # no name begins with this
LEAST_COMPARED = 8  # samples that the last one of a shard is compared with, at least
# Of these samples, the last fields of the first one are compared, which a cut loses first: so many,
# with so many characters together. A state has them.
_MOST_FIELDS, _MOST_TEXT = 8, 128


class Usual:
    """The fields that all samples of a shard have, so far.

    Args:
        text: what was known at a position; empty: nothing.

    Attributes:
        text: what is known, for a position: how many samples were compared, at most
            ``LEAST_COMPARED``, and these fields in the order of the tar, with a NUL before each.
        last: the last of these fields. Only a sample without it needs ``add`` when
            ``LEAST_COMPARED`` samples were compared. Until then it is None, which no sample has.
    """

    def __init__(self, text: str = "") -> None:
        compared, *self._fields = text.split("\0")
        self._compared = int(compared or 0)
        self.last: str | None = None
        self._note()

    def add(self, names: Collection[str]) -> str | None:
        """Add a sample with these fields, and return ``last``."""
        if self._compared:
            self._fields = [field for field in self._fields if field in names]
        else:
            self._fields = _last_fields(names)
        self._compared = min(self._compared + 1, LEAST_COMPARED)
        self._note()
        return self.last

    def _note(self) -> None:
        self.text = "\0".join([str(self._compared), *self._fields])
        if self._compared == LEAST_COMPARED:
            # if they have no field in common, no other sample is compared
            self.last = self._fields[-1] if self._fields else _KEY

    def missing(self, names: Collection[str]) -> list[str]:
        """Return the fields that the last sample, which has these names, should have too."""
        if self.last is None or self.last in names:
            return []
        return [field for field in self._fields if field not in names]


def _last_fields(names: Collection[str]) -> list[str]:
    """Return the last fields among names, in their order, of which a state has room for all."""
    found, size = list[str](), 0
    for name in reversed([name for name in names if not is_metadata(name)]):
        size += len(name) + 1
        if len(found) == _MOST_FIELDS or size > _MOST_TEXT:
            break
        found.insert(0, name)
    return found


class SuspectSampleError(SampleError):
    """The last sample of a shard lacks fields that all samples before it have."""


def suspect_sample(url: str, key: str, missing: Collection[str], *, offset: int) -> SuspectSampleError:
    """Return the error for the last sample of a shard, which begins at ``offset`` and lacks
    fields.
    """
    shown = redact(url)
    return SuspectSampleError(
        f"sample {key!r} is the last one of shard {shown} (byte {offset}), and has no {listed(missing)}, unlike all "
        "samples before it: zeros may be in place of its other members",
        mend=f"Check the shard with: wds-pipes verify {shown}. If it is damaged, fetch or write it again.",
        url=shown,
        key=key,
        offset=offset,
    )


def warn_of(error: WdsError, level: int) -> None:
    """Warn of what an error says, instead of raising it; ``level``: as ``stacklevel``."""
    warning = mended(ShardWarning, error.what, mend=error.mend, mend_cli=error.mend_cli)
    warnings.warn(warning, stacklevel=level + 1)


class GroupedShard:
    """What the grouping of a shard has found so far: it moves on with each sample.

    Args:
        url: the shard.
        usual: the ``text`` of ``Usual`` of the samples before the place where reading begins.

    Attributes:
        start: where the last sample begins: its first header, in bytes; -1: there was none.
        stop: where the sample after it begins; -1: it is the last one of the shard.
        gap: whether members were lost.
        outside: how many files belong to no sample.
        first_outside: the first of these, and where its headers start.
        usual: the fields of the samples so far; None: there was none.
    """

    start = stop = -1
    gap, outside, first_outside = False, 0, ("", 0)

    def __init__(self, url: str, usual: str = "") -> None:
        self.url = url
        self.usual = Usual(usual) if usual else None


class Grouping:
    """Groups the members of shards to samples, one shard after another.

    Args:
        key_split: as in ``group_by_key``.
        fields: the fields to keep, in lower case; None: all.
        on_repeated_key: as in ``group_by_key``.
        metadata: more entries of each sample.
        report: called with each SampleError, several times for a sample with several faults. If it
            returns, reading goes on. None: it is raised.
        lose: called with each sample that is dropped, when all its members have come.
        suspect: called with a SuspectSampleError, of rule 4; returns whether the sample is dropped.
            None: it is a ShardWarning, and the sample is not dropped.

    Attributes:
        names: the fields of the samples so far, in lower case, by how they are written; the first
            few thousand if there are more.
    """

    def __init__(
        self,
        key_split: KeySplit = "first-dot",
        *,
        fields: Collection[str] | None = None,
        on_repeated_key: str = "raise",
        metadata: Mapping[str, Any] | None = None,
        report: Callable[[SampleError], None] | None = None,
        lose: Callable[[dict[str, Any]], None] | None = None,
        suspect: Callable[[SuspectSampleError], bool] | None = None,
    ) -> None:
        self._key_split, self._split, self._by_stem = key_split, splitter(key_split), key_split == "first-dot"
        self._fields = None if fields is None else kept(fields)
        self._on_repeated_key, self._metadata = on_repeated_key, dict(metadata or {})
        self._report = report or _raise
        self._lose, self._suspect = lose or _forget, suspect or _keep
        self.names: dict[str, str] = {}

    def samples(self, members: Iterable[Member], shard: GroupedShard) -> Iterator[dict[str, Any]]:
        """Yield the samples of a shard with these members.

        Args:
            members: all members of the shard from a place on, in order.
            shard: the shard, of which it notes what it finds.
        """
        # One loop over the members, since a call for each of them would cost more than the rest.
        # 1. The key of the sample and a known field: nearly all members; go to 4.
        # 2. A gap, or a file of no sample: note it.
        # 3. Another key: yield the sample before it and begin one. A new field: note it.
        # 4. Add the field to the sample.
        split, by_stem, wanted, names, metadata = (
            self._split,
            self._by_stem,
            self._fields,
            self.names,
            self._metadata,
        )
        keys: set[str] = set()
        sample: dict[str, Any] | None = None
        key, stem, length, begin = "", _NO_KEY, 1, -1
        bad = beside = 0  # this sample is dropped, and the next one is: for a fault (1), beside a gap (2)
        url, last = shard.url, None if shard.usual is None else shard.usual.last
        for _, name, data, offset in members:
            field = names.get(name[length:]) if name[:length] == stem else None  # 1
            if field is None:
                parts = split(name) if name else None
                if parts is None:  # 2
                    if name:
                        shard.first_outside = shard.first_outside if shard.outside else (name, offset)
                        shard.outside += 1
                    else:
                        bad = beside = 2
                        shard.gap = True
                        stem, length = _NO_KEY, 1
                    continue
                if parts[0] != key or sample is None:  # 3
                    if sample is not None:
                        shard.start, shard.stop = begin, offset
                        if bad:
                            self._lose(sample)
                        else:
                            if last not in sample:
                                shard.usual = shard.usual or Usual()
                                last = shard.usual.add(sample)
                            yield sample
                    key, begin, bad = parts[0], offset, beside
                    sample = {"__key__": key, "__url__": url}
                    if metadata:
                        sample.update(metadata)
                    if key in keys:
                        self._meet_again(key, url, offset)
                    keys.add(key)
                    if by_stem:
                        stem, length = f"{key}.", len(key) + 1
                beside = 0
                field = names.get(parts[1])
                if field is None:
                    field = self._name(parts[1])
                    if is_metadata(field):
                        if bad < 2:
                            self._report(reserved_name(url, key, field, name, offset=offset))
                        bad = bad or 1
                        continue
            if field in sample:  # type: ignore[operator]  # 4
                if bad < 2:
                    self._report(field_twice(url, key, field, name, offset=offset))
                bad = bad or 1
            elif wanted is None or field in wanted:
                sample[field] = data  # type: ignore[index]
        if sample is not None:
            shard.start, shard.stop = begin, -1
            missing = [] if bad or shard.usual is None else shard.usual.missing(sample)
            if missing and self._suspect(suspect_sample(url, key, missing, offset=begin)):
                bad = 1
            if bad:
                self._lose(sample)
            else:
                yield sample

    def why_none(self, shard: GroupedShard) -> ShardWarning | None:
        """Return the warning for a shard that was read and has files of which none makes a sample;
        None: it has a sample, or no file.
        """
        if not shard.outside or shard.start >= 0:
            return None
        name, offset = shard.first_outside
        of_all = plural(shard.outside, "file")
        what = (
            f"shard {redact(shard.url)}, byte {offset}: {name!r:.300} is the first of {of_all}, of which none makes a "
            f"sample: {why_outside(self._key_split)}"
        )
        rename = "Rename them, or pass another"
        return mended(ShardWarning, what, mend=f"{rename} key_split.", mend_cli=f"{rename} --key-split.")

    def _name(self, written: str) -> str:
        """Return a field in lower case, and keep it: one str for all samples."""
        field = written.lower()
        if not is_metadata(field):
            if len(self.names) > _MOST_NAMES:
                self.names.clear()
            self.names[written] = field
        return field

    def _meet_again(self, key: str, url: str, offset: int) -> None:
        """Report a key that came before in this shard."""
        if self._on_repeated_key == "ignore":
            return
        error = repeated_key(url, key, offset=offset)
        if self._on_repeated_key == "raise":
            self._report(error)
        else:
            warn_of(error, 3)


def _raise(error: SampleError) -> None:
    raise error


def _keep(error: SuspectSampleError) -> bool:
    """Warn of a suspect sample, and keep it."""
    warn_of(error, 3)
    return False


def _forget(sample: dict[str, Any]) -> None:
    pass
