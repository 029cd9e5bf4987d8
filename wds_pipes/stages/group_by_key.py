"""GroupByKey: group members into samples."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from wds_pipes.core.chain import Chain
from wds_pipes.core.counts import Lack
from wds_pipes.core.lane import Lane
from wds_pipes.core.numbered import Numbered
from wds_pipes.core.options import check_choice
from wds_pipes.core.running import Mark
from wds_pipes.core.stage import Stage
from wds_pipes.core.tolerant import OnError, Tolerant
from wds_pipes.errors import ShardWarning
from wds_pipes.stages.fields import read_names
from wds_pipes.stages.load_tar import LoadTar
from wds_pipes.stages.numbered_samples import numbered_samples
from wds_pipes.stages.open_shards import OpenShards
from wds_pipes.stages.sample_errors import (
    check_enough,
    check_more,
    check_order,
    field_twice,
    last_lacks,
    no_member,
    report_repeated,
    unknown_shard,
)
from wds_pipes.stages.sample_fields import VARIED, Doubt, KeptFields, SeenFields
from wds_pipes.stages.shard_ref import ShardRef
from wds_pipes.tar.keys import KeySplit, check_key_split, has_field, is_metadata, splitter, with_field
from wds_pipes.tar.members import EMPTY, END, MARK, TarMember, half_sample

Sample = dict[str, Any]


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
    of an index (``wds-pipes verify``) reveal all such damage.

    Args:
        source: a pipe of members: ``load_tar()``.
        fields: keep only these fields, as in ``["jpg;png", "cls"]``. The data of others is skipped
            (not read where the stream can seek). A sample with none of these fields is not yielded,
            and is counted as filtered. If this happens to all samples of an epoch (of all lanes of
            a rank together), an error is raised. At the end, a warning names each field that no
            sample had, if a field of nearly the same name was left out (``jpeg`` for ``jpg``).
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
            comes twice, a reserved name (``__key__``) or a repeated key. At the end of an epoch,
            without these attributes, if no sample had one of ``fields``: the message lists the
            fields that were seen, and the state stays at the beginning of the epoch.

    Checkpoint: where the first member of the next sample starts, and the names of the fields in its
    shard, up to 256 characters (if there are more, doubtful samples are refused). A resume reads
    this one member again.
    """

    @dataclass(slots=True)
    class At:
        skipped: int = 0
        filtered: int = 0
        # how many samples of the shard came before this place, if its number of samples is known
        number: int = 0
        # what was seen of the shard up to here, see SeenFields; one str, for cheap marks
        shard: str = ""

    tallies = ("skipped", "filtered")
    keeps_count = True
    scope = "window"
    gives = "samples"
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
        check_order(source)
        self.fields = None if fields is None else read_names("fields", fields)
        self.split = key_split
        name = "callable" if callable(check_key_split(key_split)) else str(key_split)
        self.key_split = None if name == "first-dot" else name
        self.on_repeated_key = check_choice("on_repeated_key", on_repeated_key, "raise", "warn", "ignore")
        # While running, where a resume opens the source, if at a member of its shard.
        self._offset = -1
        self._seen = SeenFields()  # while running, at.shard as values
        self._kept = KeptFields(self.fields)
        # while running, the steps that the members come from; None: there is no such step
        self._tar: LoadTar | None = None
        self._opened: OpenShards | None = None
        self._resumed = False  # while running, whether it was opened at a mark
        self._read = False  # while running, whether all shards were read
        self._doubt = Doubt(-1, MARK, "")  # while running, the last doubtful place

    def open(self, lane: Lane, mark: Mark | None = None) -> Stage[Sample]:
        group = copy.copy(self)
        group._kept = KeptFields(self.fields)
        group._resumed = mark is not None
        if isinstance(self.source, LoadTar):
            group.source = load = copy.copy(self.source)
            load.named = False
            load.want = self._kept.wants(self.split)
        running = super(GroupByKey, group).open(lane, mark)
        assert isinstance(running, GroupByKey)
        assert running.source is not None
        for step in reversed(Chain(running.source).steps):
            if isinstance(step, LoadTar) and running._tar is None:
                running._tar = step
                step.doubts = True
            elif isinstance(step, OpenShards):
                running._opened = step
                break
        return running

    def numbered(self, lane: Lane, mark: Mark | None) -> Numbered[Sample] | None:
        return None if self.fields is not None else numbered_samples(self, self.split, lane, mark)

    def run(self) -> Iterator[Sample]:
        # One loop over the members, since a call for each member would cost more than the rest of
        # the step. For each member:
        # 1. The first member of another shard: end the sample and the shard before it.
        # 2. The key of the sample and a known field: nearly all members; go to 5.
        # 3. No member of a sample: note a gap or a doubtful place, or leave it out.
        # 4. Another key: yield the sample before it and begin one. A new field: note it.
        # 5. Add the field to the sample.
        source = self.source
        assert source is not None
        at, kept, split, by_stem = self.at, self._kept, splitter(self.split), self.split == "first-dot"
        wanted = kept.names
        here = self._seen = SeenFields.parse(at.shard)
        mark = None if isinstance(source, LoadTar) else source.mark
        names: dict[str, str] = {}  # from a field as it is written to its name in lower case: one str for all samples
        seen: set[str] = set()  # the keys of this shard
        sample: Sample | None = None
        key = stem = shown = ""
        url: object = None
        last, length = -1, 0
        bad = 0  # the sample being built is next to a doubtful place (1), or will not be yielded (2)
        suspect = 0  # the next sample may have lost its first members (1), or has lost them (2)
        # compare whole samples, except those with this many entries: they have the usual fields
        look, width = True, 0
        simple = False  # whole samples are yielded as they are
        flags = {} if self.lane.padding is None else {"__padding__": self.lane.padding}
        others = 2 + len(flags)  # the entries of a sample that are not fields
        ref: ShardRef | None = None  # of this shard, if its number of samples is known
        stop = sys.maxsize  # the number of the sample at which to leave the shard
        first = True
        passing = False  # all requested samples of this shard have come
        left = False  # and no more members of it will come: the next one may be of another part of it
        before: Mark | None = None if mark is None else mark()
        for member in source.items:
            try:
                shard, name, data, offset = member
            except (TypeError, ValueError):
                raise no_member(member) from None
            if (shard is not url and shard != url) or offset <= last or left:  # 1
                if mark and not isinstance(member, TarMember):
                    raise no_member(member)
                ready = self._last(sample, bad, ref)
                if not first:
                    self._end_shard(ref)
                if ready is not None:
                    self._offset, self.earlier = offset if mark is None else -1, before
                    yield ready
                sample, key, stem, url, shown = None, "", "", shard, str(shard)
                ref = self._ref_of(shard)
                stop = sys.maxsize if ref is None or ref.stop is None else ref.stop
                simple = wanted is None and ref is None
                here = self._seen  # a new object if a shard has ended
                if ref is None:
                    at.number = 0
                elif ref.begin and offset >= ref.begin and not at.number:  # what is before it was not read
                    at.number, here.partial = ref.start - 1, True
                    at.shard = str(here)
                elif first and self._resumed and at.shard and not at.number:
                    # samples came before, and the saved pipe did not know samples_per_shard
                    here.lost = max(here.lost, 1)
                    at.shard = str(here)
                first = passing = left = False
                bad = suspect = 0
                look, width = here.compares(wanted, others)
                seen.clear()
                names.clear()
            last = offset
            if passing:
                continue
            # 2. The common case first: the key of the sample, followed by a known field.
            field = names.get(name[length:]) if stem and name[:length] == stem else None
            if field is None:
                parts = split(name) if name else None
                if parts is None:  # 3
                    if not name:  # a gap or a doubtful place, see tar.reader; the sample may continue after it
                        stem = ""
                        if data in (MARK, END):
                            if here.partial:
                                look, width = self._see(str(shard), offset, others)
                            bad, suspect = bad or 1, suspect or 1
                            self._doubt = Doubt(offset, data, here.fields)
                        elif data != EMPTY:
                            bad = suspect = 2
                            here.lost = max(here.lost, 1 if data is None else 2)
                            at.shard = str(here)
                            names.clear()
                    if mark and (suspect != 1 or (not name and data == END)):
                        before = mark()
                    continue
                if parts[0] != key or sample is None:  # 4
                    if bad:
                        bad = self._judge(sample, bad, ref)
                    if look and sample is not None and len(sample) != width and not bad:
                        here.add(sample, wanted)
                        at.shard = str(here)
                        look, width = here.compares(wanted, others)
                    ready = sample if simple and not bad else self._finish(sample, bad, ref)
                    if ready is not None:
                        # If the next sample is doubtful, a resume must meet the doubtful place
                        # again.
                        self._offset, self.earlier = -1 if mark else self._doubt.offset if suspect else offset, before
                        yield ready
                    if ref is not None and at.number >= stop:
                        check_more(ref, offset)
                        if isinstance(source, LoadTar):
                            source.leave = left = True
                        sample, stem, passing = None, "", True
                        continue
                    key, bad, suspect = parts[0], suspect, 0
                    if by_stem:
                        stem, length = f"{key}.", len(key) + 1
                    sample = {"__key__": key, "__url__": shown, **flags}
                    if key in seen:
                        report_repeated(sample, offset, self.on_repeated_key)
                    seen.add(key)
                elif suspect:
                    suspect = 0
                field = names.get(parts[1])
                if field is None:
                    field = parts[1].lower()
                    if is_metadata(field):  # refused below
                        sample.setdefault(field, None)
                    elif here.lost == 2 and not has_field(here.fields, field):
                        bad = 2
                    else:
                        if len(names) > 4096:
                            names.clear()
                        names[parts[1]] = field
                        kept.meet(field)
                        if not has_field(here.fields, field):
                            here.fields = with_field(here.fields, field)
                            if here.alike:
                                here.alike, look = VARIED, False
                            at.shard = str(here)
            if field in sample:  # type: ignore[operator]  # 5
                if bad != 2:
                    self._twice(sample, field, name, offset)  # type: ignore[arg-type]
                bad = 2
            elif wanted is None or field in wanted:
                sample[field] = data  # type: ignore[index]
            if mark and suspect != 1:
                before = mark()
        ready = self._last(sample, bad, ref)
        if not first:
            self._end_shard(ref)
        self._read = True
        if kept.found:
            kept.tell_misspelt()
        self._offset, self.earlier = -1, source.mark()
        if ready is not None:
            yield ready

    def _ref_of(self, url: object) -> ShardRef | None:
        """Return the reference to the shard whose members have this ``url``; None if its number of
        samples is unknown.

        Raises:
            TypeError: the shard cannot be found, although ShardList knows the numbers of samples.
        """
        ref = url if isinstance(url, ShardRef) else None  # from an opening step of the user's
        if ref is None and self._opened is not None:
            ref = self._opened.ref_of(str(url))
        if ref is None and Chain(self).root.sample_counts is not None:
            raise unknown_shard(str(url))
        return ref if ref is not None and ref.stop is not None else None

    def _judge(self, sample: Sample | None, bad: int, ref: ShardRef | None) -> int:
        """Return 0 if a sample next to a doubtful place is whole. If it may be incomplete, raise an
        error or return 2.
        """
        if sample is None or bad != 1:
            return bad
        at, here, doubt = self.at, self._seen, self._doubt
        if here.is_whole(sample, doubt, self.fields):
            return 0
        if ref is None or at.number >= ref.start:
            assert self._tar is not None
            error = half_sample(sample["__url__"], sample["__key__"], doubt.offset, doubt.place)
            self._tar.refuse(error, cut=doubt.place == END)
        here.lost = max(here.lost, 1)
        at.shard = str(here)
        return 2

    def _last(self, sample: Sample | None, bad: int, ref: ShardRef | None) -> Sample | None:
        """Return the last sample of a shard if it will be yielded; else count it."""
        bad = self._judge(sample, bad, ref)
        ready = self._finish(sample, bad, ref)
        if ready is not None and self._seen.partial and self._seen.missing(ready, self.fields):
            self._see(ready["__url__"], sys.maxsize, 0)
        if ready is not None and (missing := self._seen.missing(ready, self.fields)):
            warnings.warn(last_lacks(ready, missing), ShardWarning, stacklevel=2)
        return ready

    def _finish(self, sample: Sample | None, bad: int, ref: ShardRef | None) -> Sample | None:
        """Return the sample if it will be yielded; otherwise count it and return None."""
        if sample is None:
            return None
        if ref is not None:
            self.at.number += 1
            if self.at.number <= ref.start:
                return None
        if bad:
            self.at.skipped += 1
            Tolerant.happened += 1
            return None
        if self.fields is not None:
            if all(map(is_metadata, sample)):
                self.at.filtered += 1
                return None
            self._kept.found = True
        return sample

    def lack(self, before: Lack) -> Lack:
        found = (
            self._kept.met
            or self._resumed
            or not self._read
            or (False if getattr(Chain(self).root, "empty_check", False) else None)
        )
        return self._kept.lack(self.at.filtered)._replace(skipped=super().lack(before).skipped, found=found)

    def _see(self, url: str, stop: int, others: int) -> tuple[bool, int]:
        """See the fields of the members of a shard before ``stop``, which were not all read. Return
        what ``SeenFields.compares`` returns.
        """
        here, wanted = self._seen, self._kept.names
        if self._opened is not None:
            here.see(self._opened.members_of(url), splitter(self.split), wanted, stop)
            self.at.shard = str(here)
        return here.compares(wanted, others)

    def _end_shard(self, ref: ShardRef | None) -> None:
        """End a shard: check that it had the expected number of samples, unless some were lost at
        damage that was skipped.
        """
        at = self.at
        number, lost = at.number, self._seen.lost
        at.number, at.shard, self._seen = 0, "", SeenFields()
        if ref is not None and not lost:
            check_enough(ref, number)

    def _twice(self, sample: Sample, field: str, name: str, offset: int) -> None:
        """Raise the error for a field that a sample has twice, unless the sample may be skipped."""
        self.skip(field_twice(sample, field, name, offset))
        self.at.skipped -= 1  # _finish counts the sample, once

    def mark(self) -> Mark:
        at = self.at
        if self._offset >= 0:
            return (at.skipped, at.filtered, at.number, at.shard), self.source.mark_at(self._offset)  # type: ignore[attr-defined]
        return super().mark()
