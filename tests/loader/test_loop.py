"""epoch_end="loop": equal steps with any steps, and a ledger of each epoch that balances."""

import itertools
import json
import random
from collections import Counter

import pytest
from pipelines import flat, loaded, samples, stamps, through_json, wanted

import wds_pipes as wp
from wds_pipes.testing import make_shards

SIZES = [7, 5, 8, 9, 6, 7, 8, 5]
KEYS = [f"{number:08d}" for number in range(sum(SIZES))]


class PairSamples(wp.Stage):
    """Batches of two (functional name: ``pair_samples``)."""

    items_per_batch = 2

    def batches_of(self, count):
        return -(-count // 2)

    def run(self):
        while pair := list(itertools.islice(self.source.items, 2)):
            yield pair


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("loop"), shards=len(SIZES), samples=SIZES)


PIPES = {
    "filtered": lambda urls: samples(urls).shuffle_buffer(4).stamp_epoch().filter_samples(wanted),
    "counted": lambda urls: samples(urls, samples_per_shard=SIZES).shuffle_buffer(4).stamp_epoch(),
    "interleaved": lambda urls: samples(urls).interleave_shards(2).stamp_epoch().filter_samples(wanted),
    "mixed": lambda urls: wp.mix({"a": samples(urls[:4]), "b": samples(urls[4:])}, exhausted="drop").stamp_epoch(),
    "batched": lambda urls: samples(urls).stamp_epoch().map_samples(lambda sample: sample),
}
OTHERS = {"resampled": lambda urls: samples(urls, resampled=True).stamp_epoch().filter_samples(wanted)}
KEPT = {"filtered": wanted, "interleaved": wanted}


def loader(urls, kind="filtered", **options):
    return wp.PipeLoader(
        (PIPES | OTHERS)[kind](urls), **{"batch_size": 4, "collate": stamps, "epoch_end": "loop", "lanes": 2, **options}
    )


def taken(source, count):
    """The next batches of a loader, which is then closed."""
    batches = list(itertools.islice(source, count))
    source.close()
    return batches


def epochs_of(state):
    """The epochs of the data in which the lanes of a state are."""
    found = []
    for lane in state["lanes"].values():
        entries = [entry for entry in lane["position"] or [] if "segment" in entry or "opened" in entry]
        found.append(state["epoch"] + (entries[0].get("epoch", 0) if entries else 0))
    return found


@pytest.mark.parametrize("kind", PIPES)
def test_each_epoch_has_each_sample_once_over_any_history_of_ranks_and_lanes(kind, urls):
    chance = random.Random(kind)
    keys = {key for key in KEYS if KEPT.get(kind, lambda sample: True)({"__key__": key})}
    complete = 0
    for _ in range(3):
        state, seen = None, Counter()
        for _ in range(chance.randint(1, 5)):
            ranks, size, steps = chance.choice([1, 2, 3]), chance.choice([1, 3, 4]), chance.randint(1, 25)
            lanes = ranks * (1 if kind == "mixed" else chance.choice([1, 2]))
            sources = [
                loader(urls, kind, rank=rank, world_size=ranks, lanes=lanes, batch_size=size) for rank in range(ranks)
            ]
            for source in sources:
                batches = taken(source if state is None else loaded(source, state), steps)
                assert [len(batch) for batch in batches] == [size] * steps
                seen.update(itertools.chain(*batches))
            state = wp.merge_states(through_json([source.state_dict() for source in sources]))
        assert set(seen.values()) == {1}
        for epoch in range(min(epochs_of(state))):
            complete += 1
            assert {key for at, key in seen if at == epoch} == keys
    assert complete > 0


@pytest.mark.parametrize("kind", PIPES | OTHERS)
def test_a_resume_continues_the_stream(kind, urls):
    expected = taken(loader(urls, kind), 45)
    source = loader(urls, kind)
    for step, batch in enumerate(itertools.islice(source, 44)):
        assert batch == expected[step]
        if step % 6 == 1:
            again = loaded(loader(urls, kind), through_json(source.state_dict()))
            assert taken(again, 1) == expected[step + 1 : step + 2]


def test_workers_change_nothing(urls):
    expected = taken(loader(urls), 30)
    source = loader(urls, num_workers=2, multiprocessing_context="fork")
    assert taken(source, 11) == expected[:11]
    again = loaded(loader(urls, num_workers=2, multiprocessing_context="fork"), source.state_dict())
    assert taken(again, 19) == expected[11:]


def test_with_epoch_cuts_equal_epochs_of_full_batches(urls):
    """Also though the filter keeps another share on each rank, and samples are not counted."""
    for rank in range(2):
        source = loader(urls, rank=rank, world_size=2).with_epoch(samples=80)
        expected = taken(loader(urls, rank=rank, world_size=2), 30)
        assert len(source) == 10
        epochs = [list(source) for _ in range(3)]
        assert [len(batches) for batches in epochs] == [10, 10, 10]
        assert list(itertools.chain(*epochs)) == expected
        assert source.counts()["delivered"] == 120


def test_broken_samples_are_skipped_and_max_errors_counts_by_epoch(urls):
    def broken(sample):
        if sample["__key__"].endswith("3"):
            raise ValueError("broken")
        return sample

    bad = sum(key.endswith("3") for key in KEYS)

    def make(most):
        pipe = samples(urls).map_samples(broken, on_error="skip", max_errors=most)
        return wp.PipeLoader(pipe, batch_size=4, collate="list", epoch_end="loop", lanes=1)

    source = make(bad)
    steps = 3 * len(KEYS) // 4
    assert len(taken(source, steps)) == steps  # three epochs, with as many errors in each
    assert source.counts()["skipped"] > 2 * bad
    with pytest.raises(wp.WdsError, match=f"max_errors={bad - 1}"):
        taken(make(bad - 1), steps)


def test_a_state_of_another_end_of_epochs(urls):
    """A loop continues an epoch of another kind; the other way round, only within one epoch."""
    exact = loader(urls, epoch_end="exact", lanes=3)
    begun = list(itertools.islice(exact, 5))
    source = loaded(loader(urls, lanes=2), exact.state_dict())
    seen = Counter(itertools.chain(*begun, *taken(source, 20)))
    assert set(seen.values()) == {1}
    assert {key for epoch, key in seen if epoch == 0} == {key for key in KEYS if wanted({"__key__": key})}

    early = loader(urls, lanes=2)
    begun = taken(early, 3)
    exact = loaded(loader(urls, epoch_end="exact", lanes=3), early.state_dict())
    assert Counter(key for batch in [*begun, *exact] for _, key in batch) == Counter(
        key for key in KEYS if wanted({"__key__": key})
    )
    with pytest.raises(wp.StateError, match="in several epochs of the data.*epoch_end='loop'"):
        loader(urls, epoch_end="exact", lanes=3).load_state_dict(source.state_dict())


def test_what_is_shown_of_a_loop(urls):
    source = loader(urls)
    with pytest.raises(TypeError, match=r"has no end: call with_epoch\(\)"):
        len(source)
    assert source.remaining() is None
    for _ in range(40):
        taken(source, 1)
        shown = wp.describe_state(source.state_dict())
        assert shown.startswith(f"epoch {source.epoch}, ")
        assert "None" not in shown
    low = min(epochs_of(source.state_dict()))
    assert low > 0
    assert source.stats()["epoch"] == low
    assert f"in epoch {low} of the data" in shown


def test_the_state_stays_small(urls):
    """Also over many repartitions, and over many epochs."""
    source, sizes = loader(urls, lanes=3), []
    for step in range(36):
        taken(source, 40 + step if step < 6 else 0)  # then repartitions of epochs that no lane has begun
        state = through_json(source.state_dict())
        sizes.append(len(str(state)))
        source = loaded(loader(urls, lanes=1 + step % 3), state)
    assert min(epochs_of(state)) > 10
    assert max(sizes) < 8192
    assert sizes[-1] < 2 * sizes[6]


@pytest.mark.parametrize(
    ("lanes", "group", "keeps", "error", "message"),
    [
        (9, {}, True, wp.ShardError, "lane 8 of 9 found no sample in 10 epochs in a row.*fewer shards than"),
        (1, {}, False, wp.ShardError, "lane 0 of 1 found no sample in 10 epochs"),
        (1, {"fields": ["jpge"]}, True, wp.SampleError, "(have|had) none of the fields"),
    ],
)
def test_without_samples_it_is_an_error(urls, *, lanes, group, keeps, error, message):
    """No endless loop: no shards in a lane, filters that keep nothing, names that do not exist."""
    pipe = wp.ShardList(urls).open_shards().load_tar().group_by_key(**group).filter_samples(lambda sample: keeps)
    with pytest.raises(error, match=message):
        taken(wp.PipeLoader(pipe, batch_size=2, epoch_end="loop", lanes=lanes), 10)


@pytest.mark.parametrize(
    ("pipe", "said"),
    [
        (lambda pipe: pipe.batch_samples(4).shuffle_buffer(3), r"shuffle_buffer\(\) after batch_samples.* drop_last="),
        (
            lambda pipe: pipe.batch_samples(4).take_samples(3),
            r"take_samples\(\) after batch_samples\(\) ends with each",
        ),
        (wp.register_stage(PairSamples), r"full, and pair_samples\(\) ends .*scope = .item."),
    ],
)
def test_batches_that_would_not_be_full_are_refused(pipe, said, urls):
    """The step that ends them, or may hold samples, is named."""
    with pytest.raises(ValueError, match=said):
        wp.PipeLoader(pipe(samples(urls)), epoch_end="loop")


MANY_LANES = {"sizes": None, "history": [[None, [[0, 900_000]]]], "remainders": [], "counts": {}}
DAMAGED = {
    "a later epoch is no partition": (lambda state: state["partition"].update(later=[7]), "its partition is 7"),
    "a later epoch with more lanes than can be": (
        lambda state: state["partition"].update(later=[MANY_LANES] * 1000),
        "at most 1000000 can be",
    ),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_state(damage, urls):
    source = loader(urls, lanes=3)
    taken(source, 30)
    other = loaded(loader(urls, lanes=2), source.state_dict())
    taken(other, 2)
    state = through_json(other.state_dict())
    state["partition"] = json.loads(state["partition"])
    assert state["partition"]["later"]
    edit, message = DAMAGED[damage]
    edit(state)
    with pytest.raises(wp.StateError, match=message):
        loader(urls, lanes=2).load_state_dict(state)


BATCHING = {
    "torch's batch": lambda pipe: pipe.batch(4).map(stamps),
    "torch's batch and collate": lambda pipe: pipe.map(dict).batch(4).collate(stamps),
    "batches taken apart": lambda pipe: (
        pipe.batch_samples(3, collate="list").unbatch_samples().batch_samples(4, collate="list").map_samples(stamps)
    ),
    "batches of batches": lambda pipe: (
        pipe.batch_samples(2, collate="list").batch_samples(2, collate="list").map_samples(flat).map_samples(stamps)
    ),
}


@pytest.mark.parametrize("kind", BATCHING)
def test_batches_are_full_whatever_makes_them(kind, urls):
    """Also over the ends of epochs, and after a repartition; the ledger balances."""

    def make(lanes):
        return wp.PipeLoader(BATCHING[kind](samples(urls).stamp_epoch()), epoch_end="loop", lanes=lanes)

    state, seen = None, Counter()
    for lanes, steps in ((2, 11), (3, 9), (1, 17), (2, 20)):
        source = make(lanes).with_epoch(samples=4 * steps)
        batches = list(source) if state is None else taken(loaded(source, state), steps)
        assert [len(batch) for batch in batches] == [4] * steps
        seen.update(itertools.chain(*batches))
        state = through_json(source.state_dict())
        source.close()
    assert set(seen.values()) == {1}
    assert {key for epoch, key in seen if epoch == 0} == set(KEYS)


def never(batch):
    return False


@pytest.mark.parametrize("leave_out", ["filter_samples", "filter", "map_samples"])
def test_steps_after_batches_that_leave_nothing_are_an_error(leave_out, urls):
    pipe = samples(urls).batch_samples(4, collate="list")
    if leave_out == "map_samples":
        pipe = pipe.map_samples(lambda batch: 1 / 0, on_error="skip")
    else:
        pipe = getattr(pipe, leave_out)(never)
    with pytest.raises(wp.ShardError, match=r"made no batch in 1\d epochs.*the steps after batch_samples"):
        taken(wp.PipeLoader(pipe, epoch_end="loop"), 1)
    rare = samples(urls).batch_samples(500, collate="list").filter_samples(lambda batch: True)
    assert len(taken(wp.PipeLoader(rare, epoch_end="loop"), 1)[0]) == 500  # of nine epochs


@pytest.mark.parametrize(("workers", "cut"), [(0, None), (2, 4)])
def test_iterations_continue_the_stream_after_a_break_and_a_close(workers, cut, urls):
    """There is no other epoch to begin: the lanes have begun the next ones already."""
    expected = taken(loader(urls), 30)
    source = loader(urls, num_workers=workers, multiprocessing_context="fork" if workers else None)
    if cut:
        source.with_epoch(batches=cut)
    found = []
    for count in (3, 4, 0, 1, 7, 4):
        found += itertools.islice(source, count)
        if count == 7:
            source.close()
    source.set_epoch(9)  # only before the first iteration
    found += itertools.islice(source, 3)
    source.close()
    assert found == expected[: len(found)]
    assert len(found) == (19 if cut else 22)
    late = loader(urls)
    late.set_epoch(9)
    assert {epoch for batch in itertools.islice(late, 3) for epoch, _ in batch} == {9}


def test_set_epoch_does_not_leave_a_loaded_state(urls):
    """Trainers call it with the number of their own epoch."""
    source = loader(urls)
    taken(source, 20)
    state = source.state_dict()
    expected = taken(source, 3)
    for lanes in (2, 3):
        again = loaded(loader(urls, lanes=lanes), state)
        again.set_epoch(7)
        batches = taken(again, 3)
        assert batches == expected or (lanes == 3 and max(epoch for batch in batches for epoch, _ in batch) < 7)


@pytest.mark.parametrize(("before", "after"), [((2, 4), (1, 4)), ((1, 4), (4, 2))])
def test_the_rest_of_an_epoch_on_other_ranks_and_batches(before, after, urls):
    """with_epoch(samples=96), stopped in its middle, has 48 samples left, on any ranks."""
    (ranks, size), state = before, []
    for rank in range(ranks):
        source = loader(urls, rank=rank, world_size=ranks, lanes=ranks, batch_size=size).with_epoch(samples=96)
        assert len(list(itertools.islice(source, 48 // ranks // size))) == 48 // ranks // size
        state.append(source.state_dict())
    for states in (state, wp.merge_states(state)):
        (ranks, size), left = after, 0
        for rank in range(ranks):
            source = loaded(
                loader(urls, rank=rank, world_size=ranks, lanes=ranks, batch_size=size).with_epoch(samples=96), states
            )
            assert source.remaining() == 48 // ranks // size
            left += sum(map(len, source))
            assert sum(map(len, source)) == 96 // ranks
        assert left == 48


def test_lanes_that_are_far_apart(tmp_path):
    """One lane has a shard of one sample, in each epoch again: the other lanes catch up after a
    repartition, and a lane that has nothing in repartitioned epochs is no error.
    """
    urls = make_shards(tmp_path, shards=2, samples=[1, 40])

    def make(lanes):
        pipe = samples(urls, shuffle=False).stamp_epoch()
        return wp.PipeLoader(pipe, batch_size=2, collate=stamps, epoch_end="loop", lanes=lanes)

    source, seen = make(2), Counter()
    seen.update(itertools.chain(*taken(source, 60)))
    assert max(epochs_of(source.state_dict())) > 50
    for step in range(12):
        state = through_json(source.state_dict())
        assert len(str(state)) < 20000
        source = loaded(make(1 + step % 2), state)
        seen.update(itertools.chain(*taken(source, 15)))
    assert set(seen.values()) == {1}
    low = min(epochs_of(source.state_dict()))
    assert low > 3
    assert all(sum(at == epoch for at, _ in seen) == 41 for epoch in range(low))
    state = source.state_dict()
    next(lane["position"][0] for lane in state["lanes"].values() if lane["position"])["epoch"] = 10**9
    with pytest.raises(wp.StateError, match="epochs of the data apart, too many"):
        make(5).load_state_dict(state)


@pytest.mark.parametrize("steps", [60, 90])
def test_lanes_that_all_stand_in_a_later_epoch(steps, urls):
    """On other lanes, what is left of it is divided evenly: all begin the next one in the same
    round.
    """
    source = loader(urls, "counted", batch_size=2)
    seen = Counter(itertools.chain(*taken(source, steps)))
    state = source.state_dict()
    first = min(epochs_of(state))
    assert set(epochs_of(state)) == {first}
    again = loaded(loader(urls, "counted", batch_size=2, lanes=3), state)
    seen.update(itertools.chain(*taken(again, 3 * 8)))  # at most 15 samples of each lane were left
    assert set(seen.values()) == {1}
    assert set(epochs_of(again.state_dict())) == {first + 1}


def test_a_loop_of_counted_samples_that_ends_as_drop(urls):
    """What is left of a remainder is known, though the counts of a lane are of all its epochs."""

    def make(end, lanes):
        return loader(urls, "counted", epoch_end=end, lanes=lanes, batch_size=2)

    source, begun = make("loop", 2), []
    for lanes, steps in ((3, 6), (2, 4)):
        begun += taken(source, steps)
        source = loaded(make("loop", lanes), source.state_dict())
    last = loaded(make("drop", 2), source.state_dict())
    given = Counter(itertools.chain(*begun, *last))
    assert set(given.values()) == {1}
    assert last.counts()["dropped"] == len(KEYS) - len(given)
