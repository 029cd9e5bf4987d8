"""What a running chain counts, with the chains that it runs: no other chain of the process sees
it.
"""

import itertools
import os

import pytest
from remote import put_all

import wds_pipes as wp
from wds_pipes.core.chain import Chain
from wds_pipes.core.lane import Lane
from wds_pipes.testing import make_shards


@pytest.fixture
def urls(tmp_path):
    """Shards of which one is missing, and one has a header of noise, beside which a sample is
    lost.
    """
    found = make_shards(tmp_path, shards=5, samples=4, fields=("txt",))
    os.remove(found[1])
    with open(found[3], "r+b") as shard:
        shard.seek(1024)
        shard.write(b"\xff" * 512)
    return found


def samples(urls):
    return wp.ShardList(urls, on_error="skip").open_shards().load_tar().group_by_key()


def joined(urls):
    return wp.join({"a": samples(urls), "b": samples(urls[:1] * len(urls))}, on_missing="skip", prefix=True)


PIPES = {
    "samples": samples,
    "shuffle": lambda urls: samples(urls).shuffle_buffer(3),
    "interleave": lambda urls: samples(urls).interleave_shards(2),
    "repeat": lambda urls: samples(urls).repeat(2),
    "join": joined,
    "mix": lambda urls: wp.mix({"a": samples(urls).interleave_shards(2).shuffle_buffer(2), "b": samples(urls)}),
}


def skips(running):
    """How often a chain has skipped something, by its position."""
    counts = Chain(running).counts(running.mark(), 0)
    return sum(counts.get(name, 0) for name in ("skipped", "skipped_shards", "damaged"))


@pytest.mark.parametrize("pipe", PIPES)
def test_two_chains_in_turn_count_their_own_skips(pipe, urls):
    recipe = PIPES[pipe](urls)._stream.stage
    one, other = (recipe.open(Lane(0, 0)) for _ in range(2))
    for _ in zip(one.items, other.items, strict=True):
        pass
    assert one.lane.meters.skips == skips(one) > 0
    assert other.lane.meters.skips == skips(other) == skips(one)


class NoteMeters(wp.Stage):
    """Notes the meters of each chain that it runs in."""

    order_options = ()
    keeps_count = True
    scope = "item"
    found = []  # noqa: RUF012

    def run(self):
        self.found.append(self.lane.meters)
        yield from self.source.items


note_meters = wp.register_stage(NoteMeters)


@pytest.mark.parametrize("loops", [False, True])
def test_all_chains_that_a_lane_runs_have_its_meters(loops, tmp_path):
    """Through a mix, a join, repetitions, open shards and the segments of a lane of a loader."""
    urls = make_shards(tmp_path, shards=6, samples=4, fields=("txt",))
    parts = {name: note_meters(samples(urls)) for name in ("first", "second")}
    both = note_meters(wp.join(parts, prefix=True))
    pipe = wp.mix({"both": both, "one": note_meters(note_meters(samples(urls)).interleave_shards(2).repeat(2))})
    loader = wp.PipeLoader(
        note_meters(pipe), batch_size=2, lanes=2, collate=list, epoch_end="loop" if loops else "exact"
    )
    NoteMeters.found.clear()
    for _ in itertools.islice(loader, 40):
        pass
    assert len(NoteMeters.found) > 12
    assert len(set(map(id, NoteMeters.found))) == 2


def test_two_chains_wait_for_their_own_bytes(web, tmp_path):
    """Those of one pipe, which share its connections: together they wait as long as the pipe."""
    local = make_shards(tmp_path / "local", shards=2, samples=4, fields=("txt",))
    urls = put_all(web, local)
    recipe = wp.ShardList(urls).open_shards().load_tar().group_by_key()._stream.stage
    one, other, third = (recipe.open(Lane(0, 0, number, 2)) for number in (0, 1, 0))
    assert len([*one.items, *other.items]) == 8
    waited = [running.lane.meters.stall_seconds for running in (one, other)]
    assert min(waited) > 0
    assert sum(waited) == pytest.approx(Chain(one).network.stall_seconds)
    assert third.lane.meters.stall_seconds == 0
    third.close()
