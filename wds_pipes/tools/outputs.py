"""What all functions that write data sets have in common: how their jobs run, the shards that they
write and read, the index of each directory of shards, and first passes.

First passes are jobs whose outputs are needed before the tasks of the job itself can run.

Rules:
1. They write into the hidden directory of the outputs, ``.wds-pipes``. What is there serves other
   shares of the job, and its next run.
2. The name of a pass's directory says what its outputs are made from.
3. Shares that run at the same time begin at different tasks, and leave out what another one has
   finished by then.

The facts of a task that writes a shard are ``{"shard": name, "samples": n, "size": bytes, "md5":
digest}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import takewhile
from typing import Any, Literal, TypedDict, TypeVar

import numpy as np
import numpy.typing as npt

from wds_pipes.core.options import check_count
from wds_pipes.core.words import plural
from wds_pipes.errors import ShardError, StateError
from wds_pipes.io.cache.shard_cache import parse_size
from wds_pipes.io.outputs import read_small
from wds_pipes.io.urls import identify, local_path, redact
from wds_pipes.io.versions import version_of
from wds_pipes.tar.encoded import Encoded
from wds_pipes.tar.index import (
    KEYS,
    OFFSETS,
    Entry,
    ShardFacts,
    base_name,
    folder_of,
    make_opener,
    parts_of_path,
    write_index,
)
from wds_pipes.tar.located import KeyRange, split_by_key
from wds_pipes.tar.stored import Stored
from wds_pipes.tar.writer import most_members, write_shard
from wds_pipes.tools.jobs import (
    Attempt,
    Engine,
    Facts,
    FailedTasksError,
    Job,
    Outcome,
    Place,
    Report,
    Task,
    Work,
    check_engine,
    engine_of,
    fingerprint,
    run,
)
from wds_pipes.tools.ray_engine import connect, on_ray

StorageOptions = dict[str, Any] | None  # for fsspec
REQUESTS = 16  # at a time
T = TypeVar("T")
CLASSES = "classes.json"
_INDEX = "index.json"


class JobOptions(TypedDict, total=False):
    """Options of all functions that write into a directory.

    Attributes:
        jobs: how many processes of this machine work.
        engine: what runs the tasks instead: ``"ray"``, for the cluster of ``RAY_ADDRESS``, else one
            that is started here; or a function, see ``Engine``.
        task: do only this share of the work, counted from 0.
        tasks: how many shares the work has, on any machines.
        overwrite: replace what another job, or other input, has written there.
        dry_run: write nothing, and report what would be written.
        progress: True: show a progress bar, which needs tqdm; None: a line each minute.
        on_task: called with the outcome of each task.
        storage_options: how to reach a store: a dict of options for fsspec.
    """

    jobs: int | None
    engine: Literal["ray"] | Engine | None
    task: int | None
    tasks: int | None
    overwrite: bool
    dry_run: bool
    progress: bool | None
    on_task: Callable[[Outcome], None] | None
    storage_options: StorageOptions


class Running:
    """How the jobs of a function run, and where they write.

    Args:
        dest: the directory of the outputs.
        options: see ``JobOptions``.
        known: the class of the options, which has no others.

    Raises:
        TypeError: there is no such option.
        ValueError: the options do not fit, or nothing can be written there.
    """

    def __init__(self, dest: str | os.PathLike[str], options: JobOptions, known: type[JobOptions] = JobOptions) -> None:
        for name in options.keys() - known.__annotations__.keys():
            raise TypeError(f"there is no option {name!r}; the options of jobs are {', '.join(known.__annotations__)}")
        self._options, self.overwrite = options, options.get("overwrite", False)
        self.dry_run, self.storage_options = options.get("dry_run", False), options.get("storage_options") or None
        jobs, engine, task, tasks = (
            options.get("jobs"),
            options.get("engine"),
            options.get("task"),
            options.get("tasks"),
        )
        check_engine(engine, jobs)
        if (task is None) != (tasks is None):
            raise ValueError("--task and --tasks belong together: --task 0 --tasks 8 is the first of 8 shares")
        self.share = (
            0 if task is None else check_count("task", task, least=0),
            1 if tasks is None else check_count("tasks", tasks),
        )
        if self.share[0] >= self.share[1]:
            raise ValueError(f"--task counts from 0, so of {self.share[1]} the last is --task {self.share[1] - 1}")
        self.place = Place(os.fspath(dest), self.storage_options)
        self._engine = engine if callable(engine) else engine_of(jobs or 1)
        if engine == "ray" and not self.dry_run:
            connect()  # before anything is written
            self._engine = on_ray

    def run(self, job: Job) -> Report:
        """Run the share of a job, and return what was done.

        Raises:
            FailedTasksError: tasks failed; what could be done is done.
        """
        report = run(
            job,
            engine=self._engine,
            share=self.share,
            overwrite=self.overwrite,
            dry_run=self.dry_run,
            on_task=self._options.get("on_task"),
            progress=self._options.get("progress", False),
        )
        if report.failed:
            raise FailedTasksError(report)
        return report

    @contextlib.contextmanager
    def beside_outputs(self) -> Iterator[Place]:
        """The directory of what first passes make: in that of the outputs, or with ``dry_run`` a
        temporary one.
        """
        if not self.dry_run:
            yield Place(self.place.at(".wds-pipes"), self.storage_options)
            return
        with tempfile.TemporaryDirectory() as temporary:
            yield Place(temporary, self.storage_options)

    def first_pass(
        self,
        hidden: Place,
        name: str,
        work: Work,
        tasks: Sequence[Task],
        *,
        unit: str = "B",
        dry_run: bool = False,
    ) -> tuple[Place, list[Facts]]:
        """Run the tasks of a first pass that are not finished yet.

        Args:
            hidden: the directory of what first passes make.
            name: that of the pass.
            work: what its tasks do.
            tasks: its tasks.
            unit: what their sizes count.
            dry_run: run none.

        Returns:
            Where the outputs are, and what all tasks have found; with ``dry_run`` nothing, if some
            are not finished. The name of the directory says what they are made from, so commands
            with other inputs, which may run at the same time, have another one.

        Raises:
            ShardError: a task has failed.
        """
        made_from = fingerprint([[task.name, task.fingerprint] for task in tasks])
        place = Place(hidden.at(f"{name}/{made_from}"), hidden.storage_options)
        if not tasks:
            return place, []
        progress = not self.dry_run and self._options.get("progress", False)
        job = Job(f"first pass ({name})", place, work, tasks, unit=unit)
        report = run(job, engine=self._from_share, overwrite=True, dry_run=dry_run, progress=progress)
        if report.failed:
            first, more = next(iter(report.failed.values())), len(report.failed) - 1
            raise ShardError(f"{first} (and {more} more)" if more else first)
        return place, list(report.facts.values()) if report.complete else []

    def _from_share(self, call: Attempt, tasks: Sequence[Task]) -> Iterator[Outcome]:
        """Run tasks, those of the share first."""
        first = len(tasks) * self.share[0] // self.share[1]
        return self._engine(call, [*tasks[first:], *tasks[:first]])


def shard_facts(name: str, facts: ShardFacts) -> Facts:
    """What a task reports of a shard that it has written."""
    return {"shard": name, **facts._asdict()}


def write_task(
    task: Task, place: Place, samples: Iterable[Mapping[str, Any] | Encoded | Stored], *, md5: bool = True
) -> Facts:
    """Write the shard of a task, and return what it reports."""
    facts = write_shard(place.at(task.name), samples, md5=md5, storage_options=place.storage_options)
    return shard_facts(task.name, facts)


def shard_files(name: str) -> tuple[str, ...]:
    """The names of the files that ``write_shard`` writes for a shard: its own, and those of its
    indexes of keys and of offsets.
    """
    return name, name + KEYS, name + OFFSETS


def shard_task(name: str, arguments: Any, mark: str, says: str, size: int = 1) -> Task:
    """Make a task that writes a shard of its name.

    Args:
        name: the name.
        arguments: what the shard is made from.
        mark: a hash of it.
        says: what it is, in words.
        size: how much of the progress bar it is.
    """
    return Task(name, shard_files(name), arguments, mark, size, says)


def shard_job(
    command: str,
    place: Place,
    work: Work,
    tasks: Sequence[Task],
    options: Mapping[str, Any],
    *,
    finish: Callable[[Place, list[Facts]], None] | None = None,
    extras: Sequence[str] = (),
    classes: bytes | None = None,
    unit: str = "sample",
) -> Job:
    """Make a job of which each task writes a shard of its name.

    Args:
        command: its name.
        place: where the shards are written.
        work: writes one.
        tasks: the tasks: see ``shard_task``.
        options: what the outputs depend on, as JSON values.
        finish: writes the indexes, and more; None: the indexes are written.
        extras: the files that ``finish`` writes beside the indexes.
        classes: a ``classes.json`` to write too; None: there is none.
        unit: what the sizes of the tasks count.
    """
    names = index_names([task.name for task in tasks])
    known = [] if classes is None else [CLASSES]
    written = partial(_finish, finish or write_indexes, classes)
    return Job(command, place, work, tasks, options, written, (*names, *extras, *known), unit)


def _finish(
    finish: Callable[[Place, list[Facts]], None], classes: bytes | None, place: Place, facts: list[Facts]
) -> None:
    finish(place, facts)
    if classes is not None:
        place.write(CLASSES, classes)


def marks(urls: Sequence[str], storage_options: StorageOptions, facts: Iterable[ShardFacts] | None = None) -> list[str]:
    """Return the hashes of ``marks_and_sizes``."""
    return [mark for mark, _ in marks_and_sizes(urls, storage_options, facts)]


def marks_and_sizes(
    urls: Sequence[str], storage_options: StorageOptions, facts: Iterable[ShardFacts] | None = None
) -> list[tuple[str, int]]:
    """Return hashes that distinguish the contents of shards, and other files, from others, and the
    sizes in bytes; 1: a size is not known, or 0.

    Args:
        urls: the shards.
        storage_options: how to reach the storage.
        facts: what the ``index.json`` that was given says of each; None: none was given.

    Raises:
        ShardError: one does not exist, or cannot be opened.
        StateError: one has another size than the index says.
    """
    with ThreadPoolExecutor(REQUESTS) as pool:
        found = list(pool.map(lambda url: _mark(url, storage_options), urls))
    for url, (size, _) in zip(urls, found, strict=True):
        if size is None:  # it does not exist, or opening it says what else is wrong
            make_opener(storage_options).open(url).close()
    for url, (size, _), known in zip(urls, found, facts or (), strict=facts is not None):
        check_size(url, size, known)
    return [(mark, size or 1) for size, mark in found]


def check_size(url: str, size: int | None, facts: ShardFacts) -> None:
    """Raise StateError if a shard has another size than its index says; one may not be known."""
    if None not in (size, facts.size) and size != facts.size:
        raise StateError(
            f"{redact(url)} has {plural(size or 0, 'byte')}, and its index says {facts.size:,}: it is cut, or "
            "the index is old. Write the shard again, or its index: wds-pipes index SHARDS -o index.json"
        )


def check_same(url: str, mark: str, storage_options: StorageOptions) -> None:
    """Raise StateError if a shard has another mark than when it was listed."""
    if _mark(url, storage_options)[1] != mark:
        raise changed(url)


def changed(url: str) -> StateError:
    """Return the error for a shard that is another one than when it was listed."""
    return StateError(
        f"shard {redact(url)} was changed after it was listed: run the command again when no program writes it"
    )


def counted(task: Task, samples: Iterable[T]) -> Iterator[T]:
    """Yield the samples of a task whose size is their number, and report its progress."""
    for sample in samples:
        yield sample
        task.advance(1)


def unchanged(samples: Iterable[T], shards: Mapping[str, str], storage_options: StorageOptions) -> Iterator[T]:
    """Yield samples; at the end, before what is made of them gets its name, raise StateError if a
    shard has another mark than when it was listed.

    Args:
        samples: those of the shards.
        shards: the marks of the shards by their URLs.
        storage_options: how to reach them.
    """
    yield from samples
    for url, mark in shards.items():
        check_same(url, mark, storage_options)


def complete(name: str, samples: Iterable[T], count: int | Callable[[], int]) -> Iterator[T]:
    """Yield samples; at the end, before what is made of them gets its name, raise StateError unless
    there were so many, which may be known only then.
    """
    number = 0
    for sample in samples:
        number += 1
        yield sample
    wanted = count() if callable(count) else count
    if number != wanted:
        raise StateError(
            f"{redact(name)}: of {plural(wanted, 'sample')}, {number:,} would be written. This is an error of "
            "wds-pipes, or the input changed: run the command again, and report it if it stays"
        )


def _mark(url: str, storage_options: StorageOptions) -> tuple[int | None, str]:
    size, mark, _ = version_of(url, storage_options)
    name = base_name(url) if local_path(url) is not None else identify(url)
    return size, fingerprint(size, mark, name)  # a hash: the URL may have secrets, and a mark is written down


def check_outputs(inputs: Iterable[str], outputs: Iterable[str], given: Sequence[str] | None = None) -> None:
    """Refuse to replace an input, or to write among the inputs.

    Args:
        inputs: the shards that are read.
        outputs: those that are written.
        given: what names the inputs; None: outputs may be in their directory.

    Raises:
        ValueError: an output is an input, or is in the directory of one that is not given by its
            own name, so that the next run would read the outputs too.
    """
    outputs, read = list(outputs), {_file_of(url): url for url in inputs}
    for url in outputs:
        if _file_of(url) in read:
            raise ValueError(f"{redact(url)} would be written, and is read: write to another directory")
    named = set(read.values() if given is None else given)
    found = {folder_of(file): url for file, url in read.items() if url not in named}
    for url in outputs:
        if (beside := found.get(folder_of(_file_of(url)))) is not None:
            raise ValueError(
                f"{redact(url)} would be written where {redact(beside)} was found, and be read by the next run: write "
                "to another directory"
            )


def names_of(urls: Sequence[str]) -> list[str]:
    """The names of files relative to their common directory. If they have none, such as one on a
    disk and one in a store, with all directories.
    """
    local = [local_path(url) for url in urls]
    paths = [
        [url.partition(":")[0], *parts_of_path(url)] if path is None else os.path.abspath(path).split("/")
        for url, path in zip(urls, local, strict=True)
    ]
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*(path[:-1] for path in paths), strict=False))
    start = len(list(common))
    if start:
        return ["/".join(path[start:]) for path in paths]
    return ["/".join(filter(None, path)) for path in paths]


def check_names(urls: Iterable[str], names: Iterable[str]) -> None:
    """Refuse shards of which two would be written under one name.

    Args:
        urls: the shards.
        names: the name of what is written of each.

    Raises:
        ValueError: a shard is named twice, or two others would get one name.
    """
    found: dict[str, str] = {}
    written: dict[str, str] = {}
    for url, name in zip(urls, names, strict=True):
        path = local_path(url)
        file = identify(url) if path is None else os.path.abspath(path)
        if file in found:
            raise ValueError(f"shard {redact(url)} is named twice: name it once")
        other = written.get(os.path.normpath(name))
        if other is not None:
            raise ValueError(
                f"{redact(other)} and {redact(url)} would both be written as {name}: rename one, or write them to two "
                "directories, with one command for each"
            )
        found[file] = written[os.path.normpath(name)] = url


def _file_of(url: str) -> str:
    path = local_path(url)
    return identify(url) if path is None else os.path.realpath(path)


def index_names(shards: Sequence[str]) -> tuple[str, ...]:
    """The names of the indexes that ``write_indexes`` writes for shards: one in each directory."""
    return tuple(dict.fromkeys(_index_of(name) for name in shards))


def write_indexes(place: Place, facts: Sequence[Facts]) -> None:
    """Write an index of the shards of each directory."""
    indexes: dict[str, dict[str, Entry]] = {}
    for fact in facts:
        entry = Entry(ShardFacts(fact["samples"], fact["size"], fact["md5"]))
        indexes.setdefault(place.at(_index_of(fact["shard"])), {})[place.at(fact["shard"])] = entry
    for index, entries in indexes.items():
        write_index(index, entries, storage_options=place.storage_options)


def classes_of(folder: str, storage_options: StorageOptions) -> bytes | None:
    """Return the ``classes.json`` of the shards in a directory; ``create --split`` writes it in the
    one above. None: there is none.
    """
    for at in (folder, os.path.join(os.path.dirname(folder.rstrip("/")), "")):
        if (content := read_small(at + CLASSES, storage_options)) is not None:
            return content
    return None


def common_classes(urls: Iterable[str], storage_options: StorageOptions) -> bytes | None:
    """The ``classes.json`` of shards, which names the numbers in ``cls``, if all have the same one;
    None: they have not.
    """
    folders = dict.fromkeys(folder_of(url) for url in urls if url != "-" and not url.startswith("pipe:"))
    found = {_classes_if_readable(folder, storage_options) for folder in folders}
    return found.pop() if len(found) == 1 else None


def content_of_classes(names: Sequence[str]) -> bytes:
    """The ``classes.json`` of the names of classes."""
    return (json.dumps(list(names), indent=1) + "\n").encode()


def _classes_if_readable(folder: str, storage_options: StorageOptions) -> bytes | None:
    """As ``classes_of``, but None for what cannot be read or is no list: nobody asked for it. A
    store that may not be listed forbids what does not exist, and a web server may send a page.
    """
    try:
        content = classes_of(folder, storage_options)
        return content if content is not None and isinstance(json.loads(content), list) else None
    except Exception:
        return None


def shard_ends(blocks: Iterable[npt.NDArray[np.int64]], max_samples: int, max_bytes: int) -> Iterator[int]:
    """Divide samples into shards as ShardWriter does, and yield where each shard ends: how many
    samples it and those before it have.

    Args:
        blocks: the bytes that the samples take in a tar, in order, in blocks of any length.
        max_samples: the maximum number of samples in a shard.
        max_bytes: the maximum size of a shard. One with a single sample may be larger.
    """
    room = most_members(max_bytes)
    passed = count = size = 0  # samples before the block; samples and bytes of the shard so far
    for block in blocks:
        ends, at = np.cumsum(block), 0  # at: the place in the block
        while at < len(block):
            before = int(ends[at - 1]) if at else 0
            stop = min(int(np.searchsorted(ends, before + room - size, "right")), at + max_samples - count, len(block))
            if stop <= at and not count:
                stop = at + 1
            if stop <= at:
                yield passed + at
                count = size = 0
                continue
            count, size, at = count + stop - at, size + int(ends[stop - 1]) - before, stop
        passed += len(block)
    if count:
        yield passed


def shard_limits(max_samples: int | None, max_bytes: int | str | None, usual: int = 100_000) -> tuple[int, int]:
    """Return the limits of a shard that options say: its samples (None: as usual) and bytes (None:
    1 GiB).
    """
    most = usual if max_samples is None else check_count("max_samples", max_samples)
    return most, parse_size("1GiB" if max_bytes is None else max_bytes)


def splits_of(shares: Mapping[str, float]) -> dict[str, KeyRange]:
    """Divide samples by their keys: see ``split_by_key``. The names of the splits are those of
    directories.
    """
    parts = split_by_key(shares)
    for name in parts:
        if re.fullmatch(r"[\w-]+", name) is None:
            raise ValueError(f"the names of splits have letters, digits, '_' and '-', and one is {name!r}")
    return parts


def split_numbers(hashes: npt.NDArray[np.uint64], shares: Mapping[str, float]) -> dict[str, npt.NDArray[np.int64]]:
    """Divide samples by the hashes of their keys: the places of those of each split, in order.

    Args:
        hashes: of the key of each sample.
        shares: the names of the splits and their shares.

    Raises:
        ValueError: a split would have no sample.
    """
    found = {name: np.flatnonzero(part.has(hashes)) for name, part in splits_of(shares).items()}
    for name, places in found.items():
        if not len(places):
            raise ValueError(
                f"split {name!r} would have none of {plural(len(hashes), 'sample')}: give it a larger share"
            )
    return found


def _index_of(shard: str) -> str:
    folder = shard.rpartition("/")[0]
    return f"{folder}/{_INDEX}" if folder else _INDEX
