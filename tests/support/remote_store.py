"""A remote store for tests of the cache: files on this disk, and a log of the requests of all
processes.
"""

import io
import os
import time
from typing import NamedTuple


class Store:
    """Objects by name; can be pickled. ``rate`` is in bytes per second.

    The first ``flips`` responses have a wrong byte at ``flip_at``, the first ``cuts`` end in the
    middle.
    """

    def __init__(self, root, *, rate=None, flips=0, flip_at=0, cuts=0, tagged=True, sized=True):
        self.root = str(root)
        self.rate, self.flips, self.flip_at, self.cuts, self.tagged, self.sized = (
            rate,
            flips,
            flip_at,
            cuts,
            tagged,
            sized,
        )
        os.makedirs(self.root, exist_ok=True)

    def put(self, name, data):
        with open(f"{self.root}/{name}.new", "wb") as file:
            file.write(data)
        os.replace(f"{self.root}/{name}.new", f"{self.root}/{name}")
        return f"s3://bucket/{name}"

    def fetch(self, name):
        return lambda offset: Answer(self, name, offset)

    def asked(self, name):
        """The requested offsets."""
        try:
            with open(f"{self.root}/{name}.log") as log:
                return [int(line) for line in log]
        except FileNotFoundError:
            return []


class Known(NamedTuple):
    """What is known of an object."""

    size: int | None
    etag: str | None
    end_is_vouched_for: bool = True


class Answer(io.RawIOBase):
    file = None  # if there is none, the garbage collector closes what was not opened

    def __init__(self, store, name, offset):
        super().__init__()
        with open(f"{store.root}/{name}.log", "a") as log:
            log.write(f"{offset}\n")
        number = len(store.asked(name))
        self.file = open(f"{store.root}/{name}", "rb")
        status = os.fstat(self.file.fileno())
        tag = f"{status.st_ino}-{status.st_mtime_ns}" if store.tagged else None
        self.object = Known(status.st_size if store.sized else None, tag)
        self.file.seek(offset)
        self.rate = store.rate
        self.end = status.st_size // 2 if number <= store.cuts else status.st_size
        self.flip_at = store.flip_at if number <= store.flips else None

    def wait(self):
        pass

    def readable(self):
        return True

    def readinto(self, buffer):
        n = len(buffer)
        if self.rate:
            n = min(n, 1 << 14)
            time.sleep(n / self.rate)
        start = self.file.tell()
        data = bytearray(self.file.read(max(0, min(n, self.end - start))))
        if self.flip_at is not None and 0 <= self.flip_at - start < len(data):
            data[self.flip_at - start] ^= 1
        buffer[: len(data)] = data
        return len(data)

    def close(self):
        if self.file is not None:
            self.file.close()
        super().close()
