"""PackSamples: sequences of a token budget from samples."""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from wds_pipes.core.options import check_choice, check_count
from wds_pipes.core.stage import Stage
from wds_pipes.core.windowed import Sized, Windowed
from wds_pipes.errors import SampleError
from wds_pipes.stages.fields import identity
from wds_pipes.stages.lengths import as_array, is_as_long, length_of, too_long


class Part(NamedTuple):
    """The elements ``start`` to ``stop`` - 1 of a sample."""

    sized: Sized
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the sample ends with it."""
        return self.stop == self.sized.length


class PackSamples(Windowed[Any]):
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
        length: the name of a field with the tokens of a sample (a list, array or tensor, whose
            first dimension is the length), or a function that returns the length of a sample.
        budget: how many tokens a pack has at most.
        method: ``"best-fit"`` packs ``window`` samples at a time, the longest first, each where it
            leaves the least room: best-fit decreasing (Johnson, "Near-optimal bin packing
            algorithms", 1973). ``"first-fit"`` packs them as they come, each into the first pack
            with room. Both leave samples whole, and carry the emptiest pack of a window over to the
            next one. ``"wrap"`` cuts them: each pack but the last is full, and a sample may go on
            in the next one. It needs the name of a field.
        window: how many samples are packed together, at least 1. Their packs come in the order of
            their first samples.
        too_long: what to do with a sample of more than ``budget`` tokens: ``"error"``, ``"cut"``:
            keep its first ``budget`` tokens, or ``"drop"``: leave it out, and count it as dropped.
            ``"wrap"`` packs samples of any length.
        pad: the value that fills up each pack; None: packs end with their last token.

    Raises:
        SampleError: during iteration: a sample is too long, or has no such field; or the samples of
            a pack differ in their fields.
        TypeError, ValueError: when the stage is built: an option is wrong.

    Checkpoint: a few numbers, a bit for each sample of a window, and the position of the source
    before the window from which a pack was carried over; for ``"wrap"``, before the sample that is
    cut. A resume reads at most 2 * ``window`` samples again.
    """

    @dataclass(slots=True)
    class At(Windowed.At):
        inside: int = 0  # tokens of the sample that is cut that are in packs already

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
        super().__init__(source, length, window)
        self.budget, self.pad = check_count("budget", budget), pad
        self.method = check_choice("method", method, "best-fit", "first-fit", "wrap")
        self.too_long = check_choice("too_long", too_long, "error", "cut", "drop")
        if callable(length) and (method == "wrap" or too_long == "cut" or pad is not None):
            raise ValueError("samples are cut and padded by the name of a field: pass length='tokens', not a function")

    def had_items(self, at: Any) -> bool:
        return super().had_items(at) or bool(at.inside)

    def run(self) -> Iterator[Any]:
        return self._wrapped() if self.method == "wrap" else super().run()

    def sized(self, sample: Any) -> Sized:
        sized = length_of(self, sample)
        if sized.length > self.budget and self.too_long == "error":
            raise too_long(sized, self.budget, "Pass too_long='cut' or 'drop', or a larger budget.")
        return sized

    def arranged(
        self, held: Sequence[Sized], window: Sequence[Sized], *, last: bool
    ) -> tuple[list[list[Sized]], list[Sized]]:
        samples = [*held, *window]
        sizes = [min(sample.length, self.budget) for sample in samples]
        packs = [list(range(len(held)))] if held else []
        rooms = [(self.budget - sum(sizes[: len(held)]), 0) for _ in packs]  # with the number of the pack; sorted
        new = range(len(held), len(samples))
        for number in sorted(new, key=lambda number: -sizes[number]) if self.method == "best-fit" else new:
            if samples[number].length > self.budget and self.too_long == "drop":
                continue
            place = bisect_left(rooms, (sizes[number], -1))
            if self.method == "first-fit" and place < len(rooms):
                place = min(range(place, len(rooms)), key=lambda place: rooms[place][1])
            if place == len(rooms):
                packs.append([])
                room, pack = self.budget, len(packs) - 1
            else:
                room, pack = rooms.pop(place)
            packs[pack].append(number)
            insort(rooms, (room - sizes[number], pack))
        left = max((entry for entry in rooms if entry[1] or not held), default=None)
        rest = [] if last or left is None else packs.pop(left[1])
        groups = sorted(map(sorted, packs))
        return [[samples[number] for number in pack] for pack in groups], [samples[number] for number in rest]

    def joined(self, group: Sequence[Sized]) -> Any:
        if callable(self.length):
            return [sample for sample, _ in group]
        return self._pack([Part(sized, 0, min(sized.length, self.budget)) for sized in group])

    def _wrapped(self) -> Iterator[Any]:
        at, source, parts, room = self.at, self.source, list[Part](), self.budget
        before, taken = source.mark(), at.inside
        for sample in source.items:
            sized = length_of(self, sample)
            self.check_again()
            if sized.length < taken:
                raise self._unlike()
            while taken < sized.length:
                stop = min(sized.length, taken + room)
                parts.append(Part(sized, taken, stop))
                room, taken = room - (stop - taken), stop
                if not room:
                    packed = self._pack(parts)
                    at.inside = 0 if parts[-1].is_last else taken
                    self.earlier = before if at.inside else None
                    at.delivered += sum(part.is_last for part in parts)
                    yield packed
                    parts, room = [], self.budget
            before, taken = source.mark(), 0
        if parts:
            packed = self._pack(parts)
            at.inside, self.earlier = 0, None
            at.delivered += sum(part.is_last for part in parts)
            yield packed
        elif at.inside:
            raise self._unlike()

    def _pack(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return parts as one dict of tensors."""
        sizes = np.array([part.stop - part.start for part in parts])
        total = int(sizes.sum()) if self.pad is None else self.budget
        group = [part.sized for part in parts]
        names = group[0].sample.keys()
        for sample, _ in group:
            if sample.keys() != names:
                named = identity(sample)
                raise SampleError(
                    f"the samples of a pack differ in form: {named.name()} has fields {', '.join(sample)}, another one "
                    f"has {', '.join(names)}. Choose the fields with select_fields().",
                    url=named.url,
                    key=named.key,
                )
        pack: dict[str, Any] = {}
        for name in names:
            pack[name] = [sample[name] for sample, _ in group]
            if is_as_long(name, group):
                pieces = [as_array(part.sized.sample[name])[part.start : part.stop] for part in parts]
                pack[name] = _tensor(np.concatenate(pieces), total, self.pad or 0)
        ends = np.cumsum(sizes)
        pack["cu_seqlens"] = _tensor(np.concatenate([[0], ends]).astype(np.int32), len(parts) + 1, 0)
        pack["max_seqlen"] = int(sizes.max())
        pack["position_ids"] = _tensor(np.arange(ends[-1]) - np.repeat(ends - sizes, sizes), total, 0)
        pack["document_ids"] = _tensor(np.repeat(np.arange(len(parts), dtype=np.int32), sizes), total, -1)
        return pack


def _tensor(array: Any, total: int, fill: int) -> Any:
    """Return an array as a tensor of ``total`` rows, of which the last ones are ``fill``; as an
    array where torch was not imported.
    """
    missing = total - len(array)
    if missing:
        array = np.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)], constant_values=fill)
    torch = sys.modules.get("torch")
    return array if torch is None else torch.from_numpy(array)
