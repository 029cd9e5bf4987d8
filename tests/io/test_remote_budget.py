"""The connections and bytes of a process: shared by all its pipes, and given back whatever
becomes of a reader.
"""

import asyncio
import gc
import sys
import threading
import time

import pytest
from fsspec.asyn import get_loop
from remote import bare, content, samples, tasks
from waiting import in_time, wait_for

import wds_pipes as wp
from wds_pipes.io.remote.budget import budget
from wds_pipes.io.remote.queue import ReadQueue, RemoteShard
from wds_pipes.stages import OpenShards, ShardList
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

MIB = 1 << 20
SOURCES = 20


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A shard of 4 MB in 40 samples."""
    return make_shards(
        tmp_path_factory.mktemp("large"), shards=1, samples=40, fields={"bin": lambda rng, _: rng.randbytes(100_000)}
    )[0]


@pytest.fixture(autouse=True)
def alone():
    """Nothing of other tests is left in this process: neither garbage, nor what waits for a
    store.
    """
    if budget().queues:
        gc.collect()
    for queue in tuple(budget().queues):
        queue.close()
    wait_for(lambda: not tasks())


def after_an_error(loader):
    """What a loader has left when a step raises an error."""
    with pytest.raises(ZeroDivisionError):
        list(loader)


def after_one(items):
    """An iterator that was read from."""
    items = iter(items)
    next(items)
    return items


LEFT = {
    "pipe": lambda of: after_one(of()),
    "dataset": lambda of: after_one(of().as_dataset()),
    "loader": lambda of: after_one(wp.PipeLoader(of(), batch_size=1, collate="list")),
    "lanes": lambda of: after_one(wp.PipeLoader(of().filter_samples(len), batch_size=2, collate="list")),
    "error": lambda of: after_an_error(wp.PipeLoader(of().map_samples(lambda sample: 1 / 0), batch_size=1)),
}


@pytest.mark.slow
@pytest.mark.parametrize("indexed", [False, True], ids=["shards", "samples"])
@pytest.mark.parametrize("way", LEFT)
def test_what_is_dropped_gives_everything_back_at_once(way, indexed, web, large):
    """The garbage collector, which may run minutes later, is not needed."""
    index_shards(large, offsets=True)
    url, few = web.put("large.tar", content(large)), {"readahead_bytes": MIB, "connections": 2}
    web.put("large.tar.idx", content(f"{large}.idx"))
    web.faults.rules({"match": web.reads, "skip": 2, "rate": 2_000_000})
    gc.disable()
    try:
        LEFT[way](lambda: wp.SampleList(url).fetch_samples(**few) if indexed else samples(url, **few))
        wait_for(lambda: not tasks())
        assert (budget().held, budget().queues) == (0, [])
    finally:
        gc.enable()


def test_the_sources_of_a_mix_share_one_budget(web, large):
    """Each open shard has one connection, as all are taken by them, apart from the first two, which
    may have begun with two each; and the bytes are those of one pipe.
    """
    urls = [web.put(f"many/{number}.tar", content(large)) for number in range(SOURCES)]
    pipes = {str(number): samples(url, readahead_bytes=8 * MIB, connections=4) for number, url in enumerate(urls)}
    web.faults.rules({"match": web.reads, "rate": 4_000_000})
    items = iter(wp.mix(pipes))
    next(items)
    most = 0  # that was held
    for _ in range(60):
        most = max(most, budget().held)
        time.sleep(0.02)
    assert most <= 8 * MIB + SOURCES * MIB // 4  # of each a piece
    web.faults.rules()
    assert sum(1 for _ in items) == SOURCES * 40 - 1
    assert max(request.live for request in web.faults.stats(web.reads)) <= SOURCES + 2


def test_a_pipe_gets_no_more_than_it_has_requested(web, large):
    """Beside one that may have more."""
    few, many = (web.put(f"{name}.tar", content(large)) for name in ("few", "many"))
    web.faults.rules({"match": "few", "rate": 2_000_000}, {"match": "many", "rate": 2_000_000})
    pipes = {"few": samples(few, connections=1), "many": samples(many, connections=8)}
    assert sum(1 for _ in wp.mix(pipes)) == 80
    seen = web.faults.stats(web.reads)
    spans = [(request.started, request.ended) for request in seen if "few" in request.path]
    assert max(sum(start <= begin < end for start, end in spans) for begin, _ in spans) == 1


def test_a_request_that_another_has_cancelled_is_an_error(web, large):
    """And not a wait for ever."""
    url = web.put("large.tar", content(large))
    web.faults.rules({"match": web.reads, "skip": 1, "latency": 1000})
    items = iter(samples(url, connections=2, readahead_bytes=2 * MIB, timeout_seconds=300))
    next(items)

    async def cancel():
        for task in asyncio.all_tasks():
            # tasks of others, such as an ending generator, have no name
            if getattr(task.get_coro(), "__qualname__", "") == "Block._run":
                task.cancel()

    asyncio.run_coroutine_threadsafe(cancel(), get_loop()).result()
    with pytest.raises(wp.ShardError, match="its request was cancelled"):
        in_time(lambda: list(items))


@pytest.mark.parametrize("ahead", [0, 2])
def test_shards_that_are_read_in_another_order(web, local, ahead):
    """As a shuffle of open shards gives them: those that were requested first hold all the room,
    and the source ends before they are read.
    """
    urls = [web.put(f"order/{number}.tar", content(local[number % 4])) for number in range(8)]
    opened = wp.ShardList(urls).open_shards(readahead_bytes=MIB, shards_ahead=ahead)
    alone = [local[urls.index(shard.url) % 4] for shard in opened.shuffle_buffer(3)]
    assert [content(path) for path in alone] != [content(local[number % 4]) for number in range(8)]
    pipe = (
        wp.ShardList(urls)
        .open_shards(readahead_bytes=MIB, shards_ahead=ahead)
        .shuffle_buffer(3)
        .load_tar()
        .group_by_key()
    )
    assert in_time(lambda: list(map(bare, pipe))) == list(map(bare, samples(alone)))
    wait_for(lambda: not tasks())
    assert (budget().held, budget().queues) == (0, [])


def test_a_shard_is_waited_for_before_one_that_was_closed_has_left_its_queue(web, local):
    """The next one in the queue, which then comes first, holds all the room; and both have
    responded before, so that no response wakes the consumer.
    """
    urls = [web.put(f"busy/{number}.tar", content(local[number])) for number in range(3)]
    web.faults.rules({"match": "busy/2", "latency": 0.2})
    queue = ReadQueue(OpenShards(ShardList(urls), readahead_bytes=MIB).opener.client)
    shards = [RemoteShard(queue, url) for url in urls]
    assert shards[0].readall() == content(local[0])
    wait_for(lambda: queue.paused)
    stop = threading.Event()
    budget().call(stop.wait)  # the event loop is busy
    shards[0].close()
    threading.Timer(0.5, stop.set).start()
    assert in_time(shards[2].wait) is None
    assert shards[2].readall() == content(local[2])
    for shard in shards:
        shard.close()
    queue.close()
    wait_for(lambda: not tasks())
    assert (budget().held, budget().queues) == (0, [])


def test_a_byte_now_and_then_is_no_progress_without_room(web, local):
    """The next shard holds it all, so that the first one rests after each byte."""
    urls = [web.put(f"slow/{number}.tar", content(local[number])) for number in range(2)]
    web.faults.rules({"match": "slow/0", "trickle": [1, 0.05]})
    with pytest.raises(wp.ShardError, match="bytes came in 2 s"):
        in_time(lambda: list(samples(urls, readahead_bytes=MIB, timeout_seconds=2)))


def test_two_open_shards_are_read_in_turn(web, local):
    """Each while the other holds all the room."""
    urls = [web.put(f"turn/{number}.tar", content(path)) for number, path in enumerate(local)]
    shards = list(wp.ShardList(urls).open_shards(readahead_bytes=MIB))
    streams = [shard.raw for shard in reversed(shards)]
    parts = in_time(lambda: [[stream.read(size) for stream in streams] for size in (10, 1 << 19, -1)])
    assert [b"".join(part) for part in zip(*parts, strict=True)] == [content(path) for path in reversed(local)]
    for shard in shards:
        shard.close()
    wait_for(lambda: not tasks())
    assert (budget().held, budget().queues) == (0, [])


def test_a_reader_that_is_closed_while_it_waits(web, large):
    """For the first byte."""
    url = web.put("large.tar", content(large))
    web.faults.rules({"match": web.reads, "latency": 1000})
    opened = OpenShards(ShardList(url), timeout_seconds=300)
    shard = RemoteShard(ReadQueue(opened.opener.client), url, whole_queue=True)
    threading.Timer(0.2, shard.close).start()
    with pytest.raises(ValueError, match="closed"):
        in_time(shard.wait)


def test_two_threads_look_at_the_blocks(web, large):
    """The loop looks at them while the consumer takes them away; threads take turns as often as
    they can.
    """
    url = web.put("large.tar", content(large))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        found = in_time(lambda: list(map(bare, samples([url] * 4, connections=2, readahead_bytes=2 * MIB))))
    finally:
        sys.setswitchinterval(interval)
    assert found == list(map(bare, samples(large))) * 4
