"""Ctrl-C at the worst moments: inside multiprocessing, where a message may be cut or a process may
not be registered yet.

Each test runs a script, which must end: its error is Ctrl-C, and none of its processes is left.
"""

import pytest
from scripts import run_file, run_proof

from wds_pipes.testing import make_shards

SCRIPT = '''
import multiprocessing.connection
import multiprocessing.process
import os
import signal
import sys
import warnings

import wds_pipes as wp

warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
MAIN = os.getpid()


def keys_of(samples):
    return [sample["__key__"] for sample in samples]


def before_call(owner, name, number, what):
    """Let something happen in the main process, before a function is called for the ``number``th time."""
    original, calls = getattr(owner, name), []

    def call(*arguments, **options):
        calls.append(None)
        if len(calls) == number and os.getpid() == MAIN:
            what(*arguments)
        return original(*arguments, **options)

    setattr(owner, name, call)


def ctrl_c(*_):
    signal.raise_signal(signal.SIGINT)


def no_fork():
    raise BlockingIOError("Resource temporarily unavailable")


def half_a_command(connection, buffer):
    os.write(connection.fileno(), buffer[:3])
    raise KeyboardInterrupt


urls, where = sys.argv[1].split(), sys.argv[2]
pipe = wp.ShardList(urls).open_shards().load_tar().group_by_key()
loader = wp.PipeLoader(pipe, batch_size=2, collate=keys_of, num_workers=2, persistent_workers=where != "end", multiprocessing_context="fork")
'''  # noqa: E501

START = """
before_call(os, "fork", 2, no_fork if where == "no process" else ctrl_c)
next(iter(loader))
"""

COMMAND = """
items = iter(loader)
first = next(items)
before_call(multiprocessing.connection.Connection, "_send", 1, half_a_command)
try:
    list(items)
except KeyboardInterrupt:
    print("interrupted")
if where == "again":
    loader.load_state_dict(loader.state_dict())
    print(sum(map(len, [first, *loader])))
elif where == "dropped":
    del loader, items
"""

END = """
before_call(multiprocessing.process.BaseProcess, "join", 1, ctrl_c)
try:
    print(len(list(loader)))
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.fixture(scope="module")
def urls(tmp_path_factory):
    return " ".join(make_shards(tmp_path_factory.mktemp("shards"), shards=4, samples=6))


@pytest.fixture
def run(urls, tmp_path):
    """The exit code and both streams of a script; none of its processes is left."""

    def run(code, where):
        ended = run_file(tmp_path / "script.py", SCRIPT + code, urls, where, has_torch=True)
        return ended.returncode, ended.stdout, ended.stderr

    return run


def test_an_interrupt_while_workers_start(run):
    """The interrupt waits until all have started: then they are known and can be ended."""
    code, _, errors = run(START, "interrupt")
    assert "KeyboardInterrupt" in errors
    assert code != 0


def test_a_worker_that_cannot_be_started(run):
    """The workers before it end and do not delay the end of Python."""
    code, _, errors = run(START, "no process")
    assert "BlockingIOError: Resource temporarily unavailable" in errors
    assert code == 1


@pytest.mark.parametrize("where", ["end", "dropped"])
def test_an_interrupt_within_a_command(where, run):
    """Python ends, whether the loader ends with it or before."""
    assert run(COMMAND, where)[:2] == (0, "interrupted\n")


def test_a_new_iterator_after_an_interrupt_within_a_command(run):
    assert run(COMMAND, "again")[:2] == (0, "interrupted\n24\n")


def test_an_interrupt_while_workers_end(run):
    """All batches were returned; the interrupt comes after the workers have ended."""
    assert run(END, "end")[:2] == (0, "interrupted\n")


FORK = """
items = iter(loader)
first = next(items)
if os.fork() == 0:
    sys.exit(0)  # not os._exit(): what is registered to run at the end does
os.wait()
print(sum(map(len, [first, *items])))
"""


def test_the_end_of_a_forked_child_leaves_the_workers_alone(run):
    assert run(FORK, "fork")[:2] == (0, "24\n")


AT_A_CUT = """
list(loader.with_epoch(batches=3))
if os.fork() == 0:
    print(list(loader), flush=True)
    sys.exit(0)
os.wait()
print(list(loader))
"""


def test_a_forked_child_goes_on_from_a_cut(run):
    """With workers of its own: those of its parent stay."""
    code, printed, _ = run(AT_A_CUT, "fork")
    of_child, of_parent = printed.splitlines()
    assert code == 0
    assert of_child == of_parent != "[]"


@pytest.mark.slow
def test_interrupts_at_random_moments():
    """A few rounds of tests/proofs/interrupts.py, with 0 and 2 workers.

    In a new process, since an interrupt may leave locks of Python held.
    """
    run = run_proof("interrupts.py", "--rounds", 4, "--seed", 3, has_torch=True)
    assert run.returncode == 0, run.stdout + run.stderr
