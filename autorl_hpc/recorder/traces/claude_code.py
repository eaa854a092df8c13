"""Parse traces of Claude Code: `claude -p --output-format stream-json --verbose`, one JSON object per line.

A response comes in several `assistant` lines, one per content block, with the same message id and usage, whose output
tokens are not final. The `result` line has the totals of all models, including subagents. In a resumed session some
versions continue the earlier totals and some start again; the sum of the calls shows which.
"""

from __future__ import annotations

import re
from dataclasses import replace

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
    table,
    tables,
    total,
    wall,
)

FORMAT = "claude-code"
_EXIT = re.compile(r"\s{0,8}Exit code (\d{1,3})\b")
_SYNTHETIC = "<synthetic>"
"""Model name of lines that the program itself wrote, for example on an API error."""


def knows(line: Table) -> bool:
    """Return whether a line is in this format."""
    kind = line.get("type")
    if "session_id" not in line:
        return False
    if kind in ("assistant", "user"):
        return isinstance(line.get("message"), dict)
    return (kind == "system" and "subtype" in line) or (kind == "result" and "num_turns" in line)


def read(line: Table) -> list[ParsedLine]:
    """Parse a line."""
    session = name(line.get("session_id"))
    kind = line.get("type")
    if kind == "system":
        return _system(line, session)
    if kind == "assistant":
        return _assistant(line, session)
    if kind == "user":
        return _results(line, session)
    return _result(line, session) if kind == "result" else []


def _system(line: Table, session: str | None) -> list[ParsedLine]:
    if line.get("subtype") == "init":
        return [ParsedLine("session", session=session, model=name(line.get("model")))]
    if line.get("subtype") == "api_retry":
        status = line.get("error_status")
        said = beginning(line.get("error")) or "retried"
        said = f"{said} (HTTP {name(status)})" if isinstance(status, int) else said
        return [ParsedLine("error", session=session, text=said)]
    return []


def _assistant(line: Table, session: str | None) -> list[ParsedLine]:
    message = table(line.get("message"))
    found = []
    if message.get("model") != _SYNTHETIC:
        model, call_id = name(message.get("model")), name(message.get("id"))
        usage = _usage(table(message.get("usage")), session, model, call_id)
        if usage.has_figures():
            found.append(usage)
    for block in tables(message.get("content")):
        if block.get("type") == "tool_use":
            tool = name(block.get("name"))
            found.append(
                ParsedLine(
                    "tool_call",
                    session=session,
                    call_id=name(block.get("id")),
                    tool=tool,
                    command=command(tool, block.get("input")),
                )
            )
        elif block.get("type") in ("text", "thinking"):
            found.append(ParsedLine("message", session=session, chars=length(block.get(block["type"]))))
    if isinstance(line.get("error"), str):
        found.append(ParsedLine("error", session=session, text=beginning(line["error"])))
    return found


def _usage(
    usage: Table, session: str | None = None, model: str | None = None, call_id: str | None = None
) -> ParsedLine:
    """Parse the usage of one call. `input_tokens` excludes cached tokens; cache reads and writes are added."""
    cached = count(usage.get("cache_read_input_tokens"))
    return ParsedLine(
        "usage",
        tokens_in=total(count(usage.get("input_tokens")), cached, count(usage.get("cache_creation_input_tokens"))),
        tokens_out=count(usage.get("output_tokens")),
        tokens_cached=cached,
        session=session,
        model=model,
        call_id=call_id,
    )


def _results(line: Table, session: str | None) -> list[ParsedLine]:
    if line.get("isReplay") is True:
        return []
    found = []
    for block in tables(table(line.get("message")).get("content")):
        if block.get("type") != "tool_result":
            continue
        failed = block.get("is_error") is True
        said = _text_of(block.get("content"))
        code = _EXIT.match(said) if failed else None
        found.append(
            ParsedLine(
                "tool_result",
                session=session,
                call_id=name(block.get("tool_use_id")),
                ok=not failed,
                exit_code=exit_code(int(code[1])) if code else None,
                text=beginning(said) if failed else None,
                wall=wall(line.get("timestamp")),
            )
        )
    return found


def _text_of(content: object) -> str:
    if isinstance(content, str):
        return content
    return next((block["text"] for block in tables(content) if isinstance(block.get("text"), str)), "")


def _result(line: Table, session: str | None) -> list[ParsedLine]:
    by_model = [each for each in table(line.get("modelUsage")).values() if isinstance(each, dict)]
    figures = _of_models(by_model) if by_model else _usage(table(line.get("usage")))
    usage = replace(figures, session=session, cost_usd=dollars(line.get("total_cost_usd")), is_total=True)
    failed = line.get("is_error") is True or (name(line.get("subtype")) or "").startswith("error")
    errors = [each for each in line["errors"] if isinstance(each, str)] if isinstance(line.get("errors"), list) else []
    said = line.get("result") or "; ".join(errors[:20]) or line.get("subtype")
    end = ParsedLine("end", session=session, ok=not failed, text=beginning(said))
    return [usage, end] if usage.has_figures() else [end]


def _of_models(models: list[Table]) -> ParsedLine:
    cached = total(*(count(each.get("cacheReadInputTokens")) for each in models))
    fresh = (count(each.get(key)) for each in models for key in ("inputTokens", "cacheCreationInputTokens"))
    return ParsedLine(
        "usage",
        tokens_in=total(cached, *fresh),
        tokens_out=total(*(count(each.get("outputTokens")) for each in models)),
        tokens_cached=cached,
    )
