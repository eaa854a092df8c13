"""Tokens that an answer cost: read from a copy of it, as the driver told them, and estimated only where it was cut or told none."""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from typing import Any, Final

from autorl_hpc.gateway.sizes import BYTES_PER_TOKEN

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
class Usage:
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


class Meter:
    """Reads a copy of an answer while it passes.

    Args:
        content_type: of the answer: a stream is one of events by this alone, whatever was asked for.
        encoding: Content-Encoding; one that can't be read makes the figures estimates.
    """

    def __init__(self, content_type: str, encoding: str = "") -> None:
        self.usage = Usage()
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

    def end(self, whole: bool) -> Usage:
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
