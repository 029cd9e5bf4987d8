"""The order of the samples of several data sets that are mixed, by the rule of the step ``mix``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wds_pipes.core.order import hash64
from wds_pipes.stages.proportions import TURNS, turns, whole_weights


class Weighted(NamedTuple):
    """A data set: its URLs, and its weight as a whole number."""

    url: str
    weight: int


def is_weighted(text: str) -> bool:
    """Whether this is ``URLS=WEIGHT``."""
    url, equals, weight = text.rpartition("=")
    try:
        float(weight)
    except ValueError:
        return False
    return bool(url and equals)


def read_sources(given: Sequence[str]) -> list[Weighted]:
    """Read data sets with weights.

    Raises:
        ValueError: one is not written as ``URLS=WEIGHT``.
    """
    urls, weights = [], []
    for text in given:
        if not is_weighted(text):
            raise ValueError(f"a data set is written as URLS=WEIGHT, such as 'web/*.tar=0.7', not {text!r:.200}")
        url, _, weight = text.rpartition("=")
        urls.append(url)
        weights.append(float(weight))
    if len(set(urls)) < len(urls):
        raise ValueError("a data set is named twice: name it once, with the sum of its weights")
    whole = whole_weights(urls, weights)
    return [Weighted(url, whole[url]) for url in urls]


def mixed_numbers(firsts: Sequence[int], weights: Sequence[int], exhausted: str) -> npt.NDArray[np.int64]:
    """Return the numbers of the samples of several data sets, mixed.

    Args:
        firsts: the number of the first sample of each data set, and that of all samples.
        weights: one for each.
        exhausted: "stop" where the one that comes next has no more samples; "drop": the others
            continue, and their proportions start anew.
    """
    counts = [stop - start for start, stop in pairwise(firsts)]

    def numbers() -> Iterator[int]:
        drawn, live = [0] * len(counts), list(range(len(counts)))
        while live:
            hashes = [hash64(TURNS, source) for source in live]
            for turn in turns([weights[source] for source in live], hashes, [0] * len(live)):
                source = live[turn]
                if drawn[source] == counts[source]:
                    break
                yield firsts[source] + drawn[source]
                drawn[source] += 1
            live.remove(source)
            if exhausted == "stop":
                return

    return np.fromiter(numbers(), np.int64)
