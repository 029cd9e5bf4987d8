"""How far a command is: a bar on a terminal, and lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from threading import Event, Thread

from wds_pipes.core.importing import library
from wds_pipes.core.words import bytes_shown, plural

_LINE_SECONDS = 60.0


@contextlib.contextmanager
def progress(total: int, unit: str, *, show: bool | None, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show on standard error how far something is.

    Args:
        total: how many units there are.
        unit: what is counted, such as ``"shard"``.
        show: True: a bar, which needs tqdm; None: a line each minute; False: nothing.
        done: how many units were done before.

    Yields:
        A function that takes how many units were done since its last call.
    """
    if show:
        tqdm = library("tqdm", "tqdm", "progress=True").tqdm
        with tqdm(total=total, initial=done, unit=unit, unit_scale=total >= 10_000) as bar:
            yield bar.update
    elif show is None:
        lines = _Lines(total, unit, done)
        ended = Event()
        Thread(target=lines.print_until, args=(ended,), daemon=True).start()
        try:
            yield lines.add
        finally:
            ended.set()
    else:
        yield lambda count: None


class _Lines:
    def __init__(self, total: int, unit: str, done: int) -> None:
        self._total, self._unit, self._before, self._done = total, unit, done, done
        self._start = time.monotonic()

    def add(self, count: int) -> None:
        """Count units."""
        self._done += count

    def print_until(self, ended: Event) -> None:
        """Print a line each minute."""
        while not ended.wait(_LINE_SECONDS):
            sys.stderr.write(f"{self.line(time.monotonic() - self._start)}\n")
            sys.stderr.flush()

    def line(self, seconds: float) -> str:
        """How far it is after ``seconds``."""
        in_bytes, done = self._unit == "B", self._done - self._before
        line = bytes_shown(self._done) if in_bytes else f"{self._done:,}"
        line += f" of {bytes_shown(self._total) if in_bytes else plural(self._total, self._unit)}"
        if done <= 0:
            return line
        rate = done / seconds
        shown = bytes_shown(rate) if in_bytes else f"{rate:,.3g} {self._unit}s"
        left = (self._total - self._done) / rate
        return f"{line}, {shown}/s, about {f'{left:.0f} s' if left < 100 else f'{left / 60:.0f} min'} left"


class Units:
    """Counts the units of parts, also of those that are not done: at most as many as a part has.

    Args:
        advance: takes how many units were done since its last call.
        sizes: how many units each part has.
    """

    def __init__(self, advance: Callable[[int], object], sizes: Mapping[str, int]) -> None:
        self._advance, self._sizes, self._left = advance, sizes, dict(sizes)

    def add(self, name: str, count: int) -> None:
        """Count units of a part."""
        count = min(count, self._left[name])
        self._left[name] -= count
        self._advance(count)

    def reach(self, name: str, count: int) -> None:
        """Count the units of a part up to this number."""
        self.add(name, count - (self._sizes[name] - self._left[name]))

    def end(self, name: str, *, done: bool = True) -> None:
        """Count the rest of a part that is done; forget the units of one that will run again."""
        left, size = self._left[name], self._sizes[name]
        self._left[name] = 0 if done else size
        self._advance(left if done else left - size)
