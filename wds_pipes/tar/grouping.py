"""Group the members of a tar to samples: the one function that all readers of shards call.

Rules:
1. Neighbouring members with one key are a sample. Files that ``key_split`` gives no key belong to
   none, and do not part one.
2. A sample beside a gap, where members were lost, is dropped: it may be incomplete.
3. A sample with a field twice, or with the name of metadata, is reported, and dropped if reading
   goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, ShardWarning, mended
from wds_pipes.io.urls import redact
from wds_pipes.tar.keys import KeySplit, is_metadata, splitter, why_outside
from wds_pipes.tar.reader import field_twice, repeated_key, reserved_name

Member = tuple[str, str, Any, int]  # as a TarMember: url, name ("" for a gap), data, offset
_MOST_NAMES = 4096  # so that hostile names do not fill the memory
_NO_KEY = "\0"  # no name begins with this


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

    Attributes:
        start: where the last sample begins: its first header, in bytes; -1: this shard had none.
        stop: where the sample after it begins; -1: it is the last one of the shard.
        names: the fields of the samples so far, in lower case, by how they are written; the first
            few thousand if there are more.
        gap: whether members of this shard were lost.
        outside: how many files of this shard belong to no sample.
        first_outside: the first of these, and where its headers start.
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
    ) -> None:
        self._key_split, self._split, self._by_stem = key_split, splitter(key_split), key_split == "first-dot"
        self._fields, self._on_repeated_key, self._metadata = fields, on_repeated_key, dict(metadata or {})
        self._report = report or _raise
        self._lose = lose or _forget
        self.names: dict[str, str] = {}
        self.start = self.stop = -1
        self.gap, self.outside, self.first_outside = False, 0, ("", 0)

    def samples(self, members: Iterable[Member], url: str) -> Iterator[dict[str, Any]]:
        """Yield the samples of a shard with these members.

        Args:
            members: all members of the shard from a place on, in order.
            url: the shard.
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
        self.gap, self.outside = False, 0
        self.start = self.stop = -1
        for _, name, data, offset in members:
            field = names.get(name[length:]) if name[:length] == stem else None  # 1
            if field is None:
                parts = split(name) if name else None
                if parts is None:  # 2
                    if name:
                        self.first_outside = self.first_outside if self.outside else (name, offset)
                        self.outside += 1
                    else:
                        bad = beside = 2
                        self.gap = True
                        stem, length = _NO_KEY, 1
                    continue
                if parts[0] != key or sample is None:  # 3
                    if sample is not None:
                        self.start, self.stop = begin, offset
                        if bad:
                            self._lose(sample)
                        else:
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
            self.start, self.stop = begin, -1
            if bad:
                self._lose(sample)
            else:
                yield sample

    def why_none(self, url: str) -> ShardWarning | None:
        """Return the warning for a shard that was read and has files of which none makes a sample;
        None: it has a sample, or no file.
        """
        if not self.outside or self.start >= 0:
            return None
        name, offset = self.first_outside
        what = (
            f"shard {redact(url)}, byte {offset}: {name!r:.300} is the first of {plural(self.outside, 'file')}, of "
            f"which none makes a sample: {why_outside(self._key_split)}"
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
            warning = mended(ShardWarning, error.what, mend=error.mend, mend_cli=error.mend_cli)
            warnings.warn(warning, stacklevel=3)


def _raise(error: SampleError) -> None:
    raise error


def _forget(sample: dict[str, Any]) -> None:
    pass
