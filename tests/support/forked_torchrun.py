"""``torchrun --standalone`` with its agent and its ranks as forks, so that torch is imported once.

The agent and the rendezvous are torchrun's own; only the start of the processes differs.
"""

import os
import runpy
import sys
import warnings

from warm import Program


def start(ranks, script, *arguments, environment=None):
    """Run a script on so many ranks; returns the agent, a ``Program``."""
    return Program(__file__, ranks, script, *arguments, environment=environment)


def run_rank(*command):
    """What a rank runs."""
    sys.argv = list(command)
    sys.path.insert(0, os.path.dirname(command[0]))
    runpy.run_path(command[0], run_name="__main__")


def launch(function, *arguments, ranks, restarts=0):
    """Run a function on so many ranks, as ``torchrun --standalone`` runs a script."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def close_at_once(context, *arguments, **options):
        # Ranks that have returned wait until the agent has seen it; it no longer looks, and would
        # kill them after half a minute. The ranks of torchrun, which are programs, just end.
        context._worker_finished_event.set()
        close(context, *arguments, **options)

    close, MultiprocessContext._close = MultiprocessContext._close, close_at_once
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        max_restarts=restarts,
        run_id="forked",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        start_method="fork",
        logs_specs=DefaultLogsSpecs(),
    )
    elastic_launch(config, function)(*arguments)


def main(ranks, *command):
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
    launch(run_rank, *command, ranks=int(ranks))


if __name__ == "__main__":
    main(*sys.argv[1:])
