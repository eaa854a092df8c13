"""Parse traces of OpenCode: `opencode run --format json`, one JSON object per line; a tool call is printed when it has ended.

`tokens.input` excludes cached tokens, `tokens.output` excludes reasoning. Sessions of subagents are not printed.
"""

from __future__ import annotations

from autorl_hpc.recorder.traces.parse import (
    ParsedLine,
    Table,
    beginning,
    command,
    count,
    dollars,
    exit_code,
    length,
    name,
    real,
    seconds,
    table,
    total,
    wall,
)

FORMAT = "opencode"
_TYPES = (
    "step_start",
    "step_finish",
    "text",
    "reasoning",
    "tool_use",
    "error",
)


def knows(line: Table) -> bool:
    """Return whether a line is in this format."""
    return "sessionID" in line and line.get("type") in _TYPES


def read(line: Table) -> list[ParsedLine]:
    """Parse a line."""
    part, kind = table(line.get("part")), line.get("type")
    session, at = name(line.get("sessionID")), wall(line.get("timestamp"))
    if kind == "step_start":  # no other line marks a session's start
        return [ParsedLine("session", session=session, wall=at)]
    if kind in ("text", "reasoning"):
        return [ParsedLine("message", session=session, chars=length(part.get("text")), wall=at)]
    if kind == "tool_use":
        return _tool(part, session, at)
    if kind == "step_finish":
        return _step(part, session, at)
    if kind == "error":
        error = table(line.get("error"))
        said = (
            table(error.get("data")).get("message") or error.get("message") or error.get("name") or line.get("message")
        )
        return [ParsedLine("error", session=session, text=beginning(said), wall=at)]
    return []


def _tool(part: Table, session: str | None, at: float | None) -> list[ParsedLine]:
    state, tool, call = table(part.get("state")), name(part.get("tool")), name(part.get("callID"))
    does = command(tool, state.get("input"))
    called = ParsedLine("tool_call", session=session, call_id=call, tool=tool, command=does, wall=at)
    if state.get("status") not in ("completed", "error"):
        return [called]
    code = exit_code(table(state.get("metadata")).get("exit"))
    failed = state.get("status") == "error" or bool(code)
    times = table(state.get("time"))
    began, ended = real(times.get("start"), 1e14), real(times.get("end"), 1e14)
    result = ParsedLine(
        "tool_result",
        session=session,
        call_id=call,
        exit_code=code,
        ok=not failed,
        text=beginning(state.get("error") or state.get("output")) if failed else None,
        duration_s=seconds(ended - began, 1000) if began is not None and ended is not None else None,
        wall=at,
    )
    return [called, result]


def _step(part: Table, session: str | None, at: float | None) -> list[ParsedLine]:
    tokens = table(part.get("tokens"))
    cache = table(tokens.get("cache"))
    cached = count(cache.get("read"))
    told_in = total(count(tokens.get("input")), cached, count(cache.get("write")))
    out = total(count(tokens.get("output")), count(tokens.get("reasoning")))
    everything = count(tokens.get("total"))
    if everything is not None and told_in is not None and everything >= told_in:
        out = everything - told_in  # versions differ in whether output includes reasoning
    usage = ParsedLine(
        "usage",
        session=session,
        call_id=name(part.get("id")),
        tokens_in=told_in,
        tokens_out=out,
        tokens_cached=cached,
        cost_usd=dollars(part.get("cost")),
        wall=at,
    )
    found = [usage] if usage.has_figures() else []
    return [*found, ParsedLine("end", session=session, ok=True, wall=at)] if part.get("reason") == "stop" else found
