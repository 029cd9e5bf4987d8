"""Two passes for samples that are small and in a store: one request for many of them.

One pass reads each sample where it is in the input, so a small one costs a request. With two, the
inputs are read from the first byte to the last, as in the shuffle of MapReduce (Dean and Ghemawat,
"MapReduce: simplified data processing on large clusters", OSDI 2004).

Rules:
1. The first pass reads the input in chunks that fit into the memory, and writes the samples of each
   to a file, in the order of the outputs. So what an output needs of a file is one range of it.
2. A sample is copied as it is, with the header after it, so that both passes parse the same bytes.
   The outputs are those of one pass.
3. The files are in the directory of the outputs, as large as the input together, and are removed
   when all outputs are complete.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from wds_pipes.cli.first_pass import How, first_pass, of_first_pass
from wds_pipes.cli.reshaping.inputs import Extents, Inputs
from wds_pipes.cli.reshaping.plan import BLOCK_SAMPLES, COPIES, Part, check_memory, numbers_at, with_own_keys
from wds_pipes.cli.reshaping.reading import Reader, Sample
from wds_pipes.cli.shards import shard_ends, shard_facts
from wds_pipes.errors import ShardError
from wds_pipes.io.open import is_remote
from wds_pipes.io.outputs import open_output
from wds_pipes.io.range_runs import GAP
from wds_pipes.io.tasks.task import FULL, Facts, Job, Place, Task, fingerprint
from wds_pipes.io.urls import redact
from wds_pipes.tar.headers import BLOCK
from wds_pipes.tar.shard_file import write_shard

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from wds_pipes.cli.reshaping.plan import Order

_OF_SAMPLE = 36  # bytes of memory for each sample; 54 while the passes are planned
_TRIED = 4  # windows of which the cost is computed


def in_passes(job: Job, inputs: Inputs, order: Order, *, passes: int | None, memory: int, how: How) -> Job:
    """Return a job with the same outputs that reads the samples in one pass or two.

    Args:
        job: writes all samples in an order, in one pass.
        inputs: the samples.
        order: the order.
        passes: how many; None: two if they are much quicker, and the memory is enough.
        memory: how many bytes each process may need.
        how: how the first pass is run.

    Raises:
        ValueError: two passes need more memory.
    """
    if passes == 1:
        return replace(job, prepare=partial(job.place.remove_folder, COPIES))  # of an earlier run: they may fill a disk
    fits = 2 * _OF_SAMPLE * inputs.count <= memory
    if passes is None and not (fits and _is_quicker(inputs, order, memory // 4)):
        return job
    check_memory(inputs, memory, _OF_SAMPLE)
    left = max(memory // 4, memory - 2 * _OF_SAMPLE * inputs.count)
    return _in_two_passes(job, inputs, order, memory=left // 2, how=how)


def _is_quicker(inputs: Inputs, order: Order, window: int) -> bool:
    """Whether two passes are much quicker than one: computed for some windows of the order, with
    the bytes that are read and written, and a request as so many bytes as it takes the time of.
    """
    import numpy as np

    if not any(map(is_remote, inputs.urls)):
        return False
    ends = np.cumsum(inputs.blocks, dtype=np.int64) * BLOCK
    size = int(ends[-1])
    if size <= window:
        return False
    samples = max(1, min(BLOCK_SAMPLES, inputs.count, window * inputs.count // size))
    firsts = np.array(inputs.located.starts)
    read = wanted = 0
    for tried in range(_TRIED):
        start = (inputs.count - samples) * tried // (_TRIED - 1)
        numbers = np.sort(numbers_at(order, start, start + samples))
        sizes = inputs.blocks[numbers].astype(np.int64) * BLOCK
        gaps = (ends[numbers] - sizes)[1:] - ends[numbers][:-1]
        shards = np.searchsorted(firsts, numbers, side="right")
        apart = (gaps > GAP) | (np.diff(shards) > 0)
        wanted += int(sizes.sum())
        read += int(sizes.sum() + gaps[~apart].sum()) + GAP * (int(apart.sum()) + 1)
    chunks, of_window = size / window, wanted / _TRIED
    return read / wanted > 1.5 * (3 + chunks * GAP / of_window)


def _in_two_passes(job: Job, inputs: Inputs, order: Order, *, memory: int, how: How) -> Job:
    """Return a job with the same outputs, which reads what a first pass has written; ``memory``:
    how many bytes each process may hold of the samples.
    """
    import numpy as np

    blocks, numbers = inputs.blocks, numbers_at(order, 0, inputs.count)
    ends = list(shard_ends([(blocks + np.uint32(1)).astype(np.int64) * BLOCK], inputs.count, memory // 2))
    chunks = np.searchsorted(np.array(ends), numbers, side="right").astype(np.uint32)
    places = np.argsort(chunks, kind="stable")  # those of each chunk, in order
    sizes = blocks[numbers]
    starts = np.empty(inputs.count, np.uint32)
    identity, tasks = fingerprint([task.fingerprint for task in job.tasks]), []
    for chunk, (start, stop) in enumerate(pairwise([0, *ends])):
        here = places[start:stop]
        after = np.cumsum(sizes[here] + np.uint32(1), dtype=np.uint32)  # and the header after each
        starts[here] = after - sizes[here] - np.uint32(1)
        tasks.append(Task(f"{chunk:06d}", (f"{chunk:06d}",), numbers[here], fingerprint(identity, start, stop)))
    shards = (np.searchsorted(np.array(inputs.located.starts), numbers, side="right") - 1).astype(np.uint32)
    place = of_first_pass(Place(job.place.at(COPIES), job.place.storage_options), tasks)
    gather = Job(f"{job.command} (first pass)", place, partial(_gather, inputs, memory), tasks)
    files, at = [place.at(task.name) for task in tasks], 0
    second = []
    for task in job.tasks:
        part = slice(at, at := at + task.arguments.stop - task.arguments.start)
        found = Gathered(files, chunks[part], starts[part], sizes[part], shards[part], place.storage_options)
        second.append(replace(task, arguments=found))

    def prepare() -> None:
        first_pass(gather, how)

    work = partial(_write, inputs.urls, memory, "md5" in job.options)
    return replace(job, work=work, tasks=second, prepare=prepare)


def _gather(inputs: Inputs, memory: int, task: Task, place: Place) -> Facts:
    """Write the samples of a chunk in the order of the outputs."""
    output = open_output(place.at(task.name), overwrite=True, wait=True, storage_options=place.storage_options)
    try:
        with contextlib.closing(Reader(inputs, memory)) as reader:
            for sample in reader.copies([task.arguments]):
                output.write(sample)
        output.commit()
    except OSError as error:
        if error.errno not in FULL:
            raise
        advice = "two passes need as much space again: make room, or pass --passes 1"
        raise OSError(error.errno, f"{error.strerror}; {advice}", error.filename) from error
    finally:
        output.discard()
    return {}


@dataclass
class Gathered:
    """The samples of an output in the files of the first pass, by their places in the output.

    Attributes:
        urls: the files.
        files: in which of them each sample is: uint32, as the next ones, of shape (samples,).
        starts: the blocks of 512 bytes before it there.
        sizes: how many blocks it takes.
        shards: the numbers of the shards that they come from.
        storage_options: how to reach the storage.
    """

    urls: list[str]
    files: npt.NDArray[np.uint32]
    starts: npt.NDArray[np.uint32]
    sizes: npt.NDArray[np.uint32]
    shards: npt.NDArray[np.uint32]
    storage_options: dict[str, Any] | None
    compressed: frozenset[str] = frozenset()

    @property
    def start(self) -> int:
        """The place of the first sample."""
        return 0

    @property
    def stop(self) -> int:
        """The number of samples."""
        return len(self.files)

    def extents(self, numbers: npt.NDArray[np.int64]) -> Extents:
        """Return where samples are."""
        import numpy as np

        starts = self.starts[numbers].astype(np.int64) * BLOCK
        stops = starts + self.sizes[numbers].astype(np.int64) * BLOCK
        return Extents(self.files[numbers].astype(np.int64), starts, stops, np.zeros(len(numbers), np.bool_))

    def check_same(self, url: str) -> None:
        """Do nothing: only this job writes the files."""

    def stale(self, url: str, what: str) -> ShardError:
        """Return the error for a file that has not what the first pass has written."""
        shown = redact(url)
        return ShardError(f"{shown} is damaged: {what}. Remove it, and run the command again", url=shown)


def _write(urls: Sequence[str], memory: int, md5: bool, task: Task, place: Place) -> Facts:
    """Write a shard."""
    found: Gathered = task.arguments
    shown = [redact(url) for url in urls]  # one text for all samples of a shard

    def samples(reader: Reader) -> Iterator[Sample]:
        blocks = Part(range(found.stop), 0, found.stop).blocks()
        for shard, sample in zip(found.shards, reader.read(blocks), strict=True):
            sample["__url__"] = shown[shard]
            yield sample

    with contextlib.closing(Reader(found, memory)) as reader:
        in_order = with_own_keys(samples(reader))
        facts = write_shard(place.at(task.name), in_order, md5=md5, storage_options=place.storage_options)
    return shard_facts(task.name, facts)
