"""The recipes of the tutorial for other trainers, with the libraries: each is stopped, or killed
between two of its steps, and goes on twice. Ray Train's is in tests/on_ray.
"""

import itertools
import json
import multiprocessing
import os
import signal
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
from waiting import wait_for
from your_trainer import defined, shown_under

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


STOPS = 5, 4, 20, 6  # the steps of runs, each resumed from the one before


def make_loader(urls, **options):
    return wp.PipeLoader(make_pipe(urls), batch_size=2, epoch_end="loop", **options)


def numbers(batch):
    return batch[:, 0].tolist()


def expected(urls, count, **options):
    return [numbers(batch) for batch in itertools.islice(make_loader(urls, **options), count)]


@pytest.mark.slow
def test_torchtitan(urls, tmp_path):
    """Two resumes in one epoch of 24 steps, and one across epochs."""
    pytest.importorskip("torchtitan", reason="needs torchtitan")
    import torch.distributed.checkpoint as dcp  # not when tests are collected: it takes a second

    kind = shown_under("TorchTitan", {"make_pipe": make_pipe})["PipeDataLoader"]

    def build():
        config = kind.Config(dataset_path=urls)
        return kind(
            config, dp_rank=0, dp_world_size=1, local_batch_size=2, seq_len=4, tokenizer=None, snapshot_every_n_steps=1
        )

    given = []
    for run, steps in enumerate(STOPS):
        dataloader = build()
        if run:
            dcp.load({"dataloader": dataloader}, checkpoint_id=tmp_path / str(run))
        for inputs, labels in itertools.islice(iter(dataloader), steps):
            assert torch.equal(inputs["input"][:, 1:], labels[:, :-1])
            given.append(numbers(inputs["input"]))
        dcp.save({"dataloader": dataloader}, checkpoint_id=tmp_path / str(run + 1))
    assert given == expected(urls, sum(STOPS))


@pytest.mark.slow
def test_nemo_automodel(urls):
    """Two resumes in one epoch, and one across epochs, of one rank and of two."""
    reason = "needs nemo-automodel"
    dataloader = pytest.importorskip("nemo_automodel.components.datasets.loader", reason=reason)
    kind = shown_under("NeMo AutoModel", {"make_pipe": lambda: make_pipe(urls)})["PipeDataset"]
    for rank, of in ((0, 1), (0, 2), (1, 2)):
        given, state = [], None
        for steps in STOPS:
            loader = dataloader.ParallelAwareDataloader(kind(2), dp_rank=rank, dp_world_size=of, batch_size=None)
            if state is not None:
                loader.load_state_dict(state)
            given += [numbers(batch) for batch in itertools.islice(iter(loader), steps)]
            state = loader.state_dict()
        assert given == expected(urls, sum(STOPS), rank=rank, world_size=of)


@pytest.mark.slow
@pytest.mark.parametrize("epoch_end", ["loop", "exact", "drop", "pad"])
def test_accelerate(urls, tmp_path, epoch_end):
    """Two resumes in one epoch of 24 steps, and one across epochs, by save_state() and
    load_state().
    """
    accelerate = pytest.importorskip("accelerate")

    def build():
        counts = {} if epoch_end in ("loop", "exact") else {"samples_per_shard": 4}
        samples = wp.ShardList(urls, shuffle=True, seed=3, **counts).open_shards().load_tar().group_by_key()
        return wp.PipeLoader(samples.shuffle_buffer(5), batch_size=2, epoch_end=epoch_end)

    def keys(loader):
        return (batch["__key__"] for batch in itertools.chain.from_iterable(itertools.repeat(loader)))

    given = []
    for run, steps in enumerate(STOPS):
        accelerator, loader = accelerate.Accelerator(cpu=True), build()
        accelerator.register_for_checkpointing(checkpoint.AllRanks(loader))
        if run:
            accelerator.load_state(str(tmp_path / str(run)))
        given += itertools.islice(keys(loader), steps)
        accelerator.save_state(str(tmp_path / str(run + 1)))
    assert given == list(itertools.islice(keys(build()), sum(STOPS)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "every", "undo"),
    [
        ("dcp", 3, lambda out: (out / "step-000006" / ".metadata").unlink()),
        ("accelerate", 4, lambda out: (out / "8").rename(out / "new-8")),
    ],
)
def test_killed_while_it_saves(kind, every, undo, tmp_path, monkeypatch):
    """The functions of the tutorial go on from the checkpoint before, twice."""
    accelerate = pytest.importorskip("accelerate")
    import torch.distributed.checkpoint as dcp

    monkeypatch.chdir(tmp_path)
    make_shards("shards", shards=6, samples=8, fields=("npy", "txt"))
    known = {"os": os, "torch": torch, "dist": torch.distributed, "dcp": dcp, "wp": wp, "checkpoint": checkpoint}
    known |= {"Accelerator": accelerate.Accelerator, "send_to_device": accelerate.utils.send_to_device}
    wanted = ("make_loader", "is_kept", "first_keys", "train", "Model", "train_with_accelerate")
    tutorial = defined(*wanted, **known)
    run = tutorial.train if kind == "dcp" else tutorial.train_with_accelerate
    whole = tutorial.first_keys(20)
    (tmp_path / "out").mkdir()
    assert run("out", 2 * every + 1) == whole[: 2 * every + 1]
    for stop in (2 * every + 1, 20):
        undo(tmp_path / "out")  # what a kill would have left
        assert run("out", stop) == whole[every:stop]


def megatron(urls, directory, of, begin, dies):
    """A rank of a training of eight iterations, which saves after each third one."""
    from megatron.core import parallel_state as mpu

    rank, ranks = of
    place = f"file://{directory}/group-{begin}"
    torch.distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks)
    mpu.initialize_model_parallel()
    names = shown_under("Megatron-LM and Megatron-Bridge", {"make_pipe": lambda: make_pipe(urls)})
    args = SimpleNamespace(micro_batch_size=2, num_workers=0, dataloader_save=str(directory), iteration=begin)
    batches, *_ = names["train_valid_test_datasets_provider"](mpu, args)
    for iteration in range(begin + 1, 9):
        note(directory / f"from-{begin}-{rank}", iteration, numbers(next(batches)))
        if iteration % 3 == 0:  # the files that Megatron-LM and Megatron-Bridge write
            folder = directory / f"iter_{iteration:07d}" / "mp_rank_00"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(
                {"dataloader_state_dict": batches.save_state()}, folder / f"train_dataloader_dprank{rank:03d}.pt"
            )
        torch.distributed.barrier()
        if rank == 1 and iteration == dies:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Transformer Engine and Apex")
def test_megatron(urls, tmp_path):
    """Two ranks, of which one is killed, twice, and then three, as Megatron-Core numbers them."""
    pytest.importorskip("megatron.core", reason="needs megatron-core")
    fork, runs = multiprocessing.get_context("fork"), []
    for ranks, begin, dies in ((2, 0, 5), (2, 3, 7), (3, 6, 0)):
        processes = [
            fork.Process(target=megatron, args=(urls, tmp_path, (rank, ranks), begin, dies)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes[-1:] if dies else processes:
            process.join(100)
            assert process.exitcode == (-signal.SIGKILL if dies else 0)
        for process in processes:
            process.kill()
            process.join()
        runs.append([[*noted(tmp_path / f"from-{begin}-{rank}").values()] for rank in range(ranks)])
    first, second, third = runs
    for rank in range(2):
        whole = expected(urls, 7, rank=rank, world_size=2)
        assert (first[rank][:5], second[rank][:4]) == (whole[:5], whole[3:7])
    given = [batches[:3] for batches in (*first, *second, *third)]
    given = [number for batches in given for batch in batches for number in batch]
    assert len(given) == len({*given}) == 36  # of the first epoch, which has 48


def replica(loader, directory, lighthouse, dies, together):
    """One of three replicas, which may be killed before the others reduce or before it saves."""
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo

    number, limit = loader.rank.number, timedelta(seconds=20)
    data = shown_under("torchft", {})["ReplicaData"](loader, str(directory / f"{number}.json"))
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        ProcessGroupGloo(timeout=timedelta(seconds=2)), data.load_state_dict, data.state_dict, min_replica_size=2,
        rank=0, world_size=1, store_addr="localhost", store_port=store.port, lighthouse_addr=lighthouse,
        replica_id=f"replica_{number}", hostname="localhost", timeout=limit, quorum_timeout=limit,
    )  # fmt: skip
    if together is not None:
        together.wait()
    while True:
        manager.start_quorum()
        batch = numbers(data.next())
        if dies == ("step", manager.current_step()):
            os.kill(os.getpid(), signal.SIGKILL)
        data.took_part(manager)
        step = manager.current_step()
        note(directory / f"batches-{number}", step, batch)
        if manager.should_commit():
            note(directory / "parts", step, data.part.tolist())
            if dies == ("commit", step):
                os.kill(os.getpid(), signal.SIGKILL)
            data.committed()


def note(path, *what):
    with open(path, "a") as file:
        file.write(json.dumps(what) + "\n")


def noted(path):
    """The last note of each step."""
    return dict(map(json.loads, path.read_text().splitlines()))


def all_noted(directory):
    """The steps after 8 in which all replicas took part and that all have noted; another replica
    may have committed a step before one has noted its batch.
    """
    batches = [noted(directory / f"batches-{number}") for number in range(3)]
    parts = noted(directory / "parts").items()
    return [step for step, part in parts if step > 8 and all(part) and all(step in each for each in batches)]


def lighthouse(addresses):
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="[::]:0", min_replicas=2, join_timeout_ms=10_000, heartbeat_timeout_ms=1000)
    addresses.put(server.address())
    signal.pause()


@pytest.mark.slow
def test_torchft(urls, tmp_path):
    """Of three replicas, one is killed before the others reduce, and one between a commit and its
    save; both come back. Each trains its own batches, each once, in all steps that were committed.
    """
    pytest.importorskip("torchft", reason="needs torchft")
    fork = multiprocessing.get_context("fork")
    server = fork.Process(target=lighthouse, args=(addresses := fork.SimpleQueue(),))
    server.start()
    address, barrier = addresses.get(), fork.Barrier(3)

    def start(number, dies=None, together=None):
        loader = make_loader(urls, rank=number, world_size=3)
        process = fork.Process(target=replica, args=(loader, tmp_path, address, dies, together))
        process.start()
        return process

    running = [start(0, None, barrier), start(1, ("step", 3), barrier), start(2, ("commit", 5), barrier)]
    try:
        for number in (1, 2):
            running[number].join(100)
            assert running[number].exitcode == -signal.SIGKILL
            running[number] = start(number)
        wait_for(lambda: all_noted(tmp_path))
    finally:
        for process in (*running, server):
            process.kill()
            process.join()
    parts, last = noted(tmp_path / "parts"), all_noted(tmp_path)[0]
    assert sorted(parts) == [*range(len(parts))]
    for number in range(3):
        batches = noted(tmp_path / f"batches-{number}")
        trained = [batches[step] for step in range(last + 1) if parts[step][number]]
        assert trained == expected(urls, len(trained), rank=number, world_size=3)
        assert len(trained) > 4


def test_grain(tmp_path, monkeypatch):
    """The code of tutorial 12: its iterator goes on from a state."""
    pytest.importorskip("grain")
    monkeypatch.chdir(tmp_path)
    index_shards(make_shards("shards", shards=3, samples=6), offsets=True)
    data = shown_under("Coming from other libraries", {}, tutorial="12")["data"]
    whole = [batch["__key__"].tolist() for batch in data]
    assert sorted(key for keys in whole for key in keys) == [f"{number:08d}" for number in range(18)]
    batches = iter(data.to_iter_dataset())
    next(batches)
    again = iter(data.to_iter_dataset())
    again.set_state(batches.get_state())
    assert [batch["__key__"].tolist() for batch in again] == whole[1:]
