"""PipeLoader over a SampleList: one global order, the same on any number of ranks and workers,
before and after any resume.
"""

import itertools
import re
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from orders import Order, Phase, play
from pipelines import after, flat, keys_of, loaded, through_json
from torch.utils.data import DataLoader

import wds_pipes as wp
from wds_pipes import nodes
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")
SHARDS = {"some": [7, 0, 5, 12, 9], "few": [3, 2], "one": [1]}


@pytest.fixture(scope="session")
def indexed(tmp_path_factory):
    """Lists of shards with indexes, by name."""
    found = {}
    for name, counts in SHARDS.items():
        found[name] = make_shards(tmp_path_factory.mktemp(name), shards=len(counts), samples=counts)
        index_shards(found[name], offsets=True)
    return found


ORDER = st.builds(
    Order, st.booleans(), st.sampled_from([1, 1, 4]), st.integers(0, 3), st.sampled_from(["dicts", "tuples"])
)
PHASE = st.builds(
    Phase,
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    workers=st.integers(0, 3),
    size=st.sampled_from([1, 2, 3, 5]),
    end=st.sampled_from(["exact", "drop", "pad"]),
    cut=st.sampled_from([0, 1, 1, 2, 3, 5]),
    own=st.booleans(),
)
# "alike": only the workers change, "same": ranks x batch size stays the same
CHANGES = st.sampled_from(["any", "alike", "same"])


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    shards=st.sampled_from(sorted(SHARDS)), order=ORDER, phases=st.lists(PHASE, min_size=1, max_size=6), changes=CHANGES
)
@example(  # as many lanes as before, and a number of batches that the ranks do not divide
    shards="some",
    order=Order(True, 1, 0, "dicts"),
    phases=[Phase(2, 2, 2, "exact", 1), Phase(4, 1, 2, "exact", 0)],
    changes="any",
)
def test_random_histories(shards, order, phases, changes, indexed):
    """The sequence of the ranks' batches is that of an uninterrupted run in one process."""
    if changes == "alike":
        phases = [phases[0]._replace(workers=phase.workers, cut=phase.cut, own=phase.own) for phase in phases]
    elif changes == "same":
        sizes = [(1, 6), (2, 3), (3, 2), (6, 1)]
        phases = [
            phase._replace(ranks=sizes[place % 4][0], size=sizes[place % 4][1], end=phases[0].end)
            for place, phase in zip(itertools.count(phases[0].ranks), phases, strict=False)
        ]
    outcome = play(indexed[shards], sum(SHARDS[shards]), order, phases)
    event(f"{outcome.changes} changes")
    assert outcome.found == outcome.expected
    assert (outcome.lost, outcome.repeated) == (0, 0)


def test_worker_processes(indexed):
    """Real workers, more of them, fewer, and none."""
    order = Order(True, 1, 2, "tuples")
    for phases in (
        [Phase(2, 3, 2, "drop", 2), Phase(2, 1, 2, "drop", 1, own=True), Phase(1, 2, 4, "drop", 0)],
        [Phase(1, 2, 3, "exact", 4), Phase(3, 2, 1, "pad", 0)],
    ):
        outcome = play(indexed["some"], sum(SHARDS["some"]), order, phases, processes=True)
        assert outcome.found == outcome.expected


N = sum(SHARDS["some"])


def source(urls, **options):
    return wp.SampleList(urls, **{"shuffle": True, "seed": 5, **options}).fetch_samples()


def loader(urls, pipe=lambda pipe: pipe, *, size=2, of=None, **options):
    made = pipe(source(urls, **(of or {})))
    return wp.PipeLoader(made, **{"batch_size": size, "collate": keys_of, "epoch_end": "exact", **options})


def in_turn(ranks):
    """The samples of the batches of all ranks, step by step."""
    return [key for step in itertools.zip_longest(*ranks, fillvalue=()) for batch in step for key in batch]


@pytest.fixture(scope="module")
def urls(indexed):
    return indexed["some"]


@pytest.fixture(scope="module")
def order(urls):
    """The keys of the first epoch of ``source``."""
    return keys_of(source(urls))


class OneOfOne(wp.Stage):
    keeps_count = True
    scope = "item"

    def run(self):
        for sample in self.source.items:
            yield dict(sample)


class OneOfOneBatch(OneOfOne):
    """It does not say that it holds nothing, so no step of the chain runs over several segments."""

    def run(self):
        yield from self.source.items


class OneOfAny(OneOfOne):
    """It does not say that it keeps the order."""

    scope = "window"


class OfTheLane(OneOfOne):
    scope = "lane"


def own(kind, pipe):
    return wp.register_stage(kind)(pipe)


@pytest.mark.parametrize(
    "steps",
    [
        lambda pipe: pipe.decode_by_ext().select_fields("cls").map_samples(dict),
        lambda pipe: pipe.rename_fields({"text": "txt"}).map_fields({"text": len}).map(dict),
        lambda pipe: own(OneOfOne, pipe),
    ],
)
def test_steps_that_keep_the_order(steps, urls, order, caplog):
    for ranks in (1, 3):
        ranks = [loader(urls, steps, rank=rank, world_size=ranks, lanes=2 * ranks) for rank in range(ranks)]
        assert in_turn(ranks) == order
    assert not caplog.records


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (lambda pipe: pipe.shuffle_buffer(4), r"shuffle_buffer\(\) may change their order"),
        (lambda pipe: pipe.filter_samples(len).to_tuple("cls"), r"filter_samples\(\) may change their number"),
        (lambda pipe: pipe.decode_by_ext(on_error="skip"), r"decode_by_ext\(on_error='skip'\) changes their number"),
        (lambda pipe: pipe.map_samples(dict, may_drop=True), r"map_samples\(\) may change their number"),
        (lambda pipe: pipe.filter(len), r"torch.Filter\(\) may change their number"),
        (lambda pipe: pipe.then(iter, keeps_count=True), r"then\(\) may change their order"),
        (lambda pipe: pipe.repeat(2), r"repeat\(\) changes their number"),
        (lambda pipe: pipe.take_samples(9), r"take_samples\(\) may change their number \(of SampleList.*\)"),
        (lambda pipe: own(OneOfAny, pipe), r"one_of_any\(\) may change their order"),
        (lambda pipe: own(OfTheLane, pipe), r"of_the_lane\(\) may change their order"),
    ],
)
def test_other_steps_are_named_once_and_lanes_are_used(steps, said, urls, caplog):
    wp.PipeLoader(steps(source(urls)), batch_size=2, epoch_end="exact", collate="list")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert re.fullmatch(
        rf"the batches depend on the numbers of ranks and workers, since .* SampleList into lanes: {said}\.",
        caplog.records[0].getMessage(),
    )


def test_independent_lanes_by_choice_are_not_warned_of(urls, caplog):
    for options in ({"epoch_end": "loop"}, {"mix_lanes": 2}):
        made = loader(urls, **options)
        next(iter(made))
        assert "place" not in made.state_dict().get("partition", {})
    assert not caplog.records


@pytest.mark.parametrize("batches", ["own", "nested", "torch", "before a step"])
@pytest.mark.parametrize("lanes", [1, 2])
def test_batches_of_the_pipe(batches, lanes, urls):
    """A step after them draws the same for the same batch, and a smaller last batch is the last of
    all.
    """

    def run(lanes, ranks=2, cut=None, end="exact"):
        pipe = source(urls)
        if batches == "nested":
            pipe = pipe.batch_samples(2, collate=keys_of).batch_samples(2, collate=flat)
        else:
            pipe = pipe.batch(4).collate(keys_of) if batches == "torch" else pipe.batch_samples(4, collate=keys_of)
            pipe = own(OneOfOneBatch, pipe) if batches == "before a step" else pipe
        pipe = pipe.map_samples(lambda keys, rng: [*keys, int(rng.integers(1 << 30))])
        options = {"lanes": lanes, "epoch_end": end}
        loaders = [wp.PipeLoader(pipe, rank=rank, world_size=ranks, **options) for rank in range(ranks)]
        if cut is not None:
            for made in loaders:
                made.load_state_dict(cut)
        return loaders

    whole = [*run(1, 1)[0]]
    assert len(whole) == N // 4 + 1
    loaders = run(2 * lanes)
    assert in_turn(loaders) == flat(whole)
    loaders = run(2 * lanes)
    items = [after(made, 2) for made in loaders]
    cut = [through_json(made.state_dict()) for made in loaders]
    assert in_turn(items) == flat(whole[4:])
    assert in_turn(run(3, 3, cut)) == flat(whole[4:])
    loaders = run(2 * lanes, end="drop")
    assert in_turn(loaders) == flat(whole[: N // 8 * 2])


def test_with_epoch_goes_on_over_the_ends_of_epochs(urls, order):
    """Also where the global batch changes: the numbers of samples are those of all ranks."""

    def run(ranks, size, state=None):
        made = [
            loader(urls, size=size, rank=rank, world_size=ranks, epoch_end="drop").with_epoch(samples=24)
            for rank in range(ranks)
        ]
        for one in made if state else ():
            one.load_state_dict(state)
        return made

    second = source(urls)
    second.set_epoch(1)
    expected = [*order[: N // 6 * 6], *keys_of(second)[: N // 6 * 6]]
    made = run(1, 6)
    assert [len(made[0])] == [4]
    got = in_turn(made)
    assert got == expected[:24]
    made = run(3, 2, made[0].state_dict())
    items = [after(one, 2) for one in made]
    states = [one.state_dict() for one in made]
    assert {one.remaining() for one in made} == {2}
    assert in_turn(items) == expected[36:48]
    made = run(2, 3, states)
    assert [one.remaining() for one in made] == [2, 2]
    assert in_turn(made) == expected[36:48]
    assert in_turn(made) == expected[48:60] + order_of(urls, 2)[:12]


def order_of(urls, epoch):
    pipe = source(urls)
    pipe.set_epoch(epoch)
    return keys_of(pipe)


def test_fewer_samples_than_lanes_without_end(indexed):
    made = loader(indexed["one"], size=1, lanes=3, epoch_end="loop")
    with pytest.raises(wp.ShardError, match=r"lane . of 3 .* fewer samples than lanes"):
        after(made, 20)


def test_lengths_counts_and_stats(urls):
    for end, steps, counts in (
        ("drop", [5, 5, 5], {"delivered": 30, "dropped": N - 30}),
        ("pad", [6, 6, 6], {"delivered": 36, "padded": 36 - N}),
        ("exact", [6, 6, 5], {"delivered": N}),
    ):
        made = [loader(urls, epoch_end=end, rank=rank, world_size=3, lanes=6) for rank in range(3)]
        assert [len(one) for one in made] == [one.remaining() for one in made] == steps
        assert [len(list(one)) for one in made] == steps
        total = Counter()
        for one in made:
            total.update(one.counts())
            assert one.stats()["samples"] == one.counts()["delivered"]
        assert {name: count for name, count in total.items() if count} == counts
    one = loader(urls, size=4, drop_last=True)
    assert len(one) == len(list(one)) == N // 4
    assert one.counts()["dropped"] == N % 4
    one.set_epoch(3)
    assert in_turn([one]) == order_of(urls, 3)[: N // 4 * 4]


# States


def a_state(urls, count=3, **options):
    made = loader(urls, **options)
    after(made, count)
    return through_json(made.state_dict())


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ({"seed": 6}, "seed=5, this pipeline has seed=6"),
        ({"block_samples": 4}, r"sample_list\(shuffle=True, block_samples=4\)"),
        ({"shuffle": False}, "step 1 of its pipeline was sample_list"),
    ],
)
def test_a_state_of_another_order_is_refused(of, said, urls):
    with pytest.raises(wp.StateError, match=said):
        loader(urls, of=of).load_state_dict(a_state(urls))


def test_a_state_of_one_rank(urls, order):
    """It fits its rank with any number of workers; with other batches or ranks it is refused."""
    options = {"rank": 1, "world_size": 3}
    state = a_state(urls, 2, lanes=6, **options)
    for lanes in (3, 6, 9):
        made = loaded(loader(urls, lanes=lanes, **options), state)
        assert flat(made) == [key for start in range(14, N, 6) for key in order[start : start + 2]]
    for other in (
        {"size": 3, **options},
        {"epoch_end": "pad", **options},
        {"rank": 0, "world_size": 3},
        {"rank": 1, "world_size": 2},
    ):
        with pytest.raises(wp.StateError, match=r"state of (one rank|rank 1 of 3 alone).* load merge_states\(states\)"):
            loader(urls, **other).load_state_dict(state)


@pytest.mark.parametrize(
    "options", [{"epoch_end": "loop"}, {"mix_lanes": 2}, {"pipe": lambda pipe: pipe.decode_by_ext(on_error="skip")}]
)
@pytest.mark.parametrize("count", [0, 3, N // 2 + 1])
def test_the_rest_of_a_global_order_in_lanes(options, count, urls, order):
    """So broken samples can be skipped after all: what is left comes once, in another order."""
    like = {"pipe": lambda pipe: pipe.decode_by_ext()} if "pipe" in options else {}
    state = a_state(urls, count, **like)
    made = loaded(loader(urls, lanes=2, **options), state)
    done = 2 * count if count * 2 < N else 0
    rest = [key for batch in itertools.islice(made, (N - done) // 2) for key in batch]
    assert len(rest) >= N - done - 1
    assert len(set(rest)) == len(rest)
    assert not {*order[:done]} & {*rest}


def test_a_state_in_lanes_does_not_fit_a_global_order(urls):
    state = a_state(urls, epoch_end="loop", lanes=2)
    with pytest.raises(wp.StateError, match="this loader has one global order"):
        loader(urls).load_state_dict(state)
    loader(urls).load_state_dict(a_state(urls, 0, epoch_end="loop", lanes=2))  # nothing has begun


def test_the_state_says_where_it_is(urls, order):
    made = loader(urls, size=4, lanes=1)
    assert made.state_dict()["partition"] == {"place": 0}
    made.load_state_dict(a_state(urls, 3, lanes=2))
    assert made.state_dict()["partition"] == {"place": 6}
    assert made.counts()["delivered"] == 6
    next(iter(made))
    assert "sample 4 done" in wp.describe_state(made.state_dict())
    assert next(iter(loader(urls))) == order[:2]


@pytest.mark.parametrize(
    "edit",
    [
        {"partition": {"place": N + 1}},
        {"partition": {"place": N - 3}},
        {"batch_size": 0},
        {"batch_size": 1 << 60},
        {"lane_count": 3},
        *({"lanes": lanes} for lanes in ({"0": 9}, {"0": 0}, {"1": 1}, {"1": 1 << 64})),
    ],
)
def test_damaged_states(edit, urls):
    """Refused by a loader with this number of lanes, with another, and by one without an order."""
    state = a_state(urls, 5, lanes=2)
    for lane, delivered in edit.get("lanes", {}).items():
        state["lanes"][lane]["delivered"] = delivered
    state |= {name: value for name, value in edit.items() if name != "lanes"}
    for lanes, end in ((2, "exact"), (4, "exact"), (2, "loop")):
        with pytest.raises(wp.StateError):
            loader(urls, lanes=lanes, epoch_end=end).load_state_dict(state)


@pytest.mark.parametrize("inside", [4, 7])
def test_a_place_that_is_not_that_of_the_batches(inside, urls):
    """Samples would be lost or repeated."""
    state = a_state(urls, 5, lanes=2)
    [first, *_] = state["lanes"]["0"]["position"][0]["chains"][0]["position"]
    assert first == {"inside": 6}
    first["inside"] = inside
    with pytest.raises(wp.StateError, match=f"lane 0 gave 6 samples, and the next one is number {inside}"):
        loader(urls, lanes=2).load_state_dict(state)


class OneBefore(OneOfOne):
    """Its position is that of the item before, which it reads again."""

    @dataclass(slots=True)
    class At:
        again: bool = False

    def run(self):
        again, self.before = self.at.again, self.source.mark()
        for item in self.source.items:
            if not again:
                self.at.again = True
                yield item
            again, self.before = False, self.source.mark()

    def mark(self):
        return self._own(self.at), self.before


@pytest.mark.parametrize("count", [1, 4])
def test_a_step_whose_position_is_earlier(count, urls, order):
    pipe = lambda pipe: own(OneBefore, pipe)  # noqa: E731
    made = loader(urls, pipe=pipe, lanes=2)
    after(made, count)
    again = loaded(loader(urls, pipe=pipe, lanes=2), through_json(made.state_dict()))
    assert in_turn([again]) == order[2 * count :]


# Random numbers


def numbered(sample, rng):
    return *sample, int(rng.integers(1 << 40))


def test_tuples_draw_the_same_on_any_number_of_workers(urls):
    """In a pipe, a dataset and a DataLoader, as in one process; each another number."""
    pipe = source(urls).to_tuple("__key__").map_samples(numbered)
    whole = list(pipe)
    assert len({number for _, number in whole}) == N
    pipe = source(urls).to_tuple("__key__").map_samples(numbered)
    loaded = DataLoader(pipe.as_dataset(), batch_size=None, num_workers=2, collate_fn=tuple)
    assert sorted(loaded) == sorted(whole)
    assert list(nodes_of(urls)) == whole


def nodes_of(urls):
    node = nodes.FetchSamples(nodes.SampleList(urls, shuffle=True, seed=5))
    return nodes.MapSamples(nodes.ToTuple(node, "__key__"), numbered)


def test_in_lanes_tuples_draw_by_their_number_in_the_lane(urls):
    """So each still has its own number."""
    pipe = source(urls).shuffle_buffer(3).to_tuple("__key__").map_samples(numbered)
    found = flat(wp.PipeLoader(pipe, batch_size=2, collate="list", lanes=3, epoch_end="exact"))
    assert len({number for _, number in found}) == len({key for key, _ in found}) == N
