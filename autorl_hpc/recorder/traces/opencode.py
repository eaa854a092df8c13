"""Parse traces of OpenCode: `opencode run --format json`, one JSON object per line; a tool call is printed when it has ended.

`tokens.input` excludes cached tokens, `tokens.output` excludes reasoning. Sessions of subagents are not printed.
"""

from __future__ import annotations

from autorl_hpc.recorder.traces.parse import (
    Event,
    Table,
    call,
    count,
    event,
    exit_code,
    real,
    result,
    table,
    total,
    usage,
    with_fields,
    within,
)

FORMAT = "opencode"
_TYPES = ("step_start", "step_finish", "text", "reasoning", "tool_use", "error")


def knows(line: Table) -> bool:
    """Return whether a line is in this format."""
    return "sessionID" in line and line.get("type") in _TYPES


def read(line: Table) -> list[Event]:
    """Parse a line."""
    return with_fields(_line(line), session=line.get("sessionID"), wall=line.get("timestamp"))


def _line(line: Table) -> list[Event]:
    part, kind = table(line.get("part")), line["type"]
    if kind == "step_start":  # no other line marks a session's start
        return [event("session")]
    if kind in ("text", "reasoning"):
        return [event("message", chars=part.get("text"))]
    if kind == "tool_use":
        return _tool(part)
    if kind == "step_finish":
        return _step(part)
    error = table(line.get("error"))
    said = within(error, "data", "message") or error.get("message") or error.get("name") or line.get("message")
    return [event("error", text=said)]


def _tool(part: Table) -> list[Event]:
    state, call_id = table(part.get("state")), part.get("callID")
    called = call(part.get("tool"), state.get("input"), call_id=call_id)
    if state.get("status") not in ("completed", "error"):
        return [called]
    code = exit_code(within(state, "metadata", "exit"))
    failed, said = state.get("status") == "error" or bool(code), state.get("error") or state.get("output")
    began, ended = (real(within(state, "time", key), 1e14) for key in ("start", "end"))
    took_s = (ended - began) / 1000 if began is not None and ended is not None else None
    return [called, result(failed, said, call_id=call_id, exit_code=code, duration_s=took_s)]


def _step(part: Table) -> list[Event]:
    tokens = table(part.get("tokens"))
    cached = within(tokens, "cache", "read")
    tokens_in = total(tokens.get("input"), cached, within(tokens, "cache", "write"))
    out, everything = total(tokens.get("output"), tokens.get("reasoning")), count(tokens.get("total"))
    if everything is not None and tokens_in is not None and everything >= tokens_in:
        out = everything - tokens_in  # versions differ in whether output includes reasoning
    cost, call_id = part.get("cost"), part.get("id")
    found = usage(call_id=call_id, tokens_in=tokens_in, tokens_out=out, tokens_cached=cached, cost_usd=cost)
    return [*found, event("end", ok=True)] if part.get("reason") == "stop" else found
