"""map_samples: any function of a sample, and random draws that depend only on (seed, epoch,
sample).
"""

import functools
import shutil

import numpy as np
import pytest
from sources import Given
from torch.utils.data.datapipes.iter import IterableWrapper

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import MapSamples
from wds_pipes.testing import make_shards


def shards(urls, **options):
    return wp.ShardList(urls, **{"seed": 5, **options}).open_shards().load_tar().group_by_key()


def draw(sample, rng):
    return sample["__key__"], int(rng.integers(1 << 60))


def draw_number(number, rng):
    return number, int(rng.integers(1 << 60))


# What is called, and how


def scale(sample, factor=2):
    return sample * factor


class Callable:
    def __call__(self, sample, rng):
        return sample, type(rng).__name__


class Method:
    def one(self, sample):
        return sample + 1

    def two(self, sample, generator):
        return sample, type(generator).__name__


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda sample: sample + 1, 4),
        (lambda *samples: samples, (3,)),
        (scale, 6),
        (functools.partial(scale, factor=5), 15),
        (functools.partial(pow, 2), 8),
        (str, "3"),
        (float, 3.0),
        (int.bit_length, 2),
        (Method().one, 4),
        (np.sqrt, np.sqrt(3)),
        (functools.partial(lambda sample, rng: rng, rng=7), 7),
    ],
)
def test_functions_of_a_sample(fn, expected):
    """Optional further parameters stay at their defaults."""
    assert list(Stream(MapSamples(Given([3]), fn))) == [expected]


@pytest.mark.parametrize(
    "fn",
    [
        lambda sample, rng: (sample, type(rng).__name__),
        lambda sample, rng=None: (sample, type(rng).__name__),
        lambda sample, anything, /: (sample, type(anything).__name__),
        functools.partial(lambda strength, sample, rng: (sample, type(rng).__name__), 0.5),
        functools.partial(lambda sample, rng, strength: (sample, type(rng).__name__), strength=0.5),
        Callable(),
        Method().two,
    ],
)
def test_functions_of_a_sample_and_a_generator(fn):
    assert list(Stream(MapSamples(Given([3]), fn))) == [(3, "Generator")]


# What is drawn


def test_draws_differ_between_samples_epochs_seeds_and_steps(urls):
    pipe = shards(urls).map_samples(draw)
    epochs = [dict(pipe), dict(pipe), dict(shards(urls, seed=6).map_samples(draw))]
    assert len({value for epoch in epochs for value in epoch.values()}) == 3 * 14
    first, second = dict(shards(urls).map_samples(draw)), dict(shards(urls).map_samples(dict).map_samples(draw))
    assert not set(first.values()) & set(second.values())


@pytest.mark.parametrize(
    "chain",
    [lambda pipe: pipe.shuffle_buffer(5), lambda pipe: pipe.filter_samples(bool), lambda pipe: pipe.decode_by_ext()],
)
def test_a_dict_sample_draws_the_same_in_another_order(urls, chain):
    """Shards shuffled or not, with or without other steps before."""
    plain = dict(shards(urls).map_samples(draw))
    assert dict(chain(shards(urls, shuffle=True)).map_samples(draw)) == plain


def test_other_items_draw_by_lane_and_number():
    """No two of them alike."""
    drawn = []
    for lane in (0, 1):
        source = Given(range(20))
        source.context.lane, source.context.lanes = lane, 2
        drawn += [value for _, value in Stream(MapSamples(source, draw_number))]
    assert len(set(drawn)) == 20


def test_draws_do_not_depend_on_credentials():
    """The same shards may have other credentials after a resume. The part of a URL that selects a
    shard counts.
    """
    queries = ("id=1&token=one", "id=1&sv=1&se=2&sig=other", "id=2&token=one")
    drawn = [
        list(Stream(MapSamples(Given([{"__key__": "a", "__url__": f"https://x/a.tar?{query}"}]), draw_number))).pop()[1]
        for query in queries
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_draws_do_not_depend_on_the_place_of_shards(urls, tmp_path):
    """They depend on the number of the shard in its list, under any name."""
    copies = [shutil.copy(url, f"{tmp_path}/{number}.tar") for number, url in enumerate(urls)]
    drawn = list(shards(urls).map_samples(draw))
    assert list(shards(copies).map_samples(draw)) == drawn
    listed = [IterableWrapper(of).open_shards().load_tar().group_by_key().map_samples(draw) for of in (urls, copies)]
    assert list(listed[0]) == list(listed[1])


def test_golden_key():
    """The key of a sample's generator never changes; numpy's Philox is a published function of
    it.
    """
    sample = {"__key__": "0001", "__url__": "s3://bucket/a.tar"}
    keys = list(
        Stream(
            MapSamples(Given([sample, 1], seed=3), lambda sample, rng: rng.bit_generator.state["state"]["key"].tolist())
        )
    )
    assert keys == [[5607659458440018708, 0], [2697846336622512274, 0]]


# Errors


class OwnError(Exception):
    pass


def bad(sample):
    if sample["__key__"] == "00000004":
        raise OwnError("no good")
    return sample["__key__"]


def test_errors_are_raised_as_they_are_with_a_note(urls):
    """The note names the sample and its shard, without credentials."""
    with pytest.raises(OwnError, match="no good") as caught:
        list(shards(urls).map_samples(bad))
    assert caught.value.__notes__ == [
        f"raised by the function of map_samples() on sample '00000004' of shard {urls[2]}"
    ]
    sample = {"__key__": "00000004", "__url__": "https://me:secret@host/a.tar"}
    with pytest.raises(OwnError) as caught:
        list(Stream(MapSamples(Given([sample]), bad)))
    assert "secret" not in "".join(caught.value.__notes__)


def test_a_number_names_an_item_without_a_key():
    with pytest.raises(ZeroDivisionError) as caught:
        list(Stream(MapSamples(Given([2, 1, 0]), lambda number: 1 / number)))
    assert caught.value.__notes__ == ["raised by the function of map_samples() on sample 3 of this lane and epoch"]


def test_stop_iteration_of_the_function_is_no_end_of_the_data():
    """Otherwise it would silently shorten the epoch."""
    with pytest.raises(RuntimeError):
        list(Stream(MapSamples(Given([1, 2]), lambda number: next(iter(())))))


def test_a_function_that_returns_nothing_is_named(tmp_path):
    """A forgotten return is an error, which is skipped and counted like any other."""

    def forgetful(sample):
        return sample if sample["__key__"] != "00000001" else None

    pipe = wp.ShardList(make_shards(tmp_path, shards=1, samples=3)).open_shards().load_tar().group_by_key()
    with pytest.raises(
        wp.SampleError, match=r"returned None for sample '00000001' of shard .*filter_samples"
    ) as caught:
        list(pipe.map_samples(forgetful))
    assert caught.value.key == "00000001"
    skipping = pipe.map_samples(forgetful, on_error="skip")
    assert len(list(skipping)) == 2
    assert skipping.counts()["skipped"] == 1


# What a new sample keeps


def test_a_new_dict_keeps_the_key_and_the_url(urls):
    """As webdataset's map does, so that later steps still know the sample."""
    label = lambda sample: {"label": sample["cls"]}  # noqa: E731
    [first, *_] = shards(urls).map_samples(label)
    assert list(first) == ["__key__", "__url__", "label"]
    changed = next(iter(shards(urls).map_samples(lambda sample: {"__key__": "own", "label": 1})))
    assert changed == {"__key__": "own", "__url__": urls[0], "label": 1}
    assert next(iter(shards(urls).map_samples(lambda sample: (1, 2)))) == (1, 2)
    constant = {"label": 1}
    assert len({sample["__key__"] for sample in shards(urls).map_samples(lambda sample: constant)}) == 14
    assert constant == {"label": 1}


def test_a_new_dict_of_a_batch_is_left_as_it_is(urls):
    """What goes to ``model(**batch)`` has only the fields that the function returned."""
    batch = next(iter(shards(urls).batch_samples(2).map_samples(lambda batch: {"label": batch["cls"]})))
    assert list(batch) == ["label"]


@pytest.mark.parametrize("lanes", [2, 3])
def test_new_dicts_draw_the_same_with_any_number_of_lanes(urls, lanes):
    make = lambda: shards(urls).map_samples(lambda sample: {"label": 1}).map_samples(draw)  # noqa: E731
    batches = wp.PipeLoader(make(), batch_size=2, collate="list", lanes=lanes)
    assert sorted(pair for batch in batches for pair in batch) == sorted(make())


def test_padded_samples_say_that_they_are(urls):
    loader = wp.PipeLoader(
        shards(urls, samples_per_shard=[3, 0, 5, 2, 4]).map_samples(lambda sample: {"label": 1}),
        batch_size=4,
        epoch_end="pad",
        collate="list",
    )
    assert sum(sample["__padding__"] for batch in loader for sample in batch) == 2
