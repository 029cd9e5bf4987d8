"""Fields of samples by name, for the steps that select, rename or change them, and how messages
name a sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from wds_pipes.core.chain import Chain
from wds_pipes.core.stage import Out, Stage, functional_name
from wds_pipes.core.tolerant import OnError, Tolerant
from wds_pipes.core.words import listed, mend_dots
from wds_pipes.errors import MissingFieldError, SampleError
from wds_pipes.io.urls import redact
from wds_pipes.tar.keys import is_metadata, matches

Sample = dict[str, Any]
Taken = str | list[str] | None  # the field of a sample that a choice takes, or its fields, or none


class OfFields(Tolerant[Out]):
    """The base of the steps that make a sample of some fields of each sample: a subclass writes
    ``of_fields``.
    """

    keeps_count = True
    scope = "item"

    def __init__(
        self, source: Stage[Any], *fields: str, on_error: OnError | None = None, max_errors: int | None = None
    ) -> None:
        super().__init__(source, on_error, max_errors)
        if not fields:
            step = functional_name(type(self))
            raise ValueError(f"{step}() needs the names of fields, such as {step}('jpg;png', 'cls')")
        self.choices = list(map(Choice.read, fields))

    def of_fields(self, sample: dict[str, Any], names: list[Taken]) -> Out:
        """Return what is made of a sample; ``names``: what each choice takes of it.

        Raises:
            SampleError: nothing can be.
        """
        raise NotImplementedError

    def run(self) -> Iterator[Out]:
        step, choices = functional_name(type(self)), [(choice.names[0], choice) for choice in self.choices]
        for sample in self.source.items:
            check_sample(sample, step)
            try:
                # nearly always a sample has the first one, which then needs no call
                taken = [name if name in sample else choice.of(sample, self.source) for name, choice in choices]
                made = self.of_fields(sample, taken)
            except SampleError as error:
                self.skip(error)
            else:
                yield made


class Choice(NamedTuple):
    """Which field of a sample is meant by a name such as ``"jpg;png"``, ``"txt?"`` or ``"*.jpg"``.

    Attributes:
        names: alternatives, of which the first that a sample has is taken; one with a ``*`` takes
            all fields that match.
        may_lack: whether a sample may have none of them.
    """

    names: list[str]
    may_lack: bool

    @classmethod
    def read(cls, field: Any) -> Choice:
        """Read a name; TypeError if it is none."""
        may_lack = isinstance(field, str) and field.endswith("?")
        [names] = read_choices([field.removesuffix("?") if may_lack else field])
        if any(name.endswith("?") for name in names):
            mended = ";".join(name.rstrip("?") for name in names)
            raise ValueError(f"a ? stands after the last of several names: write {mended + '?'!r}, not {field!r}")
        return cls(names, may_lack)

    def of(self, sample: dict[str, Any], source: Stage[Any] | None) -> Taken:
        """Return the field of a sample; of a name with a ``*``, the list of all that match, in
        natural order (``2.jpg`` before ``10.jpg``). If there is none that may lack, None, or an
        empty list.

        Raises:
            MissingFieldError: there is none.
        """
        for name in self.names:
            if name in sample:
                return name
            if "*" in name and (found := [each for each in sample if matches(each, name) and not is_metadata(each)]):
                return sorted(found, key=_natural)
        if self.may_lack:
            return [] if any("*" in name for name in self.names) else None
        raise missing(source, sample, self.names)


def values_of(sample: dict[str, Any], taken: Taken) -> Any:
    """Return the value of what a choice took of a sample: a list of values for a list of fields."""
    if isinstance(taken, list):
        return [sample[name] for name in taken]
    return None if taken is None else sample[taken]


def _natural(name: str) -> list[Any]:
    """The key of a name in natural order: its numbers are compared as numbers."""
    return [int(part) if place % 2 else part for place, part in enumerate(re.split(r"([0-9]+)", name))]


def read_choices(fields: Iterable[Any]) -> list[list[str]]:
    """Return names such as ``"jpg;png"`` as lists of alternatives.

    Raises:
        TypeError: a name is not a string, or is empty.
    """
    fields = list(fields)
    for field in fields:
        if not isinstance(field, str) or not all(map(str.strip, field.split(";"))):
            raise TypeError(f"a field is named by a string such as 'jpg;png', not {field!r}")
    return [list(map(str.strip, field.split(";"))) for field in fields]


def read_names(option: str, fields: Iterable[str]) -> tuple[str, ...]:
    """Return all fields that a list such as ``["jpg;png", "cls"]`` names, as samples have them.
    ``"txt?"`` is ``"txt"``: samples may lack all of these.

    Raises:
        TypeError: ``fields`` is not a list of names.
        ValueError: it is empty.
    """
    if isinstance(fields, str):
        names = fields.replace(";", " ").split()
        raise TypeError(f"{option} must be a list of names, not {fields!r}: write {option}={names}")
    choices = read_choices(fields)
    if not choices:
        raise ValueError(f"{option} is empty: name at least one field")
    return tuple(sorted({name.lower().lstrip(".").removesuffix("?") for names in choices for name in names}))


def check_sample(sample: Any, step: str, mend: str = "before to_tuple()") -> None:
    """Raise TypeError if ``step`` received something that is not a dict sample."""
    if not isinstance(sample, dict):
        before = "" if step == "to_tuple" else f", and {mend}"
        raise TypeError(
            f"{step}() takes samples as dicts, and its source gave {type(sample).__name__}: put "
            f"it after group_by_key(){before}"
        )


def field_of(sample: dict[str, Any], names: Sequence[str], source: Stage[Any] | None) -> str:
    """Return the first of ``names`` that a sample has.

    Raises:
        MissingFieldError: it has none of them.
    """
    for name in names:
        if name in sample:
            return name
    raise missing(source, sample, names)


def missing(source: Stage[Any] | None, sample: dict[str, Any], names: Sequence[str]) -> MissingFieldError:
    """Return the error for a sample that lacks a field. It lists the fields that the sample has,
    and those that ``source`` has left out.
    """
    named = identity(sample)
    there = ", ".join(repr(name) for name in sample if name not in ("__key__", "__url__")) or "no fields"
    if source is not None and (left_out := Chain(source).lack.left_out):
        there += f"; group_by_key(fields=...) left out: {listed(left_out)}"
    mends = mend_dots(names, sample)
    return MissingFieldError(
        f"{named.name()} has no field {';'.join(names)!r}; it has: {there}", url=named.url, key=named.key, **mends
    )


class Identity(NamedTuple):
    """The key of a sample and the URL of its shard, as messages show them; None where unknown."""

    key: str | None
    url: str | None

    def name(self, joint: str = "of") -> str:
        """Return ``sample 'k' of shard a.tar``, without what is unknown."""
        name = "a sample" if self.key is None else f"sample {self.key!r}"
        return name if self.url is None else f"{name} {joint} shard {self.url}"


def identity(sample: Any) -> Identity:
    """Return the identity of a sample, which may be no dict."""
    if not isinstance(sample, dict):
        return Identity(None, None)
    key, url = sample.get("__key__"), sample.get("__url__")
    return Identity(key, redact(url) if isinstance(url, str) else None)
