"""One answer of a driver in each dialect: its path, its events, the whole, and pieces of it."""

from __future__ import annotations

import json
import random

import driver_wire as wire

TURN = wire.Turn("Grüße, some words", (wire.Call("bash", {"command": "id"}),), None, 1000, 50, 600)
PATHS = {
    "openai-chat": "/v1/chat/completions",
    "openai-responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/models/m:streamGenerateContent",
}


def answers(dialect: str, query: str = "alt=sse") -> tuple[list[bytes], bytes]:
    """The events of a stream, and the same as a whole answer."""
    asks = {"openai-responses": "input", "gemini": "contents"}.get(dialect, "messages")
    body = {"model": "m", asks: [], "stream": True, "stream_options": {"include_usage": True}}
    conversation = wire.read(dialect, PATHS[dialect], query, body, 1)
    answer = wire.answer_to(conversation, TURN)
    return list(wire.events(conversation, answer)), json.dumps(wire.whole(conversation, answer)).encode()


STREAMS = {dialect: answers(dialect)[0] for dialect in PATHS}
WHOLE = {dialect: answers(dialect)[1] for dialect in PATHS}


def in_pieces(data: bytes, seed: int) -> list[bytes]:
    dice = random.Random(seed)
    pieces = []
    while data:
        size = dice.choice([1, 2, 3, 7, 50, 1000])
        pieces.append(data[:size])
        data = data[size:]
    return pieces
