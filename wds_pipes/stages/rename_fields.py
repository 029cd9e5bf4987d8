"""RenameFields: rename fields of samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wds_pipes.core.stage import Stage
from wds_pipes.core.tolerant import OnError
from wds_pipes.errors import SampleError
from wds_pipes.stages.fields import OfFields, Taken, identity, values_of


class RenameFields(OfFields[dict[str, Any]]):
    """Rename fields of each sample; the others stay as they are (functional name:
    ``rename_fields``).

    Put it after ``decode_by_ext``, which decodes by the original names.

    Args:
        source: a pipe of samples as dicts.
        names: the old name for each new name: ``{"image": "jpg;png", "label": "cls"}``. If several
            old names are given, the first that the sample has is renamed. ``"txt?"`` is renamed
            where a sample has it. All fields that match ``"*.jpg"`` become one field with the list
            of their values, in natural order.
        on_error: what to do if a sample lacks a field to rename, or already has a field with the
            new name: ``"raise"``, or ``"skip"`` the sample and count it; None: as
            ``ShardList(on_error=...)`` says.
        max_errors: with ``"skip"``, how many samples may be skipped in an epoch; None: no limit.

    Raises:
        SampleError: during iteration, if a field is missing or two fields would have one name. The
            message lists the fields of the sample.

    Checkpoint: the number of skipped samples. A resume reads nothing again.
    """

    _keeps_keys = True

    def __init__(
        self,
        source: Stage[Any],
        names: Mapping[str, str],
        *,
        on_error: OnError | None = None,
        max_errors: int | None = None,
    ) -> None:
        if not isinstance(names, Mapping) or not names or not all(isinstance(name, str) and name for name in names):
            raise TypeError(
                f"rename_fields() takes new names with the old ones, such as {{'image': 'jpg;png'}}, not {names!r:.80}"
            )
        super().__init__(source, *names.values(), on_error=on_error, max_errors=max_errors)
        self.names = list(names)

    def of_fields(self, sample: dict[str, Any], names: list[Taken]) -> dict[str, Any]:
        new_names = {taken: new for taken, new in zip(names, self.names, strict=True) if type(taken) is str}
        lists: dict[str, list[str]] = {}
        listed: list[str] = []
        if len(new_names) < len(names):
            lists = {new: taken for taken, new in zip(names, self.names, strict=True) if isinstance(taken, list)}
            listed = [name for taken in lists.values() for name in taken]
        renamed = {new_names.get(name, name): value for name, value in sample.items() if name not in listed}
        for new, taken in lists.items():
            renamed[new] = values_of(sample, taken)
        given = len(names) - names.count(None)
        if len(renamed) < len(sample) - len(listed) + len(lists) or len(new_names) + len(lists) < given:
            named = identity(sample)
            raise SampleError(
                f"two fields of {named.name('in')} would have one name; it has: {', '.join(sample)}",
                url=named.url,
                key=named.key,
            )
        return renamed
