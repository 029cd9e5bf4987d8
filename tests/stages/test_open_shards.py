"""URLs to open shards."""

import gzip
import itertools
import logging
import os
import warnings

import pytest
from pipelines import keys_of, through_json
from tars import group, load, pairs, put, tar

import wds_pipes as wp
from wds_pipes import ShardError
from wds_pipes.core.stream import Stream
from wds_pipes.stages import GroupByKey, LoadTar, OpenShards, ShardList
from wds_pipes.tar import index_shards
from wds_pipes.testing import check_resume, make_shards


class NoItem(wp.FlatMap):
    """Yields None once, as a function without a return would."""

    def expand(self, item):
        return [None, item]


def test_none_is_not_taken_for_the_end(tmp_path):
    urls = make_shards(tmp_path, shards=2, samples=2)
    with pytest.raises(TypeError, match=r"open_shards\(\) takes URLs and paths, and its source gave None"):
        list(Stream(OpenShards(NoItem(ShardList(urls)))))
    with pytest.raises(TypeError, match=r"load_tar\(\) takes open shards, and its source gave None"):
        list(Stream(LoadTar(NoItem(OpenShards(ShardList(urls))))))


@pytest.fixture
def some(tmp_path) -> list[str]:
    """Missing, good, missing, good, missing."""
    good = [
        put(tmp_path / f"{number}.tar", tar([(f"{number}{name}", data) for name, data in pairs(3)]))
        for number in range(2)
    ]
    missing = str(tmp_path / "missing.tar")
    return [missing, good[0], missing, good[1], missing]


def test_resume_is_exact_over_shards_that_are_skipped(some):
    """The count too is what it was."""
    (epoch, *_) = check_resume(lambda: Stream(GroupByKey(LoadTar(OpenShards(ShardList(some), on_error="skip")))))
    assert len(epoch) == 6


def unchanged(member):
    return member


GROUPED = {
    "plain": lambda shards: shards.open_shards(on_error="skip").load_tar().group_by_key(),
    "step before": lambda shards: shards.open_shards(on_error="skip").map_samples(unchanged).load_tar().group_by_key(),
    "step after": lambda shards: shards.open_shards(on_error="skip").load_tar().map_samples(unchanged).group_by_key(),
    "interleaved": lambda shards: GROUPED["plain"](shards).interleave_shards(2),
    "loader": lambda shards: wp.PipeLoader(GROUPED["plain"](shards), lanes=1),
}


@pytest.mark.parametrize(
    ("grouped", "known"),
    [*((name, {}) for name in GROUPED), *((name, {"samples_per_shard": 2}) for name in ("plain", "step after"))],
)
def test_a_shard_that_is_missing_at_a_resume_loses_only_its_own_samples(tmp_path, grouped, known):
    """At every cut, and at every cut of the resumed run; others are missing before and after it."""
    tars = [tar([(f"{number}{name}", data) for name, data in pairs(2)]) for number in range(2)]
    good = [
        put(tmp_path / f"{number}.tar", gzip.compress(data) if number == 0 else data)
        for number, data in enumerate(tars)
    ]
    missing = str(tmp_path / "missing.tar")
    urls = [missing, good[0], missing, missing, good[1], missing]

    def run(state=None, stop=None):
        """The keys up to a cut, and the state there; or to the end, and the count."""
        pipe = GROUPED[grouped](wp.ShardList(urls, **known))
        if state is not None:
            pipe.load_state_dict(through_json(state))
        keys = keys_of(itertools.islice(pipe, stop))
        return keys, pipe.counts()["skipped_shards"] if stop is None else pipe.state_dict()

    whole, _ = run()
    for number, url in enumerate(good):
        for cut in range(4):
            before, state = run(stop=cut)
            os.rename(url, missing + "x")
            rest, skipped = run(state)
            lost = [key for key in whole if key[0] == str(number) and key not in before]
            assert skipped == 5 if lost else skipped in (4, 5)  # the state may stand at the end of this shard
            assert sorted(before + rest) == sorted(set(whole) - set(lost))
            if grouped != "interleaved":
                assert before + rest == sorted(before + rest)
            for again in range(len(rest)):
                some, later = run(state, again)
                assert (some + run(later)[0], run(later)[1]) == (rest, skipped)
            os.rename(missing + "x", url)


def test_a_missing_shard_is_raised_or_skipped_and_counted(some, caplog):
    with pytest.raises(ShardError, match="does not exist"):
        list(Stream(group(some)))
    stream = Stream(LoadTar(OpenShards(ShardList(some), on_error="skip")))
    with caplog.at_level(logging.WARNING, "wds_pipes"):
        assert len(list(stream)) == 12
    assert stream.chain.dump(stream.position.mark)[1] == {"skipped_shards": 3}
    assert sum(record.getMessage().startswith("skipped: ") for record in caplog.records) == 3


def test_nothing_is_opened_before_its_turn(tmp_path):
    """The second shard is made while the first is read."""
    first = put(tmp_path / "0.tar", tar(pairs(3)))
    iterator = iter(Stream(group([first, str(tmp_path / "1.tar")])))
    next(iterator)
    put(tmp_path / "1.tar", tar(pairs(2)))
    assert len(list(iterator)) == 4


def test_files_are_closed_when_a_pass_ends_or_is_given_up(tmp_path):
    """Plain and compressed: no ResourceWarning."""
    urls = [put(tmp_path / "0.tar", tar(pairs(3))), put(tmp_path / "1.tar", gzip.compress(tar(pairs(3))))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps in (0, 1, 4, 6):
            stream = Stream(group(urls))
            iterator = iter(stream)
            for _ in range(steps):
                next(iterator)
            stream.close()


def test_reads_are_large(tmp_path, counted):
    """A few reads, each four times as large as the one before, are cheaper than two thousand of
    a block.
    """
    path = put(tmp_path / "x.tar", tar([(f"{number}.bin", bytes(50_000)) for number in range(60)]))
    list(Stream(load([f"counted://{path}"])))
    sizes = [size for _, size in counted]
    assert sum(sizes) == os.path.getsize(path)
    assert sizes[:-1] == [1 << 18, 1 << 20]


# A local shard that is changed while it is read


def versioned(version, count=40):
    """A shard whose samples have the same size in all versions."""
    return tar([(f"{n:03d}.{field}", version * 700) for n in range(count) for field in ("cls", "txt")])


def rewrite(path):
    with open(path, "r+b") as file:
        file.write(versioned(b"2"))


def replace(path):
    os.replace(put(path.with_suffix(".new"), versioned(b"2")), path)


CHANGES = {"rewritten": rewrite, "replaced": replace, "cut": lambda path: os.truncate(path, 20_000)}
READ = {
    "stream": lambda path: wp.ShardList(path).open_shards().load_tar().group_by_key(),
    "skipping": lambda path: wp.ShardList(path, on_error="skip").open_shards().load_tar().group_by_key(),
    "a step between": lambda path: wp.ShardList(path).open_shards().load_tar().map_samples(unchanged).group_by_key(),
    "a part": lambda path: wp.PipeLoader(
        wp.ShardList(path, samples_per_shard=40).open_shards().load_tar().group_by_key(), lanes=2
    ),
    "verified": lambda path: (
        wp.ShardList(path, index=path.with_name("index.json")).open_shards(verify=True).load_tar().group_by_key()
    ),
    "by offsets": lambda path: wp.SampleList(path).fetch_samples(),
}


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", [1, 15, 38])
def test_a_shard_that_is_changed_while_it_is_read_is_an_error(tmp_path, change, read, when):
    """Before its last sample, but by offsets; the next epoch reads the new version."""
    path = tmp_path / "x.tar"
    put(path, versioned(b"1"))
    os.utime(path, (1e9, 1e9))
    index_shards(path, tmp_path / "index.json", offsets=True)
    came = []

    def read_on():
        for sample in READ[read](path):
            came.append(sample)
            if len(came) == when:
                CHANGES[change](path)

    with pytest.raises((ShardError, wp.SampleError)) as caught:
        read_on()
    assert len(came) < 40 or read == "by offsets"
    assert "was changed while it was read" in str(caught.value) or read in ("by offsets", "verified")


def test_a_shard_that_is_removed_while_it_is_read_is_read_on(tmp_path):
    path = tmp_path / "x.tar"
    put(path, versioned(b"1"))
    samples = iter(READ["stream"](path))
    next(samples)
    path.unlink()
    assert len(list(samples)) == 39
