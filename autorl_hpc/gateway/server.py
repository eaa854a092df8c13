"""Check requests and let them in: path, token, body (strict JSON), model, hosted tools, budget."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from autorl_hpc.gateway import hosted_tools, upstream
from autorl_hpc.gateway.accounting import Books, CallRecord
from autorl_hpc.gateway.request import (
    ANTHROPIC,
    CHAT,
    GEMINI,
    Allowed,
    ApiRoute,
    Refusal,
    Settings,
    dialect_of,
    keys_in,
    route,
    unreadable,
)
from autorl_hpc.gateway.token_usage import DEFAULT_ANSWER_TOKENS, asked, asking

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger("autorl_hpc.gateway")

# --- the list of models, which holds only the run's driver


def model_listing(dialect: str, headers: Mapping[str, str], model: str, wanted: str | None) -> bytes:
    """Return the list of models, or the one wanted, as JSON. Raises Refusal if there is none such."""
    if wanted not in (None, model):
        raise _no_model(wanted, model)
    one: dict[str, Any] = {"id": model, "object": "model", "created": 0, "owned_by": "driver"}
    whole: dict[str, Any] = {"object": "list"}
    if dialect == GEMINI:
        methods = ["generateContent", "streamGenerateContent", "countTokens"]
        one = {"name": f"models/{model}", "displayName": model, "supportedGenerationMethods": methods}
        whole = {"models": [one]}
    elif "anthropic-version" in headers:
        one = {"type": "model", "id": model, "display_name": model, "created_at": "1970-01-01T00:00:00Z"}
        whole = {"has_more": False, "first_id": model, "last_id": model}
    return json.dumps({"data": [one], **whole} if wanted is None else one).encode()


def _no_model(wanted: object, own: str) -> Refusal:
    message = f"the model {str(wanted)[:80]!r} does not exist here; this run's driver is {own!r}"
    return Refusal(404, "model_not_found", message)


# --- strict JSON: bodies that two readers could read differently are refused, so that the driver sees what was checked here

MAX_VALUES: Final = 600_000
"""Commas and opening brackets of one body, those in texts too: a value takes up to a hundred times its bytes while it is read."""


def read_object(data: bytes) -> dict[str, Any]:
    """Return the object in a request's body. Raises Refusal if it is not UTF-8, not JSON, no object, has too many values, or a
    name twice in one object."""
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise Refusal(413, "too_large", f"a request's body may have {MAX_VALUES:,} commas and opening brackets")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise unreadable("it is nested too deeply") from None
    except ValueError as error:
        raise unreadable(str(error)[:200]) from None
    if not isinstance(value, dict):
        raise unreadable("it is not an object")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name is given twice in one object")
    return made


def _constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


# --- requests

MAX_BODY_BYTES: Final = 32 * 2**20  # limit for one request, as providers have it
MAX_BODIES_BYTES: Final = 256 * 2**20  # limit for all requests under way together
MAX_AT_ONCE: Final = 1000
BODY_S: Final = 120.0
ONCE_ONLY: Final = ("Content-Type", "Content-Encoding", "Content-Length", "Transfer-Encoding", "Authorization")


class Gateway:
    """Answers requests. `books`: totals, limits, log."""

    def __init__(self, settings: Settings, driver: upstream.Driver, books: Books) -> None:
        self._settings, self._driver, self._books = settings, driver, books
        self._allowed = Allowed(settings.tools)
        self._bodies_bytes = self._at_once = 0
        self._closed: str | None = None
        self.unknown: dict[Any, asyncio.Transport] = {}  # connections that have not shown the token, oldest first

    def close(self, reason: str) -> None:
        """Refuse all requests from now on; answers under way go on."""
        self._closed = reason

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Handle one request and write exactly one line to the log, whatever happens."""
        from aiohttp import web

        path = request.raw_path.partition("?")[0]
        call = CallRecord(dialect_of(path), path[:200])
        try:
            return await self._answered(request, call)
        except Refusal as refusal:
            call.status = refusal.status
            if isinstance(refusal, upstream.DriverLost):
                call.fault, call.error = "cluster", f"{refusal.code}: {refusal.detail}"
                call.unanswered = refusal.was_sent and not self._driver.on_cluster
                log.warning("%s", call.error)
            else:
                call.refused, call.error = refusal.code, refusal.message
                call.quiet = refusal.code == "token"  # any process of the node can ask, and fill this run's log
            made = web.Response(status=refusal.status, body=refusal.body(call.dialect), headers=refusal.headers())
            if not request.content.at_eof():
                made.force_close()  # the rest of the body is not read
            return made
        finally:
            self._bodies_bytes -= call.request_bytes
            if not call.quiet:
                self._books.close(call)

    async def _answered(self, request: web.BaseRequest, call: CallRecord) -> web.StreamResponse:
        from aiohttp import web

        shown_in = upstream.shown_key(request.headers, keys_in(request.raw_path), self._settings.token)
        self.unknown.pop(request.protocol, None)
        if "Upgrade" in request.headers:
            raise Refusal(400, "upgrade", "the driver's gateway passes plain HTTP requests only, no websockets")
        found = route(request.method, request.raw_path)
        if found.kind == "models":
            call.quiet = True
            listing = model_listing(found.dialect, request.headers, self._settings.model, found.model)
            return web.Response(body=listing, content_type="application/json")
        if self._closed is not None:
            raise Refusal(403, "driver_closed", f"the driver doesn't answer any more: {self._closed}"[:500])
        if self._at_once >= MAX_AT_ONCE:
            raise Refusal(429, "busy", f"{MAX_AT_ONCE} requests are under way", retry_after_s=2)
        upstream.check_beta(request.headers.items(), self._allowed)
        self._at_once += 1
        try:
            data = await self._body(request, call)
            data = self._checked(found, data, call)
            call.number = self._books.number()
            call.generates, wants = found.kind == "generate", call.wants
            if call.generates and wants is not None:
                sizes = (wants.tokens_in, wants.tokens_out, wants.most_in)
                self._books.budget.enter(call.number, *sizes, caches=found.dialect == ANTHROPIC)
            self._books.sending(call)
            return await upstream.forward(self._driver, request, found, call, data, shown_in)
        finally:
            self._at_once -= 1

    def _checked(self, found: ApiRoute, data: bytes, call: CallRecord) -> bytes:
        """Parse and check a body, and free it, as it takes many times its size. Return the bytes to send; fills in `call`."""
        body = read_object(data)
        try:
            call.model = self._settings.model
            model = body.get("model")
            if found.dialect == GEMINI:
                if model not in (None, found.model, f"models/{found.model}"):
                    raise Refusal(400, "model", "the body names another model than the address")
                model = found.model
            if model != call.model:
                raise _no_model(model, call.model)
            hosted_tools.check(found.dialect, body, self._allowed)
        except RecursionError:
            raise unreadable("it is nested too deeply") from None
        call.wants = asked(found.dialect, body, self._settings.max_output_tokens or DEFAULT_ANSWER_TOKENS, len(data))
        call.stream = call.wants.stream if found.stream is None else found.stream
        call.hides_usage = found.dialect == CHAT and call.stream and not call.wants.include_usage
        if self._settings.bodies is not None:
            call.bodies = (data, bytearray())
        return asking(data, body) if call.hides_usage else data

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
        too_large = Refusal(413, "too_large", f"a request may have {MAX_BODY_BYTES} bytes")
        if (request.content_length or 0) > MAX_BODY_BYTES:
            raise too_large
        if given.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        data, ends_at = bytearray(), asyncio.get_running_loop().time() + BODY_S
        while True:
            try:
                left_s = ends_at - asyncio.get_running_loop().time()
                part = await asyncio.wait_for(request.content.readany(), left_s)
            except asyncio.TimeoutError:
                raise Refusal(408, "slow", f"the body did not come within {BODY_S:g} s") from None
            if not part:
                return bytes(data)
            data += part
            call.request_bytes += len(part)
            self._bodies_bytes += len(part)
            if call.request_bytes > MAX_BODY_BYTES:
                raise too_large
            if self._bodies_bytes > MAX_BODIES_BYTES:
                raise Refusal(429, "busy", "too much is being sent at once", retry_after_s=2)
