"""Pipes over remote shards, and the requests that they made."""

import asyncio
import os
import time

from fsspec.asyn import get_loop
from pipelines import after, through_json
from waiting import wait_for

import wds_pipes as wp


def content(path):
    with open(path, "rb") as file:
        return file.read()


def samples(urls, remote=None, seed=None, index=None, **options):
    """A pipe of raw samples."""
    if remote is not None:
        options = {"storage_options": remote.storage_options, "readahead_bytes": 2 << 20, **options}
    return (
        wp.ShardList(urls, shuffle=seed is not None, seed=seed or 0, index=index, empty_check=False)
        .open_shards(**options)
        .load_tar()
        .group_by_key()
    )


def bare(sample):
    return {name: value for name, value in sample.items() if name != "__url__"}


def put_all(remote, local):
    return [remote.put(f"d/{os.path.basename(path)}", content(path)) for path in local]


def tasks():
    """The tasks that still run on fsspec's loop."""

    async def others():
        return [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    return asyncio.run_coroutine_threadsafe(others(), get_loop()).result()


def settle(remote):
    """Wait until the requests of a dropped pipe have ended, for the client and for the server."""
    wait_for(lambda: not tasks())
    before = None
    while before != (before := remote.faults.stats()) or not all(request.ended for request in before):
        time.sleep(0.05)


def cut_at(pipe, number):
    """The state of a pipe that was stopped after so many items, as JSON keeps it."""
    after(pipe, number)
    return through_json(pipe.state_dict())


def first_bytes(requests):
    """The first byte of each request."""
    return [int(request.range.removeprefix("bytes=").split("-")[0]) for request in requests]
