"""Connections to a gateway: so many at once, and none that says nothing for long."""

from __future__ import annotations

import asyncio
import socket

import pytest
from helpers import PATIENCE_S

from autorl_hpc.gateway.run_gateway import MAX_CONNECTIONS, guarded, most_connections

HEAD = b"GET / HTTP/1.1\r\nHost: x\r\n"


@pytest.mark.parametrize("files, most", [(-1, MAX_CONNECTIONS), (1 << 20, MAX_CONNECTIONS), (1024, 256), (1, 1)])
def test_few_descriptors_make_few_connections(files: int, most: int) -> None:
    assert most_connections(files) == most


async def _knock(most: int, head_s: float) -> None:
    from aiohttp import web

    slow = asyncio.Event()

    async def handle(request: web.BaseRequest) -> web.Response:
        await slow.wait()
        return web.Response(text="hello")

    runner = web.ServerRunner(guarded(handle, most=most, head_s=head_s, access_log=None))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = int(runner.addresses[0][1])
    try:
        early = socket.create_connection(
            ("127.0.0.1", port)
        )  # the kernel takes it, and what it says, before the server looks
        early.sendall(HEAD + b"\r\n")
        asks = await asyncio.open_connection(sock=early)
        mute, halfway = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        halfway[1].write(HEAD)
        if most < 4:
            await _closed(await asyncio.open_connection("127.0.0.1", port))
            assert not mute[0].at_eof() and mute[0].exception() is None, "the first ones stay"
        else:
            await _closed(mute)
            await _closed(halfway)
        slow.set()
        assert b"200 OK" in await asyncio.wait_for(asks[0].readline(), PATIENCE_S)
    finally:
        await runner.cleanup()


async def _closed(one: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
    try:
        assert await asyncio.wait_for(one[0].read(), PATIENCE_S) == b""
    except ConnectionResetError:
        pass


def test_connections_beyond_the_number_are_closed_at_once() -> None:
    asyncio.run(_knock(most=3, head_s=10 * PATIENCE_S))


def test_who_sends_no_whole_head_is_closed_and_who_waits_for_an_answer_is_not() -> None:
    asyncio.run(_knock(most=10, head_s=1.0))
