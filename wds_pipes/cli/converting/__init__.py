"""``wds-pipes convert``, ``export`` and ``download``: data sets of other formats, and copies.

- ``convert``: the command. ``source``: what a data set consists of, and how it becomes shards.
  ``rows``: how a record becomes a sample.
- ``tfrecord``, ``lmdbs``, ``tables``, ``mds``, ``litdata``: the formats. ``messages``: the protobuf
  messages in them. ``chunks``: what MDS and LitData have in common. ``litdata_types``: the types of
  values in LitData.
- ``export``: the command. ``writing``: what its tasks write. ``imagefolder``: images by classes.
- ``download``: the command. ``copying``: its tasks.
"""
