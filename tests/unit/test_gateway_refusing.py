"""What reaches beyond the driver is refused, wherever in a request it stands; what agents send passes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from bodies import FUNCTION, NOTHING, PLAIN, item, parts, user
from draws import OFTEN, json_values
from hypothesis import given
from hypothesis import strategies as st

from autorl_hpc.gateway.hosted_tools import check
from autorl_hpc.gateway.request import ANTHROPIC, CHAT, DIALECTS, GEMINI, RESPONSES, Allowed, Refusal, names
from autorl_hpc.gateway.token_usage import asked, size_of

Case = tuple[str, dict[str, Any]]
X = "https://x"
DATA_URL = "data:image/png;base64,iVBORw0KGgo="


def fields(dialect: str, *each: dict[str, Any]) -> list[Case]:
    """Plain requests, each with more fields."""
    return [(dialect, {**PLAIN[dialect], **more}) for more in each]


def tools(dialect: str, kinds: str) -> list[Case]:
    each = [{kind: {}} if dialect == GEMINI else {"type": kind, "name": "t"} for kind in kinds.split()]
    return fields(dialect, *({"tools": [tool]} for tool in each))


def content(dialect: str, *each: Any) -> list[Case]:
    """Requests with one part of content each."""
    if dialect == GEMINI:
        return [(dialect, parts(part)) for part in each]
    return [(dialect, item({"role": "user", "content": [p]}) if dialect == RESPONSES else user([p])) for p in each]


# fmt: off
REFUSED: list[Case] = [
    *fields(CHAT, {"web_search_options": {}}, {"plugins": [{"id": "web"}]}, {"search_parameters": {"mode": "on"}}, {"enable_search": True},
            {"models": ["m", "other:online"]}, {"Tools": [{"type": "web_search"}]}, {"extra_body": {}}, {"chat_template": "{{ x }}"},
            {"kv_transfer_params": {"remote_host": "10.0.0.1"}}, {"service_tier": "priority"},
            {"tools": [FUNCTION, {"type": "mcp", "server_url": X}]}, {"tools": [{"name": "untyped"}]}, {"tools": {"type": "web_search"}},
            {"tool_choice": {"type": "web_search"}}, {"messages": {"role": "user", "content": "x"}},
            {"modalities": ["text", "image"]}, {"modalities": ["audio"]}, {"modalities": "image"}, {"modalities": [{}]}),
    *[case for dialect in (CHAT, ANTHROPIC)
      for case in fields(dialect, *({"chat_template_kwargs": {"enable_thinking": True, **kwargs}} for kwargs in (
          {"chat_template": "{{ x }}"}, {"tokenize": False}, {"continue_final_message": True}, {"tools": []})))],
    *fields(CHAT, {"chat_template_kwargs": [["chat_template", "x"]]}),
    *tools(CHAT, "web_search_preview openrouter:web_search"),
    *content(CHAT, *({"type": "image_url", "image_url": url} for url in (
                 {"url": X}, "http://169.254.169.254/latest", {"url": "file:///etc/passwd"}, {"url": " data:x"}, {})),
             {"type": "video_url", "video_url": {"url": X}}, {"type": "audio_url", "audio_url": {"url": X}},
             {"type": "file", "file": {"file_id": "file-1"}},
             *({"type": "file", "file": {"file_data": data}} for data in (X, " " * 41 + X, "file:/x", "x.example", [X], {"url": X})),
             *({"type": "input_audio", "input_audio": audio} for audio in (
                 {"data": X, "format": "wav"}, {"data": [X]}, {"data": "AAAA", "url": X}, {"url": X}, X)),
             {"image_url": X}, {"type": "text", "text": "x", "image_url": X}, {"type": "image", "url": X},
             {"type": "something_new", "text": "x"}, [{"type": "image_url", "image_url": X}]),
    (CHAT, user({"type": "image_url", "image_url": X})),
    *tools(RESPONSES, "web_search web_search_preview web_search_preview_2025_03_11 web_search_2025_08_26 code_interpreter file_search "
           "computer_use_preview computer mcp image_generation shell tomorrows_tool"),
    *fields(RESPONSES, {"tools": [{"type": ""}]}, {"tools": [{"type": "shell", "environment": {"type": "container_auto"}}]},
            {"tools": [{"type": "namespace", "tools": [{"type": "web_search"}]}]},
            {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "mcp"}]}}, {"background": True},
            {"include": ["web_search_call.action.sources"]}, {"include": "web_search_call.action.sources"}, {"prompt": {"id": "pmpt_1"}},
            {"conversation": "conv_1"}, {"context_management": [{"type": "compaction"}]}, {"context_management": {"edits": []}}),
    *content(RESPONSES, {"type": "input_image", "image_url": X}, {"type": "input_image", "file_id": "file-1"},
             {"type": "input_file", "file_url": X}, {"type": "input_file", "file_id": "file-1"}),
    (RESPONSES, item({"type": "function_call_output", "call_id": "1", "output": [{"type": "input_image", "image_url": X}]})),
    (RESPONSES, item({"type": "web_search_call", "id": "1"})),
    (RESPONSES, item({"type": "mcp_approval_response"})),
    (RESPONSES, item("text in place of an item")),
    *tools(ANTHROPIC, "web_search_20250305 web_fetch_20250910 code_execution_20250522 code_execution_20250825 mcp_toolset advisor_20260301 bash"),
    *fields(ANTHROPIC, {"tools": [{"type": "", "name": "t"}]}, {"mcp_servers": [{"type": "url", "url": X}]}, {"container": "c"}, {"speed": "fast"},
            {"context_management": {"edits": [{"type": "compact_20260112"}]}}, {"context_management": {"edits": {"type": "compact_20260112"}}},
            {"context_management": [{"type": "compact_20260112"}]}, {"context_management": {"compact": {}}},
            {"system": [{"type": "image", "source": {"type": "url", "url": X}}]}),
    *content(ANTHROPIC, *({"type": "image", "source": source} for source in (
                 {"type": "url", "url": X}, {"type": "base64", "data": "", "url": X}, X)),
             {"type": "document", "source": {"type": "url", "url": X}}, {"type": "document", "source": {"type": "file", "file_id": "f"}},
             {"type": "container_upload", "file_id": "f"}, {"type": "server_tool_use", "name": "web_search"}),
    *tools(GEMINI, "googleSearch google_search googleSearchRetrieval urlContext url_context codeExecution code_execution googleMaps computerUse "
           "fileSearch mcpServers tomorrowsTool"),
    *fields(GEMINI, *({"generationConfig": config} for config in (
                {"routingConfig": {"manualMode": {"modelName": "dearer"}}}, {"model_config": {}}, {"responseModalities": ["TEXT", "IMAGE"]},
                {"response_modalities": "IMAGE"}, {"tools": []})),
            {"tools": [{"functionDeclarations": [], "googleSearch": {}}]}, {"tools": {"googleSearch": {}}}, {"tools": ["googleSearch"]},
            {"tools": [], "Tools": [{"googleSearch": {}}]}, {"cachedContent": "c"}, {"cached_content": "c"}, {"toolConfig": {"retrievalConfig": {}}},
            {"system_instruction": {"parts": {"file_data": {"file_uri": X}}}}, {"contents": {"parts": {"fileData": {}}}},
            {"systemInstruction": {}, "system_instruction": {"parts": [{"fileData": {}}]}},
            {"generateContentRequest": {**parts({"text": "x"}), "tools": [{"googleSearch": {}}]}}),
    *content(GEMINI, {"fileData": {"fileUri": X}}, {"file_data": {"file_uri": "gs://x"}}, {"text": "x", "executableCode": {}},
             {"functionResponse": {"parts": [{"fileData": {"fileUri": X}}]}}),
]

TAKEN: list[Case] = [
    *fields(CHAT, {"tools": [FUNCTION, {"type": "custom", "custom": {"name": "patch"}}], "tool_choice": "auto"},
            {"tool_choice": {"type": "function", "function": {"name": "bash"}}, "service_tier": "default"},
            {"modalities": ["text"]}, {"modalities": None},
            {"chat_template_kwargs": {"enable_thinking": False}, "top_k": 20, "reasoning_effort": "low"},
            {"messages": [
                {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "bash", "arguments": '{"image_url": "https://x"}'}}]},
                {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "ok"}]}]}),
    (CHAT, user([{"type": "text", "text": "see https://x"}, {"type": "image_url", "image_url": {"url": DATA_URL}}])),
    *content(CHAT, *({"type": "input_audio", "input_audio": audio} for audio in (
                 {"data": "AA+/\n-_==", "format": "wav"}, {"data": "data:audio/wav;base64,AAAA"}, None)),
             *({"type": "file", "file": {"file_data": data, "filename": "a.pdf"}} for data in ("AA==", "data:application/pdf;base64,AA=="))),
    (CHAT, user(None)),
    *fields(RESPONSES, {"include": ["reasoning.encrypted_content"], "store": False, "background": False},
            {"previous_response_id": "resp_1", "tools": [{"type": "local_shell"}]}, {"tools": [{"type": "shell", "environment": {"type": "local"}}]},
            {"tools": [{"type": "function", "name": "f", "parameters": {}}, {"type": "custom", "name": "p"}]}),
    (RESPONSES, item(
        {"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_image", "image_url": DATA_URL}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}], "encrypted_content": "gAAA"},
        {"type": "function_call", "name": "f", "arguments": "{}", "call_id": "1"},
        {"type": "function_call_output", "call_id": "1", "output": X},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "x", "annotations": []}]})),
    *fields(ANTHROPIC, {"tools": [{"name": "Bash", "input_schema": {}}, {"type": "bash_20250124", "name": "bash"}]},
            {"tools": [{"type": "custom", "name": "a"}, {"type": "text_editor_20250728", "name": "b"}]},
            {"thinking": {"type": "enabled"}, "metadata": {}, "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
             "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}, {"type": "clear_thinking_20251015"}]}}),
    *content(ANTHROPIC, {"type": "thinking", "thinking": "x", "signature": "s"},
             {"type": "tool_use", "id": "1", "name": "WebFetch", "input": {"url": X, "type": "image"}},
             {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image", "source": {"type": "base64", "data": "AA"}}]},
             {"type": "document", "source": {"type": "text", "data": "x", "media_type": "text/plain"}}),
    *fields(GEMINI, {"generationConfig": None}, {
        "tools": [{"functionDeclarations": [{"name": "google_search"}]}], "toolConfig": {"functionCallingConfig": {"mode": "AUTO"}},
        "generationConfig": {"thinkingConfig": {}, "temperature": 0, "response_mime_type": "application/json", "_responseJsonSchema": {},
                             "responseModalities": ["TEXT"]},
        "safetySettings": []}),
    *content(GEMINI, {"inlineData": {"mimeType": "image/png", "data": "AA"}}, {"functionCall": {"name": "f", "args": {"fileData": 1}}},
             {"functionResponse": {"name": "f", "response": {"fileData": "x"}}}, {"text": "x", "thoughtSignature": "s"}),
]

ALLOWED: list[tuple[str, Case]] = [
    *[("web_search", case) for case in (*tools(ANTHROPIC, "web_search_20250305"), *tools(RESPONSES, "web_search_preview"),
                                        *fields(CHAT, {"web_search_options": {}}))],
    *[("google_search", case) for case in tools(GEMINI, "googleSearch")],
    *[("remote_urls", case) for case in content(CHAT, {"type": "image_url", "image_url": {"url": X}}, {"type": "input_audio", "input_audio": {"data": X}})],
    *[("image", case) for case in (*fields(CHAT, {"modalities": ["image", "text"]}),
                                   *fields(GEMINI, {"generationConfig": {"responseModalities": ["IMAGE"]}}))],
    *[("routing_config", case) for case in fields(GEMINI, {"generationConfig": {"routingConfig": {}}})],
    *[("plugins", case) for case in fields(CHAT, {"plugins": []})],
    *[("background", case) for case in fields(RESPONSES, {"background": True})],
]
# fmt: on


def test_what_reaches_beyond_the_driver_is_refused() -> None:
    let_in = []
    for case in REFUSED:
        try:
            check(*case, NOTHING)
            let_in.append(case)
        except Refusal as refusal:
            assert refusal.code in ("hosted_tool", "unreadable")
    assert not let_in


def test_what_agents_send_passes() -> None:
    for dialect, body in TAKEN:
        check(dialect, body, NOTHING)
        asked(dialect, body, 10)


def test_an_experiment_may_allow_one_thing_and_no_other() -> None:
    for name, case in ALLOWED:
        check(*case, Allowed((name,)))
        for others in ((), ("code_execution",), ("web",), ("search",)):
            with pytest.raises(Refusal):
                check(*case, Allowed(others))
    body = {**user("x"), "tools": [{"type": "web_search_20250305"}, {"type": "code_execution_20250825"}]}
    with pytest.raises(Refusal, match="code_execution"):
        check(ANTHROPIC, body, Allowed(("web_search",)))


known_names = st.sampled_from(
    sorted(
        names(
            "messages input contents tools tool_choice system content parts type image_url source url text role stream include n output "
            "service_tier environment generationConfig"
        )
    )
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
    assert size_of(body) >= 1


REMOTE = {
    CHAT: {"type": "image_url", "image_url": {"url": X}},
    RESPONSES: {"type": "input_image", "image_url": X},
    ANTHROPIC: {"type": "image", "source": {"type": "url", "url": X}},
}


@OFTEN
@given(depth=st.integers(0, 5), dialect=st.sampled_from(list(REMOTE)), data=st.data())
def test_an_address_is_found_wherever_content_may_stand(depth: int, dialect: str, data: st.DataObject) -> None:
    part: Any = REMOTE[dialect]
    for _ in range(depth):
        inner = [*data.draw(st.lists(st.just({"type": "text", "text": "x"}), max_size=2)), part]
        source = {"type": "content", "content": inner}
        inside = data.draw(st.booleans())
        part = {"type": "tool_result", "content": inner} if inside else {"type": "document", "source": source}
    for case in content(dialect, part):
        with pytest.raises(Refusal):
            check(*case, NOTHING)
