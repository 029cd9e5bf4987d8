"""Chooses the checkpoint that a rank, or all ranks together, load from a directory."""

from __future__ import annotations

import itertools
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

from wds_pipes.core.counts import logger
from wds_pipes.core.options import check_seconds
from wds_pipes.core.stage import State
from wds_pipes.errors import StateError
from wds_pipes.loader.checkpoint_files import Found, complete_steps, look_for_steps, missing_ranks, states_of_step
from wds_pipes.loader.gathering import all_gather
from wds_pipes.loader.pipe_loader import PipeLoader

_LOOK_AGAIN_SECONDS = 0.5
_FOR_EVER = 1e9  # seconds
_MOST_LOOKS = 10  # how often a rank without a group lists the directory; other ranks save once in minutes


class View(NamedTuple):
    """What a rank knows before the ranks agree on a checkpoint."""

    rank: int
    step: int | None
    rounds: int  # how often to look again
    complete: list[int]
    found: Found
    error: str | None  # why it cannot list the directory


def read_alone(root: Path, step: int | None) -> tuple[int, list[State]] | None:
    """Return the step to load and the states of its ranks, or None if there is no checkpoint.

    Another rank that has already loaded may save newer checkpoints meanwhile, and remove the one
    that is found here. If the directory has changed, look again.
    """
    looks = 0
    while True:
        found, looks = look_for_steps(root), looks + 1
        if not any(map(complete_steps, found.values())) and looks < _MOST_LOOKS and look_for_steps(root) != found:
            continue
        try:
            number = _choose(root, found, step)
            return None if number is None else (number, states_of_step(root, number))
        except StateError:
            if looks == _MOST_LOOKS or look_for_steps(root) == found:
                raise


def _choose(root: Path, found: Found, step: int | None) -> int | None:
    """Return the step to load among those that a rank sees; None: there is no checkpoint."""
    complete = [number for number, worlds in found.items() if complete_steps(worlds)]
    if not complete and step is None:
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


def agree(root: Path, loader: PipeLoader, step: int | None, group: Any, wait_seconds: float) -> int | None:
    """Return the step that all ranks load: the requested or the newest that all see complete.

    None: no rank sees a complete one. All ranks decide by the same views, so they look again
    equally often, and reach the same result.
    """
    rounds = math.ceil(min(check_seconds("wait_seconds", wait_seconds), _FOR_EVER) / _LOOK_AGAIN_SECONDS)
    for turn in itertools.count():
        found: Found = {}
        error = None
        try:
            found = look_for_steps(root)
        except StateError as problem:
            error = str(problem)
        complete = sorted(number for number, worlds in found.items() if complete_steps(worlds))
        views: list[View] = all_gather(View(loader.rank.number, step, rounds, complete, found, error), group)
        if len({view.step for view in views}) > 1:
            wanted = ", ".join(f"rank {view.rank} wants {view.step}" for view in views)
            raise StateError(
                f"the ranks do not load the same checkpoint ({wanted:.1000}): pass the same step= on all, or none."
            )
        common = sorted(set(views[0].complete).intersection(*(view.complete for view in views)))
        seen = sorted({number for view in views for number in view.complete})
        wanted_step = max(seen, default=None) if step is None else step
        alike = all(view.found == found and view.error is None for view in views)
        if wanted_step in common or turn >= views[0].rounds or (not seen and alike):
            break
        time.sleep(_LOOK_AGAIN_SECONDS)
    if failed := [view for view in views if view.error is not None]:
        raise StateError(error or f"rank {failed[0].rank} cannot load a checkpoint: {failed[0].error}")
    if not seen and not alike:
        raise StateError(
            f"the ranks see different files in {root}, and none of them a complete checkpoint: see that it is the same "
            "directory for all ranks."
        )
    if wanted_step in common or not seen:
        return _choose(root, found, step)
    late = ", ".join(str(view.rank) for view in views if wanted_step not in view.complete)
    if step is not None or not common:
        raise StateError(
            f"the ranks see no checkpoint{f' {step}' if step is not None else ''} in {root} "
            f"that is complete for all of them: checkpoint {wanted_step} is not "
            f"there, or not complete, for rank {late:.500}. See that the directory is the "
            "same for all ranks; where its file system is slow to show files, "
            "pass a longer wait_seconds."
        )
    logger.warning(
        "loading checkpoint %d of %s, the newest that all ranks see: %d is not complete for rank %.500s",
        common[-1],
        root,
        wanted_step,
        late,
    )
    return common[-1]
