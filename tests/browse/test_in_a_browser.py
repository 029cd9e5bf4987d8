"""``wds-pipes browse`` in Chromium: what a person sees and types, and what the page may do."""

import asyncio
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from commands import run_command
from pictures import saved, smooth
from tars import put, tar

from wds_pipes.browse.data import DataSet
from wds_pipes.browse.histograms import add_histograms
from wds_pipes.browse.pages import Pages
from wds_pipes.codecs.table import ROWS
from wds_pipes.testing import make_shards

playwright = pytest.importorskip("playwright.sync_api", reason="needs the playwright package")
pytest.importorskip("aiohttp", reason="the pages are served by aiohttp")
pytest.importorskip("jinja2", reason="the pages are templates of jinja2")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
]


WIDE, PHONE = ("light", 1280), ("dark", 390)


def on(*screens):
    return pytest.mark.parametrize("page", screens, indirect=True, ids=lambda screen: screen[0])


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Pictures and texts; one sample with hostile fields, audio and arrays; and a broken shard."""
    folder = tmp_path_factory.mktemp("shown")
    pictures = make_shards(
        folder,
        shards=1,
        samples=30,
        fields={
            "jpg": lambda rng, number: saved(smooth(90, 120, number)),
            "txt": lambda rng, number: f"picture {number}",
            "cls": lambda rng, number: number % 4,
        },
    )
    script = b"<script>document.title = 'run'</script><img src=x onerror=\"document.title = 'run'\">"
    wave = (np.sin(np.arange(8000) / 8).astype(np.float32)[None], 8000)
    mixed = [
        (f"{script.decode().replace('/', '%')}.txt", script),
        ("b.json", b'{"a": "<script>alert(1)</script>", "b": [1, 2]}'),
        ("b.svg", b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>"),
        ("b.html", script),
        ("b.txt", b"A long line. " * 300),
        ("b.pkl", b"\x80\x04N."),
        ("b.wav", ROWS["wav"].encode(wave)),
        ("b.npy", ROWS["npy"].encode(np.arange(600, dtype=np.float32).reshape(20, 30))),
        ("b.emb.npy", ROWS["npy"].encode(np.arange(30, dtype=np.float32))),
        *((f"c.f{number:04d}", b"1") for number in range(200)),
    ]
    broken = put(folder / "broken.tar", Path(pictures[0]).read_bytes()[:30_000])
    put(folder / "classes.json", b'["cat", "dog", "bird", "cow"]')
    return [*pictures, put(folder / "mixed.tar", tar(mixed, format=0)), broken]


@pytest.fixture(scope="module")
def pages(shards):
    found = Pages(DataSet(shards))
    add_histograms(found)
    return found


@pytest.fixture(scope="module")
def served(pages):
    """The URL of the pages, up to the token."""
    from wds_pipes.browse.server import Server, serve

    urls, ready, loop = [], threading.Event(), asyncio.new_event_loop()

    def on_ready(url):
        urls.append(url)
        ready.set()

    task = loop.create_task(serve(Server(pages), 0, on_ready))

    def run():
        with pytest.raises(asyncio.CancelledError):
            loop.run_until_complete(task)

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(60)
    yield urls[0]
    loop.call_soon_threadsafe(task.cancel)
    thread.join()
    loop.close()


@pytest.fixture
def page(browser, request):
    """A page that must not report anything, nor request anything from another host: wide and light,
    or, as requested, that of a phone and dark.
    """
    scheme, width = getattr(request, "param", WIDE)
    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 800}, base_url="http://x/")
    opened, reports, requested = context.new_page(), [], []
    opened.on("console", lambda message: reports.append(message.text))
    opened.on("pageerror", lambda error: reports.append(str(error)))
    opened.on("dialog", lambda dialog: (reports.append("a dialog"), dialog.dismiss()))
    opened.on("request", lambda sent: requested.append(sent.url))
    yield opened
    width_of_page = opened.evaluate("document.documentElement.scrollWidth")
    context.close()
    assert not reports
    assert all(url.startswith(("http://127.0.0.1:", "data:", "file:///")) for url in requested), requested
    assert width_of_page <= width, "the page scrolls sideways"


@on(WIDE, PHONE)
def test_grid_keys_and_samples(page, served):
    page.goto(served)
    assert page.get_by_role("heading", level=1).inner_text() == "3 shards"
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/shard-0-1.html")
    assert page.locator("li.card").count() == 24
    assert page.locator("li.card img").first.evaluate("image => image.complete && image.naturalWidth") == 120
    page.keyboard.press("n")
    page.wait_for_url("**/shard-0-2.html")
    assert page.locator("li.card").count() == 6
    page.keyboard.press("p")
    page.wait_for_url("**/shard-0-1.html")
    for key in "jjjk":
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    page.wait_for_url("**/sample-0-1.html")
    assert page.get_by_role("heading", level=1).inner_text() == "00000001"
    page.keyboard.press("j")
    page.wait_for_url("**/sample-0-2.html")
    page.keyboard.press("k")
    page.wait_for_url("**/sample-0-1.html")
    page.get_by_text("Header and first bytes of jpg").click()
    assert "ff d8 ff e0" in page.locator("details[open] pre").inner_text()
    page.keyboard.press("u")
    page.wait_for_url("**/shard-0-1.html")
    page.keyboard.press("/")
    page.keyboard.type("00000007")
    page.keyboard.press("Enter")
    page.wait_for_url("**/sample-0-7.html")


def test_what_is_hostile_is_text_and_audio_plays(page, served):
    page.goto(f"{served}shard-1-1.html")
    assert page.locator("li.card").count() == 3
    assert page.title() != "run"
    assert page.get_by_text("onload='alert(1)'").first.is_visible()
    page.goto(f"{served}sample-1-1.html")
    assert page.get_by_text("unpickling runs code").is_visible()
    played = "async audio => { audio.muted = true; await audio.play(); return audio.duration; }"
    assert page.locator("audio").evaluate(played) == pytest.approx(1)
    assert page.locator("img").count() == 2
    assert page.title() == "b"


@on(WIDE, PHONE)
def test_a_sample_has_its_pictures_first_the_name_of_its_class_and_long_text_folded(page, shards, served):
    page.goto(f"{served}sample-0-2.html")
    assert page.locator(".fields > div").nth(0).get_by_role("heading").all_inner_texts() == ["jpg"]
    assert page.locator(".fields > div").nth(1).get_by_role("heading").all_inner_texts() == ["cls", "txt"]
    assert page.get_by_text("2 (bird)").is_visible()
    page.goto(f"{served}sample-1-1.html")
    text = page.get_by_text("A long line. A long line.").last
    assert not text.is_visible()
    page.get_by_text("All 3,900 characters").click()
    assert text.is_visible()


@on(PHONE)
def test_histograms(page, served):
    page.goto(served)
    page.get_by_role("link", name="Histograms").click()
    page.wait_for_url("**/histograms.html")
    assert page.get_by_role("meter", name="120").count() == 1
    assert page.get_by_role("meter", name="2 (bird)").count() == 1


@pytest.mark.parametrize(
    ("page", "name"),
    [
        *((WIDE, name) for name in ("shards-1", "sample-1-1", "shard-2-1")),
        *((PHONE, name) for name in ("shard-0-1", "shard-1-1", "histograms")),
    ],
    indirect=["page"],
    ids=str,
)
def test_axe_finds_no_fault(page, served, name):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs the axe-playwright-python package")
    page.goto(f"{served}{name}.html")
    found = axe.Axe().run(page).response["violations"]
    assert not [(each["id"], each["nodes"][0]["html"]) for each in found]


def test_exported_pages_are_looked_at_without_a_server(page, shards, tmp_path):
    run_command("browse", *shards, "--export", tmp_path / "out")
    page.goto((tmp_path / "out" / "index.html").as_uri())
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_url("**/shard-0-1.html")
    page.keyboard.press("n")
    page.wait_for_url("**/shard-0-2.html")
    assert page.locator("li.card img").first.evaluate("image => image.naturalWidth") == 120
    assert page.locator("li.card").first.evaluate("card => getComputedStyle(card).borderStyle") == "solid"
