"""What ``verify`` finds in the shards that are looked at."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from wds_pipes.io.compression import MAGIC_BYTES, detect
from wds_pipes.io.open import Opener, is_remote
from wds_pipes.io.versions import Version, version_of
from wds_pipes.tools.findings import Finding, VerifyReport
from wds_pipes.tools.reading import Found
from wds_pipes.tools.verifying import verify

AT_ONCE = 64 << 20  # bytes of a local shard that is checked when it is looked at
_KEPT = 16  # reports


class Checks:
    """The reports of the shards that were checked, of which the last 16 stay.

    A local shard of at most 64 MiB is checked when it is looked at, unless it is compressed, and
    any other one when that is requested, since it is read to its end. Fields are not decoded.

    Args:
        urls: the shards.
        options: of ``verify``.
    """

    def __init__(self, urls: Sequence[str], **options: Any) -> None:
        self._urls, self._options = urls, options
        self._reports: OrderedDict[tuple[int, Version | None], VerifyReport] = OrderedDict()

    def report(self, shard: int, *, now: bool = False) -> VerifyReport | None:
        """Return the report of a shard; None: it was not checked. A local shard that has changed
        since is checked again.

        Args:
            shard: the number of the shard.
            now: check it in any case.

        Raises:
            ShardError: the shard does not exist.
        """
        url = self._urls[shard]
        version = None if is_remote(url) else version_of(url, None)
        report = self._reports.pop((shard, version), None)
        if now or (report is None and _is_small(url, version)):
            report = verify(url, **self._options)
        if report is not None:
            self._reports[shard, version] = report
            while len(self._reports) > _KEPT:
                self._reports.popitem(last=False)
        return report


def _is_small(url: str, version: Version | None) -> bool:
    if version is None or (version.size or AT_ONCE + 1) > AT_ONCE:
        return False
    with Opener().open(url) as stream:
        return not detect(stream.read(MAGIC_BYTES))  # it could unpack to a thousand times as much


def of_sample(report: VerifyReport | None, sample: Found) -> list[Finding]:
    """Return what was found at a sample: by its key, or at its bytes."""
    found = [] if report is None else report.findings
    return [
        one
        for one in found
        if one.key == sample.key or (one.byte is not None and sample.start <= one.byte < sample.end)
    ]
