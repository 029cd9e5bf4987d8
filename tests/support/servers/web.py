"""HTTP: nginx, also with a cap on the bandwidth of each connection; and aiohttp's file server
where nginx is not installed.
"""

import contextlib
import importlib.util
import os
import socket
import sys
import tempfile
import urllib.parse

from servers.faults import Request
from servers.process import Missing, await_answer, free_port, need, running
from servers.store import Store

SO_MAX_PACING_RATE = 47  # Linux; Python has no name for it
ECHO = "/usr/lib/nginx/modules/ngx_http_echo_module.so"  # where Debian has it

NGINX = """
{first}
daemon off; worker_processes 1; pid {directory}/nginx.pid; error_log stderr warn;
events {{ worker_connections 1024; }}
http {{
  log_format tests '$msec $request_time $connection $status $body_bytes_sent $request_method $request_uri $http_range';
  access_log {directory}/access.log tests;
  sendfile on; tcp_nodelay on; keepalive_requests 100000;
  client_body_temp_path {directory}/tmp; proxy_temp_path {directory}/tmp; fastcgi_temp_path {directory}/tmp;
  uwsgi_temp_path {directory}/tmp; scgi_temp_path {directory}/tmp;
  server {{
    listen 127.0.0.1:{port}; root {directory}/www;
    location = /__up__ {{ access_log off; return 204; }}
    {locations}
  }}
}}
"""


class WebStore(Store):
    """A web server of files.

    Attributes:
        directory: where they are; a benchmark may write its shards there itself.
    """

    kind = "http"
    reads = "^GET /.*[^/]$"

    def __init__(self, endpoint, directory, **options):
        super().__init__(endpoint, **options)
        self.directory = directory
        self._written = 1_700_000_000

    @property
    def url(self):
        return self.endpoint

    def put(self, name, data):
        return urllib.parse.quote(super().put(name, data), safe=":/")

    def write(self, name, data):
        path = os.path.join(self.directory, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(f"{path}.new", "wb") as file:
            file.write(data)
        self._written += 1  # nginx's ETag is the size and the second
        os.utime(f"{path}.new", (self._written, self._written))
        os.replace(f"{path}.new", path)


class NginxStore(WebStore):
    def __init__(self, endpoint, directory, access_log, **options):
        super().__init__(endpoint, directory, **options)
        self.access_log = access_log

    def requests(self):
        """The requests that were answered so far, in the order in which they ended, also those
        that no proxy saw (as Faults.stats).
        """
        found = []
        with open(self.access_log) as lines:
            for line in lines:
                ended, seconds, connection, status, sent, method, path, wanted = line.rstrip("\n").split(" ", 7)
                started = float(ended) - float(seconds)
                found.append(
                    Request(
                        method,
                        path,
                        None if wanted == "-" else wanted,
                        int(status),
                        int(sent),
                        int(connection),
                        started,
                        float(ended),
                        None,
                        (),
                    )
                )
        return found


@contextlib.contextmanager
def nginx(*, rate_mb=0.0, latency=0.0, upstream=None):
    """Nginx with a folder of its own, or before the server at ``upstream`` (http://HOST:PORT);
    options as for ``paced_web``.

    Raises:
        Missing: it is not installed.
    """
    program = need("nginx", "apt-get install --no-install-recommends nginx-light")
    # else it could not read temporary directories
    first, locations = "user root;" if os.getuid() == 0 else "", "location / { autoindex on; }"
    if latency:
        if not os.path.exists(ECHO):
            raise Missing(
                "needs nginx's echo module: apt-get install --no-install-recommends nginx-light libnginx-mod-http-echo"
            )
        first += f" load_module {ECHO};"
        content = (
            f"proxy_pass {upstream}; proxy_set_header Host $http_host; proxy_max_temp_file_size 0;" if upstream else ""
        )
        locations = f"location / {{ echo_sleep {latency:.3f}; echo_exec @content; }} location @content {{ {content} }}"
    with tempfile.TemporaryDirectory(prefix="nginx-") as directory, socket.socket() as listening:
        # nginx takes over this socket, whose accepted connections inherit its rate. (nginx's own
        # limit_rate lets the first second's bytes through at once.)
        if rate_mb:
            listening.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, round(rate_mb * 1e6))
        listening.bind(("127.0.0.1", 0))
        listening.listen(511)
        listening.setblocking(False)
        port, log, www = (
            listening.getsockname()[1],
            os.path.join(directory, "nginx.log"),
            os.path.join(directory, "www"),
        )
        os.mkdir(www)
        with open(os.path.join(directory, "nginx.conf"), "w") as file:
            file.write(NGINX.format(first=first, directory=directory, port=port, locations=locations))
        endpoint = f"http://127.0.0.1:{port}"
        start = (program, "-p", directory, "-c", os.path.join(directory, "nginx.conf"))
        environment = {**os.environ, "NGINX": f"{listening.fileno()};"}
        # TERM, so that nginx ends its worker.
        with running(*start, log=log, end="TERM", pass_fds=(listening.fileno(),), env=environment) as process:
            listening.close()
            await_answer(f"{endpoint}/__up__", process, log)
            yield NginxStore(endpoint, www, os.path.join(directory, "access.log"), real=True)


def paced_web(rate_mb=0.0, latency=0.0, upstream=None):
    """A context manager with an nginx that is as slow as a network.

    Args:
        rate_mb: most MB (10^6 bytes) a second that each connection gives; 0 for no cap.
        latency: seconds before each answer.
        upstream: pass the requests on to this server, http://HOST:PORT; None: serve files. It goes
            with a latency.

    Raises:
        Missing: nginx, or its echo module where there is a latency, is not installed.
    """
    return nginx(rate_mb=rate_mb, latency=latency, upstream=upstream)


PLAIN = """
import re, sys
from aiohttp import web

@web.middleware
async def with_slashes(request, handler):
    answer = await handler(request)
    if answer.content_type == "text/html":
        answer.text = re.sub(r'">([^<]*)/</a>', r'/">\\1/</a>', answer.text)
    return answer

app = web.Application(middlewares=[with_slashes])
app.router.add_static("/", sys.argv[1], show_index=True)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None)
"""


@contextlib.contextmanager
def plain_web():
    """aiohttp's file server, with ranges, keep-alive and ETags. Its pages link directories with a
    slash at the end, as web servers do and aiohttp does not.

    Raises:
        Missing: it is not installed.
    """
    if importlib.util.find_spec("aiohttp") is None:
        raise Missing("needs a web server: pip install aiohttp")
    with tempfile.TemporaryDirectory(prefix="web-") as directory:
        port, log, www = free_port(), os.path.join(directory, "web.log"), os.path.join(directory, "www")
        os.mkdir(www)
        endpoint = f"http://127.0.0.1:{port}"
        with running(sys.executable, "-c", PLAIN, www, str(port), log=log) as process:
            await_answer(endpoint, process, log)
            yield WebStore(endpoint, www, real=False)
