"""An OpenAI-compatible endpoint on the loopback, whose faults a test decides."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def completion(text: str = "1", *, model: str = "judge", **fields: Any) -> dict[str, Any]:
    """A chat completion."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop", **fields}
    usage = {"prompt_tokens": 100, "completion_tokens": 2, "total_tokens": 102}
    return {"id": "x", "object": "chat.completion", "model": model, "choices": [choice], "usage": usage}


def likely(**tokens: float) -> dict[str, Any]:
    """The field `logprobs` of a choice whose first token had these."""
    top = [{"token": token, "logprob": value, "bytes": None} for token, value in tokens.items()]
    return {"content": [{"token": top[0]["token"], "logprob": top[0]["logprob"], "bytes": None, "top_logprobs": top}]}


@dataclass
class Reply:
    """One response.

    Attributes:
        body: JSON of it is sent, or the bytes as they are.
        after_s: how long nothing comes.
        cut: that many bytes fewer are sent than were promised.
        drip_s: a pause after each byte.
    """

    body: Any = field(default_factory=completion)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    after_s: float = 0.0
    cut: int = 0
    drip_s: float = 0.0


@dataclass
class Asked:
    """A request as it came."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    at: float


class JudgeServer:
    """Serves until it is ended. `replies(number, body)` gives each response, numbers from 1."""

    def __init__(self, replies: Callable[[int, dict[str, Any]], Reply], port: int = 0) -> None:
        self.replies = replies
        self.asked: list[Asked] = []
        self.at_once = self.most_at_once = 0
        self._lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                outer._serve(self)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def end(self) -> None:
        """Closes the port."""
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            self.asked.append(Asked(handler.path, dict(handler.headers), body, time.monotonic()))
            number = len(self.asked)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        reply = self.replies(number, body)
        time.sleep(reply.after_s)
        with self._lock:  # before the answer: with it the client asks again at once
            self.at_once -= 1
        with suppress(OSError):  # the client has gone
            self._answer(handler, reply)

    def _answer(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        handler.send_response(reply.status)
        usual = {"Content-Type": "application/json", "Content-Length": str(len(data))}
        for name, value in {**usual, **reply.headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if reply.drip_s:
            for byte in data:
                handler.wfile.write(bytes([byte]))
                time.sleep(reply.drip_s)
        handler.wfile.write(b"" if reply.drip_s else data[: len(data) - reply.cut])
        handler.wfile.flush()
        if reply.cut:
            handler.close_connection = True
            handler.connection.close()
