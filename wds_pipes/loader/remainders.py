"""Remainders of the lanes of an earlier partition, and how the lanes of the next one share them.

Rules:
1. The samples of a remainder come in one order, which their shuffle decides. A *run* is some
   consecutive samples of a remainder. A lane that has a run opens the remainder where that begins,
   passes over the samples before its own, and ends after its own. Only the steps up to the last one
   that holds items run for samples that are passed over.
2. The remainders stand in a line. Each lane takes its load from it, a number of samples: so a
   remainder that ends within the load of a lane is one piece, and any other is cut into runs.
   Remainders are placed whole if there is room for them. Else the lanes are filled one after the
   other. So a lane passes over the beginning of one remainder at most.
3. Full batches are dealt to the lanes in turn. So on any number of ranks that divides the lanes,
   the ranks have equally many, and fewer samples are left over than all ranks take in one step.
4. Neighbouring runs become one again when an epoch is repartitioned once more.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from wds_pipes.core.chain import Chain
from wds_pipes.core.state import damaged, read_count, read_dict, read_position
from wds_pipes.core.words import shown


class Segment(NamedTuple):
    """A segment: a run of the ranges of one lane of one partition, or some of their samples.

    Attributes:
        number: the number of the lane in that partition.
        generation: the generation of that partition: how often the epoch had been repartitioned.
        start: the first of the lane's ranges.
        stop: the one after the last; None: up to the last of the lane.
        position: where to begin, as ``Chain.dump`` wrote it; None: at the beginning.
        samples: how many samples it has; None: not known.
        passed: how many samples after the position belong to another lane, and are passed over.
        after: how many samples after its own belong to other lanes.
    """

    number: int
    generation: int
    start: int = 0
    stop: int | None = None
    position: list[dict[str, Any]] | None = None
    samples: int | None = None
    passed: int = 0
    after: int = 0

    @property
    def ended(self) -> bool:
        """Whether it has no ranges."""
        return self.stop is not None and self.start >= self.stop

    @property
    def size(self) -> int:
        """How many samples it has, as far as that is known."""
        return self.samples or 0

    @property
    def is_run(self) -> bool:
        """Whether other lanes have other samples of its ranges."""
        return self.passed > 0 or self.after > 0

    def cut(self, first: int, count: int) -> Segment:
        """Return the run of ``count`` of its samples from number ``first`` of them on."""
        after = self.after + self.size - first - count
        return self._replace(samples=count, passed=self.passed + first, after=after)

    def as_json(self) -> list[Any]:
        """Return plain JSON types: of the position only the steps that are not at their beginning,
        by their numbers.
        """
        position = self.position
        entries = None if position is None else {str(number): entry for number, entry in enumerate(position) if entry}
        values: list[Any] = list(self._replace(position=entries))  # type: ignore[arg-type]
        return values if self.is_run else values[:-2]

    @classmethod
    def from_json(cls, entry: object, chain: Chain) -> Segment:
        """Return the segment that ``as_json`` wrote, of a chain."""
        is_run = isinstance(entry, list) and len(entry) == len(cls._fields)
        number, generation, start, stop, position, samples, *run = fields_of(entry, len(cls._fields) - 2 * (not is_run))
        numbers = number, generation, start, *run, *(value for value in (stop, samples) if value is not None)
        for value in numbers:
            read_count(value, "a number of a remainder")
        if is_run and samples is None:
            raise damaged("it does not say how many samples a run of a remainder has")
        if position is not None:
            entries, steps = read_dict(position, "the position of a remainder"), range(len(chain.placed))
            if not entries.keys() <= set(map(str, steps)):
                raise damaged(f"a remainder stands at {shown(position)}")
            given = read_position([entries.get(str(number), {}) for number in steps], "the position of a remainder")
            position = chain.dump(chain.load(given))  # without sources of a mix that are gone
        return cls(number, generation, start, stop, position, samples, *run)


def fields_of(entry: object, length: int) -> list[Any]:
    """Return ``entry`` if it is a list of this length, else raise."""
    if not isinstance(entry, list) or len(entry) != length:
        raise damaged(f"its partition holds {shown(entry)}")
    return entry


def check_once(remainders: Iterable[Segment]) -> None:
    """Raise StateError if remainders have a sample twice."""
    last = None
    for one in sorted(remainders, key=_place_in_order):
        if last is not None and last[:2] == one[:2] and one.after + max(1, one.size) > last.after:
            raise damaged("its partition continues a lane twice")
        last = one


def merged(remainders: list[Segment]) -> list[Segment]:
    """Return remainders, of which neighbouring runs have become one."""
    if not any(one.is_run for one in remainders):
        return remainders
    found = list[Segment]()
    for one in sorted(remainders, key=_place_in_order):
        last = found[-1] if found else None
        if last is not None and last[:2] == one[:2] and one.after + one.size == last.after:
            found[-1] = last._replace(samples=last.size + one.size, after=one.after)
        else:
            found.append(one)
    return found


def _place_in_order(remainder: Segment) -> tuple[int, int, int]:
    """A key to sort by: runs of one remainder come in the order of their samples."""
    return remainder.generation, remainder.number, -remainder.after


# Dividing


def dealt(samples: int, lanes: int, size: int) -> list[int]:
    """Return how many samples each lane gets, of which ``size`` make a batch: rule 3."""
    batches, rest = divmod(samples, size)
    each, more = divmod(batches, lanes)
    return [(each + (lane < more)) * size + rest * (lane == more) for lane in range(lanes)]


def placed(remainders: Sequence[Segment], room: Sequence[int]) -> tuple[list[Segment], list[int]]:
    """Return remainders in a line, and how many samples of the line each lane takes: rule 2.

    Args:
        remainders: with their numbers of samples.
        room: how many samples each lane gets, of remainders and of unopened shards.
    """
    largest_first = sorted(remainders, key=lambda one: -one.size)
    return _placed_whole(largest_first, room) or _filled(largest_first, room)


def _placed_whole(remainders: list[Segment], room: Sequence[int]) -> tuple[list[Segment], list[int]] | None:
    """Place each remainder in the lane with the most room; None: one does not fit."""
    lanes: list[list[Segment]] = [[] for _ in room]
    left = [(-samples, lane) for lane, samples in enumerate(room)]
    heapq.heapify(left)
    for one in remainders:
        most, lane = left[0]
        if one.size > -most:
            return None
        lanes[lane].append(one)
        heapq.heapreplace(left, (most + one.size, lane))
    return [one for lane in lanes for one in lane], [sum(one.size for one in lane) for lane in lanes]


def _filled(remainders: list[Segment], room: Sequence[int]) -> tuple[list[Segment], list[int]]:
    """Fill one lane after the other, with what fits whole as far as there are unopened samples for
    the rest.
    """
    waiting = remainders[::-1]  # the largest is the last
    sizes = [one.size for one in waiting]
    unopened, line, loads, open_end = sum(room) - sum(sizes), list[Segment](), list[int](), 0
    for samples in room:
        begun = min(open_end, samples)
        left, open_end = samples - begun, open_end - begun
        while left and (fits := bisect_right(sizes, left)):
            line.append(waiting.pop(fits - 1))
            left -= sizes.pop(fits - 1)
        if left and waiting and left > unopened:
            line.append(waiting.pop())
            open_end, left = sizes.pop() - left, 0
        unopened -= left
        loads.append(samples - left)
    return line, loads


def shared(remainders: Sequence[Segment], loads: Iterable[int]) -> Iterator[list[Segment]]:
    """Yield the remainders of each lane, and runs of them: of the line, as many samples as its
    load. It begins with what it need not pass over.
    """
    line = iter(remainders)
    one, taken = next(line, None), 0
    for load in loads:
        own = list[Segment]()
        while load and one is not None:
            count = min(load, one.size - taken)
            own.append(one.cut(taken, count))
            load, taken = load - count, taken + count
            if taken == one.size:
                one, taken = next(line, None), 0
        yield sorted(own, key=lambda run: run.passed > 0)
