"""``wds-pipes browse``: the pages over HTTP."""

import asyncio
import contextlib
import gzip
import io
import os
import re
import socket
import struct
import sys
import threading
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from commands import refused, run_command
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Quiet, serving
from tars import put, tar

from wds_pipes.browse.data import Budget, DataSet, Unpacked, Window
from wds_pipes.browse.fields import Fields
from wds_pipes.browse.pages import Pages
from wds_pipes.codecs.table import ROWS
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

pytest.importorskip("jinja2", reason="the pages are templates of jinja2")
test_utils = pytest.importorskip("aiohttp.test_utils", reason="the pages are served by aiohttp")

TOKEN = "test-token"


@contextlib.asynccontextmanager
async def client_of(*urls, **options):
    from wds_pipes.browse.server import Server

    server = Server(Pages(DataSet([str(url) for url in urls], **options)), TOKEN)
    async with test_utils.TestClient(test_utils.TestServer(server.app)) as client:
        yield client


def fetch(urls, *requests, **options):
    """Send requests, each a path or a dict for ``client.request``; return status, headers and body
    of each response.
    """

    async def send():
        found = []
        async with client_of(*urls, **options) as client:
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
def texts(tmp_path_factory):
    """The same, of texts alone, which takes less time."""
    return make_shards(tmp_path_factory.mktemp("texts"), shards=3, samples=[30, 5, 0], fields=("txt",))


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


def test_pages_without_an_index_are_those_with_one(tmp_path):
    """Also of a compressed shard, and whichever page is looked at first."""
    url = make_shards(tmp_path, shards=1, samples=60, fields=("txt", "jpg"))[0]
    Path(tmp_path / "packed.tar.gz").write_bytes(gzip.compress(Path(url).read_bytes()))
    pages = [f"shard-0-{page}.html" for page in (3, 1, 2, 4)]
    plain, packed = (fetch([each], *pages) for each in (url, tmp_path / "packed.tar.gz"))
    index_shards([url], offsets=True)
    indexed = fetch([url], *pages)
    for without, compressed, index in zip(plain, packed, indexed, strict=True):
        shown = [re.findall(r"<li class=.*</li>", text, re.DOTALL) for *_, text in (without, compressed, index)]
        assert shown[0] == shown[1] == shown[2]
    assert [text.count("<li class") for *_, text in indexed] == [12, 24, 24, 0]


def test_only_with_the_token_and_the_name_of_this_machine(shards):
    page = f"/{TOKEN}/shards-1.html"
    tries = [
        ({"path": page, "headers": {"Host": host}}, status)
        for host, status in [
            ("localhost:8000", 200),
            ("[::1]:8000", 200),
            ("attacker.example", 403),
            ("127.0.0.1.attacker.example", 403),
            ("", 403),
        ]
    ]
    tries += [
        ({"path": path}, 403)
        for path in ("/", "/shards-1.html", "/other/shards-1.html", f"/{TOKEN}x/shards-1.html", f"/{TOKEN[:-1]}/go")
    ]
    tries += [
        ({"path": f"/{TOKEN}/{name}"}, 404)
        for name in ("..%2f..%2fetc%2fpasswd", "base.html", "server.py", "shard-9-1.html", "sample-0-99.html", "x/y")
    ]
    tries += [({"path": page, "method": method}, 405) for method in ("POST", "PUT", "DELETE")]
    tries += [({"path": f"/{TOKEN}/browse.css"}, 200), ({"path": page, "method": "HEAD"}, 200)]
    for (asked, status), (found, headers, text) in zip(
        tries, fetch(shards, *(dict(asked) for asked, _ in tries)), strict=True
    ):
        assert found == status, asked
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; ")
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert headers["Referrer-Policy"] == "no-referrer"
        assert "Set-Cookie" not in headers
        assert status != 403 or "shard" not in text


BOMB = b"\x89PNG\r\n\x1a\n" + b"".join(
    struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    for kind, data in [
        (b"IHDR", struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(bytes(9999))),
        (b"IEND", b""),
    ]
)
SCRIPT = "<script>alert(1)</script>"
HOSTILE = [
    (f"{SCRIPT}.txt", f"{SCRIPT}<img src=x onerror=alert(1)>{{{{7*7}}}}\x1b[31m".encode()),
    (f"{SCRIPT}.json", b'{"a": "</pre><script>alert(2)</script>", "b": "\\ud800"}'),
    (f"{SCRIPT}.svg", b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(3)</script></svg>"),
    (f'{SCRIPT}." onload="alert(4)', b"\xff"),
    ("../../evil.png", BOMB),
    ("../../evil.pkl", b"cos\nsystem\n(S'true'\ntR."),
    ("../../evil.html", b"<base href='http://attacker.example/'>"),
    ("b\udcff.txt", b"\xff\xfe"),
]


class Tags(HTMLParser):
    """The names of tags and attributes in a page."""

    def __init__(self):
        super().__init__()
        self.names, self.attributes = set(), set()

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.attributes.update(name for name, _ in attrs)


@pytest.mark.parametrize("many", [200, pytest.param(10_000, marks=pytest.mark.slow)])
def test_hostile_samples_are_shown_as_text(tmp_path, many):
    fields = [(f"many.f{number:05d}", b"1") for number in range(many)]
    url = put(tmp_path / "hostile.tar", tar([*HOSTILE, *fields], format=0))
    pages = fetch(
        [url],
        "shard-0-1.html",
        *(f"sample-0-{number}.html" for number in range(4)),
        f"sample-0-3.html?fields={many - 10}",
        "go?sample=%3Cscript%3Ealert(5)%3C/script%3Ex",
    )
    for status, headers, text in pages:
        assert status in (200, 404)
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        assert text.count("<script") == 1, "only our own"
        tags = Tags()
        tags.feed(text)
        assert not tags.names & {"svg", "base", "object", "iframe", "style", "x"}
        assert not [name for name in tags.attributes if name.startswith("on") or name == "style"]
        assert len(text) < 400_000
    grid, script, evil, odd, first, last, *_ = (text for *_, text in pages)
    for text in (grid, script):
        assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text
        assert "{{7*7}}\\x1b[31m" in text
        assert "&lt;svg xmlns=" in text
    for text in (grid, evil):
        assert "60000 x 60000 pixels" in text
        assert "not decoded: unpickling runs code from the data" in text
    assert "b\\udcff" in odd
    assert f"and {many - 8:,} more fields" in grid
    assert ("More fields" in first, f"f{many - 1:05d}" in first, f"f{many - 1:05d}" in last) == (True, False, True)


def test_fields_come_as_downloads_and_media_in_ranges(tmp_path):
    wave = ROWS["wav"].encode((np.zeros((1, 4000), np.float32), 8000))
    url = put(tmp_path / "a.tar", tar([("a.wav", wave), ("a.html", b"<p>"), ("a.empty", b"")]))
    part = {"path": f"/{TOKEN}/media-0-0-0", "headers": {"Range": "bytes=100-199"}}
    end = {"path": f"/{TOKEN}/media-0-0-0", "headers": {"Range": "bytes=-7"}}
    past = {"path": f"/{TOKEN}/media-0-0-0", "headers": {"Range": "bytes=99999999-"}}
    wanted = ["media-0-0-0", "raw-0-0-1", "raw-0-0-2", "media-0-0-1", "raw-0-0-3", "raw-0-1-0", part, end, past]
    whole, raw, empty, text, *missing, first, last, beyond = fetch([url], *wanted)
    assert (whole[0], whole[1]["Content-Type"], whole[1]["Content-Length"]) == (200, "audio/wav", str(len(wave)))
    for _, headers, _ in (raw, empty):
        assert headers["Content-Type"] == "application/octet-stream"
        assert headers["Content-Disposition"].startswith("attachment")
    assert (raw[2], empty[2]) == ("<p>", "")
    assert [status for status, *_ in (text, *missing)] == [404, 404, 404]
    assert (first[0], first[1]["Content-Range"]) == (206, f"bytes 100-199/{len(wave)}")
    assert first[2] == wave[100:200].decode("utf-8", "replace")
    assert last[1]["Content-Range"] == f"bytes {len(wave) - 7}-{len(wave) - 1}/{len(wave)}"
    assert beyond[0] == 416


def test_a_broken_shard_shows_the_error_after_the_samples_before_it(tmp_path):
    url, other = make_shards(tmp_path, shards=2, samples=10, fields=("txt", "cls"))
    index_shards([url, other], offsets=True)
    Path(url).write_bytes(Path(url).read_bytes()[:6700])
    Path(other).unlink()
    reserved = put(tmp_path / "reserved.tar", tar([("a.txt", b"a"), ("b.__key__", b"b"), ("c.txt", b"c")]))
    wanted = ["shard-0-1.html", "sample-0-9.html", "shard-1-1.html", "shards-1.html"]
    grid, sample, gone, first = fetch([url, other], *wanted)
    ((status, _, named),) = fetch([reserved], "shard-0-1.html")
    assert (status, "__key__" in named, "sample-0-0.html" in named) == (200, True, True)
    assert "00000001" in grid[2]
    assert re.search(r'role="alert">[^<]*shard-000000.tar[^<]*', grid[2])
    assert grid[2].index("00000001") < grid[2].index('role="alert"')
    assert 'role="alert"' in sample[2]
    assert "does not exist" in gone[2]
    assert "2 shards" in first[2]


def test_go_to_a_key_or_a_number(shards, with_index):
    def where(urls, wanted):
        ((status, headers, text),) = fetch(urls, {"path": f"/{TOKEN}/go?{wanted}", "allow_redirects": False})
        return headers["Location"].removeprefix(f"/{TOKEN}/") if status == 302 else f"{status} {text}"

    for urls in (shards, with_index):
        assert where(urls, "sample=00000031&shard=1") == "sample-1-1.html"
        assert "No sample" in where(urls, "sample=00000099&shard=1")
        assert where(urls, "sample=2&shard=1") == ("sample-0-2.html" if urls is with_index else "sample-1-2.html")
    assert where(with_index, "sample=31") == "sample-1-1.html"
    assert where(with_index, "sample=00000031") == "sample-1-1.html"
    assert "there are 35" in where(with_index, "sample=35")
    assert "There is no index of keys" in where(shards, "sample=00000031")
    assert "look at the shard first" in where(shards, "sample=3")


def test_remote_shards_are_read_where_they_are_looked_at(tmp_path, counted):
    """Without an index, from the beginning of the shard on; with one, what the page shows."""
    noise = {"bin": lambda rng, number: rng.randbytes(100_000), "txt": lambda rng, number: f"text {number}"}
    paths = make_shards(tmp_path, shards=2, samples=60, fields=noise)
    urls = [f"counted://{path}" for path in paths]
    for total in (None, 120):
        counted.clear()
        data = DataSet(urls)
        with data.look(1, 24) as view:
            assert [sample.key for sample in view.found] == [f"{number:08d}" for number in range(84, 108)]
            assert view.read(view.found[3].members[1]) == b"text 87"
        assert (bool(data.note), data.total, data.count(0)) == (total is None, total, total and 60)
        index_shards(paths, offsets=True)
    large = [size for _, size in counted if size > 10_000]
    assert sum(large) < 26 * 105_000, "the samples of the page at once, and the headers after them"


def test_a_number_that_is_far_too_large_is_refused_at_once(shards, with_index):
    for urls in (shards, with_index):
        sample, grid = fetch(urls, "sample-0-999999999999999.html", "shard-0-999999999999999.html")
        assert sample[0] == 404
        assert "There are no samples here." in grid[2]


def test_exported_pages_link_each_other(tmp_path, texts):
    cut = put(tmp_path / "cut.tar", Path(texts[0]).read_bytes()[:3000])
    result = run_command("browse", *texts, cut, "--export", tmp_path / "out", "--samples", 40)
    assert "36 samples, 43 pages, the first of which is index.html" in result.stdout
    files = {path.name: path.read_text() for path in (tmp_path / "out").glob("*.html")}
    for name, text in files.items():
        links = set(re.findall(r'(?:href|src)="([^"]*)"', text)) - {"data:,"}
        links = {link for link in links if not link.startswith("data:image/")}
        assert all((tmp_path / "out" / link).is_file() for link in links), name
        assert "default-src 'none'" in text
        assert "<form" not in text
    assert {"index.html", "shards-1.html", "shard-0-2.html", "sample-1-4.html", "shard-3-1.html"} <= files.keys()
    assert 'role="alert"' in files["shard-3-1.html"]
    assert "has files: name another one" in refused("browse", *texts, "--export", tmp_path / "out")
    run_command("browse", cut, tmp_path / "none.tar", "--export", tmp_path / "half")
    assert "does not exist" in (tmp_path / "half" / "shard-1-1.html").read_text()
    assert "none.tar does not exist" in refused("browse", tmp_path / "none.tar", "--export", tmp_path / "other")
    assert "can be read only once" in refused("browse", "-", "--export", tmp_path / "other")


def test_a_limited_export_links_nothing_that_it_lacks(tmp_path, texts):
    run_command("browse", *texts, "--export", tmp_path / "out", "--samples", 10)
    assert not (tmp_path / "out" / "shard-0-2.html").exists()
    assert 'href="shard-0-2.html"' not in (tmp_path / "out" / "shard-0-1.html").read_text()
    assert 'href="shard-1-1.html"' not in (tmp_path / "out" / "index.html").read_text()


DATA = np.random.default_rng(0).bytes(300_000)


@given(
    st.lists(st.tuples(st.integers(0, 310_000), st.integers(0, 70_000)), max_size=6), st.booleans(), st.integers(0, 9)
)
@settings(max_examples=30, deadline=None)
def test_a_window_reads_what_a_file_has(reads, packed, expected):
    if packed:
        window = Window(Unpacked(lambda: io.BytesIO(PACKED), "gz").read)
    else:
        window = Window(lambda at, size: (DATA[at : at + size], at), (expected * 1000, expected * 20_000))
    for at, size in reads:
        window.seek(at)
        assert io.BufferedReader(window, 512).read(size) == DATA[at : at + size]


PACKED = gzip.compress(DATA, 1)


@pytest.mark.parametrize("index", [False, True])
def test_a_shard_that_changes_is_shown_as_it_is(tmp_path, index):
    """Also if it is compressed, and what was remembered of it was of another content."""
    url = tmp_path / "a.tar"
    before, after = (tar([(f"{name}{number:02d}.txt", b"x" * size) for number in range(60)]) for name, size in CHANGES)
    url.write_bytes(before)
    if index:
        index_shards([str(url)], offsets=True)
    pages = Pages(DataSet([str(url)]))
    pages.page("shard-0-3.html")
    if not index:
        assert pages.data.find("a50", 0) == (0, 50)
    url.write_bytes(after)
    for content in (after, gzip.compress(after)):
        url.write_bytes(content)
        text = pages.page("shard-0-3.html")
        assert "b48" in text
        assert "b47" not in text
        assert ("has changed: start wds-pipes browse again" in text) == index
        assert "has no valid header" not in text
        assert "<h1>b50</h1>" in pages.page("sample-0-50.html")
        assert index or pages.data.find("b50", 0) == (0, 50)


CHANGES = [("a", 1), ("b", 900)]


def test_samples_before_the_cut_of_a_compressed_shard_are_shown(tmp_path):
    noise = np.random.default_rng(0).bytes(90_000)
    members = [(f"{number:02d}.bin", noise[number * 3000 : number * 3000 + 3000]) for number in range(30)]
    packed = gzip.compress(tar(members), 1)
    url = put(tmp_path / "a.tar.gz", packed[: len(packed) // 2])
    with DataSet([str(url)]).look(0, 0) as view:
        assert len(view.found) in (13, 14)
        assert "cut short" in view.problem
        assert all(len(view.read(sample.members[0])) == 3000 for sample in view.found)


def test_a_download_ends_where_its_shard_has_become_shorter(tmp_path, caplog):
    from aiohttp import ClientError

    url = put(tmp_path / "a.tar", tar([("a.bin", bytes(20_000_000))]))

    async def load():
        async with client_of(url) as client:
            for ends in (False, True):
                response = await client.get(f"/{TOKEN}/raw-0-0-0")
                await response.content.readexactly(1000)
                if ends:
                    os.truncate(url, 5000)
                    with pytest.raises(ClientError):
                        await asyncio.wait_for(response.read(), 20)
                response.close()

    asyncio.run(load())
    assert "Traceback" not in caplog.text, "also of a browser that closes a connection"


def test_threads_look_at_shards_at_once(tmp_path):
    url = str(put(tmp_path / "a.tar", tar([(f"{number:04d}.txt", b"") for number in range(700)])))
    data, interval = DataSet([url] * 8), sys.getswitchinterval()

    def look(turn):
        for number in range(0, 700, 24):
            with data.look(turn, number, 0):
                pass

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(look, range(8)))
    finally:
        sys.setswitchinterval(interval)


def test_a_small_hostile_sample_makes_no_large_page(tmp_path):
    """Nested JSON takes a thousand times its size with an indent; names may have a million
    characters.
    """
    nested = b"[" * 800 + b"1," * 3_000 + b"1" + b"]" * 800
    key = "k" * 100_000
    url = put(tmp_path / "a.tar", tar([("a.json", nested), (f"{key}.{key}", b"x")], format=2))
    pages = Pages(DataSet([str(url)]))
    tracemalloc.start()
    texts = [pages.page(name) for name in ("sample-0-0.html", "sample-0-1.html", "shard-0-1.html", "shards-1.html")]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert max(map(len, texts)) < 50_000
    assert peak < 4_000_000


class Stalled(Quiet):
    """Never answers."""

    def do_GET(self):
        self.released.wait()

    do_HEAD = do_GET


@pytest.fixture
def stalled():
    """A shard of a store that does not answer."""
    released = threading.Event()
    with serving(Stalled, released=released) as address:
        yield f"{address}/a.tar"
        released.set()


def test_a_stalled_shard_stops_no_other_page(texts, stalled, monkeypatch):
    """Nor as many pages of it as are made at once, whose tabs are closed."""
    monkeypatch.setattr("wds_pipes.browse.server._PAGES", 2)

    async def look():
        async with client_of(texts[0], stalled, key_split="last-dot") as client:
            tabs = [asyncio.ensure_future(client.get(f"/{TOKEN}/shard-1-1.html")) for _ in range(2)]
            assert not (await asyncio.wait(tabs, timeout=0.2))[0]
            for tab in tabs:
                tab.cancel()
            async with client.get(f"/{TOKEN}/shard-0-1.html") as page:
                assert "00000023" in await page.text()
            async with client.get(f"/{TOKEN}/shards-1.html") as page:
                assert '<td class="number">?</td>' in await page.text()

    asyncio.run(look())


def test_a_page_has_a_deadline(stalled, monkeypatch):
    monkeypatch.setattr("wds_pipes.browse.server.SECONDS", 0.1)
    monkeypatch.setattr("wds_pipes.browse.server._GRACE", 0.1)

    async def look():
        async with client_of(stalled, key_split="last-dot") as client, client.get(f"/{TOKEN}/shard-0-1.html") as page:
            return page.status, await page.text()

    status, text = asyncio.run(look())
    assert (status, "It has not come in" in text) == (504, True)


def test_fields_that_unpack_to_more_than_a_page_may_take_are_not_shown(tmp_path):
    def archive(size):
        file = io.BytesIO()
        np.savez_compressed(file, a=np.zeros(size, np.uint8))
        return file.getvalue()

    path = put(
        tmp_path / "a.tar", tar((f"{number}.npz", archive(size)) for number, size in enumerate([3000, 500, 700]))
    )
    page = Pages(DataSet(path)).page("shard-0-1.html", budget=Budget(unpacked=1400))
    assert [page.count(text) for text in ("too much to be shown", "(500,)", "(700,)")] == [2, 1, 0]


def test_a_page_without_time_left_shows_no_fields(texts):
    budget = Budget()
    data = DataSet(texts)
    with data.look(0, 0) as view:
        budget.end()
        assert "It took too long" in Fields(view, budget=budget).of(view.found[0], range(1))[0].problem
    assert "It took too long to read" in Pages(data).page("shard-0-1.html", budget=budget)


def test_a_shard_that_does_not_exist_is_not_found(texts, tmp_path):
    [(status, _, text)] = fetch([texts[0], tmp_path / "no.tar"], "shard-1-1.html")
    assert (status, "does not exist" in text) == (404, True)


def test_a_port_that_is_in_use(shards):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port} cannot be used (Address already in use)" in refused("browse", *shards, "--port", port)
