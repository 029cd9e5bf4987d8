"""Read a shard from a lying server, and judge the outcome."""

import itertools
import json
import threading
import time
from typing import NamedTuple

from remote import bare, content, samples
from servers.lying import ENDS, FRAMINGS, RANGES, Lie, LyingServer

import wds_pipes as wp
from wds_pipes.testing import make_shards

TIMEOUT_SECONDS = 2.0
SAMPLES = 8
INDEXES = (None, "right", "short", "long")


class Case(NamedTuple):
    """A lie, and how the shard is read: what an index says of its size, with a cache or without,
    and through how many connections.
    """

    lie: Lie
    index: str | None
    cached: bool
    connections: int


class Outcome(NamedTuple):
    """The outcome of a case: ``exact``, ``error``, ``warned`` (short, with a warning), or
    ``WRONG``; with the text of the error, and the seconds it took.
    """

    kind: str
    words: str
    seconds: float


def all_cases():
    """Every lie, read in every way."""
    lies = [Lie(*parts) for parts in itertools.product(FRAMINGS, ENDS, RANGES, (False, True))]
    return [Case(*parts) for parts in itertools.product(lies, INDEXES, (False, True), (1, 8))]


class Trials:
    """A lying server with a shard of eight samples of 400 KB in two fields, and what reads it.

    Args:
        directory: for the shard, indexes and caches.
    """

    def __init__(self, directory):
        fields = {"a": lambda rng, _: rng.randbytes(390_000), "b": lambda rng, _: rng.randbytes(9_000)}
        [path] = make_shards(directory / "shards", shards=1, samples=SAMPLES, fields=fields)
        self.directory, self.data = directory, content(path)
        with open(path, "rb") as file:
            self.offsets = [member.offset for member in wp.tar.TarReader(file)]
        self.wanted = [bare(sample) for sample in samples(path)]
        self.server = LyingServer(self.data, inside=self.offsets[6] + 200_000, boundary=self.offsets[10])
        self._count = itertools.count()

    def pipe(self, case):
        """The pipe that reads it, and the sizes that it knows from the index."""
        url = self.server.url(case.lie)
        number, index = next(self._count), None
        if case.index is not None:
            index = self.directory / f"{number}.json"
            size = {"right": len(self.data), "short": self.offsets[10], "long": len(self.data) + 10_240}[case.index]
            index.write_text(
                json.dumps({"wids_version": 1, "shardlist": [{"url": url, "nsamples": SAMPLES, "filesize": size}]})
            )
        options = {"cache": wp.ShardCache(self.directory / f"cache-{number}", max_bytes="1GB")} if case.cached else {}
        return samples(
            [url],
            index=index,
            connections=case.connections,
            readahead_bytes=2 << 20,
            timeout_seconds=TIMEOUT_SECONDS,
            **options,
        )

    def read(self, case):
        """The outcome of a case."""
        start, found = time.monotonic(), []
        try:
            for sample in self.pipe(case):
                found.append(bare(sample))
            kind, words = "exact", ""
        except wp.WdsError as error:
            kind, words = "error", str(error)
        if found != self.wanted[: len(found)]:
            kind = "WRONG"
        elif kind == "exact" and len(found) != SAMPLES:
            # Where a length or an end mark confirms an end between two samples, only the missing
            # end-of-archive mark shows it.
            believed = (
                case.lie.framing in ("sent", "chunked") or case.lie.ranges == "undersized" or case.index == "short"
            )
            kind, words = ("warned" if believed else "WRONG"), f"{len(found)} samples"
        return Outcome(kind, words, time.monotonic() - start)

    def read_all(self, cases, *, threads, seconds):
        """The outcomes of many cases by case, read in parallel; a case that hangs has none."""
        left, outcomes = iter(cases), {}
        lock = threading.Lock()

        def work():
            while True:
                with lock:
                    case = next(left, None)
                if case is None:
                    return
                try:
                    outcomes[case] = self.read(case)
                except Exception as error:
                    outcomes[case] = Outcome("WRONG", repr(error), 0)

        working = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
        for thread in working:
            thread.start()
        end = time.monotonic() + seconds
        for thread in working:
            thread.join(max(0, end - time.monotonic()))
        return outcomes
