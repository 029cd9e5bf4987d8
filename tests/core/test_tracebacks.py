"""Errors show the caller's lines and one frame of the package; causes, notes and attributes
stay.
"""

import json
import pickle
import re
import traceback

import pytest
from torch.utils.data import DataLoader

import wds_pipes as wp
from wds_pipes.testing import make_shards

pytestmark = pytest.mark.usefixtures("impatient")  # errors keep iterators of DataLoader for a while

SHARD = "shard-000000.tar"


def samples(urls=SHARD):
    return wp.ShardList(urls).open_shards().load_tar().group_by_key()


@pytest.fixture(autouse=True)
def shards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_shards(".", shards=1, samples=6, fields=("txt", "cls"))


def broken(sample):
    return json.loads(sample["txt"])


def read(data):
    return int(data) // 0


def error_of(items):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - the tests look at it
        for _ in items:
            pass
    return caught.value


def shown(error):
    return "".join(traceback.format_exception(error))


def frames(text):
    """The functions of the frames that a text shows, with their packages before those of this
    one.
    """
    found = re.findall(r'File "([^"]+)", line \d+, in (\w+)', text)
    return [f"wds_pipes.{name}" if "/wds_pipes/" in path else name for path, name in found]


JSON = ["broken", "loads", "decode", "raw_decode"]  # all frames from the caller's function on are shown


@pytest.mark.parametrize("workers", [None, 0, 1])
def test_an_error_of_a_function_shows_the_line_and_one_frame_of_ours(workers):
    pipe = samples().map_samples(broken)
    source = pipe if workers is None else wp.PipeLoader(pipe, num_workers=workers)
    items = iter(source)
    error = error_of(items)
    assert type(error) is json.JSONDecodeError
    text = shown(error)
    assert frames(text) == ["error_of", "wds_pipes.__next__", *JSON]
    assert 'return json.loads(sample["txt"])' in text
    assert text.endswith(f"raised by the function of map_samples() on sample '00000000' of shard {SHARD}\n")
    assert ("In the worker:" in text) == (workers == 1)
    for _ in range(2):
        assert error_of(items) is error
        assert frames(shown(error)) == ["error_of", "wds_pipes.__next__", *JSON]


def test_an_error_in_a_worker_of_dataloader_shows_the_line_and_one_frame_of_ours():
    text = str(
        error_of(DataLoader(samples().decode_by_ext({"cls": read}).as_dataset(), batch_size=None, num_workers=1))
    )
    assert [name for name in frames(text) if name.startswith("wds_pipes.")] == ["wds_pipes.__next__"]
    assert "return int(data) // 0" in text


@pytest.mark.parametrize("workers", [0, 1])
def test_the_cause_of_an_error_shows_the_line(workers):
    error = error_of(wp.PipeLoader(samples().decode_by_ext({"cls": read}), num_workers=workers))
    assert (type(error), error.field) == (wp.DecodeError, "cls")
    assert isinstance(error.__cause__, ZeroDivisionError) == (workers == 0)
    assert sorted(frames(shown(error))) == ["error_of", "read", "wds_pipes.__next__"]
    assert "return int(data) // 0" in shown(error)
    assert "ZeroDivisionError: integer division or modulo by zero" in shown(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.field) == (wp.DecodeError, str(error), "cls")


def test_an_error_without_code_of_the_caller_has_few_frames():
    missing = error_of(samples(["gone.tar"]))
    assert isinstance(missing.__cause__, FileNotFoundError)
    assert frames(shown(missing)) == ["wds_pipes._open_local", "error_of", "wds_pipes.__next__"]
    wrong = error_of(wp.PipeLoader(samples().to_tuple("txt").decode_by_ext(), num_workers=1))
    assert str(wrong).startswith("decode_by_ext() takes samples as dicts")
    assert len(frames(shown(wrong))) <= 4
    with pytest.raises(ValueError, match="no shard matches") as caught:
        samples("gone-*.tar")
    assert len(frames(shown(caught.value))) <= 5


def test_all_frames_are_shown_on_request(monkeypatch):
    monkeypatch.setenv("WDS_PIPES_FULL_TRACEBACK", "1")
    for workers in (0, 1):
        loader = wp.PipeLoader(
            samples().map_samples(broken), num_workers=workers, multiprocessing_context="fork" if workers else None
        )  # a server of forks may have started with another environment
        names = frames(shown(error_of(loader)))
        assert names[-5:] == ["wds_pipes.attempt", *JSON]
        assert len(names) > 8


@pytest.mark.filterwarnings("ignore:Got pickle error")  # torch's, which does not say which function
def test_a_pipe_that_cannot_be_sent_to_workers_says_what_to_do():
    error = error_of(
        wp.PipeLoader(samples().map_samples(lambda sample: sample), num_workers=1, multiprocessing_context="spawn")
    )
    assert "pickle" in str(error) or "local object" in str(error)  # from Python 3.13 on
    assert "Write the functions of its steps with def, at the top of a module" in error.__notes__[-1]
