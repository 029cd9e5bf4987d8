"""``wds-pipes state``: show and diff the states in checkpoint files."""

import json
import os

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


def test_a_pipe_is_no_file_of_states(tmp_path):
    os.mkfifo(tmp_path / "a.pt")
    assert "is no regular file" in refused("state", "show", tmp_path / "a.pt")


def test_no_code_of_a_file_is_run(tmp_path):
    torch.save({"object": Unsafe()}, tmp_path / "a.pt")
    assert "weights_only" not in refused("state", "show", tmp_path / "a.pt")


class Unsafe:
    pass


@pytest.fixture
def train(indexed, tmp_path, monkeypatch):
    """A module with loaders, in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"train_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        f"import wds_pipes as wp\nURLS = {indexed!r}\n"
        "def pipe():\n    return wp.SampleList(URLS, shuffle=True).fetch_samples()\n"
        "def loader():\n    return wp.PipeLoader(pipe(), batch_size=4)\n"
        "def alone():\n    return wp.PipeLoader(pipe(), batch_size=4, rank=0, world_size=1)\n"
        "def filtered():\n    return wp.PipeLoader(pipe().filter_samples(len), batch_size=4, epoch_end='exact')\n"
    )
    return name


def test_at_says_what_a_rank_gets_and_when_a_sample_comes(indexed, train, tmp_path):
    loader = wp.PipeLoader(wp.SampleList(indexed, shuffle=True).fetch_samples(), batch_size=4, rank=1, world_size=2)
    batches = iter(loader)
    for _ in range(4):
        batch = next(batches)
    options = "--world-size", 2, f"{train}:loader"
    title, *lines = done("at", "--step", 3, "--rank", 1, "--with-keys", *options).splitlines()
    assert title == "epoch 0, step 3, rank 1 of 2: 4 samples"
    assert [line.split()[2] for line in lines] == batch["__key__"]
    assert [line.split()[0] for line in lines] == batch["__url__"]
    found = json.loads(done("at", "--step", 3, "--rank", 1, "--json", *options))
    assert [(one["url"], one["key"], one["padding"]) for one in found["samples"]] == [
        (url, None, False) for url in batch["__url__"]
    ]
    key = batch["__key__"][2]
    assert done("at", "--find", key, *options) == "epoch 0, step 3, rank 1, place 2 in the batch\n"
    assert done("at", "--find", int(key), "--number", "--epoch", 0, *options) == done("at", "--find", key, *options)
    (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    state = "--state", tmp_path / "state.json"
    assert done("at", "--step", 3, "--rank", 1, *state, *options).splitlines()[1:] == [
        line.rpartition(" ")[0] for line in lines
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", 99, ":loader"), "there is no step 99: rank 0 has 13 steps in this epoch"),
        (("--find", "a", "--number", ":loader"), "--number goes with --find NUMBER"),
        (("--find", 7, ":loader"), "no sample has the key '7'"),
        (("--find", "nowhere", ":loader"), "no sample has the key 'nowhere'"),
        (("--find", 50, "--number", ":loader"), "there is no sample 50: there are 50"),
        (("--step", 0, ":filtered"), "filter_samples() may change their number"),
        (("--step", 0, ":pipe"), "must return the PipeLoader"),
        (("--step", 0, "--world-size", 2, ":alone"), "has 1 rank, not 2"),
        (("--step", 0, "--rank", 3, ":loader"), "rank must be"),
        (("--step", 0, "--find", 1, ":loader"), "--step or --find"),
        (("--find", 1, "--with-keys", ":loader"), "go with --step"),
    ],
)
def test_at_refuses_in_one_line(arguments, message, train):
    *options, name = arguments
    assert message in refused("state", "at", *options, train + name)
