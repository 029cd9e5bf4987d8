"""IndexedShards: samples by number and key, the same as those of the stream, from local and remote
shards; and what a damaged or stale index does.
"""

import contextlib
import itertools
import os
import pickle
import re
import shutil
import struct
import tarfile
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory import memory_below
from pipelines import FIFTY, keys_of, samples
from remote import bare, content
from tars import SORTS, fill, header, padded, tar
from torch.utils.data import DataLoader, RandomSampler

import wds_pipes as wp
from wds_pipes import tools
from wds_pipes.tar import ShardWriter, TarWriter, index_shards
from wds_pipes.testing import make_shards, same

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")


def test_the_samples_of_the_stream(indexed, stream, tmp_path):
    data = wp.IndexedShards(indexed)
    assert len(data) == len(stream) == 50
    assert [data[number] for number in range(50)] == stream == list(data)
    assert [data[number] for number in range(-50, 0)] == stream
    assert data[np.int64(7)] == data[torch.tensor(7)] == stream[7]
    assert data.__getitems__([np.int8(-1)]) == stream[-1:]
    for wrong in (50, -51, 1 << 70):
        with pytest.raises(IndexError, match="there are 50"):
            data[wrong]
    assert repr(data) == "IndexedShards(8 shards)"
    assert data.urls == indexed
    index_shards(indexed[1:4], tmp_path / "index.json")
    assert list(wp.IndexedShards(tmp_path / "index.json")) == stream[FIFTY[0] : sum(FIFTY[:4])]


@given(numbers=st.lists(st.integers(-50, 49), max_size=70))
@settings(deadline=None, suppress_health_check=list(HealthCheck), database=None)
def test_several_in_any_order_and_views(numbers, indexed, stream):
    data = wp.IndexedShards(indexed)
    expected = [stream[number] for number in numbers]
    assert data.__getitems__(numbers) == expected
    view = data[numbers]
    assert (list(view), list(view[::-1]), len(view)) == (expected, expected[::-1], len(numbers))
    assert list(view[1:5][np.array([True] * len(expected[1:5]), bool)]) == expected[1:5]


def test_fields_and_decoding(indexed, tmp_path):
    data = wp.IndexedShards(indexed, fields=["cls;json"], decode=True)
    expected = list(samples(indexed, shuffle=False).select_fields("cls", "json").decode_by_ext())
    assert all(map(same, data, expected))
    own = wp.IndexedShards(indexed, decode={"txt": len})
    assert own[3]["txt"] == len(wp.IndexedShards(indexed)[3]["txt"])
    with pytest.raises(wp.DecodeError, match="field 'txt' of sample '00000000'"):
        wp.IndexedShards(indexed, decode={"txt": int})[0]
    shards = make_shards(tmp_path, shards=1, samples=2, fields=("jpg",))
    index_shards(shards, offsets=True)
    options = {"size": (4, 6), "fit": "contain", "max_image_pixels": 64}
    stream = wp.ShardList(shards).open_shards().load_tar().group_by_key().decode_by_ext("rgb8", **options)
    assert same(list(wp.IndexedShards(shards, decode="rgb8", **options)), list(stream))


def test_keys(indexed, stream, tmp_path):
    data = wp.IndexedShards(indexed)
    assert list(data.keys()) == keys_of(stream)
    assert data.by_key("00000031") == stream[31]
    for key in ("00000050", "", "\0"):
        with pytest.raises(KeyError):
            data.by_key(key)
    with pytest.raises(KeyError):
        data[:31].by_key("00000031")
    twice = wp.IndexedShards([*make_shards(tmp_path, shards=1, samples=3), indexed[0]], index=True)
    index_shards(twice.urls[:1], offsets=True)
    with pytest.raises(wp.SampleError, match="2 samples have the key '00000001'"):
        twice.by_key("00000001")


def test_in_a_dataloader(indexed, stream):
    """Of processes that are forked; ``test_threads_and_pickles`` is for others."""
    sampler = RandomSampler(range(50), generator=torch.Generator().manual_seed(1))
    data = wp.IndexedShards(indexed)
    loader = DataLoader(data, 8, sampler=sampler, num_workers=2, collate_fn=list, multiprocessing_context="fork")
    found = [sample for batch in loader for sample in batch]
    assert sorted(keys_of(found)) == keys_of(stream)
    assert all(sample == stream[int(sample["__key__"])] for sample in found)


def test_threads_and_pickles(indexed, stream):
    data = wp.IndexedShards(indexed)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(data.__getitem__, range(50))) == stream
    assert list(pickle.loads(pickle.dumps(data))[5:9]) == stream[5:9]


def test_few_files_are_open(tmp_path):
    [shard] = make_shards(tmp_path, shards=1, samples=2)
    index_shards(shard, offsets=True)
    urls = [str(tmp_path / f"{number}.tar") for number in range(300)]
    for url in urls:
        for ending in ("", ".idx"):
            os.link(shard + ending, url + ending)
    before = len(os.listdir("/proc/self/fd"))
    data = wp.IndexedShards(urls)
    assert len(data) == 600
    assert len(os.listdir("/proc/self/fd")) == before, "counting leaves none open"
    for number in itertools.chain(range(600), range(0, 600, 7)):
        data[number]
    assert len(os.listdir("/proc/self/fd")) - before <= 260


# Writing the index


def test_writers_and_index_shards_write_the_same(indexed, tmp_path):
    writer = fill(ShardWriter(tmp_path / "x-%03d.tar", max_samples=6, offsets=True), samples(indexed, shuffle=False))
    paths, folder = list(writer.shards), tmp_path / "indexes"
    names = [path + ending for path in paths for ending in (".idx", ".keys")]
    written = {os.path.basename(name): content(name) for name in names}
    folder.mkdir()
    index_shards(paths, offsets=folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == written
    assert list(map(bare, wp.IndexedShards(paths))) == list(map(bare, wp.IndexedShards(indexed)))
    assert list(wp.IndexedShards(paths, index=folder)) == list(wp.IndexedShards(paths))
    first = content(paths[0] + ".idx")
    assert len(first) == 8 * 7
    assert struct.unpack("<7Q", first)[0] == 0


def test_what_has_no_offsets(tmp_path):
    path = make_shards(tmp_path, shards=1, samples=3)[0]
    with pytest.raises(wp.ShardError, match=r"no index of offsets: .*\.tar\.idx"):
        len(wp.IndexedShards(path))
    index_shards(path, offsets=True)
    os.unlink(f"{path}.keys")  # as Energon leaves it
    with pytest.raises(wp.ShardError, match=r"has no index of keys: there is no .*\.tar\.keys"):
        wp.IndexedShards(path).by_key("00000001")


# Indexes that do not fit


def put(directory, samples):
    """A shard of these samples, with its index."""
    fill(
        ShardWriter(directory / "x-%d.tar", offsets=True, overwrite=True),
        ({"__key__": key, **fields} for key, fields in samples),
    )
    return directory / "x-0.tar"


OLD = [(f"{number:03d}", {"cls": number, "txt": "x" * 10 * number}) for number in range(9)]
NEW = {
    "other sizes": [(key, {"cls": 1, "txt": "y" * 600 * number}) for number, (key, _) in enumerate(OLD)],
    "fewer samples": OLD[:5],
    "more samples": [*OLD, ("x", {"txt": "more"})],
    "another grouping": [(f"{number:03d}", {"txt": "x"}) for number in range(18)],
    "samples together": [(f"{number:03d}", {"a": b"", "b": b"", "cls": 1, "txt": "x"}) for number in range(5)],
}


@pytest.mark.parametrize("name", NEW)
def test_a_stale_index_is_an_error_and_never_a_wrong_sample(name, tmp_path):
    stale = content(f"{put(tmp_path, OLD)}.idx")
    path = put(tmp_path, NEW[name])
    right = {sample["__key__"]: sample for sample in wp.IndexedShards(path)}
    (tmp_path / "x-0.tar.idx").write_bytes(stale)
    data, errors = wp.IndexedShards(path), list[str]()
    for number in range(9):
        try:
            sample = data[number]
        except wp.ShardError as error:
            errors.append(str(error))
        else:
            assert sample == right[sample["__key__"]], "where both agree"
    assert errors
    for error in errors:
        assert "cannot be used: the shard is another than the indexed one" in error
        assert "Make it with: wds-pipes index SHARDS --offsets" in error


READERS = {
    "IndexedShards": lambda index, options: wp.IndexedShards(index, storage_options=options)[0],
    "SampleList": lambda index, options: next(iter(wp.SampleList(index, storage_options=options).fetch_samples())),
    "lazy resume": lambda index, options: next(resumed(index, options)),
}
EQUAL = [(f"{number:03d}", {"cls": number}) for number in range(9)]


def resumed(index, options):
    """The samples after a resume of a shuffle, which are read by their numbers."""
    pipes = [
        wp.ShardList(index, storage_options=options).open_shards().load_tar().group_by_key().shuffle_buffer(3)
        for _ in range(2)
    ]
    next(iter(pipes[0]))
    pipes[1].load_state_dict(pipes[0].state_dict())
    return iter(pipes[1])


def put_old(directory, samples):
    """Write a shard long ago."""
    path = put(directory, samples)
    os.utime(path, (1e9, 1e9))
    return path


@pytest.mark.parametrize("reader", READERS)
def test_a_shard_that_was_written_again_with_the_same_size_is_a_warning(reader, tmp_path):
    """Its time of modification shows it, which may also have changed alone. With another size, it
    is an error: its new index of offsets fits it, but the numbers are of other samples now.
    """
    index = tmp_path / "index.json"
    index_shards(put_old(tmp_path, EQUAL), index)
    READERS[reader](index, None)
    path = put(tmp_path, EQUAL[::-1])
    with pytest.warns(wp.ShardWarning, match=f"shard {path} was written again since it was indexed.*wds-pipes index"):
        READERS[reader](index, None)
    put(tmp_path, [(key, {**fields, "more": b"y" * 9999}) for key, fields in EQUAL])
    with pytest.raises(wp.ShardError, match=r"has \d+ bytes, and index.json says \d+.*wds-pipes index"):
        READERS[reader](index, None)


@pytest.mark.parametrize(
    ("reader", "remote"), [("IndexedShards", "s3"), ("SampleList", "web"), ("lazy resume", "s3")], indirect=["remote"]
)
def test_a_remote_shard_that_was_written_again_with_the_same_size_is_an_error(reader, remote, tmp_path):
    """The ETag in the response shows it: no request is made for that."""
    index, options = tmp_path / "index.json", remote.storage_options
    path = put(tmp_path, EQUAL)
    url, _ = remote.put("d/x-0.tar", content(path)), remote.put("d/x-0.tar.idx", content(f"{path}.idx"))
    index_shards(url, index, storage_options=options)
    READERS[reader](index, options)
    path = put(tmp_path, EQUAL[::-1])
    remote.put("d/x-0.tar", content(path))
    with pytest.raises(wp.ShardError, match="was written again since it was indexed"):
        READERS[reader](index, options)


def test_a_copy_of_shards_and_index_is_not_taken_for_shards_that_were_written_again(tmp_path):
    """Its times of modification differ, and its samples are the same."""
    old, new = tmp_path / "old", tmp_path / "new"
    os.mkdir(old)
    index_shards(put_old(old, EQUAL), old / "index.json")
    shutil.copytree(old, new, copy_function=shutil.copyfile)
    for read in READERS.values():
        read(new / "index.json", None)
    assert wp.IndexedShards(new / "x-0.tar", index=old / "index.json")[0] is not None


@pytest.mark.parametrize("more", [0, 5])
def test_an_index_of_dali_under_our_name_is_named(more, tmp_path):
    """Whatever its size is: it is read as numbers only if it may be some."""
    path = put(tmp_path, OLD)
    (tmp_path / "x-0.tar.idx").write_text(f"v1.0 1\ntxt 512 0 {'x' * more}000.txt\n")
    with pytest.raises(wp.ShardError, match="of DALI"):
        len(wp.IndexedShards(path))


@pytest.mark.parametrize("added", [100, 1024, 1536], ids=["no block", "the same", "falls"])
def test_a_number_that_is_no_offset_is_refused(added, tmp_path):
    """They rise by whole blocks. Else a sample would be looked for where none begins."""
    path = put(tmp_path, OLD)
    offsets = np.frombuffer(content(f"{path}.idx"), "<u8").copy()
    offsets[3] = offsets[4] - 1024 + added
    (tmp_path / "x-0.tar.idx").write_bytes(offsets.tobytes())
    with pytest.raises(wp.ShardError, match="not offsets of samples, which rise in steps of 512 bytes"):
        wp.IndexedShards(path)[8]


@pytest.mark.parametrize(
    ("use", "count"),
    [(len, 3), (lambda data: data[9], 7), (lambda data: list(data[9:]), 3)],
    ids=["length", "one", "several"],
)
def test_a_stale_index_of_a_shard_that_is_skipped(use, count, tmp_path):
    """Else the numbers of all later shards were those of other samples."""
    samples = [{"__key__": f"{number:02d}", "txt": f"{number}"} for number in range(15)]
    fill(ShardWriter(tmp_path / "%d.tar", max_samples=5, offsets=True), samples)
    stale = content(tmp_path / "0.tar.idx")
    fill(
        ShardWriter(tmp_path / "%d.tar", offsets=True, overwrite=True),
        ({**sample, "more": b"y"} for sample in samples[:count]),
    )
    (tmp_path / "0.tar.idx").write_bytes(stale)
    with pytest.raises(wp.ShardError, match="0.tar.idx of shard .* another than the indexed one"):
        use(wp.IndexedShards([f"{tmp_path}/{number}.tar" for number in range(3)]))


DAMAGE = st.tuples(
    st.sampled_from(["cut", "flip", "swap", "append", "random"]), st.integers(0, 1 << 20), st.binary(min_size=1)
)


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(damages=st.tuples(DAMAGE, DAMAGE))
def test_any_damage_to_an_index_is_an_error_or_harmless(damages, tmp_path):
    path, expected = put(tmp_path, OLD), dict(OLD)
    for ending, (damage, place, some) in zip((".idx", ".keys"), damages, strict=True):
        right = content(f"{path}{ending}")
        place %= len(right)
        wrong = {
            "cut": right[:place],
            "flip": right[:place] + bytes([right[place] ^ some[0]]) + right[place + 1 :],
            "swap": right[place:] + right[:place],
            "append": right + some,
            "random": some,
        }
        (tmp_path / f"x-0.tar{ending}").write_bytes(wrong[damage])
    with contextlib.suppress(wp.ShardError, KeyError):
        found = wp.IndexedShards(path)
        for sample in found:
            assert sample["txt"].decode() == expected[sample["__key__"]]["txt"]
        for key in expected:
            assert found.by_key(key)["__key__"] == key


READ = {
    "one by one": lambda url, order: map(wp.IndexedShards(url).__getitem__, order),
    "several": lambda url, order: wp.IndexedShards(url).__getitems__(order),
    "list": lambda url, order: wp.SampleList(url, where=order).fetch_samples(),
    "streamed": lambda url, order: wp.SampleList(url).fetch_samples(),
}


@pytest.mark.parametrize(
    ("read", "stem"), [*zip(READ, ["", "d/" * 10 + "n" * 90, "n" * 120 + "/", "n" * 300], strict=True)]
)
def test_a_wrong_offset_never_gives_half_a_sample(stem, read, tmp_path):
    """Whichever member it is that of, and also where names are long: in ustar, and in pax."""
    members = [(f"{stem}{number}.{field}", field.encode()) for number in range(4) for field in ("a", "b", "c")]
    members.insert(3, ("README", b"of no sample"))
    url = str(tmp_path / "x.tar")
    with open(url, "wb") as file:
        file.write(tar(members, format=tarfile.PAX_FORMAT if len(stem) > 200 else tarfile.USTAR_FORMAT))
    index_shards(url, offsets=True)
    right = list(wp.IndexedShards(url))
    offsets = np.fromfile(f"{url}.idx", "<u8")
    with tarfile.open(url) as archive:
        places = {place for member in archive for place in (member.offset, member.offset_data - 512)}
    wrong = 0
    for number, place in itertools.product(range(5), sorted(places)):
        changed = [*offsets[:number], place, *offsets[number + 1 :]]
        if place == offsets[number] or sorted(set(changed)) != changed:
            continue
        np.array(changed, "<u8").tofile(f"{url}.idx")
        wrong += 1
        for one in range(4):
            order = [one, (one + 2) % 4]
            with contextlib.suppress(wp.ShardError):
                for sample in READ[read](url, order):
                    assert sample in right
    assert wrong >= 12


def test_a_wrong_offset_never_cuts_a_folder(tmp_path):
    """Nor where names do not begin as keys do."""
    url = str(tmp_path / "x.tar")
    with open(url, "wb") as file:
        file.write(tar([(f"./{number}/{field}", field.encode()) for number in range(3) for field in ("a", "b", "c")]))
    index_shards(url, offsets=True, key_split="folder")
    offsets = np.fromfile(f"{url}.idx", "<u8")
    np.array([offsets[0], offsets[1] - 1024, *offsets[2:]], "<u8").tofile(f"{url}.idx")
    with pytest.raises(wp.ShardError, match="sample '0' goes on at byte 2048"):
        wp.IndexedShards(url, key_split="folder")[0]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(place=st.integers(0, 9), inserted=st.one_of(st.none(), st.integers(1, 40)), read=st.sampled_from(list(READ)))
def test_an_offset_that_is_missing_or_too_many_never_gives_another_number(place, inserted, read, tmp_path):
    """The numbers of the keys differ from it; without them, that of an ``index.json``."""
    url, index = str(put(tmp_path, OLD)), str(tmp_path / "index.json")
    index_shards(url, index)
    offsets = np.fromfile(f"{url}.idx", "<u8").tolist()
    changed = sorted(
        {*offsets[:place], *offsets[place + (inserted is None) :], *([inserted * 512] if inserted else [])}
    )
    if changed == offsets:
        return
    np.array(changed, "<u8").tofile(f"{url}.idx")
    assert "stale-index" in tools.verify(url).counts
    for keys in (True, False):
        if not keys:
            os.unlink(f"{url}.keys")
        with pytest.raises(wp.ShardError, match="x-0.tar.idx"):
            list(READ[read](url if keys else index, [7, 3]))


@pytest.mark.parametrize("ending", [".idx", ".keys"])
def test_a_huge_index_takes_no_memory(ending, tmp_path):
    """It is read only as far as its shard can have samples."""
    path = put(tmp_path, OLD)
    os.truncate(f"{path}{ending}", 1 << 40)
    data = wp.IndexedShards(path)
    with (
        memory_below(8_000_000),
        pytest.raises(wp.ShardError, match=r"has more than \d+ bytes, too many for its samples"),
    ):
        data.by_key("004") if ending == ".keys" else data[3]


def test_a_damaged_shard_is_an_error_in_words(tmp_path):
    path = put(tmp_path, OLD)
    whole, offsets = content(path), struct.unpack("<10Q", content(f"{path}.idx"))
    path.write_bytes(whole[: offsets[4] + 700])
    for number in (0, 4, 8):
        with pytest.raises(wp.ShardError, match=r"it has \d+ bytes \(it may be cut\)"):
            wp.IndexedShards(path)[number]
    path.write_bytes(whole[: offsets[2] + 6] + b"\xff" * 40 + whole[offsets[2] + 46 :])
    data = wp.IndexedShards(path)
    with pytest.raises(wp.ShardError, match="checksum"):
        data[2]
    assert data[1]["__key__"] == "001"
    path.unlink()
    assert data[1]["__key__"] == "001", "an open file stays"
    with pytest.raises(wp.ShardError, match="does not exist"):
        wp.IndexedShards(path)[1]


# What follows the end of a name is no part of it.
ENDED = [b"a.x\0.y", b"a.y\0\0z", b"b.x", b"b.y", b"cc.x", b"d\0.x", b"d.x", b"d.y\0.x"]
KINDS_OF_TARS = {**SORTS, "ended names": b"".join(header(name, 1) + padded(b"1") for name in ENDED) + bytes(1024)}


@pytest.mark.filterwarnings("ignore:.* link to .* is skipped:wds_pipes.ShardWarning")
@pytest.mark.parametrize("name", KINDS_OF_TARS)
def test_all_kinds_of_tars(name, tmp_path):
    """Long names, directories between, and archives after each other."""
    (tmp_path / "a.tar").write_bytes(KINDS_OF_TARS[name])
    index_shards(tmp_path / "a.tar", offsets=True, on_repeated_key="ignore", concatenated=True)
    stream = wp.ShardList(tmp_path / "a.tar", empty_check=False).open_shards().load_tar(concatenated=True)
    data = wp.IndexedShards(tmp_path / "a.tar")
    assert [data[number] for number in range(len(data))] == list(data)
    assert list(data) == list(stream.group_by_key(on_repeated_key="ignore"))


def test_a_link_is_told_of_once_for_a_shard(tmp_path):
    """And not for each sample that has one, nor each time that it is read."""
    links = [tarfile.TarInfo(f"{number}.link") for number in range(3)]
    for info in links:
        info.type, info.linkname = tarfile.SYMTYPE, "x"
    path = tmp_path / "a.tar"
    path.write_bytes(tar([part for info in links for part in ((f"{info.name[0]}.a", b"1"), info)]))
    with pytest.warns(wp.ShardWarning, match="link"):
        index_shards(path, offsets=True)
    data = wp.IndexedShards(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert keys_of(data) == keys_of(data) == ["0", "1", "2"]
    assert [str(warning.message).count("link") > 0 for warning in caught] == [True]


MEMBERS = st.builds(
    "{}{}{}".format,
    st.sampled_from(["", "", "d/", "d.e/", "./", "__meta__/", "_", "__", "."]),
    st.sampled_from(["a", "b", "\u00e9", "", "k" * 96, "k" * 97, "k" * 98]),  # names of up to 99 bytes are usual
    st.sampled_from(["", ".x", ".X", ".y", ".x.y", ".", "./x"]),
)


def outcome(call):
    """What a call gives, or what its error tells."""
    try:
        return call()
    except wp.SampleError as error:
        return (error.url, error.key, error.offset) if error.url else []  # there is no sample


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(
    names=st.lists(MEMBERS, max_size=12),
    key_split=st.sampled_from(["first-dot", "last-dot", "folder"]),
    on_repeated_key=st.sampled_from(["raise", "ignore"]),
)
@pytest.mark.filterwarnings("ignore:.*none makes a sample:wds_pipes.ShardWarning")
def test_any_names_give_the_samples_of_the_stream(names, key_split, on_repeated_key, tmp_path):
    """The index has their number, and what the stream refuses, since a key comes twice or a field,
    is refused.
    """
    url, options = str(tmp_path / "a.tar"), {"key_split": key_split, "on_repeated_key": on_repeated_key}
    members = ((name, b"%d" % number * 300) for number, name in enumerate(names))
    (tmp_path / "a.tar").write_bytes(tar(members, format=tarfile.GNU_FORMAT))
    stream = outcome(lambda: list(wp.ShardList(url).open_shards().load_tar().group_by_key(**options)))
    indexed = outcome(lambda: index_shards(url, offsets=True, **options)[url].samples)
    assert indexed == (len(stream) if isinstance(stream, list) else stream)
    if isinstance(stream, list):
        data = wp.IndexedShards(url, key_split=key_split)
        for _ in range(2):  # the names of fields are known then
            assert [data[number] for number in range(len(data))] == stream


# Remote shards


@pytest.fixture
def far(remote, indexed):
    """Those shards in a store, with their offsets."""
    for path in indexed:
        for ending in (".idx", ".keys"):
            if data := content(path + ending):
                remote.put(f"d/{os.path.basename(path)}{ending}", data)
    return [remote.put(f"d/{os.path.basename(path)}", content(path)) for path in indexed]


@pytest.mark.parametrize("remote", ["s3"], indirect=True)
def test_remote_samples_one_request_for_each(remote, far, indexed, stream):
    data = wp.IndexedShards(far, storage_options=remote.storage_options, connections=4)
    assert bare(data[7]) == bare(stream[7])
    before = len(remote.faults.stats(remote.reads))
    assert bare(data[33]) == bare(stream[33])
    assert len(remote.faults.stats(remote.reads)) - before == 1
    numbers = [45, 3, 12, 4, 3, 31]
    assert [bare(sample) for sample in data.__getitems__(numbers)] == [bare(stream[number]) for number in numbers]
    assert bare(data.by_key("00000031")) == bare(stream[31])
    assert list(map(bare, data)) == list(map(bare, stream))
    beside = wp.IndexedShards(far, index=os.path.dirname(indexed[0]), storage_options=remote.storage_options)
    assert bare(beside[-1]) == bare(stream[-1])


@pytest.mark.parametrize("remote", ["gcs"], indirect=True)
def test_a_remote_shard_of_another_size_is_an_error(remote, far):
    remote.put("d/shard-000000.tar", b"short")
    with pytest.raises(wp.ShardError, match="another than the indexed one"):
        wp.IndexedShards(far, storage_options=remote.storage_options)[2]


def test_counts_of_an_index_spare_the_indexes_of_offsets(web, indexed, stream, tmp_path):
    """They are read when they are needed."""
    for path in indexed:
        web.put(f"d/{os.path.basename(path)}.idx", content(f"{path}.idx"))
    urls = [web.put(f"d/{os.path.basename(path)}", content(path)) for path in indexed]
    index_shards(indexed, tmp_path / "index.json")
    text = content(tmp_path / "index.json").decode()
    # beside the shards, as it is there
    listed = web.put("d/index.json", re.sub(r'"url": "[^"]*/', '"url": "', text).encode())
    for data in (wp.IndexedShards(listed), wp.IndexedShards(urls, index=listed)):
        web.faults.clear()
        assert len(data) == 50
        assert [bare(data[33]), bare(pickle.loads(pickle.dumps(data))[33])] == [bare(stream[33])] * 2
        assert len([request for request in web.faults.stats(r"\.idx") if request.method == "GET"]) == 2
        assert list(map(bare, data)) == list(map(bare, stream))


def test_counts_that_do_not_fit_are_an_error(indexed, tmp_path):
    index_shards(indexed, tmp_path / "index.json")
    text = content(tmp_path / "index.json").decode()
    (tmp_path / "index.json").write_text(text.replace(f'"nsamples": {FIFTY[0]}', f'"nsamples": {FIFTY[0] + 1}', 1))
    data = wp.IndexedShards(indexed, index=tmp_path / "index.json")
    assert len(data) == 51
    with pytest.raises(wp.ShardError, match=rf"has {FIFTY[0]} samples, and the shard was counted with {FIFTY[0] + 1}"):
        data[0]
    with pytest.raises(ValueError, match="is not in index"):
        wp.IndexedShards(put(tmp_path, OLD), index=tmp_path / "index.json")


@pytest.mark.parametrize("remote", ["web"], indirect=True)
def test_a_sample_that_is_requested_twice_is_two_dicts(remote, far, indexed):
    for data in (wp.IndexedShards(indexed), wp.IndexedShards(far, storage_options=remote.storage_options)):
        one, other, again = data.__getitems__([7, 3, 7])
        assert (one, one["__key__"], other["__key__"]) == (again, data[7]["__key__"], data[3]["__key__"])
        assert one is not again


@pytest.mark.parametrize("remote", ["web"], indirect=True)
def test_shards_of_a_cache(remote, far, stream, tmp_path):
    """What a pipe has stored is read there; of the other shards, ranges. An open file stays."""
    options = {"cache": wp.ShardCache(tmp_path / "cache", max_bytes="1GB"), "storage_options": remote.storage_options}
    list(wp.ShardList(far[:5]).open_shards(**options).load_tar())
    data, stored = wp.IndexedShards(far, **options), range(sum(FIFTY[:5]))
    assert len(data) == 50
    remote.faults.clear()
    assert list(map(bare, data.__getitems__(stored))) == list(map(bare, stream[: len(stored)]))
    assert not remote.faults.stats(remote.reads)
    assert list(map(bare, data)) == list(map(bare, stream))
    assert {request.status for request in remote.faults.stats(remote.reads)} == {206}
    paths = list((tmp_path / "cache").glob("*.shard"))
    assert len(paths) == 5
    for path in paths:
        path.unlink()
    for read in (data, pickle.loads(pickle.dumps(data))):
        assert list(map(bare, read.__getitems__(stored))) == list(map(bare, stream[: len(stored)]))


@pytest.fixture
def few(tmp_path):
    """A shard of four samples with an index, and its offsets."""
    fill(TarWriter(tmp_path / "a.tar"), ({"__key__": f"k{number}", "cls": number, "txt": "x"} for number in range(4)))
    index_shards(str(tmp_path / "a.tar"), offsets=True)
    return tmp_path / "a.tar", np.fromfile(tmp_path / "a.tar.idx", "<u8")


@pytest.mark.parametrize("read", [list, lambda data: data[0], lambda data: data.__getitems__([1, 0])])
@pytest.mark.parametrize("change", [lambda offsets: offsets[1:], lambda offsets: [offsets[0] + 1024, *offsets[1:]]])
def test_an_index_without_the_first_sample(few, change, read):
    shard, offsets = few
    np.array(change(offsets), "<u8").tofile(f"{shard}.idx")
    os.unlink(f"{shard}.keys")
    with pytest.raises(wp.ShardError, match="a sample begins before byte"):
        read(wp.IndexedShards(str(shard)))


def test_a_shard_that_has_no_samples_by_its_index(few, tmp_path):
    shard, _ = few
    with TarWriter(tmp_path / "b.tar"):
        pass
    index_shards([str(shard), str(tmp_path / "b.tar")], tmp_path / "index.json", offsets=True)
    assert len(list(wp.IndexedShards(tmp_path / "index.json"))) == 4
    fill(TarWriter(tmp_path / "b.tar", overwrite=True), [{"__key__": "new", "cls": 5}])
    index_shards(str(tmp_path / "b.tar"), offsets=True)
    with pytest.raises(wp.ShardError, match="it has 1 sample, and the shard was counted with 0"):
        list(wp.IndexedShards(tmp_path / "index.json"))
    with pytest.raises(wp.ShardError, match="it has 1 sample, and the shard was counted with 0"):
        wp.SampleList(str(tmp_path / "*.tar"), index=tmp_path / "index.json")


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (lambda url: wp.IndexedShards(url)[[True, False]], TypeError, "one bool for each of 4, and this array has 2"),
        (
            lambda url: wp.IndexedShards([url, url.replace("a.tar", "b/a.tar")], index=os.path.dirname(url)),
            ValueError,
            "a directory has one index for each name",
        ),
        (lambda url: wp.IndexedShards(url).split([0.8, 0.2]), TypeError, "the shares have names"),
        (lambda url: wp.PipeLoader(wp.IndexedShards(url)), TypeError, r"pass SampleList\(urls, where=data.numbers\)"),
        (lambda url: wp.IndexedShards(url, index=False), TypeError, "index must be True, a directory or an index.json"),
        (lambda url: wp.IndexedShards(url, field=["txt"]), TypeError, "Did you mean fields"),
        (lambda url: index_shards(url, offsets="none"), ValueError, "offsets= names an existing local directory"),
        (lambda url: ShardWriter("x-%d.tgz", offsets=True), ValueError, "only uncompressed shards have offsets"),
        (lambda url: wp.IndexedShards(3), TypeError, "shards are named by a URL, a path or a list of them, not 3"),
        (lambda url: wp.IndexedShards({url}), TypeError, r"a set of shards has another order .* pass sorted\(urls\)"),
        (lambda url: wp.IndexedShards(url, key_split="last"), ValueError, "key_split must be one of 'first-dot'"),
        (lambda url: wp.SampleList(url).fetch_samples(key_split=None), ValueError, "key_split must be one of"),
        (lambda url: wp.IndexedShards(url, storage_options="a"), TypeError, "storage_options must be a dict, not str"),
        (lambda url: wp.IndexedShards(url, cache=3), TypeError, "cache is a directory or a ShardCache, not 3"),
        (lambda url: wp.IndexedShards(url).by_key(3), TypeError, "a key is a string, not 3"),
        (lambda url: wp.IndexedShards(url)["00000001"], TypeError, r"with key .00000001. write data.by_key\(key\)"),
        (lambda url: wp.IndexedShards(url).select({1, "a"}), TypeError, "keys are strings|samples are selected by"),
        (lambda url: wp.IndexedShards(url).split({"a": "x"}), TypeError, "the share of 'a' must be a number, not 'x'"),
    ],
)
def test_wrong_arguments_are_told(few, wrong, error, message):
    with pytest.raises(error, match=message):
        wrong(str(few[0]))


def test_the_index_of_keys_of_other_shards_is_an_error(tmp_path):
    """Shards of equal structure have equal offsets. The index of others replaced theirs."""
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
        samples = ({"__key__": f"{part}{number}", "cls": number} for number in range(4))
        fill(TarWriter(tmp_path / part / "000.tar"), samples)
        index_shards(str(tmp_path / part / "*.tar"), offsets=tmp_path)
    train = wp.IndexedShards(str(tmp_path / "train" / "000.tar"), index=tmp_path)
    for select in (
        lambda: train.select(["val1"]),
        lambda: train.select(exclude=["train1"]),
        lambda: train.by_key("train1"),
        lambda: train.split({"a": 0.5, "b": 0.5}),
    ):
        with pytest.raises(wp.ShardError, match="it has a sample 'train0', which the index does not have there"):
            select()
