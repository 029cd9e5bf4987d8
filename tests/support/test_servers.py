"""The servers that other tests read from: they make the requested faults, and die with their
process.
"""

import contextlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import urllib.parse

import psutil
import pytest
from waiting import wait_for

DATA = bytes(range(256)) * 40


def get(store, name="x.bin", **headers):
    """What a plain client gets: status, headers and body, or the error."""
    connection = http.client.HTTPConnection(urllib.parse.urlsplit(store.endpoint).netloc, timeout=60)
    with contextlib.closing(connection):
        try:
            connection.request("GET", f"/{name}", headers={"Range": "bytes=100-199", **headers})
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        except (OSError, http.client.HTTPException) as error:
            return error


RANGE, SIZE = f"bytes 100-199/{len(DATA)}", len(DATA)
FLIPPED = DATA[100:105] + bytes([DATA[105] ^ 1]) + DATA[106:200]
ANSWERS = [
    ({}, 206, {"Content-Range": RANGE, "Content-Length": "100"}, DATA[100:200]),
    ({"status": 429, "headers": {"Retry-After": "7"}, "body": "slow"}, 429, {"Retry-After": "7"}, b"slow"),
    ({"headers": {"ETag": '"other"'}}, 206, {"ETag": '"other"'}, DATA[100:200]),
    ({"add_length": -10}, 206, {}, DATA[100:190]),
    ({"no_length": True}, 206, {"Content-Length": None}, DATA[100:200]),
    ({"truncate": 30}, 206, {"Content-Range": f"bytes 100-129/{SIZE}", "Content-Length": "30"}, DATA[100:130]),
    ({"flip": 5}, 206, {}, FLIPPED),
    ({"ignore_range": True}, 200, {"Content-Range": None}, DATA),
]


ENDS = [  # with the status, and how many bytes were sent
    ({"drop": True}, 0, 0, ConnectionResetError),
    ({"reset_after": 40}, 206, 40, ConnectionResetError),
    ({"close_after": 40}, 206, 40, http.client.IncompleteRead),
    ({"add_length": 10}, 206, 100, http.client.IncompleteRead),
]


def test_what_a_client_sees_of_each_fault(web):
    web.put("x.bin", DATA)
    for rule, status, headers, body in ANSWERS:
        web.faults.rules(rule)
        answer = get(web)
        assert (answer[0], answer[2]) == (status, body), rule
        assert {name: answer[1][name] for name in headers} == headers, rule
    for rule, status, sent, error in ENDS:
        web.faults.rules(rule)
        assert isinstance(get(web), error), rule
        assert (web.faults.stats()[-1].status, web.faults.stats()[-1].sent) == (status, sent), rule


@pytest.mark.parametrize(
    ("rules", "statuses"),
    [
        ([{"match": "GET .*x.bin", "skip": 1, "times": 2, "status": 503}], [206, 206, 503, 503, 206, 206]),
        ([{"status": 503}, {"match": "y.bin", "status": 429}], [503, 429, 503, 503, 429, 503]),
    ],
)
def test_which_requests_get_a_fault(web, rules, statuses):
    web.put("x.bin", DATA)
    web.put("y.bin", DATA)
    web.faults.rules(*rules)
    assert [get(web, f"{name}.bin")[0] for name in "xyxxyx"] == statuses
    assert [request.status for request in web.faults.stats("y.bin")] == [statuses[1], statuses[4]]
    with pytest.raises(ValueError, match="a rule has no statsu; it may have"):
        web.faults.rules({"statsu": 503})


def test_servers_die_with_their_process(tmp_path):
    """Also where that is killed."""
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    code = """
        import json, psutil, sys
        from servers import Missing, Servers

        with Servers() as servers:
            for name in ("gcs", "web"):
                try:
                    getattr(servers, name)
                except Missing:
                    pass
            print(json.dumps([process.pid for process in psutil.Process().children(recursive=True)]), flush=True)
            sys.stdin.read()
    """
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__), "TMPDIR": str(tmp_path)}
    run = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True) as process:
        started = [psutil.Process(pid) for pid in json.loads(process.stdout.readline())]
        assert len(started) >= 1
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(map(running, started)))


def running(process):
    """Whether the process runs: a dead one may stay in the table until its new parent has reaped
    it.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
