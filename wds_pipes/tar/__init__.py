"""Reading and writing tar shards, without torch."""

from wds_pipes.tar.index_formats import ShardFacts
from wds_pipes.tar.indexing import index_shards
from wds_pipes.tar.keys import split_key
from wds_pipes.tar.members import TarMember
from wds_pipes.tar.reader import TarReader
from wds_pipes.tar.shard_writer import ShardWriter
from wds_pipes.tar.writer import TarWriter

__all__ = ["ShardFacts", "ShardWriter", "TarMember", "TarReader", "TarWriter", "index_shards", "split_key"]
