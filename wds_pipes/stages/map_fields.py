"""MapFields: functions of single fields."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from wds_pipes.core.stage import Stage
from wds_pipes.stages.fields import check_sample, first_of, missing, read_choices
from wds_pipes.stages.map_samples import MapSamples


class MapFields(MapSamples):
    """Apply functions to single fields of each sample (functional name: ``map_fields``).

    To draw at random, or where a function needs several fields, use ``map_samples``.

    Args:
        source: a pipe of samples as dicts.
        functions: for a field's name, or several of which the first that is there is taken, a function of its value: ``{"jpg;png": resize}``.
        on_error: for a sample that lacks one of the fields, or on which a function raises: ``"raise"``, or ``"skip"`` it and count it. A MemoryError is always
            raised: it is no fault of the sample's.
        max_errors: with ``"skip"``, how many samples may be skipped in an epoch; None: any number.

    Raises:
        SampleError: from the iteration: a field is missing; the message says which there are.

    Checkpoint: the number of samples so far. A resume reads nothing again.
    """

    def __init__(self, source: Stage[Any], functions: Mapping[str, Callable[[Any], Any]], *, on_error: str = "raise", max_errors: int | None = None) -> None:
        if not isinstance(functions, Mapping) or not functions or not all(map(callable, functions.values())):
            raise TypeError(f"map_fields() takes functions by field, such as {{'jpg': resize}}, not {functions!r:.80}")
        super().__init__(source, _OnFields(functions), on_error=on_error, max_errors=max_errors)


class _OnFields:
    """Functions of fields as one of samples."""

    def __init__(self, functions: Mapping[str, Callable[[Any], Any]]) -> None:
        self._functions = list(zip(read_choices(functions), functions.values(), strict=True))

    def __call__(self, sample: Any) -> dict[str, Any]:
        check_sample(sample, "map_fields")
        changed = dict(sample)
        for names, function in self._functions:
            if (name := first_of(sample, names)) is None:
                raise missing(None, sample, names)
            changed[name] = function(sample[name])
        return changed
