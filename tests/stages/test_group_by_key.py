"""Members to samples: grouping, fields, repeated keys, and what is counted."""

import gzip
import json
import os
import tarfile
from pathlib import Path

import fsspec
import pytest
from pipelines import keys_of, resumed
from tars import END, Renewed, by_webdataset, group, header, load, padded, pairs, put, samples, tar

import wds_pipes as wp
from wds_pipes import SampleError, ShardWarning
from wds_pipes.core.stream import Stream
from wds_pipes.stages import GroupByKey
from wds_pipes.tar import index_shards
from wds_pipes.testing import check_resume


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_resume_is_exact(tmp_path, compress):
    """Cut behind every sample, with fields of any number, members of no sample, an empty shard
    and a shard twice in the list.
    """
    data = [
        tar([*pairs(2), (".x", b""), ("z", b"")]),
        tar([]),
        tar([(".x", b""), ("a.a", b""), ("a.b", b""), (".y", b""), ("a.c", b""), ("b.a", b"x" * 999)]),
    ]
    urls = [put(tmp_path / f"{number}.tar", compress(content)) for number, content in enumerate(data)]
    epoch, _ = check_resume(lambda: Stream(group([*urls, urls[2], urls[2]])))
    assert len(epoch) == 2 + 2 + 2 + 2


@pytest.mark.parametrize(("first", "several"), [(False, False), (True, False), (False, True), (True, True)])
def test_numbers_of_samples_may_come_later(tmp_path, first, several):
    """A state of a pipe without ``samples_per_shard`` goes on in one with it, also a second
    time, and the other way round.
    """
    urls = wp.testing.make_shards(tmp_path, shards=2, samples=3)

    def pipe(counted):
        pipe = wp.ShardList(urls, samples_per_shard=3 if counted else None).open_shards().load_tar().group_by_key()
        return pipe.interleave_shards(2) if several else pipe

    epoch = keys_of(pipe(first))
    for cut in range(len(epoch)):
        once = lambda cut=cut: resumed(lambda: pipe(first), cut, lambda: pipe(not first))[1]  # noqa: E731
        assert keys_of(once()) == epoch[cut:]
        for counted in (True, False):
            taken, rest = resumed(once, 1, lambda counted=counted: pipe(counted))
            assert [*keys_of(taken), *keys_of(rest)] == epoch[cut:]


@pytest.mark.parametrize(
    "options", [{"fields": ["cls"]}, {"key_split": "last-dot"}, {"key_split": lambda name: tuple(name.split("."))}]
)
def test_resume_is_exact_with_options(tmp_path, options):
    urls = [put(tmp_path / f"{number}.tar", tar([*pairs(3), ("x.txt", b""), ("y.cls", b"")])) for number in range(2)]
    (epoch, *_) = check_resume(lambda: Stream(group(urls, **options)))
    assert len(epoch) == (8 if options.get("fields") else 10)


def test_a_sample(tmp_path):
    """Key, URL, and the fields in the order of the tar, in lower case."""
    path = put(
        tmp_path / "x.tar", tar([("dir/A.txt", b"1"), ("dir/A.Seg.PNG", b"2"), ("dir/A.", b"3"), ("b.txt", b"4")])
    )
    first, second = samples([path])
    assert first == {"__key__": "dir/A", "__url__": path, "txt": b"1", "seg.png": b"2", "": b"3"}
    assert list(first) == ["__key__", "__url__", "txt", "seg.png", ""]
    assert second == {"__key__": "b", "__url__": path, "txt": b"4"}
    assert [first, second] == by_webdataset(path)


def test_members_group_only_inside_a_shard(tmp_path):
    """The same key at the end of one and the start of the next: two samples; also where it is
    the same shard.
    """
    urls = [put(tmp_path / "0.tar", tar([("a.txt", b"1")])), put(tmp_path / "1.tar", tar([("a.cls", b"2")]))]
    assert [list(sample)[2:] for sample in samples([*urls, urls[1], urls[1]])] == [["txt"], ["cls"], ["cls"], ["cls"]]


def test_members_of_no_sample_do_not_part_one(tmp_path):
    path = put(
        tmp_path / "x.tar",
        tar([("a.txt", b"1"), ("._a.cls", b""), ("__meta__/x.y", b""), ("readme", b""), ("a.cls", b"2")]),
    )
    assert keys_of(samples([path])) == ["a"]


@pytest.mark.parametrize("second", ["a.jpg", "a.JPG"])
def test_a_field_twice_is_told_or_its_sample_skipped(tmp_path, second):
    """The error says where; skipped, it counts once, and the others are given."""
    path = put(
        tmp_path / "x.tar", tar([("0.jpg", b""), ("a.jpg", b"1"), (second, b"2"), (second, b"3"), ("b.jpg", b"")])
    )
    with pytest.raises(SampleError, match="twice") as caught:
        samples([path])
    assert (caught.value.url, caught.value.key, caught.value.offset) == (path, "a", 512 + 1024)
    stream = Stream(group([path], on_error="skip"))
    assert keys_of(stream) == ["0", "b"]
    assert stream.counts() == {"delivered": 2, "filtered": 0, "skipped": 1, "dropped": 0}
    with pytest.raises(SampleError) as caught:
        list(Stream(group([path], on_error="skip", max_errors=0)))
    assert "max_errors=0" in caught.value.__notes__[0]


@pytest.mark.parametrize("field", ["__key__", "__URL__", "__padding__", "__x__"])
@pytest.mark.parametrize("fields", [None, ["jpg"]])
def test_a_field_with_the_name_of_metadata_is_refused(tmp_path, field, fields):
    """Where it comes first, and in each sample; skipped, the others are given."""
    names = [f"a.{field}", "a.jpg", "b.jpg", f"c.{field}", "c.jpg", "d.jpg", f"d.{field}"]
    path = put(tmp_path / "x.tar", tar((name, b"1") for name in names))
    with pytest.raises(SampleError, match=f"'a' of shard .* has the reserved field name '{field.lower()}'") as caught:
        samples([path], fields=fields)
    assert (caught.value.url, caught.value.key, caught.value.offset) == (path, "a", 0)
    assert f"Rename the file 'a.{field}'" in str(caught.value)
    stream = Stream(group([path], on_error="skip", fields=fields))
    assert keys_of(stream) == ["b"]
    assert stream.counts()["skipped"] == 3


def test_a_key_that_comes_again(tmp_path):
    """Told by default, as a sample in pieces; warned of or taken as it is on request."""
    path = put(tmp_path / "x.tar", tar([("a.txt", b"1"), ("b.txt", b"2"), ("a.cls", b"3")]))
    with pytest.raises(
        SampleError, match=r"key 'a' comes again .* wds-pipes repair SHARD NEW .*, or pass on_repeated_key='ignore'"
    ) as caught:
        samples([path])
    assert (caught.value.url, caught.value.key, caught.value.offset) == (path, "a", 2048)
    with pytest.warns(ShardWarning, match="comes again"):
        assert keys_of(samples([path], on_repeated_key="warn")) == ["a", "b", "a"]
    assert keys_of(samples([path], on_repeated_key="ignore")) == ["a", "b", "a"]
    assert keys_of(samples([path, path], on_repeated_key="ignore")) == ["a", "b", "a"] * 2


def test_unwanted_data_is_passed_over(tmp_path):
    """Of 3 MB members in a local shard, at most the buffer around their headers is read; remote
    ones are read over.
    """
    path = put(
        tmp_path / "x.tar",
        tar(
            [
                (f"{number}.{field}", bytes(3_000_000 if field == "big" else 3))
                for number in range(8)
                for field in ("big", "cls")
            ]
        ),
    )
    fsspec.filesystem("memory").pipe("/over/x.tar", Path(path).read_bytes())
    before = bytes_read()
    for url in (path, "memory://over/x.tar"):
        assert [list(sample)[2:] for sample in Stream(group([url], fields=["cls"]))] == [["cls"]] * 8
    assert bytes_read() - before <= 0.5 * os.path.getsize(path)


def bytes_read():
    """How many bytes this process has read from files."""
    if not os.path.exists("/proc/self/io"):
        pytest.skip("needs /proc")
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_star_keeps_all_fields_that_match(tmp_path):
    """In each reader of samples, without a warning of the name with a star or a question mark."""
    path, names = tmp_path / "a.tar", ["1.jpg", "2.jpg", "note.txt", "cls"]
    path.write_bytes(tar([(f"{number}.{name}", b"7") for number in range(3) for name in names]))
    index_shards([str(path)], offsets=True)
    pipe = wp.ShardList(str(path)).open_shards().load_tar()
    for reader in (
        pipe.group_by_key(fields=["*.JPG", "cls?"]),
        wp.SampleList(str(path)).fetch_samples(fields=["*.JPG", "cls?"]),
        wp.IndexedShards(str(path), fields=["*.JPG", "cls?"]),
    ):
        assert [[name for name in sample if name[0] != "_"] for sample in reader] == [["1.jpg", "2.jpg", "cls"]] * 3
    check_resume(lambda: pipe.group_by_key(fields=["*.txt"]))


def test_fields_keep_what_they_name(tmp_path):
    """In any case and with or without a dot; a sample with none of them is counted as filtered."""
    path = put(
        tmp_path / "x.tar", tar([("a.txt", b"1"), ("a.cls", b"2"), ("b.txt", b"3"), ("c.JPG", b"4"), ("c.x.jpg", b"5")])
    )
    assert [sorted(sample)[2:] for sample in Stream(group([path], fields=["jpg;CLS"]))] == [["cls"], ["jpg"]]
    stream = Stream(group([path], fields=[".CLS", "jpg"]))
    assert [{name: value for name, value in sample.items() if name != "__url__"} for sample in stream] == [
        {"__key__": "a", "cls": b"2"},
        {"__key__": "c", "jpg": b"4"},
    ]
    assert stream.counts() == {"delivered": 2, "filtered": 1, "skipped": 0, "dropped": 0}


def test_key_split(tmp_path):
    """By the last dot, or by a function that may leave members out."""
    path = put(tmp_path / "x.tar", tar([("a.v1.txt", b"1"), ("a.v1.cls", b"2"), ("a.v2.txt", b"3"), ("Other", b"4")]))
    assert [list(sample)[:1] + list(sample)[2:] for sample in samples([path], key_split="last-dot")] == [
        ["__key__", "txt", "cls"],
        ["__key__", "txt"],
    ]
    assert keys_of(samples([path], key_split="last-dot")) == ["a.v1", "a.v2"]
    (sample,) = samples([path], key_split=lambda name: ("all", name.upper()) if "." in name else None)
    assert list(sample) == ["__key__", "__url__", "a.v1.txt", "a.v1.cls", "a.v2.txt"]


def test_names_that_are_not_utf_8(tmp_path):
    """They keep their bytes, and survive JSON, printing and errors."""
    name = b"\xff\xfe.txt"
    data = header(name, 1) + padded(b"x") + header(name, 1) + padded(b"y") + END
    path = put(tmp_path / "\udcff.tar", data[:1024] + END)
    stream = Stream(group([path]))
    state = stream.state_dict()
    (sample,) = stream
    assert sample["__key__"].encode("utf-8", "surrogateescape") == b"\xff\xfe"
    assert json.loads(json.dumps(sample["__key__"])) == sample["__key__"]
    assert json.loads(json.dumps(state)) == state
    state["lanes"]["0"]["url"].encode("ascii")
    assert sample["__key__"].encode("ascii", "backslashreplace") == b"\\udcff\\udcfe"
    path = put(tmp_path / "x.tar", data)
    with pytest.raises(SampleError) as caught:
        samples([path])
    str(caught.value).encode("ascii")


def test_members_may_come_through_another_stage(tmp_path):
    """Grouped the same, with exact resume."""
    urls = [put(tmp_path / f"{number}.tar", tar(pairs(4))) for number in range(2)]
    epoch, _ = check_resume(lambda: Stream(GroupByKey(Renewed(load(urls)))))
    assert epoch == samples(urls)


@pytest.mark.parametrize("index", [True, False])
def test_a_shard_that_begins_with_a_directory(index, tmp_path):
    """A resume at its first sample checks its number of samples, as a whole run does."""
    folder = tarfile.TarInfo("a")
    folder.type = tarfile.DIRTYPE
    urls = [put(tmp_path / f"{n}.tar", tar([folder, *pairs(3)])) for n in range(2)]
    index_shards(urls, offsets=True)

    def make(count=3):
        known = {"index": True} if index else {"samples_per_shard": count}
        return wp.ShardList(urls, **known).open_shards().load_tar().group_by_key().shuffle_buffer(1)

    check_resume(make)
    if not index:
        for cut in range(1, 6):
            _, again = resumed(make, cut, lambda: make(4))
            with pytest.raises(wp.ShardError, match="samples_per_shard"):
                list(again)


NAMELESS = tar([("0001", b"1"), ("0002", b"2")])


def test_a_shard_of_which_no_file_makes_a_sample_is_warned_of(tmp_path):
    """Once, with the first name and the reason."""
    urls = [put(tmp_path / f"{n}.tar", data) for n, data in enumerate((tar(pairs(2)), NAMELESS, NAMELESS, tar([])))]
    with pytest.warns(ShardWarning, match="'0001' is the first of 2 files, of which none makes a sample") as caught:
        assert len(samples(urls)) == 2
    assert len(caught) == 1
    assert urls[1] in str(caught[0].message)
    assert "files of samples are named KEY.FIELD, such as 0001.jpg" in str(caught[0].message)


@pytest.mark.parametrize("num_workers", [None, 0])
@pytest.mark.filterwarnings("ignore:.*none makes a sample:wds_pipes.ShardWarning")
def test_an_epoch_of_such_shards_is_an_error(tmp_path, num_workers):
    """Not of empty ones, if these are allowed."""
    urls = [put(tmp_path / f"{n}.tar", data) for n, data in enumerate((NAMELESS, NAMELESS, tar([])))]
    pipe = wp.ShardList(urls, empty_check=False).open_shards().load_tar().group_by_key()
    if num_workers is not None:
        pipe = wp.PipeLoader(pipe, batch_size=1, num_workers=num_workers)
    with pytest.raises(SampleError, match="this epoch gave nothing: .*'0001' is the first of 2 files"):
        list(pipe)
    assert samples(urls[2:]) == []


def test_directories_as_samples(tmp_path):
    """The path below the directory is the field; hidden files of zarr are fields too."""
    names = ["run1/.zgroup", "run1/cam/0.JPG", "run1/cam/1.jpg", "./run2/0.0", "run2/._x", "notes.txt", "__meta__/a"]
    path = put(tmp_path / "x.tar", tar((name, b"1") for name in names))
    first, second = samples([path], key_split="folder")
    assert list(first) == ["__key__", "__url__", ".zgroup", "cam/0.jpg", "cam/1.jpg"]
    assert (first["__key__"], second["__key__"], list(second)[2:]) == ("run1", "run2", ["0.0"])
    check_resume(lambda: Stream(group([path], key_split="folder")))
    assert [list(sample)[2:] for sample in samples([path], key_split="folder", fields=["cam/1.jpg"])] == [["cam/1.jpg"]]


@pytest.mark.parametrize(("lanes", "index"), [(1, False), (3, True)])
def test_faulty_samples_of_divided_shards(tmp_path, lanes, index):
    """Each lane skips and counts its own; each other sample comes once, and each cut resumes."""
    faulty = {(0, 0), (0, 3), (0, 4), (1, 5), (2, 2), (2, 6)}
    urls, good = [], []
    for shard in range(3):
        names = []
        for number in range(7):
            key = f"{shard}{number}"
            bad = (shard, number) in faulty
            names += [f"{key}.a", f"{key}.__x__" if bad and number % 2 else f"{key}.a" if bad else f"{key}.b"]
            good += [] if bad else [key]
        urls.append(put(tmp_path / f"{shard}.tar", tar((name, b"") for name in names)))
        if index:  # offsets of samples that are whole, at the same places
            (tmp_path / "whole").mkdir(exist_ok=True)
            whole = put(tmp_path / "whole" / f"{shard}.tar", tar((f"{n // 2}.{n % 2}", b"") for n in range(14)))
            index_shards(whole, offsets=True)
            os.rename(f"{whole}.idx", tmp_path / f"{shard}.tar.idx")
            os.rename(f"{whole}.keys", tmp_path / f"{shard}.tar.keys")

    def make():
        known = {"index": True} if index else {"samples_per_shard": 7}
        pipe = wp.ShardList(urls, **known).open_shards().load_tar().group_by_key(on_error="skip")
        return wp.PipeLoader(pipe.batch_samples(1, collate="list"), lanes=lanes, num_workers=0)

    loader = make()
    assert sorted(sample["__key__"] for batch in loader for sample in batch) == good
    assert (loader.counts()["delivered"], loader.counts()["skipped"]) == (15, 6)
    check_resume(make)
