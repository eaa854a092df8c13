"""Parse traces of Codex: `codex exec --json`, and the older protocol `{"id": ..., "msg": {...}}`, one JSON object per line.

`turn.completed` carries the thread's tokens so far, which a resumed thread continues, not those of the turn. Item ids start
again in each process, so they are unique only between two `thread.started`.
"""

from __future__ import annotations

from typing import Any

from autorl_hpc.recorder.traces.parse import (
    ParsedLine,
    Table,
    beginning,
    command,
    count,
    exit_code,
    length,
    name,
    seconds,
    table,
    tables,
)

FORMAT = "codex"
_TYPES = (
    "thread.started",
    "turn.started",
    "turn.completed",
    "turn.failed",
    "item.started",
    "item.updated",
    "item.completed",
)
_TOOLS = (
    "command_execution",
    "file_change",
    "mcp_tool_call",
    "collab_tool_call",
    "web_search",
)


def knows(line: Table) -> bool:
    """Return whether a line is in this format."""
    if "msg" in line:
        return "id" in line and isinstance(line["msg"], dict) and isinstance(line["msg"].get("type"), str)
    return line.get("type") in _TYPES or (line.get("type") == "error" and set(line) == {"type", "message"})


def read(line: Table) -> list[ParsedLine]:
    """Parse a line."""
    if isinstance(line.get("msg"), dict):
        return _message(line["msg"])
    kind = line.get("type")
    if kind == "thread.started":
        return [ParsedLine("session", session=name(line.get("thread_id")))]
    if kind in ("item.started", "item.completed"):
        return _item(table(line.get("item")), done=kind == "item.completed")
    if kind == "turn.completed":
        usage = _usage(line.get("usage"), is_total=True)
        return [*usage, ParsedLine("end", ok=True)]
    if kind == "turn.failed":
        return [ParsedLine("end", ok=False, text=beginning(table(line.get("error")).get("message")))]
    return [ParsedLine("error", text=beginning(line.get("message")))] if kind == "error" else []


def _usage(value: Any, *, is_total: bool, call_id: str | None = None) -> list[ParsedLine]:
    """Parse token counts. Input includes cached tokens, output includes reasoning."""
    usage = table(value)
    told = ParsedLine(
        "usage",
        tokens_in=count(usage.get("input_tokens")),
        tokens_out=count(usage.get("output_tokens")),
        tokens_cached=count(usage.get("cached_input_tokens")),
        is_total=is_total,
        call_id=call_id,
    )
    return [told] if told.has_figures() else []


def _item(item: Table, *, done: bool) -> list[ParsedLine]:
    kind = item.get("type")
    if kind in ("agent_message", "reasoning") and done:
        return [ParsedLine("message", chars=length(item.get("text")))]
    if kind == "error" and done:
        return [ParsedLine("error", text=beginning(item.get("message")))]
    if kind not in _TOOLS:
        return []
    tool = name(item.get("tool")) or str(kind)
    call = name(item.get("id"))
    if not done:
        return [ParsedLine("tool_call", call_id=call, tool=tool, command=_command(item))]
    code = exit_code(item.get("exit_code"))
    failed = item.get("status") in ("failed", "declined") or bool(code)
    error = table(item.get("error")).get("message") or (item.get("aggregated_output") if failed else None)
    return [
        ParsedLine(
            "tool_result",
            call_id=call,
            tool=tool,
            command=_command(item),
            exit_code=code,
            ok=not failed,
            text=beginning(error) if failed else None,
        )
    ]


def _command(item: Table) -> str | None:
    if item.get("type") == "file_change":
        return beginning(
            " ".join(f"{name(each.get('kind'))} {name(each.get('path'))}" for each in tables(item.get("changes"))[:50])
        )
    return command(None, item)


def _message(msg: Table) -> list[ParsedLine]:
    """Parse a message of the older protocol."""
    kind, call = msg.get("type"), name(msg.get("call_id"))
    if kind == "session_configured":
        return [ParsedLine("session", session=name(msg.get("session_id")), model=name(msg.get("model")))]
    if kind == "token_count":
        return _tokens(msg)
    if kind in ("agent_message", "agent_reasoning"):
        return [ParsedLine("message", chars=length(msg.get("message") or msg.get("text")))]
    if kind == "exec_command_begin":
        return [ParsedLine("tool_call", call_id=call, tool="shell", command=command(None, msg))]
    if kind == "patch_apply_begin":
        changed = " ".join(str(path) for path in list(table(msg.get("changes")))[:50])
        return [ParsedLine("tool_call", call_id=call, tool="apply_patch", command=beginning(changed))]
    if kind == "mcp_tool_call_begin":
        return [ParsedLine("tool_call", call_id=call, tool=name(table(msg.get("invocation")).get("tool")))]
    if kind in ("exec_command_end", "patch_apply_end", "mcp_tool_call_end"):
        return [_ended(msg, call)]
    if kind in ("error", "stream_error"):
        return [ParsedLine("error", text=beginning(msg.get("message")))]
    if kind == "task_complete":
        return [ParsedLine("end", ok=True, text=beginning(msg.get("last_agent_message")))]
    return [ParsedLine("end", ok=False, text=beginning(msg.get("reason")))] if kind == "turn_aborted" else []


def _tokens(msg: Table) -> list[ParsedLine]:
    """Parse token counts: of one call in early versions, later also the total, repeated whenever rate limits change."""
    info = table(msg.get("info"))
    if not info:
        return _usage(msg, is_total=False)
    so_far = table(info.get("total_token_usage"))
    at = f"at {count(so_far.get('input_tokens'))} {count(so_far.get('output_tokens'))}"
    last = _usage(info.get("last_token_usage"), is_total=False, call_id=at) if so_far else []
    return [*last, *_usage(so_far, is_total=True)]


def _ended(msg: Table, call: str | None) -> ParsedLine:
    code = exit_code(msg.get("exit_code"))
    failed = bool(code) or msg.get("success") is False or "Err" in table(msg.get("result"))
    took = table(msg.get("duration"))
    return ParsedLine(
        "tool_result",
        call_id=call,
        exit_code=code,
        ok=not failed,
        text=beginning(msg.get("stderr") or msg.get("aggregated_output")) if failed else None,
        duration_s=seconds(took.get("secs")),
    )
