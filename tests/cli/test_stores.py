"""Commands that read from stores and write to them: what goes wrong there is an error, or tried
again, and never another result.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from commands import outputs, run_command
from fsspec.implementations.memory import MemoryFile
from tars import tar
from waiting import wait_for

from wds_pipes.io import outputs as writing
from wds_pipes.io.outputs import open_output
from wds_pipes.io.remote.budget import Reading

SECRET = "canary-in-query"


@pytest.fixture(autouse=True)
def stores_are_asked_again_at_once(monkeypatch):
    monkeypatch.setattr("wds_pipes.io.remote.metadata.READING", Reading(retries=2))
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """Two shards with an index and offsets."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "in").mkdir()
    for key in "abcdef":
        (folder / "in" / f"{key}.txt").write_bytes(key.encode())
    run_command("create", folder / "in", folder / "out", "--max-samples", 3)
    return folder / "out"


def options_of(store):
    """The storage options, without a second try by the library where it can be turned off."""
    once = {"config_kwargs": {"retries": {"total_max_attempts": 1}}} if store.kind == "s3" else {}
    return ["--storage-options", json.dumps({**store.storage_options, **once})]


def put(store, files, folder):
    for name, data in files.items():
        store.put(f"{folder}/{name}", data)
    return f"{store.url}/{folder}"


@pytest.mark.parametrize(("kind", "name"), [("web", "0.tar.idx"), ("web", "1.tar"), ("s3", "0.tar.idx")])
def test_an_error_is_not_a_missing_file(kind, name, shards, tmp_path, request):
    """The copy would be without the file, or a shard would be said not to exist."""
    store = request.getfixturevalue(kind)
    source = put(store, outputs(shards), f"errors-{name[:5]}")
    urls = [f"{source}/shard-00000{number}.tar" for number in range(2)]
    unlisted = {"match": "^GET .*list-type", "status": 403}  # else the listing says what is beside a shard
    store.faults.rules(unlisted, {"match": f"^(HEAD|GET) .*{name}$", "status": 500})
    result = run_command("download", *urls, tmp_path / "out", *options_of(store), code=1)
    assert "500" in result.stderr or "Internal Server Error" in result.stderr
    assert "cannot be found" not in result.stderr
    assert not list(tmp_path.glob("out/*.tar"))
    store.faults.clear()
    run_command("download", *urls, tmp_path / "out", *options_of(store))
    assert outputs(tmp_path / "out") == outputs(shards)


def test_an_error_of_gcs_is_one_line(gcs, shards):
    """gcsfs logs a traceback of it, which Python prints where logging is not set up."""
    gcs.faults.rules({"match": "^POST ", "status": 401})
    command = [sys.executable, "-m", "wds_pipes", "filter", shards, f"{gcs.url}/refused", *SECOND]
    environment = {**os.environ, **gcs.environment}
    done = subprocess.run(command, env=environment, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.strip().count("\n")) == (1, 0)
    assert "check your credentials" in done.stderr


SECOND = ("--every", "2")


def test_errors_that_pass_are_tried_again(web, shards, tmp_path):
    """Also by the requests of fsspec; and a mark of an input is the same with and without them."""
    command = (
        "filter",
        put(web, outputs(shards), "passing") + "/shard-{000000..000001}.tar",
        tmp_path / "out",
        *SECOND,
    )
    web.faults.rules({"match": "HEAD", "drop": True}, {"match": "GET", "times": 2, "status": 503})
    run_command(*command)
    web.faults.clear()
    assert "(2 of 2 there already)" in run_command(*command).stdout


def test_what_may_not_be_read_is_not_beside_a_shard(s3, shards, tmp_path):
    """A store that may not be listed says of a file that does not exist that it may not be read."""
    content = (shards / "shard-000000.tar").read_bytes()
    url = put(s3, {"0.tar": content}, "forbidden") + "/0.tar"
    unlisted = {"match": "list-type", "status": 403}
    s3.faults.rules(unlisted, {"match": "HEAD .*(json|idx|keys|len|parquet)", "status": 403})
    run_command("download", url, tmp_path, *options_of(s3))
    assert outputs(tmp_path) == {"0.tar": content}
    s3.faults.rules(unlisted, {"match": "HEAD .*0.tar$", "status": 403})
    told = run_command("download", url, tmp_path / "b", *options_of(s3), code=1).stderr
    assert "check your credentials" in told


@pytest.mark.parametrize(
    ("command", "kind"), [("download", "s3"), ("filter", "gcs"), ("reshard", "s3"), ("concat", "gcs"), ("index", "s3")]
)
def test_a_directory_without_its_slash_is_no_shard(kind, command, shards, tmp_path, request):
    """fsspec says that it has a size, which is 0."""
    store = request.getfixturevalue(kind)
    source = put(store, {"0.tar": (shards / "shard-000000.tar").read_bytes()}, "directory")
    dest = {"concat": [tmp_path / "out.tar"], "index": ["-o", tmp_path / "index.json"]}.get(command, [tmp_path / "out"])
    more = SECOND if command == "filter" else ()
    told = run_command(command, source, *dest, *more, *options_of(store), code=2).stderr
    assert "directory: to read the shards in it, pass it with '/' at its end" in told
    assert told.count("\n") == 1
    assert not list(tmp_path.iterdir())


NAMES = ["a b.txt", "p+q.txt", "ü/é x.txt", "x/1.txt", "x.txt"]


@pytest.fixture
def files(tmp_path):
    """Files whose names libraries quote, and the shards of them."""
    for name in NAMES:
        path = tmp_path / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    run_command("create", tmp_path / "files", tmp_path / "local")
    return tmp_path / "files"


def test_shards_of_the_files_in_a_store(remote, files, tmp_path):
    """In the order of a disk; a web server has no list of its files."""
    source = put(remote, outputs(files), "in")
    if remote.kind == "http":
        assert (
            "name them in a list" in run_command("create", source, tmp_path / "out", "--from", "files", code=2).stderr
        )
        return
    if remote.kind == "s3":
        for name in ("in/", "in/x/"):  # as the consoles of stores make directories
            remote.direct.client.put_object(Bucket="shards", Key=name, Body=b"")
    run_command("create", source, tmp_path / "out", "--from", "files", *options_of(remote))
    assert outputs(tmp_path / "out") == outputs(tmp_path / "local")


def test_a_file_that_is_replaced_after_it_was_listed(s3, tmp_path):
    """By one of the same size: its ETag is another one."""
    source = put(s3, {"a.txt": b"1", "b.txt": b"2"}, "replaced")
    s3.faults.rules({"match": "GET .*b.txt", "headers": {"ETag": '"other"'}})
    refused = run_command("create", source, tmp_path / "out", "--from", "files", *options_of(s3), code=1)
    assert "b.txt was changed after it was listed" in refused.stderr
    assert not list((tmp_path / "out").glob("*.tar"))


def test_parquet_of_a_web_server(web, shards, tmp_path):
    """Reading goes on after faults; an error is one line without what is secret in the URL."""
    pytest.importorskip("pyarrow")
    run_command("export", shards, tmp_path / "tables", "--to", "parquet")
    run_command("convert", tmp_path / "tables", tmp_path / "local", "--from", "parquet")
    put(web, outputs(tmp_path / "tables"), "tables")
    urls = f"{web.url}/tables/shard-{{000000..000001}}.parquet?token={SECRET}"
    web.faults.rules(
        {"match": "GET", "times": 2, "reset_after": 100}, {"match": "GET", "skip": 3, "times": 2, "status": 503}
    )
    run_command("convert", urls, tmp_path / "out", "--from", "parquet")
    assert outputs(tmp_path / "out") == outputs(tmp_path / "local")
    web.faults.rules({"match": "GET", "skip": 1, "status": 403})
    refused = run_command("convert", urls, tmp_path / "other", "--from", "parquet", code=1)
    assert refused.stderr.count("\n") == 1
    assert SECRET not in refused.output


def test_values_of_two_kinds_show_no_secret(web, tmp_path):
    for number, value in enumerate((b"1", b'"a"')):
        web.put(f"kinds/{number}.tar", tar([("a.json", b'{"x": %s}' % value)]))
    urls = f"{web.url}/kinds/{{0..1}}.tar?token={SECRET}"
    refused = run_command("sort", urls, tmp_path / "out", "--by", "json:x", code=2)
    assert "is a number in" in refused.stderr
    assert SECRET not in refused.output


# Uploads in parts


@pytest.mark.parametrize("made", ["^POST .*uploads", "^PUT .*partNumber"], ids=["begin", "part"])
def test_an_upload_that_is_interrupted_is_aborted(s3, monkeypatch, made):
    """Also if the request that begins it, or sends a part, ends after the interruption."""
    monkeypatch.setattr("s3fs.S3FileSystem.default_block_size", 5 << 20)
    s3.faults.rules({"match": made, "hold": True})

    def interrupt():
        wait_for(lambda: s3.faults.stats(made))
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        s3.faults.rules()

    file = open_output(f"{s3.url}/interrupted.bin", storage_options=s3.storage_options)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        file.write(bytes(6 << 20))
    file.discard()
    thread.join()
    assert "interrupted.bin" not in uploads(s3)


def test_a_signal_while_the_thread_of_a_request_starts(monkeypatch):
    """The upload is aborted after it."""
    events, start, write = [], threading.Thread.start, MemoryFile.write

    def slow(file, data):
        time.sleep(0.3)
        events.append("sent")
        return write(file, data)

    def interrupted(thread):
        start(thread)
        raise KeyboardInterrupt

    monkeypatch.setattr(MemoryFile, "write", slow)
    monkeypatch.setattr(MemoryFile, "discard", lambda file: events.append("aborted"))
    file = open_output("memory://interrupted.bin")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            file.write(bytes(writing._AT_ONCE))
    file.discard()
    assert events == ["sent", "aborted"]


def test_parts_are_small_and_grow(s3, monkeypatch):
    """A process holds several copies of a part; and an object has at most 10 000."""
    counts = []
    for most in (1000, 1):
        monkeypatch.setattr(writing, "_PARTS", most)
        file = open_output(f"{s3.url}/{most}-parts.bin", storage_options=s3.storage_options)
        for _ in range(24):
            file.write(bytes(1 << 20))
        file.commit()
        counts.append(len(s3.faults.stats(f"PUT .*/{most}-parts.*partNumber")))
        assert s3.client.head_object(Bucket="shards", Key=f"{most}-parts.bin")["ContentLength"] == 24 << 20
    assert counts[0] == 5
    assert counts[1] < counts[0]


def uploads(s3):
    """The keys of uploads that are not complete."""
    return [upload["Key"] for upload in s3.client.list_multipart_uploads(Bucket="shards").get("Uploads", [])]
