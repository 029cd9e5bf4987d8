"""States: what they hold, which are refused with which message, and how epochs and iterators
behave.
"""

import copy
import io
import json
import pickle
import re
import threading

import pytest
import torch
from pipelines import after, flat, keys_of, loaded, samples, shuffled, through_json
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_pipes as wp
from wds_pipes.core.stage import Stage
from wds_pipes.core.state import STATE_VERSION
from wds_pipes.core.stream import Stream
from wds_pipes.testing import make_shards


def decoded(urls, **options):
    return shuffled(urls, **options).decode_by_ext()


def test_state_is_plain_json_and_survives_torch_save(urls):
    pipe = decoded(urls)
    items = after(pipe, 5)
    state = pipe.state_dict()
    assert through_json(state) == state
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state
    assert len(json.dumps(state)) < 700
    rest = keys_of(items)
    resumed = loaded(decoded(urls), state)
    assert keys_of(resumed) == rest


def test_a_state_shares_nothing_with_its_pipe(urls):
    pipe = decoded(urls)
    items = after(pipe, 2)
    state = pipe.state_dict()
    kept = copy.deepcopy(state)
    next(items)
    assert state == kept
    state["graph"].clear()
    state["lanes"]["0"]["position"].clear()
    other = pipe.state_dict()
    assert other["graph"]
    assert len(other["lanes"]["0"]["position"]) == 6


def test_a_state_shares_no_counts_of_chains_that_are_done(urls):
    """Neither with the pipe that it is of, nor with one that has loaded it."""
    pipes = [samples(urls).batch_samples(2, collate="list").repeat(2) for _ in range(2)]
    after(pipes[0], 8)
    state = pipes[0].state_dict()
    pipes[1].load_state_dict(state)
    state["lanes"]["0"]["position"][0]["done"].clear()
    assert [pipe.counts()["delivered"] for pipe in pipes] == [16, 16]


def test_each_iter_is_the_next_epoch_and_set_epoch_chooses(urls):
    pipe = decoded(urls)
    epochs = [keys_of(pipe) for _ in range(3)]
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(sorted(epochs[0]))}
    pipe.set_epoch(1)
    assert keys_of(pipe) == epochs[1]
    assert keys_of(pipe) == epochs[2]
    fresh = decoded(urls)
    fresh.set_epoch(2)
    assert fresh.state_dict()["epoch"] == 2
    assert keys_of(fresh) == epochs[2]
    with pytest.raises(ValueError, match="epoch must be at least 0"):
        pipe.set_epoch(-1)


def test_pipes_over_one_source_count_epochs_together_after_a_resume(urls):
    """Also if the one that is ahead goes on first."""

    def pipes():
        source = wp.ShardList(urls)
        return [source.open_shards().load_tar().group_by_key() for _ in range(2)]

    before, after = pipes(), pipes()
    for old, new in zip(before, after, strict=True):
        next(iter(old))
        new.load_state_dict(old.state_dict())
    epochs = []
    for pipe in (*after[::-1], *after):
        next(iter(pipe))
        epochs.append(pipe.state_dict()["epoch"])
    assert epochs == [1, 0, 2, 3]


def test_set_epoch_of_a_loaded_epoch_continues_it(urls):
    rest = keys_of(after(decoded(urls), 4))
    half = decoded(urls)
    after(half, 4)
    resumed = loaded(decoded(urls), half.state_dict())
    resumed.set_epoch(0)
    assert keys_of(resumed) == rest
    other = loaded(decoded(urls), half.state_dict())
    other.set_epoch(1)
    assert keys_of(other) != rest


def test_iter_is_lazy(urls):
    """An iter() that is never used takes no epoch and leaves a loaded state to the next one."""
    pipe = decoded(urls)
    iter(pipe)
    assert pipe.state_dict()["epoch"] == 0
    rest = keys_of(after(decoded(urls), 3))
    half = decoded(urls)
    after(half, 3)
    pipe.load_state_dict(half.state_dict())
    iter(pipe)
    assert keys_of(pipe) == rest


def test_a_new_iterator_ends_the_one_before(urls):
    pipe = decoded(urls)
    old = after(pipe, 1)
    new = after(pipe, 1)
    with pytest.raises(wp.StateError, match="replaced"):
        next(old)
    next(new)
    pipe.load_state_dict(pipe.state_dict())
    with pytest.raises(wp.StateError, match="a state was loaded"):
        next(new)


def test_set_epoch_ends_an_iterator(urls):
    """Else the state would be that of the next epoch, and the rest of this one missing in it."""
    pipe = decoded(urls)
    items = after(pipe, 3)
    pipe.set_epoch(5)
    with pytest.raises(wp.StateError, match=r"set_epoch\(\) was called: continue with a new iter\(\)"):
        next(items)
    resumed = loaded(decoded(urls), pipe.state_dict())
    assert keys_of(resumed) == keys_of(pipe)


@pytest.mark.parametrize("what", ["load", "iterate"])
def test_a_state_is_loaded_below_next(what, urls):
    """By a signal handler, or as here by a function of a step: that iterator ends, and the position
    is that of the state.
    """
    calls = []

    def meanwhile(sample):
        calls.append(sample)
        if len(calls) == 3:
            pipe.load_state_dict(state)
            if what == "iterate":
                next(iter(pipe))
        return sample

    pipe = decoded(urls).map_samples(meanwhile)
    state = pipe.state_dict()
    items = after(pipe, 2)
    with pytest.raises(wp.StateError, match="this iterator has been replaced"):
        next(items)
    assert pipe.state_dict()["counts"]["delivered"] == (what == "iterate")
    if what == "load":
        assert keys_of(pipe) == keys_of(decoded(urls))


def test_an_ended_iterator_stays_ended(urls):
    pipe = decoded(urls)
    items = iter(pipe)
    list(items)
    pipe.set_epoch(1)
    after(pipe, 2)
    state = pipe.state_dict()
    with pytest.raises(StopIteration):
        next(items)
    assert pipe.state_dict() == state


def test_after_an_exception_the_state_is_before_the_item_that_failed(urls):
    """The iterator raises it again instead of looking exhausted; loading the state tries again."""
    bad = True

    def fragile(sample):
        if bad and sample["__key__"] == expected[6]:
            raise ValueError("cannot")
        return sample

    make_fragile = lambda: decoded(urls).map_samples(fragile).batch_samples(2, collate="list")  # noqa: E731
    expected = keys_of(decoded(urls))
    pipe = make_fragile()
    items = iter(pipe)
    got = [next(items) for _ in range(3)]
    for _ in range(3):
        with pytest.raises(ValueError, match="cannot") as caught:
            next(items)
    assert expected[6] in str(caught.value.__notes__)
    state = pipe.state_dict()
    assert pipe.counts()["delivered"] == 6
    bad = False
    for again in (pipe, make_fragile()):
        again.load_state_dict(state)
        assert keys_of(flat([*got, *again])) == expected


def test_an_interrupted_iterator_says_so(urls):
    stop = True

    def interrupt(sample):
        if stop:
            raise KeyboardInterrupt
        return sample

    pipe = decoded(urls).map_samples(interrupt)
    items = iter(pipe)
    with pytest.raises(KeyboardInterrupt):
        next(items)
    with pytest.raises(RuntimeError, match="interrupted by KeyboardInterrupt"):
        next(items)
    stop = False
    pipe.load_state_dict(pipe.state_dict())
    assert len(keys_of(pipe)) == 14


class Opened(Stage):
    """A stage that cannot be opened while ``error`` is set."""

    error: BaseException | None = None

    def open(self, lane, mark=None):
        if Opened.error is not None:
            raise Opened.error
        return super().open(lane, mark)

    def run(self):
        yield from self.source.items


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("cannot")])
def test_an_iterator_that_failed_at_its_start_does_not_begin_the_next_epoch(error, urls, monkeypatch):
    """Its next() raises the same error again, and the state is still the beginning of the epoch."""
    stream = Stream(Opened(decoded(urls)._stream.stage))
    epochs = [list(stream) for _ in range(3)]
    stream.set_epoch(1)
    items = iter(stream)
    monkeypatch.setattr(Opened, "error", error)
    with pytest.raises(type(error)):
        next(items)
    monkeypatch.setattr(Opened, "error", None)
    with pytest.raises(
        RuntimeError if isinstance(error, KeyboardInterrupt) else ValueError, match=r"interrupted|cannot"
    ):
        next(items)
    stream.load_state_dict(stream.state_dict())
    assert list(stream) == epochs[1]


def test_state_may_be_taken_from_another_thread(urls):
    """Each such state is one of the positions between items."""
    pipe = decoded(urls)
    states, done = [], threading.Event()

    def take():
        while not done.is_set():
            states.append(pipe.state_dict())

    thread = threading.Thread(target=take)
    thread.start()
    epochs = [keys_of(pipe) for _ in range(20)]
    done.set()
    thread.join()
    for state in states[:: max(1, len(states) // 50)]:
        resumed = loaded(decoded(urls), state)
        delivered = state["lanes"]["0"]["delivered"]
        if state["epoch"] < 20:
            assert keys_of(resumed) == epochs[state["epoch"]][delivered:]


def test_pickled_pipe_keeps_a_loaded_state_and_starts_afresh_otherwise(urls):
    rest = keys_of(after(decoded(urls), 4))
    half = decoded(urls)
    after(half, 4)
    again = loaded(decoded(urls), half.state_dict())
    assert keys_of(pickle.loads(pickle.dumps(again))) == rest
    copied = pickle.loads(pickle.dumps(half))
    assert keys_of(copied) == keys_of(half)  # the next epoch


# What is refused


def test_another_pipeline_is_refused_with_the_difference(urls):
    state, sizes = decoded(urls).state_dict(), r"shuffle_buffer\(size=3\), and of this one is shuffle_buffer\(size=4\)"
    for other, message in (
        (decoded(urls[:-1]), "made over 5 shards, this pipeline has 4"),
        (decoded([*urls[1:], urls[0]]), "other URLs or another order"),
        (decoded(urls, seed=6), "seed=5, this pipeline has seed=6"),
        (samples(urls).shuffle_buffer(4).decode_by_ext(), f"step 5 of its pipeline was {sizes}"),
        (decoded(urls).batch_samples(2), "step 7 of its pipeline was no step, and of this one is batch_samples"),
        (wp.PipeLoader(decoded(urls)), "it was made by a pipe, this is a PipeLoader"),
    ):
        with pytest.raises(wp.StateError, match=message):
            other.load_state_dict(state)
    with pytest.raises(wp.StateError, match="it was made by a PipeLoader, this is a pipe"):
        decoded(urls).load_state_dict(wp.PipeLoader(decoded(urls)).state_dict())
    with pytest.raises(wp.StateError, match="over 4 shards, this pipeline has 5") as refused:
        wp.PipeLoader(decoded(urls)).load_state_dict(wp.PipeLoader(decoded(urls[:-1])).state_dict())
    assert 'added="append"' in refused.value.mend


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("shuffle_buffer(size=3)", "the state is damaged"),
        ([], "the state is damaged"),
        (["shuffle_buffer", {"size": 3}, {}], "the state is damaged"),
        (["shuffle_buffer", [3]], "the state is damaged"),
        ([["shuffle_buffer"]], "the state is damaged"),
        (["shuffle_buffer", {"size": 9**9999}], r"was shuffle_buffer\(size=some int\)"),
        (["segments", {"count": 2}], "its epoch had an unknown number of samples"),
    ],
)
def test_a_graph_that_no_pipeline_wrote_is_refused(step, message, urls):
    state = wp.PipeLoader(decoded(urls)).state_dict()
    place = [name for name, *_ in state["graph"]].index("segments" if "segments" in step else "shuffle_buffer")
    state["graph"][place] = step
    with pytest.raises(wp.StateError, match=message):
        wp.PipeLoader(decoded(urls)).load_state_dict(state)


def test_another_batch_size_or_function_is_accepted(urls):
    """All may change that does not decide which samples come in which order."""
    pipe = decoded(urls).map_samples(lambda sample: sample).batch_samples(2, collate="list")
    after(pipe, 2)
    other = loaded(
        decoded(urls).map_samples(lambda sample, rng: sample).batch_samples(5, collate="list"), pipe.state_dict()
    )
    assert keys_of(flat(other)) == keys_of(decoded(urls))[4:]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda state: [], "not a state"),
        (lambda state: {}, "not a state"),
        (lambda state: {**state, "version": STATE_VERSION + 1}, f"format version {STATE_VERSION + 1}"),
        (lambda state: {**state, "lanes": {}}, "holds lane none of 1"),
        (lambda state: {**state, "lane_count": 2}, "keep the number of workers"),
        (lambda state: {name: value for name, value in state.items() if name != "seed"}, "'seed' is None"),
        (lambda state: lane(state, position=[{"next": -3}, {}, {}, {}, {}, {}]), "shard_list cannot stand at next=-3"),
    ],
)
def test_damaged_states_are_refused(edit, message, urls):
    """In words; all values are checked in test_hostile_states.py."""
    pipe = decoded(urls)
    items = after(pipe, 2)
    with pytest.raises(wp.StateError, match=message):
        decoded(urls).load_state_dict(edit(pipe.state_dict()))
    with pytest.raises(wp.StateError, match=message):
        pipe.load_state_dict(edit(pipe.state_dict()))
    next(items)  # a refused state changes nothing


def lane(state, **changes):
    return {**state, "lanes": {"0": {**state["lanes"]["0"], **changes}}}


def test_describe_state_is_for_people(urls):
    pipe = decoded(urls)
    after(pipe, 6)
    text = wp.describe_state(pipe.state_dict())
    [shard] = re.findall(r"of 5 \((.*)\)", text)
    assert shard in urls
    for part in ("epoch 0", "6 items delivered", "shuffle at 6", "6 delivered, 0 filtered"):
        assert part in text
    loader = wp.PipeLoader(decoded(urls), lanes=2)
    assert "lane 1 of 2: not begun, 0 items delivered" in wp.describe_state(loader.state_dict())
    next(iter(loader))
    assert "lane 0 of 2: in " in wp.describe_state(loader.state_dict())
    with pytest.raises(wp.StateError, match="not a state"):
        wp.describe_state({"a": 1})
    loader = wp.PipeLoader(decoded(urls[:1]), lanes=2)
    after(loader, 2)
    assert "\nlane 1 of 2: ended, it has no shard, 0 items delivered\n" in wp.describe_state(loader.state_dict())


def test_a_description_of_a_worker_counts_its_own_shards(urls):
    """Of five, one worker of two has three."""
    data = samples(urls).as_dataset()
    loader = StatefulDataLoader(data, batch_size=None, num_workers=2, multiprocessing_context="fork")
    after(loader, 3)
    states = loader.state_dict()["_snapshot"]["_worker_snapshots"]
    for number, shards in ((0, 3), (1, 2)):
        text = wp.describe_state(states[f"worker_{number}"]["dataset_state"])
        assert re.search(rf"lane {number} of 2: shard \d of {shards} \(", text)


def test_a_description_has_the_end_of_a_long_url(tmp_path):
    folder = tmp_path / ("a-long-name-of-a-directory-" * 8)
    [url] = make_shards(folder, shards=1, samples=2)
    pipe = samples([url])
    next(iter(pipe))
    assert f"(...{url[-197:]})" in wp.describe_state(pipe.state_dict())


def test_secrets_are_not_in_the_state():
    url = "https://user:pa55@host/a.tar?X-Amz-Signature=5ecret&part=1"
    pipe = wp.ShardList([url]).open_shards().load_tar()
    text = json.dumps(pipe.state_dict())
    assert "pa55" not in text
    assert "5ecret" not in text
    loaded(
        wp.ShardList(["https://other:x@host/a.tar?X-Amz-Signature=new&part=1"]).open_shards().load_tar(),
        pipe.state_dict(),
    )
    azure = "https://host/a.tar?sv=2026-01-01&se={0}&sig={0}&part=1"
    loaded(wp.ShardList([azure.format("first")]).open_shards().load_tar(), pipe.state_dict())
    with pytest.raises(wp.StateError, match="other URLs"):
        wp.ShardList(["https://host/a.tar?part=2"]).open_shards().load_tar().load_state_dict(pipe.state_dict())


@pytest.mark.parametrize(
    ("loads", "wrap", "mend"),
    [
        (wp.PipeLoader, lambda state: {"model": {}, "loader": state}, "There is one under 'loader': pass that."),
        (wp.PipeLoader, lambda state: (3, state), r"Pass what state_dict\(\) returned, or the list"),
        (lambda pipe: pipe, json.dumps, r"Pass what state_dict\(\) returned."),
        (lambda pipe: pipe.as_dataset(), lambda state: {"model": {}}, r"Pass what state_dict\(\) returned."),
    ],
)
def test_an_object_that_is_no_state_is_named(loads, wrap, mend, urls):
    with pytest.raises(wp.StateError, match=f"this is not a state of a wds_pipes pipeline but .*{mend}"):
        loads(decoded(urls)).load_state_dict(wrap(decoded(urls).state_dict()))


def test_another_pipeline_may_begin_the_next_epoch(urls):
    """The message says how, and what does not need it."""
    after(pipe := samples(urls), 2)
    with pytest.raises(wp.StateError) as caught:
        samples(urls).shuffle_buffer(2).load_state_dict(pipe.state_dict())
    assert "set_epoch(1), without the state" in caught.value.mend
    assert "moved=True" in caught.value.mend
