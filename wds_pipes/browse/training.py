"""The pages about a training: the batches that a rank gets next, and where states stand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from wds_pipes.browse.data import DataSet
from wds_pipes.browse.fields import MOST_NAME, Fields
from wds_pipes.browse.pages import Pages
from wds_pipes.display.text import cut
from wds_pipes.errors import WdsError
from wds_pipes.io.open import is_remote
from wds_pipes.io.urls import hide
from wds_pipes.tools.states import diff_states, read_states
from wds_pipes.tools.training import MOST_READ, Coming, Order, order_of_loader, order_of_state

BATCHES = 4  # of a page
_CARDS = 8  # samples of a batch that are shown
_FIELDS = 4  # of each
_LISTED = 1024  # samples of a batch that are listed
_MOST_DIFFERENCES = 500
_ORDERS = 4  # ranks whose orders stay


class TrainingPages:
    """Adds the pages about a training.

    Args:
        pages: the pages of its data.
        order: returns the order of a rank: None is the one that comes of itself.
        states: files with states.
    """

    def __init__(self, pages: Pages, order: Callable[[int | None], Order], states: Sequence[str]) -> None:
        self._pages, self._states, self._order = pages, states, lru_cache(_ORDERS)(order)
        shown = [pages.data.shown(number) for number in range(len(pages.data.shards))]
        times = Counter(shown)  # without credentials, two URLs may be the same
        self._numbers = {url: number for number, url in enumerate(shown) if times[url] == 1}
        pages.add(r"order\.html", self._order_page, "Training order")
        if states:
            pages.add(r"states\.html", self._states_page, "States")

    def _order_page(self, *, query: Mapping[str, str]) -> str:
        numbers = {name: int(text) for name, text in query.items() if re.fullmatch(r"\d{1,15}", text, re.ASCII)}
        try:
            order = self._order(numbers.get("rank"))
            step = max(numbers.get("step", order.step), order.step)
            batches, position = order.batches(step, BATCHES + 1), order.position
        except (ValueError, WdsError) as error:
            return self._pages.error(str(error))
        except Exception as error:  # of a function of the user's
            return self._pages.error(hide(f"The pipeline raised {type(error).__name__}: {error}"))
        return self._pages.render(
            "order.html",
            order=order,
            step=step,
            batches=[self._batch(*batch) for batch in list(batches.items())[:BATCHES]],
            most_read=MOST_READ,
            position=position,
            before=max(order.step, step - BATCHES) if step > order.step else None,
            after=step + BATCHES if len(batches) > BATCHES else None,
        )

    def _batch(self, step: int, samples: list[Coming]) -> dict[str, Any]:
        """Return a batch for the template: its first samples as cards, and all in rows."""
        listed = samples[:_LISTED]
        with ThreadPoolExecutor(_CARDS) as pool:
            cards = list(pool.map(self._card, listed[:_CARDS]))
        rows = [self._row(one, card) for one, card in zip_longest(listed, cards)]
        return {"step": step, "count": len(samples), "cards": list(filter(None, cards)), "rows": rows}

    def _row(self, one: Coming, card: dict[str, Any] | None) -> dict[str, Any]:
        data, shard = self._pages.data, self._numbers.get(one.url)
        number, start = one.number, None
        if card is not None:
            number, start = card["sample"].number, card["sample"].start
        elif shard is not None and number is not None and not is_remote(data.shards[shard]):
            start = data.start(shard, number)
        return one._asdict() | {"shard": shard, "number": number, "start": start}

    def _card(self, one: Coming) -> dict[str, Any] | None:
        """Return a sample as in a grid; None: it cannot be shown."""
        data, shard = self._pages.data, self._numbers.get(one.url)
        if shard is None:
            return None
        place: tuple[int, int | None] = shard, one.number
        try:
            if one.key is not None:  # a remote shard is not read to find it
                place = data.find_key(one.key, None if is_remote(data.shards[shard]) else shard)
            found, number = place
            if found != shard or number is None:
                return None
            with data.look(shard, number, 1) as view:
                [sample] = view.found
                return {
                    "shard": shard,
                    "where": f"{data.shown(shard).rpartition('/')[2]}, byte {sample.start:,}",
                    "sample": sample._replace(key=cut(sample.key, MOST_NAME)),
                    "fields": Fields(view).of(sample, range(len(sample.members))[:_FIELDS]),
                    "left": max(0, len(sample.members) - _FIELDS),
                }
        except (LookupError, ValueError, OSError):  # its row has a link to the page that says why
            return None

    def _states_page(self, *, query: Mapping[str, str]) -> str:
        try:
            found = [
                {"file": file, "states": [placed.in_words().split("\n") for placed in read_states(file)]}
                for file in self._states
            ]
            differences = diff_states(*self._states) if len(self._states) == 2 else []
        except (WdsError, OSError) as error:
            return self._pages.error(str(error))
        return self._pages.render(
            "states.html",
            files=found,
            differences=differences[:_MOST_DIFFERENCES],
            more=max(0, len(differences) - _MOST_DIFFERENCES),
        )


def training_of(
    urls: Sequence[str],
    *,
    named: str | None,
    world_size: int | None,
    states: Sequence[str],
    storage_options: dict[str, Any] | None,
    key_split: str,
) -> tuple[DataSet, Callable[[Pages], object]]:
    """Return the data set of a training, and a function that adds the pages about the training to
    its pages.

    Args:
        urls: the shards; none: those of the pipeline.
        named: the function that returns the PipeLoader, as of ``loader_of``; None: the pipeline is
            known only by the first state.
        world_size: as of ``loader_of``.
        states: files with states, of which the first says where the training stands.
        storage_options: how to reach the storage; None: as the pipeline does.
        key_split: as in ``group_by_key``.

    Raises:
        ValueError, StateError, ShardError: as from ``order_of_loader`` and ``DataSet``.
    """

    def order(rank: int | None) -> Order:
        if named is None:
            return order_of_state(states[0], urls, rank=rank, storage_options=storage_options)
        return order_of_loader(named, rank=rank, world_size=world_size, state=next(iter(states), None))

    if named is not None:
        first = order(None)  # its errors come now
        urls, storage_options = urls or first.urls, storage_options or first.storage_options
    data = DataSet(urls, storage_options, key_split=key_split)
    return data, lambda pages: TrainingPages(pages, order, states)
