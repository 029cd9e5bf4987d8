"""Web servers in a thread of this process."""

import contextlib
import datetime
import re
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Quiet(BaseHTTPRequestHandler):
    """A handler that prints nothing about its requests."""

    def log_message(self, *arguments):
        pass

    def begin(self, status, headers):
        """Send the head of a response, with the headers that have a value."""
        self.send_response(status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, str(value))
        self.end_headers()

    def write(self, data):
        with contextlib.suppress(ConnectionError):  # the client has had enough
            self.wfile.write(data)


class Site(Quiet):
    """Gives ``objects`` by their paths, up to a ";": bytes, a status, or the address of a redirect,
    with the query where it contains {query}; notes the headers that came.
    """

    objects = ()
    code = 302
    came = ()

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.came.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
        path, _, query = self.path.partition("?")
        found = self.objects.get(path.partition(";")[0], 404)
        status, location, body = 200, None, b""
        if isinstance(found, str):
            status, location = self.code, found.replace("{query}", query)
        elif isinstance(found, int):
            status = found
        else:
            body = found
        self.begin(status, {"Location": location, "Content-Length": len(body)})
        self.write(b"" if self.command == "HEAD" else body)


class Ranged(Quiet):
    """A handler for requests of ranges of ``data``."""

    data = b""

    def requested(self):
        """The first byte of the requested range, and the byte after the last one."""
        start, stop = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"]).groups()
        return int(start), min(len(self.data), int(stop) + 1 if stop else len(self.data))

    def begin_range(self, start, stop, **headers):
        """Send the head of a response with these bytes."""
        place = {"Content-Range": f"bytes {start}-{stop - 1}/{len(self.data)}", "Content-Length": stop - start}
        self.begin(206, place | headers)

    def do_GET(self):
        start, stop = self.requested()
        self.begin_range(start, stop)
        self.write(self.data[start:stop])


@contextlib.contextmanager
def serving(handler, *, tls=None, **attributes):
    """Run a server whose handler has these attributes, and yield its address; ``tls`` is an
    ssl.SSLContext.
    """
    with ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (handler,), attributes)) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"{'http' if tls is None else 'https'}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def certified(folder):
    """The ssl.SSLContext of a server that has signed its certificate itself."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = (
        ec.generate_private_key(ec.SECP256R1()),
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")]),
    )
    begin = datetime.datetime(2020, 1, 1)
    builder = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key()).serial_number(1)
    )
    certificate = (
        builder.not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=36500))
        .sign(key, hashes.SHA256())
    )
    words = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "site.pem").write_bytes(key.private_bytes(*words) + certificate.public_bytes(serialization.Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "site.pem")
    return context
