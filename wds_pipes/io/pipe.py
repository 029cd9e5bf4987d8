"""The output of a command, as ``pipe:`` URLs name it."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
from typing import Any

from wds_pipes.io.urls import redact

_PATIENCE = 2.0  # seconds for a command to end by itself when its output is not wanted any more


class CommandOutput(io.RawIOBase):
    """What a shell command writes to its standard output, which cannot be sought; a command that fails is an OSError at the end.

    Args:
        url: ``pipe:`` and the command.
    """

    def __init__(self, url: str) -> None:
        self._process = subprocess.Popen(url.removeprefix("pipe:"), shell=True, stdout=subprocess.PIPE, bufsize=0, start_new_session=True)
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
            if self._process.poll() is None:  # with all that it started
                for sent in (signal.SIGTERM, signal.SIGKILL):
                    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                        os.killpg(self._process.pid, sent)
                        self._process.wait(_PATIENCE)
                        break
            self._process.wait()
        super().close()
