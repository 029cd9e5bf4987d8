"""What the tests of remote shards share: pipes over them, and what was asked for."""

import os

import wds_pipes as wp


def content(path):
    with open(path, "rb") as file:
        return file.read()


def samples(urls, remote=None, seed=None, index=None, **options):
    """A pipe of raw samples."""
    if remote is not None:
        options = {"storage_options": remote.storage_options, "readahead_bytes": 2 << 20, **options}
    return wp.ShardList(urls, shuffle=seed is not None, seed=seed or 0, index=index).open_shards(**options).load_tar().group_by_key()


def bare(sample):
    return {name: value for name, value in sample.items() if name != "__url__"}


def put_all(remote, local):
    return [remote.put(f"d/{os.path.basename(path)}", content(path)) for path in local]


def first_bytes(requests):
    """The byte from which on each request asked."""
    return [int(request.range.removeprefix("bytes=").split("-")[0]) for request in requests]
