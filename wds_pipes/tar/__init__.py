"""Reading and writing tar shards, without torch."""

# The modules:
# - ``reader``: the members of a stream, what damage is, and where reading continues; ``headers``:
#   parse headers.
# - ``keys``: a member's name as key and field; ``grouping``: members to samples; ``samples``: one
#   sample from its bytes.
# - ``index``: an ``index.json``, the shards that it lists, and what it says of them; and the
#   indexes beside a shard. ``indexing``: makes indexes.
# - ``located``: where the samples of many shards are, and selected samples.
# - ``writer``: writes shards; ``encoded``: samples as bytes; ``stored``: samples that are stored
#   with these bytes already.

from wds_pipes.tar.index import ShardFacts
from wds_pipes.tar.indexing import index_shards
from wds_pipes.tar.keys import split_key
from wds_pipes.tar.reader import TarMember, TarReader
from wds_pipes.tar.writer import ShardWriter, TarWriter

__all__ = ["ShardFacts", "ShardWriter", "TarMember", "TarReader", "TarWriter", "index_shards", "split_key"]
