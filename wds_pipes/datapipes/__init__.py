"""The stages as pipes: ``pipe.shuffle_buffer(1000)`` is a pipe that reads from ``pipe``.

The modules:

- ``pipe``: the base class of all pipes, and what DataLoader, StatefulDataLoader and Accelerate do
  with them;
- ``torch_steps``: torch's pipes before, between and after ours;
- ``base``: IterDataPipe, torch's or a replacement;
- ``signatures``: signatures for editors and type checkers; a script generates it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

from wds_pipes import stages
from wds_pipes.core.chain import Chain
from wds_pipes.core.hosts import make_skin, reads_several
from wds_pipes.core.stage import Source, Stage, State, functional_name, shown_signature
from wds_pipes.datapipes.base import IterDataPipe
from wds_pipes.datapipes.pipe import MixedPipe, WdsPipe, as_stage, find_ours
from wds_pipes.dataset import as_dataset
from wds_pipes.errors import StateError

if TYPE_CHECKING:
    from wds_pipes.datapipes.signatures import *  # noqa: F403 - all steps

__all__ = ["WdsPipe", "as_dataset", "join", "load_state_dict", "mix", "register_stage", "state_dict", *stages.__all__]  # noqa: PLE0604


class _MethodOfTorchs:
    """A method of ours on the pipes of torch, where no other package has registered its name.

    ``IterDataPipe.functions`` has one entry for a name, and torch raises an error at the second
    registration. So our methods are not in it, and what another package registers, before or
    after, takes precedence on its pipes.
    """

    def __init__(self, name: str, method: Callable[..., WdsPipe]) -> None:
        self._name, self._method = name, method

    def __get__(self, pipe: IterDataPipe[Any] | None, owner: type) -> Callable[..., WdsPipe]:
        if pipe is None:
            return self._method
        if self._name in IterDataPipe.functions:
            raise AttributeError(self._name)  # so that __getattr__ of the pipe finds the other method
        return MethodType(self._method, pipe)


def _register(pipe: type[WdsPipe]) -> None:
    """Make ``pipe`` a method of our pipes, and of those of torch where the name is free.

    A repeated call replaces the method; another attribute of our pipes with this name is an error.
    """
    name = functional_name(pipe._kind)
    taken = getattr(WdsPipe, name, None)
    owner = getattr(taken, "_wds_kind", None)
    if taken is not None and (
        owner is None or (owner.__module__, owner.__qualname__) != (pipe._kind.__module__, pipe._kind.__qualname__)
    ):
        raise RuntimeError(f"pipes have {name!r} already, which is {taken!r}: name the stage otherwise")

    def method(source: IterDataPipe[Any], *args: Any, **options: Any) -> WdsPipe:
        return pipe(source, *args, **options)

    functools.update_wrapper(method, pipe, assigned=("__doc__",), updated=())
    method.__name__ = method.__qualname__ = name
    method.__signature__ = shown_signature(pipe._kind, returns=WdsPipe)  # type: ignore[attr-defined]
    method._wds_kind = pipe._kind  # type: ignore[attr-defined]
    setattr(WdsPipe, name, method)
    setattr(IterDataPipe, name, _MethodOfTorchs(name, method))


def _no_stage(kind: object) -> str:
    mend = ""
    if isinstance(kind, type) and issubclass(kind, WdsPipe):
        mend = ". It is a class of pipes, which register_stage() returns: derive from the class of the stage"
    return f"register_stage() takes a class that is derived from wds_pipes.Stage, not {kind!r:.80}{mend}"


def register_stage(kind: type[Stage[Any]]) -> type[WdsPipe]:
    """Make your stage a method of every pipe: ``class MyStep`` becomes ``pipe.my_step(...)``. A
    source, such as a ``RowSource``, becomes no method: call the class that is returned.

    Do not write it above the class as a decorator: workers that are not forked find the class of a
    stage by its name.

    Returns:
        the class of the stage's pipes.

    Raises:
        RuntimeError: pipes already have another method or attribute of this name.
        TypeError: it is no class of stages.
    """
    if not (isinstance(kind, type) and issubclass(kind, Stage)):
        raise TypeError(_no_stage(kind))
    pipe = make_skin(kind, MixedPipe if reads_several(kind) else WdsPipe, __name__)
    if not issubclass(kind, Source):
        _register(pipe)
    return pipe


if not TYPE_CHECKING:
    for _name in stages.__all__:
        _stage = getattr(stages, _name)
        globals()[_name] = register_stage(_stage)

mix, join = Mix, Join  # noqa: F405


def state_dict(pipe: IterDataPipe[Any]) -> State:
    """Return the state of a pipe, also of one of torch's after ours: see ``WdsPipe.state_dict``.

    Raises:
        StateError: the state cannot be known exactly; the message names the pipe.
    """
    return _ours(pipe).state_dict()


def load_state_dict(pipe: IterDataPipe[Any], state: State, **options: Any) -> None:
    """Make the next ``iter(pipe)`` continue from ``state``, also for a pipe of torch's after ours.

    See ``WdsPipe.load_state_dict``, also for the options.

    Raises:
        StateError: the state does not fit; the message says what differs.
    """
    _ours(pipe).load_state_dict(state, **options)


def _ours(pipe: IterDataPipe[Any]) -> WdsPipe:
    """Return ``pipe`` if it is one of ours; else raise an error that says why it has no state."""
    if isinstance(pipe, WdsPipe):
        return pipe
    if not isinstance(pipe, IterDataPipe):
        raise TypeError(f"an IterDataPipe is needed, not {type(pipe).__name__}")
    if find_ours(pipe) is None:
        raise StateError("this chain has no pipe of wds_pipes in it, so its state cannot be known")
    Chain(as_stage(pipe)).root.check_resumable()
    name = type(pipe).__name__.removesuffix("IterDataPipe")
    mend = "use the method, pipe.map(), .filter(), .batch() or .collate()"
    raise StateError(
        f"torch's {name} was built from its class around a pipe, so the items that it yields are not counted: {mend}."
    )
