"""How much memory Python takes."""

import contextlib
import tracemalloc
from collections.abc import Iterator


@contextlib.contextmanager
def memory_below(size: int) -> Iterator[None]:
    """Python takes less than so many bytes in the block."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()
