# %% [markdown]
# # Writing your own stage
#
# **You learn** when you need your own stage, how to write it in a few lines so that it resumes
# exactly, and how `check_resume` finds a stage that does not.
#
# **You need** `pip install wds_pipes`

# %%
import os
import tempfile
from dataclasses import dataclass

import numpy as np

import wds_pipes as wp
from wds_pipes.testing import check_resume, make_shards

os.chdir(tempfile.mkdtemp())  # this tutorial writes its files there
urls = make_shards("data", shards=2, samples=6)


def samples(urls=urls):
    return wp.ShardList(urls, shuffle=True, seed=3).open_shards().load_tar().group_by_key().decode_by_ext()


# %% [markdown]
# ## Do you need one?
#
# If each output depends on one sample, a function is enough: `map_samples(fn)`, where
# `fn(sample, rng)` may draw random numbers, `filter_samples(fn)`, or torch's `.map(fn)`. You need a
# stage if the output depends on **more than one sample**: windows, pairs, packing, repeating,
# leaving out the first n.
#
# ## The contract
#
# A stage is a class with three parts:
#
# - `__init__` takes the source and the options, and checks them.
# - `At`, a dataclass, is the **position**: numbers and strings, whose defaults are the beginning.
#   It never contains data.
# - `run` is a generator over `self.source.items`. Whenever it yields, `self.at` and the position of
#   the source must contain everything that is needed to continue.
#
# The package does the rest: state, epochs, workers and pickling. Here is a stage that yields each
# sample `times` times:


# %%
class Repeat(wp.Stage):
    """Yield each sample several times in a row (functional name: ``repeat``).

    Args:
        source: any pipe.
        times: how often to yield it.

    Checkpoint: how often the current sample was yielded. A resume reads that one sample again.
    """

    @dataclass
    class At:
        given: int = 0

    order_options = ("times",)

    def __init__(self, source, times):
        super().__init__(source)
        if times < 1:
            raise ValueError(f"times must be at least 1, not {times}")
        self.times = times

    def run(self):
        for sample in self.source.items:
            while self.at.given < self.times:
                self.at.given += 1
                yield sample
            self.at.given = 0


wp.register_stage(Repeat)
print([sample["__key__"] for sample in samples().repeat(2)][:6])

# %% [markdown]
# The stage works, and the class `Repeat` is now the method `repeat` of every pipe (`MyStage` would
# be `my_stage`). But does it resume exactly?

# %%
try:
    check_resume(lambda: samples().repeat(2))
except AssertionError as error:
    print(error)
else:
    raise AssertionError("this was to fail")

# %% [markdown]
# It does not, and `check_resume` says where. After the first of the two repeats of a sample, the
# position of the source is already *after* that sample. A resume there applies `given=1` to the
# next sample.
#
# This is the main rule: **a stage that holds items when it yields must resume from a position where
# it can read them again.** It keeps an *earlier* position of its source, taken before it read the
# item, and returns that in `mark()`:


# %%
class RepeatSamples(wp.Stage):
    """Yield each sample several times in a row (functional name: ``repeat_samples``).

    Args:
        source: any pipe.
        times: how often to yield it.

    Checkpoint: how often the current sample was yielded. A resume reads that one sample again.
    """

    @dataclass
    class At:
        given: int = 0

    order_options = ("times",)  # a state is refused if these differ

    def __init__(self, source, times):
        super().__init__(source)
        if times < 1:
            raise ValueError(f"times must be at least 1, not {times}")
        self.times = times
        self._before = None  # while running, the position of the source before the current sample

    def run(self):
        source, at = self.source, self.at
        self._before = source.mark()
        for sample in source.items:
            while at.given < self.times:
                at.given += 1
                yield sample
            at.given, self._before = 0, source.mark()

    def mark(self):
        return (self.at.given,), self._before or self.source.mark()


wp.register_stage(RepeatSamples)
epochs = check_resume(lambda: samples().repeat_samples(2))
print("exact at every cut of", len(epochs[0]), "items; and of what was resumed there, cut again")

# %% [markdown]
# ## A stage that holds nothing
#
# Most stages are simpler: when they yield, they have passed on everything that they have read. Then
# they need no `mark`. Declare this with `holds_nothing = True`; `PipeLoader` uses it when it
# repartitions an epoch. If what a stage yields depends on how many samples it has had in its lane,
# as in `take_samples`, also declare `whole_lanes = True`: then no lane is divided. Here is a stage
# that joins texts until they have at least a given number of characters, and yields the result at
# once.


# %%
class PackTexts(wp.Stage):
    """Join texts until they have at least this many characters (functional name: ``pack_texts``).

    The last text of an epoch may be shorter.

    Checkpoint: nothing of its own, because everything that was read was yielded. A resume reads
    nothing again.
    """

    holds_nothing = True

    def __init__(self, source, characters):
        super().__init__(source)
        self.characters = characters

    order_options = ("characters",)

    def run(self):
        text = ""
        for sample in self.source.items:
            text += sample["txt"] + "\n"
            if len(text) >= self.characters:
                yield text
                text = ""
        if text:
            yield text


wp.register_stage(PackTexts)
packed = check_resume(lambda: samples().pack_texts(80))
print([len(text) for text in packed[0]])
everything = "".join(packed[0])
assert all(sample["txt"] in everything for sample in samples())

# %% [markdown]
# ## Random numbers
#
# Random numbers must be a function of the seed, the epoch and the place. Do not draw them from a
# generator that lives across samples: its state would be lost. `self.lane.key()` returns an integer
# to seed a new generator with.


# %%
class DropSome(wp.Stage):
    """Leave samples out at random (functional name: ``drop_some``). Checkpoint: how many samples were read."""

    @dataclass
    class At:
        number: int = 0
        filtered: int = 0  # a field of this name appears in pipe.counts()

    order_options = ("share",)

    def __init__(self, source, share):
        super().__init__(source)
        self.share = share

    def run(self):
        for sample in self.source.items:
            self.at.number += 1
            if np.random.default_rng(self.lane.key(self.depth, self.at.number)).random() < self.share:
                self.at.filtered += 1
            else:
                yield sample


wp.register_stage(DropSome)
check_resume(lambda: samples().drop_some(0.5))
pipe = samples().drop_some(0.5)
by_epoch = [[sample["__key__"] for sample in pipe] for _ in range(2)]
print(by_epoch, pipe.counts())
assert by_epoch[0] != by_epoch[1]

# %% [markdown]
# ## In workers, and beyond one test
#
# A registered stage works in a `PipeLoader`, and each lane has a position of its own. If workers
# are not forked (on macOS and Windows, and everywhere from Python 3.14 on), put the class into a
# module that the workers can import, not into a notebook.

# %%
loader = wp.PipeLoader(samples().repeat_samples(2).drop_some(0.3), batch_size=4, lanes=2, collate="list")
batches = list(loader)
state, rest = None, []
for number, batch in enumerate(loader):
    if number == 1:
        state = loader.state_dict()
    elif number > 1:
        rest.append(batch)
resumed = wp.PipeLoader(samples().repeat_samples(2).drop_some(0.3), batch_size=4, lanes=2, collate="list")
resumed.load_state_dict(state)
assert list(resumed) == rest
print(len(rest), "batches are equal after the resume;", resumed.counts())

# %% [markdown]
# Checklist:
#
# - `order_options` names all options that decide which items come, or in which order: a state with
#   other values of these options is refused.
# - The position contains only numbers and strings, and does not grow with the data.
# - The docstring says what is saved, and how much a resume reads again.
# - Your tests call `check_resume`, with an empty shard (`make_shards(samples=[3, 0, 2])`) and with
#   a shuffle buffer before and after the stage.

# %%
uneven = make_shards("uneven", shards=3, samples=[3, 0, 2])
epochs = check_resume(lambda: samples(uneven).shuffle_buffer(2).repeat_samples(3).shuffle_buffer(2))
assert len(epochs[0]) == 15

# %% [markdown]
# ## What to read next
#
# - The head of `wds_pipes/core/stage.py`: the rules in full. The stages of the package are short;
#   `stages/shuffle_buffer.py` is one that keeps an earlier position of its source.
# - `08_torchdata_graphs`: `check_resume` for other graphs.
