"""Reading and writing tar shards, without torch."""

# The modules:
# - ``reader``: the members of a stream, ``members``, from its ``source``; ``headers`` and
#   ``header_block``: parse headers; ``ends``: the end of a tar; ``recovery``: what damage is.
# - ``keys``: a member's name as key and field; ``samples``: one sample from its bytes.
# - ``index``, ``index_formats``: read indexes of counts; ``indexing``, ``index_file``,
#   ``scanning``, ``dali``: make indexes.
# - ``offsets``: the index of offsets of a shard; ``shard_offsets``: those of a list of shards;
#   ``located``: where their samples are.
# - ``views``: selected samples; ``sample_numbers``: their numbers.
# - ``writer``, ``shard_writer``, ``shard_file``: write shards; ``encoded``: samples as bytes;
#   ``digest``: their MD5.

from wds_pipes.tar.index_formats import ShardFacts
from wds_pipes.tar.indexing import index_shards
from wds_pipes.tar.keys import split_key
from wds_pipes.tar.members import TarMember
from wds_pipes.tar.reader import TarReader
from wds_pipes.tar.shard_writer import ShardWriter
from wds_pipes.tar.writer import TarWriter

__all__ = ["ShardFacts", "ShardWriter", "TarMember", "TarReader", "TarWriter", "index_shards", "split_key"]
