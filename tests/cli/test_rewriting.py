"""``wds-pipes filter``, ``map``, ``dedup``, ``join`` and ``repair``: shards from shards."""

import gzip
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path

import pytest
from commands import outputs, refused
from commands import run_command as run
from hypothesis import given, settings
from hypothesis import strategies as st
from tars import filled, put, samples, tar

import wds_pipes as wp
from wds_pipes.tar import TarReader
from wds_pipes.tar.samples import SampleParser
from wds_pipes.tools import write_shard

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
    return {"json": sample["json"], "bin": sample["bin"], "__key__": "new/" + sample["__key__"]}

def some_fail(sample):
    return {"txt": str(1 / (sample["cls"] - 1))}

def unwritable(sample):
    return {"cls": object()}

def wrong_name(sample):
    return smaple

def no_sample(sample):
    return 3

def adds(sample):
    return {**sample, "__m": b"4", "__n__": b"5"}

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


def fields_of(sample):
    return {name: value for name, value in sample.items() if name != "__url__"}


def read(folder):
    """The samples of a folder, in order, without their URLs."""
    return list(map(fields_of, samples([str(folder)])))


def shards(folder, *parts):
    """Shards with their offsets, of lists of samples."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts):
        write_shard(str(folder / f"s{number}.tar"), part)
    return folder


def sample(number, **fields):
    made = {"txt": b"text %d" % (number % 7), "cls": b"%d" % (number % 5), "json": b'{"n": %d}' % number}
    return {"__key__": f"a/{number:03d}", **made, "bin": bytes([number]) * 100, **fields}


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


COMMANDS = {
    "filter": ["filter", "d", "--exclude", "keys.txt", "--keep", "functions:odd", "--drop-fields", "bin"],
    "dedup": ["dedup", "d", "--by", "txt"],
    "join": ["join", "d", "--with", "captions"],
}


def with_dest(arguments, dest):
    return [*arguments[:2], dest, *arguments[2:]]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_way_writes_the_same_bytes(command, here, tmp_path):
    """Again, in two processes, in shares in any order, and after a part of it was removed."""
    call = COMMANDS[command]
    told = run(*with_dest(call, tmp_path / "whole")).stdout
    whole = outputs(tmp_path / "whole")
    assert ": 3 shards, " in told
    assert [path for path in whole if path.endswith(".tar")] == ["s0.tar", "s1.tar", "s2.tar"]
    assert len(wp.IndexedShards(str(tmp_path / "whole/index.json"))) == len(read(tmp_path / "whole"))
    run(*with_dest(call, tmp_path / "processes"), "-j", 1 + (command == "dedup"))
    assert outputs(tmp_path / "processes") == whole
    for share in (1, 0):
        run(*with_dest(call, tmp_path / "shares"), "--tasks", 2, "--task", share)
    assert outputs(tmp_path / "shares") == whole
    (tmp_path / "processes/s1.tar").unlink()
    assert "(2 of 3 there already)" in run(*with_dest(call, tmp_path / "processes")).stdout
    assert outputs(tmp_path / "processes") == whole
    assert "3 tasks to do" in run(*with_dest(call, tmp_path / "none"), "--dry-run").stdout
    assert not (tmp_path / "none").exists()


def test_a_filter_by_metadata_and_keys(here, tmp_path):
    """A condition, whose keys ``select`` writes, and lists of keys, as IndexedShards selects."""
    pytest.importorskip("duckdb")
    data = wp.IndexedShards("d/*.tar")
    condition, keys, chosen = "n % 2 = 0 and n < 24", "keys.txt", tmp_path / "chosen.txt"
    run("select", "d", "--where", condition, "-o", chosen)
    run("filter", "d", tmp_path / "where", "--where", condition)
    assert read(tmp_path / "where") == list(map(fields_of, data.select(chosen)))
    run("filter", "d", tmp_path / "keys", "--keys", keys)
    assert read(tmp_path / "keys") == list(map(fields_of, data.select("@keys.txt")))
    run("filter", "d", tmp_path / "both", "--where", condition, "--exclude", keys)
    assert read(tmp_path / "both") == list(map(fields_of, data.select(chosen, exclude="@keys.txt")))
    table = tmp_path / "all.jsonl"
    table.write_text("".join((here / f"d/s{number}.jsonl").read_text() for number in (2, 0)))
    run("select", "d", "--where", "n > 5", "--metadata", table, "-o", chosen)
    run("filter", "d", tmp_path / "table", "--where", "n > 5", "--metadata", table)
    assert read(tmp_path / "table") == list(map(fields_of, data.select(chosen)))
    table.write_text('{"key": "a/000", "n": 9}\n')
    assert "of another job: the inputs were changed" in refused(
        "filter", "d", tmp_path / "table", "--where", "n > 5", "--metadata", table
    )


def test_a_filter_by_a_function_and_of_fields(here, tmp_path):
    run("filter", "d", tmp_path / "raw", "--keep", "functions:odd", "--fields", "txt;jpg,cls")
    odd = [one for one in map(sample, range(30)) if int(one["cls"]) % 2]
    assert read(tmp_path / "raw") == [{name: one[name] for name in ("__key__", "cls", "txt")} for one in odd]
    told = run("filter", "d", tmp_path / "high", "--keep", "functions:high", "--decode", "basic", "--every", 3).stdout
    assert read(tmp_path / "high") == list(map(sample, (20, 23, 26, 29)))  # with their bytes as they were
    assert told.endswith("of 30 samples; 2 shards without samples\n")
    assert len(wp.IndexedShards(str(tmp_path / "high/index.json"))) == 4
    assert "nothing is wrong" in run("verify", tmp_path / "high").stdout
    told = run("filter", "d", tmp_path / "few", "--drop-fields", "txt,bin,json").stdout
    assert "no sample has" not in told
    assert read(tmp_path / "few") == [{"__key__": one["__key__"], "cls": one["cls"]} for one in map(sample, range(30))]


@pytest.mark.parametrize(
    ("options", "absent"),
    [
        ("--fields cls,txt,cps", "cps"),
        ("--drop-fields x,cls,y --exclude keys.txt", "x, y"),
    ],
)
def test_fields_that_no_sample_has_are_named(options, absent, here, tmp_path):
    told = run("filter", "d", tmp_path / "a", *options.split()).stdout
    assert told.endswith(f"of 30 samples; no sample has the field {absent}\n")


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
    run("filter", folder, tmp_path / "out", "--every", 1, "--drop-fields", "none")
    assert read(tmp_path / "out") == read(here / "d")
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tar")) == ["x.tar", "y.tar", "z.tar"]
    assert (tmp_path / "out/z.tar").read_bytes() == (here / "d/s2.tar").read_bytes()
    (folder / "x.tar").write_bytes(b"")
    assert "would both be written as x.tar" in refused("repair", folder, tmp_path / "no")


@pytest.mark.parametrize("command", [["filter", "--every", 2], ["download"], ["export"]])
def test_a_shard_that_is_named_twice(command, here, tmp_path):
    """Also by two paths: it is said so, and not that two shards have one name."""
    more = ["--to", "jsonl"] if command == ["export"] else []
    for again in ("d/s0.tar", "./d/s0.tar", here / "d/s0.tar"):
        told = refused(command[0], "d/s0.tar", "d/s1.tar", again, tmp_path / "out", *command[1:], *more)
        assert f"shard {again} is named twice: name it once" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", ["--keys", "--exclude"])
def test_keys_that_no_sample_has_are_counted(option, here, tmp_path):
    told = run("filter", "d", tmp_path / "out", option, "keys.txt").stderr
    assert told == f"warning: 4 of 14 keys of {option} belong to no sample\n"


@pytest.mark.parametrize("option", ["--keys", "--exclude", "--where"])
def test_keys_of_which_no_sample_has_one_are_an_error(option, here, tmp_path):
    """A filter by them would silently leave all samples or none."""
    keys = ["./a/001", "./a/002"]
    if option == "--where":
        pytest.importorskip("duckdb")
        (tmp_path / "t.jsonl").write_text("".join(json.dumps({"key": key}) + "\n" for key in keys))
        told = refused("filter", "d", tmp_path / "out", option, "true", "--metadata", tmp_path / "t.jsonl")
        assert "no sample has the key of a row that fulfils --where. The first sample has the key 'a/000'." in told
    else:
        (tmp_path / "keys.txt").write_text("\n".join(keys))
        told = refused("filter", "d", tmp_path / "out", option, tmp_path / "keys.txt")
        assert f"no sample has one of 2 keys of {option}, such as './a/001'." in told
        assert "The first sample has the key 'a/000': with './', which is a part of the others." in told


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
    message = refused("filter", both[0], tmp_path / "no", "--where", "n", "--metadata", tmp_path / "nowhere")
    assert "has no table of metadata" in message


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
        ("--where nope>1", "over table d/s0.jsonl: Referenced column"),
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


def test_what_functions_print_is_no_part_of_the_report(here, tmp_path):
    Path(tmp_path / "loud.py").write_text("print('imported')\n" + FUNCTIONS)
    for way in ([], ["-j", "2"]):
        call = [
            sys.executable,
            "-m",
            "wds_pipes",
            "map",
            "loud:says",
            here / "d",
            tmp_path / f"out{len(way)}",
            "--json",
        ]
        made = subprocess.run([*call, *way], check=True, capture_output=True, text=True, cwd=tmp_path)
        assert json.loads(made.stdout)["complete"]
        assert "imported\n" in made.stderr  # two processes may write there at one time
        assert way or "imported\nsaid a/000\n" in made.stderr


def test_a_function_cannot_end_the_command(here, tmp_path):
    for call in (["map", "functions:ends"], ["filter", "--keep", "functions:ends"]):
        assert "functions:ends raised SystemExit on sample" in failed(*call, "d/s0.tar", tmp_path / call[0])


def test_a_function_that_has_changed_makes_other_outputs(tmp_path, monkeypatch):
    """They are not mixed with those of the function before, nor kept by --overwrite."""
    monkeypatch.chdir(tmp_path)
    shards(tmp_path / "d", [sample(1)], [sample(2)])
    for number, content in enumerate((b"one", b"two")):
        Path("changing.py").write_text(f"def change(sample): return {{'txt': {content!r}}}\n" + "#" * number)
        call = [sys.executable, "-m", "wds_pipes", "map", "changing:change", "d", "out", "-j", "2"]
        made = subprocess.run(call, check=False, capture_output=True, text=True)
        if number:
            assert "another job: function was 'changing:change, code" in made.stderr
            made = subprocess.run([*call, "--overwrite"], check=False, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr
        assert [one["txt"] for one in read(tmp_path / "out")] == [content] * 2


@pytest.mark.parametrize(
    "command",
    ["filter --drop-fields none", "map functions:adds", "dedup --by jpg", "repair", "reshard", "shuffle", "concat"],
)
def test_fields_that_begin_with_underscores_are_written(command, here, tmp_path):
    name, *more = command.split()
    put(tmp_path / "a.tar", tar([("a.jpg", b"1"), ("a.__mask.png", b"2"), ("b.jpg", b"3")]))
    before, after = (more[:1], []) if name == "map" else ([], more)
    out = tmp_path / ("out.tar" if name == "concat" else "out")
    run(name, *before, tmp_path / "a.tar", out, *after)
    added = {"__m": b"4"} if name == "map" else {}
    assert {one["__key__"]: one for one in read(out)} == {
        "a": {"__key__": "a", "jpg": b"1", "__mask.png": b"2", **added},
        "b": {"__key__": "b", "jpg": b"3", **added},
    }


def test_map_writes_what_the_function_returns(here, tmp_path):
    told = run("map", "functions:shout", "d", tmp_path / "out", "--decode", "basic").stdout
    expected = [
        {
            "__key__": f"new/a/{number:03d}",
            "bin": bytes([number]) * 100,
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
    assert "on_error was 'raise', and is now 'skip'" in refused(*call)
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
    ],
)
def test_errors_of_the_code_are_never_skipped(name, what, here, tmp_path):
    """And what no sample can be written of: so nothing is left."""
    assert what in failed("map", f"functions:{name}", "d/s0.tar", tmp_path, "--on-error", "skip")


@pytest.mark.parametrize("command", ["filter", "repair", "reshard", "concat", "export"])
def test_a_shard_that_changes_while_it_is_read(command, tmp_path, monkeypatch):
    """As long as it keeps its size, nothing else shows it: no output is half of each."""
    path = Path(put(tmp_path / "a.tar", filled(tar(good(40)))))
    other = filled(tar([(name, data[::-1]) for name, data in good(40)]))
    true, read_so_far = TarReader.__iter__, []

    def changing(reader):
        for member in true(reader):
            yield member
            read_so_far.append(member)
            if len(read_so_far) == 50:
                path.write_bytes(other)
                os.utime(path, ns=(1, 1))

    if command == "reshard":
        run("index", path, "--offsets")
        parse = SampleParser.parse

        def changed_before(*given, **options):
            path.write_bytes(other)
            os.utime(path, ns=(1, 1))
            return parse(*given, **options)

        monkeypatch.setattr(SampleParser, "parse", changed_before)
    else:
        monkeypatch.setattr(TarReader, "__iter__", changing)
    more = {"filter": ["--drop-fields", "x"], "export": ["--to", "jsonl"]}
    out = tmp_path / ("out.tar" if command == "concat" else "out")
    result = run(command, path, out, *more.get(command, []), code=(1, 2))
    assert "was changed after it was listed: run the command again" in result.stderr
    assert not [name for name in tmp_path.glob("out/*") if name.suffix in (".tar", ".jsonl")]
    assert not (tmp_path / "out.tar").exists()


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
    found = [one for number in range(len(parts)) for one in map(fields_of, samples([f"{folder}/out/s{number}.tar"]))]
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


@pytest.mark.parametrize("command", [["dedup"], ["repair"]])
def test_shards_of_one_name_are_written_in_their_directories(command, here, tmp_path, monkeypatch):
    """Also in directories beside the present one, and with an index in each."""
    for folder in ("a", "b"):
        shards(tmp_path / folder, [sample(number) for number in range(3)], [sample(number + 3) for number in range(2)])
    shutil.copy(tmp_path / "b/s1.tar", tmp_path / "b/s2.tar")
    monkeypatch.chdir(tmp_path / "a")
    monkeypatch.setattr(sys, "path", sys.path[:])
    run(*command, "../b", "s0.tar", "../out")
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*.tar"))
    assert found == ["a/s0.tar", "b/s0.tar", "b/s1.tar", "b/s2.tar"]
    once = command == ["dedup"]
    assert len(samples([str(tmp_path / "out/b")])) == (5 if once else 7)
    assert len(samples([str(tmp_path / "out/a/index.json")])) == (0 if once else 3)


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
        ["__key__", "bin", "caption", "cls", "json", "txt"],
        ["__key__", "bin", "caption", "cls", "json", "txt", "x"],
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


def test_repair_writes_what_is_whole_and_lists_what_is_lost(tmp_path):
    (tmp_path / "in").mkdir()
    data = bytearray(filled(tar(good(9))))
    data[2048 + 5] ^= 1  # the header of 0001.cls
    put(tmp_path / "in/a.tar", bytes(data))
    put(tmp_path / "in/b.tar", filled(tar(good(3)))[:6000])  # in 0002.txt
    put(tmp_path / "in/c.tar.gz", gzip.compress(tar(good(2))))
    put(tmp_path / "in/d.tar", b"<html>no</html>")
    told = run("repair", tmp_path / "in", tmp_path / "out").stdout
    found = {
        path.name: [one["__key__"] for one in map(fields_of, samples([str(path)]))]
        for path in sorted((tmp_path / "out").glob("*.tar"))
    }
    assert found == {
        "a.tar": ["0002", "0003", "0004", "0005", "0006", "0007", "0008"],
        "b.tar": ["0000", "0001"],
        "c.tar": ["0000", "0001"],
        "d.tar": [],
    }
    lost = [(os.path.basename(one["shard"]), one["start"], one["end"], one["key"]) for one in lost_of(tmp_path / "out")]
    assert lost == [
        ("a.tar", 0, 2048, "0000"),
        ("a.tar", 2048, 3072, None),
        ("a.tar", 3072, 4096, "0001"),
        ("b.tar", 4096, 5120, "0002"),
        ("b.tar", 5120, None, None),
        ("d.tar", 0, None, None),
    ]
    assert "next to the damage at byte 2048" in lost_of(tmp_path / "out")[2]["why"]
    assert "lost: 3 samples, 3 damaged places; in 3 shards, see lost.jsonl" in told
    assert "nothing is wrong" in run("verify", tmp_path / "out", "--ignore", "duplicate-key").stdout
    assert "nothing is lost" in run("repair", tmp_path / "out", tmp_path / "again").stdout
    assert {name: data for name, data in outputs(tmp_path / "again").items() if name.endswith(".tar")} == {
        name: data for name, data in outputs(tmp_path / "out").items() if name.endswith(".tar")
    }


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
    assert written == [fields_of(one) for one in expected]
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


def test_pieces_of_a_sample_are_joined(tmp_path):
    """As in a tar whose files are sorted by their fields; a second sample with a key is dropped
    only with an option.
    """
    (tmp_path / "in").mkdir()
    pieces = [*(one for one in good(4) if "cls" in one[0]), *(one for one in good(4) if "txt" in one[0])]
    put(tmp_path / "in/a.tar", tar(pieces))
    told = run("repair", tmp_path / "in", tmp_path / "out").stdout
    assert "4 samples joined from pieces; nothing is lost" in told
    assert read(tmp_path / "out") == [
        {"__key__": f"{number:04d}", "cls": b"%d" % number, "txt": b"%d" % number} for number in range(4)
    ]
    put(tmp_path / "in/b.tar", tar([*good(3), ("0001.cls", b"x"), ("0001.txt", b"x")]))
    assert "have the key '0001' and field 'cls': pass --drop-repeated" in failed(
        "repair", tmp_path / "in", tmp_path / "other"
    )
    run("repair", tmp_path / "in", tmp_path / "dropped", "--drop-repeated")
    [lost] = lost_of(tmp_path / "dropped")
    assert (lost["key"], lost["start"], "came before" in lost["why"]) == ("0001", 6144, True)
    assert [one["cls"] for one in samples([str(tmp_path / "dropped/b.tar")])] == [b"0", b"1", b"2"]


UNCLEAR = {
    "a field twice": ["a.jpg", "a.JPG", "a.txt", "b.jpg", "b.txt"],
    "other fields": ["a.jpg", "a.txt", "a.jpg", "a.cls", "b.jpg", "b.txt"],
    "a smaller one": ["a.txt", "a.json", "a.jpg", "a.txt", "a.json", "b.jpg"],  # a.jpg may be of the second
    "apart": ["a.jpg", "b.jpg", "b.txt", "a.jpg", "a.txt", "c.jpg", "c.txt"],
    "a piece after another sample": ["a.jpg", "a.txt", "c.jpg", "c.txt", "a.jpg", "b.jpg", "b.txt", "a.cls"],
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_no_half_samples_and_no_mixed_ones(case, tmp_path):
    """If it is not clear which of the files with one key belong together, all are lost."""
    path = put(tmp_path / "a.tar", tar((name, b"%d" % number) for number, name in enumerate(UNCLEAR[case])))
    told = run("repair", path, tmp_path / "out", "--drop-repeated").stdout
    assert "a" not in [one["__key__"] for one in read(tmp_path / "out")]
    assert {one["__key__"] for one in read(tmp_path / "out")} == {name[0] for name in UNCLEAR[case]} - {"a"}
    lost = lost_of(tmp_path / "out")
    assert all("it is not clear which of them belong together" in one["why"] for one in lost)
    bytes_lost = {byte for one in lost for byte in range(one["start"], one["end"] or 8192, 1024)}
    assert bytes_lost == {1024 * number for number, name in enumerate(UNCLEAR[case]) if name[0] == "a"}
    assert "lost: 1 sample; in 1 shard" in told


def damaged(members, number):
    """A shard in which the header of a member is damaged."""
    data = bytearray(filled(tar(members)))
    at = sum(512 + len(content) + -len(content) % 512 for _, content in members[:number])
    data[at : at + 512] = b"\xff" * 512
    return bytes(data)


def test_a_sample_of_which_a_piece_is_lost_is_lost(tmp_path):
    """Also if the damaged piece has no name: it lacks a field of the others that come in pieces."""
    apart = [*(one for one in good(6) if "cls" in one[0]), *(one for one in good(6) if "txt" in one[0])]
    path = put(tmp_path / "a.tar", damaged(apart, 8))  # 0002.txt
    run("repair", path, tmp_path / "out")
    assert read(tmp_path / "out") == samples_of([*good(1), *good(6)[8:]])
    lost = {(one["key"], one["start"]): one["why"] for one in lost_of(tmp_path / "out")}
    assert lost.keys() == {("0001", 1024), ("0002", 2048), ("0003", 3072), ("0001", 7168), (None, 8192), ("0003", 9216)}
    assert "the files of its key at byte 7168 are lost" in lost["0001", 1024]
    assert "it has no txt, unlike most samples" in lost["0002", 2048]
    assert "next to the damage at byte 8192" in lost["0003", 9216]


def sections(keys, *fields):
    """The members of samples that are sorted by their fields."""
    return [(f"{key}.{field}", key.encode()) for field in fields for key in keys]


def zeroed():
    """A shard of samples in pieces with a zeroed page, which looks like the end of an archive."""
    data = bytearray(filled(tar(sections([f"{number:02d}" for number in range(40)], "jpg", "txt"))))
    data[8192:10240] = bytes(2048)
    return bytes(data)


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


def test_what_is_lost_is_what_the_list_says(tmp_path):
    """Of samples with one key too: each is found by its bytes."""
    members = [*good(2), *good(4)[4:], ("0000.cls", b"x"), ("0000.txt", b"x"), ("e.cls", b""), ("e.txt", b"")]
    path = put(tmp_path / "a.tar", damaged(members, 2))
    run("repair", path, tmp_path / "out", "--drop-repeated")
    written, lost = read(tmp_path / "out"), lost_of(tmp_path / "out")
    assert [one["__key__"] for one in written] == ["0002", "0003", "e"]
    assert [(one["key"], one["start"]) for one in lost] == [("0000", 0), (None, 2048), ("0001", 3072), ("0000", 8192)]


def test_files_that_no_sample_can_have_are_listed(tmp_path):
    """Links, and names that are kept for metadata; the other files of their samples are written."""
    link, outside = tarfile.TarInfo("b.jpg"), tarfile.TarInfo("latest")
    link.type, link.linkname = tarfile.LNKTYPE, "a.jpg"
    outside.type, outside.linkname = tarfile.SYMTYPE, "a.jpg"
    files = [("a.__Key__", b"x"), ("a.jpg", b"1"), link, outside, ("c.jpg", b"2"), ("c.__x__", b"y" * 600)]
    path = put(tmp_path / "a.tar", tar(files))
    told = run("repair", path, tmp_path / "out")
    assert "; lost: 3 single files; in 1 shard, see lost.jsonl" in told.stdout
    assert told.stderr == ""
    assert read(tmp_path / "out") == [{"__key__": "a", "jpg": b"1"}, {"__key__": "c", "jpg": b"2"}]
    lost = lost_of(tmp_path / "out")
    assert [(one["start"], one["end"], one["key"], one["file"]) for one in lost] == [
        (0, 1024, "a", "a.__Key__"),
        (2048, 2560, "b", "b.jpg"),
        (4096, 5632, "c", "c.__x__"),
    ]
    assert "has the reserved field name '__key__'" in lost[0]["why"]
    assert "'b.jpg' is a hard link to 'a.jpg'" in lost[1]["why"]
    assert run("verify", tmp_path / "out").stdout.endswith("nothing is wrong\n")


@pytest.mark.parametrize("zeros", [0, 512])
def test_the_last_sample_of_a_shard_that_is_cut_is_lost(zeros, tmp_path):
    """It may be half; the list says so, and where others may be missing."""
    whole = tar(good(4), end=False)
    path = put(tmp_path / "a.tar", whole + bytes(zeros))
    [finding] = json.loads(run("verify", path, "--json", code=1).stdout)["findings"]
    told = run("repair", path, tmp_path / "out").stdout
    assert len(read(tmp_path / "out")) == 3
    sample, place = lost_of(tmp_path / "out")
    assert (sample["start"], sample["end"], sample["key"]) == (6144, 8192, "0003")
    assert place == {"shard": path, "start": len(whole), "end": None, "key": None, "why": finding["text"]}
    assert "lost: 1 sample, 1 damaged place; in 1 shard, see lost.jsonl" in told


def test_joined_archives_become_one(tmp_path):
    path = put(tmp_path / "a.tar", tar(good(2)) + tar(good(4)[4:]))
    [finding] = json.loads(run("verify", path, "--json", code=1).stdout)["findings"]
    assert "If archives were joined, pass --concatenated to wds-pipes repair" in finding["text"]
    assert run("repair", path, tmp_path / "out", "--concatenated").stdout.endswith("nothing is lost\n")
    assert read(tmp_path / "out") == samples_of(good(4))
    assert run("verify", tmp_path / "out").stdout.endswith("nothing is wrong\n")


def test_undecodable_samples_are_dropped_with_an_option(tmp_path):
    path = put(tmp_path / "a.tar", tar([("a.cls", b"1"), ("b.cls", b"one"), ("c.cls", b"2"), ("c.pkl", b"x")]))
    assert "nothing is lost" in run("repair", path, tmp_path / "all").stdout
    run("repair", path, tmp_path / "out", "--decode")
    assert [one["__key__"] for one in read(tmp_path / "out")] == ["a", "c"]
    [lost] = lost_of(tmp_path / "out")
    assert (lost["key"], lost["start"], lost["end"]) == ("b", 1024, 2048)
    assert "field 'cls' cannot be decoded: ValueError" in lost["why"]


def test_from_a_store_to_a_store(here, s3, tmp_path):
    """The same bytes as on a disk."""
    for part in ("d", "captions"):
        for name, content in outputs(here / part).items():
            s3.put(f"{part}/{name}", content)
    options = ["--storage-options", json.dumps(s3.storage_options)]
    names = [f"{s3.url}/d/s{number}.tar" for number in range(3)]
    run("join", *names, f"{s3.url}/out", "--with", f"{s3.url}/captions/s{{0..1}}.tar", *options)
    told = run("join", *names, f"{s3.url}/out", "--with", f"{s3.url}/captions/s{{0..1}}.tar", *options).stdout
    assert "3 shards, 30 samples" in told
    assert "(3 of 3 there already)" in told
    run("join", "d", tmp_path / "local", "--with", "captions")
    run("repair", f"{s3.url}/out/s1.tar", tmp_path / "repaired", *options)
    assert (tmp_path / "repaired/s1.tar").read_bytes() == (tmp_path / "local/s1.tar").read_bytes()
    run("dedup", *names, f"{s3.url}/few", "--by", "txt", *options)
    run("filter", f"{s3.url}/few/index.json", tmp_path / "back", "--every", 1, "--drop-fields", "none", *options)
    run("dedup", "d", tmp_path / "few", "--by", "txt")
    assert read(tmp_path / "back") == read(tmp_path / "few")


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


@pytest.mark.parametrize(
    "command",
    [
        ["reshard"],
        ["filter", "--drop-fields", "none"],
        ["split", "--shares", "train=0.5,val=0.5"],
    ],
    ids=lambda command: command[0],
)
def test_the_names_of_classes_stay(command, classed, tmp_path):
    name, *options = command
    run(name, classed, tmp_path / "out", *options)
    assert (tmp_path / "out/classes.json").read_bytes() == (classed / "classes.json").read_bytes()
    assert " there already)" in run(name, classed, tmp_path / "out", *options).stdout


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
