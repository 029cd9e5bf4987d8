"""Shows a pipeline as text, as a graph and as HTML: how it was built, from its objects alone.

Rules:
1. Nothing is opened, listed or iterated. The ``repr`` of objects that are not ours is never called:
   it could be long or slow, or contain a secret.
2. The text that is shown for an argument is made when the pipe is built: see ``Call``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from wds_pipes.core.hosts import is_pipe
from wds_pipes.display.text import shown

if TYPE_CHECKING:
    from torch.utils.data import IterDataPipe

_ENCODED = frozenset('"#<>&`;%|\\')  # characters that Mermaid's text must encode


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
    """A step of a chain: its call, its sources by name (by number, if they have no names), and its
    help in a sentence.
    """

    call: Call
    sources: dict[str, IterDataPipe[Any]]
    method: bool
    help: str
    branched: bool = False  # it reads from several pipes, by name


def step_of(pipe: IterDataPipe[Any]) -> Step:
    """Return the last step of a chain, ours or torch's."""
    parts = vars(pipe)
    found = [
        part
        for value in parts.values()
        for part in (value if isinstance(value, (list, tuple)) else [value])
        if is_pipe(part)
    ]
    call = parts.get("_call")
    if call is None and "_stream" in parts:  # a wrapper around a pipe of torch's
        return step_of(found[0])
    sources = {str(number): source for number, source in enumerate(found)}
    if call is not None and (branches := getattr(parts["_stream"].stage, "branches", None)):
        return Step(call, dict(zip(branches, found, strict=True)), False, _summary(pipe), branched=True)
    if call is not None:
        return Step(call, sources, call.name[0].islower(), _summary(pipe))
    name, method = _torch_name(type(pipe))
    signature = inspect.signature(type(pipe).__init__)
    values = {name: parts[name] for name in signature.parameters if name in parts and not _holds(parts[name])}
    return Step(Call.of(name, signature, values), sources, method and len(sources) == 1, _summary(pipe))


def _holds(value: Any) -> bool:
    """Whether this is a source of a pipe, not an option."""
    return is_pipe(value) or (isinstance(value, (list, tuple)) and any(is_pipe(part) for part in value))


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
    step = step_of(pipe)
    sources = [to_text(source) for source in step.sources.values()]
    if step.method:
        return f"{sources[0]}.{step.call}"
    if step.branched:
        sources = [
            f"{{{', '.join(f'{name!r}: {source}' for name, source in zip(step.sources, sources, strict=True))}}}"
        ]
    return str(Call(step.call.name, (*sources, *step.call.arguments)))


def to_mermaid(pipe: IterDataPipe[Any]) -> str:
    """Return the chain as a Mermaid flowchart."""
    return "\n".join(["flowchart TD", *_flow(pipe, {})]) + "\n"


def _flow(pipe: IterDataPipe[Any], numbers: dict[int, int]) -> Iterator[str]:
    """Yield the lines of each step once, after those of its sources: its box, and an arrow from
    each source. ``numbers``: those of the pipes that were already yielded.
    """
    step = step_of(pipe)
    for source in step.sources.values():
        if _identity(source) not in numbers:
            yield from _flow(source, numbers)
    number = numbers[_identity(pipe)] = len(numbers)
    yield f'    step{number}["{_mermaid(str(step.call))}"]'
    for name, source in step.sources.items():
        label = f'|"{_mermaid(name)}"|' if step.branched and name else ""
        yield f"    step{numbers[_identity(source)]} -->{label} step{number}"


def _identity(pipe: IterDataPipe[Any]) -> int:
    parts = vars(pipe)
    return _identity(parts["_source"]) if "_stream" in parts and parts.get("_call") is None else id(pipe)


def _mermaid(text: str) -> str:
    """Encode text for Mermaid's quotes: special characters become entities with their numbers."""
    return "".join(f"#{ord(letter)};" if letter in _ENCODED else letter for letter in " ".join(text.split()))


def to_html(pipe: IterDataPipe[Any]) -> str:
    """Return the chain as a list of its steps, each with its help."""
    return f'<div class="wds-pipes">{_steps(pipe)}</div>'


def _steps(pipe: IterDataPipe[Any]) -> str:
    rows: list[str] = []
    step = step_of(pipe)
    while len(step.sources) == 1 and not step.branched:
        rows.append(_row(step))
        step = step_of(next(iter(step.sources.values())))
    inner = "".join(f"<li><b>{escape(name)}</b>{_steps(source)}</li>" for name, source in step.sources.items())
    rows.append(_row(step, f'<ul style="margin:0">{inner}</ul>' if inner else ""))
    return f'<ol style="margin:0">{"".join(reversed(rows))}</ol>'


def _row(step: Step, inner: str = "") -> str:
    call = f"<code>{escape(str(step.call))}</code>"
    return f'<li>{call} <span style="opacity:.65">{escape(step.help)}</span>{inner}</li>'
