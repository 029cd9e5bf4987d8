"""ToTuple: samples to tuples of chosen fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wds_pipes.core.stage import Stage
from wds_pipes.core.tolerant import Tolerant
from wds_pipes.stages.fields import check_sample, missing, read_choices


class ToTuple(Tolerant[tuple[Any, ...]]):
    """Samples to tuples of chosen fields (functional name: ``to_tuple``).

    Args:
        source: a pipe of samples as dicts.
        fields: for each place of the tuple a field's name, or several of which the first that is there is taken: ``"jpg;jpeg;png"``. ``"__key__"`` and
            ``"__url__"`` are fields too.
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
            raise ValueError("to_tuple() needs the names of fields, such as to_tuple('jpg;png', 'cls')")
        self.choices = read_choices(fields)

    def run(self) -> Iterator[tuple[Any, ...]]:
        assert self.source is not None
        choices = self.choices
        for sample in self.source.items:
            check_sample(sample, "to_tuple", "only once")
            chosen = []
            for names in choices:
                for name in names:
                    if name in sample:
                        chosen.append(sample[name])
                        break
                else:
                    self.skip(missing(self.source, sample, names))
                    break
            else:
                yield tuple(chosen)
