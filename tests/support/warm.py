"""Python programs in new processes that begin with torch imported: forks of a process that waits
for them.

A program runs as ``__main__``, and ends as Python ends. It is for programs that import torch in any
case, and are not about that.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import types

PRELOADED = ["torch.distributed", "wds_pipes.datapipes", "wds_pipes.loader.pipe_loader", "wds_pipes.stages"]
LONGEST = 1 << 17  # bytes of a request


class Program:
    """A program that runs, with those methods of ``subprocess.Popen`` that tests use.

    Args:
        program: the path of a file, or code.
        arguments: of the program.
        environment: None for that of this process.
        directory: the working directory; None for that of this process.
        start_new_session: so that it can be killed with its processes.

    Attributes:
        stdout: what it prints, as a text file.
    """

    def __init__(self, program, *arguments, environment=None, directory=None, start_new_session=False):
        self.returncode = None
        read, write = os.pipe()
        self.stdout, self._stderr = open(read), tempfile.TemporaryFile("w+")
        self._answers, theirs = socket.socketpair()
        request = {
            "program": textwrap.dedent(str(program)),
            "arguments": list(map(str, arguments)),
            "environment": dict(os.environ if environment is None else environment),
            "directory": str(directory or os.getcwd()),
            "start_new_session": start_new_session,
        }
        with theirs, os.fdopen(write, "wb"):
            handed_over = [write, self._stderr.fileno(), theirs.fileno()]
            requests = server()
            socket.send_fds(requests, [json.dumps(request).encode()], handed_over)
        self.pid = self._answer()

    def _answer(self):
        answer = self._answers.recv(4, socket.MSG_WAITALL)
        assert len(answer) == 4, "the process that starts programs is gone"
        return int.from_bytes(answer, "big", signed=True)

    def wait(self):
        """Its exit code, when it has ended; -9 after SIGKILL."""
        if self.returncode is None:
            self.returncode = self._answer()
            self._answers.close()
        return self.returncode

    def poll(self):
        """Its exit code if it has ended, else None."""
        if self.returncode is None:
            try:
                self._answers.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            except BlockingIOError:
                return None
        return self.wait()

    def send_signal(self, number):
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=600):
        """What it prints, and its errors, when it has ended and all processes that it has started,
        or closed their standard output. It is killed after ``timeout`` seconds.
        """
        with self.stdout, self._stderr:
            timer = threading.Timer(timeout, self.kill)
            timer.start()
            printed = self.stdout.read()
            timer.cancel()
            self.wait()
            self._stderr.seek(0)
            return printed, self._stderr.read()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stdout.close()
        self._stderr.close()
        self.wait()


def run(program, *arguments, environment=None, directory=None):
    """Run a program to its end; returns what ``subprocess.run`` does."""
    started = Program(program, *arguments, environment=environment, directory=directory)
    printed, errors = started.communicate()
    return subprocess.CompletedProcess([program, *arguments], started.returncode, printed, errors)


@functools.cache
def server():
    """The socket of the process that starts the programs of this one, and ends with it."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )

    def end():
        mine.close()
        process.wait()

    atexit.register(end)
    return mine


def serve(requests):
    """Start programs until the other end is closed. Returns in each new process, with what was
    requested.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that wait
    while True:
        request, inherited, _, _ = socket.recv_fds(requests, LONGEST, 3)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            break
        for each in inherited:
            os.close(each)
    requests.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    stdout, stderr, answers = inherited
    program = os.fork()
    if program:
        os.close(stdout)
        os.close(stderr)
        os.write(answers, program.to_bytes(4, "big"))
        ended = os.waitid(os.P_PID, program, os.WEXITED | os.WNOWAIT)
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        os.write(answers, code.to_bytes(4, "big", signed=True))
        os.read(answers, 1)  # it stays a zombie until the test has waited for it, as with subprocess
        os._exit(0)
    os.close(answers)
    for each, number in ((stdout, 1), (stderr, 2)):
        os.dup2(each, number)
        os.close(each)
    return json.loads(request)


def become(request):
    """Let this process be that of the program; returns its code and its namespace."""
    import numpy as np

    if request["start_new_session"]:
        os.setsid()
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    np.random.seed()
    program = request["program"]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    is_file = os.path.isfile(program)
    sys.argv = [program if is_file else "-c", *request["arguments"]]
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path[1:]]
    own = [] if os.environ.get("PYTHONSAFEPATH") else [os.path.dirname(program) if is_file else ""]
    sys.path[:1] = own + added
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")
    if not is_file:
        return compile(program, "<string>", "exec"), vars(main)
    main.__file__ = program
    with open(program) as file:
        return compile(file.read(), program, "exec"), vars(main)


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    exec(*become(serve(socket.socket(fileno=int(sys.argv[1])))))
