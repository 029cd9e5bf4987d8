"""Processes that end when the block that started them does, and also when the process that
started them is killed.
"""

import contextlib
import http.client
import os
import random
import shutil
import signal
import socket
import subprocess
import time
import urllib.parse


class Missing(Exception):
    """A server that is not installed here; the message says what to install."""


def need(program, package):
    """The path of a program, or Missing."""
    # where nginx is, which an ordinary user does not look through
    path = shutil.which(program, path=os.environ.get("PATH", os.defpath) + ":/usr/sbin")
    if path is None:
        raise Missing(f"needs {program}: {package}")
    return path


def free_port():
    """A port that is not in use, below those that the kernel gives to outgoing connections."""
    numbers = random.Random()
    while True:
        port = numbers.randrange(15000, 32000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextlib.contextmanager
def running(*command, log, end="KILL", **options):
    """Run a program in the background, with its errors in the file ``log``; it gets the signal
    ``end`` at the end of the block.

    setpriv (util-linux) has the kernel send it that signal also when the thread that started it is
    gone, so start servers from the main thread.
    """
    guard = ["setpriv", "--pdeathsig", end] if shutil.which("setpriv") else []
    options.setdefault("stdout", subprocess.DEVNULL)
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [*guard, *command], stdin=subprocess.DEVNULL, stderr=output, start_new_session=True, **options
        )
    try:
        yield process
    finally:
        process.send_signal(signal.Signals[f"SIG{end}"])
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.stdout:
            process.stdout.close()


def await_answer(url, process, log, *, timeout_seconds=120):
    """Wait until a server answers a request.

    Raises:
        RuntimeError: it ended, or does not answer in time; with the end of its log.
    """
    address = urllib.parse.urlsplit(url)
    end = time.monotonic() + timeout_seconds
    while process.poll() is None and time.monotonic() < end:
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
        try:
            connection.request("GET", address.path or "/")
            connection.getresponse().read()
            return
        except (OSError, http.client.HTTPException):
            time.sleep(0.02)
        finally:
            connection.close()
    raise RuntimeError(f"{process.args} does not answer at {url} (exit code {process.poll()}):\n{tail(log)}")


def tail(log):
    """The last lines of a log."""
    with open(log, errors="replace") as lines:
        return "".join(lines.readlines()[-20:])
