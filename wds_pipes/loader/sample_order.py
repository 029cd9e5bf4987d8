"""SampleOrder: a sampler whose order is computed and whose state is a few numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import DistributedSampler

from wds_pipes.core.options import check_choice, check_count, check_seed, checks_options
from wds_pipes.core.order import MOST_SAMPLES, order_of_samples
from wds_pipes.core.state import MOST, read_as, read_count
from wds_pipes.core.words import plural, shown
from wds_pipes.errors import StateError
from wds_pipes.loader.ranks import Rank, find_rank

_VERSION = 1
_BLOCK = 4096  # how many indices are computed at a time
_OPTIONS = ("n", "shuffle", "block_samples", "seed")  # that decide the order


class _Place(NamedTuple):
    """A place in an epoch.

    Attributes:
        position: how many samples of the epoch all ranks together have had.
        selected: the epoch was selected by ``set_epoch``, whose caller counts the epochs.
    """

    epoch: int
    position: int = 0
    selected: bool = False


# Lightning and others do not divide the samples once more if a sampler is a DistributedSampler.
class SampleOrder(DistributedSampler[int]):
    """The indices of a map-style dataset in order or shuffled, as a sampler with a state.

    It is for torch's DataLoader, torchdata's StatefulDataLoader and torchdata's
    ``nodes.MapStyleWrapper``, with any dataset that has ``dataset[i]``::

        order = wp.SampleOrder(len(dataset), shuffle=True, seed=7)
        loader = StatefulDataLoader(dataset, sampler=order, batch_size=64, num_workers=4)
        for batch in loader:
            checkpoint = loader.state_dict()

    The index at each place is a function of (seed, epoch, place), which is computed when its turn
    comes. So the order of 10**9 samples takes no memory, and a resume in the middle of it costs the
    same as a start. Each ``iter()`` is the next epoch, in another order; it does nothing until the
    first ``next()``. ``set_epoch(epoch)`` selects an epoch.

    On several ranks, each rank takes every ``world_size``-th place of the same order. Do not let a
    framework divide the samples again: Lightning does not; for Accelerate's ``prepare()`` pass
    ``rank=0, world_size=1``.

    **Saving the state.** Save the state of the StatefulDataLoader, or of torchdata's ``Loader``: it
    contains the state of the sampler that belongs to the last batch. Worker processes are sent
    indices ahead, so ``state_dict()`` of the sampler itself is ahead of the batches. A plain
    DataLoader does not save a state. With it, save the sampler's own state when an epoch has ended,
    or after a batch if ``num_workers=0``. To pass batches of your own to StatefulDataLoader, use
    ``torchdata.stateful_dataloader.sampler.BatchSampler``. torch's BatchSampler has no state: with
    one, StatefulDataLoader would start again with the first epoch.

    **Another number of ranks.** Ranks that have had equally many samples have the same state: the
    number of samples that all ranks together have had. Loaded on any number of ranks, it continues
    with the next sample of the order. Another batch size fits, too.

    Args:
        n: the number of samples, ``len(dataset)``.
        shuffle: permute the samples, differently in each epoch. Otherwise they come in order.
        block_samples: with ``shuffle``, permute runs of this many neighbours, which stay together.
            Then neighbours can be read by one request. The last run may be shorter. On several
            ranks, the samples of a run go to the ranks in turn.
        seed: an integer that decides the order, the same on all ranks.
        epoch_end: which samples an epoch of several ranks leaves out or repeats, if their number
            does not divide ``n``. ``"drop"``: it leaves out the last ``n % world_size`` of the
            order, which differ by epoch if it is shuffled. ``"pad"``: it repeats samples from the
            beginning of the order. Both give every rank equally many. ``"exact"``: each sample
            comes once, and the first ranks have one more than the others. None: ``"exact"`` for one
            rank, ``"drop"`` for several.
        rank: the data-parallel rank of this process, together with ``world_size``. None: the rank
            in torch.distributed if that is initialised when an iteration starts, else the
            environment variables RANK and WORLD_SIZE, else rank 0 of 1.
        world_size: the number of data-parallel ranks.

    Raises:
        TypeError, ValueError: an argument does not fit. Also from ``len()`` and the iteration:
            ``"drop"`` would leave out all samples, because there are fewer of them than ranks.
        StateError: from ``load_state_dict``: the state is of another order, or damaged.

    Checkpoint: two numbers, and the arguments that decide the order. Nothing is computed again.
    """

    @checks_options
    def __init__(
        self,
        n: int,
        *,
        shuffle: bool = False,
        block_samples: int = 1,
        seed: int = 0,
        epoch_end: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        if hasattr(n, "__len__"):
            raise TypeError(f"n must be the number of samples: pass len(dataset), not the {type(n).__name__} itself")
        self.n = check_count("n", n, least=0, most=MOST_SAMPLES)
        if not isinstance(shuffle, bool):
            raise TypeError(f"shuffle must be True or False, not {shuffle!r}")
        self.shuffle = shuffle
        self.block_samples = check_count("block_samples", block_samples, most=MOST_SAMPLES)
        self.seed = check_seed(seed)
        self.epoch_end = None if epoch_end is None else check_choice("epoch_end", epoch_end, "drop", "pad", "exact")
        if (rank, world_size) != (None, None):
            find_rank(rank, world_size)
        self._given = rank, world_size
        self._next: _Place | None = _Place(0)  # where the next iterator begins; None: at the next epoch
        self._last: _Indices | None = None  # the iterator that moved last; None: none since `_next` was set

    def __repr__(self) -> str:
        order = f", shuffle=True, block_samples={self.block_samples}, seed={self.seed}" if self.shuffle else ""
        return f"SampleOrder({self.n}{order})"

    def __iter__(self) -> Iterator[int]:
        return _Indices(self)

    def __len__(self) -> int:
        """Return how many indices a whole epoch has on this rank."""
        return self._count_from(0, self._rank())

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` start ``epoch`` from its beginning; a loaded state of this same
        epoch still continues where it was.
        """
        epoch = check_count("epoch", epoch, least=0, most=MOST)
        loaded = self._last is None and self._next is not None and self._next.epoch == epoch
        self._next = _Place(epoch, self._next.position if loaded and self._next else 0, selected=True)
        self._last = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the index that was returned last, as a new small dict of plain
        JSON types.

        When an epoch has ended, it is at the beginning of the next one. If ``set_epoch`` selected
        the epoch, it is at its end instead: the next ``iter()`` yields nothing unless ``set_epoch``
        selects another epoch first, as torchdata's nodes do.
        """
        return self._state_at(self._position())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make the next ``iter()`` continue from ``state``.

        Raises:
            StateError: it has another number of samples, seed, shuffle or block size, is of
                something else, or is damaged. The message says what differs.
        """
        mend_loader()
        self._next, self._last = self._read(state), None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_next": self._position(), "_last": None}

    def _position(self) -> _Place:
        """Return where a loaded state continues."""
        if self._last is None:
            assert self._next is not None
            return self._next
        place = self._last.place
        return _Place(place.epoch + 1) if self._last.ended and not place.selected else place

    @property
    def _coming(self) -> _Place:
        """Where the next iterator begins."""
        if self._next is not None:
            return self._next
        assert self._last is not None
        return _Place(self._last.place.epoch + 1)

    def _rank(self) -> Rank:
        """Return the rank of this process."""
        rank = find_rank(*self._given)
        if 0 < self.n < rank.of and self._mode(rank) == "drop":
            raise ValueError(
                f"{plural(self.n, 'sample')} cannot be divided over {rank.of} ranks: pass epoch_end='pad' to repeat "
                "samples, or epoch_end='exact' if ranks without samples are meant."
            )
        return rank

    def _mode(self, rank: Rank) -> str:
        return self.epoch_end or ("exact" if rank.of == 1 else "drop")

    def _count_from(self, position: int, rank: Rank) -> int:
        """Return how many indices a rank has from a position on to the end of the epoch."""
        left, mode = self.n - position, self._mode(rank)
        if mode == "drop":
            return left // rank.of
        return max(0, -(-(left if mode == "pad" else left - rank.number) // rank.of))

    def _state_at(self, place: _Place) -> dict[str, Any]:
        """Return the state that continues from a place."""
        return {
            "version": _VERSION,
            "epoch": place.epoch,
            "position": place.position,
            "epoch_selected": place.selected,
            **{name: getattr(self, name) for name in _OPTIONS},
        }

    def _read(self, state: object) -> _Place:
        """Return the place that a state continues from."""
        if not isinstance(state, dict) or not {"version", *_OPTIONS} <= state.keys():
            raise StateError(
                f"this is not a state of a SampleOrder but {shown(state)}. Pass what its state_dict() returned; "
                "load the state of a loader into a loader."
            )
        if type(state["version"]) is not int or state["version"] != _VERSION:
            raise StateError(
                f"the state has format version {shown(state['version'])}, this wds_pipes reads version {_VERSION}. "
                "Resume with the wds_pipes that wrote it."
            )
        differences = [
            f"it was made with {name}={shown(state[name])}, this one has {name}={getattr(self, name)}"
            for name in _OPTIONS
            if type(state[name]) is not type(getattr(self, name)) or state[name] != getattr(self, name)
        ]
        if differences:
            raise StateError(
                f"the state does not fit this SampleOrder: {'; '.join(differences)}. "
                "Build it as it was when the state was saved."
            )
        return _Place(
            read_count(state.get("epoch"), "'epoch'"),
            read_count(state.get("position"), "'position'", most=self.n),
            read_as(bool, state.get("epoch_selected"), "'epoch_selected'"),
        )


class _Indices(Iterator[int]):
    """The indices of one epoch.

    StatefulDataLoader saves the state of the iterator beside that of the sampler. At the end of an
    epoch they differ: the iterator then yields nothing more, and the next one is the next epoch.
    """

    def __init__(self, sampler: SampleOrder) -> None:
        self._sampler = sampler
        self._start: _Place | None = None  # None: not begun
        self._taken = 0  # how many indices were returned
        self.ended = False

    def __next__(self) -> int:
        if self._start is None:
            self._begin(self._sampler._coming)
        taken = self._taken
        if taken == self._first + len(self._block):
            if taken >= self._count:
                if not self.ended:
                    self.ended, self._sampler._last = True, self
                raise StopIteration
            self._compute(taken)
        index = self._block[taken - self._first]
        self._sampler._last = self
        self._taken = taken + 1
        return index

    @property
    def place(self) -> _Place:
        """The place after the index that was returned last."""
        if self._start is None:
            return self._sampler._coming
        reached = self._start.position + self._taken * self._rank.of
        return self._start._replace(position=self._sampler.n if self.ended else min(reached, self._sampler.n))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this iterator."""
        return self._sampler._state_at(self.place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Make this iterator continue from a state, and the one after it the next epoch."""
        self._begin(self._sampler._read(state))

    def _begin(self, start: _Place) -> None:
        sampler = self._sampler
        self._rank = sampler._rank()
        self._count = sampler._count_from(start.position, self._rank)  # how many indices come from the start on
        self._first, self._block = 0, list[int]()  # the indices from number `_first` on
        self._start, self._taken, self.ended = start, 0, False
        sampler._next, sampler._last = None, self

    def _compute(self, taken: int) -> None:
        """Compute the indices from number ``taken`` on."""
        assert self._start is not None
        sampler, rank = self._sampler, self._rank
        numbers = np.arange(taken, min(taken + _BLOCK, self._count))
        places = self._start.position + rank.number + numbers * rank.of
        places %= sampler.n  # repeats come from the beginning
        if sampler.shuffle:
            order = order_of_samples(sampler.n, sampler.seed, self._start.epoch, block_samples=sampler.block_samples)
            places = order.numbers_at(places)
        self._first, self._block = taken, places.tolist()


def mend_loader() -> None:
    """Make the Loader of torchdata, if it is imported, forget at each reset the state it keeps.

    If a loaded state has no items left, the Loader (0.11, the last release) keeps the state that it
    had read before it noticed this, and returns it throughout the next epoch, so a second resume
    would repeat this epoch. No node can prevent this: the Loader does not ask the nodes again.
    """
    module = sys.modules.get("torchdata.nodes.loader")
    if module is None or module.LoaderIterator.reset.__module__ == __name__:
        return
    original = module.LoaderIterator.reset

    def reset(self: Any, initial_state: Any = None) -> None:
        self._cached_state_dict = None
        original(self, initial_state)

    module.LoaderIterator.reset = reset
