"""ToTuple: turn samples into tuples of selected fields."""

from __future__ import annotations

from typing import Any

from wds_pipes.stages.fields import OfFields, Taken, values_of


class ToTuple(OfFields[tuple[Any, ...]]):
    """Turn each sample into a tuple of selected fields (functional name: ``to_tuple``).

    Args:
        source: a pipe of samples as dicts.
        fields: one entry for each place of the tuple. An entry may name several fields: the first
            that the sample has is taken, as in ``"jpg;jpeg;png"``. With a ``?`` at its end, as in
            ``"txt?"``, a sample may lack it: then the place has None. A name with a ``*``, as in
            ``"*.jpg"``, stands for the list of all fields that match, in natural order (``2.jpg``
            before ``10.jpg``); ``"*.jpg?"`` may be an empty list. ``"__key__"`` and ``"__url__"``
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

    def of_fields(self, sample: dict[str, Any], names: list[Taken]) -> tuple[Any, ...]:
        return tuple([sample[name] if type(name) is str else values_of(sample, name) for name in names])
