"""Checkpoints of a PipeLoader on a disk, and as one state of all ranks.

    from wds_pipes import checkpoint

    os.makedirs("run/data", exist_ok=True)
    checkpoint.load("run/data", loader)                    # the newest complete one; None if nothing was saved yet
    for step, batch in enumerate(loader):
        ...
        checkpoint.save("run/data", loader, step=step)     # every rank, at the same step

Rules:
1. Ranks find each other by the shared directory alone, ``directory/step-0000001200/rank-0002-of-0004.json``: no rank waits for another. It is a path of a
   local or shared file system, not a URL.
2. A file is written beside its place under a hidden name, flushed to the disk and renamed: it is whole or not there. A checkpoint is complete when the
   files of all its ranks are there; a crash in the middle of saving leaves an incomplete one, and the one before it still counts.
3. A file that is there but not as it was written is an error, never a reason to take an older checkpoint or to start again.
4. Only files that this module wrote are ever removed, by any rank at any time, and only when ``keep`` newer checkpoints are complete.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
import re
import secrets
import weakref
from pathlib import Path
from typing import Any

from wds_pipes.errors import StateError
from wds_pipes.loader import PipeLoader, merge_states
from wds_pipes.stage import State, check_count, logger

FORMAT = 1

_STEP = re.compile(r"step-([0-9]{10}|[1-9][0-9]{10,})")  # as _place writes them, and nothing else
_RANK = re.compile(r"rank-([0-9]{4}|[1-9][0-9]{4,})-of-([0-9]{4}|[1-9][0-9]{4,})\.json")
_OURS = re.compile(rf"{_RANK.pattern}|\.{_RANK.pattern}\.[0-9a-f]{{16}}\.tmp")

_Found = dict[int, dict[int, set[int]]]  # step: world size: the ranks whose files are there

_last_steps: weakref.WeakKeyDictionary[PipeLoader, int] = weakref.WeakKeyDictionary()


def save(directory: str | os.PathLike[str], loader: PipeLoader, *, keep: int = 3, step: int | None = None) -> Path:
    """Save this rank's part of a checkpoint. Every rank calls it at the same step; it is complete when the last of them has returned.

    Args:
        directory: where the checkpoints are, the same for all ranks; it is made if need be.
        loader: the loader; what it has handed out is what counts.
        keep: how many complete checkpoints to keep; older ones are removed.
        step: the number of the checkpoint, such as the training step: it must grow. None: one more than the last that this loader saved or loaded.

    Returns:
        The directory of the checkpoint.

    Raises:
        StateError: it cannot be written, or the directory holds a newer checkpoint, which ``load`` would take instead of this one.
    """
    root = _local(directory)
    check_count("keep", keep)
    number = _last_steps.get(loader, 0) + 1 if step is None else check_count("step", step, least=0)
    _last_steps[loader] = number  # also where saving fails: the next number is to be the same on all ranks
    state = loader.state_dict()
    rank, world = state["rank"], state["world_size"]
    path = _place(root, number) / _file(rank, world)
    content = {"step": number, "rank": rank, "world_size": world, "state": state}
    text = json.dumps({"format": FORMAT, "checksum": _checksum(content), **content}, allow_nan=False) + "\n"
    try:
        root.mkdir(parents=True, exist_ok=True)
        newest = max((at for at, worlds in _find(root).items() if _complete(worlds)), default=-1)
        if newest > number or (newest == number and step is None and not (path.exists() and path.read_text("ascii") == text)):
            raise StateError(
                f"{root} holds checkpoint {newest}, and this one would be {number}: load() would not take it. "
                "Continue from the newest with load(), save to another directory, or remove what you do not want."
            )
        path.parent.mkdir(exist_ok=True)
        _write(path, text)
        _sync_directory(root)
        _remove_old(root, keep)
    except OSError as error:
        raise StateError(
            f"cannot save a checkpoint to {path}: {error}. It must be a directory that can be written to, with room; older checkpoints there are untouched."
        ) from error
    return path.parent


def load(directory: str | os.PathLike[str], loader: PipeLoader, *, step: int | None = None) -> int | None:
    """Let a loader continue from a checkpoint, by whatever number of ranks and workers it was saved.

    Incomplete checkpoints that are newer, left by a crash in the middle of saving, are passed over with a warning in the log.

    Args:
        directory: where ``save`` wrote, the same for all ranks. It must exist: one that is not there may be one that is not mounted.
        loader: the loader, of any number of ranks and workers: where lanes and hosts fit it goes on as it would have, else what is left is dealt again.
        step: which checkpoint; None: the newest complete one. Give it where the model's checkpoint may be an older one than the newest here.

    Returns:
        The step of the checkpoint; None if nothing was ever saved there.

    Raises:
        StateError: there are checkpoints but none is complete, a file is truncated, edited, of a newer format or of another run than its neighbours, or the
            state does not fit the loader. The loader stays as it was.
    """
    root = _local(directory)
    try:
        found = _find(root)
    except FileNotFoundError as error:
        raise StateError(f"{root} does not exist: for a first start make it, else see whether its disk is mounted.") from error
    except OSError as error:
        raise StateError(f"cannot read checkpoints from {root}: {error}.") from error
    complete = [number for number, worlds in found.items() if _complete(worlds)]
    if not found and step is None:
        return None
    if not complete or (step is not None and step not in complete):
        held = f"complete are {', '.join(map(str, sorted(complete)))}" if complete else "none is complete"
        wanted = max(found, default=0) if step is None else step
        raise StateError(
            f"{root} holds no complete checkpoint {'at all' if step is None else step} ({held}; {_missing(found.get(wanted, {}), wanted)}). "
            "Bring the missing files back, or remove what is there to start again."
        )
    number = max(complete) if step is None else step
    if newer := [at for at in sorted(found) if at > number]:
        facts = [f"{at} is complete, and save() refuses to go on before it" if at in complete else _missing(found[at], at) for at in newer]
        more = f" and {len(facts) - 3} more" if len(facts) > 3 else ""
        logger.warning("loading checkpoint %d of %s although newer ones are there: %s%s", number, root, "; ".join(facts[:3]), more)
    place = _place(root, number)
    try:
        world = max(_complete(found[number]), key=lambda world: (place / _file(0, world)).stat().st_mtime_ns)
        states = [_read(place / _file(rank, world), number, rank, world) for rank in range(world)]
    except OSError as error:
        raise StateError(f"cannot read the checkpoint {place}: {error}.") from error
    _restore(loader, states, str(place))
    _last_steps[loader] = number
    return number


def gather(loader: PipeLoader, group: Any = None) -> State:
    """The states of all ranks as one, on every rank: for ``torch.save``, Lightning or Accelerate. Any number of ranks can load it.

    All ranks call it at the same step (it is a collective); with one rank torch.distributed is not needed.

    Args:
        loader: the loader of this rank.
        group: the process group of all data-parallel ranks; None: the default group. Processes that share a data-parallel rank may all be in it.

    Returns:
        What ``load_state_dict`` takes on every rank.

    Raises:
        StateError: the ranks are not at the same step or not of the same pipeline, or torch.distributed is not initialised.
    """
    return merge_states(_gather(loader, group))


class AllRanks:
    """A loader whose ``state_dict`` is that of all ranks: for what saves an object by its ``state_dict`` on one rank, and loads it on each.

        accelerator.register_for_checkpointing(AllRanks(loader))

    Args:
        loader: the loader of this rank.
        group: as in ``gather``, which says what every rank has to do.
    """

    def __init__(self, loader: PipeLoader, group: Any = None) -> None:
        self._loader, self._group = loader, group

    def state_dict(self) -> State:
        """What ``gather`` gives."""
        return gather(self._loader, self._group)

    def load_state_dict(self, state: State) -> None:
        """Let the loader continue from it, on any number of ranks."""
        self._loader.load_state_dict(state)


class DCPState:
    """A loader as a ``Stateful`` of torch.distributed.checkpoint, for any number of ranks.

        dcp.save({"model": model, "data": DCPState(loader)}, checkpoint_id=path)
        dcp.load({"model": model, "data": DCPState(loader)}, checkpoint_id=path)

    The states of all ranks are one JSON string under one key that every rank asks for, since torch.distributed.checkpoint gives a rank only keys it names
    in advance, and a new rank cannot know how many there were. So ``state_dict`` is a collective, as ``dcp.save`` and ``dcp.load`` are; ``dcp.load`` calls
    it too, and does not mind where the loaders stand.

    Args:
        loader: the loader of this rank.
        group: as in ``gather``.
    """

    def __init__(self, loader: PipeLoader, group: Any = None) -> None:
        self._loader = loader
        self._group = group

    def state_dict(self) -> dict[str, str]:
        """The states of all ranks, as ``{"ranks": '{"dp_rank_0": ..., "dp_rank_1": ...}'}``.

        Raises:
            StateError: there are several ranks, and torch.distributed is not initialised.
        """
        return {"ranks": json.dumps({f"dp_rank_{state['rank']}": state for state in _gather(self._loader, self._group)})}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        """Let the loader continue from what ``dcp.load`` has read.

        Raises:
            StateError: it is not what ``state_dict`` gave, its ranks do not belong together, or it does not fit the loader.
        """
        try:
            ranks = json.loads(state_dict["ranks"])
            states = [ranks[f"dp_rank_{rank}"] for rank in range(len(ranks))]
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"this is not what DCPState.state_dict() gave ({error!r}): load a checkpoint that was saved with a DCPState under this name."
            ) from error
        _restore(self._loader, states, "the distributed checkpoint")


def _gather(loader: PipeLoader, group: Any) -> list[State]:
    """The states of all ranks, by rank; processes that share a rank give one."""
    state = loader.state_dict()
    if state["world_size"] == 1:
        return [state]
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        raise StateError(
            f"this is rank {state['rank']} of {state['world_size']}, and torch.distributed, which the others are asked by, is not initialised: "
            "call init_process_group(), or use checkpoint.save(), which needs none."
        )
    states: list[State] = [{}] * dist.get_world_size(group)
    dist.all_gather_object(states, state, group=group)
    states.sort(key=lambda state: int(state["rank"]))
    return [state for place, state in enumerate(states) if place == 0 or state != states[place - 1]]


def _restore(loader: PipeLoader, states: list[State], where: str) -> None:
    """Load the states of all ranks; ``where`` they are from, for people."""
    try:
        whole = merge_states(states)
    except StateError as error:
        raise StateError(f"the ranks of {where} do not belong together: {error} Or load an older checkpoint.") from error
    try:
        loader.load_state_dict(whole)
    except StateError as error:
        error.add_note(f"The state is from {where}.")
        raise


def _local(directory: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(directory):
        raise ValueError(f"checkpoints are kept in a local or shared file system, not at a URL such as {directory}; see gather() for states to store elsewhere")
    return Path(directory)


def _place(root: Path, number: int) -> Path:
    return root / f"step-{number:010d}"


def _file(rank: int, world: int) -> str:
    return f"rank-{rank:04d}-of-{world:04d}.json"


def _find(root: Path) -> _Found:
    """The checkpoints in a directory, complete or not, by their names alone."""
    found: _Found = {}
    for entry in os.scandir(root):
        if (match := _STEP.fullmatch(entry.name)) and entry.is_dir():
            worlds = found[int(match[1])] = {}
            with contextlib.suppress(FileNotFoundError):  # another rank has just removed it
                for name in filter(None, map(_RANK.fullmatch, os.listdir(entry.path))):
                    rank, world = int(name[1]), int(name[2])
                    if rank < world:
                        worlds.setdefault(world, set()).add(rank)
    return found


def _complete(worlds: dict[int, set[int]]) -> list[int]:
    """The world sizes of which all ranks are there."""
    return [world for world, ranks in worlds.items() if len(ranks) == world]


def _missing(worlds: dict[int, set[int]], number: int) -> str:
    """What is missing of an incomplete checkpoint, in words."""
    gaps = []
    for world, ranks in sorted(worlds.items()):
        absent = itertools.islice((rank for rank in range(world) if rank not in ranks), 10)
        gaps.append(f"{', '.join(map(str, absent))} of {world}")
    return f"step-{number:010d} lacks rank {' and rank '.join(gaps)}" if gaps else f"step-{number:010d} has no files"


def _checksum(content: dict[str, Any]) -> str:
    """The checksum of what a file holds, whatever its white space."""
    return hashlib.blake2b(json.dumps(content, sort_keys=True, separators=(",", ":")).encode(), digest_size=16).hexdigest()


def _read(path: Path, number: int, rank: int, world: int) -> State:
    """The state in a file, which must be whole, as it was written, and in its place."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise StateError(f"{path} is truncated or damaged: it is not JSON ({error}). Load an older checkpoint with step=, or bring this one back.") from error
    if not isinstance(content, dict) or not {"format", "checksum", "state"} <= content.keys():
        raise StateError(f"{path} is not a checkpoint of wds_pipes. Remove it, or load an older checkpoint with step=.")
    if content.pop("format") != FORMAT:
        raise StateError(f"{path} has another format than {FORMAT}, the one known here: use the version of wds_pipes that wrote it, or a newer one.")
    if content.pop("checksum") != _checksum(content):
        raise StateError(f"{path} has been edited or damaged: its checksum differs. Load an older checkpoint with step=, or bring this one back.")
    of = tuple(content.get(name) for name in ("step", "rank", "world_size"))
    if of != (number, rank, world):
        raise StateError(f"{path} was written as rank {of[1]} of {of[2]} at step {of[0]}, and is not in its place: checkpoints have been mixed.")
    state: State = content["state"]
    return state


def _write(path: Path, text: str) -> None:
    """Write a file that is whole or not there, whenever the process or the machine stops."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "x", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove_old(root: Path, keep: int) -> None:
    """Remove what is older than the newest ``keep`` complete checkpoints."""
    found = _find(root)
    complete = sorted((number for number, worlds in found.items() if _complete(worlds)), reverse=True)
    for old in (number for number in found if len(complete) >= keep and number < complete[keep - 1]):
        place = _place(root, old)
        try:
            for name in filter(_OURS.fullmatch, os.listdir(place)):
                (place / name).unlink(missing_ok=True)
            place.rmdir()
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):  # another rank was faster, or somebody else's files are there
                logger.warning("cannot remove the old checkpoint %s: %s", place, error)
