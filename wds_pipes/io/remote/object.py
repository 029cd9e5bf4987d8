"""What is known of a remote shard as a whole, and the check of each response against it."""

from __future__ import annotations

from typing import NoReturn

from wds_pipes.errors import ShardError, StateError
from wds_pipes.io.remote.answers import Answer, changed
from wds_pipes.io.urls import redact

RECORD = 512  # bytes of a tar: what is missing before the next multiple of this is padding


class RemoteObject:
    """A remote shard as a whole: every response must be of the same object.

    Args:
        url: where it is.
        expected: how many bytes it must have; None: as many as it has.

    Attributes:
        size: in bytes; None: not known (yet).
        size_is_told: by the store, not only expected.
        ignores_ranges: the store sends it from its beginning whatever is requested: then all the
            rest is requested at once.
        tags: what changes when the object does, such as its ETag, by name.
    """

    def __init__(self, url: str, expected: int | None) -> None:
        self._url = url
        self._expected = self.size = expected
        self.size_is_told = self.ignores_ranges = False
        self.tags: dict[str, str] = {}

    @property
    def tag(self) -> str | None:
        """Its ETag, or what the store has instead; None: not known (yet)."""
        return next(iter(self.tags.values()), None)

    def check(self, answer: Answer, at: int) -> None:
        """Compare the response to a request for the bytes from ``at`` on, and keep what it says of
        the object.

        Raises:
            ShardError: it is of another object, or that has not the size that was expected.
            StateError: the object ends before ``at``.
        """
        if self._expected is not None and answer.size is not None and answer.size != self._expected:
            self.refuse_size(answer.size)
        if self._expected is not None and answer.stop is not None and answer.stop > self._expected:
            self.refuse_size("more")
        if None not in (answer.size, self.size) and answer.size != self.size:
            self.refuse_change(at, self.size, answer.size)
        if differing := changed(self.tags, answer.tags):
            self.refuse_change(at, *differing)
        self.ignores_ranges = self.ignores_ranges or answer.start < at
        self.size = self.size if answer.size is None else answer.size
        self.size_is_told = self.size_is_told or answer.size is not None
        self.tags |= answer.tags | self.tags
        if answer.size is not None and answer.size <= at - RECORD:
            self.refuse_end(at, answer.size)

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
