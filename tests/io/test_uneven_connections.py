"""Connections whose bytes come unevenly, for which the kernel is asked to gather some: none may
be left waiting there.
"""

import threading
import time

import pytest
from remote import bare, content, samples
from serving import Ranged, certified, serving

from wds_pipes.core.chain import Chain
from wds_pipes.datapipes.pipe import as_stage
from wds_pipes.testing import make_shards

SIZE = 3_000_000


class Uneven(Ranged):
    """Answers many requests on a connection; each body comes at once up to a place, and the rest
    of it in drops.
    """

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        start, stop = self.requested()
        self.begin_range(start, stop)
        while start < stop:
            is_fast = stop - start >= 1_200_000
            count = 50_000 if is_fast else 100_000
            self.write(self.data[start : min(start + count, stop)])
            time.sleep(0.001 if is_fast else 0.02)  # at 50 MB/s: it is known what comes in some milliseconds
            start += count


@pytest.fixture(params=["http", "https"])
def server(request, tmp_path):
    paths = make_shards(tmp_path, shards=3, samples=30, fields={"bin": lambda rng, _: rng.randbytes(SIZE // 30)})
    kinds = {f"/{number}.tar": content(path) for number, path in enumerate(paths)}

    class Of(Uneven):
        @property
        def data(self):
            return kinds[self.path]

    options = {"ssl": False} if request.param == "https" else {}
    with serving(Of, tls=certified(tmp_path) if options else None) as address:
        yield [f"{address}/{number}.tar" for number in range(3)], paths, options


@pytest.mark.parametrize("connections", [1, 2])
def test_all_comes_in_time(server, connections):
    """Answers, one after another on the same connections, end in drops that are smaller than
    what was gathered before.
    """
    urls, paths, options = server
    pipe = samples(urls, connections=connections, readahead_bytes=8 << 20, timeout_seconds=120, storage_options=options)
    assert list(map(bare, pipe)) == list(map(bare, samples(paths)))
    # a byte that waited would have been requested again after a quarter of the timeout
    assert Chain(as_stage(pipe)).network.retries == 0


class Bursts(Uneven):
    """A body comes at once up to a place, then a little, then nothing until a test says so."""

    def do_GET(self):
        self.requests.append(self.path)
        self.begin_range(0, len(self.data))
        self.write(self.data[:3_000_000])
        time.sleep(0.3)
        self.write(self.data[3_000_000:3_150_000])
        self.go_on.wait(60)
        self.write(self.data[3_150_000:])


def test_what_has_come_is_not_held_back(tmp_path):
    """Where a fast connection becomes silent."""
    [path] = make_shards(tmp_path, shards=1, samples=60, fields={"bin": lambda rng, _: rng.randbytes(99_000)})
    requests, go_on = [], threading.Event()
    with serving(Bursts, data=content(path), requests=requests, go_on=go_on) as address:
        items = iter(samples(f"{address}/x.tar", connections=1, readahead_bytes=8 << 20, timeout_seconds=120))
        # the 30th is known to be whole when the 31st has been read, at byte 3 095 040
        found = [bare(next(items)) for _ in range(30)]
        go_on.set()
        found += map(bare, items)
        assert found == list(map(bare, samples(path)))
        assert len(requests) == 1
