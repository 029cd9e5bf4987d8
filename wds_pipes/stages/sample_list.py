"""SampleList: which samples to read, in one global order."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from wds_pipes.core.lane import Lane, LaneFacts, ShardRanges, Slice
from wds_pipes.core.options import check_count
from wds_pipes.core.order import MOST_SAMPLES, Permutation, order_of_samples
from wds_pipes.core.state import Grown, damaged, read_count
from wds_pipes.core.tolerant import OnError
from wds_pipes.core.words import listed, plural
from wds_pipes.io.expand import items_of
from wds_pipes.io.open import is_remote
from wds_pipes.io.ranges import RangeReader
from wds_pipes.io.urls import Urls, origins_of, redact, with_origins
from wds_pipes.stages.shard_source import ShardSource, shortened_url
from wds_pipes.tar.index import MissingIndexError, list_indexed
from wds_pipes.tar.located import Located, Selection, Selector, compact, described, numbers_at

if TYPE_CHECKING:
    from wds_pipes.stages.shard_source import Numbers

_BLOCK = 1024  # how many places are computed at a time
_MOST_BLOCKS = 4096  # of an epoch that is divided over lanes, see ``epoch_shards``


class SampleRef(NamedTuple):
    """A sample to read: ``SampleList`` yields these, and ``fetch_samples`` reads them.

    Attributes:
        url: the URL or path of its shard, with credentials if it has any.
        number: its number among all samples of the list.
        start: the byte of its first header in the shard.
        stop: the byte after its last one.
        index_url: the URL of the index of offsets that says so.
        last: whether it is the last one of its shard.
        padding: whether it is a repeat that fills up an epoch; None: there are no repeats.
        size: the size of its shard in bytes, as an ``index.json`` says; None: not known.
        before: the byte where the sample before it begins, -1 if it is the first one of its shard;
            None: not known, or its shard is remote.
    """

    url: str
    number: int
    start: int
    stop: int
    index_url: str
    last: bool = False
    padding: bool | None = None
    size: int | None = None
    before: int | None = None


class SampleList(ShardSource[SampleRef]):
    """The source of a pipeline: the samples of indexed shards in one global order.

    Each sample is a ``SampleRef``, which ``fetch_samples`` reads::

        wp.SampleList("train-{000..099}.tar", shuffle=True).fetch_samples().decode_by_ext("rgb8")

    Each shard ``X.tar`` needs an index of offsets, ``X.tar.idx``, see ``IndexedShards``. With it,
    an epoch is shuffled as a whole, not shard by shard and in a window: each sample may come at any
    place. The sample at a place is a function of (seed, epoch, place), which is computed when its
    turn comes, so an order of 10**9 samples takes no memory, and a resume costs the same at any
    place. ``PipeLoader`` yields the batches of this one order on any number of ranks and workers,
    unless a later step changes the number or order of the samples.

    Args:
        urls: the shards, as ``ShardList`` takes them, also by an ``index.json``; uncompressed.
        index: where the indexes of offsets are, as in ``IndexedShards``.
        shuffle: permute the samples, differently in each epoch. Otherwise they come in order.
        block_samples: with ``shuffle``, permute runs of this many neighbours, which stay together
            and are read by one request. The last run may be shorter. A following
            ``shuffle_buffer`` can mix the runs. In a view, they are neighbours of the view.
        where: which samples, in the forms that ``IndexedShards.select`` takes: keys,
            ``"@keys.txt"``; a part of ``split_by_key``; ``slice(None, None, 10)``; numbers of
            samples. None: all. It is evaluated once, when the list is built. Workers that are not
            forked are sent the result, which has 8 bytes for each sample; a slice or a range has
            none.
        exclude: which of these samples to leave out, in the same forms.
        seed: the integer, of 64 bits, from which all random decisions of the pipeline derive.
        storage_options: how to reach the storage, as fsspec takes it.
        connections: how many remote indexes are read at once.
        on_error: what the steps do with bad data, as in ``ShardList``.
        moved: as in ``ShardList``.

    Raises:
        ValueError, TypeError: when built: nothing matches, or an argument does not fit.
        IndexError: there is no sample with a number in ``where``.
        ShardError: a shard has no index, or it is damaged or of another shard.
        SampleError: several samples have one of the keys.

    Checkpoint: one number. A resume reads nothing again. The state of a view fits only a list that
    selects the same samples, however that is written.
    """

    @dataclass(slots=True)
    class At:
        next: int = 0  # how many of the lane's ranges of the order are done
        inside: int = 0  # how many places of the next one
        padded: int = 0  # how many samples of its slice were repeats

    tallies = ("padded",)
    scope, is_global = "item", True
    gives = "references"
    order_options = ("shuffle", "block_samples", "view", "excluded")
    excluded: dict[str, Any] | None = None  # which samples a loaded state leaves out: see wds_pipes.stages.edits
    _left_out: Numbers | None = None  # their places in the view, sorted
    shared = (*ShardSource.shared, "_orders")

    def __init__(
        self,
        urls: Urls,
        *,
        index: bool | str | os.PathLike[str] = True,
        shuffle: bool = False,
        block_samples: int = 1,
        seed: int | None = None,
        where: Selection | None = None,
        exclude: Selection | None = None,
        storage_options: dict[str, Any] | None = None,
        connections: int = 8,
        on_error: OnError = "raise",
        moved: bool = False,
    ) -> None:
        super().__init__(seed, storage_options, moved, on_error)
        urls = items_of(urls)
        found = list_indexed(urls, index, storage_options)
        self.origins = origins_of(urls)
        storage_options = with_origins(storage_options, self.origins)
        self.urls, self.facts = found.urls, found.facts
        if not isinstance(shuffle, bool):
            raise TypeError(f"shuffle must be True or False, not {shuffle!r}")
        self.shuffle = shuffle
        self._run_samples = check_count("block_samples", block_samples, most=MOST_SAMPLES)
        self.block_samples = block_samples if shuffle and block_samples > 1 else None  # a part of the order
        connections = check_count("connections", connections)
        files = RangeReader(storage_options, connections)
        self._located = Located(self.urls, found.folder, files, storage_options, connections, facts=found.facts)
        if found.facts is not None:
            self._located.compare_ends()
        every = range(self._located.starts[-1])
        self._view = Selector(self._located).select(every, where, exclude)
        self.count = len(self._view)
        if every and not self.count:
            raise ValueError(
                f"the view has no sample: where= and exclude= leave none of {plural(len(every), 'sample')}"
            )
        self.view = described(self._view, len(every))  # a part of the order
        self.samples = self._located.counts
        self._orders: dict[tuple[int, int], Remaining] = {}  # the last one, if samples are left out
        self._sizes: list[tuple[int, int]] = []  # like ``grown``: of the last epochs, how many of the view they have
        if self.urls.plain:  # then it takes little time, and the first state is as fast as the others
            _ = self.which_data(), self.samples_fingerprint

    def run(self) -> Iterator[SampleRef]:
        at, lane, located, view = self.at, self.lane, self._located, self._view
        order, starts = self.order(lane.seed, lane.epoch), np.array(located.starts)
        file = cache(self._file)
        sliced = lane.shards is None
        for places, begins, repeats in self._places(lane, at.next, at.inside):
            numbers = numbers_at(view, places if order is None else order.numbers_at(places))
            shards, insides = _in_shards(starts, numbers)
            for number, shard, inside, begun, repeat in zip(
                numbers.tolist(), shards.tolist(), insides.tolist(), begins, repeats
            ):
                if begun:
                    at.next, at.inside = at.next + 1, 0
                at.inside += 1
                if repeat and sliced:  # other repeats are counted by the loader
                    at.padded += 1
                offsets, (url, index_url, size, remote) = located.offsets(shard), file(shard)
                start, stop, last = offsets[inside], offsets[inside + 1], inside + 2 == len(offsets)
                # Of a remote shard, which other bytes are there differs after a resume; so would
                # the samples that are skipped.
                before = (None if remote else offsets[inside - 1]) if inside else -1
                # a call of the class takes twice as long
                yield SampleRef._make((url, number, start, stop, index_url, last, repeat, size, before))

    def _file(self, shard: int) -> tuple[str, str, int | None, bool]:
        """Return the URL of a shard, that of its index of offsets, its size if it is known, and
        whether it is remote.
        """
        url, size = self.urls[shard], None if self.facts is None else self.facts.size(shard)
        return url, self._located.index_of(shard), size, is_remote(url)

    def order(self, seed: int, epoch: int) -> Permutation | Remaining | None:
        """Return the order of an epoch; None: the samples come in the order of the list."""
        of, size, left_out = (seed, epoch), self._size_in(epoch), self._left_out
        if left_out is not None and of in self._orders:
            return self._orders[of]
        whole = order_of_samples(size, seed, epoch, block_samples=self._run_samples) if self.shuffle else None
        if left_out is None:
            return whole
        self._orders.clear()
        self._orders[of] = Remaining(whole, left_out[left_out < size])
        return self._orders[of]

    def _size_in(self, epoch: int) -> int:
        """Return how many samples of the view an epoch has, also of those that are left out."""
        return next((size for last, size in self._sizes if epoch <= last), len(self._view))

    def samples_in(self, epoch: int) -> int:
        size = self._size_in(epoch)
        return size if self._left_out is None else size - int(np.searchsorted(self._left_out, size))

    def with_growth(self, grown: Grown) -> Self:
        again = super().with_growth(grown)
        again._sizes, again._orders = [(last, self._size_of(shards)) for last, shards in grown], {}
        return again

    def first(self, count: int) -> Self:
        again = super().first(count)
        again._view, again._orders = compact(self._view[: self._size_of(count)]), {}
        again.count, again.view = len(again._view), described(again._view, self._located.starts[count])
        return again

    def _size_of(self, shards: int) -> int:
        """Return how many samples of the view are in the first shards.

        Raises:
            ValueError: they are not its first ones.
        """
        view, stop = self._view, self._located.starts[shards]
        if isinstance(view, range):
            size, first = min(len(view), len(range(view.start, stop, view.step))), view.step > 0
        else:
            size = int(np.count_nonzero(view < stop))
            first = bool((view[:size] < stop).all())
        if not first:
            raise ValueError(
                "added='append' needs a view in which the samples of the shards that were added come last: where= "
                "selects them in another order"
            )
        return size

    def leaving_out(self, keys: Sequence[str], excluded: dict[str, Any]) -> SampleList:
        """Return this list without the samples with these keys, in the order that the samples have
        in this list; ``excluded`` says in the graph of a state which they are.
        """
        again = copy.copy(self)
        found = Selector(self._located).with_keys(self._view, keys)
        again._orders = {}
        again._left_out, again.excluded, again.count = found, excluded, len(self._view) - len(found)
        if not again.count:
            raise ValueError(f"exclude= leaves none of {plural(len(self._view), 'sample')}")
        return again

    def place_after(self, other: SampleList, place: int, epoch: int) -> int:
        """Return at which place of the order of an epoch this list goes on after ``place`` of the
        order of another one, which leaves out fewer samples.
        """
        before, after = (one.order(self.seed, epoch) for one in (other, self))
        whole = before.whole_place(place) if isinstance(before, Remaining) else place
        return after.place(whole) if isinstance(after, Remaining) else whole

    def check_keys(self, keys: Sequence[str]) -> None:
        """Raise ValueError if no sample of the shards has one of these keys; without indexes of
        keys, that is not known.
        """
        try:
            missing = Selector(self._located).missing(keys)
        except MissingIndexError:
            return
        if missing:
            raise ValueError(
                f"exclude= has {plural(len(missing), 'key')} that no sample has: {listed(missing)}. Correct them, or "
                "leave them out of the list"
            )

    # The order without reading: see ``ShardSource``

    def samples_after(self, taken: Numbers, lane: Lane) -> tuple[Numbers, Numbers]:
        if lane.shards is None:
            places = self._slice(lane).place(taken) % self.samples_in(lane.epoch)
        else:
            numbers, insides = ShardRanges.of(lane.shards).samples_after(taken)
            places = numbers * self._block_in(lane.epoch) + insides
        order = self.order(lane.seed, lane.epoch)
        numbers = numbers_at(self._view, places if order is None else order.numbers_at(places))
        return _in_shards(np.array(self._located.starts), numbers)

    def in_ranges(self, shard: int, number: int, lane: Lane) -> list[tuple[int, int]]:
        wanted, view, order = self._located.starts[shard] + number, self._view, self.order(lane.seed, lane.epoch)
        view = view[: self._size_in(lane.epoch)]
        if isinstance(view, range):
            found = [view.index(wanted)] if wanted in view else []
        else:  # it may have any order
            found = np.flatnonzero(view == wanted).tolist()
        if self._left_out is not None:
            found = np.setdiff1d(found, self._left_out).tolist()
        places = found if order is None else [order.place_of(place) for place in found]
        return [divmod(place, self._block_in(lane.epoch)) for place in places]

    def before(self, number: int, inside: int, lane: Lane) -> list[int]:
        if lane.shards is not None:
            return super().before(number, inside, lane)
        return self._slice(lane).before(number * self._block_in(lane.epoch) + inside)

    def key_of(self, shard: int, number: int) -> str:
        return self._located.key_of(self._located.starts[shard] + number)

    def numbers_of(self, key: str) -> list[int]:
        return [number for number in self._located.find(key) if self._located.key_of(number) == key]

    def _places(self, lane: Lane, done: int, inside: int) -> _Blocks:
        """Yield the places of a lane, from a position on.

        Raises:
            StateError: the lane has no such position.
        """
        shards = lane.shards
        counts = [self._slice(lane).count] if shards is None else [stop - start for _, start, stop in shards[done:][:1]]
        if done > len(shards or ()) or inside > sum(counts):
            raise damaged(
                f"it stands at sample {inside} of range {done} of lane {lane.number} of {lane.of}, which has fewer"
            )
        return self._slice_places(lane, inside) if shards is None else self._range_places(lane, done, inside)

    def _range_places(self, lane: Lane, done: int, inside: int) -> _Blocks:
        """Yield the places of a lane with ranges of blocks."""
        ranges, size = ShardRanges.of((lane.shards or ())[done:]), self._block_in(lane.epoch)
        total, ends = ranges.samples, ranges.ends
        for start in range(inside, total, _BLOCK):
            taken = np.arange(start, min(start + _BLOCK, total))
            numbers, insides = ranges.samples_after(taken)
            begins = ends[np.searchsorted(ends, taken)] == taken
            yield numbers * size + insides, begins.tolist(), itertools.repeat(lane.padding)

    def _slice_places(self, lane: Lane, inside: int) -> _Blocks:
        """Yield the places of a lane that is a slice."""
        part, count = self._slice(lane), self.samples_in(lane.epoch)
        for first in range(inside, part.count, _BLOCK):
            places = part.place(np.arange(first, min(first + _BLOCK, part.count)))
            repeats = itertools.repeat(None) if lane.padding is None else (places >= count).tolist()
            yield places % count, itertools.repeat(False), repeats

    def _slice(self, lane: Lane) -> Slice:
        return lane.slice or Slice(1, 0, self.samples_in(lane.epoch), lane.number, lane.of)

    def place_in(self, lane: Lane) -> Callable[[int], int] | None:
        part, count = self._slice(lane), self.samples_in(lane.epoch)
        return None if lane.shards is not None else lambda taken: part.place(taken) % count

    def taken(self, entry: dict[str, Any]) -> int:
        return read_count(entry.get("inside", 0), "'inside'")

    # With lanes, when steps change the number of samples, an epoch is divided by blocks of its
    # order, as that of a ShardList is by shards.

    def _block_in(self, epoch: int) -> int:
        return max(1, -(-self.samples_in(epoch) // _MOST_BLOCKS))

    def epoch_shards(self, seed: int, epoch: int) -> ShardRanges:
        size, count = self._block_in(epoch), self.samples_in(epoch)
        places = np.arange(0, count, size)
        return ShardRanges(places // size, np.zeros_like(places), np.minimum(size, count - places))

    @property
    def sample_counts(self) -> Sequence[int]:
        return [self.count]

    @property
    def opened(self) -> int:
        return int(self.at.next) + bool(self.at.inside)

    @classmethod
    def describe(cls, entry: dict[str, Any], lane: LaneFacts) -> str | None:
        done, inside = (read_count(entry.get(name, 0), repr(name)) for name in ("next", "inside"))
        ranges = f" of range {done + 1} of the lane" if done else ""
        return f"sample {inside:,}{ranges} done ({lane.url})"

    def where(self, own: tuple[Any, ...], lane: Lane) -> str | None:
        done, inside, _ = own or (0, 0, 0)
        place = self._place(lane, done, inside)
        if place is None:
            return None
        order = self.order(lane.seed, lane.epoch)
        number = int(self._view[place if order is None else order.number_at(place)])
        return shortened_url(redact(self.urls[self._located.place(number)[0]]))

    def _place(self, lane: Lane, done: int, inside: int) -> int | None:
        """Return the next place at a position, in a time that does not grow with the lane; None:
        there is none.
        """
        if lane.shards is None:
            part = self._slice(lane)
            return None if inside >= part.count else part.place(inside) % self.samples_in(lane.epoch)
        if done >= len(lane.shards):
            return None
        number, start, stop = lane.shards[done]
        return number * self._block_in(lane.epoch) + min(start + inside, stop - 1)

    def size_shown(self) -> str:
        return f"{plural(self.count, 'sample')} in {plural(len(self.urls), 'shard')}"


class Remaining:
    """An order without some of its places.

    Args:
        order: the whole order; None: the numbers in order.
        left_out: the numbers that are left out.
    """

    def __init__(self, order: Permutation | None, left_out: Numbers) -> None:
        self._order, self._places = order, np.sort(left_out if order is None else order.places_of(left_out))
        self._before = self._places - np.arange(len(self._places))  # how many that stay come before each

    def numbers_at(self, places: Numbers) -> Numbers:
        """Return the numbers at many places: int64, in the shape (places,) of the argument."""
        whole = places + np.searchsorted(self._before, places, side="right")
        return whole if self._order is None else self._order.numbers_at(whole)

    def number_at(self, place: int) -> int:
        """Return the number at a place."""
        return int(self.numbers_at(np.array([place]))[0])

    def place_of(self, number: int) -> int:
        """Return the place of a number that is not left out."""
        return self.place(number if self._order is None else self._order.place_of(number))

    def whole_place(self, place: int) -> int:
        """Return how many places of the whole order are over after ``place`` of this one."""
        return place and place + int(np.searchsorted(self._before, place - 1, side="right"))

    def place(self, whole: int) -> int:
        """Return how many places of this order are over after ``whole`` of the whole one."""
        return whole - int(np.searchsorted(self._places, whole))


def _in_shards(starts: Numbers, numbers: Numbers) -> tuple[Numbers, Numbers]:
    """Return the shards of samples, and their numbers there.

    Args:
        starts: the number of the first sample of each shard.
        numbers: those of the samples among all.
    """
    shards = np.searchsorted(starts, numbers, side="right") - 1
    return shards, numbers - starts[shards]


# places of an order in blocks: of each place, whether the next range of the lane begins there, and
# whether it is a repeat; None: it is not said
_Blocks = Iterator[tuple["Numbers", Iterable[bool], Iterable[bool | None]]]
