"""FilterSamples: keep the samples that a function selects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from wds_pipes.core.running import Out
from wds_pipes.core.stage import Stage
from wds_pipes.stages.draws import Draws, takes_rng
from wds_pipes.stages.identity import identity

_RNG = 5  # the salt of the generators


class FilterSamples(Stage[Out]):
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

    @dataclass(slots=True)
    class At:
        filtered: int = 0
        number: int = 0

    tallies = ("filtered",)
    holds_nothing = True

    def __init__(self, source: Stage[Out], predicate: Callable[[Out], Any] | Callable[[Out, Any], Any]) -> None:
        super().__init__(source)
        if not callable(predicate):
            raise TypeError(f"filter_samples() needs a function, not {predicate!r}")
        self.predicate: Callable[..., Any] = predicate
        self.takes_rng = self.counts_items = takes_rng(predicate, "filter_samples")

    def run(self) -> Iterator[Out]:
        assert self.source is not None
        at, predicate = self.at, self.predicate
        draws = Draws(self, FilterSamples, _RNG) if self.takes_rng else None
        for sample in self.source.items:
            try:
                if draws is None:
                    keep = predicate(sample)
                else:
                    at.number += 1
                    keep = predicate(sample, draws.rng(sample, at.number))
            except Exception as error:
                name = identity(sample).name() if isinstance(sample, dict) else f"{sample!r:.80}"
                error.add_note(f"raised by the function of filter_samples() on {name}")
                raise
            if keep:
                yield sample
            else:
                at.filtered += 1
