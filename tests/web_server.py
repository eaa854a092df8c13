"""A loopback server that misbehaves as told: breaks off, lies, is busy, hangs."""

from __future__ import annotations

import hashlib
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from helpers import PATIENCE_S

from autorl_hpc.files.layout import Root
from autorl_hpc.stage.download import Patience, fetch

Answer = Callable[["Handler"], None]


class Handler(BaseHTTPRequestHandler):
    """Answers each request to a path by the next of its answers; the last one stays."""

    protocol_version = "HTTP/1.1"
    server: LoopbackServer

    def do_GET(self) -> None:
        self.server.seen.append((self.path, dict(self.headers)))
        answers = self.server.answers.get(self.path.partition("?")[0])
        if not answers:
            self.plain(404, b"no such file")
            return
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        answer(self)

    def plain(self, code: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in {"Content-Length": str(len(body)), **given}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class LoopbackServer(ThreadingHTTPServer):
    """`answers` by path; `seen` are the requests with their headers."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, list[Answer]] = {}
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.scheme = "http"
        self.over = threading.Event()

    def url(self, path: str = "") -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}{path}"

    def seen_at(self, path: str) -> list[dict[str, str]]:
        return [headers for asked, headers in self.seen if asked.partition("?")[0] == path]

    def handle_error(self, *_: Any) -> None:
        pass  # clients that went away


@contextmanager
def served(tls: tuple[Path, Path] | None = None) -> Iterator[LoopbackServer]:
    """A running server; `tls`: certificate and key."""
    server = LoopbackServer()
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.scheme = "https"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.over.set()
        server.shutdown()
        server.server_close()


def whole(data: bytes, etag: str = '"v1"') -> Answer:
    """The file, with ranges."""

    def answer(handler: Handler) -> None:
        asked = handler.headers.get("Range")
        if asked is None or handler.headers.get("If-Range", etag) != etag:
            handler.plain(200, data, ETag=etag)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-"))
        if start >= len(data):
            handler.plain(416, Content_Range=f"bytes */{len(data)}")
            return
        handler.plain(206, data[start:], ETag=etag, Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}")

    return answer


def cut(data: bytes, at: int, etag: str = '"v1"') -> Answer:
    """Announces all that `whole` would send, and closes the connection `at` bytes into it."""

    def answer(handler: Handler) -> None:
        asked = handler.headers.get("Range")
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked else 0
        handler.send_response(206 if asked else 200)
        if asked:
            handler.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        handler.send_header("Content-Length", str(len(data) - start))
        handler.send_header("ETag", etag)
        handler.end_headers()
        handler.wfile.write(data[start : start + at])
        handler.close_connection = True

    return answer


def code(number: int, **headers: str) -> Answer:
    return lambda handler: handler.plain(number, b"go away", **headers)


def to(url: str) -> Answer:
    """A redirect."""
    return lambda handler: handler.plain(302, Location=url)


def hangs(data: bytes, after: int) -> Answer:
    """Sends a part and then nothing, with the connection open."""

    def answer(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data[:after])
        handler.wfile.flush()
        handler.server.over.wait(PATIENCE_S)
        handler.close_connection = True

    return answer


QUICK = Patience(tries=3, timeout_s=PATIENCE_S, pause_s=0.01, longest_wait_s=1.5)
"""It waits for an answer as long as a busy machine may need for one, and not between two tries."""


@pytest.fixture
def root(tmp_path: Path) -> Root:
    made = Root(tmp_path / "root")
    made.path.mkdir()
    return made


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopbackServer]:
    """A server that is the Hub, too; downloads don't pause for long."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name in ("HF_TOKEN_PATH", "HF_HOME", "HF_TOKEN", "SSL_CERT_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(fetch, "__kwdefaults__", {**(fetch.__kwdefaults__ or {}), "patience": QUICK})
    with served() as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url())
        yield running


def put_model(
    server: LoopbackServer, name: str, folder: Path, commit: str, lfs: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Serves a folder as the Hub serves a model; returns the description, which may be changed before it is asked for."""
    rows: list[dict[str, Any]] = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        data, file = path.read_bytes(), path.relative_to(folder).as_posix()
        blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        row: dict[str, Any] = {"rfilename": file, "size": len(data), "blobId": blob}
        if file.endswith(lfs or (".safetensors", ".bin")):
            row["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        rows.append(row)
        server.answers[f"/{name}/resolve/{commit}/{file}"] = [whole(data)]
    value: dict[str, Any] = {"id": name, "sha": commit, "siblings": rows, "cardData": {"license": "mit"}}

    def info(handler: Handler) -> None:
        handler.plain(200, json.dumps(value).encode(), Content_Type="application/json")

    for revision in ("main", commit):
        server.answers[f"/api/models/{name}/revision/{revision}"] = [info]
    return value
