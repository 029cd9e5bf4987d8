"""A state is loaded where the data lie at another place: the same data continue exactly, other data
are refused, and the user has the last word.
"""

import itertools
import json
import shutil
from pathlib import Path

import pytest
from pipelines import draw, loaded, samples, through_json
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.nodes import Loader
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_pipes as wp
from wds_pipes import checkpoint, nodes
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

SAMPLES = [5, 3, 6, 4, 5, 2]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A directory with two data sets, each in a directory: six shards of 25 samples, and three
    of 12.
    """
    root = tmp_path_factory.mktemp("here")
    make_shards(root / "birds", shards=6, samples=SAMPLES)
    make_shards(root / "fish", shards=3, samples=4, seed=1)
    return root


@pytest.fixture
def there(here, tmp_path):
    """A copy of it in another directory."""
    shutil.copytree(here, tmp_path / "scratch" / "job-1")
    return tmp_path / "scratch" / "job-1"


def facts(items):
    """What is the same wherever a sample lies: its key and its random draw."""
    return [
        [(sample["__key__"], sample.get("draw")) for sample in (item if isinstance(item, list) else [item])]
        for item in items
    ]


def listed(root, name):
    """The shards of a data set below a directory, which may be a file:// URL."""
    return [f"{root}/{name}/{path.name}" for path in sorted(Path(str(root).removeprefix("file://"), name).iterdir())]


def shuffled(root, **options):
    return samples(listed(root, "birds"), **options).shuffle_buffer(4).map_samples(draw)


def interleaved(root, **options):
    return samples(listed(root, "birds"), **options).map_samples(draw).interleave_shards(2)


def mixed(root, **options):
    sources = {
        "birds": samples(listed(root, "birds"), **options).shuffle_buffer(2),
        "fish": samples(listed(root, "fish"), **options).map_samples(draw),
    }
    return wp.mix(sources, {"birds": 2, "fish": 1}).map_samples(draw)


def loader(root, pipe=shuffled, **options):
    """Batches of two from two lanes."""
    return wp.PipeLoader(
        pipe(root), **{"batch_size": 2, "collate": "list", "lanes": 2, "epoch_end": "exact", **options}
    )


def cut(source, count):
    """The first ``count`` items, the state after them as JSON, and the rest."""
    items = iter(source)
    given = facts(itertools.islice(items, count))
    state = through_json(source.state_dict())
    return given, state, facts(items)


def moves(caplog):
    """The lines of the log that mention another place."""
    found = [record.getMessage() for record in caplog.records if "another place" in record.getMessage()]
    caplog.clear()
    return found


@pytest.mark.parametrize(
    "make",
    [interleaved, loader, lambda root: loader(root, mixed)],
    ids=["interleave", "loader", "mix in loader"],
)
def test_the_same_data_at_another_place_resume_exactly(make, here, there, monkeypatch, caplog):
    """By a relative path, as a file:// URL, and as a copy: same samples, same order, same draws.
    One line of the log reports the move; none does at the old place.
    """
    monkeypatch.chdir(here)
    for count in (0, 1, 7):
        _, state, rest = cut(make(here), count)
        for root in (".", f"file://{here}", there):
            resumed = loaded(make(root), state)
            found = moves(caplog)
            assert len(found) == 1
            assert all(f"'{root}/birds/" in line for line in found)
            assert facts(resumed) == rest
        _, again, rest = cut_again(make(there), state, 2)
        moves(caplog)
        resumed = loaded(make(there), again)
        assert not moves(caplog)
        assert facts(resumed) == rest


def cut_again(source, state, count, **options):
    source.load_state_dict(state, **options)
    return cut(source, count)


def test_data_and_lanes_may_change_together(here, there):
    """An epoch is repartitioned when its data move: each sample comes once."""
    for pipe, expected in ((shuffled, 25), (mixed, None)):
        whole = sorted(itertools.chain(*facts(loader(here, pipe, lanes=3))))
        given, state, _ = cut(loader(here, pipe, lanes=3), 3)
        halves = loaded(loader(there, pipe, lanes=2), state)
        more, state, _ = cut(halves, 2)
        last = facts(loaded(loader(here, pipe, lanes=4), state))
        assert sorted(itertools.chain(*given, *more, *last)) == whole
        assert expected is None or len(whole) == expected


# What identifies data


def fits(saved, urls, **options):
    """Whether a state over ``saved`` fits ``urls``; nothing is opened."""
    state = wp.ShardList(saved).state_dict()
    try:
        wp.ShardList(urls).load_state_dict(state, **options)
    except wp.StateError:
        return False
    return True


SAME = {
    "one shard": (["/a/x.tar"], ["s3://b/c/x.tar"]),
    "a directory": (["/a/0.tar", "/a/1.tar"], ["/b/c/0.tar", "/b/c/1.tar"]),
    "odd paths": (["/a/0.tar", "/a/1.tar"], ["/b//0.tar", "/b/./c/../1.tar"]),
    "schemes": (["s3://a/0.tar", "s3://a/1.tar"], ["gs://b/0.tar", "gs://b/1.tar"]),
    "nested": (["/a/x/0.tar", "/a/y/0.tar"], ["http://h/b/x/0.tar", "http://h/b/y/0.tar"]),
    "again": (["/a/0.tar", "/a/0.tar"], ["/b/0.tar", "/b/0.tar"]),
    "signed": (["https://h/a/0.tar?X-Amz-Signature=1&X-Amz-Date=2"], ["s3://b/0.tar"]),
    "signed anew": (["https://u:p@h/0.tar?part=1&sig=2&sv=3"], ["https://h2/d/0.tar?part=1&sig=4&sv=5"]),
    "quoted": (["/a/b c/0 %.tar", "/a/d/1.tar"], ["https://h/b%20c/0%20%25.tar", "https://h/d/1.tar"]),
    "a split": (["/a/train/0.tar"], ["s3://train/0.tar"]),
    "a chain": (["simplecache::s3://b/c/0.tar", "simplecache::s3://b/c/1.tar"], ["/c/0.tar", "/c/1.tar"]),
    "a query that selects": (
        ["https://h/get?file=d/0.tar", "https://h/get?file=d/1.tar"],
        ["http://i/p/get?file=d/0.tar", "http://i/p/get?file=d/1.tar"],
    ),
}
OTHER = {
    "a name": (["/a/x.tar"], ["/a/y.tar"]),
    "order": (["/a/0.tar", "/a/1.tar"], ["/b/1.tar", "/b/0.tar"]),
    "a directory": (["/a/x/0.tar", "/a/y/0.tar"], ["/a/x/0.tar", "/a/z/0.tar"]),
    "directories to one": (["/a/x/0.tar", "/a/y/1.tar"], ["/b/0.tar", "/b/1.tar"]),
    "again": (["/a/0.tar", "/a/0.tar"], ["/b/x/0.tar", "/b/y/0.tar"]),
    "splits": (["/a/train/0.tar", "/a/train/1.tar"], ["/a/val/0.tar", "/a/val/1.tar"]),
    "a split that is none": (["/a/Train/0.tar"], ["/b/0.tar"]),
    "a query that selects": (["https://h/get?file=d/0.tar"], ["https://h/get?file=e/0.tar"]),
    "a version": (["s3://b/0.tar?versionId=1"], ["s3://b/0.tar?versionId=2"]),
    "a command": (["pipe:cat /a/0.tar"], ["pipe:cat /b/0.tar"]),
    "stores": (["s3://b/0.tar", "gs://b/0.tar"], ["gs://b/0.tar", "s3://b/0.tar"]),
    "in a zip": (["zip://0.tar::/a/x.zip"], ["zip://1.tar::/a/x.zip"]),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same_names_below_the_common_directory_fit(case):
    saved, urls = SAME[case]
    assert fits(saved, urls)
    assert fits(urls, saved)


@pytest.mark.parametrize("case", OTHER)
def test_other_names_are_refused_without_moved(case):
    saved, urls = OTHER[case]
    assert not fits(saved, urls)
    assert fits(saved, urls, moved=True)


def test_an_index_decides_before_names(here, there, tmp_path, caplog):
    """The same MD5s are the same data under any name. Other MD5s are other data, also under the
    same names.
    """

    def indexed(root, **options):
        return samples(f"{root}/birds/*.tar", index=f"{root}/index.json", **options)

    for root in (
        here,
        there,
        make_shards(tmp_path / "other" / "birds", shards=6, samples=SAMPLES, seed=9) and tmp_path / "other",
    ):
        index_shards(f"{root}/birds/*.tar", f"{root}/index.json")
    _, state, rest = cut(indexed(here), 6)
    assert len(state["data"]) == 16
    with pytest.raises(
        wp.StateError,
        match=r"the index gives its shards other MD5s.*moved=True",
    ):
        indexed(tmp_path / "other").load_state_dict(state)
    samples(f"{tmp_path}/other/birds/*.tar").load_state_dict(state)  # without an index only its names are known
    assert "an index would show" in moves(caplog)[0]
    for path in sorted((there / "birds").iterdir()):
        path.rename(path.with_name(path.name.replace("shard", "part")))
    index_shards(f"{there}/birds/*.tar", f"{there}/index.json")
    resumed = loaded(indexed(there), state)
    assert "their MD5s in the index are the same" in moves(caplog)[0]
    assert facts(resumed) == rest

    sizes = json.loads((here / "index.json").read_text())
    for entry in sizes["shardlist"]:
        del entry["md5sum"]
    (here / "index.json").write_text(json.dumps(sizes))
    _, state, _ = cut(indexed(here), 6)
    sizes["shardlist"][0]["filesize"] += 10240
    (here / "index.json").write_text(json.dumps(sizes))
    with pytest.raises(wp.StateError, match="the index gives its shards other sizes or numbers of samples"):
        indexed(here).load_state_dict(state)
    indexed(here).load_state_dict(state, moved=True)
    indexed(there).load_state_dict(state, moved=True)


# moved=True


def renamed(there):
    """The copy with other names of its directories and shards."""
    for path in sorted(there.glob("*/*.tar")):
        path.rename(path.with_name(f"renamed-{path.name}"))
    return there


@pytest.mark.parametrize("make", [shuffled, lambda root: loader(root, mixed)], ids=["pipe", "mix in loader"])
def test_renamed_shards_fit_with_moved(make, here, there, caplog):
    """Without it the error names both ways out. All else is checked as always. A state from there
    needs no moved=True.
    """
    _, state, rest = cut(make(here), 5)
    renamed(there)
    resumed = make(there)
    with pytest.raises(
        wp.StateError,
        match=r"stands at '.*/shard-.*', and this list begins with '.*/renamed-",
    ):
        resumed.load_state_dict(state)
    assert not moves(caplog)
    resumed.load_state_dict(state, moved=True)
    assert "(moved=True says so)" in moves(caplog)[0]
    assert facts(resumed) == rest
    _, again, rest = cut_again(make(there), state, 2, moved=True)
    moves(caplog)
    resumed = loaded(make(there), again)
    assert not moves(caplog)
    assert facts(resumed) == rest


def one(root, name):
    return wp.mix({"source": samples(listed(root, name))})


def counted(root, sizes):
    return wp.PipeLoader(shuffled(root, samples_per_shard=sizes), lanes=2)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (shuffled, lambda here: samples(listed(here, "fish")).shuffle_buffer(4), "made over 6 shards, .* has 3"),
        (shuffled, lambda here: shuffled(here, seed=4), "seed=5, this pipeline has seed=4"),
        (shuffled, interleaved, "of its pipeline was"),
        (
            lambda here: counted(here, SAMPLES),
            lambda here: counted(here, SAMPLES[::-1]),
            "other numbers of samples",
        ),
        (mixed, lambda here: mixed(here, seed=4), "its seed was 5 and is 4"),
        (lambda here: one(here, "birds"), lambda here: one(here, "fish"), "it had 6 shards and has 3"),
    ],
)
def test_moved_leaves_the_other_checks(before, after, message, here):
    """The number of shards and of samples, the seed, the steps, and what a lane holds."""
    with pytest.raises(wp.StateError, match=message):
        after(here).load_state_dict(before(here).state_dict(), moved=True)


def test_every_host_takes_moved(here, there, tmp_path):
    """Functions that load a state take moved=True; where another library loads,
    ShardList takes it.
    """
    other = renamed(there)

    def in_torch(root):
        urls = sorted(map(str, (root / "birds").iterdir()))
        return IterableWrapper(urls).open_shards().load_tar().group_by_key().batch(2)

    _, state, rest = cut(in_torch(here), 3)
    resumed = in_torch(other)
    wp.load_state_dict(resumed, state, moved=True)
    assert facts(resumed) == rest
    _, state, rest = cut(shuffled(here), 5)
    assert facts(loaded(shuffled(other).as_dataset(), {**state, "ended": False}, moved=True)) == rest

    def hosted(root, **options):
        return StatefulDataLoader(shuffled(root, **options).as_dataset(), batch_size=None, num_workers=0)

    def node(root, **options):
        urls = nodes.ShardList(f"{root}/birds/*.tar", **options)
        samples = nodes.GroupByKey(nodes.LoadTar(nodes.OpenShards(urls)))
        return Loader(nodes.MapSamples(samples, draw), restart_on_stop_iteration=False)

    for make in (hosted, node):
        _, state, rest = cut(make(here), 5)
        assert facts(loaded(make(other, moved=True), state)) == rest
        with pytest.raises(wp.StateError, match=r"ShardList\(..., moved=True\)"):
            list(loaded(make(other), state))
    source = loader(here)
    next(iter(source))
    checkpoint.save(tmp_path / "saved", source)
    with pytest.raises(wp.StateError, match="moved=True"):
        checkpoint.load(tmp_path / "saved", loader(other))
    resumed = loader(other)
    checkpoint.load(tmp_path / "saved", resumed, moved=True)
    expected = loader(here)
    checkpoint.load(tmp_path / "saved", expected)
    assert facts(resumed) == facts(expected)


def test_each_rank_may_have_its_own_copy_of_the_data(here, there):
    """On disks of their own; under other names with moved=True."""

    def states(*roots):
        made = [loader(root, rank=rank, world_size=2) for rank, root in enumerate(roots)]
        given = [facts(itertools.islice(iter(source), 2)) for source in made]
        return itertools.chain(*given), [source.state_dict() for source in made]

    whole = sorted(itertools.chain(*facts(loader(here))))
    given, apart = states(here, there)
    resumed = loaded(loader(there), wp.merge_states(apart))
    assert sorted(itertools.chain(*given, *facts(resumed))) == whole
    given, apart = states(here, renamed(there))
    with pytest.raises(wp.StateError, match="ranks 0 and 1 are of other shards.*moved=True"):
        loader(here).load_state_dict(apart)
    loader(here).load_state_dict(wp.merge_states(apart, moved=True))
    resumed = loaded(loader(here), apart, moved=True)
    assert sorted(itertools.chain(*given, *facts(resumed))) == whole


@pytest.mark.parametrize("data", ["", "x" * 8, "0" * 8 + "3" + "0" * 7, "0" * 17, "٠" * 8])
def test_a_damaged_id_is_refused(data, here):
    with pytest.raises(wp.StateError, match="damaged: the id of its data"):
        shuffled(here).load_state_dict({**shuffled(here).state_dict(), "data": data})
    state = mixed(here).state_dict()
    state["sources"]["birds"]["data"] = data
    with pytest.raises(wp.StateError, match="damaged: the id of its data"):
        mixed(here).load_state_dict(state, moved=True)
