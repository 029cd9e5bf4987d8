"""Join: join the samples of several pipelines by their keys."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from wds_pipes.core.chain import PARTS, Chain, Composite
from wds_pipes.core.counts import COUNTED, Lack, logger, sum_counts
from wds_pipes.core.lane import Lane, LaneFacts, ShardRange, ShardRanges
from wds_pipes.core.moved import Data
from wds_pipes.core.options import check_choice
from wds_pipes.core.stage import END, Branching, Mark, Order, Source, Stage, functional_name
from wds_pipes.core.state import damaged, read_count
from wds_pipes.core.tolerant import common_on_error
from wds_pipes.core.words import shown
from wds_pipes.errors import SampleError
from wds_pipes.io.urls import redact
from wds_pipes.stages.fields import Sample, check_sample
from wds_pipes.stages.mix import check_pipelines
from wds_pipes.stages.shard_list import ShardList, shard_of
from wds_pipes.tar.keys import is_metadata

_LEFT_OUT = ("filtered", "skipped", "dropped", "skipped_shards", "damaged")  # counts that a message names


class Joined(NamedTuple):
    """Where a source of a join stands.

    Attributes:
        source: its number.
        mark: the position in its shard; None: the beginning.
    """

    source: int = 0
    mark: Mark | None = None


class Join(Composite[Sample], Branching, Order, Source[Sample]):
    """Join the samples of several pipelines by their keys:
    ``wp.join({"image": images, "caption": captions})``.

    Each source is a ``ShardList`` with the steps up to ``group_by_key()``, and maybe steps after it
    that make one sample of one sample, such as ``decode_by_ext`` or ``rename_fields``. The sources
    have equally many shards. The shards at the same place of all lists have the same keys in the
    same order, and are read together, compressed or not::

        images = wp.ShardList("image/{000..099}.tar", shuffle=True, seed=7)
        images = images.open_shards().load_tar().group_by_key()
        captions = wp.ShardList("text/{000..099}.tar.gz").open_shards().load_tar().group_by_key()
        pipe = wp.join({"image": images, "caption": captions}).shuffle_buffer(1000)

    The first source decides which samples there are. A sample has its key and its metadata, such as
    ``__url__``, and the fields of all sources. The order of the shards of the first list is the
    order of all, and its seed is that of the steps after the join. The steps of a source keep its
    own seed; their ``max_errors`` applies to each shard, and in PipeLoader to all shards of a rank
    together.

    ``counts()`` counts the samples of the first source. Of the others it has only
    ``skipped_shards`` and ``damaged``. A sample that a step of a source leaves out, such as a
    filter or ``on_error="skip"``, is missing there.

    A following ``interleave_shards`` keeps the shards at several places open. PipeLoader divides
    the shards of all sources together. It knows the number of samples, and divides shards, too, if
    ``on_missing="error"``, and ``ShardList(index=...)`` or ``samples_per_shard=`` counts the
    samples of each source, which then must be equal for each shard. Otherwise use
    ``epoch_end="exact"`` or ``"loop"`` on several ranks.

    To join samples that are sharded or ordered in different ways, write them once with ``wds-pipes
    join``, or read them with ``IndexedShards.by_key``.

    Args:
        sources: the pipelines by name, at least two.
        on_missing: for a sample of the first source whose key is not in the same shard of another
            one. ``"error"``: raise an error; also if only another source has a key. ``"skip"``:
            leave the sample out, and count it as skipped. ``"none"``: yield it without the fields
            of that source, which are absent, not None (a batch of such samples needs
            ``collate="list"``, or a ``map_samples`` that fills them in). With these two, a sample
            of another source whose key the first one lacks is passed over. Both shards are then
            read ahead up to the next key that they have in common, and the samples up to there are
            held in memory.
        prefix: name each field by its source, as in ``image.jpg`` and ``caption.txt``. Otherwise
            fields keep their names, and two sources with one name of a field are an error.

    Raises:
        TypeError, ValueError: when it is built: a source is another kind of pipeline, or batches or
            reorders samples; the numbers of shards differ, or the numbers of samples, if they are
            known and must be equal; a source after the first has ``shuffle`` or ``resampled``.
        SampleError: during iteration, with ``.url`` and ``.key``: a key is missing; the keys of two
            shards are in different orders (of two shards with missing keys, a resume compares only
            the rest); two sources have the same field.
        StateError: when a state is loaded: a source was another pipeline.

    Checkpoint: the position of each source in its shard, about 60 bytes for each. A resume opens
    these shards again, and reads again what the steps of each source read again, and what was read
    ahead to find a common key.
    """

    @dataclass(slots=True)
    class At(Composite.At):
        next: int = 0  # how many rows of the lane were opened so far
        skipped: int = 0

    # A row: the shards at the same place of all lists.

    divides = divides_shards = True
    divides_items = False  # the first source has the iteration context
    gives = "samples"
    tallies = (*Composite.tallies, "skipped")
    order_options = ("names", "prefix", "missing")
    part_kind = Joined
    parts: list[Joined]

    def __init__(self, sources: Mapping[str, Stage[Any]], *, on_missing: str = "error", prefix: bool = False) -> None:
        _check_sources(sources)
        self._lists: list[ShardList] = [Chain(source).root for source in sources.values()]  # type: ignore[misc]
        self.first_list = self._lists[0]
        super().__init__(self.first_list.seed if self.first_list.seed_given else None)
        self.sources, self.names = dict(sources), tuple(sources)
        self.on_missing = check_choice("on_missing", on_missing, "error", "skip", "none")
        # "skip" may take the place of "error" in a running epoch, as in on_error=
        self.missing = "none" if on_missing == "none" else None
        if not isinstance(prefix, bool):
            raise TypeError(f"prefix must be True or False, not {prefix!r:.80}: rename_fields() gives other names")
        self.prefix = prefix
        self.context = self.first_list.context
        self.on_error = common_on_error(self._lists)
        self._uncounted = self._why_uncounted()
        if self._uncounted is None:
            _check_counts(self.names, self._lists)
        self._readers: list[_Reader] = []  # while running, of the row that is open
        self._marks: list[Mark | None] = []  # while running, where these stood after the last sample that was yielded
        self._ahead: list[_Reader] = []  # while running, of the row that will be opened next

    def _why_uncounted(self) -> str | None:
        """Return why the number of samples is not known, for a message; None if it is known."""
        if self.on_missing != "error":
            return f"join(on_missing={self.on_missing!r}) does not know how many samples have partners"
        for name, listed, source in zip(self.names, self._lists, self.sources.values(), strict=True):
            if changes := next(filter(None, (step.changes_count() for step in Chain(source))), None):
                return f"in source {name!r} of join(), {changes}"
            if listed.samples is None:
                return (
                    f"the samples of source {name!r} of join() are not counted: pass ShardList(index=...), or "
                    "samples_per_shard=, to each source"
                )
        return None

    # What concerns the order of the shards: the first list says it

    @property
    def branches(self) -> Mapping[str, Stage[Any]]:
        return self.sources

    @property
    def sample_counts(self) -> Sequence[int] | None:
        return None if self._uncounted else self.first_list.samples

    @property
    def samples_fingerprint(self) -> str | None:
        return None if self._uncounted else self.first_list.samples_fingerprint

    def changes_count(self) -> str | None:
        return self._uncounted

    def which_data(self) -> Data:
        return self.first_list.which_data()

    def number_of(self, url: str) -> str | None:
        return self.first_list.number_of(url)

    def seed_of(self, branch: str, seed: int) -> int:
        root = Chain(self.sources[branch]).root
        return root.seed if root.seed_given else seed

    def epoch_shards(self, seed: int, epoch: int) -> ShardRanges:
        return self.first_list.epoch_shards(seed, epoch)

    def epochs_differ(self) -> str | None:
        return self.first_list.epochs_differ()

    def lane_in(self, lane: Lane, epoch: int) -> Lane:
        return self.first_list.lane_in(lane, epoch)

    def where_in(self, own: tuple[Any, ...], parts: tuple[Joined, ...], lane: Lane) -> str | None:
        """Return the URL of the first source's shard at a position."""
        return self.first_list.where((self._at(own).next - bool(parts),), lane)

    # Running

    @property
    def opened(self) -> int:
        return int(self.at.next)

    @property
    def inner(self) -> list[Stage[Any]]:
        return [reader.chain for reader in (*self._readers, *self._ahead)]

    @cached_property
    def _ranges(self) -> Sequence[ShardRange]:
        """The shards of this lane in the first list, or ranges of them."""
        return self.first_list.order(self.lane)

    def start(self, offset: int = 0, *, ahead: bool = False) -> None:
        if self.at.next > len(self._ranges):
            raise damaged(f"join has opened {self.at.next} shards of a lane of {len(self._ranges)}")
        if not self._readers and self.parts:
            self._readers = self._open_row(self.at.next - 1, ahead=ahead)
            self._look_ahead()
        elif not self._readers:
            self._next_row(ahead=ahead)

    def _next_row(self, *, ahead: bool = False) -> None:
        """Open the next row of the lane, if there is one."""
        if self.at.next < len(self._ranges):
            self.parts = [Joined(number) for number in range(len(self.names))]
            self._readers = self._ahead or self._open_row(self.at.next, ahead=ahead)
            self.at.next += 1
            self._look_ahead()

    def _look_ahead(self) -> None:
        """Request the first bytes of the next row."""
        rest = self.at.next < len(self._ranges)
        self._ahead = self._open_row(self.at.next, ahead=True, resumed=False) if rest else []

    def _open_row(self, place: int, *, ahead: bool, resumed: bool = True) -> list[_Reader]:
        """Open a row. The lanes of its chains are numbered after the shard, so that random
        decisions do not depend on the lane that reads it.
        """
        (number, start, stop), lane, readers = self._ranges[place], self.lane, []
        for name, source, listed, part in zip(self.names, self.sources.values(), self._lists, self.parts, strict=True):
            whole = -1 if listed.samples is None else listed.samples[shard_of(number)]
            shard = (number, 0, whole) if self._uncounted else (number, start, stop)
            mark = part.mark if resumed else None
            of = replace(
                lane,
                seed=self.seed_of(name, lane.seed),
                number=number,
                of=len(listed.urls),
                generation=start,
                shards=(shard,),
                slice=None,
            )
            chain = source.open(of, mark)
            chain.start(ahead=ahead)
            readers.append(_Reader(name, chain, mark, listed.urls[shard_of(number)]))
        return readers

    def run(self) -> Iterator[Sample]:
        self.start()
        while self._readers:
            first, *others = readers = self._readers
            while (key := first.key()) is not None:
                found = [self._partner(first, other, key) for other in others]
                sample = first.take()
                if None in found and self.on_missing == "skip":
                    self._skip(first, others[found.index(None)], key)
                    continue
                joined = self._joined([sample, *found])
                self._marks = [reader.mark for reader in readers]
                yield joined
            for other in others:
                self._pass_over(first, other, None)
            self._end_row()
            self._next_row()

    def _partner(self, first: _Reader, other: _Reader, key: str) -> Sample | None:
        """Take the sample with this key, the next one of the first source, from another one; None:
        it has none.
        """
        if other.key() != key:
            if self.on_missing == "error":
                raise _unpaired(first, other, key)
            if key in other.extra:
                raise _disordered(first, other, key)
            if other.common is END:
                other.common = _next_common(first, other)
            if other.common != key:
                other.lacks.add(key)
                return None
            self._pass_over(first, other, key)
        other.common = END
        return other.take()

    def _pass_over(self, first: _Reader, other: _Reader, until: str | None) -> None:
        """Take the samples of another source up to a key (None: all), which the first source
        lacks.
        """
        while (key := other.key()) is not None and key != until:
            if key in other.lacks:
                raise _disordered(first, other, key)
            if self.on_missing == "error":
                raise _unpaired(other, first, key)
            other.extra.add(key)
            other.take()

    def _skip(self, first: _Reader, other: _Reader, key: str) -> None:
        """Count a sample that is left out since another source lacks its key."""
        self.lane.meters.skips += 1
        self.at.skipped += 1
        if not self._lack_before.skipped:
            why = _without_partner(first, other, key)
            self._lack_before = self._lack_before._replace(skipped=why)
            logger.warning("skipped: %s. Further ones in this lane are only counted.", why)

    def _joined(self, found: list[Sample | None]) -> Sample:
        """Return the fields of one sample of each source together."""
        joined: Sample = {}
        for reader, sample in zip(self._readers, found, strict=True):
            if sample is None:
                continue
            named = sample
            if self.prefix:
                named = {name if is_metadata(name) else f"{reader.name}.{name}": sample[name] for name in sample}
            if not joined:
                joined = dict(named)
                continue
            for field, value in named.items():
                if field not in joined:
                    joined[field] = value
                elif not is_metadata(field):
                    raise _repeated(self._readers[0], reader, field, sample)
        return joined

    def _end_row(self) -> None:
        """Close the row that is open, and keep the counts of its chains."""
        first, *others = self._readers
        self.retire(first.chain)
        for other in others:
            chain = Chain(other.chain)
            counts = _troubles(chain.counts(other.chain.mark(), 0))
            self.at.done = sum_counts((self.at.done or {}, counts)) or None
            self._bytes_before += chain.bytes_so_far
            other.chain.close()
        self._readers, self._marks, self.parts = [], [], []

    def lack(self, before: Lack) -> Lack:
        return Lack.of_all([self._lack_before, *(Chain(reader.chain).lack for reader in self._readers[:1])])

    # Positions

    def mark(self) -> Mark:
        # Plain tuples: this is called for each sample, and to make each a Joined takes four times
        # as long.
        return self._own(self.at), tuple(enumerate(self._marks)) or tuple(self.parts)

    def chain_of(self, part: Joined) -> Chain | None:
        return Chain(self.sources[self.names[part.source]]) if part.source < len(self.names) else None

    def counts_of(self, part: Joined) -> dict[str, int]:
        counts = super().counts_of(part)
        return _troubles(counts) if part.source else counts

    def fit_parts(self, at: Any, parts: list[Joined], *, fixed: bool) -> list[Joined]:
        if parts and ([part.source for part in parts] != [*range(len(self.names))] or not at.next):
            raise damaged(f"join cannot have its sources {shown([part.source for part in parts])} open")
        return parts

    def rest_of(self, entry: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        done = entry.get("next", 0) - (PARTS in entry)
        return done, {**entry, "next": entry.get("next", 0) - done}

    @classmethod
    def describe(cls, entry: dict[str, Any], lane: LaneFacts) -> str | None:
        opened = read_count(entry.get("next", 0), "'next'")
        return ShardList.describe({"next": max(0, opened - bool(entry.get(PARTS)))}, lane)


class _Reader:
    """A shard of the row that is open.

    Attributes:
        name: the name of its source.
        chain: the running chain.
        mark: the position after the last sample that was taken.
        url: the URL of the shard.
        common: the next key that it and the shard of the first source have; None: there is none;
            END: not known.
        lacks: keys of the first source that it lacks.
        extra: keys that it had, and the first source lacks.
    """

    def __init__(self, name: str, chain: Stage[Any], mark: Mark | None, url: str) -> None:
        self.name, self.chain, self.mark, self.url = name, chain, mark, redact(url)
        self.common: Any = END
        self.lacks: set[str] = set()
        self.extra: set[str] = set()
        # read and not taken: each as its key, the sample, and the position after it
        self._read: deque[tuple[str, Sample, Mark]] = deque()

    def key(self, place: int = 0) -> str | None:
        """Return the key of the sample that is next, or of one ``place`` places later; None: the
        shard has ended.
        """
        read = self._read
        while len(read) <= place:
            sample = next(self.chain.items, END)
            if sample is END:
                return None
            if not isinstance(sample, dict) or "__key__" not in sample:
                check_sample(sample, "join", "before to_tuple() and the like")
                raise TypeError(f"a sample of source {self.name!r} of join() has lost its '__key__': keep it")
            read.append((sample["__key__"], sample, self.chain.mark()))
        return read[place][0]

    def take(self) -> Sample:
        """Take the sample that is next."""
        _, sample, self.mark = self._read.popleft()
        return sample

    @property
    def left_out(self) -> str:
        """What its steps left out so far, for a message."""
        counts = Chain(self.chain).counts(self.chain.mark(), 0)
        lost = ", ".join(f"{counts[name]:,} {name.replace('_', ' ')}" for name in _LEFT_OUT if counts.get(name))
        return lost and f" (its steps left out: {lost})"


def _next_common(first: _Reader, other: _Reader) -> str | None:
    """Return the next key that both shards have, of those that were not taken; None: there is none.

    It looks at the next sample of both, then at the second, and so on. So it reads no further than
    necessary, and what it finds depends only on what was not taken.
    """
    firsts, others, place = set[str | None](), set[str | None](), 0
    while others != {None}:  # else the other shard has no more samples
        for reader, own, theirs in ((first, firsts, others), (other, others, firsts)):
            key = reader.key(place)
            if key in theirs:  # None: both shards have ended
                return key
            own.add(key)
        place += 1
    return None


def _troubles(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the counts of a source after the first that count in the join: not its samples."""
    return {name: count for name, count in counts.items() if count and name not in COUNTED}


def _without_partner(first: _Reader, other: _Reader, key: str) -> str:
    """Return that another shard lacks a key of one, for a message."""
    there = other.key()
    instead = "has no more samples" if there is None else f"has {there!r} in its place"
    return (
        f"sample {key!r} of shard {first.url} has no partner in shard {other.url} of source {other.name!r} of join(), "
        f"which {instead}{other.left_out}"
    )


def _unpaired(first: _Reader, other: _Reader, key: str) -> SampleError:
    """Return the error for a key of one shard that another one lacks."""
    why = _without_partner(first, other, key)
    return SampleError(f"{why}. If keys may be missing, pass on_missing='skip' or 'none'.", url=first.url, key=key)


def _repeated(first: _Reader, other: _Reader, field: str, sample: Sample) -> SampleError:
    """Return the error for a field that two sources have."""
    key = sample["__key__"]
    return SampleError(
        f"sample {key!r} of shard {first.url} has two fields {field!r}, the second one from shard {other.url} of "
        f"source {other.name!r} of join(): pass prefix=True, or rename_fields() or select_fields() in a source.",
        url=first.url,
        key=key,
    )


def _disordered(first: _Reader, other: _Reader, key: str) -> SampleError:
    """Return the error for a key that two shards have in other orders."""
    return SampleError(
        f"the keys of shard {first.url} and of shard {other.url} of source {other.name!r} of join() are in different "
        f"orders, as {key!r} shows: sort both (wds-pipes sort), or join them by an index (wds-pipes join, "
        "IndexedShards.by_key).",
        url=other.url,
        key=key,
    )


def _check_sources(sources: Mapping[str, Stage[Any]]) -> None:
    """Raise if these are not pipelines by name that join() can take."""
    check_pipelines(sources, "join")
    if len(sources) < 2:
        raise ValueError("join() needs at least two sources")
    numbers: dict[str, int] = {}
    for name, source in sources.items():
        numbers[name] = _check_source(name, source, first=not numbers)
    if len(set(numbers.values())) > 1:
        raise ValueError(
            f"the sources of join() must have equally many shards, and there are {shown(numbers)}: list only those "
            "shards that all have"
        )


def _check_source(name: str, source: Stage[Any], *, first: bool) -> int:
    """Return how many shards a source has; raise if it cannot be joined."""
    chain = Chain(source)
    root, steps = chain.root, chain.steps
    if not isinstance(root, ShardList) or chain.items_are != "samples":
        raise TypeError(
            f"join() reads shards together, and source {name!r} is no pipeline of ShardList(), open_shards(), "
            "load_tar() and group_by_key(). Samples with an index: IndexedShards.by_key, or wds-pipes join"
        )
    after = steps[1 + next(place for place, step in enumerate(steps) if step.gives == "samples") :]
    for step in steps:
        if step.scope == "lane" or (step in after and (step.scope != "item" or step.items_per_batch is not None)):
            raise TypeError(
                f"join() needs the samples of a shard in their order, one by one: put {functional_name(type(step))}() "
                f"after it, not into source {name!r}"
            )
    if not first and (root.shuffle or root.resampled):
        raise ValueError(
            f"the first source of join() decides the order of the shards: leave shuffle and resampled out of source "
            f"{name!r}"
        )
    return len(root.urls)


def _check_counts(names: Sequence[str], lists: Sequence[ShardList]) -> None:
    """Raise if shards that are read together have other numbers of samples."""
    for name, listed in zip(names[1:], lists[1:], strict=True):
        pairs = zip(lists[0].samples or (), listed.samples or (), strict=True)
        for number, (one, other) in enumerate(pairs):
            if one != other:
                raise ValueError(
                    f"shard {redact(lists[0].urls[number])} of join() has {one:,} samples, and "
                    f"{redact(listed.urls[number])} of source {name!r} has {other:,}: if keys may be missing, pass "
                    "on_missing='skip' or 'none'"
                )
