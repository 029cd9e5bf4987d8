"""A directory of files, as torchvision's ImageFolder reads it: a directory for each class."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from peers.adapters.base import FilesDataset, torch_batches
from peers.adapters.converted import ByNumber


class ImageFolder(ByNumber):
    """One file per sample; the class is the name of its directory."""

    imports = ("torch",)

    def write(self, kind: str) -> None:
        extension = "jpg" if kind == "images" else "txt"
        for key, fields in self.data.samples(kind):
            directory = os.path.join(self.path(kind), fields["cls"].decode())
            os.makedirs(directory, exist_ok=True)
            with open(os.path.join(directory, f"{key}.{extension}"), "wb") as file:
                file.write(fields[extension])

    def access(self, kind: str) -> Callable[[int], Any]:
        return FileReader(self.path(kind))

    def decoded(self, workers: int, threads: int) -> Iterable[Any]:
        return torch_batches(FilesDataset(self.data.count("images"), FileReader(self.path("images"))), workers)


class FileReader:
    """Reads the files below a directory, sorted by class and name."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.files = [
            (label, name)
            for label in sorted(os.listdir(directory))
            for name in sorted(os.listdir(f"{directory}/{label}"))
        ]

    def __call__(self, number: int) -> dict[str, Any]:
        label, name = self.files[number]
        with open(f"{self.directory}/{label}/{name}", "rb") as file:
            return {name.rpartition(".")[2]: file.read(), "cls": label}
