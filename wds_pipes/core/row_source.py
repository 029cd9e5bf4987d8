"""A base for sources of numbered rows, such as a table of a database."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar

from wds_pipes.core.graph import GraphStep
from wds_pipes.core.options import check_count
from wds_pipes.core.reads_again import is_one_item
from wds_pipes.core.stage import END, Order, Out, Source, find_stage, functional_name
from wds_pipes.core.state import damaged
from wds_pipes.core.words import plural
from wds_pipes.errors import SampleError

_MOST_BLOCKS = 4096  # of an epoch: what is left of a lane is divided by whole blocks


class RowSource(Order, Source[Out]):
    """The base of sources of numbered rows, such as a table of a database, an array on a disk or a
    list. A subclass counts the rows, and reads a range of them; pipes, lanes, PipeLoader and exact
    states follow::

        class Rows(wp.RowSource):
            order_options = ()  # the path may differ: the file may move

            def __init__(self, path, *, seed=None):
                self.path = path
                with closing(sqlite3.connect(path)) as connection:
                    [(count,)] = connection.execute("SELECT count(*) FROM rows")
                super().__init__(count, seed=seed)

            def read(self, start, stop):
                query = "SELECT key, txt FROM rows WHERE rowid BETWEEN ? AND ? ORDER BY rowid"
                with closing(sqlite3.connect(self.path)) as connection:
                    for key, text in connection.execute(query, (start + 1, stop)):
                        yield {"__key__": key, "txt": text}

        pipe = wp.register_stage(Rows)("train.sqlite")

    Name what identifies the data in ``order_options``, such as the name of the table: a state is
    refused if it differs, or if the number of rows does. To shuffle, use ``shuffle_buffer``. A
    sample needs a ``"__key__"`` only for steps that ask for it.

    ``read`` is called up to 4,096 times in an epoch, for a small table once for each row. So it
    must find the row ``start`` quickly: by a number that has an index, such as SQLite's rowid here.
    ``LIMIT ? OFFSET ?`` walks over all rows before ``start`` at each call, and ``ORDER BY`` a
    column without an index sorts the table at each call. If the numbers have gaps, read them once
    in ``__init__``, into an array of 8 bytes for each, ``self.ids = array.array("q", ...)``, and
    look for those from ``self.ids[start]`` to ``self.ids[stop - 1]``.

    Args:
        count: how many rows there are.
        seed: an integer of 64 bits, from which all random decisions of the pipe derive; None: 0,
            and in a ``mix`` one that follows from the name of the source.

    Raises:
        SampleError: during iteration, if ``read`` yields fewer or more rows than it was asked for.
        TypeError: during iteration, if it returns no rows at all, as without a ``yield``.

    Checkpoint: two numbers. A resume calls ``read`` with the next row as its ``start``.
    """

    @dataclass(slots=True)
    class At:  # noqa: D106 - see Stage
        next: int = 0  # how many of the lane's ranges are done
        inside: int = 0  # how many rows of the next one are

    divides = divides_shards = True
    gives: ClassVar[str | None] = "samples"

    def __init__(self, count: int, *, seed: int | None = None) -> None:
        super().__init__(seed)
        self.count = check_count("count", count, least=0)

    if not TYPE_CHECKING:  # type checkers still find misspelt attributes

        def __getattr__(self, name: str) -> Any:
            kind, mend = type(self).__name__, ""
            if find_stage(name) is not None:
                mend = f". It is no pipe: call the class that register_stage({kind}) returns, which makes one"
            raise AttributeError(f"{kind!r} object has no attribute {name!r}{mend}", name=name, obj=self)

    @abstractmethod
    def read(self, start: int, stop: int) -> Iterable[Out]:
        """Yield the rows ``start`` to ``stop`` - 1, counted from 0.

        It is called in the process that iterates. So open files and connections here, not in
        ``__init__``, whose objects go to the workers.
        """

    def run(self) -> Iterator[Out]:
        at, lane, block = self.at, self.lane, self._block
        ranges: Sequence[tuple[int, int, int]] = lane.shards or ()
        if lane.shards is None:
            ranges = self.epoch_shards(lane.seed, lane.epoch)[lane.number :: lane.of]
        if at.next > len(ranges) or at.inside > (ranges[at.next][2] - ranges[at.next][1] if ranges[at.next :] else 0):
            raise damaged(f"lane {lane.number} of {lane.of} stands at row {at.inside} of range {at.next}")
        for number, first, last in ranges[at.next :]:
            start, stop = number * block + first + at.inside, number * block + last
            found = self.read(start, stop) if start < stop else ()
            if not hasattr(found, "__iter__") or is_one_item(found):
                raise TypeError(
                    f"read() of {functional_name(type(self))} returned {found!r:.80}: it must yield the rows, also a "
                    "single one, or return a list, such as [row]"
                )
            rows = iter(found)
            for row in islice(rows, stop - start):
                at.inside += 1
                yield row
            if at.inside < last - first or next(rows, END) is not END:
                yielded = f"{'fewer' if at.inside < last - first else 'more'} than {plural(stop - start, 'row')}"
                raise SampleError(
                    f"read({start}, {stop}) of {functional_name(type(self))} yielded {yielded}: it must yield the rows "
                    f"{start} to {stop - 1}, counted from 0. Have rows been deleted or added since they were counted?"
                )
            at.next, at.inside = at.next + 1, 0

    def _in_graph(self, *, counted: bool) -> GraphStep:
        name, options = super()._in_graph(counted=counted)
        return GraphStep(name, {"count": self.count, **options})

    @property
    def _block(self) -> int:
        return max(1, -(-self.count // _MOST_BLOCKS))

    def epoch_shards(self, seed: int, epoch: int) -> list[tuple[int, int, int]]:
        block = self._block
        return [(start // block, 0, min(block, self.count - start)) for start in range(0, self.count, block)]

    @property
    def sample_counts(self) -> Sequence[int]:
        return [self.count]

    @property
    def samples_fingerprint(self) -> str:
        return str(self.count)

    @property
    def opened(self) -> int:
        return int(self.at.next) + bool(self.at.inside)
