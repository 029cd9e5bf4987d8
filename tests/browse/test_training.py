"""The pages of the training order, states, histograms and findings."""

import contextlib
import http.client
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commands import refused, run_command
from pipelines import even, samples
from tars import put, tar

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

pytest.importorskip("jinja2", reason="the pages are templates of jinja2")

from wds_pipes.browse.data import DataSet
from wds_pipes.browse.histograms import add_histograms
from wds_pipes.browse.pages import Pages
from wds_pipes.browse.training import training_of

MADE = []


def loader():
    return MADE[0]()


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    found = make_shards(folder, shards=3, samples=[20, 10, 12], fields=("txt", "cls"))
    index_shards(found, f"{folder}/index.json", offsets=True)
    return found


def pages(urls, make=None, states=()):
    """The pages of a training that a function returns; None: of what the first state says."""
    MADE[:] = [make]
    named, world_size = (None, None) if make is None else (f"{__name__}:loader", 2)
    states = list(map(str, states))
    data, add = training_of(
        urls, named=named, world_size=world_size, states=states, storage_options=None, key_split="first-dot"
    )
    add(found := Pages(data))
    return found


def counted(urls):
    return lambda: wp.PipeLoader(samples(urls, index=True).shuffle_buffer(5), batch_size=10, collate="list")


def filtered(urls):
    pipe = samples(urls).filter_samples(even).shuffle_buffer(5)
    return lambda: wp.PipeLoader(pipe, batch_size=5, epoch_end="exact", collate="list")


def shown(text):
    """The keys of the samples that a page shows, and the places of all in its tables."""
    cards = re.findall(r'<h2><a href="sample-(\d+)-(\d+)\.html" class="item">(\d+)</a>', text)
    return cards, re.findall(r'<a href="sample-(\d+)-(\d+)\.html">\d+</a>', text)


@pytest.mark.parametrize("make", [counted, filtered])
def test_the_page_of_a_rank_shows_its_batches(urls, make, monkeypatch):
    whole = pages(urls, make(urls))
    for rank in range(2):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        batches = [[sample["__key__"] for sample in batch] for batch in make(urls)()]
        for step in (rank,):
            text = whole.page("order.html", {"rank": str(rank), "step": str(step)})
            cards, rows = shown(text)
            assert [key for *_, key in cards] == [key for batch in batches[step : step + 4] for key in batch[:8]]
            assert f"Epoch 0, rank {rank} of 2: the batches from step {step} on" in text
            assert f"lane {rank} of 2: not begun" in text
            for number, batch in enumerate(batches[step : step + 4], step):
                assert f"Step {number}: {len(batch)} sample" in text
            numbers = [0, 20, 30]  # of the first sample of each shard
            placed = [numbers[int(shard)] + int(number) for shard, number in rows]
            expected = [int(key) for batch in batches[step : step + 4] for key in batch]
            assert placed == expected if make is counted else set(placed) <= set(expected)
            assert re.search(r"shard-00000\d\.tar, byte [\d,]+<", text)


def test_what_cannot_be_shown_is_said(urls):
    whole = pages(urls, counted(urls))
    assert "no batch comes here" in whole.page("order.html", {"step": "1000"}).lower()
    assert "rank must be at least 0 and below world_size, not 7 of 2" in whole.page("order.html", {"rank": "7"}).lower()
    MADE[:] = [lambda: 1 / 0]
    assert "The pipeline raised ZeroDivisionError: division by zero" in whole.page("order.html", {"rank": "1"})


def test_two_states_are_side_by_side(urls, tmp_path):
    one, files = counted(urls)(), [tmp_path / "before.json", tmp_path / "after.json"]
    for file, _ in zip(files, one, strict=False):
        file.write_text(json.dumps(one.state_dict()))
    text = pages(urls, states=files).page("states.html")
    assert all(str(file) in text for file in files)
    assert "after 1 batch," in text
    assert "after 2 batches," in text
    assert re.search(r"<code>step</code></td><td>1</td><td>2</td>", text)
    same = pages(urls, states=[files[0], files[0]]).page("states.html")
    assert "Nothing: they are the same." in same
    files[1].write_text("{")
    assert "is not JSON, or it is damaged" in pages(urls, states=files).page("states.html")


def test_the_shards_may_be_those_of_the_pipeline(urls):
    whole = pages([], counted(urls))
    assert list(whole.data.shards) == urls
    with pytest.raises(ZeroDivisionError):
        pages([], lambda: 1 / 0)


def test_the_command_shows_a_training(urls, tmp_path):
    MADE[:] = [counted(urls)]
    run_command("browse", "--order", f"{__name__}:loader", "--export", tmp_path / "out", "--samples", 1)
    text = (tmp_path / "out" / "order.html").read_text()
    assert "Epoch 0, rank 0 of 1" in text
    assert "order.html?" not in text
    histograms = (tmp_path / "out" / "histograms.html").read_text()
    assert "From 42 of 42 samples." in histograms
    assert "cls: labels" in histograms
    assert "--world-size goes with --order" in refused("browse", "--world-size", 2, *urls)
    assert "Missing argument 'URLS...'" in refused("browse")


SLOW = """
import time
import wds_pipes as wp

def make():
    pipe = wp.ShardList({url!r}).open_shards().load_tar().group_by_key().filter_samples(lambda sample: time.sleep(100))
    return wp.PipeLoader(pipe, batch_size=2, epoch_end="exact")
"""


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_a_page(urls, tmp_path):
    pytest.importorskip("aiohttp", reason="the pages are served by aiohttp")
    (tmp_path / "slow_training.py").write_text(SLOW.format(url=urls[0]))
    command = [sys.executable, "-m", "wds_pipes", "browse", "--order", "slow_training:make"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        _, _, host, *path = process.stdout.readline().split()[0].split("/")
        with (
            contextlib.closing(http.client.HTTPConnection(host)) as slow,
            contextlib.closing(http.client.HTTPConnection(host)) as other,
        ):
            slow.request("GET", f"/{path[0]}/order.html")
            other.request("GET", f"/{path[0]}/browse.css")
            assert other.getresponse().read()
            process.send_signal(signal.SIGINT)
            try:
                assert process.wait(60) == 130
            finally:
                process.kill()


def test_histograms_say_of_which_part_they_are(urls, tmp_path, monkeypatch):
    monkeypatch.setattr("wds_pipes.browse.histograms.SAMPLES", 16)
    part = Pages(DataSet(urls))
    add_histograms(part)
    assert "From 16 of 42 samples." in (text := part.page("histograms.html"))
    assert "Another random part" in text
    assert part.page("histograms.html") != part.page("histograms.html", {"part": "1"})
    bare = Pages(DataSet(make_shards(tmp_path, shards=9, samples=2, fields=("txt",))))
    add_histograms(bare)
    assert "From 16 samples, the first of 8 of 9 shards, since no index counts them." in bare.page("histograms.html")


def test_what_verify_finds_is_shown_in_place(tmp_path):
    url = make_shards(tmp_path, shards=1, samples=4, fields=("txt",))[0]
    found = Pages(DataSet([url]))
    assert "verify finds nothing wrong." in found.page("shard-0-1.html")
    data = Path(url).read_bytes()
    again = data[: 3 * 1024] + data[:1024] + data[3 * 1024 :]  # the first sample comes again after the third one
    Path(url).write_bytes(again)
    grid = found.page("shard-0-1.html")
    assert "verify: 1 finding" in grid
    assert "verify: sample" in grid
    assert "verify: 1 finding" in found.page("sample-0-0.html")
    assert "verify:" not in found.page("sample-0-1.html")


def test_a_hostile_key_is_text(tmp_path):
    evil = "<script>alert(1)</script>&\"'"
    url = str(tmp_path / "a.tar")
    entry = json.dumps({evil: evil}).encode()
    names = [(f"{evil}{number}", name) for number in range(3) for name in ("txt", "json")] + [("b\udcff", "txt")]
    put(Path(url), tar([(f"{key}.{name}", entry) for key, name in names], format=2))
    whole = pages([url], lambda: wp.PipeLoader(samples([url]), batch_size=2, epoch_end="exact", collate="list"))
    add_histograms(whole)
    assert "b\\udcff" in whole.page("order.html"), "no URL can name it"
    for name in ("order.html", "histograms.html"):
        text = whole.page(name)
        assert "<script>alert" not in text
        assert "&lt;script&gt;alert" in text
