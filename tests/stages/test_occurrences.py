"""Samples that come several times in an epoch: each occurrence draws random numbers of its own, the
same after each resume and on any lanes.
"""

import itertools
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import flat, key_of, loaded, samples, through_json

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.testing import check_resume, make_shards


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("occurrences"), shards=5, samples=[3, 0, 5, 2, 4])


def draw(sample, rng):
    return {**sample, "draws": [*sample.get("draws", ()), int(rng.integers(1 << 63))]}


def drawn(samples):
    return [number for sample in samples for number in sample["draws"]]


def parts(sample, most=3):
    """Nothing, or up to three parts with the key of the sample."""
    return [{**sample, "part": part} for part in range(int(sample["__key__"]) % (most + 1))]


class Parts(wp.FlatMap):
    order_options = ()

    def expand(self, sample):
        return parts(sample)


class NewParts(wp.FlatMap):
    """New dicts, without the occurrence of the sample."""

    order_options = ()

    def expand(self, sample):
        for part in range(2):
            yield {"__key__": sample["__key__"], "__url__": sample["__url__"], "part": part}


for kind in (Parts, NewParts):
    wp.register_stage(kind)


def in_parts(items):
    yield from parts(next(items))


def three_times(items):
    yield from itertools.repeat(next(items), 3)


def sorted_chunk(items):
    yield from sorted(itertools.islice(items, 4), key=lambda sample: sample["__key__"][::-1])


def chunk_twice(items):
    yield from list(itertools.islice(items, 3)) * 2


def unchanged(sample):
    return sample


# steps after which draws are the same on any lanes
STEPS = {
    "flat map": lambda pipe: pipe.parts(),
    "new parts": lambda pipe: pipe.new_parts(),
    "then": lambda pipe: pipe.then(in_parts),
    "one object": lambda pipe: pipe.then(three_times),
    "sorted": lambda pipe: pipe.then(sorted_chunk),
    "chunk twice": lambda pipe: pipe.then(chunk_twice),
    "shuffle": lambda pipe: pipe.shuffle_buffer(4),
    "threads": lambda pipe: pipe.map_samples(unchanged, threads=2),
    "draws": lambda pipe: pipe.map_samples(draw),
    "filter": lambda pipe: pipe.filter_samples(lambda sample: sample["__key__"][-1] != "3"),
    "unbatched list": lambda pipe: pipe.batch_samples(3, collate="list").unbatch_samples(),
    "unbatched columns": lambda pipe: pipe.map_samples(plain).batch_samples(3).unbatch_samples().map_samples(listed),
    "selected": lambda pipe: pipe.select_fields("txt;draws;part"),
}
OF_LANES = {"repeat": lambda pipe: pipe.repeat(2)}


def plain(sample):
    """What can be stacked."""
    numbers = " ".join(map(str, sample.get("draws", ())))
    return {name: value for name, value in sample.items() if name[:2] == "__"} | {"draws": numbers, "txt": "x"}


def listed(sample):
    return {**sample, "draws": [*map(int, sample["draws"].split())]}


def fields(sample):
    return {**sample, "txt": "x"}


def shard_pipe(urls, source):
    options = {
        "once": {},
        "resampled": {"resampled": True},
        "weights": {"resampled": True, "weights": [1, 3, 1, 2, 2, 1][: len(urls)]},
    }
    return samples(urls, **options[source]).map_samples(fields)


SOURCES = st.tuples(st.sampled_from(["once", "resampled", "weights"]), st.booleans(), st.booleans())


def build(urls, sources, before, after, exhausted):
    """A pipe of sources, each with steps of its own, mixed if there are several."""
    pipes = []
    for (source, twice, interleaved), steps in zip(sources, before, strict=False):
        pipe = shard_pipe([*urls, urls[0]] if twice else urls, source)
        pipe = pipe.interleave_shards(2) if interleaved else pipe
        for name in steps:
            pipe = STEPS[name](pipe)
        pipes.append(pipe)
    pipe = pipes[0]
    if len(pipes) > 1:
        pipe = wp.mix({f"{place}": one for place, one in enumerate(pipes)}, exhausted=exhausted)
    for name in after:
        pipe = {**STEPS, **OF_LANES}[name](pipe)
    return pipe.map_samples(draw)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:sources .* read the same shards")
@settings(max_examples=60, deadline=None, database=None)
@given(
    sources=st.lists(SOURCES, min_size=1, max_size=2),
    before=st.lists(st.lists(st.sampled_from([*STEPS]), max_size=2), min_size=2, max_size=2),
    after=st.lists(st.sampled_from([*STEPS, *OF_LANES]), max_size=3),
    exhausted=st.sampled_from(["stop", "drop", "repeat"]),
    cut=st.floats(0, 1),
)
def test_no_two_occurrences_draw_alike_and_resumes_repeat_them(  # noqa: PLR0917
    urls, sources, before, after, exhausted, cut
):
    make = partial(build, urls, sources, before, after, exhausted)
    pipe = make()
    first, second = list(pipe), list(pipe)
    numbers = {number for sample in [*first, *second] for number in sample["draws"]}
    last = [sample["draws"][-1] for sample in first]
    assert len(set(last)) == len(last)
    assert not set(last) & {sample["draws"][-1] for sample in second}
    steps_that_draw = 1 + max((len(sample["draws"]) for sample in first), default=0)
    assert len(numbers) <= steps_that_draw * (len(first) + len(second))
    assert not any("__occurrence__" in sample for sample in first)
    place = int(cut * len(first))
    again = make()
    items = iter(again)
    for _ in range(place):
        next(items)
    assert list(loaded(make(), through_json(again.state_dict()))) == first[place:]


def by_lanes(make, lanes, later, place):
    """The draws of an epoch, of which the first batches come on other lanes than the rest."""
    options = {"batch_size": 2, "collate": "list", "epoch_end": "exact"}
    loader = wp.PipeLoader(make(), lanes=lanes, **options)
    batches = iter(loader)
    first = flat(itertools.islice(batches, place))
    rest = loaded(wp.PipeLoader(make(), lanes=later, **options), through_json(loader.state_dict()))
    if rest.epoch:  # the first batches were all of the epoch
        return sorted(sample["draws"][-1] for sample in first)
    return sorted(sample["draws"][-1] for sample in [*first, *flat(rest)])


@pytest.mark.slow
@settings(max_examples=40, deadline=None, database=None)
@given(
    source=SOURCES,
    steps=st.lists(st.sampled_from([*STEPS]), max_size=3),
    lanes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    place=st.integers(0, 9),
)
def test_other_lanes_draw_the_same(urls, source, steps, lanes, place):
    steps = [step for step in steps if step != "chunk twice"]  # what is in a chunk depends on the lane
    make = partial(build, urls, [source], [steps], [], "stop")
    expected = sorted(sample["draws"][-1] for sample in make())
    assert by_lanes(make, *lanes, place) == expected


def test_rounds_of_a_mix_draw_anew(urls):
    make = lambda: wp.mix({"a": samples(urls), "b": samples(urls[:1])}, exhausted="repeat").map_samples(draw)  # noqa: E731
    found = list(make())
    assert len(set(drawn(found))) == len(found) > len({sample["__key__"] for sample in found})
    check_resume(make)


def test_a_shard_that_is_listed_twice_draws_anew(urls):
    found = list(samples([urls[0], urls[2], urls[0]]).map_samples(draw))
    assert len(set(drawn(found))) == len(found) == 11


def test_batches_of_samples_that_come_again_draw_anew(urls):
    """A dict of columns is identified by all its samples."""

    def batch_draw(batch, rng):
        return {**batch, "draw": int(rng.integers(1 << 63))}

    make = lambda: samples(urls, shuffle=False).repeat(3).batch_samples(7).map_samples(batch_draw)  # noqa: E731
    batches = list(make())
    assert len({batch["draw"] for batch in batches}) == len(batches) == 6
    assert not any("__occurrence__" in batch for batch in batches)
    looping = wp.PipeLoader(samples(urls[:1], shuffle=False).batch_samples(3).map_samples(batch_draw), epoch_end="loop")
    assert len({batch["draw"] for batch in itertools.islice(looping, 4)}) == 4


def test_batches_with_the_same_keys_draw_by_their_shards(tmp_path):
    """Shards often have the same keys."""
    for name in "ab":
        make_shards(tmp_path / name, shards=1, samples=2)

    def batch_draw(batch, rng):
        return int(rng.integers(1 << 63))

    pipe = wp.ShardList(f"{tmp_path}/*/*.tar").open_shards().load_tar().group_by_key().batch_samples(2)
    found = list(pipe.map_samples(batch_draw))
    assert len(found) == len(set(found)) == 2


def test_samples_say_which_occurrence_they_are_only_where_a_later_step_draws(urls):
    """Between the step that repeats and the last step that draws."""
    seen = []

    def look(sample):
        seen.append(sample.get("__occurrence__"))
        return sample

    assert not any("__occurrence__" in sample for sample in samples(urls).then(three_times).map_samples(look))
    assert set(seen) == {None}
    seen.clear()
    found = list(samples(urls[:1]).map_samples(look).then(three_times).repeat(2).map_samples(look).map_samples(draw))
    assert [*seen[:4], seen[-1]] == [None, "0.0", "1.0", "2.0", "2.1"]
    assert not any("__occurrence__" in sample for sample in found)


def test_a_sample_of_one_part_is_left_as_it_is(urls):
    """The functions get their own objects back where no step draws."""
    whole = {"__key__": "a"}
    assert next(iter(samples(urls).then(lambda items: [next(items) and whole]))) is whole


def test_joined_samples_draw_anew_each_time(tmp_path):
    """The first list may be resampled."""
    for name in ("image", "text"):
        make_shards(tmp_path / name, shards=4, samples=3, fields=("txt" if name == "text" else "cls",))
    image = wp.ShardList(f"{tmp_path}/image/*.tar", resampled=True, seed=1).open_shards().load_tar().group_by_key()
    text = wp.ShardList(f"{tmp_path}/text/*.tar").open_shards().load_tar().group_by_key()
    make = lambda: wp.join({"image": image, "text": text}).map_samples(draw)  # noqa: E731
    found = list(make())
    assert len(set(drawn(found))) == len(found) == 12 > len({key_of(sample) for sample in found})
    check_resume(make)


@pytest.mark.parametrize("size", [2, 40])
def test_a_resume_by_offsets_draws_the_same(tmp_path, size):
    """Samples that a shuffle buffer held are read one by one."""
    index_shards(make_shards(tmp_path, shards=4, samples=6), offsets=True)
    make = lambda: (  # noqa: E731
        wp.ShardList(f"{tmp_path}/*.tar", index=True, resampled=True, seed=3)
        .open_shards()
        .load_tar()
        .group_by_key()
        .shuffle_buffer(size)
        .map_samples(draw)
    )
    found = check_resume(make)[0]
    assert len(set(drawn(found))) == len(found) == 24


def test_an_endless_call_needs_bounded_memory(urls, monkeypatch):
    monkeypatch.setattr("wds_pipes.core.occurrences._MOST", 5)

    def twice(items):
        for item in items:
            yield from (item, item)

    found = list(samples(urls).then(twice).map_samples(draw))
    assert len(set(drawn(found))) == len(found) == 28
