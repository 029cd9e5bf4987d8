"""Bytecode is kept, as in ``.ci/run``, also where Python is told to keep none: the tests start
hundreds of processes, each of which would compile the package. Imported before all that is.
"""

import os
import sys

sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
