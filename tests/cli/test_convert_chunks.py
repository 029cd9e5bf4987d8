"""``wds-pipes convert --from mds`` and ``--from litdata``: what these libraries have written."""

import itertools
import json
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import outputs, run_command
from tars import samples

from wds_pipes.codecs import decode

DATA = Path(__file__).parents[1] / "data"
FORMS = ["mds/plain", "mds/zstd", "litdata/pairs", "litdata/rows", "litdata/chunk", "litdata/batch", "litdata/sample"]


def run(*arguments, code=0):
    return run_command("convert", *arguments, code=code)


def convert(name, dest, *options, code=0):
    """Convert a data set of the formats of FORMS, with three samples in a shard."""
    source = name if isinstance(name, Path) else DATA / name
    kind = "mds" if "mds" in source.parts else "litdata"
    if source.name == "rows":
        pytest.importorskip("pyarrow")
    return run(source, dest, "--from", kind, "--max-samples", 3, *options, code=code)


def refused(source, dest, code=(1, 2)):
    """The message of a refusal, which is one line after what was planned."""
    return convert(source, dest, code=code).stderr.strip()


def read(folder):
    """The fields of the samples in all shards, in their order."""
    found = samples(sorted(map(str, Path(folder).rglob("*.tar"))))
    assert [sample["__key__"] for sample in found] == [f"{number:09d}" for number in range(len(found))]
    return [{name: value for name, value in sample.items() if name[:2] != "__"} for sample in found]


def stored(name):
    """The bytes of the files of a data set."""
    return b"".join(path.read_bytes() for path in sorted((DATA / name).iterdir()))


# Values


def npy(fields, name):
    return decode(fields[name], name)


def test_every_type_of_mds(tmp_path):
    """Images and pickles are as they were, pixels and arrays are npy, and the rest is JSON."""
