"""ToTuple: turn samples into tuples of selected fields."""

from __future__ import annotations

from typing import Any

from wds_pipes.stages.fields import OfFields


class ToTuple(OfFields[tuple[Any, ...]]):
    """Turn each sample into a tuple of selected fields (functional name: ``to_tuple``).

    Args:
        source: a pipe of samples as dicts.
        fields: one entry for each place of the tuple. An entry may name several fields: the first
            that the sample has is taken, as in ``"jpg;jpeg;png"``. ``"__key__"`` and ``"__url__"``
            are fields too.
        on_error: what to do if a sample lacks one of the fields: ``"raise"``, or ``"skip"`` the
            sample and count it; None: as ``ShardList(on_error=...)`` says.
        max_errors: with ``"skip"``, how many samples may be skipped in an epoch; None: no limit.

    Raises:
        SampleError: during iteration, if a field is missing. The message lists the fields of the
            sample.

    Checkpoint: the number of skipped samples. A resume reads nothing again.
    """

    _keeps_keys = False

    def of_fields(self, sample: dict[str, Any], names: list[str]) -> tuple[Any, ...]:
        return tuple([sample[name] for name in names])
