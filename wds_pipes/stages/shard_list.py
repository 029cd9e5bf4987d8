"""ShardList: which shards to read, in which order."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Generic

import numpy as np

from wds_pipes.core.lane import Lane, LaneFacts, ShardRange, ShardRanges
from wds_pipes.core.options import check_count
from wds_pipes.core.order import below, hash64, permutation, weighted
from wds_pipes.core.stage import OpensAnywhere, Out, SamplePlace
from wds_pipes.core.state import damaged, read_count
from wds_pipes.core.tolerant import OnError
from wds_pipes.core.words import plural
from wds_pipes.io.expand import expand_each, in_sure_order
from wds_pipes.io.packed import Packed
from wds_pipes.io.urls import Urls, at_home, local_path, origins_of, redact, with_origins
from wds_pipes.stages.proportions import weigh
from wds_pipes.stages.shard_source import ShardRef, ShardSource, shortened_url
from wds_pipes.tar.index import Facts, find_facts, is_index, joined, listed_shards
from wds_pipes.tar.located import ShardOffsets

if TYPE_CHECKING:
    import numpy.typing as npt

    from wds_pipes.stages.shard_source import Numbers

logger = logging.getLogger("wds_pipes")

_DRAWS = 32  # the bits of the number of a shard: how often it was drawn before is in those above
_ORDER = 1  # the salt of the shard order; shuffle_buffer and map_samples have their own


class ShardList(OpensAnywhere, ShardSource[ShardRef]):
    """The source of a pipeline: its shards, each as a ``ShardRef``, whose ``url`` is a str.

    A ShardRef also has what is known of the shard: its size and MD5, and which of its samples are
    meant. A step between ShardList and ``open_shards`` that changes URLs, such as torch's ``.map``,
    must return ``ref.with_url(url)``. If it returns a str, ``open_shards`` raises a TypeError.

    Each epoch yields every shard once. With ``shuffle``, the order is a function of (seed, epoch)
    alone, and differs from epoch to epoch. Each new ``iter()`` of a pipeline is the next epoch,
    ``set_epoch(n)`` selects one, and a loaded state continues its own.

    Args:
        urls: a URL or path, or several, in a list or joined by ``::``
            (``/a/{00..03}.tar::/b/{00..09}.tar``). Each may contain braces
            (``train-{000000..000999}.tar``, ``{a,b}``), or the wildcards ``*``, ``?`` and
            ``[...]``, local or remote, whose matches are sorted. (In a URL of a web server ``?``
            begins the query; elsewhere ``[?]`` is a ``?`` itself.) A directory means the tars in
            it, ``*.tar``, ``*.tar.gz``, ``*.tgz`` and the like (one in a store, or whose own name
            is such a one, ends in ``/``),
            ``@list.txt`` means the lines of a text file, and ``-`` is standard input. ``~`` is the
            home directory, and ``${NAME}`` an environment variable. A chained URL of fsspec, such
            as ``simplecache::s3://...``, is one URL. A name that ends in ``.json`` is an index (see
            below): it means the shards that it lists, with the facts in it. The shards in an index
            may be next to it, elsewhere in its store, or at http(s), S3 or GCS. An index on this
            machine may also name local files, and shards in the stores that ``open_shards`` lists.
            A list in the order in which a file system lists files (``Path.glob``, ``os.listdir``)
            is sorted with a warning in the log, or refused where its order matters: it differs from
            machine to machine. Where torch.distributed is initialised, rank 0 lists a store and
            reads an index in a store, and the other ranks get the result, if they make the same
            list.
        shuffle: yield the shards in a random order.
        seed: the integer, of 64 bits, from which all random decisions of the pipeline derive; None:
            0, and in a ``mix`` one that follows from the name of the source.
        resampled: draw the shards of an epoch at random with replacement, as many as there are:
            some come twice, others not at all.
        weights: with ``resampled``, one weight for each URL in the list or joined by ``::``: a list
            of numbers, or a text such as ``"1::3"``. Each shard of the second URL is then drawn
            three times as often as each shard of the first, on average. To mix the samples of
            several sources in exact proportions, use ``mix``.
        sticky: with ``shuffle``, each rank of a ``PipeLoader`` has the same shards in all epochs,
            in another order, so that the cache of a node (``cache_shards``) needs room for its part
            only, and fetches each shard once. On another number of ranks, few shards move: from 4
            to 3 nodes, a quarter. Samples of different ranks then never come in one batch of a
            rank, which is harmless if the shards are written in random order, as ``wds-pipes create
            --shuffle`` does; where a shard has samples of one class or source, it is not. It is for
            lists that the loader divides itself, not for those in ``mix`` and ``join``.
        samples_per_shard: how many samples each shard has: one number, or a list with one number
            for each shard. ``PipeLoader`` can then partition the epoch by samples instead of whole
            shards, so that all ranks get the same number of batches, and its length is known. A
            shard with another number of samples is an error when it is read to its end; of the last
            shard of a lane, ``epoch_end="drop"`` reads no more than it needs. A state of a
            ``PipeLoader`` that was saved with other numbers is refused.
        index: where to find the number of samples of each shard, instead of ``samples_per_shard``:
            the path or URL of an index, or several, or a directory that contains one, or True for
            the directories of the shards. The format is recognized by content: ``index.json`` of
            wids, which also has sizes and MD5s, and which ``wds-pipes index`` writes;
            ``sizes.json`` of open_clip. A directory may instead have ``X.tar.idx``, an index of
            offsets, for each ``X.tar``. An entry belongs to the shard with the same base name or,
            if several have it, to the one whose path has the most in common. An index may list
            more shards than ``urls``.
            Whatever says the numbers of samples, indexes of offsets are also used, if they are
            beside their shards, or in a directory passed here: ``wds-pipes index --offsets``,
            ``ShardWriter(offsets=True)`` and Megatron-Energon write them. With them, parts of a
            shard are read from their first sample on, and ``shuffle_buffer`` resumes without
            reading its window again. Each is read when its shard needs it.
        empty_check: raise an error after an epoch in which no shard has a sample. Filters and other
            steps that leave samples out do not matter. A rank that has no sample reads the shards
            of all ranks up to the first sample.
        storage_options: how to reach the storage: a dict, as fsspec takes it. It is used to list
            remote patterns and read a remote index, and to read the shards, unless ``open_shards``
            has storage_options of its own.
        on_error: what the steps of the pipeline do with bad data, unless they have an ``on_error``
            of their own: ``"raise"``, ``"skip"``, or what else each of them takes. After ``mix``
            and ``join``, it applies if all sources have the same one; otherwise these steps raise.
            It is no part of a state.
        moved: declare that these shards are those of the state that is loaded, whatever their names
            and the index say. It does the same as ``load_state_dict(state, moved=True)``: use it if
            another library loads the state. Remove it when a new state has been saved with these
            shards.

    Raises:
        ValueError: nothing matches, the list is empty, an environment variable is not set,
            ``samples_per_shard`` or ``weights`` has another length, ``weights`` are passed without
            ``resampled``, or the index is damaged or does not belong to these shards.
        TypeError: ``urls`` contains something other than strings and paths.
        ShardError: a store cannot be listed, or the index cannot be read. During iteration, an
            index of offsets is damaged, or is that of another shard.

    Checkpoint: the number of shards that were yielded. A resume reads nothing again.
    """

    @dataclass(slots=True)
    class At:
        next: int = 0  # the place in the order of the lane

    gives = "shards"
    order_options = ("shuffle", "resampled", "weights", "sticky")

    def __init__(
        self,
        urls: Urls,
        *,
        shuffle: bool = False,
        seed: int | None = None,
        resampled: bool = False,
        weights: str | Sequence[float] | None = None,
        sticky: bool = False,
        samples_per_shard: int | Sequence[int] | None = None,
        index: Urls | bool | None = None,
        empty_check: bool = True,
        storage_options: dict[str, Any] | None = None,
        on_error: OnError = "raise",
        moved: bool = False,
    ) -> None:
        super().__init__(seed, storage_options, moved, on_error)
        self.empty_check = bool(empty_check)
        matched = weights is not None or isinstance(samples_per_shard, Iterable)  # by their place in the list
        each: list[Sequence[str]] = [
            *expand_each(in_sure_order(urls, sort=bool(shuffle) and not matched), storage_options)
        ]
        self.urls = Packed(chain.from_iterable(each))
        self.facts = self._known(each, samples_per_shard, index, storage_options)
        self.samples = _samples(samples_per_shard, len(self.urls)) if self.facts is None else self.facts.samples
        # where the samples of the shards begin; None: there is no index
        self.offsets: ShardOffsets | None = None
        if self.facts is not None:
            options = with_origins(storage_options, self.origins)
            self.offsets = ShardOffsets(self.urls, self.facts, _folder(index), options)
        if not isinstance(shuffle, bool) or not isinstance(resampled, bool):
            raise TypeError(
                "shuffle and resampled must be True or False; a window of samples is shuffled by shuffle_buffer(size)"
            )
        self.shuffle, self.resampled = shuffle, resampled
        if sticky and (resampled or not shuffle):
            raise ValueError("sticky=True goes with shuffle=True, and not with resampled=True")
        self.sticky = bool(sticky)
        if weights is not None and not resampled:
            raise ValueError(
                "weights go with resampled=True, which draws shards with replacement. To mix samples of several "
                'sources in proportion, use mix({"a": pipe_a, "b": pipe_b}, weights={"a": 1, "b": 3})'
            )
        self.weights: str | None = None
        self._bounds: npt.NDArray[np.uint64] | None = None
        if weights is not None:
            self.weights, self._bounds = weigh(weights, each)
        self.repeated = warn_of_repeated(self.urls)  # whether the list has a shard more than once
        self._last = Last[tuple[tuple[int, int, int], ShardRanges]]()
        if self.urls.plain:  # then it takes little time, and the first state is as fast as the others
            self.which_data()

    def _known(
        self,
        each: list[Sequence[str]],
        samples_per_shard: object,
        index: Urls | bool | None,
        storage_options: dict[str, Any] | None,
    ) -> Facts | None:
        """Return what an index says of each shard; None without an index. If ``urls`` name an
        index, also replace them, and those in ``each``, by its shards.
        """
        listed = [url for urls in each for url in urls if is_index(url)]
        given = index is not None and index is not False
        if given and samples_per_shard is not None:
            raise ValueError("index and samples_per_shard both say how many samples there are: give one of them")
        if listed and (given or samples_per_shard is not None):
            raise ValueError(
                f"{redact(listed[0])} is an index already, which says how many samples there are: "
                "leave samples_per_shard and index out"
            )
        if listed:
            if len(listed) < len(self.urls):
                raise ValueError(
                    f"the list names shards and index {redact(listed[0])}: name either, or pass the index as index="
                )
            indexes, self.origins = listed_shards(listed, storage_options), origins_of(listed)
            by_url = iter(indexes)
            each[:] = [joined([next(by_url) for _ in urls])[0] if urls else [] for urls in each]
            self.urls, facts = joined(indexes)
            return facts
        return None if index is None or index is False else find_facts(self.urls, index, storage_options)

    def run(self) -> Iterator[ShardRef]:
        at = self.at
        order = self.order(self.lane)
        if at.next > len(order):
            raise damaged(
                f"it has passed {at.next} shards of lane {self.lane.number} of {self.lane.of}, "
                f"which has only {len(order)}"
            )
        while at.next < len(order):
            at.next += 1
            yield self.ref(order[at.next - 1])

    def order(self, lane: Lane) -> Sequence[ShardRange]:
        """Return the shards of a lane, or ranges of them, in order."""
        if lane.shards is not None:
            return lane.shards
        return self.epoch_shards(lane.seed, lane.epoch)[lane.number :: lane.of]

    def lane_in(self, lane: Lane, epoch: int) -> Lane:
        if lane.shards is None:
            return replace(lane, epoch=epoch)
        order, shards = self.epoch_shards(lane.seed, epoch), ShardRanges.of(lane.shards)
        if self.resampled:
            return replace(lane, epoch=epoch, shards=order.without_empty()[lane.number :: lane.of][: len(shards)])
        places = np.empty(len(order), np.int64)
        places[order.numbers] = np.arange(len(order))
        return replace(lane, epoch=epoch, shards=shards[np.argsort(places[shards.numbers], kind="stable")])

    def ref(self, shard_range: ShardRange) -> ShardRef:
        """Return a shard, or a range of it, with all that is known of it."""
        ranged, start, stop = shard_range
        number, draw = shard_of(ranged), self.draw_of(ranged)
        _, size, md5 = (None, None, None) if self.facts is None else self.facts[number]
        if self.samples is None:
            return ShardRef(self.urls[number], size, md5, draw=draw)
        count, begin, end = self.samples[number], None, None
        if self.offsets is not None and start < stop and (start or stop < count):  # a part of a shard
            places = self.offsets.of(number)
            begin, end = (None, None) if places is None else (places[start - 1] if start else None, places[stop])
        return ShardRef(self.urls[number], size, md5, start, stop, count, begin, end, draw)

    def key_of(self, shard: int, number: int) -> str:
        return self._indexed.key_of(shard, number)

    def numbers_of(self, key: str) -> list[int]:
        return self._indexed.find(key)

    @property
    def _indexed(self) -> ShardOffsets:
        if self.offsets is None:
            raise ValueError("keys need ShardList(index=...), and indexes of offsets: wds-pipes index SHARDS --offsets")
        return self.offsets

    @property
    def opened(self) -> int:
        return int(self.at.next)

    @property
    def sample_counts(self) -> Sequence[int] | None:
        return self.samples

    def epochs_differ(self) -> str | None:
        differ = self.resampled and len(set(self.samples or ())) > 1
        return (
            ("resampled=True draws other shards in each epoch, and they have different numbers of samples")
            if differ
            else None
        )

    def size_shown(self) -> str:
        return plural(len(self.urls), "shard")

    @classmethod
    def describe(cls, entry: dict[str, Any], lane: LaneFacts) -> str | None:
        if lane.divided:
            return "at the end of its shards" if lane.url is None else f"in {lane.url}"
        per_lane = -(-((lane.shards or 0) - lane.number) // lane.of)
        return f"shard {min(read_count(entry.get('next', 0), repr('next')) + 1, per_lane)} of {per_lane} ({lane.url})"

    def _count_in(self, epoch: int) -> int:
        """Return how many shards an epoch has."""
        return next((count for last, count in self.grown if epoch <= last), len(self.urls))

    def epoch_shards(self, seed: int, epoch: int) -> ShardRanges:
        last, of = self._last.found, (seed, epoch, self._count_in(epoch))
        if last is None or last[0] != of:
            order = self.numbers_in(seed, epoch)
            whole = ShardRanges.whole(order, self.samples)
            if self.resampled:
                whole = ShardRanges(order + (_times_before(order) << _DRAWS), whole.starts, whole.stops)
            last = self._last.found = of, whole
        return last[1]

    def draw_of(self, number: int) -> int | None:
        """Return which of the times that a shard comes in an epoch a range is of; None: each shard
        comes once.
        """
        return number if self.resampled or self.repeated else None

    def samples_after(self, taken: Numbers, lane: Lane) -> tuple[Numbers, Numbers]:
        numbers, insides = ShardRanges.of(lane.shards or ()).samples_after(taken)
        return shard_of(numbers), insides

    def in_ranges(self, shard: int, number: int, lane: Lane) -> list[tuple[int, int]]:
        if not self.resampled:
            return [(shard, number)]
        numbers = self.epoch_shards(lane.seed, lane.epoch).numbers
        return [(ranged, number) for ranged in numbers[shard_of(numbers) == shard].tolist()]

    def numbers_in(self, seed: int, epoch: int) -> npt.NDArray[np.int64]:
        """Return the numbers of all shards in the order of an epoch."""
        count, key = self._count_in(epoch), hash64(seed, epoch, _ORDER)
        if self._bounds is not None:
            return weighted(self._bounds, key, 0, count)
        if self.resampled:
            return below(count, key, 0, count)
        return permutation(count, key) if self.shuffle else np.arange(count)

    def at_sample(self, at: Any, place: SamplePlace) -> Any:
        return self.At(next=place.ranges)

    def where(self, own: tuple[Any, ...], lane: Lane) -> str | None:
        order, place = self.order(lane), own[0] if own else 0
        return shortened_url(redact(self.urls[shard_of(order[place][0])])) if place < len(order) else None


def warn_of_repeated(urls: Packed) -> bool:
    """Warn if a list has a shard more than once, and return whether it has."""
    if not (numbers := urls.repeated()):
        return False
    repeats = f", and {plural(len(numbers), 'repeat')} in all" if numbers[1:] else ""
    logger.warning(
        "the list has shard %s more than once%s, and its samples come as often in each epoch: name each shard once, "
        "also by patterns that overlap. To read some more often than others, use mix(weights=...), or "
        "ShardList(resampled=True, weights=...).",
        redact(urls[numbers[0]]), repeats,
    )  # fmt: skip
    return True


def shard_of(number: Any) -> Any:
    """Return the number of the shard of a range, in the list, for the number of the range; also for
    an array of numbers.

    With ``resampled``, a shard may come several times in an epoch. The number of a range then also
    says how often the shard was drawn before, so that each draw is another range.
    """
    return number & ((1 << _DRAWS) - 1)


def _times_before(order: Numbers) -> Numbers:
    """Return of each number in an array how often it comes before."""
    places = np.argsort(order, kind="stable")
    found = order[places]
    times = np.empty_like(order)
    times[places] = np.arange(len(order)) - np.searchsorted(found, found)
    return times


class Last(Generic[Out]):
    """What a stage has computed last, and of what: it follows from that and from the recipe. All
    copies of the stage have it at once, but another process computes its own.
    """

    found: Out | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Last, ()


def _samples(given: int | Sequence[int] | None, shards: int) -> list[int] | None:
    """Return ``samples_per_shard`` as one number for each shard; None if it is None."""
    if given is None:
        return None
    if not isinstance(given, Iterable):
        return [check_count("samples_per_shard", given)] * shards
    counts = [check_count("samples_per_shard", count, least=0) for count in given]
    if len(counts) != shards:
        raise ValueError(f"samples_per_shard has {len(counts)} numbers, and there are {shards} shards")
    return counts


def _folder(index: object) -> str | None:
    """Return the directory that ``index`` names; None: it names none, or files."""
    if isinstance(index, bool) or not isinstance(index, (str, os.PathLike)):
        return None
    name = at_home(os.fspath(index))
    return name if name.endswith("/") or os.path.isdir(local_path(name) or "") else None
