"""cache_shards and open_shards(cache=...): the second epoch needs no store, and the samples are the
same.
"""

import contextlib
import os

import fsspec
import pytest
from pipelines import keys_of

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.testing import check_resume, make_shards


@pytest.fixture
def shards(tmp_path):
    return make_shards(tmp_path / "local", shards=3, samples=6)


def stored(store, shards):
    """The URLs of shards in a store, without the fault proxy's endpoint in their names."""
    urls = []
    for shard in shards:
        with open(shard, "rb") as file:
            urls.append(store.put(f"c/{os.path.basename(shard)}", file.read()))
    return urls


@pytest.mark.parametrize("remote", ["s3"], indirect=True)
def test_the_second_epoch_comes_from_the_disk(remote, shards, tmp_path):
    urls = stored(remote, shards)
    pipe = (
        wp.ShardList(urls)
        .cache_shards(tmp_path / "cache", max_bytes="1GB")
        .open_shards(storage_options=remote.storage_options)
        .load_tar()
        .group_by_key()
    )
    first = keys_of(pipe)
    asked = len(remote.faults.stats(remote.reads))
    assert asked >= 3
    assert keys_of(pipe) == first == keys_of(wp.ShardList(shards).open_shards().load_tar().group_by_key())
    assert len(remote.faults.stats(remote.reads)) == asked


def test_resume_is_exact(shards, tmp_path):
    """Over remote shards, at every cut, with whatever the cache holds."""
    urls = []
    for shard in shards:
        with open(shard, "rb") as file:
            url = f"memory://cache_shards/{os.path.basename(shard)}"
            fsspec.filesystem("memory").pipe(url, file.read())
        urls.append(url)

    def make():
        opened = (
            wp.ShardList(urls, shuffle=True, seed=3).cache_shards(tmp_path / "cache", max_bytes=25_000).open_shards()
        )
        return opened.load_tar().group_by_key().shuffle_buffer(4)

    check_resume(make)


def test_a_flipped_bit_is_not_cached(web, shards, tmp_path):
    """With an index that has the checksums: a reader of the wrong byte gets an error; any other
    reader continues in the shard, which is downloaded again.
    """
    urls = stored(web, shards)
    index_shards(shards, tmp_path / "local" / "index.json")
    web.faults.rules({"match": web.reads, "times": 1, "flip": 700})
    pipe = wp.ShardList(urls, index=tmp_path / "local" / "index.json").open_shards(
        cache=wp.ShardCache(tmp_path / "cache", max_bytes="1GB")
    )
    expected = keys_of(wp.ShardList(shards).open_shards().load_tar().group_by_key())
    pipe = pipe.load_tar().group_by_key()
    with contextlib.suppress(wp.ShardError):
        assert keys_of(pipe) == expected
    web.faults.rules()
    assert keys_of(pipe) == expected


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda shards, folder: shards.cache_shards(), ValueError, "WDS_PIPES_CACHE_DIR"),
        (lambda shards, folder: shards.cache_shards(folder), ValueError, "WDS_PIPES_CACHE_SIZE"),
        (lambda shards, folder: shards.cache_shards(folder, max_bytes="a lot"), ValueError, "a lot"),
        (lambda shards, folder: shards.open_shards().cache_shards(folder), TypeError, r"put it before open_shards\(\)"),
        (
            lambda shards, folder: shards.open_shards().load_tar().group_by_key().cache_shards(folder),
            TypeError,
            r"put it before open_shards\(\)",
        ),
        (
            lambda shards, folder: shards.cache_shards(folder, max_bytes=1).open_shards(cache=str(folder)),
            ValueError,
            "two caches",
        ),
    ],
)
def test_wrong_arguments(build, error, message, tmp_path, monkeypatch):
    monkeypatch.delenv("WDS_PIPES_CACHE_DIR", raising=False)
    with pytest.raises(error, match=message):
        build(wp.ShardList("x.tar"), tmp_path)
