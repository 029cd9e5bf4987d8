"""The base of the steps that arrange a window of samples at a time by their lengths."""

from __future__ import annotations

from abc import abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import numpy as np

from wds_pipes.core.options import check_count
from wds_pipes.core.reads_again import ReadsAgain
from wds_pipes.core.stage import Out, Stage, functional_name
from wds_pipes.errors import SampleError, StateError
from wds_pipes.stages.fields import check_sample, field_of, identity

MOST = 1 << 12  # samples of a window: a state has a bit for each


class Arranged(NamedTuple):
    """How samples are arranged, each as its number. A sample that is in none of both is dropped.

    Attributes:
        groups: those that are yielded together, in their order.
        left: those that are left to the next window.
    """

    groups: list[list[int]]
    left: list[int]


class Windowed(ReadsAgain[Out]):
    """The base of steps that take ``window`` samples at a time, arrange them in groups and yield
    something for each group. Some samples of a window may be carried over to the next one.

    A position inside of a window is the position before it, and how many groups were yielded; if
    samples were carried over into it, it is the position before the window from which they come,
    and a bit for each sample of that window. A sample is carried over once at most, so that a
    resume never needs more than two windows.

    Attributes:
        field: the name of the field that is as long as a sample; None: ``measure`` says how long.
        aligned: all names of fields that are as long, ``field`` first.
        pads: the value that fills up each of these fields; None: they are not filled up.
        limit: how long a sample may be; None: of any length.
    """

    @dataclass(slots=True)
    class At(ReadsAgain.At):
        yielded: int = 0  # groups of the current window
        carried: str = ""  # which samples of the window before were carried over: bits, in base 64
        delivered: int = 0
        dropped: int = 0

    tallies: ClassVar[tuple[str, ...]] = ("delivered", "dropped")
    scope = "window"
    _keeps_keys = False  # an item has several samples

    def __init__(
        self,
        source: Stage[Any],
        length: str | Callable[[Any], int],
        aligned: Collection[str],
        pad: float | Mapping[str, float] | None,
        window: int,
    ) -> None:
        super().__init__(source)
        if not callable(length) and not _is_name(length):
            raise TypeError(f"length must be the name of a field or a function, not {length!r:.80}")
        if isinstance(aligned, str) or not all(map(_is_name, aligned)):
            raise TypeError(f"aligned must be a list of names of fields, not {aligned!r:.80}")
        self.field = None if callable(length) else length
        self.measure: Any = length  # a function where there is no field
        self.aligned = () if self.field is None else tuple(dict.fromkeys([self.field, *aligned]))
        if self.field is None and (aligned or pad not in (None, 0)):
            raise ValueError("aligned= and pad= go with length= as the name of a field, not as a function")
        self.pads = self._read_pads(pad)
        self.limit: int | None = None
        self.window = check_count("window", window, most=MOST)

    def _read_pads(self, pad: float | Mapping[str, float] | None) -> dict[str, float] | None:
        """Return the value that fills up each field."""
        if pad is None:
            return None
        pads = dict(pad) if isinstance(pad, Mapping) else dict.fromkeys(self.aligned, pad)
        if pads.keys() != set(self.aligned):
            raise ValueError(f"pad must have a number for each of {list(self.aligned)}, not for {list(pads)}")
        for name, value in pads.items():
            if not isinstance(value, (int, float, np.number)):
                raise TypeError(f"pad must be a number, not {value!r:.80}, for field {name!r}")
        return pads

    @abstractmethod
    def arranged(self, lengths: Sequence[int], held: int, *, last: bool) -> Arranged:
        """Return how samples are arranged, by their lengths alone.

        Args:
            lengths: of all samples.
            held: how many of them, the first ones, were carried over: they cannot be again.
            last: the epoch ends after these samples.
        """

    @abstractmethod
    def joined(self, samples: list[Any], lengths: list[int]) -> Out:
        """Return what is yielded for a group of samples, whose lengths are ``lengths``."""

    def had_items(self, at: Any) -> bool:
        return bool(at.yielded or at.carried)

    def problem(self, at: Any) -> str | None:
        if at.yielded > 2 * self.window:
            return f"{2 * self.window} samples do not make so many groups"
        try:
            fits = len(at.carried) <= self.window + 4 and max(_numbers(at.carried), default=0) < self.window
        except ValueError:
            fits = False
        return None if fits else f"{at.carried!r:.40} does not say which of {self.window} samples are carried over"

    def run(self) -> Iterator[Out]:
        at, source = self.at, self.source
        before, again, last = source.mark(), _numbers(at.carried), False
        held = [*islice(source.items, self.window)] if again else []
        if again and again[-1] >= len(held):
            raise self.unlike()
        held = [held[number] for number in again]
        while not last:
            begin = source.mark()
            samples = [*held, *islice(source.items, self.window)]
            self.check_again()
            last = len(samples) - len(held) < self.window
            lengths = [self.length_of(sample) for sample in samples]
            groups, left = self.arranged(lengths, len(held), last=last)
            if len(groups) < at.yielded:
                raise self.unlike()
            if not at.yielded:
                at.dropped += len(samples) - sum(map(len, groups)) - len(left)
            self.earlier = before if held else begin
            for number, group in enumerate(groups[at.yielded :], at.yielded + 1):
                joined = self.joined([samples[each] for each in group], [lengths[each] for each in group])
                at.yielded = number
                at.delivered += len(group)
                yield joined
            at.carried, at.yielded, before = _bits(number - len(held) for number in left), 0, begin
            held = [samples[number] for number in left]
            self.earlier = before if held else None
        self.earlier = None  # for the counts of the whole epoch

    def ended_in(self, item: Any) -> Iterable[Mapping[str, Any]]:
        """Return of each sample that ends in the item that was yielded last its key and the URL of
        its shard: in an item that is a batch, both are columns.
        """
        if isinstance(item, list):
            return item
        names = ("__key__", "__url__")
        return [dict(zip(names, values, strict=True)) for values in zip(*(item[name] for name in names), strict=True)]

    def length_of(self, sample: Any) -> int:
        """Return the length of a sample.

        Raises:
            SampleError: it has no such field, the value has no length, or it is longer than
                ``limit``.
        """
        if self.field is not None:
            length = self._length_in(sample, self.field)
        elif type(length := self.measure(sample)) is not int or length < 0:
            length = check_count(f"the length of {identity(sample).name()}", length, least=0)
        if self.limit is not None and length > self.limit:
            why = f"has the length {length:,}, more than the budget of {self.limit:,}"
            raise error_of(sample, why, "Pass a larger budget or too_long=, or leave it out with filter_samples().")
        return length

    def _length_in(self, sample: Any, name: str) -> int:
        """Return how many values a field has; SampleError if it is nothing that has values."""
        value: Any = sample.get(name) if isinstance(sample, dict) else None
        if isinstance(value, list) or getattr(value, "shape", None):  # a 0-d array has ()
            return len(value)
        check_sample(sample, functional_name(type(self)))
        field_of(sample, [name], self.source)
        why = f"has {type(value).__name__} in field {name!r}, not a list, an array or a tensor"
        raise error_of(sample, why, "Decode it before this step.")

    def arrays_of(self, name: str, samples: Sequence[Any], lengths: Sequence[int]) -> list[Any]:
        """Return a field of each sample as an array, whose first dimension is the sample's length.

        Raises:
            SampleError: a sample lacks the field, or has another number of values in it, or they
                are no numbers; or the arrays differ in dtype or shape.
        """
        arrays = [sample.get(name) for sample in samples]
        if set(map(type, arrays)) == {np.ndarray} and all(map(_NDIM, arrays)) and list(map(len, arrays)) == lengths:
            dtype, shape = arrays[0].dtype, arrays[0].shape[1:]
            if dtype.kind in "biufc" and all(array.dtype == dtype and array.shape[1:] == shape for array in arrays):
                return arrays  # nearly always
        arrays = []
        for sample, length in zip(samples, lengths, strict=True):
            value = sample.get(name)
            array = value if type(value) is np.ndarray and value.ndim else self._array_in(sample, name)
            if len(array) != length:
                why = f"has {len(array):,} values in field {name!r}, and {length:,} in {self.field!r}"
                raise error_of(sample, why, "Correct it, or leave it out of aligned=.")
            first = arrays[0] if arrays else array
            if array.dtype.kind not in "biufc":
                raise error_of(sample, f"has {array.dtype} in field {name!r}", _DECODE)
            if array.dtype != first.dtype or array.shape[1:] != first.shape[1:]:
                why = f"has {_form(array)} in field {name!r}, and {identity(samples[0]).name()} has {_form(first)}"
                raise error_of(sample, why, "Bring them to one form with map_fields().")
            arrays.append(array)
        return arrays

    def _array_in(self, sample: Any, name: str) -> Any:
        """Return a field as an array; SampleError if it has no numbers."""
        self._length_in(sample, name)
        try:
            return np.asarray(sample[name])
        except (TypeError, ValueError, RuntimeError) as error:
            raise error_of(sample, f"has no array of numbers in field {name!r}: {error}", _DECODE) from error

    def filled(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
        """Return an array with the value that fills up a field; SampleError if the field cannot
        have this value.
        """
        value = (self.pads or {}).get(name, 0)
        try:
            array = np.full(shape, value, dtype)
            exact = dtype.kind not in "biu" or bool(dtype.type(value) == value)
        except (ValueError, OverflowError):
            exact = False
        if not exact:
            raise SampleError(f"field {name!r} has the dtype {dtype}, which cannot be pad={value}. Pass another pad=.")
        return array

    def check_free(self, sample: Any, made: Collection[str]) -> None:
        """Raise SampleError if a sample has a field that this step makes."""
        if taken := [name for name in made if name in sample]:
            why = f"has a field {taken[0]!r}, and {functional_name(type(self))}() makes another one"
            raise error_of(sample, why, "Rename it with rename_fields(), or leave it out with select_fields().")

    def unlike(self) -> StateError:
        """Return the error for other samples than before the state was saved."""
        return StateError(
            f"{functional_name(type(self))}() finds other samples than before the state was saved: let the steps "
            "before it return the same samples each time."
        )


_NDIM = attrgetter("ndim")
_DECODE = "Decode it to numbers before this step."


def error_of(sample: Any, why: str, mend: str) -> SampleError:
    """Return an error that names a sample."""
    named = identity(sample)
    return SampleError(f"{named.name()} {why}. {mend}", url=named.url, key=named.key)


def _is_name(name: object) -> bool:
    return isinstance(name, str) and bool(name.strip()) and ";" not in name


def _form(array: Any) -> str:
    return f"{array.dtype} of shape {array.shape}"


def _bits(numbers: Iterable[int]) -> str:
    """Return numbers as text: a bit for each."""
    bits = sum(1 << number for number in numbers)
    return b64encode(bits.to_bytes(-(-bits.bit_length() // 8), "little")).decode()


def _numbers(carried: str) -> list[int]:
    """Return the numbers that ``_bits`` wrote; ValueError if they are none."""
    bits = int.from_bytes(b64decode(carried, validate=True), "little")
    return [number for number in range(bits.bit_length()) if bits >> number & 1]
