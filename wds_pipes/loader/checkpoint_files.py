"""The files of a checkpoint: a directory for each step, and in it one file of each rank. What all
ranks share stands only in that of rank 0: see ``wds_pipes.loader.sharing``.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from wds_pipes.core.counts import logger
from wds_pipes.core.stage import State
from wds_pipes.core.state import is_count
from wds_pipes.core.words import shown
from wds_pipes.errors import StateError
from wds_pipes.io.outputs import write_small
from wds_pipes.io.urls import at_home
from wds_pipes.loader.sharing import with_shared

FORMAT = 1
MOST_BYTES = 1 << 30  # the largest file of a rank that is read; a file has some KB for each lane

_STEP = re.compile(r"step-([0-9]{10}|[1-9][0-9]{10,})")  # exactly as step_directory writes them
_RANK = re.compile(r"rank-([0-9]{4}|[1-9][0-9]{4,})-of-([0-9]{4}|[1-9][0-9]{4,})\.json")
_OURS = re.compile(rf"{_RANK.pattern}|\.{_RANK.pattern}\.partial")

RankFiles = dict[int, dict[int, set[int]]]  # step: world size: the ranks whose files are there


def look_for_steps(root: Path) -> RankFiles:
    """Return the checkpoints in a directory, none if it does not exist; StateError if it cannot be
    listed, or is one of them itself.
    """
    try:
        found = find_steps(root)
        if not found and any(map(_RANK.fullmatch, os.listdir(root))):
            step = _STEP.fullmatch(root.resolve().name)
            raise StateError(
                f"{root} is a single checkpoint: pass the directory that holds it"
                + (f", and step={int(step[1])} for this one." if step else ", under the name that save() gave it.")
            )
        return found
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise StateError(f"cannot read checkpoints from {root}: {error}.") from error


def states_of_step(root: Path, number: int) -> list[State]:
    """Return the states of all ranks of a checkpoint, in the order of the ranks."""
    place = step_directory(root, number)
    try:
        worlds = complete_steps(find_steps(root).get(number, {}))
        if not worlds:
            raise StateError(f"the checkpoint {place} was removed or changed while it was read. Load it again.")
        world = max(worlds, key=lambda world: (place / rank_file(0, world)).stat().st_mtime_ns)
        return with_shared([_read(place / rank_file(rank, world), number, rank, world) for rank in range(world)])
    except OSError as error:
        raise StateError(f"cannot read the checkpoint {place}: {error}.") from error


def written_since(root: Path, number: int, rank: int, world: int, since: int) -> State | None:
    """Return the state of another rank of a checkpoint, one that was written after the time
    ``since``, without what it shares with that of rank 0; None: there is none.
    """
    place = step_directory(root, number)
    for other in sorted(find_steps(root).get(number, {}).get(world, set()) - {rank}, reverse=True):  # rank 0 has most
        with contextlib.suppress(OSError, StateError):  # another rank may be writing it again
            if (place / rank_file(other, world)).stat().st_mtime_ns > since:
                return _read(place / rank_file(other, world), number, other, world)
    return None


def local_directory(directory: str | os.PathLike[str]) -> Path:
    """Return the path of a directory of this machine, with ``~`` expanded; ValueError for a URL."""
    if "://" in os.fspath(directory):
        raise ValueError(
            "checkpoints are kept in a local or shared file system, not at a URL such as "
            f"{directory}; see gather() for states to store elsewhere"
        )
    return Path(at_home(os.fspath(directory)))


def step_directory(root: Path, number: int) -> Path:
    """Return the directory of the checkpoint of a step."""
    return root / f"step-{number:010d}"


def rank_file(rank: int, world: int) -> str:
    """Return the name of the file of a rank."""
    return f"rank-{rank:04d}-of-{world:04d}.json"


def find_steps(root: Path) -> RankFiles:
    """Return the checkpoints in a directory, complete or not, by their names alone."""
    found: RankFiles = {}
    for entry in os.scandir(root):
        if (match := _STEP.fullmatch(entry.name)) and entry.is_dir():
            worlds = found[int(match[1])] = {}
            with contextlib.suppress(FileNotFoundError):  # another rank has just removed it
                for name in filter(None, map(_RANK.fullmatch, os.listdir(entry.path))):
                    rank, world = int(name[1]), int(name[2])
                    if rank < world:
                        worlds.setdefault(world, set()).add(rank)
    return found


def complete_steps(worlds: dict[int, set[int]]) -> list[int]:
    """Return the world sizes for which the files of all ranks are there."""
    return [world for world, ranks in worlds.items() if len(ranks) == world]


def complete_in(found: RankFiles) -> set[int]:
    """Return the complete checkpoints of a directory."""
    return {number for number, worlds in found.items() if complete_steps(worlds)}


def missing_ranks(worlds: dict[int, set[int]], number: int) -> str:
    """Return a text that says what an incomplete checkpoint lacks."""
    gaps = []
    for world, ranks in sorted(worlds.items()):
        absent = itertools.islice((rank for rank in range(world) if rank not in ranks), 10)
        gaps.append(f"{', '.join(map(str, absent))} of {world}")
    return f"step-{number:010d} lacks rank {' and rank '.join(gaps)}" if gaps else f"step-{number:010d} has no files"


def checksum_of(content: dict[str, Any]) -> str:
    """Return the checksum of the content of a file, which does not depend on white space."""
    return hashlib.blake2b(
        json.dumps(content, sort_keys=True, separators=(",", ":")).encode(), digest_size=16
    ).hexdigest()


def _read(path: Path, number: int, rank: int, world: int) -> State:
    """Return the state in a file.

    StateError if the file is truncated, changed, or not in its place.
    """
    try:
        content = json.loads(content_of(path))
        known, checksum = content.pop("format"), content.pop("checksum")
        is_whole = checksum == checksum_of(content) and "state" in content
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        known, is_whole = FORMAT, False
    if known != FORMAT:
        raise StateError(
            f"{path} has another format than {FORMAT}, the one known here: use the version of "
            "wds_pipes that wrote it, or a newer one."
        )
    if not is_whole:
        raise StateError(
            f"{path} is truncated, edited or damaged. Load an older checkpoint with step=, or bring this one back."
        )
    of = tuple(content.get(name) for name in ("step", "rank", "world_size"))
    if not all(map(is_count, of)) or of != (number, rank, world):
        raise StateError(
            f"{path} was written as rank {shown(of[1])} of {shown(of[2])} at step "
            f"{shown(of[0])}, and is not in its place: checkpoints have been mixed."
        )
    state: State = content["state"]
    return state


def content_of(path: Path) -> bytes:
    """Return the content of a regular file.

    Other kinds are refused: a pipe, for example, could block this process.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            what = f"has {found.st_size:,} bytes" if stat.S_ISREG(found.st_mode) else "is no regular file"
            raise StateError(
                f"{path} is not a checkpoint of wds_pipes: it {what}. Remove it, or load an older "
                "checkpoint with step=."
            )
        with open(handle, "rb", closefd=False) as file:
            return file.read(found.st_size)
    finally:
        os.close(handle)


def write_file(path: Path, text: str) -> None:
    """Write a file atomically: it is complete or not there, whenever the process or the machine
    stops.
    """
    write_small(str(path), text.encode("ascii"))
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk, if the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_old(root: Path, keep: int) -> None:
    """Remove the checkpoints that are older than the newest ``keep`` complete ones."""
    found = find_steps(root)
    newest = sorted(complete_in(found))[-keep:]
    for old in (number for number in found if len(newest) == keep and number < newest[0]):
        place = step_directory(root, old)
        try:
            for name in filter(_OURS.fullmatch, os.listdir(place)):
                (place / name).unlink(missing_ok=True)
            place.rmdir()
        except OSError as error:
            # another rank was faster, or there are files that are not ours
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                logger.warning("cannot remove the old checkpoint %s: %s", place, error)
