"""The gateway's real process between a client and a scripted driver."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gzip
import http.client
import json
import os
import re
import resource
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import needs
import pytest
from driver_server import Conversation, DriverServer, Failure, Pace, Turn
from gateways import KEY, MODEL, PATHS, STREAM, TOKEN, GatewayProcess, behind, request_of
from helpers import alive, wait_for

from autorl_hpc.files.safe_open import read_calls
from autorl_hpc.files.store import write_endpoint, write_key
from autorl_hpc.gateway.run_gateway import MAX_CONNECTIONS
from autorl_hpc.records.driver import DriverEndpoint

START = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Type: application/json\r\n".encode()
PRICES = {"price_in": 1.0, "price_out": 10.0, "price_cached": 0.1}


PLAYS: dict[str, Any] = {
    "429": Failure(429, retry_after_s=7, message="slow down"),
    "500": Failure(500, message=f"internal error, your key was {KEY}"),
    "403": Failure(403, message="not in your region"),
    "400": Failure(400, message="bad parameter"),
    "cut": Failure(0, cut_after=4, turn=Turn("an answer that breaks off", tokens_in=500, tokens_out=400)),
    "slow": Pace(Turn("one two three four five six", tokens_in=100, tokens_out=60), event_s=0.2),
    "html": Failure(502, body=b"<html>bad gateway</html>"),
    "empty": Failure(500, body=b" "),
    "402": Failure(402, message="Insufficient Balance"),
    "404": Failure(404, message="no such deployment"),
    "410": Failure(410, body=b""),
    "200 page": Failure(200, body=b"<html>sign in</html>"),
    "200 nothing": Failure(200, body=b""),
    "200 null": Failure(200, body=b"null"),
    "200 error": Failure(200, body=b'{"error": {"code": 503, "message": "overloaded"}}'),
    "200 words": Failure(200, body=b'{"error": "no worker is free"}'),
    "200 quota": Failure(200, body=b'{"error": {"code": 402, "message": "no credit"}}'),
    "200 too long": Failure(200, body=b'{"error": {"type": "invalid_request_error", "message": "prompt is too long"}}'),
}
AGENTS = ("400", "200 too long")
"""What a request itself brings about; all else that fails is the cluster's fault."""


def play(conversation: Conversation) -> Any:
    """Answers by the last message, so that one driver serves many tests: an entry of `PLAYS`, or its echo."""
    echo = Turn(f"you said: {conversation.last}", tokens_in=1000, tokens_out=50, tokens_cached=400)
    return PLAYS.get(conversation.last, echo)


pytestmark = pytest.mark.xdist_group("gateway")
"""One gateway serves most of these tests, and each finds what the ones before left."""


@pytest.fixture(scope="module")
def driver() -> Iterator[DriverServer]:
    with DriverServer(play, key=KEY, model=MODEL, context_tokens=4000) as server:
        yield server


@pytest.fixture(scope="module")
def gateway(driver: DriverServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with behind(driver, tmp_path_factory.mktemp("gateway"), prices=PRICES) as process:
        yield process


def both(driver: DriverServer, gateway: GatewayProcess, dialect: str, path: str, body: Any, unix: bool = False) -> Any:
    """The gateway's answer, after it was seen that the driver itself answers the same but for the number in ids."""
    answer = gateway.ask(path, body, unix=unix)
    connection = http.client.HTTPConnection("127.0.0.1", driver.port, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    connection.request("POST", path, json.dumps(body), headers)
    expected = connection.getresponse()
    number = re.compile(rb"(chatcmpl-|resp_|msg_|call_|fc_|toolu_)\d+")
    assert number.sub(b"", answer.body) == number.sub(b"", expected.read())
    assert (answer.status, answer.headers["Content-Type"]) == (expected.status, expected.headers["Content-Type"])
    assert answer.refused is None and driver.asked[-2].raw == json.dumps(body).encode(), (
        "the request's bytes pass as they are"
    )
    connection.close()
    return answer


def last_call(gateway: GatewayProcess) -> Any:
    """The log's last line once everything that was asked is logged."""
    return gateway.calls(max(1, gateway.posts))[-1]


@pytest.mark.parametrize("dialect", PATHS)
def test_answers_and_streams_pass_unchanged(driver: DriverServer, gateway: GatewayProcess, dialect: str) -> None:
    body = request_of(dialect, "hello there")
    for unix in (False, True):
        assert both(driver, gateway, dialect, PATHS[dialect], body, unix).status == 200
    body |= {} if dialect == "gemini" else {"stream": True}
    body |= {"stream_options": {"include_usage": True}} if dialect == "openai-chat" else {}
    path = STREAM + "?alt=sse" if dialect == "gemini" else PATHS[dialect]
    assert both(driver, gateway, dialect, path, body).headers["Content-Type"] == "text/event-stream"


def test_what_the_client_sends_reaches_the_driver_without_the_token(
    driver: DriverServer, gateway: GatewayProcess
) -> None:
    sent = {
        "User-Agent": "claude-cli/2.0", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b", "X-Stainless-OS": "Linux",
        "Cookie": "a=b", "X-Forwarded-For": "1.2.3.4", "X-HTTP-Method-Override": "GET", "x-api-key": TOKEN, "Accept-Encoding": "gzip, br",
        "OpenAI-Organization": "org-other", "Host": "evil.example",
    }  # fmt: skip
    assert gateway.ask("/v1/messages?beta=true", request_of("anthropic"), sent, token=None).status == 200
    asked = driver.asked[-1]
    got = {name.lower(): value for name, value in asked.headers.items()}
    assert got["user-agent"] == "claude-cli/2.0"
    assert (got["anthropic-beta"], got["anthropic-version"], got["x-stainless-os"]) == ("a,b", "2023-06-01", "Linux")
    assert got["x-api-key"] == KEY
    assert got["host"] == f"127.0.0.1:{driver.port}"
    assert got["accept-encoding"] == "identity"
    assert not {"cookie", "x-forwarded-for", "x-http-method-override", "openai-organization", "authorization"} & set(
        got
    )
    assert TOKEN not in json.dumps(asked.headers) + asked.query
    assert asked.query == "beta=true"


def test_pieces_pass_at_the_moment_they_come(tmp_path: Path) -> None:
    """The driver goes on only when the client has the event before."""
    go_on = threading.Semaphore(0)

    class Stepwise(DriverServer):
        def _stream(self, handler: Any, events: Iterator[bytes], event_s: float, cut: int | None) -> None:
            def one_by_one() -> Iterator[bytes]:
                for event in events:
                    yield event
                    assert go_on.acquire(timeout=60)

            super()._stream(handler, one_by_one(), event_s, cut)

    with Stepwise([Turn("one two three four five")] * 2) as driver, behind(driver, tmp_path) as gateway:
        for dialect, fields in (("openai-chat", {"stream_options": {"include_usage": True}}), ("anthropic", {})):
            connection = gateway.connect()
            body = json.dumps(request_of(dialect, stream=True, **fields))
            connection.request("POST", PATHS[dialect], body, {"Content-Type": "application/json", "x-api-key": TOKEN})
            answer = connection.getresponse()
            events = 0
            while line := answer.readline():
                if line == b"\n":
                    events += 1
                    go_on.release()
            connection.close()
            assert events > 5, dialect


def test_refusals_come_in_the_clients_dialect(gateway: GatewayProcess, driver: DriverServer) -> None:
    asked = len(driver.asked)
    tools: dict[str, Any] = {
        "openai-chat": {"web_search_options": {}},
        "openai-responses": {"tools": [{"type": "web_search"}]},
        "anthropic": {"tools": [{"type": "web_fetch_20250910", "name": "web_fetch"}]},
        "gemini": {"tools": [{"google_search": {}}]},
    }
    for dialect, fields in tools.items():
        answer = gateway.ask(PATHS[dialect], request_of(dialect, **fields))
        assert (answer.status, answer.refused) == (403, "hosted_tool")
        assert answer.headers["x-should-retry"] == "false"
        error = answer.json["error"]
        assert "is not allowed in this run" in error["message"]
        if dialect == "anthropic":
            assert answer.json["type"] == "error" and error["type"] == "permission_error"
        elif dialect == "gemini":
            assert (error["code"], error["status"]) == (403, "PERMISSION_DENIED")
        else:
            assert error["code"] == "hosted_tool"
    assert len(driver.asked) == asked
    last = last_call(gateway)
    assert (last.refused, last.status, last.tokens_in) == ("hosted_tool", 403, None)
    assert "googleSearch" in last.error


HIDDEN = json.dumps(request_of("openai-chat"))[:-1] + ', "tools": [{"type": "web_search"}]'
NOT_TAKEN: list[tuple[str, Any, dict[str, str], int]] = [
    (PATHS["openai-chat"], f'{HIDDEN}, "tools": []}}'.encode(), {}, 400),
    *(
        (PATHS["openai-chat"], f"{HIDDEN}}}".encode(), headers, 415)
        for headers in (
            {"Content-Type": "text/plain"},
            {"Content-Type": "application/json; charset=utf-7"},
            {"Content-Encoding": "gzip"},
        )
    ),
    ("http://evil.example/v1/chat/completions", request_of("openai-chat"), {}, 404),
    ("/v1/chat/../files", request_of("openai-chat"), {}, 404),
    ("/v1/chat/completions", request_of("openai-chat", model="gpt-99"), {}, 404),
    ("/v1/chat/completions", request_of("openai-chat", model=None), {}, 404),
    ("/v1beta/models/other:generateContent", request_of("gemini"), {}, 404),
    (PATHS["gemini"], request_of("gemini", model="models/other"), {}, 400),
    ("/v1/responses", request_of("openai-chat"), {"Upgrade": "websocket", "Connection": "Upgrade"}, 400),
]  # fmt: skip


def test_hosted_tools_other_paths_and_other_models_dont_slip_through(
    gateway: GatewayProcess, driver: DriverServer
) -> None:
    asked = len(driver.asked)
    for path, body, headers, status in NOT_TAKEN:
        answer = gateway.ask(path, body, headers)
        assert answer.status == status and answer.refused, (path, body, headers)
    assert gateway.ask("/v1/chat/completions", request_of("openai-chat"), method="DELETE").status == 405
    assert len(driver.asked) == asked


@pytest.mark.parametrize("token", [None, TOKEN[:-1], TOKEN + "x", KEY])
def test_without_the_runs_token_nothing_passes(
    gateway: GatewayProcess, driver: DriverServer, token: str | None
) -> None:
    """Nor is it told of: others on the node would fill this run's log."""
    asked, lines, refused = len(driver.asked), len(list(read_calls(gateway.log))), gateway.totals()["refused"]
    for path in (*PATHS.values(), "/v1/models", "/v1/files"):
        answer = gateway.ask(path, request_of("openai-chat"), token=token)
        assert (answer.status, answer.refused) == (401, "token")
    assert len(driver.asked) == asked
    assert (len(list(read_calls(gateway.log))), gateway.totals()["refused"]) == (lines, refused)


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\nContent-Length: 50\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 5\r\nX: a\r\n b\r\n",
        b"Content-Length : 5\r\n",
        b"Content-Length: 0x5\r\n",
        b"Content-Length: 5\nX: y\r\n",
        b"Authorization: Bearer other\r\nContent-Length: 5\r\n",
        b"Content-Type: text/plain\r\nContent-Length: 5\r\n",
    ],
)
def test_requests_are_not_smuggled(gateway: GatewayProcess, driver: DriverServer, head: bytes) -> None:
    """What follows is a second request, hidden in what may be taken for the first one's body."""
    asked = len(driver.asked)
    found = gateway.raw(START + head + b"\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
    assert found.startswith((b"HTTP/1.1 4", b"HTTP/1.0 4")), "an answer, and no success"
    assert b" 200 " not in found
    assert len(driver.asked) == asked


def test_large_bodies_are_refused_and_the_gateway_lives(gateway: GatewayProcess) -> None:
    told = gateway.raw(START + b"Content-Length: 99999999999\r\n\r\n{")
    assert b" 413 " in told
    with socket.create_connection(("127.0.0.1", gateway.port or 0), timeout=60) as connection:
        connection.sendall(START + b"Transfer-Encoding: chunked\r\n\r\n")
        piece = b"100000\r\n" + b" " * 2**20 + b"\r\n"
        try:
            for _ in range(40):
                connection.sendall(piece)
        except OSError:
            pass
    wait_for(lambda: any(call.refused == "too_large" and call.request_bytes > 2**25 for call in gateway.calls(1)))
    assert gateway.ask(PATHS["openai-chat"], request_of("openai-chat")).status == 200
    assert b" 400 " in gateway.raw(b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n")


@pytest.mark.parametrize("dialect", PATHS)
def test_the_drivers_errors_pass_without_the_key(driver: DriverServer, gateway: GatewayProcess, dialect: str) -> None:
    for word in (
        "429",
        "400",
        "403",
        "html",
        "empty",
        *(word for word in PLAYS if word[:3] in ("402", "404", "410", "200")),
    ):
        before = gateway.totals()
        answer = both(driver, gateway, dialect, PATHS[dialect], request_of(dialect, word))
        assert answer.headers.get("Retry-After") == ("7" if word == "429" else None)
        last = last_call(gateway)
        fault = "agent" if word in AGENTS else "cluster"
        assert (last.status, last.fault, last.tokens_in, last.cost_usd) == (PLAYS[word].status, fault, None, None)
        assert gateway.totals()["tokens_in"] == before["tokens_in"]
    answer = gateway.ask(PATHS[dialect], request_of(dialect, "500"))
    assert answer.status == 500 and KEY.encode() not in answer.body and b"your key was ***" in answer.body
    last = last_call(gateway)
    assert KEY not in last.model_dump_json() and "internal error" in last.error


@pytest.mark.parametrize("dialect", ["openai-chat", "openai-responses", "anthropic"])
def test_a_stream_that_the_driver_cuts_is_cut_and_counted_by_what_came(gateway: GatewayProcess, dialect: str) -> None:
    calls = gateway.totals()["calls"]
    with pytest.raises(http.client.IncompleteRead) as caught:
        gateway.ask(PATHS[dialect], request_of(dialect, "cut", stream=True))
    assert caught.value.partial.count(b"data: ") == 4
    gateway.totals(calls + 1)
    last = last_call(gateway)
    assert last.estimated and last.fault == "cluster" and not last.left
    assert 1 <= last.tokens_in <= 500 and last.tokens_out < 400
    if dialect == "anthropic":
        assert last.tokens_in == 500, "its first event tells the input"


@pytest.mark.parametrize("dialect", ["openai-chat", "anthropic"])
def test_a_client_that_leaves_pays_for_the_answer(gateway: GatewayProcess, dialect: str) -> None:
    calls = gateway.totals()["calls"]
    before = gateway.totals()["tokens_out"]
    connection = gateway.connect()
    body = json.dumps(request_of(dialect, "slow", stream=True))
    connection.request("POST", PATHS[dialect], body, {"Content-Type": "application/json", "x-api-key": TOKEN})
    answer = connection.getresponse()
    assert answer.readline()
    answer.close()
    connection.close()
    assert gateway.totals(calls + 1)["tokens_out"] - before == 60
    last = last_call(gateway)
    assert last.left and not last.estimated
    assert (last.tokens_in, last.tokens_out) == (100, 60)


def test_a_wrong_key_is_the_clusters_fault_and_is_quoted_nowhere(tmp_path: Path) -> None:
    with DriverServer([Turn("x")], key="another") as driver, behind(driver, tmp_path) as gateway:
        for dialect, path in PATHS.items():
            answer = gateway.ask(path, request_of(dialect))
            assert answer.status == 401
            assert "refuses the suite's key" in answer.json["error"]["message"]
            assert "invalid API key" not in answer.body.decode()
        last = gateway.calls(4)[-1]
        assert last.fault == "cluster" and "key" in last.error and last.refused is None
        gateway.end()
        assert "key_file" in gateway.stderr.read_text()
        for path in tmp_path.iterdir():
            if path.is_file():
                assert KEY not in path.read_text() and TOKEN not in path.read_text()


def test_silence_ends_by_the_timeout(tmp_path: Path) -> None:
    script = [Pace(Turn("late"), after_s=600), Pace(Turn("first, and then nothing"), event_s=600)]
    with DriverServer(script) as driver, GatewayProcess(tmp_path, {"url": driver.url, "timeout_s": 4.0}) as gateway:
        answer = gateway.ask(PATHS["openai-chat"], request_of("openai-chat"))
        assert (answer.status, answer.headers["x-should-retry"]) == (504, "true")
        with pytest.raises(http.client.IncompleteRead):
            gateway.ask(PATHS["openai-chat"], request_of("openai-chat", stream=True))
        first, second = gateway.calls(2)
        assert first.estimated and first.tokens_in and first.tokens_out == 0, "a provider took its input"
        assert first.fault == "cluster" and "driver_timeout" in first.error
        assert second.estimated and second.fault == "cluster"


@contextlib.contextmanager
def nobodys_port() -> Iterator[int]:
    """A port that is taken, so that nobody else gets it, and at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield int(taken.getsockname()[1])


def test_a_driver_that_cant_be_reached(tmp_path: Path) -> None:
    with (
        nobodys_port() as port,
        GatewayProcess(tmp_path, {"url": f"http://127.0.0.1:{port}/v1", "retries": 2}) as gateway,
    ):
        for dialect, path in PATHS.items():
            answer = gateway.ask(path, request_of(dialect))
            assert (answer.status, answer.headers["Retry-After"]) == (502, "10")
            assert answer.json["error"]["message"]
        last = gateway.calls(4)[-1]
        assert last.tries == 3 and last.fault == "cluster" and "can't be reached" in last.error


WORDS = json.dumps({"choices": [{"message": {"content": f"you are {KEY}, {KEY[:9]}"}}]}).encode()
STREAMED = b"data: " + WORDS.replace(b"message", b"delta") + b"\n\ndata: [DONE]\n\n"
PACKED = gzip.compress(f"no such key: {KEY}".encode())
STARS = b"*" * len(KEY)
ODD: dict[str, tuple[str, bytes, int, bytes | None, dict[str, str | None]]] = {
    "header": (f"200 OK\r\nX-Echo: Bearer {KEY}", b"{}", 200, b"{}", {"X-Echo": "Bearer ***"}),
    "control": ("200 OK\r\nX-Odd: a\x01b", b"{}", 200, b"{}", {"X-Odd": None}),
    "quoted": ("200 OK\r\nContent-Type: application/json", WORDS, 200, WORDS.replace(KEY.encode(), STARS), {}),
    "stream": ("200 OK\r\nContent-Type: text/event-stream", STREAMED, 200, STREAMED.replace(KEY.encode(), STARS), {}),
    "begun": ("200 OK", f"{{}} {KEY[:5]}".encode(), 200, f"{{}} {KEY[:5]}".encode(), {}),
    "packed": ("200 OK\r\nContent-Encoding: gzip", PACKED, 200, b"no such key: " + STARS, {"Content-Encoding": None}),
    "busy": ("429 No\r\nContent-Encoding: gzip\r\nRetry-After: 3", PACKED, 429, b"no such key: ***", {"Retry-After": "3"}),
    "moved": ("307 Go\r\nLocation: /v1/stolen", b"", 502, None, {"Location": None, "x-should-retry": "false"}),
    "switch": ("101 Switch\r\nUpgrade: websocket\r\nConnection: Upgrade", b"", 502, None, {}),
}  # fmt: skip
"""What a driver answers to a word, and what the client gets: status, body and headers."""


def test_odd_answers_of_a_driver_pass_or_are_its_fault_and_show_no_key(tmp_path: Path) -> None:
    """A key that it quotes is stars of its length, and a part of the key is nothing; no redirect is followed."""
    asked = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            length = 0
            asked.append(self.rfile.readline())
            while (line := self.rfile.readline().strip().lower()) != b"":
                length = int(line[15:]) if line.startswith(b"content-length:") else length
            head, body, *_ = ODD[json.loads(self.rfile.read(length))["messages"][0]["content"]]
            self.wfile.write(f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)

    bodies = tmp_path / "bodies"
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        with GatewayProcess(tmp_path, url, bodies=str(bodies)) as gateway:
            for number, (word, (_, _, status, body, headers)) in enumerate(ODD.items(), 1):
                answer = gateway.ask(PATHS["openai-chat"], request_of("openai-chat", word))
                call = gateway.calls(number)[-1]
                assert (answer.status, call.fault) == (status, None if status == 200 else "cluster"), word
                assert body is None or answer.body == body, word
                assert {name: answer.headers.get(name) for name in headers} == headers, word
        server.shutdown()
    for number, (word, (_, _, status, body, _)) in enumerate(ODD.items(), 1):  # written behind the log's line
        assert status != 200 or (bodies / f"{number:06d}.answer").read_bytes() == body, word
    assert len(asked) == len(ODD)


def endpoint(path: Path, url: str, *, ready: bool = True, generation: int = 1) -> None:
    state: Any = "ready" if ready else "starting"
    write_endpoint(
        path, DriverEndpoint(name="d", url=url, model=MODEL, generation=generation, host="h", pid=1, state=state)
    )


def test_a_driver_that_dies_and_comes_back_elsewhere(tmp_path: Path) -> None:
    file, key = tmp_path / "driver.json", tmp_path / "driver.key"
    write_key(key, "key-of-first")
    first = DriverServer([Turn("from the first")], key="key-of-first")
    endpoint(file, first.url)
    upstream = {"endpoint_file": str(file), "key_file": str(key), "timeout_s": 120, "retries": 0}
    with GatewayProcess(tmp_path, upstream) as gateway, concurrent.futures.ThreadPoolExecutor() as pool:
        body = request_of("anthropic")
        headers = {"x-api-key": TOKEN}
        assert b"from the first" in gateway.ask(PATHS["anthropic"], body, headers, token=None).body
        assert first.asked[-1].headers["authorization"] == "Bearer key-of-first", "vllm looks for a bearer token alone"
        first.kill()
        endpoint(file, first.url, ready=False)
        waiting = [pool.submit(gateway.ask, PATHS["anthropic"], body) for _ in range(5)]
        wait_for(lambda: sum(call.under_way for call in read_calls(gateway.log)) == 5, what="all of them")
        time.sleep(1.5)
        assert not any(each.done() for each in waiting)
        write_key(key, "key-of-second")
        with DriverServer([Turn("from the second")], key="key-of-second") as second:
            endpoint(file, second.url, generation=2)
            assert all(b"from the second" in each.result(60).body for each in waiting)
        assert gateway.calls(6)[-1].tries > 1


def test_a_certificate_that_nobody_signed(tmp_path: Path) -> None:
    """Certificates are checked: a driver's address is no reason to trust whoever answers there."""
    done = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem", "-days", "1", "-subj", "/CN=localhost"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        needs.skip("openssl", "there is no openssl here")
    with DriverServer([Turn("x")]) as driver:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
        driver._server.socket = context.wrap_socket(driver._server.socket, server_side=True)
        with GatewayProcess(tmp_path, f"https://localhost:{driver.port}/v1") as gateway:
            answer = gateway.ask(PATHS["openai-chat"], request_of("openai-chat"))
            assert answer.status == 502
            assert "certificate" in gateway.calls(1)[0].error
        assert not driver.asked


def test_a_budget_of_tokens_ends_with_a_refusal_and_holds_over_restarts(tmp_path: Path) -> None:
    turn = Turn("x", tokens_in=300, tokens_out=100)
    with DriverServer([turn]) as driver:
        limits = {"tokens": 1000, "cost_usd": None}
        driver.script = [turn] * 100
        with behind(driver, tmp_path, limits=limits, prices=PRICES) as gateway:
            first = [gateway.ask(PATHS["anthropic"], request_of("anthropic")).status for _ in range(2)]
            assert first == [200, 200]
            gateway.calls(2)  # what it tells is told before its line is written
            gateway.process.kill()
            gateway.process.wait()
        with behind(driver, tmp_path, limits=limits, prices=PRICES, attempt=2, elapsed_s=100.0) as gateway:
            told = gateway.totals()
            assert (told["tokens_in"], told["tokens_out"], told["calls"], told["exhausted"]) == (600, 200, 2, None)
            assert gateway.ask(PATHS["anthropic"], request_of("anthropic")).status == 200
            assert gateway.totals(3)["exhausted"] == "tokens"
            for dialect, path in PATHS.items():
                answer = gateway.ask(path, request_of(dialect))
                assert (answer.status, answer.refused) == (403, "budget_exhausted")
                assert "1,000 tokens is used up" in answer.json["error"]["message"]
            lines = gateway.calls(7)
            assert [line.number for line in lines] == list(range(1, 8))
            assert lines[2].attempt == 2 and lines[2].elapsed_s >= 100
            assert wait_for(lambda: gateway.totals()["refused"] == 4)


def test_what_was_under_way_when_the_gateway_died_is_counted(tmp_path: Path) -> None:
    slow = Pace(Turn("one two three four", tokens_in=300, tokens_out=100), event_s=60)
    limits = {"tokens": 100_000}
    with DriverServer([slow]) as driver, concurrent.futures.ThreadPoolExecutor() as pool:
        with behind(driver, tmp_path, limits=limits) as gateway:
            running = pool.submit(gateway.ask, PATHS["anthropic"], request_of("anthropic", max_tokens=700, stream=True))
            wait_for(lambda: driver.asked)
            wait_for(lambda: list(read_calls(gateway.log)))
            gateway.process.kill()
            gateway.process.wait()
            assert running.exception() is not None
        with behind(driver, tmp_path, limits=limits, attempt=2) as gateway:
            told = gateway.totals(1)
            assert told["tokens_out"] == 700 and told["tokens_in"] > 0
            assert next(read_calls(gateway.log)).estimated


def test_a_closed_gateway_refuses_and_lets_run_what_runs_and_bodies_are_kept(tmp_path: Path) -> None:
    bodies = tmp_path / "bodies"
    with (
        DriverServer([Pace(Turn("one two three four"), event_s=0.3)] * 2, key=KEY) as driver,
        behind(driver, tmp_path, bodies=str(bodies)) as gateway,
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        request = request_of("anthropic", f"my token is {TOKEN}", stream=True)
        running = pool.submit(gateway.ask, PATHS["anthropic"], request)
        wait_for(lambda: driver.asked)
        gateway.tell({"closed": "the wall clock's budget is over"})
        answer = wait_for(lambda: (found := gateway.ask(PATHS["gemini"], request_of("gemini"))).status != 200 and found)
        assert (answer.status, answer.refused) == (403, "driver_closed")
        assert "wall clock's budget is over" in answer.json["error"]["message"]
        assert running.result(60).body.endswith(b'{"type": "message_stop"}\n\n')
    assert sorted(path.name for path in bodies.iterdir()) == ["000001.answer", "000001.request"]
    assert b"my token is ***" in (bodies / "000001.request").read_bytes()
    assert (bodies / "000001.answer").read_bytes().endswith(b'{"type": "message_stop"}\n\n')
    assert {path.stat().st_mode & 0o777 for path in bodies.iterdir()} == {0o600}


def test_no_secret_is_in_argv_environment_log_or_words(gateway: GatewayProcess) -> None:
    folder = Path(f"/proc/{gateway.process.pid}")
    argv = (folder / "cmdline").read_bytes()
    assert TOKEN.encode() not in argv and KEY.encode() not in argv
    assert gateway.ask(PATHS["openai-chat"], request_of("openai-chat")).status == 200
    gateway.calls(1)
    log = gateway.log.read_text()
    assert TOKEN not in log and KEY not in log and "Bearer" not in log
    words = gateway.stderr.read_text()
    assert TOKEN not in words and KEY not in words and "Traceback" not in words
    assert gateway.socket.stat().st_mode & 0o777 == 0o600
    if os.getuid():
        with pytest.raises(PermissionError):
            (folder / "environ").read_bytes()


def test_it_ends_with_the_supervisor(tmp_path: Path) -> None:
    """By the end of its input; and where somebody else holds that open, by the kernel's hand."""
    with DriverServer([Turn("x")]) as driver:
        with behind(driver, tmp_path) as gateway:
            gateway.stdin.close()
            assert gateway.process.wait(600) == 0
        told = {"port": 0, "token": TOKEN, "upstream": {"url": driver.url}, "model": MODEL, "log": str(tmp_path / "l")}
        parent = (
            "import subprocess, sys, os, time\n"
            "p = subprocess.Popen([sys.executable, '-m', 'autorl_hpc.gateway'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
            f"p.stdin.write({json.dumps(json.dumps(told) + chr(10))}.encode()); p.stdin.flush()\n"
            "p.stdout.readline()\n"
            "holder = subprocess.Popen(['sleep', '300'], stdin=subprocess.DEVNULL, pass_fds=[p.stdin.fileno()], stdout=subprocess.DEVNULL)\n"
            "print(p.pid, holder.pid, flush=True)\n"
            "time.sleep(300)\n"
        )
        with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as supervisor:
            assert supervisor.stdout is not None
            pid, holder = map(int, supervisor.stdout.readline().split())
            supervisor.kill()
        try:
            wait_for(lambda: not alive(pid), what="the gateway's end")
        finally:
            os.kill(holder, signal.SIGKILL)


def test_wrong_settings_end_it_with_words_that_quote_no_secret() -> None:
    settings = {"token": KEY, "upstream": {"url": "http://x"}, "model": "m", "log": "x"}
    wrong = ({"token": "secret", "upstream": {"url": "ftp://x"}}, {"limits": {"cost_usd": 1}, "new": KEY})
    for told in (b"no json\n", *(json.dumps({**settings, **fields}).encode() + b"\n" for fields in wrong)):
        done = subprocess.run(
            [sys.executable, "-m", "autorl_hpc.gateway"], input=told, capture_output=True, check=False
        )
        assert done.returncode == 2 and done.stdout == b"" and done.stderr, told
        assert KEY.encode() not in done.stderr and b"secret" not in done.stderr and b"Traceback" not in done.stderr


def test_idle_connections_of_others_take_no_place(gateway: GatewayProcess) -> None:
    """Catches another run's agent that opens connections, says nothing, and so keeps this run from its driver."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    idle = [socket.create_connection(("127.0.0.1", gateway.port)) for _ in range(MAX_CONNECTIONS + 300)]
    try:
        for _ in range(3):
            assert gateway.ask(PATHS["openai-chat"], request_of("openai-chat")).status == 200
    finally:
        for each in idle:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
