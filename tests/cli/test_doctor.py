"""``wds-pipes doctor``."""

import json

from click.testing import CliRunner

from wds_pipes.cli import main
from wds_pipes.testing import make_shards


def run(*arguments):
    return CliRunner().invoke(main, ["doctor", "--seconds", "0.1", *map(str, arguments)])


def test_three_sentences_or_json(tmp_path):
    shards = make_shards(tmp_path, shards=2, samples=50)
    done = run("--cores", 1, *shards)
    assert done.exit_code == 0, done.output
    said = done.output.splitlines()
    assert len(said) == 3
    assert said[0].startswith("The limit is reading, which takes ")
    found = json.loads(run("--cores", 1, "--json", *shards).output)
    assert (found["limit"], found["change"], len(found["sentences"])) == ("reading", "leave the pipeline as it is", 3)


def test_the_stats_of_a_training(tmp_path):
    idle = {"wait_share": 0.0, "read_share": 0.5, "decode_share": 0.5, "stall_share": 0.0}
    (tmp_path / "stats.json").write_text(json.dumps([idle, {**idle, "wait_share": 0.5, "decode_share": 0.9}]))
    assert run("--stats", tmp_path / "stats.json").output.startswith("The limit is rank 1, which waits for data 50% of")
    (tmp_path / "stats.json").write_text("{")
    assert "--stats is no JSON" in run("--stats", tmp_path / "stats.json").output
    assert "there is nothing to run" in run().output
