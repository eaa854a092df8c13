"""How many may be connected to a gateway, and for how long without a request: whoever connects needs no token for that."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger("autorl_hpc.gateway")

MAX_CONNECTIONS: Final = 2048
OF_FILES: Final = 4
"""Not more than one of so many descriptors is a client's: each stream has a connection to the driver too, and many may come at once."""

HEAD_S: Final = 20.0
"""From a connection's beginning to the end of its first request's head. Later ones are awaited as long as connections are kept."""


def most_connections(files: int) -> int:
    """For a process that may have so many descriptors; fewer than 0: any number, as the kernel says it."""
    return MAX_CONNECTIONS if files < 0 else max(1, min(MAX_CONNECTIONS, files // OF_FILES))


def guarded(handler: Any, *, most: int, head_s: float = HEAD_S, **named: Any) -> web.Server:
    """A server that closes connections beyond a number, and those that say nothing.

    Args:
        handler: answers requests.
        most: connections at once; more are closed at once.
        head_s: from a connection's beginning to its first whole request head.
        named: for aiohttp's server.
    """
    from aiohttp import web

    silent: dict[Any, asyncio.TimerHandle] = {}

    def speaks(connection: Any) -> None:
        if (timer := silent.pop(connection, None)) is not None:
            timer.cancel()

    def request(message: Any, payload: Any, protocol: Any, writer: Any, task: Any) -> web.BaseRequest:
        speaks(protocol)
        return web.BaseRequest(message, payload, protocol, writer, task, asyncio.get_running_loop())

    class Guarded(web.Server):
        warned = False

        def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
            super().connection_made(handler, transport)
            loop = asyncio.get_running_loop()
            if len(self.connections) <= most:
                silent[handler] = loop.call_later(head_s, transport.abort)
                return
            loop.call_soon(transport.abort)
            if not self.warned:
                self.warned = True
                log.warning("%d connections at once: others are closed as long as these stay", most)

        def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
            super().connection_lost(handler, exc)
            speaks(handler)

    return Guarded(handler, request_factory=request, **named)
