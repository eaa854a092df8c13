"""Requests before they are let in: bodies that can be read in one way only, known paths and headers, what they may cost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
from bodies import NOTHING, item, parts, user
from draws import OFTEN
from hypothesis import given
from hypothesis import strategies as st

from autorl_hpc.gateway.request import ANTHROPIC, CHAT, GEMINI, RESPONSES, Allowed, Refusal, route
from autorl_hpc.gateway.server import read_object
from autorl_hpc.gateway.token_usage import MOST_INPUT_TOKENS, asked, size_of
from autorl_hpc.gateway.upstream import check_beta, shown_key, to_client, to_driver, with_key

TWO_WAYS = [
    *(b'{"tools": [{"type": "web_search"}], "tools": []}', b'{"tools": [], "\\u0074ools": [{"type": "web_search"}]}'),
    *(b'{"a": {"type": "text", "type": "image_url"}}', b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1} {"b": 2}', b'{"a": 1,}'),
    *(b"{'a': 1}", b'{"a": 1} // comment', b"[1]", b'"text"', b"", b"null", b"\xef\xbb\xbf{}", b'{"a": "\xff"}', b'{"a": "\xc0\xaf"}'),
    *('{"a": 1}'.encode("utf-16"), '{"a": 1}'.encode("utf-32"), b'{"a": ' + b"9" * 10_000 + b"}", b'{"a": "tab\there"}'),
    b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
]  # fmt: skip


def refused(action: Callable[..., object], *given: Any) -> Refusal:
    try:
        action(*given)
    except Refusal as refusal:
        return refusal
    raise AssertionError(f"{str(given)[:200]} passes")


def test_bodies_that_two_may_read_in_two_ways_or_that_memory_is_not_for_are_refused() -> None:
    for data in TWO_WAYS:
        refused(read_object, data)
    for many in (b'{"":1},', b"[],", b"0,", b'"",'):
        assert refused(read_object, b'{"metadata":[' + many * 700_000 + b"0]}").status == 413


@OFTEN
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        assert isinstance(read_object(data), dict)
    except Refusal:
        pass


# --- paths, queries, headers: nothing passes without the run's token

OTHERS = """
/ * /v1 /v2/chat/completions /v1/completions /v1/embeddings /v1/files /v1/batches /v1/responses/resp_1 /v1/responses/ /v1/chat/completions/
/v1//chat/completions //v1/chat/completions /v1/../v1/files /v1/chat/../files /v1/./chat/completions /v1/chat%2fcompletions
/v1/%2e%2e/files /v1/messages/batches /v1/messages%00 /v1/messages\\..\\files /v1/messages;x=1 /V1/messages http://evil.example/v1/messages
https://api.openai.com/v1/messages evil.example:443 /v1beta/models/m:batchGenerateContent /v1beta/models/../files:generateContent
/v1beta/models/m:generateContent/x /v1beta/cachedContents /v1beta/models:generateContent /upload/v1beta/files /v1/messages#x /v1/realtime
/v1/messäges
"""


QUERIES = ("a=1", "alt=media", "beta=true&beta=true", "alt=sse&alt=json", "beta", "$alt=sse", "%61lt=sse&x=%ff")


def test_other_paths_dont_pass() -> None:
    for target in (*OTHERS.split(), "", "/v1/messages\n", "/v1/mes sages", *(f"/v1/messages?{q}" for q in QUERIES)):
        refused(route, "POST", target)
        for method in ("GET", "DELETE", "OPTIONS", "CONNECT"):
            with contextlib.suppress(Refusal):
                assert route(method, target).kind == "models", "which the gateway answers itself"


def test_known_paths_pass() -> None:
    for target, dialect, path in (
        ("/v1/chat/completions", CHAT, "/chat/completions"),
        ("/v1/responses", RESPONSES, "/responses"),
        ("/v1/messages?beta=true", ANTHROPIC, "/messages?beta=true"),
        ("/v1/messages/count_tokens", ANTHROPIC, "/messages/count_tokens"),
        ("/v1beta/models/g:streamGenerateContent?key=t&alt=sse", GEMINI, "/models/g:streamGenerateContent?alt=sse"),
        ("/v1beta/models/org/g-2.5:generateContent", GEMINI, "/models/org/g-2.5:generateContent"),
    ):
        found = route("POST", target)
        assert (found.dialect, found.path) == (dialect, path)


def test_headers_pass_by_a_list() -> None:
    harmless = {
        "user-agent": "codex",
        "anthropic-beta": "a",
        "anthropic-version": "2023-06-01",
        "x-stainless-lang": "js",
    }
    others = (
        "Host Cookie X-HTTP-Method-Override X-Forwarded-For Connection Transfer-Encoding Authorization x-api-key OpenAI-Organization "
        "Proxy-Authorization x-goog-user-project Range"
    )
    sent = [*((name.title(), value) for name, value in harmless.items()), *((name, "x") for name in others.split())]
    assert to_driver([*sent, ("accept", "x\x7f"), ("anthropic-beta", "b")]) == harmless
    kept = [("Content-Type", "x"), ("Retry-After", "3")]
    answered = [*kept, ("Set-Cookie", "s"), ("openai-organization", "o"), ("Transfer-Encoding", "chunked")]
    assert to_client(answered) == kept


@pytest.mark.parametrize(
    ("dialect", "shown", "bearer", "made"),
    [
        (CHAT, {"authorization": "Bearer tok"}, False, {"authorization": "Bearer KEY"}),
        (CHAT, {"x-api-key": "tok"}, False, {"authorization": "Bearer KEY"}),
        (ANTHROPIC, {"x-api-key": "tok"}, False, {"x-api-key": "KEY"}),
        (ANTHROPIC, {"authorization": "bearer tok"}, False, {"authorization": "Bearer KEY"}),
        (ANTHROPIC, {"x-api-key": "tok"}, True, {"x-api-key": "KEY", "authorization": "Bearer KEY"}),
        (GEMINI, {"x-goog-api-key": "tok"}, False, {"x-goog-api-key": "KEY"}),
        (GEMINI, {"authorization": "Bearer other", "x-goog-api-key": "tok"}, False, {"x-goog-api-key": "KEY"}),
    ],
)
def test_the_key_takes_the_tokens_place(
    dialect: str, shown: dict[str, str], bearer: bool, made: dict[str, str]
) -> None:
    assert with_key(dialect, shown_key(shown, (), "tok"), "KEY", bearer=bearer) == made


def test_a_window_that_costs_more_is_refused_unless_allowed() -> None:
    for beta in ("context-1m-2025-08-07", "a, Context-1M-2025-08-07"):
        assert refused(check_beta, [("Anthropic-Beta", beta)], NOTHING).code == "hosted_tool"
        check_beta([("Anthropic-Beta", beta)], Allowed(("context-1m",)))
    check_beta([("anthropic-beta", "a,context-management-2025-06-27"), ("x", "context-1m")], NOTHING)


# --- how long an answer may become, how long an input is


@pytest.mark.parametrize(
    ("dialect", "body", "out"),
    [
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 7, "n": 3}, 21),
        (CHAT, {"max_tokens": 9, "max_completion_tokens": 7}, 9),
        (CHAT, {"max_tokens": None, "n": None}, 99),
        (RESPONSES, {"max_output_tokens": 5}, 5),
        (ANTHROPIC, {"max_tokens": 5}, 5),
        (GEMINI, {"generation_config": {"max_output_tokens": 5}}, 5),
        (GEMINI, {"generationConfig": {"maxOutputTokens": "60000", "candidateCount": "8"}}, 480_000),
        (GEMINI, {"generationConfig": None}, 99),
    ],
)
def test_how_long_an_answer_may_become(dialect: str, body: dict[str, Any], out: int) -> None:
    assert asked(dialect, body, 99).tokens_out == out


def test_sizes_that_two_may_read_in_two_ways_are_refused() -> None:
    cases: list[tuple[str, dict[str, Any]]] = [(CHAT, {"stream": stream}) for stream in ("true", 1, [], {})]
    for value in (True, -5, 0, 5.0, "5", "90000", 10**30, [5], {}):
        fields = [(CHAT, "max_tokens"), (CHAT, "n"), (RESPONSES, "max_output_tokens"), (ANTHROPIC, "max_tokens")]
        cases += [(dialect, {name: value}) for dialect, name in fields]
        if not isinstance(value, str):
            cases += [(GEMINI, {"generationConfig": {name: value}}) for name in ("maxOutputTokens", "candidate_count")]
    cases += [(CHAT, {"n": 100_000}), (GEMINI, {"generationConfig": {"candidateCount": "17"}})]
    cases += [(GEMINI, {"generationConfig": config}) for config in ([], {"maxOutputTokens": 5, "max_output_tokens": 6})]
    for dialect, body in cases:
        assert refused(asked, dialect, body, 99).status == 400, (dialect, body)


IMAGE = "data:image/png;base64," + "A" * 4_000_000
NO_SPACES = "A" * 100_000
IMAGES = [
    user([{"type": "image_url", "image_url": {"url": IMAGE}}]),
    item({"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}),
    user([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBOR" * 100_000}}]),
    parts({"inlineData": {"mimeType": "image/png", "data": NO_SPACES}}),
    parts({"inline_data": {"mime_type": "image/png", "data": NO_SPACES}}),
]
WORDS = [
    user(NO_SPACES),
    user([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "some words " * 10_000}}]),
    user([{"type": "tool_use", "name": "f", "input": {"source": {"type": "base64", "data": NO_SPACES}}}]),
    {"input": NO_SPACES},
    parts({"text": NO_SPACES}),
]


def test_an_image_is_not_counted_by_its_bytes_and_words_are() -> None:
    assert all(1500 <= size_of(body) < 1600 for body in IMAGES)
    assert all(size_of(body) >= 25_000 for body in WORDS)


@pytest.mark.parametrize(
    ("body", "stored"),
    [
        ({"input": "hi", "previous_response_id": "resp_1"}, True),
        (item({"type": "item_reference", "id": "msg_1"}), True),
        (item({"type": "reasoning", "id": "rs_1", "summary": []}), True),
        (item({"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"}), False),
        (item({"type": "message", "role": "user", "content": "hi"}), False),
        ({"input": "hi", "previous_response_id": None}, False),
    ],
)
def test_what_lies_at_the_provider_may_be_as_long_as_a_window(body: dict[str, Any], stored: bool) -> None:
    assert asked(RESPONSES, body, 99, 1000).most_in == (MOST_INPUT_TOKENS if stored else 1000)
