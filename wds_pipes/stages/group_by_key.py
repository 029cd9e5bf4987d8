"""GroupByKey: members to samples."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from wds_pipes.errors import SampleError, ShardError, ShardWarning
from wds_pipes.io.urls import redact
from wds_pipes.stage import Lane, Mark, Stage, Tolerant, check_choice
from wds_pipes.stages.load_tar import LoadTar
from wds_pipes.stages.shard_list import PartOfShard
from wds_pipes.tar.keys import KeySplit, splitter
from wds_pipes.tar.reader import TarMember

Sample = dict[str, Any]


class GroupByKey(Tolerant[Sample]):
    """Neighbouring members with one key to samples (functional name: ``group_by_key``).

    A sample is a dict ``{"__key__": str, "__url__": str, field: bytes, ...}`` with the fields in the order of the tar. By default the key of
    ``dir/a.seg.png`` is ``dir/a`` and its field ``seg.png`` (in lower case). Hidden files, names without a dot and a top-level ``__meta__`` belong to no
    sample. Members group only inside one shard.

    Args:
        source: a pipe of members: ``load_tar()``.
        fields: keep only these fields; the data of others is passed over, not read, where the stream can seek. A sample with none of them is not given, and
            counted as filtered.
        key_split: ``"first-dot"``, ``"last-dot"``, or a function from a member's name to (key, field), or None for a member to leave out.
        on_repeated_key: for a key that comes again later in the same shard, so that its sample is given in pieces: ``"raise"``, ``"warn"`` (ShardWarning) or
            ``"ignore"``. Sort such a shard. After a resume only the shard's part from there on is compared.
        on_error: for a sample with a field twice, or one beside a damaged place of the shard: ``"raise"``, or ``"skip"`` it and count it.
        max_errors: with ``"skip"``, how many samples may be skipped in an epoch; None: any number.

    Raises:
        SampleError: from the iteration, with ``.url``, ``.key`` and ``.offset``: a field twice, or a repeated key.

    Checkpoint: where the first member of the next sample starts. A resume reads that one member again.
    """

    @dataclass(slots=True)
    class At:
        skipped: int = 0
        filtered: int = 0
        number: int = 0  # how many samples of the shard came before this place, where only a part of the shard is meant

    order_options = ("fields", "key_split")

    def __init__(
        self,
        source: Stage[Any],
        *,
        fields: Iterable[str] | None = None,
        key_split: KeySplit = "first-dot",
        on_repeated_key: str = "raise",
        on_error: str = "raise",
        max_errors: int | None = None,
    ) -> None:
        super().__init__(source, on_error, max_errors)
        if isinstance(fields, str):
            raise TypeError(f"fields must be a list of names, not {fields!r}: write fields=[{fields!r}]")
        self.fields = None if fields is None else tuple(sorted({field.lower().lstrip(".") for field in fields}))
        if self.fields == ():
            raise ValueError("fields is empty: name at least one field to keep")
        self.split = key_split
        name = "callable" if callable(key_split) else check_choice("key_split", key_split, "first-dot", "last-dot")
        self.key_split = None if name == "first-dot" else name
        self.on_repeated_key = check_choice("on_repeated_key", on_repeated_key, "raise", "warn", "ignore")
        # While running, where the source is to be resumed: the offset of a member of its current shard if that says it all, else a mark.
        self._offset = -1
        self._before: Mark | None = None

    def open(self, lane: Lane, mark: Mark | None = None) -> Stage[Sample]:
        if not isinstance(self.source, LoadTar):
            return super().open(lane, mark)
        group = copy.copy(self)
        group.source = load = copy.copy(self.source)
        load.named = False
        load.want = self._wants(set(self.fields)) if self.fields else None
        return super(GroupByKey, group).open(lane, mark)

    def _wants(self, fields: set[str]) -> Callable[[str], bool]:
        split = splitter(self.split)

        def want(name: str) -> bool:
            parts = split(name)
            return parts is not None and parts[1].lower() in fields

        return want

    def run(self) -> Iterator[Sample]:
        source = self.source
        assert source is not None
        split, by_stem, wanted = splitter(self.split), self.split == "first-dot", self.fields and set(self.fields)
        mark = None if isinstance(source, LoadTar) else source.mark
        names: dict[str, str] = {}  # a field as it is written: in lower case, one object for all samples
        seen: set[str] = set()  # the keys of this shard
        sample: Sample | None = None
        key = stem = url = shown = ""
        last, length = -1, 0
        bad = False  # the sample being built is not to be given
        suspect = False  # the next sample may have lost its first members
        flags = {} if self.lane.padding is None else {"__padding__": self.lane.padding}
        part: PartOfShard | None = None
        first = True
        passing = False  # the wanted part of this shard is over
        before: Mark | None = None if mark is None else mark()
        for member in source.items:
            try:
                shard, name, data, offset = member
            except (TypeError, ValueError):
                raise _no_member(member) from None
            if (shard is not url and shard != url) or offset <= last:
                if mark and not isinstance(member, TarMember):
                    raise _no_member(member)
                ready = self._finish(sample, bad, part)
                if not first:
                    self._end_shard(part)
                if ready is not None:
                    self._offset, self._before = offset if mark is None else -1, before
                    yield ready
                sample, key, stem, url, shown = None, "", "", shard, str(shard)  # without what a URL may carry for the stages
                part = shard if isinstance(shard, PartOfShard) else None
                bad = suspect = first = passing = False
                seen.clear()
            last = offset
            if passing:
                continue
            # The common case first: behind the key of the sample a field that is known.
            field = names.get(name[length:]) if stem and name[:length] == stem else None
            if field is None:
                parts = split(name) if name else None
                if parts is None:
                    if not name:  # a gap: the sample may go on behind it
                        stem, bad, suspect = "", True, True
                    if mark:
                        before = mark()
                    continue
                if parts[0] != key or sample is None:
                    ready = sample if wanted is None and part is None and not bad else self._finish(sample, bad, part)
                    if ready is not None:
                        self._offset, self._before = offset if mark is None else -1, before
                        yield ready
                    if part is not None and self.at.number >= part.stop:
                        self._leave(part, offset)
                        sample, stem, passing = None, "", True
                        continue
                    key, bad, suspect = parts[0], suspect, False
                    if by_stem:
                        stem, length = f"{key}.", len(key) + 1
                    sample = {"__key__": key, "__url__": shown, **flags}
                    if key in seen:
                        self._repeated(sample, offset)
                    seen.add(key)
                elif suspect:
                    suspect = False
                field = names.get(parts[1])
                if field is None:
                    if len(names) > 4096:
                        names.clear()
                    field = names[parts[1]] = parts[1].lower()
            if field in sample:  # type: ignore[operator]
                if not bad:
                    self._twice(sample, field, name, offset)  # type: ignore[arg-type]
                bad = True
            elif wanted is None or field in wanted:
                sample[field] = data  # type: ignore[index]
            if mark:
                before = mark()
        ready = self._finish(sample, bad, part)
        if not first:
            self._end_shard(part)
        self._offset, self._before = -1, source.mark()
        if ready is not None:
            yield ready

    def _finish(self, sample: Sample | None, bad: bool, part: PartOfShard | None) -> Sample | None:
        """The sample if it is to be given, else count it."""
        if sample is None:
            return None
        if part is not None:
            self.at.number += 1
            if self.at.number <= part.start:
                return None
        if bad:
            self.at.skipped += 1
            return None
        if self.fields is not None and all(name[:2] == "__" for name in sample):
            self.at.filtered += 1
            return None
        return sample

    def _leave(self, part: PartOfShard, offset: int) -> None:
        """The wanted samples of a shard have come, and another one follows."""
        if part.stop == part.of:
            url = redact(part)
            said = f"the {part.of} that samples_per_shard or the index says"
            raise ShardError(f"shard {url} has more samples than {said}, from byte {offset} on.", url=url, offset=offset)
        if isinstance(self.source, LoadTar):
            self.source.leave = True

    def _end_shard(self, part: PartOfShard | None) -> None:
        """A shard is over; see that it had the samples it should, unless some were lost by damage that was skipped."""
        number, self.at.number = self.at.number, 0
        lost = isinstance(self.source, LoadTar) and self.source.at.damaged
        if part is not None and number < part.stop and not lost:
            url = redact(part)
            raise ShardError(f"shard {url} has only {number} samples, and samples_per_shard or the index says {part.of}.", url=url)

    def _twice(self, sample: Sample, field: str, name: str, offset: int) -> None:
        """A sample has a field a second time: raise, or see that it may be skipped."""
        url, key = redact(sample["__url__"]), sample["__key__"]
        message = f"sample {key!r} of shard {url} has field {field!r} twice (again at byte {offset}, as {name!r}). Rename or remove one."
        self.skip(SampleError(message, url=url, key=key, offset=offset))
        self.at.skipped -= 1  # _finish counts the sample, once

    def _repeated(self, sample: Sample, offset: int) -> None:
        """A key was seen before in this shard."""
        url = redact(sample["__url__"])
        message = (
            f"key {sample['__key__']!r} comes again in shard {url} at byte {offset}, apart from its other members, so that its sample is in pieces. Sort the "
            "shard by name, or pass on_repeated_key='ignore' to take the pieces as samples. (A resume from here on does not see what came before.)"
        )
        if self.on_repeated_key == "raise":
            raise SampleError(message, url=url, key=sample["__key__"], offset=offset)
        if self.on_repeated_key == "warn":
            warnings.warn(message, ShardWarning, stacklevel=2)

    def mark(self) -> Mark:
        at = self.at
        if self._offset >= 0:
            return (at.skipped, at.filtered, at.number), self.source.mark_at(self._offset)  # type: ignore[union-attr]
        return self._own(at), self._before or self.source.mark()  # type: ignore[union-attr]


def _no_member(item: object) -> TypeError:
    return TypeError(f"group_by_key() takes the members of tars, and its source gave {item!r:.200}: put .load_tar() before it")
