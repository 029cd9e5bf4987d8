"""The batches that ``wds-pipes browse`` says a rank gets next are those that its loader returns."""

import json
from pathlib import Path

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import even, samples, shuffled

import wds_pipes as wp
from wds_pipes.errors import StateError
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards
from wds_pipes.tools.training import MOST_READ, order_of_loader, order_of_state

MADE = []  # what ``loader`` returns
PIPES = {
    "list": lambda urls: wp.SampleList(urls, shuffle=True, seed=5).fetch_samples().to_tuple("__key__", "txt"),
    "counted": lambda urls: samples(urls, index=True).shuffle_buffer(3).map_samples(dict),
    "filter": lambda urls: samples(urls).decode_by_ext().filter_samples(even).shuffle_buffer(3),
    "uncounted": shuffled,
    "mix": lambda urls: wp.mix({"a": samples(urls[:3]), "b": samples(urls[3:])}, exhausted="drop"),
}


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ordered")
    found = make_shards(folder, shards=5, samples=[7, 5, 8, 6, 9], fields=("txt",))
    index_shards(found, f"{folder}/index.json", offsets=True)
    return found


def loader():
    return MADE[0]()


def loader_over(urls, name, **options):
    def make():
        return wp.PipeLoader(PIPES[name](urls), batch_size=3, collate=names, epoch_end="exact", **options)

    MADE[:] = [make]
    return make()


def names(samples):
    return [sample[0] if isinstance(sample, tuple) else sample["__key__"] for sample in samples]


def said(batches, keys):
    return [[one.key or keys[one.url, one.number] for one in samples] for samples in batches.values()]


@pytest.fixture(scope="module")
def keys(urls):
    counts, number = [7, 5, 8, 6, 9], iter(range(100))
    return {
        (url, place): f"{next(number):08d}" for url, count in zip(urls, counts, strict=True) for place in range(count)
    }


@pytest.mark.parametrize("name", PIPES)
@settings(max_examples=2, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.tuples(st.integers(0, 6), st.integers(1, 3), st.integers(0, 1)))
def test_the_next_batches_are_those_that_the_loader_returns(urls, keys, tmp_path, name, at):
    """Of a rank of two, from any position, computed or read."""
    cut, lanes, rank = at
    options = {"lanes": 2 * lanes, "rank": rank, "world_size": 2}
    first, got = loader_over(urls, name, **options), []
    for _, batch in zip(range(cut), first, strict=False):
        got.append(batch)
    file = tmp_path / "state.json"
    state = first.state_dict()
    file.write_text(json.dumps(state))
    order = order_of_loader(f"{__name__}:loader", state=str(file))
    again = loader_over(urls, name, **options)
    again.load_state_dict(state)
    expected = list(again)
    assert (order.unknown is None) == (name in ("list", "counted"))
    assert (order.rank, order.ranks, order.step) == (rank, 2, state["step"])
    assert said(order.batches(order.step, 100), keys) == expected[:MOST_READ]
    assert said(order.batches(order.step + 1, 2), keys) == expected[1:3]


@pytest.mark.parametrize("name", ["list", "counted", "uncounted"])
def test_a_state_alone_names_the_steps(urls, keys, tmp_path, name):
    """Over the shards that are passed with it; of each rank, if it has the states of all."""
    files, ranks = [tmp_path / f"{rank}.json" for rank in range(2)], []
    for rank, file in enumerate(files):
        one = loader_over(urls, name, lanes=4, rank=rank, world_size=2)
        for _ in zip(range(2), one):
            pass
        ranks.append(one.state_dict())
        file.write_text(json.dumps(ranks[-1]))
    both = tmp_path / "both.json"
    both.write_text(json.dumps(ranks))
    for rank, file in enumerate(files):
        again = loader_over(urls, name, lanes=4, rank=rank, world_size=2)
        again.load_state_dict(ranks[rank])
        expected = list(again)
        for source in (file, both):
            order = order_of_state(str(source), urls, rank=rank)
            assert order.step == 2
            assert said(order.batches(2, 100), keys) == expected
            assert [line.partition(":")[0] for line in order.position[1:-1]] == [
                f"lane {rank + 2 * one} of 4" for one in (0, 1)
            ]
    with pytest.raises(StateError, match="collect the states of all ranks"):
        order_of_state(str(files[0]), urls, rank=1)
    with pytest.raises(ValueError, match="has 2 ranks, from 0 on, and not rank 2"):
        order_of_state(str(both), urls, rank=2)
    with pytest.raises(StateError, match="made over 5 shards, this pipeline has 4"):
        order_of_state(str(both), urls[:4])


def with_tokens(sample):
    return {**sample, "tokens": list(range(1 + int(sample["__key__"]) % 7))}


@pytest.mark.parametrize("length", ["tokens", lambda sample: len(sample["tokens"])])
def test_of_packs_it_says_the_samples(urls, length):
    def make():
        return wp.PipeLoader(samples(urls).map_samples(with_tokens).pack_samples(length, 12, window=6))

    MADE[:] = [make]
    order = order_of_loader(f"{__name__}:loader")
    expected = [names(pack) if isinstance(pack, list) else pack["__key__"] for pack in make()]
    assert said(order.batches(0, 100), {}) == expected[:MOST_READ]


def test_a_state_of_a_filter_needs_the_pipeline(urls, tmp_path):
    file = tmp_path / "state.json"
    file.write_text(json.dumps(loader_over(urls, "filter").state_dict()))
    with pytest.raises(StateError, match="filter_samples\\(\\) leaves samples out"):
        order_of_state(str(file), urls)


def test_the_files_of_a_training_do_not_change(urls, tmp_path):
    """Neither its ledger nor its cache is written, though a filter makes the pipeline run."""
    memory = fsspec.filesystem("memory")
    remote = [f"memory://upcoming/{Path(url).name}" for url in urls]
    for url, name in zip(urls, remote, strict=True):
        memory.pipe(name, Path(url).read_bytes())
    cache, path = wp.ShardCache(tmp_path / "cache", max_bytes=1 << 20), tmp_path / "run.ledger"

    def make():
        pipe = wp.ShardList(remote).open_shards(cache=cache).load_tar().group_by_key().filter_samples(even)
        return wp.PipeLoader(pipe, batch_size=3, epoch_end="exact", collate="list", ledger=path)

    MADE[:] = [make]
    order = order_of_loader(f"{__name__}:loader")
    found = [[one.key for one in samples] for samples in order.batches(0, 100).values()]
    assert not path.exists()
    assert not [file for file in tmp_path.rglob("*") if file.is_file()]
    trained = make()
    assert found == [[sample["__key__"] for sample in batch] for batch in trained]
    trained.close()
    assert path.exists()
    assert [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]


@pytest.mark.parametrize(
    ("pipe", "message"),
    [
        (lambda urls: samples(urls).to_tuple("txt").shuffle_buffer(3), "Put to_tuple\\(\\) after that step"),
        (lambda urls: samples(urls).to_tuple("txt").filter_samples(bool), "filter_samples"),
    ],
)
def test_batches_without_names_are_refused(urls, pipe, message):
    MADE[:] = [lambda: wp.PipeLoader(pipe(urls), batch_size=3, epoch_end="exact")]
    order = order_of_loader(f"{__name__}:loader")
    with pytest.raises(ValueError, match=f"which samples come is not known.*{message}"):
        order.batches(0, 1)
