"""Edits of a running epoch: samples that are left out, shards that were added, on pipes, nodes,
datasets and PipeLoaders.
"""

import itertools
import random
from collections import Counter

import pytest
from edit_histories import KINDS, use_shards
from pipelines import after, flat, key_of, keys_of, loaded, samples, shuffled, through_json

import wds_pipes as wp
from wds_pipes import checkpoint, nodes
from wds_pipes.core.digest import of_samples, of_shard, to_text
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

SIZES = [5, 4, 6, 3, 7, 5, 8, 9]
OLD = 5  # shards of these that the shorter list has


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    found = make_shards(tmp_path_factory.mktemp("edited"), shards=len(SIZES), samples=SIZES)
    index_shards(found, offsets=True)
    return found


def keyed(urls, **options):
    """A pipe of shuffled keys."""
    return shuffled(urls, **options).map_samples(key_of)


def loader_of(pipe, rank=0, ranks=1, **options):
    options = {"batch_size": 2, "collate": "list", **options}
    return wp.PipeLoader(pipe, rank=rank, world_size=ranks, **options)


def listed(urls, rank=0, ranks=1, **options):
    """A PipeLoader of keys over a SampleList."""
    return loader_of(in_order(urls), rank, ranks, **options)


def in_order(urls):
    return wp.SampleList(urls, shuffle=True, seed=2).fetch_samples().map_samples(key_of)


def step(loaders, count):
    """What the ranks yield in ``count`` steps, in the order of (step, rank); one may have ended."""
    ranks = [iter(loader) for loader in loaders]
    return [item for _ in range(count) for items in ranks for item in next(items, [])]


# Samples that are left out


@pytest.mark.parametrize("steps", ["keys", "decoded", "batches", "list"])
@pytest.mark.parametrize("cut", [0, 3, 11, 30])
def test_the_rest_is_the_old_rest_less_these(urls, steps, cut, tmp_path):
    """Also after a further resume, with a list that has grown at its end, and in the next epoch."""

    def make():
        if steps == "list":
            return wp.SampleList(urls, shuffle=True).fetch_samples().map_samples(key_of)
        if steps == "decoded":
            return shuffled(urls).decode_by_ext().map_samples(key_of, threads=2)
        pipe = keyed(urls)
        return pipe.batch_samples(2, collate="list").unbatch_samples() if steps == "batches" else pipe

    whole, following = list(make()), list(loaded(make(), state_at_epoch(make, 1)))
    if steps == "batches":  # the last step that may change their number: its items have no keys
        pipe = make()
        pipe.load_state_dict(pipe.state_dict(), exclude=whole[:1])
        with pytest.raises(TypeError, match=r"after unbatch_samples\(\), .* its items have no '__key__'"):
            next(iter(pipe))
        return
    first, second = [whole[cut + 1], whole[-1], whole[0]], whole[cut + 4]
    pipe = make()
    after(pipe, cut)
    (tmp_path / "keys.txt").write_text("\n".join(first))
    pipe = loaded(make(), through_json(pipe.state_dict()), exclude=f"@{tmp_path / 'keys.txt'}")
    found = list(itertools.islice(pipe, 2))
    (tmp_path / "keys.txt").write_text("\n".join([*first, second]))
    pipe = loaded(make(), through_json(pipe.state_dict()), exclude=tmp_path / "keys.txt")
    found += pipe
    assert found == [key for key in whole[cut:] if key not in first and (key != second or key in found[:2])]
    assert pipe.counts()["filtered"] == len(whole) - cut - len(found)
    assert list(pipe) == [key for key in following if key not in {*first, second}]


def state_at_epoch(make, epoch):
    pipe = make()
    pipe.set_epoch(epoch)
    return pipe.state_dict()


def test_a_state_without_the_list_is_refused(urls):
    pipe = keyed(urls)
    after(pipe, 7)
    plain, out = pipe.state_dict(), list(keyed(urls))[9:12]
    pipe = loaded(keyed(urls), plain, exclude=out)
    state = pipe.state_dict()
    for other, wrong, options, message in (
        (keyed(urls), state, {}, r"leaves out the samples of 3 keys .*: pass the same list"),
        (keyed(urls), state, {"exclude": out[::-1]}, "must begin with the keys that it had, in the same order"),
        (pipe, plain, {}, "leaves out the samples of 3 keys, and the state of 0: pass the"),
    ):
        with pytest.raises(wp.StateError, match=message):
            other.load_state_dict(wrong, **options)
    assert list(loaded(pipe, state)) == list(loaded(keyed(urls), state, exclude=out))  # the pipe knows its list
    assert list(loaded(pipe, plain, exclude=[])) == list(loaded(keyed(urls), plain))
    assert pipe.state_dict() == loaded(keyed(urls), pipe.state_dict()).state_dict()


def test_other_hosts(urls):
    """A dataset takes the list. A node, whose state another library loads, refuses such a state."""
    out = list(keyed(urls))[9:12]
    pipe = keyed(urls)
    after(pipe, 7)
    state = pipe.state_dict()
    rest = list(loaded(keyed(urls), state, exclude=out))
    assert list(loaded(wp.as_dataset(keyed(urls)), {**state, "ended": False}, exclude=out)) == rest
    pipe = loaded(samples(urls), samples(urls).state_dict(), exclude=out)
    node = nodes.GroupByKey(nodes.LoadTar(nodes.OpenShards(nodes.ShardList(urls, shuffle=True, seed=5))))
    with pytest.raises(wp.StateError, match="leaves out the samples of 3 keys"):
        node.reset(pipe.state_dict())


@pytest.mark.parametrize(
    ("make", "exclude", "error", "words"),
    [
        (keyed, "keys.txt", ValueError, "is not '@keys.txt', a file of keys"),
        (keyed, 3, TypeError, "must be keys or '@keys.txt', not 3"),
        (keyed, [3], TypeError, "must be the keys of samples, which are strings"),
        (wp.ShardList, ["a"], ValueError, "the items of this pipeline are shards"),
        (
            lambda urls: samples(urls).batch_samples(2, collate="list").shuffle_buffer(2),
            ["a"],
            ValueError,
            r"the items of shuffle_buffer\(\) are batches: make batches after it",
        ),
        (
            lambda urls: wp.mix({"a": samples(urls).pack_samples(len)}).shuffle_buffer(2),
            ["a"],
            ValueError,
            r"the items of shuffle_buffer\(\) are batches: .*by filter_samples\(\) before it",
        ),
        (
            lambda urls: samples(urls).bucket_samples(len, 2),
            ["a"],
            ValueError,
            r"the items of bucket_samples\(\) are batches",
        ),
    ],
)
def test_what_cannot_be_left_out(urls, make, exclude, error, words):
    pipe = make(urls)
    with pytest.raises(error, match=words):
        pipe.load_state_dict(pipe.state_dict(), exclude=exclude)


def test_a_step_without_keys_says_where(urls):
    pipe = samples(urls).to_tuple("txt").shuffle_buffer(3)
    pipe.load_state_dict(pipe.state_dict(), exclude=["a"])
    with pytest.raises(TypeError, match=r"after shuffle_buffer\(\), .*its items have no '__key__'"):
        next(iter(pipe))


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("make", [listed, lambda urls, *ranks, **options: loader_of(keyed(urls), *ranks, **options)])
def test_the_ledger_is_of_what_came(urls, make, alone):
    """Before and after the edit; also if each rank has loaded its own state ``alone``."""
    options = {"ledger": True, "epoch_end": "exact"}
    loaders = [make(urls, rank, 2, **options) for rank in range(2)]
    found = step(loaders, 2)
    states = [through_json(loader.state_dict()) for loader in loaders]
    out = [key for key in keyed(urls) if key not in found][:3]
    loaders = [make(urls, rank, 2, **options) for rank in range(2)]
    for loader, state in zip(loaders, states, strict=True):
        loader.load_state_dict(state if alone else states, exclude=out)
    found += step(loaders, 2)
    merged = checkpoint.merge_states([loader.state_dict() for loader in loaders])
    numbers = {key: number for number, url in enumerate(urls) for key in keys_of(samples([url]))}
    assert merged["ledger"]["epoch"] == to_text(of_samples((key, of_shard(str(numbers[key]))) for key in found))


@pytest.mark.parametrize("make", [listed, lambda urls: loader_of(keyed(urls))])
def test_the_steps_of_a_loader_go_on(urls, make):
    loader = make(urls)
    found = step([loader], 2)
    out = [key for key in keyed(urls) if key not in found][:1]
    loader.load_state_dict(loader.state_dict(), exclude=out)
    step([loader], 1)
    assert loader.state_dict()["step"] == 3


def test_a_rank_that_has_ended_needs_the_states_of_all(urls):
    """By its own state alone it does not know how many batches the ranks had."""
    loaders = [listed(urls, rank, 3, batch_size=5, epoch_end="exact") for rank in range(3)]
    assert len({len([*loader]) for loader in loaders}) == 2
    states = [loader.state_dict() for loader in loaders]
    again = [listed(urls, rank, 3, batch_size=5, epoch_end="exact") for rank in range(3)]
    out = keys_of(samples(urls[:1]))[:1]
    for loader, state in zip(again, states, strict=True):
        with pytest.raises(wp.StateError, match="exclude= after the end of a rank's epoch needs the states of all"):
            loader.load_state_dict(state, exclude=out)
        loader.load_state_dict(states, exclude=out)
    assert checkpoint.merge_states([loader.state_dict() for loader in again])["epoch"] == 1


def test_equal_ranks_need_a_sample_list(urls):
    counted = {"samples_per_shard": SIZES}
    loader = loader_of(keyed(urls, **counted), epoch_end="drop")
    state = loader.state_dict()
    with pytest.raises(ValueError, match=r"exclude=...\) leaves samples out, and only a SampleList knows"):
        loader.load_state_dict(state, exclude=["a"])
    assert len(flat(loader)) == sum(SIZES) // 2 * 2  # nothing has changed
    with pytest.raises(ValueError, match="exclude= leaves none of"):
        listed(urls).load_state_dict(listed(urls).state_dict(), exclude=flat(listed(urls)))


@pytest.mark.parametrize("make", [listed, in_order])
def test_a_key_that_no_shard_has_is_an_error_over_indexes_of_keys(urls, make):
    pipe, out = make(urls), list(in_order(urls))[:2]
    with pytest.raises(ValueError, match=r"2 keys that no sample has: 'nowhere', 'nowhere else'"):
        pipe.load_state_dict(pipe.state_dict(), exclude=[*out, "nowhere", "nowhere else"])
    pipe = wp.SampleList(urls, where=list(in_order(urls))[2:]).fetch_samples().map_samples(key_of)
    assert not set(loaded(pipe, pipe.state_dict(), exclude=out)) & set(out)  # they are in no view, but in shards


@pytest.mark.parametrize("host", [None, 0, 1])
def test_at_its_end_an_epoch_says_which_keys_it_did_not_have(urls, host, caplog):
    """Of the rest of an epoch, it may be that their samples came before the state; and of ranks,
    none knows what the others had: ``counts()`` of each says how many it left out.
    """
    hosts = {"num_workers": 1, "multiprocessing_context": "fork"} if host else {}
    pipe = keyed(urls) if host is None else loader_of(keyed(urls), lanes=3, **hosts)
    whole = list(keyed(urls)) if host is None else flat(loader_of(keyed(urls), lanes=3))
    after(pipe, 3)
    out = [whole[0], whole[-1], "nowhere"]
    pipe.load_state_dict(pipe.state_dict(), exclude=out)
    for _ in pipe:
        pass
    for _ in pipe:
        pass
    rest, epoch = caplog.messages
    assert rest == (
        "exclude=: 2 of 3 keys had no sample in the rest of epoch 0: they came before the state was saved, were left "
        f"out by a step, or are misspelt. The keys: {whole[0]!r}, 'nowhere'."
    )
    assert epoch == (
        "exclude=: 1 of 3 keys had no sample in epoch 1: they were left out by a step, or are misspelt. The keys: "
        "'nowhere'."
    )
    assert pipe.counts()["excluded"] == pipe.counts()["filtered"] == 2
    ranks = [loader_of(keyed(urls), rank, 2, epoch_end="exact") for rank in range(2)]
    for loader in ranks:
        flat(loaded(loader, loader.state_dict(), exclude=out))
    assert sum(loader.counts()["excluded"] for loader in ranks if "excluded" in loader.counts()) == 2
    assert len(caplog.messages) == 2
    if host is not None:
        pipe.close()


def test_workers_and_the_iterator_in_use(urls):
    """Workers of the old pipeline end, and an iterator that was made before is refused."""
    loader = loader_of(keyed(urls), num_workers=1, multiprocessing_context="fork", lanes=1)
    items = after(loader, 3)
    rest, state = flat(loaded(loader_of(keyed(urls), lanes=1), loader.state_dict())), loader.state_dict()
    loader.load_state_dict(state, exclude=rest[1:3])
    with pytest.raises(wp.StateError, match="a state was loaded: continue with a new iter"):
        next(items)
    assert flat(loader) == [rest[0], *rest[3:]]
    assert loader.counts()["filtered"] == 2
    loader.close()


def test_a_checkpoint_is_loaded_with_edits(urls, tmp_path):
    loader = loader_of(keyed(urls[:OLD]), lanes=1)
    after(loader, 3)
    checkpoint.save(tmp_path, loader, step=3)
    rest = flat(loaded(loader_of(keyed(urls[:OLD]), lanes=1), loader.state_dict()))
    again = loader_of(keyed(urls), lanes=1)
    assert checkpoint.load(tmp_path, again, exclude=rest[:1], added="append") == 3
    with pytest.raises(ValueError, match=r"not known without reading them: load_state_dict\(exclude"):
        again.find(0)
    assert flat(again) == rest[1:]
    assert (again.counts()["delivered"], again.counts()["filtered"]) == (sum(SIZES[:OLD]) - 1, 1)
    assert len(flat(again)) == sum(SIZES) - 1


# Shards that were added


@pytest.mark.parametrize("options", [{}, {"shuffle": False, "where": slice(None, None, 2)}, {"exclude": [3, 4, 6]}])
def test_a_sample_list_has_the_order_that_it_had_and_then_one_of_all(urls, options):
    """On any ranks and batch sizes, if it grows twice, with samples that are left out; as a pipe,
    too.
    """

    def make(count):
        listed = wp.SampleList(urls[:count], **{"shuffle": True, "seed": 2, **options})
        return listed.fetch_samples().map_samples(key_of)

    left, states, out, counts = list(make(OLD)), None, [], (OLD, OLD + 2, len(urls))
    for count, ranks, size, added in zip(counts, (2, 3, 1), (2, 1, 2), (None, "append", "append"), strict=True):
        loaders = [loader_of(make(count), rank, ranks, batch_size=size, epoch_end="exact") for rank in range(ranks)]
        out += left[6:8] if count > OLD + 2 else []
        for loader in loaders if states else ():
            loader.load_state_dict(states, added=added, **({"exclude": out} if out else {}))
        left = [key for key in left if key not in out]
        assert step(loaders, 1) == left[: ranks * size]
        left = left[ranks * size :]
        states = [through_json(loader.state_dict()) for loader in loaders]
    assert states[0]["grown"] == [[0, OLD]]
    assert f"up to epoch 0: the first {OLD} shards of the list" in wp.describe_state(states[0])
    last = loaded(loader_of(make(len(urls)), batch_size=3, epoch_end="pad"), states, exclude=out)
    pipe = make(len(urls))
    pipe.set_epoch(1)
    following = [key for key in pipe if key not in out]
    begin, steps, key = last.state_dict()["step"], last.remaining(), following[-1]
    assert steps == -(-len(left) // 3)
    planned = flat(last.plan(begin + number, keys=True) for number in range(steps))
    assert [sample.key for sample in planned if not sample.padding] == left
    assert sum(sample.padding for sample in planned) == 3 * steps - len(left)
    assert len(last.find(key)) == (key in left)
    assert [last.find(each) for each in out] == [[]] * len(out)
    assert [visit.epoch for visit in last.find(key, epoch=1)] == [1]
    assert flat(last)[: len(left)] == left
    assert flat(last)[: len(following)] == following
    assert "grown" not in last.state_dict()
    pipe, whole = make(OLD), list(make(OLD))
    after(pipe, 4)
    pipe = loaded(make(len(urls)), through_json(pipe.state_dict()), added="append")
    assert list(pipe) == whole[4:]
    assert [key for key in pipe if key not in out] == following


def test_lanes_of_a_sample_list_that_grows(urls):
    """With steps that change the number of samples, or epochs that follow each other."""

    def make(count):
        pipe = wp.SampleList(urls[:count], shuffle=True, seed=2).fetch_samples()
        return pipe.map_samples(key_of).filter_samples(bool)

    loader = loader_of(make(OLD), lanes=2, epoch_end="loop")
    found = [*itertools.chain.from_iterable(after_batches(loader, 3))]
    loader = loaded(loader_of(make(len(urls)), lanes=2, epoch_end="loop"), loader.state_dict(), added="append")
    found += itertools.chain.from_iterable(after_batches(loader, (sum(SIZES[:OLD]) + sum(SIZES)) // 2 + 3))
    assert set(found) == set(make(len(urls)))
    assert not Counter(make(OLD)) + Counter(make(len(urls))) - Counter(found)
    loader = loader_of(make(OLD), 0, 1, lanes=3)
    found = [*itertools.chain.from_iterable(after_batches(loader, 4))]
    loader = loaded(loader_of(make(len(urls)), lanes=2), loader.state_dict(), added="append")
    assert Counter(found + flat(loader)) == Counter(make(OLD))
    assert Counter(flat(loader)) == Counter(make(len(urls)))


def after_batches(loader, count):
    return list(itertools.islice(loader, count))


def test_a_pipe_and_an_order_that_is_not_shuffled(urls):
    for options in ({}, {"shuffle": False}, {"resampled": True}):
        whole, pipe = list(keyed(urls[:OLD], **options)), keyed(urls[:OLD], **options)
        after(pipe, 9)
        pipe = loaded(keyed(urls, **options), through_json(pipe.state_dict()), added="append")
        after(pipe, 3)
        pipe = loaded(keyed(urls, **options), through_json(pipe.state_dict()))
        assert list(pipe) == whole[12:]
        alone = keyed(urls, **options)
        alone.set_epoch(1)
        assert list(pipe) == list(alone)


def test_at_the_beginning_of_an_epoch_all_shards_are_read(urls):
    loader = loader_of(keyed(urls[:OLD]))
    assert len(flat(loader)) == sum(SIZES[:OLD])
    again = loaded(loader_of(keyed(urls)), loader.state_dict(), added="append")
    assert "grown" not in again.state_dict()
    assert len(flat(again)) == sum(SIZES)
    pipe = loaded(keyed(urls), keyed(urls[:OLD]).state_dict(), added="append")
    assert len(list(pipe)) == sum(SIZES)
    counted = [loader_of(keyed(urls[:count], samples_per_shard=SIZES[:count])) for count in (OLD, len(urls))]
    again = loaded(counted[1], counted[0].state_dict(), added="append", exclude=list(keyed(urls))[:2])
    assert len(flat(again)) == sum(SIZES) - 2


def states_of(urls, count=None, steps=lambda pipe: pipe):
    """A state of a pipe over some of the shards, or all."""
    return steps(samples(urls[:count])).state_dict()


def view_of(urls, where):
    return loader_of(wp.SampleList(urls, where=where).fetch_samples())


def of_rank_0(urls):
    return loader_of(keyed(urls), 0, 2, epoch_end="exact")


NUMBERS = [30, 3, 12, 4]  # of which two are in the old shards


@pytest.mark.parametrize(
    ("load", "error", "message"),
    [
        (lambda urls: loaded(samples(urls), states_of(urls, OLD)), wp.StateError, "over 5 shards, .* has 8"),
        (
            lambda urls: loaded(samples(urls[1:]), states_of(urls, OLD), added="append"),
            wp.StateError,
            "other URLs or another order",
        ),
        (
            lambda urls: loaded(samples(urls[:3]), states_of(urls, OLD), added="append"),
            wp.StateError,
            "over 5 shards, .* has 3",
        ),
        (lambda urls: loaded(samples(urls), states_of(urls, OLD), added="yes"), ValueError, "one of 'append', not"),
        *(
            (
                lambda urls, where=where: loaded(
                    view_of(urls, where), view_of(urls[:OLD], NUMBERS[1:]).state_dict(), added="append"
                ),
                ValueError,
                "a view in which the samples of the shards that were added come last",
            )
            for where in (NUMBERS, slice(None, None, -1))
        ),
        (
            lambda urls: loaded(mixed(urls), mixed(urls).state_dict(), added="append"),
            ValueError,
            "not mix: add the new shards as a source",
        ),
        (
            lambda urls: loaded(
                samples(urls).repeat(2), states_of(urls, OLD, lambda pipe: pipe.repeat(2)), added="append"
            ),
            ValueError,
            "nor for repeat",
        ),
        (
            lambda urls: loaded(of_rank_0(urls), of_rank_0(urls[:OLD]).state_dict(), added="append"),
            wp.StateError,
            "needs the states of all ranks",
        ),
        *(
            (
                lambda urls, wrong=wrong: loaded(samples(urls), {**states_of(urls), "grown": wrong}),
                wp.StateError,
                "damaged",
            )
            for wrong in ([[0, 0]], [[-1, 5]], [[3, 5], [1, 5]], [5], "x")
        ),
        (
            lambda urls: loaded(mixed(urls), {**mixed(urls).state_dict(), "grown": [[0, 2]]}),
            wp.StateError,
            "has grown",
        ),
    ],
)
def test_what_cannot_grow(urls, load, error, message):
    with pytest.raises(error, match=message):
        load(urls)


def mixed(urls):
    return wp.mix({"a": samples(urls)})


@pytest.fixture(scope="module")
def _histories(tmp_path_factory):
    use_shards(tmp_path_factory.mktemp("histories"))


@pytest.mark.usefixtures("_histories")
@pytest.mark.parametrize("kind", KINDS)
def test_random_histories_of_edits(kind):
    """One of each kind of tests/proofs/edits.py, with ten edits."""
    KINDS[kind](random.Random(kind))
