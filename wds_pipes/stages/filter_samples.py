"""FilterSamples: keep the samples that a function selects."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from wds_pipes.core.stage import Out, Stage
from wds_pipes.stages.map_samples import DROP, MapSamples, takes_rng


class FilterSamples(MapSamples[Out]):
    """Keep the samples for which a function returns true (functional name: ``filter_samples``).

    Args:
        source: any pipe.
        predicate: ``predicate(sample)``, or ``predicate(sample, rng)`` with a random generator for
            this sample alone, as in ``map_samples``. Any true value keeps the sample. It must have
            no memory between samples, such as a set of the keys that it has seen: each worker
            process would have its own, which stays over epochs, so that the second one gives
            nothing. Write a ``Stage`` for that (tutorial 09); ``wds-pipes dedup`` leaves out what
            comes twice in a data set.

    Checkpoint: the number of samples so far, and of those that were filtered out. A resume reads
    nothing again.
    """

    _keeps_keys = True
    salt = 5  # of its random numbers

    def __init__(self, source: Stage[Out], predicate: Callable[[Out], Any] | Callable[[Out, Any], Any]) -> None:
        takes = takes_rng(predicate, "filter_samples")
        super().__init__(source, partial(_choose, predicate), may_drop=True)
        self.takes_rng, self.called = takes, (predicate,)


def _choose(predicate: Callable[..., Any], sample: Any, *rng: Any) -> Any:
    return sample if predicate(sample, *rng) else DROP
