"""Members in the middle of shards: a resume is exact in every kind of tar and compression."""

import bz2
import gzip
import random
import tarfile

import pytest
import zstandard
from pipelines import loaded, resumed
from tars import END, header, load, padded, pairs, pax, put, tar

import wds_pipes as wp
from wds_pipes import ShardError, ShardWarning, StateError
from wds_pipes.core.stream import Stream
from wds_pipes.testing import check_resume

COMPRESS = {"": bytes, "gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}


def link(name: str) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, "x" * len(name)
    return info


MIXED = (
    tar([(".hidden", b"h"), *pairs(2), link("l.txt"), ("9.a", b"")])
    + tar(
        [link("m" * 130 + ".txt"), ("n" * 130 + ".a", b"x" * 600), ("o.a", b"1"), link("last")],
        format=tarfile.GNU_FORMAT,
    )
    + tar([("p" * 130 + ".a", b"y"), ("dir/._q.a", b""), ("q.a", b"2")], format=tarfile.PAX_FORMAT)
    + pax((b"comment", b"c"), kind=b"g")
    + pax((b"GNU.sparse.size", b"9"), (b"GNU.sparse.map", b"1,2,5,1"))
    + header(b"s.a", 3)
    + padded(b"xyz")
    + END
)


@pytest.mark.parametrize("kind", COMPRESS)
@pytest.mark.filterwarnings("ignore:.* link to .* is skipped:wds_pipes.ShardWarning")
def test_resume_is_exact(tmp_path, kind):
    """Cut after every member: concatenated tars, long names of both kinds, links, hidden files, a
    global header, holes, an empty shard.
    """
    urls = [
        put(tmp_path / f"{number}.tar", COMPRESS[kind](data))
        for number, data in enumerate((MIXED, tar([]), tar(pairs(2)), MIXED[:-1024] + END))
    ]
    epoch, _ = check_resume(lambda: Stream(load(urls, concatenated=True)))
    assert len(epoch) == 28
    assert {member.url for member in epoch} == {urls[0], urls[2], urls[3]}


@pytest.mark.parametrize("cut", [1, 300, 511, 512])
def test_resume_is_exact_where_the_last_padding_is_missing(tmp_path, cut):
    """The data of the last member are there, and so is the position after them."""
    data = tar([("a.a", b"1" * 700), ("b.a", b"2")], end=False)
    urls = [put(tmp_path / "0.tar", data[: -cut if cut < 512 else None]), put(tmp_path / "1.tar", tar(pairs(1)))]
    epoch, _ = check_resume(lambda: Stream(load(urls, on_truncated="ignore")))
    assert [bool(member.name) for member in epoch] == [True, *[True] * (cut == 512), False, True, True]


@pytest.mark.parametrize("kind", COMPRESS)
def test_a_resume_seeks_its_position(tmp_path, kind, counted):
    """A plain shard is not read again before it; a compressed one is read from its start."""
    blob = random.Random(0).randbytes(20_000)
    data = COMPRESS[kind](tar([(f"{number}.bin", blob) for number in range(100)]))
    path = put(tmp_path / "x.tar", data)
    _, again = resumed(lambda: Stream(load([f"counted://{path}"])), 95)
    counted.clear()
    assert [member.name for member in again] == [f"{number}.bin" for number in range(95, 100)]
    if kind == "":
        assert sum(count for _, count in counted) < 200_000
        assert min(offset for offset, _ in counted) > 1_900_000
    else:
        assert sum(count for _, count in counted) == len(data)


def state_after(path, count):
    """The state of a stream over a shard after some members."""
    return resumed(lambda: Stream(load([path])), count)[1].state_dict()


@pytest.mark.parametrize("kind", COMPRESS)
def test_a_shard_that_became_shorter_is_refused(tmp_path, kind):
    """It is not the shard of the state."""
    path = put(tmp_path / "x.tar", COMPRESS[kind](tar(pairs(20))))
    state = state_after(path, 35)
    put(tmp_path / "x.tar", COMPRESS[kind](tar(pairs(3))))
    with pytest.raises(StateError, match=r"stands at byte \d+ of shard .*, which has only 10240"):
        list(loaded(Stream(load([path])), state))


@pytest.mark.parametrize("counted", [{}, {"samples_per_shard": 20}], ids=["", "counted"])
def test_a_state_in_the_zeros_of_a_shorter_shard_names_this_shard(tmp_path, counted):
    """Not the next one, and the samples after it are not lost without a word."""
    urls = [put(tmp_path / f"{number}.tar", tar(pairs(20))) for number in range(2)]

    def pipe():
        return wp.ShardList(urls, **counted).open_shards().load_tar().group_by_key()

    _, again = resumed(pipe, 4)
    put(tmp_path / "0.tar", tar(pairs(3)))
    with pytest.raises(StateError, match=r"stands at byte \d+ of shard .*0.tar, and no member starts there"):
        list(again)


def test_a_shard_that_broke_before_the_position_of_a_state_leaves_the_next_one_whole(tmp_path):
    """Its samples up to there do not count as samples of the next shard."""
    urls = [put(tmp_path / f"{number}.tar", bz2.compress(tar(pairs(20)))) for number in range(2)]

    def pipe():
        shards = wp.ShardList(urls, samples_per_shard=20)
        return shards.open_shards().load_tar(on_error="skip").group_by_key()

    _, again = resumed(pipe, 4)
    data = bytearray((tmp_path / "0.tar").read_bytes())
    data[len(data) // 2] ^= 1
    put(tmp_path / "0.tar", bytes(data))
    assert [sample["__url__"] for sample in again] == [urls[1]] * 20
    assert again.counts()["damaged"] == 1


@pytest.mark.parametrize("place", [512, 1024, 2048])
def test_a_position_inside_a_member_is_refused(tmp_path, place):
    """Inside data, inside zeros in data, or after both: the shard is not damaged, and no wrong data
    are returned.
    """
    path = put(tmp_path / "x.tar", tar([("a.a", b"x" * 600 + bytes(1200)), ("b.a", b"y")]))
    state = state_after(path, 1)
    state["lanes"]["0"]["position"][2]["offset"] = place
    with pytest.raises(
        StateError,
        match=f"stands at byte {place} of shard .*, and no member starts there: the shard was "
        "changed or damaged since, or the state",
    ):
        list(loaded(Stream(load([path])), state))


@pytest.mark.parametrize("value", ["lzip", "gz"])
def test_a_state_with_another_compression_is_refused(tmp_path, value):
    """It is not reported as bad data."""
    path = put(tmp_path / "x.tar", tar(pairs(2)))
    state = state_after(path, 1)
    state["lanes"]["0"]["position"][2]["compression"] = value
    with pytest.raises(StateError, match=r"the compressions are gz, |read as gz, and is not compressed now"):
        list(loaded(Stream(load([path])), state))


def test_each_shard_without_an_end_warns_once(tmp_path):
    urls = [put(tmp_path / f"{number}.tar", tar(pairs(2), end=False)) for number in range(3)]
    with pytest.warns(ShardWarning, match="no end-of-archive mark") as caught:
        list(Stream(load(urls, on_truncated="warn")))
    assert [str(warning.message).split(",")[0].split()[1] for warning in caught] == urls


def test_a_broken_shard_is_an_error_and_not_an_end(tmp_path):
    """The iterator raises its error again, and the state is before the damage."""
    data = bytearray(tar(pairs(3)))
    data[2 * 512] ^= 1
    stream = Stream(load([put(tmp_path / "x.tar", bytes(data))]))
    iterator = iter(stream)
    assert [next(iterator).name, next(iterator).name] == ["0000.txt", "0000.cls"]
    state = stream.state_dict()
    for _ in range(3):
        with pytest.raises(ShardError):
            next(iterator)
    assert stream.state_dict() == state
