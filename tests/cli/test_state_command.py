"""``wds-pipes state``: show and diff the states in checkpoint files."""

import json

import pytest
import torch
from commands import refused, run_command

import wds_pipes as wp
from wds_pipes import checkpoint


def done(*arguments):
    return run_command("state", *arguments).stdout


def loader(urls, rank=0, world_size=1):
    pipe = wp.ShardList(urls, shuffle=True, seed=5, index=True).open_shards().load_tar().group_by_key().batch_samples(2)
    return wp.PipeLoader(pipe, rank=rank, world_size=world_size, epoch_end="exact")


@pytest.fixture(scope="module")
def ranks(indexed, tmp_path_factory):
    """The files of two ranks at step 3."""
    folder = tmp_path_factory.mktemp("ranks")
    for rank in range(2):
        one = loader(indexed, rank, 2)
        batches = iter(one)
        for _ in range(3):
            next(batches)
        saved = {"model": {"w": torch.zeros(2)}, "nested": [{"loader": one.state_dict()}]}
        torch.save(saved, folder / f"r{rank}.pt")
        (folder / f"r{rank}.json").write_text(json.dumps({"data": one.state_dict()}))
    return folder


@pytest.mark.parametrize(("name", "where"), [("r1.pt", "nested[0].loader"), ("r1.json", "data")])
def test_show_says_where_a_run_stands(ranks, name, where):
    text = done("show", ranks / name)
    facts = "epoch 0, after 3 batches, rank 1 of 2, 8 shards, 1 of 2 lanes\n"
    assert text.startswith(f"{ranks / name}: {where}: {facts}")
    assert "lane 1 of 2: in " in text
    assert "samples: 6 delivered" in text
    [line] = done("show", "--json", ranks / name).splitlines()
    assert json.loads(line)["state"]["rank"] == 1


def test_diff_says_what_differs(ranks):
    assert done("diff", ranks / "r0.pt", ranks / "r0.json") == ""
    assert (
        "rank: 0 -> 1" in run_command("state", "diff", ranks / "r0.pt", ranks / "r1.json", code=1).stdout.splitlines()
    )
    lines = run_command("state", "diff", "--json", ranks / "r0.pt", ranks / "r1.json", code=1).stdout.splitlines()
    assert {"where": "rank", "first": "0", "second": "1"} in list(map(json.loads, lines))


def test_a_directory_of_checkpoints(indexed, tmp_path):
    for rank in range(2):
        one = loader(indexed, rank, 2)
        next(iter(one))
        checkpoint.save(tmp_path / "saved", one, step=7)
    assert "checkpoint 7, rank 1: epoch 0, after 1 batch, rank 1 of 2" in done("show", tmp_path / "saved")
    (tmp_path / "empty").mkdir()
    assert "no complete checkpoint" in refused("state", "show", tmp_path / "empty")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "not JSON"),
        ('{"loader": {"version": 4, "epoch": 0, "lanes": {}, "graph": 5}}', "the state is damaged"),
        ('{"a": [1]}', "has no state of wds_pipes"),
        ("no zip", "neither JSON nor"),
    ],
)
def test_files_without_a_state_are_refused_in_one_line(content, message, tmp_path):
    if content is not None:
        (tmp_path / "a.pt").write_text(content)
    result = run_command("state", "show", tmp_path / "a.pt", code=2)
    assert (result.stdout, result.stderr.count("\n"), message in result.stderr) == ("", 1, True)


def test_no_code_of_a_file_is_run(tmp_path):
    torch.save({"object": Unsafe()}, tmp_path / "a.pt")
    assert "weights_only" not in refused("state", "show", tmp_path / "a.pt")


class Unsafe:
    pass
