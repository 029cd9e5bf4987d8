"""Lists and indexes in a store are requested by one rank for all, and by each where that fails."""

import contextlib
import os

import pytest
from process_group import on_ranks
from remote import content

import wds_pipes as wp
from wds_pipes.io import once
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

RANKS, SHARDS, SAMPLES = 4, 6, 5


@pytest.fixture
def in_store(s3, tmp_path):
    """A directory of shards in a store, with an index."""
    for path in make_shards(tmp_path / "once", shards=SHARDS, samples=SAMPLES):
        s3.put(f"once/{os.path.basename(path)}", content(path))
    index_shards(f"{tmp_path}/once/*.tar", f"{tmp_path}/once/index.json")
    s3.put("once/index.json", content(f"{tmp_path}/once/index.json"))
    s3.faults.clear()
    return s3


def list_all(rank, ranks, url, options):
    """What the list of a pattern and an index have."""
    found = []
    shards = f"{url}/once/*.tar"
    for urls, more in ((shards, {}), (f"{url}/once/index.json", {}), (shards, {"index": True})):
        shards = wp.ShardList(urls, storage_options=options, **more)
        stage = shards._stream.stage
        found.append((list(stage.urls), None if stage.samples is None else list(stage.samples)))
    return found


def test_one_rank_requests_for_all(in_store):
    found = on_ranks(RANKS, list_all, in_store.url, in_store.storage_options)
    on_four = len(in_store.faults.stats())
    assert found == [list_all(0, 1, in_store.url, in_store.storage_options)] * RANKS
    assert [samples for _, samples in found[0]] == [None, [SAMPLES] * SHARDS, [SAMPLES] * SHARDS]
    assert on_four <= 1.1 * (len(in_store.faults.stats()) - on_four)


def list_without_rank_0(rank, ranks, url, options):
    once.PATIENCE_SECONDS = 0.2
    return None if rank == 0 else list_all(rank, ranks, url, options)


def test_a_list_that_rank_0_does_not_make_is_made_by_each(in_store):
    first, *others = on_ranks(3, list_without_rank_0, in_store.url, in_store.storage_options)
    assert first is None
    assert others == [list_all(0, 1, in_store.url, in_store.storage_options)] * 2


def list_in_chunks(rank, ranks, url, options):
    once._CHUNK = 100
    return list_all(rank, ranks, url, options)


def test_a_result_comes_in_chunks(in_store):
    expected = list_all(0, 1, in_store.url, in_store.storage_options)
    before = len(in_store.faults.stats())
    assert on_ranks(3, list_in_chunks, in_store.url, in_store.storage_options) == [expected] * 3
    assert len(in_store.faults.stats()) - before <= 1.1 * before


def list_with_a_rank_0_that_stops(rank, ranks, url, options):
    once.TIMEOUT_SECONDS = 0.2
    if rank == 0:
        once.zlib = None  # it fails after it has said how many chunks come
    with pytest.raises(AttributeError) if rank == 0 else contextlib.nullcontext():
        return list_all(rank, ranks, url, options)


def test_what_rank_0_begins_and_does_not_end_is_requested_by_each(in_store):
    expected = list_all(0, 1, in_store.url, in_store.storage_options)
    assert on_ranks(3, list_with_a_rank_0_that_stops, in_store.url, in_store.storage_options)[1:] == [expected] * 2


def list_what_is_not_there(rank, ranks, url, options):
    with pytest.raises(ValueError, match="no shard matches"):
        wp.ShardList(f"{url}/none/*.tar", storage_options=options)
    return list(wp.ShardList(f"{url}/once/*.tar", storage_options=options)._stream.stage.urls)


def test_an_error_is_that_of_each_rank(in_store):
    """It does not shift what belongs together afterwards."""
    first, second = on_ranks(2, list_what_is_not_there, in_store.url, in_store.storage_options)
    assert first == second
    assert len(first) == SHARDS


def list_own_disk(rank, ranks, path):
    return list(wp.ShardList(f"{path}/{rank}/*.tar")._stream.stage.urls), list(
        wp.ShardList(f"{path}/here/*.tar")._stream.stage.urls
    )


def test_each_rank_lists_its_own_disk(tmp_path):
    for name in (0, 1, "here"):
        make_shards(tmp_path / str(name), shards=2, samples=1)
    for rank, (own, here) in enumerate(on_ranks(2, list_own_disk, tmp_path)):
        assert [len(own), len(here)] == [2, 2]
        assert f"{tmp_path}/{rank}/" in own[0]
