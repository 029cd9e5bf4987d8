"""How far a command is: a bar on a terminal, and lines elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from wds_pipes.core.importing import library
from wds_pipes.core.words import plural

_LINE_SECONDS = 30.0


@contextlib.contextmanager
def progress(total: int, unit: str, *, show: bool | None, done: int = 0) -> Iterator[Callable[[int], None]]:
    """Show on standard error how far something is.

    Args:
        total: how many units there are.
        unit: what is counted, such as ``"shard"``.
        show: True: a bar, which needs tqdm; None: a line each 30 seconds; False: nothing.
        done: how many units were done before.

    Yields:
        A function that takes how many units were done since its last call.
    """
    if show:
        tqdm = library("tqdm", "tqdm", "progress=True").tqdm
        with tqdm(total=total, initial=done, unit=unit, unit_scale=total >= 10_000) as bar:
            yield bar.update
    elif show is None:
        yield _Lines(total, unit, done).add
    else:
        yield lambda count: None


class _Lines:
    def __init__(self, total: int, unit: str, done: int) -> None:
        self._total, self._unit, self._before, self._done = total, unit, done, done
        self._start = self._shown = time.monotonic()

    def add(self, count: int) -> None:
        """Count units, and print a line if the last one is 30 seconds old."""
        self._done += count
        now = time.monotonic()
        if now - self._shown >= _LINE_SECONDS:
            self._shown = now
            rate = (self._done - self._before) / (now - self._start)
            minutes = (self._total - self._done) / rate / 60
            line = f"{self._done:,} of {plural(self._total, self._unit)}, about {minutes:.0f} min left"
            sys.stderr.write(f"{line}\n")
