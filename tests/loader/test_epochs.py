"""How an epoch is partitioned by samples, how it ends on all ranks, and where
with_epoch cuts it.
"""

import copy
import itertools
import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import flat, keys_of, loaded, samples, shuffled, through_json

import wds_pipes as wp
from wds_pipes.testing import check_resume, make_shards

COUNTS = [3, 0, 5, 2, 9, 4, 6]
ALL = [f"{number:08d}" for number in range(sum(COUNTS))]


@pytest.fixture(scope="module")
def counted_urls(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("counted"), shards=len(COUNTS), samples=COUNTS)


def pipe(urls, **options):
    options = {"samples_per_shard": COUNTS, **options}
    return shuffled(urls, **options)


def loader(urls, *, pipe_options=None, **options):
    return wp.PipeLoader(pipe(urls, **(pipe_options or {})), **{"batch_size": 2, "collate": "list", **options})


class WholeLane(wp.Stage):
    """Its lanes are not divided."""

    keeps_count = True
    scope = "lane"

    def run(self):
        yield from self.source.items


wp.register_stage(WholeLane)


@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("end", ["drop", "exact"])
def test_a_lane_that_was_padded_twice_ends_otherwise(end, world, tmp_path):
    """A lane of two samples has begun its second round of repeats, and another one is in its
    middle.
    """
    [url] = make_shards(tmp_path, shards=1, samples=[12])

    def make(end, world=1, rank=0, **options):
        pipe = samples([url], samples_per_shard=12).whole_lane()
        options = {"batch_size": 5, "lanes": 6 if world == 1 else 4, **options}
        return wp.PipeLoader(pipe, collate="list", epoch_end=end, rank=rank, world_size=world, **options)

    begun = make("exact", batch_size=4, lanes=2)
    given = [next(iter(begun))]
    padded = loaded(make("pad"), through_json(begun.state_dict()))
    given += itertools.islice(padded, 2)
    repeats = [sample["__key__"] for sample in given[-1] if sample["__padding__"]]
    assert len(repeats) > len(set(repeats)) == 2
    state = through_json(padded.state_dict())
    padded.close()
    keys = [sample["__key__"] for sample in flat(given) if not sample.get("__padding__")]
    assert len(set(keys)) == len(keys) == 4 + 5 + 2
    rest = []
    for rank in range(world):
        loader = loaded(make(end, world, rank), [state])
        rest += keys_of(flat(loader))
    assert not set(keys) & set(rest)
    assert len(rest) == (end == "exact")


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 3), (3, 1)])
def test_what_is_left_comes_once_before_it_is_padded_on_other_lanes(before, after, counted_urls):
    source = loader(counted_urls, lanes=before, epoch_end="pad")
    given = flat(itertools.islice(source, 4))
    given += flat(loaded(loader(counted_urls, lanes=after, epoch_end="pad"), [through_json(source.state_dict())]))
    assert sorted(keys_of(sample for sample in given if not sample["__padding__"])) == ALL


@pytest.mark.parametrize("lanes", [3, 40])
def test_lanes_differ_by_one_sample_at_most_also_with_more_lanes_than_shards(lanes, counted_urls):
    source = loader(counted_urls, lanes=lanes, batch_size=1)
    assert sorted(keys_of(flat(source))) == ALL
    taken = [lane["delivered"] for lane in source.state_dict()["lanes"].values()]
    assert len(source) == 29
    assert source.counts()["delivered"] == 29
    assert taken == [0] * lanes  # the beginning of the next epoch


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("end", ["drop", "pad", "exact"])
def test_ranks_end_together_and_the_counts_add_up(end, ranks, batch_size, counted_urls):
    loaders = [
        loader(counted_urls, batch_size=batch_size, rank=rank, world_size=ranks, lanes=2 * ranks, epoch_end=end)
        for rank in range(ranks)
    ]
    given = [list(source) for source in loaders]
    assert [len(batches) for batches in given] == [len(source) for source in loaders]
    if end != "exact":
        assert len({len(batches) for batches in given}) == 1
        assert {len(batch) for batches in given for batch in batches} <= {batch_size}
    every = flat(flat(given))
    padded = [sample for sample in every if sample.get("__padding__")]
    counts = [source.counts() for source in loaders]
    total = {name: sum(count.get(name, 0) for count in counts) for name in ("delivered", "dropped", "padded")}
    assert total["padded"] == len(padded)
    assert total["delivered"] - total["padded"] + total["dropped"] == 29
    real = sorted(keys_of(sample for sample in every if not sample.get("__padding__")))
    assert len(set(real)) == len(real) == 29 - total["dropped"]
    assert all(("__padding__" in sample) == (end == "pad") for sample in every)


@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("end", ["drop", "pad", "exact"])
def test_every_cut_resumes(end, lanes, counted_urls):
    check_resume(lambda: loader(counted_urls, lanes=lanes, epoch_end=end))
    if lanes == 1:
        check_resume(lambda: loader(counted_urls, lanes=lanes, epoch_end=end, pipe_options={"resampled": True}))


@pytest.mark.parametrize(
    ("chain", "ask", "error", "message"),
    [
        (
            lambda urls: pipe(urls, samples_per_shard=None),
            lambda chain: next(iter(wp.PipeLoader(chain, rank=0, world_size=2))),
            ValueError,
            r"would not get the same number of batches.*samples_per_shard=.*epoch_end='exact'",
        ),
        (
            lambda urls: pipe(urls, samples_per_shard=None),
            lambda chain: len(wp.PipeLoader(chain)),
            TypeError,
            "number of batches is not known",
        ),
        (
            lambda urls: pipe(urls).filter_samples(bool),
            lambda chain: wp.PipeLoader(chain, epoch_end="drop"),
            ValueError,
            r"filter_samples\(\)",
        ),
        (
            lambda urls: pipe(urls).decode_by_ext(on_error="skip"),
            lambda chain: wp.PipeLoader(chain, epoch_end="drop"),
            ValueError,
            r"decode_by_ext\(on_error='skip'\)",
        ),
    ],
)
def test_ranks_without_numbers_of_samples_are_refused(chain, ask, error, message, counted_urls):
    with pytest.raises(error, match=message):
        ask(chain(counted_urls))


@pytest.mark.parametrize("wrong", [-1, 1])
def test_wrong_counts_are_an_error_with_the_shard(wrong, counted_urls):
    counts = [*COUNTS[:4], COUNTS[4] + wrong, *COUNTS[5:]]
    source = loader(counted_urls, lanes=1, pipe_options={"samples_per_shard": counts, "shuffle": False})
    with pytest.raises(wp.ShardError, match="samples_per_shard or the index says") as caught:
        list(source)
    assert caught.value.url == counted_urls[4]


def test_with_epoch_counts_samples(counted_urls):
    """The last batch of a lane may be smaller: its own number of samples counts, also after a
    resume in the middle of an epoch of with_epoch().
    """
    source = loader(counted_urls, lanes=2, batch_size=4, num_workers=2).with_epoch(samples=16)
    stream = [
        keys_of(batch) for plain in [loader(counted_urls, lanes=2, batch_size=4)] for _ in range(4) for batch in plain
    ]
    passes = [[keys_of(batch) for batch in source] for _ in range(5)]
    source.close()
    assert [batch for batches in passes for batch in batches] == stream[: sum(map(len, passes))]
    assert all(16 <= sum(map(len, batches)) < 16 + 4 for batches in passes)
    assert all(sum(map(len, batches[:-1])) < 16 for batches in passes)
    assert len({len(batches) for batches in passes}) > 1
    assert source.remaining() is None
    with pytest.raises(TypeError, match=r"a lane may be smaller: pass batches="):
        len(source)
    check_resume(lambda: loader(counted_urls, lanes=2, batch_size=4).with_epoch(samples=16), epochs=4)


@pytest.mark.parametrize(
    "options", [{"drop_last": True}, {"epoch_end": "drop"}, {"epoch_end": "pad"}, {"batch_size": 1}]
)
def test_with_epoch_of_whole_batches_is_exact(options, counted_urls):
    source = loader(counted_urls, lanes=2, **{"batch_size": 4, **options}).with_epoch(samples=16)
    passes = [list(source) for _ in range(5)]
    assert {sum(map(len, batches)) for batches in passes} == {16}
    assert {len(batches) for batches in passes} == {len(source)}


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("end", ["drop", "pad", "exact"])
@pytest.mark.filterwarnings("ignore:the pipe gives batches of")
def test_batches_of_batches_are_counted(end, drop_last, counted_urls):
    """batch_samples() in the pipe and batch_size= together: whole ones have the samples of both,
    and len() is right.
    """
    batched = pipe(counted_urls).batch_samples(2, collate="list", drop_last=drop_last)
    source = wp.PipeLoader(batched, batch_size=3, collate="list", lanes=2, epoch_end=end)
    found = [[len(inner) for inner in outer] for outer in source]
    assert len(found) == len(source)
    if end != "exact":
        assert {tuple(sizes) for sizes in found} == {(2, 2, 2)}
    counts = source.counts()
    assert counts["delivered"] == sum(map(sum, found))
    assert counts["delivered"] + counts["dropped"] - counts.get("padded", 0) == len(ALL)


def test_with_epoch_counts_over_all_ranks_and_resumes(counted_urls):
    check_resume(lambda: loader(counted_urls, lanes=2).with_epoch(batches=7), epochs=4)
    ranks = [loader(counted_urls, rank=rank, world_size=2).with_epoch(samples=12) for rank in range(2)]
    assert [len(list(source)) for source in ranks] == [3, 3]
    exact = loader(counted_urls, rank=0, world_size=2, epoch_end="exact")
    for source, options, message in (
        (ranks[0], {"batches": 3}, "cannot be divided by 2 ranks"),
        (ranks[0], {}, "one of them"),
        (exact, {"batches": 4}, "needs epoch_end='loop', or 'drop' or 'pad'"),
    ):
        with pytest.raises(ValueError, match=message):
            source.with_epoch(**options)


def test_statistics_are_flat_numbers(counted_urls):
    """Of what the last iterator returned and read, in all epochs of the data in which it took part,
    whatever is loaded then.
    """
    source = loader(counted_urls, lanes=2, num_workers=2)
    assert source.stats()["epoch"] == 0
    beginning = source.state_dict()
    items = iter(source)
    next(items)
    found = source.stats()
    assert all(type(value) is float for value in found.values())
    assert (found["batches"], found["samples"], found["lane_imbalance"]) == (1, 2, 1)
    assert 0 <= found["wait_share"] <= 1
    assert found["read_share"] + found["decode_share"] == pytest.approx(1)
    list(items)
    source.load_state_dict(beginning)
    source.set_epoch(4)
    assert source.stats()["samples"] == 29
    source.with_epoch(batches=20)
    for _ in range(3):
        samples = 0
        for batch in source:
            samples += len(batch)
            assert source.stats()["samples"] == samples
        found = source.stats()
        assert (found["batches"], 0 <= found["read_share"] <= 1) == (20, True)
        assert found["bytes_per_second"] > found["samples_per_second"] > found["batches_per_second"] > 0


def test_shares_of_reading_and_of_stalls(web, tmp_path):
    """Also when an epoch of with_epoch() is short: a stall is part of reading, whichever sample
    waits, and the time of a step after reading is not.
    """
    for shard in make_shards(tmp_path, shards=2, samples=5, fields={"bin": lambda rng, _: rng.randbytes(5_000)}):
        web.put(f"b/{os.path.basename(shard)}", Path(shard).read_bytes())
    web.faults.rules({"match": web.reads, "latency": 0.2})
    spent = []

    def work(sample):
        start = time.perf_counter()
        time.sleep(0.005)
        spent.append(time.perf_counter() - start)
        return sample["__key__"]

    pipe = (
        wp.ShardList(f"{web.url}/b/shard-{{000000..000001}}.tar")
        .open_shards()
        .load_tar()
        .group_by_key()
        .map_samples(work)
    )
    source = wp.PipeLoader(pipe, batch_size=5, collate="list")
    start = time.perf_counter()
    list(source)
    most, stats = time.perf_counter() - start, source.stats()
    assert stats["stall_seconds"] > 0  # the process may be elsewhere while the store waits
    assert stats["read_share"] >= stats["stall_share"] >= stats["stall_seconds"] / most
    assert stats["decode_share"] >= sum(spent) / most


def three(urls):
    return loader(urls).with_epoch(batches=3)


@pytest.mark.parametrize("seen", [True, False], ids=["to the end", "to the last batch"])
@pytest.mark.parametrize("goes_on", [lambda first: first, lambda first: loaded(copy.copy(first), first.state_dict())])
def test_with_epoch_continues_after_set_epoch(goes_on, seen, counted_urls):
    """Of the epoch of the data in which it was cut, as a state of it does; another epoch begins."""
    [_, second], begun = [list(one) for one in [three(counted_urls)] * 2], three(counted_urls)
    begun.set_epoch(1)
    for epoch, expected in ((0, second), (1, list(begun))):
        first = three(counted_urls)
        items = iter(first)
        assert len(list(itertools.islice(items, 9 if seen else 3))) == 3
        again = goes_on(first)
        again.set_epoch(epoch)
        assert list(again) == expected


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(["next", "next", "iter", "close", "load", "fresh", "cut", "ask"]), st.integers(1, 5)),
        max_size=14,
    )
)
def test_any_use_of_with_epoch_returns_one_stream(counted_urls, uses):
    """Iterate, close, load, call len() and cut again in any order: no batch is lost or repeated,
    and each epoch has the right number of batches.
    """
    size, given, found = 3, 0, []
    source = loader(counted_urls, lanes=2).with_epoch(batches=size)
    items = iter(source)
    for use, count in uses:
        if use == "next":
            for _ in range(count):
                batch = next(items, None)
                assert (batch is None) == (given == size)
                if batch is None:
                    items, given = iter(source), 0
                else:
                    found.append(keys_of(batch))
                    given += 1
        elif use == "ask":
            assert len(source) == size
            assert source.remaining() == (size - given if given < size else size)
            assert source.stats().get("samples", 0) >= 0
            assert source.counts()["delivered"] >= 0
        elif use == "cut" and given in (0, size):
            size, given = count, 0
            source.with_epoch(batches=size)
            items = iter(source)
        elif use == "iter" and given == size:
            items, given = iter(source), 0
        elif use in ("close", "load", "fresh"):
            state = through_json(source.state_dict())
            source.close() if use == "close" else None
            if use == "fresh":
                source = loader(counted_urls, lanes=2).with_epoch(batches=size)
            if use != "close" or 0 < given < size:
                source.load_state_dict(state)
            items, given = iter(source), given % size
    plain, stream = loader(counted_urls, lanes=2), []
    while len(stream) < len(found):
        stream += map(keys_of, plain)
    assert found == stream[: len(found)]


def test_epoch_end_may_change_when_an_epoch_is_repartitioned(counted_urls):
    """A run of one rank with epoch_end="exact" continues as two ranks with equal numbers of
    batches, also with other batch sizes.
    """
    first = wp.PipeLoader(pipe(counted_urls), batch_size=2, collate="list")
    items = iter(first)
    got = keys_of(flat(itertools.islice(items, 2)))
    state = through_json(first.state_dict())
    second = [
        wp.PipeLoader(pipe(counted_urls), batch_size=3, collate="list", rank=rank, world_size=2) for rank in range(2)
    ]
    batches = []
    for loader in second:
        loader.load_state_dict(state)
        left = loader.remaining()
        batches.append([keys_of(batch) for batch in loader])
        assert len(batches[-1]) == left
    assert len(batches[0]) == len(batches[1])
    got += [key for rank in batches for batch in rank for key in batch]
    assert len(set(got)) == len(got)
    assert len(ALL) - len(got) < 2 * 3
    next(iter(second[0]))
    half = wp.PipeLoader(pipe(counted_urls), batch_size=2, collate="list", rank=0, world_size=2)
    with pytest.raises(wp.StateError, match=r"epoch_end='drop', batches of 3 .*merge_states"):
        half.load_state_dict(second[0].state_dict())


def test_other_numbers_of_samples_with_the_same_sum_are_refused(counted_urls):
    """Lanes are partitioned by the number of each shard, not by their sum. A state fits the same
    numbers only, whatever their source.
    """
    other = [*COUNTS[:-1], COUNTS[-1] + 1]
    other[2] -= 1
    half = loader(counted_urls, lanes=2)
    given = keys_of(flat(itertools.islice(half, 3)))
    state = half.state_dict()
    for lanes in (2, 3):
        with pytest.raises(wp.StateError, match="gave the shards other numbers of samples"):
            loader(counted_urls, lanes=lanes, pipe_options={"samples_per_shard": other}).load_state_dict(state)
    again = loaded(loader(counted_urls, lanes=2), state)
    assert sorted(given + keys_of(flat(again))) == ALL


def test_numbers_of_samples_from_an_index_are_the_same(counted_urls, tmp_path):
    path = tmp_path / "index.json"

    def indexed(counts):
        facts = [
            {"url": url.rpartition("/")[2], "nsamples": count, "filesize": 0}
            for url, count in zip(counted_urls, counts)
        ]
        path.write_text(json.dumps({"shardlist": facts}))
        return loader(counted_urls, lanes=2, pipe_options={"samples_per_shard": None, "index": str(path)})

    state = loader(counted_urls, lanes=2).state_dict()
    indexed(COUNTS).load_state_dict(state)
    with pytest.raises(wp.StateError, match="other numbers of samples"):
        indexed(COUNTS[::-1]).load_state_dict(state)
    with pytest.raises(wp.StateError, match="other numbers of samples"):
        loader(counted_urls, lanes=2).load_state_dict(indexed(COUNTS[::-1]).state_dict())


def test_numbers_of_samples_may_change_where_lanes_do_not_depend_on_them(counted_urls):
    """A pipe without a loader partitions whole shards."""
    half = pipe(counted_urls)
    next(iter(half))
    for counts in (None, COUNTS[::-1]):
        pipe(counted_urls, samples_per_shard=counts).load_state_dict(half.state_dict())
    with pytest.raises(wp.StateError, match="an unknown number of samples, that of this .* 29"):
        loader(counted_urls, lanes=2).load_state_dict(
            loader(counted_urls, lanes=2, pipe_options={"samples_per_shard": None}).state_dict()
        )


@pytest.mark.parametrize("end", ["drop", "pad"])
@pytest.mark.parametrize("hold", [lambda pipe: pipe.shuffle_buffer(3), lambda pipe: pipe.interleave_shards(2)])
def test_equal_epochs_of_shuffled_batches_are_refused(hold, end, counted_urls):
    """Their batches were not full, all samples counted as dropped, and a resume on other lanes
    blamed the shards.
    """
    batches = (
        wp.ShardList(counted_urls, samples_per_shard=COUNTS)
        .open_shards()
        .load_tar()
        .group_by_key()
        .batch_samples(2, collate="list")
    )
    with pytest.raises(ValueError, match=r"put batch_samples\(\) last"):
        wp.PipeLoader(hold(batches), lanes=2, epoch_end=end)
    source = wp.PipeLoader(hold(batches), lanes=2)
    with pytest.raises(TypeError, match=r"put batch_samples\(\) last"):
        len(source)
    assert source.remaining() is None
    assert sorted(keys_of(flat(source))) == ALL


def test_the_remaining_length_is_right_after_a_change_of_batch_size(counted_urls):
    """Batches that were already returned were counted in the new size."""
    state, expected = None, len(ALL)
    for size in (2, 5, 1, 4):
        source = loader(counted_urls, lanes=2, batch_size=size)
        if state is not None:
            source.load_state_dict(state)
        batches = iter(source)
        expected -= sum(len(next(batches)) for _ in range(2))
        state, remaining = source.state_dict(), source.remaining()
    rest = list(batches)
    assert remaining == len(rest)
    assert sum(map(len, rest)) == expected


@pytest.mark.parametrize("kind", ["shuffle", "interleave", "mix"])
def test_samples_in_batches_before_a_shuffle_are_counted_once(kind, counted_urls):
    """Until the first position after a batch, the number of batches was counted as the number of
    samples, and stayed in the counts of a resume on other lanes.
    """

    def make(lanes):
        grouped = wp.ShardList(counted_urls).open_shards().load_tar().group_by_key()
        batches = (wp.mix({"a": grouped}) if kind == "mix" else grouped).batch_samples(3, collate="list")
        return wp.PipeLoader(
            batches.interleave_shards(2) if kind == "interleave" else batches.shuffle_buffer(3), lanes=lanes
        )

    for cut in range(1, 9):
        source = make(2)
        given = [batch for _, batch in zip(range(cut), source, strict=False)]
        assert source.counts()["delivered"] <= sum(map(len, given))
        resumed = loaded(make(1), source.state_dict())
        given += resumed
        assert sorted(keys_of(flat(given))) == ALL
        assert resumed.counts()["delivered"] == len(ALL)


@pytest.mark.parametrize("lanes", [2, 1])
def test_a_source_added_to_a_mix_where_lanes_have_ended_is_told(lanes, caplog, tmp_path):
    """They have no share of it in this epoch."""
    urls = make_shards(tmp_path, shards=4, samples=[1, 9, 4, 4])

    def mixed(lanes, **sources):
        pipes = {name: wp.ShardList(part).open_shards().load_tar().group_by_key() for name, part in sources.items()}
        return wp.PipeLoader(wp.mix(pipes, exhausted="drop"), lanes=lanes, epoch_end="exact")

    before, after = mixed(2, a=urls[:2]), mixed(lanes, a=urls[:2], new=urls[2:])
    items = iter(before)
    first = [next(items) for _ in range(3)]
    after.load_state_dict(through_json(before.state_dict()), mix="changed")
    assert (
        "source 'new' of mix() was added in the middle of an epoch in which 1 of the 2 lanes have ended" in caplog.text
    )
    assert len(first) + len(list(after)) == 14
