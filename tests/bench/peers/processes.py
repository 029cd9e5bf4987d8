"""A process with all that it starts: how much memory they take, and their end.

They are recognised by their session, which also those keep whose parent has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

LOOK_SECONDS = 0.25  # between two measurements of the memory, each of which takes some milliseconds
GRACE_SECONDS = 5.0  # for the end of a process that has written its result, or was killed


def run(
    command: Sequence[str], *, env: Mapping[str, str], cwd: str, log: IO[bytes], result: str, timeout_seconds: float
) -> tuple[int | None, int | None]:
    """Run a command, with its output in ``log``, and end all that it started.

    Args:
        command: the program and its arguments.
        env: its environment variables.
        cwd: its working directory.
        log: where its output goes.
        result: a file that it writes at last; it is given GRACE_SECONDS after that.
        timeout_seconds: when it is killed.

    Returns:
        Its exit status, None if it was killed; and the peak memory of all its processes together in
        bytes, with shared pages divided among those that share them, None if it is not known.
    """
    process = subprocess.Popen(
        command, env=dict(env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    deadline, peak = time.monotonic() + timeout_seconds, 0
    try:
        while process.poll() is None:
            if os.path.exists(result):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
                break
            if time.monotonic() > deadline:
                break
            peak = max(peak, sum(map(memory, session(process.pid))))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(LOOK_SECONDS)
        status = process.poll()
    finally:
        process.kill()  # also where there is no /proc
        # Until none is left: a killed process takes a moment to end, and a new one may have come.
        deadline = time.monotonic() + GRACE_SECONDS  # one that waits for a dead disk never ends
        while (pids := list(session(process.pid))) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        process.wait()
    return status, peak or None


def session(leader: int) -> Iterator[int]:
    """Yield the processes of a session; none where there is no /proc."""
    if not os.path.isdir("/proc/self"):
        return
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    after_name = file.read().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(after_name[3]) == leader and after_name[0] != "Z":
                yield int(name)


def memory(pid: int) -> int:
    """The proportional memory of a process in bytes; 0 if it has ended."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next((int(line.split()[1]) << 10 for line in file if line.startswith("Pss:")), 0)
    except OSError:
        return 0
