"""What a job consists of, and what is known after it has run."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, TypeAlias

from wds_pipes.errors import SampleError, StateError, WdsError
from wds_pipes.io.outputs import read_small, refuse, remove, size_of, target_of, write_small
from wds_pipes.io.secret import hide, words
from wds_pipes.io.urls import below, is_below, local_path, redact

Facts: TypeAlias = dict[str, Any]
FULL = (errno.ENOSPC, errno.EDQUOT)  # the disk is full, or a quota used up


@dataclass(frozen=True)
class Task:
    """A part of a job that can be run by itself, also more than once.

    Attributes:
        name: its name in messages, which no other task of the job has.
        outputs: the files that it writes, relative to the directory of the job.
        arguments: what it is made from; it can be pickled.
        fingerprint: a hash of the inputs, such as ``fingerprint(...)`` returns.
        size: how much of the progress bar it is, in the units of the job.
        says: what it writes, in words.
    """

    name: str
    outputs: tuple[str, ...]
    arguments: Any = None
    fingerprint: str = ""
    size: int = 1
    says: str = ""


@dataclass(frozen=True)
class Place:
    """The directory where a job writes, on a local disk or in a store.

    Args:
        url: its path or URL.
        storage_options: how to reach the storage: a dict of options for fsspec.

    Raises:
        ValueError: nothing can be written there.
    """

    url: str
    storage_options: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", target_of(self.url).rstrip("/") or "/")

    def at(self, name: str) -> str:
        """The path or URL of a file in it.

        Raises:
            ValueError: the name leads out of it.
        """
        return below(self.url, name)

    def make(self, names: Sequence[str]) -> None:
        """Make the directories of files; stores have none."""
        if local_path(self.url) is not None:
            for folder in sorted({os.path.dirname(self.at(name)) for name in names}):
                os.makedirs(folder, exist_ok=True)

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None: it does not exist."""
        return read_small(self.at(name), self.storage_options)

    def write(self, name: str, content: bytes, *, overwrite: bool = True) -> None:
        """Write a small file; it appears when it is complete. FileExistsError: it is there, and
        ``overwrite`` is not set.
        """
        self.make([name])
        write_small(self.at(name), content, self.storage_options, overwrite=overwrite)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        remove(self.at(name), self.storage_options)

    def has_file(self, name: str) -> bool:
        """Whether it may have a file of this name: on a disk one that is no directory, and in no
        directory that is a link to another place.
        """
        root = local_path(self.url)
        if root is None:
            return True
        path, root = os.path.join(root, name), os.path.realpath(root)
        inside = os.path.realpath(os.path.dirname(path)) == os.path.join(root, os.path.dirname(name)).rstrip("/")
        return inside and not os.path.isdir(path)

    def sizes(self, names: Sequence[str]) -> dict[str, int]:
        """The sizes in bytes of those of these files that exist."""
        if local_path(self.url) is not None:
            found = {name: size_of(self.at(name)) for name in names}
            return {name: size for name, size in found.items() if size is not None}
        sizes: dict[str, int] = {}
        for folder in sorted({name.rpartition("/")[0] for name in names}):
            for entry in self._listed(folder):
                if entry["type"] == "file":
                    name = entry["name"].rstrip("/").rpartition("/")[2]
                    sizes[f"{folder}/{name}" if folder else name] = int(entry["size"] or 0)
        return {name: sizes[name] for name in names if name in sizes}

    def has_any(self, folder: str) -> bool:
        """Whether there is anything in a directory."""
        path = local_path(self.at(folder))
        if path is None:
            return bool(self._listed(folder))
        try:
            return bool(os.listdir(path))
        except FileNotFoundError:
            return False

    def _listed(self, folder: str) -> list[dict[str, Any]]:
        """What is in a directory of a store, in one request for a thousand files."""
        from wds_pipes.io.remote.metadata import ask

        url = self.at(folder) if folder else self.url
        try:
            return list(ask(url, self.storage_options, lambda fs, path: fs.ls(path, detail=True)))
        except FileNotFoundError:
            return []
        except Exception as error:
            refuse(url, error, self.storage_options, "listed")


# What a task does: it writes its outputs to the place, replacing what is there, and returns facts
# that JSON can represent.
Work: TypeAlias = Callable[[Task, Place], Facts]


@dataclass(frozen=True)
class Job:
    """A command that writes files: what is run, and where its outputs are.

    Attributes:
        command: its name in messages and in the plan.
        place: the directory of the outputs. It belongs to one job.
        work: a function of a module (processes import it), called with a task and the place. It
            writes the outputs of the task, each under its name only when it is complete, replaces
            what is there, and returns facts that JSON can represent.
        tasks: the parts; their order decides how they are shared.
        options: what the outputs depend on, as JSON values. They are named where a plan differs.
        finish: called with the place and the facts of all tasks in order when all are finished: it
            writes what belongs to the whole. It may be called again.
        extras: the files that ``finish`` writes. If nothing was left to do and all are there, it is
            not called.
        unit: what the sizes of the tasks count, in the progress bar; ``"B"`` for bytes.
        lists: if the outputs are lists of more files that the tasks write, the directory of these.
            If anything is there, no other job begins, also with ``overwrite``.
    """

    command: str
    place: Place
    work: Work
    tasks: Sequence[Task]
    options: Mapping[str, Any] = field(default_factory=dict)
    finish: Callable[[Place, list[Facts]], None] | None = None
    extras: tuple[str, ...] = ()
    unit: str = "task"
    lists: str = ""

    def __post_init__(self) -> None:
        outputs = [name for task in self.tasks for name in task.outputs] + list(self.extras)
        tasks = [task.name for task in self.tasks]
        for name in [*outputs, *tasks]:
            if not is_inside(name):
                raise ValueError(f"an output is named relative to its directory, and not {name!r}")
        for what, names in (("output", outputs), ("task", tasks)):
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise ValueError(f"two tasks have one {what}, {twice!r}: give each its own")


@dataclass(frozen=True)
class Outcome:
    """What became of a task.

    Attributes:
        name: that of the task.
        facts: what ``work`` returned; None: it failed.
        error: why it failed.
        again: whether it makes sense to try again.
        busy: another process writes its outputs.
        full: the disk is full, so other tasks would fail too.
    """

    name: str
    facts: Facts | None = None
    error: str = ""
    again: bool = False
    busy: bool = False
    full: bool = False

    @classmethod
    def failed(cls, name: str, error: Exception) -> Outcome:
        """The outcome of a task that raised."""
        told = hide(words(error) if isinstance(error, WdsError) else f"{type(error).__name__}: {words(error)}")
        again = not isinstance(error, (SampleError, StateError, ValueError, TypeError, ImportError, LookupError))
        full = isinstance(error, OSError) and error.errno in FULL
        return cls(name, error=told, again=again and not full, busy=isinstance(error, BlockingIOError), full=full)


# Runs tasks anywhere: it is called with a function that can be pickled, and with tasks, and yields
# what the function returns for each task, in any order. Where the process of a task dies, it yields
# an Outcome that says so. If it is closed early, it ends what it has started.
Engine: TypeAlias = Callable[[Callable[[Task], Outcome], Sequence[Task]], Iterator[Outcome]]


@dataclass
class Report:
    """What is known after a job, or a share of it, has run.

    Attributes:
        place: the directory of the outputs, without credentials.
        total: the number of tasks of the job.
        written: the names of the tasks that ran; with ``dry_run``, of those that would.
        skipped: the names of the tasks of this share that were finished before.
        failed: why tasks failed, by their names.
        facts: what the finished tasks of the job found, by their names, in order.
    """

    place: str
    total: int
    written: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    facts: dict[str, Facts] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all tasks of the job are finished, also those of other shares."""
        return len(self.facts) == self.total


def is_inside(name: str) -> bool:
    """Whether a name is that of a file in the directory of a job, besides its journal."""
    return is_below(name) and not name.startswith(".wds-pipes")


def fingerprint(*values: Any) -> str:
    """Return a hash of JSON values, as 32 hexadecimal digits."""
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))
    return blake2b(text.encode("ascii"), digest_size=16).hexdigest()


def shown_place(place: Place) -> str:
    """A place without credentials, for messages."""
    return redact(place.url)
