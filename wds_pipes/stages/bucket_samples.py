"""BucketSamples: batches of samples of like length."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from wds_pipes.core.options import check_count
from wds_pipes.core.stage import Stage
from wds_pipes.core.windowed import Sized, Windowed
from wds_pipes.stages.collating import stack_samples
from wds_pipes.stages.lengths import as_array, is_as_long, length_of, too_long


class BucketSamples(Windowed[Any]):
    """Make batches of samples of like length (functional name: ``bucket_samples``).

    If ``length`` is the name of a field, that field is padded to the longest of its batch, to shape
    (batch, longest), and so is each field that is as long, such as labels. The other fields are
    collated as ``batch_samples`` does, and ``lengths`` has the lengths: int64, shape (batch,). If
    ``length`` is a function, a batch is the list of its samples.

    Args:
        source: any pipe of samples.
        length: the name of a field (a list, array or tensor, whose first dimension is the length),
            or a function that returns the length of a sample.
        batch_size: how many samples a batch has; with ``boundaries`` it may be a list, with a
            number for each bucket.
        budget: instead of ``batch_size``: how many elements a batch has at most, with its padding:
            its samples times the longest of them.
        boundaries: the greatest lengths of the buckets, increasing; longer samples are in a bucket
            of their own. A batch has samples of one bucket, in the order in which they came. None:
            the samples of a window are sorted by their lengths.
        window: how many samples are looked at together, at least 1. Batches come in the order of
            their first samples. A sample waits for others of its bucket at most until the end of
            the next window; then its batch is yielded as it is.
        pad: the value that fills up shorter samples.

    Raises:
        SampleError: during iteration: a sample has no such field, is longer than ``budget``, or
            cannot be collated.
        TypeError, ValueError: when the stage is built: an option is wrong.

    Checkpoint: a few numbers, a bit for each sample of a window, and the position of the source
    before the window from which samples were carried over. A resume reads at most 2 * ``window``
    samples again.
    """

    order_options = ("length", "batch_size", "budget", "boundaries", "window")

    def __init__(
        self,
        source: Stage[Any],
        length: str | Callable[[Any], int],
        batch_size: int | Sequence[int] | None = None,
        *,
        budget: int | None = None,
        boundaries: Sequence[int] | None = None,
        window: int = 1024,
        pad: float = 0,
    ) -> None:
        super().__init__(source, length, window)
        if (batch_size is None) == (budget is None):
            raise ValueError("bucket_samples() needs either batch_size= or budget=")
        self.boundaries = [check_count("a boundary", boundary) for boundary in boundaries or ()]
        if any(after <= before for before, after in pairwise(self.boundaries)):
            raise ValueError(f"boundaries must increase, unlike {self.boundaries!r:.80}")
        self.budget = None if budget is None else check_count("budget", budget)
        buckets = len(self.boundaries) + 1
        sizes = [batch_size] * buckets if batch_size is None or isinstance(batch_size, int) else list(batch_size)
        if len(sizes) != buckets:
            raise ValueError(f"batch_size has {len(sizes)} numbers, and there are {buckets} buckets")
        self.batch_size = [size and check_count("batch_size", size) for size in sizes]
        self.pad = pad

    def sized(self, sample: Any) -> Sized:
        sized = length_of(self, sample)
        if self.budget is not None and sized.length > self.budget:
            raise too_long(sized, self.budget, "Pass a larger budget, or leave it out with filter_samples().")
        return sized

    def arranged(
        self, held: Sequence[Sized], window: Sequence[Sized], *, last: bool
    ) -> tuple[list[list[Sized]], list[Sized]]:
        samples = [*held, *window]
        buckets: defaultdict[int, list[int]] = defaultdict(list)
        for number, sample in enumerate(samples):
            buckets[bisect_left(self.boundaries, sample.length)].append(number)
        groups, left = list[list[int]](), list[int]()
        for bucket, numbers in buckets.items():
            if not self.boundaries:
                numbers.sort(key=lambda number: samples[number].length)
            *full, rest = self._cut(samples, numbers, self.batch_size[bucket])
            groups += full
            if last or min(rest) < len(held):
                groups.append(rest)
            else:
                left += rest
        groups.sort(key=min)
        return [[samples[number] for number in group] for group in groups], [samples[number] for number in left]

    def _cut(self, samples: Sequence[Sized], numbers: Sequence[int], size: int | None) -> Iterator[list[int]]:
        """Yield the batches of one bucket."""
        batch, longest = list[int](), 0
        for number in numbers:
            longest = max(longest, samples[number].length)
            if len(batch) == size or (self.budget is not None and longest * (len(batch) + 1) > self.budget):
                yield batch
                batch, longest = [], samples[number].length
            batch.append(number)
        yield batch

    def joined(self, group: Sequence[Sized]) -> Any:
        if callable(self.length):
            return [sample for sample, _ in group]
        longest = max(length for _, length in group)
        padded = [name for name in group[0].sample if is_as_long(name, group)]
        rows = []
        for sample, length in group:
            fill = longest - length
            arrays = {name: as_array(sample[name]) for name in padded}
            rows.append(
                {
                    **sample,
                    **{
                        name: np.pad(array, [(0, fill), *[(0, 0)] * (array.ndim - 1)], constant_values=self.pad)
                        for name, array in arrays.items()
                    },
                    "lengths": length,
                }
            )
        return stack_samples(rows)
