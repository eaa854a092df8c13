"""Send requests to the driver, which may come back at another address, and forward its answers; say whose fault an error is."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import re
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from autorl_hpc.errors import AutorlError
from autorl_hpc.files.store import read_endpoint, read_key
from autorl_hpc.gateway.accounting import CallRecord
from autorl_hpc.gateway.request import ANTHROPIC, GEMINI, Allowed, ApiRoute, Refusal, Upstream, names
from autorl_hpc.gateway.token_usage import UsageMeter, WithoutUsage

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web

log = logging.getLogger("autorl_hpc.gateway")

CONNECT_S: Final = 30.0
PATIENCE_S: Final = 300.0  # for a driver of the cluster that restarts; never longer than `timeout_s`
LOOK_AGAIN_S: Final = 1.0
KEEPALIVE_S: Final = 4.0
"""Servers of open weights close idle connections after 5 s, and a request into a closing one is lost."""


class DriverLost(Refusal):
    """The driver can't be reached, or broke off before its answer; clients get 502 to 504. `detail` is for the log; with `again` a
    retry may help; with `was_sent` the driver may have taken the request."""

    def __init__(
        self, status: int, code: str, detail: str, message: str = "", *, again: bool = True, was_sent: bool = False
    ) -> None:
        when = " at the moment" if again else "; this is the cluster's fault"
        super().__init__(
            status, code, message or f"the driver can't be reached{when}", retry_after_s=10 if again else None
        )
        self.detail, self.passing, self.was_sent = detail, again, was_sent


@dataclass
class Sent:
    """An answer that has begun, and the key it was requested with."""

    response: aiohttp.ClientResponse
    key: str | None

    def without_key(self, text: str) -> str:
        """Return a text with the key masked; a driver may quote what it received."""
        return text.replace(self.key, "***") if self.key else text


class Driver:
    """Sends requests. Create it inside a running event loop."""

    def __init__(self, upstream: Upstream) -> None:
        import aiohttp

        self._upstream = upstream
        self.on_cluster = upstream.endpoint_file is not None
        self._address: tuple[str, str | None] | None = None
        self._said: str | None = None
        self.has: set[str] = set()  # paths that it has answered
        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=60),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=upstream.timeout_s),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def address(self, *, fresh: bool = False) -> tuple[str, str | None] | None:
        """Return the driver's URL with `/v1`, and its key; None if no driver is ready. With `fresh` they are read again."""
        if self._address is None or fresh:
            self._address = await asyncio.to_thread(self._read)
        return self._address

    def _read(self) -> tuple[str, str | None] | None:
        upstream = self._upstream
        try:
            key = upstream.key if upstream.key_file is None else read_key(upstream.key_file)
            url = upstream.url
            if upstream.endpoint_file is not None:
                endpoint = read_endpoint(upstream.endpoint_file)
                url = endpoint.url if endpoint is not None and endpoint.ready else None
        except (AutorlError, OSError) as error:
            if (said := str(error)) != self._said:
                self._said = said
                log.error("%s", said)
            return None
        return None if url is None else (url.rstrip("/"), key)

    async def send(
        self,
        path: str,
        headers: dict[str, str],
        keyed: Callable[[str | None], dict[str, str]],
        body: bytes,
        call: CallRecord,
    ) -> Sent:
        """Send a request and return the beginning of its answer. Raises DriverLost if none began. `keyed`: makes the
        headers that hold a key."""
        import aiohttp
        from yarl import URL

        began, broken_off, tries = time.monotonic(), False, call.tries
        patience_s = min(self._upstream.timeout_s, PATIENCE_S)
        while True:
            address = await self.address(fresh=bool(tries))
            try:
                if address is None:
                    tries.append("not ready")
                else:
                    url, key = address
                    proxy, target = None if is_here(url) else self._upstream.proxy, URL(url + path, encoded=True)
                    options = {"headers": {**headers, **keyed(key)}, "allow_redirects": False, "proxy": proxy}
                    return Sent(await self.session.post(target, data=body, **options), key)
            except (aiohttp.ClientError, OSError) as error:
                tries.append(type(getattr(error, "os_error", error)).__name__)
                if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
                    detail = f"its certificate is not trusted ({tries[-1]})"
                    raise DriverLost(502, "driver_certificate", detail, again=False) from None
                if not isinstance(error, aiohttp.ConnectionTimeoutError | aiohttp.ClientConnectorError):
                    if isinstance(error, aiohttp.ServerTimeoutError):
                        detail = f"nothing came within {self._upstream.timeout_s:g} s"
                        said = "the driver did not answer in time"
                        raise DriverLost(504, "driver_timeout", detail, said, was_sent=True) from None
                    if broken_off:  # once again, as the connection may have been idle
                        detail = "the connection broke before an answer"
                        raise DriverLost(502, "driver_broke_off", detail, was_sent=True) from None
                    broken_off = True
            waited_s = time.monotonic() - began
            if self.on_cluster and waited_s > patience_s:
                raise DriverLost(503, "driver_away", f"no driver for {waited_s:.0f} s ({tries[-1]})")
            if not self.on_cluster and len(tries) > self._upstream.retries:
                raise DriverLost(502, "driver_unreachable", f"it can't be reached ({tries[-1]})")
            pause_s = min(LOOK_AGAIN_S, patience_s / 5) if self.on_cluster else min(5.0, 0.25 * 2 ** len(tries))
            await asyncio.sleep(pause_s)


def is_here(url: str) -> bool:
    """Return whether an address is on this machine, where no proxy is used."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# --- headers: listed ones of requests are forwarded, and unlisted ones of answers; the key replaces the token

PASSED: Final = names(
    "accept accept-language user-agent openai-beta x-app x-goog-api-client idempotency-key x-request-id x-client-request-id originator "
    "session_id session-id conversation_id version http-referer x-title"
)
PASSED_PREFIXES: Final = ("anthropic-", "x-stainless-", "x-codex-", "x-claude-", "x-gemini-", "x-opencode-")

KEPT_BACK: Final = names(
    "connection keep-alive proxy-connection transfer-encoding te trailer upgrade content-length content-encoding set-cookie set-cookie2 "
    "www-authenticate proxy-authenticate location alt-svc server date openai-organization openai-project anthropic-organization-id via "
    "strict-transport-security"
)
"""Headers of answers that concern one connection only, or identify the account. Packed answers are forwarded unpacked."""

AUTHORIZATION, X_API_KEY, X_GOOG = "authorization", "x-api-key", "x-goog-api-key"
MAX_VALUE_CHARS: Final = 8192
_CONTROL: Final = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")


def shown_key(headers: Mapping[str, str], in_query: Iterable[str], token: str) -> str:
    """Return the header in which the client sent the run's token. Raises Refusal if it sent none, or another one."""
    scheme, _, bearer = headers.get(AUTHORIZATION, "").partition(" ")
    places = [(AUTHORIZATION, bearer.strip() if scheme.lower() == "bearer" else "")]
    places += [
        *((name, headers.get(name, "")) for name in (X_API_KEY, X_GOOG)),
        *((X_GOOG, value) for value in in_query),
    ]
    found = [name for name, value in places if hmac.compare_digest(value.encode("utf-8", "replace"), token.encode())]
    if not found:
        message = "show the run's token as API key: it is in OPENAI_API_KEY, ANTHROPIC_API_KEY, GEMINI_API_KEY"
        raise Refusal(401, "token", message)
    return found[0]


def to_driver(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the headers of a request that are forwarded; of a repeated one, the first."""
    kept: dict[str, str] = {}
    for name, value in headers:
        lowered = name.lower()
        known = lowered in PASSED or lowered.startswith(PASSED_PREFIXES)
        if known and lowered not in kept and len(value) <= MAX_VALUE_CHARS and value.isprintable():
            kept[lowered] = value
    return kept


def check_beta(headers: Iterable[tuple[str, str]], allowed: Allowed) -> None:
    """Raise Refusal if anthropic-beta asks for a context of a million tokens, whose input costs more than the configured prices."""
    for name, value in headers:
        for word in value.lower().split(",") if name.lower() == "anthropic-beta" else ():
            if word.strip().startswith("context-1m"):
                allowed.need(word.strip(), "in anthropic-beta the word")


def with_key(dialect: str, shown_in: str, key: str | None, *, bearer: bool) -> dict[str, str]:
    """Return the headers with the real key, where the client sent its token and the dialect reads it; `bearer` adds the one
    that open-weight servers read."""
    if key is None:
        return {}
    made = {}
    if (dialect, shown_in) in ((GEMINI, X_GOOG), (ANTHROPIC, X_API_KEY)):
        made[shown_in] = key
    if bearer or not made:
        made[AUTHORIZATION] = f"Bearer {key}"
    return made


def to_client(headers: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return the headers of an answer that are forwarded, without those with control characters, which HTTP servers refuse."""
    return [
        (name, value) for name, value in headers if name.lower() not in KEPT_BACK and not _CONTROL.search(name + value)
    ]


# --- a request to the driver and its answer, forwarded unchanged: status, headers, and each piece as it comes

MAX_ERROR_BYTES: Final = 2**20
MAX_KEPT_BYTES: Final = 32 * 2**20
DRAIN_S: Final = 30.0  # if a client leaves, the answer is read on for this long, because the usage comes at its end
REFUSES: Final = "driver_refuses: "
"""Before the words of an error that doesn't pass."""

KEY_KINDS: Final = names("invalid_api_key api_key_invalid")
CREDIT_KINDS: Final = names(
    "insufficient_quota insufficient_balance billing_error billing_not_active billing_hard_limit_reached"
)
MODEL_KINDS: Final = names("model_not_found deploymentnotfound")
OF_A_REQUEST: Final = frozenset((400, 404, 405, 406, 411, 413, 414, 415, 416, 417, 422, 431))
"""Statuses of an error that the request itself may have brought about: its parameters, its length, its path."""
MAX_SAID_CHARS: Final = 300


def error_kinds(body: str) -> frozenset[str]:
    """Return the words of an error's own fields, in lower case: never of its message, which may repeat what an agent wrote."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return frozenset()
    first = value[0] if isinstance(value, list) and value else value
    error = first.get("error", first) if isinstance(first, dict) else None
    if not isinstance(error, dict):
        return frozenset()
    details = error.get("details")
    rows = [error, *(each for each in (details if isinstance(details, list) else ()) if isinstance(each, dict))]
    words = [row.get(name) for row in rows for name in ("code", "type", "status", "reason")]
    return frozenset(word.lower() for word in words if isinstance(word, str))


def cluster_trouble(status: int, said: str, *, known: bool) -> tuple[str | None, bool]:
    """Return what a driver's error says of key, account, model and place, by its status and own fields; None if the request itself is
    at fault; and whether it may pass. `known`: its path is one that the driver has."""
    kinds, words = error_kinds(said), " ".join(said.split())[:MAX_SAID_CHARS]
    if status in (401, 403) or (status == 400 and kinds & KEY_KINDS):
        quoted = f": {words}" if status == 403 else ""  # the others' words may quote a part of the key
        return f"refuses the key of this experiment ({status}{quoted})", False
    if status == 402 or (status in (400, 429) and kinds & CREDIT_KINDS):
        return f"gives this account no answers ({status}: {words})", False
    if status == 410 or (status in (404, 405) and (known or kinds & MODEL_KINDS)):
        return f"knows no such model or address ({status}: {words})", False
    if 300 <= status < 400:
        return f"sends elsewhere ({status})", False
    if status in OF_A_REQUEST:
        return None, False
    return f"is not there at the moment ({status}: {words})", True


async def forward(
    driver: Driver, request: web.BaseRequest, route: ApiRoute, call: CallRecord, data: bytes, shown_in: str
) -> web.StreamResponse:
    """Forward a request. Return the driver's answer; its result is stored in `call`. Raises Refusal if there is no answer."""
    from aiohttp import ClientError, web

    def keyed(key: str | None) -> dict[str, str]:
        call.reached = True
        return with_key(route.dialect, shown_in, key, bearer=driver.on_cluster)

    headers = to_driver(request.headers.items())
    headers |= {"content-type": "application/json", "accept-encoding": "identity"}
    call.sent_at = time.monotonic()
    sent, body = await driver.send(route.path, headers, keyed, data, call), b""
    async with sent.response as response:
        status = response.status
        if 200 <= status < 300:
            passed = await _pass(request, sent, call)
            if call.fault is None:
                driver.has.add(route.path)
            return passed
        if status < 400:
            raise DriverLost(502, "driver_redirects", f"it answers {status} and sends elsewhere", again=False)
        if status == 401:  # its message may quote a part of the key
            log.error("the driver refuses the key of this experiment: correct its `key_file` or `key_variable`")
            await driver.address(fresh=True)  # the file may have been corrected
            said = (
                "the driver refuses the suite's key. That is the cluster's fault, not yours; asking again doesn't help"
            )
            raise DriverLost(401, "driver_key", "the driver refuses the key of this experiment", said, again=False)
        try:
            while len(body) < MAX_ERROR_BYTES and (part := await response.content.readany()):
                body += part
        except (ClientError, OSError, asyncio.TimeoutError):
            pass
        made = web.Response(status=status, reason=response.reason)
        for name, value in to_client(response.headers.items()):
            made.headers[name] = sent.without_key(value)
        shown = sent.without_key(body.decode("utf-8", "replace"))
        made.body = body if "***" not in shown else shown.encode()
        call.status, call.answer_bytes, call.first_byte_s = status, len(body), call.since_sent_s
        _blame(call, status, shown, route.path in driver.has)
        return made


def _blame(call: CallRecord, status: int, said: str, known: bool) -> None:
    problem, passes = cluster_trouble(status, said, known=known)
    lasts = problem is not None and not passes and status != 403  # some answer 403 to a text that they don't like
    call.error = f"{REFUSES if lasts else ''}the driver answered {call.status}: {said[:1000]}"
    call.fault = "agent" if problem is None else "cluster"


async def _pass(request: web.BaseRequest, sent: Sent, call: CallRecord) -> web.StreamResponse:
    from aiohttp import web

    response = sent.response
    call.meter = UsageMeter(response.headers.get("Content-Type", ""))
    call.status = response.status
    made = web.StreamResponse(status=response.status, reason=response.reason)
    for name, value in to_client(response.headers.items()):
        made.headers.add(name, sent.without_key(value))
    length = response.headers.get("Content-Length", "")
    if length.isdecimal() and not call.hides_usage and "Content-Encoding" not in response.headers:
        made.content_length = int(length)
    elif request.version >= (1, 1):
        made.enable_chunked_encoding()
    try:
        await made.prepare(request)
    except ConnectionError:
        call.left = True
    call.whole = await _pieces(sent, made, call, call.meter)
    if not call.whole and not call.left:
        call.error, call.fault = "the driver's answer broke off", "cluster"
        if request.transport is not None:
            request.transport.close()  # without the regular end of an answer, so that the client sees the cut
    call.meter.end(call.whole)
    if call.whole and (failure := call.meter.failure) is not None:
        _blame(call, failure[0], sent.without_key(failure[1]), known=True)
        if not call.meter.answered:
            call.meter = None  # as errors do, it costs nothing
    return made


async def _pieces(sent: Sent, made: web.StreamResponse, call: CallRecord, meter: UsageMeter) -> bool:
    from aiohttp import ClientError

    key = (sent.key or "").encode("utf-8", "surrogateescape")
    without = WithoutUsage() if call.hides_usage else None
    deadline = None
    try:
        while True:
            if call.left and deadline is None:
                deadline = time.monotonic() + DRAIN_S
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            part = await asyncio.wait_for(sent.response.content.readany(), left_s)
            if part and call.first_byte_s is None:
                call.first_byte_s = call.since_sent_s
            shown = part.replace(key, b"*" * len(key)) if key else part  # with the length that was announced
            meter.feed(part)
            call.answer_bytes += len(part)
            if call.bodies is not None and len(call.bodies[1]) < MAX_KEPT_BYTES:
                call.bodies[1].extend(shown)
            if without is not None:
                shown = without.feed(shown) + (b"" if part else without.end())
            if shown and not call.left:
                try:
                    await made.write(shown)
                except (ConnectionError, RuntimeError):
                    call.left = True
            if not part:
                return True
    except (ClientError, OSError, asyncio.TimeoutError) as error:
        log.info("an answer broke off: %s", type(error).__name__)
        return False
