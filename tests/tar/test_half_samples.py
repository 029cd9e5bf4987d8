"""Half a sample is never given as a whole one: shards that are cut, with zeroed pages,
preallocated, or with a tar as a member.
"""

import io
import json
import tarfile
import warnings

import pytest
from memory import memory_below
from pipelines import loaded
from tars import END, Renewed, by_reader, group, header, load, padded, pairs, pax, put, tar

import wds_pipes as wp
from wds_pipes import ShardError, ShardWarning
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
    """Wherever it lies. A last sample that seems to end properly is given, but with a warning."""
    data = shard(12)
    for start in range(0, len(data) - 1024, 512):
        damaged = zeroed(data, start, start + size)[: len(data)]
        if damaged == data:
            continue
        found, reported = read(put(tmp_path / "x.tar", damaged), on_error=on_error)
        assert all(fields == set(FIELDS) for fields in found[:-1]), start
        assert all(fields == set(FIELDS) for fields in found[-1:]) or any(
            "unlike all samples before it" in said for said in reported
        ), start
        assert (
            reported or len(found) == 12 or start + size > 12 * 3072 or start // 3072 != (start + size - 1) // 3072
        ), start


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
def test_a_resume_beside_doubtful_places_is_exact(tmp_path, name, on_truncated):
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


@pytest.mark.filterwarnings("ignore::wds_pipes.ShardWarning")
def test_where_samples_differ_the_one_in_doubt_needs_all_fields(tmp_path):
    """A shard may have samples without captions; of the last one before a missing end nothing
    can be known.
    """
    members = [("0.cls", b""), ("0.txt", b""), ("1.cls", b""), ("2.cls", b""), ("2.txt", b"")]
    whole = tar(members)
    assert len(read(put(tmp_path / "x.tar", whole))[0]) == 3
    assert len(read(put(tmp_path / "x.tar", whole[: 5 * 512]))[0]) == 3
    found, reported = read(put(tmp_path / "x.tar", whole[: 4 * 512]))
    assert len(found) == 2
    assert "'2', may be half a sample" in reported[0]
    assert read(put(tmp_path / "x.tar", whole[: 3 * 512]))[0] == [{"cls", "txt"}]


@pytest.mark.parametrize("samples", [1, 2, 5])
def test_archives_one_after_another(tmp_path, samples):
    """All are read, without a word, empty ones too, if their samples are alike; elsewhere than
    at a whole record none can start.
    """
    both = shard(samples) + tar([]) + shard(samples, start=samples)
    assert read(put(tmp_path / "x.tar", both)) == ([set(FIELDS)] * 2 * samples, [])
    short = shard(samples)[: samples * 3072] + END + shard(samples, start=samples)
    found, reported = read(put(tmp_path / "x.tar", short))
    assert len(found) == samples - 1
    assert "has a hole" in reported[0]
    assert "a multiple of 10240 bytes" in reported[0]
    other = shard(samples) + shard(samples, {"cls": b""}, start=samples)
    found, reported = read(put(tmp_path / "x.tar", other))
    assert found == [set(FIELDS)] * samples
    assert "may be half a sample" in reported[0]


def test_a_preallocated_shard_is_cut(tmp_path):
    """Its second half is zeros; one record more than usual is a warning."""
    whole = shard(20)
    path = put(tmp_path / "x.tar", zeroed(whole, 30720, len(whole)))
    found, reported = read(path)
    assert len(found) < 10
    assert (
        "bytes of zeros at its end, where archives have 1024 or, here, 10240: perhaps they hide members"
    ) in reported[0]
    assert read(path, on_error="skip")[1] == ["damaged", "skipped"]
    found, reported = read(path, on_truncated="warn")
    assert found == [set(FIELDS)] * 10
    assert len(reported) == 1
    found, reported = read(put(tmp_path / "x.tar", whole + bytes(RECORD)))
    assert found == [set(FIELDS)] * 20
    assert len(reported) == 1
    assert "perhaps they hide members" in reported[0]


def test_an_archive_in_large_records_is_whole(tmp_path):
    """As ``tar -b 64`` to ``-b 2048`` write it: all its samples are given, with a warning, for
    space may have been reserved.
    """
    members = shard(20)[: 20 * 3072 - 1024]  # the last one has no caption
    for size in (1 << 17, 1 << 18, 1 << 20):
        path = put(tmp_path / "x.tar", members + bytes(size - len(members)))
        found, reported = read(path)
        assert found == [set(FIELDS)] * 19 + [{"cls", "jpg"}]
        assert len(reported) == 2
        assert "unless it was written in records of another size than 10240 bytes" in reported[0]
        assert "unlike all samples before it" in reported[1]
        with pytest.warns(ShardWarning, match="perhaps they hide members"):
            assert index_shards(path)[path].samples == 20
    for size in (3 << 15, 20 * RECORD, 2 << 20):
        found, reported = read(put(tmp_path / "x.tar", members + bytes(size - len(members))))
        assert len(found) == 19
        assert "or space was reserved and not filled. Write or fetch it again" in reported[0]


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


def test_the_fields_in_a_state_are_bounded(tmp_path):
    """Of a shard with more or with odd names of fields, a sample in doubt is refused."""
    for names in ([f"field{number}" for number in range(100)], ["ä"], ["a b"]):
        data = tar([(f"{number}.{name}", b"") for number in range(5) for name in names])
        path = put(tmp_path / "x.tar", data)
        stream = Stream(group([path]))
        sizes = [len(json.dumps(stream.state_dict())) for _ in stream]
        assert max(sizes) < 900
        assert len(sizes) == 5
        found, reported = read(put(tmp_path / "x.tar", data[: 5 * 512 * len(names)]))
        assert len(found) == 4
        assert "may be half" in reported[0]


@pytest.mark.filterwarnings("ignore::wds_pipes.ShardWarning")
def test_an_index_is_not_made_of_such_shards(tmp_path):
    """It counts by the same rules."""
    bad = [
        "cut after a member",
        "cut after the first sample",
        "zeros up to an end of records",
        "zeros at the start",
        "two of other fields",
        "preallocated",
    ]
    for name in bad:
        path = put(tmp_path / "x.tar", DAMAGE[name])
        with pytest.raises(ShardError):
            index_shards(path)
    for name in ("two archives", "three of one sample"):
        path = put(tmp_path / "x.tar", DAMAGE[name])
        assert index_shards(path)[path].samples == len(read(path)[0])


INNER = tar([("in/1.cls", b"1"), ("in/1.jpg", b"2"), ("in/2.cls", b"1"), ("in/2.jpg", b"2")])


@pytest.mark.parametrize("damage", ["name", "size", "all", "zeros"])
@pytest.mark.parametrize("place", [0, 1])
def test_members_of_a_nested_tar_are_no_samples(tmp_path, damage, place):
    """Whatever has happened to the header of the member that holds it; also where it is the
    first of its shard. Then no sample before it shows which fields are not those of the nested tar.
    """
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
    assert not any(key.startswith("in/") for key in found)
    assert found[-2:] == ["000", "001"]
    assert set(found[:-2]) <= {"0", "1", "2", "3"}
    assert damage != "name" or place == 0 or "3" in found
    assert stream.counts()["damaged"] >= 1
    check_resume(lambda: Stream(group(urls, {"on_error": "skip"})))


@pytest.mark.parametrize(
    "empty",
    [tar([]), tar([(".hidden", b"h")]), header(b"folder/", kind=b"5") + END],
    ids=["no member", "hidden", "folder"],
)
@pytest.mark.parametrize("place", [0, 1, 3])
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
