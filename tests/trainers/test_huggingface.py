"""PipeTrainer with the Trainer of transformers: killed and resumed, and evaluation; and what its
own Trainer does with our loaders and datasets.
"""

import itertools
import json
import multiprocessing
import os
import signal
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

import wds_pipes as wp
from wds_pipes.testing import make_shards

if not (find_spec("transformers") and find_spec("accelerate")):
    pytest.skip("needs transformers: pip install 'wds_pipes[transformers]'", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:OMP_NUM_THREADS")]
QUIET = {
    "report_to": [],
    "disable_tqdm": True,
    "use_cpu": True,
    "dataloader_pin_memory": False,
    "logging_strategy": "no",
}


@pytest.fixture(scope="module")
def hf():
    """What the tests need of transformers, which takes seconds to import."""
    from transformers import Trainer, TrainingArguments

    from wds_pipes.huggingface import PipeTrainer, newest_checkpoint

    names = {"Trainer": Trainer, "PipeTrainer": PipeTrainer, "newest": newest_checkpoint}
    return SimpleNamespace(Arguments=TrainingArguments, **names)


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("shards"), shards=12, samples=4, fields=("cls",))


def numbered(sample):
    return {**sample, "labels": int(sample["__key__"])}


def loader_of(urls, *, counted=False, **options):
    """36 of 48 samples, of which the number is not known, or all."""
    counts = {"samples_per_shard": 4} if counted else {}
    pipe = wp.ShardList(urls, shuffle=True, seed=3, **counts).open_shards().load_tar().group_by_key()
    if not counted:
        pipe = pipe.filter_samples(lambda sample: int(sample["__key__"]) % 4)
    return wp.PipeLoader(pipe.shuffle_buffer(5).decode_by_ext().map_samples(numbered), batch_size=4, **options)


class Model(torch.nn.Module):
    """Notes what it is trained on."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(self.layer.weight)
        torch.nn.init.zeros_(self.layer.bias)

    def forward(self, cls, labels):
        found = self.layer(cls.float()[:, None])[:, 0]
        if self.training:
            self.note(labels.tolist())
        return {"loss": ((found - labels) ** 2).mean(), "logits": found}

    def note(self, labels):
        pass


def train(hf, loader, out, notes, dies=0, *, accumulate=1, steps=20):
    """Train to the end, or until it is killed; notes the optimizer's steps and the samples."""

    class Noting(Model):
        count = 0

        def note(self, labels):
            self.count += 1
            with open(notes, "a") as file:
                file.write(json.dumps([trainer.state.global_step, labels]) + "\n")
            if self.count == dies:
                os.kill(os.getpid(), signal.SIGKILL)

    limits = {"max_steps": steps, "gradient_accumulation_steps": accumulate, "learning_rate": 0.0}
    arguments = hf.Arguments(str(out), save_steps=3, save_total_limit=1, **limits, **QUIET)
    trainer = hf.PipeTrainer(Noting(), arguments, train_dataset=loader)
    trainer.train(hf.newest(out))
    assert trainer.state.global_step == steps


def noted(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_rest(whole, runs, saved_every=3):
    """Each run goes on from the last checkpoint of the run before, in the steps of a whole one."""
    begin = 0
    for number, run in enumerate(runs):
        first = next(place for place, (step, _) in enumerate(whole) if step == begin)
        assert run == whole[first : first + len(run)], f"run {number}"
        begin = run[-1][0] // saved_every * saved_every
    assert runs[-1][-1] == whole[-1]


def in_process(target, *args, dies=0, **options):
    process = multiprocessing.get_context("fork").Process(target=target, args=args, kwargs={**options, "dies": dies})
    process.start()
    process.join(200)
    process.kill()
    assert process.exitcode == (-signal.SIGKILL if dies else 0)


@pytest.mark.parametrize(
    ("end", "accumulate"),
    [
        ({"epoch_end": "loop"}, 1),
        ({"epoch_end": "loop"}, 3),
        ({"epoch_end": "exact"}, 1),
        ({"epoch_end": "drop", "counted": True}, 1),
        ({"epoch_end": "drop", "counted": True}, 5),  # in an epoch of 12 batches, the last step has two
        ({"epoch_end": "pad", "counted": True}, 2),
    ],
)
def test_killed_three_times(hf, urls, tmp_path, end, accumulate):
    """By SIGKILL, twice in the first epoch, and in a later one. It takes the samples, and the
    optimizer its steps, where an uninterrupted run does.
    """
    run = {"accumulate": accumulate}
    in_process(train, hf, loader_of(urls, **end), tmp_path / "whole", tmp_path / "0", **run)
    whole = noted(tmp_path / "0")
    batches = itertools.chain.from_iterable(itertools.repeat(loader_of(urls, **end)))
    assert [labels for _, labels in whole] == [batch["labels"].tolist() for batch, _ in zip(batches, whole)]
    for number, dies in enumerate((4 * accumulate, 4 * accumulate, 9 * accumulate, 0), 1):
        in_process(train, hf, loader_of(urls, **end), tmp_path / "out", tmp_path / str(number), dies=dies, **run)
    check_rest(whole, [noted(tmp_path / str(number)) for number in range(1, 5)])


def as_rank(function, hf, urls, directory, *, rank, attempt, dies):
    """One of two ranks, in a gloo group."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # a test may have used it before the fork
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}  # not used
    place = f"file://{directory}/group-{attempt}"
    torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    function(hf, urls, directory, rank=rank, attempt=attempt, dies=dies)


def on_two_ranks(function, hf, urls, directory, *, attempt, dies=(0, 0)):
    """Run both ranks; if one is killed, the other one ends by itself, or is killed too."""
    fork = multiprocessing.get_context("fork")
    ranks = [
        fork.Process(
            target=as_rank,
            args=(function, hf, urls, directory),
            kwargs={"rank": rank, "attempt": attempt, "dies": dies[rank]},
        )
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in [process for process, chance in zip(ranks, dies) if chance] or ranks:
        process.join(200)
    for process in ranks:
        process.kill()
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0] if not any(dies) else any(dies)


def train_rank(hf, urls, directory, *, rank, attempt, dies):
    out = directory / ("out" if attempt else "whole")
    train(hf, loader_of(urls, epoch_end="drop", counted=True), out, directory / f"{attempt}-{rank}", dies, accumulate=4)


def test_two_ranks_killed_twice(hf, urls, tmp_path):
    """One of them, two steps and one step after a checkpoint, and in the second epoch, of 6 batches
    on each rank, of which the last two make a step.
    """
    for attempt, dies in enumerate([(0, 0), (0, 18), (17, 0), (0, 0)]):
        on_two_ranks(train_rank, hf, urls, tmp_path, attempt=attempt, dies=dies)
    wholes = [noted(tmp_path / f"0-{rank}") for rank in range(2)]
    epoch = [number for whole in wholes for _, labels in whole[:6] for number in labels]
    assert sorted(epoch) == list(range(48))
    for rank, whole in enumerate(wholes):
        runs = [noted(tmp_path / f"{attempt}-{rank}") for attempt in range(1, 4)]
        steps = [run[0][0] for run in runs]
        assert steps == sorted(steps)
        assert steps[0] == 0 < steps[1] < steps[2]
        for run in runs:
            first = next(place for place, (step, _) in enumerate(whole) if step == run[0][0])
            assert run == whole[first : first + len(run)]
        assert runs[-1][-1] == whole[-1]


def train_with_pads(hf, urls, directory, *, rank, attempt, dies):
    loader = loader_of(urls, epoch_end="pad", counted=True)
    train(hf, loader, directory / "out", directory / f"{attempt}-{rank}", dies, steps=14)


def test_on_another_number_of_ranks(hf, urls, tmp_path):
    """One rank, killed after a checkpoint of 3 of 12 batches; then two, which take the other 9 of
    this epoch, and then the next epoch from its beginning, though their Trainer counts 6 batches.
    """
    alone = loader_of(urls, epoch_end="pad", counted=True)
    in_process(train, hf, alone, tmp_path / "out", tmp_path / "0", dies=5, steps=14)
    on_two_ranks(train_with_pads, hf, urls, tmp_path, attempt=1)
    ranks = [[labels for _, labels in noted(tmp_path / f"1-{rank}")] for rank in range(2)]
    first = [number for _, labels in noted(tmp_path / "0")[:3] for number in labels]
    first += [number for batches in ranks for labels in batches[:5] for number in labels]
    assert set(first) == set(range(48))
    assert len(first) == 48 + 4  # those that fill up the last batch
    assert sorted(number for batches in ranks for labels in batches[5:11] for number in labels) == list(range(48))


@pytest.mark.parametrize("batches", [None, 7])
def test_an_epoch_that_ends_early_loses_nothing(hf, urls, tmp_path, batches):
    """Its first one is ended after 5 steps, and the next one goes on there; also where with_epoch()
    makes the epochs.
    """
    from transformers import TrainerCallback

    def loader():
        return loader_of(urls) if batches is None else loader_of(urls, epoch_end="loop").with_epoch(batches=batches)

    class EndEpoch(TrainerCallback):
        def on_step_end(self, args, state, control, **rest):
            control.should_epoch_stop = state.global_step == 5

    model, seen = Model(), []
    model.note = seen.append
    arguments = hf.Arguments(str(tmp_path), max_steps=12, save_strategy="no", **QUIET)
    hf.PipeTrainer(model, arguments, train_dataset=loader(), callbacks=[EndEpoch()]).train()
    whole = itertools.chain.from_iterable(itertools.repeat(loader()))
    assert len(seen) >= 7
    assert seen == [batch["labels"].tolist() for batch, _ in zip(whole, seen)]


def evaluate(hf, urls, directory, *, rank, attempt, dies=0):
    def metrics(found):
        return {"labels": sorted(found.label_ids.tolist()), "sum": float(found.predictions.sum())}

    def loader():  # 12 samples
        pipe = wp.ShardList(urls[:3], samples_per_shard=[4, 4, 4]).open_shards().load_tar().group_by_key()
        samples = pipe.decode_by_ext().map_samples(numbered)
        return wp.PipeLoader(samples, batch_size=5, epoch_end=None if rank is None else "pad")

    arguments = hf.Arguments(str(directory / "o"), per_device_eval_batch_size=3, **QUIET)  # another size
    trainer = hf.PipeTrainer(Model(), arguments, eval_dataset={"a": loader(), "b": loader()}, compute_metrics=metrics)
    found = [trainer.evaluate(), trainer.evaluate()]
    kept = ("loss", "labels", "sum")
    result = [[each[f"eval_{name}_{what}"] for what in kept] for each in found for name in "ab"]
    result.append(len(trainer.predict(loader()).label_ids))
    (directory / f"eval-{rank}.json").write_text(json.dumps(result))


def test_evaluation_leaves_out_repeated_samples(hf, urls, tmp_path):
    """On two ranks it yields what one rank yields, each time, though 12 samples are no full
    batches of 5, and the loss is the mean over samples.
    """
    in_process(evaluate, hf, urls, tmp_path, rank=None, attempt=0)
    on_two_ranks(evaluate, hf, urls, tmp_path, attempt=1)
    alone, *ranks = (json.loads((tmp_path / f"eval-{rank}.json").read_text()) for rank in (None, 0, 1))
    classes = [
        int(sample["cls"]) for sample in wp.ShardList(urls[:3]).open_shards().load_tar().group_by_key().decode_by_ext()
    ]
    loss = sum((found - label) ** 2 for label, found in enumerate(classes)) / 12
    assert alone == [*[[pytest.approx(loss), list(range(12)), sum(classes)]] * 4, 12]
    for rank in ranks:
        assert rank == [*[[pytest.approx(loss), list(range(12)), sum(classes)]] * 4, 12]


@pytest.mark.filterwarnings("ignore:Was asked to gather")
def test_evaluation_of_a_model_that_also_returns_a_number(hf, urls, tmp_path):
    """As models with experts do, for each batch."""

    class WithNumber(Model):
        def forward(self, cls, labels):
            return {**super().forward(cls, labels), "aux_loss": cls.sum()}

    arguments = hf.Arguments(str(tmp_path), **QUIET)
    trainer = hf.PipeTrainer(WithNumber(), arguments, compute_metrics=lambda found: {})
    logits, numbers = trainer.predict(loader_of(urls[:3], counted=True, epoch_end="pad")).predictions
    assert len(logits) == 12
    assert sum(numbers) == sum(logits)


def test_killed_while_a_checkpoint_of_another_run_is_replaced(hf, urls, tmp_path, monkeypatch):
    """It is no checkpoint from then on: its model and its data would not belong together."""
    trainers = [
        hf.PipeTrainer(
            Model(),
            hf.Arguments(str(tmp_path), max_steps=6, save_steps=3, **QUIET),
            train_dataset=loader_of(urls, epoch_end="loop"),
        )
        for _ in range(2)
    ]
    trainers[0].train()
    assert hf.newest(tmp_path).endswith("checkpoint-6")
    monkeypatch.setattr(trainers[1].accelerator, "wait_for_everyone", lambda: 1 / 0)  # after the data are saved
    with pytest.raises(ZeroDivisionError):
        trainers[1].train(f"{tmp_path}/checkpoint-3")
    assert hf.newest(tmp_path).endswith("checkpoint-3")


def test_what_does_not_fit(hf, urls, tmp_path):
    arguments = hf.Arguments(str(tmp_path), max_steps=3, **QUIET)
    metrics = hf.Arguments(str(tmp_path), batch_eval_metrics=True, **QUIET)
    loader = loader_of(urls)
    uneven, endless = (loader_of(urls, rank=0, world_size=2, epoch_end=end) for end in ("exact", "loop"))
    trainer = hf.PipeTrainer(Model(), arguments, train_dataset=loader)
    (tmp_path / "data" / "checkpoint-3").mkdir(parents=True)
    assert hf.newest(tmp_path / "data") is None
    assert hf.newest(tmp_path / "missing") is None
    (tmp_path / "data" / "checkpoint-3" / "trainer_state.json").write_text("{}")
    for make, error, message in (
        (lambda: hf.PipeTrainer(Model(), arguments, train_dataset=[1]), TypeError, "pass PipeLoaders to PipeTrainer"),
        (
            lambda: hf.PipeTrainer(Model(), arguments, train_dataset=loader, eval_dataset={"val": loader}),
            ValueError,
            "a PipeLoader of its own",
        ),
        (lambda: hf.PipeTrainer(Model(), metrics), ValueError, "batch_eval_metrics=False"),
        (lambda: trainer.get_eval_dataloader(endless), ValueError, "epoch_end='pad'"),
        (lambda: hf.PipeTrainer(Model(), arguments, train_dataset=uneven).train(), ValueError, "epoch_end='loop'"),
        (lambda: trainer.train(resume_from_checkpoint=True), ValueError, "no complete checkpoint"),
        (
            lambda: trainer.train(resume_from_checkpoint=hf.newest(tmp_path / "data")),
            wp.StateError,
            "no position of the data",
        ),
    ):
        with pytest.raises(error, match=message):
            make()


@pytest.mark.parametrize("counted", [False, True])
def test_a_loader_as_the_dataset_of_their_trainer(hf, urls, tmp_path, counted):
    """It is refused at the first step, and the message names the way."""
    loader = loader_of(urls, counted=counted)
    trainer = hf.Trainer(Model(), hf.Arguments(str(tmp_path), max_steps=1, **QUIET), train_dataset=loader)
    with pytest.raises(TypeError, match="is no dataset of a DataLoader") as caught:
        trainer.train()
    assert "PipeTrainer" in caught.value.mend


@pytest.mark.parametrize("counted", [False, True])
def test_as_dataset_under_their_trainer(hf, urls, tmp_path, recwarn, counted):
    """It is warned of once, unless the length is known, where the Trainer resumes exactly."""
    counts = {"samples_per_shard": 4} if counted else {}
    pipe = wp.ShardList(urls, **counts).open_shards().load_tar().group_by_key().decode_by_ext().map_samples(numbered)
    arguments = hf.Arguments(str(tmp_path), max_steps=8, save_strategy="no", **QUIET)
    hf.Trainer(Model(), arguments, train_dataset=pipe.select_fields("cls", "labels").as_dataset()).train()
    found = [str(each.message) for each in recwarn if "PipeTrainer" in str(each.message)]
    assert len(found) == (0 if counted else 1)


def test_a_pipe_under_their_trainer(hf, urls, tmp_path):
    pipe = wp.ShardList(urls).open_shards().load_tar().group_by_key().decode_by_ext().map_samples(numbered)
    arguments = hf.Arguments(str(tmp_path), max_steps=1, save_strategy="no", **QUIET)
    trainer = hf.Trainer(Model(), arguments, train_dataset=pipe.select_fields("cls", "labels"))
    with pytest.warns(UserWarning, match="PipeTrainer"):
        trainer.train()
