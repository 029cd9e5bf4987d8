"""shuffle_buffer after shards with offsets: a resume that reads nothing again, exact at every cut,
also of states that were saved without offsets; and parts of a shard, which begin at their first
sample.
"""

import itertools
import os
import struct

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import FIFTY, after, draw, flat, keys_of, resumed, samples, through_json
from remote import content
from tars import pairs, put, tar

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.testing import check_resume, make_shards, same

quick = settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)


def shuffled(urls, size=3, *, group=None, load=None, reading=None, **options):
    """A pipe of raw samples through a shuffle buffer; by default with the offsets of its shards."""
    options = {"shuffle": True, "seed": 5, "index": True, **options}
    return (
        wp.ShardList(urls, **options)
        .open_shards(**(reading or {}))
        .load_tar(**(load or {}))
        .group_by_key(**(group or {}))
        .shuffle_buffer(size)
    )


STEPS = {
    "decode": lambda pipe: pipe.decode_by_ext(threads=2).shuffle_buffer(4),
    "fields": lambda pipe: pipe.select_fields("txt").rename_fields({"text": "txt"}).shuffle_buffer(4).take_samples(6),
    "tuple": lambda pipe: pipe.to_tuple("__key__", "cls").shuffle_buffer(4).batch_samples(3),
    "two": lambda pipe: pipe.shuffle_buffer(4).shuffle_buffer(3).map_samples(tuple),
    # the present way, since these may leave samples out or hold some
    "filter": lambda pipe: pipe.filter_samples(lambda sample: sample["__key__"][-1] != "3").shuffle_buffer(4),
    "map": lambda pipe: pipe.map_samples(draw).shuffle_buffer(4),
    "skip": lambda pipe: pipe.decode_by_ext(on_error="skip").shuffle_buffer(4),
    "interleave": lambda pipe: pipe.interleave_shards(2).shuffle_buffer(4),
    "repeat": lambda pipe: pipe.repeat(2).shuffle_buffer(4),
}


@pytest.mark.parametrize("steps", STEPS)
def test_steps_before_and_after(steps, tmp_path):
    """Exact at every cut, and the same samples as without offsets."""
    urls = make_shards(tmp_path, shards=3, samples=[4, 0, 5])
    index_shards(urls, offsets=True)
    make = lambda index: STEPS[steps](samples(urls, index=index))  # noqa: E731
    assert same(check_resume(lambda: make(True)), [list(pipe) for pipe in [make(None)] * 2])


LOADERS = {
    "pad": {"lanes": 3, "epoch_end": "pad"},
    "drop": {"lanes": 3, "epoch_end": "drop"},
    "loop": {"lanes": 2, "epoch_end": "loop"},
}


@pytest.mark.parametrize("options", LOADERS)
def test_in_a_loader(options, tmp_path):
    """Where lanes have parts of shards, are padded, and go on with the next epoch."""
    urls = make_shards(tmp_path, shards=3, samples=[6, 2, 9])
    index_shards(urls, offsets=True)

    def make(**more):
        return wp.PipeLoader(shuffled(urls, 4, **more).batch_samples(2), **LOADERS[options])

    counts = {"index": None, "samples_per_shard": [6, 2, 9]}
    if options == "loop":
        whole = list(itertools.islice(make(**counts), 40))
        for cut in range(0, 30, 4):
            _, again = resumed(make, cut)
            assert same(list(itertools.islice(again, 40 - cut)), whole[cut:]), cut
    else:
        assert same(check_resume(make)[0], list(make(**counts)))


def test_in_a_mix(tmp_path):
    one = make_shards(tmp_path / "a", shards=2, samples=[4, 3])
    other = make_shards(tmp_path / "b", shards=2, samples=[3, 4], seed=1)
    index_shards([*one, *other], offsets=True)
    check_resume(lambda: wp.mix({"a": shuffled(one, 3), "b": shuffled(other, 2)}, exhausted="stop").shuffle_buffer(3))


@given(data=st.data())
@settings(quick, max_examples=25)
def test_histories(data, indexed):
    """Cut several times in a row, with and without offsets, and onto other lanes."""
    size = data.draw(st.integers(1, 30), "size")
    count = data.draw(st.integers(1, len(indexed)), "shards")
    urls, samples = indexed[:count], FIFTY[:count]

    def make(offsets):
        if offsets:
            return shuffled(urls, size)
        return shuffled(urls, size, index=None, samples_per_shard=samples)

    whole = keys_of(make(False))
    done, state = [], None
    for cut in data.draw(st.lists(st.integers(0, 30), max_size=4), "cuts"):
        pipe = make(data.draw(st.booleans(), "offsets"))
        if state is not None:
            pipe.load_state_dict(state)
        done += keys_of(itertools.islice(iter(pipe), min(cut, len(whole) - len(done))))
        state = through_json(pipe.state_dict())
        assert pipe.counts()["filtered"] == pipe.counts()["skipped"] == 0
    last = make(data.draw(st.booleans(), "offsets at last"))
    if state is not None:
        last.load_state_dict(state)
    rest = keys_of(last)
    assert done + rest == whole or (len(done) == len(whole) and sorted(rest) == sorted(whole))


def same_with_offsets(urls, counts, size, cuts):
    """Whether each sample of an epoch comes once, over changes of the number of lanes, and the same
    batches come with and without offsets.
    """

    def make(lanes, offsets):
        more = {} if offsets else {"index": None, "samples_per_shard": counts}
        return wp.PipeLoader(shuffled(urls, size, **more).batch_samples(3, collate="list"), lanes=lanes)

    def history(flip):
        state, done = None, []
        for lanes, cut, offsets in [*cuts, (2, 1000, True)]:
            loader = make(lanes, offsets ^ flip)
            if state is not None:
                loader.load_state_dict(state)
            done += itertools.islice(iter(loader), cut)
            state = through_json(loader.state_dict())
            if state["epoch"]:
                break
        return [keys_of(batch) for batch in done]

    found = history(False)
    assert sorted(flat(found)) == [f"{number:08d}" for number in range(sum(counts))]
    assert found == history(True)


@given(data=st.data())
@settings(quick, max_examples=12)
def test_histories_of_a_loader(data, indexed):
    size = data.draw(st.integers(1, 20), "size")
    cuts = data.draw(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 8), st.booleans()), max_size=3), "cuts")
    same_with_offsets(indexed, FIFTY, size, cuts)


@pytest.mark.parametrize("cuts", [[(3, 3, False), (3, 3, False)], [(1, 4, False), (1, 1, True)]])
def test_a_shard_that_was_not_begun_is_divided_anew(cuts, indexed):
    """One whose turn comes next, when the last sample of the one before it has come."""
    same_with_offsets(indexed, FIFTY, 2, cuts)


@pytest.mark.parametrize("cuts", [[(5, 1, True), (2, 4, False)], [(5, 1, True), (4, 3, True), (3, 1, False)]])
def test_parts_of_one_shard_after_each_other(cuts, tmp_path):
    """After repartitions, a lane has several parts of a shard, with gaps between them."""
    urls = make_shards(tmp_path, shards=1, samples=40)
    index_shards(urls, offsets=True)
    same_with_offsets(urls, [40], 1, cuts)


# What is read


BLOB = 20_000


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Four shards of 400 samples of 20 kB, with offsets and an index.json."""
    folder = tmp_path_factory.mktemp("large")
    urls = make_shards(
        folder, shards=4, samples=400, fields={"bin": lambda rng, number: rng.randbytes(4) * (BLOB // 4)}
    )
    index_shards(urls, folder / "index.json", offsets=True)
    return urls


def reads_of_samples(counted):
    return [(offset, count) for offset, count in counted if count > 8 * 401]


@pytest.mark.parametrize("cut", [300, 1400])
def test_the_first_samples_after_a_resume(cut, large, counted):
    """No others are read, and each in one request; the source goes on only later."""
    urls = [f"counted://{url}" for url in large]
    whole = keys_of(shuffled(large, 1000))
    _, again = resumed(lambda: shuffled(urls, 1000), cut)
    counted.clear()
    assert keys_of(itertools.islice(again, 10)) == whole[cut : cut + 10]
    again.set_epoch(1)  # closes the shards
    assert sum(count for _, count in reads_of_samples(counted)) <= (10 + 64) * (BLOB + 2048)
    assert sum(count for _, count in counted) <= (10 + 64) * (BLOB + 2048) + 4 * 8 * 401


def test_bytes_are_counted(large):
    """Those of samples that are read when they leave, too."""
    pipe = shuffled(large, 200).batch_samples(10)
    loader = wp.PipeLoader(pipe, lanes=1)
    after(loader, 100)
    again = wp.PipeLoader(pipe, lanes=1)
    again.load_state_dict(loader.state_dict())
    list(itertools.islice(again, 9))  # the figures are sent with some of the batches
    stats = again.stats()
    read = stats["bytes_per_second"] * stats["samples"] / stats["samples_per_second"]
    assert 80 * BLOB <= read <= 100 * (BLOB + 2048)


def test_what_is_not_read_again_at_all(large, counted):
    """A run from a cut to the end reads each sample that is left once, whatever was held."""
    urls = [f"counted://{url}" for url in large]
    _, again = resumed(lambda: shuffled(urls, 100), 1300)
    counted.clear()
    assert len(list(again)) == 300
    assert sum(count for _, count in counted) <= 315 * (BLOB + 3072)


def test_parts_of_a_shard(large, counted):
    """Each of eight lanes reads its half of a shard, and little more."""
    urls = [f"counted://{url}" for url in large]
    pipe = wp.ShardList(urls, index=os.path.dirname(large[0])).open_shards().load_tar().group_by_key()
    loader = wp.PipeLoader(pipe.batch_samples(8), lanes=8)
    for _ in loader:
        pass
    half = 200 * (BLOB + 2048)
    begun = sorted(offset for offset, _ in counted if offset)
    assert sum(offset >= half - 300_000 for offset in begun) >= 4
    stats = loader.stats()
    read = stats["bytes_per_second"] * stats["samples"] / stats["samples_per_second"]
    assert read <= 1.02 * 8 * half


def test_a_remote_shard_with_more_samples_than_its_index(tmp_path):
    """An error, as in a whole run, also where only its samples are read and not the whole shard."""
    store = fsspec.filesystem("memory")
    for number in range(2):
        url = put(tmp_path / f"{number}.tar", tar(pairs(5)))
        index_shards(url, offsets=True)
        store.pipe(f"/grown/{number}.tar", content(url))
        store.pipe(f"/grown/{number}.tar.idx", content(f"{url}.idx"))
    urls = [f"memory://grown/{number}.tar" for number in range(2)]
    _, again = resumed(lambda: shuffled(urls, 100, shuffle=False), 1)
    store.pipe("/grown/1.tar", tar(pairs(6)))
    with pytest.raises(wp.ShardError, match="1.tar .*more samples.*wds-pipes index"):
        list(again)
    data = wp.IndexedShards(urls)
    for read in (
        lambda: data[9],
        lambda: data.__getitems__([8, 9]),
        lambda: list(wp.SampleList(urls).fetch_samples()),
    ):
        with pytest.raises(wp.ShardError, match="1.tar .*more samples.*wds-pipes index"):
            read()


# Other ways


def test_no_index_for_some_shards(indexed, tmp_path):
    """The present way, where a shard that is needed has none."""
    urls = [put(tmp_path / os.path.basename(url), content(url)) for url in indexed]
    index_shards(urls, tmp_path / "index.json", offsets=True)
    for number in (0, 2, 5):
        os.unlink(f"{urls[number]}.idx")
    check_resume(lambda: wp.PipeLoader(shuffled(urls, 4).batch_samples(4), lanes=2))


@pytest.mark.parametrize("fields", [["txt"], ["cls", "txt"]])
def test_only_some_fields(fields, tmp_path):
    """Of which some samples have none."""
    members = [(f"{n:03d}.{field}", b"x" * n) for n in range(30) for field in ("cls", "txt") if n % 7 or field == "cls"]
    url = put(tmp_path / "x.tar", tar(members))
    index_shards(url, offsets=True)
    epochs = check_resume(lambda: shuffled(url, 4, group={"fields": fields}))
    assert len(epochs[0]) == (25 if fields == ["txt"] else 30)


LOSSY = {
    "skip": {"load": {"on_error": "skip"}, "group": {"on_error": "skip"}},
    "warn": {"load": {"on_truncated": "ignore"}, "group": {"on_error": "skip"}},
    "decode": {"decode": {"on_error": "skip"}},
}


@pytest.mark.parametrize("kind", LOSSY)
def test_errors_are_raised_again_after_they_were_skipped(kind, tmp_path):
    """The state loads with the same options, and with others either goes on exactly or says what is
    wrong; what was skipped among the held samples shifts their numbers.
    """
    store, members = fsspec.filesystem("memory"), pairs(20, ("txt", "text"))
    if kind == "decode":
        members.insert(12, ("0005.json", b"{"))
    data = bytearray(tar(members))
    url = put(tmp_path / "a.tar", bytes(data))
    other = put(tmp_path / "b.tar", tar([(f"b{name}", text) for name, text in pairs(20, ("txt", "text"))]))
    index_shards([url, other], offsets=True)
    if kind == "skip":
        data[8192 + 148] ^= 1
    for name, path in (("a", url), ("b", other)):
        there = content(path) if name == "b" else bytes(data if kind != "warn" else data.rstrip(b"\0")[:-3000])
        store.pipe(f"/lossy {kind}/{name}.tar", there)
        store.pipe(f"/lossy {kind}/{name}.tar.idx", content(f"{path}.idx"))

    def make(*, decode=None, **options):
        pipe = wp.ShardList([f"memory://lossy {kind}/{name}.tar" for name in "ab"], index=True).open_shards()
        pipe = pipe.load_tar(**options.get("load", {})).group_by_key(**options.get("group", {}))
        return (pipe.decode_by_ext(**(decode or {})) if kind == "decode" else pipe).shuffle_buffer(6)

    whole = list(make(**LOSSY[kind]))
    assert 30 < len(whole) < 40
    raised = 0
    for cut in range(1, len(whole), 3):
        _, again = resumed(lambda: make(**LOSSY[kind]), cut)
        assert same(list(again), whole[cut:]), cut
        _, other = resumed(lambda: make(**LOSSY[kind]), cut, make)
        try:
            assert same(list(other), whole[cut:]), cut
        except wp.WdsError:
            raised += 1
    assert 0 < raised < len(whole) // 3


@pytest.mark.parametrize("lanes", [1, 3])
def test_joined_archives(lanes, tmp_path):
    """With samples of varied fields: the same as without an index."""

    def archive(letter, count):  # the first and last samples have all fields
        fields = ("cls", "txt", "json")
        return tar(
            [
                (f"{letter}{n:02d}.{field}", b"x" * n)
                for n in range(count)
                for field in fields[: 3 - n % 3 * (n < count - 1)]
            ]
        )

    url = put(tmp_path / "x.tar", archive("a", 9) + archive("b", 8) + archive("c", 7))
    index_shards(url, offsets=True, concatenated=True)

    def run(**more):
        pipe = shuffled(url, 4, load={"concatenated": True}, **more)
        return wp.PipeLoader(pipe.batch_samples(2, collate="list"), lanes=lanes)

    assert same(check_resume(run)[0], list(run(index=None, samples_per_shard=24)))


# Indexes


def test_counts_come_from_the_sizes_of_indexes(tmp_path):
    """Of many shards, without reading any; and from the indexes in another directory."""
    (tmp_path / "there").mkdir()
    for number in range(300):
        os.symlink("nowhere", tmp_path / f"{number:04d}.tar")
        with open(tmp_path / "there" / f"{number:04d}.tar.idx", "wb") as file:
            file.truncate(8 * (number % 7 + 1))
    pipe = wp.ShardList(f"{tmp_path}/{{0000..0299}}.tar", index=tmp_path / "there")
    loader = wp.PipeLoader(pipe.open_shards().load_tar().group_by_key().batch_samples(10), lanes=1)
    assert len(loader) == -(-sum(number % 7 for number in range(300)) // 10)


def test_a_shard_without_an_index_is_named(indexed, tmp_path):
    urls = [put(tmp_path / os.path.basename(url), content(url)) for url in indexed[:3]]
    index_shards(urls, offsets=True)
    os.unlink(f"{urls[1]}.idx")
    with pytest.raises(ValueError, match="shard .*000001.tar has no index of offsets.* --offsets"):
        wp.ShardList(urls, index=True)
    put(tmp_path / (os.path.basename(urls[1]) + ".idx"), b"12345")
    with pytest.raises(wp.ShardError, match="it has 5 bytes.* wds-pipes index"):
        wp.ShardList(urls, index=True)


@given(data=st.data())
@settings(quick, max_examples=20)
def test_damaged_and_stale_indexes(data, tmp_path_factory):
    """An error in words that names the command, or the samples that there are."""
    folder = tmp_path_factory.mktemp("stale")
    counts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3), "counts")
    urls = make_shards(folder, shards=len(counts), samples=counts)
    index_shards(urls, folder / "index.json", offsets=True)
    whole = list(shuffled(urls, 3, index=None, samples_per_shard=counts))
    lanes = data.draw(st.integers(1, 3), "lanes")
    path = f"{data.draw(st.sampled_from(urls), 'shard')}.idx"
    with open(path, "rb") as file:
        offsets = list(struct.unpack(f"<{os.path.getsize(path) // 8}Q", file.read()))
    place = data.draw(st.integers(0, len(offsets) - 1), "place")
    new = data.draw(st.integers(-3, 3).map(lambda by: max(0, offsets[place] + 512 * by)) | st.just(1 << 62), "new")
    offsets[place : place + data.draw(st.integers(0, 1), "instead of")] = data.draw(st.sampled_from([[], [new]]), "put")
    content = struct.pack(f"<{len(offsets)}Q", *offsets)
    with open(path, "wb") as file:
        file.write(content[: data.draw(st.integers(0, 2 * len(content)), "cut at")])

    def check(run):
        said = None
        try:
            found = run()
        except wp.StateError:
            return
        except wp.ShardError as error:
            said = str(error)
        if said is not None:
            assert "wds-pipes index" in said or "make the index again" in said, said
            return
        known = {sample["__key__"]: sample for sample in whole}
        assert sorted(known) == sorted(keys_of(found))
        assert all(same(sample, known[sample["__key__"]]) for sample in found)

    check(lambda: flat(wp.PipeLoader(shuffled(urls, 3).batch_samples(2, collate="list"), lanes=lanes)))
    cut = data.draw(st.integers(1, sum(counts)), "cut")
    pipe = shuffled(urls, 3, index=None, samples_per_shard=counts)
    first = list(itertools.islice(iter(pipe), cut))

    def resumed():
        again = shuffled(urls, 3)
        again.load_state_dict(pipe.state_dict())
        return [*first, *(again if cut < sum(counts) else [])]

    check(resumed)
