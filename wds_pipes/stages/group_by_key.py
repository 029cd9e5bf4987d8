"""GroupByKey: group members into samples."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

from wds_pipes.core.chain import Chain
from wds_pipes.core.counts import Lack
from wds_pipes.core.occurrences import occurring
from wds_pipes.core.options import check_choice, nearest
from wds_pipes.core.stage import END, Mark, OpensAnywhere, SamplePlace, Stage, functional_name
from wds_pipes.core.tolerant import OnError, Tolerant
from wds_pipes.errors import SampleError, mended
from wds_pipes.io.urls import redact
from wds_pipes.stages.fields import Sample, read_names
from wds_pipes.stages.load_tar import LoadTar, OpenTar
from wds_pipes.stages.shard_source import ShardRef, check_enough, check_more, ref_of
from wds_pipes.tar.grouping import GroupedShard, Grouping, SuspectSampleError, warn_of
from wds_pipes.tar.keys import KeySplit, check_key_split, is_metadata, kept, matches, wants
from wds_pipes.tar.reader import RepeatedKeyError, TarMember

_MOST_SEEN = 200  # how many names of fields are kept for messages


class GroupByKey(OpensAnywhere, Tolerant[Sample]):
    """Group neighbouring members with the same key into samples (functional name:
    ``group_by_key``).

    A sample is a dict ``{"__key__": str, "__url__": str, field: bytes, ...}`` with the fields in
    the order of the tar. By default the key of ``dir/a.seg.png`` is ``dir/a``, and its field is
    ``seg.png`` (in lower case). Hidden files, names without a dot and a top-level ``__meta__``
    belong to no sample. If a shard has files, and none makes a sample, a ShardWarning names the
    first one. Members are grouped only within one shard.

    A sample next to a damaged place, and the last one of a shard that is cut, may be incomplete: it
    is dropped and counted. Zeros in place of the last members of a shard look like its end. So the
    last sample of a shard is suspect if it lacks fields that all samples before it have, at least
    8: it is a ShardWarning, or with ``on_error="skip"`` dropped and counted. Some damage cannot be
    seen in a tar: zeros in place of whole samples at its end, missing blocks, changed bytes in data
    or in long names. ``samples_per_shard=`` or an index reveals missing samples, and the MD5s of an
    index (``wds-pipes verify``) reveal all such damage.

    Args:
        source: a pipe of members: ``load_tar()``.
        fields: keep only these fields, as in ``["jpg;png", "cls"]``; with ``"*.jpg"``, all that
            match. The data of others is skipped (not read where the stream can seek). A sample
            with none of these fields is not yielded, and is counted as filtered. If this happens to
            all samples of an epoch (of all lanes of a rank together), an error is raised. At the
            end, a warning names each field that no sample had, if a field of nearly the same name
            was left out (``jpeg`` for ``jpg``).
        key_split: ``"first-dot"``, ``"last-dot"``, ``"folder"`` (the first directory of
            ``run7/cam/0.jpg`` is the key, and the path below it the field, ``cam/0.jpg``), or a
            function from the name of a member to (key, field), or to None to leave the member out.
        on_repeated_key: what to do with a key that comes again later in the same shard, so that its
            sample would be yielded in several parts: ``"raise"``, ``"warn"`` (ShardWarning) or
            ``"ignore"``. Sort such a shard. After a resume, only the keys of the shard from there
            on are compared.
        on_error: what to do with a sample that has a field twice, or is next to a damaged place of
            the shard: ``"raise"``, or ``"skip"`` it and count it; None: as
            ``ShardList(on_error=...)`` says.
        max_errors: with ``"skip"``, how many samples may be skipped in an epoch; None: no limit.

    Raises:
        SampleError: during iteration, with ``.url``, ``.key`` and ``.offset``, for a field that
            comes twice, a reserved name (``__key__``) or a repeated key. At the end of an epoch,
            without these attributes, if no sample had one of ``fields``, or no file makes a sample:
            the message lists the fields that were seen, or names the first file, and the state
            stays at the beginning of the epoch.

    Checkpoint: where the first member of the next sample starts. A resume reads this one member
    again.
    """

    @dataclass(slots=True)
    class At:
        skipped: int = 0
        filtered: int = 0
        # how many samples of the shard came before this place, if its number of samples is known
        number: int = 0
        # 1: this number is not known, since samples were lost at damage, or were not counted
        uncounted: int = 0
        # if the last sample of the shard may be skipped: which fields the samples before this place
        # have, as the ``text`` of ``Usual``
        usual: str = ""

    tallies = ("skipped", "filtered")
    keeps_count = True
    scope = "window"
    _foreseen = True
    gives = "samples"
    _tars: LoadTar | _Tars  # while running
    order_options = ("fields", "key_split")

    def __init__(
        self,
        source: Stage[Any],
        *,
        fields: Iterable[str] | None = None,
        key_split: KeySplit = "first-dot",
        on_repeated_key: str = "raise",
        on_error: OnError | None = None,
        max_errors: int | None = None,
    ) -> None:
        super().__init__(source, on_error, max_errors)
        check_order(source)
        self.fields = None if fields is None else read_names("fields", fields)
        self.split = key_split
        name = "callable" if callable(check_key_split(key_split)) else str(key_split)
        self.key_split = None if name == "first-dot" else name
        self.on_repeated_key = check_choice("on_repeated_key", on_repeated_key, "raise", "warn", "ignore")
        # while running
        self._grouping = Grouping()
        self._shard = GroupedShard("")  # what was found of this shard
        self._ref: ShardRef | None = None  # of this shard, if its number of samples is known
        self._may_skip = False
        self._reported = False  # whether a fault of the sample that is read was reported
        self._read = False  # whether all shards were read
        self._found = False  # whether a sample had one of the fields to keep
        self._outside = ""  # the warning of the first shard with files of which none makes a sample

    def at_sample(self, at: Any, place: SamplePlace) -> Any:
        # no sample is skipped here, so the position does not say which fields the samples have
        return self.At(at.skipped, at.filtered, place.number)

    def problem(self, at: Any) -> str | None:
        return None if re.match(r"([0-8](\0|\Z)|\Z)", at.usual) else "it has no number of samples that were compared"

    def unforeseen(self) -> str | None:
        if self.fields is not None:
            return "group_by_key(fields=...) leaves out samples that have none of them: use select_fields()"
        return super().unforeseen()

    def run(self) -> Iterator[Sample]:
        source, padding = self.source, self.lane.padding
        self._tars = source if isinstance(source, LoadTar) else _Tars(source)
        self._grouping = Grouping(
            self.split,
            fields=self.fields,
            on_repeated_key=self.on_repeated_key,
            metadata=None if padding is None else {"__padding__": padding},
            report=self._report,
            lose=self._lose,
            suspect=self._suspect,
        )
        self._may_skip = self.may_skip
        return self._samples(self._tars)

    def _samples(self, load: LoadTar | _Tars) -> Iterator[Sample]:
        """Yield the samples of the tars that the step before this one opens."""
        with closing(load.tars(wants(self.fields, self.split), named=False)) as tars:
            for tar in tars:
                self._begin_shard(tar)
                if tar.members is not None:
                    samples = self._requested(self._grouping.samples(tar.members, self._shard), tar.offset)
                    if tar.ref.draw is not None and self.lane.occurrences:
                        samples = map(occurring, samples, repeat(tar.ref.draw))
                    yield from samples
                    self._end_shard()
        self._read = True
        if self.fields is not None and self._found:
            tell_misspelt(self.fields, self._grouping.names.values())

    def _begin_shard(self, tar: OpenTar) -> None:
        """Begin a shard, and to count its samples, if their number is known."""
        at, ref, resumed = self.at, None if tar.ref.stop is None else tar.ref, tar.resumed
        self._ref = ref
        if ref is None or not resumed:
            at.number = at.uncounted = 0
        if ref is not None and tar.part and not (at.number or at.uncounted):  # what is before it was not read
            at.number = ref.start - 1
        self._shard, at.usual = GroupedShard(tar.ref.url, at.usual if resumed else ""), ""

    def _end_shard(self) -> None:
        """End a shard; warn if none of its files makes a sample."""
        self._shard.stop = -1
        self.at.number = self.at.uncounted = 0
        if not self._outside and (warning := self._grouping.why_none(self._shard)) is not None:
            self._outside = str(warning)
            warnings.warn(warning, stacklevel=2)

    def _requested(self, samples: Iterator[Sample], offset: int) -> Iterator[Sample]:
        """Return those samples of a shard that were requested; reading begins at ``offset``."""
        ref = self._ref
        return samples if ref is None and self.fields is None else self._counted(samples, ref, offset)

    def _counted(self, samples: Iterator[Sample], ref: ShardRef | None, offset: int) -> Iterator[Sample]:
        at, shard = self.at, self._shard
        start, stop = (0, 0) if ref is None else (ref.start, ref.stop or 0)
        if ref is not None and at.number >= stop > 0:
            check_more(ref, offset)
            return
        for sample in samples:
            if ref is not None:
                if at.number >= stop:  # the last requested one was lost
                    if at.number == stop:
                        check_more(ref, shard.start)
                    return
                at.number += 1
                at.uncounted |= shard.gap
            requested, last = (ref is None or at.number > start) and self._keeps(sample), shard.stop < 0
            if last:
                self._check_count()
            elif ref is not None and at.number == stop:  # the rest of the shard is not read
                self._tars.check_same()
            if requested:
                yield sample
            if last:
                return
            if ref is not None and at.number >= stop:
                check_more(ref, shard.stop)
                return
        self._check_count()  # the last one was lost, or there is none

    def _keeps(self, sample: Sample) -> bool:
        """Return whether a sample has one of the fields to keep; count it if it has none."""
        if self.fields is None:
            return True
        if all(map(is_metadata, sample)):
            self.at.filtered += 1
            return False
        self._found = True
        return True

    def _check_count(self) -> None:
        """Check that a shard that has ended had the expected number of samples, unless some were
        lost at damage that was skipped.
        """
        at, ref = self.at, self._ref
        number, known = at.number, not (at.uncounted or self._shard.gap)
        at.number = at.uncounted = 0
        if ref is not None and known:
            check_enough(ref, number)

    def _report(self, error: SampleError) -> None:
        """Raise what is wrong with a sample, unless it may be skipped."""
        ref = self._ref
        if isinstance(error, RepeatedKeyError):
            raise error
        if not self._reported and (ref is None or ref.start <= self.at.number < (ref.stop or 0)):
            self.skip(error)
        self._reported = True

    def _suspect(self, error: SuspectSampleError) -> bool:
        """Skip the last sample of a shard, which is suspect, and return True; or warn of it."""
        ref = self._ref
        if ref is not None and not ref.start <= self.at.number < (ref.stop or 0):
            return False
        if not self.skips(error):
            warn_of(error, 3)
            return False
        self.count_skip(error)
        self._reported = True
        return True

    def _lose(self, _: Sample) -> None:
        """Count a sample that is dropped."""
        at, ref, reported = self.at, self._ref, self._reported
        self._reported = False
        if ref is not None:
            at.number += 1
            at.uncounted |= self._shard.gap
            if not ref.start < at.number <= (ref.stop or 0):
                return
        if not reported:
            at.skipped += 1
            self.lane.meters.skips += 1

    def lack(self, before: Lack) -> Lack:
        seen, wanted = self._grouping.names.values(), kept(self.fields or ())
        left_out = (field for field in seen if self.fields is not None and field not in wanted)
        may_be_empty = None if not getattr(Chain(self).root, "empty_check", False) else False
        return Lack(
            self.at.filtered,
            self.fields is None or self._found,
            frozenset(wanted),
            frozenset(islice(left_out, _MOST_SEEN)),
            super().lack(before).skipped,
            bool(seen) or self._resumed or not self._read or (False if self._outside else may_be_empty),
            self._outside,
        )

    def mark(self) -> Mark:
        # this is called for each sample
        at, shard = self.at, self._shard
        stop = shard.stop
        if stop < 0:
            if shard.start >= 0:  # this was the last one of its shard
                at.usual = ""
            return (at.skipped, at.filtered, at.number, at.uncounted, at.usual), self._tars.mark()
        usual = shard.usual.text if self._may_skip and shard.usual is not None else ""
        uncounted = 1 if self._ref is None else at.uncounted
        return (at.skipped, at.filtered, at.number, uncounted, usual), self._tars.mark_at(stop)


class _Tars:
    """The tars of the members that a step between ``load_tar`` and ``group_by_key`` yields, as
    ``LoadTar`` has them.
    """

    def __init__(self, source: Stage[Any]) -> None:
        self._source = source
        self._next: TarMember | None = None  # the member that comes next; None: there are no more
        self._before = source.mark()  # the position of the source before it

    def tars(self, want: Callable[[str], bool] | None = None, *, named: bool = True) -> Generator[OpenTar]:
        """Do what ``LoadTar.tars`` does; the members were read already."""
        known, resumed = Chain(self._source).root.epoch_order.sample_counts is not None, self._source._resumed
        self._take()
        while self._next is not None:
            ref, offset = ref_of(self._next.url), self._next.offset
            if ref.stop is None and known:
                raise unknown_shard(ref.url)
            members = self._of_shard(ref)
            begin = ref.begin or 0
            yield OpenTar(ref, members, resumed, begin if offset >= begin else 0, offset)
            resumed = False
            for _ in members:  # not all samples were requested
                pass

    def _of_shard(self, ref: ShardRef) -> Iterator[TarMember]:
        """Yield members until another shard begins."""
        last, url = -1, None
        while (member := self._next) is not None and member.offset > last:
            if member.url is not url and ref_of(member.url) != ref:
                return
            last, url = member.offset, member.url
            yield member
            self._take()

    def _take(self) -> None:
        """Take the member after the next one."""
        self._before = self._source.mark()
        member = next(self._source.items, END)
        if member is END:
            self._before, self._next = self._source.mark(), None
        elif isinstance(member, TarMember):
            self._next = member
        else:
            raise TypeError(
                f"group_by_key() takes the members of tars, and its source gave {type(member).__name__}: put "
                ".load_tar() before it"
            )

    def check_same(self) -> None:
        """``LoadTar`` compares each shard at its end."""

    def mark(self) -> Mark:
        return self._before

    def mark_at(self, offset: int) -> Mark:
        """Return the position before the member that was read last, at ``offset``."""
        return self._before


def unknown_shard(url: str) -> TypeError:
    """Return the error for members that do not know their shard, although its number of samples is
    known.
    """
    return TypeError(
        f"group_by_key() got members of {redact(url)} without the ShardRef of their shard, so it is not known which of "
        "its samples to yield. A step between open_shards() and group_by_key() changes the url of members: let it "
        "return member._replace(data=...), or put it after group_by_key(). A step that opens shards itself must yield "
        "members whose url is the ShardRef."
    )


def check_order(source: Stage[Any]) -> None:
    """Raise TypeError if a step takes the members of samples apart, between ``load_tar`` and
    ``group_by_key``.
    """
    names = [functional_name(type(step)) for step in reversed(Chain(source).steps)]
    names = names[: names.index("load_tar")] if "load_tar" in names else []
    if found := next((name for name in names if name in ("shuffle_buffer", "interleave_shards")), None):
        raise TypeError(f"{found}() takes the members of a sample apart: put it after group_by_key()")


def tell_misspelt(fields: Collection[str], seen: Collection[str]) -> None:
    """Warn of each field to keep that no sample had, if a field of nearly the same name was left
    out.

    Args:
        fields: the fields to keep.
        seen: all fields of the samples.
    """
    keep = kept(fields)
    left_out = {field for field in seen if field not in keep}
    for field in sorted(name for name in set(fields) if not any(matches(field, name) for field in seen)):
        if (meant := nearest(field, left_out)) is not None:
            warning = mended(
                UserWarning,
                f"no sample had field {field!r}",
                mend=f"Did you mean {meant!r}, which group_by_key(fields=...) leaves out?",
                mend_cli=f"Did you mean {meant!r}, which --fields leaves out?",
            )
            warnings.warn(warning, stacklevel=3)
