"""SelectFields: samples with chosen fields only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wds_pipes.core.stage import Stage
from wds_pipes.core.tolerant import Tolerant
from wds_pipes.stages.fields import check_sample, first_of, missing, read_choices


class SelectFields(Tolerant[dict[str, Any]]):
    """Keep only some fields of each sample, in the order in which they are named (functional name: ``select_fields``).

    ``__key__``, ``__url__`` and other names that begin with two underscores are always kept. To leave fields out before they are read, and so save time, name
    them in ``group_by_key(fields=...)``.

    Args:
        source: a pipe of samples as dicts.
        fields: names of fields, or several of which the first that is there is kept: ``"jpg;jpeg;png"``.
        on_error: for a sample without one of them: ``"raise"``, or ``"skip"`` it and count it.
        max_errors: with ``"skip"``, how many samples may be skipped in an epoch; None: any number.

    Raises:
        SampleError: from the iteration: a field is missing; the message says which there are.

    Checkpoint: the number of skipped samples. A resume reads nothing again.
    """

    keeps_count = True
    holds_nothing = True

    def __init__(self, source: Stage[Any], *fields: str, on_error: str = "raise", max_errors: int | None = None) -> None:
        super().__init__(source, on_error, max_errors)
        if not fields:
            raise ValueError("select_fields() needs the names of fields, such as select_fields('jpg;png', 'cls')")
        self.choices = read_choices(fields)

    def run(self) -> Iterator[dict[str, Any]]:
        assert self.source is not None
        for sample in self.source.items:
            check_sample(sample, "select_fields")
            selected = {name: value for name, value in sample.items() if name[:2] == "__"}
            for names in self.choices:
                if (name := first_of(sample, names)) is None:
                    self.skip(missing(self.source, sample, names))
                    break
                selected[name] = sample[name]
            else:
                yield selected
