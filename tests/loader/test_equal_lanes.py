"""Lanes are equal after an epoch was repartitioned: what is left of an opened lane is shared by
several new lanes, each of which passes over what is not its own.
"""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import flat, keys_of, loaded, samples, through_json

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

COUNTS = [40, 7, 25, 0, 60, 31, 12, 50]
ALL = [f"{number:08d}" for number in range(sum(COUNTS))]
WINDOW, SIZE = 20, 4


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("shards"), shards=len(COUNTS), samples=COUNTS)


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """The same shards with indexes of offsets."""
    directory = tmp_path_factory.mktemp("indexed")
    made = make_shards(directory, shards=len(COUNTS), samples=COUNTS)
    index_shards(made, directory / "index.json", offsets=True)
    return str(directory / "index.json")


def shuffled(urls):
    counts = {} if isinstance(urls, str) else {"samples_per_shard": COUNTS}
    return samples(urls, **counts).shuffle_buffer(WINDOW)


def loaders(urls, ranks, lanes=None, make=shuffled, **options):
    options = {"batch_size": SIZE, "collate": "list", "epoch_end": "drop", "lanes": lanes and ranks * lanes, **options}
    return [wp.PipeLoader(make(urls), rank=rank, world_size=ranks, **options) for rank in range(ranks)]


def run(urls, history, **options):
    """Each run over some ranks, with lanes on each, up to a cut in batches of a rank (None: none):
    the batches of each rank, and the loaders of the last one.
    """
    found, states = [], None
    for ranks, lanes, cut in history:
        sources = loaders(urls, ranks, lanes, **options)
        for source in sources if states else ():
            source.load_state_dict(states)
        if states and sources[0].epoch:
            break  # that was all
        found.append([list(itertools.islice(source, cut)) for source in sources])
        states = [through_json(source.state_dict()) for source in sources]
    return found, sources


def keys(found):
    return [sample["__key__"] for ranks in found for sample in flat(flat(ranks)) if not sample.get("__padding__")]


HISTORIES = st.lists(
    st.tuples(st.integers(1, 7), st.integers(1, 3), st.integers(0, 12)), min_size=1, max_size=3
)  # each with the ranks, the lanes of each, and where it is cut


@given(
    history=HISTORIES,
    after=st.tuples(st.integers(1, 7), st.integers(1, 3)),
    how=st.tuples(st.sampled_from(["drop", "pad", "exact"]), st.booleans()),
)
@settings(max_examples=60, deadline=None)
def test_each_sample_comes_once_and_less_than_a_global_batch_is_lost(urls, index, history, after, how):
    (ranks, lanes), (end, offsets) = after, how
    source = index if offsets else urls
    found, stopped = run(source, history, epoch_end=end)
    states, got = [one.state_dict() for one in stopped], keys(found)
    last = [loaded(one, states) for one in loaders(source, ranks, lanes, epoch_end=end)]
    if last[0].epoch:
        return  # that was all
    divided, expected = "loads" in (last[0].state_dict().get("partition") or {}), [one.remaining() for one in last]
    rest = [list(one) for one in last]
    assert [len(batches) for batches in rest] == expected
    got += keys([rest])
    assert len(got) == len(set(got))
    lost = len(ALL) - len(got)
    assert lost == sum(one.counts()["dropped"] for one in last)
    assert lost == 0 or end == "drop"
    assert end == "exact" or len({*expected}) == 1
    if divided:
        assert lost < ranks * SIZE
        assert sum(sample.get("__padding__", False) for sample in flat(flat(rest))) < ranks * SIZE


@pytest.mark.parametrize("end", ["drop", "pad"])
@pytest.mark.parametrize("lanes", [1, 3, 8, 40])
@pytest.mark.parametrize("how", [(1, 8, 1), (2, 8, 1), (3, 4, 2), (2, 64, 1)])
def test_an_epoch_that_begins_loses_less_than_a_global_batch(how, lanes, end, urls):
    """Also with more lanes than there are batches."""
    ranks, size, parts = how
    sources = loaders(urls, ranks, lanes * parts, epoch_end=end, batch_size=size * parts, mix_lanes=parts)
    step = ranks * size * parts
    expected = len(ALL) // step if end == "drop" else -(-len(ALL) // step)
    assert [len(source) for source in sources] == [expected] * ranks
    given = [list(source) for source in sources]
    assert [len(batches) for batches in given] == [expected] * ranks
    came = keys([given])
    assert len(came) == len(set(came)) == min(len(ALL), expected * step)
    assert sum(source.counts()["dropped"] for source in sources) == len(ALL) - len(came)
    assert sum(source.counts().get("padded", 0) for source in sources) == expected * step - len(came)


@pytest.mark.parametrize("end", ["drop", "pad"])
@pytest.mark.parametrize(("before", "after"), [((2, 1), (3, 1)), ((1, 1), (7, 1)), ((3, 2), (4, 2)), ((6, 1), (5, 2))])
def test_all_ranks_have_as_many_batches_as_there_are_samples_for(before, after, end, urls):
    """Also where a shard is as large as what each rank gets."""
    for cut in range(0, sum(COUNTS) // (before[0] * SIZE), 4):
        sources = loaders(urls, *before, epoch_end=end)
        given = [list(itertools.islice(source, cut)) for source in sources]
        states = [source.state_dict() for source in sources]
        left, step = len(ALL) - len(keys([given])), after[0] * SIZE
        sources = [loaded(source, states) for source in loaders(urls, *after, epoch_end=end)]
        if "loads" not in (sources[0].state_dict().get("partition") or {}):
            continue
        expected = left // step if end == "drop" else -(-left // step)
        assert [source.remaining() for source in sources] == [expected] * after[0]
        rest = [list(source) for source in sources]
        assert [len(batches) for batches in rest] == [expected] * after[0]
        assert {len(batch) for batches in rest for batch in batches} <= {SIZE}
        assert sum(source.counts().get("dropped", 0) for source in sources) == max(0, left - expected * step)
        assert sum(source.counts().get("padded", 0) for source in sources) == max(0, expected * step - left)


def test_with_offsets_the_order_is_the_same_and_nothing_is_passed_over(urls, index):
    """There the position after what is passed over is computed."""
    history = [(1, 1, 20), (5, 1, 3), (3, 1, None)]
    read, computed = (run(source, history)[0] for source in (urls, index))
    assert [[keys_of(flat(batches)) for batches in ranks] for ranks in read] == [
        [keys_of(flat(batches)) for batches in ranks] for ranks in computed
    ]


def test_steps_after_the_shuffle_do_not_run_for_what_is_passed_over(urls):
    called = []

    def note(sample):
        called.append(sample["__key__"])
        return sample

    found, _ = run(urls, [(1, 1, 20), (5, 1, 3), (7, 1, None)], make=lambda urls: shuffled(urls).map_samples(note))
    ahead = (1 + 5) * SIZE  # a batch of each lane that was stopped
    assert len(keys(found)) <= len(called) <= len(ALL) + ahead


def test_what_nobody_has_begun_becomes_one_remainder_again(urls):
    """So an epoch that is loaded on changing numbers of ranks does not fall to pieces."""
    _, sources = run(urls, [(1, 1, 20)])
    states = [source.state_dict() for source in sources]
    pieces = []
    for ranks in (5, 7, 3, 6, 4):
        sources = [loaded(source, states) for source in loaders(urls, ranks)]
        states = [through_json(source.state_dict()) for source in sources]
        pieces.append(json.loads(states[0]["partition"])["remainders"])
    assert pieces == [pieces[0]] * 5
    assert len(pieces[0]) == 1


def test_which_samples_come_when_is_known(urls, index):
    """``plan`` and ``find``, also of the second repartition."""
    _, sources = run(index, [(1, 1, 20), (5, 1, 3), (3, 2, 0)])
    for source in sources:
        steps = [source.plan(step, keys=True) for step in range(source.remaining())]
        places = [source.find(sample.key) for batch in steps for sample in batch]
        ranks, places = {visit.rank for [visit] in places}, [(visit.step, visit.place) for [visit] in places]
        assert ranks == {source.rank.number}
        assert places == [*itertools.product(range(len(steps)), range(SIZE))]
        for step, batch in enumerate(source):
            assert [sample.key for sample in steps[step]] == keys_of(batch)


def test_the_ledger_of_runs_is_that_of_the_epoch(urls):
    ledgers = []
    for history in ([(1, 1, None)], [(1, 1, 20), (5, 1, 3), (3, 2, None)]):
        _, sources = run(urls, history, epoch_end="pad", ledger=True)
        [after] = loaders(urls, 1, epoch_end="pad", ledger=True)
        ledgers.append(loaded(after, [source.state_dict() for source in sources]).state_dict()["ledger"])
    assert ledgers[0] == ledgers[1]


def test_threads_and_an_interrupted_run(urls):
    """A state inside of a run, with samples in flight in threads, continues exactly there."""

    def make(urls):
        return shuffled(urls).map_samples(dict, threads=2)

    _, sources = run(urls, [(1, 1, 20), (5, 1, 0)], make=make)
    states = [source.state_dict() for source in sources]
    for rank in range(5):
        source = loaded(loaders(urls, 5, make=make)[rank], states)
        expected = [keys_of(batch) for batch in source]
        state, got = states, []
        while len(got) < len(expected):
            source = loaded(loaders(urls, 5, make=make)[rank], state)
            got.append(keys_of(next(iter(source))))
            state = through_json(source.state_dict())
            source.close()
        assert got == expected


def test_samples_that_are_left_out_later_count_in_their_run(urls):
    """A filter that an edit adds after the shuffle does not move the ends of runs."""
    gone = {*ALL[3::7]}
    found, sources = run(urls, [(1, 1, 20), (5, 1, 3)])
    states = [source.state_dict() for source in sources]
    got = keys(found)
    rest = []
    sources = [loaded(source, states, exclude=sorted(gone)) for source in loaders(urls, 5, epoch_end="exact")]
    rest += flat(flat(list(itertools.islice(source, 2)) for source in sources))
    states = [through_json(source.state_dict()) for source in sources]
    sources = [loaded(source, states, exclude=sorted(gone)) for source in loaders(urls, 3, epoch_end="exact")]
    rest += flat(flat(list(source) for source in sources))
    assert sorted(keys_of(rest)) == sorted(set(ALL) - set(got) - gone)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda partition: partition["remainders"].append(partition["remainders"][0]), "continues a lane twice"),
        (lambda partition: partition["loads"][0].__setitem__(0, 1), "other samples of its remainders"),
        (lambda partition: partition["remainders"][-1].__setitem__(6, 1 << 60), "more than the .* samples"),
    ],
)
def test_runs_that_cannot_be_are_refused(change, match, urls):
    _, sources = run(urls, [(1, 1, 20), (5, 1, 3), (3, 1, 0)])
    states = [through_json(source.state_dict()) for source in sources]
    for state in states:
        partition = json.loads(state["partition"])
        partition["remainders"].sort(key=len)  # the last one is a run
        change(partition)
        state["partition"] = json.dumps(partition)
    with pytest.raises(wp.StateError, match=match):
        loaders(urls, 3)[0].load_state_dict(states)


@pytest.mark.parametrize("end", ["drop", "pad"])
def test_one_rank_has_given_batches_that_several_would_not(end, urls):
    """So near to the end of an epoch, its state is still one that several ranks load."""
    [whole] = loaders(urls, 1, epoch_end=end)
    batches = len(whole) - 3 * 2
    for cut in range(batches - 4, batches + 1):
        found, sources = run(urls, [(3, 2, 2), (1, 1, cut)], epoch_end=end)
        states = [source.state_dict() for source in sources]
        after = [loaded(source, states) for source in loaders(urls, 3, epoch_end=end)]
        if after[0].epoch == 0:
            found.append([list(source) for source in after])
        came = keys(found)
        assert len(came) == len(set(came)) or end == "pad"
        assert len(ALL) - len(set(came)) < 3 * SIZE


@pytest.mark.parametrize("end", ["drop", "pad"])
@given(
    ranks=st.lists(st.sampled_from([1, 2, 3, 4, 6, 12]), min_size=2, max_size=4),
    cuts=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    parts=st.sampled_from([1, 1, 2]),
)
@settings(max_examples=40, deadline=None)
def test_ranks_that_divide_the_lanes_go_on_in_one_order(urls, end, ranks, cuts, parts):
    """At any step: after each one, the samples so far are the first ones of this order."""
    options = {"epoch_end": end, "batch_size": 2 * parts, "mix_lanes": parts, "lanes": 12 * parts}
    whole, states, came = [], [], []

    def make(count):
        made = [
            wp.PipeLoader(shuffled(urls), rank=rank, world_size=count, collate="list", **options)
            for rank in range(count)
        ]
        return [loaded(source, states) for source in made] if states else made

    whole += keys([[list(source)] for source in make(1)])
    for count, cut in zip(ranks, [*cuts[: len(ranks) - 1], None], strict=True):
        sources, step, left = make(count), count * 2 * parts, len(ALL) - len(came)
        if sources[0].epoch:
            return  # that was all
        expected = left // step if end == "drop" else -(-left // step)
        assert [source.remaining() for source in sources] == [expected] * count
        for batches in zip(*(itertools.islice(source, cut) for source in sources), strict=True):
            came += keys([[batches]])
            assert sorted(came) == sorted(whole[: len(came)])
        states = [through_json(source.state_dict()) for source in sources]
    assert len(came) == (left // step * step + len(ALL) - left if end == "drop" else len(ALL))
    assert sum(source.counts()["dropped"] for source in sources) == len(ALL) - len(came)
    assert sum(source.counts().get("padded", 0) for source in sources) == max(0, expected * step - left)


@pytest.mark.parametrize("before", [(2, 5), (4, 2), (3, 7)])
@pytest.mark.parametrize("ranks", [1, 3, 4, 6])
def test_which_samples_come_when_is_known_after_a_change_of_ranks(before, ranks, index):
    """Also of other ranks, some of which have had one batch more."""
    begun = loaders(index, before[0], lanes=12 // before[0])
    for source in begun:
        list(itertools.islice(source, before[1]))
    sources = [loaded(source, [one.state_dict() for one in begun]) for source in loaders(index, ranks)]
    assert sources[0].state_dict()["lane_count"] == 12
    first, plans = before[1], []
    for asked in sources:
        plans.append(
            [
                [
                    [sample.key for sample in asked.plan(first + step, rank=rank, keys=True)]
                    for step in range(source.remaining())
                ]
                for rank, source in enumerate(sources)
            ]
        )
    assert plans == [[[keys_of(batch) for batch in source] for source in sources]] * ranks


def test_a_rank_resumes_from_its_own_state_after_a_change_of_ranks(urls):
    begun = loaders(urls, 2, lanes=6)
    for source in begun:
        list(itertools.islice(source, 5))
    for source in [loaded(source, [one.state_dict() for one in begun]) for source in loaders(urls, 4)]:
        running = iter(source)
        list(itertools.islice(running, 2))
        again = loaded(loaders(urls, 4)[source.rank.number], through_json(source.state_dict()))
        assert again.state_dict() == source.state_dict()
        assert [keys_of(batch) for batch in again] == [keys_of(batch) for batch in running]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (3, 0), (8, 1), (24, 0), (12, 5)])
def test_elastic_lanes_go_on_in_one_order(ranks, workers, urls):
    """On any ranks that divide 24, at any step, with any workers, also if some have no lane."""
    options = {"lanes": "elastic", "batch_size": 2, "collate": "list", "epoch_end": "drop"}

    def make(count, workers=0):
        options["num_workers"] = workers
        return [wp.PipeLoader(shuffled(urls), rank=rank, world_size=count, **options) for rank in range(count)]

    [whole] = [keys([[list(source)]]) for source in make(1)]
    begun = make(2)
    came = keys([[list(itertools.islice(source, 5)) for source in begun]])
    states = [through_json(source.state_dict()) for source in begun]
    assert states[0]["lane_count"] == 24
    sources = [loaded(source, states) for source in make(ranks, workers)]
    assert {source.state_dict()["lane_count"] for source in sources} == {24}
    if not workers:
        for batches in zip(*sources, strict=True):
            came += keys([[batches]])
            assert sorted(came) == sorted(whole[: len(came)])
    assert len(ALL) - len(came) < ranks * 2 or workers


def test_elastic_lanes_are_a_multiple_of_ranks_and_workers(urls):
    for ranks, options, expected in ((5, {}, 120), (2, {"num_workers": 4}, 24), (2, {"mix_lanes": 2}, 24)):
        loader = wp.PipeLoader(shuffled(urls), batch_size=4, lanes="elastic", rank=0, world_size=ranks, **options)
        assert loader.state_dict()["lane_count"] == expected
    with pytest.raises(ValueError, match="lanes must be a number or 'elastic'"):
        wp.PipeLoader(shuffled(urls), lanes="many")
