"""BucketSamples: batches of samples of like length."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import tokens_of
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import BucketSamples
from wds_pipes.testing import check_resume, make_shards


def documents(lengths):
    """Samples whose tokens are their numbers."""
    return [
        {"__key__": str(number), "tokens": np.full(length, number), "cls": number}
        for number, length in enumerate(lengths)
    ]


def batched(samples, *arguments, **options):
    """The batches, and the counts of the epoch."""
    stream = Stream(BucketSamples(Given(samples), "tokens", *arguments, **options))
    return list(stream), stream.counts()


BOUNDARIES = st.sampled_from([None, [], [4], [2, 5, 9]])


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 12), max_size=40), BOUNDARIES, st.integers(1, 9), st.integers(0, 4), st.booleans())
def test_each_sample_comes_once_in_a_batch_of_its_bucket(lengths, boundaries, window, size, sort):
    """Of at most so many samples, or for size 0 elements."""
    options = {"batch_size": size} if size else {"budget": 24}
    batches, counts = batched(documents(lengths), boundaries=boundaries, window=window, sort=sort, **options)
    rows = [
        (key, row[:length].tolist())
        for batch in batches
        for key, row, length in zip(batch["__key__"], batch["tokens"], batch["lengths"].tolist(), strict=True)
    ]
    assert sorted(rows) == sorted((str(number), [number] * length) for number, length in enumerate(lengths) if length)
    for batch in batches:
        held = batch["lengths"].tolist()
        assert batch["tokens"].shape == (len(held), max(held))
        assert len(held) <= size if size else len(held) * max(held) <= 24
        assert len({sum(length > bound for bound in boundaries or ()) for length in held}) == 1
    assert (counts["delivered"], counts["dropped"]) == (len(rows), len(lengths) - len(rows))


def test_full_batches_in_the_order_of_their_first_samples():
    batches, _ = batched(documents([5, 1, 6, 2, 1, 7, 5]), 2, boundaries=[3])
    assert [batch["__key__"] for batch in batches] == [["0", "2"], ["1", "3"], ["4"], ["5", "6"]]
    batches, _ = batched(documents([5, 1, 6, 2]), [2, 1], boundaries=[3])
    assert [batch["__key__"] for batch in batches] == [["0"], ["1", "3"], ["2"]]


def test_a_sample_waits_until_the_end_of_the_next_window():
    batches, _ = batched(documents([9, 1, 1, 1, 9, 1, 1, 1, 1]), 2, boundaries=[3], window=3)
    assert [batch["__key__"] for batch in batches] == [["1", "2"], ["0", "4"], ["3", "5"], ["6", "7"], ["8"]]
    batches, _ = batched(documents([9, 1, 1, 1, 1, 1, 1, 9]), 2, boundaries=[3], window=3)
    assert [batch["__key__"] for batch in batches] == [["1", "2"], ["0"], ["3", "4"], ["5", "6"], ["7"]]


def test_without_boundaries_samples_are_sorted_by_length():
    batches, _ = batched(documents([5, 1, 6, 2]), 2)
    assert [batch["__key__"] for batch in batches] == [["0", "2"], ["1", "3"]]


def test_with_boundaries_samples_can_be_sorted_by_length():
    """Also when samples are carried over; batches come in the order of their first samples."""
    batches, _ = batched(documents([5, 1, 9, 2, 6, 1, 1, 8]), 2, boundaries=[3], sort=True)
    assert [batch["__key__"] for batch in batches] == [["0", "4"], ["1", "5"], ["6", "3"], ["7", "2"]]
    batches, _ = batched(documents([5, 1, 6, 2]), 2, sort=False)
    assert [batch["__key__"] for batch in batches] == [["0", "1"], ["2", "3"]]


def test_sorted_buckets_need_less_padding_and_keep_the_order_of_batches_random():
    lengths = np.random.default_rng(0).integers(1, 100, 2000).tolist()
    fills = {}
    for sort in (False, True):
        batches, _ = batched(documents(lengths), budget=800, boundaries=[25, 50, 75], sort=sort)
        rows = [(len(batch["lengths"]), int(batch["lengths"].max())) for batch in batches]
        fills[sort] = sum(lengths) / sum(size * longest for size, longest in rows)
    assert fills[False] < 0.85
    assert fills[True] > 0.95
    places = [np.mean([place for place, (_, longest) in enumerate(rows) if longest <= 50]) / len(rows)]
    places += [np.mean([place for place, (_, longest) in enumerate(rows) if longest > 50]) / len(rows)]
    assert abs(places[0] - places[1]) < 0.1  # short batches come neither first nor last


def test_the_form_of_a_batch():
    samples = [
        {"__key__": "a", "tokens": [1, 2], "labels": np.array([2, 3], np.int32), "cls": 4},
        {"__key__": "b", "tokens": [3], "labels": np.array([4], np.int32), "cls": 5},
    ]
    [batch], _ = batched(samples, 2, aligned=["labels"], pad={"tokens": 0, "labels": -100})
    assert list(batch) == ["__key__", "tokens", "labels", "cls", "lengths"]
    assert batch["__key__"] == ["b", "a"]
    for name, values, dtype in (
        ("tokens", [[3, 0], [1, 2]], torch.int64),
        ("labels", [[4, -100], [2, 3]], torch.int32),
        ("cls", [5, 4], torch.int64),
        ("lengths", [1, 2], torch.int64),
    ):
        assert (batch[name].tolist(), batch[name].dtype) == (values, dtype)


def test_with_a_function_batches_are_lists_of_samples():
    """Such as the number of the bucket of an image's shape."""
    stream = Stream(BucketSamples(Given([0, 2, 1, 0, 2, 1, 0]), int, 2, boundaries=[0, 1]))
    assert list(stream) == [[0, 0], [2, 2], [1, 1], [0]]


def test_a_sample_that_is_longer_than_the_budget_is_named():
    with pytest.raises(wp.SampleError, match="sample '1' has the length 9, more than .* 8"):
        batched(documents([8, 9]), budget=8)
    with pytest.raises(wp.SampleError, match=r"has a field 'lengths'"):
        batched([{"__key__": "a", "tokens": [1], "lengths": 1}], 2)


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 3},
        {"budget": 24, "boundaries": [3, 6]},
        {"batch_size": [3, 2], "boundaries": [4], "window": 1},
        {"batch_size": 3, "boundaries": [6], "sort": True},
    ],
    ids=str,
)
def test_every_cut_and_second_cut(options):
    samples = documents([3, 8, 0, 2, 12, 6, 1, 7, 10, 4, 5])
    check_resume(lambda: Stream(BucketSamples(Given(samples), "tokens", **{"window": 4, **options})))


def test_a_state_is_small():
    """Also with the largest window, of which many samples are carried over."""
    stream = Stream(BucketSamples(Given(list(range(9000))), int, 2500, window=4096))
    sizes = [len(json.dumps(stream.state_dict())) for _ in stream]
    assert 900 < max(sizes) < 1200


def test_an_epoch_is_cut_in_batches_only(tmp_path):
    pipe = wp.ShardList(make_shards(tmp_path, shards=1, samples=6)).open_shards().load_tar().group_by_key()
    loader = wp.PipeLoader(pipe.map_samples(tokens_of).bucket_samples("tokens", budget=20))
    for each in (loader, wp.PipeLoader(wp.mix({"a": pipe.bucket_samples(len, 2)}))):
        with pytest.raises(ValueError, match=r"batches of different numbers of samples: pass b"):
            each.with_epoch(samples=4)
    assert len(list(loader.with_epoch(batches=1))) == 1
