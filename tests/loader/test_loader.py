"""PipeLoader: exact batches from worker processes, whatever starts, ends or kills them."""

import contextlib
import copy
import faulthandler
import gc
import itertools
import json
import mmap
import os
import pickle
import re
import signal
import sys
import threading
import time
import traceback
import weakref
from functools import cache, partial
from pathlib import Path

import psutil
import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key
from killing import kill
from pipelines import after, draw, flat, key_of, keys_of, loaded, samples, shuffled, through_json, wanted
from scripts import run_file
from torch.utils.data._utils import worker as torch_worker
from waiting import calls, wait_for
from warm import Program

import wds_pipes as wp
from wds_pipes.loader import workers
from wds_pipes.testing import check_resume, make_shards


def loader(urls, **options):
    """Batches of two keys."""
    return wp.PipeLoader(shuffled(urls), **{"batch_size": 2, "collate": keys_of, "epoch_end": "exact", **options})


EVERY = [f"{number:08d}" for number in range(14)]  # the keys of the fixture ``urls``

# Resume is exact

PIPES = {
    "samples": lambda urls: (samples(urls), {}),
    "shuffle": lambda urls: (shuffled(urls), {}),
    "batch": lambda urls: (
        shuffled(urls).filter_samples(wanted).map_samples(draw),
        {"batch_size": 3, "collate": "list"},
    ),
    "drop_last": lambda urls: (shuffled(urls), {"batch_size": 3, "collate": "list", "drop_last": True}),
    "tensors": lambda urls: (shuffled(urls).decode_by_ext().to_tuple("txt", "cls"), {"batch_size": 4}),
    "batch in the pipe": lambda urls: (shuffled(urls).batch_samples(2, collate="list").map_samples(keys_of), {}),
    "batches shuffled": lambda urls: (shuffled(urls).batch_samples(2, collate="list").shuffle_buffer(2), {}),
    "batches of batches": lambda urls: (
        shuffled(urls).batch_samples(2, collate="list"),
        {"batch_size": 2, "collate": "list"},
    ),
    "torch's map and batch": lambda urls: (shuffled(urls).map(key_of).batch(2), {}),
    "torch's filter and map": lambda urls: (
        shuffled(urls).filter(wanted).map(key_of).shuffle_buffer(2),
        {"batch_size": 2, "collate": "list"},
    ),
}


@pytest.mark.filterwarnings("ignore:the pipe gives batches of 2 already:UserWarning")
@pytest.mark.parametrize(("pipe", "lanes"), list(zip(PIPES, itertools.cycle([3, 1, 7]))))
def test_every_pair_of_cuts(pipe, lanes, urls):
    def make():
        chain, options = PIPES[pipe](urls)
        return wp.PipeLoader(chain, lanes=lanes, **options)

    check_resume(make)


def test_cuts_with_workers_up_to_a_third_resume(tmp_path):
    """In a shuffle, with half-filled batches in the workers, before and after the last batch. Each
    resumed run is cut again, and that one too.
    """
    urls = make_shards(tmp_path, shards=5, samples=[6, 0, 9, 5, 8])
    make = lambda: wp.PipeLoader(  # noqa: E731
        shuffled(urls).filter_samples(wanted), batch_size=3, collate=keys_of, num_workers=2, lanes=3
    )
    reference = make()
    epoch, following = list(reference), list(reference)
    for first in (3, len(epoch) - 1, len(epoch)):
        source, batches = make(), []
        for cut in (first, 2, 1, None):
            batches += itertools.islice(source, cut)
            source = loaded(make(), through_json(source.state_dict()))
        assert batches == (epoch if first < len(epoch) - 1 else epoch + following)[: len(batches)]
        assert len(batches) >= len(epoch)


# Epochs and iterators


def test_iter_is_lazy(urls):
    """An iterator that is never used takes no epoch, starts no worker, and leaves a loaded state
    to the next.
    """
    source = loader(urls, num_workers=2, lanes=2)
    before = len(psutil.Process().children())
    assert len([iter(source) for _ in range(3)]) == 3
    assert len(psutil.Process().children()) == before
    whole, half = list(source), loader(urls, lanes=2)
    after(half, 3)
    iter(source)
    source.load_state_dict(half.state_dict())
    iter(source)
    assert list(source) == whole[3:]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (lambda source: after(source, 1), "a newer one was started"),
        (lambda source: source.load_state_dict(source.state_dict()), "a state was loaded"),
        (lambda source: source.set_epoch(5), r"set_epoch\(\) was called: continue with a new iter\(\)"),
        (lambda source: source.close(), "it was closed"),
    ],
)
def test_what_ends_an_iterator(what, said, urls):
    source = loader(urls)
    items = after(source, 1)
    what(source)
    with pytest.raises(wp.StateError, match=said):
        next(items)


def test_an_ended_iterator_stays_ended(urls):
    source = loader(urls)
    items = iter(source)
    list(items)
    after(source, 2)
    state = source.state_dict()
    assert list(items) == []
    assert source.state_dict() == state


def test_set_epoch_chooses_the_next_and_leaves_a_loaded_one_alone(urls):
    source = loader(urls)
    epochs = [list(source) for _ in range(3)]
    source.set_epoch(1)
    assert source.state_dict()["epoch"] == 1
    assert [list(source), list(source)] == epochs[1:]
    source.set_epoch(1)
    after(source, 3)
    for epoch, expected in ((1, epochs[1][3:]), (2, epochs[2])):  # the first one is that of the state
        resumed = loaded(loader(urls), source.state_dict())
        resumed.set_epoch(epoch)
        assert list(resumed) == expected
    with pytest.raises(ValueError, match="epoch must be at least 0"):
        resumed.set_epoch(-1)


def train(source, saved, epochs, how):
    """The usual loops; returns the batches of each epoch, and the states after each of them."""
    given = {epoch: [] for epoch in range(epochs)}
    states = []
    if saved is not None:
        source.load_state_dict(saved)
    for epoch in range(source.epoch if saved is None or how == "epoch" else how, epochs):
        if how != "epoch":
            source.set_epoch(epoch)
        for batch in source:
            given[epoch].append(batch)
            states.append((epoch, len(given[epoch]), source.state_dict()))
    assert source.epoch == epochs
    return given, states


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("how", ["epoch", "set_epoch"])
def test_the_usual_loops_go_on_at_every_batch(how, ranks, urls):
    """Over ``range(loader.epoch, epochs)``; and with set_epoch() from the epoch that the caller
    saved, also after the last batch of this epoch.
    """
    options = {"rank": ranks - 1, "world_size": ranks, "epoch_end": "exact"}
    whole, states = train(loader(urls, **options), None, 3, "epoch")
    for epoch, count, state in states:
        rest, _ = train(loader(urls, **options), state, 3, epoch if how == "set_epoch" else how)
        assert rest[epoch] == whole[epoch][count:]
        assert [rest[later] for later in range(epoch + 1, 3)] == [whole[later] for later in range(epoch + 1, 3)]


def test_the_rest_of_an_epoch_that_is_over_is_empty(urls, caplog):
    """Also on other lanes; the log says so."""
    source = loader(urls)
    list(source)
    state = source.state_dict()
    again = loaded(loader(urls, lanes=3), state)
    assert again.epoch == state["epoch"] == 1
    again.set_epoch(0)
    assert "the loaded state was taken at the end of epoch 0, so nothing is left of this epoch" in caplog.text
    assert (again.remaining(), list(again)) == (0, [])
    assert sorted(flat(again)) == sorted(flat(source))


def test_a_loader_that_is_gone_leaves_nothing(urls):
    source = loader(urls)
    list(source)
    stage = weakref.ref(source._plan.source)
    source.close()
    del source
    gc.collect()
    assert stage() is None


def note_start(path, worker):
    with open(path, "a") as file:
        file.write(f"{worker}\n")


def test_workers_that_are_not_forked(urls, monkeypatch, tmp_path, capfd):
    """Epochs differ and depend only on (seed, epoch), also where workers cannot find out a rank. A
    resume is exact. ``worker_init_fn`` is called where each starts. They end in silence, also in
    the middle of an epoch, with shards open.
    """
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    plain = loader(urls, lanes=2)
    epochs = [list(plain) for _ in range(2)]
    assert epochs[0] != epochs[1]
    half = loader(urls, lanes=2)
    after(half, 3)
    source = loader(
        urls,
        lanes=2,
        num_workers=1,
        multiprocessing_context="spawn",
        worker_init_fn=partial(note_start, tmp_path / "starts"),
        prefetch_factor=None,
    )
    source.load_state_dict(half.state_dict())
    assert list(source) == epochs[0][3:]
    after(source, 1)
    source.close()
    assert (tmp_path / "starts").read_text() == "0\n"
    assert capfd.readouterr() == ("", "")


def which_worker(sample):
    info = torch.utils.data.get_worker_info()
    return info.id, info.num_workers


@pytest.mark.parametrize("persistent", [True, False])
def test_steps_know_their_worker_and_persistent_workers_stay(persistent, urls, tmp_path):
    """As in DataLoader. ``worker_init_fn`` is called where each starts."""
    before, pipe = psutil.Process().children(recursive=True), samples(urls).map_samples(which_worker)
    options = {"multiprocessing_context": "fork", "worker_init_fn": partial(note_start, tmp_path / "starts")}
    source = wp.PipeLoader(pipe, num_workers=2, persistent_workers=persistent, **options)
    assert set(source) == {(0, 2), (1, 2)}
    first = worker_processes(before)
    list(source)
    assert (worker_processes(before) == first != []) == persistent
    assert sorted((tmp_path / "starts").read_text().split()) == sorted("01" * (1 if persistent else 2))


def test_worker_init_fn_that_fails_or_is_no_function(urls):
    """Without workers it is not called, as in DataLoader."""
    source = loader(urls, num_workers=1, worker_init_fn=partial(note_start, "/no/such/folder"))
    with pytest.raises(FileNotFoundError, match="/no/such/folder"):
        next(iter(source))
    assert next(iter(loader(urls, worker_init_fn=partial(note_start, "/no/such/folder"))))
    with pytest.raises(TypeError, match="worker_init_fn must be a function .*, not 3"):
        loader(urls, worker_init_fn=3)
    source = loader(urls, num_workers=1, worker_init_fn=lambda number: next(iter(())), multiprocessing_context="fork")
    with pytest.raises(RuntimeError, match="worker_init_fn raised StopIteration"):  # not an epoch without batches
        list(source)


def test_a_worker_that_does_not_begin_in_time(urls):
    """Also where what it is told is more than a connection holds."""
    options = {"worker_init_fn": lambda number: time.sleep(3600), "multiprocessing_context": "fork"}
    source = loader(urls, lanes=20_000, num_workers=1, timeout_seconds=1, **options)
    with pytest.raises(wp.WorkerError, match="timed out after 1 seconds"):
        next(iter(source))


class UnpicklableError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("the reason", torch.ones(2, requires_grad=True) * 2), "ValueError in a worker:(.|\n)*the reason"),
        (UnpicklableError("this", "that"), "UnpicklableError in a worker:(.|\n)*in fails(.|\n)*this and that"),
    ],
)
def test_an_error_that_cannot_be_sent_arrives_as_text(error, said, urls):
    def fails(sample):
        raise error

    source = wp.PipeLoader(samples(urls).map_samples(fails), num_workers=1, multiprocessing_context="fork")
    _, came, items = until_error(source)
    for raised in (came, until_error(items)[1]):
        assert re.match(said, str(raised))


# Batches


def test_one_lane_has_the_order_of_the_pipe(urls):
    assert list(wp.PipeLoader(shuffled(urls).map_samples(key_of))) == list(shuffled(urls).map_samples(key_of))


def test_the_global_generator_of_torch_is_untouched(urls):
    before = torch.get_rng_state()
    source = loader(urls, num_workers=2)
    list(source)
    after(source, 1)
    source.close()
    assert torch.equal(torch.get_rng_state(), before)


# States


@pytest.mark.parametrize("lanes", [3, 2])
def test_a_state_shares_nothing_with_its_loader(lanes, urls):
    """Neither one that was taken nor one that was loaded, also on other lanes."""
    source = loader(urls, lanes=3)
    items = after(source, 4)
    state = source.state_dict()
    kept = copy.deepcopy(state)
    next(items)
    assert state == kept
    resumed, expected = loaded(loader(urls, lanes=lanes), state), loaded(loader(urls, lanes=lanes), kept)
    ruin(state)
    ruin(resumed.state_dict())
    assert resumed.state_dict() == expected.state_dict()
    assert list(resumed) == list(expected)


def ruin(value):
    """Empty each container of a state."""
    for part in value.values() if isinstance(value, dict) else value:
        if isinstance(part, (dict, list)):
            ruin(part)
    value.clear()


def check_states(states, epochs, make):
    """Each of some states of the first epochs continues where one batch ends."""
    distinct = list({json.dumps(state): state for state in states}.values())
    assert distinct
    for state in distinct[:: max(1, len(distinct) // 20)]:
        resumed = loaded(make(), state)
        assert list(resumed) == epochs[state["epoch"]][state["step"] :]
    return len(distinct)


def test_state_in_a_signal_handler(urls):
    """At any moment, in the middle of our own code too."""
    states = []
    source = loader(urls, num_workers=2, lanes=2)
    before = signal.signal(signal.SIGALRM, lambda *_: states.append(source.state_dict()))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        epochs = [list(source) for _ in range(30)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    source.close()
    whole = loader(urls, lanes=2)
    assert epochs == [list(whole) for _ in range(30)]
    assert check_states([state for state in states if state["epoch"] < 30], epochs, lambda: loader(urls, lanes=2)) > 5


@pytest.fixture(scope="module")
def many_urls(tmp_path_factory):
    """10 000 shards with 4 samples each, and long names."""
    directory = tmp_path_factory.mktemp("many")
    [real] = make_shards(directory / "real", shards=1, samples=4)
    folder = directory / ("a-long-name-of-a-directory-" * 3)
    folder.mkdir()
    for number in range(10_000):
        (folder / f"train-{number:06d}.tar").symlink_to(real)
    return f"{folder}/train-{{000000..009999}}.tar"


@pytest.mark.slow
def test_state_is_small_and_quick_with_64_lanes(many_urls):
    """At most 4 KB a lane over 10 000 shards with a shuffle of 10 000, also after a repartition.
    Taking it takes almost no time.
    """
    make = lambda lanes: wp.PipeLoader(  # noqa: E731
        samples(many_urls).shuffle_buffer(10_000), batch_size=16, collate=keys_of, lanes=lanes
    )
    source = make(64)
    for number, _ in enumerate(source):
        if number % 50 == 0:
            state = source.state_dict()
            assert calls(source.state_dict) < 2_000
            assert len(json.dumps(state)) <= 64 * 4096
            assert max(len(json.dumps(lane)) for lane in state["lanes"].values()) <= 4096
        if number == 1000:
            middle = state
    # each of the 64 lanes that the first repartition left half read takes 45 bytes in all later
    # states of the epoch
    for lanes in (48, 7, 1):
        source = loaded(make(lanes), middle)
        after(source, 100)
        middle = source.state_dict()
        assert middle["lane_count"] == lanes
        assert len(json.dumps(middle)) <= lanes * 750 + 64 * 50


# Errors


def fragile(sample):
    if sample["__key__"] == "00000006":
        raise KeyError("no such thing")
    return sample


def until_error(source):
    """The batches before an error, the error, and the iterator."""
    items, batches = iter(source), []
    while True:
        try:
            batches.append(next(items))
        except StopIteration:
            raise AssertionError("there was no error") from None
        except Exception as error:
            return batches, error, items


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_function_is_raised_again_and_the_state_is_before_it(workers, urls):
    make = lambda function: wp.PipeLoader(  # noqa: E731
        shuffled(urls).map_samples(function), batch_size=2, collate=keys_of, num_workers=workers, lanes=2
    )
    source = make(fragile)
    batches, error, items = until_error(source)
    assert (type(error), until_error(items)[1]) == (KeyError, error)
    notes = "\n".join(error.__notes__)
    assert "00000006" in notes
    # the traceback of the worker
    assert ("In the worker" in notes, "in fragile" in notes) == (workers > 0, workers > 0)
    state = through_json(source.state_dict())
    source.close()
    assert source.state_dict() == state
    assert batches + list(loaded(make(dict), state)) == list(loader(urls, lanes=2))


def test_an_error_that_is_raised_again_does_not_grow(urls):
    _, error, items = until_error(wp.PipeLoader(samples(urls).map_samples(fragile)))
    lengths = []
    for _ in range(50):
        with pytest.raises(KeyError):
            next(items)
        lengths.append(len(traceback.extract_tb(error.__traceback__)))
    assert len(set(lengths)) == 1


@pytest.mark.filterwarnings("ignore:Got pickle error")  # torch's, which does not say which function
def test_a_pipe_that_cannot_be_sent_to_workers_says_what_to_do(urls):
    source = wp.PipeLoader(
        samples(urls).map_samples(lambda sample: sample), num_workers=1, multiprocessing_context="spawn"
    )
    _, error, _ = until_error(source)
    assert "Write the functions of its steps with def, at the top of a module" in error.__notes__[-1]


def with_function(sample):
    return {**sample, "function": lambda: None} if sample["__key__"].endswith("6") else sample


def test_a_batch_that_cannot_be_pickled_is_an_error(urls):
    source = wp.PipeLoader(
        samples(urls, shuffle=False).map_samples(with_function), num_workers=1, multiprocessing_context="fork"
    )
    given, error, items = until_error(source)
    assert type(error) is wp.WorkerError
    assert "cannot be sent" in str(error)
    assert "lambda" in str(error)
    assert keys_of(given) == EVERY[:6]
    with pytest.raises(wp.WorkerError, match="cannot be sent"):
        next(items)
    rest = loaded(wp.PipeLoader(samples(urls, shuffle=False).map_samples(dict)), source.state_dict())
    source.close()
    assert keys_of(rest) == EVERY[6:]


def test_a_bad_shard_arrives_with_url_and_offset_and_a_bad_sample_with_its_key(tmp_path):
    urls = make_shards(
        tmp_path, shards=2, samples=4, fields={"cls": lambda rng, number: b"none" if number == 5 else b"1"}
    )
    batches, error, _ = until_error(wp.PipeLoader(samples(urls, shuffle=False).decode_by_ext(), num_workers=1))
    assert len(batches) == 5
    assert (type(error), error.url, error.key, error.field) == (wp.DecodeError, urls[1], "00000005", "cls")
    data = Path(urls[1]).read_bytes()
    Path(urls[1]).write_bytes(data[:1024] + b"\xff" * 512 + data[1536:])
    error = until_error(wp.PipeLoader(samples(urls, shuffle=False), num_workers=1))[1]
    assert isinstance(error, wp.ShardError)
    assert (error.url, error.offset) == (urls[1], 1024)


def worker_processes(before):
    return [
        child
        for child in psutil.Process().children(recursive=True)
        if child not in before and "resource_tracker" not in " ".join(child.cmdline())
    ]


def test_a_killed_worker_is_an_error_that_names_it_and_the_state_is_good(tmp_path):
    """A new iterator begins with new workers."""
    urls = make_shards(tmp_path, shards=4, samples=20)
    before = psutil.Process().children(recursive=True)
    source = loader(urls, num_workers=2, multiprocessing_context="fork")
    items = iter(source)
    batches = [next(items) for _ in range(3)]
    victim = worker_processes(before)[0]
    victim.kill()
    with contextlib.suppress(wp.WorkerError):
        batches.extend(items)
    with pytest.raises(wp.WorkerError, match=rf"(?s){victim.pid}.*call load_state_dict\(state_dict\(\)\), then iter"):
        next(items)
    whole = loader(urls, lanes=2)
    rest = list(loaded(loader(urls, num_workers=1), through_json(source.state_dict())))
    assert rest
    assert batches + rest == list(whole)
    after(source, 1)
    kill(*worker_processes(before))
    assert list(source) == [list(whole), list(whole)][1]


def odd(sample):
    if int(sample["__key__"]) % 2:
        raise ValueError("odd")
    return sample


@pytest.mark.parametrize(("workers", "interleaved"), [(0, True), (2, False)])
def test_max_errors_is_for_all_lanes_of_a_rank(workers, interleaved, tmp_path):
    """24 errors in 4 lanes, 6 in each: the limit is reached at the same batch whatever the workers,
    and again after a resume and on other lanes.
    """
    urls = make_shards(tmp_path, shards=8, samples=6)

    def make(limit, lanes=4):
        chain = wp.ShardList(urls).open_shards().load_tar().group_by_key(on_error="skip")
        chain = chain.interleave_shards(2) if interleaved else chain
        chain = chain.map_samples(odd, on_error="skip", max_errors=limit)
        return wp.PipeLoader(chain, batch_size=2, collate=keys_of, num_workers=workers, lanes=lanes)

    assert len(flat(make(24))) == 24
    assert isinstance(until_error(make(23))[1], wp.SampleError)
    source = make(6)
    batches, error, _ = until_error(source)
    assert re.search("skipped 8 errors in this epoch, in all lanes of this rank together, and max_errors=6", str(error))
    assert len(batches) == (7 if interleaved else 5)
    assert set(source.state_dict()["counts"]) == {"delivered", "skipped"}  # without zeros
    for lanes, most in ((4, 0), (3, 2), (1, 2)):
        source = loaded(make(6, lanes), through_json(source.state_dict()))
        rest, error, _ = until_error(source)
        assert (type(error), len(rest) <= most) == (wp.SampleError, True)


@pytest.mark.parametrize("limit", [3, 4])
def test_max_errors_before_interleaved_shards(limit, tmp_path):
    """A step has a copy for each shard, and their errors are counted together. Each step has its
    own count.
    """
    urls = make_shards(tmp_path, shards=4, samples=2)
    chain = (
        wp.ShardList(urls)
        .open_shards()
        .load_tar()
        .group_by_key()
        .map_samples(odd, on_error="skip", max_errors=limit)
        .interleave_shards(2)
    )
    source = wp.PipeLoader(chain.map_samples(dict, on_error="skip", max_errors=0), lanes=2)
    if limit == 4:
        assert len(list(source)) == 4
    else:
        assert "max_errors=3" in str(until_error(source)[1])


def test_a_timeout_is_not_reported_as_a_dead_worker(urls, tmp_path):
    pipe = samples(urls).map_samples(partial(held_up, tmp_path, None))
    source = wp.PipeLoader(pipe, num_workers=1, multiprocessing_context="fork", timeout_seconds=0.5)
    with pytest.raises(
        wp.WorkerError, match=r"timed out after 0\.5 seconds, timeout_seconds: no worker died"
    ) as caught:
        next(iter(source))
    assert "memory" not in str(caught.value)


# Interrupts


def held_up(directory, key, sample):
    """Reports that a sample, or any, has come, and waits until ``meanwhile`` lets it continue."""
    if key in (None, sample["__key__"]):
        (directory / "waits").touch()
        wait_for((directory / "go on").exists)
    return sample


def held(urls, directory, key=None, workers=0):
    """A loader of single samples in order, which waits at one of them, or at the first one."""
    pipe = samples(urls, shuffle=False).map_samples(partial(held_up, directory, key))
    return wp.PipeLoader(
        pipe, batch_size=1, collate=keys_of, num_workers=workers, multiprocessing_context="fork" if workers else None
    )


@contextlib.contextmanager
def meanwhile(directory, what):
    """Does something in another thread while a sample waits."""

    def run():
        wait_for((directory / "waits").exists)
        what()
        (directory / "go on").touch()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield
    thread.join(120)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_iterator_is_an_error_and_not_an_end(workers, urls, tmp_path):
    """The error says how to continue. The state is the one before the interrupt, also where nothing
    had been returned.
    """
    source = held(urls, tmp_path, None, workers)
    beginning = source.state_dict()
    interrupt = partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)
    items = iter(source)
    with meanwhile(tmp_path, interrupt), pytest.raises(KeyboardInterrupt):
        next(items)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"was interrupted: to continue, call load_state_dict"):
            next(items)
    assert source.state_dict() == beginning
    source.load_state_dict(source.state_dict())
    assert sorted(flat(source)) == EVERY
    for path in tmp_path.iterdir():
        path.unlink()
    with meanwhile(tmp_path, interrupt), pytest.raises(KeyboardInterrupt):
        next(iter(source))
    next(iter(source))  # a new iterator is the next epoch
    assert source.state_dict()["epoch"] == 2


def key_and_process(sample):
    return sample["__key__"], os.getpid()


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_signals_to_all_processes_are_for_the_main_process(context, urls):
    """A terminal, torchrun or a cluster sends them to all processes. The workers stay, so the main
    process can save and continue.
    """
    pipe = shuffled(urls).map_samples(key_and_process)
    source = wp.PipeLoader(pipe, batch_size=2, collate="list", num_workers=2, multiprocessing_context=context)
    batches = []
    for batch in source:
        for _, worker in batch if len(batches) < 2 else ():  # one batch of each
            os.kill(worker, signal.SIGINT)
            os.kill(worker, signal.SIGTERM)
        batches.append(batch)
    source.close()
    assert len({worker for batch in batches for _, worker in batch}) == 2
    assert [[key for key, _ in batch] for batch in batches] == list(loader(urls, lanes=2))


hanging = mmap.mmap(-1, 1)  # how many of the next forked processes hang, each before its first line of Python


def hang_after_fork():
    if hanging[0]:
        hanging[0] -= 1
        while True:
            time.sleep(60)


@cache
def register_hang():
    os.register_at_fork(after_in_child=hang_after_fork)


@pytest.fixture
def workers_hang(monkeypatch, tmp_path, request):
    """As at a lock that another thread held at the fork. A file "where" gets what the fault handler
    prints.
    """
    register_hang()
    monkeypatch.setattr(workers, "_START_SECONDS", 0.5)
    with (tmp_path / "where").open("w") as file:
        faulthandler.enable(file)
        yield partial(hanging.__setitem__, 0)
        faulthandler.enable(request.config.stash[fault_handler_stderr_fd_key])
    hanging[0] = 0


def test_a_worker_that_hangs_at_the_fork_is_replaced(urls, workers_hang, monkeypatch):
    monkeypatch.setattr(workers, "_STARTS", 20)  # under load a sound one may take longer than here is allowed
    whole, before = list(loader(urls, lanes=2)), psutil.Process().children()
    source = loader(urls, lanes=2, num_workers=2, multiprocessing_context="fork")
    after(source, 2)
    resumed = loaded(loader(urls, lanes=2, num_workers=2, multiprocessing_context="fork"), source.state_dict())
    source.close()
    workers_hang(1)
    assert list(resumed) == whole[2:]
    resumed.close()
    assert (hanging[0], psutil.Process().children()) == (0, before)


class Cycle:
    """Garbage that only a collection frees. It says in which process that was."""

    def __init__(self, path):
        self.path, self.itself = path, self

    def __del__(self):
        self.path.write_text(f"{os.getpid()}")


def collected(sample):
    gc.collect()
    return sample


def test_garbage_of_the_main_process_is_not_freed_in_a_worker(tmp_path, urls):
    """It might wait for threads that a fork does not copy. Garbage of a worker is freed there."""
    source = wp.PipeLoader(samples(urls).map_samples(collected), num_workers=1, multiprocessing_context="fork")
    gc.disable()
    try:
        Cycle(tmp_path / "freed")
        assert len(list(source)) == 14
        assert not (tmp_path / "freed").exists()
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert len(list(source)) == 14
    assert gc.isenabled()
    gc.collect()
    assert (tmp_path / "freed").read_text() == f"{os.getpid()}"


def test_workers_that_always_hang_at_the_fork(urls, workers_hang, tmp_path):
    """They print where they wait, if Python's fault handler is enabled."""
    before = psutil.Process().children()
    source = loader(urls, lanes=2, num_workers=2, multiprocessing_context="fork")
    workers_hang(200)
    with pytest.raises(wp.WorkerError, match=r"\(pid \d+, \d+\) did not run within 1\.5 seconds: .*forkserver"):
        next(iter(source))
    assert psutil.Process().children() == before
    assert "in hang_after_fork" in (tmp_path / "where").read_text()
    workers_hang(0)
    source.load_state_dict(source.state_dict())
    assert list(source) == list(loader(urls, lanes=2))


ENDS = """
import sys, time
import wds_pipes as wp


def slow(sample):
    if sample["__key__"] > "00000001":
        time.sleep(600)
    return sample


def main():
    pipe = wp.ShardList(sys.argv[1]).open_shards().load_tar().group_by_key().map_samples(slow)
    loader = wp.PipeLoader(pipe, num_workers=1, multiprocessing_context=sys.argv[2])
    print(next(iter(loader))["__key__"])
    return loader


if __name__ == "__main__" or sys.argv[3:] == ["unguarded"]:
    kept = main()
"""


def test_a_script_ends_while_its_worker_is_busy(urls, tmp_path):
    """And prints nothing about the worker."""
    run = run_file(tmp_path / "script.py", ENDS, urls[0], "fork", has_torch=True)
    assert (run.returncode, run.stdout, run.stderr) == (0, "00000000\n", "")


def test_a_script_without_a_main_guard(urls, tmp_path):
    """The worker imports it, and says what is missing; so does the error."""
    run = run_file(tmp_path / "script.py", ENDS, urls[0], "forkserver", "unguarded", has_torch=True)
    said = (
        "A worker imports the main script when it starts, and this script then starts workers "
        "again: put what it runs into a function main(), and call that "
        'below if __name__ == "__main__":'
    )
    assert run.returncode == 1
    assert run.stderr.startswith(f"wds_pipes: {said}\nTraceback")
    assert run.stderr.count("Traceback") < 5
    last = run.stderr.splitlines()[-1]
    assert last.startswith("wds_pipes.errors.WorkerError: worker process ")
    assert f"{said}. To continue" in last


@pytest.mark.parametrize(
    ("ended", "why"),
    [
        (lambda sample: os.kill(os.getpid(), signal.SIGKILL), "killed it because memory ran out"),
        (lambda sample: os.kill(os.getpid(), signal.SIGSEGV), "A native library crashed"),
        (lambda sample: os.kill(os.getpid(), signal.SIGBUS), "Shared memory may be full"),
        (lambda sample: os._exit(3), "The worker's own output says why"),
    ],
)
def test_why_a_worker_has_ended(ended, why, urls):
    pipe = shuffled(urls).map_samples(ended)
    source = wp.PipeLoader(pipe, num_workers=1, multiprocessing_context="fork")
    with pytest.raises(wp.WorkerError, match=why):
        next(iter(source))


@pytest.mark.parametrize("persistent", [True, False])
def test_nothing_is_left(persistent, urls):
    """No process and no file descriptor, after a whole epoch, a break, an abandoned iterator, an
    error and close().
    """
    make = lambda function=dict: wp.PipeLoader(  # noqa: E731
        shuffled(urls).map_samples(function), num_workers=2, multiprocessing_context="fork",
        persistent_workers=persistent,
    )  # fmt: skip
    list(make())  # what multiprocessing starts once
    gc.collect()
    processes, files = psutil.Process().children(recursive=True), sorted(os.listdir("/proc/self/fd"))
    for use in (
        list,
        lambda source: after(source, 2),
        lambda source: [list(source), after(source, 1)],
        lambda source: None,
    ):
        source = make()
        use(source)
        source.close()
        source.close()  # again
    source = make()
    items = after(source, 1)
    del items, source  # it was not closed
    assert isinstance(until_error(make(fragile))[1], KeyError)
    gc.collect()
    psutil.wait_procs(worker_processes(processes), timeout=120)
    assert worker_processes(processes) == []
    assert len(os.listdir("/proc/self/fd")) <= len(files)


@pytest.mark.parametrize(
    ("make_copy", "workers", "cut"),
    [(copy.copy, 0, None), (copy.deepcopy, 0, 5), (lambda source: pickle.loads(pickle.dumps(source)), 2, 5)],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_has_the_position_of_its_loader(urls, workers, cut, make_copy):
    """Neither changes the other, whatever was iterated."""

    def make():
        source = loader(urls, num_workers=workers, lanes=2, multiprocessing_context="fork" if workers else None)
        return source if cut is None else source.with_epoch(batches=cut)

    straight, broken, source = make(), make(), make()
    epochs = [list(straight) for _ in range(3)]
    after(broken, 2)
    assert list(make_copy(source)) == epochs[0]
    items = iter(source)
    begun = [next(items), next(items)]
    other = make_copy(source)
    assert other.state_dict() == source.state_dict()
    assert [list(other), list(other)] == [list(broken), list(broken)]
    assert begun + list(items) == epochs[0]
    assert list(make_copy(source)) == list(source) == epochs[1]


def draw_globally(sample):
    return int(torch.randint(1 << 40, ()))


def test_the_global_generators_of_workers_differ_between_ranks_and_after_a_resume(urls):
    """Also where the rest of an epoch is repartitioned."""
    drawn, states = set(), []
    for rank, ranks in ((0, 2), (1, 2), (0, 2), (0, 3)):
        pipe = samples(urls).map_samples(draw_globally)
        source = wp.PipeLoader(pipe, num_workers=2, rank=rank, world_size=ranks, epoch_end="exact")
        if len(states) > 1:
            source.load_state_dict(states[:2])
        drawn.update(itertools.islice(source, 4))
        states.append(source.state_dict())
    assert len(drawn) == 16


LEFT_ALONE = """
import os, sys, time
import torch
import wds_pipes as wp


def main(urls, kind):
    pipe = wp.ShardList(urls.split(",")).open_shards().load_tar().group_by_key()
    if kind.startswith("dataset"):
        data = pipe.map_samples(noted).as_dataset()
        source = torch.utils.data.DataLoader(data, batch_size=None, num_workers=2, multiprocessing_context=kind.removeprefix("dataset "), prefetch_factor=16)
    else:
        source = wp.PipeLoader(pipe.map_samples(noted), num_workers=2, multiprocessing_context=kind, prefetch_factor=16)
    items = iter(source)
    next(items)
    time.sleep(600)


def noted(sample):
    with open(f"{sys.argv[3]}/{os.getpid()}", "a") as file:
        file.write(".")
    return b"x" * (1 << 20)


if __name__ == "__main__":
    main(*sys.argv[1:3])
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fork", "forkserver", "dataset fork"])
def test_workers_end_when_the_main_process_is_killed(kind, tmp_path):
    """SIGKILL leaves it no time to stop them. They are blocked in a full pipe whose other end is
    open in each of them.
    """
    urls = make_shards(tmp_path / "shards", shards=2, samples=60)
    (tmp_path / "workers").mkdir()
    script = tmp_path / "main.py"
    script.write_text(LEFT_ALONE)
    main = Program(script, ",".join(urls), kind, tmp_path / "workers")
    try:
        wait_for(lambda: len(os.listdir(tmp_path / "workers")) == 2)
        workers = [psutil.Process(int(name)) for name in os.listdir(tmp_path / "workers")]
        # samples of 1 MB
        wait_for(lambda: all((tmp_path / "workers" / str(worker.pid)).stat().st_size >= 8 for worker in workers))
    finally:
        main.kill()  # not reaped before they are gone: a zombie is gone for them too
    try:
        _, alive = psutil.wait_procs(workers, timeout=60)
        assert not alive
    finally:
        main.communicate()
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()


# What is refused


@pytest.fixture(scope="module")
def even_urls(tmp_path_factory):
    """Six shards of four samples: some for each of three ranks."""
    return make_shards(tmp_path_factory.mktemp("even"), shards=6, samples=4)


def ranks_of(urls, world_size):
    """The states of all ranks after a batch."""
    states = []
    for rank in range(world_size):
        source = loader(urls, rank=rank, world_size=world_size)
        after(source, 1)
        states.append(through_json(source.state_dict()))
    return states


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda states: [], "the list of what it returned on each rank"),
        (lambda states: [{}], "the list of what it returned on each rank"),
        (lambda states: ["state"], "the list of what it returned on each rank"),
        (lambda states: states[:2], "ranks 0 to 2: rank 2 is missing"),
        (lambda states: states[1:], "ranks 0 to 2: rank 0 is missing"),
        (lambda states: [*states, states[1]], "rank 1 is there more than once"),
        (lambda states: [states[0], states[1], states[1]], "rank 2 is missing and rank 1 is there more than once"),
        (
            lambda states: [*states[:2], states[2] | {"step": 2}],
            r"different steps \(rank 0 at 1, rank 1 at 1, rank 2 at 2\).*lost or repeated",
        ),
        (lambda states: [*states[:2], states[2] | {"epoch": 1}], "differ in 'epoch': 0, 0, 1"),
        (lambda states: [*states[:2], states[2] | {"seed": 6}], "differ in 'seed': 5, 5, 6"),
        (
            lambda states: [*states[:2], states[2] | {"fingerprint": "x", "data": "0" * 8}],
            "are of other shards",
        ),
        (lambda states: [*states[:2], states[2] | {"graph": [["shard_list"]]}], "differ in 'graph'"),
        (lambda states: [*states[:2], states[2] | {"lane_count": 6}], "differ in 'lane_count': 3, 3, 6"),
        (lambda states: [*states[:2], states[2] | {"version": 1}], "has format version 1"),
    ],
)
def test_states_that_are_not_of_all_ranks_at_one_step_are_refused(edit, message, even_urls):
    states = edit(ranks_of(even_urls, 3))
    with pytest.raises(wp.StateError, match=message):
        wp.merge_states(states)
    with pytest.raises(wp.StateError, match=message):
        loader(even_urls).load_state_dict(states)


def test_merged_states_are_one_for_all_ranks(even_urls):
    """In any order, and merged once: the counts are the sums, and the states of the ranks are
    unchanged.
    """
    states = ranks_of(even_urls, 3)
    kept = copy.deepcopy(states)
    merged = wp.merge_states(states)
    assert wp.merge_states(states[::-1]) == merged
    assert merged["counts"]["delivered"] == sum(state["counts"]["delivered"] for state in states) == 6
    assert sorted(merged["lanes"]) == ["0", "1", "2"]
    ruin(merged)
    assert states == kept


def test_the_state_of_one_rank_on_another_number_is_refused_with_what_to_do(urls):
    states = ranks_of(urls, 2)
    for other in ({}, {"rank": 0, "world_size": 3}, {"rank": 1, "world_size": 2}):
        with pytest.raises(wp.StateError, match=r"rank 0 of 2 alone.*merge_states\(states\)"):
            loader(urls, **other).load_state_dict(states[0])
    loader(urls, rank=0, world_size=2).load_state_dict(states[0])


DAMAGE = {
    "lane too many": (lambda state: {**state, "lanes": {**state["lanes"], "7": state["lanes"]["1"]}}, "of 2"),
    "lane name": (
        lambda state: {**state, "lanes": {"x": state["lanes"]["1"], "0": state["lanes"]["0"]}},
        "'x' is not the number of a lane",
    ),
    "no state": (lambda state: [1], "the list of what it returned on each rank"),
}


@pytest.mark.parametrize(("damage", "lanes"), list(zip(DAMAGE, itertools.cycle([2, 3]))))
def test_a_damaged_state_is_refused_and_changes_nothing(damage, lanes, urls):
    """On the same lanes or on others, when it is loaded. The current iterator continues."""
    edit, message = DAMAGE[damage]
    source = loader(urls, lanes=2)
    after(source, 3)
    state = edit(through_json(source.state_dict()))
    target = loader(urls, lanes=lanes)
    items = after(target, 1)
    kept = target.state_dict()
    with pytest.raises(wp.StateError, match=message):
        target.load_state_dict(state)
    assert target.state_dict() == kept
    next(items)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"num_workers": -1}, ValueError, "num_workers must be at least 0"),
        ({"num_workers": "2"}, TypeError, "num_workers must be an int"),
        ({"lanes": 0}, ValueError, "lanes must be at least 1"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1"),
        ({"batch_size": None}, ValueError, "go with batch_size"),
        ({"epoch_end": "stop"}, ValueError, "epoch_end must be one of"),
        ({"prefetch_factor": 0}, ValueError, "prefetch_factor must be at least 1"),
        ({"num_workers": 1, "timeout_seconds": -1}, ValueError, "timeout_seconds must be"),
        ({"rank": 0}, ValueError, "both rank and world_size"),
        ({"rank": 2, "world_size": 2}, ValueError, "below world_size"),
        ({"collate": "rows"}, ValueError, "collate must be"),
        ({"num_workers": 1, "multiprocessing_context": "forks"}, ValueError, "cannot find context for 'forks'"),
    ],
)
def test_wrong_arguments_are_refused_when_the_loader_is_built(options, kind, message, urls):
    with pytest.raises(kind, match=message):
        loader(urls, **options)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (list, TypeError, r"takes a pipe, not list, such as ShardList\(urls\)"),
        (torch.utils.data.datapipes.iter.IterableWrapper, TypeError, "ShardList"),
        (lambda urls: shuffled(urls).shuffle(), wp.StateError, r"Shuffler.*shuffle_buffer"),
    ],
)
def test_an_object_that_is_no_pipe_or_has_no_shards_is_refused(source, error, message, urls):
    with pytest.raises(error, match=message):
        wp.PipeLoader(source(urls))


@pytest.mark.parametrize("workers", [0, 1])
def test_another_thread_closes_while_next_waits(workers, urls, tmp_path):
    source = held(urls, tmp_path, EVERY[2], workers)
    with meanwhile(tmp_path, source.close):
        given, error, _ = until_error(source)
    assert isinstance(error, wp.StateError)
    assert "it was closed" in str(error)
    source.load_state_dict(source.state_dict())
    assert flat(given) + flat(source) == EVERY


@pytest.mark.parametrize(
    ("workers", "does", "raised"),
    [
        (0, lambda source, state: source.close(), wp.StateError),
        (0, lambda source, state: (source.close(), sys.exit(3)), SystemExit),
        (0, lambda source, state: source.load_state_dict(state), wp.StateError),
        (1, lambda source, state: source.load_state_dict(state), wp.StateError),
    ],
)
def test_a_signal_handler_acts_while_next_waits(workers, does, raised, urls, tmp_path):
    """A state that it loads stays, and not what ``next()`` was at."""
    source = held(urls, tmp_path, EVERY[2], workers)
    items = after(source, 1)
    state = source.state_dict()
    before = signal.signal(signal.SIGUSR1, lambda *_: does(source, state))
    send = partial(os.kill, os.getpid(), signal.SIGUSR1)
    try:
        with meanwhile(tmp_path, send), pytest.raises(raised, match="was closed|3|a state was loaded"):
            next(items)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert source.state_dict() == state
    source.load_state_dict(state)
    assert flat(source) == EVERY[1:]


def test_two_threads_in_one_loader_are_an_error(urls, tmp_path):
    """The thread that was first goes on."""
    source, errors = held(urls, tmp_path, EVERY[0]), []
    items = iter(source)
    with meanwhile(tmp_path, lambda: errors.extend(until_error(each)[1] for each in (items, source))):
        assert flat(items) == EVERY
    assert [type(error) for error in errors] == [RuntimeError] * 2
    assert re.search(r"another thread is in next\(\) of this loader", str(errors[0]))


def test_batches_of_what_is_no_sample_are_refused(urls):
    members = wp.ShardList(urls).open_shards().load_tar()
    with pytest.raises(TypeError, match=r"not samples, .*: add group_by_key\(\)"):
        wp.PipeLoader(members, batch_size=2)
    assert len(list(wp.PipeLoader(members, batch_size=2, collate=len))) > 1  # of these it is meant


@pytest.mark.parametrize("method", ["thread", "interpreter"])
@pytest.mark.parametrize("make", [lambda pipe: pipe, lambda pipe: pipe.as_dataset()], ids=["pipe", "dataset"])
def test_worker_threads_are_refused(make, method, urls, monkeypatch):
    """A future DataLoader may have them, each with a WorkerInfo of its own, and all with one
    dataset: they would share one position.
    """
    own, source, errors = threading.local(), make(shuffled(urls)), []
    monkeypatch.setattr("wds_pipes.loader.parent.get_worker_info", lambda: getattr(own, "info", None))

    def work(number):
        own.info = torch_worker.WorkerInfo(id=number, num_workers=2, seed=number, dataset=source, worker_method=method)
        with pytest.raises(RuntimeError, match=f"needs worker processes, and this worker of DataLoader is a {method}"):
            next(iter(source))
        errors.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(errors) == [0, 1]
    assert len(list(source)) == len(list(shuffled(urls)))  # nothing was taken from the pipe of this thread
