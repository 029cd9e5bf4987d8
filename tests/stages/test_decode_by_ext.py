"""decode_by_ext, the stage around the codecs: which fields, errors, skipping, counts.

The formats are in test_codecs.py.
"""

import gzip
import pickle
import sys
import tracemalloc

import numpy as np
import pytest
from pickles import Creates
from pipelines import shuffled
from sources import Given

import wds_pipes as wp
from wds_pipes.core.stream import Stream
from wds_pipes.stages import DecodeByExt, MapSamples
from wds_pipes.testing import check_resume, make_shards, same

URL = "https://me:secret@host/x.tar"


def decoded(samples, *specs, **options):
    return Stream(DecodeByExt(Given(samples), *specs, **options))


def numbered(*values, field="cls"):
    return [{"__key__": str(number), "__url__": URL, field: value} for number, value in enumerate(values)]


def test_fields_without_a_decoder_are_errors_if_requested():
    """By default they stay bytes. Names that begin and end with two underscores need no decoder."""
    samples = [{"__key__": "a", "__url__": URL, "__x__": b"", "cls": b"1"}, *numbered(b"data", field="left.jpg")]
    stream = decoded(samples, must_decode=True, on_error="skip")
    assert [sample["cls"] for sample in stream] == [1]
    assert stream.counts()["skipped"] == 1
    with pytest.raises(wp.DecodeError, match="no decoder for it: name an image spec"):
        list(decoded(samples, must_decode=True))
    assert list(decoded(samples, {"jpg": bytes}, must_decode=True))[1]["left.jpg"] == b"data"
    # a function that returns None, and decompression, decode nothing
    with pytest.raises(wp.DecodeError, match="no decoder for it"):
        list(decoded(samples, lambda key, data: None, must_decode=True))
    with pytest.raises(wp.DecodeError, match="no decoder for it"):
        list(decoded(list(numbered(gzip.compress(b"x"), field="bin.gz")), must_decode=True))


def test_each_field_is_decoded_and_the_rest_of_the_sample_stays():
    """Key, URL and other names that begin and end with two underscores are not changed; the order
    of the fields stays.
    """
    sample = {
        "__key__": "a.txt",
        "__url__": "u.tar",
        "__more.json__": b"{",
        "__x.txt__": b"\xff",
        "__n.cls": b"4",
        "cls": b"3",
        "seg.json": b"[1]",
        "bin": b"\xff",
        "txt.gz": gzip.compress(b"x"),
    }
    before = dict(sample)
    [result] = decoded([sample])
    assert result == {**before, "cls": 3, "__n.cls": 4, "seg.json": [1], "txt.gz": "x"}
    assert list(result) == list(before)
    assert sample == before


def keys_seen(seen, handles=()):
    def handler(key, data):
        seen.append((key, data))
        return key if key.endswith(tuple(handles)) else None

    return handler


def test_functions_of_key_and_data_are_tried_in_turn(tmp_path):
    """In the order of the call, also with the image spec; those by extension come before them, the
    table after.
    """
    first, second = [], []
    sample = {"__key__": "a", "__url__": "u.tar", "mp4": b"1", "seg.x.gz": gzip.compress(b"2"), "cls": b"3", "y": b"4"}
    specs = keys_seen(first, [".mp4"]), keys_seen(second, [".x"]), {"y": len}
    [result] = decoded([sample], *specs)
    assert result == {**sample, "mp4": ".mp4", "seg.x.gz": ".seg.x", "cls": 3, "y": 1}
    assert first == [(".mp4", b"1"), (".seg.x", b"2"), (".cls", b"3")]
    assert second == [(".seg.x", b"2"), (".cls", b"3")]

    urls = make_shards(tmp_path, shards=1, samples=1, fields=("jpg",))
    chain = wp.ShardList(urls).open_shards().load_tar().group_by_key()
    [after], [before] = (chain.decode_by_ext("rgb8", second_of), chain.decode_by_ext(second_of, "rgb8"))
    assert (type(after["jpg"]), before["jpg"]) == (np.ndarray, ".jpg")
    assert "second_of" in str(chain.decode_by_ext(second_of))
    assert list(pickle.loads(pickle.dumps(chain.decode_by_ext(second_of)))) == [before]


def second_of(key, data):
    return key


def broken(*key_and_data):
    raise KeyError("no such thing")


@pytest.mark.parametrize("spec", [lambda key, data: broken(), {"png": broken}], ids=["of key and data", "by extension"])
def test_an_error_of_a_function_of_the_caller_is_a_decode_error(spec):
    with pytest.raises(wp.DecodeError, match="KeyError: 'no such thing'") as caught:
        list(decoded(numbered(b"", field="png"), spec))
    assert (caught.value.url, caught.value.key, caught.value.field) == ("https://host/x.tar", "0", "png")
    assert list(decoded(numbered(b"", field="png"), spec, on_error="skip")) == []


def test_only_the_named_fields_are_decoded():
    sample = {"__key__": "a", "cls": b"3", "seg.cls": b"4", "txt": b"t", "json": b"{"}
    assert list(decoded([sample], only=["cls", "txt;text"])) == [{**sample, "cls": 3, "txt": "t"}]


def test_a_value_that_is_not_bytes_is_an_error_or_stays(tmp_path):
    """It was decoded before, which is not the fault of the sample: it is not skipped. A float is
    not cut to an int.
    """
    sample = {"__key__": "a", "__url__": URL, "cls": 3.7, "txt": b"t"}
    for on_error in ("raise", "skip"):
        with pytest.raises(
            wp.DecodeError, match="field 'cls' of sample 'a' .* is float, not bytes.* partial=True"
        ) as caught:
            list(decoded([sample], on_error=on_error))
    assert caught.value.field == "cls"
    assert list(decoded([sample], partial=True)) == list(decoded([sample], only=["txt"])) == [{**sample, "txt": "t"}]
    assert list(decoded([{"cls": bytearray(b"3"), "id": memoryview(b"4")}])) == [{"cls": 3, "id": 4}]

    urls = make_shards(tmp_path, shards=1, samples=2, fields=("txt", "cls", "jpg"))
    chain = wp.ShardList(urls).open_shards().load_tar().group_by_key()
    once = list(chain.decode_by_ext("rgb8"))
    for twice in (
        chain.decode_by_ext("rgb8", only=["jpg"]).decode_by_ext(only=["txt", "cls"]),
        chain.decode_by_ext().decode_by_ext("rgb8", partial=True),
    ):
        assert all(map(same, twice, once))
    check_resume(lambda: shuffled(urls).decode_by_ext(only=["txt"]).decode_by_ext(partial=True))


def test_an_error_names_url_key_field_and_cause():
    """The URL has no credentials. The attributes hold the same facts. The error
    survives pickling.
    """
    with pytest.raises(wp.DecodeError) as caught:
        list(decoded(numbered(b"1", b"x")))
    error = caught.value
    assert str(error).startswith(
        "field 'cls' of sample '1' in shard https://host/x.tar cannot be decoded: ValueError: invalid literal for int()"
    )
    assert str(error).endswith(". Correct it, or pass on_error='skip' to leave such samples out.")
    assert (error.url, error.key, error.field) == ("https://host/x.tar", "1", "cls")
    assert isinstance(error.__cause__, ValueError)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.field) == (str(error), "cls")


def test_an_error_of_text_in_place_of_an_integer_names_both_ways_out():
    cat = [{"__key__": "1", "__url__": "a.tar", "a.cls": b"cat"}]
    with pytest.raises(
        wp.DecodeError, match=r"pass decode_by_ext\(\{'a.cls': bytes.decode\}\), or write it as txt. Correct it"
    ):
        list(decoded(cat))
    assert [sample["a.cls"] for sample in decoded(cat, {"a.cls": bytes.decode})] == ["cat"]


@pytest.mark.parametrize("field", ["pkl", "a.PKL.gz"])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_refused_field_always_raises_and_nothing_runs(field, on_error, tmp_path):
    """The caller's choice refuses it, not bad data, so it is not skipped."""
    data = pickle.dumps(Creates(tmp_path / "made"))
    samples = numbered(gzip.compress(data) if field.endswith("gz") else data, field=field)
    with pytest.raises(wp.DecodeError, match=f"field '{field}' of sample '0' .*allow_pickle=True"):
        list(decoded(samples, on_error=on_error))
    assert not (tmp_path / "made").exists()
    list(decoded(samples, allow_pickle=True))
    assert (tmp_path / "made").exists()


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_lack_of_memory_always_raises(on_error):
    """It is not the sample's fault: as a bad sample it would be skipped, and the next ones too."""

    def starved(data):
        raise MemoryError

    with pytest.raises(MemoryError) as caught:
        list(decoded(numbered(b"1", field="bin"), {"bin": starved}, on_error=on_error))
    assert "sample '0' " in caught.value.__notes__[0]
    assert "secret" not in caught.value.__notes__[0]


def test_long_names_of_fields_take_no_memory():
    """A name may have 1 MiB, and each sample another name."""
    samples = MapSamples(Given(list(range(300))), lambda number: {f"{number}{'x' * 100_000}.bin": b""})
    stream = Stream(DecodeByExt(samples))
    tracemalloc.start()
    assert sum(1 for _ in stream) == 300
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10 << 20


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_missing_package_always_raises(on_error, monkeypatch):
    monkeypatch.setitem(sys.modules, "msgpack", None)
    with pytest.raises(wp.DecodeError, match="pip install msgpack"):
        list(decoded(numbered(b"\x01", field="mp"), on_error=on_error))


def test_every_extension_of_the_table_is_in_the_docstring():
    """The table is for the code, the docstring for people."""
    from wds_pipes.codecs.table import ROWS

    words = set(DecodeByExt.__doc__.replace(";", " ").split())
    assert set(ROWS) <= words


@pytest.mark.parametrize("options", [{"on_error": "raise"}, {"on_error": "skip"}, {"partial": True}])
def test_a_batch_is_named_as_a_batch(urls, options):
    """It is not bad data, which would be skipped."""
    batches = (
        wp.ShardList(urls)
        .open_shards()
        .load_tar()
        .group_by_key(fields=["cls"])
        .batch_samples(4)
        .decode_by_ext(**options)
    )
    with pytest.raises(TypeError, match="put it before batch_samples"):
        list(batches)
