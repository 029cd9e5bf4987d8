"""``wds-pipes filter``, ``map``, ``dedup``, ``join`` and ``repair``: shards from shards."""

import gzip
import itertools
import json
import os
import random
import re
import shutil
import sys
import tarfile
import warnings
from pathlib import Path

import pytest
from commands import outputs, refused, stored
from commands import run_command as run
from hypothesis import given, settings
from hypothesis import strategies as st
from remote import bare
from tars import filled, put, samples, tar

import wds_pipes as wp
from wds_pipes.tar import TarReader
from wds_pipes.tools import rewriting, write_shard

FUNCTIONS = """
def odd(sample):
    return int(sample["cls"]) % 2

def high(sample):
    assert isinstance(sample["cls"], int)
    return sample["json"]["n"] >= 20

def shout(sample):
    if sample["cls"] == 3:
        return None
    sample["json"]["said"] = sample["txt"].upper()
    return {"json": sample["json"], "__b": sample["bin"], "__key__": "new/" + sample["__key__"], "__n__": b"5"}

def some_fail(sample):
    return {"txt": str(1 / (sample["cls"] - 1))}

def unwritable(sample):
    return {"cls": object()}

def wrong_name(sample):
    return smaple

def no_sample(sample):
    return 3

def says(sample):
    print("said", sample["__key__"])
    return sample

def fails(sample):
    raise ValueError("as always")

def ends(sample):
    raise SystemExit(0)

def slash(sample):
    return {"a/b": b"x"}
"""


def failed(*arguments):
    """The message of a command of which tasks fail."""
    return refused(*arguments, code=1)


def read(folder):
    """The samples of a folder, in order, without their URLs."""
    return list(map(bare, samples([str(folder)])))


def shards(folder, *parts):
    """Shards with their offsets, of lists of samples."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts):
        write_shard(str(folder / f"s{number}.tar"), part)
    return folder


def sample(number, **fields):
    made = {"txt": b"text %d" % (number % 7), "cls": b"%d" % (number % 5), "json": b'{"n": %d}' % number}
    return {"__key__": f"a/{number:03d}", "__m.png": b"4", **made, "bin": bytes([number]) * 100, **fields}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """30 samples in 3 shards, with tables of metadata and lists of keys beside them."""
    folder = tmp_path_factory.mktemp("source")
    made = list(map(sample, range(30)))
    shards(folder / "d", made[:10], made[10:20], made[20:])
    for number in range(3):
        rows = [{"key": one["__key__"], "n": int(one["__key__"][2:])} for one in made[10 * number : 10 * number + 10]]
        (folder / f"d/s{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "keys.txt").write_text("".join(f"a/{number:03d}\n" for number in range(0, 40, 3)))
    (folder / "functions.py").write_text(FUNCTIONS)
    captions = [{"__key__": f"a/{number:03d}", "caption": b"c%d" % number} for number in range(30)]
    random.Random(1).shuffle(captions)
    shards(folder / "captions", captions[:17], captions[17:])
    return folder


@pytest.fixture
def here(source, monkeypatch):
    monkeypatch.chdir(source)
    monkeypatch.setattr(sys, "path", sys.path[:])
    return source


@pytest.mark.parametrize(
    "call", ["dedup d OUT --by txt", "join d OUT --with captions", "filter d OUT --exclude keys.txt"]
)
def test_shares_write_the_same_bytes(call, here, tmp_path):
    """In any order."""
    whole, shares = (call.replace("OUT", str(tmp_path / name)).split() for name in ("whole", "shares"))
    run(*whole)
    for share in (1, 0):
        run(*shares, "--tasks", 2, "--task", share)
    assert outputs(tmp_path / "shares") == outputs(tmp_path / "whole")


def test_a_filter_by_metadata_and_keys(here, tmp_path):
    """A condition, whose keys ``select`` writes, and lists of keys, as IndexedShards selects."""
    pytest.importorskip("duckdb")
    data, chosen, table = wp.IndexedShards("d/*.tar"), tmp_path / "chosen.txt", tmp_path / "all.jsonl"
    condition = ["--where", "n % 2 = 0 and n < 24"]
    in_table = ["--where", "n > 5", "--metadata", table]
    table.write_text("".join((here / f"d/s{number}.jsonl").read_text() for number in (2, 0)))
    for number, (options, selected) in enumerate((
        (["--keys", "keys.txt"], {"where": "@keys.txt"}),
        (condition, {"where": chosen}),
        ([*condition, "--exclude", "keys.txt"], {"where": chosen, "exclude": "@keys.txt"}),
        (in_table, {"where": chosen}),
    )):  # fmt: skip
        if "--where" in options:
            run("select", "d", *options[: 4 if "--metadata" in options else 2], "-o", chosen)
        run("filter", "d", tmp_path / f"out-{number}", *options)
        assert read(tmp_path / f"out-{number}") == list(map(bare, data.select(**selected)))
    table.write_text('{"key": "a/000", "n": 9}\n')
    assert "of another job: the inputs were changed" in refused("filter", "d", tmp_path / "out-3", *in_table)


def test_a_filter_by_a_function_and_of_fields(here, tmp_path):
    run("filter", "d", tmp_path / "raw", "--keep", "functions:odd", "--fields", "txt;jpg,cls")
    odd = [one for one in map(sample, range(30)) if int(one["cls"]) % 2]
    assert read(tmp_path / "raw") == [{name: one[name] for name in ("__key__", "cls", "txt")} for one in odd]
    told = run("filter", "d", tmp_path / "high", "--keep", "functions:high", "--decode", "basic", "--every", 3).stdout
    assert read(tmp_path / "high") == list(map(sample, (20, 23, 26, 29)))  # with their bytes as they were
    assert told.endswith("of 30 samples; 2 shards without samples\n")
    assert len(wp.IndexedShards(str(tmp_path / "high/index.json"))) == 4
    assert "nothing is wrong" in run("verify", tmp_path / "high").stdout
    told = run("filter", "d", tmp_path / "few", "--drop-fields", "txt,bin,json,__m.png").stdout
    assert "no sample has" not in told
    assert read(tmp_path / "few") == [{"__key__": one["__key__"], "cls": one["cls"]} for one in map(sample, range(30))]
    told = run("filter", "d", tmp_path / "absent", "--drop-fields", "x,cls,y").stdout
    assert told.endswith("of 30 samples; no sample has the field x, y\n")


def test_a_shard_may_lack_the_fields_that_are_kept(here, tmp_path):
    """It is a tar without samples; if all shards lack them, the names are wrong."""
    (tmp_path / "in").mkdir()
    put(tmp_path / "in/a.tar", tar([("a.txt", b"x"), ("a.cls", b"1")]))
    put(tmp_path / "in/b.tar", tar([("b.txt", b"x")]))
    told = run("filter", tmp_path / "in", tmp_path / "out", "--fields", "cls").stdout
    assert told.endswith("; 1 shard without samples\n")
    assert read(tmp_path / "out") == [{"__key__": "a", "cls": b"1"}]
    assert ", of 2 samples; " in told
    told = refused("filter", tmp_path / "in", tmp_path / "no", "--fields", "csl,tx")
    assert "no sample has the field csl, tx: correct --fields, and pass --overwrite" in told
    assert not (tmp_path / "no/index.json").exists()
    run("filter", tmp_path / "in", tmp_path / "no", "--fields", "cls,txt", "--overwrite")
    assert len(read(tmp_path / "no")) == 2


def test_compressed_shards_become_plain_ones(here, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number, name in enumerate(("x.tar.gz", "y.tgz", "z.tar")):
        content = (here / f"d/s{number}.tar").read_bytes()
        (folder / name).write_bytes(gzip.compress(content) if number < 2 else content)
    told = run("filter", folder, tmp_path / "out", "--drop-fields", "none", "--progress").stderr
    assert "B/s]" in told
    assert read(tmp_path / "out") == read(here / "d")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == ["x.tar", "y.tar", "z.tar"]
    assert (tmp_path / "out/z.tar").read_bytes() == (here / "d/s2.tar").read_bytes()
    (folder / "x.tar").write_bytes(b"")
    assert "would both be written as x.tar" in refused("repair", folder, tmp_path / "no")


@pytest.mark.parametrize("command", ["filter --every 2", "download", "export --to jsonl"])
def test_a_shard_that_is_named_twice(command, here, tmp_path):
    """Also by two paths: it is said so, and not that two shards have one name."""
    name, *more = command.split()
    told = refused(name, "d/s0.tar", "d/s1.tar", here / "d/s0.tar", tmp_path / "out", *more)
    assert f"shard {here}/d/s0.tar is named twice: name it once" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--keys", "--exclude"])
def test_keys_that_no_sample_has(option, here, tmp_path):
    """They are counted; if no sample has one, a filter would silently leave all samples or none."""
    told = run("filter", "d", tmp_path / "out", option, "keys.txt").stderr
    assert told == f"warning: 4 of 14 keys of {option} belong to no sample\n"
    (tmp_path / "keys.txt").write_text("./a/001\n./a/002")
    told = refused("filter", "d", tmp_path / "none", option, tmp_path / "keys.txt")
    assert f"no sample has one of 2 keys of {option}, such as './a/001'." in told
    assert "The first sample has the key 'a/000': with './', which is a part of the others." in told


def test_a_table_of_keys_that_no_sample_has(here, tmp_path):
    pytest.importorskip("duckdb")
    (tmp_path / "t.jsonl").write_text('{"key": "./a/001"}\n')
    told = refused("filter", "d", tmp_path / "out", "--where", "true", "--metadata", tmp_path / "t.jsonl")
    assert "no sample has the key of a row that fulfils --where. The first sample has the key 'a/000'." in told


def test_tables_of_shards_of_one_name(here, tmp_path):
    """They are in directories, as what is written; elsewhere a name would mean several shards."""
    for folder, kept in (("x", 0), ("y", 1)):
        shards(tmp_path / folder, [sample(number) for number in range(2)])
        (tmp_path / "tables" / folder).mkdir(parents=True)
        rows = [{"key": sample(number)["__key__"], "n": number == kept} for number in range(2)]
        (tmp_path / "tables" / folder / "s0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    both = [tmp_path / "x", tmp_path / "y"]
    run("filter", *both, tmp_path / "out", "--where", "n", "--metadata", tmp_path / "tables")
    assert read(tmp_path / "out/x") == [sample(0)]
    assert read(tmp_path / "out/y") == [sample(1)]
    assert "several shards have one name, such as " in refused(
        "select", *both, "--where", "n", "--metadata", tmp_path / "tables"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "say what to keep"),
        ("--every 2 --metadata x", "--metadata is for --where"),
        ("--keep odd", "as module:function"),
        ("--keep function:odd", "No module named 'function'"),
        ("--keep functions:hihg", "has no function 'hihg'"),
        ("--keep functions:odd --decode rgb9", "unknown spec 'rgb9'"),
        ("--fields cls --drop-fields cls", "pass one of the two"),
        ("--where @keys.txt", "a file of keys is for --keys"),
        ("--where nope>1", "over table d/s0.jsonl, whose columns are"),
        ("--where n>1 --metadata no.jsonl", "table no.jsonl does not exist"),
        ("--where n>1 --metadata keys.txt", "is no table"),
    ],
)
def test_what_a_filter_is_called_with_wrongly(arguments, message, here, tmp_path):
    """It is said before anything is written."""
    assert message in refused("filter", "d", tmp_path / "out", *arguments.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("command", "code", "message"),
    [
        ("d d", 2, "would be written, and is read"),
        ("d d/../d", 2, "would be written, and is read"),
        ("d/s9.tar OUT", 2, "does not exist"),
        ("- OUT", 2, "has no name"),
        ("OUT/in/bad.tar OUT", 1, "bad.tar failed: shard"),
    ],
)
def test_shards_that_cannot_be_rewritten(command, code, message, here, tmp_path):
    put_in(tmp_path / "in", "bad.tar", (here / "d/s0.tar").read_bytes()[:3000])
    before = outputs(here)
    words = command.replace("OUT", str(tmp_path)).split()
    assert message in refused("filter", *words, "--every", 2, "--overwrite", code=code)
    assert outputs(here) == before


def test_what_functions_print_is_no_part_of_the_report(here, tmp_path, monkeypatch):
    (tmp_path / "loud.py").write_text("print('imported')\n" + FUNCTIONS)
    monkeypatch.chdir(tmp_path)
    made = run("map", "loud:says", here / "d", tmp_path / "out", "--json")
    assert json.loads(made.stdout)["complete"]
    assert "imported\nsaid a/000\n" in made.stderr


def test_a_function_that_has_changed_makes_other_outputs(here, tmp_path, monkeypatch):
    """They are not mixed with those of the function before, nor kept by --overwrite."""
    monkeypatch.chdir(tmp_path)
    shards(tmp_path / "d", [sample(1)], [sample(2)])
    call = ["map", "changing:change", "d", "out"]
    for content in (b"one", b"the other"):  # of another size, so that it is compiled again
        Path("changing.py").write_text(f"def change(sample): return {{'txt': {content!r}}}\n")
        sys.modules.pop("changing", None)
        rewriting.function_of.cache_clear()
        if content != b"one":
            assert "another job: the function was 'changing:change, code" in refused(*call)
        run(*call, "--overwrite")
        assert [one["txt"] for one in read(tmp_path / "out")] == [content] * 2


def test_map_writes_what_the_function_returns(here, tmp_path):
    told = run("map", "functions:shout", "d", tmp_path / "out", "--decode", "basic").stdout
    expected = [
        {
            "__key__": f"new/a/{number:03d}",
            "__b": bytes([number]) * 100,
            "json": json.dumps({"n": number, "said": f"TEXT {number % 7}"}, separators=(",", ":")).encode(),
        }
        for number in range(30)
        if number % 5 != 3
    ]
    found = read(tmp_path / "out")
    assert [{**one, "json": json.loads(one["json"])} for one in found] == [
        {**one, "json": json.loads(one["json"])} for one in expected
    ]
    assert "24 samples" in told
    assert told.endswith("of 30 samples\n")


def test_what_a_function_fails_on_is_skipped_with_an_option(here, tmp_path):
    call = ["map", "functions:some_fail", "d", tmp_path / "a", "--decode", "basic"]
    told = failed(*call)
    assert "functions:some_fail raised ZeroDivisionError on sample 'a/001' of shard d/s0.tar: division by zero" in told
    call += ["--on-error", "skip"]
    assert "--on-error was 'raise', and is now 'skip'" in refused(*call)
    told = run(*call, "--overwrite").stdout
    assert "24 samples" in told
    assert "6 samples skipped because of errors; the first error: functions:some_fail raised" in told
    told = failed("map", "functions:fails", "d", tmp_path / "none", "--on-error", "skip")
    assert "all samples were skipped because of errors, so nothing is left. The first: functions:fails raised" in told
    assert not (tmp_path / "none/index.json").exists()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("unwritable", "field 'cls' for sample 'a/000' of shard d/s0.tar, which cannot be encoded"),
        ("wrong_name", "raised NameError on sample 'a/000'"),
        ("no_sample", "returned int for sample 'a/000' of shard d/s0.tar"),
        ("slash", "field 'a/b' for sample 'a/000'"),
        ("ends", "functions:ends raised SystemExit on sample"),
    ],
)
def test_errors_of_the_code_are_never_skipped(name, what, here, tmp_path):
    """And what no sample can be written of: so nothing is left."""
    assert what in failed("map", f"functions:{name}", "d/s0.tar", tmp_path, "--on-error", "skip")


@pytest.mark.parametrize(
    "command", ["filter OUT --drop-fields x", "repair OUT", "concat OUT.tar", "export OUT --to jsonl"]
)
def test_a_shard_that_changes_while_it_is_read(command, tmp_path, monkeypatch):
    """As long as it keeps its size, nothing else shows it: no output is half of each."""
    path = Path(put(tmp_path / "a.tar", filled(tar(good(40)))))
    true, read_so_far = TarReader.__iter__, []

    def changing(reader):
        for member in true(reader):
            yield member
            read_so_far.append(member)
            if len(read_so_far) == 50:
                path.write_bytes(filled(tar([(name, data[::-1]) for name, data in good(40)])))
                os.utime(path, ns=(1, 1))

    monkeypatch.setattr(TarReader, "__iter__", changing)
    name, *more = command.replace("OUT", str(tmp_path / "out")).split()
    told = refused(name, path, *more, code=(1, 2))
    assert re.search("was changed (after it was listed|while it was read .*): run the command again when no", told)
    assert not [found for found in tmp_path.rglob("*") if found.suffix in (".tar", ".jsonl") and found != path]


@pytest.mark.filterwarnings("ignore::wds_pipes.errors.ShardWarning")  # the last sample may have no txt
@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.booleans()), max_size=6, unique_by=lambda s: s[0]),
        min_size=1,
        max_size=4,
    ),
    st.sampled_from(["key", "content", "txt"]),
)
def test_of_repeated_samples_the_first_stays(tmp_path_factory, parts, by):
    folder = tmp_path_factory.mktemp("dedup")
    made = [
        [{"__key__": f"{key}", "cls": b"1", **({"txt": b"%d" % text} if has else {})} for key, text, has in part]
        for part in parts
    ]
    shards(folder / "in", *made)
    if not any(by != "txt" or by in one for one in itertools.chain(*made)):
        return  # there is nothing to compare
    run("dedup", folder / "in", folder / "out", "--by", by)
    seen, expected = set(), []
    for one in itertools.chain(*made):
        mark = {"key": one["__key__"], "content": (one["cls"], one.get("txt")), "txt": one.get("txt")}[by]
        if mark is None or mark not in seen:
            expected.append(one)
        seen.add(mark)
    found = [one for number in range(len(parts)) for one in map(bare, samples([f"{folder}/out/s{number}.tar"]))]
    assert found == expected


TWICE = "another sample has the key '{}' before"
AGAIN = {  # what follows three samples, --by, and the message; None: the first three are left
    "another sample": ([("0001.cls", b"x"), ("0001.txt", b"x"), ("0002.txt", b"y")], "key", None),
    "the same, by keys": ([("0000.cls", b"0"), ("0000.txt", b"0")], "key", None),
    "the same, by contents": ([("0000.cls", b"0"), ("0000.txt", b"0")], "content", None),
    "the same, by a field": ([("0000.cls", b"0"), ("0000.txt", b"0")], "TXT", None),
    "a piece": ([("0001.jpg", b"x")], "key", "byte 6144: files of key '0001' come again, with fields that did not"),
    "a field twice": ([("0002.cls", b"2"), ("0002.txt", b"2")], "key", "keep the first: wds-pipes repair SHARD NEW"),
    "other contents": ([("0000.cls", b"x"), ("0000.txt", b"x")], "content", TWICE.format("0000")),
    "without the field": ([("a.jpg", b"1"), ("b.txt", b""), ("a.jpg", b"2")], "txt", TWICE.format("a")),
    "no such field": ([], "text", "no sample has the field of --by"),
}


@pytest.mark.parametrize("case", AGAIN)
def test_a_key_that_comes_again_in_a_shard(case, tmp_path):
    """The first sample stays; pieces of one sample are no samples, and two fields of one name are
    for repair.
    """
    members, by, message = AGAIN[case]
    path = put(tmp_path / "a.tar", tar([*good(3), *members]))
    told = refused("dedup", path, tmp_path / "out", "--by", by, code=(1, 2) if message else 0)
    assert (message or "") in told
    assert message or read(tmp_path / "out") == samples_of(good(3))


def test_dedup_compares_keys_as_they_are_written(tmp_path):
    for name, key in (("a", "x.y"), ("b", "x_y")):
        put(tmp_path / f"{name}.tar", tar([(f"{key}.jpg", name.encode())]))
    run("dedup", tmp_path / "a.tar", tmp_path / "b.tar", tmp_path / "out", "--key-split", "last-dot")
    assert read(tmp_path / "out") == [{"__key__": "x_y", "jpg": b"a"}]
    path = put(tmp_path / "c.tar", tar([("x.y.jpg", b""), ("x_y.jpg", b"")]))
    message = failed("dedup", path, tmp_path / "no", "--key-split", "last-dot")
    assert "keys 'x.y' and 'x_y' would both be written as 'x_y': rename one of them" in message


def test_shards_of_one_name_are_written_in_their_directories(here, tmp_path, monkeypatch):
    """Also in directories beside the present one, and with an index in each."""
    for folder in ("a", "b"):
        shards(tmp_path / folder, [sample(number) for number in range(3)], [sample(number + 3) for number in range(2)])
    shutil.copy(tmp_path / "b/s1.tar", tmp_path / "b/s2.tar")
    monkeypatch.chdir(tmp_path / "a")
    run("dedup", "../b", "s0.tar", "../out")
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.tar"))
    assert found == ["a/s0.tar", "b/s0.tar", "b/s1.tar", "b/s2.tar"]
    assert len(samples([str(tmp_path / "out/b")])) == 5
    assert samples([str(tmp_path / "out/a/index.json")]) == []


def test_join_finds_partners_in_any_order(here, tmp_path):
    run("join", "d", tmp_path / "out", "--with", "captions/*.tar")
    assert read(tmp_path / "out") == [
        dict(sorted({**sample(number), "caption": b"c%d" % number}.items())) for number in range(30)
    ]
    few = shards(tmp_path / "few", [{"__key__": "a/004", "cls": b"9", "x": b"1"}, {"__key__": "a/050", "x": b""}])
    assert "sample 'a/000' of shard d/s0.tar is not in" in failed("join", "d", tmp_path / "no", "--with", few)
    call = ["join", "d", "--with", few, "--missing", "drop"]
    assert "has field 'cls', and so has that of" in failed(*call[:2], tmp_path / "no2", *call[2:])
    for prefer, value in (("first", b"4"), ("last", b"9")):
        told = run(*call[:2], tmp_path / prefer, *call[2:], "--prefer", prefer).stdout
        assert read(tmp_path / prefer) == [dict(sorted({**sample(4), "cls": value, "x": b"1"}.items()))]
        assert "29 samples without a partner; 2 shards without samples" in told
    run("join", "d", tmp_path / "keep", "--with", few, "--with", "captions", "--missing", "keep", "--prefer", "first")
    assert [sorted(one) for one in read(tmp_path / "keep")[3:5]] == [
        ["__key__", "__m.png", "bin", "caption", "cls", "json", "txt"],
        ["__key__", "__m.png", "bin", "caption", "cls", "json", "txt", "x"],
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.tar", "x.tar.idx. Make it with: wds-pipes index"),
        ("x.tar.gz", "write it uncompressed, with: wds-pipes reshard"),
        ("nope", "shard nope does not exist"),
    ],
)
def test_what_has_no_index_cannot_be_joined(name, message, here, tmp_path, monkeypatch):
    """Which is said once, before anything is written, with a command that helps."""
    content = (here / "d/s0.tar").read_bytes()
    put(tmp_path / "x.tar", content)
    put(tmp_path / "x.tar.gz", gzip.compress(content))
    monkeypatch.chdir(tmp_path)
    assert message in refused("join", here / "d", "out", "--with", name, code=(1, 2))
    assert not Path("out").exists()


def test_two_partners_of_one_key_are_an_error(here, tmp_path):
    twice = shards(tmp_path / "twice", [{"__key__": "a/000", "x": b"1"}], [{"__key__": "a/000", "x": b"2"}])
    assert "two samples to join have the key 'a/000'" in failed("join", "d/s0.tar", tmp_path / "a", "--with", twice)


def good(count=6):
    return [(f"{number:04d}.{field}", b"%d" % number) for number in range(count) for field in ("cls", "txt")]


def samples_of(members):
    """The samples that these members are."""
    found = {}
    for name, data in members:
        key, _, field = name.partition(".")
        found.setdefault(key, {"__key__": key})[field] = data
    return list(found.values())


def lost_of(folder):
    return list(map(json.loads, (Path(folder) / "lost.jsonl").read_text().splitlines()))


def damaged(members, number):
    """A shard in which the header of a member is damaged."""
    data = bytearray(filled(tar(members)))
    at = sum(512 + len(content) + -len(content) % 512 for _, content in members[:number])
    data[at : at + 512] = b"\xff" * 512
    return bytes(data)


def resized(members, number, size, *, end=True):
    """A shard in which the header of a member has another size, and the checksum of this size."""
    data = bytearray(tar(members, end=end))
    at = sum(512 + len(content) + -len(content) % 512 for _, content in members[:number])
    data[at + 124 : at + 136] = b"\x80" + size.to_bytes(11, "big")
    data[at + 148 : at + 156] = b"%06o\0 " % (sum(data[at : at + 512]) - sum(data[at + 148 : at + 156]) + 256)
    return bytes(data)


def sections(keys, *fields):
    """The members of samples that are sorted by their fields."""
    return [(f"{key}.{field}", key.encode()) for field in fields for key in keys]


def numbered(*names):
    """A tar of small files, whose contents are their numbers."""
    return tar((name, b"%d" % number) for number, name in enumerate(names))


def link(name, kind):
    made = tarfile.TarInfo(name)
    made.type, made.linkname = kind, "a.jpg"
    return made


def zeroed():
    """A shard of samples in pieces with a zeroed page, which looks like the end of an archive."""
    data = bytearray(filled(tar(sections([f"{number:02d}" for number in range(40)], "jpg", "txt"))))
    data[8192:10240] = bytes(2048)
    return bytes(data)


APART = [*(one for one in good() if "cls" in one[0]), *(one for one in good() if "txt" in one[0])]
REPEATED = tar([*good(3), ("0001.cls", b"x"), ("0001.txt", b"x")])
UNCLEAR = "it is not clear which of them belong together"
LAST = [(6144, 8192, "0003"), (8192, None, None)]
LINKS = [
    ("a.__Key__", b"x"),
    ("a.jpg", b"0"),
    link("b.jpg", tarfile.LNKTYPE),
    link("latest", tarfile.SYMTYPE),
    ("c.jpg", b"1"),
    ("c.__x__", b"y" * 600),
]
REPAIRED = {  # a shard, options, the members that are written, what is lost, why, and what is said
    "a damaged header": (damaged(good(9), 2), "", good(9)[4:],
                         [(0, 2048, "0000"), (2048, 3072, None), (3072, 4096, "0001")],
                         "next to the damage at byte 2048", "lost: 2 samples, 1 damaged place; in 1 shard, see lost"),
    "cut": (filled(tar(good(3)))[:6000], "", good(2), [(4096, 5120, "0002"), (5120, None, None)], "",
            "lost: 1 sample, 1 damaged place, and what followed in 1 cut shard; in 1 shard, see lost.jsonl"),
    "no mark of the end": (tar(good(4), end=False), "", good(3), LAST, "", "and what followed in 1 cut shard; in"),
    "half a mark": (tar(good(4), end=False) + bytes(512), "", good(3), [LAST[0], (8192, None, None)], "", ""),
    "compressed": (gzip.compress(tar(good(2))), "", good(2), [], "", "nothing is lost"),
    "a page": (b"<html>no</html>", "", [], [(0, None, None)], "", "1 shard without samples; lost: 1 damaged place"),
    "a wrong size": (resized(good(9), 2, 1 << 50), "", good(9)[4:],
                     [(0, 2048, "0000"), (2048, 3072, None), (3072, 4096, "0001")], "cut inside member '0001.cls'", ""),
    "a tar after it": (gzip.compress(resized([*good(3), ("0003.bin", tar(good(1)))], 2, 1 << 30)), "",
                       [*good(3)[4:], ("0003.bin", tar(good(1)))],
                       [(0, 2048, "0000"), (2048, 3072, None), (3072, 4096, "0001")], "cut inside", ""),
    "in a wrong size": (resized([*good(2), ("0002.bin", b"1" * 512 + tar(good(9)[14:])), *good(9)[6:8]], 4, 1 << 30),
                        "", good(1), [(2048, 4096, "0001"), (4096, 5120, None), (5120, 7168, "0007"),
                        (7168, 9216, "0008"), (9216, 15360, None), (15360, None, "0003")], "tar inside of", ""),
    "in a damaged header": (damaged([*good(2), ("0002.bin", tar(good(5)[4:])), *good(8)[10:]], 4), "",
                            [*good(1), *good(8)[12:]],
                            [(2048, 4096, "0001"), (4096, 4608, None), (4608, 6656, "0002"), (6656, 8704, "0003"),
                             (8704, 10752, "0004"), (10752, 14848, None), (14848, 16896, "0005")],
                            "next to the damage at byte 10752", ""),
    "and no mark": (resized(good(4), 2, 1 << 30, end=False), "", [],
                    [(0, 2048, "0000"), (2048, 3072, None), (3072, 4096, "0001"), (4096, 6144, "0002"),
                     (6144, 8192, "0003"), (8192, None, None)], "a tar inside of a member", ""),
    "a cut tar in it": (tar([*good(2), ("0002.bin", tar(good(9)[8:]))])[:7000], "", good(1),
                        [(2048, 4096, "0001"), (4096, None, None)], "", "lost: 1 sample, 1 damaged place"),
    "one after bytes": (tar([*good(2), ("0002.bin", bytes(range(256)) * 2 + tar(good(9)[6:]))])[:11500], "", good(1),
                        [(2048, 4096, "0001"), (4096, 5120, None), (5120, 7168, "0003"), (7168, 9216, "0004"),
                         (9216, 11264, "0005"), (11264, None, None)],
                        "a tar inside of a member", ""),
    "pieces": (tar(APART), "", good(), [], "", "6 samples joined from pieces; nothing is lost"),
    "comes again": (REPEATED, "--drop-repeated", good(3), [(6144, None, "0001")], "came before", "lost: 1 sample; in"),
    "archives": (tar(good(2)) + tar(good(4)[4:]), "--concatenated", good(4), [], "", "nothing is lost\n"),
    "undecodable": (numbered("a.cls", "b.pkl", "c.flac", "d.cls"), "--decode",
                    [("a.cls", b"0"), ("b.pkl", b"1"), ("d.cls", b"3")],
                    [(2048, 3072, "c")], "field 'flac' cannot be decoded: ", ""),
    "a piece is lost": (damaged(APART, 8), "", [*good(1), *good()[8:]],
                        [(1024, 2048, "0001"), (2048, 3072, "0002"), (3072, 4096, "0003"), (7168, 8192, "0001"),
                         (8192, 9216, None), (9216, 10240, "0003")], "it has no txt, unlike most samples", ""),
    "no sample's": (tar(LINKS), "", [("a.jpg", b"0"), ("c.jpg", b"1")],
                    [(0, 1024, "a", "a.__Key__"), (2048, 2560, "b", "b.jpg"), (4096, 5632, "c", "c.__x__")],
                    "has the reserved field name '__key__'", "; lost: 3 single files; in 1 shard, see lost.jsonl"),
    # if it is not clear which of the files with one key belong together, all are lost
    "a field twice": (numbered("a.jpg", "a.JPG", "a.txt", "b.jpg"), "--drop-repeated", [("b.jpg", b"3")],
                      [(0, 1024, "a"), (1024, 3072, "a")], UNCLEAR, "lost: 1 sample; in 1 shard"),
    "other fields": (numbered("a.jpg", "a.txt", "a.jpg", "a.cls", "b.jpg"), "--drop-repeated", [("b.jpg", b"4")],
                     [(0, 2048, "a"), (2048, 4096, "a")], UNCLEAR, ""),
    "a smaller one": (numbered("a.txt", "a.json", "a.jpg", "a.txt", "a.json", "b.jpg"), "--drop-repeated",
                      [("b.jpg", b"5")], [(0, 3072, "a"), (3072, 5120, "a")], UNCLEAR, ""),  # whose is a.jpg?
    "apart": (numbered("a.jpg", "b.jpg", "b.txt", "a.jpg", "a.txt"), "--drop-repeated",
              [("b.jpg", b"1"), ("b.txt", b"2")], [(0, 1024, "a"), (3072, None, "a")], UNCLEAR, ""),
    "a piece after another": (numbered("a.jpg", "a.txt", "c.jpg", "a.jpg", "b.jpg", "a.cls"), "--drop-repeated",
                              [("c.jpg", b"2"), ("b.jpg", b"4")],
                              [(0, 2048, "a"), (3072, 4096, "a"), (5120, None, "a")], UNCLEAR, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", REPAIRED)
def test_repair_writes_what_is_whole_and_lists_what_is_lost(case, tmp_path):
    data, options, written, lost, why, said = REPAIRED[case]
    told = run("repair", put(tmp_path / "a.tar", data), tmp_path / "out", *options.split())
    assert read(tmp_path / "out") == samples_of(written)
    found = lost_of(tmp_path / "out")
    assert [tuple(one[name] for name in ("start", "end", "key", "file") if name in one) for one in found] == lost
    assert why in " ".join(one["why"] for one in found)
    assert said in told.stdout
    assert told.stderr == ""


@pytest.mark.parametrize("packed", [bytes, gzip.compress])
def test_repair_says_that_bytes_of_fields_are_changed(packed, tmp_path):
    """As the MD5 in the index beside a shard shows, where no header does."""
    data = bytearray(filled(tar(good(3))))
    names = ["a.tar", "b.tar"] if packed is bytes else ["a.tar.gz", "b.tar.gz"]
    (tmp_path / "in").mkdir()
    for name in names:
        put(tmp_path / "in" / name, packed(data))
    run("index", tmp_path / "in", "-o", tmp_path / "in" / "index.json")
    assert "another MD5" not in run("repair", tmp_path / "in", tmp_path / "same").stdout
    data[512] ^= 1
    put(tmp_path / "in" / names[1], packed(data))
    told = run("repair", tmp_path / "in", tmp_path / "out").stdout
    assert "nothing is lost; 1 shard with another MD5 than index.json says, so that bytes of fields are ch" in told
    assert read(tmp_path / "out")[3]["cls"] == b"1"


def test_a_sample_that_comes_again_is_an_error(tmp_path):
    put(tmp_path / "a.tar", REPEATED)
    message = "have the key '0001' and field 'cls': pass --drop-repeated"
    assert message in failed("repair", tmp_path / "a.tar", tmp_path / "out")


def test_repair_and_verify_say_the_same(tmp_path):
    path = put(tmp_path / "a.tar", REPAIRED["no mark of the end"][0])
    [finding] = json.loads(run("verify", path, "--json", code=1).stdout)["findings"]
    run("repair", path, tmp_path / "out")
    assert lost_of(tmp_path / "out")[-1]["why"] == finding["text"]
    joined = run("verify", put(tmp_path / "b.tar", REPAIRED["archives"][0]), code=1)
    assert "If archives were joined, pass --concatenated to wds-pipes repair" in joined.output


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 8191), st.integers(1, 255), st.booleans())
def test_each_sample_is_written_or_lost(tmp_path_factory, place, change, cut):
    """Whatever byte is damaged: what is written is what a pipe that skips damage yields, verify
    finds nothing in it, and a sample that is not written is listed, if its name can be read.
    """
    data = bytearray(filled(tar(good(6))))
    data = data[: place + 1] if cut else data
    data[place] ^= change
    folder = tmp_path_factory.mktemp("r")
    path = put(folder / "a.tar", bytes(data))
    run("repair", path, folder / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = samples([path], {"on_error": "skip"}, on_error="skip")
    written, lost = read(folder / "out"), lost_of(folder / "out")
    assert written == [bare(one) for one in expected]
    assert "nothing is wrong" in run("verify", folder / "out", "--ignore", "some-fields").stdout
    keys = {one["__key__"] for one in written} | {one["key"] for one in lost}
    missing = {f"{number:04d}" for number in range(6)} - keys
    for number in map(int, missing):
        start, end = 2048 // 2 * 2 * number, 2048 // 2 * 2 * (number + 1)
        assert (
            cut
            or start <= place < end
            or any(one["key"] is None and one["start"] < end and (one["end"] or 10240) > start for one in lost)
        )


FEW = [*sections("xy", "jpg", "txt"), *sections([f"u{number}" for number in range(30)], "jpg"), ("w.jpg", b"")]
IN_PIECES = {  # a shard, how many samples are written, with how many fields, and some keys that are lost
    "three": (damaged(sections("abcdef", "jpg", "txt", "json"), 14), 3, 4, {"b", "c", "d"}),
    "all others are next to it": (damaged(sections("abc", "jpg", "txt"), 4), 0, 0, set("abc")),
    "a zeroed page": (zeroed(), 36, 3, {"07", "08", "09", "10"}),
    "most samples have one field": (damaged([*FEW, ("z.jpg", b"")], len(FEW) - 1), 31, 2, {"w"}),
}


@pytest.mark.parametrize("case", IN_PIECES)
def test_no_piece_of_a_sample_in_pieces_is_overlooked(case, tmp_path):
    data, count, fields, missing = IN_PIECES[case]
    run("repair", put(tmp_path / "a.tar", data), tmp_path / "out")
    written = read(tmp_path / "out")
    assert len(written) == count
    assert all(len(one) >= fields for one in written)
    assert missing.isdisjoint(one["__key__"] for one in written)


def test_from_a_store_to_a_store(here, s3, tmp_path):
    """The same bytes as on a disk."""
    for part in ("d", "captions"):
        for name, content in outputs(here / part).items():
            s3.put(f"{part}/{name}", content)
    call = ["join", f"{s3.url}/d/s{{0..2}}.tar", f"{s3.url}/out", "--with", f"{s3.url}/captions/s{{0..1}}.tar"]
    call += ["--storage-options", json.dumps(s3.storage_options)]
    run(*call)
    assert "3 shards, 30 samples" in (told := run(*call).stdout)
    assert "(3 of 3 there already)" in told
    run("join", "d", tmp_path, "--with", "captions")
    local = {name: data for name, data in outputs(tmp_path).items() if name != "index.json"}
    assert {name: data for name, data in stored(s3, "out").items() if name != "index.json"} == local


# The names of classes


@pytest.fixture(scope="module")
def classed(tmp_path_factory):
    """Shards of twelve classes, and the classes of the samples: as text, 10 comes before 2."""
    folder = tmp_path_factory.mktemp("classed")
    for number in range(12):
        put_in(folder / f"in/n{number:02d}", f"x{number}.txt", b"x")
    run("create", folder / "in", folder / "shards", "--from", "classes", "--max-samples", 5)
    return folder / "shards"


def put_in(folder, name, content):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(content)


@pytest.mark.parametrize("command", ["reshard", "filter --drop-fields none", "split --shares train=0.5,val=0.5"])
def test_the_names_of_classes_stay(command, classed, tmp_path):
    name, *options = command.split()
    run(name, classed, tmp_path, *options)
    assert (tmp_path / "classes.json").read_bytes() == (classed / "classes.json").read_bytes()
    assert " there already)" in run(name, classed, tmp_path, *options).stdout


@pytest.mark.parametrize("content", [None, '["cat"]\n', "<html>not found</html>"])
def test_names_of_classes_that_differ_are_not_written(content, classed, tmp_path):
    """What the command was not asked for does not end it."""
    put_in(tmp_path / "b", "other.tar", (classed / "shard-000000.tar").read_bytes())
    if content is not None:
        put_in(tmp_path / "b", "classes.json", content.encode())
    call = ["filter", classed, tmp_path / "b", tmp_path / "out", "--drop-fields", "none"]
    run(*call)
    assert not (tmp_path / "out/classes.json").exists()
    put_in(tmp_path / "b", "classes.json", (classed / "classes.json").read_bytes())
    assert "the outputs of another job: classes.json belongs to its outputs only now. Write to another" in refused(
        *call
    )


@pytest.mark.parametrize(
    "command", ["filter {} {} --exclude {}", "dedup {} {}", "reshard {} {} --shards 1", "map unchanged:same {} {}"]
)
def test_samples_that_stay_have_the_bytes_of_a_writer(tmp_path, monkeypatch, command):
    """Also where a shard has samples of a writer, which are copied, and others, which are not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "unchanged.py").write_text("def same(sample):\n    return sample\n")
    (tmp_path / "keys").write_text("a/07\n")
    wanted = [{"__key__": f"a/{n:02d}", "cls": b"%d" % n, "txt": b"t" * n * 40} for n in range(30)]
    for place in (0, 15, 29, 30):  # of the sample that is not as TarWriter writes it; 30: none
        source, expected = tmp_path / f"{place}.tar", tmp_path / f"expected-{place}.tar"
        write_shard(str(expected), [one for one in wanted if "filter" not in command or one["__key__"] != "a/07"])
        data = b""
        for number, one in enumerate(wanted):
            files = [(f"{one['__key__']}.{field}", one[field]) for field in ("cls", "txt")]
            if number == place:
                data += tar(reversed(files), format=tarfile.GNU_FORMAT, end=False)
            else:
                write_shard(str(source), [one])
                data += source.read_bytes()[: sum(512 + len(file) + -len(file) % 512 for _, file in files)]
        source.write_bytes(filled(data))
        (tmp_path / f"{place}.tar.idx").unlink(missing_ok=True)
        (tmp_path / f"{place}.tar.keys").unlink(missing_ok=True)
        run(*command.format(source, f"out-{place}", "keys").split())
        (written,) = (tmp_path / f"out-{place}").glob("*.tar")
        assert written.read_bytes() == expected.read_bytes()
