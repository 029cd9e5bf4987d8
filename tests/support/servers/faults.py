"""The test's side of the fault proxy: the coming faults, and the requests that came."""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

from servers.process import running


class Request(NamedTuple):
    """A request that a server got.

    Attributes:
        method: such as GET.
        path: with its query.
        range: its Range header, such as bytes=0-99, or None.
        status: what was answered; 0 for a reset instead of an answer, None as long as there is no
            answer.
        sent: bytes of the body that were sent.
        connection: tells one connection from another.
        started: when it came, in seconds.
        ended: when its last bytes were sent, or it was done with otherwise, in seconds, or None.
        live: how many requests were being answered then, with this one; None where that is not
            known.
        faults: the names of its faults.
    """

    method: str
    path: str
    range: str | None
    status: int | None
    sent: int
    connection: int
    started: float
    ended: float | None
    live: int | None
    faults: tuple[str, ...]


class Faults:
    """A fault proxy in front of a server: ``servers/faultproxy.py`` lists the rules."""

    def __init__(self, port):
        self.endpoint = f"http://127.0.0.1:{port}"
        self._port = port

    def rules(self, *rules, seed=0):
        """Put these rules (dicts) in place of those before. All whose ``match`` fits a request
        apply to it, the later ones winning.

        Args:
            rules: as ``servers/faultproxy.py`` lists them.
            seed: decides about ``prob``.

        Raises:
            ValueError: a rule has an unknown name.
        """
        self._call("POST", "/__rules__", {"rules": rules, "seed": seed})

    def stats(self, match=""):
        """The requests seen so far, or those of them whose "METHOD path?query" has a match for
        this pattern.
        """
        seen = [Request(*fields[:-1], tuple(fields[-1])) for fields in self._call("GET", "/__stats__")]
        return [request for request in seen if re.search(match, f"{request.method} {request.path}")]

    def clear(self):
        """Forget rules and requests."""
        self._call("POST", "/__clear__")

    def _call(self, method, path, content=None):
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
        with contextlib.closing(connection):
            connection.request(method, path, json.dumps(content))
            answer = connection.getresponse()
            text = answer.read().decode()
        if answer.status != 200:
            raise ValueError(text)
        return json.loads(text)


@contextlib.contextmanager
def faults_of(endpoint):
    """A fault proxy in front of the server at ``endpoint``."""
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        log = os.path.join(directory, "faults.log")
        script = os.path.join(os.path.dirname(__file__), "faultproxy.py")
        with running(
            sys.executable, script, endpoint.removeprefix("http://"), log=log, stdout=subprocess.PIPE, text=True
        ) as process:
            line = process.stdout.readline()
            if not line:
                with open(log) as output:
                    raise RuntimeError(f"the fault proxy did not start:\n{output.read()}")
            yield Faults(int(line))
