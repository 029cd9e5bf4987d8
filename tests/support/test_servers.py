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
from remote import bare, content
from servers import Missing, moto, plain_web
from waiting import wait_for

import wds_pipes as wp
from wds_pipes.testing import make_shards

DATA = bytes(range(256)) * 40


@pytest.fixture(scope="session")
def shard(tmp_path_factory):
    """The path of a shard."""
    (path,) = make_shards(tmp_path_factory.mktemp("served"), shards=1, samples=40, fields=("txt", "json"))
    return path


def samples(url, **options):
    """All samples without their URLs."""
    return list(map(bare, wp.ShardList(url).open_shards(**options).load_tar().group_by_key()))


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


def test_what_a_client_sees_of_each_fault(web):
    web.put("x.bin", DATA)

    def got(**rule):
        web.faults.rules(rule)
        return get(web)

    status, headers, body = got()
    assert (status, headers["Content-Range"], headers["Content-Length"], body) == (
        206,
        f"bytes 100-199/{len(DATA)}",
        "100",
        DATA[100:200],
    )
    status, headers, body = got(status=429, headers={"Retry-After": "7"}, body="slow down")
    assert (status, headers["Retry-After"], body) == (429, "7", b"slow down")
    assert got(headers={"ETag": '"other"'})[1].get_all("ETag") == ['"other"']
    assert isinstance(got(drop=True), ConnectionResetError)
    assert web.faults.stats()[-1].status == 0
    assert isinstance(got(reset_after=40), ConnectionResetError)
    assert web.faults.stats()[-1].sent == 40
    for rule in ({"close_after": 40}, {"add_length": 10}):
        error = got(**rule)
        assert isinstance(error, http.client.IncompleteRead)
        assert error.partial == DATA[100 : 140 if "close_after" in rule else 200]
    assert got(add_length=-10)[2] == DATA[100:190]
    status, headers, body = got(no_length=True)
    assert (headers["Content-Length"], body) == (None, DATA[100:200])
    status, headers, body = got(truncate=30)
    assert (status, headers["Content-Range"], headers["Content-Length"], body) == (
        206,
        f"bytes 100-129/{len(DATA)}",
        "30",
        DATA[100:130],
    )
    status, headers, body = got(shift_range=3)
    assert (status, headers["Content-Range"], body) == (206, f"bytes 100-199/{len(DATA)}", DATA[103:203])
    assert got(flip=5)[2] == DATA[100:105] + bytes([DATA[105] ^ 1]) + DATA[106:200]
    status, headers, body = got(ignore_range=True)
    assert (status, headers["Content-Range"], body) == (200, None, DATA)


def test_which_requests_get_a_fault(web):
    web.put("x.bin", DATA)
    web.put("y.bin", DATA)

    def statuses(*names):
        return [get(web, name)[0] for name in names]

    web.faults.rules({"match": "GET .*x.bin", "skip": 1, "times": 2, "status": 503})
    assert statuses("x.bin", "y.bin", "x.bin", "x.bin", "y.bin", "x.bin") == [206, 206, 503, 503, 206, 206]
    assert [request.status for request in web.faults.stats("x.bin")] == [206, 503, 503, 206]
    web.faults.rules({"status": 503, "prob": 0.5}, seed=1)
    some = statuses(*["x.bin"] * 20)
    assert set(some) == {206, 503}
    web.faults.rules({"status": 503, "prob": 0.5}, seed=1)
    assert statuses(*["x.bin"] * 20) == some
    web.faults.rules({"status": 503}, {"match": "y.bin", "status": 429})
    assert statuses("x.bin", "y.bin") == [503, 429]
    with pytest.raises(ValueError, match="a rule has no statsu; it may have"):
        web.faults.rules({"statsu": 503})
    with pytest.raises(ValueError, match="unterminated"):
        web.faults.rules({"match": "("})


def test_the_imitations(shard):
    """They serve where Ceph or nginx is not installed."""
    for way in (moto, plain_web):
        try:
            with way() as store:
                url = store.put("x.tar", content(shard))
                assert samples(url, storage_options=store.storage_options) == samples(shard)
                assert not store.real
                if store.kind == "http":
                    store.put("x.bin", DATA)
                    status, headers, body = get(store)
                    assert (status, headers["Content-Range"], body) == (
                        206,
                        f"bytes 100-199/{len(DATA)}",
                        DATA[100:200],
                    )
                    assert get(store, **{"If-Match": '"other"'})[0] == 412
        except Missing as error:
            pytest.skip(str(error))


def test_servers_die_with_their_process(tmp_path):
    """Also where that is killed."""
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    code = """
        import json, psutil, sys
        from servers import Missing, Servers

        with Servers() as servers:
            for name in ("s3", "gcs", "web"):
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
        assert len(started) >= 2
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(map(running, started)))


def running(process):
    """Whether the process runs: a dead one may stay in the table until its new parent has reaped
    it.
    """
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False
