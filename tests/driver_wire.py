"""The four dialects of drivers, as the tests' server speaks them: requests read into one form, turns written in the asked one.

Written from the providers' published descriptions of their interfaces, and independent of the gateway's own reading.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

CHAT, RESPONSES, ANTHROPIC, GEMINI = "openai-chat", "openai-responses", "anthropic", "gemini"

SHELLS = (
    "Bash", "bash", "shell", "exec_command", "shell_command", "local_shell", "container.exec", "run_shell_command",
    "execute_bash", "terminal",
)  # fmt: skip
"""What agents call the tool that runs a command: Claude Code, mini and OpenCode, Codex, Gemini CLI, OpenHands."""


@dataclass(frozen=True)
class Call:
    """A tool call."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What the driver says once.

    Attributes:
        run: a command, called by whatever tool for commands the agent offers.
        tokens_in: told to the client; None: by length of what was sent.
        tokens_cached: part of tokens_in.
    """

    text: str = ""
    calls: tuple[Call, ...] = ()
    run: str | None = None
    tokens_in: int | None = None
    tokens_out: int | None = None
    tokens_cached: int = 0


@dataclass(frozen=True)
class Message:
    """One message of a conversation; role `tool` is a tool's answer."""

    role: str
    text: str
    calls: tuple[str, ...] = ()


@dataclass(frozen=True)
class Conversation:
    """A request as a driver understands it.

    Attributes:
        number: of the request, from 1.
        tools: schemas of their arguments by name.
    """

    number: int
    dialect: str
    model: str
    stream: bool
    messages: tuple[Message, ...]
    tools: dict[str, dict[str, Any]]
    body: dict[str, Any]
    query: str = ""

    @property
    def turns(self) -> int:
        return sum(message.role == "assistant" for message in self.messages)

    @property
    def last(self) -> str:
        return self.messages[-1].text if self.messages else ""

    @property
    def text(self) -> str:
        return "\n".join(message.text for message in self.messages)

    @property
    def tokens_in(self) -> int:
        """By length: four bytes of the request are a token."""
        return max(1, len(json.dumps(self.body)) // 4)


@dataclass
class Answer:
    """A turn with everything that is told about it."""

    turn: Turn
    calls: tuple[Call, ...]
    tokens_in: int
    tokens_out: int
    model: str
    number: int
    pieces: list[str] = field(default_factory=list)


def _words(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        content = [content]
    words = []
    for part in content or []:
        if isinstance(part, str):
            words.append(part)
        elif isinstance(part, dict):
            inner = next((part[name] for name in ("text", "content", "output", "input") if name in part), "")
            words.append(_words(inner))
    return "\n".join(words)


def dialect_of(path: str) -> str | None:
    """By the path; None where no generation is asked for."""
    ends = {"completions": CHAT, "responses": RESPONSES, "messages": ANTHROPIC}
    return GEMINI if ":generateContent" in path or ":stream" in path else ends.get(path.rpartition("/")[2])


def read(dialect: str, path: str, query: str, body: dict[str, Any], number: int) -> Conversation:
    messages: list[Message] = []
    tools: dict[str, dict[str, Any]] = {}
    stream = bool(body.get("stream"))
    model = str(body.get("model", ""))
    if dialect == CHAT:
        for each in body["messages"]:
            calls = tuple(call["function"]["name"] for call in each.get("tool_calls") or [] if "function" in call)
            messages.append(Message(each["role"], _words(each.get("content")), calls))
        for tool in body.get("tools") or []:
            inner = tool.get(tool.get("type"), {})
            tools[inner.get("name", tool.get("type"))] = inner.get("parameters", {})
    elif dialect == RESPONSES:
        if body.get("instructions"):
            messages.append(Message("system", body["instructions"]))
        given = body.get("input", [])
        for each in [{"role": "user", "content": given}] if isinstance(given, str) else given:
            kind = each.get("type", "message")
            if kind == "message":
                messages.append(Message(each["role"], _words(each["content"])))
            elif kind.endswith("_call"):
                messages.append(Message("assistant", "", (each.get("name", kind),)))
            elif kind.endswith("_call_output"):
                messages.append(Message("tool", _words(each["output"])))
        for tool in body.get("tools") or []:
            tools[tool.get("name", tool["type"])] = tool.get("parameters", {})
    elif dialect == ANTHROPIC:
        if body.get("system"):
            messages.append(Message("system", _words(body["system"])))
        for each in body["messages"]:
            parts = each["content"] if isinstance(each["content"], list) else []
            calls = tuple(part["name"] for part in parts if part.get("type") == "tool_use")
            answered = any(part.get("type") == "tool_result" for part in parts)
            messages.append(Message("tool" if answered else each["role"], _words(each["content"]), calls))
        tools = {tool["name"]: tool.get("input_schema", {}) for tool in body.get("tools") or []}
    else:
        model = path.rpartition("/")[2].partition(":")[0]
        stream = ":streamGenerateContent" in path
        if body.get("systemInstruction"):
            messages.append(Message("system", _words(body["systemInstruction"].get("parts"))))
        for each in body["contents"]:
            parts = each["parts"]
            calls = tuple(part["functionCall"]["name"] for part in parts if "functionCall" in part)
            answers = [json.dumps(part["functionResponse"]["response"]) for part in parts if "functionResponse" in part]
            role = "tool" if answers else {"model": "assistant"}.get(each.get("role"), "user")
            messages.append(Message(role, "\n".join([_words(parts), *answers]).strip(), calls))
        for group in body.get("tools") or []:
            for tool in group.get("functionDeclarations") or []:
                tools[tool["name"]] = tool.get("parametersJsonSchema") or tool.get("parameters", {})
    return Conversation(number, dialect, model, stream, tuple(messages), tools, body, query)


def calls_of(turn: Turn, conversation: Conversation) -> tuple[Call, ...]:
    """The turn's calls, with `run` as a call of the tool that the agent offers for it."""
    if turn.run is None:
        return turn.calls
    name = next((name for name in SHELLS if name in conversation.tools), None)
    if name is None:
        raise LookupError(f"the agent offers no tool for commands, but {sorted(conversation.tools)}")
    given = conversation.tools[name].get("properties", {})
    argument = next((each for each in ("command", "cmd") if each in given), "command")
    as_list = given.get(argument, {}).get("type") == "array"
    arguments: dict[str, Any] = {argument: ["bash", "-lc", turn.run] if as_list else turn.run}
    for extra in ("description", "security_risk"):
        if extra in conversation.tools[name].get("required", []):
            arguments[extra] = "LOW" if extra == "security_risk" else "runs a command"
    return (*turn.calls, Call(name, arguments))


def answer_to(conversation: Conversation, turn: Turn) -> Answer:
    """What is told about a turn. Without figures of its own a piece of text and each call's name and argument is a token."""
    calls = calls_of(turn, conversation)
    pieces = [turn.text[at : at + 4] for at in range(0, len(turn.text), 4)]
    told_out = turn.tokens_out if turn.tokens_out is not None else max(1, len(pieces) + 8 * len(calls))
    told_in = turn.tokens_in if turn.tokens_in is not None else conversation.tokens_in
    return Answer(turn, calls, told_in, told_out, conversation.model, conversation.number, pieces)


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


# --- openai-chat


def _chat_usage(answer: Answer) -> dict[str, Any]:
    usage = {"prompt_tokens": answer.tokens_in, "completion_tokens": answer.tokens_out}
    total, details = answer.tokens_in + answer.tokens_out, {"cached_tokens": answer.turn.tokens_cached}
    return {**usage, "total_tokens": total, "prompt_tokens_details": details}


def _chat_call(number: int, at: int, call: Call) -> dict[str, Any]:
    function = {"name": call.name, "arguments": json.dumps(call.arguments)}
    return {"id": f"call_{number}_{at}", "type": "function", "function": function}


def _chat(answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.turn.text or None}
    if answer.calls:
        message["tool_calls"] = [_chat_call(answer.number, at, call) for at, call in enumerate(answer.calls)]
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if answer.calls else "stop"}
    head = {"id": f"chatcmpl-{answer.number}", "object": "chat.completion", "created": 1, "model": answer.model}
    return {**head, "choices": [choice], "usage": _chat_usage(answer)}


def _chat_events(answer: Answer, include_usage: bool) -> Iterator[bytes]:
    head = {"id": f"chatcmpl-{answer.number}", "object": "chat.completion.chunk", "created": 1, "model": answer.model}
    last: dict[str, Any] = {"usage": None} if include_usage else {}

    def delta(fields: dict[str, Any], reason: str | None = None) -> bytes:
        return _data({**head, "choices": [{"index": 0, "delta": fields, "finish_reason": reason}], **last})

    yield delta({"role": "assistant", "content": ""})
    for piece in answer.pieces:
        yield delta({"content": piece})
    for at, call in enumerate(answer.calls):
        whole = _chat_call(answer.number, at, call)
        first, second = _halves(whole["function"]["arguments"])
        yield delta({"tool_calls": [{"index": at, **whole, "function": {"name": call.name, "arguments": first}}]})
        yield delta({"tool_calls": [{"index": at, "function": {"arguments": second}}]})
    yield delta({}, "tool_calls" if answer.calls else "stop")
    if include_usage:
        yield _data({**head, "choices": [], "usage": _chat_usage(answer)})
    yield b"data: [DONE]\n\n"


# --- openai-responses


def _response(answer: Answer, output: list[dict[str, Any]], status: str = "completed") -> dict[str, Any]:
    usage = {"input_tokens": answer.tokens_in, "input_tokens_details": {"cached_tokens": answer.turn.tokens_cached}}
    usage |= {"output_tokens": answer.tokens_out, "output_tokens_details": {"reasoning_tokens": 0}}
    usage |= {"total_tokens": answer.tokens_in + answer.tokens_out}
    head = {"id": f"resp_{answer.number}", "object": "response", "created_at": 1, "status": status}
    told = {"model": answer.model, "usage": usage if status == "completed" else None}
    return {**head, **told, "output": output, "error": None, "incomplete_details": None}


def _items(answer: Answer) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if answer.turn.text or not answer.calls:
        part = {"type": "output_text", "text": answer.turn.text, "annotations": []}
        head = {"id": f"msg_{answer.number}", "type": "message", "status": "completed", "role": "assistant"}
        items.append({**head, "content": [part]})
    for at, call in enumerate(answer.calls):
        name = {"call_id": f"call_{answer.number}_{at}", "name": call.name, "status": "completed"}
        arguments = json.dumps(call.arguments)
        items.append({"id": f"fc_{answer.number}_{at}", "type": "function_call", **name, "arguments": arguments})
    return items


def _responses_events(answer: Answer) -> Iterator[bytes]:
    items = _items(answer)
    number = -1

    def event(kind: str, **fields: Any) -> bytes:
        nonlocal number
        number += 1
        return f"event: {kind}\n".encode() + _data({"type": kind, "sequence_number": number, **fields})

    yield event("response.created", response=_response(answer, [], "in_progress"))
    yield event("response.in_progress", response=_response(answer, [], "in_progress"))
    for at, item in enumerate(items):
        place = {"output_index": at, "item_id": item["id"]}
        empty = {key: "" if key == "arguments" else value for key, value in item.items()}
        if item["type"] == "message":
            empty["content"] = []
        yield event("response.output_item.added", output_index=at, item={**empty, "status": "in_progress"})
        if item["type"] == "message":
            part = item["content"][0]
            yield event("response.content_part.added", **place, content_index=0, part={**part, "text": ""})
            for piece in answer.pieces:
                yield event("response.output_text.delta", **place, content_index=0, delta=piece)
            yield event("response.output_text.done", **place, content_index=0, text=part["text"])
            yield event("response.content_part.done", **place, content_index=0, part=part)
        else:
            for half in _halves(item["arguments"]):
                yield event("response.function_call_arguments.delta", **place, delta=half)
            yield event("response.function_call_arguments.done", **place, arguments=item["arguments"])
        yield event("response.output_item.done", output_index=at, item=item)
    yield event("response.completed", response=_response(answer, items))


# --- anthropic


def _anthropic(answer: Answer) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": answer.turn.text}] if answer.turn.text else []
    for at, call in enumerate(answer.calls):
        named = {"type": "tool_use", "id": f"toolu_{answer.number}_{at}", "name": call.name}
        content.append({**named, "input": call.arguments})
    cached = answer.turn.tokens_cached
    usage = {"input_tokens": answer.tokens_in - cached, "output_tokens": answer.tokens_out}
    usage |= {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0}
    head = {"id": f"msg_{answer.number}", "type": "message", "role": "assistant", "model": answer.model}
    stop = {"stop_reason": "tool_use" if answer.calls else "end_turn", "stop_sequence": None}
    return {**head, "content": content, **stop, "usage": usage}


def _anthropic_events(answer: Answer) -> Iterator[bytes]:
    message = _anthropic(answer)

    def event(kind: str, **fields: Any) -> bytes:
        return f"event: {kind}\n".encode() + _data({"type": kind, **fields})

    start = {**message, "content": [], "stop_reason": None, "usage": {**message["usage"], "output_tokens": 1}}
    yield event("message_start", message=start)
    yield event("ping")
    for at, block in enumerate(message["content"]):
        if block["type"] == "text":
            yield event("content_block_start", index=at, content_block={"type": "text", "text": ""})
            for piece in answer.pieces:
                yield event("content_block_delta", index=at, delta={"type": "text_delta", "text": piece})
        else:
            yield event("content_block_start", index=at, content_block={**block, "input": {}})
            for half in _halves(json.dumps(block["input"])):
                yield event("content_block_delta", index=at, delta={"type": "input_json_delta", "partial_json": half})
        yield event("content_block_stop", index=at)
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield event("message_delta", delta=ended, usage={"output_tokens": answer.tokens_out})
    yield event("message_stop")


# --- gemini


def _gemini_part(answer: Answer, parts: list[dict[str, Any]], last: bool) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"role": "model", "parts": parts}, "index": 0}
    candidate |= {"finishReason": "STOP"} if last else {}
    out = answer.tokens_out if last else 1
    usage = {"promptTokenCount": answer.tokens_in, "cachedContentTokenCount": answer.turn.tokens_cached}
    usage |= {"candidatesTokenCount": out, "totalTokenCount": answer.tokens_in + out}
    return {"candidates": [candidate], "usageMetadata": usage, "modelVersion": answer.model}


def _gemini_calls(answer: Answer) -> list[dict[str, Any]]:
    return [{"functionCall": {"name": call.name, "args": call.arguments}} for call in answer.calls]


def _gemini_chunks(answer: Answer) -> Iterator[dict[str, Any]]:
    for piece in answer.pieces:
        yield _gemini_part(answer, [{"text": piece}], last=False)
    yield _gemini_part(answer, _gemini_calls(answer) or [{"text": ""}], last=True)


def _data(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def whole(conversation: Conversation, answer: Answer) -> dict[str, Any]:
    if conversation.dialect == CHAT:
        return _chat(answer)
    if conversation.dialect == RESPONSES:
        return _response(answer, _items(answer))
    if conversation.dialect == ANTHROPIC:
        return _anthropic(answer)
    text = [{"text": answer.turn.text}] if answer.turn.text else []
    return _gemini_part(answer, [*text, *_gemini_calls(answer)], last=True)


def events(conversation: Conversation, answer: Answer) -> Iterator[bytes]:
    if conversation.dialect == CHAT:
        yield from _chat_events(answer, bool((conversation.body.get("stream_options") or {}).get("include_usage")))
    elif conversation.dialect == RESPONSES:
        yield from _responses_events(answer)
    elif conversation.dialect == ANTHROPIC:
        yield from _anthropic_events(answer)
    elif "alt=sse" in conversation.query:
        for chunk in _gemini_chunks(answer):
            yield _data(chunk)[:-2] + b"\r\n\r\n"
    else:  # without alt=sse Gemini streams one JSON array
        before = b"["
        for chunk in _gemini_chunks(answer):
            yield before + json.dumps(chunk).encode()
            before = b",\r\n"
        yield b"]"


def error(dialect: str, status: int, kind: str, message: str) -> dict[str, Any]:
    if dialect == ANTHROPIC:
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "req_1"}
    if dialect == GEMINI:
        return {"error": {"code": status, "message": message, "status": kind.upper()}}
    return {"error": {"message": message, "type": kind, "param": None, "code": kind}}
