"""Read a saved state back as typed values, checked once and bounded, before anything is built from
it.

Rules:
1. A state may come from a damaged file or from another program. Whatever it contains, the only
   error is StateError, and refusing it costs no more time or memory than the state itself takes.
2. ``read_state`` checks what all states have in common. Each stage checks what only it knows: see
   ``Chain.load`` and ``Stage.problem``.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple, TypeVar, cast

from wds_pipes.core.counts import COUNTED, LEFT_OUT, LIMITED, TROUBLE
from wds_pipes.core.digest import DIGESTS, Digest, from_text
from wds_pipes.core.graph import GraphStep
from wds_pipes.core.words import shown, some
from wds_pipes.errors import StateError

STATE_VERSION = 4
SEGMENTS = "segments"  # the step that PipeLoader puts into a graph, see ``wds_pipes.loader.segments``
ADDED = (SEGMENTS, "ledger")  # all steps that it puts there

_Kind = TypeVar("_Kind")

# The bounds of a state. A number from a state is checked against these before a list of this size
# is made.
MOST = (1 << 64) - 1  # any number: the hash of wds_pipes.core.order takes 64 bits, and no real count is larger
MOST_LANES = 1_000_000  # ranks x workers at a first start: 100 000 accelerators with 10 workers each
# how often an epoch was repartitioned: with a restart every ten minutes, that is an epoch of ten
# weeks
MOST_PARTITIONS = 10_000

_MOST_NESTED = 20  # mixes in mixes
_DATA = re.compile("[0-9a-f]{8}([12][0-9a-f]{7})?")  # see wds_pipes.core.moved
_DIGEST = re.compile("[0-9a-f]{32}")
LEDGER = ("epoch", "earlier")  # the digests in a state: of the samples of its epoch, and of the epochs before
_WEIGHT = re.compile("|[1-9][0-9]{0,4000}|schedule")
# as str(number) writes it: int() also accepts "01", " 1", "1_0" and non-ASCII digits
_LANE = re.compile("0|[1-9][0-9]{0,6}")


# of a list of shards that has grown at its end: pairs of an epoch, and the number of shards up to
# this epoch
Grown = tuple[tuple[int, int], ...]


class SavedLane(NamedTuple):
    """What a state says of a lane; ``position`` is what ``Chain.dump`` wrote (None: the lane had
    not begun).
    """

    url: str | None
    delivered: int
    ended: bool
    position: list[dict[str, Any]] | None
    counts: dict[str, int]


class SavedSource(NamedTuple):
    """What a state says of a chain that a mix reads from: see ``Recipe``."""

    seed: int
    shards: int | None
    fingerprint: str
    data: str
    steps: str
    sources: dict[str, SavedSource]
    weight: str


class Saved(NamedTuple):
    """The contents of a state. The fields from ``rank`` to ``partition`` come from a PipeLoader;
    ``rank`` is None in any other state.
    """

    epoch: int
    seed: int
    shards: int | None
    fingerprint: str
    graph: tuple[GraphStep, ...]
    lane_count: int
    lanes: dict[int, SavedLane]
    counts: dict[str, int]
    ended: bool
    rank: int | None
    world_size: int
    step: int
    given: int
    given_samples: int | None
    epoch_end: str
    batch_size: int
    mix_lanes: int
    samples: str | None
    partition: dict[str, Any] | None
    data: str
    sources: dict[str, SavedSource]
    ledger: dict[str, Digest] | None
    grown: Grown


def not_for_dcp() -> dict[str, Any]:
    """Return the entries of a state that make torch.distributed.checkpoint refuse it.

    It would store the values of a state under their keys, joined by dots. A loader at another
    position has other keys, and those of other ranks are equal: such a checkpoint cannot be loaded,
    or continues elsewhere. Joined, these two keys are equal, so it refuses to save a state as it
    is, with "duplicated flatten key loader.use DCPState.".
    """
    return {"use DCPState": {"": 0}, "use DCPState.": 0}


def damaged(what: str) -> StateError:
    """Return the error for a state that no pipeline wrote."""
    return StateError(f"the state is damaged: {what}. Use an untouched checkpoint.")


def is_count(value: object, *, least: int = 0, most: int = MOST) -> bool:
    """Return whether a value is an int between two bounds; True and False do not count as ints."""
    return type(value) is int and least <= value <= most


def read_count(value: object, what: str, *, least: int = 0, most: int = MOST) -> int:
    """Return a value as an int between two bounds."""
    if not is_count(value, least=least, most=most):
        bound = f", and at most {most:,} can be" if type(value) is int and value > most else ""
        raise damaged(f"{what} is {shown(value)}{bound}")
    return cast(int, value)


def read_as(kind: type[_Kind], value: object, what: str) -> _Kind:
    """Return a value as a str, a list or a bool, whichever ``kind`` is."""
    if not isinstance(value, kind):
        raise damaged(f"{what} is {shown(value)}")
    return value


def read_dict(value: object, what: str) -> dict[str, Any]:
    """Return a value as a dict with str keys."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise damaged(f"{what} is {shown(value)}")
    return value


def read_counts(value: object, what: str) -> dict[str, int]:
    """Return a value as counts of samples by what became of them."""
    counts = read_dict(value, what)
    for name, count in counts.items():
        if name not in (*COUNTED, *TROUBLE, *DIGESTS, LEFT_OUT) and not name.startswith(LIMITED):
            raise damaged(f"{what} name {shown(name)}")
        read_count(count, f"{name!r} of {what}")
    return counts


def read_position(value: object, what: str) -> list[dict[str, Any]]:
    """Return a value as what ``Chain.dump`` wrote. ``Chain.load`` checks how many entries there
    are, and each stage checks its own.
    """
    return [read_dict(entry, what) for entry in read_as(list, value, what)]


def read_data(value: object) -> str:
    """Return a value as an id of data, see ``wds_pipes.core.moved``."""
    if not isinstance(value, str) or not _DATA.fullmatch(value):
        raise damaged(f"the id of its data is {shown(value)}")
    return value


def read_lane_number(name: object) -> int:
    """Return the number of a lane from its name in a state."""
    if not isinstance(name, str) or not _LANE.fullmatch(name):
        raise damaged(f"{shown(name)} is not the number of a lane")
    return int(name)


def read_state(state: object) -> Saved:
    """Return the contents of any state.

    Raises:
        StateError: it is not a state, has another version, or is damaged.
    """
    if not isinstance(state, dict) or "version" not in state:
        raise StateError(f"this is not a state of a wds_pipes pipeline but {shown(state)}. {_meant(state)}")
    version = state["version"]
    if type(version) is not int or version != STATE_VERSION:
        raise StateError(
            f"the state has format version {shown(version)}, this wds_pipes reads version "
            f"{STATE_VERSION}. Resume with the wds_pipes that wrote it."
        )

    def count(name: str, default: int | None = None, *, least: int = 0, most: int = MOST) -> int:
        return read_count(state.get(name, default), repr(name), least=least, most=most)

    of_loader = "rank" in state
    world_size = count(
        "world_size", None if of_loader else 1, least=1, most=MOST_LANES
    )  # each rank has at least one lane
    lane_count, batch_size = count("lane_count", least=1, most=MOST_LANES), count("batch_size", 1, least=1)
    lanes = {
        read_lane_number(name): _read_lane(name, lane, of_loader)
        for name, lane in read_dict(state.get("lanes"), "'lanes'").items()
    }
    if len(lanes) > lane_count or not all(lane < lane_count for lane in lanes):
        raise damaged(f"it has lane {some(lanes)} of {lane_count}")
    return Saved(
        epoch=count("epoch"),
        seed=count("seed", least=-(1 << 63)),
        shards=None if state.get("shards", 0) is None else count("shards"),
        fingerprint=read_as(str, state.get("fingerprint"), "'fingerprint'"),
        graph=tuple(map(_read_step, read_as(list, state.get("graph"), "'graph'"))),
        lane_count=lane_count,
        lanes=lanes,
        counts=dict.fromkeys(COUNTED, 0) | read_counts(state.get("counts"), "its counts"),
        ended=read_as(bool, state.get("ended", False), "'ended'"),
        rank=count("rank", most=world_size - 1) if of_loader else None,
        world_size=world_size,
        step=count("step", 0),
        given=count("given", 0),
        given_samples=count("given_samples", 0) if "given_samples" in state else None,
        epoch_end=read_as(str, state.get("epoch_end", ""), "'epoch_end'"),
        batch_size=batch_size,
        mix_lanes=count("mix_lanes", 1, least=1, most=batch_size),
        samples=read_as(str, state["samples"], "'samples'") if "samples" in state else None,
        partition=_read_partition(state["partition"]) if "partition" in state else None,
        data=read_data(state["data"]) if "data" in state else "",
        sources=_read_sources(state),
        ledger=_read_ledger(state["ledger"]) if "ledger" in state else None,
        grown=_read_grown(state.get("grown", [])),
    )


def _read_step(value: object) -> GraphStep:
    """Return a value as a step of a graph."""
    name, *options = read_as(list, value, what := "a step of 'graph'") or [None]
    if len(options) > 1:
        raise damaged(f"{what} is {shown(value)}")
    return GraphStep(read_as(str, name, what), read_dict(options[0], what) if options else {})


def _read_partition(value: object) -> dict[str, Any]:
    """Return a value as a partition: a dict, or a text of JSON if it may be large."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise damaged(f"'partition' is {shown(value)}") from None
    return read_dict(value, "'partition'")


def _read_ledger(value: object) -> dict[str, Digest]:
    """Return a value as the digests of a state, by its entries in ``LEDGER``."""
    found = read_dict(value, "'ledger'")
    if found.keys() != set(LEDGER):
        raise damaged(f"its ledger is {shown(value)}")
    return {name: read_digest(text, "a digest of its ledger") for name, text in found.items()}


def read_digest(value: object, what: str) -> Digest:
    """Return a value as a digest of samples."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise damaged(f"{what} is {shown(value)}")
    return from_text(value)


def _read_grown(value: object) -> Grown:
    """Return a value as the epochs that have fewer shards than the list."""
    what = "a list of shards that has grown"
    pairs = [read_as(list, pair, what) for pair in read_as(list, value, what)]
    if not all(len(pair) == 2 and is_count(pair[0]) and is_count(pair[1], least=1) for pair in pairs):
        raise damaged(f"its list of shards has grown by {shown(value)}")
    found = tuple((epoch, shards) for epoch, shards in pairs)
    if found != tuple(sorted(found)):
        raise damaged(f"its list of shards has grown by {shown(value)}")
    return found


def _read_sources(state: dict[str, Any], depth: int = 0) -> dict[str, SavedSource]:
    """Return what a state, or its entry of a source, says of the sources of a mix."""
    found, entries = {}, read_dict(state.get("sources", {}), "'sources'")
    if depth > _MOST_NESTED:
        raise damaged(f"it has mixes within mixes, {depth} deep")
    for name, value in entries.items():
        what = f"source {shown(name)}"
        entry = read_dict(value, what)
        found[name] = SavedSource(
            read_count(entry.get("seed"), f"the seed of {what}", least=-(1 << 63)),
            None if entry.get("shards") is None else read_count(entry["shards"], f"the number of shards of {what}"),
            read_as(str, entry.get("fingerprint"), f"the fingerprint of {what}"),
            read_data(entry["data"]) if "data" in entry else "",
            read_as(str, entry.get("steps"), f"the steps of {what}"),
            _read_sources(entry, depth + 1),
            _read_weight(entry.get("weight", ""), what),
        )
    return found


def _read_weight(value: object, what: str) -> str:
    """Return a value as the weight of a source of a mix."""
    if not isinstance(value, str) or not _WEIGHT.fullmatch(value):
        raise damaged(f"the weight of {what} is {shown(value)}")
    return value


def _meant(state: object) -> str:
    """Return advice on what to pass instead of something that is not a state."""
    for name, value in state.items() if isinstance(state, dict) else ():
        if isinstance(value, dict) and "version" in value and "lanes" in value:
            return f"There is one under {shown(name)}: pass that."
    return "Pass what state_dict() returned."


def _read_lane(name: str, lane: object, of_loader: bool) -> SavedLane:
    """Return what a state says of a lane."""
    what = f"lane {name}"
    entry = read_dict(lane, what)
    url, delivered = entry.get("url"), read_count(entry.get("delivered"), f"'delivered' of {what}")
    if "position" not in entry:
        raise damaged(f"{what} is {shown(entry)}")
    position = None if entry["position"] is None else read_position(entry["position"], f"the position of {what}")
    ended = read_as(bool, entry.get("ended", None if of_loader else False), f"'ended' of {what}")
    if position is None and (not of_loader or delivered or ended):
        raise damaged(f"{what} has no position, and is not at its beginning")
    return SavedLane(
        None if url is None else read_as(str, url, f"the URL of {what}"),
        delivered,
        ended,
        position,
        read_counts(entry.get("counts", None if of_loader else {}), f"the counts of {what}"),
    )


def are_all(numbers: Any, wanted: range) -> bool:
    """Return whether distinct numbers are exactly those of a range; the cost does not grow with the
    range.
    """
    return len(numbers) == len(wanted) and all(number in wanted for number in numbers)
