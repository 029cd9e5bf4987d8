"""Remote shards: the samples of local ones, through faults; what an index says of them is checked;
and a resume requests nothing twice.
"""

import gzip
import itertools
import os
import shutil
import tempfile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import loaded
from remote import bare, content, cut_at, first_bytes, put_all, samples, settle

import wds_pipes as wp
from wds_pipes import ShardError
from wds_pipes.testing import check_resume, make_shards

MIB = 1 << 20


def test_samples_are_those_of_local_shards(remote, local):
    urls = put_all(remote, local)
    assert [bare(sample) for sample in samples(urls, remote)] == [bare(sample) for sample in samples(local)]
    seen = remote.faults.stats(remote.reads)
    assert {request.status for request in seen} <= {200, 206}
    assert sum(request.sent for request in seen) < 1.05 * sum(map(os.path.getsize, local))  # nothing comes twice


FAULTS = {
    "503 for a while": {"times": 3, "status": 503},
    "429 with Retry-After": {"times": 2, "status": 429, "headers": {"Retry-After": "1"}},
    "reset before the answer": {"times": 3, "drop": True},
    "reset in the body": {"times": 3, "reset_after": 300_000},
    "early close": {"times": 3, "close_after": 300_000},
    "short bodies": {"times": 3, "truncate": 100_000},
    "a length that is too long": {"times": 3, "add_length": 100},
    "a length that is too short": {"times": 3, "add_length": -100},
    "stall": {"times": 2, "stall_after": 100_000, "stall": 5},
    "no answer": {"times": 1, "latency": 5},
    "ranges are ignored": {"ignore_range": True},
    "no length": {"no_length": True},
    "a fifth 503, a tenth reset": [{"prob": 0.2, "status": 503}, {"prob": 0.1, "reset_after": 200_000}],
}


# GCS is read by the code for web servers, but for what its statuses mean.
OF_GCS = ("503 for a while", "429 with Retry-After", "reset in the body", "stall", "a fifth 503, a tenth reset")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("store", "fault"),
    [(store, fault) for store, faults in (("web", FAULTS), ("s3", FAULTS), ("gcs", OF_GCS)) for fault in faults],
)
def test_faults_are_survived(request, local, store, fault):
    """What a network does changes nothing of what is read."""
    remote = request.getfixturevalue(store)
    urls = put_all(remote, local[:2])
    rules = FAULTS[fault]
    rules = rules if isinstance(rules, list) else [rules]
    remote.faults.rules(*({"match": remote.reads, **rule} for rule in rules), seed=1)
    found = [bare(sample) for sample in samples(urls, remote, timeout_seconds=8)]
    assert found == [bare(sample) for sample in samples(local[:2])]


FAULT = st.fixed_dictionaries({"prob": st.sampled_from([0.1, 0.3])}) | st.fixed_dictionaries(
    {"times": st.integers(1, 3), "skip": st.integers(0, 3)}
)
KIND = st.sampled_from(
    [
        {"status": 503},
        {"drop": True},
        {"reset_after": 100_000},
        {"close_after": 0},
        {"truncate": 700_000},
        {"add_length": 5000},
        {"latency": 0.05},
        {"ignore_range": True},
        {"no_length": True},
    ]
)

# Together: a wrong size, which looks like an object that changes.
LIES = [{"ignore_range", "add_length"}, {"ignore_range", "truncate"}]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    size=st.sampled_from([10, 1000, 100_000, 400_000]),
    options=st.fixed_dictionaries(
        {
            "readahead_bytes": st.sampled_from([MIB, 2 * MIB, 5 * MIB]),
            "connections": st.integers(1, 9),
            "shards_ahead": st.integers(0, 3),
        }
    ),
    interleave=st.sampled_from([0, 0, 2]),
    rules=st.lists(st.tuples(FAULT, KIND), max_size=2).filter(
        lambda rules: not any(lies.issubset(name for _, what in rules for name in what) for lies in LIES)
    ),
)
def test_any_sizes_limits_and_faults(web, *, counts, size, options, interleave, rules):
    with tempfile.TemporaryDirectory() as directory:
        local = make_shards(
            directory,
            shards=len(counts),
            samples=counts,
            fields={"bin": lambda rng, _: rng.randbytes(rng.randrange(size))},
        )
        urls = put_all(web, local)
        alone = samples(local)
        web.faults.rules(*({"match": web.reads, **where, **what} for where, what in rules))
        pipe = samples(urls, timeout_seconds=20, **options)
        if interleave:
            alone, pipe = alone.interleave_shards(interleave), pipe.interleave_shards(interleave)
        assert [bare(sample) for sample in pipe] == [bare(sample) for sample in alone]


# What an index says


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A shard of 12 MB in 12 samples, and its index."""
    directory = tmp_path_factory.mktemp("large")
    (path,) = make_shards(directory, shards=1, samples=12, fields={"bin": lambda rng, _: rng.randbytes(1_000_000)})
    wp.tar.index_shards([path], directory / "index.json")
    return path, directory / "index.json"


@pytest.mark.parametrize("connections", [1, 2, 8])
def test_whole_shards_pass(remote, large, connections):
    """With the size known before, ranges are asked for before any answer."""
    path, index = large
    url = remote.put("d/shard-000000.tar", content(path))
    pipe = samples(url, remote, index=index, connections=connections, readahead_bytes=8 << 20)
    assert [bare(sample) for sample in pipe] == [bare(sample) for sample in samples(path)]
    assert sum(request.sent for request in remote.faults.stats(remote.reads)) == os.path.getsize(path)


def test_a_flipped_bit_is_an_error(remote, local, tmp_path):
    """Unless nobody wants to know."""
    wp.tar.index_shards(local[:2], tmp_path / "index.json")
    urls = put_all(remote, local[:2])
    rule = {"match": "^GET.*shard-000000", "skip": 1, "times": 1, "flip": 300_000}
    remote.faults.rules(rule)
    pipe = samples(urls, remote, index=tmp_path / "index.json")
    with pytest.raises(ShardError, match="its MD5 is .*, and the index says") as caught:
        list(pipe)
    assert caught.value.url == urls[0]
    assert pipe.state_dict()["lanes"]["0"]["delivered"] == 39
    remote.faults.rules(rule)
    got = list(map(bare, samples(urls, remote, index=tmp_path / "index.json", verify=False)))
    assert len(got) == 80
    assert sum(sample != whole for sample, whole in zip(got, map(bare, samples(local[:2])))) == 1


@pytest.mark.parametrize("taken", [0, 20], ids=["from its beginning", "after a resume"])
def test_a_flipped_bit_in_a_local_shard_is_an_error(local, tmp_path, taken):
    paths = [shutil.copy(path, tmp_path) for path in local[:2]]
    wp.tar.index_shards(paths, tmp_path / "index.json")
    with open(paths[0], "r+b") as file:
        file.seek(300_000)
        file.write(b"\0" if file.read(1) != b"\0" else b"\1")
    first, second = (samples(paths, index=tmp_path / "index.json", verify=True) for _ in range(2))
    list(itertools.islice(first, taken))
    second.load_state_dict(first.state_dict())
    with pytest.raises(ShardError, match="its MD5 is .*, and the index says") as caught:
        list(second)
    assert caught.value.url == paths[0]
    assert len(list(samples(paths, index=tmp_path / "index.json"))) == 80
    assert len(list(wp.PipeLoader(samples(paths[1:], index=tmp_path / "index.json", verify=True), lanes=3))) == 40


# Resuming


def resumed(remote, make, state):
    """What a new pipe gives from a state on, and the requests that it made."""
    settle(remote)
    remote.faults.clear()
    return list(loaded(make(), state)), remote.faults.stats(remote.reads)


def test_only_the_rest_is_asked_for(remote, local):
    """Each request is for bytes behind the position, and there are no more than an uninterrupted
    rest takes.
    """
    urls = put_all(remote, local[:2])
    wanted = list(map(bare, samples(local[:2])))
    for cut in (1, 7, 19, 20, 21, 39, 40, 41, 79):
        state = cut_at(samples(urls, remote), cut)
        shard = state["lanes"]["0"]["position"]
        found, seen = resumed(remote, lambda: samples(urls, remote), state)
        assert list(map(bare, found)) == wanted[cut:]
        offset = shard[2].get("offset", 0)
        starts = [start for request, start in zip(seen, first_bytes(seen)) if "shard-000000" in request.path]
        if cut < 40:
            assert min(starts) == offset > 0
            assert sum(request.sent for request in seen) == sum(map(os.path.getsize, local[:2])) - offset
            assert len(starts) <= 1 + (os.path.getsize(local[0]) - offset) // (1 << 20)
        else:
            assert not [request for request in seen if "shard-000000" in request.path and first_bytes([request]) == [0]]


def test_every_cut(web, tmp_path):
    """With a window of samples behind it, through two resumes."""
    urls = put_all(web, make_shards(tmp_path, shards=3, samples=[2, 0, 3]))
    check_resume(lambda: samples(urls, web, seed=2).shuffle_buffer(2))


def test_a_window_is_read_again_from_its_earlier_mark(web, local):
    """shuffle_buffer goes back to where its oldest sample came from, and not further."""
    urls = put_all(web, local[:1])

    def make():
        return samples(urls, web).shuffle_buffer(10)

    state = cut_at(make(), 25)
    found, seen = resumed(web, make, state)
    assert list(map(bare, found)) == list(map(bare, samples(local[:1]).shuffle_buffer(10)))[25:]
    offset = state["lanes"]["0"]["position"][2]["offset"]
    assert 0 < offset == min(first_bytes(seen))


def test_compressed_shards_are_read_over(web, local):
    """There is no other way to get to a byte in them."""
    url = web.put("d/z.tar.gz", gzip.compress(content(local[0]), 1))
    state = cut_at(samples(url, web), 30)
    found, seen = resumed(web, lambda: samples(url, web), state)
    assert list(map(bare, found)) == list(map(bare, samples(local[0])))[30:]
    assert min(first_bytes(seen)) == 0


@pytest.mark.parametrize("end", ["mark", "padding", "none"])
def test_a_resume_behind_the_last_sample(web, tmp_path, end):
    """There is no member left in the shard, but for the gap that stands for a missing end. Its
    end-of-archive mark, and the last padding, may be missing where the call says so.
    """
    (path,) = make_shards(tmp_path, shards=1, samples=3)
    data = content(path)
    if end != "mark":
        data = data.rstrip(b"\0")
    if end == "padding":
        data += bytes(-len(data) % 512)
    url = web.put("end.tar", data)

    def make():
        opened = wp.ShardList(url).open_shards(storage_options=web.storage_options)
        return opened.load_tar() if end == "mark" else opened.load_tar(on_truncated="ignore")

    state = cut_at(make(), 6)
    rest = list(make())[6:]
    found, seen = resumed(web, make, state)
    assert found == rest
    assert not any(member.name for member in rest)
    assert sum(request.sent for request in seen) < 11_000
