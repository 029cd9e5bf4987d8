"""Reading and writing tar shards, without torch."""

from wds_pipes.tar.keys import split_key
from wds_pipes.tar.reader import TarMember, TarReader
from wds_pipes.tar.writer import ShardWriter, TarWriter

__all__ = ["ShardWriter", "TarMember", "TarReader", "TarWriter", "split_key"]
