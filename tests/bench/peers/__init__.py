"""This package against other loaders and the limits of the machine: ``python tests/bench/peers``.

Rules:
- ``rows`` is the table of what is compared; ``adapters/`` has one class per row, with one method
  per kind of measurement. No figure and no row is written by hand.
- Each measurement is a process of its own (``measuring``), which ``running`` starts, watches and
  ends. It may run in another environment, where only the row's library, numpy, Pillow and
  simplejpeg are installed. So modules here import what they need inside functions, and those that
  a measurement needs import nothing of ``wds_pipes``.
- ``data`` makes the samples, ``pictures`` has the one function by which all rows decode.
- ``report`` writes the results as JSON, a table and a chart.
"""
