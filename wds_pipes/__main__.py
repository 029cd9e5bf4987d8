"""``wds-pipes``, also as ``python -m wds_pipes``."""

import os
import signal
import sys

from wds_pipes.tools.interrupts import end


def run() -> None:
    """Run a command."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # it is closed: the next file would get its number, and be printed to
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))
            os.set_inheritable(number, True)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell has it ignored
        signal.signal(signal.SIGINT, end)
    from wds_pipes.cli import main

    main()


if __name__ == "__main__":
    run()
