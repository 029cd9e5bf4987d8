"""The stages: each functional name is one file and one class.

Stages do not need torch. ``wds_pipes.datapipes`` and ``wds_pipes.nodes`` wrap them as torch's
DataPipes and torchdata's nodes.

What several stages share: ``check_count`` and ``check_choice`` (``core.options``) check options,
``read_count`` (``core.state``) reads a number of a state in ``describe``, ``check_sample`` and
``missing`` (``stages.fields``) refuse what is no dict sample, or lacks a field.

The other modules:

- ``shard_source``: the base of ShardList and SampleList, and what ShardList yields.
- ``fields``: fields by name, and samples in messages; ``collating``: a batch as columns;
  ``threaded``: functions in threads; ``windowed``: the base of PackSamples and BucketSamples.
- ``proportions``: the order of draws of Mix, and weights; ``edits``: what ``load_state_dict`` may
  change of a pipeline.
"""

from wds_pipes.stages.batch_samples import BatchSamples
from wds_pipes.stages.bucket_samples import BucketSamples
from wds_pipes.stages.cache_shards import CacheShards
from wds_pipes.stages.decode_by_ext import DecodeByExt
from wds_pipes.stages.explode_records import ExplodeRecords
from wds_pipes.stages.fetch_samples import FetchSamples
from wds_pipes.stages.filter_samples import FilterSamples
from wds_pipes.stages.group_by_key import GroupByKey
from wds_pipes.stages.interleave_shards import InterleaveShards
from wds_pipes.stages.join import Join
from wds_pipes.stages.load_tar import LoadTar
from wds_pipes.stages.map_fields import MapFields
from wds_pipes.stages.map_samples import MapSamples
from wds_pipes.stages.mix import Mix
from wds_pipes.stages.open_shards import OpenShards
from wds_pipes.stages.pack_samples import PackSamples
from wds_pipes.stages.rename_fields import RenameFields
from wds_pipes.stages.repeat import Repeat
from wds_pipes.stages.sample_list import SampleList
from wds_pipes.stages.select_fields import SelectFields
from wds_pipes.stages.shard_list import ShardList
from wds_pipes.stages.shuffle_buffer import ShuffleBuffer
from wds_pipes.stages.slice_samples import SliceSamples
from wds_pipes.stages.take_samples import TakeSamples
from wds_pipes.stages.then import Then
from wds_pipes.stages.to_tuple import ToTuple
from wds_pipes.stages.unbatch_samples import UnbatchSamples
from wds_pipes.stages.write_shards import WriteShards

__all__ = [
    "BatchSamples",
    "BucketSamples",
    "CacheShards",
    "DecodeByExt",
    "ExplodeRecords",
    "FetchSamples",
    "FilterSamples",
    "GroupByKey",
    "InterleaveShards",
    "Join",
    "LoadTar",
    "MapFields",
    "MapSamples",
    "Mix",
    "OpenShards",
    "PackSamples",
    "RenameFields",
    "Repeat",
    "SampleList",
    "SelectFields",
    "ShardList",
    "ShuffleBuffer",
    "SliceSamples",
    "TakeSamples",
    "Then",
    "ToTuple",
    "UnbatchSamples",
    "WriteShards",
]
