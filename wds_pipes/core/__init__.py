"""Chains of stages and their positions: pure Python, without torch, files or threads.

- ``stage`` is the contract of a stage, and ``chain`` answers what concerns a whole chain: it has
  the forms of a position, and a drawing of them. Bases: ``tolerant`` for stages that can meet bad
  data, ``reads_again`` for those that read items again at a resume, or make several items of one,
  ``Composite`` in ``chain`` for those that run chains, ``row_source`` for sources of one's own.
  ``running`` makes running copies of stages, and ``stream`` iterates a chain.
  ``given`` runs a single step over items.
- ``state`` reads saved states, ``recipe`` is what a state and a chain must have in common,
  ``moved`` decides whether the shards of a state are those of a pipeline, ``counts`` has the counts
  of samples, ``lane`` says which part of an epoch a chain yields, and ``shard_ranges`` has the
  ranges of shards in it.
- ``order`` has all random functions, ``digest`` the digest of a set of samples. ``hosts`` knows the
  frameworks that pipelines are written in. ``options``, ``words`` and ``suggest`` serve messages,
  ``importing`` the import of optional packages, and ``interrupts`` Ctrl-C in a command.
"""
