"""The histograms that ``wds-pipes browse`` shows."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import saved, smooth
from tars import put, tar

from wds_pipes.browse.data import DataSet
from wds_pipes.browse.histograms import Seen, add_histograms, drawn
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards


def seen(*samples):
    found = Seen()
    for sample in samples:
        found.add((name, len(data), data) for name, data in sample.items())
    assert found.samples == len(samples)
    return {(one.field, one.what): one for one in found.histograms()}


def test_numbers_that_are_nearly_zero_have_a_histogram():
    bars = seen(*({"json": json.dumps({"a": number * 5e-324}).encode()} for number in range(40)))["json: a", "values"]
    assert sum(bars.bars.values()) == 40


def test_labels_sizes_lengths_and_entries_are_counted():
    samples = [
        {
            "png": saved(smooth(30, 40 + 8 * (number % 2)), "PNG"),
            "cls": b"%d" % (number % 3),
            "txt": b"a" * 2,
            "json": json.dumps(entry).encode(),
        }
        for number in range(6)
        for entry in [{"who": f"n{number}", "sex": "fm"[number % 2], "age": number / 2}]
    ]
    found = seen(*samples)
    assert found["cls", "labels"].bars == {"0": 2, "1": 2, "2": 2}
    assert found["json: sex", "values"].bars == {"f": 3, "m": 3}
    assert found["png", "width in pixels"].bars == {"40": 3, "48": 3}
    assert found["png", "height in pixels"].bars == {"30": 6}
    assert found["txt", "characters"].bars == {"2": 6}
    assert found["txt", "bytes"].bars == {"2 bytes to 4 bytes": 6}
    assert [what for _, what in found][:2] == ["labels", "values"]


def test_many_labels_and_values_are_put_together():
    found = seen(
        *(
            {"cls": b"%d" % max(0, number - 40), "json": json.dumps({"v": number, "id": f"i{number}"}).encode()}
            for number in range(100)
        )
    )
    assert found["cls", "labels"].bars["0"] == 41
    assert found["cls", "labels"].bars["44 others"] == 44
    assert found["json: v", "values"].bars == {f"{10 * ten} to {10 * ten + 10}": 10 for ten in range(10)}
    assert ("json: id", "values") not in found


VALUES = st.one_of(st.integers(-(10**30), 10**30), st.floats(), st.text(max_size=3), st.booleans())


@settings(max_examples=20, deadline=None)
@given(values=st.lists(VALUES, max_size=40), sizes=st.lists(st.integers(0, 3000), max_size=20))
def test_each_sample_is_in_one_bar(values, sizes):
    """Whatever the values are, also NaN, and there are never many bars."""
    samples = [{"json": json.dumps({"x": value}).encode()} for value in values] + [
        {"bin": bytes(size)} for size in sizes
    ]
    for one in seen(*samples).values():
        assert sum(one.bars.values()) == one.samples
        assert len(one.bars) <= 18


def test_fields_without_end_are_left_out():
    found = Seen()
    found.add((f"f{number}", 1, b"x") for number in range(10_000))
    assert len(found.histograms()) == 64
    assert found.left_out


def test_fields_of_most_samples_are_shown():
    """Whichever sample is looked at first."""
    odd = {f"f{number:02d}": b"x" for number in range(64)}
    usual = {"cls": b"1"}
    found = [seen(odd, usual, usual), seen(usual, odd, usual)]
    assert found[0] == found[1]
    assert found[0]["cls", "labels"].bars == {"1": 2}


@settings(max_examples=20)
@given(total=st.integers(0, 2000), count=st.integers(0, 50), seed=st.integers(0, 9))
def test_a_random_part_has_each_sample_at_most_once(total, count, seed):
    numbers = drawn(total, count, seed)
    assert len(set(numbers)) == len(numbers) == min(count, total)
    assert numbers == drawn(total, 2000, seed)[:count]
    assert all(0 <= number < total for number in numbers)


def pages(urls):
    """The pages of a data set, with histograms."""
    jinja = pytest.importorskip(
        "wds_pipes.browse.pages", reason="the pages are templates of jinja2", exc_type=ImportError
    )
    found = jinja.Pages(DataSet(urls))
    add_histograms(found)
    return found


def test_the_page_says_of_which_part_it_is(tmp_path, monkeypatch):
    urls = make_shards(tmp_path / "indexed", shards=3, samples=[20, 10, 12], fields=("txt", "cls"))
    index_shards(urls, f"{tmp_path}/indexed/index.json", offsets=True)
    text = pages(urls).page("histograms.html")
    assert "From 42 of 42 samples." in text
    assert "cls: labels" in text
    monkeypatch.setattr("wds_pipes.browse.histograms.SAMPLES", 16)
    part = pages(urls)
    assert "From 16 of 42 samples." in (text := part.page("histograms.html"))
    assert "Another random part" in text
    assert part.page("histograms.html") != part.page("histograms.html", {"part": "1"})
    bare = pages(make_shards(tmp_path, shards=9, samples=2, fields=("txt",)))
    assert "From 16 samples, the first of 8 of 9 shards, since no index counts them." in bare.page("histograms.html")


def test_a_hostile_key_is_text(tmp_path):
    evil = "<script>alert(1)</script>&\"'"
    entry = json.dumps({evil: evil}).encode()
    names = [(f"{evil}{number}", name) for number in range(3) for name in ("txt", "json")]
    put(tmp_path / "a.tar", tar([(f"{key}.{name}", entry) for key, name in names], format=2))
    text = pages([str(tmp_path / "a.tar")]).page("histograms.html")
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
