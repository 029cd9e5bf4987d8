"""The lengths of samples, for the steps that pack them or make batches of like length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from wds_pipes.core.options import check_count
from wds_pipes.core.stage import functional_name
from wds_pipes.core.windowed import Sized, Windowed
from wds_pipes.errors import SampleError
from wds_pipes.stages.fields import check_sample, field_of, identity


def length_of(step: Windowed[Any], sample: Any) -> Sized:
    """Return a sample with its length, by the option ``length`` of a step.

    Raises:
        SampleError: the sample has no such field, or its value has no length.
    """
    if callable(step.length):
        return Sized(sample, check_count("the length of a sample", step.length(sample), least=0))
    check_sample(sample, functional_name(type(step)))
    value = sample[field_of(sample, [step.length], step.source)]
    if not _has_length(value):
        named = identity(sample)
        raise SampleError(
            f"field {step.length!r} of {named.name()} is {type(value).__name__}, not a list, an array or a tensor: "
            "decode it first",
            url=named.url,
            key=named.key,
        )
    return Sized(sample, len(value))


def is_as_long(name: str, group: Sequence[Sized]) -> bool:
    """Return whether a field is as long as each of these samples."""
    return all(_has_length(sample.get(name)) and len(sample[name]) == length for sample, length in group)


def as_array(value: Any) -> Any:
    """Return a list, array or tensor as an array; Python ints become int64."""
    is_ints = isinstance(value, list) and all(type(one) is int for one in value)
    return np.asarray(value, np.int64 if is_ints else None)


def too_long(sized: Sized, budget: int, mend: str) -> SampleError:
    """Return the error for a sample that is longer than a budget."""
    named = identity(sized.sample)
    return SampleError(
        f"{named.name()} has the length {sized.length:,}, more than the budget of {budget:,}. {mend}",
        url=named.url,
        key=named.key,
    )


def _has_length(value: Any) -> bool:
    return isinstance(value, list) or (hasattr(value, "shape") and len(value.shape) > 0)
