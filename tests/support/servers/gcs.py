"""GCS: an emulator in Python. Its responses to suffix ranges and to ranges after the end are wrong;
keep objects to a few MB.
"""

import contextlib
import importlib.util
import os
import sys
import tempfile
import urllib.parse
import urllib.request

from servers.process import Missing, await_answer, free_port, running
from servers.store import Store

BUCKET = "shards"

# gcsfs reads this when it is imported; otherwise each call first waits a minute for a service that
# emulators do not have.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"


class GcsStore(Store):
    kind = "gcs"
    reads = "^GET .*alt=media"

    @property
    def url(self):
        return f"gs://{BUCKET}"

    @property
    def storage_options(self):
        return {"token": "anon", "endpoint_url": self.endpoint}

    @property
    def environment(self):
        return {
            "STORAGE_EMULATOR_HOST": self.endpoint,
            "FSSPEC_GS_TOKEN": "anon",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def write(self, name, data):
        where = (
            f"{self.endpoint}/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={urllib.parse.quote(name, safe='')}"
        )
        request = urllib.request.Request(where, data, {"Content-Type": "application/octet-stream"}, method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()


@contextlib.contextmanager
def gcs_emulator():
    """An imitation of GCS.

    Raises:
        Missing: it is not installed.
    """
    if importlib.util.find_spec("gcp_storage_emulator") is None:
        raise Missing("needs an emulator of GCS: pip install gcp-storage-emulator")
    with tempfile.TemporaryDirectory(prefix="gcs-") as directory:
        port, log = free_port(), os.path.join(directory, "gcs.log")
        endpoint = f"http://127.0.0.1:{port}"
        start = (
            sys.executable,
            "-m",
            "gcp_storage_emulator",
            "start",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "-M",
            "-q",
            "--default-bucket",
            BUCKET,
        )
        with running(*start, log=log, cwd=directory) as process:
            await_answer(endpoint, process, log)
            yield GcsStore(endpoint, real=False)
