"""join: samples of shards that are read together, by their keys; keys that are missing; exact
resume, also on other lanes.
"""

import gzip
import itertools
import json
import logging
import random
from collections import Counter
from pathlib import Path

import pytest
from chains import NodeLoader
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import draw, flat, keys_of, loaded, over_lanes, resumed, through_json, wanted
from tars import tar

import wds_pipes as wp
from wds_pipes import nodes
from wds_pipes.tar import index_shards
from wds_pipes.testing import check_resume

SIZES = [2, 0, 3, 1]
KEYS = [f"{number:03d}" for number in range(sum(SIZES))]
SHARDS = [KEYS[:2], [], KEYS[2:5], KEYS[5:]]


def write(directory, field, shards, *, packed=False):
    """Shards of samples with one field, by their keys."""
    directory.mkdir()
    urls = []
    for number, keys in enumerate(shards):
        data = tar([(f"{key}.{field}", f"{field} {key}".encode() * 100) for key in keys])
        path = directory / f"{number}.tar{'.gz' * packed}"
        path.write_bytes(gzip.compress(data, mtime=0) if packed else data)
        urls.append(str(path))
    return urls


def read(urls, **options):
    return wp.ShardList(urls, **options).open_shards().load_tar().group_by_key()


def without(shards, *gone):
    return [[key for key in keys if key not in gone] for keys in shards]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    """The shards of three sets; the third lacks keys, and has one of its own."""
    directory = tmp_path_factory.mktemp("join")
    some = without(SHARDS, "001", "003")
    some[3] = ["other", *some[3]]
    return {
        "image": write(directory / "image", "jpg", SHARDS),
        "text": write(directory / "text", "txt", SHARDS, packed=True),
        "some": write(directory / "some", "json", some),
    }


def both(three, **options):
    """Two sets with the same keys; ``options`` are those of both lists."""
    return wp.join(
        {"image": read(three["image"], shuffle=True, seed=5, **options), "text": read(three["text"], **options)}
    )


def all_three(three, on_missing, **options):
    sources = {"image": read(three["image"], shuffle=True, seed=5)} | {
        name: read(three[name]) for name in ("text", "some")
    }
    return wp.join(sources, on_missing=on_missing, **options)


def test_samples_have_the_fields_of_all_sources(three):
    """In the order of the first one, in each epoch; also of compressed shards."""
    pipe, alone = both(three), read(three["image"], shuffle=True, seed=5)
    for _ in range(2):
        got = list(pipe)
        assert [{name: sample[name] for name in ("__key__", "__url__", "jpg")} for sample in got] == list(alone)
        assert [sample["txt"] for sample in got] == [f"txt {key}".encode() * 100 for key in keys_of(got)]
        assert [*got[0]] == ["__key__", "__url__", "jpg", "txt"]
    assert pipe.counts() == {"delivered": 6, "filtered": 0, "skipped": 0, "dropped": 0}
    assert "join({'image': ShardList(" in repr(pipe)


def test_keys_may_be_missing(three, caplog):
    skipping, absent = all_three(three, "skip"), all_three(three, "none", prefix=True)
    with caplog.at_level(logging.WARNING, "wds_pipes"):
        got = list(skipping)
    assert sorted(keys_of(got)) == sorted(set(KEYS) - {"001", "003"})
    assert all({"jpg", "txt", "json"} < sample.keys() for sample in got)
    assert skipping.counts() == {"delivered": 4, "filtered": 0, "skipped": 2, "dropped": 0}
    assert len(caplog.messages) == 1, "it is said once"
    got = {sample["__key__"]: sample for sample in absent}
    assert sorted(got) == KEYS
    assert "some.json" in got["000"]
    assert [*got["001"]] == ["__key__", "__url__", "image.jpg", "text.txt"]
    assert absent.counts()["delivered"] == 6


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.lists(st.sets(st.integers(0, 2)), max_size=7), min_size=1, max_size=3),
    on_missing=st.sampled_from(["skip", "none"]),
    rng=st.randoms(use_true_random=False),
)
def test_any_keys_may_be_missing_anywhere(rows, on_missing, rng, tmp_path_factory):
    """``rows``: of each shard, for each key, the sets that lack it. Against dicts, at a random cut,
    and at a second one.
    """
    directory = tmp_path_factory.mktemp("any")
    shards = [
        [[f"{row}{key}" for key, lacking in enumerate(keys) if number not in lacking] for row, keys in enumerate(rows)]
        for number in range(3)
    ]
    urls = [write(directory / f"{number}", f"f{number}", shards[number]) for number in range(3)]
    make = lambda: wp.join({f"s{number}": read(urls[number]) for number in range(3)}, on_missing=on_missing)  # noqa: E731
    having = [set(flat(keys)) for keys in shards]
    expected = {
        key: {f"f{number}" for number in range(3) if key in having[number]}
        for key in flat(shards[0])
        if on_missing == "none" or all(key in keys for keys in having)
    }
    pipe = make()
    got = list(pipe) if having[0] else []
    assert {sample["__key__"]: {*sample} - {"__key__", "__url__"} for sample in got} == expected
    assert keys_of(got) == [*expected]
    if got:
        counts = pipe.counts()
        assert (counts["delivered"], counts["skipped"]) == (len(got), len(having[0]) - len(got))
        cut = rng.randrange(len(got) + 1)
        head, rest = resumed(make, cut)
        items = iter(rest)
        middle = list(itertools.islice(items, rng.randrange(len(got) - cut + 1)))
        assert head + middle + list(loaded(make(), through_json(rest.state_dict()))) == got


HOSTS = {
    "pipe": lambda pipe: pipe,
    "node": lambda pipe: NodeLoader(pipe.as_node()),
    "loader": lambda pipe: wp.PipeLoader(pipe, batch_size=2, collate="list", lanes=2, epoch_end="exact"),
}
JOINS = {
    "both": both,
    "counted": lambda three: both(three, samples_per_shard=SIZES),
    "skip": lambda three: all_three(three, "skip").shuffle_buffer(2),
    "none": lambda three: all_three(three, "none", prefix=True).map_samples(draw),
    "interleaved": lambda three: all_three(three, "skip").interleave_shards(2),
    "steps": lambda three: wp.join(
        {
            "image": read(three["image"], shuffle=True).map_samples(draw, threads=2),
            "text": read(three["text"]).filter_samples(wanted).rename_fields({"caption": "txt"}),
        },
        on_missing="skip",
    ),
}


@pytest.mark.parametrize(
    ("host", "made"),
    [
        ("pipe", "skip"),
        ("pipe", "counted"),
        ("node", "skip"),
        ("loader", "skip"),
        *(pytest.param("pipe", made, marks=pytest.mark.slow) for made in ("both", "none", "steps", "interleaved")),
    ],
)
def test_every_cut(host, made, three):
    check_resume(lambda: HOSTS[host](JOINS[made](three)))


def test_every_cut_of_a_node_over_nodes(three):
    def make():
        sources = {
            name: nodes.GroupByKey(nodes.LoadTar(nodes.OpenShards(nodes.ShardList(three[name]))))
            for name in ("image", "text")
        }
        return NodeLoader(nodes.Join(sources))

    assert keys_of(make()) == KEYS
    check_resume(make)
    with pytest.raises(TypeError, match=r"nodes.Join\(\) takes nodes by name, and 'image' is"):
        nodes.Join({"image": read(three["image"])})


@pytest.mark.parametrize("made", JOINS)
def test_an_epoch_goes_on_on_other_lanes(made, three):
    """Each sample once, whatever the lanes were, and honest counts."""
    expected = Counter(map(repr, JOINS[made](three)))
    for seed in range(3):
        rng = random.Random(f"{made} {seed}")
        history = [(rng.randrange(1, 6), rng.randrange(4)) for _ in range(rng.randrange(1, 4))] + [(2, None)]
        got, counts = over_lanes(lambda: JOINS[made](three), history, collate="list")
        assert Counter(map(repr, got)) == expected, history
        if got and counts.get("delivered") == len(got):
            assert sum(counts.values()) == len(KEYS), (history, counts)


def test_ranks_get_equal_parts_of_counted_shards(three):
    """A shard is divided at the same sample in each set."""
    parts = [
        list(wp.PipeLoader(JOINS["counted"](three), batch_size=2, collate="list", rank=rank, world_size=2))
        for rank in range(2)
    ]
    assert [len(part) for part in parts] == [1, 1]
    samples = flat(flat(parts))
    assert len({*keys_of(samples)}) == 4
    assert all(sample["txt"] == f"txt {sample['__key__']}".encode() * 100 for sample in samples)
    pipe = JOINS["counted"](three)
    assert (len(pipe), pipe.sample_count(), len(pipe.batch_samples(4))) == (6, 6, 2)


def test_offsets_say_where_the_part_of_a_shard_begins(tmp_path):
    """Of each set by its own index."""
    keys = [f"{number:02d}" for number in range(10)]
    sets = {name: write(tmp_path / name, name, [keys]) for name in ("jpg", "txt")}
    for urls in sets.values():
        index_shards(urls, str(Path(urls[0]).parent / "index.json"), offsets=True)
    pipe = lambda: wp.join({name: read(urls, index=True) for name, urls in sets.items()})  # noqa: E731
    parts = [wp.PipeLoader(pipe(), batch_size=1, collate="list", rank=rank, world_size=5, lanes=5) for rank in range(5)]
    assert [keys_of(flat(part)) for part in parts] == [keys[place : place + 2] for place in range(0, 10, 2)]
    stats = parts[4].stats()
    assert stats["bytes_per_second"] / stats["samples_per_second"] < 5000, "bytes for a sample: not 15 KB of both tars"


def test_only_the_samples_of_the_first_source_count(three):
    """Also in the middle of a shard."""
    pipe = JOINS["steps"](three)
    for number, _ in enumerate(pipe, 1):
        assert pipe.counts() == {"delivered": number, "filtered": 0, "skipped": pipe.counts()["skipped"], "dropped": 0}
    assert pipe.counts()["skipped"] == 6 - number > 0


def test_sources_draw_other_numbers_in_each_epoch(three):
    pipe = JOINS["steps"](three)
    first, second = ({sample["__key__"]: sample["draw"] for sample in pipe} for _ in range(2))
    assert first.keys() == second.keys()
    assert all(first[key] != second[key] for key in first)


def test_counted_shards_are_read_as_a_whole_if_keys_may_be_missing(three):
    """Each set has its own numbers of samples."""

    def make():
        some = read(three["some"], samples_per_shard=[1, 0, 2, 2])
        return wp.join({"image": read(three["image"], samples_per_shard=SIZES), "some": some}, on_missing="skip")

    for lanes in (1, 2, 5):
        got = flat(wp.PipeLoader(make(), batch_size=2, collate="list", lanes=lanes, epoch_end="exact"))
        assert sorted(keys_of(got)) == ["000", "002", "004", "005"]


def test_samples_say_whether_they_fill_up_an_epoch(three):
    pipe = JOINS["counted"](three)
    got = flat(wp.PipeLoader(pipe, batch_size=4, collate="list", lanes=2, epoch_end="pad"))
    assert Counter(sample["__padding__"] for sample in got) == {False: 6, True: 2}


def refused(sources, **options):
    with pytest.raises(wp.SampleError) as caught:
        list(wp.join(sources, **options))
    return caught.value


def test_a_missing_key_is_an_error_that_names_both_shards(three, tmp_path):
    error = refused({"image": read(three["image"]), "some": read(three["some"])})
    assert (error.key, error.url) == ("001", three["image"][0])
    for part in (three["some"][0], "'some'", "has no more samples", "on_missing='skip' or 'none'"):
        assert part in str(error)
    more = write(tmp_path / "more", "txt", [["000", "001"]])
    fewer = write(tmp_path / "fewer", "jpg", [["000"]])
    assert refused({"fewer": read(fewer), "more": read(more)}).key == "001"
    lost = wp.ShardList(more).open_shards().load_tar().group_by_key(fields=["text"])
    assert "(its steps left out: 2 filtered)" in str(refused({"fewer": read(fewer), "more": lost}))


@pytest.mark.parametrize("on_missing", ["error", "skip", "none"])
@pytest.mark.parametrize("order", ["132", "213", "312", "231", "321", "1432", "4213"])
def test_keys_in_another_order_are_noticed(order, on_missing, tmp_path):
    one, other = write(tmp_path / "one", "jpg", [sorted(order)]), write(tmp_path / "other", "txt", [[*order]])
    error = refused({"one": read(one), "other": read(other)}, on_missing=on_missing)
    assert one[0] in str(error)
    assert other[0] in str(error)
    assert on_missing == "error" or "are in different orders" in str(error)


def test_a_field_of_two_sources_is_an_error(three):
    pair = {"a": read(three["image"]), "b": read(three["image"])}
    error = refused(pair)
    assert "has two fields 'jpg'" in str(error)
    assert (error.key, error.url) == ("000", three["image"][0])
    assert [*next(iter(wp.join(pair, prefix=True)))] == ["__key__", "__url__", "a.jpg", "b.jpg"]


@pytest.mark.parametrize(
    ("sources", "error", "message"),
    [
        (lambda pipe, text: [pipe, text], TypeError, "takes its sources by name"),
        (lambda pipe, text: {"a": pipe}, ValueError, "at least two sources"),
        (lambda pipe, text: {1: pipe, "b": text}, TypeError, "must be str, not 1"),
        (lambda pipe, text: {"a": pipe, "b": 3}, TypeError, "source 'b' of join takes a pipe"),
        (lambda pipe, text: {"a": pipe, "b": wp.mix({"a": text})}, TypeError, "source 'b' is no pipeline of ShardList"),
        (lambda pipe, text: {"a": pipe, "b": wp.ShardList("x.tar").open_shards()}, TypeError, "and group_by_key"),
        (lambda pipe, text: {"a": pipe.shuffle_buffer(3), "b": text}, TypeError, r"put shuffle_buffer\(\) after it"),
        (lambda pipe, text: {"a": pipe, "b": text.batch_samples(3)}, TypeError, r"put batch_samples\(\) after it"),
        (lambda pipe, text: {"a": pipe, "b": text.take_samples(3)}, TypeError, r"put take_samples\(\) after it"),
        (lambda pipe, text: {"a": pipe, "b": read(["x.tar"])}, ValueError, "equally many shards, and there are"),
        (lambda pipe, text: {"a": pipe, "b": read(["x.tar"] * 4, shuffle=True)}, ValueError, "leave shuffle and"),
        (lambda pipe, text: {"a": pipe, "b": read(["x.tar"] * 4, resampled=True)}, ValueError, "out of source 'b'"),
        (
            lambda pipe, text: {
                "a": read(["a.tar"] * 2, samples_per_shard=[3, 2]),
                "b": read(["b.tar"] * 2, samples_per_shard=[3, 1]),
            },
            ValueError,
            r"shard a.tar of join\(\) has 2 samples, and b.tar of source 'b' has 1",
        ),
    ],
)
def test_a_wrong_source_is_refused_when_it_is_built(sources, error, message, three):
    with pytest.raises(error, match=message):
        wp.join(sources(read(three["image"]), read(three["text"])))


def emptied(sample):
    return sample.clear() or sample


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda three: all_three(three, "raise"), ValueError, "on_missing must be one of"),
        (lambda three: all_three(three, "skip", prefix="x"), TypeError, "prefix must be"),
        (
            lambda three: wp.join({"a": read(three["image"]).map_samples(emptied), "b": read(three["text"])}),
            TypeError,
            r"source 'a' of join\(\) has lost its '__key__'",
        ),
        (
            lambda three: wp.join({"a": read(three["image"]), "b": read(three["text"]).to_tuple("txt")}),
            TypeError,
            "takes samples as dicts",
        ),
        (lambda three: wp.PipeLoader(both(three), batch_size=2, epoch_end="drop"), ValueError, "of source 'image'"),
        (
            lambda three: wp.PipeLoader(all_three(three, "skip"), batch_size=2, epoch_end="drop"),
            ValueError,
            "how many samples have partners",
        ),
    ],
)
def test_what_cannot_be_joined_is_refused(build, error, message, three):
    with pytest.raises(error, match=message):
        list(build(three))


def test_a_state_of_other_sources_is_refused(three, tmp_path):
    pipe = both(three)
    next(iter(pipe))
    state = through_json(pipe.state_dict())
    assert len(json.dumps(state)) < 900
    image, text = read(three["image"], shuffle=True, seed=5), read(three["text"])
    for sources, message in (
        ({"image": image, "caption": text}, "step 1 of its pipeline was join"),
        ({"image": image, "text": read(three["some"])}, "source 'text' is not the one of the state: its list"),
        ({"image": image, "text": text.map_samples(dict)}, "source 'text' is not the one of the state: its steps"),
    ):
        with pytest.raises(wp.StateError, match=message) as caught:
            wp.join(sources).load_state_dict(state)
        assert "mix" not in str(caught.value)
    with pytest.raises(wp.StateError, match="missing='none'"):
        wp.join({"image": image, "text": text}, on_missing="none").load_state_dict(state)
    going_on = loaded(wp.join({"image": image, "text": text}, on_missing="skip"), state)
    assert len(list(going_on)) == 5, "a run that met a missing key may go on and skip"
    elsewhere = write(tmp_path / "new", "txt", SHARDS, packed=True)
    assert len(list(loaded(wp.join({"image": image, "text": read(elsewhere)}), state))) == 5


def test_a_hostile_position_is_refused(three):
    pipe = both(three)
    next(iter(pipe))
    for change in (
        {"next": 9},
        {"next": 0},
        {"chains": [{}]},
        {"chains": [{"source": 1}, {}]},
        {"chains": [{}, {"source": 7}]},
    ):
        state = through_json(pipe.state_dict())
        state["lanes"]["0"]["position"][0] |= change
        with pytest.raises(wp.StateError):
            list(loaded(both(three), state))


def test_a_shard_that_one_set_lacks(three, tmp_path):
    """It is skipped in all of them, and counted."""
    urls = [*three["text"][:3], str(tmp_path / "gone.tar")]
    text = wp.ShardList(urls, on_error="skip").open_shards().load_tar().group_by_key()
    pipe = wp.join({"image": read(three["image"]), "text": text}, on_missing="skip")
    assert keys_of(pipe) == KEYS[:5]
    assert pipe.counts() == {"delivered": 5, "filtered": 0, "skipped": 1, "dropped": 0, "skipped_shards": 1}
