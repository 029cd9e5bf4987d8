"""What is known of a remote shard as a whole, and the check of each response against it."""

from __future__ import annotations

from typing import NoReturn

from wds_pipes.errors import ShardError, StateError
from wds_pipes.io.remote.responses import Response, changed
from wds_pipes.io.urls import redact

RECORD = 512  # bytes: if a tar ends before a multiple of this, only padding is missing


class RemoteObject:
    """What is known of a remote shard as a whole: every response must be of the same object. All
    that read ranges of it share it.

    Args:
        url: where it is.
        expected: how many bytes it must have; None: any number.

    Attributes:
        expected: as above.
        reported_size: its size in bytes that the store has reported; None: not known (yet).
        validators: values that change with the object, such as its ETag, by name.
        ignores_ranges: whether the store always sends it from its beginning: then all the rest is
            requested at once.
    """

    def __init__(self, url: str, expected: int | None = None) -> None:
        self._url, self.expected = url, expected
        self.reported_size: int | None = None
        self.validators: dict[str, str] = {}
        self.ignores_ranges = False

    @property
    def size(self) -> int | None:
        """Its size in bytes, reported or expected; None: not known (yet)."""
        return self.expected if self.reported_size is None else self.reported_size

    @property
    def etag(self) -> str | None:
        """Its ETag, or another validator of the store; None: not known (yet)."""
        return next(iter(self.validators.values()), None)

    def check(self, response: Response, at: int) -> None:
        """Check the response to a request for the bytes from ``at`` on, and keep what it reports
        about the object.

        Raises:
            ShardError: it is of another object, or the object has not the expected size.
            StateError: the object ends before ``at``.
        """
        size = response.size
        if self.expected is not None and size is not None and size != self.expected:
            self.refuse_size(size)
        if self.expected is not None and response.stop is not None and response.stop > self.expected:
            self.refuse_size("more")
        if None not in (size, self.reported_size) and size != self.reported_size:
            self.refuse_change(at, self.reported_size, size)
        if differing := changed(self.validators, response.validators):
            self.refuse_change(at, *differing)
        self.ignores_ranges = self.ignores_ranges or response.start < at
        self.validators |= response.validators | self.validators
        if size is not None:
            self.reported_size = size
            if size <= at - RECORD:
                self.refuse_end(at, size)

    def refuse_end(self, at: int, size: int | None) -> NoReturn:
        """Raise StateError: the object ends before ``at``."""
        has = "fewer" if size is None else f"only {size}"
        raise StateError(
            f"the state stands at byte {at} of shard {redact(self._url)}, which has {has}: it was changed since."
        )

    def refuse_change(self, at: int, before: object, now: object) -> NoReturn:
        """Raise ShardError: the object became another one."""
        url = redact(self._url)
        raise ShardError(
            f"shard {url} was changed while it was read ({before} became {now}), byte {at}. "
            "Write shards under new names, and start this epoch again.",
            url=url,
            offset=at,
        )

    def refuse_size(self, size: object) -> NoReturn:
        """Raise ShardError: the object has another size than was expected."""
        url = redact(self._url)
        raise ShardError(
            f"shard {url} has {size} bytes, and {self.expected} were expected. Make the index "
            "again, or restore the shard.",
            url=url,
        )
