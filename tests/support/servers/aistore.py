"""An imitation of AIStore: a gateway, which redirects each request to a target on another port, and
GetBatch by its documented interface. It can also fail, and lie, in the ways of ``FAULTS``.
"""

import contextlib
import json
import tarfile
import threading
import time
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

STATUSES = (400, 401, 404, 405, 429, 500, 501, 503)  # of the gateway
FAULTS = (
    *(f"status {status}" for status in STATUSES),
    "empty tar",  # as of a target that has no byte ranges
    "whole objects",
    "web page",
    "nothing",
    "some missing",
    "all missing",  # and the target gives up after some
    "reversed",
    "one left out",
    "other names",
    "a byte less",
    "a byte more",
    "directories",
    "cut in a header",
    "cut in a member",
    "ends early",
    "damaged header",
    "no response",
    "stalls",
    "slow",
)
_SOFT_ERRORS = 6  # more missing members end a response
_PIECE = 10_000  # bytes that are written at once


class Seen(NamedTuple):
    """A request, as the gateway or the target has seen it.

    Attributes:
        where: ``"gateway"`` or ``"target"``.
        path: without its query.
        entries: of a GetBatch; None: it is another request.
        range: the Range header.
    """

    where: str
    path: str
    entries: list | None
    range: str | None


class AIStore:
    """The servers, and what they hold.

    Attributes:
        fault: what is wrong with each GetBatch from now on: one of FAULTS; empty: nothing.
        format: of the tars of responses, which are as Go writes them: POSIX where ustar is not
            enough.
        seen: the requests so far.
        resume: the requests that stall go on when it is set.
    """

    def __init__(self):
        self.objects, self.seen, self.fault, self.format = {}, [], "", tarfile.PAX_FORMAT
        self.resume = threading.Event()
        self._servers = [_Server(("127.0.0.1", 0), kind) for kind in (_Gateway, _Target)]
        for server in self._servers:
            server.store = self

    def __enter__(self):
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *error):
        self.resume.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def gateway(self):
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def target(self):
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    def put(self, name, data, bucket="bucket"):
        """Store an object; return its URL."""
        self.objects[bucket, name] = data
        return f"ais://{bucket}/{name}"

    def batches(self, where="target"):
        """How many entries each GetBatch had that has arrived there."""
        return [len(seen.entries) for seen in self.seen if seen.where == where and seen.entries is not None]

    def ranges(self):
        """The byte ranges of shards that were requested alone."""
        return [seen.range for seen in self.seen if seen.where == "target" and seen.path.endswith(".tar")]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """The client has gone away."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

    def do_GET(self):
        with contextlib.suppress(OSError):
            store, (path, _, query) = self.server.store, self.path.partition("?")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            is_batch = path.startswith("/v1/ml/moss/")
            entries = json.loads(body)["in"] if is_batch else None
            store.seen.append(Seen(self.where, urllib.parse.unquote(path), entries, self.headers.get("Range")))
            if urllib.parse.parse_qs(query).get("provider") != ["ais"]:
                self.respond(400)
            elif is_batch and self.headers.get("Content-Type") != "application/json":
                self.respond(415)
            else:
                self.answer(json.loads(body) if is_batch else None)

    def respond(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


class _Gateway(_Handler):
    where = "gateway"

    def answer(self, batch):
        store = self.server.store
        if batch is not None and store.fault.startswith("status "):
            self.respond(int(store.fault.split()[1]), b"no", Retry_After="3600")
        elif batch is not None and store.fault == "no response":
            store.resume.wait()
        else:
            self.respond(307, Location=f"{store.target}{self.path}&pid=gateway")


class _Target(_Handler):
    where = "target"

    def answer(self, batch):
        if batch is not None:
            self.answer_batch(batch)
            return
        bucket, _, name = urllib.parse.unquote(self.path.partition("?")[0]).removeprefix("/v1/objects/").partition("/")
        data = self.server.store.objects.get((bucket, name))
        if data is None:
            self.respond(404)
            return
        start, _, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
        start, stop = int(start), min(int(last) + 1 if last else len(data), len(data))
        if start >= len(data):
            self.respond(416, Content_Range=f"bytes */{len(data)}")
        else:
            headers = {"Content_Range": f"bytes {start}-{stop - 1}/{len(data)}", "ETag": f'"{len(data)}"'}
            self.respond(206, data[start:stop], **headers)

    def answer_batch(self, batch):
        assert (batch["mime"], batch["coer"], batch["onob"], batch["strm"]) == (".tar", True, False, True)
        fault = self.server.store.fault
        self.send_response(200)
        self.send_header("Content-Type", "text/html" if fault == "web page" else "application/x-tar")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if fault not in ("nothing", "web page"):
            if self.write_members(batch["in"]):
                return
            self.write(bytes(2 * tarfile.BLOCKSIZE))
        elif fault == "web page":
            self.write(b"<html>" + b"x" * 2000)
        self.wfile.write(b"0\r\n\r\n")

    def write(self, data):
        for place in range(0, len(data), _PIECE):
            piece = data[place : place + _PIECE]
            self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))

    def write_members(self, entries):
        """Write the members; return whether the response ends without its end mark."""
        store, fault, missing = self.server.store, self.server.store.fault, 0
        entries = [] if fault == "empty tar" else entries[::-1] if fault == "reversed" else entries
        for number, entry in enumerate(entries):
            name, data = f"{entry['bucket']}/{entry['objname']}", self.bytes_of(entry)
            if fault == "one left out" and number == 5:
                continue
            if data is None or fault == "all missing" or (fault == "some missing" and number % 20 == 3):
                name, data, missing = f"__404__/{name}", b"", missing + 1
            elif fault == "a byte less" and number == 5:
                data = data[:-1]
            elif fault == "a byte more" and number == 5:
                data += b"x"
            elif fault == "other names":
                name = entry["objname"]
            header = bytearray(self.header(name, len(data)))
            if number == 5 and fault == "damaged header":
                header[3] ^= 1
            elif number == 5 and fault == "ends early":
                return False
            elif number == 5 and fault == "cut in a header":
                self.write(bytes(header[:100]))
                return self.cut()
            elif number == 5 and fault in ("cut in a member", "stalls"):
                self.write(bytes(header) + data[: len(data) // 2])
                if fault == "stalls":
                    store.resume.wait()
                return self.cut()
            elif fault == "slow":
                time.sleep(0.02)
            self.write(bytes(header) + data + bytes(-len(data) % tarfile.BLOCKSIZE))
            if missing > _SOFT_ERRORS:
                return False
        return False

    def header(self, name, size):
        member = tarfile.TarInfo(name)
        member.size = size
        if self.server.store.fault == "directories":
            member.type = tarfile.DIRTYPE
        return member.tobuf(self.server.store.format, "utf-8", "surrogateescape")

    def bytes_of(self, entry):
        """The bytes of an entry; None: there are none."""
        data = self.server.store.objects.get((entry["bucket"], entry["objname"]))
        start, stop = entry.get("start", 0), entry.get("start", 0) + entry["length"]
        if self.server.store.fault == "whole objects":
            return data
        return None if data is None or stop > len(data) else data[start:stop]

    def cut(self):
        self.close_connection = True
        return True
