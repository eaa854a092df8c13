"""What agents send passes, and what an experiment allows passes for that experiment alone."""

from __future__ import annotations

from typing import Any

import pytest
from bodies import DATA_URL, FUNCTION, NOTHING, item, named, parts, user

from autorl_hpc.gateway.hosted_tools import check
from autorl_hpc.gateway.request import ANTHROPIC, CHAT, GEMINI, RESPONSES, Allowed, Refusal
from autorl_hpc.gateway.token_usage import asked

TAKEN: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {**user("x"), "tools": [FUNCTION, {"type": "custom", "custom": {"name": "patch"}}], "tool_choice": "auto"}),
    (CHAT, {**user("x"), "tool_choice": {"type": "function", "function": {"name": "bash"}}, "service_tier": "default"}),
    (CHAT, user([{"type": "text", "text": "see https://x"}, {"type": "image_url", "image_url": {"url": DATA_URL}}])),
    (CHAT, user([{"type": "input_audio", "input_audio": {"data": "AA+/\n-_==", "format": "wav"}}])),
    (CHAT, user([{"type": "input_audio", "input_audio": {"data": "data:audio/wav;base64,AAAA", "format": "wav"}}])),
    (CHAT, user([{"type": "input_audio", "input_audio": None, "uuid": None}])),
    (CHAT, user([{"type": "file", "file": {"file_data": "AA==", "filename": "a.pdf"}}])),
    (CHAT, {**user("x"), "modalities": ["text"]}),
    (CHAT, {**user("x"), "modalities": None}),
    (GEMINI, {**parts({"text": "x"}), "generationConfig": None}),
    (CHAT, user([{"type": "file", "file": {"file_data": "data:application/pdf;base64,AA==", "filename": "a.pdf"}}])),
    (CHAT, user(None)),
    (CHAT, {**user("x"), "chat_template_kwargs": {"enable_thinking": False}, "top_k": 20, "reasoning_effort": "low"}),
    (
        CHAT,
        {
            "model": "m",
            "messages": [
                {
                    "role": "assistant",
                    "content": "",
                    "reasoning_content": "hm",
                    "tool_calls": [
                        {
                            "id": "1",
                            "type": "function",
                            "function": {"name": "bash", "arguments": '{"image_url": "https://x"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "ok"}]},
            ],
        },
    ),
    (
        RESPONSES,
        {"model": "m", "input": "x", "include": ["reasoning.encrypted_content"], "store": False, "background": False},
    ),
    (RESPONSES, {"model": "m", "input": "x", "previous_response_id": "resp_1", "tools": [{"type": "local_shell"}]}),
    (RESPONSES, {"model": "m", "input": "x", "tools": [{"type": "shell", "environment": {"type": "local"}}]}),
    (
        RESPONSES,
        {
            "model": "m",
            "input": "x",
            "tools": [{"type": "function", "name": "f", "parameters": {}}, {"type": "custom", "name": "p"}],
        },
    ),
    (
        RESPONSES,
        item(
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": DATA_URL}],
            },
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "encrypted_content": "gAAA"},
            {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
            {"type": "function_call_output", "call_id": "1", "output": "https://x"},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "x", "annotations": []}],
            },
        ),
    ),
    (
        ANTHROPIC,
        {**user("x"), "tools": [{"name": "Bash", "input_schema": {}}, {"type": "bash_20250124", "name": "bash"}]},
    ),
    (
        ANTHROPIC,
        {**user("x"), "tools": [{"type": "custom", "name": "a"}, {"type": "text_editor_20250728", "name": "b"}]},
    ),
    (
        ANTHROPIC,
        {
            **user("x"),
            "thinking": {"type": "enabled"},
            "metadata": {},
            "context_management": {
                "edits": [{"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015"}]
            },
            "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        },
    ),
    (
        ANTHROPIC,
        user(
            [
                {"type": "thinking", "thinking": "x", "signature": "s"},
                {"type": "tool_use", "id": "1", "name": "WebFetch", "input": {"url": "https://x", "type": "image"}},
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "image", "source": {"type": "base64", "data": "AA"}}],
                },
                {"type": "document", "source": {"type": "text", "data": "x", "media_type": "text/plain"}},
            ]
        ),
    ),
    (
        GEMINI,
        {
            **parts({"text": "x"}),
            "tools": [{"functionDeclarations": [{"name": "google_search"}]}],
            "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
            "generationConfig": {
                "thinkingConfig": {},
                "temperature": 0,
                "topP": 1,
                "response_mime_type": "application/json",
                "_responseJsonSchema": {},
                "responseModalities": ["TEXT"],
            },
            "safetySettings": [],
        },
    ),
    (
        GEMINI,
        parts(
            {"inlineData": {"mimeType": "image/png", "data": "AA"}},
            {"functionCall": {"name": "f", "args": {"fileData": 1}}},
        ),
    ),
    (
        GEMINI,
        parts(
            {"functionResponse": {"name": "f", "response": {"fileData": "x"}}}, {"text": "x", "thoughtSignature": "s"}
        ),
    ),
]


@pytest.mark.parametrize("case", TAKEN, ids=named)
def test_what_agents_send_passes(case: tuple[str, dict[str, Any]]) -> None:
    check(*case, NOTHING)
    asked(case[0], case[1], 10)


@pytest.mark.parametrize(
    ("tools", "dialect", "body"),
    [
        (("web_search",), ANTHROPIC, {**user("x"), "tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
        (("web_search",), RESPONSES, {"model": "m", "input": "x", "tools": [{"type": "web_search_preview"}]}),
        (("web_search",), CHAT, {**user("x"), "web_search_options": {}}),
        (("google_search",), GEMINI, {**parts({"text": "x"}), "tools": [{"googleSearch": {}}]}),
        (("remote_urls",), CHAT, user([{"type": "image_url", "image_url": {"url": "https://x"}}])),
        (
            ("remote_urls",),
            CHAT,
            user([{"type": "input_audio", "input_audio": {"data": "https://x", "format": "wav"}}]),
        ),
        (("image",), CHAT, {**user("x"), "modalities": ["image", "text"]}),
        (("image",), GEMINI, {**parts({"text": "x"}), "generationConfig": {"responseModalities": ["IMAGE"]}}),
        (("routing_config",), GEMINI, {**parts({"text": "x"}), "generationConfig": {"routingConfig": {}}}),
        (("plugins",), CHAT, {**user("x"), "plugins": []}),
        (("background",), RESPONSES, {"model": "m", "input": "x", "background": True}),
    ],
)
def test_an_experiment_may_allow_it(tools: tuple[str, ...], dialect: str, body: dict[str, Any]) -> None:
    check(dialect, body, Allowed(tools))
    for others in ((), ("code_execution",), ("web",), ("search",)):
        with pytest.raises(Refusal):
            check(dialect, body, Allowed(others))


def test_allowing_one_tool_allows_no_other() -> None:
    body = {**user("x"), "tools": [{"type": "web_search_20250305"}, {"type": "code_execution_20250825"}]}
    with pytest.raises(Refusal, match="code_execution"):
        check(ANTHROPIC, body, Allowed(("web_search",)))
