"""What a request asks for, as far as budgets need it: how long it is, how long its answer may become."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autorl_hpc.gateway.gemini_request import camel
from autorl_hpc.gateway.refusals import ANTHROPIC, CHAT, GEMINI, RESPONSES, Refusal

BYTES_PER_TOKEN = 4.0
"""Of English and code. How far the driver's own figures are from it is learned from its answers."""

TOKENS_OF_DATA = 1500
"""An image or a file in the request: what providers take for a large image."""

DATA_CHARS = 2000
MAX_ANSWER_TOKENS = 2**31
DEFAULT_ANSWER_TOKENS = 8192

_LIMITS = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    RESPONSES: ("max_output_tokens",),
    ANTHROPIC: ("max_tokens",),
    GEMINI: ("maxOutputTokens",),
}


@dataclass(frozen=True)
class Asked:
    """Of one request.

    Attributes:
        tokens_in: estimated.
        tokens_out: the most that is asked for, all answers together.
        stream: by the body.
        include_usage: a chat stream that tells its usage anyway.
    """

    tokens_in: int
    tokens_out: int
    stream: bool
    include_usage: bool


def asked(dialect: str, body: dict[str, Any], default_out: int) -> Asked:
    """Reads a body that was checked.

    Raises:
        Refusal: `stream` is neither true nor false: some servers take other values for one of them.
    """
    if not isinstance(body.get("stream"), bool | None):
        raise Refusal(400, "unreadable", "`stream` is neither true nor false")
    options = body.get("stream_options")
    fields: dict[str, Any] = body
    answers = body.get("n")
    if dialect == GEMINI:
        config = body.get("generationConfig", body.get("generation_config"))
        fields = {camel(name): value for name, value in config.items()} if isinstance(config, dict) else {}
        answers = fields.get("candidateCount")
    most = next((n for name in _LIMITS[dialect] if (n := _count(fields.get(name))) is not None), default_out)
    return Asked(
        tokens_in=tokens_of(body),
        tokens_out=min(most * (_count(answers) or 1), MAX_ANSWER_TOKENS),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < MAX_ANSWER_TOKENS else None


def tokens_of(value: Any) -> int:
    """An estimate by the length of all texts; data in base64 are taken for an image each. Without recursion."""
    bytes_, data, todo = 0, 0, [value]
    while todo:
        each = todo.pop()
        if isinstance(each, str):
            if len(each) > DATA_CHARS and (each.startswith("data:") or _is_base64(each)):
                data += 1
            else:
                bytes_ += len(each) if each.isascii() else len(each.encode("utf-8", "surrogatepass"))
        elif isinstance(each, dict):
            bytes_ += sum(map(len, each)) + 2 * len(each)
            todo += each.values()
        elif isinstance(each, list):
            todo += each
        else:
            bytes_ += 4
    return max(1, int(bytes_ / BYTES_PER_TOKEN) + data * TOKENS_OF_DATA)


def _is_base64(text: str) -> bool:
    """By its beginning: words have spaces."""
    head = text[:DATA_CHARS]
    return head.isascii() and not any(c in " \t{}()<>\"'.,:;" for c in head)
