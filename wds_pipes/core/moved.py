"""Decide whether the shards of a state are those of a pipeline, which may have moved since.

No other module decides this. It needs no torch.

Rules:
1. If an index gave the MD5s of all shards, both then and now, the MD5s decide: different MD5s, or
   the same ones in another order, are different data; equal MD5s are the same data under any name.
2. Otherwise the names decide, relative to the directory that contains all shards: a copy of that
   directory is the same data, wherever it is. If an index gave the sizes of all shards, both then
   and now, the sizes and the numbers of samples must also be equal.
3. Otherwise the user decides, with ``moved=True``.

Without an index, different data may have the same names. Therefore each state that continues at
another place causes a line in the log, and names keep a last ``train/`` or ``val/``, see
``wds_pipes.io.urls.relative_names``. Everything else that must fit a state is checked as usual.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

logger = logging.getLogger("wds_pipes")

BY_MD5, BY_SIZE = "1", "2"
# The first hexadecimal digits of an id are a hash of the names. If an index has MD5s or sizes,
# BY_MD5 or BY_SIZE follows, and 7 digits of a hash of these.
NAMES = 8
_SAME = "If these are the same shards in the same order, at another place or under other names,"
MEND = (
    f"{_SAME} pass moved=True: load_state_dict(state, moved=True), or ShardList(..., moved=True) where another library "
    "loads the state."
)
MEND_CLI = f"{_SAME} pass --moved."


class Data(NamedTuple):
    """Which shards a chain reads.

    Attributes:
        fingerprint: of their URLs; ``""``: unknown.
        id: 8 or 16 hexadecimal digits that stay the same if the shards are moved, see ``NAMES``;
            ``""``: unknown, as for a chain without shards.
        place: the URL of the first shard, for messages.
        moved: the user declared that any loaded state is of these shards.
        shards: how many there are; None: unknown.
    """

    fingerprint: str = ""
    id: str = ""
    place: str | None = None
    moved: bool = False
    shards: int | None = None

    @property
    def identity(self) -> str:
        """The same text for the same data, as far as that is known."""
        known = self.id[NAMES:]
        return "" if self.moved else known if known[:1] == BY_MD5 else self.id or self.fingerprint


class Move:
    """Where the data of one state were, and where they are now.

    Args:
        stated: the user declared that they are the same data.
    """

    def __init__(self, stated: bool = False) -> None:
        self._stated = stated
        self.url: str | None = None  # the URL of a shard in the state
        self._found: dict[str, str] = {}  # new places, each with the reason why the data are known to be the same

    def problem(self, then: Data, now: Data) -> str | None:
        """Return what differs, for a message; None if the data are the same. If they have moved,
        that is noted.
        """
        known, why, what = then.id[NAMES:], None, None
        alike = bool(known) and known[0] == now.id[NAMES : NAMES + 1]
        if alike and known != now.id[NAMES:]:
            told = "MD5s" if known[0] == BY_MD5 else "sizes or numbers of samples"
            what = f"the index gives its shards other {told}, or they have another order"
        elif then.fingerprint == now.fingerprint:
            return None
        elif alike and known[0] == BY_MD5:
            why = "their MD5s in the index are the same"
        elif then.id and then.id[:NAMES] == now.id[:NAMES]:
            why = (
                "their names and their sizes in the index are the same"
                if alike
                else "their names are the same; an index would show whether their MD5s are"
            )
        else:
            here = "" if now.place is None else f", and this list begins with {now.place!r:.300}"
            what = f"its list of shards has other URLs or another order{self._there(' (it stands at ', here + ')')}"
        if what is not None and not (self._stated or now.moved):
            return what
        self._found[now.place or "another place"] = why or "moved=True says so"
        return None

    def _there(self, before: str, after: str) -> str:
        return "" if self.url is None else f"{before}{self.url!r:.300}{after}"

    def log(self) -> None:
        """Log one line if the state continues at another place."""
        if self._found:
            places = "; ".join(f"{place!r:.300} ({why})" for place, why in self._found.items())
            logger.warning(
                "the state%s continues with the same shards at another place, which begin with %s",
                self._there(", which stands at ", ","),
                places,
            )
