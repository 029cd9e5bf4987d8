"""filter_samples: keeps the samples that the function accepts and counts the rest."""

import pickle

import numpy as np
import pytest
from pipelines import even, samples
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import FilterSamples
from wds_pipes.testing import check_resume, make_shards


@pytest.mark.parametrize("predicate", [even, bool, lambda sample: None], ids=["some", "all", "none"])
def test_resumes_exactly(urls, predicate):
    check_resume(lambda: samples(urls).filter_samples(predicate).shuffle_buffer(2))


def test_keeps_the_order_and_counts(urls):
    """Delivered and filtered together are the samples of the epoch; each epoch counts anew."""
    pipe = samples(urls).filter_samples(even)
    for _ in range(2):
        assert all(map(even, pipe))
        assert pipe.counts() == {"delivered": 7, "filtered": 7, "skipped": 0, "dropped": 0}
    assert list(Stream(FilterSamples(Given(range(6)), lambda number: number % 3))) == [1, 2, 4, 5]


def test_the_count_is_right_in_the_middle_and_after_a_resume(urls):
    whole = samples(urls).filter_samples(even)
    pipe = samples(urls).filter_samples(even)
    items = iter(pipe)
    next(items)
    resumed = samples(urls).filter_samples(even)
    resumed.load_state_dict(pipe.state_dict())
    assert resumed.counts() == pipe.counts()
    assert len(list(resumed)) + 1 == len(list(whole))
    assert resumed.counts() == whole.counts()


@pytest.mark.parametrize("answer", [1, "x", [0], np.bool_(True), np.ones(())])
def test_any_true_value_keeps(answer):
    assert list(Stream(FilterSamples(Given([3]), lambda number: answer))) == [3]


@pytest.mark.parametrize("answer", [0, "", None, [], np.bool_(False)])
def test_any_false_value_does_not(answer):
    assert list(Stream(FilterSamples(Given([3]), lambda number: answer))) == []


def test_errors_are_raised_as_they_are_with_a_note(urls):
    with pytest.raises(KeyError) as caught:
        list(wp.ShardList(urls).open_shards().load_tar().group_by_key().filter_samples(lambda sample: sample["jpg"]))
    assert caught.value.__notes__ == [
        f"raised by the function of filter_samples() on sample '00000000' of shard {urls[0]}"
    ]
    with pytest.raises(ZeroDivisionError) as caught:
        list(Stream(FilterSamples(Given([0]), lambda number: 1 / number)))
    assert caught.value.__notes__ == ["raised by the function of filter_samples() on 0"]


def test_what_is_no_function_is_refused_when_it_is_built(urls):
    with pytest.raises(TypeError, match="filter_samples.* needs a function, not 'cls'"):
        samples(urls).filter_samples("cls")


def test_is_a_method_with_help_that_pickles(urls, capsys):
    pipe = samples(urls).filter_samples(even)
    assert list(pickle.loads(pickle.dumps(pipe))) == list(samples(urls).filter_samples(even))
    help(pipe.filter_samples)
    assert "Keep the samples for which a function returns true" in capsys.readouterr().out


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
