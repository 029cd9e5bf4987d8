"""How remote shards are read ahead: through which connections, how much of them at a time, and
what is left when iteration stops.
"""

import json
import os
import time
import tracemalloc

import psutil
import pytest
from pipelines import loaded
from remote import bare, content, cut_at, first_bytes, put_all, samples, settle
from waiting import wait_for

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import GroupByKey, LoadTar, OpenShards, ShardList
from wds_pipes.testing import make_shards

MIB = 1 << 20


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A shard of 20 MB in 20 samples."""
    return make_shards(
        tmp_path_factory.mktemp("large"), shards=1, samples=20, fields={"bin": lambda rng, _: rng.randbytes(1_000_000)}
    )[0]


@pytest.mark.parametrize("connections", [1, 3, 8])
def test_one_shard_uses_all_connections(web, large, connections):
    url = web.put("large.tar", content(large))
    web.faults.rules({"match": web.reads, "skip": 1, "gather": connections})
    assert len(list(samples(url, connections=connections, readahead_bytes=16 * MIB))) == 20
    seen = web.faults.stats(web.reads)
    assert max(request.live for request in seen) == connections
    if connections == 1:
        assert len(seen) <= 2  # the first, and all the rest


def test_a_server_that_ignores_ranges_is_not_asked_for_each(web, large, tmp_path):
    """Also where an index tells the size, so that several are requested before the first
    response: each would bring the shard from its beginning.
    """
    url = web.put("large.tar", content(large))
    index = tmp_path / "index.json"
    index.write_text(
        json.dumps({"wids_version": 1, "shardlist": [{"url": url, "nsamples": 20, "filesize": os.path.getsize(large)}]})
    )
    web.faults.rules({"match": web.reads, "ignore_range": True})
    found = list(samples(url, index=index, connections=2, readahead_bytes=2 * MIB))
    assert list(map(bare, found)) == list(map(bare, samples(large)))
    assert len(web.faults.stats(web.reads)) <= 4  # two at once, perhaps one more before a response, and all the rest


def test_the_first_sample_needs_one_request(remote, local):
    """It comes while the second answer is still waited for."""
    (url,) = put_all(remote, local[:1])
    remote.faults.rules({"match": remote.reads, "skip": 1, "latency": 1000})
    next(iter(samples(url, remote)))
    first, *others = remote.faults.stats(remote.reads)
    assert first.status == 206
    assert not [request for request in others if request.sent]


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_shards_are_asked_for_before_their_turn(web, local, ahead):
    """As many as there may be, and no others, while the consumer has read nothing but a first
    sample.
    """
    urls = put_all(web, local)
    pipe = iter(samples(urls, shards_ahead=ahead, readahead_bytes=64 * MIB))
    next(pipe)

    def asked():
        return {request.path.partition("shard-")[2][:6] for request in web.faults.stats(web.reads)}

    wait_for(lambda: len(asked()) > ahead)
    assert asked() == {f"{number:06d}" for number in range(ahead + 1)}
    assert len(list(pipe)) == 159


@pytest.mark.parametrize(
    ("opened_by", "again"), [("interleave_shards", True), ("lanes", False), ("lanes", True), ("mix", True)]
)
def test_shards_that_are_open_at_once_are_asked_for_at_once(remote, local, opened_by, again):
    """All first answers are waited for together, also on a resume, where they begin at the
    positions.
    """
    urls = put_all(remote, local)
    pipes = [samples(some, remote, connections=1) for some in (urls, urls[:1], urls[1:2], urls[2:])]

    def make():
        if opened_by == "lanes":
            return wp.PipeLoader(pipes[0], lanes=3)
        return (
            pipes[0].interleave_shards(3)
            if opened_by == "interleave_shards"
            else wp.mix(dict(zip("abc", pipes[1:], strict=True)))
        )

    pipe = loaded(make(), cut_at(make(), 30)) if again else make()
    if again:
        settle(remote)
        remote.faults.clear()
    if remote.kind == "gcs":  # whose imitation answers one request after another
        remote.faults.rules({"match": remote.reads, "latency": 0.5})
    else:
        remote.faults.rules({"match": remote.reads, "gather": 3})
    next(iter(pipe))
    first = remote.faults.stats(remote.reads)[:3]
    assert len({request.path for request in first}) == 3
    if remote.kind != "gcs":
        assert first[2].live == 3
    if again:
        assert min(first_bytes(first)) > 400_000


def drops(shard):
    return "shard-000000" not in shard.url and "shard-000001" not in shard.url


def test_a_step_may_drop_a_shard_that_was_asked_for_ahead(web, local):
    """On a resume that is the one which was thought to be read from the position on."""
    urls = put_all(web, local)

    def make():
        return wp.PipeLoader(wp.ShardList(urls).open_shards().filter_samples(drops).load_tar().group_by_key(), lanes=1)

    whole = list(map(bare, make()))
    assert len(whole) == 80
    assert list(map(bare, loaded(make(), cut_at(make(), 30)))) == whole[30:]


@pytest.mark.parametrize("lanes", [1, 16])
def test_memory_is_bounded(web, tmp_path_factory, lanes):
    """A consumer that does nothing gets no more than was allowed, however long it waits and
    however many shards are open.
    """
    if lanes == 1:
        paths = make_shards(
            tmp_path_factory.mktemp("huge"), shards=1, samples=300, fields={"bin": lambda rng, _: bytes(200_000)}
        )
    else:
        paths = make_shards(
            tmp_path_factory.mktemp("many"), shards=16, samples=30, fields={"bin": lambda rng, _: bytes(200_000)}
        )
    urls = put_all(web, paths)
    stage = wp.ShardList(urls).open_shards(readahead_bytes=8 * MIB).load_tar().group_by_key()
    pipe = stage.interleave_shards(lanes) if lanes > 1 else stage
    items = iter(pipe)
    next(items)
    tracemalloc.start()
    process = psutil.Process()
    before, most = process.memory_info().rss, 0
    for _ in range(5):
        next(items)
        time.sleep(0.1)
    for _ in items:
        most = max(most, tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    # Of each open shard also a buffer of 1 MiB, some samples, and what aiohttp has of each
    # connection.
    assert most < 8 * MIB + max(lanes, 8) * 3 * MIB
    assert process.memory_info().rss - before < 8 * MIB + 64 * MIB


def test_no_more_is_fetched_than_may_be_held(web, large):
    """The consumer waits after the first sample: kernels and buffers on the way hold the rest."""
    url = web.put("large.tar", content(large))
    web.faults.rules({"match": web.reads, "rate": 50_000_000})
    opened = OpenShards(ShardList(url), readahead_bytes=2 * MIB, connections=2)
    items = iter(Stream(GroupByKey(LoadTar(opened))))
    next(items)
    time.sleep(0.5)
    requests, retries, fetched, *_ = opened.opener.used
    assert fetched < 5 * MIB
    assert requests <= 5
    assert len(list(items)) == 19
    requests, retries, fetched, stalled, _ = opened.opener.used
    assert (requests, retries, fetched) == (len(web.faults.stats(web.reads)), 0, len(content(large)))
    assert stalled > 0


def test_a_consumer_may_take_its_time(web, large):
    """Longer than the timeout, while servers close connections on which nothing is read: that is
    nobody's fault, and the bytes are asked for again.
    """
    url = web.put("large.tar", content(large))
    web.faults.rules({"match": web.reads, "skip": 1, "times": 8, "reset_after": 0})
    items = iter(samples(url, readahead_bytes=2 * MIB, timeout_seconds=2))
    got = [bare(next(items))]
    time.sleep(2.5)
    got += map(bare, items)
    assert got == list(map(bare, samples(large)))


def test_answers_may_come_in_any_order(web, local):
    """The first shard ahead before the one that is read, with room for one range: nothing hangs
    for want of room.
    """
    urls = put_all(web, local)
    web.faults.rules({"match": web.reads, "prob": 0.5, "latency": 0.15}, seed=3)
    for connections in (2, 8):
        pipe = samples(urls, readahead_bytes=MIB, connections=connections, shards_ahead=3)
        assert list(map(bare, pipe)) == list(map(bare, samples(local)))


def test_many_epochs(remote, tmp_path):
    """Connections are kept, and nothing adds up."""
    urls = put_all(remote, make_shards(tmp_path, shards=3, samples=5))
    # Not the file system of other tests, which may have left connections open.
    pipe = samples(urls, remote, seed=1, storage_options={**remote.storage_options, "skip_instance_cache": True})
    for _ in range(20):
        assert len(list(pipe)) == 15
    seen = remote.faults.stats(remote.reads)
    assert len(seen) == 60
    if remote.kind != "gcs":  # whose imitation closes each connection
        assert len({request.connection for request in seen}) <= 8
