"""A request for a range that stalls is made a second time, and the first response is used."""

import itertools
import random

import pytest
from remote import content, tasks
from waiting import wait_for

from wds_pipes.io.ranges import Range, RangeReader
from wds_pipes.io.remote.budget import budget

STEP, SIZE = 100 << 10, 30_000


def ranges(url, count):
    """Ranges that are too far from each other for one request."""
    return [
        Range(url, number * STEP, number * STEP + SIZE)
        for number in itertools.islice(itertools.cycle(range(19)), count)
    ]


def read(reader, url, count):
    """The bytes of so many ranges."""
    wanted = ranges(url, count)
    return [
        bytes(part[start - base : stop - base])
        for (_, start, stop, _), (part, base) in zip(wanted, reader.read(wanted), strict=True)
    ]


def expected(path, count):
    return [content(path)[start:stop] for _, start, stop, _ in ranges("", count)]


def used_to(store, path, *, connections=4):
    """A reader that knows how long requests to this store take, and the shard there."""
    url = store.put("d/a.tar", content(path))
    reader = RangeReader(store.storage_options, connections)
    assert read(reader, url, 60) == expected(path, 60)
    store.faults.clear()
    return reader, url


FOR_EVER = 3600


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
    fault = {"latency": 1.5} if when == "before" else {"stall_after": 20_000, "stall": 1.5}
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
    found = [
        bytes(part[start - base : stop - base])
        for (_, start, stop, _), (part, base) in zip(wanted, reader.read(wanted), strict=True)
    ]
    assert found == [data[start:stop] for _, start, stop, _ in wanted]
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
        with reader.read(ranges(url, 8)) as parts:
            for _ in range(number % 8):
                next(parts)
    wait_for(lambda: earlier.issuperset([*tasks(), *budget().queues]) and budget().held <= held)
