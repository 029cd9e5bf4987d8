"""The kit for tests of stages: what check_resume finds in positions and in what stages declare,
and how it says so.
"""

from dataclasses import dataclass

import pytest
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stage import Stage
from wds_pipes.core.stream import Stream
from wds_pipes.testing import check_resume, make_shards

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
