"""Random numbers of single samples: rng of map_samples and filter_samples, and seed_all."""

import concurrent.futures
import random

import numpy as np
import pytest
import torch
from pipelines import keys_of, samples

import wds_pipes as wp
from wds_pipes.testing import check_resume, make_shards


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("draws"), shards=3, samples=5)


def draw_all(sample):
    """One number of each global generator, as augmentations draw them."""
    return {
        **sample,
        "draws": (random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))),
    }


def by_key(samples):
    return {sample["__key__"]: sample["draws"] for sample in samples}


def test_global_generators_are_seeded_by_sample(urls):
    """The same numbers in another order, on other lanes and in workers; others in another epoch."""
    make = lambda **options: samples(urls, **options).map_samples(draw_all, seed_all=True)  # noqa: E731
    pipe = make()
    expected, second = by_key(pipe), by_key(pipe)
    assert len({number for draws in expected.values() for number in draws}) == 4 * 15
    assert not set(expected.values()) & set(second.values())
    assert by_key(make(shuffle=False)) == expected
    for workers in (0, 2):
        loader = wp.PipeLoader(make().map_samples(dict), batch_size=2, collate="list", num_workers=workers)
        assert by_key(sample for batch in loader for sample in batch) == expected
        loader.close()


def test_each_cut_resumes_with_the_same_draws(urls):
    check_resume(lambda: samples(urls[:1]).map_samples(draw_all, seed_all=True).shuffle_buffer(3))


def fails(sample):
    draw_all(sample)
    raise ValueError("odd")


def in_a_function(pipe):
    for _ in pipe:
        return


def with_an_error(pipe):
    with pytest.raises(ValueError, match="odd"):
        list(pipe.map_samples(fails, seed_all=True))


def closed(pipe):
    items = iter(pipe)
    next(items)
    items.close()


def by_another_iterator(pipe):
    items = iter(pipe)
    next(items)
    list(pipe)


def in_lanes(pipe):
    """The lanes of one process begin and end one after another."""
    loader = wp.PipeLoader(pipe, batch_size=2, collate="list", lanes=3)
    list(loader)
    next(iter(loader))
    loader.close()


LEFT = {
    "at the end": list,
    "break": in_a_function,
    "error": with_an_error,
    "close": closed,
    "another iterator": by_another_iterator,
    "two steps": lambda pipe: list(pipe.map_samples(draw_all, seed_all=True)),
    "lanes": in_lanes,
}


@pytest.mark.parametrize("leave", LEFT.values(), ids=LEFT)
def test_the_generators_are_put_back_when_the_iteration_is_left(urls, leave):
    def next_numbers():
        numbers = draw_all({})["draws"]
        return *numbers, float(np.random.randn())  # the second one of a pair, which numpy keeps

    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(1)
    draw_all({})
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    expected = next_numbers()
    random.setstate(states[0]), np.random.set_state(states[1]), torch.set_rng_state(states[2])
    leave(samples(urls).map_samples(draw_all, seed_all=True))
    assert next_numbers() == expected


def test_a_generator_belongs_to_its_call(urls):
    """One generator serves all calls. A function that keeps it has it for itself."""
    kept = list(samples(urls).map_samples(lambda sample, rng: (rng, rng.random())))
    expected = list(samples(urls).map_samples(lambda sample, rng: (rng.random(), rng.random())))
    assert [(first, rng.random()) for rng, first in kept] == expected
    parts = list(samples(urls).map_samples(lambda sample, rng: (rng.bit_generator, rng.random())))
    assert [(first, np.random.Generator(bits).random()) for bits, first in parts] == expected


def test_threads_draw_the_same(urls):
    """Each thread has a generator of its own, also one whose numbers come in pairs."""

    def draws(sample, rng):
        return sample["__key__"], rng.integers(1 << 20, dtype=np.uint32), rng.normal(), rng.random(7).sum()

    alone = list(samples(urls).map_samples(draws))
    assert list(samples(urls).map_samples(draws, threads=3)) == alone


def test_threads_are_refused(urls):
    """What they draw would depend on the time."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        run = pool.submit(list, samples(urls).map_samples(draw_all, seed_all=True))
        with pytest.raises(RuntimeError, match="runs in a thread.*let the function draw from rng"):
            run.result()


def test_two_steps_draw_different_numbers(urls):
    pipe = samples(urls).map_samples(draw_all, seed_all=True)
    first = by_key(pipe)
    twice = by_key(samples(urls).map_samples(draw_all, seed_all=True).map_samples(draw_all, seed_all=True))
    assert not set(first.values()) & set(twice.values())
    both = samples(urls).map_samples(lambda sample, rng: {**sample, "draws": rng.random()}, seed_all=True)
    assert len(set(by_key(both).values())) == 15


def half(sample, rng):
    return rng.random() < 0.5


def test_a_filter_that_draws(urls):
    """Another half in each epoch, the same in any order and after any resume."""
    pipe = samples(urls).filter_samples(half)
    epochs = [set(keys_of(pipe)) for _ in range(6)]
    assert all(2 < len(kept) < 14 for kept in epochs)
    assert len({frozenset(kept) for kept in epochs}) == 6
    assert pipe.counts()["filtered"] == 15 - len(epochs[-1])
    assert set(keys_of(samples(urls, shuffle=False).filter_samples(half))) == epochs[0]
    with pytest.raises(TypeError, match=r"filter_samples\(\) needs fn\(sample\) or fn\(sample, rng\)"):
        samples(urls).filter_samples(lambda: True)


def odd_ones(sample):
    return wp.DROP if int(sample["__key__"]) % 2 else sample


def test_a_function_may_drop_samples(urls):
    pipe = samples(urls).map_samples(odd_ones, may_drop=True)
    assert sorted(keys_of(pipe)) == [f"{number:08d}" for number in range(0, 15, 2)]
    assert pipe.counts() == {"delivered": 8, "filtered": 7, "skipped": 0, "dropped": 0}
    check_resume(lambda: samples(urls[:2]).map_samples(odd_ones, may_drop=True).shuffle_buffer(2))
    loader = wp.PipeLoader(
        samples(urls).map_samples(odd_ones, may_drop=True), batch_size=2, collate="list", num_workers=1
    )
    assert sorted(key for batch in loader for key in keys_of(batch)) == sorted(keys_of(pipe))
    assert loader.counts()["filtered"] == 7
    loader.close()
    assert repr(wp.DROP) == "wds_pipes.DROP"


def test_drop_must_be_allowed(urls):
    """So that ranks know whether the length of an epoch is known."""
    with pytest.raises(wp.SampleError, match="returned DROP for sample.*pass may_drop=True"):
        list(samples(urls).map_samples(odd_ones, on_error="skip"))
    pipe = samples(urls, samples_per_shard=5).map_samples(odd_ones, may_drop=True)
    with pytest.raises(ValueError, match=r"map_samples\(\) may change their number"):
        wp.PipeLoader(pipe, batch_size=2, epoch_end="drop")
