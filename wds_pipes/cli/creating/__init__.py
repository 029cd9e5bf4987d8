"""What ``wds-pipes create`` reads, and how it divides samples into shards.

- ``files``: samples of a directory, ``names``: by the names of their files. ``tables``: samples of
  lists and tables, ``labels``: the numbers of their labels.
- ``records``: samples that are to be written; ``encoding``: images that are encoded again;
  ``plan``: the division into shards.
"""
