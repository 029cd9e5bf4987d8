"""Real servers for tests and benchmarks: S3, GCS and HTTP, each behind a proxy that makes faults.

    with Servers() as servers:  # nothing runs yet
        url = servers.s3.put("x.tar", data)  # now Ceph does
        servers.s3.faults.rules({"match": servers.s3.reads, "status": 503, "times": 2})
        pipe = wp.ShardList(url).open_shards(storage_options=servers.s3.storage_options)

Everything listens on 127.0.0.1 on free ports, keeps its files in a temporary directory, and ends
with the block, or with the process however that ends. In tests use the fixtures ``s3``, ``gcs``,
``web`` and ``remote`` (all three in turn), which forget rules and requests before and after each
test.
"""

from servers.all import Servers
from servers.faults import Faults, Request
from servers.gcs import gcs_emulator
from servers.process import Missing
from servers.s3 import ceph, moto
from servers.store import Store
from servers.web import nginx, paced_web, plain_web

__all__ = [
    "Faults",
    "Missing",
    "Request",
    "Servers",
    "Store",
    "ceph",
    "gcs_emulator",
    "moto",
    "nginx",
    "paced_web",
    "plain_web",
]
