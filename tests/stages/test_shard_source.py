"""What is known of a shard travels with it, and is not lost silently on the way."""

import os
import pickle
from collections import Counter
from pathlib import Path

import pytest
from pipelines import keys_of
from torch.utils.data.datapipes.iter import IterableWrapper

import wds_pipes as wp
from wds_pipes.stages.shard_source import ShardRef
from wds_pipes.tar import TarMember
from wds_pipes.testing import make_shards

FULL = ShardRef("s3://b/x.tar", 51200, "0" * 32, 2, 4, 5)


def samples(shards):
    return shards.open_shards().load_tar().group_by_key()


def in_two_lanes(pipe):
    return wp.PipeLoader(pipe, batch_size=None, lanes=2, epoch_end="exact")


def again(ref):
    return ref.with_url(Path(ref))


def forget(ref):
    return ShardRef(ref.url)


def as_path(ref):
    return Path(ref)


# The reference itself


def test_it_is_a_value():
    assert wp.ShardRef is ShardRef
    assert ShardRef("s3://b/x.tar", size=51200, md5="0" * 32, start=2, stop=4, of=5) == FULL
    assert ShardRef("s3://b/x.tar") != FULL
    assert len({FULL, pickle.loads(pickle.dumps(FULL)), ShardRef("s3://b/x.tar")}) == 2
    with pytest.raises(AttributeError):
        FULL.url = "y.tar"
    assert not hasattr(FULL, "__dict__")


def test_it_is_its_url_as_text_and_as_a_path():
    assert str(FULL) == os.fspath(FULL) == f"{FULL}" == "s3://b/x.tar"
    assert Path(ShardRef("a/x.tar")) == Path("a/x.tar")


def test_with_url_keeps_everything_else():
    assert FULL.with_url("/disk/x.tar") == ShardRef("/disk/x.tar", 51200, "0" * 32, 2, 4, 5)
    assert ShardRef("x.tar").with_url(Path("/disk/x.tar")).url == "/disk/x.tar"


def test_its_repr_has_what_is_known_and_no_secret():
    assert repr(FULL) == f"ShardRef('s3://b/x.tar', size=51200, md5='{'0' * 32}', start=2, stop=4, of=5)"
    assert repr(ShardRef("x.tar")) == "ShardRef('x.tar')"
    shown = repr(ShardRef("https://user:hunter22@host/x.tar?token=abcdefgh"))
    assert shown == "ShardRef('https://host/x.tar?...')"


# On its way through a pipeline


def test_a_step_that_keeps_the_reference_changes_nothing(tmp_path):
    """Two lanes share a shard, and each reads its own samples of it."""
    shards = wp.ShardList(make_shards(tmp_path, shards=3, samples=7), samples_per_shard=7)
    expected = keys_of(in_two_lanes(samples(shards)))
    assert keys_of(in_two_lanes(samples(shards.map(again)))) == expected
    assert set(Counter(expected).values()) == {1}
    assert len(expected) == 21


@pytest.mark.parametrize("lossy", [str, as_path, forget])
def test_a_step_that_loses_the_facts_is_refused(tmp_path, lossy):
    """Before, both lanes read the shared shard as a whole: of 21 samples, 7 came twice."""
    shards = wp.ShardList(make_shards(tmp_path, shards=3, samples=7), samples_per_shard=7)
    with pytest.raises(TypeError, match=r"lost what ShardList knows.*ref\.with_url\(url\)"):
        keys_of(in_two_lanes(samples(shards.map(lossy))))


# From the members back to their shard


class ReadFurther(wp.Stage):
    """A step between load_tar and group_by_key that holds members. Checkpoint: none."""

    keeps_count = True

    def run(self):
        held = []
        for member in self.source.items:
            held.append(member)
            if len(held) > 40:
                yield held.pop(0)
        yield from held


wp.register_stage(ReadFurther)


def renamed(member):
    return member._replace(url="elsewhere.tar")


def test_members_find_their_shard_when_a_step_has_read_further(tmp_path):
    """Also two ranges of one shard, one after another."""
    url = make_shards(tmp_path, shards=1, samples=7)[0]
    shards = IterableWrapper([ShardRef(url, start=start, stop=stop, of=7) for start, stop in ((0, 2), (3, 5), (5, 7))])
    direct = keys_of(samples(shards))
    assert len(direct) == 6
    assert keys_of(shards.open_shards().load_tar().read_further().group_by_key()) == direct


def test_members_of_unknown_shards_are_refused(tmp_path):
    urls = make_shards(tmp_path, shards=3, samples=7)
    members = wp.ShardList(urls, samples_per_shard=7).open_shards().load_tar()
    for pipe in (members.map(renamed), members.interleave_shards(2)):
        with pytest.raises(TypeError, match="put it after group_by_key"):
            keys_of(in_two_lanes(pipe.group_by_key()))
    assert keys_of(wp.ShardList(urls).open_shards().load_tar().map(renamed).group_by_key()) == keys_of(
        samples(wp.ShardList(urls))
    )


class ReadLines(wp.Stage):
    """Open and read the shards in one step of the user's. Checkpoint: none."""

    keeps_count = True

    def __init__(self, source, with_ref):
        super().__init__(source)
        self.with_ref = with_ref

    def run(self):
        for ref in self.source.items:
            for number, line in enumerate(Path(ref).read_text().split()):
                yield TarMember(ref if self.with_ref else str(ref), f"{line}.txt", b"", 512 * number)


wp.register_stage(ReadLines)


def test_a_step_that_opens_shards_itself_passes_the_reference_on(tmp_path):
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(" ".join(f"{number}-{line}" for line in range(7)))
    shards = wp.ShardList([tmp_path / f"{number}.txt" for number in range(3)], samples_per_shard=7)
    got = list(in_two_lanes(shards.read_lines(True).group_by_key()))
    assert len(set(keys_of(got))) == len(got) == 21
    assert {type(sample["__url__"]) for sample in got} == {str}
    with pytest.raises(TypeError, match="whose url is the ShardRef"):
        keys_of(in_two_lanes(shards.read_lines(False).group_by_key()))


def test_a_shard_ref_and_a_str_are_not_compared():
    """Such a filter would keep or drop all shards without a word."""
    ref = wp.ShardRef("a.tar")
    for compare in (
        lambda: ref == "a.tar",
        lambda: ref != "a.tar",
        lambda: ref in {"a.tar"},
        lambda: {"a.tar": 1}.get(ref),
    ):
        with pytest.raises(TypeError, match=r"a ShardRef is not a str: compare ref.url with 'a.tar'"):
            compare()
    assert ref == wp.ShardRef("a.tar") != wp.ShardRef("a.tar", size=1)
    assert ref != 5


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"url": Path("x.tar")}, TypeError, "must be a str, not"),
        ({"stop": 4}, ValueError, "pass all of them, or none"),
        ({"of": 4}, ValueError, "pass all of them, or none"),
        ({"start": 2}, ValueError, "pass all of them, or none"),
        ({"start": 3, "stop": 1, "of": 5}, ValueError, "samples 3 to 1 are not a range of the 5 samples"),
        ({"start": 0, "stop": 9, "of": 5}, ValueError, "samples 0 to 9 are not a range"),
        ({"start": -1, "stop": 2, "of": 5}, ValueError, "samples -1 to 2 are not a range"),
    ],
)
def test_what_a_shard_cannot_be_is_refused(values, error, message):
    with pytest.raises(error, match=message):
        ShardRef(**{"url": "a.tar", **values})


def test_torchs_source_of_references_or_paths_has_a_fingerprint(tmp_path):
    """So that a state does not fit other shards."""
    urls = make_shards(tmp_path, shards=2, samples=3)
    for kind in (str, wp.ShardRef, Path):
        pipe = IterableWrapper([kind(url) for url in urls]).open_shards().load_tar().group_by_key()
        next(iter(pipe))
        other = IterableWrapper([kind(url) for url in urls[::-1]]).open_shards().load_tar().group_by_key()
        with pytest.raises(wp.StateError, match="does not fit this pipeline"):
            other.load_state_dict(pipe.state_dict())
