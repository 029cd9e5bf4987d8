# %% [markdown]
# # Writing your own stage
#
# **You learn** when you need one, how to write it in a few lines so that it resumes exactly, and
# how `check_resume` finds one that doesn't.
#
# **You need** `pip install wds_pipes`

# %%
import os
import tempfile
from dataclasses import dataclass

import numpy as np

import wds_pipes as wp
from wds_pipes.testing import check_resume, make_shards

os.chdir(tempfile.mkdtemp())  # all that is written here goes there
urls = make_shards("data", shards=2, samples=6)


def samples(urls=urls):
    return wp.ShardList(urls, shuffle=True, seed=3).open_shards().load_tar().group_by_key().decode_by_ext()


# %% [markdown]
# ## Do you need one?
#
# Whatever makes one sample of one sample is a function: `map_samples(fn)`, `map_samples(fn, rng)`
# with chance, `filter_samples(fn)`, or torch's `.map(fn)`. You need a stage when what comes out
# depends on **more than one sample**: windows, pairs, packing, repeating, leaving out the first n.
#
# ## The contract
#
# A stage is a class with three parts:
#
# - `__init__` takes the source and the options, and checks them.
# - `At`, a dataclass, is the **position**: numbers and strings, whose defaults are the beginning.
#   Never data.
# - `run` is a generator over `self.source.items`. Whenever it yields, `self.at` and the position of
#   the source say all that is needed to go on.
#
# The rest, that is state, epochs, workers and pickling, is done for you. Here is one that gives
# each sample `times` times:


# %%
class Repeat(wp.Stage):
    """Give each sample several times in a row (functional name: ``repeat``).

    Args:
        source: any pipe.
        times: how often.

    Checkpoint: how often the current sample was given. A resume reads that one sample again.
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
# It works; and the class `Repeat` is the method `repeat` of every pipe (`MyStage` would be
# `my_stage`). But is it exact?

# %%
try:
    check_resume(lambda: samples().repeat(2))
except AssertionError as error:
    print(error)
else:
    raise AssertionError("this was to fail")

# %% [markdown]
# It is not, and `check_resume` says where. Cut after the first time of a sample, the position of
# the source is already *behind* that sample. Resumed there, `given=1` is taken for the next one.
#
# That is the one rule to keep in mind: **a stage that holds something when it yields must go back
# to where it can get it again.** It keeps an *earlier* position of its source, taken before it took
# the item, and gives that in `mark()`:


# %%
class RepeatSamples(wp.Stage):
    """Give each sample several times in a row (functional name: ``repeat_samples``).

    Args:
        source: any pipe.
        times: how often.

    Checkpoint: how often the current sample was given. A resume reads that one sample again.
    """

    @dataclass
    class At:
        given: int = 0

    order_options = ("times",)  # a state is refused where these differ

    def __init__(self, source, times):
        super().__init__(source)
        if times < 1:
            raise ValueError(f"times must be at least 1, not {times}")
        self.times = times
        self._before = None  # while running, the position of the source before the sample in hand

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
# ## One that holds nothing
#
# Most stages are simpler: when they yield, all that they have taken is given. Then there is no
# `mark` to write. Say so with `holds_nothing = True`, of which a `PipeLoader` makes use when it
# deals an epoch again. Here is one that packs texts into pieces of at least so many characters: an
# item is given as soon as it is full.


# %%
class PackTexts(wp.Stage):
    """Join texts until they have so many characters (functional name: ``pack_texts``). What is left at the end of an epoch is given too.

    Checkpoint: nothing of its own: what was given is all that was taken. A resume reads nothing again.
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
# ## Chance
#
# Draw from a function of the seed, the epoch and the place, never from a generator that goes on
# from where it was: its state would be lost. `self.lane.key()` is such a number.


# %%
class DropSome(wp.Stage):
    """Leave samples out at random (functional name: ``drop_some``). Checkpoint: how many came."""

    @dataclass
    class At:
        number: int = 0
        filtered: int = 0  # of this name, it is in pipe.counts()

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
# A registered stage works in a `PipeLoader`, and each lane has a position of its own. Put the class
# into a module that the workers can import, not into a notebook, if workers are not forked (on
# macOS and Windows, and everywhere from Python 3.14).

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
# A list to go through:
#
# - Options that decide what comes, or in which order, are in `order_options`: then a state of other
#   options is refused.
# - The position has numbers and strings only. A position that grows with the data is a mistake.
# - The docstring says what is saved, and how much a resume reads again.
# - `check_resume` is in your tests, with an empty shard (`make_shards(samples=[3, 0, 2])`) and a
#   shuffle buffer before and behind.

# %%
uneven = make_shards("uneven", shards=3, samples=[3, 0, 2])
epochs = check_resume(lambda: samples(uneven).shuffle_buffer(2).repeat_samples(3).shuffle_buffer(2))
assert len(epochs[0]) == 15

# %% [markdown]
# ## What to read next
#
# - The head of `wds_pipes/core/stage.py`: the rules in full. The stages of the package are short to
#   read; `stages/shuffle_buffer.py` is one that goes back.
# - `08_torchdata_graphs`: `check_resume` of other graphs.
