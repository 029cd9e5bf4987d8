"""What tasks do in tests; processes import this module and nothing else."""

import errno
import os
import signal

from wds_pipes.errors import SampleError
from wds_pipes.tools import write_shard


def write(task, place):
    """Writes two files, the second of which says which process ran it."""
    first, second = task.outputs
    place.write(first, str(task.arguments).encode() * 1000)
    place.write(second, b"x" * 10)
    return {"value": task.arguments, "pid": os.getpid()}


def moody(folder, task, place):
    """Fails as the arguments say, and notes each call."""
    with open(f"{folder}/calls", "a") as log:
        log.write(f"{task.name}\n")
    with open(f"{folder}/calls") as log:
        count = log.read().split().count(task.name)
    kind, times = task.arguments
    if count <= times:
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if kind == "nothing":
            return {}
        if kind == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "0.a")
        raise SampleError("sample 'a' is wrong") if kind == "sample" else OSError("the disk is gone")
    return write(task, place)


def nothing(task, place):
    return {}


def write_one_shard(task, place):
    return write_shard(place.at(task.name), [{"__key__": "a", "txt": str(task.arguments)}])._asdict()
