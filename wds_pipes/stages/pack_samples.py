"""PackSamples: sequences of a token budget from samples."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any

import numpy as np

from wds_pipes.core.options import check_choice, check_count
from wds_pipes.core.stage import Stage
from wds_pipes.stages.collating import as_tensor, stack_samples
from wds_pipes.stages.windowed import Arranged, Windowed

_MADE = ("cu_seqlens", "max_seqlen", "position_ids", "document_ids")


class PackSamples(Windowed[Any]):
    """Put samples together to packs of at most ``budget`` tokens (functional name:
    ``pack_samples``).

    If ``length`` is the name of a field, a pack is a dict, with what attention over sequences of
    different lengths needs (flash-attn's ``flash_attn_varlen_func``, torch's ``varlen_attn``, a
    document mask of FlexAttention). A part is a sample, or with ``"wrap"`` what of it is in the
    pack:

    ==================  ============================================================================
    the field           the tokens of all parts: a tensor of shape (tokens, ...), of the field's
                        dtype
    ``aligned`` fields  likewise
    other fields        a list with a value for each part, such as ``__key__``
    ``cu_seqlens``      where each part begins, and where the last one ends: int32 (parts + 1,)
    ``max_seqlen``      the length of the longest part: an int
    ``position_ids``    the place of each token in its part, from 0: int64 (tokens,)
    ``document_ids``    the number of the part to which each token belongs: int32 (tokens,)
    ==================  ============================================================================

    With ``pad``, each pack has ``budget`` tokens, so that packs can be stacked. What fills a pack
    up is one more part for ``cu_seqlens``, ``max_seqlen`` and ``position_ids``, since kernels leave
    rows that are in no part undefined; its ``document_ids`` are -1.

    If ``length`` is a function, a pack is the list of its samples.

    Samples whose field is empty are left out, and count as dropped.

    Args:
        source: any pipe of samples.
        length: the name of a field with the tokens of a sample (a list, array or tensor of numbers,
            whose first dimension is the length), or a function that returns the length of a sample.
        budget: how many tokens a pack has at most.
        aligned: names of other fields with a value for each token, such as labels or a mask of the
            loss.
        method: ``"best-fit"`` packs ``window`` samples at a time, the longest first, each where it
            leaves the least room: best-fit decreasing (D. S. Johnson, "Near-optimal bin packing
            algorithms", 1973). ``"first-fit"`` packs them as they come, each into the first pack
            with room. Both leave samples whole, and carry the emptiest pack of a window over to the
            next one, where it is filled up. ``"wrap"`` cuts them: each pack but the last is full,
            and a sample may go on in the next one.
        window: how many samples are packed together, from 1 to 4096. It should be enough for ten
            packs or more. Packs come in the order of their first samples.
        too_long: what to do with a sample of more than ``budget`` tokens: ``"error"``; ``"cut"``:
            keep its first ``budget`` tokens, and count it as ``cut``; or ``"drop"``: leave it out,
            and count it as dropped. ``"wrap"`` packs samples of any length, and takes neither.
        drop_last: leave out the last pack of an epoch if it is not full, for best-fit and first-fit
            the emptiest one. Its samples count as dropped. With this and ``"wrap"``, all packs are
            full.
        pad: the value that fills up each pack: a number, or a dict with one for the field and each
            of ``aligned``, such as ``{"tokens": 0, "labels": -100}``; None: a pack ends with its
            last token.

    Raises:
        SampleError: during iteration: a sample is too long, or lacks a field; a field is no list,
            array or tensor of numbers, or differs from those of the other samples in dtype or
            shape; an ``aligned`` field has another length; the samples of a pack differ in their
            fields, or have one of the names above.
        TypeError, ValueError: when the stage is built: an option is wrong.

    Under PipeLoader, each lane makes packs of its own samples. ``PipeLoader(pipe)`` yields packs,
    ``PipeLoader(pipe.to_tuple("tokens", "document_ids"), batch_size=8)`` stacks those that were
    filled up. The number of packs of an epoch is not known before: on several ranks, use
    ``epoch_end="loop"`` with ``with_epoch(batches=...)``, so that each rank gets as many.

    Checkpoint: a few numbers, a bit for each sample of a window, and the position of the source
    before the window from which a pack was carried over; for ``"wrap"``, before the samples of the
    last pack. A resume reads at most 2 * ``window`` samples again, or this pack. On another number
    of ranks or workers, what is left of a lane is packed for itself, so one more pack of it may not
    be full.
    """

    @dataclass(slots=True)
    class At(Windowed.At):
        cut: int = 0  # samples of which the end was left out
        inside: int = 0  # for "wrap": how many tokens of the sample that is cut are in packs already
        passed: int = 0  # and how many samples come before it, after the position of the source

    tallies = (*Windowed.tallies, "cut")
    order_options = ("field", "budget", "method", "window", "too_long", "drop_last")

    def __init__(
        self,
        source: Stage[Any],
        length: str | Callable[[Any], int] = "tokens",
        budget: int = 8192,
        *,
        aligned: Sequence[str] = (),
        method: str = "best-fit",
        window: int = 512,
        too_long: str = "error",
        drop_last: bool = False,
        pad: float | Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(source, length, aligned, pad, window)
        self.budget, self.drop_last = check_count("budget", budget), bool(drop_last)
        self.method = check_choice("method", method, "best-fit", "first-fit", "wrap")
        self.too_long = check_choice("too_long", too_long, "error", "cut", "drop")
        if self.too_long == "error" and self.method != "wrap":
            self.limit = self.budget
        if self.field is None and (method == "wrap" or too_long == "cut" or pad is not None):
            raise ValueError(
                "method='wrap', too_long='cut' and pad= go with length= as the name of a field, not as a function"
            )
        if method == "wrap" and too_long != "error":
            raise ValueError(f"method='wrap' packs samples of any length: leave out too_long={too_long!r}")

    def problem(self, at: Any) -> str | None:
        if (at.yielded or at.carried) if self.method == "wrap" else (at.inside or at.passed):
            return f"it packs by {self.method!r}"
        return super().problem(at)

    def had_items(self, at: Any) -> bool:
        return super().had_items(at) or bool(at.inside)

    def run(self) -> Iterator[Any]:
        return self._wrapped() if self.method == "wrap" else super().run()

    def ended_in(self, item: Any) -> Iterable[Mapping[str, Any]]:
        ended = list(super().ended_in(item))
        return ended[:-1] if self.at.inside else ended

    def arranged(self, lengths: Sequence[int], held: int, *, last: bool) -> Arranged:
        budget, least = self.budget, 0 if self.field is None else 1
        most = budget if self.too_long == "drop" else math.inf
        sizes = [min(length, budget) for length in lengths]
        packs = [list(range(held))] if held else []
        # The room that each pack has, sorted. One integer has the room and the number of the pack,
        # since tuples are compared in three times the time: room * many + number.
        many = len(sizes) + 1
        rooms = [(budget - sum(sizes[:held])) * many for _ in packs]
        new = [number for number in range(held, len(sizes)) if least <= lengths[number] <= most]
        if self.method == "best-fit":
            new.sort(key=sizes.__getitem__, reverse=True)
        for number in new:
            place = bisect_left(rooms, sizes[number] * many)
            if self.method == "first-fit" and place < len(rooms):
                place = min(range(place, len(rooms)), key=lambda place: rooms[place] % many)
            if place == len(rooms):
                packs.append([])
                room, pack = budget, len(packs) - 1
            else:
                room, pack = divmod(rooms.pop(place), many)
            packs[pack].append(number)
            insort(rooms, (room - sizes[number]) * many + pack)
        # the emptiest one, if it is not full; what was carried over is not carried over again
        rest = [room % many for room in rooms if room >= many and (last or room % many or not held)][-1:]
        left = packs.pop(rest[0]) if rest and (self.drop_last or not last) else []
        return Arranged(sorted(map(sorted, packs)), [] if last else sorted(left))

    def joined(self, samples: list[Any], lengths: list[int]) -> Any:
        if self.field is None:
            return samples
        stop = min(lengths[-1], self.budget)  # one that is longer than the budget is alone
        self.at.cut += stop < lengths[-1]
        return self._pack(samples, lengths, 0, stop)

    def _wrapped(self) -> Iterator[Any]:
        """Yield full packs, with the samples as one sequence."""
        at, source, room = self.at, self.source, self.budget
        # of this pack; the first ``start`` tokens of its first sample are in packs before
        samples, lengths, start = list[Any](), list[int](), 0
        before, passed, taken = source.mark(), at.passed, at.inside
        for _ in islice(source.items, passed):
            pass
        for sample in source.items:
            length, full = self.length_of(sample), False
            self.check_again()
            if taken and taken >= length:
                raise self.unlike()
            at.dropped += not length
            while taken < length:
                start = start if samples else taken
                stop = min(length, taken + room)
                samples.append(sample)
                lengths.append(length)
                room, taken = room - (stop - taken), stop
                if not room:
                    pack = self._pack(samples, lengths, start, stop)
                    cut = stop < length
                    at.inside, at.passed, self.earlier = (stop, passed, before) if cut else (0, 0, None)
                    at.delivered += len(samples) - cut
                    yield pack
                    samples, lengths, room, full = [], [], self.budget, True
            passed, taken = passed + 1, 0
            if full:  # a mark for each sample would cost too much
                before, passed = source.mark(), 0
        if at.inside and not samples:
            raise self.unlike()
        at.inside, at.passed, self.earlier = 0, 0, None
        if samples and self.drop_last:
            at.dropped += len(samples)
        elif samples:
            at.delivered += len(samples)
            yield self._pack(samples, lengths, start, lengths[-1])

    def _pack(self, samples: list[Any], lengths: list[int], start: int, stop: int) -> dict[str, Any]:
        """Return samples as one dict, without the first ``start`` tokens of the first one, and with
        the first ``stop`` ones of the last.
        """
        self.check_free(samples[0], _MADE)
        sizes, numbers = [*lengths[:-1], stop], [*range(len(samples))]
        sizes[0] -= start
        fill = self.budget - sum(sizes)
        tokens = {}
        for name in self.aligned:
            arrays = self.arrays_of(name, samples, lengths)
            arrays[-1] = arrays[-1][:stop]
            arrays[0] = arrays[0][start:]
            if self.pads is not None:
                arrays.append(self.filled(name, (fill, *arrays[0].shape[1:]), arrays[0].dtype))
            tokens[name] = as_tensor(np.concatenate(arrays))
        pack: dict[str, Any] = stack_samples(samples, collate="columns") | tokens
        if self.pads is not None and fill:
            sizes, numbers = [*sizes, fill], [*numbers, -1]
        pack["cu_seqlens"] = as_tensor(np.array([*accumulate(sizes, initial=0)], np.int32))
        pack["max_seqlen"] = max(sizes)
        places = np.arange(pack["max_seqlen"])
        pack["position_ids"] = as_tensor(np.concatenate([places[:size] for size in sizes]))
        pack["document_ids"] = as_tensor(np.array(numbers, np.int32).repeat(sizes))
        return pack
