"""check_resume, the kit for tests of stages: which mistakes it finds and what it accepts."""

import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from sources import Given
from torch.utils.data.datapipes.iter import IterableWrapper

import wds_pipes as wp
from wds_pipes import stages
from wds_pipes.core import chain
from wds_pipes.core.lane import Lane
from wds_pipes.core.stage import Ended, Stage
from wds_pipes.core.stream import Stream
from wds_pipes.testing import _check_lanes, check_resume, make_shards, same


class First(Stage):
    """The first samples of an epoch. Its position has their number, but not that it has ended."""

    order_options = ("count",)

    @dataclass
    class At:
        came: int = 0

    def __init__(self, source, count):
        super().__init__(source)
        self.count = count

    def run(self):
        while self.at.came < self.count and (item := next(self.source.items, None)) is not None:
            self.at.came += 1
            yield item


class UpTo(Stage):
    """The samples up to a certain one; its position does not show that it has ended."""

    order_options = ("last",)

    def __init__(self, source, last):
        super().__init__(source)
        self.last = last

    def run(self):
        for item in self.source.items:
            if item > self.last:
                return
            yield item


class Unseen(Stage):
    """Samples that did not come before in this lane, with the ones seen in an attribute made in
    __init__. Position: none that it needs in these tests.
    """

    order_options = ()

    def __init__(self, source, seen):
        super().__init__(source)
        self.seen = seen

    def run(self):
        for item in self.source.items:
            if item not in self.seen:
                self.seen.add(item)
                yield item


class Shared:
    """A set that is not copied."""

    def __init__(self):
        self.items = set()

    def __contains__(self, item):
        return item in self.items

    def add(self, item):
        self.items.add(item)


class Drawn(Stage):
    """Numbers of a generator that all running copies share."""

    def __init__(self, source):
        super().__init__(source)
        self.rng = random.Random(0)

    def run(self):
        for item in self.source.items:
            yield item, self.rng.random()


GIVEN = [0, 1, 2, 3, 4, 9, 0, 1, 2]  # after the 9 come items that UpTo(5) would yield


@pytest.mark.parametrize("stage", [lambda source: First(source, 4), lambda source: UpTo(source, 5)])
def test_a_stage_may_end_before_its_source(stage):
    """The position of every stage has its end, so that a partial batch after it can be resumed."""
    assert len(check_resume(lambda: Stream(stage(Given(GIVEN))))[0]) < 9
    check_resume(lambda: Stream(stages.BatchSamples(stages.ShuffleBuffer(stage(Given(GIVEN)), 3), 3, collate="list")))
    check_resume(lambda: Stream(stages.ShuffleBuffer(stages.BatchSamples(stage(Given(GIVEN)), 3, collate="list"), 2)))
    check_resume(
        lambda: Stream(
            stages.BatchSamples(stages.BatchSamples(stage(Given(GIVEN)), 3, collate="list"), 2, collate="list")
        )
    )


def test_a_lost_end_is_found(monkeypatch):
    """It shows in the position of a partial batch."""
    monkeypatch.setattr(chain, "Ended", type("NoEnd", (), {}))
    with pytest.raises(AssertionError, match="cut at 3: ") as caught:
        check_resume(lambda: Stream(UpTo(Given(GIVEN), 5)))
    assert "batch_samples(2, collate='list') after the pipeline" in caught.value.__notes__[0]


def test_lanes_have_containers_of_their_own():
    """Sets, dicts and lists made in __init__ belong to one run, also within one process; options
    are shared.
    """
    check_resume(lambda: Stream(Unseen(Given([0, 1, 2, 3, 4]), set())), epochs=1)
    source, large = Given([0]), {number: [] for number in range(3)}
    recipe = Unseen(source, set())
    recipe.deep, recipe.both, recipe.name = [large, {"deque": large}], large, ("kept", large)
    recipe.loop = loop = []
    loop.append(loop)
    running = recipe.open(Lane(0, 0))
    assert running.deep == recipe.deep
    assert running.deep is not recipe.deep
    assert running.deep[0] is running.deep[1]["deque"] is running.both is not large
    assert running.both[0] is not large[0]
    assert running.name is recipe.name
    assert running.loop[0] is running.loop is not loop
    assert running.source.taken is source.taken  # named in Given.shared


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_set_of_a_stage_in_a_loader(lanes, tmp_path):
    """All samples come, on one lane and on two, in every epoch."""
    wp.register_stage(UnseenTexts)
    pipe = (
        wp.ShardList(make_shards(tmp_path, shards=2, samples=6, fields={"txt": lambda rng, number: str(number % 6)}))
        .open_shards()
        .load_tar()
        .group_by_key()
    )
    loader = wp.PipeLoader(pipe.unseen_texts(), lanes=lanes)
    for _ in range(2):
        assert len(list(loader)) == 6 * lanes


class UnseenTexts(Stage):
    """Samples with a text that did not come before in their lane."""

    def __init__(self, source):
        super().__init__(source)
        self.seen = set()

    def run(self):
        for sample in self.source.items:
            if sample["txt"] not in self.seen:
                self.seen.add(sample["txt"])
                yield sample


@pytest.mark.parametrize("broken", [lambda: Unseen(Given(range(12)), Shared()), lambda: Drawn(Given(range(12)))])
def test_an_object_that_lanes_share_is_found(broken):
    with pytest.raises(AssertionError, match=r"item 0 of lane 0 of 2 is .*Make what a stage changes"):
        _check_lanes(lambda: Stream(broken()))
    with pytest.raises(AssertionError):
        check_resume(lambda: Stream(broken()))


def test_lanes_over_pipes_of_torchs(urls):
    """torch's own pipes have one iterator at a time, so each lane has copies of them."""
    make = lambda urls: IterableWrapper(urls).map(str).open_shards().load_tar()  # noqa: E731
    check_resume(lambda: wp.mix({"a": make(urls[:1]), "b": make(urls[:2])}))
    pipe = wp.mix({"a": make(urls).group_by_key()})
    keys = [[batch["__key__"] for batch in wp.PipeLoader(pipe, lanes=lanes)] for lanes in (1, 2)]
    assert sorted(keys[0]) == sorted(keys[1]) == [f"{number:08d}" for number in range(14)]


BROKEN = """
from wds_pipes.core.stream import Stream
from wds_pipes.testing import check_resume
from sources import Given
from wds_pipes.core import chain
from wds_pipes.core.stage import Stage

class Forgets(Stage):
    def run(self):
        held = []
        for item in self.source.items:
            held.append(item)
            if len(held) == 2:
                yield from held
                held = []

assert False, "python -O leaves this out"
try:
    check_resume(lambda: Stream(Forgets(Given(range(6)))))
except AssertionError as error:
    print("found:", error)
"""


def one_call_after_another(seen):
    """A filter that remembers what came, in an object that all pipes share."""
    return lambda sample: not (sample["__key__"] in seen or seen.add(sample["__key__"]))


def test_a_function_that_remembers_across_pipes_is_found(urls):
    """Each of its later runs yields nothing, so all of them are equal."""
    unseen = one_call_after_another(set())
    with pytest.raises(AssertionError, match=r"yielded 14 items when it first ran, and 0 when make\(\) had built it"):
        check_resume(
            lambda: wp.ShardList(urls, empty_check=False).open_shards().load_tar().group_by_key().filter_samples(unseen)
        )


def test_a_function_of_a_built_in_step_is_blamed_for_its_scope(urls):
    """Its user cannot declare another scope."""
    numbers = iter(range(1000))
    with pytest.raises(AssertionError, match="or pass seed_all=True") as caught:
        check_resume(lambda: wp.ShardList(urls).open_shards().map_samples(lambda shard: {"number": next(numbers)}))
    assert "Declare scope" not in str(caught.value)


def test_items_are_shown_where_they_differ():
    """Also if they are long."""
    count = iter(range(1000))
    with pytest.raises(AssertionError, match=r"item 0 is \.\.\. x.*'\d+'\], not \.\.\. x.*'\d+'\]\. What the stage"):
        check_resume(lambda: Stream(Named(Given([0]), count)))


class Named(Stage):
    """A long text, then a number that is never the same again."""

    order_options = ()

    def __init__(self, source, count):
        super().__init__(source)
        self.count = count

    def run(self):
        for _ in self.source.items:
            yield ["x " * 500, str(next(self.count))]


def test_a_stage_that_does_not_say_which_options_decide_is_found(urls):
    """A state of another count would be accepted, silently."""

    class Declared(First):
        order_options = ()

    class Undeclared(Stage):
        def __init__(self, source, count):
            super().__init__(source)
            self.count = count

        def run(self):
            yield from self.source.items

    check_resume(lambda: Stream(Declared(Given([0, 1]), 1)))
    with pytest.raises(AssertionError, match=r"Undeclared takes count, and .* as in order_options = \('count',\)"):
        check_resume(lambda: Stream(Undeclared(Given([0, 1]), 1)))


def test_nan_equals_nan():
    """Otherwise check_resume would report samples that are equal."""
    for make in (float, np.float16, lambda text: np.array([1, float(text)]), lambda text: torch.tensor(float(text))):
        assert same({"x": [make("nan")]}, {"x": [make("nan")]})
        assert not same(make("nan"), make("1"))


def test_check_resume_works_without_assert_statements():
    """Under ``python -O``, which leaves them out."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent / 'support')!r})\n{BROKEN}"
    done = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("found: cut at 1: "), done.stdout


def test_an_ended_mark_is_a_mark():
    """So code that unpacks a mark need not know its class."""
    own, before = Ended((1, 2), None)
    assert (own, before) == ((1, 2), None)


# What is found in positions, and in what stages declare

SAMPLES = [{"__key__": f"key-{number}", "txt": f"text number {number}".encode()} for number in range(24)]


def at(**defaults):
    """A class At with these fields."""
    return dataclass(slots=True)(type("At", (), {"__annotations__": dict.fromkeys(defaults, object), **defaults}))


class HeldSample(Stage):
    """Mistake: a sample in the position."""

    At = at(count=0, held=None)

    def run(self):
        for item in self.source.items:
            self.at.held = item
            yield item


class HeldText(Stage):
    """Mistake: the text of a sample in the position."""

    At = at(previous="")

    def run(self):
        for item in self.source.items:
            before, self.at.previous = self.at.previous, item["txt"].decode()
            yield {**item, "previous": before}


class AllKeys(Stage):
    """Mistake: all keys in the position."""

    At = at(keys="")

    def run(self):
        for item in self.source.items:
            if item["__key__"] not in self.at.keys.split():
                self.at.keys += item["__key__"] + " "
                yield item


class Short(Stage):
    """Mistake: a mark with one value for two fields."""

    At = at(first=0, second=0)

    def run(self):
        for item in self.source.items:
            self.at.second += 1
            yield item

    def mark(self):
        return (self.at.first,), self.source.mark()


class Changes(Stage):
    """Mistake: the same mark each time, changed in place."""

    def __init__(self, source):
        super().__init__(source)
        self.taken = []

    def run(self):
        for item in self.source.items:
            self.taken[:] = self.source.mark()
            yield item

    def mark(self):
        return (), self.taken


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (HeldSample, "the position of held_sample has a dict in its field 'held'"),
        (HeldText, "the position of held_text has data in its field 'previous'"),
        (AllKeys, "the position of all_keys grows with the data, in its field 'keys'"),
        (Short, "mark() of short returns 1 values of its own, and its At has 2"),
        (
            Changes,
            "mark() of changes must return a tuple of two tuples that never change",
        ),
    ],
)
def test_a_mistake_in_the_position_is_named(kind, said):
    with pytest.raises(AssertionError) as caught:
        check_resume(lambda: Stream(kind(Given(SAMPLES))))
    assert str(caught.value).startswith(said), caught.value
    assert str(caught.value).endswith("See RepeatSamples in tutorial 09.")


@pytest.mark.parametrize("around", [lambda chain: wp.mix({"a": chain}), lambda chain: chain.interleave_shards(2)])
def test_also_before_a_step_that_runs_chains(around, tmp_path):
    """A mix and interleave_shards have positions of whole chains in theirs."""
    held = wp.register_stage(type("HeldBefore", (HeldText,), {"scope": "window"}))
    urls = make_shards(tmp_path, shards=2, samples=3)
    with pytest.raises(AssertionError, match="the position of held_before has data in its field 'previous'"):
        check_resume(lambda: around(held(wp.ShardList(urls).open_shards().load_tar().group_by_key())))


class SomeKept(Stage):
    """Mistake: not as many as it takes."""

    keeps_count = True

    def run(self):
        for number, item in enumerate(self.source.items):
            if number != 5:
                yield item


class Ends(Stage):
    """Mistake: it ends before its source does."""

    keeps_count = True
    At = at(came=0)

    def run(self):
        while self.at.came < 5:
            self.at.came += 1
            yield next(self.source.items)


class Repeats(Stage):
    """Mistake: it holds the item that it repeats."""

    scope = "item"
    At = at(given=0)

    def run(self):
        self.before = self.source.mark()
        for item in self.source.items:
            while self.at.given < 3:
                self.at.given += 1
                yield item
            self.at.given, self.before = 0, self.source.mark()

    def mark(self):
        return self._own(self.at), self.before


class Numbers(Stage):
    """Mistake: each item has its number in the lane."""

    keeps_count = True
    scope = "item"
    At = at(given=0)

    def run(self):
        for item in self.source.items:
            self.at.given += 1
            yield {**item, "number": self.at.given}


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Numbers, 'numbers has scope = "item", and its item 1 depends on other items than number 1 of'),
        (SomeKept, "some_kept has keeps_count = True, and has yielded 23 items of the 24 that it took. "),
        (Ends, "ends has keeps_count = True, and ended before its source. "),
        (Repeats, 'repeats has scope = "item", and its mark() returns an earlier position of its source. '),
    ],
)
def test_a_wrong_declaration_is_named(kind, said):
    with pytest.raises(AssertionError) as caught:
        check_resume(lambda: Stream(kind(Given(SAMPLES))))
    assert str(caught.value).startswith(said)


class Forgets(Stage):
    """Mistake: it yields from what it holds."""

    def run(self):
        for item in self.source.items:
            other = next(self.source.items)
            yield item
            yield other


def test_the_first_cut_that_fails_is_reported_and_the_state_is_last():
    with pytest.raises(AssertionError) as caught:
        check_resume(lambda: Stream(Forgets(Given(SAMPLES))))
    said = str(caught.value)
    assert said.startswith("cut at 1: item 1 is {'__key__': 'key-2', ")
    assert "was something made in __init__ changed" in said
    assert "See RepeatSamples in tutorial 09. The state: " in said
    assert said.endswith('"position": [{"number": 2}, {}]}}}')


class Refuses(Stage):
    """Mistake: a bound that its own positions exceed."""

    At = at(came=0)

    def run(self):
        for item in self.source.items:
            self.at.came += 1
            yield item

    def problem(self, at):
        return "too many" if at.came > 3 else None


def test_a_stage_that_refuses_its_own_position_is_named():
    with pytest.raises(AssertionError) as caught:
        check_resume(lambda: Stream(Refuses(Given(SAMPLES))))
    said = str(caught.value)
    assert said.startswith("cut at 4: problem() or the types of At of refuses refuse its own position")
    assert "too many" in said
    assert "one that begins at 0 is a count, never negative and never a fraction" in said
    assert "untouched checkpoint" not in said
