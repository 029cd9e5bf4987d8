"""What goes wrong with the copies of ``shuffle`` and ``sort`` in two passes."""

import contextlib
import errno
import os
import random
import shutil
import threading

import pytest
from commands import outputs, run_command
from tars import put, tar

from wds_pipes.cli.reshaping import gathering, plan


@pytest.fixture
def source(tmp_path):
    numbers = random.Random(5)
    for shard in range(3):
        pairs = [(f"{shard}{number:03d}.bin", numbers.randbytes(700)) for number in range(60)]
        put(tmp_path / f"in-{shard}.tar", tar(pairs))
    return str(tmp_path / "in-*.tar")


@pytest.fixture
def whole(source, tmp_path):
    """What one pass writes."""
    run_command("shuffle", source, tmp_path / "whole", "--max-samples", 50)
    return outputs(tmp_path / "whole")


def shuffle(source, place, *options, code=0):
    return run_command(
        *["shuffle", source, place, "--max-samples", 50, "--memory", "100kB", "--passes", 2, *options], code=code
    )


def copies(place):
    return sorted(place.glob(".wds-pipes/gathered/*/0*"))


def test_a_full_disk_ends_the_first_pass_and_says_what_to_do(source, whole, tmp_path, monkeypatch):
    place, opened, open_output = tmp_path / "out", [], gathering.open_output

    def until_full(*arguments, **options):
        opened.append(arguments)
        output = open_output(*arguments, **options)
        if len(opened) == 4:

            def write(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), arguments[0])

            monkeypatch.setattr(output, "write", write)
        return output

    with monkeypatch.context() as context:
        context.setattr(gathering, "open_output", until_full)
        told = shuffle(source, place, code=1).stderr
    assert "No space left on device; two passes need as much space again: make room, or pass --passes 1" in told
    assert len(copies(place)) == 3
    assert not outputs(place)
    shutil.copytree(place, tmp_path / "again")
    shuffle(source, place)  # goes on
    assert outputs(place) == whole
    assert not copies(place)

    there, write_shard = [], plan.write_shard

    def write(*arguments, **options):
        there.append(copies(tmp_path / "again"))
        return write_shard(*arguments, **options)

    monkeypatch.setattr(plan, "write_shard", write)
    shuffle(source, tmp_path / "again", "--passes", 1)
    assert there == [[]] * 4  # the copies were removed before the outputs were written
    assert outputs(tmp_path / "again") == whole


@pytest.mark.parametrize("how", ["changed", "cut", "removed"])
def test_copies_that_are_damaged_are_refused_and_made_again(source, whole, tmp_path, how):
    place = tmp_path / "out"
    shuffle(source, place, "--task", 0, "--tasks", 4)
    victim = copies(place)[1]
    if how == "removed":
        victim.unlink()
    elif how == "cut":
        os.truncate(victim, 512)
    else:
        victim.write_bytes(b"\1" * victim.stat().st_size)
        told = shuffle(source, place, code=1).stderr
        assert f"{victim} is damaged" in told
        assert "Remove it, and run the command again" in told
        victim.unlink()
    shuffle(source, place)
    assert outputs(place) == whole
    assert not (place / ".wds-pipes/gathered").exists()


def test_copies_that_are_lost_while_tasks_run(source, whole, tmp_path, monkeypatch):
    """The command says so, and the next one makes them again."""
    place, first_pass = tmp_path / "out", gathering.first_pass

    def lost(*arguments):
        first_pass(*arguments)
        shutil.rmtree(place / ".wds-pipes/gathered")

    with monkeypatch.context() as context:
        context.setattr(gathering, "first_pass", lost)
        told = shuffle(source, place, code=1).stderr
    assert "does not exist" in told
    shuffle(source, place)
    assert outputs(place) == whole


def test_the_copies_are_removed_while_another_run_writes_there(source, whole, tmp_path):
    place, folder, stop = tmp_path / "out", tmp_path / "out/.wds-pipes/gathered", threading.Event()

    def write():
        while not stop.is_set():
            # it is removed at any moment, also within mkdir, which then raises FileExistsError
            with contextlib.suppress(FileNotFoundError, FileExistsError):
                folder.mkdir(parents=True, exist_ok=True)
                for number in range(50):
                    (folder / f"{number}").write_bytes(b"")

    other = threading.Thread(target=write)
    other.start()
    try:
        shuffle(source, place)
    finally:
        stop.set()
        other.join()
    assert outputs(place) == whole
    shuffle(source, place)
    assert not folder.exists()


def test_errors_of_a_first_pass_are_counted(source, tmp_path):
    for shard in range(3):
        os.truncate(tmp_path / f"in-{shard}.tar", 5000)
    told = run_command("shuffle", source, tmp_path / "out", code=1).stderr
    assert "in-0.tar" in told
    assert "(and 2 more)" in " ".join(told.split())
