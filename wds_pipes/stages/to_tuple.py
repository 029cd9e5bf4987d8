"""ToTuple: turn samples into tuples of selected fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from wds_pipes.core.stage import Stage
from wds_pipes.core.tolerant import OnError
from wds_pipes.errors import SampleError
from wds_pipes.stages.fields import Selecting, check_sample, missing
from wds_pipes.stages.identity import identity


class ToTuple(Selecting[tuple[Any, ...]]):
    """Turn each sample into a tuple of selected fields (functional name: ``to_tuple``).

    Args:
        source: a pipe of samples as dicts.
        fields: one entry for each place of the tuple. An entry may name several fields: the first
            that the sample has is taken, as in ``"jpg;jpeg;png"``. ``"__key__"`` and ``"__url__"``
            are fields too.
        none_is_error: treat a field whose value is None as an error, for example of a decoder that
            returns None for what it cannot decode.
        on_error: what to do if a sample lacks one of the fields: ``"raise"``, or ``"skip"`` the
            sample and count it.
        max_errors: with ``"skip"``, how many samples may be skipped in an epoch; None: no limit.

    Raises:
        SampleError: during iteration, if a field is missing. The message lists the fields of the
            sample.

    Checkpoint: the number of skipped samples. A resume reads nothing again.
    """

    def __init__(
        self,
        source: Stage[Any],
        *fields: str,
        none_is_error: bool = False,
        on_error: OnError = "raise",
        max_errors: int | None = None,
    ) -> None:
        super().__init__(source, *fields, on_error=on_error, max_errors=max_errors)
        self.none_is_error = bool(none_is_error)

    def run(self) -> Iterator[tuple[Any, ...]]:
        assert self.source is not None
        choices, none_is_error = self.choices, self.none_is_error
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
                if none_is_error and (place := next((i for i, value in enumerate(chosen) if value is None), -1)) >= 0:
                    self.skip(_is_none(sample, ";".join(choices[place])))
                else:
                    yield tuple(chosen)


def _is_none(sample: dict[str, Any], field: str) -> SampleError:
    named = identity(sample)
    return SampleError(
        f"the value of field {field!r} of {named.name('in')} is None: correct its decoder, or pass "
        "on_error='skip' to leave such samples out.",
        url=named.url,
        key=named.key,
    )
