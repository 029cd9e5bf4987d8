"""``wds-pipes bench``."""

import json
import os
import re

from click.testing import CliRunner

from wds_pipes.cli import main
from wds_pipes.testing import make_shards


def run(*arguments):
    return CliRunner().invoke(main, ["bench", "--seconds", "0.4", *map(str, arguments)])


def test_a_store(web, tmp_path):
    """What the link gives with more and more connections, what a pipeline gets, and what would
    help.
    """
    shards = make_shards(tmp_path, shards=3, samples=100, fields={"bin": lambda rng, _: rng.randbytes(80_000)})
    for shard in shards:
        with open(shard, "rb") as file:
            web.put(f"b/{os.path.basename(shard)}", file.read())
    web.faults.rules({"match": web.reads, "latency": 0.01, "rate": 20e6})  # of each connection
    done = run("--connections", 2, f"{web.url}/b/shard-{{000000..000002}}.tar")
    assert done.exit_code == 0, done.output
    assert re.search(r"first byte after \d+ ms", done.output)
    rates = [float(found.replace(",", "")) for found in re.findall(r"connections?\s*: ([\d,]+) MB/s", done.output)]
    assert rates[0] < 40
    assert max(rates) > 1.2 * rates[0]
    assert re.search(r"a pipeline in one process, connections=2: \d+ MB/s, [\d,]+ samples/s", done.output)
    assert "-> " in done.output


def test_local_shards(tmp_path):
    [shard] = make_shards(tmp_path, shards=1, samples=100)
    done = run(shard)
    assert done.exit_code == 0, done.output
    assert "connections:" not in done.output  # there are none
    assert json.loads(run(shard, "--json").output)["enough"] == 0
    assert re.search(r"\d+ MB/s, [\d,]+ samples/s; it computed \d+% of the time", done.output)
