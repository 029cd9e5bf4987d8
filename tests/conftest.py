"""Fixtures that several tests share."""

import gc
import multiprocessing
import os
import signal
import tracemalloc  # noqa: F401 - pytest imports it when a finalizer fails; in a forked worker, in the middle of another import, Python 3.11 trips over that
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import keep_bytecode  # noqa: F401 - what is imported after it is compiled once
import pytest
from fsspec.implementations.local import LocalFileSystem
from pipelines import FIFTY, samples
from remote import tasks
from servers import Missing, Servers
from waiting import wait_for
from warm import PRELOADED

from wds_pipes.io.remote.budget import budget
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

# A worker that is not forked imports the test's module, and what that imports.
IMPORTED_BY_TESTS = ("hypothesis", "psutil", "pytest", "torch.distributed.checkpoint", "torchdata.nodes")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--start-method", help="how workers start where a test does not say it: fork, spawn or forkserver")


def pytest_configure(config: pytest.Config) -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell lets its background processes ignore it
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Else torch's threads wait for work in a loop, which takes up to a tenth of the processors.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    multiprocessing.set_forkserver_preload([*PRELOADED, *IMPORTED_BY_TESTS])
    if method := config.getoption("--start-method"):
        multiprocessing.set_start_method(method, force=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, then those with the most tests, so that no long file is
    left to one worker at the end.
    """
    count = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, -count[item.path], str(item.path)))


def pytest_collection_finish() -> None:
    """Tests that collect garbage, and Python itself, need not look through all modules and tests
    each time: that takes half a second.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Modules are freed at the end: else those of DuckDB print pages of what they have leaked."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Shards of other projects; a checkout without them skips."""
    path = Path(os.environ.get("WDS_PIPES_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not path.is_dir():
        pytest.skip("needs the shards of other projects: set WDS_PIPES_TEST_DATA to a directory with them")
    return path


@pytest.fixture(scope="session")
def urls(tmp_path_factory) -> list[str]:
    """Five small shards, one of them empty: 14 samples of txt, cls and json."""
    return make_shards(
        tmp_path_factory.mktemp("shards"), shards=5, samples=[3, 0, 5, 2, 4], fields=("txt", "cls", "json")
    )


@pytest.fixture(scope="session")
def fifty(tmp_path_factory) -> list[str]:
    """Eight shards, one of them empty: 50 samples."""
    return make_shards(tmp_path_factory.mktemp("fifty"), shards=len(FIFTY), samples=FIFTY)


@pytest.fixture(scope="session")
def indexed(tmp_path_factory) -> list[str]:
    """The same with txt, cls and json, and with indexes of offsets."""
    urls = make_shards(
        tmp_path_factory.mktemp("indexed"), shards=len(FIFTY), samples=FIFTY, fields=("txt", "cls", "json")
    )
    index_shards(urls, offsets=True)
    return urls


@pytest.fixture(scope="session")
def stream(indexed) -> list[dict[str, Any]]:
    """The samples of these, in order."""
    return list(samples(indexed, shuffle=False))


@pytest.fixture
def impatient(monkeypatch):
    """DataLoader waits a tenth of a second, not five, for results before it looks whether its
    workers live, and for workers to exit.
    """
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))


class CountedFileSystem(LocalFileSystem):
    """Local files by ``counted://`` URLs; notes the offset and size of each read."""

    protocol = "counted"
    reads: ClassVar[list[tuple[int, int]]] = []
    cachable = False
    busy = 0

    @classmethod
    def _strip_protocol(cls, path):  # older versions of fsspec strip only file:// from local files
        return super()._strip_protocol(str(path).removeprefix("counted://"))

    def cat_file(self, path, start=None, end=None, **options):
        CountedFileSystem.busy += 1
        try:
            data = super().cat_file(path, start, end, **options)
            self.reads.append((start, len(data)))
            return data
        finally:
            CountedFileSystem.busy -= 1


class Reads(list):
    """The reads (offset, bytes) from files with ``counted://`` URLs."""

    def clear(self):
        """Forget them, after the reads that a dropped pipe has requested."""
        wait_for(lambda: not tasks() and not CountedFileSystem.busy)
        super().clear()


@pytest.fixture
def counted():
    """A list of the reads (offset, bytes) from files with ``counted://`` URLs; ``clear()`` waits
    for those that are under way.
    """
    fsspec.register_implementation("counted", CountedFileSystem, clobber=True)
    CountedFileSystem.reads = Reads()
    return CountedFileSystem.reads


@pytest.fixture(scope="session")
def servers():
    """Stores that start when they are first used: see ``servers.Servers``.

    For fixtures that put data once for many tests.
    """
    with Servers() as started:
        yield started


@pytest.fixture
def s3(servers):
    """An S3 store behind its fault proxy: Ceph, or moto where that is not installed (see
    ``s3.real``).
    """
    yield from fresh(servers, "s3")


@pytest.fixture
def gcs(servers):
    """A store of a GCS emulator behind its fault proxy."""
    yield from fresh(servers, "gcs")


@pytest.fixture
def web(servers):
    """A web server of files behind its fault proxy: nginx, or aiohttp's where that is not
    installed.
    """
    yield from fresh(servers, "web")


@pytest.fixture(params=["s3", "gcs", "web"])
def remote(servers, request):
    """Each of these stores in turn."""
    yield from fresh(servers, request.param)


def fresh(servers, name):
    """A store whose proxy knows no rules and no requests, before the test and after it. Queues that
    tests before it have left to the garbage collector are freed: they would share the connections.
    """
    if budget().queues:
        gc.collect()
    try:
        store = getattr(servers, name)
    except Missing as error:
        pytest.skip(str(error))
    store.faults.clear()
    yield store
    store.faults.clear()
