"""``wds-pipes state``: show, diff and merge the states in checkpoint files."""

import json

import pytest
import torch
from click.testing import CliRunner

import wds_pipes as wp
from wds_pipes import checkpoint
from wds_pipes.cli import main


def run(*arguments):
    return CliRunner().invoke(main, ["state", *map(str, arguments)])


def done(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments):
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    [line] = result.stderr.splitlines()
    return line


def loader(urls, rank=0, world_size=1):
    pipe = wp.ShardList(urls, shuffle=True, seed=5, index=True).open_shards().load_tar().group_by_key().batch_samples(2)
    return wp.PipeLoader(pipe, rank=rank, world_size=world_size, epoch_end="exact")


def keys(batches):
    """The keys of the samples of collated batches that are no repeats."""
    return sorted(
        key
        for batch in batches
        for key, repeat in zip(batch["__key__"], batch.get("__padding__", [False] * len(batch["__key__"])))
        if not repeat
    )


@pytest.fixture
def ranks(indexed, tmp_path):
    """The files of two ranks at step 3, the keys that they gave, and the shards."""
    given = []
    for rank in range(2):
        one = loader(indexed, rank, 2)
        batches = iter(one)
        given += [next(batches) for _ in range(3)]
        torch.save({"model": {"w": torch.zeros(2)}, "nested": [{"loader": one.state_dict()}]}, tmp_path / f"r{rank}.pt")
        (tmp_path / f"r{rank}.json").write_text(json.dumps({"data": one.state_dict()}))
    return keys(given)


def test_show_says_where_a_run_stands(ranks, tmp_path):
    for ending, where in (("pt", "nested[0].loader"), ("json", "data")):
        text = done("show", tmp_path / f"r1.{ending}")
        assert text.startswith(
            f"{tmp_path}/r1.{ending}: {where}: epoch 0, after 3 batches, rank 1 of 2, 8 shards, 1 of 2 lanes\n"
        )
        assert "lane 1 of 2: in " in text
        assert "samples: 6 delivered" in text
    found = [
        json.loads(line) for line in done("show", "--json", tmp_path / "r0.json", tmp_path / "r1.json").splitlines()
    ]
    assert [line["state"]["rank"] for line in found] == [0, 1]


def test_diff_says_what_differs(ranks, tmp_path):
    assert done("diff", tmp_path / "r0.pt", tmp_path / "r0.json") == ""
    result = run("diff", tmp_path / "r0.pt", tmp_path / "r1.json")
    assert result.exit_code == 1
    assert "rank: 0 -> 1" in result.stdout.splitlines()


@pytest.mark.parametrize("ending", ["json", "pt"])
def test_what_merge_writes_is_loaded_by_another_number_of_ranks(ending, ranks, tmp_path, indexed):
    output = tmp_path / f"all.{ending}"
    text = done("merge", tmp_path / "r0.pt", tmp_path / "r1.json", "-o", output)
    assert text == f"{output}: epoch 0, after 3 batches, all ranks, 8 shards, 2 of 2 lanes\n"
    state = json.loads(output.read_text()) if ending == "json" else torch.load(output, weights_only=True)
    for world_size in (1, 3):
        rest = []
        for rank in range(world_size):
            one = loader(indexed, rank, world_size)
            one.load_state_dict(state)
            rest += list(one)
        assert sorted(ranks + keys(rest)) == sorted(wp.IndexedShards(indexed).keys())
    assert "exists" in refused("merge", tmp_path / "r0.pt", tmp_path / "r1.pt", "-o", output)
    done("merge", tmp_path / "r0.pt", tmp_path / "r1.pt", "-o", output, "--overwrite")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("r0.pt -o all.json", "rank 1 is missing"),
        ("r0.pt r0.json -o all.json", "more than once"),
        ("r0.pt r1.pt -o all.txt", "ends in .json"),
        ("one.json -o all.json", "nothing to merge"),
    ],
)
def test_merge_refuses_what_does_not_belong_together(ranks, tmp_path, indexed, monkeypatch, *, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.json").write_text(json.dumps(loader(indexed).state_dict()))
    assert message in refused("merge", *arguments.split())
    assert not (tmp_path / "all.json").exists()


def test_a_directory_of_checkpoints(indexed, tmp_path):
    for rank in range(2):
        one = loader(indexed, rank, 2)
        next(iter(one))
        checkpoint.save(tmp_path / "saved", one, step=7)
    assert "checkpoint 7, rank 1: epoch 0, after 1 batch, rank 1 of 2" in done("show", tmp_path / "saved")
    done("merge", tmp_path / "saved", "-o", tmp_path / "all.json")
    (tmp_path / "empty").mkdir()
    assert "no complete checkpoint" in refused("show", tmp_path / "empty")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ('{"loader": {"version": 2, "epoch": 0, "lanes": {}, "graph": 5}}', "the state is damaged"),
        ('{"a": [1]}', "has no state of wds_pipes"),
        ("no zip", "neither JSON nor"),
    ],
)
def test_files_without_a_state_are_refused_in_one_line(content, message, tmp_path):
    if content is not None:
        (tmp_path / "a.pt").write_text(content)
    assert message in refused("show", tmp_path / "a.pt")


def test_no_code_of_a_file_is_run(tmp_path):
    torch.save({"object": Unsafe()}, tmp_path / "a.pt")
    assert "weights_only" not in refused("show", tmp_path / "a.pt")


class Unsafe:
    pass
