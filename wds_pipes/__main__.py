"""``python -m wds_pipes`` is ``wds-pipes``."""

from wds_pipes.cli import main

main()
