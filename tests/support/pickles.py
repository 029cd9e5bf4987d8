"""A pickle that shows that it was loaded."""

import os


class Creates:
    """Unpickling it creates a directory."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)
