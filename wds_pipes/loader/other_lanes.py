"""Check that an epoch of a pipe goes on on other numbers of lanes: a part of
``wds_pipes.testing.check_resume``.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from itertools import islice
from typing import Any

from wds_pipes.core.chain import Chain
from wds_pipes.datapipes.pipe import WdsPipe
from wds_pipes.loader.pipe_loader import PipeLoader

_CUTS = 5  # where the number of lanes is changed


def check_other_lanes(make: Callable[[], Any]) -> None:
    """Continue an epoch of one lane on two lanes, on three and on one again, and compare what came
    of it.
    """
    if not isinstance(pipe := make(), WdsPipe):
        return
    chain = Chain(pipe._stream.stage)
    steps = chain.steps[::-1]
    whole = any(step.scope == "lane" for step in steps)
    # steps of which another lane may leave out, or make, other items: its batches are others, too
    batched = max((place for place, step in enumerate(steps) if step.items_per_batch is not None), default=0)
    drops = any(step.items_per_batch is not None and not step.batches_of(1) for step in steps)
    differ = drops or any(
        not step.keeps_count and (step.counts_items or place < batched) for place, step in enumerate(steps)
    )
    if not chain.root.divides or chain.never_ends or (differ and not whole):
        return

    def loader(lanes: int) -> PipeLoader:
        return PipeLoader(make(), lanes=lanes, epoch_end="exact", rank=0, world_size=1)

    expected = list(loader(1))
    for cut in sorted({len(expected) * part // _CUTS for part in range(1, _CUTS)}):
        came: list[Any] = []
        state = None
        for lanes, count in ((1, cut), (2, 2), (3, 2), (1, len(expected) + 1)):
            source = loader(lanes)
            if state is not None:
                source.load_state_dict(state)
                if source.state_dict()["epoch"]:
                    break  # that was all
            came += islice(source, count)
            state = json.loads(json.dumps(source.state_dict()))
        lost = Counter(_names(expected, whole=whole))
        lost.subtract(_names(came, whole=whole))
        if wrong := {name: count for name, count in lost.items() if count}:
            name, count = next(iter(wrong.items()))
            raise AssertionError(
                f"cut at {cut}: on one lane, then on two, on three and on one again, {len(wrong)} samples were lost or "
                f"came too often, such as {name} ({-count:+}). A step whose items depend on those that its lane has "
                'had declares scope = "lane", and in tallies are only fields of At that run() never reads. '
                "See RepeatSamples in tutorial 09."
            )


def _names(items: Any, *, whole: bool) -> list[str]:
    """Return the keys of the samples in items; of others ``whole`` says whether their content is
    compared.
    """
    found: list[str] = []
    for item in items:
        if isinstance(item, dict) and "__key__" in item:
            keys = item["__key__"]
            found += map(str, keys if isinstance(keys, list) else [keys])
        elif isinstance(item, (list, tuple)) and any(isinstance(part, dict) for part in item):
            found += _names(item, whole=whole)
        elif whole:
            found.append(f"{item!r:.200}")
    return found
