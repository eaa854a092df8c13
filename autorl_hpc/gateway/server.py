"""Check requests and let them in: path, token, body, model, hosted tools, budget.

Holds the list of models, the strict reader of JSON, and `Gateway`, which handles requests.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from autorl_hpc.gateway import hosted_tools
from autorl_hpc.gateway import request as routes
from autorl_hpc.gateway import token_usage as asking
from autorl_hpc.gateway import upstream as head
from autorl_hpc.gateway.accounting import Books
from autorl_hpc.gateway.request import ANTHROPIC, CHAT, GEMINI, Allowed, Refusal, Settings
from autorl_hpc.gateway.token_usage import CallRecord
from autorl_hpc.gateway.token_usage import asking as asking_usage
from autorl_hpc.gateway.upstream import Driver, DriverLost, Forwarder

if TYPE_CHECKING:
    from aiohttp import web

# --- the list of models, which holds only the run's driver


def model_listing(dialect: str, headers: Mapping[str, str], model: str, asked: str | None) -> bytes:
    """Return the list of models, or the one that was asked for, as JSON.

    Raises:
        Refusal: there is no such model.
    """
    if asked is not None and asked != model:
        raise Refusal(
            404, "model_not_found", f"the model {asked[:80]!r} does not exist here; this run's driver is {model!r}"
        )
    one: dict[str, Any]
    if dialect == GEMINI:
        methods = ["generateContent", "streamGenerateContent", "countTokens"]
        one = {"name": f"models/{model}", "displayName": model, "supportedGenerationMethods": methods}
        whole: dict[str, Any] = {"models": [one]}
    elif "anthropic-version" in headers:
        one = {"type": "model", "id": model, "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
        whole = {"data": [one], "has_more": False, "first_id": model, "last_id": model}
    else:
        one = {"id": model, "object": "model", "created": 0, "owned_by": "driver"}
        whole = {"object": "list", "data": [one]}
    return json.dumps(whole if asked is None else one).encode()


# --- strict JSON: bodies that two readers could read differently are refused, so that the driver sees what was checked here

MAX_DEPTH = 200
"""Limit of nesting; tools' schemas have about twenty levels."""


MAX_VALUES: Final = 300_000
"""Limit for one body: a value takes up to a hundred times its bytes while it is read."""

_STARTS: Final = b",[{"
_NESTS: Final = (dict, list)
_STRUCTURE: Final = re.compile(rb'"[^"]*"?|[\[{,]')


def read_object(data: bytes) -> dict[str, Any]:
    """Return the object in a request's body.

    Raises:
        Refusal: it is not UTF-8, not JSON, no object, too deep, has too many values, or a name twice in one object.
    """
    if has_more_values(data, MAX_VALUES):
        raise Refusal(413, "too_large", f"a request's body may have {MAX_VALUES:,} values")
    try:
        text = data.decode("utf-8", "strict")
    except UnicodeDecodeError:
        raise _bad("it is not UTF-8") from None
    if text.startswith("\ufeff"):
        raise _bad("it begins with a byte order mark")
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise _bad("it is nested too deeply") from None
    except ValueError as error:
        raise _bad(str(error)[:200]) from None
    if not isinstance(value, dict):
        raise _bad("it is no object")
    if _depth(value) > MAX_DEPTH:
        raise _bad("it is nested too deeply")
    return value


def has_more_values(data: bytes, most: int) -> bool:
    """Return whether JSON has more than `most` values, before parsing it and without memory per value. A value is the first
    one, follows a comma, or is the first in an object or list."""
    if len(data) - len(data.translate(None, _STARTS)) < most:
        return False
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    found = texts = 0
    for match in _STRUCTURE.finditer(plain):
        if plain[match.start()] == 0x22:
            texts += 1
        else:
            found += 1
        if found >= most or texts > 2 * most + 2:
            return True
    return False


def _bad(why: str) -> Refusal:
    return Refusal(400, "unreadable", f"the driver's gateway can't read this request's body: {why}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return made


def _constant(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


def _depth(value: Any) -> int:
    """Return the depth of nesting, without recursion."""
    deepest, level = 0, [value]
    while level and deepest <= MAX_DEPTH:
        deepest += 1
        level = [
            one
            for each in level
            for one in (each.values() if isinstance(each, dict) else each)
            if isinstance(one, _NESTS)
        ]
    return deepest


log = logging.getLogger("autorl_hpc.gateway")

MAX_BODY_BYTES: Final = 32 * 2**20
"""Limit for one request, as providers have it."""

MAX_BODIES_BYTES: Final = 256 * 2**20
"""Limit for all requests under way together."""

LARGE_BYTES: Final = 2**20
"""Larger bodies are parsed in a thread, one at a time, so that streams go on."""

MAX_AT_ONCE: Final = 1000
BODY_S: Final = 120.0
ONCE_ONLY: Final = ("Content-Type", "Content-Encoding", "Content-Length", "Transfer-Encoding", "Authorization")


class Gateway:
    """Answers requests.

    Args:
        books: totals, limits, log.
    """

    def __init__(self, settings: Settings, driver: Driver, books: Books) -> None:
        self._settings, self._books = settings, books
        self._passing = Forwarder(driver, books)
        self._names = frozenset((settings.model, *settings.aliases))
        self._allowed = Allowed(settings.tools)
        self._default_out = settings.max_output_tokens or asking.DEFAULT_ANSWER_TOKENS
        self._on_cluster = driver.on_cluster
        self._bodies_bytes = self._at_once = 0
        self._large = asyncio.Semaphore(1)
        self._closed: str | None = None

    def close(self, reason: str) -> None:
        """Refuse all requests from now on; answers under way go on."""
        self._closed = reason

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle one request and write exactly one line to the log, whatever happens."""
        from aiohttp import web

        target = routes.split(request.raw_path)
        call = CallRecord(routes.dialect_of(target.path), target.path[:200])
        try:
            return await self._answered(request, target, call)
        except Refusal as refusal:
            self._note(call, refusal)
            made = web.Response(status=refusal.status, body=refusal.body(call.dialect), headers=refusal.headers())
            if not request.content.at_eof():
                made.force_close()  # the rest of the body is not read
            return made
        finally:
            self._bodies_bytes -= call.request_bytes
            if not call.quiet:
                self._books.close(call)

    async def _answered(self, request: web.BaseRequest, target: routes.Target, call: CallRecord) -> web.StreamResponse:
        from aiohttp import web

        shown_in = head.shown_key(request.headers, routes.keys_in(target.query), self._settings.token)
        if "Upgrade" in request.headers:
            raise Refusal(400, "upgrade", "the driver's gateway passes plain HTTP requests only, no websockets")
        route = routes.route(request.method, target)
        if route.kind == "models":
            call.quiet = True
            listing = model_listing(route.dialect, request.headers, self._settings.model, route.model)
            return web.Response(body=listing, content_type="application/json")
        if self._closed is not None:
            raise Refusal(403, "driver_closed", f"the driver doesn't answer any more: {self._closed}"[:500])
        if self._at_once >= MAX_AT_ONCE:
            raise Refusal(429, "busy", f"{MAX_AT_ONCE} requests are under way", retry_after_s=2)
        head.check_beta(request.headers.items(), self._allowed)
        self._at_once += 1
        try:
            data = await self._body(request, call)
            if len(data) > LARGE_BYTES:
                async with self._large:
                    data = await asyncio.to_thread(self._look, route, data, call)
            else:
                data = self._look(route, data, call)
            call.number = self._books.number()
            call.generates = route.kind == "generate"
            wants = call.wants
            if call.generates and wants is not None:
                self._books.budget.enter(
                    call.number, wants.tokens_in, wants.tokens_out, wants.most_in, caches=route.dialect == ANTHROPIC
                )
            self._books.sending(call)
            try:
                return await self._passing.answer(request, route, call, data, shown_in)
            except DriverLost as lost:
                call.unanswered = lost.was_sent and not self._on_cluster
                raise
        finally:
            self._at_once -= 1

    def _look(self, route: routes.ApiRoute, data: bytes, call: CallRecord) -> bytes:
        """Parse and check a body, and free it, as it takes many times its size. Return the bytes to send; fills in `call`."""
        body = read_object(data)
        call.model = self._model(route, body)
        hosted_tools.check(route.dialect, body, self._allowed)
        call.wants = asking.asked(route.dialect, body, self._default_out)
        call.stream = call.wants.stream if route.stream is None else route.stream
        call.hides_usage = route.dialect == CHAT and call.stream and not call.wants.include_usage
        if self._books.keeps_bodies:
            call.bodies = (data, bytearray())
        return asking_usage(data, body) if call.hides_usage else data

    @staticmethod
    def _note(call: CallRecord, refusal: Refusal) -> None:
        call.status = refusal.status
        if isinstance(refusal, DriverLost):
            call.fault, call.error = "cluster", f"{refusal.code}: {refusal.detail}"
            log.warning("%s", call.error)
        else:
            call.refused, call.error = refusal.code, refusal.message

    async def _body(self, request: web.BaseRequest, call: CallRecord) -> bytes:
        given = request.headers
        for name in ONCE_ONLY:
            if len(given.getall(name, ())) > 1:
                raise Refusal(400, "headers", f"the header {name} stands twice")
        if given.get("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
            raise Refusal(415, "encoding", "send the body as it is, without a Content-Encoding")
        kind, _, parameters = given.get("Content-Type", "").partition(";")
        charset = parameters.strip().lower().replace('"', "")
        if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8", "charset=utf8"):
            raise Refusal(415, "content_type", "send JSON in UTF-8, as Content-Type: application/json")
        if (request.content_length or 0) > MAX_BODY_BYTES:
            raise _too_large()
        if given.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        try:
            return await asyncio.wait_for(self._read(request, call), BODY_S)
        except asyncio.TimeoutError:
            raise Refusal(408, "slow", f"the body did not come within {BODY_S:g} s") from None

    async def _read(self, request: web.BaseRequest, call: CallRecord) -> bytes:
        parts: list[bytes] = []
        while part := await request.content.readany():
            parts.append(part)
            call.request_bytes += len(part)
            self._bodies_bytes += len(part)
            if call.request_bytes > MAX_BODY_BYTES:
                raise _too_large()
            if self._bodies_bytes > MAX_BODIES_BYTES:
                raise Refusal(429, "busy", "too much is being sent at once", retry_after_s=2)
        return b"".join(parts)

    def _model(self, route: routes.ApiRoute, body: dict[str, Any]) -> str:
        named = body.get("model")
        if route.dialect == GEMINI:
            if named is not None and named not in (route.model, f"models/{route.model}"):
                raise Refusal(400, "model", "the body names another model than the address")
            named = route.model
        if not isinstance(named, str) or named not in self._names:
            shown = named[:80] if isinstance(named, str) else named
            own = self._settings.model
            raise Refusal(
                404, "model_not_found", f"the model {shown!r} does not exist here; this run's driver is {own!r}"
            )
        return named


def _too_large() -> Refusal:
    return Refusal(413, "too_large", f"a request may have {MAX_BODY_BYTES} bytes")
