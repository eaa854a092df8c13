"""The scripted driver itself: what other tests build on says what it should, in every dialect."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from driver_server import Call, Conversation, DriverServer, Failure, Turn

TESTS = Path(__file__).resolve().parents[1]
SHELL = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}

REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "openai-chat": (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "hello"}],
            "tools": [{"type": "function", "function": {"name": "bash", "parameters": SHELL}}],
        },
    ),
    "openai-responses": (
        "/v1/responses",
        {"input": "hello", "tools": [{"type": "function", "name": "bash", "parameters": SHELL}]},
    ),
    "anthropic": (
        "/v1/messages",
        {
            "max_tokens": 10,
            "messages": [{"role": "user", "content": "hello"}],
            "tools": [{"name": "bash", "input_schema": SHELL}],
        },
    ),
    "gemini": (
        "/v1beta/models/scripted:generateContent",
        {
            "contents": [{"role": "user", "parts": [{"text": "hello"}]}],
            "tools": [{"functionDeclarations": [{"name": "bash", "parameters": SHELL}]}],
        },
    ),
}


def ask(driver: DriverServer, path: str, body: dict[str, Any], **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", driver.port, timeout=240)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        return answer.status, dict(answer.headers), answer.read()
    finally:
        connection.close()


def events(raw: bytes) -> list[Any]:
    lines = [
        line.removeprefix(b"data: ") for line in raw.replace(b"\r", b"").split(b"\n") if line.startswith(b"data: ")
    ]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def command_of(dialect: str, answer: dict[str, Any]) -> Any:
    """The command of the tool call in an answer that is no stream."""
    if dialect == "openai-chat":
        return json.loads(answer["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"])["command"]
    if dialect == "openai-responses":
        return json.loads(next(i for i in answer["output"] if i["type"] == "function_call")["arguments"])["command"]
    if dialect == "anthropic":
        return next(b for b in answer["content"] if b["type"] == "tool_use")["input"]["command"]
    parts = answer["candidates"][0]["content"]["parts"]
    return next(p["functionCall"] for p in parts if "functionCall" in p)["args"]["command"]


@pytest.mark.parametrize("dialect", REQUESTS)
def test_a_turn_comes_in_the_dialect_that_was_spoken(dialect: str) -> None:
    path, body = REQUESTS[dialect]
    with DriverServer([Turn("let me look", run="ls -l"), Turn("that was it")]) as driver:
        status, _, raw = ask(driver, path, {"model": "scripted", **body})
        assert status == 200
        assert command_of(dialect, json.loads(raw)) == "ls -l"
        assert driver.conversations[0].dialect == dialect
        assert driver.conversations[0].last == "hello"
        assert list(driver.conversations[0].tools) == ["bash"]


@pytest.mark.parametrize("dialect", REQUESTS)
def test_streams_hold_the_same_words_and_figures(dialect: str) -> None:
    path, body = REQUESTS[dialect]
    turn = Turn("some words and more of them", (Call("bash", {"command": "id"}),), None, 1000, 50, 600)
    with DriverServer([turn]) as driver:
        if dialect == "gemini":
            path = path.replace(":generateContent", ":streamGenerateContent") + "?alt=sse"
        else:
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        status, headers, raw = ask(driver, path, {"model": "scripted", **body})
        told = events(raw)
    assert status == 200
    assert headers["Content-Type"] == "text/event-stream"
    flat = json.dumps(told)
    assert "600" in flat and "50" in flat
    texts: list[str] = []
    for event in told:
        if dialect == "openai-chat" and event["choices"]:
            texts.append(event["choices"][0]["delta"].get("content") or "")
        elif dialect == "openai-responses" and event["type"] == "response.output_text.delta":
            texts.append(event["delta"])
        elif dialect == "anthropic" and event["type"] == "content_block_delta":
            texts.append(event["delta"].get("text", ""))
        elif dialect == "gemini":
            texts += [part.get("text", "") for part in event["candidates"][0]["content"]["parts"]]
    assert "".join(texts) == turn.text


def test_failures_are_entries_and_the_retry_gets_the_next() -> None:
    path, body = REQUESTS["openai-chat"]
    body = {"model": "scripted", **body}
    script = [Failure(429, retry_after_s=2), Failure(0, cut_after=2), Turn("at last")]
    with DriverServer(script) as driver:
        status, headers, _ = ask(driver, path, body)
        assert (status, headers["Retry-After"]) == (429, "2")
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            ask(driver, path, {**body, "stream": True})
        assert b"at last" in ask(driver, path, body)[2]
        assert b"at last" in ask(driver, path, body)[2], "the last turn is repeated"


@pytest.mark.parametrize("dialect", REQUESTS)
def test_a_wrong_key_an_unknown_model_and_a_long_conversation_are_refused(dialect: str) -> None:
    path, body = REQUESTS[dialect]
    with DriverServer([Turn("x")], key="right", model="scripted", context_tokens=200) as driver:
        right = {"Authorization": "Bearer right"}
        assert ask(driver, path, {"model": "scripted", **body})[0] == 401
        assert ask(driver, path.replace("scripted", "other"), {"model": "other", **body}, **right)[0] == 404
        assert ask(driver, path, {"model": "scripted", **body, "padding": "x" * 2000}, **right)[0] == 400
        assert ask(driver, path, {"model": "scripted", **body}, **right)[0] == 200
        assert ask(driver, path + "?key=right", {"model": "scripted", **body})[0] == 200


def test_a_function_answers_from_the_conversation() -> None:
    def script(conversation: Conversation) -> Turn:
        return Turn(f"turn {conversation.turns} after {conversation.last}")

    with DriverServer(script) as driver:
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "c"},
        ]
        raw = ask(driver, "/v1/chat/completions", {"model": "m", "messages": messages})[2]
    assert json.loads(raw)["choices"][0]["message"]["content"] == "turn 1 after c"


def test_requests_without_tools_are_answered_aside() -> None:
    path, body = REQUESTS["anthropic"]
    with DriverServer([Turn("first"), Turn("second")]) as driver:
        said = [json.loads(ask(driver, path, {"model": "m", **each})[2])["content"][0]["text"] for each in (
            body, {**body, "tools": []}, body)]  # fmt: skip
    assert said == ["first", "ok", "second"]


def test_it_runs_as_a_program(tmp_path: Path) -> None:
    script = tmp_path / "turns.json"
    script.write_text(json.dumps([{"text": "hello"}, {"status": 500}, {"text": "slow", "after_s": 0.1}]))
    command = [sys.executable, str(TESTS / "driver_server.py"), "--script", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline().rpartition(":")[2].partition("/")[0])
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=240)
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]})
            statuses = []
            for _ in range(3):
                connection.request("POST", "/v1/chat/completions", body)
                answer = connection.getresponse()
                answer.read()
                statuses.append(answer.status)
            connection.close()
            assert statuses == [200, 500, 200]
        finally:
            process.kill()
