"""ToTuple: samples to tuples of chosen fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wds_pipes.core.stage import Stage
from wds_pipes.core.tolerant import Tolerant
from wds_pipes.core.words import listed
from wds_pipes.errors import SampleError
from wds_pipes.stages.collating import identity


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
        for field in fields:
            if not isinstance(field, str) or not all(field.split(";")):
                raise TypeError(f"a field is named by a string such as 'jpg;png', not {field!r}")
        self.fields = fields

    def run(self) -> Iterator[tuple[Any, ...]]:
        assert self.source is not None
        choices = [field.split(";") for field in self.fields]
        for sample in self.source.items:
            if not isinstance(sample, dict):
                raise TypeError(f"to_tuple() takes samples as dicts, and its source gave {type(sample).__name__}: put it after group_by_key(), and only once")
            chosen = []
            for names in choices:
                for name in names:
                    if name in sample:
                        chosen.append(sample[name])
                        break
                else:
                    self.skip(self._missing(sample, ";".join(names)))
                    break
            else:
                yield tuple(chosen)

    def _missing(self, sample: dict[str, Any], field: str) -> SampleError:
        assert self.source is not None
        key, url = identity(sample)
        there = ", ".join(repr(name) for name in sample if name not in ("__key__", "__url__")) or "no fields"
        if left_out := self.source.lack.left_out:
            there += f"; group_by_key(fields=...) left out: {listed(left_out)}"
        return SampleError(f"sample {key!r} of shard {url} has no field {field!r}; it has: {there}", url=url, key=key)
