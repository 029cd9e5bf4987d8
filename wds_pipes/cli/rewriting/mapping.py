"""``map``: samples as a function returns them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wds_pipes.cli.look.reading import Sample
from wds_pipes.cli.rewriting.functions import Function, code_of, decoder_of
from wds_pipes.cli.rewriting.spine import Reading, find_shards, plan_rewrite
from wds_pipes.cli.shards import write_indexes
from wds_pipes.codecs.encoding import encode
from wds_pipes.errors import SampleError
from wds_pipes.io.secret import hide, words
from wds_pipes.io.tasks.task import Facts, Job, Place
from wds_pipes.stages.fields import identity
from wds_pipes.stages.map_samples import OF_CODE
from wds_pipes.tar.encoded import check_name
from wds_pipes.tar.keys import is_metadata


@dataclass(frozen=True)
class Map:
    """Which function changes samples.

    Attributes:
        function: the function.
        skips: leave out a sample on which it raises, or that cannot be decoded or written.
    """

    function: Function
    skips: bool

    def samples(self, samples: Iterator[Sample], shard: str, of_shard: Any, facts: Facts) -> Iterator[Sample]:
        """Yield the samples that the function returns."""
        facts["skipped"] = 0
        for sample in samples:
            try:
                made = self._made(sample)
            except SampleError as error:
                if not self.skips or isinstance(error.__cause__, (*OF_CODE, MemoryError)):
                    raise
                facts["skipped"] += 1
                facts["left_out"] += 1
                facts.setdefault("first_error", str(error))
            else:
                if made is None:
                    facts["left_out"] += 1
                else:
                    yield made

    def _made(self, sample: Sample) -> Sample | None:
        key, url = named = identity(sample)
        made, function = self.function.of(sample), self.function.named
        if made is None:
            return None
        if not isinstance(made, Mapping):
            raise SampleError(
                f"{function} returned {type(made).__name__} for {named.name()}: let it return a "
                "dict of fields, or None to leave the sample out",
                url=url,
                key=key,
            ) from TypeError()
        encoded: Sample = {"__key__": key}
        for field, value in made.items():
            try:
                if not is_metadata(str(field)):
                    check_name(str(made.get("__key__", key)), field, known=isinstance(field, str))
                encoded[field] = value if is_metadata(str(field)) else encode(field, value)
            except Exception as error:
                raise SampleError(
                    f"{function} returned field {field!r} for {named.name()}, which cannot be "
                    f"encoded: {hide(words(error))}",
                    url=url,
                    key=key,
                ) from error
        return encoded


def plan_map(
    function: str, urls: Sequence[str], place: Place, reading: Reading, *, decode: str | None, skips: bool
) -> Job:
    """Make the job of ``map``.

    Raises:
        ValueError: an argument does not fit.
        ShardError: a shard is missing.
    """
    change = Map(Function(function, decode), skips)
    decoder_of(decode)
    options = {
        "function": f"{function}, code {code_of(function)}",
        "decode": decode,
        "on_error": "skip" if skips else "raise",
    }
    shards = find_shards(urls, place, reading.storage_options)
    return plan_rewrite("map", shards, place, change.samples, reading=reading, options=options, finish=_finish)


def _finish(place: Place, facts: list[Facts]) -> None:
    """Write the indexes.

    Raises:
        SampleError: all samples were skipped.
    """
    skipped = sum(fact["skipped"] for fact in facts)
    if skipped and skipped == sum(fact["read"] for fact in facts):
        first = next((fact["first_error"] for fact in facts if "first_error" in fact), "see the report")
        raise SampleError(f"all samples were skipped because of errors, so nothing is left. The first: {first}")
    write_indexes(place, facts)
