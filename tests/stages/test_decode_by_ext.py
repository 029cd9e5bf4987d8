"""decode_by_ext, the stage around the codecs: which fields, errors, skipping, counts.

The formats are in test_codecs.py.
"""

import gzip
import json
import pickle
import sys
import tracemalloc

import numpy as np
import pytest
import torch
from pickles import Creates
from pipelines import samples, shuffled
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


@pytest.mark.parametrize("samples", [4, [3, 0, 2]])
def test_resumes_exactly(tmp_path, samples):
    urls = make_shards(tmp_path, shards=3, samples=samples, fields=("txt", "cls", "json", "jpg", "npy"))
    epochs = check_resume(lambda: shuffled(urls).decode_by_ext("torchrgb8"))
    assert {type(value) for value in epochs[0][0].values()} == {str, int, dict, torch.Tensor, np.ndarray}


def test_resumes_exactly_with_skipped_samples():
    check_resume(lambda: decoded(numbered(b"1", b"x", b"2", b"x", b"x", b"3"), on_error="skip"))


def test_fields_without_a_decoder_are_errors_if_requested():
    """By default they stay bytes. Names that begin and end with two underscores need no decoder."""
    samples = [{"__key__": "a", "__url__": URL, "__x__": b"", "cls": b"1"}, *numbered(b"data", field="left.jpg")]
    stream = decoded(samples, must_decode=True, on_error="skip")
    assert [sample["cls"] for sample in stream] == [1]
    assert stream.counts()["skipped"] == 1
    with pytest.raises(wp.DecodeError, match="field 'left.jpg' of sample '0' .* no decoder for it: name an image spec"):
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


def test_decoders_of_the_caller_come_first():
    samples = numbered(b"abc", field="seg.png")
    assert [sample["seg.png"] for sample in decoded(samples, "rgb8", {"png": len, "seg.png": bytes.decode})] == ["abc"]


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


def test_an_error_of_a_function_of_key_and_data_is_a_decode_error():
    def broken(key, data):
        raise KeyError("no such thing")

    with pytest.raises(
        wp.DecodeError, match="field 'png' of sample '0' in shard .* KeyError: 'no such thing'"
    ) as caught:
        list(decoded(numbered(b"", field="png"), broken))
    assert (caught.value.url, caught.value.key, caught.value.field) == ("https://host/x.tar", "0", "png")
    assert list(decoded(numbered(b"", field="png"), broken, on_error="skip")) == []


def test_an_extension_may_name_several():
    [one, two] = decoded([{"jpg": b"1"}, {"a.png": b"22"}], {"jpg;png": len})
    assert (one, two) == ({"jpg": 1}, {"a.png": 2})


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


def test_many_different_fields_take_no_memory():
    """A shard may name a new field in each sample."""
    samples = [{"__key__": str(number), f"{number}.cls": str(number).encode()} for number in range(9_000)]
    assert [sample[f"{number}.cls"] for number, sample in enumerate(decoded(samples))] == list(range(9_000))


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


def test_an_error_of_the_callers_decoder_is_a_decode_error():
    def broken(data):
        raise KeyError("no such thing")

    with pytest.raises(wp.DecodeError, match="field 'png' of sample '0' .* KeyError: 'no such thing'"):
        list(decoded(numbered(b"", field="png"), {"png": broken}))


def test_keys_and_fields_of_any_bytes_can_be_printed():
    """A name that is not UTF-8 does not break the message."""
    with pytest.raises(wp.DecodeError) as caught:
        list(decoded([{"__key__": "\udcff", "\udcfe.cls": b"x"}]))
    str(caught.value).encode()


def test_skip_counts_and_logs(caplog):
    stream = decoded(numbered(b"1", b"x", b"2", b""), on_error="skip")
    for _ in range(2):
        assert [sample["cls"] for sample in stream] == [1, 2]
        assert stream.counts() == {"delivered": 2, "filtered": 0, "skipped": 2, "dropped": 0}
    assert "field 'cls' of sample '1'" in caplog.text
    assert "secret" not in caplog.text


def test_max_errors_is_the_number_that_may_be_skipped():
    samples = numbered(b"x", b"1", b"x")
    assert len(list(decoded(samples, on_error="skip", max_errors=2))) == 1
    with pytest.raises(wp.DecodeError, match="sample '2'") as caught:
        list(decoded(samples, on_error="skip", max_errors=1))
    assert caught.value.__notes__ == ["That is error 2 in this epoch, and max_errors=1."]


@pytest.mark.parametrize("field", ["pkl", "pickle", "pyd", "a.pkl", "pkl.gz", "PKL"])
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
@pytest.mark.parametrize("step", ["decode_by_ext", "map_samples"])
def test_a_lack_of_memory_always_raises(on_error, step):
    """It is not the sample's fault: as a bad sample it would be skipped, and the next ones too."""

    def starved(data):
        raise MemoryError

    samples = Given(numbered(b"1", field="bin"))
    stage = (
        DecodeByExt(samples, {"bin": starved}, on_error=on_error)
        if step == "decode_by_ext"
        else MapSamples(samples, starved, on_error=on_error)
    )
    with pytest.raises(MemoryError) as caught:
        list(Stream(stage))
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


def test_images_of_real_shards(tmp_path):
    """They have the shape and dtype of the spec; without a spec they stay bytes."""
    urls = make_shards(tmp_path, shards=1, samples=3, fields=("jpg", "cls"))
    chain = wp.ShardList(urls).open_shards().load_tar().group_by_key()
    assert all(type(sample["jpg"]) is bytes for sample in chain.decode_by_ext())
    images = [sample["jpg"] for sample in chain.decode_by_ext("torchrgb")]
    assert {(image.shape, image.dtype) for image in images} == {((3, 8, 8), torch.float32)}


def test_the_image_limit_is_an_option(tmp_path):
    urls = make_shards(tmp_path, shards=1, samples=3, fields=("jpg",))
    pipe = (
        wp.ShardList(urls)
        .open_shards()
        .load_tar()
        .group_by_key()
        .decode_by_ext("rgb8", max_image_pixels=63, on_error="skip")
    )
    assert list(pipe) == []
    assert pipe.counts()["skipped"] == 3


@pytest.mark.parametrize(
    ("specs", "options", "message"),
    [
        (("rgb9",), {}, "unknown spec 'rgb9'"),
        (("rgb", "pil"), {}, "images cannot be both"),
        ((), {"on_error": "warn"}, "on_error must be one of"),
        ((), {"max_errors": -1}, "max_errors must be at least 0"),
        ((), {"max_image_pixels": 0}, "max_image_pixels must be at least 1"),
        ((), {"max_image_pixels": "1"}, "max_image_pixels must be an int"),
        ((bytes.decode,), {}, r"fn\(key, data\).*\{'ext': fn\}"),
        ((lambda data: data,), {}, r"fn\(key, data\).*\{'ext': fn\}"),
        ((3,), {}, "a spec is"),
        ((), {"only": "jpg cls"}, r"write only=\['jpg', 'cls'\]"),
        ((), {"only": []}, "only is empty"),
        ((), {"only": [""]}, "a field is named by a string"),
    ],
)
def test_wrong_arguments_are_refused_when_it_is_built(specs, options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        DecodeByExt(Given([]), *specs, **options)


def test_items_that_are_no_samples_are_refused():
    with pytest.raises(
        TypeError,
        match=r"decode_by_ext\(\) takes samples as dicts, and its source gave tuple: put it after group_by_key\(\), before to_tuple\(\)",  # noqa: E501
    ):
        list(decoded([(1, 2)], on_error="skip"))


def test_every_extension_of_the_table_is_in_the_docstring():
    """The table is for the code, the docstring for people."""
    from wds_pipes.codecs.table import ROWS

    words = set(DecodeByExt.__doc__.replace(";", " ").split())
    assert set(ROWS) <= words


def test_is_a_method_with_help_that_pickles(urls, capsys):
    pipe = samples(urls).decode_by_ext("rgb8", {"txt": bytes.decode, "json": json.loads})
    again = pickle.loads(pickle.dumps(pipe))
    assert list(again) == list(pipe)
    help(pipe.decode_by_ext)
    assert "Decode the fields of samples by their extensions" in capsys.readouterr().out


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
