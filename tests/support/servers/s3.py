"""S3: Ceph's gateway in front of a Ceph cluster of one, in memory; and moto where that is not
installed.
"""

import contextlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import uuid

from servers.process import Missing, await_answer, free_port, need, running, tail
from servers.store import Store

KEY, SECRET, BUCKET = "testkey", "testsecret1234", "shards"


class S3Store(Store):
    kind = "s3"
    reads = f"^GET /{BUCKET}/."

    def __init__(self, endpoint, **options):
        super().__init__(endpoint, **options)
        import botocore.config
        import botocore.session

        config = botocore.config.Config(s3={"addressing_style": "path"})
        session = botocore.session.get_session()
        self.client = session.create_client(
            "s3",
            region_name="us-east-1",
            endpoint_url=endpoint,
            aws_access_key_id=KEY,
            aws_secret_access_key=SECRET,
            config=config,
        )
        self.client.create_bucket(Bucket=BUCKET)

    @property
    def url(self):
        return f"s3://{BUCKET}"

    @property
    def storage_options(self):
        return {"key": KEY, "secret": SECRET, "endpoint_url": self.endpoint}

    @property
    def environment(self):
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def write(self, name, data):
        # Public, since the fault proxy cannot sign: with another Range than the client's it sends
        # no key.
        self.client.put_object(Bucket=BUCKET, Key=name, Body=data, ACL="public-read")


# With the usual paxos intervals every change of the cluster's map waits a second, and there are a
# dozen until the gateway runs.
CEPH = """
[global]
fsid = {fsid}
mon host = {monitor}
keyring = {directory}/keyring
auth allow insecure global id reclaim = false
paxos propose interval = 0.05
paxos min wait = 0.01
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail crit = 1
osd crush chooseleaf type = 0
public addr = 127.0.0.1
cluster addr = 127.0.0.1
run dir = {directory}
log to stderr = true
log file =
admin socket =
pid file =
[mon.a]
mon data = {directory}/mon
[osd]
osd objectstore = memstore
memstore device bytes = 4294967296
osd data = {directory}/osd
[client.rgw]
rgw data = {directory}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw thread pool size = 64
rgw enable ops log = false
"""


@contextlib.contextmanager
def ceph():
    """A real S3, in a few seconds and without root; it checks keys.

    Raises:
        Missing: its programs are not installed.
    """
    packages = "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd ceph-common"
    for program in ("radosgw", "ceph-mon", "ceph-osd", "ceph", "ceph-authtool", "monmaptool", "radosgw-admin"):
        need(program, packages)
    with contextlib.ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="ceph-", ignore_cleanup_errors=True))
        fsid, osd, port, log = str(uuid.uuid4()), str(uuid.uuid4()), free_port(), os.path.join(directory, "setup.log")
        monitor = f"[v2:127.0.0.1:{free_port()},v1:127.0.0.1:{free_port()}]"
        for name in ("mon", "osd", "rgw"):
            os.mkdir(os.path.join(directory, name))
        with open(os.path.join(directory, "ceph.conf"), "w") as file:
            file.write(CEPH.format(fsid=fsid, monitor=monitor, directory=directory, port=port))

        def do(*command):
            with open(log, "a+") as output:
                done = subprocess.run(
                    command,
                    cwd=directory,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=output,
                    text=True,
                    timeout=60,
                    check=False,
                )
            if done.returncode:
                raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{tail(log)}")
            return done.stdout

        def serve(program, *arguments):
            output = os.path.join(directory, f"{program}.log")
            return stack.enter_context(
                running(program, "-c", "ceph.conf", *arguments, "-f", log=output, cwd=directory)
            ), output

        do("ceph-authtool", "-C", "keyring", "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        for name, mon, osd_caps in (
            ("client.admin", "allow *", "allow *"),
            ("osd.0", "allow profile osd", "allow *"),
            ("client.rgw", "allow rwx", "allow rwx"),
        ):
            caps = ("--cap", "mon", mon, "--cap", "osd", osd_caps)
            do("ceph-authtool", "keyring", "--gen-key", "-n", name, *caps)
        do("monmaptool", "--create", "--fsid", fsid, "--addv", "a", monitor, "monmap")
        do("ceph-mon", "-c", "ceph.conf", "--mkfs", "-i", "a", "--monmap", "monmap", "--keyring", "keyring")
        serve("ceph-mon", "-i", "a")
        do("ceph", "-c", "ceph.conf", "osd", "create", osd)
        do("ceph-osd", "-c", "ceph.conf", "-i", "0", "--mkfs", "--osd-uuid", osd)
        serve("ceph-osd", "-i", "0")
        for _ in range(100):  # otherwise the next command waits five seconds before it tries again
            if "1 up" in do("ceph", "-c", "ceph.conf", "osd", "stat"):
                break
            time.sleep(0.05)
        do(
            "radosgw-admin",
            "-c",
            "ceph.conf",
            "user",
            "create",
            "--uid=test",
            "--display-name=test",
            f"--access-key={KEY}",
            f"--secret={SECRET}",
        )
        gateway, output = serve("radosgw", "-n", "client.rgw")
        endpoint = f"http://127.0.0.1:{port}"
        await_answer(endpoint, gateway, output)
        store = S3Store(endpoint, real=True)
        stack.callback(store.client.close)
        yield store


@contextlib.contextmanager
def moto():
    """An imitation of S3 in Python; it accepts any keys.

    Raises:
        Missing: it is not installed.
    """
    if not all(map(importlib.util.find_spec, ("moto", "flask_cors"))):
        raise Missing("needs moto: pip install 'moto[server]'")
    with tempfile.TemporaryDirectory(prefix="moto-") as directory:
        port, log = free_port(), os.path.join(directory, "moto.log")
        endpoint = f"http://127.0.0.1:{port}"
        with running(sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port), log=log) as process:
            await_answer(endpoint, process, log)
            store = S3Store(endpoint, real=False)
            with contextlib.closing(store.client):
                yield store
