"""A program that passes HTTP/1.1 requests on to a real server as they are (signatures stay valid),
and makes faults in the answers.

    python faultproxy.py 127.0.0.1:PORT  # of the server; prints the port where it listens

A rule is a dict. Which requests it applies to:
    match: pattern that is searched in "METHOD path?query"; all requests without
    skip: n                the first n requests that match are spared
    times: n               only so many get it; all without
    prob: p                each gets it with this probability
What becomes of them; one or several of:
    latency: seconds       wait before answering (any large number: never answer)
    hold: true             wait until a test gives other rules
    gather: n              wait until n requests are being answered at once; then the rule is over
    rate: bytes a second   the most that this connection gives (the kernel's pacing, Linux only)
    status: 503            answer this, with ``headers`` and ``body`` (text), without asking the
        server
    headers: {name: value} without ``status``: in place of those of the server's answer, or with
        them, such as {"ETag": '"other"'}
    raw: text              these bytes (latin-1) instead of an answer, then the connection closes
    drop: true             reset the connection instead of an answer
    reset_after: n         reset it after n bytes of the body
    close_after: n         close it in an orderly way after n bytes of the body
    stall_after: n         silence for ``stall`` seconds (5) after n bytes of the body
    stall: seconds         see stall_after
    trickle: [n, seconds]  n bytes every so many seconds
    add_length: n          Content-Length is n too large (the connection closes early), or too small
        (n < 0)
    no_length: true        no Content-Length: the body ends where the connection does
    truncate: n            the first n bytes only, with the right Content-Length and Content-Range
        for them, as a short but sound answer
    ignore_range: true     200 and the whole object whatever the Range
    flip: n                one bit of byte n of the body is turned
"""

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import sys
import time

SO_MAX_PACING_RATE = 47  # Linux; Python has no name for it
FILTERS = {"match", "skip", "times", "prob"}
FAULTS = {
    "latency",
    "hold",
    "gather",
    "rate",
    "status",
    "headers",
    "body",
    "raw",
    "drop",
    "reset_after",
    "close_after",
    "stall_after",
    "stall",
    "trickle",
}
FAULTS |= {"add_length", "no_length", "truncate", "ignore_range", "flip"}
CHUNK = 1 << 18
LINE = 1 << 20  # the longest head of a request or an answer


class Cut(Exception):
    """Closes the connection here; as a reset if that is its argument."""


class Rules:
    """The rules, and how often each was applied."""

    def __init__(self, rules=(), seed=0):
        for rule in rules:
            if unknown := set(rule) - FILTERS - FAULTS:
                raise ValueError(
                    f"a rule has no {', '.join(sorted(unknown))}; it may have {', '.join(sorted(FILTERS | FAULTS))}"
                )
            re.compile(rule.get("match", ""))
        self.rules = rules
        self.spared = [0] * len(rules)
        self.applied = [0] * len(rules)
        self.random = random.Random(seed)
        self.gathered = False

    def faults(self, request):
        """The faults of this request."""
        found = {}
        for number, rule in enumerate(self.rules):
            if not re.search(rule.get("match", ""), request):
                continue
            if self.spared[number] < rule.get("skip", 0):
                self.spared[number] += 1
                continue
            if self.applied[number] >= rule.get("times", float("inf")) or self.random.random() >= rule.get("prob", 1):
                continue
            self.applied[number] += 1
            found.update({name: value for name, value in rule.items() if name not in FILTERS})
        return found


class Headers(list):
    """Pairs of names and values, in their order."""

    def get(self, name):
        return next((value for found, value in self if found.lower() == name), None)

    def without(self, *names):
        return Headers(pair for pair in self if pair[0].lower() not in names)

    def replaced(self, name, value):
        """With another value of a header that is there."""
        return Headers((found, value if found.lower() == name else old) for found, old in self)


async def read_head(reader):
    """The first line and the headers of a request or an answer."""
    first, *lines = (await reader.readuntil(b"\r\n\r\n"))[:-4].decode("latin-1").split("\r\n")
    return first, Headers(tuple(part.strip() for part in line.split(":", 1)) for line in lines)


def head(first, headers):
    return "".join((first, "\r\n", *(f"{name}: {value}\r\n" for name, value in headers), "\r\n")).encode("latin-1")


class Proxy:
    """Rules, requests, and the server behind them."""

    def __init__(self, host, port):
        self.upstream = host, port
        self.rules = Rules()
        self.seen = []
        self.clients = {}  # what comes from each client, by the number of its connection

    def is_live(self, entry):
        """Whether a request is being answered, and its client is there."""
        return entry["ended"] is None and not self.clients[entry["connection"]].at_eof()

    async def connection(self, reader, writer):
        """Answer the requests of a client until either side has enough."""
        number = writer.get_extra_info("peername")[1]
        self.clients[number] = reader
        try:
            while True:
                first, headers = await read_head(reader)
                if headers.get("expect"):
                    writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                body = await reader.readexactly(int(headers.get("content-length") or 0))
                method, path, _ = first.split(" ")
                if path.startswith("/__"):
                    self.control(path, body, writer)
                    await writer.drain()
                    continue
                rules = self.rules  # those that hold it: a test may give others at any await
                faults = rules.faults(f"{method} {path}")
                await asyncio.sleep(0)  # who has closed other connections before is heard of
                live = 1 + sum(map(self.is_live, self.seen))  # of those that are seen: a test before may have left some
                entry = {
                    "method": method,
                    "path": path,
                    "range": headers.get("range"),
                    "status": None,
                    "sent": 0,
                    "connection": number,
                }
                entry |= {"started": time.time(), "ended": None, "live": live, "faults": list(faults)}
                self.seen.append(entry)
                try:
                    await self.wait(rules, faults)
                    await Exchange(writer, entry, faults).run(
                        self.upstream, first, headers.without("expect", "connection"), body
                    )
                finally:
                    entry["ended"] = entry["ended"] or time.time()
        except Cut as cut:
            if cut.args == ("reset",):
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
        except (asyncio.IncompleteReadError, OSError):
            pass  # the client, or the server, is gone
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def wait(self, rules, faults):
        """Wait for other rules, or for other requests."""
        while self.rules is rules and not rules.gathered and ("hold" in faults or "gather" in faults):
            rules.gathered = sum(map(self.is_live, self.seen)) >= faults.get("gather", float("inf"))
            await asyncio.sleep(0.005)

    def control(self, path, body, writer):
        """What a test asks of the proxy itself."""
        status, answer = "200 OK", "{}"
        if path == "/__rules__":
            try:
                self.rules = Rules(**json.loads(body))
            except (ValueError, re.error) as error:
                status, answer = "400 Bad Request", str(error)
        elif path == "/__clear__":
            self.rules, self.seen = Rules(), []
        else:
            answer = json.dumps([list(entry.values()) for entry in self.seen])
        writer.write(head(f"HTTP/1.1 {status}", [("Content-Length", len(answer.encode()))]) + answer.encode())


class Exchange:
    """One request and its answer, with its faults; ``entry`` is its record."""

    def __init__(self, writer, entry, faults):
        self.writer = writer
        self.entry = entry
        self.faults = faults

    async def run(self, server, first, headers, body):
        """Answer the request."""
        faults = self.faults
        # also where there is none, since a connection keeps what it had
        if "rate" in faults or sys.platform == "linux":
            rate = struct.pack("Q", int(faults.get("rate", 2**64 - 1)))
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
        await asyncio.sleep(faults.get("latency", 0))
        if faults.get("drop"):
            self.entry["status"] = 0
            raise Cut("reset")
        if "raw" in faults:
            self.entry["status"] = 0
            await self.send(faults["raw"].encode("latin-1"))
            raise Cut
        if "status" in faults:
            self.entry["status"] = faults["status"]
            content = faults.get("body", "").encode()
            self.writer.write(
                head(
                    f"HTTP/1.1 {faults['status']} Fault",
                    [("Content-Length", len(content)), *faults.get("headers", {}).items()],
                )
            )
            await self.send(content if self.entry["method"] != "HEAD" else b"")
            return
        upstream, up = await asyncio.open_connection(*server, limit=LINE)
        try:
            up.write(head(first, [*changed_request(headers, faults), ("Connection", "close")]) + body)
            status, answer = await read_head(upstream)
            while status.split(" ")[1] == "100":
                status, answer = await read_head(upstream)
            self.entry["status"] = int(status.split(" ")[1])
            await self.pass_on(status, answer.without("connection", "keep-alive"), upstream)
        finally:
            up.close()

    async def pass_on(self, status, headers, upstream):
        """Send the server's answer to the client."""
        faults, entry = self.faults, self.entry
        others = faults.get("headers", {})
        headers = Headers([*headers.without(*map(str.lower, others)), *others.items()])
        if entry["method"] == "HEAD" or entry["status"] in (204, 304):
            self.writer.write(head(status, headers))
            await self.writer.drain()
            return
        if headers.get("transfer-encoding"):  # listings, which are small
            content = await dechunked(upstream)
            self.writer.write(head(status, [*headers.without("transfer-encoding"), ("Content-Length", len(content))]))
            await self.send(content)
            return
        span = re.fullmatch(r"bytes (\d+)-(\d+)/(\S+)", headers.get("content-range") or "")
        start, end = map(int, span.groups()[:2]) if span else (0, 0)
        length = int(headers.get("content-length")) if headers.get("content-length") else None
        if length is not None and "truncate" in faults:
            length = min(length, faults["truncate"])
            headers, end = headers.replaced("content-length", length), start + length - 1
        if span:
            headers = headers.replaced("content-range", f"bytes {start}-{end}/{span[3]}")
        if length is not None and "add_length" in faults:
            headers = headers.replaced("content-length", length + faults["add_length"])
        if faults.get("no_length"):
            headers = headers.without("content-length")
        last = length is None or "add_length" in faults or faults.get("no_length")
        self.writer.write(head(status, [*headers, ("Connection", "close")] if last else headers))
        await self.copy(upstream, length)
        if last:
            raise Cut

    async def copy(self, upstream, length):
        """Pass the body on, up to where a fault cuts it."""
        faults, entry = self.faults, self.entry
        stops = {name: faults[name] for name in ("stall_after", "close_after", "reset_after") if name in faults}
        pace, pause = faults.get("trickle", (CHUNK, 0))
        while True:
            for name in [name for name, place in stops.items() if place <= entry["sent"]]:
                await self.writer.drain()
                del stops[name]
                if name == "stall_after":
                    await asyncio.sleep(faults.get("stall", 5))
                else:
                    await asyncio.sleep(0.02)  # so that what was sent arrives before a reset does
                    raise Cut(name.partition("_")[0])
            left = CHUNK if length is None else length - entry["sent"]
            data = (
                await upstream.read(min(left, pace, *(place - entry["sent"] for place in stops.values())))
                if left
                else b""
            )
            if not data:
                if left and length is not None:
                    raise Cut("reset")  # the server itself failed
                return
            place = faults.get("flip", -1) - entry["sent"]
            if 0 <= place < len(data):
                data = data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
            if entry["sent"] + len(data) == length:
                entry["ended"] = time.time()  # first, since the client may continue at once
            await self.send(data)
            await asyncio.sleep(pause)

    async def send(self, data):
        self.entry["sent"] += len(data)  # first, so that a client that has the data finds its record
        self.writer.write(data)
        await self.writer.drain()


def changed_request(headers, faults):
    """The headers to ask the server with."""
    if not (faults.get("ignore_range") and headers.get("range")):
        return headers
    # S3's signature covers Range: so it is sent without a key instead.
    return Headers(
        pair
        for pair in headers
        if pair[0].lower() not in ("range", "authorization") and not pair[0].lower().startswith("x-amz-")
    )


async def dechunked(reader):
    content = b""
    while size := int((await reader.readline()).split(b";")[0], 16):
        content += await reader.readexactly(size)
        await reader.readexactly(2)
    return content


async def main():
    host, port = sys.argv[1].split(":")
    server = await asyncio.start_server(Proxy(host, int(port)).connection, "127.0.0.1", 0, limit=LINE, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
