"""What an adapter can do; a subclass replaces what its library has a way for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn

from peers.data import Data
from peers.pictures import BATCH, decode_fields, stack_tensors

BUFFER = 1000  # samples of a shuffle buffer, where a library shuffles with one


LACKING = {  # why a row has no figure, by the method that its adapter does not have
    "raw": "it reads no single samples",
    "shuffled": "it does not shuffle",
    "decoded": "it does not decode",
    "access": "it reads in order only",
    "resumable": "it keeps no position",
}


class LacksError(Exception):
    """This row has no figure for a measurement; the message says why."""


def lacks(reason: str) -> NoReturn:
    """Raise LacksError."""
    raise LacksError(reason)


class Adapter:
    """How one row does what is measured.

    The fields of a sample are bytes in every row, and a batch holds 64 decoded images with their
    labels. A method raises LacksError where the library has no way, with the reason.

    Args:
        data: the shards.
        work: the row's own directory, with what ``prepare`` wrote.
    """

    imports: ClassVar[tuple[str, ...]] = ()  # modules that are imported before the clock starts

    def __init__(self, data: Data, work: str) -> None:
        self.data, self.work = data, work

    @classmethod
    def load(cls) -> None:
        """Import the libraries."""
        for library in cls.imports:
            importlib.import_module(library)

    def prepare(self) -> None:
        """Convert the data to the library's own format, once."""

    def raw(self, kind: str) -> Iterable[Any]:
        """Samples in order, with fields as bytes, in one process."""
        lacks(LACKING["raw"])

    def shuffled(self, kind: str) -> Iterable[Any]:
        """Samples shuffled in the library's own way, with fields as bytes, in one process."""
        lacks(LACKING["shuffled"])

    def decoded(self, workers: int, threads: int) -> Iterable[Any]:
        """Batches of decoded images: in this process, with worker processes, or with threads."""
        lacks(LACKING["decoded"])

    def access(self, kind: str) -> Callable[[int], Any]:
        """A function that returns sample i, with fields as bytes."""
        lacks(LACKING["access"])

    def resumable(self, state: Any) -> tuple[Iterator[Sequence[Any]], Callable[[], Any]]:
        """Batches of 64 names of images, shuffled where the library can, in one process; and a
        function that returns the state after the batch that was returned last.

        Args:
            state: where to continue; None: at the beginning.
        """
        lacks(LACKING["resumable"])


def adapter_of(path: str) -> type[Adapter]:
    """Import the adapter ``module:class``."""
    module, _, name = path.partition(":")
    found: type[Adapter] = getattr(importlib.import_module(f"peers.adapters.{module}"), name)
    return found


class FilesDataset:
    """A map-style dataset for torch's DataLoader: ``read(i)`` returns the fields of sample i."""

    def __init__(self, count: int, read: Callable[[int], Any]) -> None:
        self.count, self.read = count, read

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> Any:
        return decode_fields(self.read(number))


def torch_batches(dataset: Any, workers: int, threads: int) -> Iterable[Any]:
    """Batches from torch's DataLoader, of a dataset of ``decode_fields``."""
    from torch.utils.data import DataLoader

    if threads:
        lacks("torch's DataLoader has no threads")
    return DataLoader(dataset, BATCH, num_workers=workers, collate_fn=stack_tensors)
