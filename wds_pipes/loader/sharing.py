"""What the states of all ranks share, stored once.

After a repartition, a state has the partition of all lanes of all ranks: with 8,000 lanes, 340 KB,
in the state of each rank. It is one text, which is the same for all ranks. Together they keep it
only in the state of rank 0; the others have its digest. With ``epoch_end="exact"`` ranks may have
different partitions, and each keeps its own.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b
from typing import Any

from wds_pipes.core.stage import State

_NAME, _SAME = "partition", "as that of rank 0, with digest"


@lru_cache(maxsize=8)  # a text is one object while a loader stands in this partition
def digest_of(text: str) -> str:
    """Return the digest of a partition in a state."""
    return blake2b(text.encode(), digest_size=16).hexdigest()


def without_shared(state: State) -> State:
    """Return the state of a rank without what that of rank 0 has, too."""
    text = state.get(_NAME)
    if not isinstance(text, str) or state["rank"] == 0 or state["epoch_end"] == "exact":
        return state
    return {**state, _NAME: {_SAME: digest_of(text)}}


def with_shared(states: list[State]) -> list[State]:
    """Return states of ranks, of which the first is whole, with what it shares with the others.

    A state that shared something else stays as it is: it does not belong to the first.
    """
    text: Any = states[0].get(_NAME) if states and isinstance(states[0], dict) else None
    if not isinstance(text, str):
        return states
    same = {_SAME: digest_of(text)}
    return [
        {**state, _NAME: text} if isinstance(state, dict) and state.get(_NAME) == same else state for state in states
    ]
