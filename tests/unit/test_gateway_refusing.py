"""What reaches beyond the driver is refused, wherever in a request it stands. Pure functions; the process is in test_gateway."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bodies import FUNCTION, NOTHING, item, named, parts, user
from draws import OFTEN, json_values
from hypothesis import given
from hypothesis import strategies as st

from autorl_hpc.gateway.hosted_tools import check
from autorl_hpc.gateway.request import ANTHROPIC, CHAT, DIALECTS, GEMINI, RESPONSES, Refusal
from autorl_hpc.gateway.token_usage import asked, size_of

REFUSED: list[tuple[str, dict[str, Any]]] = [
    # chat
    (CHAT, {**user("x"), "web_search_options": {}}),
    (CHAT, {**user("x"), "plugins": [{"id": "web"}]}),
    (CHAT, {**user("x"), "search_parameters": {"mode": "on"}}),
    (CHAT, {**user("x"), "enable_search": True}),
    (CHAT, {**user("x"), "models": ["m", "other:online"]}),
    (CHAT, {**user("x"), "Tools": [{"type": "web_search"}]}),
    (CHAT, {**user("x"), "extra_body": {}}),
    (CHAT, {**user("x"), "chat_template": "{{ x }}"}),
    *[
        (dialect, {**user("x"), "chat_template_kwargs": {"enable_thinking": True, name: value}})
        for dialect in (CHAT, ANTHROPIC)
        for name, value in (
            ("chat_template", "{{ x }}"),
            ("tokenize", False),
            ("continue_final_message", True),
            ("tools", []),
        )
    ],
    (CHAT, {**user("x"), "chat_template_kwargs": [["chat_template", "x"]]}),
    (CHAT, {**user("x"), "kv_transfer_params": {"remote_host": "10.0.0.1"}}),
    (CHAT, {**user("x"), "tools": [{"type": "web_search_preview"}]}),
    (CHAT, {**user("x"), "tools": [FUNCTION, {"type": "mcp", "server_url": "https://x"}]}),
    (CHAT, {**user("x"), "tools": [{"type": "openrouter:web_search"}]}),
    (CHAT, {**user("x"), "tools": [{"name": "untyped"}]}),
    (CHAT, {**user("x"), "tools": {"type": "web_search"}}),
    (CHAT, {**user("x"), "tool_choice": {"type": "web_search"}}),
    (CHAT, {**user("x"), "service_tier": "priority"}),
    (CHAT, user([{"type": "image_url", "image_url": {"url": "https://evil.example/x.png"}}])),
    (CHAT, user([{"type": "image_url", "image_url": "http://169.254.169.254/latest"}])),
    (CHAT, user([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}])),
    (CHAT, user([{"type": "image_url", "image_url": {"url": " data:x"}}])),
    (CHAT, user([{"type": "image_url", "image_url": {}}])),
    (CHAT, user([{"type": "video_url", "video_url": {"url": "https://x"}}])),
    (CHAT, user([{"type": "audio_url", "audio_url": {"url": "https://x"}}])),
    (CHAT, user([{"type": "file", "file": {"file_id": "file-1"}}])),
    (CHAT, user([{"type": "file", "file": {"file_data": "https://x/y.pdf"}}])),
    *[
        (CHAT, user([{"type": "file", "file": {"file_data": data}}]))
        for data in (" " * 41 + "https://x/y.pdf", "file:/x", "x.example", ["https://x"], {"url": "https://x"})
    ],
    *[
        (CHAT, user([{"type": "input_audio", "input_audio": audio}]))
        for audio in (
            {"data": "https://x/y.wav", "format": "wav"},
            {"data": ["https://x/y.wav"]},
            {"data": "AAAA", "url": "https://x/y.wav"},
            {"url": "https://x/y.wav"},
            "https://x/y.wav",
        )
    ],
    *[(CHAT, {**user("x"), "modalities": kinds}) for kinds in (["text", "image"], ["audio"], "image", [{}])],
    *[
        (GEMINI, {**parts({"text": "x"}), "generationConfig": config})
        for config in (
            {"routingConfig": {"manualMode": {"modelName": "dearer"}}},
            {"model_config": {}},
            {"responseModalities": ["TEXT", "IMAGE"]},
            {"response_modalities": "IMAGE"},
            {"tools": []},
        )
    ],
    (CHAT, user([{"image_url": "https://x"}])),
    (CHAT, user([{"type": "text", "text": "x", "image_url": "https://x"}])),
    (CHAT, user([{"type": "image", "url": "https://x"}])),
    (CHAT, user([{"type": "something_new", "text": "x"}])),
    (CHAT, user([[{"type": "image_url", "image_url": "https://x"}]])),
    (CHAT, user({"type": "image_url", "image_url": "https://x"})),
    (CHAT, {"model": "m", "messages": {"role": "user", "content": "x"}}),
    # responses
    *[
        (RESPONSES, {"model": "m", "input": "x", "tools": [{"type": kind}]})
        for kind in (
            "web_search",
            "web_search_preview",
            "web_search_preview_2025_03_11",
            "web_search_2025_08_26",
            "code_interpreter",
            "file_search",
            "computer_use_preview",
            "computer",
            "mcp",
            "image_generation",
            "shell",
            "tomorrows_tool",
            "",
        )
    ],
    (RESPONSES, {"model": "m", "input": "x", "tools": [{"type": "shell", "environment": {"type": "container_auto"}}]}),
    (RESPONSES, {"model": "m", "input": "x", "tools": [{"type": "namespace", "tools": [{"type": "web_search"}]}]}),
    (RESPONSES, {"model": "m", "input": "x", "tool_choice": {"type": "allowed_tools", "tools": [{"type": "mcp"}]}}),
    (RESPONSES, {"model": "m", "input": "x", "background": True}),
    (RESPONSES, {"model": "m", "input": "x", "include": ["web_search_call.action.sources"]}),
    (RESPONSES, {"model": "m", "input": "x", "include": "web_search_call.action.sources"}),
    (RESPONSES, {"model": "m", "input": "x", "prompt": {"id": "pmpt_1"}}),
    (RESPONSES, {"model": "m", "input": "x", "conversation": "conv_1"}),
    (RESPONSES, item({"role": "user", "content": [{"type": "input_image", "image_url": "https://x"}]})),
    (RESPONSES, item({"role": "user", "content": [{"type": "input_image", "file_id": "file-1"}]})),
    (RESPONSES, item({"role": "user", "content": [{"type": "input_file", "file_url": "https://x"}]})),
    (RESPONSES, item({"role": "user", "content": [{"type": "input_file", "file_id": "file-1"}]})),
    (
        RESPONSES,
        item(
            {
                "type": "function_call_output",
                "call_id": "1",
                "output": [{"type": "input_image", "image_url": "https://x"}],
            }
        ),
    ),
    (RESPONSES, item({"type": "web_search_call", "id": "1"})),
    (RESPONSES, item({"type": "mcp_approval_response"})),
    (RESPONSES, item("text in place of an item")),
    # anthropic
    *[
        (ANTHROPIC, {**user("x"), "tools": [{"type": kind, "name": "t"}]})
        for kind in (
            "web_search_20250305",
            "web_fetch_20250910",
            "code_execution_20250522",
            "code_execution_20250825",
            "mcp_toolset",
            "advisor_20260301",
            "bash",
            "",
        )
    ],
    (ANTHROPIC, {**user("x"), "mcp_servers": [{"type": "url", "url": "https://x"}]}),
    (ANTHROPIC, {**user("x"), "container": "c"}),
    (ANTHROPIC, {**user("x"), "context_management": {"edits": [{"type": "compact_20260112"}]}}),
    (ANTHROPIC, {**user("x"), "context_management": {"edits": {"type": "compact_20260112"}}}),
    (ANTHROPIC, {**user("x"), "context_management": [{"type": "compact_20260112"}]}),
    (ANTHROPIC, {**user("x"), "context_management": {"compact": {}}}),
    (RESPONSES, {"model": "m", "input": "x", "context_management": [{"type": "compaction"}]}),
    (RESPONSES, {"model": "m", "input": "x", "context_management": {"edits": []}}),
    (ANTHROPIC, {**user("x"), "speed": "fast"}),
    (ANTHROPIC, user([{"type": "image", "source": {"type": "url", "url": "https://x"}}])),
    (ANTHROPIC, user([{"type": "image", "source": {"type": "base64", "data": "", "url": "https://x"}}])),
    (ANTHROPIC, user([{"type": "image", "source": "https://x"}])),
    (ANTHROPIC, user([{"type": "document", "source": {"type": "url", "url": "https://x"}}])),
    (ANTHROPIC, user([{"type": "document", "source": {"type": "file", "file_id": "f"}}])),
    (ANTHROPIC, user([{"type": "container_upload", "file_id": "f"}])),
    (ANTHROPIC, user([{"type": "server_tool_use", "name": "web_search"}])),
    (
        ANTHROPIC,
        user([{"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": "https://x"}}]}]),
    ),
    (
        ANTHROPIC,
        user(
            [
                {
                    "type": "document",
                    "source": {"type": "content", "content": [{"type": "image", "source": {"type": "url"}}]},
                }
            ]
        ),
    ),
    (ANTHROPIC, {**user("x"), "system": [{"type": "image", "source": {"type": "url", "url": "https://x"}}]}),
    # gemini
    *[
        (GEMINI, {**parts({"text": "x"}), "tools": [{kind: {}}]})
        for kind in (
            "googleSearch",
            "google_search",
            "googleSearchRetrieval",
            "urlContext",
            "url_context",
            "codeExecution",
            "code_execution",
            "googleMaps",
            "computerUse",
            "fileSearch",
            "mcpServers",
            "tomorrowsTool",
        )
    ],
    (GEMINI, {**parts({"text": "x"}), "tools": [{"functionDeclarations": [], "googleSearch": {}}]}),
    (GEMINI, {**parts({"text": "x"}), "tools": {"googleSearch": {}}}),
    (GEMINI, {**parts({"text": "x"}), "tools": [], "Tools": [{"googleSearch": {}}]}),
    (GEMINI, {**parts({"text": "x"}), "cachedContent": "cachedContents/1"}),
    (GEMINI, {**parts({"text": "x"}), "cached_content": "cachedContents/1"}),
    (GEMINI, {**parts({"text": "x"}), "toolConfig": {"retrievalConfig": {}}}),
    (GEMINI, {"system_instruction": {"parts": {"file_data": {"file_uri": "https://x"}}}, "contents": []}),
    (GEMINI, {"systemInstruction": {}, "system_instruction": {"parts": [{"fileData": {}}]}, "contents": []}),
    (GEMINI, parts({"fileData": {"fileUri": "https://youtube.example/x"}})),
    (GEMINI, parts({"file_data": {"file_uri": "gs://x"}})),
    (GEMINI, parts({"text": "x", "executableCode": {}})),
    (GEMINI, parts({"functionResponse": {"parts": [{"fileData": {"fileUri": "https://x"}}]}})),
    (GEMINI, {"contents": {"parts": {"fileData": {}}}}),
    (GEMINI, {"generateContentRequest": {**parts({"text": "x"}), "tools": [{"googleSearch": {}}]}}),
]


@pytest.mark.parametrize("case", REFUSED, ids=named)
def test_what_reaches_beyond_the_driver_is_refused(case: tuple[str, dict[str, Any]]) -> None:
    with pytest.raises(Refusal) as caught:
        check(*case, NOTHING)
    assert caught.value.code in ("hosted_tool", "unreadable")


known_names = st.sampled_from(
    [
        "messages",
        "input",
        "contents",
        "tools",
        "tool_choice",
        "system",
        "content",
        "parts",
        "type",
        "image_url",
        "source",
        "url",
        "text",
        "role",
        "stream",
        "include",
        "n",
        "output",
        "service_tier",
        "environment",
        "generationConfig",
    ]
)
shaped = st.recursive(
    json_values | st.sampled_from(["image_url", "url", "web_search", "message", "text", "tool_result", "https://x"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(known_names, inner, max_size=4),
    max_leaves=20,
)


@OFTEN
@given(dialect=st.sampled_from(DIALECTS), body=st.dictionaries(known_names | st.text(max_size=5), shaped, max_size=5))
def test_any_body_is_let_in_or_refused_and_never_an_accident(dialect: str, body: dict[str, Any]) -> None:
    try:
        check(dialect, body, NOTHING)
        asked(dialect, body, 10)
    except Refusal as refusal:
        for each in DIALECTS:
            json.loads(refusal.body(each))
    assert size_of(body).tokens >= 1


REMOTE = {
    CHAT: {"type": "image_url", "image_url": {"url": "https://x"}},
    RESPONSES: {"type": "input_image", "image_url": "https://x"},
    ANTHROPIC: {"type": "image", "source": {"type": "url", "url": "https://x"}},
}


@OFTEN
@given(depth=st.integers(0, 5), dialect=st.sampled_from([CHAT, RESPONSES, ANTHROPIC]), data=st.data())
def test_an_address_is_found_wherever_content_may_stand(depth: int, dialect: str, data: st.DataObject) -> None:
    part: Any = REMOTE[dialect]
    for _ in range(depth):
        before = data.draw(st.lists(st.just({"type": "text", "text": "x"}), max_size=2))
        inside = data.draw(st.booleans())
        content = [*before, part]
        source = {"type": "content", "content": content}
        part = {"type": "tool_result", "content": content} if inside else {"type": "document", "source": source}
    body = item({"role": "user", "content": [part]}) if dialect == RESPONSES else user([part])
    with pytest.raises(Refusal):
        check(dialect, body, NOTHING)
