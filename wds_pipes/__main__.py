"""``python -m wds_pipes`` is ``wds-pipes``."""

from wds_pipes.cli import main

if __name__ == "__main__":
    main()
