"""``wds-pipes reshard``, ``concat``, ``split``, ``shuffle``, ``sort`` and ``mix``."""

import gzip
import hashlib
import itertools
import json
import os
import random
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from commands import outputs, refused
from commands import run_command as run
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import put, samples, tar

import wds_pipes as wp
from wds_pipes.io.outputs import PartialFile
from wds_pipes.tar.writer import whole
from wds_pipes.tools import jobs as running
from wds_pipes.tools import write_shard
from wds_pipes.tools.outputs import shard_ends


def fields_of(sample):
    return {name: value for name, value in sample.items() if name[:2] != "__"}


def read(*urls):
    """The samples of shards in order: key and fields, as they come."""
    return [(sample["__key__"], fields_of(sample)) for sample in samples([str(url) for url in urls])]


def read_all(folder):
    return read(*sorted(Path(folder).glob("*.tar")))


def members(prefix, count, seed):
    """Members of samples with long names, dotted fields and many sizes, in no order."""
    numbers = random.Random(seed)
    keys = [f"{prefix}/{'long' * (number % 40)}/{number:03d}" for number in range(count)]
    numbers.shuffle(keys)
    for place, key in enumerate(keys):
        yield f"{key}.seg.png", numbers.randbytes(numbers.randrange(3000))
        yield f"{key}.cls", str(numbers.randrange(12)).encode()
        if place % 3:
            yield f"{key}.json", json.dumps({"size": {"width": numbers.randrange(50) / 10}, "name": key[-2:]}).encode()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Four shards, one with an index, and one that is empty; the same compressed in a folder."""
    folder = tmp_path_factory.mktemp("source")
    for number, count in enumerate((40, 25, 0, 55)):
        data = tar(members("abcd"[number], count, number), format=1 + number % 2)
        (folder / f"in-{number}.tar").write_bytes(data)
        (folder / "packed").mkdir(exist_ok=True)
        (folder / f"packed/in-{number}.tar.gz").write_bytes(gzip.compress(data))
    wp.tar.index_shards(str(folder / "in-1.tar"), offsets=True)
    os.utime(folder / "in-0.tar", (1e9, 1e9))
    return folder


@pytest.fixture(scope="module")
def expected(source):
    return read_all(source)


COMMANDS = {
    "reshard": ["reshard", "--max-samples", 13],
    "split": ["split", "--shares", "train=0.8,val=0.2", "--max-bytes", "100kB"],
    "shuffle": ["shuffle", "--seed", 5, "--shards", 6],
    "sort": ["sort", "--by", "cls", "--max-samples", 17],
    "mix": ["mix", "--max-samples", 13],
    "filter": ["filter", "--every", 3, "--drop-fields", "json"],
    "dedup": ["dedup", "--by", "cls"],
}


def call(name, source, dest, *more, code=0):
    given = [f"{source}/in-0.tar=1", f"{source}/in-[13].tar=2.5"] if name == "mix" else [f"{source}/*.tar"]
    command, *options = COMMANDS[name]
    return run(command, *given, dest, *options, *more, code=code)


@pytest.mark.slow
def test_every_command_has_each_of_many_samples(tmp_path, monkeypatch):
    """Commands that read samples, of which there are more than in any of their buffers."""
    count = 9_000
    (tmp_path / "in").mkdir()
    write_shard(str(tmp_path / "in/a.tar"), ({"__key__": f"{n:05d}", "cls": b"%d" % n} for n in range(count)))
    (tmp_path / "own.py").write_text("def same(sample): return sample\n")
    monkeypatch.chdir(tmp_path)
    for number, command in enumerate((
        "reshard in {}", "shuffle in {}", "shuffle in {} --memory 3MB", "sort in {} --by cls",
        "mix in/a.tar=1 {}", "split in {} --shares a=0.5,b=0.5", "concat in {}.tar", "map own:same in {}",
        "filter in {} --drop-fields x", "dedup in {}", "join in {} --with in --prefer first", "repair in {}",
        "export in parquet --to parquet", "export in tfrecord --to tfrecord", "export in jsonl --to jsonl",
        "convert parquet {} --from parquet", "convert tfrecord {} --from tfrecord",
    )):  # fmt: skip
        told = run(*command.format(f"out-{number}").split(), "--json").stdout
        assert sum(fact["samples"] for fact in json.loads(told)["facts"].values()) == count, command
    for folder in filter(os.path.exists, (f"out-{number}" for number in range(number + 1))):
        assert len({key for key, _ in read(*sorted(Path(folder).rglob("*.tar")))}) == count, folder
    assert len({key for key, _ in read("out-6.tar")}) == count


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """What each command writes in one process."""
    folder = tmp_path_factory.mktemp("made")
    for name in COMMANDS:
        call(name, source, folder / name)
    return folder


def test_reshard_keeps_samples_and_order(source, expected, made):
    assert read_all(made / "reshard") == expected
    shards = sorted((made / "reshard").glob("*.tar"))
    assert [len(read(shard)) for shard in shards] == [13] * 9 + [3]
    indexed = wp.IndexedShards(str(made / "reshard" / "index.json"))
    assert [(sample["__key__"], fields_of(sample)) for sample in indexed] == expected
    assert indexed.by_key(expected[77][0])["cls"] == expected[77][1]["cls"]
    wp.tar.index_shards(list(map(str, shards)), made / "again.json", offsets=True)  # the same indexes
    fresh = {path.name: path.read_bytes() for path in (made / "reshard").iterdir() if path.suffix in (".idx", ".keys")}
    assert {name: data for name, data in outputs(made / "reshard").items() if name in fresh} == fresh


def test_shuffle_is_the_order_of_a_shuffled_list(made, expected):
    found = read_all(made / "shuffle")
    assert sorted(found) != found != expected
    shuffled = wp.SampleList(str(made / "reshard/*.tar"), shuffle=True, seed=5).fetch_samples()
    assert found == [(sample["__key__"], fields_of(sample)) for sample in shuffled]
    assert [len(read(shard)) for shard in sorted((made / "shuffle").glob("*.tar"))] == [20] * 6


def test_split_is_by_the_keys(made, expected):
    views = wp.IndexedShards(str(made / "reshard/*.tar")).split({"train": 0.8, "val": 0.2})
    for name, view in views.items():
        keys = [sample["__key__"] for sample in view]
        assert read_all(made / "split" / name) == [pair for pair in expected if pair[0] in keys]
        assert len(wp.IndexedShards(str(made / "split" / name / "index.json"))) == len(keys)
        assert all(path.stat().st_size <= 100_000 for path in (made / "split" / name).glob("*.tar"))
    assert {path.name for path in (made / "split").iterdir()} == {".wds-pipes", "train", "val"}


def test_mix_keeps_proportions_and_ends_with_the_first(made, expected, source, tmp_path):
    found = read_all(made / "mix")
    one, other = expected[:40], expected[40:]
    assert [pair for pair in found if pair in one] == one[: sum(pair in one for pair in found)]
    assert [pair for pair in found if pair in other] == other[: sum(pair in other for pair in found)]
    for place in range(len(found)):
        drawn = sum(pair in one for pair in found[:place])
        assert abs(drawn - place / 3.5) < 1
    assert len(found) in (111, 112, 113)  # 80 of the other data set, and 1 / 2.5 of it
    call("mix", source, tmp_path, "--exhausted", "drop")
    longer = read_all(tmp_path)
    assert longer[: len(found)] == found
    assert sorted(longer, key=repr) == sorted(expected, key=repr)


def test_sort_by_a_field_is_stable(made, expected):
    assert read_all(made / "sort") == sorted(expected, key=lambda pair: int(pair[1]["cls"]))


@pytest.mark.parametrize(
    ("by", "value"),
    [
        (None, lambda key, fields: key),
        ("json:size.width", lambda key, fields: json.loads(fields["json"])["size"]["width"]),
        ("json:name", lambda key, fields: json.loads(fields["json"])["name"]),
    ],
)
def test_sort_by_keys_and_values_in_json(expected, tmp_path, by, value):
    pairs = [(key, fields) for key, fields in expected if "json" in fields]
    (tmp_path / "in").mkdir()
    for start in range(0, len(pairs), 20):
        part = [(f"{key}.{name}", data) for key, fields in pairs[start : start + 20] for name, data in fields.items()]
        (tmp_path / f"in/{start:03d}.tar").write_bytes(tar(part, format=1))
    run("sort", tmp_path / "in", tmp_path / "out", *(["--by", by] if by else []))
    assert read_all(tmp_path / "out") == sorted(pairs, key=lambda pair: value(*pair))


@pytest.mark.parametrize(
    "values",
    [
        ["\U00010000", "\uffff", "z", "", "10", "9", "z", "\ud800", "\0"],
        [1 << 64, (1 << 64) - 1, 1.5, -(1 << 63) - 1, float("inf"), 1, True, 1e300, -0.0, 0, float(1 << 64)],
    ],
    ids=["texts", "numbers"],
)
def test_values_are_sorted_as_python_sorts_them(values, tmp_path):
    put(
        tmp_path / "a.tar",
        tar([(f"{n:02d}.json", json.dumps({"v": value}).encode()) for n, value in enumerate(values)]),
    )
    run("sort", tmp_path / "a.tar", tmp_path / "out", "--by", "json:v")
    assert [int(key) for key, _ in read_all(tmp_path / "out")] == sorted(range(len(values)), key=values.__getitem__)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_way_writes_the_same_bytes(name, source, made, tmp_path):
    """In shares in any order, with little memory, and after a part of it was removed."""
    whole = outputs(made / name)
    assert "would write" in call(name, source, tmp_path / "shares", "--dry-run").stdout
    assert not (tmp_path / "shares").exists()
    told = [call(name, source, tmp_path / "shares", "--tasks", 3, "--task", index).stdout for index in (2, 0, 1)]
    assert outputs(tmp_path / "shares") == whole
    assert [" tasks" in one for one in told] == [True, True, False]
    little = ["--memory", "6kB"] if name not in ("filter", "dedup") else []
    call(name, source, tmp_path / "little", *little, *(["-j", 2] if name == "shuffle" else []))
    assert outputs(tmp_path / "little") == whole
    min((tmp_path / "little").rglob("*.tar")).unlink()
    assert " there already)" in call(name, source, tmp_path / "little").stdout
    assert outputs(tmp_path / "little") == whole


def test_md5s(source, made, tmp_path):
    """With ``--md5`` only ``index.json`` differs; ``index`` adds the same MD5s."""
    plain = shutil.copytree(made / "shuffle", tmp_path / "plain")
    place = tmp_path / "md5"
    call("shuffle", source, place, "--md5")
    assert "--md5 was True, and is now not given" in call("shuffle", source, place, code=2).stderr
    assert {**outputs(place), "index.json": b""} == {**outputs(plain), "index.json": b""}
    run("index", f"{plain}/*.tar", "-o", plain / "index.json")
    assert " there already)" in call("shuffle", source, plain).stdout  # which keeps what was added
    added, own = (json.loads((path / "index.json").read_text())["shardlist"] for path in (plain, place))
    assert [entry["md5sum"] for entry in added] == [entry["md5sum"] for entry in own]


@pytest.mark.parametrize(
    "command",
    [
        ["reshard", "IN", "OUT"],
        ["mix", "IN=1", "OUT"],
        ["concat", "IN", "OUT/all.tar"],
        ["filter", "IN", "OUT", "--fields", "cls"],
        ["export", "IN", "OUT", "--to", "jsonl"],
        ["download", "IN", "OUT"],
    ],
    ids=lambda command: command[0],
)
def test_a_shard_of_another_size_than_the_index_that_is_given_says_is_refused(command, source, tmp_path):
    """It would be written as if nothing was missing."""
    index, out = tmp_path / "in/index.json", tmp_path / "out"
    shutil.copytree(source, index.parent, ignore=shutil.ignore_patterns("packed", "*.idx", "*.keys"))
    out.mkdir()
    run("index", f"{index.parent}/*.tar", "-o", index)
    shard = max(index.parent.glob("*.tar"), key=lambda path: path.stat().st_size)
    size = shard.stat().st_size
    with wp.TarWriter(shard, overwrite=True) as writer:
        writer.write({"__key__": "a", "cls": 1})
    told = refused(*(word.replace("IN", str(index)).replace("OUT", str(out)) for word in command))
    assert f"{shard} has 10,240 bytes, and its index says {size:,}" in told
    assert "wds-pipes index" in told
    assert [path for path in out.rglob("*") if path.is_file() and ".wds-pipes" not in path.parts] == []


def test_concat(source, expected, tmp_path):
    out = tmp_path / "all.tar"
    told = run("concat", f"{source}/*.tar", out).stdout
    assert told == f"written to {out}: 1 shard, 120 samples, {out.stat().st_size / 1000:.0f} kB\n"
    before = outputs(tmp_path)
    assert "all.tar exists: pass --overwrite" in refused("concat", f"{source}/*.tar", out)
    told = json.loads(run("concat", f"{source}/packed/*", out, "--overwrite", "--json").stdout)
    assert told["facts"][str(out)]["md5"] == hashlib.md5(out.read_bytes()).hexdigest()
    assert outputs(tmp_path) == before


@pytest.mark.parametrize(("files", "number"), [(0, signal.SIGINT), (1, signal.SIGTERM), (2, signal.SIGINT)])
def test_a_concat_that_ends_early_goes_on(source, expected, tmp_path, *, monkeypatch, files, number):
    """The shard appears after its indexes, so the same command can be run again."""
    true, done, out = PartialFile.commit, [], tmp_path / "all.tar"

    def commit(file):
        if len(done) == files:
            signal.raise_signal(number)
        done.append(true(file))

    with monkeypatch.context() as patch:
        patch.setattr(PartialFile, "commit", commit)
        run("concat", f"{source}/*.tar", out, code=128 + number)
    assert len(list(tmp_path.iterdir())) == files
    assert not out.exists()
    run("concat", f"{source}/*.tar", out)
    assert [(sample["__key__"], fields_of(sample)) for sample in wp.IndexedShards(str(out))] == expected


@pytest.mark.parametrize("name", ["reshard", "split", "shuffle", "sort", "mix"])
def test_compressed_shards(name, source, made, tmp_path):
    """They are read in order; what would need another order names the mend."""
    command, *options = COMMANDS[name]
    packed = f"{source}/packed"
    given = [f"{packed}/in-0.tar.gz=1", f"{packed}/in-[13].tar.gz=2.5"] if name == "mix" else [packed]
    in_order = name in ("reshard", "split", "mix")
    told = run(command, *given, tmp_path, *options, code=0 if in_order else 2).stderr
    assert outputs(tmp_path) == (outputs(made / name) if in_order else {})
    assert in_order or "is compressed, so its samples cannot be read in any order: write unc" in told


def test_a_shard_that_was_changed_is_indexed_again(source, expected, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(source, data)
    run("reshard", data / "in-0.tar", data / "in-1.tar", tmp_path / "out", "--max-samples", 50)
    made = list((tmp_path / "out/.wds-pipes/inputs").rglob("*.idx"))
    assert [path.name for path in made] == ["in-0.tar.idx"]  # the other has one beside it
    (data / "in-0.tar").write_bytes((data / "in-3.tar").read_bytes())
    again = ["reshard", data / "in-0.tar", data / "in-1.tar", tmp_path / "out", "--max-samples", 50]
    assert "another job: the inputs were changed: 2 of 2 tasks would be other" in refused(*again)
    run(*again, "--overwrite")
    assert read_all(tmp_path / "out") == expected[65:] + expected[40:65]


def test_a_wrong_command_leaves_a_running_one_alone(source, tmp_path):
    """Its indexes of shards stay, whether other inputs or other options are named."""
    call("split", source, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    options = ["--shares", "train=0.8,val=0.2"]
    assert "another job: it was made by 'split'" in refused("reshard", f"{source}/*.tar", tmp_path)
    assert "another job: --max-bytes was" in refused("split", f"{source}/*.tar", tmp_path, *options)
    message = refused("split", source / "in-3.tar", tmp_path, *options, "--max-bytes", "100kB")
    assert "another job: the inputs were changed" in message
    assert before.items() <= {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}.items()


def test_an_index_of_keys_of_another_shard_is_refused(tmp_path):
    """Also if the offsets fit: samples would come into wrong splits, or be left out."""
    old, new = (tar((f"{letter}{number}.txt", b"") for number in range(9)) for letter in "ab")
    put(tmp_path / "x.tar", old)
    wp.tar.index_shards(str(tmp_path / "x.tar"), offsets=True)
    put(tmp_path / "x.tar", new)
    told = [refused("split", tmp_path / "x.tar", tmp_path / "out", "--shares", "a=0.5,b=0.5", code=1)]
    for letter, missing in itertools.product("ab", ("drop", "keep")):
        first = put(tmp_path / f"{letter}.tar", tar((f"{letter}{number}.cls", b"") for number in range(9)))
        told.append(
            refused("join", first, tmp_path / missing, "--with", tmp_path / "x.tar", "--missing", missing, code=1)
        )
        shutil.rmtree(tmp_path / missing)
    assert all("x.tar.keys of shard" in message for message in told)
    assert all("wds-pipes index SHARDS --offsets" in message for message in told)


@pytest.mark.parametrize("name", ["in.tar", "in.tar.gz"])
def test_a_shard_that_is_changed_meanwhile_is_refused(tmp_path, monkeypatch, name):
    """Also if its index still fits, so that old and new samples would be mixed."""
    path = tmp_path / name

    def put_samples(text, time):
        data = tar([("a.txt", text), ("b.txt", text)])
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        os.utime(path, (time, time))

    def change(job, *more, **options):
        if job.command == "reshard":
            put_samples(b"new", 2)
        return run_tasks(job, *more, **options)

    put_samples(b"old", 1)
    run_tasks = running.run
    monkeypatch.setattr("wds_pipes.tools.outputs.run", change)
    message = refused("reshard", path, tmp_path / "out", code=1)
    assert f"{name} was changed after it was listed: run the command again" in message
    assert not outputs(tmp_path / "out")


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (2, "reshard none/*.tar out", "none/*.tar"),
        (2, "reshard none.tar out", "shard none.tar does not exist"),
        (2, "reshard - out", "standard input can be read only once: write it to a file first"),
        (2, "reshard in-2.tar out", "there are no samples in 1 shard"),
        (2, "reshard in-1.tar out --shards 26", "--shards 26 is more than there are samples, 25"),
        (2, "reshard in-1.tar out --max-bytes apples", "--max-bytes: 'apples' is not a size"),
        (2, "shuffle in-1.tar out --memory 100", "needs 200 bytes, more than --memory, which is 100 bytes"),
        (1, "shuffle in-1.tar in-1.tar out", "would have the key"),
        (2, "shuffle in-1.tar in-*.tar", "DEST, the last argument, is the directory to write to"),
        (2, "sort in-1.tar in-2.tar", "DEST, the last argument, is the directory to write to"),
        (1, "sort in-1.tar out --by txt", "has no field 'txt': name another field, or leave"),
        (1, "sort in-1.tar out --by seg.png", "is neither a text nor a number"),
        (1, "sort in-1.tar out --by cls:width", "has no value 'cls:width'"),
        (1, "sort in-1.tar kinds.tar out --by cls", "has a field 'cls' that cannot be decoded"),
        (1, "sort kinds.tar out --by json:a", "has a text as 'json:a', and samples before it a number"),
        (1, "sort cut.tar out", "cut.tar"),
        (2, "reshard in-1.tar out --shards 2 --max-samples 100000", "so --max-samples would be ignored: pass one"),
        (2, "mix in-1.tar=1 out --shards 2 --max-bytes 10KB", "so --max-bytes would be ignored: pass one"),
        (2, "split in-1.tar out --shares a=0.99999,b=0.00001", "split 'b' would have none of 25 samples"),
        (2, "split in-1.tar out --shares a=0.5,b=0.6", "sum to 1"),
        (2, "split in-1.tar out --shares a/b=0.5,b=0.5", "letters, digits"),
        (2, "split in-1.tar out", "Missing option '--shares'"),
        (2, "mix in-1.tar=0.7 b=0.3", "'b=0.3' has a weight"),
        (2, "mix in-1.tar out", "is written as URLS=WEIGHT"),
        (2, "mix in-1.tar=0 out", "must be above 0"),
        (2, "mix in-1.tar=1 in-2.tar=1 out", "there is no sample to write: a data set has none"),
        (2, "concat in-1.tar in-*.tar", "OUTPUT is the shard to write, not"),
        (2, "concat in-1.tar new/", "OUTPUT is the shard to write, not"),
    ],
)
def test_refusals(source, tmp_path, monkeypatch, *, code, arguments, message):
    for name in ("in-1.tar", "in-2.tar"):
        shutil.copy(source / name, tmp_path)
    pairs = [("1.json", b'{"a": 1}'), ("1.cls", b"1"), ("2.json", b'{"a": "x"}'), ("2.cls", b"x")]
    (tmp_path / "kinds.tar").write_bytes(tar(pairs))
    (tmp_path / "cut.tar").write_bytes((source / "in-0.tar").read_bytes()[:5000])
    monkeypatch.chdir(tmp_path)
    assert message in refused(*arguments.split(), code=code)
    assert not outputs(tmp_path / "out")


def test_an_input_is_never_replaced(source, tmp_path):
    shutil.copy(source / "in-0.tar", tmp_path / "shard-000000.tar")
    before = outputs(tmp_path)
    assert "would be written, and is read" in refused("reshard", tmp_path, tmp_path, "--overwrite")
    message = refused("concat", tmp_path, tmp_path / "shard-000000.tar", "--overwrite")
    assert "would be written, and is read" in message
    assert outputs(tmp_path) == before
    (tmp_path / "shard-000000.tar").rename(tmp_path / "in.tar")
    message = "be read by the next run: write to another directory"
    assert message in refused("reshard", tmp_path, tmp_path)
    assert message in refused("mix", f"{tmp_path}/*.tar=1", tmp_path)
    run("mix", f"{tmp_path}/in.tar=1", tmp_path)  # one that is named is the same the next time


def by_hand(sizes, max_samples, max_bytes):
    """Where shards end, one sample after the other."""
    ends, count, size = [], 0, 0
    for place, own in enumerate(sizes):
        if count and (count >= max_samples or whole(size + own) > max_bytes):
            ends.append(place)
            count = size = 0
        count, size = count + 1, size + own
    return [*ends, len(sizes)] if sizes else []


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 60), max_size=60), st.integers(1, 20), st.integers(0, 60_000), st.integers(1, 60))
def test_shards_are_divided_as_by_a_shard_writer(blocks, max_samples, max_bytes, length):
    sizes = [512 * number for number in blocks]
    parts = [np.array(sizes[start : start + length], np.int64) for start in range(0, len(sizes), length)]
    assert list(shard_ends(parts, max_samples, max_bytes)) == by_hand(sizes, max_samples, max_bytes)
