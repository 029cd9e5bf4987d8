"""A base class for stages that can meet bad data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from wds_pipes.core.counts import LIMITED, logger
from wds_pipes.core.options import check_choice, check_count
from wds_pipes.core.running import Out
from wds_pipes.core.stage import Stage, functional_name
from wds_pipes.errors import WdsError

LOGGED = 20  # how many skips are logged for each stage and epoch


class Tolerant(Stage[Out]):
    """A stage that can meet bad data: ``on_error="raise"`` raises the error, ``"skip"`` counts it
    and continues, up to ``max_errors``.

    Here ``max_errors`` limits what one running chain skips. PipeLoader applies it to what all lanes
    of a rank together skip in an epoch.
    """

    @dataclass(slots=True)
    class At:  # noqa: D106 - see Stage
        skipped: int = 0

    def __init__(self, source: Stage[Any] | None, on_error: str, max_errors: int | None) -> None:
        super().__init__(source)
        self.on_error = check_choice("on_error", on_error, "raise", "skip")
        self.max_errors = None if max_errors is None else check_count("max_errors", max_errors, least=0)
        if self.max_errors is not None and on_error == "skip":
            self.limited = f"{LIMITED}{functional_name(type(self))} {self.depth}"

    def changes_count(self) -> str | None:
        return (
            f"{functional_name(type(self))}(on_error='skip') changes their number"
            if self.on_error == "skip"
            else super().changes_count()
        )

    counter: ClassVar[str] = "skipped"

    def skip(self, error: WdsError) -> None:
        """Count ``error`` and return, or raise it."""
        if self.on_error == "raise":
            raise error
        count = getattr(self.at, self.counter) + 1
        setattr(self.at, self.counter, count)
        if self.max_errors is not None and count > self.max_errors:
            error.add_note(f"That is error {count} in this epoch, and max_errors={self.max_errors}.")
            raise error
        if count <= LOGGED:
            logger.warning("skipped: %s%s", error, " Further ones are only counted." if count == LOGGED else "")
