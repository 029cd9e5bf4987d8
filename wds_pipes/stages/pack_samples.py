"""PackSamples: sequences of a token budget from samples."""

from __future__ import annotations

import re
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from wds_pipes.core.options import check_choice, check_count
from wds_pipes.core.reads_again import ReadsAgain
from wds_pipes.core.stage import Stage
from wds_pipes.errors import SampleError, StateError
from wds_pipes.stages.fields import check_sample, field_of, identity


class Part(NamedTuple):
    """A part of a pack: the elements ``start`` to ``stop`` - 1 of a sample with ``length`` of them."""

    sample: Any
    start: int
    stop: int
    length: int


class PackSamples(ReadsAgain[Any]):
    """Put samples together to packs of at most ``budget`` tokens (functional name:
    ``pack_samples``).

    If ``length`` is the name of a field, a pack is a dict, with what attention over sequences of
    different lengths needs:

    ==================  ============================================================================
    the field           the tokens of all parts: a tensor of shape (tokens,), of the field's dtype
    other fields        concatenated likewise, if each sample's value is as long as its tokens, such
                        as labels or a mask of the loss; otherwise a list with a value for each part
    ``cu_seqlens``      where the parts begin, and where the last one ends: int32, shape (parts + 1,)
    ``max_seqlen``      the length of the longest part
    ``position_ids``    the place of each token in its part, from 0: int64, shape (tokens,)
    ``document_ids``    the number of the part that each token is of: int32, shape (tokens,)
    ``__key__``         the keys of the parts: a list
    ==================  ============================================================================

    With ``pad``, the tensors have ``budget`` elements: after the tokens come ``pad`` in the fields,
    0 in ``position_ids`` and -1 in ``document_ids``; ``cu_seqlens`` ends before them.

    If ``length`` is a function, a pack is the list of its samples.

    Args:
        source: any pipe of samples.
        length: the name of a field with the tokens of a sample (a list, array or tensor of one
            dimension), or a function that returns the length of a sample.
        budget: how many tokens a pack has at most.
        method: ``"best-fit"`` packs ``window`` samples at a time, the longest first, each where it
            leaves the least room: best-fit decreasing (Johnson, "Near-optimal bin packing
            algorithms", 1973). ``"first-fit"`` packs them as they come, each into the first pack
            with room. Both leave samples whole, and carry the emptiest pack of a window over to the
            next. ``"wrap"`` cuts them: each pack but the last is
            full, and a sample may go on in the next one. It needs the name of a field.
        window: how many samples are packed together, at least 1. Their packs come in the order of
            their first samples.
        too_long: what to do with a sample of more than ``budget`` tokens: ``"error"``, ``"cut"``:
            keep its first ``budget`` tokens, or ``"drop"``: leave it out, and count it as dropped.
            ``"wrap"`` packs samples of any length.
        pad: the value that fills up each pack; None: packs end with their last token.

    Raises:
        SampleError: during iteration: a sample is too long, or has no such field; its tokens have
            more than one dimension; or the samples of a pack differ in their fields.
        TypeError, ValueError: when the stage is built: an option is wrong.

    Checkpoint: a few numbers, a bit for each sample of a window, and the position of the source
    before the window of the pack that was carried over; for ``"wrap"``, before the sample that is
    cut. A resume reads at most 2 * ``window`` samples again.
    """

    @dataclass(slots=True)
    class At(ReadsAgain.At):
        yielded: int = 0  # packs of the current window
        carried: str = ""  # which samples of the window before are in the pack that is carried over: bits, as hexadecimal
        inside: int = 0  # tokens of the sample that is cut that are in packs already
        delivered: int = 0
        dropped: int = 0

    tallies = ("delivered", "dropped")
    scope = "window"
    order_options = ("length", "budget", "method", "window", "too_long")

    def __init__(
        self,
        source: Stage[Any],
        length: str | Callable[[Any], int] = "tokens",
        budget: int = 8192,
        *,
        method: str = "best-fit",
        window: int = 512,
        too_long: str = "error",
        pad: int | None = None,
    ) -> None:
        super().__init__(source)
        if not isinstance(length, str) and not callable(length):
            raise TypeError(f"length must be the name of a field or a function, not {length!r:.80}")
        self.length, self.budget, self.window = length, check_count("budget", budget), check_count("window", window)
        self.method = check_choice("method", method, "best-fit", "first-fit", "wrap")
        self.too_long = check_choice("too_long", too_long, "error", "cut", "drop")
        if callable(length) and (method == "wrap" or too_long == "cut" or pad is not None):
            raise ValueError("samples are cut and padded by the name of a field: pass length='tokens', not a function")
        self.pad = pad

    def had_items(self, at: Any) -> bool:
        return bool(at.yielded or at.inside or at.carried)

    def problem(self, at: Any) -> str | None:
        if not re.fullmatch("[0-9a-f]*", at.carried) or _bits(at.carried).bit_length() > self.window:
            return f"{at.carried!r:.40} does not say which of {self.window} samples are carried"
        return None

    def run(self) -> Iterator[Any]:
        yield from self._wrapped() if self.method == "wrap" else self._windows()
        self.earlier = None  # for the counts of the whole epoch

    def _windows(self) -> Iterator[Any]:
        at, source = self.at, self.source
        before, carried = source.mark(), _bits(at.carried)
        window = islice(source.items, self.window) if carried else ()
        held = [self._whole(sample) for number, sample in enumerate(window) if carried >> number & 1]
        if len(held) < carried.bit_count():
            raise _unlike()
        while True:
            begin = source.mark()
            parts = [self._whole(sample) for sample in islice(source.items, self.window)]
            self.check_again()
            packs = self._packs(held, parts)
            if len(packs) < at.yielded:
                raise _unlike()
            if not at.yielded:
                at.dropped += sum(part.stop > self.budget for part in parts)
            left = _least_full(packs[bool(held) :]) if len(parts) == self.window else None
            self.earlier = before if held else begin
            for number, pack in enumerate(pack for pack in packs if pack is not left):
                if number >= at.yielded:
                    packed = self._pack(pack)
                    at.yielded = number + 1
                    at.delivered += len(pack)
                    yield packed
            before, held = begin, left or []
            numbers = {id(part): number for number, part in enumerate(parts)}
            at.carried = f"{sum(1 << numbers[id(part)] for part in held):x}" if held else ""
            at.yielded, self.earlier = 0, before if held else None
            if len(parts) < self.window:
                return

    def _wrapped(self) -> Iterator[Any]:
        at, source, parts, room = self.at, self.source, list[Part](), self.budget
        before, taken = source.mark(), at.inside
        for sample in source.items:
            length = self._length(sample)
            self.check_again()
            if length < taken:
                raise _unlike()
            while taken < length:
                parts.append(Part(sample, taken, min(length, taken + room), length))
                room -= parts[-1].stop - taken
                taken = parts[-1].stop
                if not room:
                    packed = self._pack(parts)
                    at.inside = taken if taken < length else 0
                    self.earlier = before if at.inside else None
                    at.delivered += sum(part.stop == part.length for part in parts)
                    yield packed
                    parts, room = [], self.budget
            before, taken = source.mark(), 0
        if at.inside and not parts:
            raise _unlike()
        if parts:
            packed = self._pack(parts)
            at.inside, self.earlier = 0, None
            at.delivered += sum(part.stop == part.length for part in parts)
            yield packed

    def _packs(self, held: list[Part], parts: Sequence[Part]) -> list[list[Part]]:
        """Return the packs of a window, in the order of their first parts; ``held`` is the pack that
        was carried over from the window before.
        """
        packs = [list(held)] if held else []
        rooms = [(self.budget - sum(part.stop for part in pack), 0) for pack in packs]  # sorted, with the pack's number
        order = list(range(len(parts)))
        if self.method == "best-fit":
            order.sort(key=lambda number: -parts[number].stop)
        numbers: list[list[int]] = [[] for _ in packs]
        for number in order:
            size = parts[number].stop
            if size > self.budget:
                continue
            place = bisect_left(rooms, (size, -1))
            if self.method == "first-fit" and place < len(rooms):
                place = min(range(place, len(rooms)), key=lambda place: rooms[place][1])
            if place == len(rooms):
                room, pack = self.budget, len(numbers)
                numbers.append([])
            else:
                room, pack = rooms.pop(place)
            numbers[pack].append(number)
            insort(rooms, (room - size, pack))
        first, rest = numbers[: len(packs)], numbers[len(packs) :]
        new = [[parts[number] for number in sorted(pack)] for pack in [*first, *sorted(map(sorted, rest))]]
        return [packs[0] + new[0], *new[1:]] if packs else new

    def _whole(self, sample: Any) -> Part:
        """Return a sample as a part; one that is dropped is longer than the budget."""
        length = self._length(sample)
        if length <= self.budget or self.too_long == "drop":
            return Part(sample, 0, length, length)
        if self.too_long == "cut":
            return Part(sample, 0, self.budget, length)
        named = identity(sample)
        raise SampleError(
            f"{named.name()} has {length:,} tokens, more than the budget of {self.budget:,}. Pass too_long='cut' or "
            "'drop', or a larger budget.",
            url=named.url,
            key=named.key,
        )

    def _length(self, sample: Any) -> int:
        if callable(self.length):
            return check_count("the length of a sample", self.length(sample), least=0)
        check_sample(sample, "pack_samples")
        return len(sample[field_of(sample, [self.length], self.source)])

    def _pack(self, parts: Sequence[Part]) -> Any:
        return [part.sample for part in parts] if callable(self.length) else self._joined(parts)

    def _joined(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return the parts as one dict of tensors."""
        sizes = np.array([part.stop - part.start for part in parts])
        total = self.budget if self.pad is not None else int(sizes.sum())
        names = parts[0].sample.keys()
        for part in parts:
            if part.sample.keys() != names:
                named = identity(part.sample)
                raise SampleError(
                    f"the samples of a pack differ in form: {named.name()} has fields {', '.join(part.sample)}, another "
                    f"one has {', '.join(names)}. Choose the fields with select_fields().",
                    url=named.url,
                    key=named.key,
                )
        pack = {name: self._column(name, parts, total) for name in names}
        pack["cu_seqlens"] = _tensor(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
        pack["max_seqlen"] = int(sizes.max())
        places = np.concatenate([np.arange(size) for size in sizes])
        pack["position_ids"] = _tensor(_filled(places, total, 0))
        numbers = np.repeat(np.arange(len(parts), dtype=np.int32), sizes)
        pack["document_ids"] = _tensor(_filled(numbers, total, -1))
        return pack

    def _column(self, name: str, parts: Sequence[Part], total: int) -> Any:
        values = [part.sample[name] for part in parts]
        lengths = zip(values, parts, strict=True)
        if not all(_is_sequence(value) and len(value) == part.length for value, part in lengths):
            if name == self.length:
                raise SampleError(f"field {name!r} is no list, array or tensor of one dimension, as tokens are")
            return values
        pieces = [_array(value)[part.start : part.stop] for value, part in zip(values, parts, strict=True)]
        return _tensor(_filled(np.concatenate(pieces), total, 0 if self.pad is None else self.pad))


def _least_full(packs: Sequence[list[Part]]) -> list[Part] | None:
    """Return the pack with the fewest tokens; None if there is no pack."""
    return min(packs, key=lambda pack: sum(part.stop for part in pack), default=None)


def _bits(carried: str) -> int:
    return int(carried, 16) if carried else 0


def _is_sequence(value: Any) -> bool:
    return isinstance(value, list) or (hasattr(value, "shape") and len(value.shape) == 1)


def _array(value: Any) -> Any:
    return np.asarray(value, np.int64 if isinstance(value, list) and not isinstance(value[:1], float) else None)


def _filled(values: Any, total: int, value: int) -> Any:
    """Return an array with ``value`` up to ``total`` elements."""
    return values if len(values) == total else np.pad(values, (0, total - len(values)), constant_values=value)


def _tensor(array: Any) -> Any:
    """Return an array as a tensor; as it is where torch is not installed."""
    if sys.modules.get("torch") is None:
        return array
    import torch

    return torch.from_numpy(array)


def _unlike() -> StateError:
    return StateError(
        "pack_samples() made fewer packs of the same samples than before the state was saved: let the steps before it "
        "return the same samples each time."
    )
