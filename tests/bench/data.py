"""Shards to measure with, as ``peers`` makes them: written once, into a directory
that is kept.
"""

import sys
from pathlib import Path

from peers.data import images, tiny

__all__ = ["images", "tiny"]

if __name__ == "__main__":
    where = Path(sys.argv[1])
    print(*tiny(where), *images(where), sep="\n")
