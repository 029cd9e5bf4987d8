"""Which shards, in which order."""

import contextlib
import cProfile
import json
import os
import re

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory import memory_below
from tars import put

import wds_pipes as wp
from wds_pipes.core.chain import Chain
from wds_pipes.core.lane import Lane
from wds_pipes.core.stream import Stream
from wds_pipes.stages import ShardList
from wds_pipes.stages.shard_source import ShardRef
from wds_pipes.testing import check_resume, make_shards

URLS = [f"x-{number}.tar" for number in range(7)]


def order(stage, epoch=0, number=0, of=1) -> list[str]:
    return [ref.url for ref in stage.open(Lane(stage.seed, epoch, number, of)).items]


def test_shuffled_order_is_a_function_of_seed_and_epoch():
    """Golden: a change would be a change of everybody's order."""
    shuffled = ShardList(URLS, shuffle=True, seed=7)
    assert order(shuffled) == order(ShardList(URLS, shuffle=True, seed=7))
    orders = {
        tuple(order(ShardList(URLS, shuffle=True, seed=seed), epoch))
        for seed in (-(1 << 63), -1, 0, 7, (1 << 63) - 1)
        for epoch in range(3)
    }
    assert len(orders) == 15
    assert all(sorted(one) == URLS for one in orders)
    assert [url[2] for url in order(shuffled)] == list("4031265")


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("of", [2, 9])
def test_lanes_deal_every_shard_once(shuffle, of):
    """And their parts together are in the order of the whole."""
    stage = ShardList(URLS, shuffle=shuffle)
    lanes = [order(stage, 3, number, of) for number in range(of)]
    whole = order(stage, 3)
    assert all(lane == whole[number::of] for number, lane in enumerate(lanes))


def test_the_fingerprint_is_of_the_list_without_secrets():
    """New credentials are no new list; another order is."""
    prints = [
        ShardList(urls).which_data().fingerprint
        for urls in (["s3://k:1@b/x"], ["s3://k:2@b/x"], ["s3://b/x"], ["s3://b/y"], ["a", "b"], ["b", "a"], ["ab"])
    ]
    assert prints[0] == prints[1] == prints[2]
    assert len(set(prints)) == 5


def test_the_state_names_the_next_shard_for_people(tmp_path):
    """Short, without secrets, and fit for JSON whatever bytes the name has."""
    stream = Stream(ShardList(["s3://k:secret@b/x.tar", "\udcff" * 300]))
    assert stream.state_dict()["lanes"]["0"]["url"] == "s3://b/x.tar"
    next(iter(stream))
    shown = stream.state_dict()["lanes"]["0"]["url"]
    assert len(shown) == 200
    assert shown.isascii()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"seed": 1.5}, TypeError),
        ({"seed": True}, TypeError),
        ({"seed": -(1 << 63) - 1}, ValueError),
        ({"seed": 1 << 64}, ValueError),
        ({"urls": []}, ValueError),
    ],
)
def test_wrong_arguments(options, error):
    with pytest.raises(error, match=next(iter(options)) if "seed" in options else "empty"):
        ShardList(**{"urls": URLS, **options})


def test_weights_of_resampled_shards():
    """As open_clip's upsampling factors: by shard, whatever the number of shards of each URL."""
    joined = "/a/{0..9}.tar::/b/{0..4}.tar"
    stage = ShardList(joined, resampled=True, weights="1::2.5", seed=3)
    drawn = [url for epoch in range(400) for url in order(stage, epoch)]
    assert len(drawn) == 400 * 15
    counts = [drawn.count(url) for url in stage.urls]
    assert all(
        abs(count - 6000 * weight / 22.5) < 75 for count, weight in zip(counts, [1] * 10 + [2.5] * 5, strict=True)
    )
    # golden: the order never changes
    assert order(stage, 1)[:6] == ["/b/4.tar", "/a/3.tar", "/b/3.tar", "/a/5.tar", "/a/1.tar", "/b/1.tar"]
    for same in (
        ShardList(joined.split("::"), resampled=True, weights=[2, 5], seed=3),
        ShardList(["/a/{0..9}.tar", "/b/{0..1}.tar::/b/{2..4}.tar"], resampled=True, weights=[0.4, 1, 1.0], seed=3),
    ):
        assert order(same, 1) == order(stage, 1)
    plain = ShardList(joined, resampled=True, seed=3)
    equal = ShardList(joined, resampled=True, weights="3::3", seed=3)
    assert (order(equal), Chain(equal).graph()) == (order(plain), Chain(plain).graph())
    ShardList(joined, resampled=True, weights="1e400::1", seed=3)  # more than a float
    many = ShardList([f"{number}.tar" for number in range(500)], resampled=True, weights=range(1, 501))
    assert len(Chain(many).graph()[0]) < 120
    check_resume(lambda: Stream(ShardList(joined, resampled=True, weights="1::3")))
    state = Stream(stage).state_dict()
    with pytest.raises(wp.StateError, match="weights='10 x 2, 5 x 5'.*weights='10 x 1, 5 x 3'"):
        Stream(ShardList(joined, resampled=True, weights="1::3", seed=3)).load_state_dict(state)


@pytest.mark.parametrize(
    ("weights", "resampled", "message"),
    [
        ("1::3", False, "weights go with resampled=True.*use mix"),
        ("1::3::5", True, "there are 3 weights and 2 URLs"),
        ("1::x", True, "the weight of URL 'b.tar' must be a number, not 'x'"),
        ([1, 0], True, "the weight of URL 'b.tar' must be above 0"),
        ("1::-1/2", True, "above 0 and finite, not -1/2"),
        (3, True, "weights must be a list, or a text such as '1::3'"),
    ],
)
def test_wrong_weights(weights, resampled, message):
    with pytest.raises((ValueError, TypeError), match=message):
        ShardList("a.tar::b.tar", resampled=resampled, weights=weights)


# An index


def wids(counts: dict[str, int], **more) -> bytes:
    """What wids_index writes."""
    shardlist = [
        {"url": name, "md5sum": f"{number:032x}", "nsamples": count, "filesize": 10240 * (count + 1)}
        for number, (name, count) in enumerate(counts.items())
    ]
    return json.dumps(
        {"__kind__": "wids-shard-index-v1", "wids_version": 1, "shardlist": shardlist, "name": "train", **more}
    ).encode()


COUNTS = {f"x-{number}.tar": number * 3 for number in range(7)}
FORMS = {
    "wids": wids(COUNTS),
    "sizes.json": json.dumps(COUNTS).encode(),
    "in another order": json.dumps({"other.tar": 99, **dict(reversed(COUNTS.items()))}).encode(),
    "elsewhere": wids({f"s3://bucket/train/{name}": count for name, count in COUNTS.items()}),
}


@pytest.mark.parametrize("data", FORMS.values(), ids=FORMS)
def test_an_index_in_any_form_gives_the_counts(data, tmp_path):
    """Whatever its name."""
    stage = ShardList([str(tmp_path / name) for name in COUNTS], index=put(tmp_path / "some index", data))
    assert list(stage.samples) == list(COUNTS.values())


def test_joined_indexes(tmp_path, monkeypatch):
    """Also with weights, and by environment variables."""
    for name, counts in (("a", [1, 2]), ("b", [3])):
        put(tmp_path / f"{name}.json", wids({f"{name}-{number}.tar": count for number, count in enumerate(counts)}))
    monkeypatch.setenv("DATA", str(tmp_path))
    stage = ShardList("${DATA}/a.json::${DATA}/b.json", resampled=True, weights="1::3")
    assert (list(stage.samples), stage.weights) == ([1, 2, 3], "2 x 1, 1 x 3")
    shards = "${DATA}/a-{0..1}.tar::${DATA}/b-0.tar"
    assert list(ShardList(shards, index="${DATA}/a.json::${DATA}/b.json").samples) == [1, 2, 3]


BESIDE = {
    "index.json": wids(COUNTS),
    "sizes.json": json.dumps(COUNTS).encode(),
}


@pytest.mark.parametrize("name", BESIDE)
def test_the_index_beside_the_shards(name, tmp_path, monkeypatch):
    """By ``True``, by its directory, from the working directory, and where shards are in two."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    put(tmp_path / "a" / name, BESIDE[name])
    put(tmp_path / "b" / "sizes.json", b'{"x-0.tar": 77}')
    urls = [f"{tmp_path}/a/{url}" for url in URLS]
    assert (
        list(ShardList(urls, index=True).samples)
        == list(ShardList(URLS, index=tmp_path / "a").samples)
        == list(COUNTS.values())
    )
    assert list(ShardList(urls, index=f"file://{tmp_path}/a/").samples) == list(COUNTS.values())
    assert list(ShardList([*urls, f"{tmp_path}/b/x-0.tar"], index=True).samples) == [*COUNTS.values(), 77]
    monkeypatch.chdir(tmp_path / "a")
    assert list(ShardList(URLS, index=True).samples) == list(COUNTS.values())
    assert ShardList(URLS, index=False).samples is None


def test_a_remote_index():
    """Through fsspec with its options; what it names lies beside it, and it names no file of
    this machine.
    """
    fs = fsspec.filesystem("memory")
    fs.pipe(
        "/bucket/data/index.json",
        wids({"x-0.tar": 1, "../more/x-1.tar": 2, "/top/x-2.tar": 3, "s3://other/x-3.tar": 4}),
    )
    expected = [
        "memory://bucket/data/x-0.tar",
        "memory://bucket/more/x-1.tar",
        "memory://bucket/top/x-2.tar",
        "s3://other/x-3.tar",
    ]
    stage = ShardList("memory://bucket/data/index.json", storage_options={})
    assert (list(stage.urls), list(stage.samples)) == (expected, [1, 2, 3, 4])
    assert list(ShardList(expected[0], index="memory://bucket/data/index.json").samples) == [1]
    assert (
        list(ShardList(expected[0], index=True).samples)
        == list(ShardList("x-0.tar", index="memory://bucket/data/").samples)
        == [1]
    )
    fs.pipe("/bucket/data/index.json", wids({"file:///etc/x.tar": 1}))
    with pytest.raises(ValueError, match="may not name the file 'file:///etc/x.tar' of this machine"):
        ShardList("memory://bucket/data/index.json")
    with pytest.raises(wp.ShardError, match="index memory://bucket/none.json does not exist"):
        ShardList("x.tar", index="memory://bucket/none.json")


def test_an_index_as_the_list(tmp_path):
    """Gives the shards that it lists, the same as the list itself; several are one after
    another.
    """
    (tmp_path / "sub").mkdir()
    put(tmp_path / "index.json", wids({"x-0.tar": 1, "./x-1.tar": 2, "sub/x-2.tar": 3, "/abs/x-3.tar": 4}))
    put(tmp_path / "sub" / "SIZES.JSON", b'{"y-0.tar": 5, "y-1.tar": 0}')
    stage = ShardList(tmp_path / "index.json")
    expected = [f"{tmp_path}/x-0.tar", f"{tmp_path}/x-1.tar", f"{tmp_path}/sub/x-2.tar", "/abs/x-3.tar"]
    assert (list(stage.urls), list(stage.samples)) == (expected, [1, 2, 3, 4])
    assert stage.which_data().fingerprint == ShardList(expected).which_data().fingerprint
    several = ShardList([tmp_path / "index.json", str(tmp_path / "sub" / "*.JSON")])
    assert list(several.urls) == [*expected, f"{tmp_path}/sub/y-0.tar", f"{tmp_path}/sub/y-1.tar"]
    assert list(several.samples) == [1, 2, 3, 4, 5, 0]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"index": "i.json", "samples_per_shard": 5}, ValueError, "how many samples there are"),
        ({"urls": "i.json", "samples_per_shard": 5}, ValueError, "how many samples there are"),
        ({"urls": "i.json", "index": "i.json"}, ValueError, "how many samples there are"),
        ({"urls": ["i.json", "x-0.tar"]}, ValueError, "names shards and index"),
        ({"urls": "empty.json"}, ValueError, "does not list shards"),
        ({"index": True}, ValueError, "there is no index in .*none of index.json, .* Make one with: wds-pipes index"),
        ({"index": 5}, TypeError, "index must be the path"),
        ({"index": b"i.json"}, TypeError, "index must be the path"),
        ({"index": {"x-0.tar": 5}}, TypeError, "index must be the path"),
    ],
)
def test_an_index_that_is_not_there_or_that_something_contradicts(options, error, message, tmp_path, monkeypatch):
    put(tmp_path / "i.json", b'{"x-0.tar": 5}')
    put(tmp_path / "empty.json", wids({}))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        ShardList(**{"urls": "x-0.tar", **options})


MANY = "[" * 100_000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not JSON"),
        (b'{"x-0.tar": 1', "is not JSON"),
        (b"<html>", "first bytes are b'<html>'"),
        (b"\x80\x04\x95", "is not JSON"),
        (MANY.encode(), "recursion"),
        (b"9" * 5000, "is not JSON"),
        (b"5", "no known format"),
        (b"[1, 2]", "no known format"),
        (b"{}", "no known format"),
        (b'{"a": {"b": 1}}', "no known format"),
        (b'{"\\ud800.tar": 1, "x-0.tar": 1}', "surrogates not allowed. Make one with"),
        (b'{"x-0.tar": -1}', "the number for 'x-0.tar' is -1"),
        (b'{"x-0.tar": 1.5}', "is 1.5, not a number"),
        (b'{"x-0.tar": true}', "is True, not a number"),
        (b'{"x-0.tar": NaN}', "is nan, not a number"),
        (b'{"x-0.tar": null}', "is None, not a number"),
        (b'{"x-0.tar": 1e99}', "not a number"),
        (b'{"wids_version": 2, "shardlist": []}', "wids_version is 2"),
        (b'{"wids_version": 1}', "its shardlist is None, not a list"),
        (b'{"shardlist": [{"nsamples": 1}]}', "has no url"),
        (b'{"shardlist": ["x-0.tar"]}', "has no url"),
        (b'{"shardlist": [{"url": "x-0.tar"}]}', "nsamples of 'x-0.tar' is None"),
        (b'{"shardlist": [{"url": "x-0.tar", "nsamples": 1, "filesize": "big"}]}', "filesize of 'x-0.tar' is 'big'"),
        (b'{"shardlist": [{"url": "x-0.tar", "nsamples": 1, "md5sum": "abc"}]}', "not 32 hexadecimal digits"),
        (b'{"shardlist": [{"url": "x-0.tar", "nsamples": 1, "md5sum": 1%b}]}' % (b"0" * 31), "not 32 hexadecimal"),
        (
            b'{"shardlist": [{"url": "x-0.tar", "nsamples": 1}, {"url": "./x-0.tar", "nsamples": 2}]}',
            "says two things of shard",
        ),
        (b'{"x-1.tar": 1, "x-2.tar": 2}', "shard x-0.tar is not in index .* it lists 2 others, such as .*x-1.tar"),
        (b'{"shardlist": []}', "is not in index .* it is empty"),
    ],
)
def test_an_index_that_is_damaged_or_of_other_shards(data, message, tmp_path):
    """An error when built, with its path and what to do."""
    index = put(tmp_path / "i.json", data)
    with pytest.raises(ValueError, match=message) as told:
        ShardList("x-0.tar", index=index)
    assert index in str(told.value)
    assert "wds-pipes index SHARDS -o index.json" in str(told.value)
    assert len(str(told.value)) < 1000


REFUSED = [
    "file:///etc/passwd",
    "file:/etc/passwd",
    "local:///etc/passwd",
    "FILE:///etc/passwd",
    "simplecache::file:///etc/passwd",
    "filecache::/etc/passwd",
    "blockcache::file:///etc/passwd",
    "cached::local:///etc/passwd",
    "dir://etc/passwd",
    "reference://etc/passwd",
    "github://owner:repo@main/x.tar",
    "sftp://host/x.tar",
    "zip://*::file:///etc/passwd",
    "s3::file:///etc/passwd",
    "s3://bucket/x::file:///etc/passwd",
    "http://host/x::file:///etc/passwd",
    "x.tar::file:///etc/passwd",
    "-::file:///etc/passwd",
    "data://x",
    "pipe:cat /etc/passwd",
    "pipe:cat s3://bucket/x.tar",
]


def listing(name: str) -> bytes:
    """An index of one shard."""
    return json.dumps({"wids_version": 1, "shardlist": [{"url": name, "nsamples": 1}]}).encode()


@pytest.mark.parametrize("name", REFUSED)
def test_a_remote_index_names_no_other_protocol(name):
    """Neither a local file nor anything but stores, and no chain of file systems."""
    fs = fsspec.filesystem("memory")
    fs.pipe("/bucket/data/index.json", listing(name))
    with pytest.raises(ValueError, match="index memory://bucket/data/index.json .*(may not name|names a command)"):
        ShardList("memory://bucket/data/index.json")


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("../../../../etc/passwd", "memory://bucket/etc/passwd"),
        ("/etc/passwd", "memory://bucket/etc/passwd"),
        ("//elsewhere/etc/passwd", "memory://bucket//elsewhere/etc/passwd"),
        (" file:///etc/passwd", "memory://bucket/data/ file:/etc/passwd"),
        ("file%3A///etc/passwd", "memory://bucket/data/file%3A/etc/passwd"),
        ("-", "memory://bucket/data/-"),
        ("memory://other/x.tar", "memory://other/x.tar"),
        ("https://host/x.tar", "https://host/x.tar"),
        ("gs://other/x.tar", "gs://other/x.tar"),
    ],
)
def test_other_names_in_a_remote_index_stay_in_its_store(name, url):
    """Whatever they look like; or name a store, or the protocol of the index."""
    fsspec.filesystem("memory").pipe("/bucket/data/index.json", listing(name))
    assert list(ShardList("memory://bucket/data/index.json").urls) == [url]


def test_an_index_given_as_a_chain_names_what_lies_beside_it():
    fsspec.filesystem("memory").pipe("/chained/index.json", listing("x.tar"))
    assert list(ShardList("simplecache::memory://chained/index.json").urls) == ["simplecache::memory://chained/x.tar"]


def test_a_local_index_names_local_files_and_stores(tmp_path, monkeypatch):
    """As ``wds-pipes index`` writes them; no commands, no standard input, no chains, no other
    protocols.
    """
    monkeypatch.chdir(tmp_path)
    for name in (
        "a b/x.tar",
        "/a/x::y.tar",
        "file:///a/x.tar",
        "local:///a/x.tar",
        "hf://datasets/a/x.tar",
        "az://a/x.tar",
        "s3://b/x.tar",
        "ais://b/x.tar",
    ):
        (tmp_path / "index.json").write_bytes(listing(name))
        assert list(ShardList(tmp_path / "index.json").urls) == [
            name if ":/" in name or name[0] == "/" else f"{tmp_path}/{name}"
        ]
    for name in (
        "-",
        "ab::c/x.tar",
        "simplecache::s3://b/x.tar",
        "memory://b/x.tar",
        "sftp://host/x.tar",
        "pipe:cat x",
    ):
        (tmp_path / "index.json").write_bytes(listing(name))
        with pytest.raises(ValueError, match=r"index index.json .*(may not name|names a command)"):
            ShardList("index.json")


@pytest.fixture
def parsed_at_once(monkeypatch):
    """How many bytes are parsed at once: 4 MiB, not 64."""
    monkeypatch.setattr("wds_pipes.tar.index._MOST_AT_ONCE", 4 << 20)
    return 4 << 20


def test_a_huge_index_is_not_read_to_its_end(tmp_path, counted, parsed_at_once):
    """Only so far as to see that it is none, and what is read ahead by then."""
    path = tmp_path / "i.json"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=f"more than {parsed_at_once} bytes"):
        ShardList("x-0.tar", index=f"counted://{path}")
    assert sum(count for _, count in counted) < parsed_at_once + (8 << 20)


def test_an_index_that_cannot_be_read(tmp_path):
    for index in (tmp_path / "none.json", "nosuchprotocol://x/index.json"):
        with pytest.raises(wp.ShardError, match="index .*(does not exist|cannot be opened)"):
            ShardList("x-0.tar", index=index)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
KEYS = st.sampled_from(
    [
        "wids_version",
        "shardlist",
        "datasets",
        "splits",
        "url",
        "nsamples",
        "filesize",
        "md5sum",
        "filenames",
        "shard_lengths",
        "base",
        "x-0.tar",
    ]
)
LIKE_AN_INDEX = st.recursive(
    VALUES | st.sampled_from([1, "x-0.tar"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
)


@settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LIKE_AN_INDEX)
def test_whatever_is_in_an_index_is_used_or_refused(tmp_path, content):
    index = put(tmp_path / "i.json", json.dumps(content).encode())
    for options in ({"urls": "x-0.tar", "index": index}, {"urls": index}):
        with contextlib.suppress(ValueError):
            stage = ShardList(**options)
            assert len(stage.samples) == len(stage.urls) > 0
            assert all(type(count) is int and count >= 0 for count in stage.samples)


LONG = [
    {"url": f"{number % 7}/x-{number:05}.tar", "nsamples": number, "filesize": 512 * number, "md5sum": f"{number:032x}"}
    for number in range(1_300)
]


@pytest.fixture
def small_blocks(monkeypatch):
    """An index of 100 kB is read in many blocks."""
    monkeypatch.setattr("wds_pipes.tar.index._BLOCK", 1 << 14)


def long_index(entries=LONG, separators=(", ", ": "), **more) -> bytes:
    return json.dumps({"wids_version": 1, **more, "shardlist": entries, "name": "x"}, separators=separators).encode()


@pytest.mark.parametrize(
    "data",
    [
        long_index(),
        long_index(separators=(",\n", ":")),
        long_index().replace(b"}, {", b"}\n ,\t{"),
        long_index([{**entry, "meta": {"a": {}}, "text": "}, {"} for entry in LONG]),
        long_index([{**entry, "more": [{"url": "y"}] * 8} for entry in LONG]),
        long_index(datasets={"shardlist": [{"url": "y"}]}),
        json.dumps({"shardlist": LONG, "wids_version": 1}).encode(),
    ],
    ids=["usual", "lines", "blanks", "nested", "lists", "another list", "list first"],
)
@pytest.mark.usefixtures("small_blocks")
def test_a_long_index_is_read_in_blocks(data, tmp_path):
    """However it is written; where an entry ends is not taken from another one, or a text."""
    stage = ShardList(put(tmp_path / "index.json", data))
    assert len(data) > 6 << 14
    assert list(stage.urls) == [str(tmp_path / entry["url"]) for entry in LONG]
    assert list(stage.facts) == [(entry["nsamples"], entry["filesize"], entry["md5sum"]) for entry in LONG]


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (long_index([*LONG[:1_500], {"url": "x"}, *LONG]), "nsamples of 'x' is None"),
        (long_index([*LONG, {"url": ""}]), "an entry of its shardlist has no url"),
        (long_index([*LONG[:900], {**LONG[0], "md5sum": "0" * 31 + "g"}, *LONG]), "not 32 hexadecimal digits"),
        (long_index()[:-5], "it is not JSON"),
        (long_index()[:120_000], "it is not JSON"),
        (long_index() + b"]", "it is not JSON"),
        (long_index().replace(b'"wids_version": 1', b'"wids_version": 2'), "its wids_version is 2"),
        (long_index([*LONG, {"url": "pipe:ls", "nsamples": 1}]), "names a command"),
    ],
)
@pytest.mark.usefixtures("small_blocks")
def test_damage_in_a_long_index_is_an_error(data, problem, tmp_path):
    with pytest.raises(ValueError, match=problem):
        ShardList(put(tmp_path / "index.json", data))


def test_an_entry_without_end_is_no_index(tmp_path, parsed_at_once):
    """It is not parsed."""
    data = b'{"shardlist": [{"url": "' + bytes(parsed_at_once + (1 << 20))
    with pytest.raises(ValueError, match="it has more than 4.* bytes"), memory_below(4 * parsed_at_once):
        ShardList(put(tmp_path / "index.json", data))


FOLDERS = st.lists(st.sampled_from("abc"), max_size=3).map("/".join)


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(FOLDERS, st.sampled_from(["0.tar", "1.tar"])), min_size=1, unique=True), st.data())
def test_shards_of_one_name_are_told_by_their_path(tmp_path, names, data):
    """Every shard of a tree gets its own facts, from an index of the tree wherever the tree is
    now, also where only some are read.
    """
    counts = {"/".join(filter(None, name)): number for number, name in enumerate(names)}
    index = put(tmp_path / "index.json", wids(counts))
    chosen = data.draw(st.lists(st.sampled_from(sorted(counts)), min_size=1))
    expected = [counts[name] for name in chosen]
    for root in (str(tmp_path), "s3://bucket" + str(tmp_path), "https://host/path" + str(tmp_path)):
        stage = ShardList([f"{root}/{name}" for name in chosen], index=index)
        assert list(stage.samples) == expected
        assert [facts.md5 for facts in stage.facts] == [f"{count:032x}" for count in expected]


def test_what_an_entry_could_mean_twice_is_an_error(tmp_path):
    """Rather than somebody else's count."""
    index = put(tmp_path / "i.json", wids({"a/0.tar": 1, "b/0.tar": 2}))
    assert list(ShardList(["s3://x/b/0.tar", "a/0.tar", "a/0.tar"], index=index).samples) == [2, 1, 1]
    with pytest.raises(ValueError, match="has 2 entries that may mean shard c/0.tar: .*a/0.tar and .*b/0.tar"):
        ShardList("c/0.tar", index=index)
    with pytest.raises(ValueError, match="has one entry, .*1.tar, for two shards, a/1.tar and b/1.tar"):
        ShardList(["a/1.tar", "b/1.tar"], index=put(tmp_path / "j.json", b'{"1.tar": 5}'))


def test_signed_urls_are_matched_without_their_query(tmp_path):
    index = put(tmp_path / "i.json", wids({"https://host/data/0.tar": 7}))
    assert list(ShardList("https://host/data/0.tar?X-Amz-Signature=abc/0.tar", index=index).samples) == [7]


def refs(stage, **lane):
    return list(stage.open(Lane(stage.seed, 0, **lane)).items)


def test_shards_carry_what_is_known(tmp_path):
    """In ranges of shards too."""
    index = put(tmp_path / "i.json", wids({"x-0.tar": 4, "x-1.tar": 5}))
    both = ShardList(["x-0.tar", "x-1.tar"], index=index)
    assert refs(both) == [
        ShardRef("x-0.tar", 51200, "0" * 32, 0, 4, 4),
        ShardRef("x-1.tar", 61440, f"{1:032x}", 0, 5, 5),
    ]
    assert refs(both, shards=((1, 2, 4),)) == [ShardRef("x-1.tar", 61440, f"{1:032x}", 2, 4, 5)]
    by_hand = ShardList(["x-1.tar"], samples_per_shard=5)
    assert refs(by_hand, shards=((0, 2, 4),)) == [ShardRef("x-1.tar", start=2, stop=4, of=5)]
    counted_only = ShardList(["x-0.tar"], index=put(tmp_path / "s.json", b'{"x-0.tar": 4}'))
    assert refs(counted_only) == [ShardRef("x-0.tar", start=0, stop=4, of=4)]
    assert refs(ShardList("x.tar")) == refs(ShardList("x.tar"), shards=((0, 0, -1),)) == [ShardRef("x.tar")]


@pytest.mark.parametrize("form", ["relative", "index"])
def test_a_list_of_many_local_paths_asks_the_system_for_none_of_them(form, tmp_path):
    paths = [f"{'./' if form == 'relative' else tmp_path}/s-{number:04d}.tar" for number in range(1000)]
    (tmp_path / "list.txt").write_text("\n".join(paths))
    entries = [{"url": path, "nsamples": 1, "filesize": 1} for path in paths]
    (tmp_path / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": entries}))
    urls = {"lines": f"@{tmp_path}/list.txt", "index": str(tmp_path / "index.json")}.get(form, paths)
    profile = cProfile.Profile()
    assert len(list(profile.runcall(wp.ShardList, urls))) == 1000
    asked = {
        entry.code: entry.callcount for entry in profile.getstats() if re.search(r"posix\.(?!fspath)", str(entry.code))
    }
    assert sum(asked.values()) < 100, asked


def listed_by(how, folder):
    """Nine shards in the order in which the file system lists them."""
    for name in "eaicgbhdf":
        (folder / f"{name}.tar").touch()
    return folder.glob("*.tar") if how == "glob" else [os.path.join(folder, name) for name in os.listdir(folder)]


@pytest.mark.parametrize("how", ["glob", "listdir"])
def test_the_order_of_a_directory_does_not_matter(how, tmp_path, caplog):
    """It is sorted with a warning, or refused if samples would come in this order."""
    in_order = [f"{tmp_path}/{name}.tar" for name in "abcdefghi"]
    assert list(ShardList(map(str, in_order)).urls) == in_order  # no warning
    assert not caplog.text
    assert list(ShardList(listed_by(how, tmp_path), shuffle=True).urls) == in_order
    assert "the list of shards is sorted" in caplog.text
    for options in ({}, {"shuffle": True, "samples_per_shard": [1] * 9}):
        with pytest.raises(ValueError, match=r"differs from machine to machine: pass sorted\(urls\)"):
            ShardList(listed_by(how, tmp_path), **options)


def test_an_order_that_is_meant_is_kept(tmp_path):
    listed_by("glob", tmp_path)
    for names in ("ihgfedcba", "badc", "abcdefgih"):
        urls = [f"{tmp_path}/{name}.tar" for name in names]
        assert list(ShardList(urls).urls) == urls


def test_a_shard_that_is_listed_twice_is_named(tmp_path, caplog):
    urls = make_shards(tmp_path, shards=3, samples=1)
    for listed, named in (
        (urls, None),
        ([urls[1], urls[2], urls[1]], "shard-000001.tar more than once, and"),
        ([f"{tmp_path}/*.tar", f"{tmp_path}/shard-*0.tar"], "shard-000000.tar more than once, and"),
        (urls + urls, "shard-000000.tar more than once, and 3 repeats in all, and"),
    ):
        caplog.clear()
        wp.ShardList(listed)
        assert [named in record.getMessage() for record in caplog.records] == ([] if named is None else [True])
