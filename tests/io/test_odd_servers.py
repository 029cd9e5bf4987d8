"""Web servers that tell less than they should: without ranges, without sizes, without lengths."""

import contextlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import wds_pipes as wp
from wds_pipes.testing import make_shards


class Answers(BaseHTTPRequestHandler):
    """Gives ``data`` as ``kind`` says."""

    data = b""
    kind = ""

    def log_message(self, *args):
        pass

    def do_GET(self):
        data, parts = self.data, re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"])
        start, stop = int(parts[1]), min(len(data), int(parts[2]) + 1 if parts[2] else len(data))
        headers = {"Connection": "close"}
        if self.kind == "sizes are unknown" and start >= len(data):
            status, data = 416, b""
        elif self.kind == "sizes are unknown":
            status, data = 206, data[start:stop]
            headers |= {"Content-Range": f"bytes {start}-{stop - 1}/*", "Content-Length": str(len(data))}
        else:
            status = 200
            headers |= {"Content-Length": str(len(data))} if self.kind == "no ranges" else {}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(data)


@pytest.fixture(params=["sizes are unknown", "no ranges", "no lengths"])
def url(request, tmp_path):
    [path] = make_shards(tmp_path, shards=1, samples=40, fields={"bin": lambda rng, _: rng.randbytes(70_000)})
    with open(path, "rb") as file:
        kind = type("Odd", (Answers,), {"data": file.read(), "kind": request.param})
    with ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/x.tar"
        server.shutdown()


@pytest.mark.parametrize("connections", [1, 4])
def test_all_is_read_once_and_a_resume_is_exact(url, connections):
    def make():
        return wp.ShardList(url).open_shards(connections=connections, readahead_bytes=1 << 20).load_tar().group_by_key()

    pipe = make()
    found = []
    for number, sample in enumerate(pipe):
        found.append(sample["__key__"])
        if number == 25:
            state = pipe.state_dict()
    assert found == [f"{number:08d}" for number in range(40)]
    again = make()
    again.load_state_dict(state)
    assert [sample["__key__"] for sample in again] == found[26:]
