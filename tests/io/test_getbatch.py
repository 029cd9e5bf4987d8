"""GetBatch of AIStore: many ranges with one request; whatever the gateway responds, the bytes are
the same.
"""

import itertools
import multiprocessing
import random
import tarfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from remote import bare, content, tasks
from servers.aistore import FAULTS, STATUSES, AIStore
from waiting import wait_for

import wds_pipes as wp
from wds_pipes.io.ranges import Range, RangeReader
from wds_pipes.io.remote.batch import Batch
from wds_pipes.io.remote.budget import Reading, budget
from wds_pipes.io.remote.queue import RangeQueue
from wds_pipes.io.remote.waits import Waits
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

pytestmark = pytest.mark.usefixtures("nothing_left")

KIB = 1 << 10
APART = range(0, 192, 3)  # 64 samples with more than 64 KiB between them
UNUSABLE = {
    *(f"status {status}" for status in STATUSES if status not in (429, 500, 503)),
    "empty tar",
    "whole objects",
    "web page",
    "reversed",
    "other names",
    "a byte more",
    "directories",
    "damaged header",
}
# Of four batches of 20 ranges, how many are requested if it is not three, and how many ranges each
# of these brings if it is none.
BATCHES = {"some missing": 4, "slow": 4} | dict.fromkeys(UNUSABLE, 1)
IN_THE_SIXTH = {"a byte less", "a byte more", "cut in a header", "cut in a member", "damaged header", "stalls"}
BROUGHT = {"some missing": 19, "slow": 20, "one left out": 5, "ends early": 5} | dict.fromkeys(IN_THE_SIXTH, 5)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Four shards of 50 samples of 50 KB, with indexes."""
    paths = make_shards(
        tmp_path_factory.mktemp("shards"),
        shards=4,
        samples=50,
        fields={"bin": lambda rng, _: rng.randbytes(rng.randrange(48_000, 52_000)), "cls": lambda *_: b"1"},
    )
    index_shards(paths, offsets=True)
    return paths


@pytest.fixture
def store(monkeypatch):
    with AIStore() as store:
        monkeypatch.setenv("AIS_ENDPOINT", store.gateway)
        yield store


@pytest.fixture
def urls(store, shards):
    """The shards in the store."""
    for path in shards:
        store.put(f"{path.rpartition('/')[2]}.idx", content(f"{path}.idx"))
    return [store.put(path.rpartition("/")[2], content(path)) for path in shards]


@pytest.fixture(autouse=True)
def requested_once(monkeypatch):
    """Nothing is requested again because the machine is busy: the tests count requests."""
    monkeypatch.setattr(Waits, "allow_second", lambda waits: False)


def test_one_request_for_64_samples(store, urls, shards):
    data = wp.IndexedShards(urls)
    assert list(map(bare, data.__getitems__(list(APART)))) == [bare(wp.IndexedShards(shards)[i]) for i in APART]
    assert store.batches("gateway") == store.batches("target") == [64]
    assert store.ranges() == []


def test_few_samples_have_a_request_each(store, urls, shards):
    data, few = wp.IndexedShards(urls), APART[:15]
    assert list(map(bare, data.__getitems__(list(few)))) == [bare(wp.IndexedShards(shards)[i]) for i in few]
    assert data[7]["__key__"] == wp.IndexedShards(shards)[7]["__key__"]
    assert store.batches("gateway") == []
    assert len(store.ranges()) == 16


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_same_samples_whatever_is_wrong(fault, store, urls, shards, monkeypatch):
    """A gateway without GetBatch of byte ranges is asked once, and one that fails three times."""
    if fault in ("stalls", "no response"):  # these are soon abandoned
        monkeypatch.setattr(Reading, "patience", 1.0)
    data, local, store.fault = wp.IndexedShards(urls), wp.IndexedShards(shards), fault
    some = list(APART[:20])
    expected = [bare(local[i]) for i in some]
    for _ in range(4):
        assert list(map(bare, data.__getitems__(some))) == expected
    assert store.batches("gateway") == [20] * BATCHES.get(fault, 3)
    # what a batch has brought is not read again
    assert len(store.ranges()) == 4 * 20 - BROUGHT.get(fault, 0) * BATCHES.get(fault, 3)


@pytest.mark.parametrize("fault", ["", "status 404", "ends early"])
@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_of_samples(fault, shuffle, store, urls, shards):
    store.fault = fault
    options = {"shuffle": shuffle, "seed": 3, "where": slice(None, None, 3)}
    pipe = wp.SampleList(urls, **options).fetch_samples()
    expected = list(map(bare, wp.SampleList(shards, **options).fetch_samples()))
    assert list(map(bare, pipe)) == expected
    batches = store.batches()
    if not fault:
        assert all(count >= 16 for count in batches)
        assert sum(batches) + len(store.ranges()) == len(expected)
        assert len(store.ranges()) < 16
        assert len(batches) <= 5


def test_counts(store, urls, shards):
    """Each GetBatch is a request; headers and padding are bytes that were fetched."""
    pipe = wp.SampleList(urls, where=slice(None, None, 3)).fetch_samples()
    loader = wp.PipeLoader(pipe.batch_samples(8, collate=list))
    assert sum(len(batch) for batch in loader) == 67
    stats = loader.stats()
    assert stats["requests"] == len([seen for seen in store.seen if seen.where == "target" and "idx" not in seen.path])
    assert stats["retries"] == stats["hedged"] == 0
    entries = [entry for seen in store.seen if seen.where == "target" for entry in seen.entries or ()]
    alone = [map(int, found.removeprefix("bytes=").split("-")) for found in store.ranges()]
    bytes_of_ranges = sum(entry["length"] for entry in entries) + sum(last + 1 - first for first, last in alone)
    headers = stats["bytes_fetched"] - bytes_of_ranges
    # the zeros at the end of an answer may not have been fetched
    assert 512 * len(entries) <= headers < 1024 * (len(entries) + len(store.batches()))


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["posix", "gnu"])
@pytest.mark.parametrize("name", ["a b/ü#%41/" + "y" * 120 + ".tar", "deep/" * 60 + "x.tar", "d/" * 48 + "x.tar"])
def test_long_and_strange_names(name, form, store, shards):
    store.format = form
    url, data = store.put(name, content(shards[0]), bucket="other"), content(shards[0])
    ranges = [Range(url, start, start + 700) for start in range(0, 2_000_000, 100_000)]
    assert read(RangeReader(None, 8), ranges) == [data[start:stop] for _, start, stop, _ in ranges]
    assert (store.batches(), store.ranges()) == ([20], [])


def read(reader, ranges):
    """The bytes of each range."""
    with reader.read(iter(ranges)) as parts:
        return [
            bytes(part[start - base : stop - base])
            for (_, start, stop, _), (part, base) in zip(ranges, parts, strict=True)
        ]


def test_errors_are_those_of_single_requests(store, urls, shards):
    """In their places; so is the end of an object."""
    data, size = content(shards[0]), len(content(shards[0]))
    ranges = [Range(urls[0], start, start + 700) for start in range(0, 2_000_000, 100_000)]
    ranges[3:3] = [Range("ais://bucket/none.tar", 0, 10), Range("ais://none/x.tar", 5, 10)]
    ranges[9:9] = [Range(urls[0], size - 1000, size + 512), Range(urls[0], size + 10_000_000, size + 10_000_001)]
    found = []
    with RangeReader(None, 8).read(ranges) as parts:
        for _, start, stop, _ in ranges:
            try:
                part, base = next(parts)
                found.append(bytes(part[start - base : stop - base]))
            except wp.ShardError as error:
                found.append(str(error))
    for place, name in ((3, "bucket/none.tar"), (4, "none/x.tar")):
        assert found.pop(place).startswith(f"shard ais://{name} does not exist")
        ranges.pop(place)
        if place == 3:
            found.insert(3, b"")
            ranges.insert(3, Range(urls[0], 0, 0))
    assert found == [data[start:stop] for _, start, stop, _ in ranges]
    assert store.batches() == [24]
    assert len(store.ranges()) >= 4


def test_any_ranges_with_any_faults(store, urls, shards, monkeypatch):
    """Of several shards in any order, in runs and alone, with other connections and bounds."""
    monkeypatch.setattr(Reading, "patience", 0.2)
    data = dict(zip(urls, map(content, shards), strict=True))
    start = st.integers(0, len(data[urls[0]]) + 2000)
    size = st.integers(1, 2000).map(lambda size: size if size % 100 else 100 * size)
    wanted = st.tuples(st.sampled_from(urls), start, size)

    @given(
        st.lists(wanted, min_size=20, max_size=80),
        st.sampled_from(["", *(fault for fault in FAULTS if fault not in ("stalls", "no response"))]),
        st.integers(4, 8),
        st.sampled_from([1 << 19, 8 << 20]),
    )
    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    def check(found, fault, connections, readahead_bytes):
        store.fault = fault
        ranges = [Range(url, start, start + size) for url, start, size in found]
        reader = RangeReader(None, connections, readahead_bytes)
        assert read(reader, ranges) == [data[url][start:stop] for url, start, stop, _ in ranges]

    check()
    assert len(store.batches("gateway")) >= 20


@pytest.mark.parametrize("taken", [0, 1, 5, 70])
@pytest.mark.parametrize("fault", ["", "stalls", "no response"])
def test_what_is_not_used_is_cancelled(fault, taken, store, urls):
    """Before the response, in its middle, and when batches wait for others."""
    ranges = (Range(url, start, start + 700) for url in itertools.cycle(urls) for start in range(0, 2_000_000, 100_000))
    store.fault = fault if taken < 5 else ""
    parts = RangeReader(None, 8).read(ranges)
    for _ in range(0 if store.fault == "no response" else taken):
        next(parts)
    if not taken or store.fault == "no response":
        parts._read_ahead()
        wait_for(lambda: store.batches("gateway"))
    parts.close()
    wait_for(lambda: not tasks() and not budget().queues and not budget().held)


def test_a_changed_object_is_never_spliced(store, urls, shards):
    """It changes in the middle of a range, whose response is then cut: all of the range is new."""
    old, new = content(shards[0]), content(shards[1])
    ranges = [Range(urls[0], start, start + 30_000) for start in range(0, 2_000_000, 100_000)]
    store.fault = "stalls"
    with RangeReader(None, 8).read(iter(ranges)) as parts:
        found = [next(parts) for _ in range(5)]
        store.put("shard-000000.tar", new)
        store.resume.set()
        found += parts
    for number, ((_, start, stop, _), (part, base)) in enumerate(zip(ranges, found, strict=True)):
        assert bytes(part[start - base : stop - base]) == (old if number < 5 else new)[start:stop]


def test_the_size_of_a_shard_is_checked_first(store, urls, shards):
    """A batch does not report it."""
    data, size = content(shards[0]), len(content(shards[0]))
    reader, places = RangeReader(None, 8), range(0, 2_000_000, 100_000)
    for _ in range(2):
        ranges = [Range(urls[0], start, start + 700, size) for start in places]
        assert read(reader, ranges) == [data[start:stop] for _, start, stop, _ in ranges]
    assert (len(store.ranges()), store.batches()) == (20, [20])
    with pytest.raises(wp.ShardError, match=f"has {size} bytes, and {size - 1} were expected"):
        read(RangeReader(None, 8), [Range(urls[0], start, start + 700, size - 1) for start in places])


def test_a_range_that_is_given_up_does_not_hold_the_others_up(store, urls, shards):
    """While the batch is paused in the middle of it, for lack of room."""
    reader = RangeReader(None, 4, 1000)
    queue, opener, data = RangeQueue(reader.opener.client), reader.opener, content(shards[0])
    batch = Batch(queue)
    streams = [
        opener.open_range(
            urls[0], start, start + 60_000, queue, size=None, reported=reader.reported(urls[0]), batch=batch
        )
        for start in range(0, 960_000, 60_000)
    ]
    batch.add_to_queue()
    assert b"".join(iter(streams[0].next_chunk, b"")) == data[:60_000]
    streams[0].close()
    wait_for(lambda: any(block.paused for block in streams[2]._fetch.blocks))
    streams[2].close()
    streams[1].close()
    for number in range(3, 16):
        start = 60_000 * number
        assert b"".join(iter(streams[number].next_chunk, b"")) == data[start : start + 60_000]
        streams[number].close()
    queue.close()
    assert (store.batches(), store.ranges()) == ([16], [])


def test_readers_share_the_bytes(store, urls, shards):
    """Batches pause when their share is used up, and all readers go on, whichever is read."""
    data, choose = dict(zip(urls, map(content, shards), strict=True)), random.Random(1)
    wanted = [
        [Range(url, start, start + 6 * KIB) for start in range(0, 2_300_000, 80_000)] for url in urls for _ in range(3)
    ]
    reader = RangeReader(None, 4, 512 * KIB)
    readers, found = [reader.read(ranges) for ranges in wanted], [[] for _ in wanted]
    while left := [number for number, ranges in enumerate(wanted) if len(found[number]) < len(ranges)]:
        number = choose.choice(left)
        part, base = next(readers[number])
        _, start, stop, _ = wanted[number][len(found[number])]
        found[number].append(bytes(part[start - base : stop - base]))
        assert budget().held <= 512 * KIB + len(wanted) * 64 * KIB
    assert found == [[data[url][start:stop] for url, start, stop, _ in ranges] for ranges in wanted]
    assert sum(store.batches()) >= 12 * 16
    for parts in readers:
        parts.close()
    wait_for(lambda: not tasks() and not budget().queues and not budget().held)


def read_there(reader, ranges, queue):
    queue.put(read(reader, ranges))


def test_in_a_forked_process(store, urls, shards):
    """While a batch runs here."""
    ranges = [Range(urls[0], start, start + 700) for start in range(0, 2_000_000, 100_000)]
    reader, expected = RangeReader(None, 8), [content(shards[0])[start:stop] for _, start, stop, _ in ranges]
    store.fault = "stalls"
    parts = reader.read(iter(ranges))
    next(parts)
    store.fault = ""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=read_there, args=(reader, ranges, answers))
    process.start()
    assert answers.get(timeout=60) == expected
    process.join()
    assert store.batches() == [20, 20]
    parts.close()


def test_a_window_that_is_resumed(store, urls, shards):
    """The samples of a shuffle buffer are fetched when it is their turn."""

    def pipe(urls):
        return wp.ShardList(urls, index=True).open_shards().load_tar().group_by_key().shuffle_buffer(150, seed=4)

    before, expected = pipe(urls), list(map(bare, pipe(shards)))
    items = iter(before)
    assert [bare(next(items)) for _ in range(60)] == expected[:60]
    again = pipe(urls)
    again.load_state_dict(before.state_dict())
    store.seen.clear()
    assert list(map(bare, again)) == expected[60:]
    assert sum(store.batches()) >= 64


def test_its_shards_cannot_be_listed(store):
    with pytest.raises(ValueError, match="ais:// cannot be listed; name the shards"):
        wp.ShardList("ais://bucket/*.tar")
