"""Resuming over remote shards: exact, and what was read is not asked for again."""

import gzip
import json
import os

import pytest
from remote import bare, content, first_bytes, put_all, samples, settle

import wds_pipes as wp
from wds_pipes.testing import check_resume, make_shards


def cut_at(pipe, number):
    """The state of a pipe that was stopped behind so many items."""
    items = iter(pipe)
    for _ in range(number):
        next(items)
    return json.loads(json.dumps(pipe.state_dict()))


def resumed(remote, make, state):
    """What a new pipe gives from a state on, and the requests that it made."""
    pipe = make()
    pipe.load_state_dict(state)
    settle(remote)
    remote.faults.clear()
    return list(pipe), remote.faults.stats(remote.reads)


def test_only_the_rest_is_asked_for(remote, local):
    """Each request is for bytes behind the position, and there are no more than an uninterrupted
    rest takes.
    """
    urls = put_all(remote, local[:2])
    wanted = list(map(bare, samples(local[:2])))
    for cut in (1, 7, 19, 20, 21, 39, 40, 41, 79):
        state = cut_at(samples(urls, remote), cut)
        shard = state["lanes"]["0"]["position"]
        found, seen = resumed(remote, lambda: samples(urls, remote), state)
        assert list(map(bare, found)) == wanted[cut:]
        offset = shard[2].get("offset", 0)
        starts = [start for request, start in zip(seen, first_bytes(seen)) if "shard-000000" in request.path]
        if cut < 40:
            assert min(starts) == offset > 0
            assert sum(request.sent for request in seen) == sum(map(os.path.getsize, local[:2])) - offset
            assert len(starts) <= 1 + (os.path.getsize(local[0]) - offset) // (1 << 20)
        else:
            assert not [request for request in seen if "shard-000000" in request.path and first_bytes([request]) == [0]]


def test_every_cut(remote, tmp_path):
    """With a window of samples behind it, through two resumes."""
    urls = put_all(remote, make_shards(tmp_path, shards=3, samples=[2, 0, 3]))
    check_resume(lambda: samples(urls, remote, seed=2).shuffle_buffer(2))


def test_a_window_is_read_again_from_its_earlier_mark(remote, local):
    """shuffle_buffer goes back to where its oldest sample came from, and not further."""
    urls = put_all(remote, local[:1])

    def make():
        return samples(urls, remote).shuffle_buffer(10)

    state = cut_at(make(), 25)
    found, seen = resumed(remote, make, state)
    assert list(map(bare, found)) == list(map(bare, samples(local[:1]).shuffle_buffer(10)))[25:]
    offset = state["lanes"]["0"]["position"][2]["offset"]
    assert 0 < offset == min(first_bytes(seen))


def test_compressed_shards_are_read_over(remote, local):
    """There is no other way to get to a byte in them."""
    url = remote.put("d/z.tar.gz", gzip.compress(content(local[0]), 1))
    state = cut_at(samples(url, remote), 30)
    found, seen = resumed(remote, lambda: samples(url, remote), state)
    assert list(map(bare, found)) == list(map(bare, samples(local[0])))[30:]
    assert min(first_bytes(seen)) == 0


@pytest.mark.parametrize("end", ["mark", "padding", "none"])
def test_a_resume_behind_the_last_sample(remote, tmp_path, end):
    """There is no member left in the shard, but for the gap that stands for a missing end. Its
    end-of-archive mark, and the last padding, may be missing where the call says so.
    """
    (path,) = make_shards(tmp_path, shards=1, samples=3)
    data = content(path)
    if end != "mark":
        data = data.rstrip(b"\0")
    if end == "padding":
        data += bytes(-len(data) % 512)
    url = remote.put("end.tar", data)

    def make():
        opened = wp.ShardList(url).open_shards(storage_options=remote.storage_options)
        return opened.load_tar() if end == "mark" else opened.load_tar(on_truncated="ignore")

    state = cut_at(make(), 6)
    rest = list(make())[6:]
    found, seen = resumed(remote, make, state)
    assert found == rest
    assert not any(member.name for member in rest)
    assert sum(request.sent for request in seen) < 11_000
