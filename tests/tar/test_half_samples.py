"""Half a sample is never given as a whole one: shards that are cut, with zeroed pages,
preallocated, joined, or with a tar as a member.
"""

import gzip
import io
import json
import subprocess
import tarfile
import warnings

import pytest
from memory import memory_below
from pipelines import loaded
from tars import END, Renewed, by_reader, group, header, load, padded, pairs, pax, put, tar

import wds_pipes as wp
from wds_pipes import ShardError
from wds_pipes.core.stream import Stream
from wds_pipes.stages import GroupByKey, LoadTar, OpenShards, ShardList
from wds_pipes.tar import TarReader
from wds_pipes.tar.headers import is_header
from wds_pipes.tar.indexing import index_shards
from wds_pipes.testing import check_resume

FIELDS = {"cls": b"1", "jpg": b"image" * 50, "txt": b"caption"}
RECORD = 10240


def shard(samples: int, fields=FIELDS, start: int = 0) -> bytes:
    return tar(
        [(f"{number:03d}.{name}", data) for number in range(start, start + samples) for name, data in fields.items()]
    )


def zeroed(data: bytes, start: int, stop: int) -> bytes:
    return data[:start] + bytes(stop - start) + data[stop:]


def read(path: str, *, on_error="raise", **options):
    """The samples, and what was reported: the error, the warnings, the counts of damage."""
    stream = Stream(group([path], {"on_error": on_error, **options}))
    found, reported = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for sample in stream:
                found.append(set(sample) - {"__key__", "__url__"})
        except ShardError as error:
            reported.append(str(error))
    counts = stream.counts()
    return found, reported + [str(warning.message) for warning in caught] + [
        name for name in ("damaged", "skipped") if counts.get(name)
    ]


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("on_truncated", ["raise", "ignore"])
def test_every_cut(tmp_path, on_error, on_truncated):
    """At each block, and beside it: whole samples only; what is missing is an error, or counted."""
    data = shard(8)
    for cut in range(512, data.rindex(b"caption") + 512, 512):
        for place in (cut - 1, cut, cut + 1):
            found, reported = read(put(tmp_path / "x.tar", data[:place]), on_error=on_error, on_truncated=on_truncated)
            assert all(fields == set(FIELDS) for fields in found), place
            assert reported or on_truncated == "ignore", place
            assert len(found) <= place // 3072


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("size", [512, 1024, 4096, RECORD])
def test_every_zeroed_page(tmp_path, on_error, size):
    """Wherever it lies: whole samples only, and what is missing is reported; but zeros up to the
    end of the file cannot be told from an end.
    """
    data = shard(12)
    for start in range(0, len(data) - 1024, 512):
        damaged = zeroed(data, start, start + size)[: len(data)]
        if damaged == data:
            continue
        reaches_end = not damaged[start:].strip(b"\0")
        found, reported = read(put(tmp_path / "x.tar", damaged), on_error=on_error)
        assert all(fields == set(FIELDS) for fields in found[: -1 if reaches_end else None]), start
        assert reported or len(found) == 12 or reaches_end, start


@pytest.mark.parametrize("stem", ["é", "n" * 120, "d/" * 60], ids=["not ASCII", "long", "in directories"])
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_every_damaged_block_of_names_in_extended_headers(tmp_path, form, stem):
    """Without its extended header, a file has another name, as of another sample."""
    members = [(f"{stem}{number:03d}.{field}", FIELDS[field]) for number in range(6) for field in FIELDS]
    data = tar(members, format=form)
    keys = {f"{stem}{number:03d}" for number in range(6)}
    for start in range(0, data.rindex(b"caption"), 512):
        if form == tarfile.GNU_FORMAT and not is_header(data[start : start + 512]):
            continue  # nothing shows that the bytes of a name are others
        for change in (bytes([data[start] ^ 1]), b"\xff" * 512)[not is_header(data[start : start + 512]) :]:
            damaged = data[:start] + change + data[start + len(change) :]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                stream = Stream(group([put(tmp_path / "x.tar", damaged)], {"on_error": "skip"}, on_error="skip"))
                found = list(stream)
            assert all(sample.keys() >= FIELDS.keys() for sample in found), start
            assert {sample["__key__"] for sample in found} <= keys, start
            assert len(found) >= 3 or start < len(data) // 6  # then no fields are known


def test_a_file_after_one_that_is_too_large_keeps_its_name(tmp_path):
    """There is no damage, so a question mark is one."""
    members = [("a?.txt", b"1"), ("b?.txt", b"x" * 3000), ("c?.txt", b"3"), ("d?.txt", b"4")]
    path = put(tmp_path / "x.tar", tar(members))
    stream = Stream(group([path], {"on_error": "skip", "max_member_bytes": 1000}, on_error="skip"))
    assert [sample["__key__"] for sample in stream][-1] == "d?"
    names = [name for name, _ in by_reader(tar(members), max_member_bytes=1000, on_error=lambda error: None) if name]
    assert names == ["a?.txt", "c?.txt", "d?.txt"]


EXTENDED = tar([(f"é{n}.{field}", data) for n in range(6) for field, data in FIELDS.items()], format=tarfile.PAX_FORMAT)
DAMAGE = {
    "names in extended headers": EXTENDED[:9000] + b"?" + EXTENDED[9001:],
    "cut after a member": shard(5)[: 4 * 3072 + 1024],
    "cut after a sample": shard(5)[: 4 * 3072],
    "cut after the first sample": shard(5)[:3072],
    "zeros up to an end of records": zeroed(shard(10), 16384, 2 * RECORD),
    "zeros elsewhere": zeroed(shard(10), 8192, 12288),
    "zeros over the end": zeroed(shard(8), 20480, 24576),
    "zeros at the start": bytes(RECORD) + shard(6)[RECORD:],
    "two archives": shard(4) + shard(4, start=4),
    "three of one sample": shard(1) + shard(1, start=1) + shard(1, start=2),
    "two of other fields": shard(4) + shard(4, {"cls": b"1", "png": b""}, start=4),
    "preallocated": shard(10)[: 5 * 3072] + bytes(5 * RECORD),
    "bytes after the end": shard(4)[: 4 * 3072] + bytes(1024) + b"garbage" * 300,
    "a damaged name": shard(6)[:3072] + b"?" + shard(6)[3073:],
    "a lost header": shard(6)[:3072] + b"?" * 512 + shard(6)[3584:],
    "nothing at all": tar([]),
}


@pytest.mark.parametrize("on_truncated", ["raise", "ignore"])
@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.filterwarnings("ignore::wds_pipes.ShardWarning")
def test_a_resume_beside_damage_is_exact(tmp_path, name, on_truncated):
    """The samples, the state and the counts are those of an uninterrupted run, whatever the cut;
    also with a stage between, and with fields=.
    """
    urls = [put(tmp_path / "0.tar", shard(2)), put(tmp_path / "1.tar", DAMAGE[name]), put(tmp_path / "2.tar", shard(2))]
    options = {"on_error": "skip", "on_truncated": on_truncated}
    for make in (
        lambda: Stream(group(urls, options)),
        lambda: Stream(GroupByKey(Renewed(load(urls, **options)))),
        lambda: Stream(group(urls, options, fields=["cls", "txt"])),
    ):
        check_resume(make)
        stream, states = make(), []
        states.append(json.dumps(stream.state_dict()))
        for _ in stream:
            states.append(json.dumps(stream.state_dict()))
        end = stream.counts()
        for state in states[:-1]:
            resumed = loaded(make(), json.loads(state))
            list(resumed)
            assert resumed.counts() == end, state


# What writers leave between archives: nothing but the mark (Go, Java, tar -b1), records, large
# records (tar -b 2048).
PADDINGS = {"mark": 1024, "an odd number": 1536, "record": RECORD, "large record": 1 << 20}


@pytest.mark.parametrize(("padding", "samples"), [*((padding, 2) for padding in PADDINGS), ("record", 1)])
def test_archives_one_after_another(tmp_path, samples, padding):
    """They are read whole with concatenated=True, also empty ones and of other fields; otherwise
    the error names it.
    """
    members, zeros = shard(samples)[: samples * 3072], bytes(PADDINGS[padding])
    other = shard(samples, {"cls": b""}, start=samples)[: samples * 512]
    path = put(tmp_path / "x.tar", members + zeros + zeros + other + bytes(1024))
    whole = [set(FIELDS)] * samples + [{"cls"}] * samples
    assert read(path, concatenated=True) == (whole, [])
    check_resume(lambda: Stream(group([path], {"concatenated": True})))
    found, reported = read(path)
    assert found == [set(FIELDS)] * (samples - 1)
    assert f"byte {samples * 3072}: it has " in reported[0]
    assert "pass load_tar(concatenated=True)" in reported[0]
    found, reported = read(path, on_error="skip")
    assert found == [set(FIELDS)] * (samples - 1) + [{"cls"}] * (samples - 1)
    assert reported == ["damaged", "skipped"]


def test_joined_archives_may_be_compressed_and_end_as_others(tmp_path):
    path = put(tmp_path / "x.tar.gz", gzip.compress(shard(2)) + gzip.compress(shard(2, start=2)))
    assert read(path, concatenated=True) == ([set(FIELDS)] * 4, [])
    found, reported = read(put(tmp_path / "x.tar", shard(2) + b"garbage" * 200), concatenated=True)
    assert found == [set(FIELDS)]
    assert "has data after its end-of-archive mark, at byte 10240" in reported[0]


def test_archives_joined_by_gnu_tar(tmp_path):
    """``tar -A`` writes the second over the end of the first; ``tar -b1`` writes small records."""
    for number in range(4):
        for name, data in FIELDS.items():
            put(tmp_path / f"{number}.{name}", data)
    for number in range(2):
        names = sorted(path.name for path in tmp_path.glob(f"[{2 * number}{2 * number + 1}].*"))
        subprocess.run(["tar", "-b1", "-cf", f"part{number}.tar", *names], cwd=tmp_path, check=True)
    parts = [(tmp_path / f"part{number}.tar").read_bytes() for number in range(2)]
    path = put(tmp_path / "cat.tar", parts[0] + parts[1])
    assert read(path, concatenated=True) == ([set(FIELDS)] * 4, [])
    subprocess.run(["tar", "-Af", "part0.tar", "part1.tar"], cwd=tmp_path, check=True)
    assert read(str(tmp_path / "part0.tar"), concatenated=True) == ([set(FIELDS)] * 4, [])


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("length", [150, 700, 1200])
def test_a_zeroed_block_in_a_long_name(tmp_path, format, length):
    """The member does not come under the short name that its own header has, which would break
    its sample into pieces.
    """
    folder = "d" * 90 + "/" + "ä" * length
    data = tar(
        [(f"{folder}/{number}.{field}", b"data") for number in range(5) for field in ("cls", "txt")], format=format
    )
    for start in range(0, len(data.rstrip(b"\0")), 512):
        damaged = zeroed(data, start, start + 512)
        found, reported = read(put(tmp_path / "x.tar", damaged), on_error="skip")
        assert all(fields == {"cls", "txt"} for fields in found), start
        assert reported or data[start : start + 4] == b"data", start


@pytest.mark.filterwarnings("ignore::wds_pipes.ShardWarning")
@pytest.mark.parametrize(
    "name", sorted(DAMAGE.keys() - {"nothing at all", "zeros over the end", "names in extended headers"})
)
def test_an_index_is_not_made_of_such_shards(tmp_path, name):
    """It is made by the same rules."""
    with pytest.raises(ShardError):
        index_shards(put(tmp_path / "x.tar", DAMAGE[name]))


INNER = tar([("in/1.cls", b"1"), ("in/1.jpg", b"2"), ("in/2.cls", b"1"), ("in/2.jpg", b"2")])


@pytest.mark.parametrize(("damage", "place"), [("name", 0), ("size", 1), ("all", 1), ("zeros", 0)])
def test_damage_of_a_member_that_is_a_tar(tmp_path, damage, place):
    """Its members follow, as if they were those of the shard; the samples around it stay whole."""
    data = bytearray(
        tar(
            [
                (f"{number}.{field}", content)
                for number in range(4)
                for field, content in (("tar", INNER), ("txt", b"text"))
            ]
        )
    )
    start = place * (512 + len(INNER) + 1024)
    if damage == "name":
        data[start] ^= 64
    elif damage == "size":
        data[start + 130] ^= 1
    else:
        data[start : start + 512] = (b"?" if damage == "all" else b"\0") * 512
    urls = [put(tmp_path / "x.tar", bytes(data)), put(tmp_path / "y.tar", shard(2))]
    stream = Stream(group(urls, {"on_error": "skip"}))
    found = [sample["__key__"] for sample in stream]
    assert found[-3:] == ["3", "000", "001"]
    assert set(found[:-2]) <= {"0", "1", "2", "3", "in/1", "in/2"}
    assert stream.counts()["damaged"] >= 1
    check_resume(lambda: Stream(group(urls, {"on_error": "skip"})))


@pytest.mark.parametrize(
    ("empty", "place"),
    [(tar([]), 0), (tar([(".hidden", b"h")]), 1), (header(b"folder/", kind=b"5") + END, 3)],
    ids=["no member", "hidden", "folder"],
)
@pytest.mark.filterwarnings("ignore:.*none makes a sample:wds_pipes.ShardWarning")
def test_an_empty_shard_that_should_have_samples_is_an_error(tmp_path, empty, place):
    """At the beginning, in the middle and at the end; resumed anywhere, the error comes all the
    same.
    """
    urls = [put(tmp_path / f"{number}.tar", empty if number == place else shard(6)) for number in range(4)]

    def chain(samples=6):
        return wp.ShardList(urls, samples_per_shard=samples).open_shards().load_tar().group_by_key()

    for make in (
        chain,
        lambda: chain().interleave_shards(2),
        lambda: wp.PipeLoader(chain(), batch_size=1, num_workers=0),
        lambda: wp.PipeLoader(chain(), batch_size=1, num_workers=0, rank=place % 2, world_size=2, lanes=4),
    ):
        pipe, states = make(), []
        states.append(pipe.state_dict())
        with pytest.raises(ShardError, match="has only 0 samples, and samples_per_shard or the index says 6"):  # noqa: PT012 - any of them may raise
            for _ in pipe:
                states.append(pipe.state_dict())
        for state in states[-2:]:
            pipe = loaded(make(), state)
            with pytest.raises(ShardError, match="has only 0 samples"):
                list(pipe)
    counts = [0 if number == place else 6 for number in range(4)]
    assert len(list(chain(counts))) == 18


def test_other_counts_than_said_are_an_error_in_a_plain_pipe_too(tmp_path):
    urls = [put(tmp_path / f"{number}.tar", tar(pairs(4))) for number in range(2)]
    for samples, said in ((3, "has more samples than the 3"), (5, "has only 4 samples")):
        with pytest.raises(ShardError, match=said):
            list(Stream(GroupByKey(LoadTar(OpenShards(ShardList(urls, samples_per_shard=samples))))))


MIB = 1 << 20


@pytest.mark.parametrize(
    ("records", "content", "given"),
    [
        ([(b"GNU.sparse.size", b"%d" % (60 * MIB)), (b"GNU.sparse.map", b"0,1")], b"x", 60 * MIB),
        (
            [(b"GNU.sparse.major", b"1"), (b"GNU.sparse.realsize", b"%d" % (60 * MIB))],
            padded(b"1\n5\n1\n") + b"x",
            60 * MIB,
        ),
        ([(b"GNU.sparse.major", b"1"), (b"GNU.sparse.realsize", b"9")], b"9999999\n" + b"0\n" * 3_000_000, None),
        ([(b"GNU.sparse.size", b"%d" % (65 * MIB)), (b"GNU.sparse.map", b"0,1")], b"x", None),
    ],
    ids=["holes", "holes in pax 1.0", "a large map", "too large"],
)
def test_a_sparse_member_takes_no_more_memory_than_a_member_may(records, content, given):
    """Its stored and its real size count together; the map is read up to 1 MiB."""
    data = io.BytesIO(pax(*records) + header(b"a.bin", len(content)) + padded(content) + END)
    with memory_below(66 * MIB):
        if given is None:
            with pytest.raises(ShardError, match="map does not fit|more than max_member_bytes"):
                list(TarReader(data, max_member_bytes=64 * MIB))
        else:
            (member,) = TarReader(data, max_member_bytes=64 * MIB)
            assert len(member.data) == given
            assert member.data.count(b"x") == 1
