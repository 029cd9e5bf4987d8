"""What ``wds-pipes create`` reads.

``records``: samples that are to be written, of files in directories. ``tables``: samples of lists
and tables.
"""
