"""The servers that other tests read from: they serve shards unchanged, by options and by
environment variables, and make the requested faults.
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
import time
import urllib.parse

import fsspec
import psutil
import pytest
from pipelines import keys_of
from remote import bare, content
from scripts import run_code
from servers import Missing, moto, paced_web, plain_web
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


def test_a_shard_is_served_unchanged(remote, shard):
    """The proxy sees the requests that read it, and put() replaces it."""
    remote.put("a/x.tar", b"other")
    url = remote.put("a/x.tar", content(shard))
    assert url == f"{remote.url}/a/x.tar"
    assert samples(url, storage_options=remote.storage_options) == samples(shard)
    reads = remote.faults.stats(remote.reads)
    assert sum(read.sent for read in reads) >= len(content(shard))
    assert {read.status for read in reads} <= {200, 206}
    assert samples(
        url.replace(remote.endpoint, remote.direct.endpoint), storage_options=remote.direct.storage_options
    ) == samples(shard)
    assert remote.faults.stats(remote.reads) == reads
    remote.faults.clear()
    assert remote.faults.stats() == []


def test_environment_variables_replace_storage_options(s3, gcs, web, shard):
    """In a new process."""
    urls = [store.put("x.tar", content(shard)) for store in (s3, gcs, web)]
    code = """
        import sys
        import wds_pipes as wp

        for url in sys.argv[1:]:
            print(*[sample["__key__"] for sample in wp.ShardList(url).open_shards().load_tar().group_by_key()])
    """
    environment = {**os.environ, **s3.environment, **gcs.environment, **web.environment}
    found = run_code(code, *urls, environment=environment, has_torch=True)
    assert found.splitlines() == [" ".join(keys_of(samples(shard)))] * 3
    assert all(store.faults.stats(store.reads) for store in (s3, gcs, web))


def test_wrong_keys_are_refused(s3, shard):
    if not s3.real:
        pytest.skip("moto accepts any keys")
    url = s3.put("x.tar", content(shard))
    with pytest.raises(wp.ShardError, match="may not be read: check your credentials"):
        samples(url, storage_options={**s3.storage_options, "secret": "wrong"})
    assert 403 in {request.status for request in s3.faults.stats()}
    with pytest.raises(wp.ShardError, match="may not be read"):
        samples(url, storage_options={**s3.storage_options, "key": "nobody"})


def test_an_error_of_the_server(remote, shard):
    """The client gets a 503 or tries again; the proxy sees both."""
    url = remote.put("x.tar", content(shard))
    remote.faults.rules({"status": 503, "times": 1})
    with contextlib.suppress(wp.ShardError):
        assert samples(url, storage_options=remote.storage_options) == samples(shard)
    first = remote.faults.stats()[0]
    assert (first.status, first.faults) == (503, ("status",))
    remote.faults.rules()
    assert samples(url, storage_options=remote.storage_options) == samples(shard)


@pytest.mark.parametrize(
    ("rule", "status", "expected"),
    [
        ({"ignore_range": True}, 200, DATA),
        ({"shift_range": 3}, 206, DATA[103:203]),
        ({"truncate": 30}, 206, DATA[100:130]),
        ({"flip": 5}, 206, DATA[100:105] + bytes([DATA[105] ^ 1]) + DATA[106:200]),
    ],
)
def test_wrong_bytes_that_no_client_notices(remote, rule, status, expected):
    """Also where the server checks signatures."""
    url = remote.put("x.bin", DATA)
    remote.faults.rules({"match": remote.reads, **rule})
    fs, path = fsspec.core.url_to_fs(url, **remote.storage_options)
    assert fs.cat_file(path, start=100, end=200) == expected
    (read,) = remote.faults.stats(remote.reads)
    assert (read.status, read.range, read.sent, read.faults) == (status, "bytes=100-199", len(expected), tuple(rule))


def get(store, name="x.bin", *, connection=None, **headers):
    """What a plain client gets: status, headers and body, or the error."""
    opened = connection or http.client.HTTPConnection(urllib.parse.urlsplit(store.endpoint).netloc, timeout=60)
    with contextlib.nullcontext() if connection else contextlib.closing(opened):
        try:
            opened.request("GET", f"/{name}", headers={"Range": "bytes=100-199", **headers})
            answer = opened.getresponse()
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
    status, headers, body = got(ignore_range=True)
    assert (status, headers["Content-Range"], body) == (200, None, DATA)


@pytest.mark.parametrize(
    "rule", [{"latency": 0.3}, {"stall_after": 40, "stall": 0.3}, {"trickle": [10, 0.03]}, {"rate": 5e6}]
)
def test_slow_answers(web, rule):
    """They are right in the end."""
    data = DATA * 300
    web.put("x.bin", data)
    web.faults.rules(rule)
    start = time.perf_counter()
    wanted = slice(0, 3_000_000) if "rate" in rule else slice(100, 200)
    assert get(web, Range=f"bytes={wanted.start}-{wanted.stop - 1}")[2] == data[wanted]
    assert time.perf_counter() - start > 0.27  # a busy machine only makes it longer


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


def test_connections_are_kept(web):
    """Also after an error of the server; each connection has its own number."""
    web.put("x.bin", DATA)
    with contextlib.closing(http.client.HTTPConnection(urllib.parse.urlsplit(web.endpoint).netloc)) as connection:
        web.faults.rules({"skip": 1, "times": 1, "status": 503})
        assert [get(web, connection=connection)[0] for _ in range(3)] == [206, 503, 206]
    get(web)
    first, *others, last = [request.connection for request in web.faults.stats()]
    assert others == [first, first]
    assert last != first


def test_a_changed_object_has_another_etag(remote):
    """Also where it changes within a second and keeps its size. A client that requests the old one
    gets an error.
    """
    fs, path = fsspec.core.url_to_fs(remote.put("x.bin", DATA), **remote.storage_options, use_listings_cache=False)
    tags = [fs.info(path).get("ETag") or fs.info(path).get("etag")]
    remote.put("x.bin", DATA[::-1])
    fs.invalidate_cache()
    tags.append(fs.info(path).get("ETag") or fs.info(path).get("etag"))
    assert None not in tags
    assert tags[0] != tags[1]


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


def test_a_slow_network(shard):
    """A latency before each answer, and a cap on the bandwidth of a connection; the server's own
    log counts the requests.
    """
    try:
        with paced_web(rate_mb=10, latency=0.2) as store:
            url = store.put("x.tar", content(shard))
            assert samples(url) == samples(shard)
            store.put("x.bin", bytes(4_000_000))
            start = time.perf_counter()
            assert len(get(store, Range="bytes=0-")[2]) == 4_000_000
            # seconds: 0.2 of latency, and 4 MB at 10 MB a second less what is sent at once
            assert time.perf_counter() - start > 0.4
            last = store.requests()[-1]
            assert (last.method, last.path, last.range, last.status, last.sent) == (
                "GET",
                "/x.bin",
                "bytes=0-",
                206,
                4_000_000,
            )
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
