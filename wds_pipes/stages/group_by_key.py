"""GroupByKey: group members into samples."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from wds_pipes.core.counts import Lack
from wds_pipes.core.lane import Lane
from wds_pipes.core.options import check_choice
from wds_pipes.core.running import Mark
from wds_pipes.core.stage import Stage
from wds_pipes.core.state import damaged
from wds_pipes.core.suggest import nearest
from wds_pipes.core.tolerant import OnError, Tolerant
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, ShardError, ShardWarning
from wds_pipes.io.urls import redact
from wds_pipes.stages.load_tar import LoadTar
from wds_pipes.stages.shard_list import PartOfShard, ShardList
from wds_pipes.tar.keys import KeySplit, has_field, lacks, splitter, with_field
from wds_pipes.tar.members import EMPTY, END, MARK, TarMember, half_sample

Sample = dict[str, Any]

ENOUGH, VARIED = 3, 4
_MOST_MET = 200  # how many names of fields are kept for messages


@dataclass(slots=True)
class _Seen:
    """What was seen of a shard up to a place.

    Attributes:
        fields: all fields of its samples, see ``tar.keys``.
        alike: how many whole samples it had, up to ENOUGH, if all have the same fields; VARIED if
            they differ.
        lost: 1: samples were lost, or were not counted; 2: also, what follows may lie inside
            another member.
    """

    fields: str = ""
    alike: int = 0
    lost: int = 0

    @classmethod
    def parse(cls, text: str) -> _Seen:
        """Return the value that ``str`` wrote."""
        if not text:
            return cls()
        if len(text) < 2 or text[0] not in "01234" or text[1] not in "012":
            raise damaged(f"group_by_key cannot stand at shard={text!r:.80}")
        return cls(text[2:], int(text[0]), int(text[1]))

    def __str__(self) -> str:
        return f"{self.alike}{self.lost}{self.fields}"


class GroupByKey(Tolerant[Sample]):
    """Group neighbouring members with the same key into samples (functional name:
    ``group_by_key``).

    A sample is a dict ``{"__key__": str, "__url__": str, field: bytes, ...}`` with the fields in
    the order of the tar. By default the key of ``dir/a.seg.png`` is ``dir/a``, and its field is
    ``seg.png`` (in lower case). Hidden files, names without a dot and a top-level ``__meta__``
    belong to no sample. Members are grouped only within one shard.

    An incomplete sample is never yielded as a whole one. A sample next to a damaged place is
    dropped. Some places are doubtful: the end of a shard without an end-of-archive mark, and an end
    mark inside a shard, which may be a zeroed page. A sample next to such a place is yielded only
    if it has the same fields as the samples before it in the shard. If it has not, or if there is
    no sample to compare it with, ``load_tar(on_truncated=..., on_error=...)`` decide: by default an
    error is raised. At a proper end, a last sample that lacks a field is yielded. It causes a
    ShardWarning if there are at least three samples before it, all with the same fields.

    Some damage cannot be seen in a tar: zeros up to a proper end, missing blocks, changed bytes in
    data or in long names. ``samples_per_shard=`` or an index reveals missing samples, and the MD5s
    of an index (``open_shards(verify=...)``) reveal all such damage.

    Args:
        source: a pipe of members: ``load_tar()``.
        fields: keep only these fields. The data of others is skipped, and not read where the stream
            can seek. A sample with none of these fields is not yielded, and is counted as filtered.
            If this happens to all samples of an epoch (of all lanes of a rank together), an error
            is raised. At the end, a warning names each field that no sample had, if a field of
            nearly the same name was left out (``jpeg`` for ``jpg``).
        key_split: ``"first-dot"``, ``"last-dot"``, or a function from the name of a member to
            (key, field), or to None to leave the member out.
        on_repeated_key: what to do with a key that comes again later in the same shard, so that its
            sample would be yielded in several parts: ``"raise"``, ``"warn"`` (ShardWarning) or
            ``"ignore"``. Sort such a shard. After a resume, only the keys of the shard from there
            on are compared.
        on_error: what to do with a sample that has a field twice, or is next to a damaged place of
            the shard: ``"raise"``, or ``"skip"`` it and count it.
        max_errors: with ``"skip"``, how many samples may be skipped in an epoch; None: no limit.

    Raises:
        SampleError: during iteration, with ``.url``, ``.key`` and ``.offset``, for a field that
            comes twice or a repeated key. At the end of an epoch, without these attributes, if no
            sample had one of ``fields``: the message lists the fields that were seen, and the state
            stays at the beginning of the epoch.

    Checkpoint: where the first member of the next sample starts, and the names of the fields in its
    shard, up to 256 characters (if there are more, doubtful samples are refused). A resume reads
    this one member again.
    """

    @dataclass(slots=True)
    class At:
        skipped: int = 0
        filtered: int = 0
        # how many samples of the shard came before this place, if the source gave a range of its
        # samples
        number: int = 0
        # what was seen of the shard up to here, see _Seen; one str, since a mark is taken for each
        # item
        shard: str = ""

    keeps_count = True
    gives = "samples"
    ends_reading = True
    order_options = ("fields", "key_split")

    def __init__(
        self,
        source: Stage[Any],
        *,
        fields: Iterable[str] | None = None,
        key_split: KeySplit = "first-dot",
        on_repeated_key: str = "raise",
        on_error: OnError = "raise",
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
        # While running, where a resume opens the source: the offset of a member of its current
        # shard if that is enough, else a mark.
        self._offset = -1
        self._before: Mark | None = None
        self._seen = _Seen()  # while running, at.shard as values
        self._tar: LoadTar | None = None  # while running, the stage that the members come from
        self._resumed = False  # while running, whether it was opened at a mark
        self._fits = False  # while running, whether a sample had one of the fields to keep
        self._met: set[str] = set()  # while running, fields of the samples, if not all are kept
        # while running, the last doubtful place: its offset, its kind, the fields of the shard up
        # to it
        self._doubt: tuple[int, bytes, str] = -1, MARK, ""

    def open(self, lane: Lane, mark: Mark | None = None) -> Stage[Sample]:
        group = copy.copy(self)
        if isinstance(self.source, LoadTar):
            group.source = load = copy.copy(self.source)
            load.named = False
            load.want = self._wants(set(self.fields)) if self.fields else None
        running = super(GroupByKey, group).open(lane, mark)
        stage = running.source
        while stage is not None and not isinstance(stage, LoadTar):
            stage = stage.source
        if stage is not None:
            stage.doubts = True
            if isinstance(stage.root, ShardList):
                stage.root.counted = True
        running._tar = stage  # type: ignore[attr-defined]
        running._resumed = mark is not None  # type: ignore[attr-defined]
        return running

    def _wants(self, fields: set[str]) -> Callable[[str], bool]:
        split = splitter(self.split)

        def want(name: str) -> bool:
            parts = split(name)
            return parts is not None and parts[1].lower() in fields

        return want

    def run(self) -> Iterator[Sample]:
        source = self.source
        assert source is not None
        split, by_stem, wanted = (
            splitter(self.split),
            self.split == "first-dot",
            set(self.fields) if self.fields else None,
        )
        at = self.at
        here = self._seen = _Seen.parse(at.shard)
        mark = None if isinstance(source, LoadTar) else source.mark
        names: dict[str, str] = {}  # from a field as it is written to its name in lower case: one str for all samples
        seen: set[str] = set()  # the keys of this shard
        sample: Sample | None = None
        key = stem = url = shown = ""
        last, length = -1, 0
        bad = 0  # the sample being built is next to a doubtful place (1), or will not be yielded (2)
        suspect = 0  # the next sample may have lost its first members (1), or has lost them (2)
        # compare whole samples, except those with this many entries: they have the same fields as
        # those before them
        look, width = True, 0
        simple = False  # whole samples are yielded as they are
        flags = {} if self.lane.padding is None else {"__padding__": self.lane.padding}
        part: PartOfShard | None = None
        first = True
        passing = False  # all requested samples of this shard have come
        before: Mark | None = None if mark is None else mark()
        for member in source.items:
            try:
                shard, name, data, offset = member
            except (TypeError, ValueError):
                raise _no_member(member) from None
            if (shard is not url and shard != url) or offset <= last:
                if mark and not isinstance(member, TarMember):
                    raise _no_member(member)
                ready = self._last(sample, bad, part)
                if not first:
                    self._end_shard(part)
                if ready is not None:
                    self._offset, self._before = offset if mark is None else -1, before
                    yield ready
                # without the attributes that a URL may carry for the stages
                sample, key, stem, url, shown = None, "", "", shard, str(shard)
                part = shard if isinstance(shard, PartOfShard) else None
                simple = wanted is None and part is None
                here = self._seen  # a new object if a shard has ended
                if part is None:
                    at.number = 0
                elif first and self._resumed and offset and not at.number:
                    # the saved pipe did not know samples_per_shard
                    here.lost = max(here.lost, 1)
                    at.shard = str(here)
                first = passing = False
                bad = suspect = 0
                look, width = self._look(wanted)
                seen.clear()
                names.clear()
            last = offset
            if passing:
                continue
            # The common case first: the key of the sample, followed by a known field.
            field = names.get(name[length:]) if stem and name[:length] == stem else None
            if field is None:
                parts = split(name) if name else None
                if parts is None:
                    if not name:  # a gap or a doubtful place, see tar.reader; the sample may continue after it
                        stem = ""
                        if data in (MARK, END):
                            bad, suspect = bad or 1, suspect or 1
                            self._doubt = offset, data, here.fields
                        elif data != EMPTY:
                            bad = suspect = 2
                            here.lost = max(here.lost, 1 if data is None else 2)
                            at.shard = str(here)
                            names.clear()
                    if mark and (suspect != 1 or (not name and data == END)):
                        before = mark()
                    continue
                if parts[0] != key or sample is None:
                    if bad:
                        bad = self._judge(sample, bad, part)
                    if look and sample is not None and len(sample) != width and not bad:
                        look, width = self._compare(sample, wanted)
                    ready = sample if simple and not bad else self._finish(sample, bad, part)
                    if ready is not None:
                        # If the next sample is doubtful, a resume must meet the doubtful place
                        # again.
                        self._offset, self._before = -1 if mark else self._doubt[0] if suspect else offset, before
                        yield ready
                    if part is not None and self.at.number >= part.stop:
                        self._leave(part, offset)
                        sample, stem, passing = None, "", True
                        continue
                    key, bad, suspect = parts[0], suspect, 0
                    if by_stem:
                        stem, length = f"{key}.", len(key) + 1
                    sample = {"__key__": key, "__url__": shown, **flags}
                    if key in seen:
                        self._repeated(sample, offset)
                    seen.add(key)
                elif suspect:
                    suspect = 0
                field = names.get(parts[1])
                if field is None:
                    field = parts[1].lower()
                    if here.lost == 2 and not has_field(here.fields, field):
                        bad = 2
                    else:
                        if len(names) > 4096:
                            names.clear()
                        names[parts[1]] = field
                        if wanted is not None and len(self._met) < _MOST_MET:
                            self._met.add(field)
                        if not has_field(here.fields, field):
                            here.fields = with_field(here.fields, field)
                            if here.alike:
                                here.alike, look = VARIED, False
                            at.shard = str(here)
            if field in sample:  # type: ignore[operator]
                if bad != 2:
                    self._twice(sample, field, name, offset)  # type: ignore[arg-type]
                bad = 2
            elif wanted is None or field in wanted:
                sample[field] = data  # type: ignore[index]
            if mark and suspect != 1:
                before = mark()
        ready = self._last(sample, bad, part)
        if not first:
            self._end_shard(part)
        if self._fits:
            self._tell_misspelt()
        self._offset, self._before = -1, source.mark()
        if ready is not None:
            yield ready

    def _tell_misspelt(self) -> None:
        """Warn of each field to keep that no sample had, if a field of nearly the same name was
        left out.
        """
        lack = self.lack
        for field in sorted(lack.wanted - self._met) if len(self._met) < _MOST_MET else ():
            if (found := nearest(field, lack.left_out)) is not None:
                warnings.warn(
                    f"no sample had {field!r} of group_by_key(fields=...). Did you mean {found!r}, which is left out?",
                    stacklevel=2,
                )

    def _look(self, wanted: set[str] | None) -> tuple[bool, int]:
        """Return whether to compare the next whole sample with those before it in its shard, and
        the number of entries at which no comparison is needed.
        """
        here = self._seen
        if here.alike != ENOUGH:
            return here.alike != VARIED, 0
        return True, sum(wanted is None or field in wanted for field in here.fields.split(" ")) + 2 + (
            self.lane.padding is not None
        )

    def _compare(self, sample: Sample, wanted: set[str] | None) -> tuple[bool, int]:
        """Note whether the whole samples of a shard have the same fields, and return the values of
        ``_look``.
        """
        here = self._seen
        here.alike = here.alike + 1 if here.alike < ENOUGH and not lacks(sample, here.fields, wanted) else VARIED
        self.at.shard = str(here)
        return self._look(wanted)

    def _judge(self, sample: Sample | None, bad: int, part: PartOfShard | None) -> int:
        """Return 0 if a sample next to a doubtful place is whole. If it may be incomplete, raise an
        error or return 2.
        """
        if sample is None or bad != 1:
            return bad
        at, here, (offset, place, fields) = self.at, self._seen, self._doubt
        # the first sample of a shard: the next one is compared with it
        alone = not here.alike and place == MARK and fields and not here.lost
        if alone or (
            here.alike and not lacks(sample, here.fields, self.fields) and (place == END or here.fields == fields)
        ):
            return 0
        if part is None or at.number >= part.start:
            assert self._tar is not None
            self._tar.refuse(half_sample(sample["__url__"], sample["__key__"], offset, place), cut=place == END)
        here.lost = max(here.lost, 1)
        at.shard = str(here)
        return 2

    def _last(self, sample: Sample | None, bad: int, part: PartOfShard | None) -> Sample | None:
        """Return the last sample of a shard if it will be yielded; otherwise count it and return
        None.
        """
        bad = self._judge(sample, bad, part)
        ready = self._finish(sample, bad, part)
        if (
            ready is not None
            and self._seen.alike == ENOUGH
            and (missing := lacks(ready, self._seen.fields, self.fields))
        ):
            message = (
                f"the last sample of shard {redact(ready['__url__'])}, {ready['__key__']!r}, "
                f"has no {', '.join(missing)}, unlike all samples before it. If it "
                "should have it, the end of the shard is damaged (a zeroed page looks like "
                "its end): fetch the shard again."
            )
            warnings.warn(message, ShardWarning, stacklevel=2)
        return ready

    def _finish(self, sample: Sample | None, bad: int, part: PartOfShard | None) -> Sample | None:
        """Return the sample if it will be yielded; otherwise count it and return None."""
        if sample is None:
            return None
        if part is not None:
            self.at.number += 1
            if self.at.number <= part.start:
                return None
        if bad:
            self.at.skipped += 1
            return None
        if self.fields is not None:
            if all(name[:2] == "__" for name in sample):
                self.at.filtered += 1
                return None
            self._fits = True
        return sample

    @property
    def lack(self) -> Lack:
        wanted = frozenset(self.fields or ())
        return Lack(self.at.filtered, self._fits or self.fields is None, wanted, frozenset(self._met - wanted))

    def _leave(self, part: PartOfShard, offset: int) -> None:
        """Leave a shard, of which all requested samples have come and another one follows. Raise
        ShardError if the shard should not have that one.
        """
        if part.stop == part.of:
            url = redact(part)
            said = f"the {part.of} that samples_per_shard or the index says"
            raise ShardError(
                f"shard {url} has more samples than {said}, from byte {offset} on.", url=url, offset=offset
            )
        if isinstance(self.source, LoadTar):
            self.source.leave = True

    def _end_shard(self, part: PartOfShard | None) -> None:
        """End a shard: check that it had the expected number of samples, unless some were lost at
        damage that was skipped.
        """
        at = self.at
        number, lost = at.number, self._seen.lost
        at.number, at.shard, self._seen = 0, "", _Seen()
        if part is not None and number < part.stop and not lost:
            url = redact(part)
            raise ShardError(
                f"shard {url} has only {plural(number, 'sample')}, and samples_per_shard or "
                f"the index says {part.of}. Correct it, or make the index again.",
                url=url,
            )

    def _twice(self, sample: Sample, field: str, name: str, offset: int) -> None:
        """Raise the error for a field that a sample has twice, unless the sample may be skipped."""
        url, key = redact(sample["__url__"]), sample["__key__"]
        message = (
            f"sample {key!r} of shard {url} has field {field!r} twice (again at byte {offset}, as "
            f"{name!r}). Rename or remove one."
        )
        self.skip(SampleError(message, url=url, key=key, offset=offset))
        self.at.skipped -= 1  # _finish counts the sample, once

    def _repeated(self, sample: Sample, offset: int) -> None:
        """Raise or warn because of a key that was seen before in this shard."""
        url = redact(sample["__url__"])
        message = (
            f"key {sample['__key__']!r} comes again in shard {url} at byte {offset}, apart "
            "from its other members, so that its sample is in pieces. Sort the "
            "shard by name, or pass on_repeated_key='ignore' to take the pieces as samples. "
            "(A resume from here on does not see what came before.)"
        )
        if self.on_repeated_key == "raise":
            raise SampleError(message, url=url, key=sample["__key__"], offset=offset)
        if self.on_repeated_key == "warn":
            warnings.warn(message, ShardWarning, stacklevel=2)

    def mark(self) -> Mark:
        at = self.at
        if self._offset >= 0:
            return (at.skipped, at.filtered, at.number, at.shard), self.source.mark_at(self._offset)  # type: ignore[union-attr]
        return self._own(at), self._before or self.source.mark()  # type: ignore[union-attr]


def _no_member(item: object) -> TypeError:
    return TypeError(
        f"group_by_key() takes the members of tars, and its source gave {item!r:.200}: put .load_tar() before it"
    )
