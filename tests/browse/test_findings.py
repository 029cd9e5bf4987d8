"""What ``verify`` finds in the shards that ``wds-pipes browse`` shows, and the names of classes."""

from pathlib import Path

import pytest

from wds_pipes.browse import data as browsed
from wds_pipes.browse.data import DataSet, findings_at
from wds_pipes.testing import make_shards
from wds_pipes.tools.reading import Found, Member


def at(key, start, end):
    return Found(key, [Member("x.txt", "txt", None, start, end, end - start)])


@pytest.fixture
def urls(tmp_path):
    found = make_shards(tmp_path, shards=20, samples=3, fields=("txt",))
    data = bytearray(Path(found[1]).read_bytes())
    data[1024 + 150] ^= 1  # the checksum of the second header
    Path(found[1]).write_bytes(data)
    return found


def test_a_small_shard_is_checked_when_it_is_looked_at(urls):
    checks = DataSet(urls)
    assert checks.report(0).findings == []
    report = checks.report(1)
    assert {one.kind for one in report.findings} == {"damage"}
    found = report.findings[0]
    assert findings_at(report, at("other", found.byte, found.byte + 1)) == [found]
    assert findings_at(report, at("other", found.byte + 1, found.byte + 2)) == []


def test_a_large_shard_is_checked_when_that_is_asked_for(urls, monkeypatch):
    monkeypatch.setattr(browsed, "AT_ONCE", 100)
    checks = DataSet(urls)
    assert checks.report(1) is None
    report = checks.report(1, now=True)
    assert checks.report(1) is report
    assert checks.report(1, now=True) is not report
    for shard in range(2, 20):
        checks.report(shard, now=True)
    assert checks.report(1) is None  # few reports stay


def test_findings_of_a_key_are_at_its_sample(tmp_path):
    urls = make_shards(tmp_path, shards=1, samples=3, fields=("txt",))
    data = Path(urls[0]).read_bytes()
    Path(urls[0]).write_bytes(data[: 3 * 1024] + data[:1024] + data[3 * 1024 :])  # the first sample comes again
    report = DataSet(urls).report(0)
    assert [one.kind for one in findings_at(report, at("00000000", 0, 1024))] == ["sample"]
    assert not findings_at(report, at("00000001", 1024, 2048))


def test_what_verify_finds_is_shown_in_place(tmp_path):
    url = make_shards(tmp_path, shards=1, samples=4, fields=("txt",))[0]
    pages = pytest.importorskip("wds_pipes.browse.pages", reason="they are templates of jinja2", exc_type=ImportError)
    found = pages.Pages(DataSet([url]))
    assert "verify finds nothing wrong." in found.page("shard-0-1.html")
    data = Path(url).read_bytes()
    again = data[: 3 * 1024] + data[:1024] + data[3 * 1024 :]  # the first sample comes again after the third one
    Path(url).write_bytes(again)
    grid = found.page("shard-0-1.html")
    assert '<details class="problem">\n<summary>verify: 1 finding</summary>' in grid
    assert "verify: sample" in grid
    assert "verify: 1 finding" in found.page("sample-0-0.html")
    assert "verify:" not in found.page("sample-0-1.html")


@pytest.mark.parametrize(
    ("classes", "names"),
    [
        (None, ["0", "7"]),
        ('["cat", "dog"]', ["0 (cat)", "7"]),
        ('{"0": "cat"}', ["0", "7"]),
        ("no JSON", ["0", "7"]),
    ],
)
def test_a_class_has_its_name_where_classes_json_says_it(classes, names, tmp_path):
    if classes is not None:
        (tmp_path / "classes.json").write_text(classes)
    data = DataSet(make_shards(tmp_path, shards=1, samples=1, fields=("txt",)))
    assert [data.class_named(0, label) for label in ("0", "7")] == names
