"""``wds-pipes state``: where a run stands, from its checkpoint files.

Only plain values are read: ``torch.load(weights_only=True)`` runs no code of the file. torch is
imported only for files that torch.save has written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import click

from wds_pipes.cli.options import FOUND, as_json_lines, echo, echo_json, example, in_one_line
from wds_pipes.core.importing import library
from wds_pipes.core.stage import State
from wds_pipes.core.state import read_state
from wds_pipes.core.words import plural, shown
from wds_pipes.display.states import describe_state
from wds_pipes.errors import StateError
from wds_pipes.loader.checkpoint_files import complete_steps, look_for_steps, states_of_step


@click.group(epilog=example("wds-pipes state show checkpoint.pt"))
def state() -> None:
    """Show and compare the states in checkpoint files.

    A file is what torch.save or json has written, with states of wds_pipes anywhere inside; it is
    read with weights_only=True. A directory is one of wds_pipes.checkpoint, of which the newest
    complete checkpoint is taken.
    """


@state.command(epilog=example("wds-pipes state show checkpoint.pt\nwds-pipes state show checkpoints/"))
@click.argument("files", nargs=-1, required=True)
@as_json_lines
def show(*, files: tuple[str, ...], as_json: bool) -> None:
    """Show where a run stands: epoch, batches, ranks, lanes, and the shard and sample of each lane.

    --json prints the states themselves, a line for each.
    """
    with in_one_line():
        for file in files:
            for placed in read_states(file):
                if as_json:
                    echo_json({"file": file, "where": placed.where, "state": placed.state})
                else:
                    for line in f"{file}: {in_words(placed)}".split("\n"):
                        echo(line)


@state.command(epilog=example("wds-pipes state diff before.pt after.pt"))
@click.argument("first")
@click.argument("second")
def diff(*, first: str, second: str) -> None:
    """Show in which values two checkpoints differ, a line for each. Exits with 1 if they do."""
    with in_one_line():
        one, other = read_states(first), read_states(second)
        alone = len(one) == len(other) == 1  # wherever they are in their files
        pair = (one[0].state, other[0].state) if alone else (dict(one), dict(other))
        lines = list(differences(*pair))
        for line in lines:
            echo(line)
        if lines:
            raise SystemExit(FOUND)


_DEPTH = 50  # no checkpoint nests states deeper
_MOST_BYTES = 1 << 30  # of a file of JSON
_OURS = {"version", "epoch", "lanes", "graph"}


class Placed(NamedTuple):
    """A state, and where it is in a file: ``"loader"``, ``"ranks[0]"``, or ``""``."""

    where: str
    state: State


def read_states(path: str) -> list[Placed]:
    """Return the states in a file, or in the newest complete checkpoint of a directory of
    ``wds_pipes.checkpoint``.

    Raises:
        StateError: it cannot be read, or has none.
        ModuleNotFoundError: torch.save has written it, and torch is not installed.
    """
    if os.path.isdir(path):
        return _of_directory(Path(path))
    found = list(_states_in(_content(path)))
    if not found:
        raise StateError(
            f"{path} has no state of wds_pipes: save what state_dict() of the loader returns, as in "
            "torch.save({'loader': loader.state_dict()}, path)"
        )
    return found


def _of_directory(root: Path) -> list[Placed]:
    steps = {number: complete_steps(worlds) for number, worlds in look_for_steps(root).items()}
    number = max((number for number, worlds in steps.items() if worlds), default=None)
    if number is None:
        raise StateError(
            f"{root} has no complete checkpoint of wds_pipes.checkpoint: name the directory that save() wrote to, or a "
            "file"
        )
    return [
        Placed(f"checkpoint {number}, rank {rank}", state) for rank, state in enumerate(states_of_step(root, number))
    ]


def _content(path: str) -> Any:
    try:
        with open(path, "rb") as file:
            if file.read(64).lstrip()[:1] in (b"{", b"["):
                file.seek(0)
                return json.loads(file.read(_MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path} is not JSON, or it is damaged: {error}. Use an untouched checkpoint") from error
    torch = library("torch", "torch", path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises errors of many kinds
        # its message would recommend weights_only=False, which runs code of the file
        raise StateError(
            f"{path} is neither JSON nor an untouched file of torch.save with plain values and tensors "
            f"({type(error).__name__}): save the state_dict() of the loader by itself"
        ) from error


def _states_in(content: Any, where: str = "", depth: int = 0) -> Iterator[Placed]:
    """Yield the states in dicts and lists."""
    if depth > _DEPTH:
        return
    if isinstance(content, Mapping):
        if content.keys() >= _OURS:
            yield Placed(where, dict(content))
            return
        for name, part in content.items():
            yield from _states_in(part, f"{where}.{name}" if where else str(name), depth + 1)
    elif isinstance(content, (list, tuple)):
        for number, part in enumerate(content):
            yield from _states_in(part, f"{where}[{number}]", depth + 1)


def in_words(placed: Placed) -> str:
    """Return where a run stands, in words: a line of numbers, then what ``describe_state`` says."""
    state, saved = placed.state, read_state(placed.state)
    facts = [f"epoch {saved.epoch}"]
    if saved.rank is not None:
        facts.append(f"after {plural(saved.step, 'batch')}" + (" (the epoch has ended)" if saved.ended else ""))
        facts.append(f"rank {saved.rank} of {saved.world_size}" if saved.world_size > 1 else "all ranks")
    if saved.shards is not None:
        facts.append(plural(saved.shards, "shard"))
    facts.append(f"{len(saved.lanes)} of {plural(saved.lane_count, 'lane')}")
    if saved.given:
        facts.append(f"{plural(saved.given, 'item')} given")
    title = f"{placed.where}: " if placed.where else ""
    return f"{title}{', '.join(facts)}\n{describe_state(state)}"


def differences(first: Any, second: Any, where: str = "") -> Iterator[str]:
    """Yield in which values two states differ, a line for each: ``lanes.0.delivered: 3 -> 5``."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for name in [*first, *(name for name in second if name not in first)]:
            place = f"{where}.{name}" if where else str(name)
            if name not in second:
                yield f"{place}: {shown(first[name])} -> (not there)"
            elif name not in first:
                yield f"{place}: (not there) -> {shown(second[name])}"
            else:
                yield from differences(first[name], second[name], place)
    elif isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        for number, pair in enumerate(zip(first, second, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif first != second:
        yield f"{where}: {shown(first)} -> {shown(second)}"
