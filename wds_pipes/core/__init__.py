"""What a chain of stages is and where it stands: pure Python, without torch, files or threads.

- ``stage`` is the contract of a stage, ``tolerant`` its form for bad data, ``running`` its copies that run, ``stream`` a chain that is iterated.
- ``state`` reads what was saved, ``moved`` tells whether its shards are those of a pipeline, ``counts`` what became of samples, ``lane`` which part is given.
- ``order`` has everything random. ``options``, ``words``, ``suggest`` and ``tracebacks`` serve messages; ``importing`` the import of the package.
"""
