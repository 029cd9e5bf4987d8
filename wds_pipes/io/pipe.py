"""The output of a command, which a ``pipe:`` URL names."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
from typing import Any

from wds_pipes.io.urls import redact

_PATIENCE = 2.0  # seconds for a command to end after SIGTERM, when its output was closed


class CommandOutput(io.RawIOBase):
    """The standard output of a shell command, as a stream that is not seekable.

    If the command fails, reading its end raises OSError.

    Args:
        url: ``pipe:`` followed by the command.
    """

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(
            url.removeprefix("pipe:"), shell=True, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self._name = redact(url).removeprefix("pipe:").strip()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        assert self._process.stdout is not None
        count = self._process.stdout.readinto(buffer)  # type: ignore[attr-defined]
        if not count and self._process.wait():
            raise OSError(f"the command {self._name} ended with status {self._process.returncode}")
        return int(count)

    def close(self) -> None:
        if not self.closed:
            assert self._process.stdout is not None
            self._process.stdout.close()
            if self._process.poll() is None:  # end it and every process that it started
                for sent in (signal.SIGTERM, signal.SIGKILL):
                    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                        os.killpg(self._process.pid, sent)
                        self._process.wait(_PATIENCE)
                        break
            self._process.wait()
        super().close()
