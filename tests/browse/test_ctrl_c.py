"""Ctrl-C ends ``wds-pipes browse``."""

import contextlib
import http.client
import os
import signal
import subprocess
import sys

import pytest

from wds_pipes.testing import make_shards

pytest.importorskip("jinja2", reason="the pages are templates of jinja2")
pytest.importorskip("aiohttp", reason="the pages are served by aiohttp")


@pytest.mark.slow
def test_ctrl_c_does_not_wait_for_a_page(tmp_path):
    """Here of a shard whose bytes never come."""
    url = make_shards(tmp_path, shards=1, samples=2)[0]
    os.mkfifo(tmp_path / "never.tar")
    command = [sys.executable, "-m", "wds_pipes", "browse", url, tmp_path / "never.tar"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        _, _, host, *path = process.stdout.readline().split()[0].split("/")
        with (
            contextlib.closing(http.client.HTTPConnection(host)) as slow,
            contextlib.closing(http.client.HTTPConnection(host)) as other,
        ):
            slow.request("GET", f"/{path[0]}/shard-1-1.html")
            other.request("GET", f"/{path[0]}/browse.css")
            assert other.getresponse().read()
            process.send_signal(signal.SIGINT)
            try:
                assert process.wait(60) == 130
            finally:
                process.kill()
