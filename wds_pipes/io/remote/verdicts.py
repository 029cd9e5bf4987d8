"""Classify an error of a store: whether a retry makes sense, and what the message says."""

from __future__ import annotations

import contextlib
import random
from typing import NamedTuple

from wds_pipes.errors import causes
from wds_pipes.io.remote.responses import RefusedError, refused_by_s3
from wds_pipes.io.secret import words

# Statuses after which a retry makes sense. 304 is one: it responds to a condition that was never
# sent.
_TRANSIENT = {304, 408, 425, 429, *range(500, 600)}
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 15.0  # seconds before a request is made again
EARLY_TRIES = 3  # for a server that never responded: its name may be wrong


class Verdict(NamedTuple):
    """How to handle an error.

    Attributes:
        transient: whether a retry may help.
        wait_seconds: how long to wait before a retry, at least.
        what: the words for the message if there is no further retry.
        mend: what to do then.
        public: what readers of public data can do, in words of Python and of the command line.
    """

    transient: bool
    wait_seconds: float = 0.0
    what: str = "cannot be read"
    mend: str = ""
    public: tuple[str, str] = ("", "")
    missing: bool = False  # the object does not exist
    forbidden: bool = False  # it may not be read, or it does not exist and its directory may not be listed
    of_data: bool = True  # it may be the fault of this object; otherwise that of the store, the network or a program
    has_response: bool = False  # the store has responded, with an error

    def pause(self, tries: int) -> float:
        """The seconds to wait after so many tries: from half to the whole of a time that doubles.
        So many readers do not come back at once.
        """
        usual = min(_FIRST_WAIT * (1 << min(tries, 32)) / 2, _LONGEST_WAIT)
        return max(self.wait_seconds, usual * random.uniform(0.5, 1))


_OWN_FAULT = (ImportError, TypeError, AttributeError, KeyError, NameError, NotImplementedError)


def judge(error: BaseException, protocol: str) -> Verdict:
    """How to handle an error of a store."""
    error = actual(error)
    kind = type(error).__name__
    # aiohttp reports status 400 for a response that breaks off or that it cannot parse.
    if (
        kind == "ClientPayloadError"
        or isinstance(error, (ConnectionError, TimeoutError))
        or _is_one_of(error, _UNPARSEABLE)
    ):
        return Verdict(True, of_data=not _is_one_of(error, _NO_CONNECTION))
    status = error.status if isinstance(error, RefusedError) else _status(error)
    if status == 404 or (status is None and isinstance(error, FileNotFoundError)):
        return Verdict(False, what="does not exist", mend="check its name", missing=True)
    if (
        status in (401, 403)
        or (status is None and isinstance(error, PermissionError))
        or "Credentials" in kind
        or "Forbidden" in words(error)
    ):
        public, mend = _PUBLIC.get(protocol, ("", "")), "check your credentials"
        return Verdict(False, 0.0, "may not be read", mend, public, forbidden=True, of_data=False)
    if status is not None:
        wait_seconds = getattr(error, "wait_seconds", None) or 0.0
        transient = status in _TRANSIENT
        return Verdict(transient, wait_seconds, of_data=not transient, has_response=True)
    if (
        isinstance(error, (IsADirectoryError, NotADirectoryError, ValueError, *_OWN_FAULT))
        or "Certificate" in kind
        or not isinstance(error, Exception)
    ):
        return Verdict(False, of_data=isinstance(error, (IsADirectoryError, NotADirectoryError)))
    return Verdict(True, of_data=not _is_one_of(error, _NO_CONNECTION))


def actual(error: BaseException) -> BaseException:
    """The error of a request that fsspec's file system for HTTP has made a FileNotFoundError: it
    does so with all of them.
    """
    cause = error.__cause__
    of_request = isinstance(cause, (ConnectionError, TimeoutError)) or type(cause).__module__.startswith("aiohttp")
    return cause if isinstance(error, FileNotFoundError) and cause is not None and of_request else error


_GCS = (
    "; for public data pass storage_options={'token': 'anon'}, for buckets whose readers pay {'requester_pays': True}",
    """; for public data pass --storage-options '{"token": "anon"}', for buckets whose readers pay """
    """'{"requester_pays": true}'""",
)
_WEB = (
    "; headers go into storage_options={'headers': {...}}",
    """; headers go into --storage-options '{"headers": {"Authorization": "..."}}'""",
)
_PUBLIC = {
    "s3": (
        "; for public data pass storage_options={'anon': True}, for buckets whose readers pay {'requester_pays': True}",
        """; for public data pass --storage-options '{"anon": true}', for buckets whose readers pay """
        """'{"requester_pays": true}'""",
    ),
    "gs": _GCS,
    "gcs": _GCS,
    "http": _WEB,
    "https": _WEB,
}


def _is_one_of(error: BaseException, names: set[str]) -> bool:
    """Whether an error, or one of its causes, is of a class with one of these names."""
    return any(kind.__name__ in names for each in causes(error) for kind in type(each).__mro__)


# A library could not parse a response: of aiohttp, botocore, and parsers of JSON and XML.
_UNPARSEABLE = {"HttpProcessingError", "ResponseParserError", "JSONDecodeError", "ParseError"}
# There is no connection to the store: of Python, aiohttp and botocore.
_NO_CONNECTION = {"ConnectionRefusedError", "gaierror", "ClientConnectorError", "EndpointConnectionError"}


def _status(error: BaseException) -> int | None:
    """The HTTP status in an error of a library, or in one of its causes."""
    for each in causes(error):
        with contextlib.suppress(Exception):  # what it has as an attribute may be code that fails
            refusal = getattr(each, "response", None)
            if isinstance(refusal, dict):  # of botocore
                return refused_by_s3(refusal, "").status
            # ``code`` is deprecated in aiohttp's errors, which have a status
            names = ("status", "status_code", *(() if hasattr(each, "status") else ("code",)))
            for value in (getattr(holder, name, None) for name in names for holder in (each, refusal)):
                if isinstance(value, (int, str)) and str(value).isdigit() and 300 <= int(value) < 600:
                    return int(value)
    return None
