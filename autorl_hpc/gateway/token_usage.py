"""Tokens that an answer cost: read from a copy of it, as the driver told them, and estimated only where it was cut or told none."""

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

# How many tokens a request's input is, by its length: an estimate, and what it can't be more than.

BYTES_PER_TOKEN: Final = 4.0
"""Of English and code. How far the driver's own figures are from it is learned from its answers. A token is never less than a byte."""

TOKENS_OF_IMAGE: Final = 1500
"""What providers take for a large image."""

MOST_TOKENS_OF_IMAGE: Final = 16_000
MOST_TOKENS_OF_FILE: Final = 300_000
"""A document of a hundred pages, as text and images."""

MOST_INPUT_TOKENS: Final = 2**21
"""No model's window is longer."""

_BASE64: Final = re.compile(r"[A-Za-z0-9+/_\r\n-]*={0,2}\Z")
_MEDIA: Final = frozenset(("image_url", "video_url", "audio_url", "file_data"))
_HOLDERS: Final = frozenset(("source", "inlineData", "inline_data", "input_audio"))
_CARRIERS: Final = _MEDIA | _HOLDERS | {"data"}
"""Names under which, or directly below which, a text may be an image or a file."""

_OWN: Final = frozenset(
    ("input", "arguments", "args", "response", "parameters", "input_schema", "json_schema", "schema", "metadata")
)
"""What stands below is a tool's or the client's own: nothing in it is an image to the driver."""


@dataclass(frozen=True)
class Size:
    """In tokens."""

    tokens: int
    most: int


def size_of(body: dict[str, Any]) -> Size:
    """By the length of all texts; data in base64 count as images and files only where the driver takes them for such. Without
    recursion."""
    bytes_, images, files = 0, 0, 0
    todo: list[tuple[Any, str, bool]] = [
        (body, "", False)
    ]  # a value, the name it stands under, whether it is a tool's own
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
                    bytes_ += len(inner)  # words, as most are
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
    """What a text is to the driver that is no words: `image`, `file`; None: words."""
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
"""Of one answer: what is more is no figure."""

MAX_COPY_BYTES: Final = 64 * 2**20
"""Of an answer that is no stream of events, and of one event. Beyond, it is estimated by its length."""

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
"""Names under which an event carries what the driver wrote."""

CALLED_WITH: Final = frozenset(("input", "args", "arguments"))
"""Names of objects that a tool is called with: the names within are the tool's own."""


@dataclass
class TokenUsage:
    """Of one answer. None: not told.

    Attributes:
        tokens_in: cached ones and those written into a cache among them.
        written_5m, written_1h: input that was written into a cache (Anthropic), by how long it is kept.
        words_bytes: length of what the driver wrote, as far as it came.
        out_is_last: the driver told the whole output, and not only what it was so far.
        ended: the answer came to its end.
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
        """Whether the driver's figure of the output can be one: words take tokens."""
        return self.ended and self.out_is_last and (bool(self.tokens_out) or not self.words_bytes)

    @property
    def tokens_of_words(self) -> int:
        """Estimated."""
        return int(self.words_bytes / BYTES_PER_TOKEN) + (1 if self.words_bytes else 0)


def _is_count(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 <= value <= MAX_TOKENS


def _count(value: Any) -> int:
    return int(value) if _is_count(value) else 0


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


class UsageMeter:
    """Reads a copy of an answer while it passes.

    Args:
        content_type: of the answer: a stream is one of events by this alone, whatever was asked for.
        encoding: Content-Encoding; one that can't be read makes the figures estimates.
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
        """One piece of the answer as it came."""
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
        """The figures. `whole`: the connection said that this was all."""
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
        """Events are lines `data: ...` up to an empty one."""
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
        """An answer that is no stream; or Gemini's stream as one list, which may be cut."""
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
        """An event or a whole answer, of whatever dialect: where they keep their figures doesn't collide."""
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
        """Input that came from a cache or went into one is told beside the rest. Of a stream, the first event tells the input, the
        last ones the output so far, and some tell both again."""
        usage = self.usage
        figures = _anthropic_figures(told)
        rounds = told.get("iterations")
        if isinstance(rounds, list) and rounds:  # what compactions and the like took is billed, and stands here alone
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
        """Thoughts are told apart from the answer and cost the same; tools' results are input."""
        out = _count(told.get("candidatesTokenCount")) + _count(told.get("thoughtsTokenCount"))
        given = _count(told.get("promptTokenCount")) + _count(told.get("toolUsePromptTokenCount"))
        self._told(given, out, _count(told.get("cachedContentTokenCount")))

    def _told(self, tokens_in: int, tokens_out: Any, cached: int) -> None:
        """Streams that tell more than once tell the total so far. `tokens_out` as it was told, whatever that is."""
        usage = self.usage
        usage.tokens_in = max(usage.tokens_in or 0, tokens_in)
        usage.tokens_out = max(usage.tokens_out or 0, _count(tokens_out))
        usage.tokens_cached = min(max(usage.tokens_cached, cached), usage.tokens_in)
        usage.out_is_last = usage.out_is_last or _is_count(tokens_out)


def _anthropic_figures(told: dict[str, Any]) -> tuple[int, ...]:
    """All input, and of it: read from a cache, written into one for five minutes, for an hour; output."""
    read, written = _count(told.get("cache_read_input_tokens")), _count(told.get("cache_creation_input_tokens"))
    long = min(_count(_object(told.get("cache_creation")).get("ephemeral_1h_input_tokens")), written)
    total = _count(told.get("input_tokens")) + read + written
    return total, read, written - long, long, _count(told.get("output_tokens"))


def unpacked(data: bytes, encoding: str, most: int) -> bytes:
    """What a whole body says; nothing if it can't be read."""
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return data
    try:
        return zlib.decompressobj(47).decompress(data, most) if encoding in ("gzip", "deflate") else b""
    except zlib.error:
        return b""


def words_in(value: Any) -> int:
    """Bytes of the driver's words in a part of an answer. What a tool is called with is its words by whatever names. Without recursion."""
    total, todo = 0, [(value, "", False)]  # a value, the name it stands under, whether it is what a tool is called with
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
    """The whole elements of a JSON list that breaks off."""
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


# Asks a chat stream for its usage, which it tells only then, and takes that one event out again.
#
# OpenAI's stream tells no tokens unless the client sets `stream_options.include_usage`. An agent that doesn't would be counted by estimates,
# in which a thinking driver's hidden tokens are missing. So the gateway asks in its place, and the client sees what it asked for: the
# event without choices that holds the usage is left out (`"usage": null` in the others stays).


def asking(data: bytes, body: dict[str, Any]) -> bytes:
    """The request with the option set; where there were no options, nothing else of its bytes changes."""
    if "stream_options" not in body:
        at = data.index(b"{") + 1
        return data[:at] + b'"stream_options":{"include_usage":true},' + data[at:]
    options = body["stream_options"] if isinstance(body["stream_options"], dict) else {}
    changed = {**body, "stream_options": {**options, "include_usage": True}}
    return json.dumps(changed, ensure_ascii=False).encode("utf-8", "surrogatepass")


class WithoutUsage:
    """Passes a stream event by event, but for those that hold usage alone."""

    MAX_EVENT_BYTES = 16 * 2**20

    def __init__(self) -> None:
        self._buffer = b""

    def feed(self, data: bytes) -> bytes:
        """What passes now: whole events."""
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
        """What is left when the stream has ended."""
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


# What a request asks for, as far as budgets need it: how long it is, how long its answer may become.

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
class RequestedSize:
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


def asked(dialect: str, body: dict[str, Any], default_out: int) -> RequestedSize:
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


# One request on its way, and what becomes of it.


@dataclass
class CallRecord:
    """Filled in on the way; the log's line is made of it at the end.

    Attributes:
        quiet: not logged.
        generates: its tokens count.
        hides_usage: a chat stream that is asked for its usage in the client's place.
        reached: it went out to the driver, as far as is known here.
        meter: reads the answer; None: there was none.
        unanswered: it was sent to a provider, and nothing came.
        whole: the answer came to its end.
        left: the client did not wait for it.
        bodies: request and answer, where they are kept.
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
