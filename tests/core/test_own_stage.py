"""A user's own stage has all that the package's stages have: method, node, equal epochs, graph,
description. check_resume finds its mistakes.
"""

import copy
import pickle
from dataclasses import dataclass, field, make_dataclass

import pytest
from pipelines import after, through_json
from torch.utils.data import DataLoader
from torchdata.nodes import Loader

import wds_pipes as wp
from wds_pipes import datapipes, nodes, stages
from wds_pipes.core.stage import find_stage
from wds_pipes.core.state import read_count
from wds_pipes.testing import check_resume, make_shards


class TagSamples(wp.Stage):
    """Number the samples (functional name: ``tag_samples``)."""

    @dataclass(slots=True)
    class At:
        number: int = 0

    keeps_count = True
    order_options = ("first",)

    def __init__(self, source, start=0):
        super().__init__(source)
        self.first = start

    def run(self):
        for sample in self.source.items:
            self.at.number += 1
            yield {**sample, "tag": self.first + self.at.number - 1}

    @classmethod
    def describe(cls, entry, lane):
        return f"{read_count(entry.get('number', 0), 'number')} tagged"


wp.register_stage(TagSamples)
wp.register_stage(TagSamples)  # as where a notebook's cell runs again


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("own"), shards=4, samples=5)


def pipe(urls, **options):
    return wp.ShardList(urls, **options).open_shards().load_tar().group_by_key().tag_samples(100)


def test_the_graph_of_a_state_is_data_whatever_the_options_are(urls):
    """Names in a text, such as one that looks like a step with options, are text; a value of a type
    that JSON lacks stands as its repr.
    """
    odd = {"samples=9)": ["(", 0.5, None]}
    chain = pipe(urls).tag_samples(odd).tag_samples(1j).shuffle_buffer(3).batch_samples(2)
    state = through_json(chain.state_dict())
    names = ["shard_list", "open_shards", "load_tar", "group_by_key"]
    tags = [["tag_samples", {"first": value}] for value in (100, odd, "1j")]
    assert state["graph"] == [*([name] for name in names), *tags, ["shuffle_buffer", {"size": 3}], ["batch_samples"]]
    chain.load_state_dict(state)
    with pytest.raises(
        wp.StateError, match=r"step 6 .* was tag_samples\(first=\{'samples=9\)'.*, and of this one is tag"
    ):
        pipe(urls).tag_samples({}).tag_samples(1j).shuffle_buffer(3).batch_samples(2).load_state_dict(state)


def test_pipes_and_nodes_of_it_can_be_pickled(urls):
    """A pickle names the stage, so the process that loads it imports the stage's module first, also
    one that is not forked.
    """
    tags = list(range(100, 120))
    again = pickle.loads(pickle.dumps(pipe(urls)))
    assert type(again) is type(pipe(urls))
    assert repr(again) == repr(pipe(urls))
    assert [sample["tag"] for sample in copy.deepcopy(again)] == [sample["tag"] for sample in again] == tags
    workers = DataLoader(pipe(urls), batch_size=None, num_workers=1, multiprocessing_context="forkserver")
    assert [sample["tag"] for sample in workers] == tags
    chain = nodes.TagSamples(nodes.GroupByKey(nodes.LoadTar(nodes.OpenShards(nodes.ShardList(urls)))), start=100)
    node = pickle.loads(pickle.dumps(chain))
    assert type(node) is nodes.TagSamples is nodes.TagSamples
    assert [sample["tag"] for sample in Loader(node)] == tags


class Louder(datapipes.ShuffleBuffer):
    """A user's subclass of a pipe of the package."""


def test_a_subclass_of_a_pipe_keeps_its_class(urls):
    mine = Louder(wp.ShardList(urls).open_shards().load_tar().group_by_key(), 3)
    for again in (copy.copy(mine), copy.deepcopy(mine), pickle.loads(pickle.dumps(mine))):
        assert type(again) is Louder


def test_it_is_a_method_and_a_node(urls):
    tags = list(range(100, 120))
    assert [sample["tag"] for sample in pipe(urls)] == tags
    chain = nodes.GroupByKey(nodes.LoadTar(nodes.OpenShards(nodes.ShardList(urls))))
    assert [sample["tag"] for sample in Loader(nodes.TagSamples(chain, start=100))] == tags
    with pytest.raises(TypeError, match=r"'strt'. Did you mean start\?"):
        nodes.TagSamples(chain, strt=100)
    with pytest.raises(AttributeError, match="TagSample"):
        nodes.TagSample(chain)


class EveryThird(wp.Stage):
    """Mistake: fewer items than it takes."""

    keeps_count = True

    def run(self):
        for sample in self.source.items:
            if sample["tag"] % 3 == 0:
                yield sample


def test_a_step_of_the_users_that_does_not_keep_the_count_is_named(urls):
    """Beside samples_per_shard, which may be wrong as well."""
    counted = wp.register_stage(EveryThird)(pipe(urls, samples_per_shard=5).shuffle_buffer(3))
    said = r"than samples_per_shard says.* Or tag_samples\(\) has keeps_count = True, and yields.* Or every_third\(\)"
    with pytest.raises(wp.ShardError, match=said) as caught:
        list(wp.PipeLoader(counted, batch_size=3, rank=0, world_size=2))
    assert str(caught.value).count("keeps_count = True") == 2, "none of the package's own steps"


def test_it_is_shown_and_described(urls):
    source = pipe(urls)
    assert str(source).endswith(".group_by_key().tag_samples(start=100)")
    after(source, 7)
    assert "7 tagged" in wp.describe_state(source.state_dict())
    with pytest.raises(wp.StateError, match=r"first=100\), and of this one .*first=1\)"):
        wp.ShardList(urls).open_shards().load_tar().group_by_key().tag_samples(1).load_state_dict(source.state_dict())


@pytest.mark.parametrize("name", ["start", "items"])  # a method, and what only a running copy has
def test_an_attribute_with_a_name_of_the_package_is_refused(urls, name):
    class SetName(TagSamples):
        def __init__(self, source):
            super().__init__(source)
            setattr(self, name, 1)

    with pytest.raises(TypeError, match=f"sets self.{name}, which the package uses itself"):
        wp.register_stage(SetName)(wp.ShardList(urls))


@dataclass(slots=True)
class NoDefault:
    number: int


@dataclass(slots=True)
class WithList:
    keys: list = field(default_factory=list)


@pytest.mark.parametrize(
    ("at", "said"),
    [
        (NoDefault, "the field 'number' has no default"),
        (WithList, "the field 'keys' has a default_factory"),
        (type("At", (), {"number": 0}), r"is not a dataclass: write @dataclass\(slots=True\) above it"),
        (type("At", (wp.FlatMap.At,), {"number": 0}), "is not a dataclass"),  # also if only its base is one
        (make_dataclass("At", [("number", int, 0)]), "must derive from FlatMap.At, whose fields it lacks"),
    ],
)
def test_a_position_is_checked_when_the_class_is_defined(at, said):
    """Its defaults are the beginning, so each field has one, which is no container."""
    with pytest.raises(TypeError, match=rf"Wrong.At.* {said}"):
        type(wp.FlatMap)("Wrong", (wp.FlatMap,), {"At": at})


class NotRegistered(wp.Stage):
    """Mistake: its class is used as that of a pipe."""

    def run(self):
        yield from self.source  # and a mistake: not its items


class NotRegisteredRows(wp.RowSource):
    """Mistake: the same for a source."""

    def read(self, start, stop):
        return range(start, stop)


@pytest.mark.parametrize(
    ("use", "error", "said"),
    [
        (NotRegistered, TypeError, r"not TagSamples: call the method of a pipe, pipe.not_registered\(...\), after reg"),
        (
            lambda pipe: stages.Then(pipe, list),
            TypeError,
            r"needs a stage as its source, not TagSamples: .* pipe.then\(...\)$",
        ),
        (lambda pipe: pipe.not_registered(), AttributeError, r"'not_registered' yet: call register_stage\(NotReg"),
        (lambda pipe: pipe.not_registered_rows(3), AttributeError, "a source: call the class that register_stage"),
        (lambda pipe: NotRegisteredRows(3).shuffle_buffer(2), AttributeError, "the class that register_stage"),
        (lambda pipe: NotRegisteredRows(3).path, AttributeError, "object has no attribute 'path'$"),
        (lambda pipe: wp.PipeLoader(NotRegisteredRows(3)), TypeError, "the class that register_stage"),
        (lambda pipe: list(NotRegisteredRows(3)), TypeError, "NotRegisteredRows is a stage, a recipe"),
        (lambda pipe: wp.register_stage(type("Next", (type(pipe),), {})), TypeError, "a class of pipes"),
    ],
)
def test_a_stage_where_a_pipe_is_needed_is_named(use, error, said, urls):
    """And what to write instead."""
    with pytest.raises(error, match=said):
        use(pipe(urls))


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({}, r"in run\(\), iterate over self.source.items"),
        ({"run": lambda self: None}, r"run\(\) of Wrong must be a generator.* returned None"),
        ({"run": lambda self: [1, 2]}, r"run\(\) of Wrong must be a generator.* returned \[1, 2\]"),
    ],
)
def test_what_run_yields_is_checked(members, said, urls):
    """A list of all items would resume at its end."""
    kind = type("Wrong", (NotRegistered,), members)
    with pytest.raises(TypeError, match=said):
        next(iter(wp.register_stage(kind)(pipe(urls))))


@pytest.mark.parametrize("wrong", ["keep_count", "order_option", "scopes", "count_items"])
def test_a_misspelt_declaration_is_named(wrong):
    """It would say nothing, silently."""
    with pytest.raises(TypeError, match=rf"Wrong.{wrong} says nothing to the package. Did you mean "):
        type("Wrong", (TagSamples,), {wrong: True})


def test_names_that_only_resemble_a_declaration_are_allowed():
    type("Right", (TagSamples,), {"slope": 1, "count": 2, "keep": 3, "items_seen": 4, "order": 5})


@pytest.mark.parametrize("wrong", [int, 3, len])
def test_what_is_no_stage_is_not_registered(wrong):
    with pytest.raises(TypeError, match=r"register_stage\(\) takes a class that is derived from wds_pipes.Stage"):
        wp.register_stage(wrong)


def test_a_class_with_the_name_of_a_built_in_does_not_take_its_place(urls):
    """A state is described by the stage of the package."""
    source = wp.ShardList(urls).open_shards().load_tar().group_by_key().shuffle_buffer(3)
    after(source, 5)
    told = wp.describe_state(source.state_dict())
    assert "shuffle at 5" in told

    class ShuffleBuffer(wp.Stage):
        def run(self):
            yield from self.source.items

    assert wp.describe_state(source.state_dict()) == told
    with pytest.raises(RuntimeError, match="pipes have 'shuffle_buffer' already"):
        wp.register_stage(ShuffleBuffer)
    assert find_stage("shuffle_buffer") is stages.ShuffleBuffer


class NoRun(wp.Stage):
    """Mistake: nothing to run."""


class NoSuper(wp.Stage):
    """Mistake: no ``super().__init__``."""

    def __init__(self, source, count=3):
        self.count = count

    def run(self):
        yield from self.source.items


class WrongOption(NoSuper):
    """Mistake: an option that is stored under another name."""

    order_options = ("number",)

    def __init__(self, source):
        wp.Stage.__init__(self, source)
        self.count = 3


class OneString(WrongOption):
    """Mistake: a comma is missing."""

    order_options = "count"


class NoCount(wp.RowSource):
    """Mistake: no ``super().__init__``."""

    def __init__(self, path):
        self.path = path

    def read(self, start, stop):
        return range(start, stop)


MISTAKES = [
    (NoRun, r"NoRun defines no run\(self\)"),
    (NoSuper, r"NoSuper.__init__ must call super\(\).__init__\(source\)"),
    (WrongOption, "WrongOption.order_options names 'number', and __init__ sets no self.number"),
    (OneString, r"OneString.order_options is the string 'count'.*write \('count',\)"),
    (NoCount, r"NoCount.__init__ must call super\(\).__init__\(count\)"),
]


@pytest.mark.parametrize(("kind", "said"), MISTAKES)
def test_what_a_stage_lacks_is_told_when_it_is_built(kind, said, urls):
    of = wp.register_stage(kind)
    with pytest.raises(TypeError, match=said):
        of(wp.ShardList(urls))
    if kind is not NoRun:  # which is not a node
        with pytest.raises(TypeError, match=said):
            getattr(nodes, kind.__name__)(nodes.ShardList(urls))


class SkipFirst(wp.Stage):
    """Leave out the first samples of a lane. Its position has the name of a count."""

    order_options = ("count",)

    @dataclass(slots=True)
    class At:
        skipped: int = 0

    def __init__(self, source, count):
        super().__init__(source)
        self.count = count

    def run(self):
        for sample in self.source.items:
            if self.at.skipped < self.count:
                self.at.skipped += 1
            else:
                yield sample


class SkipFirstOfItems(SkipFirst):
    scope = "item"


class SkipFirstForgotten(SkipFirst):
    tallies = ("skipped",)


def skipping(urls, kind):
    return wp.register_stage(kind)(wp.ShardList(urls).open_shards().load_tar().group_by_key(), 2)


def test_a_position_with_the_name_of_a_count_stays_on_other_lanes(urls):
    make = lambda: skipping(urls, SkipFirst)  # noqa: E731
    first, second = (wp.PipeLoader(make(), lanes=lanes) for lanes in (1, 2))
    items = iter(first)
    came = [next(items) for _ in range(3)]
    second.load_state_dict(first.state_dict())
    whole = list(wp.PipeLoader(make(), lanes=1))
    assert sorted(sample["__key__"] for sample in [*came, *second]) == sorted(sample["__key__"] for sample in whole)
    check_resume(make)


@pytest.mark.parametrize("kind", [SkipFirstOfItems, SkipFirstForgotten])
def test_check_resume_finds_what_is_lost_on_other_lanes(kind, urls):
    with pytest.raises(AssertionError, match="on two, on three and on one again, .* were lost"):
        check_resume(lambda: skipping(urls, kind))


class ShowsSeen(wp.Stage):
    """Appends to a list in its position, in place."""

    @dataclass(slots=True)
    class At:
        seen: list | None = None

    keeps_count = True
    scope = "lane"
    order_options = ()

    def run(self):
        self.at.seen = self.at.seen or []
        for sample in self.source.items:
            self.at.seen.append(sample["__key__"])
            yield {**sample, "seen": list(self.at.seen)}


def test_a_list_that_a_position_changes_in_place_is_that_of_its_moment(urls):
    """A loader that has read ahead says where the caller stands."""
    source = wp.ShardList(urls).open_shards().load_tar().group_by_key()
    wp.register_stage(ShowsSeen)
    pipe = source.shows_seen()
    whole = list(wp.PipeLoader(pipe, batch_size=2, collate=list))
    for count in (1, 3, 9):
        loader = wp.PipeLoader(pipe, batch_size=2, collate=list)
        after(loader, count)
        again = wp.PipeLoader(pipe, batch_size=2, collate=list)
        again.load_state_dict(through_json(loader.state_dict()))
        assert list(again) == whole[count:]


def test_a_list_of_a_loaded_position_is_that_of_its_moment(urls):
    """A loader that goes on from a state, and has read ahead, says where the caller stands."""
    wp.register_stage(ShowsSeen)
    pipe = wp.ShardList(urls).open_shards().load_tar().group_by_key().shows_seen()

    def loaded(state):
        loader = wp.PipeLoader(pipe, batch_size=2, lanes=2, collate=list)
        loader.load_state_dict(through_json(state))
        return loader

    first = wp.PipeLoader(pipe, batch_size=2, lanes=2, collate=list)
    after(first, 4)
    state = first.state_dict()
    rest = list(loaded(state))
    second = loaded(state)
    after(second, 1)
    assert list(loaded(second.state_dict())) == rest[1:]


def test_tallies_are_fields_that_count(urls):
    with pytest.raises(TypeError, match="Wrong.tallies has 'number'"):
        type("Wrong", (TagSamples,), {"tallies": ("number",)})
    with pytest.raises(TypeError, match=r"class At\(wp.FlatMap.At\): skipped: int = 0"):
        type("Wrong", (wp.FlatMap,), {"tallies": ("skipped",)})
    assert type("Right", (wp.FlatMap,), {"tallies": ("filtered",)}).tallies == ("filtered",)
