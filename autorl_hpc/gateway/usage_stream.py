"""Asks a chat stream for its usage, which it tells only then, and takes that one event out again.

OpenAI's stream tells no tokens unless the client sets `stream_options.include_usage`. An agent that doesn't would be counted by estimates,
in which a thinking driver's hidden tokens are missing. So the gateway asks in its place, and the client sees what it asked for: the
event without choices that holds the usage is left out (`"usage": null` in the others stays).
"""

from __future__ import annotations

import json
from typing import Any


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
