"""Uploads to S3 that were not completed: a process that is killed leaves them without a name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def abort_left(folder: str, storage_options: dict[str, Any] | None, is_output: Callable[[str], bool]) -> int:
    """Abort the uploads of files in a directory that were not completed.

    Args:
        folder: the URL of the directory.
        storage_options: options for fsspec.
        is_output: whether the upload of a file is aborted, by its name relative to the directory.

    Returns:
        How many there were. Where the store is not S3, or does not allow to list them, there are
        none: a rule of the bucket has to remove them.
    """
    if folder.partition("://")[0] not in ("s3", "s3a"):
        return 0
    from wds_pipes.io.remote.metadata import ask

    count = 0

    def abort(fs: Any, path: str) -> None:
        nonlocal count
        bucket, _, key = path.partition("/")
        prefix = f"{key.rstrip('/')}/" if key.strip("/") else ""
        for name, upload in _listed(fs, bucket, prefix):
            if is_output(name.removeprefix(prefix)):
                fs.call_s3("abort_multipart_upload", Bucket=bucket, Key=name, UploadId=upload)
                count += 1

    with contextlib.suppress(Exception):  # not every store lists uploads, nor everyone may
        ask(folder, storage_options, abort)
    return count


def _listed(fs: Any, bucket: str, prefix: str) -> Iterator[tuple[str, str]]:
    """The keys of uploads that are not complete, and what identifies each."""
    after: dict[str, str] = {}
    while True:
        found = fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **after)
        yield from ((upload["Key"], upload["UploadId"]) for upload in found.get("Uploads", ()))
        if not found.get("IsTruncated"):
            return
        after = {"KeyMarker": found["NextKeyMarker"], "UploadIdMarker": found["NextUploadIdMarker"]}
