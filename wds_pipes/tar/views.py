"""Views: which of the samples of shards are selected. SampleList and IndexedShards take the same
selections.

Rules:
1. Keys are compared by their hashes, which the indexes of keys have. Where a hash does not belong
   to one sample and one key, the keys in the tars decide. Two samples with one key are an error.
2. The fingerprint is of the numbers. So selections that are written in different ways are one view
   if they select the same samples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from wds_pipes.core.counts import logger
from wds_pipes.core.order import hash_text
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError, ShardError
from wds_pipes.io.open import Opener
from wds_pipes.io.urls import at_home, redact
from wds_pipes.tar.located import Located

if TYPE_CHECKING:
    import numpy.typing as npt

    Numbers = range | npt.NDArray[np.int64]

Found = TypeVar("Found")


@dataclass(frozen=True)
class KeyRange:
    """The samples whose keys have hashes in a range: a part that ``split_by_key`` returns.

    Attributes:
        start: the first hash, as a number from 0 to 1.
        stop: the end of the hashes, which is not among them.
    """

    start: float
    stop: float

    def has(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Return for each hash whether it is in this part: shape (hashes,)."""
        places = (hashes >> np.uint64(11)).astype(np.float64) / (1 << 53)
        return (self.start <= places) & (places < self.stop)


Selection: TypeAlias = "str | os.PathLike[str] | slice | KeyRange | Iterable[int] | Iterable[str] | npt.NDArray[Any]"


def split_by_key(shares: Mapping[str, float]) -> dict[str, KeyRange]:
    """Divide samples by the hashes of their keys, such as ``{"train": 0.9, "val": 0.1}``.

    A key is in the same part whatever other samples there are, so shards may be added later::

        parts = wp.split_by_key({"train": 0.9, "val": 0.1})
        wp.SampleList("train-{000..099}.tar", where=parts["train"])

    Args:
        shares: the names of the parts and their shares, which sum to 1. Their order matters.

    Returns:
        The parts by their names, for ``where`` and ``exclude``.

    Raises:
        ValueError: the shares do not sum to 1, or one is not above 0.
        TypeError: the shares have no names.
    """
    if not isinstance(shares, Mapping):
        raise TypeError(f'the shares have names, as {{"train": 0.9, "val": 0.1}}, and these have none: {shares!r:.80}')
    for name, share in shares.items():
        if not isinstance(share, (int, float, np.number)):
            raise TypeError(f"the share of {name!r} must be a number, not {share!r:.80}")
    ends = np.cumsum([float(share) for share in shares.values()]).tolist()
    if not shares or abs(ends[-1] - 1) > 1e-9 or any(not share > 0 for share in shares.values()):
        raise ValueError(f"the shares must be above 0 and sum to 1, not {dict(shares)}")
    ends[-1] = 1.0
    return {name: KeyRange(start, stop) for name, start, stop in zip(shares, [0.0, *ends[:-1]], ends, strict=True)}


@dataclass(frozen=True)
class Selector:
    """Selects samples of shards.

    Args:
        located: the samples.
    """

    located: Located

    def select(self, view: Numbers, where: Selection | None, exclude: Selection | None) -> Numbers:
        """Return a view of a view. Its samples keep their order; those that are selected by numbers
        come in the order of these.

        Args:
            view: the numbers of the samples to select from.
            where: which of them to select; None: all.
            exclude: which of these to leave out again; None: none.

        Raises:
            ValueError, TypeError, IndexError: a selection does not fit.
            ShardError: an index or a file of keys cannot be read.
            SampleError: two samples have the same key, and it is not known which is meant.
        """
        found = view if where is None else self._find(where, view, "where")
        if exclude is not None:
            without = self._find(exclude, view, "exclude")
            if len(without):
                kept = as_array(found)
                found = compact(kept[~among(kept, np.sort(as_array(without)))])
        return found

    def with_keys(self, view: Numbers, keys: Iterable[str]) -> npt.NDArray[np.int64]:
        """Return the places in a view of its samples that have one of these keys, sorted.

        Raises:
            ValueError, ShardError, SampleError: as in ``select``.
        """
        found = self._by_keys(keys)
        if isinstance(view, range):
            return np.sort((as_array(of_view(view, found)) - view.start) // view.step)
        return np.flatnonzero(among(view, found))

    def missing(self, keys: Iterable[str]) -> list[str]:
        """Return those of these keys that no sample has, in or outside of a view.

        Raises:
            ShardError: an index of keys cannot be read.
        """
        keys = list(keys)
        hashes = hashes_of(keys)
        held = [own[among(own, np.sort(hashes))] for own, _ in self._each(self.located.keys, self.located.with_samples)]
        there = among(hashes, np.unique(np.concatenate([hashes[:0], *held])))
        return [key for key, found in zip(keys, there.tolist(), strict=True) if not found]

    def _find(self, wanted: Any, view: Numbers, option: str) -> Numbers:
        """Return the samples of a view that a selection has."""
        if isinstance(wanted, KeyRange):
            return of_view(view, self._by_hash(wanted))
        if isinstance(wanted, str) and not wanted.startswith("@"):
            raise ValueError(
                f"{option}={wanted!r:.300} is not '@keys.txt', a file of keys. For a condition over metadata, "
                f"wds-pipes select SHARDS --where {wanted!r:.300} -o keys.txt writes the keys"
            )
        if isinstance(wanted, str) and wanted == "@":
            raise ValueError(f"{option}='@' names no file of keys: write '@keys.txt', a file with a key on each line")
        if isinstance(wanted, (str, os.PathLike)):
            text = os.fspath(wanted)
            wanted = read_keys(text[1:] if isinstance(wanted, str) else text, self.located.opener)
        if isinstance(wanted, (slice, range)):
            return by_numbers(wanted, view)
        single = not hasattr(wanted, "__iter__") or getattr(wanted, "ndim", 1) == 0
        if isinstance(wanted, (bytes, Mapping)) or single:
            raise TypeError(f"{option} must be {KINDS}, not {wanted!r:.80}")
        if isinstance(wanted, (set, frozenset)):
            is_of_numbers = all(isinstance(one, (int, np.integer)) for one in wanted)
            is_of_keys = all(isinstance(one, str) for one in wanted)
            wanted = sorted(wanted) if is_of_numbers or is_of_keys else list(wanted)
        elif not hasattr(wanted, "__len__"):
            wanted = list(wanted)
        if len(wanted) > 0 and isinstance(next(iter(wanted)), str):
            return of_view(view, self._by_keys(wanted))
        return by_numbers(wanted, view)

    def _each(self, function: Callable[[int], Found], numbers: Sequence[int]) -> list[Found]:
        """Return the results of a function of each number, of which several run at once."""
        with ThreadPoolExecutor(self.located.connections) as pool:
            return list(pool.map(function, numbers))

    def _by_hash(self, part: KeyRange) -> npt.NDArray[np.int64]:
        """Return the numbers of the samples in a part, sorted."""

        def of_shard(shard: int) -> npt.NDArray[np.int64]:
            hashes, numbers = self.located.keys(shard)
            return np.sort(numbers[part.has(hashes)]).astype(np.int64) + self.located.starts[shard]

        return _joined(self._each(of_shard, self.located.with_samples))

    def _by_keys(self, keys: Iterable[str]) -> npt.NDArray[np.int64]:
        """Return the numbers of the samples with these keys, sorted; ValueError: there is none."""
        wanted = set(keys)
        if not all(isinstance(key, str) for key in wanted):
            raise TypeError("keys are strings: pass a list of keys, or one of numbers")
        found = self._with_keys(wanted)
        if not len(found):
            raise ValueError(
                f"no sample has one of {plural(len(wanted), 'key')}, such as {min(wanted)!r:.200}. "
                f"{self._example(wanted)}"
            )
        if len(found) < len(wanted):
            logger.warning("%d of %d keys have no sample", len(wanted) - len(found), len(wanted))
        return found

    def _example(self, wanted: Collection[str]) -> str:
        """Return which key the first sample has, for a message."""
        if not self.located.starts[-1]:
            return "The shards have no samples"
        shown = redact(self.located.urls[self.located.place(0)[0]])
        return example_of(self.located.key_of(0), wanted, f" of shard {shown}")

    def _with_keys(self, wanted: Collection[str]) -> npt.NDArray[np.int64]:
        """Return the numbers of the samples that have one of these distinct keys, sorted."""
        hashes = np.sort(hashes_of(wanted))

        def of_shard(shard: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
            own, numbers = self.located.keys(shard)
            held = among(own, hashes)
            return own[held], numbers[held].astype(np.int64) + self.located.starts[shard]

        parts = self._each(of_shard, self.located.with_samples)
        found = np.concatenate([hashes[:0], *(hashes for hashes, _ in parts)])
        numbers = _joined([numbers for _, numbers in parts])
        order = np.argsort(found, kind="stable")
        found, numbers = found[order], numbers[order]
        doubtful = among(found, np.union1d(repeated(hashes), repeated(found)))
        if doubtful.any():
            decided = np.fromiter(self._by_tars(numbers[doubtful].tolist(), wanted), np.int64)
            numbers = np.concatenate([numbers[~doubtful], decided])
        return np.sort(numbers)

    def _by_tars(self, numbers: Iterable[int], wanted: Collection[str]) -> Iterator[int]:
        """Yield those of some samples that have one of these keys in their tars."""
        seen: dict[str, int] = {}
        for number in numbers:
            key = self.located.key_of(number)
            if key not in wanted:
                continue
            if key in seen:
                first, second = (redact(self.located.urls[self.located.place(one)[0]]) for one in (seen[key], number))
                raise SampleError(
                    f"two samples have the key {key!r}, in shards {first} and {second}: select them by their numbers",
                    url=second,
                    key=key,
                )
            seen[key] = number
            yield number


def hashes_of(keys: Collection[str]) -> npt.NDArray[np.uint64]:
    """Return the hashes of keys, as the indexes of keys have them: shape (keys,)."""
    return np.fromiter(map(hash_text, keys), np.uint64, len(keys))


def example_of(key: str, wanted: Collection[str], where: str = "") -> str:
    """Return which key the first sample has, for a message, and what is different in it: ``tar cf
    shard.tar ./*`` and ``find .`` write ``./`` before names.
    """
    dotted = key.startswith("./")
    differs = any(one.startswith("./") != dotted for one in wanted)
    hint = f": with './', which is a part of {'its key' if dotted else 'the others'}" if differs else ""
    return f"The first sample{where} has the key {key!r:.200}{hint}"


def read_keys(url: str, opener: Opener) -> list[str]:
    """Return the lines of a file of keys.

    Raises:
        ValueError: it has none.
        ShardError: it cannot be read.
    """
    try:
        with opener.open(at_home(url)) as stream:
            text = stream.read().decode("utf-8-sig", "surrogateescape")
    except ShardError as error:
        if not error.missing:
            raise
        shown = redact(url)
        missing = ShardError(f"the list of keys {shown} does not exist: name a file with a key on each line", url=shown)
        missing.missing = True
        raise missing from error
    keys = [line for line in text.replace("\r\n", "\n").split("\n") if line]
    if not keys:
        raise ValueError(f"the list of keys {redact(url)!r} is empty: it has a key on each line")
    return keys


def _joined(parts: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    return np.concatenate([np.empty(0, np.int64), *parts])


# The numbers of the samples of a view: a range, or an array of 8 bytes a sample. Numbers with equal
# steps are always a range, so every n-th of 10**9 samples takes no memory.

KINDS = "keys, '@keys.txt', a slice, a range, numbers of samples, or a part of split_by_key()"


def numbers_at(view: Numbers, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the numbers of the samples at places of a view: int64, in the shape of ``places``."""
    return places * view.step + view.start if isinstance(view, range) else view[places]


def described(view: Numbers, count: int) -> str | None:
    """Return a text that differs for different views of ``count`` samples; None: the view has all
    of them, in order.
    """
    if isinstance(view, range):
        if view == range(count):
            return None
        content = f"{view.start} {view.step} {len(view)}".encode()
    else:
        content = view.astype("<i8", copy=False).tobytes()
    digest = blake2b(f"{count} ".encode() + content, digest_size=8)
    return f"{len(view)} of {count} samples, fingerprint {digest.hexdigest()}"


def by_numbers(wanted: Any, view: Numbers) -> Numbers:
    """Return the samples at places of a view: those of a slice, a range, integers (negative ones
    count from the end), or an array of bools, which says of each sample whether it is selected.

    Raises:
        IndexError: there is no sample at one of these places.
        TypeError: they are not integers, or an array of bools has another length.
    """
    count = len(view)
    if isinstance(wanted, slice):
        return compact(view[wanted])
    if isinstance(wanted, range):
        low, high = sorted((wanted[0], wanted[-1])) if wanted else (0, -1)
        if low < -count or high >= count:
            raise _no_sample(high if high >= count else low, count)
        if low >= 0:
            return compact(
                view[wanted.start : wanted.stop if wanted.stop >= 0 else None : wanted.step] if wanted else range(0)
            )
    given = as_array(wanted) if isinstance(wanted, range) else np.asarray(wanted)
    if given.dtype == bool and given.shape == (count,):
        given = np.flatnonzero(given)
    if given.dtype == bool and given.ndim == 1:
        raise TypeError(f"samples are selected by one bool for each of {count}, and this array has {given.size}")
    if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
        raise TypeError(f"samples are selected by {KINDS}, not by {wanted!r:.80}")
    wrong = given[(given < -count) | (given >= count)]
    if wrong.size:
        raise _no_sample(int(wrong[0]), count)
    given = given.astype(np.int64)  # before the sum, for which 8 bits may be too few
    return compact(numbers_at(view, np.where(given < 0, given + count, given)))


def _no_sample(number: int, count: int) -> IndexError:
    return IndexError(f"there is no sample {number}: there are {count}")


def as_array(view: Numbers) -> npt.NDArray[np.int64]:
    """Return the numbers of a view: int64, shape (samples,)."""
    # asarray() of a range would make an object of each number
    return np.arange(view.start, view.stop, view.step) if isinstance(view, range) else view


def compact(view: Numbers) -> Numbers:
    """Return a view as a range if it is one, in one form for equal ones."""
    count = len(view)
    if count < 2:
        first = int(view[0]) if count else 0
        return range(first, first + count)
    first, step = int(view[0]), int(view[1]) - int(view[0])
    if isinstance(view, range) or (
        step and int(view[-1]) == first + (count - 1) * step and (np.diff(view) == step).all()
    ):
        return range(first, first + count * step, step)
    return view


def of_view(view: Numbers, found: npt.NDArray[np.int64]) -> Numbers:
    """Return those of some samples that are in a view, in its order. ``found`` is sorted."""
    if not isinstance(view, range):
        return compact(view[among(view, found)])
    places, rests = np.divmod(found - view.start, view.step)
    places = places[(rests == 0) & (places >= 0) & (places < len(view))]
    return compact(numbers_at(view, np.sort(places)))


def among(values: npt.NDArray[Any], some: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return for each value whether it is among some sorted ones: shape (values,)."""
    if not some.size:
        return np.zeros(len(values), bool)
    found: npt.NDArray[np.bool_] = some[np.minimum(np.searchsorted(some, values), len(some) - 1)] == values
    return found


def repeated(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return those of sorted values that come more than once."""
    found: npt.NDArray[np.uint64] = values[1:][values[1:] == values[:-1]]
    return found
