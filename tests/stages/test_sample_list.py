"""SampleList and fetch_samples: the samples of group_by_key, in one global order."""

import os
import pickle
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import FIFTY, after, flat, keys_of, samples, through_json
from remote import bare, content

import wds_pipes as wp
from wds_pipes.core.chain import Chain
from wds_pipes.core.order import order_of_samples
from wds_pipes.datapipes.pipe import as_stage
from wds_pipes.tar import index_shards
from wds_pipes.testing import check_resume, make_shards

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def fetched(urls, **options):
    """A pipe of raw samples in random order; ``options`` are those of SampleList."""
    return wp.SampleList(urls, **{"shuffle": True, "seed": 5, **options}).fetch_samples()


def test_the_samples_of_group_by_key(indexed, stream, tmp_path):
    assert list(fetched(indexed, shuffle=False)) == stream
    assert sorted(fetched(indexed), key=lambda sample: sample["__key__"]) == stream
    index_shards(indexed[1:4], tmp_path / "index.json")
    assert list(fetched(tmp_path / "index.json", shuffle=False)) == stream[FIFTY[0] : sum(FIFTY[:4])]
    folder = tmp_path / "offsets"
    folder.mkdir()
    bare_shards = make_shards(tmp_path / "other", shards=2, samples=4)
    with pytest.raises(wp.ShardError, match="--offsets"):
        fetched(bare_shards)
    index_shards(bare_shards, offsets=folder)
    assert len(list(fetched(bare_shards, index=folder))) == 8


def test_references(indexed, stream):
    """Without fetch_samples they are values of their own, which say where a sample is."""
    first = next(iter(wp.SampleList(indexed)))
    assert first._replace(index_url="") == wp.SampleRef(indexed[0], 0, 0, first.stop, "", before=-1)
    assert first.index_url == f"{indexed[0]}.idx"
    kept = wp.SampleList(indexed).filter_samples(lambda ref: ref.number % 10 == 3).fetch_samples()
    assert list(kept) == stream[3::10]


@given(seed=st.integers(-(1 << 63), (1 << 63) - 1), epoch=st.integers(0, 5), block=st.integers(1, 60))
@settings(deadline=None, max_examples=30)
def test_the_order_is_a_function_of_seed_epoch_and_place(seed, epoch, block, indexed, stream):
    pipe = fetched(indexed, seed=seed, block_samples=block)
    pipe.set_epoch(epoch)
    order = order_of_samples(50, seed, epoch, block_samples=block)
    assert list(pipe) == [stream[order.number_at(place)] for place in range(50)]


@pytest.mark.parametrize("block", [1, 4])
def test_resumes_at_every_cut(block, indexed):
    """Other chains are in tests/test_resume.py."""
    check_resume(lambda: fetched(indexed[:2], block_samples=block).batch_samples(3, collate="list"))


def test_the_state_is_one_number(indexed):
    pipe = fetched(indexed)
    items = after(pipe, 33)
    state = through_json(pipe.state_dict())
    assert state["lanes"]["0"]["position"] == [{"inside": 33}, {}]
    assert "sample 33 done" in wp.describe_state(state)
    again = fetched(indexed)
    again.load_state_dict(state)
    assert list(again) == list(items)


def test_a_state_of_another_order_or_other_data_is_refused(indexed, tmp_path):
    state = fetched(indexed, block_samples=2).state_dict()
    for other in (
        fetched(indexed),
        fetched(indexed, block_samples=3),
        fetched(indexed, shuffle=False),
        fetched(indexed[1:], block_samples=2),
        fetched(indexed, seed=6, block_samples=2),
        samples(indexed),
    ):
        with pytest.raises(wp.StateError):
            other.load_state_dict(state)
    fetched(indexed, block_samples=2).load_state_dict(state)
    state = fetched(indexed).state_dict()
    for wrong in ({"inside": 51}, {"inside": -1}, {"inside": "1"}, {"next": 1}, {"next": 1 << 70}, {"inside": 1.5}):
        broken = through_json(state)
        broken["lanes"]["0"]["position"] = [wrong, {}]
        pipe = fetched(indexed)
        with pytest.raises(wp.StateError):  # noqa: PT012 - when it is loaded, or when it is used
            pipe.load_state_dict(broken)
            next(iter(pipe))


def test_fields(indexed, tmp_path):
    pipe = wp.SampleList(indexed).fetch_samples(fields=["jpg;cls"])
    assert {tuple(sample) for sample in pipe} == {("__key__", "__url__", "cls")}
    path = tmp_path / "a.tar"
    with wp.TarWriter(path) as writer:
        for number in range(6):
            writer.write({"__key__": f"{number}", "txt" if number % 3 else "cls": str(number)})
    index_shards(path, offsets=True)
    with pytest.raises(wp.SampleError, match=r"sample '0' of shard .*a.tar has none of the fields .*'txt'"):
        list(wp.SampleList(path).fetch_samples(fields=["txt"]))
    pipe = wp.SampleList(path).fetch_samples(fields=["txt"], on_error="skip")
    assert keys_of(pipe) == ["1", "2", "4", "5"]
    assert pipe.counts()["skipped"] == 2


def test_damage_is_an_error_in_its_place(tmp_path):
    path = make_shards(tmp_path, shards=1, samples=9)[0]
    index_shards(path, offsets=True)
    whole, offsets = content(path), struct.unpack("<10Q", content(f"{path}.idx"))
    with open(path, "wb") as file:
        file.write(whole[: offsets[4] + 6] + b"\xff" * 40 + whole[offsets[4] + 46 :])
    pipe = wp.SampleList(path).fetch_samples()
    items = iter(pipe)
    assert keys_of(next(items) for _ in range(4)) == [f"{number:08d}" for number in range(4)]
    with pytest.raises(wp.ShardError, match="checksum") as caught:
        next(items)
    assert ".." not in str(caught.value).replace(str(path), "")
    state = pipe.state_dict()
    skipping = wp.SampleList(path).fetch_samples(on_error="skip")
    skipping.load_state_dict(state)
    assert keys_of(skipping) == [f"{number:08d}" for number in range(6, 9)], "5 may begin before its offset"
    limited = wp.SampleList(path).fetch_samples(on_error="skip", max_errors=0)
    with pytest.raises(wp.ShardError, match="max_errors=0"):
        list(limited)
    check_resume(lambda: wp.SampleList(path, shuffle=True).fetch_samples(on_error="skip"))


@pytest.mark.parametrize("change", ["longer", "shorter", "other"])
def test_a_shard_that_is_another_than_the_indexed_one(change, tmp_path):
    """The error comes in its place; the samples before it are yielded."""
    urls = make_shards(tmp_path, shards=2, samples=5)
    index_shards(urls, offsets=True)
    samples = {"longer": 6, "shorter": 4, "other": 5}[change]
    fields = {"other": lambda rng, number: b"x" * 2000} if change == "other" else ("txt", "cls")
    os.replace(make_shards(tmp_path / "new", shards=1, samples=samples, fields=fields)[0], urls[1])
    items = iter(wp.SampleList(urls).fetch_samples())
    assert keys_of(next(items) for _ in range(5)) == [f"{number:08d}" for number in range(5)]
    with pytest.raises(wp.ShardError, match=r"shard-000001.tar.* --offsets"):
        list(items)


def test_an_index_without_samples_of_a_shard_with_some(tmp_path):
    path = make_shards(tmp_path, shards=1, samples=5)[0]
    index_shards(path, offsets=True)
    os.truncate(f"{path}.idx", 8)
    with pytest.raises(wp.ShardError, match=r"cannot be used.* --offsets"):
        wp.SampleList(path)


def test_wrong_options_are_refused(indexed):
    for options in ({"index": False}, {"index": 3}, {"shuffle": 1}, {"block_samples": 0}, {"seed": 1 << 64}):
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            wp.SampleList(indexed, **options)
    for options in ({"connections": 0}, {"readahead_bytes": 0}, {"on_error": "ignore"}):
        with pytest.raises((TypeError, ValueError), match=next(iter(options))):
            wp.SampleList(indexed).fetch_samples(**options)


def test_pickles_and_lengths(indexed, stream):
    pipe = fetched(indexed)
    assert len(pipe) == pipe.sample_count() == len(wp.SampleList(indexed)) == 50
    assert len(pipe.batch_samples(8)) == 7
    assert list(pickle.loads(pickle.dumps(pipe))) == list(pipe)
    none = fetched(indexed[3])
    assert len(none) == 0
    assert list(none) == []


def test_an_index_counts_the_samples(indexed, stream, tmp_path):
    """No index of offsets is read for it; one that has another number is an error."""
    index_shards(indexed, tmp_path / "index.json")
    assert list(fetched(tmp_path / "index.json")) == list(fetched(indexed))
    other = make_shards(tmp_path / "other", shards=2, samples=4)
    index_shards(other, tmp_path / "other" / "index.json")
    pipe = fetched(tmp_path / "other" / "index.json", shuffle=False)
    assert len(pipe) == 8
    with pytest.raises(wp.ShardError, match="shard-000000.tar has no index of offsets"):
        list(pipe)
    index_shards(other, offsets=True)
    assert len(list(pipe)) == 8
    os.replace(f"{indexed[0]}.idx", tmp_path / "kept")
    try:
        os.link(f"{other[0]}.idx", f"{indexed[0]}.idx")
        with pytest.raises(wp.ShardError, match=r"has 4 samples, and the shard was counted with 7.* --offsets"):
            list(fetched(tmp_path / "index.json", shuffle=False))
    finally:
        os.replace(tmp_path / "kept", f"{indexed[0]}.idx")


def test_in_a_pipeloader_with_lanes(indexed, stream):
    """A filter changes the number of samples, so each lane has its own part of the order."""

    def make():
        pipe = fetched(indexed).filter_samples(odd)
        return wp.PipeLoader(pipe, batch_size=3, num_workers=2, collate=list)

    whole = [keys_of(batch) for batch in make()]
    assert sorted(flat(whole)) == [key for key in keys_of(stream) if int(key) % 2]
    loader = make()
    items = after(loader, 3)
    state = loader.state_dict()
    del items
    again = make()
    again.load_state_dict(state)
    assert [keys_of(batch) for batch in again] == whole[3:]
    other = wp.PipeLoader(fetched(indexed).filter_samples(odd), batch_size=4, lanes=3, collate=list)
    other.load_state_dict(state)
    assert sorted(flat(map(keys_of, other))) == sorted(flat(whole[3:]))


def odd(sample):
    return int(sample["__key__"]) % 2


# Remote shards


def test_remote_samples(web, indexed, stream):
    """The other stores are in test_lazy_resume.py."""
    for path in indexed:
        if data := content(f"{path}.idx"):
            web.put(f"d/{os.path.basename(path)}.idx", data)
    far = [web.put(f"d/{os.path.basename(path)}", content(path)) for path in indexed]

    def make():
        return wp.SampleList(far, shuffle=True).fetch_samples()

    whole = list(make())
    assert sorted(keys_of(whole)) == keys_of(stream)
    assert all(bare(sample) == bare(stream[int(sample["__key__"])]) for sample in whole)
    pipe = make()
    items = after(pipe, 21)
    again = make()
    again.load_state_dict(pipe.state_dict())
    assert list(again) == list(items) == whole[21:]


def test_remote_requests(web, tmp_path):
    """One for each sample or run of neighbours, so many at once, and a second one where one has
    stalled; a resume asks for no sample that was yielded.
    """
    path = make_shards(tmp_path, shards=1, samples=64, fields={"bin": lambda rng, _: rng.randbytes(200_000)})[0]
    index_shards(path, offsets=True)
    url = web.put("d/a.tar", content(path))
    web.put("d/a.tar.idx", content(f"{path}.idx"))

    def reads():
        return [request for request in web.faults.stats(web.reads) if not request.path.endswith(".idx")]

    web.faults.rules({"match": web.reads, "skip": 40, "times": 1, "latency": 3600})
    pipe = wp.SampleList(url, shuffle=True, seed=1).fetch_samples(connections=8)
    assert len(list(pipe)) == 64
    alone, hedged = len(reads()), Chain(as_stage(pipe)).network.hedged
    assert 1 <= hedged <= 0.05 * 64
    assert 50 < alone <= 64 + hedged
    assert max(request.live for request in reads()) <= 8 + hedged
    blocks = wp.SampleList(url, shuffle=True, seed=1, block_samples=16).fetch_samples(connections=2)
    assert len(list(blocks)) == 64
    assert len(reads()) - alone <= 8
    whole = list(wp.SampleList(url, shuffle=True, seed=1).fetch_samples())
    items = after(pipe := wp.SampleList(url, shuffle=True, seed=1).fetch_samples(), 60)
    state = pipe.state_dict()
    assert list(items) == whole[60:]  # so that no request of this pipe is under way
    before = len(reads())
    again = wp.SampleList(url, shuffle=True, seed=1).fetch_samples()
    again.load_state_dict(state)
    assert list(again) == whole[60:]
    assert len(reads()) - before <= 4
