"""What holds for every step: help, pickles, wrong arguments that are refused when it is built, and
options that belong to the state.
"""

import pickle

import pytest
from chains import AFTER, BASE, NEEDS, build
from pipelines import samples
from sources import Given
from torch.utils.data.datapipes.iter import IterableWrapper

import wds_pipes as wp
from wds_pipes import datapipes
from wds_pipes.core.stage import functional_name
from wds_pipes.core.stream import Stream
from wds_pipes.stages import (
    DecodeByExt,
    ExplodeRecords,
    InterleaveShards,
    MapFields,
    MapSamples,
    RenameFields,
    SelectFields,
    ToTuple,
)
from wds_pipes.testing import same


@pytest.mark.parametrize("name", AFTER)
def test_it_pickles(name, urls):
    pipe = build(datapipes, (*BASE, *NEEDS.get(name, ()), name), urls)
    assert same(list(pickle.loads(pickle.dumps(pipe))), list(pipe))


@pytest.mark.parametrize(
    ("step", "other"),
    [
        (lambda pipe: pipe.take_samples(5), lambda pipe: pipe.take_samples(6)),
        (lambda pipe: pipe.slice_samples(1, 9), lambda pipe: pipe.slice_samples(1, 9, 2)),
        (lambda pipe: pipe.shuffle_buffer(3), lambda pipe: pipe.shuffle_buffer(4)),
        (lambda pipe: pipe.shuffle_buffer(3), lambda pipe: pipe.shuffle_buffer(3, seed=0)),
        (lambda pipe: pipe.interleave_shards(2), lambda pipe: pipe.interleave_shards(3)),
        (lambda pipe: pipe.repeat(2), lambda pipe: pipe.repeat(3)),
        (lambda pipe: pipe.explode_records("jsonl"), lambda pipe: pipe.explode_records("jsonl", field="json")),
        (lambda pipe: pipe.pack_samples(), lambda pipe: pipe.pack_samples(method="wrap")),
        (lambda pipe: pipe.pack_samples(len), lambda pipe: pipe.pack_samples("txt")),
        (lambda pipe: pipe.bucket_samples("txt", 8), lambda pipe: pipe.bucket_samples("txt", 8, boundaries=[4])),
        (lambda pipe: pipe.bucket_samples("txt", 8), lambda pipe: pipe.bucket_samples("txt", 8, sort=False)),
    ],
)
def test_an_option_that_decides_the_samples_belongs_to_the_state(step, other, urls):
    state = step(samples(urls)).state_dict()
    step(samples(urls)).load_state_dict(state)
    with pytest.raises(wp.StateError, match="step 5 of its pipeline was"):
        other(samples(urls)).load_state_dict(state)


def members():
    return wp.ShardList("x.tar").open_shards().load_tar()


COUNTS = [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError), ("9", TypeError), (None, TypeError)]


@pytest.mark.parametrize(("count", "error"), COUNTS)
@pytest.mark.parametrize(
    "step", ["batch_samples", "interleave_shards", "shuffle_buffer", "take_samples", "repeat", "slice_samples"]
)
def test_a_wrong_number_is_refused_when_it_is_built(step, count, error, urls):
    if (step, count) == ("repeat", None):  # without end
        return
    arguments = (0, 5, count) if step == "slice_samples" else (count,)
    with pytest.raises(error, match=r"must be (at least|an int)"):
        getattr(samples(urls), step)(*arguments)


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda pipe: pipe.shuffle_buffer(1 << 31), ValueError, "size must be at most"),
        (lambda pipe: pipe.shuffle_buffer(3, seed="x"), TypeError, "seed must be an int"),
        (lambda pipe: pipe.slice_samples(-1), ValueError, "start must be at least 0, not -1"),
        (lambda pipe: pipe.slice_samples(3, 3), ValueError, "stop must be more than start=3, not 3"),
        (lambda pipe: pipe.slice_samples(0, "5"), TypeError, "stop must be an int"),
        (lambda pipe: pipe.batch_samples(2, collate=["list"]), ValueError, "collate must be None, 'numpy', 'keep'"),
        (lambda pipe: pipe.filter_samples("cls"), TypeError, "filter_samples.* needs a function, not 'cls'"),
        (lambda pipe: pipe.map_samples(str, max_errors=-1), ValueError, "max_errors"),
        (lambda pipe: pipe.map_samples(str, on_error=ValueError), TypeError, "a dict such as {DecodeError: 'skip'}"),
        (lambda pipe: pipe.map_samples(str, on_error="ignore"), ValueError, "must be one of 'raise', 'skip', not 'ig"),
        (lambda pipe: pipe.map_samples(str, on_error=3), TypeError, "on_error must be 'raise', 'skip', a dict such"),
        (
            lambda pipe: pipe.map_samples(str, on_error={"DecodeError": "skip"}),
            TypeError,
            "takes classes of errors, as {DecodeError: 'skip'}, not 'DecodeError'",
        ),
        (lambda pipe: pipe.map_samples(str, on_error={int: "skip"}), TypeError, "takes classes of errors"),
        (
            lambda pipe: pipe.map_samples(str, on_error={ValueError: "drop"}),
            ValueError,
            r"on_error\[ValueError\] must be one of 'raise', 'skip', not 'drop'",
        ),
        *(
            (lambda pipe, fn=fn: pipe.map_samples(fn), TypeError, "map_samples")
            for fn in (None, "name", 3, lambda: 1, lambda one, two, three: 1, lambda sample, *, rng: 1)
        ),
        (lambda pipe: pipe.map_samples(str, threads=-1), ValueError, "threads must be"),
        (lambda pipe: pipe.decode_by_ext(threads=True), TypeError, "threads must be"),
        (lambda pipe: pipe.map_samples(str, seed_all=True, threads=2), ValueError, "let the function draw from rng"),
        (lambda pipe: pipe.take_samples(12).interleave_shards(2), TypeError, r"put take_samples\(\) after it"),
        (lambda pipe: InterleaveShards(Given([1]), 2), TypeError, "start the pipeline with it"),
        (lambda pipe: wp.mix({"a": pipe}).interleave_shards(2), TypeError, "start the pipeline with it"),
        (lambda pipe: IterableWrapper([]).open_shards().interleave_shards(2), TypeError, "start the pipeline with it"),
        (lambda pipe: wp.ShardList("x").open_shards(storage_options="anon"), TypeError, "storage_options"),
        (lambda pipe: wp.ShardList("x").open_shards(on_error="warn"), ValueError, "on_error"),
        *(
            (lambda pipe, bad=bad: wp.ShardList("x").open_shards().load_tar(**bad), ValueError, next(iter(bad)))
            for bad in ({"max_member_bytes": 0}, {"on_truncated": "skip"}, {"on_error": "warn"}, {"max_errors": -1})
        ),
        (lambda pipe: members().group_by_key(fields="jpg cls"), TypeError, r"write fields=\['jpg', 'cls'\]"),
        (lambda pipe: members().group_by_key(fields=[]), ValueError, "fields is empty"),
        (lambda pipe: members().group_by_key(key_split="middle"), ValueError, "key_split must be one of"),
        (lambda pipe: members().group_by_key(on_repeated_key="skip"), ValueError, "on_repeated_key must be one of"),
        (
            lambda pipe: members().shuffle_buffer(10).group_by_key(),
            TypeError,
            "of a sample apart: put it after",
        ),
        (lambda pipe: members().interleave_shards(2).take_samples(3).group_by_key(), TypeError, "of a sample apart"),
        (lambda pipe: pipe.explode_records("json"), ValueError, "kind must be one of 'jsonl', 'msgpack', 'cbor'"),
        (lambda pipe: pipe.explode_records("jsonl", field=3), TypeError, "a field is named by a string"),
        (lambda pipe: pipe.pack_samples(3), TypeError, "length must be the name of a field or a function, not 3"),
        (lambda pipe: pipe.pack_samples("tokens;ids"), TypeError, "length must be the name of a field"),
        (lambda pipe: pipe.pack_samples(budget=0), ValueError, "budget must be at least 1"),
        (lambda pipe: pipe.pack_samples(window=4097), ValueError, "window must be at most 4096"),
        (lambda pipe: pipe.pack_samples(method="next-fit"), ValueError, "method must be one of 'best-fit'"),
        (lambda pipe: pipe.pack_samples(too_long="skip"), ValueError, "too_long must be one of 'error', 'cut', 'drop'"),
        (lambda pipe: pipe.pack_samples(aligned="labels"), TypeError, "aligned must be a list of names of fields"),
        (
            lambda pipe: pipe.pack_samples(len, aligned=["labels"]),
            ValueError,
            "aligned= and pad= go with length= as the",
        ),
        (lambda pipe: pipe.bucket_samples(len, 8, pad=7), ValueError, "aligned= and pad= go with length= as the name"),
        (lambda pipe: pipe.pack_samples(method="wrap", too_long="cut"), ValueError, "leave out too_long='cut'"),
        (lambda pipe: pipe.pack_samples(len, method="wrap"), ValueError, "go with length= as the name of a field"),
        (lambda pipe: pipe.pack_samples(len, pad=0), ValueError, "go with length= as the name of a field"),
        (lambda pipe: pipe.pack_samples(pad="0"), TypeError, "pad must be a number, not '0', for field 'tokens'"),
        (
            lambda pipe: pipe.pack_samples(aligned=["labels"], pad={"tokens": 0}),
            ValueError,
            r"a number for each of \['tokens', 'labels'\], not for \['tokens'\]",
        ),
        (lambda pipe: pipe.bucket_samples("txt"), ValueError, "needs either batch_size= or budget="),
        (lambda pipe: pipe.bucket_samples("txt", 8, budget=9), ValueError, "needs either batch_size= or budget="),
        (lambda pipe: pipe.bucket_samples("txt", 0), ValueError, "batch_size must be at least 1"),
        (lambda pipe: pipe.bucket_samples("txt", 8, boundaries=[2, 2]), ValueError, "boundaries must increase"),
        (lambda pipe: pipe.bucket_samples("txt", [8, 4]), ValueError, "has 2 numbers, and there are 1 buckets"),
        (lambda pipe: pipe.then(3), TypeError, "needs a function"),
        (lambda pipe: pipe.then(lambda: None), TypeError, r"needs fn\(items\).*functools.partial"),
        (lambda pipe: pipe.decode_by_ext("rgb9"), ValueError, "unknown spec 'rgb9'"),
        (lambda pipe: pipe.decode_by_ext("rgb8", size=0), ValueError, "size must be at least 1"),
        (
            lambda pipe: pipe.decode_by_ext("rgb8", size=(1, 2, 3)),
            (TypeError, ValueError),
            r"size is one number, or \(height, width\)",
        ),
        (lambda pipe: pipe.decode_by_ext("rgb8", size=(8, 8.5)), TypeError, "size must be an int, not 8.5"),
        (lambda pipe: pipe.decode_by_ext("rgb8", size="224"), TypeError, "size must be an int"),
        (lambda pipe: pipe.decode_by_ext("rgb8", size=1 << 20), ValueError, "size must be at most 65536"),
        (lambda pipe: pipe.decode_by_ext("rgb8", size=8, fit="crop"), ValueError, "fit must be one of 'cover', 'con"),
        (lambda pipe: pipe.decode_by_ext("rgb8", fit="contain"), ValueError, "also pass size="),
        (lambda pipe: pipe.decode_by_ext(size=8), ValueError, "also name an image spec"),
        (lambda pipe: pipe.decode_by_ext("rgb", "pil"), ValueError, "images cannot be both"),
        (lambda pipe: pipe.decode_by_ext(max_image_pixels=0), ValueError, "max_image_pixels must be at least 1"),
        (lambda pipe: pipe.decode_by_ext(len), TypeError, r"fn\(key, data\).*\{'ext': fn\}"),
        (lambda pipe: pipe.decode_by_ext(3), TypeError, "a spec is"),
        (lambda pipe: pipe.decode_by_ext(only="jpg cls"), TypeError, r"write only=\['jpg', 'cls'\]"),
        (lambda pipe: pipe.decode_by_ext(only=[]), ValueError, "only is empty"),
        (lambda pipe: pipe.to_tuple(), ValueError, r"to_tuple\('jpg;png', 'cls'\)"),
        (lambda pipe: pipe.to_tuple("jpg;;png"), TypeError, "such as 'jpg;png'"),
        (lambda pipe: pipe.to_tuple(["jpg", "cls"]), TypeError, "such as 'jpg;png'"),
        (lambda pipe: pipe.select_fields("jpg;"), TypeError, "a field is named by a string such as 'jpg;png'"),
        (lambda pipe: pipe.rename_fields({}), TypeError, "takes new names with the old ones"),
        (lambda pipe: pipe.rename_fields("jpg"), TypeError, "takes new names with the old ones"),
        (lambda pipe: pipe.rename_fields({"image": 1}), TypeError, "a field is named by a string"),
        (lambda pipe: pipe.map_fields({"jpg": 1}), TypeError, "takes functions by field"),
        (lambda pipe: pipe.map_fields({(): str}), TypeError, "a field is named by a string"),
        (lambda pipe: pipe.map_fields({0: str, "jpg": str}), TypeError, "either fields of dicts or places of tuples"),
        (lambda pipe: pipe.map_fields({-1: str}), ValueError, "places are numbered from 0, unlike -1"),
    ],
)
def test_a_wrong_argument_is_refused_when_it_is_built(build, error, message, urls):
    with pytest.raises(error, match=message):
        build(samples(urls))


@pytest.mark.parametrize(
    ("kind", "argument"),
    [
        (SelectFields, "jpg"),
        (RenameFields, {"image": "jpg"}),
        (MapFields, {"jpg": str}),
        (ToTuple, "jpg"),
        (DecodeByExt, "rgb"),
        (ExplodeRecords, "jsonl"),
    ],
)
def test_items_that_are_no_samples_are_refused(kind, argument):
    """They are not skipped as bad samples, and no step is told to stand before itself."""
    with pytest.raises(TypeError, match="takes samples as dicts, and its source gave tuple") as raised:
        list(Stream(kind(Given([(1, 2)]), argument, on_error="skip")))
    assert f"before {functional_name(kind)}()" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "argument"),
    [(MapSamples, lambda sample: int(sample["cls"])), (ToTuple, "x"), (DecodeByExt, {"cls": int})],
)
def test_max_errors_is_the_number_that_may_be_skipped(kind, argument):
    def errors(most):
        given = [{"__key__": str(number), "cls": b"x"} for number in range(3)]
        return Stream(kind(Given(given), argument, on_error="skip", max_errors=most))

    assert list(errors(3)) == []
    with pytest.raises(wp.SampleError, match="sample '2'") as caught:
        list(errors(2))
    assert caught.value.__notes__ == ["That is error 3 in this epoch, and max_errors=2."]
