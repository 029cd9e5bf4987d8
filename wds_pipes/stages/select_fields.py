"""SelectFields: keep only selected fields of samples."""

from __future__ import annotations

from typing import Any

from wds_pipes.stages.fields import OfFields, Taken
from wds_pipes.tar.keys import is_metadata


class SelectFields(OfFields[dict[str, Any]]):
    """Keep only some fields of each sample, in the given order (functional name:
    ``select_fields``).

    ``__key__``, ``__url__`` and other names that begin and end with two underscores are always
    kept. To save time, leave fields out before they are read: name the fields to keep in
    ``group_by_key(fields=...)``.

    Args:
        source: a pipe of samples as dicts.
        fields: the names of the fields to keep. One entry may name several fields: the first that
            the sample has is kept, as in ``"jpg;jpeg;png"``. ``"txt?"`` is kept where a sample has
            it; ``"*.jpg"`` keeps all fields that match.
        on_error: what to do if a sample lacks one of the fields: ``"raise"``, or ``"skip"`` the
            sample and count it; None: as ``ShardList(on_error=...)`` says.
        max_errors: with ``"skip"``, how many samples may be skipped in an epoch; None: no limit.

    Raises:
        SampleError: during iteration, if a field is missing. The message lists the fields of the
            sample.

    Checkpoint: the number of skipped samples. A resume reads nothing again.
    """

    _keeps_keys = True

    def of_fields(self, sample: dict[str, Any], names: list[Taken]) -> dict[str, Any]:
        selected = {name: value for name, value in sample.items() if is_metadata(name)}
        for taken in names:
            for name in [taken] if isinstance(taken, str) else taken or ():
                selected[name] = sample[name]
        return selected
