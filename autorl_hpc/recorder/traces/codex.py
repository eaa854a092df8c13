"""Parse traces of Codex: `codex exec --json`, one JSON object per line.

`turn.completed` carries the thread's tokens so far, which a resumed thread continues, not those of the turn. Item ids start
again in each process, so they are unique only between two `thread.started`. Versions before 0.44 print `{"id": ..., "msg": {"type": ...}}`
(codex-rs/protocol), where `token_count` has the session's tokens so far in `info`, or those of one answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from autorl_hpc.recorder.traces import parse
from autorl_hpc.recorder.traces.parse import Event, Table

FORMAT = "codex"
_TYPES = (
    *("thread.started", "turn.started", "turn.completed", "turn.failed"),
    *("item.started", "item.updated", "item.completed"),
)
_INPUTS = ("command", "arguments", "changes", "query", "prompt")
_TOOLS = ("command_execution", "file_change", "mcp_tool_call", "collab_tool_call", "web_search")


def knows(line: Table) -> bool:
    if "type" not in line:
        return "id" in line and parse.within(line, "msg", "type") in _OLD
    return line.get("type") in _TYPES or (line.get("type") == "error" and set(line) == {"type", "message"})


def read(line: Table) -> list[Event]:
    if "type" not in line:
        return _OLD[line["msg"]["type"]](line["msg"])
    kind = line.get("type")
    if kind == "thread.started":
        return [parse.event("session", session=line.get("thread_id"))]
    if kind in ("item.started", "item.completed"):
        return _item(parse.table(line.get("item")), done=kind == "item.completed")
    if kind == "turn.completed":
        return [*_tokens(line.get("usage"), is_total=True), parse.event("end", ok=True)]
    if kind == "turn.failed":
        return [parse.event("end", ok=False, text=parse.within(line, "error", "message"))]
    return [parse.event("error", text=line.get("message"))] if kind == "error" else []


def _tokens(usage: object, *, is_total: bool) -> list[Event]:
    """Return the tokens: input includes cached ones, output includes reasoning."""
    fields = {"tokens_in": "input_tokens", "tokens_out": "output_tokens", "tokens_cached": "cached_input_tokens"}
    return parse.usage(**{field: parse.within(usage, key) for field, key in fields.items()}, is_total=is_total)


def _item(item: Table, *, done: bool) -> list[Event]:
    kind = item.get("type")
    if kind in ("agent_message", "reasoning") and done:
        return [parse.message(item.get("text"), "assistant" if kind == "agent_message" else "thought")]
    if kind == "error" and done:
        return [parse.event("error", text=item.get("message"))]
    if kind not in _TOOLS:
        return []
    made = parse.call(parse.name(item.get("tool")) or kind, item, call_id=item.get("id"))
    made["input"] = {key: item[key] for key in _INPUTS if key in item}
    if kind == "file_change":
        made |= _changes((e.get("kind"), e.get("path")) for e in parse.tables(item.get("changes")))
    if not done:
        return [made]
    code = parse.exit_code(item.get("exit_code"))
    failed = item.get("status") in ("failed", "declined") or bool(code)
    answer = parse.text_of(parse.within(item, "result", "content"))
    said = parse.within(item, "error", "message") or item.get("aggregated_output") or answer
    return [{**made, **parse.result(failed, said, exit_code=code)}]


def _changes(changes: Iterable[tuple[object, object]]) -> Table:
    command = " ".join(f"{parse.name(kind)} {parse.name(path)}" for kind, path in islice(changes, 50))
    return {"command": parse.beginning(command)} if command else {}


# --- before 0.44


def _message(role: str, field: str) -> Callable[[Table], list[Event]]:
    return lambda msg: [parse.message(msg.get(field), role)]


def _begun(msg: Table) -> list[Event]:
    called = parse.table(msg.get("invocation"))
    tool = called.get("tool") or _BEGINS[msg["type"]]
    given: Any = called.get("arguments") if called else {key: msg[key] for key in _INPUTS if key in msg}
    if isinstance(msg.get("command"), list):
        given["command"] = " ".join(map(str, msg["command"]))
    made = parse.call(tool, given, call_id=msg.get("call_id"))
    files = parse.table(msg.get("changes")).items()  # {path: {"add": ...}} or {path: {"type": "add"}}
    return [
        made
        | _changes((parse.table(how).get("type") or next(iter(parse.table(how)), None), path) for path, how in files)
    ]


def _ended(msg: Table) -> list[Event]:
    code, taken, result = (
        parse.exit_code(msg.get("exit_code")),
        parse.table(msg.get("duration")),
        parse.table(msg.get("result")),
    )
    said = msg.get("aggregated_output") or f"{msg.get('stdout') or ''}{msg.get('stderr') or ''}"
    said = said or result.get("Err") or parse.text_of(parse.within(result, "Ok", "content"))
    failed = (
        bool(code) or msg.get("success") is False or "Err" in result or parse.within(result, "Ok", "isError") is True
    )
    seconds = [parse.real(taken.get(part), 1e10) for part in ("secs", "nanos")]
    took_s = None if None in seconds else (seconds[0] or 0.0) + (seconds[1] or 0.0) / 1e9
    return [parse.result(failed, said, call_id=msg.get("call_id"), exit_code=code, duration_s=took_s)]


def _counted(msg: Table) -> list[Event]:
    total = parse.within(msg, "info", "total_token_usage")
    return _tokens(msg if total is None else total, is_total=total is not None)


_BEGINS = {
    **{"exec_command_begin": "command_execution", "patch_apply_begin": "file_change"},
    **{"mcp_tool_call_begin": "mcp_tool_call", "web_search_begin": "web_search"},
}
_OLD: dict[Any, Callable[[Table], list[Event]]] = {
    **dict.fromkeys(_BEGINS, _begun),
    **dict.fromkeys((name.replace("begin", "end") for name in _BEGINS), _ended),
    **dict.fromkeys(("error", "stream_error"), lambda msg: [parse.event("error", text=msg.get("message"))]),
    "session_configured": lambda msg: [parse.event("session", session=msg.get("session_id"), model=msg.get("model"))],
    "task_started": lambda msg: [],
    "agent_message": _message("assistant", "message"),
    "agent_reasoning": _message("thought", "text"),
    "user_message": _message("user", "message"),
    "token_count": _counted,
    "task_complete": lambda msg: [parse.event("end", ok=True)],
    "turn_aborted": lambda msg: [parse.event("end", ok=False, text=msg.get("reason"))],
}
