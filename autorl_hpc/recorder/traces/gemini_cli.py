"""Parse traces of Gemini CLI: `--output-format stream-json` (an object per line) or `json` (one object over many lines).

Tokens come only at the end, as the process's totals; a resumed session starts again. Prompt tokens include cached ones,
candidate tokens exclude thoughts. A shell command with an exit code other than 0 counts as a success here.
"""

from __future__ import annotations

from autorl_hpc.recorder.traces.parse import (
    ParsedLine,
    Table,
    beginning,
    command,
    count,
    length,
    name,
    table,
    total,
    wall,
)

FORMAT = "gemini-cli"


def knows(line: Table) -> bool:
    """Return whether a line is in this format."""
    kind = line.get("type")
    if kind is None:
        return is_document(line)
    if "timestamp" not in line or "sessionID" in line:
        return False
    return (
        (kind == "init" and "session_id" in line)
        or (kind == "message" and "role" in line)
        or (kind == "tool_use" and "tool_id" in line)
        or (kind == "tool_result" and "tool_id" in line)
        or (kind == "error" and "severity" in line)
        or (kind == "result" and "status" in line)
    )


def is_document(value: Table) -> bool:
    """Return whether it is the one object of `--output-format json`."""
    stats = table(value.get("stats"))
    return ("models" in stats and "tools" in stats) or ("session_id" in value and isinstance(value.get("error"), dict))


def read(line: Table) -> list[ParsedLine]:
    """Parse a line, or the one object."""
    kind, at = line.get("type"), wall(line.get("timestamp"))
    if kind is None:
        return _document(line)
    if kind == "init":
        return [ParsedLine("session", session=name(line.get("session_id")), model=name(line.get("model")), wall=at)]
    if kind == "message":
        return (
            [ParsedLine("message", chars=length(line.get("content")), wall=at)]
            if line.get("role") == "assistant"
            else []
        )
    if kind == "tool_use":
        tool = name(line.get("tool_name"))
        does = command(tool, line.get("parameters"))
        return [ParsedLine("tool_call", call_id=name(line.get("tool_id")), tool=tool, command=does, wall=at)]
    if kind == "tool_result":
        ok = line.get("status") == "success"
        said = None if ok else beginning(table(line.get("error")).get("message") or line.get("output"))
        return [ParsedLine("tool_result", call_id=name(line.get("tool_id")), ok=ok, text=said, wall=at)]
    if kind == "error":
        return [ParsedLine("error", text=beginning(line.get("message")), wall=at)]
    return _result(line, at) if kind == "result" else []


def _result(line: Table, at: float | None) -> list[ParsedLine]:
    stats = table(line.get("stats"))
    told_in, out, everything = (count(stats.get(key)) for key in ("input_tokens", "output_tokens", "total_tokens"))
    if told_in is not None and everything is not None and everything - told_in >= (out or 0):
        out = everything - told_in  # `output_tokens` excludes thoughts
    usage = ParsedLine(
        "usage",
        tokens_in=told_in,
        tokens_out=out,
        tokens_cached=count(stats.get("cached")),
        is_total=True,
        tool_calls=count(stats.get("tool_calls")),
        model=_only(table(stats.get("models"))),
        wall=at,
    )
    end = ParsedLine("end", ok=line.get("status") == "success", text=_error(line), wall=at)
    return [usage, end] if usage.has_figures() else [end]


def _document(value: Table) -> list[ParsedLine]:
    if not is_document(value):
        return []
    session = name(value.get("session_id"))
    stats = table(value.get("stats"))
    models = table(stats.get("models"))
    tokens = [table(table(each).get("tokens")) for each in models.values()]
    tools = table(stats.get("tools"))
    usage = ParsedLine(
        "usage",
        session=session,
        model=_only(models),
        tokens_in=total(*(count(each.get(key)) for each in tokens for key in ("prompt", "tool"))),
        tokens_out=total(*(count(each.get(key)) for each in tokens for key in ("candidates", "thoughts"))),
        tokens_cached=total(*(count(each.get("cached")) for each in tokens)),
        is_total=True,
        calls=total(*(count(table(table(each).get("api")).get("totalRequests")) for each in models.values())),
        tool_calls=count(tools.get("totalCalls")),
        tool_failures=count(tools.get("totalFail")),
    )
    failed = isinstance(value.get("error"), dict)
    end = ParsedLine("end", session=session, ok=not failed, text=_error(value) or beginning(value.get("response")))
    begun = ParsedLine("session", session=session)
    return [begun, usage, end] if usage.has_figures() else [begun, end]


def _only(models: Table) -> str | None:
    return name(next(iter(models))) if len(models) == 1 else None


def _error(line: Table) -> str | None:
    return beginning(table(line.get("error")).get("message"))
