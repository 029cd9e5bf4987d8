"""ray_dataset: rows are the samples, whole and in order, for any number of tasks."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from tars import tar

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.filterwarnings("default")  # Ray's own


@pytest.fixture(scope="module", autouse=True)
def in_order(cluster):
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order = True
    context.enable_progress_bars = False


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    shards = make_shards(folder, shards=4, samples=[7, 0, 9, 5])
    index_shards(shards, folder / "index.json", offsets=True)
    return shards


def same(rows, samples):
    assert [row.keys() for row in rows] == [sample.keys() for sample in samples]
    for row, sample in zip(rows, samples, strict=True):
        for name, value in sample.items():
            assert np.array_equal(row[name], value), (name, row[name], value)


@pytest.mark.parametrize("tasks", [1, 3, 10, 100])
def test_rows_are_the_samples_in_order(shards, tasks):
    data = wp.ray_dataset(shards, decode="rgb8", reading={"override_num_blocks": tasks})
    same(data.take_all(), list(wp.IndexedShards(shards, decode="rgb8")))


def test_an_index_says_how_many_rows_there_are(shards):
    from wds_pipes.loader.ray_source import How, ShardSource

    source = ShardSource(str(Path(shards[0]).parent / "index.json"), How(True, None, None, None, "first-dot"))
    tasks = source.get_read_tasks(8)
    assert len(tasks) >= 8
    assert sum(task.metadata.num_rows for task in tasks) == 21
    assert source.estimate_inmemory_data_size() == sum(Path(shard).stat().st_size for shard in shards)
    small = ray.data.DataContext()
    small.target_max_block_size = 4096
    cut = source.get_read_tasks(1, None, small)
    assert len(cut) > len(source.get_read_tasks(1))
    assert [row["__key__"] for task in cut for block in task() for row in block.to_pylist()] == [
        sample["__key__"] for sample in wp.IndexedShards(shards)
    ]


def test_shards_without_an_index(shards, tmp_path):
    packed = []
    for number, shard in enumerate(shards):
        packed.append(str(tmp_path / f"{number}.tar.gz"))
        Path(packed[-1]).write_bytes(gzip.compress(Path(shard).read_bytes()))
    rows = wp.ray_dataset(packed, index=False, fields=["cls"], decode=True).take_all()
    wanted = list(wp.IndexedShards(shards, fields=["cls"], decode=True))
    same([{**row, "__url__": ""} for row in rows], [{**sample, "__url__": ""} for sample in wanted])


def test_fields_that_only_some_samples_have(tmp_path):
    members = [("a.txt", b"1"), ("a.cls", b"1"), ("b.txt", b"2"), ("c.txt", b"3"), ("c.json", b"{}")]
    (tmp_path / "some.tar").write_bytes(tar(members))
    rows = wp.ray_dataset(tmp_path / "some.tar", index=False).take_all()
    assert [row["txt"] for row in rows] == [b"1", b"2", b"3"]
    assert [row.get("cls") for row in rows] == [b"1", None, None]


def test_samples_in_pieces_are_an_error(tmp_path):
    (tmp_path / "odd.tar").write_bytes(tar([("a.txt", b"1"), ("b.txt", b"2"), ("a.cls", b"3"), ("b.cls", b"4")]))
    with pytest.raises(wp.SampleError, match="'a' comes again"):
        wp.ray_dataset(tmp_path / "odd.tar", index=False).take_all()


def test_wrong_arguments_are_errors_at_once(shards, tmp_path):
    with pytest.raises(wp.ShardError, match="no index of offsets"):
        wp.ray_dataset(make_shards(tmp_path, shards=1, samples=2))
    with pytest.raises(ValueError, match="rgb9"):
        wp.ray_dataset(shards, decode="rgb9")
    with pytest.raises(ValueError, match="key_split"):
        wp.ray_dataset(shards, index=False, key_split="middle")


def test_a_pipeline_of_ray_data(shards):
    data = wp.ray_dataset(shards, fields=["cls"], decode=True)
    doubled = data.map(lambda row: {"key": row["__key__"], "cls": 2 * row["cls"]})
    wanted = [2 * sample["cls"] for sample in wp.IndexedShards(shards, decode=True)]
    assert [row["cls"] for row in doubled.take_all()] == wanted
    assert json.dumps(data.count()) == "21"
