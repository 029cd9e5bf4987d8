"""SampleList and fetch_samples: the samples of group_by_key, in one global order."""

import pickle
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import FIFTY, after, keys_of, resumed, samples, through_json
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


def test_the_state_is_one_number(indexed):
    _, again = resumed(lambda: fetched(indexed), 33)
    state = again.state_dict()
    assert state["lanes"]["0"]["position"] == [{"inside": 33}, {}]
    assert "sample 33 done" in wp.describe_state(state)
    assert list(again) == list(fetched(indexed))[33:]


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


# Remote shards


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
    assert len(reads()) - alone <= 8 + Chain(as_stage(blocks)).network.hedged
    whole = list(wp.SampleList(url, shuffle=True, seed=1).fetch_samples())
    local = wp.SampleList(path, shuffle=True, seed=1).fetch_samples()
    assert list(map(bare, whole)) == list(map(bare, local))
    items = after(pipe := wp.SampleList(url, shuffle=True, seed=1).fetch_samples(), 60)
    state = pipe.state_dict()
    assert list(items) == whole[60:]  # so that no request of this pipe is under way
    before = len(reads())
    again = wp.SampleList(url, shuffle=True, seed=1).fetch_samples()
    again.load_state_dict(state)
    assert list(again) == whole[60:]
    assert len(reads()) - before <= 4 + Chain(as_stage(again)).network.hedged
