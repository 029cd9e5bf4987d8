"""PackSamples: sequences of a token budget from samples."""

from __future__ import annotations

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
            with room. Both leave samples whole. ``"wrap"`` cuts them: each pack but the last is
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

    Checkpoint: three numbers, and the position of the source before the current window; for
    ``"wrap"``, before the sample that is cut. A resume reads at most ``window`` samples again.
    """

    @dataclass(slots=True)
    class At(ReadsAgain.At):
        yielded: int = 0  # packs of the current window
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
        return bool(at.yielded or at.inside)

    def run(self) -> Iterator[Any]:
        yield from self._wrapped() if self.method == "wrap" else self._windows()
        self.earlier = None  # for the counts of the whole epoch

    def _windows(self) -> Iterator[Any]:
        at, source = self.at, self.source
        while True:
            before = source.mark()
            parts = [self._whole(sample) for sample in islice(source.items, self.window)]
            self.check_again()
            resumed = at.yielded
            kept = [part for part in parts if part.stop <= self.budget]
            packs = (_best_fit if self.method == "best-fit" else _first_fit)(kept, self.budget)
            if len(packs) < resumed:
                raise _unlike()
            if not resumed:
                at.dropped += len(parts) - len(kept)
            if not parts:
                return
            self.earlier = before
            for number, pack in enumerate(packs[resumed:], resumed + 1):
                packed = self._pack(pack)
                at.yielded = number
                at.delivered += len(pack)
                yield packed
            at.yielded, self.earlier = 0, None

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


def _best_fit(parts: Sequence[Part], budget: int) -> list[list[Part]]:
    """Return packs by best-fit decreasing, in the order of their first parts."""
    packs: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # the room that each pack has left, with its number; sorted
    for number in sorted(range(len(parts)), key=lambda number: (-parts[number].stop, number)):
        size = parts[number].stop
        place = bisect_left(rooms, (size, -1))
        if place == len(rooms):
            packs.append([])
            room, pack = budget, len(packs) - 1
        else:
            room, pack = rooms.pop(place)
        packs[pack].append(number)
        insort(rooms, (room - size, pack))
    return [[parts[number] for number in pack] for pack in sorted(map(sorted, packs))]


def _first_fit(parts: Sequence[Part], budget: int) -> list[list[Part]]:
    """Return packs by first fit, in the order of their first parts."""
    packs: list[list[Part]] = []
    rooms: list[int] = []
    for part in parts:
        pack = next((pack for pack, room in enumerate(rooms) if room >= part.stop), len(packs))
        if pack == len(packs):
            packs.append([])
            rooms.append(budget)
        packs[pack].append(part)
        rooms[pack] -= part.stop
    return packs


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
