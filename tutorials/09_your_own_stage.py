# %% [markdown]
# # Writing your own stage
#
# **You learn** when you need your own stage, how to write it in a few lines so that it resumes
# exactly, and how `check_resume` finds a stage that does not.
#
# **You need** `pip install wds_pipes`

# %%
import os
import sqlite3
import tempfile
from collections import deque
from contextlib import closing
from dataclasses import dataclass
from itertools import islice

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
# `fn(sample, rng)` may draw random numbers, `filter_samples(fn)`, or torch's `.map(fn)`. The
# generator costs about 10 us a sample. `seed_all=True`, for functions that draw from the global
# generators, costs 20 to 40 us.
#
# If it makes several items of one sample, or depends on **more than one sample**, a generator
# function is enough: `then(fn)`. `fn(samples)` takes as many samples as it needs, yields what it
# makes of them, and returns. Then it is called again on the samples that follow.


# %%
def crops(samples):
    """Two parts of each text: each call has at least one sample."""
    text = next(samples)["txt"]
    yield text[:8]
    yield text[-8:]


def sorted_by_length(samples):
    """Chunks of four samples, each sorted."""
    yield from sorted(islice(samples, 4), key=lambda sample: len(sample["txt"]))


check_resume(lambda: samples().then(crops))
check_resume(lambda: samples().shuffle_buffer(3).then(sorted_by_length, keeps_count=True))

# %% [markdown]
# Often a function sees that it is done only when it has taken one sample too many. It can put back
# the last samples that it took: the next call gets them.


# %%
def packs(samples, characters=60):
    """As many texts as there is room for."""
    pack, length = [], 0
    for sample in samples:
        length += len(sample["txt"])
        if pack and length > characters:
            samples.put_back(sample)
            break
        pack.append(sample["txt"])
    yield pack


def windows(samples, size=3):
    """Each sample with the two after it."""
    window = list(islice(samples, size))
    if len(window) == size:
        yield [sample["txt"] for sample in window]
        samples.put_back(*window[1:])


print([len(pack) for pack in samples().then(packs)])
check_resume(lambda: samples().then(packs))
check_resume(lambda: samples().then(windows))

# %% [markdown]
# A state says where the current call began, and how often it has yielded. A resume calls the
# function there again, and drops what that call had already yielded. So the function may remember
# samples in one call, but nothing from one call to the next, and it must return after some
# samples. A loop over all samples, such as `for sample in samples:` without an end, resumes exactly
# too, but a resume reads all samples again. Write `for sample in islice(samples, 1000):`.
#
# You need a stage if it must remember what cannot be read again in one call: how many samples there
# were, the keys of the last ones that have long been yielded, or random numbers.
#
# ## The contract
#
# A stage is a class with three parts:
#
# - `__init__` takes the source and the options, and checks them.
# - `At`, a dataclass, is the **position**: numbers and strings, whose defaults are the beginning.
#   It never contains data. With `slots=True`, a misspelt field is an error at once. A field keeps
#   the type of its default: one that begins at `0` is a count, never negative; write `0.0` for any
#   other number.
# - `run` is a generator over `self.source.items`. Whenever it yields, `self.at` and the position of
#   the source must contain everything that is needed to continue.
#
# The package does the rest: state, epochs, workers and pickling. `order_options` names the options
# that decide which items come. (If you use a type checker, derive from `wp.Stage[Any]` and write
# `source: wp.Stage[Any]` into the class.) Here is a stage that yields each sample `times` times:


# %%
class RepeatEach(wp.Stage):
    """Yield each sample several times in a row (functional name: ``repeat_each``).

    Args:
        source: any pipe.
        times: how often to yield it.

    Checkpoint: how often the current sample was yielded. A resume reads that one sample again.
    """

    @dataclass(slots=True)
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


wp.register_stage(RepeatEach)
print([sample["__key__"] for sample in samples().repeat_each(2)][:6])

# %% [markdown]
# The stage works, and the class `RepeatEach` is now the method `repeat_each` of every pipe
# (`MyStage` would be `my_stage`). But does it resume exactly?

# %%
try:
    check_resume(lambda: samples().repeat_each(2))
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
# item, as `self.earlier`, which is saved instead of the current one:


# %%
class RepeatSamples(wp.Stage):
    """Yield each sample several times in a row (functional name: ``repeat_samples``).

    Args:
        source: any pipe.
        times: how often to yield it.

    Checkpoint: how often the current sample was yielded. A resume reads that one sample again.
    """

    @dataclass(slots=True)
    class At:
        given: int = 0

    order_options = ("times",)  # a state is refused if these differ
    scope = "window"  # an item depends on its neighbours at most: see the end

    def __init__(self, source, times):
        super().__init__(source)
        if times < 1:
            raise ValueError(f"times must be at least 1, not {times}")
        self.times = times

    def run(self):
        source, at = self.source, self.at
        self.earlier = source.mark()
        for sample in source.items:
            while at.given < self.times:
                at.given += 1
                yield sample
            at.given, self.earlier = 0, source.mark()


wp.register_stage(RepeatSamples)
epochs = check_resume(lambda: samples().repeat_samples(2))
print("exact at every cut of", len(epochs[0]), "items; and of what was resumed there, cut again")

# %% [markdown]
# If each output depends on one sample alone, `wp.FlatMap` does all of this: `RepeatSamples` would be
# a `FlatMap` with `expand(self, item)` that returns `[item] * self.times`. Use it wherever you can. It
# also sees what `RepeatSamples` does not: that a step before, with `on_error="skip"`, skips other data
# when they are read again, so that `given` would be that of another sample. It refuses such a state.
#
# ## A stage that remembers several samples
#
# A `FlatMap` may remember the last samples. Here is one that leaves out a sample whose key was among
# those of the last `window` samples. `__init__` makes what it remembers, a list, dict, set or deque,
# and sets `self.lookback`: from how many samples before the current one all of this follows. The keys
# are data, so no position has them. A resume begins with an empty deque, reads the last samples again,
# at most twice `lookback`, and calls `expand` on them only to fill it.
#
# This works because the window follows from the last `window` samples that were **read**. If it
# held the last keys that were *yielded*, no bounded number of samples would be enough to fill it.
# Near-duplicates are left out in the same way, with fingerprints in the place of keys.
#
# Each lane has a window of its own, so a repeat in another lane is not noticed.


# %%
class DropRepeats(wp.FlatMap):
    """Leave out samples whose key was among the last ones (functional name: ``drop_repeats``).

    Args:
        source: a pipe of dict samples.
        window: how many samples are remembered.

    Checkpoint: a few numbers, and an earlier position of the source. A resume reads at most
    ``2 * window`` samples again.
    """

    order_options = ("window",)

    def __init__(self, source, window):
        super().__init__(source)
        self.window = self.lookback = window
        self.keys = deque(maxlen=window)

    def expand(self, sample):
        repeated = sample["__key__"] in self.keys
        self.keys.append(sample["__key__"])
        return [] if repeated else [sample]  # a sample of which nothing is made counts as filtered


wp.register_stage(DropRepeats)
twice = urls + urls  # every key comes again, 12 samples later, and nearer where the order is shuffled
pipe = samples(twice).shuffle_buffer(4).drop_repeats(8)
print(len(list(pipe)), pipe.counts())
assert pipe.counts()["filtered"] > 0
check_resume(lambda: samples(twice).shuffle_buffer(4).drop_repeats(8).shuffle_buffer(3))

# %% [markdown]
# ## A stage that holds nothing
#
# Most stages are simpler: when they yield, they have passed on everything that they have read. Then
# they need no `earlier`. Declare this with `scope = "item"`; `PipeLoader` uses it when it
# repartitions an epoch. Here is a stage that joins texts until they have at least a given number of
# characters, and yields the result at once.


# %%
class PackTexts(wp.Stage):
    """Join texts until they have at least this many characters (functional name: ``pack_texts``).

    The last text of an epoch may be shorter.

    Checkpoint: nothing of its own, because everything that was read was yielded. A resume reads
    nothing again.
    """

    scope = "item"

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
# to seed a new generator with. Python's `hash()` of a text is random too, another one in each
# process, which `check_resume` cannot see: use `zlib.crc32` or `hashlib`.


# %%
class DropSome(wp.Stage):
    """Leave samples out at random (functional name: ``drop_some``). Checkpoint: how many samples were read."""

    @dataclass(slots=True)
    class At:
        number: int = 0
        filtered: int = 0

    tallies = ("filtered",)
    order_options = ("share",)
    scope = "item"
    counts_items = True  # the random numbers depend on `number`

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
# ## A source of your own
#
# Data that are not in shards, such as the rows of a table, need a first stage. `wp.RowSource` does
# all but two things: you count the rows, and read a range of them. `register_stage` returns the class
# of its pipes. `read` is called very often, so it must find its first row quickly, here by SQLite's
# rowid: `LIMIT ? OFFSET ?` would walk over all rows before it, each time. If the numbers have gaps, see
# `help(wp.RowSource)`. Connections are opened in `read`, which runs in the workers, not in `__init__`.
# `order_options` names what decides which rows there are: a state is refused if the name of the table
# differs, or the number of rows.


# %%
class Rows(wp.RowSource):
    """The rows of an SQLite table, whose rowids are 1, 2, 3 and so on."""

    order_options = ("table",)

    def __init__(self, path, table, *, seed=0):
        self.path, self.table = path, table
        with closing(sqlite3.connect(path)) as connection:
            [(count,)] = connection.execute(f"SELECT count(*) FROM {table}")
        super().__init__(count, seed=seed)

    def read(self, start, stop):
        query = f"SELECT key, txt FROM {self.table} WHERE rowid BETWEEN ? AND ? ORDER BY rowid"
        with closing(sqlite3.connect(self.path)) as connection:
            for key, text in connection.execute(query, (start + 1, stop)):
                yield {"__key__": key, "txt": text}


with closing(sqlite3.connect("texts.sqlite")) as table, table:
    table.execute("CREATE TABLE texts (key TEXT, txt TEXT)")
    table.executemany("INSERT INTO texts VALUES (?, ?)", [(f"{n:03d}", f"text {n}") for n in range(20)])
rows = wp.register_stage(Rows)
check_resume(lambda: rows("texts.sqlite", "texts").shuffle_buffer(4).batch_samples(3))
print(len(wp.PipeLoader(rows("texts.sqlite", "texts"), batch_size=4, lanes=2)), "batches")

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
# ## What a stage says of itself
#
# Attributes of the class tell the package what it cannot see. If you leave out the first two, nothing
# is wrong, but less is possible.
#
# - `keeps_count = True`: the stage yields as many samples as it takes. Then `len()` stays known, and
#   all ranks get equally many batches. `check_resume` counts.
# - `scope`: what an item may depend on. `"lane"`, if you say nothing: on all items that the lane has
#   had, as in `take_samples`; then no lane is divided on other numbers of ranks and workers.
#   `"window"`, as in `RepeatSamples` and `DropRepeats`: on items shortly before or after; PipeLoader
#   divides what is left of the lane, and each part begins with an empty window. So on other numbers of
#   ranks and workers `DropRepeats` lets some repeats through; with `"lane"` it would not.
#   `check_resume` cannot tell these two apart: a running mean needs `"lane"`. `"item"`, as in
#   `PackTexts` and `DropSome`: on one item alone, or on neighbours that it takes together. When the
#   stage yields, it remembers no sample, and it sets no `earlier`. Then, over a `SampleList`, each
#   training step has the same samples on any number of ranks, and after `batch_samples` PipeLoader
#   fills batches across the segments of a lane.
#
# One more you must set if the scope is an item:
#
# - `counts_items = True`: the position or the random numbers count the items of the source, as in
#   `DropSome`. Then a state is refused if the items were different ones, because a `batch_samples`
#   before the stage had another size.
#
# Checklist:
#
# - `order_options` names all options that decide which items come, or in which order: a state with
#   other values of these options is refused. It is `()` if none does; `check_resume` wants one or
#   the other.
# - The position contains only numbers and strings, and does not grow with the data: `check_resume`
#   finds most data in it.
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
