"""Checkpoints of a PipeLoader: as files on a disk, or as one state of all ranks.

    from wds_pipes import checkpoint

    done = checkpoint.load("run/data", loader)  # the newest complete one; None if there is none
    for step, batch in enumerate(loader, start=0 if done is None else done + 1):
        ...
        checkpoint.save("run/data", loader, step=step)  # every rank, at the same step

Rules:
1. When saving, no rank waits for another, except with torch.distributed before the first batch:
   then they compare what they will read, and wait for at most a minute. They only share a
   directory, in which each writes its own file, such as
   ``directory/step-0000001200/rank-0002-of-0004.json``. The directory is in a local or shared file
   system, not at a URL.
2. A file is written in the same directory under a hidden name, flushed to the disk and renamed: it
   is complete or not there. A checkpoint is complete when the files of all its ranks are there. A
   crash while saving leaves an incomplete checkpoint; the one before remains valid.
3. A file that is not as it was written is an error, never a reason to take an older checkpoint or
   to start again.
4. Only files that this module wrote are ever removed, by any rank at any time, and only when
   ``keep`` newer checkpoints are complete.
5. When loading with torch.distributed, ranks compare what they see: all read the same checkpoint,
   or all raise. See ``load``. All ranks call it, also at a first start, when nothing is there.
6. A rank does not save what ``load`` would refuse, as far as it sees: it compares its state with
   that of another rank at the same step. A file counts if it is newer than this loader's last one,
   or, when a loader saves first, than the loader: older ones may be left from a run that crashed,
   and will be replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from wds_pipes.core.options import check_count, check_seconds, checks_options
from wds_pipes.core.stage import State
from wds_pipes.errors import StateError
from wds_pipes.loader.checkpoint_files import (
    FORMAT,
    checksum_of,
    content_of,
    local_directory,
    rank_file,
    remove_old,
    states_of_step,
    step_directory,
    sync_directory,
    write_file,
)
from wds_pipes.loader.checkpoint_ranks import (
    agree,
    agreeing,
    check_other_loaders,
    check_others,
    continuation_of,
    gather_states,
    has_group,
    known_of,
    newer_incomplete,
    newest_complete,
    note_saved,
    read_alone,
    warn_of_own_directory,
)
from wds_pipes.loader.meetings import TIMEOUT_SECONDS
from wds_pipes.loader.pipe_loader import PipeLoader, progress_of
from wds_pipes.loader.restoring import merge_states
from wds_pipes.loader.sharing import with_shared, without_shared
from wds_pipes.stages.edits import Edits

WAIT_SECONDS = 10.0  # network file systems may show a new name only after some seconds


@checks_options
def save(directory: str | os.PathLike[str], loader: PipeLoader, *, keep: int = 3, step: int | None = None) -> Path:
    """Save this rank's file of a checkpoint.

    Every rank must call it at the same step. The checkpoint is complete when ``save`` has returned
    on all ranks.

    Args:
        directory: where the checkpoints are, the same for all ranks; it is created if necessary.
            With torch.distributed, a rank that does not see the files of rank 0 warns of that at a
            later ``save``, a minute after: a directory of each node is no shared one.
        loader: the loader; the position after its last returned batch is saved.
        keep: how many complete checkpoints to keep; older ones are removed.
        step: the number of the checkpoint, such as the training step; it must not decrease. The
            same number again replaces that checkpoint. None: one more than the last one that this
            loader saved or loaded, which counts saves, not training steps.

    Returns:
        The directory of the checkpoint.

    Raises:
        StateError: the file cannot be written, or the directory holds a newer checkpoint, which
            ``load`` would load instead of this one, or another rank has saved a state that does not
            belong to this one, so that ``load`` would refuse both.
    """
    _check_loader("save(directory, loader)", loader)
    root = local_directory(directory)
    check_count("keep", keep)
    known = known_of(loader)
    number = known.step + 1 if step is None else check_count("step", step, least=0)
    known.step = number  # also if saving fails, so that the next number is the same on all ranks
    progress_of(loader).check_ranks_once()
    state = loader.state_dict()
    rank, world = state["rank"], state["world_size"]
    path = step_directory(root, number) / rank_file(rank, world)
    content = {"step": number, "rank": rank, "world_size": world, "state": without_shared(state)}
    text = json.dumps({"format": FORMAT, "checksum": checksum_of(content), **content}, allow_nan=False) + "\n"
    try:
        root.mkdir(parents=True, exist_ok=True)
        newest = newest_complete(root, loader)
        if newest > number or (
            newest == number and step is None and not (path.exists() and content_of(path) == text.encode())
        ):
            raise StateError(
                f"{root} holds checkpoint {newest}, and this one would be {number}: load() would not take it. "
                "Continue from the newest with load(), save to another directory, or remove what you do not want."
            )
        check_others(root, loader, state, number)
        warn_of_own_directory(root, loader)
        check_other_loaders(path, loader, text)
        path.parent.mkdir(exist_ok=True)
        write_file(path, text)
        note_saved(loader, number)
        known.saved, known.saved_step = (path, path.stat().st_mtime_ns), number
        sync_directory(root)
        remove_old(root, keep)
    except OSError as error:
        raise StateError(
            f"cannot save a checkpoint to {path}: {error}. It must be a directory that can be "
            "written to, with room; older checkpoints there are untouched."
        ) from error
    return path.parent


@checks_options
def load(
    directory: str | os.PathLike[str],
    loader: PipeLoader,
    *,
    step: int | None = None,
    group: Any = None,
    wait_seconds: float = WAIT_SECONDS,
    timeout_seconds: float = TIMEOUT_SECONDS,
    moved: bool = False,
    exclude: str | os.PathLike[str] | Iterable[str] | None = None,
    added: str | None = None,
    mix: str | None = None,
) -> int | None:
    """Make a loader continue from a checkpoint of any number of ranks and workers.

    Checkpoints that are incomplete, after a crash while saving, are ignored with a warning in the
    log, if they are newer than the newest complete one, or if none is complete.

    If torch.distributed is initialised and the loader is one of several ranks, this is a collective
    operation: every rank must call it, and all read the same checkpoint, or all raise. A file
    system may show files to some ranks late: then the ranks look again for up to ``wait_seconds``,
    and after that take the newest checkpoint that is complete for all of them. Without
    torch.distributed, each rank relies on what it sees itself: pass ``step`` on such a file system.

    Args:
        directory: the directory of ``save``, the same for all ranks. At a first start it need not
            exist; a warning in the log says so, since it may be on a disk that is not mounted. So
            call ``load`` on all ranks without an ``if``: whether the directory exists may change
            between the moments at which ranks look.
        loader: the loader, on any number of ranks and workers. If its lanes, ranks and workers fit
            the checkpoint, it continues as if it had not stopped; else the rest of the epoch is
            repartitioned. If ranks were in different epochs (which ``epoch_end="exact"`` allows),
            the number of ranks must be the same.
        step: which checkpoint, the same for all ranks; None: the newest complete one. Pass it if
            the checkpoint of the model may be older than the newest one here.
        group: the process group of the ranks; None: the default group.
        wait_seconds: how long ranks that see different checkpoints look again; the value of rank 0
            counts.
        timeout_seconds: how long to wait for ranks that have not called ``load``.
        moved: the shards are those of the checkpoint, whatever their names and the index say: see
            ``WdsPipe.load_state_dict``.
        exclude: the keys of samples to leave out from the checkpoint on, as in
            ``PipeLoader.load_state_dict``.
        added: ``"append"``: the list of shards has grown, as there.
        mix: ``"changed"``: sources or weights of a mix have changed, as there.

    Returns:
        The step of the checkpoint; None if the directory does not exist, or holds no complete one,
        on all ranks.

    Raises:
        StateError: the requested step is not complete; a file is truncated, edited, of a
            newer format, or of another run than the other files; the state does not fit the loader;
            ranks request different steps or see different files; another rank cannot load, or has
            not called ``load`` in time. The loader keeps its position.
    """
    _check_loader("load(directory, loader)", loader)
    root, known = local_directory(directory), known_of(loader)
    number, states = None, list[State]()
    if together := has_group(loader, group):
        number = agree(root, loader, step, group, wait_seconds=wait_seconds, timeout_seconds=timeout_seconds)
    elif (found := read_alone(root, step)) is not None:
        number, states = found
    if number is None:
        if incomplete := newer_incomplete(root, -1):
            known.root, known.incomplete = root, incomplete
        return None
    what = f"checkpoint {number} of {root}"
    alike = agreeing(loader, group, what, timeout_seconds) if together else nullcontext(list[str]())
    with alike as agreed:
        states = states or states_of_step(root, number)
        at = continuation_of(loader, states, str(step_directory(root, number)), Edits(moved, exclude, added, mix))
        incomplete = newer_incomplete(root, number)
        agreed.append(checksum_of({"ranks": states}) if together else "")
    known.root, known.incomplete = root, incomplete
    progress_of(loader).go_to(*at)
    known.step = number
    return number


def _check_loader(what: str, loader: object) -> None:
    """Raise TypeError if ``what`` got something else than a loader."""
    if not isinstance(loader, PipeLoader):
        raise TypeError(f"{what} takes a PipeLoader, not {type(loader).__name__}: PipeLoader(pipe) makes one of a pipe")


def gather(loader: PipeLoader, group: Any = None, *, timeout_seconds: float = TIMEOUT_SECONDS) -> State:
    """Return the states of all ranks as one state, on every rank.

    Use it with ``torch.save``, Lightning or Accelerate. Any number of ranks can load it. It is a
    collective operation: all ranks must call it at the same step. With one rank, torch.distributed
    is not needed.

    Args:
        loader: the loader of this rank.
        group: the process group of all data-parallel ranks; None: the default group. It may contain
            several processes of one data-parallel rank.
        timeout_seconds: how long to wait for the other ranks.

    Returns:
        A state for ``load_state_dict`` of every rank.

    Raises:
        StateError: the ranks are not at the same step or do not have the same pipeline, a rank has
            not called it in time, or torch.distributed is not initialised.
    """
    return merge_states(gather_states(loader, group, "checkpoint.gather()", timeout_seconds))


class AllRanks:
    """A loader whose ``state_dict`` is the state of all ranks.

    Use it with libraries that save the ``state_dict`` of an object on one rank and load it on each:

        accelerator.register_for_checkpointing(AllRanks(loader))

    Args:
        loader: the loader of this rank.
        group, timeout_seconds: as in ``gather``. Every rank must call ``state_dict``, as described
            there.
    """

    def __init__(self, loader: PipeLoader, group: Any = None, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        _check_loader("AllRanks()", loader)
        self._loader, self._group = loader, group
        self._timeout_seconds = check_seconds("timeout_seconds", timeout_seconds)

    def state_dict(self) -> State:
        """Return what ``gather`` returns."""
        return merge_states(gather_states(self._loader, self._group, "AllRanks.state_dict()", self._timeout_seconds))

    def load_state_dict(self, state: State, **options: Any) -> None:
        """Make the loader continue from ``state``, on any number of ranks; for the options see
        ``PipeLoader.load_state_dict``.
        """
        self._loader.load_state_dict(state, **options)


class DCPState:
    """A loader as a ``Stateful`` of torch.distributed.checkpoint, for any number of ranks.

        dcp.save({"model": model, "data": DCPState(loader)}, checkpoint_id=path)
        dcp.load({"model": model, "data": DCPState(loader)}, checkpoint_id=path)

    It also works with ``dcp.async_save``, which takes the position at the moment of the call.
    Without it, torch refuses the state of a loader, a pipe or a dataset when it saves (``duplicated
    flatten key data.use DCPState.``), since it could not load it.

    The states of all ranks are one JSON string under one key, which every rank requests. The
    reason: torch.distributed.checkpoint gives a rank only the keys that the rank names in advance,
    and a new rank cannot know how many ranks there were. So ``state_dict`` is a collective
    operation, as ``dcp.save`` and ``dcp.load`` are. ``dcp.load`` calls it, too; the positions of
    the loaders do not matter then.

    Args:
        loader: the loader of this rank.
        group, timeout_seconds: as in ``gather``.

    Raises:
        TypeError: when built: it is not a PipeLoader.
    """

    def __init__(self, loader: PipeLoader, group: Any = None, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        _check_loader("DCPState()", loader)
        self._loader, self._group = loader, group
        self._timeout_seconds = check_seconds("timeout_seconds", timeout_seconds)

    def state_dict(self) -> dict[str, str]:
        """Return the states of all ranks, as ``{"ranks": '{"dp_rank_0": ..., "dp_rank_1": ...}'}``.

        Raises:
            StateError: there are several ranks, and torch.distributed is not initialised, or a rank
                has not called it in time.
        """
        states = gather_states(self._loader, self._group, "DCPState.state_dict()", self._timeout_seconds)
        return {"ranks": json.dumps({f"dp_rank_{state['rank']}": without_shared(state) for state in states})}

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        """Make the loader continue from what ``dcp.load`` has read.

        If the shards were renamed since the checkpoint, pass ``ShardList(..., moved=True)``.

        Raises:
            StateError: it is not what ``state_dict`` returned, its ranks do not belong together, or
                it does not fit the loader.
        """
        try:
            ranks = json.loads(state_dict["ranks"])
            states = with_shared([ranks[f"dp_rank_{rank}"] for rank in range(len(ranks))])
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise StateError(
                f"this is not what DCPState.state_dict() gave ({error!r}): load a checkpoint "
                "that was saved with a DCPState under this name."
            ) from error
        progress_of(self._loader).go_to(*continuation_of(self._loader, states, "the distributed checkpoint"))
