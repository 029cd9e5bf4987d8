"""What ``wds-pipes create`` reads.

``records``: samples that are to be written, of files in directories, and images that are encoded
again. ``tables``: samples of lists and tables.
"""
