"""What all servers have in common for a test: a place for shards."""

import copy
from typing import ClassVar


class Store:
    """A server with a place for shards.

    Attributes:
        kind: "s3", "gcs" or "http".
        real: whether this is the thing itself (Ceph, nginx), not an imitation of it in Python.
        endpoint: where it answers, such as http://127.0.0.1:20000: the fault proxy, or for
            ``direct`` the server.
        url: what the URLs of its shards begin with, such as s3://shards.
        storage_options: for ``open_shards``.
        environment: the variables that say the same to a new process; there are no storage options
            then.
        reads: a pattern for the requests that read data, for ``faults.rules`` and ``faults.stats``.
        faults: the proxy (Faults), or None for ``direct``.
        direct: the same store without the proxy.
    """

    kind: ClassVar[str]
    reads: ClassVar[str]
    faults = None

    def __init__(self, endpoint, *, real):
        self.endpoint = endpoint
        self.real = real
        self.direct = self

    def behind(self, faults):
        """This store as seen through a fault proxy. What ``put`` sends does not go through it."""
        store = copy.copy(self)
        store.endpoint, store.faults, store.direct = faults.endpoint, faults, self
        return store

    def put(self, name, data):
        """Store ``data`` as a whole, in place of what had this name, and return its URL."""
        self.direct.write(name, data)
        return f"{self.url}/{name}"

    @property
    def url(self):
        raise NotImplementedError

    @property
    def storage_options(self):
        return {}

    @property
    def environment(self):
        return {}

    def write(self, name, data):
        """Send ``data`` to the server."""
        raise NotImplementedError
