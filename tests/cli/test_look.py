"""``wds-pipes info``, ``ls``, ``head``, ``cat`` and ``get``."""

import base64
import io
import json
import os
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image
from remote import content
from tars import by_reader, by_tarfile, filled, header, pairs, put, samples, tar

from wds_pipes.cli import main
from wds_pipes.tar import TarWriter, index_shards


def run(*arguments):
    return CliRunner().invoke(main, list(map(str, arguments)))


def done(*arguments):
    """The output of a command that must end well."""
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments, code=2):
    """The only line that a command prints, which must fail with a code."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    [line] = result.stderr.splitlines()
    return line


def test_binary_is_not_printed_to_a_terminal(shard):
    """Text is."""
    for field, code in (("jpg", 2), ("cls", 0)):
        terminal, output = os.openpty()
        command = [sys.executable, "-m", "wds_pipes", "get", "k0", str(shard), "--field", field]
        ended = subprocess.run(command, check=False, stdout=output, stderr=subprocess.PIPE, text=True, timeout=120)
        os.close(output)
        os.close(terminal)
        assert (ended.returncode, "the output is binary" in ended.stderr) == (code, bool(code))


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


def test_each_command_has_an_example_in_its_help():
    def commands(group, *path):
        for name, command in group.commands.items():
            yield (*path, name)
            yield from commands(command, *path, name) if hasattr(command, "commands") else ()

    found = list(commands(main))
    assert len(found) > 25
    for path in found:
        if path not in {("cache", "ls"), ("cache", "clear")}:  # of which the whole group has one
            assert f"Example:\n    wds-pipes {' '.join(path)}" in done(*path, "--help").output


def test_what_cannot_be_done_is_said_in_one_line(tmp_path, shard):
    torn = put(tmp_path / "torn.tar", content(shard)[:2000])
    for command in ("info", "ls", "head", "cat"):
        assert "does not exist" in refused(command, tmp_path / "no.tar")
        assert "no shard matches" in refused(command, tmp_path / "no-*.tar")
        assert "is cut inside" in CliRunner().invoke(main, [command, torn]).stderr
        assert run(command, torn).exit_code == 1
    assert "--storage-options is not JSON" in refused("ls", shard, "--storage-options", "{")
    assert "--slice takes" in refused("cat", shard, "--slice", "3")
    assert "--slice takes" in refused("cat", shard, "--slice", "3:1")
    assert "--rename takes old=new" in refused("cat", shard, "--rename", "jpg")
    assert "would have one name" in refused("cat", shard, "--jsonl", "--rename", "jpg=txt", code=1)
    assert "there are 3" in CliRunner().invoke(main, ["get", "3", shard]).stderr
    assert "no sample has the key 'x'" in CliRunner().invoke(main, ["get", "x", shard]).stderr
    assert (
        "has no field 'png'; it has cls, jpg" in CliRunner().invoke(main, ["get", "0", shard, "--field", "png"]).stderr
    )


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


def test_info_finds_what_would_save_bytes(tmp_path):
    """The pax headers of webdataset, and small fields; writing again by ``cat`` does save them."""
    infos = []
    for name, data in pairs(40):
        info = tarfile.TarInfo(name)
        info.mtime = 1.5
        infos.append((info, data))
    old = put(tmp_path / "old.tar", tar(infos, format=tarfile.PAX_FORMAT))
    found = json.loads(done("info", old, "--json").stdout)
    assert found["parts"]["pax"] == 80 * 1024
    assert "pax headers" in found["savings"][0]
    assert (
        "cls, txt are small"
        in done(
            "info",
            put(tmp_path / "p.tar", tar([(f"{n}.{of}", b"1") for n in range(9) for of in ("cls", "txt")])),
            "--all",
        ).stdout
    )
    alone = put(tmp_path / "alone.tar", tar([(f"{number}.txt", b"x" * 200) for number in range(99)]))
    [saved] = json.loads(done("info", alone, "--json").stdout)["savings"]
    assert saved.startswith(
        "samples are small: many of them as the lines of one jsonl field, as wds-pipes create --group"
    )
    assert saved.endswith("would save about 78%")
    long = put(tmp_path / "long.tar", tar([("n" * 120 + f"{n}.bin", bytes(2000)) for n in range(99)], format=2))
    assert json.loads(done("info", long, "--json").stdout)["savings"] == [
        "names above 100 bytes take headers of their own: shorter keys would save 28%"
    ]
    lean = tmp_path / "lean.tar"
    lean.write_bytes(done("cat", old).stdout_bytes)
    again = json.loads(done("info", lean, "--json").stdout)
    assert again["parts"]["pax"] == 0
    assert again["parts"]["data"] == found["parts"]["data"]


def test_info_reads_a_bounded_part_unless_all_is_requested(tmp_path, counted):
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
    counted.clear()
    done("info", f"counted://{tmp_path}/s00.tar")
    assert sum(size for _, size in counted)


def test_info_of_a_compressed_shard_and_of_odd_files(tmp_path):
    import gzip

    data = tar([("._a.txt", b"x"), ("README", b"y"), *pairs(5)])
    path = put(tmp_path / "a.tar.gz", gzip.compress(data))
    found = json.loads(done("info", path, "--json").stdout)
    assert (found["samples"], found["outside"], found["compressions"]) == (5, 2, {"gz": 1})
    assert "2 files belong to no sample" in done("info", path).stdout


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


def test_ls_shows_names_that_are_no_text_and_long_ones(tmp_path):
    long = "x" * 150 + ".txt"
    path = put(
        tmp_path / "a.tar", filled(header(b"\xff\x1b.txt", 0) + tar([(long, b"abc")], format=tarfile.PAX_FORMAT))
    )
    text = done("ls", path, "--members").stdout
    assert "\\udcff\\x1b.txt" in text
    assert long in text
    [_, second] = map(json.loads, done("ls", path, "--json").stdout.splitlines())
    assert content(path)[second["members"][long]["offset"] :][:3] == b"abc"


# head


def test_head_shows_samples_decoded(shard):
    text = done("head", "-n", 2, shard).stdout
    assert text.splitlines()[:2] == [shard, "k0"]
    assert "  txt: line one and 0 \\x1b[31m" in text
    assert "  npy: ndarray float32 (2, 3), 152 bytes" in text
    assert "  jpg: JPEG 64x48 RGB, " in text
    assert "k1" in text
    assert "k2" not in text


def test_head_survives_what_cannot_be_decoded(tmp_path):
    odd = {"json": b"{", "npy": b"no", "pkl": b"x", "bin": b"\0" * 5, "jpg": b"\xff\xd8no", "x.y.z": b""}
    path = put(tmp_path / "a.tar", tar([(f"a.{field}", data) for field, data in odd.items()]))
    lines = {line.split(":")[0].strip(): line for line in done("head", path).stdout.splitlines()}
    assert "cannot be decoded" in lines["json"]
    assert "cannot be decoded" in lines["npy"]
    assert "pickles can run code" in lines["pkl"]
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


@pytest.mark.parametrize("part", ["0:0", "0:2", "3:", ":", "7:20", "48:99", "60:"])
def test_cat_slices_the_same_with_and_without_an_index(part, indexed, fifty):
    """The shards of ``fifty`` have the keys of ``indexed``, and no index."""
    first, _, last = part.partition(":")
    expected = [one["__key__"] for one in samples(indexed)][slice(int(first or 0), int(last) if last else None)]
    for urls in (indexed, fifty):
        lines = done("cat", "--jsonl", *urls, "--slice", part).stdout.splitlines()
        assert [json.loads(line)["__key__"] for line in lines] == expected


def test_a_damaged_index_matters_only_where_it_is_used(tmp_path):
    path = put(tmp_path / "a.tar", tar(pairs(3)))
    put(tmp_path / "a.tar.idx", b"12345")
    assert len(done("cat", "--jsonl", path).stdout.splitlines()) == 3
    assert "0000" in done("head", path).stdout
    for arguments in (["cat", "--slice", "1:2"], ["get", "1"]):
        assert "Make it with: wds-pipes index SHARDS --offsets" in refused(*arguments, path, code=1)


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


def test_a_rename_of_no_field_is_an_error(shard):
    """It was most likely written the wrong way round."""
    for more in ([], ["--jsonl"]):
        result = run("cat", shard, "--rename", "label=cls", *more)
        assert result.exit_code == 2
        assert "no sample has field 'label': --rename takes OLD=NEW" in result.stderr
    assert json.loads(done("cat", shard, "--rename", "jpeg;cls=label", "--jsonl").stdout.splitlines()[1])["label"] == 1


def test_json_that_utf_8_does_not_hold_is_base64(tmp_path):
    """It may have half of a pair of surrogates."""
    data = b'{"a":"\\ud800"}'
    path = put(tmp_path / "a.tar", tar([("a.json", data), ("b.json", b"1")]))
    first, second = map(json.loads, done("cat", path, "--jsonl").stdout.splitlines())
    assert (base64.b64decode(first["json"]["base64"]), second["json"]) == (data, 1)


def test_cat_takes_fields_that_begin_with_underscores(tmp_path):
    path = put(tmp_path / "a.tar", tar([("a.jpg", b"1"), ("a.__mask.png", b"2")]))
    assert by_tarfile(done("cat", path).stdout_bytes) == [("a.__mask.png", b"2"), ("a.jpg", b"1")]
    assert by_tarfile(done("cat", path, "--fields", "__mask.png").stdout_bytes) == [("a.__mask.png", b"2")]
    assert json.loads(done("cat", path, "--jsonl").stdout)["__mask.png"] == {"base64": "Mg=="}
    assert done("get", "a", path, "--field", "__mask.png").stdout_bytes == b"2"
    assert "__mask.png: 1 byte" in done("head", path).stdout
    assert "has no field '__KEY__'; it has jpg, __mask.png" in run("get", "a", path, "--field", "__KEY__").stderr


def test_a_reserved_name_is_called_so(tmp_path):
    """Also where an index, which another program has made, leads to the sample."""
    path = put(tmp_path / "a.tar", tar([("a.jpg", b"1"), ("a.__key__", b"2"), ("b.jpg", b"3")]))
    for _ in range(2):
        assert "'a' of shard" in (line := refused("cat", "--slice", "0:1", path, code=1))
        assert "has the reserved field name '__key__'" in line
        put(tmp_path / "a.tar.idx", np.array([0, 2048, 3072], "<u8").tobytes())


def test_a_link_is_warned_of_once(tmp_path):
    links = [tarfile.TarInfo(name) for name in ("a.txt", "b.jpg", "c.txt")]
    for one in links:
        one.type, one.linkname = tarfile.LNKTYPE, "a.jpg"
    path = put(tmp_path / "a.tar", tar([("a.jpg", b"1"), *links[:2], ("c.jpg", b"2"), links[2]]))
    for _ in range(2):
        [line] = done("cat", path, "--slice", "0:9").stderr.splitlines()
        assert line.startswith(f"warning: shard {path}, byte 1024: 'a.txt' is a hard link to 'a.jpg'")
        assert "is a hard link" in done("index", path, "--offsets").stderr


def test_a_key_in_pieces_is_mended_by_a_command(tmp_path):
    """And not by an option that the commands do not have."""
    path = put(tmp_path / "a.tar", tar((name, b"1") for name in ("a.cls", "b.cls", "a.txt", "b.txt")))
    commands = [["cat"], ["concat", tmp_path / "o.tar"], ["export", tmp_path / "e", "--to", "jsonl"]]
    commands += [["filter", tmp_path / "f", "--fields", "cls"], ["reshard", tmp_path / "d"]]
    for name, *more in commands:
        result = run(name, path, *more)
        assert result.exit_code == 1
        assert "sample is in pieces. Join them with: wds-pipes repair SHARD NEW" in result.stderr
        assert "on_repeated_key" not in result.stderr
        assert "resume" not in result.stderr


def test_cat_refuses_what_a_tar_would_not_hold(tmp_path):
    path = put(tmp_path / "a.tar", tar([("img.v2.jpg", b"1"), ("img.v2.cls", b"2")]))
    assert "its key has a dot" in CliRunner().invoke(main, ["cat", path, "--key-split", "last-dot"]).stderr
    [line] = done("cat", "--jsonl", path, "--key-split", "last-dot", "--fields", "cls").stdout.splitlines()
    assert json.loads(line) == {"__key__": "img.v2", "__url__": path, "cls": 2}


def test_a_closed_pipe_ends_quietly(tmp_path):
    """As ``| head -c 100`` closes it."""
    path = put(tmp_path / "a.tar", tar([(f"{number:05d}.txt", b"x" * 5000) for number in range(400)]))
    for arguments in (["cat", path], ["ls", path, "--json"]):
        process = subprocess.Popen(
            [sys.executable, "-m", "wds_pipes", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        with process:
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


def test_get_with_its_arguments_in_the_wrong_order(shard):
    assert "SAMPLE comes before URLS: wds-pipes get 3 " in refused("get", shard, 3)
    assert "shard none.tar does not exist" in run("get", 3, "none.tar").stderr


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


def test_all_of_them_read_from_a_web_server(web, indexed, tmp_path):
    urls = []
    for path in indexed[:2]:
        for ending in (".idx", ".keys", ""):
            url = web.put(f"look/{os.path.basename(path)}{ending}", content(path + ending))
        urls.append(url)
    options = ["--storage-options", json.dumps(web.storage_options)]
    whole = samples(indexed[:2])
    assert json.loads(done("info", *urls, "--json", *options).stdout)["samples"] == len(whole)
    assert len(done("ls", "--json", *urls, *options).stdout.splitlines()) == len(whole)
    assert whole[0]["__key__"] in done("head", *urls, *options).stdout
    assert len(done("cat", "--jsonl", *urls, *options).stdout.splitlines()) == len(whole)
    result = done("get", whole[2]["__key__"], *urls, "--field", "txt", *options)
    assert (result.stdout_bytes, result.stderr) == (whole[2]["txt"], "")
    assert done("verify", *urls, *options).stdout.endswith("nothing is wrong\n")
    assert f": 2 shards, {len(whole)} samples" in done("index", *urls, "-o", tmp_path / "i.json", *options).stdout


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
        "ls SHARD",
        "ls --members SHARD",
        "ls --json SHARD",
        "head SHARD",
        "cat --jsonl SHARD",
        "get 0 SHARD --field txt",
        "get 0 SHARD -o OUT",
        "get nothing SHARD",
        "verify SHARD",
        "verify --json SHARD",
        "filter SHARD OUT --where x --metadata nothing",
        "sort SHARD OUT --by nothing",
        "reshard SHARD OUT",
        "reshard --dry-run SHARD OUT",
        "reshard --json SHARD OUT",
        "concat SHARD OUT.tar",
        "download SHARD OUT",
        "index SHARD --offsets",
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
