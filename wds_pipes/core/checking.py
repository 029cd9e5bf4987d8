"""Check the positions of a chain, and what its stages say of themselves, while it runs: a part of
``wds_pipes.testing.check_resume``.

Rules:
1. What is checked here cannot be seen in the items: a position that holds data also resumes, but it
   grows with the data, and it is written to every checkpoint.
2. A message names the stage and the field.
3. A stage that runs chains, and a node that is not ours, may hold anything in their positions.
"""

from __future__ import annotations

import json
from collections import defaultdict, deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

from wds_pipes.core.chain import Chain, Composite
from wds_pipes.core.lane import Lane
from wds_pipes.core.running import END, Mark
from wds_pipes.core.stage import Reports, Source, Stage, functional_name, is_built_in, shown_signature
from wds_pipes.core.words import plural
from wds_pipes.errors import StateError

SEE = "See RepeatSamples in tutorial 09."
_MEND = (
    "A position holds only int, float, str, bool and None, and no data: keep an earlier mark of the "
    f"source, and read the items again. {SEE}"
)
_LEAST_TEXT = 8  # characters: a shorter text in a position may equal one in a sample by chance
_MARKS = 1 << 12  # the positions that are kept
_GROWTH = 40  # characters by which a field may grow in any epoch
_ENDLESS = 1000  # items of a chain without end that are checked


def check_positions(recipe: Stage[Any]) -> int:
    """Run an epoch of a chain, and of the chains that its stages run, and check each position.
    Return how many items it had.

    Raises:
        AssertionError: a position has what it must not have, or a stage declares ``keeps_count`` or
            ``scope`` wrongly, or no ``order_options``.
    """
    chain = Chain(recipe)
    for step in chain:
        _check_options(type(step))
    count = _check(recipe)
    for inner in [chain.placed[0].source, *(chain.root.branches.values() if chain.placed[0] is chain.root else ())]:
        if inner is not None:
            check_positions(inner)
    return count


def refused(stage: Stage[Any] | None, state: str) -> str:
    """Return which stage of a chain refuses its entry of a state that its own pipeline wrote."""
    steps = [] if stage is None else Chain(stage).placed
    for lane in json.loads(state)["lanes"].values():
        for number, step in enumerate(steps, 1):
            try:
                Chain(step).load(lane["position"][:number])
            except StateError:
                return f"problem() or the types of At of {functional_name(type(step))} refuse"
    return "the pipeline refuses"


def reason(error: StateError) -> str:
    """Return what an error says of a state, without advice for users of checkpoints."""
    return str(error).removeprefix("the state is damaged: ").removesuffix(" Use an untouched checkpoint.").rstrip(".")


def _check_options(kind: type[Stage[Any]]) -> None:
    """Check that a stage of the user's says which of its options decide what comes."""
    base = next(base for base in kind.__mro__ if is_built_in(base))
    options = [name for name in shown_signature(kind).parameters if name not in shown_signature(base).parameters]
    declares = next(base for base in kind.__mro__ if "order_options" in vars(base))
    if options and declares is Stage:
        raise AssertionError(
            f"{kind.__name__} takes {', '.join(options)}, and declares no order_options: name those that decide which "
            f"items come, or in which order, as in order_options = ({options[-1]!r},). Then a state with other values "
            "is refused. Write order_options = () if none does."
        )


def _check(recipe: Stage[Any]) -> int:
    """Run an epoch of a chain, and check its stages, from the last that runs chains on. Return how
    many items it had.
    """
    chain = Chain(recipe)
    running = recipe.open(Lane(chain.root.seed, 0))
    steps, never_ends = Chain(running).placed[::-1], chain.never_ends
    taps = []
    for step in steps:
        step.items = tap = _Tap(step)
        taps.append(tap)
    sizes: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    try:
        for _ in islice(running.items, _ENDLESS if never_ends else None):
            for step, given in zip(steps, [*taps[1:], None], strict=True):
                _check_mark(step, given, sizes)
        for step, taken, given in zip(steps, taps, () if never_ends else taps[1:], strict=False):
            _check_count(step, taken, given)
    finally:
        running.close()
    for (step_name, field), values in sizes.items():
        quarter = len(values) // 4
        if quarter >= 2 and max(values[quarter:]) > 2 * max(values[:quarter]) + _GROWTH:
            raise AssertionError(f"the position of {step_name} grows with the data, in its field {field!r}. {_MEND}")
    return taps[0].count


def _check_mark(step: Stage[Any], given: _Tap | None, sizes: dict[tuple[str, str], list[int]]) -> None:
    """Check the mark of one stage after an item; ``given``: what it has read."""
    name, mark = functional_name(type(step)), step.mark()
    if not (isinstance(mark, tuple) and len(mark) == 2 and all(isinstance(part, tuple | None) for part in mark)):
        raise AssertionError(
            f"mark() of {name} must return a tuple of two tuples that never change, its own values and the mark "
            f"of its source (None if there is none); it returns {mark!r:.100}. {SEE}"
        )
    own, before = mark
    if step.scope == "item" and step.source is not None and before not in _positions(step, given):
        raise AssertionError(
            f'{name} has scope = "item", and its mark() returns an earlier position of its source. Declare '
            'scope = "window": a stage that reads items again holds them.'
        )
    if isinstance(step, Composite) or (isinstance(step, Source) and step.counts_epochs):  # rule 3
        return
    if len(own) != len(step._defaults):
        raise AssertionError(
            f"mark() of {name} returns {len(own)} values of its own, and its At has {len(step._defaults)}: write "
            f"self._own(self.at). {SEE}"
        )
    for field, value in zip(step._defaults, own, strict=True):
        if value is not None and not isinstance(value, (int, float, str)):
            raise AssertionError(f"the position of {name} has a {type(value).__name__} in its field {field!r}. {_MEND}")
        if isinstance(value, str) and len(value) >= _LEAST_TEXT and given is not None and given.has(value):
            raise AssertionError(f"the position of {name} has data in its field {field!r}: {value!r:.60}. {_MEND}")
        sizes[name, field].append(len(str(value)))


def _check_count(step: Stage[Any], taken: _Tap, given: _Tap) -> None:
    """Compare how many items a stage has yielded with how many it took, if it says that it keeps
    their number; ``gives``: its items are of another kind, and are not compared.
    """
    unused = not given.count and not given.ended  # run() took the items when it was called
    if not step.keeps_count or step.changes_count() or step.gives or not taken.ended or unused:
        return
    name = functional_name(type(step))
    if next(given, END) is not END:
        raise AssertionError(
            f"{name} has keeps_count = True, and ended before its source. Leave keeps_count out, or yield "
            "as many items as the stage takes."
        )
    if taken.count != step.batches_of(given.count):
        raise AssertionError(
            f"{name} has keeps_count = True, and has yielded {plural(taken.count, 'item')} of the "
            f"{given.count} that it took. Leave keeps_count out, or yield as many items as the stage takes."
        )


def _positions(step: Stage[Any], given: _Tap | None) -> list[Mark]:
    """Return the positions of the source of a stage after all items that it has yielded, and before
    those that it holds for its threads. They are two if it has seen the end of its source.
    """
    assert step.source is not None
    held = step.held_items if isinstance(step, Reports) else 0
    now = [] if held else [step.source.mark()]
    return now if given is None or len(given.marks) <= held else [*now, given.marks[-1 - held]]


class _Tap(Iterator[Any]):
    """The items of a running stage, counted; the last ones are kept, and the positions after
    them.
    """

    def __init__(self, step: Stage[Any]) -> None:
        self._step, self._items, self.count, self.ended = step, step.items, 0, False
        self.close = step.items.close  # type: ignore[attr-defined]  # of Items, see ``begin``
        self._last: deque[Any] = deque(maxlen=3)
        self.marks: deque[Mark] = deque(maxlen=_MARKS)

    def __next__(self) -> Any:
        try:
            item = next(self._items)
        except StopIteration:
            self.ended = True
            raise
        self.count += 1
        self._last.append(item)
        self.marks.append(self._step.mark())
        return item

    def has(self, text: str) -> bool:
        """Return whether one of the last items has this text; the keys and URLs of samples do not
        count.
        """
        data = text.encode(errors="surrogateescape")
        return any(part in (text, data) for item in self._last for part in _parts(item) if type(part) in (str, bytes))


def _parts(item: Any) -> Any:
    """The values in a sample."""
    if isinstance(item, dict):
        return [value for name, value in item.items() if name not in ("__key__", "__url__")]
    return item if isinstance(item, (list, tuple)) else ()
