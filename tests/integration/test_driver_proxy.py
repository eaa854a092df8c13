"""A cluster's HTTP proxy between gateway and driver."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from gateways import KEY, PATHS, GatewayProcess, request_of

from autorl_hpc.drivers.client import proxy_to

HOST = "driver.example.test"
"""A name that only the proxy knows, as on nodes without a way out."""


def test_a_proxy_is_asked_for_the_whole_address(tmp_path: Path) -> None:
    asked: list[str] = []

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"choices": [{"message": {"content": "through"}}]}')

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, address = f"http://{HOST}/v1", f"http://127.0.0.1:{server.server_port}"
        through = proxy_to(url, None, {"http_proxy": address})
        with GatewayProcess(tmp_path, {"url": url, "key": KEY, "proxy": through, "retries": 1}) as gateway:
            answered = gateway.ask(PATHS["openai-chat"], request_of("openai-chat"))
        server.shutdown()
    assert answered.status == 200 and b"through" in answered.body and asked == [f"{url}/chat/completions"]


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
