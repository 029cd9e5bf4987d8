"""then: a generator function as a step, called again when it returns, and exact at every cut."""

import itertools
from collections import deque
from dataclasses import dataclass
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import after, key_of, keys_of, resumed, samples, through_json
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import Then
from wds_pipes.testing import check_resume


def each(items):
    yield next(items)


def each_in_a_loop(items):
    yield from items


def times(items, number=3):
    item = next(items)
    for _ in range(int(item["__key__"]) % number):
        yield item


def windows(items, size=3):
    window = list(itertools.islice(items, size))
    if len(window) == size:
        yield keys_of(window)
        items.put_back(*window[1:])


def sorted_chunk(items, size=4):
    chunk = list(itertools.islice(items, size))
    yield from sorted(chunk, key=lambda item: hash(item["__key__"][::-1]) % 7)


def length(item):
    return int(item["__key__"]) % 5 + 1


def packed(items, limit=9):
    """As many samples as the sum of their lengths lets into a pack."""
    pack, size = [], 0
    for item in items:
        size += length(item)
        if pack and size > limit:
            items.put_back(item)
            break
        pack.append(item)
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
    "each": each,
    "expanding": times,
    "windows": windows,
    "sorted chunks": sorted_chunk,
    "packing": packed,
    "framed": framed,
    "yields nothing": lambda items: iter(list(items)[:0]),
}


class Taken:
    """An iterator over a list, with put_back."""

    def __init__(self, items):
        self.items, self.place = list(items), 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.place == len(self.items):
            raise StopIteration
        self.place += 1
        return self.items[self.place - 1]

    def put_back(self, *items):
        self.place -= len(items)


def called_again(fn, items):
    """What a function yields, if it is called until there are no more items."""
    items, made = Taken(items), []
    while items.place < len(items.items):
        made += fn(items)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_resumes_exactly(name, urls):
    fn = FUNCTIONS[name]
    assert check_resume(lambda: samples(urls).then(fn))[0] == called_again(fn, samples(urls))


def of_table(table, *values):
    return table[sum(values) % len(table)]


def random_call(numbers, table):
    """It takes and holds up to 50 items and more, yields on the way, and puts some of them back."""
    held = []
    for turn in range(1 + table[0] % 3):
        held += itertools.islice(numbers, 1 + of_table(table, turn, len(held)))
        for number in range(of_table(table, held[-1]) % 2):
            yield turn, number, list(held)
        back = min(len(held) - 1, of_table(table, held[-1], 1) % (turn + 50))
        numbers.put_back(*held[len(held) - back :])
        del held[len(held) - back :]
        yield "back", turn


def random_loop(numbers, table):
    """What it yields depends on up to 50 items, and on how they begin and end."""
    last = deque(maxlen=table[0])
    for number in range(table[0] % 3):
        yield "before", number
    for value in numbers:
        for number in range(of_table(table, value, sum(last)) % 4):
            yield value, number, list(last)
        last.append(value)
    for number in range(table[-1] % 3):
        yield "after", number, list(last)


@pytest.mark.slow
@pytest.mark.parametrize("fn", [random_call, random_loop])
@settings(max_examples=15, deadline=None, database=None)
@given(table=st.lists(st.integers(0, 50), min_size=1, max_size=6), size=st.integers(1, 60))
def test_random_functions_resume_exactly(fn, table, size):
    fn = partial(fn, table=table)
    assert check_resume(lambda: Stream(Then(Given(range(size)), fn)))[0] == called_again(fn, range(size))


def test_it_is_read_as_far_as_it_was_used(urls):
    """A resume reads the items of the current call, from where they were."""
    pipe = samples(urls, shuffle=False).then(partial(windows, size=3))
    items = iter(pipe)
    for _ in range(9):
        next(items)
    state, taken = through_json(pipe.state_dict()), []

    def counting(sample):
        taken.append(sample["__key__"])
        return sample

    again = samples(urls, shuffle=False).map_samples(counting).then(partial(windows, size=3))
    state["graph"] = again.state_dict()["graph"]
    state["lanes"]["0"]["position"].insert(-1, {})
    again.load_state_dict(state)
    assert next(iter(again)) == next(items)
    assert len(taken) == 4, "the three of the current call, and a new one"


def test_a_call_that_takes_many_items_is_logged(caplog, monkeypatch):
    monkeypatch.setattr("wds_pipes.core.reads_again._MANY", 20)
    for fn, said in ((each, 0), (partial(sorted_numbers, size=19), 0), (each_in_a_loop, 1)):
        caplog.clear()
        list(Stream(Then(Given(range(50)), fn)))
        assert caplog.text.count("has taken 20 items, and a resume takes them all again") == said


def sorted_numbers(items, size):
    yield from sorted(itertools.islice(items, size))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda items: items.put_back(0, 2),
        lambda items: items.put_back(1, 0),
        lambda items: items.put_back([1]),
        lambda items: items.put_back(0, 1, 2, 3),
        lambda items: items.put_back(2, 2),
    ],
)
def test_only_the_last_items_can_be_put_back(wrong):
    """Others would be different ones after a resume."""

    def fn(items):
        list(itertools.islice(items, 3))
        yield wrong(items)

    with pytest.raises(ValueError, match="needs the last items that this call has taken"):
        list(Stream(Then(Given(range(9)), fn)))


@pytest.mark.parametrize("fn", [lambda items: iter("ab"), lambda items: [items.put_back(next(items))]])
def test_a_function_that_takes_nothing(fn):
    with pytest.raises(ValueError, match="returned and took no item, or put all of them back"):
        list(Stream(Then(Given(range(9)), fn)))
    assert list(Stream(Then(Given([]), fn))) == []


def test_the_length_is_known_if_it_says_so(urls):
    pipe = samples(urls, samples_per_shard=[3, 0, 5, 2, 4])
    assert len(wp.PipeLoader(pipe.then(sorted_chunk, keeps_count=True), batch_size=4)) == 4
    with pytest.raises(TypeError, match=r"then\(\) may change their number"):
        len(wp.PipeLoader(pipe.then(each), batch_size=4))
    with pytest.raises(AssertionError, match="keeps_count = True, and has yielded"):
        check_resume(lambda: pipe.then(times, keeps_count=True))


def test_wrong_functions(urls):
    with pytest.raises(TypeError, match="a generator function, one that yields items: it returned None"):
        next(iter(samples(urls).then(lambda items: None)))

    def broken(items):
        for item in items:
            if item["__key__"].endswith("3"):
                raise KeyError("no such thing")
            yield item

    with pytest.raises(KeyError) as caught:
        list(samples(urls, shuffle=False).then(broken))
    assert "raised by the function of then(), after it took sample '00000003' of shard" in caught.value.__notes__[0]
    bad = samples(urls).map_samples(lambda sample: 1 / 0).then(each)
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
        pipe = samples(urls, shuffle=False).map_samples(careful).then(partial(catching, wait=wait))
        items = after(pipe, 8)
        state = pipe.state_dict()
        with pytest.raises(ValueError, match="a bad sample"):
            next(items)
        assert pipe.state_dict() == state


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (partial(times, number=4), partial(times, number=2)),  # fewer items
        (partial(sorted_chunk, size=4), partial(sorted_chunk, size=3)),  # as many, after others
        (sorted_chunk, lambda items: list(items)[:0]),
    ],
)
def test_a_function_that_yields_something_else_after_a_resume(before, after, urls):
    pipe = samples(urls).then(before)
    items = iter(pipe)
    while pipe.state_dict()["lanes"]["0"]["position"][-1].get("yielded", 0) < 3:
        next(items)
    again = samples(urls).then(after)
    again.load_state_dict(pipe.state_dict())
    with pytest.raises(wp.StateError, match="does not yield after the same items"):
        next(iter(again))


def test_a_resume_without_the_items_of_the_call_is_refused(urls):
    make = lambda keep: samples(urls).filter_samples(keep).then(each)  # noqa: E731
    _, again = resumed(lambda: make(key_of), 1, lambda: make(lambda sample: False))
    with pytest.raises(wp.StateError, match="the steps before it must return the same items"):
        next(iter(again))


def test_all_samples_are_counted_at_the_end_of_an_epoch(urls):
    pipe = samples(urls, shuffle=False).filter_samples(lambda sample: int(sample["__key__"]) < 3).then(windows)
    assert len(list(pipe)) == 1
    assert pipe.counts() == {"delivered": 1, "filtered": 13, "skipped": 0, "dropped": 0}, "two made no window"


def subscripts(sample):
    """Mistake: a function of one item."""
    yield sample["__key__"]


def pairs_of_all(items):
    """Mistake: the last pair may lack its second item."""
    yield next(items), next(items)


def test_a_function_of_one_item_learns_what_it_gets():
    with pytest.raises(TypeError, match="calls fn with an iterator over the items: .* use map_samples"):
        list(Stream(Then(Given(list(range(5))), subscripts)))


@pytest.mark.parametrize("function", [pairs_of_all, lambda items: [next(items), next(items)]])
def test_a_function_that_meets_the_end_learns_what_to_write(function):
    with pytest.raises(RuntimeError) as caught:
        list(Stream(Then(Given(list(range(5))), function)))
    notes = [*getattr(caught.value, "__notes__", ()), *getattr(caught.value.__cause__, "__notes__", ())]
    assert any("Write next(items, None), or a for loop" in note for note in notes)


# What is left out


def some(item, numbers):
    """As many items as a table says."""
    return [item] * numbers[int(item["__key__"]) % len(numbers)]


class Some(wp.FlatMap):
    order_options = ("numbers",)

    def __init__(self, source, numbers):
        super().__init__(source)
        self.numbers = numbers

    def expand(self, item):
        return some(item, self.numbers)


wp.register_stage(Some)


def some_of_next(items, numbers):
    yield from some(next(items), numbers)


def none_of_a_chunk(items, numbers):
    """Calls that take several items, of which all or none are yielded."""
    chunk = list(itertools.islice(items, 3))
    yield from chunk if numbers[int(chunk[0]["__key__"]) % len(numbers)] else ()


LEAVING_OUT = {
    "flat map": lambda pipe, numbers: pipe.some(numbers),
    "then": lambda pipe, numbers: pipe.then(partial(some_of_next, numbers=numbers)),
    "chunks": lambda pipe, numbers: pipe.then(partial(none_of_a_chunk, numbers=numbers)),
    "filter": lambda pipe, numbers: pipe.filter_samples(lambda item: numbers[int(item["__key__"]) % len(numbers)]),
}


@pytest.mark.slow
@settings(max_examples=40, deadline=None, database=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from([*LEAVING_OUT]), st.lists(st.integers(0, 3), min_size=1)), max_size=3),
    lanes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    place=st.integers(0, 9),
)
def test_what_is_left_out_is_counted(urls, steps, lanes, place):
    """All samples are delivered or filtered, and those that come of one sample more than once are
    delivered more than once: at the end of an epoch, and after a resume on other lanes.
    """

    def make():
        pipe = samples(urls)
        for name, numbers in steps:
            pipe = LEAVING_OUT[name](pipe, numbers)
        return pipe

    pipe = make()
    delivered = list(pipe)
    counts = pipe.counts()
    assert counts["delivered"] == len(delivered)
    only_fewer = all(name == "filter" or max(numbers) < 2 or name == "chunks" for name, numbers in steps)
    if only_fewer:
        assert sum(counts.values()) == 14
    if not steps:
        return
    options = {"batch_size": 2, "collate": "list", "epoch_end": "exact"}
    loader = wp.PipeLoader(make(), lanes=lanes[0], **options)
    list(itertools.islice(loader, place))
    later = wp.PipeLoader(make(), lanes=lanes[1], **options)
    later.load_state_dict(through_json(loader.state_dict()))
    list(later)
    if only_fewer:
        assert sum(later.counts().values()) == 14
    if all(name != "chunks" for name, _ in steps):  # what is in a chunk depends on the lane
        assert later.counts() == counts


def test_what_the_function_counts_itself_is_not_counted_again(urls):
    class Odd(wp.FlatMap):
        @dataclass(slots=True)
        class At(wp.FlatMap.At):
            dropped: int = 0

        tallies = ("dropped",)
        order_options = ()

        def expand(self, sample):
            number = int(sample["__key__"])
            self.at.dropped += number % 2
            return [] if number % 3 or number % 2 else [sample]

    make = lambda: wp.register_stage(Odd)(samples(urls))  # noqa: E731
    pipe = make()
    assert len(list(pipe)) == 3
    assert pipe.counts() == {"delivered": 3, "filtered": 4, "skipped": 0, "dropped": 7}
    check_resume(make)


@pytest.mark.parametrize("one", [{"__key__": "a"}, "text", b"bytes"])
def test_one_item_in_place_of_a_list_is_refused(urls, one):
    """Its parts, such as the keys of a dict, would be the items."""
    with pytest.raises(TypeError, match=r"returned one item .*: return a list"):
        next(iter(samples(urls).then(lambda items: next(items) and one)))

    class One(wp.FlatMap):
        order_options = ()

        def expand(self, sample):
            return sample

    with pytest.raises(TypeError, match=r"expand\(\) of one\(\) returned one item \(tuple\)"):
        next(iter(wp.register_stage(One)(samples(urls).to_tuple("txt", "cls"))))
