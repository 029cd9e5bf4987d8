"""Tests wait for conditions and measure costs in counts, never by the clock."""

import sys
import time

from wds_pipes.io.threads import DaemonThreads


def wait_for(condition, seconds=120):
    """Return as soon as ``condition()`` is true.

    The limit is only there so that a defect fails instead of hanging.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def in_time(call):
    """What ``call()`` returns or raises in another thread, which must end in time."""
    return DaemonThreads(1).submit(call).result(60)


def calls(function):
    """How many calls of functions, in Python and in C, ``function()`` makes."""
    count = 0

    def note(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count
