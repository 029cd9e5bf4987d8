"""The ledger: the digest in a state is that of the samples that were returned, on any number of
ranks, lanes and workers, after any history; and it tells when they are others.
"""

import contextlib
import itertools
import json
import resource
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ledgers import Phase, digest_of, entry, play
from pipelines import flat, samples, shuffled, through_json

import wds_pipes as wp
from wds_pipes.core.digest import add, in_epoch, of_samples, of_shard
from wds_pipes.loader.ledger_file import read_ledger
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards
from wds_pipes.tools import prove, same_data

SIZES = [3, 0, 7, 2, 9, 4, 6]


@pytest.fixture(scope="session")
def indexed(tmp_path_factory):
    urls = make_shards(tmp_path_factory.mktemp("indexed"), shards=len(SIZES), samples=SIZES)
    index_shards(urls, offsets=True)
    return urls


def counted(urls, **options):
    return shuffled(urls, samples_per_shard=SIZES, **options)


def listed(urls, **options):
    return wp.SampleList(urls, shuffle=True, **options).fetch_samples()


PHASES = st.lists(
    st.builds(Phase, st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 4), st.just(0)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    make=st.sampled_from([samples, shuffled, counted, listed]),
    end=st.sampled_from(["exact", "exact", "drop", "pad", "loop"]),
    mix=st.sampled_from([1, 1, 2]),
    drop_last=st.booleans(),
    own=st.booleans(),
    phases=PHASES,
)
@example(make=counted, end="exact", mix=1, drop_last=True, own=False, phases=[Phase(1, 2, 4, 100)])
@example(make=counted, end="exact", mix=2, drop_last=True, own=False, phases=[Phase(1, 3, 2, 100)])
@example(make=listed, end="pad", mix=1, drop_last=False, own=False, phases=[Phase(4, 1, 3, 1), Phase(3, 1, 3, 100)])
@example(make=counted, end="pad", mix=1, drop_last=False, own=False, phases=[Phase(4, 1, 3, 1), Phase(3, 1, 3, 100)])
@example(make=listed, end="exact", mix=1, drop_last=False, own=True, phases=[Phase(2, 2, 2, 3), Phase(2, 1, 2, 2)])
def test_it_is_of_the_samples_that_were_returned(indexed, make, end, mix, drop_last, own, phases):  # noqa: PLR0917
    """At each cut the sum over all ranks is that of what came so far, also after a repartition, and
    where each rank has loaded its own state.
    """
    if end != "exact" and make in (samples, shuffled):
        make = counted
    play(indexed, make, phases, end=end, mix=mix, drop_last=drop_last, own=own)


def run(urls, steps=None, *, make=shuffled, world=1, state=None, **options):
    """The states of all ranks after some steps of each, of batches of two (None: the rest)."""
    options = {"batch_size": 2, "epoch_end": "exact", "ledger": True, "world_size": world, **options}
    states = []
    for rank in range(world):
        with contextlib.closing(wp.PipeLoader(make(urls), rank=rank, **options)) as loader:
            if state is not None:
                loader.load_state_dict(state)
            for _ in itertools.islice(loader, steps):
                pass
            states.append(through_json(loader.state_dict()))
    return states


def saved(path, states):
    path.write_text(json.dumps(states))
    return str(path)


def test_workers_and_threads_have_the_same(fifty, tmp_path):
    """In worker processes, and where a later step reads ahead in threads."""
    [alone] = run(fifty, 9, lanes=4)
    assert run(fifty, 9, lanes=4, num_workers=2, multiprocessing_context="fork")[0]["ledger"] == alone["ledger"]
    threads = run(fifty, 9, lanes=4, make=lambda urls: shuffled(urls).map_samples(same, threads=2))
    assert threads[0]["ledger"] == alone["ledger"]


def same(sample):
    return sample


def swapped(items):
    """The 16th sample comes after the 17th."""
    for number, item in enumerate(items, 1):
        if number == 16:
            yield next(items)
        yield item


def test_moved_shards_have_the_same(fifty, tmp_path):
    for url in fifty:
        shutil.copy(url, tmp_path)
    [moved] = run([str(tmp_path / Path(url).name) for url in fifty], 9)
    assert moved["ledger"] == run(fifty, 9)[0]["ledger"]


@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (lambda urls: samples(urls).to_tuple("__key__").shuffle_buffer(3), {}, ValueError, "can have no ledger: after"),
        (
            lambda urls: samples(urls).pack_samples(len, 20).shuffle_buffer(3),
            {},
            ValueError,
            r"pack_samples\(\) and bucket_samples\(\) must be the last of these",
        ),
        (shuffled, {"ledger": 5}, TypeError, "the path of a file"),
        (shuffled, {"ledger": ""}, TypeError, "the path of a file"),
        (shuffled, {"ledger": "s3://bucket/a.ledger"}, ValueError, "is a local file"),
    ],
)
def test_without_a_place_for_it_a_loader_is_refused(make, options, error, message, fifty):
    with pytest.raises(error, match=message):
        wp.PipeLoader(make(fifty), **{"ledger": True, **options})


def test_a_ledger_begins_and_ends_with_an_epoch(fifty, caplog):
    """A state without one has none later either, and where it is left out it ends."""
    [state] = run(fifty, 3, ledger=False)
    assert "ledger" not in state
    assert "ledger" not in run(fifty, 1, state=state)[0]
    assert "cannot begin in its middle" in caplog.text
    [state] = run(fifty, 3)
    assert "ledger" not in run(fifty, 1, state=state, ledger=False)[0]
    assert "ends here" in caplog.text


def with_tokens(sample):
    """As many as a function of its key; with its shard."""
    number = int(sample["__key__"])
    return {"__key__": sample["__key__"], "__url__": sample["__url__"], "tokens": np.full(length_of(number), number)}


def length_of(number):
    return number * 7 % 23 + 1


GROUPS = {
    "wrap": lambda pipe: pipe.pack_samples("tokens", 10, method="wrap").to_tuple("tokens", "__key__", "__url__"),
    "a function": lambda pipe: pipe.pack_samples(lambda sample: len(sample["tokens"]), 30, window=4),
    "buckets": lambda pipe: pipe.bucket_samples("tokens", 3, boundaries=[8, 16], window=7),
}


@pytest.mark.parametrize("kind", GROUPS)
def test_of_packs_it_has_the_samples_that_ended(fifty, kind, tmp_path):
    """However a document is cut over packs, on any ranks; so ``state prove`` finds it again."""
    came, states, tokens = [], None, Counter()
    make = lambda: GROUPS[kind](shuffled(fifty).map_samples(with_tokens))  # noqa: E731
    for ranks, steps in ((1, 2), (3, 1), (1, 100)):
        options = {"world_size": ranks, "ledger": True, "epoch_end": "exact"}
        loaders = [wp.PipeLoader(make(), rank=rank, **options) for rank in range(ranks)]
        for loader in loaders:
            if states is not None:
                loader.load_state_dict(states)
            for pack in itertools.islice(loader, steps):
                named = pairs_of(pack)
                if kind == "wrap":
                    tokens.update(pack[0].tolist())
                    named = [pair for pair in named if tokens[int(pair[0])] == length_of(int(pair[0]))]
                came += named
        states = through_json([loader.state_dict() for loader in loaders])
        merged = wp.merge_states(states)
        digest = of_samples((key, of_shard(str(fifty.index(url)))) for key, url in came)
        assert merged["ledger"] == (entry(0, in_epoch(digest, 0)) if merged["epoch"] else entry(digest))
    assert prove(saved(tmp_path / "states.json", states), fifty).proven
    assert len(came) == len(set(came)) == 50


def pairs_of(pack):
    """The key and the URL of each part."""
    if isinstance(pack, list):
        return [(row["__key__"], row["__url__"]) for row in pack]
    keys, urls = (pack["__key__"], pack["__url__"]) if isinstance(pack, dict) else pack[1:]
    return list(zip(keys, urls, strict=True))


@pytest.mark.parametrize(
    "make",
    [
        lambda urls: samples(urls).then(only_text),
        lambda urls: samples(urls).map_samples(without_url).shuffle_buffer(3),
        lambda urls: samples(urls).map_samples(without_url).pack_samples("tokens", 9),
        lambda urls: samples(urls).map_samples(without_url).pack_samples(lambda sample: 3, 9),
    ],
)
def test_items_without_a_key_are_an_error(fifty, make):
    """Else any of them would be proven, and be the same data as any others."""
    with pytest.raises(TypeError, match=r"lacks '__key__', '__url__' or .*\. Keep them up to there"):
        run(fifty, 3, make=make, collate="list")


def without_url(sample):
    del sample["__url__"]
    sample["tokens"] = np.zeros(3)
    return sample


def only_text(items):
    return [next(items)["txt"]]


def test_epochs_add_up(fifty):
    """Of the epochs before there is one digest, in which each epoch counts differently, also one
    that was left.
    """
    with contextlib.closing(wp.PipeLoader(shuffled(fifty), batch_size=2, collate="list", ledger=True)) as loader:
        first, left = flat(loader), flat(itertools.islice(loader, 3))
        loader.set_epoch(5)
        now = flat(itertools.islice(loader, 4))
        state = loader.state_dict()
    earlier = [in_epoch(digest_of(got, fifty), epoch) for epoch, got in enumerate((first, left))]
    assert state["epoch"] == 5
    assert state["ledger"] == entry(digest_of(now, fifty), add(earlier))
    ranks = run(fifty, 0, world=3, state=state)
    assert wp.merge_states(ranks)["ledger"] == state["ledger"]
    assert wp.merge_states(run(fifty, 0, world=3, state=ranks))["ledger"] == state["ledger"]


def test_the_file_of_a_ledger(fifty, tmp_path):
    """It has 40 bytes for a head and each step; of a repeated step the last record counts, and a
    part of one is cut off.
    """
    path = tmp_path / "runs" / "a.ledger"
    [state] = run(fifty, 5, ledger=path)
    run(fifty, 3, state=state, ledger=path)
    assert path.stat().st_size == 40 * 9
    with open(path, "ab") as file:
        file.write(b"x" * 17)
    run(fifty, 4, state=state, ledger=path)
    assert path.stat().st_size == 40 * 13
    run(fifty, ledger=tmp_path / "b.ledger")
    found = same_data(str(path), str(tmp_path / "b.ledger"))
    assert found == (True, ["the same data in 9 steps, up to step 9 of epoch 0, after 18 samples of it"])
    (tmp_path / "other").write_text("no ledger" * 9)
    with pytest.raises(ValueError, match="is not a ledger"):
        run(fifty, 1, ledger=tmp_path / "other")


def test_the_first_step_that_differs(fifty, tmp_path):
    """Of two ledgers, also of other ranks on the same lanes; two samples that changed places are
    noticed.
    """
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    run(fifty, 6, make=samples, ledger=one, lanes=2)
    run(fifty, 3, make=samples, ledger=two, lanes=2, world=2)
    assert same_data(one, two).same
    (tmp_path / "two.rank-0001-of-0002").unlink()
    with pytest.raises(wp.StateError, match="the file of rank 1 of 2 is missing"):
        same_data(one, two)
    whole, broken = str(tmp_path / "whole"), str(tmp_path / "broken")
    run(fifty, make=samples, ledger=whole)
    run(fifty, make=lambda urls: samples(urls).then(swapped), ledger=broken)
    said = "not the same data: step 8 of epoch 0, after 16 samples of it, is the first one that differs"
    assert same_data(whole, broken).lines[0] == said
    other = str(tmp_path / "other")
    run(fifty, make=lambda urls: samples(urls, seed=6), ledger=other)
    found = same_data(whole, other)
    assert not found.same
    assert found.lines[1].startswith("after 50 samples of epoch 0 they are the same again: the order was another")
    run(fifty, 10, make=samples, ledger=broken)
    assert same_data(whole, broken) == (
        True,
        [
            "the same data in 25 steps, up to step 25 of epoch 0, after 50 samples of it",
            f"{broken}: step 8 of epoch 0 was repeated with other samples than before",
        ],
    )


def test_a_record_that_is_written_in_part_is_written_again(urls, tmp_path):
    """As when the disk is full: the step is not returned, and is repeated when there is room."""
    whole, part = (str(tmp_path / name) for name in ("whole", "part"))
    make = lambda path: wp.PipeLoader(shuffled(urls), batch_size=2, collate="list", ledger=path)  # noqa: E731
    with contextlib.closing(make(whole)) as loader:
        batches = list(loader)
    loader, found = make(part), []
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for batch in loader:
            found.append(batch)
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # half of the next record
    except OSError as error:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert "could not be written" in str(error)  # noqa: PT017
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    loader.load_state_dict(loader.state_dict())
    assert found + list(loader) == batches
    assert len(found) == 1
    loader.close()
    assert same_data(whole, part).same
    assert len(read_ledger(part).records) == len(batches)
