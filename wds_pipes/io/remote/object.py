"""What is known of a remote shard as a whole, and the check of each response against it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn

from wds_pipes.errors import ShardError, StateError
from wds_pipes.io.remote.responses import Response, changed
from wds_pipes.io.urls import redact

RECORD = 512  # bytes: if a tar ends before a multiple of this, only padding is missing


@dataclass(slots=True)
class Reported:
    """What a store has reported of a remote object.

    Attributes:
        size: in bytes; None: not known (yet).
        validators: values that change with the object, such as its ETag, by name.
    """

    size: int | None = None
    validators: dict[str, str] = field(default_factory=dict)


class RemoteObject:
    """A remote shard as a whole: every response must be of the same object.

    Args:
        url: where it is.
        expected: how many bytes it must have; None: any number.
        reported: what the store has reported of it, to be shared by all that read ranges of it;
            None: nothing yet.

    Attributes:
        size: in bytes; None: not known (yet).
        ignores_ranges: whether the store always sends it from its beginning: then all the rest is
            requested at once.
    """

    def __init__(self, url: str, expected: int | None, reported: Reported | None = None) -> None:
        self._url = url
        self._reported = reported or Reported()
        self._expected = expected
        self.size = expected if self._reported.size is None else self._reported.size
        self.ignores_ranges = False

    @property
    def size_is_reported(self) -> bool:
        """Whether the size is from the store, not only expected."""
        return self._reported.size is not None

    @property
    def validators(self) -> dict[str, str]:
        """Values that change with the object, such as its ETag, by name."""
        return self._reported.validators

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
        if self._expected is not None and response.size is not None and response.size != self._expected:
            self.refuse_size(response.size)
        if self._expected is not None and response.stop is not None and response.stop > self._expected:
            self.refuse_size("more")
        known = self._reported
        for size in (self.size, known.size):  # another reader of it may have got a response meanwhile
            if None not in (response.size, size) and response.size != size:
                self.refuse_change(at, size, response.size)
        if differing := changed(known.validators, response.validators):
            self.refuse_change(at, *differing)
        self.ignores_ranges = self.ignores_ranges or response.start < at
        if response.size is not None:
            self.size = known.size = response.size
        known.validators |= response.validators | known.validators
        if response.size is not None and response.size <= at - RECORD:
            self.refuse_end(at, response.size)

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
            f"shard {url} has {size} bytes, and {self._expected} were expected. Make the index "
            "again, or restore the shard.",
            url=url,
        )
