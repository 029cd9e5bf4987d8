"""The commands that look at shards and states: ls, head, cat, get, verify, state.

- ``reading``: the samples of shards with their bytes, and samples by number or key.
- ``describing``: fields decoded, and in words.
- ``commands``: ls, head, cat, get. ``verify``, ``state``: the others.
"""
