"""``map``: samples as a function returns them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, cached_property
from hashlib import blake2b
from importlib import import_module
from typing import Any

import click

from wds_pipes.cli.jobs import Running, runs, write_indexes
from wds_pipes.cli.options import dest, example, key_split, urls
from wds_pipes.cli.rewriting.spine import Reading, find_shards, plan_rewrite, summed
from wds_pipes.codecs.table import encode
from wds_pipes.errors import SampleError
from wds_pipes.io.secret import hide, words
from wds_pipes.io.tasks.task import Facts, Job, Place
from wds_pipes.stages.decode_by_ext import DecodeByExt
from wds_pipes.stages.fields import identity
from wds_pipes.stages.map_samples import OF_CODE
from wds_pipes.tar.encoded import check_name
from wds_pipes.tar.keys import is_metadata
from wds_pipes.tools.reading import Sample


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


def call(named: str, value: Any) -> Any:
    """Call a function. What it prints goes to standard error: standard output is for the report.

    Raises:
        RuntimeError: it ends the process, as sys.exit does.
        Exception: whatever it raises.
    """
    try:
        with redirect_stdout(sys.stderr):
            return function_of(named)(value)
    except SystemExit as error:
        raise RuntimeError("it called sys.exit: let it raise an error, or return") from error


@dataclass(frozen=True)
class Function:
    """A function of samples, which it may get decoded; it can be sent to other processes.

    Attributes:
        named: ``module:function``.
        decode: how samples are decoded for it.
    """

    named: str
    decode: str | None

    @cached_property
    def _decoder(self) -> Any:
        return decoder_of(self.decode)

    def of(self, sample: dict[str, Any]) -> Any:
        """Return what the function returns for a sample.

        Raises:
            SampleError: it has raised, or the sample cannot be decoded.
        """
        given = dict(sample) if self._decoder is None else self._decoder(sample)
        try:
            return call(self.named, given)
        except Exception as error:
            key, url = named = identity(sample)
            what = f"raised {type(error).__name__} on {named.name()}: {hide(words(error))}".rstrip(": ")
            raise SampleError(f"{self.named} {what}", url=url, key=key) from error


def code_of(named: str) -> str:
    """Return a hash of the file of a function's module; "": it has none."""
    function_of(named)
    path = getattr(sys.modules[named.partition(":")[0]], "__file__", None)
    if not path:
        return ""
    with open(path, "rb") as file:
        return blake2b(file.read(), digest_size=16).hexdigest()


def decoder_of(specs: str | None) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """Return what decodes samples; ``specs`` are those of ``decode_by_ext``, with commas, or
    ``basic``. None: nothing is decoded.

    Raises:
        ValueError: a spec is unknown.
    """
    if specs is None:
        return None
    return DecodeByExt(None, *(spec for spec in specs.split(",") if spec != BASIC)).decoder()  # type: ignore[arg-type]


decode = click.option(
    "--decode",
    metavar="SPEC",
    help="Decode the samples for the function, as decode_by_ext does with this spec, such as rgb8; 'basic' leaves "
    "images as bytes.  [default: all fields are bytes]",
)


@click.command(
    name="map",
    epilog=example(
        "wds-pipes map changes:smaller 'raw/*.tar' small/ -j 4\n"
        "wds-pipes map changes:with_caption 'raw/*.tar' captioned/ --decode basic --on-error skip"
    ),
)
@click.argument("function", metavar="MODULE:FUNCTION")
@urls
@dest
@decode
@click.option(
    "--on-error",
    type=click.Choice(["raise", "skip"]),
    default="raise",
    show_default=True,
    help="For a sample on which the function raises, or which cannot be decoded or encoded: stop, or leave it out and "
    "count it. A NameError, TypeError and the like always stop.",
)
@key_split
@runs(summed)
def map_(
    *,
    function: str,
    urls: Sequence[str],
    place: Place,
    running: Running,
    key_split: str,
    decode: str | None,
    on_error: str,
) -> Job:
    """Write the samples that a function returns for those of shards to the directory DEST.

    The function gets a sample as a dict with __key__, __url__ and its fields as bytes, and returns
    a dict of fields to write, or None to leave the sample out. It may change __key__. Values that
    are not bytes are encoded by the extension of their field: numbers, text, json, npy, images.
    With --decode the values are decoded, and what it returns is encoded again, images too: with
    '--decode basic' images stay the bytes that they are.

    \b
    # changes.py, in the current directory
    def with_caption(sample):
        sample["json"]["caption"] = sample["txt"].strip()
        return {"jpg": sample["jpg"], "json": sample["json"]}

    The function must return the same for the same sample, since a shard may be written twice. Each
    shard becomes one of the same name, uncompressed. If the file of the function changes, the
    outputs are others, and --overwrite is needed; what the file imports is not looked at.
    """  # noqa: D301
    reading = Reading(place.storage_options, key_split)
    change = Map(Function(function, decode), on_error == "skip")
    decoder_of(decode)
    options = {"function": f"{function}, code {code_of(function)}", "decode": decode, "on_error": on_error}
    shards = find_shards(urls, place, place.storage_options)
    return plan_rewrite("map", shards, place, change.samples, reading=reading, options=options, finish=_finish)
