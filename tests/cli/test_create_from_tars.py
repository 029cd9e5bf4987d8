"""``wds-pipes create`` of a tar with files, or with tars of files, as ImageNet has them."""

import itertools
import json
import random
from functools import partial

import commands
import pytest
from commands import outputs, run_command
from tars import header, tar

from wds_pipes.io.compression import compress_bytes

run = partial(run_command, "create")
refused = partial(commands.refused, "create", code=(1, 2))


@pytest.fixture(scope="module")
def imagenet(tmp_path_factory):
    """The same 3 classes as directories, and as tars in a tar with hidden files."""
    place, numbers, inner = tmp_path_factory.mktemp("imagenet"), random.Random(4), {}
    for name, size in (("n02", 5), ("n01", 3), ("n03", 70_000)):
        files = [(f"./{name}_{number}.JPEG", numbers.randbytes(size * (number + 1))) for number in range(4)]
        for file, data in files:
            path = place / "folders" / name / file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        inner[f"{name}.tar"] = tar([*files, ("._hidden", b"x")])
    (place / "train.tar").write_bytes(tar(inner.items()))
    (place / "flat.tar").write_bytes(tar([(f"n01/{number}.JPEG", b"%d" % number) for number in range(4)]))
    return place


@pytest.mark.parametrize("options", [(), ("--shuffle", 3), ("--split", "a=0.5,b=0.5"), ("-j", 2)], ids=str)
def test_tars_in_a_tar_are_classes(imagenet, tmp_path, options):
    """The same shards as of directories."""
    for name in ("folders", "train.tar"):
        run(imagenet / name, tmp_path / name[:5], "--from", "classes", "--max-samples", 5, *options)
    found = outputs(tmp_path / "train")
    assert found == outputs(tmp_path / "folde")
    assert json.loads(found["classes.json"]) == ["n01", "n02", "n03"]


def test_in_a_store(imagenet, web, tmp_path):
    url = web.put("train.tar", (imagenet / "train.tar").read_bytes())
    for name, source in (("remote", url), ("local", imagenet / "train.tar")):
        run(source, tmp_path / name, "--from", "classes")
    assert outputs(tmp_path / "remote") == outputs(tmp_path / "local")


def test_files_in_a_tar(imagenet, tmp_path):
    assert "pass --from files, or --from classes" in refused(imagenet / "flat.tar", tmp_path / "out")
    assert "4 samples" in run(imagenet / "flat.tar", tmp_path / "out", "--from", "files").stdout


INNER = tar([("a.jpg", b"x" * 2000)])


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("x.tar", tar([("n1.tar", tar([("b.tar", INNER)]))]), ["n1.tar has a tar, b.tar: tars are read in a tar"]),
        ("x.tar", tar([("n1.tar", INNER), ("n1/../../y.jpg", b"x")]), ["'n1/../../y.jpg' of", "has '..' in its name"]),
        (
            "x.tar",
            tar([("n1.tar", tar([("../a.jpg", b"x")]))]),
            ["'../a.jpg' of", "x.tar, n1.tar has '..' in its name"],
        ),
        ("x.tar", tar([("n1.tar.gz", compress_bytes(INNER, "gz"))]), ["x.tar, n1.tar.gz, byte 0: it is ", "gz"]),
        ("x.tar.gz", compress_bytes(tar([("n1.tar", INNER)]), "gz"), ["x.tar.gz, byte 0: it is ", "gz"]),
        ("x.tar", tar([("n1.tar", INNER[:1500])]), ["x.tar, n1.tar, byte 0: it is cut inside"]),
        ("x.tar", tar([("n1.tar", header(b"a.jpg", 1 << 40) + bytes(512))]), ["x.tar, n1.tar, byte 0: it is cut"]),
        ("x.tar", tar([("n1.tar", INNER), ("n1/a.jpg", b"y")]), ["n1/a.jpg comes twice"]),
        ("x.tar", tar([("n1.tar", INNER), ("b.jpg", b"y")]), ["b.jpg is in no directory of a class"]),
    ],
    ids=itertools.count(),
)
def test_hostile_tars_are_refused_by_name(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    told = refused(tmp_path / name, tmp_path / "out", "--from", "classes")
    for part in message:
        assert part in told
    assert not (tmp_path / "out").exists()


def test_a_sparse_file_is_refused(tmp_path):
    sparse = header(b"a/b.jpg", 0, kind=b"S")
    (tmp_path / "x.tar").write_bytes(sparse + bytes(1024))
    assert "is stored in parts (a sparse file)" in refused(tmp_path / "x.tar", tmp_path / "out", "--from", "files")
