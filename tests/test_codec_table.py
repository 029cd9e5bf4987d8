"""The table of codecs as a whole, the codecs of users, audio and video."""

import gzip
import io
import os
import pickle
import struct
import sys
from typing import NamedTuple

import pytest
import warm
from PIL import features

import wds_pipes as wp
from wds_pipes.codecs import codec as codecs
from wds_pipes.codecs.table import IMAGE, ROWS, TABLE, encode
from wds_pipes.testing import check_codec, same

MODULES = {"soundfile": "soundfile", "av": "av"}  # of packages that may be missing


def needs(extension):
    """Skip the test if the package of an extension is not installed."""
    package = ROWS[extension].package
    if package in MODULES:
        pytest.importorskip(MODULES[package])


def decoded(fields, *specs, **options):
    """The sample that a pipe yields of these fields, which are bytes."""
    from sources import Given

    from wds_pipes.core.stream import Stream
    from wds_pipes.stages import DecodeByExt

    [sample] = Stream(DecodeByExt(Given([{"__key__": "k", "__url__": "a.tar", **fields}]), *specs, **options))
    return sample


# The table itself


@pytest.mark.parametrize("row", [row for row in TABLE if row.encode], ids=lambda row: row.names[0])
def test_the_example_of_a_row_is_encoded_and_decoded(row):
    """By the row's functions, and by a writer and decode_by_ext for each of its extensions."""
    needs(row.names[0])
    if row.names[0] == "webp" and not features.check("webp"):
        pytest.skip("this Pillow cannot write WebP")
    check_codec(row)
    example = row.example() if callable(row.example) else row.example
    for name in row.names:
        specs = {"image": ("rgb8",), "name": (name,), None: ()}.get(row.asked, (row.asked,))
        found = decoded({name: encode(name, example)}, *specs)[name]
        assert same(found, example, values=not row.lossy)


def test_each_row_says_what_it_is():
    for row in TABLE:
        assert row.media_type, row.extensions
        assert row.gives, row.extensions
        assert row.decode or row.unpickle, row.extensions
        if row.encode is None:  # these are written as bytes
            assert row.names[0] in ("pyd", "m4a")
    assert len(ROWS) == sum(len(row.names) for row in TABLE), "an extension stands in two rows"
    assert {"jpg", "png"} < IMAGE


# Codecs of users


class Point(NamedTuple):
    x: float
    y: float


def read_point(data):
    return Point(*struct.unpack("<2d", data))


def write_point(point):
    return struct.pack("<2d", point.x, point.y)


POINT = wp.Codec("point;pnt", read_point, write_point, media_type="application/x-point", example=Point(1.5, -2.0))


@pytest.fixture
def registry(monkeypatch):
    """The registered codecs, of which the test's are forgotten when it ends."""
    monkeypatch.setattr(codecs, "_registered", {})
    return codecs


def test_a_registered_codec_decodes_and_encodes(registry, tmp_path):
    check_codec(POINT)
    with pytest.raises(TypeError, match="no encoder for 'left.point' and Point"):
        encode("left.point", POINT.example)
    assert wp.register_codec(POINT) is POINT
    path = str(tmp_path / "a.tar")
    with wp.TarWriter(path) as writer:
        writer.write({"__key__": "0", "left.point": POINT.example, "pnt.gz": Point(3, 4)})
    pipe = wp.ShardList([path]).open_shards().load_tar().group_by_key().decode_by_ext()
    [sample] = pipe
    assert (sample["left.point"], sample["pnt.gz"]) == (POINT.example, Point(3, 4))


def test_a_registered_codec_travels_with_the_pipe(registry, tmp_path):
    """To a process where nothing is registered."""
    wp.register_codec(POINT)
    path = str(tmp_path / "a.tar")
    with wp.TarWriter(path) as writer:
        writer.write({"__key__": "0", "point": POINT.example})
    pipe = pickle.dumps(wp.ShardList([path]).open_shards().load_tar().group_by_key().decode_by_ext())
    registry._registered.clear()
    [sample] = pickle.loads(pipe)
    assert sample["point"] == POINT.example
    [sample] = wp.ShardList([path]).open_shards().load_tar().group_by_key().decode_by_ext()
    assert sample["point"] == write_point(POINT.example)


SPAWNED = """
import struct
import wds_pipes as wp

def read(data):
    return struct.unpack("<2d", data)

if __name__ == "__main__":
    import sys
    wp.register_codec(wp.Codec("point", read))
    pipe = wp.ShardList(sys.argv[1:]).open_shards().load_tar().group_by_key().decode_by_ext()
    pipe = pipe.to_tuple("point", "plugged").batch_samples(1, collate="list")
    loader = wp.PipeLoader(pipe, num_workers=1, multiprocessing_context="spawn")
    print(list(loader))
"""


def plug_ins(directory, **points):
    """Write a package ``plugged`` with these entry points to a directory, and return it."""
    info = directory / "plugged-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.2\n")
    lines = "".join(f"{name} = {value}\n" for name, value in points.items())
    (info / "entry_points.txt").write_text(f"[wds_pipes.codecs]\n{lines}")
    (directory / "plugged.py").write_text(
        "import wds_pipes as wp\n"
        'codec = wp.Codec("plugged;two", lambda data: data.decode().upper(), lambda value: value.lower().encode())\n'
        "number = 3\n"
    )
    return directory


def test_workers_under_spawn_have_registered_codecs_and_plug_ins(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SPAWNED)
    with wp.TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "0", "point": struct.pack("<2d", 1, 2), "plugged": b"abc"})
    path = os.pathsep.join([str(plug_ins(tmp_path / "site", plugged="plugged:codec")), *sys.path])
    ran = warm.run(script, tmp_path / "a.tar", environment={**os.environ, "PYTHONPATH": path})
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[[((1.0, 2.0), 'ABC')]]"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Entry points of good and broken codecs, as those of an installed package."""
    monkeypatch.syspath_prepend(
        str(
            plug_ins(
                tmp_path / "site",
                plugged="plugged:codec",
                two="plugged:codec",
                number="plugged:number",
                other="plugged:codec",
                gone="plugged:nothing",
                lost="no_such_module:codec",
                txt="plugged:codec",
            )
        )
    )
    codecs._plug_ins.cache_clear()
    yield
    codecs._plug_ins.cache_clear()
    sys.modules.pop("plugged", None)


def test_the_codecs_of_installed_packages_are_found(installed):
    assert decoded({"x.plugged": b"abc", "TWO": b"d", "txt": b"e", "bin": b"f"}) == {
        "__key__": "k",
        "__url__": "a.tar",
        "x.plugged": "ABC",
        "TWO": "D",
        "txt": "e",
        "bin": b"f",
    }
    assert encode("plugged", "ABC") == b"abc"


@pytest.mark.parametrize(
    ("extension", "why"),
    [
        ("number", "plugged:number of package plugged 1.2, cannot be used: it is not a wds_pipes.Codec"),
        ("other", "it is not a wds_pipes.Codec for this extension"),
        ("gone", "it cannot be imported: AttributeError: module 'plugged' has no attribute 'nothing'"),
        ("lost", "it cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
    ],
)
def test_a_broken_plug_in_is_named_where_it_is_used(installed, extension, why):
    """It is never skipped, and other fields do not care."""
    assert decoded({"plugged": b"a"})["plugged"] == "A"
    with pytest.raises(wp.DecodeError, match=why) as caught:
        decoded({extension: b"a"}, on_error="skip")
    assert isinstance(caught.value.__cause__, ImportError)
    with pytest.raises(ImportError, match=why):
        encode(extension, "a")
    assert decoded({extension: b"a"}, {extension: len})[extension] == 1


def test_the_caller_goes_before_registered_codecs_and_these_before_plug_ins(installed, registry):
    wp.register_codec(wp.Codec("plugged", lambda data: "registered"))
    assert decoded({"plugged": b"a", "two": b"b"})["plugged"] == "registered"
    assert decoded({"plugged": b"a"}, {"plugged": len})["plugged"] == 1
    assert decoded({"plugged": b"a"}, {"x.plugged;plugged": wp.Codec("q", len)})["plugged"] == 1
    wp.register_codec(wp.Codec("plugged", lambda data: "later"))
    assert decoded({"plugged": b"a"})["plugged"] == "later"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: wp.Codec("a.b"), ValueError, "without a dot, unlike 'a.b'"),
        (lambda: wp.Codec("gz"), ValueError, "fields that end in .gz are decompressed"),
        (lambda: wp.Codec("a", 3), TypeError, "decode must be a function, not 3"),
        (lambda: wp.Codec(["a"]), TypeError, "extensions are named by a string such as 'flac;wav'"),
        (lambda: wp.Codec("a;"), TypeError, "extensions are named by a string"),
        (lambda: wp.register_codec("a"), TypeError, r"register_codec\(\) takes a Codec"),
        (lambda: wp.register_codec(wp.Codec("x;PNG", len)), ValueError, "wds_pipes has a codec for png"),
        (lambda: wp.TarWriter(io.BytesIO(), codecs={"a": 3}), TypeError, "an encoder is given as {'ext': function}"),
        (lambda: wp.TarWriter(io.BytesIO(), codecs={"a": wp.Codec("a", len)}), TypeError, "an encoder is given as"),
        (lambda: decoded({}, {"a": wp.Codec("a", None, len)}), TypeError, "a decoder is given as"),
    ],
)
def test_what_is_no_codec_is_refused_at_once(registry, make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_check_codec_finds_a_codec_that_loses_something():
    with pytest.raises(AssertionError, match="the example of 'a' became 2"):
        check_codec(wp.Codec("a", int, lambda value: b"2", example=3))
    check_codec(wp.Codec("a", int, lambda value: b"2", example=3, lossy=True))
    with pytest.raises(AssertionError, match="the example of 'a' became"):
        check_codec(wp.Codec("a", bytes, lambda value: b"2", example=3, lossy=True))
    with pytest.raises(AssertionError, match="returned str, not bytes"):
        check_codec(wp.Codec("a", int, str, example=3))
    with pytest.raises(ValueError, match="needs decode, encode and an example"):
        check_codec(wp.Codec("a", int, str))


@pytest.mark.parametrize(
    "make", [wp.TarWriter, lambda path, **options: wp.ShardWriter(path[:-4] + "%d.tar", **options)]
)
def test_a_writer_takes_encoders(make, tmp_path):
    """By the longest end of the name; bytes are written unchanged."""
    with make(str(tmp_path / "a.tar"), codecs={"seg.png;raw": bytes, "point": POINT}) as writer:
        writer.write({"__key__": "0", "seg.png": [1, 2], "raw.gz": [3], "point": Point(1, 2), "x.raw": b"\xff"})
        with pytest.raises(wp.SampleError, match="field 'raw' of sample '1' cannot be encoded"):
            writer.write({"__key__": "1", "raw": "x"})
    [path] = map(str, tmp_path.glob("*.tar"))
    [sample] = wp.ShardList([path]).open_shards().load_tar().group_by_key().decode_by_ext({"point": POINT})
    assert sample["seg.png"] == b"\1\2"
    assert (sample["raw.gz"], sample["point"], sample["x.raw"]) == (b"\3", Point(1, 2), b"\xff")


def test_an_encoder_must_return_bytes():
    with pytest.raises(TypeError, match="its encoder returned str, not bytes"):
        encode("a", 3, codecs.by_extension({"a": str}, "encode"))


def test_indexed_shards_take_registered_codecs_to_other_processes(registry, tmp_path):
    wp.register_codec(POINT)
    with wp.ShardWriter(str(tmp_path / "p%d.tar"), offsets=True) as writer:
        writer.write({"__key__": "0", "point": POINT.example})
    data = pickle.dumps(wp.IndexedShards([writer.path(0)], decode=()))
    registry._registered.clear()
    assert pickle.loads(data)[0]["point"] == POINT.example


# csv and YAML are written too


def test_an_encoder_of_a_packed_name_is_used_as_the_decoder_is(tmp_path):
    """It compresses by itself."""

    def pack(value):
        return gzip.compress(b"mine " + value.encode())

    def unpack(data):
        return gzip.decompress(data).decode()

    for field in ("txt.gz", "vol.gz", "a.vol.gz"):
        path = tmp_path / f"{field}.tar"
        with wp.TarWriter(path, codecs={"txt.gz;vol.gz": pack}) as writer:
            writer.write({"__key__": "k", field: "hello"})
        pipe = wp.ShardList(str(path)).open_shards().load_tar().group_by_key()
        [sample] = pipe.decode_by_ext({"txt.gz;vol.gz": unpack})
        assert sample[field] == "mine hello"
    with wp.TarWriter(tmp_path / "plain.tar", codecs={"vol": str.encode}) as writer:
        writer.write({"__key__": "k", "vol.gz": "hello"})
    [sample] = wp.ShardList(str(tmp_path / "plain.tar")).open_shards().load_tar().group_by_key()
    assert gzip.decompress(sample["vol.gz"]) == b"hello"


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_all_kinds_of_bytes_are_decoded(kind):
    for extension in ("txt", "json", "yaml", "cls", "npy", "ten", "msgpack"):
        example = ROWS[extension].example
        data = encode(extension, example() if callable(example) else example)
        specs = ("yaml",) if extension == "yaml" else ()
        assert same(decoded({extension: kind(data)}, *specs), decoded({extension: data}, *specs))
