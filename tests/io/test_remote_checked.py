"""Shards of which an index tells the MD5: a wrong byte is an error at the shard's end at
the latest.
"""

import itertools
import os
import shutil

import pytest
from remote import bare, content, put_all, samples

import wds_pipes as wp
from wds_pipes import ShardError
from wds_pipes.testing import make_shards


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A shard of 12 MB in 12 samples, and its index."""
    directory = tmp_path_factory.mktemp("large")
    (path,) = make_shards(directory, shards=1, samples=12, fields={"bin": lambda rng, _: rng.randbytes(1_000_000)})
    wp.tar.index_shards([path], directory / "index.json")
    return path, directory / "index.json"


@pytest.mark.parametrize("connections", [1, 2, 8])
def test_whole_shards_pass(remote, large, connections):
    """With the size known before, ranges are asked for before any answer."""
    path, index = large
    url = remote.put("d/shard-000000.tar", content(path))
    pipe = samples(url, remote, index=index, connections=connections, readahead_bytes=8 << 20)
    assert [bare(sample) for sample in pipe] == [bare(sample) for sample in samples(path)]
    assert sum(request.sent for request in remote.faults.stats(remote.reads)) == os.path.getsize(path)


def test_a_flipped_bit_is_an_error(remote, local, tmp_path):
    """Unless nobody wants to know."""
    wp.tar.index_shards(local[:2], tmp_path / "index.json")
    urls = put_all(remote, local[:2])
    rule = {"match": "^GET.*shard-000000", "skip": 1, "times": 1, "flip": 300_000}
    remote.faults.rules(rule)
    pipe = samples(urls, remote, index=tmp_path / "index.json")
    with pytest.raises(ShardError, match="its MD5 is .*, and the index says") as caught:
        list(pipe)
    assert caught.value.url == urls[0]
    assert pipe.state_dict()["lanes"]["0"]["delivered"] == 39
    remote.faults.rules(rule)
    got = list(map(bare, samples(urls, remote, index=tmp_path / "index.json", verify=False)))
    assert len(got) == 80
    assert sum(sample != whole for sample, whole in zip(got, map(bare, samples(local[:2])))) == 1


@pytest.mark.parametrize("taken", [0, 20], ids=["from its beginning", "after a resume"])
def test_a_flipped_bit_in_a_local_shard_is_an_error(local, tmp_path, taken):
    paths = [shutil.copy(path, tmp_path) for path in local[:2]]
    wp.tar.index_shards(paths, tmp_path / "index.json")
    with open(paths[0], "r+b") as file:
        file.seek(300_000)
        file.write(b"\0" if file.read(1) != b"\0" else b"\1")
    first, second = (samples(paths, index=tmp_path / "index.json", verify=True) for _ in range(2))
    list(itertools.islice(first, taken))
    second.load_state_dict(first.state_dict())
    with pytest.raises(ShardError, match="its MD5 is .*, and the index says") as caught:
        list(second)
    assert caught.value.url == paths[0]
    assert len(list(samples(paths, index=tmp_path / "index.json"))) == 80
    assert len(list(wp.PipeLoader(samples(paths[1:], index=tmp_path / "index.json", verify=True), lanes=3))) == 40
