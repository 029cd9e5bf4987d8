"""A web server that lies: about lengths, ranges and ends, in each way that a request can be told
to get.
"""

import contextlib
import itertools
import re
import socketserver
import threading
from typing import NamedTuple

FRAMINGS = ("right", "sent", "long", "close", "1.0", "chunked", "unended")
ENDS = ("whole", "inside", "boundary", "late", "silent", "drip")
RANGES = ("honoured", "unsized", "ignored", "shifted", "mislabelled", "short", "oversized", "undersized")
SHIFT = 1000  # bytes that a wrong range or size is off by
SHORT = 70_000  # bytes of a short answer
DRIP_SECONDS = 0.2


class Lie(NamedTuple):
    """How a shard is answered.

    Attributes:
        framing: how the length of a body is sent. ``right``: as promised; ``sent``: of what is
            really sent; ``long``: too many; ``close``, ``1.0``: not at all, by HTTP/1.1 or 1.0;
            ``chunked``: with an end mark; ``unended``: without one.
        end: ``whole``; cut ``inside`` a member or at a ``boundary`` of two samples; ``late``: with
            bytes after it; ``silent``: nothing after the cut, and the connection stays open;
            ``drip``: after the cut a byte now and then.
        ranges: ``honoured``; ``unsized``: without the size of the object; ``ignored``; ``shifted``,
            and the response says so; ``mislabelled``: shifted, and it does not say so; ``short``:
            fewer bytes than requested; ``oversized`` or ``undersized``: with a wrong size of the
            object.
        once: only the first response is a lie.
    """

    framing: str
    end: str
    ranges: str
    once: bool = False


class LyingServer(socketserver.ThreadingTCPServer):
    """Answers ``/NUMBER/x.tar`` with ``data`` by the lie of that number.

    Args:
        data: the shard.
        inside: where it is cut inside a member.
        boundary: where it is cut between two samples.
    """

    daemon_threads, allow_reuse_address, request_queue_size = True, True, 1024

    def __init__(self, data, *, inside, boundary):
        super().__init__(("127.0.0.1", 0), _Connection)
        self.data, self.cuts = data, {"inside": inside, "boundary": boundary, "silent": inside, "drip": inside}
        self.lies, self.asked, self._lock = {}, {}, threading.Lock()

    def __enter__(self):
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    def url(self, lie):
        """A URL that is answered by this lie."""
        with self._lock:
            number = len(self.lies)
            self.lies[number] = lie
            self.asked[number] = 0
        return f"http://127.0.0.1:{self.server_address[1]}/{number}/x.tar"

    def lie(self, number):
        """That of the next answer."""
        with self._lock:
            self.asked[number] += 1
            lie = self.lies[number]
            return Lie("right", "whole", "honoured") if lie.once and self.asked[number] > 1 else lie

    def handle_error(self, request, client_address):
        pass


class _Connection(socketserver.StreamRequestHandler):
    def handle(self):
        with contextlib.suppress(OSError):
            while self._answer():
                pass

    def _answer(self):
        """Answer a request; whether the connection stays open."""
        lines = list(itertools.takewhile(bytes.strip, iter(self.rfile.readline, b"")))
        if not lines:
            return False
        path = lines[0].split()[1].decode()
        lie = self.server.lie(int(path.split("/")[1]))
        wanted = re.search(rb"(?i)range: bytes=(\d+)-(\d*)", b"".join(lines))
        status, headers, start, body = self._body(lie, int(wanted[1]), int(wanted[2]) + 1 if wanted[2] else None)
        sent, rest = self._sent(lie, start, body)
        length = {"right": len(body), "sent": len(sent), "long": len(body) + SHIFT}.get(lie.framing)
        if length is not None:
            headers.append(f"Content-Length: {length}")
        chunked = lie.framing in ("chunked", "unended")
        if chunked:
            headers.append("Transfer-Encoding: chunked")
        keep = chunked or lie.framing in ("right", "sent")
        headers += [] if keep else ["Connection: close"]
        version = "1.0" if lie.framing == "1.0" else "1.1"
        self.wfile.write("\r\n".join((f"HTTP/{version} {status} Lie", *headers, "", "")).encode())
        self._write(sent, chunked=chunked)
        if lie.end == "silent" and rest:
            self.rfile.read()  # until the client has enough
        elif lie.end == "drip":
            for byte in rest:
                threading.Event().wait(DRIP_SECONDS)
                self._write(bytes([byte]), chunked=chunked)
        elif rest or lie.end == "late":
            keep = keep and lie.framing == "sent"
        if lie.framing == "chunked":
            self.wfile.write(b"0\r\n\r\n")
        return keep and lie.framing != "unended"

    def _body(self, lie, start, stop):
        """Status, headers, the first byte and the body that is promised."""
        data = self.server.data
        size = len(data) + {"oversized": SHIFT, "undersized": self.server.cuts["boundary"] - len(data)}.get(
            lie.ranges, 0
        )
        if lie.ranges == "ignored":
            return 200, [], 0, data
        total = "*" if lie.ranges == "unsized" else size
        if start >= len(data):
            return 416, [f"Content-Range: bytes */{total}"], start, b""
        stop = min(stop or size, size, *([start + SHORT] if lie.ranges == "short" else []))
        shift = SHIFT if lie.ranges in ("shifted", "mislabelled") and start else 0
        told = start + SHIFT if lie.ranges == "shifted" else start
        return (
            206,
            [f"Content-Range: bytes {told}-{max(start, stop) - 1}/{total}"],
            start,
            data[start + shift : stop + shift],
        )

    def _sent(self, lie, start, body):
        """What of a body is sent, and what is held back."""
        if lie.end == "late" and start + len(body) == len(self.server.data):
            return body + b"x" * SHIFT, b""
        cut = max(0, self.server.cuts.get(lie.end, start + len(body)) - start)
        return body[:cut], body[cut:]

    def _write(self, data, *, chunked):
        for place in range(0, len(data), 1 << 16):
            piece = data[place : place + (1 << 16)]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
