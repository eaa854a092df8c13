"""The same for Gemini, whose fields go by two spellings: `fileData` and `file_data`."""

from __future__ import annotations

import re
from typing import Any, Final

from autorl_hpc.gateway.allowed import REMOTE_URLS, Allowed, names
from autorl_hpc.gateway.refusals import Refusal

FIELDS: Final = frozenset(
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
PARTS: Final = names(
    "text thought thoughtSignature inlineData functionCall functionResponse videoMetadata partMetadata mediaResolution"
)
CONFIG: Final = names(
    "temperature topP topK seed candidateCount maxOutputTokens stopSequences presencePenalty frequencyPenalty responseMimeType responseSchema "
    "responseJsonSchema ResponseJsonSchema responseFormat responseLogprobs logprobs responseModalities thinkingConfig mediaResolution "
    "audioTimestamp enableEnhancedCivicAnswers"
)
"""Of `generationConfig`. Not among them: what leads to another model (`routingConfig`), and what speaks or draws."""
INLINE: Final = frozenset(("mimeType", "data", "displayName"))


def camel(name: str) -> str:
    """`file_data` is `fileData`."""
    return re.sub(r"_([a-z0-9])", lambda match: match[1].upper(), name)


def named(value: Any, where: str) -> dict[str, Any]:
    """An object's fields by one spelling.

    Raises:
        Refusal: it is no object, or a field stands in it in both spellings.
    """
    if not isinstance(value, dict):
        raise Refusal(400, "unreadable", f"`{where}` is no object")
    made = {camel(name): inner for name, inner in value.items()}
    if len(made) != len(value):
        raise Refusal(400, "unreadable", f"in `{where}` a name stands in two spellings")
    return made


def check_gemini(body: dict[str, Any], allowed: Allowed) -> None:
    """See `hosted.check`."""
    given = named(body, "the request")
    for name in given:
        if name not in FIELDS:
            allowed.need(name, "the field")
    if "generateContentRequest" in given:  # of countTokens
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
    """Images and speech are hosted tools by another name, and have prices of their own.

    Raises:
        Refusal: an answer is asked for that is no text.
    """
    if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
        raise Refusal(400, "unreadable", "modalities are no list of texts")
    for kind in kinds or ():
        if kind.lower() != "text":
            allowed.need(kind, "an answer of the modality")


def _list(value: Any, where: str) -> list[Any]:
    """Protobuf's JSON takes a single object for a list of one in some readers: both are looked at."""
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
            _part(named(part, "parts"), allowed)


def _part(part: dict[str, Any], allowed: Allowed) -> None:
    for name, value in part.items():
        if name == "fileData":
            allowed.need(REMOTE_URLS, "a part names a file that the provider would fetch, and")
        elif name not in PARTS:
            allowed.need(name, "in a part the field")
        elif name == "inlineData":
            for inner in named(value, "inlineData"):
                if inner not in INLINE:
                    allowed.need(inner, "in inlineData the field")
        elif name == "functionResponse":
            for each in _list(named(value, "functionResponse").get("parts"), "functionResponse.parts"):
                _part(named(each, "functionResponse.parts"), allowed)
