"""The commands that look at shards and states: info, ls, head, cat, get, verify, state.

- ``options``: what the commands share: arguments, and errors as one line.
- ``reading``: the samples of shards with their bytes, and samples by number or key.
- ``describing``: fields decoded, and in words. ``summary``: what ``info`` reports.
- ``commands``: ls, head, cat, get. ``output``: what cat and get write.
- ``verify``: the command. ``checking``: one shard. ``findings``: all shards.
- ``state``: the commands. ``state_files``: the states in checkpoint files.
"""
