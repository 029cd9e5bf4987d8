"""WdsDataModule as users meet it: from a command line, on their own DataModule, with the older
package, and its error messages.
"""

import contextlib
import copy
import importlib
import json
import multiprocessing
import os
import pickle
import runpy
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from pipelines import flat, samples

import wds_pipes as wp
from wds_pipes.testing import make_shards, same

if not find_spec("lightning"):
    pytest.skip("needs Lightning: pip install 'wds_pipes[lightning]'", allow_module_level=True)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:The '.*_dataloader' does not have many workers",
        "ignore:.*LeafSpec.*:FutureWarning",
        "ignore::DeprecationWarning",
    ),
    pytest.mark.filterwarnings(
        "ignore:GPU available", "ignore:Checkpoint directory", "ignore:The number of training batches"
    ),
    pytest.mark.filterwarnings("ignore:You defined a `.*_step` but have no"),
]
SAMPLES, BATCH = 6, 3


@pytest.fixture(scope="module")
def host():
    """``lightning_models``, imported when the first test runs."""
    return importlib.import_module("lightning_models")


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("train"), shards=4, samples=SAMPLES, fields=("jpg", "cls"))


def keys(batches):
    return [list(batch[-1] if isinstance(batch, (tuple, list)) else batch["__key__"]) for batch in batches]


def check_resumes(host, run, directory, *names):
    """Runs from checkpoints, of batches and of ends of epochs, are trained on the rest of an
    uninterrupted one. Return its batches.
    """
    done = {name: int(name.rpartition("-")[2]) for name in names}
    whole = run(host.Save(directory, *done.values())).batches
    for name in names:
        assert same(keys(run(load=directory / f"{name}.ckpt").batches), keys(whole[done[name] :])), name
    return whole


def test_urls_are_all_it_needs(host, shards, tmp_path):
    """Images are decoded, in tuples of the named fields; validation and tests are the same each
    time; a resume is exact.
    """

    def data():
        return host.WdsDataModule(
            train=shards,
            val=shards[:2],
            test=shards[3],
            batch_size=BATCH,
            fields=["jpg;png", "cls", "__key__"],
            shuffle_buffer=5,
            seed=3,
        )

    model, trainer = host.fit(data(), host.Save(tmp_path, 5), num_sanity_val_steps=1)
    images, labels, _ = model.batches[0]
    assert (images.shape, images.dtype, labels.dtype) == ((BATCH, 3, 8, 8), torch.float32, torch.int64)
    assert len(model.batches) == 16
    assert (
        sorted(flat(keys(model.batches[:8])))
        == [f"{number:08d}" for number in range(24)]
        != flat(keys(model.batches[:8]))
    )
    assert keys(model.batches[:8]) != keys(model.batches[8:])
    assert (
        keys(model.validated[1:5])
        == keys(model.validated[5:])
        == [[f"{3 * batch + place:08d}" for place in range(3)] for batch in range(4)]
    )
    trainer.test(model, data(), verbose=False)
    assert flat(keys(model.tested)) == [f"{number:08d}" for number in range(18, 24)]
    again, _ = host.fit(data(), load=tmp_path / "5.ckpt")
    assert keys(again.batches) == keys(model.batches[5:])


def test_moved_data_resume_exactly(host, shards, tmp_path):
    """A copy needs no option; renamed shards need moved=True on the DataModule."""
    model, _ = host.fit(host.Own(shards), host.Save(tmp_path, 3), max_epochs=1)
    for name in ("shard", "renamed"):
        (tmp_path / name).mkdir()
        copies = [shutil.copy(url, tmp_path / name / f"{name}-{number:06d}.tar") for number, url in enumerate(shards)]
        data = host.Own(copies)
        if name == "renamed":
            with pytest.raises(wp.StateError, match="moved=True"):
                host.fit(host.Own(copies), load=tmp_path / "3.ckpt", max_epochs=1)
            data.moved = True
        again, _ = host.fit(data, load=tmp_path / "3.ckpt", max_epochs=1)
        assert keys(again.batches) == keys(model.batches[3:])


@pytest.mark.parametrize(("reload", "limit"), [(0, 3), (1, 1.0), (2, 3)])
def test_the_mixin(host, shards, tmp_path, reload, limit):
    """With loaders that are built anew every few epochs, epochs that are cut, and a
    second resume.
    """
    options = {"reload_dataloaders_every_n_epochs": reload, "limit_train_batches": limit, "max_epochs": 4}
    model, _ = host.fit(host.Own(shards), host.Save(tmp_path, 2, 3, 8), **options)
    given = keys(model.batches)
    assert len({tuple(batch) for batch in given}) > len(given) - 4
    for number in (2, 3, 8):
        first, _ = host.fit(
            host.Own(shards), host.Save(tmp_path / f"of-{number}", 1), load=tmp_path / f"{number}.ckpt", **options
        )
        assert keys(first.batches) == given[number:]
        second, _ = host.fit(host.Own(shards), load=tmp_path / f"of-{number}" / "1.ckpt", **options)
        assert keys(second.batches) == given[number + 1 :]


@pytest.mark.parametrize("counts", [None, SAMPLES])
def test_the_end_of_an_epoch_with_max_steps(host, shards, tmp_path, counts):
    """From there Lightning continues in the epoch that has ended."""

    def run(*callbacks, **options):
        data = host.WdsDataModule(
            train=shards, val=shards[0], batch_size=BATCH, shuffle_buffer=5, seed=3, samples_per_shard=counts
        )
        return host.fit(
            data, *callbacks, max_epochs=-1, max_steps=20, val_check_interval=3, limit_val_batches=1, **options
        )[0]

    check_resumes(host, run, tmp_path, "5", "8", "end-8", "16", "end-16")


@pytest.mark.parametrize("counts", [None, SAMPLES])
def test_the_optimizer_steps_at_the_same_batches_after_the_last_batch_of_an_epoch(host, shards, tmp_path, counts):
    """A checkpoint of ``on_train_batch_end``; an epoch of 8 batches, of which three make a step."""

    class Counting(host.Model):
        def training_step(self, batch, batch_idx):
            steps.append((self.trainer.current_epoch, batch_idx, self.trainer.global_step))
            return super().training_step(batch, batch_idx)

    def run(*callbacks, load=None):
        data = host.WdsDataModule(train=shards, batch_size=BATCH, shuffle_buffer=5, samples_per_shard=counts)
        host.fit(data, *callbacks, model=Counting(), load=load, accumulate_grad_batches=3)

    steps = []
    run(host.Save(tmp_path, 8))
    whole, steps = steps, []
    run(load=tmp_path / "8.ckpt")
    assert steps == whole[8:] == [(1, number, 3 + number // 3) for number in range(8)]


def check_chain(host, shards, directory, stops, *, counted, data, **options):
    """Runs that end at the stops, each resumed from the one before, and a last one, take together
    the steps of an uninterrupted run: epochs, numbers of batches, optimizer steps and samples.
    """

    def run(stop=None, load=None):
        model, counts = host.Steps(), {"samples_per_shard": SAMPLES} if counted else {}
        pipe = wp.ShardList(shards, shuffle=True, seed=3, **counts).open_shards().load_tar()
        train = pipe.group_by_key(fields=["cls"]).shuffle_buffer(4).decode_by_ext()
        callbacks = () if stop is None else (host.StopAt(*stop),)
        with contextlib.suppress(host.Stopped):
            loaders = host.WdsDataModule(train, samples(shards[:1]), **data)
            host.fit(loaders, *callbacks, model=model, load=load, limit_val_batches=1, **options)
        return model.steps

    whole, done, load = run(), [], None
    for number, (hook, batches) in enumerate(stops):
        path = directory / f"{number}.ckpt"
        path.unlink(missing_ok=True)
        done += run((path, batches, hook), load)
        assert done == whole[: len(done)], f"run {number}"
        load = path if path.exists() else None
        if load is None:  # it came to its end before the stop
            break
    assert load is None or done + run(load=load) == whole
    assert len(done) > 0


ENDS = [("exact", False, None), ("drop", True, None), ("pad", True, None), ("loop", False, 12), (None, False, None)]


@pytest.mark.parametrize(("epoch_end", "counted", "epoch_samples"), ENDS)
def test_two_resumes_in_one_epoch_and_one_across_epochs(host, shards, tmp_path, *, epoch_end, counted, epoch_samples):
    """An epoch has 12 batches, or 6 of "loop"; three make a step of the optimizer."""
    data = {"batch_size": 2, "epoch_end": epoch_end, "epoch_samples": epoch_samples}
    stops = [("batch", 2), ("batch", 1), ("batch", 1), ("batch", 11)]
    check_chain(host, shards, tmp_path, stops, counted=counted, data=data, accumulate_grad_batches=3, max_epochs=3)


STOPS = st.tuples(st.sampled_from(["batch", "batch", "validation", "epoch"]), st.integers(1, 5))


# Not shrunk: an example takes a second.
@settings(
    max_examples=25, deadline=None, phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    end=st.sampled_from(ENDS),
    stops=st.lists(STOPS, min_size=2, max_size=4),
    accumulate=st.integers(1, 3),
    validate=st.sampled_from([1.0, 2, 3]),
    limit=st.sampled_from([1.0, 3]),
    batch_size=st.sampled_from([2, 3]),
    lanes=st.integers(1, 2),
)
def test_any_resumes(host, shards, tmp_path, *, end, stops, accumulate, validate, limit, batch_size, lanes):
    """With any numbers of batches before each save, in any hook."""
    epoch_end, counted, epoch_samples = end
    check_chain(
        host, shards, tmp_path, stops, counted=counted, accumulate_grad_batches=accumulate, limit_train_batches=limit,
        val_check_interval=validate, max_epochs=3,
        data={"batch_size": batch_size, "epoch_end": epoch_end, "epoch_samples": epoch_samples, "lanes": lanes},
    )  # fmt: skip


@pytest.mark.parametrize("where", ["fit", "dict", "module"])
def test_a_loader_that_lightning_saves_itself(host, shards, tmp_path, where):
    """Its checkpoints are not exact, so there is a warning in the first one, which names the way;
    a loader for validation is fine.
    """
    loader, validation = (wp.PipeLoader(samples(shards), batch_size=BATCH) for _ in range(2))

    class Plain(host.pl.LightningDataModule):
        def train_dataloader(self):
            return loader

    data = {"fit": (loader, validation), "dict": ({"a": loader}, validation), "module": (Plain(),)}[where]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    trainer = host.pl.Trainer(max_epochs=1, limit_train_batches=3, callbacks=[host.Save(tmp_path, 1, 2)], **quiet)
    with pytest.warns(UserWarning, match="position of a PipeLoader is not exact: .*ResumableData") as found:
        trainer.fit(host.Model(), *data)
    assert len([each for each in found if "PipeLoader" in str(each.message)]) == 1
    assert trainer.train_dataloader in (loader, {"a": loader})


def test_a_state_that_lightning_saved_on_one_of_several_ranks(host, shards, tmp_path):
    """The error names what saves the states of all."""
    pipe = samples(shards, samples_per_shard=SAMPLES)
    loader, other = (wp.PipeLoader(pipe, batch_size=BATCH, rank=rank, world_size=2) for rank in range(2))
    (leaf,) = host.CombinedLoader(loader).flattened
    with pytest.raises(wp.StateError) as caught:
        leaf.load_state_dict(other.state_dict())
    assert "ResumableData" in caught.value.mend


def test_a_limit_above_an_unknown_length(host, shards, tmp_path):
    """At the last batch of an epoch, Lightning does not know yet that it is the last."""

    def run(*callbacks, **options):
        data = host.WdsDataModule(train=shards, batch_size=BATCH, shuffle_buffer=5, seed=3)
        return host.fit(data, *callbacks, max_epochs=3, limit_train_batches=100, **options)[0]

    assert len(check_resumes(host, run, tmp_path, "7", "8", "end-8", "9")) == 24


@pytest.mark.parametrize("limit", [1.0, 7, 100])
def test_a_loader_without_end(host, shards, tmp_path, limit):
    """epoch_end="loop": the Trainer does not end an epoch where one of the data ends."""

    class Endless(host.Own):
        def train_dataloader(self):
            pipe = wp.ShardList(self.urls, shuffle=True, seed=3).open_shards().load_tar().group_by_key(fields=["cls"])
            return self.resumable(wp.PipeLoader(pipe, batch_size=BATCH, collate="list", epoch_end="loop", lanes=1))

    def run(*callbacks, **options):
        data = Endless(shards)
        return host.fit(data, *callbacks, max_epochs=-1, max_steps=20, limit_train_batches=limit, **options)[0]

    check_resumes(host, run, tmp_path, "5", "8", "9", "16")  # an epoch of the data has 8 batches


@pytest.mark.parametrize(("limit", "sized"), [(None, True), (5, False)])
def test_several_loaders_of_different_lengths(host, shards, tmp_path, limit, sized):
    """Each batch is resumed exactly, twice; the Trainer's epoch ends with the shortest one."""
    of = {"two": shards[:1], "eight": shards, "six": shards[1:]}  # batches

    class Several(host.Own):
        mode = "min_size"

        def train_dataloader(self):
            loaders = {}
            for name, urls in of.items():
                counts = SAMPLES if sized else None
                pipe = wp.ShardList(urls, shuffle=True, seed=3, samples_per_shard=counts).open_shards().load_tar()
                loader = wp.PipeLoader(pipe.group_by_key(fields=["cls"]), batch_size=BATCH, epoch_end="exact")
                loaders[name] = self.resumable(loader, name)
            return host.CombinedLoader(loaders, self.mode)

    def run(*callbacks, **options):
        model, _ = host.fit(Several(None), *callbacks, max_epochs=2, limit_train_batches=limit, **options)
        return [{name: batch and batch["__key__"] for name, batch in of.items()} for of in model.batches]

    epoch = 2
    whole = run(host.Save(tmp_path, *range(2 * epoch)))
    assert len(whole) == 2 * epoch
    assert len({key for of in whole[:epoch] for key in of["two"]}) == 2 * BATCH  # each of its samples
    for number in range(1, 2 * epoch):
        again = tmp_path / f"from-{number}"
        rest = run(host.Save(again, 2), load=tmp_path / f"{number}.ckpt")
        assert same(rest, whole[number:]), number
        if len(rest) > 2:
            assert same(run(load=again / "2.ckpt"), whole[number + 2 :]), number
        if number % epoch == 0:
            assert same(run(load=tmp_path / f"end-{number}.ckpt"), whole[number:]), number
    Several.mode = "max_size_cycle"
    with pytest.raises(ValueError, match="several training loaders end together"):
        run()


@pytest.mark.parametrize("batches", [3, 8, 11])
def test_one_stream_cut_into_epochs(host, shards, tmp_path, batches):
    """with_epoch(): the Trainer's epochs end where it says, and continue in the data from there."""

    def run(*callbacks, **options):
        pipe = (
            wp.ShardList(shards, shuffle=True, seed=3, samples_per_shard=SAMPLES)
            .open_shards()
            .load_tar()
            .group_by_key(fields=["cls"])
            .decode_by_ext()
        )
        data = host.WdsDataModule(train=lambda: wp.PipeLoader(pipe, batch_size=BATCH).with_epoch(batches=batches))
        return host.fit(data, *callbacks, max_epochs=3, **options)[0]

    whole = check_resumes(host, run, tmp_path, "2", f"{batches}", f"end-{batches}", f"{batches + 1}")
    assert len(whole) == 3 * batches
    assert sorted(flat(keys(whole[:8]))) == [f"{number:08d}" for number in range(24)]


@pytest.mark.parametrize("reading", [(None, 0, 1.0), ("loop", 0, 3), ("loop", 2, 1.0)])
def test_epochs_of_so_many_samples(host, shards, tmp_path, reading):
    """epoch_samples= with steps that drop samples, without counts: full batches over the ends of
    epochs of the data, also where the Trainer stops earlier, and a resume at any step is exact.
    """
    end, workers, limit = reading

    def run(*callbacks, **options):
        def pipe():
            samples = wp.ShardList(shards, shuffle=True, seed=3).open_shards().load_tar().group_by_key(fields=["cls"])
            return samples.shuffle_buffer(4).filter_samples(is_wanted)

        data = host.WdsDataModule(
            train=pipe,
            batch_size=BATCH,
            num_workers=workers,
            lanes=2,
            epoch_end=end,
            epoch_samples=15,
            multiprocessing_context="fork" if workers else None,
        )
        model, trainer = host.fit(data, *callbacks, max_epochs=4, limit_train_batches=limit, **options)
        assert trainer.current_epoch == 4
        return model

    each = 5 if limit == 1.0 else limit
    given = keys(check_resumes(host, run, tmp_path, "2", f"{each}", f"end-{each}", f"{each + 1}"))
    assert [len(batch) for batch in given] == [BATCH] * 4 * each
    assert len(set(flat(given[:6]))) == 18  # the 18 samples that are wanted, before any comes again


def is_wanted(sample):
    return int(sample["__key__"]) % 4 != 1


def test_counted_samples_are_dropped_at_the_end_of_an_epoch(host, shards):
    """epoch_samples= with known counts: epoch_end None is "drop", as without it."""
    data = host.WdsDataModule(
        train=shards, batch_size=BATCH, samples_per_shard=SAMPLES, epoch_samples=9, shuffle_buffer=0
    )
    model, trainer = host.fit(data, max_epochs=3)
    assert trainer.num_training_batches == 3
    assert len(set(flat(keys(model.batches[:8])))) == 24


def test_a_checkpoint_that_is_loaded_late(host, shards, tmp_path):
    """Lightning has already fetched a batch of the new run."""
    model, _ = host.fit(host.Own(shards), host.Save(tmp_path, 3))
    again, _ = host.fit(
        host.Own(shards),
        model=host.Estimating(),
        load=tmp_path / "3.ckpt",
        strategy=host.Late(device=torch.device("cpu")),
    )
    assert keys(again.batches) == keys(model.batches[3:])


@pytest.mark.filterwarnings(
    "ignore:Found `dataloader_iter` argument", "ignore:You are using the `dataloader_iter` step flavor"
)
def test_a_step_that_takes_the_iterator(host, shards, tmp_path):
    """training_step(dataloader_iter) fetches batches itself: all that it took are counted."""

    class Taking(host.Model):
        def training_step(self, dataloader_iter):
            for _ in range(2):
                self.batches.append(next(dataloader_iter)[0])
            return self.layer(torch.ones(1)).sum()

    model, _ = host.fit(host.Own(shards), host.Save(tmp_path, 4), model=Taking(), max_epochs=1)
    again, _ = host.fit(host.Own(shards), model=Taking(), load=tmp_path / "4.ckpt", max_epochs=1)
    assert keys(again.batches) == keys(model.batches[4:])


def test_evaluating_a_checkpoint_leaves_the_training_data_alone(host, shards, tmp_path):
    data = host.WdsDataModule(train=shards, val=shards[0], test=shards[0], batch_size=BATCH, seed=3)
    model, trainer = host.fit(data, host.Save(tmp_path, 3), max_epochs=1)
    trainer.test(model, data, ckpt_path=tmp_path / "3.ckpt", verbose=False)
    again, _ = host.fit(data, max_epochs=1)
    assert sorted(flat(keys(again.batches))) == sorted(flat(keys(model.batches)))
    assert keys(again.batches) != keys(model.batches)


def test_the_checkpoint_is_plain_and_small(host, shards, tmp_path):
    """It is read with weights_only=True, and is JSON; another DataModule has no state in it."""

    class Other(host.Own):
        pass

    host.fit(host.Own(shards), host.Save(tmp_path, 3))
    state = torch.load(tmp_path / "3.ckpt", weights_only=True)["Own"]
    assert len(json.dumps(state)) < 2000
    assert state["wds_pipes"]["train"]["ranks"]["counts"]["delivered"] == 3 * BATCH
    with pytest.warns(UserWarning, match="3.ckpt has no state of this DataModule .* start from the beginning"):
        host.fit(Other(shards), load=tmp_path / "3.ckpt")


def test_stats_and_the_slowest_rank_are_logged(host, shards, tmp_path, caplog):
    caplog.set_level("INFO", logger="wds_pipes")
    logger, stats = host.pl.loggers.CSVLogger(tmp_path), host.StatsCallback(every_n_steps=4, all_ranks=True)
    host.fit(host.Own(shards), stats, logger=logger, max_epochs=1, log_every_n_steps=1)
    lines = Path(logger.log_dir, "metrics.csv").read_text().splitlines()
    values = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    assert [value["step"] for value in values] == ["4", "8"]
    assert float(values[-1]["data/samples"]) == 24
    assert float(values[0]["data/samples_per_second"]) > 0
    said = [record.getMessage() for record in caplog.records if "The limit is" in record.getMessage()]
    assert [line.partition(": The limit is")[0] for line in said] == ["train, step 4", "train, step 8"]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_without_validation(host, shards, copied):
    """As Lightning makes it for ranks that it spawns."""
    data = copied(host.WdsDataModule(train=shards, batch_size=BATCH))
    assert host.fit(data, max_epochs=1) is not None


def test_validation_begins_anew_where_the_loader_was_cut(host, shards):
    data = host.WdsDataModule(val=lambda: wp.PipeLoader(samples(shards), batch_size=2).with_epoch(batches=2))
    loader = data.val_dataloader()
    assert len({str([batch["__key__"] for batch in loader]) for _ in range(3)}) == 1


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda host: host.WdsDataModule(train="x.tar"), ValueError, "train is given by URLs, so batch_size"),
        (
            lambda host: host.WdsDataModule(train=3, batch_size=2).train_dataloader(),
            TypeError,
            "train must be URLs, a pipe or a function",
        ),
        (
            lambda host: host.WdsDataModule(train=lambda: 3, batch_size=2).train_dataloader(),
            TypeError,
            "PipeLoader takes a pipe, not int",
        ),
        (
            lambda host: host.WdsDataModule(train=["x.tar"], batch_size=2, epoch_end="loop").train_dataloader(),
            ValueError,
            "pass epoch_samples=, how many samples of all devices together",
        ),
        (
            lambda host: host.WdsDataModule(train=["x.tar"], batch_size=2, epoch_samples=7).train_dataloader(),
            ValueError,
            "samples=7 cannot be divided by 1 ranks x 2 samples",
        ),
        (
            lambda host: host.WdsDataModule(train=lambda: 3, transform=len),
            ValueError,
            "transform= applies to URLs, and train is given by a pipe or a function: do it there",
        ),
        (
            lambda host: host.WdsDataModule(["x.tar"], lambda: 3, batch_size=2, eval_transform=len),
            ValueError,
            "eval_transform= applies to URLs, and val is given by a pipe or a function",
        ),
        (
            lambda host: host.WdsDataModule(lambda: 3, size=4),
            ValueError,
            "size= applies to URLs, and train is given by",
        ),
        (lambda host: host.WdsDataModule(lambda: 3, cache_bytes="1GB"), ValueError, "pass cache=, its directory, too"),
        (lambda host: host.StatsCallback(every_n_steps=0), ValueError, "at least 1"),
        (lambda host: host.Own([]).resumable([1]), TypeError, "takes a PipeLoader, not list"),
        (
            lambda host: type("Wrong", (host.pl.LightningDataModule, host.ResumableData), {}),
            TypeError,
            "Wrong must name ResumableData before LightningDataModule",
        ),
    ],
)
def test_wrong_arguments(host, build, error, message):
    with pytest.raises(error, match=message):
        build(host)


def test_without_a_trainer(host, shards):
    """Its loaders can be iterated, and the batches that they returned count."""
    data = host.Own(shards)
    batches = iter(data.train_dataloader())
    given = [next(batches) for _ in range(3)]
    again = host.Own(shards)
    again.load_state_dict(data.state_dict())
    assert keys(given) + keys(again.train_dataloader()) == keys(host.Own(shards).train_dataloader())


MODULE = """
import PACKAGE
import torch
import wds_pipes as wp

class Model(PACKAGE.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        with open("keys.txt", "a") as file:
            print(*batch[-1], file=file)
        return self.layer(torch.ones(1)).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def augment(sample, rng):
    sample["__key__"] += str(rng.choice(["+", "-"]))
    return sample

def pipe():
    base = wp.ShardList("train/*.tar", shuffle=True, seed=3).open_shards().load_tar().group_by_key()
    return base.shuffle_buffer(5).decode_by_ext("rgb8").to_tuple("jpg", "__key__")
"""
MAIN = """
import json
import os
import sys
import warnings
warnings.filterwarnings("ignore")
from PACKAGE.cli import LightningCLI
from mine import Model
from wds_pipes.lightning import WdsDataModule
assert WdsDataModule.__mro__[2].__module__.startswith("PACKAGE.")
for number, arguments in enumerate(json.loads(sys.argv[1])):
    LightningCLI(Model, WdsDataModule, save_config_callback=None, args=["fit", "--config", "config.yaml", *arguments])
    os.rename("keys.txt", f"keys-{number}.txt")
"""
CONFIG = """
trainer:
  {accelerator: cpu, devices: 1, max_epochs: 1, logger: false, enable_progress_bar: false, enable_model_summary: false, log_every_n_steps: 1, callbacks: [
    {class_path: wds_pipes.lightning.StatsCallback, init_args: {every_n_steps: 2}},
    {class_path: PACKAGE.callbacks.ModelCheckpoint, init_args: {
      dirpath: saved, every_n_train_steps: 3, save_last: true, save_top_k: -1, enable_version_counter: false, filename: "{step}"}}]}
"""  # noqa: E501


def run_main(directory, package, argument):
    """``python main.py argument`` in a fork of this process, which has imported what takes seconds,
    but as if the other package were not there.
    """
    with open(directory / "errors.txt", "w") as errors:
        os.dup2(errors.fileno(), 1)
        os.dup2(errors.fileno(), 2)
    for name in list(sys.modules):
        if name.startswith(("lightning_models", "wds_pipes.lightning")) or (
            package == "pytorch_lightning" and name.partition(".")[0] == "lightning"
        ):
            del sys.modules[name]
    os.chdir(directory)
    sys.path.insert(0, str(directory))
    sys.argv[:] = ["main.py", argument]
    runpy.run_path("main.py", run_name="__main__")


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_cli(host, package, s3, tmp_path):
    """URLs in a user's own store, with a cache and an augmentation; a function from the
    configuration, and a resume; with both packages.
    """
    pytest.importorskip("jsonargparse")
    pytest.importorskip(package)
    shards = make_shards(tmp_path / "train", shards=4, samples=SAMPLES, fields=("jpg", "cls"))
    stored = [s3.put(os.path.basename(path), Path(path).read_bytes()) for path in shards]
    for name, content in (("mine.py", MODULE), ("main.py", MAIN), ("config.yaml", CONFIG)):
        (tmp_path / name).write_text(content.replace("PACKAGE", package))

    store = [f"--data.storage_options={json.dumps(s3.storage_options)}", "--data.cache=kept", "--data.cache_bytes=1GB"]
    functions = ["--data.transform=mine.augment", "--data.eval_transform=mine.augment"]
    urls = [
        f"--data.train={stored}",
        f"--data.val={stored[1]}",
        "--data.fields=[jpg, cls, __key__]",
        "--data.size=[4, 6]",
        "--data.num_workers=1",
        *store,
        *functions,
    ]
    function = ["--data.train=mine.pipe"]
    # A checkpoint of the second run, and one of the run that was resumed from there.
    runs = [urls, function, [*function, "--ckpt_path=saved/step=3.ckpt"], [*function, "--ckpt_path=saved/step=6.ckpt"]]
    arguments = json.dumps([[f"--data.batch_size={BATCH}", *run] for run in runs])
    process = multiprocessing.get_context("fork").Process(target=run_main, args=(tmp_path, package, arguments))
    process.start()
    process.join(300)
    process.kill()
    assert process.exitcode == 0, (tmp_path / "errors.txt").read_text()[-3000:]
    first, whole, second, third = ((tmp_path / f"keys-{number}.txt").read_text().splitlines() for number in range(4))
    assert len(first) == len(whole) == 8
    assert {key[-1] for line in first for key in line.split()} == {"+", "-"}
    assert list((tmp_path / "kept").iterdir())
    assert (second, third) == (whole[3:], whole[6:])
