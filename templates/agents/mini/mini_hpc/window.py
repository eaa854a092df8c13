"""Keeps a conversation within the driver's window. System prompt and task stay, the newest messages too; the oldest are folded.

Folding goes well below the limit at once, so that the conversation's beginning stays the same for many calls: drivers keep
what they have read of it in a cache.
"""

from __future__ import annotations

import json
from typing import Any

Message = dict[str, Any]

BYTES_A_TOKEN = 3.0
"""Before the driver has told how many tokens a prompt had: on the safe side for English and code."""
FEWEST_BYTES_A_TOKEN, MOST_BYTES_A_TOKEN = 1.0, 6.0
CAUTION = 0.93
"""What is new in a conversation may have more tokens a byte than what was counted."""
MESSAGE_TOKENS = 8
FOLD_TO = 0.6
TIGHTEN = 0.75
FEWEST_TOKENS = 500
FIRST = 2
"""System prompt and task."""
NEWEST = 4
"""Two steps with what came of them are never folded, only shortened if nothing else helps."""
FOLDED_CHARS = 240
COMMAND_CHARS = 600
SENT = ("role", "content", "tool_calls", "tool_call_id")


def shortened(text: str, limit: int, what: str = "characters left out") -> str:
    """Head and tail of a long text."""
    if len(text) <= limit:
        return text
    head = limit // 2
    tail = limit - head
    return f"{text[:head]}\n[... {len(text) - head - tail} {what} ...]\n{text[-tail:]}"


class Window:
    """What of a conversation is shown to the driver.

    Args:
        tokens: the driver's window, input and output together.
        reserve: for the output.
    """

    def __init__(self, tokens: int, reserve: int) -> None:
        self.tokens, self.reserve = tokens, reserve
        self.bytes_a_token = BYTES_A_TOKEN
        self._share = 1.0
        self._folded: set[int] = set()
        self._left_out = FIRST
        self._cut_chars: int | None = None

    @property
    def limit(self) -> int:
        """Tokens that a prompt may have."""
        return max(FEWEST_TOKENS, int((self.tokens - self.reserve) * self._share))

    @property
    def output_chars(self) -> int:
        """How much of one command's output is worth showing at all."""
        return max(1000, min(10_000, int(self.limit * self.bytes_a_token / 5)))

    def estimate(self, messages: list[Message]) -> int:
        """Tokens of these messages."""
        return sum(MESSAGE_TOKENS + int(_bytes(message) / self.bytes_a_token) for message in messages)

    def learn(self, shown: list[Message], tokens_in: int | None) -> None:
        """The driver told how many tokens a prompt had."""
        if tokens_in is not None:
            measured = CAUTION * sum(_bytes(message) for message in shown) / tokens_in
            self.bytes_a_token = min(max(measured, FEWEST_BYTES_A_TOKEN), MOST_BYTES_A_TOKEN)

    def tighten(self, window_tokens: int | None) -> bool:
        """The driver said that it was too much; whether less can be shown at all."""
        if window_tokens is not None and window_tokens < self.tokens:
            self.tokens = window_tokens
            self.reserve = min(self.reserve, window_tokens // 3)
        before = self.limit
        self._share *= TIGHTEN
        return self.limit < before

    def shown(self, messages: list[Message]) -> list[Message]:
        """The messages to send; the conversation itself is left as it is."""
        messages = [message for message in messages if message["role"] != "exit"]
        self._cut_chars = None
        if self.estimate(self._view(messages)) > self.limit:
            self._fold(messages)
        return _alternating(self._view(messages))

    def _fold(self, messages: list[Message]) -> None:
        target = int(FOLD_TO * self.limit)
        last = max(FIRST, len(messages) - NEWEST)
        for roles in (("user", "tool"), ("assistant",)):
            for index in range(self._left_out, last):
                if messages[index]["role"] in roles and index not in self._folded:
                    self._folded.add(index)
                    if self.estimate(self._view(messages)) <= target:
                        return
        for index in range(self._left_out, last):
            # What is left begins with the driver's words: an answer of a tool without its call is an error.
            if messages[index + 1]["role"] == "assistant":
                self._left_out = index + 1
                if self.estimate(self._view(messages)) <= target:
                    return
        chars = self.output_chars
        while self.estimate(self._view(messages)) > self.limit and chars > FOLDED_CHARS:
            chars //= 2
            self._cut_chars = chars

    def _view(self, messages: list[Message]) -> list[Message]:
        view = []
        for index, message in enumerate(messages):
            if FIRST <= index < self._left_out:
                continue
            sent = {key: message[key] for key in SENT if message.get(key) is not None}
            sent.setdefault("content", None if sent.get("tool_calls") else "")
            if index in self._folded:
                sent = _folded(sent, message.get("extra") or {})
            if self._cut_chars is not None and index != 0:
                sent = _cut(sent, self._cut_chars * (4 if index == 1 else 1))
            view.append(sent)
        if self._left_out > FIRST and len(view) > 1:
            note = f"[{self._left_out - FIRST} earlier messages of this conversation are left out: look at your files and notes.]"
            view[1] = {**view[1], "content": f"{view[1]['content']}\n\n{note}"}
        return view


def _bytes(message: Message) -> int:
    calls = message.get("tool_calls")
    return len((message.get("content") or "").encode()) + (len(json.dumps(calls)) if calls else 0)


def _folded(sent: Message, extra: dict[str, Any]) -> Message:
    if sent["role"] == "assistant":
        return _cut(sent, COMMAND_CHARS)
    text = sent["content"] or ""
    if len(text) <= FOLDED_CHARS:
        return sent
    code = extra.get("returncode")
    told = "" if code is None else f"<returncode>{code}</returncode>\n"
    end = str(extra.get("raw_output") or text).strip()[-FOLDED_CHARS // 2 :]
    return {**sent, "content": f"{told}[output of {len(text)} characters folded; it ended with:]\n{end}"}


def _cut(sent: Message, chars: int) -> Message:
    made = {**sent, "content": shortened(sent["content"], chars) if sent["content"] else sent["content"]}
    if sent.get("tool_calls"):
        made["tool_calls"] = [_cut_call(call, chars) for call in sent["tool_calls"]]
    return made


def _cut_call(call: dict[str, Any], chars: int) -> dict[str, Any]:
    """Arguments stay JSON: drivers parse them."""
    arguments = call["function"]["arguments"]
    if len(arguments) <= chars:
        return call
    try:
        command = str(json.loads(arguments)["command"])
    except (ValueError, KeyError, TypeError):
        command = arguments
    return {**call, "function": {**call["function"], "arguments": json.dumps({"command": shortened(command, chars)})}}


def _alternating(view: list[Message]) -> list[Message]:
    """Neighbours of one role as one message: many models' templates take nothing else."""
    made: list[Message] = []
    for sent in view:
        before = made[-1] if made else {}
        calls = sent.get("tool_calls") or before.get("tool_calls")
        if sent["role"] == before.get("role") and sent["role"] in ("user", "assistant") and not calls:
            made[-1] = {**before, "content": f"{before['content']}\n\n{sent['content']}"}
        else:
            made.append(sent)
    return made
