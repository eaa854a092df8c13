"""Which requests the gateway lets in: by lists of what is known. Pure functions; the process is in test_gateway.py."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autorl_hpc.gateway.allowed import Allowed
from autorl_hpc.gateway.asked import asked
from autorl_hpc.gateway.headers import check_beta, shown_key, to_client, to_driver, with_key
from autorl_hpc.gateway.hosted import check
from autorl_hpc.gateway.refusals import ANTHROPIC, CHAT, DIALECTS, GEMINI, RESPONSES, Refusal
from autorl_hpc.gateway.routes import route, split
from autorl_hpc.gateway.sizes import MOST_INPUT_TOKENS, size_of
from autorl_hpc.gateway.strictly import MAX_VALUES, has_more_values, read_object

NOTHING = Allowed(())
OFTEN = settings(max_examples=60, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
DATA_URL = "data:image/png;base64,iVBORw0KGgo="
FUNCTION = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"url": {}}}},
}


def user(content: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": content}]}


def item(*items: Any) -> dict[str, Any]:
    return {"model": "m", "input": list(items)}


def parts(*given: Any) -> dict[str, Any]:
    return {"contents": [{"role": "user", "parts": list(given)}]}


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


def named(case: tuple[str, dict[str, Any]]) -> str:
    return f"{case[0]}-{json.dumps(case[1])[:70]}"


@pytest.mark.parametrize("case", REFUSED, ids=named)
def test_what_reaches_beyond_the_driver_is_refused(case: tuple[str, dict[str, Any]]) -> None:
    with pytest.raises(Refusal) as caught:
        check(*case, NOTHING)
    assert caught.value.code in ("hosted_tool", "unreadable")


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


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=12,
)
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


# ------------------------------------------------------------------------------------------------------------------- JSON


@pytest.mark.parametrize(
    "data",
    [
        b'{"tools": [{"type": "web_search"}], "tools": []}',
        b'{"tools": [], "\\u0074ools": [{"type": "web_search"}]}',
        b'{"a": {"type": "text", "type": "image_url"}}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b'{"a": 1} {"b": 2}',
        b'{"a": 1,}',
        b"{'a': 1}",
        b'{"a": 1} // comment',
        b"[1]",
        b'"text"',
        b"",
        b"null",
        b"\xef\xbb\xbf{}",
        b'{"a": "\xff"}',
        b'{"a": "\xc0\xaf"}',
        '{"a": 1}'.encode("utf-16"),
        '{"a": 1}'.encode("utf-32"),
        b'{"a": ' + b"[" * 300 + b"]" * 300 + b"}",
        b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a": ' + b"9" * 10_000 + b"}",
        b'{"a": "tab\there"}',
    ],
    ids=lambda data: repr(data[:30]),
)
def test_what_two_readers_may_read_in_two_ways_is_refused(data: bytes) -> None:
    with pytest.raises(Refusal):
        read_object(data)


@OFTEN
@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_plain_json_is_read_as_it_is(value: dict[str, Any]) -> None:
    assert read_object(json.dumps(value).encode()) == value
    assert read_object(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")) is not None


def values_of(value: Any) -> int:
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
    return 1 + sum(map(values_of, inner))


@OFTEN
@given(st.recursive(json_values, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30))
def test_values_are_counted_before_they_are_read(value: Any) -> None:
    for spaces in (None, 1):
        for ascii_only in (True, False):
            data = json.dumps(value, indent=spaces, ensure_ascii=ascii_only).encode("utf-8", "surrogatepass")
            assert not has_more_values(data, 2 * values_of(value) + 1), "commas in texts are no values"
            if values_of(value) > 2:
                assert has_more_values(data, values_of(value) // 2)


@pytest.mark.parametrize(
    "many", [b'{"":1},' * 400_000 + b"0", b"[]," * 400_000 + b"0", b"0," * 400_000 + b"0", b'"",' * 400_000 + b'""']
)
def test_a_body_of_more_values_than_memory_is_for_is_refused(many: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        read_object(b'{"metadata":[' + many + b"]}")
    assert caught.value.status == 413


def test_a_text_full_of_json_is_one_value() -> None:
    text = json.dumps([{"a": "b\\", "c": ['\\"', 1]}] * 110_000)
    assert text.count(",") > MAX_VALUES
    assert read_object(json.dumps({"input": text}).encode()) == {"input": text}


@OFTEN
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    try:
        assert isinstance(read_object(data), dict)
    except Refusal:
        pass


# ------------------------------------------------------------------------------------------------------------------ paths


@pytest.mark.parametrize(
    "target",
    [
        "/",
        "",
        "*",
        "/v1",
        "/v2/chat/completions",
        "/v1/completions",
        "/v1/embeddings",
        "/v1/files",
        "/v1/batches",
        "/v1/responses/resp_1",
        "/v1/responses/",
        "/v1/chat/completions/",
        "/v1//chat/completions",
        "//v1/chat/completions",
        "/v1/../v1/files",
        "/v1/chat/../files",
        "/v1/./chat/completions",
        "/v1/chat%2fcompletions",
        "/v1/%2e%2e/files",
        "/v1/messages/batches",
        "/v1/messages%00",
        "/v1/messages\\..\\files",
        "/v1/messages;x=1",
        "/V1/messages",
        "http://evil.example/v1/messages",
        "https://api.openai.com/v1/messages",
        "evil.example:443",
        "/v1beta/models/m:batchGenerateContent",
        "/v1beta/models/../files:generateContent",
        "/v1beta/models/m:generateContent/x",
        "/v1beta/cachedContents",
        "/v1beta/models:generateContent",
        "/upload/v1beta/files",
        "/v1/messages#x",
        "/v1/realtime",
        "/v1/messages\n",
        "/v1/mes sages",
        "/v1/messäges",
    ],
)
def test_other_paths_dont_pass(target: str) -> None:
    with pytest.raises(Refusal):
        route("POST", split(target))
    for method in ("GET", "DELETE", "OPTIONS", "CONNECT"):
        try:
            found = route(method, split(target))
        except Refusal:
            continue
        assert found.kind == "models", "which the gateway answers itself"


@pytest.mark.parametrize(
    ("method", "target", "dialect", "path", "query"),
    [
        ("POST", "/v1/chat/completions", CHAT, "/chat/completions", ""),
        ("POST", "/v1/responses", RESPONSES, "/responses", ""),
        ("POST", "/v1/messages?beta=true", ANTHROPIC, "/messages", "?beta=true"),
        ("POST", "/v1/messages/count_tokens", ANTHROPIC, "/messages/count_tokens", ""),
        (
            "POST",
            "/v1beta/models/g-2.5:streamGenerateContent?key=t&alt=sse",
            GEMINI,
            "/models/g-2.5:streamGenerateContent",
            "?alt=sse",
        ),
        ("POST", "/v1beta/models/org/g:generateContent", GEMINI, "/models/org/g:generateContent", ""),
    ],
)
def test_known_paths_pass(method: str, target: str, dialect: str, path: str, query: str) -> None:
    found = route(method, split(target))
    assert (found.dialect, found.path, found.query) == (dialect, path, query)


@pytest.mark.parametrize(
    "query", ["a=1", "alt=media", "beta=true&beta=true", "alt=sse&alt=json", "beta", "$alt=sse", "%61lt=sse&x=%ff"]
)
def test_other_queries_dont_pass(query: str) -> None:
    with pytest.raises(Refusal):
        route("POST", split(f"/v1/messages?{query}"))


@OFTEN
@given(st.text(max_size=40))
def test_a_path_that_passes_is_a_known_one(text: str) -> None:
    for target in (text, f"/v1/{text}", f"/v1beta/models/{text}:generateContent", f"/v1/messages/{text}"):
        try:
            found = route("POST", split(target))
        except Refusal:
            continue
        assert found.path in ("/chat/completions", "/responses", "/messages", "/messages/count_tokens") or (
            found.path.startswith("/models/")
            and "//" not in found.path
            and "%" not in found.path
            and not {".", "..", ""} & set(found.path[1:].split("/"))
        )


# ---------------------------------------------------------------------------------------------------------------- headers


def test_headers_pass_by_a_list() -> None:
    given_headers = [
        ("User-Agent", "codex"),
        ("anthropic-beta", "a"),
        ("Anthropic-Version", "2023-06-01"),
        ("X-Stainless-Lang", "js"),
        ("Host", "evil"),
        ("Cookie", "c"),
        ("X-HTTP-Method-Override", "DELETE"),
        ("X-Forwarded-For", "1"),
        ("Connection", "x"),
        ("Transfer-Encoding", "chunked"),
        ("Authorization", "Bearer t"),
        ("x-api-key", "t"),
        ("OpenAI-Organization", "o"),
        ("Proxy-Authorization", "p"),
        ("x-goog-user-project", "p"),
        ("Range", "bytes=0-"),
        ("accept", "x\x7f"),
        ("anthropic-beta", "b"),
    ]
    assert to_driver(given_headers) == {
        "user-agent": "codex",
        "anthropic-beta": "a",
        "anthropic-version": "2023-06-01",
        "x-stainless-lang": "js",
    }
    answered = [
        ("Content-Type", "x"),
        ("Set-Cookie", "s"),
        ("openai-organization", "o"),
        ("Retry-After", "3"),
        ("Transfer-Encoding", "chunked"),
    ]
    assert to_client(answered) == [("Content-Type", "x"), ("Retry-After", "3")]


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


@pytest.mark.parametrize(
    "shown",
    [{}, {"authorization": "Bearer "}, {"authorization": "tok"}, {"x-api-key": "tok "}, {"authorization": "Basic tok"}],
)
def test_without_the_token_nothing_passes(shown: dict[str, str]) -> None:
    with pytest.raises(Refusal) as caught:
        shown_key(shown, (), "tok")
    assert caught.value.status == 401


# --------------------------------------------------------------------------------------------------------------- estimates


@pytest.mark.parametrize(
    ("dialect", "body", "out"),
    [
        (CHAT, {"max_tokens": 5}, 5),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 7, "n": 3}, 21),
        (CHAT, {"max_tokens": 9, "max_completion_tokens": 7}, 9),
        (CHAT, {"max_tokens": None, "n": None}, 99),
        (RESPONSES, {"max_output_tokens": 5}, 5),
        (ANTHROPIC, {"max_tokens": 5}, 5),
        (GEMINI, {"generationConfig": {"maxOutputTokens": 5, "candidateCount": 2}}, 10),
        (GEMINI, {"generation_config": {"max_output_tokens": 5}}, 5),
        (GEMINI, {"generationConfig": {"maxOutputTokens": "60000", "candidateCount": "8"}}, 480_000),
        (GEMINI, {"generationConfig": None}, 99),
    ],
)
def test_how_long_an_answer_may_become(dialect: str, body: dict[str, Any], out: int) -> None:
    assert asked(dialect, body, 99).tokens_out == out


@pytest.mark.parametrize("stream", ["true", 1, [], {}])
def test_a_stream_is_true_or_false(stream: object) -> None:
    with pytest.raises(Refusal):
        asked(CHAT, {"stream": stream}, 99)


@pytest.mark.parametrize("value", [True, -5, 0, 5.0, "5", "90000", 10**30, [5], {}])
def test_a_limit_that_two_may_read_in_two_ways_is_refused(value: object) -> None:
    fields = [(CHAT, "max_tokens"), (CHAT, "n"), (RESPONSES, "max_output_tokens"), (ANTHROPIC, "max_tokens")]
    cases: list[tuple[str, dict[str, Any]]] = [(dialect, {name: value}) for dialect, name in fields]
    if not isinstance(value, str):
        cases += [(GEMINI, {"generationConfig": {name: value}}) for name in ("maxOutputTokens", "candidate_count")]
    for dialect, body in cases:
        with pytest.raises(Refusal) as caught:
            asked(dialect, body, 99)
        assert caught.value.status == 400


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (CHAT, {"n": 100_000}),
        (GEMINI, {"generationConfig": {"candidateCount": "17"}}),
        (GEMINI, {"generationConfig": []}),
        (GEMINI, {"generationConfig": {"maxOutputTokens": 5, "max_output_tokens": 50_000}}),
    ],
)
def test_too_many_answers_and_odd_configurations_are_refused(dialect: str, body: dict[str, Any]) -> None:
    with pytest.raises(Refusal):
        asked(dialect, body, 99)


IMAGE = "data:image/png;base64," + "A" * 4_000_000
NO_SPACES = "A" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        user([{"type": "image_url", "image_url": {"url": IMAGE}}]),
        user([{"type": "image_url", "image_url": IMAGE}]),
        item({"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]}),
        user([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBOR" * 100_000}}]),
        parts({"inlineData": {"mimeType": "image/png", "data": NO_SPACES}}),
        parts({"inline_data": {"mime_type": "image/png", "data": NO_SPACES}}),
    ],
)
def test_an_image_is_not_counted_by_its_bytes(body: dict[str, Any]) -> None:
    assert 1500 <= size_of(body).tokens < 1600
    assert size_of(body).most < 20_000


@pytest.mark.parametrize(
    "body",
    [
        user(NO_SPACES),
        user("A" * 2100 + " word words of text." * 5000),
        user(IMAGE),
        user([{"type": "text", "text": IMAGE}]),
        user([{"type": "tool_use", "name": "f", "input": {"source": {"type": "base64", "data": NO_SPACES}}}]),
        user([{"type": "document", "source": {"type": "text", "media_type": "image/png", "data": NO_SPACES}}]),
        user([{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "some words " * 10_000}}]),
        item({"role": "user", "content": NO_SPACES}),
        {"input": NO_SPACES},
        parts({"functionCall": {"args": {"inlineData": {"mimeType": "image/png", "data": NO_SPACES}}}}),
        parts({"text": NO_SPACES}),
    ],
)
def test_words_that_look_like_an_image_are_words(body: dict[str, Any]) -> None:
    assert size_of(body).tokens >= 25_000
    assert size_of(body).most >= 100_000


def test_no_input_is_longer_than_its_bytes_or_than_a_window() -> None:
    assert size_of(user("é" * 1000)).most >= 2000
    assert size_of(user("x" * 10_000_000)).most == MOST_INPUT_TOKENS


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
    assert (asked(RESPONSES, body, 99).most_in == MOST_INPUT_TOKENS) is stored
