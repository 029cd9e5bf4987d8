"""RenameFields: rename fields of samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from wds_pipes.core.stage import Stage
from wds_pipes.core.tolerant import OnError, Tolerant
from wds_pipes.errors import SampleError
from wds_pipes.stages.fields import check_sample, first_of, missing, read_choices
from wds_pipes.stages.identity import identity


class RenameFields(Tolerant[dict[str, Any]]):
    """Rename fields of each sample; the others stay as they are (functional name:
    ``rename_fields``).

    Put it after ``decode_by_ext``, which decodes by the original names.

    Args:
        source: a pipe of samples as dicts.
        names: the old name for each new name: ``{"image": "jpg;png", "label": "cls"}``. If several
            old names are given, the first that the sample has is renamed.
        on_error: what to do if a sample lacks a field to rename, or already has a field with the
            new name: ``"raise"``, or ``"skip"`` the sample and count it.
        max_errors: with ``"skip"``, how many samples may be skipped in an epoch; None: no limit.

    Raises:
        SampleError: during iteration, if a field is missing or two fields would have one name. The
            message lists the fields of the sample.

    Checkpoint: the number of skipped samples. A resume reads nothing again.
    """

    keeps_count = keeps_order = True
    holds_nothing = True
    one_of_each = True

    def __init__(
        self,
        source: Stage[Any],
        names: Mapping[str, str],
        *,
        on_error: OnError = "raise",
        max_errors: int | None = None,
    ) -> None:
        super().__init__(source, on_error, max_errors)
        if not isinstance(names, Mapping) or not names or not all(isinstance(name, str) and name for name in names):
            raise TypeError(
                f"rename_fields() takes new names with the old ones, such as {{'image': 'jpg;png'}}, not {names!r:.80}"
            )
        self.choices = dict(zip(names, read_choices(names.values()), strict=True))

    def run(self) -> Iterator[dict[str, Any]]:
        assert self.source is not None
        for sample in self.source.items:
            check_sample(sample, "rename_fields")
            new_names = {}
            for new, names in self.choices.items():
                if (old := first_of(sample, names)) is None:
                    self.skip(missing(self.source, sample, names))
                    break
                new_names[old] = new
            else:
                renamed = {new_names.get(name, name): value for name, value in sample.items()}
                if len(renamed) == len(sample) and len(new_names) == len(self.choices):
                    yield renamed
                else:
                    named = identity(sample)
                    self.skip(
                        SampleError(
                            f"two fields of {named.name('in')} would have one name; it has: {', '.join(sample)}",
                            url=named.url,
                            key=named.key,
                        )
                    )
