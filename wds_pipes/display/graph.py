"""A pipeline as text, as a graph and as HTML: what it was built with, from its objects alone.

Rules:
1. Nothing is opened, listed or iterated, and no ``repr`` of somebody else's object is called: it could be long, slow or tell a secret.
2. What is shown of an argument is settled when the pipe is built, as text: see ``Call``.
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

_ENCODED = frozenset('"#<>&`;%|\\')  # in a text of Mermaid


class Call(NamedTuple):
    """How a step was called: its name, and its arguments, those with another value than the default, as text."""

    name: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.arguments)})"

    @classmethod
    def of(cls, name: str, signature: inspect.Signature, values: dict[str, Any]) -> Call:
        """The call that gave ``values`` to the parameters, by their names; what is not in it was not given."""
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
    """Whether an argument has the default; only plain values are compared."""
    return value is default or (type(value) is type(default) and isinstance(value, (bool, int, float, str, tuple)) and value == default)


class Step(NamedTuple):
    """A step of a chain, the pipes that it reads from by their names (numbers, if they have none), and its help in a sentence."""

    call: Call
    sources: dict[str, IterDataPipe[Any]]
    method: bool
    help: str
    branched: bool = False  # it reads from several pipes, by name
    arrow: str = ""  # what stands on the arrow from its source


def step_of(pipe: IterDataPipe[Any]) -> Step:
    """The last step of a chain, of ours or of torch's."""
    parts = vars(pipe)
    found = [part for value in parts.values() for part in (value if isinstance(value, (list, tuple)) else [value]) if is_pipe(part)]
    call = parts.get("_call")
    if call is None and "_stream" in parts:  # a shell around a pipe of torch's
        return step_of(found[0])
    sources = {str(number): source for number, source in enumerate(found)}
    if call is not None and (branches := parts["_stream"].stage.branches):
        return Step(call, dict(zip(branches, found, strict=True)), False, _summary(pipe), branched=True)
    if call is not None:
        return Step(call, sources, call.name[0].islower(), _summary(pipe), arrow=parts["_stream"].stage.arrow)
    name, method = _torch_name(type(pipe))
    signature = inspect.signature(type(pipe).__init__)
    values = {name: parts[name] for name in signature.parameters if name in parts and not _holds(parts[name])}
    return Step(Call.of(name, signature, values), sources, method and len(sources) == 1, _summary(pipe))


def _holds(value: Any) -> bool:
    """Whether this is what a pipe reads from, not an option."""
    return is_pipe(value) or (isinstance(value, (list, tuple)) and any(is_pipe(part) for part in value))


def _torch_name(kind: type[IterDataPipe[Any]]) -> tuple[str, bool]:
    """The name of a pipe of torch's, and whether it is that of a method."""
    for name, method in kind.functions.items():
        if isinstance(method, functools.partial) and method.args[:1] == (kind,):
            return name, True
    return kind.__name__.removesuffix("IterDataPipe"), False


def _summary(pipe: IterDataPipe[Any]) -> str:
    """The first sentence of a pipe's help."""
    text = " ".join((inspect.getdoc(type(pipe)) or "").partition("\n\n")[0].split())
    return text.partition(" (functional name")[0].rstrip(".:")


def to_text(pipe: IterDataPipe[Any]) -> str:
    """The chain as it would be written."""
    step = step_of(pipe)
    sources = [to_text(source) for source in step.sources.values()]
    if step.method:
        return f"{sources[0]}.{step.call}"
    if step.branched:
        sources = [f"{{{', '.join(f'{name!r}: {source}' for name, source in zip(step.sources, sources, strict=True))}}}"]
    return str(Call(step.call.name, (*sources, *step.call.arguments)))


class _Box(NamedTuple):
    """A step in a graph: its number, its text, and the numbers of the steps that it reads from with what stands on the arrow."""

    number: int
    text: str
    sources: list[tuple[int, str]]


def _boxes(pipe: IterDataPipe[Any], numbers: dict[int, int]) -> Iterator[_Box]:
    """The steps, each once, behind those that it reads from. ``numbers``: of the pipes that were given already."""
    step = step_of(pipe)
    for source in step.sources.values():
        if _identity(source) not in numbers:
            yield from _boxes(source, numbers)
    number = numbers[_identity(pipe)] = len(numbers)
    arrows = [(numbers[_identity(source)], name if step.branched else step.arrow) for name, source in step.sources.items()]
    yield _Box(number, str(step.call), arrows)


def _identity(pipe: IterDataPipe[Any]) -> int:
    parts = vars(pipe)
    return _identity(parts["_source"]) if "_stream" in parts and parts.get("_call") is None else id(pipe)


def to_mermaid(pipe: IterDataPipe[Any]) -> str:
    """The chain as a Mermaid flowchart."""
    lines = ["flowchart TD"]
    for box in _boxes(pipe, {}):
        lines.append(f'    step{box.number}["{_mermaid(box.text)}"]')
        for source, label in box.sources:
            lines.append(f"    step{source} -->" + (f'|"{_mermaid(label)}"|' if label else "") + f" step{box.number}")
    return "\n".join(lines) + "\n"


def _mermaid(text: str) -> str:
    """Text in the quotes of Mermaid, which knows entities by their numbers."""
    return "".join(f"#{ord(letter)};" if letter in _ENCODED else letter for letter in " ".join(text.split()))


def to_dot(pipe: IterDataPipe[Any]) -> str:
    """The chain as a graph of Graphviz."""
    lines = ["digraph pipeline {", "    node [shape=box, fontname=monospace];"]
    for box in _boxes(pipe, {}):
        lines.append(f"    step{box.number} [label={_dot(box.text)}];")
        for source, label in box.sources:
            lines.append(f"    step{source} -> step{box.number}" + (f" [label={_dot(label)}];" if label else ";"))
    return "\n".join([*lines, "}"]) + "\n"


def _dot(text: str) -> str:
    """Text in the quotes of Graphviz."""
    text = " ".join(text.split()).replace("&", "&amp;").replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def to_html(pipe: IterDataPipe[Any]) -> str:
    """The chain as a list of its steps, with what each does."""
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
