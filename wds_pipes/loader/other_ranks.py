"""Whether the states that several ranks save belong to one checkpoint, as far as a rank sees when
it saves.
"""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path

from wds_pipes.core.counts import logger
from wds_pipes.core.stage import State
from wds_pipes.core.state import read_state
from wds_pipes.core.words import shown
from wds_pipes.errors import StateError
from wds_pipes.loader.checkpoint_files import complete_steps, content_of, find_steps, look_for_steps, written_since
from wds_pipes.loader.merging import OF_A_RUN, of_other_shards
from wds_pipes.loader.pipe_loader import PipeLoader, progress_of

_MEND = "With epoch_end='loop' all ranks have the same number of batches, and a checkpoint fits any number of ranks."

# of the last file that each loader saved: the number of its checkpoint, its time by the clock of
# the file system, and its path
_last_saved: weakref.WeakKeyDictionary[PipeLoader, tuple[int, int, Path]] = weakref.WeakKeyDictionary()
# the directory from which a loader loaded last, and its newer checkpoints that were incomplete then
_loaded: weakref.WeakKeyDictionary[PipeLoader, tuple[Path, set[int]]] = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet[PipeLoader] = weakref.WeakSet()


def note_saved(loader: PipeLoader, path: Path, number: int) -> None:
    """Note that a loader has saved the file at ``path``, of checkpoint ``number``."""
    _last_saved[loader] = number, path.stat().st_mtime_ns, path


def newer_incomplete(root: Path, number: int) -> set[int]:
    """Return the incomplete checkpoints after ``number``."""
    return {at for at, worlds in look_for_steps(root).items() if at > number and not complete_steps(worlds)}


def note_loaded(loader: PipeLoader, root: Path, incomplete: set[int]) -> None:
    """Note that a loader loads from ``root``, where these newer checkpoints are incomplete."""
    _loaded[loader] = root, incomplete


def newest_complete(root: Path, loader: PipeLoader) -> int:
    """Return the newest checkpoint that is complete, -1 if there is none.

    One that was incomplete when the loader loaded from the directory does not count: ranks that are
    ahead may complete it now with files of this rank that are left from a run that crashed.
    """
    of, left = _loaded.get(loader, (None, set()))
    complete = {at for at, worlds in find_steps(root).items() if complete_steps(worlds)}
    return max(complete - left if of == root else complete, default=-1)


def check_other_loaders(path: Path, loader: PipeLoader, text: str) -> None:
    """Check that no other loader of this process has saved another state in the file at ``path``.

    A loader that continues from a checkpoint of the directory replaces what was saved after it.

    Raises:
        StateError: two loaders save to one directory, and the states of one would be lost.
    """
    if loader in _loaded and _loaded[loader][0] == path.parent.parent:
        return
    for other, (_, time, saved) in list(_last_saved.items()):
        with contextlib.suppress(FileNotFoundError):
            replaces = other is not loader and saved == path and path.stat().st_mtime_ns == time
            if replaces and content_of(path) != text.encode():
                raise StateError(
                    f"another loader of this process has saved {path}, which this one would replace: give each "
                    "loader a directory of its own."
                )


def check_others(root: Path, loader: PipeLoader, state: State, number: int) -> None:
    """Check that the state of another rank at this step, saved in this run, belongs to this one.

    Only files that are newer than the last one of this loader count, or than the loader if it has
    saved none: older ones may be left from a run that crashed, or from before this one went back to
    an earlier step, and will be replaced.

    Raises:
        StateError: it does not, so that ``load`` would refuse both.
    """
    rank, world = state["rank"], state["world_size"]
    progress = progress_of(loader)
    last, since, _ = _last_saved.get(loader, (number - 1, progress.made, None))
    if world == 1 or number <= last:
        return
    other = written_since(root, number, rank, world, since)
    if other is None or (why := _differs(state, other, progress.plan.recipe.data.moved)) is None:
        return
    if why:
        raise StateError(
            f"load() would refuse checkpoint {number}: the states of ranks {rank} and {other['rank']} do not belong "
            f"together, since {why}. Let all ranks save after the same batch of the same run. {_MEND}"
        )
    if loader not in _warned:
        _warned.add(loader)
        logger.warning(
            "checkpoint %d fits %d ranks only, since with epoch_end='exact' ranks are in different epochs now. %s",
            number, world, _MEND,
        )  # fmt: skip


def _differs(own: State, other: State, moved: bool) -> str | None:
    """Return why the states of two ranks do not belong to one checkpoint; ``""`` if they are in
    different epochs, so that it fits this number of ranks only; None if they belong together.
    """
    for name in OF_A_RUN:
        if own.get(name) != other.get(name):
            return f"they differ in {name!r} ({shown(own.get(name))} and {shown(other.get(name))})"
    if of_other_shards(read_state(own), read_state(other), moved):
        return "their shards have other names or another order"
    alone = own["epoch_end"] == "exact" and max(own["epoch"], other["epoch"]) > 0
    if own["epoch"] != other["epoch"] or own.get("partition") != other.get("partition"):
        epochs = f"they are in different epochs ({own['epoch']} and {other['epoch']}), or were loaded from other states"
        return "" if alone else epochs
    going = [state["step"] for state in (own, other) if not all(lane["ended"] for lane in state["lanes"].values())]
    if going and max(own["step"], other["step"]) > min(going):
        steps = f"they are at different steps of their epoch ({own['step']} and {other['step']})"
        return "" if alone else steps
    return None
