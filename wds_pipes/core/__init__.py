"""Chains of stages and their positions: pure Python, without torch, files or threads.

- ``stage`` is the contract of a stage and makes its running copies, and ``chain`` answers what
  concerns a whole chain: it has the forms of a position, and a drawing of them. Bases:
  ``tolerant`` for stages that can meet bad data, ``reads_again`` for those that read items again at
  a resume, or make several items of one, ``Composite`` in ``chain`` for those that run chains,
  ``row_source`` for sources of one's own. ``stream`` iterates a chain.
- ``state`` reads saved states, ``graph`` has a step as they name it, ``recipe`` is what a state and
  a chain must have in common, ``moved`` decides whether the shards of a state are those of a
  pipeline, ``counts`` has the counts of samples, ``occurrences`` tells apart samples that come
  again in an epoch, and ``lane`` says which part of an epoch a chain yields, with its ranges of
  shards.
- ``order`` has all random functions, ``digest`` the digest of a set of samples. ``hosts`` knows the
  frameworks that pipelines are written in. ``options`` and ``words`` serve messages, and
  ``importing`` the import of optional packages.
"""
