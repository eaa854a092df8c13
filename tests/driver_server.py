"""A driver on the loopback that plays scripted turns: a deterministic model in all four dialects, with failures to order.

    with DriverServer([Turn(run="ls"), Failure(429, retry_after_s=1), Turn("done")]) as driver:
        ...  # driver.url ends in /v1 (OpenAI), driver.root is without it (Anthropic, Gemini)

A list is played in the order of requests that offer tools (or all, where none ever does): programs ask for titles and summaries in
between, which get `aside`. A failure is one entry, and the retry gets the next. After the list's end its last turn is
repeated, as text alone. A function is given the conversation instead and answers from it: it holds no state, so that an
interrupted agent that goes on gets the turn that it would have got.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs

import driver_wire as wire
from driver_wire import ANTHROPIC, GEMINI, Call, Conversation, Turn

from autorl_hpc.drivers.client import QUESTION

__all__ = ["Asked", "Call", "Conversation", "DriverServer", "Failure", "Pace", "Turn", "overflow"]


@dataclass(frozen=True)
class Failure:
    """One answer that goes wrong.

    Attributes:
        status: of an error; 0: the turn is begun and cut.
        retry_after_s: sent as `Retry-After`.
        cut_after: with status 0: events that are sent before the connection breaks; of a body that is no stream, bytes.
        turn: what is cut.
        body: sent as it is in place of the dialect's error.
    """

    status: int = 500
    retry_after_s: float | None = None
    message: str = "scripted failure"
    kind: str = ""
    cut_after: int = 3
    turn: Turn = field(default_factory=lambda: Turn("this answer will not come to its end"))
    body: bytes | None = None


@dataclass(frozen=True)
class Pace:
    """A turn that comes slowly: after_s until the first byte, event_s between two events."""

    turn: Turn
    after_s: float = 0.0
    event_s: float = 0.0


Entry = Turn | Failure | Pace
Script = Sequence[Entry] | Callable[[Conversation], Entry]

ASIDE = Turn("ok")

KINDS = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
         429: "rate_limit_error", 529: "overloaded_error"}  # fmt: skip


def overflow(conversation: Conversation, limit: int) -> Failure:
    """What a driver says when a conversation is longer than its window, in the words of the dialect's provider."""
    asked = conversation.tokens_in
    message = (
        f"This model's maximum context length is {limit} tokens. However, your messages resulted in {asked} tokens."
    )
    kind = "context_length_exceeded"
    if conversation.dialect == ANTHROPIC:
        message, kind = f"prompt is too long: {asked} tokens > {limit} maximum", ""
    elif conversation.dialect == GEMINI:
        message = f"The input token count ({asked}) exceeds the maximum number of tokens allowed ({limit})."
        kind = "INVALID_ARGUMENT"
    return Failure(400, message=message, kind=kind)


@dataclass
class Asked:
    """A request as it came. `entry` is what was played for it."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    raw: bytes
    at: float
    conversation: Conversation | None = None
    entry: Entry | None = None

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


class DriverServer:
    """Serves until it is ended.

    Args:
        key: what requests must show, as a bearer token, x-api-key, x-goog-api-key or ?key=; None: anything.
        model: the one that exists; None: any.
        context_tokens: longer conversations are refused, by `overflow`.
        host: where it listens; a job on another node needs other than the loopback.
    """

    def __init__(
        self,
        script: Script,
        *,
        key: str | None = None,
        model: str | None = None,
        context_tokens: int | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.script, self.key, self.model, self.context_tokens = script, key, model, context_tokens
        self.host = host
        self.asked: list[Asked] = []
        self.probed: list[Asked] = []
        """Requests by which the suite proves a key: they are no part of the play."""
        self.played = 0
        self.broken_off = 0
        """Streams that the client left."""
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def setup(self) -> None:
                super().setup()
                outer._connections.add(self.connection)

            def finish(self) -> None:
                outer._connections.discard(self.connection)
                super().finish()

            def do_POST(self) -> None:
                outer._serve(self)

            do_GET = do_HEAD = do_POST  # noqa: N815

            def log_message(self, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False
            request_queue_size = 128

        self._server = Server((host, port), Handler)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def root(self) -> str:
        """Without /v1, as Anthropic's and Google's programs want it."""
        return f"http://{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """With /v1, as OpenAI's programs want it."""
        return f"{self.root}/v1"

    @property
    def conversations(self) -> list[Conversation]:
        return [each.conversation for each in list(self.asked) if each.conversation is not None]

    def end(self) -> None:
        """Closes the port; streams that run go on."""
        self._server.shutdown()
        self._server.server_close()

    def kill(self) -> None:
        """Closes the port and breaks every connection, as a process that dies."""
        self.end()
        for connection in list(self._connections):
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def __enter__(self) -> DriverServer:
        return self

    def __exit__(self, *args: object) -> None:
        self.end()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        path, _, query = handler.path.partition("?")
        raw = self._read(handler)
        asked = Asked(handler.command, path, query, dict(handler.headers), raw, time.monotonic())
        dialect = wire.dialect_of(path)
        try:
            with self._lock:
                (self.probed if QUESTION.encode() in raw else self.asked).append(asked)
                if dialect is not None and handler.command == "POST":
                    number = 1 + sum(each.conversation is not None for each in self.asked)
                    try:
                        asked.conversation = wire.read(dialect, path, query, json.loads(raw), number)
                    except (ValueError, KeyError, TypeError, AttributeError) as error:
                        asked.entry = Failure(400, message=f"the request can't be read: {error!r}")
                asked.entry = asked.entry or self._entry(asked)
            self._answer(handler, asked, dialect or self._dialect_of_error(path))
        except OSError:
            self.broken_off += 1
            handler.close_connection = True

    @staticmethod
    def _read(handler: BaseHTTPRequestHandler) -> bytes:
        if "chunked" not in (handler.headers.get("Transfer-Encoding") or "").lower():
            return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        parts = []
        while size := int(handler.rfile.readline().split(b";")[0], 16):
            parts.append(handler.rfile.read(size))
            handler.rfile.readline()
        handler.rfile.readline()
        return b"".join(parts)

    @staticmethod
    def _dialect_of_error(path: str) -> str:
        return GEMINI if path.startswith("/v1beta") else ANTHROPIC if "/messages" in path else wire.CHAT

    def _shown(self, asked: Asked) -> set[str]:
        headers = {name.lower(): value for name, value in asked.headers.items()}
        bearer = headers.get("authorization", "").removeprefix("Bearer ")
        keys = {bearer, headers.get("x-api-key", ""), headers.get("x-goog-api-key", "")}
        return keys | set(parse_qs(asked.query).get("key", []))

    def _entry(self, asked: Asked) -> Entry | None:
        """What is played; None: the request is no generation."""
        if self.key is not None and self.key not in self._shown(asked) and asked.path != "/health":
            return Failure(401, message="invalid API key")
        conversation = asked.conversation
        if conversation is None:
            return None
        if self.model is not None and conversation.model != self.model:
            return Failure(404, message=f"the model `{conversation.model}` does not exist")
        if any(asked is each for each in self.probed):
            return ASIDE
        if self.context_tokens is not None and conversation.tokens_in > self.context_tokens:
            return overflow(conversation, self.context_tokens)
        if callable(self.script):
            return self.script(conversation)
        if not conversation.tools and any(each.tools for each in self.conversations):
            return ASIDE
        self.played += 1
        if self.played <= len(self.script):
            return self.script[self.played - 1]
        last = next((each for each in reversed(self.script) if not isinstance(each, Failure)), ASIDE)
        return Turn((last.turn if isinstance(last, Pace) else last).text or "done")

    def _answer(self, handler: BaseHTTPRequestHandler, asked: Asked, dialect: str) -> None:
        entry, conversation = asked.entry, asked.conversation
        if isinstance(entry, Failure) and entry.status:
            kind = entry.kind or KINDS.get(entry.status, "api_error")
            body = entry.body or json.dumps(wire.error(dialect, entry.status, kind, entry.message)).encode()
            after = {"Retry-After": f"{entry.retry_after_s:g}"} if entry.retry_after_s is not None else {}
            self._send(handler, entry.status, body, after)
        elif conversation is None or entry is None:
            self._other(handler, asked)
        else:
            pace = entry if isinstance(entry, Pace) else Pace(entry.turn if isinstance(entry, Failure) else entry)
            cut = entry.cut_after if isinstance(entry, Failure) else None
            try:
                answer = wire.answer_to(conversation, pace.turn)
            except LookupError as error:
                self._send(handler, 500, json.dumps(wire.error(dialect, 500, "api_error", str(error))).encode())
                return
            time.sleep(pace.after_s)
            if conversation.stream:
                self._stream(handler, wire.events(conversation, answer), pace.event_s, cut)
            else:
                body = json.dumps(wire.whole(conversation, answer)).encode()
                self._send(handler, 200, body, cut=cut)

    def _other(self, handler: BaseHTTPRequestHandler, asked: Asked) -> None:
        name = self.model or "scripted"
        status, answer = 200, {}
        if asked.path.endswith("/models"):
            models = [{"name": f"models/{name}", "id": name, "object": "model", "created": 1, "owned_by": "tests"}]
            answer = {"object": "list", "data": models, "models": models}
        elif asked.path.endswith(("/count_tokens", ":countTokens")):
            tokens = max(1, len(asked.raw) // 4)
            answer = {"input_tokens": tokens, "totalTokens": tokens}
        elif asked.path not in ("/health", "/"):
            status, answer = 404, wire.error(wire.CHAT, 404, "not_found_error", asked.path)
        self._send(handler, status, json.dumps(answer).encode())

    def _send(self, handler: Any, status: int, body: bytes, headers: Any = None, cut: int | None = None) -> None:
        handler.send_response(status)
        told = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
        for name, value in told.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body[:cut])
        if cut is not None:
            self._break(handler)

    def _stream(self, handler: Any, events: Iterator[bytes], event_s: float, cut: int | None) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/event-stream")
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        for number, event in enumerate(events):
            if number == cut:
                self._break(handler)
                return
            if number and event_s:
                time.sleep(event_s)
            handler.wfile.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")
            handler.wfile.flush()
        handler.wfile.write(b"0\r\n\r\n")

    @staticmethod
    def _break(handler: BaseHTTPRequestHandler) -> None:
        handler.wfile.flush()
        handler.close_connection = True
        handler.connection.shutdown(socket.SHUT_RDWR)
