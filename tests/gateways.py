"""A gateway of tests: the real process, as the supervisor starts it, in front of a scripted driver."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import warm
from driver_server import DriverServer
from helpers import PATIENCE_S, wait_for

from autorl_hpc.files.safe_open import DriverCall, read_calls

TOKEN = "run-token-0123456789abcdef"
KEY = "sk-real-key-of-the-experiment-0123456789"
MODEL = "scripted"
PATHS = {
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": f"/v1beta/models/{MODEL}:generateContent",
}
STREAM = f"/v1beta/models/{MODEL}:streamGenerateContent"


def request_of(dialect: str, text: str = "hello", **fields: Any) -> dict[str, Any]:
    """A plain request."""
    plain: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    if dialect == "openai-responses":
        plain = {"model": MODEL, "input": text}
    elif dialect == "anthropic":
        plain["max_tokens"] = 100
    elif dialect == "gemini":
        plain = {"contents": [{"role": "user", "parts": [{"text": text}]}]}
    return {**plain, **fields}


@dataclass
class Answered:
    """A whole answer."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def refused(self) -> str | None:
        """The gateway's own word, None where the driver answered."""
        return self.headers.get("x-autorl-refused")


class GatewayProcess:
    """The process. `settings` are laid over what a run with no limits has."""

    def __init__(self, folder: Path, upstream: str | dict[str, Any], **settings: Any) -> None:
        self.folder = folder
        self.log = folder / "driver.jsonl"
        self.socket = folder / "driver.sock"
        given = {"url": upstream, "key": KEY, "timeout_s": 60, "retries": 1} if isinstance(upstream, str) else upstream
        told = {
            "unix": str(self.socket), "port": 0, "token": TOKEN, "upstream": given, "model": MODEL, "prices": None, "limits": None,
            "log": str(self.log), "bodies": None, "tools": [], **settings,
        }  # fmt: skip
        self.stderr = folder / "gateway.err"
        self.posts = 0  # each has a line in the log, soon after its answer
        self._pings = self._pong = 0
        self._lock = threading.Lock()
        given, into = os.pipe()
        out_of, out = os.pipe()
        self.stdin, self._stdout = os.fdopen(into, "w"), os.fdopen(out_of)
        with open(self.stderr, "ab") as stderr, os.fdopen(out, "wb") as stdout, os.fdopen(given):
            self.process = _started(given, stdout, stderr)
        self.tell(told)
        self.told: list[dict[str, Any]] = []
        first = self._stdout.readline()
        assert first, self.stderr.read_text()
        self.port: int | None = json.loads(first)["port"]
        threading.Thread(target=self._listen, daemon=True).start()
        self.totals()

    def _listen(self) -> None:
        for line in self._stdout:
            value = json.loads(line)
            if "pong" in value:
                self._pong = value["pong"]
            else:
                self.told.append(value)

    def tell(self, value: Any) -> None:
        """One line in."""
        self.stdin.write(json.dumps(value) + "\n")
        self.stdin.flush()

    def totals(self, calls: int | None = None) -> dict[str, Any]:
        """The last that it told, of every request that has its answer; waits until it told so many calls."""
        if calls is None:  # what it tells of an answer is heard before its word to a question that comes after
            self._pings += 1
            self.tell({"ping": self._pings})
            wait_for(lambda: self._pong == self._pings, what="its answer")
        wait_for(lambda: self.told and (calls is None or self.told[-1]["calls"] >= calls), what=f"{calls} calls")
        return self.told[-1]

    def calls(self, count: int) -> list[DriverCall]:
        """The log's lines of requests that have ended, as soon as there are so many."""

        def ended() -> list[DriverCall]:
            return [call for call in read_calls(self.log) if not call.under_way]

        return wait_for(lambda: len(found := ended()) >= count and found, what=f"{count} lines")

    def connect(self, unix: bool = False) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port or 0, timeout=240)
        if unix:
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(60)
            connection.sock.connect(str(self.socket))
        return connection

    def ask(
        self,
        path: str,
        body: Any = None,
        headers: Any = None,
        *,
        method: str = "POST",
        unix: bool = False,
        token: str | None = TOKEN,
    ) -> Answered:
        """One request with the token; a body that is bytes is sent as it is."""
        connection = self.connect(unix)
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        told = {"Content-Type": "application/json"} if data is not None else {}
        if token is not None:
            told["Authorization"] = f"Bearer {token}"
        try:
            connection.request(method, path, data, {**told, **(headers or {})})
            answer = connection.getresponse()
            answered = Answered(answer.status, dict(answer.headers), answer.read())
        finally:
            connection.close()
        with self._lock:
            self.posts += method == "POST" and answered.refused != "token"
        return answered

    def raw(self, data: bytes, answers: int = 1) -> bytes:
        """Bytes as they are, on a connection of their own; what comes back until it is closed, or until the end of so many answers, and
        what follows within a second."""
        found = b""
        with socket.create_connection(("127.0.0.1", self.port or 0), timeout=240) as connection:
            connection.sendall(data)
            try:
                while part := connection.recv(65536):
                    found += part
                    connection.settimeout(1.0 if found.count(b"HTTP/1.") >= answers else 240.0)
            except (TimeoutError, ConnectionResetError):
                pass
        self._settle()
        return found

    def _settle(self) -> None:
        """How many lines bytes as they are make can't be told: a request of our own comes behind them, and all are counted."""
        path = f"/no-such-path/{time.monotonic_ns()}"
        self.ask(path, {})
        wait_for(lambda: any(call.path == path for call in self.calls(1)), what=f"the line of {path}")
        self.posts = len(self.calls(1))

    def end(self) -> int:
        """Stops it."""
        if self.process.poll() is None:
            self.tell({"stop": True})
        return self.process.wait(PATIENCE_S)

    def __enter__(self) -> GatewayProcess:
        return self

    def __exit__(self, *args: object) -> None:
        try:
            self.end()
        finally:
            self.process.kill()


def _started(given: int, stdout: Any, stderr: Any) -> Any:
    """A fork of a process that has the package loaded, else a process of its own."""
    args = ["-m", "autorl_hpc.gateway"]
    if warm.may_fork(args, os.environ, None):
        return warm.start(args, os.environ, Path.cwd(), stdout, stderr, given)
    return subprocess.Popen([sys.executable, *args], stdin=given, stdout=stdout, stderr=stderr)


def behind(driver: DriverServer, folder: Path, **settings: Any) -> GatewayProcess:
    """A gateway in front of it."""
    return GatewayProcess(folder, driver.url, **settings)
