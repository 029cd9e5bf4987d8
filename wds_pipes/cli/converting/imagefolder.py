"""What ``wds-pipes export --to imagefolder`` writes: images by their classes, and lists of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from wds_pipes.cli.shards import classes_of
from wds_pipes.core.order import hash_text
from wds_pipes.errors import SampleError
from wds_pipes.io.tasks.task import Place
from wds_pipes.io.urls import redact
from wds_pipes.tar.keys import is_metadata

Options = dict[str, Any] | None
Sample = dict[str, Any]


def unfit(sample: Sample, what: str) -> SampleError:
    """The error for a sample that a format cannot hold, without the credentials in its URL."""
    shown = redact(sample["__url__"])
    return SampleError(f"shard {shown}: {what}", key=sample["__key__"], url=shown)


def write_images(samples: Iterable[Sample], label: str, classes: Sequence[str] | None, place: Place) -> Iterator[str]:
    """Write the fields of samples as files, and yield the lines of their list."""
    of_path: dict[str, str] = {}  # keys
    for sample in samples:
        key = sample["__key__"]
        fields = {field: data for field, data in sample.items() if not is_metadata(field) and field != label}
        if label not in sample or not fields:
            what = (
                f"field {label!r}, which names its class: name it with --label"
                if fields
                else "other fields than its class"
            )
            raise unfit(sample, f"sample {key!r} has no {what}")
        name = _class(sample[label], classes, label, sample)
        inside = key.removeprefix(f"{name}/")
        parts = [*inside.split("/"), name]
        bad = any(part in ("", ".", "..") for part in parts) or "/" in name or name.startswith(".")
        if bad or any(control in name + key for control in "\0\t\n\r"):
            raise unfit(
                sample,
                f"sample {key!r} of class {name!r} would not be a file in the directory of its class: write it with "
                "wds-pipes get",
            )
        for field, data in fields.items():
            path = f"images/{name}/{inside}.{field}"
            if of_path.setdefault(path, key) != key:
                raise unfit(sample, f"samples {of_path[path]!r} and {key!r} would both be {path}: give one another key")
            place.write(path, data)
            yield f"{path}\t{name}\n"


def check_lists(lists: Sequence[str], place: Place) -> None:
    """Check that shards did not write the same files.

    Raises:
        SampleError: two of them have a sample of one key and class.
    """
    seen: dict[int, str] = {}
    for name in lists:
        for line in (place.read(name) or b"").splitlines():
            path = line.partition(b"\t")[0]
            before = seen.setdefault(hash_text(path.decode("utf-8", "surrogateescape")), name)
            if before != name:
                shown = path.decode("utf-8", "replace")
                raise SampleError(
                    f"{before} and {name} both have {shown}, so one of the two is lost: export them into different "
                    "directories"
                )


def _class(data: bytes, classes: Sequence[str] | None, label: str, sample: Sample) -> str:
    text = data.decode("utf-8", "surrogateescape").strip()
    if classes is None:
        return text
    number = int(text) if text.isascii() and text.isdecimal() else len(classes)
    if number >= len(classes):
        raise unfit(
            sample,
            f"field {label!r} of sample {sample['__key__']!r} is {text!r:.80}, and classes.json has the names of "
            f"{len(classes):,} classes, from 0 on: mend or remove it",
        )
    return classes[number]


def read_classes(folder: str, storage_options: Options) -> list[str] | None:
    """The names of the classes of the shards in a directory; None: not known."""
    content = classes_of(folder, storage_options)
    if content is None:
        return None
    try:
        names = json.loads(content)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"classes.json of the shards in {redact(folder)} is no list of names: mend or remove it")
    return names
