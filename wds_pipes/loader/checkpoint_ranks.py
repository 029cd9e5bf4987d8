"""What the ranks of a loader know of each other when they save and load a checkpoint: which one all
load, whether they read the same files, and whether what they save belongs together.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from wds_pipes.core.counts import logger
from wds_pipes.core.options import check_seconds
from wds_pipes.core.stage import State
from wds_pipes.core.state import read_state
from wds_pipes.core.words import some
from wds_pipes.errors import StateError
from wds_pipes.loader.checkpoint_files import (
    RankFiles,
    complete_in,
    content_of,
    find_steps,
    look_for_steps,
    missing_ranks,
    rank_file,
    states_of_step,
    step_directory,
    written_since,
)
from wds_pipes.loader.meetings import exchange
from wds_pipes.loader.pipe_loader import PipeLoader, progress_of
from wds_pipes.loader.ranks import note, noted
from wds_pipes.loader.restoring import Continuation, find_continuation, why_apart
from wds_pipes.loader.sharing import with_shared, without_shared
from wds_pipes.stages.edits import Edits

_LOOK_AGAIN_SECONDS = 0.5
_FOR_EVER = 1e9  # seconds
LATE_SECONDS = 60.0  # after which all ranks see a file of a shared file system
_SAVED = "saved"
LOAD = "checkpoint.load()"
_SHARED = "See that it is the same directory for all ranks: is it in a file system that they share?"
_MOST_LOOKS = 10  # how often a rank without a group lists the directory; other ranks save once in minutes


class RankView(NamedTuple):
    """What a rank knows before the ranks agree on a checkpoint."""

    rank: int
    step: int | None
    rounds: int  # how often to look again
    found: RankFiles
    exists: bool  # whether it sees the directory
    error: str | None  # why it cannot list the directory


def read_alone(root: Path, step: int | None) -> tuple[int, list[State]] | None:
    """Return the step to load and the states of its ranks, or None if there is no checkpoint.

    Another rank that has already loaded may save newer checkpoints meanwhile, and remove the one
    that is found here. If the directory has changed, look again.
    """
    looks = 0
    while True:
        found, looks = look_for_steps(root), looks + 1
        if not complete_in(found) and looks < _MOST_LOOKS and look_for_steps(root) != found:
            continue
        try:
            number = _choose(root, found, step)
            return None if number is None else (number, states_of_step(root, number))
        except StateError:
            if looks == _MOST_LOOKS or look_for_steps(root) == found:
                raise


def _choose(root: Path, found: RankFiles, step: int | None) -> int | None:
    """Return the step to load among those that a rank sees; None: there is no checkpoint."""
    complete = complete_in(found)
    if not complete and step is None:
        if not root.exists():
            logger.warning("%s does not exist: nothing is loaded, as at a first start.", root)
        if found:
            logger.warning(
                "no checkpoint of %s is complete (%s), as a crash in the first save() leaves it: nothing is loaded, "
                "and save() replaces them. If files of other ranks are elsewhere, pass all ranks the same directory.",
                root, "; ".join(missing_ranks(worlds, number) for number, worlds in sorted(found.items())[:3]),
            )  # fmt: skip
        return None
    if step is not None and step not in complete:
        held = f"complete are {', '.join(map(str, sorted(complete)))}" if complete else "none is complete"
        raise StateError(
            f"{root} holds no complete checkpoint {step} ({held}; {missing_ranks(found.get(step, {}), step)}). "
            "Bring the missing files back, or remove what is there to start again."
        )
    number = max(complete) if step is None else step
    if newer := [at for at in sorted(found) if at > number]:
        facts = [
            f"{at} is complete, and save() refuses to go on before it"
            if at in complete
            else missing_ranks(found[at], at)
            for at in newer
        ]
        more = f" and {len(facts) - 3} more" if len(facts) > 3 else ""
        logger.warning(
            "loading checkpoint %d of %s although newer ones are there: %s%s", number, root, "; ".join(facts[:3]), more
        )
    return number


def agree(
    root: Path, loader: PipeLoader, step: int | None, group: Any, *, wait_seconds: float, timeout_seconds: float
) -> int | None:
    """Return the step that all ranks load: the requested or the newest that all see complete.

    None: no rank sees a complete one. All ranks decide by the same views, so they look again
    equally often, and reach the same result.
    """
    rounds = math.ceil(min(check_seconds("wait_seconds", wait_seconds), _FOR_EVER) / _LOOK_AGAIN_SECONDS)
    for turn in itertools.count():
        found: RankFiles = {}
        error = None
        try:
            found = look_for_steps(root)
        except StateError as problem:
            error = str(problem)
        view = RankView(loader.rank.number, step, rounds, found, root.exists(), error)
        views: list[RankView] = exchange(view, LOAD, group, timeout_seconds)
        if len({view.step for view in views}) > 1:
            wanted = ", ".join(f"rank {view.rank} wants {view.step}" for view in views)
            raise StateError(
                f"the ranks do not load the same checkpoint ({wanted:.1000}): pass the same step= on all, or none."
            )
        complete = [complete_in(view.found) for view in views]
        common, seen = set.intersection(*complete), set.union(*complete)
        wanted_step = max(seen, default=None) if step is None else step
        alike = all(view.found == found and view.error is None for view in views)
        if wanted_step in common or turn >= views[0].rounds or (not seen and alike):
            break
        time.sleep(_LOOK_AGAIN_SECONDS)
    if failed := [view for view in views if view.error is not None]:
        raise StateError(error or f"rank {failed[0].rank} cannot load a checkpoint: {failed[0].error}")
    if not seen and not alike:
        other = next(view for view in views if view.found != views[0].found)
        raise StateError(
            f"the ranks see different files in {root}, and none of them a complete checkpoint: rank {views[0].rank} "
            f"sees {_seen(views[0])}, and rank {other.rank} sees {_seen(other)}. {_SHARED}"
        )
    if wanted_step in common or not seen:
        return _choose(root, found, step)
    late = ", ".join(str(view.rank) for view in views if wanted_step not in complete_in(view.found))
    without = [view.rank for view in views if not view.exists]
    if step is not None or not common:
        raise StateError(
            f"the ranks see no checkpoint{f' {step}' if step is not None else ''} in {root} "
            f"that is complete for all of them: checkpoint {wanted_step} is not "
            f"there, or not complete, for rank {late:.500}"
            + (f", and there is no such directory for rank {some(without)}" if without else "")
            + f". {_SHARED} Where its file system is slow to show files, pass a longer wait_seconds."
        )
    logger.warning(
        "loading checkpoint %d of %s, the newest that all ranks see: %d is not complete for rank %.500s",
        max(common),
        root,
        wanted_step,
        late,
    )
    return max(common)


def _seen(view: RankView) -> str:
    """Return what a rank sees of a directory without complete checkpoints."""
    if not view.found:
        return "no checkpoint" if view.exists else "no such directory"
    return "; ".join(missing_ranks(worlds, number) for number, worlds in sorted(view.found.items())[:3])


@contextlib.contextmanager
def agreeing(loader: PipeLoader, group: Any, what: str, timeout_seconds: float) -> Iterator[list[str]]:
    """Make the block succeed on all ranks of a loader, or raise on all of them.

    All raise if the block fails on one rank, or if the ranks append different values to the list.
    """
    values: list[str] = []
    error: Exception | None = None
    try:
        yield values
    except Exception as problem:
        error = problem
    own = loader.rank.number, values, None if error is None else str(error)
    results = exchange(own, LOAD, group, timeout_seconds)
    if error is not None:
        raise error
    for rank, _, failed in results:
        if failed is not None:
            raise StateError(f"rank {rank} cannot load {what}: {failed}")
    if any(of_rank != values for _, of_rank, _ in results):
        raise StateError(f"the ranks read different files of {what}. {_SHARED} Then load it again.")


def has_group(loader: PipeLoader, group: Any) -> bool:
    """Whether torch.distributed connects this rank of a loader to the others."""
    if loader.rank.of == 1:
        return False
    return bool(dist.is_available() and dist.is_initialized() and dist.get_world_size(group) > 1)


def gather_states(loader: PipeLoader, group: Any, what: str, timeout_seconds: float) -> list[State]:
    """Return the states of all ranks, in the order of the ranks; of processes that share a rank,
    one state. ``what`` and ``timeout_seconds`` are as in ``exchange``.
    """
    state = loader.state_dict()
    if state["world_size"] == 1:
        return [state]
    if not (dist.is_available() and dist.is_initialized()):
        raise StateError(
            f"this is rank {state['rank']} of {state['world_size']}, and torch.distributed, "
            "which collects the states of the others, is not initialised: "
            "call init_process_group(), or use checkpoint.save(), which needs none."
        )
    states: list[State] = exchange(without_shared(state), what, group, timeout_seconds)
    states.sort(key=lambda state: int(state["rank"]))
    apart = [state for place, state in enumerate(states) if place == 0 or state != states[place - 1]]
    return with_shared(apart)


def continuation_of(loader: PipeLoader, states: list[State], where: str, edits: Edits | None = None) -> Continuation:
    """Return where a loader continues after loading the states of all ranks.

    ``where`` says, for messages, where the states are from.
    """
    try:
        progress = progress_of(loader)
        return find_continuation(progress.editable, states, edits or Edits(), progress.excluded)
    except StateError as error:
        raise StateError(f"cannot load {where}: {error}") from error


_MEND = "With epoch_end='loop' all ranks have the same number of batches, and a checkpoint fits any number of ranks."


@dataclass
class Known:
    """What is known of the checkpoints of a loader.

    Attributes:
        step: the checkpoint that it saved or loaded last.
        saved: the file that it saved last, and its time by the clock of the file system; a step
            that failed has none.
        saved_step: the checkpoint of that file.
        root: the directory from which it loaded last.
        incomplete: the newer checkpoints there that were incomplete then.
        warned: whether it was warned that a checkpoint fits this number of ranks only.
        apart: whether it was warned that this rank does not see the files of rank 0.
    """

    step: int = 0
    saved: tuple[Path, int] | None = None
    saved_step: int = 0
    root: Path | None = None
    incomplete: set[int] = field(default_factory=set)
    warned: bool = False
    apart: bool = False


_known: weakref.WeakKeyDictionary[PipeLoader, Known] = weakref.WeakKeyDictionary()


def known_of(loader: PipeLoader) -> Known:
    """Return what is known of the checkpoints of a loader, to change it."""
    return _known.setdefault(loader, Known())


def newer_incomplete(root: Path, number: int) -> set[int]:
    """Return the incomplete checkpoints after ``number``."""
    found = look_for_steps(root)
    return {at for at in found.keys() - complete_in(found) if at > number}


def newest_complete(root: Path, loader: PipeLoader) -> int:
    """Return the newest checkpoint that is complete, -1 if there is none.

    One that was incomplete when the loader loaded from the directory does not count: ranks that are
    ahead may complete it now with files of this rank that are left from a run that crashed.
    """
    known = known_of(loader)
    complete = complete_in(find_steps(root))
    return max(complete - known.incomplete if known.root == root else complete, default=-1)


def note_saved(loader: PipeLoader, number: int) -> None:
    """Let the other ranks know which file of a checkpoint rank 0 has saved first."""
    if known_of(loader).saved is None:
        note(progress_of(loader), loader.rank, _SAVED, json.dumps([number, time.time()]))


def warn_of_own_directory(root: Path, loader: PipeLoader) -> None:
    """Warn if the file that rank 0 has saved is not where this rank has saved its own.

    No rank waits for that: a file system may show files of other ranks late.
    """
    known, (rank, world) = known_of(loader), loader.rank
    if rank == 0 or known.apart or known.saved is None or (text := noted(progress_of(loader), _SAVED)) is None:
        return
    number, at = json.loads(text)
    place = step_directory(root, number)
    if number > known.saved_step or time.time() - at < LATE_SECONDS or (place / rank_file(0, world)).exists():
        return
    if (place / rank_file(rank, world)).exists():  # not removed, as old checkpoints are
        known.apart = True
        logger.warning(
            "rank %d saves checkpoints to %s, where the file of rank 0 of checkpoint %d is not: load() will refuse "
            "them, since each needs the files of all ranks. %s Or pass gather(loader) to torch.save on one rank.",
            rank, root, number, _SHARED,
        )  # fmt: skip


def check_other_loaders(path: Path, loader: PipeLoader, text: str) -> None:
    """Check that no other loader of this process has saved another state in the file at ``path``.

    A loader that continues from a checkpoint of the directory replaces what was saved after it.

    Raises:
        StateError: two loaders save to one directory, and the states of one would be lost.
    """
    if known_of(loader).root == path.parent.parent:
        return
    for other, known in list(_known.items()):
        with contextlib.suppress(FileNotFoundError):
            replaces = other is not loader and known.saved == (path, path.stat().st_mtime_ns)
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
    progress, known = progress_of(loader), known_of(loader)
    if world == 1 or (known.saved is not None and number <= known.saved_step):
        return
    since = progress.made if known.saved is None else known.saved[1]
    if (other := written_since(root, number, rank, world, since)) is None:
        return
    states = with_shared([state, other])
    try:
        apart = why_apart(states, [read_state(one) for one in states], progress.plan.recipe.data.moved)
    except StateError as error:
        raise StateError(
            f"load() would refuse checkpoint {number}: the states of ranks {rank} and {other['rank']} do not belong "
            f"together, since {error} Let all ranks save after the same batch. {_MEND}"
        ) from error
    if apart is not None and not known.warned:
        known.warned = True
        logger.warning(
            "checkpoint %d fits %d ranks only, since with epoch_end='exact' ranks are in different epochs now. %s",
            number, world, _MEND,
        )  # fmt: skip
