"""What a pipeline is written in: torch's DataPipes, torchdata's nodes. Each is a host: a thin skin around the stages, which know nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from wds_pipes.core.stage import Stage, shown_signature

Skin = TypeVar("Skin")

_stage_of: dict[type, Callable[[Any, str], Stage[Any]]] = {}  # by the class of pipes
_skins: dict[tuple[type[Stage[Any]], type], type] = {}


def add_pipes(kind: type, stage_of: Callable[[Any, str], Stage[Any]]) -> None:
    """Let objects of a class be pipes. ``stage_of(pipe, what)`` gives the stage of one, or raises StateError where ``what`` would lose its position."""
    _stage_of[kind] = stage_of


def is_pipe(value: object) -> bool:
    """Whether this is a pipe of any host."""
    return isinstance(value, tuple(_stage_of))


def stage_of(pipe: object, what: str) -> Stage[Any]:
    """The stage of a pipe, for ``what`` is built upon it.

    Raises:
        TypeError: it is no pipe.
        StateError: a state was loaded into it, which would be lost.
    """
    for kind, convert in _stage_of.items():
        if isinstance(pipe, kind):
            return convert(pipe, what)
    raise TypeError(f"{what.removesuffix('()')} takes a pipe, not {type(pipe).__name__}")


def make_skin(kind: type[Stage[Any]], base: type[Skin], module: str) -> type[Skin]:
    """The class of a stage's pipes or nodes, made once: same name, same help, same options."""
    found = _skins.get((kind, base))
    if found is None:
        members = {"__doc__": kind.__doc__, "__module__": module, "__signature__": shown_signature(kind), "_kind": kind}
        found = _skins[kind, base] = type(kind.__name__, (base,), members)
    return found
