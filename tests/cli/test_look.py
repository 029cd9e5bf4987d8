"""``wds-pipes info``, ``ls``, ``head``, ``cat`` and ``get``."""

import base64
import io
import itertools
import json
import os
import subprocess
import sys
from importlib.metadata import version

import numpy as np
import pytest
from click.testing import CliRunner
from commands import refused
from commands import run_command as done
from PIL import Image
from remote import content
from tars import by_reader, by_tarfile, pairs, put, samples, tar

from wds_pipes.cli import main
from wds_pipes.codecs import images
from wds_pipes.tar import TarWriter, index_shards


def run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def test_binary_is_not_printed_to_a_terminal(shard):
    terminal, output = os.openpty()
    command = [sys.executable, "-m", "wds_pipes", "get", "k0", str(shard), "--field", "jpg"]
    ended = subprocess.run(command, check=False, stdout=output, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(output)
    os.close(terminal)
    assert (ended.returncode, "the output is binary" in ended.stderr) == (2, True)


def picture(width, height, form="JPEG"):
    file = io.BytesIO()
    Image.new("RGB", (width, height), (1, 2, 3)).save(file, form)
    return file.getvalue()


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """Three samples with a text, a number, an image and an array."""
    path = tmp_path_factory.mktemp("look") / "a.tar"
    with TarWriter(path) as writer:
        for number in range(3):
            writer.write(
                {
                    "__key__": f"k{number}",
                    "txt": f"line one\nand {number} \x1b[31m",
                    "cls": number,
                    "jpg": picture(64, 48),
                    "npy": np.zeros((2, 3), np.float32),
                    "json": {"caption": f"c{number}"},
                }
            )
    return str(path)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        *((f"{command} no.tar", 2, "does not exist") for command in ("info", "ls", "head", "cat")),
        *((f"{command} no-*.tar", 2, "no shard matches") for command in ("info", "ls", "head", "cat")),
        *((f"{command} torn.tar", 1, "is cut inside") for command in ("info", "ls", "head", "cat")),
        ("ls a.tar --storage-options {", 2, "--storage-options is not JSON"),
        ("cat a.tar --slice 3", 2, "--slice takes"),
        ("cat a.tar --slice 3:1", 2, "--slice takes"),
        ("cat a.tar --rename jpg", 2, "--rename is written as OLD=NEW"),
        ("cat a.tar --rename jpg=txt --jsonl", 1, "would have one name"),
        ("cat a.tar --rename label=cls --jsonl", 2, "no sample has field 'label': --rename takes OLD=NEW"),
        ("cat dots.tar --key-split last-dot", 1, "its key has a dot"),
        ("get 3 a.tar", 2, "there are 3"),
        ("get x a.tar", 2, "no sample has the key 'x'"),
        ("get 0 a.tar --field png", 2, "has no field 'png'; it has cls, jpg"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path, shard, monkeypatch, *, arguments, code, message):
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "torn.tar", content(shard)[:2000])
    put(tmp_path / "a.tar", content(shard))
    put(tmp_path / "dots.tar", tar([("img.v2.jpg", b"1"), ("img.v2.cls", b"2")]))
    result = run(*arguments.split())
    assert result.exit_code == code
    assert message in result.stderr.splitlines()[-1]


# info


def test_info_says_what_is_in_shards(shard):
    found = json.loads(done("info", shard, "--json").stdout)
    assert (found["shards"], found["samples"], found["samples_exact"]) == (1, 3, True)
    fields = found["fields"]
    assert {name: next(iter(field["types"])) for name, field in fields.items()} == {
        "txt": "text",
        "cls": "integer",
        "jpg": "JPEG image",
        "npy": "ndarray float32 (2, 3)",
        "json": "object",
    }
    assert fields["txt"]["example"] == "line one and 0 \\x1b[31m"
    assert fields["cls"] == {
        "samples": 3, "bytes": 3, "min": 1, "median": 1, "max": 1, "types": {"integer": 3}, "example": "0"
    }  # fmt: skip
    assert sum(found["parts"].values()) == found["bytes"] == len(content(shard))
    assert found["parts"]["headers"] == 15 * 512
    text = done("info", shard).stdout
    assert "1 shard, 3 samples" in text
    assert "JPEG 64x48 RGB" in text
    assert "\x1b" not in text


def test_info_reads_a_bounded_part_unless_all_is_requested(tmp_path):
    data = tar(pairs(400))
    for number in range(12):
        put(tmp_path / f"s{number:02d}.tar", data)
    quick = json.loads(done("info", tmp_path, "--json").stdout)
    assert quick["read"] == {"shards": 8, "samples": 8 * 256}
    assert not quick["samples_exact"]
    assert 4000 < quick["samples"] < 5600
    whole = json.loads(done("info", tmp_path, "--json", "--all").stdout)
    assert (whole["samples"], whole["samples_exact"]) == (4800, True)
    assert whole["parts"]["data"] == 12 * sum(len(data) for _, data in pairs(400))
    index_shards(str(tmp_path), tmp_path / "index.json")
    indexed = json.loads(done("info", tmp_path, "--json").stdout)
    assert (indexed["samples"], indexed["samples_exact"], indexed["index"]) == (4800, True, True)
    assert "counted by an index" in done("info", tmp_path / "index.json").stdout


def test_info_of_a_compressed_shard_and_of_odd_files(tmp_path):
    import gzip

    data = tar([("._a.txt", b"x"), ("README", b"y"), *pairs(5)])
    path = put(tmp_path / "a.tar.gz", gzip.compress(data))
    found = json.loads(done("info", path, "--json").stdout)
    assert (found["samples"], found["outside"], found["compressions"]) == (5, 2, {"gz": 1})
    assert "2 files of no sample" in done("info", path).stdout


def test_codecs_says_what_decodes_each_format(monkeypatch):
    monkeypatch.setattr(images, "simplejpeg", lambda: None)
    lines = run("info", "--codecs").output.splitlines()
    assert lines[0] == f"JPEG  pillow {version('pillow')}"
    assert [line.split()[0] for line in lines[1:5]] == ["PNG", "WEBP", "TIFF", "GIF"]
    assert "with: pip install 'wds_pipes[images]'" in lines[-1]


@pytest.mark.parametrize(("arguments", "message"), [("", "pass --codecs"), ("--codecs a.tar", "leave out URLS")])
def test_what_to_show_has_to_be_named(arguments, message):
    result = run("info", *arguments.split())
    assert (result.exit_code, message in result.output) == (2, True)


# ls


def test_ls_lists_samples_and_files_with_their_bytes(tmp_path):
    path = put(tmp_path / "a.tar", tar([("d/a.txt", b"x" * 600), ("d/a.cls", b"1"), ("README", b"?"), ("b.txt", b"y")]))
    lines = [line.split() for line in done("ls", path).stdout.splitlines()[2:]]
    assert lines == [["0", "2,560", "0", "d/a:", "txt", "cls"], ["3,584", "1,024", "1", "b:", "txt"]]
    first, _ = map(json.loads, done("ls", path, "--json").stdout.splitlines())
    assert (first["shard"], first["key"]) == (path, "d/a")
    assert first["members"] == {"d/a.txt": {"offset": 512, "size": 600}, "d/a.cls": {"offset": 2048, "size": 1}}
    data = content(path)
    for name, member in first["members"].items():
        place = member["offset"]
        assert data[place : place + member["size"]] == dict(by_tarfile(data))[name]
    assert [line.split()[2] for line in done("ls", path, "--members").stdout.splitlines()[2:]] == [
        "d/a.txt",
        "d/a.cls",
        "b.txt",
    ]
    assert len(done("ls", path, "-n", 1).stdout.splitlines()) == 3


def test_archives_one_after_another(tmp_path):
    path = put(tmp_path / "a.tar", tar(pairs(2)) + tar(pairs(5)))
    assert "it has data after" in run("ls", path).stderr
    assert len(done("ls", path, "--concatenated", "--json").stdout.splitlines()) == 7


def test_the_first_directory_is_the_key(tmp_path):
    path = put(tmp_path / "a.tar", tar((f"{key}/{name}", b"1") for key in ("a.1", "b") for name in ("x/l.jpg", "cls")))
    lines = done("ls", path, "--key-split", "folder").stdout.splitlines()[2:]
    assert [line.split()[3:] for line in lines] == [["a.1:", "x/l.jpg", "cls"], ["b:", "x/l.jpg", "cls"]]
    assert done("get", "b", path, "--field", "cls", "--key-split", "folder").stdout == "1"
    assert "2 samples: nothing is wrong" in done("verify", path, "--key-split", "folder").stdout


@pytest.mark.parametrize(
    "command", ["info SHARD", "info --codecs", "head SHARD", "bench --seconds 0.1 SHARD", "cache ls --directory d"]
)
def test_json_of_what_is_reported(command, shard):
    """A document, or a line for each sample."""
    lines = done(*(shard if word == "SHARD" else word for word in command.split()), "--json").stdout.splitlines()
    assert len(lines) == (3 if command.startswith("head") else 1)
    assert all(isinstance(json.loads(line), dict) for line in lines)


# head


def test_head_shows_samples_decoded(shard):
    lines = done("head", "-n", 2, shard).stdout.splitlines()
    assert [line for line in lines if line[:2] != "  "] == [shard, "k0", "k1"]
    assert {"  txt: line one and 0 \\x1b[31m", "  npy: ndarray float32 (2, 3), 152 bytes"} <= set(lines)
    assert sum(line.startswith("  jpg: JPEG 64x48 RGB, ") for line in lines) == 2


def test_head_survives_what_cannot_be_decoded(tmp_path):
    odd = {"json": b"{", "npy": b"no", "pkl": b"x", "bin": b"\0" * 5, "jpg": b"\xff\xd8no", "x.y.z": b""}
    path = put(tmp_path / "a.tar", tar([(f"a.{field}", data) for field, data in odd.items()]))
    lines = {line.split(":")[0].strip(): line for line in done("head", path).stdout.splitlines()}
    assert "cannot be decoded" in lines["json"]
    assert "cannot be decoded" in lines["npy"]
    assert "not decoded: unpickling runs code" in lines["pkl"]
    assert lines["bin"] == "  bin: 5 bytes"


# cat


def test_cat_writes_the_samples_as_one_tar(indexed):
    whole = samples(indexed)
    written = done("cat", *indexed).stdout_bytes
    assert by_tarfile(written) == by_reader(written)
    members = [(f"{one['__key__']}.{name}", one[name]) for one in whole for name in sorted(one) if name[:2] != "__"]
    assert by_tarfile(written) == members
    part = by_tarfile(
        done("cat", *indexed, "--slice", "10:13", "--fields", "txt,cls", "--rename", "cls=label").stdout_bytes
    )
    assert part == [
        (f"{one['__key__']}.{new}", one[name])
        for one in whole[10:13]
        for new, name in (("label", "cls"), ("txt", "txt"))
    ]


@pytest.mark.parametrize("part", ["0:0", ":", "7:20", "48:99", "60:"])
def test_cat_slices_the_same_with_and_without_an_index(part, indexed, fifty):
    """The shards of ``fifty`` have the keys of ``indexed``, and no index."""
    first, _, last = part.partition(":")
    expected = [one["__key__"] for one in samples(indexed)][slice(int(first or 0), int(last) if last else None)]
    for urls in (indexed, fifty):
        lines = done("cat", "--jsonl", *urls, "--slice", part).stdout.splitlines()
        assert [json.loads(line)["__key__"] for line in lines] == expected


def test_an_index_saves_reading_what_comes_before(indexed, counted):
    urls = [f"counted://{url}" for url in indexed]
    done("cat", "--jsonl", *urls, "--slice", "48:50")
    with_index = sum(size for _, size in counted)
    counted.clear()
    done("cat", "--jsonl", *urls, "--slice", "0:50")
    assert with_index < sum(size for _, size in counted) / 2


def test_jsonl_keeps_the_bytes_of_what_is_no_text(shard):
    lines = [json.loads(line) for line in done("cat", "--jsonl", shard, "--rename", "cls=label").stdout.splitlines()]
    one, expected = lines[1], samples([shard])[1]
    assert (one["label"], one["json"], one["txt"]) == (1, {"caption": "c1"}, "line one\nand 1 \x1b[31m")
    for name in ("jpg", "npy"):
        assert base64.b64decode(one[name]["base64"]) == expected[name]


def test_json_that_utf_8_does_not_hold_is_base64(tmp_path):
    """It may have half of a pair of surrogates."""
    data = b'{"a":"\\ud800"}'
    path = put(tmp_path / "a.tar", tar([("a.json", data), ("b.json", b"1")]))
    first, second = map(json.loads, done("cat", path, "--jsonl").stdout.splitlines())
    assert (base64.b64decode(first["json"]["base64"]), second["json"]) == (data, 1)


@pytest.mark.parametrize("command", ["cat IN", "concat IN o.tar", "filter IN f --fields cls"])
def test_a_key_in_pieces_is_mended_by_a_command(command, tmp_path, monkeypatch):
    """And not by an option that the commands do not have."""
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "IN", tar((name, b"1") for name in ("a.cls", "b.cls", "a.txt", "b.txt")))
    result = run(*command.split())
    assert (result.exit_code, "on_repeated_key" in result.stderr, "resume" in result.stderr) == (1, False, False)
    assert "sample is in pieces. Join them with: wds-pipes repair SHARD NEW" in result.stderr


def test_a_closed_pipe_ends_quietly(tmp_path):
    """As ``| head -c 100`` closes it."""
    path = put(tmp_path / "a.tar", tar([(f"{number:05d}.txt", b"x" * 5000) for number in range(400)]))
    command = [sys.executable, "-m", "wds_pipes", "ls", path, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.read(100)
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=60)) == (b"", 0)


# get


@pytest.mark.parametrize("with_index", [True, False])
def test_get_finds_a_sample_by_number_and_by_key(with_index, indexed, fifty, tmp_path):
    urls = indexed if with_index else fifty
    whole = samples(urls)
    for number in (0, 17, 49):
        one = whole[number]
        expected = sorted((f"{one['__key__']}.{name}", data) for name, data in one.items() if name[:2] != "__")
        for wanted in (number, one["__key__"]):
            result = done("get", wanted, *urls)
            assert by_tarfile(result.stdout_bytes) == expected
            assert ("no index" in result.stderr) != with_index
    assert done("get", 17, *urls, "--field", "txt").stdout_bytes == whole[17]["txt"]
    paths = done("get", 17, *urls, "-o", tmp_path / "new").stdout.splitlines()
    assert sorted(map(content, paths)) == sorted(data for _, data in by_tarfile(done("get", 17, *urls).stdout_bytes))
    for missing in (50, "nobody"):
        result = run("get", missing, *urls)
        assert (result.exit_code, result.stdout) == (2, "")


def test_a_key_of_digits(tmp_path):
    path = put(tmp_path / "a.tar", tar([("7.txt", b"seven"), ("0.txt", b"zero")]))
    assert done("get", "0", path, "--field", "txt").stdout == "seven"
    assert done("get", "0", path, "--field", "txt", "--key").stdout == "zero"


def test_get_writes_only_inside_of_the_directory(tmp_path):
    path = put(tmp_path / "a.tar", tar([("../../evil.txt", b"x"), ("sub/ok.txt", b"y")]))
    (tmp_path / "out").mkdir()
    result = run("get", "0", path, "-o", tmp_path / "out")
    assert (result.exit_code, list((tmp_path / "out").iterdir())) == (1, [])
    assert "would not be inside" in result.stderr
    done("get", "1", path, "-o", tmp_path / "out")
    assert (tmp_path / "out" / "sub" / "ok.txt").read_bytes() == b"y"


def test_an_index_of_other_keys_gives_no_half_samples(tmp_path):
    """Made with --key-split last-dot: each number is a whole sample or an error."""
    names = [f"{key}.{field}" for key in ("a.b", "a.c", "d.e") for field in ("txt", "cls")]
    path = put(tmp_path / "a.tar", tar((name, b"%d" % (number + 1)) for number, name in enumerate(names)))
    done("index", path, "--offsets", "--key-split", "last-dot")
    for number in ("0", "1"):
        for command in (["get", number, path, "--field", "cls"], ["cat", path, "--jsonl", "--slice", f"{number}:3"]):
            result = CliRunner().invoke(main, command)
            assert result.exit_code == 1
            assert "or the index is of another key_split" in result.stderr
    result = done("get", "1", path, "--field", "cls", "--key-split", "last-dot")
    assert result.stdout == "4"
    told = "indexes are not used with --key-split last-dot: reading the shards from the beginning\n"
    assert result.stderr == told


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("info URLS", "2 shards, 12 samples"),
        ("cat URLS --jsonl", '"__key__": "KEY"'),
        ("get KEY URLS -o OUT", "KEY.txt"),
        ("verify URLS", "nothing is wrong"),
        ("index URLS -o OUT", ": 2 shards, 12 samples"),
    ],
)
def test_all_of_them_read_from_a_web_server(command, shown, web, indexed, tmp_path):
    for path, ending in itertools.product(indexed[:2], (".idx", ".keys", "")):
        web.put(f"look/{os.path.basename(path)}{ending}", content(path + ending))
    urls = [f"{web.url}/look/{os.path.basename(path)}" for path in indexed[:2]]
    key = samples(indexed[:2])[2]["__key__"]
    words = {"URLS": urls, "KEY": [key], "OUT": [tmp_path / "out"]}
    arguments = [word for name in command.split() for word in words.get(name, [name])]
    result = done(*arguments, "--storage-options", json.dumps(web.storage_options))
    assert shown.replace("KEY", key) in result.stdout


def test_a_stale_index_is_not_believed(tmp_path):
    """Neither how many samples there are, nor that there is none with a key."""
    for count in (3, 5):
        (tmp_path / "x.tar").write_bytes(tar((f"{count}{number}.txt", b"") for number in range(count)))
        if count == 3:
            index_shards(str(tmp_path / "x.tar"), tmp_path / "index.json", offsets=True)
    found = json.loads(run("info", tmp_path / "x.tar", "--json").stdout)
    assert (found["samples"], found["samples_exact"], found["index"]) == (5, True, False)
    (tmp_path / "x.tar").write_bytes(tar((f"5{number}.txt", b"") for number in range(3)))
    assert "x.tar.keys of shard" in refused("get", "51", tmp_path / "x.tar", "--key", code=1)


@pytest.mark.parametrize("sample", ["15", "015", "3"])
def test_a_sample_after_the_end_of_a_stale_index(sample, tmp_path):
    """Members were appended: the index is named, and no number of samples."""
    index_shards(put(tmp_path / "x.tar", tar(pairs(3))), tmp_path / "index.json", offsets=True)
    put(tmp_path / "x.tar", tar(pairs(20)))
    line = refused("get", sample, tmp_path / "x.tar", code=1)
    assert "x.tar.idx of shard" in line
    assert "it has more samples" in line
    put(tmp_path / "x.tar", tar(pairs(3)))
    assert "there is no sample 15: there are 3" in refused("get", "15", tmp_path / "x.tar")


@pytest.mark.parametrize(
    "command",
    [
        "info SHARD",
        "ls --members SHARD",
        "ls --json SHARD",
        "head SHARD",
        "cat --jsonl SHARD",
        "get 0 SHARD -o OUT",
        "get nothing SHARD",
        "verify SHARD",
        "verify --json SHARD",
        "filter SHARD OUT --where x --metadata nothing",
        "reshard SHARD OUT",
        "reshard --json SHARD OUT",
        "concat SHARD OUT.tar",
        "map SHARD OUT nothing",
    ],
)
def test_what_commands_print_has_no_control_characters(tmp_path, command):
    """Names may have escape sequences, which would change what a terminal shows."""
    control = "\x1b\x9b\u202e\r\x7f"
    bad = f"{control}\nforged"
    folder = tmp_path / f"in{bad}"
    folder.mkdir()
    put(folder / f"a{bad}.tar", tar([(f"k{bad}.a{bad}", b"x"), (f"k{bad}.b", b"y"), (f"k{bad}.a{bad}", b"x")]))
    words = {"SHARD": f"{folder}/a{bad}.tar", "OUT": f"{tmp_path}/out{bad}", "OUT.tar": f"{tmp_path}/out{bad}.tar"}
    output = run(*(words.get(word, word) for word in command.split())).output
    assert output
    assert set(output).isdisjoint(control), output
    assert not any(line.startswith("forged") for line in output.splitlines())
