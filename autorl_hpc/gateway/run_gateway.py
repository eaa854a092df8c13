"""Run the gateway's process (`python -m autorl_hpc.gateway`, started by the supervisor): its sockets and its protocol.

One JSON line in (`request.Settings`); the first line out is `{"port": n}`, after each request one with the run's totals. Lines in:
`{"closed": "reason"}`, `{"elapsed_s": x}`, `{"ping": n}` (answered by `{"pong": n}`), `{"stop": true}`. It ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import signal
import socket
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from autorl_hpc.errors import Exit
from autorl_hpc.files.processes import deny_inspection, die_with_parent
from autorl_hpc.gateway.accounting import Books, say
from autorl_hpc.gateway.request import Settings
from autorl_hpc.gateway.server import Gateway
from autorl_hpc.gateway.upstream import Driver

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger("autorl_hpc.gateway")

MAX_CONNECTIONS: Final = 2048
"""At most a quarter of the descriptors: each stream also has a connection to the driver. Half of them are for clients that have not
shown the token yet, such as other runs' agents: one more closes the oldest of these."""

MOST_FILES: Final = 4 * MAX_CONNECTIONS
DEAF_TO: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
BACKLOG: Final = 512
KEEPALIVE_S: Final = 75.0
READ_BYTES: Final = 2**20  # bytes of a request read at once; agents send their whole conversation each time
END_S: Final = 4.0
"""For answers under way, twice: in all less than the supervisor waits before it kills."""

MAX_LINE_BYTES: Final = 2**20


def main() -> int:
    """Serve until the supervisor sends stop or is gone. Return the exit code."""
    parent = os.getppid()
    deny_inspection()
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent()
    if os.getppid() != parent:
        return int(Exit.OK)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s gateway %(levelname)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_ours)
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    line = b""  # read byte by byte, because the event loop reads the rest
    while len(line) < MAX_LINE_BYTES and (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    try:
        settings = Settings.model_validate_json(line)
    except ValueError:
        log.error("the settings can't be read")  # not quoted: they hold secrets
        return int(Exit.USAGE)
    return asyncio.run(_serve(settings))


def _is_ours(record: logging.LogRecord) -> bool:
    """Leave out what is said about invalid requests, which any process on the node can make."""
    from aiohttp import web
    from aiohttp.client_exceptions import ClientPayloadError
    from aiohttp.http_exceptions import HttpProcessingError

    clients = (HttpProcessingError, web.RequestPayloadError, ClientPayloadError, ConnectionError)
    return not (record.exc_info and isinstance(record.exc_info[1], clients))


async def _serve(settings: Settings) -> int:
    from aiohttp import web

    soft, hard = (
        MOST_FILES if limit == resource.RLIM_INFINITY else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    if soft < (files := min(MOST_FILES, hard)):
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    books, driver = Books(settings), Driver(settings.upstream)
    gateway = Gateway(settings, driver, books)
    runner = web.ServerRunner(_server(gateway, max(1, files // 4)), shutdown_timeout=END_S)
    await runner.setup()
    try:
        listening = [socket.socket(fileno=descriptor) for descriptor in settings.listening]
        if settings.unix is not None:
            listening.append(unix_socket(settings.unix))
        if settings.port is not None:
            listening.append(socket.create_server(("127.0.0.1", settings.port), backlog=BACKLOG))
        for each in listening:
            await web.SockSite(runner, each, backlog=BACKLOG).start()
        os.set_blocking(1, False)
        ports = [int(each.getsockname()[1]) for each in listening if each.family == socket.AF_INET]
        say({"port": ports[0] if ports else None})
        books.tell()
        reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        stop = False
        while not stop and (line := await reader.readline()):
            value = json.loads(line)
            if "closed" in value:
                gateway.close(str(value["closed"]))
            if "elapsed_s" in value:
                books.set_elapsed(float(value["elapsed_s"]))
            if "ping" in value:
                say({"pong": value["ping"]})
            stop = bool(value.get("stop"))
    except OSError as error:
        log.error("the gateway can't listen: %s", error.strerror)
        return int(Exit.ENVIRONMENT)
    finally:
        await runner.cleanup()
        await driver.session.close()
        await asyncio.to_thread(books.end)
        if settings.unix is not None:
            settings.unix.unlink(missing_ok=True)
    return int(Exit.OK)


def _server(gateway: Gateway, most: int) -> web.Server:
    from aiohttp import web

    class Limited(web.Server):
        """Closes connections beyond `most` at once, and the oldest without the token if these are too many."""

        def connection_made(self, handler: Any, transport: asyncio.Transport) -> None:
            super().connection_made(handler, transport)
            gateway.unknown[handler] = transport
            surplus = transport if len(self.connections) > most else None
            if len(gateway.unknown) > most // 2:
                surplus = gateway.unknown.pop(next(iter(gateway.unknown)))
            if surplus is not None:
                asyncio.get_running_loop().call_soon(surplus.abort)

        def connection_lost(self, handler: Any, exc: BaseException | None = None) -> None:
            gateway.unknown.pop(handler, None)
            super().connection_lost(handler, exc)

    options: dict[str, Any] = {"keepalive_timeout": KEEPALIVE_S, "tcp_keepalive": False, "read_bufsize": READ_BYTES}
    return Limited(gateway.handle, access_log=None, **options)


def listening_at(path: Path) -> tuple[socket.socket, socket.socket]:
    """Return sockets on a free port of the loopback, and at `path`. The kernel holds connections until a gateway accepts them, also
    while one restarts. Raises OSError if they can't be created."""
    unix = unix_socket(path)
    unix.listen(BACKLOG)
    return socket.create_server(("127.0.0.1", 0), backlog=BACKLOG), unix


def unix_socket(path: Path) -> socket.socket:
    """Return a Unix socket at `path` for this user alone, in the place of an earlier gateway's. Raises OSError if it can't be created, or
    another kind of file is there."""
    if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):
        raise FileExistsError(17, "a file that is not a socket is at the socket's path", str(path))
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        made.bind(str(path))
    finally:
        os.umask(before)
    return made
