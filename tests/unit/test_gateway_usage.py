"""Tokens by what drivers tell, whatever the pieces in which it comes, and by bytes where they tell nothing."""

from __future__ import annotations

import gzip
import json
import zlib
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


def counted(
    parts: list[bytes], kind: str = "text/event-stream; charset=utf-8", encoding: str = "", whole: bool = True
) -> TokenUsage:
    meter = UsageMeter(kind, encoding)
    for part in parts:
        meter.feed(part)
    return meter.end(whole)


@OFTEN
@given(dialect=st.sampled_from(list(PATHS)), seed=st.integers(0, 10**6), crlf=st.booleans())
def test_streams_are_counted_in_whatever_pieces(dialect: str, seed: int, crlf: bool) -> None:
    data = b"".join(STREAMS[dialect])
    data = data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n") if crlf else data
    usage = counted(in_pieces(b": a comment\n\n" + data, seed))
    assert (usage.tokens_in, usage.tokens_out, usage.tokens_cached) == (1000, 50, 600)
    assert usage.out_is_last and usage.ended
    assert usage.words_bytes > 0


@pytest.mark.parametrize("dialect", PATHS)
@pytest.mark.parametrize("encoding", ["", "identity", "gzip", "deflate", "GZIP"])
def test_whole_answers_are_counted_also_packed(dialect: str, encoding: str) -> None:
    data = WHOLE[dialect]
    data = {"gzip": gzip.compress, "deflate": zlib.compress}.get(encoding.lower(), bytes)(data)
    usage = counted(in_pieces(data, 1), "application/json", encoding)
    assert (usage.tokens_in, usage.tokens_out, usage.tokens_cached) == (1000, 50, 600)


@pytest.mark.parametrize("dialect", PATHS)
def test_packed_streams_are_counted(dialect: str) -> None:
    usage = counted(in_pieces(gzip.compress(b"".join(STREAMS[dialect])), 2), encoding="gzip")
    assert (usage.tokens_in, usage.tokens_out) == (1000, 50)


def test_geminis_list_is_counted_whole_and_cut() -> None:
    events, _ = answers("gemini", "")
    usage = counted(events, "application/json")
    assert (usage.tokens_in, usage.tokens_out) == (1000, 50)
    cut = counted([b"".join(events)[:-300]], "application/json", whole=False)
    assert cut.tokens_in == 1000
    assert not cut.ended
    assert cut.words_bytes >= 8


@OFTEN
@given(dialect=st.sampled_from(list(PATHS)), at=st.integers(0, 5000))
def test_a_cut_stream_never_counts_more_than_it_said(dialect: str, at: int) -> None:
    data = b"".join(STREAMS[dialect])
    usage = counted([data[:at]], whole=False)
    assert usage.tokens_in in (None, 1000)
    assert (usage.tokens_out or 0) <= 50
    if at < len(data) // 2:
        assert not usage.ended


@OFTEN
@given(
    st.lists(
        st.binary(max_size=40) | st.sampled_from([b"data: ", b"\n\n", b'{"usage":', b"{}", b"null", b"[DONE]"]),
        max_size=20,
    )
)
def test_no_bytes_break_the_meter(parts: list[bytes]) -> None:
    for kind in ("text/event-stream", "application/json", ""):
        for encoding in ("", "gzip", "br"):
            usage = counted(parts, kind, encoding)
            assert usage.tokens_in is None or usage.tokens_in >= 0


@pytest.mark.parametrize(
    "told",
    [
        {"prompt_tokens": -5, "completion_tokens": 10**30},
        {"prompt_tokens": "many", "completion_tokens": None},
        {"prompt_tokens": True, "completion_tokens": [1]},
        {"input_tokens": {"a": 1}, "output_tokens": 1e400},
    ],
)
def test_figures_that_are_none_count_nothing(told: dict[str, Any]) -> None:
    usage = counted([json.dumps({"choices": [], "usage": told}).encode()], "application/json")
    assert not usage.tokens_in and not usage.tokens_out


@pytest.mark.parametrize("told", [0, -5, "12", None, True, 1e400, [3]])
@pytest.mark.parametrize("kind", ["chat", "responses", "anthropic"])
def test_an_output_that_no_figure_tells_is_not_told(told: Any, kind: str) -> None:
    answer: dict[str, Any] = {
        "chat": {
            "choices": [{"message": {"content": "w " * 100}}],
            "usage": {"prompt_tokens": 9, "completion_tokens": told},
        },
        "responses": {
            "object": "response",
            "output": [{"content": [{"text": "w " * 100}]}],
            "usage": {"input_tokens": 9, "output_tokens": told},
        },
        "anthropic": {
            "type": "message",
            "content": [{"text": "w " * 100}],
            "usage": {"input_tokens": 9, "output_tokens": told},
        },
    }[kind]
    usage = counted([json.dumps(answer).encode()], "application/json")
    assert not usage.out_is_told and usage.tokens_of_words >= 50
    assert usage.tokens_in == 9


def test_an_answer_without_words_may_have_no_tokens() -> None:
    told = {"choices": [{"message": {"content": ""}}], "usage": {"prompt_tokens": 9, "completion_tokens": 0}}
    assert counted([json.dumps(told).encode()], "application/json").out_is_told


@pytest.mark.parametrize("text", ["w " * 1000, "\u6c49" * 1000, "\U0001f642" * 1000], ids=["ascii", "han", "emoji"])
@pytest.mark.parametrize(
    "answer",
    [
        lambda text: {"choices": [{"message": {"content": text}}]},
        lambda text: {"choices": [{"message": {"tool_calls": [{"function": {"arguments": {"command": text}}}]}}]},
        lambda text: {"type": "message", "content": [{"type": "tool_use", "input": {"command": text}}]},
        lambda text: {"type": "message", "content": [{"type": "tool_use", "input": {"lines": [[text]]}}]},
        lambda text: {"candidates": [{"content": {"parts": [{"functionCall": {"args": {"a": {"b": text}}}}]}}]},
    ],
    ids=["words", "chat", "anthropic", "anthropic-list", "gemini"],
)
def test_what_no_figure_tells_is_estimated_by_bytes_in_calls_of_tools_too(
    answer: Callable[[str], Any], text: str
) -> None:
    usage = counted([json.dumps(answer(text)).encode()], "application/json")
    assert not usage.out_is_told
    assert len(text.encode()) // 4 <= usage.tokens_of_words <= len(text.encode()) // 4 + 10


def test_an_encoding_that_cant_be_read_is_estimated() -> None:
    usage = counted([b"x" * 400], encoding="br")
    assert usage.tokens_in is None
    assert usage.tokens_of_words == 101


def test_a_bomb_is_not_unpacked() -> None:
    bomb = gzip.compress(b"\0" * (70 * 2**20))
    usage = counted([bomb], "application/json", "gzip")
    assert usage.tokens_in is None


def test_anthropics_caches_are_part_of_the_input() -> None:
    told = {"input_tokens": 10, "cache_read_input_tokens": 900, "cache_creation_input_tokens": 100, "output_tokens": 5,
            "cache_creation": {"ephemeral_5m_input_tokens": 40, "ephemeral_1h_input_tokens": 60}}  # fmt: skip
    usage = counted([json.dumps({"type": "message", "usage": told}).encode()], "application/json")
    assert (usage.tokens_in, usage.tokens_cached, usage.written_5m, usage.written_1h) == (1010, 900, 40, 60)
    cost = TokenBudget(RunLimits(), Prices(price_in=1.0, price_out=10.0, price_cached=0.1), TokenTotals()).cost(usage)
    assert cost == pytest.approx((10 + 40 * 1.25 + 60 * 2 + 900 * 0.1 + 5 * 10) / 1e6)


COMPACTED = {
    "input_tokens": 23_000,
    "output_tokens": 1000,
    "iterations": [
        {"type": "compaction", "input_tokens": 80_000, "cache_read_input_tokens": 100_000, "output_tokens": 3500},
        {"type": "message", "input_tokens": 23_000, "output_tokens": 1000},
    ],
}


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_compaction_at_the_provider_took_is_counted(stream: bool) -> None:
    if stream:
        start = {"type": "message_start", "message": {"usage": {"input_tokens": 23_000, "output_tokens": 1}}}
        events = [start, {"type": "message_delta", "delta": {}, "usage": COMPACTED}, {"type": "message_stop"}]
        usage = counted([b"data: %s\n\n" % json.dumps(event).encode() for event in events])
    else:
        usage = counted([json.dumps({"type": "message", "usage": COMPACTED}).encode()], "application/json")
    assert (usage.tokens_in, usage.tokens_out, usage.tokens_cached) == (203_000, 4500, 100_000)


@pytest.mark.parametrize("rounds", [[], [None, 3], [{"input_tokens": -4}], {"a": 1}])
def test_iterations_that_tell_nothing_take_nothing_away(rounds: Any) -> None:
    told = {"input_tokens": 10, "output_tokens": 5, "iterations": rounds}
    usage = counted([json.dumps({"type": "message", "usage": told}).encode()], "application/json")
    assert (usage.tokens_in, usage.tokens_out) == (10, 5)


def test_thoughts_are_output() -> None:
    told = {"promptTokenCount": 10, "candidatesTokenCount": 5, "thoughtsTokenCount": 100, "toolUsePromptTokenCount": 3}
    usage = counted([json.dumps({"candidates": [], "usageMetadata": told}).encode()], "application/json")
    assert (usage.tokens_in, usage.tokens_out) == (13, 105)


# -------------------------------------------------------------------------------------------------- usage of chat's streams


@OFTEN
@given(seed=st.integers(0, 10**6), crlf=st.booleans())
def test_the_usage_event_alone_is_taken_out(seed: int, crlf: bool) -> None:
    data = b"".join(STREAMS["openai-chat"])
    expected = b"".join(event for event in STREAMS["openai-chat"] if b"prompt_tokens" not in event)
    if crlf:
        data, expected = data.replace(b"\n", b"\r\n"), expected.replace(b"\n", b"\r\n")
    without = WithoutUsage()
    out = b"".join(without.feed(piece) for piece in in_pieces(data, seed)) + without.end()
    assert out == expected
    assert len(expected) < len(data)


def test_whole_events_pass_at_once_and_an_unfinished_one_passes_at_the_end() -> None:
    without = WithoutUsage()
    for event in STREAMS["openai-chat"][:-2]:
        assert without.feed(event) == event
    assert without.feed(b"data: unfinished") == b""
    assert without.end() == b"data: unfinished"


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
