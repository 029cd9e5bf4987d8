"""TarReader by itself: what it gives, where it can go on, and what it reads."""

import io
import tarfile
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import FOLDER, KINDS, SORTS, Reads, by_reader, by_tarfile, pairs, tar

from wds_pipes import ShardWarning
from wds_pipes.tar import TarMember, TarReader
from wds_pipes.tar.headers import SIZES, SUMS


def test_a_member():
    """Its url, name, bytes and the offset of its first header."""
    data = tar([("a.txt", b"one"), ("n" * 200 + ".txt", b"two"), ("c.txt", b"")], format=tarfile.GNU_FORMAT)
    assert list(TarReader(io.BytesIO(data), url="u")) == [
        TarMember("u", "a.txt", b"one", 0),
        TarMember("u", "n" * 200 + ".txt", b"two", 1024),
        TarMember("u", "c.txt", b"", 1024 + 1024 + 1024),
    ]
    assert next(iter(TarReader(io.BytesIO(data), url="u", named=False))) == ("u", "a.txt", b"one", 0)


@pytest.mark.parametrize("name", SORTS)
@pytest.mark.filterwarnings("ignore:.* link to .* is skipped:wds_pipes.ShardWarning")
def test_the_walk_can_be_taken_up_at_the_offset_behind_every_member(name):
    """A new reader that starts there gives the rest, also behind folders, long names and ends."""
    data = SORTS[name]
    reader = TarReader(io.BytesIO(data), concatenated=True)
    members, offsets = [], [0]
    for member in reader:
        members.append(member)
        offsets.append(reader.offset)
    for number, offset in [*enumerate(offsets), *enumerate(member.offset for member in members)]:
        stream = io.BytesIO(data)
        stream.seek(offset)
        assert list(TarReader(stream, offset=offset, concatenated=True)) == members[number:]


@pytest.mark.parametrize("size", [10, 513, 70_000, 3_000_000])
def test_data_that_is_not_wanted_is_passed_over(size):
    """None for its data; it is sought over where that saves reading, and read over where the
    stream cannot seek.
    """
    members = [("a.txt", b"a"), ("a.big", bytes(size)), ("n" * 200 + ".big", bytes(size)), ("b.txt", b"b")]
    data = tar(members, format=tarfile.GNU_FORMAT)
    expected = [(name, None if name.endswith("big") else content) for name, content in members]

    def want(name):
        return not name.endswith("big")

    assert by_reader(data, want=want) == expected
    pipe = Reads(data, seeks=False)
    assert [(member.name, member.data) for member in TarReader(pipe, want=want)] == expected
    seeking = Reads(data)
    assert [(member.name, member.data) for member in TarReader(seeking, want=want)] == expected
    assert seeking.count < 2 * 65536 + 20_000
    assert max(pipe.sizes) <= 1 << 20


@settings(max_examples=80, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=60).filter(
                lambda name: not name.endswith("/")
            ),
            st.binary(max_size=1100),
            st.integers(1, 6),
        ),
        max_size=5,
    ),
    st.sampled_from(list(KINDS.values())[1:]),
)
def test_any_names_and_bytes_are_read_as_tarfile_reads_them(members, format):
    data = tar([(name * repeat, content) for name, content, repeat in members], format=format)
    assert by_reader(data) == by_tarfile(data)


def test_the_caches_of_sizes_and_checksums_do_not_grow_without_bound():
    """20 000 different ones."""
    for number in range(20_000):
        _ = SIZES[b"%011o" % number], SUMS[b"%06o\0 " % number]
    assert len(SIZES) <= 8193
    assert len(SUMS) <= 8193
    assert by_reader(tar(pairs(3))) == pairs(3)


def link(name, target, kind=tarfile.LNKTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize("format", KINDS.values(), ids=KINDS)
def test_the_first_link_is_warned_of(format):
    """With its name, its target, its byte and the mend; folders and devices are skipped."""
    long = "" if format == tarfile.USTAR_FORMAT else "t" * 150
    device = tarfile.TarInfo("device")
    device.type = tarfile.CHRTYPE
    first = link("b.jpg", f"{long}a.jpg")
    data = tar([FOLDER, device, ("a.jpg", b"1"), first, link("c.jpg", "a.jpg", tarfile.SYMTYPE)], format=format)
    reader = TarReader(io.BytesIO(data), url="u.tar")
    with pytest.warns(ShardWarning) as caught:
        assert [member.name for member in reader] == ["a.jpg"]
    [warning] = caught
    assert str(warning.message) == (
        f"shard u.tar, byte 2048: 'b.jpg' is a hard link to '{long}a.jpg', so it has no data and is skipped. "
        "Pack the files again, with: tar --hard-dereference"
    )
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert by_reader(data, on_link=found.append) == [("a.jpg", b"1")]
    assert [(one.name, one.target, one.hard, one.offset) for one in found] == [
        ("b.jpg", f"{long}a.jpg", True, 2048),
        ("c.jpg", "a.jpg", False, found[0].end),
    ]
    assert found[1].describe("u.tar").endswith("with: tar --dereference")
    assert data[found[1].end :].strip(b"\0") == b""
