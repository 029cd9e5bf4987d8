"""The recipes of the tutorial for other trainers, which are shown as text: each is stopped, or
killed between two of its steps, and goes on twice. TorchTitan's runs with the library if it is
there, the others with the part of its protocol that the recipe uses.
"""

import contextlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

import pytest
import torch
from documents import ROOT
from your_trainer import class_of, function_of, shown_under

import wds_pipes as wp
from wds_pipes import checkpoint
from wds_pipes.tar import index_shards
from wds_pipes.testing import make_shards

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return make_shards(tmp_path_factory.mktemp("shards"), shards=12, samples=4, fields=("cls",))


def tokens_of(sample):
    return torch.arange(5) + 10 * int(sample["__key__"])


def make_pipe(urls, *rest):
    samples = wp.ShardList(urls, shuffle=True, seed=3).open_shards().load_tar().group_by_key()
    return samples.shuffle_buffer(5).map_samples(tokens_of)


def make_loader(urls, **options):
    return wp.PipeLoader(make_pipe(urls), batch_size=2, epoch_end="loop", **options)


def numbers(batch):
    return batch[:, 0].tolist()


def expected(urls, count, **options):
    return [numbers(batch) for batch in itertools.islice(make_loader(urls, **options), count)]


def module(monkeypatch, name, **names):
    """Put a module with these names there, and those that it is in."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), made := ModuleType(parts[end - 1]))
        if end > 1:
            setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], made)
    vars(made).update(names)


class BaseDataLoader:
    """As of TorchTitan 0.3: its Config builds the class that it is in."""

    @dataclass(kw_only=True, slots=True)
    class Config:
        dataset: str = ""
        dataset_path: str | None = None


def test_torchtitan(urls, tmp_path, monkeypatch):
    """Ten steps against five, save, load and five; and once more."""
    import torch.distributed.checkpoint as dcp  # not when tests are collected: it takes a second

    if find_spec("torchtitan") is None:
        module(monkeypatch, "torchtitan.components.dataloader", BaseDataLoader=BaseDataLoader)
    kind = shown_under("TorchTitan", {"make_pipe": make_pipe})["PipeDataLoader"]

    def build():
        config = kind.Config(dataset_path=urls)
        return kind(
            config, dp_rank=0, dp_world_size=1, local_batch_size=2, seq_len=4, tokenizer=None, snapshot_every_n_steps=1
        )

    given = []
    for run in range(3):
        dataloader = build()
        if run:
            dcp.load({"dataloader": dataloader}, checkpoint_id=tmp_path / str(run))
        for inputs, labels in itertools.islice(iter(dataloader), 5):
            assert torch.equal(inputs["input"][:, 1:], labels[:, :-1])
            given.append(numbers(inputs["input"]))
        dcp.save({"dataloader": dataloader}, checkpoint_id=tmp_path / str(run + 1))
    assert given == expected(urls, 15)


def test_megatron(urls, tmp_path):
    """Its files are written by a copy of its lines; two ranks, then two, then three of them."""
    provider = shown_under("Megatron-LM and Megatron-Bridge", {"make_pipe": lambda: make_pipe(urls)})[
        "train_valid_test_datasets_provider"
    ]

    def run(ranks, begin, end):
        found = []
        for rank in range(ranks):
            mpu = SimpleNamespace(get_data_parallel_rank=lambda: rank, get_data_parallel_world_size=lambda: ranks)  # noqa: B023
            args = SimpleNamespace(micro_batch_size=2, num_workers=0, dataloader_save=str(tmp_path), iteration=begin)
            iterable, *_ = provider(mpu, args)
            found.append([numbers(batch) for batch in itertools.islice(iterable, end - begin)])
            folder = tmp_path / f"iter_{end:07d}" / "mp_rank_00"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(
                {"dataloader_state_dict": iterable.save_state()}, folder / f"train_dataloader_dprank{rank:03d}.pt"
            )
        return found

    first, second, third = run(2, 0, 2), run(2, 2, 3), run(3, 3, 5)
    for rank in range(2):
        assert first[rank] + second[rank] == expected(urls, 3, rank=rank, world_size=2)
    given = [number for rank in (*first, *second, *third) for batch in rank for number in batch]
    assert len(given) == len({*given}) == 24  # of the first epoch, which has 48


class Manager:
    """What torchft's Manager does for the recipe, with all replicas in this process: an allreduce
    of those that take part, by the mean.
    """

    def __init__(self):
        self.parts = []

    def allreduce(self, tensor):
        self.parts.append(tensor)
        return SimpleNamespace(wait=lambda: None)

    def reduce(self, live):
        mean = sum(part.clone() for part in self.parts) / len(live)
        for part in self.parts:
            part.copy_(mean)
        self.parts.clear()


@pytest.mark.parametrize("seed", range(3))
def test_torchft(seed, urls, tmp_path):
    """Three replicas, of which some are killed before a commit, or between a commit and their save,
    or do not commit; they come back some steps later, with the others' state. Each trains its own
    batches, each once.
    """
    kind = shown_under("torchft", {})["ReplicaData"]
    rng, manager = random.Random(seed), Manager()

    def start(number):
        return kind(make_loader(urls, rank=number, world_size=3), str(tmp_path / f"{number}.json"))

    live, trained = {number: start(number) for number in range(3)}, {number: [] for number in range(3)}
    for _ in range(16):
        for number in sorted({0, 1, 2} - live.keys()):
            if rng.random() < 0.5:
                back = start(number)
                back.load_state_dict(next(iter(live.values())).state_dict())
                live[number] = back
        batches = {number: data.next() for number, data in live.items()}
        if len(live) > 1 and rng.random() < 0.2:  # killed before the others reduce
            lost = rng.choice(sorted(live))
            del live[lost], batches[lost]
        for data in live.values():
            data.took_part(manager)
        manager.reduce(live)
        if rng.random() < 0.2:
            continue  # should_commit() is false on all
        for number, batch in batches.items():
            trained[number].append(numbers(batch))
        late = rng.choice(sorted(live)) if len(live) > 1 and rng.random() < 0.3 else None
        for number in sorted(live):
            if number != late:
                live[number].committed()
        live.pop(late, None)  # killed after the commit, before its save
    assert sum(map(len, trained.values())) > 10
    for number, batches in trained.items():
        assert batches == expected(urls, len(batches), rank=number, world_size=3)


def train_and_die(urls, directory, dies, saved=None, **options):
    """A training of 20 steps in a process of its own, which notes the keys, and may be killed."""
    from transformers import Trainer, TrainingArguments

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def forward(self, cls, **others):
            seen.append(others["__key__"])
            (directory / f"seen-{dies}.json").write_text(json.dumps(seen))
            if len(seen) == dies:
                os.kill(os.getpid(), signal.SIGKILL)
            return {"loss": self.layer(cls.float()[:, None]).mean()}

    seen, names = [], {"Trainer": Trainer, "checkpoint": checkpoint, "os": os}
    arguments = TrainingArguments(
        str(saved or directory / "saved"), max_steps=20, save_steps=3, save_total_limit=1, remove_unused_columns=False,
        report_to=[], disable_tqdm=True, logging_strategy="no", use_cpu=True, dataloader_pin_memory=False,
    )  # fmt: skip
    os.makedirs(arguments.output_dir, exist_ok=True)
    trainer = class_of("PipeTrainer", names)(Model(), arguments, loader=batches(urls, **options))
    trainer.train(function_of("newest", names)(arguments.output_dir))


def batches(urls, **options):
    """Uncounted: 36 of 48 samples are kept."""
    pipe = wp.ShardList(urls, shuffle=True, seed=3).open_shards().load_tar().group_by_key()
    pipe = pipe.filter_samples(lambda sample: int(sample["__key__"]) % 4).shuffle_buffer(5).decode_by_ext()
    return wp.PipeLoader(pipe, batch_size=4, **options)


@pytest.mark.slow
@pytest.mark.parametrize("epoch_end", ["loop", "exact"])
def test_the_trainer_of_transformers_killed_twice(epoch_end, urls, tmp_path):
    """By SIGKILL two and one step after a checkpoint, the second time in the second epoch; and with
    one checkpoint at a time, of samples that are not counted.
    """
    pytest.importorskip("transformers.trainer")
    fork = multiprocessing.get_context("fork")
    for dies in (5, 12, 0):
        process = fork.Process(target=train_and_die, args=(urls, tmp_path, dies), kwargs={"epoch_end": epoch_end})
        process.start()
        process.join(200)
        process.kill()
        assert process.exitcode == (-signal.SIGKILL if dies else 0)
    loader = batches(urls, epoch_end=epoch_end)
    whole = [batch["__key__"] for _ in range(3) for batch in itertools.islice(loader, 20)][:20]
    runs = [json.loads((tmp_path / f"seen-{dies}.json").read_text()) for dies in (5, 12, 0)]
    # the first saved after step 3, the second after step 12
    assert runs == [whole[:5], whole[3:15], whole[12:20]]


def rank_that_dies(urls, directory, rank, dies, attempt):
    """A rank of two of such a training, in a gloo group."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)  # a test may have used it before the fork
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}  # not used
    place = f"file://{directory}/group-{attempt}"
    torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    (own := directory / f"rank-{rank}").mkdir(exist_ok=True)
    train_and_die(urls, own, dies, saved=directory / "saved", epoch_end="loop", rank=rank, world_size=2)


@pytest.mark.slow
def test_two_ranks_of_the_trainer_of_transformers_killed_twice(urls, tmp_path):
    """One of both by SIGKILL, two steps and one step after a checkpoint; the other one then ends by
    itself, or is killed too. No sample is lost or comes twice.
    """
    pytest.importorskip("transformers.trainer")
    pytest.importorskip("accelerate")
    fork = multiprocessing.get_context("fork")
    runs = [[], []]
    for attempt, (who, dies) in enumerate(((1, 5), (0, 12), (None, 0))):
        chances = [dies if rank == who else 0 for rank in range(2)]
        ranks = [
            fork.Process(target=rank_that_dies, args=(urls, tmp_path, rank, chances[rank], attempt))
            for rank in range(2)
        ]
        for process in ranks:
            process.start()
        for process in ranks if who is None else [ranks[who]]:
            process.join(200)
        for process in ranks:
            process.kill()
            process.join()
        assert [process.exitcode for process in ranks] == [0, 0] if who is None else ranks[who].exitcode == -9
        for rank, run in enumerate(runs):
            run.append(json.loads((tmp_path / f"rank-{rank}" / f"seen-{chances[rank]}.json").read_text()))
    for rank, (first, second, third) in enumerate(runs):
        loader = batches(urls, epoch_end="loop", rank=rank, world_size=2)
        whole = [batch["__key__"] for batch in itertools.islice(loader, 20)]
        # saved after step 3, and after step 12; the rank that is left may be a step behind
        assert first[:4] == whole[:4]
        assert second[:11] == whole[3:14]
        assert third == whole[12:20]
        assert first[:3] + second[:9] + third == whole


class Killed(Exception):
    pass


def test_ray_train(urls, tmp_path, monkeypatch):
    """Killed twice between two reports; a copy of Ray's way with directories."""
    kept, seen = tmp_path / "kept", []

    class Checkpoint:
        @classmethod
        def from_directory(cls, directory):
            shutil.copytree(directory, kept, dirs_exist_ok=True)

        def as_directory(self):
            return contextlib.nullcontext(str(kept))

    names = {
        "report": lambda metrics, checkpoint: None,
        "get_checkpoint": lambda: Checkpoint() if kept.exists() else None,
        "Checkpoint": Checkpoint,
    }
    module(monkeypatch, "ray.train", **names)

    def train(batch):
        if len(runs[-1]) == 5:
            raise Killed
        runs[-1].append(numbers(batch))

    known = {"make_pipe": lambda: make_pipe(urls), "train": train}
    train_func, runs = shown_under("Ray Train", known)["train_func"], seen
    for _ in range(2):
        runs.append([])
        with pytest.raises(Killed):
            train_func({"batch_size": 2, "every": 3, "steps": 10})
    runs.append([])
    train_func({"batch_size": 2, "every": 3, "steps": 10})
    assert runs == [expected(urls, 10)[begin:end] for begin, end in ((0, 5), (3, 8), (6, 10))]


def test_grain(tmp_path, monkeypatch):
    """The code of tutorial 12: its iterator goes on from a state."""
    pytest.importorskip("grain")
    monkeypatch.chdir(tmp_path)
    index_shards(make_shards("shards", shards=3, samples=6), offsets=True)
    chapter = (ROOT / "tutorials" / "12_random_access.py").read_text()
    data = shown_under("Coming from other libraries", {}, chapter)["data"]
    whole = [batch["__key__"].tolist() for batch in data]
    assert sorted(key for keys in whole for key in keys) == [f"{number:08d}" for number in range(18)]
    batches = iter(data.to_iter_dataset())
    next(batches)
    again = iter(data.to_iter_dataset())
    again.set_state(batches.get_state())
    assert [batch["__key__"].tolist() for batch in again] == whole[1:]
