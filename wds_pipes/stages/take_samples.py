"""TakeSamples: end an epoch after a number of samples."""

from __future__ import annotations

from wds_pipes.core.options import check_count
from wds_pipes.core.stage import Out, Stage
from wds_pipes.stages.slice_samples import SliceSamples


class TakeSamples(SliceSamples[Out]):
    """End each epoch after its first ``n`` samples (functional name: ``take_samples``).

    A process that reads the whole epoch yields exactly the first ``n`` samples, or all if there are
    fewer. After the last of them nothing more is read: files and connections are closed.

    PipeLoader and the workers of a DataLoader divide an epoch into lanes. Then each lane yields its
    share of ``n``, the first n % L of L lanes one more than the others, so that all lanes together
    yield at most ``n`` samples. No lane makes up for another that has too few samples: the total is
    smaller if there are fewer shards than lanes, unless the samples of the shards are counted. On
    several ranks, PipeLoader needs ``epoch_end="exact"`` or ``"loop"``.

    Each epoch yields ``n`` samples anew. If ``ShardList`` shuffles the shards or resamples them,
    they are others in each epoch. Before ``shuffle_buffer``, only these ``n`` samples are read, and
    shuffled; after it, they are the first of the shuffled order, for which more is read. Put this
    step after ``interleave_shards``. ``slice_samples(n)`` yields the rest of the epoch. To make
    epochs of another length, each of which continues where the last one ended, use
    ``PipeLoader.with_epoch``. For a part of the data that is the same in each epoch and on any
    ranks, use ``SampleList(urls, where=split_by_key(shares)[name])``.

    Args:
        source: any pipe.
        n: how many samples to yield, at least 1.

    Raises:
        TypeError, ValueError: when the stage is built, if ``n`` is not an int or less than 1.

    Checkpoint: how many samples were yielded. A resume reads nothing again. If an epoch continues
    on another number of ranks or workers, its lanes are not divided: each continues as a whole, so
    that the epoch has the same samples.
    """

    order_options = ("n",)

    def __init__(self, source: Stage[Out], n: int) -> None:
        self.n = check_count("n", n)
        super().__init__(source, 0, n)
