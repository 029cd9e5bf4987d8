"""What an adapter can do; a subclass replaces what its library has a way for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

from peers.data import Data
from peers.pictures import BATCH, decode_fields, stack_tensors

BUFFER = 1000  # samples of a shuffle buffer, where a library shuffles with one


TORCH_HAS_NONE = "torch's DataLoader has no threads"
LACKING = {  # why a row has no figure, by the method that its adapter does not have
    "raw": "it reads no single samples",
    "shuffled": "it does not shuffle",
    "decoded": "it does not decode",
    "access": "it reads in order only",
    "resumable": "it keeps no position",
}


class Adapter:
    """How one row does what is measured.

    The fields of a sample are bytes in every row, and a batch holds 64 decoded images with their
    labels. A method that is not replaced is not called; LACKING says why its row has no figure.

    Args:
        data: the shards.
        work: the row's own directory, with what ``prepare`` wrote.
    """

    imports: ClassVar[tuple[str, ...]] = ()  # modules that are imported before the clock starts
    no_threads = no_workers = ""  # why ``decoded`` has no threads, or no worker processes

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
        raise NotImplementedError

    def shuffled(self, kind: str) -> Iterable[Any]:
        """Samples shuffled in the library's own way, with fields as bytes, in one process."""
        raise NotImplementedError

    def decoded(self, workers: int, threads: int) -> Iterable[Any]:
        """Batches of decoded images: in this process, with worker processes, or with threads."""
        raise NotImplementedError

    def access(self, kind: str) -> Callable[[int], Any]:
        """A function that returns sample i, with fields as bytes."""
        raise NotImplementedError

    def resumable(self, state: Any) -> tuple[Iterator[Sequence[Any]], Callable[[], Any]]:
        """Batches of 64 names of images, shuffled where the library can, in one process; and a
        function that returns the state after the batch that was returned last.

        Args:
            state: where to continue; None: at the beginning.
        """
        raise NotImplementedError


class OfSamples(Adapter):
    """A library whose samples come from one object, shuffled or not."""

    def _samples(self, kind: str, *, shuffle: bool = False) -> Any:
        raise NotImplementedError

    def raw(self, kind: str) -> Iterable[Any]:
        return self._samples(kind)

    def shuffled(self, kind: str) -> Iterable[Any]:
        return self._samples(kind, shuffle=True)


def resumed(loader: Any, state: Any) -> Any:
    """``loader``, with a state loaded if there is one."""
    if state is not None:
        loader.load_state_dict(state)
    return loader


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


def torch_batches(dataset: Any, workers: int) -> Iterable[Any]:
    """Batches from torch's DataLoader, of a dataset of ``decode_fields``."""
    from torch.utils.data import DataLoader

    return DataLoader(dataset, BATCH, num_workers=workers, collate_fn=stack_tensors)
