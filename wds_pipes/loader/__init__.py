"""PipeLoader, its lanes and its processes, and the code about processes that other hosts share.

- ``pipe_loader``: the class PipeLoader. ``progress``: what it and its iterators share;
  ``iterator``: one iteration; ``restoring``: where it continues from a state.
- ``plan``: how epochs are divided, and the place that a loader has reached; ``partition``: which
  lane reads what, also of the rest of an epoch on another number of lanes, either ranges of shards
  (``ranges``) or a slice of one order of all samples (``slices``); ``segments``: runs a lane;
  ``other_lanes``: how ``check_resume`` tries that; ``joining``: one batch from several lanes.
- ``workers``: starts and ends the processes, and says what each does next; ``worker``: the code
  that runs in a worker; ``protocol``: what both sides send; ``hand_off``: how batches cross;
  ``parent``: ties workers to their main process; ``interrupts``: postpones signals.
- ``on_device``: decodes the images of a batch in the main process.
- ``lengths``: the number of items of an epoch; ``stats``: where the time goes.
- ``merging``: makes one state from the states of all ranks. ``checkpoint_files``, ``choosing``,
  ``gathering`` and ``other_ranks``: used by ``wds_pipes.checkpoint``.
- ``sample_order``: the sampler for map-style datasets.
- ``ranks``: finds the rank of this process; ``comparing``: whether all ranks begin the same
  iteration. ``torchdata_loader``: a mend of torchdata's Loader.
"""
