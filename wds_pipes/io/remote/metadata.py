"""Requests for what is not the bytes of a shard: listings, sizes, whether an object exists. They
are made through fsspec, and have the time-out and the tries of a read.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from time import monotonic, sleep
from typing import Any, TypeVar

from wds_pipes.io.remote.budget import Reading
from wds_pipes.io.remote.file_systems import file_system, through_client
from wds_pipes.io.remote.responses import EARLY_TRIES, judge
from wds_pipes.io.threads import in_time

READING = Reading()  # its time-out and tries
_BY_REQUEST = ("http", "https", "ais", "s3", "s3a", "gs", "gcs")  # what ``limited`` knows
T = TypeVar("T")


def ask(url: str, storage_options: dict[str, Any] | None, call: Callable[[Any, str], T]) -> T:
    """Return what ``call`` returns for the file system of a URL and the path in it.

    It is called again after an error that may pass, as the request of a read is. A store that does
    not respond raises an error: where the library of the store can do it, each request is limited,
    so that long listings have their time, and elsewhere the call as a whole.
    """
    protocol, begin = url.partition("://")[0], monotonic()

    def attempt() -> T:
        fs, path = file_system(url, storage_options, limited)
        if hasattr(fs, "call_s3"):
            fs.retries = 1
        # What it has listed may be old; with None, hf:// would also look for its repository again.
        fs.invalidate_cache(path if protocol == "hf" else None)
        return call(fs, path)

    for tries in count(1):
        try:
            return attempt() if protocol in _BY_REQUEST else in_time(READING.timeout_seconds, attempt)
        except Exception as error:
            verdict = judge(error, protocol)
            most = READING.retries if verdict.has_response else min(EARLY_TRIES, READING.retries)
            if protocol in ("gs", "gcs"):  # gcsfs has made it again
                most = 0
            wait = verdict.pause(tries)
            if not verdict.transient or tries > most or monotonic() - begin + wait > READING.timeout_seconds:
                raise
        sleep(wait)
    raise AssertionError


def limited(protocol: str, options: dict[str, Any]) -> dict[str, Any]:
    """Options of a file system that ends each request in time, and makes it once."""
    patience = READING.patience
    if protocol in ("http", "https"):
        import aiohttp

        limit = aiohttp.ClientTimeout(READING.timeout_seconds, sock_connect=patience, sock_read=patience)
        return through_client({**options, "client_kwargs": {"timeout": limit, **(options.get("client_kwargs") or {})}})
    if protocol in ("s3", "s3a"):
        once = {"connect_timeout": patience, "read_timeout": patience, "retries": {"total_max_attempts": 1}}
        return {**options, "config_kwargs": {**once, **(options.get("config_kwargs") or {})}}
    if protocol in ("gs", "gcs"):
        return {"requests_timeout": patience, **options}
    return options
