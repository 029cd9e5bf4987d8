"""What several tests share."""

import io
import os
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem

from wds_pipes.testing import make_shards


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Shards that nobody here wrote; a checkout without them skips."""
    path = Path(os.environ.get("WDS_PIPES_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
    if not path.is_dir():
        pytest.skip("needs the shards of other projects: set WDS_PIPES_TEST_DATA to a directory with them")
    return path


@pytest.fixture(scope="session")
def urls(tmp_path_factory) -> list[str]:
    """Five small shards, one of them empty: 14 samples of txt, cls and json."""
    return make_shards(tmp_path_factory.mktemp("shards"), shards=5, samples=[3, 0, 5, 2, 4], fields=("txt", "cls", "json"))


class CountedFileSystem(LocalFileSystem):
    """Local files by ``counted://`` URLs; notes the offset and size of each read."""

    protocol = "counted"
    reads: ClassVar[list[tuple[int, int]]] = []
    cachable = False

    def _open(self, path, mode="rb", **options):
        return CountedFile(path)


class CountedFile(io.FileIO):
    def readinto(self, buffer):
        offset = self.tell()
        count = super().readinto(buffer)
        CountedFileSystem.reads.append((offset, count))
        return count


@pytest.fixture
def counted():
    """A list of the reads (offset, bytes) from files with ``counted://`` URLs."""
    fsspec.register_implementation("counted", CountedFileSystem, clobber=True)
    CountedFileSystem.reads.clear()
    return CountedFileSystem.reads
