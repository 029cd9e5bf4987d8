"""MapSamples: apply a function to each sample, with a random generator of its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from wds_pipes.core.order import mix, mix_text
from wds_pipes.core.stage import Stage, functional_name
from wds_pipes.core.tolerant import OnError, Tolerant
from wds_pipes.errors import SampleError, WdsError
from wds_pipes.io.urls import identify
from wds_pipes.stages.collating import identity

_RNG = 3  # the salt of the generators
_OF_CODE = (NameError, TypeError, AttributeError, ImportError, NotImplementedError)  # "skip" does not skip these


class MapSamples(Tolerant[Any]):
    """Apply a function to each sample (functional name: ``map_samples``).

    A function with a second parameter, ``fn(sample, rng)``, gets a ``numpy.random.Generator`` that
    is made for this sample alone, from (seed, epoch, sample). So it draws the same numbers after a
    resume, whatever came before. A dict sample is identified by its ``__key__`` and the number of
    its shard in the list of shards (or by its ``__url__``, if no list has it). So it also draws the
    same numbers in another order, with another number of workers, and after its shards were moved.
    Any other sample is identified by its number in the lane.

    Args:
        source: any pipe.
        fn: ``fn(sample)`` or ``fn(sample, rng)``. It returns the new sample, and never None. Draw
            from ``rng``, not from global generators: their state is not saved.
        on_error: what to do if ``fn`` raises or returns None: ``"raise"``, or ``"skip"`` the sample
            and count it. ``"skip"`` raises what is a mistake in the code and not in a sample:
            NameError, TypeError, AttributeError, ImportError, NotImplementedError. A dict such as
            ``{OSError: "skip", TypeError: "skip"}`` decides by the class of the exception, and
            raises all others; a function of the exception returns ``"skip"`` or ``"raise"``. A
            MemoryError is always raised.
        max_errors: with ``"skip"``, how many samples may be skipped in an epoch; None: no limit.

    Raises:
        SampleError: during iteration, if ``fn`` returned None. What ``fn`` raises is raised as it
            is, with a note that names the sample.

    Checkpoint: the number of samples so far. A resume reads nothing again.
    """

    @dataclass(slots=True)
    class At:
        number: int = 0
        skipped: int = 0
        # 1: samples are identified by the numbers of their shards; 0 in states of an older version:
        # by URLs
        listed: int = 0

    keeps_count = True
    holds_nothing = True

    def __init__(
        self, source: Stage[Any], fn: Callable[..., Any], *, on_error: OnError = "raise", max_errors: int | None = None
    ) -> None:
        super().__init__(source, on_error, max_errors)
        if not callable(fn):
            raise TypeError(f"map_samples() needs a function, not {fn!r}")
        self.fn = fn
        self.takes_rng = self.counts_items = _takes_rng(fn)

    def run(self) -> Iterator[Any]:
        assert self.source is not None
        at, fn, takes_rng, step = self.at, self.fn, self.takes_rng, functional_name(type(self))
        self._place, self._root = _maps(self.source), self.root
        if takes_rng and not at.number:
            at.listed = 1
        for sample in self.source.items:
            at.number += 1
            try:
                result = fn(sample, self._rng(sample)) if takes_rng else fn(sample)
            except Exception as error:
                if not self.skips(error):
                    error.add_note(f"raised by the function of {step}() on {_name(sample, at.number)}")
                    if self.on_error == "skip" and isinstance(error, _OF_CODE):
                        kind = type(error).__name__
                        error.add_note(
                            f"on_error='skip' does not skip a {kind}, which is most often a mistake in the code: if "
                            f"it is one of the data, pass on_error={{Exception: 'skip'}}."
                        )
                    raise
                self.count_skip(_wrapped(step, sample, at.number, error))
                continue
            if result is None:
                self.skip(_nothing(sample, at.number))
                continue
            yield result

    def skips(self, error: Exception) -> bool:
        if isinstance(error, MemoryError) or (self.on_error == "skip" and isinstance(error, _OF_CODE)):
            return False
        return super().skips(error)

    def _rng(self, sample: Any) -> np.random.Generator:
        lane = self.lane
        if isinstance(sample, dict) and "__key__" in sample:
            url = sample.get("__url__")
            shard = None
            if isinstance(url, str):  # shards may have moved before a resume, and credentials may differ
                shard = (self._root.number_of(url) if self.at.listed else None) or identify(url)
            key = mix(lane.seed, lane.epoch, self._place, _RNG, mix_text(f"{shard}\0{sample['__key__']}"))
        else:
            key = lane.key(self._place, _RNG, self.at.number)
        return np.random.Generator(np.random.Philox(key=key))


def _maps(stage: Stage[Any] | None) -> int:
    """Return how many steps of this kind a chain has. This number keeps the generators of one step
    distinct from those of another, and it does not depend on the chain's other steps.
    """
    if stage is not None and stage.branches:
        return max(map(_maps, stage.branches.values()))
    return 0 if stage is None else _maps(stage.source) + isinstance(stage, MapSamples)


def _takes_rng(fn: Callable[..., Any]) -> bool:
    """Return whether ``fn`` takes ``rng``: its second parameter is required, or is named rng."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return False
    places = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    takes = len(places) > 1 and (places[1].name == "rng" or places[1].default is inspect.Parameter.empty)
    try:
        signature.bind(*["sample", "rng"][: 1 + takes])
    except TypeError as error:
        raise TypeError(f"map_samples() needs fn(sample) or fn(sample, rng), not {fn!r}: {error}") from error
    return takes


def _name(sample: Any, number: int) -> str:
    key, url = identity(sample)
    return f"sample {number} of this lane and epoch" if key is None else f"sample {key!r} of shard {url}"


def _nothing(sample: Any, number: int) -> SampleError:
    key, url = identity(sample)
    mend = "let it return the sample; to leave samples out, use filter_samples()"
    return SampleError(
        f"the function of map_samples() returned None for {_name(sample, number)}: {mend}.", url=url, key=key
    )


def _wrapped(step: str, sample: Any, number: int, cause: Exception) -> WdsError:
    key, url = identity(sample)
    error = SampleError(
        f"the function of {step}() raised {type(cause).__name__} on {_name(sample, number)}: {cause}", url=url, key=key
    )
    error.__cause__ = cause
    return error
