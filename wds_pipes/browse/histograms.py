"""Histograms over a part of the data: labels, image sizes, lengths of text, sizes of fields."""

from __future__ import annotations

import math
import re
import threading
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import wait
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np

from wds_pipes.browse.data import Budget, DataSet
from wds_pipes.browse.fields import MEDIA, MOST_NAME
from wds_pipes.browse.pages import Pages, Query
from wds_pipes.core.order import Permutation, hash64
from wds_pipes.core.words import bytes_shown, plural
from wds_pipes.display.text import cut
from wds_pipes.io.open import is_remote
from wds_pipes.io.threads import DaemonThreads
from wds_pipes.tools.files import LABEL
from wds_pipes.tools.looking import Decoders, image_header

SAMPLES = 512  # that are drawn
MOST_BYTES = 1 << 20  # that are read of a field
_SHARDS = 8  # from which samples are drawn without an index
_BUDGET = 1 << 28  # bytes that are read
_RUN = 8  # samples that follow each other and are read together, of remote shards
_THREADS = 8
_MOST = 64  # histograms, fields of a sample, and entries of a JSON object
_MOST_NOTED = 1024  # histograms, of which those of the most samples are shown
_MOST_BARS = 16
_MOST_LABEL = 60  # characters
_LARGEST_NUMBER = 10**15  # others are text, like NaN
_KINDS = ("labels", "values", "width in pixels", "height in pixels", "characters", "bytes")  # in this order


class Histogram(NamedTuple):
    """A histogram.

    Attributes:
        field: the field, or ``"json: age"``, an entry of one.
        what: what is counted: ``"labels"``, ``"values"``, ``"width in pixels"``,
            ``"height in pixels"``, ``"characters"`` or ``"bytes"``.
        bars: how many samples have what a bar stands for, by its label; at most 18.
        samples: how many samples there are in all bars.
    """

    field: str
    what: str
    bars: dict[str, int]
    samples: int


class Seen:
    """What was seen in samples.

    Attributes:
        samples: how many there were.
        bytes: how many bytes of them were looked at.
        left_out: whether there are more histograms than are shown.
        problem: the first error; "": there was none.
    """

    def __init__(self) -> None:
        self.samples, self.bytes, self.left_out, self.problem = 0, 0, False, ""
        self._decoders = Decoders()
        self._values: dict[tuple[str, str], list[Any]] = {}  # by field and what they are

    def add(self, fields: Iterable[tuple[str, int, bytes]]) -> None:
        """Look at the fields of a sample: the name of each, its size, and its first bytes, at most
        ``MOST_BYTES``.
        """
        self.samples += 1
        for name, size, data in fields:
            self.bytes += len(data)
            if not self._note(name, "bytes", size):
                continue
            if (image := image_header(data)) is not None:
                self._note(name, "width in pixels", image.width)
                self._note(name, "height in pixels", image.height)
            elif len(data) == size:
                self._look(name, data)

    def _look(self, name: str, data: bytes) -> None:
        try:
            value = self._decoders.decode(name, data)
        except Exception:  # whatever a decoder raises for damaged data; the page of the sample shows it
            return
        if isinstance(value, str):
            self._note(name, "characters", len(value))
        elif isinstance(value, (int, float)):
            self._note(name, "labels" if isinstance(value, int) else "values", value)
        elif isinstance(value, Mapping):
            for entry, part in islice(value.items(), _MOST):
                if isinstance(part, (str, int, float)):
                    self._note(f"{name}: {cut(str(entry), _MOST_LABEL)}", "values", part)

    def _note(self, field: str, what: str, value: Any) -> bool:
        """Note a value, and return whether there is a histogram for it."""
        place = field, what
        if place not in self._values and len(self._values) >= _MOST_NOTED:
            self.left_out = True
            return False
        is_number = not isinstance(value, str) and abs(value) <= _LARGEST_NUMBER
        self._values.setdefault(place, []).append(value if is_number else cut(str(value), _MOST_LABEL))
        return True

    def histograms(self, named: Callable[[str], str] = str) -> list[Histogram]:
        """Return the histograms of the most samples, at most 64: labels and values first, and the
        sizes of fields last. ``named`` adds the name of its class to a label in ``cls``.
        """
        found = [
            Histogram(field, what, {named(bar): bars[bar] for bar in bars} if field == LABEL else bars, len(values))
            for (field, what), values in self._values.items()
            if (bars := _bars(what, values))
        ]
        self.left_out |= len(found) > _MOST
        common = sorted(found, key=lambda one: (-one.samples, one.field))[:_MOST]
        return sorted(common, key=lambda one: (_KINDS.index(one.what), one.field))


def _bars(what: str, values: list[Any]) -> dict[str, int]:
    """Return the bars of a histogram; none if they would say nothing."""
    counts = Counter(values)
    if what == "bytes":
        powers = Counter(size.bit_length() for size in values)
        ends = [bytes_shown((1 << bits) // 2) for bits in range(max(powers) + 2)]
        return {f"{ends[bits]} to {ends[bits + 1]}": powers[bits] for bits in range(min(powers), max(powers) + 1)}
    if what == "labels" or len(counts) <= _MOST_BARS:
        return _by_value(counts)
    if any(isinstance(value, str) for value in counts):
        return {}  # such as names: nearly each sample has another one
    return _by_range(values)


def _by_value(counts: Counter[Any]) -> dict[str, int]:
    """A bar for each value, in their order; if there are many, for the most common ones."""
    common = counts.most_common(_MOST_BARS)
    many = len(counts) > len(common)
    bars = Counter[str]()  # a number and a text may have one label
    for value, count in common if many else sorted(common, key=lambda pair: (isinstance(pair[0], str), pair[0])):
        bars[str(value)] += count
    if many:
        bars[plural(len(counts) - len(common), "other")] += counts.total() - bars.total()
    return bars


def _by_range(values: list[float]) -> dict[str, int]:
    """Bars of one width, a round number."""
    least = (max(values) - min(values)) / _MOST_BARS
    power = 10.0 ** np.floor(np.log10(least))
    width = next((step * power for step in (1, 2, 5, 10) if step * power >= least), least)  # power may be 0
    if all(isinstance(value, int) for value in values):
        width = max(1, round(width))
    counts = Counter(int(value // width) for value in values)
    places = range(min(counts), max(counts) + 1)
    return {f"{place * width:,.6g} to {(place + 1) * width:,.6g}": counts[place] for place in places}


def drawn(total: int, count: int, seed: int) -> list[int]:
    """Return the numbers of ``count`` of ``total`` samples in random order, which the seed decides;
    of all if there are no more.
    """
    numbers: list[int] = Permutation(total, hash64(seed, total)).numbers_at(np.arange(min(count, total))).tolist()
    return numbers


def look_at_part(data: DataSet, seed: int, budget: Budget) -> tuple[str, Seen]:
    """Look at a random part of the samples of a data set: of all of them if an index counts them,
    else the first samples of some shards.

    It reads at most 512 samples, of each field at most 1 MiB, and about 256 MiB in all.

    Args:
        data: the data set.
        seed: decides which part.
        budget: how long it may take. What has not come by then is left out.

    Returns:
        Which samples they are, in words, and what was seen.
    """
    seen, lock, run = Seen(), threading.Lock(), _RUN if is_remote(data.shards[0]) else 1
    if data.total is None:
        places = [(shard, 0, SAMPLES // _SHARDS) for shard in drawn(len(data.shards), _SHARDS, seed)]
    else:
        ends = [0, *accumulate(data.count(shard) or 0 for shard in range(len(data.shards)))]
        numbers = [run * place for place in drawn(-(-data.total // run), SAMPLES // run, seed)]
        places = [(shard := bisect_right(ends, number) - 1, number - ends[shard], run) for number in numbers]

    def look(place: tuple[int, int, int]) -> None:
        try:
            with data.look(*place, budget=budget) as view:
                for sample in view.found if seen.bytes < _BUDGET else ():
                    heads = [
                        (
                            cut(one.field, MOST_NAME),
                            one.size,
                            b"" if one.field.rpartition(".")[2] in MEDIA else view.read(one, MOST_BYTES),
                        )
                        for one in sample.members[:_MOST]
                    ]
                    with lock:
                        seen.add(heads)
                seen.problem = seen.problem or view.problem
        except OSError as error:
            seen.problem = seen.problem or str(error)

    threads = DaemonThreads(_THREADS)
    looks = [threads.submit(look, place) for place in places]
    wait(looks, None if budget.seconds == math.inf else budget.seconds)
    for each in looks:
        if each.done():
            each.result()
        else:
            each.cancel()
            seen.problem = seen.problem or "Some of it has not come in time."
    if data.total is not None:
        runs = f", in runs of {run} neighbours" if run > 1 else ""
        return f"{seen.samples:,} of {plural(data.total, 'sample')}{runs}", seen
    shards = plural(len(data.shards), "shard")
    first = f"the first of {len(places):,} of {shards}, since no index counts them"
    return f"{plural(seen.samples, 'sample')}, {first}", seen


def add_histograms(pages: Pages) -> None:
    """Add the page of histograms. What was drawn last stays, so that a reload takes no time."""
    last: dict[int, tuple[str, Seen]] = {}

    def page(*, query: Query) -> str:
        number = int(query["part"]) if re.fullmatch(r"\d{1,9}", query.get("part", ""), re.ASCII) else 0
        part, seen = last.get(number) or look_at_part(pages.data, number, query.budget)
        last.clear()
        if not seen.problem:
            last[number] = part, seen
        found = seen.histograms(lambda label: pages.data.class_named(0, label))
        return pages.render("histograms.html", number=number, part=part, seen=seen, histograms=found)

    pages.add(r"histograms\.html", page, "Histograms")
