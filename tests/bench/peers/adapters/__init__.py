"""One class per row of the comparison: how a library does what is measured.

``base``: what a row can do. ``own``: this package; ``limits``: those of the machine; ``tars``,
``energon``, ``dali``: libraries that read tar shards; ``converted``: those with formats of their
own, and a directory of files.
"""
