"""What a request asks for, as far as budgets need it: how long it is, how long its answer may become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from autorl_hpc.gateway.gemini_request import named
from autorl_hpc.gateway.refusals import ANTHROPIC, CHAT, GEMINI, RESPONSES, Refusal
from autorl_hpc.gateway.sizes import MOST_INPUT_TOKENS, size_of

MAX_ANSWER_TOKENS: Final = 2**31
DEFAULT_ANSWER_TOKENS: Final = 8192
MAX_ANSWERS: Final = 16
"""Of one request (`n`)."""

_LIMITS: Final = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    RESPONSES: ("max_output_tokens",),
    ANTHROPIC: ("max_tokens",),
    GEMINI: ("maxOutputTokens",),
}
_STORED: Final = frozenset(("item_reference", "reasoning", "compaction"))
"""Items of `responses` that may be a name only of what the provider keeps."""


@dataclass(frozen=True)
class Asked:
    """Of one request.

    Attributes:
        tokens_in: estimated.
        tokens_out: the most that is asked for, all answers together.
        stream: by the body.
        include_usage: a chat stream that tells its usage anyway.
        most_in: more than this the input can't be, however wrong the estimate is.
    """

    tokens_in: int
    tokens_out: int
    stream: bool
    include_usage: bool
    most_in: int


def asked(dialect: str, body: dict[str, Any], default_out: int) -> Asked:
    """Reads a body that was checked.

    Raises:
        Refusal: `stream` is neither true nor false, or a limit or a number of answers is no plain positive integer: some servers read
            other values too, and another figure in them than the gateway.
    """
    if not isinstance(body.get("stream"), bool | None):
        raise Refusal(400, "unreadable", "`stream` is neither true nor false")
    options = body.get("stream_options")
    fields: dict[str, Any] = body
    several = "n"
    if dialect == GEMINI:
        config = body.get("generationConfig", body.get("generation_config"))
        fields = {} if config is None else named(config, "generationConfig")
        several = "candidateCount"
    limits = [n for name in _LIMITS[dialect] if (n := _count(fields, name, dialect)) is not None]
    answers = _count(fields, several, dialect) or 1
    if answers > MAX_ANSWERS:
        raise Refusal(400, "unreadable", f"`{several}` is {answers}: a request may have {MAX_ANSWERS} answers")
    size = size_of(body)
    return Asked(
        tokens_in=size.tokens,
        tokens_out=min(max(limits, default=default_out) * answers, MAX_ANSWER_TOKENS),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        most_in=MOST_INPUT_TOKENS if dialect == RESPONSES and _names_stored(body) else size.most,
    )


def _count(fields: dict[str, Any], name: str, dialect: str) -> int | None:
    """A positive integer; None: it is not set. Protobuf's JSON takes texts of digits for integers, so Gemini does."""
    value = fields.get(name)
    if value is None:
        return None
    if dialect == GEMINI and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < MAX_ANSWER_TOKENS:
        raise Refusal(400, "unreadable", f"`{name}` is no positive integer")
    return value


def _names_stored(body: dict[str, Any]) -> bool:
    """Whether a part of the input lies at the provider: its length is not known here."""
    if body.get("previous_response_id") is not None:
        return True
    items = body.get("input")
    return isinstance(items, list) and any(
        isinstance(item, dict)
        and item.get("type") in _STORED
        and (item["type"] == "item_reference" or (item.get("id") and not item.get("encrypted_content")))
        for item in items
    )
