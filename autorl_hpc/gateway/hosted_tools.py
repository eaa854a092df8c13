"""Refuse requests that make the provider do more than generate: search, run code, fetch addresses, open stored files.

Only listed fields, types of tools and kinds of content pass; others are refused by name, because providers keep adding
hosted tools. Tool arguments and schemas are the model's and the agent's own data and are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from autorl_hpc.gateway.request import ANTHROPIC, CHAT, GEMINI, REMOTE_URLS, RESPONSES, Allowed, Refusal, names, refused

# --- Gemini, whose fields have two spellings: `fileData` and `file_data`

GEMINI_FIELDS: Final = frozenset(
    (
        "contents",
        "tools",
        "toolConfig",
        "systemInstruction",
        "generationConfig",
        "safetySettings",
        "generateContentRequest",
        "model",
        "labels",
    )
)
TOOLS: Final = frozenset(("functionDeclarations",))
TOOL_CONFIG: Final = frozenset(("functionCallingConfig",))
GEMINI_PARTS: Final = names(
    "text thought thoughtSignature inlineData functionCall functionResponse videoMetadata partMetadata mediaResolution"
)
CONFIG: Final = names(
    "temperature topP topK seed candidateCount maxOutputTokens stopSequences presencePenalty frequencyPenalty responseMimeType responseSchema "
    "responseJsonSchema ResponseJsonSchema responseFormat responseLogprobs logprobs responseModalities thinkingConfig mediaResolution "
    "audioTimestamp enableEnhancedCivicAnswers"
)
"""Fields of `generationConfig`. Fields that choose another model (`routingConfig`), speech and images are missing on purpose."""
INLINE: Final = frozenset(("mimeType", "data", "displayName"))


def camel(name: str) -> str:
    """Convert `file_data` to `fileData`."""
    return re.sub(r"_([a-z0-9])", lambda match: match[1].upper(), name)


def named(value: Any, where: str) -> dict[str, Any]:
    """Return an object with its fields in camel case.

    Raises:
        Refusal: it is no object, or has a field in both spellings.
    """
    if not isinstance(value, dict):
        raise Refusal(400, "unreadable", f"`{where}` is no object")
    made = {camel(name): inner for name, inner in value.items()}
    if len(made) != len(value):
        raise Refusal(400, "unreadable", f"in `{where}` a name stands in two spellings")
    return made


def check_gemini(body: dict[str, Any], allowed: Allowed) -> None:
    """Check a Gemini request, see `check`."""
    given = named(body, "the request")
    for name in given:
        if name not in GEMINI_FIELDS:
            allowed.need(name, "the field")
    if "generateContentRequest" in given:  # in countTokens
        check_gemini(given["generateContentRequest"], allowed)
    for tool in _list(given.get("tools"), "tools"):
        for name in named(tool, "tools"):
            if name not in TOOLS:
                allowed.need(name, "the hosted tool")
    if given.get("toolConfig") is not None:
        for name in named(given["toolConfig"], "toolConfig"):
            if name not in TOOL_CONFIG:
                allowed.need(name, "in toolConfig the field")
    if given.get("generationConfig") is not None:
        config = named(given["generationConfig"], "generationConfig")
        for name in config:
            if name not in CONFIG:
                allowed.need(name, "in generationConfig the field")
        check_modalities(config.get("responseModalities"), allowed)
    if given.get("systemInstruction") is not None:
        _content(given["systemInstruction"], allowed)
    for content in _list(given.get("contents"), "contents"):
        _content(content, allowed)


def check_modalities(kinds: Any, allowed: Allowed) -> None:
    """Refuse answers other than text: images and speech are like hosted tools and have their own prices.

    Raises:
        Refusal: another kind of answer is asked for.
    """
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise Refusal(400, "unreadable", "modalities are no list of texts")
    for kind in kinds or ():
        if kind.lower() != "text":
            allowed.need(kind, "an answer of the modality")


def _list(value: Any, where: str) -> list[Any]:
    """Return a value as a list. Some readers of Protobuf's JSON accept a single object as a list of one, so both are checked."""
    if value is None:
        return []
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list):
        raise Refusal(400, "unreadable", f"`{where}` is no list")
    return value


def _content(content: Any, allowed: Allowed) -> None:
    if isinstance(content, str):
        return
    for part in _list(named(content, "contents").get("parts"), "parts"):
        if not isinstance(part, str):
            _gemini_part(named(part, "parts"), allowed)


def _gemini_part(part: dict[str, Any], allowed: Allowed) -> None:
    for name, value in part.items():
        if name == "fileData":
            allowed.need(REMOTE_URLS, "a part names a file that the provider would fetch, and")
        elif name not in GEMINI_PARTS:
            allowed.need(name, "in a part the field")
        elif name == "inlineData":
            for inner in named(value, "inlineData"):
                if inner not in INLINE:
                    allowed.need(inner, "in inlineData the field")
        elif name == "functionResponse":
            for each in _list(named(value, "functionResponse").get("parts"), "functionResponse.parts"):
                _gemini_part(named(each, "functionResponse.parts"), allowed)


TIERS: Final = frozenset(("auto", "default", "flex", "standard", "standard_only"))
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
"""Parameters of the function that fills in the template (`apply_chat_template` in transformers, vLLM, SGLang), which also gets
`chat_template_kwargs`. They would bring a template, prompt or tools past the checks here. Other names are the template's
variables."""

INCLUDES: Final = frozenset(("reasoning.encrypted_content", "message.output_text.logprobs"))
OWN_TOOLS: Final[dict[str, frozenset[str]]] = {
    CHAT: frozenset(("function", "custom")),
    RESPONSES: frozenset(("function", "custom", "local_shell", "apply_patch")),
}
"""Tools that the agent runs."""

OWN_ANTHROPIC: Final = ("bash_20", "text_editor_20", "memory_20", "computer_20", "tool_search_tool_")
"""Prefixes of tool types that Anthropic defines and the agent runs. Tool search runs at the provider, over the request's
tools."""

TEXTS: Final = frozenset(("text", "input_text", "output_text", "refusal", "summary_text", "reasoning_text"))
THOUGHTS: Final = frozenset(("thinking", "redacted_thinking", "reasoning"))
SOURCES: Final = names(
    "image_url video_url audio_url file_url image video audio file source url file_id file_data input_audio image_pil image_embeds uuid"
)
"""Names under which a piece of content has data or a link to them."""

_BASE64: Final = re.compile(r"[A-Za-z0-9+/_=\r\n-]*\Z")

ITEMS: Final = names(
    "message function_call function_call_output custom_tool_call custom_tool_call_output local_shell_call local_shell_call_output "
    "apply_patch_call apply_patch_call_output reasoning compaction item_reference"
)
"""Types of items in the input of `responses`."""


def check(dialect: str, body: dict[str, Any], allowed: Allowed) -> None:
    """Check a request's body, as `read_object` returned it.

    Raises:
        Refusal: it asks for more than generation, or has unknown parts.
    """
    if dialect == GEMINI:
        check_gemini(body, allowed)
        return
    for name in body:
        if name not in FIELDS[dialect]:
            allowed.need(name, "the field")
    tier = body.get("service_tier")
    if tier is not None and _text(tier, "service_tier") not in TIERS:
        allowed.need(tier, "the service tier")
    variables = body.get("chat_template_kwargs")
    if variables is not None:
        if not isinstance(variables, dict):
            raise Refusal(400, "unreadable", "`chat_template_kwargs` is no object")
        for name in variables.keys() & TEMPLATE_OWN:
            allowed.need(name, "in chat_template_kwargs the field")
    {CHAT: _chat, RESPONSES: _responses, ANTHROPIC: _anthropic}[dialect](body, allowed)


def _objects(value: Any, what: str) -> Iterable[dict[str, Any]]:
    """Return a list of objects; Refusal if it is anything else."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise Refusal(400, "unreadable", f"`{what}` is no list of objects")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise Refusal(400, "unreadable", f"`{what}` is no text")
    return value


def _chat(body: dict[str, Any], allowed: Allowed) -> None:
    _tools(body.get("tools"), CHAT, allowed)
    _choice(body.get("tool_choice"), CHAT, allowed)
    check_modalities(body.get("modalities"), allowed)
    for message in _objects(body.get("messages"), "messages"):
        _parts(message.get("content"), "messages.content", allowed)
        for call in _objects(message.get("tool_calls"), "tool_calls"):
            kind = _text(call.get("type", "function"), "tool_calls.type")
            if kind not in OWN_TOOLS[CHAT]:
                allowed.need(kind, "a call of the tool")
        for name in SOURCES & message.keys() - {"audio"}:
            allowed.need(name, "in a message the field")


def _responses(body: dict[str, Any], allowed: Allowed) -> None:
    _tools(body.get("tools"), RESPONSES, allowed)
    _choice(body.get("tool_choice"), RESPONSES, allowed)
    if body.get("background"):
        allowed.need("background", "the field")
    _edits(body.get("context_management"), allowed)
    given = body.get("include")
    if given is not None and not isinstance(given, list):
        raise Refusal(400, "unreadable", "`include` is no list")
    for each in given or ():
        if _text(each, "include") not in INCLUDES:
            allowed.need(each.partition(".")[0], "to include results of")
    instructions, asked = body.get("instructions"), body.get("input")
    for items in (instructions, asked):
        if not isinstance(items, str):
            for item in _objects(items, "input"):
                _item(item, allowed)


def _item(item: dict[str, Any], allowed: Allowed) -> None:
    kind = _text(item.get("type", "message"), "input.type")
    if kind not in ITEMS:
        allowed.need(kind, "in the input an item of type")
        return
    for name in SOURCES & item.keys():
        allowed.need(name, "in an item of the input the field")
    for name in ("content", "output", "summary"):
        _parts(item.get(name), f"input.{name}", allowed)


def _anthropic(body: dict[str, Any], allowed: Allowed) -> None:
    for tool in _objects(body.get("tools"), "tools"):
        kind = tool.get("type")
        own = kind is None or kind == "custom" or (isinstance(kind, str) and kind.startswith(OWN_ANTHROPIC))
        if not own:
            allowed.need(_text(kind, "tools.type"), "the hosted tool")
    management = body.get("context_management")
    if management is not None:
        if not isinstance(management, dict):
            raise Refusal(400, "unreadable", "`context_management` is no object")
        for name in management.keys() - {"edits"}:
            allowed.need(name, "in context_management the field")
        _edits(management.get("edits"), allowed)
    _parts(body.get("system"), "system", allowed)
    for message in _objects(body.get("messages"), "messages"):
        _parts(message.get("content"), "messages.content", allowed)


def _edits(edits: Any, allowed: Allowed) -> None:
    """Check edits of the context. Clearing old content is free; a provider's summary is work that not every answer reports."""
    for edit in _objects(edits, "context_management"):
        kind = _text(edit.get("type"), "context_management.type")
        if not kind.startswith("clear_"):
            allowed.need(kind, "the edit of the context")


def _tools(tools: Any, dialect: str, allowed: Allowed) -> None:
    for tool in _objects(tools, "tools"):
        kind = _text(tool.get("type"), "tools.type")
        if kind == "namespace" and dialect == RESPONSES:
            _tools(tool.get("tools"), dialect, allowed)
        elif kind == "shell" and dialect == RESPONSES:
            environment = tool.get("environment")
            if not isinstance(environment, dict) or environment.get("type") != "local":
                allowed.need("shell", "the hosted tool")
        elif kind not in OWN_TOOLS[dialect]:
            allowed.need(kind, "the hosted tool")


def _choice(choice: Any, dialect: str, allowed: Allowed) -> None:
    if choice is None or isinstance(choice, str):
        return
    if not isinstance(choice, dict):
        raise Refusal(400, "unreadable", "`tool_choice` is neither a text nor an object")
    kind = _text(choice.get("type", "function"), "tool_choice.type")
    if kind == "allowed_tools":
        inner = choice.get("allowed_tools", choice)
        _tools(inner.get("tools") if isinstance(inner, dict) else None, dialect, allowed)
    elif kind not in OWN_TOOLS[dialect]:
        allowed.need(kind, "the hosted tool")


def _parts(content: Any, where: str, allowed: Allowed) -> None:
    """Check a content: a text, or a list of parts, which may contain lists of parts."""
    if content is None or isinstance(content, str):
        return
    if isinstance(content, dict):
        content = [content]
    if not isinstance(content, list):
        raise Refusal(400, "unreadable", f"`{where}` is neither a text nor a list")
    for part in content:
        if not isinstance(part, str):
            if not isinstance(part, dict):
                raise Refusal(400, "unreadable", f"`{where}` holds something that is no object")
            _part(part, where, allowed)


def _part(part: dict[str, Any], where: str, allowed: Allowed) -> None:
    kind = _text(part.get("type"), f"{where}.type")
    look = PARTS.get(kind)
    if look is None:
        allowed.need(kind, "content of the kind")
        return
    own = OWN_SOURCES.get(kind, frozenset())
    for name in SOURCES & part.keys() - own:
        if part[name] is not None:
            allowed.need(name, f"in {kind} the field")
    look(part, where, allowed)


def _nothing(part: dict[str, Any], where: str, allowed: Allowed) -> None:
    pass


def _address(value: Any, where: str, allowed: Allowed) -> None:
    """Refuse an address outside the request; `data:` URLs are no address."""
    address = value.get("url") if isinstance(value, dict) else value
    if address is None and isinstance(value, dict):
        raise refused("file_id" if "file_id" in value else "url", f"in {where} the missing or stored")
    if not _text(address, where).startswith("data:"):
        allowed.need(REMOTE_URLS, f"{where} names an address that the provider would fetch, and")


def _image_url(part: dict[str, Any], where: str, allowed: Allowed) -> None:
    _address(part.get("image_url"), "image_url", allowed)


def _media_url(part: dict[str, Any], where: str, allowed: Allowed) -> None:
    _address(part.get(part["type"]), part["type"], allowed)


def _file(part: dict[str, Any], where: str, allowed: Allowed) -> None:
    inner = part.get("file", part)
    if not isinstance(inner, dict):
        raise Refusal(400, "unreadable", f"`{where}.file` is no object")
    for name in ("file_id", "file_url", "url", "source"):
        if inner.get(name) is not None:
            allowed.need(REMOTE_URLS if name.endswith("url") else name, f"in a file the field {name}:")
    _data(inner.get("file_data"), "in a file", allowed)


def _input_audio(part: dict[str, Any], where: str, allowed: Allowed) -> None:
    inner = part.get("input_audio")
    if inner is None:
        return
    if not isinstance(inner, dict):
        raise Refusal(400, "unreadable", f"`{where}.input_audio` is no object")
    for name in inner.keys() - {"data", "format"}:
        allowed.need(name, "in input_audio the field")
    _data(inner.get("data"), "in input_audio", allowed)


def _data(value: Any, where: str, allowed: Allowed) -> None:
    """Refuse data that are not base64, because some endpoints also accept an address there."""
    if value is not None and not (_text(value, "data").startswith("data:") or _BASE64.match(value)):
        allowed.need(REMOTE_URLS, f"{where} what is no base64 may be an address, and")


def _source(part: dict[str, Any], where: str, allowed: Allowed) -> None:
    source = part.get("source")
    if isinstance(source, str):
        if part["type"] != "search_result":  # there it is only a name
            allowed.need(REMOTE_URLS, f"{part['type']} names an address, and")
        return
    if not isinstance(source, dict):
        raise Refusal(400, "unreadable", f"`{where}.source` is no object")
    kind = _text(source.get("type"), f"{where}.source.type")
    if kind == "content":
        _parts(source.get("content"), f"{where}.source.content", allowed)
    elif kind not in ("base64", "text"):
        allowed.need(REMOTE_URLS if kind == "url" else kind, "a source of the kind")
    for name in ("url", "file_id"):
        if kind in ("content", "base64", "text") and source.get(name) is not None:
            allowed.need(REMOTE_URLS, f"in a source the field {name}, and")


def _inner(part: dict[str, Any], where: str, allowed: Allowed) -> None:
    _parts(part.get("content"), f"{where}.content", allowed)


def _search_result(part: dict[str, Any], where: str, allowed: Allowed) -> None:
    _source(part, where, allowed)
    _inner(part, where, allowed)


PARTS: Final[dict[str, Callable[[dict[str, Any], str, Allowed], None]]] = {
    **dict.fromkeys(TEXTS | THOUGHTS, _nothing),
    "encrypted_content": _nothing,
    "input_audio": _input_audio,
    "tool_use": _nothing,
    "tool_reference": _nothing,
    "compaction": _nothing,
    "tool_result": _inner,
    "image_url": _image_url,
    "input_image": _image_url,
    "video_url": _media_url,
    "audio_url": _media_url,
    "file": _file,
    "input_file": _file,
    "image": _source,
    "document": _source,
    "search_result": _search_result,
}
OWN_SOURCES: Final[dict[str, frozenset[str]]] = {
    "input_audio": frozenset(("input_audio",)),
    "image_url": frozenset(("image_url", "uuid")),
    "input_image": frozenset(("image_url",)),
    "video_url": frozenset(("video_url", "uuid")),
    "audio_url": frozenset(("audio_url", "uuid")),
    "file": frozenset(("file",)),
    "input_file": frozenset(("file_data",)),
    "image": frozenset(("source",)),
    "document": frozenset(("source",)),
    "search_result": frozenset(("source",)),
}
