"""Paths, queries and headers pass by lists of what is known, and nothing passes without the run's token."""

from __future__ import annotations

import pytest
from bodies import NOTHING

from autorl_hpc.gateway.request import ANTHROPIC, CHAT, GEMINI, RESPONSES, Allowed, Refusal, route
from autorl_hpc.gateway.upstream import check_beta, shown_key, to_client, to_driver, with_key

OTHERS = """
/ * /v1 /v2/chat/completions /v1/completions /v1/embeddings /v1/files /v1/batches /v1/responses/resp_1 /v1/responses/ /v1/chat/completions/
/v1//chat/completions //v1/chat/completions /v1/../v1/files /v1/chat/../files /v1/./chat/completions /v1/chat%2fcompletions
/v1/%2e%2e/files /v1/messages/batches /v1/messages%00 /v1/messages\\..\\files /v1/messages;x=1 /V1/messages http://evil.example/v1/messages
https://api.openai.com/v1/messages evil.example:443 /v1beta/models/m:batchGenerateContent /v1beta/models/../files:generateContent
/v1beta/models/m:generateContent/x /v1beta/cachedContents /v1beta/models:generateContent /upload/v1beta/files /v1/messages#x /v1/realtime
/v1/messäges
"""


QUERIES = ("a=1", "alt=media", "beta=true&beta=true", "alt=sse&alt=json", "beta", "$alt=sse", "%61lt=sse&x=%ff")


@pytest.mark.parametrize(
    "target", [*OTHERS.split(), "", "/v1/messages\n", "/v1/mes sages", *(f"/v1/messages?{query}" for query in QUERIES)]
)
def test_other_paths_dont_pass(target: str) -> None:
    with pytest.raises(Refusal):
        route("POST", target)
    for method in ("GET", "DELETE", "OPTIONS", "CONNECT"):
        try:
            found = route(method, target)
        except Refusal:
            continue
        assert found.kind == "models", "which the gateway answers itself"


@pytest.mark.parametrize(
    ("target", "dialect", "path"),
    [
        ("/v1/chat/completions", CHAT, "/chat/completions"),
        ("/v1/responses", RESPONSES, "/responses"),
        ("/v1/messages?beta=true", ANTHROPIC, "/messages?beta=true"),
        ("/v1/messages/count_tokens", ANTHROPIC, "/messages/count_tokens"),
        ("/v1beta/models/g:streamGenerateContent?key=t&alt=sse", GEMINI, "/models/g:streamGenerateContent?alt=sse"),
        ("/v1beta/models/org/g-2.5:generateContent", GEMINI, "/models/org/g-2.5:generateContent"),
    ],
)
def test_known_paths_pass(target: str, dialect: str, path: str) -> None:
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
        with pytest.raises(Refusal) as caught:
            check_beta([("Anthropic-Beta", beta)], NOTHING)
        assert caught.value.code == "hosted_tool"
        check_beta([("Anthropic-Beta", beta)], Allowed(("context-1m",)))
    check_beta([("anthropic-beta", "a,context-management-2025-06-27"), ("x", "context-1m")], NOTHING)
