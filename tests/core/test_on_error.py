"""on_error= by word, by the class of the error, and by a function."""

import errno
import resource
from functools import partial

import pytest
from pipelines import keys_of, loaded, samples
from servers.process import free_port

import wds_pipes as wp
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

BROKEN = ["00000002", "00000005", "00000008"]


class OddError(Exception):
    """An error of a user's function."""


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("errors"), shards=2, samples=6)


def failing(kind, sample):
    if sample["__key__"] in BROKEN:
        raise kind("it is odd")
    return sample


def mapped(urls, kind, on_error, **options):
    return samples(urls, shuffle=False).map_samples(lambda sample: failing(kind, sample), on_error=on_error, **options)


KEPT = [f"{number:08d}" for number in range(12) if f"{number:08d}" not in BROKEN]


@pytest.mark.parametrize("kind", [ValueError, KeyError, OSError, OddError, wp.SampleError])
def test_skip_skips_errors_of_the_data(kind, urls):
    pipe = mapped(urls, kind, "skip")
    assert keys_of(pipe) == KEPT
    assert pipe.counts()["skipped"] == 3


@pytest.mark.parametrize("kind", [NameError, TypeError, AttributeError, ImportError, NotImplementedError])
def test_skip_does_not_swallow_mistakes_in_the_code(kind, urls):
    with pytest.raises(kind, match="it is odd") as caught:
        list(mapped(urls, kind, "skip"))
    assert any("pass on_error={Exception: 'skip'}" in note for note in caught.value.__notes__)
    for rule in ({Exception: "skip"}, {kind: "skip"}, lambda error: "skip"):
        assert keys_of(mapped(urls, kind, rule)) == KEPT


def test_too_many_open_files_are_no_fault_of_a_shard(urls):
    pipe = wp.ShardList(urls[0]).open_shards(on_error="skip").load_tar(on_error="skip")
    assert len(list(pipe)) == 12  # so that nothing is imported later
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(wp.ShardError, match="Too many open files") as caught:
            list(pipe)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert caught.value.__notes__ == ["on_error='skip' does not skip it, since it is no fault of one shard or sample."]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES])
def test_what_the_system_refuses_is_no_fault_of_a_sample(number, urls):
    with pytest.raises(OSError, match="it is odd"):
        list(mapped(urls, partial(OSError, number), "skip"))


@pytest.mark.parametrize("url", ["htps://host/x.tar", "http://127.0.0.1:{port}/x.tar"])
def test_a_store_that_cannot_be_reached_is_no_fault_of_a_shard(url):
    """Its protocol is not known, or it refuses connections."""
    shards = wp.ShardList(url.format(port=free_port()))
    pipe = shards.open_shards(on_error="skip", retries=1, timeout_seconds=10)
    with pytest.raises(wp.ShardError, match=r"Protocol not known|connect"):
        list(pipe.load_tar(on_error="skip"))


def test_memory_errors_are_always_raised(urls):
    for rule in ("skip", {Exception: "skip"}, lambda error: "skip"):
        with pytest.raises(MemoryError):
            list(mapped(urls, MemoryError, rule))


def test_a_class_that_is_not_listed_is_raised(urls):
    with pytest.raises(OddError):
        list(mapped(urls, OddError, {ValueError: "skip", OSError: "skip"}))
    with pytest.raises(UnicodeError):  # the nearest class decides
        list(mapped(urls, UnicodeError, {ValueError: "skip", UnicodeError: "raise"}))
    assert keys_of(mapped(urls, UnicodeError, {ValueError: "skip"})) == KEPT


def test_the_most_special_class_decides(tmp_path):
    """Also if it is that of a cause: a ShardError is an OSError itself."""
    missing = str(tmp_path / "gone.tar")
    pipe = lambda rule: wp.ShardList([missing]).open_shards(on_error=rule).load_tar()  # noqa: E731
    for general in (OSError, Exception):
        assert list(pipe({general: "raise", FileNotFoundError: "skip"})) == []
        with pytest.raises(wp.ShardError):
            list(pipe({general: "skip", FileNotFoundError: "raise"}))
    with pytest.raises(wp.ShardError):
        list(pipe({FileNotFoundError: "skip", wp.ShardError: "raise"}))


def test_only_a_rule_that_skips_nothing_keeps_the_count(urls):
    pipe = samples(urls, samples_per_shard=6)
    kept = pipe.map_samples(dict, on_error={OddError: "raise"})
    assert len(list(wp.PipeLoader(kept, batch_size=2, epoch_end="drop"))) == 6
    with pytest.raises(ValueError, match=r"map_samples\(on_error=...\) changes their number"):
        wp.PipeLoader(pipe.map_samples(len, on_error={OddError: "skip"}), batch_size=2, epoch_end="drop")


@pytest.mark.parametrize("rule", ["raise", {FileNotFoundError: "skip"}, lambda error: "raise"])
def test_a_shard_that_was_changed_is_a_state_error_with_any_rule(rule, tmp_path):
    [url] = make_shards(tmp_path, shards=1, samples=6)
    make = lambda: wp.ShardList([url]).open_shards().load_tar(on_error=rule)  # noqa: E731
    pipe = make()
    items = iter(pipe)
    next(items), next(items)
    state = pipe.state_dict()
    place = state["lanes"]["0"]["position"][-1]["offset"]
    with open(url, "r+b") as file:
        file.seek(place)
        file.write(b"\xff" * 512)
    again = loaded(make(), state)
    with pytest.raises(wp.StateError, match="no member starts there"):
        list(again)


def test_a_function_decides_by_the_error(urls):
    seen = []

    def rule(error):
        seen.append(error)
        return "raise" if len(seen) == 3 else "skip"

    with pytest.raises(OddError):
        list(mapped(urls, OddError, rule))
    assert [type(error) for error in seen] == [OddError] * 3


def test_a_function_that_returns_something_else(urls):
    with pytest.raises(TypeError, match=r"must return 'raise' or 'skip'.*returned True"):
        list(mapped(urls, OddError, lambda error: True))


def test_errors_of_the_package_and_their_causes(urls, tmp_path):
    missing = str(tmp_path / "gone.tar")
    for rule in ({wp.ShardError: "skip"}, {FileNotFoundError: "skip"}, {OSError: "skip"}):
        shards = wp.ShardList([*urls, missing]).open_shards(on_error=rule)
        assert len(list(shards.load_tar().group_by_key())) == 12
    with pytest.raises(wp.ShardError) as caught:
        list(wp.ShardList([missing]).open_shards(on_error={PermissionError: "skip"}).load_tar())
    assert not getattr(caught.value, "__notes__", None)  # nothing is said of "skip"

    bad = make_shards(tmp_path / "bad", shards=1, samples=3, fields={"jpg": lambda chance, number: b"no image"})
    assert list(samples(bad).decode_by_ext("rgb8", on_error={wp.DecodeError: "skip"})) == []
    with pytest.raises(wp.DecodeError):
        list(samples(bad).decode_by_ext("rgb8", on_error={KeyError: "skip"}))


def test_max_errors_counts_with_each_form(urls):
    for rule in ("skip", {OddError: "skip"}, lambda error: "skip"):
        assert keys_of(mapped(urls, OddError, rule, max_errors=3)) == KEPT
        with pytest.raises(wp.SampleError, match="it is odd") as caught:
            list(mapped(urls, OddError, rule, max_errors=2))
        assert "max_errors=2" in caught.value.__notes__[0]


def chain(first, **each):
    """A chain of all steps with on_error=, after ``first``; ``each``: the options of each step."""
    pipe = first.open_shards(**each).load_tar(**each).group_by_key(**each).decode_by_ext(**each)
    pipe = pipe.map_samples(dict, **each).rename_fields({"label": "cls"}, **each).select_fields("label", "txt", **each)
    return pipe.map_fields({"txt": str}, **each).to_tuple("label", **each)


def rules(pipe):
    return [step.on_error for step in pipe._stream.chain if hasattr(step, "on_error")]


def test_a_source_says_it_for_all_steps(urls):
    """A step may say another one. A state does not depend on where it was said."""
    once, each = chain(wp.ShardList(urls, on_error="skip")), chain(wp.ShardList(urls), on_error="skip")
    assert rules(once) == ["skip"] * 10
    assert rules(each) == ["raise"] + ["skip"] * 9
    assert once.state_dict() == each.state_dict()
    assert rules(chain(wp.ShardList(urls, on_error="skip"), on_error="raise")) == ["skip"] + ["raise"] * 9
    assert rules(chain(wp.ShardList(urls))) == ["raise"] * 10
    rule = {wp.DecodeError: "skip"}
    assert rules(chain(wp.ShardList(urls, on_error=rule))) == [rule] * 10
    with pytest.raises(ValueError, match="on_error must be one of 'raise', 'skip'"):
        wp.ShardList(urls, on_error="ignore")


def test_skipped_samples_are_counted_and_limited(urls):
    failing_on_some = partial(failing, ValueError)
    pipe = samples(urls, shuffle=False, on_error="skip").map_samples(failing_on_some)
    assert keys_of(pipe) == KEPT
    assert pipe.counts()["skipped"] == 3
    with pytest.raises(wp.SampleError, match="it is odd"):
        list(samples(urls, shuffle=False, on_error="skip").map_samples(failing_on_some, max_errors=2))
    assert "on_error='skip'" in repr(pipe).partition(".open_shards()")[0]
    fetched = wp.SampleList(indexed(urls), on_error="skip").fetch_samples().map_samples(failing_on_some)
    assert keys_of(fetched) == KEPT


@pytest.mark.parametrize(("rule", "then"), [("skip", "skip"), ("raise", "raise")])
def test_after_several_sources_it_is_theirs_if_all_say_the_same(rule, then, urls):
    one, other = (wp.ShardList(urls, on_error=said).open_shards().load_tar().group_by_key() for said in ("skip", rule))
    for both in (wp.mix({"a": one, "b": other}), wp.join({"a": one, "b": other}, prefix=True)):
        assert both.map_samples(dict)._stream.stage.on_error == then


def indexed(urls):
    index_shards(urls, offsets=True)
    return urls
