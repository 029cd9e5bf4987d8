"""MapFields: apply functions to single fields, or to places of tuples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from wds_pipes.core.stage import Stage
from wds_pipes.core.tolerant import OnError
from wds_pipes.errors import SampleError
from wds_pipes.stages.fields import check_sample, field_of, read_choices
from wds_pipes.stages.map_samples import MapSamples


class MapFields(MapSamples[Any]):
    """Apply functions to single fields of each sample, or to places of tuples (functional name:
    ``map_fields``).

    If a function draws from ``rng`` or needs several fields, use ``map_samples``.

    Args:
        source: a pipe of samples as dicts, or as tuples.
        functions: a function for each field, which takes the value and returns the new one. A key
            may name several fields: the first that the sample has is changed, as in
            ``{"jpg;png": resize}``. After ``to_tuple``, the keys are places of the tuple, from 0
            on: ``{0: resize}``.
        seed_all: for functions that draw from global generators, as in ``map_samples``: they are
            seeded once for each sample, before the first function.
        threads: call the functions in this many threads: see ``map_samples``.
        on_error: what to do if a sample lacks one of the fields, or a function raises: ``"raise"``,
            or ``"skip"`` the sample and count it; None: as ``ShardList(on_error=...)`` says. A
            MemoryError is always raised: it is not the fault of the sample.
        max_errors: with ``"skip"``, how many samples may be skipped in an epoch; None: no limit.

    Raises:
        SampleError: during iteration, if a field is missing. The message lists the fields of the
            sample.

    Checkpoint: the number of samples so far. A resume reads nothing again, with threads only the
    samples that were in flight.
    """

    _keeps_keys = True

    def __init__(
        self,
        source: Stage[Any],
        functions: Mapping[str, Callable[[Any], Any]] | Mapping[int, Callable[[Any], Any]],
        *,
        seed_all: bool = False,
        threads: int | None = None,
        on_error: OnError | None = None,
        max_errors: int | None = None,
    ) -> None:
        if not isinstance(functions, Mapping) or not functions or not all(map(callable, functions.values())):
            raise TypeError(f"map_fields() takes functions by field, such as {{'jpg': resize}}, not {functions!r:.80}")
        places = [key for key in functions if type(key) is int]
        if places and len(places) < len(functions):
            raise TypeError(f"map_fields() takes either fields of dicts or places of tuples, not {list(functions)}")
        if places and min(places) < 0:
            raise ValueError(f"places are numbered from 0, unlike {min(places)}")
        by_choices = list(zip(read_choices(functions), functions.values(), strict=True)) if not places else []
        fn = partial(_on_places, dict(functions)) if places else partial(_on_fields, by_choices)
        super().__init__(source, fn, seed_all=seed_all, threads=threads, on_error=on_error, max_errors=max_errors)
        self.called = tuple(functions.values())  # to name the step


def _on_fields(functions: list[tuple[list[str], Callable[[Any], Any]]], sample: Any) -> dict[str, Any]:
    """Apply functions to fields of a sample."""
    check_sample(sample, "map_fields", "before to_tuple(), or number the places, as in {0: fn}")
    changed = dict(sample)
    for names, function in functions:
        name = field_of(sample, names, None)
        changed[name] = function(sample[name])
    return changed


def _on_places(functions: dict[Any, Callable[[Any], Any]], sample: Any) -> tuple[Any, ...]:
    """Apply functions to places of a tuple."""
    if not isinstance(sample, tuple):
        raise TypeError(
            f"map_fields() with numbers takes samples as tuples, and its source gave {type(sample).__name__}: put "
            "it after to_tuple(), or name fields, as in {'jpg': fn}"
        )
    if (last := max(functions)) >= len(sample):
        raise SampleError(f"there is no place {last} in a tuple of {len(sample)}: places are numbered from 0")
    changed = list(sample)
    for place, function in functions.items():
        changed[place] = function(changed[place])
    return type(sample)(*changed) if hasattr(sample, "_fields") else tuple(changed)
