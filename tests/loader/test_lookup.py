"""PipeLoader.plan() and find(): they say what the loader really returns, without reading."""

import itertools
import json
from collections import defaultdict
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pipelines import samples, through_json

import wds_pipes as wp
from wds_pipes.core.order import Permutation
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

SIZES = {"some": [7, 0, 5, 12, 9], "few": [3, 2], "even": [6, 6, 6, 6, 6, 6]}
PIPES = {
    "list": lambda urls: wp.SampleList(urls, shuffle=True, seed=5).fetch_samples(),
    "view": lambda urls: wp.SampleList(
        urls, shuffle=True, seed=5, block_samples=4, exclude=slice(None, None, 5)
    ).fetch_samples(),
    "numbers": lambda urls: wp.SampleList(urls, where=[4, 0, 3, 1]).fetch_samples(),
    "list, buffer": lambda urls: wp.SampleList(urls, shuffle=True, seed=5).fetch_samples().shuffle_buffer(3),
    "shards": lambda urls: samples(urls, index=True),
    "in order": lambda urls: samples(urls, index=True, shuffle=False).map_samples(dict),
    "buffer": lambda urls: samples(urls, index=True).shuffle_buffer(3),
    "buffers": lambda urls: samples(urls, index=True).shuffle_buffer(2).shuffle_buffer(4, seed=9),
    "resampled": lambda urls: samples(urls, index=True, resampled=True).shuffle_buffer(2),
}


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Lists of shards with indexes, by name, and the key of each sample by URL and number."""
    urls, keys = {}, {}
    for name, counts in SIZES.items():
        urls[name] = make_shards(tmp_path_factory.mktemp(name), shards=len(counts), samples=counts, fields=("txt",))
        index_shards(urls[name], f"{urls[name][0].rpartition('/')[0]}/index.json", offsets=True)
        numbers = itertools.count()
        for url, count in zip(urls[name], counts, strict=True):
            keys |= {(url, number): f"{next(numbers):08d}" for number in range(count)}
    return urls, keys


@dataclass(frozen=True)
class Setting:
    ranks: int
    per_rank: int  # lanes, divided by ranks x parts
    size: int
    parts: int
    end: str
    cut: int  # after how many steps the state for the next one is saved


def loaders(pipe, setting, keys, state=None):
    """The loaders of all ranks."""
    found = []
    for rank in range(setting.ranks):
        found.append(
            wp.PipeLoader(
                pipe(),
                batch_size=setting.size * setting.parts,
                mix_lanes=setting.parts,
                lanes=setting.ranks * setting.parts * setting.per_rank,
                epoch_end=setting.end,
                collate=with_padding,
                rank=rank,
                world_size=setting.ranks,
            )
        )
        found[-1].keys = keys
        if state is not None:
            found[-1].load_state_dict(state)
    return found


def with_padding(samples):
    return [(sample["__key__"], sample.get("__padding__", False)) for sample in samples]


def said(found, keys):
    return [(keys[one.url, one.number], one.padding) for one in found]


SETTING = st.builds(
    Setting,
    ranks=st.integers(1, 3),
    per_rank=st.integers(1, 3),
    size=st.integers(1, 4),
    parts=st.sampled_from([1, 1, 1, 2]),
    end=st.sampled_from(["exact", "drop", "pad", "loop"]),
    cut=st.integers(0, 6),
)


def check(pipe, history, keys, epoch):
    """Compare plan() and find() with what all ranks return, in each of several settings."""
    state = None
    for setting in history:
        ranks = loaders(pipe, setting, keys, state)
        for loader in ranks if state is None and setting.end != "loop" else ():
            loader.set_epoch(epoch)
        epoch, first = (ranks[0].state_dict()[name] for name in ("epoch", "step"))
        states, visits = [loader.state_dict() for loader in ranks], defaultdict(list)
        iterators, batches = [iter(loader) for loader in ranks], []
        for step in range(first, first + (10 if setting.end == "loop" else 1000)):
            asked = [loader if loader.state_dict()["epoch"] == epoch else None for loader in ranks]
            told = [plan(loader, step, rank) for rank, loader in enumerate(asked)]
            batches = [next(iterator, None) for iterator in iterators]
            for rank, batch in enumerate(batches):
                if asked[rank] is not None:
                    assert told[rank] == (None if batch is None else batch), (step, rank)
                for place, (key, padding) in enumerate(batch or ()):
                    if not padding:
                        visits[key].append((step, rank, place))
                # also what is over, and other ranks
                others = ranks if state is None or setting.end in ("drop", "pad") else ()
                for loader in others if batch and (state is None or first == 0) else ():
                    if loader.state_dict()["epoch"] == epoch:
                        assert plan(loader, step, rank) == batch, (step, rank)
            if step + 1 - first == setting.cut:
                states = [loader.state_dict() for loader in ranks]
            if not any(batches):
                break
        if state is None:
            again = loaders(pipe, setting, keys)[0]
            epochs = range(45 if setting.end == "loop" else 1)
            for key in [*visits][:4]:
                found = [visit for ahead in epochs for visit in again.find(key, epoch=epoch + ahead)]
                found = sorted(tuple(visit)[1:] for visit in found)
                assert [visit for visit in found if visit[0] < step] == [
                    visit for visit in sorted(visits[key]) if visit[0] < step
                ]
        state = wp.merge_states([through_json(one) for one in states])


def plan(loader, step, rank):
    """What a loader says of a batch; None: there is none."""
    try:
        return None if loader is None else said(loader.plan(step, rank=rank), loader.keys)
    except IndexError:
        return None


CASE = st.tuples(
    st.sampled_from(sorted(SIZES)),
    st.sampled_from(sorted(PIPES)),
    st.sampled_from(["exact", "drop", "pad", "loop"]),
    st.lists(SETTING, min_size=1, max_size=3),
    st.integers(0, 2),
)
QUIET = {"deadline": None, "suppress_health_check": list(HealthCheck), "database": None}


def check_case(case, shards):
    name, kind, end, history, epoch = case
    urls, keys = shards
    lanes = max(setting.ranks * setting.parts * setting.per_rank for setting in history)
    # a lane without samples is an error of the loader, and such epochs of the data differ in length
    assume(end != "loop" or (kind != "resampled" and lanes <= (4 if kind == "numbers" else sum(SIZES[name]))))
    try:
        check(lambda: PIPES[kind](urls[name]), [replace(setting, end=end) for setting in history], keys, epoch)
    except wp.StateError:  # mix_lanes was added or removed in the middle of a SampleList's epoch
        assume(False)


@settings(max_examples=4, **QUIET)
@given(case=CASE)
def test_plan_is_what_comes(case, shards):
    check_case(case, shards)


@pytest.mark.slow
@settings(max_examples=20, **QUIET)
@given(case=CASE)
def test_plan_is_what_comes_in_many_settings(case, shards):
    check_case(case, shards)


@given(count=st.integers(1, 3000), key=st.integers(0, 1 << 64), run=st.integers(1, 9), data=st.data())
@settings(max_examples=50, **QUIET)
def test_a_place_is_the_inverse_of_a_number(count, key, run, data):
    order, number = Permutation(count, key, run=run), data.draw(st.integers(0, count - 1))
    assert order.number_at(order.place_of(number)) == number


def test_any_step_of_a_long_epoch_takes_no_longer(tmp_path):
    """The shards are not there; an index.json of wids counts their samples: 10**9 of them."""
    facts = [{"url": f"s{number:05d}.tar", "nsamples": 100_000} for number in range(10_000)]
    (tmp_path / "index.json").write_text(json.dumps({"wids_version": 1, "shardlist": facts}))
    pipes = (
        wp.SampleList(tmp_path / "index.json", shuffle=True).fetch_samples(),
        wp.ShardList(tmp_path / "index.json", shuffle=True).open_shards().load_tar().group_by_key().shuffle_buffer(100),
    )
    for pipe in pipes:
        loader = wp.PipeLoader(pipe, batch_size=8, epoch_end="drop", rank=3, world_size=128)
        for sample in 0, 7, 999_999_999:
            [visit] = loader.find(sample, epoch=4)
            assert visit.epoch == 4
            found = loader.plan(visit.step, rank=visit.rank, epoch=4)[visit.place]
            assert (found.url, found.number) == (
                str(tmp_path / f"s{sample // 100_000:05d}.tar"), sample % 100_000
            )  # fmt: skip
        with pytest.raises(IndexError, match="rank 5 has 976,562 steps in this epoch"):
            loader.plan(976_562, rank=5)


class Twice(wp.FlatMap):
    def expand(self, item):
        return item, item


wp.register_stage(Twice)


@pytest.mark.parametrize(
    ("pipe", "message"),
    [
        (samples, "not counted: pass ShardList"),
        (lambda urls: samples(urls, index=True).filter_samples(len), "filter_samples"),
        (lambda urls: samples(urls, index=True).map_samples(len, on_error="skip"), "map_samples"),
        (lambda urls: samples(urls, index=True).interleave_shards(2), "interleave_shards"),
        (lambda urls: samples(urls, index=True).batch_samples(2).shuffle_buffer(2), "shuffle_buffer"),
        (lambda urls: samples(urls, index=True).twice(), "twice"),
        (lambda urls: samples(urls, index=True).repeat(2), "repeat"),
        (lambda urls: samples(urls, index=True).pack_samples(len, 9), "pack_samples"),
        (lambda urls: wp.join({name: samples(urls, shuffle=False) for name in "ab"}), "join"),
        (lambda urls: wp.mix({"a": samples(urls[:1], index=True), "b": samples(urls[1:], index=True)}), "mix"),
        (
            lambda urls: wp.ShardList(urls, index=True).open_shards().load_tar().group_by_key(fields=["txt"]),
            "use select_fields",
        ),
        (
            lambda urls: wp.ShardList(urls, index=True).open_shards().load_tar(on_truncated="ignore").group_by_key(),
            "load_tar",
        ),
    ],
)
def test_an_order_that_cannot_be_known_is_refused(pipe, message, shards):
    loader = wp.PipeLoader(pipe(shards[0]["some"]), epoch_end="exact")
    for ask in (lambda: loader.plan(0), lambda: loader.find(0)):
        with pytest.raises(ValueError, match=f"not known without reading them: .*{message}"):
            ask()


def test_what_is_asked_must_be_there(shards):
    urls, keys = shards[0]["some"], shards[1]
    loader = wp.PipeLoader(samples(urls, index=True), batch_size=4, epoch_end="exact")
    assert [one.key for one in loader.plan(1, keys=True)] == [keys[one.url, one.number] for one in loader.plan(1)]
    for ask, kind, message in (
        (lambda: loader.plan(9), IndexError, "there is no step 9: rank 0 has 9 steps"),
        (lambda: loader.plan(0, rank=1), ValueError, "rank must be"),
        (lambda: loader.plan(-1), ValueError, "step must be"),
        (lambda: loader.find("none"), KeyError, "no sample has the key 'none'"),
        (lambda: loader.find(33), IndexError, "there is no sample 33: there are 33"),
        (lambda: loader.find(1.5), TypeError, "a key or a number"),
    ):
        with pytest.raises(kind, match=message):
            ask()
    endless = wp.PipeLoader(samples(urls, samples_per_shard=SIZES["some"]), batch_size=4, epoch_end="loop")
    for ask, message in (
        (lambda: endless.plan(0, epoch=1), "leave epoch= out"),
        (lambda: endless.plan(0, keys=True), "indexes of offsets"),
        (lambda: endless.find("00000001"), "indexes of offsets"),
    ):
        with pytest.raises(ValueError, match=message):
            ask()


@pytest.mark.parametrize("kind", ["list", "in order"])
def test_the_repeats_that_fill_up_the_last_batch_are_known(kind, shards):
    urls, keys = shards[0]["some"], shards[1]
    loader = wp.PipeLoader(PIPES[kind](urls), batch_size=4, epoch_end="pad", collate=with_padding)
    last = said(loader.plan(8), keys)
    assert [padding for _, padding in last] == [False, True, True, True]
    assert last == list(loader)[8]


def test_the_end_of_an_epoch_with_other_sizes_of_batches(shards):
    """After as many batches of one as of two, and none is left."""
    urls, keys = shards
    history = [Setting(3, 1, size, 1, "exact", 4) for size in (2, 1)]
    check(lambda: PIPES["in order"](urls["even"]), history, keys, 1)


def test_after_a_state_of_other_ranks_only_what_is_known_is_said(shards):
    """Where independent lanes of other ranks stand is known to these ranks alone."""

    def made(rank, ranks):
        return wp.PipeLoader(
            samples(shards[0]["even"], index=True), batch_size=2, lanes=4, epoch_end="loop", rank=rank, world_size=ranks
        )

    both = [made(rank, 2) for rank in range(2)]
    for loader in both:
        next(iter(loader))
    four = [made(rank, 4) for rank in range(4)]
    state = wp.merge_states([loader.state_dict() for loader in both])
    for loader in four:
        loader.load_state_dict(state)
        expected = [one.url for one in loader.plan(1)]
        assert next(iter(loader))["__url__"] == expected
    with pytest.raises(ValueError, match="build a loader with rank=2, world_size=4"):
        four[0].plan(2, rank=2)
    with pytest.raises(ValueError, match="step 0 is not known: the loader has continued at step 2"):
        four[2].plan(0)


def test_epochs_of_a_list_that_has_grown(shards):
    """With "loop", the epochs that had begun are shorter than the later ones."""
    urls, keys = shards[0]["even"], shards[1]

    def made(count):
        pipe = samples(urls[:count], samples_per_shard=6).shuffle_buffer(3)
        return wp.PipeLoader(pipe, batch_size=5, epoch_end="loop", collate=with_padding)

    before = made(2)
    for _ in itertools.islice(before, 4):
        pass
    loader = made(6)
    loader.load_state_dict(through_json(before.state_dict()), added="append")
    assert loader.state_dict()["grown"] == [[1, 2]]
    for step in range(4, 24):
        expected = said(loader.plan(step), keys)
        visit = loader.find(int(expected[2][0]), epoch=(step * 5 + 2 - 24) // 36 + 2 if step > 4 else 1)[0]
        assert (visit.step, visit.place) == (step, 2)
        assert next(iter(loader)) == expected
