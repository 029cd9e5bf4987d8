"""PipeLoader.skip(): batches are left out, and the rest is the old rest."""

import itertools
from collections import Counter

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pipelines import flat, keys_of, loaded, samples, through_json, wanted

import wds_pipes as wp
from wds_pipes.core.digest import from_text, subtract
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

PIPES = {
    "list": lambda urls: wp.SampleList(urls, shuffle=True, seed=5).fetch_samples(),
    "list, buffer": lambda urls: wp.SampleList(urls, shuffle=True, seed=5).fetch_samples().shuffle_buffer(3),
    "counted": lambda urls: samples(urls, index=True).shuffle_buffer(3),
    "filtered": lambda urls: samples(urls).shuffle_buffer(3).filter_samples(wanted),
}
TOTAL = 50


def made(urls, kind, rank=0, ranks=1, *, size=2, **options):
    options = {"epoch_end": "exact", "lanes": ranks * options.get("mix_lanes", 1) * 2, "collate": keys_of, **options}
    return wp.PipeLoader(PIPES[kind](urls), batch_size=size, rank=rank, world_size=ranks, **options)


def left(loader, limit=None):
    """The batches that an iteration yields, and the counts at its end."""
    return list(itertools.islice(loader, limit)), loader.counts()


def accounted(counts):
    return sum(counts.get(name, 0) for name in ("delivered", "filtered", "skipped", "dropped"))


CASE = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(sorted(PIPES)),
        "end": st.sampled_from(["exact", "drop", "pad", "loop"]),
        "ranks": st.integers(1, 2),
        "parts": st.sampled_from([1, 1, 2]),
        "first": st.integers(0, 2),
        "count": st.integers(1, 2),
        "again": st.booleans(),
    }
)
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


@settings(max_examples=4, **QUIET)
@given(case=CASE)
def test_the_rest_is_the_old_rest(case, indexed):
    check_case(indexed, **case)


@pytest.mark.slow
@settings(max_examples=20, **QUIET)
@given(case=CASE)
def test_the_rest_is_the_old_rest_in_many_settings(case, indexed):
    check_case(indexed, **case)


def check_case(urls, *, kind, end, ranks, parts, first, count, again):
    """In the middle of an epoch or at its beginning, twice, and after a resume."""
    end = "exact" if kind == "filtered" and end != "loop" else end
    limit, totals, merged = 12 if end == "loop" else None, Counter(), []
    options = {"epoch_end": end, "mix_lanes": parts, "size": 2 * parts}
    for rank in range(ranks):
        whole, _ = left(made(urls, kind, rank, ranks, **options), limit)
        assume(first + count + again < len(whole))  # the filter may leave a rank few batches
        loader = made(urls, kind, rank, ranks, **options)
        assert list(itertools.islice(loader, first)) == whole[:first]
        loader.skip(batches=count)
        if again:
            loader = loaded(made(urls, kind, rank, ranks, **options), through_json(loader.state_dict()))
            loader.skip(batches=1)
        at = first + count + again
        assert loader.state_dict()["step"] == at
        assert kind == "filtered" or len(loader.plan(at)) == len(whole[at])
        merged.append(loader.state_dict())
        rest, counts = left(loader, limit and limit - at)
        assert rest == whole[at:]
        totals += Counter(counts)
    assert totals["skipped"] == totals["left_out"] == (count + again) * 2 * parts * ranks
    if end != "loop":
        assert accounted(totals) == TOTAL + totals["padded"]
        other = loaded(made(urls, kind), merged) if end == "exact" and parts == 1 else None
        if other is not None:  # on another number of ranks
            rest, counts = left(other)
            assert accounted(counts) == TOTAL
            assert counts["left_out"] == totals["left_out"]
            assert len(set(flat(rest))) == len(flat(rest)) == TOTAL - counts["filtered"] - first * 2 * ranks - counts[
                "skipped"
            ]  # fmt: skip


def test_a_list_is_not_read(tmp_path):
    urls = make_shards(tmp_path, shards=2, samples=10)
    index_shards(urls, offsets=True)
    loader = made(urls, "list")
    expected = list(made(urls, "list"))[7:]
    for url in urls:
        (tmp_path / url).rename(f"{url}.gone")
    loader.skip(batches=7)
    for url in urls:
        (tmp_path / f"{url}.gone").rename(url)
    assert list(loader) == expected


def test_skip_in_a_loop_that_goes_on(indexed):
    """The iterator in use ends; the next one continues the epoch, and a cut has its length."""
    loader, whole = made(indexed, "filtered"), list(made(indexed, "filtered"))
    batches = iter(loader)
    next(batches)
    loader.skip(batches=2)
    with pytest.raises(wp.StateError, match="replaced"):
        next(batches)
    loader.set_epoch(0)
    assert list(loader) == whole[3:]
    endless = made(indexed, "counted", epoch_end="loop").with_epoch(batches=4)
    whole = list(itertools.islice(made(indexed, "counted", epoch_end="loop"), 9))
    assert list(itertools.islice(endless, 1)) == whole[:1]
    endless.skip(batches=5)
    assert endless.remaining() == 3
    assert list(endless) == whole[6:9]


@pytest.mark.parametrize("kind", ["list", "counted", "filtered"])
def test_something_must_be_left(kind, indexed):
    loader = made(indexed, kind)
    whole = list(made(indexed, kind))
    next(iter(loader))
    before = loader.state_dict()
    for count in len(whole) - 1, len(whole) + 5:
        with pytest.raises(ValueError, match="would leave nothing of epoch 0"):
            loader.skip(batches=count)
    assert loader.state_dict() == before
    loader.skip(batches=len(whole) - 2)
    assert list(loader) == whole[-1:]
    with pytest.raises(ValueError, match="batches must be"):
        loader.skip(batches=0)


@pytest.mark.parametrize("kind", ["list", "counted", "filtered"])
def test_the_ledger_has_what_was_returned(kind, indexed):
    """On all ranks together, not what was left out; also after a resume."""

    def all_ranks(**options):
        return [made(indexed, kind, rank, 2, epoch_end="exact", ledger=True, **options) for rank in range(2)]

    def merged(loaders):
        return wp.merge_states([through_json(loader.state_dict()) for loader in loaders])

    def digests(loaders):
        """After each step."""
        found = [from_text(merged(loaders)["ledger"]["epoch"])]
        for _ in zip(*(itertools.islice(loader, 5) for loader in loaders), strict=True):
            found.append(from_text(merged(loaders)["ledger"]["epoch"]))
        return found

    whole, loaders = digests(all_ranks()), all_ranks()
    for loader in loaders:
        next(iter(loader))
        loader.skip(batches=2)
    left_out, state = subtract(whole[3], whole[1]), merged(loaders)
    expected = [subtract(digest, left_out) for digest in whole[3:]]
    assert digests([loaded(loader, state) for loader in all_ranks()])[: len(expected)] == expected
    assert digests(loaders)[: len(expected)] == expected


def bad(sample):
    if sample["__key__"].endswith("7"):
        raise ValueError("bad")
    return sample


def test_an_error_leaves_the_position_as_it_was(indexed):
    pipe = samples(indexed).map_samples(bad)
    loader = wp.PipeLoader(pipe, batch_size=2, epoch_end="exact")
    before = loader.state_dict()
    with pytest.raises(ValueError, match="bad"):
        loader.skip(batches=20)
    assert loader.state_dict() == before
    first = next(iter(loader))
    assert first["__key__"] == next(iter(wp.PipeLoader(pipe, batch_size=2, epoch_end="exact")))["__key__"]


def test_a_state_taken_while_batches_are_read_is_that_before_the_call(urls):
    """Such as by a signal handler: the call has one result, or none."""
    states = []

    def noting(sample):
        states.append(through_json(loader.state_dict()))
        return sample

    loader = wp.PipeLoader(samples(urls).map_samples(noting), batch_size=2, epoch_end="exact")
    before = through_json(loader.state_dict())
    loader.skip(batches=3)
    assert states[5] == before
    assert len(states) > 5
    assert loader.state_dict()["step"] == 3


@pytest.mark.slow
def test_with_workers(indexed):
    for kind in PIPES:
        whole, loader = list(made(indexed, kind)), made(indexed, kind, num_workers=2)
        batches = iter(loader)
        next(batches)
        loader.skip(batches=3)
        state = through_json(loader.state_dict())
        assert list(loader) == whole[4:]
        assert list(loaded(made(indexed, kind, num_workers=1), state)) == whole[4:]
        loader.close()
