"""write_shards: the shards of a run that was interrupted are those of one that was not."""

import os
from pathlib import Path

import pytest
from pipelines import keys_of, resumed, samples, through_json
from torch.utils.data import DataLoader

import wds_pipes as wp
from wds_pipes.tar import ShardWriter
from wds_pipes.testing import check_resume, make_shards


@pytest.fixture
def urls(tmp_path):
    (tmp_path / "in").mkdir()
    return make_shards(tmp_path / "in", shards=4, samples=[5, 0, 6, 3])


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def keys_in(folder):
    """The keys of the samples of all shards in a directory."""
    shards = sorted(map(str, Path(folder).glob("*.tar")))
    return [key for shard in shards for key in keys_of(wp.ShardList([shard]).open_shards().load_tar().group_by_key())]


def writing(urls, folder, fn=None, *, name="out-%02d.tar", **options):
    """A pipe that shuffles, filters and writes."""
    folder.mkdir(exist_ok=True)
    pipe = samples(urls).shuffle_buffer(3).filter_samples(lambda sample: sample["__key__"][-1] != "4")
    pipe = pipe if fn is None else pipe.map_samples(fn)
    return pipe.write_shards(folder / name, **{"max_samples": 3, **options})


@pytest.mark.parametrize("options", [{"max_bytes": 10240}, {"max_samples": 2, "offsets": True}])
def test_resumes_exactly(urls, tmp_path, options):
    check_resume(lambda: writing(urls[1:], tmp_path / "out", name="{lane}-%02d.tar", overwrite=True, **options))


class Killed(Exception):
    """The end of a process."""


def killed_after(count):
    def pass_on(sample):
        nonlocal count
        count -= 1
        if count < 0:
            raise Killed
        return sample

    return pass_on


@pytest.mark.parametrize(("saved", "taken"), [(0, 0), (0, 3), (1, 3), (1, 6), (2, 9), (1, 12)])
def test_nothing_is_missing_or_there_twice_wherever_it_is_interrupted(urls, tmp_path, saved, taken):
    """Whatever the run has written after its last state."""
    whole = list(writing(urls, tmp_path / "whole", offsets=True))
    assert whole == [str(tmp_path / f"whole/out-{number:02d}.tar") for number in range(5)]
    assert len(keys_in(tmp_path / "whole")) == 13
    first = writing(urls, tmp_path / "out", killed_after(taken), offsets=True)
    states = [first.state_dict()]
    with pytest.raises(Killed):
        states.extend(first.state_dict() for _ in first)
    left = contents(tmp_path / "out")
    assert left.items() <= contents(tmp_path / "whole").items(), "half a shard has a name"

    again = writing(urls, tmp_path / "out", lambda sample: sample, offsets=True)
    done = min(saved, len(states) - 1)
    again.load_state_dict(through_json(states[done]))
    assert [os.path.basename(shard) for shard in again] == [f"out-{number:02d}.tar" for number in range(done, 5)]
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    assert again.counts() == {"delivered": 13, "filtered": 1, "skipped": 0, "dropped": 0}


def test_the_bytes_are_those_of_a_writer(urls, tmp_path):
    """With values as they are decoded, and bytes as they are."""
    with ShardWriter(tmp_path / "whole-%02d.tar", max_samples=4) as writer:
        for sample in samples(urls):
            writer.write(sample)
    found = list(samples(urls).decode_by_ext().write_shards(tmp_path / "decoded-%02d.tar", max_samples=4))
    raw = list(samples(urls).write_shards(tmp_path / "raw-%02d.tar", max_samples=4))
    expected = [(tmp_path / f"whole-{number:02d}.tar").read_bytes() for number in range(4)]
    assert [Path(shard).read_bytes() for shard in found] == [Path(shard).read_bytes() for shard in raw] == expected


def test_stopping_early_discards_the_unfinished_shard(urls, tmp_path):
    items = iter(writing(urls, tmp_path / "out"))
    next(items)
    del items
    assert os.listdir(tmp_path / "out") == ["out-00.tar"]


def test_existing_shards_are_not_replaced(urls, tmp_path):
    """Also not by a second epoch, unless that is allowed."""
    pipe = writing(urls, tmp_path / "out")
    list(pipe)
    before = contents(tmp_path / "out")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        list(pipe)
    assert contents(tmp_path / "out") == before
    again = writing(urls, tmp_path / "out", overwrite=True)
    again.set_epoch(1)
    list(again)
    assert contents(tmp_path / "out") != before
    assert list(contents(tmp_path / "out")) == list(before)


def lanes_of(urls, folder):
    folder.mkdir(exist_ok=True)
    return samples(urls).write_shards(folder / "{lane}-%02d.tar", max_samples=2, overwrite=True)


def test_each_lane_writes_shards_of_its_own(urls, tmp_path):
    """In a DataLoader and in PipeLoader, also after a resume on another number of workers."""
    shards = list(DataLoader(lanes_of(urls, tmp_path / "torch").as_dataset(), batch_size=None, num_workers=2))
    assert {os.path.basename(shard)[:3] for shard in shards} == {"000", "001"}
    assert sorted(keys_in(tmp_path / "torch")) == sorted(keys_of(samples(urls)))

    whole = list(wp.PipeLoader(lanes_of(urls, tmp_path / "whole"), lanes=2))
    assert sorted(keys_in(tmp_path / "whole")) == sorted(keys_of(samples(urls)))
    make = lambda workers: wp.PipeLoader(lanes_of(urls, tmp_path / "out"), num_workers=workers)  # noqa: E731
    first, again = resumed(lambda: make(2), 3, lambda: make(0))
    assert len(first) + len(list(again)) == len(whole)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_a_lane_that_had_written_ahead_goes_on(urls, tmp_path):
    """It has shards, and had delivered none of them at the state; not so in a next epoch."""
    pipe = lambda: samples(urls).write_shards(tmp_path / "{lane}-%02d.tar", max_samples=2)  # noqa: E731
    loader = wp.PipeLoader(pipe(), num_workers=2)
    items = iter(loader)
    first = [next(items)]
    state = through_json(loader.state_dict())
    whole = [*first, *items]
    again = wp.PipeLoader(pipe(), num_workers=2)
    again.load_state_dict(state)
    assert [*first, *again] == whole
    again.load_state_dict(again.state_dict())
    with pytest.raises(FileExistsError):
        list(again)


def test_the_epoch_goes_on_on_other_lanes(urls, tmp_path):
    """Each lane continues its own shards, as one whole."""
    make = lambda lanes: wp.PipeLoader(lanes_of(urls, tmp_path / "out"), lanes=lanes)  # noqa: E731
    list(resumed(lambda: make(1), 2, lambda: make(2))[1])
    assert sorted(keys_in(tmp_path / "out")) == sorted(keys_of(samples(urls)))


def test_lanes_with_the_same_names_are_refused(urls, tmp_path):
    with pytest.raises(ValueError, match=r"2 lanes .* such as 'train-{lane}"):
        list(wp.PipeLoader(writing(urls, tmp_path / "out"), lanes=2))


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda pipe: pipe.write_shards("x.tar"), "one place for the shard's number"),
        (lambda pipe: pipe.write_shards("%d.tar", max_samples=0), "max_samples must be at least 1, not 0"),
        (
            lambda pipe: pipe.write_shards("%d.tar.gz", offsets=True),
            "only uncompressed shards have offsets",
        ),
        (lambda pipe: list(pipe.to_tuple("txt").write_shards("%d.tar")), "takes samples as dicts"),
        (
            lambda pipe: list(pipe.rename_fields({"TXT2": "txt"}).write_shards("%d.tar")),
            "write 'txt2'",
        ),
    ],
)
def test_what_cannot_be_written(write, message, urls, tmp_path, monkeypatch):
    """And nothing is left of it."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises((TypeError, ValueError), match=message):
        write(samples(urls))
    assert os.listdir(tmp_path) == ["in"]


def test_a_state_that_does_not_fit_is_refused(urls, tmp_path):
    pipe = writing(urls, tmp_path / "out")
    next(iter(pipe))
    state = through_json(pipe.state_dict())
    assert "after 1 shard" in wp.describe_state(state)
    with pytest.raises(wp.StateError, match="max_samples=4"):
        writing(urls, tmp_path / "out", max_samples=4).load_state_dict(state)
    state["lanes"]["0"]["position"][-1]["delivered"] = 9
    with pytest.raises(wp.StateError, match="1 shard cannot have 9 samples"):
        writing(urls, tmp_path / "out").load_state_dict(state)
