"""The states in checkpoint files: where a run stands, how two states differ, and whether two runs
had the same samples.

Only plain values are read: ``torch.load(weights_only=True)`` runs no code of the file. torch is
imported only for files that torch.save has written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from wds_pipes.core.digest import to_text
from wds_pipes.core.importing import library
from wds_pipes.core.moved import Data, Move
from wds_pipes.core.stage import State
from wds_pipes.core.state import LEDGER, Saved, read_state
from wds_pipes.core.words import plural, shown
from wds_pipes.display.states import describe_state, states_in
from wds_pipes.errors import StateError
from wds_pipes.loader.checkpoint_files import complete_steps, look_for_steps, states_of_step
from wds_pipes.loader.ledger_file import is_ledger, read_ledger

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


class SameData(NamedTuple):
    """Whether two runs had the same samples.

    Attributes:
        same: whether they had.
        lines: what was compared, in words.
    """

    same: bool
    lines: list[str]


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
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would be waited for
        raise StateError(f"{path} is no regular file: name a file of torch.save or json, or a directory of checkpoints")
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


def read_run(path: str, *, moved: bool = False) -> State:
    """Return what all ranks of a run together have had, as one state with a ledger.

    Args:
        path: a file or directory with the states of all ranks, as of ``read_states``.
        moved: as of ``merge_states``.

    Raises:
        StateError: it has other states, or they have no ledger.
    """
    from wds_pipes.loader.restoring import merge_states  # needs torch, which showing a state does not

    states = [placed.state for placed in read_states(path)]
    state = states[0] if len(states) == 1 else merge_states(states, moved=moved)
    saved = read_state(state)
    if saved.ledger is None:
        raise StateError(f"{path} has no ledger: build the PipeLoader with ledger=True from the first step")
    if len(saved.lanes) < saved.lane_count:
        raise StateError(
            f"{path} is of rank {saved.rank} of {saved.world_size} alone: name a file with the list of the states of "
            "all ranks at one step, or with what merge_states() makes of them"
        )
    return state


def same_data(first: str, second: str) -> SameData:
    """Return whether two runs had the same samples, whatever their ranks, workers and order.

    Args:
        first: a file or directory with the states of all ranks of a run, as of ``read_states``; or
            a ledger: the path that was passed to ``PipeLoader(ledger=...)``.
        second: the same of the other run.

    Raises:
        StateError: one of them cannot be read or has no ledger, or only one is a ledger.
        ModuleNotFoundError: as of ``read_states``.
    """
    ledgers = [path for path in (first, second) if is_ledger(path)]
    if len(ledgers) == 1:
        raise StateError(f"{ledgers[0]} is a ledger, and the other file is not: compare two states, or two ledgers")
    if ledgers:
        return _same_ledgers(first, second)
    return _same_states(read_state(read_run(first)), read_state(read_run(second)))


def _same_states(one: Saved, other: Saved) -> SameData:
    shards = [Data(saved.fingerprint, saved.data) for saved in (one, other)]
    if (problem := Move().problem(*shards)) is not None or one.shards != other.shards:
        return SameData(False, [f"not the same data: {problem or 'other numbers of shards'}"])
    if samples_of(one) != samples_of(other):
        return SameData(False, [f"not the same data so far: {samples_of(one)}, and {samples_of(other)}"])
    lines = []
    for what, name in zip((samples_of(one), "epochs before"), LEDGER, strict=True):
        here, there = (saved.ledger[name] for saved in (one, other) if saved.ledger is not None)
        if name == LEDGER[0] or one.epoch:
            how = "the same" if here == there else "other"
            lines.append(f"{what}: {how} samples ({to_text(here)}, {to_text(there)})")
    same = one.ledger == other.ledger
    return SameData(same, [f"{'the same' if same else 'not the same'} data", *lines])


def samples_of(saved: Saved) -> str:
    """Return how many samples of which epoch a run has had, for a message."""
    return f"{plural(saved.counts.get('delivered', 0), 'sample')} of epoch {saved.epoch}"


def _same_ledgers(first: str, second: str) -> SameData:
    ledgers = {path: read_ledger(path) for path in (first, second)}
    lines = [
        f"{path}: step {at.step} of epoch {at.epoch} was repeated with other samples than before"
        for path, ledger in ledgers.items()
        if (at := ledger.changed) is not None
    ]
    one, other = ledgers[first].records, ledgers[second].records
    both = sorted(one.keys() & other.keys())
    differ = next((place for place in both if one[place].digest != other[place].digest), None)
    if not both:
        return SameData(False, ["the ledgers have no step in common: no number of samples is in both", *lines])
    if differ is None:
        last = one[both[-1]]
        found = f"the same data in {plural(len(both), 'step')}, up to step {last.step} of epoch {last.epoch}"
        return SameData(True, [f"{found}, after {plural(last.samples, 'sample')} of it", *lines])
    at = one[differ]
    last_of_epoch = max(place for place in both if place[0] == at.epoch)
    if one[last_of_epoch].digest == other[last_of_epoch].digest:
        lines.append(
            f"after {plural(last_of_epoch[1], 'sample')} of epoch {at.epoch} they are the same again: the order was "
            "another, as on another number of lanes"
        )
    return SameData(
        False,
        [
            f"not the same data: step {at.step} of epoch {at.epoch}, after {plural(at.samples, 'sample')} of it, is "
            "the first one that differs",
            *lines,
        ],
    )
