"""Tokens by what drivers tell, whatever the pieces in which it comes, and by bytes where they tell nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from draws import OFTEN
from driver_answers import PATHS, STREAMS, WHOLE, answers, in_pieces
from hypothesis import given
from hypothesis import strategies as st

from autorl_hpc.gateway.accounting import TokenBudget, TokenTotals
from autorl_hpc.gateway.request import Prices, RunLimits
from autorl_hpc.gateway.token_usage import TokenUsage, UsageMeter, WithoutUsage, asking


def counted(parts: list[bytes], kind: str = "text/event-stream; charset=utf-8", whole: bool = True) -> TokenUsage:
    meter = UsageMeter(kind)
    for part in parts:
        meter.feed(part)
    return meter.end(whole)


def of_json(answer: Any) -> TokenUsage:
    return counted([json.dumps(answer).encode()], "application/json")


@OFTEN
@given(dialect=st.sampled_from(list(PATHS)), seed=st.integers(0, 10**6), crlf=st.booleans())
def test_streams_are_counted_in_whatever_pieces(dialect: str, seed: int, crlf: bool) -> None:
    data = b"".join(STREAMS[dialect])
    data = data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") if crlf else data
    usage = counted(in_pieces(b": a comment\n\n" + data, seed))
    assert (usage.tokens_in, usage.tokens_out, usage.tokens_cached) == (1000, 50, 600)
    assert usage.out_is_last and usage.ended and usage.words_bytes > 0


def test_whole_answers_and_geminis_list_are_counted() -> None:
    found = [counted(in_pieces(WHOLE[dialect], 1), "application/json") for dialect in PATHS]
    found.append(counted(answers("gemini", "")[0], "application/json"))
    assert {(usage.tokens_in, usage.tokens_out, usage.tokens_cached) for usage in found} == {(1000, 50, 600)}


@OFTEN
@given(dialect=st.sampled_from(list(PATHS)), at=st.integers(0, 5000))
def test_a_cut_stream_never_counts_more_than_it_said(dialect: str, at: int) -> None:
    data = b"".join(STREAMS[dialect])
    usage = counted([data[:at]], whole=False)
    assert usage.tokens_in in (None, 1000) and (usage.tokens_out or 0) <= 50
    assert not usage.ended or at >= len(data) // 2


@OFTEN
@given(
    st.lists(
        st.binary(max_size=40) | st.sampled_from([b"data: ", b"\n\n", b'{"usage":', b"{}", b"null", b"[DONE]"]),
        max_size=20,
    )
)
def test_no_bytes_break_the_meter(parts: list[bytes]) -> None:
    for kind in ("text/event-stream", "application/json", ""):
        assert (counted(parts, kind).tokens_in or 0) >= 0


EVENTS = "text/event-stream"


@pytest.mark.parametrize(
    ("data", "kind", "status"),
    [
        (b"", "application/json", 502),
        (b"", EVENTS, 502),
        (b"null", "application/json", 502),
        (b" <!doctype html>", "text/html", 502),
        (b"<html>", EVENTS, 502),
        (b": waiting\n\ndata: [DONE]\n\n", EVENTS, 502),
        (b'{"error": "no worker is free"}', "application/json", 500),
        (b'{"error": {"code": 429, "message": "x"}}', "application/json", 429),
        (b'{"error": {"code": "context_length_exceeded", "type": "invalid_request_error"}}', "application/json", 400),
        (b'{"error": {"code": 1e400, "type": ["x"], "status": "RESOURCE_EXHAUSTED"}}', "application/json", 429),
        (b'{"object": "error", "message": "x", "type": "BadRequestError", "code": 400}', "application/json", 400),
        (b'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error"}}\n\n', EVENTS, 503),
        (b'data: {"response": {"status": "failed", "error": {"code": "server_error"}}}\n\n', EVENTS, 503),
        (b'{"error": null, "output": []}', "application/json", None),
        (b'{"input_tokens": 5}', "application/json", None),
        (b"plain words", "text/plain", None),
    ],
)
def test_an_error_a_page_or_nothing_is_no_answer(data: bytes, kind: str, status: int | None) -> None:
    meter = UsageMeter(kind)
    meter.feed(data)
    meter.end(True)
    assert (meter.failure or (None,))[0] == status and meter.answered == (status is None)


TEXTS: dict[str, Any] = {
    "chat": ({"choices": [{"message": {"content": "w " * 100}}]}, "prompt_tokens", "completion_tokens"),
    "responses": ({"object": "response", "output": [{"content": [{"text": "w " * 100}]}]}, "input_tokens", "output_tokens"),
    "anthropic": ({"type": "message", "content": [{"text": "w " * 100}]}, "input_tokens", "output_tokens"),
}  # fmt: skip


@pytest.mark.parametrize("told", [0, -5, "12", None, True, 1e400, [3]])
@pytest.mark.parametrize("kind", TEXTS)
def test_an_output_that_no_figure_tells_is_not_told(told: Any, kind: str) -> None:
    answer, given_name, out_name = TEXTS[kind]
    usage = of_json({**answer, "usage": {given_name: 9, out_name: told}})
    assert not usage.out_is_told and usage.tokens_of_words >= 50 and usage.tokens_in == 9


@pytest.mark.parametrize("text", ["w " * 1000, "\u6c49" * 1000, "\U0001f642" * 1000], ids=["ascii", "han", "emoji"])
@pytest.mark.parametrize(
    "answer",
    [
        lambda text: {"choices": [{"message": {"content": text}}]},
        lambda text: {"choices": [{"message": {"tool_calls": [{"function": {"arguments": {"command": text}}}]}}]},
        lambda text: {"type": "message", "content": [{"type": "tool_use", "input": {"lines": [[text]]}}]},
        lambda text: {"candidates": [{"content": {"parts": [{"functionCall": {"args": {"a": {"b": text}}}}]}}]},
    ],
    ids=["words", "chat", "anthropic", "gemini"],
)
def test_what_no_figure_tells_is_estimated_by_bytes_in_calls_of_tools_too(
    answer: Callable[[str], Any], text: str
) -> None:
    usage = of_json(answer(text))
    assert not usage.out_is_told
    assert len(text.encode()) // 4 <= usage.tokens_of_words <= len(text.encode()) // 4 + 10


def test_anthropics_caches_are_part_of_the_input() -> None:
    told = {"input_tokens": 10, "cache_read_input_tokens": 900, "cache_creation_input_tokens": 100, "output_tokens": 5,
            "cache_creation": {"ephemeral_5m_input_tokens": 40, "ephemeral_1h_input_tokens": 60}}  # fmt: skip
    usage = of_json({"type": "message", "usage": told})
    assert (usage.tokens_in, usage.tokens_cached, usage.written_5m, usage.written_1h) == (1010, 900, 40, 60)
    cost = TokenBudget(RunLimits(), Prices(price_in=1.0, price_out=10.0, price_cached=0.1), TokenTotals()).cost(usage)
    assert cost == pytest.approx((10 + 40 * 1.25 + 60 * 2 + 900 * 0.1 + 5 * 10) / 1e6)


COMPACTION = {"type": "compaction", "input_tokens": 80_000, "cache_read_input_tokens": 100_000, "output_tokens": 3500}
MESSAGE = {"input_tokens": 23_000, "output_tokens": 1000}


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_compaction_at_the_provider_took_is_counted(stream: bool) -> None:
    told = {**MESSAGE, "iterations": [COMPACTION, {"type": "message", **MESSAGE}]}
    if stream:
        start = {"type": "message_start", "message": {"usage": {"input_tokens": 23_000, "output_tokens": 1}}}
        events = [start, {"type": "message_delta", "delta": {}, "usage": told}, {"type": "message_stop"}]
        usage = counted([b"data: %s\n\n" % json.dumps(event).encode() for event in events])
    else:
        usage = of_json({"type": "message", "usage": told})
    assert (usage.tokens_in, usage.tokens_out, usage.tokens_cached) == (203_000, 4500, 100_000)


def test_thoughts_are_output() -> None:
    told = {"promptTokenCount": 10, "candidatesTokenCount": 5, "thoughtsTokenCount": 100, "toolUsePromptTokenCount": 3}
    usage = of_json({"candidates": [], "usageMetadata": told})
    assert (usage.tokens_in, usage.tokens_out) == (13, 105)


# --- what is taken out of streams: usage that the client didn't ask for


@OFTEN
@given(seed=st.integers(0, 10**6), crlf=st.booleans())
def test_the_usage_event_alone_is_taken_out(seed: int, crlf: bool) -> None:
    data = b"".join(STREAMS["openai-chat"])
    expected = b"".join(event for event in STREAMS["openai-chat"] if b"prompt_tokens" not in event)
    if crlf:
        data, expected = data.replace(b"\n", b"\r\n"), expected.replace(b"\n", b"\r\n")
    without = WithoutUsage()
    out = b"".join(without.feed(piece) for piece in in_pieces(data, seed)) + without.end()
    assert out == expected and len(expected) < len(data)


@pytest.mark.parametrize("text", ['{"stream":true}', ' \n{ "stream" : true, "x": "ä{" }', '{"stream_options":null,"stream":true}',
                                  '{"stream_options":{"include_usage":false,"include_obfuscation":false}}'])  # fmt: skip
def test_asking_for_usage_changes_nothing_else(text: str) -> None:
    data, body = text.encode(), json.loads(text)
    made = json.loads(asking(data, body))
    assert made.pop("stream_options")["include_usage"] is True
    body.pop("stream_options", None)
    assert made == body
    if "stream_options" not in text:
        assert asking(data, body).endswith(data[data.index(b"{") + 1 :])
