"""Patterns and directories of remote shards: what they mean, and what is said where they cannot
be listed.
"""

import os
import socket

import fsspec
import pytest
from remote import content, put_all, samples
from scripts import run_code
from serving import Quiet, serving

import wds_pipes as wp
from wds_pipes import ShardError, nodes
from wds_pipes.io.expand import expand
from wds_pipes.io.outputs import read_small
from wds_pipes.io.remote.budget import Reading
from wds_pipes.stages import OpenShards


def test_a_remote_directory_and_its_options(remote, local):
    """A directory means its shards, and what listed them reads them too."""
    urls = [remote.put(f"listed/{os.path.basename(path)}", content(path)) for path in local[:2]]
    remote.put("listed/notes.txt", b"x")
    remote.put("packed/a.tgz", b"x")
    remote.put("packed/b.tar.zst", b"x")
    remote.put("packed/c.tgz.md5", b"x")
    options = remote.storage_options
    folder = f"{remote.url}/listed/"
    if remote.kind != "http":
        assert expand(folder, options) == expand(f"{folder}*.tar", options)
        packed = [url.rpartition("/")[2] for url in expand(f"{remote.url}/packed/", options)]
        assert packed == ["a.tgz", "b.tar.zst"]
        pipe = wp.ShardList(folder, storage_options=options).open_shards().load_tar().group_by_key()
        assert len(list(pipe)) == 80
    assert [
        sample["__key__"]
        for sample in wp.ShardList(urls[0], storage_options=options).open_shards().load_tar().group_by_key()
    ] == [sample["__key__"] for sample in samples(urls[0], remote)]


@pytest.mark.filterwarnings("ignore:sources .* read the same shards")
def test_options_of_the_list_reach_all_that_reads(s3, local, tmp_path):
    urls, options = put_all(s3, local[:2]), s3.storage_options
    pipe = (
        wp.ShardList(urls, storage_options=options)
        .cache_shards(tmp_path, max_bytes="1GB")
        .open_shards()
        .load_tar()
        .group_by_key()
    )
    assert "testsecret" not in repr(pipe)
    assert len(list(wp.PipeLoader(pipe, num_workers=1, multiprocessing_context="fork"))) == 80
    node = nodes.GroupByKey(nodes.LoadTar(nodes.OpenShards(nodes.ShardList(urls[:1], storage_options=options))))
    assert len(list(node)) == 40
    both = {name: wp.ShardList(url, storage_options=options) for name, url in zip("ab", urls, strict=True)}
    assert len(list(wp.mix(both).open_shards().load_tar().group_by_key())) == 80
    with pytest.raises(ValueError, match="different storage_options"):
        wp.mix({**both, "c": wp.ShardList(urls[:1], storage_options={"anon": True})}).open_shards()
    own = OpenShards(wp.ShardList(urls, storage_options=options)._stream.stage, storage_options={})
    assert own.opener._reading.storage_options == {}
    with pytest.raises(TypeError, match="storage_options must be a dict"):
        wp.ShardList(urls, storage_options="anon")


@pytest.mark.parametrize("store", ["s3", "gcs"])
def test_a_question_mark_is_a_wildcard_in_a_store(request, store):
    remote = request.getfixturevalue(store)
    urls = [remote.put(f"marks-{store}/s-{name}.tar", b"x") for name in ("0", "1", "?", "10")]
    folder = f"{remote.url}/marks-{store}"
    assert expand(f"{folder}/s-?.tar", remote.storage_options) == urls[:3]
    assert expand(f"{folder}/s-[?].tar", remote.storage_options) == urls[2:3]
    assert expand(f"{folder}/s-0.tar?versionId=1") == [f"{folder}/s-0.tar?versionId=1"]
    with pytest.raises(ValueError, match=r"no shard matches '.*/t-\?\.tar'"):
        expand(f"{folder}/t-?.tar", remote.storage_options)


@pytest.mark.parametrize("store", ["s3", "gcs"])
def test_a_store_is_listed_anew_each_time(request, store):
    remote = request.getfixturevalue(store)
    urls = [remote.put(f"grows-{store}/{name}.tar", b"x") for name in "ab"]
    for pattern in (f"{remote.url}/grows-{store}/", f"{remote.url}/grows-{store}/*.tar"):
        assert expand(pattern, remote.storage_options) == urls
    urls.append(remote.put(f"grows-{store}/c.tar", b"x"))
    for pattern in (f"{remote.url}/grows-{store}/", f"{remote.url}/grows-{store}/*.tar"):
        assert expand(pattern, remote.storage_options) == urls


def test_a_small_file_that_has_grown_since_it_was_listed(s3):
    """Such as an index.json: all of it is read."""
    url, options = s3.put("grown/index.json", b"{}"), s3.storage_options
    fs, path = fsspec.core.url_to_fs(f"{s3.url}/grown", **options)
    fs.ls(path)
    s3.put("grown/index.json", b"{" + b" " * 1000 + b"}")
    assert len(read_small(url, options, most=1 << 20)) == 1002


def test_what_does_not_match_in_a_store(remote):
    remote.put("there/a.tar", b"x")
    options, url = remote.storage_options, remote.url
    missing = f"{url}-none/*.tar" if remote.kind != "http" else f"{url}/none/*.tar"
    with pytest.raises((ValueError, ShardError)) as caught:
        expand(missing, options)
    assert "none" in str(caught.value)
    assert "working directory" not in str(caught.value)
    if remote.kind != "http":
        assert f"bucket or directory '{missing[:-6]}' does not exist" in str(caught.value)
        with pytest.raises(ValueError, match=r"no shard matches '.*/there/b\*.tar': check the pattern") as caught:
            expand(f"{url}/there/b*.tar", options)


def test_without_the_package():
    """In a process where s3fs cannot be imported."""
    script = """
        import sys
        sys.modules["s3fs"] = None
        import wds_pipes as wp
        try:
            wp.ShardList("s3://b/*.tar")
        except wp.ShardError as error:
            print(error)
    """
    said = run_code(script, has_torch=True)
    assert "needs a package that is not installed" in said
    assert "pip install 'wds_pipes[s3]'" in said


def test_no_shards_are_left_out_with_a_page_that_does_not_come(web, monkeypatch):
    """fsspec leaves it out."""
    monkeypatch.setattr("wds_pipes.io.remote.metadata.READING", Reading(retries=1))
    urls = [web.put(f"pages/{name}/0.tar", b"x") for name in "abc"]
    pattern = f"{web.url}/pages/*/*.tar"
    assert expand(pattern) == urls
    web.faults.rules({"match": "/pages/b/", "drop": True})
    with pytest.raises(ShardError, match="cannot be listed"):
        expand(pattern)
    web.faults.rules({"match": "/pages/b/", "drop": True, "times": 1})
    assert expand(pattern) == urls


class Page(Quiet):
    """A page with the link of a shard."""

    def do_GET(self):
        self.begin(200, {"Content-Type": self.kind, "Content-Length": 23})
        self.write(b'<a href="a.tar">a</a>\r\n')


@pytest.mark.parametrize("kind", [None, "text/html", "text/plain"])
def test_a_page_of_links_is_html(kind):
    with serving(Page, kind=kind) as address:
        if kind == "text/plain":
            with pytest.raises(ValueError, match="is empty, or has no page of type text/html"):
                expand(f"{address}/*.tar")
        else:
            assert expand(f"{address}/*.tar") == [f"{address}/a.tar"]


@pytest.mark.parametrize("url", ["gs://bucket/*.tar", "gs://bucket/a.tar"])
def test_no_way_to_google(url, monkeypatch):
    """Nothing listens there: it is said at once, and not after all attempts to find credentials."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        options = {"endpoint_url": f"http://127.0.0.1:{unused.getsockname()[1]}"}
        with pytest.raises(ShardError, match=r"no connection to 127\.0\.0\.1"):
            next(iter(wp.ShardList(url, storage_options=options).open_shards(retries=0).load_tar()))
