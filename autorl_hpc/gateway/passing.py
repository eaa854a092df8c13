"""A request to the driver and its answer back, as they are: status, headers and each piece at the moment it comes."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Final

from autorl_hpc.gateway import headers as head
from autorl_hpc.gateway.books import Books
from autorl_hpc.gateway.call import Call
from autorl_hpc.gateway.driver import Driver, DriverLost, Sent
from autorl_hpc.gateway.keyhidden import KeyHidden
from autorl_hpc.gateway.routes import Route
from autorl_hpc.gateway.usage import Meter, unpacked
from autorl_hpc.gateway.usage_stream import WithoutUsage

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger("autorl_hpc.gateway")

MAX_ERROR_BYTES: Final = 2**20
MAX_KEPT_BYTES: Final = 32 * 2**20
DRAIN_S: Final = 30.0
"""A client that leaves doesn't end the answer: for so long it is read on, since the figures are told at its end."""

CLUSTERS_FAULT: Final = frozenset((401, 403, 408, 429))
"""Of the driver's errors below 500."""


class Passing:
    """Passes requests that were let in."""

    def __init__(self, driver: Driver, books: Books) -> None:
        self._driver, self._books = driver, books

    async def answer(
        self, request: web.BaseRequest, route: Route, call: Call, data: bytes, shown_in: str
    ) -> web.StreamResponse:
        """The driver's answer; `call` knows what became of it.

        Raises:
            Refusal: there is none.
        """
        without = WithoutUsage() if call.hides_usage else None
        headers = {
            **head.to_driver(request.headers.items()),
            "content-type": "application/json",
            "accept-encoding": "identity",
        }

        def keyed(key: str | None) -> dict[str, str]:
            call.reached = True
            return head.with_key(route.dialect, shown_in, key, bearer=self._driver.on_cluster)

        call.sent_at = time.monotonic()
        sent = await self._driver.send(route.path + route.query, headers, keyed, data, call.tries)
        async with sent.response as response:
            if not 200 <= response.status < 300:
                return await self._failed(sent, call)
            return await self._pass(request, sent, call, without)

    async def _failed(self, sent: Sent, call: Call) -> web.StreamResponse:
        """An error of the driver, with its status and never with the key in it."""
        from aiohttp import ClientError, web

        response, body = sent.response, b""
        if response.status < 400:
            raise DriverLost(502, "driver_redirects", f"it answers {response.status} and sends elsewhere", again=False)
        if response.status == 401:
            log.error(
                "the driver refuses the key of this experiment: correct the driver's `key_file` or `key_variable`"
            )
            await self._driver.address(fresh=True)  # the file may have been corrected
            raise KeyRefused()
        try:
            while len(body) < MAX_ERROR_BYTES and (part := await response.content.readany()):
                body += part
        except (ClientError, OSError, asyncio.TimeoutError):
            pass
        made = web.Response(status=response.status, reason=response.reason)
        for name, value in head.to_client(response.headers.items()):
            if name.lower() != "content-encoding":
                made.headers[name] = self._books.without_key(value, sent.key)
        body = unpacked(body, response.headers.get("Content-Encoding", ""), MAX_ERROR_BYTES)
        shown = self._books.without_key(body.decode("utf-8", "replace"), sent.key)
        body = body if shown.encode() == body else shown.encode()
        call.error = f"the driver answered {response.status}: {self._books.quoted(shown)}"
        made.body = body
        call.status, call.answer_bytes = response.status, len(body)
        call.first_byte_s = self._since(call)
        call.fault = "cluster" if response.status >= 500 or response.status in CLUSTERS_FAULT else "agent"
        return made

    @staticmethod
    def _since(call: Call) -> float:
        return time.monotonic() - (call.sent_at or call.began)

    async def _pass(
        self, request: web.BaseRequest, sent: Sent, call: Call, without: WithoutUsage | None
    ) -> web.StreamResponse:
        from aiohttp import web

        response = sent.response
        encoding = response.headers.get("Content-Encoding", "")
        if encoding.lower() not in ("", "identity"):
            without = None
        call.meter = Meter(response.headers.get("Content-Type", ""), encoding)
        call.status = response.status
        made = web.StreamResponse(status=response.status, reason=response.reason)
        for name, value in head.to_client(response.headers.items()):
            made.headers.add(name, self._books.without_key(value, sent.key))
        length = response.headers.get("Content-Length", "")
        if length.isdecimal() and without is None:
            made.content_length = int(length)
        elif request.version >= (1, 1):
            made.enable_chunked_encoding()
        try:
            await made.prepare(request)
        except ConnectionError:
            call.left = True
        call.whole = await self._pieces(sent, made, call, call.meter, without)
        if not call.whole and not call.left:
            call.error, call.fault = "the driver's answer broke off", "cluster"
            if request.transport is not None:
                request.transport.close()  # without the end of a whole answer: the client must see that it was cut
        return made

    async def _pieces(
        self, sent: Sent, made: web.StreamResponse, call: Call, meter: Meter, without: WithoutUsage | None
    ) -> bool:
        """Whether the answer came to its end."""
        from aiohttp import ClientError

        content, hidden = sent.response.content, KeyHidden(sent.key)
        deadline = float("inf")
        try:
            while True:
                if call.left:
                    deadline = min(deadline, time.monotonic() + DRAIN_S)
                    part = await asyncio.wait_for(content.readany(), max(0.0, deadline - time.monotonic()))
                else:
                    part = await content.readany()
                if not part:
                    break
                if call.first_byte_s is None:
                    call.first_byte_s = self._since(call)
                shown = hidden.feed(part)
                passed = shown if without is None else without.feed(shown)
                if passed and not call.left:
                    call.left = not await _write(made, passed)
                meter.feed(part)
                call.answer_bytes += len(part)
                if call.bodies is not None and len(call.bodies[1]) < MAX_KEPT_BYTES:
                    call.bodies[1].extend(shown)
            rest = hidden.end()
            if call.bodies is not None:
                call.bodies[1].extend(rest)
            if without is not None:
                rest = without.feed(rest) + without.end()
            if rest and not call.left:
                call.left = not await _write(made, rest)
            return True
        except (ClientError, OSError, asyncio.TimeoutError) as error:
            log.info("an answer broke off: %s", type(error).__name__)
            return False


class KeyRefused(DriverLost):
    """The provider's own words may quote a part of the key: they are replaced."""

    def __init__(self) -> None:
        super().__init__(401, "driver_key", "the driver refuses the key of this experiment", again=False)
        self.message = (
            "the driver refuses the suite's key. That is the cluster's fault, not yours; asking again doesn't help"
        )


async def _write(made: web.StreamResponse, data: bytes) -> bool:
    """Whether the client was still there."""
    try:
        await made.write(data)
    except (ConnectionError, RuntimeError):
        return False
    return True
