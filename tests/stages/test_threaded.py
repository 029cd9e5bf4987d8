"""Steps with threads: the same samples, errors, counts and states as without them, a bounded number
in flight, and no thread that is left.
"""

import gc
import json
import os
import signal
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pipelines import draw, flat, keys_of, resumed, samples, shuffled
from scripts import run_code
from sources import Given
from waiting import wait_for

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.io.packed import Packed
from wds_pipes.stages import DecodeByExt, MapSamples, TakeSamples, threaded
from wds_pipes.testing import make_shards


def living(name=threaded.NAME):
    """The threads of steps that have not ended."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith(name)]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    gc.collect()
    wait_for(lambda: not living())
    yield
    assert not living()


class Source(Given):
    """Items, and perhaps an error at one of them."""

    def __init__(self, items, fails=None):
        super().__init__(items)
        self.fails = fails

    def run(self):
        for item in super().run():
            if self.at.number == self.fails:
                raise wp.ShardError("the source fails")
            yield item


# Order and states

KINDS = ["good", "good", "good", "bad", "nothing", "drop", "slow"]
FUNCTIONS = {"bad": lambda: 1 / 0, "nothing": lambda: None, "drop": lambda: wp.DROP}


def act(item, rng):
    """Do what the item says."""
    number, kind = item
    if kind == "slow":
        time.sleep(0.002)
    if kind in FUNCTIONS:
        return FUNCTIONS[kind]()
    return number, int(rng.integers(1 << 30))


def decoded(item, rng):
    """A sample for decode_by_ext, which fails where ``act`` does."""
    number, kind = item
    return {"__key__": str(number), "__url__": "a.tar", "cls": b"x" if kind in FUNCTIONS else b"%d" % number}


def told(error):
    return type(error), str(error), getattr(error, "__notes__", None)


def trace(stream, most=None):
    """Each item of a stream, with the state and counts after it; then how the stream ends."""
    found, items = [], iter(stream)
    try:
        while most is None or len(found) < most:
            found.append((next(items), json.dumps(stream.state_dict()), stream.counts()))
    except StopIteration:
        found.append(("end", json.dumps(stream.state_dict()), stream.counts()))
    except Exception as error:
        found.append((told(error), json.dumps(stream.state_dict()), stream.counts()))
    del items  # closes it
    return found


@st.composite
def runs(draw):
    kinds = draw(st.lists(st.sampled_from(KINDS), max_size=24))
    return (
        list(enumerate(kinds)),
        draw(st.none() | st.integers(1, 24)),  # where the source fails
        draw(st.sampled_from([{}, {"on_error": "skip"}, {"on_error": "skip", "max_errors": 2}])),
        draw(st.sampled_from(["map", "decode", "both"])),
        draw(st.integers(1, 3)),  # threads
        draw(st.integers(1, 4)),  # samples ahead for each
        (draw(st.integers(0, 24)), draw(st.integers(0, 24))),
    )


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(run=runs())
def test_everything_is_as_without_threads(run):
    """Items, errors, logged counts and the bytes of each state, from the start and from any two
    cuts; a state of a run with threads fits one without, and the other way round.
    """
    items, fails, options, form, threads, ahead, cuts = run

    def make(threads):
        chain = Source(items, fails)
        if form != "decode":
            chain = MapSamples(chain, decoded if form == "both" else act, may_drop=True, threads=threads, **options)
        else:
            chain = MapSamples(chain, decoded)
        return Stream(chain if form == "map" else DecodeByExt(chain, threads=threads, **options))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threaded, "AHEAD", ahead)
        expected = trace(make(None))
        assert trace(make(threads)) == expected
        place, states = 0, [make(None).state_dict(), *(json.loads(state) for _, state, _ in expected)]
        for cut, (first, second) in zip(cuts, ((threads, None), (None, threads)), strict=True):
            resumed = make(first)
            resumed.load_state_dict(states[place])
            end = min(place + cut, len(expected) - 1)  # at the end, the state is that of the next epoch
            assert [item[:2] for item in trace(resumed, end - place)] == [item[:2] for item in expected[place:end]]
            place = end
            again = make(second)
            again.load_state_dict(resumed.state_dict())
            assert [item[:2] for item in trace(again)] == [item[:2] for item in expected[place:]]
    assert not living()


def test_after_a_mix_the_states_are_those_without_threads(urls):
    """Its marks share the number of draws; what is in flight must not count as drawn."""

    def make(threads):
        mixed = wp.mix({"a": shuffled(urls[:3]), "b": wp.mix({"c": samples(urls[3:])})}, {"a": 2, "b": 1})
        return mixed.map_samples(draw, threads=threads)

    assert trace(make(2)) == trace(make(None))


# What is in flight


def test_a_bounded_number_is_in_flight():
    source, threads, most = Given(range(500)), 3, threaded.AHEAD * 3
    called, allowed, gate = [], [0], threading.Condition()

    def fn(number):
        called.append(number)
        with gate:
            gate.wait_for(lambda: number < allowed[0])
        return number

    def allow(count):
        with gate:
            allowed[0] = count
            gate.notify_all()

    stream = Stream(MapSamples(source, fn, threads=threads))
    items = iter(stream)
    for number in range(60):
        allow(number + 1)
        assert next(items) == number
        assert source.taken[0] <= number + most
        assert len(called) <= number + 1 + threads
    allow(500)
    stream.close()
    assert source.taken[0] < 500


def test_samples_ahead_are_made_while_the_caller_does_something_else():
    done = []
    stream = Stream(MapSamples(Given(range(100)), lambda number: done.append(number) or number, threads=2))
    items = iter(stream)
    assert next(items) == 0
    for _ in range(40):
        next(items)
    ahead = stream._live()._running.held_items
    wait_for(lambda: len(done) == 41 + ahead)
    assert ahead > 2
    stream.close()


def test_a_resume_repeats_only_what_was_in_flight(urls):
    called = []

    def fn(sample):
        called.append(sample["__key__"])
        return sample

    taken, again = resumed(lambda: samples(urls).map_samples(fn, threads=1), 6)
    gc.collect()
    called.clear()
    rest = keys_of(again)
    assert called == rest
    assert len({*rest, *keys_of(taken)}) == 14


def test_held_samples_are_reported(urls):
    loader = wp.PipeLoader(samples(urls * 4).map_samples(draw, threads=2), batch_size=2, collate=list)
    next(iter(loader))
    assert loader.stats()["held_samples"] > 0
    loader.close()


# The end of threads


def slowly(number):
    time.sleep(0.001)
    return number


def cyclic(stream):
    """An iterator that only the garbage collector frees."""
    items = iter(stream)
    loop = [items]
    loop.append(loop)
    return items


@pytest.mark.slow
@pytest.mark.parametrize("end", ["close", "drop", "collect", "error", "source", "end", "take", "loader", "load"])
def test_no_thread_is_left(end):
    items = list(range(200)) if end != "error" else [*range(30), None]
    chain = MapSamples(Source(items, 30 if end == "source" else None), lambda item: slowly(item + 0), threads=3)
    stream = Stream(TakeSamples(chain, 20) if end == "take" else chain)
    iterator = cyclic(stream) if end == "collect" else iter(stream)
    assert next(iterator) == 0
    assert 1 <= len(living("wds_pipes map_samples")) <= 3
    if end == "close":
        stream.close()
    elif end == "load":
        stream.load_state_dict(stream.state_dict())
    elif end in ("error", "source"):
        with pytest.raises((TypeError, wp.ShardError)):
            list(iterator)
    elif end in ("end", "take"):
        assert len(list(iterator)) == (199 if end == "end" else 19)
    elif end == "collect":
        del iterator
        gc.collect()
    else:
        del iterator, stream
    if end != "collect":
        assert not living()
    wait_for(lambda: not living())


def test_close_waits_for_calls_that_run_and_makes_no_others():
    running, ended = threading.Event(), []

    def fn(number):
        running.set()
        time.sleep(0.02)
        ended.append(number)
        return number

    stream = Stream(MapSamples(Given(range(100)), fn, threads=2))
    next(iter(stream))
    running.wait()
    stream.close()
    count = len(ended)
    assert not living()
    assert len(ended) == count <= 6


def test_the_collector_may_close_a_chain_in_a_thread_of_another():
    """A thread does not wait for other threads, as it may hold what they wait for."""
    held = [iter(Stream(MapSamples(Given(range(40)), slowly, threads=2))) for _ in range(3)]
    assert [next(items) for items in held] == [0, 0, 0]

    def fn(number):
        held.pop()  # __del__ closes the chain, in this thread
        return number

    assert list(Stream(MapSamples(Given(range(3)), fn, threads=1))) == [0, 1, 2]
    wait_for(lambda: not living())


def test_ctrl_c_while_a_call_lasts():
    """The iteration ends at once; close() then waits for the call."""
    started, may_end = threading.Event(), threading.Event()

    def fn(number):
        if number == 3:
            started.set()
            may_end.wait()
        return number

    def interrupt(*_):
        may_end.set()  # else it would wait for ever in close()
        raise KeyboardInterrupt

    stream = Stream(MapSamples(Given(range(9)), fn, threads=1))
    items, before = iter(stream), signal.signal(signal.SIGALRM, interrupt)
    try:
        assert [next(items) for _ in range(3)] == [0, 1, 2]
        started.wait()
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            next(items)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(RuntimeError, match="interrupted by KeyboardInterrupt"):
        next(items)
    assert not living()
    stream.load_state_dict(stream.state_dict())
    assert list(stream) == [3, 4, 5, 6, 7, 8]


EXIT = """
    import sys, time
    import wds_pipes as wp

    def slowly(sample):
        time.sleep(0.01)
        return sample

    pipe = wp.ShardList(sys.argv[1]).open_shards().load_tar().group_by_key().map_samples(slowly, threads=4)
    items = iter(pipe)
    next(items)
    print("done")
"""


def test_python_ends_with_calls_in_flight(tmp_path):
    """An iterator that is still referred to at the end of the main module."""
    [url] = make_shards(tmp_path, shards=1, samples=200)
    assert run_code(EXIT, url, has_torch=True) == "done\n"


# Processes


def in_child(function):
    """Run a function in a forked child; return what it returned or raised, as text."""
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            said = repr(function())
        except BaseException as error:
            said = str(error)
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with open(read) as file:
        said = file.read()
    assert os.waitpid(child, 0)[1] == 0
    return said


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_the_threads_of_its_parent():
    """It can drop the parent's iterator, and start its own; it cannot continue the parent's."""
    gate = threading.Event()
    stream = Stream(
        MapSamples(Given(range(60)), lambda number: number if number < 5 else gate.wait() and number, threads=2)
    )
    items = iter(stream)
    assert next(items) == 0
    assert "started this iteration: start a new one, with iter()" in in_child(lambda: next(items))
    assert in_child(stream.close) == "None"
    own = Stream(MapSamples(Given(range(60)), slowly, threads=2))
    assert in_child(lambda: list(own)) == repr(list(range(60)))
    assert in_child(lambda: gate.set() or sum(stream)) == str(sum(range(60)))  # iter() closes the parent's
    gate.set()
    assert list(items) == list(range(1, 60))


def loader_of(urls, threads, workers, context=None, **options):
    pipe = samples(urls).decode_by_ext(threads=threads).map_samples(draw, threads=threads)
    options = {"batch_size": 3, "collate": list, "lanes": 2, **options}
    return wp.PipeLoader(pipe, num_workers=workers, multiprocessing_context=context, **options)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_in_workers(fifty):
    """The same batches as in one process without threads, also from a state in the middle."""
    plain = loader_of(fifty, None, 0)
    expected = [*plain, *plain]
    loader = loader_of(fifty, 2, 2, "fork")
    assert [*loader, *loader] == expected
    got, again = resumed(lambda: loader_of(fifty, 2, 2, "fork"), 7, lambda: loader_of(fifty, 2, 0))
    assert [*got, *again, *again] == expected
    for each in (loader, again):
        each.close()


def test_an_epoch_is_repartitioned_as_without_threads(fifty):
    """What is in flight counts as not read: no shard of it counts as opened."""

    def rest(threads):
        make = lambda lanes: loader_of(fifty, threads, 0, lanes=lanes)  # noqa: E731
        taken, again = resumed(lambda: make(2), 9, lambda: make(3))
        batches = list(map(keys_of, again))
        assert sorted([*keys_of(flat(taken)), *flat(batches)]) == [f"{number:08d}" for number in range(50)]
        return batches

    assert rest(2) == rest(None)


def test_an_endless_loop_over_few_samples(urls):
    """The threads are epochs ahead; each epoch of the loader and its counts are as without."""

    def run(threads):
        loader = loader_of(urls, threads, 0, lanes=1, epoch_end="loop").with_epoch(batches=7)
        found = [(batch, json.dumps(loader.state_dict()), loader.counts()) for _ in range(3) for batch in loader]
        loader.close()
        return found

    assert run(2) == run(None)


# Options


@pytest.mark.parametrize("threads", [None, 0])
def test_without_threads_the_caller_makes_the_calls(threads):
    stream = Stream(MapSamples(Given([1]), lambda number: threading.current_thread(), threads=threads))
    assert list(stream) == [threading.current_thread()]


def test_random_numbers_are_the_same_while_the_shards_are_numbered(tmp_path, monkeypatch):
    """They are numbered when a thread first needs it; others see all of the numbers, or none."""

    def slowly(self):
        for number in range(len(self)):
            time.sleep(0.001)
            yield self[number]

    for urls in (shards := make_shards(tmp_path, shards=12, samples=4)), shards[::-1]:
        expected = [sample["draw"] for sample in samples(urls).map_samples(draw)]
        with monkeypatch.context() as patched:
            patched.setattr(Packed, "__iter__", slowly)
            assert [sample["draw"] for sample in samples(urls).map_samples(draw, threads=4)] == expected
