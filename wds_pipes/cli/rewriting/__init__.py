"""The commands that rewrite shards one by one: filter, map, dedup, join, repair. Each shard becomes
one of the same name in another directory.

- ``spine``: what the commands have in common.
- ``filtering``, ``mapping``, ``repeats`` (dedup), ``joining``, ``repairing``: one command each.
"""
