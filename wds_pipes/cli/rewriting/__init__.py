"""The commands that rewrite shards one by one: filter, map, dedup, join, repair. Each shard becomes
one of the same name in another directory.

- ``commands``: what the command line is. ``spine``: what the commands have in common.
- ``functions``: functions named ``module:function``.
- ``filtering``, ``mapping``, ``repeats`` (dedup), ``joining``, ``repairing``: one command each.
- ``pieces``: which files of a damaged shard are whole samples, for ``repair``.
"""
