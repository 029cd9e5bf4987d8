"""BucketSamples: batches of samples of like length."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import Any

from wds_pipes.core.options import check_count
from wds_pipes.core.stage import Stage
from wds_pipes.stages.collating import as_tensor, stack_samples
from wds_pipes.stages.windowed import Arranged, Windowed


class BucketSamples(Windowed[Any]):
    """Make batches of samples of like length (functional name: ``bucket_samples``).

    If ``length`` is the name of a field, that field is padded to the longest of its batch: a tensor
    of shape (batch, longest, ...), of the field's dtype. So is each of the ``aligned`` fields. The
    other fields are collated as ``batch_samples`` does, and ``lengths`` has the lengths: int64,
    shape (batch,). If ``length`` is a function, a batch is the list of its samples.

    Samples whose field is empty are left out, and count as dropped.

    Args:
        source: any pipe of samples.
        length: the name of a field (a list, array or tensor of numbers, whose first dimension is
            the length), or a function that returns the length of a sample, or the number of its
            bucket.
        batch_size: how many samples a batch has; with ``boundaries`` it may be a list, with a
            number for each bucket.
        budget: instead of ``batch_size``: how many elements a batch has at most, with its padding:
            the number of its samples times the longest of them.
        boundaries: the greatest lengths of the buckets, increasing; longer samples are in one more
            bucket. A batch has samples of one bucket. None: one bucket.
        sort: sort the samples of a window by their lengths before they fill the buckets, so that a
            batch needs less padding. False: samples fill their bucket in the order in which they
            came. None: sort them if there are no ``boundaries``.
        aligned: names of other fields that are as long, such as labels.
        window: how many samples are looked at together, from 1 to 4096. Batches come in the order
            in which their first samples came, which is random if the order of samples is, also with
            ``sort``. A sample waits for others of its bucket at most until the end of
            the next window; then its batch is yielded as it is, with fewer samples.
        pad: the value that fills up shorter samples: a number, or a dict with one for the field and
            each of ``aligned``, such as ``{"tokens": 0, "labels": -100}``. If ``length`` is a
            function, nothing is filled up.

    Raises:
        SampleError: during iteration: a sample is longer than ``budget``, or lacks a field; a field
            is no list, array or tensor of numbers, or differs from those of the other samples in
            dtype or shape; an ``aligned`` field has another length; the other fields cannot be
            collated.
        TypeError, ValueError: when the stage is built: an option is wrong.

    The number of batches of an epoch is not known before: on several ranks, use PipeLoader with
    ``epoch_end="loop"`` and ``with_epoch(batches=...)``, so that each rank gets as many.

    Checkpoint: a few numbers, a bit for each sample of a window, and the position of the source
    before the window from which samples were carried over. A resume reads at most 2 * ``window``
    samples again. On another number of ranks or workers, what is left of a lane is batched for
    itself, so some more batches may have fewer samples.
    """

    order_options = ("field", "batch_size", "budget", "boundaries", "sort", "window")

    def __init__(
        self,
        source: Stage[Any],
        length: str | Callable[[Any], int],
        batch_size: int | Sequence[int] | None = None,
        *,
        budget: int | None = None,
        boundaries: Sequence[int] | None = None,
        sort: bool | None = None,
        aligned: Sequence[str] = (),
        window: int = 1024,
        pad: float | Mapping[str, float] = 0,
    ) -> None:
        super().__init__(source, length, aligned, pad, window)
        if (batch_size is None) == (budget is None):
            raise ValueError("bucket_samples() needs either batch_size= or budget=")
        self.budget = self.limit = None if budget is None else check_count("budget", budget)
        self.boundaries = [check_count("a boundary", boundary, least=0) for boundary in boundaries or ()]
        if any(after <= before for before, after in pairwise(self.boundaries)):
            raise ValueError(f"boundaries must increase, unlike {self.boundaries!r:.80}")
        self.sort = not self.boundaries if sort is None else bool(sort)
        buckets = len(self.boundaries) + 1
        sizes = list(batch_size) if isinstance(batch_size, Sequence) else [batch_size] * buckets
        if len(sizes) != buckets:
            raise ValueError(f"batch_size has {len(sizes)} numbers, and there are {buckets} buckets")
        self.batch_size = None if budget is not None else [check_count("batch_size", size) for size in sizes]

    def arranged(self, lengths: Sequence[int], held: int, *, last: bool) -> Arranged:
        buckets: defaultdict[int, list[int]] = defaultdict(list)
        for number, length in enumerate(lengths):
            if length or self.field is None:
                buckets[bisect_left(self.boundaries, length)].append(number)
        groups, left = list[list[int]](), list[int]()
        for bucket, numbers in buckets.items():
            if self.sort:
                numbers.sort(key=lambda number: lengths[number])
            size = None if self.batch_size is None else self.batch_size[bucket]
            *full, rest = self._cut(lengths, numbers, size)
            groups += full
            if last or len(rest) == size or min(rest) < held:
                groups.append(rest)
            else:
                left += rest
        # By their first samples: a batch of many short samples comes no sooner than one of few.
        return Arranged(sorted(groups, key=itemgetter(0)), sorted(left))

    def _cut(self, lengths: Sequence[int], numbers: Sequence[int], size: int | None) -> Iterator[list[int]]:
        """Yield the batches of one bucket; the last one may have fewer samples than it could."""
        batch, longest = list[int](), 0
        for number in numbers:
            longest = max(longest, lengths[number])
            if len(batch) == size or (self.budget is not None and longest * (len(batch) + 1) > self.budget):
                yield batch
                batch, longest = [], lengths[number]
            batch.append(number)
        yield batch

    def joined(self, samples: list[Any], lengths: list[int]) -> Any:
        if self.field is None:
            return samples
        self.check_free(samples[0], ["lengths"])
        padded = {}
        for name in self.aligned:
            arrays = self.arrays_of(name, samples, lengths)
            batch = self.filled(name, (len(samples), max(lengths), *arrays[0].shape[1:]), arrays[0].dtype)
            for row, array in zip(batch, arrays, strict=True):
                row[: len(array)] = array
            padded[name] = as_tensor(batch)
        # a number in the place of each of these fields keeps the order of the fields
        placeholders = dict.fromkeys(padded, 0)
        rows = [{**sample, **placeholders, "lengths": length} for sample, length in zip(samples, lengths, strict=True)]
        return stack_samples(rows) | padded
