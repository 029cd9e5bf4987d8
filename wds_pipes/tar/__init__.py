"""Reading and writing tar shards, without torch."""

# The modules:
# - ``reader``: the members of a stream, ``members``; ``headers``: parse headers; ``damage``: the
#   end of a tar, what damage is, and where reading continues.
# - ``keys``: a member's name as key and field; ``grouping``: members to samples; ``samples``: one
#   sample from its bytes.
# - ``index``: an ``index.json``; ``listing``: the shards that indexes list, and what they say of
#   shards; ``indexing``, ``scanning``: make indexes.
# - ``offsets``: the indexes beside a shard; ``located``: where the samples of many shards are;
#   ``views``: selected samples.
# - ``writer``, ``shard_writer``: write shards; ``encoded``: samples as bytes.

from wds_pipes.tar.index import ShardFacts
from wds_pipes.tar.indexing import index_shards
from wds_pipes.tar.keys import split_key
from wds_pipes.tar.members import TarMember
from wds_pipes.tar.reader import TarReader
from wds_pipes.tar.shard_writer import ShardWriter
from wds_pipes.tar.writer import TarWriter

__all__ = ["ShardFacts", "ShardWriter", "TarMember", "TarReader", "TarWriter", "index_shards", "split_key"]
