"""Ranks as processes of one torch.distributed group."""

import multiprocessing
import os
import tempfile

CONTEXT = multiprocessing.get_context("forkserver")


def on_ranks(ranks, function, *arguments, timeout_seconds=300):
    """Run ``function(rank, ranks, *arguments)`` in that many processes of one gloo group; returns
    what each returned.
    """
    results = CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as directory:
        processes = [
            CONTEXT.Process(target=on_rank, args=((rank, ranks), f"{directory}/group", results, function, arguments))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        try:
            found = dict(results.get(timeout=timeout_seconds) for _ in processes)
        finally:
            for process in processes:
                process.join(10)
                process.kill()
    for rank, result in found.items():
        assert not isinstance(result, BaseException), f"rank {rank}: {result!r}"
    return [found[rank] for rank in range(ranks)]


def on_rank(of, rendezvous, results, function, arguments):
    import torch.distributed as dist

    rank, ranks = of
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)
        result = function(rank, ranks, *arguments)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException as error:
        result = RuntimeError(repr(error))
    results.put((rank, result))


def launch(ranks, function, *arguments, **options):
    """Run ``function(*arguments)`` in that many processes of one gloo group."""
    on_ranks(ranks, without_rank, function, *arguments, **options)


def without_rank(rank, ranks, function, *arguments):
    function(*arguments)
