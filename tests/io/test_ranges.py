"""RangeReader: many ranges of files, in order, from local files and from stores. A request that
stalls is made a second time, and the first response is used.
"""

import itertools
import os
import pickle
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote import content, put_all, tasks
from waiting import wait_for

import wds_pipes as wp
from wds_pipes.io.ranges import Range, RangeReader
from wds_pipes.io.remote.budget import budget

KIB = 1 << 10


def data_of(parts, ranges):
    """The bytes of each range."""
    return [
        bytes(part[start - base : stop - base]) for (_, start, stop, _), (part, base) in zip(ranges, parts, strict=True)
    ]


def requests(store):
    return store.faults.stats(store.reads)


def apart(url, count=None, size=1000):
    """Ranges that are too far from each other for one request; without ``count`` for ever."""
    numbers = itertools.islice(itertools.cycle(range(15)), count)
    return (Range(url, start, start + size) for start in (number * 100 * KIB for number in numbers))


def test_any_ranges_in_any_order(web, local):
    """The bytes are those of the files, whatever is merged, also where a file ends."""
    files = {url: content(path) for url, path in zip(put_all(web, local[:2]), local, strict=False)}
    files[local[2]] = content(local[2])
    place = st.integers(0, len(files[local[2]]) + 2000) | st.integers(0, 3000)
    wanted = st.tuples(st.sampled_from(list(files)), place, st.integers(1, 2000) | st.just(200_000))

    @given(st.lists(wanted, max_size=30), st.integers(1, 4), st.booleans())
    @settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def check(found, connections, ordered):
        ranges = [Range(url, start, start + size) for url, start, size in (sorted(found) if ordered else found)]
        reader = RangeReader(None, connections, 1 << 20)
        expected = [files[url][start:stop] for url, start, stop, _ in ranges]
        assert data_of(reader.read(iter(ranges)), ranges) == expected
        assert data_of([reader.read_one(*each) for each in ranges[:3]], ranges[:3]) == expected[:3]

    check()


def test_neighbours_are_one_request(web, local):
    """Up to a connection's share of the bytes."""
    url, other = put_all(web, local[:2])
    step = 4 * KIB
    near = [Range(url, number * step, number * step + 5 * KIB) for number in range(100)]
    ranges = [*near, Range(other, 0, 10), Range(other, 64 * KIB, 64 * KIB + 10), Range(other, 140 * KIB, 150 * KIB)]
    data = {url: content(local[0]), other: content(local[1])}
    reader = RangeReader(None, 4, 1 << 20)
    assert data_of(reader.read(ranges), ranges) == [data[url][start:stop] for url, start, stop, _ in ranges]
    assert sorted((request.path, request.range) for request in requests(web)) == [
        (urlsplit(url).path, "bytes=0-259071"),
        (urlsplit(url).path, "bytes=258048-410623"),
        (urlsplit(other).path, "bytes=0-65545"),
        (urlsplit(other).path, "bytes=143360-153599"),
    ]


def test_without_end_and_within_bounds(web, local):
    """At most so many requests at once, and so many bytes that the consumer has not taken."""
    [url] = put_all(web, local[:1])
    web.faults.rules({"match": web.reads, "gather": 4})
    pulled = []

    def ranges():
        for wanted in apart(url, size=32 * KIB):
            pulled.append(wanted)
            yield wanted

    with RangeReader(None, 4, 512 * KIB).read(ranges()) as parts:
        for _ in range(20):
            next(parts)
        # all but the last, which shows that another request begins, while the consumer does nothing
        wait_for(lambda: [bool(request.ended) for request in requests(web)] == [True] * (len(pulled) - 1))
        taken, seen = 20, requests(web)
        assert max(request.live for request in seen) == 4
        assert (len(pulled) - taken - 1) * 32 <= 512
        assert sum(request.sent for request in seen) <= taken * 32 * KIB + 512 * KIB
    assert next(parts, None) is None


def test_all_ranges_are_of_one_version_of_a_file(web, local):
    """Also those of different requests and iterations, until the reader may forget it."""
    [url] = put_all(web, local[:1])
    reader, ranges = RangeReader(web.storage_options, 2), list(apart(url, 3))
    web.faults.rules({"match": web.reads, "headers": {"ETag": '"one"'}})
    data_of(reader.read(ranges), ranges)
    web.faults.rules({"match": web.reads, "headers": {"ETag": '"other"'}})
    for read in (lambda: data_of(reader.read(ranges), ranges), lambda: reader.read_one(url, 0, 10)):
        with pytest.raises(wp.ShardError, match=r'was changed while it was read \("one" became "other"\)'):
            read()
    for other in (pickle.loads(pickle.dumps(reader)), RangeReader(web.storage_options, 2)):
        assert other.read_one(url, 0, 10)
    reader.forget()
    assert reader.read_one(url, 0, 10)
    reader.forget()
    web.faults.rules()
    reader.read_one(url, 0, 10)
    web.put("d/shard-000000.tar", content(local[0])[:-512])
    with pytest.raises(wp.ShardError, match="was changed while it was read"):
        reader.read_one(url, 0, 10)


def test_a_file_that_must_have_a_size(web, local):
    [url], size = put_all(web, local[:1]), os.path.getsize(local[0])
    reader = RangeReader(web.storage_options, 2)
    for start, stop in ((0, 10), (size - 10, size), (size - 10, size + 1000)):
        assert reader.read_one(url, start, stop, size)
        for wrong in (size - 1, size + 512):
            with pytest.raises(wp.ShardError, match=f"{url} has {size} bytes, and {wrong} were expected"):
                RangeReader(web.storage_options, 2).read_one(url, start, stop, wrong)


def test_errors_in_their_places(web, local):
    """What comes before and after is read."""
    url, cut = put_all(web, local[:2])
    none = f"{web.url}/d/none.tar"
    web.faults.rules(
        {"match": "shard-000001", "times": 1, "close_after": 5}, {"match": "shard-000001", "skip": 1, "status": 403}
    )
    ranges = [
        *apart(url, 3),
        *apart(none, 1),
        *apart(url, 2),
        Range(cut, 0, 10),
        Range(cut, 5, 20),
        *apart(local[0], 2),
    ]
    found = []
    with RangeReader(None, 4).read(ranges) as parts:
        for _, start, stop, _ in ranges:
            try:
                part, base = next(parts)
                found.append(bytes(part[start - base : stop - base]) == content(local[0])[start:stop])
            except wp.ShardError as error:
                found.append(str(error))
        assert next(parts, None) is None
    assert [each is True for each in found] == [True] * 3 + [False] + [True] * 2 + [False] * 2 + [True] * 2
    assert "none.tar does not exist" in found[3]
    assert all("may not be read" in each for each in found[6:8])


def test_an_error_of_the_ranges_comes_after_what_was_pulled(web, local):
    [url] = put_all(web, local[:1])

    def ranges():
        yield from apart(url, 3)
        raise wp.ShardError("no index", url=url)

    with RangeReader(None, 4).read(ranges()) as parts:
        assert len([next(parts) for _ in range(3)]) == 3
        with pytest.raises(wp.ShardError, match="no index"):
            next(parts)
        assert next(parts, None) is None


def test_threads_share_a_reader_and_a_forked_process_has_it(web, local):
    """While an iteration of this process goes on."""
    [url], data = put_all(web, local[:1]), content(local[0])
    reader, ranges = RangeReader(None, 4), list(apart(url, 15))
    expected = [data[start:stop] for _, start, stop, _ in ranges]
    started = reader.read(ranges)
    next(started)
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda _: data_of(reader.read(ranges), ranges), range(12))) == [expected] * 12
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(data_of(reader.read(ranges), ranges) != expected)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(started)) == 14
    assert len(pickle.dumps(reader)) < 1000


@pytest.mark.parametrize("how", ["close", "drop", "error"])
def test_what_is_not_used_is_cancelled(how, web, local):
    [url] = put_all(web, local[:1])
    web.faults.rules({"match": web.reads, "skip": 1, "stall_after": 10, "stall": 3600})
    parts = RangeReader(None, 4).read(apart(url))
    next(parts)
    if how == "close":
        parts.close()
        parts.close()
    elif how == "drop":
        del parts
    else:
        with pytest.raises(KeyboardInterrupt), parts:
            raise KeyboardInterrupt
    wait_for(lambda: not tasks() and not budget().queues)


# Second requests


SIZE, FOR_EVER = 30_000, 3600


def read(reader, url, count):
    """The bytes of so many ranges."""
    wanted = list(apart(url, count, SIZE))
    return data_of(reader.read(wanted), wanted)


def expected(path, count):
    return [content(path)[start:stop] for _, start, stop, _ in apart("", count, SIZE)]


def used_to(store, path, *, connections=4):
    """A reader that knows how long requests to this store take, and the shard there."""
    url = store.put("d/a.tar", content(path))
    reader = RangeReader(store.storage_options, connections)
    assert read(reader, url, 60) == expected(path, 60)
    store.faults.clear()
    return reader, url


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [{"latency": FOR_EVER}, {"stall_after": 20_000, "stall": FOR_EVER}], ids=["before", "within"]
)
def test_a_stalled_request_is_made_again(fault, remote, local):
    """Before its response, and in the middle of it, where only the rest is requested."""
    reader, url = used_to(remote, local[0])
    remote.faults.rules({"match": remote.reads, "skip": 5, "times": 1, **fault})
    before = reader.network
    assert read(reader, url, 30) == expected(local[0], 30)
    assert reader.network.hedged - before.hedged >= 1
    assert reader.network.retries == before.retries, "it was not abandoned"
    stalled = [request for request in remote.faults.stats(remote.reads) if request.faults]
    assert len(stalled) == 1
    assert reader.network.bytes_fetched - before.bytes_fetched <= 30 * SIZE + (1 << 16)


SECOND = {
    "stalls too": [{"times": 2, "latency": FOR_EVER}],
    "pauses": [
        {"times": 1, "latency": FOR_EVER},
        {"skip": 1, "times": 1, "stall_after": 100, "stall": 0.8},
        {"skip": 2, "times": 5, "latency": FOR_EVER},
    ],
    **{
        name: [{"times": 1, "latency": 1}, {"skip": 1, "times": 1, **fault}]
        for name, fault in {
            "503": {"status": 503},
            "404": {"status": 404},
            "reset": {"drop": True},
            "short": {"truncate": 100},
        }.items()
    },
}


@pytest.mark.parametrize("what", SECOND)
def test_whatever_becomes_of_a_second_request(what, web, local):
    """One that stalls is made again, one that fails changes nothing. One that has brought bytes is
    used: nothing takes its place for a pause.
    """
    reader, url = used_to(web, local[0])
    web.faults.rules(*({"match": web.reads, **rule} for rule in SECOND[what]))
    assert read(reader, url, 1) == expected(local[0], 1)
    assert reader.network.hedged == 1 if what == "pauses" else reader.network.hedged >= 1
    assert reader.network.retries == (what == "short")  # whose bytes are used, and its rest requested


def test_at_most_one_of_twenty_is_made_again(web, local):
    """Whatever stalls: here a server that became slow all at once. How many are made again depends
    on the waits before, which are long beside other work.
    """
    reader, url = used_to(web, local[0], connections=16)
    web.faults.rules({"match": web.reads, "latency": 0.3})
    assert read(reader, url, 140) == expected(local[0], 140)
    assert reader.network.hedged <= 0.05 * 200
    assert reader.network.requests <= 200 + reader.network.hedged


def test_what_was_fast_is_not_made_again(web, local):
    """And the slow requests of a store whose requests are all slow are as usual."""
    web.faults.rules({"match": web.reads, "latency": 0.2})
    reader, url = used_to(web, local[0], connections=16)
    web.faults.rules({"match": web.reads, "latency": 0.2})
    assert read(reader, url, 60) == expected(local[0], 60)
    assert reader.network.hedged == 0


@pytest.mark.parametrize("when", ["before", "within"])
def test_a_changed_object_is_never_spliced(when, web, local):
    """A second request finds another object. Before the first response, the range is all of that
    one; after it, all of the first one, and the second response is refused.
    """
    reader, url = used_to(web, local[0])
    reader.forget()  # else no range may be of the other one
    fault = {"latency": FOR_EVER} if when == "before" else {"stall_after": 20_000, "stall": 1.5}
    other = {"headers": {"ETag": '"other"'}, "flip": 3}
    web.faults.rules({"match": web.reads, "times": 1, **fault}, {"match": web.reads, "skip": 1, **other})
    [found], [first] = read(reader, url, 1), expected(local[0], 1)
    assert [place for place in range(SIZE) if found[place] != first[place]] == ([3] if when == "before" else [])
    assert reader.network.hedged >= 1
    assert reader.network.retries == 0


def test_the_first_error_is_final(web, local):
    reader, url = used_to(web, local[0])
    web.faults.rules({"match": web.reads, "latency": 0.5, "status": 403})
    with pytest.raises(Exception, match="may not be read"):
        read(reader, url, 1)


@pytest.mark.slow
def test_any_faults_change_nothing(remote, local):
    """Stalls, refusals, resets and short bodies together, of runs and of single ranges."""
    reader, url = used_to(remote, local[0], connections=8)
    every = {"match": remote.reads}
    remote.faults.rules(
        {**every, "prob": 0.1, "latency": 0.3},
        {**every, "prob": 0.1, "stall_after": 10_000, "stall": 0.3},
        {**every, "prob": 0.1, "reset_after": 15_000},
        {**every, "prob": 0.1, "truncate": 12_000},
        {**every, "prob": 0.05, "status": 503},
        seed=3,
    )
    choose, data = random.Random(5), content(local[0])
    wanted = []
    for _ in range(60):
        start = choose.randrange(len(data) - SIZE)
        for _ in range(choose.choice([1, 1, 6])):
            wanted.append(Range(url, start, start + choose.randrange(1, SIZE)))
            start = wanted[-1].stop - choose.randrange(100)
    assert data_of(reader.read(wanted), wanted) == [data[start:stop] for _, start, stop, _ in wanted]
    assert reader.network.hedged <= 0.05 * reader.network.requests


def test_readers_that_give_up_give_everything_back(web, local):
    """While a second request runs, and just when it gets its bytes."""
    reader, url = used_to(web, local[0])
    earlier, held = {*tasks(), *budget().queues}, budget().held  # of readers that something still refers to
    web.faults.rules({"match": web.reads, "times": 1, "latency": FOR_EVER})
    assert read(reader, url, 1) == expected(local[0], 1)
    assert reader.network.hedged >= 1
    web.faults.rules({"match": web.reads, "prob": 0.5, "stall_after": 10_000, "stall": 0.2}, seed=1)
    for number in range(20):
        with reader.read(apart(url, 8, SIZE)) as parts:
            for _ in range(number % 8):
                next(parts)
    wait_for(lambda: earlier.issuperset([*tasks(), *budget().queues]) and budget().held <= held)
