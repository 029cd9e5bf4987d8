"""Batches cross from workers in memory blocks: all objects arrive equal, blocks are used again, a
batch that is kept never changes, and nothing is left in /dev/shm.
"""

import dataclasses
import errno
import itertools
import multiprocessing.connection
import os
import pickle
import signal
import subprocess
import sys
from collections import OrderedDict, deque, namedtuple
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from random import Random

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from waiting import wait_for
from warm import Program

import wds_pipes as wp
from wds_pipes.loader import transport
from wds_pipes.loader.transport import Inbox, Outbox
from wds_pipes.testing import make_shards

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*quint8:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]
needs_blocks = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd_create")

LARGE = 9_000  # float32 values that go into a block


class Point(namedtuple("Point", "x y")):
    __slots__ = ()


@dataclasses.dataclass
class Box:
    inside: object


class Labelled(torch.Tensor):
    """A subclass of Tensor."""


def equal(one, other):
    """Whether two objects have the same type, form and values, bit by bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            (one.dtype, one.layout, one.requires_grad) == (other.dtype, other.layout, other.requires_grad)
            and one.is_nested == other.is_nested
            and (one.is_nested or one.shape == other.shape)
            and pickle_of(one) == pickle_of(other)
        )
    if isinstance(one, np.ndarray):
        if one.dtype.hasobject:
            return one.shape == other.shape and one.tolist() == other.tolist()
        flags = one.flags.writeable == other.flags.writeable
        return flags and (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[name], other[name]) for name in one)
    if isinstance(one, (list, tuple, deque)):
        return len(one) == len(other) and all(map(equal, one, other))
    return equal(one.inside, other.inside) if isinstance(one, Box) else one == other


def pickle_of(tensor):
    """The values of a tensor of any kind."""
    with torch.no_grad():
        if tensor.is_nested:
            return [pickle_of(part) for part in tensor.unbind()]
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
        plain = dense.as_subclass(torch.Tensor)
        if plain.is_quantized:
            return plain.int_repr().tolist(), plain.q_scale(), plain.q_zero_point()
        plain = plain.detach().resolve_conj().resolve_neg().flatten().clone(memory_format=torch.contiguous_format)
        return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def every_kind():
    """Objects of all kinds; each tensor and array once small and once large."""
    found = {}
    for size in (6, LARGE * 2):
        values = torch.arange(size)
        floats = values.float()
        array = np.arange(size)
        frozen = np.arange(size)
        frozen.flags.writeable = False
        found[size] = {
            **{
                str(kind): values.to(kind)
                for kind in (torch.bool, torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.complex64)
            },
            "float8": floats.to(torch.float8_e4m3fn),
            "rows": floats.view(2, -1),
            "channels last": floats.view(1, 3, 1, -1).to(memory_format=torch.channels_last),
            "transposed": floats.view(2, -1).t(),
            "strided": floats[::2],
            "strided bfloat16": floats.to(torch.bfloat16)[::2],
            "expanded": floats[:1].expand(3, size),
            "offset": floats[3:],
            "conjugate": torch.complex(floats, floats).conj(),
            "negative": torch.complex(floats, floats).conj().imag,
            "leaf": floats.clone().requires_grad_(),
            "leaf bfloat16": floats.to(torch.bfloat16).requires_grad_(),
            "parameter": torch.nn.Parameter(floats.clone()),
            "subclass": floats.clone().as_subclass(Labelled),
            "sparse": torch.eye(3).to_sparse(),
            "csr": torch.eye(3).to_sparse_csr(),
            "quantised": torch.quantize_per_tensor(floats, 0.5, 1, torch.quint8),
            "nested": torch.nested.nested_tensor([floats, floats[:3]]),
            "array": array,
            "frozen": frozen,
            "fortran": np.asfortranarray(array.reshape(2, -1)),
            "array strided": array[::2],
            "records": np.zeros(size, [("a", "f4"), ("b", "S3")]),
            "times": array.astype("datetime64[s]"),
            "big endian": array.astype(">i4"),
            "text": np.array(["a"] * size),
            "objects": np.array([{"a": 1}, None] * 3, dtype=object),
            "bytes": bytes(size),
            "bytearray": bytearray(size),
            "str": "é" * size,
        }
    found["empty"] = [torch.zeros(0), torch.zeros(3, 0, 2), torch.tensor(5.0), np.zeros(0), np.zeros((2, 0)), b"", ""]
    found["scalars"] = [np.float32(1.5), torch.float32, torch.Size([1, 2]), None, 2**70, {1, 2}, frozenset("ab"), 1j]
    found["containers"] = [
        Point(torch.zeros(LARGE), 1),
        Box([np.zeros(LARGE), Box(torch.ones(3))]),
        OrderedDict(b=torch.zeros(LARGE), a=1),
        deque([torch.ones(LARGE)]),
        ((), [[]], {}),
    ]
    return found


def cross(batch, outbox=None, inbox=None):
    """Return a batch as it arrives; within one process."""
    inbox = Inbox(100) if inbox is None else inbox
    outbox = Outbox() if outbox is None else outbox
    return inbox.open(pickle.loads(ForkingPickler.dumps(outbox.pack(batch))))


def numbered(tmp_path, count=60):
    """A pipe of batches of one sample each."""
    [url] = make_shards(tmp_path, shards=1, samples=count, fields={"cls": lambda rng, number: str(number).encode()})
    return wp.ShardList([url]).open_shards().load_tar().group_by_key().decode_by_ext().batch_samples(1, collate="list")


def as_every_kind(batch):
    return every_kind()


def filled(batch):
    """A large tensor, an array and a small tensor, all filled with the number of the batch."""
    number = batch[0]["cls"]
    return {
        "tensor": torch.full((4, LARGE), float(number)),
        "array": np.full(LARGE, number),
        "label": torch.full((3,), number),
        "bytes": bytes([number]) * LARGE * 4,
        "number": number,
    }


class BrokenOff:
    """A descriptor on its way from a worker, which is killed when the main process asks for it."""

    def __init__(self, descriptor):
        self._sender = os.getpid()

    def detach(self):
        os.kill(self._sender, signal.SIGKILL)
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


def broken_off(batch):
    transport.DupFd = BrokenOff
    return torch.zeros(LARGE)


def cut_off(batch):
    """Of the next message, only the first bytes are sent."""

    def send(connection, buffer):
        os.write(connection.fileno(), buffer[:3])
        os.kill(os.getpid(), signal.SIGKILL)

    multiprocessing.connection.Connection._send = send
    return batch


def sizes(batch):
    """One large batch, then small ones."""
    return torch.zeros(40 * LARGE if batch[0]["cls"] == 0 else 2 * LARGE, dtype=torch.uint8)


def unlike(sample):
    """Arrays whose sizes change with the number of the sample, most of them large."""
    number = sample["cls"]
    side = 20 + number // 8 % 5 * 40
    return {
        "image": np.full((side, side, 3), number, np.uint8),
        "planes": np.full((side, side, 3), number, np.float32).transpose(2, 0, 1),
        "big endian": np.full(side * 40, number, ">f4"),
        "text": "a" * side * 100,
        "number": number,
    }


def is_filled(batch):
    """Whether a batch has the values with which it was made."""
    number = batch["number"]
    return (
        bool((batch["tensor"] == number).all())
        and bool((batch["array"] == number).all())
        and bool((batch["label"] == number).all())
        and batch["bytes"] == bytes([number]) * LARGE * 4
    )


def blocks():
    """The sizes of the memory blocks that this process has mapped, by their numbers."""
    found = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:wds_pipes" in line:
            first, last = line.split()[0].split("-")
            found[line.split()[4]] = int(last, 16) - int(first, 16)
    return found


# Every kind of object


def test_every_kind_of_object_arrives_equal(tmp_path):
    loader = wp.PipeLoader(numbered(tmp_path, 3).map_samples(as_every_kind), num_workers=1)
    expected = every_kind()
    for batch in loader:
        wrong = [
            (size, name)
            for size, kinds in expected.items()
            if isinstance(kinds, dict)
            for name, value in kinds.items()
            if not equal(batch[size][name], value)
        ]
        assert wrong == []
        assert equal(batch["empty"], expected["empty"])
        assert equal(batch["scalars"], expected["scalars"])
        assert equal(batch["containers"], expected["containers"])


SIZES = st.sampled_from([0, 1, 5, 4_000, 4_097, 20_000])
LEAVES = st.one_of(
    st.builds(lambda size, kind: torch.arange(size).to(kind), SIZES, st.sampled_from([torch.float32, torch.bfloat16])),
    st.builds(lambda size, step: torch.arange(size * step)[::step], SIZES, st.integers(1, 3)),
    st.builds(lambda size: torch.arange(size * 6).view(3, -1, 2).permute(2, 0, 1), SIZES.filter(bool)),
    st.builds(lambda size, kind: np.arange(size).astype(kind), SIZES, st.sampled_from(["u1", "f4", ">i8", "c16"])),
    st.builds(lambda size: bytes(Random(size).randbytes(size)), SIZES),
    st.builds(lambda size: "ü" * size, SIZES),
    st.integers(),
    st.none(),
)
BATCHES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
        st.builds(Point, inner, inner),
        st.builds(Box, inner),
    ),
    max_leaves=8,
)


@settings(max_examples=20, deadline=None)
@given(batches=st.lists(BATCHES, min_size=1, max_size=6), most=st.integers(0, 3), keeps=st.booleans())
def test_any_structure_arrives_equal_and_stays_equal(batches, most, keeps):
    inbox = Inbox(most)
    outbox = Outbox()
    kept = []
    for batch in batches * 2:
        arrived = cross(batch, outbox, inbox)
        assert equal(arrived, batch)
        kept = [*kept, (arrived, batch)] if keeps else []
    assert all(equal(arrived, batch) for arrived, batch in kept)
    assert len(inbox.blocks) <= most + 1


@settings(max_examples=20, deadline=None)
@given(
    columns=st.lists(st.lists(SIZES, max_size=4), min_size=2, max_size=12),
    kinds=st.lists(st.sampled_from(["made", "lost", "own"]), min_size=2, max_size=5),
    most=st.integers(0, 3),
    keeps=st.booleans(),
)
def test_arrays_that_were_made_in_a_block_arrive_equal_and_stay_equal(columns, kinds, most, keeps):
    inbox = Inbox(most)
    outbox = Outbox()
    kept = []
    kind = itertools.cycle(kinds)
    for number, sizes in enumerate(columns * 3):
        batch, expected = [], []
        for size in sizes:
            how = next(kind)
            array = (np.empty if how == "own" else outbox.empty)((2, size), np.dtype("f4"))
            array[:] = number
            if how != "lost":  # as when a later column of the batch cannot be stacked
                batch.append(torch.from_numpy(array))
                expected.append(torch.full((2, size), float(number)))
        arrived = cross(batch, outbox, inbox)
        assert equal(arrived, expected)
        kept += [(arrived, expected)] if keeps else []
        for tensor in (*arrived, *expected):
            tensor.add_(1)  # does not show in later batches
    assert all(equal(*pair) for pair in kept)
    assert len(inbox.blocks) <= most + 2


@needs_blocks
def test_an_array_that_was_made_in_a_block_is_not_copied():
    inbox = Inbox(100)
    outbox = Outbox()
    cross(np.zeros(LARGE), outbox, inbox)  # now the outbox knows how large a batch is
    array = outbox.empty((LARGE,), np.dtype("f8"))
    arrived = cross({"array": array, "other": np.ones(400)}, outbox, inbox)
    array[:] = 5
    assert (arrived["array"] == 5).all()
    assert (arrived["other"] == 1).all()


@pytest.mark.parametrize("collate", [None, "columns"])
def test_stacked_batches_of_all_sizes_are_those_of_one_process(collate, tmp_path):
    [url] = make_shards(tmp_path, shards=1, samples=120, fields={"cls": lambda rng, number: str(number).encode()})
    pipe = wp.ShardList([url]).open_shards().load_tar().group_by_key().decode_by_ext().map_samples(unlike)
    here, there = (wp.PipeLoader(pipe, batch_size=4, collate=collate, num_workers=count) for count in (0, 1))
    expected, kept = list(here), []
    for number, batch in enumerate(there):
        assert equal(batch, expected[number])
        if number % 3:
            kept.append((batch, expected[number]))
        elif collate is None:
            batch["image"].zero_()  # does not show in later batches
    assert len(kept) == 20
    there.close()
    assert all(equal(*pair) for pair in kept)


def test_one_object_in_two_fields_stays_one_and_views_of_one_tensor_stay_equal():
    one = torch.arange(LARGE)
    arrived = cross({"a": one, "b": one, "rows": list(one.view(3, -1)), "half": one[::2]})
    assert arrived["a"] is arrived["b"]
    assert equal(arrived["rows"], list(one.view(3, -1)))
    arrived["rows"][0].zero_()
    assert equal(arrived["half"], one[::2])


def test_a_tensor_keeps_its_strides_and_its_memory_format():
    images = torch.rand(2, 3, 60, 60).to(memory_format=torch.channels_last)
    arrived = cross(images)
    assert arrived.is_contiguous(memory_format=torch.channels_last)
    assert arrived.stride() == images.stride()


def test_a_tensor_has_a_storage_of_its_own():
    batch = {"a": torch.zeros(LARGE), "b": torch.zeros(4 * LARGE), "c": torch.zeros(3)}
    for name, tensor in cross(batch).items():
        assert tensor.untyped_storage().nbytes() == batch[name].nbytes
        before = tensor._version
        tensor.add_(1)
        assert tensor._version == before + 1


def test_what_autograd_has_computed_is_refused():
    with pytest.raises(RuntimeError, match="non-leaf tensor"):
        cross([torch.ones(3, requires_grad=True) * 2])


@pytest.mark.parametrize("make", [lambda floats: floats.to(torch.complex32), lambda floats: floats.untyped_storage()])
def test_what_torch_cannot_pickle_by_value_is_refused(make):
    with pytest.raises(pickle.PicklingError, match="are not sent"):
        cross([make(torch.zeros(3))])


def test_a_leaf_beside_its_data_arrives_whole():
    leaf = torch.rand(LARGE, requires_grad=True)
    data = leaf.detach()
    sent = [data, leaf, data[::2], data.numpy()]
    assert equal(cross(sent), sent)


# Blocks are used again, and never too early


@needs_blocks
def test_blocks_are_used_again(tmp_path):
    loader = wp.PipeLoader(numbered(tmp_path).map_samples(filled), num_workers=1, prefetch_factor=2)
    before, seen, count = set(blocks()), set(), 0  # earlier tests may have left some
    for batch in loader:
        assert is_filled(batch)
        count += 1
        if count % 5 == 0:
            seen |= set(blocks()) - before
        batch["tensor"].add_(1000)  # does not show in later batches
        batch["array"] += 1000
    assert count == 60
    assert 1 <= len(seen) <= 2 + 3  # prefetched; the one ahead, that of the caller, and the one before
    del batch
    loader.close()
    assert set(blocks()) <= before


@needs_blocks
def test_kept_batches_never_change_and_their_blocks_are_bounded(tmp_path):
    before = set(blocks())
    loader = wp.PipeLoader(numbered(tmp_path).map_samples(filled), num_workers=2, prefetch_factor=2)
    batches = list(loader)
    assert len(set(blocks()) - before) <= 2 * (2 + 4 + 2)
    assert [batch["number"] for batch in batches] == list(range(60))
    assert all(map(is_filled, batches))
    loader.close()
    assert all(map(is_filled, batches))


@pytest.mark.parametrize(
    "part",
    [
        lambda batch: batch["tensor"][2, 5:900],
        lambda batch: batch["tensor"].numpy()[1:3, ::7],
        lambda batch: torch.from_numpy(batch["array"])[:50],
        lambda batch: memoryview(batch["array"]),
        lambda batch: torch.from_dlpack(batch["tensor"].view(torch.int32)).view(torch.float32),
        lambda batch: torch.zeros(0).set_(batch["tensor"].untyped_storage()),
        lambda batch: batch["label"],
    ],
    ids=["slice", "numpy", "from_numpy", "memoryview", "dlpack", "storage", "small"],
)
def test_a_kept_part_of_a_batch_never_changes(part, tmp_path):
    loader = wp.PipeLoader(numbered(tmp_path, 30).map_samples(filled), num_workers=1)
    chosen, kept = Random(1), []
    for batch in loader:
        kept.append((part(batch), bytes(np.asarray(part(batch)).tobytes())))
        del batch
        if len(kept) > 3:
            del kept[chosen.randrange(4)]
        for view, before in kept:
            assert np.asarray(view).tobytes() == before
    loader.close()
    assert all(np.asarray(view).tobytes() == before for view, before in kept)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_reads_the_batch_that_its_parent_had(tmp_path):
    loader = wp.PipeLoader(numbered(tmp_path).map_samples(filled), num_workers=1, multiprocessing_context="fork")
    items = iter(loader)
    batch = next(items)
    start, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(start, 1)
        os._exit(0 if (batch["array"] == batch["number"]).all() else 1)  # not by torch, whose threads are not forked
    del batch
    assert all(map(is_filled, islice(items, 40)))  # the worker fills many batches meanwhile
    os.write(go, b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(items)) == 19


@needs_blocks
def test_blocks_that_are_too_large_are_closed(tmp_path):
    before = set(blocks())
    loader = wp.PipeLoader(numbered(tmp_path, 300).map_samples(sizes), num_workers=1)

    def largest():
        return max(size for number, size in blocks().items() if number not in before)

    items = iter(loader)
    next(items)
    assert largest() > 40 * LARGE
    for _ in items:
        pass
    assert largest() <= 8 * LARGE


@needs_blocks
def test_blocks_that_nobody_needs_any_more_are_closed():
    inbox = Inbox(100)
    outbox = Outbox()
    many = [cross(torch.zeros(LARGE), outbox, inbox) for _ in range(20)]
    assert len(inbox.blocks) == 20
    del many
    for _ in range(200):
        cross(torch.zeros(LARGE), outbox, inbox)
    assert len(inbox.blocks) == 1


@needs_blocks
def test_a_block_that_is_closed_before_it_was_sent_leaves_no_descriptor():
    def used(empty_of):
        inbox = Inbox(100)
        outbox = Outbox()
        before = psutil.Process().num_fds()
        kept = deque(maxlen=3)
        for number in range(14):  # each batch is too large for the block in which it was begun
            array = empty_of(outbox)((int(20_000 * 1.7**number),), np.dtype("u1"))
            kept.append(cross([array, array.copy()], outbox, inbox))
        return psutil.Process().num_fds() - before

    assert used(lambda outbox: outbox.empty) <= 12  # two for each block that is in use, or was last


@needs_blocks
def test_a_block_that_cannot_be_replaced_is_closed_nevertheless(monkeypatch):
    """The worker has closed the one that was too small when the system refuses a larger one; again
    and again.
    """
    inbox = Inbox(2)
    outbox = Outbox()
    for size in range(LARGE, 6 * LARGE, LARGE):
        with monkeypatch.context() as refused:
            refused.setattr(os, "memfd_create", no_block)
            cross(torch.zeros(size), outbox, inbox)
        cross(torch.zeros(size), outbox, inbox)
        assert len(inbox.blocks) == len(outbox._blocks) == 1


# Without blocks


def no_block(name):
    raise OSError("memfd_create")


@pytest.mark.parametrize("how", ["missing", "refused"])
def test_without_memory_blocks_batches_arrive_as_in_torch(how, tmp_path, monkeypatch):
    if how == "missing":
        monkeypatch.delattr(os, "memfd_create", raising=False)
    else:
        monkeypatch.setattr(os, "memfd_create", no_block, raising=False)
    before = set(blocks())
    loader = wp.PipeLoader(numbered(tmp_path, 10).map_samples(filled), num_workers=1, multiprocessing_context="fork")
    batches = list(loader)
    assert set(blocks()) <= before
    assert len(batches) == 10
    assert all(map(is_filled, batches))


# Nothing is left

SCRIPT = """
import contextlib, gc, os, sys, time, warnings
import psutil, torch
import wds_pipes as wp

warnings.filterwarnings("ignore")


def make(batch):
    return {"a": torch.zeros(4, 9000), "b": [torch.zeros(3), bytes(100000)]}


def begin(url, workers):
    # a loader, its running iterator, batches in blocks, and its workers
    pipe = wp.ShardList(url.split()).open_shards().load_tar().group_by_key().batch_samples(1, collate="list")
    loader = wp.PipeLoader(pipe.map_samples(make), num_workers=workers, multiprocessing_context="fork")
    items = iter(loader)
    kept = [next(items) for _ in range(5)]
    found = [child for child in psutil.Process().children() if "resource_tracker" not in " ".join(child.cmdline())]
    shared = [
        line
        for process in (psutil.Process(), *found)
        for line in open(f"/proc/{process.pid}/maps").read().splitlines()
        if "/dev/shm/" in line and "/dev/shm/sem." not in line
    ]
    print("pids", os.getpid(), *(child.pid for child in found), flush=True)
    assert not shared, shared  # not even while it runs
    assert descriptors() > 0
    return loader, items, kept, found


def descriptors():
    # how many blocks this process has open
    gc.collect()
    links = [os.path.join("/proc/self/fd", name) for name in os.listdir("/proc/self/fd")]
    return sum("wds_pipes" in os.readlink(link) for link in links if os.path.lexists(link))


def main(url, how):
    if how == "main":
        running = begin(url, 1)
        print("running", flush=True)
        time.sleep(600)
    loader, items, kept, workers = begin(url, 2)
    loader.close()
    assert all(float(batch["a"].sum()) == 0 for batch in kept)
    del kept
    print("closed", descriptors(), flush=True)

    loader, items, kept, workers = begin(url, 2)
    batch = None
    workers[-1].kill()
    with contextlib.suppress(wp.WorkerError):
        for batch in items:
            pass
    assert all(float(batch["a"].sum()) == 0 for batch in kept)
    del batch, kept, items  # the error of the iterator keeps what was in flight
    print("WorkerError", descriptors(), flush=True)

    loader, items, kept, workers = begin(url, 2)
    try:
        for batch in items:
            raise KeyError("as wanted")
    except KeyError:
        del batch, kept
    loader.close()
    print("KeyError", descriptors(), flush=True)

    loader, items, kept, workers = begin(url, 2)
    raise KeyError("the end")


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="this system has no /dev/shm")
@pytest.mark.parametrize("how", ["others", "main"])
def test_nothing_is_left(how, tmp_path):
    """Neither in /dev/shm nor as a descriptor: after close(), SIGKILL of a worker, an exception,
    and the end of the process by an exception or by SIGKILL.
    """
    url = " ".join(make_shards(tmp_path, shards=2, samples=150))
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    process = Program(script, url, how)
    lines = []
    if how == "main":
        lines = [process.stdout.readline(), process.stdout.readline()]
        process.send_signal(signal.SIGKILL)
    rest, errors = process.communicate()
    lines += rest.splitlines()
    numbers = [number for line in lines if line.startswith("pids") for number in line.split()[1:]]
    told = [line.strip() for line in lines if not line.startswith("pids")]
    assert told == (["running"] if how == "main" else ["closed 0", "WorkerError 0", "KeyError 0"]), errors
    assert len(numbers) == (2 if how == "main" else 12)
    assert how == "main" or errors.endswith("KeyError: 'the end'\n")
    wait_for(lambda: not any(psutil.pid_exists(int(number)) for number in numbers))
    assert [name for name in os.listdir("/dev/shm") if any(number in name.split("_") for number in numbers)] == []


@needs_blocks
def test_a_worker_that_is_killed_while_it_sends_a_block_is_a_worker_error(tmp_path):
    loader = wp.PipeLoader(numbered(tmp_path).map_samples(broken_off), num_workers=1)
    with pytest.raises(
        wp.WorkerError, match=r"(?s)worker process \d+ was killed by SIGKILL.*memory ran out.*To continue, call"
    ):
        next(iter(loader))


@pytest.mark.skipif(sys.platform == "win32", reason="pipes of Windows have whole messages")
def test_a_worker_that_is_killed_in_the_middle_of_a_message_is_a_worker_error(tmp_path):
    """Not a hang."""
    loader = wp.PipeLoader(numbered(tmp_path).map_samples(cut_off), num_workers=2)
    words = r"(?s)worker process \d+ was killed by SIGKILL.*memory ran out.*To continue, call"
    with ThreadPoolExecutor(1) as thread, pytest.raises(wp.WorkerError, match=words):
        thread.submit(next, iter(loader)).result()


CHILD = """
import os, sys, time, warnings
import torch
import wds_pipes as wp

warnings.filterwarnings("ignore")


def make(batch):
    return torch.zeros(9000)


def read(url):
    pipe = wp.ShardList([url]).open_shards().load_tar().group_by_key().batch_samples(1, collate="list")
    loader = wp.PipeLoader(pipe.map_samples(make), num_workers=1, multiprocessing_context="fork")
    count = sum(1 for _ in loader)
    loader.close()
    return count


if __name__ == "__main__":
    print(read(sys.argv[1]), flush=True)
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:
            time.sleep(0.01)
        print(read(sys.argv[1]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_has_workers_after_its_parent_has_ended(tmp_path):
    [url] = make_shards(tmp_path, shards=1, samples=5)
    script = tmp_path / "script.py"
    script.write_text(CHILD)
    done = subprocess.run([sys.executable, script, url], capture_output=True, text=True, check=True)
    assert done.stdout == "5\n5\n", done.stderr


# Pinned memory


@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned memory needs a CUDA device, and there is none")
@pytest.mark.parametrize("kept", [1, 60])
def test_pinned_batches_are_equal(kept, tmp_path):
    loader = wp.PipeLoader(numbered(tmp_path).map_samples(filled), num_workers=2, pin_memory=True)
    batches = deque(maxlen=kept)
    for batch in loader:
        assert batch["tensor"].is_pinned()
        assert batch["tensor"].to("cuda", non_blocking=True).mean().item() == batch["number"]
        batches.append(batch)
    assert all(map(is_filled, batches))
