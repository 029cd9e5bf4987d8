"""len() of pipes and datasets: right for every number of workers of a DataLoader, or a TypeError
that says what to do.
"""

import re
import warnings

import pytest
from pipelines import shuffled
from process_group import launch
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_pipes as wp
from wds_pipes import nodes
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

COUNTS = [3, 0, 5, 2, 9]


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("counted"), shards=len(COUNTS), samples=COUNTS)


def source(urls, **options):
    return wp.ShardList(urls, **{"shuffle": True, "samples_per_shard": COUNTS, **options})


def decoded(urls, **options):
    return shuffled(urls, **{"samples_per_shard": COUNTS, **options}).decode_by_ext()


def test_len_is_the_number_of_items(counted, tmp_path):
    cached = source(counted).cache_shards(tmp_path, max_bytes="1GB")
    for pipe, expected in (
        (source(counted), 5),
        (source(counted, samples_per_shard=None).open_shards(), 5),
        (cached, 5),
        (decoded(counted), 19),
        (decoded(counted).to_tuple("txt").interleave_shards(2).map_samples(str), 19),
        (cached.open_shards().load_tar().group_by_key().batch_samples(4), 5),
        (decoded(counted).batch_samples(4, drop_last=True), 4),
        (decoded(counted).batch_samples(2).batch_samples(4, collate="list"), 3),
        (decoded(counted).map(str), 19),
        (decoded(counted).batch(4).collate(list).map(str), 5),
        (decoded(counted).batch(4, drop_last=True), 4),
    ):
        assert len(pipe) == len(pipe.as_dataset()) == len(list(pipe)) == expected
        assert len(pipe) == expected  # also after an epoch
    assert len(wp.PipeLoader(cached.open_shards().load_tar().group_by_key(), batch_size=4, rank=0, world_size=2)) == 2


def test_a_loader_of_shards_alone(counted):
    source = wp.PipeLoader(wp.ShardList(counted), epoch_end="exact")
    assert [ref.url for ref in source] == counted


@pytest.mark.parametrize(
    ("build", "mend"),
    [
        (
            lambda urls: decoded(urls, samples_per_shard=None),
            "the samples of the shards are not counted: pass ShardList(index=...) the index.json that wds-pipes create",
        ),
        (
            lambda urls: source(urls).open_shards().load_tar(),
            "the index counts samples, not members: add group_by_key()",
        ),
        (lambda urls: decoded(urls).filter_samples(bool), "filter_samples() may change their number"),
        (
            lambda urls: decoded(urls).map_samples(str, on_error="skip"),
            "map_samples(on_error='skip') changes their number",
        ),
        (lambda urls: source(urls).open_shards(on_error="skip"), "open_shards(on_error='skip') changes their number"),
        (lambda urls: decoded(urls).filter(bool), "torch.Filter() may change their number"),
        (lambda urls: wp.mix({"a": decoded(urls)}), "how many samples a mix() gives is not known"),
        (lambda urls: decoded(urls, resampled=True, shuffle=False), "resampled=True draws other shards in each epoch"),
    ],
)
def test_an_unknown_length_is_a_type_error(build, mend, counted):
    """``list()`` and bool() work all the same."""
    pipe = build(counted)
    for each in (pipe, pipe.as_dataset()):
        with pytest.raises(TypeError, match=re.escape(mend)):
            len(each)
        assert each
    assert list(pipe)


def test_sample_count_is_of_the_shards(counted, tmp_path):
    """Of all ranks, in samples also after batches, and from an index."""
    index_shards(counted, tmp_path / "index.json")
    indexed = wp.ShardList(str(tmp_path / "index.json"))
    node = nodes.GroupByKey(nodes.LoadTar(nodes.OpenShards(nodes.ShardList(counted, samples_per_shard=COUNTS))))
    for pipe in (
        indexed,
        indexed.open_shards().load_tar(),
        decoded(counted).shuffle_buffer(3).to_tuple("txt").batch_samples(4, drop_last=True),
        decoded(counted).batch(4).map(len),
        decoded(counted).as_dataset(),
        wp.ShardList(counted, resampled=True, samples_per_shard=4).open_shards(),
        node,
    ):
        assert pipe.sample_count() == (20 if "resampled" in str(pipe) else sum(COUNTS))
    assert decoded(counted).repeat(3).batch_samples(4).sample_count() == 3 * sum(COUNTS)
    for pipe, why in (
        (source(counted, samples_per_shard=None), "not counted: pass ShardList(index=...).*wds-pipes index SHARDS"),
        (
            decoded(counted).filter_samples(bool),
            "filter_samples() may change their number. Before this step, .* 19 samples",
        ),
        (decoded(counted).to_tuple("txt", on_error="skip"), "to_tuple(on_error='skip') changes their number. Before"),
        (decoded(counted, resampled=True), "resampled=True draws other shards .*with_epoch(samples=...)"),
        (
            wp.mix({"a": decoded(counted)}),
            "how many samples a mix() gives is not known; a pipe that begins with ShardList",
        ),
        (IterableWrapper(counted).open_shards(), "a pipe that begins with ShardList"),
    ):
        with pytest.raises(TypeError, match=re.escape(why).replace(r"\.\*", ".*")):
            pipe.sample_count()


@pytest.mark.parametrize("end", ["drop", "pad"])
def test_torchs_steps_keep_the_samples_counted(end, counted):
    """map, collate and batch: ranks have the same number of full batches, and samples count."""
    for lanes in (1, 2):
        pipe = decoded(counted).map(dict).batch(2).collate(list)
        ranks = [wp.PipeLoader(pipe, epoch_end=end, rank=rank, world_size=2, lanes=2 * lanes) for rank in range(2)]
        found = [[len(batch) for batch in loader] for loader in ranks]
        assert found[0] == found[1] == [2] * len(ranks[0])
        counts = [loader.counts() for loader in ranks]
        assert sum(count["delivered"] for count in counts) == 2 * 2 * len(ranks[0])
        assert sum(count["delivered"] + count["dropped"] - count.get("padded", 0) for count in counts) == sum(COUNTS)
    with pytest.raises(ValueError, match=r"torch.Filter\(\) may change their number"):
        wp.PipeLoader(decoded(counted).filter(bool), batch_size=2, epoch_end=end)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_len_of_a_dataloader_is_right(workers, counted):
    """Unless several workers make batches."""
    for batch_size, drop_last, build in (
        (None, False, decoded),
        (4, False, decoded),
        (4, True, decoded),
        (None, False, lambda urls: decoded(urls).batch_samples(4)),
    ):
        for loader in (
            DataLoader(
                build(counted), batch_size=batch_size, drop_last=drop_last, num_workers=workers, collate_fn=list
            ),
            StatefulDataLoader(
                build(counted).as_dataset(),
                batch_size=batch_size,
                drop_last=drop_last,
                num_workers=workers,
                collate_fn=list,
            ),
        ):
            if workers < 2 or (batch_size is None and build is decoded):
                assert len(loader) == len(list(loader))


def lengths_on_a_rank(urls):
    pipe = decoded(urls)
    loader = DataLoader(pipe, batch_size=None)
    for each in (pipe, loader):
        with pytest.raises(TypeError):
            len(each)
    with warnings.catch_warnings(action="error", category=UserWarning):  # torch divides the samples over the ranks
        assert 0 < len(list(loader)) < 19
    with pytest.raises(TypeError, match=r"gives part [01] of 2 of the epoch: use wds_pipes\.PipeLoader"):
        len(pipe)
    with pytest.warns(UserWarning, match="gives all samples of its shards to every rank"):
        loader = DataLoader(decoded(urls).as_dataset(), batch_size=None)
    assert len(loader) == len(list(loader)) == 19


def test_ranks(counted):
    """In a DataLoader each rank has its part of a pipe, and all of a dataset."""
    launch(2, lengths_on_a_rank, counted)
