"""What the gateway adds to the first byte, and how many streams it carries on one core.

The driver is a bare asyncio server that answers each request with a stream of chat events; the client counts what arrives. Both run on the
other core(s), the gateway alone on one. Direct and through the gateway in turns, in one run, since the machine is shared.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TOKEN = "bench-token-0123456789"
EVENT = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"content":" token"},"finish_reason":null}]}\n\n'
USAGE = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[],"usage":{"prompt_tokens":1000,"completion_tokens":%d,"total_tokens":1}}\n\n'


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            body = json.loads(await reader.readexactly(length))
            events, pause_s = body["max_tokens"], body.get("temperature", 0)
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
                + _chunk(EVENT)
            )
            for number in range(1, events):
                if pause_s:
                    await asyncio.sleep(pause_s)
                writer.write(_chunk(EVENT))
                del number
            writer.write(_chunk(USAGE % events) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _driver() -> None:
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, backlog=512)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _request(events: int, pause_s: float, padding: int = 0) -> bytes:
    messages = [{"role": "user", "content": "x" * padding}]
    body = json.dumps(
        {
            "model": "m",
            "messages": messages,
            "stream": True,
            "max_tokens": events,
            "temperature": pause_s,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(body) + body


async def _first_bytes(port: int, count: int, padding: int) -> list[float]:
    """Seconds to the first byte, one request after the other on one connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request, took = _request(1, 0, padding), []
    for _ in range(count):
        began = time.perf_counter()
        writer.write(request)
        data = await reader.read(1)
        took.append(time.perf_counter() - began)
        while not data.endswith(b"0\r\n\r\n"):
            data += await reader.read(65536)
    writer.close()
    return took


async def _stream(port: int, events: int, pause_s: float) -> tuple[int, float]:
    """Events of one stream that arrived, and how long it took."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.perf_counter()
    writer.write(_request(events, pause_s))
    data = b""
    while not data.endswith(b"0\r\n\r\n"):
        part = await reader.read(65536)
        if not part:
            break
        data += part
    writer.close()
    return data.count(b'" token"'), time.perf_counter() - began


async def _streams(port: int, count: int, events: int, pause_s: float) -> tuple[int, float]:
    """Events of all streams, and the longest time."""
    found = await asyncio.gather(*(_stream(port, events, pause_s) for _ in range(count)))
    return sum(each[0] for each in found), max(each[1] for each in found)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(
    streams: int = 200, tokens_a_second: int = 20, seconds: int = 10, requests: int = 400
) -> list[tuple[str, str]]:
    """Rows of what and how much."""
    rows = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    with tempfile.TemporaryDirectory() as folder:
        driver = subprocess.Popen([sys.executable, __file__], stdout=subprocess.PIPE)
        gateway = subprocess.Popen(
            [sys.executable, "-m", "autorl_hpc.gateway"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            assert driver.stdout and gateway.stdin and gateway.stdout
            behind = int(driver.stdout.readline())
            told = {
                "port": 0,
                "token": TOKEN,
                "upstream": {"url": f"http://127.0.0.1:{behind}/v1"},
                "model": "m",
                "log": f"{folder}/driver.jsonl",
            }
            gateway.stdin.write(json.dumps(told).encode() + b"\n")
            gateway.stdin.flush()
            port = int(json.loads(gateway.stdout.readline())["port"])
            os.sched_setaffinity(gateway.pid, {max(os.sched_getaffinity(0))})
            for name, padding in (("a short request", 0), ("a request of 400 kB", 400_000)):
                direct: list[float] = []
                through: list[float] = []
                cpu_s = _cpu_s(gateway.pid)
                for _ in range(requests // 20):
                    direct += asyncio.run(_first_bytes(behind, 20, padding))
                    through += asyncio.run(_first_bytes(port, 20, padding))
                cpu_s = _cpu_s(gateway.pid) - cpu_s
                quick, slow = _quantiles(direct), _quantiles(through)
                added = "; ".join(
                    f"{label} {1e3 * (b - a):+.2f} ms ({1e3 * a:.2f} to {1e3 * b:.2f})"
                    for label, a, b in zip(("median", "p99"), quick, slow, strict=True)
                )
                rows.append((f"first byte of {name}, added", added))
                rows.append((f"the gateway's CPU for {name}", f"{1e3 * cpu_s / requests:.2f} ms, the answer among it"))
            wanted, pause_s = streams * tokens_a_second * seconds, 1 / tokens_a_second
            alone, alone_s = asyncio.run(_streams(behind, streams, tokens_a_second * seconds, pause_s))
            before = _cpu_s(gateway.pid)
            came, came_s = asyncio.run(_streams(port, streams, tokens_a_second * seconds, pause_s))
            cpu_s = _cpu_s(gateway.pid) - before
            rows.append(
                (
                    f"{streams} streams of {tokens_a_second} tokens/s for {seconds} s",
                    f"{came} of {wanted} events; direct {alone}",
                )
            )
            rows.append(("their time", f"{came_s:.2f} s; direct {alone_s:.2f} s"))
            rows.append(
                (
                    "the gateway's CPU",
                    f"{cpu_s:.2f} s, {100 * cpu_s / came_s:.0f} % of a core; {1e6 * cpu_s / came:.0f} us an event",
                )
            )
            memory = next(
                line
                for line in Path(f"/proc/{gateway.pid}/status").read_text().splitlines()
                if line.startswith("VmHWM")
            )
            rows.append(("the gateway's memory, peak", f"{int(memory.split()[1]) // 1024} MiB"))
            rows.append(("load of the machine", " ".join(f"{each:.1f}" for each in os.getloadavg())))
        finally:
            gateway.kill()
            driver.kill()
    return rows


def _quantiles(values: list[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))]


if __name__ == "__main__":
    asyncio.run(_driver())
