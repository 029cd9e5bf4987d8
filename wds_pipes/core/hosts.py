"""The hosts: the frameworks that a pipeline can be written in, torch's DataPipes and torchdata's
nodes.

A host is a thin skin around the stages, which do not know it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

from wds_pipes.core.chain import Composite
from wds_pipes.core.options import check_options
from wds_pipes.core.stage import Source, Stage, shown_signature, unfinished

Skin = TypeVar("Skin")

_stage_of: dict[type, Callable[[Any, str], Stage[Any]]] = {}  # by the class of the pipes
_skins: dict[tuple[type[Stage[Any]], type], type] = {}


def add_pipes(kind: type, stage_of: Callable[[Any, str], Stage[Any]]) -> None:
    """Register the instances of a class as pipes. ``stage_of(pipe, what)`` returns the stage of a
    pipe. It raises StateError if ``what`` would lose the pipe's position.
    """
    _stage_of[kind] = stage_of


def is_pipe(value: object) -> bool:
    """Return whether ``value`` is a pipe of any host."""
    return isinstance(value, tuple(_stage_of))


def stage_of(pipe: object, what: str) -> Stage[Any]:
    """Return the stage of a pipe, so that ``what`` can be built on it.

    Raises:
        TypeError: ``pipe`` is not a pipe.
        StateError: a state was loaded into it, which would be lost.
    """
    for kind, convert in _stage_of.items():
        if isinstance(pipe, kind):
            return convert(pipe, what)
    name = type(pipe).__name__
    hint = ", such as ShardList(urls).open_shards().load_tar().group_by_key()"
    if name == "IndexedShards":
        hint = ": pass SampleList(urls, where=data.numbers).fetch_samples()"
    if isinstance(pipe, Stage):
        hint = f": call the class that register_stage({name}) returns, which makes a pipe"
    raise TypeError(f"{what.removesuffix('()')} takes a pipe, not {name}{hint}")


def reads_several(kind: type[Stage[Any]]) -> bool:
    """Return whether the first argument of a stage is several pipes, by name."""
    return issubclass(kind, Source) and issubclass(kind, Composite)


def stages_of(sources: Any, name: str, stage_for: Callable[[Any, str], Stage[Any]]) -> Any:
    """Return the stages of several pipes, by name; what is no dict, or empty, as it is.

    Args:
        sources: the pipes.
        name: what the caller wrote, to build a stage that reads from them.
        stage_for: returns the stage of a pipe, for this purpose.
    """
    pipes = sources if isinstance(sources, Mapping) else {}
    return {key: stage_for(pipe, f"source {key!r} of {name}()") for key, pipe in pipes.items()} or sources


def build(kind: type[Stage[Any]], name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Stage[Any]:
    """Return a stage for a pipe; ``name``: what the caller wrote.

    Raises:
        TypeError: an option is unknown, an argument is missing or too many, or a stage written by
            the user is unfinished.
    """
    check_options(name, kind.__init__, options)
    stage = cast(Callable[..., Stage[Any]], kind)(*args, **options)
    if (missing := unfinished(stage)) is not None:
        raise TypeError(missing)
    return stage


def make_skin(kind: type[Stage[Any]], base: type[Skin], module: str) -> type[Skin]:
    """Return the class of a stage's pipes or nodes, made once, with the stage's name, help and
    options.
    """
    found = _skins.get((kind, base))
    if found is None:
        members = {"__doc__": kind.__doc__, "__module__": module, "__signature__": shown_signature(kind), "_kind": kind}
        found = _skins[kind, base] = type(kind.__name__, (base,), members)
    return found


def remade(kind: type[Stage[Any]], base: type[Skin], module: str) -> Skin:
    """Return an empty pipe or node of a stage, which pickle fills."""
    made = make_skin(kind, base, module)
    return made.__new__(made)
