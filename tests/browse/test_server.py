"""``wds-pipes browse``: the pages over HTTP."""

import asyncio

import pytest

from wds_pipes.browse.data import DataSet
from wds_pipes.browse.pages import Pages
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

pytest.importorskip("jinja2", reason="the pages are templates of jinja2")
test_utils = pytest.importorskip("aiohttp.test_utils", reason="the pages are served by aiohttp")

TOKEN = "test-token"


def fetch(urls, *requests, **options):
    """Send requests, each a path or a dict for ``client.request``; return status, headers and body
    of each response.
    """
    from wds_pipes.browse.server import Server

    async def send():
        server = Server(Pages(DataSet([str(url) for url in urls], **options)), TOKEN)
        async with test_utils.TestClient(test_utils.TestServer(server.app)) as client:
            found = []
            for wanted in requests:
                asked = wanted if isinstance(wanted, dict) else {"path": f"/{TOKEN}/{wanted}"}
                async with client.request(asked.pop("method", "GET"), asked.pop("path"), **asked) as response:
                    found.append(
                        (response.status, response.headers, (await response.read()).decode("utf-8", "replace"))
                    )
            return found

    return asyncio.run(send())


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Three shards, of 30, 5 and 0 samples."""
    folder = tmp_path_factory.mktemp("browsed")
    return make_shards(folder, shards=3, samples=[30, 5, 0], fields=("txt", "cls", "json", "jpg", "npy"))


@pytest.fixture(scope="module")
def with_index(tmp_path_factory):
    folder = tmp_path_factory.mktemp("indexed")
    urls = make_shards(folder, shards=3, samples=[30, 5, 0], fields=("txt", "cls", "json", "jpg", "npy"))
    index_shards(urls, offsets=True)
    return urls


def test_shards_grid_and_sample(shards, with_index):
    for urls in (shards, with_index):
        pages = fetch(urls, "shards-1.html", "shard-0-1.html", "shard-0-2.html", "shard-2-1.html", "sample-1-4.html")
        assert [status for status, *_ in pages] == [200] * 5
        first, grid, second, empty, sample = (text for *_, text in pages)
        assert all(url in first for url in urls)
        assert ("3 shards, 35 samples" in first) == (urls is with_index)
        assert [f"{number:08d}" in grid for number in (0, 23, 24)] == [True, True, False]
        assert 'href="shard-0-2.html"' in grid
        assert [f"{number:08d}" in second for number in (23, 24, 29)] == [False, True, True]
        assert "There are no samples here." in empty
        assert "<h1>00000034</h1>" in sample
        assert 'href="sample-1-5.html"' not in sample
