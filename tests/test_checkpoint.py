"""Checkpoints: complete or absent, skipped where incomplete, refused where damaged, and exact onto
any number of ranks.
"""

import contextlib
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import random
import shutil
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from pipelines import keys_of, loaded, samples, through_json
from process_group import on_ranks
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_pipes as wp
from wds_pipes import checkpoint
from wds_pipes.testing import make_shards

SAMPLES = [6, 5, 7, 6, 4, 8, 5, 5]
CONTEXT = multiprocessing.get_context("forkserver")
KEYS = [f"{number:08d}" for number in range(sum(SAMPLES))]


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> list[str]:
    """Eight shards with 46 samples."""
    return make_shards(tmp_path_factory.mktemp("checkpoint"), shards=8, samples=SAMPLES)


def make_loader(urls, rank=0, ranks=1, *, seed=5, **options) -> wp.PipeLoader:
    pipe = samples(urls, seed=seed, samples_per_shard=SAMPLES).shuffle_buffer(4)
    return wp.PipeLoader(
        pipe, batch_size=2, collate="list", rank=rank, world_size=ranks, **{"epoch_end": "exact", **options}
    )


def take(batches, count=None) -> list[str]:
    """The keys of the next ``count`` batches; None: of all."""
    return [key for batch in itertools.islice(batches, count) for key in keys_of(batch)]


def run_ranks(urls, ranks, directory, batches, **options):
    """Ranks that load if a checkpoint exists, take ``batches`` batches each and save; returns the
    keys of each.
    """
    given = []
    for rank in range(ranks):
        loader = make_loader(urls, rank, ranks, **options)
        checkpoint.load(directory, loader)
        given.append((loader, take(iter(loader), batches)))
    for loader, _ in given:
        checkpoint.save(directory, loader)
    return [keys for _, keys in given]


# Resume


@pytest.mark.parametrize(("batches", "workers"), [(0, 0), (5, 0), (1, 2)])
def test_the_same_ranks_resume_exactly(shards, tmp_path, batches, workers):
    """Each rank returns the batches that it would have returned without the break. The state of a
    rank is its own.
    """
    for rank in range(2):
        loader = make_loader(shards, rank, 2, num_workers=workers, lanes=4)
        if batches:
            take(iter(loader), batches)
        assert checkpoint.save(tmp_path, loader) == tmp_path / "step-0000000001"
        loader.close()
    for rank in range(2):
        straight = take(make_loader(shards, rank, 2, lanes=4))
        loader = make_loader(shards, rank, 2, lanes=4)
        assert checkpoint.load(tmp_path, loader) == 1
        assert take(loader) == straight[2 * batches :]


def test_ranks_in_different_epochs_resume(shards, tmp_path, caplog):
    """With epoch_end="exact" one rank may have fewer batches in an epoch than the other. Whatever
    save() wrote at one step, load() accepts on as many ranks; the log says once that it fits no
    other number.
    """
    sizes = [len(list(make_unequal(shards, rank, 2))) for rank in range(2)]
    straight = [list(itertools.islice(endless(make_unequal(shards, rank, 2)), 3 * max(sizes))) for rank in range(2)]
    loaders = [make_unequal(shards, rank, 2) for rank in range(2)]
    running, apart = [endless(loader) for loader in loaders], []
    for step in range(1, 2 * max(sizes) + 3):
        for loader, batches in zip(loaders, running, strict=True):
            next(batches)
            checkpoint.save(tmp_path, loader, step=step, keep=2)
        if len({loader.state_dict()["epoch"] for loader in loaders}) == 2:
            apart.append(step)
            with pytest.raises(wp.StateError, match="differ in 'epoch'.*on 2 ranks each continues from its own state"):
                checkpoint.load(tmp_path, make_unequal(shards, 0, 1))
        for rank in range(2):
            again = make_unequal(shards, rank, 2)
            assert checkpoint.load(tmp_path, again) == step
            assert list(itertools.islice(endless(again), 2)) == straight[rank][step : step + 2]
    assert apart
    [said] = [record.getMessage() for record in caplog.records if "fits 2 ranks only" in record.getMessage()]
    assert "epoch_end='loop'" in said


@pytest.mark.parametrize("end", ["exact", "loop"])
def test_what_load_would_refuse_is_not_saved(shards, tmp_path, end):
    """A rank that is one batch ahead of another; the files of a run that crashed do not count."""
    loaders = [make_loader(shards, rank, 2, epoch_end=end) for rank in range(2)]
    running = [iter(loader) for loader in loaders]
    for step in (1, 2):
        for loader, batches in zip(loaders, running, strict=True):
            next(batches)
            checkpoint.save(tmp_path, loader, step=step)
    next(running[0])
    checkpoint.save(tmp_path, loaders[0], step=3)
    with pytest.raises(wp.StateError, match="refuse checkpoint 3: .* different steps .*epoch_end='loop'"):
        checkpoint.save(tmp_path, loaders[1], step=3)
    again = [make_loader_of(shards, tmp_path, 2, rank, 2, epoch_end=end) for rank in range(2)]
    for loader in reversed(again):  # rank 1 before rank 0 replaces the file of the run that failed
        take(iter(loader), 2)
        checkpoint.save(tmp_path, loader, step=3)
    make_loader_of(shards, tmp_path, 3, epoch_end=end)


@pytest.mark.parametrize(
    ("shards_of_one", "why"), [(slice(None, None, -1), "the same in another order"), (slice(7), "'shards'")]
)
def test_the_first_state_of_a_rank_with_other_shards_is_not_saved(shards, tmp_path, shards_of_one, why):
    """The names of the shards, or their order, are not those of the rank that saved before."""
    loaders = [
        wp.PipeLoader(samples(urls), batch_size=2, epoch_end="exact", rank=rank, world_size=2)
        for rank, urls in enumerate((shards, shards[shards_of_one]))
    ]
    saved = checkpoint.save(tmp_path, loaders[0]) / "rank-0000-of-0002.json"
    os.utime(saved, ns=(0, time.time_ns() + 10**9))  # surely after the loaders were made
    with pytest.raises(wp.StateError, match=f"the states of ranks 1 and 0 do not belong together, since.*{why}"):
        checkpoint.save(tmp_path, loaders[1])


def save_other_shards(rank, ranks, urls, path):
    with pytest.raises(wp.StateError) as caught:
        checkpoint.save(path, make_loader(urls[::-1] if rank else urls, None, None))
    return str(caught.value)


def test_all_ranks_refuse_to_save_where_one_has_other_shards(shards, tmp_path):
    """Also before the first batch; nothing is written."""
    first, second = on_ranks(2, save_other_shards, shards, tmp_path)
    assert first == second
    assert "rank 1 of 2 does not begin the same iteration" in first
    assert not list(tmp_path.glob("step-*"))


def make_unequal(urls, rank, ranks) -> wp.PipeLoader:
    pipe = samples(urls[:7])
    return wp.PipeLoader(pipe, batch_size=2, collate="list", rank=rank, world_size=ranks, epoch_end="exact", lanes=2)


def endless(loader):
    """Batches of keys, over epochs."""
    while True:
        for batch in loader:
            yield keys_of(batch)


def test_other_numbers_of_ranks_resume(shards, tmp_path):
    """Onto any number of ranks, several times: each sample once."""
    worlds = [*((ranks, 1) for ranks in (4, 2, 3, 2, 4)), (1, None)]
    given = [run_ranks(shards, ranks, tmp_path, batches) for ranks, batches in worlds]
    assert sorted(key for run in given for keys in run for key in keys) == KEYS


def test_step_chooses(shards, tmp_path, caplog):
    """step= numbers the checkpoint and finds it again. After loading an older one, save() is
    refused where a newer one would be loaded instead.
    """
    loader = make_loader(shards)
    live, keys = iter(loader), []
    for step in (100, 200, 300):
        keys += take(live, 1)
        assert checkpoint.save(tmp_path, loader, step=step).name == f"step-{step:010d}"
    with caplog.at_level(logging.WARNING, "wds_pipes"):
        again = make_loader_of(shards, tmp_path, 100)
    assert "newer ones are there: 200 is complete, and save() refuses to go on before it; 300 is" in caplog.text
    assert "more" not in caplog.text
    assert take(iter(again), 2) == keys[2:6]
    with pytest.raises(wp.StateError, match="holds checkpoint 300, and this one would be 200"):
        checkpoint.save(tmp_path, again, step=200)
    checkpoint.save(tmp_path, again, step=300)
    assert checkpoint.save(tmp_path, again).name == "step-0000000301"
    with pytest.raises(wp.StateError, match=r"no complete checkpoint 250 \(complete are 200, 300, 301"):
        checkpoint.load(tmp_path, again, step=250)


def test_a_new_run_in_a_used_directory_is_refused(shards, tmp_path):
    """A loader that loaded nothing neither replaces what is there nor saves what would never be
    loaded.
    """
    run_ranks(shards, 1, tmp_path, 1)
    before = content_of(tmp_path)
    with pytest.raises(wp.StateError, match="Continue from the newest with load"):
        checkpoint.save(tmp_path, make_loader(shards))
    assert content_of(tmp_path) == before


def content_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# Files


def test_the_file(shards, tmp_path):
    """Small JSON with its place, its format and a checksum; no temporary file stays."""
    loader = make_loader(shards, 1, 3)
    take(iter(loader), 2)
    place = checkpoint.save(tmp_path / "made" / "of" / "need", loader, step=12)
    assert list(content_of(tmp_path)) == ["made/of/need/step-0000000012/rank-0001-of-0003.json"]
    content = json.loads((place / "rank-0001-of-0003.json").read_text("ascii"))
    assert content["state"] == loader.state_dict()
    assert {name: content[name] for name in ("format", "step", "rank", "world_size")} == {
        "format": 1,
        "step": 12,
        "rank": 1,
        "world_size": 3,
    }
    assert (place / "rank-0001-of-0003.json").stat().st_size < 4096


def test_the_last_k_are_kept(shards, tmp_path):
    """Older ones are removed when enough newer ones are complete, with what crashes left of them.
    Other files stay.
    """
    others = [
        "notes.txt",
        "step-0000000001/model.pt",
        "step-12/rank-0000-of-0001.json",
        "step-0000000000/.rank-0000-of-0001.json",
        "epoch/rank-0000-of-0001.json",
    ]
    for name in others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    (tmp_path / "step-0000000002").mkdir()
    (tmp_path / "step-0000000002" / ".rank-0001-of-0002.json.partial").write_text("left by a crash")
    loaders = [make_loader(shards, rank, 2) for rank in range(2)]
    for step in range(1, 8):
        for loader in loaders:
            checkpoint.save(tmp_path, loader, keep=2)
            names = {path.parent.name for path in tmp_path.rglob("rank-*-of-0002.json")}
            expected = range(max(1, step - (2 if loader is loaders[0] else 1)), step + 1)
            assert names == {f"step-{number:010d}" for number in expected}
    left = {name for name in content_of(tmp_path) if not name.startswith(("step-0000000006", "step-0000000007"))}
    assert left == set(others)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {
        "epoch",
        "step-12",
        *(f"step-{number:010d}" for number in (0, 1, 6, 7)),
    }


def test_ranks_save_at_their_own_pace_while_another_process_loads(shards, tmp_path):
    """They remove old checkpoints at once, perhaps before they are read: nothing goes wrong, the
    newest is loaded, and at last it is whole.
    """
    errors = []

    def save(rank):
        try:
            loader = make_loader(shards, rank, 4)
            for _ in range(20):
                checkpoint.save(tmp_path, loader, keep=1)
                time.sleep(random.random() / 500)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    steps = []
    while any(thread.is_alive() for thread in threads):
        steps.append(checkpoint.load(tmp_path, make_loader(shards)) or 0)
    assert not errors
    assert steps == sorted(steps)
    assert sorted(content_of(tmp_path)) == [f"step-0000000020/rank-{rank:04d}-of-0004.json" for rank in range(4)]


def test_ranks_that_are_ahead_meet_the_files_of_a_crash(shards, tmp_path):
    """A rank that is ahead completes a newer checkpoint with an old file of a slower rank: the
    slower one still saves, and the newest checkpoint resumes exactly.
    """

    def run(loader, first, last):
        """The keys of some batches, with a checkpoint after each third one."""
        keys, batches = [], iter(loader)
        for step in range(first + 3, last + 1, 3):
            keys += take(batches, 3)
            checkpoint.save(tmp_path, loader, step=step)
        return keys

    whole = [take(make_loader(shards, rank, 2)) for rank in range(2)]
    run(make_loader(shards, 0, 2), 0, 3)
    run(make_loader(shards, 1, 2), 0, 9)  # it was ahead when both were killed
    again = [make_loader_of(shards, tmp_path, 3, rank, 2) for rank in range(2)]
    for rank, loader in enumerate(again):  # now rank 0 is ahead
        assert run(loader, 3, 9) == whole[rank][6:18]
    for rank in range(2):
        assert take(make_loader_of(shards, tmp_path, 9, rank, 2)) == whole[rank][18:]


def test_what_was_incomplete_in_one_directory_counts_in_another(shards, tmp_path):
    """A loader that loaded from another directory is refused as any other."""
    for rank in range(2):
        loader = make_loader(shards, rank, 2)
        checkpoint.save(tmp_path / "first", loader, step=1)
        checkpoint.save(tmp_path / "second", loader, step=4)
    checkpoint.save(tmp_path / "first", loader, step=4)  # of one rank only
    again = make_loader(shards, 0, 2)
    assert checkpoint.load(tmp_path / "first", again) == 1
    with pytest.raises(wp.StateError, match="second holds checkpoint 4, and this one would be 2"):
        checkpoint.save(tmp_path / "second", again, step=2)


def test_two_loaders_do_not_share_a_directory(shards, tmp_path):
    """Nor does a second one replace what the first has saved, also at a given step."""
    train, other = make_loader(shards), make_loader(shards)
    take(other, 1)
    for step in (1, 2):
        checkpoint.save(tmp_path, train, step=step)
        with pytest.raises(wp.StateError, match="another loader of this process has saved"):
            checkpoint.save(tmp_path, other, step=step)
    del train
    checkpoint.save(tmp_path, other, step=2)  # as after a failed cell of a notebook


def test_incomplete_newer_checkpoints_are_skipped(shards, tmp_path, caplog):
    """After a crash in the middle of saving the checkpoint before it counts, and the log says so.
    The next save() replaces the incomplete one.
    """
    run_ranks(shards, 2, tmp_path, 1)
    shutil.copytree(tmp_path / "step-0000000001", tmp_path / "step-0000000002")
    (tmp_path / "step-0000000002" / "rank-0001-of-0002.json").unlink()
    (tmp_path / "step-0000000003").mkdir()
    with caplog.at_level(logging.WARNING, "wds_pipes"):
        assert checkpoint.load(tmp_path, make_loader(shards)) == 1
    assert (
        "although newer ones are there: step-0000000002 lacks rank 1 of 2; step-0000000003 has no files"
    ) in caplog.text
    run_ranks(shards, 2, tmp_path, 1)
    assert checkpoint.load(tmp_path, make_loader(shards)) == 2
    run_ranks(shards, 3, tmp_path, 1)
    assert checkpoint.load(tmp_path, make_loader(shards)) == 3


def test_files_left_by_other_numbers_of_ranks_are_skipped(shards, tmp_path):
    """Files that another number of ranks did not finish do not change the checkpoint that this
    number finished.
    """
    run_ranks(shards, 2, tmp_path, 1)
    for name in (
        "rank-0000-of-0003.json",
        "rank-0000-of-99999999999.json",
        "rank-0005-of-0002.json",
        "rank-00000-of-0001.json",
    ):
        (tmp_path / "step-0000000001" / name).write_text("{}")
    shutil.copytree(tmp_path / "step-0000000001", tmp_path / "step-00000000009")
    assert checkpoint.load(tmp_path, make_loader(shards)) == 1


# Refusals


def seal(path: Path, **changes) -> None:
    """Change a file and make its checksum right."""
    content = {**json.loads(path.read_text()), **changes}
    sealed = {name: value for name, value in content.items() if name not in ("format", "checksum")}
    content["checksum"] = hashlib.blake2b(
        json.dumps(sealed, sort_keys=True, separators=(",", ":")).encode(), digest_size=16
    ).hexdigest()
    path.write_text(json.dumps(content))


def edited(path):
    path.write_text(path.read_text().replace('"delivered": 1', '"delivered": 2', 1))


def cut(path):
    path.write_bytes(path.read_bytes()[:-40])


def of_another_run(path):
    state = json.loads(path.read_text())["state"]
    seal(path, state={**state, "seed": 6})


def of_another_step(path):
    state = json.loads(path.read_text())["state"]
    seal(path, state={**state, "step": 2})


def swapped(path):
    path.write_bytes(path.with_name("rank-0000-of-0002.json").read_bytes())


DAMAGE = {
    "truncated": (cut, "is truncated, edited or damaged"),
    "not text": (lambda path: path.write_bytes(b"\xff\xfe\xfd"), "is truncated, edited or damaged"),
    "deep": (lambda path: path.write_bytes(b"[" * 100_000), "is truncated, edited or damaged"),
    "a list": (lambda path: path.write_text("[1]"), "is truncated, edited or damaged"),
    "edited": (edited, "is truncated, edited or damaged"),
    "newer": (lambda path: seal(path, format=2, extra="new"), "has another format than 1"),
    "swapped": (swapped, "was written as rank 0 of 2 at step 1, and is not in its place"),
    "another run": (of_another_run, "the states differ in 'seed'"),
    "another step": (of_another_step, "were taken at different steps"),
    "a state of no kind": (lambda path: seal(path, state=[]), "the list of what it returned on each rank"),
    "a directory": (lambda path: (path.unlink(), path.mkdir()), "is no regular file"),
    "a dead link": (lambda path: (path.unlink(), path.symlink_to("nowhere")), "cannot read the checkpoint"),
    "a pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "is no regular file"),
    "a device": (lambda path: (path.unlink(), path.symlink_to("/dev/zero")), "is no regular file"),
    "huge": (lambda path: os.truncate(path, 1 << 40), "has 1,099,511,627,776 bytes"),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_named(shards, tmp_path, what):
    """On every rank that loads, also where an older checkpoint is complete: the error says what is
    wrong with which file, and the loader is unchanged.
    """
    run_ranks(shards, 2, tmp_path, 1)
    shutil.copytree(tmp_path / "step-0000000001", tmp_path / "step-0000000000")
    harm, message = DAMAGE[what]
    harm(tmp_path / "step-0000000001" / "rank-0001-of-0002.json")
    for rank, ranks in ((0, 2), (1, 2), (0, 1)):
        loader = make_loader(shards, rank, ranks)
        before = loader.state_dict()
        with pytest.raises(wp.StateError) as error:
            checkpoint.load(tmp_path, loader)
        assert message in str(error.value)
        assert "step-0000000001" in str(error.value)
        assert loader.state_dict() == before


@pytest.mark.parametrize("what", ["a pipe", "a device", "not text"])
def test_saving_again_over_damage(shards, tmp_path, what):
    """save() neither waits for a damaged file of the same step nor reads it without end."""
    checkpoint.save(tmp_path, make_loader(shards))
    DAMAGE[what][0](tmp_path / "step-0000000001" / "rank-0000-of-0001.json")
    with pytest.raises(wp.StateError):
        checkpoint.save(tmp_path, make_loader(shards))


def test_any_changed_byte_is_found(shards, tmp_path):
    """One bit anywhere in the file: an error, or, in white space, the same state."""
    run_ranks(shards, 1, tmp_path, 3)
    path = tmp_path / "step-0000000001" / "rank-0000-of-0001.json"
    whole, loader, refused = path.read_bytes(), make_loader(shards), 0
    for place in range(0, len(whole), 5):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 7]) + whole[place + 1 :])
        try:
            checkpoint.load(tmp_path, loader)
        except wp.StateError:
            refused += 1
        else:
            assert loader.state_dict() == json.loads(whole)["state"]
    assert refused > 0.9 * len(whole) / 5


@pytest.mark.parametrize("first", [0, 1])
def test_a_crash_in_the_first_save_is_survived(shards, tmp_path, caplog, first):
    """Nothing is loaded, and the log says so; the ranks save again, whichever comes first."""
    checkpoint.save(tmp_path, make_loader(shards, 0, 2, seed=4))
    loaders = [make_loader(shards, rank, 2) for rank in range(2)]
    assert [checkpoint.load(tmp_path, loader) for loader in loaders] == [None, None]
    assert "is complete (step-0000000001 lacks rank 1 of 2), as a crash in the first save() leaves it" in caplog.text
    for rank in (first, 1 - first):
        checkpoint.save(tmp_path, loaders[rank])
    assert checkpoint.load(tmp_path, make_loader(shards)) == 1


def test_directories(shards, tmp_path, caplog):
    """An empty directory returns None, and so does a missing one, with a warning. A file in its
    place is an error. URLs are refused.
    """
    loader, file = make_loader(shards), tmp_path / "file"
    assert checkpoint.load(tmp_path, loader) is checkpoint.load(str(tmp_path), loader) is None
    assert not caplog.records
    assert checkpoint.load(tmp_path / "no", loader) is None
    assert "no does not exist: nothing is loaded, as at a first start" in caplog.text
    file.write_text("")
    for place, options, message in (
        (tmp_path, {"step": 3}, "no complete checkpoint 3"),
        (tmp_path / "no", {"step": 3}, "no complete checkpoint 3"),
        (file, {}, "cannot read checkpoints from"),
    ):
        with pytest.raises(wp.StateError, match=message):
            checkpoint.load(place, loader, **options)
    for place in (file, file / "below"):
        with pytest.raises(wp.StateError, match="cannot save a checkpoint to"):
            checkpoint.save(place, loader)
    for function in (checkpoint.load, checkpoint.save):
        with pytest.raises(ValueError, match="not at a URL"):
            function("s3://bucket/run", loader)


def test_a_single_checkpoint_is_no_directory_of_them(shards, tmp_path, monkeypatch):
    """What save() returns is not what load() takes: to start again silently would be worse."""
    loader = make_loader(shards)
    place = checkpoint.save(tmp_path, loader, step=7)
    with pytest.raises(wp.StateError, match=r"is a single checkpoint: pass .* and step=7 for this one"):
        checkpoint.load(place, loader)
    monkeypatch.chdir(place)
    with pytest.raises(wp.StateError, match="and step=7 for this one"):
        checkpoint.load(".", loader)
    place.rename(tmp_path / "kept")
    with pytest.raises(wp.StateError, match=r"under the name that save\(\) gave it"):
        checkpoint.load(tmp_path / "kept", loader)


def test_what_is_no_loader_is_told(shards, tmp_path):
    pipe = wp.ShardList(shards).open_shards().load_tar().group_by_key()
    for call in (lambda: checkpoint.save(tmp_path, pipe), lambda: checkpoint.load(make_loader(shards), str(tmp_path))):
        with pytest.raises(TypeError, match=r"(save|load)\(directory, loader\) takes a PipeLoader, not"):
            call()


@pytest.mark.parametrize("options", [{"keep": 0}, {"step": -1}])
def test_arguments(shards, tmp_path, options):
    with pytest.raises(ValueError, match="must be at least"):
        checkpoint.save(tmp_path, make_loader(shards), **options)


def test_a_full_disk(shards, tmp_path):
    """An error that says so, no half-written file, the older checkpoint unchanged, and step numbers
    that stay those of the other ranks.
    """
    resource = pytest.importorskip("resource")
    loader = make_loader(shards)
    checkpoint.save(tmp_path, loader)
    before = content_of(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(wp.StateError, match="cannot save a checkpoint to .*too large"):
            checkpoint.save(tmp_path, loader)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert content_of(tmp_path) == before
    assert checkpoint.save(tmp_path, loader).name == "step-0000000003"


# Killed


def save_for_ever(urls, directory, connection):
    """Load, then save after each batch, over epochs, and report each."""
    loader = make_loader(urls)
    checkpoint.load(directory, loader)
    for _ in endless(loader):
        connection.send(int(checkpoint.save(directory, loader, keep=2).name.removeprefix("step-")))


def test_killed_at_any_moment(shards, tmp_path):
    """SIGKILL at random moments of a rank that only saves: the newest complete checkpoint always
    loads, and is the one that was reported last, or the one after it. tests/proofs/kill.py has
    several ranks.
    """
    random_delay, last = random.Random(3), -1
    checkpoint.save(tmp_path, make_loader(shards), step=0)
    straight = list(itertools.islice(endless(make_loader(shards)), 2000))
    for _ in range(3):
        receiver, sender = CONTEXT.Pipe(duplex=False)
        process = CONTEXT.Process(target=save_for_ever, args=(shards, tmp_path, sender))
        process.start()
        sender.close()
        steps = [receiver.recv()]
        time.sleep(random_delay.uniform(0, 0.1))
        process.kill()
        process.join()
        with contextlib.suppress(EOFError, OSError):
            while True:
                steps.append(receiver.recv())
        loader = make_loader(shards)
        found = checkpoint.load(tmp_path, loader)
        assert last < steps[0] <= steps[-1] <= found <= steps[-1] + 1
        last = found
        assert list(itertools.islice(endless(loader), 3)) == straight[last : last + 3]


# All ranks as one


def test_gather_alone(shards, tmp_path):
    """One rank needs no torch.distributed, and the state survives torch.save. Several ranks without
    it are an error.
    """
    loader = make_loader(shards)
    given = take(iter(loader), 4)
    torch.save(checkpoint.gather(loader), tmp_path / "all.pt")
    again = loaded(make_loader(shards), torch.load(tmp_path / "all.pt", weights_only=True))
    assert given + take(again) == take(make_loader(shards))
    for collective in (checkpoint.gather, lambda loader: checkpoint.DCPState(loader).state_dict()):
        with pytest.raises(wp.StateError, match=r"rank 0 of 2, and torch.distributed.* is not initialised"):
            collective(make_loader(shards, 0, 2))


def gather_and_go_on(rank, ranks, urls, path):
    """Ranks that take their number from torch.distributed."""
    loader = make_loader(urls, None, None)
    straight = take(make_loader(urls, rank, ranks))
    given = take(iter(loader), 2)
    state = checkpoint.gather(loader)
    again = loaded(make_loader(urls, None, None), state)
    return state, given, given + take(again) == straight


def test_gather_over_ranks(shards, tmp_path):
    """Every rank has the same state of all, which continues each rank exactly and fits one rank
    too.
    """
    (state, first, same), (other, second, same_too) = on_ranks(2, gather_and_go_on, shards, tmp_path)
    assert state == other == through_json(state)
    assert same
    assert same_too
    loader = loaded(make_loader(shards), state)
    assert sorted(first + second + take(loader)) == KEYS


def load_on_a_rank_with_other_shards(rank, ranks, urls, path):
    """What ``checkpoint.load`` says where the state does not fit rank 1."""
    loader = make_loader(urls if rank == 0 else urls[::-1], None, None)
    before = loader.state_dict()
    try:
        checkpoint.load(path, loader)
    except wp.StateError as error:
        assert loader.state_dict() == before
        return str(error)
    return None


def test_where_a_checkpoint_does_not_fit_one_rank_all_say_so(shards, tmp_path):
    run_ranks(shards, 2, tmp_path, 2)
    first, second = on_ranks(2, load_on_a_rank_with_other_shards, shards, tmp_path)
    assert "rank 1 cannot load checkpoint 1" in first
    assert "its list of shards has other URLs or another order" in first
    assert "the state does not fit this pipeline: its list of shards" in second


def load_what_this_rank_sees(rank, ranks, urls, path):
    """What ``checkpoint.load`` returns on ranks that see different directories, by the difference:
    the step or the error; and the samples that come then.
    """
    found = {}
    for what, case in SEEN.items():
        loader, seen = make_loader(urls, None, None), path / what / f"seen-by-{rank}"
        before, options = loader.state_dict(), {"step": case.step}
        if what == "two steps":
            options["step"] = 3 - rank
        if what == "soon" and rank == 1:  # the newest comes while the ranks look again
            threading.Timer(0.7, os.rename, (seen / "hidden", seen / "step-0000000003")).start()
        try:
            found[what] = checkpoint.load(seen, loader, wait_seconds=60 if what == "soon" else 0, **options)
        except wp.StateError as error:
            found[what] = str(error)
            assert loader.state_dict() == before
        if what == "late":
            found["samples"] = take(loader)
    return found


def newest(place):
    return place / "step-0000000003"


def of_another_checkpoint(place):
    for name in ("rank-0000-of-0002.json", "rank-0001-of-0002.json"):
        shutil.copy(place / "step-0000000002" / name, newest(place))
        seal(newest(place) / name, step=3)


class Case(NamedTuple):
    """Directories that ranks see: rank 1's is harmed; ``harm_0``: also rank 0's. ``found``: the
    step that all load, or what all errors say; ``first``: what that of rank 0 says, too.
    """

    harm: object
    found: object
    step: int | None = None
    harm_0: object = lambda place: None
    first: str = ""


def without_newest(place):
    shutil.rmtree(newest(place))


def only_newest(place):
    for step in (1, 2):
        shutil.rmtree(place / f"step-{step:010d}")


def halves(place):
    for step in place.iterdir():
        (step / "rank-0001-of-0002.json").unlink()


def empty(place):
    shutil.rmtree(place)
    place.mkdir()


SEEN = {
    "late": Case(without_newest, 2),
    "soon": Case(lambda place: newest(place).rename(place / "hidden"), 3),
    "two steps": Case(lambda place: None, "rank 0 wants 3, rank 1 wants 2"),
    "gone": Case(without_newest, "checkpoint 3 is not there, or not complete, for rank 1", 3),
    "older": Case(without_newest, 2, 2),
    "damaged": Case(
        lambda place: cut(newest(place) / "rank-0000-of-0002.json"),
        "is truncated, edited or damaged",
        first="rank 1 cannot load checkpoint 3",
    ),
    "another": Case(of_another_checkpoint, "the ranks read different files of checkpoint 3"),
    "apart": Case(only_newest, "checkpoint 3 is not there, or not complete, for rank 0", harm_0=without_newest),
    "missing": Case(shutil.rmtree, "and there is no such directory for rank 1. See that it is the same directory"),
    "first start": Case(shutil.rmtree, None, harm_0=shutil.rmtree),
    "made early": Case(empty, None, harm_0=shutil.rmtree),
    "nothing": Case(empty, None, harm_0=empty),
    "half": Case(halves, "rank 0 sees no checkpoint, and rank 1 sees step-0000000001 lacks rank 1", harm_0=empty),
    "crashed": Case(halves, None, harm_0=halves),
}


def test_ranks_load_the_same_checkpoint(shards, tmp_path):
    """Ranks that see different directories load the checkpoint that all of them see, or all raise
    the same error, which names the rank that sees less.
    """
    saved = tmp_path / "saved"
    saved.mkdir()
    for _ in range(3):
        run_ranks(shards, 2, saved, 2)
    for what, case in SEEN.items():
        for rank, harm in enumerate((case.harm_0, case.harm)):
            harm(shutil.copytree(saved, tmp_path / what / f"seen-by-{rank}"))
    on_each = on_ranks(2, load_what_this_rank_sees, shards, tmp_path)
    for rank, found in enumerate(on_each):
        assert found["samples"] == take(make_loader_of(shards, saved, 2, rank, 2))
        for what, case in SEEN.items():
            assert case.found in found[what] if isinstance(case.found, str) else found[what] == case.found
            assert rank or case.first in str(found[what])


def make_loader_of(urls, directory, step, *where, **options) -> wp.PipeLoader:
    loader = make_loader(urls, *where, **options)
    assert checkpoint.load(directory, loader, step=step) == step
    return loader


def gather_with_tensor_parallel(rank, ranks, urls, path):
    """Two data-parallel ranks of two processes each; then all at different steps."""
    loader = make_loader(urls, rank // 2, 2)
    batches = iter(loader)
    take(batches, 2)
    state = checkpoint.gather(loader)
    take(batches, 1 + rank % 2)
    try:
        checkpoint.gather(loader)
    except wp.StateError as error:
        return state, str(error)


def test_gather_of_processes_that_share_a_rank(shards, tmp_path):
    """Their states are merged into one where they agree, and refused where they differ."""
    results = on_ranks(4, gather_with_tensor_parallel, shards, tmp_path)
    assert len({json.dumps(state) for state, _ in results}) == 1
    assert sorted(results[0][0]["lanes"]) == ["0", "1"]
    assert all("rank 0, 1 is there more than once" in message for _, message in results)


def save_dcp(rank, ranks, urls, batches, path):
    """Take batches, save beside a tensor while more are taken, and return the first."""
    import torch.distributed.checkpoint as dcp

    loader = make_loader(urls, None, None)
    iterator = iter(loader)
    given = take(iterator, batches)
    content = {"weight": torch.full((3,), 1.0), "data": checkpoint.DCPState(loader)}
    saving = dcp.async_save(content, checkpoint_id=path)
    take(iterator, 1)
    saving.result()
    return given


def load_dcp(rank, ranks, urls, batches, path):
    """Load, take batches, and save them where another number of ranks may go on."""
    import torch.distributed.checkpoint as dcp

    loader, weight = make_loader(urls, None, None), torch.zeros(3)
    take(iter(loader), 1 + rank)  # where a loader stands before does not matter
    dcp.load({"weight": weight, "data": checkpoint.DCPState(loader)}, checkpoint_id=path)
    assert weight.tolist() == [1.0] * 3
    given = take(iter(loader), batches)
    dcp.save({"weight": weight, "data": checkpoint.DCPState(loader)}, checkpoint_id=path.with_name(f"on-{ranks}"))
    return given


@pytest.mark.slow
def test_dcp(shards, tmp_path):
    """async_save on 4 ranks, then load on 4, 2 and 3: each sample once, in order where the ranks
    stay. And a second load, of what another number of ranks has saved.
    """
    first = on_ranks(4, save_dcp, shards, 1, tmp_path / "first")
    head = [key for keys in first for key in keys]
    rests = {
        ranks: on_ranks(ranks, load_dcp, shards, 1 if ranks == 2 else None, tmp_path / "first") for ranks in (4, 2)
    }
    rests[3] = on_ranks(3, load_dcp, shards, None, tmp_path / "on-2")
    for rank in range(4):
        assert first[rank] + rests[4][rank] == take(make_loader(shards, rank, 4))
    for given in (rests[4], rests[2] + rests[3]):
        assert sorted(head + [key for keys in given for key in keys]) == KEYS


STATEFUL = {
    "loader": lambda loader, pipe: loader,
    "merged": lambda loader, pipe: checkpoint.AllRanks(loader),
    "pipe": lambda loader, pipe: pipe,
    "dataset": lambda loader, pipe: pipe.as_dataset(),
    "StatefulDataLoader": lambda loader, pipe: StatefulDataLoader(pipe.as_dataset(), batch_size=None),
}


@pytest.mark.parametrize("kind", STATEFUL)
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_refuses_a_state_that_it_could_not_load(kind, shards, tmp_path):
    """All of these have state_dict() and load_state_dict(), which is all that torch looks for."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.stateful import Stateful

    held = STATEFUL[kind](make_loader(shards), wp.ShardList(shards).open_shards().load_tar().group_by_key())
    next(iter(held._loader if kind == "merged" else held))
    assert isinstance(held, Stateful)
    for save in (dcp.save, lambda *args, **options: dcp.async_save(*args, **options).result()):
        with pytest.raises(BaseException, match=r"duplicated flatten key .*\.use DCPState\."):
            save({"data": held}, checkpoint_id=tmp_path / "refused")


def test_only_loaders_are_saved_for_all_ranks(shards):
    for kind in (checkpoint.DCPState, checkpoint.AllRanks):
        with pytest.raises(TypeError, match=rf"{kind.__name__}\(\) takes a PipeLoader, not ShardList"):
            kind(wp.ShardList(shards))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_in_one_process(shards, tmp_path):
    """Without a process group; and async, where the state is the one of the moment."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.stateful import Stateful

    loader = make_loader(shards)
    batches = iter(loader)
    given = take(batches, 3)
    assert isinstance(checkpoint.DCPState(loader), Stateful)
    dcp.save({"data": checkpoint.DCPState(loader)}, checkpoint_id=tmp_path / "one")
    take(batches, 3)
    again = make_loader(shards)
    dcp.load({"data": checkpoint.DCPState(again)}, checkpoint_id=tmp_path / "one")
    assert given + take(again) == take(make_loader(shards))


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"ranks": 3},
        {"ranks": "{"},
        {"ranks": '{"dp_rank_1": {}}'},
        {"ranks": "[1]"},
        {"ranks": "{}"},
        {"ranks": '{"dp_rank_0": 1}'},
    ],
)
def test_a_foreign_dcp_state_is_refused(shards, content):
    with pytest.raises(
        wp.StateError, match=r"not what DCPState.state_dict\(\) gave|cannot load the distributed checkpoint"
    ):
        checkpoint.DCPState(make_loader(shards)).load_state_dict(content)
