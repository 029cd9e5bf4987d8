"""For tests of your own pipelines and stages: makes shards, and checks that resuming is exact."""

from __future__ import annotations

import copy
import heapq
import json
import os
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from wds_pipes.codecs.codec import Codec
from wds_pipes.core.chain import Chain, Composite
from wds_pipes.core.lane import Lane
from wds_pipes.core.stage import (
    END,
    Given,
    Mark,
    Reports,
    Source,
    Stage,
    functional_name,
    is_built_in,
    run_over,
    shown_signature,
)
from wds_pipes.core.stream import Stream
from wds_pipes.core.words import plural
from wds_pipes.errors import StateError
from wds_pipes.stages import BatchSamples
from wds_pipes.tar.writer import TarWriter

_CUTS_IN_LANES = 5  # where ``check_other_lanes`` changes the number of lanes


def _picture(rng: random.Random, number: int) -> Any:
    return np.frombuffer(rng.randbytes(8 * 8 * 3), np.uint8).reshape(8, 8, 3)


_FIELDS: dict[str, Callable[[random.Random, int], Any]] = {
    "txt": lambda rng, number: f"text {number} " + "".join(rng.choices("abcdefgh ", k=rng.randrange(5, 40))),
    "cls": lambda rng, number: rng.randrange(10),
    "json": lambda rng, number: {"number": number, "weight": rng.random()},
    **dict.fromkeys(("jpg", "png"), _picture),
    "npy": lambda rng, number: np.array([rng.random() for _ in range(3)], np.float32),
}


def make_shards(
    directory: str | os.PathLike[str],
    *,
    shards: int,
    samples: int | Sequence[int],
    fields: Sequence[str] | Mapping[str, Callable[[random.Random, int], Any]] = ("txt", "cls"),
    seed: int = 0,
) -> list[str]:
    """Write small shards, the same for the same arguments, and return their paths.

    Args:
        directory: where to write; it is created if necessary.
        shards: how many shards to write.
        samples: how many samples each shard has, or a list with the number of each shard (which may
            be 0).
        fields: names of fields with ready-made content (txt, cls, json; jpg or png for an 8 x 8
            image, npy for 3 floats), or a dict from names to functions ``(rng, number)`` that
            return the content.
        seed: the seed of the content.
    """
    os.makedirs(directory, exist_ok=True)
    if not isinstance(fields, Mapping):
        if unknown := set(fields) - _FIELDS.keys():
            raise ValueError(
                f"there is no ready-made content for {min(unknown)!r}: give a function, "
                f"fields={{{min(unknown)!r}: lambda rng, number: ...}}"
            )
        fields = {name: _FIELDS[name] for name in fields}
    counts = [samples] * shards if isinstance(samples, int) else list(samples)
    if len(counts) != shards:
        raise ValueError(f"samples names {len(counts)} shards, and shards is {shards}")
    rng, number, paths = random.Random(seed), 0, []
    for shard, count in enumerate(counts):
        path = Path(directory) / f"shard-{shard:06d}.tar"
        paths.append(str(path))
        with TarWriter(path, overwrite=True) as writer:
            for _ in range(count):
                writer.write({"__key__": f"{number:08d}", **{name: make(rng, number) for name, make in fields.items()}})
                number += 1
    return paths


def check_resume(make: Callable[[], Any], *, epochs: int = 2) -> list[list[Any]]:
    """Stop a pipeline at every position, resume it in a new pipeline, and compare.

    The resumed pipelines are stopped and resumed at every position again. Each state is converted
    to JSON and back. The state must be unchanged right after it was loaded. The resumed pipeline
    must yield the same items as the uninterrupted one from there on, into the next epoch.

    For a pipe of this package, these are checked too:

    - Positions hold only int, float, str, bool and None, no data of the samples, and do not grow
      with the data; a mark does not change after it was taken. A stage of yours that has options
      declares ``order_options``. ``keeps_count`` is true, and so is the scope of an item; that of a
      window cannot be told from that of a lane.
    - A step after the pipeline may hold items when the pipeline ends. So the check is repeated with
      a ``batch_samples`` after it whose last batch is not full.
    - A process may run several lanes. So one pipeline is run as the only lane and as each of two
      lanes, all in turn. Each must yield the items that a separate pipeline yields, also after a
      resume halfway.
    - An epoch may continue on another number of lanes. So a pipe that PipeLoader divides is stopped
      on one lane, and goes on on two, on three and on one again: each sample must come once, if it
      has a ``__key__``. All items must, if the scope of a stage is the lane. They need not after a
      stage whose scope is a window, as what it yields may differ in other lanes.

    Args:
        make: builds the pipeline, the same each time: an iterable that has ``state_dict()`` and
            ``load_state_dict()``.
        epochs: how many epochs to run; the pipeline is stopped in the first ``epochs - 1`` of them.

    Returns:
        The items of each epoch.

    Raises:
        AssertionError: a resumed run differs; the message says where it was cut, for the first cut
            that fails. Or a position or a declaration is wrong; the message names the stage.
    """
    if (stage := _stage(make())) is not None:
        count = _check_positions(stage)
        _check_order(stage)
    whole = _check_cuts(make, epochs)
    if stage is not None and count != len(whole[0]):
        raise AssertionError(
            f"the pipeline yielded {plural(count, 'item')} when it first ran, and {len(whole[0])} when make() had "
            "built it again: does make(), or a function of a step, use an object that remembers what came before?"
        )
    if _stage(make()) is not None:
        _check_batches_after(make, epochs, len(whole[0]))
        _check_lanes(make)
        if not isinstance(make(), Stream):
            check_other_lanes(make)
    return whole


def check_other_lanes(make: Callable[[], Any]) -> None:
    """Continue an epoch of one lane on two lanes, on three and on one again, and compare what came
    of it.
    """
    from wds_pipes.datapipes.pipe import WdsPipe  # these need torch
    from wds_pipes.loader.pipe_loader import PipeLoader

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
    for cut in sorted({len(expected) * part // _CUTS_IN_LANES for part in range(1, _CUTS_IN_LANES)}):
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
        lost = Counter(_keys_of(expected, whole=whole))
        lost.subtract(_keys_of(came, whole=whole))
        if wrong := {name: count for name, count in lost.items() if count}:
            name, count = next(iter(wrong.items()))
            raise AssertionError(
                f"cut at {cut}: on one lane, then on two, on three and on one again, {len(wrong)} samples were lost or "
                f"came too often, such as {name} ({-count:+}). A step whose items depend on those that its lane has "
                'had declares scope = "lane", and in tallies are only fields of At that run() never reads. '
                "See RepeatSamples in tutorial 09."
            )


def _keys_of(items: Any, *, whole: bool) -> list[str]:
    """Return the keys of the samples in items; of others ``whole`` says whether their content is
    compared.
    """
    found: list[str] = []
    for item in items:
        if isinstance(item, dict) and "__key__" in item:
            keys = item["__key__"]
            found += map(str, keys if isinstance(keys, list) else [keys])
        elif isinstance(item, (list, tuple)) and any(isinstance(part, dict) for part in item):
            found += _keys_of(item, whole=whole)
        elif whole:
            found.append(f"{item!r:.200}")
    return found


def _check_cuts(make: Callable[[], Any], epochs: int) -> list[list[Any]]:
    """Stop and resume at every position; return the items of each epoch."""
    pipeline = make()
    whole: list[list[Any]] = []
    cuts = [(0, _dump(pipeline))]
    place = 0
    for epoch in range(epochs):
        whole.append([])
        for item in pipeline:
            whole[-1].append(item)
            place += 1
            if epoch < epochs - 1:
                cuts.append((place, _dump(pipeline)))
        if epoch < epochs - 1:
            cuts.append((place, _dump(pipeline)))
    flat = [item for items in whole for item in items]
    ends = {sum(map(len, whole[:epoch])) for epoch in range(epochs + 1)}
    last_cut = len(flat) - len(whole[-1])
    checked = set()
    heapq.heapify(cuts)
    while cuts:
        cut = heapq.heappop(cuts)  # the first one in the epoch: its message is the easiest to understand
        if cut not in checked:
            checked.add(cut)
            for further in _resume(make, cut, flat, ends, last_cut):
                heapq.heappush(cuts, further)
    return whole


def _resume(
    make: Callable[[], Any], cut: tuple[int, str], flat: list[Any], ends: set[int], last_cut: int
) -> list[tuple[int, str]]:
    """Resume at a cut and compare with the rest of ``flat``; return the cuts on the way."""
    place, state = cut
    pipeline = make()
    try:
        pipeline.load_state_dict(json.loads(state))
    except StateError as error:
        # without what is meant for users of checkpoints
        reason = str(error).removeprefix("the state is damaged: ").removesuffix(" Use an untouched checkpoint.")
        raise AssertionError(
            f"cut at {place}: {_refused(_stage(pipeline), state)} its own position: {reason.rstrip('.')}. "
            f"{_TYPES} The state: {_short(state)}"
        ) from error
    again = _dump(pipeline)
    # At the end of an epoch, torchdata's loaders continue with the next one when their state is
    # requested.
    if again != state and not (place in ends and type(pipeline).__module__.startswith("torchdata.")):
        raise AssertionError(
            f"cut at {place}: the state differs right after it was loaded. {_HELP} The state: {_short(state)}, then "
            f"{_short(again)}"
        )

    def failed(what: str) -> AssertionError:
        return AssertionError(f"cut at {cut[0]}: {what}. {_HELP} The state: {_short(state)}")

    cuts, empty = [(place, again)], 0
    while place < len(flat) and empty < 2:
        empty += 1
        for item in pipeline:
            if not same(item, flat[place]):
                came, expected = _apart(item, flat[place])
                raise failed(f"item {place} is {came}, not {expected}")
            place, empty = place + 1, 0
            if place <= last_cut:
                cuts.append((place, _dump(pipeline)))
            if place == len(flat):
                break
        if place not in ends:
            raise failed(f"the epoch ends after item {place}, not at one of {sorted(ends)}")
    if place < len(flat):
        raise failed(f"nothing comes after item {place} of {len(flat)}")
    return cuts


_SEE = "See RepeatSamples in tutorial 09."
_HELP = (
    "What the stage needs to continue is not in its position: was something made in __init__ changed, or "
    "mark() taken after it had read ahead? A FlatMap that remembers earlier items sets self.lookback. Does a function "
    "of a step, as in then(fn) or filter_samples(fn), remember "
    "anything from one call to the next, change an item that it puts back, or draw random numbers of its own? "
    f"{_SEE}"
)
_TYPES = (
    "A field of At keeps the type of its default: one that begins at 0 is a count, never negative and never a "
    "fraction. Write 0.0 for any finite number, None for what can be anything."
)


def _apart(*items: Any) -> list[str]:
    """Return the texts of items, shortened, from shortly before the place where they differ."""
    texts = [repr(item) for item in items]
    start = next((place for place, letters in enumerate(zip(*texts)) if len(set(letters)) > 1), 0) - 100
    return [f"... {text[start:][:200]}" if start > 0 else text[:200] for text in texts]


def _short(state: str) -> str:
    """Return the part of a state that positions are in, shortened."""
    whole = json.loads(state)
    if isinstance(whole, dict) and "lanes" in whole:
        state = json.dumps({name: whole[name] for name in ("epoch", "lanes") if name in whole})
    return state if len(state) <= 600 else f"{state[:400]} ... {state[-195:]}"


def _stage(pipeline: Any) -> Stage[Any] | None:
    """Return the stage of a pipeline of this package; None for others, such as a DataLoader."""
    stream = pipeline if isinstance(pipeline, Stream) else getattr(pipeline, "_stream", None)
    return stream.stage if isinstance(stream, Stream) else None


def _check_batches_after(make: Callable[[], Any], epochs: int, items: int) -> None:
    """Stop and resume at every position, with a step after the pipeline that holds items at its
    end.
    """
    size = next((size for size in range(2, items + 2) if items % size), 2)  # the last batch is not full
    try:
        _check_cuts(lambda: Stream(BatchSamples(_stage(make()), size, collate="list")), epochs)  # type: ignore[arg-type]
    except AssertionError as error:
        error.add_note(f"This is with batch_samples({size}, collate='list') after the pipeline.")
        raise


_TRIED = 16  # items of a stage that are made again


def _check_order(stage: Stage[Any]) -> None:
    """Make single items of each stage that declares the scope of an item again, of nothing but the
    items of its source that they are made of.
    """
    chain = Chain(stage)
    for branch in chain.root.branches.values():
        _check_order(branch)
    for step in chain:
        if step.scope != "item" or step.source is None or step.counts_items or step._draws or step.changes_count():
            continue
        size, name = step.items_per_batch or 1, functional_name(type(step))
        before = _open(step.source, _LANES[0])
        try:
            taken = list(islice(before.items, _TRIED * size))
        finally:
            before.close()
        whole = _run_over(step, chain.root.seed, taken)
        for number in range(min(len(whole), len(taken) // size)):
            alone = _run_over(step, chain.root.seed, taken[number * size : (number + 1) * size])
            if not (len(alone) == 1 and same(alone[0], whole[number])):
                given, expected = _apart(alone, whole[number : number + 1])
                mend = (
                    "Its function must depend on the item alone. If it draws random numbers, use the generator of "
                    "map_samples(fn) with fn(sample, rng), or pass seed_all=True; if it remembers items, use then(fn)."
                    if is_built_in(type(step))
                    else 'Declare scope = "window" if only items shortly before or after matter, otherwise "lane".'
                )
                raise AssertionError(
                    f'{name} has scope = "item", and its item {number} depends on other items than number '
                    f"{number} of its source, or on how many came before: alone that one gives {given}, not "
                    f"{expected}. {mend}"
                )


def _run_over(step: Stage[Any], seed: int, items: Sequence[Any]) -> list[Any]:
    """Return what a stage makes of these items."""
    running = run_over(step, Lane(seed, 0), Given(iter(copy.deepcopy(items))))
    try:
        return list(running.items)
    except Exception as error:
        return [error]
    finally:
        running.close()


_LANES = ((0, 1), (0, 2), (1, 2))  # each as its number and the number of lanes


def _check_lanes(make: Callable[[], Any]) -> None:
    """Run several lanes of one pipeline in turn, and compare each with the same lane of a separate
    pipeline.

    Then do the same from halfway on, in a new pipeline.
    """
    alone = [list(_open(_stage(make()), lane).items) for lane in _LANES]
    rounds, positions = max(map(len, alone)), [None] * len(_LANES)
    for numbers in (range(rounds // 2), range(rounds // 2, rounds + 1)):
        stage = _stage(make())
        lanes = [_open(stage, lane, position) for lane, position in zip(_LANES, positions, strict=True)]
        try:
            for number, ((lane, of), running, expected) in product(numbers, zip(_LANES, lanes, alone, strict=True)):
                item = next(running.items, END)
                right = expected[number] if number < len(expected) else END
                if not same(item, right):
                    raise AssertionError(
                        f"one pipeline was run as several lanes in turn: item {number} of "
                        f"lane {lane} of {of} is {_shown(item)}, and with a pipeline of its "
                        f"own {_shown(right)}. Make what a stage changes while it runs in "
                        "run(). (Lists, dicts and sets made in __init__ are copied for each "
                        "lane; any other object is shared.)"
                    )
            positions = json.loads(json.dumps([Chain(running).dump(running.mark()) for running in lanes]))
        finally:
            for running in lanes:
                running.close()


def _open(stage: Stage[Any] | None, lane: tuple[int, int], position: Any = None) -> Stage[Any]:
    assert stage is not None
    chain = Chain(stage)
    return stage.open(Lane(chain.root.seed, 0, *lane), None if position is None else chain.load(position))


def _shown(item: Any) -> str:
    return "missing" if item is END else f"{item!r:.200}"


def _dump(pipeline: Any) -> str:
    return json.dumps(pipeline.state_dict())


# What is checked of positions:
# 1. What the items do not show: a position that holds data also resumes, but it grows with the
#    data, and it is written to every checkpoint.
# 2. A message names the stage and the field.
# 3. A stage that runs chains, and a node that is not ours, may hold anything in their positions.

_MEND = (
    "A position holds only int, float, str, bool and None, and no data: keep an earlier mark of the "
    f"source, and read the items again. {_SEE}"
)
_LEAST_TEXT = 8  # characters: a shorter text in a position may equal one in a sample by chance
_MARKS = 1 << 12  # the positions that are kept
_GROWTH = 40  # characters by which a field may grow in any epoch
_ENDLESS = 1000  # items of a chain without end that are checked


def _check_positions(recipe: Stage[Any]) -> int:
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
            _check_positions(inner)
    return count


def _refused(stage: Stage[Any] | None, state: str) -> str:
    """Return which stage of a chain refuses its entry of a state that its own pipeline wrote."""
    steps = [] if stage is None else Chain(stage).placed
    for lane in json.loads(state)["lanes"].values():
        for number, step in enumerate(steps, 1):
            try:
                Chain(step).load(lane["position"][:number])
            except StateError:
                return f"problem() or the types of At of {functional_name(type(step))} refuse"
    return "the pipeline refuses"


def _check_options(kind: type[Stage[Any]]) -> None:
    """Check that a stage of the user's says which of its options decide what comes."""
    base = next(base for base in kind.__mro__ if is_built_in(base))
    known = shown_signature(base).parameters
    options = [name for name in shown_signature(kind).parameters if name not in known]
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
    taps: list[_Tap] = []

    def tap(step: Stage[Any], items: Iterator[Any]) -> Iterator[_Tap]:
        taps.insert(0, _Tap(step, items))
        return iter(taps[:1])

    lane = Lane(chain.root.seed, 0, taps=tuple((step, tap) for step in chain.placed))
    running = recipe.open(lane)
    steps, never_ends = Chain(running).placed[::-1], chain.never_ends
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
            f"of its source (None if there is none); it returns {mark!r:.100}. {_SEE}"
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
            f"self._own(self.at). {_SEE}"
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
    if not step.keeps_count or step.changes_count() or step.gives or not taken.ended:
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

    def __init__(self, step: Stage[Any], items: Iterator[Any]) -> None:
        self._step, self._items, self.count, self.ended = step, items, 0, False
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


def check_codec(codec: Codec) -> None:
    """Encode the example of a codec, decode it, and compare; for tests of plug-ins.

    Raises:
        AssertionError: the example changes; or, for a codec that is ``lossy``, its types, shapes or
            dtypes do.
        ValueError: the codec has no example, or lacks a function.
    """
    if codec.example is None or codec.decode is None or codec.encode is None:
        raise ValueError(f"the codec {codec.extensions!r} needs decode, encode and an example to be checked")
    example = codec.example() if callable(codec.example) else codec.example
    data = codec.encode(example)
    if not isinstance(data, bytes):
        raise AssertionError(f"encode of {codec.extensions!r} returned {type(data).__name__}, not bytes")
    decoded = codec.decode(data)
    if not same(decoded, example, values=not codec.lossy):
        raise AssertionError(
            f"the example of {codec.extensions!r} became {decoded!r:.200} when it was encoded and decoded, and it is "
            f"{example!r:.200}"
        )


def same(one: Any, other: Any, *, values: bool = True) -> bool:
    """Whether two items are equal, in type and value.

    Arrays and tensors are equal if dtype, shape and all numbers are; NaN equals NaN. With
    ``values=False``, only types, lengths, shapes and dtypes are compared.
    """
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[name], other[name], values=values) for name in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(same(*both, values=values) for both in zip(one, other, strict=True))
    if hasattr(one, "dtype") and hasattr(one, "shape"):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        return not values or bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - NaN
    return not values or bool(one == other or (one != one and other != other))  # noqa: PLR0124 - NaN
