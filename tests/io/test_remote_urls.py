"""Other ways to name remote shards, and to say how to reach them."""

import os
import subprocess
import sys
import textwrap

import fsspec
import psutil
import pytest
from pipelines import loaded
from remote import bare, content, cut_at, put_all, samples
from serving import Quiet, Ranged, serving

from wds_pipes import ShardError
from wds_pipes.testing import make_shards

NAMES = ["a b.tar", "a#b.tar", "a%20b.tar", "a+b.tar", "größe.tar", "a&b=c.tar", "a;b.tar", "a'b.tar", "100%.tar"]


def test_odd_names(remote, tmp_path):
    """S3 and GCS URLs hold names as they are, http URLs hold them encoded."""
    (path,) = make_shards(tmp_path, shards=1, samples=3)
    names = [name for name in NAMES if remote.kind != "gcs" or ";" not in name]  # its imitation does not take it
    urls = [remote.put(f"odd/{name}", content(path)) for name in names]
    assert list(map(bare, samples(urls, remote))) == list(map(bare, samples(path))) * len(urls)


def test_memory_and_files(local):
    fsspec.filesystem("memory").pipe("/remote/x.tar", content(local[0]))
    wanted = list(map(bare, samples(local[0])))
    assert list(map(bare, samples("memory://remote/x.tar"))) == wanted
    assert list(map(bare, samples(f"file://{local[0]}"))) == wanted


def test_chained_urls(remote, local, tmp_path):
    """fsspec's own cache in front; its options stand under the protocols' names."""
    (url,) = put_all(remote, local[:1])
    options = {url.partition(":")[0]: remote.storage_options, "simplecache": {"cache_storage": str(tmp_path)}}
    for _ in range(2):
        assert list(map(bare, samples(f"simplecache::{url}", storage_options=options))) == list(
            map(bare, samples(local[0]))
        )
    assert len(os.listdir(tmp_path)) >= 1


class Gateway(Quiet):
    """Answers as the gateway of an AIStore does: it sends everybody on to a target."""

    target = ""

    def do_GET(self):
        self.send_response(307 if self.path.endswith("?provider=ais") else 400)
        self.send_header("Location", f"{self.target}{self.path}")
        self.send_header("Content-Length", "0")
        self.end_headers()


def test_aistore(web, local, monkeypatch):
    """By its REST interface, through the redirect."""
    monkeypatch.delenv("AIS_ENDPOINT", raising=False)
    with pytest.raises(ShardError, match="AIS_ENDPOINT"):
        list(samples("ais://bucket/x.tar"))
    web.put("v1/objects/bucket/a#b/x y.tar", content(local[0]))
    with serving(Gateway, target=web.endpoint) as gateway:
        monkeypatch.setenv("AIS_ENDPOINT", gateway)
        assert list(map(bare, samples("ais://bucket/a#b/x y.tar"))) == list(map(bare, samples(local[0])))
        with pytest.raises(ShardError, match="shard ais://bucket/missing.tar does not exist"):
            list(samples("ais://bucket/missing.tar"))


def test_commands(local, tmp_path):
    """Only where they are allowed, and written by who allows them."""
    url = f"pipe:cat {local[0]}"
    wanted = list(map(bare, samples(local[0])))
    with pytest.raises(ShardError, match="would run a shell command"):
        list(samples(url))
    pipe = samples(url, allow_pipe=True)
    assert list(map(bare, pipe)) == wanted
    assert list(map(bare, loaded(samples(url, allow_pipe=True), cut_at(pipe, 25)))) == wanted[25:]


def test_commands_of_others(local, tmp_path):
    """A list comes from anywhere, so no command is taken from it, whatever is allowed."""
    (tmp_path / "list.txt").write_text(f"{local[0]}\npipe:touch {tmp_path}/ran\n")
    with pytest.raises(ValueError, match="list.txt' names a command"):
        samples(f"@{tmp_path}/list.txt", allow_pipe=True)
    assert not os.path.exists(tmp_path / "ran")


def test_a_command_that_fails(local, capfd):
    """Also at its end, behind a whole tar: what it wrote may not be all."""
    pipe = samples(f"pipe:cat {local[0]}; exit 3", allow_pipe=True)
    items = iter(pipe)
    with pytest.raises(ShardError, match=r"the command cat \.\.\. ended with status 3"):
        list(items)
    with pytest.raises(ShardError, match="ended with status 127"):
        list(samples("pipe:no-such-command x", allow_pipe=True))


def test_a_command_that_is_left(local, tmp_path):
    """It ends with the iteration, and so does what it has started."""
    items = iter(samples(f"pipe:(cat {local[0]}; sleep 1000) & echo $! > {tmp_path}/pid; wait", allow_pipe=True))
    next(items)
    started = psutil.Process(int((tmp_path / "pid").read_text()))
    del items
    assert psutil.wait_procs([started], timeout=120)[1] == [] or not started.is_running()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["store", "fsspec"])
def test_environment_variables(remote, local, way):
    """Nothing else says where the shards are."""
    (url,) = put_all(remote, local[:1])
    environment = remote.environment
    if not environment or (way == "fsspec" and remote.kind != "s3"):
        pytest.skip("there are none")
    if way == "fsspec":
        options = remote.storage_options
        environment = {f"FSSPEC_S3_{name.upper()}": value for name, value in options.items()}
    code = """
        import sys
        sys.modules["torch"] = None  # it starts faster
        from wds_pipes.core.stream import Stream
        from wds_pipes.stages import GroupByKey, LoadTar, OpenShards, ShardList
        print(len(list(Stream(GroupByKey(LoadTar(OpenShards(ShardList(sys.argv[1]))))))))
    """
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "FSSPEC_", "STORAGE_", "GCSFS_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), url],
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "40", done.stderr
    assert done.stderr == ""


class Paid(Ranged):
    """Notes who pays."""

    def do_GET(self):
        self.payers.append(self.headers.get("x-amz-request-payer"))
        super().do_GET()


def test_requester_pays(local):
    """The header goes with each request: without it, S3 refuses readers who are to pay."""
    payers = []
    with serving(Paid, data=content(local[0]), payers=payers) as address:
        options = {"key": "k", "secret": "s", "endpoint_url": address, "requester_pays": True}
        assert len(list(samples("s3://bucket/x.tar", storage_options=options, readahead_bytes=1 << 20))) == 40
    assert len(payers) >= 2
    assert set(payers) == {"requester"}


def test_versions(s3, local):
    """A URL may name one version of an object."""
    client = s3.direct.client
    client.create_bucket(Bucket="versioned")
    client.put_bucket_versioning(Bucket="versioned", VersioningConfiguration={"Status": "Enabled"})
    versions = [
        client.put_object(Bucket="versioned", Key="x.tar", Body=content(path))["VersionId"] for path in local[:2]
    ]
    for path, version in zip(local, versions):
        pipe = samples(
            f"s3://versioned/x.tar?versionId={version}", storage_options={**s3.storage_options, "version_aware": True}
        )
        assert list(map(bare, pipe)) == list(map(bare, samples(path)))
