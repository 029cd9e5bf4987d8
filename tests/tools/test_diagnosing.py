"""What ``doctor`` says of pipelines whose bottleneck is known; tests/proofs/doctor.py has more."""

import re
import threading

import plants
import pytest
from pipelines import samples

from wds_pipes import tools
from wds_pipes.testing import make_shards
from wds_pipes.tools import diagnosing

IDLE = {"wait_share": 0.02, "read_share": 0.5, "decode_share": 0.5, "stall_share": 0.0, "samples_per_second": 100.0}


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """A loaded machine may be slow to start workers."""
    monkeypatch.setattr(diagnosing, "_GRACE", 300.0)


def test_shards_alone_are_limited_by_their_reader(tmp_path):
    found = tools.doctor(plants.local(tmp_path, samples=200), seconds=0.2, cores=4)
    assert (found.limit, found.step) == ("reading", "reading")
    assert found.change == "pass num_workers=3 if more is needed"
    assert found.samples_per_second > 0
    second_run = r"A second run with 3 workers had ([\d,]+), .* samples/s of the first one\."
    brings = re.fullmatch(second_run, found.sentences[2])
    rate = int(brings[1].replace(",", ""))
    assert found.gain == pytest.approx(max(1, rate / found.samples_per_second), rel=0.05)
    assert len(found.sentences) == 3
    assert set(found.microseconds) <= {"reading", "storage", "batch_samples()"}


def test_a_change_that_does_not_run_brings_no_number(tmp_path):
    """No worker starts."""
    pipe = plants.pipe_of(plants.local(tmp_path))
    loader = plants.wp.PipeLoader(pipe, batch_size=4, collate="list", worker_init_fn=failing)
    found = tools.doctor(loader, seconds=0.1, cores=4)
    assert (found.change, found.gain) == ("pass num_workers=3 if more is needed", 1)
    assert found.sentences[2].startswith("The pipeline has ")


def test_no_more_workers_than_shards(tmp_path):
    found = tools.doctor(plants.local(tmp_path, shards=2), seconds=0.1, cores=9)
    assert found.change == "pass num_workers=2 if more is needed"


def test_a_training_that_takes_less_is_the_limit(tmp_path):
    found = tools.doctor(plants.local(tmp_path), seconds=0.1, needs=1)
    assert (found.limit, found.gain) == ("training", 1)


def hanging(sample):
    _RELEASED.wait()


def failing(sample):
    raise KeyError("nothing")


_RELEASED = threading.Event()


def test_a_step_that_does_not_return_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(diagnosing, "_GRACE", 0.1)
    monkeypatch.setattr(diagnosing, "_SEARCH", 3.0)
    pipe = samples(make_shards(tmp_path, shards=1, samples=4)).map_samples(hanging)
    loader = plants.wp.PipeLoader(pipe, batch_size=2, collate="list")
    found = tools.doctor(loader, seconds=0.1)
    _RELEASED.set()
    assert (found.limit, found.step) == ("hang", "map_samples(hanging)")
    assert "has not returned for" in found.sentences[0]


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_a_function_names_its_type_and_place(tmp_path, workers):
    pipe = samples(make_shards(tmp_path, shards=1, samples=4)).map_samples(failing)
    loader = plants.wp.PipeLoader(pipe, batch_size=2, num_workers=workers, multiprocessing_context="fork")
    line = failing.__code__.co_firstlineno + 1
    with pytest.raises(
        ValueError, match=rf"KeyError: 'nothing' \({__file__}, line {line}\): raised by the function of"
    ):
        tools.doctor(loader, seconds=0.1)


def test_an_uneven_rank():
    """The one that waits while the others do not, and what its workers spend more time on."""
    slow = {**IDLE, "wait_share": 0.52, "read_share": 0.8, "decode_share": 0.2, "stall_share": 0.7, "rank": 1.0}
    found = tools.doctor(stats=[IDLE, slow, IDLE])
    assert (found.limit, found.step, found.gain) == ("rank", "rank 1", 1)
    assert found.sentences[0] == (
        "The limit is rank 1, which waits for data 52% of its time, and the others 2%; its workers spend 70% of their "
        "time on waiting for bytes of a store, and theirs 0%."
    )


def test_the_stats_of_even_ranks():
    assert tools.doctor(stats=[IDLE] * 3).limit == "training"
    found = tools.doctor(stats=[{**IDLE, "wait_share": 0.5}] * 3)
    assert (found.limit, found.gain) == ("data", 1)


def test_stats_that_name_no_limit_leave_it_to_the_pipeline(tmp_path):
    found = tools.doctor(plants.local(tmp_path), seconds=0.1, stats=[{**IDLE, "wait_share": 0.5}], cores=1)
    assert found.limit == "reading"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "there is nothing to run"),
        ({"what": "a.tar", "seconds": 0}, "seconds must be a positive number"),
        ({"what": "a.tar", "needs": -1}, "needs must be a positive number"),
        ({"what": "a.tar", "cores": 0}, "cores"),
        ({"what": "a.tar", "max_samples": 0}, "max_samples"),
        ({"stats": []}, "the stats are what loader.stats_of_ranks"),
        ({"stats": [{"epoch": 0.0}]}, "the stats are what loader.stats_of_ranks"),
        ({"stats": {"wait_share": 1.0}}, "the stats are what loader.stats_of_ranks"),
        ({"what": "plants:local"}, "local"),
        ({"what": "src/train.py"}, "as train:FUNCTION"),
    ],
)
def test_arguments_that_do_not_fit(options, says):
    with pytest.raises((ValueError, TypeError), match=says):
        tools.doctor(**options)


def test_a_pipeline_that_yields_nothing(tmp_path):
    loader = plants.wp.PipeLoader(plants.pipe_of(plants.local(tmp_path)).filter_samples(plants.none), batch_size=8)
    with pytest.raises(ValueError, match="yields nothing"):
        tools.doctor(loader, seconds=0.1)


def test_branches_of_a_mix_are_measured_apart(tmp_path):
    pipe = plants.wp.mix(
        {
            "slow": plants.pipe_of(plants.local(tmp_path / "a")).map_samples(plants.slow_augmentation),
            "fast": plants.pipe_of(plants.local(tmp_path / "b")),
        }
    )
    found = tools.doctor(plants.wp.PipeLoader(pipe, batch_size=4, collate="list"), seconds=0.2, cores=1)
    assert (found.limit, found.step) == ("function", "map_samples(slow_augmentation)")


def test_a_function_in_threads_waits_for_several_samples(tmp_path):
    """Its time is that of one thread, divided by their number."""
    pipe = plants.pipe_of(plants.local(tmp_path)).map_samples(plants.slow_lookup, threads=4)
    found = tools.doctor(plants.wp.PipeLoader(pipe, batch_size=2, collate="list"), seconds=0.2)
    assert (found.limit, found.step) == ("function", "map_samples(slow_lookup)")
    assert (found.gain, "times" in " ".join(found.sentences)) == (1, False)  # its threads are the caller's to change
    assert found.microseconds["map_samples(slow_lookup)"] > 2_500  # of 5,000; less what others took of the processor
    assert found.change == "let it wait for several samples at a time, with map_samples(threads=32)"


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant", [plants.function, plants.few_workers, plants.uneven_rank], ids=lambda plant: plant.__name__
)
def test_a_bottleneck_is_named(plant, tmp_path):
    found, right = plants.diagnosed(plant, tmp_path, 2)
    assert right, found
