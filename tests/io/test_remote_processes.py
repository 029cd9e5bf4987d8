"""Remote shards in several processes: each has connections of its own, made when it reads."""

import contextlib
import gc
import multiprocessing
import os

import pytest
from remote import bare, put_all, samples

import wds_pipes as wp
from wds_pipes.core.chain import Chain
from wds_pipes.datapipes.pipe import as_stage

MIB = 1 << 20


def keys(items):
    return [item["__key__"] for item in items]


def read_all(pipe, queue):
    queue.put([bare(sample) for sample in pipe])


def in_a_process(method, function, *arguments):
    """What a function puts into its last argument, a queue, in another process."""
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    process = context.Process(target=function, args=(*arguments, queue), daemon=True)
    process.start()
    try:
        return queue.get(timeout=300)
    finally:
        process.join(120)
        hung = process.is_alive()
        process.kill()
        assert not hung


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_pipe_in_another_process(remote, local, method):
    """After it was read from; and what reads here goes on undisturbed."""
    if method != "fork" and remote.kind != {"spawn": "s3", "forkserver": "http"}[method]:
        pytest.skip("takes long")
    urls = put_all(remote, local)
    wanted = list(map(bare, samples(local)))
    pipe = samples(urls, remote, timeout_seconds=120)
    items = iter(pipe)
    got = [bare(next(items)) for _ in range(50)]
    assert in_a_process(method, read_all, pipe) == wanted
    got += map(bare, items)
    assert got == wanted
    assert Chain(as_stage(pipe)).network.retries == 0


def go_on(items, queue):
    try:
        for _ in items:
            pass
    except RuntimeError as error:
        queue.put(str(error))


def go_on_and_drop(items, pipe, queue):
    del items, pipe
    queue.put("dropped")


def test_an_iterator_of_another_process(remote, local):
    """A fork cannot go on with it, is told so, and does not hang; nor does dropping it do harm
    to the process that it belongs to.
    """
    urls = put_all(remote, local)
    pipe = samples(urls, remote, timeout_seconds=120)
    items = iter(pipe)
    got = [bare(next(items)) for _ in range(10)]
    for _ in range(2):
        assert "was opened in another process: iterate in the process that reads" in in_a_process("fork", go_on, items)
        assert in_a_process("fork", go_on_and_drop, items, pipe) == "dropped"
        got += [bare(next(items)) for _ in range(10)]
    got += map(bare, items)
    assert got == list(map(bare, samples(local)))
    assert Chain(as_stage(pipe)).network.retries == 0
    assert not [request for request in remote.faults.stats(remote.reads) if request.status not in (200, 206)]


@pytest.fixture
def frozen():
    """A child that collects garbage looks at what the test has made, and does not copy the
    memory of all modules for it.
    """
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("frozen")
def test_a_fork_that_drops_the_pipe(remote, local):
    """The parent's connections, which wait for the next epoch, are not the child's to close."""
    urls = put_all(remote, local[:2])
    held = [samples(urls, remote, timeout_seconds=120)]  # a slow machine makes no request again
    for _ in range(3):
        found = [bare(sample) for sample in held[0]]
        assert found == [bare(sample) for sample in samples(local[:2])]
        child = os.fork()
        if not child:
            held.clear()
            gc.collect()
            os._exit(0)
        os.waitpid(child, 0)
    assert len(remote.faults.stats(remote.reads)) == 12  # none was made again


def test_workers_of_a_loader(remote, local):
    """After the parent has read from the same pipe."""
    pipe = samples(put_all(remote, local), remote)
    next(iter(pipe))
    loader = wp.PipeLoader(pipe, batch_size=8, collate=keys, num_workers=2, multiprocessing_context="fork")
    with contextlib.closing(loader) as with_workers:
        found = [key for batch in with_workers for key in batch]
    assert sorted(found) == sorted(keys(samples(local)))
