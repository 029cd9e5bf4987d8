"""PipeLoader, its lanes and its processes, and the code about processes that other hosts share.

- ``pipe_loader``: the class PipeLoader.
- ``plan``: how epochs are divided; ``partition``: which lane reads what; ``segments``: runs a
  lane; ``repartition``: the rest of an epoch on another number of lanes.
- ``progress``: what the loader and its iterators share; ``iterator``: one iteration;
  ``position``: the place that a loader has reached.
- ``workers``: starts and ends the processes; ``commands``: what each worker does next;
  ``worker``: the code that runs in a worker; ``protocol``: what both sides send.
- ``lengths``: the number of items of an epoch; ``stats``: where the time goes.
- ``merging``: makes one state from the states of all ranks.
- ``gathering`` and ``checkpoint_files``: used by ``wds_pipes.checkpoint``.
- ``sample_order``: the sampler for map-style datasets.
- ``ranks``: finds the rank of this process. ``callers``: which loader of torchdata calls.
- ``parent``: ties workers to their main process; ``interrupts``: postpones signals.
"""
