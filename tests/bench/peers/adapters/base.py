"""What an adapter can do; a class has the methods that its library has a way for."""

import importlib
import os
from typing import ClassVar

from peers.data import KINDS
from peers.pictures import BATCH, decode_and_stack

BUFFER = 1000  # samples of a shuffle buffer, where a library shuffles with one
METHODS = {  # the method of each kind of measurement, and why a row without it has no figure
    "prepare": ("prepare", ""),
    "raw": ("samples", "it reads no single samples"),
    "shuffled": ("samples", "it does not shuffle"),
    "decoded": ("decoded", "it does not decode"),
    "access": ("access", "it reads in order only"),
    "save": ("resumable", "it keeps no position"),
    "resume": ("resumable", "it keeps no position"),
}
NO_SHUFFLE = {"shuffled tiny": METHODS["shuffled"][1]}
NO_THREADS = {"decoded threads": "it has no threads"}
TORCH_HAS_NONE = {"decoded threads": "torch's DataLoader has no threads"}
NO_WORKERS = {"decoded workers": "its workers are threads"}


class Adapter:
    """How one row does what is measured. The fields of a sample are bytes in every row, and a batch
    holds 64 decoded images with their labels.

    samples(kind, shuffle=False): an iterable of samples in order, or shuffled in the library's own
        way, in one process.
    decoded(workers, threads): an iterable of batches: in this process, with worker processes, or
        with threads.
    access(kind): a function that returns sample i.
    resumable(state): an iterator over batches of 64 names of images, shuffled where the library
        can, in one process; and a function that returns the state after the batch that was returned
        last. It continues from a state, or begins with None.

    Args:
        data: the shards.
        work: the row's own directory, with what ``prepare`` wrote.
    """

    imports = ()  # modules that are imported before the clock starts
    lacks: ClassVar = {}  # why there is no figure for some of the measurements whose method it has

    def __init__(self, data, work):
        self.data, self.work = data, work

    def prepare(self):
        """Convert the data to the library's own format, once."""


class Converted(Adapter):
    """A library with a directory or file for each kind of samples; ``write(kind)`` makes it."""

    def path(self, kind):
        return os.path.join(self.work, kind)

    def prepare(self):
        for kind in KINDS:
            self.write(kind)


def adapter_of(path):
    """Import the adapter ``module:class``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"peers.adapters.{module}"), name)


def lacking(kind, what):
    """Say why an adapter has no figure for a measurement; nothing if it has."""
    method, reason = METHODS[what.partition(" ")[0]]
    return kind.lacks.get(what, "") if hasattr(kind, method) else reason


def resumed(loader, state):
    """``loader``, with a state loaded if there is one."""
    if state is not None:
        loader.load_state_dict(state)
    return loader


def torch_batches(dataset, workers, collate=decode_and_stack):
    """Batches from torch's DataLoader."""
    from torch.utils.data import DataLoader

    return DataLoader(dataset, BATCH, num_workers=workers, collate_fn=collate)
