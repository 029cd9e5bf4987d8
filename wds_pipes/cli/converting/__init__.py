"""``wds-pipes convert``, ``export`` and ``download``: data sets of other formats, and copies.

- ``convert``: the command. ``source``: what a data set consists of, and how it becomes shards.
  ``rows``: how a record becomes a sample.
- ``tfrecord``, ``lmdbs``, ``tables``: the formats. ``messages``: the protobuf messages in them.
- ``export``: the command. ``writing``: what its tasks write. ``imagefolder``: images by classes.
- ``download``: the command. ``copying``: its tasks.
"""
