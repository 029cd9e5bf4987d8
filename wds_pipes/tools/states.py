"""The states in checkpoint files: where a run stands, and how two states differ.

Only plain values are read: ``torch.load(weights_only=True)`` runs no code of the file. torch is
imported only for files that torch.save has written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from wds_pipes.core.importing import library
from wds_pipes.core.stage import State
from wds_pipes.core.state import read_state
from wds_pipes.core.words import plural, shown
from wds_pipes.display.states import describe_state, states_in
from wds_pipes.errors import StateError
from wds_pipes.loader.checkpoint_files import complete_steps, look_for_steps, states_of_step

_MOST_BYTES = 1 << 30  # of a file of JSON
_ABSENT = object()


class PlacedState(NamedTuple):
    """A state, and where it is in a file: ``"loader"``, ``"ranks[0]"``, or ``""``."""

    where: str
    state: State

    def in_words(self) -> str:
        """Return where a run stands: a line of numbers, then what ``describe_state`` says."""
        saved = read_state(self.state)
        facts = [f"epoch {saved.epoch}"]
        if saved.rank is not None:
            facts.append(f"after {plural(saved.step, 'batch')}" + (" (the epoch has ended)" if saved.ended else ""))
            facts.append(f"rank {saved.rank} of {saved.world_size}" if saved.world_size > 1 else "all ranks")
        if saved.shards is not None:
            facts.append(plural(saved.shards, "shard"))
        facts.append(f"{len(saved.lanes)} of {plural(saved.lane_count, 'lane')}")
        if saved.given:
            facts.append(f"{plural(saved.given, 'item')} given")
        title = f"{self.where}: " if self.where else ""
        return f"{title}{', '.join(facts)}\n{describe_state(self.state)}"


class Difference(NamedTuple):
    """Where two states differ, and the value in each, in words."""

    where: str
    first: str
    second: str


def read_states(path: str) -> list[PlacedState]:
    """Return the states in a file, or in the newest complete checkpoint of a directory of
    ``wds_pipes.checkpoint``.

    Raises:
        StateError: it cannot be read, or has none.
        ModuleNotFoundError: torch.save has written it, and torch is not installed.
    """
    if os.path.isdir(path):
        return _of_directory(Path(path))
    found = [PlacedState(where, state) for where, state in states_in(_content(path))]
    if not found:
        raise StateError(
            f"{path} has no state of wds_pipes: save what state_dict() of the loader returns, as in "
            "torch.save({'loader': loader.state_dict()}, path)"
        )
    return found


def _of_directory(root: Path) -> list[PlacedState]:
    steps = {number: complete_steps(worlds) for number, worlds in look_for_steps(root).items()}
    number = max((number for number, worlds in steps.items() if worlds), default=None)
    if number is None:
        raise StateError(
            f"{root} has no complete checkpoint of wds_pipes.checkpoint: name the directory that save() wrote to, or a "
            "file"
        )
    return [
        PlacedState(f"checkpoint {number}, rank {rank}", state)
        for rank, state in enumerate(states_of_step(root, number))
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


def diff_states(first: str, second: str) -> list[Difference]:
    """Return in which values the states in two files differ.

    Args:
        first: a file or a directory, as of ``read_states``.
        second: the other one. If each has one state, it does not matter where it is in its file.

    Raises:
        StateError, ModuleNotFoundError: as of ``read_states``.
    """
    one, other = read_states(first), read_states(second)
    if len(one) == len(other) == 1:
        return list(_differences(one[0].state, other[0].state, ""))
    return list(_differences(dict(one), dict(other), ""))


def _differences(first: Any, second: Any, where: str) -> Iterator[Difference]:
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for name in {**first, **second}:
            place = f"{where}.{name}" if where else str(name)
            yield from _differences(first.get(name, _ABSENT), second.get(name, _ABSENT), place)
    elif isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        for number, pair in enumerate(zip(first, second, strict=True)):
            yield from _differences(*pair, f"{where}[{number}]")
    elif first != second:
        yield Difference(where, *("(not there)" if value is _ABSENT else shown(value) for value in (first, second)))
