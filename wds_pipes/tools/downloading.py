"""Copying shards.

Rules:
1. On a local disk a shard is written to ``.wds-pipes/parts``, under a name that is made of its URL,
   its size and its ETag. If it is complete, it gets its name. So what a killed task has left is
   continued only with bytes of the same version.
2. A part is not continued after the machine was started again: its last bytes may be missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from hashlib import md5
from typing import NamedTuple, Unpack

from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError, StateError
from wds_pipes.io.cache.files import boot
from wds_pipes.io.compression import detect
from wds_pipes.io.locks import LockedFile, open_locked
from wds_pipes.io.outputs import open_output, put_in_place, read_small, size_of, write_small
from wds_pipes.io.urls import Urls, identify, local_path, redact
from wds_pipes.io.versions import version_of
from wds_pipes.tar.headers import BLOCK, is_header, no_tar
from wds_pipes.tar.index import (
    KEYS,
    OFFSETS,
    ShardFacts,
    dali_name,
    exists,
    first_dot,
    folder_of,
    list_shards,
    make_opener,
    remove_beside,
)
from wds_pipes.tools.files import Content, file_of
from wds_pipes.tools.jobs import FOLDER, Facts, Job, Place, Report, Task, fingerprint
from wds_pipes.tools.outputs import (
    REQUESTS,
    JobOptions,
    Running,
    StorageOptions,
    check_names,
    check_outputs,
    check_size,
    index_names,
    names_of,
    shard_facts,
    write_indexes,
)
from wds_pipes.tools.reading import facts_beside, not_compared

_PARTS = f"{FOLDER}/parts"
_CHUNK = 1 << 20
_OF_FOLDER = ("classes.json", "sizes.json", "_info.json", "info.json", "__len__")


def download(urls: Urls, dest: str | os.PathLike[str], **options: Unpack[JobOptions]) -> Report:
    """Copy shards, and what is beside them: indexes, tables of metadata, names of classes.

    Sizes are compared, and MD5s if the ``index.json`` beside the shards has them. What was begun on
    a local disk is continued at its byte, if the store names versions.

    Args:
        urls: the shards.
        dest: the directory to write to, which may be in a store.
        options: how the job runs: see ``JobOptions``.

    Raises:
        ValueError: the options do not fit.
        WdsError: a shard or the store cannot be read, or has other outputs.
    """
    running = Running(dest, options)
    place, storage_options = running.place, running.storage_options
    shards, known = list_shards(urls, storage_options)
    names = names_of(shards)
    check_names(shards, names)
    check_outputs(shards, map(place.at, names))
    facts = known or facts_beside(shards, storage_options, not_compared)
    with ThreadPoolExecutor(REQUESTS) as pool:
        files = list(pool.map(lambda url: file_of(url, storage_options), shards))
        beside = list(pool.map(lambda url: _beside(url, storage_options), shards))
    for file, of in zip(files, facts, strict=True):
        check_size(file.url, file.size, of)
    tasks = []
    for name, file, of, found in zip(names, files, facts, beside, strict=True):
        also = tuple((url, folder_of(name) + os.path.basename(url)) for url in found)
        outputs = (name, *(other for _, other in also))
        mark = fingerprint(file.size, file.identity or of.md5, outputs)
        tasks.append(_task(outputs, Copy(file, of, also), mark))
    for folder, into in dict(zip(map(folder_of, shards), map(folder_of, names), strict=True)).items():
        for known_name in _OF_FOLDER:
            if exists(folder + known_name, storage_options):
                file, name = file_of(folder + known_name, storage_options), into + known_name
                tasks.append(_task((name,), Copy(file, None), fingerprint(file.size, file.identity)))
    indexed = index_names([name for name, of in zip(names, facts, strict=True) if of.samples is not None])
    return running.run(Job("download", place, partial(copy, storage_options), tasks, {}, finish, indexed, unit="B"))


def _task(outputs: tuple[str, ...], wanted: Copy, mark: str) -> Task:
    size = wanted.file.size
    return Task(outputs[0], outputs, wanted, mark, size, plural(size, "byte"))


class Copy(NamedTuple):
    """What a task copies.

    Attributes:
        file: the shard, or another file.
        facts: what an index says of the shard; None: it is another file.
        beside: the URLs of the files that belong to it, and their names.
    """

    file: Content
    facts: ShardFacts | None
    beside: tuple[tuple[str, str], ...] = ()


def copy(storage_options: StorageOptions, task: Task, place: Place) -> Facts:
    """Copy a shard and what is beside it, or another file."""
    wanted: Copy = task.arguments
    if wanted.facts is None:
        _copy_small(wanted.file.url, task.name, place, storage_options)
        return {"size": wanted.file.size}
    digest = _copy_shard(wanted.file, wanted.facts.md5, task, place, storage_options)
    for url, name in wanted.beside:
        _copy_small(url, name, place, storage_options)
    return shard_facts(task.name, ShardFacts(wanted.facts.samples, wanted.file.size, digest))


def finish(place: Place, facts: list[Facts]) -> None:
    """Write an index of the shards whose samples are known, and remove parts that were left."""
    write_indexes(place, [fact for fact in facts if fact.get("samples") is not None])
    if local_path(place.url) is not None:
        shutil.rmtree(place.at(_PARTS), ignore_errors=True)


def _beside(shard: str, storage_options: StorageOptions) -> list[str]:
    """The files that belong to a shard and exist."""
    folder, stem = folder_of(shard), first_dot(shard)
    base = os.path.basename(shard.partition("?")[0] if local_path(shard) is None else shard)
    names = [base + OFFSETS, base + KEYS, dali_name(shard), f"{stem}.parquet", f"{stem}.jsonl", f"{stem}_stats.json"]
    return [folder + name for name in names if exists(folder + name, storage_options)]


def _copy_shard(file: Content, expected: str | None, task: Task, place: Place, storage_options: StorageOptions) -> str:
    """Copy a shard; return its MD5."""
    target = place.at(task.name)
    if local_path(target) is None:
        output = open_output(target, overwrite=True, storage_options=place.storage_options)
        try:
            size, digest = _transfer(file, output.write, storage_options, expected, advance=task.advance)
            _check(file, size, digest, expected, storage_options)
            remove_beside(target, place.storage_options)
            output.commit()
        finally:
            output.discard()
        return digest
    with _part(file, place, storage_options) as part:
        try:
            size, digest = _transfer(
                file, partial(_append, part.fd), storage_options, expected, part, advance=task.advance
            )
        except OSError as error:
            if not isinstance(error, ShardError):
                error.filename = error.filename or target
            raise
        try:
            _check(file, size, digest, expected, storage_options)
        except (ShardError, StateError):
            os.ftruncate(part.fd, 0)
            raise
        remove_beside(target)
        put_in_place(part.fd, _part_path(file, place), target)
    return digest


def _check_head(head: bytes, url: str) -> None:
    """Raise ShardError if a file begins with this and is no shard, such as the page of a server."""
    if not head or not (detect(head) or (len(head) == BLOCK and is_header(head)) or not head.strip(b"\0")):
        shown, what = redact(url), no_tar(head) if head else "is empty (0 bytes)"
        raise ShardError(f"shard {shown} {what}. It was not copied", url=shown)


def _transfer(
    file: Content,
    write: Callable[[bytes], object],
    storage_options: StorageOptions,
    expected: str | None,
    part: LockedFile | None = None,
    *,
    advance: Callable[[int], object],
) -> tuple[int, str]:
    """Write a file, from where its part ends; return how many bytes it has, and their MD5.

    Raises:
        ShardError: it cannot be read; or it is no shard, and no MD5 is expected.
    """
    size, digest = 0, md5(usedforsecurity=False)
    if part is not None:
        os.lseek(part.fd, 0, os.SEEK_SET)
        while chunk := os.read(part.fd, _CHUNK):
            digest.update(chunk)
            size += len(chunk)
    advance(size)
    if not file.size and expected is None:
        _check_head(b"", file.url)
    if size < file.size:
        with make_opener(storage_options).open(file.url, size, size=file.size) as stream:
            if local_path(file.url) is not None:
                stream.seek(size)
            while chunk := stream.read(_CHUNK):
                if not size and expected is None:  # else the MD5 says whether it is what it should be
                    _check_head(chunk[:BLOCK], file.url)
                write(chunk)
                digest.update(chunk)
                size += len(chunk)
                advance(len(chunk))
    return size, digest.hexdigest()


def _check(file: Content, size: int, digest: str, expected: str | None, storage_options: StorageOptions) -> None:
    """Compare what arrived with what is known of a file.

    Raises:
        ShardError: it is damaged.
        StateError: it was changed meanwhile.
    """
    now, shown = version_of(file.url, storage_options), redact(file.url)
    if (now.size, now.mark or "") != (file.size, file.mark):
        raise StateError(f"{shown} was changed while it was copied: run the command again with --overwrite")
    if size != file.size:
        raise ShardError(f"{shown} has {plural(file.size, 'byte')}, and {size:,} arrived", url=shown)
    if expected not in (None, digest):
        raise ShardError(
            f"{shown} arrived with the MD5 {digest}, and its index says {expected}: it is damaged, or the index is old",
            url=shown,
        )


def _append(fd: int, data: bytes) -> None:
    done = 0
    while done < len(data):
        done += os.write(fd, memoryview(data)[done:])


@contextmanager
def _part(file: Content, place: Place, storage_options: StorageOptions) -> Iterator[LockedFile]:
    """The part of a shard that is there already, locked."""
    path = _part_path(file, place)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    part = open_locked(path, os.O_RDWR | os.O_CREAT, wait=True, mode=0o666)
    if part is None:
        raise ShardError(f"{path} is being written by another process, or its directory was removed", url=path)
    try:
        if not file.mark or not version_of(file.url, storage_options).sure or part.size > file.size:
            os.ftruncate(part.fd, 0)
        yield part
    finally:
        part.close()


def _part_path(file: Content, place: Place) -> str:
    return place.at(f"{_PARTS}/{fingerprint(identify(file.url), file.size, file.mark, boot())}")


def _copy_small(url: str, name: str, place: Place, storage_options: StorageOptions) -> None:
    content = read_small(url, storage_options)
    if content is None:
        raise ShardError(f"{redact(url)} was removed meanwhile: run the command again", url=redact(url))
    if size_of(url, storage_options) not in (None, 0, len(content)):  # 0: the server does not tell it
        raise ShardError(f"{redact(url)} was cut or changed on its way: run the command again", url=redact(url))
    write_small(place.at(name), content, place.storage_options)
