"""Steps that read items again at a resume: where the steps before them then skip other data, they
refuse."""

import itertools
import json
import os
from collections import deque
from dataclasses import dataclass

import pytest
from pipelines import keys_of, through_json
from tars import put, tar

import wds_pipes as wp
from wds_pipes.errors import StateError
from wds_pipes.testing import check_resume, make_shards


def unchanged(item):
    return item


def late(source):
    """Each sample; every other one when three more have come, which the next calls get."""
    sample = next(source)
    ahead = list(itertools.islice(source, 3 if sample["__key__"].endswith("0") else 0))
    yield sample
    source.put_back(*ahead)


def samples(urls, **options):
    """A pipe of samples whose shards may be missing."""
    return wp.ShardList(urls, **options).open_shards(on_error="skip").load_tar().group_by_key()


def mixed(urls, step, before=lambda pipe: pipe):
    parts = {"a": before(samples(urls[::2])), "b": before(samples(urls[1::2]))}
    return step(wp.mix(parts, weights={"a": 1, "b": 1}, exhausted="drop"))


class TwiceUnlessNear(wp.FlatMap):
    """Each sample twice, but none whose key ends as that of one of the last samples."""

    @dataclass(slots=True)
    class At(wp.FlatMap.At):
        filtered: int = 0

    tallies = ("filtered",)
    order_options = ("window", "letters")

    def __init__(self, source, window=3, letters=1):
        super().__init__(source)
        self.window = self.lookback = window
        self.letters = letters
        self.ends = deque(maxlen=window)

    def expand(self, sample):
        key = sample["__key__"]
        near = key[-self.letters :] in self.ends
        self.ends.append(key[-self.letters :])
        self.at.filtered += near
        if not near:
            yield from [sample, sample | {"__key__": f"{key}again"}]


wp.register_stage(TwiceUnlessNear)

STEPS = {
    "lookback": lambda pipe: pipe.twice_unless_near(letters=2),
    "shuffle": lambda pipe: pipe.shuffle_buffer(4),
    "shuffle twice": lambda pipe: pipe.shuffle_buffer(3).map_samples(unchanged).shuffle_buffer(3),
    "unbatch": lambda pipe: pipe.batch_samples(3, collate="list").unbatch_samples(),
    "explode": lambda pipe: pipe.explode_records("jsonl"),
    "then": lambda pipe: pipe.then(late),
    "pack": lambda pipe: pipe.pack_samples(lambda sample: 2, 3, window=3).map_samples(lambda pack: pack[0]),
}
PIPES = {
    "plain": lambda urls, step: step(samples(urls)),
    "threads": lambda urls, step: step(samples(urls).map_samples(unchanged, threads=2)),
    "interleaved": lambda urls, step: step(samples(urls).interleave_shards(2)),
    "mixed": mixed,
    "mixed, shuffled before": lambda urls, step: mixed(urls, step, lambda pipe: pipe.shuffle_buffer(3)),
    "lanes": lambda urls, step: wp.PipeLoader(step(samples(urls)), lanes=2),
    "counted lanes": lambda urls, step: wp.PipeLoader(step(samples(urls, samples_per_shard=2)), lanes=2),
}


@pytest.fixture
def shards(tmp_path):
    """Five shards of two samples, and one that is always missing."""
    urls = []
    for shard in range(5):
        members = [
            (f"{shard}{number}.jsonl", b"".join(json.dumps({"n": record}).encode() + b"\n" for record in range(2)))
            for number in range(2)
        ]
        urls.append(put(tmp_path / f"{shard}.tar", tar(members)))
    return [*urls[:2], str(tmp_path / "missing.tar"), *urls[2:]]


def run(make, state=None, stop=None):
    """The keys up to a cut, or to the end; and the state there."""
    pipe = make()
    if state is not None:
        pipe.load_state_dict(through_json(state))
    keys = keys_of(itertools.islice(pipe, stop))
    return keys, pipe.state_dict()


@pytest.mark.parametrize(
    ("kind", "step"), [*(("plain", step) for step in STEPS), *((kind, "shuffle") for kind in PIPES if kind != "plain")]
)
def test_a_shard_that_has_gone_since_a_state_never_drops_samples_of_others(shards, kind, step):
    """At cuts everywhere, the resume yields all other samples, or it is refused."""

    def make():
        return PIPES[kind](shards, STEPS[step])

    whole, _ = run(make)
    refused = 0
    for cut in range(1, len(whole), 2):
        before, state = run(make, stop=cut)
        assert run(make, state)[0] == whole[cut:]
        for gone in (shards[0], shards[4]):
            os.rename(gone, f"{gone}x")
            try:
                rest, _ = run(make, state)
            except StateError:
                refused += 1
            else:
                others = {key for key in whole if key[0] != os.path.basename(gone)[0]}
                assert others <= {*before, *rest}
                assert len({*before, *rest}) == len(before) + len(rest)
            os.rename(f"{gone}x", gone)
    assert refused


def shuffled(shards):
    return lambda: samples(shards).shuffle_buffer(4)


def test_the_error_names_the_shard(shards):
    _, state = run(shuffled(shards), stop=3)
    os.remove(shards[0])
    with pytest.raises(StateError, match=r"shuffle_buffer\(\) reads samples again .*/0\.tar does not exist"):
        run(shuffled(shards), state)


def test_a_shard_that_has_come_back_since_a_state_is_refused(shards):
    """Its samples would take the places of others."""
    os.rename(shards[0], f"{shards[0]}x")
    _, state = run(shuffled(shards), stop=3)
    os.rename(f"{shards[0]}x", shards[0])
    with pytest.raises(StateError, match="Restore the shards"):
        run(shuffled(shards), state)


def test_a_state_after_a_resume_knows_what_was_skipped_before(shards):
    """Also one that is taken when the shard was skipped before the state that was loaded."""
    whole, _ = run(shuffled(shards))
    for cut in range(len(whole)):
        before, state = run(shuffled(shards), stop=cut)
        for again in range(len(whole) - cut):
            some, later = run(shuffled(shards), state, again)
            assert before + some + run(shuffled(shards), later)[0] == whole


@pytest.mark.parametrize("window", [2, 100])
def test_a_flat_map_that_looks_back(tmp_path, window):
    """It resumes exactly, and reads at most twice its lookback again; nothing is counted twice."""
    urls = make_shards(tmp_path, shards=3, samples=[5, 0, 9])

    def make():
        pipe = wp.ShardList(urls, shuffle=True).open_shards().load_tar().group_by_key()
        return pipe.shuffle_buffer(3).twice_unless_near(window)

    check_resume(lambda: make().shuffle_buffer(2))
    pipe = make()
    keys_of(pipe)
    counts = pipe.counts()
    assert counts["filtered"] == 14 - counts["delivered"] // 2
    for cut in range(1, counts["delivered"]):
        _, state = run(make, stop=cut)
        assert state["lanes"]["0"]["position"][-1].get("again", 0) < 2 * window
        resumed = make()
        resumed.load_state_dict(state)
        keys_of(resumed)
        assert resumed.counts() == counts


@pytest.mark.parametrize("wrong", [{"again": 6, "yielded": 1, "taken": 1}, {"again": 1}])
def test_a_position_that_no_lookback_has_is_refused(shards, wrong):
    def make():
        return samples(shards).twice_unless_near()

    _, state = run(make, stop=2)
    state["lanes"]["0"]["position"][-1] = wrong
    with pytest.raises(StateError, match="twice_unless_near cannot stand at .* it looks back at 3 calls"):
        run(make, state)


def test_an_error_of_expand_names_the_item(shards):
    pipe = samples(shards).twice_unless_near(letters="all")
    with pytest.raises(TypeError) as caught:
        list(pipe)
    [note] = caught.value.__notes__
    assert note.startswith("raised by twice_unless_near(), of the item {'__key__': '00', '__url__': ")
    assert len(note) < 130
