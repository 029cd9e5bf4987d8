"""The byte of a member that cannot be decoded: it is found when the error is raised."""

import gzip
import pickle
import shutil
import tarfile

import fsspec
import pytest
from tars import tar

import wds_pipes as wp
from wds_pipes.tar import finding, index_shards

LONG = "directory/" + "long" * 60
NAMES = ["a.txt", "a.cls", "./b.cls", "deep/c.txt", "deep/c.CLS", f"{LONG}.txt", f"{LONG}.cls", "c.cls", "cc.cls"]


def members(bad):
    """Members of which one is no number; another sample has the same bytes as a text."""
    return [
        (name, b"bad" if name == bad or name.endswith("txt") else b"%d" % place) for place, name in enumerate(NAMES)
    ]


def write(path, bad):
    path.write_bytes(tar(members(bad), format=tarfile.PAX_FORMAT))
    return str(path)


def expected(path, bad):
    with tarfile.open(path) as archive:
        return next(info.offset for info in archive if info.name == bad)


def samples(*urls, **options):
    return wp.ShardList(urls).open_shards().load_tar().group_by_key(**options)


def error_of(items):
    with pytest.raises(wp.DecodeError) as caught:
        list(items)
    return caught.value


@pytest.mark.parametrize("bad", [name for name in NAMES if name.lower().endswith("cls")])
def test_it_is_where_tarfile_finds_the_member(tmp_path, bad):
    path = write(tmp_path / "x.tar", bad)
    error = error_of(samples(path).decode_by_ext())
    assert error.offset == expected(path, bad)
    assert f" It starts at byte {error.offset} of the shard. Correct it, or " in str(error)
    assert pickle.loads(pickle.dumps(error)).offset == error.offset


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_it_does_not_depend_on_who_reads_in_which_order(tmp_path, threads, workers):
    good = [write(tmp_path / f"{number}.tar", None) for number in range(3)]
    path = write(tmp_path / "bad.tar", "deep/c.CLS")
    pipe = wp.ShardList([*good, path], shuffle=True).open_shards().load_tar().group_by_key().shuffle_buffer(9)
    options = {"num_workers": workers, "lanes": 2, "batch_size": 2, "collate": "list"}
    loader = wp.PipeLoader(pipe.decode_by_ext(threads=threads), **options)
    next(iter(loader))
    resumed = wp.PipeLoader(pipe.decode_by_ext(threads=threads), **options)
    resumed.load_state_dict(loader.state_dict())
    assert error_of(resumed).offset == expected(path, "deep/c.CLS")


def test_random_access_and_records(tmp_path):
    path = write(tmp_path / "x.tar", "cc.cls")
    index_shards([path], str(tmp_path / "index.json"), offsets=True)
    at = expected(path, "cc.cls")
    assert error_of(wp.IndexedShards([path], decode=True)).offset == at
    assert error_of(wp.SampleList([path]).fetch_samples().decode_by_ext()).offset == at
    records = tmp_path / "records.tar"
    records.write_bytes(tar([("a.jsonl", b"1\n2\n"), ("b.jsonl", b"1\n{\n")]))
    error = error_of(samples(str(records)).explode_records("jsonl"))
    assert error.offset == expected(records, "b.jsonl")
    assert f"It starts at byte {error.offset} of the shard. Correct it" in str(error)


def test_the_images_of_a_batch(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(tar([("a.cls", b"1"), ("a.jpg", b"no image")]))
    loader = wp.PipeLoader(
        samples(str(path)).decode_by_ext(only=["cls"]),
        batch_size=1,
        on_device=wp.DecodeOnDevice("jpg", size=8, device="cpu"),
    )
    error = error_of(loader)
    assert error.offset == expected(path, "a.jpg")
    assert f" It starts at byte {error.offset} of the shard. Correct it" in str(error)


def test_a_repeated_key_is_told_apart_by_its_bytes(tmp_path):
    path = tmp_path / "x.tar"
    path.write_bytes(tar([("a.cls", b"1"), ("b.cls", b"2"), ("a.cls", b"bad")]))
    assert error_of(samples(str(path), on_repeated_key="ignore").decode_by_ext()).offset == 2048


def test_no_byte_is_named_that_may_be_another_one(tmp_path, monkeypatch):
    """Of a compressed shard, a remote one, one that was written again, a field that was renamed or
    changed, a key that another rule made, a file that has gone, and a search that takes too long.
    """
    path = write(tmp_path / "x.tar", "cc.cls")
    packed = tmp_path / "x.tar.gz"
    packed.write_bytes(gzip.compress((tmp_path / "x.tar").read_bytes()))

    def changed(sample):
        shutil.copy(write(tmp_path / "other.tar", "c.cls"), again)
        return sample

    again = shutil.copy(path, tmp_path / "again.tar")
    fsspec.filesystem("memory").pipe("/finding/x.tar", (tmp_path / "x.tar").read_bytes())
    pipes = [
        samples(str(packed)),
        samples(str(again)).map_samples(changed),
        samples(path).rename_fields({"label.cls": "cls"}),
        samples(path).map_fields({"cls": lambda data: data + b" "}),
        samples(path, key_split=lambda name: (f"key {name[:-4]}", name[-3:])),
        samples("memory://finding/x.tar"),
    ]
    for pipe in pipes:
        error = error_of(pipe.decode_by_ext())
        assert error.offset is None
        assert "It starts at byte" not in str(error)
    monkeypatch.setattr(finding, "_SECONDS", -1)
    assert error_of(samples(path).decode_by_ext()).offset is None


def test_what_is_skipped_is_not_searched_for(tmp_path, monkeypatch):
    """That would cost the reading of a shard for each sample."""
    searched = []
    monkeypatch.setattr("wds_pipes.stages.decode_by_ext.offset_of", lambda *facts: searched.append(facts))
    path = write(tmp_path / "x.tar", "cc.cls")
    assert len(list(samples(path).decode_by_ext(on_error="skip"))) == 5
    assert not searched
    error_of(samples(path).decode_by_ext())
    assert len(searched) == 1


def test_a_link_before_it_is_not_warned_of_again(tmp_path):
    link = tarfile.TarInfo("a.jpg")
    link.type, link.linkname = tarfile.LNKTYPE, "a.txt"
    (tmp_path / "x.tar").write_bytes(tar([("a.txt", b"a"), link, ("b.cls", b"bad")]))
    with pytest.warns(wp.ShardWarning) as caught:
        error = error_of(samples(str(tmp_path / "x.tar")).decode_by_ext())
    assert error.offset == 1536
    assert ["byte 1024: 'a.jpg' is a hard link" in str(warning.message) for warning in caught] == [True]
