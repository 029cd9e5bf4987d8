"""Samples as a function returns them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from importlib import import_module
from typing import Any, Unpack

from wds_pipes.codecs.table import encode
from wds_pipes.core.options import check_choice
from wds_pipes.errors import SampleError
from wds_pipes.io.secret import hide, words
from wds_pipes.stages.decode_by_ext import DecodeByExt
from wds_pipes.stages.fields import identity
from wds_pipes.stages.map_samples import OF_CODE
from wds_pipes.tar.encoded import check_name
from wds_pipes.tar.keys import is_metadata
from wds_pipes.tools.engines import Facts
from wds_pipes.tools.jobs import Place, Report
from wds_pipes.tools.outputs import JobOptions, Running, write_indexes
from wds_pipes.tools.reading import Sample
from wds_pipes.tools.rewriting import Reading, changed_by, find_shards, rewrite


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


BASIC = "basic"


@cache
def function_of(named: str) -> Callable[[Any], Any]:
    """Return a function. Its module is searched for in the current directory too.

    Raises:
        ValueError: it is named in another way, the module cannot be imported, or has no such
            function.
    """
    module, colon, name = named.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"a function is named as module:function, such as changes:smaller, not {named!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        with redirect_stdout(sys.stderr):
            found: Any = import_module(module)
    except (Exception, SystemExit) as error:  # whatever a module raises
        raise ValueError(
            f"module {module!r} cannot be imported from the current directory, nor from what is installed: "
            f"{type(error).__name__}: {error}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"module {module!r} has no function {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ValueError(f"{named} is no function")
    return found  # type: ignore[no-any-return]


class Function:
    """A function of samples, which it may get decoded; it can be sent to other processes.

    Args:
        named: ``module:function``.
        decode: how samples are decoded for it: specs of ``decode_by_ext``, with commas, or
            ``basic``; None: they are not.

    Raises:
        ValueError: there is no such function, or a spec is unknown.

    Attributes:
        identity: its name, and a hash of the file of its module.
    """

    def __init__(self, named: str, decode: str | None) -> None:
        self.named, self._decode = named, decode
        function_of(named)
        path, code = getattr(sys.modules[named.partition(":")[0]], "__file__", None), ""
        if path:
            with open(path, "rb") as file:
                code = blake2b(file.read(), digest_size=16).hexdigest()
        self.identity = f"{named}, code {code}"
        _decoder(decode)  # whether the specs are known

    def of(self, sample: Sample) -> Any:
        """Return what the function returns for a sample. What it prints goes to standard error:
        standard output is for the report.

        Raises:
            SampleError: it has raised, or the sample cannot be decoded.
        """
        decoder = _decoder(self._decode)
        given = dict(sample) if decoder is None else decoder(sample)
        try:
            with redirect_stdout(sys.stderr):
                return function_of(self.named)(given)
        except (Exception, SystemExit) as error:
            key, url = named = identity(sample)
            what = f"raised {type(error).__name__} on {named.name()}: {hide(words(error))}".rstrip(": ")
            raise SampleError(f"{self.named} {what}", url=url, key=key) from error


@cache
def _decoder(specs: str | None) -> Callable[[Sample], Sample] | None:
    if specs is None:
        return None
    return DecodeByExt(None, *(spec for spec in specs.split(",") if spec != BASIC)).decoder()  # type: ignore[arg-type]


def map(  # noqa: A001
    function: str,
    urls: str | Sequence[str],
    dest: str,
    *,
    decode: str | None = None,
    on_error: str = "raise",
    key_split: str = "first-dot",
    **options: Unpack[JobOptions],
) -> Report:
    """Write the samples that a function returns for those of shards.

    The function gets a sample as a dict with ``__key__``, ``__url__`` and its fields, and returns a
    dict of fields to write, or None to leave the sample out. It must return the same for the same
    sample, since a shard may be written twice.

    Args:
        function: ``"module:function"``; the module may be a file in the current directory.
        urls: the shards.
        dest: the directory to write to.
        decode: how samples are decoded for it, as by ``decode_by_ext``; None: fields are bytes.
        on_error: ``"skip"``: leave out a sample on which the function raises, or which cannot be
            decoded or encoded, and count it; ``"raise"``.
        key_split: as in ``group_by_key``.
        options: how the job runs: see ``JobOptions``.

    Raises:
        ValueError: the options do not fit, or there is no such function.
        WdsError: a shard or the store cannot be read, or has other outputs; all were skipped.
    """
    check_choice("on_error", on_error, "raise", "skip")
    running = Running(dest, options)
    called = Function(function, decode)
    decided = {"function": called.identity, "decode": decode, "on_error": on_error, "key_split": key_split}
    shards = find_shards(urls, running.place)
    work = changed_by(Map(called, on_error == "skip").samples, Reading(running.storage_options, key_split))
    return running.run(rewrite("map", shards, running.place, work, decided, finish=_finish))
