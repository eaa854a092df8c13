"""Refuse requests that make the provider do more than generate: search, run code, fetch addresses, open stored files.

Only listed fields, types of tools and kinds of content pass. Tool arguments and schemas are the agent's own and are not checked."""

from __future__ import annotations

import re
from typing import Any, Final

from autorl_hpc.gateway.request import ANTHROPIC, CHAT, GEMINI, REMOTE_URLS, RESPONSES, Allowed, names, unreadable


def check(dialect: str, body: dict[str, Any], allowed: Allowed) -> None:
    """Check a request's body, as `read_object` returned it. Raises Refusal if it asks for more than generation, or has unknown
    parts."""
    if dialect == GEMINI:
        _gemini(body, allowed)
        return
    allowed.need_all(body, FIELDS[dialect], "the field")
    tier = body.get("service_tier")
    if tier is not None:
        allowed.need_all((_text(tier, "service_tier"),), TIERS, "the service tier")
    variables = _object(body.get("chat_template_kwargs"), "chat_template_kwargs")
    allowed.need_all(variables.keys() & TEMPLATE_OWN, frozenset(), "in chat_template_kwargs the field")
    {CHAT: _chat, RESPONSES: _responses, ANTHROPIC: _anthropic}[dialect](body, allowed)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise unreadable(f"`{what}` is not a text")
    return value


def _object(value: Any, what: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise unreadable(f"`{what}` is not an object")
    return value


def _objects(value: Any, what: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise unreadable(f"`{what}` is not a list of objects")
    return value


def _modalities(kinds: Any, allowed: Allowed) -> None:
    """Refuse answers other than text: images and speech are like hosted tools and have their own prices."""
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise unreadable("modalities are no list of texts")
    for kind in kinds or ():
        if kind.lower() != "text":
            allowed.need(kind, "an answer of the modality")


# --- Gemini, whose fields have two spellings: `fileData` and `file_data`

GEMINI_FIELDS: Final = names(
    "contents tools toolConfig systemInstruction generationConfig safetySettings generateContentRequest model labels"
)
GEMINI_TOOLS: Final = names("functionDeclarations")
GEMINI_TOOL_CONFIG: Final = names("functionCallingConfig")
GEMINI_PARTS: Final = names(
    "text thought thoughtSignature inlineData functionCall functionResponse videoMetadata partMetadata mediaResolution"
)
GEMINI_CONFIG: Final = names(
    "temperature topP topK seed candidateCount maxOutputTokens stopSequences presencePenalty frequencyPenalty responseMimeType responseSchema "
    "responseJsonSchema ResponseJsonSchema responseFormat responseLogprobs logprobs responseModalities thinkingConfig mediaResolution "
    "audioTimestamp enableEnhancedCivicAnswers"
)
"""Fields of `generationConfig`. Fields that choose another model (`routingConfig`), speech and images are missing on purpose."""
GEMINI_INLINE: Final = names("mimeType data displayName")


def named(value: Any, where: str) -> dict[str, Any]:
    """Return an object with its fields in camel case. Raises Refusal if it is not an object, or has a field in both spellings."""
    if not isinstance(value, dict):
        raise unreadable(f"`{where}` is not an object")
    made = {re.sub(r"_([a-z0-9])", lambda match: match[1].upper(), name): inner for name, inner in value.items()}
    if len(made) != len(value):
        raise unreadable(f"in `{where}` a name is given in two spellings")
    return made


def _named_each(value: Any, where: str, *, texts: bool = True) -> list[dict[str, Any]]:
    """Return the objects of a list. Some readers of Protobuf's JSON accept a single one as a list of one."""
    each = [] if value is None else [value] if isinstance(value, dict | str) else value
    if not isinstance(each, list):
        raise unreadable(f"`{where}` is not a list")
    return [named(one, where) for one in each if not (texts and isinstance(one, str))]


def _gemini(body: Any, allowed: Allowed) -> None:
    given = named(body, "the request")
    allowed.need_all(given, GEMINI_FIELDS, "the field")
    if "generateContentRequest" in given:  # in countTokens
        _gemini(given["generateContentRequest"], allowed)
    for tool in _named_each(given.get("tools"), "tools", texts=False):
        allowed.need_all(tool, GEMINI_TOOLS, "the hosted tool")
    if given.get("toolConfig") is not None:
        config = named(given["toolConfig"], "toolConfig")
        allowed.need_all(config, GEMINI_TOOL_CONFIG, "in toolConfig the field")
    if given.get("generationConfig") is not None:
        config = named(given["generationConfig"], "generationConfig")
        allowed.need_all(config, GEMINI_CONFIG, "in generationConfig the field")
        _modalities(config.get("responseModalities"), allowed)
    for where in ("systemInstruction", "contents"):
        for content in _named_each(given.get(where), where):
            _gemini_parts(content.get("parts"), "parts", allowed)


def _gemini_parts(parts: Any, where: str, allowed: Allowed) -> None:
    for part in _named_each(parts, where):
        if "fileData" in part:
            allowed.need(REMOTE_URLS, "a part names a file that the provider would fetch, and")
        allowed.need_all(part, GEMINI_PARTS | {"fileData"}, "in a part the field")
        if "inlineData" in part:
            allowed.need_all(named(part["inlineData"], "inlineData"), GEMINI_INLINE, "in inlineData the field")
        if "functionResponse" in part:
            inner = named(part["functionResponse"], "functionResponse")
            _gemini_parts(inner.get("parts"), "functionResponse.parts", allowed)


# --- the other dialects

TIERS: Final = names("auto default flex standard standard_only")
"""Service tiers; others cost more than the budget's prices."""

COMMON: Final = "model stream temperature top_p top_k stop seed user metadata service_tier frequency_penalty presence_penalty logprobs"
SAMPLING: Final = (
    "min_p repetition_penalty length_penalty min_tokens stop_token_ids bad_words ignore_eos skip_special_tokens include_stop_str_in_output "
    "spaces_between_special_tokens chat_template_kwargs add_generation_prompt continue_final_message echo structured_outputs guided_json "
    "guided_regex guided_choice include_reasoning cache_salt return_token_ids logit_bias"
)
"""Fields of servers of open weights (vLLM, SGLang), without those by which a request names addresses or templates."""

FIELDS: Final[dict[str, frozenset[str]]] = {
    CHAT: names(
        f"{COMMON} {SAMPLING} messages max_tokens max_completion_tokens n stream_options response_format tools tool_choice parallel_tool_calls "
        "functions function_call reasoning_effort reasoning thinking verbosity store top_logprobs modalities prediction prompt_cache_key "
        "prompt_cache_retention safety_identifier usage cache_control enable_thinking"
    ),
    RESPONSES: names(
        f"{COMMON} {SAMPLING} input instructions max_output_tokens max_tool_calls tools tool_choice parallel_tool_calls reasoning text include "
        "store previous_response_id truncation top_logprobs stream_options prompt_cache_key prompt_cache_retention safety_identifier "
        "client_metadata background context_management"
    ),
    ANTHROPIC: names(
        f"{COMMON} {SAMPLING} messages system max_tokens stop_sequences thinking tools tool_choice context_management output_config "
        "output_format cache_control"
    ),
}

TEMPLATE_OWN: Final = names(
    "chat_template tokenize continue_final_message conversation messages tools documents padding truncation max_length return_tensors "
    "return_dict return_assistant_tokens_mask tokenizer_kwargs processor_kwargs template_kwargs tokenizer processor model_config"
)
"""What fills in the template (`apply_chat_template`) takes beside its variables: it would bring a template, prompt or tools past
the checks."""

INCLUDES: Final = names("reasoning.encrypted_content message.output_text.logprobs")
OWN_TOOLS: Final = {CHAT: names("function custom"), RESPONSES: names("function custom local_shell apply_patch")}
"""Tools that the agent runs."""

OWN_ANTHROPIC: Final = ("bash_20", "text_editor_20", "memory_20", "computer_20", "tool_search_tool_")
"""Prefixes of tool types that Anthropic defines and the agent runs. Tool search runs at the provider, over the request's
tools."""

ITEMS: Final = names(
    "message function_call function_call_output custom_tool_call custom_tool_call_output local_shell_call local_shell_call_output "
    "apply_patch_call apply_patch_call_output reasoning compaction item_reference"
)
"""Types of items in the input of `responses`."""


def _chat(body: dict[str, Any], allowed: Allowed) -> None:
    _tools(body.get("tools"), CHAT, allowed)
    _choice(body.get("tool_choice"), CHAT, allowed)
    _modalities(body.get("modalities"), allowed)
    for message in _objects(body.get("messages"), "messages"):
        _parts(message.get("content"), "messages.content", allowed)
        kinds = [_kind(call, "tool_calls", "function") for call in _objects(message.get("tool_calls"), "tool_calls")]
        allowed.need_all(kinds, OWN_TOOLS[CHAT], "a call of the tool")
        allowed.need_all(SOURCES & message.keys(), names("audio"), "in a message the field")


def _responses(body: dict[str, Any], allowed: Allowed) -> None:
    _tools(body.get("tools"), RESPONSES, allowed)
    _choice(body.get("tool_choice"), RESPONSES, allowed)
    if body.get("background"):
        allowed.need("background", "the field")
    _edits(body.get("context_management"), allowed)
    if not isinstance(body.get("include"), list | None):
        raise unreadable("`include` is not a list")
    for each in body.get("include") or ():
        if _text(each, "include") not in INCLUDES:
            allowed.need(each.partition(".")[0], "to include results of")
    for items in (body.get("instructions"), body.get("input")):
        for item in () if isinstance(items, str) else _objects(items, "input"):
            kind = _kind(item, "input", "message")
            if kind not in ITEMS:
                allowed.need(kind, "in the input an item of type")
                continue
            allowed.need_all(SOURCES & item.keys(), frozenset(), "in an item of the input the field")
            for name in ("content", "output", "summary"):
                _parts(item.get(name), f"input.{name}", allowed)


def _anthropic(body: dict[str, Any], allowed: Allowed) -> None:
    for tool in _objects(body.get("tools"), "tools"):
        kind = tool.get("type")
        if kind not in (None, "custom") and not _text(kind, "tools.type").startswith(OWN_ANTHROPIC):
            allowed.need(kind, "the hosted tool")
    management = _object(body.get("context_management"), "context_management")
    allowed.need_all(management, names("edits"), "in context_management the field")
    _edits(management.get("edits"), allowed)
    _parts(body.get("system"), "system", allowed)
    for message in _objects(body.get("messages"), "messages"):
        _parts(message.get("content"), "messages.content", allowed)


def _kind(value: dict[str, Any], where: str, default: str | None = None) -> str:
    return _text(value.get("type", default), f"{where}.type")


def _edits(edits: Any, allowed: Allowed) -> None:
    """Check edits of the context. Clearing old content is free; a provider's summary is work that not every answer reports."""
    for edit in _objects(edits, "context_management"):
        kind = _kind(edit, "context_management")
        if not kind.startswith("clear_"):
            allowed.need(kind, "the edit of the context")


def _tools(tools: Any, dialect: str, allowed: Allowed) -> None:
    for tool in _objects(tools, "tools"):
        kind = _kind(tool, "tools")
        if kind == "namespace" and dialect == RESPONSES:
            _tools(tool.get("tools"), dialect, allowed)
        elif kind == "shell" and _object(tool.get("environment"), "tools.environment").get("type") == "local":
            continue
        elif kind not in OWN_TOOLS[dialect]:
            allowed.need(kind, "the hosted tool")


def _choice(choice: Any, dialect: str, allowed: Allowed) -> None:
    if choice is None or isinstance(choice, str):
        return
    kind = _kind(_object(choice, "tool_choice"), "tool_choice", "function")
    if kind == "allowed_tools":
        inner = _object(choice.get("allowed_tools", choice), "tool_choice.allowed_tools")
        _tools(inner.get("tools"), dialect, allowed)
    else:
        allowed.need_all((kind,), OWN_TOOLS[dialect], "the hosted tool")


# --- content: a text, or parts, which may contain parts

PLAIN_PARTS: Final = names(
    "text input_text output_text refusal summary_text reasoning_text thinking redacted_thinking reasoning encrypted_content tool_use "
    "tool_reference compaction tool_result"
)
URL_PARTS: Final = names("image_url video_url audio_url")
"""Kinds of parts whose address stands in the field of that name; `input_image` has it in `image_url`."""
OWN_SOURCES: Final[dict[str, frozenset[str]]] = {
    **dict.fromkeys(PLAIN_PARTS, frozenset()),
    **{kind: frozenset((kind, "uuid")) for kind in URL_PARTS},
    "input_image": names("image_url"),
    "input_audio": names("input_audio"),
    "file": names("file"),
    "input_file": names("file_data"),
    **dict.fromkeys(("image", "document", "search_result"), names("source")),
}
"""Kinds of parts that may pass, with those of `SOURCES` that such a part may have and that are checked."""

SOURCES: Final = names(
    "image_url video_url audio_url file_url image video audio file source url file_id file_data input_audio image_pil image_embeds uuid"
)
"""Names under which a piece of content has data or a link to them."""

_BASE64: Final = re.compile(r"[A-Za-z0-9+/_=\r\n-]*\Z")


def _parts(content: Any, where: str, allowed: Allowed) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, dict | list):
        raise unreadable(f"`{where}` is neither a text nor a list")
    for part in [content] if isinstance(content, dict) else content:
        if not isinstance(part, str):
            _part(_object(part or "", where), where, allowed)


def _part(part: dict[str, Any], where: str, allowed: Allowed) -> None:
    kind = _kind(part, where)
    if kind not in OWN_SOURCES:
        allowed.need(kind, "content of the kind")
        return
    named_here = [name for name in SOURCES & part.keys() if part[name] is not None]
    allowed.need_all(named_here, OWN_SOURCES[kind], f"in {kind} the field")
    if kind in URL_PARTS or kind == "input_image":
        name = "image_url" if kind == "input_image" else kind
        _address(part.get(name), name, allowed)
    elif kind in ("file", "input_file"):
        inner = _object(part.get("file", part) or "", f"{where}.file")
        for name in ("file_id", "file_url", "url", "source"):
            if inner.get(name) is not None:
                allowed.need(REMOTE_URLS if name.endswith("url") else name, f"in a file the field {name}:")
        _base64(inner.get("file_data"), "in a file", allowed)
    elif kind == "input_audio":
        inner = _object(part.get("input_audio"), f"{where}.input_audio")
        allowed.need_all(inner, names("data format"), "in input_audio the field")
        _base64(inner.get("data"), "in input_audio", allowed)
    elif kind in ("image", "document") or (kind == "search_result" and not isinstance(part.get("source"), str)):
        _source(part.get("source"), f"{where}.source", allowed)  # of a search result a text is only a name
    if kind in ("tool_result", "search_result"):
        _parts(part.get("content"), f"{where}.content", allowed)


def _address(value: Any, where: str, allowed: Allowed) -> None:
    """Refuse an address outside the request, or none, as the data may be stored; `data:` URLs are no address."""
    address = value.get("url") if isinstance(value, dict) else value
    if address is None and isinstance(value, dict):
        raise unreadable(f"`{where}` has no address")
    if not _text(address, where).startswith("data:"):
        allowed.need(REMOTE_URLS, f"{where} names an address that the provider would fetch, and")


def _base64(value: Any, where: str, allowed: Allowed) -> None:
    """Refuse data that are not base64, because some endpoints also accept an address there."""
    if value is not None and not (_text(value, "data").startswith("data:") or _BASE64.match(value)):
        allowed.need(REMOTE_URLS, f"{where} what is no base64 may be an address, and")


def _source(source: Any, where: str, allowed: Allowed) -> None:
    if isinstance(source, str):
        allowed.need(REMOTE_URLS, f"{where} names an address, and")
        return
    kind = _kind(_object(source or "", where), where)
    if kind == "content":
        _parts(source.get("content"), f"{where}.content", allowed)
    elif kind not in ("base64", "text"):
        allowed.need(REMOTE_URLS if kind == "url" else kind, "a source of the kind")
        return
    for name in ("url", "file_id"):
        if source.get(name) is not None:
            allowed.need(REMOTE_URLS, f"in a source the field {name}, and")
