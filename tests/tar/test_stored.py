"""Samples that are copied as bytes: found are only those with the bytes that TarWriter writes."""

import io
import tarfile

import pytest

import wds_pipes as wp
from wds_pipes.tar.stored import NotStoredError, read_stored, stored_in

SAMPLES = [
    {"__key__": f"dir/{n:03d}", "bin": bytes([n % 7]) * (n * 37 % 1500), "cls": b"%d" % n, "seg.png": b""}
    for n in range(40)
]


def written(samples: list[dict]) -> bytes:
    target = io.BytesIO()
    with wp.TarWriter(target) as writer:
        for sample in samples:
            writer.write(sample)
    return target.getvalue()


def archive(*files: tuple[str, bytes], **header: int) -> bytes:
    """A tar of files with the headers of TarWriter, but for what is passed."""
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), 0o444
            for field, value in header.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(data))
    return target.getvalue()


def test_samples_have_the_bytes_that_are_written_for_them():
    data = written(SAMPLES)
    found = list(read_stored(io.BytesIO(data)))
    assert [{**one.sample("url"), "__url__": None} for one in found] == [{**one, "__url__": None} for one in SAMPLES]
    assert b"".join(one.data for one in found) == data[: found[-1].start + found[-1].size]
    assert all(written([sample]).startswith(one.data) for sample, one in zip(SAMPLES, found, strict=True))


def test_a_tar_in_a_sample_is_its_content():
    samples = [{"__key__": f"{n}", "tar": written(SAMPLES[:n]), "txt": b"x"} for n in range(1, 9)]
    assert [one.key for one in read_stored(io.BytesIO(written(samples)))] == [sample["__key__"] for sample in samples]


def test_of_bytes_with_known_samples_the_usual_ones_are_found():
    ours, other = next(read_stored(io.BytesIO(written(SAMPLES)))).data, archive(("a.txt", b"1"), mtime=5)[:1024]
    found = list(stored_in(ours + other + ours + ours, {0, len(ours), len(ours) + 1024, 2 * len(ours) + 1024}))
    assert [one.start for one in found] == [0, len(ours) + 1024, 2 * len(ours) + 1024]
    assert {one.data for one in found} == {ours}


GOOD = [("a.cls", b"1"), ("a.txt", b"x"), ("b.cls", b"1"), ("b.txt", b"x")]


def changed(at: int, value: bytes) -> bytes:
    data = archive(*GOOD)
    return data[:at] + value + data[at + len(value) :]


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(archive(*GOOD, mtime=1), id="time"),
        pytest.param(archive(*GOOD, mode=0o644), id="mode"),
        pytest.param(archive(*GOOD, uid=1), id="owner"),
        pytest.param(archive(*GOOD[:2], ("b.TXT", b"x")), id="upper case"),
        pytest.param(archive(GOOD[1], GOOD[0], *GOOD[2:]), id="order of fields"),
        pytest.param(archive(*GOOD, *GOOD[:2]), id="key comes again"),
        pytest.param(archive(*GOOD[:3]), id="last sample lacks a field"),
        pytest.param(archive(*GOOD, ("README", b"x")), id="file of no sample"),
        pytest.param(archive(*GOOD, ("c." + "x" * 98, b"x")), id="name of 100 bytes"),
        pytest.param(archive(*GOOD, ("__c__.cls", b"1"), ("__c__.txt", b"1")), id="name of metadata"),
        pytest.param(changed(513, b"x"), id="padding"),
        pytest.param(changed(148, b"0000001"), id="checksum"),
        pytest.param(archive(*GOOD)[: 8 * 512], id="no end"),
        pytest.param(archive(*GOOD)[: 6 * 512], id="cut"),
        pytest.param(archive(*GOOD) + b"x" * 512, id="data after the end"),
        pytest.param(b"", id="empty"),
        pytest.param(b"no tar", id="no tar"),
    ],
)
def test_all_else_is_left_to_the_reader_of_tars(data):
    list(read_stored(io.BytesIO(archive(*GOOD))))
    with pytest.raises(NotStoredError):
        list(read_stored(io.BytesIO(data)))
