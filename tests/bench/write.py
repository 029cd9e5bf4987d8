"""What making shards costs, in one process, side by side; in one run, alternating; medians.

    python tests/bench/write.py [DIRECTORY]      writes about 800 MB there (default: a temporary
    directory), takes three minutes

1. Writing: ``ShardWriter``, what tasks do (``write_shard``) and ``wds-pipes create``, against
   webdataset's ``ShardWriter`` on 200-byte samples and against copying the files on samples of 107
   KB. Copies, and webdataset, do not wait for the disk (fsync), and ours do. The shards of all our
   ways must be equal.
2. ``verify`` and ``cat``, as look.py measures them.
3. ``reshard``, as reshape.py measures it.

Prints the rates and ratios; exits with 1 if a bar is missed.
"""

import gc
import hashlib
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

import look
import reshape
import webdataset
from bars import bar, exit_if_missed
from click.testing import CliRunner
from data import images, tiny
from peers.data import tar_samples

from wds_pipes import ShardWriter
from wds_pipes.cli import main as command
from wds_pipes.tar.shard_file import write_shard

ROUNDS, TINY = 5, 5000
_MOST = 1 << 40  # samples or bytes: all samples are in one shard


def make_files(samples, folder: Path) -> None:
    """Write the fields of samples as files, unless they are there."""
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for sample in samples:
            for field, data in sample.items():
                if field != "__key__":
                    (partial / f"{sample['__key__']}.{field}").write_bytes(data)
        partial.rename(folder)


def shards_of(urls):
    """The samples of shards."""
    return [{"__key__": key, **fields} for url in urls for key, fields in tar_samples(url)]


def read_files(folder: Path):
    """The samples of files, with the least that a program must do."""
    sample = {}
    for name in sorted(os.listdir(folder)):
        key, _, field = name.partition(".")
        if sample.get("__key__", key) != key:
            yield sample
            sample = {}
        with open(folder / name, "rb", buffering=0) as file:
            sample |= {"__key__": key, field: file.read()}
    yield sample


class Ways:
    """Ways to write samples into a new directory. Each of ours returns its shard."""

    def __init__(self, samples, folder: Path) -> None:
        self._samples, self._folder = samples, folder

    def webdataset(self, into: str):
        with webdataset.ShardWriter(f"{into}/%d.tar", maxcount=_MOST, maxsize=_MOST, verbose=0) as writer:
            for sample in self._samples():
                writer.write(sample)

    def copy(self, into: str):
        for name in os.listdir(self._folder):
            shutil.copyfile(self._folder / name, f"{into}/{name}")

    def ShardWriter(self, into: str):
        pattern, index = f"{into}/%d.tar", f"{into}/index.json"
        with ShardWriter(pattern, max_samples=_MOST, max_bytes=_MOST, index=index, offsets=True) as writer:
            for sample in self._samples():
                writer.write(sample)
        return f"{into}/0.tar"

    def write_shard(self, into: str):
        write_shard(f"{into}/0.tar", self._samples())
        return f"{into}/0.tar"

    def create(self, into: str):
        limits = ["--max-samples", str(_MOST), "--max-bytes", str(_MOST)]
        done = CliRunner().invoke(command, ["create", str(self._folder), into, *limits])
        assert done.exit_code == 0, done.output
        return f"{into}/shard-000000.tar"


def seconds(ways, root: Path):
    """The median time of each way, measured in turn; all shards must be equal."""
    taken, digests = {way.__name__: [] for way in ways}, set()
    for _ in range(ROUNDS):
        for way in ways:
            into = tempfile.mkdtemp(dir=root)
            gc.collect()
            start = time.perf_counter()
            shard = way(into)
            taken[way.__name__].append(time.perf_counter() - start)
            if shard is not None:
                digests.add(hashlib.sha256(Path(shard).read_bytes()).hexdigest())
            shutil.rmtree(into)
    assert len(digests) == 1, "the ways write different bytes"
    return {name: statistics.median(times) for name, times in taken.items()}


def show(found, count: int) -> None:
    for name, median in found.items():
        print(f"  {name:<14}{count / median:>12,.0f} samples/s")


def writing(root: Path) -> None:
    warnings.simplefilter("ignore")  # of webdataset, which leaves files open
    root.mkdir(exist_ok=True)
    small, large = shards_of(tiny(root)[:1])[:TINY], shards_of(images(root, shards=1))
    make_files(small, root / "tiny-files")
    make_files(large, root / "image-files")
    gc.freeze()  # else each way might have to go through what was imported for the others

    print(f"tiny samples in memory (200-byte text, class); load {os.getloadavg()[0]:.1f}")
    ways = Ways(lambda: small, root / "tiny-files")
    found = seconds((ways.webdataset, ways.ShardWriter, ways.write_shard), root)
    show(found, len(small))
    for name in ("ShardWriter", "write_shard"):
        bar(f"{name} / webdataset", found["webdataset"] / found[name], 3, least=True)

    print(f"the same in files; load {os.getloadavg()[0]:.1f}")
    ways = Ways(lambda: read_files(root / "tiny-files"), root / "tiny-files")
    found = seconds((ways.webdataset, ways.ShardWriter, ways.create), root)
    show(found, len(small))
    bar("create / webdataset", found["webdataset"] / found["create"], 3, least=True)

    print(f"images in files (110 KB JPEG, class, JSON); load {os.getloadavg()[0]:.1f}")
    count = len(large)
    del large
    ways = Ways(lambda: read_files(root / "image-files"), root / "image-files")
    found = seconds((ways.copy, ways.webdataset, ways.ShardWriter, ways.write_shard, ways.create), root)
    show(found, count)
    for name in ("ShardWriter", "write_shard", "create"):
        bar(f"{name} / copying the files", found["copy"] / found[name], 0.8, least=True)


def main(root: Path) -> None:
    writing(root / "writing")
    look.main(root)
    reshape.speed(root)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        os.makedirs(sys.argv[1], exist_ok=True)
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as made:
            main(Path(made))
    exit_if_missed()
