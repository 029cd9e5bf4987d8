"""Ranks as processes of one torch.distributed group."""

import multiprocessing
import os
import random

CONTEXT = multiprocessing.get_context("forkserver")


def on_ranks(ranks, function, *arguments):
    """Run ``function(rank, ranks, *arguments)`` in that many processes of one gloo group; returns
    what each returned.
    """
    results = CONTEXT.Queue()
    rendezvous = f"{arguments[-1]}/group-{random.randrange(1 << 40)}"
    processes = [
        CONTEXT.Process(target=on_rank, args=((rank, ranks), rendezvous, results, function, arguments))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    try:
        found = dict(results.get(timeout=300) for _ in processes)
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
