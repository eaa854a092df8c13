"""Determine the tokens of a request and its answer: by the driver's figures, or else by estimates.

Holds `size_of` (input by length), `UsageMeter` (figures in an answer), `WithoutUsage` (usage of chat streams), `asked`
(what a request asks for) and `CallRecord` (one request).
"""

from __future__ import annotations

import json
import re
import time
import zlib
from dataclasses import dataclass, field
from typing import Any, Final

from autorl_hpc.files.ledger import now_text
from autorl_hpc.gateway.hosted_tools import named
from autorl_hpc.gateway.request import ANTHROPIC, CHAT, GEMINI, RESPONSES, Refusal

# --- input tokens by length: an estimate and a maximum

BYTES_PER_TOKEN: Final = 4.0
"""For English and code; the driver's answers correct the estimate. A token is never less than a byte."""

TOKENS_OF_IMAGE: Final = 1500
"""What providers charge for a large image."""

MOST_TOKENS_OF_IMAGE: Final = 16_000
MOST_TOKENS_OF_FILE: Final = 300_000
"""A document of a hundred pages, as text and images."""

MOST_INPUT_TOKENS: Final = 2**21
"""No model has a longer context."""

_BASE64: Final = re.compile(r"[A-Za-z0-9+/_\r\n-]*={0,2}\Z")
_MEDIA: Final = frozenset(("image_url", "video_url", "audio_url", "file_data"))
_HOLDERS: Final = frozenset(("source", "inlineData", "inline_data", "input_audio"))
_CARRIERS: Final = _MEDIA | _HOLDERS | {"data"}
"""Names under which, or directly below which, a text may be an image or a file."""

_OWN: Final = frozenset(
    ("input", "arguments", "args", "response", "parameters", "input_schema", "json_schema", "schema", "metadata")
)
"""Content below these names belongs to a tool or the client; the driver sees no image in it."""


@dataclass(frozen=True)
class Size:
    """Size of an input in tokens."""

    tokens: int
    most: int


def size_of(body: dict[str, Any]) -> Size:
    """Return the size by the length of all texts. Base64 data count as images and files only where the driver reads them as
    such."""
    bytes_, images, files = 0, 0, 0
    todo: list[tuple[Any, str, bool]] = [(body, "", False)]  # (value, its name, whether it belongs to a tool)
    while todo:
        each, under, own = todo.pop()
        if isinstance(each, str):
            kind = None if own else _data(each, under)
            if kind == "image":
                images += 1
            elif kind is not None:
                files += min(max(int(len(each) / BYTES_PER_TOKEN), TOKENS_OF_IMAGE), MOST_TOKENS_OF_FILE)
            else:
                bytes_ += len(each) if each.isascii() else len(each.encode("utf-8", "surrogatepass"))
        elif isinstance(each, dict):
            bytes_ += sum(len(name) if name.isascii() else len(name.encode("utf-8", "surrogatepass")) for name in each)
            bytes_ += 2 * len(each)
            held = under in _HOLDERS and each.get("type", "base64") == "base64"
            media = each.get("media_type") or each.get("mimeType") or each.get("mime_type")
            for name, inner in each.items():
                if inner.__class__ is str and inner.isascii() and name not in _CARRIERS and under not in _CARRIERS:
                    bytes_ += len(inner)  # plain text, as most values are
                    continue
                where = f"data:{media}" if held and name == "data" else _where(name, under)
                todo.append((inner, where, own or (name in _OWN and each is not body)))
        elif isinstance(each, list):
            todo += [(inner, under, own) for inner in each]
        else:
            bytes_ += 4
    most = bytes_ + images * MOST_TOKENS_OF_IMAGE + files
    return Size(
        max(1, int(bytes_ / BYTES_PER_TOKEN) + images * TOKENS_OF_IMAGE + files), min(max(1, most), MOST_INPUT_TOKENS)
    )


def _where(name: str, under: str) -> str:
    return under if name == "url" and under in _MEDIA else name


def _data(text: str, under: str) -> str | None:
    """Return `image` or `file` if the driver reads a text as such; None if it reads it as text."""
    if under.startswith("data:"):
        head, data = under, text
    elif under in _MEDIA and text.startswith("data:"):
        head, _, data = text.partition(",")
        if len(head) > 200:
            return None
    elif under == "file_data":
        head, data = "", text
    else:
        return None
    if _BASE64.match(data) is None:
        return None
    return "image" if head.startswith("data:image/") and under != "file_data" else "file"


MAX_TOKENS: Final = 10**9
"""Limit for one answer; a larger number is not plausible."""

MAX_COPY_BYTES: Final = 64 * 2**20
"""Limit for an answer that is no event stream, and for one event; beyond it tokens are estimated by length."""

WORDS: Final = frozenset(
    (
        "content",
        "text",
        "delta",
        "arguments",
        "input",
        "partial_json",
        "thinking",
        "reasoning",
        "reasoning_content",
        "refusal",
        "name",
        "data",
    )
)
"""Names under which an event carries the driver's text."""

CALLED_WITH: Final = frozenset(("input", "args", "arguments"))
"""Names of objects with a tool's arguments; the names in them belong to the tool."""


@dataclass
class TokenUsage:
    """Usage of one answer. None means not reported.

    Attributes:
        tokens_in: including cached tokens and those written into a cache.
        written_5m, written_1h: input written into a cache (Anthropic), by its lifetime.
        words_bytes: length of the driver's text received so far.
        out_is_last: the driver reported the final output tokens, not only those so far.
        ended: the answer is complete.
    """

    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens_cached: int = 0
    written_5m: int = 0
    written_1h: int = 0
    words_bytes: int = 0
    out_is_last: bool = False
    ended: bool = False

    @property
    def out_is_told(self) -> bool:
        """Return whether the driver's output figure is plausible: text without tokens is not."""
        return self.ended and self.out_is_last and (bool(self.tokens_out) or not self.words_bytes)

    @property
    def tokens_of_words(self) -> int:
        """Return the estimated tokens of the text received."""
        return int(self.words_bytes / BYTES_PER_TOKEN) + (1 if self.words_bytes else 0)


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= MAX_TOKENS


def _count(value: Any) -> int:
    return int(value) if _is_count(value) else 0


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


class UsageMeter:
    """Reads a copy of an answer while it is forwarded.

    Args:
        content_type: of the answer; it alone decides whether this is an event stream.
        encoding: Content-Encoding; with an unsupported one the figures are estimated.
    """

    def __init__(self, content_type: str, encoding: str = "") -> None:
        self.usage = TokenUsage()
        self._events = content_type.partition(";")[0].strip().lower() == "text/event-stream"
        self._decode = {
            "": None,
            "identity": None,
            "gzip": zlib.decompressobj(47),
            "deflate": zlib.decompressobj(47),
        }.get(encoding.strip().lower(), False)
        self._buffer = b""
        self._data: list[bytes] = []
        self._copy = bytearray()
        self._lost = self._decode is False

    def feed(self, data: bytes) -> None:
        """Read one piece of the answer."""
        if self._decode:
            data = self._unpack(data)
        if self._lost:
            self.usage.words_bytes += len(data)
            return
        if self._events:
            self._lines(data)
        elif len(self._copy) + len(data) > MAX_COPY_BYTES:
            self._lose()
        else:
            self._copy += data

    def end(self, whole: bool) -> TokenUsage:
        """Return the usage. `whole` means that the connection ended regularly."""
        if self._events:
            self._lines(b"\n\n")
        elif not self._lost:
            self._document(bytes(self._copy))
            self._copy.clear()
        self.usage.ended = self.usage.ended or whole
        return self.usage

    def _unpack(self, data: bytes) -> bytes:
        decode: Any = self._decode
        try:
            made: bytes = decode.decompress(data, MAX_COPY_BYTES)
        except zlib.error:
            self._lose()
            return data
        if decode.unconsumed_tail:
            self._lose()
        return made

    def _lose(self) -> None:
        self.usage.words_bytes += len(self._copy) + len(self._buffer)
        self._copy.clear()
        self._buffer, self._data, self._lost = b"", [], True

    def _lines(self, data: bytes) -> None:
        """Read events: lines `data: ...` up to an empty line."""
        *lines, self._buffer = (self._buffer + data if self._buffer else data).split(b"\n")
        if len(self._buffer) + sum(map(len, self._data)) > MAX_COPY_BYTES:
            self._lose()
            return
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[5:])
            elif self._data and line in (b"", b"\r"):
                event, self._data = b"\n".join(self._data), []
                self._event(event)

    def _event(self, data: bytes) -> None:
        if data.strip() == b"[DONE]":
            self.usage.ended = True
            return
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            self.usage.words_bytes += len(data)
            return
        if isinstance(value, dict):
            self._object(value)

    def _document(self, data: bytes) -> None:
        """Read an answer that is no event stream, or Gemini's stream as one list, which may be cut."""
        try:
            value = json.loads(data)
        except (ValueError, RecursionError):
            value = _cut_list(data)
            if value is None:
                self.usage.words_bytes += len(data)
                return
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict):
                self._object(each)

    def _object(self, value: dict[str, Any]) -> None:
        """Read an event or a whole answer of any dialect; their usage fields don't collide."""
        kind = value.get("type")
        usage = self.usage
        if isinstance(value.get("usageMetadata"), dict):
            self._gemini(value["usageMetadata"])
            usage.words_bytes += words_in(value.get("candidates"))
            return
        inner = _object(value.get("response")) or _object(value.get("message")) or value
        told = inner.get("usage")
        if not isinstance(told, dict):
            told = value.get("usage")
        if isinstance(told, dict):
            if "prompt_tokens" in told or "completion_tokens" in told:
                self._chat(told)
            elif "input_tokens_details" in told or "output_tokens_details" in told or inner.get("object") == "response":
                self._responses(told)
            else:
                self._anthropic(told, last=kind != "message_start")
        if isinstance(kind, str):
            if kind in ("message_stop", "response.completed", "response.incomplete", "response.failed"):
                usage.ended = True
            elif kind.endswith(".delta") or kind in ("content_block_delta", "content_block_start"):
                usage.words_bytes += words_in(
                    {name: value[name] for name in ("delta", "content_block") if name in value}
                )
            elif kind == "message":
                usage.words_bytes += words_in(value.get("content"))
        elif "choices" in value:
            usage.words_bytes += words_in(value["choices"])
        elif "output" in value:
            usage.words_bytes += words_in(value["output"])
        elif "candidates" in value:
            usage.words_bytes += words_in(value["candidates"])

    def _chat(self, told: dict[str, Any]) -> None:
        details = _object(told.get("prompt_tokens_details"))
        cached = _count(details.get("cached_tokens")) or _count(told.get("prompt_cache_hit_tokens"))  # DeepSeek's name
        self._told(_count(told.get("prompt_tokens")), told.get("completion_tokens"), cached)

    def _responses(self, told: dict[str, Any]) -> None:
        cached = _count(_object(told.get("input_tokens_details")).get("cached_tokens"))
        self._told(_count(told.get("input_tokens")), told.get("output_tokens"), cached)

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
    """Return input, and of it read from a cache, written for five minutes, written for an hour; and output."""
    read, written = _count(told.get("cache_read_input_tokens")), _count(told.get("cache_creation_input_tokens"))
    long = min(_count(_object(told.get("cache_creation")).get("ephemeral_1h_input_tokens")), written)
    total = _count(told.get("input_tokens")) + read + written
    return total, read, written - long, long, _count(told.get("output_tokens"))


def unpacked(data: bytes, encoding: str, most: int) -> bytes:
    """Decompress a whole body; empty if that fails."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return data
    try:
        return zlib.decompressobj(47).decompress(data, most) if encoding in ("gzip", "deflate") else b""
    except zlib.error:
        return b""


def words_in(value: Any) -> int:
    """Return the bytes of the driver's text in a part of an answer. All arguments of tools count as its text."""
    total, todo = 0, [(value, "", False)]  # (value, its name, whether it is a tool's argument)
    while todo:
        each, under, called = todo.pop()
        if isinstance(each, str):
            total += _bytes(each) if called or under in WORDS else 0
        elif isinstance(each, dict):
            total += sum(map(_bytes, each)) if called else 0
            todo += [
                (inner, name, called or (name in CALLED_WITH and isinstance(inner, dict)))
                for name, inner in each.items()
            ]
        elif isinstance(each, list):
            todo += [(inner, "", called) for inner in each]
    return total


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _cut_list(data: bytes) -> list[Any] | None:
    """Return the whole elements of a cut JSON list; None if it is no list."""
    text = data.decode("utf-8", "replace").lstrip()
    if not text.startswith("["):
        return None
    reader, at = json.JSONDecoder(), 1
    found: list[Any] = []
    while True:
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        try:
            value, at = reader.raw_decode(text, at)
        except (ValueError, RecursionError):
            return found
        found.append(value)


# --- usage in chat streams: the gateway asks for it, and removes the event that reports it.
# OpenAI's stream reports tokens only if the client sets `stream_options.include_usage`. Otherwise they would be estimated,
# without a reasoning driver's hidden tokens. The event without choices that holds the usage is removed, so the client gets
# what it asked for (`"usage": null` in other events stays).


def asking(data: bytes, body: dict[str, Any]) -> bytes:
    """Return the request with the option set; if it had no options, its other bytes are unchanged."""
    if "stream_options" not in body:
        at = data.index(b"{") + 1
        return data[:at] + b'"stream_options":{"include_usage":true},' + data[at:]
    options = body["stream_options"] if isinstance(body["stream_options"], dict) else {}
    changed = {**body, "stream_options": {**options, "include_usage": True}}
    return json.dumps(changed, ensure_ascii=False).encode("utf-8", "surrogatepass")


class WithoutUsage:
    """Forwards a stream event by event, without those that hold only usage."""

    MAX_EVENT_BYTES = 16 * 2**20

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> bytes:
        """Return the whole events that can be forwarded now."""
        self._buffer += data
        out = b""
        while True:
            ends = [at + len(end) for end in (b"\n\n", b"\r\n\r\n") if (at := self._buffer.find(end)) >= 0]
            if not ends:
                break
            event, self._buffer = self._buffer[: min(ends)], self._buffer[min(ends) :]
            if not _is_usage(event):
                out += event
        if len(self._buffer) > self.MAX_EVENT_BYTES:
            out, self._buffer = out + self._buffer, b""
        return out

    def end(self) -> bytes:
        """Return the rest after the stream's end."""
        return self._buffer


def _is_usage(event: bytes) -> bool:
    if b'"usage"' not in event:
        return False
    data = b"\n".join(line[5:] for line in event.splitlines() if line.startswith(b"data:"))
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and value.get("choices") == [] and isinstance(value.get("usage"), dict)


# --- what a request asks for, as far as budgets need it: the length of its input and of its answer

MAX_ANSWER_TOKENS: Final = 2**31
DEFAULT_ANSWER_TOKENS: Final = 8192
MAX_ANSWERS: Final = 16
"""Limit of answers to one request (`n`)."""

_LIMITS: Final = {
    CHAT: ("max_completion_tokens", "max_tokens"),
    RESPONSES: ("max_output_tokens",),
    ANTHROPIC: ("max_tokens",),
    GEMINI: ("maxOutputTokens",),
}
_STORED: Final = frozenset(("item_reference", "reasoning", "compaction"))
"""Items of `responses` that may only refer to data stored at the provider."""


@dataclass(frozen=True)
class RequestedSize:
    """What one request asks for.

    Attributes:
        tokens_in: estimated.
        tokens_out: the most that is asked for, all answers together.
        stream: from the body.
        include_usage: a chat stream that reports its usage anyway.
        most_in: maximum of the input, however wrong the estimate is.
    """

    tokens_in: int
    tokens_out: int
    stream: bool
    include_usage: bool
    most_in: int


def asked(dialect: str, body: dict[str, Any], default_out: int) -> RequestedSize:
    """Read a body that was checked.

    Raises:
        Refusal: `stream` is not a boolean, or a limit or a number of answers is not a positive integer; some servers accept
            other values and might read them differently from the gateway.
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
    limits = [n for name in _LIMITS[dialect] if (n := _positive_count(fields, name, dialect)) is not None]
    answers = _positive_count(fields, several, dialect) or 1
    if answers > MAX_ANSWERS:
        raise Refusal(400, "unreadable", f"`{several}` is {answers}: a request may have {MAX_ANSWERS} answers")
    size = size_of(body)
    return RequestedSize(
        tokens_in=size.tokens,
        tokens_out=min(max(limits, default=default_out) * answers, MAX_ANSWER_TOKENS),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        most_in=MOST_INPUT_TOKENS if dialect == RESPONSES and _names_stored(body) else size.most,
    )


def _positive_count(fields: dict[str, Any], name: str, dialect: str) -> int | None:
    """Return a positive integer; None if it is not set. For Gemini, texts of digits count too, as in Protobuf's JSON."""
    value = fields.get(name)
    if value is None:
        return None
    if dialect == GEMINI and isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 10:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < MAX_ANSWER_TOKENS:
        raise Refusal(400, "unreadable", f"`{name}` is no positive integer")
    return value


def _names_stored(body: dict[str, Any]) -> bool:
    """Return whether a part of the input is stored at the provider, so that its length is unknown."""
    if body.get("previous_response_id") is not None:
        return True
    items = body.get("input")
    return isinstance(items, list) and any(
        isinstance(item, dict)
        and item.get("type") in _STORED
        and (item["type"] == "item_reference" or (item.get("id") and not item.get("encrypted_content")))
        for item in items
    )


# --- one request under way


@dataclass
class CallRecord:
    """A request's state, filled in on the way; the log's line is made from it at the end.

    Attributes:
        quiet: not logged.
        generates: its tokens count.
        hides_usage: a chat stream for which the gateway asks for the usage.
        reached: it was sent to the driver, as far as is known.
        meter: reads the answer; None if there was none.
        unanswered: it was sent to a provider, but nothing came back.
        whole: the answer is complete.
        left: the client did not wait for it.
        bodies: request and answer, if they are stored.
    """

    dialect: str
    path: str
    at: str = field(default_factory=now_text)
    began: float = field(default_factory=time.monotonic)
    quiet: bool = False
    number: int = 0
    model: str | None = None
    generates: bool = False
    stream: bool = False
    hides_usage: bool = False
    wants: RequestedSize | None = None
    status: int = 0
    request_bytes: int = 0
    answer_bytes: int = 0
    sent_at: float | None = None
    first_byte_s: float | None = None
    tries: list[str] = field(default_factory=list)
    reached: bool = False
    meter: UsageMeter | None = None
    unanswered: bool = False
    whole: bool = False
    left: bool = False
    refused: str | None = None
    fault: str | None = None
    error: str | None = None
    bodies: tuple[bytes, bytearray] | None = None
