"""Shows a pipeline as text and as HTML: how it was built, from its objects alone.

Rules:
1. Nothing is opened, listed or iterated. The ``repr`` of objects that are not ours is never called:
   it could be long or slow, or contain a secret.
2. The text that is shown for an argument is made when the pipe is built: see ``Call``.
"""

from __future__ import annotations

import functools
import inspect
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from wds_pipes.core.hosts import is_pipe
from wds_pipes.display.text import shown

if TYPE_CHECKING:
    from torch.utils.data.datapipes.datapipe import IterDataPipe


class Call(NamedTuple):
    """How a step was called: its name, and, as text, the arguments whose values are not the
    defaults.
    """

    name: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.arguments)})"

    @classmethod
    def of(cls, name: str, signature: inspect.Signature, values: dict[str, Any]) -> Call:
        """Return the call that passed ``values`` to the parameters; a name that is not in it was
        not passed.
        """
        arguments: list[str] = []
        for parameter in signature.parameters.values():
            if parameter.name not in values:
                continue
            value = values[parameter.name]
            if parameter.kind is parameter.VAR_POSITIONAL:
                arguments += [shown(item) for item in value]
            elif parameter.kind is parameter.VAR_KEYWORD:
                arguments += [f"{option}={shown(item, option)}" for option, item in value.items()]
            elif parameter.default is parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY:
                arguments.append(shown(value, parameter.name))
            elif not _same(value, parameter.default):
                arguments.append(f"{parameter.name}={shown(value, parameter.name)}")
        return cls(name, tuple(arguments))


def _same(value: Any, default: Any) -> bool:
    """Whether an argument has its default value; only plain values are compared."""
    return value is default or (
        type(value) is type(default) and isinstance(value, (bool, int, float, str, tuple)) and value == default
    )


class Step(NamedTuple):
    """A step of a chain.

    Attributes:
        call: its call.
        sources: the pipes that it reads from, by name; by number, if they have no names.
        help: its help in a sentence.
        method: it is written as a method of its source.
        branched: it reads from several pipes, by name.
    """

    call: Call
    sources: dict[str, IterDataPipe[Any]]
    help: str
    method: bool = False
    branched: bool = False


def step_of(pipe: IterDataPipe[Any]) -> Step:
    """Return the last step of a chain, ours or torch's."""
    parts, help_ = vars(pipe), _summary(pipe)
    found = [_unwrapped(part) for value in parts.values() for part in _pipes_in(value)]
    sources = {str(number): source for number, source in enumerate(found)}
    call: Call | None = parts.get("_call")
    if call is not None:
        branches = getattr(parts["_stream"].stage, "branches", None)
        if branches:
            return Step(call, dict(zip(branches, found, strict=True)), help_, branched=True)
        return Step(call, sources, help_, method=call.name[0].islower())
    name, method = _torch_name(type(pipe))
    signature = inspect.signature(type(pipe).__init__)
    values = {name: parts[name] for name in signature.parameters if name in parts and not _pipes_in(parts[name])}
    return Step(Call.of(name, signature, values), sources, help_, method=method and len(sources) == 1)


def _pipes_in(value: Any) -> list[IterDataPipe[Any]]:
    """Return the sources of a pipe in one of its attributes; an option has none."""
    return [part for part in (value if isinstance(value, (list, tuple)) else [value]) if is_pipe(part)]


def _unwrapped(pipe: IterDataPipe[Any]) -> IterDataPipe[Any]:
    """Return the pipe of torch's in a wrapper of ours; any other as it is."""
    parts = vars(pipe)
    return parts["_source"] if "_stream" in parts and parts.get("_call") is None else pipe


def _torch_name(kind: type[IterDataPipe[Any]]) -> tuple[str, bool]:
    """Return the name of a pipe of torch's, and whether it is the name of a method."""
    for name, method in kind.functions.items():
        if isinstance(method, functools.partial) and method.args[:1] == (kind,):
            return name, True
    return kind.__name__.removesuffix("IterDataPipe"), False


def _summary(pipe: IterDataPipe[Any]) -> str:
    """Return the first paragraph of a pipe's help."""
    text = " ".join((inspect.getdoc(type(pipe)) or "").partition("\n\n")[0].split())
    return text.partition(" (functional name")[0].rstrip(".:")


def to_text(pipe: IterDataPipe[Any]) -> str:
    """Return the chain as it would be written in code."""
    step = step_of(_unwrapped(pipe))
    sources = [to_text(source) for source in step.sources.values()]
    if step.method:
        return f"{sources[0]}.{step.call}"
    if step.branched:
        named = [f"{name!r}: {source}" for name, source in zip(step.sources, sources, strict=True)]
        sources = [f"{{{', '.join(named)}}}"]
    return str(Call(step.call.name, (*sources, *step.call.arguments)))


def to_html(pipe: IterDataPipe[Any]) -> str:
    """Return the chain as a list of its steps, each with its help."""
    return f'<div class="wds-pipes"><ol style="margin:0">{_rows(_unwrapped(pipe))}</ol></div>'


def _rows(pipe: IterDataPipe[Any]) -> str:
    """Return the steps up to this one as items of a list. Several sources are lists in its item."""
    step = step_of(pipe)
    before = inner = ""
    if len(step.sources) == 1 and not step.branched:
        before = "".join(map(_rows, step.sources.values()))
    else:
        lists = [
            f'<li><b>{escape(name)}</b><ol style="margin:0">{_rows(source)}</ol></li>'
            for name, source in step.sources.items()
        ]
        inner = f'<ul style="margin:0">{"".join(lists)}</ul>' if lists else ""
    call = f"<code>{escape(str(step.call))}</code>"
    return f'{before}<li>{call} <span style="opacity:.65">{escape(step.help)}</span>{inner}</li>'
