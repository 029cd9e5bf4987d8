"""An error for an unknown method, option or name says what was probably meant; for one of another
library, what to use here.
"""

import inspect
import re

import pytest
from documents import ROOT, cells_of
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_pipes as wp
from wds_pipes import checkpoint, nodes

TABLE = cells_of(ROOT / "tutorials" / "10_moving_from_webdataset.ipynb", "markdown")[0]
NO_NAME = "module 'wds_pipes' has no attribute "
NO_METHOD = "'GroupByKey' object has no attribute "

# methods that torch or this package has under the same name, and those that nobody calls
OURS = {"map", "to_tuple", "shuffle", "repeat"}
INNER = {
    *("close", "create_url_iterator", "invoke", "iterator", "iterator1", "lmdb_cached", "log_keys", "mcached", "stage"),
    "update_cache_info",
}
TORCHDATA = """
    add_index async_map_batches bucketbatch cycle drop end_caching enumerate extract extract_keys flatmap flatten
    fullsync header in_memory_cache limit list_files_by_fsspec load_from_tar map_batches max_token_bucketize
    mux_longest on_disk_cache open_files_by_fsspec pin_memory prefetch random_split readlines round_robin_demux
    rows2columnar save_by_fsspec set_length shard_expand sharding_round_robin_dispatch shuffled_flatmap slice
    threadpool_map unzip webdataset zip_longest zip_with_iter zip_with_map
"""


@pytest.fixture
def pipe(urls):
    return wp.ShardList(urls).open_shards().load_tar().group_by_key()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pipe: pipe.shufle_buffer, f"{NO_METHOD}'shufle_buffer'. Did you mean shuffle_buffer?"),
        (lambda pipe: pipe.ToTuple, f"{NO_METHOD}'ToTuple'. Did you mean to_tuple?"),
        (lambda pipe: pipe.batched, f"{NO_METHOD}'batched'. Here it is .batch_samples(size)."),
        (lambda pipe: pipe.zebra, f"{NO_METHOD}'zebra'."),
        (lambda pipe: pipe.map(str).set_epochs, "'TorchEnded' object has no attribute 'set_epochs'. Did you mean "),
        (lambda pipe: wp.Pipeloader, f"{NO_NAME}'Pipeloader'. Did you mean PipeLoader?"),
        (lambda pipe: wp.WebDataset, f"{NO_NAME}'WebDataset'. Here it is ShardList(urls).open_shards()."),
        (lambda pipe: wp.zebra, f"{NO_NAME}'zebra'."),
        (lambda pipe: nodes.open_shards, "module 'wds_pipes.nodes' has no attribute 'open_shards'. Did you mean Open"),
        (lambda pipe: wp.ShardList("a", shufle=1), "ShardList() has no option 'shufle'. Did you mean shuffle?"),
        (
            lambda pipe: nodes.ShardList("a", shufle=1),
            "nodes.ShardList() has no option 'shufle'. Did you mean shuffle?",
        ),
        (lambda pipe: pipe.shuffle_buffer(3, x=2), "shuffle_buffer() has no option 'x'. It has: seed, size."),
        (lambda pipe: pipe.batch_samples(3, partial=True), "batch_samples() has no option 'partial'. Here it is drop_"),
        (lambda pipe: wp.mix({"a": pipe}, weigths=[1]), "mix() has no option 'weigths'. Did you mean weights?"),
        (lambda pipe: wp.PipeLoader(pipe, sampler=1), "PipeLoader() has no option 'sampler'. Here it is ShardList("),
        (lambda pipe: wp.ShardWriter("%d", maxcount=3), "ShardWriter() has no option 'maxcount'. Here it is max_samp"),
        (lambda pipe: checkpoint.save("a", pipe, steps=3), "save() has no option 'steps'. Did you mean step?"),
        (lambda pipe: wp.PipeLoader(pipe).with_epoch(sample=3), "with_epoch() has no option 'sample'. Did you mean sa"),
    ],
)
def test_the_message(call, message, pipe):
    with pytest.raises((AttributeError, TypeError), match=f"^{re.escape(message)}"):
        call(pipe)


def test_methods_of_other_libraries(pipe):
    """Those of webdataset, as in the table of the tutorial, and those of torchdata's pipes."""
    webdataset = pytest.importorskip("webdataset")
    methods = {name for name in dir(webdataset.WebDataset) if not name.startswith("_")} - OURS - INNER
    for name in [*methods, *TORCHDATA.split()]:
        with pytest.raises(AttributeError, match=rf"'{name}'\. Here it is "):
            getattr(pipe, name)
    for theirs, here in re.findall(r"^\| `\.(\w+)\(.*?\| `\.(\w+)\(", TABLE, re.MULTILINE):
        if theirs not in OURS:
            with pytest.raises(AttributeError, match=re.escape(here)):
                getattr(pipe, theirs)


def test_options_of_other_libraries(urls, pipe):
    """Those of webdataset, and of torch's DataLoader and its sampler."""
    webdataset = pytest.importorskip("webdataset")
    of_webdataset = {*inspect.signature(webdataset.WebDataset).parameters, "initial", "collation_fn", "bufsize"}
    of_torch = {
        option
        for kind in (DataLoader, StatefulDataLoader, DistributedSampler)
        for option in inspect.signature(kind).parameters
    }
    ours = {*inspect.signature(wp.ShardList).parameters, *inspect.signature(wp.PipeLoader).parameters, "mode"}
    for option in (of_webdataset | of_torch) - ours:
        with pytest.raises(TypeError, match=rf"^PipeLoader\(\) has no option '{option}'\. Here it is "):
            wp.PipeLoader(pipe, **{option: None})


def test_shuffle_of_webdataset(pipe):
    """Torch's own, by keyword, works as before."""
    with pytest.raises(TypeError, match=re.escape("shuffle(1000) of webdataset is .shuffle_buffer(1000) here")):
        pipe.shuffle(1000)
    assert len(list(pipe.shuffle(buffer_size=3))) == len(list(pipe.shuffle())) == 14
    assert "Shuffle" in pipe.shuffle.__doc__


def test_wrong_arguments_are_errors_when_the_pipe_is_built(pipe, tmp_path):
    for call in (
        pipe.shuffle_buffer,
        lambda: pipe.take_samples(3, 4),
        wp.PipeLoader,
        lambda: wp.PipeLoader(pipe).with_epoch(100),
        lambda: checkpoint.save(tmp_path),
    ):
        with pytest.raises(TypeError, match="argument"):
            call()
