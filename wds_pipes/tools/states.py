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

from wds_pipes.core.digest import Digest, add, to_text
from wds_pipes.core.importing import library
from wds_pipes.core.moved import Data, Move
from wds_pipes.core.stage import State
from wds_pipes.core.state import LEDGER, Saved, are_all, read_state
from wds_pipes.core.words import plural, shown
from wds_pipes.display.states import describe_state, states_in
from wds_pipes.errors import StateError
from wds_pipes.loader.checkpoint_files import complete_steps, look_for_steps, states_of_step
from wds_pipes.loader.ledger_file import Record, is_ledger, read_ledger

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


class _Had(NamedTuple):
    """What all ranks of a run together have had.

    Attributes:
        saved: the state of one of the ranks.
        samples: how many samples of its epoch were returned.
        epoch: their digest.
        earlier: that of the epochs before.
    """

    saved: Saved
    samples: int
    epoch: Digest
    earlier: Digest

    def in_words(self) -> str:
        return f"{plural(self.samples, 'sample')} of epoch {self.saved.epoch}"


def _had(path: str) -> _Had:
    """Return what a run has had, by the states of all its ranks in a file or directory.

    Raises:
        StateError: it has other states, or they have no ledger.
    """
    saved = [read_state(placed.state) for placed in read_states(path)]
    first = saved[0]
    digests = [state.ledger for state in saved if state.ledger is not None]
    if len(digests) < len(saved):
        raise StateError(
            f"{path} has a state without a ledger: build the PipeLoader with ledger=True from the first step"
        )
    ranks = [state.rank for state in saved]
    if not are_all(ranks, range(first.world_size)) or len({(state.epoch, state.world_size) for state in saved}) > 1:
        raise StateError(
            f"{path} has rank {', '.join(map(str, ranks)):.200} of {first.world_size}, and what they have together is "
            "compared: save the list of the states of all ranks at one step, or what merge_states() makes of it"
        )
    epoch, earlier = (add(digest[name] for digest in digests) for name in LEDGER)
    return _Had(first, sum(state.counts.get("delivered", 0) for state in saved), epoch, earlier)


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
    one, other = _had(first), _had(second)
    return _same_states(one, other)


def _same_states(one: _Had, other: _Had) -> SameData:
    shards = [Data(had.saved.fingerprint, had.saved.data) for had in (one, other)]
    if (problem := Move().problem(*shards)) is not None or one.saved.shards != other.saved.shards:
        return SameData(False, [f"not the same data: {problem or 'other numbers of shards'}"])
    if (one.saved.epoch, one.samples) != (other.saved.epoch, other.samples):
        return SameData(False, [f"not the same data so far: {one.in_words()}, and {other.in_words()}"])
    lines = [
        f"{name}: {'the same samples' if here == there else 'other samples'} ({to_text(here)}, {to_text(there)})"
        for name, here, there in (
            (one.in_words(), one.epoch, other.epoch),
            *([("epochs before", one.earlier, other.earlier)] if one.saved.epoch else []),
        )
    ]
    same = (one.epoch, one.earlier) == (other.epoch, other.earlier)
    return SameData(same, [f"{'the same' if same else 'not the same'} data", *lines])


def _same_ledgers(first: str, second: str) -> SameData:
    lines, maps = [], list[dict[tuple[int, int], Record]]()
    for path in (first, second):
        ledger = read_ledger(path)
        maps.append({(record.epoch, record.samples): record for record in ledger.records})
        if ledger.changed is not None:
            at = ledger.changed
            lines.append(f"{path}: step {at.step} of epoch {at.epoch} was repeated with other samples than before")
    one, other = maps
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
