"""Parse traces of OpenCode: `opencode run --format json`, one JSON object per line; a tool call is printed when it has ended.

`tokens.input` excludes cached tokens, `tokens.output` excludes reasoning. Sessions of subagents are not printed.
"""

from __future__ import annotations

from autorl_hpc.recorder.traces import parse
from autorl_hpc.recorder.traces.parse import Event, Table

FORMAT = "opencode"
_TYPES = ("step_start", "step_finish", "text", "reasoning", "tool_use", "error")


def knows(line: Table) -> bool:
    return "sessionID" in line and line.get("type") in _TYPES


def read(line: Table) -> list[Event]:
    return parse.with_fields(_line(line), session=line.get("sessionID"), wall=line.get("timestamp"))


def _line(line: Table) -> list[Event]:
    part, kind = parse.table(line.get("part")), line["type"]
    if kind == "step_start":  # no other line marks a session's start
        return [parse.event("session")]
    if kind in ("text", "reasoning"):
        return [parse.message(part.get("text"), "assistant" if kind == "text" else "thought")]
    if kind == "tool_use":
        return _tool(part)
    if kind == "step_finish":
        return _step(part)
    error = parse.table(line.get("error"))
    said = parse.within(error, "data", "message") or error.get("message") or error.get("name") or line.get("message")
    return [parse.event("error", text=said)]


def _tool(part: Table) -> list[Event]:
    state, call_id = parse.table(part.get("state")), part.get("callID")
    called = parse.call(part.get("tool"), state.get("input"), call_id=call_id)
    if state.get("status") not in ("completed", "error"):
        return [called]
    code = parse.exit_code(parse.within(state, "metadata", "exit"))
    failed, said = state.get("status") == "error" or bool(code), state.get("error") or state.get("output")
    began, ended = (parse.real(parse.within(state, "time", key), 1e14) for key in ("start", "end"))
    took_s = (ended - began) / 1000 if began is not None and ended is not None else None
    return [called, parse.result(failed, said, call_id=call_id, exit_code=code, duration_s=took_s)]


def _step(part: Table) -> list[Event]:
    tokens = parse.table(part.get("tokens"))
    cached = parse.within(tokens, "cache", "read")
    tokens_in = parse.total(tokens.get("input"), cached, parse.within(tokens, "cache", "write"))
    out, everything = parse.total(tokens.get("output"), tokens.get("reasoning")), parse.count(tokens.get("total"))
    if everything is not None and tokens_in is not None and everything >= tokens_in:
        out = everything - tokens_in  # versions differ in whether output includes reasoning
    cost, call_id = part.get("cost"), part.get("id")
    found = parse.usage(call_id=call_id, tokens_in=tokens_in, tokens_out=out, tokens_cached=cached, cost_usd=cost)
    return [*found, parse.event("end", ok=True)] if part.get("reason") == "stop" else found
