"""then: a generator function as a step, exact where it holds what it says."""

import itertools
from collections import deque
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import keys_of, samples, shuffled, through_json
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import Then
from wds_pipes.testing import check_resume


def each(items):
    yield from items


def even(items):
    return (item for item in items if int(item["__key__"]) % 2 == 0)


def times(items, number=3):
    for item in items:
        for _ in range(int(item["__key__"]) % number):
            yield item


def pairs(items):
    before = next(items, None)
    for item in items:
        yield before, item
        before = item


def deltas(items):
    """With an item before the first one."""
    before = {"__key__": "none"}
    for item in items:
        yield before["__key__"], item["__key__"]
        before = item


def windows(items, size=3):
    held = deque(maxlen=size)
    for item in items:
        held.append(item)
        if len(held) == size:
            yield keys_of(held)


def sorted_chunks(items, size=4):
    while chunk := list(itertools.islice(items, size)):
        yield from sorted(chunk, key=lambda item: hash(item["__key__"][::-1]) % 7)


def packed(items, limit=9):
    """As many samples as the sum of their last digits lets into a pack; one may be held."""
    pack, size = [], 0
    for item in items:
        length = int(item["__key__"]) % 5 + 1
        if size + length > limit:
            yield keys_of(pack)
            pack, size = [], 0
        pack.append(item)
        size += length
    if pack:
        yield keys_of(pack)


def framed(items):
    """Something before the first item, and after the last one."""
    yield "begin"
    yield "begin again"
    for item in items:
        yield item["__key__"]
    yield "end"
    yield "end again"


FUNCTIONS = {
    "each": (each, 0),
    "a generator expression": (even, 0),
    "expanding": (times, 0),
    "pairs": (pairs, 1),
    "deltas": (deltas, 1),
    "windows": (windows, 2),
    "larger than it must be": (windows, 5),
    "sorted chunks": (sorted_chunks, 0),
    "packing": (packed, 1),
    "framed": (framed, 0),
    "nothing": (lambda items: iter(()), 0),
    "what takes nothing": (lambda items: iter(["alone", "still alone"]), 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_resumes_exactly(name, urls):
    fn, holds = FUNCTIONS[name]
    check_resume(lambda: samples(urls).then(fn, holds=holds))
    check_resume(lambda: shuffled(urls).then(fn, holds=holds).shuffle_buffer(2))
    check_resume(lambda: shuffled(urls).then(each, holds=0).then(fn, holds=holds).batch_samples(3, collate="list"))


def random_machine(items, holds, table):
    """What it yields depends on the last items, and on how they begin and end."""
    last = deque(maxlen=holds)
    for number in range(table[0] % 3):
        yield "before", number
    for item in items:
        value = int(item["__key__"])
        for number in range(table[(value + sum(last)) % len(table)] % 4):
            yield value, number, list(last)
        last.append(value)
    for number in range(table[-1] % 3):
        yield "after", number, list(last)


@pytest.mark.slow
@settings(max_examples=40, deadline=None, database=None)
@given(holds=st.integers(0, 4), table=st.lists(st.integers(0, 11), min_size=1, max_size=6))
def test_random_functions_resume_exactly(holds, table, urls):
    fn = partial(random_machine, holds=holds, table=table)
    assert check_resume(lambda: samples(urls).then(fn, holds=holds))[0] == list(fn(iter(samples(urls))))


def running_sum(items):
    total = 0
    for item in items:
        total += int(item["__key__"])
        yield total


def without_repeated(items):
    seen = set()
    for item in items:
        if int(item["__key__"]) % 4 not in seen:
            seen.add(int(item["__key__"]) % 4)
            yield item


def first_three(items):
    return itertools.islice(items, 3)


@pytest.mark.parametrize(
    ("fn", "holds"),
    [
        (running_sum, 0),
        (running_sum, 3),
        (without_repeated, 1),
        (pairs, 0),
        (windows, 1),
        (packed, 0),
        (first_three, 0),
    ],
)
def test_check_resume_finds_what_holds_does_not_say(fn, holds, urls):
    with pytest.raises((AssertionError, wp.StateError), match=r"then\(.*holds"):
        check_resume(lambda: samples(urls).then(fn, holds=holds))


@pytest.mark.parametrize(("fn", "holds"), [(sorted_chunks, 2), (sorted_chunks, 7), (packed, 3), (pairs, 0)])
def test_a_number_that_is_too_large_or_too_small_is_found_in_the_first_epoch(fn, holds, urls):
    with pytest.raises(wp.StateError, match=f"does not remember what holds={holds} says"):
        list(samples(urls).then(fn, holds=holds))


def test_without_holds_it_runs_and_has_no_state(urls):
    pipe = samples(urls).then(pairs)
    assert len(list(pipe)) == 13
    with pytest.raises(wp.StateError, match=r"state of then\(\) cannot be known.*holds=0 if.*check_resume"):
        pipe.state_dict()
    loader = wp.PipeLoader(samples(urls).then(each), batch_size=2, num_workers=1)
    assert len(list(loader)) == 7
    with pytest.raises(wp.StateError, match=r"pass holds=0"):
        loader.state_dict()
    cut = wp.PipeLoader(samples(urls).then(each), batch_size=2).with_epoch(batches=2)
    list(cut)
    list(cut)
    cut.close()
    with pytest.raises(wp.StateError, match=r"pass holds=0"):
        list(cut)


def test_it_is_read_as_far_as_it_was_used(urls):
    """A resume reads the held items and those since the last yield, from where they were."""
    pipe = samples(urls, shuffle=False).then(partial(windows, size=3), holds=2)
    items = iter(pipe)
    for _ in range(9):
        next(items)
    state, taken = through_json(pipe.state_dict()), []

    def counting(items):
        yield from windows((taken.append(item["__key__"]) or item for item in items), size=3)

    again = samples(urls, shuffle=False).then(counting, holds=2)
    again.load_state_dict(state)
    assert next(iter(again)) == next(items)
    assert len(taken) == 4, "two that were held, the one of the last yield, and a new one"


def test_the_length_is_known_if_it_says_so(urls):
    pipe = samples(urls, samples_per_shard=[3, 0, 5, 2, 4])
    assert len(wp.PipeLoader(pipe.then(sorted_chunks, holds=0, keeps_count=True), batch_size=4)) == 4
    with pytest.raises(TypeError, match=r"then\(\) may change their number"):
        len(wp.PipeLoader(pipe.then(each, holds=0), batch_size=4))
    with pytest.raises(AssertionError, match="keeps_count = True, and has yielded"):
        check_resume(lambda: pipe.then(times, holds=0, keeps_count=True))


def test_wrong_functions(urls):
    with pytest.raises(TypeError, match="a generator function, one that yields items: it returned None"):
        next(iter(samples(urls).then(lambda items: None)))

    def broken(items):
        for item in items:
            if item["__key__"].endswith("3"):
                raise KeyError("no such thing")
            yield item

    with pytest.raises(KeyError) as caught:
        list(samples(urls, shuffle=False).then(broken, holds=0))
    assert "raised by the function of then(), after it took sample '00000003' of shard" in caught.value.__notes__[0]
    bad = samples(urls).map_samples(lambda sample: 1 / 0).then(each, holds=0)
    with pytest.raises(ZeroDivisionError) as caught:
        list(bad)
    assert len(caught.value.__notes__) == 1, "an error of a step before it is not one of the function"


def test_an_error_that_the_function_catches_is_raised(urls):
    """Otherwise it would look like the end, and the rest of the epoch would be lost."""

    def careful(sample):
        if sample["__key__"] == "00000008":
            raise ValueError("a bad sample")
        return sample

    def catching(items, wait):
        pack = []
        while True:
            try:
                pack.append(next(items)["__key__"])
            except StopIteration:
                return
            except Exception:
                if wait:
                    continue
            yield pack

    for wait in (True, False):
        pipe = samples(urls, shuffle=False).map_samples(careful).then(partial(catching, wait=wait), holds=0)
        items = iter(pipe)
        assert len(list(itertools.islice(items, 8))) == 8
        state = pipe.state_dict()
        for _ in range(2):
            with pytest.raises(ValueError, match="a bad sample"):
                next(items)
        assert pipe.state_dict() == state


def test_a_function_that_yields_something_else_after_a_resume(urls):
    pipe = samples(urls).then(partial(times, number=4), holds=0)
    items = iter(pipe)
    while pipe.state_dict()["lanes"]["0"]["position"][-1].get("yielded", 0) < 3:
        next(items)
    again = samples(urls).then(partial(times, number=2), holds=0)
    again.load_state_dict(pipe.state_dict())
    with pytest.raises(wp.StateError, match="yielded 1 items where it had yielded 3 before"):
        next(iter(again))


def test_the_function_is_closed_with_the_pipe():
    closed = []

    def careful(items):
        try:
            yield from items
        finally:
            closed.append(True)

    stream = Stream(Then(Given(range(5)), careful, holds=0))
    items = iter(stream)
    assert next(items) == 0
    stream.close()
    assert closed == [True]
