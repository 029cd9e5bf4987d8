"""The table of codecs as a whole, and the codecs of users: registered ones, those of installed
packages, and functions.
"""

import gzip
import io
import pickle
import struct
import sys
from typing import NamedTuple

import pytest
from PIL import features
from sources import Given

import wds_pipes as wp
from wds_pipes.codecs import codec as codecs
from wds_pipes.codecs.table import IMAGE, ROWS, TABLE, encode
from wds_pipes.core.stream import Stream
from wds_pipes.stages import DecodeByExt
from wds_pipes.testing import check_codec, same


def decoded(fields, *specs, **options):
    """The sample that a pipe yields of these fields, which are bytes."""
    [sample] = Stream(DecodeByExt(Given([{"__key__": "k", "__url__": "a.tar", **fields}]), *specs, **options))
    return {name: value for name, value in sample.items() if name not in ("__key__", "__url__")}


def example_of(row):
    return row.example() if callable(row.example) else row.example


def written(path, fields, **options):
    """A pipe over a shard of one sample with these fields."""
    with wp.TarWriter(path, **options) as writer:
        writer.write({"__key__": "0", **fields})
    return wp.ShardList([str(path)]).open_shards().load_tar().group_by_key()


# The table itself


@pytest.mark.parametrize("row", [row for row in TABLE if row.encode], ids=lambda row: row.names[0])
def test_the_example_of_a_row_is_encoded_and_decoded(row):
    """By its functions, by a writer and decode_by_ext for each of its extensions, and from any kind
    of bytes.
    """
    if row.package in ("soundfile", "av"):
        pytest.importorskip(row.package)
    if row.names[0] == "webp" and not features.check("webp"):
        pytest.skip("this Pillow cannot write WebP")
    check_codec(row)
    example = example_of(row)
    for name in row.names:
        specs = {"image": ("rgb8",), "name": (name,), None: ()}.get(row.asked, (row.asked,))
        data = encode(name, example)
        for kind in (bytes, bytearray, memoryview):
            assert same(decoded({name: kind(data)}, *specs)[name], example, values=not row.lossy)


def test_each_row_says_what_it_is():
    for row in TABLE:
        assert row.media_type, row.extensions
        assert row.gives, row.extensions
        assert row.decode or row.unpickle, row.extensions
        assert row.encode or row.names[0] in ("pyd", "m4a")  # these are written as bytes
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
    return codecs._registered


def test_a_registered_codec_decodes_and_encodes(registry, tmp_path):
    check_codec(POINT)
    with pytest.raises(TypeError, match="no encoder for 'left.point' and Point"):
        encode("left.point", POINT.example)
    assert wp.register_codec(POINT) is POINT
    pipe = written(tmp_path / "a.tar", {"left.point": POINT.example, "pnt.gz": Point(3, 4)})
    [sample] = pipe.decode_by_ext()
    assert (sample["left.point"], sample["pnt.gz"]) == (POINT.example, Point(3, 4))


def test_registered_codecs_travel_to_processes_where_none_is_registered(registry, tmp_path):
    """With a pipe, and with IndexedShards."""
    wp.register_codec(POINT)
    with wp.ShardWriter(str(tmp_path / "%d.tar"), offsets=True) as writer:
        writer.write({"__key__": "0", "point": POINT.example})
    path = writer.path(0)

    def make():
        pipe = wp.ShardList([path]).open_shards().load_tar().group_by_key().decode_by_ext()
        return pipe, wp.IndexedShards([path], decode=())

    sent = pickle.dumps(make())
    registry.clear()
    for there, here in zip(pickle.loads(sent), make(), strict=True):
        assert [sample["point"] for sample in there] == [POINT.example]
        assert [sample["point"] for sample in here] == [write_point(POINT.example)]


POINTS = {
    "plugged": "plugged:codec",
    "two": "plugged:codec",
    "number": "plugged:number",
    "other": "plugged:codec",
    "gone": "plugged:nothing",
    "lost": "no_such_module:codec",
    "txt": "plugged:codec",
}


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Entry points of good and broken codecs, as those of an installed package."""
    info = tmp_path / "site" / "plugged-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugged\nVersion: 1.2\n")
    lines = "".join(f"{name} = {value}\n" for name, value in POINTS.items())
    (info / "entry_points.txt").write_text(f"[wds_pipes.codecs]\n{lines}")
    (tmp_path / "site" / "plugged.py").write_text(
        "import wds_pipes as wp\n"
        'codec = wp.Codec("plugged;two", lambda data: data.decode().upper(), lambda value: value.lower().encode())\n'
        "number = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    codecs._plug_ins.cache_clear()
    yield
    codecs._plug_ins.cache_clear()
    sys.modules.pop("plugged", None)


def test_the_codecs_of_installed_packages_are_found(installed, registry):
    """After those of the table, of the caller, and registered ones."""
    found = decoded({"x.plugged": b"abc", "TWO": b"d", "txt": b"e", "bin": b"f"})
    assert found == {"x.plugged": "ABC", "TWO": "D", "txt": "e", "bin": b"f"}
    assert encode("plugged", "ABC") == b"abc"
    for name in ("registered", "later"):
        wp.register_codec(wp.Codec("plugged", lambda data, name=name: name))
        assert decoded({"plugged": b"a", "two": b"b"}) == {"plugged": name, "two": "B"}
    for own in ({"plugged": len}, {"x.plugged;plugged": wp.Codec("q", len)}):
        assert decoded({"plugged": b"a"}, own) == {"plugged": 1}


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
    assert decoded({"plugged": b"a"}) == {"plugged": "A"}
    with pytest.raises(wp.DecodeError, match=why) as caught:
        decoded({extension: b"a"}, on_error="skip")
    assert isinstance(caught.value.__cause__, ImportError)
    with pytest.raises(ImportError, match=why):
        encode(extension, "a")
    assert decoded({extension: b"a"}, {extension: len}) == {extension: 1}


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
        (lambda: encode("a", 3, {"a": str}), TypeError, "its encoder returned str, not bytes"),
        # check_codec finds a codec that loses something
        (
            lambda: check_codec(wp.Codec("a", int, lambda value: b"2", example=3)),
            AssertionError,
            "the example of 'a' became 2",
        ),
        (
            lambda: check_codec(wp.Codec("a", bytes, lambda value: b"2", example=3, lossy=True)),
            AssertionError,
            "the example of 'a' became",
        ),
        (lambda: check_codec(wp.Codec("a", int, str, example=3)), AssertionError, "returned str, not bytes"),
        (lambda: check_codec(wp.Codec("a", int, str)), ValueError, "needs decode, encode and an example"),
    ],
)
def test_what_is_no_codec_is_refused_at_once(registry, make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_lossy_codec_may_change_the_values():
    check_codec(wp.Codec("a", int, lambda value: b"2", example=3, lossy=True))


@pytest.mark.parametrize("make", [wp.TarWriter, lambda path, **options: wp.ShardWriter(f"{path}%d.tar", **options)])
def test_a_writer_takes_encoders(make, tmp_path):
    """By the longest end of the name; bytes are written unchanged. One of a packed name compresses
    by itself.
    """

    def pack(value):
        return gzip.compress(b"mine " + value.encode())

    own = {"seg.png;raw": bytes, "point": POINT, "txt.gz;vol.gz": pack, "vol": str.encode}
    sample = {"seg.png": [1, 2], "raw.gz": [3], "point": Point(1, 2), "x.raw": b"\xff", "a.vol.gz": "hello"}
    with make(str(tmp_path / "a.tar"), codecs=own) as writer:
        writer.write({"__key__": "0", **sample, "txt.gz": "hello", "vol.bz2": "hello"})
        with pytest.raises(wp.SampleError, match="field 'raw' of sample '1' cannot be encoded"):
            writer.write({"__key__": "1", "raw": "x"})
    pipe = wp.ShardList(str(tmp_path / "*")).open_shards().load_tar().group_by_key()
    [found] = pipe.decode_by_ext({"point": POINT, "txt.gz;vol.gz": gzip.decompress, "vol": bytes.decode})
    expected = {"seg.png": b"\1\2", "raw.gz": b"\3", "point": Point(1, 2), "x.raw": b"\xff", "vol.bz2": "hello"}
    expected |= dict.fromkeys(("a.vol.gz", "txt.gz"), b"mine hello")
    assert {name: found[name] for name in expected} == expected
