"""Parse traces of Codex: `codex exec --json`, and the older protocol `{"id": ..., "msg": {...}}`, one JSON object per line.

`turn.completed` carries the thread's tokens so far, which a resumed thread continues, not those of the turn. Item ids start
again in each process, so they are unique only between two `thread.started`.
"""

from __future__ import annotations

from typing import Any

from autorl_hpc.recorder.traces import parse
from autorl_hpc.recorder.traces.parse import Event, Table

FORMAT = "codex"
_TYPES = (
    *("thread.started", "turn.started", "turn.completed", "turn.failed"),
    *("item.started", "item.updated", "item.completed"),
)
_TOOLS = ("command_execution", "file_change", "mcp_tool_call", "collab_tool_call", "web_search")


def knows(line: Table) -> bool:
    """Return whether a line is in this format."""
    if "msg" in line:
        return "id" in line and isinstance(parse.within(line, "msg", "type"), str)
    return line.get("type") in _TYPES or (line.get("type") == "error" and set(line) == {"type", "message"})


def read(line: Table) -> list[Event]:
    """Parse a line."""
    if isinstance(line.get("msg"), dict):
        return _message(line["msg"])
    kind = line.get("type")
    if kind == "thread.started":
        return [parse.event("session", session=line.get("thread_id"))]
    if kind in ("item.started", "item.completed"):
        return _item(parse.table(line.get("item")), done=kind == "item.completed")
    if kind == "turn.completed":
        return [*_usage(line.get("usage"), is_total=True), parse.event("end", ok=True)]
    if kind == "turn.failed":
        return [parse.event("end", ok=False, text=parse.within(line, "error", "message"))]
    return [parse.event("error", text=line.get("message"))] if kind == "error" else []


def _usage(tokens: Any, **more: Any) -> list[Event]:
    """Parse token counts. Input includes cached tokens, output includes reasoning."""
    fields = {"tokens_in": "input_tokens", "tokens_out": "output_tokens", "tokens_cached": "cached_input_tokens"}
    return parse.usage(**{field: parse.within(tokens, key) for field, key in fields.items()}, **more)


def _item(item: Table, *, done: bool) -> list[Event]:
    kind = item.get("type")
    if kind in ("agent_message", "reasoning") and done:
        return [parse.event("message", chars=item.get("text"))]
    if kind == "error" and done:
        return [parse.event("error", text=item.get("message"))]
    if kind not in _TOOLS:
        return []
    made = parse.call(parse.name(item.get("tool")) or kind, item, call_id=item.get("id"))
    if kind == "file_change":
        changes = parse.tables(item.get("changes"))[:50]
        made |= parse.event(
            "tool_call", command=" ".join(f"{parse.name(e.get('kind'))} {parse.name(e.get('path'))}" for e in changes)
        )
    if not done:
        return [made]
    code = parse.exit_code(item.get("exit_code"))
    failed = item.get("status") in ("failed", "declined") or bool(code)
    said = parse.within(item, "error", "message") or item.get("aggregated_output")
    return [{**made, **parse.result(failed, said, exit_code=code)}]


_BEGINS = {"exec_command_begin": "shell", "patch_apply_begin": "apply_patch", "mcp_tool_call_begin": None}
_ENDS = ("exec_command_end", "patch_apply_end", "mcp_tool_call_end")


def _message(msg: Table) -> list[Event]:
    """Parse a message of the older protocol."""
    kind = msg["type"]
    if kind == "session_configured":
        return [parse.event("session", session=msg.get("session_id"), model=msg.get("model"))]
    if kind == "token_count":
        return _tokens(msg)
    if kind in ("agent_message", "agent_reasoning"):
        return [parse.event("message", chars=msg.get("message") or msg.get("text"))]
    if kind in _BEGINS:
        tool = _BEGINS[kind] or parse.within(msg, "invocation", "tool")
        changed = {"command": list(parse.table(msg.get("changes")))[:50]} if kind == "patch_apply_begin" else msg
        return [parse.call(tool, changed, call_id=msg.get("call_id"))]
    if kind in _ENDS:
        return [_ended(msg)]
    if kind in ("error", "stream_error"):
        return [parse.event("error", text=msg.get("message"))]
    if kind == "task_complete":
        return [parse.event("end", ok=True, text=msg.get("last_agent_message"))]
    return [parse.event("end", ok=False, text=msg.get("reason"))] if kind == "turn_aborted" else []


def _tokens(msg: Table) -> list[Event]:
    """Parse token counts: of one call in early versions, later also the total, repeated whenever rate limits change."""
    info = parse.table(msg.get("info"))
    if not info:
        return _usage(msg)
    so_far = parse.table(info.get("total_token_usage"))
    at = f"at {parse.count(so_far.get('input_tokens'))} {parse.count(so_far.get('output_tokens'))}"
    last = _usage(info.get("last_token_usage"), call_id=at) if so_far else []
    return [*last, *_usage(so_far, is_total=True)]


def _ended(msg: Table) -> Event:
    code = parse.exit_code(msg.get("exit_code"))
    failed = bool(code) or msg.get("success") is False or "Err" in parse.table(msg.get("result"))
    said = msg.get("stderr") or msg.get("aggregated_output")
    took = parse.within(msg, "duration", "secs")
    return parse.result(failed, said, call_id=msg.get("call_id"), exit_code=code, duration_s=took)
