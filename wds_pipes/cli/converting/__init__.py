"""``wds-pipes convert``, ``export`` and ``download``: data sets of other formats, and copies.

- ``convert``: the command. ``source``: what a data set consists of, how it becomes shards, and the
  formats of Arrow. ``tfrecord``, ``lmdbs``: other formats. ``rows``: how a record becomes a sample.
- ``export``, ``download``: the commands.
"""
