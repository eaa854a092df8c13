"""A cluster's HTTP proxy between gateway and driver."""

from __future__ import annotations

import contextlib
import http.client
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from driver_server import DriverServer, Turn
from gateways import KEY, MODEL, PATHS, TOKEN, GatewayProcess, request_of

from autorl_hpc.drivers.client import proxy_to

HOST = "driver.example.test"
"""A name that only the proxy knows, as on nodes without a way out."""


@contextlib.contextmanager
def proxy(port: int) -> Iterator[tuple[str, list[str]]]:
    """A proxy that leads everything to this port of the loopback: its URL, and what it was asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked.append(f"POST {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            way = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "proxy-connection"}
            way.request("POST", urlsplit(self.path).path, body, headers)
            answer = way.getresponse()
            data = answer.read()
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()


def answer_through(folder: Path, url: str, through: str | None) -> str:
    """What the driver says to a gateway that goes this way."""
    upstream = {"url": url, "key": KEY, "proxy": through, "timeout_s": 60, "retries": 1}
    gateway = GatewayProcess(folder, upstream)
    try:
        answered = gateway.ask(PATHS["openai-chat"], request_of("openai-chat"), {"Authorization": f"Bearer {TOKEN}"})
        assert answered.status == 200, (answered.body, gateway.stderr.read_text())
        return str(answered.json["choices"][0]["message"]["content"])
    finally:
        gateway.process.kill()
        gateway.process.wait()


def test_a_proxy_forwards(tmp_path: Path) -> None:
    with DriverServer([Turn("through")], key=KEY, model=MODEL) as driver, proxy(driver.port) as (address, asked):
        url = f"http://{HOST}/v1"
        assert answer_through(tmp_path, url, proxy_to(url, None, {"http_proxy": address})) == "through"
        assert asked == [f"POST http://{HOST}/v1/chat/completions"]


@pytest.mark.parametrize(
    ("url", "given", "environ", "wanted"),
    [
        ("https://h/v1", None, {}, None),
        ("https://h/v1", None, {"HTTPS_PROXY": "proxy:3128"}, "http://proxy:3128"),
        ("https://h/v1", None, {"HTTP_PROXY": "http://p"}, None),
        ("http://h/v1", None, {"http_proxy": "http://a", "HTTP_PROXY": "http://b"}, "http://a"),
        ("https://h/v1", None, {"ALL_PROXY": "http://p"}, "http://p"),
        ("https://h/v1", "http://own", {"NO_PROXY": "*"}, "http://own"),
        ("https://api.h.org/v1", None, {"ALL_PROXY": "http://p", "NO_PROXY": "x, .h.org"}, None),
        ("https://notH.org/v1", None, {"ALL_PROXY": "http://p", "NO_PROXY": "h.org"}, "http://p"),
        ("https://10.1.2.3/v1", None, {"ALL_PROXY": "http://p", "NO_PROXY": "10.0.0.0/8"}, None),
        ("http://h:8000/v1", None, {"ALL_PROXY": "http://p", "NO_PROXY": "h:9000"}, "http://p"),
        ("http://h:8000/v1", None, {"ALL_PROXY": "http://p", "no_proxy": "h:8000"}, None),
    ],
)
def test_which_proxy(url: str, given: str | None, environ: dict[str, str], wanted: str | None) -> None:
    assert proxy_to(url, given, environ) == wanted
