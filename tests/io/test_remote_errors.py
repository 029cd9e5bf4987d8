"""Remote shards that cannot be read: at once or within the timeout, an error that says which,
where, why and what to do, without secrets.
"""

import os
import re
import socket
import traceback

import pytest
from pipelines import loaded
from remote import bare, content, cut_at, put_all, samples
from servers.process import free_port
from torch.utils.data.datapipes.iter import IterableWrapper

import wds_pipes as wp
from wds_pipes import ShardError, StateError
from wds_pipes.io.open import Opener
from wds_pipes.io.remote.budget import Reading


def fails(pipe, error=ShardError):
    """The error of a pipe that fails, with what a terminal would show of it."""
    with pytest.raises(error) as caught:
        list(pipe)
    shown = "".join(traceback.format_exception(caught.value))
    assert "testsecret1234" not in shown
    return caught.value


def test_an_object_that_is_not_there(remote):
    """It is asked for once."""
    url = f"{remote.url}/missing.tar"
    error = fails(samples(url, remote))
    assert str(error).startswith(f"shard {url} does not exist (")
    assert str(error).endswith("): check its name.")
    assert error.url == url
    assert len(remote.faults.stats(remote.reads)) == 1
    skipping = samples(url, remote, on_error={FileNotFoundError: "skip"})
    assert list(skipping) == []
    assert skipping.counts()["skipped_shards"] == 1


def test_wrong_keys(s3, local):
    if not s3.real:
        pytest.skip("the imitation of S3 takes any keys")
    s3.direct.client.put_object(Bucket="shards", Key="private.tar", Body=content(local[0]))
    options = {**s3.storage_options, "secret": "wrong-secret"}
    error = fails(samples("s3://shards/private.tar", storage_options=options))
    assert "s3://shards/private.tar may not be read (SignatureDoesNotMatch" in str(error)
    assert "wrong-secret" not in "".join(traceback.format_exception(error))
    assert "{'anon': True}" in str(
        fails(samples("s3://shards/private.tar", storage_options={"anon": True, "endpoint_url": s3.endpoint}))
    )


def test_no_credentials(s3, local, monkeypatch, tmp_path):
    """That public data need none, but say so, is in the message."""
    (url,) = put_all(s3, local[:1])
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    error = fails(samples(url, storage_options={"endpoint_url": s3.endpoint}))
    assert "check your credentials; for public data pass storage_options={'anon': True}" in str(error)
    assert "NoCredentials" in str(error)
    assert len(list(samples(url, storage_options={"endpoint_url": s3.endpoint, "anon": True}))) == 40


@pytest.mark.parametrize(
    ("kind", "host"),
    [("s3", "127.0.0.1"), ("gcs", "127.0.0.1"), ("http", "127.0.0.1"), ("http", "no-such-host.invalid")],
)
def test_nobody_answers(kind, host):
    """A wrong endpoint is found out soon, since nobody has ever answered."""
    endpoint = f"http://{host}:{free_port()}"
    url = {"s3": "s3://b/x.tar", "gcs": "gs://b/x.tar", "http": f"{endpoint}/x.tar"}[kind]
    options = {
        "s3": {"key": "testkey", "secret": "testsecret1234", "endpoint_url": endpoint},
        "gcs": {"token": "anon", "endpoint_url": endpoint},
        "http": {},
    }
    error = fails(samples(url, storage_options=options[kind]))
    assert f"shard {url} cannot be read (" in str(error)
    assert "; 4 requests in" in str(error)
    assert host in str(error)


@pytest.mark.parametrize(("start", "size"), [(0, 0), (1000, 1000)])
def test_a_server_that_accepts_and_never_answers(start, size):
    """Is not the end of the shard where nothing of it should be left."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/x.tar"
        opener = Opener(Reading(timeout_seconds=1, retries=0))
        with pytest.raises(ShardError, match="x.tar cannot be read"):
            opener.open(url, start, size=size).read()


def test_a_state_behind_the_end(remote, local):
    """The shard was replaced by a shorter one; nothing is read as if it were the same."""
    (url,) = put_all(remote, local[:1])
    state = cut_at(samples(url, remote), 30)
    remote.put("d/shard-000000.tar", content(local[0])[:500_000])
    error = fails(loaded(samples(url, remote), state), StateError)
    assert f"of shard {url}" in str(error)
    assert "it was changed since" in str(error)


def test_a_directory_instead_of_an_object(remote, local):
    put_all(remote, local[:1])
    for url in (f"{remote.url}/d", f"{remote.url}/d/"):  # of the list, the second one means its shards
        pipe = IterableWrapper([url]).open_shards(storage_options=remote.storage_options).load_tar().group_by_key()
        assert url in str(fails(pipe))


def test_a_503_that_begins_in_the_middle(remote, local):
    (url,) = put_all(remote, local[:1])
    remote.faults.rules({"match": remote.reads, "status": 503, "skip": 1})
    pipe = samples(url, remote, timeout_seconds=20, retries=3)
    got = []
    with pytest.raises(ShardError) as caught:
        got += map(bare, pipe)
    assert got == [bare(sample) for sample in samples(local[0])][: len(got)]
    assert len(got) == 19  # of the first MiB, but the last, which might not be whole
    assert caught.value.url == url
    assert caught.value.offset is not None
    assert "byte 1048576 cannot be read" in str(caught.value)
    assert pipe.state_dict()["lanes"]["0"]["delivered"] == 19
    remote.faults.rules()
    pipe.load_state_dict(pipe.state_dict())
    assert list(map(bare, pipe)) == list(map(bare, samples(local[0])))[19:]


@pytest.mark.parametrize(("lanes", "ahead"), [(None, 0), (2, 3)])
def test_shards_that_are_missing_are_skipped(web, local, lanes, ahead):
    """Also the first, and several in a row."""
    there = put_all(web, local)
    missing = [there[0].replace("shard-000000", f"missing-{number}") for number in range(6)]
    urls = [*missing[:4], there[0], *missing[4:], *there[1:]]
    pipe = samples(urls, on_error="skip", shards_ahead=ahead)
    source = pipe if lanes is None else wp.PipeLoader(pipe, lanes=lanes)
    assert sorted(str(bare(sample)["__key__"]) for sample in source) == sorted(
        sample["__key__"] for sample in samples(local)
    )
    assert source.counts()["skipped_shards"] == 6


@pytest.mark.parametrize("other", ["content", "size", "less than was read"])
def test_an_object_that_changes_while_it_is_read(remote, local, other):
    """An error, never a splice of both. Of one that has less than was read, the server has nothing
    there (416).
    """
    sizes = {"content": None, "size": 1_100_000, "less than was read": 10_240}
    if other == "content" and remote.kind == "gcs":
        pytest.skip("the imitation of GCS does not say what changes with the content")
    (url,) = put_all(remote, local[:1])
    remote.faults.rules({"match": remote.reads, "skip": 1, "hold": True})
    # a quarter of it passes where the imitation of GCS does not answer a range after the end
    pipe = iter(samples(url, remote, timeout_seconds=20))
    got = [bare(next(pipe))]
    remote.put("d/shard-000000.tar", content(local[1])[: sizes[other]])
    remote.faults.rules()
    with pytest.raises(ShardError, match="was changed while it was read"):
        got += map(bare, pipe)
    assert got == [bare(sample) for sample in samples(local[0])][: len(got)]


def test_an_empty_object_is_what_an_empty_file_is(web, tmp_path):
    path, url = tmp_path / "empty.tar", web.put("empty.tar", b"")
    path.write_bytes(b"")
    assert str(fails(samples(str(path)))).replace(str(path), url) == str(fails(samples(url)))


def test_a_size_that_the_index_does_not_tell(remote, local, tmp_path):
    """Found at the first answer, before a sample is given."""
    remote.put("d/shard-000000.tar", content(local[0]))
    wp.tar.index_shards(local[:1], tmp_path / "index.json")
    url = remote.put("d/shard-000000.tar", content(local[0])[:1_600_000])
    error = fails(samples(url, remote, index=tmp_path / "index.json"))
    assert f"shard {url} has 1600000 bytes, and {os.path.getsize(local[0])} were expected" in str(error)


def test_shards_that_break_off_can_be_skipped_and_counted(remote, local):
    """What came before is given, but for the sample before the gap, which may not be whole; and
    all of the next shard.
    """
    urls = put_all(remote, local[:3])
    remote.faults.rules({"match": "shard-000001", "status": 400, "skip": 1})
    options = {
        "storage_options": remote.storage_options,
        "readahead_bytes": 2 << 20,
        "retries": 2,
        "timeout_seconds": 20,
    }
    pipe = wp.ShardList(urls).open_shards(**options).load_tar(on_error="skip").group_by_key()
    wanted = [bare(sample) for sample in samples(local[:3])]
    assert [bare(sample) for sample in pipe] == wanted[:59] + wanted[80:]
    assert pipe.counts()["damaged"] == 1


@pytest.mark.parametrize(("status", "passed"), [(403, 0), (401, 1), (503, 1)])
def test_an_error_of_the_store_is_never_skipped(remote, local, status, passed):
    """Credentials may have expired, or a server be overloaded: then all shards would be skipped."""
    urls = put_all(remote, local[:2])
    remote.faults.rules({"match": "shard-000000", "status": status, "skip": passed})
    pipe = wp.ShardList(urls).open_shards(
        on_error="skip", storage_options=remote.storage_options, readahead_bytes=1 << 20, connections=2, retries=1
    )
    with pytest.raises(ShardError, match="check your credentials" if status < 500 else "cannot be read"):
        list(pipe.load_tar(on_error="skip").group_by_key(on_error="skip"))


DENIED = (
    "<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Request has expired</Message>"
    "<AWSAccessKeyId>AK1A5ecret</AWSAccessKeyId></Error>"
)
PAYS = '{"error": {"code": 400, "message": "Bucket is a requester pays bucket but no user project provided."}}'
EXPIRED = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
BUSY = {"status": 503, "body": "<Error><Code>SlowDown</Code></Error>"}
ODD = "wrong region\x1b[31m\n\n token=5ecret5ecret Authorization: Bearer 5ecret"
MUCH = "why " * 100_000
STALLED = r"no response in|no byte came for|only \d+ bytes came in"
# a store, the faults of all its answers, options, the words of the error, and how many requests
REFUSALS = {
    "busy S3": ("s3", BUSY, {"retries": 3}, r"cannot be read \(.*(503|SlowDown).*; 4 requests in \d+ s", 4),
    "busy GCS": ("gcs", BUSY, {"retries": 3}, r"cannot be read \(.*503.*; 4 requests in \d+ s", 4),
    "busy web server": ("web", BUSY, {"retries": 3}, r"cannot be read \(.*503.*; 4 requests in \d+ s", 4),
    "no retries of S3": ("s3", BUSY, {"retries": 0}, "; 1 request in", 1),
    "no retries of GCS": ("gcs", BUSY, {"retries": 0}, "; 1 request in", 1),
    "a long wait": (
        "web",
        {"status": 429, "headers": {"Retry-After": "1000"}},
        {"timeout_seconds": 60},
        "the store requested a wait of 1000 s",
        1,
    ),
    "no answer": ("s3", {"latency": 1000}, {"timeout_seconds": 2}, STALLED, None),
    "no further byte": ("web", {"stall_after": 0, "stall": 1000}, {"timeout_seconds": 2}, STALLED, None),
    "compressed": (
        "web",
        {"headers": {"Content-Encoding": "gzip"}},
        {},
        "it is stored with Content-Encoding gzip.*store it without",
        1,
    ),
    "compressed, as no library here unpacks it": (
        "web",
        {"headers": {"Content-Encoding": "br"}},
        {},
        "it is stored with Content-Encoding br.*store it without",
        1,
    ),
    "an expired URL": ("web", {"status": 403, "body": DENIED}, {}, r"AccessDenied: Request has expired\)", 1),
    "who pays": ("gcs", {"status": 400, "body": PAYS}, {}, "Bucket is a requester pays bucket", 1),
    "an expired token": (
        "s3",
        {"status": 400, "body": EXPIRED},
        {},
        "may not be read .*The provided token has expired.*: check your credentials",
        1,
    ),
    "odd text": ("web", {"status": 400, "body": ODD}, {}, "wrong region", 1),
    "much text": ("web", {"status": 400, "body": MUCH}, {}, "why why", 1),
    "much text of S3": (
        "s3",
        {"status": 400, "body": f"<Error><Code>No</Code><Message>{MUCH}</Message></Error>"},
        {},
        "why why",
        1,
    ),
}


@pytest.mark.parametrize("case", REFUSALS.values(), ids=REFUSALS)
def test_the_reason_is_shown_without_secrets(request, local, case):
    """After as many requests as make sense, with what the server has said of it."""
    store, fault, options, words, requests = case
    remote = request.getfixturevalue(store)
    (url,) = put_all(remote, local[:1])
    remote.faults.rules({"match": remote.reads, **fault})
    with pytest.raises(ShardError, match=words) as caught:
        list(samples(url, remote, **{"timeout_seconds": 20, **options}))
    assert caught.value.url == url
    assert requests in (None, len(remote.faults.stats(remote.reads)))
    text = "".join(traceback.format_exception(caught.value))
    assert not re.search("5ecret|testsecret1234|\x1b", text)
    assert len(str(caught.value)) < 1000
    assert len(text) < 20_000


def test_a_signed_url_that_is_refused(web, local):
    (url,) = put_all(web, local[:1])
    web.faults.rules({"match": web.reads, "status": 403, "body": DENIED})
    with pytest.raises(ShardError, match=r"Request has expired.*: its signature.*sign it again.*state fits"):
        list(samples(f"{url}?X-Amz-Expires=60&X-Amz-Signature=5ecret5ecret"))
