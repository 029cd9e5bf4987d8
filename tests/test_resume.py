"""Resume is exact: the matrix of stages and hosts, and what a state costs."""

import itertools
import json
import os
import tempfile
import time

import pytest
from chains import AFTER, ARGUMENTS, BASE, BY_OFFSETS, FIRST, NEEDS, NodeLoader, Torch, as_text, build, chains
from pipelines import draw, flat, keys_of, loaded, resumed, through_json, wanted
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata import nodes as torchdata_nodes
from torchdata.stateful_dataloader import StatefulDataLoader
from waiting import calls

import wds_pipes as wp
from wds_pipes import datapipes, nodes, stages
from wds_pipes.core.stream import Stream
from wds_pipes.tar import index_shards
from wds_pipes.testing import check_other_lanes, check_resume, make_shards, same

CHAINS = chains()


def text(item):
    return repr(item)


def three(items):
    return itertools.islice(items, 3)


class OfStage:
    """A pipe of which check_resume does not know the stage, so that it does not check again what
    it checks of the stream of the same stage.
    """

    def __init__(self, pipe):
        self.pipe = pipe
        self.state_dict, self.load_state_dict = pipe.state_dict, pipe.load_state_dict

    def __iter__(self):
        return iter(self.pipe)


HOSTS = {
    "stream": lambda names, urls: Stream(build(stages, names, urls)),
    "pipe": lambda names, urls: OfStage(build(datapipes, names, urls)),
    "torch": lambda names, urls: Torch(build(datapipes, names, urls).map(text).filter(bool).batch(2)),
    "over-torch": lambda names, urls: (
        build(datapipes, names, urls).map(text).batch(2).map_samples(tuple).shuffle_buffer(2)
    ),
    "dataset": lambda names, urls: build(datapipes, names, urls).as_dataset(),
    "loader": lambda names, urls: NodeLoader(build(nodes, names, urls)),
    "prefetcher": lambda names, urls: NodeLoader(torchdata_nodes.Prefetcher(build(nodes, names, urls), 3)),
    "as_node": lambda names, urls: NodeLoader(build(datapipes, names, urls).as_node()),
    "over-node": lambda names, urls: NodeLoader(
        nodes.ShuffleBuffer(torchdata_nodes.Batcher(build(nodes, names, urls), 2, drop_last=False), 2)
    ),
}


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """Five small shards, one of them empty: 10 samples. The pairs of cuts grow with the square of
    their number.
    """
    return make_shards(tmp_path_factory.mktemp("few"), shards=5, samples=[3, 0, 4, 1, 2], fields=("txt", "cls", "json"))


@pytest.mark.parametrize(
    ("host", "chain"),
    [
        *(("stream", chain) for chain in CHAINS),
        *((host, chain) for host in HOSTS for chain in ("Repeat", "FetchShuffle", "All") if host != "stream"),
    ],
)
def test_every_cut_of_every_chain_and_every_host(host, chain, few):
    check_resume(lambda: HOSTS[host](CHAINS[chain], few))


@pytest.mark.parametrize("chain", CHAINS)
def test_an_epoch_of_every_chain_goes_on_on_other_lanes(chain, few):
    """As check_resume checks it for the pipes of users."""
    check_other_lanes(lambda: build(datapipes, CHAINS[chain], few))


SHUFFLING = [name for name, names in CHAINS.items() if "ShuffleBuffer" in names and "SampleList" not in names]


@pytest.mark.parametrize("chain", [*SHUFFLING, "before a shuffle"])
def test_every_cut_with_offsets(chain, tmp_path):
    """Where shuffle_buffer resumes without its window, or cannot."""
    urls = make_shards(tmp_path, shards=4, samples=[4, 0, 6, 3], fields=("txt", "cls", "json"))
    index_shards(urls, offsets=True)
    names = CHAINS.get(chain) or (*BASE, "DecodeByExt", "SelectFields", "RenameFields", "ToTuple", "ShuffleBuffer")
    counted = {"samples_per_shard": [4, 0, 6, 3]}
    found = check_resume(lambda: Stream(build(stages, names, urls, index=True)))
    assert same(found[0], list(Stream(build(stages, names, urls, **counted))))


@pytest.mark.parametrize("chain", ["Group", "All"])
def test_every_cut_below_threads(chain, tmp_path):
    """Below torchdata's ParallelMapper in threads, whose read-ahead is not committed."""
    urls = make_shards(tmp_path, shards=3, samples=[2, 0, 4])
    mapped = lambda: NodeLoader(  # noqa: E731
        torchdata_nodes.ParallelMapper(
            build(nodes, CHAINS[chain], urls), text, num_workers=2, method="thread", in_order=True
        )
    )
    check_resume(mapped)


def test_every_stage_is_in_the_matrix(few):
    """With arguments that make it do something. A chain with the stage differs from one without."""
    assert {name for names in CHAINS.values() for name in names} | {"ShardList", "Mix", "Join"} == set(stages.__all__)
    where = "ARGUMENTS in tests/support/chains.py"
    lacking = {*FIRST, *AFTER, *BY_OFFSETS} - set(ARGUMENTS)
    assert not lacking, f"add to {where}, with arguments that change something on 10 samples: {sorted(lacking)}"
    unknown = set(ARGUMENTS) - {*FIRST, *AFTER, *BY_OFFSETS}
    assert not unknown, f"these are no stages, take them out of {where}: {sorted(unknown)}"
    for name in AFTER:
        needed = NEEDS.get(name, ())
        before, after = (list(Stream(build(stages, (*BASE, *needed, *more), few))) for more in ((), (name,)))
        assert not same(before, after), f"{name} changes nothing here: choose other arguments in {where}"


ALONE = ("DecodeByExt", "MapFields", "RenameFields", "SelectFields")
# no later step takes tuples or paths; those that change a sample alone are as map_samples
PAIRED = [name for name in AFTER if name not in ("ToTuple", "WriteShards", *ALONE)]


# each a kind of its own: it reads ahead, holds what it took, makes others of it, or leaves some
# out; check_resume adds a step that makes batches
KINDS_AFTER = ("ShuffleBuffer", "MapSamples", "Then", "InterleaveShards", "Repeat", "SliceSamples")


@pytest.mark.parametrize("first", [*PAIRED, "stop", "drop", "repeat", "join"])
def test_every_stage_before_every_kind(first, tmp_path):
    """At every cut, also of the partial batch that check_resume adds. ``first`` is a stage, a
    mix that ends before its sources, or a join.
    """
    urls = make_shards(tmp_path, shards=3, samples=[3, 0, 2])

    def make(second):
        if first in PAIRED:
            return Stream(build(stages, (*BASE, *NEEDS.get(first, ()), first, second), urls))
        arguments, options = ARGUMENTS[second]
        if first == "join":
            pair = {"a": build(stages, BASE, urls), "b": build(stages, (*BASE, "FilterSamples"), urls, shuffle=False)}
            joined = stages.Join(pair, on_missing="none", prefix=True)
            return Stream(getattr(stages, second)(joined, *arguments, **options))
        sources = {"a": build(stages, BASE, urls[:1]), "b": build(stages, (*BASE, "ShuffleBuffer"), urls[1:])}
        mixed = stages.Mix(sources, {"a": 2, "b": 1}, exhausted=first)
        return Stream(getattr(stages, second)(mixed, *arguments, **options))

    for second in KINDS_AFTER:
        if second == "InterleaveShards" and (
            first not in PAIRED or first == second or getattr(stages, first).scope == "lane"
        ):
            continue  # it needs ShardList, once, and comes before these
        if first in ("BatchSamples", "BucketSamples", "PackSamples") and second in ("MapSamples", "Then"):
            continue  # these take samples
        check_resume(lambda second=second: make(second))


# Each step with its options, after each kind of step, in PipeLoader

KINDS = {
    "group": lambda pipe: pipe,
    "shuffle": lambda pipe: pipe.shuffle_buffer(3),
    "interleave": lambda pipe: pipe.interleave_shards(2),
    "filter": lambda pipe: pipe.filter_samples(wanted),
    "threads": lambda pipe: pipe.map_samples(dict, threads=2),
    "then": lambda pipe: pipe.then(three),
    "bucket, sort": lambda pipe: pipe.bucket_samples(len, 2, boundaries=[2], sort=True, window=3).unbatch_samples(),
    "take": lambda pipe: pipe.take_samples(9),
    "repeat": lambda pipe: pipe.repeat(2),
    "unbatch": lambda pipe: pipe.batch_samples(2).unbatch_samples(),
    "mix": lambda pipe: wp.mix({"a": pipe, "b": pipe.filter_samples(wanted)}, exhausted="drop"),
    "join": lambda pipe: wp.join({"a": pipe, "b": pipe.rename_fields({"t": "txt", "c": "cls"})}),
    "batch": lambda pipe: pipe.batch_samples(2),
    "batch of columns": lambda pipe: pipe.batch_samples(2, collate="columns", drop_last=True),
    "batch, threads": lambda pipe: pipe.batch_samples(2).map_samples(dict, threads=2),
}
OF_ANY = {
    "map": lambda pipe: pipe.map_samples(dict),
    "map, threads": lambda pipe: pipe.map_samples(dict, threads=2),
    "map, rng": lambda pipe: pipe.map_samples(draw, threads=1),
    "map, seed_all": lambda pipe: pipe.map_samples(dict, seed_all=True),
    "map, skip": lambda pipe: pipe.map_samples(dict, may_drop=True, on_error="skip", max_errors=9, threads=2),
    "fields": lambda pipe: pipe.map_fields({"txt": text}),
    "fields, threads": lambda pipe: pipe.map_fields({"txt": text}, threads=2),
    "fields, skip": lambda pipe: pipe.map_fields({"none": text}, on_error="skip", threads=1),
    "rename": lambda pipe: pipe.rename_fields({"text": "txt"}),
    "select": lambda pipe: pipe.select_fields("txt"),
    "tuple": lambda pipe: pipe.to_tuple("txt", "cls"),
    "filter": lambda pipe: pipe.filter_samples(bool),
    "filter, rng": lambda pipe: pipe.filter_samples(lambda sample, rng: rng.random() < 0.7),
    "shuffle": lambda pipe: pipe.shuffle_buffer(3),
    "shuffle, seed": lambda pipe: pipe.shuffle_buffer(4, seed=2),
    "batch": lambda pipe: pipe.batch_samples(2, collate="list"),
    "batch, drop_last": lambda pipe: pipe.batch_samples(2, collate="list", drop_last=True),
    "pack": lambda pipe: pipe.pack_samples(len, 9, window=3),
    "bucket": lambda pipe: pipe.bucket_samples(len, 2, window=3),
    "take": lambda pipe: pipe.take_samples(3),
    "slice": lambda pipe: pipe.slice_samples(1, 9, 2),
    "then": lambda pipe: pipe.then(iter, keeps_count=True),
    "repeat": lambda pipe: pipe.repeat(2),
    "decode": lambda pipe: pipe.decode_by_ext(),
    "decode, threads": lambda pipe: pipe.decode_by_ext(threads=2, on_error="skip", max_errors=9),
    "write": lambda pipe: pipe.write_shards(
        f"{tempfile.mkdtemp()}/{{lane}}-%d.tar", max_samples=2, overwrite=True, codecs={"cls;draw": as_text}
    ),
}
OF_SAMPLES = ("decode", "decode, threads", "write")
REPEATING = ("repeat", "mix")  # a sample comes twice, and a shard cannot have it twice


# a third of the pairs: each step, and each kind after many steps
PAIRS = [(step, list(KINDS)[number % 3 :: 3]) for number, step in enumerate(OF_ANY)]


@pytest.mark.parametrize(("step", "kinds"), PAIRS, ids=OF_ANY)
def test_every_step_and_option_after_kinds_of_steps_in_the_loader(step, kinds, tmp_path):
    """Cut in the middle of an epoch of two lanes. ``test_every_stage_before_every_kind`` has each
    pair of stages at every cut.
    """
    urls = make_shards(tmp_path, shards=4, samples=[3, 1, 4, 5])
    for kind in kinds:
        before = KINDS[kind]
        if (kind.startswith("batch") and step in OF_SAMPLES) or (kind in REPEATING and step == "write"):
            continue

        def make(before=before):
            pipe = OF_ANY[step](before(wp.ShardList(urls).open_shards().load_tar().group_by_key()))
            return wp.PipeLoader(pipe, lanes=2, epoch_end="exact")

        whole = list(make())
        taken, rest = resumed(make, len(whole) // 2)
        got = [*taken, *rest]
        if step == "write":  # into a directory of its own
            whole, got = (list(map(os.path.basename, names)) for names in (whole, got))
        assert same(got, whole), kind


def test_counts_before_a_shuffle_lag_until_the_end(urls):
    """They are those of the position from which a resume reads."""
    pipe = build(datapipes, (*BASE, "FilterSamples", "ShuffleBuffer"), urls)
    items = iter(pipe)
    next(items)
    assert pipe.counts()["filtered"] == 0
    left = len(list(items)) + 1
    assert pipe.counts() == {"delivered": left, "filtered": 14 - left, "skipped": 0, "dropped": 0}


@pytest.mark.parametrize(
    ("lanes", "exhausted", "after"),
    [
        (None, "stop", lambda pipe: pipe.batch(3)),
        (1, "repeat", lambda pipe: pipe.shuffle_buffer(2).batch_samples(3)),
        (2, "drop", lambda pipe: pipe.shuffle_buffer(2).batch_samples(3)),
    ],
)
def test_the_last_batch_of_a_mix(lanes, exhausted, after, tmp_path):
    """A mix that ends before its sources does not continue with them; through PipeLoader too, on
    one lane and on two.
    """
    urls = make_shards(tmp_path, shards=4, samples=[3, 2, 5, 6])

    def make():
        pipe = after(
            wp.mix({"a": build(datapipes, BASE, urls[:2]), "b": build(datapipes, BASE, urls[2:])}, exhausted=exhausted)
        )
        return pipe if lanes is None else wp.PipeLoader(pipe, lanes=lanes)

    check_resume(make)


def test_hosts_agree(urls):
    """The same recipe yields the same samples in the same order as a stream, pipe, node and
    dataset.
    """
    expected = list(HOSTS["stream"](CHAINS["All"], urls))
    for host in ("pipe", "dataset", "loader", "as_node", "prefetcher"):
        assert same(list(HOSTS[host](CHAINS["All"], urls)), expected), host


def test_urls_from_torch(urls):
    """torch's own pipes before ours: the state is how many URLs were taken. A foreign node keeps
    its own state inside ours.
    """
    from_node = lambda: nodes.OpenShards(torchdata_nodes.IterableWrapper(urls))  # noqa: E731
    check_resume(lambda: torchdata_nodes.Loader(nodes.GroupByKey(nodes.LoadTar(from_node()))))
    check_resume(lambda: IterableWrapper(urls).open_shards().load_tar().group_by_key().shuffle_buffer(3))
    check_resume(
        lambda: IterableWrapper(urls).map(str).filter(bool).open_shards().load_tar().group_by_key().batch_samples(3)
    )


# DataLoader processes


def loader(urls, workers, *, names=(*BASE, "ShuffleBuffer"), batch_size=None, **options):
    options |= {"num_workers": workers, "batch_size": batch_size, "collate_fn": list if batch_size else None}
    return StatefulDataLoader(build(datapipes, names, urls).as_dataset(), **options)


def run(source, *, epochs=1):
    """The samples of each epoch by their keys."""
    return [
        [[item["__key__"] for item in batch] if isinstance(batch, list) else batch["__key__"] for batch in source]
        for _ in range(epochs)
    ]


@pytest.mark.parametrize(("workers", "cuts", "batch_size"), [(0, range(15), None), (0, range(8), 2), (2, (4,), 2)])
def test_stateful_dataloader(workers, cuts, batch_size, urls):
    """At each cut, at a second one in this epoch, and at a third one in the next epoch."""
    make = lambda: loader(urls, workers, batch_size=batch_size)  # noqa: E731
    whole = run(make(), epochs=2)
    keys = flat(whole[0]) if batch_size else whole[0]
    assert sorted(keys) == [f"{number:08d}" for number in range(14)]
    assert whole[0] != whole[1]
    for cut in cuts:
        once = lambda cut=cut: resumed(make, cut)[1]  # noqa: E731
        assert run(once())[0] == whole[0][cut:]
        if cut + 2 < len(whole[0]):
            _, twice = resumed(once, 2)
            assert run(twice) == [whole[0][cut + 2 :]]
            assert run(itertools.islice(twice, 3)) == [whole[1][:3]]
            assert run(loaded(make(), through_json(twice.state_dict()))) == [whole[1][3:]]


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_lanes_of_very_different_lengths_in_a_stateful_dataloader(persistent, tmp_path):
    """One ends long before the other: states are taken while it waits, again after a resume, and at
    the beginning of the next epoch.
    """
    urls = make_shards(tmp_path, shards=2, samples=[1, 5])

    def make():
        return loader(urls, 2, names=BASE, persistent_workers=persistent)

    expected = flat(run(make(), epochs=4))
    for cuts in ((4, 1), (4, 1, 1, 1), (7,), (5, 2, 4), (6, 1, 5)):
        source, got = make(), []
        for cut in cuts:
            end = len(got) + cut
            while len(got) < end:
                got += keys_of(itertools.islice(source, end - len(got)))
            state = through_json(source.state_dict())
            source = loaded(make(), state)
        got += flat(run(source, epochs=2))
        assert got == expected[: len(got)]
        assert len(got) >= sum(cuts) + 6


def slow_second(number):
    if number == 1:
        time.sleep(1)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("look", ["another number", "no batch", "slow worker"])
def test_workers_are_never_in_different_epochs(look, urls):
    """Whatever has iterated the data before, with any number of workers and batches."""
    dataset = build(datapipes, BASE, urls).as_dataset()
    options = {"batch_size": None, "num_workers": 3, "worker_init_fn": slow_second if look == "slow worker" else None}
    source = DataLoader(dataset, **options)
    if look == "another number":
        run(DataLoader(dataset, batch_size=None, num_workers=2))
    elif look == "no batch":
        iter(source)
    else:
        next(iter(source))
    for _ in range(2):
        assert sorted(run(source)[0]) == [f"{number:08d}" for number in range(14)]


# Costs


def test_state_is_small_and_quick_at_any_cut(tmp_path):
    """Seven stages over 5 000 shards and a shuffle of 5 000: at most 1 KB at any cut."""
    [real] = make_shards(tmp_path / "real", shards=1, samples=2)
    folder = tmp_path / ("a-long-name-of-a-directory-" * 3)
    folder.mkdir()
    for number in range(5_000):
        (folder / f"train-{number:06d}.tar").symlink_to(real)
    names = (*BASE, "ShuffleBuffer", "DecodeByExt", "BatchSamples")
    ARGUMENTS_HERE = {"ShuffleBuffer": (5_000,), "BatchSamples": (8,)}
    pipe = datapipes.ShardList(f"{folder}/train-{{000000..004999}}.tar", shuffle=True, seed=1)
    for name in names:
        pipe = getattr(datapipes, name)(
            pipe, *ARGUMENTS_HERE.get(name, ()), **({"collate": "list"} if name == "BatchSamples" else {})
        )
    largest = most = cuts = 0
    for number, _ in enumerate(pipe):
        if number % 20 == 0:
            state = pipe.state_dict()
            most = max(most, calls(pipe.state_dict))
            largest, cuts = max(largest, len(json.dumps(state).encode())), cuts + 1
    assert pipe.counts()["delivered"] == 10_000
    assert cuts == 63
    assert largest <= 1024
    assert most < 500
