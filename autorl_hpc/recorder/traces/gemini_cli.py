"""Parse traces of Gemini CLI: `--output-format stream-json` (an object per line) or `json` (one object over many lines).

Tokens come only at the end, as the process's totals; a resumed session starts again. Prompt tokens include cached ones,
candidate tokens exclude thoughts. A shell command with an exit code other than 0 counts as a success here.
"""

from __future__ import annotations

from typing import Any

from autorl_hpc.recorder.traces import parse
from autorl_hpc.recorder.traces.parse import Event, Table

FORMAT = "gemini-cli"
# by the type of a line, a field that it has
_OWN_FIELDS = {
    **{"init": "session_id", "message": "role", "tool_use": "tool_id", "tool_result": "tool_id"},
    **{"error": "severity", "result": "status"},
}


def knows(line: Table) -> bool:
    kind = line.get("type")
    if kind is None:
        return is_document(line)
    own = _OWN_FIELDS.get(kind) if isinstance(kind, str) else None
    return own is not None and own in line and "timestamp" in line and "sessionID" not in line


def is_document(value: Table) -> bool:
    stats = parse.table(value.get("stats"))
    return ("models" in stats and "tools" in stats) or ("session_id" in value and isinstance(value.get("error"), dict))


def read(line: Table) -> list[Event]:
    if line.get("type") is None:
        return parse.with_fields(_document(line), session=line.get("session_id"))
    return parse.with_fields(_line(line), wall=line.get("timestamp"))


def _line(line: Table) -> list[Event]:
    kind, call_id, said = line["type"], line.get("tool_id"), parse.within(line, "error", "message")
    if kind == "init":
        return [parse.event("session", session=line.get("session_id"), model=line.get("model"))]
    if kind == "message":
        return [parse.message(line.get("content"), "assistant" if line.get("role") == "assistant" else "user")]
    if kind == "tool_use":
        return [parse.call(line.get("tool_name"), line.get("parameters"), call_id=call_id)]
    if kind == "tool_result":
        return [parse.result(line.get("status") != "success", said or line.get("output"), call_id=call_id)]
    if kind == "error":
        return [parse.event("error", text=line.get("message"))]
    return [*_totals(parse.table(line.get("stats"))), parse.event("end", ok=line.get("status") == "success", text=said)]


def _totals(stats: Table) -> list[Event]:
    names = ("input_tokens", "output_tokens", "total_tokens")
    tokens_in, out, everything = (parse.count(stats.get(name)) for name in names)
    if tokens_in is not None and everything is not None and everything - tokens_in >= (out or 0):
        out = everything - tokens_in  # `output_tokens` excludes thoughts
    figures = {"tokens_in": tokens_in, "tokens_out": out, "tokens_cached": stats.get("cached")}
    return parse.usage(**figures, is_total=True, tool_calls=stats.get("tool_calls"), model=_only(stats))


def _document(value: Table) -> list[Event]:
    stats = parse.table(value.get("stats"))
    models = list(parse.table(stats.get("models")).values())

    def tokens(*keys: str) -> int | None:
        return parse.total(*(parse.within(each, "tokens", key) for each in models for key in keys))

    figures = parse.usage(
        model=_only(stats),
        tokens_in=tokens("prompt", "tool"),
        tokens_out=tokens("candidates", "thoughts"),
        tokens_cached=tokens("cached"),
        is_total=True,
        calls=parse.total(*(parse.within(each, "api", "totalRequests") for each in models)),
        tool_calls=parse.within(stats, "tools", "totalCalls"),
        tool_failures=parse.within(stats, "tools", "totalFail"),
    )
    said, failed = parse.within(value, "error", "message") or value.get("response"), value.get("error")
    return [parse.event("session"), *figures, parse.event("end", ok=not isinstance(failed, dict), text=said)]


def _only(stats: Table) -> Any:
    models = parse.table(stats.get("models"))
    return next(iter(models)) if len(models) == 1 else None
