"""``wds-pipes doctor``."""

import json
import os
from pathlib import Path

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
    assert said[0].startswith("The limit is ")
    found = json.loads(run("--cores", 1, "--json", *shards).output)
    assert found["limit"] in ("reading", "storage rate")  # the latter if something else uses the disk
    assert found["change"]
    assert len(found["sentences"]) == 3
    assert found["sentences"][0].startswith(f"The limit is {found['limit']}")


def test_a_store(web, tmp_path):
    """The link over more and more connections, and which number of them the pipeline needs."""
    shards = make_shards(tmp_path, shards=3, samples=100, fields={"bin": lambda rng, _: rng.randbytes(80_000)})
    for shard in shards:
        web.put(f"b/{os.path.basename(shard)}", Path(shard).read_bytes())
    web.faults.rules({"match": web.reads, "latency": 0.01, "rate": 20e6})  # of each connection
    done = run("--seconds", 3, "--json", f"{web.url}/b/shard-{{000000..000002}}.tar")
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert len(found["first_bytes"]) == 5
    assert found["link"]["1"] < 40
    assert found["link"].keys() >= {"1", "2"}
    assert found["limit"] in ("storage rate", "storage latency", "reading", "workers")
    assert found["sentences"][-1].startswith("The first byte comes after ")


def test_the_stats_of_a_training(tmp_path):
    idle = {"wait_share": 0.0, "read_share": 0.5, "decode_share": 0.5, "stall_share": 0.0}
    (tmp_path / "stats.json").write_text(json.dumps([idle, {**idle, "wait_share": 0.5, "decode_share": 0.9}]))
    assert run("--stats", tmp_path / "stats.json").output.startswith("The limit is rank 1, which waits for data 50% of")
    (tmp_path / "stats.json").write_text("{")
    assert "--stats is no JSON" in run("--stats", tmp_path / "stats.json").output
    assert "there is nothing to run" in run().output
