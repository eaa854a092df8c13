"""Run the gateway's process (`python -m autorl_hpc.gateway`, started by the supervisor): its sockets and its protocol.

One JSON line in, see `request.Settings`. The first line out is `{"port": n}` (null without one): from then on it serves.
After each request comes a line with the run's totals. Lines in: `{"closed": "reason"}`, `{"elapsed_s": x}`, `{"ping": n}`,
answered by `{"pong": n}`, and `{"stop": true}`. It ends when its standard input ends, and the kernel kills it when its
parent thread is gone. Like the keeper it ignores TERM and similar signals.
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
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from autorl_hpc.errors import AutorlError, Exit
from autorl_hpc.files.processes import deny_inspection, die_with_parent
from autorl_hpc.gateway.accounting import TELL_AGAIN_S, UNDER_WAY_S, Books, say
from autorl_hpc.gateway.request import Settings, told
from autorl_hpc.gateway.server import Gateway
from autorl_hpc.gateway.upstream import Driver

if TYPE_CHECKING:
    from aiohttp import web

# --- limits for connections and for silent ones, because connecting needs no token

log = logging.getLogger("autorl_hpc.gateway")

MAX_CONNECTIONS: Final = 2048
OF_FILES: Final = 4
"""At most one in this many descriptors is a client's: each stream also has a connection to the driver."""

HEAD_S: Final = 20.0
"""From the start of a connection to the end of its first request's head. Later requests have the keep-alive time."""


def most_connections(files: int) -> int:
    """Return the limit of connections for a process with this limit of descriptors; below 0 means no limit."""
    return MAX_CONNECTIONS if files < 0 else max(1, min(MAX_CONNECTIONS, files // OF_FILES))


def guarded(handler: Any, *, most: int, head_s: float = HEAD_S, **named: Any) -> web.Server:
    """Return a server that closes connections beyond a number, and silent ones.

    Args:
        handler: answers requests.
        most: connections at once; further ones are closed immediately.
        head_s: seconds from the start of a connection to its first whole request head.
        named: arguments for aiohttp's server.
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


DEAF_TO: Final = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
)
BACKLOG: Final = 512
KEEPALIVE_S: Final = 75.0
READ_BYTES: Final = 2**20
"""Bytes of a request read at once; agents send their whole conversation each time."""

END_S: Final = 4.0
"""Used twice to wait for answers under way. In all less than the supervisor waits before it kills, so that their use is
logged."""

MAX_LINE_BYTES: Final = 2**20
MAX_LOG_LINES: Final = 10_000
MAX_SERVER_LINES: Final = 100
"""Limit for the HTTP server's lines, each with a traceback."""

MAX_SOCKET_PATH: Final = 100


def main() -> int:
    """Serve until the supervisor sends stop or is gone. Return the exit code."""
    parent = os.getppid()
    deny_inspection()
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(signal.SIGKILL)
    if os.getppid() != parent:
        return int(Exit.OK)
    _many_files()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s gateway %(levelname)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.addFilter(_AtMost(MAX_LOG_LINES))
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    logging.getLogger("aiohttp.server").addFilter(_not_the_clients)
    logging.getLogger("aiohttp.server").addFilter(_AtMost(MAX_SERVER_LINES))
    try:
        settings = told(json.loads(_first_line()))
        return asyncio.run(_serve(settings))
    except AutorlError as error:
        log.error("%s", error)
        return int(error.exit_code)
    except ValueError:
        log.error("the settings are no JSON")  # not quoted: they hold secrets
        return int(Exit.USAGE)


def _not_the_clients(record: logging.LogRecord) -> bool:
    """Drop records about invalid requests, which are the client's fault and may contain its token."""
    from aiohttp import web
    from aiohttp.client_exceptions import ClientPayloadError
    from aiohttp.http_exceptions import HttpProcessingError

    clients = (HttpProcessingError, web.RequestPayloadError, ClientPayloadError, ConnectionError)
    return not (record.exc_info and isinstance(record.exc_info[1], clients))


class _AtMost(logging.Filter):
    """Limits the lines of one process, because any process on the node could fill a disk with them."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self._left = lines

    def filter(self, record: logging.LogRecord) -> bool:
        self._left -= 1
        if self._left == 0:
            record.msg, record.args, record.exc_info = "too many lines: what follows is left out", (), None
        return self._left >= 0


def _first_line() -> bytes:
    """Read the first line byte by byte, because the event loop reads the rest."""
    line = b""
    while len(line) < MAX_LINE_BYTES and (byte := os.read(0, 1)) not in (b"", b"\n"):
        line += byte
    return line


async def _serve(settings: Settings) -> int:
    from aiohttp import web

    books = Books(settings)
    driver = Driver(settings.upstream)
    gateway = Gateway(settings, driver, books)
    server = guarded(
        gateway.handle,
        most=most_connections(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        access_log=None,
        keepalive_timeout=KEEPALIVE_S,
        tcp_keepalive=False,
        read_bufsize=READ_BYTES,
    )
    runner = web.ServerRunner(server, shutdown_timeout=END_S)
    await runner.setup()
    try:
        port = await _listen(runner, settings)
        os.set_blocking(1, False)
        say({"port": port})
        books.tell()
        await _until_told(gateway, books)
    except OSError as error:
        log.error("the gateway can't listen: %s", error.strerror)
        return int(Exit.ENVIRONMENT)
    finally:
        await runner.cleanup()
        await driver.close()
        await asyncio.to_thread(books.end)
        if settings.unix is not None:
            settings.unix.unlink(missing_ok=True)
    return int(Exit.OK)


async def _listen(runner: web.ServerRunner, settings: Settings) -> int | None:
    from aiohttp import web

    port = None
    for given in map(_inherited, reversed(settings.listening)):
        await web.SockSite(runner, given, backlog=BACKLOG).start()
        port = int(given.getsockname()[1]) if given.family == socket.AF_INET else None
    if settings.unix is not None:
        await web.SockSite(runner, unix_socket(settings.unix), backlog=BACKLOG).start()
    if settings.port is not None:
        listening = socket.create_server(("127.0.0.1", settings.port), backlog=BACKLOG)
        port = int(listening.getsockname()[1])
        await web.SockSite(runner, listening, backlog=BACKLOG).start()
    return port


def _inherited(descriptor: int) -> socket.socket:
    """Return an inherited socket.

    Raises:
        OSError: the descriptor is not open.
    """
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)


def listening_at(path: Path) -> tuple[socket.socket, socket.socket]:
    """Return sockets for `Settings.listening`: on a free port of the loopback, and at `path`. The kernel holds connections
    until a gateway accepts them, also while one restarts.

    Raises:
        OSError: they can't be created.
    """
    port = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    try:
        unix = unix_socket(path)
    except BaseException:
        port.close()
        raise
    unix.listen(BACKLOG)
    return port, unix


def unix_socket(path: Path) -> socket.socket:
    """Return a Unix socket at `path` that only this user can access. A socket left by an earlier gateway is removed. Paths
    that are too long for the kernel are reached through their folder's descriptor.

    Raises:
        OSError: it can't be created, or another kind of file is there.
    """
    if path.is_symlink() or (path.exists() and not stat.S_ISSOCK(path.lstat().st_mode)):
        raise FileExistsError(17, "something that is no socket lies at the socket's path", str(path))
    path.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        short = len(os.fsencode(path)) <= MAX_SOCKET_PATH
        made.bind(str(path) if short else f"/proc/self/fd/{folder}/{path.name}")
    except BaseException:
        made.close()
        raise
    finally:
        os.umask(before)
        os.close(folder)
    return made


async def _until_told(gateway: Gateway, books: Books) -> None:
    """Handle the supervisor's lines until it sends stop or closes the pipe."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    again = [
        asyncio.create_task(_every(TELL_AGAIN_S, books.tell_again)),
        asyncio.create_task(_every(UNDER_WAY_S, books.note_growth)),
    ]
    try:
        while line := await reader.readline():
            value = _command(line)
            if "closed" in value:
                gateway.close(str(value["closed"]))
            if isinstance(value.get("elapsed_s"), int | float):
                books.elapsed_told(float(value["elapsed_s"]))
            if "ping" in value:
                say({"pong": value["ping"]})
            if value.get("stop"):
                return
    finally:
        for each in again:
            each.cancel()


def _command(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        log.error("a line from the supervisor is no command")
        return {}
    return value


async def _every(seconds: float, what: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(seconds)
        what()


def _many_files() -> None:
    """Raise the limit of descriptors, because each stream has two connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192 if hard == resource.RLIM_INFINITY else min(8192, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
