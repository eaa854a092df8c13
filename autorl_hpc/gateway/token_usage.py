"""Determine the tokens of a request and its answer: by the driver's figures, or else by estimates; what an answer of 200 really is."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from autorl_hpc.gateway.hosted_tools import named
from autorl_hpc.gateway.request import ANTHROPIC, CHAT, ERROR_TYPES, GEMINI, RESPONSES, names, unreadable

# --- what a request asks for: the length of its input, as an estimate and as a maximum, and of its answer

BYTES_PER_TOKEN: Final = 4.0
"""For English and code. A token is never less than a byte."""

TOKENS_OF_IMAGE: Final = 1500  # what providers charge for a large image
MOST_INPUT_TOKENS: Final = 2**21  # no model has a longer context
MAX_ANSWER_TOKENS: Final = 2**31
DEFAULT_ANSWER_TOKENS: Final = 8192
MAX_ANSWERS: Final = 16  # limit of answers to one request (`n`)
_LIMITS: Final = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    RESPONSES: ("max_output_tokens",),
    ANTHROPIC: ("max_tokens",),
    GEMINI: ("maxOutputTokens",),
}
_STORED: Final = names("item_reference reasoning compaction")
"""Items of `responses` that may only refer to data stored at the provider."""

_BASE64: Final = re.compile(r"[A-Za-z0-9+/_\r\n-]*={0,2}\Z")


@dataclass(frozen=True)
class RequestedSize:
    """What one request asks for."""

    tokens_in: int  # estimated
    most_in: int  # however wrong the estimate is: a token for each byte, or a whole window
    tokens_out: int  # the most that is asked for, all answers together
    stream: bool = False
    include_usage: bool = False  # a chat stream that reports its usage anyway


def asked(dialect: str, body: dict[str, Any], default_out: int, body_bytes: int = 0) -> RequestedSize:
    """Read a body that was checked. Raises Refusal if `stream` is not a boolean, or a limit or a number of answers is not a
    positive integer; some servers accept other values and might read them differently from the gateway."""
    if not isinstance(body.get("stream"), bool | None):
        raise unreadable("`stream` is neither true nor false")
    fields, several = body, "n"
    if dialect == GEMINI:
        config = body.get("generationConfig", body.get("generation_config"))
        fields, several = named({} if config is None else config, "generationConfig"), "candidateCount"
    limits = [n for name in _LIMITS[dialect] if (n := _positive_count(fields, name, dialect)) is not None]
    answers = _positive_count(fields, several, dialect) or 1
    if answers > MAX_ANSWERS:
        raise unreadable(f"`{several}` is {answers}: a request may have {MAX_ANSWERS} answers")
    options = body.get("stream_options")
    return RequestedSize(
        tokens_in=size_of(body),
        most_in=MOST_INPUT_TOKENS if dialect == RESPONSES and _names_stored(body) else body_bytes,
        tokens_out=min(max(limits, default=default_out) * answers, MAX_ANSWER_TOKENS),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _positive_count(fields: dict[str, Any], name: str, dialect: str) -> int | None:
    """Return a positive integer; None if it is not set. For Gemini, texts of digits count too, as in Protobuf's JSON."""
    value = fields.get(name)
    if value is None:
        return None
    if dialect == GEMINI and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < MAX_ANSWER_TOKENS:
        raise unreadable(f"`{name}` is not a positive integer")
    return value


def _names_stored(body: dict[str, Any]) -> bool:
    items = body.get("input")
    return body.get("previous_response_id") is not None or any(
        isinstance(item, dict) and item.get("type") in _STORED and not item.get("encrypted_content")
        for item in (items if isinstance(items, list) else ())
    )


def size_of(body: dict[str, Any]) -> int:
    """Return an estimate of the tokens of an input by the length of its texts and the number of its images in base64."""
    bytes_, images = 0, 0
    todo: list[tuple[Any, str]] = [(body, "")]  # (value, media type or "")
    while todo:
        each, media = todo.pop()
        if isinstance(each, str):
            is_image = media.startswith("image/") or each.startswith("data:image/")
            if is_image and _BASE64.match(each.rpartition(",")[2]):
                images += 1
            else:
                bytes_ += _length(each)
        elif isinstance(each, dict):
            bytes_ += sum(map(_length, each)) + 2 * len(each)
            media = str(each.get("media_type") or each.get("mimeType") or each.get("mime_type") or "")
            todo += [(inner, media if name == "data" else "") for name, inner in each.items()]
        elif isinstance(each, list):
            todo += [(inner, "") for inner in each]
        else:
            bytes_ += 4
    return max(1, int(bytes_ / BYTES_PER_TOKEN) + images * TOKENS_OF_IMAGE)


def _length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


# --- usage in an answer

MAX_TOKENS: Final = 10**9  # limit for one answer; a larger number is not plausible
MAX_COPY_BYTES: Final = 64 * 2**20
"""Limit for an answer that is no event stream, and for one event; beyond it tokens are estimated by length."""

WORDS: Final = names(
    "content text delta arguments input partial_json thinking reasoning reasoning_content refusal name data"
)
CALLED_WITH: Final = names("input args arguments")
"""Names under which an event carries the driver's text, and of objects with a tool's arguments, whose names belong to the tool."""

RESPONSE_DETAILS: Final = names("input_tokens_details output_tokens_details")
ENDS: Final = names("message_stop response.completed response.incomplete response.failed")


@dataclass
class TokenUsage:
    """Usage of one answer. None means not reported."""

    tokens_in: int | None = None  # including cached tokens and those written into a cache
    tokens_out: int | None = None
    tokens_cached: int = 0
    written_5m: int = 0  # into a cache of Anthropic's, by its lifetime
    written_1h: int = 0
    words_bytes: int = 0  # length of the driver's text received so far
    out_is_last: bool = False  # the driver reported the final output tokens, not only those so far
    ended: bool = False  # the answer is complete

    @property
    def out_is_told(self) -> bool:
        """Return whether the driver's output figure is plausible: text without tokens is not."""
        return self.ended and self.out_is_last and (bool(self.tokens_out) or not self.words_bytes)

    @property
    def tokens_of_words(self) -> int:
        return int(self.words_bytes / BYTES_PER_TOKEN) + (1 if self.words_bytes else 0)

    @property
    def written(self) -> int:
        return max(self.tokens_out or 0, self.tokens_of_words)


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= MAX_TOKENS


def _count(value: Any) -> int:
    return int(value) if _is_count(value) else 0


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


class UsageMeter:
    """Reads a copy of an answer while it is forwarded; its `content_type` alone decides whether it is an event stream."""

    def __init__(self, content_type: str) -> None:
        self.usage = TokenUsage()
        self._events = content_type.partition(";")[0].strip().lower() == "text/event-stream"
        self.answered = False  # something came that is neither an error nor a page
        self._error: dict[str, Any] | None = None
        self._copy = bytearray()
        self._lost = False

    @property
    def failure(self) -> tuple[int, str] | None:
        """Return the status that fits what came with 200, and its words, where it is an error, a page or nothing."""
        if (error := self._error) is None:
            return None if self.answered or self._lost else (502, "200 and nothing that is an answer")
        kinds = {error.get(name) for name in ("code", "type", "status") if isinstance(error.get(name), str | int)}
        status = next((kind for kind in kinds if isinstance(kind, int) and 400 <= kind < 600), None)
        named = (status for status, words in ERROR_TYPES.items() if kinds & set(words))
        return status or next(named, 500), json.dumps(error)

    def feed(self, data: bytes) -> None:
        self._copy += data
        if self._events and not self._lost:
            for event in _events(self._copy):
                self._read(event)
        if self._lost or len(self._copy) > MAX_COPY_BYTES:
            self._lost = True
            self.usage.words_bytes += len(self._copy)
            self._copy.clear()

    def end(self, whole: bool) -> TokenUsage:
        if self._events:
            self.feed(b"\n\n")
        elif not self._lost:
            self._read(bytes(self._copy))
        self._copy.clear()
        self.usage.ended = self.usage.ended or whole
        return self.usage

    def _read(self, data: bytes) -> None:
        """Read an event or a whole answer. What can't be read counts as text of the driver."""
        if self._events:
            data = b"\n".join(line[5:] for line in data.splitlines() if line.startswith(b"data:"))
            if data.strip() == b"[DONE]":
                self.usage.ended = True
                return
        try:
            value = json.loads(data) if data else None
        except (ValueError, RecursionError):
            self.usage.words_bytes += len(data)
            self.answered = self.answered or not data.lstrip().startswith(b"<")
            return
        for each in value if isinstance(value, list) else [value]:  # Gemini's stream may be one list
            if isinstance(each, dict):
                self._object(each)

    def _object(self, value: dict[str, Any]) -> None:
        """Read an object of any dialect; their usage fields don't collide."""
        kind, usage = value.get("type"), self.usage
        inner = _object(value.get("response")) or _object(value.get("message")) or value
        if error := value.get("error") or inner.get("error") or (value.get("object") == "error" and value):
            self._error = error if isinstance(error, dict) else {"message": error}
            return
        self.answered = True
        told = _object(inner.get("usage")) or _object(value.get("usage"))
        if isinstance(value.get("usageMetadata"), dict):
            self._gemini(value["usageMetadata"])
        elif "prompt_tokens" in told or "completion_tokens" in told:
            details = _object(told.get("prompt_tokens_details"))
            hit = told.get("prompt_cache_hit_tokens")  # DeepSeek's name
            cached = _count(details.get("cached_tokens")) or _count(hit)
            self._told(_count(told.get("prompt_tokens")), told.get("completion_tokens"), cached)
        elif told and (told.keys() & RESPONSE_DETAILS or inner.get("object") == "response"):
            cached = _count(_object(told.get("input_tokens_details")).get("cached_tokens"))
            self._told(_count(told.get("input_tokens")), told.get("output_tokens"), cached)
        elif told:
            self._anthropic(told, last=kind != "message_start")
        usage.ended = usage.ended or kind in ENDS
        if not isinstance(kind, str):
            shown = next((value[name] for name in ("choices", "output", "candidates") if name in value), None)
        elif kind.endswith(".delta") or kind in ("content_block_delta", "content_block_start"):
            shown = {name: value[name] for name in ("delta", "content_block") if name in value}
        else:
            shown = value.get("content") if kind == "message" else None
        usage.words_bytes += words_in(shown)

    def _anthropic(self, told: dict[str, Any], last: bool) -> None:
        """Read Anthropic's usage, where cached input is separate. In a stream, the first event has the input, later ones the
        output."""
        usage = self.usage
        figures = _anthropic_figures(told)
        rounds = told.get("iterations")
        if isinstance(rounds, list) and rounds:  # compactions and the like are billed and reported only here
            each = [_anthropic_figures(_object(one)) for one in rounds]
            figures = tuple(max(top, sum(those)) for top, those in zip(figures, zip(*each, strict=True), strict=True))
        total, read, short, long, out = figures
        if total:
            usage.tokens_in = max(usage.tokens_in or 0, total)
            usage.tokens_cached = max(usage.tokens_cached, read)
            usage.written_1h = max(usage.written_1h, long)
            usage.written_5m = max(usage.written_5m, short)
        if last and "output_tokens" in told:
            usage.tokens_out = max(usage.tokens_out or 0, out)
            usage.out_is_last = usage.out_is_last or _is_count(told["output_tokens"])

    def _gemini(self, told: dict[str, Any]) -> None:
        """Read Gemini's usage: thoughts are reported separately and cost as much as the answer; tools' results are input."""
        out = _count(told.get("candidatesTokenCount")) + _count(told.get("thoughtsTokenCount"))
        given = _count(told.get("promptTokenCount")) + _count(told.get("toolUsePromptTokenCount"))
        self._told(given, out, _count(told.get("cachedContentTokenCount")))

    def _told(self, tokens_in: int, tokens_out: Any, cached: int) -> None:
        """Store reported values. Later events of a stream have the totals so far. `tokens_out` may be of any type."""
        usage = self.usage
        usage.tokens_in = max(usage.tokens_in or 0, tokens_in)
        usage.tokens_out = max(usage.tokens_out or 0, _count(tokens_out))
        usage.tokens_cached = min(max(usage.tokens_cached, cached), usage.tokens_in)
        usage.out_is_last = usage.out_is_last or _is_count(tokens_out)


def _anthropic_figures(told: dict[str, Any]) -> tuple[int, ...]:
    read, written = _count(told.get("cache_read_input_tokens")), _count(told.get("cache_creation_input_tokens"))
    long = min(_count(_object(told.get("cache_creation")).get("ephemeral_1h_input_tokens")), written)
    total = _count(told.get("input_tokens")) + read + written
    return total, read, written - long, long, _count(told.get("output_tokens"))


def words_in(value: Any) -> int:
    """Return the bytes of the driver's text in a part of an answer. All arguments of tools count as its text."""
    total, todo = 0, [(value, "", False)]  # (value, its name, whether it is a tool's argument)
    while todo:
        each, under, called = todo.pop()
        if isinstance(each, str):
            total += _length(each) if called or under in WORDS else 0
        elif isinstance(each, dict):
            total += sum(map(_length, each)) if called else 0
            for name, inner in each.items():
                todo.append((inner, name, called or (name in CALLED_WITH and isinstance(inner, dict))))
        elif isinstance(each, list):
            todo += [(inner, "", called) for inner in each]
    return total


def _events(buffer: bytearray) -> Iterator[bytes]:
    start = 0
    for end in _EVENT_END.finditer(buffer):
        yield bytes(buffer[start : end.end()])
        start = end.end()
    del buffer[:start]


_EVENT_END = re.compile(rb"\n\r?\n")

# --- usage in chat streams: the gateway asks for it, and removes the event that reports it.
# OpenAI's stream reports tokens only if the client sets `stream_options.include_usage`. Otherwise they would be estimated,
# without a reasoning driver's hidden tokens. The event without choices that holds the usage is removed, so the client gets
# what it asked for (`"usage": null` in other events stays).


def asking(data: bytes, body: dict[str, Any]) -> bytes:
    """Return the request with the option set; if it had no options, its other bytes are unchanged."""
    if "stream_options" not in body:
        at = data.index(b"{") + 1
        return data[:at] + b'"stream_options":{"include_usage":true},' + data[at:]
    changed = {**body, "stream_options": {**_object(body["stream_options"]), "include_usage": True}}
    return json.dumps(changed, ensure_ascii=False).encode("utf-8", "surrogatepass")


class WithoutUsage:
    """Forwards a stream event by event, without those that hold only usage."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> bytes:
        """Return the whole events that can be forwarded now."""
        self._buffer += data
        out = b"".join(event for event in _events(self._buffer) if not _is_usage(event))
        return out + self.end() if len(self._buffer) > MAX_COPY_BYTES else out

    def end(self) -> bytes:
        rest = bytes(self._buffer)
        self._buffer.clear()
        return rest


def _is_usage(event: bytes) -> bool:
    if b'"usage"' not in event:
        return False
    data = b"\n".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.get("choices") == [] and isinstance(value.get("usage"), dict)
