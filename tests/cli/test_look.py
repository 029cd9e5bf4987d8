"""``wds-pipes info``, ``ls``, ``head``, ``cat`` and ``get``."""

import base64
import gzip
import io
import itertools
import json
import os
import subprocess
import sys
from importlib.metadata import version

import click
import numpy as np
import pytest
from click.testing import CliRunner
from commands import refused
from commands import run_command as done
from PIL import Image
from remote import content
from tars import by_reader, by_tarfile, pairs, put, samples, tar

from wds_pipes import tools
from wds_pipes.cli import main
from wds_pipes.codecs import images
from wds_pipes.codecs.codec import IMAGE_FORMATS
from wds_pipes.tar import TarWriter, index_shards


def run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def test_binary_is_not_printed_to_a_terminal(shard, monkeypatch):
    terminal, output = os.openpty()
    with open(terminal), open(output, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(click.ClickException, match="the output is binary"):
            main(["get", "k0", shard, "--field", "jpg"], standalone_mode=False)


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """Three samples with a text, a number, an image and an array."""
    path, picture = tmp_path_factory.mktemp("look") / "a.tar", io.BytesIO()
    Image.new("RGB", (64, 48), (1, 2, 3)).save(picture, "JPEG")
    with TarWriter(path) as writer:
        for number in range(3):
            writer.write(
                {
                    "__key__": f"k{number}",
                    "txt": f"line one\nand {number} \x1b[31m",
                    "cls": number,
                    "jpg": picture.getvalue(),
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
        ("info", 2, "pass --codecs"),
        ("info --codecs a.tar", 2, "leave out URLS"),
        ("index a.tar --offsets --force", 2, "--force is for -o"),
        ("index no.tar -o i.json", 2, "Error: shard no.tar does not exist"),
        ("index no-*.tar -o i.json", 2, "no shard matches"),
        ("index a.tar", 2, "pass -o index.json, or --offsets"),
        ("index a.tar -o to/b.tar", 2, "to/b.tar is the name of a shard: name the index, such as index.json"),
        ("index", 2, "URLS"),
        ("ls a.tar --storage-options {", 2, "--storage-options is not JSON"),
        ("cat a.tar --slice 3", 2, "--slice takes"),
        ("cat a.tar --slice 3:1", 2, "--slice takes"),
        ("cat a.tar --rename jpg", 2, "--rename is written as OLD=NEW"),
        ("cat a.tar --rename jpg=txt --jsonl", 1, "would have one name"),
        ("cat a.tar --rename label=cls --jsonl", 2, "no sample has field 'label': --rename takes OLD=NEW"),
        ("cat dots.tar --key-split last-dot", 1, "its key has a dot"),
        ("get 3 a.tar", 2, "there are 3"),
        ("get x a.tar", 2, "no sample has the key 'x'"),
        ("get a.tar k0", 2, "the key of the sample comes before the shards: wds-pipes get k0 a.tar ..."),
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
    assert sorted(os.listdir()) == ["a.tar", "dots.tar", "torn.tar"], "nothing is written"


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("head", {"count": -1}, "count must be at least 0, not -1"),
        ("cat", {"stream": io.BytesIO(), "start": -5}, "start must be at least 0, not -5"),
        ("cat", {"stream": io.BytesIO(), "start": 3, "stop": 1}, "stop must be at least 3, not 1"),
    ],
)
def test_numbers_of_samples_that_there_are_not(shard, function, options, message):
    with pytest.raises(ValueError, match=message):
        list(getattr(tools, function)(shard, **options))


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
    data = tar(pairs(300, fields=("txt",)))
    for number in range(10):
        put(tmp_path / f"s{number:02d}.tar", data)
    quick = json.loads(done("info", tmp_path, "--json").stdout)
    assert quick["read"] == {"shards": 8, "samples": 8 * 256}
    assert not quick["samples_exact"]
    assert 2700 < quick["samples"] < 3300
    whole = json.loads(done("info", tmp_path, "--json", "--all").stdout)
    assert (whole["samples"], whole["samples_exact"]) == (3000, True)
    assert whole["parts"]["data"] == 10 * sum(len(data) for _, data in pairs(300, fields=("txt",)))
    index_shards(str(tmp_path), tmp_path / "index.json")
    indexed = json.loads(done("info", tmp_path, "--json").stdout)
    assert (indexed["samples"], indexed["samples_exact"], indexed["index"]) == (3000, True, True)
    assert "counted by an index" in done("info", tmp_path / "index.json").stdout


def test_info_of_a_compressed_shard_and_of_odd_files(tmp_path):
    data = tar([("._a.txt", b"x"), ("README", b"y"), *pairs(5)])
    path = put(tmp_path / "a.tar.gz", gzip.compress(data))
    found = json.loads(done("info", path, "--json").stdout)
    assert (found["samples"], found["outside"], found["compressions"]) == (5, 2, {"gz": 1})


def test_codecs_says_what_decodes_each_format(monkeypatch):
    monkeypatch.setattr(images, "simplejpeg", lambda: None)
    lines = run("info", "--codecs").output.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["JPEG", "PNG", "WEBP", "TIFF", "GIF"]
    assert lines[0] == f"JPEG  pillow {version('pillow')}"
    assert "with: pip install 'wds_pipes[images]'" in lines[-1]


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


def test_the_first_directory_is_the_key(tmp_path):
    path = put(tmp_path / "a.tar", tar((f"{key}/{name}", b"1") for key in ("a.1", "b") for name in ("x/l.jpg", "cls")))
    lines = done("ls", path, "--key-split", "folder").stdout.splitlines()[2:]
    assert [line.split()[3:] for line in lines] == [["a.1:", "x/l.jpg", "cls"], ["b:", "x/l.jpg", "cls"]]


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


def test_jsonl_keeps_the_bytes_of_what_is_no_text(shard, tmp_path):
    """Also of JSON that UTF-8 does not hold: it may have half of a pair of surrogates."""
    lines = [json.loads(line) for line in done("cat", "--jsonl", shard, "--rename", "cls=label").stdout.splitlines()]
    one, expected = lines[1], samples([shard])[1]
    assert (one["label"], one["json"], one["txt"]) == (1, {"caption": "c1"}, "line one\nand 1 \x1b[31m")
    for name in ("jpg", "npy"):
        assert base64.b64decode(one[name]["base64"]) == expected[name]
    path = put(tmp_path / "a.tar", tar([("a.json", b'{"a":"\\ud800"}'), ("b.json", b"1")]))
    first, second = map(json.loads, done("cat", path, "--jsonl").stdout.splitlines())
    assert (base64.b64decode(first["json"]["base64"]), second["json"]) == (b'{"a":"\\ud800"}', 1)


def test_a_key_in_pieces_is_mended_by_a_command(tmp_path):
    """And not by an option that the commands do not have."""
    path = put(tmp_path / "a.tar", tar((name, b"1") for name in ("a.cls", "b.cls", "a.txt", "b.txt")))
    told = refused("cat", path, code=1)
    assert "sample is in pieces. Join them with: wds-pipes repair SHARD NEW" in told
    assert "on_repeated_key" not in told


@pytest.mark.parametrize("command", ["--help", "verify"])
def test_a_closed_pipe_ends_quietly_and_is_no_success(command, tmp_path):
    """As ``| head`` closes it. What would be found is not said: here that the end is missing."""
    path = put(tmp_path / "a.tar", tar([(f"{number:05d}.txt", b"x") for number in range(4)])[:4096])
    command = [sys.executable, "-m", "wds_pipes", command, path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=60)) == (b"", 141)


# get


@pytest.mark.parametrize("with_index", [True, False])
def test_get_finds_a_sample_by_number_and_by_key(with_index, indexed, fifty, tmp_path):
    urls = indexed if with_index else fifty
    whole = samples(urls)
    for number, wanted in ((0, 0), (17, 17), (49, whole[49]["__key__"])):
        one = whole[number]
        result = done("get", wanted, *urls)
        assert by_tarfile(result.stdout_bytes) == sorted(
            (f"{one['__key__']}.{name}", data) for name, data in one.items() if name[:2] != "__"
        )
        assert ("no index" in result.stderr) != with_index
    assert done("get", 17, *urls, "--field", "txt").stdout_bytes == whole[17]["txt"]
    paths = done("get", 17, *urls, "-o", tmp_path / "new").stdout.splitlines()
    assert sorted(map(content, paths)) == sorted(data for name, data in whole[17].items() if name[:2] != "__")
    for missing in (50, "nobody"):
        assert done("get", missing, *urls, code=2).stdout == ""


def test_get_writes_only_inside_of_the_directory(tmp_path):
    """A key of digits is a number unless --key says that it is a key."""
    path = put(tmp_path / "a.tar", tar([("../../evil.txt", b"x"), ("sub/ok.txt", b"y"), ("0.txt", b"zero")]))
    assert "would not be inside" in refused("get", "0", path, "-o", tmp_path / "out", code=1)
    assert not (tmp_path / "out").exists()
    done("get", "1", path, "-o", tmp_path / "out")
    done("get", "0", path, "-o", tmp_path / "out", "--key")
    assert [(tmp_path / "out" / name).read_bytes() for name in ("sub/ok.txt", "0.txt")] == [b"y", b"zero"]


def test_an_index_of_other_keys_gives_no_half_samples(tmp_path):
    """Made with --key-split last-dot: each number is a whole sample or an error."""
    names = [f"{key}.{field}" for key in ("a.b", "a.c", "d.e") for field in ("txt", "cls")]
    path = put(tmp_path / "a.tar", tar((name, b"%d" % (number + 1)) for number, name in enumerate(names)))
    done("index", path, "--offsets", "--key-split", "last-dot")
    for command in (["get", "1", path, "--field", "cls"], ["cat", path, "--jsonl", "--slice", "1:3"]):
        assert "or keys of the index end at another dot" in refused(*command, code=1)
    result = done("get", "1", path, "--field", "cls", "--key-split", "last-dot")
    assert result.stdout == "4"
    assert result.stderr.startswith("indexes are not used with --key-split last-dot: reading the shards from the begin")


@pytest.mark.parametrize(
    ("command", "shown"),
    [("info URLS", "2 shards, 12 samples"), ("get KEY URLS -o OUT", "KEY.txt"), ("verify URLS", "nothing is wrong")],
)
def test_they_read_from_a_web_server(command, shown, web, indexed, tmp_path):
    for path, ending in itertools.product(indexed[:2], (".idx", ".keys", "")):
        web.put(f"look/{os.path.basename(path)}{ending}", content(path + ending))
    urls = [f"{web.url}/look/{os.path.basename(path)}" for path in indexed[:2]]
    key = samples(indexed[:2])[2]["__key__"]
    words = {"URLS": urls, "KEY": [key], "OUT": [tmp_path / "out"]}
    arguments = [word for name in command.split() for word in words.get(name, [name])]
    assert shown.replace("KEY", key) in done(*arguments, "--storage-options", json.dumps(web.storage_options)).stdout


def test_a_stale_index_is_not_believed(tmp_path):
    """Neither how many samples there are, nor that there is none with a key or a number: the index
    is named.
    """

    def shard(first, count):
        return put(tmp_path / "x.tar", tar((f"{first}{number}.txt", b"") for number in range(count)))

    path = shard(3, 3)
    index_shards(path, tmp_path / "index.json", offsets=True)
    assert "there is no sample 15: there are 3" in refused("get", "15", path)
    shard(3, 20)
    found = json.loads(done("info", path, "--json").stdout)
    assert (found["samples"], found["samples_exact"], found["index"]) == (20, True, False)
    for sample in ("15", "315", "3"):
        told = refused("get", sample, path, code=1)
        assert "x.tar.idx of shard" in told
        assert "it has more samples" in told
    assert "x.tar.keys of shard" in refused("get", "51", shard(5, 3), "--key", code=1)


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


@pytest.mark.parametrize("form", IMAGE_FORMATS)
def test_info_knows_an_image_by_its_first_bytes(form, tmp_path):
    data = io.BytesIO()
    Image.new("RGB", (6, 4)).save(data, form)
    with TarWriter(tmp_path / "a.tar") as writer:
        writer.write({"__key__": "0", "bin": data.getvalue()})
    assert tools.info(str(tmp_path / "a.tar")).fields["bin"].kinds == {f"{form} image": 1}
