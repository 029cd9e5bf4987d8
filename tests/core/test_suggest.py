"""An error for a misspelt step, option or name suggests the right one; for a name of webdataset it
says what replaces it.
"""

import inspect
import re
from functools import partial
from pathlib import Path

import pytest
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_pipes as wp
from wds_pipes import checkpoint, nodes

TABLE = (Path(__file__).parents[2] / "tutorials/10_moving_from_webdataset.py").read_text().partition("# %%\nimport")[0]


@pytest.fixture
def pipe(urls):
    return wp.ShardList(urls).open_shards().load_tar().group_by_key()


@pytest.mark.parametrize(
    ("name", "mend"),
    [
        ("shufle_buffer", "Did you mean shuffle_buffer()?"),
        ("group_by_keys", "Did you mean group_by_key()?"),
        ("ToTuple", "Did you mean to_tuple()?"),
        ("set_epochs", "Did you mean set_epoch()?"),
        ("decode", 'decode() of webdataset is .decode_by_ext("rgb8") here'),
        ("batched", "batched() of webdataset is .batch_samples(size) here"),
        ("with_epoch", "with_epoch() of webdataset is PipeLoader(pipe).with_epoch(samples=...) here"),
        ("zebra", "object has no attribute 'zebra'"),
    ],
)
def test_a_misspelt_step(pipe, name, mend):
    with pytest.raises(AttributeError, match=re.escape(f"'GroupByKey' object has no attribute '{name}'")) as caught:
        getattr(pipe, name)
    assert str(caught.value).endswith(mend)
    with pytest.raises(AttributeError, match=re.escape(mend)):
        getattr(pipe.map(str), name)  # torch's step, as a pipe of ours
    assert not hasattr(pipe, name)
    assert not hasattr(pipe, "_divides_items")


def test_every_method_of_webdataset_has_a_suggestion(pipe):
    """Except those that this package or torch has under the same name. The table of the tutorial
    has the same names.
    """
    webdataset = pytest.importorskip("webdataset")
    ours = {"map", "to_tuple", "shuffle", "repeat"}
    inner = {
        "close",
        "create_url_iterator",
        "invoke",
        "iterator",
        "iterator1",
        "lmdb_cached",
        "log_keys",
        "mcached",
        "stage",
        "update_cache_info",
    }
    for name in {name for name in dir(webdataset.WebDataset) if not name.startswith("_")} - ours - inner:
        with pytest.raises(AttributeError, match=re.escape(f"{name}() of webdataset is")):
            getattr(pipe, name)
    for theirs, here in re.findall(r"^# \| `\.(\w+)\(.*?\| `\.(\w+)\(", TABLE, re.MULTILINE):
        if theirs not in ours:
            with pytest.raises(AttributeError, match=re.escape(here)):
                getattr(pipe, theirs)


def test_shuffle_of_webdataset(pipe):
    """Torch's own, by keyword, works as before."""
    with pytest.raises(TypeError, match=re.escape("shuffle(1000) of webdataset is .shuffle_buffer(1000) here")):
        pipe.shuffle(1000)
    assert len(list(pipe.shuffle(buffer_size=3))) == len(list(pipe.shuffle())) == 14
    assert "Shuffle" in pipe.shuffle.__doc__


def test_misspelt_options(urls, pipe, tmp_path):
    loader = wp.PipeLoader(pipe)
    for build, message in (
        (
            lambda: wp.ShardList(urls).open_shards(conections=4),
            "open_shards() has no option 'conections'. Did you mean connections=?",
        ),
        (lambda: wp.ShardList(urls, shufle=True), "ShardList() has no option 'shufle'. Did you mean shuffle=?"),
        (lambda: pipe.shuffle_buffer(sise=3), "shuffle_buffer() has no option 'sise'. Did you mean size=?"),
        (
            lambda: pipe.batch_samples(3, partial=False),
            "batch_samples() has no option 'partial'. Did you mean drop_last=? It means the opposite.",
        ),
        (lambda: pipe.group_by_key(handler=print), "group_by_key() has no option 'handler'. Did you mean on_error=?"),
        (lambda: pipe.shuffle_buffer(3, capacity=2), "shuffle_buffer() has no option 'capacity'. It has: size, seed."),
        (lambda: wp.mix({"a": pipe}, weigths=[1]), "mix() has no option 'weigths'. Did you mean weights=?"),
        (
            lambda: nodes.ShardList(urls, shufle=True),
            "nodes.ShardList() has no option 'shufle'. Did you mean shuffle=?",
        ),
        (lambda: wp.PipeLoader(pipe, batchsize=3), "PipeLoader() has no option 'batchsize'. Did you mean batch_size=?"),
        (
            lambda: wp.ShardWriter(str(tmp_path / "%d.tar"), maxcount=3),
            "ShardWriter() has no option 'maxcount'. Did you mean max_samples=?",
        ),
        (
            lambda: wp.ShardWriter(str(tmp_path / "%d.tar"), maxsize=3),
            "ShardWriter() has no option 'maxsize'. Did you mean max_bytes=?",
        ),
        (
            lambda: wp.TarWriter(str(tmp_path / "a.tar"), encoder=True),
            "TarWriter() has no option 'encoder'. It has: target, overwrite, codecs, storage_options.",
        ),
        (
            lambda: wp.ShardCache(tmp_path, maxbytes=3),
            "ShardCache() has no option 'maxbytes'. Did you mean max_bytes=?",
        ),
        (lambda: wp.SampleOrder(3, shufle=True), "SampleOrder() has no option 'shufle'. Did you mean shuffle=?"),
        (lambda: wp.audio(begin=2), "audio() has no option 'begin'. It has: start, duration, max_bytes."),
        (lambda: checkpoint.save(tmp_path, loader, steps=3), "save() has no option 'steps'. Did you mean step=?"),
        (lambda: checkpoint.load(tmp_path, loader, steps=3), "load() has no option 'steps'. Did you mean step=?"),
        (lambda: loader.with_epoch(sample=3), "with_epoch() has no option 'sample'. Did you mean samples=?"),
    ):
        with pytest.raises(TypeError) as caught:
            build()
        assert str(caught.value) == message


def test_every_option_of_webdataset_has_a_suggestion(urls, pipe):
    """Where the step has it, and where another step, or none, has it."""
    webdataset = pytest.importorskip("webdataset")
    source = wp.ShardList(urls)
    ours = {*inspect.signature(wp.ShardList).parameters, "mode"}
    for option in {*inspect.signature(webdataset.WebDataset).parameters, "initial", "collation_fn", "bufsize"} - ours:
        mend = rf"no option '{option}'(\. Did you mean |: {option}= of webdataset is here )"
        for call in (partial(wp.ShardList, urls), source.open_shards, pipe.decode_by_ext, partial(wp.PipeLoader, pipe)):
            with pytest.raises(TypeError, match=mend):
                call(**{option: None})
    for call, mend in (
        (lambda: wp.ShardList(urls, nodesplitter=print), ": nodesplitter= of webdataset is here nothing: PipeLoader"),
        (lambda: wp.ShardList(urls, handler=print), ": handler= of webdataset is here on_error= of the steps after"),
        (lambda: wp.ShardList(urls, cache_dir="c"), ": cache_dir= of webdataset is here cache= of open_shards()."),
        (lambda: source.open_shards(cache_dir="c"), ". Did you mean cache=?"),
        (lambda: wp.PipeLoader(pipe, cache_size=3), " is here max_bytes= of cache_shards()."),
    ):
        with pytest.raises(TypeError) as caught:
            call()
        assert mend in str(caught.value)


def test_too_many_or_too_few_arguments(pipe, tmp_path):
    """The error shows how to call."""
    for call, message in (
        (
            lambda: wp.PipeLoader(pipe).with_epoch(100),
            "with_epoch(): too many positional arguments. It is with_epoch(*, samples=None, batches=None).",
        ),
        (
            pipe.shuffle_buffer,
            "shuffle_buffer(): missing a required argument: 'size'. It is shuffle_buffer(size, *, seed=None).",
        ),
        (lambda: pipe.take_samples(3, 4), "take_samples(): too many positional arguments. It is take_samples(n)."),
        (wp.PipeLoader, "PipeLoader(): missing a required argument: 'pipe'. It is PipeLoader(pipe, *, "),
        (
            lambda: checkpoint.save(tmp_path),
            "save(): missing a required argument: 'loader'. It is save(directory, loader, *, keep=3, step=None).",
        ),
    ):
        with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
            call()


def test_a_type_error_inside_a_call_stays_as_it_is(tmp_path):
    with pytest.raises(TypeError, match="n must be the number of samples"):
        wp.SampleOrder([1, 2, 3])


def test_options_of_dataloader(pipe):
    """PipeLoader has each, or says what does the same."""
    for kind in (DataLoader, StatefulDataLoader, DistributedSampler):
        for option in inspect.signature(kind).parameters:
            if option not in inspect.signature(wp.PipeLoader).parameters:
                with pytest.raises(TypeError, match=rf"^PipeLoader\(\) has no option '{option}'(: |\. Did you mean )"):
                    wp.PipeLoader(pipe, **{option: None})
    for option, mend in (
        ("shuffle", ": the order is that of the pipe: ShardList(shuffle=True), .shuffle_buffer(size)."),
        ("collate_fn", ". Did you mean collate=?"),
        ("timeout", ": that is timeout_seconds=."),
        ("shufle", ". It has: "),
    ):
        with pytest.raises(TypeError) as caught:
            wp.PipeLoader(pipe, **{option: True})
        assert str(caught.value).startswith(f"PipeLoader() has no option {option!r}{mend}")


def test_names_of_nodes():
    for name, mend in (
        ("Shardlist", "Did you mean ShardList?"),
        ("open_shards", "Did you mean OpenShards?"),
        ("zebra", "has no attribute 'zebra'"),
    ):
        with pytest.raises(AttributeError, match=re.escape(mend) + "$"):
            getattr(nodes, name)
