# %% [markdown]
# # Shards on S3, GCS and web servers
#
# **You learn** how to set credentials and endpoints, how shards are read, what to tune when
# training waits for the network, how to keep shards on a local disk, and what each error means.
#
# **You need** `pip install aiobotocore 'wds_pipes[s3,gcs,http,demo]' 'moto[server]'` (moto
# simulates S3 on this machine; naming aiobotocore helps pip to find compatible versions; demo
# installs matplotlib, for one plot).

# %%
import contextlib
import http.server
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time

import fsspec
import matplotlib.pyplot as plt
from moto.server import ThreadedMotoServer

import wds_pipes as wp
from wds_pipes.testing import make_shards

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there
for name in [name for name in os.environ if name.startswith("AWS_")]:
    del os.environ[name]
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"  # do not look for credentials of an EC2 instance
logging.getLogger("werkzeug").setLevel(logging.ERROR)  # moto logs each request

# %% [markdown]
# ## S3
#
# If the machine has credentials, a URL is enough: `wp.ShardList("s3://bucket/{000..999}.tar")`. They
# come from `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, from `~/.aws`, or from the role of the
# instance or pod.
#
# Everything else goes into `storage_options`, a dict of options of fsspec's file system (here
# `s3fs`):
#
# | what | `storage_options=` | or in the environment |
# |---|---|---|
# | keys | `{"key": ..., "secret": ..., "token": ...}` | `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_SESSION_TOKEN` |
# | a profile | `{"profile": "research"}` | `AWS_PROFILE` |
# | another store than Amazon's (Ceph, MinIO, R2, ...) | `{"endpoint_url": "https://..."}` | `AWS_ENDPOINT_URL` |
# | public data, without keys | `{"anon": True}` | |
# | a requester-pays bucket | `{"requester_pays": True}` | |
# | a region | `{"client_kwargs": {"region_name": "eu-west-1"}}` | `AWS_DEFAULT_REGION` |
#
# Never write keys into URLs. (If you do, messages and states do not show them.) The next cell
# starts a store to read from:

# %%
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
server.start()
host, port = server.get_host_and_port()
store = {"key": "us", "secret": "secret", "endpoint_url": f"http://{host}:{port}"}

files = fsspec.filesystem("s3", **store)
files.mkdir("bucket")
for path in make_shards("local", shards=4, samples=50):
    files.put_file(path, f"bucket/{os.path.basename(path)}")


def make_loader(**options):
    pipe = wp.ShardList("s3://bucket/shard-{000000..000003}.tar", shuffle=True, seed=1).open_shards(
        storage_options=store, **options
    )
    return wp.PipeLoader(
        pipe.load_tar().group_by_key().shuffle_buffer(20).decode_by_ext().to_tuple("__key__", "cls"), batch_size=10
    )


def keys_of(batches):
    return [key for keys, _ in batches for key in keys]


loader = make_loader()
assert sorted(keys_of(loader)) == [f"{number:08d}" for number in range(200)]
print(
    {
        name: value
        for name, value in loader.stats().items()
        if name in ("requests", "retries", "bytes_fetched", "stall_seconds")
    }
)

# %% [markdown]
# For a pattern with `*` the store must be listed, so `ShardList` takes `storage_options`, too. A
# resume does not read the whole epoch again: it requests the shard at its position from the byte of
# that position on.

# %%
assert len(list(wp.ShardList("s3://bucket/*.tar", storage_options=store))) == 4

whole = keys_of(loader)  # the next epoch
whole_bytes = loader.stats()["bytes_fetched"]
loader.set_epoch(1)
batches = iter(loader)
for _ in range(15):
    next(batches)
resumed = make_loader()
resumed.load_state_dict(loader.state_dict())
assert keys_of(resumed) == whole[150:]
rest_bytes = resumed.stats()["bytes_fetched"]
print(f"the whole epoch: {whole_bytes:,.0f} bytes; the last quarter of it, resumed: {rest_bytes:,.0f} bytes")
assert whole_bytes >= sum(os.path.getsize(f"local/{name}") for name in os.listdir("local"))
assert rest_bytes < whole_bytes / 2

# %% [markdown]
# ## GCS
#
# `gs://bucket/...` is read by `gcsfs`. Credentials come from
# `gcloud auth application-default login`, `GOOGLE_APPLICATION_CREDENTIALS`, or the machine.
#
# | what | `storage_options=` |
# |---|---|
# | a key file | `{"token": "key.json"}` |
# | public data, without an account | `{"token": "anon"}` |
# | a requester-pays bucket | `{"requester_pays": True, "project": "..."}` |
#
# ## Web servers, and others
#
# For `https://...`, pass headers, for example with a token, as
# `{"headers": {"Authorization": "Bearer ..."}}`. Other stores are `hf://`, `az://` (with the
# package `adlfs`), `ais://` (with the environment variable `AIS_ENDPOINT`), `msc://profile/path`
# (NVIDIA's `multi-storage-client`, with its profiles in the file of `MSC_CONFIG`), and all others
# that fsspec supports.
#
# The server below is as slow as a network: each request waits 20 ms, and one connection transfers
# 16 MB per second. It requires a token in `private/`, and some requests in `flaky/` fail.

# %%
LATENCY_SECONDS, BYTES_PER_SECOND, PIECE = 0.02, 16_000_000, 1 << 18


class Slow(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    fails = 0  # how many of the next requests fail

    def do_GET(self):
        time.sleep(LATENCY_SECONDS)
        path = "." + self.path
        size = os.path.getsize(path) if os.path.isfile(path) else 0
        first, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, size) if last else size
        status = 404 if not size else 416 if start >= size else 206
        if "private" in path and self.headers.get("Authorization") != "Bearer secret":
            status = 403
        if "flaky" in path and Slow.fails:
            status, Slow.fails = 503, Slow.fails - 1
        self.send_response(status)
        if status != 206:
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        with open(path, "rb") as file, contextlib.suppress(ConnectionError):
            file.seek(start)
            for place in range(start, stop, PIECE):
                self.wfile.write(file.read(min(PIECE, stop - place)))
                time.sleep(PIECE / BYTES_PER_SECOND)

    def log_message(self, *args):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64  # waiting connections

    def handle_error(self, *args):
        """Ignore connections that the client closes."""


web = Server(("127.0.0.1", 0), Slow)
threading.Thread(target=web.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{web.server_port}"
make_shards("large", shards=3, samples=80, fields={"bin": lambda rng, number: rng.randbytes(100_000)})
SHARDS = url + "/large/shard-{000000..000002}.tar"  # 8 MB each

# %% [markdown]
# ## How it reads, and what to tune
#
# The rate of one connection is limited. So a shard is read through several connections at once,
# each reading a range of its bytes, and the next shards are requested before it ends. These options
# of `open_shards` control this. (Where each connection has a latency of 50 ms and a rate of 50 MB/s,
# eight connections read one shard in order at 295 MB/s: six times as fast as webdataset.)
#
# | option | what it is | when to change it |
# |---|---|---|
# | `connections=8` | concurrent requests of one process | increase it if `wds-pipes doctor URL` says that the link can transfer more |
# | `readahead_bytes=64 << 20` | bytes held in memory by one process | connections x 8 MiB is a good value; use less with many workers |
# | `shards_ahead=2` | how many shards after the current one may be requested | increase it for small shards, of less than about 10 MB |
# | `retries`, `timeout_seconds` | how often and how long to try without progress | increase them for a store that is unavailable for minutes |
#
# `interleave_shards(8)`, after `group_by_key()`, does not make reading faster. It keeps 8 shards
# open at once to mix their samples. They share the same connections, so together they are read no
# faster than one shard through all connections; see the last bar. (If shards are so small that one
# does not use all connections, interleaving can be faster, but a larger `shards_ahead` helps more.)
#
# (The size of a requested range, between 1 and 16 MiB, follows from the size of the shard,
# `readahead_bytes`, `connections` and the measured latency. The shards here have only 8 MB each, so
# the example sets a smaller `readahead_bytes`.)


# %%
def seconds(interleave=None, **options):
    pipe = wp.ShardList(SHARDS).open_shards(readahead_bytes=8 << 20, **options).load_tar().group_by_key()
    start = time.perf_counter()
    count = sum(1 for _ in (pipe.interleave_shards(interleave) if interleave else pipe))
    assert count == 240
    return time.perf_counter() - start


times = {f"connections={count}": seconds(connections=count) for count in (1, 2, 4, 8)}
times["connections=8,\ninterleave_shards(3)"] = seconds(connections=8, interleave=3)
figure, axis = plt.subplots(figsize=(8, 3))
axis.barh(list(times), [24 / value for value in times.values()])
axis.invert_yaxis()
axis.axvline(16, color="0.5", linestyle=":", label="rate of one connection")
axis.set(xlabel="MB per second")
axis.legend(loc="lower right")
plt.show()

# %% [markdown]
# `wds-pipes doctor URL` measures this for your store, and says what would help. (Measure longer than
# this example does.)


# %%
def command(*arguments):
    """Run a command of wds-pipes, as a terminal would."""
    done = subprocess.run([sys.executable, "-m", "wds_pipes", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout.strip())


command("doctor", SHARDS, "--seconds", "2")

# %% [markdown]
# ## Network faults
#
# A request that is refused for a while (429, 503), reset or cut short, or that receives no data, is
# made again from the last byte received, after a delay that grows each time. You see this only in
# the statistics:

# %%
os.symlink("large", "flaky")
Slow.fails = 3
loader = wp.PipeLoader(
    wp.ShardList(SHARDS.replace("large", "flaky")).open_shards(readahead_bytes=8 << 20).load_tar().group_by_key(),
    batch_size=20,
    collate="list",
)
assert sum(map(len, loader)) == 240
print({name: value for name, value in loader.stats().items() if name in ("requests", "retries", "bytes_fetched")})
assert loader.stats()["retries"] >= 3

# %% [markdown]
# ## A cache on the local disk
#
# A cache is for data that are read in several epochs and fit on the node's disk. All processes of
# the machine share it. Each shard is downloaded once, and its reader receives the bytes while they
# are stored. When the cache would exceed `max_bytes`, the least recently used shards are deleted.
#
# On a cluster, use a directory on the *local* disk (NVMe), the same for all ranks of the node, and
# a limit larger than the part of the data that the node reads. If you set both in the environment,
# `WDS_PIPES_CACHE_DIR=/scratch/shards` and `WDS_PIPES_CACHE_SIZE=2TB`, the program calls
# `cache_shards()` without arguments. The shards are partitioned anew in each epoch, so over time
# each node reads all of them.

# %%
cached = (
    wp.ShardList(SHARDS, shuffle=True, seed=1)
    .cache_shards("cache", max_bytes="1GB")
    .open_shards(readahead_bytes=8 << 20)
    .load_tar()
    .group_by_key()
)
for epoch in range(2):
    start = time.perf_counter()
    assert sum(1 for _ in cached) == 240
    print(f"epoch {epoch}: {time.perf_counter() - start:.2f} s")
command("cache", "ls", "--directory", "cache")

# %% [markdown]
# A shard in the cache is used without a new request to the store. So write changed data under a new
# name. With an index (`wds-pipes index`) the MD5 of each shard is checked.
#
# To add a cache to a training that already has a saved state, use
# `open_shards(cache=wp.ShardCache("cache", max_bytes="1GB"))`. `cache_shards()` is a step of its
# own, so a state that was saved without it does not fit.
#
# ## What the errors mean


# %%
@contextlib.contextmanager
def raises(*words):
    """Print the error that is raised, and check that it has these words."""
    try:
        yield
    except wp.ShardError as error:
        message = str(error)
    else:
        raise AssertionError("nothing was raised")
    print(message, "\n")
    assert all(word in message for word in words)


def read(url, **storage_options):
    return list(wp.ShardList(url).open_shards(storage_options=storage_options).load_tar())


with raises("does not exist"):  # a typing error
    read("s3://bucket/shard-000009.tar", **store)
with raises("does not exist"):  # a typing error in the bucket
    read("s3://bukket/shard-000000.tar", **store)
with raises("credentials", "anon"):  # missing keys are not the same as anon=True
    read("s3://bucket/shard-000000.tar", endpoint_url=store["endpoint_url"])

os.mkdir("private")
os.rename(make_shards("made", shards=1, samples=2)[0], "private/a.tar")
with raises("403"):
    read(f"{url}/private/a.tar")
assert len(read(f"{url}/private/a.tar", headers={"Authorization": "Bearer secret"})) == 4

with raises("cannot be read"):  # no server answers: a wrong endpoint, or a firewall
    read("s3://bucket/shard-000000.tar", key="us", secret="secret", endpoint_url="http://127.0.0.1:9")

# %% [markdown]
# | message | cause | what to do |
# |---|---|---|
# | does not exist | the name of the bucket or of the object is wrong | list the bucket: `fsspec.filesystem("s3", ...).ls("bucket")` |
# | may not be read ... credentials | missing or wrong keys; a public bucket | see the tables above; use `anon` or `token` for public data |
# | needs a package that is not installed | an extra is missing | install it as the message says: `pip install 'wds_pipes[s3]'` |
# | cannot be read ... Connect | no server answers at that address | check the endpoint, `http://` or `https://`, and the proxy of the cluster |
# | cannot be read ... 10 requests | the store refused requests for too long | use fewer `connections`, a larger `timeout_seconds` or more `retries` |
# | it was changed while it was read | the shard was written again | write changed data under new names; a resume is exact only over the same bytes |
# | has n bytes, and m were expected | the index is older than the shard | make the index again |
# | its MD5 is ... | some bytes are wrong | copy the shard again |
# | it is not a tar ... looks like a web page | a login page, an error in HTML | credentials, the URL |
#
# With `open_shards(on_error="skip", max_errors=3)`, shards that cannot be opened are skipped and
# counted. Without it, a missing shard is always an error, never a smaller epoch.

# %%
server.stop()
web.shutdown()

# %% [markdown]
# ## What to read next
#
# - `04_ranks_and_elastic_resume`: how to see whether training waits for the network.
# - `11_troubleshooting`: all other errors.
