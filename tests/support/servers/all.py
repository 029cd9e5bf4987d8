"""Every server, each started when it is first used."""

from contextlib import ExitStack
from functools import cached_property

from servers.faults import faults_of
from servers.gcs import gcs_emulator
from servers.process import Missing
from servers.s3 import ceph, moto
from servers.web import nginx, plain_web


class Servers:
    """A block in which ``s3``, ``gcs`` and ``web`` are stores behind fault proxies; the first
    use of each starts it, or raises Missing.
    """

    def __init__(self):
        self._stack = ExitStack()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._stack.close()

    @cached_property
    def s3(self):
        return self._start(ceph, moto)

    @cached_property
    def gcs(self):
        return self._start(gcs_emulator)

    @cached_property
    def web(self):
        return self._start(nginx, plain_web)

    def _start(self, *ways):
        """The first of these servers that is installed."""
        missing = []
        for way in ways:
            try:
                store = self._stack.enter_context(way())
            except Missing as error:
                missing.append(str(error))
            else:
                return store.behind(self._stack.enter_context(faults_of(store.endpoint)))
        raise Missing("; or ".join(missing))
