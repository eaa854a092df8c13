"""Serve the reference's HTTP protocol on the loopback, for agents that were written for AutoRL-Bench: `POST /submit`, `GET /time`, `GET
/health`; `/set_baseline` is refused. All paths begin with a secret token of this run: agents of other runs can't use it."""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from autorl_hpc.files.safe_open import Folder
from autorl_hpc.records import readable_json
from autorl_hpc.supervise.intake import ResultWriter

log = logging.getLogger("autorl_hpc.supervisor")

MAX_BODY_BYTES = 64 * 1024
HOLD_S = 24 * 3600.0  # how long a submission's request stays open for its score; the run's end closes it earlier
SOCKET_TIMEOUT_S = 60.0
PICK_UP_S = 60.0  # how long a request with `"wait": false` waits until intake has accepted or refused
# Of clients that showed the token, and that have not shown it yet, such as other runs' agents; one more of these closes the oldest.
# Each takes a thread and a descriptor, which the supervisor needs for its ledger.
MAX_CONNECTIONS, MAX_UNKNOWN = 128, 64


class _Server(ThreadingHTTPServer):
    """On a free port of the loopback, or on a Unix socket, which is reachable from a sandbox without a network."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, handler: type[BaseHTTPRequestHandler], unix: Path | None = None) -> None:
        self._unix, self._lock = unix, threading.Lock()
        self._open: dict[socket.socket, bool] = {}  # in the order of their coming; True: it showed the token
        if unix is not None:
            self.address_family = socket.AF_UNIX
        super().__init__(("127.0.0.1", 0), handler)

    def server_bind(self) -> None:
        # HTTPServer resolves a host name here, which hangs on nodes without a resolver.
        if self._unix is None:
            socketserver.TCPServer.server_bind(self)
        else:
            self.socket.bind(str(self._unix))
        self.server_name, self.server_port = "bridge", 0

    def get_request(self) -> tuple[socket.socket, Any]:
        request, address = self.socket.accept()
        return request, address or ("unix", 0)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        with self._lock:
            self._open[request] = False
            unknown = [each for each, known in self._open.items() if not known]
            if len(unknown) > MAX_UNKNOWN:
                del self._open[unknown[0]]
                with contextlib.suppress(OSError):  # its thread stops waiting for a request
                    unknown[0].shutdown(socket.SHUT_RDWR)
        return True

    def admit(self, request: socket.socket) -> bool:
        """Give a place to a client that showed the token; return False if there is none."""
        with self._lock:
            if not self._open.get(request) and sum(self._open.values()) >= MAX_CONNECTIONS:
                return False
            self._open[request] = True
            return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a client of the bridge went away", exc_info=True)


class Bridge:
    """One run's HTTP server, on a free port of the loopback and on a Unix socket. `meta`: what `/time` tells besides `budget()`, the
    content of time.json; `died`: takes note that the forwarder inside the sandbox died."""

    def __init__(
        self,
        answers: ResultWriter,
        meta: dict[str, Any],
        budget: Callable[[], dict[str, Any]],
        unix: Path,
        died: Callable[[], None],
    ) -> None:
        self.answers, self.meta, self.budget, self.died = answers, meta, budget, died
        self.token = secrets.token_urlsafe(24)
        self.last_submit_time: int | None = None
        self._workspace = Folder.open(answers.workspace)
        self._servers = [_Server(_handler(self)), _Server(_handler(self), unix)]

    @property
    def port(self) -> int:
        """Return the port; inside a sandbox a forwarder listens on the same number."""
        return int(self._servers[0].server_address[1])

    @property
    def url(self) -> str:
        """Return the URL that agents get as GRADING_SERVER_URL."""
        return f"http://127.0.0.1:{self.port}/{self.token}"

    def start(self) -> None:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, name="bridge", daemon=True).start()

    def stop(self) -> None:
        """Stop answering; open requests end with their connections. Call it after `start`."""
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def submit(self, body: Any) -> tuple[int, dict[str, Any]]:
        """Answer POST /submit. Return (HTTP status, JSON body)."""
        if not isinstance(body, dict) or not isinstance(body.get("model_path"), str) or not body["model_path"]:
            return 400, {"error": "Missing model_path"}
        manifest_id = f"http-{time.time_ns():020d}-{secrets.token_hex(4)}"
        manifest = {"schema_version": 1, "model_path": body["model_path"], "final": body.get("final") is True}
        if isinstance(body.get("note"), str):
            manifest["note"] = body["note"][:500]
        try:
            data = readable_json(manifest)
        except UnicodeEncodeError:
            return 400, {"error": "Invalid request"}
        self.last_submit_time = int(time.time())
        if not self._workspace.write(f"submissions/{manifest_id}.json", data):
            advice = "submissions/ can't be written; try again"
            return 500, {"error": "Internal server error", "fault": "cluster", "advice": advice}
        wait = body.get("wait") is not False
        answer = self.answers.wait(manifest_id, scored=wait, timeout_s=HOLD_S if wait else PICK_UP_S)
        if answer is None:
            return 202, {"manifest_id": manifest_id, "status": "dropped", "score": None}
        return (400 if answer["status"] == "refused" else 200), answer

    def time(self) -> dict[str, Any]:
        told = self.budget()
        now = {"now": int(time.time()), "remaining": int(told["left_s"]), "last_submit_time": self.last_submit_time}
        return {**self.meta, **told, **now}

    def health(self) -> dict[str, Any]:
        gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        workspace = str(self.answers.workspace)
        return {"status": "ok", "task": self.meta["task"], "workspace": workspace, "available_gpus": gpus}


def _handler(bridge: Bridge) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server: _Server
        timeout = SOCKET_TIMEOUT_S
        protocol_version = "HTTP/1.1"
        server_version = "autorl-hpc"
        sys_version = ""

        def do_GET(self) -> None:
            answers = {"time": bridge.time, "health": bridge.health}
            answer = answers.get(self._action())
            self._send(404, {"error": "Not found"}) if answer is None else self._send(200, answer())

        def do_POST(self) -> None:
            action, body = self._action(), self._body()
            if action == "submit":
                self._send(*bridge.submit(body))
            elif action == "set_baseline":
                self._send(403, {"error": "the baseline is measured by the grader and can't be set"})
            elif action == "forwarder_died":
                bridge.died()
                self._send(200, {})
            else:
                self._send(404, {"error": "Not found"})

        def _action(self) -> str:
            token, _, action = self.path.split("?", 1)[0].strip("/").partition("/")
            if not hmac.compare_digest(token.encode("utf-8", "replace"), bridge.token.encode()):
                return ""
            if not self.server.admit(self.connection):
                self._send(503, {"error": "this run has too many connections open"})
                raise ConnectionAbortedError
            return action

        def _body(self) -> Any | None:
            try:
                length = int(self.headers.get("Content-Length") or 0)
            except ValueError:
                length = -1
            if not 0 <= length <= MAX_BODY_BYTES or self.headers.get("Transfer-Encoding"):
                self.close_connection = True  # the rest of the stream is no request
                return None
            try:
                return json.loads(self.rfile.read(length) or b"{}")
            except (ValueError, RecursionError):
                return None

        def _send(self, status: int, value: dict[str, Any]) -> None:
            data = json.dumps(value).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except OSError:
                self.close_connection = True

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: the request line holds the token."""

    return Handler
