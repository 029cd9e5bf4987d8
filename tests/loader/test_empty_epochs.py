"""An epoch that yields nothing because no sample has the requested fields is an error that names
them. One that a filter empties is not.
"""

import logging
import warnings

import pytest
from pipelines import loaded
from torch.utils.data import DataLoader
from torchdata.nodes import Loader
from torchdata.stateful_dataloader import StatefulDataLoader

import wds_pipes as wp
from wds_pipes import SampleError, nodes
from wds_pipes.testing import make_shards

SEEN = r"fields 'jpeg'; they have 'cls', 'txt'. Correct the names in group_by_key"


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("lacking"), shards=4, samples=[3, 0, 5, 2])


def chain(urls, *fields, module=wp, **options):
    if module is nodes:
        return nodes.GroupByKey(nodes.LoadTar(nodes.OpenShards(nodes.ShardList(urls, **options))), fields=fields)
    return wp.ShardList(urls, **options).open_shards().load_tar().group_by_key(fields=fields or None)


def pipe(urls, *fields, **options):
    return chain(urls, *fields, **options)


def nothing(sample):
    return False


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("host", "workers"),
    [
        ("DataLoader", 2),
        ("forkserver", 2),
        ("as_dataset", 2),
        ("StatefulDataLoader", 0),
        ("StatefulDataLoader", 2),
        ("PipeLoader", 2),
        ("interleaved", 0),
        ("with_epoch", 2),
    ],
)
def test_no_sample_has_the_fields(host, workers, urls):
    make = {
        "DataLoader": lambda pipe: DataLoader(pipe, batch_size=None, num_workers=workers),
        "forkserver": lambda pipe: DataLoader(
            pipe, batch_size=None, num_workers=workers, multiprocessing_context="forkserver"
        ),
        "as_dataset": lambda pipe: DataLoader(pipe.as_dataset(), batch_size=None, num_workers=workers),
        "StatefulDataLoader": lambda pipe: StatefulDataLoader(pipe.as_dataset(), batch_size=None, num_workers=workers),
        "PipeLoader": lambda pipe: wp.PipeLoader(pipe, batch_size=2, num_workers=workers),
        "interleaved": lambda pipe: wp.PipeLoader(
            pipe.interleave_shards(2).shuffle_buffer(3), batch_size=2, num_workers=workers, lanes=4
        ),
        "with_epoch": lambda pipe: wp.PipeLoader(pipe, batch_size=2, num_workers=workers).with_epoch(batches=3),
    }[host]
    with pytest.raises(SampleError, match=SEEN):
        list(make(pipe(urls, "jpeg")))
    # An empty lane is no error, nor is an epoch whose rest a predicate drops.
    if workers:
        some = [*urls[:1], *make_shards(f"{urls[0]}-other", shards=1, samples=2, fields=("json",))]
        assert next(iter(make(pipe(some, "json"))))
    if host != "with_epoch":
        assert list(make(pipe(urls, "txt", "jpeg").filter_samples(nothing))) == []


@pytest.mark.parametrize(
    "host", [lambda pipe: pipe, lambda pipe: wp.PipeLoader(pipe, batch_size=2, lanes=2)], ids=["pipe", "PipeLoader"]
)
def test_the_state_stays_at_the_beginning_of_the_epoch(host, urls):
    """The state is the one before the epoch, the iterator raises again, and the next iter() is the
    next epoch.
    """
    source = host(pipe(urls, "jpeg", shuffle=True))
    source.set_epoch(3)
    passing = iter(source)
    for _ in range(2):
        with pytest.raises(SampleError, match=SEEN):
            next(passing)
    state = source.state_dict()
    assert (state["epoch"], state["counts"]) == (3, {"delivered": 0})
    again = loaded(host(pipe(urls, "jpeg", shuffle=True)), state)
    with pytest.raises(SampleError, match=SEEN):
        list(again)
    with pytest.raises(SampleError, match=SEEN):
        list(source)
    assert source.state_dict()["epoch"] == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda urls: Loader(chain(urls, "jpeg", module=nodes)),
        *(
            lambda urls, end=end: wp.PipeLoader(
                pipe(urls, "jpeg", samples_per_shard=[3, 0, 5, 2]), batch_size=2, epoch_end=end
            )
            for end in ("drop", "pad", "exact")
        ),
        lambda urls: wp.mix({"a": pipe(urls, "jpeg"), "b": pipe(urls, "jpeg", seed=1)}, exhausted="drop"),
    ],
    ids=["node", "drop", "pad", "exact", "mix"],
)
@pytest.mark.filterwarnings("ignore:sources .* read the same shards")
def test_others_raise_the_same_error(make, urls):
    """A node, equal epochs, and a mix of such sources."""
    with pytest.raises(SampleError, match=SEEN):
        list(make(urls))


@pytest.mark.filterwarnings("ignore:sources .* read the same shards")
def test_a_source_of_a_mix(urls, caplog):
    """Beside other sources, a warning names the fields."""
    with caplog.at_level(logging.WARNING, logger="wds_pipes"):
        assert len(list(wp.mix({"a": pipe(urls, "jpeg"), "b": pipe(urls, "txt")}, exhausted="drop"))) == 10
    assert "'cls', 'txt'" in caplog.text


def test_an_epoch_that_is_empty_for_another_reason_is_a_warning(urls, caplog):
    with caplog.at_level(logging.WARNING, logger="wds_pipes"):
        assert list(wp.PipeLoader(pipe(urls, "txt").filter_samples(nothing), num_workers=2)) == []
    assert caplog.text.count("this epoch gave nothing: 10 filtered") == 1


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("empty"), shards=3, samples=0)


WHOLE_EPOCHS = {
    "pipe": lambda pipe: pipe,
    "fields": lambda pipe: pipe.select_fields("txt").shuffle_buffer(3),
    "interleaved": lambda pipe: pipe.interleave_shards(2),
    "mix": lambda pipe: wp.mix({"a": pipe}),
    "as_dataset": lambda pipe: pipe.as_dataset(),
    "PipeLoader": lambda pipe: wp.PipeLoader(pipe, batch_size=2, lanes=5),
    "workers": lambda pipe: wp.PipeLoader(pipe, batch_size=2, num_workers=2),
    "rank": lambda pipe: wp.PipeLoader(pipe.shuffle_buffer(3), rank=1, world_size=2, epoch_end="exact"),
    "DataLoader": lambda pipe: DataLoader(pipe, batch_size=None, num_workers=2),
    "StatefulDataLoader": lambda pipe: StatefulDataLoader(pipe.as_dataset(), batch_size=None, num_workers=2),
}


@pytest.mark.parametrize("host", WHOLE_EPOCHS)
def test_shards_without_any_sample_are_an_error_unless_this_is_allowed(host, empty, urls):
    """A lane without a sample beside others is none."""
    make = WHOLE_EPOCHS[host]
    with pytest.raises(SampleError, match=r"this epoch gave nothing: no shard of .* has a sample.*empty_check=False"):
        list(make(chain(empty)))
    assert list(make(chain(empty, empty_check=False))) == []
    assert len(list(make(chain([*empty, urls[3]])))) in (1, 2)


def test_what_leaves_out_all_samples_is_no_empty_source(urls, empty):
    """Neither a step that drops them, nor a rank without any."""
    for pipe in (chain(urls).then(drop_all), chain(urls).then(drop_one)):
        assert list(pipe) == list(wp.PipeLoader(pipe, lanes=2)) == []
    assert list(wp.PipeLoader(chain([urls[0], *empty]), rank=1, world_size=2, epoch_end="exact")) == []


def drop_all(samples):
    return (sample for sample in samples if not sample)


def drop_one(samples):
    next(samples)
    return ()


def download(sample):
    raise OSError("https://user:secret@host/x.jpg?sig=secret is not there")


def test_errors_of_functions_are_shown_without_credentials(urls, caplog):
    with caplog.at_level(logging.WARNING, logger="wds_pipes"):
        assert list(pipe(urls, "txt").map_samples(download, on_error="skip")) == []
        assert list(pipe(urls, "txt").decode_by_ext({"txt": download}, on_error="skip")) == []
    assert caplog.text.count("The first error that was skipped: ") == 2
    assert "OSError: https://host/x.jpg?... is not there" in caplog.text
    assert "secret" not in caplog.text


def test_the_warning_of_an_empty_epoch_names_the_first_error_that_was_skipped(urls, caplog):
    """The field that no sample has, or the shard; a pipe and PipeLoader say the same."""
    why = (
        f"this epoch gave nothing: 10 skipped. The first error that was skipped: sample '00000000' of shard {urls[0]} "
        "has no field 'jpeg'; it has: 'cls', 'txt'. See what group_by_key"
    )
    for build in (
        lambda: wp.PipeLoader(pipe(urls, "cls", "txt").to_tuple("jpeg", on_error="skip"), batch_size=2, num_workers=1),
        lambda: wp.PipeLoader(
            pipe(urls, "cls", "txt").interleave_shards(2).select_fields("jpeg", on_error="skip").shuffle_buffer(3),
            lanes=2,
        ),
        lambda: pipe(urls, "cls", "txt").to_tuple("jpeg", on_error="skip").shuffle_buffer(3),
        lambda: pipe(urls, "cls", "txt").to_tuple("jpeg", on_error="skip").as_dataset(),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="wds_pipes"):
            assert list(build()) == []
        assert [line.getMessage().startswith(why) for line in caplog.records].count(True) == 1
    some = wp.PipeLoader(pipe(urls, "cls").to_tuple("jpeg", on_error="skip"), batch_size=2, epoch_end="loop")
    with pytest.raises(wp.ShardError, match="found no sample in .*The first error that was skipped: .*no field 'jpeg'"):
        next(iter(some.with_epoch(batches=1)))


def test_an_error_of_a_missing_field_lists_the_unselected_fields(urls):
    for steps in (lambda pipe: pipe, lambda pipe: pipe.interleave_shards(2), lambda pipe: wp.mix({"a": pipe})):
        with pytest.raises(SampleError, match=r"it has: 'cls'; group_by_key\(fields=...\) left out: 'txt'"):
            list(steps(pipe(urls, "jpeg", "cls")).to_tuple("jpeg", "cls"))


def test_a_misspelt_field_beside_others_is_a_warning(urls):
    with pytest.warns(
        UserWarning,
        match=r"no sample had field 'txxt'. Did you mean 'txt', which group_by_key\(fields=...\) leaves out\?",
    ):
        assert len(list(pipe(urls, "txxt", "cls"))) == 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(pipe(urls, "jpg", "cls", "txt"))) == 10
        assert len(list(pipe(urls, "json", "cls"))) == 10


def test_an_epoch_without_a_shard_names_what_was_skipped(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="wds_pipes"):
        assert list(wp.ShardList(tmp_path / "none.tar").open_shards(on_error="skip").load_tar().group_by_key()) == []
    assert "this epoch gave nothing: 1 skipped shards. The first error that was skipped: shard " in caplog.text


@pytest.mark.parametrize(
    ("counts", "options"),
    [
        ([3, 0, 5, 2], {"lanes": 3, "batch_size": 11}),
        (None, {"batch_size": 11, "epoch_end": "exact", "drop_last": True}),
    ],
)
def test_with_epoch_where_no_lane_has_a_full_batch(counts, options, urls):
    """It would end at once, each time, although len() says 3."""
    loader = wp.PipeLoader(chain(urls, "txt", samples_per_shard=counts), **{"epoch_end": "drop", **options}).with_epoch(
        batches=3
    )
    for _ in range(2):
        with pytest.raises(wp.ShardError, match=r"with_epoch\(\) requests more: no lane has a full batch"):
            list(loader)
