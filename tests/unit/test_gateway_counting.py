"""Tokens by what drivers tell, whatever the pieces in which it comes; and the rule by which requests are let in."""

from __future__ import annotations

import gzip
import json
import random
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import driver_wire as wire
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autorl_hpc.files.driver_log import DriverCall, LogWriter, add_up_calls, read_calls
from autorl_hpc.gateway.asked import Asked
from autorl_hpc.gateway.books import Books
from autorl_hpc.gateway.budget import Budget, Totals
from autorl_hpc.gateway.call import Call
from autorl_hpc.gateway.refusals import Refusal
from autorl_hpc.gateway.settings import Prices, RunLimits, Settings
from autorl_hpc.gateway.usage import Meter, Usage
from autorl_hpc.gateway.usage_stream import WithoutUsage, asking

OFTEN = settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
TURN = wire.Turn("Grüße, some words", (wire.Call("bash", {"command": "id"}),), None, 1000, 50, 600)
PATHS = {
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/models/m:streamGenerateContent",
}
BODIES: dict[str, dict[str, Any]] = {
    "openai-chat": {"messages": [], "stream": True, "stream_options": {"include_usage": True}},
    "openai-responses": {"input": [], "stream": True},
    "anthropic": {"messages": [], "stream": True},
    "gemini": {"contents": []},
}


def answers(dialect: str, query: str = "alt=sse") -> tuple[list[bytes], bytes]:
    """The events of a stream, and the same as a whole answer."""
    conversation = wire.read(dialect, PATHS[dialect], query, {"model": "m", **BODIES[dialect]}, 1)
    answer = wire.answer_to(conversation, TURN)
    return list(wire.events(conversation, answer)), json.dumps(wire.whole(conversation, answer)).encode()


STREAMS = {dialect: answers(dialect)[0] for dialect in PATHS}
WHOLE = {dialect: answers(dialect)[1] for dialect in PATHS}


def counted(
    parts: list[bytes], kind: str = "text/event-stream; charset=utf-8", encoding: str = "", whole: bool = True
) -> Usage:
    meter = Meter(kind, encoding)
    for part in parts:
        meter.feed(part)
    return meter.end(whole)


def in_pieces(data: bytes, seed: int) -> list[bytes]:
    dice = random.Random(seed)
    pieces = []
    while data:
        size = dice.choice([1, 2, 3, 7, 50, 1000])
        pieces.append(data[:size])
        data = data[size:]
    return pieces


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
    cost = Budget(RunLimits(), Prices(price_in=1.0, price_out=10.0, price_cached=0.1), Totals()).cost(usage)
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


# ------------------------------------------------------------------------------------------------------------------ budget


def used(given_tokens: int, out: int) -> Usage:
    return Usage(tokens_in=given_tokens, tokens_out=out, out_is_last=True, ended=True)


def test_one_request_at_a_time_uses_the_budget_to_its_end() -> None:
    budget = Budget(RunLimits(tokens=1000), None, Totals())
    number = 0
    while budget.exhausted is None:
        number += 1
        budget.enter(number, 50, 100_000)
        budget.leave(number, used(50, 100), False)
    assert 950 <= budget.totals.tokens <= 1000 + 100
    with pytest.raises(Refusal) as caught:
        budget.enter(99, 1, 1)
    assert (caught.value.status, caught.value.code) == (403, "budget_exhausted")


def test_the_second_of_two_waits_where_the_first_may_use_what_is_left() -> None:
    budget = Budget(RunLimits(tokens=1000), None, Totals())
    budget.enter(1, 50, 2000)
    with pytest.raises(Refusal) as caught:
        budget.enter(2, 50, 10)
    assert (caught.value.status, caught.value.code) == (429, "budget_reserved")
    assert caught.value.retry_after_s
    budget.leave(1, used(50, 20), False)
    budget.enter(2, 50, 10)


@pytest.mark.parametrize("limits", [RunLimits(tokens=10_000), RunLimits(cost_usd=0.01)])
def test_a_guessed_input_is_let_in_alone_and_counts_as_the_most_it_can_be(limits: RunLimits) -> None:
    budget = Budget(limits, Prices(price_in=1.0, price_out=1.0), Totals())
    budget.enter(1, 1500, 10, 9000, caches=False)
    with pytest.raises(Refusal) as caught:
        budget.enter(2, 1500, 10, 9000, caches=False)
    assert (caught.value.status, caught.value.code) == (429, "budget_reserved")
    budget.enter(3, 10, 10, 40, caches=False)
    budget.leave(1, used(9000, 10), False)
    budget.leave(3, used(40, 10), False)
    budget.enter(4, 100, 10, 9000, caches=False)
    with pytest.raises(Refusal) as caught:
        budget.enter(5, 1, 1, 4, caches=False)
    assert caught.value.code == "budget_reserved"


def test_a_burst_of_inputs_that_are_written_into_a_cache_is_held_within_the_cost() -> None:
    """What was learned from cached input is no ground to let many in at once."""
    budget = Budget(RunLimits(cost_usd=1.0), Prices(price_in=10.0, price_out=0.0, price_cached=0.1), Totals())
    for number in range(1, 20):
        budget.enter(number, 1000, 1, 4000)
        budget.leave(number, Usage(1000, 1, 1000, out_is_last=True, ended=True), False)
    cost, under_way = budget.totals.cost_usd, []
    for number in range(20, 60):
        try:
            budget.enter(number, 2500, 1, 10_000)
            under_way.append(number)
        except Refusal:
            pass
    for number in under_way:
        budget.leave(number, Usage(10_000, 1, 0, written_1h=10_000, out_is_last=True, ended=True), False)
    assert under_way and cost < 0.1 and budget.totals.cost_usd <= 1.0 + 0.2


def test_a_request_that_is_too_long_for_what_is_left_doesnt_end_the_run() -> None:
    budget = Budget(RunLimits(tokens=1000), None, Totals(tokens_in=500))
    with pytest.raises(Refusal) as caught:
        budget.enter(1, 600, 10)
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    assert "prompt is too long: 600 tokens > 500 maximum" in caught.value.message
    assert budget.exhausted is None
    budget.enter(2, 100, 10)


def test_what_is_left_of_the_cost_is_told_in_tokens() -> None:
    budget = Budget(RunLimits(cost_usd=0.01), Prices(price_in=1.0, price_out=1.0), Totals(cost_usd=0.005))
    with pytest.raises(Refusal) as caught:
        budget.enter(1, 6000, 10)
    assert caught.value.code == "context_length_exceeded"
    assert "about 5000 tokens left" in caught.value.message


def test_the_last_rest_is_used_up_also_while_others_are_under_way() -> None:
    budget = Budget(RunLimits(tokens=1000), None, Totals(tokens_in=960))
    budget.enter(1, 10, 5)
    with pytest.raises(Refusal) as caught:
        budget.enter(2, 60, 10)
    assert caught.value.code == "budget_exhausted"
    assert budget.exhausted == "tokens"


def test_the_last_rest_that_nothing_fits_into_counts_as_used_up() -> None:
    budget = Budget(RunLimits(tokens=1000), None, Totals(tokens_in=970))
    with pytest.raises(Refusal):
        budget.enter(1, 60, 10)
    assert budget.exhausted == "tokens"


def test_a_failed_request_gives_its_place_back() -> None:
    budget = Budget(RunLimits(tokens=1000), None, Totals())
    budget.enter(1, 50, 5000)
    assert budget.leave(1, None, False) is None
    budget.enter(2, 50, 5000)
    assert budget.totals.calls == 0


def test_cost_is_a_budget_of_its_own() -> None:
    budget = Budget(RunLimits(cost_usd=0.01), Prices(price_in=1.0, price_out=10.0), Totals())
    budget.enter(1, 1000, 100)
    assert budget.leave(1, used(1000, 100), False) == pytest.approx(0.002)
    budget.enter(2, 1000, 1000)
    budget.leave(2, used(1000, 1000), False)
    assert budget.exhausted == "cost"
    assert Budget(RunLimits(cost_usd=0.01), Prices(price_in=1, price_out=1), Totals(cost_usd=0.01)).exhausted == "cost"


def test_estimates_follow_what_the_driver_tells() -> None:
    budget = Budget(RunLimits(), None, Totals())
    for number in range(1, 30):
        budget.enter(number, 100, 10)
        budget.leave(number, used(150, 10), False)
    assert budget.expected_in(1000) == pytest.approx(1500, rel=0.02)


@OFTEN
@given(
    st.lists(
        st.tuples(st.integers(1, 400), st.integers(1, 400), st.floats(0, 1), st.booleans()), min_size=1, max_size=60
    )
)
def test_the_limit_is_passed_by_at_most_one_answer(requests: list[tuple[int, int, float, bool]]) -> None:
    """With inputs that are estimated right, in whatever order requests come and end."""
    budget = Budget(RunLimits(tokens=1000), None, Totals())
    budget._learn = lambda *args: None  # type: ignore[method-assign]  # estimates stay right
    under_way: list[tuple[int, int, int]] = []
    longest = 0
    for number, (given_tokens, asked_out, share, ends) in enumerate(requests, 1):
        try:
            budget.enter(number, given_tokens, asked_out)
            under_way.append((number, given_tokens, int(asked_out * share)))
            longest = max(longest, asked_out)
        except Refusal:
            pass
        if ends and under_way:
            first = under_way.pop(0)
            budget.leave(first[0], used(first[1], first[2]), False)
    for one in under_way:
        budget.leave(one[0], used(one[1], one[2]), False)
    assert budget.totals.tokens <= 1000 + longest


# --------------------------------------------------------------------------------------------------------------------- log


def call(number: int, **fields: Any) -> DriverCall:
    return DriverCall(at="x", number=number, dialect="anthropic", path="/v1/messages", **{"status": 200, **fields})


def put(writer: LogWriter, one: DriverCall) -> bool:
    return writer.write(one.model_dump_json().encode())


def test_totals_are_those_of_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "driver.jsonl"
    writer = LogWriter(path)
    put(writer, call(1, tokens_in=10, tokens_out=2, tokens_cached=4, cost_usd=0.5, elapsed_s=10, total_s=3))
    put(writer, call(2, status=403, refused="hosted_tool"))
    put(writer, call(3, status=500, fault="cluster"))
    put(writer, call(4, tokens_in=20, tokens_out=3, estimated=True, elapsed_s=20, total_s=1))
    put(writer, call(5))
    totals = add_up_calls(read_calls(path))
    assert (totals.calls, totals.refused, totals.failed, totals.estimated, totals.last_number) == (2, 1, 1, 1, 5)
    assert (totals.tokens_in, totals.tokens_out, totals.tokens_cached, totals.cost_usd) == (30, 5, 4, 0.5)
    assert totals.points == ((10.0, 12, 0.5), (20.0, 35, 0.5))
    assert totals.spans == ((7.0, 10.0), (19.0, 20.0))
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_request_that_never_ended_counts_by_its_first_line(tmp_path: Path) -> None:
    path = tmp_path / "driver.jsonl"
    writer = LogWriter(path)
    for number in (1, 2, 3):
        put(writer, call(number, tokens_in=100, tokens_out=50, estimated=True, under_way=True, status=0))
    put(writer, call(2, tokens_in=10, tokens_out=5))
    put(writer, call(3, status=502, fault="cluster"))
    totals = add_up_calls(read_calls(path))
    assert (totals.tokens_in, totals.tokens_out, totals.calls, totals.estimated) == (110, 55, 2, 1)
    assert (totals.failed, totals.last_number) == (1, 3)


def books_over(call: Call, log: Path, *pieces: bytes) -> Books:
    """Of a gateway that has sent a request, of whose answer so much has come."""
    told = {"token": "x" * 16, "upstream": {"url": "http://127.0.0.1:1/v1"}, "model": "m", "log": log}
    books = Books(Settings.model_validate(told))
    call.number, call.generates = books.number(), True
    books.sending(call)
    call.sent_at, call.reached = time.monotonic(), True
    if pieces:
        call.meter, call.status = Meter("text/event-stream"), 200
    for piece in pieces:
        assert call.meter is not None
        call.meter.feed(piece)
    return books


def test_of_an_answer_under_way_what_came_is_not_forgotten(tmp_path: Path) -> None:
    call = Call("openai-chat", PATHS["openai-chat"], wants=Asked(10, 100_000, True, False, 10))
    words = json.dumps({"choices": [{"delta": {"content": "x" * 200_000}}]}).encode()
    books = books_over(call, tmp_path / "driver.jsonl", b"data: %s\n\n" % words)
    books.note_growth()
    books.note_growth()
    books.end()  # and no line of its end: the gateway died
    lines = list(read_calls(tmp_path / "driver.jsonl"))
    assert [(line.tokens_in, line.tokens_out, line.under_way) for line in lines] == [(10, 50_001, True)]
    assert (tmp_path / "driver.jsonl").read_text().count("\n") == 2, "no line where nothing grew"


def test_of_a_long_silence_what_may_have_been_written_is_counted(tmp_path: Path) -> None:
    call = Call("openai-chat", PATHS["openai-chat"], wants=Asked(10, 100_000, False, False, 10))
    books = books_over(call, tmp_path / "driver.jsonl")
    call.sent_at = time.monotonic() - 300
    books.note_growth()
    books.end()
    (line,) = read_calls(tmp_path / "driver.jsonl")
    assert 30_000 <= (line.tokens_out or 0) <= 100_000


@pytest.mark.parametrize(
    "fields, out", [({}, 700), ({"reached": False}, None), ({"status": 500}, None), ({"fault": "cluster"}, None)]
)
def test_a_request_that_the_gateways_end_cuts_off_is_counted(
    tmp_path: Path, fields: dict[str, Any], out: int | None
) -> None:
    call = Call("openai-chat", PATHS["openai-chat"], wants=Asked(10, 700, False, False, 10))
    books = books_over(call, tmp_path / "driver.jsonl")
    for name, value in fields.items():
        setattr(call, name, value)
    books.close(call)
    books.end()
    (line,) = read_calls(tmp_path / "driver.jsonl")
    assert not line.under_way and line.tokens_out == out and line.estimated == (out is not None)


def test_a_damaged_log_loses_only_its_damaged_lines(tmp_path: Path) -> None:
    path = tmp_path / "driver.jsonl"
    put(LogWriter(path), call(1, tokens_in=1, tokens_out=1))
    with open(path, "ab") as file:
        file.write(b'\xff\xfe{"at"\n[1]\n' + b"x" * 100_000 + b'\n{"at": "cut in the mid')
    put(LogWriter(path), call(2, tokens_in=1, tokens_out=1))
    assert [one.number for one in read_calls(path)] == [1, 2]


def test_lines_that_cant_be_written_come_later(tmp_path: Path) -> None:
    folder = tmp_path / "away"
    writer = LogWriter(folder / "driver.jsonl")
    assert not put(writer, call(1, tokens_in=1, tokens_out=1))
    assert not put(writer, call(2, tokens_in=1, tokens_out=1))
    folder.mkdir()
    assert put(writer, call(3, tokens_in=1, tokens_out=1))
    assert [one.number for one in read_calls(folder / "driver.jsonl")] == [1, 2, 3]


def test_a_line_of_which_a_part_was_written_comes_again(tmp_path: Path) -> None:
    """As on a full disk: a limit on the file's size takes a part of a write."""
    import resource
    import signal

    writer, path = LogWriter(tmp_path / "driver.jsonl"), tmp_path / "driver.jsonl"
    put(writer, call(1, tokens_in=1, tokens_out=1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, before[1]))
        assert not put(writer, call(2, tokens_in=2, tokens_out=1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert put(writer, call(3, tokens_in=3, tokens_out=1))
    assert [one.tokens_in for one in read_calls(path)] == [1, 2, 3]
