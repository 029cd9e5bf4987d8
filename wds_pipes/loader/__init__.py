"""PipeLoader, its lanes and its processes, and the code about processes that other hosts share.

What happens at ``next(loader)`` is in four files: ``iterator`` (the position of a loader, the loop
that moves it, and one iteration), ``workers`` (the main process's side of the worker processes),
``worker`` (the code that runs in them: a lane, batch by batch) and ``transport`` (how batches
cross). A lane is a chain of steps, and ``segments`` is one of them. ``stats`` measures, and
``ledger`` sums up, what passes. A batch comes with a mark of where its lane stands; ``plan`` makes
JSON of marks when a state is requested. What the lanes read is decided before: which shards by the
source of the chain (``stages``), which lane reads them by ``ranges`` or ``slices``. ``core.stage``
is the contract of steps, and ``core.chain`` dumps and loads the positions of a chain.

- ``pipe_loader``: the class PipeLoader.
- ``plan``: how epochs are divided, and the place that a loader has reached; ``ranges`` and
  ``slices``: the two kinds of partitions, which say what each lane reads, also of the rest of an
  epoch on another number of lanes: either ranges of shards or a slice of one order of all samples;
  ``sticky``: ranks that have the same shards in all epochs; ``remainders``: how lanes share what is
  left of opened shards; ``partition``: what the two kinds share; ``segments``: runs a lane.
- ``restoring``: from the states of ranks to the place where a loader continues, also with edits.
- ``ledger``: the digest of the samples that a loader returned; ``ledger_file``: its file.
- ``lookup``: which samples a rank gets at a step, and when a sample comes, without reading.
- ``in_trainers``: a loader or a dataset in a trainer that takes it for something else.
- ``parent``: ties workers to their main process.
- ``on_device``: decodes the images of a batch in the main process.
- ``lengths``: the number of items of an epoch; ``stats``: where the time goes, on one
  rank and on all.
- ``checkpoint_files`` and ``checkpoint_ranks``: used by ``wds_pipes.checkpoint``; ``sharing``: what
  the states of all ranks share, stored once.
- ``sample_order``: the sampler for map-style datasets.
- ``meetings``: where ranks wait for each other, never for ever.
- ``ranks``: finds the rank of this process; whether all ranks begin the same iteration; values of
  all ranks.
"""
