"""filter_samples: keeps the samples that the function accepts and counts the rest."""

import numpy as np
import pytest
from pipelines import even, samples
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import FilterSamples
from wds_pipes.testing import make_shards


def test_keeps_the_order_and_counts(urls):
    """Delivered and filtered together are the samples of the epoch; each epoch counts anew."""
    pipe = samples(urls).filter_samples(even)
    for _ in range(2):
        assert all(map(even, pipe))
        assert pipe.counts() == {"delivered": 7, "filtered": 7, "skipped": 0, "dropped": 0}
    assert list(Stream(FilterSamples(Given(range(6)), lambda number: number % 3))) == [1, 2, 4, 5]


@pytest.mark.parametrize("answer", [1, "x", [0], np.bool_(True), np.ones(()), 0, "", None, [], np.bool_(False)])
def test_any_true_value_keeps(answer):
    assert list(Stream(FilterSamples(Given([3]), lambda number: answer))) == [3] * bool(answer)


def wanted_shard(ref):
    return ref.url[-5] in "14"


@pytest.mark.parametrize("opened_by", ["pipe", "interleave_shards", "lanes"])
def test_urls_that_are_dropped_are_counted(opened_by, tmp_path):
    """Also those after the last URL that is kept, and those of lanes without any other."""
    urls = make_shards(tmp_path, shards=7, samples=2)
    pipe = wp.ShardList(urls).filter_samples(wanted_shard).open_shards().load_tar().group_by_key()
    source = {
        "pipe": lambda: pipe,
        "interleave_shards": lambda: pipe.interleave_shards(2),
        "lanes": lambda: wp.PipeLoader(pipe, lanes=4),
    }[opened_by]()
    assert len(list(source)) == 4
    counts = source.counts()
    assert (counts["delivered"], counts["filtered"]) == (4, 5)
