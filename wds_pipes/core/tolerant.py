"""A base class for stages that can meet bad data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from wds_pipes.core.chain import Chain
from wds_pipes.core.counts import LIMITED, Lack, logger
from wds_pipes.core.options import check_choice, check_count
from wds_pipes.core.stage import Limited, Out, Reports, Source, Stage, functional_name
from wds_pipes.errors import SampleError, WdsError, causes, is_of_data

LOGGED = 20  # how many skips are logged for each stage and epoch
_MOST_TEXT = 500  # how much of the message of the first one is kept
_CHOICES = ("raise", "skip")

# "raise" or "skip"; or by the class of the error or of a cause of it, where the most special class
# decides, and what is not listed is raised; or a function of the error.
OnError = str | Mapping[type[BaseException], str] | Callable[[Exception], str]


class Tolerant(Limited, Reports, Stage[Out]):
    """A stage that can meet bad data: ``on_error`` says which errors to raise, and which to skip:
    to count, and to continue, up to ``max_errors``. ``"skip"`` raises what is not the fault of one
    shard or sample: see ``is_of_data``.

    None is the ``on_error`` of the first stage of the chain. A state does not say which it was.

    Here ``max_errors`` limits what one running chain skips. PipeLoader applies it to what all lanes
    of a rank together skip in an epoch.

    Attributes:
        error_kind: the error that it raises for bad data.
    """

    @dataclass(slots=True)
    class At:  # noqa: D106 - see Stage
        skipped: int = 0

    tallies: ClassVar[tuple[str, ...]] = ("skipped",)
    error_kind: ClassVar[type[WdsError]] = SampleError
    source: Stage[Any]

    def __init__(self, source: Stage[Any], on_error: OnError | None, max_errors: int | None) -> None:
        super().__init__(source)
        self.on_error: OnError = Chain(source).root.on_error if on_error is None else check_on_error(on_error)
        self.max_errors = None if max_errors is None else check_count("max_errors", max_errors, least=0)
        if self.max_errors is not None and self.may_skip:
            self.limited = f"{LIMITED}{functional_name(type(self))} {self.depth}"

    @property
    def may_skip(self) -> bool:
        """Whether any error may be skipped."""
        rule = self.on_error
        return "skip" in rule.values() if isinstance(rule, Mapping) else bool(rule != "raise")

    @property
    def may_lose(self) -> bool:
        """Whether the stage leaves out damaged data, by options that are no part of the graph."""
        return self.may_skip

    def changes_count(self) -> str | None:
        if not self.may_skip:
            return super().changes_count()
        shown = "on_error='skip'" if self.on_error == "skip" else "on_error=..."
        return f"{functional_name(type(self))}({shown}) changes their number"

    def unforeseen(self) -> str | None:
        lost = f"{functional_name(type(self))}() may leave out damaged data" if self.may_lose else None
        return super().unforeseen() or lost

    _first_skip = ""  # while running: the message of the first error that was skipped

    def lack(self, before: Lack) -> Lack:
        return before if before.skipped else before._replace(skipped=self._first_skip)

    def skips(self, error: Exception) -> bool:
        """Return whether ``on_error`` says to skip an error."""
        rule = self.on_error
        if isinstance(rule, str):
            return rule == "skip" and all(map(is_of_data, causes(error)))
        if isinstance(rule, Mapping):
            listed = [kind for one in causes(error) for kind in type(one).__mro__ if kind in rule]
            # the most special; if several are, that of the error goes before that of its cause
            bases = {base for kind in listed for base in kind.__mro__[1:]}
            return next((rule[kind] for kind in listed if kind not in bases), "raise") == "skip"
        choice = rule(error)
        if choice not in _CHOICES:
            raise TypeError(
                f"on_error= of {functional_name(type(self))}() must return 'raise' or 'skip', and it returned "
                f"{choice!r:.80}"
            ) from error
        return bool(choice == "skip")

    def skip(self, error: WdsError) -> None:
        """Count ``error`` and return, or raise it."""
        if not self.skips(error):
            if self.on_error == "skip":
                error.add_note("on_error='skip' does not skip it, since it is no fault of one shard or sample.")
            raise error
        self.count_skip(error)

    def count_skip(self, error: WdsError) -> None:
        """Count an error that is skipped; raise it if there are too many."""
        self.lane.meters.skips += 1
        count = getattr(self.at, self.counter) + 1
        setattr(self.at, self.counter, count)
        self._first_skip = self._first_skip or str(error)[:_MOST_TEXT]
        if self.max_errors is not None and count > self.max_errors:
            error.add_note(f"That is error {count} in this epoch, and max_errors={self.max_errors}.")
            raise error
        if count <= LOGGED:
            logger.warning("skipped: %s%s", error, " Further ones are only counted." if count == LOGGED else "")


def common_on_error(sources: Iterable[Source[Any]]) -> OnError:
    """Return the ``on_error`` of the steps after several sources: theirs, or ``"raise"`` if they
    have different ones.
    """
    first, *others = [source.on_error for source in sources]
    return first if all(other == first for other in others) else "raise"


def check_on_error(on_error: OnError) -> OnError:
    """Return ``on_error`` if it is one of what it can be."""
    if isinstance(on_error, str):
        return check_choice("on_error", on_error, *_CHOICES)
    if isinstance(on_error, Mapping):
        for kind, choice in on_error.items():
            if not (isinstance(kind, type) and issubclass(kind, BaseException)):
                raise TypeError(f"on_error takes classes of errors, as {{DecodeError: 'skip'}}, not {kind!r:.80}")
            check_choice(f"on_error[{kind.__name__}]", choice, *_CHOICES)
        return dict(on_error)
    if not callable(on_error) or isinstance(on_error, type):
        raise TypeError(
            "on_error must be 'raise', 'skip', a dict such as {DecodeError: 'skip'}, or a function of the error that "
            f"returns 'raise' or 'skip', not {on_error!r:.80}"
        )
    return on_error
