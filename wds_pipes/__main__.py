"""``wds-pipes``, also as ``python -m wds_pipes``."""

import signal

from wds_pipes.core.interrupts import end


def run() -> None:
    """Run a command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else a shell has it ignored
        signal.signal(signal.SIGINT, end)
    from wds_pipes.cli import main

    main()


if __name__ == "__main__":
    run()
