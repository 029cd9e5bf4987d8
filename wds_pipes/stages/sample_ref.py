"""SampleRef: one sample of a shard, and where its bytes are."""

from __future__ import annotations

from typing import NamedTuple


class SampleRef(NamedTuple):
    """A sample to read: ``SampleList`` yields these, and ``fetch_samples`` reads them.

    Attributes:
        url: the URL or path of its shard, with credentials if it has any.
        number: its number among all samples of the list.
        start: the byte of its first header in the shard.
        stop: the byte after its last one.
        index_url: the URL of the index of offsets that says so.
        last: whether it is the last one of its shard.
        padding: whether it is a repeat that fills up an epoch; None: there are no repeats.
        size: the size of its shard in bytes, as an ``index.json`` says; None: not known.
        before: the byte where the sample before it begins, -1 if it is the first one of its shard;
            None: not known, or its shard is remote.
    """

    url: str
    number: int
    start: int
    stop: int
    index_url: str
    last: bool = False
    padding: bool | None = None
    size: int | None = None
    before: int | None = None
